#include "engines/llama_engine.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engines/floats.hpp"
#include "engines/kernels.hpp"
#include "engines/llama_weights.hpp"
#include "engines/workers.hpp"

#include "lookahead/errors.hpp"

namespace lookahead::engines {
namespace {

constexpr std::size_t value_stretch = 128;  ///< positions whose values fit the first-level cache
constexpr int default_context = 4096, most_rows = 4096, most_threads = 256;

std::size_t size(int n) { return static_cast<std::size_t>(n); }

/// Names an option as a program and as the user of an example gives it.
int bounded(int value, int least, int most, const char* option, const char* on_command_line = "") {
  if (value < least || value > most)
    throw InvalidArgument(std::string("LlamaOptions::") + option + " is " + std::to_string(value) + "; give " +
                          std::to_string(least) + " to " + std::to_string(most) + on_command_line);
  return value;
}

int resolved_threads(int given) {
  if (given == 0) return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, most_threads);
  return bounded(given, 1, most_threads, "threads", ", on a command line with --threads");
}

}  // namespace

struct LlamaEngine::State {
  State(std::shared_ptr<const LlamaWeights> model, const LlamaOptions& given);

  std::shared_ptr<const LlamaWeights> weights;
  LlamaOptions options;  ///< resolved: nothing is 0
  const Kernels& kernels;
  Workers workers;
  int blocks = 0;  ///< key blocks of a cached head
  int tile = 1;    ///< rows of an attention task
  std::size_t context_size = 0;

  // The cache: keys [layer][key head][block][head][block_size], so that neighbouring positions fill a vector; values
  // [layer][key head][position][head]. The rows of the latest step lie behind the context, row r at context_size + r.
  Floats keys, values;
  Floats rope_table;  ///< [context][rope / 2][cos, sin]

  // One row of each per row of a step.
  Floats x, normed, query, key, value, attended, hidden, up, delta, logits;
  std::vector<int> length;     ///< rows that a row sees
  std::vector<int> logit_row;  ///< row -> its place in `logits`, -1 where it has none
  std::vector<std::int32_t> step_parents;
  int step_rows = 0, step_root = -1;

  struct Scratch {
    Floats queries, scores, outputs;
    std::vector<float> sums;
    std::vector<int> path;
  };
  std::vector<Scratch> scratch;  ///< [thread]

  void check_tokens(std::span<const token_type> tokens) const;
  void evaluate(std::span<const token_type> tokens, const TokenTree<token_type>* tree);
  void store(int layer, int row);
  void attend(int layer, int key_head, int first_row, int last_row, const TokenTree<token_type>* tree,
              Scratch& s) const;
  std::span<const int> path_of(int row, const TokenTree<token_type>* tree, Scratch& s) const;
  void move_row(int from, int to) const;
  [[nodiscard]] const float* logits_of(int row) const;

  float* key_blocks(int layer, int key_head) const {
    return keys + size(layer * weights->key_heads + key_head) * size(blocks) * size(weights->head) * block_size;
  }
  float* value_rows(int layer, int key_head) const {
    return values + size(layer * weights->key_heads + key_head) * size(blocks) * block_size * size(weights->head);
  }

  /// Cuts the outputs of matrices into tasks of whole blocks, the same ones whatever the number of rows: 4 or more for
  /// each thread where there are so many blocks, so that none waits for long, of at most about 256 outputs. A thread's
  /// next task mostly lies where its last one ended, so what a task fetches ahead is what its thread needs.
  template <class Task>
  void for_outputs(int outputs, Task task) {
    const std::int64_t threads = workers.size(), blocks_in_all = (outputs + block_size - 1) / block_size;
    const std::int64_t each =
        std::max(std::clamp<std::int64_t>(blocks_in_all / threads, 1, 4), blocks_in_all / (8 * threads));
    const std::int64_t tasks = threads * each;
    const auto begin = [&](std::int64_t t) {
      return std::min(static_cast<int>(t * blocks_in_all / tasks) * block_size, outputs);
    };
    workers.run(static_cast<int>(tasks), [&](int i, int) {
      const std::int64_t t = i % threads * each + i / threads;
      if (begin(t) < begin(t + 1)) task(begin(t), begin(t + 1));
    });
  }
};

LlamaEngine::State::State(std::shared_ptr<const LlamaWeights> model, const LlamaOptions& given)
    : weights(std::move(model)),
      options{given.context == 0
                  ? std::min(weights->context, default_context)
                  : bounded(given.context, 1, weights->context, "context", ", on a command line with --context"),
              bounded(given.max_rows, 1, most_rows, "max_rows"), resolved_threads(given.threads), given.weights,
              given.kernels == nullptr ? available_kernels().front() : given.kernels},
      kernels(*options.kernels),
      workers(options.threads),
      blocks((options.context + block_size - 1) / block_size) {
  const LlamaWeights& w = *weights;
  const int group = w.heads / w.key_heads;
  tile = std::max(1, 16 / group);
  const std::size_t cached = w.layers.size() * size(w.key_heads) * size(w.head) * size(blocks) * block_size;
  keys = Floats(cached);
  values = Floats(cached);

  rope_table = Floats(size(options.context) * size(w.rope));
  for (int i = 0; i < w.rope / 2; ++i) {
    double frequency = std::pow(w.frequency_base, -2.0 * i / w.rope);
    if (w.frequency_factors != nullptr) frequency /= static_cast<double>(w.frequency_factors[i]);
    for (int p = 0; p < options.context; ++p) {
      float* const out = rope_table + (size(p) * size(w.rope) + 2 * size(i));
      out[0] = static_cast<float>(std::cos(p * frequency));
      out[1] = static_cast<float>(std::sin(p * frequency));
    }
  }

  const std::size_t rows = size(options.max_rows);
  x = Floats(rows * row_stride(w.width));
  normed = Floats(rows * row_stride(w.width));
  delta = Floats(rows * row_stride(w.width));
  query = Floats(rows * size(w.heads * w.head));
  attended = Floats(rows * row_stride(w.heads * w.head));
  key = Floats(rows * size(w.key_heads * w.head));
  value = Floats(rows * size(w.key_heads * w.head));
  hidden = Floats(rows * row_stride(w.feed));
  up = Floats(rows * row_stride(w.feed));
  logits = Floats(rows * size(w.vocabulary));
  length.resize(rows);
  logit_row.assign(rows, -1);
  step_parents.resize(rows);
  for (int t = 0; t < workers.size(); ++t) {
    Scratch& s = scratch.emplace_back();
    s.queries = Floats(size(tile * group * w.head));
    s.outputs = Floats(size(tile * group * w.head));
    s.scores = Floats(size(tile * group) * size(blocks) * block_size);
    s.sums.resize(size(tile * group));
    s.path.resize(rows);
  }
}

void LlamaEngine::State::check_tokens(std::span<const token_type> tokens) const {
  for (const token_type t : tokens)
    if (t < 0 || t >= weights->vocabulary)
      throw InvalidArgument("token " + std::to_string(t) + " is outside the vocabulary of " +
                            std::to_string(weights->vocabulary) + "; use the tokenizer of this model");
}

/// Runs the rows of a step through the model and leaves their keys and values behind the context. Without a tree they
/// are a chain and no logits are computed.
void LlamaEngine::State::evaluate(std::span<const token_type> tokens, const TokenTree<token_type>* tree) {
  const LlamaWeights& w = *weights;
  const int rows = static_cast<int>(tokens.size());
  const std::size_t width = row_stride(w.width), queries = row_stride(w.heads * w.head), feed = row_stride(w.feed);
  for (int r = 0; r < rows; ++r) {
    const int parent = tree == nullptr ? r - 1 : tree->parents()[size(r)];
    length[size(r)] = parent < 0 ? 1 : length[size(parent)] + 1;
    step_parents[size(r)] = parent;
    logit_row[size(r)] = -1;
  }
  const std::span<const std::int32_t> wanted = tree == nullptr ? std::span<const std::int32_t>{} : tree->wanted();

  const auto add_and_normalise = [&](int r, const float* norm) {
    float* const out = normed + size(r) * width;
    kernels.add_and_normalise(x + size(r) * width, delta + size(r) * width, norm, w.epsilon, w.width, out);
    if (w.packed) kernels.quantise(out, 0, w.width, w.width);
  };
  workers.run(rows, [&](int r, int) {
    std::memset(x + size(r) * width, 0, width * sizeof(float));
    w.embed(tokens[size(r)], delta + size(r) * width);
    add_and_normalise(r, w.layers[0].attention_norm);
  });
  for (std::size_t l = 0; l < w.layers.size(); ++l) {
    const LlamaLayer& layer = w.layers[l];
    const int i = static_cast<int>(l);
    for_outputs(layer.query.outputs + 2 * layer.key.outputs, [&](int first, int last) {
      // Queries, keys and values are one row of outputs; a task may touch more than one of them.
      int begin = 0;
      for (const auto& [matrix, out] :
           {std::pair(&layer.query, query + 0), std::pair(&layer.key, key + 0), std::pair(&layer.value, value + 0)}) {
        const int end = begin + matrix->outputs;
        if (first < end && last > begin)
          kernels.multiply(*matrix, std::max(first, begin) - begin, std::min(last, end) - begin, normed + 0, width,
                           rows, out, size(matrix->outputs));
        begin = end;
      }
    });
    workers.run(rows, [&](int r, int) { store(i, r); });
    if (l + 1 == w.layers.size() && wanted.empty()) return;  // nothing reads the rest

    const int tiles = (rows + tile - 1) / tile;
    workers.run(tiles * w.key_heads, [&](int task, int thread) {
      const int first = task / w.key_heads * tile;
      attend(i, task % w.key_heads, first, std::min(first + tile, rows), tree, scratch[size(thread)]);
    });
    if (w.packed)
      workers.run(rows, [&](int r, int) {
        kernels.quantise(attended + size(r) * queries, 0, w.heads * w.head, w.heads * w.head);
      });
    for_outputs(layer.output.outputs, [&](int first, int last) {
      kernels.multiply(layer.output, first, last, attended + 0, queries, rows, delta + 0, width);
    });
    workers.run(rows, [&](int r, int) { add_and_normalise(r, layer.feed_norm); });
    for_outputs(w.feed, [&](int first, int last) {
      kernels.multiply(layer.gate, first, last, normed + 0, width, rows, hidden + 0, feed);
      kernels.multiply(layer.up, first, last, normed + 0, width, rows, up + 0, feed);
      for (int r = 0; r < rows; ++r) {
        float* const row = hidden + size(r) * feed;
        kernels.gate(row + first, up + (size(r) * feed + size(first)), last - first);
        if (w.packed) kernels.quantise(row, first, last, w.feed);
      }
    });
    for_outputs(w.width, [&](int first, int last) {
      kernels.multiply(layer.down, first, last, hidden + 0, feed, rows, delta + 0, width);
    });
    const float* const next_norm = l + 1 < w.layers.size() ? w.layers[l + 1].attention_norm : w.output_norm;
    workers.run(rows, [&](int r, int) { add_and_normalise(r, next_norm); });
  }

  // The wanted rows alone meet the output matrix: they move together at the front, which never overtakes a source.
  for (std::size_t n = 0; n < wanted.size(); ++n) {
    logit_row[size(wanted[n])] = static_cast<int>(n);
    if (size(wanted[n]) != n) std::memcpy(normed + n * width, normed + size(wanted[n]) * width, width * sizeof(float));
  }
  const int outputs = static_cast<int>(wanted.size());
  for_outputs(w.vocabulary, [&](int first, int last) {
    kernels.multiply(w.output, first, last, normed + 0, width, outputs, logits + 0, size(w.vocabulary));
  });
}

/// Rotates the queries and keys of a row to its position and caches its keys and values.
void LlamaEngine::State::store(int layer, int row) {
  const LlamaWeights& w = *weights;
  const std::size_t head = size(w.head), slot = context_size + size(row);
  const float* const table = rope_table + (context_size + size(length[size(row)]) - 1) * size(w.rope);
  const auto rotate = [&](float* at) {
    for (int i = 0; i < w.rope; i += 2) {
      const float a = at[i], b = at[i + 1];
      at[i] = a * table[i] - b * table[i + 1];
      at[i + 1] = a * table[i + 1] + b * table[i];
    }
  };
  for (std::size_t h = 0; h < size(w.heads); ++h) rotate(query + (size(row) * size(w.heads) + h) * head);
  for (int h = 0; h < w.key_heads; ++h) {
    const std::size_t at = (size(row) * size(w.key_heads) + size(h)) * head;
    rotate(key + at);
    float* const block = key_blocks(layer, h) + slot / block_size * head * block_size + slot % block_size;
    for (std::size_t d = 0; d < head; ++d) block[d * block_size] = (key + at)[d];
    std::memcpy(value_rows(layer, h) + slot * head, value + at, head * sizeof(float));
  }
}

/// Attention of the rows [first_row, last_row) for the heads that share a key head. A score adds its products in the
/// order of the head's dimensions, and an output adds its values in the order of the path: the context, then the
/// ancestors, then the row itself. Both are the same wherever the ancestors' rows lie.
void LlamaEngine::State::attend(int layer, int key_head, int first_row, int last_row, const TokenTree<token_type>* tree,
                                Scratch& s) const {
  const LlamaWeights& w = *weights;
  const int group = w.heads / w.key_heads, rows = last_row - first_row;
  const std::size_t head = size(w.head), stride = size(blocks) * block_size;
  const float scale = 1.0F / std::sqrt(static_cast<float>(w.head));
  const std::size_t some = size(rows * group) * head;
  for (int r = 0; r < rows; ++r) {
    const float* const from = query + (size(first_row + r) * size(w.heads) + size(key_head * group)) * head;
    float* const to = s.queries + size(r * group) * head;
    for (std::size_t i = 0; i < size(group) * head; ++i) to[i] = from[i] * scale;
  }

  const float* const keys_of = key_blocks(layer, key_head);
  const float* const values_of = value_rows(layer, key_head);
  const std::size_t used = (context_size + size(last_row) + block_size - 1) / block_size;
  for (int q = 0; q < rows * group; ++q) std::memset(s.scores + size(q) * stride, 0, used * block_size * sizeof(float));
  for (std::size_t b = 0; b < used; ++b)
    kernels.accumulate(s.queries + 0, head, keys_of + b * head * block_size, block_size, s.scores + b * block_size,
                       stride, rows * group, w.head, block_size);

  // Each row's scores come together: the context's lie in front, those of the path follow.
  for (int r = 0; r < rows; ++r) {
    const std::span<const int> path = path_of(first_row + r, tree, s);
    for (int g = 0; g < group; ++g) {
      float* const scores = s.scores + size(r * group + g) * stride;
      for (std::size_t i = 0; i < path.size(); ++i) scores[context_size + i] = scores[context_size + size(path[i])];
      const float sum = kernels.exponentials(scores, static_cast<int>(context_size + path.size()));
      s.sums[size(r * group + g)] = sum;
    }
  }

  std::memset(s.outputs + 0, 0, some * sizeof(float));
  for (std::size_t p = 0; p < context_size; p += value_stretch)
    kernels.accumulate(s.scores + p, stride, values_of + p * head, head, s.outputs + 0, head, rows * group,
                       static_cast<int>(std::min(value_stretch, context_size - p)), w.head);
  for (int r = 0; r < rows; ++r) {
    const std::span<const int> path = path_of(first_row + r, tree, s);
    float* const out = s.outputs + size(r * group) * head;
    for (std::size_t i = 0, n = 1; i < path.size(); i += n, n = 1) {  // neighbours go together
      while (i + n < path.size() && size(path[i + n]) == size(path[i]) + n) ++n;
      kernels.accumulate(s.scores + (size(r * group) * stride + context_size + i), stride,
                         values_of + (context_size + size(path[i])) * head, head, out, head, group, static_cast<int>(n),
                         w.head);
    }
    float* const to = attended + (size(first_row + r) * row_stride(w.heads * w.head) + size(key_head * group) * head);
    for (int g = 0; g < group; ++g)
      for (std::size_t d = 0; d < head; ++d)
        to[size(g) * head + d] = out[size(g) * head + d] / s.sums[size(r * group + g)];
  }
}

/// The rows that a row sees, in order; valid until the next call with the same scratch.
std::span<const int> LlamaEngine::State::path_of(int row, const TokenTree<token_type>* tree, Scratch& s) const {
  std::size_t seen = 0;
  if (tree == nullptr) {
    for (int i = 0; i <= row; ++i) s.path[seen++] = i;
  } else {
    const std::span<const std::uint32_t> words = tree->ancestors(row);
    for (std::size_t i = 0; i < words.size(); ++i)
      for (std::uint32_t bits = words[i]; bits != 0; bits &= bits - 1)
        s.path[seen++] = static_cast<int>(i * 32) + std::countr_zero(bits);
  }
  return std::span(s.path).first(seen);
}

void LlamaEngine::State::move_row(int from, int to) const {
  const std::size_t head = size(weights->head), source = context_size + size(from), target = context_size + size(to);
  const auto at = [&](std::size_t slot) { return slot / block_size * head * block_size + slot % block_size; };
  for (int l = 0; l < static_cast<int>(weights->layers.size()); ++l)
    for (int h = 0; h < weights->key_heads; ++h) {
      float* const k = key_blocks(l, h);
      for (std::size_t d = 0; d < head; ++d) k[at(target) + d * block_size] = k[at(source) + d * block_size];
      float* const v = value_rows(l, h);
      std::memcpy(v + target * head, v + source * head, head * sizeof(float));
    }
}

const float* LlamaEngine::State::logits_of(int row) const {
  if (row < 0 || row >= step_rows || logit_row[size(row)] < 0)
    throw InvalidArgument("row " + std::to_string(row) + " has no logits: the latest forward had " +
                          std::to_string(step_rows) +
                          " rows; want the row, and read it before anything else is called");
  return logits + size(logit_row[size(row)]) * size(weights->vocabulary);
}

LlamaEngine::LlamaEngine(const GgufFile& file, const LlamaOptions& options)
    : state_([&] {
        const auto weights = std::make_shared<LlamaWeights>(file);
        auto state = std::make_unique<State>(weights, options);  // checks the options before the work
        weights->arrange(options.weights, state->workers);
        return state;
      }()) {}
LlamaEngine::LlamaEngine(std::unique_ptr<State> state) : state_(std::move(state)) {}
LlamaEngine::LlamaEngine(LlamaEngine&&) noexcept = default;
LlamaEngine& LlamaEngine::operator=(LlamaEngine&&) noexcept = default;
LlamaEngine::~LlamaEngine() = default;

std::size_t LlamaEngine::vocabulary() const { return size(state_->weights->vocabulary); }
std::size_t LlamaEngine::context_size() const { return state_->context_size; }
std::size_t LlamaEngine::free_slots() const { return size(state_->options.context) - state_->context_size; }
std::size_t LlamaEngine::max_rows() const { return size(state_->options.max_rows); }
std::size_t LlamaEngine::max_logit_rows() const { return max_rows(); }

void LlamaEngine::truncate(std::size_t n) {
  if (n > context_size())
    throw InvalidArgument("cannot truncate to " + std::to_string(n) + " tokens: the context has " +
                          std::to_string(context_size()) + "; give at most as many");
  state_->context_size = n;
  state_->step_rows = 0;
}

void LlamaEngine::prefill(std::span<const token_type> tokens) {
  if (tokens.size() > free_slots())
    throw OutOfRoom("cannot prefill " + std::to_string(tokens.size()) + " tokens: " + std::to_string(free_slots()) +
                    " slots are free; shorten the prompt or construct the engine with a longer context");
  state_->check_tokens(tokens);
  state_->step_rows = 0;
  while (!tokens.empty()) {
    const std::span<const token_type> chunk = tokens.first(std::min(tokens.size(), max_rows()));
    state_->evaluate(chunk, nullptr);
    state_->context_size += chunk.size();
    tokens = tokens.subspan(chunk.size());
  }
}

void LlamaEngine::forward(const TokenTree<token_type>& tree) {
  const std::size_t rows = size(tree.size());
  if (rows > max_rows() || rows > free_slots())
    throw OutOfRoom("cannot evaluate " + std::to_string(rows) + " rows: at most " + std::to_string(max_rows()) +
                    " fit a step and " + std::to_string(free_slots()) + " slots are free; plan a smaller tree");
  if (rows > 0 && size(tree.context_size()) != context_size())
    throw InvalidArgument("the tree was built for a context of " + std::to_string(tree.context_size()) +
                          " tokens, but " + std::to_string(context_size()) + " are cached; plan it again");
  state_->check_tokens(tree.tokens());
  state_->step_rows = 0;
  if (rows > 0) state_->evaluate(tree.tokens(), &tree);
  state_->step_rows = tree.size();
  state_->step_root = tree.root();
}

std::size_t LlamaEngine::commit(std::span<const std::int32_t> path) {
  State& s = *state_;
  bool valid = path.size() <= size(s.step_rows) && path.size() > size(s.step_root) && s.step_rows > 0;
  for (std::size_t i = 0; valid && i < path.size(); ++i)
    valid = path[i] >= 0 && path[i] < s.step_rows && s.step_parents[size(path[i])] == (i == 0 ? -1 : path[i - 1]) &&
            (i > size(s.step_root) || path[i] == static_cast<int>(i));
  if (!valid)
    throw InvalidArgument("the path of " + std::to_string(path.size()) +
                          " rows is no path of the latest step, which had " + std::to_string(s.step_rows) +
                          " rows and root " + std::to_string(s.step_root) +
                          "; give rows 0 to root and then a child of each");
  for (std::size_t i = 0; i < path.size(); ++i)
    if (size(path[i]) != i) s.move_row(path[i], static_cast<int>(i));
  s.context_size += path.size();
  s.step_rows = 0;
  return path.size();
}

std::span<const float> LlamaEngine::logits(int row) const { return {state_->logits_of(row), vocabulary()}; }

LlamaEngine::token_type LlamaEngine::next_token(int row) const {
  token_type best{};
  top_tokens(row, std::span(&best, 1));
  return best;
}

std::size_t LlamaEngine::top_tokens(int row, std::span<token_type> out) const {
  const int count = static_cast<int>(std::min(out.size(), vocabulary()));
  return size(state_->kernels.top(state_->logits_of(row), state_->weights->vocabulary, out.data(), count));
}

LlamaEngine LlamaEngine::fork() const {
  const State& from = *state_;
  auto to = std::make_unique<State>(from.weights, from.options);
  const std::size_t head = size(from.weights->head);
  const std::size_t used = (from.context_size + block_size - 1) / block_size * block_size * head * sizeof(float);
  for (int l = 0; l < static_cast<int>(from.weights->layers.size()); ++l)
    for (int h = 0; h < from.weights->key_heads; ++h) {
      std::memcpy(to->key_blocks(l, h), from.key_blocks(l, h), used);
      std::memcpy(to->value_rows(l, h), from.value_rows(l, h), used);
    }
  to->context_size = from.context_size;
  return LlamaEngine(std::move(to));
}

}  // namespace lookahead::engines
