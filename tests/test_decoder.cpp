// `Decoder`: what it promises of every call, and what it says when something is wrong.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "cases.hpp"

#include "lookahead/decoder.hpp"
#include "lookahead/testing/oracle_model.hpp"
#include "lookahead/testing/plain_decode.hpp"

namespace {

using namespace lookahead;
using lookahead::testing::InjectedFault;
using lookahead::testing::OracleModel;
using lookahead::testing::OracleOptions;
using lookahead::testing::plain_decode;
using lookahead::testing::Reads;

using Token = std::int32_t;
using Tokens = std::vector<Token>;

const Tokens prompt{3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5};

// Long blocks, so that every fault also meets the middle of one.
OracleOptions repetitive() {
  OracleOptions options;
  options.vocabulary = 50;
  options.repetition = 1;
  return options;
}

template <class M>
using SmallDecoder = Decoder<M, 5, 4, 5>;

DecoderOptions<Token> all_sources() {
  DecoderOptions<Token> options;
  options.cost = lookahead::StepCost::none();
  options.shape.w = 5;
  options.rows = 40;
  options.pool_slots = 4096;
  return options;
}

// What plain decoding says behind `text`.
Tokens truth(const Tokens& text, std::size_t count, const OracleOptions& options = repetitive()) {
  OracleModel<> model(options);
  return plain_decode(model, std::span(text), count);
}

Tokens joined(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// A sink that keeps everything.
struct Keep {
  Tokens& tokens;
  void operator()(std::span<const Token> block) const { tokens.insert(tokens.end(), block.begin(), block.end()); }
};

// An engine that breaks the rules as told.
struct RuleBreaker : OracleModel<> {
  using OracleModel<>::OracleModel;
  int kept = -1;           // what commit returns, if not negative
  Token choice = -1;       // what is chosen, if not negative
  std::size_t count = 99;  // how many top tokens are given at most; more than wanted where it is 98
  std::size_t commit(std::span<const std::int32_t> path) {
    const std::size_t n = OracleModel<>::commit(path);
    return kept < 0 ? n : static_cast<std::size_t>(kept);
  }
  Token next_token(int row) const { return choice < 0 ? OracleModel<>::next_token(row) : choice; }
  std::size_t top_tokens(int row, std::span<Token> out) const {
    const std::size_t n = OracleModel<>::top_tokens(row, out);
    return count == 98 ? out.size() + 1 : std::min(n, count);
  }
};

}  // namespace

TEST_CASE_TEMPLATE("every way to read choices, every type of token", M, OracleModel<>,
                   OracleModel<Token, Reads::next_token>, OracleModel<Token, Reads::top_tokens>,
                   OracleModel<Token, Reads::logits>, OracleModel<std::uint16_t>, OracleModel<std::int8_t>,
                   OracleModel<std::uint32_t>) {
  using T = typename M::token_type;
  std::mt19937_64 random(1);
  const int count = cases(2000) / 40;
  std::size_t tokens = 0, steps = 0;
  for (int i = 0; i < count; ++i) {
    OracleOptions options;
    options.seed = random();
    options.vocabulary = 2 + static_cast<int>(random() % 100);
    options.repetition = 0.9;
    options.capacity = 1 + static_cast<int>(random() % 120);
    options.max_kept = random() % 3 == 0 ? static_cast<int>(random() % 4) : 1000;
    std::vector<T> start(1 + random() % static_cast<std::size_t>(std::min(options.capacity, 20)));
    for (T& t : start) t = static_cast<T>(random() % static_cast<std::size_t>(options.vocabulary));
    DecoderOptions<T> how;
    how.cost = lookahead::StepCost::none();
    how.shape = {static_cast<int>(random() % 7), 4, static_cast<int>(random() % 7),
                 random() % 2 == 0 ? ShapeMode::growth : ShapeMode::published, random() % 2 == 0};
    how.rows = 1 + random() % 60;
    if (random() % 2 == 0) how.cost = lookahead::StepCost::given({100, 130, 160, 200, 300, 400, 500, 600});
    how.pool_slots = 1024;
    how.seed = random();
    if (random() % 2 == 0) how.end_tokens = {static_cast<T>(random() % 2), 1};
    const std::size_t wanted = random() % 80;

    M plain(options), model(options);
    const std::vector<T> expected = plain_decode(plain, std::span<const T>(start), wanted, how.end_tokens);
    SmallDecoder<M> decoder(model, how);
    std::vector<T> text;
    const Generation g = decoder.generate(
        start, wanted, [&](std::span<const T> block) { text.insert(text.end(), block.begin(), block.end()); });
    CAPTURE(i);
    REQUIRE(text == expected);
    REQUIRE(g.tokens == text.size());
    const bool ended = !text.empty() && std::ranges::count(how.end_tokens, text.back()) > 0;
    REQUIRE(g.stop == (ended                   ? StopReason::end_token
                       : text.size() == wanted ? StopReason::max_tokens
                                               : StopReason::out_of_room));
    tokens += g.tokens;
    steps += g.steps;
  }
  CHECK(tokens > steps);
}

TEST_CASE("an account of the run adds up from its steps") {
  OracleModel<> a(repetitive()), b(repetitive());
  SmallDecoder<OracleModel<>> decoder(a, all_sources()), stepper(b, all_sources());
  Tokens text, stepped;
  const Generation g = decoder.generate(prompt, 60, Keep{text});
  stepper.start(prompt);
  Generation sum;
  while (sum.tokens < 60) {
    stepper.step(60 - sum.tokens, Keep{stepped});
    const auto& r = stepper.report();
    ++sum.steps;
    sum.tokens += static_cast<std::size_t>(r.tokens);
    sum.rows += static_cast<std::size_t>(r.rows);
    sum.logit_rows += static_cast<std::size_t>(r.logit_rows);
    sum.published_rows += static_cast<std::size_t>(r.published_rows);
    sum.expected += r.expected;
  }
  CHECK(text == stepped);
  CHECK(g.tokens == 60);
  CHECK(g.steps == sum.steps);
  CHECK(g.rows == sum.rows);
  CHECK(g.logit_rows == sum.logit_rows);
  CHECK(g.published_rows == sum.published_rows);
  CHECK(g.published_rows == g.steps * 30);
  CHECK(g.expected == doctest::Approx(sum.expected));
  CHECK(g.expected > static_cast<double>(g.steps));
  CHECK(g.steps < 60);
}

TEST_CASE("construction: bad options") {
  OracleModel<> model(repetitive());
  using D = SmallDecoder<OracleModel<>>;
  DecoderOptions<Token> options;
  options.cost = lookahead::StepCost::none();
  SUBCASE("no rows") {
    options.rows = 0;
    CHECK_THROWS_WITH_AS(D(model, options), "a step of 0 rows: pass at least 1, which is plain decoding",
                         InvalidArgument);
  }
  SUBCASE("an end token outside the vocabulary") {
    options.end_tokens = {7, 50};
    CHECK_THROWS_WITH_AS(D(model, options),
                         "end token 50 at index 1 is outside the vocabulary of 50: encode with this model's tokenizer",
                         InvalidArgument);
    options.end_tokens = {-1};
    CHECK_THROWS_AS(D(model, options), InvalidArgument);
  }
  SUBCASE("pool sizes") {
    options.pool_slots = 0;
    CHECK_THROWS_WITH_AS(D(model, options), "a pool of 0 slots: pass 1 to 2147483648", InvalidArgument);
    options.pool_slots = (std::size_t{1} << 31) + 1;
    CHECK_THROWS_WITH_AS(D(model, options), "a pool of 2147483649 slots: pass 1 to 2147483648", InvalidArgument);
    options.pool_slots = 1;
    CHECK(D(model, options).pool().slots() == 32);
  }
}

TEST_CASE("a vocabulary that the token type cannot number is refused") {
  OracleModel<std::uint8_t> fits({.vocabulary = 256});
  CHECK_NOTHROW((void)Decoder(fits));
  struct Wide : OracleModel<std::uint8_t> {
    using OracleModel<std::uint8_t>::OracleModel;
    [[nodiscard]] static std::size_t vocabulary() { return 257; }
  } model({.vocabulary = 256});
  CHECK_THROWS_WITH_AS((void)Decoder(model),
                       "a vocabulary of 257 tokens: its numbers must fit the model's token type, which ends at 255: "
                       "choose a wider one",
                       InvalidArgument);
}

TEST_CASE("calls without a text") {
  OracleModel<> model(repetitive());
  SmallDecoder<OracleModel<>> decoder(model);
  Tokens text;
  const char* const message = "there is no text to continue: call start with a prompt first";
  CHECK_THROWS_WITH_AS(decoder.step(1, Keep{text}), message, InvalidArgument);
  CHECK_THROWS_WITH_AS(decoder.run(1, Keep{text}), message, InvalidArgument);
  CHECK_THROWS_WITH_AS(decoder.append(prompt), message, InvalidArgument);
  CHECK(text.empty());
}

TEST_CASE("a refused start or append changes nothing") {
  OracleOptions options = repetitive();
  options.capacity = 100;
  OracleModel<> model(options);
  SmallDecoder<OracleModel<>> decoder(model, all_sources());
  Tokens text;
  decoder.generate(prompt, 20, Keep{text});
  CHECK_THROWS_WITH_AS(decoder.start({}),
                       "the prompt is empty: pass at least one token, a begin-of-text token for example",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(decoder.start(Tokens{1, 2, 50}),
                       "prompt token 50 at index 2 is outside the vocabulary of 50: encode with this model's tokenizer",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(decoder.start(Tokens{-1}),
                       "prompt token -1 at index 0 is outside the vocabulary of 50: encode with this model's tokenizer",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(decoder.start(Tokens(102, 1)),
                       "101 tokens do not fit into the model's 100 free slots: shorten the input or give the model a "
                       "longer context",
                       OutOfRoom);
  CHECK_THROWS_WITH_AS(decoder.append(Tokens{1, 50}),
                       "token 50 at index 1 is outside the vocabulary of 50: encode with this model's tokenizer",
                       InvalidArgument);
  CHECK_THROWS_AS(decoder.append(Tokens(80, 1)), OutOfRoom);
  decoder.append({});
  decoder.run(30, Keep{text});
  CHECK(text == truth(prompt, 50));
  // The longest prompt that fits leaves no slot.
  decoder.start(Tokens(101, 1));
  text.clear();
  CHECK(decoder.step(5, Keep{text}) == StopReason::out_of_room);
  CHECK(text.empty());
}

TEST_CASE("an append that does not fit is refused, whether the pending chain could take it or not") {
  OracleOptions options = repetitive();
  options.capacity = 20;
  for (int more = 1; more < 40; ++more) {
    CAPTURE(more);
    OracleModel<> model(options);
    SmallDecoder<OracleModel<>> decoder(model, all_sources());
    decoder.start(prompt);  // 10 cached, 1 pending
    if (more <= 10) {
      decoder.append(Tokens(static_cast<std::size_t>(more), 1));
      Tokens text;
      const Generation g = decoder.run(100, Keep{text});
      CHECK(g.stop == StopReason::out_of_room);
      CHECK(text.size() == static_cast<std::size_t>(10 - more));
      continue;
    }
    CHECK_THROWS_WITH_AS(decoder.append(Tokens(static_cast<std::size_t>(more), 1)),
                         (std::to_string(more) +
                          " tokens do not fit into the model's 10 free slots: shorten the input or give the model a "
                          "longer context")
                             .c_str(),
                         OutOfRoom);
    Tokens text;
    decoder.run(100, Keep{text});
    CHECK(text == truth(prompt, 10));
  }
}

TEST_CASE("a model that throws: the step can be tried again") {
  for (int call = 1; call < 8; ++call) {
    for (const bool in_commit : {false, true}) {
      for (const int kept : {0, 1000}) {
        CAPTURE(call);
        CAPTURE(in_commit);
        OracleOptions options = repetitive();
        options.max_kept = kept;
        (in_commit ? options.fail_commit : options.fail_forward) = call;
        OracleModel<> model(options);
        SmallDecoder<OracleModel<>> decoder(model, all_sources());
        Tokens text;
        decoder.start(prompt);
        int thrown = 0;
        while (text.size() < 60) {
          try {
            decoder.run(60 - text.size(), Keep{text});
          } catch (const InjectedFault&) {
            ++thrown;
          }
        }
        CHECK(thrown == 1);
        CHECK(text == truth(prompt, 60));
      }
    }
  }
}

TEST_CASE("a model that throws in prefill") {
  OracleOptions options = repetitive();
  Tokens text;
  SUBCASE("at the start: there is no text, and the context is empty") {
    options.fail_prefill = 2;
    OracleModel<> model(options);
    SmallDecoder<OracleModel<>> decoder(model, all_sources());
    decoder.generate(prompt, 5, Keep{text});
    CHECK_THROWS_AS(decoder.start(prompt), InjectedFault);
    CHECK(model.context_size() == 0);
    CHECK_THROWS_AS(decoder.step(1, Keep{text}), InvalidArgument);
    text.clear();
    decoder.generate(prompt, 40, Keep{text});
    CHECK(text == truth(prompt, 40));
  }
  SUBCASE("behind the text: nothing has changed") {
    // Pending tokens and new ones may go by separate calls; each of them may fail.
    for (const int call : {2, 3, 4}) {
      CAPTURE(call);
      text.clear();
      options.fail_prefill = call;
      options.max_kept = 0;
      OracleModel<> model(options);
      SmallDecoder<OracleModel<>> decoder(model, all_sources());
      decoder.generate(prompt, 30, Keep{text});
      const std::size_t before = model.context_size();
      const Tokens more(40, 7);
      try {
        decoder.append(more);
      } catch (const InjectedFault&) {
        CHECK(model.context_size() == before);
        decoder.run(10, Keep{text});
        CHECK(text == truth(prompt, 40));
        decoder.append(more);
      }
      const Tokens so_far = joined(joined(prompt, text), more);
      text.clear();
      decoder.run(20, Keep{text});
      CHECK(text == truth(so_far, 20));
    }
  }
}

TEST_CASE("a sink that throws: its block counts as reported") {
  for (std::size_t nth = 1; nth < 10; ++nth) {
    OracleModel<> model(repetitive());
    SmallDecoder<OracleModel<>> decoder(model, all_sources());
    Tokens text;
    std::size_t blocks = 0;
    const auto sink = [&](std::span<const Token> block) {
      Keep{text}(block);
      if (++blocks == nth) throw std::runtime_error("full");
    };
    decoder.start(prompt);
    CHECK_THROWS_AS(decoder.run(60, sink), std::runtime_error);
    CHECK(blocks == nth);
    decoder.run(60 - text.size(), sink);
    CHECK(text == truth(prompt, 60));
  }
}

TEST_CASE("a sink that throws at the end: the text has ended") {
  OracleModel<> model(repetitive());
  DecoderOptions<Token> options = all_sources();
  options.end_tokens = {truth(prompt, 12).back()};
  SmallDecoder<OracleModel<>> decoder(model, options);
  Tokens text;
  decoder.start(prompt);
  StopReason stop = StopReason::running;
  while (stop == StopReason::running) {
    try {
      stop = decoder.step(100, [&](std::span<const Token> block) {
        Keep{text}(block);
        throw std::runtime_error("full");
      });
    } catch (const std::runtime_error&) {
    }
  }
  CHECK(stop == StopReason::end_token);
  OracleModel<> plain(repetitive());
  CHECK(text == plain_decode(plain, std::span(prompt), 100, options.end_tokens));
}

TEST_CASE("zero tokens wanted: no step") {
  OracleOptions options = repetitive();
  options.fail_forward = 1;
  OracleModel<> model(options);
  SmallDecoder<OracleModel<>> decoder(model);
  Tokens text;
  const Generation g = decoder.generate(prompt, 0, Keep{text});
  CHECK(g.stop == StopReason::max_tokens);
  CHECK(g.steps == 0);
  CHECK(g.tokens == 0);
  CHECK(decoder.step(0, Keep{text}) == StopReason::running);
  CHECK(text.empty());
}

TEST_CASE("room for as many tokens as plain decoding finds") {
  for (int free = 0; free < 30; ++free) {
    for (const int kept : {0, 2, 1000}) {
      for (const int rows : {1, 3, 1000}) {
        CAPTURE(free);
        CAPTURE(kept);
        CAPTURE(rows);
        OracleOptions options = repetitive();
        options.capacity = 10 + free;
        options.max_kept = kept;
        options.max_rows = rows;
        OracleModel<> model(options);
        SmallDecoder<OracleModel<>> decoder(model, all_sources());
        Tokens text;
        CHECK(decoder.generate(prompt, 1000, Keep{text}).stop == StopReason::out_of_room);
        CHECK(text == truth(prompt, static_cast<std::size_t>(free)));
        CHECK(decoder.step(1000, Keep{text}) == StopReason::out_of_room);
        CHECK(text.size() == static_cast<std::size_t>(free));
      }
    }
  }
}

TEST_CASE("a context that somebody changed is noticed") {
  OracleModel<> model(repetitive());
  SmallDecoder<OracleModel<>> decoder(model, all_sources());
  Tokens text;
  decoder.start(prompt);
  model.prefill(Tokens{1, 2});
  CHECK_THROWS_WITH_AS(
      decoder.step(1, Keep{text}),
      "the model's context holds 12 tokens where the decoder left 10: do not change the context between steps",
      ContractViolation);
  model.truncate(10);
  decoder.run(20, Keep{text});
  CHECK(text == truth(prompt, 20));
}

TEST_CASE("a commit that keeps too few rows or too many") {
  RuleBreaker model(repetitive());
  SmallDecoder<RuleBreaker> decoder(model, all_sources());
  Tokens text;
  decoder.start(prompt);
  decoder.append(Tokens{1, 2});
  const auto step = [&] { decoder.step(1, Keep{text}); };
  SUBCASE("too few") {
    model.kept = 2;
    CHECK_THROWS_WITH_AS(step(),
                         "commit kept 2 rows: it must keep at least the pending chain, 3, and at most the path, 3; "
                         "start the text anew",
                         ContractViolation);
  }
  SUBCASE("too many") {
    model.kept = 4;
    CHECK_THROWS_WITH_AS(step(),
                         "commit kept 4 rows: it must keep at least the pending chain, 3, and at most the path, 3; "
                         "start the text anew",
                         ContractViolation);
  }
  // What the context holds is unknown now.
  model.kept = -1;
  CHECK_THROWS_AS(step(), InvalidArgument);
  CHECK(text.empty());
  decoder.generate(prompt, 20, Keep{text});
  CHECK(text == truth(prompt, 20));
}

TEST_CASE("a model that takes no row, or no wanted row") {
  struct Narrow : OracleModel<> {
    using OracleModel<>::OracleModel;
    std::size_t rows = 0, logit_rows = 7;
    [[nodiscard]] std::size_t max_rows() const { return rows; }
    [[nodiscard]] std::size_t max_logit_rows() const { return logit_rows; }
  } model(repetitive());
  SmallDecoder<Narrow> decoder(model, all_sources());
  Tokens text;
  decoder.start(prompt);
  const auto step = [&] { decoder.step(1, Keep{text}); };
  CHECK_THROWS_WITH_AS(step(), "the model takes 0 rows and 7 wanted rows: both must be at least 1", ContractViolation);
  model.rows = 7;
  model.logit_rows = 0;
  CHECK_THROWS_WITH_AS(step(), "the model takes 7 rows and 0 wanted rows: both must be at least 1", ContractViolation);
  model.logit_rows = 1;
  decoder.run(20, Keep{text});
  CHECK(text == truth(prompt, 20));
}

TEST_CASE("choices outside the vocabulary, too many or none") {
  RuleBreaker model(repetitive());
  SmallDecoder<RuleBreaker> decoder(model, all_sources());
  Tokens text;
  decoder.start(prompt);
  const auto step = [&] { decoder.step(5, Keep{text}); };
  SUBCASE("the next token") {
    model.choice = 50;
    CHECK_THROWS_WITH_AS(
        step(), "token 50 was chosen outside the vocabulary of 50: the model and the policy choose from 0 to 49",
        ContractViolation);
  }
  SUBCASE("no top tokens") {
    model.count = 0;
    CHECK_THROWS_WITH_AS(step(), "top_tokens gave 0 tokens of a row: it must give 1 to 8", ContractViolation);
  }
  SUBCASE("more top tokens than wanted") {
    model.count = 98;
    CHECK_THROWS_WITH_AS(step(), "top_tokens gave 9 tokens of a row: it must give 1 to 8", ContractViolation);
  }
  model.choice = -1;
  model.count = 99;
  decoder.run(20, Keep{text});
  CHECK(text == truth(prompt, 20));
}

namespace {

// The second best token at every third position, and what is not a token once.
struct EveryThird {
  int* fail_once = nullptr;
  Token select(OracleModel<>& model, int row, std::int64_t position) const {
    if (fail_once != nullptr && position == 30 && (*fail_once)-- > 0) return -5;
    Token best[2];
    (void)model.top_tokens(row, best);
    return best[position % 3 == 0 ? 1 : 0];
  }
};

}  // namespace

TEST_CASE("a policy of the caller's: it is asked with the position of the token that it chooses") {
  OracleModel<> plain(repetitive());
  plain.prefill(std::span(prompt).first(prompt.size() - 1));
  Tokens expected = prompt;
  for (int i = 0; i < 60; ++i) {
    TokenTreeStorage<Token, 1> tree;
    tree.begin(static_cast<int>(plain.context_size()), &expected.back(), 1);
    tree.want(0);
    plain.forward(tree.view());
    expected.push_back(EveryThird{}.select(plain, 0, static_cast<std::int64_t>(expected.size())));
    const std::int32_t path = 0;
    plain.commit(std::span(&path, 1));
  }
  expected.erase(expected.begin(), expected.begin() + static_cast<std::ptrdiff_t>(prompt.size()));

  OracleModel<> model(repetitive());
  int failures = 1;
  Decoder<OracleModel<>, 5, 4, 5, EveryThird> decoder(model, all_sources(), {&failures});
  Tokens text;
  decoder.start(prompt);
  CHECK_THROWS_WITH_AS(decoder.run(60, Keep{text}),
                       "token -5 was chosen outside the vocabulary of 50: the model and the policy choose from 0 to 49",
                       ContractViolation);
  const Generation g = decoder.run(60 - text.size(), Keep{text});
  CHECK(text == expected);
  CHECK(g.tokens > g.steps);
}

TEST_CASE("end tokens: the first that comes ends the text and is reported") {
  const Tokens all = truth(prompt, 60);
  for (std::size_t at = 0; at < all.size(); ++at) {
    DecoderOptions<Token> options = all_sources();
    for (Token t = 0; t < 50; ++t)  // tokens that do not come before
      if (std::ranges::find(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(at), t) ==
          all.begin() + static_cast<std::ptrdiff_t>(at))
        options.end_tokens.push_back(t);
    if (std::ranges::find(options.end_tokens, all[at]) == options.end_tokens.end()) continue;
    OracleModel<> model(repetitive());
    SmallDecoder<OracleModel<>> decoder(model, options);
    Tokens text;
    const Generation g = decoder.generate(prompt, 1000, Keep{text});
    CHECK(g.stop == StopReason::end_token);
    CHECK(text == Tokens(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(at) + 1));
    // No token behind the end is in the context, and a further step does nothing.
    CHECK(model.context_size() < prompt.size() + text.size());
    CHECK(decoder.step(10, [](std::span<const Token>) { FAIL("a block behind the end"); }) == StopReason::end_token);
    // More input goes on behind it.
    const Tokens more{5, 6};
    decoder.append(more);
    const Tokens so_far = joined(joined(prompt, text), more);
    text.clear();
    decoder.run(10, Keep{text});
    OracleModel<> plain(repetitive());
    CHECK(text == plain_decode(plain, std::span(so_far), 10, options.end_tokens));
  }
}

TEST_CASE("append goes on behind what was reported, by the pending chain or by prefill") {
  for (const int kept : {0, 1, 1000}) {
    for (std::size_t more = 1; more < 80; more += more < 40 ? 1 : 13) {
      CAPTURE(kept);
      CAPTURE(more);
      OracleOptions options = repetitive();
      options.max_kept = kept;
      OracleModel<> model(options);
      SmallDecoder<OracleModel<>> decoder(model, all_sources());
      Tokens so_far = prompt;
      decoder.start(prompt);
      for (int turn = 0; turn < 3; ++turn) {
        Tokens text;
        decoder.run(15, Keep{text});
        CHECK(text == truth(so_far, 15));
        so_far = joined(so_far, text);
        Tokens input(more);
        for (std::size_t i = 0; i < more; ++i) input[i] = static_cast<Token>((i * i + more) % 50);
        const std::size_t cached = model.context_size();
        const bool fits = decoder.state().pending().size() + more <=
                          std::min<std::size_t>(decltype(decoder)::Step::max_pending, all_sources().rows);
        decoder.append(input);
        CHECK((model.context_size() == cached) == fits);
        so_far = joined(so_far, input);
      }
    }
  }
}

TEST_CASE("what a step spends may change between steps") {
  OracleModel<> model(repetitive());
  SmallDecoder<OracleModel<>> decoder(model, all_sources());
  Tokens text;
  decoder.start(prompt);
  const Shape shapes[] = {{},          {0, 2, 0}, {5, 4, 0}, Shape::published(), {3, 2, 0, ShapeMode::published, true},
                          {-1, -1, -1}};
  for (std::size_t i = 0; text.size() < 80; ++i) {
    decoder.set_shape(shapes[i % 6]);
    decoder.set_rows(1 + i % 7 * 8);
    const StopReason stop = decoder.step(80 - text.size(), Keep{text});
    CHECK(stop == StopReason::running);
    CHECK(decoder.report().rows <= static_cast<int>(1 + i % 7 * 8));
  }
  CHECK(text == truth(prompt, 80));
}

TEST_CASE("a text in several runs is the text of one") {
  for (std::size_t each = 1; each < 30; ++each) {
    OracleModel<> model(repetitive());
    SmallDecoder<OracleModel<>> decoder(model, all_sources());
    Tokens text;
    decoder.start(prompt);
    for (std::size_t i = 1; i <= 5; ++i) {
      const Generation g = decoder.run(each, Keep{text});
      CHECK(g.stop == StopReason::max_tokens);
      CHECK(text.size() == i * each);
    }
    CHECK(text == truth(prompt, 5 * each));
  }
}

TEST_CASE("a pool that is kept, and one that the caller has filled, save steps") {
  OracleOptions language = repetitive();
  language.repetition = 0;
  language.vocabulary = 5000;
  DecoderOptions<Token> options = all_sources();
  options.pool_slots = 1 << 16;
  const auto steps = [&](bool keep, bool fill) {
    options.keep_pool = keep;
    OracleModel<> model(language);
    SmallDecoder<OracleModel<>> decoder(model, options);
    if (fill) decoder.add_text(truth(prompt, 60, language));
    std::vector<std::size_t> taken;
    for (int request = 0; request < 2; ++request) {
      Tokens text;
      taken.push_back(decoder.generate(prompt, 60, Keep{text}).steps);
      CHECK(text == truth(prompt, 60, language));
    }
    return taken;
  };
  CHECK(steps(false, false) == std::vector<std::size_t>{60, 60});
  CHECK(steps(false, true) == std::vector<std::size_t>{60, 60});
  const std::vector<std::size_t> kept = steps(true, false), filled = steps(true, true);
  CHECK(kept[0] == 60);
  CHECK(kept[1] < 10);
  CHECK(filled[0] < 10);
}

TEST_CASE("choices that follow from logits: best first, the lowest token on ties") {
  struct Logits {
    using token_type = Token;
    std::vector<float> values;
    std::span<const float> logits(int) { return values; }
  };
  std::mt19937_64 random(3);
  for (int i = 0; i < 2000; ++i) {
    Logits model;
    const std::uint64_t values = i % 2 == 0 ? 6 : 1000;
    for (std::size_t n = 1 + random() % 200; n > 0; --n) model.values.push_back(static_cast<float>(random() % values));
    Tokens order(model.values.size());
    for (std::size_t t = 0; t < order.size(); ++t) order[t] = static_cast<Token>(t);
    std::ranges::stable_sort(order, [&](Token a, Token b) {
      return model.values[static_cast<std::size_t>(a)] > model.values[static_cast<std::size_t>(b)];
    });
    Tokens best(1 + random() % 12);
    best.resize(top_tokens(model, 0, std::span(best)));
    order.resize(std::min(order.size(), best.size()));
    REQUIRE(best == order);
    REQUIRE(next_token(model, 0) == order[0]);
  }
}
