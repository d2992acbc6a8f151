#pragma once
/// @file kv_plane.hpp
/// Where an engine's cached keys and values lie, and how accepted rows move forward in them.

#include <cstddef>
#include <cstdint>

#include "lookahead/detail/config.hpp"
#include "lookahead/packed_batch.hpp"

namespace lookahead {

/// One array of a cache: keys, values, or their scales, of one layer or of many. For each slot it has `outer_count`
/// pieces of `row_bytes` bytes: that of slot s of page p begins at
/// `base + outer * outer_stride + p * page_stride + s * slot_stride`, in bytes. Examples, for elements of `e` bytes:
///
/// | layout | outer_count, outer_stride | page_stride | slot_stride | row_bytes |
/// |---|---|---|---|---|
/// | [layer][slot][d] | layers, slots x d x e | any: one page | d x e | d x e |
/// | [layer][sequence][slot][d] | layers, sequences x slots x d x e | slots x d x e | d x e | d x e |
/// | [page][slot][head][d] | 1, 0 | slots x heads x d x e | heads x d x e | heads x d x e |
/// | [page][head][slot][d] | heads, slots x d x e | heads x slots x d x e | d x e | d x e |
struct KvPlane {
  void* base;
  std::int64_t outer_stride, page_stride, slot_stride;
  std::int32_t outer_count, row_bytes;
};

/// Which rows of which sequences move, and on which pages their slots lie. What it points to may lie in a device's
/// memory.
struct KvMoves {
  KeptRows rows;

  /// Slot s of sequence i is slot s % page_slots of page pages[i * pages_stride + s / page_slots]. Without a table,
  /// sequence i is page i.
  const std::int32_t* pages;  ///< [sequences, pages_stride], or null
  std::int32_t pages_stride, page_slots;

  /// Where a row of a sequence begins in a plane.
  [[nodiscard]] LOOKAHEAD_HD std::int64_t offset(const KvPlane& plane, int sequence, int row) const {
    const std::int64_t slot = std::int64_t{rows.context[sequence]} + row;
    std::int64_t page = sequence, within = slot;
    if (pages != nullptr) {
      page = pages[std::int64_t{sequence} * pages_stride + slot / page_slots];
      within = slot % page_slots;
    }
    return page * plane.page_stride + within * plane.slot_stride;
  }
};

namespace detail {

/// What is moved at once.
template <int Bytes>
struct alignas(Bytes) KvUnit {
  std::uint32_t word[Bytes / 4];
};
template <>
struct KvUnit<2> {
  std::uint16_t word;
};
template <>
struct KvUnit<1> {
  std::uint8_t word;
};

/// Moves the units number first, first + step, ... of all pieces of a plane, for one sequence. Units with different
/// numbers never meet, so that each may be moved by a thread of its own, without a sync. A row never goes where a later
/// row of the path still lies: its place in the path is at most its row, and later rows are higher. So the rows of a
/// path can be read several at a time before they are written.
template <class Unit>
LOOKAHEAD_HD void move_units(const KvPlane& plane, const KvMoves& moves, int sequence, std::int64_t first,
                             std::int64_t step) {
  constexpr int at_once = 8;
  const std::int32_t* const path = moves.rows.path + std::int64_t{sequence} * moves.rows.stride;
  const std::int32_t kept = moves.rows.kept[sequence];
  std::int32_t start = 0;
  while (start < kept && path[start] == start) ++start;  // pending rows stay where they are
  if (start == kept) return;
  const std::int64_t each = plane.row_bytes / static_cast<std::int32_t>(sizeof(Unit));
  for (std::int64_t u = first; u < each * plane.outer_count; u += step) {
    auto* const base = static_cast<char*>(plane.base) + u / each * plane.outer_stride +
                       u % each * static_cast<std::int64_t>(sizeof(Unit));
    for (std::int32_t k = start; k < kept; k += at_once) {
      Unit unit[at_once];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
      for (int i = 0; i < at_once; ++i)
        if (k + i < kept) unit[i] = *reinterpret_cast<const Unit*>(base + moves.offset(plane, sequence, path[k + i]));
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
      for (int i = 0; i < at_once; ++i)
        if (k + i < kept) *reinterpret_cast<Unit*>(base + moves.offset(plane, sequence, k + i)) = unit[i];
    }
  }
}

/// The same in the largest units that the plane's addresses and strides allow.
LOOKAHEAD_HD inline void move_rows(const KvPlane& plane, const KvMoves& moves, int sequence, std::int64_t first,
                                   std::int64_t step) {
  const std::uint64_t all = reinterpret_cast<std::uintptr_t>(plane.base) |
                            static_cast<std::uint64_t>(plane.outer_stride | plane.page_stride | plane.slot_stride) |
                            static_cast<std::uint64_t>(plane.row_bytes);
  if (all % 16 == 0)
    move_units<KvUnit<16>>(plane, moves, sequence, first, step);
  else if (all % 4 == 0)
    move_units<KvUnit<4>>(plane, moves, sequence, first, step);
  else if (all % 2 == 0)
    move_units<KvUnit<2>>(plane, moves, sequence, first, step);
  else
    move_units<KvUnit<1>>(plane, moves, sequence, first, step);
}

}  // namespace detail

}  // namespace lookahead
