#pragma once
/// @file conformance.hpp
/// Checks an engine against the rules of the `Model` concept, and says in sentences what is wrong and where to look.
/// For authors of engines; docs/adapting-an-engine.md shows it at work.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lookahead/decoder.hpp"
#include "lookahead/errors.hpp"
#include "lookahead/model.hpp"
#include "lookahead/testing/conformance_report.hpp"
#include "lookahead/testing/plain_decode.hpp"
#include "lookahead/token_tree.hpp"

namespace lookahead::testing {

/// What the kit does.
template <class Token = std::int32_t>
struct ConformanceOptions {
  std::uint64_t seed = 1;  ///< texts and trees are random; equal seeds give equal ones
  int trees = 6;           ///< random trees for each check
  int rows = 24;           ///< most rows of a random tree; one more tree is as large as max_rows()
  std::vector<std::vector<Token>>
      prompts{};            ///< to continue, and what texts and trees are made of; none: random tokens
  std::size_t tokens = 48;  ///< tokens that each prompt is continued by
};

/// Checks the engines that `make()` returns: each call must give a new `Model` with an empty context and at least 64
/// free slots. An engine that throws is a finding, not an error. A model that was trained on text may react to random
/// tokens hardly at all, so that errors do not show: give it prompts that it knows. Costs about 1,500
/// forward passes of up to `rows` rows at the default options.
/// Throws `InvalidArgument` for options out of range. A prompt with a token outside the vocabulary and a model with
/// fewer slots are findings.
template <class Factory>
[[nodiscard]] ConformanceReport check_conformance(
    Factory make, const ConformanceOptions<typename std::invoke_result_t<Factory&>::token_type>& options = {});

namespace detail {

/// One run of the kit.
template <Model M>
class Conformance {
 public:
  using Factory = std::function<M()>;
  using Token = typename M::token_type;
  using Tokens = std::vector<Token>;
  using Options = ConformanceOptions<Token>;

  Conformance(Factory make, const Options& options) : make_(std::move(make)), options_(options), random_(options.seed) {
    if (options.trees < 1 || options.rows < 2 || options.rows > most_rows || options.tokens < 1)
      throw InvalidArgument("ConformanceOptions: trees " + std::to_string(options.trees) + ", rows " +
                            std::to_string(options.rows) + ", tokens " + std::to_string(options.tokens) +
                            "; choose at least 1 tree, 2 to " + std::to_string(most_rows) + " rows, 1 token");
  }

  ConformanceReport run() {
    static constexpr std::array<std::pair<Promise, void (Conformance::*)()>, 14> checks = {
        {{Promise::limits, &Conformance::check_limits},
         {Promise::results, &Conformance::check_results},
         {Promise::repeats, &Conformance::check_repeats},
         {Promise::drops, &Conformance::check_drops},
         {Promise::reuse, &Conformance::check_reuse},
         {Promise::prefill, &Conformance::check_prefill},
         {Promise::mask, &Conformance::check_rows},
         {Promise::mask, &Conformance::check_invisible},
         {Promise::wanted, &Conformance::check_wanted},
         {Promise::commit, &Conformance::check_commit},
         {Promise::truncate, &Conformance::check_truncate},
         {Promise::fork, &Conformance::check_fork},
         {Promise::text, &Conformance::measure_rows},
         {Promise::text, &Conformance::measure_texts}}};
    for (const auto& [promise, check] : checks) {
      try {
        (this->*check)();
      } catch (const std::exception& error) {
        find(promise, std::string("an exception while this was checked: ") + error.what());
      }
      if (!report_.conforms()) {
        // It would show in the later checks too, as something else.
        note("What is checked behind that was not: mend this first.");
        break;
      }
    }
    return report_;
  }

 private:
  static constexpr int most_rows = 256;
  using Tree = TokenTreeStorage<Token, most_rows>;

  // A model that a factory made in place: models need not be movable.
  struct Made {
    M model;
    explicit Made(const Factory& make) : model(make()) {}
  };

  // What can be read of a row.
  struct Reading {
    std::vector<float> logits{};
    Token best{};
    friend bool operator==(const Reading&, const Reading&) = default;
  };

  static constexpr std::size_t at(int i) { return static_cast<std::size_t>(i); }
  int below(int n) { return static_cast<int>(random_() % static_cast<std::uint64_t>(n)); }
  int between(int first, int last) { return first + below(last - first + 1); }

  void find(Promise promise, const std::string& message) {
    for (Finding& f : report_.findings)
      if (f.promise == promise) {
        ++f.cases;
        return;
      }
    report_.findings.push_back({promise, message, 1});
  }

  void note(const std::string& text) {
    if (std::ranges::find(report_.notes, text) == report_.notes.end()) report_.notes.push_back(text);
  }

  // Where there are prompts: a token of theirs, since a model may take all others for noise.
  Token random_token() {
    return known_.empty() ? static_cast<Token>(random_() % vocabulary_) : known_[random_() % known_.size()];
  }

  // Where there are prompts: pieces of theirs.
  Tokens random_text(int length) {
    Tokens text;
    while (text.size() < at(length)) {
      if (known_.empty()) {
        text.push_back(random_token());
        continue;
      }
      const std::size_t from = random_() % known_.size();
      const std::size_t n = std::min(at(length) - text.size(), known_.size() - from);
      text.insert(text.end(), known_.begin() + static_cast<std::ptrdiff_t>(from),
                  known_.begin() + static_cast<std::ptrdiff_t>(from + n));
    }
    return text;
  }

  // A tree of `rows` rows in random order; all its rows are wanted, or as many as the model allows.
  Tree random_tree(int context, int rows) {
    Tree tree;
    const Tokens pending = random_text(between(1, std::min(3, rows)));
    tree.begin(context, pending.data(), static_cast<int>(pending.size()));
    // A small vocabulary may leave no token for one more sibling.
    for (int tries = 0; tree.rows < rows && tries < 100 * rows; ++tries) {
      const int parent = between(tree.root, tree.rows - 1);
      const Token token = random_token();
      if (tree.view().child(parent, token) < 0) tree.add(parent, token);
    }
    want_many(tree);
    return tree;
  }

  // Asks for all rows, or for the last one and a random choice where the model takes fewer.
  void want_many(Tree& tree) {
    for (int row = 0; tree.rows <= logit_rows_ && row < tree.rows; ++row) tree.want(row);
    tree.want(tree.rows - 1);
    while (tree.wanted_count < std::min(tree.rows, logit_rows_)) tree.want(below(tree.rows));
  }

  static void want_nothing(Tree& tree) {
    tree.wanted_count = 0;
    std::ranges::fill(tree.want_bits, 0U);
  }

  Tree chain(int context, std::span<const Token> tokens) {
    Tree tree;
    tree.begin(context, tokens.data(), static_cast<int>(tokens.size()));
    tree.want(tree.rows - 1);
    return tree;
  }

  // The rows from row 0 to `row`.
  static std::vector<std::int32_t> path_to(const Tree& tree, int row) {
    std::vector<std::int32_t> path;
    for (int r = row; r >= 0; r = tree.parent[r]) path.push_back(r);
    std::ranges::reverse(path);
    return path;
  }

  static Tokens with(Tokens text, const Tree& tree, std::span<const std::int32_t> rows) {
    for (const int r : rows) text.push_back(tree.token[r]);
    return text;
  }

  static Tokens with(Tokens text, std::span<const Token> more) {
    text.insert(text.end(), more.begin(), more.end());
    return text;
  }

  static Reading read(M& model, int row) {
    Reading reading;
    if constexpr (LogitsModel<M>) {
      const std::span<const float> logits = model.logits(row);
      reading.logits.assign(logits.begin(), logits.end());
    }
    reading.best = next_token(model, row);
    return reading;
  }

  static double difference(const Reading& a, const Reading& b) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    if (a.logits.empty() || a.logits.size() != b.logits.size()) return a == b ? 0 : infinity;
    double largest = 0;
    for (std::size_t t = 0; t < a.logits.size(); ++t) {
      if (a.logits[t] == b.logits[t]) continue;
      const double d = std::abs(double{a.logits[t]} - double{b.logits[t]});
      largest = std::max(largest, std::isnan(d) ? infinity : d);
    }
    return largest;
  }

  // The distance of the two best logits.
  static double gap(const Reading& reading) {
    if (reading.logits.size() < 2) return 0;
    float best = -std::numeric_limits<float>::infinity(), second = best;
    for (const float x : reading.logits) {
      second = std::max(second, std::min(best, x));
      best = std::max(best, x);
    }
    return double{best} - double{second};
  }

  static double spread(const Reading& reading) {
    double least = std::numeric_limits<double>::infinity(), most = -least;
    for (const float x : reading.logits) {
      if (!std::isfinite(x)) continue;
      least = std::min(least, double{x});
      most = std::max(most, double{x});
    }
    return most > least ? most - least : 0;
  }

  // Whether two readings differ by more than rounding.
  [[nodiscard]] bool differ(const Reading& a, const Reading& b) const { return difference(a, b) > tolerance_; }

  static Reading last_of_chain(M& model, const Tree& tree) {
    model.forward(tree.view());
    return read(model, tree.rows - 1);
  }

  // A model with an empty context: a new one, until clearing was shown to be as good.
  M& cleared_model() {
    if (!cleared_ || !reusable_) cleared_ = std::make_unique<Made>(make_);
    cleared_->model.truncate(0);
    return cleared_->model;
  }

  // Plain decoding: what the engine says behind `text` when all of it but the last token is prefilled.
  Reading plain(const Tokens& text) {
    M& model = cleared_model();
    model.prefill(std::span(text).first(text.size() - 1));
    return last_of_chain(model, chain(static_cast<int>(text.size()) - 1, std::span(text).last(1)));
  }

  static std::string row_name(const Tree& tree, int row) {
    return "row " + std::to_string(row) + " of a tree of " + std::to_string(tree.rows) + " rows on " +
           std::to_string(tree.context_size) + " tokens of context";
  }

  // --- limits ---

  void check_limits() {
    Made made(make_);
    M& model = made.model;
    const std::size_t room = model.free_slots();
    if (model.vocabulary() < 2)
      return find(Promise::limits,
                  "vocabulary() is " + std::to_string(model.vocabulary()) + ": there must be two tokens at least");
    if (model.context_size() != 0)
      return find(Promise::limits,
                  "a new model has context_size() " + std::to_string(model.context_size()) + ": it must be 0");
    if (model.max_rows() < 1 || model.max_logit_rows() < 1)
      return find(Promise::limits, "max_rows() is " + std::to_string(model.max_rows()) + ", max_logit_rows() is " +
                                       std::to_string(model.max_logit_rows()) + ": both must be at least 1");
    if (room < 64)
      throw InvalidArgument("the model has " + std::to_string(room) + " free slots: give the kit one with at least 64");
    vocabulary_ = model.vocabulary();
    for (const Tokens& prompt : options_.prompts)
      for (const Token t : prompt) {
        if (t < Token{} || static_cast<std::uint64_t>(t) >= vocabulary_)
          throw InvalidArgument("token " + std::to_string(t) + " of a prompt is outside the vocabulary of " +
                                std::to_string(vocabulary_) + ": encode the prompts with the model's tokenizer");
        known_.push_back(t);
      }
    if (std::ranges::adjacent_find(known_, std::not_equal_to<>()) == known_.end()) known_.clear();
    room_ = static_cast<int>(std::min<std::size_t>(room, 1U << 20));
    max_rows_ = static_cast<int>(std::min<std::size_t>(model.max_rows(), most_rows));
    logit_rows_ = static_cast<int>(std::min<std::size_t>(model.max_logit_rows(), most_rows));
    if (max_rows_ < 2) note("The model takes one row at a time, so trees could not be checked.");

    const auto expect = [&](std::size_t size, const char* when) {
      if (model.context_size() != size)
        find(Promise::limits, std::string("context_size() is ") + std::to_string(model.context_size()) + " after " +
                                  when + ", but " + std::to_string(size) + " tokens are cached");
      if (model.context_size() + model.free_slots() > room)
        find(Promise::limits, std::string("after ") + when + " context_size() + free_slots() is " +
                                  std::to_string(model.context_size() + model.free_slots()) + ", but a new model has " +
                                  std::to_string(room) + " slots in all");
    };
    model.prefill(random_text(9));
    expect(9, "a prefill of 9 tokens");
    model.prefill({});
    expect(9, "a prefill of no tokens");
    const Tree tree = random_tree(9, std::min(max_rows_, options_.rows));
    model.forward(tree.view());
    expect(9, "a forward without a commit");
    model.forward(tree.view());
    Tokens text(9);
    if (!commit(model, text, tree, path_to(tree, tree.root))) return;
    expect(text.size(), "a commit of the pending chain");
    model.truncate(5);
    expect(5, "truncate(5)");
    model.truncate(0);
    expect(0, "truncate(0)");

    // As large as the model says, and up to the last slot.
    const bool fill = room_ <= 1024;
    if (!fill)
      note("The context of " + std::to_string(room) +
           " slots was not filled: give the kit a model with at "
           "most 1024 to check the last ones.");
    const int rows = std::min(max_rows_, room_ - 1);
    const int context = fill ? room_ - rows : 1;
    model.prefill(random_text(context));
    Tree largest = random_tree(context, rows);
    model.forward(largest.view());
    for (const int row : largest.view().wanted()) read(model, row);
    if (fill) {
      model.commit(path_to(largest, largest.root));
      while (model.free_slots() > 0) {
        const std::size_t before = model.context_size();
        const Tokens token = random_text(1);
        last_of_chain(model, chain(static_cast<int>(before), token));
        model.commit(std::array<std::int32_t, 1>{0});
        expect(before + 1, "a commit of one row");
        if (model.context_size() != before + 1) break;
      }
    }
    if (report_.conforms()) measure_control();
  }

  // How much plain decoding differs from itself; everything else is measured by that.
  void measure_control() {
    double widest = 0;
    for (int i = 0; i < 3; ++i) {
      const Tokens text = random_text(24);
      const Reading alone = plain(text);
      widest = std::max(widest, spread(alone));
      Made made(make_);
      for (const int rows : {2, 3, 4, 5, 8, 16}) {
        if (rows > max_rows_) continue;
        made.model.truncate(0);
        made.model.prefill(std::span(text).first(text.size() - at(rows)));
        const Reading last =
            last_of_chain(made.model, chain(static_cast<int>(text.size()) - rows, std::span(text).last(at(rows))));
        ++report_.exactness.control_rows;
        if (!(alone == last)) ++report_.exactness.control_differing;
        report_.exactness.control_largest = std::max(report_.exactness.control_largest, difference(alone, last));
      }
    }
    // Rounding is far below a thousandth of the range of logits, what a fault does far above a sixtieth.
    if (LogitsModel<M>) tolerance_ = std::clamp(4 * report_.exactness.control_largest, widest / 1024, widest / 64);
  }

  // --- basics ---

  void check_repeats() {
    for (int i = 0; i < 2; ++i) {
      const Tokens text = random_text(12);
      const Tree tree = random_tree(12, std::min(max_rows_, options_.rows));
      Made first(make_), second(make_);
      for (Made* made : {&first, &second}) {
        made->model.prefill(text);
        made->model.forward(tree.view());
      }
      for (const int row : tree.view().wanted())
        if (const double d = difference(read(first.model, row), read(second.model, row)); d > tolerance_)
          find(Promise::repeats,
               "two new models given the same calls differ by " + number(d) + " at " + row_name(tree, row));
    }
  }

  void check_reuse() {
    Made used(make_);
    for (int i = 0; i < options_.trees; ++i) {
      const Tokens text = random_text(between(6, 20));
      used.model.truncate(0);
      used.model.prefill(std::span(text).first(text.size() - 1));
      const Reading again =
          last_of_chain(used.model, chain(static_cast<int>(text.size()) - 1, std::span(text).last(1)));
      if (const double d = difference(again, plain(text)); d > tolerance_)
        find(Promise::reuse, "after truncate(0), text number " + std::to_string(i + 1) + " of " +
                                 std::to_string(text.size()) + " tokens differs from a new model's by " + number(d));
      // The next text must not notice any of this.
      const Tree tree = random_tree(static_cast<int>(text.size()) - 1, std::min(max_rows_, options_.rows));
      used.model.forward(tree.view());
      if (i % 2 == 0) used.model.commit(path_to(tree, tree.root));
    }
    reusable_ = report_.conforms();
  }

  void check_results() {
    Made made(make_);
    M& model = made.model;
    const Tokens text = random_text(10);
    model.prefill(text);
    const Tree tree = random_tree(10, std::min(max_rows_, options_.rows));
    model.forward(tree.view());
    for (const int row : tree.view().wanted()) {
      std::vector<Token> expected;
      if constexpr (LogitsModel<M>) {
        const std::span<const float> logits = model.logits(row);
        if (logits.size() != vocabulary_) {
          find(Promise::results, "logits() has " + std::to_string(logits.size()) + " values for a vocabulary of " +
                                     std::to_string(vocabulary_));
          continue;
        }
        if (std::ranges::any_of(logits, [](float x) { return std::isnan(x); })) {
          find(Promise::results, "a logit is NaN at " + row_name(tree, row));
          continue;
        }
        std::vector<Token> order(vocabulary_);
        for (std::size_t t = 0; t < order.size(); ++t) order[t] = static_cast<Token>(t);
        const std::size_t n = std::min<std::size_t>(8, order.size());
        std::partial_sort(
            order.begin(), order.begin() + static_cast<std::ptrdiff_t>(n), order.end(), [&](Token a, Token b) {
              const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
              return x > y || (x == y && a < b);
            });
        expected.assign(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(n));
      }
      if constexpr (TopTokensModel<M>) {
        std::vector<Token> top(std::min<std::size_t>(8, vocabulary_));
        const std::size_t n = model.top_tokens(row, top);
        if (n < 1 || n > top.size()) {
          find(Promise::results, "top_tokens() returned " + std::to_string(n) + " for room for " +
                                     std::to_string(top.size()) + " tokens: 1 to that many are allowed");
          continue;
        }
        top.resize(n);
        for (std::size_t i = 0; i < n; ++i) {
          if (std::find(top.begin(), top.begin() + static_cast<std::ptrdiff_t>(i), top[i]) !=
              top.begin() + static_cast<std::ptrdiff_t>(i))
            find(Promise::results, "top_tokens() names token " + std::to_string(top[i]) + " twice");
          if (i < expected.size() && top[i] != expected[i])
            find(Promise::results, "top_tokens() gives token " + std::to_string(top[i]) + " at rank " +
                                       std::to_string(i) + ", but by logits() it is " + std::to_string(expected[i]));
        }
        expected = top;
      }
      if constexpr (GreedyModel<M>) {
        const Token best = model.next_token(row);
        if (!expected.empty() && best != expected[0])
          find(Promise::results, "next_token() is " + std::to_string(best) + ", but the best token is " +
                                     std::to_string(expected[0]) + " at " + row_name(tree, row));
      }
      const Token best = next_token(model, row);
      if (std::cmp_less(best, 0) || std::cmp_greater_equal(best, vocabulary_))
        find(Promise::results,
             "token " + std::to_string(best) + " is outside the vocabulary of " + std::to_string(vocabulary_));
    }
  }

  // --- forward ---

  void check_drops() {
    for (int i = 0; i < options_.trees; ++i) {
      const Tokens text = random_text(between(6, 16));
      const int context = static_cast<int>(text.size());
      Tree dropped = random_tree(context, std::min(max_rows_, options_.rows));
      const Tree tree = random_tree(context, std::min(max_rows_, between(2, options_.rows)));
      Made fresh(make_), used(make_);
      const char* how = "forward";
      if (i % 3 == 1) {
        how = "prefill";
        for (Made* made : {&fresh, &used}) {
          made->model.prefill(std::span(text).first(4));
          if (made == &used) {
            rebase(dropped, 4);
            used.model.forward(dropped.view());
          }
          made->model.prefill(std::span(text).subspan(4));
        }
      } else {
        fresh.model.prefill(text);
        used.model.prefill(text);
        used.model.forward(dropped.view());
        if (i % 3 == 2) {
          how = "truncate to the whole context";
          used.model.truncate(text.size());
        }
      }
      fresh.model.forward(tree.view());
      used.model.forward(tree.view());
      for (const int row : tree.view().wanted())
        if (const double d = difference(read(fresh.model, row), read(used.model, row)); d > tolerance_)
          find(Promise::drops, "a forward that was not committed, then a " + std::string(how) + ": now " +
                                   row_name(tree, row) + " differs by " + number(d));
    }
  }

  static void rebase(Tree& tree, int context) {
    for (int r = 0; r < tree.rows; ++r) tree.position[r] += context - tree.context_size;
    tree.context_size = context;
  }

  // Every row of a tree against plain decoding of its path. Explains what differs.
  void check_rows() {
    for (int i = 0; i < options_.trees; ++i) {
      const Tokens text = random_text(between(6, 16));
      const int context = static_cast<int>(text.size());
      // Chains first: what is wrong there is not the tree's fault.
      Tree tree = i == 0 ? chain(context, random_text(std::min(max_rows_, 4)))
                         : random_tree(context, std::min({max_rows_, 2 + (options_.rows - 2) * i / options_.trees + 1,
                                                          room_ - context}));
      if (i == 0) want_many(tree);
      Made made(make_);
      made.model.prefill(text);
      made.model.forward(tree.view());
      std::vector<int> wrong;
      std::vector<Reading> readings(at(tree.rows));
      for (const int row : tree.view().wanted()) {
        readings[at(row)] = read(made.model, row);
        if (differ(readings[at(row)], plain(with(text, tree, path_to(tree, row))))) wrong.push_back(row);
      }
      for (const int row : wrong) explain(text, tree, row, readings[at(row)], i == 0);
    }
  }

  std::vector<Reading> readings_of(const Tokens& text, const Tree& tree) {
    std::vector<Reading> readings(at(tree.rows));
    M& model = cleared_model();
    model.prefill(text);
    model.forward(tree.view());
    for (const int row : tree.view().wanted()) readings[at(row)] = read(model, row);
    return readings;
  }

  // Why `row` gives `reading`, which is not plain decoding's.
  void explain(const Tokens& text, const Tree& tree, int row, const Reading& reading, bool is_chain) {
    // Explaining costs many passes, and a fault shows in many rows: the others count as the last one that was
    // explained.
    if (explained_ == 4) return find(report_.findings.back().promise, "");
    ++explained_;
    const std::string name = row_name(tree, row);
    if constexpr (LogitsModel<M>) {
      for (int other = 0; other < tree.rows; ++other)
        if (other != row && !differ(reading, plain(with(text, tree, path_to(tree, other)))))
          return find(Promise::wanted,
                      name + " gives the results of row " + std::to_string(other) +
                          (tree.parent[row] == other ? ", its parent: or does it not see itself?" : ""));
    }
    // A token that the row must see changes plain decoding, so it must change the row; one that it must not see must
    // not.
    for (int other = 0; other < tree.rows; ++other) {
      for (int tries = 0; tries < 3; ++tries) {
        Tree changed = tree;
        const std::vector<Reading> now = perturb(text, changed, other);
        if (now.empty()) break;
        const bool moved = differ(now[at(row)], reading);
        if (!tree.view().sees(row, other)) {
          if (moved)
            return find(Promise::mask, name + " changes with the token of row " + std::to_string(other) +
                                           ", which is not its ancestor: it must not see it");
        } else if (!moved && differ(plain(with(text, tree, path_to(tree, row))),
                                    plain(with(text, changed, path_to(changed, row))))) {
          return find(
              Promise::mask,
              name + " does not change with " +
                  (other == row ? "its own token" : "the token of row " + std::to_string(other) + ", its ancestor") +
                  ": it must see it");
        }
      }
    }
    for (std::size_t p = 0; p < text.size(); ++p) {
      Tokens changed = text;
      while (changed[p] == text[p]) changed[p] = random_token();
      if (!differ(readings_of(changed, tree)[at(row)], reading) &&
          differ(plain(with(text, tree, path_to(tree, row))), plain(with(changed, tree, path_to(tree, row)))))
        return find(Promise::mask,
                    name + " does not change with token " + std::to_string(p) + " of the context: it must see it");
    }
    const double d = difference(reading, plain(with(text, tree, path_to(tree, row))));
    find(Promise::positions,
         name + " sees what it must see, but differs from a prefill of the same tokens by " + number(d) +
             (is_chain ? ", in a mere chain: do positions go on from the context? The first row stands at " +
                             std::to_string(tree.context_size)
                       : ", while chains are right: is its position taken from the number of the row? It is " +
                             std::to_string(tree.position[row]) + ", not " + std::to_string(tree.context_size) + " + " +
                             std::to_string(row)));
  }

  // Gives `row` another token, and returns the results of all wanted rows; nothing where no other token fits.
  std::vector<Reading> perturb(const Tokens& text, Tree& tree, int row) {
    return change_token(tree, row) ? readings_of(text, tree) : std::vector<Reading>{};
  }

  bool change_token(Tree& tree, int row) {
    for (int tries = 0; tries < 1000; ++tries) {
      const Token token = random_token();
      if (token == tree.token[row] || has_sibling(tree, row, token)) continue;
      tree.token[row] = token;
      return true;
    }
    return false;
  }

  static bool has_sibling(const Tree& tree, int row, Token token) {
    return tree.parent[row] >= 0 && tree.view().child(tree.parent[row], token) >= 0;
  }

  // Every row in turn carries another token: whatever does not see it must stay as it is.
  void check_invisible() {
    for (int i = 0; i < 2; ++i) {
      const Tokens text = random_text(8);
      const Tree tree = random_tree(8, std::min(max_rows_, options_.rows));
      const std::vector<Reading> before = readings_of(text, tree);
      for (int other = 0; other < tree.rows; ++other) {
        Tree changed = tree;
        const std::vector<Reading> now = perturb(text, changed, other);
        if (now.empty()) continue;
        for (const int row : tree.view().wanted())
          if (!tree.view().sees(row, other) && differ(before[at(row)], now[at(row)]))
            find(Promise::mask, row_name(tree, row) + " changes with the token of row " + std::to_string(other) +
                                    ", which is not its ancestor: it must not see it");
      }
    }
  }

  // A few wanted rows must give what they give when all are wanted.
  void check_wanted() {
    for (int i = 0; i < options_.trees; ++i) {
      const Tokens text = random_text(8);
      Tree tree = random_tree(8, std::min(max_rows_, options_.rows));
      want_nothing(tree);
      for (int n = between(1, std::min(tree.rows, logit_rows_)); n > 0; --n) tree.want(below(tree.rows));
      const std::vector<Reading> readings = readings_of(text, tree);
      std::string list;
      for (const int row : tree.view().wanted()) list += (list.empty() ? "" : ", ") + std::to_string(row);
      for (const int row : tree.view().wanted())
        if (const double d = difference(readings[at(row)], plain(with(text, tree, path_to(tree, row)))); d > tolerance_)
          find(Promise::wanted, "with the wanted rows " + list + ", row " + std::to_string(row) + " differs by " +
                                    number(d) + from_another(text, tree, row, readings[at(row)]));
    }
  }

  std::string from_another(const Tokens& text, const Tree& tree, int row, const Reading& reading) {
    if constexpr (LogitsModel<M>) {
      for (int other = 0; other < tree.rows; ++other)
        if (other != row && !differ(reading, plain(with(text, tree, path_to(tree, other)))))
          return ": it gives the results of row " + std::to_string(other);
    }
    return "";
  }

  // --- the context ---

  // What a model says behind its context and `tail`, a chain.
  static Reading behind(M& model, std::span<const Token> tail) {
    Tree tree;
    tree.begin(static_cast<int>(model.context_size()), tail.data(), static_cast<int>(tail.size()));
    tree.want(tree.rows - 1);
    return last_of_chain(model, tree);
  }

  void check_prefill() {
    for (int i = 0; i < options_.trees; ++i) {
      // The last text is longer than any chunk of the engine is likely to be.
      const bool is_long = i == options_.trees - 1;
      const int length = is_long ? std::min(room_ - 1, 2 * max_rows_ + 3) : between(4, 24);
      const Tokens text = random_text(length);
      Made made(make_);
      std::span<const Token> rest = std::span(text).first(text.size() - 1);
      std::string pieces;
      while (!rest.empty()) {
        const std::size_t n = std::min(rest.size(), at(is_long ? between(1, length) : between(1, 8)));
        made.model.prefill(rest.first(n));
        rest = rest.subspan(n);
        pieces += (pieces.empty() ? "" : " + ") + std::to_string(n);
      }
      if (const double d = difference(behind(made.model, std::span(text).last(1)), plain(text)); d > tolerance_)
        find(Promise::prefill, "a text of " + std::to_string(text.size()) + " tokens prefilled as " + pieces +
                                   " differs from one prefilled at once by " + number(d));
    }
  }

  // Commits `path` and adds what was kept to `text`. Whether the engine gives a possible account of it.
  bool commit(M& model, Tokens& text, const Tree& tree, std::span<const std::int32_t> path) {
    const std::size_t kept = model.commit(path);
    const bool possible = kept >= at(tree.root + 1) && kept <= path.size();
    if (!possible)
      find(Promise::commit, "commit of a path of " + std::to_string(path.size()) + " rows returned " +
                                std::to_string(kept) + ": it must keep the pending chain of " +
                                std::to_string(tree.root + 1) + " rows, and at most the path");
    else if (model.context_size() != text.size() + kept)
      find(Promise::commit, "commit kept " + std::to_string(kept) + " rows, but context_size() went from " +
                                std::to_string(text.size()) + " to " + std::to_string(model.context_size()));
    else
      text = with(text, tree, path.first(kept));
    return possible && model.context_size() == text.size();
  }

  void check_commit() {
    for (int i = 0; i < 2 * options_.trees; ++i) {
      Tokens text = random_text(between(0, 12));
      Made made(make_);
      M& model = made.model;
      model.prefill(text);
      // Several steps one after the other: a fault may need company to show.
      for (int step = 0; step < 3 && report_.conforms(); ++step) {
        const int context = static_cast<int>(text.size());
        const Tree tree = random_tree(context, std::min({max_rows_, between(1, options_.rows), room_ - context - 4}));
        const int leaf = between(tree.root, tree.rows - 1);
        const std::vector<std::int32_t> path = path_to(tree, leaf);
        model.forward(tree.view());
        const Tokens before = text;
        if (!commit(model, text, tree, path)) return;
        const Tokens token = random_text(1);
        const Reading reading = behind(model, token);
        if (differ(reading, plain(with(text, token))))
          explain_commit(before, tree, std::span(path).first(text.size() - before.size()), path, token, reading);
      }
    }
    check_rejected();
    // A part of a long pending chain: nothing is wanted, all of it is kept.
    const Tokens whole = random_text(10);
    Tokens text(whole.begin(), whole.begin() + 5);
    Made made(make_);
    made.model.prefill(text);
    while (text.size() < 9) {
      Tree part;
      part.begin(static_cast<int>(text.size()), whole.data() + text.size(),
                 std::min(static_cast<int>(9 - text.size()), max_rows_));
      made.model.forward(part.view());
      if (!commit(made.model, text, part, path_to(part, part.root))) return;
    }
    if (const double d = difference(behind(made.model, std::span(whole).last(1)), plain(whole)); d > tolerance_)
      find(Promise::commit,
           "after a forward that wants no row and a commit of all its rows the text differs by " + number(d));
  }

  void explain_commit(const Tokens& before, const Tree& tree, std::span<const std::int32_t> kept,
                      std::span<const std::int32_t> path, const Tokens& token, const Reading& reading) {
    std::string rows;
    for (const int row : kept) rows += (rows.empty() ? "" : ", ") + std::to_string(row);
    const std::string what = "after a commit of the rows " + rows + " of " + std::to_string(tree.rows) + " ";
    std::vector<std::int32_t> first(kept.size());
    std::iota(first.begin(), first.end(), 0);
    const auto is = [&](std::span<const std::int32_t> other) {
      return !differ(reading, plain(with(with(before, tree, other), token)));
    };
    std::string guess;
    if (is(first)) {
      guess = ": the context has the first rows of the tree instead";
    } else if (lacks_last(before, tree, path, kept.back(), token, reading)) {
      guess = ": the context lacks the last row of the path";
    } else {
      for (int row = tree.root + 1; row < tree.rows; ++row) {
        Tree changed = tree;
        if (std::ranges::find(path, row) != path.end() || !change_token(changed, row)) continue;
        if (differ(behind_commit(before, changed, path, token), reading))
          return find(Promise::drops,
                      what + "the text still depends on row " + std::to_string(row) + ", which was rejected");
      }
    }
    find(Promise::commit, what + "the text differs from a prefill of the same tokens by " +
                              number(difference(reading, plain(with(with(before, tree, kept), token)))) + guess);
  }

  bool lacks_last(const Tokens& before, const Tree& tree, std::span<const std::int32_t> path, int last,
                  const Tokens& token, const Reading& reading) {
    Tree changed = tree;
    return change_token(changed, last) && !differ(behind_commit(before, changed, path, token), reading);
  }

  Reading behind_commit(const Tokens& before, const Tree& tree, std::span<const std::int32_t> path,
                        const Tokens& token) {
    Made made(make_);
    made.model.prefill(before);
    made.model.forward(tree.view());
    made.model.commit(path);
    return behind(made.model, token);
  }

  // The tokens of rejected rows must make no difference behind a commit.
  void check_rejected() {
    for (int i = 0; i < options_.trees; ++i) {
      const Tokens text = random_text(6), token = random_text(1);
      const Tree tree = random_tree(6, std::min(max_rows_, options_.rows));
      const std::vector<std::int32_t> path = path_to(tree, between(tree.root, tree.rows - 1));
      Tree other = tree;
      for (int row = tree.root + 1; row < tree.rows; ++row)
        if (std::ranges::find(path, row) == path.end()) change_token(other, row);
      Made first(make_), second(make_);
      first.model.prefill(text);
      first.model.forward(tree.view());
      second.model.prefill(text);
      second.model.forward(other.view());
      const std::size_t kept = first.model.commit(path);
      if (second.model.commit(path) != kept) continue;
      if (const double d = difference(behind(first.model, token), behind(second.model, token)); d > tolerance_)
        find(Promise::drops, "rejected rows that carry other tokens change the text behind a commit by " + number(d));
    }
  }

  void check_truncate() {
    for (int i = 0; i < 2 * options_.trees; ++i) {
      Tokens text = random_text(between(8, 20));
      Made made(make_);
      M& model = made.model;
      model.prefill(text);
      // Every other time what is cut includes rows that a commit moved.
      if (i % 2 == 1) {
        const Tree tree = random_tree(static_cast<int>(text.size()), std::min(max_rows_, options_.rows));
        const std::vector<std::int32_t> path = path_to(tree, tree.rows - 1);
        model.forward(tree.view());
        text = with(text, tree, std::span(path).first(model.commit(path)));
      }
      const std::size_t n = i % 5 == 4 ? text.size() : at(below(static_cast<int>(text.size())));
      model.truncate(n);
      const Tokens kept(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(n));
      const Tokens tail = random_text(between(1, std::min(3, max_rows_)));
      const Reading reading = behind(model, tail);
      const Tokens whole = with(kept, tail);
      if (!differ(reading, plain(whole))) continue;
      find(Promise::truncate, "after truncate(" + std::to_string(n) + ") of " + std::to_string(text.size()) +
                                  " tokens the text differs from a prefill of the same tokens by " +
                                  number(difference(reading, plain(whole))) + explain_truncate(text, n, tail, reading));
    }
  }

  // Which token of `text` should be visible behind truncate(n) and is not, or the other way round.
  std::string explain_truncate(const Tokens& text, std::size_t n, const Tokens& tail, const Reading& reading) {
    std::string visible;
    for (std::size_t p = n == 0 ? 0 : n - 1; p < text.size(); ++p) {
      Tokens changed = text;
      while (changed[p] == text[p]) changed[p] = random_token();
      Made made(make_);
      made.model.prefill(changed);
      made.model.truncate(n);
      const bool sees = differ(behind(made.model, tail), reading);
      if (p >= n && sees) visible += (visible.empty() ? "" : ", ") + std::to_string(p);
      if (p < n && !sees) return ": token " + std::to_string(p) + " is no longer visible";
    }
    return visible.empty() ? "" : ": still visible are the tokens " + visible;
  }

  void check_fork() {
    if constexpr (ForkableModel<M>) {
      const Tokens text = random_text(10), left = random_text(3), right = random_text(3);
      Made made(make_);
      made.model.prefill(text);
      auto fork = made.model.fork();
      if (fork.context_size() != text.size())
        return find(Promise::fork, "the fork of a model with " + std::to_string(text.size()) + " tokens has " +
                                       std::to_string(fork.context_size()));
      made.model.prefill(left);
      fork.prefill(right);
      const Tokens token = random_text(1);
      if (const double d = difference(behind(made.model, token), plain(with(with(text, left), token))); d > tolerance_)
        find(Promise::fork, "a fork that goes on changes the model that it came from by " + number(d));
      if (const double d = difference(behind(fork, token), plain(with(with(text, right), token))); d > tolerance_)
        find(Promise::fork, "a fork differs from a prefill of the same tokens by " + number(d));
    }
  }

  // --- exactness ---

  // The same path in trees of many sizes, its rows scattered among others.
  void measure_rows() {
    Exactness& e = report_.exactness;
    for (int i = 0; i < options_.trees; ++i) {
      const Tokens text = random_text(between(8, 24));
      const int context = static_cast<int>(text.size());
      for (int rows = 1; rows <= std::min(max_rows_, room_ - context); rows += std::max(1, rows / 2)) {
        const Tree tree = random_tree(context, rows);
        const std::vector<Reading> readings = readings_of(text, tree);
        const int row = tree.view().wanted()[at(below(tree.wanted_count))];
        const Reading expected = plain(with(text, tree, path_to(tree, row)));
        ++e.rows;
        if (readings[at(row)] == expected) continue;
        ++e.differing;
        const double d = difference(readings[at(row)], expected);
        if (d > e.largest) {
          e.largest = d;
          e.gap = gap(expected);
        }
        if (d > tolerance_)
          find(Promise::text,
               row_name(tree, row) + " differs from plain decoding by " + number(d) + ", which is more than rounding");
      }
    }
  }

  void measure_texts() {
    Exactness& e = report_.exactness;
    std::vector<Tokens> prompts = options_.prompts;
    for (int i = 0; options_.prompts.empty() && i < 4; ++i) prompts.push_back(random_text(between(4, 16)));
    Made made(make_);
    M& model = made.model;
    for (const Tokens& prompt : prompts) {
      const Tokens expected = plain_decode(model, std::span<const Token>(prompt), options_.tokens);
      Tokens decoded;
      Decoder<M, 5, 4, 5> decoder(model, {.shape = {.w = 5}, .rows = 16, .cost = StepCost::none()});
      decoder.generate(prompt, options_.tokens, [&](std::span<const Token> block) {
        decoded.insert(decoded.end(), block.begin(), block.end());
      });
      ++e.texts;
      if (in_chains(model, prompt) != expected) ++e.control_forked;
      if (decoded == expected) continue;
      ++e.forked;
      const auto fork = std::ranges::mismatch(decoded, expected).in2;
      const Reading reading = plain(with(prompt, std::span(expected.begin(), fork)));
      e.fork_gap = std::max(e.fork_gap, gap(reading));
      if (e.differing == 0 || gap(reading) > 2 * tolerance_)
        find(Promise::text, "the text forks at token " + std::to_string(fork - expected.begin()) +
                                " behind a prompt of " + std::to_string(prompt.size()) +
                                ", where the two best logits are " + number(gap(reading)) + " apart");
    }
  }

  // Plain decoding in which each pass evaluates the last tokens once more, four in all.
  Tokens in_chains(M& model, const Tokens& prompt) {
    Tokens text = prompt;
    model.truncate(0);
    model.prefill(std::span(prompt).first(prompt.size() - 1));
    while (text.size() < prompt.size() + options_.tokens && model.free_slots() > 0) {
      const std::size_t rows = std::min({text.size(), std::size_t{4}, at(max_rows_)});
      model.truncate(text.size() - rows);
      const Token next = behind(model, std::span(text).last(rows)).best;
      std::vector<std::int32_t> path(rows);
      for (std::size_t r = 0; r < rows; ++r) path[r] = static_cast<std::int32_t>(r);
      model.commit(path);
      text.push_back(next);
    }
    return {text.begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.end()};
  }

  Factory make_;
  const Options& options_;
  std::mt19937_64 random_;
  ConformanceReport report_;
  std::unique_ptr<Made> cleared_;
  bool reusable_ = false;  // whether clearing a model was shown to give a new one
  double tolerance_ = 0;   // differences up to this are rounding
  std::size_t vocabulary_ = 0;
  Tokens known_{};  // the prompts, one behind the other; empty where they have no two different tokens
  int room_ = 0, max_rows_ = 0, logit_rows_ = 0, explained_ = 0;
};

}  // namespace detail

template <class Factory>
ConformanceReport check_conformance(
    Factory make, const ConformanceOptions<typename std::invoke_result_t<Factory&>::token_type>& options) {
  static_assert(Model<std::invoke_result_t<Factory&>>, "The factory must return a Model.");
  return detail::Conformance<std::invoke_result_t<Factory&>>(std::move(make), options).run();
}

}  // namespace lookahead::testing
