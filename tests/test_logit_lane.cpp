// The best of many logits, as the lanes of a device find them, beside a plain sort.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <functional>
#include <vector>

#include "cases.hpp"
#include "logit_cases.hpp"
#include "random.hpp"

#include "lookahead/detail/logit_lane.hpp"

namespace {

using namespace lookahead::detail;
using namespace logit_cases;

}  // namespace

TEST_CASE_TEMPLATE("orders compare as numbers do", Type, Float16, BFloat16) {
  using Format = typename Type::Format;
  std::vector<std::uint32_t> all(1U << 16U);
  for (std::uint32_t bits = 0; bits < all.size(); ++bits) {
    all[bits] = bits;
    // In both halves of a word.
    REQUIRE(Format::exact(Format::part(Format::order(bits | 0x12340000U), 0)) ==
            Format::exact(Format::part(Format::order(bits << 16 | 0x1234U), 1)));
  }
  const auto order = [](std::uint32_t bits) { return Format::exact(Format::order(bits << 16)); };
  std::ranges::sort(all, {}, order);
  for (std::size_t i = 1; i < all.size(); ++i) {
    CAPTURE(all[i]);
    const double a = Type::value(all[i - 1]), b = Type::value(all[i]);
    REQUIRE(better(b, a) == (order(all[i - 1]) < order(all[i])));
    REQUIRE(!better(a, b));
  }
}

TEST_CASE("orders of floats compare as floats do") {
  Random random(1);
  std::vector<std::uint32_t> some = {0, 1U << 31U, 0x7F800000U, 0xFF800000U, 0x7F800001U, 0xFFFFFFFFU, 1, 0x80000001U};
  for (int i = 0; i < 500; ++i) some.push_back(static_cast<std::uint32_t>(random.bits()));
  const auto order = [](std::uint32_t bits) { return Float32Format::exact(Float32Format::order(bits)); };
  const auto value = [](std::uint32_t bits) { return static_cast<double>(std::bit_cast<float>(bits)); };
  for (const std::uint32_t a : some)
    for (const std::uint32_t b : some) {
      REQUIRE(better(value(a), value(b)) == (order(a) > order(b)));
      REQUIRE(better(value(a), value(b)) == better(Float32::value(a), Float32::value(b)));
    }
}

TEST_CASE_TEMPLATE("lanes find the best tokens of a row", Type, Float32, Float16, BFloat16) {
  using Lane = LogitLane<typename Type::Format>;
  for (int seed = 0; seed < std::max(cases(2000) / 100, 40); ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    const int k = 1 + random.below(8), size = k + random.below(random.one_in(4) ? 10000 : 300);
    Rows<Type> rows(random, 2, size, size + (random.one_in(2) ? 0 : random.below(20)));
    for (int row = 0; row < rows.count; ++row) {
      BestKeys<8> best;
      best.clear();
      for (int chunk = 0; chunk < Lane::chunks(size); ++chunk) {
        std::vector<Lane> lanes(32);
        std::vector<std::uint32_t> largest;
        for (int i = 0; i < 32; ++i) {
          Lane& lane = lanes[static_cast<std::size_t>(i)];
          lane.load(rows.at(row, 0), size, chunk, i);
          largest.push_back(lane.largest());
        }
        std::ranges::sort(largest, std::greater<>{});
        for (const Lane& lane : lanes) {
          BestKeys<8> of_lane;
          of_lane.clear();
          lane.offer(largest[static_cast<std::size_t>(k - 1)], of_lane);
          for (const std::uint64_t key : of_lane.key) best.offer(key);
        }
      }
      std::vector<std::int32_t> found;
      for (int j = 0; j < k; ++j) found.push_back(static_cast<std::int32_t>(key_token(best.key[j])));
      REQUIRE(found == rows.best(row, k));
    }
  }
}

TEST_CASE("a row takes as many chunks as are counted, wherever it begins") {
  using Lane = LogitLane<BFloat16Format>;
  for (const int size : {1, 4089, 4090, 4096, 4097, 32000}) {
    int used = 0;
    for (int begin = 0; begin < 8; ++begin) {
      alignas(16) std::uint16_t row[32008] = {};
      int found = 0;
      for (int chunk = 0; chunk < Lane::chunks(size); ++chunk) {
        std::size_t before = static_cast<std::size_t>(found);
        for (int i = 0; i < 32; ++i) {
          Lane lane;
          lane.load(row + begin, size, chunk, i);
          for (const std::uint32_t word : lane.ordered)
            for (int j = 0; j < 2; ++j) found += BFloat16Format::exact(BFloat16Format::part(word, j)) != 0 ? 1 : 0;
        }
        if (static_cast<std::size_t>(found) > before) used = std::max(used, chunk + 1);
      }
      CHECK(found == size);
    }
    CHECK(used == Lane::chunks(size));
  }
}

TEST_CASE("a good bound lets few logits through") {
  using Lane = LogitLane<BFloat16Format>;
  Random random(3);
  std::vector<std::uint16_t> row(4000);
  for (std::uint16_t& x : row) x = static_cast<std::uint16_t>(random.below(0x7F80));
  std::vector<std::uint32_t> largest;
  std::vector<Lane> lanes(32);
  for (int i = 0; i < 32; ++i) {
    lanes[static_cast<std::size_t>(i)].load(row.data(), 4000, 0, i);
    largest.push_back(lanes[static_cast<std::size_t>(i)].largest());
  }
  std::ranges::sort(largest, std::greater<>{});
  int offered = 0;
  for (const Lane& lane : lanes) {
    BestKeys<8> best;
    best.clear();
    lane.offer(largest[7], best);
    for (const std::uint64_t key : best.key) offered += key != 0 ? 1 : 0;
  }
  CHECK(offered >= 8);
  CHECK(offered < 24);
}
