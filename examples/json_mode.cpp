// Has the bundled model, which knows nothing but Python, write JSON: a grammar allows only tokens that fit. Then the
// same without drafts, one token after the other. `json_mode --help` lists the options.

#include <CLI/CLI.hpp>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engines/gguf.hpp"
#include "engines/llama_engine.hpp"
#include "engines/tokenizer.hpp"
#include "json_grammar.hpp"

#include "lookahead/lookahead.hpp"

namespace {

using namespace lookahead;
using lookahead::engines::LlamaEngine;
using lookahead::examples::JsonGrammar;
using Token = LlamaEngine::token_type;

int run(const std::string& prompt, const SampleOptions& sampling, std::size_t max_tokens) {
  const engines::GgufFile file(LOOKAHEAD_BUNDLED_MODEL);
  const engines::Tokenizer tokenizer(file);
  LlamaEngine model(file);
  std::vector<std::string> pieces;
  for (std::size_t t = 0; t < tokenizer.vocabulary(); ++t) pieces.emplace_back(tokenizer.piece(static_cast<Token>(t)));
  const std::vector<Token> tokens = tokenizer.encode(prompt, tokenizer.add_bos());

  DecoderOptions<Token> options;
  options.end_tokens.assign(tokenizer.eos().begin(), tokenizer.eos().end());
  const SampleVerify verify(sampling, JsonGrammar(pieces, options.end_tokens, tokens.size(), max_tokens));
  std::string texts[2];
  Generation made[2];
  for (const int plain : {0, 1}) {
    if (plain == 1) options.rows = 1;
    Decoder decoder(model, options, verify);
    made[plain] = decoder.generate(tokens, max_tokens, [&](Token t) { texts[plain] += tokenizer.piece(t); });
  }
  std::cout << texts[0] << "\n\n"
            << made[0].tokens << " tokens in " << made[0].steps << " steps; plain decoding: " << made[1].steps
            << " steps, " << (texts[0] == texts[1] ? "the same text" : "another text")
            << "\nparsed: " << nlohmann::json::parse(texts[0]) << "\n";
  return texts[0] == texts[1] ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Has a language model write a JSON object.");
  std::string prompt = "response = json.dumps(\n";
  SampleOptions sampling;
  sampling.temperature = 0.8F;
  std::size_t max_tokens = 120;
  app.add_option("prompt", prompt, "Text in front of the object")->capture_default_str();
  app.add_option("--temperature", sampling.temperature, "0: greedy")->capture_default_str();
  app.add_option("--seed", sampling.seed, "Picks one of many texts")->capture_default_str();
  app.add_option("--max-tokens", max_tokens, "The object is complete within so many tokens")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    return run(prompt, sampling, max_tokens);
  } catch (const std::exception& error) {
    std::cerr << "json_mode: " << error.what() << "\n";
    return 2;
  }
}
