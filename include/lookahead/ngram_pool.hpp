#pragma once
/// @file ngram_pool.hpp
/// One bounded table for every source of n-grams.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lookahead/detail/bits.hpp"
#include "lookahead/detail/config.hpp"
#include "lookahead/errors.hpp"
#include "lookahead/estimates.hpp"
#include "lookahead/group.hpp"

namespace lookahead {

/// A hash of the last tokens of a path, extended from the newest token backwards.
class ContextHash {
 public:
  /// Adds the token in front of those so far.
  LOOKAHEAD_HD constexpr void push(std::uint32_t token) {
    state_ = (state_ ^ token) * 0x9E3779B97F4A7C15U;
    state_ ^= state_ >> 32;
    ++length_;
  }
  /// Tokens so far.
  [[nodiscard]] LOOKAHEAD_HD constexpr int length() const { return length_; }
  /// The hash of (length, tokens).
  [[nodiscard]] LOOKAHEAD_HD constexpr std::uint64_t value() const {
    return detail::mixed(state_ + static_cast<std::uint64_t>(length_) * 0xD1B54A32D192ED03U);
  }

 private:
  std::uint64_t state_ = 0x2545F4914F6CDD1DU;
  int length_ = 0;
};

/// The hashes of the contexts that end at a place in a text, shortest first; returns how many there are. `back(t)`
/// gives the token before the last one that it gave, the newest first, and false where there is none.
template <class Back>
LOOKAHEAD_HD int hash_contexts(const Back& back, std::uint64_t* out) {
  ContextHash hash;
  int count = 0;
  for (std::uint32_t t = 0; count < context_length_count && back(t);) {
    hash.push(t);
    if (hash.length() == context_length(count)) out[count++] = hash.value();
  }
  return count;
}

/// 32 slots as planes, so that 32 lanes read a plane as one 128-byte line. A key is the fingerprint of a context (27
/// bits), the source (2; of texts the one that filed it last), and in the last three bits, for recycled entries the
/// rank, for others how often they were filed beyond the first time, at most 7. A slot whose stamp is at or below the
/// floor is empty.
struct alignas(128) PoolSet {
  static constexpr int slots = 32;
  static constexpr std::uint32_t fingerprint_mask = ~31U, last_bits = 7;
  static constexpr std::uint32_t generated_bit = 8;  ///< where texts differ
  static_assert(static_cast<int>(Source::text) == 0 && static_cast<int>(Source::generated) == 1);
  std::uint32_t key[slots], token[slots], stamp[slots];

  [[nodiscard]] static LOOKAHEAD_HD constexpr Source source_of(std::uint32_t key) {
    return static_cast<Source>(key >> 3 & 3);
  }
  /// The bits in which keys of one context and such a source are alike.
  [[nodiscard]] static LOOKAHEAD_HD constexpr std::uint32_t mask_of(Source source) {
    return is_text(source) ? ~(last_bits | generated_bit) : ~last_bits;
  }
};

/// What a look-up finds.
struct PoolFind {
  Source source;
  int rank;  ///< of recycled entries the one they were filed with, of others their recency among those of the context
             ///< and source (texts are one): 0 for the newest, at most 7
  int seen;  ///< how often the entry was filed, at most 8; recycled entries: 1
  int of;    ///< the sum of `seen` over all entries of the context and source (texts are one); recycled entries: 1
  std::uint32_t token, stamp;
};

/// One thing to file: `count` tokens behind the context with hash `context`. Text and window: one token. Recycled: the
/// best tokens, best first.
struct PoolInsert {
  std::uint64_t context;
  Source source;
  int count;  ///< 0 files nothing
  std::uint32_t token[8];
};

/// `now` is the stamp of the newest entry. A pool whose stamps go beyond `last_stamp` is emptied.
struct PoolClock {
  static constexpr std::uint32_t last_stamp = 0xF0000000U;
  std::uint32_t now, floor;
};

/// How the memory of a private pool is reached: plainly. `PoolRef` says what an access does.
struct PrivateAccess {
  [[nodiscard]] LOOKAHEAD_HD static std::uint64_t place(std::uint64_t context) { return context; }
  template <class Tile>
  [[nodiscard]] LOOKAHEAD_HD static const Tile& words(const Tile& tile) {
    return tile;
  }
  [[nodiscard]] LOOKAHEAD_HD static bool admits(std::uint32_t) { return true; }
  [[nodiscard]] LOOKAHEAD_HD static bool enter(std::uint32_t, const PoolClock&, std::uint32_t) { return true; }
  LOOKAHEAD_HD static void leave(std::uint32_t) {}
  LOOKAHEAD_HD static void advance(PoolClock& clock, std::uint32_t now, std::uint32_t count) {
    clock.now = now + count;
  }
  LOOKAHEAD_GROUP_FN template <class Gr>
  LOOKAHEAD_HD static void empty(const Gr& g, PoolSet* sets, std::uint32_t set_count, PoolClock& clock) {
    for (std::uint32_t s = static_cast<std::uint32_t>(g.rank()); s < set_count;
         s += static_cast<std::uint32_t>(g.size()))
      for (std::uint32_t& stamp : sets[s].stamp) stamp = 0;
    g.sync();
    if (g.rank() == 0) clock = {0, 0};
    g.sync();
  }
};

/// A pool as algorithms see it, on a host or a device: a trivially copyable reference; `NGramPool` or `SharedNGramPool`
/// owns the memory. An access has, besides what it may know:
/// 1. `place(context)`: the hash under which a context is filed.
/// 2. `words(tile)`: the tile through which all words of the pool are read and written.
/// 3. `admits(token)`: whether a look-up may give a token.
/// 4. `enter(set, clock, stamp)` comes before the writes of one insertion, `leave(set)` behind them; where it is false,
/// nothing is filed.
/// 5. `advance(clock, now, count)`: `count` stamps behind `now` are used; one thread of a group calls it.
/// 6. `empty(group, sets, set_count, clock)` takes all entries away, so that stamps begin anew.
template <class Access>
struct PoolRef {
  using Clock = PoolClock;
  static constexpr std::uint32_t last_stamp = Clock::last_stamp;

  PoolSet* sets;
  std::uint32_t set_count;
  Clock* clock;
  [[no_unique_address]] Access access{};

  /// The number of the set in which a context is filed.
  LOOKAHEAD_GROUP_FN [[nodiscard]] LOOKAHEAD_HD std::uint32_t set_of(std::uint64_t context) const {
    return index(access.place(context));
  }

  /// Announces a look-up: those that are announced together wait for memory together.
  LOOKAHEAD_GROUP_FN template <class Tile>
  LOOKAHEAD_HD void prefetch(const Tile& tile, std::uint64_t context) const {
    tile.prefetch(sets[set_of(context)].key);
  }

  /// Files one thing with a stamp that is newer than all others. Entries are equal when context, source and token are,
  /// texts being one source (for recycled entries: context, source and rank). An equal entry gets the new stamp and is
  /// counted, else an empty slot is taken, the first one, so that a pool that was reset fills as a new one does; else
  /// the oldest entry of the set goes. O(1).
  LOOKAHEAD_GROUP_FN template <class Tile>
  LOOKAHEAD_HD void insert(const Tile& tile, const PoolInsert& what, std::uint32_t stamp) const {
    const std::uint64_t context = access.place(what.context);
    const std::uint32_t which = index(context);
    if (!access.enter(which, *clock, stamp)) return;
    const auto& words = access.words(tile);
    PoolSet& set = sets[which];
    std::uint32_t full = words.greater(set.stamp, words.load(&clock->floor));
    for (int rank = 0; rank < what.count; ++rank) {
      const bool recycled = what.source == Source::recycled;
      std::uint32_t k = key(context, what.source, recycled ? rank : 0);
      const std::uint32_t mask = recycled ? ~0U : PoolSet::mask_of(what.source);
      std::uint32_t same = words.match(set.key, mask, k & mask) & full;
      if (same != 0 && !recycled) same &= words.match(set.token, ~0U, what.token[rank]);
      const int lane = same != 0 ? detail::lowest(same) : full != ~0U ? detail::lowest(~full) : words.oldest(set.stamp);
      if (same != 0 && !recycled) {
        const std::uint32_t more = words.load(&set.key[lane]) & PoolSet::last_bits;
        k |= more < PoolSet::last_bits ? more + 1 : more;
      }
      full |= 1U << lane;
      words.store(&set.key[lane], k);
      words.store(&set.token[lane], what.token[rank]);
      words.store(&set.stamp[lane], stamp);
    }
    access.leave(which);
  }

  /// Calls visit(find), a `PoolFind`, for every entry of a context; `wants(seen, of)` leaves out entries at less cost
  /// than `visit` could. O(1).
  LOOKAHEAD_GROUP_FN template <class Tile, class Wants, class Visit>
  LOOKAHEAD_HD void for_each(const Tile& tile, std::uint64_t context, const Wants& wants, const Visit& visit) const {
    const std::uint64_t placed = access.place(context);
    const PoolSet& set = sets[index(placed)];
    const auto& words = access.words(tile);
    const std::uint32_t lanes = words.match(set.key, PoolSet::fingerprint_mask,
                                            static_cast<std::uint32_t>(placed) & PoolSet::fingerprint_mask) &
                                words.greater(set.stamp, words.load(&clock->floor));
    // 16 bits a source; an entry that is alone needs none
    const auto bits_of = [](std::uint32_t k) {
      const Source source = PoolSet::source_of(k);
      return is_text(source) ? 0 : static_cast<int>(source) * 16;
    };
    std::uint64_t sums = 0;
    for (std::uint32_t left = (lanes & (lanes - 1)) != 0 ? lanes : 0; left != 0; left &= left - 1) {
      const std::uint32_t k = words.load(&set.key[detail::lowest(left)]);
      sums += std::uint64_t{1 + (k & PoolSet::last_bits)} << bits_of(k);
    }
    const auto seen = [](std::uint32_t k) { return is_recycled(k) ? 1 : 1 + static_cast<int>(k & PoolSet::last_bits); };
    const auto of = [&](std::uint32_t k) {
      const int sum = is_recycled(k) ? 1 : static_cast<int>(sums >> bits_of(k) & 0xFFFF);
      return sum > seen(k) ? sum : seen(k);  // another thread may have changed the set meanwhile
    };
    visit_lanes(
        tile, set, lanes, [&](std::uint32_t k) { return wants(seen(k), of(k)); },
        [&](std::uint32_t k, int rank, std::uint32_t token, std::uint32_t stamp) {
          visit(PoolFind{PoolSet::source_of(k), rank, seen(k), of(k), token, stamp});
        });
  }
  LOOKAHEAD_GROUP_FN template <class Tile, class Visit>
  LOOKAHEAD_HD void for_each(const Tile& tile, std::uint64_t context, const Visit& visit) const {
    for_each(
        tile, context, [](int, int) { return true; }, visit);
  }

  /// Calls visit(key, rank, token, stamp) for every entry of set number `set`; see PoolSet and PoolFind. O(1).
  LOOKAHEAD_GROUP_FN template <class Tile, class Visit>
  LOOKAHEAD_HD void for_each_in(const Tile& tile, std::uint32_t set, const Visit& visit) const {
    const auto& words = access.words(tile);
    const std::uint32_t lanes = words.greater(sets[set].stamp, words.load(&clock->floor));
    visit_lanes(
        tile, sets[set], lanes, [](std::uint32_t) { return true; }, visit);
  }

  /// Files `count` things in order, by all threads of the group; a set belongs to one tile, which keeps the order.
  /// At most 2^16 things.
  LOOKAHEAD_GROUP_FN template <class Gr>
  LOOKAHEAD_HD void insert_all(const Gr& g, const PoolInsert* what, int count) const {
    const auto tile = g.tile();
    const auto& words = access.words(tile);
    if (words.load(&clock->now) > last_stamp) access.empty(g, sets, set_count, *clock);
    const std::uint32_t now = words.load(&clock->now);
    const auto mine = [&](int i) {
      return what[i].count != 0 && set_of(what[i].context) % static_cast<std::uint32_t>(tile.count()) ==
                                       static_cast<std::uint32_t>(tile.rank());
    };
    const int ahead = 8 * tile.count() < count ? 8 * tile.count() : count;  // about 8 of a tile's own
    for (int i = -ahead; i < count; ++i) {
      if (i + ahead < count && mine(i + ahead)) {
        const PoolSet& set = sets[set_of(what[i + ahead].context)];
        tile.prefetch(set.key);
        tile.prefetch(set.token);
        tile.prefetch(set.stamp);
      }
      if (i >= 0 && mine(i)) insert(tile, what[i], now + 1 + static_cast<std::uint32_t>(i));
    }
    g.sync();
    if (g.rank() == 0) access.advance(*clock, now, static_cast<std::uint32_t>(count));
    g.sync();
  }

 private:
  [[nodiscard]] static LOOKAHEAD_HD bool is_recycled(std::uint32_t key) {
    return PoolSet::source_of(key) == Source::recycled;
  }
  // `lanes`: full ones, and with each all that share its context.
  LOOKAHEAD_GROUP_FN template <class Tile, class Wants, class Visit>
  LOOKAHEAD_HD void visit_lanes(const Tile& tile, const PoolSet& set, std::uint32_t lanes, const Wants& wants,
                                const Visit& visit) const {
    const auto& words = access.words(tile);
    for (std::uint32_t left = lanes; left != 0; left &= left - 1) {
      const int lane = detail::lowest(left);
      const std::uint32_t k = words.load(&set.key[lane]);
      if (!wants(k)) continue;
      const std::uint32_t stamp = words.load(&set.stamp[lane]);
      int rank = static_cast<int>(k & PoolSet::last_bits);
      if (!is_recycled(k)) {
        const std::uint32_t mask = PoolSet::mask_of(PoolSet::source_of(k));
        const std::uint32_t same = words.match(set.key, mask, k & mask) & lanes;
        const int newer = detail::count_of(same & words.greater(set.stamp, stamp));
        rank = newer < 7 ? newer : 7;
      }
      const std::uint32_t token = words.load(&set.token[lane]);
      if (access.admits(token)) visit(k, rank, token, stamp);
    }
  }
  [[nodiscard]] LOOKAHEAD_HD std::uint32_t index(std::uint64_t placed) const {
    return static_cast<std::uint32_t>(((placed >> 32) * set_count) >> 32);
  }
  [[nodiscard]] static LOOKAHEAD_HD std::uint32_t key(std::uint64_t placed, Source source, int rank) {
    return (static_cast<std::uint32_t>(placed) & PoolSet::fingerprint_mask) | static_cast<std::uint32_t>(source) << 3 |
           static_cast<std::uint32_t>(rank);
  }
};

using NGramPoolRef = PoolRef<PrivateAccess>;

/// The newest tokens of a text, as far back as the longest context reaches.
template <class Token>
struct TextTail {
  Token token[max_context_length];  ///< oldest first
  std::int32_t count;
};

/// Working memory of `file_text`.
template <class Token>
struct TextScratch {
  static constexpr int chunk = 32;
  Token text[max_context_length + chunk];
  PoolInsert inserts[chunk * context_length_count];
};

/// Files `count` tokens that follow the text that ends in `tail`, each under its contexts, in order; moves `tail`
/// along. `source` is one of the texts.
LOOKAHEAD_GROUP_FN template <class Gr, class Pool, class Token>
LOOKAHEAD_HD void file_text(const Gr& g, const Pool& pool, TextTail<Token>& tail, const Token* tokens, int count,
                            TextScratch<Token>& scratch, Source source = Source::text) {
  for (int done = 0; done < count; done += TextScratch<Token>::chunk) {
    const int before = tail.count;
    const int m = count - done < TextScratch<Token>::chunk ? count - done : TextScratch<Token>::chunk;
    for (int i = g.rank(); i < before + m; i += g.size())
      scratch.text[i] = i < before ? tail.token[i] : tokens[done + i - before];
    g.sync();
    for (int i = g.rank(); i < m; i += g.size()) {
      std::uint64_t contexts[context_length_count];
      int j = before + i;
      const int found = hash_contexts(
          [&](std::uint32_t& t) {
            if (j == 0) return false;
            t = static_cast<std::uint32_t>(scratch.text[--j]);
            return true;
          },
          contexts);
      for (int k = 0; k < context_length_count; ++k) {
        PoolInsert& insert = scratch.inserts[i * context_length_count + k];
        insert.count = k < found ? 1 : 0;
        if (k >= found) continue;
        insert.context = contexts[k];
        insert.source = source;
        insert.token[0] = static_cast<std::uint32_t>(scratch.text[before + i]);
      }
    }
    g.sync();
    pool.insert_all(g, scratch.inserts, m * context_length_count);
    if (g.rank() == 0) {
      tail.count = before + m < max_context_length ? before + m : max_context_length;
      for (int i = 0; i < tail.count; ++i) tail.token[i] = scratch.text[before + m - tail.count + i];
    }
    g.sync();
  }
}

/// What `Lookahead` drafts from: an `NGramPool`, or a view of a `SharedNGramPool`. 1. `ref()` is a `PoolRef`.
template <class P, class Token>
concept PoolOf = std::same_as<typename std::remove_cvref_t<P>::token_type, Token> && requires(P& pool) {
  pool.ref();
};

/// Files a text that is independent of all others, on this thread. O(text.size()), no allocation.
template <class Access, class Token>
void add_text_to(const PoolRef<Access>& pool, std::span<const Token> text) noexcept {
  TextTail<Token> tail{};
  TextScratch<Token> scratch;
  constexpr std::size_t piece = std::size_t{1} << 30;
  for (; !text.empty(); text = text.subspan(text.size() < piece ? text.size() : piece))
    file_text(SerialGroup{}, pool, tail, text.data(), static_cast<int>(text.size() < piece ? text.size() : piece),
              scratch);
}

/// The memory of a pool.
struct PoolMemory {
  static constexpr std::size_t default_slots = std::size_t{1} << 17, max_slots = std::size_t{1} << 31;
  std::vector<PoolSet> sets;
  PoolClock clock{0, 0};

  /// Empty, with room for at least `slots` entries. Throws InvalidArgument if `slots` is 0 or above `max_slots`.
  static PoolMemory of(std::size_t slots) {
    if (slots == 0 || slots > max_slots)
      throw InvalidArgument("a pool of " + std::to_string(slots) + " slots: pass 1 to " + std::to_string(max_slots));
    return {std::vector<PoolSet>((slots + PoolSet::slots - 1) / PoolSet::slots)};
  }
};

/// A bounded table of n-grams from every source, private to one request: an n-gram is filed under its first tokens (the
/// *context*) and gives the next token. `Lookahead` fills and reads it; a caller may add texts of its own.
///
/// Set-associative: the hash of (context length, context) picks a set of 32 slots, and the oldest entry of a full set
/// goes. It allocates at construction only. An entry that misleads costs at most a wasted row, never a wrong token.
template <class Token = std::int32_t>
class NGramPool {
  static_assert(sizeof(Token) <= 4, "Tokens have at most 32 bits: map yours to an integer of that size.");

 public:
  using token_type = Token;
  static constexpr std::size_t default_slots = PoolMemory::default_slots, max_slots = PoolMemory::max_slots;

  /// A pool of at least `slots` entries, 12 bytes each; rounded up to a multiple of 32.
  /// Throws InvalidArgument if `slots` is 0 or above `max_slots`.
  explicit NGramPool(std::size_t slots = default_slots) : memory_(PoolMemory::of(slots)) {}

  /// A pool that holds what another one held: see `load_pool`. Precondition: 1 <= sets <= max_slots / 32.
  explicit NGramPool(PoolMemory memory) : memory_(std::move(memory)) {}

  /// Number of entries that fit.
  [[nodiscard]] std::size_t slots() const { return memory_.sets.size() * PoolSet::slots; }

  /// Forgets everything. O(1).
  void reset() noexcept { memory_.clock.floor = memory_.clock.now; }

  /// Files a text that is independent of all others, a corpus for example. O(text.size()), no allocation.
  /// Precondition: the tokens are in the vocabulary of every model that drafts from this pool (`Decoder::add_text`
  /// checks).
  void add_text(std::span<const Token> text) noexcept { add_text_to(ref(), text); }

  /// What the algorithms work on. Valid while this pool lives and is not moved from or assigned to.
  [[nodiscard]] NGramPoolRef ref() noexcept {
    return {memory_.sets.data(), static_cast<std::uint32_t>(memory_.sets.size()), &memory_.clock};
  }

  /// A copy of set i, and the clock, to save them. Precondition: i < slots() / 32.
  [[nodiscard]] PoolSet set(std::size_t i) const noexcept { return memory_.sets[i]; }
  [[nodiscard]] PoolClock clock() const noexcept { return memory_.clock; }

 private:
  PoolMemory memory_;
};

}  // namespace lookahead
