#pragma once
/// @file token_tree.hpp
/// A step is a token tree: what one forward pass evaluates on top of the committed context.

#include <cstddef>
#include <cstdint>
#include <span>

#include "lookahead/detail/config.hpp"

namespace lookahead {

/// A read-only view of the rows that one forward pass evaluates. Cheap to copy; it owns nothing and stays valid as long
/// as the `TokenTreeStorage` behind it is neither changed nor destroyed.
///
/// Rows are numbered from 0. Rows `0..root()` are the *pending chain*: tokens that are accepted but not cached yet, the
/// newest of them being the *root*. Every later row has a parent in front of it, and siblings carry distinct tokens, so
/// a row is its path. The one rule of attention: **a row sees the committed context, its ancestors and itself, and
/// nothing else.**
///
/// A tree that wants no row evaluates a part of the pending chain and selects nothing.
template <class Token = std::int32_t>
class TokenTree {
 public:
  using token_type = Token;

  /// The arrays behind the view; all have `rows` entries except where noted.
  struct Arrays {
    const Token* tokens;
    const std::int32_t* parents;
    const std::int32_t* depths;
    const std::int32_t* positions;
    const std::uint32_t* ancestors;  ///< [rows][stride] words
    const std::uint32_t* want_bits;  ///< ceil(rows / 32) words
    const std::int32_t* wanted;      ///< wanted_count entries
    std::int32_t rows, root, context_size, wanted_count, stride;
  };

  TokenTree() = default;
  explicit constexpr TokenTree(const Arrays& arrays) : a_(arrays) {}

  /// Number of rows; 0 for the empty tree.
  [[nodiscard]] constexpr int size() const { return a_.rows; }
  [[nodiscard]] constexpr bool empty() const { return a_.rows == 0; }

  /// The last row of the pending chain; -1 in the empty tree. A commit keeps at least the rows `0..root()`.
  [[nodiscard]] constexpr int root() const { return a_.root; }

  /// Tokens in the committed context, which is the position of row 0.
  [[nodiscard]] constexpr int context_size() const { return a_.context_size; }

  /// The token of each row. Shape [size()].
  [[nodiscard]] constexpr std::span<const Token> tokens() const { return {a_.tokens, count(a_.rows)}; }

  /// The parent row of each row, -1 for row 0. A parent is always smaller than its child. Shape [size()].
  [[nodiscard]] constexpr std::span<const std::int32_t> parents() const { return {a_.parents, count(a_.rows)}; }

  /// Distance of each row from the root; 0 in the pending chain. Shape [size()].
  [[nodiscard]] constexpr std::span<const std::int32_t> depths() const { return {a_.depths, count(a_.rows)}; }

  /// Absolute position of each row, counted from 0 at the first token of the context. Shape [size()].
  [[nodiscard]] constexpr std::span<const std::int32_t> positions() const { return {a_.positions, count(a_.rows)}; }

  /// The rows whose logits will be read, in increasing order. An engine needs no logits of any other row.
  [[nodiscard]] constexpr std::span<const std::int32_t> wanted() const { return {a_.wanted, count(a_.wanted_count)}; }

  /// Whether the logits of `row` will be read.
  [[nodiscard]] constexpr bool is_wanted(int row) const { return bit(a_.want_bits, row); }

  /// Whether `row` attends to `other`: its ancestors and itself.
  [[nodiscard]] constexpr bool sees(int row, int other) const { return bit(ancestors(row).data(), other); }

  /// The rows that `row` attends to as bits, row r being bit r % 32 of word r / 32. Shape [ceil(size() / 32)].
  [[nodiscard]] constexpr std::span<const std::uint32_t> ancestors(int row) const {
    return {a_.ancestors + count(row) * count(a_.stride), count((a_.rows + 31) / 32)};
  }

  /// The child of `row` that carries `token`, or -1. There is at most one. O(size()).
  [[nodiscard]] constexpr int child(int row, Token token) const {
    for (int r = row + 1; r < a_.rows; ++r)
      if (a_.parents[r] == row && a_.tokens[r] == token) return r;
    return -1;
  }

 private:
  static constexpr std::size_t count(std::int32_t n) { return static_cast<std::size_t>(n); }
  static constexpr bool bit(const std::uint32_t* words, int i) { return (words[i / 32] >> (i % 32) & 1U) != 0; }

  Arrays a_{nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0, -1, 0, 0, 0};
};

/// Storage for trees of up to `MaxRows` rows. Trivial, so that it may lie in static, shared or device memory; call
/// `begin` before anything else. `Lookahead::plan` fills it; `add` and `want` build a tree by hand.
template <class Token, int MaxRows>
struct TokenTreeStorage {
  static_assert(MaxRows >= 1, "A tree needs room for at least one row.");
  using token_type = Token;
  static constexpr int max_rows = MaxRows;
  static constexpr int words = (MaxRows + 31) / 32;

  std::int32_t rows, root, context_size, wanted_count;
  Token token[MaxRows];
  std::int32_t parent[MaxRows], depth[MaxRows], position[MaxRows], wanted[MaxRows];
  std::uint32_t ancestor[MaxRows * words];  ///< [MaxRows][words], flat so that a view may step through it
  std::uint32_t want_bits[words];

  /// Starts a tree that consists of the first `count` tokens of a pending chain on top of `context` cached tokens.
  /// Precondition: 0 <= count <= MaxRows.
  LOOKAHEAD_HD constexpr void begin(int context, const Token* pending, int count) {
    rows = 0;
    context_size = context;
    wanted_count = 0;
    for (int w = 0; w < words; ++w) want_bits[w] = 0;
    root = count - 1;
    for (int r = 0; r < count; ++r) add(r - 1, pending[r]);
  }

  /// Appends a row below `parent_row` (-1 for row 0) and returns its number.
  /// Preconditions: rows < MaxRows; parent_row < rows; no child of `parent_row` carries `t`.
  LOOKAHEAD_HD constexpr int add(int parent_row, Token t) {
    const int r = rows++;
    set(r, parent_row, t);
    return r;
  }

  /// Writes row `r`. Its parent must be complete; rows of equal depth may be written in parallel.
  LOOKAHEAD_HD constexpr void set(int r, int parent_row, Token t) {
    token[r] = t;
    parent[r] = parent_row;
    depth[r] = parent_row < 0 || r <= root ? 0 : depth[parent_row] + 1;
    position[r] = parent_row < 0 ? context_size : position[parent_row] + 1;
    for (int w = 0; w < words; ++w) ancestor[r * words + w] = parent_row < 0 ? 0U : ancestor[parent_row * words + w];
    ancestor[r * words + r / 32] |= 1U << (r % 32);
  }

  /// Asks for the logits of `row`.
  LOOKAHEAD_HD constexpr void want(int row) {
    if (is_wanted(row)) return;
    want_bits[row / 32] |= 1U << (row % 32);
    int i = wanted_count++;
    for (; i > 0 && wanted[i - 1] > row; --i) wanted[i] = wanted[i - 1];
    wanted[i] = row;
  }

  /// Whether the logits of `row` will be read.
  [[nodiscard]] LOOKAHEAD_HD constexpr bool is_wanted(int row) const {
    return (want_bits[row / 32] >> (row % 32) & 1U) != 0;
  }

  /// The view that engines take.
  [[nodiscard]] constexpr TokenTree<Token> view() const {
    return TokenTree<Token>(
        {token, parent, depth, position, ancestor, want_bits, wanted, rows, root, context_size, wanted_count, words});
  }
};

}  // namespace lookahead
