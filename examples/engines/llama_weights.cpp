#include "engines/llama_weights.hpp"

#include <algorithm>
#include <array>

#include "lookahead/errors.hpp"

namespace lookahead::engines {
namespace {

constexpr std::int64_t most_width = 1 << 16, most_layers = 1024;

std::size_t size(int n) { return static_cast<std::size_t>(n); }

}  // namespace

int LlamaWeights::count(const char* key, std::optional<std::int64_t> otherwise, std::int64_t most) const {
  const std::string name = std::string("llama.") + key;
  const auto value = file.integer(name);
  if (!value && !otherwise) file.fail("lacks the key '" + name + "'; convert the model again");
  const std::int64_t n = value.value_or(otherwise.value_or(0));
  if (n < 1 || n > most)
    file.fail("key '" + name + "' is " + std::to_string(n) + "; 1 to " + std::to_string(most) +
              " are supported; use another model");
  return static_cast<int>(n);
}

const GgufTensor& LlamaWeights::tensor(const std::string& name, int columns, int rows) {
  const GgufTensor* t = file.find(name);
  if (t == nullptr) file.fail("lacks the tensor '" + name + "'; convert the model again");
  if (t->shape != std::array<std::size_t, 4>{size(columns), size(rows), 1, 1})
    file.fail("tensor '" + name + "' has shape [" + std::to_string(t->shape[0]) + ", " + std::to_string(t->shape[1]) +
              ", " + std::to_string(t->shape[2]) + ", " + std::to_string(t->shape[3]) + "], but the keys say [" +
              std::to_string(columns) + ", " + std::to_string(rows) + ", 1, 1]; convert the model again");
  used_.insert(t->name);
  return *t;
}

Matrix LlamaWeights::matrix(const std::string& name, int columns, int rows) {
  const GgufTensor& t = tensor(name, columns, rows);
  return {t.data.data(), row_bytes(t.type, size(columns)), t.type, rows, columns};
}

const float* LlamaWeights::vector(const std::string& name, int n) {
  const GgufTensor& t = tensor(name, n, 1);
  if (t.type != WeightType::f32)
    file.fail("tensor '" + name + "' is " + weight_type_name(t.type) + "; it must be F32; convert the model again");
  return reinterpret_cast<const float*>(t.data.data());  // aligned: offsets are multiples of 8
}

void LlamaWeights::embed(std::int32_t token, float* out) const {
  const std::size_t columns = size(embedding.columns);
  const WeightType type = type_of(embedding);
  decode_row(embedding.type, embedding.data + size(token) * embedding.stride, columns, out);
  if (type == embedding.type) return;
  std::byte block[block_size * sizeof(float)];
  for (std::size_t i = 0; i < columns; i += block_size) {
    const std::size_t some = std::min(columns - i, size(block_size));
    encode_row(type, out + i, some, block);
    decode_row(type, block, some, out + i);
  }
}

void LlamaWeights::arrange(std::optional<WeightType> type, Workers& workers) {
  type_ = type;
  std::vector<Matrix*> matrices{&output};
  for (LlamaLayer& l : layers)
    for (Matrix* m : {&l.query, &l.key, &l.value, &l.output, &l.gate, &l.up, &l.down}) matrices.push_back(m);
  std::erase_if(matrices, [&](Matrix* m) { return m->type == type_of(*m) && !is_packed(m->type); });
  std::size_t bytes = 0;
  const auto needed = [&](const Matrix& m) {  // whole cache lines; packed rows come in groups
    const std::size_t group = is_packed(type_of(m)) ? interleaved : 1;
    return (row_bytes(type_of(m), size(m.columns)) * ((size(m.outputs) + group - 1) / group * group) + 63) / 64 * 64;
  };
  for (const Matrix* m : matrices) {
    const WeightType to = type_of(*m);
    if (size(m->columns) % block_numbers(to) != 0)
      throw InvalidArgument(
          "rows of " + std::to_string(m->columns) + " weights cannot become " + weight_type_name(to) +
          ", which packs " + std::to_string(block_numbers(to)) +
          " at a time; give F32, F16 or BF16 in LlamaOptions::weights, on a command line with --weights");
    packed = packed || is_packed(to);
    bytes += needed(*m);
  }
  arranged_ = Floats(bytes / sizeof(float), true);
  auto* to = reinterpret_cast<std::byte*>(arranged_ + 0);
  for (Matrix* m : matrices) {
    const Matrix from = *m;
    *m = {to, row_bytes(type_of(from), size(from.columns)), type_of(from), from.outputs, from.columns};
    workers.run((from.outputs + interleaved - 1) / interleaved, [&](int task, int) {
      const int first = task * interleaved, rows = std::min(interleaved, from.outputs - first);
      const std::byte* source = from.data + size(first) * from.stride;
      std::byte* const target = to + size(first) * m->stride;
      std::vector<std::byte> converted;
      if (m->type != from.type) {
        if (is_packed(m->type)) converted.resize(size(rows) * m->stride);
        std::byte* const encoded = is_packed(m->type) ? converted.data() : target;
        std::vector<float> row(size(from.columns));
        for (int r = 0; r < rows; ++r) {
          decode_row(from.type, source + size(r) * from.stride, row.size(), row.data());
          encode_row(m->type, row.data(), row.size(), encoded + size(r) * m->stride);
        }
        source = encoded;
      }
      if (is_packed(m->type)) interleave(m->type, source, rows, size(from.columns), target);
    });
    to += needed(*m);
  }
}

LlamaWeights::LlamaWeights(const GgufFile& source) : file(source) {
  const auto architecture = file.text("general.architecture");
  if (architecture != "llama")
    file.fail("has the architecture '" + std::string(architecture.value_or("(none)").substr(0, 64)) +
              "'; 'llama' is supported; use another model");
  width = count("embedding_length", {}, most_width);
  feed = count("feed_forward_length", {}, most_width);
  context = count("context_length", {}, std::int64_t{1} << 30);
  const int blocks = count("block_count", {}, most_layers);
  heads = count("attention.head_count", {}, width);
  key_heads = count("attention.head_count_kv", heads, heads);
  if (heads % key_heads != 0)
    file.fail("has " + std::to_string(heads) + " heads for " + std::to_string(key_heads) +
              " key heads, which must divide them; use another model");
  head = count("attention.key_length", std::max(width / heads, 1), width);
  rope = count("rope.dimension_count", head, head);
  if (count("attention.value_length", head, width) != head || heads * std::int64_t{head} > most_width || rope % 2 != 0)
    file.fail("has heads of " + std::to_string(head) + " with " + std::to_string(rope) +
              " rotated; keys and values of one length, at most " + std::to_string(most_width) +
              " in all heads, and an even number of rotated ones are supported; use another model");
  const double stored_epsilon = file.number("llama.attention.layer_norm_rms_epsilon").value_or(-1);
  frequency_base = file.number("llama.rope.freq_base").value_or(10000);
  if (!(stored_epsilon >= 0 && stored_epsilon <= 1) || !(frequency_base >= 1 && frequency_base <= 1e12))
    file.fail(
        "needs 'llama.attention.layer_norm_rms_epsilon' from 0 to 1 and 'llama.rope.freq_base' from 1 to 1e12; "
        "convert the model again");
  epsilon = static_cast<float>(stored_epsilon);
  if (file.text("llama.rope.scaling.type").value_or("none") != "none")
    file.fail("scales its rotary positions ('llama.rope.scaling.type'), which is not supported; use another model");

  const GgufTensor* table = file.find("token_embd.weight");
  const std::size_t tokens = table == nullptr ? 1 : table->shape[1];
  if (tokens > 1U << 24U)
    file.fail("has " + std::to_string(tokens) + " tokens; at most 16777216 are supported; use another model");
  vocabulary = static_cast<int>(tokens);
  embedding = matrix("token_embd.weight", width, vocabulary);
  output = file.find("output.weight") != nullptr ? matrix("output.weight", width, vocabulary) : embedding;
  output_norm = vector("output_norm.weight", width);
  if (file.find("rope_freqs.weight") != nullptr) frequency_factors = vector("rope_freqs.weight", rope / 2);
  for (int i = 0; i < blocks; ++i) {
    const std::string block = "blk." + std::to_string(i) + ".";
    LlamaLayer& layer = layers.emplace_back();
    layer.attention_norm = vector(block + "attn_norm.weight", width);
    layer.query = matrix(block + "attn_q.weight", width, heads * head);
    layer.key = matrix(block + "attn_k.weight", width, key_heads * head);
    layer.value = matrix(block + "attn_v.weight", width, key_heads * head);
    layer.output = matrix(block + "attn_output.weight", heads * head, width);
    layer.feed_norm = vector(block + "ffn_norm.weight", width);
    layer.gate = matrix(block + "ffn_gate.weight", width, feed);
    layer.up = matrix(block + "ffn_up.weight", width, feed);
    layer.down = matrix(block + "ffn_down.weight", feed, width);
  }
  for (const GgufTensor& t : file.tensors())
    if (!used_.contains(t.name))
      file.fail("has the tensor '" + std::string(t.name.substr(0, 64)) +
                "', which is no part of a Llama model; results would be wrong without it; use another model");
}

}  // namespace lookahead::engines
