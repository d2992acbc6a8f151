#pragma once
/// @file random.hpp
/// Random numbers that a seed decides.

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t bits() { return engine_(); }
  /// A number in [0, n).
  int below(int n) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(n)); }
  bool one_in(int n) { return below(n) == 0; }
  /// Tokens in [0, vocabulary).
  std::vector<std::int32_t> tokens(int count, int vocabulary) {
    std::vector<std::int32_t> t(static_cast<std::size_t>(count));
    for (std::int32_t& one : t) one = below(vocabulary);
    return t;
  }

 private:
  std::mt19937_64 engine_;
};
