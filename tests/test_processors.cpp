// Each processor against its formula, and what the sampler does with them.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cases.hpp"
#include "plain_sampling.hpp"

#include "lookahead/decoder.hpp"
#include "lookahead/processors.hpp"
#include "lookahead/sample_verify.hpp"
#include "lookahead/testing/oracle_model.hpp"

namespace {

using namespace lookahead;
using lookahead::testing::OracleModel;
using lookahead::testing::OracleOptions;
using plain_sampling::Penalties;
using plain_sampling::processed;
using plain_sampling::sample;
using plain_sampling::sample_with;

using Token = std::int32_t;
using Tokens = std::vector<Token>;

constexpr float inf = std::numeric_limits<float>::infinity();

static_assert(LogitsProcessor<RepetitionPenalty, Token>);
static_assert(LogitsProcessor<RepetitionPenalty, std::uint16_t>);
static_assert(LogitsProcessor<FrequencyPenalty, Token>);
static_assert(LogitsProcessor<LogitBias<Token>, Token>);
static_assert(LogitsProcessor<BannedTokens<Token>, Token>);
static_assert(LogitsProcessor<MinimumLength<Token>, Token>);
static_assert(LogitsProcessor<void (*)(std::span<float>, std::span<const Token>), Token>);
static_assert(!LogitsProcessor<BannedTokens<Token>, std::uint16_t>);
static_assert(!LogitsProcessor<void (*)(std::span<float>), Token>);

// Random histories: longer ones, shorter ones, others. A processor lives through all of them.
template <class Processor, class Set>
void check(Processor processor, const Set& set) {
  std::mt19937_64 random(5);
  Penalties p;
  set(p);
  for (int i = 0; i < 500; ++i) {
    const std::size_t vocabulary = 8 + random() % 30;
    std::vector<float> logits(vocabulary);
    for (float& x : logits) x = random() % 10 == 0 ? -inf : static_cast<float>(random() % 2000) / 100 - 10;
    Tokens text(random() % 100);
    for (Token& t : text) t = static_cast<Token>(random() % std::min<std::size_t>(vocabulary, 12));
    const std::vector<float> expected = processed(std::span<const float>(logits), text, p);
    processor(std::span<float>(logits), std::span<const Token>(text));
    REQUIRE(logits == expected);
  }
}

}  // namespace

TEST_CASE("each processor does what its formula says, whatever it saw before") {
  check(RepetitionPenalty({}), [](Penalties&) {});
  check(FrequencyPenalty({}), [](Penalties&) {});
  for (const std::size_t last : {0U, 1U, 7U, 64U}) {
    for (const float penalty : {1.3F, 0.5F}) {
      check(RepetitionPenalty({penalty, last}), [&](Penalties& p) {
        p.repetition = penalty;
        p.repetition_last = last;
      });
    }
    for (const auto& [frequency, presence] : {std::pair{0.3F, 0.0F}, std::pair{0.0F, 0.7F}, std::pair{-0.4F, 0.2F}}) {
      check(FrequencyPenalty({frequency, presence, last}), [&, f = frequency, q = presence](Penalties& p) {
        p.frequency = f;
        p.presence = q;
        p.frequency_last = last;
      });
    }
  }
  // Both penalties look back equally far unless told otherwise.
  check(RepetitionPenalty({.penalty = 1.3F}), [](Penalties& p) {
    p.repetition = 1.3F;
    p.repetition_last = 64;
  });
  check(FrequencyPenalty({.frequency = 0.3F}), [](Penalties& p) {
    p.frequency = 0.3F;
    p.frequency_last = 64;
  });
  const std::vector<std::pair<Token, float>> bias{{3, 1.5F}, {0, -inf}, {7, -2.0F}, {3, 0.25F}};
  check(LogitBias<Token>{bias}, [&](Penalties& p) { p.bias = bias; });
  check(BannedTokens<Token>{{2, 7, 2}}, [](Penalties& p) { p.banned = {2, 7}; });
  for (const std::size_t length : {0U, 1U, 20U, 100U}) {
    check(MinimumLength<Token>{length, {1, 6}}, [&](Penalties& p) {
      p.minimum = length;
      p.end_tokens = {1, 6};
    });
  }
}

TEST_CASE(
    "options that cannot be used are refused: penalties when they are made, tokens when the vocabulary is known") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto repetition = [](float penalty, const std::string& value) {
    CHECK_THROWS_WITH_AS(
        RepetitionPenalty({penalty}),
        ("the repetition penalty is " + value + ": choose a finite number above 0; 1 changes nothing").c_str(),
        InvalidArgument);
  };
  repetition(0, "0.000000");
  repetition(-1.5F, "-1.500000");
  repetition(inf, "inf");
  CHECK_THROWS_AS(RepetitionPenalty({nan}), InvalidArgument);
  CHECK_NOTHROW(RepetitionPenalty({0.001F}));
  for (const float bad : {nan, inf, -inf}) {
    CHECK_THROWS_AS(FrequencyPenalty({.frequency = bad}), InvalidArgument);
    CHECK_THROWS_AS(FrequencyPenalty({.presence = bad}), InvalidArgument);
  }
  CHECK_THROWS_WITH_AS(FrequencyPenalty({.frequency = inf}),
                       "the frequency penalty is inf: choose a finite number; 0 changes nothing", InvalidArgument);
  CHECK_THROWS_WITH_AS(FrequencyPenalty({.presence = -inf}),
                       "the presence penalty is -inf: choose a finite number; 0 changes nothing", InvalidArgument);
  CHECK_NOTHROW(FrequencyPenalty({-2, -2}));

  std::vector<float> logits(8);
  const auto refuses = [&](auto processor, const Tokens& text, const std::string& message) {
    CHECK_THROWS_WITH_AS(processor(std::span<float>(logits), std::span<const Token>(text)), message.c_str(),
                         InvalidArgument);
  };
  const std::string outside = " is outside the vocabulary of 8: take it from this model's tokenizer";
  for (const Token t : {8, -1, std::numeric_limits<Token>::max(), std::numeric_limits<Token>::min()}) {
    const std::string token = std::to_string(t);
    refuses(BannedTokens<Token>{{7, t}}, {}, "the banned token " + token + outside);
    refuses(LogitBias<Token>{{{0, 1.0F}, {t, 1.0F}}}, {}, "the biased token " + token + outside);
    refuses(MinimumLength<Token>{1, {t}}, {}, "the end token " + token + outside);
    refuses(MinimumLength<Token>{1, {t}}, {1, 2}, "the end token " + token + outside);
    refuses(RepetitionPenalty({2}), {1, t, 1}, "the text's token " + token + outside);
    refuses(FrequencyPenalty({1}), {1, t, 1}, "the text's token " + token + outside);
  }
  refuses(LogitBias<Token>{{{3, inf}}}, {},
          "the bias of token 3 is inf: choose a finite number, or -infinity to ban it");
  CHECK_THROWS_AS((LogitBias<Token>{{{3, nan}}}(std::span(logits), std::span<const Token>())), InvalidArgument);

  // What was refused leaves nothing behind.
  FrequencyPenalty penalty({1});
  CHECK_THROWS_AS(penalty(std::span(logits), std::span<const Token>(Tokens{3, 3, 9})), InvalidArgument);
  logits.assign(8, 0);
  penalty(std::span(logits), std::span<const Token>(Tokens{3, 4}));
  CHECK(logits == std::vector<float>{0, 0, 0, -1, -1, 0, 0, 0});
}

TEST_CASE("a decoder whose processor refuses its options has not changed") {
  OracleOptions options;
  options.vocabulary = 8;
  OracleModel<> model(options);
  SampleVerify verify(SampleOptions{}, BannedTokens<Token>{{8}});
  Decoder<OracleModel<>, 5, 4, 5, decltype(verify)> decoder(model, {}, verify);
  decoder.start(Tokens{1, 2, 3});
  CHECK_THROWS_AS(decoder.run(5, [](Token) { FAIL("a token"); }), InvalidArgument);
  CHECK(decoder.text().size() == 3);
  CHECK(model.context_size() == 2);
}

TEST_CASE("a minimum length counts the prompt, and not the end token") {
  OracleOptions options;
  options.vocabulary = 3;
  for (std::size_t length = 1; length < 40; ++length) {
    OracleModel<> model(options);
    DecoderOptions<Token> how;
    how.cost = lookahead::StepCost::none();
    how.end_tokens = {0, 2};
    SampleVerify verify(SampleOptions{}, MinimumLength<Token>{length, {0, 2}});
    Decoder<OracleModel<>, 5, 4, 5, decltype(verify)> decoder(model, how, verify);
    const Generation g = decoder.generate(Tokens{1, 1}, 200, [](Token) {});
    CHECK(g.stop == StopReason::end_token);
    CHECK(decoder.text().size() > length);
    CHECK(std::count(decoder.text().begin(), decoder.text().end(), 1) == std::ssize(decoder.text()) - 1);
  }
}

TEST_CASE("processors run in the order in which they are given") {
  struct Fixed {
    std::vector<float> values{1, 2, 3};
    [[nodiscard]] std::span<const float> logits(int) const { return values; }
  } model;
  SampleOptions greedy;
  greedy.temperature = 0;
  const auto add = [](std::span<float> logits, std::span<const Token>) { logits[0] += 3; };
  const auto negate = [](std::span<float> logits, std::span<const Token>) {
    for (float& x : logits) x = -x;
  };
  SampleVerify add_first(greedy, add, negate);
  SampleVerify negate_first(greedy, negate, add);
  CHECK(add_first.select(model, 0, 0) == 1);     // -4 -2 -3
  CHECK(negate_first.select(model, 0, 0) == 0);  // 2 -2 -3
}

// A rule over the whole text, of the kind that cannot be applied to draft rows one by one.
TEST_CASE("a processor of the caller's sees the true text, and only rows that the walk reaches") {
  std::mt19937_64 random(6);
  const int count = cases(2000) / 10;
  std::size_t tokens = 0, steps = 0;
  for (int i = 0; i < count; ++i) {
    OracleOptions options;
    options.seed = random();
    options.vocabulary = 12;
    options.repetition = 1;
    const Tokens prompt{1, 2, 3};
    // No token may follow a token that it has followed before.
    const auto rule = [](std::span<float> logits, std::span<const Token> text) {
      for (std::size_t k = 1; k < text.size(); ++k)
        if (text[k - 1] == text.back() && text[k] != 0) logits[static_cast<std::size_t>(text[k])] = -inf;
    };
    SampleOptions sampling;
    sampling.temperature = static_cast<float>(random() % 2);
    sampling.seed = random();
    OracleModel<> plain_model(options), model(options);
    const Tokens expected =
        sample_with(plain_model, prompt, 60, {}, [&](std::span<const float> logits, const Tokens& text) {
          std::vector<float> changed(logits.begin(), logits.end());
          rule(changed, text);
          return static_cast<Token>(
              plain_sampling::draw(plain_sampling::weights(changed, sampling), sampling, text.size()));
        });

    std::size_t calls = 0;
    SampleVerify verify(sampling, [&](std::span<float> logits, std::span<const Token> text) {
      CHECK(text.size() == prompt.size() + calls++);
      rule(logits, text);
    });
    DecoderOptions<Token> how;
    how.cost = lookahead::StepCost::none();
    how.shape.w = static_cast<int>(random() % 6);
    how.pool_slots = 1024;
    Decoder<OracleModel<>, 5, 4, 5, decltype(verify)> decoder(model, how, verify);
    Tokens text;
    const Generation g = decoder.generate(prompt, 60, [&](Token t) { text.push_back(t); });
    REQUIRE(text == expected);
    REQUIRE(calls == text.size());
    tokens += g.tokens;
    steps += g.steps;
  }
  CHECK(tokens > steps);
}

TEST_CASE("a processor that throws: nothing has changed, the step can be tried again") {
  OracleOptions options;
  options.vocabulary = 30;
  options.repetition = 1;
  const Tokens prompt{1, 2, 3};
  Penalties penalties;
  penalties.frequency = 0.1F;
  SampleOptions sampling;
  sampling.temperature = 0.3F;
  OracleModel<> plain_model(options);
  const Tokens expected = sample(plain_model, prompt, 50, {}, sampling, penalties);
  for (std::size_t at = 3; at < 50; ++at) {
    OracleModel<> model(options);
    int failures = 2;
    SampleVerify verify(sampling, FrequencyPenalty({0.1F}), [&](std::span<float> logits, std::span<const Token> text) {
      if (text.size() != at || failures-- <= 0) return;
      logits[0] = inf;
      throw std::runtime_error("not now");
    });
    Decoder<OracleModel<>, 5, 4, 5, decltype(verify)> decoder(model, {}, verify);
    Tokens text;
    int thrown = 0;
    decoder.start(prompt);
    while (text.size() < 50) {
      const std::size_t cached = model.context_size();
      const Tokens before(decoder.text().begin(), decoder.text().end());
      try {
        decoder.step(50 - text.size(), [&](Token t) { text.push_back(t); });
      } catch (const std::runtime_error&) {
        ++thrown;
        CHECK(model.context_size() == cached);
        CHECK(std::ranges::equal(decoder.text(), before));
      }
    }
    CHECK(thrown == 2);
    CHECK(text == expected);
  }
}
