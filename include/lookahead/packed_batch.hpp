#pragma once
/// @file packed_batch.hpp
/// The trees of many sequences in the arrays that an engine takes.

#include <cstdint>

namespace lookahead {

/// How the masks of a packed batch lie in memory. Bits are counted from the lowest; a set bit lets a row see a row.
enum class MaskLayout : std::uint8_t {
  words,  ///< 32-bit words [packed row][ceil(bucket / 32)]: bit c of a row is row c of its own tree
  bits    ///< for each sequence rows x rows bits without a gap, row by row; a sequence begins at a new byte
};

/// The trees of one step, one behind the other: sequence i has the packed rows [row_offsets[i], row_offsets[i + 1]), in
/// the order of its tree. Up to `capacity` = sequences x bucket rows; those behind the last tree are padding, so that a
/// captured graph may evaluate a fixed number: token 0 at position 0, of no sequence.
///
/// The arrays lie where the batch lies, in device memory for example, and are overwritten by the next `pack`.
template <class Token = std::int32_t>
struct PackedBatch {
  Token* tokens;            ///< [capacity]
  std::int32_t* positions;  ///< [capacity], absolute, counted from 0
  std::int32_t* parents;    ///< [capacity], a row of the same tree counted from its row 0; -1 for row 0
  std::int32_t* sequences;  ///< [capacity], the sequence that a row belongs to; -1 for padding

  std::int32_t* row_offsets;    ///< [sequences + 1]
  std::int32_t* context_sizes;  ///< [sequences], tokens in the committed context: the position of row 0

  std::int32_t* wanted;          ///< [capacity], the packed rows whose logits are read, increasing; padded with 0
  std::int32_t* wanted_offsets;  ///< [sequences + 1]: sequence i has the wanted rows [wanted_offsets[i], ...[i + 1])

  std::uint8_t* masks;         ///< see MaskLayout; rows see rows of their own tree alone, the context is not in it
  std::int32_t* mask_offsets;  ///< [sequences + 1], in bytes: where the mask of each sequence begins
};

/// Which rows of a step stay in the cache: for sequence i the rows path[i][0 .. kept[i]) of its tree, in increasing
/// order, go to the places behind context[i] tokens. Row r was written behind context[i] + r tokens, so rows move
/// forward only.
struct KeptRows {
  std::int32_t* path;     ///< [sequences][stride]
  std::int32_t* kept;     ///< [sequences], 0 where a sequence took no part
  std::int32_t* context;  ///< [sequences], the context's size before these rows
  std::int32_t stride;
};

}  // namespace lookahead
