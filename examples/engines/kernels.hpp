#pragma once
/// @file kernels.hpp
/// The arithmetic of the engine. Every result is a function of its own inputs alone: the order of its additions depends
/// neither on the number of rows nor on how the work is cut.

#include <cstddef>

#include "engines/gguf.hpp"

namespace lookahead::engines {

/// A weight matrix [outputs, columns] in row-major order, as the file stores it.
struct Matrix {
  const std::byte* data = nullptr;
  WeightType type = WeightType::f32;
  int outputs = 0, columns = 0;

  [[nodiscard]] std::size_t stride() const { return row_bytes(type, static_cast<std::size_t>(columns)); }
};

/// Keys are cached in blocks of this many positions.
inline constexpr int key_block = 32;

/// One implementation of the arithmetic. Row strides (`ldx`, ...) are in floats.
struct Kernels {
  const char* name;

  /// out[0..columns) = row `row` of `w`.
  void (*decode)(const Matrix& w, int row, float* out);

  /// y[r * ldy + o] = w[o] . x[r], for o in [first, last) and r in [0, rows).
  void (*multiply)(const Matrix& w, int first, int last, const float* x, std::size_t ldx, int rows, float* y,
                   std::size_t ldy);

  /// c[m, n] += a[m, k] * b[k, n]; every element adds its k products one by one, in order.
  void (*accumulate)(const float* a, std::size_t lda, const float* b, std::size_t ldb, float* c, std::size_t ldc, int m,
                     int k, int n);

  /// y = x / sqrt(mean(x^2) + epsilon) * w.
  void (*normalise)(const float* x, const float* w, float epsilon, int n, float* y);

  /// s[i] = exp(s[i] - max(s)); returns their sum. n >= 1.
  float (*exponentials)(float* s, int n);

  /// gate = silu(gate) * up.
  void (*gate)(float* gate, const float* up, int n);
};

/// Runs everywhere.
const Kernels& portable_kernels();

}  // namespace lookahead::engines
