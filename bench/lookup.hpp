#pragma once
/// @file lookup.hpp
/// Prompt look-up, the simplest method without a draft model, to compare with: the tokens that followed the last
/// occurrence of the text's end are verified as one chain.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engines/llama_engine.hpp"

#include "lookahead/decoder.hpp"
#include "lookahead/token_tree.hpp"

namespace lookahead::bench {

/// Continues a text of which the engine has cached all but the last token, by up to `tokens` tokens. Drafts up to
/// `draft` tokens a step, behind the longest suffix of 3 to 1 tokens that occurred before.
inline Generation lookup_decode(engines::LlamaEngine& engine, std::vector<std::int32_t>& text, std::size_t tokens,
                                std::size_t draft, std::span<const std::int32_t> end_tokens) {
  const auto find = [&]() -> std::span<const std::int32_t> {
    for (std::size_t n = std::min<std::size_t>(3, text.size() - 1); n > 0; --n) {
      const auto suffix = text.end() - static_cast<std::ptrdiff_t>(n);
      const auto last = std::find_end(text.begin(), text.end() - 1, suffix, text.end());
      if (last == text.end() - 1) continue;
      const std::size_t from = static_cast<std::size_t>(last - text.begin()) + n;
      return std::span(text).subspan(from, std::min(draft, text.size() - from));
    }
    return {};
  };
  const auto tree = std::make_unique<TokenTreeStorage<std::int32_t, 128>>();
  Generation sum;
  while (sum.tokens < tokens && sum.stop == StopReason::running) {
    tree->begin(static_cast<std::int32_t>(text.size() - 1), &text.back(), 1);
    for (const std::int32_t t : find().first(std::min(find().size(), tokens - sum.tokens - 1)))
      tree->add(tree->rows - 1, t);
    for (int r = 0; r < tree->rows; ++r) tree->want(r);
    const auto view = tree->view();
    engine.forward(view);
    std::vector<std::int32_t> path{0};
    for (bool more = true; more;) {
      const std::int32_t next = engine.next_token(path.back());
      text.push_back(next);
      ++sum.tokens;
      if (std::ranges::find(end_tokens, next) != end_tokens.end()) sum.stop = StopReason::end_token;
      const int child = view.child(path.back(), next);
      more = child >= 0 && sum.stop == StopReason::running;
      if (more) path.push_back(child);
    }
    engine.commit(path);
    ++sum.steps;
    sum.rows += static_cast<std::size_t>(view.size());
  }
  return sum;
}

}  // namespace lookahead::bench
