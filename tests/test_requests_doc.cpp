// The examples of docs/requests.md, as they stand there: each runs, does what the text says, and is shown unchanged.
// An example lies between "// [name]" and "// []".
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "doc_examples.hpp"
#include "engines/gguf.hpp"
#include "engines/llama_engine.hpp"
#include "engines/tokenizer.hpp"
#include "json_grammar.hpp"
#include "plain_sampling.hpp"

#include "lookahead/lookahead.hpp"
#include "lookahead/testing/plain_decode.hpp"

using namespace lookahead;
using Token = std::int32_t;
using Tokens = std::vector<Token>;

// [engine_choice]
struct EngineChoice {
  template <class Engine>
  auto select(Engine& engine, int row, std::int64_t) const {
    return engine.sampled(row);
  }
};
// []

namespace {

// What an engine with a sampler of its own looks like.
struct SamplingEngine : engines::LlamaEngine {
  using LlamaEngine::LlamaEngine;
  Tokens chosen{};
  void forward(const TokenTree<Token>& tree) {
    LlamaEngine::forward(tree);
    chosen.assign(tree.tokens().size(), -1);
    for (const std::int32_t row : tree.wanted()) {
      const auto r = static_cast<std::size_t>(row);
      const SampleOptions options{.seed = 3};
      const auto position = static_cast<std::size_t>(tree.positions()[r]) + 1;
      chosen[r] =
          static_cast<Token>(plain_sampling::draw(plain_sampling::weights(logits(row), options), options, position));
    }
  }
  [[nodiscard]] Token sampled(int row) const { return chosen[static_cast<std::size_t>(row)]; }
};

}  // namespace

TEST_CASE("every example runs, and does what is said of it") {
  // [setup]
  const engines::GgufFile file("examples/models/cpython-6m-q8_0.gguf");
  const engines::Tokenizer tokenizer(file);
  engines::LlamaEngine model(file);
  const std::vector<Token> prompt = tokenizer.encode("def mean(values):\n", tokenizer.add_bos());
  const std::vector<Token> end_tokens(tokenizer.eos().begin(), tokenizer.eos().end());
  // []
  const auto behind_prompt = [&](std::span<const Token> text, std::size_t from) {
    std::string out;
    for (const Token t : text.subspan(from)) out += tokenizer.piece(t);
    return out;
  };
  const auto greedy = [&](const Tokens& text, std::size_t count) {
    engines::LlamaEngine other(file);
    return behind_prompt(testing::plain_decode(other, std::span(text), count, end_tokens), 0);
  };

  SUBCASE("sampling") {
    // [sampling]
    const SampleVerify verify({.temperature = 0.8F, .top_k = 40, .top_p = 0.95F, .min_p = 0.02F, .seed = 7});
    Decoder decoder(model, {}, verify);
    std::string text;
    decoder.generate(prompt, 64, [&](Token token) { text += tokenizer.piece(token); });
    // []
    const SampleOptions options{.temperature = 0.8F, .top_k = 40, .top_p = 0.95F, .min_p = 0.02F, .seed = 7};
    CHECK(text == behind_prompt(plain_sampling::sample(model, prompt, 64, {}, options, {}), 0));
  }

  SUBCASE("processors") {
    // [processors]
    const Token tab = tokenizer.encode("\t", false).front();
    const auto no_triples = [](std::span<float> logits, std::span<const Token> text) {
      const std::size_t n = text.size();
      if (n >= 2 && text[n - 1] == text[n - 2])
        logits[static_cast<std::size_t>(text[n - 1])] = -std::numeric_limits<float>::infinity();
    };
    SampleVerify verify(SampleOptions{.temperature = 0},  // greedy, from the processed logits
                        RepetitionPenalty({.penalty = 1.1F, .last = 64}),
                        FrequencyPenalty({.frequency = 0.1F, .presence = 0.1F}), LogitBias<Token>{{{tab, -2.0F}}},
                        BannedTokens<Token>{{end_tokens}}, MinimumLength<Token>{prompt.size() + 20, end_tokens},
                        no_triples);
    Decoder decoder(model, {}, verify);
    decoder.generate(prompt, 64, [](Token) {});
    // []
    const auto text = decoder.text();
    CHECK(text.size() == prompt.size() + 64);
    for (std::size_t i = prompt.size(); i < text.size(); ++i)
      CHECK_FALSE((text[i] == text[i - 1] && text[i] == text[i - 2]));
    const Tokens drafted(text.begin(), text.end());
    Decoder plain(model, {.rows = 1}, verify);
    plain.generate(prompt, 64, [](Token) {});
    CHECK(std::ranges::equal(plain.text(), drafted));
  }

  SUBCASE("grammar") {
    // [grammar]
    std::vector<std::string> pieces;
    for (std::size_t t = 0; t < tokenizer.vocabulary(); ++t)
      pieces.emplace_back(tokenizer.piece(static_cast<Token>(t)));
    const std::size_t most = 100;  // the object is complete within so many tokens
    SampleVerify verify(SampleOptions{.seed = 1}, examples::JsonGrammar(pieces, end_tokens, prompt.size(), most));
    Decoder decoder(model, {.end_tokens = end_tokens}, verify);
    std::string text;
    decoder.generate(prompt, most, [&](Token token) { text += tokenizer.piece(token); });
    // []
    CHECK(nlohmann::json::parse(text).is_object());
  }

  SUBCASE("tokens that the engine has chosen") {
    SamplingEngine engine(file);
    // [engine_choice_use]
    Decoder<SamplingEngine, 15, 5, 15, EngineChoice> decoder(engine);
    decoder.generate(prompt, 64, [](Token) {});
    // []
    const Tokens expected = plain_sampling::sample(model, prompt, 64, {}, {.seed = 3}, {});
    CHECK(std::ranges::equal(decoder.text().subspan(prompt.size()), expected));
  }

  SUBCASE("stops") {
    // [stops]
    Decoder decoder(model, {.end_tokens = end_tokens});
    std::string text;
    TextStream stream([&](Token token) { return tokenizer.piece(token); },  //
                      [&](std::string_view more) { text += more; },         // to a screen, a socket
                      {"\n\n", "\ndef "});
    const Generation done = decoder.generate(prompt, 64, stream);
    stream.finish();
    // []
    const std::string whole = greedy(prompt, 64);
    const std::size_t cut = std::min({whole.find("\n\n"), whole.find("\ndef "), whole.size()});
    CHECK(text == whole.substr(0, cut));
    CHECK(done.stop == (cut < whole.size() ? StopReason::sink : StopReason::max_tokens));
  }

  SUBCASE("interrupts") {
    // [interrupts]
    Decoder decoder(model);
    std::string text;
    const auto sink = [&](Token token) { text += tokenizer.piece(token); };
    std::atomic<bool> cancel = false;  // another thread may set it
    const Interrupt interrupt{&cancel, std::chrono::steady_clock::now() + std::chrono::milliseconds(10)};
    Generation done = decoder.generate(prompt, 64, sink, interrupt);
    if (done.stop == StopReason::deadline || done.stop == StopReason::cancelled)
      done = decoder.run(64 - done.tokens, sink);  // later: nothing was lost
    // []
    CHECK(text == greedy(prompt, 64));
  }

  SUBCASE("log-probabilities") {
    // [log_probs]
    Decoder decoder(model, {}, LogProbs(GreedyVerify{}, 3));
    decoder.generate(prompt, 32, [](Token) {});
    double sum = 0;
    std::vector<Token> others;
    for (std::size_t i = prompt.size(); i < decoder.text().size(); ++i) {
      sum += static_cast<double>(decoder.verify().at(i).log_prob);
      for (const TokenLogProb<Token>& other : decoder.verify().alternatives(i)) others.push_back(other.token);
    }
    // []
    CHECK(sum < 0);
    CHECK(others.size() == 96);
    for (std::size_t i = 0; i < 32; ++i) CHECK(others[3 * i] == decoder.text()[prompt.size() + i]);
  }

  SUBCASE("streaming") {
    // [streaming]
    Decoder decoder(model);
    std::string blocks, tokens, range;
    decoder.generate(prompt, 32, [&](std::span<const Token> block) { blocks += tokenizer.decode(block); });
    decoder.generate(prompt, 32, [&](Token token) { tokens += tokenizer.piece(token); });
    decoder.start(prompt);
    for (const std::span<const Token> block : decoder.stream(32)) range += tokenizer.decode(block);
    // []
    CHECK(blocks == greedy(prompt, 32));
    CHECK(tokens == blocks);
    CHECK(range == blocks);
  }

  SUBCASE("conversations") {
    std::string text;
    const auto sink = [&](Token token) { text += tokenizer.piece(token); };
    // [conversation]
    Decoder decoder(model, {.keep_pool = true, .end_tokens = end_tokens});
    decoder.generate(prompt, 32, sink);
    decoder.append(tokenizer.encode("\n\ndef median(values):\n", false));
    decoder.run(32, sink);
    // []
    Tokens so_far(decoder.text().begin(), decoder.text().end());
    so_far.resize(so_far.size() - 32);
    CHECK(text == greedy(prompt, 32) + greedy(so_far, 32));
  }

  SUBCASE("several continuations") {
    std::vector<std::string> texts;
    // [fork]
    Decoder decoder(model, {}, SampleVerify({.temperature = 0.8F}));
    decoder.generate(prompt, 16, [](Token) {});
    for (std::uint64_t stream = 1; stream <= 3; ++stream) {
      engines::LlamaEngine copy = model.fork();
      auto fork = decoder.fork(copy);
      fork.verify().set_stream(stream);
      std::string& text = texts.emplace_back();
      fork.run(32, [&](Token token) { text += tokenizer.piece(token); });
    }
    // []
    const Tokens so_far(decoder.text().begin(), decoder.text().end());
    for (std::uint64_t stream = 1; stream <= 3; ++stream) {
      const SampleOptions options{.temperature = 0.8F, .stream = stream};
      CHECK(texts[stream - 1] == behind_prompt(plain_sampling::sample(model, so_far, 32, {}, options, {}), 0));
    }
    CHECK(texts[0] != texts[1]);
  }

  SUBCASE("back to an earlier position") {
    // [roll_back]
    Decoder decoder(model, {}, SampleVerify({.temperature = 0.8F}));
    decoder.generate(prompt, 16, [](Token) {});
    const std::size_t mark = decoder.text().size();
    decoder.run(32, [](Token) {});
    decoder.roll_back(mark);         // the prompt counts; nothing of what came behind is left
    decoder.verify().set_stream(1);  // or it would say the same again
    decoder.run(32, [](Token) {});
    // []
    const Tokens all(decoder.text().begin(), decoder.text().end());
    const Tokens so_far(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(mark));
    const SampleOptions options{.temperature = 0.8F, .stream = 1};
    CHECK(behind_prompt(all, mark) == behind_prompt(plain_sampling::sample(model, so_far, 32, {}, options, {}), 0));
  }

  SUBCASE("a loop of one's own") {
    // [own_loop]
    Lookahead<> step;
    NGramPool<Token> pool;
    Lookahead<>::Tree tree;
    SampleVerify verify({.seed = 7});
    std::string text;
    TextStream stream([&](Token token) { return tokenizer.piece(token); },  //
                      [&](std::string_view more) { text += more; },         //
                      {"\n\n"});

    model.prefill(std::span(prompt).first(prompt.size() - 1));
    step.start(pool, prompt);
    verify.observe(0, prompt);
    for (bool stop = false; !stop && model.context_size() < 100;) {
      step.plan(pool, {}, {.rows = 16}, tree);
      model.forward(tree.view());
      const auto select = [&](int row) { return verify.select(model, row, tree.position[row] + 1); };
      const auto top = [&](int row, std::span<Token> out) { return model.top_tokens(row, out); };
      const auto ends = [&](Token token) { return std::ranges::find(end_tokens, token) != end_tokens.end(); };
      auto proposal = step.resolve(select, top, ends);
      const Admission admission = stream.admit(proposal.tokens);
      proposal = step.accept(admission.tokens);  // a stop string cuts the block, and the path that is committed
      stop = admission.stop || proposal.stopped;
      const std::size_t kept = model.commit(proposal.path);
      stream(proposal.tokens);
      step.apply(pool, kept);
    }
    stream.finish();
    // []
    const std::string whole = behind_prompt(plain_sampling::sample(model, prompt, 150, end_tokens, {.seed = 7}, {}), 0);
    const std::size_t cut = whole.find("\n\n");
    if (cut < text.size() + 2)
      CHECK(text == whole.substr(0, cut));
    else
      CHECK(whole.starts_with(text));
  }
}

TEST_CASE("docs/requests.md shows the examples as they are") {
  doc_examples::check_page("docs/requests.md", {"tests/test_requests_doc.cpp"});
}
