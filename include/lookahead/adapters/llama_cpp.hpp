#pragma once
/// @file llama_cpp.hpp
/// llama.cpp as a `Model`. Depends on llama.h alone; the CMake target is lookahead::llama_cpp.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <llama.h>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lookahead/detail/check_path.hpp"
#include "lookahead/errors.hpp"
#include "lookahead/mask.hpp"
#include "lookahead/token_tree.hpp"

namespace lookahead {

/// A context of llama.cpp that evaluates token trees. Models `Model` and `ForkableModel`; choices are read as logits.
///
/// llama.cpp knows no trees, but a cached token may belong to several sequences, and a row sees what carries its first
/// sequence id: so each leaf of a tree is a sequence (see `sequence_ids`), and the committed context belongs to all.
///
/// Every causal decoder whose cache can be cut back will do, sliding windows included. Its results depend a little on
/// the number of rows, as those of llama.cpp's own batches do: weights that are quantised have other kernels for one
/// row than for many, and so has flash attention, which `default_params` leaves off. check_conformance
/// (testing/conformance.hpp) measures it.
class LlamaCpp {
 public:
  using token_type = llama_token;

  /// llama.cpp's defaults, without flash attention. `n_threads` counts for steps of one row, `n_threads_batch` for all
  /// others: set both.
  [[nodiscard]] static llama_context_params default_params() {
    llama_context_params params = llama_context_default_params();
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    return params;
  }

  /// Makes a context for `model`, which must outlive it. `rows` is the most rows of one forward, 1 to 256; a tree of so
  /// many needs as many sequences, but no more memory. Of `params` it changes what trees need: unified cells, a full
  /// cache for sliding windows, as many sequences and as large a batch, and no embeddings.
  /// Throws `InvalidArgument` for a model whose state cannot be cut back, and for rows out of range;
  /// `std::runtime_error` where llama.cpp makes no context, of too little memory for example.
  explicit LlamaCpp(llama_model* model, llama_context_params params = default_params(), int rows = 32) {
    if (model == nullptr) throw InvalidArgument("the model is null: llama.cpp could not load it; its log says why");
    const char* const obstacle = llama_model_is_recurrent(model)   ? "it is recurrent"
                                 : llama_model_is_hybrid(model)    ? "it has recurrent layers"
                                 : llama_model_has_encoder(model)  ? "it has an encoder"
                                 : llama_model_is_diffusion(model) ? "it is a diffusion model"
                                 : !llama_model_has_decoder(model) ? "it is no decoder"
                                                                   : nullptr;
    if (obstacle != nullptr)
      throw InvalidArgument(std::string("this model cannot be decoded with token trees: ") + obstacle +
                            ", so its state is no list of tokens that can be cut back; use a causal transformer");
    const int most = static_cast<int>(llama_max_parallel_sequences());
    if (rows < 1 || rows > most)
      throw InvalidArgument("a step of " + std::to_string(rows) + " rows: llama.cpp has sequences for 1 to " +
                            std::to_string(most));
    rows_ = rows;
    // With one id, llama.cpp would take the cells that have left a sliding window for new tokens.
    ids_.resize(static_cast<std::size_t>(std::max(rows, 2)));
    std::iota(ids_.begin(), ids_.end(), 0);
    const auto count = static_cast<std::uint32_t>(ids_.size());
    params.n_seq_max = count;
    params.kv_unified = true;
    params.swa_full = true;
    params.embeddings = false;
    params.n_ubatch = std::max(params.n_ubatch, count);
    params.n_batch = std::max(params.n_batch, params.n_ubatch);
    params_ = params;
    model_ = model;
    make_context();
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    vocabulary_ = static_cast<std::size_t>(vocabulary);
    capacity_ = llama_n_ctx_seq(context_.get());
    // Learnt positions end; rotary ones go on.
    if (llama_model_rope_type(model) == LLAMA_ROPE_TYPE_NONE)
      capacity_ = std::min(capacity_, static_cast<std::size_t>(llama_model_n_ctx_train(model)));
  }

  [[nodiscard]] std::size_t vocabulary() const { return vocabulary_; }
  [[nodiscard]] std::size_t context_size() const { return size_; }
  [[nodiscard]] std::size_t free_slots() const { return capacity_ - size_; }
  [[nodiscard]] std::size_t max_rows() const { return static_cast<std::size_t>(rows_); }
  [[nodiscard]] std::size_t max_logit_rows() const { return max_rows(); }

  /// Forgets all but the first `n` tokens. Throws `InvalidArgument` where n > context_size().
  void truncate(std::size_t n) {
    if (n > size_)
      throw InvalidArgument("a context of " + std::to_string(size_) + " tokens cannot keep " + std::to_string(n));
    wanted_.clear();
    cut_back(n);
  }

  /// Appends to the context, in chunks of n_ubatch. Throws `OutOfRoom` beyond free_slots() and `InvalidArgument` for a
  /// token outside the vocabulary, before it evaluates anything; `std::runtime_error` where llama.cpp fails, with what
  /// context_size() tells being cached.
  void prefill(std::span<const token_type> tokens) {
    check_room(tokens.size());
    for (const token_type token : tokens) check_token(token);
    drop_rows();
    while (!tokens.empty()) {
      const std::span<const token_type> chunk = tokens.first(std::min<std::size_t>(tokens.size(), params_.n_ubatch));
      begin_batch();
      for (std::size_t i = 0; i < chunk.size(); ++i) add(chunk[i], size_ + i, all_ids(), false);
      decode();
      size_ += chunk.size();
      rows_cached_ = false;
      tokens = tokens.subspan(chunk.size());
    }
  }

  /// Evaluates a tree on top of the context. Throws `OutOfRoom` where it has more rows than max_rows() or free_slots(),
  /// `InvalidArgument` where it was built for another context size or holds a token outside the vocabulary, and
  /// `std::runtime_error` where llama.cpp fails; the context stays as it was.
  void forward(const TokenTree<token_type>& tree) {
    const auto rows = static_cast<std::size_t>(tree.size());
    if (tree.empty()) throw InvalidArgument("the tree is empty: plan at least one row");
    if (static_cast<std::size_t>(tree.context_size()) != size_)
      throw InvalidArgument("the tree stands on " + std::to_string(tree.context_size()) + " tokens, the context has " +
                            std::to_string(size_));
    if (rows > max_rows())
      throw OutOfRoom("a tree of " + std::to_string(rows) + " rows; this context was made for " +
                      std::to_string(rows_) + ": make it for more, or plan fewer");
    check_room(rows);
    for (const token_type token : tree.tokens()) check_token(token);
    drop_rows();
    leaves_.resize(rows);
    sequence_ids(tree, static_cast<int>(ids_.size()), std::span(leaves_));
    begin_batch();
    for (std::size_t r = 0; r < rows; ++r) {
      // The pending chain belongs to every id, those without a leaf too, so that all ids stand at the same position.
      const Interval ids = static_cast<int>(r) <= tree.root() ? all_ids() : leaves_[r];
      add(tree.tokens()[r], static_cast<std::size_t>(tree.positions()[r]), ids, tree.is_wanted(static_cast<int>(r)));
    }
    decode();
    root_ = static_cast<std::size_t>(tree.root());
    parents_.assign(tree.parents().begin(), tree.parents().end());
    wanted_.assign(outputs_.begin(), outputs_.end());
  }

  /// Keeps the rows of a path of the latest tree, all of them. Nothing is copied: cells change their ids. Throws
  /// `InvalidArgument` where `path` is none.
  std::size_t commit(std::span<const std::int32_t> path) {
    detail::check_path(path, parents_, root_);
    wanted_.clear();
    const auto accepted = static_cast<llama_pos>(path.size() - root_ - 1);
    const auto first = static_cast<llama_pos>(size_ + root_ + 1), end = first + accepted;
    llama_memory_t memory = llama_get_memory(context_.get());
    remove(-1, end, -1);
    if (accepted > 0) {
      const llama_seq_id best = leaves_[static_cast<std::size_t>(path.back())].first;
      for (const llama_seq_id id : ids_) {
        if (id == best) continue;
        remove(id, first, end);
        llama_memory_seq_cp(memory, best, id, first, end);
      }
    }
    size_ += path.size();
    rows_cached_ = false;
    parents_.clear();
    return path.size();
  }

  /// The logits of a wanted row of the latest forward. Shape [vocabulary()]. Throws `InvalidArgument` for other rows.
  [[nodiscard]] std::span<const float> logits(int row) const {
    const float* const logits =
        row >= 0 && static_cast<std::size_t>(row) < wanted_.size() && wanted_[static_cast<std::size_t>(row)] != 0
            ? llama_get_logits_ith(context_.get(), row)
            : nullptr;
    if (logits == nullptr)
      throw InvalidArgument("row " + std::to_string(row) + " has no logits: want it, and read it before the next call");
    return {logits, vocabulary_};
  }

  /// An independent context with the same tokens, at twice the memory. Throws as the constructor does.
  [[nodiscard]] LlamaCpp fork() const {
    LlamaCpp copy(model_, params_, rows_);
    std::vector<std::uint8_t> state(llama_state_seq_get_size(context_.get(), 0));
    if (size_ == 0) return copy;
    if (llama_state_seq_get_data(context_.get(), state.data(), state.size(), 0) != state.size() ||
        llama_state_seq_set_data(copy.context_.get(), state.data(), state.size(), 0) == 0)
      throw std::runtime_error("llama.cpp could not copy a context of " + std::to_string(size_) + " tokens");
    llama_memory_t memory = llama_get_memory(copy.context_.get());
    for (const llama_seq_id id : ids_) llama_memory_seq_cp(memory, 0, id, -1, -1);
    copy.cut_back(size_);
    return copy;
  }

  /// The context, for llama.cpp's own calls: performance counters, adapters, threads (llama.cpp built without OpenMP
  /// starts new ones for each pass, unless llama_attach_threadpool gave it some; forks have none). Its memory must be
  /// left alone.
  [[nodiscard]] llama_context* native() const { return context_.get(); }

 private:
  struct Free {
    void operator()(llama_context* context) const { llama_free(context); }
  };

  void make_context() {
    context_.reset(llama_init_from_model(model_, params_));
    if (context_ == nullptr) throw std::runtime_error("llama.cpp could not make a context: its log says why");
    if (llama_get_memory(context_.get()) == nullptr)
      throw InvalidArgument("this model has no cache of tokens: use a causal transformer");
  }

  [[nodiscard]] Interval all_ids() const { return {0, static_cast<std::int32_t>(ids_.size())}; }

  void check_room(std::size_t tokens) const {
    if (tokens > free_slots())
      throw OutOfRoom(std::to_string(tokens) + " tokens do not fit into " + std::to_string(free_slots()) +
                      " free slots: make the context longer (n_ctx)");
  }

  void check_token(token_type token) const {
    if (token < 0 || static_cast<std::size_t>(token) >= vocabulary_)
      throw InvalidArgument("token " + std::to_string(token) + " is outside the vocabulary of " +
                            std::to_string(vocabulary_));
  }

  void begin_batch() {
    tokens_.clear();
    positions_.clear();
    counts_.clear();
    sequences_.clear();
    outputs_.clear();
  }

  void add(token_type token, std::size_t position, Interval ids, bool wanted) {
    tokens_.push_back(token);
    positions_.push_back(static_cast<llama_pos>(position));
    counts_.push_back(ids.end - ids.first);
    sequences_.push_back(ids_.data() + ids.first);
    outputs_.push_back(wanted ? 1 : 0);
  }

  void decode() {
    wanted_.clear();
    rows_cached_ = true;
    const auto rows = static_cast<std::int32_t>(tokens_.size());
    const llama_batch batch = {rows,           tokens_.data(),    nullptr,        positions_.data(),
                               counts_.data(), sequences_.data(), outputs_.data()};
    const std::int32_t code = llama_decode(context_.get(), batch);
    if (code == 0) return;
    drop_rows();
    throw std::runtime_error("llama_decode failed with code " + std::to_string(code) + " for a batch of " +
                             std::to_string(rows) + " rows on " + std::to_string(size_) +
                             " tokens; llama.cpp's log says why");
  }

  /// Rows that were not committed.
  void drop_rows() {
    if (rows_cached_) cut_back(size_);
  }

  void cut_back(std::size_t n) {
    remove(-1, static_cast<llama_pos>(n), -1);
    size_ = n;
    rows_cached_ = false;
    parents_.clear();
  }

  void remove(llama_seq_id id, llama_pos first, llama_pos end) {
    if (!llama_memory_seq_rm(llama_get_memory(context_.get()), id, first, end))
      throw std::runtime_error("llama.cpp could not cut its cache back: this model's state does not allow it");
  }

  llama_model* model_ = nullptr;
  llama_context_params params_{};
  std::unique_ptr<llama_context, Free> context_;
  int rows_ = 0;
  std::size_t vocabulary_ = 0, capacity_ = 0, size_ = 0;
  std::vector<llama_seq_id> ids_;  // 0, 1, ...: each range of it is a list of ids
  // The latest batch.
  std::vector<token_type> tokens_;
  std::vector<llama_pos> positions_;
  std::vector<std::int32_t> counts_;
  std::vector<llama_seq_id*> sequences_;
  std::vector<std::int8_t> outputs_;
  // The latest tree: the leaves below each row, and its parent; results are there while `wanted_` is not empty.
  std::vector<Interval> leaves_;
  std::vector<std::int32_t> parents_;
  std::vector<std::int8_t> wanted_;
  std::size_t root_ = 0;
  bool rows_cached_ = false;
};

}  // namespace lookahead
