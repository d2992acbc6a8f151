#pragma once
/// @file naive_window.hpp
/// The window of the published algorithm as plain vectors and sets: what `JacobiWindow` must equal. It shares no code
/// with the library.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

namespace naive {

using Token = std::int32_t;
using Tokens = std::vector<Token>;

/// A grid of levels 0..n-2 and columns 0..w-1. Level 0 is a chain from the root, which is its cell 0; column j goes on
/// from cell j of level 0.
class Window {
 public:
  /// `segment(count)` gives `count` tokens of the prompt from some place; it is called at most once a step, when cells
  /// (re)start: the cell at (level r, column j) starts as element r + j.
  Window(int columns, int n, bool slides, std::function<Tokens(int)> segment)
      : columns_(columns), levels_(n - 1), slides_(slides), segment_(std::move(segment)) {}

  /// A new request: every cell but the root starts anew when it is first planted.
  void start(Token root) {
    grid_.assign(at(levels_), std::vector<Cell>(at(columns_)));
    grid_[0][0] = {root, true, true};
  }

  /// The rows of a step with `w` columns and n-grams of `n` tokens, 1 <= w, 2 <= n: path from the root, root excluded,
  /// to whether the row is wanted. The empty path is the root.
  std::map<Tokens, bool> plant(int w, int n) {
    w_ = w;
    n_ = n;
    Tokens fresh;
    for (int r = 0; r < n - 1; ++r)
      for (int j = 0; j < w; ++j) {
        Cell& cell = grid_[at(r)][at(j)];
        if (cell.present) continue;
        if (fresh.empty()) fresh = segment_(columns_ + levels_ - 1);
        cell = {fresh.at(at(r + j)), true, false};
      }
    std::map<Tokens, bool> rows;
    for (int r = 0; r < n - 1; ++r)
      for (int j = 0; j < w; ++j) {
        bool& wanted = rows[path(r, j)];
        wanted = wanted || r == 0 || j == 0 || r == n - 2;
      }
    return rows;
  }

  /// The path from the root to a cell, root excluded.
  [[nodiscard]] Tokens path(int r, int j) const {
    Tokens tokens;
    for (int c = 1; c <= j; ++c) tokens.push_back(grid_[0][at(c)].token);
    for (int l = 1; l <= r; ++l) tokens.push_back(grid_[at(l)][at(j)].token);
    return tokens;
  }

  [[nodiscard]] Token token(int r, int j) const { return grid_[at(r)][at(j)].token; }

  /// The step that was planted last has accepted `accepted` (at least one token, the newest is the next root), and
  /// `last[j]` is the arg-max at the last cell of column j. Returns the n-grams, column by column: a column gives one
  /// when all its cells below level 0 are predictions.
  std::vector<Tokens> roll(const Tokens& last, const Tokens& accepted) {
    std::vector<Tokens> grams;
    for (int j = 0; j < w_; ++j) {
      Tokens gram;
      bool predicted = true;
      for (int r = 0; r < n_ - 1; ++r) {
        gram.push_back(token(r, j));
        predicted = predicted && (r == 0 || grid_[at(r)][at(j)].predicted);
      }
      gram.push_back(last.at(at(j)));
      if (predicted) grams.push_back(gram);
    }

    std::vector<std::vector<Cell>> next(at(levels_), std::vector<Cell>(at(columns_)));
    const int shift = slides_ ? static_cast<int>(accepted.size()) - 1 : 0;
    for (int r = 0; r < n_ - 1; ++r)
      for (int j = 0; j + shift < w_; ++j)
        next[at(r)][at(j)] = r < n_ - 2 ? grid_[at(r + 1)][at(j + shift)] : Cell{last.at(at(j + shift)), true, true};
    grid_ = next;
    freeze(accepted.back());
    return grams;
  }

  /// A step without the window: it only gets a new root.
  void freeze(Token root) { grid_[0][0] = {root, true, true}; }

 private:
  struct Cell {
    Token token = -1;
    bool present = false;    // else it starts anew when it is planted next
    bool predicted = false;  // by the model, not taken from the prompt
  };

  static std::size_t at(int i) { return static_cast<std::size_t>(i); }

  int columns_, levels_;
  bool slides_;
  std::function<Tokens(int)> segment_;
  std::vector<std::vector<Cell>> grid_;
  int w_ = 0, n_ = 0;
};

}  // namespace naive
