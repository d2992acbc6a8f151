// The pool, beside a naive table that forgets as it must: what it gives, in which order, and what it forgets.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cases.hpp"
#include "mirror.hpp"

#include "lookahead/decoder.hpp"
#include "lookahead/ngram_pool.hpp"
#include "lookahead/testing/oracle_model.hpp"
#include "lookahead/testing/plain_decode.hpp"

namespace {

using namespace lookahead;
using mirror::at;
using mirror::hash_of;
using mirror::length;
using mirror::Pool;
using mirror::Random;
using mirror::Token;
using mirror::Tokens;

/// What a context gives: (source, rank, token), newest first, equally new ones by rank.
using Found = std::vector<std::tuple<Source, int, Token>>;

Found look_up(Pool& pool, std::uint64_t context) {
  std::vector<std::tuple<std::uint32_t, Source, int, Token>> all;
  pool.ref().for_each(SerialTile{}, context, [&](const PoolFind& find) {
    all.emplace_back(~find.stamp, find.source, find.rank, static_cast<Token>(find.token));
  });
  std::sort(all.begin(), all.end());
  Found found;
  for (const auto& [age, source, rank, token] : all) found.emplace_back(source, rank, token);
  return found;
}

/// How often the entries of a context were seen: (source, rank, seen, of), in order.
using Counts = std::vector<std::tuple<Source, int, int, int>>;

Counts counts_of(Pool& pool, const Tokens& context) {
  Counts counts;
  pool.ref().for_each(SerialTile{}, hash_of(context),
                      [&](const PoolFind& find) { counts.emplace_back(find.source, find.rank, find.seen, find.of); });
  std::ranges::sort(counts);
  return counts;
}

/// Files `best` behind a context: one token, or for recycled entries the best ones.
struct Filing {
  Tokens context;
  Source source;
  Tokens best;
};

void file(Pool& pool, const std::vector<Filing>& batch) {
  std::vector<PoolInsert> inserts;
  for (const Filing& f : batch) {
    inserts.push_back({hash_of(f.context), f.source, length(f.best), {}});
    std::copy(f.best.begin(), f.best.end(), inserts.back().token);
  }
  pool.ref().insert_all(SerialGroup{}, inserts.data(), length(inserts));
}

void file(Pool& pool, Source source, const Tokens& context, Token token) { file(pool, {{context, source, {token}}}); }

/// Whether entries of both sources may be one.
bool alike(Source a, Source b) { return a == b || (a <= Source::generated && b <= Source::generated); }

/// Sets of 32 places. A place keeps what it holds until something else takes it, or all is forgotten.
class NaivePool {
 public:
  explicit NaivePool(std::size_t sets) : sets_(sets) {}

  void file(const Filing& f) {
    ++now_;
    auto& set = sets_[static_cast<std::size_t>((hash_of(f.context) >> 32) * sets_.size() >> 32)];
    for (int rank = 0; rank < length(f.best); ++rank) {
      const Token token = f.best[at(rank)];
      const bool recycled = f.source == Source::recycled;
      auto place = std::ranges::find_if(set, [&](const Entry& e) {
        return alike(e.source, f.source) && e.context == f.context && (recycled ? e.rank == rank : e.token == token);
      });
      const int seen = place != set.end() && !recycled ? std::min(place->seen + 1, 8) : 1;
      if (place == set.end()) place = std::ranges::min_element(set, {}, &Entry::when);
      evictions += place->when > 0 && place->context != f.context ? 1 : 0;
      *place = {f.context, f.source, rank, token, now_, seen};
    }
  }

  void add_text(const Tokens& text) {
    for (int i = 0; i < length(text); ++i)
      for (const int n : {1, 2, 3, 4, 6, 9, 13})
        if (n <= i) file({Tokens(text.begin() + i - n, text.begin() + i), Source::text, {text[at(i)]}});
  }

  void forget() { sets_.assign(sets_.size(), {}); }

  [[nodiscard]] Found look_up(const Tokens& context) const {
    std::vector<std::tuple<std::uint64_t, Source, int, Token>> all;
    for (const auto& set : sets_)
      for (const Entry& e : set) {
        if (e.context != context) continue;
        const auto newer = std::ranges::count_if(set, [&](const Entry& other) {
          return other.context == context && alike(other.source, e.source) && other.when > e.when;
        });
        all.emplace_back(~e.when, e.source,
                         e.source == Source::recycled ? e.rank : std::min(static_cast<int>(newer), 7), e.token);
      }
    std::sort(all.begin(), all.end());
    Found found;
    for (const auto& [age, source, rank, token] : all) found.emplace_back(source, rank, token);
    return found;
  }

  [[nodiscard]] Counts counts_of(const Tokens& context) const {
    Counts counts;
    for (const auto& [source, rank, token] : look_up(context)) {
      int seen = 0, of = 0;
      for (const auto& set : sets_)
        for (const Entry& e : set) {
          if (e.context != context || !alike(e.source, source)) continue;
          of += e.seen;
          if (e.token == token && (source != Source::recycled || e.rank == rank)) seen = e.seen;
        }
      counts.emplace_back(source, rank, seen, source == Source::recycled ? 1 : of);
    }
    std::ranges::sort(counts);
    return counts;
  }

  long evictions = 0;  ///< entries that had to go for another context's

 private:
  struct Entry {
    Tokens context = {};
    Source source = Source::text;
    int rank = 0;
    Token token = -1;
    std::uint64_t when = 0;
    int seen = 0;
  };
  std::vector<std::array<Entry, 32>> sets_;
  std::uint64_t now_ = 0;
};

/// Few contexts, so that they meet again: all of one to three tokens out of four.
const std::vector<Tokens>& contexts() {
  static const std::vector<Tokens> all = [] {
    std::vector<Tokens> some{{}};
    for (std::size_t i = 0; some[i].size() < 3; ++i)
      for (Token t = 0; t < 4; ++t) {
        some.push_back({t});
        some.back().insert(some.back().end(), some[i].begin(), some[i].end());
      }
    some.erase(some.begin());
    return some;
  }();
  return all;
}

Filing random_filing(Random& random) {
  const auto source = static_cast<Source>(random.below(4));
  Filing f{contexts()[at(random.below(length(contexts())))], source, {}};
  f.best = random.tokens(source == Source::recycled ? random.below(9) : random.below(10) > 0 ? 1 : 0, 14);
  return f;
}

}  // namespace

/// Another thread files the entry whose key is `key` three times between two reads of it.
struct ChangingTile : SerialTile {
  const std::uint32_t* key;
  int* reads;
  [[nodiscard]] std::uint32_t load(const std::uint32_t* word) const {
    return SerialTile::load(word) + (word == key ? static_cast<std::uint32_t>((*reads)++) * 3 : 0);
  }
};
struct ChangingAccess : lookahead::PrivateAccess {
  const std::uint32_t* key = nullptr;
  int* reads = nullptr;
  [[nodiscard]] ChangingTile words(const SerialTile& tile) const { return {tile, key, reads}; }
};

TEST_CASE("an entry that changes while it is read was not seen more often than all of its context") {
  Pool pool(32);
  file(pool, {{{1}, Source::text, {2}}, {{1}, Source::text, {3}}});
  const auto own = pool.ref();
  int reads = 0, found = 0;
  const lookahead::PoolRef<ChangingAccess> ref{own.sets, own.set_count, own.clock, {{}, &own.sets[0].key[0], &reads}};
  ref.for_each(SerialTile{}, hash_of({1}), [&](const PoolFind& find) {
    CHECK(find.seen == (find.token == 2 ? 4 : 1));
    CHECK(find.of == (find.token == 2 ? 4 : 2));
    ++found;
  });
  CHECK(found == 2);
  CHECK(reads == 2);
}

TEST_CASE("the pool gives, ranks and forgets what the naive table does") {
  const int count = std::max(cases(2000) / 50, 20);
  long evictions = 0;
  for (int seed = 0; seed < count; ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    const int sets = std::array{1, 2, 8}[at(random.below(3))];
    Pool pool(at(32 * sets));
    NaivePool naive(at(sets));
    if (random.below(4) == 0)
      pool.ref().clock->now = NGramPoolRef::last_stamp - static_cast<std::uint32_t>(random.below(300));
    for (int step = 0; step < 40; ++step) {
      CAPTURE(step);
      const bool late = pool.ref().clock->now > NGramPoolRef::last_stamp;
      std::vector<Filing> batch;
      switch (random.below(12)) {
        case 0:
          pool.reset();
          naive.forget();
          break;
        case 1: {
          // Longer than a piece of `add_text`, or shorter than every context. Stamps may run out between two pieces.
          const Tokens text = random.tokens(late || random.below(2) == 0 ? random.below(5) : random.below(100), 4);
          const bool runs_out = pool.ref().clock->now + 7 * text.size() > NGramPoolRef::last_stamp;
          if (late && !text.empty()) naive.forget();
          if (!late && runs_out) break;
          pool.add_text(text);
          naive.add_text(text);
          break;
        }
        default:
          for (int i = random.below(20); i > 0; --i) batch.push_back(random_filing(random));
          if (late) naive.forget();
          file(pool, batch);
          for (const Filing& f : batch) naive.file(f);
      }
      for (const Tokens& context : contexts()) {
        REQUIRE(look_up(pool, hash_of(context)) == naive.look_up(context));
        REQUIRE(counts_of(pool, context) == naive.counts_of(context));
      }
    }
    evictions += naive.evictions;
  }
  MESSAGE(evictions << " evictions");
  CHECK(evictions > count);
}

TEST_CASE("a tile finds what a plain loop finds, the lowest lane where several are oldest") {
  Random random(1);
  for (int round = 0; round < 1000; ++round) {
    alignas(16) std::array<std::uint32_t, 32> words;
    for (std::uint32_t& w : words) w = static_cast<std::uint32_t>(random.below(1 << 30)) * 4U >> random.below(32);
    const auto mask = static_cast<std::uint32_t>(random.below(1 << 30)) * 4U | 3U;
    const std::uint32_t value = words[at(random.below(32))] & mask;
    std::uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= (words[at(i)] & mask) == value ? 1U << i : 0U;
    REQUIRE(SerialTile{}.match(words.data(), mask, value) == bits);
    const std::uint32_t middle = words[at(random.below(32))];
    std::uint32_t above = 0;
    for (int i = 0; i < 32; ++i) above |= words[at(i)] > middle ? 1U << i : 0U;
    REQUIRE(SerialTile{}.greater(words.data(), middle) == above);
    REQUIRE(SerialTile{}.oldest(words.data()) == std::ranges::min_element(words) - words.begin());
    const int n = random.below(100);
    REQUIRE(SerialTile{}.sum(n, [](int i) { return i + 1; }) == n * (n + 1) / 2);
  }
  // The order of additions is a promise: a 1 that meets 2^53 is lost, one that meets another 1 first is not.
  CHECK(SerialTile{}.sum(32, [](int i) { return i == 0 ? 0x1p53 : i == 1 || i == 16 ? 1.0 : 0.0; }) == 0x1p53);
  CHECK(SerialTile{}.sum(32, [](int i) { return i == 0 ? 0x1p53 : i == 1 || i == 17 ? 1.0 : 0.0; }) == 0x1p53 + 2);
}

TEST_CASE("the serial group sorts any number of keys") {
  Random random(2);
  for (int n = 0; n < 300; ++n) {
    CAPTURE(n);
    std::vector<std::uint64_t> keys(at(n));
    for (std::uint64_t& k : keys) k = static_cast<std::uint64_t>(random.below(1 << 30)) << random.below(34);
    std::vector<std::uint64_t> sorted = keys;
    std::ranges::sort(sorted);
    lookahead::SerialGroup{}.sort(keys.data(), n);
    REQUIRE(keys == sorted);
  }
}

TEST_CASE("contexts of any length differ where a length or a token does") {
  std::set<std::uint64_t> fingerprints;
  for (const Tokens& context : contexts()) fingerprints.insert(hash_of(context) >> 5);
  CHECK(fingerprints.size() == contexts().size());
  CHECK(hash_of({0}) != hash_of({0, 0}));
  CHECK(hash_of({1, 2}) != hash_of({2, 1}));
  CHECK(hash_of({-1}) != hash_of({1}));
}

TEST_CASE("a text is filed under 1, 2, 3, 4, 6, 9 and 13 tokens, whatever its length") {
  for (const int size : {0, 1, 2, 13, 14, 31, 32, 33, 45, 46, 64, 65, 200}) {
    CAPTURE(size);
    Tokens text(at(size));
    for (int i = 0; i < size; ++i) text[at(i)] = i;
    Pool pool;
    pool.add_text(text);
    for (int i = 0; i < size; ++i)
      for (int n = 1; n <= std::min(i, 14); ++n) {
        const Tokens context(text.begin() + i - n, text.begin() + i);
        const bool filed = n <= 4 || n == 6 || n == 9 || n == 13;
        REQUIRE(look_up(pool, hash_of(context)) == (filed ? Found{{Source::text, 0, i}} : Found{}));
      }
  }
}

TEST_CASE("texts are independent of one another") {
  Pool pool;
  pool.add_text(Tokens{1, 2, 3});
  pool.add_text(Tokens{4, 5});
  CHECK(look_up(pool, hash_of({3})).empty());
  CHECK(look_up(pool, hash_of({2, 3})).empty());
  CHECK(look_up(pool, hash_of({4})) == Found{{Source::text, 0, 5}});
}

TEST_CASE("text and window entries rank by recency, from the eighth on alike") {
  Pool pool(32);
  for (Token t = 0; t < 10; ++t) file(pool, Source::text, {5}, t);
  file(pool, Source::text, {5}, 3);
  for (Token t = 20; t < 22; ++t) file(pool, Source::window, {5}, t);
  CHECK(look_up(pool, hash_of({5})) == Found{{Source::window, 0, 21},
                                             {Source::window, 1, 20},
                                             {Source::text, 0, 3},
                                             {Source::text, 1, 9},
                                             {Source::text, 2, 8},
                                             {Source::text, 3, 7},
                                             {Source::text, 4, 6},
                                             {Source::text, 5, 5},
                                             {Source::text, 6, 4},
                                             {Source::text, 7, 2},
                                             {Source::text, 7, 1},
                                             {Source::text, 7, 0}});
}

TEST_CASE("texts are one source, and an entry knows whether it was given or generated last") {
  Pool pool(32);
  file(pool, Source::text, {5}, 1);
  file(pool, Source::text, {5}, 2);
  file(pool, Source::generated, {5}, 1);
  file(pool, Source::generated, {5}, 3);
  CHECK(counts_of(pool, {5}) ==
        Counts{{Source::text, 2, 1, 4}, {Source::generated, 0, 1, 4}, {Source::generated, 1, 2, 4}});
  file(pool, Source::text, {5}, 3);
  CHECK(look_up(pool, hash_of({5})) == Found{{Source::text, 0, 3}, {Source::generated, 1, 1}, {Source::text, 2, 2}});
}

TEST_CASE("what a request generates is filed as such, the prompt and added texts are not") {
  testing::OracleModel<Token> model({.vocabulary = 50, .repetition = 0.9});
  Decoder<testing::OracleModel<Token>> decoder(model, {.cost = StepCost::none()});
  decoder.start(Tokens{1, 2, 3});
  decoder.add_text(Tokens{4, 5});
  while (decoder.text().size() < 5) decoder.step(10, [](Token) {});
  const Token last = decoder.text()[decoder.text().size() - 1], before = decoder.text()[decoder.text().size() - 2];
  Pool pool = decoder.pool();
  const auto source_of = [&](Token context, Token token) {
    std::vector<Source> sources;
    pool.ref().for_each(SerialTile{}, hash_of({context}), [&](const PoolFind& find) {
      if (is_text(find.source) && static_cast<Token>(find.token) == token) sources.push_back(find.source);
    });
    return sources;
  };
  CHECK(source_of(1, 2) == std::vector{Source::text});
  CHECK(source_of(4, 5) == std::vector{Source::text});
  CHECK(source_of(before, last) == std::vector{Source::generated});
}

TEST_CASE("text and window entries are counted up to 8, and anew when they were forgotten") {
  Pool pool(32);
  for (int i = 0; i < 3; ++i) file(pool, Source::text, {5}, 1);
  file(pool, Source::text, {5}, 2);
  file(pool, Source::window, {5}, 1);
  file(pool, {{{5}, Source::recycled, {10, 11}}});
  file(pool, {{{5}, Source::recycled, {10, 11}}});
  CHECK(counts_of(pool, {5}) == Counts{{Source::text, 0, 1, 4},
                                       {Source::text, 1, 3, 4},
                                       {Source::window, 0, 1, 1},
                                       {Source::recycled, 0, 1, 1},
                                       {Source::recycled, 1, 1, 1}});
  for (int i = 0; i < 20; ++i) file(pool, Source::text, {5}, 2);
  CHECK(counts_of(pool, {5})[0] == std::tuple(Source::text, 0, 8, 11));
  for (Token t = 100; t < 132; ++t) file(pool, Source::text, {t}, t);
  file(pool, Source::text, {5}, 2);
  CHECK(counts_of(pool, {5}) == Counts{{Source::text, 0, 1, 1}});
}

TEST_CASE("a recycled entry replaces the one of its rank") {
  Pool pool(32);
  file(pool, {{{5}, Source::recycled, {10, 11, 12}}});
  file(pool, {{{5}, Source::recycled, {11, 10}}});
  CHECK(look_up(pool, hash_of({5})) ==
        Found{{Source::recycled, 0, 11}, {Source::recycled, 1, 10}, {Source::recycled, 2, 12}});
}

TEST_CASE("a full set forgets its oldest entry, and an entry that comes again is new") {
  Pool pool(32);
  for (Token t = 0; t < 32; ++t) file(pool, Source::text, {t}, t);
  file(pool, Source::text, {0}, 0);
  file(pool, Source::window, {100}, 100);
  for (Token t = 0; t < 32; ++t) CHECK(look_up(pool, hash_of({t})).empty() == (t == 1));
  CHECK(look_up(pool, hash_of({100})) == Found{{Source::window, 0, 100}});
}

TEST_CASE("a context is told by 27 bits of its hash, and its set by the upper half") {
  Pool pool(64);
  const std::uint64_t context = 0x0123456789ABCDEFU;
  const auto insert = [&](std::uint64_t hash, std::uint32_t token) {
    const PoolInsert one{hash, Source::text, 1, {token}};
    pool.ref().insert_all(SerialGroup{}, &one, 1);
  };
  insert(context, 7);
  for (int bit = 0; bit < 64; ++bit) {
    CAPTURE(bit);
    const Found found = look_up(pool, context ^ std::uint64_t{1} << bit);
    // Two sets: the highest bit alone picks the set.
    CHECK(found.empty() == ((bit >= 5 && bit < 32) || bit == 63));
  }
}

TEST_CASE("reset forgets everything and touches no entry") {
  Pool pool(64);
  Random random(1);
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 100; ++i) file(pool, {random_filing(random)});
    const auto ref = pool.ref();
    const std::vector<PoolSet> before(ref.sets, ref.sets + ref.set_count);
    pool.reset();
    for (const Tokens& context : contexts()) REQUIRE(look_up(pool, hash_of(context)).empty());
    CHECK(std::memcmp(before.data(), ref.sets, before.size() * sizeof(PoolSet)) == 0);
  }
}

TEST_CASE("a pool that was reset or emptied fills as a new one does, slot by slot") {
  for (const bool emptied : {false, true}) {
    Random random(2);
    Pool used(64), fresh(64);
    for (int round = 0; round < 20; ++round) {
      for (int i = 0; i < 100; ++i) file(used, {random_filing(random)});
      if (emptied)
        used.ref().clock->now = NGramPoolRef::last_stamp + 1;  // the next thing empties it
      else
        used.reset();
      fresh = Pool(64);
      for (int i = random.below(60); i >= 0; --i) {
        const Filing f = random_filing(random);
        file(used, {f});
        file(fresh, {f});
      }
      const auto a = used.ref(), b = fresh.ref();
      for (std::uint32_t s = 0; s < a.set_count; ++s) {
        for (int lane = 0; lane < PoolSet::slots; ++lane) {
          const bool full = b.sets[s].stamp[lane] > b.clock->floor;
          REQUIRE((a.sets[s].stamp[lane] > a.clock->floor) == full);
          if (!full) continue;
          REQUIRE(a.sets[s].key[lane] == b.sets[s].key[lane]);
          REQUIRE(a.sets[s].token[lane] == b.sets[s].token[lane]);
        }
      }
    }
  }
}

TEST_CASE("stamps near their end empty the pool") {
  for (const bool reset : {false, true}) {
    Pool pool(64);
    file(pool, Source::text, {1}, 2);
    pool.ref().clock->now = NGramPoolRef::last_stamp;
    file(pool, Source::text, {3}, 4);  // the last that fits
    CHECK(look_up(pool, hash_of({1})) == Found{{Source::text, 0, 2}});
    if (reset) pool.reset();
    file(pool, Source::text, {5}, 6);
    CHECK(look_up(pool, hash_of({1})).empty());
    CHECK(look_up(pool, hash_of({3})).empty());
    CHECK(look_up(pool, hash_of({5})) == Found{{Source::text, 0, 6}});
    CHECK(pool.ref().clock->now == 1);
  }
  // In the middle of a text: what comes behind is kept.
  Pool pool;
  pool.ref().clock->now = NGramPoolRef::last_stamp - 7 * 32 - 1;
  Tokens text(100);
  for (Token t = 0; t < 100; ++t) text[at(t)] = t;
  pool.add_text(text);
  for (Token t = 1; t < 100; ++t) CHECK(look_up(pool, hash_of({t - 1})).empty() == (t < 64));
}

TEST_CASE("a copy of a pool is independent") {
  Pool pool(64);
  file(pool, Source::text, {1}, 2);
  Pool copy = pool;
  file(pool, Source::text, {1}, 3);
  file(copy, Source::text, {1}, 4);
  CHECK(look_up(pool, hash_of({1})) == Found{{Source::text, 0, 3}, {Source::text, 1, 2}});
  CHECK(look_up(copy, hash_of({1})) == Found{{Source::text, 0, 4}, {Source::text, 1, 2}});
  copy.reset();
  CHECK(look_up(pool, hash_of({1})).size() == 2);
  copy = pool;
  CHECK(look_up(copy, hash_of({1})).size() == 2);
}

TEST_CASE("a pool is rounded up to whole sets, and impossible sizes are refused") {
  CHECK(Pool(1).slots() == 32);
  CHECK(Pool(32).slots() == 32);
  CHECK(Pool(33).slots() == 64);
  CHECK(Pool().slots() == Pool::default_slots);
  for (const std::size_t bad : {std::size_t{0}, Pool::max_slots + 1, ~std::size_t{0}}) {
    const std::string message = "a pool of " + std::to_string(bad) + " slots: pass 1 to 2147483648";
    CHECK_THROWS_WITH_AS(Pool{bad}, message.c_str(), InvalidArgument);
  }
}

TEST_CASE("foreign texts and tiny pools never change what is generated") {
  using Oracle = testing::OracleModel<Token>;
  for (int seed = 0; seed < std::max(cases(2000) / 200, 10); ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    testing::OracleOptions options;
    options.vocabulary = 2 + random.below(30);
    options.seed = static_cast<std::uint64_t>(seed);
    Oracle model(options);
    const Tokens prompt = random.tokens(1 + random.below(20), options.vocabulary);
    const Tokens plain = testing::plain_decode(model, std::span<const Token>(prompt), 60);

    DecoderOptions<Token> decoder_options;
    decoder_options.cost = lookahead::StepCost::none();
    decoder_options.pool_slots = random.below(2) == 0 ? 1 : 5000;
    decoder_options.keep_pool = true;
    decoder_options.shape.w = random.below(4);
    if (random.below(3) == 0) decoder_options.shape.mode = ShapeMode::published;
    Decoder<Oracle, 3, 4, 5> decoder(model, decoder_options);
    for (int i = 0; i < 3; ++i) {
      decoder.add_text(random.tokens(random.below(300), options.vocabulary));
      Tokens text;
      decoder.generate(prompt, 60,
                       [&](std::span<const Token> block) { text.insert(text.end(), block.begin(), block.end()); });
      REQUIRE(text == plain);
    }
  }
}
