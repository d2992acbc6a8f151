#pragma once
/// @file bulk_pool.cuh
/// Many things at once for a pool of n-grams: fill it from long texts, look up many contexts, take out all it holds.
/// Here for memory of the host, over an execution policy of Thrust's host back ends (cpp, omp, tbb): any compiler will
/// do that has the headers of Thrust and CUB, and no device is needed. In ngram_pool.cuh the same for a device.
///
/// Whatever runs it, a pool holds afterwards what one-by-one calls leave in it, slot by slot: things are sorted by set,
/// and one worker takes the things of a set in their order.
///
/// All calls return when their work is done. They take temporary memory, under 100 MB for filing and 4 bytes a set for
/// taking out, and throw std::bad_alloc where there is none; then a pool may be filled in part.

#if !__has_include(<thrust/version.h>)
#error "lookahead/cuda/bulk_pool.cuh needs Thrust: it comes with the CUDA toolkit, in include/cccl."
#endif

#include <bit>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <thrust/binary_search.h>
#include <thrust/copy.h>
#include <thrust/execution_policy.h>
#include <thrust/fill.h>
#include <thrust/for_each.h>
#include <thrust/functional.h>
#include <thrust/iterator/constant_iterator.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <thrust/memory.h>
#include <thrust/reduce.h>
#include <thrust/scan.h>
#include <thrust/sort.h>
#include <thrust/transform_reduce.h>
#include <utility>

#include "lookahead/detail/config.hpp"
#include "lookahead/errors.hpp"
#include "lookahead/group.hpp"
#include "lookahead/ngram_pool.hpp"

namespace lookahead {

/// Texts that are independent of one another: text i is tokens[offsets[i]], ..., tokens[offsets[i + 1] - 1]. They lie
/// where the pool lies.
template <class Token>
struct Texts {
  const Token* tokens;
  const std::uint64_t* offsets;  ///< never descending; shape [count + 1]
  std::size_t count;
};

/// What a pool holds in one slot. Entries are ordered by context, source (texts are one), rank, then the newest first.
struct PoolEntry {
  std::uint64_t key;  ///< what the pool keeps of the context, source and rank: see context_key
  std::uint32_t token, stamp;

  /// What a pool of `set_count` sets keeps of a context: the keys of its entries are this one's and the 31 that follow.
  /// So the entries of a context are found among sorted ones by two binary searches.
  [[nodiscard]] static LOOKAHEAD_HD std::uint64_t context_key(const NGramPoolRef& pool, std::uint64_t context) {
    return std::uint64_t{pool.set_of(context)} << 32 |
           (static_cast<std::uint32_t>(context) & PoolSet::fingerprint_mask);
  }
  [[nodiscard]] LOOKAHEAD_HD Source source() const { return PoolSet::source_of(static_cast<std::uint32_t>(key)); }
  /// As look-ups give it: of text and window entries their recency, at most 7.
  [[nodiscard]] LOOKAHEAD_HD int rank() const { return static_cast<int>(key & 7); }

  [[nodiscard]] friend LOOKAHEAD_HD bool operator<(const PoolEntry& a, const PoolEntry& b) {
    return a.place() != b.place() ? a.place() < b.place() : a.stamp > b.stamp;
  }
  [[nodiscard]] friend LOOKAHEAD_HD bool operator==(const PoolEntry& a, const PoolEntry& b) {
    return a.key == b.key && a.token == b.token && a.stamp == b.stamp;
  }

 private:
  [[nodiscard]] LOOKAHEAD_HD std::uint64_t place() const {
    return is_text(source()) ? key & ~std::uint64_t{PoolSet::generated_bit} : key;
  }
};

namespace detail {

/// Uninitialised memory for n objects.
template <class T, class Policy>
class Temporary {
 public:
  Temporary(const Policy& policy, std::size_t n)
      : policy_(policy), buffer_(thrust::get_temporary_buffer<T>(policy, static_cast<std::ptrdiff_t>(n))) {
    if (static_cast<std::size_t>(buffer_.second) >= n) return;
    thrust::return_temporary_buffer(policy_, buffer_.first, buffer_.second);
    throw std::bad_alloc();
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  ~Temporary() { thrust::return_temporary_buffer(policy_, buffer_.first, buffer_.second); }

  [[nodiscard]] T* data() const { return thrust::raw_pointer_cast(buffer_.first); }

 private:
  const Policy& policy_;
  decltype(thrust::get_temporary_buffer<T>(std::declval<const Policy&>(), 0)) buffer_;
};

/// Where bulk work runs. A runner has
/// 1. `policy`, for Thrust's algorithms;
/// 2. `each(n, f)` and `each_tile(n, f)`: they call f(i) or f(tile, i) for all i in [0, n), in any order;
/// 3. `read(from)` and `write(to, value)`: one word where the pool lies;
/// 4. `sort(order, other, n, bits)`: sorts n keys whose lower halves ascend, by the bits [32, 32 + bits); returns
/// `order` or `other`, whichever has the result.
template <class Policy>
struct HostRunner {
  using policy_type = Policy;

  template <class F>
  struct OnTile {
    F f;
    void operator()(std::uint64_t i) const { f(SerialTile{}, i); }
  };

  template <class F>
  void each(std::uint64_t n, const F& f) const {
    thrust::for_each_n(policy, thrust::counting_iterator<std::uint64_t>(0), n, f);
  }
  template <class F>
  void each_tile(std::uint64_t n, const F& f) const {
    each(n, OnTile<F>{f});
  }
  template <class T>
  [[nodiscard]] T read(const T* from) const {
    return *from;
  }
  void write(std::uint32_t* to, std::uint32_t value) const { *to = value; }
  std::uint64_t* sort(std::uint64_t* order, std::uint64_t*, std::size_t n, int) const {
    thrust::sort(policy, order, order + n);
    return order;
  }

  const Policy& policy;
};

struct EmptySet {
  PoolSet* sets;
  LOOKAHEAD_HD void operator()(std::uint64_t s) const {
    for (std::uint32_t& stamp : sets[s].stamp) stamp = 0;
  }
};

/// Empties a pool whose stamps have run out; returns the stamp of its newest entry.
template <class Runner>
std::uint32_t empty_if_late(const Runner& runner, const NGramPoolRef& pool, std::uint32_t now) {
  if (now <= PoolClock::last_stamp) return now;
  runner.each(pool.set_count, EmptySet{pool.sets});
  runner.write(&pool.clock->floor, 0);
  return 0;
}

/// What `order` holds of a thing: its set and its number. Of one that is not to be filed: `not_filed`, which is larger.
constexpr std::uint64_t not_filed = ~std::uint64_t{0};
LOOKAHEAD_HD inline std::uint64_t ordered(const NGramPoolRef& pool, std::uint64_t context, std::uint32_t which) {
  return std::uint64_t{pool.set_of(context)} << 32 | which;
}

/// Where the things of a set begin among sorted ones.
struct BeginsSet {
  const std::uint64_t* order;
  LOOKAHEAD_HD bool operator()(std::uint32_t i) const { return i == 0 || order[i] >> 32 != order[i - 1] >> 32; }
};

/// Files the things of one set, in order.
template <class Things>
struct FileSet {
  NGramPoolRef pool;
  const std::uint64_t* order;
  const std::uint32_t* begins;
  std::uint64_t sets, count;
  Things things;
  std::uint32_t now;

  LOOKAHEAD_GROUP_FN template <class Tile>
  LOOKAHEAD_HD void operator()(const Tile& tile, std::uint64_t set) const {
    const std::uint64_t end = set + 1 < sets ? begins[set + 1] : count;
    for (std::uint64_t i = begins[set]; i < end && order[i] != not_filed; ++i) {
      const auto which = static_cast<std::uint32_t>(order[i]);
      pool.insert(tile, things(which), now + 1 + which);
    }
  }
};

/// Temporary memory for n things that are filed at once.
template <class Policy>
struct FilingScratch {
  FilingScratch(const Policy& policy, std::size_t n) : order(policy, n), other(policy, n), begins(policy, n) {}
  Temporary<std::uint64_t, Policy> order, other;
  Temporary<std::uint32_t, Policy> begins;
};

/// Files `things(i)` with the stamp now + 1 + i, for all i in [0, n), in order within each set. scratch.order[i] says
/// where. n < 2^28, so that stamps do not overflow.
template <class Runner, class Scratch, class Things>
void file_ordered(const Runner& runner, const NGramPoolRef& pool, const Scratch& scratch, std::size_t n,
                  const Things& things, std::uint32_t now) {
  // Bits enough for `not_filed` to come last.
  const std::uint64_t* const order =
      runner.sort(scratch.order.data(), scratch.other.data(), n, static_cast<int>(std::bit_width(pool.set_count)));
  std::uint32_t* const begins = scratch.begins.data();
  const thrust::counting_iterator<std::uint32_t> numbers(0);
  const auto sets = static_cast<std::uint64_t>(
      thrust::copy_if(runner.policy, numbers, numbers + static_cast<std::uint32_t>(n), begins, BeginsSet{order}) -
      begins);
  runner.each_tile(sets, FileSet<Things>{pool, order, begins, sets, n, things, now});
  runner.write(&pool.clock->now, now + static_cast<std::uint32_t>(n));
}

/// The contexts of token i behind `begin`.
template <class Token>
struct HashContexts {
  Texts<Token> texts;
  std::uint64_t begin;
  NGramPoolRef pool;
  std::uint64_t *context, *order;  // [tokens, context_length_count]

  LOOKAHEAD_HD void operator()(std::uint64_t i) const {
    std::uint64_t place = begin + i;
    const std::uint64_t first =
        thrust::upper_bound(thrust::seq, texts.offsets, texts.offsets + texts.count + 1, place)[-1];
    std::uint64_t hashes[context_length_count];
    const int found = hash_contexts(
        [&](std::uint32_t& t) {
          if (place == first) return false;
          t = static_cast<std::uint32_t>(texts.tokens[--place]);
          return true;
        },
        hashes);
    for (int k = 0; k < context_length_count; ++k) {
      const auto which = static_cast<std::uint32_t>(i) * context_length_count + static_cast<std::uint32_t>(k);
      if (k < found) context[which] = hashes[k];
      order[which] = k < found ? ordered(pool, hashes[k], which) : not_filed;
    }
  }
};

template <class Token>
struct TextThings {
  const std::uint64_t* context;
  const Token* tokens;
  LOOKAHEAD_HD PoolInsert operator()(std::uint32_t which) const {
    return {context[which], Source::text, 1, {static_cast<std::uint32_t>(tokens[which / context_length_count])}};
  }
};

/// The first place from `from` on where filing text i one by one looks whether stamps have run out: every
/// TextScratch::chunk tokens. `not_filed` where there is none. Of a text that ends before it begins: its number.
struct NextLook {
  const std::uint64_t* offsets;
  std::uint64_t from;
  LOOKAHEAD_HD std::uint64_t operator()(std::uint64_t i) const {
    constexpr auto chunk = static_cast<std::uint64_t>(TextScratch<std::int32_t>::chunk);
    const std::uint64_t begin = offsets[i], end = offsets[i + 1];
    if (begin > end) return i;
    if (from >= end) return not_filed;
    const std::uint64_t place = from <= begin ? begin : begin + (from - begin + chunk - 1) / chunk * chunk;
    return place < end ? place : not_filed;
  }
};

/// The smallest place of all texts.
template <class Runner>
std::uint64_t first_of(const Runner& runner, std::size_t texts, const NextLook& next) {
  return thrust::transform_reduce(runner.policy, thrust::counting_iterator<std::uint64_t>(0),
                                  thrust::counting_iterator<std::uint64_t>(texts), next, not_filed,
                                  thrust::minimum<std::uint64_t>());
}

/// Tokens that are filed at once: their temporary memory is 196 bytes each, and what sorting needs.
constexpr std::uint64_t fill_piece = std::uint64_t{1} << 18;

template <class Runner, class Token>
void bulk_fill(const Runner& runner, const NGramPoolRef& pool, const Texts<Token>& texts, std::uint64_t most) {
  using Policy = typename Runner::policy_type;
  if (texts.count == 0) return;
  if (const std::uint64_t bad = first_of(runner, texts.count, {texts.offsets, not_filed}); bad != not_filed)
    throw InvalidArgument("text " + std::to_string(bad) + " begins at " +
                          std::to_string(runner.read(texts.offsets + bad)) + " and ends at " +
                          std::to_string(runner.read(texts.offsets + bad + 1)) + ": pass offsets that never descend");
  std::uint64_t place = runner.read(texts.offsets);
  const std::uint64_t end = runner.read(texts.offsets + texts.count);
  if (place == end) return;
  most = end - place < most ? end - place : most;
  const Temporary<std::uint64_t, Policy> context(runner.policy, most * context_length_count);
  const FilingScratch<Policy> scratch(runner.policy, most * context_length_count);
  for (std::uint32_t now = runner.read(&pool.clock->now); place < end;) {
    // Where one-by-one filing would find that stamps have run out.
    const std::uint64_t left =
        now > PoolClock::last_stamp ? 0 : (PoolClock::last_stamp - now) / context_length_count + 1;
    std::uint64_t late = left < end - place ? first_of(runner, texts.count, {texts.offsets, place + left}) : end;
    if (late == place) {
      now = empty_if_late(runner, pool, now);
      late = end;  // new stamps last for more tokens than a piece has
    }
    const std::uint64_t size = (late < end ? late : end) - place, count = size < most ? size : most;
    runner.each(count, HashContexts<Token>{texts, place, pool, context.data(), scratch.order.data()});
    file_ordered(runner, pool, scratch, count * context_length_count,
                 TextThings<Token>{context.data(), texts.tokens + place}, now);
    now += static_cast<std::uint32_t>(count) * context_length_count;
    place += count;
  }
}

struct OrderThings {
  NGramPoolRef pool;
  const PoolInsert* what;
  std::uint64_t* order;
  LOOKAHEAD_HD void operator()(std::uint64_t i) const {
    order[i] = what[i].count == 0 ? not_filed : ordered(pool, what[i].context, static_cast<std::uint32_t>(i));
  }
};

struct GivenThings {
  const PoolInsert* what;
  LOOKAHEAD_HD const PoolInsert& operator()(std::uint32_t i) const { return what[i]; }
};

template <class Runner>
void bulk_insert(const Runner& runner, const NGramPoolRef& pool, const PoolInsert* what, std::size_t count) {
  using Policy = typename Runner::policy_type;
  constexpr std::size_t batch = std::size_t{1} << 16;
  const std::size_t most = count < batch ? count : batch;
  if (count == 0) return;
  const FilingScratch<Policy> scratch(runner.policy, most);
  std::uint32_t now = runner.read(&pool.clock->now);
  for (std::size_t done = 0; done < count; done += most) {
    const std::size_t n = count - done < most ? count - done : most;
    now = empty_if_late(runner, pool, now);
    runner.each(n, OrderThings{pool, what + done, scratch.order.data()});
    file_ordered(runner, pool, scratch, n, GivenThings{what + done}, now);
    now += static_cast<std::uint32_t>(n);
  }
}

/// Adds an entry to n sorted ones, of which the first `width` are kept. Returns how many there are.
LOOKAHEAD_HD inline int add_sorted(PoolEntry* entries, int n, int width, const PoolEntry& entry) {
  if (n == width && !(entry < entries[n - 1])) return n;
  const int count = n < width ? n + 1 : n;
  int at = count - 1;
  for (; at > 0 && entry < entries[at - 1]; --at) entries[at] = entries[at - 1];
  entries[at] = entry;
  return count;
}

struct LookUp {
  NGramPoolRef pool;
  const std::uint64_t* contexts;
  int width;
  PoolEntry* entries;
  std::int32_t* counts;

  LOOKAHEAD_GROUP_FN template <class Tile>
  LOOKAHEAD_HD void operator()(const Tile& tile, std::uint64_t i) const {
    PoolEntry* const row = entries + i * static_cast<std::uint64_t>(width);
    const std::uint64_t context = PoolEntry::context_key(pool, contexts[i]);
    int n = 0;
    pool.for_each(tile, contexts[i], [&](const PoolFind& find) {
      const std::uint64_t key =
          context | static_cast<std::uint64_t>(find.source) << 3 | static_cast<std::uint64_t>(find.rank);
      if (tile.leads()) n = add_sorted(row, n, width, {key, find.token, find.stamp});
    });
    if (tile.leads()) counts[i] = n;
  }
};

template <class Runner>
void bulk_look_up(const Runner& runner, const NGramPoolRef& pool, const std::uint64_t* contexts, std::size_t count,
                  int width, PoolEntry* entries, std::int32_t* counts) {
  if (width < 1 || width > PoolSet::slots)
    throw InvalidArgument("room for " + std::to_string(width) + " entries of each context: pass 1 to " +
                          std::to_string(PoolSet::slots));
  if (count > 0) runner.each_tile(count, LookUp{pool, contexts, width, entries, counts});
}

struct CountEntries {
  NGramPoolRef pool;
  std::uint32_t* counts;

  LOOKAHEAD_GROUP_FN template <class Tile>
  LOOKAHEAD_HD void operator()(const Tile& tile, std::uint64_t set) const {
    std::uint32_t n = 0;
    for (std::uint32_t full = tile.greater(pool.sets[set].stamp, pool.clock->floor); full != 0; full &= full - 1) ++n;
    if (tile.leads()) counts[set] = n;
  }
};

struct ExportSet {
  NGramPoolRef pool;
  const std::uint32_t* ends;  ///< where the entries of each set end
  PoolEntry* entries;

  LOOKAHEAD_GROUP_FN template <class Tile>
  LOOKAHEAD_HD void operator()(const Tile& tile, std::uint64_t set) const {
    PoolEntry* const out = entries + (set > 0 ? ends[set - 1] : 0U);
    int n = 0;
    pool.for_each_in(tile, static_cast<std::uint32_t>(set),
                     [&](std::uint32_t key, int rank, std::uint32_t token, std::uint32_t stamp) {
                       const std::uint64_t full =
                           set << 32 | (key & ~PoolSet::last_bits) | static_cast<std::uint32_t>(rank);
                       if (tile.leads()) n = add_sorted(out, n, PoolSet::slots, {full, token, stamp});
                     });
  }
};

template <class Runner>
std::size_t bulk_export(const Runner& runner, const NGramPoolRef& pool, PoolEntry* entries) {
  const Temporary<std::uint32_t, typename Runner::policy_type> ends(runner.policy, pool.set_count);
  runner.each_tile(pool.set_count, CountEntries{pool, ends.data()});
  thrust::inclusive_scan(runner.policy, ends.data(), ends.data() + pool.set_count, ends.data());
  runner.each_tile(pool.set_count, ExportSet{pool, ends.data(), entries});
  return runner.read(ends.data() + pool.set_count - 1);
}

}  // namespace detail

/// Files texts, as `add_text` does with each of them in turn. Throws InvalidArgument where offsets descend; then
/// nothing was changed. O(tokens x (1 + log(texts))).
template <class Policy, class Token>
void bulk_fill(const Policy& policy, const NGramPoolRef& pool, const Texts<Token>& texts) {
  detail::bulk_fill(detail::HostRunner<Policy>{policy}, pool, texts, detail::fill_piece);
}

/// Files `count` things in order, as `PoolRef::insert_all` does with 2^16 of them at a time. O(count).
template <class Policy>
void bulk_insert(const Policy& policy, const NGramPoolRef& pool, const PoolInsert* what, std::size_t count) {
  detail::bulk_insert(detail::HostRunner<Policy>{policy}, pool, what, count);
}

/// What the pool gives for each of `count` contexts (see ContextHash), sorted: the first counts[i] <= width entries of
/// row i of `entries`; shapes: contexts [count], entries [count, width], counts [count]. Where a context has more than
/// `width` entries, the first ones are taken. Throws InvalidArgument unless 1 <= width <= 32. O(count).
template <class Policy>
void bulk_look_up(const Policy& policy, const NGramPoolRef& pool, const std::uint64_t* contexts, std::size_t count,
                  int width, PoolEntry* entries, std::int32_t* counts) {
  detail::bulk_look_up(detail::HostRunner<Policy>{policy}, pool, contexts, count, width, entries, counts);
}

/// Everything that the pool holds, sorted, into `entries`, which has room for all slots. Returns how many there are.
/// Then std::lower_bound or its like finds what stands under a context. O(slots).
template <class Policy>
std::size_t bulk_export(const Policy& policy, const NGramPoolRef& pool, PoolEntry* entries) {
  return detail::bulk_export(detail::HostRunner<Policy>{policy}, pool, entries);
}

}  // namespace lookahead
