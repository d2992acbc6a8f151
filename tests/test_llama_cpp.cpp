// llama.cpp behind the Model concept: small random models through the conformance kit, SmolLM2 against llama.cpp's own
// greedy loop, and every refusal.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <doctest/doctest.h>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cases.hpp"
#include "engines/gguf_writer.hpp"
#include "files.hpp"
#include "tiny_llama.hpp"

#include "lookahead/adapters/llama_cpp.hpp"
#include "lookahead/lookahead.hpp"
#include "lookahead/testing/conformance.hpp"

namespace {

using namespace lookahead;
using namespace lookahead::testing;
using Token = llama_token;
using Tokens = std::vector<Token>;

struct FreeModel {
  void operator()(llama_model* model) const { llama_model_free(model); }
};
using LoadedModel = std::unique_ptr<llama_model, FreeModel>;

LoadedModel load(const std::filesystem::path& path, bool vocab_only = false) {
  static const bool ready = [] {
    llama_log_set(
        [](ggml_log_level level, const char* text, void*) {
          if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
        },
        nullptr);
    llama_backend_init();
    return true;
  }();
  CHECK(ready);
  llama_model_params params = llama_model_default_params();
  params.vocab_only = vocab_only;
  return LoadedModel(llama_model_load_from_file(path.c_str(), params));
}

LoadedModel load(const std::vector<std::byte>& file, bool vocab_only = false) {
  const TempFolder folder;
  return load(folder.file("model.gguf", file), vocab_only);
}

// Two layers of Gemma 3, which see the last `window` tokens alone.
std::vector<std::byte> tiny_gemma3(int window) {
  constexpr std::uint32_t width = 32, head = 16, heads = 2, feed = 48, vocabulary = 300, layers = 2;
  engines::GgufWriter file;
  file.text("general.architecture", "gemma3");
  const auto put = [&](const char* key, std::uint32_t value) { file.integer(std::string("gemma3.") + key, value); };
  put("context_length", 1024);
  put("embedding_length", width);
  put("block_count", layers);
  put("feed_forward_length", feed);
  put("attention.head_count", heads);
  put("attention.head_count_kv", 1);
  put("attention.key_length", head);
  put("attention.value_length", head);
  put("attention.sliding_window", static_cast<std::uint32_t>(window));
  file.number("gemma3.attention.layer_norm_rms_epsilon", 1e-5F);
  add_tokenizer(file, static_cast<int>(vocabulary));
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto tensor = [&](const std::string& name, std::vector<std::size_t> shape, float mean, float scale) {
    std::vector<float> numbers(shape[0] * (shape.size() > 1 ? shape[1] : 1));
    for (float& x : numbers) x = mean + scale * normal(random);
    const auto* const bytes = reinterpret_cast<const std::byte*>(numbers.data());
    file.tensor(name, engines::WeightType::f32, shape, {bytes, bytes + 4 * numbers.size()});
  };
  const auto matrix = [&](const std::string& name, std::size_t columns, std::size_t rows) {
    tensor(name, {columns, rows}, 0, 1.5F / std::sqrt(static_cast<float>(columns)));
  };
  const auto norm = [&](const std::string& name, std::size_t size) { tensor(name, {size}, 1, 0.2F); };
  matrix("token_embd.weight", width, vocabulary);
  norm("output_norm.weight", width);
  for (std::uint32_t i = 0; i < layers; ++i) {
    const std::string block = "blk." + std::to_string(i) + ".";
    norm(block + "attn_norm.weight", width);
    matrix(block + "attn_q.weight", width, head * heads);
    matrix(block + "attn_k.weight", width, head);
    matrix(block + "attn_v.weight", width, head);
    matrix(block + "attn_output.weight", head * heads, width);
    norm(block + "attn_q_norm.weight", head);
    norm(block + "attn_k_norm.weight", head);
    norm(block + "post_attention_norm.weight", width);
    norm(block + "ffn_norm.weight", width);
    matrix(block + "ffn_gate.weight", width, feed);
    matrix(block + "ffn_up.weight", width, feed);
    matrix(block + "ffn_down.weight", feed, width);
    norm(block + "post_ffw_norm.weight", width);
  }
  return file.finish();
}

// A file that says no more than which architecture it is of.
std::vector<std::byte> file_of(const char* architecture) {
  engines::GgufWriter file;
  file.text("general.architecture", architecture);
  add_tokenizer(file, 300);
  return file.finish();
}

llama_context_params params_of(std::uint32_t context) {
  llama_context_params params = LlamaCpp::default_params();
  params.n_ctx = context;
  params.n_ubatch = 48;
  params.n_threads = params.n_threads_batch = 1;
  return params;
}

double gap(std::span<const float> logits) {
  std::vector<float> sorted(logits.begin(), logits.end());
  std::ranges::partial_sort(sorted, sorted.begin() + 2, std::greater<>{});
  return double{sorted[0]} - double{sorted[1]};
}

// What llama.cpp's own loop says, and how near each choice was.
std::pair<Tokens, std::vector<double>> own_greedy(llama_model* model, Tokens prompt, std::size_t tokens) {
  const std::unique_ptr<llama_context, decltype(&llama_free)> context(llama_init_from_model(model, params_of(512)),
                                                                      &llama_free);
  const std::unique_ptr<llama_sampler, decltype(&llama_sampler_free)> sampler(llama_sampler_init_greedy(),
                                                                              &llama_sampler_free);
  const auto vocabulary = static_cast<std::size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model)));
  std::pair<Tokens, std::vector<double>> text;
  llama_batch batch = llama_batch_get_one(prompt.data(), static_cast<std::int32_t>(prompt.size()));
  Token next = 0;
  while (text.first.size() < tokens) {
    REQUIRE(llama_decode(context.get(), batch) == 0);
    next = llama_sampler_sample(sampler.get(), context.get(), -1);
    text.second.push_back(gap({llama_get_logits_ith(context.get(), -1), vocabulary}));
    text.first.push_back(next);
    batch = llama_batch_get_one(&next, 1);
  }
  return text;
}

Tokens encode(const llama_model* model, const std::string& text) {
  Tokens tokens(text.size() + 8);
  const int n = llama_tokenize(llama_model_get_vocab(model), text.data(), static_cast<std::int32_t>(text.size()),
                               tokens.data(), static_cast<std::int32_t>(tokens.size()), true, true);
  REQUIRE(n > 0);
  tokens.resize(static_cast<std::size_t>(n));
  return tokens;
}

}  // namespace

TEST_CASE("small models keep every promise, with a full attention and with a sliding window") {
  const auto check = [](const LoadedModel& model) {
    REQUIRE(model);
    const ConformanceReport report =
        check_conformance([&] { return LlamaCpp(model.get(), params_of(256), 16); }, {.trees = 4, .rows = 16});
    CHECK_MESSAGE(report.conforms(), report.text());
    CHECK(report.exactness.largest < 0.01);
  };
  check(load(tiny_llama({.context = 512})));
  const LoadedModel windowed = load(tiny_gemma3(8));
  REQUIRE(llama_model_n_swa(windowed.get()) == 8);
  check(windowed);
}

TEST_CASE("a sliding window comes back after a long text was cut") {
  const LoadedModel model = load(tiny_gemma3(8));
  LlamaCpp engine(model.get(), params_of(256), 8);
  Tokens text(250);
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<Token>((i * i + 7 * i) % 300);
  engine.prefill(text);
  for (const std::size_t n : {200U, 60U, 20U}) {
    engine.truncate(n);
    LlamaCpp fresh(model.get(), params_of(256), 8);
    fresh.prefill(std::span(text).first(n));
    TokenTreeStorage<Token, 1> tree;
    const Token token = 5;
    tree.begin(static_cast<int>(n), &token, 1);
    tree.want(0);
    engine.forward(tree.view());
    fresh.forward(tree.view());
    float largest = 0;
    for (std::size_t t = 0; t < engine.vocabulary(); ++t)
      largest = std::max(largest, std::abs(engine.logits(0)[t] - fresh.logits(0)[t]));
    CHECK(largest < 0.01F);
  }
}

TEST_CASE("models and options that cannot work are refused") {
  CHECK_THROWS_WITH_AS(LlamaCpp(nullptr), doctest::Contains("could not load"), InvalidArgument);
  const struct {
    const char *architecture, *says;
  } refused[] = {{"mamba", "it is recurrent"},
                 {"rwkv7", "it is recurrent"},
                 {"jamba", "recurrent layers"},
                 {"t5", "it has an encoder"},
                 {"llada", "diffusion"}};
  for (const auto& kind : refused) {
    const LoadedModel model = load(file_of(kind.architecture), true);
    REQUIRE_MESSAGE(model, kind.architecture);
    CHECK_THROWS_WITH_AS(LlamaCpp(model.get()), doctest::Contains(kind.says), InvalidArgument);
  }
  const LoadedModel no_weights = load(file_of("llama"), true);
  REQUIRE(no_weights);
  CHECK_THROWS_AS(LlamaCpp(no_weights.get()), InvalidArgument);
  const LoadedModel model = load(tiny_llama());
  for (const int rows : {0, -1, 257}) CHECK_THROWS_AS(LlamaCpp(model.get(), params_of(256), rows), InvalidArgument);
  CHECK_NOTHROW(LlamaCpp(model.get(), params_of(256), 256));
}

TEST_CASE("what llama.cpp would abort on, or misunderstand, is refused and changes nothing") {
  const LoadedModel model = load(tiny_llama());
  LlamaCpp engine(model.get(), params_of(256), 4);
  CHECK(engine.free_slots() == 256);
  const Tokens text = {4, 5, 6, 7, 8};
  engine.prefill(text);
  TokenTreeStorage<Token, 8> tree;
  const auto start = [&](int context, std::initializer_list<Token> pending) {
    tree.begin(context, pending.begin(), static_cast<int>(pending.size()));
  };
  start(5, {1, 2, 3, 4, 5});
  CHECK_THROWS_AS(engine.forward(tree.view()), OutOfRoom);
  start(4, {1});
  CHECK_THROWS_AS(engine.forward(tree.view()), InvalidArgument);
  start(5, {300});
  CHECK_THROWS_AS(engine.forward(tree.view()), InvalidArgument);
  start(5, {-1});
  CHECK_THROWS_AS(engine.forward(tree.view()), InvalidArgument);
  start(5, {});
  CHECK_THROWS_AS(engine.forward(tree.view()), InvalidArgument);
  CHECK_THROWS_AS(engine.prefill(Tokens(252, 1)), OutOfRoom);
  CHECK_THROWS_AS(engine.prefill(Tokens{1, 300}), InvalidArgument);
  CHECK_THROWS_AS(engine.truncate(6), InvalidArgument);
  CHECK_THROWS_AS(engine.commit(std::array<std::int32_t, 1>{0}), InvalidArgument);
  start(5, {1});
  tree.add(0, 2);
  tree.add(0, 3);
  tree.add(1, 4);
  tree.want(0);
  tree.want(3);
  engine.forward(tree.view());
  CHECK(engine.logits(3).size() == 300);
  for (const int row : {-1, 1, 4}) CHECK_THROWS_AS((void)engine.logits(row), InvalidArgument);
  for (const std::vector<std::int32_t>& path : {std::vector<std::int32_t>{}, {1}, {0, 3}, {0, 1, 2}, {0, 4}, {0, -1}})
    CHECK_THROWS_AS(engine.commit(path), InvalidArgument);
  CHECK(engine.commit(std::array<std::int32_t, 3>{0, 1, 3}) == 3);
  CHECK(engine.context_size() == 8);
  CHECK_THROWS_AS((void)engine.logits(3), InvalidArgument);
  engine.truncate(0);
  CHECK(engine.free_slots() == 256);
}

TEST_CASE("SmolLM2 gives the text of llama.cpp's own greedy loop, or forks at a near tie") {
  std::FILE* const out = popen("examples/models/fetch.sh", "r");
  REQUIRE(out != nullptr);
  std::string path;
  for (int c = std::fgetc(out); c != EOF && c != '\n'; c = std::fgetc(out)) path += static_cast<char>(c);
  if (pclose(out) != 0) std::exit(77);
  const LoadedModel model = load(path);
  REQUIRE(model);
  std::vector<const char*> prompts = {
      "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\n    >>> fibonacci(10)\n    55",
      "The three laws of motion are:\n\n1.",
      "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
      "<|im_start|>user\nCount from 1 to 20.<|im_end|>\n<|im_start|>assistant\n",
      "import os\nimport sys\n\n\ndef main():\n"};
  if (cases(100'000) < 100'000) prompts.resize(2);  // the same code runs, only slower
  constexpr std::size_t tokens = 16;
  LlamaCpp engine(model.get(), params_of(512), 16);
  Decoder decoder(engine, {.cost = StepCost::none()});
  std::size_t steps = 0;
  for (const char* text : prompts) {
    const Tokens prompt = encode(model.get(), text);
    const auto [expected, gaps] = own_greedy(model.get(), prompt, tokens);
    Tokens got;
    steps += decoder.generate(prompt, tokens, [&](Token token) { got.push_back(token); }).steps;
    REQUIRE(got.size() == tokens);
    const auto fork = static_cast<std::size_t>(std::ranges::mismatch(got, expected).in1 - got.begin());
    CAPTURE(std::string(text));
    CAPTURE(fork);
    CHECK((fork == tokens || gaps[fork] < 0.05));
    if (fork < tokens) MESSAGE("fork at token " << fork << ", gap " << gaps[fork] << ", prompt: " << text);
  }
  CHECK(steps < prompts.size() * tokens);
}
