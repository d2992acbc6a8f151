#pragma once
/// @file bits.hpp
/// Bits of a word and a mix of them, on a host or a device.

#include <cstdint>

#include "lookahead/detail/config.hpp"

namespace lookahead::detail {

/// The number of the lowest bit that is set. Precondition: one is.
[[nodiscard]] LOOKAHEAD_HD inline int lowest(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __ffs(static_cast<int>(bits)) - 1;
#else
  return __builtin_ctz(bits);
#endif
}

/// How many bits are set.
[[nodiscard]] LOOKAHEAD_HD inline int count_of(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

/// The finaliser of splitmix64: one to one, and 0 stays 0.
[[nodiscard]] LOOKAHEAD_HD constexpr std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

}  // namespace lookahead::detail
