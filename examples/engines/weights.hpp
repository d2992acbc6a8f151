#pragma once
/// @file weights.hpp
/// How model files store numbers.

#include <cstddef>
#include <cstdint>
#include <optional>

namespace lookahead::engines {

/// A way to store a row of numbers; the values are the ones of the GGUF format. Quantised types pack 32 numbers in a
/// block: a scale d (Q4_1: and an offset m) in half precision, then signed bytes (Q8_0: d * q) or nibbles, those of the
/// first 16 numbers in the low halves (Q4_0: d * (q - 8), Q4_1: d * q + m). All are little-endian.
enum class WeightType : std::uint32_t { f32 = 0, f16 = 1, q4_0 = 2, q4_1 = 3, q8_0 = 8, bf16 = 30 };

/// The type of that number in a file, or nothing where it is not supported.
[[nodiscard]] std::optional<WeightType> weight_type(std::uint32_t number);

/// The name of a type, as in "Q8_0".
[[nodiscard]] const char* weight_type_name(WeightType type);

/// Numbers in a block, and its bytes.
[[nodiscard]] std::size_t block_numbers(WeightType type);
[[nodiscard]] std::size_t block_bytes(WeightType type);

/// Bytes of a row of `columns` numbers, which are whole blocks.
[[nodiscard]] inline std::size_t row_bytes(WeightType type, std::size_t columns) {
  return columns / block_numbers(type) * block_bytes(type);
}

/// Whether a type packs numbers in blocks.
[[nodiscard]] inline bool is_packed(WeightType type) { return block_numbers(type) > 1; }

/// out[0..columns) = the numbers of a row. Plain code, for loading, embeddings and checks.
void decode_row(WeightType type, const std::byte* row, std::size_t columns, float* out);

/// Stores numbers as a row, each rounded to the nearest that the type can hold (to even on ties, beyond the range to
/// infinity); quantised types choose the scale by the largest magnitude in a block.
void encode_row(WeightType type, const float* numbers, std::size_t columns, std::byte* row);

/// Rows of packed weights that lie together once interleaved.
inline constexpr int interleaved = 16;

/// Rearranges `rows` rows of packed weights, at most `interleaved`, so that vectors hold numbers of different rows:
/// for each block the scales d of every row (Q4_1: then the offsets m); behind all scales, for each block and each four
/// bytes of its numbers, those four of every row. It takes `interleaved` times the bytes of a row; of absent rows
/// nothing is written.
void interleave(WeightType type, const std::byte* from, int rows, std::size_t columns, std::byte* to);

}  // namespace lookahead::engines
