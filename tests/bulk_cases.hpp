#pragma once
/// @file bulk_cases.hpp
/// Random pools, and what may be done to many entries of them at once: for Thrust's host back ends and for a device.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "random.hpp"

#include "lookahead/cuda/bulk_pool.cuh"
#include "lookahead/ngram_pool.hpp"

namespace bulk_cases {

// Not all of lookahead: nvcc's own code says `cuda` and means the toolkit's namespace.
using lookahead::ContextHash;
using lookahead::InvalidArgument;
using lookahead::NGramPoolRef;
using lookahead::PoolClock;
using lookahead::PoolEntry;
using lookahead::PoolInsert;
using lookahead::PoolMemory;
using lookahead::PoolSet;
using lookahead::SerialGroup;
using lookahead::SerialTile;
using lookahead::Source;
using lookahead::Texts;
using Token = std::int32_t;
using Tokens = std::vector<Token>;
using Pool = lookahead::NGramPool<Token>;

inline bool same(Pool& a, Pool& b) {
  const auto x = a.ref(), y = b.ref();
  return x.set_count == y.set_count && std::memcmp(x.sets, y.sets, x.set_count * sizeof(PoolSet)) == 0 &&
         x.clock->now == y.clock->now && x.clock->floor == y.clock->floor;
}

inline std::uint64_t context_of(int token) {
  ContextHash hash;
  hash.push(static_cast<std::uint32_t>(token));
  return hash.value();
}

/// Things of all sources under a few contexts, which meet again; and things that file nothing.
inline std::vector<PoolInsert> random_things(Random& random, int count) {
  std::vector<PoolInsert> things(static_cast<std::size_t>(count));
  for (PoolInsert& thing : things) {
    thing.context = context_of(random.below(40));
    thing.source = static_cast<Source>(random.below(4));
    thing.count = random.one_in(5) ? 0 : thing.source == Source::recycled ? 1 + random.below(8) : 1;
    for (std::uint32_t& token : thing.token) token = static_cast<std::uint32_t>(random.below(14));
  }
  return things;
}

inline void insert_all(Pool& pool, std::span<const PoolInsert> things) {
  pool.ref().insert_all(SerialGroup{}, things.data(), static_cast<int>(things.size()));
}

/// Any state that a pool can be in: full or not, forgotten in part, stamps near their end.
inline Pool random_pool(Random& random) {
  constexpr int sizes[] = {1, 2, 8, 64};
  Pool pool(static_cast<std::size_t>(32 * sizes[random.below(4)]));
  for (int i = random.below(4); i > 0; --i) {
    insert_all(pool, random_things(random, random.below(100)));
    if (random.one_in(3)) pool.reset();
  }
  if (random.one_in(3)) pool.ref().clock->now = PoolClock::last_stamp - static_cast<std::uint32_t>(random.below(3000));
  return pool;
}

/// Texts and where they begin, some of them empty; the first one need not begin at 0.
struct RandomTexts {
  explicit RandomTexts(Random& random) {
    const int vocabulary = random.one_in(2) ? 4 : 1000;
    tokens = random.tokens(random.below(4), vocabulary);
    offsets.push_back(tokens.size());
    for (int i = random.below(8); i > 0; --i) {
      const Tokens text = random.tokens(random.one_in(3) ? 0 : random.below(200), vocabulary);
      tokens.insert(tokens.end(), text.begin(), text.end());
      offsets.push_back(tokens.size());
    }
  }
  [[nodiscard]] Texts<Token> all() const { return {tokens.data(), offsets.data(), offsets.size() - 1}; }
  void add_to(Pool& pool) const {
    for (std::size_t i = 0; i + 1 < offsets.size(); ++i)
      pool.add_text(std::span(tokens).subspan(offsets[i], offsets[i + 1] - offsets[i]));
  }
  Tokens tokens;
  std::vector<std::uint64_t> offsets;
};

/// All that a pool gives, sorted.
inline std::vector<PoolEntry> entries_of(Pool& pool) {
  const auto ref = pool.ref();
  std::vector<PoolEntry> all;
  for (std::uint32_t s = 0; s < ref.set_count; ++s)
    for (int lane = 0; lane < PoolSet::slots; ++lane) {
      const PoolSet& set = ref.sets[s];
      if (set.stamp[lane] <= ref.clock->floor) continue;
      const std::uint32_t context = set.key[lane] & ~7U;  // and source
      std::uint32_t rank = set.key[lane] & 7;
      const auto source = static_cast<Source>(context >> 3 & 3);
      if (source != Source::recycled) {
        const std::uint32_t alike = source == Source::window ? ~7U : ~15U;
        std::uint32_t newer = 0;
        for (int other = 0; other < PoolSet::slots; ++other)
          newer += ((set.key[other] ^ context) & alike) == 0 && set.stamp[other] > set.stamp[lane] ? 1 : 0;
        rank = std::min(newer, 7U);
      }
      all.push_back({std::uint64_t{s} << 32 | context | rank, set.token[lane], set.stamp[lane]});
    }
  std::sort(all.begin(), all.end());
  return all;
}

/// The entries of one context among sorted ones, at most `width`.
inline std::vector<PoolEntry> entries_under(const std::vector<PoolEntry>& sorted, std::uint64_t key, int width) {
  const auto before = [](const PoolEntry& entry, std::uint64_t k) { return entry.key < k; };
  const auto begin = std::lower_bound(sorted.begin(), sorted.end(), key, before);
  const auto end = std::lower_bound(begin, sorted.end(), key + 32, before);
  return {begin, end - begin < width ? end : begin + width};
}

}  // namespace bulk_cases
