/// Pools on a device beside the host's, byte for byte.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>
#include <doctest/doctest.h>
#include <vector>

#include "../bulk_cases.hpp"
#include "../cases.hpp"
#include "on_device.hpp"

#include "lookahead/cuda/ngram_pool.cuh"
#include "lookahead/pool_file.hpp"

namespace {

using namespace bulk_cases;
namespace gpu = lookahead::cuda;

/// The second of two pools on a device; the first one must stay empty.
struct DevicePool {
  explicit DevicePool(Pool& from) : pools(2, from.slots(), stream) { pools.write_async(1, from.ref(), stream); }
  [[nodiscard]] NGramPoolRef ref() const { return pools.ref(1); }
  [[nodiscard]] Pool read() const {
    Pool first(pools.read(0, stream)), empty(first.slots());
    CHECK(same(first, empty));
    return Pool(pools.read(1, stream));
  }
  Stream stream;
  gpu::NGramPool<Token> pools;
};

}  // namespace

TEST_CASE("texts and things are filed on the device as one by one on the host") {
  for (int seed = 0; seed < cases(2000) / 20; ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    Pool expected = random_pool(random);
    const DevicePool device(expected);
    for (int round = 0; round < 3; ++round) {
      CAPTURE(round);
      const RandomTexts texts(random);
      const OnDevice<Token> tokens(texts.tokens);
      const OnDevice<std::uint64_t> offsets(texts.offsets);
      texts.add_to(expected);
      gpu::bulk_fill(device.stream, device.ref(),
                     Texts<Token>{tokens.data(), offsets.data(), texts.offsets.size() - 1});
      Pool filled = device.read();
      REQUIRE(same(filled, expected));

      const std::vector<PoolInsert> things = random_things(random, 1 + random.below(3000));
      const OnDevice<PoolInsert> on_device(things);
      insert_all(expected, things);
      gpu::bulk_insert(device.stream, device.ref(), on_device.data(), things.size());
      filled = device.read();
      REQUIRE(same(filled, expected));
      if (random.one_in(3)) {
        expected.reset();
        device.pools.reset_async(1, device.stream);
      }
    }
  }
}

TEST_CASE("a long text is filed in pieces") {
  Random random(1);
  const Tokens tokens = random.tokens(300000, 3000);
  Pool expected(1 << 16);
  const DevicePool device(expected);
  expected.add_text(tokens);
  const OnDevice<Token> on_device(tokens);
  const OnDevice<std::uint64_t> offsets(std::vector<std::uint64_t>{0, tokens.size()});
  gpu::bulk_fill(device.stream, device.ref(), Texts<Token>{on_device.data(), offsets.data(), 1});
  Pool filled = device.read();
  CHECK(same(filled, expected));
}

TEST_CASE("what is taken out and what is looked up are what the host's pool holds") {
  for (int seed = 0; seed < cases(2000) / 20; ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    Pool pool = random_pool(random);
    RandomTexts(random).add_to(pool);
    const DevicePool device(pool);
    const std::vector<PoolEntry> expected = entries_of(pool);

    const OnDevice<PoolEntry> entries(pool.slots());
    const std::size_t count = gpu::bulk_export(device.stream, device.ref(), entries.data());
    std::vector<PoolEntry> taken = entries.values();
    taken.resize(count);
    REQUIRE(taken == expected);

    std::vector<std::uint64_t> contexts;
    for (int t = 0; t < 40; ++t) contexts.push_back(context_of(t));
    const int width = 1 + random.below(32);
    const OnDevice<std::uint64_t> keys(contexts);
    const OnDevice<PoolEntry> rows(contexts.size() * static_cast<std::size_t>(width));
    const OnDevice<std::int32_t> counts(contexts.size());
    gpu::bulk_look_up_async(device.ref(), keys.data(), contexts.size(), width, rows.data(), counts.data(),
                            device.stream);
    device.stream.wait();
    const std::vector<PoolEntry> found = rows.values();
    const std::vector<std::int32_t> found_counts = counts.values();
    for (std::size_t i = 0; i < contexts.size(); ++i) {
      CAPTURE(i);
      const PoolEntry* const row = found.data() + i * static_cast<std::size_t>(width);
      REQUIRE(std::vector<PoolEntry>(row, row + found_counts[i]) ==
              entries_under(expected, PoolEntry::context_key(pool.ref(), contexts[i]), width));
    }
  }
}

TEST_CASE("what cannot be used is refused") {
  const Stream stream;
  Pool pool(64);
  const gpu::NGramPool<Token> pools(1, 32, stream);
  CHECK_THROWS_WITH_AS(pools.write_async(0, pool.ref(), stream),
                       "a pool of 64 slots: pass one of 32, the size on the device", InvalidArgument);
  CHECK_THROWS_AS(gpu::NGramPool<Token>(0, 32, stream), InvalidArgument);
  CHECK_THROWS_AS(gpu::NGramPool<Token>(1, 0, stream), InvalidArgument);
  CHECK_THROWS_AS(gpu::NGramPool<Token>(std::size_t{1} << 20, PoolMemory::max_slots, stream), gpu::Error);
}

// Run by run.sh alone. 10 million n-grams of a text in which few tokens are frequent.
TEST_CASE("benchmark" * doctest::skip()) {
  const Stream stream;
  Random random(1);
  Tokens tokens(1 << 20);
  for (Token& token : tokens) token = 1 + (random.below(1 << 30) >> random.below(30)) % 32000;
  tokens.insert(tokens.end(), tokens.begin(), tokens.begin() + (1 << 19));
  const double grams = 7.0 * static_cast<double>(tokens.size());
  const OnDevice<Token> on_device(tokens);
  const OnDevice<std::uint64_t> offsets(std::vector<std::uint64_t>{0, tokens.size()});
  const gpu::NGramPool<Token> pools(1, 1 << 22, stream);
  const double fill = median_seconds(stream, 5, [&] {
    gpu::bulk_fill(stream, pools.ref(), Texts<Token>{on_device.data(), offsets.data(), 1});
  });
  std::printf("%-52s %12.0f million n-grams/s\n", "filling a pool of 4194304 slots", grams / fill / 1e6);
  Pool host(1 << 22);
  const auto begin = std::chrono::steady_clock::now();
  host.add_text(tokens);
  const double one_by_one = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%-52s %12.0f million n-grams/s\n", "the same on one thread of the host", grams / one_by_one / 1e6);

  const OnDevice<PoolEntry> entries(pools.slots());
  std::size_t count = 0;
  const double exported =
      median_seconds(stream, 5, [&] { count = gpu::bulk_export(stream, pools.ref(), entries.data()); });
  std::printf("%-52s %12.0f million entries/s\n", "taking all out", static_cast<double>(count) / exported / 1e6);
  std::vector<std::uint64_t> contexts(1 << 20);
  for (std::uint64_t& context : contexts) context = context_of(tokens[static_cast<std::size_t>(random.below(1 << 20))]);
  const OnDevice<std::uint64_t> keys(contexts);
  const OnDevice<std::int32_t> counts(contexts.size());
  const double looked_up = median_seconds(stream, 21, [&] {
    gpu::bulk_look_up_async(pools.ref(), keys.data(), contexts.size(), 4, entries.data(), counts.data(), stream);
  });
  std::printf("%-52s %12.0f million contexts/s\n", "looking up 1048576 contexts",
              static_cast<double>(contexts.size()) / looked_up / 1e6);
}
