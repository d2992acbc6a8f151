// Bulk work on pools, on Thrust's host back ends: bytewise what one-by-one calls leave, whatever the order of threads.
#include <thrust/system/cpp/execution_policy.h>
#include <thrust/system/tbb/execution_policy.h>
#if defined(_OPENMP)
#include <thrust/system/omp/execution_policy.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <type_traits>
#include <vector>

#include "bulk_cases.hpp"
#include "cases.hpp"

namespace {

using namespace bulk_cases;
using lookahead::bulk_export;
using lookahead::bulk_fill;
using lookahead::bulk_insert;
using lookahead::bulk_look_up;

struct Cpp {
  static const auto& policy() { return thrust::cpp::par; }
};
struct Tbb {
  static const auto& policy() { return thrust::tbb::par; }
};
#if defined(_OPENMP)
struct Omp {
  static const auto& policy() { return thrust::omp::par; }
};
#define LOOKAHEAD_BACK_ENDS Cpp, Tbb, Omp
#else
#define LOOKAHEAD_BACK_ENDS Cpp, Tbb
#endif

/// Sorts as a device does: by the bits that are asked for alone, into the other array.
template <class Policy>
struct FewBits : lookahead::detail::HostRunner<Policy> {
  std::uint64_t* sort(const std::uint64_t* order, std::uint64_t* other, std::size_t n, int bits) const {
    std::copy_n(order, n, other);
    const std::uint64_t mask = ((std::uint64_t{1} << bits) - 1) << 32;
    std::stable_sort(other, other + n, [&](std::uint64_t a, std::uint64_t b) { return (a & mask) < (b & mask); });
    return other;
  }
};

int rounds() { return std::max(cases(2000) / 1000, 50); }

}  // namespace

TEST_CASE_TEMPLATE("texts are filed in bulk as one by one", BackEnd, LOOKAHEAD_BACK_ENDS) {
  const auto& policy = BackEnd::policy();
  using Policy = std::decay_t<decltype(policy)>;
  int emptied = 0;
  for (int seed = 0; seed < rounds(); ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    Pool pool = random_pool(random);
    for (int fill = 0; fill < 3; ++fill) {
      CAPTURE(fill);
      Pool expected = pool;
      const std::uint32_t before = pool.ref().clock->now;
      const RandomTexts texts(random);
      texts.add_to(expected);
      const auto piece = static_cast<std::uint64_t>(1 + random.below(100));
      switch (random.below(3)) {
        case 0:
          bulk_fill(policy, pool.ref(), texts.all());
          break;
        case 1:
          lookahead::detail::bulk_fill(lookahead::detail::HostRunner<Policy>{policy}, pool.ref(), texts.all(), piece);
          break;
        default:
          lookahead::detail::bulk_fill(FewBits<Policy>{{policy}}, pool.ref(), texts.all(), piece);
      }
      REQUIRE(same(pool, expected));
      emptied += pool.ref().clock->now < before ? 1 : 0;
      if (random.one_in(3)) pool.reset();
    }
  }
  CHECK(emptied > 3);
}

TEST_CASE_TEMPLATE("things are filed in bulk as one by one", BackEnd, LOOKAHEAD_BACK_ENDS) {
  for (int seed = 0; seed < rounds(); ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    Pool pool = random_pool(random);
    for (int round = 0; round < 3; ++round) {
      Pool expected = pool;
      const auto things = random_things(random, 1 + random.below(3000));
      insert_all(expected, things);
      bulk_insert(BackEnd::policy(), pool.ref(), things.data(), things.size());
      REQUIRE(same(pool, expected));
    }
  }
  // More than are filed at once; stamps run out in between.
  Random random(1);
  Pool pool(1024);
  pool.ref().clock->now = PoolClock::last_stamp - 5;
  Pool expected = pool;
  const auto things = random_things(random, (1 << 16) + 100);
  insert_all(expected, std::span(things).first(1 << 16));
  insert_all(expected, std::span(things).subspan(1 << 16));
  bulk_insert(BackEnd::policy(), pool.ref(), things.data(), things.size());
  CHECK(same(pool, expected));
}

TEST_CASE_TEMPLATE("what is taken out and what is looked up are what the pool holds", BackEnd, LOOKAHEAD_BACK_ENDS) {
  const auto& policy = BackEnd::policy();
  for (int seed = 0; seed < rounds(); ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    Pool pool = random_pool(random);
    RandomTexts(random).add_to(pool);

    std::vector<PoolEntry> entries(pool.slots());
    entries.resize(bulk_export(policy, pool.ref(), entries.data()));
    REQUIRE(entries == entries_of(pool));

    std::vector<std::uint64_t> contexts;
    for (int t = 0; t < 40; ++t) contexts.push_back(context_of(t));
    const int width = 1 + random.below(32);
    std::vector<PoolEntry> rows(contexts.size() * static_cast<std::size_t>(width));
    std::vector<std::int32_t> counts(contexts.size(), -1);
    bulk_look_up(policy, pool.ref(), contexts.data(), contexts.size(), width, rows.data(), counts.data());
    for (std::size_t i = 0; i < contexts.size(); ++i) {
      CAPTURE(i);
      const std::uint64_t key = PoolEntry::context_key(pool.ref(), contexts[i]);
      const PoolEntry* const row = rows.data() + i * static_cast<std::size_t>(width);
      REQUIRE(std::vector(row, row + counts[i]) == entries_under(entries, key, width));
      // As the pool itself gives them.
      const auto all = entries_under(entries, key, 32);
      std::size_t given = 0;
      pool.ref().for_each(SerialTile{}, contexts[i], [&](const lookahead::PoolFind& find) {
        ++given;
        REQUIRE(std::ranges::any_of(all, [&](const PoolEntry& e) {
          return e.source() == find.source && e.rank() == find.rank && e.token == find.token && e.stamp == find.stamp;
        }));
      });
      REQUIRE(given == all.size());
    }
  }
}

TEST_CASE("what comes first is the newest of all texts, given or generated") {
  const auto& policy = thrust::cpp::par;
  const std::uint64_t context = context_of(1);
  const PoolInsert things[] = {{context, Source::text, 1, {2}}, {context, Source::generated, 1, {3}}};
  for (const auto& [first, newest] : {std::pair{0, 3U}, std::pair{1, 2U}}) {
    Pool pool(64);
    for (const int i : {first, 1 - first}) bulk_insert(policy, pool.ref(), things + i, 1);
    PoolEntry entry{};
    std::int32_t count = 0;
    bulk_look_up(policy, pool.ref(), &context, 1, 1, &entry, &count);
    CHECK(count == 1);
    CHECK(entry.token == newest);
    CHECK(entry.rank() == 0);
    std::vector<PoolEntry> all(2);
    REQUIRE(bulk_export(policy, pool.ref(), all.data()) == 2);
    CHECK(all[0] == entry);
  }
}

TEST_CASE("wrong offsets and widths are refused, and nothing is changed") {
  const auto& policy = thrust::cpp::par;
  Pool pool(64);
  pool.add_text(Tokens{1, 2, 3});
  Pool before = pool;
  const Tokens tokens(10);
  const std::vector<std::uint64_t> offsets = {0, 5, 4, 10};
  CHECK_THROWS_WITH_AS(bulk_fill(policy, pool.ref(), Texts<Token>{tokens.data(), offsets.data(), 3}),
                       "text 1 begins at 5 and ends at 4: pass offsets that never descend", InvalidArgument);
  const std::uint64_t context = 0;
  PoolEntry entry{};
  std::int32_t count = 0;
  CHECK_THROWS_WITH_AS(bulk_look_up(policy, pool.ref(), &context, 1, 0, &entry, &count),
                       "room for 0 entries of each context: pass 1 to 32", InvalidArgument);
  CHECK_THROWS_AS(bulk_look_up(policy, pool.ref(), &context, 1, 33, &entry, &count), InvalidArgument);
  bulk_fill(policy, pool.ref(), Texts<Token>{tokens.data(), offsets.data(), 0});
  bulk_insert(policy, pool.ref(), nullptr, 0);
  CHECK(same(pool, before));
}
