// The examples of docs/adapting-an-engine.md, as they stand there: each compiles, runs and passes the conformance kit,
// and is shown unchanged. An example lies between "// [name]" and "// []". Those for torch are in test_torch.cpp.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <iostream>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "doc_examples.hpp"

#include "lookahead/adapters/callable.hpp"
#include "lookahead/lookahead.hpp"
#include "lookahead/testing/conformance.hpp"
#include "lookahead/testing/oracle_model.hpp"
#include "lookahead/testing/plain_decode.hpp"

using namespace lookahead;
using Token = std::int32_t;

namespace {

// What a model computes: keys and values of a token, and an attention over some of them.
using Vector = std::array<float, 16>;
struct Cell {
  Vector key, value;
  std::int32_t position;
};

Vector vector_of(Token token, unsigned which) {
  Vector v;
  std::uint32_t x = static_cast<std::uint32_t>(token) * 2654435761U + which * 40503U + 1;
  for (float& f : v) {
    x = x * 1664525U + 1013904223U;
    f = static_cast<float>(x >> 8) * 0x1p-23F - 1;
  }
  return v;
}

float dot(const Vector& a, const Vector& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0F); }

constexpr std::size_t words = 60;

Cell cell_of(Token token, std::int32_t position) { return {vector_of(token, 1), vector_of(token, 2), position}; }

std::vector<float> attend(Token token, std::int32_t position, std::span<const Cell* const> cells) {
  const Vector query = vector_of(token, 3);
  Vector sum{};
  float total = 0;
  for (const Cell* cell : cells) {
    const float weight = std::exp(dot(query, cell->key) - 0.1F * static_cast<float>(position - cell->position));
    total += weight;
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += weight * cell->value[i];
  }
  std::vector<float> logits;
  for (std::size_t t = 0; t < words; ++t) logits.push_back(dot(sum, vector_of(static_cast<Token>(t), 4)) / total);
  return logits;
}

// [engine]
class Engine {
 public:
  using token_type = Token;

  std::size_t vocabulary() const { return words; }
  std::size_t context_size() const { return size_; }
  std::size_t free_slots() const { return cache_.size() - size_; }
  std::size_t max_rows() const { return 32; }
  std::size_t max_logit_rows() const { return 32; }

  void truncate(std::size_t n) { size_ = n; }

  void prefill(std::span<const Token> tokens) {
    for (const Token token : tokens) {
      cache_[size_] = cell_of(token, static_cast<std::int32_t>(size_));
      ++size_;
    }
  }

  void forward(const TokenTree<Token>& tree) {
    // Row r is written behind the context, at slot size_ + r, until a commit says which rows stay.
    for (std::size_t r = 0; r < tree.tokens().size(); ++r)
      cache_[size_ + r] = cell_of(tree.tokens()[r], tree.positions()[r]);
    results_.assign(tree.tokens().size(), {});
    for (const int row : tree.wanted()) {
      std::vector<const Cell*> seen;
      for (std::size_t slot = 0; slot < size_; ++slot) seen.push_back(&cache_[slot]);
      for (int other = 0; other <= row; ++other)
        if (tree.sees(row, other)) seen.push_back(&cache_[size_ + static_cast<std::size_t>(other)]);
      const auto r = static_cast<std::size_t>(row);
      results_[r] = attend(tree.tokens()[r], tree.positions()[r], seen);
    }
  }

  std::span<const float> logits(int row) const { return results_[static_cast<std::size_t>(row)]; }

  std::size_t commit(std::span<const std::int32_t> path) {
    // Rows of a path increase, so a copy forward never overwrites a row that is still needed.
    const std::size_t context = size_;
    for (const std::int32_t row : path) cache_[size_++] = cache_[context + static_cast<std::size_t>(row)];
    return path.size();
  }

 private:
  std::vector<Cell> cache_ = std::vector<Cell>(512);
  std::size_t size_ = 0;
  std::vector<std::vector<float>> results_;
};
// []

// Position taken from the number of the row.
struct WrongEngine : Engine {
  void forward(const TokenTree<Token>& tree) {
    std::vector<std::int32_t> positions(tree.tokens().size());
    std::iota(positions.begin(), positions.end(), tree.context_size());
    std::vector<std::uint32_t> ancestors, want_bits((positions.size() + 31) / 32);
    for (int row = 0; row < tree.size(); ++row) {
      ancestors.insert(ancestors.end(), tree.ancestors(row).begin(), tree.ancestors(row).end());
      if (tree.is_wanted(row)) want_bits[static_cast<std::size_t>(row) / 32] |= 1U << (row % 32);
    }
    Engine::forward(TokenTree<Token>(
        {tree.tokens().data(), tree.parents().data(), tree.depths().data(), positions.data(), ancestors.data(),
         want_bits.data(), tree.wanted().data(), tree.size(), tree.root(), tree.context_size(),
         static_cast<std::int32_t>(tree.wanted().size()), static_cast<std::int32_t>(want_bits.size())}));
  }
};

}  // namespace

TEST_CASE("a function") {
  // [function]
  const auto function = [](std::span<const Token> tokens, std::span<const std::int32_t> positions,
                           std::span<const float> mask) {
    std::vector<float> logits;  // [tokens.size(), words]
    for (std::size_t row = 0; row < tokens.size(); ++row) {
      std::vector<Cell> cells;
      for (std::size_t c = 0; c < tokens.size(); ++c)
        if (mask[row * tokens.size() + c] == 0) cells.push_back(cell_of(tokens[c], positions[c]));
      std::vector<const Cell*> seen;
      for (const Cell& cell : cells) seen.push_back(&cell);
      const std::vector<float> of_row = attend(tokens[row], positions[row], seen);
      logits.insert(logits.end(), of_row.begin(), of_row.end());
    }
    return logits;
  };
  CallableModel model(function, words, 128);
  Decoder decoder(model, {.cost = StepCost::none()});
  std::vector<Token> text;
  decoder.generate(std::vector<Token>{7, 8, 9}, 40, [&](Token token) { text.push_back(token); });
  // []
  Engine engine;
  CHECK(text == testing::plain_decode<Engine>(engine, std::vector<Token>{7, 8, 9}, 40));
}

TEST_CASE("the engine passes") {
  // [conformance]
  const testing::ConformanceReport report = testing::check_conformance([] { return Engine(); });
  std::cout << report.text();
  // []
  CHECK(report.bit_identical());
  std::string page;
  for (const std::string& line : doc_examples::lines("docs/adapting-an-engine.md")) page += line + "\n";
  CHECK(page.find(report.text()) != std::string::npos);
}

TEST_CASE("an engine that takes positions from row numbers is told so") {
  const testing::ConformanceReport report = testing::check_conformance([] { return WrongEngine(); });
  CHECK(report.broke(testing::Promise::positions));
  std::string page;
  for (const std::string& line : doc_examples::lines("docs/adapting-an-engine.md")) page += line + "\n";
  CHECK_MESSAGE(page.find(report.text()) != std::string::npos, report.text());
}

TEST_CASE("ways to commit") {
  TokenTreeStorage<Token, 8> storage;
  const Token first = 3;
  storage.begin(4, &first, 1);
  const int a = storage.add(0, 5);
  storage.add(0, 6);
  const int leaf = storage.add(a, 7);
  const TokenTree<Token> tree = storage.view();
  const std::vector<std::int32_t> path = {0, a, leaf};
  const int root = tree.root();

  struct {
    int root;
    std::size_t context = 4;
    // [commit_root]
    std::size_t commit(std::span<const std::int32_t>) {
      context += static_cast<std::size_t>(root) + 1;  // rows 0 .. root lie right behind the context already
      return static_cast<std::size_t>(root) + 1;      // the rest of the path is fed again with the next step
    }
    // []
  } cannot_move{root};
  CHECK(cannot_move.commit(path) == 1);
  CHECK(cannot_move.context == 5);

  struct {
    std::vector<std::int32_t> slots = {10, 11, 12, 13}, row_slots = {20, 21, 22, 23}, free_slots = {};
    // [commit_slots]
    std::size_t commit(std::span<const std::int32_t> path) {
      for (const std::int32_t row : path) {
        slots.push_back(row_slots[static_cast<std::size_t>(row)]);  // slots[i] is where token i of the context lies
        row_slots[static_cast<std::size_t>(row)] = -1;
      }
      for (const std::int32_t slot : row_slots)
        if (slot >= 0) free_slots.push_back(slot);
      return path.size();
    }
    // []
  } paged;
  CHECK(paged.commit(path) == 3);
  CHECK(paged.slots == std::vector<std::int32_t>{10, 11, 12, 13, 20, 21, 23});
  CHECK(paged.free_slots == std::vector<std::int32_t>{22});

  const std::size_t context = 4;
  // [commit_gather]
  std::vector<std::int64_t> keep(context);  // for an index_select along the positions of keys and values
  std::iota(keep.begin(), keep.end(), 0);
  for (const std::int32_t row : path) keep.push_back(static_cast<std::int64_t>(context) + row);
  // []
  CHECK(keep == std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 7});
}

TEST_CASE("an engine that cannot move rows conforms") {
  const testing::ConformanceReport report =
      testing::check_conformance([] { return testing::OracleModel<Token>({.capacity = 200, .max_kept = 0}); });
  CHECK_MESSAGE(report.bit_identical(), report.text());
}

TEST_CASE("the page shows these examples") {
  doc_examples::check_page("docs/adapting-an-engine.md", {"tests/test_adapting_doc.cpp", "tests/test_torch.cpp"});
}
