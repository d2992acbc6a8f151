#pragma once
/// @file torch.hpp
/// A module of PyTorch as a `Model`. Depends on LibTorch alone, 1.13 or newer; the CMake target is lookahead::torch.

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <sstream>
#include <string>
#include <torch/types.h>
#include <torch/utils.h>
#include <utility>
#include <vector>

#include "lookahead/detail/check_path.hpp"
#include "lookahead/errors.hpp"
#include "lookahead/mask.hpp"
#include "lookahead/token_tree.hpp"

namespace lookahead {

/// What a module has, and how much of it.
struct TorchOptions {
  std::int64_t vocabulary = 0;        ///< logits of a row
  std::int64_t layers = 0;            ///< layers that cache keys and values
  std::int64_t heads = 0;             ///< heads of keys and values in a layer
  std::int64_t head_size = 0;         ///< numbers of a key, and of a value
  std::int64_t longest = 0;           ///< most tokens of a text, drafts included
  std::int64_t rows = 64;             ///< most rows of one pass; a prefill works in chunks of as many
  torch::TensorOptions tensors = {};  ///< type and device of the cache and of the mask; float32 on the CPU
};

/// The keys and values of a `TorchModel`, which a module appends to. All memory is taken at construction.
class TorchCache {
 public:
  /// Takes the keys and values of the rows of this pass, both [heads, rows, head_size], behind those of the context,
  /// and returns the keys and values of both, [heads, context + rows, head_size]: views that are valid during the pass.
  /// Belongs to the first layer when it is called first in a pass, then to the second: once for each layer, in order.
  /// Throws `ContractViolation` for more layers, another shape, type or device.
  std::pair<torch::Tensor, torch::Tensor> append(const torch::Tensor& keys, const torch::Tensor& values) {
    if (layer_ == keys_.size(0))
      throw ContractViolation("the module caches more than its " + std::to_string(layer_) +
                              " layers in one pass: append once for each, or set TorchOptions::layers");
    check(keys, "keys");
    check(values, "values");
    const auto put = [&](const torch::Tensor& cache, const torch::Tensor& rows) {
      const torch::Tensor layer = cache.select(0, layer_);
      layer.narrow(1, context_, rows_).copy_(rows);
      return layer.narrow(1, 0, context_ + rows_);
    };
    std::pair both(put(keys_, keys), put(values_, values));
    ++layer_;
    return both;
  }

 private:
  template <class Module>
  friend class TorchModel;

  explicit TorchCache(const TorchOptions& o)
      : keys_(torch::empty({o.layers, o.heads, o.longest, o.head_size}, o.tensors)),
        values_(torch::empty_like(keys_)) {}

  void begin(std::int64_t context, std::int64_t rows) {
    context_ = context;
    rows_ = rows;
    layer_ = 0;
  }

  void end() const {
    if (layer_ != keys_.size(0))
      throw ContractViolation("the module cached " + std::to_string(layer_) + " of its " +
                              std::to_string(keys_.size(0)) + " layers: append once for each in every pass");
  }

  /// Moves tokens to the places that begin with `to`. All are read before the first is written.
  void move(std::vector<std::int64_t>& from, std::int64_t to) {
    const auto count = static_cast<std::int64_t>(from.size());
    const torch::Tensor index =
        torch::from_blob(from.data(), {count}, torch::kInt64).to(keys_.device(), torch::kInt64, false, true);
    const torch::Tensor keys = keys_.index_select(2, index), values = values_.index_select(2, index);
    keys_.narrow(2, to, count).copy_(keys);
    values_.narrow(2, to, count).copy_(values);
  }

  void copy(const TorchCache& from, std::int64_t context) {
    keys_.narrow(2, 0, context).copy_(from.keys_.narrow(2, 0, context));
    values_.narrow(2, 0, context).copy_(from.values_.narrow(2, 0, context));
  }

  void check(const torch::Tensor& rows, const char* what) const {
    const torch::Tensor expected = keys_.select(0, 0).narrow(1, 0, rows_);
    if (!rows.defined() || rows.sizes() != expected.sizes() || rows.scalar_type() != expected.scalar_type() ||
        rows.device() != expected.device())
      throw ContractViolation("the " + std::string(what) + " of layer " + std::to_string(layer_) + " are " +
                              describe(rows) + ", but the cache takes " + describe(expected) +
                              ": [heads, rows, head_size] as TorchOptions says");
  }

  /// Shape, type and device, as in "[2, 5, 64] Float cpu".
  static std::string describe(const torch::Tensor& tensor) {
    if (!tensor.defined()) return "undefined";
    std::ostringstream text;
    text << tensor.sizes() << ' ' << tensor.scalar_type() << ' ' << tensor.device();
    return text.str();
  }

  torch::Tensor keys_, values_;  // [layers, heads, longest, head_size]
  std::int64_t context_ = 0, rows_ = 0, layer_ = 0;
};

/// `m(tokens, positions, mask, wanted, cache)` evaluates n rows on top of a context and returns the logits of the
/// wanted rows, [wanted, vocabulary], of any floating type. A `torch::nn::ModuleHolder` whose module has such a
/// `forward` will do, and so will a lambda.
/// 1. `tokens` and `positions` are int64, [n]. `mask` is additive, [n, context + n]: 0 where the row sees the column,
///    -infinity elsewhere; the columns behind the context are the rows. `wanted` are rows, int64, [wanted]: select them
///    in front of the output matrix. All are on the device of the cache, and valid during the call.
/// 2. Each layer gives its keys and values to `cache`, once, and attends to what it gets for them.
/// 3. A prefill wants no rows: what is returned then is not looked at.
template <class M>
concept TorchModule = requires(M& m, const torch::Tensor& tensor, TorchCache& cache) {
  { m(tensor, tensor, tensor, tensor, cache) } -> std::convertible_to<torch::Tensor>;
};

/// A module with a cache that evaluates token trees. Models `Model` and, where the module can be copied,
/// `ForkableModel`; choices are read in two ways: the best tokens are found on the device, and only these are copied to
/// the host, once a step; logits are copied where they are asked for, as sampling does.
///
/// Results depend a little on the number of rows, because torch's matrix products do. check_conformance
/// (testing/conformance.hpp) measures it. Gradients are not recorded; put the module into evaluation mode.
template <class Module>
class TorchModel {
  static_assert(TorchModule<Module>,
                "a module is called with (tokens, positions, mask, wanted, cache), four tensors and a TorchCache&, and "
                "returns a tensor of logits");

 public:
  using token_type = std::int32_t;

  /// Takes the memory of `longest` tokens. Throws `InvalidArgument` for options out of range, and what torch throws.
  TorchModel(Module module, const TorchOptions& options)
      : module_(std::move(module)),
        options_(checked(options)),
        cache_(options_),
        mask_(torch::empty({options_.rows, options_.longest}, options_.tensors)) {}

  [[nodiscard]] std::size_t vocabulary() const { return static_cast<std::size_t>(options_.vocabulary); }
  [[nodiscard]] std::size_t context_size() const { return static_cast<std::size_t>(size_); }
  [[nodiscard]] std::size_t free_slots() const { return static_cast<std::size_t>(options_.longest - size_); }
  [[nodiscard]] std::size_t max_rows() const { return static_cast<std::size_t>(options_.rows); }
  [[nodiscard]] std::size_t max_logit_rows() const { return max_rows(); }

  /// Forgets all but the first `n` tokens. Throws `InvalidArgument` where n > context_size().
  void truncate(std::size_t n) {
    if (n > context_size())
      throw InvalidArgument("a context of " + std::to_string(size_) + " tokens cannot keep " + std::to_string(n));
    drop_rows();
    size_ = static_cast<std::int64_t>(n);
  }

  /// Appends to the context, in chunks of max_rows(). Throws `OutOfRoom` beyond free_slots() and `InvalidArgument` for
  /// a token outside the vocabulary, before it evaluates anything; `ContractViolation` where the module breaks a rule,
  /// and what it throws, with what context_size() tells being cached.
  void prefill(std::span<const token_type> tokens) {
    check_room(tokens.size());
    check_tokens(tokens);
    drop_rows();
    while (!tokens.empty()) {
      const std::size_t count = std::min(tokens.size(), max_rows());
      inputs_.assign(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(count));
      for (std::size_t i = 0; i < count; ++i) inputs_.push_back(size_ + static_cast<std::int64_t>(i));
      cells_.assign(count * count, hidden);
      for (std::size_t i = 0; i < count; ++i) std::ranges::fill(std::span(cells_).subspan(i * count, i + 1), 0.0F);
      evaluate(count);
      size_ += static_cast<std::int64_t>(count);
      tokens = tokens.subspan(count);
    }
  }

  /// Evaluates a tree on top of the context. Throws `OutOfRoom` where it has more rows than max_rows() or free_slots(),
  /// `InvalidArgument` where it was built for another context size or holds a token outside the vocabulary,
  /// `ContractViolation` where the module breaks a rule, and what it throws; the context stays as it was.
  void forward(const TokenTree<token_type>& tree) {
    const auto rows = static_cast<std::size_t>(tree.size());
    if (tree.empty()) throw InvalidArgument("the tree is empty: plan at least one row");
    if (tree.context_size() != size_)
      throw InvalidArgument("the tree stands on " + std::to_string(tree.context_size()) + " tokens, the context has " +
                            std::to_string(size_));
    if (rows > max_rows())
      throw OutOfRoom("a tree of " + std::to_string(rows) + " rows; this model takes " + std::to_string(max_rows()) +
                      " in one pass: set TorchOptions::rows, or plan fewer");
    check_room(rows);
    check_tokens(tree.tokens());
    drop_rows();
    inputs_.assign(tree.tokens().begin(), tree.tokens().end());
    inputs_.insert(inputs_.end(), tree.positions().begin(), tree.positions().end());
    inputs_.insert(inputs_.end(), tree.wanted().begin(), tree.wanted().end());
    cells_.resize(rows * rows);
    TreeMask(tree, MaskColumns::tree).write_cells(std::span(cells_), 0.0F, hidden);
    evaluate(rows);
    parents_.assign(tree.parents().begin(), tree.parents().end());
    root_ = static_cast<std::size_t>(tree.root());
    place_.assign(rows, none);
    for (std::size_t i = 0; i < tree.wanted().size(); ++i)
      place_[static_cast<std::size_t>(tree.wanted()[i])] = static_cast<std::int64_t>(i);
  }

  /// Keeps the rows of a path of the latest tree, all of them: those that do not lie right behind the context move
  /// there. Throws `InvalidArgument` where `path` is none, and what torch throws; the context stays as it was.
  std::size_t commit(std::span<const std::int32_t> path) {
    detail::check_path(path, parents_, root_);
    std::size_t first = root_ + 1;
    while (first < path.size() && path[first] == static_cast<std::int32_t>(first)) ++first;
    if (first < path.size()) {
      const torch::NoGradGuard no_gradients;
      std::vector<std::int64_t> from;
      for (const std::int32_t row : path.subspan(first)) from.push_back(size_ + row);
      cache_.move(from, size_ + static_cast<std::int64_t>(first));
    }
    size_ += static_cast<std::int64_t>(path.size());
    drop_rows();
    return path.size();
  }

  /// The arg-max of a wanted row of the latest forward, the lowest token on ties. Throws `InvalidArgument` for other
  /// rows.
  [[nodiscard]] token_type next_token(int row) const { return best_[place(row) * best_count()]; }

  /// The best tokens of a wanted row, best first, the lowest token first on ties; returns how many. Up to 8 are on the
  /// host already.
  std::size_t top_tokens(int row, std::span<token_type> out) const {
    const std::size_t at = place(row), count = std::min(out.size(), vocabulary());
    if (count <= best_count()) {
      std::copy_n(&best_[at * best_count()], count, out.begin());
    } else {
      const torch::NoGradGuard no_gradients;
      copy_best(logits_.narrow(0, static_cast<std::int64_t>(at), 1), count, out);
    }
    return count;
  }

  /// The logits of a wanted row of the latest forward. Shape [vocabulary()]. The first call of a step copies those of
  /// all wanted rows to the host. Throws `InvalidArgument` for other rows.
  [[nodiscard]] std::span<const float> logits(int row) {
    const std::size_t at = place(row);
    if (!host_logits_.defined()) host_logits_ = logits_.to(torch::kCPU, torch::kFloat32).contiguous();
    return {host_logits_.template data_ptr<float>() + at * vocabulary(), vocabulary()};
  }

  /// An independent model with the same context. Both call the same module, where copies of it share one.
  [[nodiscard]] TorchModel fork() const requires std::copy_constructible<Module> {
    const torch::NoGradGuard no_gradients;
    TorchModel copy(module_, options_);
    copy.cache_.copy(cache_, size_);
    copy.size_ = size_;
    return copy;
  }

 private:
  static constexpr float hidden = -std::numeric_limits<float>::infinity();
  static constexpr std::int64_t none = -1, most = std::numeric_limits<std::int32_t>::max();

  static TorchOptions checked(TorchOptions o) {
    const auto check = [](std::int64_t value, const char* name) {
      if (value < 1 || value > most)
        throw InvalidArgument("TorchOptions::" + std::string(name) + " is " + std::to_string(value) + "; give 1 to " +
                              std::to_string(most));
    };
    check(o.vocabulary, "vocabulary");
    check(o.layers, "layers");
    check(o.heads, "heads");
    check(o.head_size, "head_size");
    check(o.longest, "longest");
    check(o.rows, "rows");
    if (!torch::isFloatingType(torch::typeMetaToScalarType(o.tensors.dtype())))
      throw InvalidArgument(
          "TorchOptions::tensors has a type without -infinity, which a mask needs: give a floating one");
    o.rows = std::min(o.rows, o.longest);
    return o;
  }

  /// Runs the module on `rows` rows. `inputs_` holds their tokens, their positions and which of them are wanted,
  /// `cells_` their mask.
  void evaluate(std::size_t count) {
    const torch::NoGradGuard no_gradients;
    const auto rows = static_cast<std::int64_t>(count), all = static_cast<std::int64_t>(inputs_.size());
    const std::int64_t wanted = all - 2 * rows;
    const torch::Tensor inputs =
        torch::from_blob(inputs_.data(), {all}, torch::kInt64).to(mask_.device(), torch::kInt64, false, true);
    const torch::Tensor mask = mask_.narrow(0, 0, rows).narrow(1, 0, size_ + rows);
    mask.narrow(1, 0, size_).zero_();
    mask.narrow(1, size_, rows).copy_(torch::from_blob(cells_.data(), {rows, rows}, torch::kFloat32));
    cache_.begin(size_, rows);
    torch::Tensor logits = module_(inputs.narrow(0, 0, rows), inputs.narrow(0, rows, rows), mask,
                                   inputs.narrow(0, 2 * rows, wanted), cache_);
    cache_.end();
    if (wanted == 0) return;
    if (!logits.defined() || logits.dim() != 2 || logits.size(0) != wanted || logits.size(1) != options_.vocabulary ||
        !logits.is_floating_point() || logits.device() != mask_.device()) {
      std::ostringstream device;
      device << mask_.device();
      throw ContractViolation("the module returned logits " + TorchCache::describe(logits) + "; they must be [" +
                              std::to_string(wanted) + ", " + std::to_string(options_.vocabulary) +
                              "], the wanted rows and the vocabulary, of a floating type, " + device.str());
    }
    const auto best = static_cast<std::size_t>(wanted) * best_count();
    best_.resize(best);
    copy_best(logits, best_count(), best_);
    logits_ = std::move(logits);
  }

  /// The best `count` tokens of each row, best first. torch leaves the order of ties open: so logits and tokens become
  /// one integer, of which no two are equal.
  static void copy_best(const torch::Tensor& logits, std::size_t count, std::span<token_type> out) {
    const torch::Tensor bits = (logits.to(torch::kFloat32) + 0).view(torch::kInt32).to(torch::kInt64);  // no -0
    const torch::Tensor rank = torch::where(bits < 0, bits.bitwise_xor(0x7FFFFFFF), bits);
    const torch::Tensor keys = rank * (std::int64_t{1} << 32) - torch::arange(logits.size(1), rank.options());
    const torch::Tensor best =
        std::get<1>(keys.topk(static_cast<std::int64_t>(count))).to(torch::kCPU, torch::kInt32).contiguous();
    std::copy_n(best.data_ptr<token_type>(), best.numel(), out.begin());
  }

  [[nodiscard]] std::size_t best_count() const { return std::min<std::size_t>(8, vocabulary()); }

  [[nodiscard]] std::size_t place(int row) const {
    if (row < 0 || static_cast<std::size_t>(row) >= place_.size() || place_[static_cast<std::size_t>(row)] == none)
      throw InvalidArgument("row " + std::to_string(row) + " has no logits: want it, and read it before the next call");
    return static_cast<std::size_t>(place_[static_cast<std::size_t>(row)]);
  }

  void check_room(std::size_t tokens) const {
    if (tokens > free_slots())
      throw OutOfRoom(std::to_string(tokens) + " tokens do not fit into " + std::to_string(free_slots()) +
                      " free slots: set TorchOptions::longest");
  }

  void check_tokens(std::span<const token_type> tokens) const {
    for (const token_type token : tokens)
      if (token < 0 || token >= options_.vocabulary)
        throw InvalidArgument("token " + std::to_string(token) + " is outside the vocabulary of " +
                              std::to_string(options_.vocabulary));
  }

  void drop_rows() {
    parents_.clear();
    place_.clear();
    logits_.reset();
    host_logits_.reset();
  }

  Module module_;
  TorchOptions options_;
  TorchCache cache_;
  torch::Tensor mask_;     // [rows, longest]: each pass takes the corner that it needs
  std::int64_t size_ = 0;  // tokens of the context
  // What a pass takes from the host.
  std::vector<std::int64_t> inputs_;
  std::vector<float> cells_;
  // The latest tree, and where its wanted rows lie in the results; empty when there are none.
  std::vector<std::int32_t> parents_;
  std::size_t root_ = 0;
  std::vector<std::int64_t> place_;
  torch::Tensor logits_, host_logits_;  // [wanted, vocabulary]
  std::vector<token_type> best_;        // [wanted, best_count()]
};

}  // namespace lookahead
