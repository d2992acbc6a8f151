#include "engines/weights.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>

namespace lookahead::engines {
namespace {

struct TypeLayout {
  WeightType type;
  const char* name;
  std::size_t numbers, bytes;  ///< of a block
};
constexpr TypeLayout layouts[] = {
    {WeightType::f32, "F32", 1, 4},     {WeightType::f16, "F16", 1, 2},     {WeightType::bf16, "BF16", 1, 2},
    {WeightType::q8_0, "Q8_0", 32, 34}, {WeightType::q4_0, "Q4_0", 32, 18}, {WeightType::q4_1, "Q4_1", 32, 20},
};

const TypeLayout& layout_of(WeightType type) {
  return *std::find_if(std::begin(layouts), std::end(layouts), [&](const TypeLayout& l) { return l.type == type; });
}

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void store(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

float from_half(std::uint16_t h) {
  const std::uint32_t sign = (h & 0x8000U) << 16, exponent = (h >> 10) & 31U, mantissa = h & 0x3FFU;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | (exponent == 31 ? 0x7F800000U : (exponent + 112) << 23) | mantissa << 13);
}

std::uint16_t to_half(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = bits >> 16 & 0x8000U, magnitude = bits & 0x7FFFFFFFU;
  std::uint32_t out;
  if (magnitude > 0x7F800000U) {
    out = 0x7E00U;  // not a number
  } else if (magnitude >= 0x477FF000U) {
    out = 0x7C00U;  // rounds beyond the largest half
  } else if (magnitude >= 0x38800000U) {
    out = (magnitude - 0x38000000U + 0xFFFU + (magnitude >> 13 & 1U)) >> 13;
  } else {
    // A subnormal half counts units of 2^-24: adding 0.5 lets the float adder round to them.
    out = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3F000000U;
  }
  return static_cast<std::uint16_t>(sign | out);
}

std::uint16_t to_bfloat(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<std::uint16_t>(bits >> 16 | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
}

/// The nearest of the integers least..most.
int quantum(float x, int least, int most) { return std::clamp(static_cast<int>(std::lrint(x)), least, most); }

void pack_nibbles(const int* q, std::byte* to) {
  for (int j = 0; j < 16; ++j) to[j] = static_cast<std::byte>(q[j] | q[j + 16] << 4);
}

void encode_block(WeightType type, const float* x, std::byte* to) {
  const auto [least, most] = std::minmax_element(x, x + 32);
  const float extreme = -*least > *most ? *least : *most;  // of largest magnitude
  int q[32];
  if (type == WeightType::q8_0) {
    const float d = std::abs(extreme) / 127;
    store(to, to_half(d));
    for (int j = 0; j < 32; ++j) store(to + 2 + j, static_cast<std::int8_t>(quantum(d > 0 ? x[j] / d : 0, -127, 127)));
  } else if (type == WeightType::q4_0) {
    const float d = extreme / -8;  // the longer end of -8..7 takes the extreme
    store(to, to_half(d));
    for (int j = 0; j < 32; ++j) q[j] = quantum(d != 0 ? x[j] / d : 0, -8, 7) + 8;
    pack_nibbles(q, to + 2);
  } else {
    const float d = (*most - *least) / 15;
    store(to, to_half(d));
    store(to + 2, to_half(*least));
    for (int j = 0; j < 32; ++j) q[j] = quantum(d > 0 ? (x[j] - *least) / d : 0, 0, 15);
    pack_nibbles(q, to + 4);
  }
}

void decode_block(WeightType type, const std::byte* from, float* out) {
  const float d = from_half(load<std::uint16_t>(from));
  for (int j = 0; j < 32; ++j) {
    if (type == WeightType::q8_0) {
      out[j] = d * static_cast<float>(load<std::int8_t>(from + 2 + j));
      continue;
    }
    const bool offset = type == WeightType::q4_1;
    const unsigned pair = load<std::uint8_t>(from + (offset ? 4 : 2) + j % 16);
    const int q = static_cast<int>(j < 16 ? pair & 15U : pair >> 4);
    // One rounding: d * q is exact in a float, whether fused or not.
    out[j] = offset ? std::fma(d, static_cast<float>(q), from_half(load<std::uint16_t>(from + 2)))
                    : d * static_cast<float>(q - 8);
  }
}

}  // namespace

std::optional<WeightType> weight_type(std::uint32_t number) {
  for (const TypeLayout& l : layouts)
    if (static_cast<std::uint32_t>(l.type) == number) return l.type;
  return std::nullopt;
}

const char* weight_type_name(WeightType type) { return layout_of(type).name; }
std::size_t block_numbers(WeightType type) { return layout_of(type).numbers; }
std::size_t block_bytes(WeightType type) { return layout_of(type).bytes; }

void decode_row(WeightType type, const std::byte* row, std::size_t columns, float* out) {
  switch (type) {
    case WeightType::f32:
      std::memcpy(out, row, columns * sizeof(float));
      return;
    case WeightType::f16:
      for (std::size_t i = 0; i < columns; ++i) out[i] = from_half(load<std::uint16_t>(row + 2 * i));
      return;
    case WeightType::bf16:
      for (std::size_t i = 0; i < columns; ++i)
        out[i] = std::bit_cast<float>(std::uint32_t{load<std::uint16_t>(row + 2 * i)} << 16);
      return;
    default:
      for (std::size_t i = 0; i < columns; i += 32, row += block_bytes(type)) decode_block(type, row, out + i);
  }
}

void encode_row(WeightType type, const float* numbers, std::size_t columns, std::byte* row) {
  switch (type) {
    case WeightType::f32:
      std::memcpy(row, numbers, columns * sizeof(float));
      return;
    case WeightType::f16:
      for (std::size_t i = 0; i < columns; ++i) store(row + 2 * i, to_half(numbers[i]));
      return;
    case WeightType::bf16:
      for (std::size_t i = 0; i < columns; ++i) store(row + 2 * i, to_bfloat(numbers[i]));
      return;
    default:
      for (std::size_t i = 0; i < columns; i += 32, row += block_bytes(type)) encode_block(type, numbers + i, row);
  }
}

void interleave(WeightType type, const std::byte* from, int rows, std::size_t columns, std::byte* to) {
  const std::size_t blocks = columns / 32, bytes = block_bytes(type), halves = type == WeightType::q4_1 ? 2 : 1;
  const std::size_t words = (bytes - 2 * halves) / 4;
  std::byte* const numbers = to + blocks * 2 * halves * interleaved;
  for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r)
    for (std::size_t b = 0; b < blocks; ++b, from += bytes) {
      for (std::size_t h = 0; h < halves; ++h)
        std::memcpy(to + ((b * halves + h) * interleaved + r) * 2, from + 2 * h, 2);
      for (std::size_t w = 0; w < words; ++w)
        std::memcpy(numbers + ((b * words + w) * interleaved + r) * 4, from + 2 * halves + 4 * w, 4);
    }
}

}  // namespace lookahead::engines
