#pragma once
/// @file engine_demo.hpp
/// What the demo (generate.cpp) needs of a model, from the CPU engine.

#include <cstddef>
#include <filesystem>
#include <string>
#include <system_error>

#include "chat_template.hpp"
#include "engines/gguf.hpp"
#include "engines/llama_engine.hpp"
#include "engines/tokenizer.hpp"
#include "model_options.hpp"

namespace lookahead::examples::demo {

using Engine = engines::LlamaEngine;
using ModelFile = engines::GgufFile;
using engines::Tokenizer;
using examples::chat_tokens;

/// Which model runs, and how; by default the bundled one.
struct ModelOptions : examples::ModelOptions {
  ModelOptions() { path = LOOKAHEAD_BUNDLED_MODEL; }

  /// What the figures are from, and what that means for them.
  [[nodiscard]] std::string describe(const ModelFile& file) const {
    std::string text = examples::ModelOptions::describe(file);
    std::error_code none;
    if (inflation)
      text +=
          ".\nWhat was added computes, but nothing comes of it: a step costs what it costs in a model of"
          "\nthis size, while the text is the small model's, easier to guess than a large model's.";
    else if (std::filesystem::equivalent(path, LOOKAHEAD_BUNDLED_MODEL, none))
      text += ": so small that it repeats\nitself, which is easy to guess. Larger models gain less.";
    return text;
  }

  [[nodiscard]] Engine engine(const ModelFile& file, int context, int threads, std::size_t) const {
    return Engine(file, {.context = context, .threads = threads, .weights = weights});
  }
};

}  // namespace lookahead::examples::demo
