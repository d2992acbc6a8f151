/// @file pool.cpp
/// The pool of n-grams: what filing and looking up cost, in a table that fits the cache and in one that does not; and
/// what a pool costs that is shared by threads which mostly read.

#include <benchmark/benchmark.h>
#include <cstddef>
#include <cstdint>

#include "lookahead/ngram_pool.hpp"
#include "lookahead/shared_ngram_pool.hpp"

namespace {

using lookahead::NGramPool;
using lookahead::PoolInsert;
using lookahead::SharedNGramPool;
using lookahead::Source;

/// Context number i. Every second one has a text entry, the others a row's best tokens.
PoolInsert thing(std::uint64_t i) {
  lookahead::ContextHash hash;
  hash.push(static_cast<std::uint32_t>(i));
  PoolInsert insert{hash.value(), Source::text, 1, {}};
  for (std::uint32_t t = 0; t < 8; ++t) insert.token[t] = static_cast<std::uint32_t>(i) + t;
  if (i % 2 != 0) {
    insert.source = Source::recycled;
    insert.count = 8;
  }
  return insert;
}

/// Files n things, as a step does: in batches. Returns the number of the next one.
template <class Pool>
std::uint64_t file(const Pool& pool, std::uint64_t from, std::size_t n) {
  constexpr std::size_t batch = 128;
  PoolInsert inserts[batch];
  for (std::size_t done = 0; done < n; done += batch) {
    for (PoolInsert& insert : inserts) insert = thing(from++);
    pool.insert_all(lookahead::SerialGroup{}, inserts, batch);
  }
  return from;
}

/// New things, 4.5 entries each in the mean. Times are for 128 of them.
void insert(benchmark::State& state) {
  NGramPool<> pool(static_cast<std::size_t>(state.range(0)));
  std::uint64_t next = 0;
  for (auto _ : state) next = file(pool.ref(), next, 128);
  state.counters["each"] = benchmark::Counter(static_cast<double>(state.iterations()) * 128,
                                              benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

/// Contexts that are there (range 1: 1) or not (0), in no order.
void look_up(benchmark::State& state) {
  NGramPool<> pool(static_cast<std::size_t>(state.range(0)));
  const std::uint64_t count = pool.slots() / 16;  // so that few are evicted
  file(pool.ref(), 0, count);
  const std::uint64_t first = state.range(1) != 0 ? 0 : 1U << 31U;
  std::uint64_t i = 0, entries = 0, sum = 0;
  for (auto _ : state) {
    i = i * 6364136223846793005U + 1442695040888963407U;
    lookahead::ContextHash hash;
    hash.push(static_cast<std::uint32_t>(first + (i >> 32) % count));
    pool.ref().for_each(lookahead::SerialTile{}, hash.value(), [&](const lookahead::PoolFind& find) {
      sum += find.token + static_cast<std::uint32_t>(find.rank);
      ++entries;
    });
  }
  benchmark::DoNotOptimize(sum);
  state.counters["entries"] = benchmark::Counter(static_cast<double>(entries), benchmark::Counter::kAvgIterations);
}

/// 15 contexts that are there, in no order, and then one thing that is filed again. Times are for one of the 16.
template <class Ref>
void read_mostly(benchmark::State& state, const Ref& pool, std::uint64_t count) {
  std::uint64_t i = static_cast<std::uint64_t>(state.thread_index()), sum = 0;
  const auto next = [&] {
    i = i * 6364136223846793005U + 1442695040888963407U;
    return (i >> 32) % count;
  };
  while (state.KeepRunningBatch(16)) {
    for (int k = 0; k < 15; ++k) {
      lookahead::ContextHash hash;
      hash.push(static_cast<std::uint32_t>(next()));
      pool.for_each(lookahead::SerialTile{}, hash.value(), [&](const lookahead::PoolFind& find) {
        sum += find.token + static_cast<std::uint32_t>(find.rank);
      });
    }
    const PoolInsert again = thing(next());
    pool.insert_all(lookahead::SerialGroup{}, &again, 1);
  }
  benchmark::DoNotOptimize(sum);
}

void read_mostly_private(benchmark::State& state) {
  NGramPool<> pool;
  const std::uint64_t count = pool.slots() / 16;
  file(pool.ref(), 0, count);
  read_mostly(state, pool.ref(), count);
}

void read_mostly_shared(benchmark::State& state) {
  static SharedNGramPool<> pool;
  const std::uint64_t count = pool.slots() / 16;
  static const std::uint64_t filed = file(pool.in(1, 1U << 31U).ref(), 0, count);
  benchmark::DoNotOptimize(filed);
  read_mostly(state, pool.in(1, 1U << 31U).ref(), count);
}

}  // namespace

// Fixed numbers of iterations, because a large table takes longer to fill than to measure.
BENCHMARK(insert)->ArgName("slots")->Arg(NGramPool<>::default_slots)->Arg(1 << 26)->Iterations(1 << 13);
BENCHMARK(look_up)
    ->ArgNames({"slots", "there"})
    ->ArgsProduct({{NGramPool<>::default_slots, 1 << 26}, {0, 1}})
    ->Iterations(1 << 20);

BENCHMARK(read_mostly_private)->Iterations(1 << 22);
BENCHMARK(read_mostly_shared)->Threads(1)->Threads(2)->Iterations(1 << 22);

BENCHMARK_MAIN();
