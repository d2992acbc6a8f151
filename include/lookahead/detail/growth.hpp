#pragma once
/// @file growth.hpp
/// Growth by reach: the rows that the walk will most probably get to.

#include <cstdint>

#include "lookahead/detail/candidates.hpp"
#include "lookahead/detail/config.hpp"
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
  std::uint8_t used[R];

  // The candidates of one level that are in the running, `width` for each node of the frontier.
  CandidateList list[R];
  std::uint32_t candidate_reach[R * width];
  std::int16_t shared[R * width];  ///< the row of the tree that a candidate shares, or -1
  std::uint16_t item[R * width];   ///< the candidates, in order
  int flag[R * width];

  // Keys are (reach inverted, number, slot), so that the best come first.
  std::uint64_t key[R], merged[R];  ///< of the kept nodes, in order; what `key` becomes
  std::uint64_t fresh[R * width];   ///< of the candidates
  std::uint32_t best[Estimates::run_class_count][context_length_count];  ///< the largest estimate of each length
  std::int32_t frontier[R], row[R];
  std::int32_t frontier_count, kept, numbered, budget, logits_left;
};

/// Rates by estimate; leaves out what cannot give a child of a row with `reach` more than `least`.
struct RateReach {
  const std::uint32_t* probability;
  const std::uint32_t* best;
  std::uint32_t reach, least;
  [[nodiscard]] LOOKAHEAD_HD bool enough(std::uint32_t estimate) const {
    return std::uint64_t{reach} * estimate >> 32 > least;
  }
  [[nodiscard]] LOOKAHEAD_HD bool wants(int i) const { return enough(best[i]); }
  [[nodiscard]] LOOKAHEAD_HD std::uint32_t operator()(CandidateClass c, int rivals, std::uint32_t) const {
    const std::uint32_t estimate = Estimates::among(probability[c.id], rivals);
    return enough(estimate) ? estimate : 0U;
  }
};

/// How many of n ascending keys are smaller than `key`.
LOOKAHEAD_HD inline int count_below(const std::uint64_t* keys, int n, std::uint64_t key) {
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
  for (int r = g.rank(); r < R; r += g.size()) {
    s.used[r] = 0;
    if (r >= planted) continue;
    s.parent[r] = tree.parent[r];
    s.token[r] = static_cast<std::uint32_t>(tree.token[r]);
    s.reach[r] = r == root ? ~0U : 0U;
    s.run[r] = notes.run[r];
  }
  for (int i = g.rank(); i < context_length_count * Estimates::run_class_count; i += g.size()) {
    constexpr int classes = CandidateClass::count / context_length_count;
    const int run = i / context_length_count, length = i % context_length_count;
    std::uint32_t best = 0;
    for (int c = length * classes; c < (length + 1) * classes; ++c)
      if (estimates.probability[run][c] > best) best = estimates.probability[run][c];
    s.best[run][length] = best;
  }
  if (g.rank() == 0) {
    s.frontier[0] = root;
    s.frontier_count = 1;
    s.kept = s.numbered = 0;
    s.logits_left = logits_left;
    s.budget = rows_left < logits_left ? rows_left : logits_left;
  }
  g.sync();

  int depth = 1;
  for (; depth <= max_depth && s.frontier_count > 0; ++depth) {
    // What the reach of one more row must exceed.
    const bool full = s.kept >= s.budget;
    const std::uint32_t least = s.budget == 0 ? ~0U
                                : full        ? ~static_cast<std::uint32_t>(s.key[s.budget - 1] >> 32)
                                              : 0U;
    // Who is in the running: candidates that could be among the best, and all where one may share a row.
    const auto tile = g.tile();
    for (int f = tile.rank(); f < s.frontier_count; f += tile.count()) {
      const int node = s.frontier[f];
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
    g.sync();
    const int running = g.exclusive_sum(s.flag, s.frontier_count);
    for (int f = g.rank(); f < s.frontier_count; f += g.size()) {
      const int node = s.frontier[f];
      for (int c = 0; c < s.list[f].count; ++c) {
        const int i = f * width + c;
        s.item[s.flag[f] + c] = static_cast<std::uint16_t>(i);
        s.shared[i] = -1;
        if (node < planted)
          for (int r = node + 1; r < planted; ++r)
            if (s.parent[r] == node && s.token[r] == s.list[f].token[c]) s.shared[i] = static_cast<std::int16_t>(r);
      }
    }
    g.sync();
    // A shared row must have logits before the walk may step on it.
    if (g.rank() == 0) {
      for (int k = 0; k < running; ++k) {
        const int i = s.item[k], r = s.shared[i];
        if (r < 0 || (tree.want_bits[r / 32] >> (r % 32) & 1U) != 0) continue;
        if (s.logits_left == 0) {
          s.candidate_reach[i] = 0;
          continue;
        }
        tree.want(r);
        --s.logits_left;
      }
      s.budget = rows_left < s.logits_left ? rows_left : s.logits_left;
    }
    g.sync();
    const int kept = s.kept, numbered = s.numbered;
    for (int k = g.rank(); k < running; k += g.size()) {
      const int i = s.item[k];
      const std::uint32_t reach = s.shared[i] < 0 ? s.candidate_reach[i] : 0;
      s.fresh[k] = std::uint64_t{~reach} << 32 | static_cast<std::uint64_t>(numbered + k) << 11;
      s.flag[k] = 0;
    }
    g.sync();
    g.sort(s.fresh, running);
    const int most = kept + running < s.budget ? kept + running : s.budget;
    for (int k = g.rank(); k < kept; k += g.size()) {
      const int place = k + count_below(s.fresh, running, s.key[k]);
      if (place < most) s.merged[place] = s.key[k];
    }
    for (int k = g.rank(); k < running; k += g.size()) {
      const int place = k + count_below(s.key, kept, s.fresh[k]);
      if (place < most) s.merged[place] = s.fresh[k];
    }
    g.sync();
    for (int k = g.rank(); k < most; k += g.size()) s.key[k] = s.merged[k];
    g.sync();

    // The best stay; the new ones among them and the shared rows are the next frontier.
    if (g.rank() == 0) {
      int n = 0;
      while (n < most && static_cast<std::uint32_t>(s.key[n] >> 32) != ~0U) ++n;
      s.kept = n;
      for (int r = planted; r < R; ++r) s.used[r] = 0;
      for (int k = 0; k < n; ++k) {
        const int number = static_cast<int>(s.key[k] >> 11 & 0x1FFFFF);
        if (number < numbered)
          s.used[s.key[k] & 0x7FF] = 1;
        else
          s.flag[number - numbered] = k + 1;
      }
      int slot = planted, count = 0;
      for (int k = 0; k < running; ++k) {
        const int i = s.item[k];
        int node = s.shared[i];
        if (node < 0) {
          if (s.flag[k] == 0) continue;
          while (s.used[slot] != 0) ++slot;
          node = slot++;
          s.key[s.flag[k] - 1] |= static_cast<std::uint64_t>(node);
          s.parent[node] = s.frontier[i / width];
          s.token[node] = s.list[i / width].token[i % width];
        } else if (s.candidate_reach[i] == 0) {
          continue;
        }
        s.reach[node] = s.candidate_reach[i];
        s.run[node] = static_cast<std::uint8_t>(Estimates::run_after(s.run[s.frontier[i / width]], i % width == 0));
        s.depth[node] = static_cast<std::uint8_t>(depth);
        s.candidate[node] = s.list[i / width].candidate_class(i % width).id;
        s.row[count++] = node;
      }
      for (int k = 0; k < count; ++k) s.frontier[k] = s.row[k];
      s.frontier_count = count;
      s.numbered = numbered + running;
    }
    g.sync();
  }

  for (int r = g.rank(); r < planted; r += g.size()) {
    s.row[r] = r;
    if (r > root && s.reach[r] != 0) {
      notes.reach[r] = s.reach[r];
      notes.candidate[r] = s.candidate[r];
      notes.run[r] = s.run[r];
    }
  }
  for (int k = g.rank(); k < s.kept; k += g.size()) s.row[s.key[k] & 0x7FF] = planted + k;
  g.sync();
  // Level by level, since a row needs its parent's.
  for (int level = 1; level < depth; ++level) {
    for (int k = g.rank(); k < s.kept; k += g.size()) {
      const auto node = static_cast<int>(s.key[k] & 0x7FF);
      if (s.depth[node] != level) continue;
      tree.set(planted + k, s.row[s.parent[node]], static_cast<Token>(s.token[node]));
      notes.reach[planted + k] = s.reach[node];
      notes.candidate[planted + k] = s.candidate[node];
      notes.run[planted + k] = s.run[node];
    }
    g.sync();
  }
  if (g.rank() == 0) {
    tree.rows = planted + s.kept;
    for (int k = 0; k < s.kept; ++k) tree.want(planted + k);
  }
  g.sync();
}

}  // namespace lookahead::detail
