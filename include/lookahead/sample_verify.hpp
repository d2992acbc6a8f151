#pragma once
/// @file sample_verify.hpp
/// Sampling that equals plain sampling with the same seed, token for token.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lookahead/errors.hpp"
#include "lookahead/model.hpp"
#include "lookahead/philox.hpp"
#include "lookahead/processors.hpp"

namespace lookahead {

/// How tokens are drawn. Applied in this order: processors, temperature, top-k, top-p, min-p.
struct SampleOptions {
  float temperature = 1.0F;  ///< logits are divided by it; 0 is greedy: the arg-max of the processed logits
  std::size_t top_k = 0;     ///< only the k best tokens; 0: all
  float top_p = 1.0F;        ///< only the fewest best tokens that have this much probability together; 1: all
  float min_p = 0.0F;        ///< only tokens with at least this share of the best one's probability; 0: all
  std::uint64_t seed = 0;    ///< same seed, same text
  std::uint64_t stream = 0;  ///< forks of one text use different streams
};

/// Draws each token from the processed distribution, with a random number that seed, stream and absolute position fix.
/// A drafted token is accepted when it is the one drawn: the output has the target's distribution, and equals plain
/// sampling.
///
/// The draw is by inversion: with u = `Philox::at(seed, stream, position).uniform()`, it is the first token, in the
/// order of their numbers, at which the weights so far exceed u times their sum. Weights are relative to the best
/// token's, and sums are taken in double precision. Where tokens tie for a place, the lowest has it.
///
/// Allocates at the first token, and where a text is longer than any before. Errors: the constructor throws
/// InvalidArgument for an option out of its range; `select` throws ContractViolation where, after the processors, a
/// logit is not a number, or the best one not finite. What a processor throws passes through.
template <class Token = std::int32_t, LogitsProcessor<Token>... Processors>
class SampleVerify {
 public:
  using token_type = Token;

  explicit SampleVerify(const SampleOptions& options = {}, Processors... processors)
      : options_(options), processors_(std::move(processors)...) {
    const auto check = [](bool good, const char* name, float value, const char* range) {
      if (!good) throw InvalidArgument(std::string(name) + " is " + std::to_string(value) + ": choose " + range);
    };
    check(options.temperature >= 0 && std::isfinite(options.temperature), "temperature", options.temperature,
          "0 or more");
    check(options.top_p > 0 && options.top_p <= 1, "top_p", options.top_p, "a share above 0, up to 1");
    check(options.min_p >= 0 && options.min_p <= 1, "min_p", options.min_p, "a share from 0 to 1");
  }

  /// `tokens` stand in the text from `position` on: the prompt, or more input.
  /// Precondition: the tokens before `position` were observed or selected.
  void observe(std::size_t position, std::span<const Token> tokens) {
    history_.resize(position);
    history_.insert(history_.end(), tokens.begin(), tokens.end());
  }

  /// The token at `position`. Precondition: the tokens before it were observed or selected. O(vocabulary), and the
  /// processors; O(vocabulary + k log k) for the k tokens that top-k and top-p leave, where these are set.
  template <LogitsModel M>
  Token select(M& model, int row, std::int64_t position) {
    history_.resize(static_cast<std::size_t>(position));
    const std::span<const float> logits = model.logits(row);
    scores_.assign(logits.begin(), logits.end());
    std::apply([&](auto&... process) { (process(std::span<float>(scores_), std::span<const Token>(history_)), ...); },
               processors_);
    const Token token = draw(position);
    history_.push_back(token);
    return token;
  }

  /// Draws from another stream from now on, as a fork should.
  void set_stream(std::uint64_t stream) noexcept { options_.stream = stream; }

  /// What was observed and selected, from position 0 on: the text, and behind its end what the last step selected and
  /// did not emit, or what a roll-back took away; the next call drops that. Valid until the next call that changes it.
  [[nodiscard]] std::span<const Token> history() const noexcept { return history_; }

 private:
  struct Choice {
    double weight;  // first the logit, then the probability as a multiple of the best token's
    std::uint32_t token;
  };

  [[nodiscard]] Token draw(std::int64_t position) {
    constexpr float banned = -std::numeric_limits<float>::infinity();
    std::size_t best = 0;
    float top = banned;
    bool numbers = true;
    for (std::size_t t = 0; t < scores_.size(); ++t) {
      numbers = numbers && !std::isnan(scores_[t]);
      if (scores_[t] > top) top = scores_[best = t];
    }
    if (!numbers || !std::isfinite(top))
      throw ContractViolation("no token can be chosen at position " + std::to_string(position) + ": " +
                              (numbers ? "the best logit is " + std::to_string(top) : "a logit is not a number") +
                              "; check the model and the processors");
    if (options_.temperature == 0) return static_cast<Token>(best);

    choices_.clear();
    choices_.reserve(scores_.size());
    for (std::size_t t = 0; t < scores_.size(); ++t)
      if (scores_[t] > banned) choices_.push_back({static_cast<double>(scores_[t]), static_cast<std::uint32_t>(t)});
    const auto worse = [](const Choice& a, const Choice& b) {
      return a.weight < b.weight || (a.weight == b.weight && a.token > b.token);
    };
    const auto better = [&](const Choice& a, const Choice& b) { return worse(b, a); };
    if (options_.top_k > 0 && options_.top_k < choices_.size()) {
      const auto end = choices_.begin() + static_cast<std::ptrdiff_t>(options_.top_k);
      std::nth_element(choices_.begin(), end, choices_.end(), better);
      choices_.erase(end, choices_.end());
    }
    const double slope = 1 / static_cast<double>(options_.temperature);
    for (Choice& c : choices_) c.weight = std::exp((c.weight - static_cast<double>(top)) * slope);
    if (options_.top_p < 1) {
      // The best tokens leave a heap one by one, until they have enough.
      const double enough = static_cast<double>(options_.top_p) * total();
      double sum = 0;
      std::make_heap(choices_.begin(), choices_.end(), worse);
      auto rest = choices_.end();
      while (rest != choices_.begin() && sum < enough) {
        std::pop_heap(choices_.begin(), rest, worse);
        sum += (--rest)->weight;
      }
      choices_.erase(choices_.begin(), rest);
    }
    if (options_.min_p > 0)
      std::erase_if(choices_, [&](const Choice& c) { return c.weight < static_cast<double>(options_.min_p); });
    if (options_.top_k > 0 || options_.top_p < 1)
      std::sort(choices_.begin(), choices_.end(), [](const Choice& a, const Choice& b) { return a.token < b.token; });

    // Below the total even after rounding, so that a token is found, and one with a weight.
    const double aim =
        Philox::at(options_.seed, options_.stream, static_cast<std::uint64_t>(position)).uniform() * total();
    std::size_t i = 0;
    for (double sum = choices_[0].weight; sum <= aim; sum += choices_[i].weight) ++i;
    return static_cast<Token>(choices_[i].token);
  }

  [[nodiscard]] double total() const {
    double sum = 0;
    for (const Choice& c : choices_) sum += c.weight;
    return sum;
  }

  SampleOptions options_;
  std::tuple<Processors...> processors_;
  std::vector<Token> history_;
  std::vector<float> scores_;
  std::vector<Choice> choices_;
};

/// A `SampleVerify` for tokens of another type than std::int32_t, which is all that has to be named:
/// `sample_verify<std::uint16_t>(options, processors...)`.
template <class Token, LogitsProcessor<Token>... Processors>
[[nodiscard]] SampleVerify<Token, Processors...> sample_verify(const SampleOptions& options, Processors... processors) {
  return SampleVerify<Token, Processors...>(options, std::move(processors)...);
}

}  // namespace lookahead
