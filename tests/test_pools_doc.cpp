// The examples of docs/pools.md, as they stand there: each runs, does what the text says, and is shown unchanged. An
// example lies between "// [name]" and "// []".
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <doctest/doctest.h>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "doc_examples.hpp"
#include "engines/gguf.hpp"
#include "engines/llama_engine.hpp"
#include "engines/tokenizer.hpp"
#include "files.hpp"

#include "lookahead/lookahead.hpp"
#include "lookahead/testing/plain_decode.hpp"

using namespace lookahead;
using testing::content;
using Token = std::int32_t;
using Tokens = std::vector<Token>;

TEST_CASE("every example runs, and does what is said of it") {
  // [setup]
  const engines::GgufFile file("examples/models/cpython-6m-q8_0.gguf");
  const engines::Tokenizer tokenizer(file);
  engines::LlamaEngine model(file);
  const std::vector<Token> prompt = tokenizer.encode("def mean(values):\n", tokenizer.add_bos());
  // []
  const auto sink = [](Token) {};
  const std::vector<Token> corpus = tokenizer.encode(content("bench/prompts/code/00.txt"), tokenizer.add_bos());
  const auto check = [&](std::span<const Token> text, const Tokens& of) {
    engines::LlamaEngine plain(file);
    const Tokens expected = testing::plain_decode(plain, std::span(of), text.size() - of.size());
    CHECK(std::ranges::equal(text.subspan(of.size()), expected));
  };

  SUBCASE("private") {
    // [private]
    Decoder decoder(model, {.pool_slots = 1 << 15});
    decoder.generate(prompt, 64, sink);
    // []
    CHECK(decoder.pool().slots() == 1 << 15);
    check(decoder.text(), prompt);
  }

  SUBCASE("kept") {
    // [kept]
    Decoder decoder(model, {.keep_pool = true});
    decoder.add_text(corpus);
    const Generation first = decoder.generate(prompt, 64, sink);
    const Generation again = decoder.generate(prompt, 64, sink);  // nearly all of it is known by now
    // []
    CHECK(again.tokens == first.tokens);
    check(decoder.text(), prompt);
    // How many rows a step gets depends on the machine; with 16 it shows what the pool knows.
    Decoder cold(model, {.rows = 16, .cost = StepCost::none()});
    Decoder warm(model, {.rows = 16, .cost = StepCost::none(), .keep_pool = true}, GreedyVerify{}, decoder.pool());
    CHECK(2 * warm.generate(prompt, 64, sink).steps < cold.generate(prompt, 64, sink).steps);
  }

  SUBCASE("shared") {
    const std::vector<Tokens> prompts{prompt, tokenizer.encode("import os\n", true), prompt, prompt};
    const std::vector<std::string> tenants{"a", "a", "b", "b"};
    std::vector<Tokens> texts(prompts.size());
    // [shared]
    SharedNGramPool<Token> pool(1 << 20);
    const auto serve = [&](std::size_t i) {
      engines::LlamaEngine engine(file, {.threads = 1});
      const std::uint64_t name_space = std::hash<std::string>{}("cpython-6m, tenant " + tenants[i]);
      Decoder decoder(engine, {}, GreedyVerify{}, pool.in(name_space, engine.vocabulary()));
      decoder.generate(prompts[i], 64, [&](Token token) { texts[i].push_back(token); });
    };
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < prompts.size(); ++i) threads.emplace_back(serve, i);
    for (std::thread& thread : threads) thread.join();
    // []
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      texts[i].insert(texts[i].begin(), prompts[i].begin(), prompts[i].end());
      check(texts[i], prompts[i]);
    }
  }

  SUBCASE("a loop of one's own") {
    SharedNGramPool<Token> shared;
    const auto tenant = std::uint64_t{7};
    // [own_loop]
    const auto pool = shared.in(tenant, model.vocabulary());
    Lookahead<> step;
    Lookahead<>::Tree tree;
    Tokens text = prompt;
    model.prefill(std::span(prompt).first(prompt.size() - 1));
    step.start(pool, prompt);
    while (text.size() < 100) {
      step.plan(pool, {}, {.rows = 16}, tree);
      model.forward(tree.view());
      const auto proposal = step.resolve([&](int row) { return model.next_token(row); },
                                         [&](int row, std::span<Token> out) { return model.top_tokens(row, out); },
                                         [](Token) { return false; });
      const std::size_t kept = model.commit(proposal.path);
      text.insert(text.end(), proposal.tokens.begin(), proposal.tokens.end());
      step.apply(pool, kept);
    }
    // []
    check(text, prompt);
  }

  SUBCASE("saved") {
    const testing::TempFolder folder;
    const std::filesystem::path path = folder.path / "python.pool";
    // [fingerprint]
    std::vector<std::string_view> pieces;
    for (std::size_t t = 0; t < tokenizer.vocabulary(); ++t) pieces.push_back(tokenizer.piece(static_cast<Token>(t)));
    const std::uint64_t fingerprint = tokenizer_fingerprint(pieces);
    // []
    // [saved]
    NGramPool<Token> corpus_pool(1 << 20);
    corpus_pool.add_text(corpus);
    save_pool(corpus_pool, path, fingerprint);
    // []
    // [loaded]
    auto loaded = load_pool<NGramPool<Token>>(path, fingerprint, model.vocabulary());
    Decoder decoder(model, {.keep_pool = true}, GreedyVerify{}, std::move(loaded));
    decoder.generate(prompt, 64, sink);
    // []
    check(decoder.text(), prompt);
    // [loaded_shared]
    auto shared = load_pool<SharedNGramPool<Token>>(path, fingerprint, model.vocabulary());
    engines::LlamaEngine engine(file);
    Decoder other(engine, {}, GreedyVerify{}, shared.in(0, engine.vocabulary()));
    other.generate(prompt, 64, sink);
    // []
    check(other.text(), prompt);
    CHECK(other.pool().ref().set_count == decoder.pool().slots() / 32);
  }
}

TEST_CASE("docs/pools.md shows the examples as they are") {
  doc_examples::check_page("docs/pools.md", {"tests/test_pools_doc.cpp"});
}

TEST_CASE("build_pool writes what generate reads") {
  const testing::TempFolder folder;
  const auto run = [&](const std::string& command) {
    const std::string to = folder.path / "out";
    return std::system((command + " >" + to + " 2>" + to + ".errors").c_str());
  };
  const std::string pool = folder.path / "python.pool", text = folder.path / "text.py";
  const std::string generate = LOOKAHEAD_GENERATE " --json --rows 16 --max-tokens 64 'def mean(values):\n'";
  REQUIRE(run(generate) == 0);
  const auto cold = nlohmann::json::parse(content(folder.path / "out"));

  // The text itself is the best of all corpora. It comes behind others, and in the second piece of a long file.
  std::string long_text(std::size_t{1} << 20, ' ');
  long_text += "\ndef mean(values):\n" + cold.at("text").get<std::string>();
  std::ofstream(text, std::ios::binary) << long_text;
  REQUIRE(run(LOOKAHEAD_BUILD_POOL " README.md " + text + " --slots 65536 --out " + pool) == 0);
  CHECK(content(folder.path / "out").starts_with(pool + ": "));
  CHECK(content(folder.path / "out").find(" of 65536 slots filled, 786480 bytes\n") != std::string::npos);
  CHECK(content(folder.path / "out.errors").find("2 of 2 files, ") != std::string::npos);
  REQUIRE(run(generate + " --pool " + pool) == 0);
  const auto warm = nlohmann::json::parse(content(folder.path / "out"));
  CHECK(warm.at("text") == cold.at("text"));
  CHECK(warm.at("identical"));
  CHECK(2 * warm.at("steps").get<int>() < cold.at("steps").get<int>() + 2);

  struct Refusal {
    std::string command, message;
  };
  for (const Refusal& bad : std::vector<Refusal>{
           {generate + " --pool README.md", "generate: README.md does not begin"},
           {LOOKAHEAD_BUILD_POOL " --out " + pool + " tests", "build_pool: tests cannot be read; pass text files"},
           {LOOKAHEAD_BUILD_POOL " --out " + pool + " none", "build_pool: none cannot be read; pass text files"},
           {LOOKAHEAD_BUILD_POOL " --out none/pool README.md", "build_pool: none/pool cannot be written"},
           {LOOKAHEAD_BUILD_POOL " --slots 0 --out " + pool + " README.md", "build_pool: a pool of 0 slots"},
           {LOOKAHEAD_BUILD_POOL " README.md", "--out is required"},
       }) {
    CAPTURE(bad.command);
    CHECK(run(bad.command) != 0);
    CHECK(content(folder.path / "out.errors").find(bad.message) != std::string::npos);
  }
}
