#pragma once
/// @file logit_lane.hpp
/// What one of 32 lanes does that look for the largest of many logits: it holds 16 vectors of 16 bytes.

#include <cstddef>
#include <cstdint>

#include "lookahead/detail/bits.hpp"
#include "lookahead/detail/config.hpp"

namespace lookahead::detail {

/// How a floating-point type lies in memory: sign, exponent, mantissa. An *order* is an unsigned integer that compares
/// as the number does; shorter ones are filled up to 32 bits from below.
template <int Bits, std::uint32_t Infinity>
struct LogitFormat {
  static constexpr int bytes = Bits / 8, per_word = 32 / Bits;
  static constexpr std::uint32_t sign = 0x80000000U, infinity = (Infinity << (32 - Bits)) | sign;
  /// The orders of what does not compare so: the smaller zero, and the largest and smallest of numbers.
  static constexpr std::uint32_t zero = sign, minus_zero = zero - (1U << (32 - Bits)),
                                 minus_infinity = ~infinity & (~0U << (32 - Bits));

  /// Orders all numbers of a word. Zeros and NaNs need `exact`.
  [[nodiscard]] static LOOKAHEAD_HD constexpr std::uint32_t order(std::uint32_t word) {
    if constexpr (per_word == 1) {
      return word ^ ((word & sign) != 0 ? ~0U : sign);
    } else {
      return word ^ (((word & 0x80008000U) >> 15) * 0xFFFFU | 0x80008000U);
    }
  }
  /// The order of number j of a word; bits below it may be set.
  [[nodiscard]] static LOOKAHEAD_HD constexpr std::uint32_t part(std::uint32_t ordered, int j) {
    return j + 1 < per_word ? ordered << Bits % 32 : ordered;
  }
  /// Whether the order of number j of a word is `least` or more. Not by `part`, whose results a compiler would keep.
  [[nodiscard]] static LOOKAHEAD_HD constexpr bool reaches(std::uint32_t ordered, int j, std::uint32_t least) {
    return j + 1 < per_word ? (ordered & 0xFFFFU) >= least >> Bits % 32 : ordered >= least;
  }
  /// Both zeros are equal; NaNs are equal and lie below all numbers, at 0.
  [[nodiscard]] static LOOKAHEAD_HD constexpr std::uint32_t exact(std::uint32_t ordered) {
    ordered &= ~0U << (32 - Bits);
    if (ordered > infinity || ordered < minus_infinity) return 0;
    return ordered == minus_zero ? zero : ordered;
  }
};

using Float32Format = LogitFormat<32, 0x7F800000U>;
using Float16Format = LogitFormat<16, 0x7C00U>;
using BFloat16Format = LogitFormat<16, 0x7F80U>;

/// A logit's order and its token: the larger logit is the larger key, and the lower token among equal ones. 0 is none.
LOOKAHEAD_HD constexpr std::uint64_t logit_key(std::uint32_t order, std::uint32_t token) {
  return std::uint64_t{order} << 32 | ~token;
}
LOOKAHEAD_HD constexpr std::uint32_t key_token(std::uint64_t key) { return ~static_cast<std::uint32_t>(key); }

/// The K largest keys, descending; keys are distinct, but for 0.
template <int K>
struct BestKeys {
  std::uint64_t key[K];

  LOOKAHEAD_HD void clear() {
    for (std::uint64_t& k : key) k = 0;
  }
  LOOKAHEAD_HD void offer(std::uint64_t k) {
    if (k <= key[K - 1]) return;
    key[K - 1] = k;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = K - 1; i > 0; --i) {
      const std::uint64_t a = key[i - 1], b = key[i];
      key[i - 1] = a > b ? a : b;
      key[i] = a > b ? b : a;
    }
  }
  /// Takes the first one away.
  LOOKAHEAD_HD void pop() {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i + 1 < K; ++i) key[i] = key[i + 1];
    key[K - 1] = 0;
  }
};

/// 16 bytes that are read at once.
struct alignas(16) LogitVector {
  std::uint32_t word[4];
};

/// One lane's part of one row. A row is cut into aligned vectors, and these into chunks: vector i of a lane is number
/// i * 32 + lane of the chunk.
template <class Format>
struct LogitLane {
  static constexpr int vectors = 16, per_vector = 16 / Format::bytes;
  static constexpr int max_vocabulary = 1 << 30;

  /// How many chunks there are, at most, wherever a row begins.
  [[nodiscard]] static LOOKAHEAD_HD constexpr int chunks(int vocabulary) {
    constexpr int size = vectors * 32 * per_vector;
    return (vocabulary + per_vector - 1 + size - 1) / size;
  }

  /// Reads what the lane has of a chunk. Where a vector is not the row's alone, its numbers are read one by one, and
  /// those of others become the smallest of all.
  LOOKAHEAD_HD void load(const void* logits, int vocabulary, int chunk, int lane) {
    row = static_cast<const unsigned char*>(logits);
    size = vocabulary;
    const auto before = static_cast<int>(reinterpret_cast<std::uintptr_t>(row) % sizeof(LogitVector));
    first = (chunk * vectors * 32 + lane) * per_vector - before / Format::bytes;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < vectors; ++i) {
      const int token = first + i * 32 * per_vector;
      LogitVector v = {{~0U, ~0U, ~0U, ~0U}};
      if (token >= 0 && token + per_vector <= size) {
        v = *reinterpret_cast<const LogitVector*>(row + std::int64_t{token} * Format::bytes);
      } else if (token + per_vector > 0 && token < size) {
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
        for (int j = 0; j < per_vector; ++j)
          if (token + j >= 0 && token + j < size) put(v, j, number(token + j));
      }
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
      for (int w = 0; w < 4; ++w) ordered[i * 4 + w] = v.word[w];
    }
    // Behind all of them, so that they are on their way together.
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (std::uint32_t& word : ordered) word = Format::order(word);
  }

  /// The exact order of the largest logit; 0 where there is none, or where a NaN hides it.
  [[nodiscard]] LOOKAHEAD_HD std::uint32_t largest() const {
    std::uint32_t most = 0;
    each([&](std::uint32_t word, int j, int) {
      const std::uint32_t o = Format::part(word, j);
      most = o > most ? o : most;
    });
    return Format::exact(most);
  }

  /// Offers the logits whose exact order is `least` or more; few, where `least` is well chosen.
  template <int K>
  LOOKAHEAD_HD void offer(std::uint32_t least, BestKeys<K>& best) const {
    constexpr int masks = vectors * per_vector / 32;
    if (least == Format::zero) least = Format::minus_zero;
    std::uint32_t mask[masks] = {};
    each([&](std::uint32_t word, int j, int i) {
      mask[i / 32] |= static_cast<std::uint32_t>(Format::reaches(word, j, least)) << i % 32;
    });
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int m = 0; m < masks; ++m) {
      for (; mask[m] != 0; mask[m] &= mask[m] - 1) {
        const int i = m * 32 + lowest(mask[m]);
        const int token = first + i / per_vector * (32 * per_vector) + i % per_vector;
        // Read again: what lies in registers cannot be indexed.
        if (token >= 0 && token < size)
          best.offer(logit_key(Format::exact(Format::order(number(token) << (32 - 8 * Format::bytes))),
                               static_cast<std::uint32_t>(token)));
      }
    }
  }

  const unsigned char* row;
  int first, size;
  std::uint32_t ordered[vectors * 4];

 private:
  template <class F>
  LOOKAHEAD_HD void each(const F& f) const {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int w = 0; w < vectors * 4; ++w)
      for (int j = 0; j < Format::per_word; ++j) f(ordered[w], j, w * Format::per_word + j);
  }

  /// The bits of a token's logit.
  [[nodiscard]] LOOKAHEAD_HD std::uint32_t number(int token) const {
    if constexpr (Format::bytes == 4)
      return reinterpret_cast<const std::uint32_t*>(row)[token];
    else
      return reinterpret_cast<const std::uint16_t*>(row)[token];
  }

  /// Sets number j of a vector.
  static LOOKAHEAD_HD void put(LogitVector& v, int j, std::uint32_t bits) {
    const int shift = j % Format::per_word * 8 * Format::bytes;
    const std::uint32_t mask = (~0U >> (32 - 8 * Format::bytes)) << shift;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int w = 0; w < 4; ++w)  // v.word[j / ...] would put the vector into memory
      if (w == j / Format::per_word) v.word[w] = (v.word[w] & ~mask) | bits << shift;
  }
};

}  // namespace lookahead::detail
