#pragma once
/// @file chat_template.hpp
/// A question as a chat model expects it.

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engines/gguf.hpp"
#include "engines/tokenizer.hpp"

namespace lookahead::examples {

/// The template that is understood, the one of SmolLM2, as its files hold it.
inline constexpr std::string_view chat_template =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}";

/// The tokens of a conversation that begins with `question`, up to where the answer begins. The question is plain text:
/// nothing in it becomes a control token. Throws ModelFileError where the file has another template than
/// `chat_template`, or none.
[[nodiscard]] inline std::vector<std::int32_t> chat_tokens(const engines::GgufFile& file,
                                                           const engines::Tokenizer& tokenizer,
                                                           std::string_view question) {
  const std::optional<std::int32_t> begin = tokenizer.find("<|im_start|>"), end = tokenizer.find("<|im_end|>");
  if (file.text("tokenizer.chat_template") != chat_template || !begin || !end)
    file.fail("has no chat template that is understood, only SmolLM2's is; complete the text without one (--raw)");

  std::vector<std::int32_t> tokens;
  const auto add = [&](std::string_view text) {
    const std::vector<std::int32_t> more = tokenizer.encode(text, false);
    tokens.insert(tokens.end(), more.begin(), more.end());
  };
  for (const std::string& message :
       {std::string("system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"),
        "user\n" + std::string(question)}) {
    tokens.push_back(*begin);
    add(message);
    tokens.push_back(*end);
    add("\n");
  }
  tokens.push_back(*begin);
  add("assistant\n");
  return tokens;
}

}  // namespace lookahead::examples
