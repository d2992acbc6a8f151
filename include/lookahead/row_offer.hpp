#pragma once
/// @file row_offer.hpp
/// What a planned tree is worth, row by row.

#include <cstddef>
#include <cstdint>
#include <span>

namespace lookahead {

/// What a controller must know of a planned tree to decide how many of its rows to keep.
struct RowOffer {
  std::int32_t fixed = 0;                  ///< the first rows, which stay: pending chain, window, published guesses
  std::int32_t fixed_logits = 0;           ///< wanted rows among them
  std::uint64_t expected = 0;              ///< tokens expected of them, unsigned Q32.32
  std::span<const std::uint32_t> reach{};  ///< of each further row, in order, Q0.32; it never rises
  std::uint32_t factor = 1U << 16;         ///< tokens expected of a row, by its reach, Q16.16

  /// Tokens expected of further row `i`, Q32.32.
  [[nodiscard]] std::uint64_t gain(std::size_t i) const { return std::uint64_t{reach[i]} * factor >> 16; }
};

}  // namespace lookahead
