#pragma once
/// @file estimates.hpp
/// How likely a candidate is to be the next token, by class, learnt while decoding.

#include <cstdint>

#include "lookahead/detail/config.hpp"

namespace lookahead {

/// Where a pool entry comes from. The order breaks ties: a smaller source goes first.
enum class Source : std::uint8_t {
  text,       ///< the prompt, and texts that the caller adds
  generated,  ///< tokens that were selected, in a kept or shared pool by any request: what models wrote they repeat
              ///< more surely than what they were given
  window,     ///< n-grams of the Jacobi trajectory
  recycled,   ///< the best tokens of rows whose logits were read anyway
};

/// Whether it is a text, given or generated. Both are filed as one source that knows of each entry where it was last
/// seen.
LOOKAHEAD_HD constexpr bool is_text(Source source) { return source <= Source::generated; }

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

  /// Preconditions: 0 <= length_index < context_length_count; 0 <= rank < 8.
  [[nodiscard]] static LOOKAHEAD_HD constexpr CandidateClass of(int length_index, Source source, int rank) {
    return {static_cast<std::uint8_t>(length_index << 5 | static_cast<int>(source) << 3 | rank)};
  }
  [[nodiscard]] LOOKAHEAD_HD constexpr int length_index() const { return id >> 5; }
  [[nodiscard]] LOOKAHEAD_HD constexpr Source source() const { return static_cast<Source>(id >> 3 & 3); }
  [[nodiscard]] LOOKAHEAD_HD constexpr int rank() const { return id & 7; }
};

/// How far the sum of a tree's reaches is from the tokens that walks get: candidates of one place know nothing of each
/// other, so their estimates are together a little too low, or too high. Numbers are Q16.16. Trivial, as Estimates.
struct Calibration {
  /// Tokens to start with. Where many rows run deep, which is where a model repeats itself, the first steps expect too
  /// little (docs/decisions.md).
  static constexpr std::uint32_t start_expected = 8, start_accepted = 10;
  static constexpr int fading = 5;  ///< a step takes 1/2^fading of what was before

  std::uint32_t expected, accepted;

  LOOKAHEAD_HD constexpr void reset() {
    expected = start_expected << 16;
    accepted = start_accepted << 16;
  }

  /// Counts a step: the sum of its reaches, Q32.32, and how many of its rows the walk got to.
  LOOKAHEAD_HD constexpr void score(std::uint64_t reaches, int got) {
    expected += static_cast<std::uint32_t>(reaches >> 16) - (expected >> fading);
    accepted += (static_cast<std::uint32_t>(got) << 16) - (accepted >> fading);
  }

  /// What a reach is to be multiplied by: 1/4 to 4.
  [[nodiscard]] LOOKAHEAD_HD constexpr std::uint32_t factor() const {
    constexpr std::uint64_t one = 1U << 16;
    const std::uint64_t f = (std::uint64_t{accepted} << 16) / (expected > 0 ? expected : 1U);
    return static_cast<std::uint32_t>(f < one / 4 ? one / 4 : f > 4 * one ? 4 * one : f);
  }
};

/// The estimate of each class: the chance that a candidate is the next token, *given that no better candidate was*, at
/// the end of a run: so many tokens in a row were the best candidate of their place. Runs count because right guesses
/// come in longer ones than independent chances would give. An estimate is for an entry that was seen once, alone; how
/// often an entry was seen, of all that its source has seen behind its context, gives it more or less, the same for all
/// classes (docs/decisions.md has the figures of both). Probabilities are unsigned Q0.32. Trivial, so that it may lie
/// in shared memory; call `reset` first.
struct Estimates {
  /// Observations that a start value is worth, and the weight of those at which counts are halved, so that old ones
  /// fade.
  static constexpr std::uint32_t start_weight = 8, halve_at = 400;
  static constexpr std::uint32_t unit = 256;  ///< counts per observation: halving keeps fractions
  static constexpr std::uint32_t max_probability = 0xFFFF0000U;
  static constexpr int run_class_count = 4, longest_run = 6;
  static constexpr std::uint32_t run_weight = 3;  ///< observations that a class is worth to what it is in a run

  /// Hits, and what was tried, by its share, in 1/256 of an observation. Hits may exceed it.
  struct Count {
    std::uint32_t hits, trials;

    LOOKAHEAD_HD constexpr void add(bool hit, std::uint32_t weight) {
      trials += weight;
      if (hit) hits += unit;
      if (trials < halve_at * unit) return;
      trials /= 2;
      hits /= 2;
    }
  };

  std::uint32_t probability[run_class_count][CandidateClass::count];
  Count all[CandidateClass::count], in_run[run_class_count][CandidateClass::count];

  /// Runs of 0, 1, 2 to 5, and 6 or more tokens.
  [[nodiscard]] static LOOKAHEAD_HD constexpr int run_class(int run) {
    return run < 2 ? run : run < longest_run ? 2 : 3;
  }

  /// The run behind a token, which was the best candidate or was not, at the end of `run`. At most `longest_run`.
  [[nodiscard]] static LOOKAHEAD_HD constexpr int run_after(int run, bool best) {
    return !best ? 0 : run < longest_run ? run + 1 : longest_run;
  }

  /// Back to the start values.
  LOOKAHEAD_HD constexpr void reset() {
    for (int id = 0; id < CandidateClass::count; ++id) reset({static_cast<std::uint8_t>(id)});
  }
  /// One class back to its start value.
  LOOKAHEAD_HD constexpr void reset(CandidateClass c) {
    all[c.id] = {start_weight * start_value(c), start_weight * unit};
    for (auto& counts : in_run) counts[c.id] = {0, 0};
    update(c);
  }

  /// What an entry gets of its class's estimate, in 1/256, 1 to `max_share`: it was seen `seen` times, all entries of
  /// its context and source `of` times. By absolute discounting (Ney, Essen and Kneser, 1994) of half an observation,
  /// as a part of what one gets that was seen once, alone; of what goes beyond, 3/8, since a text repeats itself.
  /// Precondition: 1 <= seen <= of <= 256.
  [[nodiscard]] static LOOKAHEAD_HD constexpr std::uint32_t share(int seen, int of) {
    const std::uint32_t s = unit * static_cast<std::uint32_t>(2 * seen - 1) / static_cast<std::uint32_t>(of);
    return s <= unit ? s : unit + (s - unit) * 3 / 8;
  }
  static constexpr std::uint32_t max_share = 340;  ///< of an entry that was seen 8 times, alone

  /// The estimate of an entry with such a share.
  [[nodiscard]] static LOOKAHEAD_HD constexpr std::uint32_t with_share(std::uint32_t probability, std::uint32_t share) {
    const std::uint64_t p = std::uint64_t{probability} * share / unit;
    return p < max_probability ? static_cast<std::uint32_t>(p) : max_probability;
  }

  /// Counts one observation of class `c` at the end of `run`; it weighs as much as its share. `update` takes it into
  /// the estimates.
  LOOKAHEAD_HD constexpr void count(CandidateClass c, int run, std::uint32_t share, bool hit) {
    all[c.id].add(hit, share);
    in_run[run_class(run)][c.id].add(hit, share);
  }

  /// Sets the estimates of a class, by what was counted. A class in a run starts from what the class is in all of them.
  LOOKAHEAD_HD constexpr void update(CandidateClass c) {
    const std::uint64_t prior = (std::uint64_t{all[c.id].hits} << 32) / all[c.id].trials;
    constexpr std::uint64_t weight = std::uint64_t{run_weight} * unit;
    for (int run = 0; run < run_class_count; ++run) {
      const Count& n = in_run[run][c.id];
      const std::uint64_t p = ((std::uint64_t{n.hits} << 32) + weight * prior) / (n.trials + weight);
      probability[run][c.id] = p < max_probability ? static_cast<std::uint32_t>(p) : max_probability;
    }
  }

  /// The start value of a class in 1/256: how often it was right in the first two steps of a request that tried it, as
  /// measured by `bench/calibration --starts` with two models and four sets of prompts (docs/decisions.md).
  [[nodiscard]] static LOOKAHEAD_HD constexpr std::uint32_t start_value(CandidateClass c) {
    // Rank 0, by the length of the context. Window and recycled entries have contexts of up to three and two tokens.
    constexpr std::uint8_t best[4][context_length_count] = {
        // 1    2    3    4    6    9   13
        {59, 141, 169, 197, 210, 225, 230},   // text
        {102, 148, 169, 187, 210, 223, 223},  // generated
        {87, 136, 154, 154, 154, 154, 154},   // window
        {77, 141, 141, 141, 141, 141, 141},   // recycled
    };
    // What part of it a later rank has, in 1/255, for all lengths. Of recycled entries it is measured; others are too
    // seldom of a later rank: about 2 / (2 + 3 rank).
    constexpr std::uint8_t part[2][8] = {{255, 102, 64, 47, 37, 30, 26, 22}, {255, 136, 95, 67, 51, 38, 36, 33}};
    const auto source = static_cast<int>(c.source());
    return best[source][c.length_index()] * part[c.source() == Source::recycled][c.rank()] / 255U;
  }
};

}  // namespace lookahead
