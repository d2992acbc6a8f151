#pragma once
/// @file torch_demo.hpp
/// What the demo (generate.cpp) needs of a model, from PyTorch: Llama models in GGUF files, weights in float32.

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <torch/version.h>

#include "chat_template.hpp"
#include "engines/gguf.hpp"
#include "engines/tokenizer.hpp"
#include "torch_llama.hpp"

#include "lookahead/adapters/torch.hpp"

namespace lookahead::examples::demo {

using Engine = TorchModel<TorchLlama>;
using ModelFile = engines::GgufFile;
using engines::Tokenizer;
using examples::chat_tokens;

/// Which model runs; by default the bundled one.
struct ModelOptions {
  std::string path = LOOKAHEAD_BUNDLED_MODEL;

  void declare(CLI::App& app) {
    app.add_option("--model", path, "Llama model, a GGUF file; its weights become F32")->capture_default_str();
  }

  [[nodiscard]] ModelFile open() const { return ModelFile(std::filesystem::path{path}); }

  [[nodiscard]] std::string describe(const ModelFile& file) const {
    return std::string(file.text("general.name").value_or(path)) + ", weights in F32, LibTorch " TORCH_VERSION;
  }

  [[nodiscard]] Engine engine(const ModelFile& file, int context, int threads, std::size_t rows) const {
    if (threads > 0) at::set_num_threads(threads);
    const TorchLlama module(file);
    const std::int64_t longest = file.integer("llama.context_length").value_or(0);
    return Engine(module, module->options(context > 0 ? context : std::min<std::int64_t>(longest, 4096),
                                          static_cast<std::int64_t>(rows)));
  }
};

}  // namespace lookahead::examples::demo
