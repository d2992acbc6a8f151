#pragma once
/// @file jacobi_window.hpp
/// The 2-D window of guesses on which Jacobi iteration runs.

#include <cstdint>

#include "lookahead/detail/bits.hpp"
#include "lookahead/detail/config.hpp"

namespace lookahead {

/// A grid of guesses: `cell[r][j]`, level r = 0..N-2, column j = 0..W-1. Level 0 is a chain from the root `cell[0][0]`,
/// and column j continues from node j of level 0, so `cell[r][j]` guesses the token r + j positions behind the root.
/// Each step the model's choice behind each column becomes the last level, and level 0 is dropped.
///
/// Trivial, so that it may lie in shared memory; call `start` first. Every call is O(W N) at most.
/// Source: Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", 2024.
template <int W, int N, class Token = std::int32_t>
struct JacobiWindow {
  static_assert(W >= 1, "A window has at least one column: pass shape.w = 0 to a step that should run without it.");
  static_assert(N >= 2, "N-grams have at least two tokens: use N = 2 for plain Jacobi iteration.");
  static_assert(N <= 32, "N-grams have at most 32 tokens: a column's levels are the bits of a word.");
  static constexpr int width = W, levels = N - 1;

  Token cell[levels][W];
  Token segment[W + N - 2];    ///< where cells restart: cell(r, j) = segment[r + j]
  std::uint32_t predicted[W];  ///< bit r is set where cell[r][j] is a prediction of the model, not a prompt token
  std::int32_t w, n;           ///< extents of the part that is up to date

  /// Fills the window from W + N - 2 prompt tokens at a place that `seed` picks, repeated if the prompt is short. All
  /// columns then merge into one chain. Precondition: count >= 1.
  LOOKAHEAD_HD void start(const Token* prompt, int count, std::uint64_t seed) {
    constexpr int length = W + N - 2;
    const int places = count >= length ? count - length + 1 : count;
    const int place = static_cast<int>(detail::mixed(seed) % static_cast<std::uint64_t>(places));
    for (int i = 0; i < length; ++i) segment[i] = prompt[(place + i) % count];
    w = 0;
    n = N;
    prepare(W, N);
    resize(W, N);
    cell[0][0] = prompt[count - 1];
  }

  /// Writes the cells that a step with the given extents needs beyond the present ones: columns and levels that come
  /// back restart from the segment. Changes nothing inside the present extents.
  LOOKAHEAD_HD void prepare(int new_w, int new_n) {
    for (int j = 0; j < new_w; ++j)
      for (int r = j < w ? n - 1 : j == 0 ? 1 : 0; r < new_n - 1; ++r) cell[r][j] = segment[r + j];
  }

  /// Sets the extents. Precondition: `prepare` was called with them since the last change.
  LOOKAHEAD_HD void resize(int new_w, int new_n) {
    for (int j = 0; j < new_w; ++j) predicted[j] = j < w ? predicted[j] & below(new_n - 1) : 0U;
    w = new_w;
    n = new_n;
  }

  /// Whether column j yields an n-gram: all its cells behind level 0 are predictions.
  [[nodiscard]] LOOKAHEAD_HD bool ripe(int j) const { return predicted[j] >> 1 == below(n - 2); }

  /// One step on: `next[j]` is the model's choice behind column j, and becomes the last level; level 0 is dropped, and
  /// `root` takes the place of the new level's first token. `shift` columns are dropped on the left and restart on the
  /// right, which keeps every guess at its own position when shift + 1 tokens were accepted.
  template <class Gr>
  LOOKAHEAD_HD void roll(const Gr& g, const Token* next, int shift, Token root) {
    for (int r = 0; r < n - 1; ++r) {
      const Token* from = r < n - 2 ? cell[r + 1] : next;
      for (int j = g.rank(); j < w; j += g.size()) cell[r][j] = j + shift < w ? from[j + shift] : segment[r + j];
      g.sync();
    }
    if (g.rank() == 0) {
      for (int j = 0; j < w; ++j) predicted[j] = j + shift < w ? predicted[j + shift] >> 1 | 1U << (n - 2) : 0U;
      cell[0][0] = root;
    }
    g.sync();
  }

 private:
  /// The bits 0..count-1.
  static LOOKAHEAD_HD constexpr std::uint32_t below(int count) { return (1U << count) - 1; }
};

}  // namespace lookahead
