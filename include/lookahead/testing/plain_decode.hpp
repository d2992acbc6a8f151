#pragma once
/// @file plain_decode.hpp
/// The loop that every decoder of this library must equal.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lookahead/model.hpp"
#include "lookahead/token_tree.hpp"

namespace lookahead::testing {

/// Plain greedy decoding: starts over with `prompt` and feeds one row at a time. Returns the new tokens: at most
/// `max_tokens`, up to and including the first that is in `end_tokens`, and at most as many as the model has room for.
/// Precondition: `prompt` is not empty. Throws what the model throws.
template <Model M>
std::vector<typename M::token_type> plain_decode(M& model, std::span<const typename M::token_type> prompt,
                                                 std::size_t max_tokens,
                                                 std::span<const typename M::token_type> end_tokens = {}) {
  using Token = typename M::token_type;
  std::vector<Token> tokens;
  model.truncate(0);
  model.prefill(prompt.first(prompt.size() - 1));
  Token newest = prompt.back();
  while (tokens.size() < max_tokens && model.free_slots() > 0) {
    TokenTreeStorage<Token, 1> tree;
    tree.begin(static_cast<int>(model.context_size()), &newest, 1);
    tree.want(0);
    model.forward(tree.view());
    newest = next_token(model, 0);
    const std::int32_t path = 0;
    model.commit(std::span(&path, 1));
    tokens.push_back(newest);
    if (std::ranges::find(end_tokens, newest) != end_tokens.end()) break;
  }
  return tokens;
}

}  // namespace lookahead::testing
