// How many rows a step gets: the choice beside a naive one, trees that are cut, costs that are learnt.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "cases.hpp"

#include "lookahead/batch_controller.hpp"
#include "lookahead/decoder.hpp"
#include "lookahead/testing/oracle_model.hpp"
#include "lookahead/testing/plain_decode.hpp"

namespace {

using namespace lookahead;
using testing::OracleModel;
using Token = std::int32_t;
using Tokens = std::vector<Token>;
using Random = std::mt19937_64;
__extension__ using Wide = unsigned __int128;

constexpr std::uint64_t one = std::uint64_t{1} << 32;

std::uint64_t below(Random& random, std::uint64_t n) { return random() % n; }

/// A sequence of a batch: its rows and what they are worth.
struct Sequence {
  std::int32_t fixed, fixed_logits;
  std::uint64_t expected;
  std::vector<std::uint32_t> reach;
  std::uint32_t factor;
  [[nodiscard]] RowOffer offer() const { return {fixed, fixed_logits, expected, reach, factor}; }
};

Sequence random_sequence(Random& random, std::size_t most) {
  Sequence s{static_cast<std::int32_t>(1 + below(random, 3)), 1, one + below(random, one), {}, 1U << 16};
  s.reach.resize(below(random, most + 1));
  for (auto& r : s.reach) r = static_cast<std::uint32_t>(random() >> (32 + below(random, 8)));
  std::ranges::sort(s.reach, std::greater<>{});
  s.factor = static_cast<std::uint32_t>((1U << 14) + below(random, 15U << 14));
  return s;
}

std::vector<std::uint32_t> random_table(Random& random, std::size_t rows) {
  std::vector<std::uint32_t> table{static_cast<std::uint32_t>(1 + below(random, 1000))};
  const std::uint64_t steepest = std::uint64_t{1} << below(random, 8);
  while (table.size() < rows) table.push_back(table.back() + static_cast<std::uint32_t>(below(random, steepest)));
  return table;
}

/// The best number of rows by trying them all, the smallest on ties.
std::size_t naive_choice(const std::vector<Sequence>& batch, const StepCost& cost, const BatchLimits& limits) {
  std::size_t rows = 0, logits = 0;
  std::uint64_t value = 0;
  std::vector<std::uint64_t> gain;
  for (const Sequence& s : batch) {
    rows += static_cast<std::size_t>(s.fixed);
    logits += static_cast<std::size_t>(s.fixed_logits);
    value += s.expected;
    for (const std::uint32_t r : s.reach)
      gain.push_back(std::min<std::uint64_t>(std::uint64_t{r} * s.factor >> 16, ~0U));
  }
  std::ranges::sort(gain, std::greater<>{});
  std::size_t best = rows;
  std::uint64_t best_value = value;
  for (const std::uint64_t g : gain) {
    ++rows;
    ++logits;
    if (rows > limits.rows || rows > cost.max_rows() || logits > limits.logit_rows || cost.time(rows) > limits.time)
      break;
    value += g;
    if (Wide{value} * cost.time(best) > Wide{best_value} * cost.time(rows)) {
      best = rows;
      best_value = value;
    }
  }
  return best;
}

}  // namespace

TEST_CASE("the number of rows is the best one, and the rows are those that yield most") {
  Random random(1);
  long all = 0, none = 0;
  for (int i = 0; i < cases(20000) / 5; ++i) {
    CAPTURE(i);
    std::vector<Sequence> batch;
    std::vector<RowOffer> offers;
    for (std::uint64_t n = 1 + below(random, below(random, 2) == 0 ? 1 : 9); n > 0; --n)
      batch.push_back(random_sequence(random, 40));
    for (const Sequence& s : batch) offers.push_back(s.offer());
    BatchLimits limits;
    if (below(random, 2) == 0) limits.rows = below(random, 60);
    if (below(random, 2) == 0) limits.logit_rows = below(random, 60);
    if (below(random, 4) == 0) limits.time = static_cast<double>(below(random, 3000));
    BatchController controller(below(random, 8) == 0 ? StepCost::none()
                                                     : StepCost::given(random_table(random, 1 + below(random, 200))));
    std::vector<std::int32_t> rows(batch.size());
    const std::size_t sum = controller.choose(offers, rows, 0, limits);
    REQUIRE(sum == naive_choice(batch, controller.cost(), limits));
    REQUIRE(sum == static_cast<std::size_t>(std::accumulate(rows.begin(), rows.end(), 0)));
    // No row that was left out is worth more than one that was taken.
    std::uint32_t least = ~0U, most = 0;
    bool everything = true, nothing = true;
    for (std::size_t s = 0; s < batch.size(); ++s) {
      const auto taken = static_cast<std::size_t>(rows[s] - batch[s].fixed);
      REQUIRE(taken <= batch[s].reach.size());
      if (taken > 0) least = std::min(least, offers[s].gain(taken - 1));
      if (taken < batch[s].reach.size()) most = std::max(most, offers[s].gain(taken));
      everything = everything && taken == batch[s].reach.size();
      nothing = nothing && taken == 0;
    }
    REQUIRE(least >= most);
    all += everything ? 1 : 0;
    none += nothing ? 1 : 0;
  }
  CHECK(all > 0);
  CHECK(none > 0);
}

TEST_CASE("a tree that is cut is the one that would have been planned with fewer rows") {
  using Step = Lookahead<5, 4, 5>;
  Random random(2);
  long cut_rows = 0;
  for (int i = 0; i < std::max(cases(10000) / 100, 20); ++i) {
    CAPTURE(i);
    const int vocabulary = 2 + static_cast<int>(below(random, 30));
    OracleModel<> model({.vocabulary = vocabulary, .seed = random(), .repetition = 0.9});
    Tokens prompt(1 + below(random, 40));
    for (Token& t : prompt) t = static_cast<Token>(below(random, static_cast<std::uint64_t>(vocabulary)));
    model.prefill(std::span(prompt).first(prompt.size() - 1));
    NGramPool<Token> pool(4096);
    Step step;
    Step::Tree tree, small;
    step.start(pool, prompt, random());
    for (int k = 0; k < 12; ++k) {
      const Shape shape{.w = static_cast<std::int32_t>(below(random, 2) == 0 ? 0 : below(random, 6)),
                        .mode = below(random, 5) == 0 ? ShapeMode::published : ShapeMode::growth};
      step.plan(pool, shape, {}, tree);
      const RowOffer offer = step.offer();
      REQUIRE(offer.fixed + static_cast<int>(offer.reach.size()) == tree.rows);
      REQUIRE(std::ranges::is_sorted(offer.reach, std::greater<>{}));
      const auto rows = static_cast<std::int32_t>(below(random, static_cast<std::uint64_t>(tree.rows) + 2));
      // With few rows there is another window.
      const bool comparable = shape.mode == ShapeMode::growth && rows >= offer.fixed && (shape.w == 0 || rows >= 20);
      Step twin = step;
      twin.abandon();
      if (comparable) twin.plan(pool, shape, {.rows = rows}, small);
      cut_rows += std::max(0, tree.rows - std::max(rows, offer.fixed));
      step.cut(tree, rows);
      REQUIRE(tree.rows == std::min(offer.fixed + static_cast<int>(offer.reach.size()), std::max(rows, offer.fixed)));
      if (comparable) {
        const auto a = tree.view(), b = small.view();
        REQUIRE(std::ranges::equal(a.tokens(), b.tokens()));
        REQUIRE(std::ranges::equal(a.parents(), b.parents()));
        REQUIRE(std::ranges::equal(a.positions(), b.positions()));
        REQUIRE(std::ranges::equal(a.wanted(), b.wanted()));
        for (int r = 0; r < a.size(); ++r) {
          REQUIRE(a.is_wanted(r) == b.is_wanted(r));
          for (int other = 0; other < a.size(); ++other) REQUIRE(a.sees(r, other) == b.sees(r, other));
        }
        REQUIRE(step.report().rows == twin.report().rows);
        REQUIRE(step.report().logit_rows == twin.report().logit_rows);
        REQUIRE(step.report().expected == twin.report().expected);
      }
      model.forward(tree.view());
      const auto proposal = step.resolve([&](int row) { return model.next_token(row); },
                                         [&](int row, std::span<Token> out) { return model.top_tokens(row, out); },
                                         [](Token) { return false; });
      step.apply(pool, model.commit(proposal.path));
    }
  }
  CHECK(cut_rows > 100);
}

TEST_CASE("with a given cost the same request gets the same trees, and the text is plain decoding's") {
  Random random(3);
  for (int i = 0; i < std::max(cases(2000) / 100, 20); ++i) {
    CAPTURE(i);
    const testing::OracleOptions options{.vocabulary = 20, .seed = random(), .repetition = 0.95};
    const Tokens prompt{1, 2, 3, 1, 2};
    const std::vector<std::uint32_t> table = random_table(random, 1 + below(random, 80));
    std::vector<std::vector<std::int32_t>> rows(2);
    for (auto& steps : rows) {
      OracleModel<> model(options);
      Decoder<OracleModel<>> decoder(model, {.cost = StepCost::given(table)});
      decoder.start(prompt);
      while (decoder.text().size() < 100) {
        decoder.step(100, [](std::span<const Token>) {});
        steps.push_back(decoder.report().rows);
        REQUIRE(decoder.report().rows <= static_cast<std::int32_t>(table.size()));
      }
      OracleModel<> plain(options);
      const Tokens truth = testing::plain_decode(plain, std::span(prompt), decoder.text().size() - prompt.size());
      REQUIRE(std::ranges::equal(decoder.text().subspan(prompt.size()), truth));
    }
    REQUIRE(rows[0] == rows[1]);
  }
}

TEST_CASE("with a given cost a decoder's second request gets the trees of a new decoder's first") {
  const testing::OracleOptions options{.vocabulary = 20, .repetition = 0.95};
  const Tokens prompt{1, 2, 3, 1, 2};
  const std::vector<std::uint32_t> flat(64, 100);
  const auto ignore = [](std::span<const Token>) {};
  std::vector<std::vector<std::int32_t>> rows(2);
  for (const bool used : {false, true}) {
    OracleModel<> model(options);
    Decoder<OracleModel<>> decoder(model, {.shape = {.w = 5, .n = 3}, .cost = StepCost::given(flat)});
    if (used) {  // a text in which few rows paid, and the window did
      decoder.generate(prompt, 200, ignore);
      decoder.set_rows(1);
      decoder.run(40, ignore);
      decoder.set_rows(64);
    }
    decoder.start(prompt);
    while (decoder.text().size() < 100) {
      decoder.step(100, ignore);
      rows[used ? 1 : 0].push_back(decoder.report().rows);
    }
  }
  CHECK(rows[1] == rows[0]);
}

TEST_CASE("a fork goes on with the window that paid") {
  OracleModel<> model({.vocabulary = 20, .repetition = 0.95});
  const std::vector<std::uint32_t> flat(64, 100);
  Decoder<OracleModel<>> decoder(model, {.shape = {.w = 5, .n = 3}, .cost = StepCost::given(flat)});
  const auto ignore = [](std::span<const Token>) {};
  const auto window_rows = [](const auto& d) {
    int sum = 0;
    for (const int n : d.report().drafted[static_cast<int>(Origin::window_row)]) sum += n;
    return sum;
  };
  const Tokens prompt{1, 2, 3, 1, 2};
  decoder.start(prompt);
  while (window_rows(decoder) == 0) REQUIRE(decoder.step(100, ignore) == StopReason::running);
  OracleModel<> copy = model.fork();
  auto fork = decoder.fork(copy);
  decoder.step(100, ignore);
  fork.step(100, ignore);
  CHECK(window_rows(decoder) > 0);
  CHECK(window_rows(fork) == window_rows(decoder));
}

TEST_CASE("costs that cannot be used are refused") {
  using doctest::Contains;
  const auto refused = [](const std::vector<std::uint32_t>& table) { static_cast<void>(StepCost::given(table)); };
  CHECK_THROWS_WITH_AS(refused({}), Contains("the table of costs is empty"), InvalidArgument);
  CHECK_THROWS_WITH_AS(refused({3, 0}), Contains("the time of 2 rows is 0: give a number from 1 to 16777215"),
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(refused({1U << 24}), Contains("the time of 1 rows is 16777216: give"), InvalidArgument);
  CHECK_THROWS_WITH_AS(refused({3, 5, 4}), Contains("the time of 3 rows is 4, less than the 5 of one row less"),
                       InvalidArgument);
  CHECK(StepCost::given({(1U << 24) - 1}).max_rows() == 1);
  CHECK(StepCost::given({3, 5}).time(2) == 5);
  CHECK(StepCost::given({3, 5}).time(9) == 5);
  CHECK(StepCost::none().time(1000) == StepCost::none().time(1));
}

TEST_CASE("classes of rows follow each other without a gap") {
  std::size_t c = 0;
  for (std::size_t rows = 1; rows <= StepCost::row_limit; ++rows) {
    if (rows > StepCost::class_end(c)) ++c;
    REQUIRE(StepCost::class_of(rows) == c);
  }
  CHECK(c == StepCost::class_count - 1);
  CHECK(StepCost::class_of(2 * StepCost::row_limit) == c);
}

namespace {

/// A machine whose steps take `curve(rows)` nanoseconds, more or less.
struct Machine {
  std::function<double(std::size_t)> curve;
  double noise = 0.05, spikes = 0.02, load = 1, first_time = 1;
  Random random{4};
  std::set<std::size_t> seen{};

  double step(std::size_t rows) {
    std::normal_distribution<double> factor(1, noise);
    double time = curve(rows) * load * std::max(0.5, factor(random));
    if (seen.insert(rows).second) time *= first_time;
    return static_cast<double>(below(random, 1000)) < 1000 * spikes ? 6 * time : time;
  }
};

/// Time and tokens of a run of steps.
struct Account {
  double time = 0, plain_time = 0, best_time = 0, tokens = 0;
};

/// Runs steps whose rows are worth what they are expected to be worth; `best_time` is that of the same tokens at the
/// rates of a controller that knows the curve.
Account run(BatchController& controller, Machine& machine, int steps, const std::function<Sequence(int)>& sequence,
            std::size_t context = 100) {
  Account a;
  for (int i = 0; i < steps; ++i) {
    const Sequence s = sequence(i);
    const RowOffer offer = s.offer();
    std::int32_t rows = 0;
    controller.choose({&offer, 1}, {&rows, 1}, context);
    const double time = machine.step(static_cast<std::size_t>(rows));
    controller.observe(static_cast<std::size_t>(rows), time);
    double tokens = static_cast<double>(s.expected), best = tokens / machine.curve(1), value = tokens;
    for (std::size_t k = 0; k < s.reach.size(); ++k) {
      if (static_cast<int>(k) < rows - s.fixed) tokens += s.reach[k];
      value += s.reach[k];
      best = std::max(best, value / machine.curve(k + 2));
    }
    // Noise is not the controller's fault.
    a.time += machine.curve(static_cast<std::size_t>(rows)) * machine.load;
    a.tokens += tokens / static_cast<double>(one);
    a.plain_time += tokens / static_cast<double>(one) * machine.curve(1) * machine.load;
    a.best_time += tokens / best * machine.load;
  }
  return a;
}

Sequence decaying(double first, double ratio, std::size_t rows) {
  Sequence s{1, 1, one, {}, 1U << 16};
  for (std::size_t k = 0; k < rows; ++k, first *= ratio)
    s.reach.push_back(static_cast<std::uint32_t>(first * static_cast<double>(one)));
  return s;
}

double steep(std::size_t rows) { return 1e6 * (1 + 0.35 * static_cast<double>(rows - 1)); }
double bent(std::size_t rows) { return 1e6 * std::max(1.0, static_cast<double>(rows) / 8); }
double flat(std::size_t rows) { return 1e6 * (1 + 0.001 * static_cast<double>(rows)); }

}  // namespace

TEST_CASE("where no row pays, learning what rows cost loses little") {
  for (const auto& curve : {steep, bent, flat}) {
    BatchController controller;
    Machine machine{.curve = curve};
    const Account a = run(controller, machine, 2000, [](int) { return decaying(0.02, 0.7, 63); });
    CHECK(a.time < 1.008 * a.plain_time);
  }
}

TEST_CASE("what is learnt is nearly as good as what is known") {
  Random random(5);
  const auto mixed = [&](int) { return decaying(below(random, 3) == 0 ? 0.9 : 0.3, 0.85, 63); };
  for (const auto& curve : {steep, bent, flat}) {
    BatchController controller;
    Machine machine{.curve = curve};
    const Account a = run(controller, machine, 3000, mixed);
    CHECK(a.time < 1.05 * a.best_time);
    machine.load = 2;  // another program starts
    const Account b = run(controller, machine, 1000, mixed);
    CHECK(b.time < 1.05 * b.best_time);
    // What rows cost changes with the length of the context.
    machine.load = 1;
    machine.curve = steep;
    const Account c = run(controller, machine, 2000, mixed, 5000);
    CHECK(c.time < 1.08 * c.best_time);
  }
}

TEST_CASE("that steps are slow the first time they have so many rows keeps no rows from them") {
  const auto sequence = [](int i) { return decaying(i % 4 == 3 ? 0.6 : 0.02, 0.8, 63); };
  for (const auto& curve : {steep, bent, flat}) {
    BatchController controller;
    Machine machine{.curve = curve, .spikes = 0, .first_time = 5};
    const Account a = run(controller, machine, 200, sequence);
    CHECK(a.time < 1.15 * a.best_time);
  }
}

TEST_CASE("a first step that is slow is forgotten") {
  BatchController controller;
  Machine machine{.curve = bent};
  const auto sequence = [](int) { return decaying(0.8, 0.9, 63); };
  controller.observe(1, 50 * bent(1));
  const Account a = run(controller, machine, 3000, sequence);
  CHECK(a.time < 1.05 * a.best_time);
}

TEST_CASE("a decoder learns by its clock that rows are cheap") {
  struct Slow : OracleModel<> {
    using OracleModel<>::OracleModel;
    void forward(const TokenTree<Token>& tree) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      OracleModel<>::forward(tree);
    }
  } model({.vocabulary = 50, .repetition = 1});
  Decoder<Slow> decoder(model);
  const Generation done = decoder.generate(Tokens{1, 2, 3}, 200, [](std::span<const Token>) {});
  CHECK(done.tokens == 200);
  CHECK(done.steps < 190);  // whatever the machine does meanwhile
}

TEST_CASE("times that no step can take are ignored") {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const auto run_beside = [](double strange) {
    BatchController good, other;
    const Sequence sequence = decaying(0.8, 0.9, 63);
    const RowOffer offer = sequence.offer();
    for (int i = 0; i < 1000; ++i) {
      std::int32_t a = 0, b = 0;
      good.choose({&offer, 1}, {&a, 1});
      other.choose({&offer, 1}, {&b, 1});
      REQUIRE(a == b);
      good.observe(static_cast<std::size_t>(a), bent(static_cast<std::size_t>(a)));
      other.observe(static_cast<std::size_t>(a), strange);
      other.observe(static_cast<std::size_t>(a), bent(static_cast<std::size_t>(a)));
    }
  };
  for (const double strange : {std::nan(""), infinity, -infinity, -1e6, 0.0, 1e300}) run_beside(strange);
}

TEST_CASE("offers of nothing leave the controller as it was") {
  BatchController good, other;
  const Sequence sequence = decaying(0.8, 0.9, 63);
  Sequence none = sequence;
  none.expected = 0;
  std::ranges::fill(none.reach, 0U);
  const RowOffer offer = sequence.offer(), nothing = none.offer();
  for (int i = 0; i < 2000; ++i) {
    std::int32_t a = 0, b = 0;
    good.choose({&offer, 1}, {&a, 1});
    other.choose({&offer, 1}, {&b, 1});
    REQUIRE(a == b);
    good.observe(static_cast<std::size_t>(a), bent(static_cast<std::size_t>(a)));
    other.observe(static_cast<std::size_t>(a), bent(static_cast<std::size_t>(a)));
    good.choose({&offer, 1}, {&a, 1}, 0, {.rows = 1});
    other.choose({&nothing, 1}, {&b, 1});
    REQUIRE(b == 1);
  }
}

TEST_CASE("learnt times never fall with the rows, whatever was measured") {
  Random random(6);
  for (int i = 0; i < 50; ++i) {
    StepCost cost;
    cost.use(0);
    for (int k = 0; k < 200; ++k) {
      cost.observe(1 + below(random, 200), static_cast<double>(1 + below(random, 100000)));
      for (std::size_t rows = 2; rows <= 300; ++rows) REQUIRE(cost.time(rows) >= cost.time(rows - 1));
      REQUIRE(cost.time(1) >= 1);
      REQUIRE(cost.time(StepCost::row_limit) < StepCost::time_limit);
    }
  }
}

namespace {

/// A request of `steps` steps whose trees have `rows` rows without a window; `yield(k)` says what the window gives in
/// the k-th step of a run with it. Gives the time of all steps, of those with a window, and what the window took.
struct Window {
  double time = 0, with = 0, extra = 0;
  int last_on = -1;
};

template <class Yield>
Window with_window(const StepCost& cost, int steps, int rows, const Yield& yield) {
  constexpr int window_rows = 10;
  WindowSwitch window;
  Window w;
  for (int i = 0, run = 0; i < steps; ++i) {
    const bool on = window.on(cost);
    run = on ? run + 1 : 0;
    StepReport<8> report{};
    report.rows = rows + (on ? window_rows : 0);
    report.drafted[static_cast<int>(Origin::window_row)][0] = on ? window_rows : 0;
    const int got = on ? yield(run) : 0;
    report.accepted[static_cast<int>(Origin::window)][0] = static_cast<std::int16_t>(got);
    report.tokens = 2 + got;
    const double time = cost.time(static_cast<std::size_t>(report.rows));
    w.time += time;
    if (on) {
      w.with += time;
      w.extra += time - cost.time(static_cast<std::size_t>(rows));
      w.last_on = i;
    }
    window.observe(report, window_rows, cost);
  }
  return w;
}

StepCost table(double slope) {
  std::vector<std::uint32_t> time;
  for (int r = 0; r < 64; ++r) time.push_back(static_cast<std::uint32_t>(10000 * (1 + slope * r)));
  return StepCost::given(time);
}

}  // namespace

TEST_CASE("a window that yields nothing is tried at 1% of the time, and one that pays runs") {
  for (const double slope : {0.0002, 0.01, 0.3}) {
    CAPTURE(slope);
    const Window none = with_window(table(slope), 20000, 4, [](int) { return 0; });
    CHECK(none.extra > 0);
    CHECK(none.extra < 0.0105 * none.time);
  }
  // Half a token a step is worth a quarter of a step: more than ten rows at 0.01, less than at 0.3.
  const auto half = [](int run) { return run > 4 ? run % 2 : 0; };
  const Window pays = with_window(table(0.01), 2000, 4, half);
  CHECK(pays.with > 0.7 * pays.time);
  const Window does_not = with_window(table(0.3), 20000, 4, half);
  CHECK(does_not.extra < 0.0105 * does_not.time);
  // What paid for a while and does no more.
  const Window ends = with_window(table(0.01), 1200, 4, [](int run) { return run > 4 && run < 300 ? run % 2 : 0; });
  CHECK(ends.with > 0.1 * ends.time);
  CHECK(ends.with < 0.6 * ends.time);
}

TEST_CASE("where rows are free the window is on from the start") {
  const Window w = with_window(StepCost::none(), 10, 4, [](int) { return 0; });
  CHECK(w.last_on == 9);
  CHECK(w.with >= 9);
}

TEST_CASE("with a given cost a window that does not pay leaves the trees as they are without one") {
  std::vector<std::uint32_t> time;
  for (std::uint32_t r = 0; r < 64; ++r) time.push_back(1000 + 500 * r);
  testing::OracleOptions how;
  how.vocabulary = 200;
  how.repetition = 0.9;
  const auto decode = [&](std::int32_t w) {
    OracleModel<> model(how);
    Decoder<OracleModel<>> decoder(model, {.shape = {.w = w}, .cost = StepCost::given(time)});
    std::vector<Token> text;
    const std::vector<Token> prompt{1, 2, 3};
    const Generation done = decoder.generate(prompt, 200, [&](Token t) { text.push_back(t); });
    return std::pair(done.rows, text);
  };
  CHECK(decode(0) == decode(15));
}
