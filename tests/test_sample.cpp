// Sampling: the same text as plain sampling, token for token, and the distribution that the options describe.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cases.hpp"
#include "plain_sampling.hpp"

#include "lookahead/decoder.hpp"
#include "lookahead/log_probs.hpp"
#include "lookahead/philox.hpp"
#include "lookahead/processors.hpp"
#include "lookahead/sample_verify.hpp"
#include "lookahead/testing/oracle_model.hpp"
#include "lookahead/testing/plain_decode.hpp"

namespace {

using namespace lookahead;
using lookahead::testing::InjectedFault;
using lookahead::testing::OracleModel;
using lookahead::testing::OracleOptions;
using lookahead::testing::Reads;
using plain_sampling::distribution;
using plain_sampling::draw;
using plain_sampling::Penalties;
using plain_sampling::sample;

using Token = std::int32_t;
using Tokens = std::vector<Token>;

constexpr float inf = std::numeric_limits<float>::infinity();

// The same logits in every row.
struct FixedLogits {
  using token_type = Token;
  std::vector<float> values;
  [[nodiscard]] std::span<const float> logits(int) const { return values; }
};

SampleOptions random_options(std::mt19937_64& random) {
  const auto share = [&] { return static_cast<float>(random() % 1000 + 1) / 1000; };
  SampleOptions o;
  o.temperature = random() % 8 == 0 ? 0 : 0.1F + 2 * share();
  if (random() % 2 == 0) o.top_k = random() % 12;
  if (random() % 2 == 0) o.top_p = share();
  if (random() % 3 == 0) o.min_p = share() / 3;
  o.seed = random() % 3 == 0 ? random() % 3 : random();
  o.stream = random() % 3 == 0 ? random() : random() % 3;
  return o;
}

// Pearson's statistic is this large by chance once in some 30,000 times.
double chi_square_limit(std::size_t freedom) {
  const double k = static_cast<double>(freedom), cube = 1 - 2 / (9 * k) + 4 * std::sqrt(2 / (9 * k));
  return k * cube * cube * cube;
}

// Whether `counts` may come from draws with these probabilities. Cells that are too rare for the test are merged.
bool plausible(const std::vector<std::size_t>& counts, const std::vector<double>& probabilities) {
  std::size_t draws = 0, cells = 0;
  for (const std::size_t n : counts) draws += n;
  double statistic = 0, rare_expected = 0, rare_seen = 0;
  const auto add = [&](double expected, double seen) {
    statistic += (seen - expected) * (seen - expected) / expected;
    ++cells;
  };
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const double expected = probabilities[i] * static_cast<double>(draws), seen = static_cast<double>(counts[i]);
    if (expected == 0 && seen > 0) return false;
    if (expected >= 10) {
      add(expected, seen);
    } else {
      rare_expected += expected;
      rare_seen += seen;
    }
  }
  if (rare_expected >= 10) add(rare_expected, rare_seen);
  return cells < 2 || statistic < chi_square_limit(cells - 1);
}

}  // namespace

TEST_CASE("Philox: the known answers of its authors") {
  const auto is = [](const Philox& x, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
    return x.word[0] == a && x.word[1] == b && x.word[2] == c && x.word[3] == d;
  };
  CHECK(is(Philox::at(0, 0, 0), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
  constexpr std::uint64_t ones = ~std::uint64_t{0};
  CHECK(is(Philox::at(ones, ones, ones), 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
  // The counter's words are position and stream, the key's the seed, low word first.
  CHECK(is(Philox::at(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88), 0xd16cfe09, 0x94fdcceb, 0x5001e420,
           0x24126ea1));
  static_assert(Philox{{0, 0, 0, 0}}.uniform() == 0);
  static_assert(Philox{{~0U, ~0U, 0, 0}}.uniform() == 1 - 0x1p-53);
  static_assert(Philox{{1U << 31, 0, 0, 0}}.uniform() == 0.5);
  static_assert(Philox{{0, 1U << 11, 0, 0}}.uniform() == 0x1p-53);
}

TEST_CASE("Philox: numbers are uniform, from seed to seed, stream to stream, position to position") {
  constexpr std::uint64_t bins = 16, draws = 60000;
  for (const std::uint64_t other : {std::uint64_t{0}, std::uint64_t{7}, ~std::uint64_t{0}}) {
    for (int axis = 0; axis < 3; ++axis) {
      // Neighbours in pairs: neither a number nor its successor tells anything of the other.
      std::vector<std::size_t> counts(bins * bins);
      const auto bin = [&](std::uint64_t i) {
        const Philox x = axis == 0   ? Philox::at(i, other, other)
                         : axis == 1 ? Philox::at(other, i, other)
                                     : Philox::at(other, other, i);
        return static_cast<std::uint64_t>(x.uniform() * bins);
      };
      for (std::uint64_t i = 0; i < draws; ++i) ++counts[bin(2 * i) * bins + bin(2 * i + 1)];
      CHECK(plausible(counts, std::vector<double>(counts.size(), 1.0 / (bins * bins))));
    }
  }
}

TEST_CASE_TEMPLATE("random requests: plain sampling's text, token for token", M, OracleModel<>,
                   OracleModel<Token, Reads::logits>) {
  using Policy = SampleVerify<Token, RepetitionPenalty, FrequencyPenalty, LogitBias<Token>, BannedTokens<Token>,
                              MinimumLength<Token>>;
  const int count = cases(10000) / 2;
  std::size_t tokens = 0, steps = 0;
  for (int i = 0; i < count; ++i) {
    CAPTURE(i);
    std::mt19937_64 random(static_cast<std::uint64_t>(i));
    OracleOptions options;
    options.seed = random();
    options.vocabulary = 2 + static_cast<int>(random() % 40);
    options.repetition = 0.5 + static_cast<double>(random() % 3) / 4;
    options.capacity = 1 + static_cast<int>(random() % 100);
    options.max_kept = random() % 3 == 0 ? static_cast<int>(random() % 4) : 1000;
    const auto token = [&] { return static_cast<Token>(random() % static_cast<std::uint64_t>(options.vocabulary)); };
    Tokens prompt(1 + random() % static_cast<std::size_t>(std::min(options.capacity, 20)));
    for (Token& t : prompt) t = token();
    const std::size_t wanted = random() % 60;
    const SampleOptions sampling = random_options(random);

    Penalties p;
    if (random() % 2 == 0) p.repetition = 0.8F + static_cast<float>(random() % 100) / 100;
    p.repetition_last = random() % 30;
    if (random() % 2 == 0) p.frequency = static_cast<float>(random() % 100) / 100 - 0.2F;
    if (random() % 2 == 0) p.presence = static_cast<float>(random() % 100) / 100 - 0.2F;
    p.frequency_last = random() % 30;
    while (random() % 2 == 0) p.bias.emplace_back(token(), static_cast<float>(random() % 100) / 20 - 2);
    while (random() % 2 == 0) p.banned.push_back(token());
    // One token stays, or nothing could be chosen.
    std::erase(p.banned, 0);
    while (random() % 2 == 0) p.end_tokens.push_back(token());
    std::erase(p.end_tokens, 0);
    p.minimum = random() % 60;

    DecoderOptions<Token> how;
    how.cost = lookahead::StepCost::none();
    how.shape = {static_cast<int>(random() % 7), 4, static_cast<int>(random() % 7),
                 random() % 2 == 0 ? ShapeMode::growth : ShapeMode::published, random() % 2 == 0};
    how.rows = 1 + random() % 40;
    if (random() % 2 == 0) how.cost = lookahead::StepCost::given({100, 130, 160, 200, 300, 400, 500, 600});
    how.pool_slots = 1024;
    how.seed = random();
    how.end_tokens = p.end_tokens;
    const Policy policy(sampling, RepetitionPenalty({p.repetition, p.repetition_last}),
                        FrequencyPenalty({p.frequency, p.presence, p.frequency_last}), {p.bias}, {p.banned},
                        {p.minimum, p.end_tokens});

    M plain_model(options);
    const Tokens expected = sample(plain_model, prompt, wanted, p.end_tokens, sampling, p);

    const auto decode = [&](const OracleOptions& o) {
      M model(o);
      Decoder<M, 5, 4, 5, Policy> decoder(model, how, policy);
      Tokens text;
      decoder.start(prompt);
      for (bool done = false; !done;) {
        try {
          const Generation g = decoder.run(wanted - text.size(), [&](std::span<const Token> block) {
            text.insert(text.end(), block.begin(), block.end());
          });
          tokens += g.tokens;
          steps += g.steps;
          done = true;
        } catch (const InjectedFault&) {
        }
      }
      // The policy knows the text, and nothing else.
      REQUIRE(std::ranges::equal(decoder.verify().history(), decoder.text()));
      return text;
    };
    OracleOptions failing = options;
    if (random() % 2 == 0)
      (random() % 2 == 0 ? failing.fail_forward : failing.fail_commit) = 1 + static_cast<int>(random() % 20);
    REQUIRE(decode(failing) == expected);
    how.rows = 1;
    REQUIRE(decode(options) == expected);
  }
  CHECK(tokens > steps);
}

TEST_CASE_TEMPLATE("every type of token", T, std::uint16_t, std::int8_t, std::uint32_t) {
  OracleOptions options;
  options.vocabulary = 40;
  options.repetition = 1;
  using M = OracleModel<T>;
  const std::vector<T> prompt{1, 2, 3};
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    SampleOptions sampling;
    sampling.temperature = 0.5F;
    sampling.seed = seed;
    M plain_model(options), model(options);
    const std::vector<T> expected = sample(plain_model, prompt, 50, {}, sampling, {});
    std::vector<T> text;
    const auto keep = [&](T token) { text.push_back(token); };
    Decoder decoder(model, {}, sample_verify<T>(sampling));
    decoder.generate(prompt, 50, keep);
    CHECK(text == expected);
    // With processors, and recorded.
    const RepetitionPenalty none({.penalty = 1});
    Decoder recorded(model, {}, LogProbs(sample_verify<T>(sampling, none, BannedTokens<T>{}), 1));
    text.clear();
    recorded.generate(prompt, 50, keep);
    CHECK(text == expected);
    CHECK(recorded.verify().at(prompt.size()).token == expected.front());
  }
}

TEST_CASE("temperature 0 is greedy decoding, ties included") {
  std::mt19937_64 random(2);
  for (int i = 0; i < 300; ++i) {
    OracleOptions options;
    options.seed = random();
    options.vocabulary = 2 + static_cast<int>(random() % 60);
    options.repetition = 0.9;
    SampleOptions sampling = random_options(random);
    sampling.temperature = 0;
    const Tokens prompt{1, 0, 1};
    OracleModel<> plain_model(options), model(options);
    Decoder<OracleModel<>, 5, 4, 5, SampleVerify<>> decoder(model, {}, SampleVerify<>(sampling));
    Tokens text;
    decoder.generate(prompt, 60, [&](Token t) { text.push_back(t); });
    REQUIRE(text == testing::plain_decode(plain_model, std::span(prompt), 60));
  }
  SampleOptions greedy;
  greedy.temperature = 0;
  SampleVerify<> verify(greedy);
  for (int i = 0; i < 2000; ++i) {
    FixedLogits model;
    for (std::size_t n = 1 + random() % 20; n > 0; --n) model.values.push_back(static_cast<float>(random() % 4) - 9);
    REQUIRE(verify.select(model, 0, i) == GreedyVerify{}.select(model, 0, i));
  }
}

TEST_CASE("draws have the target's distribution, over positions, streams and seeds") {
  FixedLogits model;
  for (int t = 0; t < 30; ++t) model.values.push_back(static_cast<float>((t * 7) % 30) / 5);
  model.values[3] = model.values[4] = -inf;
  model.values[6] = model.values[7];  // a tie
  constexpr std::uint64_t draws = 40000;
  SampleOptions menu[7];
  menu[1].temperature = 0.4F;
  menu[2].temperature = 3;
  menu[3].top_k = 5;
  menu[4].top_p = 0.8F;
  menu[5].min_p = 0.1F;
  menu[6] = {0.7F, 20, 0.95F, 0.02F, 0, 0};
  for (const SampleOptions& options : menu) {
    CAPTURE(&options - menu);
    const std::vector<double> target = distribution(model.values, options);
    for (int axis = 0; axis < 3; ++axis) {
      CAPTURE(axis);
      std::vector<std::size_t> counts(model.values.size());
      SampleOptions o = options;
      SampleVerify<> verify(o);
      for (std::uint64_t i = 0; i < draws; ++i) {
        std::int64_t position = 5;
        if (axis == 0) position = static_cast<std::int64_t>(i);
        if (axis == 1) verify.set_stream(i);
        if (axis == 2) {
          o.seed = i;
          verify = SampleVerify<>(o);
        }
        ++counts[static_cast<std::size_t>(verify.select(model, 0, position))];
      }
      CHECK(plausible(counts, target));
      // The test would notice a temperature that is a tenth off.
      SampleOptions other = options;
      other.temperature *= 1.1F;
      CHECK_FALSE(plausible(counts, distribution(model.values, other)));
    }
  }
}

TEST_CASE("whole texts have the target's distribution, in steps of many tokens") {
  // Few tokens, so that each pair of first tokens is frequent, and all are drafted.
  OracleOptions options;
  options.vocabulary = 5;
  options.repetition = 1;
  OracleModel<> model(options);
  const Tokens prompt{1, 2, 3, 4, 0, 1, 2, 3, 4, 0};
  SampleOptions sampling;
  sampling.temperature = 1.5F;
  sampling.top_p = 0.97F;

  std::vector<double> target(25);
  const auto next = [&](const Tokens& text) {
    model.truncate(0);
    model.prefill(std::span(text).first(text.size() - 1));
    TokenTreeStorage<Token, 1> tree;
    tree.begin(static_cast<int>(model.context_size()), &text.back(), 1);
    tree.want(0);
    model.forward(tree.view());
    return distribution(model.logits(0), sampling);
  };
  const std::vector<double> first = next(prompt);
  for (Token a = 0; a < 5; ++a) {
    Tokens text = prompt;
    text.push_back(a);
    const std::vector<double> second = next(text);
    for (std::size_t b = 0; b < 5; ++b)
      target[static_cast<std::size_t>(a) * 5 + b] = first[static_cast<std::size_t>(a)] * second[b];
  }

  DecoderOptions<Token> how;
  how.cost = lookahead::StepCost::none();
  how.pool_slots = 1024;
  how.keep_pool = true;  // what other streams have said is drafted, too
  Decoder<OracleModel<>, 5, 4, 5, SampleVerify<>> decoder(model, how, SampleVerify<>(sampling));
  std::vector<std::size_t> counts(25);
  std::size_t one_step = 0;
  for (std::uint64_t stream = 0; stream < 20000; ++stream) {
    decoder.verify().set_stream(stream);
    std::size_t pair = 0;
    one_step += decoder.generate(prompt, 2, [&](Token t) { pair = 5 * pair + static_cast<std::size_t>(t); }).steps == 1;
    ++counts[pair];
  }
  CHECK(plausible(counts, target));
  CHECK(one_step > 5000);
}

TEST_CASE("options at their limits") {
  FixedLogits model;
  model.values = {1, 4, 2, 4, 3, -inf};
  const auto drawn = [&](const SampleOptions& options) {
    SampleVerify<> verify(options);
    std::vector<bool> seen(model.values.size());
    for (std::int64_t i = 0; i < 2000; ++i) seen[static_cast<std::size_t>(verify.select(model, 0, i))] = true;
    return seen;
  };
  using Seen = std::vector<bool>;
  CHECK(drawn({}) == Seen{true, true, true, true, true, false});
  CHECK(drawn({1, 1}) == Seen{false, true, false, false, false, false});  // of a tie the lowest
  CHECK(drawn({1, 2}) == Seen{false, true, false, true, false, false});
  CHECK(drawn({1, 3}) == Seen{false, true, false, true, true, false});
  CHECK(drawn({1, 1000}) == Seen{true, true, true, true, true, false});
  CHECK(drawn({1, 0, 1e-30F}) == Seen{false, true, false, false, false, false});
  CHECK(drawn({1, 0, 0.5F}) == Seen{false, true, false, true, false, false});
  CHECK(drawn({1, 0, 1, 1}) == Seen{false, true, false, true, false, false});
  CHECK(drawn({1, 0, 1, 0.3F}) == Seen{false, true, false, true, true, false});
  CHECK(drawn({1e-40F}) == Seen{false, true, false, true, false, false});
  CHECK(drawn({1e38F}) == Seen{true, true, true, true, true, false});
  model.values = {0, 0, 0, 0};
  CHECK(drawn({1, 0, 0.5F}) == Seen{true, true, false, false});  // two have it exactly
}

TEST_CASE("options out of range, and logits that cannot be used, are refused") {
  const auto refuses = [](const SampleOptions& options, const char* message) {
    CHECK_THROWS_WITH_AS(SampleVerify<>{options}, message, InvalidArgument);
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  refuses({-1}, "temperature is -1.000000: choose 0 or more");
  refuses({inf}, "temperature is inf: choose 0 or more");
  CHECK_THROWS_AS(SampleVerify<>{SampleOptions{nan}}, InvalidArgument);
  refuses({1, 0, 0}, "top_p is 0.000000: choose a share above 0, up to 1");
  refuses({1, 0, 1.5F}, "top_p is 1.500000: choose a share above 0, up to 1");
  CHECK_THROWS_AS((SampleVerify<>{SampleOptions{1, 0, nan}}), InvalidArgument);
  refuses({1, 0, 1, -0.5F}, "min_p is -0.500000: choose a share from 0 to 1");
  refuses({1, 0, 1, 2}, "min_p is 2.000000: choose a share from 0 to 1");

  for (const float temperature : {0.0F, 1.0F}) {
    SampleVerify<> verify(SampleOptions{temperature});
    const auto fails = [&](std::vector<float> values, const char* message) {
      FixedLogits model{std::move(values)};
      CHECK_THROWS_WITH_AS(verify.select(model, 0, 7), message, ContractViolation);
    };
    fails({-inf, -inf},
          "no token can be chosen at position 7: the best logit is -inf; check the model and the processors");
    fails({1, inf, 2},
          "no token can be chosen at position 7: the best logit is inf; check the model and the processors");
    const char* const no_number =
        "no token can be chosen at position 7: a logit is not a number; check the model and the processors";
    fails({nan, 1}, no_number);
    fails({1, nan}, no_number);
  }
}

namespace {

// An engine that chooses tokens by itself, on a device for example: for every row whose logits are wanted, before
// anybody knows which rows the walk will reach.
struct Chooser : OracleModel<> {
  using OracleModel<>::OracleModel;
  SampleOptions sampling{};
  std::vector<Token> chosen{};
  void forward(const TokenTree<Token>& tree) {
    OracleModel<>::forward(tree);
    chosen.assign(static_cast<std::size_t>(tree.size()), -1);
    for (const std::int32_t row : tree.wanted()) {
      const auto r = static_cast<std::size_t>(row);
      const auto position = static_cast<std::size_t>(tree.positions()[r]) + 1;
      chosen[r] = static_cast<Token>(draw(plain_sampling::weights(logits(row), sampling), sampling, position));
    }
  }
};

struct TakeChosen {
  Token select(const Chooser& model, int row, std::int64_t) const {
    return model.chosen[static_cast<std::size_t>(row)];
  }
};

}  // namespace

TEST_CASE("tokens that the engine has chosen: a policy like any other") {
  std::mt19937_64 random(4);
  std::size_t tokens = 0, steps = 0;
  for (int i = 0; i < 300; ++i) {
    OracleOptions options;
    options.seed = random();
    options.vocabulary = 2 + static_cast<int>(random() % 30);
    options.repetition = 1;
    options.max_kept = random() % 2 == 0 ? 0 : 1000;
    const SampleOptions sampling = random_options(random);
    const Tokens prompt{1, 0, 0, 1};
    Chooser model(options);
    model.sampling = sampling;
    DecoderOptions<Token> how;
    how.cost = lookahead::StepCost::none();
    how.shape.w = static_cast<int>(random() % 6);
    how.pool_slots = 1024;
    Decoder<Chooser, 5, 4, 5, TakeChosen> decoder(model, how);
    Tokens text;
    const Generation g = decoder.generate(prompt, 60, [&](Token t) { text.push_back(t); });
    OracleModel<> plain_model(options);
    REQUIRE(text == sample(plain_model, prompt, 60, {}, sampling, {}));
    tokens += g.tokens;
    steps += g.steps;
  }
  CHECK(tokens > steps);
}
