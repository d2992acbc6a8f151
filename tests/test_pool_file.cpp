// Pools in files: a loaded pool is the saved one; damaged and hostile files are refused, or harmless.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "cases.hpp"
#include "files.hpp"
#include "mirror.hpp"

#include "lookahead/decoder.hpp"
#include "lookahead/pool_file.hpp"
#include "lookahead/shared_ngram_pool.hpp"
#include "lookahead/testing/oracle_model.hpp"
#include "lookahead/testing/plain_decode.hpp"

namespace {

namespace fs = std::filesystem;
using namespace lookahead;
using mirror::at;
using mirror::hash_of;
using mirror::length;
using mirror::Random;
using mirror::Token;
using mirror::Tokens;
using testing::content;
using testing::TempFolder;
using Oracle = testing::OracleModel<Token>;
using Private = NGramPool<Token>;
using Shared = SharedNGramPool<Token>;
using Fault = PoolFileFault;

constexpr std::uint64_t tokenizer = 0xABCD;
constexpr std::size_t vocabulary = 64;

std::ptrdiff_t files_in(const TempFolder& folder) { return std::distance(fs::directory_iterator(folder.path), {}); }

void write(const fs::path& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary);
  out << bytes;
}

template <class T>
void put(std::string& bytes, std::size_t where, T value) {
  std::memcpy(bytes.data() + where, &value, sizeof value);
}

void put_checksum(std::string& bytes) {
  detail::WordHash hash;
  hash.add(bytes.data(), bytes.size() - 8);
  put(bytes, bytes.size() - 8, hash.value());
}

using Found = std::vector<std::tuple<Source, int, Token>>;

template <class Ref>
Found look_up(const Ref& pool, const Tokens& context) {
  Found found;
  pool.for_each(SerialTile{}, hash_of(context), [&](const lookahead::PoolFind& find) {
    found.emplace_back(find.source, find.rank, static_cast<Token>(find.token));
  });
  std::ranges::sort(found);
  return found;
}

PoolInsert random_insert(Random& random) {
  PoolInsert insert{hash_of({random.below(30)}), static_cast<Source>(random.below(4)), 1, {}};
  if (insert.source == Source::recycled) insert.count = random.below(9);
  for (std::uint32_t& t : insert.token) t = static_cast<std::uint32_t>(random.below(20));
  return insert;
}

testing::OracleOptions language(std::uint64_t seed) {
  testing::OracleOptions options;
  options.vocabulary = vocabulary;
  options.seed = seed;
  options.repetition = 0.9;
  return options;
}

}  // namespace

TEST_CASE("a loaded pool goes on as the saved one does") {
  const TempFolder folder;
  const fs::path path = folder.path / "pool";
  for (int seed = 0; seed < std::clamp(cases(2000) / 100, 20, 200); ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    // Few sets, so that they are full.
    Private pool(at(32 * (1 + random.below(3))));
    const bool forgets = random.one_in(3);
    if (forgets) pool.ref().clock->now = PoolClock::last_stamp - static_cast<std::uint32_t>(random.below(300));
    const auto file = [&](auto& to, Random source) {
      std::vector<PoolInsert> batch(20);
      for (PoolInsert& insert : batch) insert = random_insert(source);
      to.ref().insert_all(SerialGroup{}, batch.data(), length(batch));
    };
    for (int step = random.below(15); step > 0; --step) {
      file(pool, Random(random.bits()));
      if (forgets && random.one_in(8)) pool.reset();
    }
    save_pool(pool, path, tokenizer);
    auto loaded = load_pool<Private>(path, tokenizer, vocabulary);
    auto shared = load_pool<Shared>(path, tokenizer, vocabulary);
    auto view = shared.in(0, vocabulary);
    REQUIRE(loaded.slots() == pool.slots());
    REQUIRE(shared.slots() == pool.slots());
    for (int step = 0; step < 10; ++step) {
      for (Token t = 0; t < 30; ++t) {
        const Found expected = look_up(pool.ref(), {t});
        REQUIRE(look_up(loaded.ref(), {t}) == expected);
        REQUIRE(look_up(view.ref(), {t}) == expected);
      }
      const Random next(random.bits());
      file(pool, next);
      file(loaded, next);
      file(view, next);
    }
  }
  CHECK(files_in(folder) == 1);
}

TEST_CASE("decoding with a loaded pool plans the same trees") {
  const TempFolder folder;
  const fs::path path = folder.path / "pool";
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    CAPTURE(seed);
    Oracle model(language(seed)), same_model(language(seed));
    Decoder before(model, {.cost = StepCost::none(), .pool_slots = 4096, .keep_pool = true});
    const auto ignore = [](Token) {};
    before.generate(Random(seed).tokens(50, vocabulary), 200, ignore);
    save_pool(before.pool(), path, tokenizer);
    Decoder after(same_model, {.cost = StepCost::none(), .keep_pool = true}, GreedyVerify{},
                  load_pool<Private>(path, tokenizer, vocabulary));
    std::size_t rows = 0;
    for (std::uint64_t request = 0; request < 3; ++request) {
      const Tokens prompt = Random(seed + 100 * request).tokens(20, vocabulary);
      const Generation a = before.generate(prompt, 100, ignore), b = after.generate(prompt, 100, ignore);
      REQUIRE(std::ranges::equal(before.text(), after.text()));
      REQUIRE(a.steps == b.steps);
      REQUIRE(a.rows == b.rows);
      REQUIRE(a.expected == b.expected);
      rows += a.rows - a.steps;
    }
    CHECK(rows > 100);
  }
}

TEST_CASE("a shared pool keeps its namespaces in a file") {
  const TempFolder folder;
  const fs::path path = folder.path / "pool";
  Shared pool;
  for (std::uint64_t space = 0; space < 9; ++space)
    pool.in(space, vocabulary).add_text(Tokens{1, static_cast<Token>(space)});
  save_pool(pool, path, tokenizer);
  auto loaded = load_pool<Shared>(path, tokenizer, vocabulary);
  for (std::uint64_t space = 0; space < 9; ++space)
    CHECK(look_up(loaded.in(space, vocabulary).ref(), {1}) == Found{{Source::text, 0, static_cast<Token>(space)}});
  CHECK(look_up(load_pool<Private>(path, tokenizer, vocabulary).ref(), {1}) == Found{{Source::text, 0, 0}});
}

TEST_CASE("a shared pool is saved while others use it") {
  const TempFolder folder;
  const fs::path path = folder.path / "pool";
  Shared pool(32 * 64);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    Random random(1);
    while (!stop) pool.in(0, vocabulary).add_text(random.tokens(100, vocabulary));
  });
  std::size_t found = 0;
  while (found < 1000) {
    save_pool(pool, path, tokenizer);
    auto loaded = load_pool<Private>(path, tokenizer, vocabulary);
    for (Token t = 0; t < 64; ++t) found += look_up(loaded.ref(), {t}).size();
  }
  stop = true;
  writer.join();
}

TEST_CASE("what is forgotten, and what no model could say, is left out") {
  const TempFolder folder;
  const fs::path path = folder.path / "pool";
  Private pool(32);
  pool.add_text(Tokens{1, 0x5EC2E7});
  pool.reset();
  pool.add_text(Tokens{2, 63, 2, 64, 2, -1});
  save_pool(pool, path, tokenizer);
  const std::uint32_t secret = 0x5EC2E7;
  CHECK(content(path).find(std::string(reinterpret_cast<const char*>(&secret), 4)) == std::string::npos);
  CHECK(look_up(load_pool<Private>(path, tokenizer, 64).ref(), {2}) == Found{{Source::text, 0, 63}});
  CHECK(look_up(load_pool<Private>(path, tokenizer, 65).ref(), {2}).size() == 2);
  CHECK(look_up(load_pool<Private>(path, tokenizer, std::size_t{1} << 32).ref(), {2}).size() == 3);

  // A stamp that was not given yet.
  std::string bytes = content(path);
  for (std::size_t at = 40 + 2 * 128; at < 40 + 3 * 128; at += 4) bytes[at] = static_cast<char>(bytes[at] | 0x80);
  put_checksum(bytes);
  write(path, bytes);
  CHECK(look_up(load_pool<Private>(path, tokenizer, 65).ref(), {2}).empty());
}

TEST_CASE("hostile files are refused with their fault, their value, the limit and the remedy") {
  const TempFolder folder;
  const fs::path path = folder.path / "pool";
  Private pool(64);
  pool.add_text(Tokens{1, 2, 3, 1, 2, 4});
  save_pool(pool, path, tokenizer);
  const std::string good = content(path);
  REQUIRE(good.size() == 40 + 2 * 384 + 8);

  const auto refused = [&](const std::string& bytes, Fault fault, const std::string& message) {
    write(path, bytes);
    CAPTURE(message);
    try {
      (void)load_pool<Private>(path, tokenizer, vocabulary);
      FAIL_CHECK("it was loaded");
    } catch (const PoolFileError& error) {
      CHECK(static_cast<int>(error.fault) == static_cast<int>(fault));
      CHECK(error.what() == path.string() + " " + message);
    }
    CHECK_THROWS_AS((void)load_pool<Shared>(path, tokenizer, vocabulary), PoolFileError);
  };
  const auto changed = [&](std::size_t where, auto value) {
    std::string bytes = good;
    put(bytes, where, value);
    put_checksum(bytes);
    return bytes;
  };
  refused("", Fault::truncated, "has 0 bytes and should have 40: it is truncated, save it again");
  refused(good.substr(0, 39), Fault::truncated, "has 39 bytes and should have 40: it is truncated, save it again");
  refused(good.substr(0, 40), Fault::truncated, "has 40 bytes and should have 816: it is truncated, save it again");
  refused(good.substr(0, 815), Fault::truncated, "has 815 bytes and should have 816: it is truncated, save it again");
  refused(good + "x", Fault::trailing, "has 817 bytes and should have 816: something was added, save it again");
  refused(changed(0, 'L'), Fault::not_a_pool, "does not begin with \"lookpool\": pass a file that save_pool wrote");
  refused(changed(8, 0x04030201U), Fault::byte_order,
          "has the byte order 0x0000000004030201, not 0x0000000001020304: build the pool on a machine like this one");
  refused(changed(12, 7U), Fault::version,
          "has version 7 of the format, and version 3 can be read: build the pool again");
  refused(changed(16, std::uint64_t{0xABCE}), Fault::tokenizer,
          "belongs to the tokenizer 0x000000000000abce, not to 0x000000000000abcd: build a pool with this model's "
          "tokenizer");
  refused(changed(24, 64U), Fault::size,
          "has 2 sets of 64 slots, and a pool has 1 to 67108864 sets of 32: it is damaged, save it again");
  for (const std::uint32_t sets : {0U, 67108865U, ~0U})
    refused(changed(28, sets), Fault::size,
            "has " + std::to_string(sets) +
                " sets of 32 slots, and a pool has 1 to 67108864 sets of 32: it is damaged, save it again");
  refused(changed(28, 67108864U), Fault::truncated,
          "has 816 bytes and should have 25769803824: it is truncated, save it again");
  refused(changed(28, 1U), Fault::trailing, "has 816 bytes and should have 432: something was added, save it again");
  refused(changed(36, 100U), Fault::clock, "has the clock 42, below its floor of 100: it is damaged, save it again");

  // Whatever else differs in a single bit.
  for (std::size_t bit = 0; bit < 8 * good.size(); bit += bit < 320 ? 3 : 61) {
    std::string bytes = good;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ 1 << bit % 8);
    write(path, bytes);
    CHECK_THROWS_AS((void)load_pool<Private>(path, tokenizer, vocabulary), PoolFileError);
  }
  write(path, good);
  CHECK(load_pool<Private>(path, tokenizer, vocabulary).slots() == 64);

  for (const fs::path& bad : {folder.path, folder.path / "none"}) {
    CAPTURE(bad);
    try {
      (void)load_pool<Private>(bad, tokenizer, vocabulary);
      FAIL_CHECK("it was loaded");
    } catch (const PoolFileError& error) {
      CHECK(static_cast<int>(error.fault) == static_cast<int>(Fault::unreadable));
      CHECK(error.what() == bad.string() + " cannot be read; check the path");
    }
  }
}

TEST_CASE("random bytes with a right checksum cost rows and change no text") {
  const TempFolder folder;
  const fs::path path = folder.path / "pool";
  const Private empty(64 * 32);
  save_pool(empty, path, tokenizer);
  const std::string frame = content(path);
  std::size_t guesses = 0;
  for (int i = 0; i < std::clamp(cases(2000) / 200, 20, 100); ++i) {
    CAPTURE(i);
    Random random(static_cast<std::uint64_t>(i));
    const auto seed = static_cast<std::uint64_t>(i);
    Oracle plain(language(seed)), model(language(seed)), other(language(seed));
    const Tokens prompt = random.tokens(20, vocabulary);
    const Tokens expected = testing::plain_decode(plain, std::span(prompt), 100);
    std::string bytes = frame;
    const auto now = static_cast<std::uint32_t>(random.one_in(2) ? random.bits() : random.bits() % 1000);
    put(bytes, 32, now);
    put(bytes, 36, static_cast<std::uint32_t>(random.one_in(2) ? 0 : random.bits() % (std::uint64_t{now} + 1)));
    // Contexts that are looked up, with whatever source, rank, token and stamp.
    for (std::size_t set = 0; set < 64; ++set)
      for (std::size_t lane = 0; lane < 32; ++lane) {
        const std::size_t slot = 40 + set * 384 + lane * 4;
        const auto next = [&](std::uint32_t most) {
          return static_cast<std::uint32_t>(random.one_in(4) ? random.bits()
                                                             : random.bits() % (most + std::uint64_t{1}));
        };
        std::uint32_t key = next(~0U);
        for (int tries = 0; tries < 8 && lane % 2 == 0; ++tries) {
          const std::uint64_t context = hash_of({random.below(64)});
          if ((context >> 32) * 64 >> 32 == set)
            key = (static_cast<std::uint32_t>(context) & ~31U) | static_cast<std::uint32_t>(random.below(32));
        }
        put(bytes, slot, key);
        put(bytes, slot + 128, next(70));
        put(bytes, slot + 256, next(now));
      }
    put_checksum(bytes);
    write(path, bytes);
    DecoderOptions<Token> options{.rows = at(1 + random.below(100)), .keep_pool = true};
    if (random.one_in(3)) options.shape = Shape::published();
    Decoder decoder(model, options, GreedyVerify{}, load_pool<Private>(path, tokenizer, vocabulary));
    const Generation done = decoder.generate(prompt, 100, [](Token) {});
    guesses += done.rows - done.steps;
    REQUIRE(std::ranges::equal(decoder.text().subspan(20), expected));
    auto shared = load_pool<Shared>(path, tokenizer, std::size_t{1} << 32);
    Decoder on_shared(other, options, GreedyVerify{}, shared.in(0, vocabulary));
    on_shared.generate(prompt, 100, [](Token) {});
    REQUIRE(std::ranges::equal(on_shared.text().subspan(20), expected));
  }
  CHECK(guesses > 1000);
}

TEST_CASE("a file is replaced when the new one is complete, or not at all") {
  const TempFolder folder;
  const fs::path path = folder.path / "pool";
  const Private small(32), large(320);
  save_pool(small, path, tokenizer);
  save_pool(large, path, tokenizer);
  CHECK(load_pool<Private>(path, tokenizer, vocabulary).slots() == 320);
  CHECK(files_in(folder) == 1);

  const fs::path taken = folder.path / "taken";
  fs::create_directories(taken / "by");
  for (const fs::path& bad : {taken, folder.path / "none" / "pool"}) {
    CAPTURE(bad);
    try {
      save_pool(small, bad, tokenizer);
      FAIL_CHECK("it was saved");
    } catch (const PoolFileError& error) {
      CHECK(static_cast<int>(error.fault) == static_cast<int>(Fault::unwritable));
      const std::string message = error.what();
      CHECK(message.starts_with(bad.string() + " cannot be written"));
      CHECK(message.ends_with(": it needs 432 bytes in a folder that may be written to"));
    }
  }
  CHECK(files_in(folder) == 2);
}

TEST_CASE("fingerprints tell tokenizers apart") {
  using Pieces = std::vector<std::string>;
  const Pieces pieces{"a", "b", "", "longer than one word of the hash"};
  const std::uint64_t fingerprint = tokenizer_fingerprint(pieces);
  CHECK(fingerprint == tokenizer_fingerprint(std::vector<std::string_view>(pieces.begin(), pieces.end())));
  for (const Pieces& other : {Pieces{"b", "a", "", pieces[3]}, Pieces{"ab", "", "", pieces[3]},
                              Pieces{"a", "b", pieces[3]}, Pieces{"a", "b", "", pieces[3], ""},
                              Pieces{"a", "b", "", pieces[3] + '\0'}, Pieces{"a", "c", "", pieces[3]}, Pieces{}})
    CHECK(tokenizer_fingerprint(other) != fingerprint);
}
