// Growth by reach, beside naive growth: best-first, over maps without bounds.
#include <algorithm>
#include <cstdint>
#include <doctest/doctest.h>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "cases.hpp"
#include "mirror.hpp"

namespace {

using namespace mirror;

/// How many rows may be grown and how deep they may lie. `exact` says whether that alone decides: where the window's
/// rows and the grown ones compete for logits, who gets them is not part of the definition.
struct Budget {
  int rows, depth;
  bool exact;
};

template <class Step>
Budget budget_of(Mirror<Step>& m, const Rows& planted) {
  if (!m.complete() || m.shape.g <= 0 || Step::guesses == 0) return {0, 0, true};
  const auto wanted = std::ranges::count_if(planted, &Row::wanted);
  const int rows = std::min(m.limits.rows, Step::max_rows) - (m.tree.root + 1) - length(planted);
  const int logits = m.limits.logit_rows - 1 - static_cast<int>(wanted);
  const int depth = std::min({m.limits.depth, m.limits.tokens_left - 1, Step::max_depth});
  if (planted.empty()) return {std::min(rows, logits), depth, true};
  return {rows, depth, logits >= rows + length(planted) - static_cast<int>(wanted)};
}

/// The window's rows, then the grown ones, best first.
template <class Step>
Rows expected(Mirror<Step>& m, Rows rows, const Budget& budget) {
  std::map<Tokens, bool> planted;
  for (const Row& row : rows) planted[row.path] = true;
  for (const naive::Draft& draft : m.pool.grow(m.text, m.run, budget.rows, budget.depth, m.estimates, planted)) {
    const Row row{draft.path, true, draft.reach, in_library(draft.its_class).id};
    if (draft.planted)
      *std::ranges::find(rows, row.path, &Row::path) = row;
    else
      rows.push_back(row);
  }
  return rows;
}

/// What holds in every tree, also where logits are scarce: each row that a candidate backs has the reach of its place
/// among its parent's candidates.
template <class Step>
void check_reaches(Mirror<Step>& m, const Rows& planted, const Budget& budget) {
  const Rows rows = m.rows();
  std::map<Tokens, std::uint64_t> reach{{Tokens{}, naive::certain}}, spent;
  std::map<Tokens, int> run{{Tokens{}, m.run}};
  for (const Row& row : rows) {
    if (row.candidate == Row::no_class) {
      REQUIRE(row.reach == 0);
      continue;
    }
    const Tokens parent(row.path.begin(), row.path.end() - 1);
    REQUIRE(row.wanted);
    REQUIRE(length(row.path) <= budget.depth);
    REQUIRE(reach.count(parent) == 1);
    REQUIRE(row.reach <= reach[parent]);
    REQUIRE((spent[parent] += row.reach) <= reach[parent]);
    reach[row.path] = row.reach;

    std::uint64_t rest = reach[parent];
    bool best = true;
    for (const naive::Candidate& c : m.pool.candidates(joined(m.text, parent), m.estimates, run[parent])) {
      const std::uint64_t its_reach = naive::product(rest, c.q);
      rest -= its_reach;
      if (c.token == row.path.back()) run[row.path] = best ? run[parent] + 1 : 0;
      best = false;
      if (c.token != row.path.back()) continue;
      REQUIRE(row.reach == its_reach);
      REQUIRE(row.candidate == in_library(c.its_class).id);
    }
  }
  // The window's rows come first and keep what they had.
  REQUIRE(rows.size() >= planted.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i >= planted.size()) {
      REQUIRE(rows[i].candidate != Row::no_class);
      continue;
    }
    REQUIRE(rows[i].path == planted[i].path);
    REQUIRE(rows[i].wanted == (planted[i].wanted || rows[i].candidate != Row::no_class));
  }
}

struct Seen {
  long steps = 0, exact = 0, windows = 0, grown = 0, shared = 0;
};

template <class Step>
void run(std::uint64_t seed, Seen& seen) {
  const Shape most{Step::window, Step::ngram, Step::guesses, ShapeMode::growth, false};
  seen.steps += run_case<Step>(seed, most, [&](Mirror<Step>& m) {
    if (m.shape.mode != ShapeMode::growth) return;
    const Rows planted = m.window_rows();
    const Budget budget = budget_of(m, planted);
    check_reaches(m, planted, budget);
    if (!budget.exact) return;
    const Rows rows = m.rows();
    REQUIRE(rows == expected(m, planted, budget));
    ++seen.exact;
    seen.windows += planted.empty() ? 0 : 1;
    for (std::size_t i = 0; i < rows.size(); ++i)
      (i >= planted.size() ? seen.grown : seen.shared) += rows[i].candidate == Row::no_class ? 0 : 1;
  });
}

constexpr void (*menu[])(std::uint64_t, Seen&) = {run<Lookahead<1, 2, 1>>, run<Lookahead<3, 2, 1>>,
                                                  run<Lookahead<1, 5, 2>>,

                                                  run<Lookahead<5, 3, 5>>, run<Lookahead<15, 5, 15>>};

}  // namespace

TEST_CASE("start values rise with the length of the context and fall with the rank") {
  using lookahead::CandidateClass;
  using lookahead::Source;
  for (const Source source : {Source::text, Source::generated, Source::window, Source::recycled})
    for (int length = 0; length < lookahead::context_length_count; ++length)
      for (int rank = 0; rank < 8; ++rank) {
        const auto start = [&](int l, int r) {
          return lookahead::Estimates::start_value(CandidateClass::of(l, source, r));
        };
        CHECK(start(length, rank) >= 1);
        CHECK(start(length, rank) < 256);
        if (length > 0) CHECK(start(length, rank) >= start(length - 1, rank));
        if (rank > 0) CHECK(start(length, rank) <= start(length, rank - 1));
      }
}

TEST_CASE("trees grow as best-first growth grows them, order included, and estimates learn what they must") {
  Seen seen;
  for (int seed = 0; seed < std::max(cases(2000) / 50, 12); ++seed) {
    CAPTURE(seed);
    menu[at(seed) % std::size(menu)](static_cast<std::uint64_t>(seed), seen);
  }
  MESSAGE(seen.steps << " steps, " << seen.exact << " equal trees, " << seen.windows << " of them with a window; "
                     << seen.grown << " rows grown, " << seen.shared << " shared with the window");
  CHECK(seen.exact > seen.steps / 2);
  CHECK(seen.windows > seen.steps / 10);
  CHECK(seen.grown > seen.steps);
  CHECK(seen.shared > 0);
}

TEST_CASE("a row has at most 16 candidates, those of one class in the order of their tokens") {
  // Behind 0 came 1 to 20; the seven newest have ranks of their own.
  Tokens prompt{0};
  for (Token t = 1; t <= 20; ++t) prompt = joined(prompt, {t, 0});
  using Step = Lookahead<1, 2, 40>;
  Pool pool;
  Step step;
  Step::Tree tree;
  step.start(pool, prompt);
  Limits limits;
  limits.depth = 1;
  step.plan(pool, Shape{}, limits, tree);
  CHECK(Tokens(tree.token + 1, tree.token + tree.rows) ==
        Tokens{20, 19, 18, 17, 16, 15, 14, 1, 2, 3, 4, 5, 6, 7, 8, 9});
}
