// The naive window and pool, which the library is compared with, against examples worked out by hand and against whole
// decodes of oracle models.
#include <algorithm>
#include <cstdint>
#include <doctest/doctest.h>
#include <map>
#include <random>
#include <span>
#include <vector>

#include "cases.hpp"
#include "naive_pool.hpp"
#include "naive_window.hpp"

#include "lookahead/testing/oracle_model.hpp"
#include "lookahead/testing/plain_decode.hpp"
#include "lookahead/token_tree.hpp"

namespace {

using lookahead::TokenTreeStorage;
using lookahead::testing::OracleModel;
using lookahead::testing::OracleOptions;
using lookahead::testing::plain_decode;
using naive::certain;
using naive::Class;
using naive::Source;
using naive::Token;
using naive::Tokens;

using Rows = std::map<Tokens, bool>;

naive::Window counting_window(int w, int n, bool slides) {
  naive::Window window(w, n, slides, [](int count) {
    Tokens s;
    for (int i = 0; i < count; ++i) s.push_back(100 + i);
    return s;
  });
  window.start(1);
  return window;
}

std::uint64_t flat(const Class& c, int, const naive::Seen&) {
  return (certain >> 1) / static_cast<std::uint64_t>(c.rank + 1);
}

// Decoding with the naive parts: a window of (w, n), 0 columns for none, and growth to `rows` rows behind the window.
struct NaiveDecoder {
  int w, n, rows;
  bool slides;
  std::vector<Tokens> blocks = {};

  Tokens decode(OracleModel<>& model, const Tokens& prompt, std::size_t count) {
    naive::Window window(std::max(w, 1), n, slides, [&](int length) {
      Tokens s;
      for (int i = 0; i < length; ++i) s.push_back(prompt[static_cast<std::size_t>(i) % prompt.size()]);
      return s;
    });
    naive::Pool pool;
    pool.add_text(prompt, prompt.size());
    window.start(prompt.back());
    model.truncate(0);
    model.prefill(std::span(prompt).first(prompt.size() - 1));
    Tokens text = prompt;
    while (text.size() < prompt.size() + count) {
      Rows paths = w > 0 ? window.plant(w, n) : Rows{};
      paths[{}] = true;
      for (const auto& draft : pool.grow(text, 0, rows, 32, flat, paths)) paths[draft.path] = true;

      const std::size_t cached = model.context_size();
      TokenTreeStorage<Token, 256> tree;
      tree.begin(static_cast<int>(cached), text.data() + cached, static_cast<int>(text.size() - cached));
      std::map<Tokens, int> row_of{{Tokens{}, tree.root}};
      std::vector<Tokens> order;
      for (const auto& [path, wanted] : paths) order.push_back(path);
      std::ranges::stable_sort(order, {}, &Tokens::size);
      for (const Tokens& path : order) {
        if (!path.empty()) row_of[path] = tree.add(row_of.at(Tokens(path.begin(), path.end() - 1)), path.back());
        if (paths[path]) tree.want(row_of[path]);
      }
      model.forward(tree.view());

      Tokens walked, accepted;
      do {
        accepted.push_back(model.next_token(row_of.at(walked)));
        walked.push_back(accepted.back());
      } while (paths.count(walked) > 0 && paths[walked]);
      walked.pop_back();
      Tokens last;
      if (w > 0)
        for (int j = 0; j < w; ++j) last.push_back(model.next_token(row_of.at(window.path(n - 2, j))));
      std::map<Tokens, Tokens> top;
      for (const Tokens& path : order)
        if (paths[path]) top[path].resize(8), top[path].resize(model.top_tokens(row_of[path], top[path]));

      std::vector<std::int32_t> commit;
      for (int r = 0; r < tree.root; ++r) commit.push_back(r);
      for (std::size_t d = 0; d <= walked.size(); ++d)
        commit.push_back(row_of.at(Tokens(walked.begin(), walked.begin() + static_cast<std::ptrdiff_t>(d))));
      model.commit(commit);
      for (const bool on_path : {false, true})
        for (const Tokens& path : order)
          if (paths[path] &&
              on_path == (path.size() <= walked.size() && std::equal(path.begin(), path.end(), walked.begin()))) {
            Tokens whole = text;
            whole.insert(whole.end(), path.begin(), path.end());
            pool.recycle(whole, top[path]);
          }
      if (w > 0)
        for (const Tokens& gram : window.roll(last, accepted)) pool.add_window(gram);
      text.insert(text.end(), accepted.begin(), accepted.end());
      pool.add_text(text, accepted.size());
      blocks.push_back(accepted);
    }
    return {text.begin() + static_cast<std::ptrdiff_t>(prompt.size()),
            text.begin() + static_cast<std::ptrdiff_t>(prompt.size() + count)};
  }
};

}  // namespace

TEST_CASE("the naive window starts as one chain and is full after N - 1 steps") {
  naive::Window window = counting_window(3, 4, false);
  Rows rows = window.plant(3, 4);
  CHECK(rows ==
        Rows{{{}, true}, {{101}, true}, {{101, 102}, true}, {{101, 102, 103}, true}, {{101, 102, 103, 104}, true}});
  CHECK(window.roll({11, 12, 13}, {2}).empty());
  rows = window.plant(3, 4);
  // Levels: 2 102 103 / 102 103 104 / 11 12 13.
  CHECK(rows.at({102, 103, 104}) == false);
  CHECK(rows.at({102, 103, 104, 13}));
  CHECK(rows.at({102}));
  CHECK(rows.at({102, 103, 12}));
  CHECK(rows.at({102, 11}));
  CHECK(rows.size() == 7);
  CHECK(window.roll({21, 22, 23}, {3}).empty());
  // Levels: 3 103 104 / 11 12 13 / 21 22 23.
  window.plant(3, 4);
  const std::vector<Tokens> grams{{3, 11, 21, 31}, {103, 12, 22, 32}, {104, 13, 23, 33}};
  CHECK(window.roll({31, 32, 33}, {4, 5}) == grams);
  // Levels: 5 12 13 / 21 22 23 / 31 32 33.
  CHECK(window.path(2, 2) == Tokens{12, 13, 23, 33});
  rows = window.plant(3, 4);
  CHECK(rows.size() == 9);
  CHECK(rows.at({12, 13, 23}) == false);
  CHECK(rows.at({12, 22}) == false);
  CHECK(rows.at({21}));
  window.freeze(6);
  CHECK(window.token(0, 0) == 6);
  CHECK(window.path(2, 2) == Tokens{12, 13, 23, 33});
}

TEST_CASE("the naive window slides with the text") {
  naive::Window window = counting_window(4, 3, true);
  window.plant(4, 3);
  window.roll({11, 12, 13, 14}, {2, 3});
  // Rolled: . 102 103 104 / 11 12 13 14; one column to the left: 3 103 104 + / 12 13 14 +.
  window.plant(4, 3);
  CHECK(window.path(1, 2) == Tokens{103, 104, 14});
  CHECK(window.path(1, 3) == Tokens{103, 104, 103, 104});
  CHECK(window.path(1, 0) == Tokens{12});
  const auto grams = window.roll({21, 22, 23, 24}, {5});
  CHECK(grams == std::vector<Tokens>{{3, 12, 21}, {103, 13, 22}, {104, 14, 23}});
}

TEST_CASE("columns and levels that were not evaluated start anew") {
  naive::Window window = counting_window(3, 4, false);
  for (int step = 0; step < 3; ++step) {
    window.plant(3, 4);
    window.roll({10 * step + 11, 10 * step + 12, 10 * step + 13}, {2 + step});
  }
  // Levels: 4 12 13 / 21 22 23 / 31 32 33.
  CHECK(window.plant(2, 3) == Rows{{{}, true}, {{12}, true}, {{21}, true}, {{12, 22}, true}});
  CHECK(window.roll({41, 42}, {5}) == std::vector<Tokens>{{4, 21, 41}, {12, 22, 42}});
  // Levels: 5 22 + / 41 42 + / + + +, where + restarts from 100 + r + j.
  window.plant(3, 4);
  CHECK(window.path(2, 0) == Tokens{41, 102});
  CHECK(window.path(2, 1) == Tokens{22, 42, 103});
  CHECK(window.path(2, 2) == Tokens{22, 102, 103, 104});
  CHECK(window.roll({51, 52, 53}, {6}).empty());
  window.plant(3, 4);
  CHECK(window.roll({61, 62, 63}, {7}).empty());
  window.plant(3, 4);
  CHECK(window.roll({71, 72, 73}, {8}).size() == 3);
}

TEST_CASE("one sliding level is plain Jacobi decoding") {
  for (int seed = 0; seed < 200; ++seed) {
    OracleOptions options;
    options.seed = static_cast<std::uint64_t>(seed);
    options.vocabulary = 2 + seed % 5;
    options.repetition = 0.8;
    OracleModel<> model(options);
    const Tokens prompt{0, 1, 1};
    const std::size_t count = 40;
    const int w = 1 + seed % 9;
    const Tokens text = plain_decode(model, prompt, count);
    NaiveDecoder decoder{w, 2, 0, true};
    CHECK(decoder.decode(model, prompt, count) == text);
    CHECK(decoder.blocks.size() <= count);

    // The guesses y behind what is known; each round replaces each one by what the model says behind those before it.
    const auto choice = [&](Tokens before) { return plain_decode(model, before, 1)[0]; };
    Tokens known = prompt, y;
    for (int j = 1; j < w; ++j) y.push_back(prompt[static_cast<std::size_t>(j) % 3]);
    for (const Tokens& block : decoder.blocks) {
      Tokens said;
      for (int i = 0; i < w; ++i) {
        Tokens before = known;
        before.insert(before.end(), y.begin(), y.begin() + i);
        said.push_back(choice(before));
      }
      const auto right = std::mismatch(y.begin(), y.end(), said.begin()).first - y.begin() + 1;
      REQUIRE(block == Tokens(said.begin(), said.begin() + right));
      known.insert(known.end(), block.begin(), block.end());
      y.assign(said.begin() + right, said.end());
      for (auto j = static_cast<int>(y.size()) + 1; j < w; ++j) y.push_back(prompt[static_cast<std::size_t>(j) % 3]);
    }
  }
}

TEST_CASE("the naive pool ranks by recency and recycles by rank") {
  naive::Pool pool;
  const Tokens text{1, 2, 1, 3, 1, 2, 5, 1};
  pool.add_text(text, text.size());
  const auto by_class = [](const Class& c, int, const naive::Seen&) {
    return (certain >> 8) * static_cast<std::uint64_t>(c.length * 16 - c.rank + (c.source == Source::text ? 0 : 100));
  };
  auto found = pool.candidates({1}, by_class, 0);
  REQUIRE(found.size() == 2);
  CHECK(found[0].token == 2);
  CHECK(found[0].its_class == Class{1, Source::text, 0});
  CHECK(found[1].token == 3);
  CHECK(found[1].its_class == Class{1, Source::text, 1});
  CHECK(found[0].q == (certain >> 8) * 16);
  auto rows = pool.grow({1}, 0, 2, 1, by_class);
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].path == Tokens{2});
  CHECK(rows[0].reach == 0x0FFFFFEF);
  CHECK(rows[1].path == Tokens{3});
  CHECK(rows[1].reach == 0x0E0FFFF2);

  // Two tokens of context know more than one, and a token keeps its best class.
  found = pool.candidates({9, 1, 2}, by_class, 0);
  REQUIRE(found.size() == 2);
  CHECK(found[0].token == 5);
  CHECK(found[0].its_class == Class{2, Source::text, 0});
  CHECK(found[1].token == 1);
  CHECK(found[1].its_class == Class{2, Source::text, 1});

  pool.recycle({7, 8}, {20, 21, 22, 23, 24, 25, 26, 27, 28});
  pool.recycle({8}, {21});
  found = pool.candidates({7, 8}, by_class, 0);
  REQUIRE(found.size() == 8);
  CHECK(found[0].token == 20);
  CHECK(found[0].its_class == Class{2, Source::recycled, 0});
  CHECK(found[4].token == 24);
  CHECK(found[4].its_class == Class{1, Source::recycled, 4});
  found = pool.candidates({8}, by_class, 0);
  REQUIRE(found.size() == 7);
  CHECK(found[0].token == 21);
  CHECK(found[1].token == 22);

  using Scores = std::vector<std::tuple<Class, naive::Seen, bool>>;
  CHECK(pool.score({1}, 2, by_class, 0) == Scores{{{1, Source::text, 0}, {2, 3}, true}});
  CHECK(pool.score({1}, 3, by_class, 0) ==
        Scores{{{1, Source::text, 0}, {2, 3}, false}, {{1, Source::text, 1}, {1, 3}, true}});
  CHECK(pool.score({1}, 4, by_class, 0) ==
        Scores{{{1, Source::text, 0}, {2, 3}, false}, {{1, Source::text, 1}, {1, 3}, false}});

  // A set is cut to 16, and never promises more than certainty.
  for (int t = 100; t < 130; ++t) pool.add_text({50, t}, 1);
  const auto sure = [](const Class&, int, const naive::Seen&) { return 2 * certain; };
  found = pool.candidates({50}, sure, 0);
  REQUIRE(found.size() == 16);
  CHECK(found[0].token == 129);
  rows = pool.grow({50}, 0, 20, 1, sure);
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].reach == 0xFFFEFFFF);
  CHECK(rows[1].reach == 0x0000FFFF);
  CHECK(found[7].token == 100);
  CHECK(found[7].its_class.rank == 7);
}

TEST_CASE("the naive pool's published guesses are the newest chains") {
  naive::Pool pool;
  pool.add_window({1, 2, 3, 4});
  pool.add_window({1, 2, 5, 6});
  pool.add_window({1, 7, 8, 9});
  pool.add_window({1, 2, 3, 4});
  CHECK(pool.guesses(1, 4, 2) == std::vector<Tokens>{{2, 3, 4}, {7, 8, 9}});
  CHECK(pool.guesses(1, 4, 9) == std::vector<Tokens>{{2, 3, 4}, {7, 8, 9}, {2, 5, 6}});
  CHECK(pool.guesses(1, 3, 1) == std::vector<Tokens>{{2, 3}});
  CHECK(pool.guesses(4, 4, 3).empty());
}

TEST_CASE("naive growth takes the rows of the largest reach") {
  std::mt19937 random(3);
  const auto below = [&](int limit) { return static_cast<int>(random() % static_cast<unsigned>(limit)); };
  for (int round = 0; round < 300; ++round) {
    naive::Pool pool;
    Tokens text(static_cast<std::size_t>(10 + below(40)));
    for (auto& t : text) t = below(4);
    pool.add_text(text, text.size());
    if (below(2) == 0) pool.recycle(text, {2, 0, 1});
    const auto all = pool.grow(text, 0, 100000, 4, flat);
    std::uint64_t before = certain;
    std::map<Tokens, std::uint64_t> reach{{Tokens{}, certain}}, spent;
    for (const auto& row : all) {
      CHECK(row.reach <= before);
      before = row.reach;
      const Tokens parent(row.path.begin(), row.path.end() - 1);
      REQUIRE(reach.count(parent) == 1);
      CHECK(reach.emplace(row.path, row.reach).second);
      CHECK((spent[parent] += row.reach) <= reach[parent]);
    }
    const int few = below(20);
    const auto some = pool.grow(text, 0, few, 4, flat);
    REQUIRE(some.size() == std::min(all.size(), static_cast<std::size_t>(few)));
    for (std::size_t i = 0; i < some.size(); ++i) CHECK(some[i].path == all[i].path);

    Rows planted;
    for (const auto& row : all)
      if (below(4) == 0) planted[row.path] = false;
    std::size_t unplanted = 0;
    for (const auto& row : pool.grow(text, 0, few, 4, flat, planted)) unplanted += row.planted ? 0 : 1;
    CHECK(unplanted <= static_cast<std::size_t>(few));
  }
}

TEST_CASE("decoding with the naive parts equals plain decoding") {
  std::mt19937 random(4);
  const auto below = [&](int limit) { return static_cast<int>(random() % static_cast<unsigned>(limit)); };
  double tokens = 0, steps = 0;
  for (int round = 0; round < std::min(cases(400), 400); ++round) {
    OracleOptions options;
    options.vocabulary = below(2) == 0 ? 2 + below(6) : 2 + below(1000);
    options.seed = random();
    options.repetition = below(11) / 10.0;
    options.max_rows = options.max_logit_rows = 256;
    options.max_kept = below(4) == 0 ? below(3) : 1000;
    OracleModel<> model(options);
    Tokens prompt(static_cast<std::size_t>(1 + below(12)));
    for (auto& t : prompt) t = below(options.vocabulary);
    const std::size_t count = 50;
    const Tokens text = plain_decode(model, prompt, count);
    NaiveDecoder decoder{below(8), 2 + below(5), below(16), below(2) == 0};
    REQUIRE(decoder.decode(model, prompt, count) == text);
    for (const Tokens& block : decoder.blocks) tokens += static_cast<double>(block.size());
    steps += static_cast<double>(decoder.blocks.size());
  }
  MESSAGE("tokens per step ", tokens / steps);
  CHECK(tokens > 1.5 * steps);
}
