// Log-probabilities: plain decoding's to the last bit, whatever happened on the way.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

#include "cases.hpp"
#include "plain_sampling.hpp"

#include "lookahead/decoder.hpp"
#include "lookahead/log_probs.hpp"
#include "lookahead/processors.hpp"
#include "lookahead/sample_verify.hpp"
#include "lookahead/testing/oracle_model.hpp"

namespace {

using namespace lookahead;
using lookahead::testing::InjectedFault;
using lookahead::testing::OracleModel;
using lookahead::testing::OracleOptions;
using lookahead::testing::Reads;

using Token = std::int32_t;
using Tokens = std::vector<Token>;

// The records of a text, one a token, from `begin` on.
struct Records {
  std::vector<TokenLogProb<Token>> chosen;
  std::vector<std::vector<TokenLogProb<Token>>> others;
  [[nodiscard]] bool operator==(const Records&) const = default;
};

template <class D>
Records records(D& decoder, std::size_t begin) {
  Records all;
  for (std::size_t i = begin; i < decoder.text().size(); ++i) {
    all.chosen.push_back(decoder.verify().at(i));
    const auto others = decoder.verify().alternatives(i);
    all.others.emplace_back(others.begin(), others.end());
    CHECK(all.chosen.back().token == decoder.text()[i]);
  }
  return all;
}

// The logits of every token of `text` behind the first `begin`, as a plain loop sees them.
template <class M>
std::vector<std::vector<float>> logits_along(M& model, const Tokens& text, std::size_t begin) {
  std::vector<std::vector<float>> all;
  const Tokens prompt(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(begin));
  plain_sampling::sample_with(model, prompt, text.size() - begin, {},
                              [&](std::span<const float> logits, const Tokens& t) {
                                all.emplace_back(logits.begin(), logits.end());
                                return text[t.size()];
                              });
  return all;
}

OracleOptions repetitive(int vocabulary = 30) {
  OracleOptions options;
  options.vocabulary = vocabulary;
  options.repetition = 1;
  return options;
}

}  // namespace

TEST_CASE_TEMPLATE("random requests: the records of plain decoding, bit for bit, and right", M, OracleModel<>,
                   OracleModel<Token, Reads::logits>) {
  const int count = cases(2000) / 4;
  std::size_t tokens = 0, steps = 0;
  for (int i = 0; i < count; ++i) {
    CAPTURE(i);
    std::mt19937_64 random(static_cast<std::uint64_t>(i));
    OracleOptions options = repetitive(2 + static_cast<int>(random() % 40));
    options.seed = random();
    options.max_kept = random() % 3 == 0 ? static_cast<int>(random() % 3) : 1000;
    const Tokens prompt{1, 0, 0, 1, 1};
    const std::size_t wanted = random() % 50, alternatives = random() % 6 * (random() % 10);
    SampleOptions sampling;
    sampling.temperature = static_cast<float>(random() % 3) / 2;
    sampling.seed = random();
    DecoderOptions<Token> how;
    how.cost = lookahead::StepCost::none();
    how.shape.w = static_cast<int>(random() % 6);
    how.rows = 2 + random() % 40;
    how.pool_slots = 1024;

    using Policy = LogProbs<SampleVerify<Token, FrequencyPenalty, BannedTokens<Token>>>;
    const Policy policy(SampleVerify(sampling, FrequencyPenalty({0.2F}), BannedTokens<Token>{{1}}), alternatives);
    const auto decode = [&](const OracleOptions& o, Tokens& text) {
      M model(o);
      Decoder<M, 5, 4, 5, Policy> decoder(model, how, policy);
      decoder.start(prompt);
      for (bool done = false; !done;) {
        try {
          const Generation g = decoder.run(prompt.size() + wanted - decoder.text().size(), [](Token) {});
          tokens += g.tokens;
          steps += g.steps;
          done = true;
        } catch (const InjectedFault&) {
        }
      }
      text.assign(decoder.text().begin(), decoder.text().end());
      REQUIRE(std::ranges::equal(decoder.verify().policy().history(), text));  // the wrapped policy is told of input
      return records(decoder, prompt.size());
    };
    Tokens text, plain_text;
    OracleOptions failing = options;
    if (random() % 2 == 0)
      (random() % 2 == 0 ? failing.fail_forward : failing.fail_commit) = 1 + static_cast<int>(random() % 20);
    const Records ours = decode(failing, text);
    how.rows = 1;
    const Records plain = decode(options, plain_text);
    REQUIRE(text == plain_text);
    REQUIRE(ours == plain);

    // Right: from the raw logits, the banned token among them.
    M model(options);
    const auto logits = logits_along(model, text, prompt.size());
    for (std::size_t k = 0; k < logits.size(); ++k) {
      double sum = 0;
      for (const float x : logits[k]) sum += std::exp(static_cast<double>(x));
      const auto expected = [&](Token t) {
        return std::log(std::exp(static_cast<double>(logits[k][static_cast<std::size_t>(t)])) / sum);
      };
      REQUIRE(ours.chosen[k].log_prob == doctest::Approx(expected(text[prompt.size() + k])));
      Tokens order(logits[k].size());
      std::iota(order.begin(), order.end(), 0);
      std::ranges::stable_sort(order, [&](Token a, Token b) {
        return logits[k][static_cast<std::size_t>(a)] > logits[k][static_cast<std::size_t>(b)];
      });
      REQUIRE(ours.others[k].size() == std::min(alternatives, order.size()));
      for (std::size_t j = 0; j < ours.others[k].size(); ++j) {
        REQUIRE(ours.others[k][j].token == order[j]);
        REQUIRE(ours.others[k][j].log_prob == doctest::Approx(expected(order[j])));
      }
    }
  }
  CHECK(tokens > steps);
}

TEST_CASE("greedy decoding has log-probabilities too; the best alternative is the chosen token") {
  OracleModel<> model(repetitive());
  Decoder<OracleModel<>, 5, 4, 5, LogProbs<GreedyVerify>> decoder(model, {}, LogProbs(GreedyVerify{}, 3));
  decoder.generate(Tokens{1, 2, 3}, 40, [](Token) {});
  const Records all = records(decoder, 3);
  for (std::size_t i = 0; i < all.chosen.size(); ++i) {
    REQUIRE(all.others[i].size() == 3);
    CHECK(all.others[i][0] == all.chosen[i]);
    CHECK(all.chosen[i].log_prob < 0);
    CHECK(all.others[i][0].log_prob > all.others[i][1].log_prob);
  }
}

TEST_CASE("input has no record: neither a prompt, nor what is appended, nor the next text's") {
  OracleModel<> model(repetitive());
  Decoder<OracleModel<>, 5, 4, 5, LogProbs<GreedyVerify>> decoder(model, {}, LogProbs(GreedyVerify{}, 2));
  const auto has_none = [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      CHECK(decoder.verify().at(i).token == -1);
      CHECK(decoder.verify().alternatives(i).empty());
    }
  };
  decoder.generate(Tokens{1, 2, 3}, 20, [](Token) {});
  has_none(0, 3);
  const Records first = records(decoder, 3);
  decoder.append(Tokens{4, 5});
  has_none(23, 25);
  decoder.run(10, [](Token) {});
  has_none(23, 25);
  Tokens text(decoder.text().begin(), decoder.text().end());
  CHECK(text.size() == 35);

  decoder.generate(Tokens(10, 7), 3, [](Token) {});
  has_none(0, 10);
  CHECK(records(decoder, 10).chosen.size() == 3);
  decoder.generate(Tokens{1, 2, 3}, 20, [](Token) {});
  CHECK(records(decoder, 3) == first);
}

TEST_CASE("rolled back, cut short, forked: the records are those of the text that there is") {
  const auto fresh = [](const Tokens& text, std::size_t begin) {
    OracleModel<> model(repetitive());
    Records all;
    SampleOptions sampling;
    sampling.seed = 5;
    using Policy = LogProbs<SampleVerify<>>;
    Decoder<OracleModel<>, 5, 4, 5, Policy> decoder(model, {.rows = 1}, Policy(SampleVerify<>(sampling), 2));
    decoder.generate(std::span(text).first(begin), text.size() - begin, [](Token) {});
    CHECK(std::ranges::equal(decoder.text(), text));
    return records(decoder, begin);
  };
  struct Some {
    std::size_t most;
    [[nodiscard]] Admission admit(std::span<const Token> block) const { return {std::min(most, block.size()), false}; }
    void operator()(std::span<const Token>) const {}
  };
  using Policy = LogProbs<SampleVerify<>>;
  SampleOptions sampling;
  sampling.seed = 5;
  OracleModel<> model(repetitive());
  Decoder<OracleModel<>, 5, 4, 5, Policy> decoder(model, {}, Policy(SampleVerify<>(sampling), 2));
  decoder.start(Tokens{1, 2, 3});
  std::mt19937_64 random(1);
  for (int i = 0; i < 60; ++i) {
    if (i % 3 == 0) decoder.roll_back(3 + random() % (decoder.text().size() - 2));
    decoder.run(random() % 20, Some{1 + random() % 4});
    CHECK(records(decoder, 3) == fresh(Tokens(decoder.text().begin(), decoder.text().end()), 3));
  }
  const Records before = records(decoder, 3);
  OracleModel<> other = model.fork();
  auto fork = decoder.fork(other);
  fork.verify().policy().set_stream(1);
  fork.run(20, [](Token) {});
  const Records both = records(fork, 3);
  CHECK(std::equal(before.chosen.begin(), before.chosen.end(), both.chosen.begin()));
  CHECK(both.chosen.size() == before.chosen.size() + 20);
  CHECK(records(decoder, 3) == before);
}

namespace {

// An engine and a policy that break their rules.
struct Broken {
  using token_type = Token;
  std::vector<float> values{1, 2, 3};
  Tokens best{2, 1};
  std::size_t count = 2;
  [[nodiscard]] std::span<const float> logits(int) const { return values; }
  std::size_t top_tokens(int, std::span<Token> out) const {
    std::copy_n(best.begin(), std::min(best.size(), out.size()), out.begin());
    return count;
  }
};

struct Chooses {
  Token token = 0;
  Token select(Broken&, int, std::int64_t) const { return token; }
};

}  // namespace

TEST_CASE("a token without a logit is refused, and so are alternatives that cannot be") {
  Broken model;
  LogProbs<Chooses> verify(Chooses{}, 2);
  CHECK(verify.select(model, 0, 0) == 0);
  CHECK(verify.alternatives(0)[0].token == 2);
  const auto refuses = [&](const char* message) {
    CHECK_THROWS_WITH_AS(verify.select(model, 0, 1), message, ContractViolation);
  };
  verify.policy().token = 3;
  refuses("the policy chose token 3 of a row with 3 logits: choose one that has a logit");
  verify.policy().token = -1;
  refuses("the policy chose token -1 of a row with 3 logits: choose one that has a logit");
  verify.policy().token = 1;
  model.best = {0, 3};
  refuses("top_tokens chose token 3 of a row with 3 logits: choose one that has a logit");
  model.best = {-7, 3};
  refuses("top_tokens chose token -7 of a row with 3 logits: choose one that has a logit");
  model.count = 3;
  refuses("top_tokens gave 3 tokens of a row: it must give at most 2");
  model.values.clear();
  refuses("the policy chose token 1 of a row with 0 logits: choose one that has a logit");

  // The position gets its record when all is well again.
  model = Broken{};
  CHECK(verify.select(model, 0, 1) == 1);
  CHECK(verify.at(1).token == 1);
  CHECK(verify.alternatives(0).size() == 2);
  CHECK(verify.alternatives(1).size() == 2);
  CHECK(verify.alternatives(1)[1].token == 1);
  CHECK(verify.alternatives(1)[1].log_prob == verify.at(1).log_prob);
}

TEST_CASE("more alternatives than tokens, unsigned tokens") {
  using M = OracleModel<std::uint16_t>;
  using Policy = LogProbs<GreedyVerify, std::uint16_t>;
  M model(repetitive());
  Decoder<M, 5, 4, 5, Policy> decoder(model, {}, Policy(GreedyVerify{}, ~std::size_t{0}));
  decoder.generate(std::vector<std::uint16_t>{1, 2}, 10, [](std::uint16_t) {});
  CHECK(decoder.verify().at(0).token == 0xFFFF);
  for (std::size_t i = 2; i < 12; ++i) {
    double sum = 0;
    for (const auto& other : decoder.verify().alternatives(i)) sum += std::exp(static_cast<double>(other.log_prob));
    CHECK(decoder.verify().alternatives(i).size() == 30);
    CHECK(sum == doctest::Approx(1));
  }
}
