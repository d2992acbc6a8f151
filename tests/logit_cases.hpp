#pragma once
/// @file logit_cases.hpp
/// Random logits of three floating-point types as bits in memory, and the best of them by a plain sort.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "random.hpp"

#include "lookahead/detail/logit_lane.hpp"

namespace logit_cases {

/// An IEEE type with so many bits of exponent and of mantissa.
template <class F, int ExponentBits, int MantissaBits>
struct Type {
  using Format = F;
  static constexpr std::uint32_t sign = 1U << (ExponentBits + MantissaBits), infinity = ((1U << ExponentBits) - 1)
                                                                                        << MantissaBits;
  static double value(std::uint32_t bits) {
    const std::uint32_t exponent = (bits & infinity) >> MantissaBits;
    const double mantissa = std::ldexp(static_cast<double>(bits & ((1U << MantissaBits) - 1)), -MantissaBits);
    constexpr int bias = (1 << (ExponentBits - 1)) - 1;
    const double plus_or_minus = (bits & sign) != 0 ? -1 : 1;
    if ((bits & infinity) == infinity)
      return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                           : plus_or_minus * std::numeric_limits<double>::infinity();
    return plus_or_minus * (exponent == 0 ? std::ldexp(mantissa, 1 - bias)
                                          : std::ldexp(1 + mantissa, static_cast<int>(exponent) - bias));
  }
};
using Float32 = Type<lookahead::detail::Float32Format, 8, 23>;
using Float16 = Type<lookahead::detail::Float16Format, 5, 10>;
using BFloat16 = Type<lookahead::detail::BFloat16Format, 8, 7>;

/// A larger number first; a NaN behind all numbers.
inline bool better(double a, double b) { return a > b || (!std::isnan(a) && std::isnan(b)); }

/// Rows of logits; what lies between them are NaNs.
template <class Type>
struct Rows {
  static constexpr int bytes = Type::Format::bytes;

  Rows(Random& random, int row_count, int row_size, int row_stride)
      : count(row_count),
        size(row_size),
        stride(row_stride),
        memory(static_cast<std::size_t>(count) * static_cast<std::size_t>(stride) * bytes, 0xFF) {
    for (int r = 0; r < count; ++r) {
      const int kind = random.below(7);
      for (int t = 0; t < size; ++t) {
        auto bits = static_cast<std::uint32_t>(random.bits());
        if (kind == 1) bits = static_cast<std::uint32_t>(random.below(3));                 // ties
        if (kind == 2) bits = random.one_in(2) ? 0U : Type::sign;                          // both zeros
        if (kind == 3) bits = ~0U >> random.below(2);                                      // NaNs alone
        if (kind == 4) bits = random.one_in(50) ? ~0U >> 1 : Type::sign | Type::infinity;  // of all but a few
        if (kind == 5) bits = random.one_in(50) ? bits : Type::sign | (random.one_in(9) ? 0U : Type::infinity);
        std::memcpy(at(r, t), &bits, bytes);
      }
    }
  }

  [[nodiscard]] unsigned char* at(int row, int token) {
    return memory.data() +
           (static_cast<std::size_t>(row) * static_cast<std::size_t>(stride) + static_cast<std::size_t>(token)) * bytes;
  }
  [[nodiscard]] double value(int row, int token) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, at(row, token), bytes);
    return Type::value(bits);
  }
  [[nodiscard]] std::vector<std::int32_t> best(int row, int k) {
    std::vector<double> values;
    for (int t = 0; t < size; ++t) values.push_back(value(row, t));
    std::vector<std::int32_t> tokens(values.size());
    std::iota(tokens.begin(), tokens.end(), 0);
    const auto by_value = [&](std::int32_t a, std::int32_t b) {
      const double x = values[static_cast<std::size_t>(a)], y = values[static_cast<std::size_t>(b)];
      return better(x, y) || (!better(y, x) && a < b);
    };
    std::partial_sort(tokens.begin(), tokens.begin() + k, tokens.end(), by_value);
    tokens.resize(static_cast<std::size_t>(k));
    return tokens;
  }

  int count, size, stride;
  std::vector<unsigned char> memory;
};

}  // namespace logit_cases
