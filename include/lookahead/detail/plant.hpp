#pragma once
/// @file plant.hpp
/// Merges chains of tokens into a tree, so that equal paths share one row; says of which rows logits are wanted.

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
  int rows = planted;  // all threads count alike
  for (int c = g.rank(); c < count; c += g.size()) s.node[c] = -1;
  for (int d = 1; d <= depths; ++d) {
    for (int c = g.rank(); c < count; c += g.size()) {
      const bool on = chain.token(c, d, s.token[c]);
      const int start = on ? chain.start(c, d) : -1;
      s.below[c] = !on ? -1 : start >= 0 ? start : s.node[c];
      s.shared[c] = -1;
    }
    g.sync();
    for (int r = tree.root + 1 + g.rank(); r < planted; r += g.size())
      for (int c = 0; c < count; ++c)
        if (s.below[c] == tree.parent[r] && s.token[c] == tree.token[r]) s.shared[c] = r;
    g.sync();
    for (int c = g.rank(); c < count; c += g.size()) {
      s.fresh[c] = 0;
      if (s.below[c] < 0) continue;
      s.lead[c] = 0;
      while (s.below[s.lead[c]] != s.below[c] || s.token[s.lead[c]] != s.token[c]) ++s.lead[c];
      s.fresh[c] = static_cast<int>(s.lead[c] == c && s.shared[c] < 0);
    }
    const int added = g.exclusive_sum(s.fresh, count);
    for (int c = g.rank(); c < count; c += g.size()) {
      if (s.below[c] < 0) continue;
      const bool is_new = s.lead[c] == c && s.shared[c] < 0;
      const int row = s.shared[c] >= 0 ? s.shared[c] : rows + s.fresh[s.lead[c]];
      if (is_new) tree.set(row, s.below[c], s.token[c]);
      s.node[c] = row;
      chain.placed(c, d, row, s.lead[c] == c);
    }
    rows += added;
    g.sync();
  }
  // Where nothing was added, there may have been no sync since the number was read.
  if (g.rank() == 0 && rows > planted) tree.rows = rows;
  g.sync();
}

/// Asks for the logits of all rows whose flag is not 0, beside those that are wanted already. The flags, one for each
/// row, are lost. Each was written before a sync, or by the thread that takes row r in a loop from rank() by size().
LOOKAHEAD_GROUP_FN template <Group Gr, class Token, int R>
LOOKAHEAD_HD void want_all(const Gr& g, TokenTreeStorage<Token, R>& tree, int* flag) {
  const int rows = tree.rows;
  for (int r = g.rank(); r < rows; r += g.size()) flag[r] = flag[r] != 0 || tree.is_wanted(r) ? 1 : 0;
  g.sync();
  for (int word = g.rank(); word < tree.words; word += g.size()) {
    std::uint32_t bits = 0;
    for (int r = 32 * word; r < rows && r < 32 * word + 32; ++r)
      bits |= static_cast<std::uint32_t>(flag[r]) << (r % 32);
    tree.want_bits[word] = bits;
  }
  const int count = g.exclusive_sum(flag, rows);
  for (int r = g.rank(); r < rows; r += g.size())
    if (tree.is_wanted(r)) tree.wanted[flag[r]] = r;
  if (g.rank() == 0) tree.wanted_count = count;
  g.sync();
}

}  // namespace lookahead::detail
