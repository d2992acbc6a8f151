#pragma once
/// @file log_probs.hpp
/// Log-probabilities of the chosen tokens and their best alternatives.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lookahead/errors.hpp"
#include "lookahead/model.hpp"
#include "lookahead/verify_policy.hpp"

namespace lookahead {

/// A token and the natural logarithm of its probability under the model's raw logits.
template <class Token>
struct TokenLogProb {
  Token token;
  float log_prob;
  [[nodiscard]] bool operator==(const TokenLogProb&) const = default;
};

namespace detail {

/// The tokens of a policy: std::int32_t where it does not say.
template <class V>
struct PolicyToken {
  using type = std::int32_t;
};
template <HasTokenType V>
struct PolicyToken<V> {
  using type = typename V::token_type;
};

}  // namespace detail

/// Wraps a policy and records, for each token that it selects, the token's log-probability and those of the best
/// `alternatives` tokens. They are taken from the logits of the row that the walk reached, before any processor, and so
/// equal plain decoding's. Positions are absolute. Memory grows with the text.
/// Each token costs a pass over the vocabulary.
template <class V, class Token = typename detail::PolicyToken<V>::type>
class LogProbs {
 public:
  explicit LogProbs(V policy = V{}, std::size_t alternatives = 0)
      : policy_(std::move(policy)), alternatives_(alternatives) {}

  /// `tokens` stand in the text from `position` on; they have no record.
  void observe(std::size_t position, std::span<const Token> tokens) {
    resize(position);
    resize(position + tokens.size());
    if constexpr (ObservingPolicy<V, Token>) policy_.observe(position, tokens);
  }

  /// What the policy selects, recorded. Throws ContractViolation where the policy chooses a token for which there is no
  /// logit, or the engine's `top_tokens` breaks its rule; what the policy throws passes through.
  template <LogitsModel M>
  requires VerifyPolicy<V, M> Token select(M& model, int row, std::int64_t position) {
    const Token token = policy_.select(model, row, position);
    const std::span<const float> logits = model.logits(row);
    const auto logit = [&](Token t, const char* who) {
      if (static_cast<std::uint64_t>(t) >= logits.size())  // a negative one, too
        throw ContractViolation(std::string(who) + " chose token " + std::to_string(t) + " of a row with " +
                                std::to_string(logits.size()) + " logits: choose one that has a logit");
      return static_cast<double>(logits[static_cast<std::size_t>(t)]);
    };
    const double chosen = logit(token, "the policy");
    const double top = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
    double sum = 0;
    for (const float x : logits) sum += std::exp(static_cast<double>(x) - top);
    const double log_sum = top + std::log(sum);
    best_.resize(std::min(alternatives_, logits.size()));
    const std::size_t n = best_.empty() ? 0 : top_tokens(model, row, std::span<Token>(best_));
    if (n > best_.size())
      throw ContractViolation("top_tokens gave " + std::to_string(n) + " tokens of a row: it must give at most " +
                              std::to_string(best_.size()));
    resize(static_cast<std::size_t>(position));
    chosen_.push_back({token, static_cast<float>(chosen - log_sum)});
    for (std::size_t i = 0; i < n; ++i)
      others_.push_back({best_[i], static_cast<float>(logit(best_[i], "top_tokens") - log_sum)});
    ends_.push_back(others_.size());
    return token;
  }

  /// The record of the token at `position`; the token -1 for a position of the input.
  /// Precondition: the token is in the text, neither dropped nor rolled back.
  [[nodiscard]] const TokenLogProb<Token>& at(std::size_t position) const { return chosen_[position]; }

  /// The best tokens at `position`, best first, whether one of them was chosen or not; none for a position of the
  /// input. Fewer than asked for where the vocabulary is smaller or the engine's `top_tokens` gives fewer.
  /// Precondition: as `at`.
  [[nodiscard]] std::span<const TokenLogProb<Token>> alternatives(std::size_t position) const {
    const std::size_t begin = position == 0 ? 0 : ends_[position - 1];
    return std::span(others_).subspan(begin, ends_[position] - begin);
  }

  /// The wrapped policy.
  [[nodiscard]] V& policy() { return policy_; }

 private:
  // Forgets what lies behind the first `text` positions; those that have no record get an empty one.
  void resize(std::size_t text) {
    const std::size_t known = std::min(text, ends_.size());
    const std::size_t end = known == 0 ? 0 : ends_[known - 1];
    others_.resize(end, TokenLogProb<Token>{});
    ends_.resize(text, end);
    chosen_.resize(text, TokenLogProb<Token>{static_cast<Token>(-1), 0});
  }

  V policy_;
  std::size_t alternatives_;
  std::vector<TokenLogProb<Token>> chosen_, others_;
  std::vector<std::size_t> ends_;  ///< where a position's alternatives end
  std::vector<Token> best_;
};

}  // namespace lookahead
