// The smallest complete adapter. Its "language model": seven tokens, and the next one is the sum of the last two mod 7.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <span>
#include <vector>

#include "lookahead/lookahead.hpp"

class FibonacciModel {
 public:
  using token_type = std::int32_t;

  std::size_t vocabulary() const { return vocabulary_size; }
  std::size_t context_size() const { return cache_.size(); }
  std::size_t free_slots() const { return longest - cache_.size(); }
  std::size_t max_rows() const { return most_rows; }
  std::size_t max_logit_rows() const { return most_rows; }
  void truncate(std::size_t n) { cache_.resize(n); }
  void prefill(std::span<const token_type> tokens) { cache_.insert(cache_.end(), tokens.begin(), tokens.end()); }

  // One pass over all rows. A row sees the cached context, its ancestors and itself: here, its parent is enough.
  void forward(const lookahead::TokenTree<token_type>& tree) {
    std::ranges::copy(tree.tokens(), tokens_);
    for (std::size_t row = 0; row < tree.tokens().size(); ++row) {
      const int parent = tree.parents()[row];
      const token_type before = parent >= 0 ? tokens_[parent] : cache_.empty() ? 0 : cache_.back();
      next_[row] = (before + tokens_[row]) % vocabulary_size;
    }
  }
  token_type next_token(int row) const { return next_[row]; }

  // Keeps the accepted rows behind the context.
  std::size_t commit(std::span<const std::int32_t> path) {
    for (const int row : path) cache_.push_back(tokens_[row]);
    return path.size();
  }

 private:
  static constexpr int vocabulary_size = 7, longest = 1000, most_rows = 256;
  std::vector<token_type> cache_;
  token_type tokens_[most_rows], next_[most_rows];
};
static_assert(lookahead::Model<FibonacciModel>);  // names the call that is missing

int main() {
  FibonacciModel model;
  // This toy's steps take no time, so no row would pay. A real model's tell how many do: leave the option out.
  lookahead::Decoder decoder(model, {.cost = lookahead::StepCost::none()});
  const std::vector<std::int32_t> prompt = {0, 1};
  const auto print = [](std::span<const std::int32_t> block) {
    for (const int token : block) std::cout << token;
    std::cout << ' ';
  };
  const lookahead::Generation done = decoder.generate(prompt, 100, print);
  std::cout << "\n" << done.tokens << " tokens in " << done.steps << " steps\n";
}
