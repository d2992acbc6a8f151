#pragma once
/// @file llama_cpp_demo.hpp
/// What the demo (generate.cpp) needs of a model, from llama.cpp: any GGUF file that llama.cpp can load.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <ggml-backend.h>
#include <llama.h>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "lookahead/adapters/llama_cpp.hpp"
#include "lookahead/errors.hpp"
#include "lookahead/pool_file.hpp"

namespace lookahead::examples::demo {

using Engine = LlamaCpp;

/// Leaves out what llama.cpp logs, but for errors.
inline void be_quiet() {
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
      },
      nullptr);
}

/// Gives a context threads that stay, as llama.cpp's own programs do: built without OpenMP, it else starts new ones for
/// each pass. They sleep between passes, as those of the programs do not. Does nothing where the processor's backend
/// has no such threads. Precondition: all contexts with so many threads are used by one thread at a time.
inline void keep_threads(llama_context* context, int threads) {
  using Pool = std::unique_ptr<ggml_threadpool, void (*)(ggml_threadpool*)>;
  static std::map<int, Pool> kept;
  const ggml_backend_dev_t processor = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  if (processor == nullptr) return;
  const auto function = [&](const char* name) {
    return ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(processor), name);
  };
  const auto make = reinterpret_cast<ggml_threadpool* (*)(ggml_threadpool_params*)>(function("ggml_threadpool_new"));
  const auto free = reinterpret_cast<void (*)(ggml_threadpool*)>(function("ggml_threadpool_free"));
  if (make == nullptr || free == nullptr) return;
  auto found = kept.find(threads);
  if (found == kept.end()) {
    ggml_threadpool_params params = ggml_threadpool_params_default(threads);
    params.poll = 0;
    found = kept.emplace(threads, Pool(make(&params), free)).first;
  }
  if (found->second != nullptr) llama_attach_threadpool(context, found->second.get(), nullptr);
}

/// A loaded model.
class ModelFile {
 public:
  explicit ModelFile(const std::string& path) {
    be_quiet();
    llama_backend_init();
    model_.reset(llama_model_load_from_file(path.c_str(), llama_model_default_params()));
    if (model_ == nullptr) throw std::runtime_error(path + " is no model that llama.cpp can load");
  }

  /// A text among the keys of the file, or nothing.
  [[nodiscard]] std::optional<std::string> text(const char* key) const {
    const std::int32_t length = llama_model_meta_val_str(model_.get(), key, nullptr, 0);
    if (length < 0) return std::nullopt;
    std::string value(static_cast<std::size_t>(length) + 1, '\0');
    llama_model_meta_val_str(model_.get(), key, value.data(), value.size());
    value.pop_back();
    return value;
  }

  [[nodiscard]] llama_model* get() const { return model_.get(); }
  [[nodiscard]] const llama_vocab* vocabulary() const { return llama_model_get_vocab(model_.get()); }

 private:
  struct Free {
    void operator()(llama_model* model) const { llama_model_free(model); }
  };
  std::unique_ptr<llama_model, Free> model_;
};

/// llama.cpp's tokenizer, with the pieces of all tokens made beforehand.
class Tokenizer {
 public:
  explicit Tokenizer(const ModelFile& file) : vocabulary_(file.vocabulary()) {
    const std::int32_t tokens = llama_vocab_n_tokens(vocabulary_);
    for (llama_token t = 0; t < tokens; ++t) {
      std::string text(16, '\0');
      const auto write = [&] {
        return llama_token_to_piece(vocabulary_, t, text.data(), static_cast<std::int32_t>(text.size()), 0, false);
      };
      std::int32_t length = write();
      if (length < 0) {
        text.resize(static_cast<std::size_t>(-length));
        length = write();
      }
      text.resize(static_cast<std::size_t>(std::max(length, 0)));
      pieces_.push_back(std::move(text));
      if (llama_vocab_is_eog(vocabulary_, t)) eos_.push_back(t);
    }
  }

  /// The tokens of a text; names of control tokens count as such where `control` says so.
  [[nodiscard]] std::vector<llama_token> encode(std::string_view text, bool bos, bool control = false) const {
    std::vector<llama_token> tokens(text.size() + 16);
    const std::int32_t count = llama_tokenize(vocabulary_, text.data(), static_cast<std::int32_t>(text.size()),
                                              tokens.data(), static_cast<std::int32_t>(tokens.size()), bos, control);
    if (count < 0) throw std::runtime_error("llama.cpp could not tokenize the text");
    tokens.resize(static_cast<std::size_t>(count));
    return tokens;
  }

  [[nodiscard]] bool add_bos() const { return llama_vocab_get_add_bos(vocabulary_); }
  [[nodiscard]] std::span<const llama_token> eos() const { return eos_; }
  [[nodiscard]] std::string_view piece(llama_token token) const { return pieces_[static_cast<std::size_t>(token)]; }
  [[nodiscard]] std::size_t vocabulary() const { return pieces_.size(); }

  [[nodiscard]] std::uint64_t fingerprint() const {
    std::vector<std::string> names;
    for (std::size_t t = 0; t < pieces_.size(); ++t)
      names.emplace_back(llama_vocab_get_text(vocabulary_, static_cast<llama_token>(t)));
    return tokenizer_fingerprint(names);
  }

 private:
  const llama_vocab* vocabulary_;
  std::vector<std::string> pieces_;
  std::vector<llama_token> eos_;
};

/// A question in the chat template of the file, as text.
[[nodiscard]] inline std::string chat_text(const ModelFile& file, const std::string& question) {
  const llama_chat_message message = {"user", question.c_str()};
  const char* const form = llama_model_chat_template(file.get(), nullptr);
  std::string text;
  const auto apply = [&] {
    return llama_chat_apply_template(form, &message, 1, true, text.data(), static_cast<std::int32_t>(text.size()));
  };
  const std::int32_t length = form == nullptr ? -1 : apply();
  if (length < 0)
    throw std::runtime_error("llama.cpp does not know the file's chat template; complete the text without (--raw)");
  text.resize(static_cast<std::size_t>(length));
  apply();
  return text;
}

/// A question in the chat template of the file, as tokens. Nothing in it becomes a control token.
[[nodiscard]] inline std::vector<llama_token> chat_tokens(const ModelFile& file, const Tokenizer& tokenizer,
                                                          const std::string& question) {
  if (tokenizer.encode(question, false, true) != tokenizer.encode(question, false))
    throw std::runtime_error("the question holds names of control tokens; leave them out, or pass --raw");
  return tokenizer.encode(chat_text(file, question), tokenizer.add_bos(), true);
}

/// Which model runs, and how.
struct ModelOptions {
  std::string path = LOOKAHEAD_BUNDLED_MODEL;
  bool flash_attention = false;

  void declare(CLI::App& app) {
    app.add_option("--model", path, "Any GGUF file that llama.cpp can load")->capture_default_str();
    app.add_flag("--flash-attention", flash_attention,
                 "With llama.cpp's flash attention, which rounds otherwise for one row than for many");
  }

  [[nodiscard]] ModelFile open() const { return ModelFile(path); }

  [[nodiscard]] std::string describe(const ModelFile& file) const {
    std::array<char, 128> text{};
    llama_model_desc(file.get(), text.data(), text.size());
    return file.text("general.name").value_or(path) + ": " + text.data() + ", llama.cpp " + llama_version();
  }

  /// Throws `InvalidArgument` for a model whose state cannot be cut back, or too many rows.
  [[nodiscard]] Engine engine(const ModelFile& file, int context, int threads, std::size_t rows) const {
    llama_context_params params = LlamaCpp::default_params();
    if (flash_attention) params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    const int longest = std::min(llama_model_n_ctx_train(file.get()), 4096);
    params.n_ctx = static_cast<std::uint32_t>(context > 0 ? context : longest);
    params.n_threads = params.n_threads_batch =
        threads > 0 ? threads : static_cast<std::int32_t>(std::max(1U, std::thread::hardware_concurrency()));
    Engine engine(file.get(), params, static_cast<int>(rows));
    keep_threads(engine.native(), params.n_threads);
    return engine;
  }
};

}  // namespace lookahead::examples::demo
