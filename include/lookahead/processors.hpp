#pragma once
/// @file processors.hpp
/// Ordinary functions on the logits of one row. They see the true history and only rows that the walk reaches, so what
/// they do is the same as in plain decoding.

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lookahead/errors.hpp"

namespace lookahead {

/// `p(logits, history)` changes the logits of the next token in place. `history` is the text so far, prompt included.
/// 1. The change depends on the arguments only; a processor may cache, but a history may be shorter than the last one.
/// 2. A logit of -infinity bans a token.
template <class P, class Token>
concept LogitsProcessor = requires(P& p, std::span<float> logits, std::span<const Token> history) {
  p(logits, history);
};

namespace detail {

/// The logit of a token. Throws InvalidArgument for a token outside the vocabulary.
template <class Token>
float& logit(std::span<float> logits, Token token, const char* what) {
  if (static_cast<std::uint64_t>(token) >= logits.size())  // a negative one, too
    throw InvalidArgument(std::string(what) + " " + std::to_string(token) + " is outside the vocabulary of " +
                          std::to_string(logits.size()) + ": take it from this model's tokenizer");
  return logits[static_cast<std::size_t>(token)];
}

/// How often each token stands in the last tokens of a history.
class TokenCounts {
 public:
  /// Calls f(logit, count) for each token among the last `last` of `history` (0: all), once. O(window). Throws
  /// InvalidArgument for a token outside the vocabulary.
  template <class Token, class F>
  void for_each(std::span<float> logits, std::span<const Token> history, std::size_t last, F&& f) {
    if (last > 0 && last < history.size()) history = history.last(last);
    for (const Token t : history) logit(logits, t, "the text's token");
    counts_.resize(logits.size());
    for (const Token t : history) ++counts_[static_cast<std::size_t>(t)];
    for (const Token t : history) {
      std::uint32_t& count = counts_[static_cast<std::size_t>(t)];
      if (count > 0) f(logits[static_cast<std::size_t>(t)], count);
      count = 0;
    }
  }

 private:
  std::vector<std::uint32_t> counts_;  ///< all zero between calls
};

}  // namespace detail

/// Divides positive and multiplies negative logits of tokens that occurred by `penalty`.
/// Source: Keskar et al., "CTRL: a conditional transformer language model for controllable generation", 2019.
class RepetitionPenalty {
 public:
  struct Options {
    float penalty = 1.0F;   ///< above 1 discourages, 1 changes nothing; above 0
    std::size_t last = 64;  ///< how far back it looks, in tokens; 0: the whole text
  };

  /// Throws InvalidArgument unless the penalty is a finite number above 0.
  explicit RepetitionPenalty(const Options& options) : options_(options) {
    if (!(options.penalty > 0 && std::isfinite(options.penalty)))
      throw InvalidArgument("the repetition penalty is " + std::to_string(options.penalty) +
                            ": choose a finite number above 0; 1 changes nothing");
  }

  template <class Token>
  void operator()(std::span<float> logits, std::span<const Token> history) {
    const float penalty = options_.penalty;
    if (penalty == 1.0F) return;
    counts_.for_each(logits, history, options_.last,
                     [&](float& x, std::uint32_t) { x = x > 0 ? x / penalty : x * penalty; });
  }

 private:
  Options options_;
  detail::TokenCounts counts_;
};

/// Lowers the logit of a token that occurred n > 0 times by n x `frequency` + `presence`.
class FrequencyPenalty {
 public:
  struct Options {
    float frequency = 0.0F;  ///< below 0 encourages
    float presence = 0.0F;   ///< below 0 encourages
    std::size_t last = 64;   ///< how far back it looks, in tokens; 0: the whole text
  };

  /// Throws InvalidArgument unless both are finite numbers.
  explicit FrequencyPenalty(const Options& options) : options_(options) {
    const auto check = [](const char* name, float value) {
      if (!std::isfinite(value))
        throw InvalidArgument("the " + std::string(name) + " penalty is " + std::to_string(value) +
                              ": choose a finite number; 0 changes nothing");
    };
    check("frequency", options.frequency);
    check("presence", options.presence);
  }

  template <class Token>
  void operator()(std::span<float> logits, std::span<const Token> history) {
    if (options_.frequency == 0.0F && options_.presence == 0.0F) return;
    counts_.for_each(logits, history, options_.last, [&](float& x, std::uint32_t n) {
      x -= static_cast<float>(n) * options_.frequency + options_.presence;
    });
  }

 private:
  Options options_;
  detail::TokenCounts counts_;
};

/// Adds to the logits of some tokens; -infinity bans one. Throws InvalidArgument for a token outside the vocabulary,
/// and for a bias that is not a number or +infinity.
template <class Token = std::int32_t>
struct LogitBias {
  std::vector<std::pair<Token, float>> bias;

  void operator()(std::span<float> logits, std::span<const Token>) const {
    for (const auto& [t, b] : bias) {
      if (!(b < std::numeric_limits<float>::infinity()))
        throw InvalidArgument("the bias of token " + std::to_string(t) + " is " + std::to_string(b) +
                              ": choose a finite number, or -infinity to ban it");
      detail::logit(logits, t, "the biased token") += b;
    }
  }
};

/// Never chooses some tokens. Throws InvalidArgument for one outside the vocabulary.
template <class Token = std::int32_t>
struct BannedTokens {
  std::vector<Token> tokens;

  void operator()(std::span<float> logits, std::span<const Token>) const {
    for (const Token t : tokens) detail::logit(logits, t, "the banned token") = -std::numeric_limits<float>::infinity();
  }
};

/// Never ends the text before it has `length` tokens, the prompt counted. Throws InvalidArgument for an end token
/// outside the vocabulary.
template <class Token = std::int32_t>
struct MinimumLength {
  std::size_t length = 0;
  std::vector<Token> end_tokens;

  void operator()(std::span<float> logits, std::span<const Token> history) const {
    for (const Token t : end_tokens) {
      float& x = detail::logit(logits, t, "the end token");
      if (history.size() < length) x = -std::numeric_limits<float>::infinity();
    }
  }
};

}  // namespace lookahead
