// The example of a grammar: what it lets a model write always parses, and equals plain constrained decoding.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cases.hpp"
#include "engines/gguf.hpp"
#include "engines/llama_engine.hpp"
#include "engines/tokenizer.hpp"
#include "json_grammar.hpp"
#include "plain_sampling.hpp"

#include "lookahead/decoder.hpp"
#include "lookahead/sample_verify.hpp"
#include "lookahead/testing/oracle_model.hpp"

namespace {

using namespace lookahead;
using lookahead::examples::JsonGrammar;
using lookahead::examples::JsonText;
using lookahead::testing::InjectedFault;
using lookahead::testing::OracleModel;
using lookahead::testing::OracleOptions;
using nlohmann::json;
using plain_sampling::sample_with;

using Token = std::int32_t;
using Tokens = std::vector<Token>;
using Policy = SampleVerify<Token, JsonGrammar>;

bool accepts(std::string_view text) {
  JsonText reader;
  for (const char c : text)
    if (!reader.take(c)) return false;
  return reader.complete();
}

bool parses(std::string_view text) {
  const json value = json::parse(text, nullptr, false);
  return value.is_object();
}

// A character that is one, of any length.
std::string any_character(std::mt19937_64& random) {
  std::uint32_t c = 0;
  do c = static_cast<std::uint32_t>(random() % (std::uint64_t{1} << (5 + random() % 17)));
  while (c >= 0x110000 || (c >= 0xD800 && c < 0xE000));
  std::string s;
  if (c < 0x80)
    s = {static_cast<char>(c)};
  else if (c < 0x800)
    s = {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 0x3F))};
  else if (c < 0x10000)
    s = {static_cast<char>(0xE0 | c >> 12), static_cast<char>(0x80 | (c >> 6 & 0x3F)),
         static_cast<char>(0x80 | (c & 0x3F))};
  else
    s = {static_cast<char>(0xF0 | c >> 18), static_cast<char>(0x80 | (c >> 12 & 0x3F)),
         static_cast<char>(0x80 | (c >> 6 & 0x3F)), static_cast<char>(0x80 | (c & 0x3F))};
  return s;
}

json any_value(std::mt19937_64& random, int depth) {
  const auto text = [&] {
    std::string s;
    for (std::size_t n = random() % 4; n > 0; --n) s += any_character(random);
    return s;
  };
  switch (random() % (depth > 0 ? 9 : 7)) {
    case 0:
      return nullptr;
    case 1:
      return random() % 2 == 0;
    case 2:
      return static_cast<std::int64_t>(random() % 1'000'000) - 500'000;
    case 3:
      return static_cast<double>(random() % 1000) * 0.37 - 100;
    case 4:
      return static_cast<double>(random() % 1000) * 1.5e75;
    case 7: {
      json array = json::array();
      for (std::size_t n = random() % 4; n > 0; --n) array.push_back(any_value(random, depth - 1));
      return array;
    }
    case 8: {
      json object = json::object();
      for (std::size_t n = random() % 4; n > 0; --n) object[text()] = any_value(random, depth - 1);
      return object;
    }
    default:
      return text();
  }
}

json any_object(std::mt19937_64& random) {
  json object = any_value(random, 0);
  while (!object.is_object()) object = any_value(random, 4);
  return object;
}

}  // namespace

TEST_CASE("objects are read, whatever is in them") {
  std::mt19937_64 random(1);
  const int count = cases(2000) / 2;
  for (int i = 0; i < count; ++i) {
    const json object = any_object(random);
    const std::string text = object.dump(random() % 2 == 0 ? -1 : static_cast<int>(random() % 4));
    CAPTURE(text);
    REQUIRE(accepts(text));
    for (std::size_t n = 0; n < text.size(); ++n) REQUIRE_FALSE(accepts(text.substr(0, n)));
    REQUIRE_FALSE(accepts(text + " "));
  }
  for (const char* text : {R"({"a":-0.0e-01 , "":[ ] , "b" : {} })", R"({"\u00e9\"\\\/\b\f\n\r\t\u0000\uE000":null})",
                           "{\n\t\"a\":\r[ 0,1.5E+99 ]}", R"({"a":123456789012345e99})"})
    CHECK(accepts(text));
  for (const char* text : {"[]",
                           "1",
                           " {}",
                           "{\"a\":1,}",
                           "{\"a\" 1}",
                           "{,}",
                           "{\"a\":[1,]}",
                           "{\"a\":01}",
                           "{\"a\":+1}",
                           "{\"a\":1.}",
                           "{\"a\":.5}",
                           "{\"a\":1e}",
                           "{\"a\":1e100}",
                           "{\"a\":1234567890123456}",
                           "{\"a\":tru}",
                           "{\"a\":nul1}",
                           "{\"a\":\"\\u12g4\"}",
                           "{\"a\":\"\\ud800\"}",
                           "{\"a\":\"\\x\"}",
                           "{\"a\":\"\n\"}",
                           "{\"\xC0\x80\":1}",
                           "{\"\xED\xA0\x80\":1}",
                           "{\"\xF4\x90\x80\x80\":1}",
                           "{\"\xE2\x82\":1}",
                           "{}}",
                           "{a:1}",
                           "{'a':1}"})
    CHECK_FALSE(accepts(text));
}

TEST_CASE("white space is bounded") {
  const std::string most(16, ' ');
  CHECK(accepts("{" + most + "\"a\"" + most + ":" + most + "1" + most + "}"));
  CHECK_FALSE(accepts("{" + most + "\n\"a\":1}"));
  CHECK_FALSE(accepts("{\"a\":1" + most + "\t}"));
}

TEST_CASE("what is read to its end parses: random steps through what may follow") {
  std::mt19937_64 random(2);
  const int count = cases(2000) / 4;
  for (int i = 0; i < count; ++i) {
    JsonText reader;
    std::string text;
    const std::size_t wander = random() % 60;
    while (!reader.complete()) {
      // The bytes that may follow. None saves more than itself; some byte does save one, and completes it in the end.
      std::string may, best;
      for (int byte = 0; byte < 256; ++byte) {
        JsonText next = reader;
        if (!next.take(static_cast<char>(byte))) continue;
        may += static_cast<char>(byte);
        REQUIRE(next.to_go() + 1 >= reader.to_go());
        if (next.to_go() + 1 == reader.to_go()) best += static_cast<char>(byte);
      }
      REQUIRE_FALSE(best.empty());
      const std::string& from = text.size() < wander ? may : best;
      text += from[random() % from.size()];
      REQUIRE(reader.take(text.back()));
    }
    CAPTURE(text);
    REQUIRE(parses(text));
    REQUIRE(reader.to_go() == 0);
  }
}

TEST_CASE("whatever is accepted parses: texts with something changed") {
  std::mt19937_64 random(3);
  const int count = cases(2000) * 5;
  int accepted = 0;
  for (int i = 0; i < count; ++i) {
    std::string text = any_object(random).dump();
    static constexpr std::string_view often = "{}[]\",:0123456789.eE+-\\untrfalse \xC3\xA9\xF0";
    for (std::size_t n = 1 + random() % 2; n > 0; --n) {
      const std::size_t at = random() % text.size();
      switch (random() % 3) {
        case 0:
          text[at] = often[random() % often.size()];
          break;
        case 1:
          text.insert(at, 1, often[random() % often.size()]);
          break;
        default:
          text.erase(at, 1);
          if (text.empty()) text = "x";
      }
    }
    if (!accepts(text)) continue;
    CAPTURE(text);
    REQUIRE(parses(text));
    ++accepted;
  }
  CHECK(accepted > count / 20);
}

namespace {

// Every byte, some longer pieces, a control token without text, and the end of the text.
constexpr Token end_token = 290;
const std::vector<std::string>& pieces() {
  static const std::vector<std::string> all = [] {
    std::vector<std::string> p;
    for (int byte = 0; byte < 256; ++byte) p.emplace_back(1, static_cast<char>(byte));
    for (const char* text :
         {"{\"", "\":",  "\", \"", "\"}",     "}}", "]}",    "[[",  "],",       "true",     "false", "null",
          "12",  "0.5",  "e-1",    "\": {\"", "ab", "name",  " : ", "\n  ",     "\\u00",    "\\\"",  "1]",
          "[1",  "\"\"", "{}",     "[]",      ":[", "\":\"", "}, ", "\xC3\xA9", "\xE2\x82", "ac",    "xyz"})
      p.emplace_back(text);
    p.resize(300);
    return p;
  }();
  return all;
}

// Plain constrained decoding: before each token, a grammar that has seen nothing reads the whole text.
Tokens plainly(OracleModel<>& model, const Tokens& prompt, std::size_t most, const SampleOptions& sampling) {
  return sample_with(model, prompt, most, {end_token}, [&](std::span<const float> logits, const Tokens& text) {
    std::vector<float> changed(logits.begin(), logits.end());
    JsonGrammar grammar(pieces(), {end_token}, prompt.size(), most);
    grammar(std::span<float>(changed), std::span<const Token>(text));
    return static_cast<Token>(plain_sampling::draw(plain_sampling::weights(changed, sampling), sampling, text.size()));
  });
}

}  // namespace

TEST_CASE("random requests: complete within the limit, parsed, and plain constrained decoding's text") {
  const int count = cases(2000) / 10;
  std::size_t tokens = 0, steps = 0, long_ones = 0;
  for (int i = 0; i < count; ++i) {
    CAPTURE(i);
    std::mt19937_64 random(static_cast<std::uint64_t>(i));
    OracleOptions options;
    options.vocabulary = 300;
    options.seed = random();
    options.repetition = 1;
    options.max_kept = random() % 3 == 0 ? static_cast<int>(random() % 3) : 1000;
    if (random() % 2 == 0)
      (random() % 2 == 0 ? options.fail_forward : options.fail_commit) = 1 + static_cast<int>(random() % 20);
    const std::size_t most = 3 + random() % 60;
    SampleOptions sampling;
    sampling.temperature = static_cast<float>(random() % 4) / 2;
    sampling.seed = random();
    Tokens prompt{1, 2, 3};
    prompt.resize(1 + random() % 3);
    DecoderOptions<Token> how;
    how.cost = lookahead::StepCost::none();
    how.shape.w = static_cast<int>(random() % 6);
    how.rows = 1 + random() % 30;
    if (random() % 2 == 0) how.cost = lookahead::StepCost::given({100, 130, 160, 200, 300, 400, 500, 600});
    how.end_tokens = {end_token};
    how.pool_slots = 1024;
    OracleOptions sound = options;
    sound.fail_forward = sound.fail_commit = 0;
    OracleModel<> model(options), plain(sound);
    Decoder<OracleModel<>, 5, 4, 5, Policy> decoder(
        model, how, Policy(sampling, JsonGrammar(pieces(), {end_token}, prompt.size(), most)));
    decoder.start(prompt);
    const auto finish = [&] {
      for (;;) {
        try {
          const Generation g = decoder.run(1000, [](Token) {});
          tokens += g.tokens;
          steps += g.steps;
          REQUIRE(g.stop == StopReason::end_token);
          break;
        } catch (const InjectedFault&) {
        }
      }
      const Tokens text(decoder.text().begin() + std::ssize(prompt), decoder.text().end());
      REQUIRE(text.size() <= most);
      std::string written;
      for (const Token t : text) {
        CHECK((t == end_token || !pieces()[static_cast<std::size_t>(t)].empty()));
        written += pieces()[static_cast<std::size_t>(t)];
      }
      CAPTURE(written);
      REQUIRE(parses(written));
      return text;
    };
    const Tokens text = finish();
    REQUIRE(text == plainly(plain, prompt, most, sampling));
    long_ones += text.size() > 10 ? 1 : 0;
    // Back to anywhere behind the prompt, and on: the grammar sees a history that has shrunk.
    decoder.roll_back(prompt.size() + random() % text.size());
    REQUIRE(finish() == text);
    // And on from there with another stream: a history that has changed.
    decoder.roll_back(prompt.size() + random() % text.size());
    decoder.verify().set_stream(1);
    finish();
  }
  CHECK(tokens > steps);
  CHECK(long_ones > static_cast<std::size_t>(count) / 4);
}

TEST_CASE("a grammar that has read other texts says what a new one says") {
  std::mt19937_64 random(7);
  const Tokens prompt{1, 2};
  constexpr std::size_t most = 40;
  std::vector<Tokens> texts;
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    OracleOptions options;
    options.vocabulary = 300;
    options.seed = seed / 3;  // some begin alike
    OracleModel<> model(options);
    SampleOptions sampling;
    sampling.seed = seed;
    texts.push_back(prompt);
    const Tokens more = plainly(model, prompt, most, sampling);
    texts.back().insert(texts.back().end(), more.begin(), more.end());
  }
  JsonGrammar old(pieces(), {end_token}, prompt.size(), most);
  for (int i = 0; i < 500; ++i) {
    const Tokens& text = texts[random() % texts.size()];
    const auto history = std::span(text).first(prompt.size() + random() % (text.size() - prompt.size()));
    std::vector<float> a(300, 1), b(300, 1);
    old(std::span<float>(a), history);
    JsonGrammar(pieces(), {end_token}, prompt.size(), most)(std::span<float>(b), history);
    REQUIRE(a == b);
  }
}

TEST_CASE("a grammar that could not always be completed is refused") {
  CHECK_THROWS_WITH_AS(JsonGrammar(pieces(), {end_token}, 1, 2),
                       "2 tokens cannot hold an object and its end: allow at least 3", InvalidArgument);
  CHECK_THROWS_WITH_AS(JsonGrammar(pieces(), {}, 1, 20), "without an end token a text cannot end: pass one",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(JsonGrammar(std::span(pieces()).first(125), {end_token}, 1, 20),
                       "no token is the single byte 125: take a vocabulary with a token for every byte",
                       InvalidArgument);
}

TEST_CASE("the bundled model writes JSON, greedy and sampled, and the same without drafts") {
  const engines::GgufFile file("examples/models/cpython-6m-q8_0.gguf");
  const engines::Tokenizer tokenizer(file);
  engines::LlamaEngine model(file, {.context = 256});
  std::vector<std::string> words;
  for (std::size_t t = 0; t < tokenizer.vocabulary(); ++t) words.emplace_back(tokenizer.piece(static_cast<Token>(t)));
  DecoderOptions<Token> how;
  how.cost = lookahead::StepCost::none();
  how.end_tokens.assign(tokenizer.eos().begin(), tokenizer.eos().end());
  const int count = 20 + cases(2000) / 2000;
  std::size_t tokens = 0, steps = 0;
  for (int i = 0; i < count; ++i) {
    SampleOptions sampling;
    sampling.temperature = i % 4 == 0 ? 0.0F : 0.4F * static_cast<float>(i % 4);
    sampling.seed = static_cast<std::uint64_t>(i);
    static constexpr const char* prompts[] = {"response = json.dumps(\n", "data = json.loads('", "config = "};
    const Tokens prompt = tokenizer.encode(prompts[i / 4 % 3], tokenizer.add_bos());
    const std::size_t most = 3 + static_cast<std::size_t>(i) * 7 % 80;
    const Policy policy(sampling, JsonGrammar(words, how.end_tokens, prompt.size(), most));
    const auto write = [&](std::size_t rows) {
      how.rows = rows;
      Decoder<engines::LlamaEngine, 5, 4, 5, Policy> decoder(model, how, policy);
      std::string text;
      const Generation g = decoder.generate(prompt, most, [&](Token t) { text += words[static_cast<std::size_t>(t)]; });
      CHECK(g.stop == StopReason::end_token);
      tokens += g.tokens;
      steps += g.steps;
      return text;
    };
    const std::string text = write(16);
    CAPTURE(text);
    CHECK(parses(text));
    CHECK(text == write(1));
  }
  CHECK(tokens > steps);
}
