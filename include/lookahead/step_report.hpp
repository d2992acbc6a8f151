#pragma once
/// @file step_report.hpp
/// What a step cost and what it yielded.

#include <cstdint>

#include "lookahead/estimates.hpp"

namespace lookahead {

/// Why a row behind the root stands in the tree: a window row that no candidate backs, or a candidate of a source.
enum class Origin : std::uint8_t { window_row, text, generated, window, recycled };

inline constexpr int origin_count = 5;

/// An account of one step. `Depths` is the number of depths behind the root, depth d being entry d - 1.
template <int Depths>
struct StepReport {
  std::int32_t rows;            ///< rows of the tree, pending chain included
  std::int32_t logit_rows;      ///< rows that wanted logits
  std::int32_t published_rows;  ///< rows that the published method spends at this shape: W (N - 1) + G (N - 1)
  std::int32_t tokens;          ///< tokens that the step yielded
  double expected;  ///< tokens that growth expected of it: 1 + the sum of the rows' reaches; 1 without growth
  std::int16_t drafted[origin_count][Depths];   ///< rows behind the root
  std::int16_t accepted[origin_count][Depths];  ///< those of them on the accepted path
};

}  // namespace lookahead
