#include <algorithm>
#include <cstdint>
#include <doctest/doctest.h>
#include <random>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "lookahead/token_tree.hpp"

using namespace lookahead;

namespace {

using Rng = std::mt19937;

int below(Rng& rng, int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); }

/// The definition of a tree: every row is the list of rows from row 0 down to it, and a token.
template <class Token>
struct NaiveTree {
  struct Row {
    std::vector<int> path;
    Token token;
  };
  int context, root;
  std::vector<Row> rows;
  std::set<int> wanted;

  int parent(int row) const {
    const auto& path = rows[static_cast<std::size_t>(row)].path;
    return path.size() < 2 ? -1 : path[path.size() - 2];
  }
  int child(int row, Token token) const {
    for (std::size_t r = 0; r < rows.size(); ++r)
      if (parent(static_cast<int>(r)) == row && rows[r].token == token) return static_cast<int>(r);
    return -1;
  }
  void add(int parent_row, Token token) {
    std::vector<int> path;
    if (parent_row >= 0) path = rows[static_cast<std::size_t>(parent_row)].path;
    path.push_back(static_cast<int>(rows.size()));
    rows.push_back({path, token});
  }
};

template <class Token>
void check_equal(const TokenTree<Token>& tree, const NaiveTree<Token>& naive) {
  const std::size_t rows = naive.rows.size();
  REQUIRE(tree.size() == static_cast<int>(rows));
  CHECK(tree.empty() == naive.rows.empty());
  CHECK(tree.root() == naive.root);
  CHECK(tree.context_size() == naive.context);
  REQUIRE(tree.tokens().size() == rows);
  REQUIRE(tree.parents().size() == rows);
  REQUIRE(tree.depths().size() == rows);
  REQUIRE(tree.positions().size() == rows);
  const std::vector<std::int32_t> wanted(naive.wanted.begin(), naive.wanted.end());
  CHECK(std::vector<std::int32_t>(tree.wanted().begin(), tree.wanted().end()) == wanted);
  int wrong = 0;
  for (std::size_t i = 0; i < rows; ++i) {
    const int row = static_cast<int>(i);
    const auto& [path, token] = naive.rows[i];
    const int length = static_cast<int>(path.size());
    wrong += tree.tokens()[i] != token;
    wrong += tree.parents()[i] != naive.parent(row);
    wrong += tree.positions()[i] != naive.context + length - 1;
    wrong += tree.depths()[i] != (row <= naive.root ? 0 : length - 1 - naive.root);
    wrong += tree.is_wanted(row) != (naive.wanted.count(row) != 0);
    const auto bits = tree.ancestors(row);
    REQUIRE(bits.size() == (rows + 31) / 32);
    for (std::size_t j = 0; j < 32 * bits.size(); ++j) {
      const bool on_path = std::find(path.begin(), path.end(), static_cast<int>(j)) != path.end();
      wrong += (bits[j / 32] >> (j % 32) & 1U) != (on_path ? 1U : 0U);
      if (j < rows) wrong += tree.sees(row, static_cast<int>(j)) != on_path;
    }
    for (const Token t : {token, static_cast<Token>(0), static_cast<Token>(3), static_cast<Token>(77)})
      wrong += tree.child(row, t) != naive.child(row, t);
    if (naive.parent(row) >= 0) wrong += tree.child(naive.parent(row), token) != row;
  }
  CHECK(wrong == 0);
}

/// Builds the same random trees both ways, one after the other in the same dirty storage.
template <class Token, int MaxRows>
void compare(int count, unsigned seed) {
  TokenTreeStorage<Token, MaxRows> tree;
  std::fill_n(reinterpret_cast<unsigned char*>(&tree), sizeof tree, static_cast<unsigned char>(0xA5));
  Rng rng(seed);
  for (int i = 0; i < count; ++i) {
    CAPTURE(i);
    const int rows = 1 + below(rng, MaxRows);
    const int pending = below(rng, 10) == 0 ? 0 : 1 + below(rng, below(rng, 2) == 0 ? 1 : rows);
    std::vector<Token> tokens;
    for (int r = 0; r < pending; ++r) tokens.push_back(static_cast<Token>(below(rng, 4)));
    NaiveTree<Token> naive{below(rng, 1000), pending - 1, {}, {}};
    tree.begin(naive.context, tokens.data(), pending);
    for (int r = 0; r < pending; ++r) naive.add(r - 1, tokens[static_cast<std::size_t>(r)]);
    const int vocabulary = 1 + below(rng, 100);
    for (int tries = 0; pending > 0 && tries < 3 * rows && tree.rows < rows; ++tries) {
      const int parent = tree.root + below(rng, tree.rows - tree.root);
      const auto token = static_cast<Token>(below(rng, vocabulary));
      if (naive.child(parent, token) >= 0) continue;
      naive.add(parent, token);
      CHECK(tree.add(parent, token) == static_cast<int>(naive.rows.size()) - 1);
    }
    // Wanted in any order, some twice, some not at all.
    for (int w = below(rng, 2 * rows); pending > 0 && w > 0; --w) {
      const int row = below(rng, tree.rows);
      tree.want(row);
      naive.wanted.insert(row);
    }
    check_equal(tree.view(), naive);
  }
}

}  // namespace

TEST_CASE("a tree equals its definition") {
  compare<std::int32_t, 2>(50, 1);
  compare<std::int32_t, 31>(500, 2);
  compare<std::int32_t, 32>(500, 3);
  compare<std::int32_t, 33>(500, 4);
  compare<std::int32_t, 200>(300, 5);
  compare<std::uint16_t, 64>(500, 6);
  compare<std::uint32_t, 65>(500, 7);
}

TEST_CASE("rows written level by level equal rows added one by one") {
  TokenTreeStorage<std::int32_t, 40> added, written;
  const std::int32_t pending[] = {8, 9};
  Rng rng(1);
  for (int i = 0; i < 200; ++i) {
    added.begin(7, pending, 2);
    written.begin(7, pending, 2);
    int first = 1, end = 2;  // the last complete level
    while (added.rows + 6 <= 40) {
      std::vector<std::pair<int, std::int32_t>> level;
      for (std::int32_t t = 0; t < 6; ++t) level.emplace_back(first + below(rng, end - first), t);
      for (const auto& [parent, token] : level) added.add(parent, token);
      // Any order within a level.
      for (std::size_t k = level.size(); k-- > 0;)
        written.set(end + static_cast<int>(k), level[k].first, level[k].second);
      written.rows += static_cast<int>(level.size());
      first = end;
      end = added.rows;
    }
    const TokenTree<> a = added.view(), b = written.view();
    REQUIRE(a.size() == b.size());
    CHECK(std::ranges::equal(a.tokens(), b.tokens()));
    CHECK(std::ranges::equal(a.parents(), b.parents()));
    CHECK(std::ranges::equal(a.depths(), b.depths()));
    CHECK(std::ranges::equal(a.positions(), b.positions()));
    for (int r = 0; r < a.size(); ++r) CHECK(std::ranges::equal(a.ancestors(r), b.ancestors(r)));
  }
}

TEST_CASE("a part of a pending chain is a tree that wants nothing") {
  TokenTreeStorage<std::int32_t, 8> tree;
  const std::int32_t pending[] = {5, 5, 6, 7};
  tree.begin(10, pending, 3);
  const TokenTree<> view = tree.view();
  CHECK(view.size() == 3);
  CHECK(view.root() == 2);
  CHECK(view.wanted().empty());
  CHECK(std::ranges::equal(view.parents(), std::vector<std::int32_t>{-1, 0, 1}));
  CHECK(std::ranges::equal(view.positions(), std::vector<std::int32_t>{10, 11, 12}));
  CHECK(std::ranges::equal(view.depths(), std::vector<std::int32_t>{0, 0, 0}));
  for (int r = 0; r < 3; ++r) CHECK(!view.is_wanted(r));
  CHECK(view.child(0, 5) == 1);
  CHECK(view.child(2, 7) == -1);
}

TEST_CASE("the empty tree") {
  CHECK(TokenTree<>().empty());
  CHECK(TokenTree<>().size() == 0);
  CHECK(TokenTree<>().root() == -1);
  CHECK(TokenTree<>().context_size() == 0);
  CHECK(TokenTree<>().tokens().empty());
  CHECK(TokenTree<>().wanted().empty());
  TokenTreeStorage<std::int32_t, 4> tree;
  const std::int32_t pending[] = {1, 2, 3};
  tree.begin(5, pending, 3);
  tree.want(2);
  tree.begin(9, nullptr, 0);  // nothing of the tree before is left
  CHECK(tree.view().empty());
  CHECK(tree.view().root() == -1);
  CHECK(tree.view().context_size() == 9);
  CHECK(tree.view().wanted().empty());
}

TEST_CASE("trees work in constant expressions") {
  constexpr auto tree = [] {
    TokenTreeStorage<std::uint8_t, 40> t{};
    const std::uint8_t pending[] = {1, 2};
    t.begin(3, pending, 2);
    for (int r = 2; r < 40; ++r) t.add(r - 1, static_cast<std::uint8_t>(r));
    t.want(39);
    t.want(1);
    return t;
  }();
  static_assert(tree.rows == 40 && tree.root == 1 && tree.wanted_count == 2);
  static_assert(tree.wanted[0] == 1 && tree.wanted[1] == 39);
  static_assert(tree.position[39] == 42 && tree.depth[39] == 38 && tree.parent[39] == 38);
  static constexpr TokenTreeStorage<std::uint8_t, 40> kept = tree;
  static_assert(kept.view().ancestors(39)[0] == 0xFFFFFFFFU && kept.view().ancestors(39)[1] == 0xFFU);
  static_assert(kept.view().size() == 40 && kept.view().tokens()[39] == 39 && kept.view().wanted()[1] == 39);
  static_assert(kept.view().child(38, 39) == 39 && kept.view().is_wanted(39) && !kept.view().is_wanted(38));
  static_assert(TokenTree<>().empty());
}

TEST_CASE("storage is trivial, so that it may be copied as bytes and lie in shared memory") {
  using Storage = TokenTreeStorage<std::int32_t, 120>;
  static_assert(std::is_trivially_copyable_v<Storage>);
  static_assert(std::is_trivially_default_constructible_v<Storage>);
  static_assert(std::is_standard_layout_v<Storage>);
  static_assert(std::is_trivially_copyable_v<TokenTree<>>);
  static_assert(Storage::max_rows == 120 && Storage::words == 4);
  Storage tree;
  const std::int32_t pending[] = {1};
  tree.begin(0, pending, 1);
  tree.add(0, 2);
  const Storage copy = tree;
  tree.begin(1, pending, 1);
  CHECK(copy.view().size() == 2);  // the view of a copy refers to the copy
  CHECK(copy.view().tokens()[1] == 2);
}
