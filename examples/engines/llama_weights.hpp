#pragma once
/// @file llama_weights.hpp
/// What a model file says about a Llama model.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "engines/floats.hpp"
#include "engines/gguf.hpp"
#include "engines/kernels.hpp"

namespace lookahead::engines {

struct LlamaLayer {
  const float *attention_norm = nullptr, *feed_norm = nullptr;
  Matrix query, key, value, output, gate, up, down;
};

/// The sizes and weights of a model, checked: shapes fit, nothing is missing, nothing is left over. Weights lie in the
/// file, which it shares, or in memory where they were converted.
struct LlamaWeights {
  /// Converts all matrices to `type` on so many threads; nothing: they stay as they are. Throws `ModelFileError` where
  /// the file is no complete Llama model, `InvalidArgument` where rows do not fill the blocks of `type`.
  explicit LlamaWeights(const GgufFile& source, std::optional<WeightType> type = {}, int threads = 1);
  LlamaWeights(const LlamaWeights&) = delete;
  LlamaWeights& operator=(const LlamaWeights&) = delete;

  GgufFile file;
  int width = 0, feed = 0, context = 0, vocabulary = 0;
  int heads = 0, key_heads = 0;  ///< of queries, and of keys and values
  int head = 0, rope = 0;        ///< numbers of a head, and how many of them are rotated
  float epsilon = 0;
  double frequency_base = 0;
  Matrix embedding, output;
  const float *output_norm = nullptr, *frequency_factors = nullptr;
  std::vector<LlamaLayer> layers;

 private:
  int count(const char* key, std::optional<std::int64_t> otherwise, std::int64_t most) const;
  const GgufTensor& tensor(const std::string& name, int columns, int rows);
  Matrix matrix(const std::string& name, int columns, int rows);
  const float* vector(const std::string& name, int n);
  void convert(std::span<Matrix* const> matrices, WeightType type, int threads);

  std::unordered_set<std::string_view> used_;
  Floats converted_;
};

}  // namespace lookahead::engines
