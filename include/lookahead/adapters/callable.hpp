#pragma once
/// @file callable.hpp
/// Any function from tokens, positions and a mask to logits as a `Model`, to try lookahead decoding on it.

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lookahead/detail/check_vocabulary.hpp"
#include "lookahead/errors.hpp"
#include "lookahead/mask.hpp"
#include "lookahead/token_tree.hpp"

namespace lookahead {

/// `f(tokens, positions, mask)` gives the logits of all n rows, [n, vocabulary]. `tokens` and `positions` have shape
/// [n]; `mask` is additive, [n, n]: 0 where the row sees the column, -infinity elsewhere. The first rows are the
/// context.
template <class F, class Token>
concept LogitsFunction = std::integral<Token> &&
    requires(F& f, std::span<const Token> tokens, std::span<const std::int32_t> positions,
             std::span<const float> mask) {
  { f(tokens, positions, mask) } -> std::convertible_to<std::vector<float>>;
};

/// A model without a cache: each forward evaluates the whole text once more, in one call of the function. That shows
/// what lookahead decoding does to a model, and saves calls; to save time, an engine needs a cache (see
/// docs/adapting-an-engine.md). Models `Model` and, where the function can be copied, `ForkableModel`.
template <class F, std::integral Token = std::int32_t>
requires LogitsFunction<F, Token>
class CallableModel {
 public:
  using token_type = Token;

  /// `longest` is the most tokens of a text, drafts included: memory grows with its square. Throws `InvalidArgument`
  /// for a vocabulary or a length of 0, a vocabulary that `Token` cannot number, and a length beyond 32,768.
  CallableModel(F function, std::size_t vocabulary, std::size_t longest)
      : function_(std::move(function)), vocabulary_(vocabulary), longest_(longest) {
    if (vocabulary == 0) throw InvalidArgument("the vocabulary is empty: pass the number of logits of a row");
    detail::check_vocabulary<Token>(vocabulary);
    if (longest == 0 || longest > most)
      throw InvalidArgument("a text of at most " + std::to_string(longest) + " tokens: choose 1 to " +
                            std::to_string(most));
  }

  [[nodiscard]] std::size_t vocabulary() const { return vocabulary_; }
  [[nodiscard]] std::size_t context_size() const { return context_.size(); }
  [[nodiscard]] std::size_t free_slots() const { return longest_ - context_.size(); }
  [[nodiscard]] std::size_t max_rows() const { return longest_; }
  [[nodiscard]] std::size_t max_logit_rows() const { return longest_; }

  /// Forgets all but the first `n` tokens. Throws `InvalidArgument` where n > context_size().
  void truncate(std::size_t n) {
    if (n > context_.size())
      throw InvalidArgument("a context of " + std::to_string(context_.size()) + " tokens cannot keep " +
                            std::to_string(n));
    context_.resize(n);
    rows_ = 0;
  }

  /// Appends to the context; the function is not called. Throws `OutOfRoom` beyond free_slots().
  void prefill(std::span<const Token> tokens) {
    check_room(tokens.size());
    context_.insert(context_.end(), tokens.begin(), tokens.end());
    rows_ = 0;
  }

  /// Calls the function for the context and the rows of the tree. Throws `OutOfRoom` beyond free_slots(),
  /// `ContractViolation` where the function returns another number of logits than it must, and what it throws.
  void forward(const TokenTree<Token>& tree) {
    rows_ = 0;
    const auto rows = static_cast<std::size_t>(tree.size());
    check_room(rows);
    const std::size_t context = context_.size(), n = context + rows;
    tokens_.assign(context_.begin(), context_.end());
    tokens_.insert(tokens_.end(), tree.tokens().begin(), tree.tokens().end());
    positions_.resize(context);
    for (std::size_t i = 0; i < context; ++i) positions_[i] = static_cast<std::int32_t>(i);
    positions_.insert(positions_.end(), tree.positions().begin(), tree.positions().end());
    constexpr float hidden = -std::numeric_limits<float>::infinity();
    mask_.assign(n * n, hidden);
    const std::span mask(mask_);
    for (std::size_t row = 0; row < context; ++row) std::ranges::fill(mask.subspan(row * n, row + 1), 0.0F);
    TreeMask(tree, MaskColumns::context_and_tree).write_cells(mask.subspan(context * n), 0.0F, hidden);
    logits_ = function_(std::span<const Token>(tokens_), std::span<const std::int32_t>(positions_),
                        std::span<const float>(mask_));
    if (logits_.size() != n * vocabulary_)
      throw ContractViolation("the function returned " + std::to_string(logits_.size()) + " logits for " +
                              std::to_string(n) + " rows and a vocabulary of " + std::to_string(vocabulary_) +
                              ": it must return [rows, vocabulary]");
    rows_ = rows;
  }

  /// Keeps the rows of a path of the latest tree, all of them. Throws `InvalidArgument` where there is no such row; a
  /// commit that throws changes nothing.
  std::size_t commit(std::span<const std::int32_t> path) {
    const std::span<const Token> tree = std::span<const Token>(tokens_).last(rows_);
    for (const std::int32_t row : path) check_row(row);
    std::size_t last = context_.size();
    context_.resize(last + path.size());  // before anything is written: a failure leaves the context as it was
    for (const std::int32_t row : path) context_[last++] = tree[static_cast<std::size_t>(row)];
    rows_ = 0;
    return path.size();
  }

  /// The logits of a row of the latest forward. Shape [vocabulary()]. Throws `InvalidArgument` for other rows.
  [[nodiscard]] std::span<const float> logits(int row) const {
    check_row(row);
    return std::span(logits_).subspan((context_.size() + static_cast<std::size_t>(row)) * vocabulary_, vocabulary_);
  }

  [[nodiscard]] CallableModel fork() const requires std::copy_constructible<F> { return *this; }

 private:
  static constexpr std::size_t most = 32'768;

  void check_room(std::size_t tokens) const {
    if (tokens > free_slots())
      throw OutOfRoom(std::to_string(tokens) + " tokens do not fit into " + std::to_string(free_slots()) +
                      " free slots: make the longest text longer");
  }

  void check_row(std::int32_t row) const {
    if (row < 0 || static_cast<std::size_t>(row) >= rows_)
      throw InvalidArgument("row " + std::to_string(row) + " is none of the " + std::to_string(rows_) +
                            " rows whose results are there");
  }

  F function_;
  std::size_t vocabulary_, longest_;
  std::vector<Token> context_, tokens_;
  std::vector<std::int32_t> positions_;
  std::vector<float> mask_, logits_;
  std::size_t rows_ = 0;  // of the latest tree, while its results are there
};

}  // namespace lookahead
