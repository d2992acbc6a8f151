#pragma once
/// @file naive_pool.hpp
/// The pool of n-grams and the growth of drafts as maps without bounds: what `NGramPool` must equal as long as nothing
/// is evicted and no fingerprints collide. It shares no code with the library.
///
/// Within a step the caller feeds: `recycle` for the rejected rows in row order, then for the rows of the path, then
/// `add_window` column by column, then `add_text`.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "naive_window.hpp"

namespace naive {

enum class Source { text, generated, window, recycled };

/// What an estimate belongs to.
struct Class {
  int length;  ///< tokens of the context
  Source source;
  int rank;
  friend auto operator<=>(const Class&, const Class&) = default;
};

/// The reach of the root, which stands for certainty, and the largest estimate, as Q0.32 numbers.
constexpr std::uint64_t certain = 0xFFFFFFFFU;
constexpr std::uint64_t largest_estimate = 0xFFFF0000U;

/// The product of two Q0.32 numbers.
constexpr std::uint64_t product(std::uint64_t a, std::uint64_t b) { return a * b >> 32; }

/// How often an entry was filed behind its context, at most 8, and the sum over all of its context and source.
struct Seen {
  int times = 1, of = 1;
  friend bool operator==(const Seen&, const Seen&) = default;
};

/// Of a class at the end of a run of tokens that were the best candidates of their places, for an entry that was seen
/// so often.
using Estimate = std::function<std::uint64_t(const Class&, int run, const Seen& seen)>;

struct Candidate {
  Token token;
  Class its_class;
  Seen seen;
  std::uint64_t q;  ///< the chance that it is the one, given that no better candidate was
};

/// A row of a draft.
struct Draft {
  int parent;  ///< index of the parent in the list of rows, -1 for the root
  int order;   ///< among its parent's candidates
  int depth;   ///< 1 below the root
  std::uint64_t reach;
  int run;      ///< tokens up to it that were the best candidates of their places
  Tokens path;  ///< from the root, root excluded
  Class its_class;
  bool planted;  ///< was there before, and costs nothing
};

class Pool {
 public:
  /// Files the last `count` tokens of `text`, given or generated, each under what stands in front of it.
  void add_text(const Tokens& text, std::size_t count, Source source = Source::text) {
    for (std::size_t i = text.size() - count; i < text.size(); ++i)
      for (const int length : {1, 2, 3, 4, 6, 9, 13}) add(source, text, i, length);
  }

  /// Files every token of an n-gram but the first under the one to three before it.
  void add_window(const Tokens& gram) {
    for (std::size_t i = 1; i < gram.size(); ++i)
      for (const int length : {1, 2, 3}) add(Source::window, gram, i, length);
  }

  /// Files the best tokens of a row; `text` ends with the row's token, and goes back as far as there is context.
  void recycle(const Tokens& text, const Tokens& top) {
    for (const auto& [length, most] : {std::pair{1, 8}, std::pair{2, 4}})
      if (const auto context = ending(text, text.size(), length))
        for (int rank = 0; rank < std::min(most, static_cast<int>(top.size())); ++rank)
          recycled_[*context][rank] = top[static_cast<std::size_t>(rank)];
  }

  /// The candidates behind `text`, best first, each token once, at most 16.
  [[nodiscard]] std::vector<Candidate> candidates(const Tokens& text, const Estimate& estimate, int run) const {
    std::vector<Candidate> all;
    const auto offer = [&](Token token, Class its_class, const Seen& seen) {
      all.push_back({token, its_class, seen, std::min(estimate(its_class, run, seen), largest_estimate)});
    };
    for (const int length : {1, 2, 3, 4, 6, 9, 13}) {
      const auto context = ending(text, text.size(), length);
      if (!context) break;
      for (const Source source : {Source::text, Source::window}) {
        int newer = 0;
        const auto entries = newest_first(source, *context);
        int of = 0;
        for (const auto& [stamp, token, entry] : entries) of += entry.times;
        for (const auto& [stamp, token, entry] : entries)
          offer(token, {length, entry.source, std::min(newer++, 7)}, {entry.times, of});
      }
      if (const auto found = recycled_.find(*context); found != recycled_.end())
        for (const auto& [rank, token] : found->second) offer(token, {length, Source::recycled, rank}, {});
    }
    const auto key = [](const Candidate& c) {
      return std::tuple(~c.q, -c.its_class.length, c.its_class.source, c.its_class.rank, c.token);
    };
    std::sort(all.begin(), all.end(), [&](const Candidate& a, const Candidate& b) { return key(a) < key(b); });

    std::vector<Candidate> best;
    for (const Candidate& c : all) {
      const bool known = std::any_of(best.begin(), best.end(), [&](const Candidate& b) { return b.token == c.token; });
      if (!known && best.size() < 16) best.push_back(c);
    }
    return best;
  }

  /// The `rows` rows of the largest reach below the root, which is the last token of `text`, best first. Rows in
  /// `planted` (paths from the root) are taken wherever a candidate meets them, and do not count. The text ends with a
  /// run of `root_run`.
  [[nodiscard]] std::vector<Draft> grow(const Tokens& text, int root_run, int rows, int max_depth,
                                        const Estimate& estimate, const std::map<Tokens, bool>& planted = {}) const {
    std::vector<Draft> taken, open;
    // Rows of one depth are in order of their parents, then of the candidates.
    const std::function<bool(const Draft&, const Draft&)> in_front = [&](const Draft& a, const Draft& b) {
      if (a.parent == b.parent) return a.order < b.order;
      return in_front(taken[static_cast<std::size_t>(a.parent)], taken[static_cast<std::size_t>(b.parent)]);
    };
    const auto before = [&](const Draft& a, const Draft& b) {
      if (a.reach != b.reach) return a.reach > b.reach;
      return a.depth != b.depth ? a.depth < b.depth : in_front(a, b);
    };
    // Every candidate takes its part of what the better ones left over of the parent's reach.
    const auto expand = [&](int parent, std::uint64_t reach, int run, const Tokens& path) {
      if (static_cast<int>(path.size()) == max_depth) return;
      Tokens whole = text;
      whole.insert(whole.end(), path.begin(), path.end());
      int order = 0;
      for (const Candidate& c : candidates(whole, estimate, run)) {
        Draft child{
            parent,      order, static_cast<int>(path.size()) + 1, product(reach, c.q), order == 0 ? run + 1 : 0, path,
            c.its_class, false};
        ++order;
        reach -= child.reach;
        child.path.push_back(c.token);
        child.planted = planted.count(child.path) > 0;
        if (child.reach > 0) open.push_back(child);
      }
    };
    expand(-1, certain, root_run, {});
    while (!open.empty()) {
      const auto best = std::min_element(open.begin(), open.end(), before);
      const Draft row = *best;
      open.erase(best);
      if (!row.planted && rows == 0) continue;
      rows -= row.planted ? 0 : 1;
      taken.push_back(row);
      expand(static_cast<int>(taken.size()) - 1, row.reach, row.run, row.path);
    }
    return taken;
  }

  /// What a row teaches the estimates, when `selected` was selected at it: a class, how often its entry was seen, and a
  /// miss (false) for every candidate in front of the one that carries `selected`, a hit (true) for that one.
  [[nodiscard]] std::vector<std::tuple<Class, Seen, bool>> score(const Tokens& text, Token selected,
                                                                 const Estimate& estimate, int run) const {
    std::vector<std::tuple<Class, Seen, bool>> scored;
    for (const Candidate& c : candidates(text, estimate, run)) {
      scored.emplace_back(c.its_class, c.seen, c.token == selected);
      if (c.token == selected) break;
    }
    return scored;
  }

  /// The guesses of the published shape behind the token `root`: of all chains of up to n - 1 tokens, each looked up
  /// under the longest context of each source that does not reach behind the root, the `g` whose last token was filed
  /// last.
  [[nodiscard]] std::vector<Tokens> guesses(Token root, int n, int g) const {
    std::vector<std::pair<std::uint64_t, Tokens>> leaves;
    const std::function<void(const Tokens&, std::uint64_t)> visit = [&](const Tokens& chain, std::uint64_t stamp) {
      std::map<Token, std::uint64_t> next;
      if (static_cast<int>(chain.size()) < n)
        for (const Source source : {Source::text, Source::window}) {
          int longest = 1;
          for (const int length : {2, 3, 4, 6, 9, 13})
            if (static_cast<std::size_t>(length) <= chain.size() && (source == Source::text || length <= 3))
              longest = length;
          for (const auto& [when, token, entry] : newest_first(source, *ending(chain, chain.size(), longest)))
            next[token] = std::max(next[token], when);
        }
      if (next.empty() && chain.size() > 1) leaves.emplace_back(stamp, Tokens(chain.begin() + 1, chain.end()));
      for (const auto& [token, when] : next) {
        Tokens longer = chain;
        longer.push_back(token);
        visit(longer, when);
      }
    };
    visit({root}, 0);
    std::stable_sort(leaves.begin(), leaves.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    std::vector<Tokens> best;
    for (std::size_t i = 0; i < std::min(leaves.size(), static_cast<std::size_t>(g)); ++i)
      best.push_back(leaves[i].second);
    return best;
  }

 private:
  // The `length` tokens before `end`, if there are so many.
  static std::optional<Tokens> ending(const Tokens& text, std::size_t end, int length) {
    if (end < static_cast<std::size_t>(length)) return std::nullopt;
    const auto last = text.begin() + static_cast<std::ptrdiff_t>(end);
    return Tokens(last - length, last);
  }

  void add(Source source, const Tokens& text, std::size_t i, int length) {
    const auto context = ending(text, i, length);
    if (!context) return;
    Entry& entry = entries_[{source == Source::generated ? Source::text : source, *context}][text[i]];
    entry = {++now_, std::min(entry.times + 1, 8), source};
  }

  struct Entry {
    std::uint64_t stamp = 0;
    int times = 0;
    Source source{};  ///< that filed it last
    friend auto operator<=>(const Entry&, const Entry&) = default;
  };

  /// (stamp, token, entry); all texts are one source, Source::text.
  [[nodiscard]] std::vector<std::tuple<std::uint64_t, Token, Entry>> newest_first(Source source,
                                                                                  const Tokens& context) const {
    std::vector<std::tuple<std::uint64_t, Token, Entry>> entries;
    if (const auto found = entries_.find({source, context}); found != entries_.end())
      for (const auto& [token, entry] : found->second) entries.emplace_back(entry.stamp, token, entry);
    std::sort(entries.rbegin(), entries.rend());
    return entries;
  }

  std::uint64_t now_ = 0;
  std::map<std::pair<Source, Tokens>, std::map<Token, Entry>> entries_;
  std::map<Tokens, std::map<int, Token>> recycled_;
};

}  // namespace naive
