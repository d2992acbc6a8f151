// The promise: whatever a step spends, the text is plain decoding's. Random requests, each checked step by step.
#include <cstdint>
#include <cstdlib>
#include <doctest/doctest.h>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "cases.hpp"
#include "step_loop.hpp"

namespace {

using namespace step_loop;
using lookahead::Lookahead;

template <class Step>
Yield run(std::uint64_t seed) {
  Hooks<Step> none;
  return run_case<Step>(seed, none);
}

constexpr Yield (*menu[])(std::uint64_t) = {
    run<Lookahead<1, 2, 0>>, run<Lookahead<3, 2, 1>>, run<Lookahead<1, 5, 2>>,   run<Lookahead<4, 4, 0>>,
    run<Lookahead<5, 3, 5>>, run<Lookahead<7, 5, 7>>, run<Lookahead<15, 5, 15>>, run<Lookahead<20, 7, 20>>};

}  // namespace

TEST_CASE("random requests: every text is plain decoding's") {
  // LOOKAHEAD_SEED=n runs case n alone.
  const char* const only = std::getenv("LOOKAHEAD_SEED");
  const std::uint64_t first = only == nullptr ? 0 : std::stoull(only);
  const std::uint64_t count = only == nullptr ? static_cast<std::uint64_t>(cases(2000)) : 1;
  Yield yield;
  int failures = 0;
  for (std::uint64_t seed = first; seed < first + count && failures < 10; ++seed) {
    try {
      const Yield one = menu[seed % std::size(menu)](seed);
      yield.steps += one.steps;
      yield.tokens += one.tokens;
    } catch (const std::exception& e) {
      ++failures;
      FAIL_CHECK("LOOKAHEAD_SEED=" << seed << ": " << std::string(e.what()));
    }
  }
  // The text is plain decoding's in fewer passes, or there is no point.
  if (only == nullptr) CHECK(4 * yield.tokens > 5 * yield.steps);
  MESSAGE(yield.tokens << " tokens in " << yield.steps << " steps");
}

// What the report says of growth, against what growth has noted of every row.
TEST_CASE("a row's reach is shared out among its children, and the sum is what the step expects") {
  using Step = lookahead::Lookahead<7, 5, 7, Token>;
  auto one = std::make_unique<Step>();
  static_assert(std::is_standard_layout_v<Step>);
  const auto* const state = reinterpret_cast<const lookahead::detail::StepState<7, 5, 7, Token>*>(one.get());
  auto tree = std::make_unique<Step::Tree>();
  OracleOptions options;
  options.vocabulary = 40;
  options.repetition = 0.97;
  options.capacity = 4000;
  OracleModel<Token> model(options);
  Pool pool;
  const Token first = 0;
  one->start(pool, std::span(&first, 1));
  int shared = 0;
  for (int step = 0; step < 100; ++step) {
    const Shape shape{step % 8, 5, 7};
    one->plan(pool, shape, {60, 60, 20, 100}, *tree);
    std::vector<std::uint64_t> children(at(tree->rows));
    std::uint64_t sum = 0;
    for (int r = tree->root + 1; r < tree->rows; ++r) {
      const std::uint64_t reach = state->notes.reach[r];
      CHECK((reach > 0) == (state->notes.candidate[r] != state->notes.no_class));
      CHECK((reach == 0 || tree->view().is_wanted(r)));
      children[at(tree->parent[r])] += reach;
      sum += std::min<std::uint64_t>(reach * state->calibration.factor() >> 16, ~0U);
      shared += static_cast<int>(reach > 0 && r < tree->root + shape.w);
    }
    for (int r = tree->root; r < tree->rows; ++r)
      CHECK(children[at(r)] <= (r == tree->root ? 0xFFFFFFFFU : state->notes.reach[r]));
    CHECK(one->report().expected == 1 + static_cast<double>(sum) / 0x1p32);

    model.forward(tree->view());
    const auto proposal = one->resolve([&](int row) { return model.next_token(row); },
                                       [&](int row, std::span<Token> out) { return model.top_tokens(row, out); },
                                       [](Token) { return false; });
    one->apply(pool, model.commit(proposal.path));
  }
  CHECK(shared > 0);
}
