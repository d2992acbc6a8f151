#pragma once
/// @file shape.hpp
/// What a step may look like.

#include <cstdint>

#include "lookahead/detail/config.hpp"

namespace lookahead {

/// How the pool's guesses enter the tree.
enum class ShapeMode : std::uint8_t {
  growth,    ///< the rows that the walk will most probably reach, by estimates learnt while decoding
  published  ///< up to g whole n-grams of the root's token, newest first, as in the published method
};

/// What a step spends its rows on. Values beyond the compiled maxima are cut to them. All shapes give the same text.
struct Shape {
  std::int32_t w = 0;        ///< columns of the window; 0 freezes it
  std::int32_t n = 1 << 30;  ///< the window has n - 1 levels, a published guess n - 1 tokens; at least 2
  std::int32_t g = 1 << 30;  ///< published guesses; growth is on where g is not 0
  ShapeMode mode = ShapeMode::growth;
  bool slide = false;  ///< after k accepted tokens the window moves k - 1 columns on; with n = 2: Jacobi iteration

  /// The shape of the published method at the compiled maxima.
  [[nodiscard]] static constexpr Shape published() { return {1 << 30, 1 << 30, 1 << 30, ShapeMode::published, false}; }
};

/// What a step must not exceed. Pending rows are counted.
struct Limits {
  std::int32_t rows = 1 << 30;         ///< rows of the tree; 1 is plain decoding
  std::int32_t logit_rows = 1 << 30;   ///< wanted rows
  std::int32_t depth = 1 << 30;        ///< rows behind the root on any path
  std::int32_t tokens_left = 1 << 30;  ///< tokens that the step may yield
};

}  // namespace lookahead
