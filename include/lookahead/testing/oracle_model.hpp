#pragma once
/// @file oracle_model.hpp
/// Language models without weights, for tests of everything that decodes: deterministic, fast, and strict about the
/// rules of the `Model` concept.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "lookahead/errors.hpp"
#include "lookahead/token_tree.hpp"

namespace lookahead::testing {

/// The caller of an oracle broke a rule of the `Model` concept. The message names the rule; `row` and `position` say
/// where, -1 where they do not apply.
struct OracleFault : std::logic_error {
  OracleFault(const std::string& what, int at_row = -1, int at_position = -1)
      : std::logic_error("oracle: " + what), row(at_row), position(at_position) {}
  int row, position;
};

/// What an oracle throws when `OracleOptions` tells it to fail.
struct InjectedFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Which of the three ways to read its choices an oracle offers.
enum class Reads { all, next_token, top_tokens, logits };

/// What an oracle is made of. Calls are counted from 1 over the life of the model; call number 0 never comes.
struct OracleOptions {
  int vocabulary = 256;      ///< tokens are [0, vocabulary); 2 to 65,536, and at most what the token type holds
  std::uint64_t seed = 1;    ///< selects one of many unlike languages
  double repetition = 0.5;   ///< share of tokens that follow from the last one to three tokens alone; 0 to 1
  int capacity = 1024;       ///< slots of the cache, and so the longest position + 1; at least 1
  int max_rows = 128;        ///< rows of one forward; at least 1
  int max_logit_rows = 128;  ///< wanted rows of one forward; at least 1
  int max_kept = std::numeric_limits<int>::max();  ///< rows behind the root that a commit keeps at most; 0 = none
  int fail_forward = 0;                            ///< number of the call that throws `InjectedFault`
  int fail_commit = 0;                             ///< the same for `commit`
  int fail_prefill = 0;                            ///< the same for `prefill`, after half of the tokens
};

/// A deterministic language model whose choice at a row is a function of every (token, position) that the row sees, and
/// of nothing else. It satisfies `Model` and `ForkableModel`, and offers its choices in the ways that `Ways` names.
///
/// It keeps a real cache with one slot a row. What a row sees is taken from the tree's ancestor bits and positions; the
/// model refuses, with an `OracleFault`, a row that sees a position twice or misses one, a tree whose parents, depths,
/// siblings, pending chain or wanted rows contradict the rules of `TokenTree`, a commit of anything but a path, a read
/// of a row that was not wanted or whose results are no longer valid, and every excess over its limits. A call that
/// throws leaves the context as it was (`prefill`: see there).
///
/// Its language: with probability `repetition` the next token depends on the last one to three tokens only, so that
/// n-grams recur, and then few tokens are frequent and many are rare; else it depends on the whole path and is uniform.
/// The alternatives behind the first choice begin with what the other rules would have said.
///
/// Nothing allocates after construction, except the first call of `logits`.
template <class Token = std::int32_t, Reads Ways = Reads::all>
class OracleModel {
 public:
  using token_type = Token;

  /// Throws `InvalidArgument` if an option is out of its range.
  explicit OracleModel(const OracleOptions& options) : options_(options) {
    constexpr auto most_tokens =
        static_cast<int>(std::min<std::uint64_t>(65536, std::uint64_t{std::numeric_limits<Token>::max()} + 1));
    check_option("vocabulary", options.vocabulary, 2, most_tokens);
    check_option("capacity", options.capacity, 1, std::numeric_limits<int>::max());
    check_option("max_rows", options.max_rows, 1, std::numeric_limits<int>::max());
    check_option("max_logit_rows", options.max_logit_rows, 1, std::numeric_limits<int>::max());
    check_option("max_kept", options.max_kept, 0, std::numeric_limits<int>::max());
    if (!(options.repetition >= 0 && options.repetition <= 1))
      throw InvalidArgument("OracleOptions: repetition is " + std::to_string(options.repetition) +
                            "; choose a share from 0 to 1");
    seed_ = mix(options.seed);
    repeat_below_ = static_cast<std::uint64_t>(options.repetition * 0x1p32);
    const std::uint32_t v = size();
    stride_ = 1 + static_cast<std::uint32_t>(seed_ % (v - 1));
    while (std::gcd(stride_, v) != 1) stride_ = 1 + stride_ % (v - 1);
    slots_.resize(index(options.capacity));
    first_child_.resize(index(options.max_rows));
    next_sibling_.resize(index(options.max_rows));
    logit_index_.resize(index(options.max_rows));
  }

  [[nodiscard]] std::size_t vocabulary() const { return size(); }
  [[nodiscard]] std::size_t context_size() const { return index(context_); }
  [[nodiscard]] std::size_t free_slots() const { return index(options_.capacity - context_); }
  [[nodiscard]] std::size_t max_rows() const { return index(options_.max_rows); }
  [[nodiscard]] std::size_t max_logit_rows() const { return index(options_.max_logit_rows); }

  /// Keeps the first `n` tokens of the context. O(1).
  void truncate(std::size_t n) {
    drop_results();
    if (n > context_size())
      throw OracleFault("truncate to " + std::to_string(n) + " of " + std::to_string(context_) + " tokens");
    context_ = static_cast<int>(n);
  }

  /// Appends `tokens` to the context. A call that is told to fail has appended half of them; any other that throws has
  /// appended none. O(tokens.size()).
  void prefill(std::span<const Token> tokens) {
    drop_results();
    if (tokens.size() > free_slots())
      throw OracleFault("prefill of " + std::to_string(tokens.size()) + " tokens into " + std::to_string(free_slots()) +
                        " free slots");
    for (std::size_t i = 0; i < tokens.size(); ++i) check_token(tokens[i], static_cast<int>(i), context_);
    const bool fails = ++prefills_ == options_.fail_prefill;
    for (const Token t : tokens.first(fails ? tokens.size() / 2 : tokens.size())) {
      write(context_, t, context_ - 1);
      ++context_;
    }
    if (fails) throw InjectedFault("prefill " + std::to_string(prefills_) + " fails as told");
  }

  /// Evaluates the rows of `tree`. O(rows x (rows / 32 + siblings)); choices are computed when they are read.
  void forward(const TokenTree<Token>& tree) {
    drop_results();
    check_limits(tree);
    if (++forwards_ == options_.fail_forward)
      throw InjectedFault("forward " + std::to_string(forwards_) + " fails as told");
    for (int r = 0; r < tree.size(); ++r) take_row(tree, r);
    take_wanted(tree);
    root_ = tree.root();
    rows_ = tree.size();
  }

  /// Moves the slots of the path behind the context and returns how many it kept: all of them, or root() + 1 +
  /// `max_kept` where that is less. The results of `forward` are gone afterwards, thrown or not. O(path.size()).
  std::size_t commit(std::span<const std::int32_t> path) {
    const int rows = rows_;
    drop_results();
    if (rows == 0) throw OracleFault("commit without a forward before it");
    if (path.size() < index(root_ + 1))
      throw OracleFault("commit of " + std::to_string(path.size()) + " rows lacks a row of the pending chain",
                        static_cast<int>(path.size()));
    for (std::size_t i = 0; i < path.size(); ++i) {
      const int row = path[i];
      const int before = i == 0 ? -1 : path[i - 1];
      if (row <= before || row >= rows)
        throw OracleFault("commit of row " + std::to_string(row) + " behind row " + std::to_string(before) + " of " +
                              std::to_string(rows) + ": rows of a path increase",
                          row);
      const Slot& slot = slots_[index(context_ + row)];
      if (slot.previous != context_ + before)
        throw OracleFault("commit of row " + std::to_string(row) + " behind row " + std::to_string(before) +
                              ", which is not its parent",
                          row, slot.position);
    }
    if (++commits_ == options_.fail_commit)
      throw InjectedFault("commit " + std::to_string(commits_) + " fails as told");
    const std::size_t least = index(root_ + 1);
    const std::size_t kept = least + std::min(path.size() - least, index(options_.max_kept));
    for (std::size_t i = 0; i < kept; ++i) {
      const int to = context_ + static_cast<int>(i);
      Slot slot = slots_[index(context_ + path[i])];
      slot.previous = to - 1;
      slots_[index(to)] = slot;
    }
    context_ += static_cast<int>(kept);
    return kept;
  }

  /// The first choice at a wanted row. O(1).
  [[nodiscard]] Token next_token(int row) const requires(Ways == Reads::all || Ways == Reads::next_token) {
    return choose(wanted_slot(row)).token[0];
  }

  /// The best min(out.size(), vocabulary()) tokens of a wanted row. O(out.size()).
  [[nodiscard]] std::size_t top_tokens(int row, std::span<Token> out) const
      requires(Ways == Reads::all || Ways == Reads::top_tokens) {
    const Choices best = choose(wanted_slot(row));
    const std::size_t n = std::min<std::size_t>(out.size(), size());
    for_ranks(best, n, [&](std::size_t rank, std::uint32_t token) { out[rank] = static_cast<Token>(token); });
    return n;
  }

  /// The logits of a wanted row: falling with the logarithm of the rank, at a slope of its own for every path, and
  /// never tied. The span is valid as long as the results are. Shape [vocabulary()]. O(vocabulary()) at the first read.
  [[nodiscard]] std::span<const float> logits(int row) requires(Ways == Reads::all || Ways == Reads::logits) {
    const Slot& slot = wanted_slot(row);
    if (logits_.empty()) {
      logits_.resize(index(options_.max_logit_rows) * size());
      log_rank_.resize(size());
      for (std::size_t k = 0; k < log_rank_.size(); ++k) log_rank_[k] = std::log(static_cast<float>(k + 1));
      logits_known_.resize(index(options_.max_logit_rows));
    }
    const std::size_t which = index(logit_index_[index(row)]);
    const std::span<float> out = std::span(logits_).subspan(which * size(), size());
    if (logits_known_[which] != forwards_) {
      const float slope = 1 + static_cast<float>(mix(slot.sum + 3 * seed_) >> 40) * (3 * 0x1p-24F);
      for_ranks(choose(slot), size(),
                [&](std::size_t rank, std::uint32_t token) { out[token] = 10 - slope * log_rank_[rank]; });
      logits_known_[which] = forwards_;
    }
    return out;
  }

  /// A copy with the same context. It has no results to read, and counts calls on from here.
  [[nodiscard]] OracleModel fork() const {
    OracleModel copy = *this;
    copy.drop_results();
    return copy;
  }

 private:
  // What one cached row is: slots of the context come first, those of the last tree behind them.
  struct Slot {
    Token token;
    std::int32_t position;
    std::int32_t previous;  // the slot one position before; -1 for the first
    std::uint64_t sum;      // over every (token, position) that the row sees, in any order
  };

  // The tokens that the rules of the language propose, the chosen one first, without repeats.
  struct Choices {
    Token token[4];
    int count = 0;
    void add(Token t) {
      if (std::find(token, token + count, t) == token + count) token[count++] = t;
    }
  };

  static constexpr std::size_t index(int i) { return static_cast<std::size_t>(i); }
  [[nodiscard]] std::uint32_t size() const { return static_cast<std::uint32_t>(options_.vocabulary); }

  // The finaliser of the SplitMix64 generator: a bijection in which every bit depends on every other.
  static constexpr std::uint64_t mix(std::uint64_t x) {
    x += 0x9E3779B97F4A7C15U;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31);
  }

  static void check_option(const char* name, int value, int least, int most) {
    if (value < least || value > most)
      throw InvalidArgument(std::string("OracleOptions: ") + name + " is " + std::to_string(value) +
                            "; choose a value from " + std::to_string(least) + " to " + std::to_string(most));
  }

  void check_token(Token t, int row, int position) const {
    if (static_cast<std::make_unsigned_t<Token>>(t) >= size())
      throw OracleFault("row " + std::to_string(row) + " carries token " + std::to_string(t) +
                            "; the vocabulary ends at " + std::to_string(size() - 1),
                        row, position);
  }

  void check_limits(const TokenTree<Token>& tree) const {
    const auto check = [](const char* what, std::size_t value, std::size_t limit, const char* of) {
      if (value > limit) throw OracleFault("forward of " + std::to_string(value) + what + std::to_string(limit) + of);
    };
    check(" rows; the model takes ", index(tree.size()), max_rows(), "");
    check(" rows into ", index(tree.size()), free_slots(), " free slots");
    check(" wanted rows; the model takes ", tree.wanted().size(), max_logit_rows(), "");
    if (tree.empty()) throw OracleFault("forward of an empty tree");
    if (tree.context_size() != context_)
      throw OracleFault("the tree stands on " + std::to_string(tree.context_size()) + " tokens; the context has " +
                        std::to_string(context_));
    if (tree.root() < 0 || tree.root() >= tree.size())
      throw OracleFault("the root " + std::to_string(tree.root()) + " is none of " + std::to_string(tree.size()) +
                        " rows");
  }

  // Caches a row. The row one position before it is the last one that it sees besides itself; if it sees exactly what
  // that one sees and itself, then by induction it sees every position once.
  void take_row(const TokenTree<Token>& tree, int r) {
    const int position = tree.positions()[index(r)];
    check_token(tree.tokens()[index(r)], r, position);
    const std::span<const std::uint32_t> seen = tree.ancestors(r);
    const std::size_t own_word = index(r / 32);
    const std::uint32_t own_bit = 1U << (r % 32);
    std::size_t w = own_word;
    std::uint32_t before = seen[w] & (own_bit - 1);
    while (before == 0 && w > 0) before = seen[--w];
    const int previous = before == 0 ? -1 : static_cast<int>(w) * 32 + 31 - std::countl_zero(before);

    bool exact = position == (previous < 0 ? context_ : tree.positions()[index(previous)] + 1);
    for (w = 0; w < seen.size(); ++w) {
      const std::uint32_t expected = (previous < 0 ? 0U : tree.ancestors(previous)[w]) | (w == own_word ? own_bit : 0U);
      exact = exact && seen[w] == expected;
    }
    if (!exact) throw explain(tree, r);

    const auto fault = [&](const std::string& what) {
      return OracleFault("row " + std::to_string(r) + " at position " + std::to_string(position) + " " + what, r,
                         position);
    };
    if (tree.parents()[index(r)] != previous)
      throw fault("has parent " + std::to_string(tree.parents()[index(r)]) + " but sees row " +
                  std::to_string(previous) + " at the position before");
    if (r <= tree.root() ? previous != r - 1 : previous < tree.root())
      throw fault("has parent " + std::to_string(previous) + ": the pending chain is not one chain");
    const int depth = r <= tree.root() ? 0 : tree.depths()[index(previous)] + 1;
    if (tree.depths()[index(r)] != depth)
      throw fault("has depth " + std::to_string(tree.depths()[index(r)]) + " instead of " + std::to_string(depth));
    first_child_[index(r)] = -1;
    if (previous >= 0) {
      std::int32_t& first = first_child_[index(previous)];
      for (int s = first; s >= 0; s = next_sibling_[index(s)])
        if (tree.tokens()[index(s)] == tree.tokens()[index(r)]) throw fault("repeats its sibling " + std::to_string(s));
      next_sibling_[index(r)] = first;
      first = r;
    }
    write(context_ + r, tree.tokens()[index(r)], context_ + previous);
  }

  void take_wanted(const TokenTree<Token>& tree) {
    for (int r = 0; r < tree.size(); ++r) logit_index_[index(r)] = -1;
    int last = -1;
    for (std::size_t i = 0; i < tree.wanted().size(); ++i) {
      const int r = tree.wanted()[i];
      if (r <= last || r >= tree.size())
        throw OracleFault("wanted row " + std::to_string(r) + " follows row " + std::to_string(last) + " of " +
                              std::to_string(tree.size()),
                          r);
      logit_index_[index(r)] = static_cast<std::int32_t>(i);
      last = r;
    }
    for (int r = 0; r < tree.size(); ++r)
      if (tree.is_wanted(r) != (logit_index_[index(r)] >= 0))
        throw OracleFault("the list and the bits of the wanted rows differ at row " + std::to_string(r), r);
  }

  // Says what is wrong with the positions that row `r` sees.
  [[nodiscard]] OracleFault explain(const TokenTree<Token>& tree, int r) const {
    const int position = tree.positions()[index(r)];
    const std::string row = "row " + std::to_string(r) + " at position " + std::to_string(position);
    if (!tree.sees(r, r)) return {row + " does not see itself", r, position};
    if (position < context_) return {row + " repeats a position of the context", r, position};
    for (int p = context_; p <= position; ++p) {
      int times = 0;
      for (int s = 0; s < tree.size(); ++s) times += tree.sees(r, s) && tree.positions()[index(s)] == p ? 1 : 0;
      if (times == 0) return {row + " misses position " + std::to_string(p), r, p};
      if (times > 1) return {row + " sees position " + std::to_string(p) + " twice", r, p};
    }
    for (int s = 0; s < tree.size(); ++s) {
      const int p = tree.positions()[index(s)];
      if (tree.sees(r, s) && (s > r || p < context_ || p > position))
        return {row + " sees row " + std::to_string(s) + " at position " + std::to_string(p), r, p};
    }
    return {row + " sees rows of more than one path, or beyond the tree", r, position};
  }

  void write(int slot, Token t, int previous) {
    const int position = previous < 0 ? 0 : slots_[index(previous)].position + 1;
    const std::uint64_t item = static_cast<std::uint64_t>(position) << 32 | static_cast<std::uint32_t>(t);
    slots_[index(slot)] = {t, position, previous, (previous < 0 ? 0 : slots_[index(previous)].sum) + mix(item ^ seed_)};
  }

  void drop_results() { rows_ = 0; }

  [[nodiscard]] const Slot& wanted_slot(int row) const {
    if (rows_ == 0) throw OracleFault("row " + std::to_string(row) + " is read but there are no valid results", row);
    if (row < 0 || row >= rows_ || logit_index_[index(row)] < 0)
      throw OracleFault("row " + std::to_string(row) + " is read but was not wanted", row);
    return slots_[index(context_ + row)];
  }

  [[nodiscard]] Choices choose(const Slot& at) const {
    const std::uint64_t path = mix(at.sum + seed_);
    Token by_rule[4];
    std::uint64_t recent = seed_, length = 0;
    const Slot* slot = &at;
    for (std::uint64_t k = 1; k <= 3; ++k) {
      const std::uint64_t token = slot == nullptr ? 0 : static_cast<std::uint64_t>(slot->token) + 1;
      recent = mix(recent ^ (token * 4 + k));
      by_rule[k] = frequent_token(recent);
      if (k == 1) length = 1 + (recent ^ seed_) % 3;  // so that a 3-gram that recurs is likely to go on alike
      if (slot != nullptr) slot = slot->previous < 0 ? nullptr : &slots_[index(slot->previous)];
    }
    by_rule[0] = static_cast<Token>((path >> 32) * size() >> 32);
    Choices best;
    best.add(by_rule[mix(path + seed_) >> 32 < repeat_below_ ? length : 0]);
    for (const int k : {2, 3, 1, 0}) best.add(by_rule[k]);
    return best;
  }

  // Uniform in the logarithm, so that some tokens are frequent; the stride scatters those over the vocabulary.
  [[nodiscard]] Token frequent_token(std::uint64_t hash) const {
    const std::uint32_t v = size();
    const auto bits =
        static_cast<std::uint32_t>((hash >> 32) * static_cast<std::uint32_t>(std::bit_width(v - 1) + 1) >> 32);
    const std::uint64_t x = (hash & 0xFFFFFFFFU) * std::min(v, 1U << bits) >> 32;
    return static_cast<Token>(x * stride_ % v);
  }

  // Calls f(rank, token) for the ranks 0..n-1: the choices, then the other tokens in strides from the first.
  template <class F>
  void for_ranks(const Choices& best, std::size_t n, F f) const {
    std::size_t rank = 0;
    for (; rank < std::min(n, index(best.count)); ++rank) f(rank, static_cast<std::uint32_t>(best.token[rank]));
    const Token* const end = best.token + best.count;
    for (std::uint32_t t = static_cast<std::uint32_t>(best.token[0]); rank < n; t = (t + stride_) % size())
      if (std::find(best.token, end, static_cast<Token>(t)) == end) f(rank++, t);
  }

  OracleOptions options_;
  std::uint64_t seed_ = 0, repeat_below_ = 0;
  std::uint32_t stride_ = 1;
  int context_ = 0, rows_ = 0, root_ = -1;
  int forwards_ = 0, commits_ = 0, prefills_ = 0;
  std::vector<Slot> slots_;
  std::vector<std::int32_t> first_child_, next_sibling_, logit_index_;
  std::vector<float> logits_, log_rank_;
  std::vector<int> logits_known_;  // the number of the forward whose logits are there
};

}  // namespace lookahead::testing
