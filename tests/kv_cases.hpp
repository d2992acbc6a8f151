#pragma once
/// @file kv_cases.hpp
/// Random caches of keys and values in all layouts, rows to move in them, and the same by a copy that is made first.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "random.hpp"

#include "lookahead/kv_plane.hpp"

namespace kv_cases {

/// One plane of a cache, and the moves of three sequences in it. Rows lie in the slots 0 to 63.
struct Cache {
  static constexpr int sequences = 3, path_stride = 12, slots = 64;
  struct alignas(16) Block {
    unsigned char bytes[16];
    bool operator==(const Block&) const = default;
  };

  explicit Cache(Random& random)
      : paged(random.one_in(2)),
        page_slots(paged ? 1 + random.below(5) : slots),
        pages_each(paged ? slots / page_slots + 1 : 1) {
    constexpr int sizes[] = {1, 2, 3, 4, 6, 8, 12, 16, 32, 48};
    const int row_bytes = sizes[random.below(10)], outer = 1 + random.below(3), page_count = sequences * pages_each;
    const bool inside = random.one_in(2);  // [page][head][slot], or [layer][page][slot]
    const std::int64_t rows = std::int64_t{page_slots} * row_bytes;
    const std::int64_t page = (inside ? outer * rows : rows) + (random.one_in(3) ? row_bytes : 0);
    memory.resize(static_cast<std::size_t>(page * page_count * (inside ? 1 : outer)) / 16 + 2);
    for (Block& block : memory)
      for (unsigned char& byte : block.bytes) byte = static_cast<unsigned char>(random.below(256));
    shift = random.one_in(2) ? 0 : row_bytes % 16;
    plane = {nullptr, inside ? rows : page * page_count, page, row_bytes, outer, row_bytes};

    pages.resize(static_cast<std::size_t>(page_count));
    std::iota(pages.begin(), pages.end(), 0);
    for (std::size_t i = pages.size() - 1; i > 0; --i)
      std::swap(pages[i], pages[static_cast<std::size_t>(random.below(static_cast<int>(i) + 1))]);
    for (int s = 0; s < sequences; ++s) {
      context.push_back(random.below(slots - 3 * path_stride));
      kept.push_back(random.below(path_stride + 1));
      const int most = 1 + random.below(3);
      for (int k = 0, row = -1; k < path_stride; ++k) path.push_back(row += 1 + random.below(most));
    }
  }

  /// What each row of a sequence becomes, found in another way than the library's.
  [[nodiscard]] std::vector<Block> moved() const {
    std::vector<Block> result = memory;
    const auto row = [&](std::vector<Block>& in, int sequence, int outer, int slot) {
      const int page = paged ? pages[static_cast<std::size_t>(sequence * pages_each + slot / page_slots)] : sequence;
      return in.data()->bytes + shift + outer * plane.outer_stride + page * plane.page_stride +
             slot % page_slots * plane.slot_stride;
    };
    std::vector<Block> before = memory;
    for (int s = 0; s < sequences; ++s)
      for (int outer = 0; outer < plane.outer_count; ++outer)
        for (int k = 0; k < kept[static_cast<std::size_t>(s)]; ++k) {
          const int first = context[static_cast<std::size_t>(s)];
          const int from = path[static_cast<std::size_t>(s * path_stride + k)];
          std::copy_n(row(before, s, outer, first + from), plane.row_bytes, row(result, s, outer, first + k));
        }
    return result;
  }

  bool paged;
  int page_slots, pages_each;
  std::vector<Block> memory;
  std::ptrdiff_t shift;      ///< where the plane begins in the memory
  lookahead::KvPlane plane;  ///< without its base
  std::vector<std::int32_t> pages, context, kept, path;
};

}  // namespace kv_cases
