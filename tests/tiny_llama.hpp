#pragma once
// Small random models as GGUF files in memory.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "engines/gguf_writer.hpp"

namespace lookahead::testing {

struct TinyLlama {
  int vocabulary = 300, width = 64, layers = 2, heads = 4, key_heads = 2, head = 16, feed = 96, context = 256;
  engines::WeightType type = engines::WeightType::f32;
  bool tied = true;
  std::optional<engines::WeightType> down = {};  // the type of the down-projections, if it is another
  int distinct = 1 << 20;                        // rows of a matrix repeat after so many
  unsigned seed = 1;
};

// A vocabulary of the usual kind: three control tokens, 256 byte tokens, some pieces with falling scores.
inline void add_tokenizer(engines::GgufWriter& file, int vocabulary) {
  std::vector<std::string> names = {"<unk>", "<s>", "</s>"};
  std::vector<std::int32_t> types = {2, 3, 3};
  const char digits[] = "0123456789ABCDEF";
  for (std::size_t b = 0; b < 256; ++b) {
    names.push_back(std::string("<0x") + digits[b / 16] + digits[b % 16] + ">");
    types.push_back(6);
  }
  const std::vector<std::string> pieces = {"\xe2\x96\x81",
                                           "a",
                                           "b",
                                           "c",
                                           "d",
                                           "ab",
                                           "cd",
                                           "abcd",
                                           "\xe2\x96\x81"
                                           "a",
                                           "bc"};
  for (std::size_t i = names.size(); i < static_cast<std::size_t>(vocabulary); ++i) {
    const std::size_t p = i - 259;
    names.push_back(p < pieces.size() ? pieces[p] : "piece" + std::to_string(p));
    types.push_back(1);
  }
  names.resize(static_cast<std::size_t>(vocabulary));
  types.resize(names.size());
  std::vector<float> scores;
  for (std::size_t i = 0; i < names.size(); ++i) scores.push_back(i < 259 ? 0.0F : -static_cast<float>(i));
  file.text("tokenizer.ggml.model", "llama");
  file.texts("tokenizer.ggml.tokens", names);
  file.numbers("tokenizer.ggml.scores", scores);
  file.integers("tokenizer.ggml.token_type", types);
  file.integer("tokenizer.ggml.bos_token_id", 1);
  file.integer("tokenizer.ggml.eos_token_id", 2);
  file.flag("tokenizer.ggml.add_bos_token", true);
  file.flag("tokenizer.ggml.add_space_prefix", false);
}

inline void add_keys(engines::GgufWriter& file, const TinyLlama& m) {
  file.text("general.architecture", "llama");
  const auto put = [&](const char* key, int value) {
    file.integer(std::string("llama.") + key, static_cast<std::uint32_t>(value));
  };
  put("context_length", m.context);
  put("embedding_length", m.width);
  put("block_count", m.layers);
  put("feed_forward_length", m.feed);
  put("attention.head_count", m.heads);
  put("attention.head_count_kv", m.key_heads);
  put("attention.key_length", m.head);
  put("attention.value_length", m.head);
  put("rope.dimension_count", m.head);
  file.number("llama.attention.layer_norm_rms_epsilon", 1e-5F);
  file.number("llama.rope.freq_base", 1000.0F);
}

inline void add_tensors(engines::GgufWriter& file, const TinyLlama& m) {
  std::mt19937 random(m.seed);
  std::normal_distribution<float> normal;
  const auto put = [&](const std::string& name, engines::WeightType type, int columns, int rows, float mean,
                       float scale) {
    const std::size_t shape[] = {static_cast<std::size_t>(columns), static_cast<std::size_t>(rows)};
    std::vector<float> row(shape[0]);
    const std::size_t stride = engines::row_bytes(type, shape[0]);
    std::vector<std::byte> data(stride * shape[1]);
    for (std::size_t r = 0; r < shape[1]; ++r) {
      if (r >= static_cast<std::size_t>(m.distinct)) {
        std::copy_n(data.begin() + static_cast<std::ptrdiff_t>((r - static_cast<std::size_t>(m.distinct)) * stride),
                    stride, data.begin() + static_cast<std::ptrdiff_t>(r * stride));
        continue;
      }
      for (float& x : row) x = mean + scale * normal(random);
      engines::encode_row(type, row.data(), row.size(), data.data() + r * stride);
    }
    file.tensor(name, type, std::span(shape, rows == 1 ? 1 : 2), std::move(data));
  };
  const auto matrix = [&](const std::string& name, int columns, int rows,
                          std::optional<engines::WeightType> type = {}) {
    put(name, type.value_or(m.type), columns, rows, 0.0F, 1.5F / std::sqrt(static_cast<float>(columns)));
  };
  const auto norm = [&](const std::string& name) { put(name, engines::WeightType::f32, m.width, 1, 1.0F, 0.2F); };
  matrix("token_embd.weight", m.width, m.vocabulary);
  if (!m.tied) matrix("output.weight", m.width, m.vocabulary);
  norm("output_norm.weight");
  for (int i = 0; i < m.layers; ++i) {
    const std::string block = "blk." + std::to_string(i) + ".";
    norm(block + "attn_norm.weight");
    matrix(block + "attn_q.weight", m.width, m.heads * m.head);
    matrix(block + "attn_k.weight", m.width, m.key_heads * m.head);
    matrix(block + "attn_v.weight", m.width, m.key_heads * m.head);
    matrix(block + "attn_output.weight", m.heads * m.head, m.width);
    norm(block + "ffn_norm.weight");
    matrix(block + "ffn_gate.weight", m.width, m.feed);
    matrix(block + "ffn_up.weight", m.width, m.feed);
    matrix(block + "ffn_down.weight", m.feed, m.width, m.down);
  }
}

inline std::vector<std::byte> tiny_llama(const TinyLlama& m = {}) {
  engines::GgufWriter file;
  add_keys(file, m);
  add_tokenizer(file, m.vocabulary);
  add_tensors(file, m);
  return file.finish();
}

}  // namespace lookahead::testing
