#pragma once
/// @file prompts.hpp
/// A set of prompts, and engines that work through it side by side.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "engines/gguf.hpp"
#include "engines/llama_engine.hpp"
#include "engines/tokenizer.hpp"
#include "prompt_texts.hpp"

#include "lookahead/errors.hpp"

namespace lookahead::bench {

using Tokens = std::vector<std::int32_t>;

/// The prompts of a folder, one a file, in the order of their names, and one engine a thread to decode them with.
/// Weights are F32, so that texts, and what can be guessed of them, hardly depend on the processor's kernels.
class PromptSet {
 public:
  /// Throws `ModelFileError` for a model that cannot be used, `InvalidArgument` for a folder without prompts.
  PromptSet(const std::string& model, const std::string& folder, int threads) {
    const engines::GgufFile file(model);
    const engines::Tokenizer tokenizer(file);
    if (!std::filesystem::is_directory(folder))
      throw InvalidArgument("no folder '" + folder + "': pass --prompts a folder of prompts");
    for (const std::string& text : load_texts(folder)) prompts_.push_back(tokenizer.encode(text, tokenizer.add_bos()));
    for (int t = 0; t < threads; ++t)
      engines_.emplace_back(file, engines::LlamaOptions{.threads = 1, .weights = engines::WeightType::f32});
  }

  [[nodiscard]] std::size_t size() const { return prompts_.size(); }

  /// Calls `work(engine, prompt, index)` once for each prompt, one engine a thread, and passes on what it throws.
  template <class Work>
  void for_each(const Work& work) {
    std::atomic<std::size_t> next{0};
    std::vector<std::exception_ptr> errors(engines_.size());
    {
      std::vector<std::jthread> threads;
      for (std::size_t t = 0; t < engines_.size(); ++t)
        threads.emplace_back([&, t] {
          try {
            for (std::size_t i = next++; i < prompts_.size(); i = next++) work(engines_[t], prompts_[i], i);
          } catch (...) {
            errors[t] = std::current_exception();
            next = prompts_.size();
          }
        });
    }
    for (const auto& error : errors)
      if (error) std::rethrow_exception(error);
  }

 private:
  std::vector<Tokens> prompts_;
  std::vector<engines::LlamaEngine> engines_;
};

}  // namespace lookahead::bench
