// Accepted rows move forward in every layout of a cache, by any number of threads in any order.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <numeric>
#include <vector>

#include "cases.hpp"
#include "kv_cases.hpp"
#include "random.hpp"

#include "lookahead/kv_plane.hpp"

TEST_CASE("rows move as if they had been copied first") {
  int moved = 0;
  for (int seed = 0; seed < std::max(cases(2000) / 10, 200); ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    kv_cases::Cache cache(random);
    const auto expected = cache.moved();
    moved += expected != cache.memory ? 1 : 0;
    lookahead::KvPlane plane = cache.plane;
    plane.base = cache.memory.data()->bytes + cache.shift;
    const lookahead::KvMoves moves = {
        {cache.path.data(), cache.kept.data(), cache.context.data(), kv_cases::Cache::path_stride},
        cache.paged ? cache.pages.data() : nullptr,
        cache.pages_each,
        cache.page_slots};
    std::vector<int> threads(static_cast<std::size_t>(1 + random.below(40)));
    std::iota(threads.begin(), threads.end(), 0);
    if (random.one_in(2)) std::ranges::reverse(threads);
    for (int s = 0; s < kv_cases::Cache::sequences; ++s)
      for (const int t : threads)
        lookahead::detail::move_rows(plane, moves, s, t, static_cast<std::int64_t>(threads.size()));
    REQUIRE(cache.memory == expected);
  }
  CHECK(moved > 100);
}
