// A pool that many requests use at once: on one thread it is the private pool, word by word; on several no text
// changes, no entry is torn for good, and nobody sees what is not his.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <doctest/doctest.h>
#include <map>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cases.hpp"
#include "mirror.hpp"

#include "lookahead/decoder.hpp"
#include "lookahead/shared_ngram_pool.hpp"
#include "lookahead/testing/oracle_model.hpp"
#include "lookahead/testing/plain_decode.hpp"

namespace {

using namespace lookahead;
using mirror::at;
using mirror::hash_of;
using mirror::length;
using mirror::Random;
using mirror::Token;
using mirror::Tokens;
using Oracle = testing::OracleModel<Token>;
using Private = NGramPool<Token>;
using Shared = SharedNGramPool<Token>;

constexpr std::size_t any_token = std::size_t{1} << 32;

/// What a context gives.
std::vector<std::tuple<Source, int, Token>> look_up(const PoolRef<SharedAccess>& pool, const Tokens& context) {
  std::vector<std::tuple<Source, int, Token>> found;
  pool.for_each(SerialTile{}, hash_of(context), [&](const lookahead::PoolFind& find) {
    found.emplace_back(find.source, find.rank, static_cast<Token>(find.token));
  });
  return found;
}

PoolInsert random_insert(Random& random) {
  PoolInsert insert{hash_of({random.below(100)}), static_cast<Source>(random.below(4)), 1, {}};
  if (insert.source == Source::recycled) insert.count = random.below(9);
  for (std::uint32_t& t : insert.token) t = static_cast<std::uint32_t>(random.below(20));
  return insert;
}

template <class P>
void set_clock(const P& pool, std::uint32_t now) {
  pool.clock->now = now;
}

bool same(const Private& a, const Shared& b) {
  const PoolClock c = a.clock(), d = b.clock();
  if (a.slots() != b.slots() || c.now != d.now || c.floor != d.floor) return false;
  for (std::size_t i = 0; i < a.slots() / 32; ++i) {
    const PoolSet s = a.set(i), t = b.set(i);
    if (std::memcmp(&s, &t, sizeof s) != 0) return false;
  }
  return true;
}

/// Runs `work(i)` for i in [0, count), on threads that start together.
template <class Work>
void in_parallel(int count, const Work& work) {
  std::vector<std::thread> threads;
  std::atomic<int> waiting{count};
  for (int i = 0; i < count; ++i)
    threads.emplace_back([&, i] {
      --waiting;
      while (waiting > 0) std::this_thread::yield();
      work(i);
    });
  for (std::thread& t : threads) t.join();
}

testing::OracleOptions language(std::uint64_t seed) {
  testing::OracleOptions options;
  options.vocabulary = 64;
  options.seed = seed;
  options.repetition = 0.9;
  return options;
}

}  // namespace

TEST_CASE("on one thread a shared pool is the private one, word by word") {
  for (int seed = 0; seed < std::max(cases(2000) / 100, 20); ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    const std::size_t slots = at(32 * (1 + random.below(8)));
    Private one(slots);
    Shared other(slots);
    const Shared::View view = other.in(0, any_token);
    if (random.one_in(3)) {  // stamps run out on the way
      const std::uint32_t now = PoolClock::last_stamp - static_cast<std::uint32_t>(random.below(300));
      set_clock(one.ref(), now);
      set_clock(view.ref(), now);
    }
    for (int step = 0; step < 30; ++step) {
      if (random.one_in(8)) {
        one.reset();
        other.reset();
      } else if (random.one_in(4)) {
        const Tokens text = random.tokens(random.below(80), 5);
        one.add_text(text);
        view.add_text(text);
      } else {
        std::vector<PoolInsert> batch(at(random.below(40)));
        for (PoolInsert& insert : batch) insert = random_insert(random);
        one.ref().insert_all(SerialGroup{}, batch.data(), length(batch));
        view.ref().insert_all(SerialGroup{}, batch.data(), length(batch));
      }
      REQUIRE(same(one, other));
    }
  }
}

TEST_CASE("a tile of relaxed words finds what the plain one finds") {
  Random random(1);
  for (int round = 0; round < 1000; ++round) {
    alignas(16) std::array<std::uint32_t, 32> words;
    for (std::uint32_t& w : words) w = static_cast<std::uint32_t>(random.bits()) >> random.below(32);
    const auto mask = static_cast<std::uint32_t>(random.bits());
    const std::uint32_t value = words[at(random.below(32))];
    const HostTile<RelaxedWords> tile{};
    REQUIRE(tile.match(words.data(), mask, value & mask) == SerialTile{}.match(words.data(), mask, value & mask));
    REQUIRE(tile.greater(words.data(), value) == SerialTile{}.greater(words.data(), value));
    REQUIRE(tile.oldest(words.data()) == SerialTile{}.oldest(words.data()));
  }
}

TEST_CASE("a decoder on a shared pool of its own plans the trees of a private one") {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    CAPTURE(seed);
    Oracle model(language(seed)), same_model(language(seed));
    Shared pool;
    Decoder decoder(model, {.cost = StepCost::none(), .keep_pool = true});
    Decoder on_shared(same_model, {.cost = StepCost::none()}, GreedyVerify{}, pool.in(0, 64));
    static_assert(std::is_same_v<decltype(on_shared), Decoder<Oracle, 15, 5, 15, GreedyVerify, Shared::View>>);
    for (int request = 0; request < 3; ++request) {
      const Tokens prompt = Random(seed * 7 + static_cast<unsigned>(request)).tokens(30, 64);
      const auto ignore = [](Token) {};
      const Generation a = decoder.generate(prompt, 100, ignore), b = on_shared.generate(prompt, 100, ignore);
      REQUIRE(std::ranges::equal(decoder.text(), on_shared.text()));
      REQUIRE(a.steps == b.steps);
      REQUIRE(a.rows == b.rows);
      REQUIRE(a.expected == b.expected);
      REQUIRE(same(decoder.pool(), pool));
    }
  }
}

TEST_CASE("namespaces do not see each other's entries") {
  // 1,000 namespaces file under the same contexts, in a pool that is too large to forget.
  Shared pool(1 << 20);
  constexpr int spaces = 1000;
  for (int n = 0; n < spaces; ++n) pool.in(static_cast<std::uint64_t>(n), any_token).add_text(Tokens{1, 2, 1000 + n});
  for (int n = 0; n < spaces; ++n) {
    CAPTURE(n);
    const auto ref = pool.in(static_cast<std::uint64_t>(n), any_token).ref();
    REQUIRE(look_up(ref, {1}) == decltype(look_up(ref, {})){{Source::text, 0, 2}});
    REQUIRE(look_up(ref, {1, 2}) == decltype(look_up(ref, {})){{Source::text, 0, 1000 + n}});
  }
  CHECK(look_up(pool.in(spaces, any_token).ref(), {1}).empty());
}

TEST_CASE("within a namespace no two contexts become one") {
  // In the bits that a pool of 2^7 sets tells contexts by, 16 thousand hashes are as distinct as at random.
  Shared pool(32);
  Random random(3);
  for (const std::uint64_t key : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{2}, random.bits(), random.bits()}) {
    CAPTURE(key);
    const SharedAccess access = pool.in(key, any_token).ref().access;
    std::set<std::uint64_t> placed, fingerprints;
    std::map<std::uint64_t, int> sets;
    for (int i = 0; i < 1 << 14; ++i) {
      const std::uint64_t p = access.place(hash_of({i}));
      placed.insert(p);
      fingerprints.insert(static_cast<std::uint32_t>(p) >> 5);
      ++sets[p >> 57];
    }
    CHECK(placed.size() == 1 << 14);
    CHECK(fingerprints.size() > (1 << 14) - 12);  // one collision is expected
    CHECK(sets.size() == 128);
    for (const auto& [set, count] : sets) CHECK(std::abs(count - 128) < 80);  // 7 standard deviations
  }
  CHECK(pool.in(0, any_token).ref().access.place(12345) == 12345);
}

TEST_CASE("a view gives tokens of its vocabulary only") {
  Shared pool;
  pool.in(5, any_token).add_text(Tokens{1, 99, 1, 100, 1, 101, 1, -1});
  using Found = decltype(look_up(pool.in(5, any_token).ref(), {}));
  CHECK(look_up(pool.in(5, any_token).ref(), {1}).size() == 4);
  CHECK(look_up(pool.in(5, 100).ref(), {1}) == Found{{Source::text, 3, 99}});
  CHECK(pool.in(5, 100).vocabulary() == 100);
  for (const std::size_t bad : {std::size_t{0}, any_token + 1}) {
    const std::string message = "a vocabulary of " + std::to_string(bad) + " tokens: pass the model's, 1 to 4294967296";
    CHECK_THROWS_WITH_AS((void)pool.in(0, bad), message.c_str(), InvalidArgument);
  }
  // A model of 64 tokens drafts from what one of 4096 has said; the oracle refuses a token that it does not have.
  auto large = language(1);
  large.vocabulary = 4096;
  Oracle big(large), small(language(2)), plain(language(2));
  Decoder first(big, {}, GreedyVerify{}, pool.in(9, 4096)), second(small, {}, GreedyVerify{}, pool.in(9, 64));
  for (int request = 0; request < 20; ++request) {
    const Tokens prompt = Random(static_cast<std::uint64_t>(request)).tokens(40, 64);
    first.generate(prompt, 50, [](Token) {});
    second.generate(prompt, 50, [](Token) {});
    const Tokens expected = testing::plain_decode(plain, std::span(prompt), 50);
    REQUIRE(std::ranges::equal(second.text().subspan(40), expected));
  }
}

TEST_CASE("what a decoder refuses") {
  Oracle model(language(1));
  Shared pool(64);
  CHECK_THROWS_WITH_AS(
      (Decoder(model, {}, GreedyVerify{}, pool.in(0, 65))),
      "the view's vocabulary of 65 tokens is larger than the model's 64: pass the model's to SharedNGramPool::in",
      InvalidArgument);
  CHECK_THROWS_WITH_AS((Decoder(model, {}, GreedyVerify{}, Private(64))),
                       "the first request would empty the given pool: set keep_pool, or give no pool", InvalidArgument);
  CHECK_THROWS_AS((Decoder(model, {.rows = 0}, GreedyVerify{}, pool.in(0, 64))), InvalidArgument);
  CHECK_THROWS_AS(Shared(0), InvalidArgument);
  CHECK_THROWS_AS(Shared(Shared::max_slots + 1), InvalidArgument);
  CHECK(Shared(33).slots() == 64);
}

TEST_CASE("a decoder may be given a filled pool") {
  Oracle model(language(1));
  const Tokens prompt{1, 2, 3};
  const auto steps = [&](auto& decoder) { return decoder.generate(prompt, 200, [](Token) {}).steps; };
  Decoder cold(model, {.cost = lookahead::StepCost::none()});
  const std::size_t alone = steps(cold);
  Private pool;
  pool.add_text(cold.text());
  Decoder warm(model, {.cost = lookahead::StepCost::none(), .keep_pool = true}, GreedyVerify{}, std::move(pool));
  CHECK(2 * steps(warm) < alone);
}

TEST_CASE("a writer that meets another one in its set leaves its entry out") {
  Shared pool(32);
  const auto ref = pool.in(0, any_token).ref();
  ref.access.locks[0] = 1;
  pool.in(0, any_token).add_text(Tokens{1, 2});
  CHECK(look_up(ref, {1}).empty());
  CHECK(ref.access.locks[0] == 1);
  ref.access.locks[0] = 0;
  pool.in(0, any_token).add_text(Tokens{1, 2});
  CHECK(look_up(ref, {1}).size() == 1);
  CHECK(ref.access.locks[0] == 0);
}

TEST_CASE("a stamp from before stamps began anew files nothing") {
  Shared pool(32);
  const auto ref = pool.in(0, any_token).ref();
  const PoolInsert insert{hash_of({1}), Source::text, 1, {2}};
  ref.insert(SerialTile{}, insert, PoolClock::last_stamp - 5);
  CHECK(look_up(ref, {1}).empty());
  CHECK(ref.access.locks[0] == 0);
  ref.insert(SerialTile{}, insert, 70000);
  CHECK(look_up(ref, {1}).size() == 1);
}

TEST_CASE("threads that file at once leave whole entries, each once") {
  // The token tells its context, so that a torn slot shows.
  Shared pool(32 * 4);
  const auto token = [](int context, std::uint32_t i) { return static_cast<std::uint32_t>(context) * 64 + i; };
  std::atomic<int> odd{0};
  in_parallel(4, [&](int t) {
    Random random(static_cast<std::uint64_t>(t));
    const auto ref = pool.in(0, any_token).ref();
    for (int round = 0; round < std::clamp(cases(2000) / 10, 200, 2000); ++round) {
      std::vector<PoolInsert> batch(16);
      for (PoolInsert& insert : batch) {
        const int context = random.below(24);
        insert = {hash_of({context}), static_cast<Source>(random.below(4)), 1, {token(context, 0)}};
        if (insert.source == Source::recycled) {
          insert.count = 8;
          for (std::uint32_t i = 0; i < 8; ++i) insert.token[i] = token(context, i);
        }
      }
      ref.insert_all(SerialGroup{}, batch.data(), length(batch));
      for (int context = 0; context < 24; ++context)
        for (const auto& [source, rank, found] : look_up(ref, {context}))
          odd += rank < 0 || rank > 7 || found / 64 > 23 ? 1 : 0;
    }
  });
  CHECK(odd == 0);
  const auto ref = pool.in(0, any_token).ref();
  int entries = 0;
  for (int context = 0; context < 24; ++context) {
    CAPTURE(context);
    std::set<std::pair<Source, int>> places;
    for (const auto& [source, rank, found] : look_up(ref, {context})) {
      REQUIRE(places.emplace(source, rank).second);
      REQUIRE((source == Source::recycled || rank == 0));
      REQUIRE(static_cast<std::uint32_t>(found) ==
              token(context, source == Source::recycled ? static_cast<std::uint32_t>(rank) : 0));
      ++entries;
    }
  }
  CHECK(entries > 20);
  for (std::size_t i = 0; i < 4; ++i) CHECK(ref.access.locks[i] == 0);
}

TEST_CASE("threads that share a pool decode what plain decoding does") {
  // Tiny pools, so that all write the same sets; a thread that resets them; stamps that run out.
  const int requests = std::clamp(cases(2000) / 200, 20, 200);
  for (const bool trouble : {false, true}) {
    Shared pool(trouble ? 64 : Shared::default_slots);
    if (trouble) set_clock(pool.in(0, 64).ref(), PoolClock::last_stamp - 20000);
    std::atomic<int> next{0}, wrong{0}, running{3};
    std::atomic<std::size_t> tokens{0}, steps{0};
    in_parallel(trouble ? 4 : 3, [&](int t) {
      if (t == 3) {
        for (; running > 0; std::this_thread::yield()) pool.reset();
        return;
      }
      for (int i = next++; i < requests; i = next++) {
        Random random(static_cast<std::uint64_t>(i));
        const auto seed = static_cast<std::uint64_t>(i % 3);
        Oracle model(language(seed)), plain(language(seed));
        const Tokens prompt = random.tokens(1 + random.below(40), 64);
        DecoderOptions<Token> options;
        options.cost = lookahead::StepCost::none();
        options.rows = at(1 + random.below(64));
        options.shape.w = random.one_in(2) ? 0 : random.below(8);
        if (random.one_in(3)) options.shape = Shape::published();
        Decoder decoder(model, options, GreedyVerify{}, pool.in(seed, 64));
        const Generation done = decoder.generate(prompt, 80, [](Token) {});
        tokens += done.tokens;
        steps += done.steps;
        const Tokens expected = testing::plain_decode(plain, std::span(prompt), 80);
        if (!std::ranges::equal(decoder.text().subspan(prompt.size()), expected)) ++wrong;
      }
      --running;
    });
    CHECK(wrong == 0);
    CHECK(tokens > steps);
    if (trouble) CHECK(pool.clock().now < PoolClock::last_stamp - 20000);
  }
}

TEST_CASE("the clock of a pool in use is one that a file may have") {
  Shared pool(32);
  std::atomic<bool> done{false};
  int ahead = 0;
  in_parallel(2, [&](int t) {
    if (t == 0) {
      const auto view = pool.in(0, 64);
      for (; !done; pool.reset()) view.add_text(Tokens{1, 2});
    } else {
      for (int i = 0; i < 200'000; ++i) {
        const PoolClock clock = pool.clock();
        ahead += static_cast<int>(clock.floor > clock.now);
      }
      done = true;
    }
  });
  CHECK(ahead == 0);
}

TEST_CASE("forks go on with the same shared pool") {
  Oracle model(language(4));
  Shared pool;
  Decoder decoder(model, {}, GreedyVerify{}, pool.in(1, 64));
  decoder.generate(Tokens{1, 2, 3}, 20, [](Token) {});
  Oracle copy = model.fork();
  auto fork = decoder.fork(copy);
  fork.run(100, [](Token) {});
  decoder.run(100, [](Token) {});
  CHECK(std::ranges::equal(fork.text(), decoder.text()));
  CHECK(fork.pool().ref().sets == decoder.pool().ref().sets);
}
