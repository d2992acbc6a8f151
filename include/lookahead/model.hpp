#pragma once
/// @file model.hpp
/// What a forward-pass engine must offer to be decoded with, as small named concepts: a compiler that rejects an engine
/// names the one requirement that is missing.

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include "lookahead/token_tree.hpp"

namespace lookahead {

/// `M::token_type` is an integer of at most 32 bits that numbers the vocabulary from 0.
template <class M>
concept HasTokenType = std::integral<typename M::token_type> && sizeof(typename M::token_type) <= 4;

/// 1. `m.vocabulary()` is the number of tokens; all tokens are in `[0, vocabulary())`.
template <class M>
concept HasVocabulary = HasTokenType<M> && requires(const M& m) {
  { m.vocabulary() } -> std::convertible_to<std::size_t>;
};

/// 1. `m.context_size()` is the number of tokens whose keys and values are cached.
/// 2. `m.truncate(n)` keeps the first `n` of them (n <= context_size()) and forgets the rest; 0 starts over.
template <class M>
concept HasContext = requires(M& m, const M& c, std::size_t n) {
  { c.context_size() } -> std::convertible_to<std::size_t>;
  m.truncate(n);
};

/// 1. `m.free_slots()` is how many rows the cache can still take, also bounded by the longest position of the model:
///    `context_size() + free_slots()` never exceeds it.
/// 2. `m.max_rows()` and `m.max_logit_rows()` bound the rows and the wanted rows of one `forward`; both are at least 1.
template <class M>
concept HasLimits = requires(const M& c) {
  { c.free_slots() } -> std::convertible_to<std::size_t>;
  { c.max_rows() } -> std::convertible_to<std::size_t>;
  { c.max_logit_rows() } -> std::convertible_to<std::size_t>;
};

/// 1. `m.prefill(tokens)` appends to the context; it may cut the tokens into chunks of its own. No logits are needed.
/// 2. When it throws, `context_size()` tells how many tokens are cached; the caller truncates.
template <class M>
concept Prefills = HasTokenType<M> && requires(M& m, std::span<const typename M::token_type> tokens) {
  m.prefill(tokens);
};

/// 1. `m.forward(tree)` evaluates the rows of the tree on top of the committed context: row r at position
///    `tree.positions()[r]`, attending to the committed context and to the rows that it sees, itself included.
/// 2. The results of `tree.wanted()` can be read until the next call of `forward`, `prefill`, `truncate` or `commit`.
/// 3. `context_size()` does not change. Rows of an earlier `forward` that were not committed are dropped.
/// 4. *The exactness axiom*: when the logits of a row depend only on the tokens of its path, and not on how many other
///    rows there are or where they lie, the output equals plain decoding token for token.
template <class M>
concept ForwardsTrees = HasTokenType<M> && requires(M& m, const TokenTree<typename M::token_type>& tree) {
  m.forward(tree);
};

/// 1. `m.commit(path)` follows a `forward`; `path` holds rows of that tree in increasing order: first `0..root()`, then
///    rows that are each a child of the one before.
/// 2. It appends the first `kept` rows of the path to the context, in order, drops all other rows, and returns `kept`,
///    with root() + 1 <= kept <= path.size(). What is not kept is fed again as the next pending chain; an engine that
///    cannot move cached rows may keep `root() + 1`.
/// 3. A commit that throws leaves the context as it was.
template <class M>
concept CommitsPaths = requires(M& m, std::span<const std::int32_t> path) {
  { m.commit(path) } -> std::convertible_to<std::size_t>;
};

/// `m.next_token(row)` is the arg-max of a wanted row, the lowest token on ties.
template <class M>
concept GreedyModel = HasTokenType<M> && requires(M& m, int row) {
  { m.next_token(row) } -> std::convertible_to<typename M::token_type>;
};

/// `m.top_tokens(row, out)` writes the best tokens of a wanted row, best first and the lowest token first on ties, and
/// returns how many it wrote (at least 1, at most out.size()).
template <class M>
concept TopTokensModel = HasTokenType<M> && requires(M& m, int row, std::span<typename M::token_type> out) {
  { m.top_tokens(row, out) } -> std::convertible_to<std::size_t>;
};

/// `m.logits(row)` are the raw logits of a wanted row; none is NaN. Shape [vocabulary()].
template <class M>
concept LogitsModel = requires(M& m, int row) {
  { m.logits(row) } -> std::convertible_to<std::span<const float>>;
};

/// `m.fork()` is an independent copy with the same context.
template <class M>
concept ForkableModel = requires(const M& c) {
  { c.fork() } -> std::same_as<M>;
};

/// A model whose choices can be read, in at least one of the three ways. The others follow from `logits`.
template <class M>
concept ReadsChoices = GreedyModel<M> || TopTokensModel<M> || LogitsModel<M>;

/// Everything that `Decoder` needs.
template <class M>
concept Model = HasTokenType<M> && HasVocabulary<M> && HasContext<M> && HasLimits<M> && Prefills<M> &&
    ForwardsTrees<M> && CommitsPaths<M> && ReadsChoices<M>;

/// The best tokens of a wanted row, read in the cheapest way that the model offers. Writes at least one token; best
/// first, the lowest token first on ties. Precondition: `out` is not empty. Complexity: with `logits` alone,
/// O(vocabulary x log out.size()) at worst; one pass where few tokens enter.
template <ReadsChoices M>
std::size_t top_tokens(M& model, int row, std::span<typename M::token_type> out) {
  using Token = typename M::token_type;
  if constexpr (TopTokensModel<M>) {
    return model.top_tokens(row, out);
  } else if constexpr (LogitsModel<M>) {
    const std::span<const float> logits = model.logits(row);
    constexpr std::size_t block = 32;  // compared at once, in vectors: few have a token that enters
    const auto last = [&](std::size_t n) { return logits[static_cast<std::size_t>(out[n - 1])]; };
    std::size_t n = 0;
    for (std::size_t first = 0; first < logits.size(); first += block) {
      const std::span<const float> part = logits.subspan(first, std::min(block, logits.size() - first));
      if (n == out.size() && part.size() == block) {
        const float bound = last(n);
        int enters = 0;
        for (std::size_t i = 0; i < block; ++i) enters |= part[i] > bound ? 1 : 0;
        if (enters == 0) continue;
      }
      for (std::size_t t = first; t < first + part.size(); ++t) {
        if (n == out.size() && !(logits[t] > last(n))) continue;
        std::size_t i = n < out.size() ? n++ : n - 1;
        for (; i > 0 && logits[t] > last(i); --i) out[i] = out[i - 1];
        out[i] = static_cast<Token>(t);
      }
    }
    return n;
  } else {
    out[0] = model.next_token(row);
    return 1;
  }
}

/// The arg-max of a wanted row, read in the cheapest way that the model offers; the lowest token on ties.
template <ReadsChoices M>
typename M::token_type next_token(M& model, int row) {
  if constexpr (GreedyModel<M>) {
    return model.next_token(row);
  } else {
    typename M::token_type best{};
    top_tokens(model, row, std::span(&best, 1));
    return best;
  }
}

}  // namespace lookahead
