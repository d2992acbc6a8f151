#pragma once
/// @file model_options.hpp
/// The options of a command line that say which model runs, and in which form.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include "engines/gguf.hpp"
#include "engines/inflate.hpp"
#include "engines/weights.hpp"

namespace lookahead::examples {

/// A model file, and what becomes of it when it is loaded.
struct ModelOptions {
  std::string path;                                    ///< a GGUF file
  std::optional<engines::InflateOptions> inflation{};  ///< nothing: as large as it is
  std::optional<engines::WeightType> weights{};        ///< nothing: the types of the file

  /// Adds --model, --inflate and --weights. Of --inflate and --weights the last one counts.
  void declare(CLI::App& app) {
    app.add_option("--model", path, "Llama model, a GGUF file")->capture_default_str();
    app.add_option_function<std::string>(
           "--inflate", [this](const std::string& sizes) { inflation = parse_sizes(sizes); },
           "WIDTH,BLOCKS,FEED: makes the model larger and slower at the same text, to show what its steps cost; the "
           "width is the model's times a power of 4")
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    app.add_option_function<std::string>(
           "--weights", [this](const std::string& name) { weights = parse_type(name); },
           "Converts the weights when the model is loaded: f32, f16, bf16, q8_0, q4_0 or q4_1 (the last three multiply "
           "activations that are rounded to 8 bits); default: as in the file")
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  }

  /// Opens the file and inflates it. Throws what `GgufFile` and `inflate` throw.
  [[nodiscard]] engines::GgufFile open() const {
    engines::GgufFile file(std::filesystem::path{path});
    return inflation ? engines::GgufFile(engines::inflate(file, *inflation)) : file;
  }

  /// One line about the model: its name, its size, what was done to it.
  [[nodiscard]] std::string describe(const engines::GgufFile& file) const {
    double parameters = 0;
    for (const auto& tensor : file.tensors()) parameters += static_cast<double>(tensor.shape[0] * tensor.rows());
    const std::string_view name = file.text("general.name").value_or("");
    std::array<char, 96> text;
    std::snprintf(text.data(), text.size(), ", %s%.1f million parameters%s%s", inflation ? "inflated to " : "",
                  parameters * 1e-6, weights ? ", weights in " : "",
                  weights ? engines::weight_type_name(*weights) : "");
    return (name.empty() ? std::filesystem::path(path).filename().string() : std::string(name)) + text.data();
  }

 private:
  static engines::InflateOptions parse_sizes(const std::string& sizes) {
    engines::InflateOptions o;
    std::array<char, 2> between{};
    std::istringstream in(sizes);
    in >> o.width >> between[0] >> o.blocks >> between[1] >> o.feed;
    if (in.fail() || in.peek() != EOF || between[0] != ',' || between[1] != ',')
      throw CLI::ValidationError(
          "--inflate", "'" + sizes + "' is no WIDTH,BLOCKS,FEED; give three whole numbers, such as 1024,22,4096");
    return o;
  }

  static engines::WeightType parse_type(const std::string& name) {
    std::string upper = name;
    std::ranges::transform(upper, upper.begin(), [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
    using enum engines::WeightType;
    for (const engines::WeightType type : {f32, f16, bf16, q8_0, q4_0, q4_1})
      if (upper == engines::weight_type_name(type)) return type;
    throw CLI::ValidationError("--weights",
                               "'" + name + "' is no type of weights; give f32, f16, bf16, q8_0, q4_0 or q4_1");
  }
};

}  // namespace lookahead::examples
