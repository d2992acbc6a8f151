// A function as a model: it is given what a row sees and where it stands, and keeps every promise of the concept.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <new>
#include <span>
#include <vector>

#include "no_alloc.hpp"

#include "lookahead/adapters/callable.hpp"
#include "lookahead/lookahead.hpp"
#include "lookahead/testing/conformance.hpp"
#include "lookahead/testing/plain_decode.hpp"

namespace {

using namespace lookahead;
using namespace lookahead::testing;
using Token = std::int32_t;
constexpr std::size_t vocabulary = 40;

// One attention head over random features of tokens and positions, in float as a real model.
struct Attention {
  bool use_mask = true, use_positions = true;

  static float feature(std::uint64_t what, std::size_t i) {
    std::uint64_t x = what * 0x9E3779B97F4A7C15U + i * 0xD1B54A32D192ED03U + 1;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x ^= x >> 31;
    return static_cast<float>(x >> 40) * 0x1p-23F - 1;
  }

  std::vector<float> operator()(std::span<const Token> tokens, std::span<const std::int32_t> positions,
                                std::span<const float> mask) const {
    const std::size_t n = tokens.size();
    std::vector<float> logits(n * vocabulary);
    for (std::size_t row = 0; row < n; ++row) {
      double total = 0;
      std::vector<double> sum(vocabulary);
      for (std::size_t c = 0; c < n; ++c) {
        const float bias = use_mask ? mask[row * n + c] : c <= row ? 0.0F : mask[row * n + c];
        if (std::isinf(bias)) continue;
        const std::size_t distance = use_positions ? static_cast<std::size_t>(positions[row] - positions[c]) : row - c;
        const auto token = static_cast<std::uint64_t>(tokens[c]);
        const double weight = std::exp(2 * feature(token * 1000 + distance, 77));
        total += weight;
        for (std::size_t t = 0; t < vocabulary; ++t) sum[t] += weight * 4 * feature(token * 3000 + distance, t);
      }
      for (std::size_t t = 0; t < vocabulary; ++t) logits[row * vocabulary + t] = static_cast<float>(sum[t] / total);
    }
    return logits;
  }
};

}  // namespace

TEST_CASE("a function of tokens, positions and a mask keeps every promise") {
  const ConformanceReport report = check_conformance([] { return CallableModel(Attention{}, vocabulary, 96); },
                                                     {.trees = 3, .rows = 12, .tokens = 16});
  CHECK_MESSAGE(report.bit_identical(), report.text());
}

TEST_CASE("a function that ignores the mask, or the positions, is found out") {
  const auto run = [](const Attention& function) {
    return check_conformance([&] { return CallableModel(function, vocabulary, 96); },
                             {.trees = 3, .rows = 12, .tokens = 16});
  };
  CHECK(run({.use_mask = false}).broke(Promise::mask));
  CHECK(run({.use_positions = false}).broke(Promise::positions));
}

TEST_CASE("fewer calls, the same text") {
  std::size_t calls = 0;
  const auto sums = [&](std::span<const Token> tokens, std::span<const std::int32_t>, std::span<const float> mask) {
    ++calls;
    const std::size_t n = tokens.size();
    std::vector<float> logits(n * 7);
    for (std::size_t row = 0; row < n; ++row) {
      Token before = 0;  // the last that the row sees besides itself
      for (std::size_t c = 0; c < row; ++c)
        if (mask[row * n + c] == 0) before = tokens[c];
      logits[row * 7 + static_cast<std::size_t>((before + tokens[row]) % 7)] = 1;
    }
    return logits;
  };
  CallableModel model(sums, 7, 200);
  const std::vector<Token> prompt = {0, 1};
  const std::vector<Token> expected = plain_decode<decltype(model)>(model, prompt, 100);
  CHECK(calls == 100);
  calls = 0;
  std::vector<Token> text;
  Decoder decoder(model, {.cost = lookahead::StepCost::none()});
  decoder.generate(prompt, 100, [&](Token token) { text.push_back(token); });
  CHECK(text == expected);
  CHECK(calls < 40);
}

TEST_CASE("a commit that finds no memory leaves the context as it was") {
  const auto zeros = [](std::span<const Token> tokens, auto, auto) { return std::vector<float>(tokens.size() * 7); };
  bool failed = false;
  for (std::size_t length = 0; length < 20; ++length) {  // at every fill of the vector behind it
    CallableModel model(zeros, 7, 64);
    const std::vector<Token> one = {3};  // one by one, so that there is room for some more, but not for all
    for (std::size_t i = 0; i < length; ++i) model.prefill(one);
    TokenTreeStorage<Token, 8> tree;
    const std::vector<Token> pending = {1, 2, 3, 4, 5, 6};
    tree.begin(static_cast<int>(length), pending.data(), 6);
    model.forward(tree.view());
    const std::vector<std::int32_t> path = {0, 1, 2, 3, 4, 5};
    bool thrown = false;
    {
      const FailAllocations none(0);
      try {
        model.commit(path);
      } catch (const std::bad_alloc&) {
        thrown = true;
      }
    }
    failed = failed || thrown;
    CHECK(model.context_size() == length + (thrown ? 0 : 6));
    if (thrown) CHECK(model.commit(path) == 6);
  }
  CHECK(failed);
}

TEST_CASE("wrong sizes are refused") {
  const auto none = [](auto, auto, auto) { return std::vector<float>(3); };
  CHECK_THROWS_AS(CallableModel(none, 0, 10), InvalidArgument);
  CHECK_THROWS_AS((CallableModel<decltype(none), std::int8_t>(none, 129, 10)), InvalidArgument);
  CHECK_NOTHROW((CallableModel<decltype(none), std::int8_t>(none, 128, 10)));
  CHECK_THROWS_AS(CallableModel(none, 5, 0), InvalidArgument);
  CHECK_THROWS_AS(CallableModel(none, 5, 32'769), InvalidArgument);
  CallableModel model(none, 5, 10);
  model.prefill(std::vector<Token>{1, 2});
  TokenTreeStorage<Token, 1> tree;
  const Token token = 3;
  tree.begin(2, &token, 1);
  CHECK_THROWS_WITH_AS(model.forward(tree.view()), doctest::Contains("3 logits for 3 rows and a vocabulary of 5"),
                       ContractViolation);
  CHECK_THROWS_AS((void)model.logits(0), InvalidArgument);
  CHECK_THROWS_AS(model.commit(std::vector<std::int32_t>{0}), InvalidArgument);
  CHECK_THROWS_AS(model.truncate(3), InvalidArgument);
  CHECK_THROWS_AS(model.prefill(std::vector<Token>(9)), OutOfRoom);
  CHECK(model.context_size() == 2);
}
