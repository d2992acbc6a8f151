#pragma once
/// @file step_loop.hpp
/// Decoding as a server does it, phase by phase, with a check behind each phase; and random requests for it. The checks
/// know what plain decoding gives, so they say of each step exactly which tokens it must yield. What engines must not
/// be asked to do is checked by the oracle.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

#include "lookahead/lookahead_step.hpp"
#include "lookahead/model.hpp"
#include "lookahead/testing/oracle_model.hpp"
#include "lookahead/testing/plain_decode.hpp"

namespace step_loop {

using lookahead::Limits;
using lookahead::Proposal;
using lookahead::Shape;
using lookahead::ShapeMode;
using lookahead::Source;
using lookahead::testing::OracleModel;
using lookahead::testing::OracleOptions;
using lookahead::testing::plain_decode;
using lookahead::testing::Reads;

using Token = std::int32_t;
using Tokens = std::vector<Token>;
using Pool = lookahead::NGramPool<Token>;

constexpr std::size_t at(int i) { return static_cast<std::size_t>(i); }
constexpr int length(const auto& range) { return static_cast<int>(range.size()); }
inline bool contains(const Tokens& tokens, Token t) { return std::ranges::find(tokens, t) != tokens.end(); }

/// A check that failed; the message is the rule that was broken.
struct CheckFailed : std::logic_error {
  using std::logic_error::logic_error;
};

inline void require(bool holds, const char* rule) {
  if (!holds) throw CheckFailed(rule);
}

template <class Tree>
bool same_tree(const Tree& a, const Tree& b) {
  const auto v = a.view(), u = b.view();
  return v.size() == u.size() && v.root() == u.root() && v.context_size() == u.context_size() &&
         std::ranges::equal(v.tokens(), u.tokens()) && std::ranges::equal(v.parents(), u.parents()) &&
         std::ranges::equal(v.wanted(), u.wanted());
}

/// Whether the pool gives `token` behind `context` (oldest token first) for an entry of `source`.
inline bool filed(Pool& pool, Source source, std::span<const Token> context, Token token) {
  lookahead::ContextHash hash;
  for (std::size_t i = context.size(); i-- > 0;) hash.push(static_cast<std::uint32_t>(context[i]));
  bool found = false;
  pool.ref().for_each(lookahead::SerialTile{}, hash.value(), [&](const lookahead::PoolFind& find) {
    found = found || (find.source == source && find.token == static_cast<std::uint32_t>(token));
  });
  return found;
}

/// Where a test plants a fault. Each member does what is right here; the library knows nothing of them.
template <class Step>
struct Hooks {
  using Tree = typename Step::Tree;
  using Window = lookahead::JacobiWindow<Step::window, Step::ngram, Token>;
  Hooks() = default;
  Hooks(const Hooks&) = delete;
  Hooks& operator=(const Hooks&) = delete;
  virtual ~Hooks() = default;

  /// The tree as the engine gets it.
  virtual void engine_tree(Tree&) {}
  /// Whether the text ends with a token.
  virtual bool stop(Token t, const Tokens& ends) { return contains(ends, t); }
  /// What the walk proposes.
  virtual Proposal<Token> walked(Step&, const Tree&, const Proposal<Token>& p) { return p; }
  /// The rows that the engine commits.
  virtual void commit(const Tree&, std::vector<std::int32_t>&) {}
  /// The window before its n-grams are harvested, and after it has rolled.
  virtual void harvest(Window&) {}
  virtual void rolled(Window&) {}
};

/// One request: its model, its pool, the algorithm's state, and what plain decoding gives.
template <class Step>
class Loop {
 public:
  using Tree = typename Step::Tree;
  using Window = typename Hooks<Step>::Window;
  static constexpr int W = Step::window, N = Step::ngram, G = Step::guesses;

  Loop(const OracleOptions& options, std::size_t pool_slots, Hooks<Step>& hooks)
      : pool(pool_slots), options_(options), model_(options), hooks_(&hooks) {}

  Pool pool;
  Reads reads = Reads::all;   ///< how choices are read
  bool roomy = false;         ///< the pool forgets nothing; then what it was told can be checked
  int steps = 0, tokens = 0;  ///< forward passes, and what they yielded

  /// Begins a text of `wanted` tokens behind the prompt, or up to the first of `ends`.
  void start(const Tokens& prompt, std::uint64_t seed, int wanted, const Tokens& ends = {}) {
    text_ = prompt;
    ends_ = ends;
    left_ = wanted;
    stopped_ = false;
    cached_.assign(prompt.begin(), prompt.end() - 1);
    model_.truncate(0);
    model_.prefill(cached_);
    step_.start(pool, prompt, seed);
    find_truth();
    check_boundary();
  }

  /// The same text in a second model, to go on in another way. No step is planned.
  [[nodiscard]] Loop fork() const {
    Loop copy = *this;
    copy.model_ = model_.fork();
    copy.step_ = step_.fork();
    return copy;
  }

  /// More input; false where it does not fit.
  bool append(const Tokens& more) {
    Tokens whole(step_.pending().begin(), step_.pending().end());
    whole.insert(whole.end(), more.begin(), more.end());
    if (whole.size() - 1 > model_.free_slots()) return false;
    const std::size_t foretold = step_.tokens_to_cache(more.size());
    whole.resize(step_.append(pool, more));
    require(whole.size() == foretold, "append caches as many tokens as it foretold");
    model_.prefill(whole);
    cached_.insert(cached_.end(), whole.begin(), whole.end());
    text_.insert(text_.end(), more.begin(), more.end());
    find_truth();
    check_boundary();
    return true;
  }

  /// The engine loses up to `count` tokens of its context, as many as can become pending again.
  void lose(int count) {
    count = std::min({count, length(cached_), Step::max_pending - length(step_.pending())});
    cached_.resize(cached_.size() - at(count));
    model_.truncate(cached_.size());
    step_.rewind(cached_.size(), text_);
    check_boundary();
  }

  /// The last `count` tokens of the text are taken back, all but the first at most.
  void rewind(int count) {
    count = std::min(count, length(text_) - 1);
    text_.resize(text_.size() - at(count));
    left_ += count;
    cached_.resize(std::min(cached_.size(), text_.size() - 1));
    model_.truncate(cached_.size());
    step_.rewind(cached_.size(), text_);
    find_truth();
    check_boundary();
  }

  /// Plans a step and checks its tree.
  void plan(const Shape& shape, const Limits& limits) {
    shape_ = shape;
    limits_ = limits;
    step_.plan(pool, shape, limits, tree_);
    window_ = step_.jacobi_window();
    check_tree();
  }

  /// Drops grown rows.
  void cut(int rows) {
    const lookahead::RowOffer offer = step_.offer();
    step_.cut(tree_, rows);
    require(tree_.rows == std::clamp(rows, offer.fixed, offer.fixed + length(offer.reach)), "rows are cut");
    check_tree();
  }

  /// The engine evaluates the tree.
  void forward() {
    if (tree_.rows == 0) return;
    Tree seen = tree_;
    hooks_->engine_tree(seen);
    model_.forward(seen.view());
  }

  /// Walks, checks the proposal, and returns the number of its tokens. Call number `throw_at` of `select` throws an
  /// int.
  int resolve(int throw_at = -1) {
    std::vector<std::int32_t> asked;
    proposal_ = step_.resolve(
        [&](int row) {
          if (throw_at-- == 0) throw row;
          asked.push_back(row);
          return read([&](auto view) { return lookahead::next_token(view, row); });
        },
        [&](int row, std::span<Token> out) {
          return read([&](auto view) { return lookahead::top_tokens(view, row, out); });
        },
        [&](Token t) { return hooks_->stop(t, ends_); });
    proposal_ = hooks_->walked(step_, tree_, proposal_);
    check_walk(asked);
    return length(proposal_.tokens);
  }

  void abandon() { step_.abandon(); }

  /// Takes the first `n` of the proposed tokens.
  void finish(int n) {
    if (n < length(proposal_.tokens)) proposal_ = step_.accept(at(n));
    const std::vector<Token> next = window_choices();
    std::vector<std::int32_t> path(proposal_.path.begin(), proposal_.path.end());
    require(length(path) == tree_.root + std::max(n, 1), "the path is the pending chain and one row less than tokens");
    hooks_->commit(tree_, path);
    const std::size_t kept = path.empty() ? 0 : model_.commit(path);
    for (std::size_t i = 0; i < kept; ++i) cached_.push_back(tree_.token[path[i]]);
    text_.insert(text_.end(), proposal_.tokens.begin(), proposal_.tokens.end());
    left_ -= n;
    stopped_ = proposal_.stopped;
    steps += tree_.rows > 0 ? 1 : 0;
    tokens += n;
    hooks_->harvest(window());
    step_.apply(pool, kept);
    hooks_->rolled(window());
    check_report(n, length(path) - tree_.root - 1);
    check_window(next, n);
    check_boundary();
  }

  /// The four phases.
  void step(const Shape& shape, const Limits& limits) {
    plan(shape, limits);
    forward();
    finish(resolve());
  }

  /// Limits that the engine and the request allow at most.
  [[nodiscard]] Limits limits() const {
    return {static_cast<std::int32_t>(std::min(model_.max_rows(), model_.free_slots())),
            static_cast<std::int32_t>(model_.max_logit_rows()), 1 << 30, left_};
  }

  /// Nothing more may come: a token of `ends`, as many tokens as wanted, or no slot.
  [[nodiscard]] bool ended() const { return stopped_ || left_ == 0 || model_.free_slots() == 0; }

  [[nodiscard]] const Step& state() const { return step_; }
  [[nodiscard]] const Tree& tree() const { return tree_; }
  [[nodiscard]] const Tokens& text() const { return text_; }
  /// The prompt and what plain decoding says behind it.
  [[nodiscard]] const Tokens& truth() const { return truth_; }

 private:
  // The oracle behind one of the ways to read it.
  template <Reads Ways>
  struct View {
    using token_type = Token;
    OracleModel<Token>& model;
    Token next_token(int row) requires(Ways == Reads::all || Ways == Reads::next_token) {
      return model.next_token(row);
    }
    std::size_t top_tokens(int row, std::span<Token> out) requires(Ways == Reads::all || Ways == Reads::top_tokens) {
      return model.top_tokens(row, out);
    }
    std::span<const float> logits(int row) requires(Ways == Reads::logits) { return model.logits(row); }
  };

  template <class F>
  auto read(F f) {
    switch (reads) {
      case Reads::next_token:
        return f(View<Reads::next_token>{model_});
      case Reads::top_tokens:
        return f(View<Reads::top_tokens>{model_});
      case Reads::logits:
        return f(View<Reads::logits>{model_});
      default:
        return f(View<Reads::all>{model_});
    }
  }

  void find_truth() {
    OracleModel<Token> plain(options_);
    truth_ = text_;
    const Tokens behind = plain_decode(plain, std::span<const Token>(text_), at(left_), ends_);
    truth_.insert(truth_.end(), behind.begin(), behind.end());
  }

  // The state is not const; only its accessor is.
  Window& window() { return const_cast<Window&>(step_.jacobi_window()); }

  // Whether the step can yield a token.
  [[nodiscard]] bool complete() const {
    return limits_.rows >= length(step_.pending()) && limits_.logit_rows >= 1 && limits_.tokens_left >= 1;
  }

  void check_boundary() {
    const std::size_t cached = cached_.size();
    require(step_.context_size() == cached && model_.context_size() == cached, "both sides agree on the context size");
    require(!step_.pending().empty() && length(step_.pending()) <= Step::max_pending, "1 to max_pending are pending");
    require(cached + step_.pending().size() == text_.size(), "context + pending chain == text: length");
    require(std::equal(cached_.begin(), cached_.end(), text_.begin()), "context + pending chain == text: context");
    require(std::ranges::equal(step_.pending(), std::span(text_).subspan(cached)),
            "context + pending chain == text: pending chain");
    require(text_.size() <= truth_.size() && std::equal(text_.begin(), text_.end(), truth_.begin()),
            "the text is plain decoding's");
  }

  void check_tree() const {
    const auto tree = tree_.view();
    const auto pending = step_.pending();
    require(tree.size() <= std::max(0, limits_.rows), "rows are limited");
    require(length(tree.wanted()) <= std::max(0, limits_.logit_rows), "logit rows are limited");
    require(tree.context_size() == length(cached_), "the tree stands on the context");
    const int chain = complete() ? length(pending) : std::max(0, std::min(limits_.rows, length(pending) - 1));
    require(tree.root() == chain - 1, "as much of the pending chain as fits comes first");
    require(std::equal(pending.begin(), pending.begin() + chain, tree.tokens().begin()), "the pending chain's tokens");
    require(complete() ? tree.is_wanted(tree.root()) : tree.size() == chain && tree.wanted().empty(),
            "the root is wanted, or nothing is");

    std::vector<int> rows(at(Step::max_block));
    for (int r = tree.root() + 1; r < tree.size(); ++r) {
      const int depth = tree.depths()[at(r)];
      require(depth >= 1 && depth <= std::min(limits_.depth, Step::max_block - 1), "depth is limited");
      require(tree.parents()[at(r)] >= tree.root() && tree.parents()[at(r)] < r, "parents come first");
      for (int s = r - 1; s > tree.root() && tree.depths()[at(s)] == depth; --s)
        require(tree.parents()[at(s)] != tree.parents()[at(r)] || tree.tokens()[at(s)] != tree.tokens()[at(r)],
                "siblings are distinct");
      ++rows[at(depth - 1)];
    }
    const auto& report = step_.report();
    require(report.rows == tree.size() && report.logit_rows == length(tree.wanted()), "rows are reported");
    require(report.published_rows ==
                (std::clamp(shape_.w, 0, W) + std::clamp(shape_.g, 0, G)) * (std::clamp(shape_.n, 2, N) - 1),
            "the published method's rows are reported");
    for (int d = 0; d < Step::max_block; ++d) {
      int drafted = 0;
      for (const auto& by_depth : report.drafted) drafted += by_depth[d];
      require(drafted == rows[at(d)], "drafted rows add up, depth by depth");
    }
    require(complete() ? report.expected >= 1 && report.expected < tree.size() - tree.root() + 1 : report.expected == 0,
            "a complete step expects one token and at most one more a row");
  }

  // The step must yield all that the tree, the end tokens and the limit allow, and nothing else.
  void check_walk(const std::vector<std::int32_t>& asked) const {
    const auto tree = tree_.view();
    const std::span rest = std::span(truth_).subspan(text_.size());
    std::vector<std::int32_t> path;
    std::size_t yields = 0;
    bool stops = false;
    for (int row = complete() ? tree.root() : -1; row >= 0;) {
      require(yields < rest.size(), "there is room for the step's tokens");
      path.push_back(row);
      const Token t = rest[yields++];
      stops = contains(ends_, t);
      row = stops || length(path) == limits_.tokens_left ? -1 : tree.child(row, t);
      if (row >= 0 && !tree.is_wanted(row)) row = -1;
    }
    require(proposal_.tokens.size() == yields && std::ranges::equal(proposal_.tokens, rest.first(yields)),
            "a step yields what the walk gives, the last token included");
    require(yields <= at(Step::max_block), "a step yields at most max_block tokens");
    require(proposal_.stopped == stops, "a step stops at an end token");
    require(asked == path, "select is called once for each token, in order");
    for (int r = tree.root(); r >= 0; --r) path.insert(path.begin(), r);
    if (yields > 0) path.erase(path.begin() + tree.root());
    require(std::ranges::equal(proposal_.path, path), "the proposed path is the walk's");
  }

  void check_report(int n, int accepted) const {
    int total = 0;
    const auto& report = step_.report();
    for (int o = 0; o < lookahead::origin_count; ++o) {
      for (int d = 0; d < Step::max_block; ++d) {
        require(report.accepted[o][d] <= report.drafted[o][d], "what is accepted was drafted");
        total += report.accepted[o][d];
      }
    }
    require(report.tokens == n && total == accepted, "tokens and accepted rows are reported");
  }

  // The model's choice behind each column, where the limits leave room for the whole window; else nothing.
  std::vector<Token> window_choices() {
    const int w = std::clamp(shape_.w, 0, W), n = std::clamp(shape_.n, 2, N), levels = n - 1;
    const int rows = limits_.rows - length(step_.pending()) + 1;
    if (w == 0 || !complete() || rows < std::max(2, w * levels) || limits_.tokens_left < 2 ||
        limits_.logit_rows < (n == 2 ? w : 2 * w + n - 3) || limits_.depth < w + n - 3)
      return {};
    std::vector<Token> next;
    const auto tree = tree_.view();
    int top = tree.root();
    for (int j = 0; j < w; ++j) {
      if (j > 0) top = tree.child(top, window_.cell[0][j]);
      int row = top;
      for (int r = 0;; ++r) {
        require(row >= 0, "every window cell has a row");
        if (r == 0 || j == 0 || r == levels - 1) require(tree.is_wanted(row), "level 0, column 0, last level: wanted");
        if (r == levels - 1) break;
        row = tree.child(row, window_.cell[r + 1][j]);
      }
      next.push_back(model_.next_token(row));
    }
    return next;
  }

  void check_window(const std::vector<Token>& next, int n_tokens) {
    const Window& now = step_.jacobi_window();
    if (n_tokens == 0 || shape_.w <= 0) {
      for (int r = 0; r < N - 1; ++r)
        for (int j = 0; j < W; ++j)
          require(now.cell[r][j] == (r + j == 0 ? text_.back() : window_.cell[r][j]), "a step without window keeps it");
    }
    if (next.empty()) return;
    const int w = length(next), levels = std::clamp(shape_.n, 2, N) - 1, shift = shape_.slide ? n_tokens - 1 : 0;
    for (int r = 0; r < levels; ++r) {
      for (int j = 0; j < w; ++j) {
        const Token expected = r + j == 0       ? text_.back()
                               : j + shift >= w ? std::span(now.segment)[at(r + j)]
                               : r + 1 < levels ? window_.cell[r + 1][j + shift]
                                                : next[at(j + shift)];
        require(now.cell[r][j] == expected, "the window rolls by one level, and slides as told");
      }
    }
    if (!roomy) return;
    window_.resize(w, levels + 1);
    for (int j = 0; j < w; ++j) {
      if (!window_.ripe(j)) continue;
      Tokens gram;
      for (int r = 0; r < levels; ++r) gram.push_back(window_.cell[r][j]);
      if (j == 0) gram[0] = text_[text_.size() - at(n_tokens) - 1];
      gram.push_back(next[at(j)]);
      for (int i = 1; i <= levels; ++i)
        for (int k = 1; k <= std::min({i, 3, N - 1}); ++k)
          require(filed(pool, Source::window, std::span(gram).subspan(at(i - k), at(k)), gram[at(i)]),
                  "every column's n-gram is filed under its own tokens");
    }
  }

  OracleOptions options_;
  OracleModel<Token> model_;
  Hooks<Step>* hooks_;
  Step step_;
  Tree tree_;
  Window window_;  // as planned
  Shape shape_;
  Limits limits_;
  Proposal<Token> proposal_;
  Tokens text_, truth_, ends_, cached_;
  int left_ = 0;
  bool stopped_ = false;
};

using Random = std::mt19937_64;

/// A number in [0, n).
inline int below(Random& random, int n) { return static_cast<int>(random() % static_cast<std::uint64_t>(n)); }

/// True once in `n` times.
inline bool one_in(Random& random, int n) { return below(random, n) == 0; }

template <class T>
const T& pick(Random& random, const std::vector<T>& from) {
  return from[random() % from.size()];
}

inline Tokens random_tokens(Random& random, int count, int vocabulary) {
  Tokens tokens(at(count));
  for (Token& t : tokens) t = below(random, vocabulary);
  return tokens;
}

/// What one step may spend: often little, often all, also nothing.
template <class Step>
Shape random_shape(Random& random) {
  const auto extent = [&](int most) { return one_in(random, 4) ? 1 << 30 : below(random, most + 3); };
  return {extent(Step::window), extent(Step::ngram), extent(Step::guesses),
          one_in(random, 2) ? ShapeMode::growth : ShapeMode::published, one_in(random, 3)};
}

inline Limits random_limits(Random& random, const Limits& most) {
  const auto limit = [&](int value) {
    switch (below(random, 5)) {
      case 0:
        return std::min(value, below(random, 6));
      case 1:
        return std::min(value, below(random, 40));
      default:
        return value;
    }
  };
  return {limit(most.rows), limit(most.logit_rows), limit(most.depth),
          one_in(random, 8) ? below(random, most.tokens_left + 1) : most.tokens_left};
}

/// A step of random shape and limits, now and then with what may come between its phases.
template <class Step>
void random_step(Loop<Step>& loop, Random& random, bool generous) {
  const Shape shape = random_shape<Step>(random);
  const Limits limits = generous || one_in(random, 2) ? loop.limits() : random_limits(random, loop.limits());
  if (one_in(random, 4)) {  // equal state, pool and arguments, equal tree; a plan that is dropped changes nothing
    Loop<Step> twin = loop.fork();
    twin.plan(shape, limits);
    loop.plan(random_shape<Step>(random), random_limits(random, loop.limits()));
    loop.forward();
    if (one_in(random, 2)) loop.resolve();
    loop.abandon();
    loop.plan(shape, limits);
    require(same_tree(loop.tree(), twin.tree()), "equal states plan equal trees");
  } else {
    loop.plan(shape, limits);
  }
  if (one_in(random, 4)) loop.cut(below(random, loop.tree().rows + 2));
  loop.forward();
  if (one_in(random, 8)) {
    try {
      loop.resolve(below(random, 3));
    } catch (int) {  // what `select` has thrown
    }
  }
  const int n = loop.resolve();
  loop.finish(n > 1 && one_in(random, 8) ? 1 + below(random, n) : n);
}

/// How many forward passes, and tokens.
struct Yield {
  long steps = 0, tokens = 0;
};

/// A request that is random in everything, from its first step to its end. Throws what a check or the oracle finds.
template <class Step>
Yield run_case(std::uint64_t seed, Hooks<Step>& hooks) {
  Random random(seed);
  OracleOptions options;
  options.seed = random();
  options.vocabulary = pick(random, std::vector{2, 3, 7, 40, 300, 5000, 50000});
  options.repetition = pick(random, std::vector{0.0, 0.5, 0.9, 0.97, 1.0, 1.0});
  const int wanted = below(random, 60);
  const int prompt_length = 1 + below(random, one_in(random, 2) ? Step::ngram : 40);
  const Tokens prompt = random_tokens(random, prompt_length, options.vocabulary);
  options.capacity = std::max(1, prompt_length - 1 + (one_in(random, 4) ? below(random, 40) : 100));
  options.max_kept = pick(random, std::vector{0, 1, 3, 1000, 1000, 1000});
  options.max_rows = one_in(random, 4) ? 1 + below(random, 20) : 1000;
  options.max_logit_rows = one_in(random, 4) ? 1 + below(random, 20) : 1000;

  OracleModel<Token> plain(options);
  const Tokens behind = plain_decode(plain, std::span(prompt), 60);
  Tokens ends;
  if (one_in(random, 2)) ends = random_tokens(random, below(random, 3), options.vocabulary);
  if (one_in(random, 3) && !behind.empty()) ends.push_back(pick(random, behind));

  std::vector<Loop<Step>> loops;
  loops.reserve(2);
  loops.emplace_back(options, pick(random, std::vector<std::size_t>{1, 1000, 10000, 10000}), hooks);
  // Logits of a large vocabulary are costly, and nothing new.
  loops[0].reads = static_cast<Reads>(below(random, options.vocabulary <= 300 ? 4 : 3));
  loops[0].start(prompt, random(), wanted, ends);
  // Long walks: the pool knows the text to come, more or less.
  for (int mistakes = 2 + below(random, 30), i = below(random, 3); i > 0; --i) {
    Tokens hint = loops[0].truth();
    for (Token& t : hint)
      if (one_in(random, mistakes)) t = below(random, options.vocabulary);
    loops[0].pool.add_text(hint);
  }
  const bool generous = one_in(random, 3);

  Yield yield;
  for (std::size_t i = 0; i < loops.size(); ++i) {
    for (int steps = 0; !loops[i].ended(); ++steps) {
      require(steps < 400, "a request comes to its end");
      if (loops.size() == 1 && one_in(random, 40)) loops.push_back(loops[0].fork());
      if (one_in(random, 20)) loops[i].lose(below(random, 10));
      if (one_in(random, 40)) loops[i].rewind(below(random, 10));
      if (one_in(random, 40)) {
        const int more = below(random, 6) * below(random, 12);
        loops[i].append(random_tokens(random, more, options.vocabulary));
      }
      if (!loops[i].ended()) random_step(loops[i], random, generous || steps > 200);
    }
    require(loops[i].text() == loops[i].truth(), "the whole text is plain decoding's");
    yield.steps += loops[i].steps;
    yield.tokens += loops[i].tokens;
  }
  return yield;
}

}  // namespace step_loop
