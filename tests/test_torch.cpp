// Modules of PyTorch behind the Model concept: a Llama as a module keeps every promise and gives the text of plain
// decoding; what a module does wrong is named. The examples of docs/adapting-an-engine.md that need torch are here.

#include <ATen/Parallel.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <utility>
#include <vector>

#include "engines/gguf.hpp"
#include "engines/llama_engine.hpp"
#include "engines/tokenizer.hpp"
#include "tiny_llama.hpp"
#include "torch_llama.hpp"

#include "lookahead/adapters/torch.hpp"
#include "lookahead/lookahead.hpp"
#include "lookahead/testing/conformance.hpp"
#include "lookahead/testing/plain_decode.hpp"

#undef CHECK  // glog's, which Debian's torch logs with
#include <doctest/doctest.h>

namespace {

using namespace lookahead;
using namespace lookahead::testing;
using examples::TorchLlama;
using Token = std::int32_t;
using Tokens = std::vector<Token>;

// [torch_module]
struct OneHeadImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& tokens, const torch::Tensor& positions, const torch::Tensor& mask,
                        const torch::Tensor& wanted, TorchCache& cache) {
    const torch::Tensor x = words(tokens) + places(positions);  // [rows, 32]
    // What each layer appends, it gets back with the context in front of it: [heads, context + rows, 32].
    const auto [keys, values] = cache.append(key(x).unsqueeze(0), value(x).unsqueeze(0));
    const torch::Tensor scores = torch::matmul(query(x), keys[0].t()) + mask;
    const torch::Tensor y = x + torch::matmul(torch::softmax(scores, 1), values[0]);
    return output(y.index_select(0, wanted));  // [wanted, 60]
  }

  torch::nn::Embedding words = register_module("words", torch::nn::Embedding(60, 32));
  torch::nn::Embedding places = register_module("places", torch::nn::Embedding(128, 32));
  torch::nn::Linear query = register_module("query", torch::nn::Linear(32, 32));
  torch::nn::Linear key = register_module("key", torch::nn::Linear(32, 32));
  torch::nn::Linear value = register_module("value", torch::nn::Linear(32, 32));
  torch::nn::Linear output = register_module("output", torch::nn::Linear(32, 60));
};
TORCH_MODULE(OneHead);
// []

// Any function as a module.
using Function = std::function<torch::Tensor(const torch::Tensor&, const torch::Tensor&, const torch::Tensor&,
                                             const torch::Tensor&, TorchCache&)>;

// What a function returns, with one layer of 2 heads of 4 numbers in the cache; vocabulary 5.
const TorchOptions small = {.vocabulary = 5, .layers = 1, .heads = 2, .head_size = 4, .longest = 20, .rows = 6};

double gap(std::span<const float> logits) {
  std::vector<float> sorted(logits.begin(), logits.end());
  std::ranges::partial_sort(sorted, sorted.begin() + 2, std::greater<>{});
  return double{sorted[0]} - double{sorted[1]};
}

// The distance of the two best logits behind a text.
template <class M>
double gap_behind(M& model, const Tokens& text) {
  model.truncate(0);
  model.prefill(std::span(text).first(text.size() - 1));
  TokenTreeStorage<Token, 1> tree;
  tree.begin(static_cast<int>(text.size()) - 1, &text.back(), 1);
  tree.want(0);
  model.forward(tree.view());
  return gap(model.logits(0));
}

// Equal, or apart from a near tie on.
template <class M>
void check_same(M& model, const Tokens& prompt, const Tokens& got, const Tokens& expected) {
  REQUIRE(got.size() == expected.size());
  const auto fork = std::ranges::mismatch(got, expected).in1;
  if (fork == got.end()) return;
  Tokens before = prompt;
  before.insert(before.end(), got.begin(), fork);
  CAPTURE(fork - got.begin());
  CHECK(gap_behind(model, before) < 1e-3);
}

}  // namespace

TEST_CASE("a Llama as a module keeps every promise") {
  at::set_num_threads(1);
  const engines::GgufFile file(tiny_llama({.context = 128, .tied = false}));
  const TorchLlama module(file);
  const ConformanceOptions<Token> options{.trees = 3, .rows = 12, .tokens = 16};
  const ConformanceReport report =
      check_conformance([&] { return TorchModel(module, module->options(128, 20)); }, options);
  CHECK_MESSAGE(report.conforms(), report.text());
  CHECK(report.exactness.rows > 0);
  CHECK(report.exactness.largest < 1e-3);

  SUBCASE("with a causal mask instead") {
    const Function blind = [&](const auto& tokens, const auto& positions, const auto& mask, const auto& wanted,
                               TorchCache& cache) {
      const auto hidden = torch::full_like(mask, -std::numeric_limits<float>::infinity());
      return module->forward(tokens, positions, hidden.triu(mask.size(1) - mask.size(0) + 1), wanted, cache);
    };
    CHECK(check_conformance([&] { return TorchModel(blind, module->options(128, 20)); }, options).broke(Promise::mask));
  }
  SUBCASE("without positions") {
    const Function lost = [&](const auto& tokens, const auto& positions, const auto& mask, const auto& wanted,
                              TorchCache& cache) {
      const auto rows = torch::arange(tokens.size(0), positions.options());
      return module->forward(tokens, rows + (mask.size(1) - tokens.size(0)), mask, wanted, cache);
    };
    CHECK(check_conformance([&] { return TorchModel(lost, module->options(128, 20)); }, options)
              .broke(Promise::positions));
  }
}

TEST_CASE("the bundled model as a module gives plain decoding's text, and our engine's") {
  at::set_num_threads(1);
  const engines::GgufFile file(std::filesystem::path("examples/models/cpython-6m-q8_0.gguf"));
  const engines::Tokenizer tokenizer(file);
  const TorchLlama module(file);
  TorchModel model(module, module->options(256, 32));
  engines::LlamaEngine engine(file, {.context = 256, .threads = 1, .weights = engines::WeightType::f32});
  for (const char* text : {"def mean(data):\n    \"\"\"", "import os\nimport sys\n\n\n"}) {
    const Tokens prompt = tokenizer.encode(text, tokenizer.add_bos());
    constexpr std::size_t tokens = 24;
    const Tokens plain = plain_decode(model, std::span(prompt), tokens);
    Tokens got;
    Decoder decoder(model, {.rows = 24, .cost = StepCost::none()});
    const Generation done = decoder.generate(prompt, tokens, [&](Token token) { got.push_back(token); });
    CHECK(done.steps < tokens);
    check_same(model, prompt, got, plain);
    check_same(model, prompt, plain, plain_decode(engine, std::span(prompt), tokens));
  }
}

TEST_CASE("the best tokens, lowest first on ties, whatever the type") {
  // Few values, so that most tie; 0 and -0 are equal.
  std::mt19937 random(1);
  const float values[] = {-0.0F, 0.0F, -1.5F, 2.0F, -1e30F, 3e-38F};
  std::vector<float> numbers(4 * 50);
  for (float& x : numbers) x = values[random() % std::size(values)];
  for (const auto type : {torch::kFloat32, torch::kBFloat16, torch::kFloat64}) {
    torch::Tensor mask_place;
    const Function fixed = [&](const auto& tokens, const auto&, const auto& mask, const auto& wanted,
                               TorchCache& cache) {
      const auto rows = torch::zeros({1, tokens.size(0), 1});
      cache.append(rows, rows);
      mask_place = mask;
      return torch::from_blob(numbers.data(), {4, 50}, torch::kFloat32).index_select(0, wanted).to(type);
    };
    TorchModel model(fixed, {.vocabulary = 50, .layers = 1, .heads = 1, .head_size = 1, .longest = 20, .rows = 8});
    TokenTreeStorage<Token, 8> tree;
    const Token tokens[] = {1, 2, 3, 4};
    tree.begin(0, tokens, 4);
    for (const int row : {1, 2, 3}) tree.want(row);
    model.forward(tree.view());
    const void* const place = mask_place.data_ptr();
    for (const int row : {1, 2, 3}) {
      const std::span<const float> logits = model.logits(row);
      std::vector<Token> expected(50);
      for (Token t = 0; t < 50; ++t) expected[static_cast<std::size_t>(t)] = t;
      std::ranges::stable_sort(expected, [&](Token a, Token b) {
        return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)];
      });
      CHECK(model.next_token(row) == expected[0]);
      for (const std::size_t count : {1U, 3U, 8U, 9U, 50U, 60U}) {
        std::vector<Token> best(count);
        CHECK(model.top_tokens(row, best) == std::min<std::size_t>(count, 50));
        best.resize(std::min<std::size_t>(count, 50));
        CHECK(std::ranges::equal(best, std::span(expected).first(best.size())));
      }
    }
    for (const int row : {-1, 0, 4}) {
      CHECK_THROWS_AS((void)model.next_token(row), InvalidArgument);
      CHECK_THROWS_AS((void)model.logits(row), InvalidArgument);
    }
    CHECK(model.commit(std::array{0, 1, 2, 3}) == 4);
    CHECK_THROWS_AS((void)model.next_token(3), InvalidArgument);
    // The mask lies in memory that the model has had from the start.
    tree.begin(4, tokens, 2);
    model.forward(tree.view());
    CHECK(mask_place.data_ptr() == place);
    CHECK(mask_place.sizes() == torch::IntArrayRef({2, 6}));
  }
}

TEST_CASE("what a module does wrong is named, and the context stays") {
  const auto rows_of = [](std::int64_t n, torch::TensorOptions options = {}) {
    return torch::ones({2, n, 4}, options);
  };
  Function function;
  TorchModel model([&](const auto& tokens, const auto& positions, const auto& mask, const auto& wanted,
                       TorchCache& cache) { return function(tokens, positions, mask, wanted, cache); },
                   small);
  const auto good = [&](const auto& tokens, const auto&, const auto&, const auto& wanted, TorchCache& cache) {
    cache.append(rows_of(tokens.size(0)), rows_of(tokens.size(0)));
    return torch::ones({wanted.size(0), 5});
  };
  TokenTreeStorage<Token, 8> tree;
  const Token first = 1;
  const auto run = [&](Function with) {
    function = std::move(with);
    model.forward(tree.view());
  };
  function = good;
  model.prefill(Tokens{1, 2, 3, 4, 0, 1, 2});  // in two chunks
  CHECK(model.context_size() == 7);
  tree.begin(7, &first, 1);
  tree.add(0, 2);
  tree.want(0);
  tree.want(1);

  const std::pair<torch::Tensor, const char*> results[] = {
      {torch::ones({2, 4}), "[2, 4] Float cpu; they must be [2, 5]"},
      {torch::ones({1, 2, 5}), "[1, 2, 5] Float"},
      {torch::ones({3, 5}), "[3, 5] Float"},
      {torch::ones({2, 5}, torch::kInt64), "[2, 5] Long"},
      {torch::ones({2, 5}, torch::kMeta), "[2, 5] Float meta"},
      {torch::Tensor(), "undefined"}};
  for (const auto& [result, says] : results)
    CHECK_THROWS_WITH_AS(run([&](const auto& tokens, const auto&, const auto&, const auto&, TorchCache& cache) {
                           cache.append(rows_of(tokens.size(0)), rows_of(tokens.size(0)));
                           return result;
                         }),
                         doctest::Contains(says), ContractViolation);
  const std::pair<torch::Tensor, const char*> appended[] = {
      {torch::ones({1, 2, 4}), "of layer 0 are [1, 2, 4] Float cpu, but the cache takes [2, 2, 4] Float cpu"},
      {rows_of(3), "[2, 3, 4]"},
      {rows_of(2, torch::kFloat64), "[2, 2, 4] Double cpu"},
      {rows_of(2, torch::kMeta), "[2, 2, 4] Float meta"},
      {torch::Tensor(), "undefined"}};
  for (const auto& [rows, says] : appended) {
    for (const bool keys : {true, false})
      CHECK_THROWS_WITH_AS(
          run([&](const auto&, const auto&, const auto&, const auto&, TorchCache& cache) {
            cache.append(keys ? rows : rows_of(2), keys ? rows_of(2) : rows);
            return torch::ones({2, 5});
          }),
          doctest::Contains((std::string(keys ? "the keys" : "the values") + " of layer 0 are ").c_str()),
          ContractViolation);
    CHECK_THROWS_WITH_AS(run([&](const auto&, const auto&, const auto&, const auto&, TorchCache& cache) {
                           cache.append(rows, rows);
                           return torch::ones({2, 5});
                         }),
                         doctest::Contains(says), ContractViolation);
  }
  CHECK_THROWS_WITH_AS(run([&](const auto&...) {
                         return torch::ones({2, 5});
                       }),
                       doctest::Contains("cached 0 of its 1 layers"), ContractViolation);
  CHECK_THROWS_WITH_AS(
      run([&](const auto& tokens, const auto& positions, const auto& mask, const auto& wanted, TorchCache& cache) {
        good(tokens, positions, mask, wanted, cache);
        return good(tokens, positions, mask, wanted, cache);
      }),
      doctest::Contains("more than its 1 layers"), ContractViolation);
  CHECK_THROWS_AS(model.commit(std::array{0}), InvalidArgument);
  CHECK(model.context_size() == 7);

  function = good;
  model.forward(tree.view());
  for (const std::vector<std::int32_t>& path : {std::vector<std::int32_t>{}, {1}, {0, 2}, {0, -1}, {0, 1, 1}})
    CHECK_THROWS_AS(model.commit(path), InvalidArgument);
  CHECK(model.commit(std::array{0, 1}) == 2);
  tree.begin(8, &first, 1);
  CHECK_THROWS_AS(model.forward(tree.view()), InvalidArgument);
  const Token outside = 5;
  tree.begin(9, &outside, 1);
  CHECK_THROWS_WITH_AS(model.forward(tree.view()), doctest::Contains("token 5 is outside the vocabulary of 5"),
                       InvalidArgument);
  tree.begin(9, nullptr, 0);
  CHECK_THROWS_AS(model.forward(tree.view()), InvalidArgument);
  const Token seven[] = {0, 1, 2, 3, 4, 0, 1};
  tree.begin(9, seven, 7);
  CHECK_THROWS_AS(model.forward(tree.view()), OutOfRoom);
  CHECK_THROWS_AS(model.prefill(Tokens(12, 1)), OutOfRoom);
  CHECK_THROWS_AS(model.prefill(Tokens{1, -1}), InvalidArgument);
  CHECK_THROWS_AS(model.truncate(10), InvalidArgument);
  CHECK(model.context_size() == 9);
  CHECK(model.free_slots() == 11);
}

TEST_CASE("options that cannot work are refused") {
  const Function none = [](const auto&...) { return torch::Tensor(); };
  const auto refused = [&](auto change) {
    TorchOptions options = small;
    change(options);
    CHECK_THROWS_AS(TorchModel(none, options), InvalidArgument);
  };
  refused([](TorchOptions& o) { o.vocabulary = 0; });
  refused([](TorchOptions& o) { o.vocabulary = std::int64_t{1} << 31; });
  refused([](TorchOptions& o) { o.layers = 0; });
  refused([](TorchOptions& o) { o.heads = -1; });
  refused([](TorchOptions& o) { o.head_size = 0; });
  refused([](TorchOptions& o) { o.longest = 0; });
  refused([](TorchOptions& o) { o.rows = 0; });
  refused([](TorchOptions& o) { o.tensors = torch::kInt64; });
  TorchOptions short_text = small;
  short_text.rows = 64;
  CHECK(TorchModel(none, short_text).max_rows() == 20);
}

TEST_CASE("the module of the page") {
  torch::manual_seed(1);
  std::vector<Token> text;
  // [torch]
  const OneHead module;
  TorchModel model(module, {.vocabulary = 60, .layers = 1, .heads = 1, .head_size = 32, .longest = 128});
  Decoder decoder(model);
  decoder.generate(std::vector<Token>{7, 8, 9}, 40, [&](Token token) { text.push_back(token); });
  // []
  const Tokens prompt = {7, 8, 9};
  check_same(model, prompt, text, plain_decode(model, std::span(prompt), 40));
}
