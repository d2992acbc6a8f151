/// Accepted rows move forward on a device beside a copy that is made first, many planes in one launch.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>
#include <doctest/doctest.h>
#include <memory>
#include <vector>

#include "../cases.hpp"
#include "../kv_cases.hpp"
#include "on_device.hpp"

#include "lookahead/cuda/move_kv.cuh"

namespace {

namespace gpu = lookahead::cuda;
using kv_cases::Cache;
using lookahead::InvalidArgument;
using lookahead::KvMoves;
using lookahead::KvPlane;

}  // namespace

TEST_CASE("rows move as if they had been copied first") {
  const Stream stream;
  for (int seed = 0; seed < cases(2000) / 10; ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    const Cache cache(random);
    // The same plane several times: keys and values of some layers.
    std::vector<std::unique_ptr<OnDevice<Cache::Block>>> memories;
    std::vector<KvPlane> planes;
    for (int i = random.below(4); i >= 0; --i) {
      memories.push_back(std::make_unique<OnDevice<Cache::Block>>(cache.memory));
      planes.push_back(cache.plane);
      planes.back().base = reinterpret_cast<unsigned char*>(memories.back()->data()) + cache.shift;
    }
    const OnDevice<std::int32_t> pages(cache.pages), path(cache.path), kept(cache.kept), context(cache.context);
    const KvMoves moves = {{path.data(), kept.data(), context.data(), Cache::path_stride},
                           cache.paged ? pages.data() : nullptr,
                           cache.pages_each,
                           cache.page_slots};
    const gpu::KvMover mover(planes, stream);
    mover.move_async(moves, Cache::sequences, stream);
    stream.wait();
    const auto expected = cache.moved();
    for (const auto& memory : memories) REQUIRE(memory->values() == expected);
  }
}

TEST_CASE("what cannot be used is refused before a launch") {
  const Stream stream;
  const OnDevice<float> memory(std::size_t{4});
  std::vector<KvPlane> planes = {{memory.data(), 0, 16, 4, 1, 4}, {memory.data(), 0, 16, 4, 1, 0}};
  CHECK_THROWS_WITH_AS(gpu::KvMover(planes, stream),
                       "plane 1 has 1 pieces of 0 bytes for each slot: pass at least 1 of each, and where they begin",
                       InvalidArgument);
  planes[1] = {nullptr, 0, 16, 4, 1, 4};
  CHECK_THROWS_AS(gpu::KvMover(planes, stream), InvalidArgument);
  CHECK_THROWS_AS(gpu::KvMover({}, stream), InvalidArgument);
  planes.pop_back();
  const gpu::KvMover mover(planes, stream);
  CHECK_THROWS_AS(mover.move_async({}, -1, stream), InvalidArgument);
  mover.move_async({}, 0, stream);
}

// Run by run.sh alone. 32 layers of 8 heads of 128 values of two bytes, [page][slot][head], 4 rows of each sequence.
TEST_CASE("benchmark" * doctest::skip()) {
  const Stream stream;
  constexpr int layers = 32, row_bytes = 8 * 128 * 2, page_slots = 16, pages_each = 8, most = 256, kept_rows = 4;
  constexpr std::int64_t page = std::int64_t{page_slots} * row_bytes;
  const OnDevice<unsigned char> memory(static_cast<std::size_t>(page * pages_each * most * layers * 2));
  std::vector<KvPlane> planes;
  for (int i = 0; i < 2 * layers; ++i)
    planes.push_back({memory.data() + i * page * pages_each * most, 0, page, row_bytes, 1, row_bytes});
  std::vector<std::int32_t> pages, path, kept(most, kept_rows), context(most, 20);
  for (int i = 0; i < most * pages_each; ++i) pages.push_back(i);
  for (int i = 0; i < most * kept_rows; ++i) path.push_back(i % kept_rows * 5);
  const OnDevice<std::int32_t> on_pages(pages), on_path(path), on_kept(kept), on_context(context);
  const KvMoves moves = {
      {on_path.data(), on_kept.data(), on_context.data(), kept_rows}, on_pages.data(), pages_each, page_slots};
  const gpu::KvMover mover(planes, stream);
  for (const int sequences : {1, 8, 64, 256}) {
    const double time = median_seconds(stream, 51, [&] { mover.move_async(moves, sequences, stream); });
    char name[80];
    std::snprintf(name, sizeof name, "moving 3 rows in 64 planes of %d sequences", sequences);
    std::printf("%-52s %12.1f us\n", name, time * 1e6);
  }
}
