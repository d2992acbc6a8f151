#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <doctest/doctest.h>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engines/llama_engine.hpp"
#include "engines/tokenizer.hpp"
#include "no_alloc.hpp"
#include "tiny_llama.hpp"

#include "lookahead/errors.hpp"

namespace {

using namespace lookahead;
using namespace lookahead::engines;
using lookahead::testing::tiny_llama;
using lookahead::testing::TinyLlama;
using Token = std::int32_t;

static_assert(Model<LlamaEngine> && LogitsModel<LlamaEngine> && TopTokensModel<LlamaEngine> &&
              GreedyModel<LlamaEngine> && ForkableModel<LlamaEngine>);

const char* const bundled = "examples/models/cpython-6m-q8_0.gguf";

constexpr int most_rows = 128;
using Storage = TokenTreeStorage<Token, most_rows>;

int below(std::mt19937& random, int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); }

std::vector<Token> random_tokens(std::mt19937& random, int n, int vocabulary) {
  std::vector<Token> out(static_cast<std::size_t>(n));
  for (Token& t : out) t = below(random, vocabulary);
  return out;
}

// A tree of any shape: between a chain and a star, with a pending chain of 1 to 4 rows and random wanted rows.
void random_tree(std::mt19937& random, int context, int rows, int vocabulary, Storage& tree) {
  const std::vector<Token> pending = random_tokens(random, std::min(rows, 1 + below(random, 4)), vocabulary);
  tree.begin(context, pending.data(), static_cast<int>(pending.size()));
  const int reach = 1 + below(random, most_rows);  // small: deep trees
  while (tree.rows < rows) {
    const int parent = std::max(tree.root, tree.rows - 1 - below(random, reach));
    const Token token = below(random, vocabulary);
    if (tree.view().child(parent, token) < 0) tree.add(parent, token);
  }
  for (int r = 0; r < rows; ++r)
    if (below(random, 3) > 0 || r == rows - 1) tree.want(r);
}

std::vector<int> path_to(const TokenTree<Token>& tree, int row) {
  std::vector<int> out;
  for (int r = row; r >= 0; r = tree.parents()[static_cast<std::size_t>(r)]) out.push_back(r);
  std::reverse(out.begin(), out.end());
  return out;
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

// One row at a time, each committed: plain decoding.
std::vector<float> step(LlamaEngine& engine, Token token) {
  static TokenTreeStorage<Token, 1> tree;
  tree.begin(static_cast<int>(engine.context_size()), &token, 1);
  tree.want(0);
  engine.forward(tree.view());
  const std::span<const float> logits = engine.logits(0);
  std::vector<float> out(logits.begin(), logits.end());
  const std::int32_t path = 0;
  engine.commit(std::span(&path, 1));
  return out;
}

// Checks every wanted row of a tree against its path, evaluated row by row; the plain engine is left as it was.
void check_rows(LlamaEngine& engine, const TokenTree<Token>& tree, LlamaEngine& plain) {
  const std::size_t context = plain.context_size();
  std::vector<int> done;  // the path that `plain` holds
  for (const int row : tree.wanted()) {
    const std::vector<int> path = path_to(tree, row);
    std::size_t common = 0;
    while (common < done.size() && common + 1 < path.size() && done[common] == path[common]) ++common;
    plain.truncate(context + common);
    std::vector<float> expected;
    for (std::size_t i = common; i < path.size(); ++i)
      expected = step(plain, tree.tokens()[static_cast<std::size_t>(path[i])]);
    done = path;
    REQUIRE(same_bits(engine.logits(row), expected));
    REQUIRE(engine.next_token(row) ==
            std::max_element(expected.begin(), expected.end()) - expected.begin());  // the first of the largest
  }
  plain.truncate(context);
}

void check_invariance(const GgufFile& file, const Kernels* kernels, int threads, int steps, unsigned seed) {
  LlamaEngine engine(file, {.context = 250, .max_rows = most_rows, .threads = threads, .kernels = kernels});
  LlamaEngine plain(file, {.context = 250, .max_rows = 1, .threads = 1, .kernels = kernels});
  const int vocabulary = static_cast<int>(engine.vocabulary());
  std::mt19937 random(seed);
  std::vector<Token> text = random_tokens(random, 1 + below(random, 60), vocabulary);
  engine.prefill(text);
  for (const Token t : text) step(plain, t);
  static Storage tree;
  for (int i = 0; i < steps; ++i) {
    const int most = std::min(most_rows, static_cast<int>(engine.free_slots()));
    const int rows = i % 3 == 0 ? 1 + below(random, std::min(4, most)) : 1 + below(random, most);
    random_tree(random, static_cast<int>(text.size()), rows, vocabulary, tree);
    engine.forward(tree.view());
    check_rows(engine, tree.view(), plain);

    std::vector<int> path = path_to(tree.view(), below(random, rows));
    while (static_cast<int>(path.size()) <= tree.root) path.push_back(static_cast<int>(path.size()));
    CHECK(engine.commit(path) == path.size());
    for (const int r : path) {
      text.push_back(tree.token[r]);
      step(plain, text.back());
    }
    CHECK(engine.context_size() == text.size());
    if (i % 4 == 3) {
      const std::size_t keep = text.size() - static_cast<std::size_t>(below(random, static_cast<int>(text.size())));
      engine.truncate(keep);
      plain.truncate(keep);
      text.resize(keep);
    }
    if (engine.free_slots() < 8) {
      engine.truncate(5);
      plain.truncate(5);
      text.resize(5);
    }
  }
  // What trees and commits left in the cache is what a prefill of the whole text leaves.
  LlamaEngine fresh(file, {.context = 250, .max_rows = 7, .threads = threads, .kernels = kernels});
  fresh.prefill(text);
  LlamaEngine copy = engine.fork();
  const std::vector<float> expected = step(plain, 3);
  CHECK(same_bits(step(fresh, 3), expected));
  CHECK(same_bits(step(copy, 3), expected));
  CHECK(same_bits(step(engine, 3), expected));
}

// The thread sanitizer is after races between tasks, which every set of kernels and every type share.
#if defined(__SANITIZE_THREAD__)
constexpr std::size_t most_sets = 1, most_types = 1;
#else
constexpr std::size_t most_sets = 99, most_types = 99;
#endif

constexpr WeightType all_types[] = {WeightType::f32,  WeightType::f16,  WeightType::bf16,
                                    WeightType::q8_0, WeightType::q4_0, WeightType::q4_1};

template <class T>
std::span<T> first(std::span<T> all, std::size_t most) {
  return all.first(std::min(all.size(), most));
}

TEST_CASE("logits are the same to the last bit in any tree, any thread count, after any commits") {
  for (const Kernels* kernels : first(available_kernels(), most_sets))
    for (const WeightType type : first(std::span<const WeightType>(all_types), most_types)) {
      INFO(kernels->name, " ", weight_type_name(type));
      for (const TinyLlama& shape :
           {TinyLlama{.type = type},
            TinyLlama{.width = 32, .heads = 6, .key_heads = 1, .head = 32, .feed = 800, .type = type, .tied = false}}) {
        const GgufFile file(tiny_llama(shape));
        for (int threads = 1; threads <= 4; ++threads)
          check_invariance(file, kernels, threads, 6, 7U + static_cast<unsigned>(threads));
      }
    }
}

TEST_CASE("sizes that fill no vector and no block") {
  for (const Kernels* kernels : first(available_kernels(), most_sets))
    for (const WeightType type : first(std::span<const WeightType>(all_types).first(3), most_types)) {
      const GgufFile file(tiny_llama({.vocabulary = 301,
                                      .width = 36,
                                      .layers = 3,
                                      .heads = 3,
                                      .key_heads = 3,
                                      .head = 12,
                                      .feed = 43,
                                      .type = type,
                                      .tied = false}));
      for (const int threads : {1, 2, 3, 33})  // 33: more than there are tasks
        check_invariance(file, kernels, threads, 6, static_cast<unsigned>(threads));
    }
}

// An independent forward pass in double precision: the logits behind the last token of a text.
std::vector<double> reference_logits(const GgufFile& file, const std::vector<Token>& text) {
  using Vector = std::vector<double>;
  const auto get = [&](const std::string& name, std::size_t row) {
    const GgufTensor& t = *file.find(name);
    std::vector<float> out(t.shape[0]);
    decode_row(t.type, t.data.data() + row * row_bytes(t.type, t.shape[0]), t.shape[0], out.data());
    return Vector(out.begin(), out.end());
  };
  const auto key = [&](const char* name) {
    return static_cast<std::size_t>(file.integer(std::string("llama.") + name).value());
  };
  const std::size_t heads = key("attention.head_count"), key_heads = key("attention.head_count_kv"),
                    head = key("rope.dimension_count");
  const double base = file.number("llama.rope.freq_base").value();
  const auto apply = [&](const std::string& name, Vector x) {
    Vector y(file.find(name)->shape[1]);
    if (is_packed(file.find(name)->type))  // packed weights meet activations in 255 steps for each block
      for (std::size_t b = 0; b < x.size(); b += block_size) {
        double most = 0;
        for (std::size_t i = b; i < b + block_size; ++i) most = std::max(most, std::abs(x[i]));
        REQUIRE(most > 0);
        for (std::size_t i = b; i < b + block_size; ++i) x[i] = std::nearbyint(x[i] * 127 / most) * most / 127;
      }
    for (std::size_t o = 0; o < y.size(); ++o) {
      const Vector w = get(name, o);
      for (std::size_t i = 0; i < x.size(); ++i) y[o] += w[i] * x[i];
    }
    return y;
  };
  const auto norm = [&](const std::string& name, const Vector& x) {
    double squares = 0;
    for (const double v : x) squares += v * v;
    Vector y = get(name, 0);
    const double epsilon = file.number("llama.attention.layer_norm_rms_epsilon").value();
    for (std::size_t i = 0; i < x.size(); ++i)
      y[i] *= x[i] / std::sqrt(squares / static_cast<double>(x.size()) + epsilon);
    return y;
  };
  const auto rotate = [&](Vector& x, std::size_t position) {
    for (std::size_t i = 0; i < x.size(); i += 2) {
      const double angle =
          static_cast<double>(position) * std::pow(base, -static_cast<double>(i % head) / static_cast<double>(head));
      const double a = x[i], b = x[i + 1];
      x[i] = a * std::cos(angle) - b * std::sin(angle);
      x[i + 1] = a * std::sin(angle) + b * std::cos(angle);
    }
  };
  const auto add = [](Vector& x, const Vector& y) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  };
  std::vector<Vector> x;
  for (const Token t : text) x.push_back(get("token_embd.weight", static_cast<std::size_t>(t)));
  for (std::size_t l = 0; l < key("block_count"); ++l) {
    const std::string block = "blk." + std::to_string(l) + ".";
    std::vector<Vector> keys, values;
    for (std::size_t p = 0; p < x.size(); ++p) {
      const Vector n = norm(block + "attn_norm.weight", x[p]);
      Vector q = apply(block + "attn_q.weight", n);
      keys.push_back(apply(block + "attn_k.weight", n));
      values.push_back(apply(block + "attn_v.weight", n));
      rotate(q, p);
      rotate(keys.back(), p);
      Vector attended(q.size());
      for (std::size_t h = 0; h < heads; ++h) {
        const std::size_t from = h / (heads / key_heads) * head;
        Vector weight(p + 1);
        double sum = 0;
        for (std::size_t s = 0; s <= p; ++s) {
          for (std::size_t d = 0; d < head; ++d) weight[s] += q[h * head + d] * keys[s][from + d];
          sum += weight[s] = std::exp(weight[s] / std::sqrt(static_cast<double>(head)));
        }
        for (std::size_t s = 0; s <= p; ++s)
          for (std::size_t d = 0; d < head; ++d) attended[h * head + d] += weight[s] / sum * values[s][from + d];
      }
      add(x[p], apply(block + "attn_output.weight", attended));
      const Vector m = norm(block + "ffn_norm.weight", x[p]);
      Vector g = apply(block + "ffn_gate.weight", m);
      const Vector u = apply(block + "ffn_up.weight", m);
      for (std::size_t i = 0; i < g.size(); ++i) g[i] *= u[i] / (1 + std::exp(-g[i]));
      add(x[p], apply(block + "ffn_down.weight", g));
    }
  }
  const bool tied = file.find("output.weight") == nullptr;
  return apply(tied ? "token_embd.weight" : "output.weight", norm("output_norm.weight", x.back()));
}

void check_against_reference(const GgufFile& file, const std::vector<Token>& text, const Kernels* kernels) {
  LlamaEngine engine(file, {.context = 200, .kernels = kernels});
  engine.prefill(std::span(text).first(text.size() - 1));
  const std::vector<float> logits = step(engine, text.back());
  const std::vector<double> expected = reference_logits(file, text);
  REQUIRE(logits.size() == expected.size());
  double difference = 0, largest = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    REQUIRE(std::isfinite(logits[i]));
    difference = std::max(difference, std::abs(static_cast<double>(logits[i]) - expected[i]));
    largest = std::max(largest, std::abs(expected[i]));
  }
  CHECK(largest > 1);
  // Where activations are rounded to few steps, one of them that falls to the other side makes a difference.
  const bool packed =
      is_packed(file.find("blk.0.attn_q.weight")->type) || is_packed(file.find("blk.0.ffn_down.weight")->type);
  CHECK(difference < (packed ? 5e-3 : 2e-5) * largest);
}

TEST_CASE("a vocabulary of millions") {
  // More outputs than tasks times blocks fit 32 bits.
  constexpr int vocabulary = (1 << 22) + 70;
  const GgufFile file(tiny_llama({.vocabulary = vocabulary,
                                  .width = 2,
                                  .layers = 1,
                                  .heads = 1,
                                  .key_heads = 1,
                                  .head = 2,
                                  .feed = 2,
                                  .distinct = 7}));
  LlamaEngine engine(file, {.context = 8, .max_rows = 1, .threads = 1});
  const std::vector<float> logits = step(engine, 5);
  for (std::size_t i = 7; i < logits.size(); ++i)
    if (logits[i] != logits[i - 7]) FAIL(i);
  CHECK(logits[0] != 0);
}

TEST_CASE("logits agree with a forward pass in double precision") {
  std::mt19937 random(5);
  for (const Kernels* kernels : available_kernels()) {
    for (const WeightType type : all_types)
      check_against_reference(GgufFile(tiny_llama({.type = type, .tied = type != WeightType::q8_0})),
                              random_tokens(random, 40, 300), kernels);
    // Types together, and a row that ends within a block beside a packed type.
    check_against_reference(GgufFile(tiny_llama({.feed = 43, .type = WeightType::q8_0, .down = WeightType::f32})),
                            random_tokens(random, 40, 300), kernels);
    check_against_reference(GgufFile(tiny_llama({.type = WeightType::f16, .down = WeightType::q4_1})),
                            random_tokens(random, 40, 300), kernels);
    check_against_reference(
        GgufFile(tiny_llama({.vocabulary = 301, .width = 36, .heads = 3, .key_heads = 1, .head = 12, .feed = 43})),
        random_tokens(random, 70, 301), kernels);
  }
  const GgufFile file{std::filesystem::path(bundled)};
  check_against_reference(file, Tokenizer(file).encode("def main(argv):\n    for name", true), nullptr);
}

TEST_CASE("the bundled model writes Python") {
  const GgufFile file{std::filesystem::path(bundled)};
  const Tokenizer tokenizer(file);
  LlamaEngine engine(file, {});
  const std::vector<Token> prompt = tokenizer.encode("def read_file(path):\n    ", true);
  engine.prefill(std::span(prompt).first(prompt.size() - 1));
  std::vector<Token> out = {prompt.back()};
  for (int i = 0; i < 6; ++i) {
    const std::vector<float> logits = step(engine, out.back());
    out.push_back(static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
  }
  CHECK(tokenizer.decode(out).find("\"\"\"Read the file") != std::string::npos);
}

TEST_CASE("top tokens are the best ones, the lowest first on ties") {
  LlamaEngine engine(GgufFile(tiny_llama({.distinct = 50})), {.context = 32});  // so each logit occurs six times
  TokenTreeStorage<Token, 1> tree;
  const Token token = 9;
  tree.begin(0, &token, 1);
  tree.want(0);
  engine.forward(tree.view());
  const std::span<const float> logits = engine.logits(0);
  std::vector<Token> order(logits.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<Token>(i);
  std::stable_sort(order.begin(), order.end(), [&](Token a, Token b) {
    return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)];
  });
  CHECK(order[1] == order[0] + 50);
  CHECK(engine.next_token(0) == order[0]);
  for (const std::size_t n : {1UL, 2UL, 8UL, 300UL, 400UL}) {
    std::vector<Token> top(n);
    const std::size_t count = engine.top_tokens(0, top);
    CHECK(count == std::min<std::size_t>(n, 300));
    CHECK(std::equal(top.begin(), top.begin() + static_cast<std::ptrdiff_t>(count), order.begin()));
  }
}

TEST_CASE("a step allocates nothing") {
  LlamaEngine engine(GgufFile(tiny_llama()), {.context = 200, .max_rows = 64, .threads = 3});
  std::mt19937 random(2);
  static Storage tree;
  const std::vector<Token> prompt = random_tokens(random, 100, 300);
  random_tree(random, 100, 50, 300, tree);
  const std::vector<int> path = path_to(tree.view(), 49);
  std::vector<Token> top(8);
  const std::size_t before = allocation_count();
  engine.prefill(prompt);
  engine.forward(tree.view());
  for (const int row : tree.view().wanted()) engine.top_tokens(row, top);
  engine.commit(path);
  engine.truncate(3);
  CHECK(allocation_count() == before);
}

TEST_CASE("limits") {
  const GgufFile file(tiny_llama());
  LlamaEngine engine(file, {.context = 20, .max_rows = 8, .threads = 2});
  CHECK(engine.vocabulary() == 300);
  CHECK(engine.free_slots() == 20);
  CHECK(engine.max_rows() == 8);
  const std::vector<Token> tokens(21, 5);
  CHECK_THROWS_AS(engine.prefill(tokens), OutOfRoom);
  CHECK(engine.context_size() == 0);
  engine.prefill(std::span(tokens).first(17));
  CHECK(engine.free_slots() == 3);

  Storage tree;
  tree.begin(17, tokens.data(), 4);
  CHECK_THROWS_AS(engine.forward(tree.view()), OutOfRoom);
  tree.begin(16, tokens.data(), 2);
  CHECK_THROWS_AS(engine.forward(tree.view()), InvalidArgument);
  const Token outside[] = {300, -1};
  for (const Token& t : outside) {
    tree.begin(17, &t, 1);
    CHECK_THROWS_WITH_AS(engine.forward(tree.view()), doctest::Contains("vocabulary of 300"), InvalidArgument);
    CHECK_THROWS_AS(engine.prefill(std::span(&t, 1)), InvalidArgument);
  }
  CHECK_THROWS_AS(engine.truncate(18), InvalidArgument);
  CHECK(engine.context_size() == 17);

  tree.begin(17, tokens.data(), 2);
  tree.add(1, 7);
  tree.want(2);
  engine.forward(tree.view());
  CHECK(engine.logits(2).size() == 300);
  CHECK_THROWS_AS(static_cast<void>(engine.logits(1)), InvalidArgument);
  CHECK_THROWS_AS(static_cast<void>(engine.logits(3)), InvalidArgument);
  const std::vector<std::vector<std::int32_t>> wrong = {{}, {0}, {0, 2}, {1, 2}, {0, 1, 2, 3}, {0, 1, 1}, {0, 1, -1}};
  for (const auto& path : wrong) CHECK_THROWS_AS(engine.commit(path), InvalidArgument);
  CHECK(engine.context_size() == 17);
  CHECK(engine.commit(std::vector<std::int32_t>{0, 1, 2}) == 3);
  CHECK(engine.free_slots() == 0);
  CHECK_THROWS_AS(engine.commit(std::vector<std::int32_t>{0}), InvalidArgument);  // a step is committed once
  CHECK_THROWS_AS(static_cast<void>(engine.logits(2)), InvalidArgument);
  engine.forward(TokenTree<Token>{});  // the empty tree is fine in a full context
  engine.truncate(0);
  CHECK(engine.free_slots() == 20);

  CHECK_THROWS_WITH_AS(LlamaEngine(file, {.context = 257}),
                       doctest::Contains("context is 257; give 1 to 256, on a command line with --context"),
                       InvalidArgument);
  CHECK_THROWS_AS(LlamaEngine(file, {.context = -1}), InvalidArgument);
  CHECK_THROWS_AS(LlamaEngine(file, {.max_rows = 0}), InvalidArgument);
  CHECK_THROWS_WITH_AS(LlamaEngine(file, {.threads = 257}), doctest::Contains("threads is 257; give 1 to 256"),
                       InvalidArgument);
}

}  // namespace
