#pragma once
/// @file mirror.hpp
/// A request that `Lookahead` decodes and, step by step, the naive window and pool beside it. The tests of the window,
/// of growth and of the published shape say what a tree must hold; what comes between two trees is here.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <iterator>
#include <map>
#include <ostream>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "naive_pool.hpp"
#include "naive_window.hpp"
#include "random.hpp"

#include "lookahead/lookahead_step.hpp"
#include "lookahead/testing/oracle_model.hpp"

namespace mirror {

using ::Random;
using lookahead::CandidateClass;
using lookahead::Limits;
using lookahead::Lookahead;
using lookahead::Shape;
using lookahead::ShapeMode;
using lookahead::testing::OracleModel;
using lookahead::testing::OracleOptions;
using naive::Class;
using naive::Token;
using naive::Tokens;
using Pool = lookahead::NGramPool<Token>;

constexpr std::size_t at(int i) { return static_cast<std::size_t>(i); }
constexpr int length(const auto& range) { return static_cast<int>(range.size()); }

inline Tokens joined(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// What the pool files behind a context under; oldest token first.
inline std::uint64_t hash_of(const Tokens& context) {
  lookahead::ContextHash hash;
  for (auto t = context.rbegin(); t != context.rend(); ++t) hash.push(static_cast<std::uint32_t>(*t));
  return hash.value();
}

/// The library's name of a class.
inline CandidateClass in_library(const Class& c) {
  constexpr int lengths[] = {1, 2, 3, 4, 6, 9, 13};
  const auto index = std::ranges::find(lengths, c.length) - std::begin(lengths);
  return CandidateClass::of(static_cast<int>(index), static_cast<lookahead::Source>(c.source), c.rank);
}

/// All classes that exist.
inline const std::vector<Class>& all_classes() {
  static const std::vector<Class> all = [] {
    std::vector<Class> classes;
    for (const int length : {1, 2, 3, 4, 6, 9, 13})
      for (const auto source :
           {naive::Source::text, naive::Source::generated, naive::Source::window, naive::Source::recycled})
        for (int rank = 0; rank < 8; ++rank) classes.push_back({length, source, rank});
    return classes;
  }();
  return all;
}

/// Estimates as plain counts, in 1/256 of an observation.
class Estimates {
 public:
  struct Count {
    std::uint64_t hits, trials;
    void add(bool hit, std::uint64_t weight) {
      hits += hit ? 256 : 0;
      trials += weight;
      if (trials >= 400 * 256) *this = {hits / 2, trials / 2};
    }
  };

  /// A class in a run starts from the class in all of them, for three observations. Entries have a part of it.
  std::uint64_t operator()(const Class& c, int run, const naive::Seen& seen = {}) const {
    const Count all = count(c);
    const auto found = in_runs_.find({c, kind(run)});
    const Count here = found != in_runs_.end() ? found->second : Count{0, 0};
    const std::uint64_t first = (all.hits << 32) / all.trials;
    const std::uint64_t alone =
        std::min(((here.hits << 32) + 3 * 256 * first) / (here.trials + 3 * 256), naive::largest_estimate);
    return std::min(alone * part(seen) / 256, naive::largest_estimate);
  }
  void score(const Class& c, int run, const naive::Seen& seen, bool hit) {
    Count all = count(c);
    all.add(hit, part(seen));
    counts_[c] = all;
    in_runs_[{c, kind(run)}].add(hit, part(seen));
  }
  void set(const Class& c, Count n) { counts_[c] = n; }
  void set(const Class& c, int run, Count n) { in_runs_[{c, kind(run)}] = n; }

  static int kind(int run) { return run == 0 ? 0 : run == 1 ? 1 : run <= 5 ? 2 : 3; }

 private:
  // In 1/256: (times - 1/2) / of, as a part of what is so for an entry seen once, alone; 3/8 of what exceeds it.
  static std::uint64_t part(const naive::Seen& seen) {
    const int all = 256 * (2 * seen.times - 1) / seen.of;
    return static_cast<std::uint64_t>(std::min(all, 256) + std::max(all - 256, 0) * 3 / 8);
  }
  [[nodiscard]] Count count(const Class& c) const {
    const auto found = counts_.find(c);
    return found != counts_.end() ? found->second
                                  : Count{8 * lookahead::Estimates::start_value(in_library(c)), 8 * 256};
  }
  std::map<Class, Count> counts_;
  std::map<std::pair<Class, int>, Count> in_runs_;
};

/// A row behind the root.
struct Row {
  static constexpr int no_class = 255;
  Tokens path;  ///< from the root, root excluded
  bool wanted = false;
  std::uint64_t reach = 0;   ///< Q0.32; 0 where no candidate backs the row
  int candidate = no_class;  ///< id of the class of that candidate
  bool operator==(const Row&) const = default;
};
using Rows = std::vector<Row>;

inline std::ostream& operator<<(std::ostream& out, const Rows& rows) {
  out << rows.size() << " rows";
  for (const Row& row : rows) {
    out << "\n  ";
    for (const Token t : row.path) out << t << ' ';
    out << (row.wanted ? "wanted" : "-") << " reach " << row.reach << " class " << row.candidate;
  }
  return out;
}

/// What `Lookahead` keeps to itself: its first member.
template <int W, int N, int G>
auto& state_of(Lookahead<W, N, G, Token>& step) {
  static_assert(std::is_standard_layout_v<Lookahead<W, N, G, Token>>);
  return reinterpret_cast<lookahead::detail::StepState<W, N, G, Token>&>(step);
}

/// One request, twice.
template <class Step>
class Mirror {
 public:
  static constexpr int W = Step::window, N = Step::ngram, G = Step::guesses;

  /// `top_count` is how many of a row's best tokens the engine gives, at most.
  Mirror(const OracleOptions& options, const Tokens& prompt, std::uint64_t seed, bool slides, int top_count,
         Pool& library_pool)
      : text(prompt),
        model_(options),
        pool_(library_pool),
        window_(W, N, slides, [this](int) { return Tokens(std::begin(core().segment), std::end(core().segment)); }),
        planned_(window_),
        top_count_(at(top_count)) {
    model_.prefill(std::span(text).first(text.size() - 1));
    step_.start(pool_, text, seed);
    pool.add_text(text, text.size());
    window_.start(text.back());
  }
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  Tokens text;          ///< the prompt and all accepted tokens
  naive::Pool pool;     ///< what the library's pool must hold
  Estimates estimates;  ///< what the library's estimates must be
  int run = 0;          ///< the last so many tokens were the best candidates of their places

  // The planned step.
  Shape shape;
  Limits limits;
  typename Step::Tree tree;

  void append(const Tokens& more) {
    Tokens cached = joined(Tokens(step_.pending().begin(), step_.pending().end()), more);
    cached.resize(step_.append(pool_, more));
    model_.prefill(cached);
    text = joined(text, more);
    pool.add_text(text, more.size());
    window_.freeze(text.back());
    if (!more.empty()) run = 0;
  }

  /// `in_run` holds for a run of 0, 1, 2 to 5, and more.
  void set_estimate(const Class& c, Estimates::Count n, const std::array<Estimates::Count, 4>& in_run) {
    auto& library = state_of(step_).estimates;
    const int id = in_library(c).id;
    const auto counts = [](const Estimates::Count& count) {
      return lookahead::Estimates::Count{static_cast<std::uint32_t>(count.hits),
                                         static_cast<std::uint32_t>(count.trials)};
    };
    library.all[id] = counts(n);
    estimates.set(c, n);
    constexpr int runs[] = {0, 1, 2, 6};
    for (std::size_t i = 0; i < 4; ++i) {
      library.in_run[i][id] = counts(in_run[i]);
      estimates.set(c, runs[i], in_run[i]);
      library.probability[i][id] = static_cast<std::uint32_t>(estimates(c, runs[i]));
    }
  }

  void plan(const Shape& new_shape, const Limits& new_limits) {
    shape = new_shape;
    limits = new_limits;
    step_.plan(pool_, shape, limits, tree);
    planned_ = window_;
    wanted_.clear();
    if (fitted().w > 0) wanted_ = planned_.plant(fitted().w, fitted().n);
  }

  void abandon() { step_.abandon(); }

  /// The engine evaluates the tree, the step's first `most` tokens are taken, and the naive parts follow.
  void finish(std::size_t most) {
    const auto view = tree.view();
    if (!view.empty()) model_.forward(view);
    const auto best = [&](int row, std::span<Token> out) {
      return model_.top_tokens(row, out.first(std::min(out.size(), top_count_)));
    };
    Tokens last;
    for (int j = 0; j < fitted().w; ++j) {
      int row = view.root();
      for (const Token t : planned_.path(fitted().n - 2, j)) row = view.child(row, t);
      last.push_back(model_.next_token(row));
    }
    std::map<int, Tokens> top;
    for (const int row : view.wanted()) {
      top[row].resize(8);
      top[row].resize(best(row, top[row]));
    }
    auto proposal = step_.resolve([&](int row) { return model_.next_token(row); }, best, [](Token) { return false; });
    if (proposal.tokens.size() > most) proposal = step_.accept(most);
    const std::vector<std::int32_t> path(proposal.path.begin(), proposal.path.end());
    const Tokens accepted(proposal.tokens.begin(), proposal.tokens.end());
    std::vector<bool> backed;
    for (const Row& row : rows()) backed.push_back(row.candidate != Row::no_class);
    const std::size_t kept = view.empty() ? 0 : model_.commit(path);
    step_.apply(pool_, kept);
    check_accepted(path, length(accepted));

    const Tokens before = text;
    text = joined(text, accepted);
    if (accepted.empty()) return;
    if (G == 0 || shape.mode != ShapeMode::growth) {
      run = 0;
    } else {
      std::uint64_t reaches = 0;
      for (const Row& row : rows()) reaches += row.reach;
      // The last steps count: every step takes 1/32 of what was before it.
      expected_ = expected_ - expected_ / 32 + static_cast<std::uint32_t>(reaches >> 16);
      accepted_ -= accepted_ / 32;
      for (const int row : path)
        if (row > tree.root && backed[at(row - tree.root - 1)]) accepted_ += 1 << 16;
      score(before, accepted, path, backed);
      for (const bool on_path : {false, true})
        for (const auto& [row, tokens] : top)
          if ((std::ranges::find(path, row) != path.end()) == on_path)
            pool.recycle(joined(before, path_of(row)), tokens);
    }
    if (fitted().w > 0) {
      for (const Tokens& gram : planned_.roll(last, accepted)) pool.add_window(gram);
      window_ = planned_;
    } else {
      window_.freeze(text.back());
    }
    pool.add_text(text, accepted.size(), naive::Source::generated);
  }

  /// The rows behind the root.
  [[nodiscard]] Rows rows() {
    Rows rows;
    const auto& notes = state_of(step_).notes;
    for (int r = tree.root + 1; r < tree.rows; ++r)
      rows.push_back({path_of(r), tree.view().is_wanted(r), notes.reach[r], notes.candidate[r]});
    return rows;
  }

  /// The rows that the window puts behind the root, in order: depth by depth, level 0 before the columns.
  [[nodiscard]] Rows window_rows() {
    Rows rows;
    const auto add = [&](int level, int column) {
      const Row row{planned_.path(level, column), wanted_.at(planned_.path(level, column))};
      if (std::ranges::find(rows, row) == rows.end()) rows.push_back(row);
    };
    const int w = fitted().w, n = fitted().n;
    for (int depth = 1; w > 0 && depth <= w + n - 3; ++depth) {
      if (depth < w) add(0, depth);
      for (int j = 0; j < w; ++j)
        if (depth - j >= 1 && depth - j <= n - 2) add(depth - j, j);
    }
    return rows;
  }

  /// Every cell has its token, and the row of its path.
  void check_cells() {
    Tokens cells, wanted;
    for (int r = 0; r < fitted().n - 1; ++r)
      for (int j = 0; j < fitted().w; ++j) {
        cells.push_back(core().cell[r][j]);
        wanted.push_back(planned_.token(r, j));
        if (path_of(state_of(step_).cell_row[r][j]) != planned_.path(r, j))
          FAIL("level " << r << ", column " << j << " has the row of another path");
      }
    REQUIRE(cells == wanted);
  }

  /// What is the same in every tree: the pending chain, the limits, the report.
  void check_plan() {
    const auto pending = step_.pending();
    const auto view = tree.view();
    REQUIRE(std::ranges::equal(pending, std::span(text).last(pending.size())));
    REQUIRE(view.size() <= limits.rows);
    REQUIRE(length(view.wanted()) <= limits.logit_rows);
    if (complete()) {
      REQUIRE(view.root() == length(pending) - 1);
      REQUIRE(view.is_wanted(view.root()));
    } else {
      REQUIRE(view.size() == std::min(limits.rows, length(pending) - 1));
      REQUIRE(view.wanted().empty());
    }
    REQUIRE(std::ranges::equal(view.tokens().first(at(view.root() + 1)), pending.first(at(view.root() + 1))));

    const auto& report = step_.report();
    auto wanted = report;
    wanted = {};
    wanted.rows = view.size();
    wanted.logit_rows = length(view.wanted());
    wanted.published_rows = (std::clamp(shape.w, 0, W) + std::clamp(shape.g, 0, G)) * (std::clamp(shape.n, 2, N) - 1);
    const std::uint64_t factor =
        std::clamp<std::uint64_t>((std::uint64_t{accepted_} << 16) / expected_, 1 << 14, 1 << 18);
    std::uint64_t gains = 0;
    for (const Row& row : rows()) {
      REQUIRE(length(row.path) <= limits.depth);
      ++wanted.drafted[origin(row)][row.path.size() - 1];
      gains += std::min<std::uint64_t>(row.reach * factor >> 16, 0xFFFFFFFF);
    }
    REQUIRE(report.rows == wanted.rows);
    REQUIRE(report.logit_rows == wanted.logit_rows);
    REQUIRE(report.published_rows == wanted.published_rows);
    REQUIRE(std::ranges::equal(flat(report.drafted), flat(wanted.drafted)));
    REQUIRE(report.expected == (complete() ? 1 + static_cast<double>(gains) * 0x1p-32 : 0));
  }

  void check_estimates() const {
    for (const Class& c : all_classes()) {
      const int id = in_library(c).id;
      for (const int length : {0, 1, 2, 5, 6, 100}) {
        const int in_run = lookahead::Estimates::run_class(length);
        if (const std::uint64_t q = step_.estimates().probability[in_run][id]; q != estimates(c, length))
          FAIL("class " << id << " in a run of " << length << " has the estimate " << q << " instead of "
                        << estimates(c, length));
      }
    }
  }

  /// Whether the step can yield a token.
  [[nodiscard]] bool complete() const {
    return limits.rows >= length(step_.pending()) && limits.logit_rows >= 1 && limits.tokens_left >= 1;
  }

  /// How much of the shape the limits allowed.
  [[nodiscard]] const lookahead::detail::FittedShape& fitted() { return state_of(step_).shape; }

  /// A set of the library's pool is full: from now on it may forget what the naive pool keeps.
  [[nodiscard]] bool forgets() {
    const auto ref = pool_.ref();
    return std::any_of(ref.sets, ref.sets + ref.set_count, [&](const lookahead::PoolSet& set) {
      return std::all_of(std::rbegin(set.stamp), std::rend(set.stamp),
                         [&](std::uint32_t stamp) { return stamp > ref.clock->floor; });
    });
  }

  [[nodiscard]] std::size_t free_slots() const { return model_.free_slots(); }

 private:
  [[nodiscard]] const auto& core() const { return step_.jacobi_window(); }

  [[nodiscard]] Tokens path_of(int row) const {
    Tokens path;
    for (; row > tree.root; row = tree.parent[row]) path.insert(path.begin(), tree.token[row]);
    return path;
  }

  static int origin(const Row& row) {
    return row.candidate == Row::no_class
               ? 0
               : 1 + static_cast<int>(CandidateClass{static_cast<std::uint8_t>(row.candidate)}.source());
  }

  template <int A, int B>
  static std::span<const std::int16_t> flat(const std::int16_t (&table)[A][B]) {
    return {&table[0][0], at(A * B)};
  }

  void check_accepted(const std::vector<std::int32_t>& path, int tokens) {
    const auto& report = step_.report();
    auto wanted = report;
    for (auto& depths : wanted.accepted) std::ranges::fill(depths, std::int16_t{0});
    const Rows all = rows();
    for (const int row : path)
      if (row > tree.root) {
        const Row& accepted = all.at(at(row - tree.root - 1));
        ++wanted.accepted[origin(accepted)][accepted.path.size() - 1];
      }
    REQUIRE(report.tokens == tokens);
    REQUIRE(std::ranges::equal(flat(report.accepted), flat(wanted.accepted)));
  }

  // A candidate whose estimate is 0 is none. A row that no candidate backs begins a new run.
  void score(const Tokens& before, const Tokens& accepted, const std::vector<std::int32_t>& path,
             const std::vector<bool>& backed) {
    std::vector<std::tuple<Class, int, naive::Seen, bool>> scores;
    for (int i = 0; i < length(accepted); ++i) {
      if (i > 0 && !backed[at(path[at(tree.root + i)] - tree.root - 1)]) run = 0;
      const Tokens here = joined(before, Tokens(accepted.begin(), accepted.begin() + i));
      for (const auto& [its_class, seen, hit] : pool.score(here, accepted[at(i)], estimates, run))
        if (estimates(its_class, run, seen) > 0) scores.emplace_back(its_class, run, seen, hit);
      const auto candidates = pool.candidates(here, estimates, run);
      const bool best = !candidates.empty() && candidates[0].q > 0 && candidates[0].token == accepted[at(i)];
      run = best ? run + 1 : 0;
    }
    for (const auto& [its_class, in_run, seen, hit] : scores) estimates.score(its_class, in_run, seen, hit);
  }

  OracleModel<> model_;
  Step step_;
  Pool& pool_;
  naive::Window window_, planned_;  // between steps, and with what the planned step filled in
  std::map<Tokens, bool> wanted_;   // the planned window's rows
  std::size_t top_count_;
  std::uint32_t expected_ = 8 << 16, accepted_ = 10 << 16;  // in 1/65536 of a token
};

/// Decodes a random request in steps of random shapes up to `most` and random limits, and calls `check(mirror)` behind
/// every plan. Returns the number of steps.
template <class Step, class Check>
int run_case(std::uint64_t seed, const Shape& most, Check check) {
  static Pool pool(1 << 18);
  pool.reset();
  Random random(seed);
  OracleOptions options;
  options.vocabulary = random.one_in(2) ? 2 + random.below(20) : random.one_in(2) ? 300 : 20000;
  options.seed = random.bits();
  options.repetition = random.below(11) / 10.0;
  options.capacity = 2000;
  options.max_rows = options.max_logit_rows = 1000;
  options.max_kept = random.one_in(3) ? random.below(4) : 1000;
  const Tokens prompt = random.tokens(1 + random.below(random.one_in(2) ? 3 : 200), options.vocabulary);
  const bool slides = random.one_in(2);
  Mirror<Step> mirror(options, prompt, random.bits(), slides, 1 + random.below(8), pool);
  // Estimates of every size, many of them equal, some of them about to be halved.
  if (random.one_in(2)) {
    for (const Class& c : all_classes()) {
      const std::uint64_t trials = 256 * (random.one_in(2) ? 399 : 1 + random.bits() % 399);
      const auto count = [&](std::uint64_t trials) {
        const std::uint64_t hits[] = {0, trials, trials / 2, 2 * trials, trials == 0 ? 0 : random.bits() % trials};
        return Estimates::Count{hits[random.below(5)], trials};
      };
      std::array<Estimates::Count, 4> in_run;
      for (auto& n : in_run) n = count(256 * (random.one_in(2) ? 0 : random.bits() % 400));
      mirror.set_estimate(c, count(trials), in_run);
    }
  }

  const auto shape = [&] {
    const auto extent = [&](int value) { return random.one_in(2) ? 3 * value : random.below(value + 1); };
    Shape s{extent(most.w), extent(most.n), extent(most.g), most.mode, slides};
    if (random.one_in(6)) s.mode = ShapeMode{most.mode == ShapeMode::growth};
    return s;
  };
  const auto limits = [&] {
    constexpr int plenty = Step::max_rows;
    const auto limit = [&](int rarely) { return random.one_in(rarely) ? random.below(30) : plenty; };
    return Limits{random.one_in(2) ? limit(2) : random.below(plenty), limit(5), limit(6), limit(6)};
  };
  int steps = 0;
  for (; steps < 20 && mirror.free_slots() > at(Step::max_rows) && !mirror.forgets(); ++steps) {
    CAPTURE(steps);
    if (random.one_in(12)) mirror.append(random.tokens(1 + random.below(50), options.vocabulary));
    if (random.one_in(6)) {
      mirror.plan(shape(), limits());
      mirror.abandon();
    }
    mirror.plan(shape(), limits());
    mirror.check_plan();
    mirror.check_cells();
    check(mirror);
    mirror.finish(random.one_in(8) ? 1 + random.bits() % 3 : 1000);
    mirror.check_estimates();
  }
  return steps;
}

}  // namespace mirror
