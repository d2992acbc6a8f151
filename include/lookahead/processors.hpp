#pragma once
/// @file processors.hpp
/// Ordinary functions on the logits of one row. They see the true history and only rows that the walk reaches, so what
/// they do is the same as in plain decoding.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

namespace lookahead {

/// `p(logits, history)` changes the logits of the next token in place. `history` is the text so far, prompt included.
/// 1. The change depends on the arguments only; a processor may cache, but a history may be shorter than the last one.
/// 2. A logit of -infinity bans a token.
template <class P, class Token>
concept LogitsProcessor = requires(P& p, std::span<float> logits, std::span<const Token> history) {
  p(logits, history);
};

namespace detail {

/// How often each token stands in the last tokens of a history.
class TokenCounts {
 public:
  /// Calls f(token, count) for each token among the last `last` of `history` (0: all), once. O(window).
  template <class Token, class F>
  void for_each(std::size_t vocabulary, std::span<const Token> history, std::size_t last, F&& f) {
    if (last > 0 && last < history.size()) history = history.last(last);
    counts_.resize(vocabulary);
    for (const Token t : history) ++counts_[static_cast<std::size_t>(t)];
    for (const Token t : history) {
      std::uint32_t& count = counts_[static_cast<std::size_t>(t)];
      if (count > 0) f(static_cast<std::size_t>(t), count);
      count = 0;
    }
  }

 private:
  std::vector<std::uint32_t> counts_;  ///< all zero between calls
};

}  // namespace detail

/// Divides positive and multiplies negative logits of tokens that occurred by `penalty`.
/// Source: Keskar et al., "CTRL: a conditional transformer language model for controllable generation", 2019.
struct RepetitionPenalty {
  float penalty = 1.0F;   ///< above 1 discourages
  std::size_t last = 64;  ///< how far back it looks, in tokens; 0: the whole text
  detail::TokenCounts counts{};

  template <class Token>
  void operator()(std::span<float> logits, std::span<const Token> history) {
    if (penalty == 1.0F) return;
    counts.for_each(logits.size(), history, last, [&](std::size_t t, std::uint32_t) {
      logits[t] = logits[t] > 0 ? logits[t] / penalty : logits[t] * penalty;
    });
  }
};

/// Lowers the logit of a token that occurred n > 0 times by n x `frequency` + `presence`.
struct FrequencyPenalty {
  float frequency = 0.0F, presence = 0.0F;
  std::size_t last = 0;  ///< how far back it looks, in tokens; 0: the whole text
  detail::TokenCounts counts{};

  template <class Token>
  void operator()(std::span<float> logits, std::span<const Token> history) {
    if (frequency == 0.0F && presence == 0.0F) return;
    counts.for_each(logits.size(), history, last,
                    [&](std::size_t t, std::uint32_t n) { logits[t] -= static_cast<float>(n) * frequency + presence; });
  }
};

/// Adds to the logits of some tokens; -infinity bans one. Precondition: the tokens are in the vocabulary.
template <class Token = std::int32_t>
struct LogitBias {
  std::vector<std::pair<Token, float>> bias;

  void operator()(std::span<float> logits, std::span<const Token>) const {
    for (const auto& [t, b] : bias) logits[static_cast<std::size_t>(t)] += b;
  }
};

/// Never chooses some tokens. Precondition: they are in the vocabulary.
template <class Token = std::int32_t>
struct BannedTokens {
  std::vector<Token> tokens;

  void operator()(std::span<float> logits, std::span<const Token>) const {
    for (const Token t : tokens) logits[static_cast<std::size_t>(t)] = -std::numeric_limits<float>::infinity();
  }
};

/// Never ends the text before it has `length` tokens, the prompt counted. Precondition: the end tokens are in the
/// vocabulary.
template <class Token = std::int32_t>
struct MinimumLength {
  std::size_t length = 0;
  std::vector<Token> end_tokens;

  void operator()(std::span<float> logits, std::span<const Token> history) const {
    if (history.size() >= length) return;
    for (const Token t : end_tokens) logits[static_cast<std::size_t>(t)] = -std::numeric_limits<float>::infinity();
  }
};

}  // namespace lookahead
