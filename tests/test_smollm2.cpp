// SmolLM2-135M-Instruct from its file to its text.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <doctest/doctest.h>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cases.hpp"
#include "chat_template.hpp"
#include "engines/gguf.hpp"
#include "engines/llama_engine.hpp"
#include "engines/tokenizer.hpp"

#include "lookahead/lookahead.hpp"
#include "lookahead/testing/plain_decode.hpp"

namespace {

using namespace lookahead;
using namespace lookahead::engines;
using Tokens = std::vector<std::int32_t>;

// Where the model cannot be had, the whole program counts as skipped.
const GgufFile& model() {
  static const GgufFile file = [] {
    std::FILE* const out = popen("examples/models/fetch.sh", "r");
    REQUIRE(out != nullptr);
    std::string path;
    for (int c = std::fgetc(out); c != EOF && c != '\n'; c = std::fgetc(out)) path += static_cast<char>(c);
    if (pclose(out) != 0) std::exit(77);
    return GgufFile(std::filesystem::path(path));
  }();
  return file;
}

}  // namespace

TEST_CASE("a question in the chat template") {
  const Tokenizer tokenizer(model());
  CHECK(tokenizer.eos().front() == 2);
  CHECK(!tokenizer.add_bos());
  const Tokens expected = {1,   9690, 198, 2683, 359,   253,  5356, 5646, 11173, 3365, 3511, 308,  34519,
                           28,  7018, 411, 407,  19712, 8182, 2,    198,  1,     4093, 198,  1780, 314,
                           260, 3575, 282, 4649, 47,    2,    198,  1,    520,   9531, 198};
  CHECK(examples::chat_tokens(model(), tokenizer, "What is the capital of France?") == expected);
}

TEST_CASE("lookahead decoding equals plain decoding, in the file's own types and in F16") {
  const Tokenizer tokenizer(model());
  const Tokens end_tokens(tokenizer.eos().begin(), tokenizer.eos().end());
  std::vector<Tokens> prompts;
  for (const char* text :
       {"def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\n    >>> fibonacci(10)\n    55",
        "The three laws of motion are:\n\n1."})
    prompts.push_back(tokenizer.encode(text, tokenizer.add_bos()));
  for (const char* question : {"What is the capital of France?", "Write a haiku about rain.", "Count from 1 to 20."})
    prompts.push_back(examples::chat_tokens(model(), tokenizer, question));
  std::size_t most_tokens = 48;
  if (cases(100'000) < 100'000) {  // a step is costly under a sanitizer
    prompts.resize(3);
    most_tokens = 16;
  }

  for (const std::optional<WeightType> weights : {std::optional<WeightType>(), std::optional(WeightType::f16)}) {
    LlamaEngine engine(model(), {.context = 256, .weights = weights});
    std::size_t tokens = 0, steps = 0;
    for (const Tokens& prompt : prompts) {
      const Tokens expected = testing::plain_decode<LlamaEngine>(engine, prompt, most_tokens, end_tokens);
      Decoder decoder(engine, {.rows = 12, .cost = StepCost::none(), .end_tokens = end_tokens});
      Tokens text;
      const Generation run = decoder.generate(prompt, most_tokens, [&](std::span<const std::int32_t> block) {
        text.insert(text.end(), block.begin(), block.end());
      });
      CHECK(text == expected);
      tokens += run.tokens;
      steps += run.steps;
      // In the file's own types "The" and "L" are a near tie, here as in llama.cpp.
      if (weights && &prompt == &prompts[2]) CHECK(tokenizer.decode(text) == "The capital of France is Paris.");
    }
    CHECK(steps < tokens);
  }
}
