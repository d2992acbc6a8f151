#pragma once
/// @file estimates.hpp
/// How likely a candidate is to be the next token, by class, learnt while decoding.

#include <cstdint>

#include "lookahead/detail/config.hpp"

namespace lookahead {

/// Where a pool entry comes from. The order breaks ties: a smaller source goes first.
enum class Source : std::uint8_t {
  text,      ///< the prompt, accepted tokens, and texts that the caller adds
  window,    ///< n-grams of the Jacobi trajectory
  recycled,  ///< the best tokens of rows whose logits were read anyway
};

inline constexpr int source_count = 3;

/// Number of context lengths under which n-grams are filed.
inline constexpr int context_length_count = 7;
/// The longest of them, in tokens.
inline constexpr int max_context_length = 13;

/// The context lengths: 1, 2, 3, 4, 6, 9, 13. Precondition: 0 <= index < context_length_count.
LOOKAHEAD_HD constexpr int context_length(int index) { return 0xD964321 >> (4 * index) & 15; }

/// The class of a candidate: (index of the context length, source, rank), rank 0 being the best of 8.
struct CandidateClass {
  static constexpr int count = context_length_count * 32;
  std::uint8_t id;

  [[nodiscard]] static LOOKAHEAD_HD constexpr CandidateClass of(int length_index, Source source, int rank) {
    return {static_cast<std::uint8_t>(length_index << 5 | static_cast<int>(source) << 3 | rank)};
  }
  [[nodiscard]] LOOKAHEAD_HD constexpr int length_index() const { return id >> 5; }
  [[nodiscard]] LOOKAHEAD_HD constexpr Source source() const { return static_cast<Source>(id >> 3 & 3); }
  [[nodiscard]] LOOKAHEAD_HD constexpr int rank() const { return id & 7; }
};

/// The estimate of each class: the chance that a candidate is the next token, *given that no better candidate was*.
/// Probabilities are unsigned Q0.32. Trivial, so that it may lie in shared memory; call `reset` first.
struct Estimates {
  /// Observations that a start value is worth, and the number at which counts are halved, so that old ones fade.
  static constexpr std::uint32_t start_weight = 8, halve_at = 400;
  static constexpr std::uint32_t unit = 256;  ///< counts per observation: halving keeps fractions
  static constexpr std::uint32_t max_probability = 0xFFFF0000U;

  std::uint32_t probability[CandidateClass::count];
  std::uint32_t hits[CandidateClass::count], trials[CandidateClass::count];

  /// Back to the start values.
  LOOKAHEAD_HD constexpr void reset() {
    for (int id = 0; id < CandidateClass::count; ++id) {
      trials[id] = start_weight * unit;
      hits[id] = start_weight * start_value({static_cast<std::uint8_t>(id)});
      update(id);
    }
  }

  /// Counts one observation of class `c`.
  LOOKAHEAD_HD constexpr void score(CandidateClass c, bool hit) {
    trials[c.id] += unit;
    if (hit) hits[c.id] += unit;
    if (trials[c.id] >= halve_at * unit) {
      trials[c.id] /= 2;
      hits[c.id] /= 2;
    }
    update(c.id);
  }

  /// Start value in 1/256: rises with the length of the context, falls with the rank. By formula, because it serves
  /// unlike models better than hit rates that were measured on one of them (docs/decisions.md has the figures).
  [[nodiscard]] static LOOKAHEAD_HD constexpr std::uint32_t start_value(CandidateClass c) {
    const int length = context_length(c.length_index());
    const int first = c.source() == Source::text     ? 218 - 154 / length
                      : c.source() == Source::window ? 51 + 26 * (length < 3 ? length : 3)
                                                     : 64 + 13 * (length < 2 ? length : 2);
    return static_cast<std::uint32_t>(first * 2 / (2 + 3 * c.rank()));
  }

 private:
  LOOKAHEAD_HD constexpr void update(int id) {
    const std::uint64_t p = (static_cast<std::uint64_t>(hits[id]) << 32) / trials[id];
    probability[id] = p < max_probability ? static_cast<std::uint32_t>(p) : max_probability;
  }
};

}  // namespace lookahead
