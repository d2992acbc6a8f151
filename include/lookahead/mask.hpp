#pragma once
/// @file mask.hpp
/// Exports of a token tree in the formats that attention kernels take. Everything is written into buffers that the
/// caller owns, which may be larger than needed: the rest stays untouched. A function that throws has written nothing.
/// docs/masks.md tells which engine takes which format.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <type_traits>

#include "lookahead/errors.hpp"
#include "lookahead/token_tree.hpp"

namespace lookahead {

namespace detail {

inline void require_room(const char* buffer, std::size_t holds, std::size_t needs) {
  if (holds < needs)
    throw InvalidArgument("the " + std::string(buffer) + " buffer holds " + std::to_string(holds) +
                          " elements, but the export writes " + std::to_string(needs) + ": pass a larger one");
}

}  // namespace detail

/// Which columns a `TreeMask` has.
enum class MaskColumns {
  tree,             ///< the rows of the step: column c is row c; the engine treats the context as visible
  context_and_tree  ///< column c < context_size() is token c of the context, column context_size() + r is row r
};

/// The attention mask of a tree as a bit matrix [rows(), columns()]: a row sees the context, its ancestors and itself.
/// Rows behind the tree's own are padding, for engines that take fixed sizes: a padding row sees itself only, so that
/// no softmax runs over nothing, and no other row sees it.
///
/// A view like the tree itself. Writing costs O(elements of the buffer + rows x depth).
template <class Token = std::int32_t>
class TreeMask {
 public:
  /// Without padding.
  TreeMask(const TokenTree<Token>& tree, MaskColumns columns) : TreeMask(tree, columns, tree.size()) {}

  /// Adds padding up to `padded_rows` rows. Throws `InvalidArgument` if the tree has more.
  TreeMask(const TokenTree<Token>& tree, MaskColumns columns, int padded_rows) : tree_(tree) {
    if (padded_rows < tree.size())
      throw InvalidArgument("a mask of " + std::to_string(padded_rows) + " rows cannot hold a tree of " +
                            std::to_string(tree.size()) + " rows: pass a row count of at least that");
    rows_ = static_cast<std::size_t>(padded_rows);
    context_ = columns == MaskColumns::tree ? 0 : static_cast<std::size_t>(tree.context_size());
  }

  [[nodiscard]] std::size_t rows() const { return rows_; }
  [[nodiscard]] std::size_t columns() const { return context_ + rows_; }

  /// What `write_words` writes: rows() x ceil(columns() / 32).
  [[nodiscard]] std::size_t words() const { return rows_ * row_words(); }

  /// What `write_bytes` writes: ceil(rows() x columns() / 8).
  [[nodiscard]] std::size_t bytes() const { return (cells() + 7) / 8; }

  /// What `write_cells` writes: rows() x columns().
  [[nodiscard]] std::size_t cells() const { return rows_ * columns(); }

  /// Packed words, each row starting a new one: [rows(), ceil(columns() / 32)], column c being bit c % 32, counted from
  /// the lowest, of word c / 32. Bits behind the last column are 0. Throws `InvalidArgument` if `out` is too small.
  void write_words(std::span<std::uint32_t> out) const {
    detail::require_room("word", out.size(), words());
    write_bits(out.first(words()), 32 * row_words());
  }

  /// Packed bytes, rows following each other without a gap: cell i = row x columns() + column is bit i % 8, counted
  /// from the lowest, of byte i / 8. Bits behind the last cell are 0. Throws `InvalidArgument` if `out` is too small.
  void write_bytes(std::span<std::uint8_t> out) const {
    detail::require_room("byte", out.size(), bytes());
    write_bits(out.first(bytes()), columns());
  }

  /// A batch: the bytes of each mask behind those of the one before. Mask i lies in [indptr[i], indptr[i + 1]), in
  /// bytes; `indptr` takes masks.size() + 1 entries. Throws `InvalidArgument` if a buffer is too small, or the batch so
  /// large that 32 bits cannot index it.
  static void write_bytes(std::span<const TreeMask> masks, std::span<std::uint8_t> out,
                          std::span<std::int32_t> indptr) {
    std::size_t total = 0;
    for (const TreeMask& mask : masks) total += mask.bytes();
    constexpr std::size_t limit = std::numeric_limits<std::int32_t>::max();
    if (total > limit)
      throw InvalidArgument("the masks of the batch take " + std::to_string(total) +
                            " bytes, but 32-bit offsets reach " + std::to_string(limit) + ": split the batch");
    detail::require_room("byte", out.size(), total);
    detail::require_room("indptr", indptr.size(), masks.size() + 1);
    std::size_t offset = 0, i = 0;
    indptr[0] = 0;
    for (const TreeMask& mask : masks) {
      mask.write_bytes(out.subspan(offset));
      indptr[++i] = static_cast<std::int32_t>(offset += mask.bytes());
    }
  }

  /// One element a cell, [rows(), columns()]: `seen` where the row sees the column, `unseen` elsewhere. A boolean mask
  /// is `write_cells<bool>(out, true, false)`, an additive one `write_cells<float>(out, 0, -infinity)`. Throws
  /// `InvalidArgument` if `out` is too small.
  template <class T>
  void write_cells(std::span<T> out, std::type_identity_t<T> seen, std::type_identity_t<T> unseen) const {
    detail::require_room("cell", out.size(), cells());
    std::ranges::fill(out.first(cells()), unseen);
    for_each_run([&](std::size_t row, std::size_t column, std::size_t count) {
      std::ranges::fill(out.subspan(row * columns() + column, count), seen);
    });
  }

 private:
  [[nodiscard]] std::size_t row_words() const { return (columns() + 31) / 32; }

  /// The definition of the mask: calls `f(row, column, count)` for all columns that each row sees.
  template <class F>
  void for_each_run(F f) const {
    const auto size = static_cast<std::size_t>(tree_.size());
    for (std::size_t row = 0; row < size; ++row) {
      f(row, 0, context_);
      for (auto r = static_cast<std::int32_t>(row); r >= 0; r = tree_.parents()[static_cast<std::size_t>(r)])
        f(row, context_ + static_cast<std::size_t>(r), 1);
    }
    for (std::size_t row = size; row < rows_; ++row) f(row, context_ + row, 1);
  }

  template <class Word>
  void write_bits(std::span<Word> out, std::size_t row_bits) const {
    std::ranges::fill(out, Word{0});
    for_each_run([&](std::size_t row, std::size_t column, std::size_t count) {
      constexpr std::size_t width = std::numeric_limits<Word>::digits;
      constexpr Word ones = std::numeric_limits<Word>::max();
      const auto set_within_word = [&](std::size_t from, std::size_t to) {
        if (from == to) return;
        const auto bits = static_cast<Word>(ones >> (width - (to - from)));
        out[from / width] = static_cast<Word>(out[from / width] | bits << (from % width));
      };
      const std::size_t begin = row * row_bits + column, end = begin + count;
      const std::size_t head = std::min(end, (begin + width - 1) / width * width);
      const std::size_t tail = std::max(head, end / width * width);
      set_within_word(begin, head);
      std::ranges::fill(out.subspan(head / width, (tail - head) / width), ones);
      set_within_word(tail, end);
    });
  }

  TokenTree<Token> tree_;
  std::size_t rows_ = 0, context_ = 0;
};

/// The numbers `first .. end - 1`. An array of them is an int32 tensor [rows, 2].
struct Interval {
  std::int32_t first, end;
  friend constexpr bool operator==(const Interval&, const Interval&) = default;
};

namespace detail {

/// Numbers the rows of a tree (or its leaves alone) depth-first and writes the numbers found in each row's subtree.
template <class Token>
void number_subtrees(const TokenTree<Token>& tree, bool leaves_only, std::span<Interval> out) {
  const std::span<const std::int32_t> parents = tree.parents();
  const auto at = [&](std::int32_t row) -> Interval& { return out[static_cast<std::size_t>(row)]; };
  // Children first. Meanwhile `first` says whether the row takes a number itself, `end` how many its subtree takes.
  std::ranges::fill(out.first(parents.size()), Interval{0, 0});
  for (std::size_t r = parents.size(); r-- > 0;) {
    out[r].first = !leaves_only || out[r].end == 0 ? 1 : 0;
    out[r].end += out[r].first;
    if (parents[r] >= 0) at(parents[r]).end += out[r].end;
  }
  // Parents first. Meanwhile the `end` of a parent is where its next child starts.
  for (std::size_t r = 0; r < parents.size(); ++r) {
    const auto [own, count] = out[r];
    out[r].first = parents[r] < 0 ? 0 : at(parents[r]).end;
    out[r].end = out[r].first + own;
    if (parents[r] >= 0) at(parents[r]).end += count;
  }
}

}  // namespace detail

/// Depth-first intervals [size()]: `first` is the row's number in depth-first order, `end` is behind the last number of
/// its subtree. So row r sees row c if and only if out[c].first <= out[r].first < out[c].end. O(size()).
/// Throws `InvalidArgument` if `out` is too small.
template <class Token>
void depth_first_intervals(const TokenTree<Token>& tree, std::span<Interval> out) {
  detail::require_room("interval", out.size(), tree.parents().size());
  detail::number_subtrees(tree, false, out);
}

/// The number of rows without a child, which is the number of sequence ids that the tree needs. O(size()^2).
template <class Token>
[[nodiscard]] int leaf_count(const TokenTree<Token>& tree) {
  int leaves = 0;
  for (int r = 0; r < tree.size(); ++r)
    if (std::ranges::find(tree.parents(), r) == tree.parents().end()) ++leaves;
  return leaves;
}

/// Sequence ids [size()], for engines that know no trees but let a cached token belong to several sequences. Leaf i in
/// depth-first order is sequence i; a row carries the ids of all leaves at or below it, which are the numbers of its
/// interval; the first of them is the row's own. The committed context carries every id. Then a row sees a token if
/// and only if that token carries the row's own id and its position is not behind the row's.
/// Returns the number of ids in use. Throws `InvalidArgument` if that exceeds `max_ids`, or `out` is too small.
/// O(size()^2).
template <class Token>
int sequence_ids(const TokenTree<Token>& tree, int max_ids, std::span<Interval> out) {
  detail::require_room("interval", out.size(), tree.parents().size());
  const int leaves = leaf_count(tree);
  if (leaves > max_ids)
    throw InvalidArgument("the tree has " + std::to_string(leaves) + " leaves and needs a sequence id for each, but " +
                          std::to_string(max_ids) + " are allowed: allow more ids or plan fewer rows");
  detail::number_subtrees(tree, true, out);
  return leaves;
}

/// Links [size()] to the first child of each row and to the next child of the same parent, in row order; -1 where there
/// is none. O(size()). Throws `InvalidArgument` if a buffer is too small.
template <class Token>
void child_links(const TokenTree<Token>& tree, std::span<std::int32_t> first_child,
                 std::span<std::int32_t> next_sibling) {
  const std::span<const std::int32_t> parents = tree.parents();
  detail::require_room("first-child", first_child.size(), parents.size());
  detail::require_room("next-sibling", next_sibling.size(), parents.size());
  std::ranges::fill(first_child.first(parents.size()), -1);
  std::ranges::fill(next_sibling.first(parents.size()), -1);
  for (std::size_t r = parents.size(); r-- > 1;) {
    std::int32_t& first = first_child[static_cast<std::size_t>(parents[r])];
    next_sibling[r] = first;
    first = static_cast<std::int32_t>(r);
  }
}

/// Whether each row is the only child of the row before it. Then the mask is the causal one, and an engine needs no
/// other. O(size()).
template <class Token>
[[nodiscard]] bool is_chain(const TokenTree<Token>& tree) {
  for (int r = 0; r < tree.size(); ++r)
    if (tree.parents()[static_cast<std::size_t>(r)] != r - 1) return false;
  return true;
}

}  // namespace lookahead
