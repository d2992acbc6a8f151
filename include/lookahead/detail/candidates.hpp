#pragma once
/// @file candidates.hpp
/// What the pool knows about the next token of a path.

#include <cstdint>

#include "lookahead/detail/config.hpp"
#include "lookahead/ngram_pool.hpp"

namespace lookahead::detail {

/// The best 16 candidates of a row, best first, each token once. The order: estimate descending, context length
/// descending, source, rank, share, token.
struct CandidateList {
  static constexpr int capacity = 16, share_bits = 9;
  static_assert(Estimates::max_share < 1U << share_bits);
  std::uint64_t order[capacity];  ///< estimate, a class whose last five bits are inverted, share
  std::uint32_t token[capacity];
  std::int32_t count;

  [[nodiscard]] LOOKAHEAD_HD std::uint32_t estimate(int i) const { return static_cast<std::uint32_t>(order[i] >> 32); }
  [[nodiscard]] LOOKAHEAD_HD CandidateClass candidate_class(int i) const {
    return {static_cast<std::uint8_t>((order[i] >> share_bits & 0xFFU) ^ 31U)};
  }
  /// See `Estimates::share`.
  [[nodiscard]] LOOKAHEAD_HD std::uint32_t share(int i) const {
    return static_cast<std::uint32_t>(order[i]) & ((1U << share_bits) - 1);
  }

  /// Adds a candidate. A token that is known already keeps its better place.
  LOOKAHEAD_HD void add(std::uint32_t estimate, CandidateClass c, std::uint32_t share, std::uint32_t t) {
    const std::uint64_t o = std::uint64_t{estimate} << 32 | (c.id ^ 31U) << share_bits | share;
    int i = 0;
    while (i < count && token[i] != t) ++i;
    if (i < count) {
      if (o <= order[i]) return;
    } else if (count < capacity) {
      i = count++;
    } else if (i = capacity - 1; !before(o, t, order[i], token[i])) {
      return;
    }
    for (; i > 0 && before(o, t, order[i - 1], token[i - 1]); --i) {
      order[i] = order[i - 1];
      token[i] = token[i - 1];
    }
    order[i] = o;
    token[i] = t;
  }

 private:
  static LOOKAHEAD_HD bool before(std::uint64_t o, std::uint32_t t, std::uint64_t p, std::uint32_t u) {
    return o > p || (o == p && t < u);
  }
};

/// The hashes of the contexts that end at `row`, shortest first; returns how many there are. Behind the root a context
/// follows the parents, from the root on it follows the text.
template <class RowToken, class Token>
LOOKAHEAD_HD int context_hashes(const RowToken* tokens, const std::int32_t* parents, int root, int row,
                                const TextTail<Token>& tail, std::uint64_t* out) {
  int text = tail.count;
  return hash_contexts(
      [&](std::uint32_t& t) {
        if (row > root) {
          t = static_cast<std::uint32_t>(tokens[row]);
          row = parents[row];
        } else if (text > 0) {
          t = static_cast<std::uint32_t>(tail.token[--text]);
        } else {
          return false;
        }
        return true;
      },
      out);
}

/// The candidates that the given contexts offer. `rate(class, share, stamp)` is the estimate of one, 0 leaves it
/// out; `rate.wants(i)` may be false where it would leave out all that contexts[i] offers, `rate.wants(i, share)` where
/// it would leave out those with such a share. The list is written, and may be read, by the lane that leads.
LOOKAHEAD_GROUP_FN template <class Tile, class Pool, class Rate>
LOOKAHEAD_HD void collect(const Tile& tile, const Pool& pool, const std::uint64_t* contexts, int count,
                          const Rate& rate, CandidateList& list) {
  if (tile.leads()) list.count = 0;
  for (int i = 0; i < count; ++i)
    if (rate.wants(i)) pool.prefetch(tile, contexts[i]);
  for (int i = 0; i < count; ++i) {
    if (!rate.wants(i)) continue;
    const auto wants = [&](int seen, int of) { return rate.wants(i, Estimates::share(seen, of)); };
    pool.for_each(tile, contexts[i], wants, [&](const PoolFind& find) {
      const CandidateClass c = CandidateClass::of(i, find.source, find.rank);
      const std::uint32_t share = Estimates::share(find.seen, find.of), rated = rate(c, share, find.stamp);
      if (rated != 0 && tile.leads()) list.add(rated, c, share, find.token);
    });
  }
}

}  // namespace lookahead::detail
