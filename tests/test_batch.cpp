/// A batch as a device will hold it, run by host threads: equal to the host classes, byte for byte, after every phase.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "batch_cases.hpp"
#include "cases.hpp"
#include "thread_group.hpp"

#include "lookahead/philox.hpp"
#include "lookahead/sample_verify.hpp"

namespace {

using namespace batch_cases;
using threads::Serial;
using threads::Threads;

/// A batch in plain memory.
template <int W, int N, int G, class Who>
class Device {
 public:
  Device(const BatchOptions& options, const Who& who) : memory_(options), who_(who) {}

  ResultCursor attach(int i, const Tokens& prompt, const SequenceOptions<Token>& options) {
    who_.run([&, generation = ++generation_](const auto& g) {
      detail::attach(g, b(), i, prompt.data(), static_cast<int>(prompt.size()), options, generation, *scratch_);
    });
    return {i, generation_, 0};
  }
  void detach(int i) { detail::detach(b(), i); }
  ResultCursor fork(int from, int to, std::uint64_t stream) {
    who_.run([&, generation = ++generation_](const auto& g) { detail::fork(g, b(), from, to, stream, generation); });
    return {to, generation_, 0};
  }
  void set_limits(int i, const Limits& limits) { detail::set_limits(b(), i, limits); }
  void plan(int bucket) {
    for (int i = 0; i < b().count; ++i) who_.run([&](const auto& g) { detail::plan(g, b(), i, bucket, *scratch_); });
    for (int i = 0; i < b().count; ++i) who_.run([&](const auto& g) { detail::pack(g, b(), i, bucket, pack_); });
  }
  void resolve(const Tokens& chosen, const Tokens& top, int width) {
    const detail::Choices<Token> choices{chosen.data(), width > 0 ? top.data() : nullptr, width};
    for (int i = 0; i < b().count; ++i)
      who_.run([&](const auto& g) { detail::resolve(g, b(), i, choices, *scratch_); });
  }
  template <class F>
  int read(ResultCursor& cursor, F&& f) {
    return b().ring.read(cursor, f);
  }
  Memory<W, N, G>& memory() { return memory_; }

 private:
  const detail::Batch<W, N, G, Token>& b() const { return memory_.batch; }

  Memory<W, N, G> memory_;
  Who who_;
  std::unique_ptr<detail::StepScratch<W, N, G, Token>> scratch_ =
      std::make_unique<detail::StepScratch<W, N, G, Token>>();
  detail::PackScratch pack_;
  std::uint32_t generation_ = 0;
};

template <int W, int N, int G, class Who>
void live(const Who& who, int lives, int actions) {
  int tokens = 0, steps = 0;
  for (int life = 0; life < lives; ++life) {
    CAPTURE(life);
    const auto seed = static_cast<unsigned>(life);
    const BatchOptions options = random_batch(seed);
    Device<W, N, G, Who> device(options, who);
    Life<W, N, G, Device<W, N, G, Who>> one(device, options, seed);
    one.run(actions);
    tokens += one.tokens;
    steps += one.steps;
  }
  if (lives > 0) CHECK(tokens > 0);
  MESSAGE(W << ", " << N << ", " << G << ": " << tokens << " tokens in " << steps << " steps");
}

template <class Who>
void live_all(const Who& who, int lives, int actions) {
  live<15, 5, 15>(who, lives, actions);
  live<5, 3, 5>(who, lives, actions);
  live<4, 4, 0>(who, lives, actions);
  live<1, 2, 3>(who, lives, actions);
}

/// A batch of one or two sequences in one thread, for the tests of what a life seldom meets.
using Small = Device<5, 3, 5, Serial>;

/// Chooses the token behind every wanted row of a planned batch.
template <class Choose>
Tokens choose_all(Small& device, const Choose& choose) {
  const auto& p = device.memory().batch.packed;
  Tokens chosen;
  for (int k = 0; k < p.wanted_offsets[device.memory().batch.count]; ++k) chosen.push_back(choose(p.wanted[k]));
  return chosen;
}

/// One step in which the token behind every row is the row's own plus one.
void count_on(Small& device, int bucket) {
  device.plan(bucket);
  const auto& p = device.memory().batch.packed;
  device.resolve(choose_all(device, [&](int row) { return p.tokens[row] + 1; }), {}, 0);
}

template <class Error, class F>
std::string message_of(F f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "nothing was thrown";
}

}  // namespace

TEST_CASE("one thread: a batch is the host classes, byte for byte") {
  live_all(Serial{}, std::min(cases(1000), 4000) / 80, 100);
}

TEST_CASE("threads that run freely: a batch is the host classes, byte for byte") {
  live_all(Threads{3, false}, std::min(cases(1000), 4000) / 1000, 60);
}

TEST_CASE("threads in turns: a batch is the host classes, byte for byte, whatever their order") {
  for (const int size : {2, 5}) live_all(Threads{size, true}, std::min(cases(1000), 2000) / 1000, 40);
}

TEST_CASE("a fork is a copy, whoever makes it") {
  const BatchOptions options{.sequences = 2, .pool_slots = 64};
  Small serial(options, Serial{});
  const auto begin = [](auto& device) {
    device.attach(0, {1, 2, 3, 1, 2, 3, 1}, {.limits = {.rows = 7}});
    device.attach(1, {5, 5, 5}, {});
    device.detach(1);
    device.fork(0, 1, 9);
  };
  begin(serial);
  const auto& q = serial.memory().batch.sequences;
  CHECK(q[1].active);
  CHECK(q[1].generation == 3);
  CHECK(q[1].options.stream == 9);
  CHECK(std::memcmp(&q[0].state, &q[1].state, sizeof q[0].state) == 0);
  for (const int size : {2, 3, 5}) {
    Device<5, 3, 5, Threads> threads(options, {size, true});
    begin(threads);
    // Not the options: their padding is whatever lay on the stack.
    const auto &one = serial.memory().batch, &many = threads.memory().batch;
    for (const int i : {0, 1}) {
      CHECK(std::memcmp(&many.sequences[i].state, &one.sequences[i].state, sizeof one.sequences[i].state) == 0);
      CHECK(std::memcmp(many.pool(i).sets, one.pool(i).sets, one.set_count * sizeof(PoolSet)) == 0);
      CHECK(many.sequences[i].options.stream == one.sequences[i].options.stream);
      CHECK(many.sequences[i].generation == one.sequences[i].generation);
      CHECK(many.row_limits[i] == one.row_limits[i]);
    }
  }
}

TEST_CASE("a reader that lags too far is told which result is lost") {
  Small device({.sequences = 2, .result_steps = 4}, Serial{});
  ResultCursor first = device.attach(0, {1}, {}), late = first;
  device.attach(1, {1}, {});
  for (int step = 0; step < 4; ++step) count_on(device, 1);
  Tokens text;
  CHECK(device.read(late, [&](const auto& r) { text.insert(text.end(), r.tokens, r.tokens + r.count); }) == 4);
  CHECK(text == Tokens{2, 3, 4, 5});
  CHECK(device.read(late, [](const auto&) {}) == 0);
  count_on(device, 1);
  CHECK(message_of<ResultsOverrun>([&] { device.read(first, [](const auto&) {}); }) ==
        "the result of step 0 of sequence 0 was overwritten: the ring holds 4 steps; read more often or raise "
        "result_steps");
  CHECK(first.step == 0);
  CHECK(device.read(late, [&](const auto& r) { CHECK(r.tokens[0] == 6); }) == 1);
}

TEST_CASE("results of a sequence that was attached anew are another's") {
  Small device({.result_steps = 2}, Serial{});
  ResultCursor old = device.attach(0, {1}, {});
  count_on(device, 1);
  ResultCursor now = device.attach(0, {50}, {});
  CHECK(device.read(now, [](const auto&) {}) == 0);
  CHECK(device.read(old, [](const auto& r) { CHECK(r.tokens[0] == 2); }) == 1);
  for (int step = 0; step < 2; ++step) count_on(device, 1);
  CHECK(message_of<InvalidArgument>([&] { device.read(old, [](const auto&) {}); }) ==
        "sequence 0 was attached anew since this cursor was made: read it with the new cursor");
  int next = 51;
  CHECK(device.read(now, [&](const auto& r) { CHECK(r.tokens[0] == next++); }) == 2);
  ResultCursor nobody{1, 1, 0};
  CHECK(message_of<InvalidArgument>([&] { device.read(nobody, [](const auto&) {}); }) ==
        "results of sequence 1 of a batch of 1: pass the cursor that attaching the sequence returned");
}

TEST_CASE("a reader beside the writer sees whole results, in order") {
  using Ring = ResultRing<Token, 33>;
  std::vector<Ring::Result> results(8);
  std::memset(static_cast<void*>(results.data()), 0, results.size() * sizeof(Ring::Result));
  const Ring ring{results.data(), 1, 8};
  const auto last = static_cast<std::uint32_t>(std::min(cases(1000), 20000));
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (std::uint32_t step = 0; step < last; ++step) {
      Token tokens[33];
      std::fill(std::begin(tokens), std::end(tokens), static_cast<Token>(step));
      Ring::Result result{};
      result.stamp = result.stamp_of(1, step);
      result.count = static_cast<std::int32_t>(step % 34);
      result.rows = static_cast<std::int32_t>(step);
      ring.write(0, step, result, tokens);
    }
    done = true;
  });
  ResultCursor cursor{0, 1, 0};
  int wrong = 0;
  for (bool over = false; !over;) {
    over = done;
    try {
      ring.read(cursor, [&](const Ring::Result& r) {
        const auto step = static_cast<Token>(cursor.step - 1);
        wrong += static_cast<int>(r.rows != step || r.count != step % 34);
        for (int i = 0; i < r.count; ++i) wrong += static_cast<int>(r.tokens[i] != step);
      });
    } catch (const ResultsOverrun&) {
      cursor.step += 4;
      over = over && cursor.step >= last;
    }
  }
  writer.join();
  CHECK(wrong == 0);
  CHECK(cursor.step >= last);
}

TEST_CASE("limits of 0 pause a sequence; end tokens, the token limit and the context limit end it") {
  Small device({.sequences = 4}, Serial{});
  const auto run = [&](int steps) {
    for (int step = 0; step < steps; ++step) count_on(device, 4);
  };
  std::vector<ResultCursor> cursors;
  cursors.push_back(device.attach(0, {1}, {.limits = {.rows = 0}}));
  cursors.push_back(device.attach(1, {1}, {.end_tokens = {7, 3}, .end_token_count = 2}));
  cursors.push_back(device.attach(2, {1, 2, 3}, {.limits = {.tokens_left = 2}}));
  cursors.push_back(device.attach(3, {1, 2, 3}, {.context_limit = 5}));
  run(6);
  std::vector<Tokens> texts(4);
  std::vector<EndReason> ends(4);
  std::vector<int> steps(4);
  const auto read = [&] {
    for (std::size_t i = 0; i < 4; ++i)
      device.read(cursors[i], [&](const auto& r) {
        texts[i].insert(texts[i].end(), r.tokens, r.tokens + r.count);
        ends[i] = r.end;
        ++steps[i];
      });
  };
  read();
  CHECK(texts == std::vector<Tokens>{{}, {2, 3}, {4, 5}, {4, 5, 6}});
  CHECK(ends ==
        std::vector<EndReason>{EndReason::none, EndReason::end_token, EndReason::token_limit, EndReason::out_of_room});
  CHECK(steps[0] == 6);
  // Nothing of those that ended is evaluated any more; the paused one goes on when it may.
  CHECK(device.memory().batch.packed.row_offsets[4] == 0);
  device.set_limits(0, {.tokens_left = 3});
  run(5);
  read();
  CHECK(texts[0] == Tokens{2, 3, 4});
  CHECK(ends[0] == EndReason::token_limit);
}

TEST_CASE("an engine that moves no rows is fed the others again") {
  Small device({.moves_rows = false}, Serial{});
  Tokens prompt;
  for (int i = 0; i < 40; ++i) prompt.push_back(i % 10);
  ResultCursor cursor = device.attach(0, prompt, {.shape = Shape::published()});
  const auto& b = device.memory().batch;
  int longest = 0;
  for (int step = 0; step < 10; ++step) {
    device.plan(b.rows);
    longest = std::max(longest, b.sequences[0].tree.root);
    device.resolve(choose_all(device, [&](int row) { return (b.packed.tokens[row] + 1) % 10; }), {}, 0);
  }
  Tokens text;
  device.read(cursor, [&](const auto& r) { text.insert(text.end(), r.tokens, r.tokens + r.count); });
  CHECK(text.size() > 20);
  for (std::size_t i = 0; i < text.size(); ++i) CHECK(text[i] == static_cast<Token>(i % 10));
  CHECK(longest > 0);
}

TEST_CASE("a sequence that comes between plan and resolve takes part in the next step") {
  Small device({.sequences = 2}, Serial{});
  device.attach(0, {1}, {});
  device.plan(4);
  const Tokens chosen = choose_all(device, [](int) { return 9; });
  ResultCursor cursor = device.attach(1, {5}, {});
  device.detach(0);
  device.resolve(chosen, {}, 0);
  CHECK(device.read(cursor, [](const auto&) {}) == 0);
  count_on(device, 4);
  CHECK(device.read(cursor, [](const auto& r) { CHECK(r.tokens[0] == 6); }) == 1);
}

TEST_CASE("the step that was planned twice is planned once") {
  Small device({}, Serial{});
  ResultCursor cursor = device.attach(0, {1, 2, 1, 2, 1}, {});
  device.plan(8);
  device.plan(8);
  count_on(device, 8);
  CHECK(device.read(cursor, [](const auto& r) { CHECK(r.tokens[0] == 2); }) == 1);
}

TEST_CASE("options out of their range are refused, with the value, the limit and the remedy") {
  const auto refusal = [](const BatchOptions& options) {
    return message_of<InvalidArgument>([&] { Memory<5, 3, 5> memory(options); });
  };
  CHECK(refusal({.sequences = 0}) == "a batch of 0 sequences: choose 1 to 65536");
  CHECK(refusal({.rows = 0}) == "0 rows for each sequence: choose 1 or more");
  CHECK(refusal({.pool_slots = 0}) == "pools of 0 slots: choose 1 to 2147483648");
  CHECK(refusal({.result_steps = 0}) == "room for the results of 0 steps: choose 1 to 1048576");
  const auto sequence = [](const SequenceOptions<Token>& options) {
    return message_of<InvalidArgument>([&] { detail::check(options); });
  };
  CHECK(sequence({.end_token_count = 9}) == "9 end tokens: pass 0 to 8");
  CHECK(sequence({.temperature = -1}) == "temperature is -1.000000: choose 0 or more");
  CHECK(sequence({.temperature = std::numeric_limits<float>::quiet_NaN()}) == "temperature is nan: choose 0 or more");
  CHECK(sequence({.temperature = std::numeric_limits<float>::infinity()}) == "temperature is inf: choose 0 or more");
  CHECK(sequence({}) == "nothing was thrown");
}

TEST_CASE("the bucket is the smallest that holds the rows") {
  const auto bucket = [](int rows) { return detail::bucket_of<15, 5, 15>(rows, 153); };
  CHECK(bucket(1) == 1);
  CHECK(bucket(2) == 4);
  CHECK(bucket(9) == 16);
  CHECK(bucket(64) == 64);
  CHECK(bucket(65) == 120);
  CHECK(bucket(120) == 120);
  CHECK(bucket(121) == 153);
  CHECK(detail::bucket_of<5, 3, 5>(17, 40) == 20);
  CHECK(detail::bucket_of<5, 3, 5>(17, 18) == 18);
}

namespace {

/// What `SampleVerify` reads.
struct Row {
  using token_type = Token;
  std::vector<float> logit;
  [[nodiscard]] std::span<const float> logits(int) const { return logit; }
};

template <class Who>
Token draw(const Who& who, const std::vector<float>& logits, float temperature, double u) {
  const auto scratch = std::make_unique<detail::DrawScratch>();
  who.run([&](const auto& g) {
    detail::draw(g, logits.data(), static_cast<int>(logits.size()), temperature, u, *scratch);
  });
  return scratch->begin;
}

}  // namespace

TEST_CASE("a draw is SampleVerify's, whoever makes it") {
  std::mt19937 random(1);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const int draws = std::min(cases(1000), 5000);
  for (int i = 0; i < draws; ++i) {
    CAPTURE(i);
    Row row;
    row.logit.resize(static_cast<std::size_t>(1 + below(below(20) == 0 ? 70000 : 600)));
    std::normal_distribution<float> normal(0, 4);
    for (float& x : row.logit) x = below(50) == 0 ? -std::numeric_limits<float>::infinity() : normal(random);
    row.logit[static_cast<std::size_t>(below(static_cast<int>(row.logit.size())))] = 1;
    const float temperature = below(5) == 0 ? 0.0F : 0.05F * static_cast<float>(1 + below(40));
    SampleOptions options{.temperature = temperature, .seed = random(), .stream = random()};
    SampleVerify<Token> policy(options);
    const int position = below(1000);
    policy.observe(0, Tokens(static_cast<std::size_t>(position)));
    const Token wanted = policy.select(row, 0, position);
    const double u = Philox::at(options.seed, options.stream, static_cast<std::uint64_t>(position)).uniform();
    REQUIRE(draw(Serial{}, row.logit, temperature, u) == wanted);
    if (i % 50 == 0) REQUIRE(draw(Threads{3, i % 100 == 0}, row.logit, temperature, u) == wanted);
  }
}

TEST_CASE("a draw from strange logits takes a token that exists") {
  constexpr float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const float temperature : {0.0F, 1.0F}) {
    CHECK(draw(Serial{}, {nan, nan}, temperature, 0.9) == 0);
    CHECK(draw(Serial{}, {-inf, -inf}, temperature, 0.9) == 0);
    CHECK(draw(Serial{}, {0, inf, nan, inf}, temperature, 0.9) == 1);
    CHECK(draw(Serial{}, {nan, -5, nan}, temperature, 0.9) == 1);
  }
  CHECK(draw(Serial{}, {3, 3, 3}, 0, 0.9) == 0);
  // A token without a weight is never drawn.
  CHECK(draw(Serial{}, {-inf, 0, -inf}, 1, 0) == 1);
  CHECK(draw(Serial{}, {-inf, 0, -inf}, 1, std::nextafter(1.0, 0.0)) == 1);
}
