/// @file calibration.cpp
/// Whether what steps are expected to yield is what they yield: in total, by class of candidate, by run, by reach.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engines/gguf.hpp"
#include "engines/llama_engine.hpp"
#include "engines/tokenizer.hpp"
#include "model_options.hpp"
#include "prompt_sets.hpp"

#include "lookahead/lookahead.hpp"

namespace {

using lookahead::CandidateClass;
using lookahead::Estimates;
using lookahead::engines::LlamaEngine;
using Tokens = std::vector<std::int32_t>;
using Step = lookahead::Lookahead<15, 5, 15>;

constexpr std::array sources{"text", "generated", "window", "recycled"};

/// How much was tried, as Estimates weighs it, how often it was right, and how often it was expected to be.
struct Count {
  double trials = 0, hits = 0, expected = 0;
  void add(double t, double h, double e) {
    trials += t;
    hits += h;
    expected += e;
  }
  void print(const char* name) const {
    if (trials > 0)
      std::printf("%-26s %9.0f %8.3f %8.3f%s\n", name, trials, expected / trials, hits / trials,
                  trials < 500 ? "  few" : "");
  }
};

/// The first steps of each request that tried a class, added up over requests: what start values are measured by.
struct Firsts {
  static constexpr int steps = 2;
  std::array<int, CandidateClass::count> seen{};  ///< in this request
  std::array<Count, CandidateClass::count> classes{};

  void add(std::size_t id, double trials, double hits) {
    if (trials > 0 && seen[id]++ < steps) classes[id].add(trials, hits, 0);
  }

  void print() const {
    constexpr int lengths = lookahead::context_length_count;
    std::printf("\nstart values in 1/256, and by how many trials\n%-20s", "source, rank, context");
    for (int l = 0; l < lengths; ++l) std::printf(" %12d", lookahead::context_length(l));
    std::printf("\n");
    for (std::size_t source = 0; source < sources.size(); ++source)
      for (int rank = 0; rank < 8; ++rank) {
        const auto of = [&](int l) -> const Count& {
          return classes[CandidateClass::of(l, static_cast<lookahead::Source>(source), rank).id];
        };
        double all = 0;
        for (int l = 0; l < lengths; ++l) all += of(l).trials;
        if (all == 0) continue;
        std::printf("%-20s", (sources[source] + (", " + std::to_string(rank))).c_str());
        for (int l = 0; l < lengths; ++l)
          std::printf(" %4.0f (%5.0f)", of(l).trials > 0 ? 256 * of(l).hits / of(l).trials : 0, of(l).trials);
        std::printf("\n");
      }
  }
};

struct Account {
  Firsts& firsts;
  double steps = 0, tokens = 0, expected = 0, rows = 0;
  std::array<Count, CandidateClass::count> classes{};
  std::array<Count, Estimates::run_class_count> runs{};
  std::array<Count, 20> reach{};
};

/// What the last step has taught the estimates, class by class.
void compare(const Estimates& before, const Estimates& after, Account& a) {
  for (std::size_t id = 0; id < CandidateClass::count; ++id) {
    double all_trials = 0, all_hits = 0;
    for (std::size_t run = 0; run < Estimates::run_class_count; ++run) {
      const Estimates::Count &b = before.in_run[run][id], &n = after.in_run[run][id];
      if (n.trials <= b.trials) continue;  // nothing, or halved
      const double trials = (n.trials - b.trials) / double{Estimates::unit};
      const double hits = (n.hits - b.hits) / double{Estimates::unit};
      const double expected = trials * before.probability[run][id] * 0x1p-32;
      a.classes[id].add(trials, hits, expected);
      a.runs[run].add(trials, hits, expected);
      all_trials += trials;
      all_hits += hits;
    }
    a.firsts.add(id, all_trials, all_hits);
  }
}

void decode(LlamaEngine& engine, lookahead::NGramPool<std::int32_t>& pool, const Tokens& prompt, std::size_t tokens,
            std::size_t rows, const lookahead::Shape& shape, const Tokens& end_tokens, Account& a) {
  const auto step = std::make_unique<Step>();
  const auto tree = std::make_unique<Step::Tree>();
  engine.truncate(0);
  engine.prefill(std::span(prompt).first(prompt.size() - 1));
  step->start(pool, prompt);
  a.firsts.seen.fill(0);
  std::size_t done = 0;
  for (bool stopped = false; done < tokens && !stopped;) {
    step->plan(pool, shape,
               {.rows = static_cast<std::int32_t>(rows), .tokens_left = static_cast<std::int32_t>(tokens - done)},
               *tree);
    const lookahead::RowOffer offer = step->offer();
    std::vector<double> gain;
    for (std::size_t i = 0; i < offer.reach.size(); ++i) gain.push_back(offer.gain(i) * 0x1p-32);
    engine.forward(tree->view());
    const auto proposal =
        step->resolve([&](int row) { return engine.next_token(row); },
                      [&](int row, std::span<std::int32_t> out) { return engine.top_tokens(row, out); },
                      [&](std::int32_t t) { return std::ranges::find(end_tokens, t) != end_tokens.end(); });
    stopped = proposal.stopped;
    std::vector<bool> reached(static_cast<std::size_t>(tree->rows));
    for (const std::int32_t row : proposal.path) reached[static_cast<std::size_t>(row)] = true;
    for (std::size_t i = 0; i < gain.size(); ++i)
      a.reach[std::min(a.reach.size() - 1, static_cast<std::size_t>(gain[i] * static_cast<double>(a.reach.size())))]
          .add(1, reached[static_cast<std::size_t>(offer.fixed) + i] ? 1 : 0, gain[i]);
    const Estimates before = step->estimates();
    step->apply(pool, engine.commit(proposal.path));
    compare(before, step->estimates(), a);
    a.steps += 1;
    a.tokens += step->report().tokens;
    a.expected += step->report().expected;
    a.rows += step->report().rows;
    done += static_cast<std::size_t>(step->report().tokens);
  }
}

void print_details(const Account& a) {
  constexpr const char* head = "%-26s %9s %8s %8s\n";
  std::printf(head, "class: context, source", "trials", "expected", "right");
  for (std::size_t id = 0; id < CandidateClass::count; ++id) {
    const CandidateClass c{static_cast<std::uint8_t>(id)};
    const std::string name = std::to_string(lookahead::context_length(c.length_index())) + ", " +
                             sources[static_cast<std::size_t>(c.source())] + ", rank " + std::to_string(c.rank());
    a.classes[id].print(name.c_str());
  }
  std::printf(head, "run", "trials", "expected", "right");
  constexpr std::array<const char*, Estimates::run_class_count> runs{"0", "1", "2 to 5", "6 and more"};
  for (std::size_t r = 0; r < runs.size(); ++r) a.runs[r].print(runs[r]);
  std::printf(head, "expected of a row", "rows", "expected", "reached");
  for (std::size_t i = 0; i < a.reach.size(); ++i) {
    char name[32];
    const auto bins = static_cast<double>(a.reach.size());
    std::snprintf(name, sizeof name, "%.2f to %.2f", static_cast<double>(i) / bins, static_cast<double>(i + 1) / bins);
    a.reach[i].print(name);
  }
}

/// The reliability of `expected of a row`, as an SVG.
void plot(const Account& a, const std::string& path) {
  FILE* const gnuplot = popen("gnuplot", "w");
  if (gnuplot == nullptr) throw lookahead::InvalidArgument("gnuplot cannot be run: install it, or leave out --plot");
  std::fprintf(gnuplot,
               "set terminal svg size 480,400\nset output '%s'\nset xlabel 'expected'\nset ylabel 'reached'\n"
               "set key left\nplot x title 'as expected', '-' with linespoints title 'rows'\n",
               path.c_str());
  for (const Count& c : a.reach)
    if (c.trials >= 30) std::fprintf(gnuplot, "%f %f\n", c.expected / c.trials, c.hits / c.trials);
  std::fprintf(gnuplot, "e\n");
  if (pclose(gnuplot) != 0) throw lookahead::InvalidArgument("gnuplot could not write " + path + ": check the folder");
}

}  // namespace

int main(int argc, char** argv) {
  lookahead::examples::ModelOptions model;
  model.path = "examples/models/cpython-6m-q8_0.gguf";
  std::vector<std::string> sets = {"code", "docs"};
  std::vector<std::size_t> rows = {16, 64};
  std::size_t tokens = 128, every = 1;
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  std::string svg;
  bool details = false, keep_pool = false, window = false, starts = false;
  std::size_t slots = lookahead::PoolMemory::default_slots;
  CLI::App app("Expected and real tokens per step; run it in the root of the repository.");
  app.option_defaults()->always_capture_default();
  model.declare(app);
  app.add_option("--sets", sets, "code, docs, humaneval, chat, random")
      ->delimiter(',')
      ->check(CLI::IsMember(lookahead::bench::prompt_sets));
  app.add_option("--rows", rows, "Row limits")->delimiter(',')->check(CLI::Range(2, Step::max_rows));
  app.add_option("--tokens", tokens, "Most tokens for each prompt")->check(CLI::PositiveNumber);
  app.add_option("--every", every, "Take every so many-th prompt of a set")->check(CLI::PositiveNumber);
  app.add_option("--threads", threads, "Threads")->check(CLI::Range(1, 256));
  app.add_option("--pool-slots", slots, "Entries of the pool")
      ->check(CLI::Range(std::size_t{1}, lookahead::PoolMemory::max_slots));
  app.add_flag("--keep-pool", keep_pool, "Keeps the pool from prompt to prompt");
  app.add_option("--plot", svg, "Writes the reliability of the last table here, as SVG; needs gnuplot");
  app.add_flag("--details", details, "Tables by class, by run, by what a row is expected to yield");
  app.add_flag("--starts", starts,
               "Prints how often a class was right in the first two steps of a request that tried it, all sets and "
               "limits together: the start values of estimates.hpp are such figures");
  app.add_flag("--window", window, "With a (7, 4) window");
  CLI11_PARSE(app, argc, argv);
  try {
    const lookahead::engines::GgufFile file = model.open();
    const lookahead::engines::Tokenizer tokenizer(file);
    LlamaEngine engine(file, {.threads = threads, .weights = model.weights});
    const Tokens end_tokens(tokenizer.eos().begin(), tokenizer.eos().end());
    std::printf("%s, %zu tokens a prompt\n", model.describe(file).c_str(), tokens);
    const lookahead::Shape shape = window ? lookahead::Shape{.w = 7, .n = 4} : lookahead::Shape{};
    Firsts firsts;
    for (const std::string& set : sets) {
      const std::vector<Tokens> prompts = lookahead::bench::load_prompts(set, file, tokenizer);
      for (const std::size_t limit : rows) {
        Account a{firsts};
        lookahead::NGramPool<std::int32_t> pool(slots);
        for (std::size_t p = 0; p < prompts.size(); p += every) {
          if (!keep_pool) pool.reset();
          decode(engine, pool, prompts[p], tokens, limit, shape, end_tokens, a);
        }
        std::printf("%s, at most %zu rows: %.2f tokens a step, expected %.2f (%+.1f%%), %.1f rows\n", set.c_str(),
                    limit, a.tokens / a.steps, a.expected / a.steps, 100 * (a.expected / a.tokens - 1),
                    a.rows / a.steps);
        if (details) print_details(a);
        if (!svg.empty()) plot(a, svg);
        std::fflush(stdout);
      }
    }
    if (starts) firsts.print();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "calibration: %s\n", error.what());
    return 1;
  }
}
