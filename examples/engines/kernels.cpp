#include "engines/kernels.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace lookahead::engines {
namespace {

constexpr int lanes = 8;

float half(std::uint16_t h) {
  const std::uint32_t sign = (h & 0x8000U) << 16, exponent = (h >> 10) & 31U, mantissa = h & 0x3FFU;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | (exponent == 31 ? 0x7F800000U : (exponent + 112) << 23) | mantissa << 13);
}

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

void decode(const Matrix& w, int row, float* out) {
  const std::byte* from = w.data + static_cast<std::size_t>(row) * w.stride();
  switch (w.type) {
    case WeightType::f32:
      std::memcpy(out, from, static_cast<std::size_t>(w.columns) * sizeof(float));
      return;
    case WeightType::f16:
      for (int i = 0; i < w.columns; ++i) out[i] = half(load<std::uint16_t>(from + 2 * i));
      return;
    case WeightType::bf16:
      for (int i = 0; i < w.columns; ++i)
        out[i] = std::bit_cast<float>(std::uint32_t{load<std::uint16_t>(from + 2 * i)} << 16);
      return;
    case WeightType::q8_0:
      for (int i = 0; i < w.columns; i += 32, from += 34)
        for (int j = 0; j < 32; ++j)
          out[i + j] = half(load<std::uint16_t>(from)) * static_cast<float>(load<std::int8_t>(from + 2 + j));
      return;
    case WeightType::q4_0:
      for (int i = 0; i < w.columns; i += 32, from += 18)
        for (int j = 0; j < 32; ++j) {
          const unsigned nibbles = load<std::uint8_t>(from + 2 + j % 16);
          const int q = static_cast<int>(j < 16 ? nibbles & 15U : nibbles >> 4) - 8;
          out[i + j] = half(load<std::uint16_t>(from)) * static_cast<float>(q);
        }
      return;
    case WeightType::q4_1:
      for (int i = 0; i < w.columns; i += 32, from += 20)
        for (int j = 0; j < 32; ++j) {
          const unsigned nibbles = load<std::uint8_t>(from + 4 + j % 16);
          const unsigned q = j < 16 ? nibbles & 15U : nibbles >> 4;
          out[i + j] = half(load<std::uint16_t>(from)) * static_cast<float>(q) + half(load<std::uint16_t>(from + 2));
        }
      return;
  }
}

float dot(const float* a, const float* b, int n) {
  float sum[lanes] = {};
  int i = 0;
  for (; i + lanes <= n; i += lanes)
    for (int l = 0; l < lanes; ++l) sum[l] += a[i + l] * b[i + l];
  for (int l = 0; i + l < n; ++l) sum[l] += a[i + l] * b[i + l];
  return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

constexpr int max_columns = 1 << 16;

void multiply(const Matrix& w, int first, int last, const float* x, std::size_t ldx, int rows, float* y,
              std::size_t ldy) {
  thread_local float row[max_columns];
  for (int o = first; o < last; ++o) {
    decode(w, o, row);
    for (int r = 0; r < rows; ++r)
      y[static_cast<std::size_t>(r) * ldy + static_cast<std::size_t>(o)] =
          dot(x + static_cast<std::size_t>(r) * ldx, row, w.columns);
  }
}

void accumulate(const float* a, std::size_t lda, const float* b, std::size_t ldb, float* c, std::size_t ldc, int m,
                int k, int n) {
  for (int i = 0; i < m; ++i)
    for (int p = 0; p < k; ++p) {
      const float scale = a[static_cast<std::size_t>(i) * lda + static_cast<std::size_t>(p)];
      const float* const from = b + static_cast<std::size_t>(p) * ldb;
      float* const to = c + static_cast<std::size_t>(i) * ldc;
      for (int j = 0; j < n; ++j) to[j] += scale * from[j];
    }
}

void normalise(const float* x, const float* w, float epsilon, int n, float* y) {
  const float scale = 1.0F / std::sqrt(dot(x, x, n) / static_cast<float>(n) + epsilon);
  for (int i = 0; i < n; ++i) y[i] = x[i] * scale * w[i];
}

float exponentials(float* s, int n) {
  float most = s[0];
  for (int i = 1; i < n; ++i) most = s[i] > most ? s[i] : most;
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += s[i] = std::exp(s[i] - most);
  return sum;
}

void gate(float* gate, const float* up, int n) {
  for (int i = 0; i < n; ++i) gate[i] = gate[i] / (1.0F + std::exp(-gate[i])) * up[i];
}

}  // namespace

const Kernels& portable_kernels() {
  static constexpr Kernels kernels{"portable", decode, multiply, accumulate, normalise, exponentials, gate};
  return kernels;
}

}  // namespace lookahead::engines
