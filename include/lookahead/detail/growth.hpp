#pragma once
/// @file growth.hpp
/// Growth by reach: the rows that the walk will most probably get to.

#include <cstdint>

#include "lookahead/detail/candidates.hpp"
#include "lookahead/detail/config.hpp"
#include "lookahead/detail/plant.hpp"
#include "lookahead/group.hpp"
#include "lookahead/token_tree.hpp"

namespace lookahead::detail {

/// What a plan knows of each row of its tree.
template <int R>
struct RowNotes {
  /// Rows that no candidate backs.
  static constexpr std::uint8_t no_class = 255;
  std::uint32_t reach[R];     ///< probability that the walk gets to the row, Q0.32; 0 where no candidate backs it
  std::uint8_t candidate[R];  ///< id of the class of that candidate, or no_class
  std::uint8_t run[R];        ///< tokens up to the row that were the best candidates of their places, see Estimates
};

/// Working memory of growth in a tree of up to R rows.
template <int R>
struct GrowthScratch {
  static constexpr int width = CandidateList::capacity;
  static_assert(R < 2048, "Too many rows for the keys of growth: lower (W + G) * (N - 1).");

  // Nodes: first the rows that stand in the tree already, then slots for the rows that growth may add.
  std::int32_t parent[R];
  std::uint32_t token[R], reach[R];
  std::uint8_t candidate[R], run[R], depth[R];

  // The candidates of one level that are in the running, `width` for each node of the frontier.
  CandidateList list[R];
  std::uint32_t candidate_reach[R * width];
  std::int16_t shared[R * width];  ///< the row of the tree that a candidate shares, or -1
  std::uint16_t item[R * width];   ///< the candidates, in order
  int flag[R * width];

  // Keys are (reach inverted, number, slot), so that the best come first.
  std::uint64_t key[2][R];         ///< of the kept nodes, in order: of the levels so far, and with the next one
  std::uint64_t fresh[R * width];  ///< of the candidates
  std::uint32_t best[Estimates::run_class_count][context_length_count];  ///< the largest estimate of each length
  std::int32_t frontier[2][R];  ///< the nodes whose children are looked for, and the next ones
  std::int32_t place[R];        ///< of each node in the frontier, if it is there; in the end its row
  std::int32_t freed[R];        ///< slots of nodes that were kept and are not any more
  int want[R];                  ///< not 0 for the rows whose logits will be read
};

/// Rates by estimate; leaves out what cannot give a child of a row with `reach` more than `least`.
struct RateReach {
  const std::uint32_t* probability;
  const std::uint32_t* best;
  std::uint32_t reach, least;
  [[nodiscard]] LOOKAHEAD_HD bool enough(std::uint32_t estimate) const {
    return std::uint64_t{reach} * estimate >> 32 > least;
  }
  [[nodiscard]] LOOKAHEAD_HD bool wants(int i, std::uint32_t share = Estimates::max_share) const {
    return enough(Estimates::with_share(best[i], share));
  }
  [[nodiscard]] LOOKAHEAD_HD std::uint32_t operator()(CandidateClass c, std::uint32_t share, std::uint32_t) const {
    const std::uint32_t estimate = Estimates::with_share(probability[c.id], share);
    return enough(estimate) ? estimate : 0U;
  }
};

/// How many of n ascending keys are smaller than `key`.
template <class Key>
LOOKAHEAD_HD int count_below(const Key* keys, int n, Key key) {
  int below = 0;
  while (n > 0) {
    const int half = n / 2;
    const bool right = keys[below + half] < key;
    below = right ? below + half + 1 : below;
    n = right ? n - half - 1 : half;
  }
  return below;
}

/// Grows `tree` by the rows of largest reach, level by level; rows compare by reach (descending), depth, order of the
/// parents, order of the candidates, and stand in this order: parents come before children, and the first k rows are
/// what growth would add if it might add k. Rows that stand in the tree below the root (the window's) cost no row where
/// a candidate shares them. At most `rows_left` rows are added and at most `logits_left` become wanted; nothing lies
/// deeper than `max_depth`. Since reach never rises along a path, keeping the best of every level gives the same set as
/// growing best-first.
LOOKAHEAD_GROUP_FN template <Group Gr, class Pool, class Token, int R>
LOOKAHEAD_HD void grow(const Gr& g, const Pool& pool, const Estimates& estimates, const TextTail<Token>& tail,
                       TokenTreeStorage<Token, R>& tree, RowNotes<R>& notes, int rows_left, int logits_left,
                       int max_depth, GrowthScratch<R>& s) {
  constexpr int width = GrowthScratch<R>::width;
  const int planted = tree.rows, root = tree.root;
  const bool shares = planted > root + 1;  // there are rows that a candidate may share
  for (int r = g.rank(); r < R; r += g.size()) {
    s.want[r] = 0;
    if (r >= planted) continue;
    s.want[r] = tree.is_wanted(r) ? 1 : 0;
    s.parent[r] = tree.parent[r];
    s.token[r] = static_cast<std::uint32_t>(tree.token[r]);
    s.reach[r] = r == root ? ~0U : 0U;
    s.run[r] = notes.run[r];
    s.place[r] = 0;
  }
  for (int i = g.rank(); i < context_length_count * Estimates::run_class_count; i += g.size()) {
    constexpr int classes = CandidateClass::count / context_length_count;
    const int run = i / context_length_count, length = i % context_length_count;
    std::uint32_t best = 0;
    for (int c = length * classes; c < (length + 1) * classes; ++c)
      if (estimates.probability[run][c] > best) best = estimates.probability[run][c];
    s.best[run][length] = best;
  }
  // All threads count alike.
  int frontier_count = 1, kept = 0, numbered = 0, budget = rows_left < logits_left ? rows_left : logits_left;
  if (g.rank() == 0) s.frontier[1][0] = root;
  g.sync();

  int depth = 1;
  for (; depth <= max_depth && frontier_count > 0; ++depth) {
    const std::int32_t* const frontier = s.frontier[depth % 2];
    std::int32_t* const next_frontier = s.frontier[1 - depth % 2];
    const std::uint64_t* const key = s.key[depth % 2];
    std::uint64_t* const next_key = s.key[1 - depth % 2];
    // What the reach of one more row must exceed.
    const std::uint32_t least = budget == 0      ? ~0U
                                : kept >= budget ? ~static_cast<std::uint32_t>(key[budget - 1] >> 32)
                                                 : 0U;
    // Who is in the running: candidates that could be among the best, and all where one may share a row.
    const auto tile = g.tile();
    for (int f = tile.rank(); f < frontier_count; f += tile.count()) {
      const int node = frontier[f];
      const int run = Estimates::run_class(s.run[node]);
      const RateReach rate{estimates.probability[run], s.best[run], s.reach[node], node < planted ? 0U : least};
      std::uint64_t contexts[context_length_count];
      const int count = context_hashes(s.token, s.parent, root, node, tail, contexts);
      CandidateList& list = s.list[f];
      collect(tile, pool, contexts, count, rate, list);
      if (!tile.leads()) continue;
      // Each gets its estimate times the chance that no better one was right; so reach falls along the list, and a
      // parent's is never exceeded.
      std::uint64_t rest = s.reach[node];
      int n = 0;
      for (; n < list.count; ++n) {
        const std::uint64_t reach = rest * list.estimate(n) >> 32;
        if (reach <= rate.least) break;
        rest -= reach;
        s.candidate_reach[f * width + n] = static_cast<std::uint32_t>(reach);
      }
      list.count = s.flag[f] = n;
    }
    const int running = g.exclusive_sum(s.flag, frontier_count);
    for (int i = g.rank(); i < frontier_count * width; i += g.size()) {
      if (i % width >= s.list[i / width].count) continue;
      s.item[s.flag[i / width] + i % width] = static_cast<std::uint16_t>(i);
      s.shared[i] = -1;
    }
    g.sync();
    if (shares) {
      for (int r = root + 1 + g.rank(); r < planted; r += g.size()) {
        const int f = s.place[s.parent[r]];
        if (f >= frontier_count || frontier[f] != s.parent[r]) continue;
        for (int c = 0; c < s.list[f].count; ++c)
          if (s.list[f].token[c] == s.token[r]) s.shared[f * width + c] = static_cast<std::int16_t>(r);
      }
      g.sync();
      // A shared row must have logits before the walk may step on it.
      const auto asks = [&](int k) {
        const int r = s.shared[s.item[k]];
        return r >= 0 && s.want[r] == 0;
      };
      for (int k = g.rank(); k < running; k += g.size()) s.flag[k] = asks(k) ? 1 : 0;
      const int asked = g.exclusive_sum(s.flag, running);
      for (int k = g.rank(); k < running; k += g.size()) {
        if (!asks(k)) continue;
        if (s.flag[k] < logits_left)
          s.want[s.shared[s.item[k]]] = 1;
        else
          s.candidate_reach[s.item[k]] = 0;
      }
      logits_left -= asked < logits_left ? asked : logits_left;
      budget = rows_left < logits_left ? rows_left : logits_left;
    }
    for (int k = g.rank(); k < running; k += g.size()) {
      const int i = s.item[k];
      const std::uint32_t reach = s.shared[i] < 0 ? s.candidate_reach[i] : 0;
      s.fresh[k] = std::uint64_t{~reach} << 32 | static_cast<std::uint64_t>(numbered + k) << 11;
      s.flag[k] = s.shared[i] >= 0 && s.candidate_reach[i] != 0 ? 1 : 0;
    }
    g.sort(s.fresh, running);
    const int most = kept + running < budget ? kept + running : budget;
    for (int k = g.rank(); k < kept; k += g.size()) {
      const int place = k + count_below(s.fresh, running, key[k]);
      if (place < most)
        next_key[place] = key[k];
      else  // all behind it are dropped, too
        s.freed[kept - 1 - k] = static_cast<std::int32_t>(key[k] & 0x7FF);
    }
    for (int k = g.rank(); k < running; k += g.size()) {
      const int place = k + count_below(key, kept, s.fresh[k]);
      if (place < most) next_key[place] = s.fresh[k];
    }
    g.sync();

    // The best stay; the new ones among them and the shared rows are the next frontier. One sum numbers both: in its
    // lower half all of them, in its upper half the new ones.
    const int best = count_below(next_key, most, std::uint64_t{~0U} << 32);
    const auto item_of = [&](std::uint64_t k) { return static_cast<int>(k >> 11 & 0x1FFFFF) - numbered; };
    for (int k = g.rank(); k < best; k += g.size())
      if (item_of(next_key[k]) >= 0) s.flag[item_of(next_key[k])] = 0x10001;
    const int sum = g.exclusive_sum(s.flag, running);
    const int freed = kept + (sum >> 16) - best;
    const auto settle = [&](int k, int node) {
      const int i = s.item[k], place = s.flag[k] & 0xFFFF;
      s.reach[node] = s.candidate_reach[i];
      s.run[node] = static_cast<std::uint8_t>(Estimates::run_after(s.run[frontier[i / width]], i % width == 0));
      s.depth[node] = static_cast<std::uint8_t>(depth);
      s.candidate[node] = s.list[i / width].candidate_class(i % width).id;
      s.place[node] = place;
      next_frontier[place] = node;
    };
    for (int k = g.rank(); k < best; k += g.size()) {
      const int item = item_of(next_key[k]);
      if (item < 0) continue;
      const int i = s.item[item], n = s.flag[item] >> 16;
      // Slots in use have no gaps until the budget falls; from then on all that are taken were freed.
      const int slot = n < freed ? s.freed[n] : planted + kept + n - freed;
      next_key[k] |= static_cast<std::uint64_t>(slot);
      s.parent[slot] = frontier[i / width];
      s.token[slot] = s.list[i / width].token[i % width];
      settle(item, slot);
    }
    if (shares)
      for (int k = g.rank(); k < running; k += g.size())
        if (const int i = s.item[k]; s.shared[i] >= 0 && s.candidate_reach[i] != 0) settle(k, s.shared[i]);
    kept = best;
    numbered += running;
    frontier_count = sum & 0xFFFF;
    g.sync();
  }

  const std::uint64_t* const key = s.key[depth % 2];
  for (int r = g.rank(); r < planted; r += g.size()) {
    s.place[r] = r;
    if (r > root && s.reach[r] != 0) {
      notes.reach[r] = s.reach[r];
      notes.candidate[r] = s.candidate[r];
      notes.run[r] = s.run[r];
    }
  }
  for (int k = g.rank(); k < kept; k += g.size()) {
    s.place[key[k] & 0x7FF] = planted + k;
    s.want[planted + k] = 1;
  }
  if (g.rank() == 0) tree.rows = planted + kept;
  g.sync();
  // Level by level, since a row needs its parent's.
  for (int level = 1; level < depth; ++level) {
    for (int k = g.rank(); k < kept; k += g.size()) {
      const auto node = static_cast<int>(key[k] & 0x7FF);
      if (s.depth[node] != level) continue;
      tree.set(planted + k, s.place[s.parent[node]], static_cast<Token>(s.token[node]));
      notes.reach[planted + k] = s.reach[node];
      notes.candidate[planted + k] = s.candidate[node];
      notes.run[planted + k] = s.run[node];
    }
    g.sync();
  }
  want_all(g, tree, s.want);
}

}  // namespace lookahead::detail
