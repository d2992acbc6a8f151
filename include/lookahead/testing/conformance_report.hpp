#pragma once
/// @file conformance_report.hpp
/// What the conformance kit found, and how it says so.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace lookahead::testing {

/// What an engine promises; a finding names the promise that it broke.
enum class Promise : std::uint8_t {
  limits,     ///< context_size, free_slots, max_rows and max_logit_rows tell the truth
  results,    ///< next_token, top_tokens and logits agree with each other
  repeats,    ///< equal calls give equal results
  reuse,      ///< after truncate(0) a second text is as good as a first
  drops,      ///< rows that were not committed leave no trace
  mask,       ///< a row sees the context, its ancestors and itself, and nothing else
  positions,  ///< a row stands at the position that the tree gives it
  wanted,     ///< results are read by the number of the row, whatever else is wanted
  prefill,    ///< one call or several, in one chunk or many: the same context
  commit,     ///< the context grows by the rows of the path, in order
  truncate,   ///< the context keeps its first tokens and nothing else
  fork,       ///< forks have the same context and are independent
  text        ///< decoding differs from plain decoding at near ties at most
};

/// The name of a promise, as in "mask".
[[nodiscard]] constexpr const char* name(Promise promise) {
  constexpr std::array names = {"limits", "results", "repeats", "reuse",    "drops", "mask", "positions",
                                "wanted", "prefill", "commit",  "truncate", "fork",  "text"};
  return names[static_cast<std::size_t>(promise)];
}

/// A promise that was broken: the first case of it in a sentence, and how many there were.
struct Finding {
  Promise promise;
  std::string message;
  std::size_t cases = 1;
};

/// How far the results depend on what else a step evaluates. The control is plain decoding against itself: the last
/// row of a chain of several tokens beside the same token evaluated alone, as a prefill does it in any engine.
/// Differences are those of logits, largest magnitude over the vocabulary; without `logits` they are 0 or infinite.
struct Exactness {
  std::size_t rows = 0;          ///< rows of trees of many sizes, compared with plain decoding
  std::size_t differing = 0;     ///< those whose results differ in any bit
  double largest = 0;            ///< the largest difference
  double gap = 0;                ///< distance of the two best logits at that row
  std::size_t control_rows = 0;  ///< the same for the control
  std::size_t control_differing = 0;
  double control_largest = 0;
  std::size_t texts = 0;           ///< texts decoded plainly, with trees, and in chains
  std::size_t forked = 0;          ///< texts that trees made different
  std::size_t control_forked = 0;  ///< texts that chains made different
  double fork_gap = 0;             ///< the largest distance of the two best logits where trees forked a text
};

/// What the kit found.
struct ConformanceReport {
  std::vector<Finding> findings{};   ///< broken promises; what follows from the first ones is not looked for
  std::vector<std::string> notes{};  ///< what could not be checked, and why
  Exactness exactness{};             ///< measured only where nothing else is wrong

  /// Whether no promise was broken.
  [[nodiscard]] bool conforms() const { return findings.empty(); }

  /// Whether decoding equals plain decoding to the last bit of every logit that was compared.
  [[nodiscard]] bool bit_identical() const {
    return conforms() && exactness.rows > 0 && exactness.differing == 0 && exactness.forked == 0;
  }

  /// Whether a finding is about `promise`.
  [[nodiscard]] bool broke(Promise promise) const {
    return std::ranges::any_of(findings, [&](const Finding& f) { return f.promise == promise; });
  }

  /// The report in sentences, one a line.
  [[nodiscard]] std::string text() const;
};

namespace detail {

/// Where to look, by promise.
[[nodiscard]] constexpr const char* where_to_look(Promise promise) {
  switch (promise) {
    case Promise::limits:
      return "Look at what the engine counts as a cached token, and at the sizes of its buffers.";
    case Promise::results:
      return "Look at the arg-max and the sort: the best first, the lowest token first on ties, no NaN.";
    case Promise::repeats:
      return "Look for memory that is read before it is written, and for sums whose order depends on timing.";
    case Promise::reuse:
      return "Look at truncate(0): what it must reset is whatever a new model starts with.";
    case Promise::drops:
      return "Look at how rows behind the committed context are forgotten before the next forward, and by commit.";
    case Promise::mask:
      return "Look at how the mask is built: row r attends to the context and to the rows c with tree.sees(r, c).";
    case Promise::positions:
      return "Look at where positions come from: row r stands at tree.positions()[r], and siblings stand at the same.";
    case Promise::wanted:
      return "Look at how a row finds its results: tree.wanted()[i] is the row of the i-th result.";
    case Promise::prefill:
      return "Look at where a call or a chunk begins: its positions go on, and it sees all that was cached before.";
    case Promise::commit:
      return "Look at the copy in commit: context slot context_size() + i takes row path[i], for i from 0 upwards.";
    case Promise::truncate:
      return "Look at truncate: the first n tokens stay visible, all later ones must not be.";
    case Promise::fork:
      return "Look at what the copies share: weights may be shared, the cache must be copied.";
    case Promise::text:
      return "Look for what only long texts have: limits, lengths, a cache that fills up. If no prompts were given, "
             "give "
             "some: a model that takes random tokens for noise shows no error with them.";
  }
  return "";
}

[[nodiscard]] inline std::string number(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3g", value);
  return text.data();
}

}  // namespace detail

inline std::string ConformanceReport::text() const {
  std::string out;
  for (const Finding& f : findings) {
    out += std::string(name(f.promise)) + ": " + f.message + (f.message.ends_with('?') ? "" : ".");
    if (f.cases > 1) out += " (" + std::to_string(f.cases) + " cases.)";
    out += std::string(" ") + detail::where_to_look(f.promise) + "\n";
  }
  for (const std::string& n : notes) out += n + "\n";
  if (!conforms()) return out;
  const Exactness& e = exactness;
  out += "No promise of the Model concept was broken.\n";
  const auto share = [](std::size_t part, std::size_t all) {
    return std::to_string(part) + " of " + std::to_string(all);
  };
  if (bit_identical())
    return out + "Bit-identical: " + share(e.rows, e.rows) + " rows of trees of many sizes, and " +
           std::to_string(e.texts) + " texts, equal plain decoding to the last bit.\n";
  out += "Not bit-identical: " + share(e.differing, e.rows) + " rows differ from plain decoding, by " +
         detail::number(e.largest) + " at most, where the two best logits are " + detail::number(e.gap) +
         " apart; plain decoding differs from itself at " + share(e.control_differing, e.control_rows) + " rows, by " +
         detail::number(e.control_largest) + " at most.\n";
  out += "Texts that fork: " + share(e.forked, e.texts) + ", at gaps of " + detail::number(e.fork_gap) +
         " at most; plain decoding at another batch size: " + share(e.control_forked, e.texts) + ".\n";
  return out;
}

}  // namespace lookahead::testing
