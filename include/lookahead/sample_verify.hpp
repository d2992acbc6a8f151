#pragma once
/// @file sample_verify.hpp
/// Sampling that equals plain sampling with the same seed, token for token.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
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
/// Allocates at the first token only. Ties go to the lowest token.
/// Errors: the constructor throws InvalidArgument for an option out of its range; `select` throws ContractViolation for
/// a row without a finite logit, after the processors.
template <class Token = std::int32_t, LogitsProcessor<Token>... Processors>
class SampleVerify {
 public:
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
  void observe(std::size_t position, std::span<const Token> tokens) {
    history_.resize(position);
    history_.insert(history_.end(), tokens.begin(), tokens.end());
  }

  /// Precondition: the tokens before `position` were observed or selected.
  template <LogitsModel M>
  Token select(M& model, int row, std::int64_t position) {
    // A step that was dropped, or cut short, is selected again from an earlier position.
    history_.resize(static_cast<std::size_t>(position));
    const std::span<const float> logits = model.logits(row);
    if (scores_.empty()) {
      scores_.reserve(logits.size());
      choices_.reserve(logits.size());
      history_.reserve(static_cast<std::size_t>(model.context_size()) + static_cast<std::size_t>(model.free_slots()) +
                       1);
    }
    scores_.assign(logits.begin(), logits.end());
    std::apply([&](auto&... process) { (process(std::span<float>(scores_), std::span<const Token>(history_)), ...); },
               processors_);
    const Token token = draw(position);
    history_.push_back(token);
    return token;
  }

  /// The text so far, as far as it was observed and selected.
  [[nodiscard]] std::span<const Token> history() const { return history_; }

  /// The same policy on another stream, for a fork.
  [[nodiscard]] SampleVerify with_stream(std::uint64_t stream) const {
    SampleVerify copy = *this;
    copy.options_.stream = stream;
    return copy;
  }

 private:
  [[nodiscard]] Token draw(std::int64_t position) {
    const auto best = static_cast<std::size_t>(std::max_element(scores_.begin(), scores_.end()) - scores_.begin());
    const float top = scores_[best];
    if (!std::isfinite(top))
      throw ContractViolation("no token can be chosen at position " + std::to_string(position) +
                              ": the best logit is " + std::to_string(top) + "; check the model and the processors");
    if (options_.temperature == 0) return static_cast<Token>(best);

    // Weights relative to the best token, whose weight is 1; a banned token has weight 0.
    choices_.clear();
    const double slope = 1.0 / static_cast<double>(options_.temperature);
    for (std::size_t t = 0; t < scores_.size(); ++t) {
      const double weight = std::exp((static_cast<double>(scores_[t]) - static_cast<double>(top)) * slope);
      if (weight > 0) choices_.push_back({weight, static_cast<std::uint32_t>(t)});
    }
    const auto better = [](const Choice& a, const Choice& b) {
      return a.weight > b.weight || (a.weight == b.weight && a.token < b.token);
    };
    if (options_.top_k > 0 && options_.top_k < choices_.size()) {
      const auto end = choices_.begin() + static_cast<std::ptrdiff_t>(options_.top_k);
      std::nth_element(choices_.begin(), end, choices_.end(), better);
      choices_.erase(end, choices_.end());
    }
    if (options_.top_k > 0 || options_.top_p < 1) std::sort(choices_.begin(), choices_.end(), better);
    if (options_.top_p < 1) {
      const double enough = static_cast<double>(options_.top_p) * total();
      double sum = 0;
      std::size_t n = 0;
      while (n < choices_.size() && sum < enough) sum += choices_[n++].weight;
      choices_.erase(choices_.begin() + static_cast<std::ptrdiff_t>(n), choices_.end());
    }
    if (options_.min_p > 0)
      std::erase_if(choices_, [&](const Choice& c) { return c.weight < static_cast<double>(options_.min_p); });

    const Philox random = Philox::at(options_.seed, options_.stream, static_cast<std::uint64_t>(position));
    double left = random.uniform() * total();
    for (const Choice& c : choices_)
      if ((left -= c.weight) < 0) return static_cast<Token>(c.token);
    return static_cast<Token>(choices_.back().token);  // rounding may leave a remainder
  }

  struct Choice {
    double weight;
    std::uint32_t token;
  };

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

}  // namespace lookahead
