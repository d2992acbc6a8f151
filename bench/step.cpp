/// @file step.cpp
/// The algorithm's own time: plan + resolve + apply of a step. The model's time is not counted, nor that of reading its
/// results. Times are those of the thread on its core, so that other programs spoil the cache at most.

#include <algorithm>
#include <benchmark/benchmark.h>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <time.h>
#include <vector>

#include "lookahead/lookahead.hpp"
#include "lookahead/testing/oracle_model.hpp"

namespace {

using lookahead::Limits;
using lookahead::Shape;
using Step = lookahead::Lookahead<15, 5, 15>;
using Model = lookahead::testing::OracleModel<>;
using Microseconds = std::chrono::duration<double, std::micro>;

Microseconds now() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

constexpr int prompt_tokens = 512, warm_up_steps = 256, recycled = 8;

struct Times {
  Microseconds plan{}, resolve{}, apply{};
  [[nodiscard]] Microseconds sum() const { return plan + resolve + apply; }
};

/// A request in full swing. Its language leaves many tokens open, so that trees are as full as their limits allow.
class Sequence {
 public:
  Sequence(std::uint64_t seed, int steps)
      : model_({.vocabulary = 512,
                .seed = seed,
                .repetition = 0.8,
                .capacity = prompt_tokens + (steps + warm_up_steps) * Step::max_block + Step::max_rows,
                .max_rows = Step::max_rows,
                .max_logit_rows = Step::max_rows}) {
    std::vector<std::int32_t> prompt(prompt_tokens);
    for (auto& token : prompt) token = static_cast<std::int32_t>((seed = seed * 6364136223846793005U + 1) >> 55);
    model_.prefill(std::span(prompt).first(prompt.size() - 1));
    step_.start(pool_, prompt, seed);
  }

  Times advance(const Shape& shape, const Limits& limits) {
    Times times;
    const auto t0 = now();
    step_.plan(pool_, shape, limits, tree_);
    times.plan = now() - t0;

    model_.forward(tree_.view());
    for (const std::int32_t row : tree_.view().wanted()) top_count_[row] = model_.top_tokens(row, std::span(top_[row]));

    const auto t1 = now();
    const auto proposal = step_.resolve([&](int row) { return top_[row][0]; },
                                        [&](int row, std::span<std::int32_t> out) {
                                          const std::size_t n = std::min(out.size(), top_count_[row]);
                                          std::copy_n(top_[row], n, out.begin());
                                          return n;
                                        },
                                        [](std::int32_t) { return false; });
    times.resolve = now() - t1;

    const std::size_t kept = model_.commit(proposal.path);
    const auto t2 = now();
    step_.apply(pool_, kept);
    times.apply = now() - t2;
    return times;
  }

  [[nodiscard]] const Step::Report& report() const { return step_.report(); }

 private:
  Model model_;
  lookahead::NGramPool<> pool_;
  Step step_;
  Step::Tree tree_;
  std::int32_t top_[Step::max_rows][recycled];
  std::size_t top_count_[Step::max_rows];
};

/// Argument 0: rows, 0 for the published shape. Argument 1: sequences, which take turns, so that each finds the caches
/// as the others left them.
void step(benchmark::State& state) {
  const auto rows = static_cast<std::int32_t>(state.range(0));
  const auto count = static_cast<std::size_t>(state.range(1));
  const Shape shape = rows == 0 ? Shape::published() : Shape{};
  Limits limits;
  if (rows != 0) limits.rows = rows;

  std::vector<std::unique_ptr<Sequence>> sequences;
  for (std::size_t i = 0; i < count; ++i) {
    sequences.push_back(
        std::make_unique<Sequence>(i + 1, static_cast<int>(state.max_iterations) / static_cast<int>(count) + 1));
    for (int k = 0; k < warm_up_steps; ++k) sequences.back()->advance(shape, limits);
  }

  std::vector<Times> all;
  double tree_rows = 0, tokens = 0;
  std::size_t turn = 0;
  for (auto _ : state) {
    Sequence& sequence = *sequences[turn++ % count];
    all.push_back(sequence.advance(shape, limits));
    state.SetIterationTime(std::chrono::duration<double>(all.back().sum()).count());
    tree_rows += sequence.report().rows;
    tokens += sequence.report().tokens;
  }
  const auto quantile = [&](double q, auto part) {
    std::vector<double> values;
    for (const Times& times : all) values.push_back(part(times).count());
    std::ranges::sort(values);
    return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1))];
  };
  const auto sum = [](const Times& t) { return t.sum(); };
  state.counters["median_us"] = quantile(0.5, sum);
  state.counters["p99_us"] = quantile(0.99, sum);
  state.counters["plan_us"] = quantile(0.5, [](const Times& t) { return t.plan; });
  state.counters["resolve_us"] = quantile(0.5, [](const Times& t) { return t.resolve; });
  state.counters["apply_us"] = quantile(0.5, [](const Times& t) { return t.apply; });
  state.counters["rows"] = benchmark::Counter(tree_rows, benchmark::Counter::kAvgIterations);
  state.counters["tokens"] = benchmark::Counter(tokens, benchmark::Counter::kAvgIterations);
}

}  // namespace

BENCHMARK(step)
    ->ArgNames({"rows", "sequences"})
    ->ArgsProduct({{0, 16, 64, 120}, {1, 64}})
    ->Iterations(8192)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

BENCHMARK_MAIN();
