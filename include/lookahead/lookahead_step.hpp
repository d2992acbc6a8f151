#pragma once
/// @file lookahead_step.hpp
/// The algorithm without I/O: it never calls a model, never allocates and never throws of its own accord.

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "lookahead/detail/step.hpp"
#include "lookahead/jacobi_window.hpp"
#include "lookahead/ngram_pool.hpp"
#include "lookahead/row_offer.hpp"
#include "lookahead/shape.hpp"
#include "lookahead/step_report.hpp"
#include "lookahead/token_tree.hpp"

namespace lookahead {

/// What a resolved step proposes. Valid until the next call of `plan`, `resolve`, `apply`, `append` or `abandon`.
template <class Token>
struct Proposal {
  std::span<const std::int32_t> path;  ///< rows to commit: the pending chain and the accepted rows, in increasing order
  std::span<const Token> tokens;       ///< the step's output; the last one becomes the root
  bool stopped;                        ///< the last token ends the text
};

/// One request's lookahead decoding. A server that owns its loop calls, for each step,
/// `plan` -> (the engine evaluates the tree) -> `resolve` -> (the engine commits the path) -> `apply`.
/// `Decoder` is that loop for everybody else.
///
/// W, N and G fix capacities: a window of W columns and N - 1 levels, growth or up to G guesses. A step may use less of
/// each, and fewer rows; every choice gives the same text. At every step boundary the committed context is all reported
/// tokens except the pending chain, whose last token, the root, is the newest.
///
/// State is trivially copyable: a copy is a fork. A pool goes along as an argument: an `NGramPool`, which several
/// requests may use one after another, or a view of a `SharedNGramPool`, which they may use at once.
template <int W = 15, int N = 5, int G = 15, class Token = std::int32_t>
class Lookahead {
  static_assert(W >= 1, "W is room for a window, 1 or more: pass Shape{.w = 0} to run without one.");
  static_assert(N >= 2, "N-grams have at least two tokens: N = 2 is the smallest window.");
  static_assert(G >= 0, "G counts guesses: 0 is a window alone.");
  static_assert(sizeof(Token) <= 4, "Tokens have at most 32 bits: map yours to an integer of that size.");
  using State = detail::StepState<W, N, G, Token>;

 public:
  using token_type = Token;
  static constexpr int window = W, ngram = N, guesses = G;

  /// The most rows of a tree, tokens of a step, tokens in a pending chain, and rows behind the root on a grown path.
  static constexpr int max_rows = State::max_rows, max_block = State::max_block, max_pending = State::max_pending,
                       max_depth = State::max_depth;

  using Tree = TokenTreeStorage<Token, max_rows>;
  using Report = StepReport<max_block>;

  /// Begins a request. All prompt tokens but the last must be in the engine's context before the engine evaluates the
  /// first tree; the last is the root. `seed` picks the window's first guesses. The pool is used as it is.
  /// Precondition: the prompt has 1 to 2^30 tokens. O(prompt.size()).
  template <PoolOf<Token> P>
  void start(P&& pool, std::span<const Token> prompt, std::uint64_t seed = 0) noexcept {
    assert(!prompt.empty());
    Scratch scratch;
    detail::start(SerialGroup{}, state_, pool.ref(), prompt.data(), static_cast<int>(prompt.size()), seed, scratch);
    report_ = {};
    planned_ = resolved_ = false;
  }

  /// More input for the same request, behind everything reported so far. Returns how many tokens, counted from the end
  /// of the engine's context (the pending chain first, then `tokens`), must be appended to that context before the next
  /// tree is evaluated: 0 where the pending chain takes them all, which it does as long as it then has at most `room`
  /// tokens (the rows that a step may have, so that one step evaluates it). Precondition: `start` was called and no
  /// step is planned. O(tokens.size()).
  template <PoolOf<Token> P>
  std::size_t append(P&& pool, std::span<const Token> tokens, std::size_t room = max_pending) noexcept {
    assert(!planned_ && state_.pending_count > 0);
    Scratch scratch;
    return static_cast<std::size_t>(detail::append(SerialGroup{}, state_, pool.ref(), tokens.data(),
                                                   static_cast<int>(tokens.size()), bounded(room), scratch));
  }

  /// What `append` will return for `count` more tokens, so that an engine which may fail can be asked first.
  [[nodiscard]] std::size_t tokens_to_cache(std::size_t count, std::size_t room = max_pending) const noexcept {
    return count == 0 ? 0
                      : static_cast<std::size_t>(
                            detail::gained_by<State>(state_.pending_count, static_cast<int>(count), bounded(room)));
  }

  /// Sets the request back, or on, to where its text is `text`: all reported tokens up to some point, prompt included,
  /// of which the engine's context holds the first `context_size`. The others are the pending chain, whose last token
  /// is the root. After an engine lost a part of its cache, `text` is what it was. Preconditions: no step is planned;
  /// 1 <= text.size() - context_size <= max_pending.
  void rewind(std::size_t context_size, std::span<const Token> text) noexcept {
    assert(!planned_ && text.size() > context_size && text.size() - context_size <= std::size_t{max_pending});
    const std::span<const Token> pending = text.subspan(context_size);
    const std::span<const Token> tail = text.last(std::min<std::size_t>(text.size(), max_context_length));
    state_.context_size = static_cast<std::int32_t>(context_size);
    state_.pending_count = static_cast<std::int32_t>(pending.size());
    std::copy(pending.begin(), pending.end(), state_.pending);
    state_.tail.count = static_cast<std::int32_t>(tail.size());
    std::copy(tail.begin(), tail.end(), state_.tail.token);
    state_.window.cell[0][0] = text.back();
    state_.run = 0;
  }

  /// Writes the tree of the next step into `out`. With fewer rows allowed than are pending, the tree holds the first of
  /// them, wants no logits and yields no token; with no row allowed it is empty. Where no wanted row or no token is
  /// allowed, it holds those pending rows that stand before the root, as far as rows are allowed. Same state, pool and
  /// arguments, same tree. Preconditions: `start` was called and no step is planned. Growth goes through at most
  /// `max_depth` levels; for each row of a level it looks up at most 7 contexts and sorts at most 16 candidates. The
  /// published shape looks up at most 2 g contexts a level, n - 1 levels.
  template <PoolOf<Token> P>
  void plan(P&& pool, const Shape& shape, const Limits& limits, Tree& out) noexcept {
    assert(!planned_ && state_.pending_count > 0);
    Scratch scratch;
    detail::plan(SerialGroup{}, state_, pool.ref(), shape, limits, out, scratch);
    account(out, (std::clamp(shape.w, 0, W) + std::clamp(shape.g, 0, G)) * (std::clamp(shape.n, 2, N) - 1));
    tree_ = &out;
    planned_ = true;
    resolved_ = false;
  }

  /// What the planned tree is worth, row by row; valid until it is cut or another one is planned. O(rows).
  /// Precondition: a step is planned.
  [[nodiscard]] RowOffer offer() const noexcept {
    assert(planned_);
    RowOffer offer{.fixed = state_.planted, .expected = std::uint64_t{tree_->wanted_count > 0} << 32};
    for (int i = 0; i < tree_->wanted_count && tree_->wanted[i] < state_.planted; ++i) ++offer.fixed_logits;
    offer.factor = state_.calibration.factor();
    offer.expected += gains(state_.planted);
    offer.reach =
        std::span(state_.notes.reach).subspan(std::size_t(state_.planted), std::size_t(tree_->rows - state_.planted));
    return offer;
  }

  /// Drops the rows of the planned tree from row `rows` on, but for the fixed ones of `offer`: the tree is then the one
  /// that would have been planned with so many rows. Precondition: a step is planned and not resolved. O(rows).
  void cut(Tree& tree, std::int32_t rows) noexcept {
    assert(planned_ && !resolved_ && &tree == tree_);
    const std::int32_t before = tree.rows;
    detail::cut(state_, tree, rows);
    if (tree.rows != before) account(tree, report_.published_rows);
  }

  /// Walks from the root. `select(row)` gives the token behind a row; it is called once for each emitted token, in
  /// order, and only on rows that the walk reaches. `top(row, out)` writes the best raw tokens of a wanted row, best
  /// first, and returns how many (at least 1); it is called after the walk. `stop(token)` says whether the text ends
  /// with a token. What a callable throws passes through and changes nothing: the step is still planned and may be
  /// resolved again. Precondition: a step is planned, and its tree has not been changed. O(tokens x rows), and `top` is
  /// called once for each wanted row; in the published shape, and where G is 0, for the last row of each column alone.
  template <class Select, class Top, class Stop>
  Proposal<Token> resolve(Select&& select, Top&& top, Stop&& stop) {
    assert(planned_);
    resolved_ = false;
    detail::resolve(
        SerialGroup{}, state_, *tree_, select,
        [&](int row, Token* out, int count) {
          return top(row, std::span<Token>(out, static_cast<std::size_t>(count)));
        },
        stop);
    resolved_ = true;
    return proposal();
  }

  /// Shortens the proposal to its first `n` tokens. Precondition: a step is resolved; 1 <= n <= proposal.tokens.size().
  Proposal<Token> accept(std::size_t n) noexcept {
    assert(resolved_ && n >= 1 && n <= static_cast<std::size_t>(state_.selected_count));
    const int dropped = state_.selected_count - static_cast<int>(n);
    state_.selected_count -= dropped;
    state_.path_count -= dropped;
    if (dropped > 0) state_.stopped = false;
    return proposal();
  }

  /// Drops the planned step, resolved or not, after a preemption for example: as if it had never been planned, but for
  /// the report. The engine must not commit.
  void abandon() noexcept {
    state_.path_count = state_.selected_count = 0;
    planned_ = resolved_ = false;
  }

  /// Takes the proposal, after the engine has appended the first `kept` rows of its path to the context: scores the
  /// estimates, harvests and rolls the window, feeds the pool. Preconditions: a step is resolved;
  /// tree.root() < kept <= proposal.path.size(), as the `Model` concept demands of `commit`. O(wanted rows + W (N - 1)
  /// + tokens) look-ups and entries.
  template <PoolOf<Token> P>
  void apply(P&& pool, std::size_t kept) noexcept {
    assert(resolved_ && kept <= static_cast<std::size_t>(state_.path_count) && static_cast<int>(kept) > tree_->root);
    report_.tokens = state_.selected_count;
    for (int i = tree_->root + 1; i < state_.path_count; ++i)
      ++report_.accepted[origin(state_.path[i])][i - tree_->root - 1];
    Scratch scratch;
    detail::apply(SerialGroup{}, state_, pool.ref(), *tree_, static_cast<int>(kept), scratch);
    planned_ = resolved_ = false;
  }

  /// A copy for another continuation of the same text. Precondition: no step is planned.
  [[nodiscard]] Lookahead fork() const noexcept {
    assert(!planned_);
    return *this;
  }

  /// Tokens in the committed context.
  [[nodiscard]] std::size_t context_size() const noexcept { return static_cast<std::size_t>(state_.context_size); }

  /// Accepted tokens that are not cached yet; the last is the root.
  [[nodiscard]] std::span<const Token> pending() const noexcept {
    return {state_.pending, static_cast<std::size_t>(state_.pending_count)};
  }

  /// The account of the last planned step; tokens and accepted rows are filled in by `apply`.
  [[nodiscard]] const Report& report() const noexcept { return report_; }

  /// The window and the estimates, for display and tests.
  [[nodiscard]] const JacobiWindow<W, N, Token>& jacobi_window() const noexcept { return state_.window; }
  [[nodiscard]] const Estimates& estimates() const noexcept { return state_.estimates; }

 private:
  using Scratch = detail::StepScratch<W, N, G, Token>;
  static_assert(std::is_trivially_copyable_v<State> && std::is_trivially_default_constructible_v<State> &&
                std::is_trivially_default_constructible_v<Scratch>);

  [[nodiscard]] static constexpr int bounded(std::size_t room) noexcept {
    return static_cast<int>(std::min(room, std::size_t{max_pending}));
  }

  [[nodiscard]] Proposal<Token> proposal() const noexcept {
    return {{state_.path, static_cast<std::size_t>(state_.path_count)},
            {state_.selected, static_cast<std::size_t>(state_.selected_count)},
            state_.stopped};
  }

  /// Why a row behind the root stands in the planned tree.
  [[nodiscard]] std::size_t origin(int row) const noexcept {
    const std::uint8_t c = state_.notes.candidate[row];
    return c == state_.notes.no_class ? 0 : 1 + static_cast<std::size_t>(CandidateClass{c}.source());
  }

  /// What the first `rows` rows of the tree are expected to yield behind the root, Q32.32.
  [[nodiscard]] std::uint64_t gains(int rows) const noexcept {
    std::uint64_t sum = 0;
    for (int r = 0; r < rows; ++r) sum += RowOffer::gain_of(state_.notes.reach[r], state_.calibration.factor());
    return sum;
  }

  /// Begins the account of a planned tree, of what is known already.
  void account(const Tree& tree, std::int32_t published_rows) noexcept {
    report_ = {};
    report_.published_rows = published_rows;
    report_.rows = tree.rows;
    report_.logit_rows = tree.wanted_count;
    for (int r = tree.root + 1; r < tree.rows; ++r) ++report_.drafted[origin(r)][tree.depth[r] - 1];
    report_.expected = tree.wanted_count > 0 ? 1.0 + static_cast<double>(gains(tree.rows)) / 4294967296.0 : 0.0;
  }

  State state_{};
  Report report_{};
  const Tree* tree_ = nullptr;
  bool planned_ = false, resolved_ = false;
};

}  // namespace lookahead
