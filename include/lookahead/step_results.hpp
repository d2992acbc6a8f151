#pragma once
/// @file step_results.hpp
/// What the steps of a batch have yielded, for a reader that never makes them wait.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "lookahead/detail/config.hpp"
#include "lookahead/errors.hpp"

namespace lookahead {

/// Why a sequence takes no further step.
enum class EndReason : std::int32_t { none, end_token, token_limit, out_of_room };

/// What one step of a sequence yielded. Trivial; `stamp` is written last, and 0 while the rest is being written.
template <class Token, int MaxBlock>
struct StepResult {
  std::uint64_t stamp;  ///< the generation of the sequence and the number of the step, see `stamp_of`
  std::int32_t count;   ///< of tokens
  EndReason end;
  std::int32_t context_size;  ///< tokens in the context behind the step
  std::int32_t rows;          ///< rows of the tree
  std::int32_t logit_rows;    ///< those of them whose logits were read
  std::int32_t next_rows;     ///< what the next tree may well take: as many, or more where the bucket kept it small
  Token tokens[MaxBlock];

  [[nodiscard]] static LOOKAHEAD_HD constexpr std::uint64_t stamp_of(std::uint32_t generation, std::uint32_t step) {
    return std::uint64_t{generation} << 32 | (step + 1);
  }
};

/// Where a reader is: the next step of one sequence that it has not seen. Whoever attaches a sequence gets the first.
struct ResultCursor {
  std::int32_t sequence;
  std::uint32_t generation;  ///< from 1 on, each attached sequence has its own
  std::uint32_t step;        ///< from 0 on
};

/// A reader was too slow: results were overwritten before it saw them.
struct ResultsOverrun : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The newest results of each sequence: [sequences][steps] results, step s of a sequence being entry s % steps. One
/// writer a sequence, any number of readers, on either side of a bus: nobody waits. A view; it owns nothing.
template <class Token, int MaxBlock>
struct ResultRing {
  using Result = StepResult<Token, MaxBlock>;
  Result* results;
  std::int32_t sequences, steps;

  /// Writes a result, by one thread. The reader sees all of it or nothing.
  LOOKAHEAD_HD void write(int sequence, std::uint32_t step, const Result& from, const Token* tokens) const {
    Result& to = entry(sequence, step);
#if defined(__CUDA_ARCH__)
    store(to.stamp, std::uint64_t{0});
    __threadfence_system();
#else
    std::atomic_ref(to.stamp).exchange(0, std::memory_order_acquire);
#endif
    store(to.count, from.count);
    store(to.end, from.end);
    store(to.context_size, from.context_size);
    store(to.rows, from.rows);
    store(to.logit_rows, from.logit_rows);
    store(to.next_rows, from.next_rows);
    for (int i = 0; i < from.count; ++i) store(to.tokens[i], tokens[i]);
#if defined(__CUDA_ARCH__)
    __threadfence_system();
    store(to.stamp, from.stamp);
#else
    std::atomic_ref(to.stamp).store(from.stamp, std::memory_order_release);
#endif
  }

  /// Calls `f(result)` for each step from the cursor on that is complete by now, and moves the cursor behind it.
  /// Returns how many there were. Throws InvalidArgument for a cursor of no sequence, or of one that was attached anew
  /// since, and ResultsOverrun where a result is lost; the cursor then stands where it was, or behind what `f` has
  /// seen.
  template <class F>
  int read(ResultCursor& cursor, F&& f) const {
    if (cursor.sequence < 0 || cursor.sequence >= sequences)
      throw InvalidArgument("results of sequence " + std::to_string(cursor.sequence) + " of a batch of " +
                            std::to_string(sequences) + ": pass the cursor that attaching the sequence returned");
    for (int count = 0;; ++count) {
      Result& at = entry(cursor.sequence, cursor.step);
      const std::uint64_t wanted = Result::stamp_of(cursor.generation, cursor.step);
      const std::uint64_t found = std::atomic_ref(at.stamp).load(std::memory_order_acquire);
      if (found < wanted) return count;
      Result copy;
      copy.stamp = wanted;
      copy.count = load(at.count);
      copy.end = load(at.end);
      copy.context_size = load(at.context_size);
      copy.rows = load(at.rows);
      copy.logit_rows = load(at.logit_rows);
      copy.next_rows = load(at.next_rows);
      for (int i = 0; i < copy.count && i < MaxBlock; ++i) copy.tokens[i] = load(at.tokens[i]);
      if (found != wanted || std::atomic_ref(at.stamp).load(std::memory_order_relaxed) != wanted) {
        if (found >> 32 > cursor.generation)
          throw InvalidArgument("sequence " + std::to_string(cursor.sequence) +
                                " was attached anew since this cursor was made: read it with the new cursor");
        throw ResultsOverrun("the result of step " + std::to_string(cursor.step) + " of sequence " +
                             std::to_string(cursor.sequence) + " was overwritten: the ring holds " +
                             std::to_string(steps) + " steps; read more often or raise result_steps");
      }
      ++cursor.step;
      f(static_cast<const Result&>(copy));
    }
  }

 private:
  [[nodiscard]] LOOKAHEAD_HD Result& entry(int sequence, std::uint32_t step) const {
    return results[static_cast<std::size_t>(sequence) * static_cast<std::size_t>(steps) +
                   step % static_cast<std::uint32_t>(steps)];
  }

  template <class T>
  static LOOKAHEAD_HD void store(T& to, T value) {
#if defined(__CUDA_ARCH__)
    *const_cast<volatile T*>(&to) = value;
#else
    std::atomic_ref(to).store(value, std::memory_order_relaxed);
#endif
  }

  // Nothing that is loaded later comes before it: the stamp is looked at again last.
  template <class T>
  static T load(T& from) {
    return std::atomic_ref(from).load(std::memory_order_acquire);
  }
};

}  // namespace lookahead
