#pragma once
/// @file step.hpp
/// The phases of a step over a group. `Lookahead` is their serial instance.

#include <cstdint>

#include "lookahead/detail/candidates.hpp"
#include "lookahead/detail/config.hpp"
#include "lookahead/detail/growth.hpp"
#include "lookahead/detail/plant.hpp"
#include "lookahead/detail/published.hpp"
#include "lookahead/group.hpp"
#include "lookahead/jacobi_window.hpp"
#include "lookahead/ngram_pool.hpp"
#include "lookahead/shape.hpp"
#include "lookahead/token_tree.hpp"

namespace lookahead::detail {

LOOKAHEAD_HD constexpr int min(int a, int b) { return a < b ? a : b; }
LOOKAHEAD_HD constexpr int max(int a, int b) { return a > b ? a : b; }

/// A shape as far as the limits allow it. Trivial, as all that may lie in shared memory, and without padding, since
/// states are compared byte by byte.
struct FittedShape {
  std::int32_t w, n, g;
  ShapeMode mode;
  bool slide;
  std::uint8_t unused[2];
};

/// Everything that a request carries from step to step. Trivial.
template <int W, int N, int G, class Token>
struct StepState {
  static constexpr int max_depth = G > 0 ? 32 : 0;
  static constexpr int max_block = max(W + N - 2, 1 + max_depth);
  static constexpr int max_pending = max_block;
  static constexpr int max_rows = max_pending + (W + G) * (N - 1);
  static constexpr int recycled = 8;  ///< tokens read from each row for the pool

  JacobiWindow<W, N, Token> window;
  Estimates estimates;
  Calibration calibration;
  std::int32_t run;  ///< up to the root, see Estimates
  TextTail<Token> tail;
  Token pending[max_pending];
  std::int32_t pending_count, context_size;

  // The planned step.
  FittedShape shape;     ///< w = 0 where the window is off
  std::int32_t planted;  ///< rows that are not grown
  std::int32_t tokens_left;
  std::int32_t cell_row[N - 1][W];
  RowNotes<max_rows> notes;

  // What resolve read and proposed.
  std::int32_t path[max_rows], path_count;
  Token selected[max_block];
  std::int32_t selected_count;
  bool stopped;
  std::int32_t at, found;
  Token next[W];  ///< the model's choice behind each column
  Token top[max_rows][recycled];
  std::uint8_t top_count[max_rows];
};

/// Working memory of the phases; nothing in it outlives a call.
template <int W, int N, int G, class Token>
struct StepScratch {
  static constexpr int rows = StepState<W, N, G, Token>::max_rows;
  static constexpr int longest_context = min(3, N - 1);         ///< under which the window's n-grams are filed
  static constexpr int per_column = (N - 1) * longest_context;  ///< things to file for each column, at most

  struct Plan {
    int want[rows];  ///< not 0 for the rows whose logits will be read
    PlantScratch<Token, max(1 + W, G)> plant;
    union {
      GuessScratch<max(G, 1), N - 1> guesses;
      GrowthScratch<(G > 0 ? rows : 1)> growth;
    };
  };
  struct Apply {
    CandidateList list[StepState<W, N, G, Token>::max_block];
    PoolInsert inserts[2 * rows + W * per_column];
    std::uint32_t scored[CandidateClass::count / 32];  ///< classes, as bits
    TextScratch<Token> text;
  };
  union {
    Plan plan;
    Apply apply;
  };
};

/// Begins a request: files the prompt, fills the window; the last prompt token is the root.
LOOKAHEAD_GROUP_FN template <Group Gr, int W, int N, int G, class Token, class Pool>
LOOKAHEAD_HD void start(const Gr& g, StepState<W, N, G, Token>& s, const Pool& pool, const Token* prompt, int count,
                        std::uint64_t seed, StepScratch<W, N, G, Token>& scratch) {
  if (g.rank() == 0) {
    s.window.start(prompt, count, seed);
    s.calibration.reset();
    s.run = 0;
    s.tail.count = 0;
    s.pending[0] = prompt[count - 1];
    s.pending_count = 1;
    s.context_size = count - 1;
    s.path_count = s.selected_count = 0;
  }
  for (int id = g.rank(); id < CandidateClass::count; id += g.size())
    s.estimates.reset(CandidateClass{static_cast<std::uint8_t>(id)});
  g.sync();
  file_text(g, pool, s.tail, prompt, count, scratch.apply.text);
}

/// How many tokens the context gains by `count` more tokens behind a pending chain of `pending`: none where the chain
/// may take them all, at most `room` of them; else all but the last.
template <class State>
LOOKAHEAD_HD constexpr int gained_by(int pending, int count, int room) {
  return count <= min(room, State::max_pending) - pending ? 0 : pending + count - 1;
}

/// More input: the pending chain takes it where it fits; else all but the last token belongs to the context.
/// Returns how many tokens the context gained.
LOOKAHEAD_GROUP_FN template <Group Gr, int W, int N, int G, class Token, class Pool>
LOOKAHEAD_HD int append(const Gr& g, StepState<W, N, G, Token>& s, const Pool& pool, const Token* tokens, int count,
                        int room, StepScratch<W, N, G, Token>& scratch) {
  if (count == 0) return 0;
  const int gained = gained_by<StepState<W, N, G, Token>>(s.pending_count, count, room);
  g.sync();
  if (g.rank() == 0) {
    // The second condition follows from the first; it keeps g++ from warning where `count` is a constant.
    if (gained == 0 && count < s.max_pending) {
      for (int i = 0; i < count; ++i) s.pending[s.pending_count + i] = tokens[i];
      s.pending_count += count;
    } else {
      s.pending[0] = tokens[count - 1];
      s.pending_count = 1;
      s.context_size += gained;
    }
    s.window.cell[0][0] = tokens[count - 1];
    s.run = 0;
  }
  g.sync();
  file_text(g, pool, s.tail, tokens, count, scratch.apply.text);
  return gained;
}

/// The largest part of `shape` that the limits allow. `rows` and `logits` count the root.
template <int W, int N, int G>
LOOKAHEAD_HD FittedShape fit(const Shape& wanted, int rows, int logits, int depth, int tokens_left) {
  FittedShape shape{
      max(0, min(wanted.w, W)), max(2, min(wanted.n, N)), max(0, min(wanted.g, G)), wanted.mode, wanted.slide, {}};
  // A window serves the steps to come: with one token left there are none.
  const int by_logits = shape.n == 2 ? logits : (logits - shape.n + 3) / 2;  // w + (w - 1) + (n - 2) rows want logits
  shape.w = max(0, min(min(shape.w, rows / (shape.n - 1)), min(by_logits, depth - shape.n + 3)));
  if (rows <= 1 || tokens_left <= 1 || depth < shape.n - 2) shape.w = 0;
  if (depth < 1 || tokens_left <= 1) shape.g = 0;
  if (shape.mode == ShapeMode::published) {
    const int window = shape.w == 0 ? 1 : shape.n == 2 ? shape.w : 2 * shape.w + shape.n - 3;
    const int left = min(rows - max(1, shape.w * (shape.n - 1)), logits - window);
    shape.g = max(0, min(shape.g, left / (shape.n - 1)));
  }
  return shape;
}

/// The chains of the window: chain 0 is level 0, chain 1 + j is column j below it.
template <class State, class Tree>
struct WindowChains {
  State& s;
  const Tree& tree;
  [[nodiscard]] LOOKAHEAD_HD bool token(int c, int d, typename Tree::token_type& t) const {
    const int r = c == 0 ? 0 : d - (c - 1), j = c == 0 ? d : c - 1;
    if (r < 0 || (c > 0 && r < 1) || r > s.shape.n - 2 || j >= s.shape.w) return false;
    t = s.window.cell[r][j];
    return true;
  }
  [[nodiscard]] LOOKAHEAD_HD int start(int c, int d) const {
    if (c == 0) return d == 1 ? tree.root : -1;
    return d == c ? s.cell_row[0][c - 1] : -1;
  }
  LOOKAHEAD_HD void placed(int c, int d, int row, bool) const {
    s.cell_row[c == 0 ? 0 : d - (c - 1)][c == 0 ? d : c - 1] = row;
  }
};

/// The guesses of the published shape, each a chain from the root.
template <class State, class Tree, class Guesses>
struct GuessChains {
  State& s;
  Tree& tree;
  const Guesses& guesses;
  int depths;
  [[nodiscard]] LOOKAHEAD_HD bool token(int c, int d, typename Tree::token_type& t) const {
    if (d > guesses.guess[c].length || d > depths) return false;
    t = static_cast<typename Tree::token_type>(guesses.guess[c].token[d - 1]);
    return true;
  }
  [[nodiscard]] LOOKAHEAD_HD int start(int, int d) const { return d == 1 ? tree.root : -1; }
  LOOKAHEAD_HD void placed(int c, int d, int row, bool leads) const {
    if (leads) s.notes.candidate[row] = guesses.guess[c].candidate[d - 1];
  }
};

/// Writes the tree of the next step.
LOOKAHEAD_GROUP_FN template <Group Gr, int W, int N, int G, class Token, int R, class Pool>
LOOKAHEAD_HD void plan(const Gr& g, StepState<W, N, G, Token>& s, const Pool& pool, const Shape& shape, Limits limits,
                       TokenTreeStorage<Token, R>& tree, StepScratch<W, N, G, Token>& scratch) {
  static_assert(R == StepState<W, N, G, Token>::max_rows);
  // No limit beyond the number of rows says anything more, and none overflows.
  limits.logit_rows = max(0, min(limits.logit_rows, R));
  limits.depth = max(0, min(limits.depth, R));
  limits.tokens_left = max(0, min(limits.tokens_left, R + 1));
  const int row_limit = max(0, min(limits.rows, R));
  const bool complete = row_limit >= s.pending_count && limits.logit_rows >= 1 && limits.tokens_left >= 1;
  // The root is never cached without being asked for a token.
  const int pending = complete ? s.pending_count : min(row_limit, s.pending_count - 1);
  const int rows = row_limit - pending + 1;  // the root counted
  int* const want = scratch.plan.want;
  if (g.rank() == 0) {
    tree.begin(s.context_size, s.pending, pending);
    if (complete) tree.want(tree.root);
    s.shape = complete ? fit<W, N, G>(shape, rows, limits.logit_rows, limits.depth, limits.tokens_left)
                       : FittedShape{0, 2, 0, shape.mode, shape.slide, {}};
    s.tokens_left = limits.tokens_left;
    s.path_count = s.selected_count = 0;
    if (s.shape.w > 0) {
      s.window.prepare(s.shape.w, s.shape.n);
      s.cell_row[0][0] = tree.root;
    }
  }
  for (int r = g.rank(); r < R; r += g.size()) {
    s.notes.reach[r] = 0;
    s.notes.candidate[r] = RowNotes<R>::no_class;
    s.notes.run[r] = r == pending - 1 ? static_cast<std::uint8_t>(s.run) : 0;
    want[r] = 0;
  }
  g.sync();

  const int w = s.shape.w, n = s.shape.n;
  if (w > 0) {
    plant(g, tree, 1 + w, w + n - 3, WindowChains<StepState<W, N, G, Token>, TokenTreeStorage<Token, R>>{s, tree},
          scratch.plan.plant);
    // A thread takes all cells of a depth, since cells of different depths never share a row.
    for (int d = g.rank(); d < w + n - 2; d += g.size()) {
      const int last = min(n, N) - 2;  // min: for g++ 12, as below
      if (d < w) want[s.cell_row[0][d]] = 1;
      if (d >= last && d - last < w) want[s.cell_row[last][d - last]] = 1;
      if (d > 0 && d < last) want[s.cell_row[d][0]] = 1;
    }
    g.sync();
    want_all(g, tree, want);
  }
  if (g.rank() == 0) s.planted = tree.rows;
  if constexpr (G > 0) {
    if (s.shape.g > 0) {
      const int depth = min(limits.depth, limits.tokens_left - 1);
      if (s.shape.mode == ShapeMode::growth) {
        grow(g, pool, s.estimates, s.tail, tree, s.notes, row_limit - tree.rows, limits.logit_rows - tree.wanted_count,
             min(depth, s.max_depth), scratch.plan.growth);
      } else {
        auto& guesses = scratch.plan.guesses;
        const int count = enumerate(g, pool, s.pending[s.pending_count - 1], s.shape.g, n - 1, guesses);
        using Guesses = GuessChains<StepState<W, N, G, Token>, TokenTreeStorage<Token, R>, GuessScratch<G, N - 1>>;
        plant(g, tree, count, min(n - 1, depth), Guesses{s, tree, guesses, min(n - 1, depth)}, scratch.plan.plant);
        // Every row that a guess has may be walked on, those that it shares with the window too.
        for (int r = g.rank(); r < tree.rows; r += g.size())
          want[r] = s.notes.candidate[r] != RowNotes<R>::no_class ? 1 : 0;
        want_all(g, tree, want);
        if (g.rank() == 0) s.planted = tree.rows;
      }
    }
  }
  g.sync();
}

/// Drops the grown rows from row `rows` on.
template <int W, int N, int G, class Token, int R>
LOOKAHEAD_HD void cut(StepState<W, N, G, Token>& s, TokenTreeStorage<Token, R>& tree, int rows) {
  rows = max(rows, s.planted);
  if (rows >= tree.rows) return;
  while (tree.wanted_count > 0 && tree.wanted[tree.wanted_count - 1] >= rows) {
    const int row = tree.wanted[--tree.wanted_count];
    tree.want_bits[row / 32] &= ~(1U << (row % 32));
  }
  tree.rows = rows;
}

/// Walks from the root and reads everything that later phases need from logits. One thread calls `select(row)`, which
/// gives the token behind a row, once for each token that is emitted, in order, and `stop(token)`, which says whether
/// the text ends with it. `top(row, out, count)` writes up to `count` of the best raw tokens of a wanted row, best
/// first, and returns how many; threads call it for different rows.
LOOKAHEAD_GROUP_FN template <Group Gr, int W, int N, int G, class Token, int R, class Select, class Top, class Stop>
LOOKAHEAD_HD void resolve(const Gr& g, StepState<W, N, G, Token>& s, const TokenTreeStorage<Token, R>& tree,
                          Select&& select, Top&& top, Stop&& stop) {
  if (g.rank() == 0) {
    for (int r = 0; r <= tree.root; ++r) s.path[r] = r;
    s.path_count = tree.root + 1;
    s.selected_count = 0;
    s.stopped = false;
    s.found = tree.wanted_count > 0 ? tree.root : -1;
  }
  for (;;) {
    if (g.rank() == 0) {
      s.at = s.found;
      s.found = -1;
      if (s.at > tree.root) s.path[s.path_count++] = s.at;
      if (s.at >= 0) {
        const Token token = select(static_cast<int>(s.at));
        s.selected[s.selected_count++] = token;
        s.stopped = stop(token);
      }
    }
    g.sync();
    if (s.at < 0) break;
    if (!s.stopped && s.selected_count < s.tokens_left) {
      const Token token = s.selected[s.selected_count - 1];
      for (int r = s.at + 1 + g.rank(); r < tree.rows; r += g.size())
        if (tree.parent[r] == s.at && tree.token[r] == token && tree.is_wanted(r)) s.found = r;
    }
    g.sync();
  }
  const bool recycle = G > 0 && s.shape.mode == ShapeMode::growth;
  if (recycle) {
    for (int i = g.rank(); i < tree.wanted_count; i += g.size()) {
      const int row = tree.wanted[i];
      s.top_count[row] = static_cast<std::uint8_t>(top(row, s.top[row], s.recycled));
    }
  }
  g.sync();
  for (int j = g.rank(); j < s.shape.w; j += g.size()) {
    const int row = s.cell_row[s.shape.n - 2][j];
    if (recycle)
      s.next[j] = s.top[row][0];
    else
      top(row, &s.next[j], 1);
  }
  g.sync();
}

/// Rates every candidate by its estimate.
struct RateAll {
  const std::uint32_t* probability;
  [[nodiscard]] LOOKAHEAD_HD bool wants(int, std::uint32_t = 0) const { return true; }
  [[nodiscard]] LOOKAHEAD_HD std::uint32_t operator()(CandidateClass c, std::uint32_t share, std::uint32_t) const {
    return Estimates::with_share(probability[c.id], share);
  }
};

/// Takes the proposal: scores the estimates, harvests and rolls the window, feeds the pool. `kept` rows of the path are
/// in the context now; the others, and the last selected token, are the next pending chain.
LOOKAHEAD_GROUP_FN template <Group Gr, int W, int N, int G, class Token, int R, class Pool>
LOOKAHEAD_HD void apply(const Gr& g, StepState<W, N, G, Token>& s, const Pool& pool,
                        const TokenTreeStorage<Token, R>& tree, int kept, StepScratch<W, N, G, Token>& scratch) {
  auto& a = scratch.apply;
  const int root = tree.root, count = s.selected_count;
  const bool recycle = G > 0 && s.shape.mode == ShapeMode::growth;
  if (recycle) {
    const auto tile = g.tile();
    for (int i = tile.rank(); i < count; i += tile.count()) {
      std::uint64_t contexts[context_length_count];
      const int row = s.path[root + i];
      const int found = context_hashes(tree.token, tree.parent, root, row, s.tail, contexts);
      const RateAll rate{s.estimates.probability[Estimates::run_class(s.notes.run[row])]};
      collect(tile, pool, contexts, found, rate, a.list[i]);
    }
    g.sync();
    if (tile.rank() == 0 && count > 0) {
      const std::uint64_t reaches = tile.sum(tree.rows, [&](int r) { return std::uint64_t{s.notes.reach[r]}; });
      const int backed = tile.sum(s.path_count - root - 1, [&](int i) {
        return s.notes.candidate[s.path[root + 1 + i]] != RowNotes<R>::no_class ? 1 : 0;
      });
      if (tile.leads()) s.calibration.score(reaches, backed);
    }
    // Counted one by one, because counts of a class fade in order; what takes long is left to all.
    if (g.rank() == 0) {
      for (std::uint32_t& bits : a.scored) bits = 0;
      for (int i = 0; i < count; ++i) {
        for (int k = 0; k < a.list[i].count; ++k) {
          const bool hit = a.list[i].token[k] == static_cast<std::uint32_t>(s.selected[i]);
          const CandidateClass c = a.list[i].candidate_class(k);
          s.estimates.count(c, s.notes.run[s.path[root + i]], a.list[i].share(k), hit);
          a.scored[c.id / 32] |= 1U << (c.id % 32);
          if (hit) break;
        }
      }
    }
    g.sync();
    for (int id = g.rank(); id < CandidateClass::count; id += g.size())
      if ((a.scored[id / 32] >> (id % 32) & 1U) != 0) s.estimates.update(CandidateClass{static_cast<std::uint8_t>(id)});
  }
  if (g.rank() == 0 && count > 0) {
    const bool best = recycle && a.list[count - 1].count > 0 &&
                      a.list[count - 1].token[0] == static_cast<std::uint32_t>(s.selected[count - 1]);
    s.run = Estimates::run_after(s.notes.run[s.path[root + count - 1]], best);
  }

  // What the pool learns, the true context last: recycled rows off the path, those on it, the window's n-grams, the
  // text.
  int inserts = 0;
  if (recycle) {
    // All rows of the path from the root on are wanted, and none in front of it.
    for (int n = g.rank(); n < tree.wanted_count; n += g.size()) {
      const std::int32_t row = tree.wanted[n];
      const int before = count_below(s.path, s.path_count, row);
      const int i = before < s.path_count && s.path[before] == row ? tree.wanted_count - s.path_count + before
                                                                   : n - (before - root);
      std::uint64_t contexts[context_length_count];
      const int found = context_hashes(tree.token, tree.parent, root, row, s.tail, contexts);
      for (int k = 0; k < 2; ++k) {
        PoolInsert& insert = a.inserts[2 * i + k];
        insert.count = k >= found ? 0 : min(k == 0 ? 8 : 4, s.top_count[row]);
        if (insert.count == 0) continue;
        insert.context = contexts[k];
        insert.source = Source::recycled;
        for (int t = 0; t < insert.count; ++t) insert.token[t] = static_cast<std::uint32_t>(s.top[row][t]);
      }
    }
    inserts = 2 * tree.wanted_count;
  }
  constexpr int per_column = StepScratch<W, N, G, Token>::per_column,
                longest = StepScratch<W, N, G, Token>::longest_context;
  const int w = s.shape.w, n = s.shape.n;
  if (w > 0 && g.rank() == 0) s.window.resize(w, n);
  g.sync();
  for (int gram = g.rank(); gram < w * (N - 1); gram += g.size()) {
    const int j = gram / (N - 1), i = 1 + gram % (N - 1);
    std::uint64_t contexts[context_length_count];
    int before = i < n ? i : 0;
    const int found = hash_contexts(
        [&](std::uint32_t& t) {
          if (before == 0) return false;
          t = static_cast<std::uint32_t>(s.window.cell[--before][j]);
          return true;
        },
        contexts);
    for (int k = 0; k < longest; ++k) {
      PoolInsert& insert = a.inserts[inserts + gram * longest + k];
      insert.count = k < found && s.window.ripe(j) ? 1 : 0;
      if (insert.count == 0) continue;
      insert.context = contexts[k];
      insert.source = Source::window;
      // min: g++ 12 would warn of a level that n never reaches.
      insert.token[0] = static_cast<std::uint32_t>(i < n - 1 ? s.window.cell[min(i, N - 2)][j] : s.next[j]);
    }
  }
  g.sync();
  if (inserts + w * per_column > 0) pool.insert_all(g, a.inserts, inserts + w * per_column);
  file_text(g, pool, s.tail, s.selected, count, a.text, Source::generated);

  if (count > 0) {
    const Token newest = s.selected[count - 1];
    if (w > 0) {
      s.window.roll(g, s.next, s.shape.slide ? count - 1 : 0, newest);
    } else if (g.rank() == 0) {
      s.window.cell[0][0] = newest;
    }
  }
  g.sync();
  if (g.rank() == 0) {
    // What the engine did not keep is fed again.
    int pending = 0;
    if (count == 0) {
      for (int i = s.path_count > 0 ? kept : 0; i < s.pending_count; ++i) s.pending[pending++] = s.pending[i];
    } else {
      for (int i = kept; i < s.path_count; ++i) s.pending[pending++] = s.selected[i - root - 1];
      s.pending[pending++] = s.selected[count - 1];
    }
    s.pending_count = pending;
    s.context_size += kept;
    s.path_count = s.selected_count = 0;
  }
  g.sync();
}

}  // namespace lookahead::detail
