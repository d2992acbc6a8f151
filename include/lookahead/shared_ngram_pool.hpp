#pragma once
/// @file shared_ngram_pool.hpp
/// A pool of n-grams that many requests use at once, each on a thread of its own.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lookahead/errors.hpp"
#include "lookahead/group.hpp"
#include "lookahead/ngram_pool.hpp"

#if defined(__SSE2__) && !defined(__CUDA_ARCH__)
#include <emmintrin.h>
#endif

namespace lookahead {

/// Words that other threads read and write meanwhile: each is what somebody wrote, but two of them may not belong
/// together.
struct RelaxedWords {
  [[nodiscard]] static std::uint32_t load(const std::uint32_t* word) {
    return std::atomic_ref(*const_cast<std::uint32_t*>(word)).load(std::memory_order_relaxed);
  }
  static void store(std::uint32_t* word, std::uint32_t value) {
    std::atomic_ref(*word).store(value, std::memory_order_relaxed);
  }
#if defined(__SSE2__) && !defined(__CUDA_ARCH__)
  [[nodiscard]] static __m128i load_four(const std::uint32_t* words) {
    const auto lane = [&](int i) { return static_cast<int>(load(words + i)); };
    return _mm_set_epi32(lane(3), lane(2), lane(1), lane(0));
  }
#endif
};

/// How the memory of a shared pool is reached: by relaxed atomic words, with a lock for each set that writers take. No
/// one waits: a reader takes what it finds, a writer that finds a set locked files nothing. For groups of one thread.
struct SharedAccess {
  std::uint64_t name_space;  ///< even; 0 leaves contexts as they are
  std::uint32_t* locks;      ///< one a set; 1 while somebody writes
  std::uint32_t last_token;  ///< the largest that a look-up may give

  /// One to one, because bit i of the product depends on lower bits of the context alone.
  [[nodiscard]] std::uint64_t place(std::uint64_t context) const { return context ^ ((context | 1) * name_space); }

  template <class Tile>
  [[nodiscard]] static HostTile<RelaxedWords> words(const Tile& tile) {
    return {tile.rank(), tile.count()};
  }

  [[nodiscard]] bool admits(std::uint32_t token) const { return token <= last_token; }

  [[nodiscard]] bool enter(std::uint32_t set, const PoolClock& clock, std::uint32_t stamp) const {
    if (!try_lock(set)) return false;
    // A stamp that was taken before stamps began anew would make an entry that is never the oldest.
    const std::uint32_t now = RelaxedWords::load(&clock.now);
    if (stamp <= now || stamp - now < PoolClock::last_stamp / 2) return true;
    leave(set);
    return false;
  }

  void leave(std::uint32_t set) const { std::atomic_ref(locks[set]).store(0, std::memory_order_release); }

  static void advance(PoolClock& clock, std::uint32_t, std::uint32_t count) {
    std::atomic_ref(clock.now).fetch_add(count, std::memory_order_relaxed);
  }

  template <class Gr>
  void empty(const Gr&, PoolSet* sets, std::uint32_t set_count, PoolClock& clock) const {
    static_assert(std::is_same_v<Gr, SerialGroup>, "A shared pool serves requests that run on one thread each.");
    // One thread wins; what the others file meanwhile may go with the rest.
    std::uint32_t now = RelaxedWords::load(&clock.now);
    if (now <= PoolClock::last_stamp || !std::atomic_ref(clock.now).compare_exchange_strong(now, 0)) return;
    for (std::uint32_t s = 0; s < set_count; ++s) {
      while (!try_lock(s)) {
      }
      for (std::uint32_t& stamp : sets[s].stamp) RelaxedWords::store(&stamp, 0);
      leave(s);
    }
    std::atomic_ref(clock.floor).store(0);  // in one order with what `reset` does
  }

 private:
  [[nodiscard]] bool try_lock(std::uint32_t set) const {
    return std::atomic_ref(locks[set]).exchange(1, std::memory_order_acquire) == 0;
  }
};

/// A pool that many requests use at once, each on a thread of its own, each through a view. The table is that of
/// `NGramPool`. No call waits for another thread: a reader that meets a writer may take a token for the continuation of
/// a context that it does not follow, which costs a wasted row and never a wrong token; a writer that meets another one
/// in the same set of 32 slots leaves its entry out. Memory: 12 bytes a slot and 4 a set, allocated at construction.
///
/// The text of every request equals plain decoding's. Which guesses it gets, and so how many steps it takes, depends on
/// what other requests have filed: where requests must not learn of each other, their timing included, give each of
/// them a namespace of its own, or a private pool.
///
/// All members but construction, assignment and moves may be called from several threads at once.
template <class Token = std::int32_t>
class SharedNGramPool {
  static_assert(sizeof(Token) <= 4, "Tokens have at most 32 bits: map yours to an integer of that size.");

 public:
  using token_type = Token;
  static constexpr std::size_t default_slots = PoolMemory::default_slots, max_slots = PoolMemory::max_slots;

  /// The part of a pool that a request sees: one namespace. A copy is another view of the same. Valid while the pool
  /// lives and is not moved from or assigned to.
  class View {
   public:
    using token_type = Token;

    /// Files a text that is independent of all others. O(text.size()), no allocation. Precondition: the tokens are in
    /// the vocabulary (`Decoder::add_text` checks).
    void add_text(std::span<const Token> text) const noexcept { add_text_to(ref_, text); }

    /// Look-ups give tokens in [0, vocabulary()) only.
    [[nodiscard]] std::size_t vocabulary() const noexcept { return std::size_t{ref_.access.last_token} + 1; }

    /// What the algorithms work on.
    [[nodiscard]] PoolRef<SharedAccess> ref() const noexcept { return ref_; }

   private:
    friend SharedNGramPool;
    explicit View(const PoolRef<SharedAccess>& ref) : ref_(ref) {}
    PoolRef<SharedAccess> ref_;
  };

  /// A pool of at least `slots` entries; rounded up to a multiple of 32.
  /// Throws InvalidArgument if `slots` is 0 or above `max_slots`.
  explicit SharedNGramPool(std::size_t slots = default_slots) : SharedNGramPool(PoolMemory::of(slots)) {}

  /// A pool that holds what another one held: see `load_pool`. Precondition: 1 <= sets <= max_slots / 32.
  explicit SharedNGramPool(PoolMemory memory) : memory_(std::move(memory)), locks_(memory_.sets.size()) {}

  SharedNGramPool(SharedNGramPool&&) noexcept = default;
  SharedNGramPool& operator=(SharedNGramPool&&) noexcept = default;

  /// The view of a namespace. A key stands for what must not mix: a model, an adapter, a tenant, or a hash of them; 0
  /// is one like the others, and the one of a private pool's file. Entries of another namespace are seen only where
  /// hashes collide, in a full pool in about one look-up of 4 million. `vocabulary` is the model's number of tokens:
  /// models of different sizes may use one pool. Throws InvalidArgument for a vocabulary of 0 or above 2^32.
  [[nodiscard]] View in(std::uint64_t name_space, std::size_t vocabulary) {
    if (vocabulary == 0 || vocabulary > std::size_t{1} << 32)
      throw InvalidArgument("a vocabulary of " + std::to_string(vocabulary) +
                            " tokens: pass the model's, 1 to 4294967296");
    return View(
        {memory_.sets.data(),
         static_cast<std::uint32_t>(memory_.sets.size()),
         &memory_.clock,
         {detail::mixed(name_space) & ~std::uint64_t{1}, locks_.data(), static_cast<std::uint32_t>(vocabulary - 1)}});
  }

  /// Number of entries that fit.
  [[nodiscard]] std::size_t slots() const noexcept { return memory_.sets.size() * PoolSet::slots; }

  /// Forgets everything, in all namespaces; what other threads file at the same moment may stay. O(1).
  void reset() noexcept {
    // Stamps may begin anew between the load and the store: a floor ahead of them would hide all that is filed.
    const std::atomic_ref now(memory_.clock.now), floor(memory_.clock.floor);
    do {
      floor = now.load();
    } while (floor > now);
  }

  /// A copy of set i, and the clock, to save them. Precondition: i < slots() / 32.
  [[nodiscard]] PoolSet set(std::size_t i) const noexcept {
    const PoolSet& from = memory_.sets[i];
    PoolSet copy;
    for (int lane = 0; lane < PoolSet::slots; ++lane) {
      copy.key[lane] = RelaxedWords::load(&from.key[lane]);
      copy.token[lane] = RelaxedWords::load(&from.token[lane]);
      copy.stamp[lane] = RelaxedWords::load(&from.stamp[lane]);
    }
    return copy;
  }
  [[nodiscard]] PoolClock clock() const noexcept {
    // A reset between the two loads may leave a floor that is ahead of `now`: then everything is forgotten.
    const std::uint32_t now = RelaxedWords::load(&memory_.clock.now), floor = RelaxedWords::load(&memory_.clock.floor);
    return {now < floor ? floor : now, floor};
  }

 private:
  PoolMemory memory_;
  std::vector<std::uint32_t> locks_;
};

}  // namespace lookahead
