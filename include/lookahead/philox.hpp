#pragma once
/// @file philox.hpp
/// Random numbers by counter: the number for a position is computed, not drawn in turn.

#include <cstdint>

#include "lookahead/detail/config.hpp"

namespace lookahead {

/// The Philox4x32-10 generator: a keyed bijection of 128-bit counters. Seed and stream and position fix a number, so
/// that rows that are evaluated and then rejected never disturb what is drawn behind them. Source: Salmon et al.,
/// "Parallel random numbers: as easy as 1, 2, 3", 2011.
struct Philox {
  std::uint32_t word[4];

  /// The block of a (seed, stream, position).
  [[nodiscard]] static LOOKAHEAD_HD constexpr Philox at(std::uint64_t seed, std::uint64_t stream,
                                                        std::uint64_t position) {
    Philox x{{low(position), high(position), low(stream), high(stream)}};
    std::uint32_t k0 = low(seed), k1 = high(seed);
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t a = std::uint64_t{0xD2511F53U} * x.word[0], b = std::uint64_t{0xCD9E8D57U} * x.word[2];
      x = {{high(b) ^ x.word[1] ^ k0, low(b), high(a) ^ x.word[3] ^ k1, low(a)}};
      k0 += 0x9E3779B9U;
      k1 += 0xBB67AE85U;
    }
    return x;
  }

  /// A number in [0, 1) with 53 random bits.
  [[nodiscard]] LOOKAHEAD_HD constexpr double uniform() const {
    return static_cast<double>((std::uint64_t{word[0]} << 32 | word[1]) >> 11) * 0x1p-53;
  }

 private:
  static LOOKAHEAD_HD constexpr std::uint32_t low(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
  static LOOKAHEAD_HD constexpr std::uint32_t high(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }
};

}  // namespace lookahead
