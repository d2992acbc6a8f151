/// Every phase of a step gives the same arrays, whoever runs it: one thread, threads that run freely, threads in turns.

#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include "cases.hpp"
#include "thread_group.hpp"

#include "lookahead/lookahead.hpp"
#include "lookahead/testing/oracle_model.hpp"

namespace {

using namespace lookahead;
using threads::Serial;
using threads::Threads;
using Token = std::int32_t;
using Tokens = std::vector<Token>;
using Oracle = testing::OracleModel<Token>;

/// Everything that the phases write, in one block of bytes that starts as zeros.
template <int W, int N, int G>
struct Machine {
  using State = detail::StepState<W, N, G, Token>;
  using Tree = TokenTreeStorage<Token, State::max_rows>;
  struct Data {
    State state;
    Tree tree;
    NGramPoolRef::Clock clock;
  };
  std::vector<Data> data = std::vector<Data>(1);
  std::vector<PoolSet> sets = std::vector<PoolSet>(64);
  std::unique_ptr<detail::StepScratch<W, N, G, Token>> scratch =
      std::make_unique<detail::StepScratch<W, N, G, Token>>();

  static_assert(std::has_unique_object_representations_v<detail::FittedShape>, "assigned whole: no padding");

  Machine() { std::memset(static_cast<void*>(data.data()), 0, sizeof(Data)); }
  State& state() { return data[0].state; }
  Tree& tree() { return data[0].tree; }
  NGramPoolRef pool() { return {sets.data(), static_cast<std::uint32_t>(sets.size()), &data[0].clock}; }

  [[nodiscard]] bool operator==(const Machine& other) const {
    return std::memcmp(data.data(), other.data.data(), sizeof(Data)) == 0 &&
           std::memcmp(sets.data(), other.sets.data(), sets.size() * sizeof(PoolSet)) == 0;
  }
};

/// Decodes random texts twice, serially and by `who`, and compares everything after every phase.
template <int W, int N, int G, class Who>
void compare(const Who& who, int texts) {
  for (int text = 0; text < texts; ++text) {
    CAPTURE(text);
    std::mt19937 random(static_cast<unsigned>(text));
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    testing::OracleOptions options;
    options.vocabulary = 2 + below(300);
    options.seed = static_cast<std::uint64_t>(text);
    options.repetition = 0.9;
    options.max_rows = 512;
    options.max_logit_rows = 512;
    Oracle model(options);
    Tokens prompt(static_cast<std::size_t>(1 + below(60)));
    for (Token& t : prompt) t = below(options.vocabulary);
    model.prefill(std::span<const Token>(prompt).first(prompt.size() - 1));

    Machine<W, N, G> one, many;
    const auto both = [&](auto phase) {
      phase(SerialGroup{}, one);
      who.run([&](const auto& group) { phase(group, many); });
      REQUIRE(one == many);
    };
    both([&](const auto& g, auto& m) {
      detail::start(g, m.state(), m.pool(), prompt.data(), static_cast<int>(prompt.size()), 7, *m.scratch);
    });
    for (int step = 0; step < 12; ++step) {
      CAPTURE(step);
      Shape shape{below(W + 2), 2 + below(N), below(G + 2), below(3) == 0 ? ShapeMode::published : ShapeMode::growth,
                  below(2) == 0};
      Limits limits;
      limits.rows = 1 + below(Machine<W, N, G>::State::max_rows);
      if (below(3) == 0) limits.logit_rows = 1 + below(20);
      limits.tokens_left = 1 + below(40);
      both([&](const auto& g, auto& m) { detail::plan(g, m.state(), m.pool(), shape, limits, m.tree(), *m.scratch); });
      const int rows = below(2 * one.tree().rows);
      for (auto* m : {&one, &many}) detail::cut(m->state(), m->tree(), rows);
      model.forward(one.tree().view());
      const auto top = [&](int row, Token* out, int count) {
        return model.top_tokens(row, std::span<Token>(out, static_cast<std::size_t>(count)));
      };
      both([&](const auto& g, auto& m) {
        detail::resolve(
            g, m.state(), m.tree(), [&](int row) { return model.next_token(row); }, top, [](Token) { return false; });
      });
      const detail::StepState<W, N, G, Token>& s = one.state();
      const auto kept =
          static_cast<int>(model.commit(std::span<const std::int32_t>(s.path, static_cast<std::size_t>(s.path_count))));
      both([&](const auto& g, auto& m) { detail::apply(g, m.state(), m.pool(), m.tree(), kept, *m.scratch); });
      if (below(6) == 0) {
        Tokens more(static_cast<std::size_t>(below(2 * s.max_pending)));
        for (Token& t : more) t = below(options.vocabulary);
        const Tokens pending(s.pending, s.pending + s.pending_count);
        const int room = 1 + below(s.max_pending);
        both([&](const auto& g, auto& m) {
          detail::append(g, m.state(), m.pool(), more.data(), static_cast<int>(more.size()), room, *m.scratch);
        });
        if (static_cast<std::size_t>(s.context_size) > model.context_size()) {
          model.prefill(pending);
          model.prefill(std::span<const Token>(more).first(more.size() - 1));
        }
      }
    }
  }
}

template <class Who>
void compare_all(const Who& who, int texts) {
  compare<15, 5, 15>(who, texts);
  compare<3, 2, 1>(who, texts);
  compare<1, 2, 0>(who, texts);
  compare<4, 4, 0>(who, texts);
  compare<1, 5, 3>(who, texts);
}

}  // namespace

TEST_CASE("threads that run freely write the same arrays as one thread") {
  compare_all(Threads{3, false}, std::min(cases(1000), 10000) / 500);
}

TEST_CASE("threads in turns write the same arrays as one thread, whatever their order") {
  for (const int size : {2, 3, 5}) compare_all(Threads{size, true}, std::min(cases(1000), 10000) / 1000);
}

TEST_CASE("one missing sync is caught") {
  // The first sync of start stands between the thread that forgets the old text and those that read how long it is.
  const Tokens prompt{1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7};
  const auto start_twice = [&](auto who) {
    auto m = std::make_unique<Machine<3, 2, 1>>();
    for (int request = 0; request < 2; ++request) {
      who(request, [&](const auto& g) {
        detail::start(g, m->state(), m->pool(), prompt.data(), static_cast<int>(prompt.size()), 7, *m->scratch);
      });
    }
    return m;
  };
  const auto serial = start_twice([](int, auto f) { f(SerialGroup{}); });
  for (const int skipped : {-1, 0}) {
    CAPTURE(skipped);
    const auto in_turns =
        start_twice([&](int request, auto f) { threads::run(3, true, f, request == 1 ? skipped : -1); });
    CHECK((*in_turns == *serial) == (skipped < 0));
  }
}
