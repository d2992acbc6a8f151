#pragma once
/// @file verify_policy.hpp
/// How the next token is chosen from a row's results.

#include <concepts>
#include <cstdint>

#include "lookahead/model.hpp"

namespace lookahead {

/// Chooses the token behind a row.
/// 1. `v.select(model, row, position)` is called once for each emitted token, in order of the text, and only on rows
///    that the walk reaches; `position` is the absolute position of the token that is chosen.
/// 2. The choice depends on the row's results, the position, the tokens chosen before, and nothing else: then the
///    output equals plain decoding with the same policy, token for token.
/// 3. A step may be dropped or cut short after its tokens were selected, and a text may be rolled back: the next call
///    then comes with an earlier position, and what the policy knew of it and of later ones is void.
/// 4. A policy that offers `v.observe(position, tokens)` is told of input, as it begins or goes on: `tokens` stand in
///    the text from `position` on, a std::size_t, and what it knew of these and of later positions is void.
template <class V, class M>
concept VerifyPolicy = HasTokenType<M> && requires(V& v, M& model, int row, std::int64_t position) {
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
