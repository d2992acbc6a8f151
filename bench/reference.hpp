#pragma once
/// @file reference.hpp
/// The published algorithm (Fu, Bailis, Stoica, Zhang, "Break the Sequential Dependency of LLM Inference Using
/// Lookahead Decoding", 2024) as its authors run it, to compare with. It uses nothing of the library but the tree.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <span>
#include <vector>

#include "lookahead/model.hpp"
#include "lookahead/token_tree.hpp"

namespace lookahead::bench {

/// W columns, n-grams of N tokens, G guesses a step.
struct ReferenceShape {
  int w = 15, n = 5, g = 15;
};

template <class Token>
struct ReferenceRun {
  std::vector<Token> tokens;
  std::size_t steps = 0;
  std::size_t rows = 0;         ///< as published: every cell and every token of a guess is a row
  std::size_t shared_rows = 0;  ///< as evaluated: equal paths share a row
};

/// Decodes greedily, end tokens ignored. Guesses are n-grams of the window alone, the newest G of each key; nothing but
/// guesses is verified; a guess that is right to its end yields no token behind it; the window starts with prompt
/// tokens and gains a level a step. Preconditions: the prompt is not empty; w >= 1, n >= 2, g >= 0,
/// (w + g) (n - 1) + n <= 512; the model has room, and its `commit` keeps whole paths.
template <Model M>
ReferenceRun<typename M::token_type> reference_decode(M& model, std::span<const typename M::token_type> prompt,
                                                      std::size_t max_tokens, const ReferenceShape& shape,
                                                      std::uint32_t seed) {
  using Token = typename M::token_type;
  using Row = std::vector<Token>;
  const auto levels = static_cast<std::size_t>(shape.n - 1);

  ReferenceRun<Token> run;
  std::mt19937 random(seed);
  std::map<Token, std::deque<Row>> pool;  // continuations of each token, newest first
  std::vector<Row> window(1);             // window[0][0] is the newest token
  window[0].push_back(prompt.back());
  for (int i = 0; i < shape.w + shape.n - 3; ++i) window[0].push_back(prompt[random() % prompt.size()]);
  model.truncate(0);
  model.prefill(prompt.first(prompt.size() - 1));

  while (run.tokens.size() < max_tokens) {
    TokenTreeStorage<Token, 512> tree;
    tree.begin(static_cast<int>(model.context_size()), window[0].data(), 1);
    tree.want(0);
    const auto place = [&](int parent, Token token) {
      ++run.rows;
      const int row = tree.view().child(parent, token);
      return row >= 0 ? row : tree.add(parent, token);
    };

    // Level 0 is a chain; every other cell stands below the one before it in its column.
    ++run.rows;
    std::vector<int> above, cells{0};
    for (std::size_t j = 1; j < window[0].size(); ++j) cells.push_back(place(cells.back(), window[0][j]));
    for (std::size_t r = 1; r < window.size(); ++r) {
      above = cells;
      cells.clear();
      for (std::size_t j = 0; j < window[r].size(); ++j) cells.push_back(place(above[j], window[r][j]));
    }
    for (const int row : cells) tree.want(row);
    const std::deque<Row>& guesses = pool[window[0][0]];
    std::vector<std::vector<int>> guess_rows;
    for (const Row& guess : guesses) {
      std::vector<int>& rows = guess_rows.emplace_back(1, 0);
      for (const Token token : guess) rows.push_back(place(rows.back(), token));
      for (const int row : rows) tree.want(row);
    }
    ++run.steps;
    run.shared_rows += static_cast<std::size_t>(tree.rows);
    model.forward(tree.view());

    Row fresh;
    for (const int row : cells) fresh.push_back(next_token(model, row));
    Row accepted{next_token(model, 0)};
    std::vector<std::int32_t> path{0};
    for (std::size_t i = 0; i < guesses.size(); ++i) {
      Row right{next_token(model, 0)};
      while (right.size() < levels && right.back() == guesses[i][right.size() - 1])
        right.push_back(next_token(model, guess_rows[i][right.size()]));
      if (right.size() <= accepted.size()) continue;
      accepted = right;
      path.assign(guess_rows[i].begin(), guess_rows[i].begin() + static_cast<std::ptrdiff_t>(right.size()));
    }
    model.commit(path);
    for (const Token token : accepted)
      if (run.tokens.size() < max_tokens) run.tokens.push_back(token);

    if (window.size() == levels) {
      for (std::size_t j = 0; j < fresh.size(); ++j) {
        Row gram;
        for (std::size_t r = 1; r < levels; ++r) gram.push_back(window[r][j]);
        gram.push_back(fresh[j]);
        std::deque<Row>& known = pool[window[0][j]];
        std::erase(known, gram);
        known.push_front(gram);
        if (known.size() > static_cast<std::size_t>(shape.g)) known.pop_back();
      }
      window.erase(window.begin());
      window.push_back(fresh);
    } else {
      window.push_back(fresh);
      for (Row& row : window) row.erase(row.begin());
    }
    window[0][0] = accepted.back();
  }
  return run;
}

}  // namespace lookahead::bench
