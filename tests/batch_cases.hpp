#pragma once
/// @file batch_cases.hpp
/// Random lives of a batch of sequences beside the host classes: what the batch holds and writes must be equal, byte
/// for byte. Who runs the batch is a parameter: host threads, or a device.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "lookahead/detail/batch.hpp"
#include "lookahead/lookahead_step.hpp"
#include "lookahead/mask.hpp"
#include "lookahead/testing/oracle_model.hpp"

namespace batch_cases {

using namespace lookahead;
using Token = std::int32_t;
using Tokens = std::vector<Token>;
using Oracle = testing::OracleModel<Token>;

constexpr std::size_t at(int i) { return static_cast<std::size_t>(i); }

/// The memory of a batch on the host.
template <int W, int N, int G>
class Memory {
 public:
  using Batch = detail::Batch<W, N, G, Token>;
  using Result = typename Batch::Ring::Result;

  explicit Memory(const BatchOptions& options) {
    std::size_t bytes = 0;
    batch = detail::batch_in<W, N, G, Token>(nullptr, nullptr, options, bytes);
    lines_.resize(bytes / sizeof(Line) + 1);
    results.resize(at(options.sequences) * at(options.result_steps));
    std::memset(static_cast<void*>(lines_.data()), 0, lines_.size() * sizeof(Line));
    std::memset(static_cast<void*>(results.data()), 0, results.size() * sizeof(Result));
    batch = detail::batch_in<W, N, G, Token>(lines_.data()->bytes, results.data(), options, bytes);
    this->bytes = {lines_.data()->bytes, bytes};
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] bool operator==(const Memory& other) const {
    return std::memcmp(bytes.data(), other.bytes.data(), bytes.size()) == 0 &&
           std::memcmp(results.data(), other.results.data(), results.size() * sizeof(Result)) == 0;
  }

  Batch batch;
  std::vector<Result> results;
  std::span<std::byte> bytes;

 private:
  struct alignas(128) Line {
    std::byte bytes[128];
  };
  std::vector<Line> lines_;
};

/// One sequence, by the host classes.
template <int W, int N, int G>
struct Sequence {
  using Step = Lookahead<W, N, G, Token>;
  Step step;
  NGramPool<Token> pool;
  typename Step::Tree tree;
  std::unique_ptr<Oracle> model;
  SequenceOptions<Token> options;
  std::int32_t row_limit = 0;
  bool active = false;
  ResultCursor cursor{};

  explicit Sequence(std::size_t pool_slots) : pool(pool_slots) {
    // The bytes between members, too: they are compared.
    std::memset(static_cast<void*>(&step), 0, sizeof step);
    std::memset(static_cast<void*>(&tree), 0, sizeof tree);
  }

  [[nodiscard]] const auto& state() const {
    static_assert(std::is_standard_layout_v<Step>);
    return reinterpret_cast<const detail::StepState<W, N, G, Token>&>(step);
  }
};

/// One random life of a batch that `device` runs. A device has `memory()`, what the batch holds now, and the calls of
/// BatchLookahead without a stream.
template <int W, int N, int G, class Device>
class Life {
 public:
  using Host = Sequence<W, N, G>;
  static constexpr int max_rows = Host::Step::max_rows;

  Life(Device& device, const BatchOptions& options, unsigned seed)
      : device_(device),
        options_(options),
        random_(seed),
        vocabulary_(2 + below(below(3) == 0 ? 200 : 20)),
        greedy_(below(2) == 0) {
    for (int i = 0; i < options.sequences; ++i) sequences_.emplace_back(options.pool_slots);
  }

  void run(int actions) {
    for (int action = 0; action < actions; ++action) {
      CAPTURE(action);
      const int i = below(options_.sequences);
      Host& host = sequences_[at(i)];
      switch (below(30)) {
        case 0:
          device_.detach(i);
          host.active = false;
          break;
        case 1:
          if (host.active) set_limits(i);
          break;
        case 2:
          if (const int from = below(options_.sequences); from != i && sequences_[at(from)].active && !host.active)
            fork(from, i);
          break;
        default:
          if (!host.active)
            attach(i);
          else
            step();
      }
      check();
    }
  }

  int tokens = 0, steps = 0;

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }

  SequenceOptions<Token> random_options() {
    SequenceOptions<Token> o;
    o.shape = {below(3) == 0 ? below(W + 2) : 0, 2 + below(N), below(G + 2),
               below(4) == 0 ? ShapeMode::published : ShapeMode::growth, below(2) == 0};
    o.limits.rows = below(8) == 0 ? 0 : 1 + below(max_rows);
    if (below(4) == 0) o.limits.logit_rows = below(20);
    if (below(4) == 0) o.limits.depth = below(6);
    if (below(4) == 0) o.limits.tokens_left = below(60);
    if (below(4) == 0) o.context_limit = 30 + below(100);
    if (below(4) == 0) o.end_tokens[o.end_token_count++] = below(4 * vocabulary_);
    o.window_seed = random_();
    o.stream = random_();
    return o;
  }

  void attach(int i) {
    Host& host = sequences_[at(i)];
    Tokens prompt(at(1 + below(50)));
    for (Token& t : prompt) t = below(vocabulary_);
    host.options = random_options();
    host.row_limit = host.options.limits.rows;
    testing::OracleOptions oracle;
    oracle.vocabulary = vocabulary_;
    oracle.seed = random_();
    oracle.repetition = 0.97;
    oracle.max_rows = oracle.max_logit_rows = 512;
    oracle.capacity = 4000;
    host.model = std::make_unique<Oracle>(oracle);
    host.model->prefill(std::span<const Token>(prompt).first(prompt.size() - 1));
    host.pool.reset();
    host.step.start(host.pool, prompt, host.options.window_seed);
    host.active = true;
    host.cursor = device_.attach(i, prompt, host.options);
  }

  void fork(int from, int to) {
    Host& host = sequences_[at(to)];
    const Host& other = sequences_[at(from)];
    host.step = other.step.fork();
    host.pool = other.pool;
    host.tree = other.tree;
    host.model = std::make_unique<Oracle>(other.model->fork());
    host.options = other.options;
    host.options.stream = random_();
    host.row_limit = other.row_limit;
    host.active = true;
    host.cursor = device_.fork(from, to, host.options.stream);
  }

  void set_limits(int i) {
    Host& host = sequences_[at(i)];
    const Limits limits = random_options().limits;
    host.options.limits = limits;
    host.row_limit = limits.rows;
    device_.set_limits(i, limits);
  }

  void step() {
    const int bucket = std::min(device_.memory().batch.rows, detail::bucket_of<W, N, G>(1 + below(max_rows), max_rows));
    device_.plan(bucket);
    for (Host& host : sequences_) {
      if (!host.active) continue;
      Limits limits = host.options.limits;
      const int room = host.options.context_limit - static_cast<int>(host.step.context_size());
      const int own = std::max(0, std::min({host.row_limit, device_.memory().batch.rows, room}));
      limits.rows = std::min(own, bucket);
      host.step.plan(host.pool, host.options.shape, limits, host.tree);
      next_rows_[at(number(host))] = host.tree.rows < limits.rows ? host.tree.rows : std::min(own, 2 * host.tree.rows);
    }
    check();
    check_packed(bucket);

    // What the engine answers, row by wanted row.
    const int width = std::min(8, vocabulary_);
    const bool with_top = !greedy_ || below(2) == 0;
    Tokens chosen, top;
    std::vector<std::size_t> first(sequences_.size());
    for (Host& host : sequences_) {
      first[at(number(host))] = chosen.size();
      if (!host.active || host.tree.rows == 0) continue;
      host.model->forward(host.tree.view());
      for (const int row : host.tree.view().wanted()) {
        Tokens best(at(width));
        (void)host.model->top_tokens(row, best);
        chosen.push_back(greedy_ || below(3) > 0 ? best[0] : below(vocabulary_));
        if (with_top) top.insert(top.end(), best.begin(), best.end());
      }
    }
    device_.resolve(chosen, top, with_top ? width : 0);
    const auto& b = device_.memory().batch;
    for (Host& host : sequences_) {
      const int i = number(host);
      CAPTURE(i);
      if (!host.active) {
        REQUIRE(b.kept.kept[i] == 0);
        continue;
      }
      const auto wanted = host.tree.view().wanted();
      const auto place = [&](int row) {
        return first[at(i)] + at(static_cast<int>(std::ranges::find(wanted, row) - wanted.begin()));
      };
      const auto proposal = host.step.resolve(
          [&](int row) { return chosen[place(row)]; },
          [&](int row, std::span<Token> out) -> std::size_t {
            if (!with_top) {
              out[0] = chosen[place(row)];
              return 1;
            }
            const std::size_t n = std::min(out.size(), at(width));
            std::copy_n(top.begin() + static_cast<std::ptrdiff_t>(place(row) * at(width)), n, out.begin());
            return n;
          },
          [&](Token token) { return host.options.end_token_count > 0 && token == host.options.end_tokens[0]; });
      std::size_t kept = proposal.path.size();
      if (!options_.moves_rows)
        for (kept = at(host.tree.root + 1); kept < proposal.path.size();) {
          if (proposal.path[kept] != static_cast<std::int32_t>(kept)) break;
          ++kept;
        }
      REQUIRE(b.kept.kept[i] == static_cast<std::int32_t>(kept));
      REQUIRE(b.kept.context[i] == host.tree.context_size);
      REQUIRE(std::ranges::equal(std::span(b.kept.path + i * b.kept.stride, kept), proposal.path.first(kept)));
      const Tokens accepted(proposal.tokens.begin(), proposal.tokens.end());
      const bool stopped = proposal.stopped;
      if (kept > 0) REQUIRE(host.model->commit(proposal.path.first(kept)) == kept);
      host.step.apply(host.pool, kept);

      host.options.limits.tokens_left -= static_cast<std::int32_t>(accepted.size());
      const bool full = host.options.context_limit - static_cast<int>(host.step.context_size()) <
                        static_cast<int>(host.step.pending().size());
      const EndReason end = stopped                                ? EndReason::end_token
                            : host.options.limits.tokens_left <= 0 ? EndReason::token_limit
                            : full                                 ? EndReason::out_of_room
                                                                   : EndReason::none;
      int results = 0;
      const std::uint32_t before = host.cursor.step;
      const int read = device_.read(host.cursor, [&](const auto& result) {
        ++results;
        REQUIRE(result.stamp == result.stamp_of(host.cursor.generation, before));
        REQUIRE(accepted == Tokens(result.tokens, result.tokens + result.count));
        REQUIRE(result.end == end);
        REQUIRE(result.context_size == static_cast<std::int32_t>(host.step.context_size()));
        REQUIRE(result.rows == host.tree.rows);
        REQUIRE(result.logit_rows == host.tree.wanted_count);
        REQUIRE(result.next_rows == next_rows_[at(i)]);
      });
      REQUIRE(results == 1);
      REQUIRE(read == 1);
      REQUIRE(host.cursor.step == before + 1);
      host.active = end == EndReason::none;
      tokens += static_cast<int>(accepted.size());
      ++steps;
    }
  }

  [[nodiscard]] int number(const Host& host) const { return static_cast<int>(&host - sequences_.data()); }

  // Where two states differ first, in bytes; -1 where they are equal. The shape has bytes that mean nothing.
  using State = detail::StepState<W, N, G, Token>;
  static std::ptrdiff_t difference(const State& a, const State& b) {
    const auto same_shape = [](const detail::FittedShape& x, const detail::FittedShape& y) {
      return x.w == y.w && x.n == y.n && x.g == y.g && x.mode == y.mode && x.slide == y.slide;
    };
    const auto offset = reinterpret_cast<const char*>(&a.shape) - reinterpret_cast<const char*>(&a);
    if (!same_shape(a.shape, b.shape)) return offset;
    const auto *x = reinterpret_cast<const char*>(&a), *y = reinterpret_cast<const char*>(&b);
    for (std::ptrdiff_t i = 0; i < static_cast<std::ptrdiff_t>(sizeof a); ++i)
      if (x[i] != y[i] && (i < offset || i >= offset + static_cast<std::ptrdiff_t>(sizeof a.shape))) return i;
    return -1;
  }

  // Everything that a sequence carries.
  void check() {
    const auto& b = device_.memory().batch;
    for (const Host& host : sequences_) {
      const int i = number(host);
      CAPTURE(i);
      const auto& q = b.sequences[i];
      REQUIRE(q.active == host.active);
      REQUIRE(difference(q.state, host.state()) == -1);
      REQUIRE(std::memcmp(&q.tree, &host.tree, sizeof q.tree) == 0);
      REQUIRE(q.clock.now == host.pool.clock().now);
      REQUIRE(q.clock.floor == host.pool.clock().floor);
      bool same = true;
      for (std::uint32_t k = 0; k < b.set_count; ++k) {
        const PoolSet set = host.pool.set(k);
        same = same && std::memcmp(&b.pool(i).sets[k], &set, sizeof set) == 0;
      }
      REQUIRE(same);
      if (host.active) REQUIRE(b.row_limits[i] == host.row_limit);
    }
  }

  // The packed batch against the exports of each tree.
  void check_packed(int bucket) {
    const auto& b = device_.memory().batch;
    const PackedBatch<Token>& p = b.packed;
    const bool words = options_.mask_layout == MaskLayout::words;
    int rows = 0, wanted = 0, mask_bytes = 0;
    for (const Host& host : sequences_) {
      const int i = number(host);
      CAPTURE(i);
      REQUIRE(p.row_offsets[i] == rows);
      REQUIRE(p.wanted_offsets[i] == wanted);
      REQUIRE(p.mask_offsets[i] == mask_bytes);
      if (!host.active) continue;
      const auto view = host.tree.view();
      REQUIRE(view.size() <= bucket);
      REQUIRE(p.context_sizes[i] == view.context_size());
      REQUIRE(std::ranges::equal(view.tokens(), std::span(p.tokens + rows, at(view.size()))));
      REQUIRE(std::ranges::equal(view.positions(), std::span(p.positions + rows, at(view.size()))));
      REQUIRE(std::ranges::equal(view.parents(), std::span(p.parents + rows, at(view.size()))));
      REQUIRE(std::ranges::all_of(std::span(p.sequences + rows, at(view.size())), [&](int s) { return s == i; }));
      REQUIRE(std::ranges::equal(view.wanted(), std::span(p.wanted + wanted, view.wanted().size()),
                                 [&](int row, int packed) { return packed == rows + row; }));
      wanted += static_cast<int>(view.wanted().size());
      std::vector<std::uint8_t> mask;
      if (words) {
        const TreeMask<Token> in_words(view, MaskColumns::tree, bucket);
        std::vector<std::uint32_t> all(in_words.words());
        in_words.write_words(all);
        mask.resize(at(view.size()) * at((bucket + 31) / 32) * 4);
        for (std::size_t k = 0; k < mask.size(); ++k) mask[k] = static_cast<std::uint8_t>(all[k / 4] >> (8 * (k % 4)));
      } else {
        const TreeMask<Token> in_bytes(view, MaskColumns::tree);
        mask.resize(in_bytes.bytes());
        in_bytes.write_bytes(mask);
      }
      REQUIRE(mask == std::vector<std::uint8_t>(p.masks + mask_bytes, p.masks + mask_bytes + mask.size()));
      rows += view.size();
      mask_bytes += static_cast<int>(mask.size());
    }
    REQUIRE(p.row_offsets[b.count] == rows);
    REQUIRE(p.wanted_offsets[b.count] == wanted);
    REQUIRE(p.mask_offsets[b.count] == mask_bytes);
    bool padded = true;
    for (int r = rows; r < b.count * bucket; ++r)
      padded = padded && p.tokens[r] == 0 && p.positions[r] == 0 && p.parents[r] == -1 && p.sequences[r] == -1;
    for (int k = wanted; k < b.count * bucket; ++k) padded = padded && p.wanted[k] == 0;
    REQUIRE(padded);
  }

  Device& device_;
  BatchOptions options_;
  std::mt19937 random_;
  int vocabulary_;
  bool greedy_;
  std::vector<Host> sequences_;
  std::vector<int> next_rows_ = std::vector<int>(at(options_.sequences));
};

/// What a life may begin with.
inline BatchOptions random_batch(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  BatchOptions options;
  options.sequences = 1 + below(4);
  if (below(3) == 0) options.rows = 1 + below(40);
  options.pool_slots = below(2) == 0 ? 64 : 4096;
  options.result_steps = 1 + below(3);
  options.mask_layout = below(2) == 0 ? MaskLayout::words : MaskLayout::bits;
  options.moves_rows = below(3) > 0;
  return options;
}

}  // namespace batch_cases
