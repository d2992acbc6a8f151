#pragma once
/// @file prompt_sets.hpp
/// The sets of prompts under bench/prompts, as tokens.

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "chat_template.hpp"
#include "engines/gguf.hpp"
#include "engines/tokenizer.hpp"
#include "prompt_texts.hpp"

namespace lookahead::bench {

/// The names of the sets: files of code and of documentation, HumanEval as raw text, Spec-Bench's first turns in the
/// model's chat template, and random tokens.
inline const std::vector<std::string> prompt_sets{"code", "docs", "humaneval", "chat", "random"};

/// The prompts of a set, raw ones `without_space_at_end`. Throws InvalidArgument where the files are not there, and
/// what `chat_tokens` throws.
inline std::vector<std::vector<std::int32_t>> load_prompts(const std::string& set, const engines::GgufFile& file,
                                                           const engines::Tokenizer& tokenizer) {
  std::vector<std::vector<std::int32_t>> prompts;
  if (set == "random") {
    std::mt19937 random(1);
    for (int i = 0; i < 24; ++i) {
      auto& prompt = prompts.emplace_back(64);
      for (auto& t : prompt) t = static_cast<std::int32_t>(random() % tokenizer.vocabulary());
    }
    return prompts;
  }
  for (const std::string& text : load_texts(set_path(set)))
    prompts.push_back(set == "chat" ? examples::chat_tokens(file, tokenizer, text)
                                    : tokenizer.encode(without_space_at_end(text), tokenizer.add_bos()));
  return prompts;
}

}  // namespace lookahead::bench
