#pragma once
/// @file kernels.hpp
/// The arithmetic of the engine. Within one set of kernels every result is a function of its own inputs alone, to the
/// last bit: the order of its additions depends neither on the number of rows nor on how the work is cut.

#include <cstddef>
#include <cstdint>
#include <span>

#include "engines/weights.hpp"

namespace lookahead::engines {

/// A weight matrix [outputs, columns]. Single numbers lie in row-major order, as a file stores them; packed types are
/// interleaved (weights.hpp).
struct Matrix {
  const std::byte* data = nullptr;
  std::size_t stride = 0;  ///< bytes of a row
  WeightType type = WeightType::f32;
  int outputs = 0, columns = 0;
};

/// Vectors are padded to whole blocks of this many floats, and keys are cached in blocks of as many positions.
inline constexpr int block_size = 32;

/// `n` rounded up to whole blocks.
[[gnu::always_inline]] constexpr std::size_t padded(int n) {
  return static_cast<std::size_t>((n + block_size - 1) / block_size * block_size);
}

/// A block of activations in quantised form takes the place of so many floats.
inline constexpr int quantised_floats = 12;

/// From a row of activations of n numbers to the next, in floats: whole blocks, their quantised form, all in whole
/// cache lines, and one more, or rows would compete for the same places in the cache where their length is a power of
/// two.
constexpr std::size_t row_stride(int n) {
  return (padded(n) / block_size * (block_size + quantised_floats) + 15) / 16 * 16 + 16;
}

/// One implementation of the arithmetic. Strides (`ldx`, ...) are in floats.
struct Kernels {
  const char* name;

  /// Writes the quantised form of the numbers [first, last) of a row of n behind it, at x + padded(n): for each block
  /// signed bytes, their scale, which is the largest magnitude / 127, and their sums. A block that holds an infinity or
  /// no number gives products that are no numbers. Preconditions: `first` is a multiple of block_size, and `last` too
  /// or n; the row goes on with zeros up to padded(n).
  void (*quantise)(float* x, int first, int last, int n);

  /// y[r * ldy + o] = w[o] . x[r], for o in [first, last) and r in [0, rows). Preconditions: single numbers meet the
  /// floats of x[r], which goes on with zeros up to `padded(columns)`; packed weights meet its quantised form.
  void (*multiply)(const Matrix& w, int first, int last, const float* x, std::size_t ldx, int rows, float* y,
                   std::size_t ldy);

  /// c[m, n] += a[m, k] * b[k, n]; every element adds its k products one by one, in order.
  void (*accumulate)(const float* a, std::size_t lda, const float* b, std::size_t ldb, float* c, std::size_t ldc, int m,
                     int k, int n);

  /// x += more, then y = x / sqrt(mean(x^2) + epsilon) * w. Precondition: x goes on with zeros up to `padded(n)`.
  void (*add_and_normalise)(float* x, const float* more, const float* w, float epsilon, int n, float* y);

  /// s[i] = exp(s[i] - max(s)); returns their sum. Preconditions: n >= 1; s may be overwritten up to `padded(n)`.
  float (*exponentials)(float* s, int n);

  /// gate = silu(gate) * up.
  void (*gate)(float* gate, const float* up, int n);

  /// Writes the places of the largest values, the largest first, the lowest place first on ties; returns how many,
  /// which is `count` or n. One pass.
  int (*top)(const float* x, int n, std::int32_t* out, int count);

  /// Multiply-adds that one thread does with weights of a type in `rounds` rounds in registers, as a measure of the
  /// machine: float products, or for packed types products of blocks, scaled and added.
  double (*peak)(WeightType type, int rounds);
};

/// The sets that this machine runs, the fastest first: avx512 (with VNNI: Intel from Cascade Lake and Ice Lake on, AMD
/// from Zen 4), avx2 (with FMA and F16C), portable, which runs everywhere.
std::span<const Kernels* const> available_kernels();

}  // namespace lookahead::engines
