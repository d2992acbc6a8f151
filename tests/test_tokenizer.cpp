#include <cmath>
#include <doctest/doctest.h>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "engines/gguf_writer.hpp"
#include "engines/tokenizer.hpp"
#include "tiny_llama.hpp"

namespace {

using namespace lookahead::engines;
using Tokens = std::vector<std::int32_t>;

const Tokenizer& bundled() {
  static const Tokenizer tokenizer{GgufFile{std::filesystem::path("examples/models/cpython-6m-q8_0.gguf")}};
  return tokenizer;
}

TEST_CASE("the bundled model's tokens are SentencePiece's") {
  std::ifstream golden("tests/data/cpython-6m.jsonl");
  int lines = 0;
  for (std::string line; std::getline(golden, line); ++lines) {
    const auto entry = nlohmann::json::parse(line);
    const auto text = entry[0].get<std::string>();
    INFO(text);
    const Tokens tokens = bundled().encode(text, false);
    CHECK(tokens == entry[1].get<Tokens>());
    if (text.find("\xe2\x96\x81") == std::string::npos) CHECK(bundled().decode(tokens) == text);
  }
  CHECK(lines == 1000);
}

TEST_CASE("any bytes come back") {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    std::string text(random() % 40, ' ');
    for (char& c : text) c = static_cast<char>(random() % (i % 2 == 0 ? 256 : 128));
    if (text.find("\xe2\x96\x81") != std::string::npos) continue;
    const Tokens tokens = bundled().encode(text, i % 3 == 0);
    CHECK(bundled().decode(tokens) == text);
    std::string stream;
    for (const std::int32_t t : tokens) stream += bundled().piece(t);
    CHECK(stream == text);
  }
}

TEST_CASE("special tokens") {
  CHECK(bundled().vocabulary() == 4096);
  CHECK(bundled().bos() == 1);
  CHECK(bundled().add_bos());
  CHECK(std::vector(bundled().eos().begin(), bundled().eos().end()) == Tokens{2});
  CHECK(bundled().find("</s>") == 2);
  CHECK(bundled().find("no such token") == std::nullopt);
  CHECK(bundled().encode("", true) == Tokens{1});
  CHECK(bundled().encode("", false).empty());
  CHECK(bundled().piece(1).empty());
  CHECK(bundled().piece(3 + 10) == "\n");
  for (const std::int32_t t : bundled().encode("<s></s>", false)) CHECK(t > 2);  // control tokens are never text
}

// The names, types and scores of a small vocabulary, with the byte tokens in front.
struct Vocabulary {
  std::vector<std::string> names;
  std::vector<std::int32_t> types;
  std::vector<float> scores;

  void add(const std::string& name, std::int32_t type, float score) {
    names.push_back(name);
    types.push_back(type);
    scores.push_back(score);
  }
  Tokenizer make(bool space_prefix = false) const {
    GgufWriter file;
    file.text("tokenizer.ggml.model", "llama");
    file.texts("tokenizer.ggml.tokens", names);
    file.numbers("tokenizer.ggml.scores", scores);
    file.integers("tokenizer.ggml.token_type", types);
    file.flag("tokenizer.ggml.add_space_prefix", space_prefix);
    return Tokenizer(GgufFile(file.finish()));
  }
};

TEST_CASE("the best score merges first, the leftmost on ties") {
  Vocabulary v;
  for (const char* name : {"a", "b", "c"}) v.add(name, 1, -9);  // 0, 1, 2
  v.add("ab", 1, -2);                                           // 3
  v.add("bc", 1, -1);                                           // 4
  v.add("aa", 1, -3);                                           // 5
  v.add("abc", 1, -4);                                          // 6
  const Tokenizer t = v.make();
  CHECK(t.encode("abc", false) == Tokens{6});  // bc, then a + bc
  CHECK(t.encode("abab", false) == Tokens{3, 3});
  CHECK(t.encode("aaa", false) == Tokens{5, 0});
  CHECK(t.encode("aaab", false) == Tokens{5, 3});
  CHECK(!t.bos());
  CHECK(!t.add_bos());
  CHECK(t.eos().empty());
  CHECK(t.encode("a", true) == Tokens{0});
  CHECK(t.encode("z", false).empty());  // neither a byte token nor an unknown one
}

TEST_CASE("a space in front of every text") {
  Vocabulary v;
  v.add("\xe2\x96\x81", 1, -2);
  v.add("a", 1, -2);
  v.add(
      "\xe2\x96\x81"
      "a",
      1, -1);
  const Tokenizer t = v.make(true);
  CHECK(t.encode("a a", false) == Tokens{2, 2});
  CHECK(t.encode(" a", false) == Tokens{0, 2});
  CHECK(t.decode(Tokens{2, 2}) == "a a");
  CHECK(t.piece(2) == " a");
  CHECK(v.make(false).decode(Tokens{2, 2}) == " a a");
}

TEST_CASE("user-defined tokens are found first, unused ones never") {
  Vocabulary v;
  v.add("<unk>", 2, 0);
  for (const char* name : {"a", "b"}) v.add(name, 1, -9);  // 1, 2
  v.add("ab", 1, -1);                                      // 3
  v.add("ba", 4, 0);                                       // 4
  v.add("bab", 4, 0);                                      // 5
  v.add("bb", 5, 0);                                       // 6
  const Tokenizer t = v.make();
  CHECK(t.encode("abab", false) == Tokens{1, 5});
  CHECK(t.encode("aba", false) == Tokens{1, 4});
  CHECK(t.encode("abb", false) == Tokens{3, 2});
  CHECK(t.encode("bb", false) == Tokens{2, 2});
  CHECK(t.encode("?", false) == Tokens{0});
}

// A byte-level model around the vocabulary of tests/data/byte-level.json.
Tokenizer byte_level(const char* pre) {
  const auto vocabulary = nlohmann::json::parse(std::ifstream("tests/data/byte-level.json"));
  const auto names = vocabulary["tokens"].get<std::vector<std::string>>();
  GgufWriter file;
  file.text("tokenizer.ggml.model", "gpt2");
  file.text("tokenizer.ggml.pre", pre);
  file.texts("tokenizer.ggml.tokens", names);
  file.integers("tokenizer.ggml.token_type", Tokens(names.size(), 1));
  file.texts("tokenizer.ggml.merges", vocabulary["merges"].get<std::vector<std::string>>());
  return Tokenizer(GgufFile(file.finish()));
}

TEST_CASE("byte-level tokens are those of the reference implementation, for each pre-tokenizer") {
  const char* const names[] = {"gpt-2", "smollm", "llama-bpe"};
  for (std::size_t kind = 0; kind < 3; ++kind) {
    const Tokenizer tokenizer = byte_level(names[kind]);
    std::ifstream golden("tests/data/byte-level.jsonl");
    int lines = 0;
    for (std::string line; std::getline(golden, line); ++lines) {
      const auto entry = nlohmann::json::parse(line);
      const auto text = entry[0].get<std::string>();
      INFO(names[kind], ": ", text);
      const Tokens tokens = tokenizer.encode(text, false);
      CHECK(tokens == entry[1 + kind].get<Tokens>());
      CHECK(tokenizer.decode(tokens) == text);
    }
    CHECK(lines == 1000);
  }
}

TEST_CASE("byte-level tokens give any bytes back") {
  std::mt19937 random(2);
  for (const char* pre : {"gpt-2", "smollm", "llama-bpe"}) {
    const Tokenizer tokenizer = byte_level(pre);
    for (int i = 0; i < 1000; ++i) {
      std::string text(random() % 40, ' ');
      for (char& c : text) c = static_cast<char>(random() % (i % 2 == 0 ? 256 : 128));
      CHECK(tokenizer.decode(tokenizer.encode(text, false)) == text);
    }
  }
}

TEST_CASE("byte-level vocabularies that do not fit together are refused") {
  const auto refused = [](const char* part, const char* pre, const std::vector<std::string>& merges) {
    GgufWriter file;
    file.text("tokenizer.ggml.model", "gpt2");
    file.text("tokenizer.ggml.pre", pre);
    const std::vector<std::string> names = {"a", "b", "ab", "<|end|>"};
    file.texts("tokenizer.ggml.tokens", names);
    file.integers("tokenizer.ggml.token_type", Tokens{1, 1, 1, 4});
    file.texts("tokenizer.ggml.merges", merges);
    const GgufFile image(file.finish());
    if (part == nullptr) {
      const Tokenizer tokenizer(image);
      CHECK(tokenizer.encode("abb<|end|>aab", false) == Tokens{2, 1, 3, 0, 2});
      CHECK(tokenizer.encode("a?", false) == Tokens{0});
      CHECK(!tokenizer.add_bos());
    } else {
      CHECK_THROWS_WITH_AS(Tokenizer{image}, doctest::Contains(part), ModelFileError);
    }
  };
  refused(nullptr, "gpt-2", {"a b"});
  refused("pre-tokenizer 'qwen2'", "qwen2", {"a b"});
  refused("merge 1 names tokens", "smollm", {"a b", "b a"});
  for (const char* merge : {"", " ", "ab", "a ", " a", "a b c"}) refused("merge 0 names tokens", "gpt-2", {merge});
}

TEST_CASE("vocabularies that do not fit together are refused") {
  const auto refused = [](const char* part, auto edit) {
    GgufWriter file;
    file.text("tokenizer.ggml.model", "llama");
    std::vector<std::string> names = {"<s>", "a"};
    std::vector<float> scores = {0, 0};
    std::vector<std::int32_t> types = {3, 1};
    edit(file, names, scores, types);
    file.texts("tokenizer.ggml.tokens", names);
    file.numbers("tokenizer.ggml.scores", scores);
    file.integers("tokenizer.ggml.token_type", types);
    CHECK_THROWS_WITH_AS(Tokenizer(GgufFile(file.finish())), doctest::Contains(part), ModelFileError);
  };
  using Names = std::vector<std::string>;
  using Scores = std::vector<float>;
  refused("2, 1 and 2 values", [](GgufWriter&, Names&, Scores& s, Tokens&) { s.pop_back(); });
  refused("2, 2 and 3 values", [](GgufWriter&, Names&, Scores&, Tokens& t) { t.push_back(1); });
  refused("0, 2 and 2 values", [](GgufWriter&, Names& n, Scores&, Tokens&) { n.clear(); });
  refused("token 1 has type 7", [](GgufWriter&, Names&, Scores&, Tokens& t) { t[1] = 7; });
  refused("byte token without", [](GgufWriter&, Names&, Scores&, Tokens& t) { t[1] = 6; });
  refused("not a number", [](GgufWriter&, Names&, Scores& s, Tokens&) { s[1] = std::nanf(""); });
  refused("bos_token_id' is 2, but there are 2",
          [](GgufWriter& f, Names&, Scores&, Tokens&) { f.integer("tokenizer.ggml.bos_token_id", 2); });
  refused("eot_token_id' is 9",
          [](GgufWriter& f, Names&, Scores&, Tokens&) { f.integer("tokenizer.ggml.eot_token_id", 9); });
  GgufWriter other;
  other.text("tokenizer.ggml.model", "t5");
  CHECK_THROWS_WITH_AS(Tokenizer(GgufFile(other.finish())), doctest::Contains("kind 't5'"), ModelFileError);
  CHECK_THROWS_WITH_AS(Tokenizer(GgufFile(GgufWriter{}.finish())), doctest::Contains("kind '(none)'"), ModelFileError);
}

}  // namespace
