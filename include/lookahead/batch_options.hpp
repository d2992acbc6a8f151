#pragma once
/// @file batch_options.hpp
/// What a batch of sequences has room for, and what a sequence asks for.

#include <cstddef>
#include <cstdint>

#include "lookahead/packed_batch.hpp"
#include "lookahead/shape.hpp"

namespace lookahead {

/// Capacities of a batch; memory is taken once for all of them.
struct BatchOptions {
  int sequences = 1;                              ///< that are decoded at once
  int rows = 1 << 30;                             ///< of a sequence in a step, at most; cut to the tree's capacity
  std::size_t pool_slots = std::size_t{1} << 15;  ///< of the private pool of each sequence, 12 bytes each
  int result_steps = 64;                          ///< that a reader of results may lag behind
  MaskLayout mask_layout = MaskLayout::words;
  bool moves_rows = true;  ///< the engine moves accepted rows; else it keeps those that lie in place, and is fed the
                           ///< others again
};

/// What a sequence may spend, and how its tokens are chosen. Trivially copyable.
template <class Token = std::int32_t>
struct SequenceOptions {
  static constexpr int max_end_tokens = 8;

  Shape shape{};
  Limits limits{};                        ///< of each step; `tokens_left` counts down, and ends the sequence
  std::int32_t context_limit = 1 << 30;   ///< tokens that the engine's cache holds for it, the rows of a step included
  Token end_tokens[max_end_tokens] = {};  ///< the first `end_token_count` of them end the text
  std::int32_t end_token_count = 0;
  std::uint64_t window_seed = 0;  ///< picks the window's first guesses

  // How the batch draws tokens, where it is asked to; see SampleOptions.
  float temperature = 0;  ///< 0 is greedy
  std::uint64_t seed = 0, stream = 0;
};

}  // namespace lookahead
