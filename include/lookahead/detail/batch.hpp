#pragma once
/// @file batch.hpp
/// Many sequences as plain memory, and what happens to one of them, over a group. On a device a block runs each
/// sequence; nothing here needs a device.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "lookahead/batch_options.hpp"
#include "lookahead/detail/bits.hpp"
#include "lookahead/detail/config.hpp"
#include "lookahead/detail/step.hpp"
#include "lookahead/errors.hpp"
#include "lookahead/group.hpp"
#include "lookahead/ngram_pool.hpp"
#include "lookahead/packed_batch.hpp"
#include "lookahead/philox.hpp"
#include "lookahead/shape.hpp"
#include "lookahead/step_results.hpp"
#include "lookahead/token_tree.hpp"

namespace lookahead::detail {

/// All of a sequence but its pool's sets.
template <int W, int N, int G, class Token>
struct alignas(16) Sequence {
  using State = StepState<W, N, G, Token>;
  State state;
  TokenTreeStorage<Token, State::max_rows> tree;
  PoolClock clock;
  SequenceOptions<Token> options;
  bool active, planned;
  std::uint32_t generation, step;
  std::int32_t next_rows;  ///< see StepResult; of the planned step
};

/// A view of the memory of a batch. Trivially copyable; memory of zeros is a batch of no sequence.
template <int W, int N, int G, class Token>
struct Batch {
  using State = StepState<W, N, G, Token>;
  using Ring = ResultRing<Token, State::max_block>;

  std::int32_t count, rows;  ///< capacities: sequences, rows of each in a step
  std::uint32_t set_count;   ///< of each pool
  MaskLayout mask_layout;
  bool moves_rows;

  Sequence<W, N, G, Token>* sequences;    ///< [count]
  PoolSet* sets;                          ///< [count][set_count]
  std::int32_t* row_limits;               ///< [count]; may be written between steps
  std::int32_t *tree_rows, *tree_wanted;  ///< [count], of the planned trees
  PackedBatch<Token> packed;
  KeptRows kept;
  Ring ring;

  [[nodiscard]] LOOKAHEAD_HD NGramPoolRef pool(int i) const {
    return {sets + static_cast<std::size_t>(i) * set_count, set_count, &sequences[i].clock};
  }
};

/// Hands out aligned pieces of a block of memory; without one it counts what they take.
class Pieces {
 public:
  explicit Pieces(std::byte* memory) : memory_(memory) {}

  template <class T>
  void take(T*& piece, std::size_t count) {
    constexpr std::size_t alignment = 128;
    used_ = (used_ + alignment - 1) / alignment * alignment;
    piece = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += count * sizeof(T);
  }

  [[nodiscard]] std::size_t used() const { return used_; }

 private:
  std::byte* memory_;
  std::size_t used_ = 0;
};

/// The batch whose memory begins at `memory`, 128-byte aligned, and whose results are kept in `results`; `bytes` takes
/// the size of that memory. Without memory it says the size alone. Throws InvalidArgument for an option out of its
/// range.
template <int W, int N, int G, class Token>
Batch<W, N, G, Token> batch_in(std::byte* memory, StepResult<Token, StepState<W, N, G, Token>::max_block>* results,
                               const BatchOptions& options, std::size_t& bytes) {
  const auto check = [](bool good, const std::string& what, const std::string& range) {
    if (!good) throw InvalidArgument(what + ": choose " + range);
  };
  constexpr int max_rows = StepState<W, N, G, Token>::max_rows;
  check(options.sequences >= 1 && options.sequences <= 1 << 16,
        "a batch of " + std::to_string(options.sequences) + " sequences", "1 to 65536");
  check(options.rows >= 1, std::to_string(options.rows) + " rows for each sequence", "1 or more");
  check(options.pool_slots >= 1 && options.pool_slots <= PoolMemory::max_slots,
        "pools of " + std::to_string(options.pool_slots) + " slots", "1 to " + std::to_string(PoolMemory::max_slots));
  check(options.result_steps >= 1 && options.result_steps <= 1 << 20,
        "room for the results of " + std::to_string(options.result_steps) + " steps", "1 to 1048576");

  Batch<W, N, G, Token> b{};
  b.count = options.sequences;
  b.rows = min(options.rows, max_rows);
  b.set_count = static_cast<std::uint32_t>((options.pool_slots + PoolSet::slots - 1) / PoolSet::slots);
  b.mask_layout = options.mask_layout;
  b.moves_rows = options.moves_rows;
  b.ring = {results, options.sequences, options.result_steps};

  const auto count = static_cast<std::size_t>(b.count);
  const std::size_t capacity = count * static_cast<std::size_t>(b.rows);
  // Rows of whole words: bits without gaps take no more.
  const std::size_t mask_bytes = capacity * 4 * static_cast<std::size_t>((b.rows + 31) / 32);
  check(mask_bytes <= INT32_MAX,
        "the masks of " + std::to_string(capacity) + " rows take " + std::to_string(mask_bytes) + " bytes",
        "fewer sequences or rows, so that 32 bits can index them");

  Pieces pieces(memory);
  pieces.take(b.sequences, count);
  pieces.take(b.sets, count * b.set_count);
  for (std::int32_t** piece : {&b.row_limits, &b.tree_rows, &b.tree_wanted, &b.packed.context_sizes, &b.kept.kept})
    pieces.take(*piece, count);
  for (std::int32_t** piece : {&b.packed.row_offsets, &b.packed.wanted_offsets, &b.packed.mask_offsets})
    pieces.take(*piece, count + 1);
  pieces.take(b.packed.tokens, capacity);
  for (std::int32_t** piece : {&b.packed.positions, &b.packed.parents, &b.packed.sequences, &b.packed.wanted})
    pieces.take(*piece, capacity);
  pieces.take(b.packed.masks, mask_bytes);
  b.kept.stride = b.rows;
  b.kept.context = b.packed.context_sizes;
  pieces.take(b.kept.path, capacity);
  bytes = pieces.used();
  return b;
}

/// Throws InvalidArgument for options that no sequence can have.
template <class Token>
void check(const SequenceOptions<Token>& options) {
  if (options.end_token_count < 0 || options.end_token_count > SequenceOptions<Token>::max_end_tokens)
    throw InvalidArgument(std::to_string(options.end_token_count) + " end tokens: pass 0 to " +
                          std::to_string(SequenceOptions<Token>::max_end_tokens));
  if (!(options.temperature >= 0) || options.temperature > 3.4e38F)
    throw InvalidArgument("temperature is " + std::to_string(options.temperature) + ": choose 0 or more");
}

/// Begins sequence i: forgets what its pool held, and files the prompt.
LOOKAHEAD_GROUP_FN template <Group Gr, int W, int N, int G, class Token>
LOOKAHEAD_HD void attach(const Gr& g, const Batch<W, N, G, Token>& b, int i, const Token* prompt, int count,
                         const SequenceOptions<Token>& options, std::uint32_t generation,
                         StepScratch<W, N, G, Token>& scratch) {
  auto& q = b.sequences[i];
  if (g.rank() == 0) {
    q.options = options;
    q.active = true;
    q.planned = false;
    q.generation = generation;
    q.step = 0;
    q.clock.floor = q.clock.now;
    b.row_limits[i] = options.limits.rows;
  }
  start(g, q.state, b.pool(i), prompt, count, options.window_seed, scratch);
}

/// Ends sequence i, between two steps or within one. By one thread.
template <int W, int N, int G, class Token>
LOOKAHEAD_HD void detach(const Batch<W, N, G, Token>& b, int i) {
  b.sequences[i].active = b.sequences[i].planned = false;
}

/// New limits of sequence i, by one thread.
template <int W, int N, int G, class Token>
LOOKAHEAD_HD void set_limits(const Batch<W, N, G, Token>& b, int i, const Limits& limits) {
  b.sequences[i].options.limits = limits;
  b.row_limits[i] = limits.rows;
}

LOOKAHEAD_GROUP_FN template <Group Gr, class T>
LOOKAHEAD_HD void copy(const Gr& g, T* to, const T* from, std::size_t count) {
  struct alignas(16) Block {
    std::uint32_t word[4];
  };
  static_assert(sizeof(T) % sizeof(Block) == 0 && alignof(T) % alignof(Block) == 0);
  const std::size_t blocks = count * (sizeof(T) / sizeof(Block));
  auto* out = reinterpret_cast<unsigned char*>(to);
  const auto* in = reinterpret_cast<const unsigned char*>(from);
  for (auto k = static_cast<std::size_t>(g.rank()); k < blocks; k += static_cast<std::size_t>(g.size()))
    __builtin_memcpy(__builtin_assume_aligned(out + k * sizeof(Block), sizeof(Block)),
                     __builtin_assume_aligned(in + k * sizeof(Block), sizeof(Block)), sizeof(Block));
}

/// Makes sequence `to` a copy of sequence `from`, pool included, that draws from another stream.
/// Precondition: no step is planned.
LOOKAHEAD_GROUP_FN template <Group Gr, int W, int N, int G, class Token>
LOOKAHEAD_HD void fork(const Gr& g, const Batch<W, N, G, Token>& b, int from, int to, std::uint64_t stream,
                       std::uint32_t generation) {
  copy(g, b.sequences + to, b.sequences + from, 1);
  copy(g, b.pool(to).sets, b.pool(from).sets, b.set_count);
  g.sync();
  if (g.rank() == 0) {
    auto& q = b.sequences[to];
    q.options.stream = stream;
    q.planned = false;
    q.generation = generation;
    q.step = 0;
    b.row_limits[to] = b.row_limits[from];
  }
}

/// The tree of the next step of sequence i, of at most `bucket` rows; an empty one where it is not active.
LOOKAHEAD_GROUP_FN template <Group Gr, int W, int N, int G, class Token>
LOOKAHEAD_HD void plan(const Gr& g, const Batch<W, N, G, Token>& b, int i, int bucket,
                       StepScratch<W, N, G, Token>& scratch) {
  auto& q = b.sequences[i];
  if (q.active) {
    Limits limits = q.options.limits;
    const int own = max(0, min(min(b.row_limits[i], b.rows), q.options.context_limit - q.state.context_size));
    limits.rows = min(own, bucket);
    plan(g, q.state, b.pool(i), q.options.shape, limits, q.tree, scratch);
    if (g.rank() == 0) q.next_rows = q.tree.rows < limits.rows ? q.tree.rows : min(own, 2 * q.tree.rows);
  }
  if (g.rank() == 0) {
    q.planned = q.active;
    b.tree_rows[i] = q.active ? q.tree.rows : 0;
    b.tree_wanted[i] = q.active ? q.tree.wanted_count : 0;
    b.packed.context_sizes[i] = q.active ? q.state.context_size : 0;
  }
}

/// Working memory of `pack`.
struct PackScratch {
  static constexpr int chunk = 256;
  int sum[chunk];
};

/// Where things begin that stand behind each other, `of(j)` for sequence j.
struct Offset {
  int before;  ///< of the sequences before this one
  int total;
};

LOOKAHEAD_GROUP_FN template <Group Gr, class Count>
LOOKAHEAD_HD Offset offset_of(const Gr& g, int i, int count, const Count& of, PackScratch& scratch) {
  Offset offset{0, 0};
  for (int begin = 0; begin < count; begin += PackScratch::chunk) {
    const int n = min(count - begin, PackScratch::chunk);
    for (int k = g.rank(); k < n; k += g.size()) scratch.sum[k] = of(begin + k);
    const int sum = g.exclusive_sum(scratch.sum, n);
    if (i >= begin && i < begin + n) offset.before = offset.total + scratch.sum[i - begin];
    offset.total += sum;
    g.sync();
  }
  return offset;
}

/// Writes the tree of sequence i to its place among those of all sequences, which are planned; finds the place from
/// their sizes. Trees have at most `bucket` rows.
LOOKAHEAD_GROUP_FN template <Group Gr, int W, int N, int G, class Token>
LOOKAHEAD_HD void pack(const Gr& g, const Batch<W, N, G, Token>& b, int i, int bucket, PackScratch& scratch) {
  const PackedBatch<Token>& p = b.packed;
  const auto& tree = b.sequences[i].tree;
  const bool words = b.mask_layout == MaskLayout::words;
  const int word_bits = 32 * ((bucket + 31) / 32);
  const auto mask_bytes = [&](int rows) { return (rows * (words ? word_bits : rows) + 7) / 8; };
  const Offset row = offset_of(
      g, i, b.count, [&](int j) { return b.tree_rows[j]; }, scratch);
  const Offset wanted = offset_of(
      g, i, b.count, [&](int j) { return b.tree_wanted[j]; }, scratch);
  const Offset mask = offset_of(
      g, i, b.count, [&](int j) { return mask_bytes(b.tree_rows[j]); }, scratch);
  if (g.rank() == 0) {
    p.row_offsets[i] = row.before;
    p.wanted_offsets[i] = wanted.before;
    p.mask_offsets[i] = mask.before;
    if (i == b.count - 1) {
      p.row_offsets[b.count] = row.total;
      p.wanted_offsets[b.count] = wanted.total;
      p.mask_offsets[b.count] = mask.total;
    }
  }

  const int rows = b.tree_rows[i];
  for (int r = g.rank(); r < rows; r += g.size()) {
    p.tokens[row.before + r] = tree.token[r];
    p.positions[row.before + r] = tree.position[r];
    p.parents[row.before + r] = tree.parent[r];
    p.sequences[row.before + r] = i;
  }
  for (int k = g.rank(); k < b.tree_wanted[i]; k += g.size()) p.wanted[wanted.before + k] = row.before + tree.wanted[k];

  const int row_bits = words ? word_bits : rows;
  for (int k = g.rank(); k < mask_bytes(rows); k += g.size()) {
    unsigned bits = 0;
    int r = 8 * k / row_bits, c = 8 * k % row_bits;
    for (int bit = 0; bit < 8 && r < rows; ++bit) {
      if (c < rows) bits |= (tree.ancestor[r * tree.words + c / 32] >> (c % 32) & 1U) << bit;
      if (++c == row_bits) {
        c = 0;
        ++r;
      }
    }
    p.masks[mask.before + k] = static_cast<std::uint8_t>(bits);
  }

  // Each sequence pads a part.
  const int step = b.count * g.size(), first = i * g.size() + g.rank();
  for (int r = row.total + first; r < b.count * bucket; r += step) {
    p.tokens[r] = 0;
    p.positions[r] = 0;
    p.parents[r] = -1;
    p.sequences[r] = -1;
  }
  for (int k = wanted.total + first; k < b.count * bucket; k += step) p.wanted[k] = 0;
}

/// What was chosen behind the wanted rows of a packed batch, in their order.
template <class Token>
struct Choices {
  const Token* tokens;  ///< [wanted rows]
  const Token* top;     ///< [wanted rows][width], the best raw tokens of each, best first; or null: `tokens` are them
  std::int32_t width;
};

/// The number of `row` among the wanted rows of a tree, of which it is one.
template <class Token, int R>
LOOKAHEAD_HD int number_of(const TokenTreeStorage<Token, R>& tree, int row) {
  int before = count_of(tree.want_bits[row / 32] & ((1U << (row % 32)) - 1));
  for (int word = 0; word < row / 32; ++word) before += count_of(tree.want_bits[word]);
  return before;
}

/// Takes the step of sequence i: walks, names the rows to keep, applies, and writes the result to the ring.
/// Nothing where no step is planned, because the sequence came later for example.
LOOKAHEAD_GROUP_FN template <Group Gr, int W, int N, int G, class Token>
LOOKAHEAD_HD void resolve(const Gr& g, const Batch<W, N, G, Token>& b, int i, const Choices<Token>& choices,
                          StepScratch<W, N, G, Token>& scratch) {
  auto& q = b.sequences[i];
  auto& s = q.state;
  if (!q.planned) {
    if (g.rank() == 0) b.kept.kept[i] = 0;
    return;
  }
  const std::size_t first = static_cast<std::size_t>(b.packed.wanted_offsets[i]);
  const auto place = [&](int row) { return first + static_cast<std::size_t>(number_of(q.tree, row)); };
  const auto top = [&](int row, Token* out, int count) {
    if (choices.top == nullptr) {
      *out = choices.tokens[place(row)];
      return 1;
    }
    const int n = min(count, choices.width);
    const Token* from = choices.top + place(row) * static_cast<std::size_t>(choices.width);
    for (int k = 0; k < n; ++k) out[k] = from[k];
    return n;
  };
  const auto ends = [&](Token token) {
    for (int k = 0; k < q.options.end_token_count; ++k)
      if (q.options.end_tokens[k] == token) return true;
    return false;
  };
  resolve(
      g, s, q.tree, [&](int row) { return choices.tokens[place(row)]; }, top, ends);

  const int count = s.selected_count;
  int kept = s.path_count;
  if (!b.moves_rows) {
    kept = q.tree.root + 1;
    while (kept < s.path_count && s.path[kept] == kept) ++kept;
  }
  for (int r = g.rank(); r < kept; r += g.size()) b.kept.path[i * b.kept.stride + r] = s.path[r];
  apply(g, s, b.pool(i), q.tree, kept, scratch);

  if (g.rank() == 0) {
    b.kept.kept[i] = kept;
    q.options.limits.tokens_left -= count;
    const EndReason end = s.stopped                                                    ? EndReason::end_token
                          : q.options.limits.tokens_left <= 0                          ? EndReason::token_limit
                          : q.options.context_limit - s.context_size < s.pending_count ? EndReason::out_of_room
                                                                                       : EndReason::none;
    typename Batch<W, N, G, Token>::Ring::Result result;
    result.stamp = result.stamp_of(q.generation, q.step);
    result.count = count;
    result.end = end;
    result.context_size = s.context_size;
    result.rows = q.tree.rows;
    result.logit_rows = q.tree.wanted_count;
    result.next_rows = q.next_rows;
    b.ring.write(i, q.step, result, s.selected);
    ++q.step;
    q.planned = false;
    q.active = end == EndReason::none;
  }
}

/// Working memory of `draw`.
struct DrawScratch {
  static constexpr int lanes = 256;  ///< that look for the best token
  static constexpr int pieces = 32;  ///< whose weights are summed
  float best[lanes];
  std::int32_t token[lanes];
  double sum[pieces];
  double base, aim;
  std::int32_t begin, end;
};

/// Draws from softmax(logits / temperature) by inversion, as SampleVerify does: the first token at which the weights so
/// far exceed `u` times their sum. At temperature 0 it is the arg-max, the lowest token on ties. A logit that is not a
/// number is never drawn; where the best one is not finite, it is taken. All threads see the result in `scratch.begin`.
///
/// Sums are taken piece by piece, so that a group of any size gives the same token; SampleVerify adds the weights one
/// by one. The two differ where `u` lies within a rounding error of a bound, once in about 10^13 draws, or where exp
/// does.
LOOKAHEAD_GROUP_FN template <Group Gr, class Logit>
LOOKAHEAD_HD void draw(const Gr& g, const Logit* logits, int vocabulary, float temperature, double u, DrawScratch& s) {
  constexpr int lanes = DrawScratch::lanes, pieces = DrawScratch::pieces;
  constexpr float lowest = -3.402823466e38F;
  for (int p = g.rank(); p < lanes; p += g.size()) {
    s.best[p] = 0;
    s.token[p] = -1;
    for (int t = p; t < vocabulary; t += lanes) {
      const auto x = static_cast<float>(logits[t]);
      if (x > s.best[p] || (s.token[p] < 0 && x == x)) {
        s.best[p] = x;
        s.token[p] = t;
      }
    }
  }
  g.sync();
  for (int half = lanes / 2; half > 0; half /= 2) {
    for (int p = g.rank(); p < half; p += g.size()) {
      const int other = s.token[p + half];
      if (other < 0) continue;
      if (s.token[p] < 0 || s.best[p + half] > s.best[p] || (s.best[p + half] == s.best[p] && other < s.token[p])) {
        s.best[p] = s.best[p + half];
        s.token[p] = other;
      }
    }
    g.sync();
  }
  const float top = s.best[0];
  const int best = s.token[0] < 0 ? 0 : s.token[0];
  const bool greedy = temperature == 0 || !(top >= lowest && top <= -lowest);
  if (g.rank() == 0) {
    s.begin = greedy ? best : 0;
    s.end = greedy ? best + 1 : vocabulary;
    s.base = 0;
  }
  g.sync();
  if (greedy) return;
  const double slope = 1 / static_cast<double>(temperature);
  // The piece that holds the token is cut into pieces, until it is the token.
  for (bool whole = true; s.end - s.begin > 1; whole = false) {
    const int begin = s.begin, end = s.end, size = (end - begin + pieces - 1) / pieces;
    const auto tile = g.tile();
    for (int p = tile.rank(); p < pieces; p += tile.count()) {
      const int first = begin + p * size;
      const double sum = tile.sum(max(0, min(size, end - first)), [&](int i) {
        const double weight =
            std::exp((static_cast<double>(static_cast<float>(logits[first + i])) - static_cast<double>(top)) * slope);
        return weight > 0 ? weight : 0.0;
      });
      if (tile.leads()) s.sum[p] = sum;
    }
    g.sync();
    if (g.rank() == 0) {
      if (whole) {
        double total = 0;
        for (int p = 0; p < pieces; ++p) total += s.sum[p];
        s.aim = u * total;  // below the total even after rounding
      }
      // Where rounding leaves no piece, it is the last one with a weight.
      int last = 0;
      double before = s.base, sum = s.base;
      for (int p = 0; p < pieces && sum <= s.aim; ++p) {
        if (s.sum[p] == 0) continue;
        last = p;
        before = sum;
        sum += s.sum[p];
      }
      s.base = before;
      s.begin = begin + last * size;
      s.end = min(end, begin + (last + 1) * size);
    }
    g.sync();
  }
}

/// Draws the token behind wanted row k of the packed batch, as the options of its sequence say, into out[k]; nothing
/// where there is no such row. `logits` are the row's.
LOOKAHEAD_GROUP_FN template <Group Gr, int W, int N, int G, class Token, class Logit>
LOOKAHEAD_HD void sample(const Gr& g, const Batch<W, N, G, Token>& b, int k, const Logit* logits, int vocabulary,
                         Token* out, DrawScratch& scratch) {
  const PackedBatch<Token>& p = b.packed;
  if (k >= p.wanted_offsets[b.count]) return;
  const int row = p.wanted[k];
  const SequenceOptions<Token>& o = b.sequences[p.sequences[row]].options;
  const double u = Philox::at(o.seed, o.stream, static_cast<std::uint64_t>(p.positions[row] + 1)).uniform();
  draw(g, logits, vocabulary, o.temperature, u, scratch);
  if (g.rank() == 0) out[k] = static_cast<Token>(scratch.begin);
}

/// The smallest bucket that holds `rows`: of 1, 4, 8, 16, 32, 64, the published number of rows, and `most`.
template <int W, int N, int G>
[[nodiscard]] constexpr int bucket_of(int rows, int most) {
  int smallest = most;
  for (const int bucket : {1, 4, 8, 16, 32, 64, (W + G) * (N - 1)})
    if (rows <= bucket && bucket < smallest) smallest = bucket;
  return smallest;
}

}  // namespace lookahead::detail
