// Compiled once for each instruction set, with LOOKAHEAD_KERNELS naming the set. Includes no inline function of anybody
// else: a copy of it compiled for a newer processor could end up in code that runs on an older one.
#include "engines/kernels.hpp"

#include <cmath>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
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

extern float half_values[1 << 16];  ///< of every number in half precision; available_kernels() fills it

namespace {

#if defined(__AVX512F__)
constexpr int lanes = 16, most_sums = 24, tile_rows = 8, f32_rows = 4, summed = 8;
#elif defined(__AVX2__)
constexpr int lanes = 8, most_sums = 12, tile_rows = 6, f32_rows = 6, summed = 4;
#else
constexpr int lanes = 4, most_sums = 12, tile_rows = 6, f32_rows = 6, summed = 4;
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
/// Hinders the compiler from loading a value anew for every use.
LOOKAHEAD_INLINE void keep_in_register([[maybe_unused]] F& value) {
#if defined(__AVX512F__)
  asm("" : "+v"(value));
#elif defined(__AVX2__)
  asm("" : "+x"(value));
#endif
}
LOOKAHEAD_INLINE void keep_in_register(const float*& value) { asm("" : "+r"(value)); }
LOOKAHEAD_INLINE F bits_to_float(I bits) { return load<F>(&bits); }
LOOKAHEAD_INLINE I float_to_bits(F value) { return load<I>(&value); }

/// The value of a number in half precision. For the scales of packed weights two loads take the place of the four
/// vector operations that convert them and spread them over the lanes.
LOOKAHEAD_INLINE float half_value(const std::byte* from) { return half_values[load<std::uint16_t>(from)]; }

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
LOOKAHEAD_INLINE F signed_bytes(const std::byte* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
}
/// What `map` gives for the numbers 16 * half to 16 * half + 15 of a block of nibbles: 16 bytes, the low nibbles first.
template <class Map>
LOOKAHEAD_INLINE F nibbles(const std::byte* from, int half, Map map) {
  constexpr F values = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const __m512i q = _mm512_cvtepu8_epi32(load<__m128i>(from));
  return _mm512_permutexvar_ps(half == 0 ? q : _mm512_srli_epi32(q, 4), map(values));  // reads the low four bits
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
LOOKAHEAD_INLINE F signed_bytes(const std::byte* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
/// What `map` gives for the numbers 8 * i to 8 * i + 7 of a block of nibbles: 16 bytes, the low nibbles first.
template <class Map>
LOOKAHEAD_INLINE F nibbles(const std::byte* from, int i, Map map) {
  const __m256i q = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i % 2 * 8)));
  const __m256i low = i < 2 ? _mm256_and_si256(q, _mm256_set1_epi32(15)) : _mm256_srli_epi32(q, 4);
  return map(_mm256_cvtepi32_ps(low));
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
  return F{half_value(from), half_value(from + 2), half_value(from + 4), half_value(from + 6)};
}
LOOKAHEAD_INLINE F bfloats(const std::byte* from) {
  typedef std::uint16_t H __attribute__((vector_size(2 * lanes)));
  return bits_to_float(__builtin_convertvector(load<H>(from), I) << 16);
}
LOOKAHEAD_INLINE F signed_bytes(const std::byte* from) {
  typedef std::int8_t B __attribute__((vector_size(lanes)));
  return __builtin_convertvector(load<B>(from), F);
}
/// What `map` gives for the numbers 4 * i to 4 * i + 3 of a block of nibbles: 16 bytes, the low nibbles first.
template <class Map>
LOOKAHEAD_INLINE F nibbles(const std::byte* from, int i, Map map) {
  typedef std::uint8_t B __attribute__((vector_size(lanes)));
  const B both = load<B>(from + i % 4 * lanes);
  return map(__builtin_convertvector(i < 4 ? both & 15 : both >> 4, F));
}
LOOKAHEAD_INLINE void sum_lanes(const F* a, float* out) {
  for (int i = 0; i < summed; ++i) out[i] = (a[i][0] + a[i][2]) + (a[i][1] + a[i][3]);
}

#endif

// ---- weight types: 32 numbers take `bytes` bytes; `vector` gives the i-th vector of them ----
// `few` rows use it: then products read a scale of Q8_0 or Q4_1 from memory, which costs Zen 4 nothing. For many rows
// one instruction spreads it over the lanes first, which takes the place of a permutation.

struct F32 {
  static constexpr int bytes = 128;
  static constexpr bool packed = false;
  LOOKAHEAD_INLINE static F vector(const std::byte* from, int i, bool) { return load<F>(from + 4 * lanes * i); }
};
struct F16 {
  static constexpr int bytes = 64;
  static constexpr bool packed = false;
  LOOKAHEAD_INLINE static F vector(const std::byte* from, int i, bool) { return halves(from + 2 * lanes * i); }
};
struct BF16 {
  static constexpr int bytes = 64;
  static constexpr bool packed = false;
  LOOKAHEAD_INLINE static F vector(const std::byte* from, int i, bool) { return bfloats(from + 2 * lanes * i); }
};
struct Q8 {
  static constexpr int bytes = 34;
  static constexpr bool packed = true;
  LOOKAHEAD_INLINE static F vector(const std::byte* from, int i, bool few) {
    const float* scale = half_values + load<std::uint16_t>(from);
    if (few) asm volatile("" : "+r"(scale));  // or the compiler sees the same scale in the next vector
    return broadcast(*scale) * signed_bytes(from + 2 + lanes * i);
  }
};
struct Q40 {
  static constexpr int bytes = 18;
  static constexpr bool packed = true;
  LOOKAHEAD_INLINE static F vector(const std::byte* from, int i, bool) {
    const F scale = broadcast(half_value(from));
    const auto number = [&](F q) __attribute__((always_inline)) { return scale * (q - 8.0F); };
    return nibbles(from + 2, i, number);
  }
};
struct Q41 {
  static constexpr int bytes = 20;
  static constexpr bool packed = true;
  LOOKAHEAD_INLINE static F vector(const std::byte* from, int i, bool few) {
    const auto both = load<std::uint32_t>(from);  // two loads take 5% longer at one row
    const F d = broadcast(half_values[both & 0xFFFF]), m = broadcast(half_values[both >> 16]);
    // Both forms round once: the 11 bits of a scale and the 4 of a number fit a float, so d * q is exact.
    const auto number = [&](F q) __attribute__((always_inline)) { return few ? d * q + m : fused(d, q, m); };
    return nibbles(from + 4, i, number);
  }
};

/// Most rows of a tile. With AVX-512 fewer for F32: its weights bring twice the lines of F16, and with the activations
/// of 8 rows they exceed the first-level cache.
template <class T>
constexpr int most_rows = tile_rows;
template <>
constexpr int most_rows<F32> = f32_rows;

/// What is worked on together: outputs (a multiple of what tiles have), rows, and columns, so that the activations of a
/// tile stay in the first-level cache.
constexpr int group_outputs = 24, group_rows = 64, panel_columns = 1024, most_columns = 4096;

/// Some columns of a group of outputs.
struct Panel {
  const std::byte* data;
  std::size_t stride;  ///< bytes from an output to the next
  int outputs, blocks;
  bool begins, ends;  ///< whether it has the first columns, and the last ones
};

/// The numbers of a panel that has `columns` columns, each output's with zeros up to whole blocks.
template <class T>
void decode_panel(const Panel& w, int columns, float* out, int stride) {
  for (int t = 0; t < w.outputs; ++t) {
    const auto decode_block = [&](const std::byte* from, int b) __attribute__((always_inline)) {
      F v[vectors];  // all before any is stored, which would make the compiler read the scales again
      LOOKAHEAD_UNROLL
      for (int i = 0; i < vectors; ++i) v[i] = T::vector(from, i, false);
      LOOKAHEAD_UNROLL
      for (int i = 0; i < vectors; ++i) store(out + t * stride + b * block_size + i * lanes, v[i]);
    };
    const std::byte* at = w.data + size(t) * w.stride;
    const int rest = columns % block_size;
    for (int b = 0; b < columns / block_size; ++b, at += T::bytes) decode_block(at, b);
    if (rest == 0) continue;
    std::byte block[T::bytes] = {};
    std::memcpy(block, at, size(rest * T::bytes / block_size));
    decode_block(block, columns / block_size);
  }
}

// ---- products with weights ----
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
      if constexpr (rows <= outputs) {                  // outputs one by one: a block's bits are read once
        constexpr bool few = lanes == 16 && rows <= 3;  // for 4 and more it is up to 5% slower
        LOOKAHEAD_UNROLL
        for (int t = 0; t < outputs; ++t) {
          LOOKAHEAD_UNROLL
          for (int i = 0; i < vectors; ++i) {
            F v = T::vector(from[t] + offset, i, few);
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
          for (int t = 0; t < outputs; ++t) keep_in_register(v[t] = T::vector(from[t] + offset, i, false));
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

/// `tile` rows, or fewer.
template <class T, int tile = most_rows<T>>
void multiply_tile(int rows, const Panel& w, const float* x, std::size_t ldx, F* sums, float* y, std::size_t ldy,
                   Ahead& ahead) {
  if constexpr (tile > 1)
    if (rows < tile) return multiply_tile<T, tile - 1>(rows, w, x, ldx, sums, y, ldy, ahead);
  multiply_panel<T, tile>(w, x, ldx, sums, y, ldy, ahead);
}

/// All rows, tile by tile.
template <class T>
void multiply_rows(const Panel& w, const float* x, std::size_t ldx, int rows, F* sums, float* y, std::size_t ldy,
                   Ahead& ahead) {
  for (int tiles = (rows + most_rows<T> - 1) / most_rows<T>; tiles > 0; --tiles) {
    const int n = (rows + tiles - 1) / tiles;
    multiply_tile<T>(n, w, x, ldx, sums, y, ldy, ahead);
    rows -= n;
    x += size(n) * ldx;
    y += size(n) * ldy;
    sums += n * group_outputs;
  }
}

template <class T>
void multiply_as(const Matrix& w, int first, int last, const float* x, std::size_t ldx, int rows, float* y,
                 std::size_t ldy) {
  constexpr int direct_rows = 2 * most_rows<T>;  // for more, decoding packed weights once is faster
  constexpr int most = T::packed ? group_rows : most_rows<T>;
  const int tile = T::packed && rows > direct_rows ? most_rows<F32> : most_rows<T>;
  constexpr int stride = panel_columns + 16;  // not a power of two: rows would compete for places in the cache
  alignas(64) float numbers[group_outputs * stride];
  alignas(64) F sums[group_rows * group_outputs];
  const int widest = rows <= 4 ? most_columns : panel_columns, panels = (w.columns + widest - 1) / widest;
  for (int o = first, outputs; o < last; o += outputs) {
    outputs = last - o < group_outputs ? last - o : group_outputs;
    const int behind = w.outputs - o - outputs < group_outputs ? w.outputs - o - outputs : group_outputs;
    Ahead ahead{w.data + size(o + outputs) * w.stride, 0, 0};
    if (!T::packed && rows <= most_rows<T> && w.columns % block_size == 0)
      ahead.outputs = w.outputs - o;
    else
      ahead.share = static_cast<std::ptrdiff_t>(size(behind) * w.stride) / ((rows + tile - 1) / tile * panels);
    for (int r = 0, some; r < rows; r += some) {
      const int parts = (rows - r + most - 1) / most;
      some = (rows - r + parts - 1) / parts;
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
        if (some <= direct_rows && columns % block_size == 0) {
          multiply_rows<T>(panel, from, ldx, some, sums, to, ldy, ahead);
          continue;
        }
        decode_panel<T>(panel, columns, numbers, stride);
        panel.data = reinterpret_cast<const std::byte*>(numbers);
        panel.stride = stride * sizeof(float);
        multiply_rows<F32>(panel, from, ldx, some, sums, to, ldy, ahead);
      }
    }
  }
}

/// Calls `act` with the weight type of a matrix.
template <class Act>
LOOKAHEAD_INLINE void with_type(WeightType type, Act act) {
  switch (type) {
    case WeightType::f32:
      return act(F32{});
    case WeightType::f16:
      return act(F16{});
    case WeightType::bf16:
      return act(BF16{});
    case WeightType::q8_0:
      return act(Q8{});
    case WeightType::q4_0:
      return act(Q40{});
    case WeightType::q4_1:
      return act(Q41{});
  }
}

void decode(const Matrix& w, int row, float* out) {
  with_type(w.type, [&](auto type) {
    using T = decltype(type);
    for (int k = 0; k < w.columns; k += most_columns) {
      const int columns = w.columns - k < most_columns ? w.columns - k : most_columns;
      const std::byte* const from = w.data + size(row) * w.stride + size(k / block_size * T::bytes);
      const Panel panel{from, w.stride, 1, columns / block_size, true, true};
      decode_panel<T>(panel, columns, out + k, 0);
    }
  });
}

void multiply(const Matrix& w, int first, int last, const float* x, std::size_t ldx, int rows, float* y,
              std::size_t ldy) {
  with_type(w.type, [&](auto type) { multiply_as<decltype(type)>(w, first, last, x, ldx, rows, y, ldy); });
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
  float largest = most[0];
  for (int i = 1; i < lanes; ++i) largest = most[i] > largest ? most[i] : largest;
  F sum = {};
  for (int i = 0; i < end; i += lanes) {
    const F e = exponential(load(s + i) - largest);
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

double peak(int rounds) {
  constexpr int chains = 12;  // more than the latency of a unit, fewer than the registers
  const volatile float given = 0.5F;
  F sums[chains], all = {};
  for (int c = 0; c < chains; ++c) sums[c] = broadcast(static_cast<float>(c));
  for (int i = 0; i < rounds; ++i) {
    const F v = broadcast(given);
    LOOKAHEAD_UNROLL
    for (int c = 0; c < chains; ++c) sums[c] = fused(sums[c], v, v);
  }
  for (const F& s : sums) all += s;
  volatile float kept = all[0];
  static_cast<void>(kept);
  return static_cast<double>(rounds) * chains * lanes;
}

}  // namespace

extern const Kernels LOOKAHEAD_FUNCTION(LOOKAHEAD_KERNELS);
const Kernels LOOKAHEAD_FUNCTION(LOOKAHEAD_KERNELS){
    LOOKAHEAD_NAME(LOOKAHEAD_KERNELS), decode, multiply, accumulate, add_and_normalise, exponentials, gate, top, peak};

#if defined(LOOKAHEAD_KERNELS_PORTABLE)

float half_values[1 << 16];

#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx512_kernels;
#endif

std::span<const Kernels* const> available_kernels() {
  [[maybe_unused]] static const bool filled = [] {
    for (std::uint32_t h = 0; h < 1U << 16; ++h) {
      const auto bits = static_cast<std::uint16_t>(h);
      decode_row(WeightType::f16, reinterpret_cast<const std::byte*>(&bits), 1, &half_values[h]);
    }
    return true;
  }();
#if defined(__x86_64__)
  static const Kernels* const sets[] = {&avx512_kernels, &avx2_kernels, &portable_kernels};
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f");
  return std::span(sets).subspan(avx512 ? 0 : avx2 ? 1 : 2);
#else
  static const Kernels* const sets[] = {&portable_kernels};
  return sets;
#endif
}

#endif

}  // namespace lookahead::engines
