// Plain Jacobi decoding is a special case: N = 2, a window that slides, no guesses.
#include <algorithm>
#include <cstdint>
#include <doctest/doctest.h>
#include <random>
#include <span>
#include <vector>

#include "cases.hpp"
#include "step_loop.hpp"

namespace {

using namespace step_loop;
using lookahead::Lookahead;
using lookahead::TokenTreeStorage;

constexpr Shape jacobi{1 << 30, 2, 0, ShapeMode::published, true};

// The model's choices behind a chain on top of the context.
Tokens choices(OracleModel<Token>& model, const Tokens& chain) {
  TokenTreeStorage<Token, 64> tree;
  tree.begin(static_cast<int>(model.context_size()), chain.data(), length(chain));
  for (int r = 0; r < length(chain); ++r) tree.want(r);
  model.forward(tree.view());
  Tokens chosen;
  for (int r = 0; r < length(chain); ++r) chosen.push_back(model.next_token(r));
  return chosen;
}

struct Request {
  OracleOptions options;
  Tokens prompt;
  std::uint64_t seed;
  explicit Request(Random& random) {
    options.seed = random();
    options.vocabulary = pick(random, std::vector{2, 3, 5, 20, 300});
    options.repetition = pick(random, std::vector{0.0, 0.7, 1.0});
    prompt = random_tokens(random, 1 + below(random, 30), options.vocabulary);
    seed = random();
  }
};

// The library beside a loop of ten lines, window cell by window cell.
template <int W>
void check_loop(std::uint64_t seed) {
  Random random(seed);
  const Request request(random);
  using Step = Lookahead<W, 2, 0>;
  Hooks<Step> none;
  Loop<Step> loop(request.options, 1, none);
  loop.start(request.prompt, request.seed, 40);
  const auto& window = loop.state().jacobi_window();

  OracleModel<Token> model(request.options);
  model.prefill(std::span(request.prompt).first(request.prompt.size() - 1));
  Tokens y(window.cell[0], window.cell[0] + W), text = request.prompt;
  const Tokens segment(window.segment, window.segment + W);
  while (!loop.ended()) {
    loop.step(jacobi, loop.limits());

    const Tokens next = choices(model, y);
    const std::size_t wanted = loop.truth().size() - text.size();
    std::size_t right = 1;
    while (right < std::min<std::size_t>(W, wanted) && y[right] == next[right - 1]) ++right;
    model.prefill(std::span(y).first(right));
    text.insert(text.end(), next.begin(), next.begin() + static_cast<std::ptrdiff_t>(right));
    for (std::size_t j = 0; j < W; ++j) y[j] = j + right - 1 < W ? next[j + right - 1] : segment[j];

    REQUIRE(loop.text() == text);
    if (!loop.ended()) REQUIRE(std::equal(y.begin(), y.end(), window.cell[0]));
  }
  REQUIRE(loop.steps <= 40);
}

}  // namespace

TEST_CASE("N = 2, sliding, without guesses: a Jacobi loop, cell by cell") {
  const int count = cases(2000) / 10;
  for (int seed = 0; seed < count; ++seed) {
    CAPTURE(seed);
    check_loop<1>(static_cast<std::uint64_t>(seed));
    check_loop<2>(static_cast<std::uint64_t>(seed));
    check_loop<5>(static_cast<std::uint64_t>(seed));
    check_loop<16>(static_cast<std::uint64_t>(seed));
    check_loop<40>(static_cast<std::uint64_t>(seed));
  }
}

// m equations with m unknowns, all updated in each sweep: the method as textbooks give it.
TEST_CASE("after t steps the first t tokens are right, and the guesses are those of Jacobi iteration") {
  constexpr int m = 24;
  using Step = Lookahead<m + 1, 2, 0>;
  const int count = cases(2000) / 10;
  int early = 0;
  for (int seed = 0; seed < count; ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    const Request request(random);
    Hooks<Step> none;
    Loop<Step> loop(request.options, 1, none);
    loop.start(request.prompt, request.seed, m);
    const auto& window = loop.state().jacobi_window();

    OracleModel<Token> model(request.options);
    model.prefill(std::span(request.prompt).first(request.prompt.size() - 1));
    Tokens unknowns(window.cell[0] + 1, window.cell[0] + 1 + m);
    int t = 0;
    for (; !loop.ended(); ++t) {
      Tokens chain{request.prompt.back()};
      chain.insert(chain.end(), unknowns.begin(), unknowns.end() - 1);
      unknowns = choices(model, chain);
      loop.step(jacobi, loop.limits());

      const int done = loop.tokens;
      REQUIRE(done >= t + 1);
      REQUIRE(std::equal(unknowns.begin(), unknowns.begin() + t + 1, loop.truth().begin() + length(request.prompt)));
      if (loop.ended()) break;
      for (int i = done; i < m; ++i) REQUIRE(unknowns[at(i)] == window.cell[0][i - done + 1]);
    }
    REQUIRE(t + 1 <= m);
    REQUIRE(unknowns == Tokens(loop.truth().end() - m, loop.truth().end()));
    early += static_cast<int>(t + 1 < m);
  }
  CHECK(early > 0);
}
