// The guesses of the published shape, beside two naive enumerations. The library keeps the g newest chains at every
// depth; the definition takes the g newest of all leaf chains. They are equal as long as there are never more than g
// partial chains, and then the naive pool's `guesses` decide; else a plain level-by-level enumeration does.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <functional>
#include <set>
#include <vector>

#include "cases.hpp"
#include "mirror.hpp"

namespace {

using namespace mirror;

/// All that was filed, as a list, oldest first.
class Record {
 public:
  void add_text(const Tokens& text) {
    for (int i = 1; i < length(text); ++i)
      for (const int n : {1, 2, 3, 4, 6, 9, 13})
        if (n <= i) file(naive::Source::text, Tokens(text.begin() + i - n, text.begin() + i), text[at(i)]);
  }
  void add_gram(const Tokens& gram) {
    for (int i = 1; i < length(gram); ++i)
      for (int n = 1; n <= std::min(i, 3); ++n)
        file(naive::Source::window, Tokens(gram.begin() + i - n, gram.begin() + i), gram[at(i)]);
  }

  /// A chain of tokens behind the root, with the class of each, and when its last entry was filed.
  struct Chain {
    Tokens tokens = {};
    std::vector<int> classes = {};
    std::size_t when = 0;
  };

  /// The `g` newest chains of each depth up to `depth`, newest first.
  [[nodiscard]] std::vector<Chain> guesses(Token root, int depth, int g) const {
    std::vector<Chain> chains{{}};
    for (int d = 0; d < depth; ++d) {
      std::vector<Chain> next;
      for (const Chain& chain : chains) {
        const std::vector<Chain> longer = length(chain.tokens) == d ? extended(root, chain) : std::vector<Chain>{};
        next.insert(next.end(), longer.begin(), longer.end());
        if (longer.empty() && !chain.tokens.empty()) next.push_back(chain);
      }
      std::ranges::stable_sort(next, std::greater{}, &Chain::when);
      if (length(next) > g) next.resize(at(g));
      chains = next;
    }
    return chains;
  }

 private:
  struct Entry {
    naive::Source source;
    Tokens context;
    Token token;
  };

  void file(naive::Source source, const Tokens& context, Token token) { entries_.push_back({source, context, token}); }

  // The newest 16 continuations of a chain, newest first: of each source those under its longest context that begins
  // at the root or behind it.
  [[nodiscard]] std::vector<Chain> extended(Token root, const Chain& chain) const {
    const Tokens whole = joined({root}, chain.tokens);
    std::vector<Chain> longer;
    for (const auto source : {naive::Source::text, naive::Source::window}) {
      int n = 1;
      for (const int more : {2, 3, 4, 6, 9, 13})
        if (more <= std::min(length(whole), source == naive::Source::window ? 3 : 13)) n = more;
      const Tokens context(whole.end() - n, whole.end());
      std::set<Token> newer;
      for (std::size_t i = entries_.size(); i-- > 0;) {
        const Entry& e = entries_[i];
        if (e.source != source || e.context != context || newer.count(e.token) > 0) continue;
        Chain one = chain;
        one.tokens.push_back(e.token);
        one.classes.push_back(in_library({n, source, std::min(length(newer), 7)}).id);
        one.when = i;
        newer.insert(e.token);
        const auto known = std::ranges::find(longer, one.tokens, &Chain::tokens);
        if (known == longer.end())
          longer.push_back(one);
        else if (known->when < one.when)
          *known = one;
      }
    }
    std::ranges::sort(longer, std::greater{}, &Chain::when);
    if (longer.size() > 16) longer.resize(16);
    return longer;
  }

  std::vector<Entry> entries_;
};

/// The rows of chains: depth by depth, in the order of the chains, equal paths merged.
Rows rows_of(const std::vector<Record::Chain>& chains, int depth) {
  Rows rows;
  for (int d = 1; d <= depth; ++d)
    for (const Record::Chain& chain : chains) {
      if (length(chain.tokens) < d) continue;
      const Row row{Tokens(chain.tokens.begin(), chain.tokens.begin() + d), true, 0, chain.classes[at(d - 1)]};
      if (std::ranges::find(rows, row.path, &Row::path) == rows.end()) rows.push_back(row);
    }
  return rows;
}

void file_gram(Pool& pool, const Tokens& gram) {
  std::vector<lookahead::PoolInsert> inserts;
  for (int i = 1; i < length(gram); ++i)
    for (int n = 1; n <= std::min(i, 3); ++n)
      inserts.push_back({hash_of(Tokens(gram.begin() + i - n, gram.begin() + i)),
                         lookahead::Source::window,
                         1,
                         {static_cast<std::uint32_t>(gram[at(i)])}});
  pool.ref().insert_all(lookahead::SerialGroup{}, inserts.data(), length(inserts));
}

/// Files random texts and n-grams and compares one tree with the level-by-level enumeration.
template <class Step>
void compare_levels(Random& random, long& cut) {
  static Pool pool(1 << 14);
  pool.reset();
  Record record;
  const int vocabulary = 2 + random.below(30);
  for (int i = random.below(30); i > 0; --i) {
    if (random.one_in(3)) {
      const Tokens text = random.tokens(1 + random.below(20), vocabulary);
      pool.add_text(text);
      record.add_text(text);
    } else {
      const Tokens gram = random.tokens(Step::ngram, vocabulary);
      file_gram(pool, gram);
      record.add_gram(gram);
    }
  }
  const Tokens prompt = random.tokens(1 + random.below(60), vocabulary);
  Step step;
  step.start(pool, prompt);
  record.add_text(prompt);

  const Shape shape{0, random.one_in(2) ? 1 << 30 : random.below(Step::ngram + 2), 1 + random.below(Step::guesses),
                    ShapeMode::published, false};
  Limits limits;
  if (random.one_in(4)) limits.depth = random.below(Step::ngram);
  if (random.one_in(4)) limits.tokens_left = 1 + random.below(Step::ngram);
  typename Step::Tree tree;
  step.plan(pool, shape, limits, tree);
  const int guess = std::clamp(shape.n, 2, Step::ngram) - 1;
  const auto chains = record.guesses(prompt.back(), guess, shape.g);
  const Rows expected = rows_of(chains, std::min({guess, limits.depth, limits.tokens_left - 1}));

  Rows rows;
  const auto view = tree.view();
  for (int r = 1; r < view.size(); ++r) {
    Tokens path;
    for (int p = r; p > 0; p = tree.parent[p]) path.insert(path.begin(), tree.token[p]);
    const auto& notes = state_of(step).notes;
    rows.push_back({path, view.is_wanted(r), notes.reach[r], notes.candidate[r]});
  }
  REQUIRE(rows == expected);
  cut += record.guesses(prompt.back(), guess, 1 << 20).size() > chains.size() ? 1 : 0;
}

struct Seen {
  long steps = 0, whole = 0, guessed = 0, shared = 0;
};

/// A decode beside the naive pool.
template <class Step>
void decode(std::uint64_t seed, Seen& seen) {
  const Shape most{Step::window, Step::ngram, Step::guesses, ShapeMode::published, false};
  seen.steps += run_case<Step>(seed, most, [&](Mirror<Step>& m) {
    if (m.shape.mode != ShapeMode::published) return;
    const Rows planted = m.window_rows();
    const auto& fitted = m.fitted();
    const int guess = fitted.n - 1, depth = std::min({guess, m.limits.depth, m.limits.tokens_left - 1});
    bool whole = true;
    for (int d = 1; d <= guess; ++d) whole = whole && length(m.pool.guesses(m.text.back(), d + 1, 1 << 20)) <= fitted.g;

    // The rows of the guesses: all of them, or if there are too many chains, some of them.
    std::set<Tokens> allowed;
    if (fitted.g > 0)
      for (const Tokens& chain : m.pool.guesses(m.text.back(), guess + 1, 1 << 20))
        for (int d = 1; d <= std::min(length(chain), depth); ++d)
          allowed.insert(Tokens(chain.begin(), chain.begin() + d));
    const Rows rows = m.rows();
    std::size_t guessed = 0;
    REQUIRE(rows.size() >= planted.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const bool is_guessed = rows[i].candidate != Row::no_class;
      if (is_guessed) REQUIRE(allowed.count(rows[i].path) == 1);
      if (i < planted.size()) REQUIRE(rows[i].path == planted[i].path);
      REQUIRE(rows[i].wanted == (is_guessed || planted[i].wanted));
      REQUIRE(rows[i].reach == 0);
      guessed += is_guessed ? 1 : 0;
      seen.shared += is_guessed && i < planted.size() ? 1 : 0;
    }
    REQUIRE(guessed <= at(fitted.g * guess));
    if (whole) {
      REQUIRE(guessed == allowed.size());
      seen.whole += allowed.empty() ? 0 : 1;
    }
    seen.guessed += static_cast<long>(guessed);
  });
}

}  // namespace

TEST_CASE("the newest chains of every depth are guessed, in order") {
  long cut = 0;
  const int count = std::max(cases(2000) / 5, 100);
  for (int seed = 0; seed < count; ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    if (seed % 4 == 0) compare_levels<Lookahead<3, 2, 1>>(random, cut);
    if (seed % 4 == 1) compare_levels<Lookahead<1, 5, 2>>(random, cut);
    if (seed % 4 == 2) compare_levels<Lookahead<5, 3, 5>>(random, cut);
    if (seed % 4 == 3) compare_levels<Lookahead<1, 9, 20>>(random, cut);
  }
  MESSAGE("more chains than guesses in " << cut << " of " << count << " cases");
  CHECK(cut > count / 10);
  CHECK(cut < count * 9 / 10);
}

TEST_CASE("all leaf chains are guessed where there are few, beside any window") {
  Seen seen;
  for (int seed = 0; seed < std::max(cases(2000) / 50, 12); ++seed) {
    CAPTURE(seed);
    const auto s = static_cast<std::uint64_t>(seed);
    if (seed % 3 == 0) decode<Lookahead<3, 2, 1>>(s, seen);
    if (seed % 3 == 1) decode<Lookahead<5, 3, 5>>(s, seen);
    if (seed % 3 == 2) decode<Lookahead<7, 5, 20>>(s, seen);
  }
  MESSAGE(seen.steps << " steps, " << seen.whole << " with all chains, " << seen.guessed << " rows guessed, "
                     << seen.shared << " of them shared with the window");
  CHECK(seen.whole > seen.steps / 20);
  CHECK(seen.guessed > seen.steps);
  CHECK(seen.shared > 0);
}

TEST_CASE("as many guesses are planted as surely fit behind the window") {
  using Step = Lookahead<7, 5, 6>;
  Pool pool(32);
  Step step;
  Step::Tree tree;
  const Tokens prompt{1, 2, 3};
  step.start(pool, prompt);
  Random random(1);
  for (int i = 0; i < std::max(cases(2000), 1000); ++i) {
    const Shape shape{random.below(9), random.below(8), random.below(9), ShapeMode::published, false};
    const Limits limits{random.below(60), random.below(60), random.below(14), random.below(4)};
    step.plan(pool, shape, limits, tree);
    const auto fitted = state_of(step).shape;
    int wanted = fitted.w == 0 ? 1 : 0;
    for (int r = 0; r < fitted.n - 1; ++r)
      for (int j = 0; j < fitted.w; ++j) wanted += r == 0 || j == 0 || r == fitted.n - 2 ? 1 : 0;
    int best = 0;
    for (int g = 1; g <= std::min(shape.g, 6) && limits.depth >= 1 && limits.tokens_left >= 2; ++g)
      if (std::max(1, fitted.w * (fitted.n - 1)) + g * (fitted.n - 1) <= limits.rows &&
          wanted + g * (fitted.n - 1) <= limits.logit_rows)
        best = g;
    REQUIRE(fitted.g == best);
    step.abandon();
  }
}
