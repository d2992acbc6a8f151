// The conformance kit: engines that keep every promise pass, and each planted fault is named.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "engines/gguf.hpp"
#include "engines/llama_engine.hpp"
#include "tiny_llama.hpp"

#include "lookahead/model.hpp"
#include "lookahead/testing/conformance.hpp"
#include "lookahead/testing/oracle_model.hpp"

namespace {

using namespace lookahead;
using namespace lookahead::testing;
using Token = std::int32_t;

// What a toy engine does wrong.
enum class Fault {
  none,
  sees_siblings,        // mask: causal over the rows, whatever their parents
  sees_last_row,        // mask: the last row is visible to its sibling's line as well
  blind_to_parent,      // mask: a row misses its parent
  blind_to_context,     // mask: where there are several rows, they miss the first token of the context
  blind_to_itself,      // mask: the same, strictly lower
  position_of_row,      // positions: context + row
  position_late,        // positions: one too far in every forward
  wanted_by_index,      // wanted: the i-th result is that of row i
  wanted_neighbour,     // wanted: a row gives the results of the row before it
  commit_first_rows,    // commit: the first rows of the tree instead of the path
  commit_short,         // commit: the last row of the path is left out, and claimed
  commit_returns_more,  // commit: claims one row more than the path has
  commit_at_row,        // commit: kept rows keep the positions of their row numbers
  commit_leaks,         // drops: rejected rows stay visible behind a commit
  forward_leaks,        // drops: rows of the last forward stay visible in the next
  truncate_more,        // truncate: keeps one token too many
  truncate_none,        // truncate: keeps all, unless told 0
  truncate_counts,      // truncate: forgets to forget what it counts
  reuse_stale,          // reuse: truncate(0) keeps the first token
  prefill_restarts,     // prefill: each call starts at position 0
  prefill_chunk,        // prefill: a chunk of 16 does not see the one before
  limits_lie,           // limits: takes fewer rows than it says
  slots_lie,            // limits: free_slots never falls
  best_is_second,       // results: next_token is the second best
  logits_nan,           // results
  random_results,       // repeats: depends on which engine it is
  fork_shares,          // fork: the copy writes into the same cache
  blind_when_long       // text: from 45 tokens on several rows miss the first one
};

// A toy engine with a real cache: logits are hashes of the set of (token, position) that a row sees.
class Toy {
 public:
  using token_type = Token;
  static constexpr std::size_t size = 128, words = 50, most = 24;

  /// A deaf one gives the same logits to all rows that see a token from 5 on.
  explicit Toy(Fault fault, float noise = 0, bool deaf = false)
      : fault_(fault), noise_(noise), deaf_(deaf), cache_(std::make_shared<Cache>()) {
    static std::uint64_t made = 0;
    if (fault == Fault::random_results) salt_ = ++made;
  }

  std::size_t vocabulary() const { return words; }
  std::size_t context_size() const { return context_; }
  std::size_t free_slots() const { return fault_ == Fault::slots_lie ? size : size - context_; }
  std::size_t max_rows() const { return most; }
  std::size_t max_logit_rows() const { return most; }

  void truncate(std::size_t n) {
    if (fault_ == Fault::truncate_counts && n > 0) return;
    const std::size_t visible = fault_ == Fault::truncate_more && n > 0   ? n + 1
                                : fault_ == Fault::truncate_none && n > 0 ? cells().size()
                                : fault_ == Fault::reuse_stale && n == 0  ? 1
                                                                          : n;
    cells().resize(std::min(visible, cells().size()));
    context_ = n;
  }

  void prefill(std::span<const Token> tokens) {
    drop();
    std::size_t done = 0;
    for (const Token t : tokens) {
      if (fault_ == Fault::prefill_chunk && done > 0 && done % 16 == 0) cells().erase(cells().begin());
      cells().push_back({t, fault_ == Fault::prefill_restarts ? done : context_});
      ++context_;
      ++done;
    }
  }

  void forward(const TokenTree<Token>& tree) {
    drop();
    const auto rows = static_cast<std::size_t>(tree.size());
    if (fault_ == Fault::limits_lie && rows == most) throw std::runtime_error("the buffer has 23 rows");
    if (rows > most || rows > size - context_) throw std::length_error("too many rows");
    rows_.clear();
    root_ = tree.root();
    std::vector<std::uint64_t> sums;
    for (std::size_t r = 0; r < rows; ++r) {
      std::size_t position = static_cast<std::size_t>(tree.positions()[r]);
      if (fault_ == Fault::position_of_row) position = context_ + r;
      if (fault_ == Fault::position_late) ++position;
      rows_.push_back({tree.tokens()[r], position});
    }
    for (std::size_t r = 0; r < rows; ++r) {
      std::uint64_t sum = salt_;
      bool heard = true;
      for (std::size_t c = misses_first(rows) ? 1 : 0; c < cells().size(); ++c) {
        sum += hash(cells()[c]);
        heard = heard && cells()[c].token < 5;
      }
      for (std::size_t c = 0; c < rows; ++c) {
        bool sees = tree.sees(static_cast<int>(r), static_cast<int>(c));
        if (fault_ == Fault::sees_siblings) sees = c <= r;
        if (fault_ == Fault::sees_last_row && c + 1 == rows) sees = sees || tree.parents()[c] == tree.parents()[r];
        if (fault_ == Fault::blind_to_parent && static_cast<int>(r) > root_)
          sees = sees && tree.parents()[r] != static_cast<int>(c);
        if (fault_ == Fault::blind_to_itself && rows > 1) sees = sees && c != r;
        if (sees) sum += hash(rows_[c]);
        if (sees) heard = heard && rows_[c].token < 5;
      }
      sums.push_back(deaf_ && !heard ? 0 : sum);
    }
    results_.assign(rows, {});
    for (std::size_t i = 0; i < tree.wanted().size(); ++i) {
      const auto row = static_cast<std::size_t>(tree.wanted()[i]);
      std::size_t of = row;
      if (fault_ == Fault::wanted_by_index) of = i;
      if (fault_ == Fault::wanted_neighbour && row > 0) of = row - 1;
      for (std::size_t t = 0; t < words; ++t) {
        float x = static_cast<float>(mix(sums[of] + t) >> 40) * 0x1p-20F;
        x += noise_ * static_cast<float>(mix(sums[of] + rows * 1000 + t) >> 40) * 0x1p-24F;
        results_[row].push_back(x);
      }
      if (fault_ == Fault::logits_nan) results_[row][3] = std::numeric_limits<float>::quiet_NaN();
    }
  }

  std::span<const float> logits(int row) const { return results_[static_cast<std::size_t>(row)]; }

  Token next_token(int row) const {
    std::vector<float> logits = results_[static_cast<std::size_t>(row)];
    auto best = std::ranges::max_element(logits);
    if (fault_ == Fault::best_is_second) {
      *best = -1;
      best = std::ranges::max_element(logits);
    }
    return static_cast<Token>(best - logits.begin());
  }

  std::size_t commit(std::span<const std::int32_t> path) {
    std::size_t n = 0;
    for (std::int32_t row : path) {
      if (fault_ == Fault::commit_first_rows) row = static_cast<std::int32_t>(n);
      Cell cell = rows_[static_cast<std::size_t>(row)];
      if (fault_ == Fault::commit_at_row) cell.position = context_ + static_cast<std::size_t>(row);
      if (fault_ != Fault::commit_short || n == 0 || n + 1 < path.size()) cells().push_back(cell);
      ++n;
    }
    if (fault_ == Fault::commit_leaks)
      for (std::size_t row = 0; row < rows_.size(); ++row)
        if (std::ranges::find(path, static_cast<std::int32_t>(row)) == path.end()) cells().push_back(rows_[row]);
    context_ += n;
    rows_.clear();
    return fault_ == Fault::commit_returns_more ? n + 1 : n;
  }

  Toy fork() const {
    Toy copy = *this;
    if (fault_ != Fault::fork_shares) copy.cache_ = std::make_shared<Cache>(*cache_);
    return copy;
  }

 private:
  struct Cell {
    Token token;
    std::size_t position;
  };
  using Cache = std::vector<Cell>;

  Cache& cells() { return *cache_; }

  bool misses_first(std::size_t rows) const {
    return rows > 1 && (fault_ == Fault::blind_to_context || (fault_ == Fault::blind_when_long && context_ >= 45));
  }

  // Rows that were not committed are forgotten, or not.
  void drop() {
    if (fault_ == Fault::forward_leaks)
      for (const Cell& row : rows_) cells().push_back(row);
    rows_.clear();
  }

  static std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31);
  }
  static std::uint64_t hash(const Cell& c) {
    return mix((static_cast<std::uint64_t>(c.token) + 1) * 0x9E3779B97F4A7C15U + c.position);
  }

  Fault fault_;
  float noise_;
  bool deaf_;
  std::shared_ptr<Cache> cache_;
  std::vector<Cell> rows_;
  std::vector<std::vector<float>> results_;
  std::size_t context_ = 0;
  std::uint64_t salt_ = 0;
  int root_ = 0;
};

}  // namespace

TEST_CASE("each planted fault is named") {
  const struct {
    Fault fault;
    Promise promise;
    const char* says;
  } faults[] = {
      {Fault::sees_siblings, Promise::mask, "which is not its ancestor: it must not see it"},
      {Fault::sees_last_row, Promise::mask, "which is not its ancestor: it must not see it"},
      {Fault::blind_to_parent, Promise::mask, "its ancestor: it must see it"},
      {Fault::blind_to_context, Promise::mask, "token 0 of the context: it must see it"},
      {Fault::blind_to_itself, Promise::mask, "does not change with its own token"},
      {Fault::position_of_row, Promise::positions, "while chains are right"},
      {Fault::position_late, Promise::positions, "in a mere chain"},
      {Fault::wanted_by_index, Promise::wanted, "it gives the results of row"},
      {Fault::wanted_neighbour, Promise::wanted, "gives the results of row"},
      {Fault::commit_first_rows, Promise::commit, "the first rows of the tree instead"},
      {Fault::commit_short, Promise::commit, "lacks the last row of the path"},
      {Fault::commit_returns_more, Promise::commit, "must keep the pending chain"},
      {Fault::commit_at_row, Promise::commit, "differs from a prefill of the same tokens"},
      {Fault::commit_leaks, Promise::drops, "which was rejected"},
      {Fault::forward_leaks, Promise::drops, "a forward that was not committed"},
      {Fault::truncate_more, Promise::truncate, "still visible are the tokens"},
      {Fault::truncate_none, Promise::truncate, "still visible are the tokens"},
      {Fault::truncate_counts, Promise::limits, "after truncate(5)"},
      {Fault::reuse_stale, Promise::reuse, "after truncate(0)"},
      {Fault::prefill_restarts, Promise::prefill, "prefilled as"},
      {Fault::prefill_chunk, Promise::prefill, "prefilled as"},
      {Fault::limits_lie, Promise::limits, "the buffer has 23 rows"},
      {Fault::slots_lie, Promise::limits, "context_size() + free_slots()"},
      {Fault::best_is_second, Promise::results, "next_token()"},
      {Fault::logits_nan, Promise::results, "NaN"},
      {Fault::random_results, Promise::repeats, "given the same calls"},
      {Fault::blind_when_long, Promise::text, "the text forks at token"},
      {Fault::fork_shares, Promise::fork, "changes the model that it came from"},
  };
  for (const auto& [fault, promise, says] : faults) {
    const ConformanceReport report = check_conformance([fault = fault] { return Toy(fault); });
    CAPTURE(report.text());
    CHECK(report.findings.size() >= 1);
    if (report.findings.empty()) continue;
    CHECK(report.findings.front().promise == promise);
    CHECK(report.findings.front().message.find(says) != std::string::npos);
  }
}

TEST_CASE("engines that keep every promise pass") {
  SUBCASE("the toy without a fault") {
    const ConformanceReport report = check_conformance([] { return Toy(Fault::none); });
    CHECK_MESSAGE(report.bit_identical(), report.text());
    CHECK(report.notes.empty());
  }
  SUBCASE("oracles, in each way to read them, and with narrow limits") {
    const OracleOptions wide{.vocabulary = 300, .capacity = 200, .max_rows = 40, .max_logit_rows = 40};
    OracleOptions narrow = wide;
    narrow.max_rows = 7;
    narrow.max_logit_rows = 3;
    narrow.max_kept = 1;
    OracleOptions single = wide;
    single.max_rows = single.max_logit_rows = 1;
    OracleOptions binary = wide;
    binary.vocabulary = 2;
    for (const OracleOptions& options : {wide, narrow, single, binary}) {
      const auto check = [&](const ConformanceReport& report) { CHECK_MESSAGE(report.bit_identical(), report.text()); };
      check(check_conformance([&] { return OracleModel<Token>(options); }));
      check(check_conformance([&] { return OracleModel<Token, Reads::logits>(options); }));
      check(check_conformance([&] { return OracleModel<Token, Reads::top_tokens>(options); }));
      check(check_conformance([&] { return OracleModel<Token, Reads::next_token>(options); }));
    }
    const OracleOptions small{.vocabulary = 200, .capacity = 200};
    CHECK(check_conformance([&] { return OracleModel<std::uint8_t>(small); }).bit_identical());
  }
  SUBCASE("the CPU engine") {
    const engines::GgufFile file(tiny_llama({.width = 32, .heads = 2, .key_heads = 1, .feed = 32, .context = 192}));
    const ConformanceReport report = check_conformance(
        [&] { return engines::LlamaEngine(file, {.max_rows = 32, .threads = 1}); }, {.trees = 4, .rows = 16});
    CHECK_MESSAGE(report.bit_identical(), report.text());
  }
}

TEST_CASE("faults of a model that random tokens do not reach are found with texts that it knows") {
  const ConformanceOptions<Token> known{.prompts = {{0, 3, 1, 4, 2, 2, 0, 1, 3}, {4, 4, 1, 0, 2, 3}}};
  const auto check = [](Fault fault, const ConformanceOptions<Token>& options) {
    return check_conformance([fault] { return Toy(fault, 0, true); }, options);
  };
  const ConformanceReport sound = check(Fault::none, known);
  CHECK_MESSAGE(sound.bit_identical(), sound.text());
  CHECK(check(Fault::commit_first_rows, known).broke(Promise::commit));
  CHECK(check(Fault::position_of_row, known).broke(Promise::positions));
  CHECK(!check(Fault::commit_first_rows, {}).broke(Promise::commit));
  for (const Token strange : {50, -1}) {
    const ConformanceReport report = check(Fault::none, {.prompts = {{1, strange, 2}}});
    CHECK(report.broke(Promise::limits));
    CHECK(report.text().find("token " + std::to_string(strange) + " of a prompt is outside the vocabulary of 50") !=
          std::string::npos);
  }
  // No two different tokens: as without prompts.
  CHECK(check_conformance([] { return Toy(Fault::none); }, ConformanceOptions<Token>{.prompts = {{1, 1}}}).conforms());
}

TEST_CASE("an engine that rounds is measured beside plain decoding itself") {
  const ConformanceReport report = check_conformance([] { return Toy(Fault::none, 1e-3F); });
  CHECK_MESSAGE(report.conforms(), report.text());
  CHECK(!report.bit_identical());
  const Exactness& e = report.exactness;
  CHECK(e.differing > 0);
  CHECK(e.control_differing > 0);
  CHECK(e.largest > 0);
  CHECK(e.largest < 2e-3);
  CHECK(e.texts == 4);
  CHECK(report.text().find("Not bit-identical") != std::string::npos);
}

TEST_CASE("options out of range and models that are too small are refused") {
  const auto make = [] { return OracleModel<Token>(OracleOptions{}); };
  CHECK_THROWS_AS((void)check_conformance(make, {.trees = 0}), InvalidArgument);
  CHECK_THROWS_AS((void)check_conformance(make, {.rows = 257}), InvalidArgument);
  const ConformanceReport report = check_conformance([] { return OracleModel<Token>(OracleOptions{.capacity = 20}); });
  CHECK(report.broke(Promise::limits));
}
