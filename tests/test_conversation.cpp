// Texts that go on, go back and part: whatever was done to reach a text, it goes on as plain sampling does from there.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <doctest/doctest.h>
#include <iterator>
#include <memory>
#include <random>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cases.hpp"
#include "plain_sampling.hpp"

#include "lookahead/decoder.hpp"
#include "lookahead/log_probs.hpp"
#include "lookahead/processors.hpp"
#include "lookahead/sample_verify.hpp"
#include "lookahead/testing/oracle_model.hpp"
#include "lookahead/verify_policy.hpp"

namespace {

using namespace lookahead;
using lookahead::testing::InjectedFault;
using lookahead::testing::OracleModel;
using lookahead::testing::OracleOptions;
using plain_sampling::Penalties;
using plain_sampling::sample;

using Token = std::int32_t;
using Tokens = std::vector<Token>;
using Policy = SampleVerify<Token, RepetitionPenalty, FrequencyPenalty>;
template <class M = OracleModel<>>
using Sampler = Decoder<M, 5, 4, 5, Policy>;

const Tokens prompt{3, 1, 4, 1, 5, 9, 2, 6};

OracleOptions repetitive() {
  OracleOptions options;
  options.vocabulary = 30;
  options.repetition = 1;
  return options;
}

SampleOptions sampling(std::uint64_t stream = 0) {
  SampleOptions o;
  o.temperature = 0.6F;
  o.seed = 11;
  o.stream = stream;
  return o;
}

Penalties penalties() {
  Penalties p;
  p.repetition = 1.05F;
  p.repetition_last = 10;
  p.frequency = 0.05F;
  return p;
}

Policy policy(std::uint64_t stream = 0) {
  return Policy(sampling(stream), RepetitionPenalty({1.05F, 10}), FrequencyPenalty({0.05F}));
}

// What plain sampling says behind `text`.
Tokens truth(const Tokens& text, std::size_t count, std::uint64_t stream = 0) {
  OracleModel<> model(repetitive());
  return sample(model, text, count, {}, sampling(stream), penalties());
}

template <class D>
Tokens text_of(const D& decoder) {
  return Tokens(decoder.text().begin(), decoder.text().end());
}

constexpr auto ignore = [](Token) {};

// Does what a call says until no injected fault comes in between.
template <class Call>
void retry(const Call& call) {
  for (;;) {
    try {
      call();
      return;
    } catch (const InjectedFault&) {
    }
  }
}

using Blocks = decltype(std::declval<Sampler<>&>().stream(1));
static_assert(std::ranges::input_range<Blocks>);
static_assert(std::is_same_v<std::ranges::range_value_t<Blocks>, std::span<const Token>>);
static_assert(ObservingPolicy<Policy, Token>);
static_assert(ObservingPolicy<LogProbs<GreedyVerify>, Token>);
static_assert(!ObservingPolicy<GreedyVerify, Token> && ObserveIsCallable<GreedyVerify, Token>);
static_assert(!std::is_copy_constructible_v<Sampler<>>);
static_assert(std::is_nothrow_move_constructible_v<Sampler<>>);

}  // namespace

TEST_CASE("random conversations: each text goes on as plain sampling does") {
  const int count = cases(2000) / 4;
  std::size_t tokens = 0, steps = 0, forks = 0, backs = 0;
  for (int i = 0; i < count; ++i) {
    CAPTURE(i);
    std::mt19937_64 random(static_cast<std::uint64_t>(i));
    OracleOptions options = repetitive();
    options.max_kept = random() % 2 == 0 ? static_cast<int>(random() % 4) : 1000;
    if (random() % 2 == 0) options.fail_forward = 1 + static_cast<int>(random() % 30);
    if (random() % 2 == 0) options.fail_commit = 1 + static_cast<int>(random() % 30);
    if (random() % 2 == 0) options.fail_prefill = 1 + static_cast<int>(random() % 4);
    DecoderOptions<Token> how;
    how.cost = lookahead::StepCost::none();
    how.shape = {static_cast<int>(random() % 6), 4, static_cast<int>(random() % 6),
                 random() % 2 == 0 ? ShapeMode::growth : ShapeMode::published, random() % 2 == 0};
    how.rows = 1 + random() % 40;
    if (random() % 2 == 0) how.cost = lookahead::StepCost::given({100, 130, 160, 200, 300, 400, 500, 600});
    how.pool_slots = 1024;
    how.keep_pool = random() % 2 == 0;
    const auto input = [&] {
      Tokens t(1 + random() % 12);
      for (Token& x : t) x = static_cast<Token>(random() % 30);
      return t;
    };
    // Forks keep a reference to their model.
    std::deque<OracleModel<>> models;
    models.emplace_back(options);
    auto decoder = std::make_unique<Sampler<>>(models.back(), how, policy());
    std::uint64_t stream = 0;
    Tokens text = input();
    retry([&] { decoder->start(text); });
    for (int turn = 0; turn < 12; ++turn) {
      CAPTURE(turn);
      switch (random() % 8) {
        case 0: {
          const Tokens more = input();
          retry([&] { decoder->append(more); });
          text.insert(text.end(), more.begin(), more.end());
          break;
        }
        case 1:
        case 2:
          text.resize(1 + random() % text.size());
          decoder->roll_back(text.size());
          ++backs;
          break;
        case 3: {
          models.push_back(models.back().fork());
          auto fork = std::make_unique<Sampler<>>(decoder->fork(models.back()));
          stream = random() % 5;
          fork->verify().set_stream(stream);
          // What the first one does from now on is nothing to the fork.
          retry([&] { decoder->run(random() % 5, ignore); });
          decoder = std::move(fork);
          ++forks;
          break;
        }
        case 4:
          if (random() % 2 == 0) {
            text = input();
            retry([&] { decoder->start(text); });
          }
          break;
        default: {
          const std::size_t target = text.size() + random() % 30;
          const Tokens more = truth(text, target - text.size(), stream);
          text.insert(text.end(), more.begin(), more.end());
          retry([&] {
            const Generation g = decoder->run(target - decoder->text().size(), ignore);
            tokens += g.tokens;
            steps += g.steps;
          });
        }
      }
      REQUIRE(text_of(*decoder) == text);
      REQUIRE(decoder->verify().history().size() >= text.size());
    }
  }
  CHECK(tokens > steps);
  CHECK(forks > 0);
  CHECK(backs > 0);
}

TEST_CASE("back to every position, and on") {
  for (const int kept : {0, 2, 1000}) {
    OracleOptions options = repetitive();
    options.max_kept = kept;
    OracleModel<> model(options);
    Sampler<> decoder(model, {}, policy());
    decoder.generate(prompt, 40, ignore);
    const Tokens all = text_of(decoder);
    for (std::size_t length = 1; length <= all.size(); ++length) {
      CAPTURE(length);
      decoder.roll_back(length);
      CHECK(decoder.stop_reason() == StopReason::running);
      CHECK(decoder.text().size() == length);
      CHECK(model.context_size() < length);
      decoder.run(all.size() - length, ignore);
      // The prompt's own tokens are not what the model would say.
      Tokens expected(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(length));
      const Tokens more = truth(expected, all.size() - length);
      expected.insert(expected.end(), more.begin(), more.end());
      CHECK(text_of(decoder) == expected);
      if (length >= prompt.size()) CHECK(expected == all);
      decoder.start(prompt);
      decoder.run(40, ignore);
    }
  }
}

TEST_CASE("back from the end of a text: it has not ended") {
  DecoderOptions<Token> how;
  how.cost = lookahead::StepCost::none();
  how.end_tokens = {truth(prompt, 20).back()};
  OracleModel<> model(repetitive());
  Sampler<> decoder(model, how, policy());
  CHECK(decoder.generate(prompt, 100, ignore).stop == StopReason::end_token);
  const Tokens all = text_of(decoder);
  decoder.roll_back(all.size() - 1);
  CHECK(decoder.run(100, ignore).stop == StopReason::end_token);
  CHECK(text_of(decoder) == all);
  decoder.roll_back(all.size());
  CHECK(decoder.run(1, ignore).tokens == 1);
}

TEST_CASE("several continuations of one text: each is a fresh decoder's with that stream") {
  OracleModel<> model(repetitive());
  Sampler<> decoder(model, {}, policy());
  decoder.generate(prompt, 30, ignore);
  const Tokens so_far = text_of(decoder);
  constexpr std::size_t n = 6;
  std::vector<OracleModel<>> models(n, model.fork());
  std::vector<Sampler<>> forks;
  for (std::uint64_t i = 0; i < n; ++i) {
    forks.push_back(decoder.fork(models[i]));
    forks.back().verify().set_stream(i);
  }
  std::vector<Tokens> said(n);
  for (int turn = 0; turn < 10; ++turn)  // in turns: they share nothing
    for (std::size_t i = 0; i < n; ++i) forks[i].run(5, [&](Token t) { said[i].push_back(t); });
  for (std::uint64_t i = 0; i < n; ++i) {
    OracleModel<> fresh_model(repetitive());
    Sampler<> fresh(fresh_model, {}, policy(i));
    Tokens text;
    fresh.generate(so_far, 50, [&](Token t) { text.push_back(t); });
    CHECK(said[i] == text);
    CHECK(said[i] == truth(so_far, 50, i));
    if (i > 0) CHECK(said[i] != said[0]);
  }
  CHECK(text_of(decoder) == so_far);
}

TEST_CASE("a fork has what its decoder has: the pool, and the end of the text") {
  OracleOptions options = repetitive();
  options.vocabulary = 5000;
  options.repetition = 0;
  OracleModel<> model(options);
  Decoder<OracleModel<>, 5, 4, 5> decoder(model, {.cost = lookahead::StepCost::none()});
  decoder.generate(prompt, 60, ignore);
  const Tokens all = text_of(decoder);
  decoder.roll_back(prompt.size());
  OracleModel<> copy = model.fork();
  auto fork = decoder.fork(copy);
  CHECK(fork.run(60, ignore).steps < 10);  // the pool knows the text
  CHECK(text_of(fork) == all);

  DecoderOptions<Token> how;
  how.cost = lookahead::StepCost::none();
  how.end_tokens = {all.back()};
  Decoder<OracleModel<>, 5, 4, 5> ending(model, how);
  REQUIRE(ending.generate(prompt, 100, ignore).stop == StopReason::end_token);
  OracleModel<> ended_model = model.fork();
  auto ended = ending.fork(ended_model);
  CHECK(ended.stop_reason() == StopReason::end_token);
  CHECK(ended.run(5, ignore).tokens == 0);
}

TEST_CASE("forks and roll-backs that cannot be are refused, and nothing has changed") {
  OracleModel<> model(repetitive());
  Sampler<> decoder(model, {}, policy());
  CHECK_THROWS_WITH_AS(decoder.roll_back(1), "there is no text to continue: call start with a prompt first",
                       InvalidArgument);
  CHECK_THROWS_AS((void)decoder.stream(1), InvalidArgument);
  decoder.generate(prompt, 12, ignore);
  CHECK_THROWS_WITH_AS(decoder.roll_back(0), "a text of 20 tokens cannot go back to 0: pass 1 to its length",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(decoder.roll_back(21), "a text of 20 tokens cannot go back to 21: pass 1 to its length",
                       InvalidArgument);
  OracleModel<> empty(repetitive());
  CHECK_THROWS_WITH_AS((void)decoder.fork(empty),
                       "the fork's model holds 0 tokens, this one 19: pass a fork of the model", InvalidArgument);
  CHECK_THROWS_WITH_AS((void)decoder.fork(model), "a fork needs a model of its own: pass a fork of this one's",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(decoder.append(decoder.text().first(3)),
                       "tokens are a part of the decoder's own text, which changes: pass a copy", InvalidArgument);
  CHECK_THROWS_WITH_AS(decoder.start(decoder.text().subspan(5)),
                       "prompt tokens are a part of the decoder's own text, which changes: pass a copy",
                       InvalidArgument);
  model.prefill(Tokens{1});
  CHECK_THROWS_AS(decoder.roll_back(5), ContractViolation);
  CHECK_THROWS_AS(decoder.append(Tokens{1}), ContractViolation);
  model.truncate(19);
  decoder.run(20, ignore);
  Tokens expected = prompt;
  const Tokens more = truth(prompt, 32);
  expected.insert(expected.end(), more.begin(), more.end());
  CHECK(text_of(decoder) == expected);
}

TEST_CASE("a pool that is kept saves steps, and changes no text") {
  std::size_t steps[2];
  for (const bool keep : {false, true}) {
    OracleOptions options = repetitive();
    options.repetition = 0;
    options.vocabulary = 5000;
    DecoderOptions<Token> how;
    how.cost = lookahead::StepCost::none();
    how.keep_pool = keep;
    OracleModel<> model(options);
    SampleOptions cold = sampling();
    cold.temperature = 0.2F;
    using Plain = SampleVerify<>;
    Decoder<OracleModel<>, 5, 4, 5, Plain> decoder(model, how, Plain(cold));
    Tokens first, second;
    decoder.generate(prompt, 60, [&](Token t) { first.push_back(t); });
    steps[keep ? 1 : 0] = decoder.generate(prompt, 60, [&](Token t) { second.push_back(t); }).steps;
    OracleModel<> plain(options);
    CHECK(first == sample(plain, prompt, 60, {}, cold, {}));
    CHECK(second == first);
  }
  CHECK(steps[0] == 60);
  CHECK(steps[1] < 10);
}

TEST_CASE("a range of blocks: each step runs when its block is asked for") {
  for (const int rows : {1, 3, 40}) {
    OracleOptions options = repetitive();
    options.max_kept = 0;  // and so several tokens may be pending, more than there are rows
    OracleModel<> model(options);
    DecoderOptions<Token> how;
    how.cost = lookahead::StepCost::none();
    Sampler<> decoder(model, how, policy());
    decoder.start(prompt);
    Tokens text;
    std::size_t blocks = 0;
    decoder.run(20, [&](Token t) { text.push_back(t); });
    decoder.set_rows(static_cast<std::size_t>(rows));
    for (const auto block : decoder.stream(30)) {
      CHECK_FALSE(block.empty());
      text.insert(text.end(), block.begin(), block.end());
      CHECK(decoder.text().size() == prompt.size() + text.size());
      if (++blocks == 3) break;
    }
    CHECK(decoder.stop_reason() == StopReason::running);
    const std::size_t left = 60 - text.size();
    for (const auto block : decoder.stream(left)) text.insert(text.end(), block.begin(), block.end());
    CHECK(decoder.stop_reason() == StopReason::max_tokens);
    CHECK(text == truth(prompt, 60));
    for (const auto block : decoder.stream(0)) FAIL("no token was asked for but " << block.size());
    CHECK(decoder.stop_reason() == StopReason::max_tokens);
    // Algorithms take it.
    std::size_t more = 0;
    std::ranges::for_each(decoder.stream(25), [&](std::span<const Token> block) { more += block.size(); });
    CHECK(more == 25);
  }
}

TEST_CASE("a range of blocks ends for every reason, and passes on what is thrown") {
  OracleOptions options = repetitive();
  options.capacity = 30;
  options.fail_forward = 2;
  for (const StopReason reason : {StopReason::end_token, StopReason::out_of_room}) {
    DecoderOptions<Token> how;
    how.cost = lookahead::StepCost::none();
    if (reason == StopReason::end_token) how.end_tokens = {truth(prompt, 10).back()};
    OracleModel<> model(options);
    Sampler<> decoder(model, how, policy());
    decoder.start(prompt);
    int thrown = 0;
    while (decoder.stop_reason() == StopReason::running) {
      try {
        for (const auto block : decoder.stream(100)) CHECK_FALSE(block.empty());
      } catch (const InjectedFault&) {
        ++thrown;
      }
    }
    CHECK(decoder.stop_reason() == reason);
    CHECK(thrown == 1);
    for (const auto block : decoder.stream(100)) FAIL("a block of " << block.size() << " tokens behind the end");
  }
}

namespace {

// A policy that cannot always take input.
struct Choosy {
  SampleVerify<> sampler{sampling()};
  int failures = 0;
  void observe(std::size_t position, std::span<const Token> tokens) {
    if (failures-- > 0) throw std::runtime_error("not now");
    sampler.observe(position, tokens);
  }
  Token select(OracleModel<>& model, int row, std::int64_t position) { return sampler.select(model, row, position); }
};

}  // namespace

TEST_CASE("a policy that throws when it is told of input") {
  OracleModel<> model(repetitive());
  Decoder<OracleModel<>, 5, 4, 5, Choosy> decoder(model);
  decoder.verify().failures = 1;
  CHECK_THROWS_WITH_AS(decoder.start(prompt), "not now", std::runtime_error);
  CHECK_THROWS_AS(decoder.step(1, ignore), InvalidArgument);
  CHECK(model.context_size() == 0);
  decoder.generate(prompt, 20, ignore);
  const Tokens before = text_of(decoder);
  decoder.verify().failures = 1;
  CHECK_THROWS_WITH_AS(decoder.append(Tokens{1, 2}), "not now", std::runtime_error);
  CHECK(text_of(decoder) == before);
  decoder.append(Tokens{1, 2});
  decoder.run(20, ignore);
  Tokens expected = before;
  for (const Token t : {1, 2}) expected.push_back(t);
  OracleModel<> plain(repetitive());
  const Tokens more = sample(plain, expected, 20, {}, sampling(), {});
  expected.insert(expected.end(), more.begin(), more.end());
  CHECK(text_of(decoder) == expected);
}

TEST_CASE("token by token or block by block") {
  OracleModel<> a(repetitive()), b(repetitive());
  Sampler<> blocks(a, {}, policy()), tokens(b, {}, policy());
  Tokens by_block, by_token;
  blocks.generate(prompt, 40,
                  [&](std::span<const Token> block) { by_block.insert(by_block.end(), block.begin(), block.end()); });
  tokens.generate(prompt, 40, [&](Token t) { by_token.push_back(t); });
  CHECK(by_block == by_token);
  CHECK(by_token == truth(prompt, 40));
  // A token sink that throws misses the rest of the block; the text has it.
  CHECK_THROWS_AS(tokens.run(30, [](Token) { throw std::runtime_error("later"); }), std::runtime_error);
  const std::size_t at = tokens.text().size();
  CHECK(at > prompt.size() + 40);
  tokens.run(prompt.size() + 90 - at, ignore);
  const Tokens all = truth(prompt, 90);
  CHECK(std::equal(all.begin(), all.end(), tokens.text().begin() + std::ssize(prompt), tokens.text().end()));
}
