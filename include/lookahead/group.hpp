#pragma once
/// @file group.hpp
/// Who executes an algorithm. Window, pool, tree and walk are written once, as templates over a group: one host thread
/// (`SerialGroup`), several host threads, or the threads of a device block.

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "lookahead/detail/config.hpp"

#if defined(__SSE2__) && !defined(__CUDA_ARCH__)
#include <emmintrin.h>
#endif

namespace lookahead {

/// 32 lanes that work on one thing. Every member is called by all lanes with the same arguments, gives the same value
/// to all, and what one call stored is seen by all lanes in the next. Control flow is the same in all lanes.
/// The shape of `words` is [32], 16-byte aligned.
/// 1. `rank()` numbers the tile among the `count()` tiles of its group.
/// 2. `match(words, mask, value)`: bit i is set where (words[i] & mask) == value.
/// 3. `greater(words, value)`: bit i is set where words[i] > value.
/// 4. `oldest(words)` is the lane of the smallest word, the lowest lane on ties.
/// 5. `store(word, value)` and `load(word)`: one lane writes, or reads for all.
/// 6. `prefetch(words)`: the words will be read soon. It may do nothing.
/// 7. `leads()` is true in one lane: the one that writes what the tile has found.
/// 8. `sum(n, f)` is f(0) + ... + f(n - 1), added in the same order by every tile, to the same bits: lane l adds up
/// f(l), f(l + 32), ...; then lane l adds the sum of lane l + 16 to its own, that of lane l + 8, and so on; lane 0 has
/// the sum. Each f(i) is called by one lane.
template <class T>
concept Tile = requires(const T& t, const std::uint32_t* words, std::uint32_t* word, int (*f)(int)) {
  { t.rank() } -> std::same_as<int>;
  { t.count() } -> std::same_as<int>;
  { t.match(words, 1U, 1U) } -> std::same_as<std::uint32_t>;
  { t.greater(words, 1U) } -> std::same_as<std::uint32_t>;
  { t.oldest(words) } -> std::same_as<int>;
  { t.load(words) } -> std::same_as<std::uint32_t>;
  t.store(word, 1U);
  t.prefetch(words);
  { t.leads() } -> std::same_as<bool>;
  { t.sum(1, f) } -> std::same_as<int>;
};

/// Threads that run one algorithm together. Every member is called by all threads of the group, in the same order.
/// 1. `rank()` is in `[0, size())`, distinct for each thread.
/// 2. After `sync()` each thread sees what every thread wrote before it.
/// 3. `exclusive_sum(a, n)` replaces a[i] by a[0] + ... + a[i-1] and returns the total.
/// 4. `sort(a, n)` sorts ascending in place. Keys are distinct.
/// 5. `exclusive_sum` and `sort` begin and end with a sync, for n = 0 too.
/// 6. `tile()` is the calling thread's team of 32 lanes. Tiles of a group work on different items without a sync.
template <class G>
concept Group = requires(const G& g, int* a, std::uint64_t* k, int n) {
  { g.rank() } -> std::same_as<int>;
  { g.size() } -> std::same_as<int>;
  g.sync();
  { g.exclusive_sum(a, n) } -> std::same_as<int>;
  g.sort(k, n);
  { g.tile() } -> Tile;
};

/// Words that no other thread writes meanwhile.
struct PlainWords {
  [[nodiscard]] static LOOKAHEAD_HD std::uint32_t load(const std::uint32_t* word) { return *word; }
  static LOOKAHEAD_HD void store(std::uint32_t* word, std::uint32_t value) { *word = value; }
#if defined(__SSE2__) && !defined(__CUDA_ARCH__)
  [[nodiscard]] static __m128i load_four(const std::uint32_t* words) {
    return _mm_load_si128(reinterpret_cast<const __m128i*>(words));
  }
#endif
};

/// A tile of one thread: a loop over the lanes that the compiler turns into vector code. `Words` says how memory is
/// read and written.
template <class Words>
struct HostTile {
  [[nodiscard]] LOOKAHEAD_HD int rank() const { return tile_rank; }
  [[nodiscard]] LOOKAHEAD_HD int count() const { return tile_count; }

  [[nodiscard]] LOOKAHEAD_HD bool leads() const { return true; }

  LOOKAHEAD_GROUP_FN [[nodiscard]] LOOKAHEAD_HD std::uint32_t match(const std::uint32_t* words, std::uint32_t mask,
                                                                    std::uint32_t value) const {
#if defined(__SSE2__) && !defined(__CUDA_ARCH__)
    const __m128i m = _mm_set1_epi32(static_cast<int>(mask)), v = _mm_set1_epi32(static_cast<int>(value));
    return lanes(words, [&](__m128i w) { return _mm_cmpeq_epi32(_mm_and_si128(w, m), v); });
#else
    return lanes(words, [&](std::uint32_t w) { return (w & mask) == value; });
#endif
  }

  LOOKAHEAD_GROUP_FN [[nodiscard]] LOOKAHEAD_HD std::uint32_t greater(const std::uint32_t* words,
                                                                      std::uint32_t value) const {
#if defined(__SSE2__) && !defined(__CUDA_ARCH__)
    const __m128i sign = _mm_set1_epi32(INT32_MIN);  // the comparison is one of signed numbers
    const __m128i v = _mm_xor_si128(_mm_set1_epi32(static_cast<int>(value)), sign);
    return lanes(words, [&](__m128i w) { return _mm_cmpgt_epi32(_mm_xor_si128(w, sign), v); });
#else
    return lanes(words, [&](std::uint32_t w) { return w > value; });
#endif
  }

  LOOKAHEAD_GROUP_FN template <class F>
  [[nodiscard]] LOOKAHEAD_HD std::invoke_result_t<F, int> sum(int n, const F& f) const {
    std::invoke_result_t<F, int> lane[32] = {};
    for (int i = 0; i < n; ++i) lane[i % 32] += f(i);
    for (int half = 16; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
  }

  LOOKAHEAD_GROUP_FN [[nodiscard]] LOOKAHEAD_HD int oldest(const std::uint32_t* words) const {
    int lane = 0;
    for (int i = 1; i < 32; ++i) lane = Words::load(words + i) < Words::load(words + lane) ? i : lane;
    return lane;
  }

  LOOKAHEAD_HD void prefetch(const std::uint32_t* words) const {
#if !defined(__CUDA_ARCH__)
    __builtin_prefetch(words);
    __builtin_prefetch(words + 16);
#endif
  }

  LOOKAHEAD_GROUP_FN LOOKAHEAD_HD void store(std::uint32_t* word, std::uint32_t value) const {
    Words::store(word, value);
  }

  LOOKAHEAD_GROUP_FN [[nodiscard]] LOOKAHEAD_HD std::uint32_t load(const std::uint32_t* word) const {
    return Words::load(word);
  }

  int tile_rank = 0, tile_count = 1;

 private:
  /// Bit i is set where test(words[i]) holds.
  LOOKAHEAD_GROUP_FN template <class Test>
  static LOOKAHEAD_HD std::uint32_t lanes(const std::uint32_t* words, const Test& test) {
    std::uint32_t bits = 0;
#if defined(__SSE2__) && !defined(__CUDA_ARCH__)
    const auto four = [&](int i) { return test(Words::load_four(words + i)); };
    for (int i = 0; i < 32; i += 16) {
      const __m128i low = _mm_packs_epi32(four(i), four(i + 4));
      const __m128i high = _mm_packs_epi32(four(i + 8), four(i + 12));
      bits |= static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(low, high))) << i;
    }
#else
    for (int i = 0; i < 32; ++i) bits |= static_cast<std::uint32_t>(test(Words::load(words + i))) << i;
#endif
    return bits;
  }
};

using SerialTile = HostTile<PlainWords>;

namespace detail {

/// Batcher's merge exchange, which sorts in place, and whose branches depend on no key: `stage(p, r, d)` is called for
/// one stage after the other; in it all places i and i + d below n are put in order where i - r lies in the first half
/// of a block of 2p, and i >= r. Pairs of a stage are independent.
LOOKAHEAD_GROUP_FN template <class Stage>
LOOKAHEAD_HD void merge_exchange(int n, const Stage& stage) {
  int top = 1;
  while (2 * top < n) top *= 2;
  for (int p = top; p > 0; p /= 2) {
    for (int q = top, r = 0, d = p;; d = q - p, q /= 2, r = p) {
      stage(p, r, d);
      if (q == p) break;
    }
  }
}

LOOKAHEAD_HD inline void exchange(std::uint64_t& low, std::uint64_t& high) {
  const std::uint64_t x = low, y = high;
  low = x < y ? x : y;
  high = x < y ? y : x;
}

/// Sorts ascending in place, by many threads; each takes its share of every stage.
LOOKAHEAD_GROUP_FN template <class Gr>
LOOKAHEAD_HD void sort_in_place(const Gr& g, std::uint64_t* a, int n) {
  merge_exchange(n, [&](int p, int r, int d) {
    g.sync();
    for (int k = g.rank();; k += g.size()) {
      const int i = r + k / p * 2 * p + k % p;
      if (i + d >= n) break;
      exchange(a[i], a[i + d]);
    }
  });
  g.sync();
}

}  // namespace detail

/// One thread. The classes that users see on a host are instances of this group.
struct SerialGroup {
  [[nodiscard]] LOOKAHEAD_HD int rank() const { return 0; }
  [[nodiscard]] LOOKAHEAD_HD int size() const { return 1; }
  LOOKAHEAD_HD void sync() const {}
  [[nodiscard]] LOOKAHEAD_HD SerialTile tile() const { return {}; }

  LOOKAHEAD_HD int exclusive_sum(int* a, int n) const {
    int sum = 0;
    for (int i = 0; i < n; ++i) {
      const int value = a[i];
      a[i] = sum;
      sum += value;
    }
    return sum;
  }

  LOOKAHEAD_HD void sort(std::uint64_t* a, int n) const {
    detail::merge_exchange(n, [&](int p, int r, int d) {
      for (int begin = r; begin + d < n; begin += 2 * p) {
        const int end = begin + p < n - d ? begin + p : n - d;
        for (int i = begin; i < end; ++i) detail::exchange(a[i], a[i + d]);
      }
    });
  }
};

}  // namespace lookahead
