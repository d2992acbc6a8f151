#pragma once
/// @file published.hpp
/// The published shape of guesses: n-grams whose key is the root's token.

#include <cstdint>

#include "lookahead/detail/candidates.hpp"
#include "lookahead/detail/config.hpp"
#include "lookahead/group.hpp"

namespace lookahead::detail {

/// A guess: up to D tokens behind the root.
template <int D>
struct Guess {
  std::uint32_t token[D];
  std::uint8_t candidate[D];  ///< class of each token
  std::int32_t length;
  std::uint32_t stamp;  ///< of its last entry
};

/// Working memory for up to G guesses of up to D tokens.
template <int G, int D>
struct GuessScratch {
  static constexpr int width = CandidateList::capacity;
  Guess<D> guess[G], next[G];
  CandidateList list[G];
  std::uint64_t key[G * width];
  std::int32_t count, keys;
};

/// Rates by age what stands under the longest context of its source, where there are contexts of `count` lengths.
struct RateNewest {
  int count;
  [[nodiscard]] LOOKAHEAD_HD int longest(Source source) const {
    return (source == Source::window && count > 3 ? 3 : count) - 1;
  }
  [[nodiscard]] LOOKAHEAD_HD bool wants(int i) const {
    return i == longest(Source::text) || i == longest(Source::window);
  }
  [[nodiscard]] LOOKAHEAD_HD std::uint32_t operator()(CandidateClass c, int, std::uint32_t stamp) const {
    return c.source() == Source::recycled || c.length_index() != longest(c.source()) ? 0U : stamp;
  }
};

/// Enumerates the leaf chains under the root's token to depth `length`, level by level, and keeps the `limit` chains
/// with the newest last stamps. Every token is looked up by the tokens between the root and itself, as far back as
/// n-grams are filed. Text and window entries only. The result is in s.guess[0..s.count), newest first.
LOOKAHEAD_GROUP_FN template <Group Gr, class Pool, class Token, int G, int D>
LOOKAHEAD_HD void enumerate(const Gr& g, const Pool& pool, Token root, int limit, int length, GuessScratch<G, D>& s) {
  constexpr int width = GuessScratch<G, D>::width;
  if (g.rank() == 0) {
    s.count = limit > 0 ? 1 : 0;
    s.guess[0].length = 0;
    s.guess[0].stamp = 0;
  }
  g.sync();
  for (int depth = 0; depth < length && s.count > 0; ++depth) {
    const auto tile = g.tile();
    for (int i = tile.rank(); i < s.count; i += tile.count()) {
      const Guess<D>& guess = s.guess[i];
      // The longest context of each source that begins at the root or behind it; none for a chain that is a leaf
      // already.
      std::uint64_t contexts[context_length_count];
      int k = guess.length < depth ? -1 : depth;
      const int count = hash_contexts(
          [&](std::uint32_t& t) {
            if (k < 0) return false;
            t = k > 0 ? guess.token[k - 1] : static_cast<std::uint32_t>(root);
            --k;
            return true;
          },
          contexts);
      collect(tile, pool, contexts, count, RateNewest{count}, s.list[i]);
    }
    g.sync();
    if (g.rank() == 0) {
      s.keys = 0;
      for (int i = 0; i < s.count; ++i) {
        if (s.list[i].count == 0 && s.guess[i].length > 0)
          s.key[s.keys++] = std::uint64_t{~s.guess[i].stamp} << 32 | static_cast<std::uint64_t>(i * width);
        for (int k = 0; k < s.list[i].count; ++k)
          s.key[s.keys++] = std::uint64_t{~s.list[i].estimate(k)} << 32 | static_cast<std::uint64_t>(i * width + k);
      }
    }
    g.sync();
    g.sort(s.key, s.keys);
    const int kept = s.keys < limit ? s.keys : limit;
    for (int k = g.rank(); k < kept; k += g.size()) {
      const auto from = static_cast<int>(s.key[k] & 0xFFFFFFFFU), parent = from / width;
      Guess<D>& to = s.next[k];
      to = s.guess[parent];
      const CandidateList& list = s.list[parent];
      if (list.count == 0) continue;
      to.token[to.length] = list.token[from % width];
      to.candidate[to.length] = list.candidate_class(from % width).id;
      to.stamp = list.estimate(from % width);
      ++to.length;
    }
    g.sync();
    for (int k = g.rank(); k < kept; k += g.size()) s.guess[k] = s.next[k];
    if (g.rank() == 0) s.count = kept;
    g.sync();
  }
}

}  // namespace lookahead::detail
