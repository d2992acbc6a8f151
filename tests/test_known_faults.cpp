// One test for each fault that other implementations of lookahead decoding have, or had. Those that are about how
// tokens are chosen have theirs where that is tested: sampling with and without drafts in test_sample.cpp, processors
// that see drafts in test_processors.cpp, grammars in test_json_grammar.cpp, log-probabilities in test_log_probs.cpp.
// That a pool takes no memory while it works is in test_no_alloc.cpp, that sequence ids are ranges in test_mask.cpp.
#include <algorithm>
#include <cstdint>
#include <doctest/doctest.h>
#include <span>
#include <vector>

#include "step_loop.hpp"

#include "lookahead/decoder.hpp"

namespace {

using namespace step_loop;
using lookahead::Decoder;
using lookahead::DecoderOptions;
using lookahead::Generation;
using lookahead::Lookahead;
using lookahead::StopReason;
using lookahead::TokenTree;

const Tokens prompt{3, 1, 4, 1, 5, 9, 2, 6};

// A language in which no token comes twice by rule, so that nothing is guessed right by chance.
OracleOptions free_of_repeats() {
  OracleOptions options;
  options.vocabulary = 50000;
  options.repetition = 0;
  return options;
}

OracleOptions repetitive() {
  OracleOptions options;
  options.vocabulary = 50;
  options.repetition = 1;
  return options;
}

Tokens truth(const OracleOptions& options, const Tokens& text, std::size_t count) {
  OracleModel<Token> model(options);
  return plain_decode(model, std::span(text), count);
}

// An engine that keeps a record of what it is asked for.
struct Recorder : OracleModel<Token> {
  using OracleModel<Token>::OracleModel;
  std::vector<Tokens> trees;  // tokens and parents of each
  int widest = 0, moved = 0, prefills = 0, truncates = 0, forwards = 0;
  void prefill(std::span<const Token> tokens) {
    ++prefills;
    OracleModel<Token>::prefill(tokens);
  }
  void truncate(std::size_t n) {
    ++truncates;
    OracleModel<Token>::truncate(n);
  }
  void forward(const TokenTree<Token>& tree) {
    ++forwards;
    widest = std::max(widest, tree.size());
    Tokens record(tree.tokens().begin(), tree.tokens().end());
    record.insert(record.end(), tree.parents().begin(), tree.parents().end());
    trees.push_back(record);
    OracleModel<Token>::forward(tree);
  }
  std::size_t commit(std::span<const std::int32_t> path) {
    moved += length(path);
    return OracleModel<Token>::commit(path);
  }
};

struct Keep {
  Tokens& tokens;
  void operator()(std::span<const Token> block) const { tokens.insert(tokens.end(), block.begin(), block.end()); }
};

DecoderOptions<Token> with_window() {
  DecoderOptions<Token> options;
  options.cost = lookahead::StepCost::none();
  options.shape.w = 15;
  options.rows = 100;
  return options;
}

}  // namespace

TEST_CASE("the bonus token of a fully matched guess is kept: N tokens from a guess of N - 1") {
  const OracleOptions options = free_of_repeats();
  using Step = Lookahead<7, 5, 7>;
  Hooks<Step> none;
  Loop<Step> loop(options, 1 << 16, none);
  loop.start(prompt, 0, 40);
  loop.pool.add_text(loop.truth());
  loop.step({0, 5, 1, ShapeMode::published}, loop.limits());
  CHECK(loop.tokens == 5);
  loop.step({0, 3, 1, ShapeMode::published}, loop.limits());
  CHECK(loop.tokens == 8);
  loop.step({0, 2, 1, ShapeMode::published}, loop.limits());
  CHECK(loop.tokens == 10);
  // Growth drafts as deep as it may.
  loop.start(prompt, 0, 80);
  loop.pool.add_text(loop.truth());
  loop.step({}, loop.limits());
  CHECK(loop.tokens == 10 + Step::max_depth + 1);
  Limits limits = loop.limits();
  limits.depth = 7;
  loop.step({}, limits);
  CHECK(loop.tokens == 10 + Step::max_depth + 1 + 8);
}

TEST_CASE("N = 2 works, compiled and chosen, with and without a window, guesses, sliding") {
  using Two = Lookahead<6, 2, 3>;
  using Five = Lookahead<6, 5, 3>;
  const auto check = [](auto& loop, const Shape& shape) {
    loop.start(prompt, 1, 60);
    while (!loop.ended()) loop.step(shape, loop.limits());
    CHECK(loop.text() == loop.truth());
  };
  for (const int w : {0, 1, 6}) {
    for (const int g : {0, 3}) {
      for (const ShapeMode mode : {ShapeMode::growth, ShapeMode::published}) {
        for (const bool slide : {false, true}) {
          Hooks<Two> none;
          Loop<Two> two(repetitive(), 4096, none);
          check(two, {w, 2, g, mode, slide});
          Hooks<Five> nothing;
          Loop<Five> five(repetitive(), 4096, nothing);
          check(five, {w, 2, g, mode, slide});
          if (g > 0) CHECK(two.tokens > two.steps);
        }
      }
    }
  }
}

TEST_CASE("no global generator: the same seed gives the same trees, whatever else runs") {
  const auto run = [](std::uint64_t seed, bool disturbed) {
    Recorder model(repetitive()), other_model(repetitive());
    DecoderOptions<Token> options = with_window();
    options.seed = seed;
    Decoder<Recorder> decoder(model, options), other(other_model, options);
    Tokens text, ignored;
    decoder.start(prompt);
    other.start(prompt);
    while (text.size() < 60) {
      decoder.step(60 - text.size(), Keep{text});
      if (disturbed) other.step(1, Keep{ignored});
    }
    CHECK(text == truth(repetitive(), prompt, 60));
    return model.trees;
  };
  const auto trees = run(1, false);
  CHECK(run(1, false) == trees);
  CHECK(run(1, true) == trees);
  bool other_seeds_differ = false;
  for (std::uint64_t seed = 2; seed < 10; ++seed) other_seeds_differ = other_seeds_differ || run(seed, false) != trees;
  CHECK(other_seeds_differ);
}

TEST_CASE("a step moves the accepted rows and nothing else of the cache") {
  Recorder model(repetitive());
  Decoder<Recorder> decoder(model, with_window());
  decoder.start(prompt);
  CHECK(model.prefills == 1);
  CHECK(model.truncates == 1);
  Tokens text;
  decoder.run(100, Keep{text});
  // Each token but the newest is committed once; nothing is fed, copied or cut besides.
  CHECK(model.moved == 100);
  CHECK(model.prefills == 1);
  CHECK(model.truncates == 1);
}

TEST_CASE("no logits for rows that nobody reads, none of the prompt") {
  OracleOptions options = repetitive();
  options.max_logit_rows = 15 + 14 + 3;  // level 0, the last cells of the columns, column 0
  Recorder model(options);
  Decoder<Recorder> decoder(model, with_window());
  decoder.start(Tokens(200, 7));
  CHECK(model.forwards == 0);
  decoder.set_shape({15, 5, 0, ShapeMode::published});
  Tokens text;
  int widest = 0;
  while (text.size() < 60) {
    decoder.step(60 - text.size(), Keep{text});
    widest = std::max(widest, decoder.report().rows - decoder.report().logit_rows);
  }
  CHECK(text == truth(repetitive(), Tokens(200, 7), 60));
  CHECK(widest > 20);  // rows without logits
}

TEST_CASE("the window's own rows are verified: level 0 and column 0 are accepted") {
  using Step = Lookahead<8, 4, 0>;
  Hooks<Step> none;
  Loop<Step> loop(repetitive(), 1, none);
  loop.start(prompt, 0, 200);
  while (!loop.ended()) loop.step({8, 4, 0}, loop.limits());
  CHECK(loop.tokens > loop.steps);
}

TEST_CASE("every one of several end tokens ends the text") {
  const Tokens all = truth(repetitive(), prompt, 40);
  DecoderOptions<Token> options;
  options.cost = lookahead::StepCost::none();
  options.end_tokens = {49, 48, all[20]};
  for (int turn = 0; turn < 3; ++turn) {
    std::rotate(options.end_tokens.begin(), options.end_tokens.begin() + 1, options.end_tokens.end());
    OracleModel<Token> model(repetitive()), plain(repetitive());
    Decoder<OracleModel<Token>> decoder(model, options);
    Tokens text;
    CHECK(decoder.generate(prompt, 40, Keep{text}).stop == StopReason::end_token);
    CHECK(text == plain_decode(plain, std::span(prompt), 40, options.end_tokens));
  }
}

TEST_CASE("an end token inside an accepted block ends the block; nothing behind it is seen or cached") {
  OracleOptions options = free_of_repeats();
  const Tokens all = truth(options, prompt, 40);
  for (std::size_t end = 0; end < 30; ++end) {
    DecoderOptions<Token> how;
    how.cost = lookahead::StepCost::none();
    how.end_tokens = {all[end]};
    how.keep_pool = true;
    OracleModel<Token> model(options);
    Decoder<OracleModel<Token>> decoder(model, how);
    Tokens whole = prompt;
    whole.insert(whole.end(), all.begin(), all.end());
    decoder.add_text(whole);  // the whole text is drafted at once
    Tokens text;
    int blocks = 0;
    const Generation g = decoder.generate(prompt, 40, [&](std::span<const Token> block) {
      ++blocks;
      Keep{text}(block);
    });
    CHECK(g.stop == StopReason::end_token);
    CHECK(text == Tokens(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(end) + 1));
    CHECK(blocks <= 3);
    CHECK(model.context_size() == prompt.size() + text.size() - 1);
  }
}

TEST_CASE("a stop string found afterwards shortens the block") {
  const OracleOptions options = free_of_repeats();
  using Step = Lookahead<7, 5, 7>;
  Hooks<Step> none;
  for (int keep = 1; keep <= 20; ++keep) {
    Loop<Step> loop(options, 1 << 16, none);
    loop.start(prompt, 0, 60);
    loop.pool.add_text(loop.truth());
    loop.plan({}, loop.limits());
    loop.forward();
    const int n = loop.resolve();
    REQUIRE(n > 20);
    loop.finish(keep);
    CHECK(loop.tokens == keep);
    while (!loop.ended()) loop.step({}, loop.limits());
    CHECK(loop.text() == loop.truth());
  }
}

TEST_CASE("streaming: the tokens of a block come together, as soon as they are accepted") {
  Recorder model(repetitive());
  Decoder<Recorder> decoder(model, with_window());
  Tokens text;
  int blocks = 0;
  std::size_t longest = 0;
  decoder.generate(prompt, 80, [&](std::span<const Token> block) {
    CHECK(model.forwards == ++blocks);  // one block a step
    longest = std::max(longest, block.size());
    Keep{text}(block);
  });
  CHECK(text == truth(repetitive(), prompt, 80));
  CHECK(longest > 4);
}

TEST_CASE("a length limit in the middle of a block is exact, and nothing beyond it is computed into the context") {
  const OracleOptions options = free_of_repeats();
  Tokens whole = prompt;
  const Tokens all = truth(options, prompt, 60);
  whole.insert(whole.end(), all.begin(), all.end());
  for (std::size_t limit = 1; limit <= 40; ++limit) {
    Recorder model(options);
    DecoderOptions<Token> how = with_window();
    how.keep_pool = true;
    Decoder<Recorder> decoder(model, how);
    decoder.add_text(whole);
    Tokens text;
    const Generation g = decoder.generate(prompt, limit, Keep{text});
    CHECK(g.stop == StopReason::max_tokens);
    CHECK(text == Tokens(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(limit)));
    CHECK(model.context_size() == prompt.size() + limit - 1);
  }
}

TEST_CASE("column 0's n-gram is filed under the newest token, not under the one before") {
  using Step = Lookahead<4, 4, 4>;
  const OracleOptions options = free_of_repeats();
  Hooks<Step> none;
  Loop<Step> loop(options, 1 << 16, none);
  loop.roomy = true;  // every n-gram of every column is looked up after each step
  loop.start(prompt, 0, 40);
  const Shape shape{4, 4, 0, ShapeMode::published};
  int harvested = 0;
  while (!loop.ended()) {
    const Token root = loop.text().back(), before = loop.text()[loop.text().size() - 2];
    loop.plan(shape, loop.limits());
    const auto window = loop.state().jacobi_window();
    loop.forward();
    loop.finish(loop.resolve());
    if (loop.ended() || !window.ripe(0)) continue;
    ++harvested;
    const Token first = window.cell[1][0];
    CHECK(filed(loop.pool, Source::window, std::span(&root, 1), first));
    CHECK_FALSE(filed(loop.pool, Source::window, std::span(&before, 1), first));
  }
  CHECK(harvested > 20);
}

TEST_CASE("n-grams of the prompt are used, by growth and as published guesses") {
  const Tokens said{11, 12, 13, 14, 15, 16, 20, 21, 11};  // and so 12 13 14 15 may follow
  using Step = Lookahead<5, 5, 5>;
  for (const ShapeMode mode : {ShapeMode::growth, ShapeMode::published}) {
    Hooks<Step> none;
    Loop<Step> loop(free_of_repeats(), 4096, none);
    loop.start(said, 0, 10);
    loop.plan({0, 5, 5, mode}, loop.limits());
    const auto tree = loop.tree().view();
    int row = tree.root();
    for (const Token t : {12, 13, 14, 15}) {
      row = tree.child(row, t);
      REQUIRE(row > 0);
      CHECK(tree.is_wanted(row));
    }
  }
}

TEST_CASE("nothing leaks into the next request") {
  const Tokens second{7, 7, 8, 9};
  for (const bool published : {false, true}) {
    DecoderOptions<Token> options = with_window();
    options.pool_slots = 512;  // so that old entries lie in every set
    if (published) options.shape = Shape::published();
    Recorder used(repetitive()), fresh(repetitive());
    Decoder<Recorder> old_decoder(used, options), new_decoder(fresh, options);
    Tokens text, alone;
    const Generation g = new_decoder.generate(second, 80, Keep{alone});
    CHECK(alone == truth(repetitive(), second, 80));
    // Whatever the last guesses of the request before were worth.
    for (std::size_t count = 40; count < 60; ++count) {
      old_decoder.generate(prompt, count, Keep{text});
      text.clear();
      used.trees.clear();
      CHECK(old_decoder.generate(second, 80, Keep{text}).expected == g.expected);
      CHECK(text == alone);
      CHECK(used.trees == fresh.trees);
    }
  }
}

TEST_CASE("trees of more than 32 and more than 64 rows") {
  OracleOptions options = repetitive();
  options.max_rows = options.max_logit_rows = 1000;
  DecoderOptions<Token> how;
  how.cost = lookahead::StepCost::none();
  how.rows = 1000;
  how.shape = {20, 7, 20, ShapeMode::growth, false};
  Recorder model(options);
  Decoder<Recorder, 20, 7, 20> decoder(model, how);
  Tokens text;
  decoder.generate(prompt, 100, Keep{text});
  CHECK(model.widest > 200);
  how.shape.mode = ShapeMode::published;
  decoder.set_shape(how.shape);
  decoder.generate(prompt, 100, Keep{text});
  const Tokens once = truth(options, prompt, 100);
  CHECK(std::equal(once.begin(), once.end(), text.begin()));
  CHECK(std::equal(once.begin(), once.end(), text.begin() + 100));
}

TEST_CASE("prompts of one token") {
  for (Token t = 0; t < 50; ++t) {
    for (const Shape& shape : {Shape{}, with_window().shape, Shape::published()}) {
      DecoderOptions<Token> options = with_window();
      options.shape = shape;
      OracleModel<Token> model(repetitive());
      Decoder<OracleModel<Token>> decoder(model, options);
      Tokens text;
      decoder.generate(std::span(&t, 1), 30, Keep{text});
      CHECK(text == truth(repetitive(), {t}, 30));
    }
  }
}

TEST_CASE("switched off, it is plain decoding at its cost: one row, one row of logits, one token") {
  Recorder model(repetitive());
  DecoderOptions<Token> options = with_window();
  options.rows = 1;
  Decoder<Recorder> decoder(model, options);
  Tokens text;
  const Generation g = decoder.generate(prompt, 50, Keep{text});
  CHECK(text == truth(repetitive(), prompt, 50));
  CHECK(g.steps == 50);
  CHECK(g.rows == 50);
  CHECK(g.logit_rows == 50);
}

TEST_CASE("more than one request: interleaved, with one pool for all") {
  using Step = Lookahead<7, 5, 7>;
  Pool pool(4096);
  OracleOptions options = repetitive();
  options.capacity = 4000;
  struct Request {
    OracleModel<Token> model;
    Step step;
    Step::Tree tree;
    Tokens text;
  };
  std::vector<Request> requests;
  for (int i = 0; i < 5; ++i) {
    requests.push_back({OracleModel<Token>(options), {}, {}, {i, 2 * i + 1}});
    Request& r = requests.back();
    r.model.prefill(std::span(r.text).first(1));
    r.step.start(pool, r.text);
  }
  for (int turn = 0; turn < 60; ++turn) {
    for (Request& r : requests) {
      r.step.plan(pool, {7, 5, 7}, {.rows = 40, .tokens_left = 200}, r.tree);
      r.model.forward(r.tree.view());
      const auto proposal = r.step.resolve([&](int row) { return r.model.next_token(row); },
                                           [&](int row, std::span<Token> out) { return r.model.top_tokens(row, out); },
                                           [](Token) { return false; });
      const std::size_t kept = r.model.commit(proposal.path);
      r.text.insert(r.text.end(), proposal.tokens.begin(), proposal.tokens.end());
      r.step.apply(pool, kept);
    }
  }
  for (const Request& r : requests) {
    const Tokens start(r.text.begin(), r.text.begin() + 2);
    CHECK(Tokens(r.text.begin() + 2, r.text.end()) == truth(options, start, r.text.size() - 2));
    CHECK(r.text.size() > 100);
  }
}
