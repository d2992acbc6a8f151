#pragma once
/// @file decoder.hpp
/// The decoding loop for people who do not own one.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lookahead/batch_controller.hpp"
#include "lookahead/detail/check_vocabulary.hpp"
#include "lookahead/errors.hpp"
#include "lookahead/lookahead_step.hpp"
#include "lookahead/model.hpp"
#include "lookahead/row_offer.hpp"
#include "lookahead/sink.hpp"
#include "lookahead/step_cost.hpp"
#include "lookahead/verify_policy.hpp"
#include "lookahead/window_switch.hpp"

namespace lookahead {

/// Why a text ended.
enum class StopReason : std::uint8_t {
  running,      ///< it has not
  end_token,    ///< the last token is an end token
  max_tokens,   ///< as many tokens as wanted
  sink,         ///< the sink ended it, for a stop string for example
  out_of_room,  ///< the model has no free slot
  deadline,     ///< the time is up
  cancelled     ///< another thread asked for it
};

/// The name of a reason, as in "end_token".
[[nodiscard]] constexpr const char* name(StopReason reason) {
  constexpr std::array names = {"running", "end_token", "max_tokens", "sink", "out_of_room", "deadline", "cancelled"};
  return names[static_cast<std::size_t>(reason)];
}

/// What may end a run between two steps; nothing is lost, another run goes on.
struct Interrupt {
  const std::atomic<bool>* cancel = nullptr;  ///< ends the run once it is true, which any thread may make it
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();
};

/// What a decoder may do.
template <class Token = std::int32_t>
struct DecoderOptions {
  Shape shape{};           ///< growth without a window; with one, it runs while it pays
  std::size_t rows = 64;   ///< most rows of a step; 1 is plain decoding
  StepCost cost{};         ///< how many of them pay: learnt, given, or `StepCost::none()`, with which all do
  std::uint64_t seed = 0;  ///< picks the window's first guesses; never changes the text
  std::size_t pool_slots = NGramPool<Token>::default_slots;  ///< entries of the n-gram pool, 12 bytes each
  bool keep_pool = false;                                    ///< the next request starts with the pool of the last one
  std::vector<Token> end_tokens{};  ///< the text ends with the first of them, which is reported
};

/// What a call of `run` did.
struct Generation {
  std::size_t tokens = 0;          ///< reported tokens
  std::size_t steps = 0;           ///< forward passes, the prefill not counted
  std::size_t rows = 0;            ///< rows of all trees
  std::size_t logit_rows = 0;      ///< wanted rows of all trees
  std::size_t published_rows = 0;  ///< rows that the published method would have spent at the same shape
  double expected = 0;             ///< tokens that growth expected
  StopReason stop = StopReason::running;
};

namespace detail {

/// The pool of a decoder that is given none; of any type for what is no model, so that the compiler names what the
/// model is missing.
template <class M>
struct PrivatePool {
  using type = NGramPool<std::int32_t>;
};
template <HasTokenType M>
struct PrivatePool<M> {
  using type = NGramPool<typename M::token_type>;
};

}  // namespace detail

/// Decodes with one model, in fewer forward passes than one a token; the output equals plain decoding's, token for
/// token, for every model that satisfies the exactness axiom (see `ForwardsTrees`).
///
/// The decoder owns its pool, or has a view of a shared one, and allocates at construction and in `start`; a step
/// allocates nothing, except where a text outgrows what the model had room for at its start, or 2^20 tokens. It uses
/// the model's context exclusively between `start` and the last step. One decoder serves one text at a time, on one
/// thread.
///
/// A sink is called with each block of accepted tokens, `sink(std::span<const token_type>)`, or, if it takes no blocks,
/// with one token after the other, `sink(token_type)`. It must not call the decoder.
///
/// Errors: bad arguments throw InvalidArgument or OutOfRoom and change nothing. What the model, the policy or the
/// sink's `admit` throws passes through; up to and including the commit it changes nothing, and the step may be tried
/// again. A block whose sink throws counts as reported: `text()` has it. A model that breaks a rule is answered by
/// ContractViolation.
template <Model M, int W = 15, int N = 5, int G = 15, VerifyPolicy<M> V = GreedyVerify,
          class P = typename detail::PrivatePool<M>::type>
requires PoolOf<P, typename M::token_type>
class Decoder {
 public:
  using token_type = typename M::token_type;
  using Step = Lookahead<W, N, G, token_type>;
  using Options = DecoderOptions<token_type>;

  /// Keeps a reference to `model`, which must outlive the decoder.
  /// Throws InvalidArgument for rows = 0, an end token outside the vocabulary, or an impossible pool size.
  explicit Decoder(M& model, Options options = {}, V verify = V{}) requires std::constructible_from<P, std::size_t>
      : model_(model),
        options_(std::move(options)),
        verify_(std::move(verify)),
        pool_(options_.pool_slots),
        controller_(std::exchange(options_.cost, {}), 1, std::size_t{Step::max_rows}) {
    check_options();
  }

  /// The same with a pool that is there already: a loaded `NGramPool`, which needs `keep_pool`, or a view of a
  /// `SharedNGramPool`, which is always kept. Precondition: a private pool holds tokens of this model's vocabulary.
  /// Throws InvalidArgument also where `keep_pool` is missing, or the view's vocabulary is larger than the model's.
  Decoder(M& model, Options options, V verify, P pool)
      : model_(model),
        options_(std::move(options)),
        verify_(std::move(verify)),
        pool_(std::move(pool)),
        controller_(std::exchange(options_.cost, {}), 1, std::size_t{Step::max_rows}) {
    check_options();
    if constexpr (requires { pool_.reset(); }) {
      if (!options_.keep_pool)
        throw InvalidArgument("the first request would empty the given pool: set keep_pool, or give no pool");
    } else if (pool_.vocabulary() > static_cast<std::size_t>(model_.vocabulary())) {
      throw InvalidArgument("the view's vocabulary of " + std::to_string(pool_.vocabulary()) +
                            " tokens is larger than the model's " + std::to_string(model_.vocabulary()) +
                            ": pass the model's to SharedNGramPool::in");
    }
  }

  /// Not copyable: two decoders would use one model. See `fork`.
  Decoder(Decoder&&) noexcept = default;

  /// Begins a text: clears the model's context and appends all prompt tokens but the last. Only a pool that is to be
  /// kept outlives the text before, and, where costs are learnt, what is known of them and of the window. Throws
  /// InvalidArgument for an empty prompt or a token outside the vocabulary, OutOfRoom for a prompt that does not fit;
  /// these change nothing. If the model or the policy throws, there is no text, and the model's context is empty if it
  /// can be cleared.
  void start(std::span<const token_type> prompt) {
    if (prompt.empty())
      throw InvalidArgument("the prompt is empty: pass at least one token, a begin-of-text token for example");
    check_tokens(prompt, "prompt token");
    check_room(prompt.size() - 1, model_.context_size() + model_.free_slots());
    active_ = false;
    model_.truncate(0);
    text_.clear();
    text_.reserve(std::min<std::size_t>(model_.free_slots(), most_reserved) + prompt.size() + Step::max_block);
    observe(prompt);
    prefill({}, prompt.first(prompt.size() - 1));
    if constexpr (requires { pool_.reset(); }) {
      if (!options_.keep_pool) pool_.reset();
    }
    controller_.restart();
    if (!controller_.cost().learns()) window_ = {};
    step_.start(pool_, prompt, options_.seed);
    text_.assign(prompt.begin(), prompt.end());
    active_ = true;
    stop_ = StopReason::running;
  }

  /// More input behind everything reported so far, the next turn of a conversation for example.
  /// Throws as `start`, and InvalidArgument where there is no text; whatever is thrown changes nothing.
  void append(std::span<const token_type> tokens) {
    require_text();
    check_tokens(tokens, "token");
    if (tokens.empty()) return;
    check_context();
    check_room(step_.pending().size() + tokens.size() - 1, model_.free_slots());
    reserve(tokens.size());
    observe(tokens);
    const std::size_t room = std::min<std::size_t>(options_.rows, model_.max_rows());
    if (step_.tokens_to_cache(tokens.size(), room) > 0) prefill(step_.pending(), tokens.first(tokens.size() - 1));
    step_.append(pool_, tokens, room);
    text_.insert(text_.end(), tokens.begin(), tokens.end());
    stop_ = StopReason::running;
  }

  /// Back to the first `length` tokens of the text, prompt included; the last of them is the new root. The pool keeps
  /// what it has seen. Throws InvalidArgument unless 1 <= length <= text().size(); that changes nothing. Costs what the
  /// model's `truncate` costs.
  void roll_back(std::size_t length) {
    require_text();
    if (length == 0 || length > text_.size())
      throw InvalidArgument("a text of " + std::to_string(text_.size()) + " tokens cannot go back to " +
                            std::to_string(length) + ": pass 1 to its length");
    check_context();
    if (length <= step_.context_size()) model_.truncate(length - 1);
    text_.resize(length);
    step_.rewind(model_.context_size(), text_);
    stop_ = StopReason::running;
  }

  /// A decoder that continues the same text by itself, with a copy of the pool (or the same shared one) and of the
  /// policy; a sampling policy then needs another stream, or it draws the same. `model` must hold the same context
  /// (`ForkableModel::fork` gives such a model) and outlive the fork. Throws InvalidArgument for this decoder's own
  /// model, or one with a context of another size.
  [[nodiscard]] Decoder fork(M& model) const requires std::copy_constructible<V> {
    if (&model == &model_) throw InvalidArgument("a fork needs a model of its own: pass a fork of this one's");
    if (model.context_size() != model_.context_size())
      throw InvalidArgument("the fork's model holds " + std::to_string(model.context_size()) + " tokens, this one " +
                            std::to_string(model_.context_size()) + ": pass a fork of the model");
    return Decoder(*this, model);
  }

  /// One step. Reports at most `max_tokens` tokens to the sink, as one block; no call where there are none. Returns why
  /// the text ended, or `running`, also after `max_tokens`. Once an end token or the sink has ended the text it does
  /// nothing until there is more input.
  template <class Sink>
  StopReason step(std::size_t max_tokens, Sink&& sink) {
    require_text();
    const std::span<const token_type> block = advance(max_tokens, sink);
    if (stop_ == StopReason::max_tokens) stop_ = StopReason::running;
    report_to(sink, block);
    return stop_;
  }

  /// Steps until an end token, the sink, `max_tokens` tokens, no room, or an interrupt ends it. Continues the text that
  /// there is. Zero tokens: no step.
  template <class Sink>
  Generation run(std::size_t max_tokens, Sink&& sink, const Interrupt& interrupt = {}) {
    require_text();
    Generation total;
    do {
      if (interrupted(interrupt)) break;
      const std::span<const token_type> block = advance(max_tokens - total.tokens, sink);
      if (stepped_) {
        const auto& report = step_.report();
        ++total.steps;
        total.rows += static_cast<std::size_t>(report.rows);
        total.logit_rows += static_cast<std::size_t>(report.logit_rows);
        total.published_rows += static_cast<std::size_t>(report.published_rows);
        total.expected += report.expected;
      }
      total.tokens += block.size();
      report_to(sink, block);
    } while (stop_ == StopReason::running);
    total.stop = stop_;
    return total;
  }

  /// `start` and `run`.
  template <class Sink>
  Generation generate(std::span<const token_type> prompt, std::size_t max_tokens, Sink&& sink,
                      const Interrupt& interrupt = {}) {
    start(prompt);
    return run(max_tokens, std::forward<Sink>(sink), interrupt);
  }

  /// The blocks of up to `max_tokens` more tokens as an input range: `for (auto block : decoder.stream(n))`. Each step
  /// runs when its block is asked for; a block is valid until the next one is. `stop_reason()` says why the range
  /// ended. Throws InvalidArgument where there is no text.
  [[nodiscard]] auto stream(std::size_t max_tokens, const Interrupt& interrupt = {}) {
    require_text();
    return Stream(*this, max_tokens, interrupt);
  }

  /// The account of the last step.
  [[nodiscard]] const typename Step::Report& report() const noexcept { return step_.report(); }

  /// Options that may change between steps: what a step spends never changes the text.
  void set_shape(const Shape& shape) noexcept { options_.shape = shape; }

  /// Throws InvalidArgument for 0.
  void set_rows(std::size_t rows) {
    check_rows(rows);
    options_.rows = rows;
  }

  /// Files a text in the pool, a corpus for example; with `keep_pool` also before the first request.
  /// Throws InvalidArgument for a token outside the vocabulary. O(text.size()).
  void add_text(std::span<const token_type> text) {
    check_tokens(text, "token");
    pool_.add_text(text);
  }

  [[nodiscard]] const P& pool() const noexcept { return pool_; }

  /// The text so far, prompt included.
  [[nodiscard]] std::span<const token_type> text() const noexcept { return text_; }

  /// Why the text ended, or `running`.
  [[nodiscard]] StopReason stop_reason() const noexcept { return stop_; }

  /// The policy, to read what it recorded.
  [[nodiscard]] V& verify() noexcept { return verify_; }

  /// What rows cost, as far as it is known.
  [[nodiscard]] const StepCost& cost() const noexcept { return controller_.cost(); }

  /// The state of the algorithm.
  [[nodiscard]] const Step& state() const noexcept { return step_; }

 private:
  class Stream {
   public:
    Stream(Decoder& decoder, std::size_t max_tokens, const Interrupt& interrupt)
        : decoder_(decoder), left_(max_tokens), interrupt_(interrupt) {}

    class Iterator {
     public:
      using value_type = std::span<const token_type>;
      using difference_type = std::ptrdiff_t;
      explicit Iterator(Stream& stream) : stream_(&stream) {}
      value_type operator*() const { return stream_->block_; }
      Iterator& operator++() {
        stream_->next();
        return *this;
      }
      void operator++(int) { ++*this; }
      bool operator==(std::default_sentinel_t) const { return stream_->block_.empty(); }

     private:
      Stream* stream_;
    };

    Iterator begin() {
      next();
      return Iterator(*this);
    }
    [[nodiscard]] std::default_sentinel_t end() const { return {}; }

   private:
    void next() {
      const auto ignore = [](std::span<const token_type>) {};
      do {
        block_ = decoder_.interrupted(interrupt_) ? std::span<const token_type>{} : decoder_.advance(left_, ignore);
      } while (block_.empty() && decoder_.stop_ == StopReason::running);
      left_ -= block_.size();
    }

    Decoder& decoder_;
    std::size_t left_;
    Interrupt interrupt_;
    std::span<const token_type> block_;
  };

  Decoder(const Decoder& other, M& model)
      : model_(model),
        options_(other.options_),
        verify_(other.verify_),
        pool_(other.pool_),
        controller_(other.controller_.cost(), 1, std::size_t{Step::max_rows}),
        window_(other.window_),
        step_(other.step_.fork()),
        text_(other.text_),
        active_(other.active_),
        stop_(other.stop_) {
    text_.reserve(other.text_.capacity());
  }

  /// Tells the policy of input that is about to stand behind the text.
  void observe(std::span<const token_type> tokens) {
    if constexpr (ObservingPolicy<V, token_type>) verify_.observe(text_.size(), tokens);
  }

  template <class Sink>
  static void report_to(Sink& sink, std::span<const token_type> block) {
    if constexpr (std::invocable<Sink&, std::span<const token_type>>) {
      if (!block.empty()) sink(block);
    } else {
      for (const token_type token : block) sink(token);
    }
  }

  /// Plan, forward, resolve, commit, apply. Returns the new tokens.
  template <class Sink>
  std::span<const token_type> advance(std::size_t max_tokens, Sink& sink) {
    stepped_ = false;
    if (ended()) return {};
    stop_ = StopReason::running;
    if (max_tokens == 0) {
      stop_ = StopReason::max_tokens;
      return {};
    }
    check_context();
    if (model_.max_rows() == 0 || model_.max_logit_rows() == 0)
      throw ContractViolation("the model takes " + std::to_string(model_.max_rows()) + " rows and " +
                              std::to_string(model_.max_logit_rows()) + " wanted rows: both must be at least 1");
    const std::size_t free = model_.free_slots();
    if (free == 0) {
      stop_ = StopReason::out_of_room;
      return {};
    }
    Limits limits;
    limits.rows = bounded(std::min({options_.rows, static_cast<std::size_t>(model_.max_rows()), free}));
    limits.logit_rows = bounded(model_.max_logit_rows());
    limits.tokens_left = bounded(max_tokens);
    using Clock = std::chrono::steady_clock;
    const bool timed = controller_.cost().learns();
    const Clock::time_point begin = timed ? Clock::now() : Clock::time_point{};
    Shape shape = options_.shape;
    const auto window_rows = static_cast<std::size_t>(std::clamp(shape.w, 0, W) * (std::clamp(shape.n, 2, N) - 1));
    if (shape.mode == ShapeMode::growth) {
      if (!window_.on(controller_.cost())) shape.w = 0;
      const std::size_t worth =
          step_.pending().size() - 1 + (shape.w > 0 ? window_rows : 0) + controller_.rows_worth_planning();
      limits.rows = bounded(std::min(static_cast<std::size_t>(limits.rows), worth));
    }
    step_.plan(pool_, shape, limits, tree_);
    const RowOffer offer = step_.offer();
    std::int32_t rows = 0;
    controller_.choose({&offer, 1}, {&rows, 1}, model_.context_size());
    step_.cut(tree_, rows);
    Proposal<token_type> proposal;
    std::size_t kept = 0;
    bool sink_stops = false;
    try {
      const TokenTree<token_type> tree = tree_.view();
      model_.forward(tree);
      proposal = step_.resolve(
          [&](int row) {
            return checked(
                verify_.select(model_, row, std::int64_t{tree.positions()[static_cast<std::size_t>(row)]} + 1));
          },
          [&](int row, std::span<token_type> out) {
            const std::size_t n = top_tokens(model_, row, out);
            if (n == 0 || n > out.size())
              throw ContractViolation("top_tokens gave " + std::to_string(n) + " tokens of a row: it must give 1 to " +
                                      std::to_string(out.size()));
            for (std::size_t i = 0; i < n; ++i) checked(out[i]);
            return n;
          },
          [&](token_type token) {
            return std::find(options_.end_tokens.begin(), options_.end_tokens.end(), token) !=
                   options_.end_tokens.end();
          });
      if constexpr (AdmittingSink<Sink, token_type>) {
        if (!proposal.tokens.empty()) {
          const Admission admission = sink.admit(proposal.tokens);
          if (admission.tokens == 0 || admission.tokens > proposal.tokens.size())
            throw ContractViolation("the sink admits " + std::to_string(admission.tokens) + " tokens of a block of " +
                                    std::to_string(proposal.tokens.size()) +
                                    ": it must admit at least one and at most all");
          proposal = step_.accept(admission.tokens);
          sink_stops = admission.stop;
        }
      }
      reserve(proposal.tokens.size());
      kept = model_.commit(proposal.path);
    } catch (...) {
      step_.abandon();
      throw;
    }
    if (kept > proposal.path.size() || static_cast<int>(kept) <= tree_.root) {
      step_.abandon();
      active_ = false;
      throw ContractViolation("commit kept " + std::to_string(kept) +
                              " rows: it must keep at least the pending chain, " + std::to_string(tree_.root + 1) +
                              ", and at most the path, " + std::to_string(proposal.path.size()) +
                              "; start the text anew");
    }
    stepped_ = true;
    const std::size_t n = proposal.tokens.size();
    std::copy(proposal.tokens.begin(), proposal.tokens.end(), block_);
    text_.insert(text_.end(), block_, block_ + n);
    if (sink_stops)
      stop_ = StopReason::sink;
    else if (proposal.stopped)
      stop_ = StopReason::end_token;
    else if (n == max_tokens)
      stop_ = StopReason::max_tokens;
    step_.apply(pool_, kept);
    if (window_rows > 0) window_.observe(step_.report(), window_rows, controller_.cost());
    if (timed && n > 0)
      controller_.observe(static_cast<std::size_t>(step_.report().rows),
                          std::chrono::duration<double, std::nano>(Clock::now() - begin).count());
    return {block_, n};
  }

  void prefill(std::span<const token_type> pending, std::span<const token_type> tokens) {
    const std::size_t before = model_.context_size();
    try {
      if (!pending.empty()) model_.prefill(pending);
      if (!tokens.empty()) model_.prefill(tokens);
    } catch (...) {
      model_.truncate(before);
      throw;
    }
  }

  /// Room for `count` more tokens of text, so that adding them cannot fail.
  void reserve(std::size_t count) {
    if (text_.capacity() - text_.size() < count) text_.reserve(std::max(2 * text_.capacity(), text_.size() + count));
  }

  /// Whether a run ends here; then it says why.
  bool interrupted(const Interrupt& interrupt) noexcept {
    const bool cancelled = interrupt.cancel != nullptr && interrupt.cancel->load();
    if (!cancelled && std::chrono::steady_clock::now() < interrupt.deadline) return false;
    if (!ended()) stop_ = cancelled ? StopReason::cancelled : StopReason::deadline;
    return true;
  }

  /// Whether only more input lets the text go on.
  [[nodiscard]] bool ended() const noexcept { return stop_ == StopReason::end_token || stop_ == StopReason::sink; }

  void check_options() const {
    detail::check_vocabulary<token_type>(model_.vocabulary());
    check_rows(options_.rows);
    check_tokens(options_.end_tokens, "end token");
  }

  static void check_rows(std::size_t rows) {
    if (rows == 0) throw InvalidArgument("a step of 0 rows: pass at least 1, which is plain decoding");
  }

  void require_text() const {
    if (!active_) throw InvalidArgument("there is no text to continue: call start with a prompt first");
  }

  void check_context() const {
    if (model_.context_size() != step_.context_size())
      throw ContractViolation("the model's context holds " + std::to_string(model_.context_size()) +
                              " tokens where the decoder left " + std::to_string(step_.context_size()) +
                              ": do not change the context between steps");
  }

  void check_room(std::size_t tokens, std::size_t slots) const {
    if (tokens > slots)
      throw OutOfRoom(std::to_string(tokens) + " tokens do not fit into the model's " + std::to_string(slots) +
                      " free slots: shorten the input or give the model a longer context");
  }

  void check_tokens(std::span<const token_type> tokens, const char* what) const {
    if (!tokens.empty() && std::less_equal<>{}(text_.data(), tokens.data()) &&
        std::less<>{}(tokens.data(), text_.data() + text_.size()))
      throw InvalidArgument(std::string(what) + "s are a part of the decoder's own text, which changes: pass a copy");
    for (std::size_t i = 0; i < tokens.size(); ++i)
      if (!in_vocabulary(tokens[i]))
        throw InvalidArgument(std::string(what) + " " + std::to_string(tokens[i]) + " at index " + std::to_string(i) +
                              " is outside the vocabulary of " + std::to_string(model_.vocabulary()) +
                              ": encode with this model's tokenizer");
  }

  token_type checked(token_type token) const {
    if (!in_vocabulary(token))
      throw ContractViolation("token " + std::to_string(token) + " was chosen outside the vocabulary of " +
                              std::to_string(model_.vocabulary()) + ": the model and the policy choose from 0 to " +
                              std::to_string(model_.vocabulary() - 1));
    return token;
  }

  [[nodiscard]] bool in_vocabulary(token_type token) const {
    return token >= 0 && static_cast<std::uint64_t>(token) < static_cast<std::uint64_t>(model_.vocabulary());
  }

  static std::int32_t bounded(std::size_t n) {
    constexpr std::size_t most = std::size_t{1} << 30;
    return static_cast<std::int32_t>(n < most ? n : most);
  }

  static constexpr std::size_t most_reserved = std::size_t{1} << 20;  ///< tokens; a longer text grows as it goes

  M& model_;
  Options options_;
  [[no_unique_address]] V verify_;
  P pool_;
  BatchController controller_;
  WindowSwitch window_;
  Step step_;
  typename Step::Tree tree_;
  std::vector<token_type> text_;
  token_type block_[static_cast<std::size_t>(Step::max_block)];
  bool active_ = false, stepped_ = false;
  StopReason stop_ = StopReason::running;
};

}  // namespace lookahead
