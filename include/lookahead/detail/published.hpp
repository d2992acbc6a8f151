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
  int first[G];  ///< where the keys of each guess begin
};

/// Rates by age what stands under the longest context of its source, where there are contexts of `count` lengths.
struct RateNewest {
  int count;
  [[nodiscard]] LOOKAHEAD_HD int longest(Source source) const {
    return (source == Source::window && count > 3 ? 3 : count) - 1;
  }
  [[nodiscard]] LOOKAHEAD_HD bool wants(int i, std::uint32_t = 0) const {
    return i == longest(Source::text) || i == longest(Source::window);
  }
  [[nodiscard]] LOOKAHEAD_HD std::uint32_t operator()(CandidateClass c, std::uint32_t, std::uint32_t stamp) const {
    return c.source() == Source::recycled || c.length_index() != longest(c.source()) ? 0U : stamp;
  }
};

/// Enumerates the leaf chains under the root's token to depth `length`, level by level, and keeps the `limit` chains
/// with the newest last stamps. Every token is looked up by the tokens between the root and itself, as far back as
/// n-grams are filed. Text and window entries only. Returns how many there are, in s.guess, newest first.
LOOKAHEAD_GROUP_FN template <Group Gr, class Pool, class Token, int G, int D>
LOOKAHEAD_HD int enumerate(const Gr& g, const Pool& pool, Token root, int limit, int length, GuessScratch<G, D>& s) {
  constexpr int width = GuessScratch<G, D>::width;
  if (g.rank() == 0) {
    s.guess[0].length = 0;
    s.guess[0].stamp = 0;
  }
  // A chain that is a leaf stays as it is.
  const auto leaf = [&](int i) { return s.list[i].count == 0 && s.guess[i].length > 0; };
  const auto keys_of = [&](int i) { return leaf(i) ? 1 : s.list[i].count; };
  int guesses = limit > 0 ? 1 : 0;  // all threads count alike
  g.sync();
  for (int depth = 0; depth < length && guesses > 0; ++depth) {
    const auto tile = g.tile();
    for (int i = tile.rank(); i < guesses; i += tile.count()) {
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
    for (int i = g.rank(); i < guesses; i += g.size()) s.first[i] = keys_of(i);
    const int keys = g.exclusive_sum(s.first, guesses);
    for (int k = g.rank(); k < guesses * width; k += g.size()) {
      const int i = k / width, n = k % width;
      if (n >= keys_of(i)) continue;
      const std::uint32_t stamp = leaf(i) ? s.guess[i].stamp : s.list[i].estimate(n);
      s.key[s.first[i] + n] = std::uint64_t{~stamp} << 32 | static_cast<std::uint64_t>(k);
    }
    g.sort(s.key, keys);
    const int kept = keys < limit ? keys : limit;
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
    guesses = kept;
    g.sync();
  }
  return guesses;
}

}  // namespace lookahead::detail
