#pragma once
/// @file plain_sampling.hpp
/// Sampling one token after the other, written from the definitions and for nothing but clarity: what the library's
/// sampling must equal.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "lookahead/philox.hpp"
#include "lookahead/sample_verify.hpp"
#include "lookahead/token_tree.hpp"

namespace plain_sampling {

/// The settings of all processors that the library has. The defaults change nothing.
struct Penalties {
  float repetition = 1;
  std::size_t repetition_last = 64;
  float frequency = 0, presence = 0;
  std::size_t frequency_last = 64;
  std::vector<std::pair<std::int32_t, float>> bias{};
  std::vector<std::int32_t> banned{};
  std::size_t minimum = 0;
  std::vector<std::int32_t> end_tokens{};
};

/// How often token `t` stands among the last `last` tokens of `text`; 0: among all.
template <class Token>
std::size_t occurrences(const std::vector<Token>& text, std::size_t t, std::size_t last) {
  std::size_t n = 0;
  for (std::size_t i = 0; i < text.size(); ++i)
    if (static_cast<std::size_t>(text[i]) == t && (last == 0 || i + last >= text.size())) ++n;
  return n;
}

/// The logits after all processors, in the order of `Penalties`.
template <class Token>
std::vector<float> processed(std::span<const float> logits, const std::vector<Token>& text, const Penalties& p) {
  std::vector<float> out(logits.begin(), logits.end());
  for (std::size_t t = 0; t < out.size(); ++t) {
    if (occurrences(text, t, p.repetition_last) > 0)
      out[t] = out[t] > 0 ? out[t] / p.repetition : out[t] * p.repetition;
    const std::size_t n = occurrences(text, t, p.frequency_last);
    if (n > 0) out[t] -= static_cast<float>(n) * p.frequency + p.presence;
    for (const auto& [token, bias] : p.bias)
      if (static_cast<std::size_t>(token) == t) out[t] += bias;
    const auto bans = [&](const std::vector<std::int32_t>& tokens) {
      return std::ranges::count(tokens, static_cast<std::int32_t>(t)) > 0;
    };
    if (bans(p.banned) || (text.size() < p.minimum && bans(p.end_tokens)))
      out[t] = -std::numeric_limits<float>::infinity();
  }
  return out;
}

/// What each token weighs, in multiples of the best one's probability; 0: it cannot be drawn.
inline std::vector<double> weights(std::span<const float> logits, const lookahead::SampleOptions& o) {
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  std::vector<double> w(logits.size());
  if (o.temperature == 0) {
    w[order[0]] = 1;
    return w;
  }
  for (std::size_t i = 0; i < order.size(); ++i)
    if (o.top_k == 0 || i < o.top_k)
      w[order[i]] = std::exp((static_cast<double>(logits[order[i]]) - static_cast<double>(logits[order[0]])) /
                             static_cast<double>(o.temperature));
  const double enough = static_cast<double>(o.top_p) * std::accumulate(w.begin(), w.end(), 0.0);
  double sum = 0;
  for (const std::size_t t : order) {
    if (o.top_p < 1 && sum >= enough) w[t] = 0;
    sum += w[t];
  }
  for (double& x : w)
    if (x < static_cast<double>(o.min_p)) x = 0;
  return w;
}

/// The probability of each token.
inline std::vector<double> distribution(std::span<const float> logits, const lookahead::SampleOptions& o) {
  std::vector<double> p = weights(logits, o);
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& x : p) x /= sum;
  return p;
}

/// The token that the random number of a position picks.
inline std::size_t draw(const std::vector<double>& w, const lookahead::SampleOptions& o, std::size_t position) {
  const double u = lookahead::Philox::at(o.seed, o.stream, position).uniform();
  const double aim = u * std::accumulate(w.begin(), w.end(), 0.0);
  double sum = 0;
  for (std::size_t t = 0; t < w.size(); ++t)
    if ((sum += w[t]) > aim) return t;
  return w.size();
}

/// Plain sampling: `choose(logits, text)` gives the next token behind the text. Starts over with `prompt`; returns the
/// new tokens, at most `wanted`, up to the first that is in `end_tokens`, and as many as there is room for.
template <class M, class Choose>
std::vector<typename M::token_type> sample_with(M& model, const std::vector<typename M::token_type>& prompt,
                                                std::size_t wanted,
                                                const std::vector<typename M::token_type>& end_tokens,
                                                const Choose& choose) {
  using Token = typename M::token_type;
  std::vector<Token> text = prompt;
  model.truncate(0);
  model.prefill(std::span<const Token>(prompt).first(prompt.size() - 1));
  while (text.size() < prompt.size() + wanted && model.free_slots() > 0) {
    lookahead::TokenTreeStorage<Token, 1> tree;
    tree.begin(static_cast<int>(model.context_size()), &text.back(), 1);
    tree.want(0);
    model.forward(tree.view());
    text.push_back(choose(std::span<const float>(model.logits(0)), std::as_const(text)));
    const std::int32_t path = 0;
    model.commit(std::span(&path, 1));
    if (std::ranges::count(end_tokens, text.back()) > 0) break;
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.end()};
}

/// Plain sampling with these options and processors.
template <class M>
std::vector<typename M::token_type> sample(M& model, const std::vector<typename M::token_type>& prompt,
                                           std::size_t wanted, const std::vector<typename M::token_type>& end_tokens,
                                           const lookahead::SampleOptions& options, const Penalties& penalties) {
  return sample_with(model, prompt, wanted, end_tokens, [&](std::span<const float> logits, const auto& text) {
    return static_cast<typename M::token_type>(
        draw(weights(processed(logits, text, penalties), options), options, text.size()));
  });
}

}  // namespace plain_sampling
