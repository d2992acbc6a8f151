#pragma once
/// @file verify_policy.hpp
/// How the next token is chosen from a row's results.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "lookahead/model.hpp"

namespace lookahead {

/// A policy that is told of input.
/// 1. `v.observe(position, tokens)` is called before a text begins or goes on with `tokens`; they will stand in it from
///    `position` on. What the policy knew of these and later positions is void.
/// 2. If it throws, the input is refused: the text stays as it was, or there is none.
template <class V, class Token>
concept ObservingPolicy = requires(V& v, std::size_t position, std::span<const Token> tokens) {
  v.observe(position, tokens);
};

namespace detail {

struct Observe {
  void observe();
};

// Has two members of that name where V has one.
template <class V>
struct ObserveTwice : V, Observe {};

template <class V>
concept HasObserve = std::is_class_v<V> && !std::is_final_v<V> && !requires {
  &ObserveTwice<V>::observe;
};

}  // namespace detail

/// No policy has an `observe` that cannot be called as `ObservingPolicy` says: it would never be told of anything.
template <class V, class Token>
concept ObserveIsCallable = ObservingPolicy<V, Token> || !detail::HasObserve<V>;

/// Chooses the token behind a row.
/// 1. `v.select(model, row, position)` is called once for each emitted token, in order of the text, and only on rows
///    that the walk reaches; `position` is the absolute position of the token that is chosen.
/// 2. The choice depends on the row's results, the position, the tokens before it, and nothing else: then the output
///    equals plain decoding with the same policy, token for token.
/// 3. A step may be dropped or cut short after its tokens were selected, and a text may be rolled back: the next call
///    then comes with an earlier position, and what the policy knew of it and of later ones is void.
template <class V, class M>
concept VerifyPolicy = HasTokenType<M> && ObserveIsCallable<V, typename M::token_type> &&
    requires(V& v, M& model, int row, std::int64_t position) {
  { v.select(model, row, position) } -> std::convertible_to<typename M::token_type>;
};

/// Greedy decoding: the arg-max, the lowest token on ties.
struct GreedyVerify {
  template <ReadsChoices M>
  typename M::token_type select(M& model, int row, std::int64_t) const {
    return next_token(model, row);
  }
};

}  // namespace lookahead
