#pragma once
/// @file llama_engine.hpp
/// A CPU engine for Llama-architecture models whose results do not depend on what else a step evaluates.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "engines/gguf.hpp"
#include "engines/kernels.hpp"

#include "lookahead/model.hpp"

namespace lookahead::engines {

/// How an engine runs. Sizes and threads change no result; other weights or another set of kernels round otherwise.
struct LlamaOptions {
  int context = 0;     ///< longest context in tokens, at most the model's; 0: the model's, but no more than 4,096
  int max_rows = 256;  ///< most rows of one forward, 1 to 4,096; prefill works in chunks of as many
  int threads = 0;     ///< threads, the caller's included, 1 to 256; 0: as many as the machine runs at once
  std::optional<WeightType> weights = {};  ///< converts all matrices when the model is loaded; nothing: as in the file
  const Kernels* kernels = nullptr;        ///< one of `available_kernels()`; nullptr: the fastest
};

/// A language model of the Llama architecture (RMSNorm, rotary positions on adjacent pairs, grouped-query attention,
/// SwiGLU; tied or separate output) on the CPU. Models `lookahead::Model`, and reads choices in all three ways.
///
/// **Row-invariant**: the logits of a row are a function of the tokens on its path, to the last bit. It makes no
/// difference how many rows a step has, where they lie, whether a token was prefilled, evaluated in a chain or
/// committed from a tree, and how many threads there are. So decoding satisfies the exactness axiom.
///
/// Packed weights (Q8_0, Q4_0, Q4_1) meet activations that are rounded to signed bytes, 32 with a common scale; all
/// other types meet floats. What an engine keeps in memory besides the file: packed weights in another order, and
/// weights that were converted.
///
/// After construction no call allocates. Calls are not thread-safe; forks are independent.
class LlamaEngine {
 public:
  using token_type = std::int32_t;

  /// Loads a model. The engine shares the file. Throws `ModelFileError` where the file is no complete Llama model,
  /// `InvalidArgument` where an option is out of range.
  explicit LlamaEngine(const GgufFile& file, const LlamaOptions& options = {});
  LlamaEngine(LlamaEngine&&) noexcept;
  LlamaEngine& operator=(LlamaEngine&&) noexcept;
  ~LlamaEngine();

  [[nodiscard]] std::size_t vocabulary() const;
  [[nodiscard]] std::size_t context_size() const;
  [[nodiscard]] std::size_t free_slots() const;
  [[nodiscard]] std::size_t max_rows() const;
  [[nodiscard]] std::size_t max_logit_rows() const;

  /// Forgets all but the first `n` tokens. Throws `InvalidArgument` where n > context_size().
  void truncate(std::size_t n);

  /// Appends to the context. Throws `OutOfRoom` beyond free_slots() and `InvalidArgument` for a token outside the
  /// vocabulary, before it evaluates anything.
  void prefill(std::span<const token_type> tokens);

  /// Evaluates a tree on top of the context. Throws `OutOfRoom` where it has more rows than max_rows() or free_slots(),
  /// `InvalidArgument` where it was built for another context size or holds a token outside the vocabulary.
  void forward(const TokenTree<token_type>& tree);

  /// Keeps the rows of a path of the latest tree, all of them. Throws `InvalidArgument` where `path` is none.
  std::size_t commit(std::span<const std::int32_t> path);

  /// The logits of a wanted row of the latest forward. Shape [vocabulary()]. Throws `InvalidArgument` for other rows.
  [[nodiscard]] std::span<const float> logits(int row) const;

  /// The arg-max of a wanted row, the lowest token on ties.
  [[nodiscard]] token_type next_token(int row) const;

  /// The best tokens of a wanted row, best first, the lowest token first on ties; returns how many.
  std::size_t top_tokens(int row, std::span<token_type> out) const;

  /// An independent engine with the same context and weights, and threads of its own.
  [[nodiscard]] LlamaEngine fork() const;

 private:
  struct State;
  explicit LlamaEngine(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace lookahead::engines
