// The window, beside the naive one: its cells, its n-grams, its rows in a tree.
#include <algorithm>
#include <cstdint>
#include <doctest/doctest.h>
#include <numeric>
#include <set>
#include <vector>

#include "cases.hpp"
#include "mirror.hpp"

#include "lookahead/jacobi_window.hpp"

namespace {

using namespace mirror;
using lookahead::JacobiWindow;

template <class Window>
naive::Window naive_beside(const Window& window, bool slides) {
  return {Window::width, Window::levels + 1, slides,
          [&](int count) { return Tokens(window.segment, window.segment + count); }};
}

template <class Window>
void require_equal_cells(const Window& window, const naive::Window& naive, int w, int n) {
  Tokens cells, wanted;
  for (int r = 0; r < n - 1; ++r)
    for (int j = 0; j < w; ++j) {
      cells.push_back(window.cell[r][j]);
      wanted.push_back(naive.token(r, j));
    }
  REQUIRE(cells == wanted);
}

/// Rolls both windows through random steps, shapes and root changes.
template <int W, int N>
void roll_both(Random& random) {
  const Tokens prompt = random.tokens(1 + random.below(40), 1000);
  JacobiWindow<W, N> window;
  window.start(prompt.data(), length(prompt), random.bits());
  const bool slides = random.one_in(2);
  naive::Window naive = naive_beside(window, slides);
  naive.start(prompt.back());

  const bool fixed = random.one_in(3);
  int w = W, n = N;
  for (int step = 0; step < 30; ++step) {
    CAPTURE(step);
    const auto new_extents = [&] {
      w = 1 + random.below(W);
      n = 2 + random.below(N - 1);
    };
    if (!fixed && random.one_in(3)) new_extents();
    if (random.one_in(5)) {  // a step without the window
      const Token root = random.below(1000);
      window.cell[0][0] = root;
      naive.freeze(root);
    }
    if (!fixed && random.one_in(5)) {  // a step that was planned and dropped
      const int old_w = w, old_n = n;
      new_extents();
      window.prepare(w, n);
      naive::Window dropped = naive;
      dropped.plant(w, n);
      require_equal_cells(window, dropped, w, n);
      w = old_w;
      n = old_n;
    }
    window.prepare(w, n);
    naive.plant(w, n);
    require_equal_cells(window, naive, w, n);

    const Tokens next = random.tokens(w, 1000), accepted = random.tokens(1 + random.below(W + 2), 1000);
    window.resize(w, n);
    std::vector<Tokens> grams;
    for (int j = 0; j < w; ++j) {
      if (!window.ripe(j)) continue;
      grams.emplace_back();
      for (int r = 0; r < n - 1; ++r) grams.back().push_back(window.cell[r][j]);
      grams.back().push_back(next[at(j)]);
    }
    REQUIRE(grams == naive.roll(next, accepted));
    window.roll(lookahead::SerialGroup{}, next.data(), slides ? length(accepted) - 1 : 0, accepted.back());
  }
}

/// Real steps with a window alone.
template <class Step>
void decode(std::uint64_t seed, int& steps) {
  steps += run_case<Step>(seed, {Step::window, Step::ngram, 0, ShapeMode::growth, false},
                          [](Mirror<Step>& m) { REQUIRE(m.rows() == m.window_rows()); });
}

/// The window that fits is the largest part of the shape whose rows fit even if no two cells share one. A window that
/// nobody can use is off.
int columns_that_fit(const Shape& shape, int n, const Limits& limits) {
  if (limits.rows <= 1 || limits.tokens_left <= 1) return 0;
  int best = 0;
  for (int w = 1; w <= shape.w; ++w) {
    int wanted = 0;
    for (int r = 0; r < n - 1; ++r)
      for (int j = 0; j < w; ++j) wanted += r == 0 || j == 0 || r == n - 2 ? 1 : 0;
    const int deepest = w - 1 + n - 2;
    if (w * (n - 1) <= limits.rows && wanted <= limits.logit_rows && deepest <= limits.depth) best = w;
  }
  return best;
}

}  // namespace

TEST_CASE("cells and n-grams are those of the naive window") {
  for (int seed = 0; seed < std::max(cases(2000) / 20, 10); ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    roll_both<1, 2>(random);
    roll_both<3, 2>(random);
    roll_both<1, 5>(random);
    roll_both<5, 4>(random);
    roll_both<15, 5>(random);
    roll_both<20, 7>(random);
    roll_both<2, 32>(random);
  }
}

TEST_CASE("a window starts as one chain of prompt tokens at a seeded place") {
  using Window = JacobiWindow<4, 5>;
  constexpr int segment = 4 + 5 - 2;
  for (const int count : {1, 2, 6, 7, 8, 20}) {
    CAPTURE(count);
    Tokens prompt(at(count));
    std::iota(prompt.begin(), prompt.end(), 100);
    std::set<Token> places;
    for (std::uint64_t seed = 0; seed < 1000; ++seed) {
      Window window;
      window.start(prompt.data(), count, seed);
      const int place = window.segment[0] - 100;
      places.insert(place);
      for (int i = 0; i < segment; ++i) REQUIRE(window.segment[i] == 100 + (place + i) % count);
      for (int r = 0; r < Window::levels; ++r)
        for (int j = 0; j < Window::width; ++j)
          REQUIRE(window.cell[r][j] == (r + j == 0 ? prompt.back() : window.segment[r + j]));
      Window again;
      again.start(prompt.data(), count, seed);
      REQUIRE(std::ranges::equal(again.segment, window.segment));
    }
    // A long prompt is not wrapped round, and every place comes up.
    CHECK(length(places) == (count >= segment ? count - segment + 1 : count));
  }
}

TEST_CASE("a tree has the window's rows, merged, in order, wanted as they must be, in every shape") {
  int steps = 0;
  for (int seed = 0; seed < std::max(cases(2000) / 100, 10); ++seed) {
    CAPTURE(seed);
    const auto s = static_cast<std::uint64_t>(seed);
    decode<Lookahead<1, 2, 0>>(s, steps);
    decode<Lookahead<4, 4, 0>>(s, steps);
    decode<Lookahead<7, 5, 7>>(s, steps);
  }
  MESSAGE(steps << " steps");
}

TEST_CASE("as many columns are planted as surely fit") {
  using Step = Lookahead<7, 5, 2>;
  Pool pool(32);
  Step step;
  Step::Tree tree;
  const Tokens prompt{1, 2, 3};
  step.start(pool, prompt);
  Random random(1);
  for (int i = 0; i < std::max(cases(2000), 1000); ++i) {
    const Shape shape{random.below(9), random.below(8), random.below(4), ShapeMode{random.one_in(2)}, false};
    const Limits limits{random.below(40), random.below(20), random.below(14), random.below(4)};
    const int n = std::clamp(shape.n, 2, 5);
    step.plan(pool, shape, limits, tree);
    const auto fitted = state_of(step).shape;
    const bool complete = limits.rows >= 1 && limits.logit_rows >= 1 && limits.tokens_left >= 1;
    INFO(shape.w << ' ' << shape.n << ": " << limits.rows << ' ' << limits.logit_rows << ' ' << limits.depth << ' '
                 << limits.tokens_left);
    REQUIRE(fitted.w == (complete ? columns_that_fit({std::min(shape.w, 7)}, n, limits) : 0));
    if (complete) REQUIRE(fitted.n == n);
    step.abandon();
  }
}
