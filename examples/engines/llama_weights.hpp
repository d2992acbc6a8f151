#pragma once
/// @file llama_weights.hpp
/// What a model file says about a Llama model.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "engines/floats.hpp"
#include "engines/gguf.hpp"
#include "engines/kernels.hpp"
#include "engines/workers.hpp"

namespace lookahead::engines {

struct LlamaLayer {
  const float *attention_norm = nullptr, *feed_norm = nullptr;
  Matrix query, key, value, output, gate, up, down;
};

/// The sizes and weights of a model, checked: shapes fit, nothing is missing, nothing is left over. Weights lie in the
/// file, which it shares; what is converted or interleaved lies in memory besides.
struct LlamaWeights {
  /// Throws `ModelFileError` where the file is no complete Llama model.
  explicit LlamaWeights(const GgufFile& source);
  LlamaWeights(const LlamaWeights&) = delete;
  LlamaWeights& operator=(const LlamaWeights&) = delete;

  /// Converts the weights to `type` (nothing: they stay as they are) and interleaves packed ones: all matrices but the
  /// embedding are then as `Kernels::multiply` takes them. Types of single numbers that the file already has stay in
  /// the file. Call it once. Throws `InvalidArgument` where rows do not fill the blocks of `type`.
  void arrange(std::optional<WeightType> type, Workers& workers);

  /// out[0..width) = the embedding of a token, in the type that the weights were converted to.
  void embed(std::int32_t token, float* out) const;

  GgufFile file;
  int width = 0, feed = 0, context = 0, vocabulary = 0;
  int heads = 0, key_heads = 0;  ///< of queries, and of keys and values
  int head = 0, rope = 0;        ///< numbers of a head, and how many of them are rotated
  float epsilon = 0;
  double frequency_base = 0;
  bool packed = false;       ///< once arranged: whether any matrix but the embedding has a packed type
  Matrix embedding, output;  ///< the embedding in rows, as a file stores it
  const float *output_norm = nullptr, *frequency_factors = nullptr;
  std::vector<LlamaLayer> layers;

 private:
  int count(const char* key, std::optional<std::int64_t> otherwise, std::int64_t most) const;
  const GgufTensor& tensor(const std::string& name, int columns, int rows);
  Matrix matrix(const std::string& name, int columns, int rows);
  const float* vector(const std::string& name, int n);
  [[nodiscard]] WeightType type_of(const Matrix& m) const { return type_.value_or(m.type); }

  std::unordered_set<std::string_view> used_;
  std::optional<WeightType> type_;
  Floats arranged_;
};

}  // namespace lookahead::engines
