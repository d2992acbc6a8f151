// A step takes nothing from the heap, in any mode; neither does a request, once its decoder stands. Where a text
// outgrows what was foreseen, a step may, and may fail.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "no_alloc.hpp"

#include "lookahead/decoder.hpp"
#include "lookahead/testing/oracle_model.hpp"
#include "lookahead/testing/plain_decode.hpp"

namespace {

using namespace lookahead;
using lookahead::testing::OracleModel;
using lookahead::testing::OracleOptions;
using lookahead::testing::Reads;

using Token = std::int32_t;

constexpr std::array<Token, 8> prompt{3, 1, 4, 1, 5, 9, 2, 6};
constexpr std::array<Token, 40> more{};

constexpr Shape shapes[] = {{},
                            {0, 2, 0},
                            {7, 5, 0},
                            {7, 5, 7},
                            {7, 2, 0, ShapeMode::growth, true},
                            {3, 4, 5, ShapeMode::growth, true},
                            {0, 5, 7, ShapeMode::published},
                            Shape::published()};

OracleOptions repetitive() {
  OracleOptions options;
  options.vocabulary = 50;
  options.repetition = 0.97;
  options.capacity = 30000;
  return options;
}

}  // namespace

TEST_CASE("plan, resolve, accept, abandon, apply, append, rewind, fork: no allocation") {
  using Step = Lookahead<7, 5, 7>;
  OracleModel<Token> model(repetitive());
  NGramPool<Token> pool(4096);
  const auto step = std::make_unique<Step>();
  const auto tree = std::make_unique<Step::Tree>();
  std::size_t tokens = 0;
  std::vector<Token> text(prompt.begin(), prompt.end());
  text.reserve(40000);

  const std::size_t before = allocation_count();
  model.prefill(std::span(prompt).first(prompt.size() - 1));
  step->start(pool, prompt, 1);
  for (std::size_t i = 0; i < 800; ++i) {
    const Limits limits{.rows = i % 11 == 0 ? 1 : 100, .tokens_left = 100};
    const auto plan = [&] { step->plan(pool, shapes[i / 10 % std::size(shapes)], limits, *tree); };
    plan();
    if (i % 13 == 0) {
      step->abandon();
      plan();
    }
    model.forward(tree->view());
    auto proposal = step->resolve([&](int row) { return model.next_token(row); },
                                  [&](int row, std::span<Token> out) { return model.top_tokens(row, out); },
                                  [](Token) { return false; });
    if (i % 7 == 0) proposal = step->accept(1);
    tokens += proposal.tokens.size();
    text.insert(text.end(), proposal.tokens.begin(), proposal.tokens.end());
    step->apply(pool, model.commit(proposal.path));
    if (i % 50 == 0) {
      const Step copy = step->fork();
      *step = copy;
      const std::size_t gained = step->append(pool, std::span(more).first(3));
      REQUIRE(gained == 0);
      text.insert(text.end(), more.begin(), more.begin() + 3);
      step->rewind(step->context_size(), text);
    }
    if (i == 400) pool.reset();
  }
  CHECK(allocation_count() == before);
  CHECK(tokens > 1000);
}

TEST_CASE_TEMPLATE("a decoder allocates at construction only", M, OracleModel<Token>,
                   OracleModel<Token, Reads::next_token>, OracleModel<Token, Reads::top_tokens>,
                   OracleModel<Token, Reads::logits>) {
  M model(repetitive());
  DecoderOptions<Token> options;
  options.cost = lookahead::StepCost::none();
  options.rows = 60;
  options.end_tokens = {49, 48};
  Decoder<M, 7, 5, 7> decoder(model, options);
  std::array<Token, 4000> text;
  std::size_t count = 0, steps = 0;
  const auto sink = [&](std::span<const Token> block) {
    std::ranges::copy(block, text.begin() + static_cast<std::ptrdiff_t>(count));
    count += block.size();
  };
  decoder.generate(prompt, 1, sink);  // the oracle's own tables of logits come with the first read
  count = 0;

  const std::size_t before = allocation_count();
  for (const Shape& shape : shapes) {
    decoder.set_shape(shape);
    decoder.start(prompt);
    for (int i = 0; i < 50; ++i, ++steps) decoder.step(10, sink);
    decoder.append(more);
    steps += decoder.run(50, sink).steps;
  }
  CHECK(allocation_count() == before);
  CHECK(count > 400);
  CHECK(steps > 0);

  M copy = model.fork();
  auto fork = decoder.fork(copy);
  count = 0;
  const std::size_t forked = allocation_count();
  fork.run(200, sink);
  CHECK(allocation_count() == forked);
  CHECK(count > 0);
}

TEST_CASE("a step that finds no memory for its tokens changes nothing") {
  // A text that outgrows what its model had room for at the start.
  struct Growing : OracleModel<Token> {
    using OracleModel<Token>::OracleModel;
    bool grown = false;
    [[nodiscard]] std::size_t free_slots() const {
      return grown ? OracleModel<Token>::free_slots() : std::min<std::size_t>(OracleModel<Token>::free_slots(), 10);
    }
  };
  Growing model(repetitive());
  OracleModel<Token> plain(repetitive());
  const std::vector<Token> expected = lookahead::testing::plain_decode(plain, std::span(prompt), 300);
  Decoder<Growing, 7, 5, 7> decoder(model, {.cost = lookahead::StepCost::none()});
  decoder.start(prompt);
  model.grown = true;
  std::vector<Token> text;
  text.reserve(1000);
  const auto sink = [&](std::span<const Token> block) { text.insert(text.end(), block.begin(), block.end()); };
  int thrown = 0;
  while (text.size() < 300) {
    try {
      const FailAllocations all(0);
      decoder.run(300 - text.size(), sink);
    } catch (const std::bad_alloc&) {
      ++thrown;
      decoder.step(300 - text.size(), sink);
    }
  }
  CHECK(thrown > 0);
  CHECK(text == expected);
}
