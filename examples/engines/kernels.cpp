// Compiled once for each instruction set, with LOOKAHEAD_KERNELS naming the set. Calls no inline function of anybody
// else, unless it is always inlined: a copy of it compiled for a newer processor could end up in code that runs on an
// older one.
#include "engines/kernels.hpp"

#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

#ifndef LOOKAHEAD_KERNELS
#define LOOKAHEAD_KERNELS portable
#define LOOKAHEAD_KERNELS_PORTABLE
#endif
#define LOOKAHEAD_CONCAT(a, b) a##b
#define LOOKAHEAD_FUNCTION(set) LOOKAHEAD_CONCAT(set, _kernels)
#define LOOKAHEAD_STRING(set) #set
#define LOOKAHEAD_NAME(set) LOOKAHEAD_STRING(set)

// Loops over registers must vanish, or the registers lie in memory.
#if defined(__clang__)
#define LOOKAHEAD_UNROLL _Pragma("unroll")
#else
#define LOOKAHEAD_UNROLL _Pragma("GCC unroll 32")
#endif
#define LOOKAHEAD_INLINE [[gnu::always_inline]] inline

namespace lookahead::engines {

namespace {

#if defined(__AVX512F__)
constexpr int lanes = 16, most_sums = 24, tile_rows = 8, f32_rows = 4, packed_rows = 8, summed = 8;
#elif defined(__AVX2__)
constexpr int lanes = 8, most_sums = 12, tile_rows = 6, f32_rows = 6, packed_rows = 4, summed = 4;
#else
constexpr int lanes = 4, most_sums = 12, tile_rows = 6, f32_rows = 6, packed_rows = 4, summed = 4;
#endif
constexpr int vectors = block_size / lanes;  ///< of a block

typedef float F __attribute__((vector_size(4 * lanes)));
typedef std::int32_t I __attribute__((vector_size(4 * lanes)));

std::size_t size(int n) { return static_cast<std::size_t>(n); }

template <class T>
LOOKAHEAD_INLINE T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
LOOKAHEAD_INLINE F load(const float* from) { return load<F>(static_cast<const void*>(from)); }
LOOKAHEAD_INLINE void store(float* to, F value) { std::memcpy(to, &value, sizeof value); }
/// (Less zero, not plus: x - 0 is x for every x, so nothing is left of it but the broadcast.)
LOOKAHEAD_INLINE F broadcast(float value) { return value - F{}; }
#if defined(__AVX512F__)
#define LOOKAHEAD_REGISTER "+v"
#elif defined(__x86_64__)
#define LOOKAHEAD_REGISTER "+x"
#else
#define LOOKAHEAD_REGISTER "+m"
#endif
/// Hides from the compiler what a value is.
template <class T>
LOOKAHEAD_INLINE void hide(T& value) {
  asm volatile("" : LOOKAHEAD_REGISTER(value));
}
/// Hinders the compiler from loading a value anew for every use, and from adding in another order.
template <class T>
LOOKAHEAD_INLINE void keep_in_register([[maybe_unused]] T& value) {
  if constexpr (lanes > 4) asm("" : LOOKAHEAD_REGISTER(value));
}
LOOKAHEAD_INLINE void keep_in_register(const float*& value) { asm("" : "+r"(value)); }
LOOKAHEAD_INLINE F bits_to_float(I bits) { return load<F>(&bits); }
LOOKAHEAD_INLINE I float_to_bits(F value) { return load<I>(&value); }

template <int n>
struct Rows {
  static constexpr int rows = n;
};
/// Calls `act` with the number of rows, 1 to `most`, as a constant.
template <int most, class Act>
LOOKAHEAD_INLINE void with_rows(int rows, Act act) {
  if constexpr (most > 1)
    if (rows < most) return with_rows<most - 1>(rows, act);
  act(Rows<most>{});
}

// ---- what differs between instruction sets ----

#if defined(__AVX2__)
LOOKAHEAD_INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
LOOKAHEAD_INLINE float fused(float a, float b, float c) { return a * b + c; }
#endif

#if defined(__AVX512F__)

LOOKAHEAD_INLINE F fused(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
LOOKAHEAD_INLINE unsigned above(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
LOOKAHEAD_INLINE F halves(const std::byte* from) { return _mm512_cvtph_ps(load<__m256i>(from)); }
LOOKAHEAD_INLINE F bfloats(const std::byte* from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16));
}
using Dots = I;
template <bool bytes>  // which are signed, and taken as larger by 128
LOOKAHEAD_INLINE Dots dot(Dots dots, I numbers, I with) {
  const __m512i w = bytes ? _mm512_xor_si512((__m512i)numbers, _mm512_set1_epi8(-128)) : (__m512i)numbers;
  return (I)_mm512_dpbusd_epi32((__m512i)dots, w, (__m512i)with);
}
template <bool bytes>
LOOKAHEAD_INLINE F total(Dots dots, std::int32_t minus_8_sum) {
  return _mm512_cvtepi32_ps((__m512i)(dots + (bytes ? minus_8_sum * 16 : minus_8_sum)));
}
LOOKAHEAD_INLINE std::int32_t largest(I a) { return _mm512_reduce_max_epi32((__m512i)a); }
LOOKAHEAD_INLINE std::int32_t sum(I a) { return _mm512_reduce_add_epi32((__m512i)a); }
LOOKAHEAD_INLINE void store_bytes(std::byte* to, I a) {
  const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)a);
  std::memcpy(to, &bytes, sizeof bytes);
}

/// out[i] = the sum of the lanes of a[i].
LOOKAHEAD_INLINE void sum_lanes(const F* a, float* out) {
  const auto fold = [](__m512 x, __m512 y) -> __m512 {  // the 128-bit parts of both, halved in number
    return _mm512_mask_blend_ps(0xFF00, x, y) + _mm512_shuffle_f32x4(x, y, 0x4E);
  };
  const auto fold_neighbours = [](__m512 x, __m512 y) -> __m512 {
    return _mm512_shuffle_f32x4(x, y, 0x88) + _mm512_shuffle_f32x4(x, y, 0xDD);
  };
  const __m512 p = fold_neighbours(fold(a[0], a[1]), fold(a[2], a[3]));  // part i: four partial sums of a[i]
  const __m512 q = fold_neighbours(fold(a[4], a[5]), fold(a[6], a[7]));
  const __m512 pairs = _mm512_mask_blend_ps(0xCCCC, p, q) + _mm512_shuffle_ps(p, q, 0x4E);
  const __m512 sums = pairs + _mm512_permute_ps(pairs, 0xB1);  // part i: a[i] twice, a[i + 4] twice
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums)));
}

#elif defined(__AVX2__)

LOOKAHEAD_INLINE F fused(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
LOOKAHEAD_INLINE unsigned above(F a, F b) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
}
LOOKAHEAD_INLINE F halves(const std::byte* from) { return _mm256_cvtph_ps(load<__m128i>(from)); }
LOOKAHEAD_INLINE F bfloats(const std::byte* from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(from)), 16));
}
using Dots = I;
/// Pairs of products fit 16 bits, and those of nibbles in a whole block do: 32 * 15 * 127 / 2.
template <bool bytes>
LOOKAHEAD_INLINE Dots dot(Dots dots, I numbers, I with) {
  const __m256i w = (__m256i)numbers, a = (__m256i)with, sums = (__m256i)dots;
  if (!bytes) return (I)_mm256_add_epi16(sums, _mm256_maddubs_epi16(w, a));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
  return dots + (I)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
template <bool bytes>
LOOKAHEAD_INLINE F total(Dots dots, std::int32_t minus_8_sum) {
  const I sums = bytes ? dots : (I)_mm256_madd_epi16((__m256i)dots, _mm256_set1_epi16(1)) + minus_8_sum;
  return _mm256_cvtepi32_ps((__m256i)sums);
}
LOOKAHEAD_INLINE std::int32_t largest(I a) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)a), _mm256_extracti128_si256((__m256i)a, 1));
  m = _mm_max_epi32(m, _mm_unpackhi_epi64(m, m));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 1)));
}
LOOKAHEAD_INLINE std::int32_t sum(I a) {
  const __m256i b = _mm256_hadd_epi32((__m256i)a, (__m256i)a), c = _mm256_hadd_epi32(b, b);
  return _mm_cvtsi128_si32(_mm_add_epi32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1)));
}
LOOKAHEAD_INLINE void store_bytes(std::byte* to, I a) {
  const __m256i i = (__m256i)a;
  const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
  const std::int64_t bytes = _mm_cvtsi128_si64(_mm_packs_epi16(pairs, pairs));
  std::memcpy(to, &bytes, sizeof bytes);
}
LOOKAHEAD_INLINE void sum_lanes(const F* a, float* out) {
  const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
  _mm_storeu_ps(out, _mm256_castps256_ps128(s) + _mm256_extractf128_ps(s, 1));
}

#else

LOOKAHEAD_INLINE F fused(F a, F b, F c) { return a * b + c; }
LOOKAHEAD_INLINE unsigned above(F a, F b) {
  unsigned bits = 0;
  for (int i = 0; i < lanes; ++i) bits |= static_cast<unsigned>(a[i] > b[i]) << i;
  return bits;
}
LOOKAHEAD_INLINE F halves(const std::byte* from) {
  typedef std::uint16_t H __attribute__((vector_size(2 * lanes)));
  const I h = __builtin_convertvector(load<H>(from), I), magnitude = (h & 0x7FFF) << 13;
  const I exact = float_to_bits(bits_to_float(magnitude) * 0x1p112F);  // the other bias, also for subnormal numbers
  return bits_to_float(exact | ((magnitude >= 0x7C00 << 13) & 0x7F800000) | (h & 0x8000) << 16);
}
LOOKAHEAD_INLINE F bfloats(const std::byte* from) {
  typedef std::uint16_t H __attribute__((vector_size(2 * lanes)));
  return bits_to_float(__builtin_convertvector(load<H>(from), I) << 16);
}
using Dots = F;  // integers that floats hold exactly
template <bool bytes>
LOOKAHEAD_INLINE Dots dot(Dots dots, I numbers, I with) {
  LOOKAHEAD_UNROLL
  for (int i = 24; i >= 0; i -= 8)
    dots += __builtin_convertvector((numbers << i) >> 24, F) * __builtin_convertvector((with << i) >> 24, F);
  return dots;
}
template <bool bytes>
LOOKAHEAD_INLINE F total(Dots dots, std::int32_t minus_8_sum) {
  return bytes ? dots : dots + static_cast<float>(minus_8_sum);
}
LOOKAHEAD_INLINE std::int32_t largest(I a) {
  const std::int32_t b = a[0] > a[1] ? a[0] : a[1], c = a[2] > a[3] ? a[2] : a[3];
  return b > c ? b : c;
}
LOOKAHEAD_INLINE std::int32_t sum(I a) { return (a[0] + a[2]) + (a[1] + a[3]); }
LOOKAHEAD_INLINE void store_bytes(std::byte* to, I a) {
  for (int i = 0; i < lanes; ++i) to[i] = static_cast<std::byte>(a[i]);
}
LOOKAHEAD_INLINE void sum_lanes(const F* a, float* out) {
  for (int i = 0; i < summed; ++i) out[i] = (a[i][0] + a[i][2]) + (a[i][1] + a[i][3]);
}

#endif

// ---- types of single numbers: 32 take `bytes` bytes; `vector` gives the i-th vector of them ----

struct F32 {
  static constexpr int bytes = 128;
  LOOKAHEAD_INLINE static F vector(const std::byte* from, int i) { return load<F>(from + 4 * lanes * i); }
};
struct F16 {
  static constexpr int bytes = 64;
  LOOKAHEAD_INLINE static F vector(const std::byte* from, int i) { return halves(from + 2 * lanes * i); }
};
struct BF16 {
  static constexpr int bytes = 64;
  LOOKAHEAD_INLINE static F vector(const std::byte* from, int i) { return bfloats(from + 2 * lanes * i); }
};

/// Most rows of a tile. With AVX-512 fewer for F32: its weights bring twice the lines of F16, and with the activations
/// of 8 rows they exceed the first-level cache.
template <class T>
constexpr int most_rows = tile_rows;
template <>
constexpr int most_rows<F32> = f32_rows;

/// What is worked on together: outputs (a multiple of what tiles have) and columns, so that the activations of a tile
/// stay in the first-level cache.
constexpr int group_outputs = 24, panel_columns = 1024, most_columns = 4096;

/// Some columns of a group of outputs.
struct Panel {
  const std::byte* data;
  std::size_t stride;  ///< bytes from an output to the next
  int outputs, blocks;
  bool begins, ends;  ///< whether it has the first columns, and the last ones
};

/// The numbers of a panel that is the first `columns` columns of a block, each output's with zeros up to the block.
template <class T>
void decode_part(const Panel& w, int columns, float* out) {
  for (int t = 0; t < w.outputs; ++t) {
    std::byte block[T::bytes] = {};
    std::memcpy(block, w.data + size(t) * w.stride, size(columns * T::bytes / block_size));
    for (int i = 0; i < vectors; ++i) store(out + t * block_size + i * lanes, T::vector(block, i));
  }
}

// ---- products with weights of single numbers ----
// An element has one accumulator of `lanes` sums: block after block, vector after vector is added to it, and the lanes
// are summed at the end. A tile of rows and outputs has its accumulators in registers; the shapes of tiles and panels
// change how often weights are decoded and activations are read, and never the order of additions.

/// Outputs of a tile of so many rows.
constexpr int tile_outputs(int rows) { return most_sums / rows < 8 ? most_sums / rows : 8; }

/// Weights that come into the cache meanwhile. Memory is as busy as the arithmetic only where they are spread evenly.
/// Many rows share the fetching of the next group of outputs, line by line. One tile of rows fetches its next tile.
struct Ahead {
  const std::byte* at;
  std::ptrdiff_t share;  ///< bytes for each tile of rows in a panel
  int outputs;           ///< from the panel's first to the matrix's last, or 0: no fetching by tiles of outputs
};

/// Adds the products of a panel and `rows` rows to their accumulators, sums[row][group_outputs], and writes to `y`
/// what is complete.
template <class T, int rows>
[[gnu::noinline]] void multiply_panel(const Panel& w, const float* x, std::size_t ldx, F* sums, float* y,
                                      std::size_t ldy, Ahead& ahead) {
  constexpr int outputs = tile_outputs(rows), in_all = (rows * outputs + summed - 1) / summed * summed;
  static_assert(group_outputs % outputs == 0, "the last tile would reach into the sums of the next row");
  const int tiles = (w.outputs + outputs - 1) / outputs;
  for (int first = 0; first < w.outputs; first += outputs) {
    const std::byte* from[outputs];
    const std::size_t step = first + 2 * outputs <= ahead.outputs ? outputs * w.stride : 0;
    for (int t = 0; t < outputs; ++t) from[t] = w.data + size(first + t < w.outputs ? first + t : first) * w.stride;
    const std::byte* next = ahead.at + ahead.share * (first / outputs) / tiles;
    const std::byte* const end = ahead.at + ahead.share * (first / outputs + 1) / tiles;
    const std::ptrdiff_t lines = (end - next) / 64 / (w.blocks + 1) + 1;  // in the time of a block
    F sum[in_all] = {};
    F* const carry = sums + first;
    if (!w.begins) {
      LOOKAHEAD_UNROLL
      for (int i = 0; i < rows * outputs; ++i) sum[i] = carry[i / outputs * group_outputs + i % outputs];
    }
    const float* at = x;
    for (std::size_t offset = 0; offset < size(w.blocks) * T::bytes; offset += T::bytes) {
      if constexpr (rows <= outputs) {  // outputs one by one: a block's bits are read once
        LOOKAHEAD_UNROLL
        for (int t = 0; t < outputs; ++t) {
          LOOKAHEAD_UNROLL
          for (int i = 0; i < vectors; ++i) {
            F v = T::vector(from[t] + offset, i);
            keep_in_register(v);
            LOOKAHEAD_UNROLL
            for (int r = 0; r < rows; ++r)
              sum[r * outputs + t] = fused(load(at + size(r) * ldx + i * lanes), v, sum[r * outputs + t]);
          }
        }
        at += block_size;
      } else {
        LOOKAHEAD_UNROLL
        for (int i = 0; i < vectors; ++i) {
          F v[outputs];
          LOOKAHEAD_UNROLL
          for (int t = 0; t < outputs; ++t) keep_in_register(v[t] = T::vector(from[t] + offset, i));
          LOOKAHEAD_UNROLL
          for (int r = 0; r < rows; ++r) {
            F u = load(at + size(r) * ldx);
            keep_in_register(u);
            LOOKAHEAD_UNROLL
            for (int t = 0; t < outputs; ++t) sum[r * outputs + t] = fused(u, v[t], sum[r * outputs + t]);
          }
          keep_in_register(at += lanes);  // or every vector of a block has addresses of its own, too many for registers
        }
      }
      if (step != 0) {
        LOOKAHEAD_UNROLL
        for (int t = 0; t < outputs; ++t)
          for (int i = 0; i < T::bytes; i += 64) __builtin_prefetch(from[t] + offset + step + i, 0, 2);
      }
      for (std::ptrdiff_t l = 0; l < lines && next < end; ++l, next += 64) __builtin_prefetch(next, 0, 2);
    }
    if (!w.ends) {
      LOOKAHEAD_UNROLL
      for (int i = 0; i < rows * outputs; ++i) carry[i / outputs * group_outputs + i % outputs] = sum[i];
      continue;
    }
    float out[in_all];
    LOOKAHEAD_UNROLL
    for (int i = 0; i < in_all; i += summed) sum_lanes(sum + i, out + i);
    float* to = y + first;
    if (w.outputs - first >= outputs) {
      LOOKAHEAD_UNROLL
      for (int r = 0; r < rows; ++r, to += ldy) std::memcpy(to, out + r * outputs, sizeof(float) * outputs);
    } else {
      for (int r = 0; r < rows; ++r, to += ldy)
        for (int t = 0; t < w.outputs - first; ++t) to[t] = out[r * outputs + t];
    }
  }
  ahead.at += ahead.share;
}

template <class T>
void multiply_numbers(const Matrix& w, int first, int last, const float* x, std::size_t ldx, int rows, float* y,
                      std::size_t ldy) {
  alignas(64) float numbers[group_outputs * block_size];
  alignas(64) F sums[most_rows<T> * group_outputs];
  const int widest = rows <= 4 ? most_columns : panel_columns, panels = (w.columns + widest - 1) / widest;
  const int tiles = (rows + most_rows<T> - 1) / most_rows<T>;
  for (int o = first, outputs; o < last; o += outputs) {
    outputs = last - o < group_outputs ? last - o : group_outputs;
    const int behind = w.outputs - o - outputs < group_outputs ? w.outputs - o - outputs : group_outputs;
    Ahead ahead{w.data + size(o + outputs) * w.stride, 0, 0};
    if (tiles == 1 && w.columns % block_size == 0)
      ahead.outputs = w.outputs - o;
    else
      ahead.share = static_cast<std::ptrdiff_t>(size(behind) * w.stride) / (tiles * panels);
    for (int r = 0, some, left = tiles; left > 0; --left, r += some) {
      some = (rows - r + left - 1) / left;
      for (int k = 0, columns; k < w.columns; k += columns) {
        columns = w.columns - k < widest ? w.columns - k : widest;
        if (columns > block_size) columns -= columns % block_size;  // a part of a block comes alone
        Panel panel{w.data + size(o) * w.stride + size(k / block_size * T::bytes),
                    w.stride,
                    outputs,
                    (columns + block_size - 1) / block_size,
                    k == 0,
                    k + columns == w.columns};
        const float* const from = x + size(r) * ldx + size(k);
        float* const to = y + size(r) * ldy + size(o);
        if (columns % block_size == 0) {
          with_rows<most_rows<T>>(some,
                                  [&](auto n) { multiply_panel<T, n.rows>(panel, from, ldx, sums, to, ldy, ahead); });
          continue;
        }
        decode_part<T>(panel, columns, numbers);
        panel.data = reinterpret_cast<const std::byte*>(numbers);
        panel.stride = sizeof(float) * block_size;
        with_rows<most_rows<T>>(some,
                                [&](auto n) { multiply_panel<F32, n.rows>(panel, from, ldx, sums, to, ldy, ahead); });
      }
    }
  }
}

// ---- products with packed weights ----
// Weights and activations are integers, times a scale for 32 of them. A block's products are summed as integers, in any
// order; scaled, they are added block after block to the one sum of an element. Lanes are outputs.

template <int bytes_of_numbers, bool has_m>
struct Packed {
  static constexpr int bytes = bytes_of_numbers, parts = block_size / bytes;  ///< of a block; numbers in a byte
  static constexpr bool offset = has_m;                                       ///< besides the scale d
};
using Q8 = Packed<32, false>;
using Q40 = Packed<16, false>;
using Q41 = Packed<16, true>;
static_assert(block_size == 32 && interleaved % lanes == 0);

/// A block of activations, as it lies in memory: 32 bytes, and for them
constexpr int scale_at = 32;        ///< what one of them is worth, a float
constexpr int scaled_sum_at = 36;   ///< their sum times that, a float
constexpr int minus_8_sum_at = 40;  ///< their sum times -8, an integer
constexpr int quantised_bytes = sizeof(float) * quantised_floats;
static_assert(minus_8_sum_at + 4 <= quantised_bytes);

void quantise(float* x, int first, int last, int n) {
  std::byte* to = reinterpret_cast<std::byte*>(x + padded(n)) + size(first / block_size) * quantised_bytes;
  for (int i = first; i < last; i += block_size, to += quantised_bytes) {
    I most = {};  // of the bits of magnitudes, which have the order of integers, with what is not a number at the end
    for (int v = 0; v < vectors; ++v) {
      const I magnitude = float_to_bits(load(x + i + v * lanes)) & 0x7FFFFFFF;
      most = magnitude > most ? magnitude : most;
    }
    const std::int32_t bits = largest(most);
    const float end = load<float>(&bits), scale = end / 127.0F;
    const bool counts = end > 1e-30F && end < __builtin_inff();
    I sums = {};
    for (int v = 0; v < vectors; ++v) {
      // Adding 1.5 * 2^23 rounds to an integer in the low bits.
      const F in_steps = counts ? load(x + i + v * lanes) * (127.0F / end) : F{};
      const I q = float_to_bits(in_steps + 0x1.8p23F) - float_to_bits(broadcast(0x1.8p23F));
      sums += q;
      store_bytes(to + v * lanes, q);
    }
    const std::int32_t in_all = sum(sums);
    const float scaled_sum = scale * static_cast<float>(in_all);
    const std::int32_t minus_8_sum = -8 * in_all;
    std::memcpy(to + scale_at, &scale, sizeof scale);
    std::memcpy(to + scaled_sum_at, &scaled_sum, sizeof scaled_sum);
    std::memcpy(to + minus_8_sum_at, &minus_8_sum, sizeof minus_8_sum);
  }
}

/// Some outputs whose weights lie together.
struct Group {
  const std::byte* data;
  int blocks;                    ///< of a row
  int from, to;                  ///< outputs that are wanted
  const std::byte *ahead, *end;  ///< what comes into the cache meanwhile
};

/// `rows` rows and a group of outputs.
template <class T, int rows>
[[gnu::noinline]] void multiply_group(const Group& w, const std::byte* x, std::size_t ldx, float* y, std::size_t ldy) {
  constexpr bool bytes = T::parts == 1;
  for (int part = 0; part < interleaved; part += lanes) {
    const std::byte* scales = w.data + 2 * part;
    const std::byte* numbers = w.data + size(w.blocks) * (T::offset ? 4 : 2) * interleaved + 4 * part;
    const std::byte* next = w.ahead + (w.end - w.ahead) * part / interleaved;
    const std::byte* const end = w.ahead + (w.end - w.ahead) * (part + lanes) / interleaved;
    const std::ptrdiff_t lines = ((end - next) / 64 + w.blocks - 1) / w.blocks;
    const std::byte* at = x;
    F sum[rows] = {};
    for (int b = 0; b < w.blocks; ++b, at += quantised_bytes) {
      Dots dots[rows] = {};
      LOOKAHEAD_UNROLL
      for (int t = 0; t < T::bytes; t += 4, numbers += 4 * interleaved) {
        const I word = load<I>(numbers);
        LOOKAHEAD_UNROLL
        for (int p = 0; p < T::parts; ++p) {
          const I four = bytes ? word : (p == 0 ? word : word >> 4) & 0x0F0F0F0F;
          LOOKAHEAD_UNROLL
          for (int r = 0; r < rows; ++r) {
            dots[r] = dot<bytes>(dots[r], four, I{} + load<std::int32_t>(at + size(r) * ldx + (t + 16 * p)));
            keep_in_register(dots[r]);
          }
        }
      }
      const F d = halves(scales), m = T::offset ? halves(scales + 2 * interleaved) : F{};
      scales += (T::offset ? 4 : 2) * interleaved;
      LOOKAHEAD_UNROLL
      for (int r = 0; r < rows; ++r) {
        const std::byte* const block = at + size(r) * ldx;
        const F whole = total<bytes>(dots[r], T::offset ? 0 : load<std::int32_t>(block + minus_8_sum_at));
        sum[r] = fused(whole, d * broadcast(load<float>(block + scale_at)), sum[r]);
        if (T::offset) sum[r] = fused(m, broadcast(load<float>(block + scaled_sum_at)), sum[r]);
      }
      for (std::ptrdiff_t l = 0; l < lines && next < end; ++l, next += 64) __builtin_prefetch(next, 0, 2);
    }
    const int from = w.from > part ? w.from - part : 0, to = w.to - part < lanes ? w.to - part : lanes;
    LOOKAHEAD_UNROLL
    for (int r = 0; r < rows; ++r) {
      if (to - from == lanes)
        store(y + size(r) * ldy + part, sum[r]);
      else
        for (int l = from; l < to; ++l) y[size(r) * ldy + size(part + l)] = sum[r][l];
    }
  }
}

template <class T>
void multiply_packed(const Matrix& w, int first, int last, const float* x, std::size_t ldx, int rows, float* y,
                     std::size_t ldy) {
  const int tiles = (rows + packed_rows - 1) / packed_rows;
  const std::ptrdiff_t together = static_cast<std::ptrdiff_t>(interleaved * w.stride);
  for (int o = first / interleaved * interleaved; o < last; o += interleaved) {
    const std::byte* const data = w.data + size(o) * w.stride;
    const std::ptrdiff_t behind = o + interleaved < w.outputs ? together : 0;
    for (int r = 0, some, tile = 0; tile < tiles; ++tile, r += some) {
      some = (rows - r + tiles - tile - 1) / (tiles - tile);
      const Group group{data,
                        w.columns / block_size,
                        first > o ? first - o : 0,
                        last - o < interleaved ? last - o : interleaved,
                        data + together + behind * tile / tiles,
                        data + together + behind * (tile + 1) / tiles};
      const auto* const from = reinterpret_cast<const std::byte*>(x + size(r) * ldx + padded(w.columns));
      float* const to = y + size(r) * ldy + size(o);
      with_rows<packed_rows>(some,
                             [&](auto n) { multiply_group<T, n.rows>(group, from, ldx * sizeof(float), to, ldy); });
    }
  }
}

void multiply(const Matrix& w, int first, int last, const float* x, std::size_t ldx, int rows, float* y,
              std::size_t ldy) {
  switch (w.type) {
    case WeightType::f32:
      return multiply_numbers<F32>(w, first, last, x, ldx, rows, y, ldy);
    case WeightType::f16:
      return multiply_numbers<F16>(w, first, last, x, ldx, rows, y, ldy);
    case WeightType::bf16:
      return multiply_numbers<BF16>(w, first, last, x, ldx, rows, y, ldy);
    case WeightType::q8_0:
      return multiply_packed<Q8>(w, first, last, x, ldx, rows, y, ldy);
    case WeightType::q4_0:
      return multiply_packed<Q40>(w, first, last, x, ldx, rows, y, ldy);
    case WeightType::q4_1:
      return multiply_packed<Q41>(w, first, last, x, ldx, rows, y, ldy);
  }
}

// ---- attention ----

/// A tile of `accumulate` whose elements stay in registers.
template <int m, int n>
LOOKAHEAD_INLINE void accumulate_tile(const float* a, std::size_t lda, const float* b, std::size_t ldb, float* c,
                                      std::size_t ldc, int k) {
  F sums[m][n];
  LOOKAHEAD_UNROLL for (int i = 0; i < m; ++i) LOOKAHEAD_UNROLL for (int j = 0; j < n; ++j) sums[i][j] =
      load(c + size(i) * ldc + size(j * lanes));
  for (int p = 0; p < k; ++p) {
    F v[n];
    LOOKAHEAD_UNROLL for (int j = 0; j < n; ++j) v[j] = load(b + size(p) * ldb + size(j * lanes));
    LOOKAHEAD_UNROLL for (int i = 0; i < m; ++i) {
      const F u = broadcast(a[size(i) * lda + size(p)]);
      LOOKAHEAD_UNROLL for (int j = 0; j < n; ++j) sums[i][j] = fused(u, v[j], sums[i][j]);
    }
  }
  LOOKAHEAD_UNROLL for (int i = 0; i < m; ++i) LOOKAHEAD_UNROLL for (int j = 0; j < n; ++j)
      store(c + size(i) * ldc + size(j * lanes), sums[i][j]);
}

template <int m>
void accumulate_rows(const float* a, std::size_t lda, const float* b, std::size_t ldb, float* c, std::size_t ldc, int k,
                     int n) {
  int j = 0;
  for (; j + 2 * lanes <= n; j += 2 * lanes) accumulate_tile<m, 2>(a, lda, b + j, ldb, c + j, ldc, k);
  for (; j + lanes <= n; j += lanes) accumulate_tile<m, 1>(a, lda, b + j, ldb, c + j, ldc, k);
  for (; j < n; ++j)
    for (int i = 0; i < m; ++i) {
      float* const to = c + size(i) * ldc + size(j);
      for (int p = 0; p < k; ++p) *to = fused(a[size(i) * lda + size(p)], b[size(p) * ldb + size(j)], *to);
    }
}

void accumulate(const float* a, std::size_t lda, const float* b, std::size_t ldb, float* c, std::size_t ldc, int m,
                int k, int n) {
  for (; m >= tile_rows; m -= tile_rows, a += tile_rows * lda, c += tile_rows * ldc)
    accumulate_rows<tile_rows>(a, lda, b, ldb, c, ldc, k, n);
  for (; m >= 4; m -= 4, a += 4 * lda, c += 4 * ldc) accumulate_rows<4>(a, lda, b, ldb, c, ldc, k, n);
  if (m == 3) accumulate_rows<3>(a, lda, b, ldb, c, ldc, k, n);
  if (m == 2) accumulate_rows<2>(a, lda, b, ldb, c, ldc, k, n);
  if (m == 1) accumulate_rows<1>(a, lda, b, ldb, c, ldc, k, n);
}

// ---- functions of single elements ----

/// e^x to about one unit in the last place for -87 < x < 88, and the value at the nearer end beyond that.
LOOKAHEAD_INLINE F exponential(F x) {
  const F low = broadcast(-87.0F), high = broadcast(88.0F);
  x = x > low ? x : low;  // also what is not a number
  x = x < high ? x : high;
  // x = n ln 2 + r with |r| <= ln 2 / 2: adding 1.5 * 2^23 rounds n into the low bits.
  const F shift = broadcast(0x1.8p23F), shifted = fused(x, broadcast(0x1.715476p0F), shift), n = shifted - shift;
  const F r = fused(n, broadcast(-0x1.7f7d1cp-20F), fused(n, broadcast(-0x1.62e4p-1F), x));
  F p = broadcast(0x1.6850e4p-10F);
  p = fused(p, r, broadcast(0x1.123bccp-7F));
  p = fused(p, r, broadcast(0x1.555b98p-5F));
  p = fused(p, r, broadcast(0x1.55548ep-3F));
  p = fused(p, r, broadcast(0x1.fffff8p-2F));
  p = fused(p, r, broadcast(1.0F));
  p = fused(p, r, broadcast(1.0F));
  return bits_to_float(float_to_bits(p) + (float_to_bits(shifted) << 23));
}

LOOKAHEAD_INLINE float sum_of(F lanes_of) {
  F a[summed] = {lanes_of};
  float out[summed];
  sum_lanes(a, out);
  return out[0];
}

void add_and_normalise(float* x, const float* more, const float* w, float epsilon, int n, float* y) {
  for (int i = 0; i < n; ++i) x[i] += more[i];
  F squares = {};
  for (int i = 0; i < n; i += lanes) squares = fused(load(x + i), load(x + i), squares);
  const float scale = 1.0F / __builtin_sqrtf(sum_of(squares) / static_cast<float>(n) + epsilon);
  for (int i = 0; i < n; ++i) y[i] = x[i] * scale * w[i];
}

float exponentials(float* s, int n) {
  const int end = (n + lanes - 1) / lanes * lanes;
  for (int i = n; i < end; ++i) s[i] = -__builtin_inff();
  F most = load(s);
  for (int i = lanes; i < end; i += lanes) most = load(s + i) > most ? load(s + i) : most;
  float most_of_all = most[0];
  for (int i = 1; i < lanes; ++i) most_of_all = most[i] > most_of_all ? most[i] : most_of_all;
  F sum = {};
  for (int i = 0; i < end; i += lanes) {
    const F e = exponential(load(s + i) - most_of_all);
    store(s + i, e);
    sum += e;  // what lies behind n adds at most 2e-37 to a sum of at least 1: nothing
  }
  return sum_of(sum);
}

void gate(float* gate, const float* up, int n) {
  const auto gated = [](F g, F u) { return g / (1.0F + exponential(-g)) * u; };
  int i = 0;
  for (; i + lanes <= n; i += lanes) store(gate + i, gated(load(gate + i), load(up + i)));
  if (i == n) return;
  F g = {}, u = {};
  std::memcpy(&g, gate + i, size(n - i) * sizeof(float));
  std::memcpy(&u, up + i, size(n - i) * sizeof(float));
  g = gated(g, u);
  std::memcpy(gate + i, &g, size(n - i) * sizeof(float));
}

int top(const float* x, int n, std::int32_t* out, int count) {
  int found = 0;
  const auto enter = [&](std::int32_t i) {
    if (found == count && !(x[i] > x[out[found - 1]])) return;
    int place = found < count ? found++ : found - 1;
    for (; place > 0 && x[i] > x[out[place - 1]]; --place) out[place] = out[place - 1];
    out[place] = i;
  };
  int i = 0;
  for (; i < n && i < count; ++i) enter(i);
  if (count <= 0) return 0;
  for (; i + lanes <= n; i += lanes)
    for (unsigned hits = above(load(x + i), broadcast(x[out[count - 1]])); hits != 0; hits &= hits - 1)
      enter(i + __builtin_ctz(hits));
  for (; i < n; ++i) enter(i);
  return found;
}

double peak_of_numbers(int rounds) {
  constexpr int chains = 12;  // more than the latency of a unit, fewer than the registers
  F sums[chains];
  for (int c = 0; c < chains; ++c) sums[c] = broadcast(static_cast<float>(c));
  for (int i = 0; i < rounds; ++i) {
    F v = broadcast(0.5F);
    hide(v);
    LOOKAHEAD_UNROLL
    for (int c = 0; c < chains; ++c) sums[c] = fused(sums[c], v, v);
  }
  for (F& s : sums) hide(s);
  return static_cast<double>(rounds) * chains * lanes;
}

template <class T>
double peak_of_blocks(int rounds) {
  F sums[packed_rows] = {}, d = broadcast(0.5F);
  I four = {}, with[packed_rows] = {};
  for (int i = 0; i < rounds; ++i) {
    Dots dots[packed_rows] = {};
    LOOKAHEAD_UNROLL
    for (int r = 0; r < packed_rows; ++r) hide(dots[r]);
    LOOKAHEAD_UNROLL
    for (int t = 0; t < block_size; t += 4) {
      hide(four);
      LOOKAHEAD_UNROLL
      for (int r = 0; r < packed_rows; ++r) {
        hide(with[r]);
        dots[r] = dot<T::parts == 1>(dots[r], four, with[r]);
      }
    }
    LOOKAHEAD_UNROLL
    for (int r = 0; r < packed_rows; ++r) {
      hide(d);
      sums[r] = fused(total<T::parts == 1>(dots[r], 0), d * d, sums[r]);
      if (T::offset) sums[r] = fused(d, d, sums[r]);
    }
  }
  for (F& s : sums) hide(s);
  return static_cast<double>(rounds) * packed_rows * lanes * block_size;
}

double peak(WeightType type, int rounds) {
  if (type == WeightType::q4_1) return peak_of_blocks<Q41>(rounds);
  if (type == WeightType::q4_0) return peak_of_blocks<Q40>(rounds);
  if (type == WeightType::q8_0) return peak_of_blocks<Q8>(rounds);
  return peak_of_numbers(rounds);
}

}  // namespace

extern const Kernels LOOKAHEAD_FUNCTION(LOOKAHEAD_KERNELS);
const Kernels LOOKAHEAD_FUNCTION(LOOKAHEAD_KERNELS){LOOKAHEAD_NAME(LOOKAHEAD_KERNELS),
                                                    quantise,
                                                    multiply,
                                                    accumulate,
                                                    add_and_normalise,
                                                    exponentials,
                                                    gate,
                                                    top,
                                                    peak};

#if defined(LOOKAHEAD_KERNELS_PORTABLE)

#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx512_kernels;
#endif

std::span<const Kernels* const> available_kernels() {
#if defined(__x86_64__)
  static const Kernels* const sets[] = {&avx512_kernels, &avx2_kernels, &portable_kernels};
  __builtin_cpu_init();
  unsigned a = 0, b = 0, c = 0, d = 0;  // F16C by its bit: clang 14 does not know it by name
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni");
  return std::span(sets).subspan(avx512 ? 0 : avx2 ? 1 : 2);
#else
  static const Kernels* const sets[] = {&portable_kernels};
  return sets;
#endif
}

#endif

}  // namespace lookahead::engines
