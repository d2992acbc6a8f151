#pragma once
/// @file plant.hpp
/// Merges chains of tokens into a tree, so that equal paths share one row.

#include <cstdint>

#include "lookahead/detail/config.hpp"
#include "lookahead/group.hpp"
#include "lookahead/token_tree.hpp"

namespace lookahead::detail {

/// Working memory for up to C chains.
template <class Token, int C>
struct PlantScratch {
  std::int32_t node[C], below[C], lead[C], shared[C];
  Token token[C];
  int fresh[C];
};

/// Plants `count` chains, depth by depth; within a depth in the order of the chains.
/// - `chain.token(c, d, t)`: whether chain c has a token at depth d (1..depths), and which.
/// - `chain.start(c, d)`: the row below which chain c begins at depth d, or -1 if it has begun before.
/// - `chain.placed(c, d, row, leads)`: called once a token has its row; one of the chains that share it leads.
/// Chains are without gaps. Precondition: the tree has room.
LOOKAHEAD_GROUP_FN template <Group Gr, class Token, int R, int C, class Chain>
LOOKAHEAD_HD void plant(const Gr& g, TokenTreeStorage<Token, R>& tree, int count, int depths, const Chain& chain,
                        PlantScratch<Token, C>& s) {
  const int planted = tree.rows;
  for (int c = g.rank(); c < count; c += g.size()) s.node[c] = -1;
  for (int d = 1; d <= depths; ++d) {
    for (int c = g.rank(); c < count; c += g.size()) {
      const bool on = chain.token(c, d, s.token[c]);
      const int start = on ? chain.start(c, d) : -1;
      s.below[c] = !on ? -1 : start >= 0 ? start : s.node[c];
    }
    g.sync();
    for (int c = g.rank(); c < count; c += g.size()) {
      s.fresh[c] = 0;
      s.shared[c] = -1;
      if (s.below[c] < 0) continue;
      for (int r = s.below[c] + 1; r < planted; ++r)
        if (tree.parent[r] == s.below[c] && tree.token[r] == s.token[c]) s.shared[c] = r;
      s.lead[c] = 0;
      while (s.below[s.lead[c]] != s.below[c] || s.token[s.lead[c]] != s.token[c]) ++s.lead[c];
      s.fresh[c] = static_cast<int>(s.lead[c] == c && s.shared[c] < 0);
    }
    g.sync();
    const int base = tree.rows;
    const int added = g.exclusive_sum(s.fresh, count);
    for (int c = g.rank(); c < count; c += g.size()) {
      if (s.below[c] < 0) continue;
      const bool is_new = s.lead[c] == c && s.shared[c] < 0;
      const int row = s.shared[c] >= 0 ? s.shared[c] : base + s.fresh[s.lead[c]];
      if (is_new) tree.set(row, s.below[c], s.token[c]);
      s.node[c] = row;
      chain.placed(c, d, row, s.lead[c] == c);
    }
    g.sync();
    if (g.rank() == 0) tree.rows = base + added;
    g.sync();
  }
}

}  // namespace lookahead::detail
