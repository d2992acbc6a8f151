#pragma once
/// @file row_offer.hpp
/// What a planned tree is worth, row by row.

#include <cstddef>
#include <cstdint>
#include <span>

#include "lookahead/detail/config.hpp"

namespace lookahead {

/// What a controller must know of a planned tree to decide how many of its rows to keep.
struct RowOffer {
  std::int32_t fixed = 0;                  ///< the first rows, which stay: pending chain, window, published guesses
  std::int32_t fixed_logits = 0;           ///< wanted rows among them
  std::uint64_t expected = 0;              ///< tokens expected of them, Q32.32
  std::span<const std::uint32_t> reach{};  ///< of each further row, in order, Q0.32
  std::uint32_t factor = unscaled;         ///< of the reaches, see Calibration

  static constexpr std::uint32_t unscaled = 1U << 16;

  /// Tokens expected of a row, at most one, Q0.32.
  [[nodiscard]] static LOOKAHEAD_HD constexpr std::uint32_t gain_of(std::uint32_t reach, std::uint32_t factor) {
    const std::uint64_t gain = std::uint64_t{reach} * factor >> 16;
    return gain < ~0U ? static_cast<std::uint32_t>(gain) : ~0U;
  }

  /// The same of further row `i`; it never rises.
  [[nodiscard]] std::uint32_t gain(std::size_t i) const { return gain_of(reach[i], factor); }
};

}  // namespace lookahead
