// The oracle models: what they compute, and that they catch every breach of the rules that they are meant to catch.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <functional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "no_alloc.hpp"

#include "lookahead/model.hpp"
#include "lookahead/testing/oracle_model.hpp"
#include "lookahead/testing/plain_decode.hpp"

namespace {

using namespace lookahead;
using lookahead::testing::InjectedFault;
using lookahead::testing::OracleFault;
using lookahead::testing::OracleModel;
using lookahead::testing::OracleOptions;
using lookahead::testing::plain_decode;
using lookahead::testing::Reads;

using Tokens = std::vector<std::int32_t>;
using Path = std::vector<std::int32_t>;
using Tree = TokenTreeStorage<std::int32_t, 160>;

static_assert(Model<OracleModel<>> && GreedyModel<OracleModel<>> && TopTokensModel<OracleModel<>>);
static_assert(LogitsModel<OracleModel<>> && ForkableModel<OracleModel<>>);
template <Reads Ways>
using View = OracleModel<std::int32_t, Ways>;
static_assert(Model<View<Reads::next_token>> && ForkableModel<View<Reads::next_token>>);
static_assert(GreedyModel<View<Reads::next_token>> && !TopTokensModel<View<Reads::next_token>>);
static_assert(!LogitsModel<View<Reads::next_token>> && !GreedyModel<View<Reads::top_tokens>>);
static_assert(TopTokensModel<View<Reads::top_tokens>> && !LogitsModel<View<Reads::top_tokens>>);
static_assert(LogitsModel<View<Reads::logits>> && !GreedyModel<View<Reads::logits>>);
static_assert(!TopTokensModel<View<Reads::logits>> && Model<View<Reads::logits>> && Model<View<Reads::top_tokens>>);
static_assert(Model<OracleModel<std::uint16_t>> && Model<OracleModel<std::int8_t>>);

const Tokens prompt{3, 1, 4, 1, 5, 9, 2, 6};

// A model that holds `prompt`, and a tree on top of it: pending rows 0 and 1, then
//   1 -> 2 -> 3 -> 4     and 1 -> 5 -> 6.
struct Fixture {
  OracleModel<> model;
  Tree tree;
  explicit Fixture(const OracleOptions& options = {}) : model(options) {
    model.prefill(prompt);
    const Tokens pending{7, 8};
    tree.begin(8, pending.data(), 2);
    tree.add(1, 10);
    tree.add(2, 11);
    tree.add(3, 12);
    tree.add(1, 20);
    tree.add(5, 11);
    for (const int r : {1, 2, 4, 6}) tree.want(r);
  }
  void flip(int row, int bit) { tree.ancestor[row * tree.words + bit / 32] ^= 1U << (bit % 32); }
};

OracleFault fault_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const OracleFault& fault) {
    return fault;
  }
  FAIL("no OracleFault");
  return OracleFault("");
}

void check_fault(const std::function<void()>& call, const std::string& text, int row = -1, int position = -1) {
  const OracleFault fault = fault_of(call);
  CAPTURE(fault.what());
  CHECK(std::string(fault.what()).find(text) != std::string::npos);
  CHECK(fault.row == row);
  CHECK(fault.position == position);
}

// What a fresh model says behind `tokens`.
template <class M>
std::int32_t chain_answer(M model, const Tokens& tokens) {
  return plain_decode(model, tokens, 1).at(0);
}

std::vector<float> copy(std::span<const float> logits) { return {logits.begin(), logits.end()}; }

}  // namespace

TEST_CASE("forward refuses a row that does not see exactly its path") {
  Fixture f;
  const auto forward = [&] { f.model.forward(f.tree.view()); };
  forward();
  SUBCASE("a missing ancestor") {
    f.flip(4, 2);
    check_fault(forward, "row 4 at position 12 misses position 10", 4, 10);
  }
  SUBCASE("a missing pending row") {
    f.flip(1, 0);
    check_fault(forward, "row 1 at position 9 misses position 8", 1, 8);
  }
  SUBCASE("a row of another branch") {
    f.flip(6, 2);
    check_fault(forward, "row 6 at position 11 sees position 10 twice", 6, 10);
  }
  SUBCASE("a row of another branch instead of the ancestor") {
    f.tree.add(6, 12);
    f.flip(7, 6);
    f.flip(7, 3);
    check_fault(forward, "row 7 at position 12 sees rows of more than one path", 7, 12);
  }
  SUBCASE("a later row of another branch instead of the ancestor") {
    f.flip(4, 2);
    f.flip(4, 5);
    check_fault(forward, "row 4 at position 12 sees row 5 at position 10", 4, 10);
  }
  SUBCASE("another whole path") {
    f.flip(6, 2);
    f.flip(6, 5);
    check_fault(forward, "row 6 at position 11 has parent 5 but sees row 2", 6, 11);
  }
  SUBCASE("a later row") {
    f.flip(2, 5);
    check_fault(forward, "row 2 at position 10 sees position 10 twice", 2, 10);
  }
  SUBCASE("a later row at a later position") {
    f.flip(2, 6);
    check_fault(forward, "row 2 at position 10 sees row 6 at position 11", 2, 11);
  }
  SUBCASE("not itself") {
    f.flip(3, 3);
    check_fault(forward, "row 3 at position 11 does not see itself", 3, 11);
  }
  SUBCASE("a bit beyond the tree") {
    f.flip(3, 7);
    check_fault(forward, "or beyond the tree", 3, 11);
  }
  SUBCASE("a position too far") {
    f.tree.position[6] = 12;
    check_fault(forward, "row 6 at position 12 misses position 11", 6, 11);
  }
  SUBCASE("its parent's position") {
    f.tree.position[6] = 10;
    check_fault(forward, "row 6 at position 10 sees position 10 twice", 6, 10);
  }
  SUBCASE("positions that start too late") {
    for (int r = 0; r < 7; ++r) ++f.tree.position[r];
    check_fault(forward, "row 0 at position 9 misses position 8", 0, 8);
  }
  SUBCASE("a position inside the context") {
    f.tree.position[0] = 7;
    check_fault(forward, "row 0 at position 7 repeats a position of the context", 0, 7);
  }
  SUBCASE("a refused tree leaves nothing to read, and the context as it was") {
    f.flip(4, 2);
    CHECK_THROWS_AS(forward(), OracleFault);
    check_fault([&] { (void)f.model.next_token(1); }, "no valid results", 1);
    CHECK(f.model.context_size() == 8);
    f.flip(4, 2);
    forward();
    CHECK(f.model.next_token(1) == chain_answer(OracleModel({}), {3, 1, 4, 1, 5, 9, 2, 6, 7, 8}));
  }
}

TEST_CASE("every flipped mask bit and every changed position is refused") {
  Fixture f;
  for (int row = 0; row < f.tree.rows; ++row) {
    for (int bit = 0; bit < 32; ++bit) {
      f.flip(row, bit);
      CHECK_THROWS_AS(f.model.forward(f.tree.view()), OracleFault);
      f.flip(row, bit);
    }
    for (const int by : {-9, -2, -1, 1, 2, 1000}) {
      f.tree.position[row] += by;
      CHECK_THROWS_AS(f.model.forward(f.tree.view()), OracleFault);
      f.tree.position[row] -= by;
    }
  }
  f.model.forward(f.tree.view());
}

TEST_CASE("forward refuses trees that contradict the rules of TokenTree") {
  Fixture f;
  const auto forward = [&] { f.model.forward(f.tree.view()); };
  SUBCASE("parent") {
    f.tree.parent[4] = 2;
    check_fault(forward, "row 4 at position 12 has parent 2 but sees row 3", 4, 12);
  }
  SUBCASE("depth") {
    f.tree.depth[3] = 3;
    check_fault(forward, "row 3 at position 11 has depth 3 instead of 2", 3, 11);
  }
  SUBCASE("siblings with one token") {
    f.tree.token[5] = 10;
    check_fault(forward, "row 5 at position 10 repeats its sibling 2", 5, 10);
  }
  SUBCASE("a branch from the pending chain before the root") {
    f.tree.root = 2;
    f.tree.depth[2] = 0;
    f.tree.depth[3] = 1;
    f.tree.depth[4] = 2;
    check_fault(forward, "row 5 at position 10 has parent 1: the pending chain is not one chain", 5, 10);
  }
  SUBCASE("a fork inside the pending chain") {
    f.tree.root = 5;
    for (int& d : f.tree.depth) d = 0;
    check_fault(forward, "row 5 at position 10 has parent 1: the pending chain is not one chain", 5, 10);
  }
  SUBCASE("a second first row") {
    f.tree.add(1, 30);
    f.tree.parent[7] = -1;
    f.tree.position[7] = 8;
    f.flip(7, 0);
    f.flip(7, 1);
    check_fault(forward, "row 7 at position 8 has parent -1: the pending chain is not one chain", 7, 8);
  }
  SUBCASE("a root outside the tree") {
    f.tree.root = 7;
    check_fault(forward, "the root 7 is none of 7 rows");
    f.tree.root = -1;
    check_fault(forward, "the root -1 is none of 7 rows");
  }
  SUBCASE("another context") {
    f.tree.context_size = 9;
    check_fault(forward, "the tree stands on 9 tokens; the context has 8");
  }
  SUBCASE("an empty tree") {
    f.tree.begin(8, nullptr, 0);
    check_fault(forward, "empty tree");
    check_fault([&] { f.model.forward({}); }, "empty tree");
  }
  SUBCASE("tokens outside the vocabulary") {
    f.tree.token[3] = 256;
    check_fault(forward, "row 3 carries token 256; the vocabulary ends at 255", 3, 11);
    f.tree.token[3] = -1;
    check_fault(forward, "row 3 carries token -1", 3, 11);
  }
  SUBCASE("wanted rows") {
    f.tree.want_bits[0] ^= 1U << 3;
    check_fault(forward, "the list and the bits of the wanted rows differ at row 3", 3);
    f.tree.want_bits[0] ^= 1U << 3 | 1U << 4;
    check_fault(forward, "differ at row 4", 4);
    f.tree.want_bits[0] ^= 1U << 4;
    std::swap(f.tree.wanted[1], f.tree.wanted[2]);
    check_fault(forward, "wanted row 2 follows row 4 of 7", 2);
    f.tree.wanted[1] = 7;
    check_fault(forward, "wanted row 7 follows row 1 of 7", 7);
  }
}

TEST_CASE("limits are exact") {
  OracleOptions options;
  const auto forward = [&] {
    Fixture f(options);
    f.model.forward(f.tree.view());
  };
  options.max_rows = 7;
  options.max_logit_rows = 4;
  options.capacity = 15;
  CHECK_NOTHROW(forward());
  SUBCASE("rows") {
    options.max_rows = 6;
    check_fault(forward, "forward of 7 rows; the model takes 6");
  }
  SUBCASE("logit rows") {
    options.max_logit_rows = 3;
    check_fault(forward, "forward of 4 wanted rows; the model takes 3");
  }
  SUBCASE("slots") {
    options.capacity = 14;
    check_fault(forward, "forward of 7 rows into 6 free slots");
  }
  SUBCASE("prefill, truncate and their limits") {
    Fixture f(options);
    CHECK(f.model.free_slots() == 7);
    check_fault([&] { f.model.prefill(prompt); }, "prefill of 8 tokens into 7 free slots");
    const Tokens outside{1, 256};
    check_fault([&] { f.model.prefill(outside); }, "row 1 carries token 256", 1, 8);
    check_fault([&] { f.model.truncate(9); }, "truncate to 9 of 8 tokens");
    CHECK(f.model.context_size() == 8);
    f.model.truncate(8);
    f.model.truncate(0);
    CHECK(f.model.free_slots() == 15);
  }
  SUBCASE("options") {
    const auto build = [](auto change) {
      OracleOptions o;
      change(o);
      OracleModel<std::int8_t> model(o);
    };
    CHECK_NOTHROW(build([](OracleOptions& o) { o.vocabulary = 128; }));
    CHECK_THROWS_WITH_AS(build([](OracleOptions& o) { o.vocabulary = 129; }),
                         "OracleOptions: vocabulary is 129; choose a value from 2 to 128", InvalidArgument);
    CHECK_THROWS_AS(build([](OracleOptions& o) { o.vocabulary = 1; }), InvalidArgument);
    CHECK_THROWS_AS(build([](OracleOptions& o) { o.vocabulary = 100, o.capacity = 0; }), InvalidArgument);
    CHECK_THROWS_AS(build([](OracleOptions& o) { o.vocabulary = 100, o.max_rows = 0; }), InvalidArgument);
    CHECK_THROWS_AS(build([](OracleOptions& o) { o.vocabulary = 100, o.max_logit_rows = 0; }), InvalidArgument);
    CHECK_THROWS_AS(build([](OracleOptions& o) { o.vocabulary = 100, o.max_kept = -1; }), InvalidArgument);
    CHECK_THROWS_AS(build([](OracleOptions& o) { o.vocabulary = 100, o.repetition = 1.5; }), InvalidArgument);
    CHECK_THROWS_AS(build([](OracleOptions& o) { o.vocabulary = 100, o.repetition = NAN; }), InvalidArgument);
  }
}

TEST_CASE("unwanted and stale rows cannot be read") {
  Fixture f;
  const auto read = [&](int row) { return [&f, row] { (void)f.model.next_token(row); }; };
  check_fault(read(1), "no valid results", 1);
  f.model.forward(f.tree.view());
  CHECK_NOTHROW(read(6)());
  for (const int row : {-1, 0, 3, 5, 7, 1000}) check_fault(read(row), "was not wanted", row);
  std::int32_t best[2];
  check_fault([&] { (void)f.model.top_tokens(3, best); }, "was not wanted", 3);
  check_fault([&] { (void)f.model.logits(3); }, "was not wanted", 3);
  SUBCASE("truncate") { f.model.truncate(8); }
  SUBCASE("prefill") { f.model.prefill(Tokens{}); }
  SUBCASE("commit") { f.model.commit(Path{0, 1}); }
  SUBCASE("refused commit") { CHECK_THROWS(f.model.commit(Path{0})); }
  check_fault(read(1), "no valid results", 1);
  check_fault([&] { (void)f.model.top_tokens(1, best); }, "no valid results", 1);
  check_fault([&] { (void)f.model.logits(1); }, "no valid results", 1);
  check_fault([&] { f.model.commit(Path{0, 1}); }, "commit without a forward");
}

TEST_CASE("commit takes a path and nothing else") {
  Fixture f;
  const auto commit = [&](const Path& path) {
    return [&f, path] {
      f.model.forward(f.tree.view());
      f.model.commit(path);
    };
  };
  check_fault(commit({}), "commit of 0 rows lacks a row of the pending chain", 0);
  check_fault(commit({0}), "commit of 1 rows lacks a row of the pending chain", 1);
  check_fault(commit({1, 2}), "commit of row 1 behind row -1, which is not its parent", 1, 9);
  check_fault(commit({0, 2}), "commit of row 2 behind row 0, which is not its parent", 2, 10);
  check_fault(commit({0, 1, 3}), "commit of row 3 behind row 1, which is not its parent", 3, 11);
  check_fault(commit({0, 1, 2, 6}), "commit of row 6 behind row 2, which is not its parent", 6, 11);
  check_fault(commit({0, 1, 2, 2}), "commit of row 2 behind row 2 of 7: rows of a path increase", 2);
  check_fault(commit({0, 1, 7}), "commit of row 7 behind row 1 of 7: rows of a path increase", 7);
  check_fault(commit({0, 1, -1}), "commit of row -1 behind row 1", -1);
  CHECK(f.model.context_size() == 8);
  for (const Path& path : {Path{0, 1}, Path{0, 1, 2}, Path{0, 1, 2, 3, 4}, Path{0, 1, 5, 6}}) {
    OracleModel<> model = f.model.fork();
    model.forward(f.tree.view());
    CHECK(model.commit(path) == path.size());
    CHECK(model.context_size() == 8 + path.size());
    Tokens tokens = prompt;
    for (const int row : path) tokens.push_back(f.tree.token[row]);
    tokens.push_back(99);
    Tree next;
    next.begin(static_cast<int>(tokens.size()) - 1, &tokens.back(), 1);
    next.want(0);
    model.forward(next.view());
    CHECK(model.next_token(0) == chain_answer(OracleModel({}), tokens));
  }
}

TEST_CASE("max_kept bounds the speculative rows that a commit keeps") {
  for (const auto& [most, kept] : {std::tuple{0, 2}, {1, 3}, {2, 4}, {9, 5}}) {
    OracleOptions options;
    options.max_kept = most;
    Fixture f(options);
    f.model.forward(f.tree.view());
    CHECK(f.model.commit(Path{0, 1, 2, 3, 4}) == static_cast<std::size_t>(kept));
    CHECK(f.model.context_size() == static_cast<std::size_t>(8 + kept));
  }
}

TEST_CASE("told to fail, the model fails once and keeps its context") {
  OracleOptions options;
  options.fail_forward = 2;
  options.fail_commit = 2;
  options.fail_prefill = 3;
  Fixture f(options);
  const auto forward = [&] { f.model.forward(f.tree.view()); };
  forward();
  f.model.commit(Path{0, 1, 5});
  f.model.truncate(8);
  CHECK_THROWS_WITH_AS(forward(), "forward 2 fails as told", InjectedFault);
  CHECK(f.model.context_size() == 8);
  check_fault([&] { (void)f.model.next_token(1); }, "no valid results", 1);
  forward();
  CHECK_THROWS_WITH_AS(f.model.commit(Path{0, 1}), "commit 2 fails as told", InjectedFault);
  CHECK(f.model.context_size() == 8);
  forward();
  CHECK(f.model.next_token(1) == chain_answer(OracleModel({}), {3, 1, 4, 1, 5, 9, 2, 6, 7, 8}));
  CHECK(f.model.commit(Path{0, 1}) == 2);
  f.model.truncate(0);
  f.model.prefill(prompt);
  CHECK_THROWS_WITH_AS(f.model.prefill(Tokens{1, 2, 3}), "prefill 3 fails as told", InjectedFault);
  CHECK(f.model.context_size() == 9);
  f.model.truncate(8);
  forward();
}

TEST_CASE("a tree's rows say what chains say") {
  std::mt19937 random(1);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 2000; ++round) {
    OracleOptions options;
    options.vocabulary = round % 3 == 0 ? 2 + below(3) : 2 + below(50000);
    options.seed = random();
    options.repetition = below(5) / 4.0;
    options.capacity = 400;
    options.max_rows = 160;
    options.max_logit_rows = 160;
    OracleModel<> model(options);
    const OracleModel<> fresh = model;
    Tokens context(static_cast<std::size_t>(below(20)));
    for (auto& t : context) t = below(options.vocabulary);
    model.prefill(context);

    Tree tree;
    Tokens pending(static_cast<std::size_t>(1 + below(4)));
    for (auto& t : pending) t = below(options.vocabulary);
    tree.begin(static_cast<int>(context.size()), pending.data(), static_cast<int>(pending.size()));
    const int rows = tree.rows + below(round % 10 == 0 ? 150 : 12);
    for (int tries = 0; tree.rows < rows && tries < 1000; ++tries) {
      const int parent = tree.root + below(tree.rows - tree.root);
      const int token = below(options.vocabulary);
      if (tree.view().child(parent, token) < 0) tree.add(parent, token);
    }
    for (int r = 0; r < tree.rows; ++r)
      if (below(2) == 0) tree.want(r);
    model.forward(tree.view());

    const auto path_to = [&](int row) {
      Path path;
      for (; row >= 0; row = tree.parent[row]) path.insert(path.begin(), row);
      return path;
    };
    for (const int row : tree.view().wanted()) {
      Tokens tokens = context;
      for (const int r : path_to(row)) tokens.push_back(tree.token[r]);
      CHECK(model.next_token(row) == chain_answer(fresh, tokens));
    }

    const int leaf = tree.root + below(tree.rows - tree.root);
    const Path path = path_to(leaf);
    CHECK(model.commit(path) == path.size());
    for (const int r : path) context.push_back(tree.token[r]);
    const std::size_t left = static_cast<std::size_t>(below(static_cast<int>(context.size()) + 1));
    model.truncate(left);
    context.resize(left);
    const std::int32_t newest = below(options.vocabulary);
    tree.begin(static_cast<int>(left), &newest, 1);
    tree.want(0);
    model.forward(tree.view());
    context.push_back(newest);
    CHECK(model.next_token(0) == chain_answer(fresh, context));
  }
}

TEST_CASE("the choice depends on every token of the path and on its order") {
  OracleOptions options;
  options.vocabulary = 50000;
  options.repetition = 0;
  const OracleModel<> fresh(options);
  Tokens tokens = prompt;
  const std::int32_t answer = chain_answer(fresh, tokens);
  CHECK(answer == chain_answer(fresh, tokens));
  for (auto& t : tokens) {
    ++t;
    CHECK(chain_answer(fresh, tokens) != answer);
    --t;
  }
  std::swap(tokens[2], tokens[5]);
  CHECK(chain_answer(fresh, tokens) != answer);
  options.seed = 2;
  CHECK(chain_answer(OracleModel(options), prompt) != answer);
}

TEST_CASE("the three ways to read agree") {
  std::mt19937 random(2);
  for (const int vocabulary : {2, 3, 4, 5, 6, 7, 64, 1000, 50000, 65536}) {
    OracleOptions options;
    options.vocabulary = vocabulary;
    options.seed = random();
    OracleModel<> model(options);
    const auto token = [&] { return static_cast<std::int32_t>(random() % static_cast<unsigned>(vocabulary)); };
    Tree tree;
    const Tokens pending{token(), token()};
    tree.begin(0, pending.data(), 2);
    for (int r = 0; r < 12; ++r)
      if (const auto t = token(); tree.view().child(r % 2 + 1 < tree.rows ? r % 2 + 1 : 1, t) < 0)
        tree.add(r % 2 + 1 < tree.rows ? r % 2 + 1 : 1, t);
    for (int r = 1; r < tree.rows; r += 2) tree.want(r);
    model.forward(tree.view());
    std::vector<std::span<const float>> logits;
    for (const int row : tree.view().wanted()) logits.push_back(model.logits(row));
    std::size_t which = 0;
    for (const int row : tree.view().wanted()) {
      Tokens best(static_cast<std::size_t>(vocabulary) + 1);
      REQUIRE(model.top_tokens(row, best) == best.size() - 1);
      best.pop_back();
      CHECK(best[0] == model.next_token(row));
      CHECK(std::set<std::int32_t>(best.begin(), best.end()).size() == best.size());
      CHECK(*std::ranges::min_element(best) == 0);
      CHECK(*std::ranges::max_element(best) == vocabulary - 1);
      Tokens few(std::min<std::size_t>(5, best.size()));
      CHECK(model.top_tokens(row, few) == few.size());
      CHECK(std::equal(few.begin(), few.end(), best.begin()));
      const std::span<const float> of_row = logits[which++];
      REQUIRE(of_row.size() == best.size());
      bool falls = true;
      for (std::size_t i = 1; i < best.size(); ++i)
        falls = falls && of_row[static_cast<std::size_t>(best[i])] < of_row[static_cast<std::size_t>(best[i - 1])];
      CHECK(falls);
      CHECK(model.top_tokens(row, {}) == 0);
    }
  }
}

TEST_CASE("views decode as the whole model does") {
  OracleOptions options;
  options.vocabulary = 40;
  const auto decode = [&](auto model) { return plain_decode(model, prompt, 60); };
  const Tokens text = decode(OracleModel(options));
  CHECK(text.size() == 60);
  CHECK(decode(View<Reads::next_token>(options)) == text);
  CHECK(decode(View<Reads::top_tokens>(options)) == text);
  CHECK(decode(View<Reads::logits>(options)) == text);
}

TEST_CASE("logits belong to the last forward") {
  Fixture f;
  f.model.forward(f.tree.view());
  const auto first = copy(f.model.logits(2));
  CHECK(copy(f.model.logits(4)) != first);
  f.tree.token[2] = 13;
  f.model.forward(f.tree.view());
  const auto second = copy(f.model.logits(2));
  CHECK(second != first);
  f.tree.token[2] = 10;
  f.model.forward(f.tree.view());
  CHECK(copy(f.model.logits(2)) == first);
}

TEST_CASE("forks are independent and have no results") {
  Fixture f;
  f.model.forward(f.tree.view());
  OracleModel<> fork = f.model.fork();
  check_fault([&] { (void)fork.next_token(1); }, "no valid results", 1);
  CHECK(fork.context_size() == 8);
  fork.prefill(prompt);
  fork.truncate(3);
  const auto here = f.model.next_token(1);
  CHECK(here == chain_answer(OracleModel({}), {3, 1, 4, 1, 5, 9, 2, 6, 7, 8}));
  f.model.commit(Path{0, 1, 2});
  CHECK(f.model.context_size() == 11);
  CHECK(fork.context_size() == 3);
  CHECK(chain_answer(fork, prompt) == chain_answer(f.model, prompt));
}

TEST_CASE("a step allocates nothing") {
  Fixture f;
  f.model.forward(f.tree.view());
  (void)f.model.logits(1);
  std::int32_t best[8];
  const Path path{0, 1, 2, 3, 4};
  const std::size_t before = allocation_count();
  for (int step = 0; step < 10; ++step) {
    f.model.forward(f.tree.view());
    (void)f.model.next_token(2);
    (void)f.model.top_tokens(4, best);
    (void)f.model.logits(6);
    f.model.commit(path);
    f.model.truncate(0);
    f.model.prefill(prompt);
  }
  CHECK(allocation_count() == before);
  (void)f.model.fork();
  CHECK(allocation_count() > before);
}

TEST_CASE("plain decoding stops at end tokens, the limit and the last slot") {
  OracleOptions options;
  options.vocabulary = 50;
  OracleModel<> model(options);
  const Tokens text = plain_decode(model, prompt, 40);
  CHECK(text.size() == 40);
  CHECK(model.context_size() == prompt.size() + 40 - 1);
  CHECK(plain_decode(model, prompt, 40) == text);
  CHECK(plain_decode(model, prompt, 0).empty());
  const Tokens ends{text[7], text[20]};
  const auto first = std::min(std::ranges::find(text, ends[0]), std::ranges::find(text, ends[1]));
  CHECK(plain_decode(model, prompt, 40, ends) == Tokens(text.begin(), first + 1));
  options.capacity = 12;
  OracleModel<> small(options);
  CHECK(plain_decode(small, prompt, 40) == Tokens(text.begin(), text.begin() + 5));
  CHECK(small.free_slots() == 0);
}

TEST_CASE("the dial sets how many n-grams recur") {
  const auto repeat_rate = [](int vocabulary, double repetition) {
    OracleOptions options;
    options.vocabulary = vocabulary;
    options.repetition = repetition;
    int repeats = 0, grams = 0;
    for (options.seed = 1; options.seed <= 20; ++options.seed) {
      OracleModel<> model(options);
      const Tokens text = plain_decode(model, prompt, 500);
      std::set<std::tuple<int, int, int>> known;
      for (std::size_t i = 2; i < text.size(); ++i, ++grams)
        repeats += known.insert({text[i - 2], text[i - 1], text[i]}).second ? 0 : 1;
    }
    return static_cast<double>(repeats) / grams;
  };
  for (const int vocabulary : {256, 50000}) {
    const double none = repeat_rate(vocabulary, 0), half = repeat_rate(vocabulary, 0.5),
                 most = repeat_rate(vocabulary, 0.9);
    MESSAGE("vocabulary ", vocabulary, ": share of recurring 3-grams ", none, " at 0, ", half, " at 0.5, ", most,
            " at 0.9");
    CHECK(none < 0.01);
    CHECK(half > none);
    CHECK(most > 0.2);
    CHECK(most > 2 * half);
  }
}
