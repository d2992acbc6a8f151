#pragma once
/// @file torch_llama.hpp
/// A Llama model of a GGUF file as a module of PyTorch, for `TorchModel`.

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <utility>
#include <vector>

#include "engines/gguf.hpp"
#include "engines/llama_weights.hpp"
#include "engines/weights.hpp"

#include "lookahead/adapters/torch.hpp"

namespace lookahead::examples {

/// The Llama architecture (RMSNorm, rotary positions on adjacent pairs, grouped-query attention, SwiGLU; tied or
/// separate output), weights in float32.
class TorchLlamaImpl : public torch::nn::Module {
 public:
  /// Throws `ModelFileError` where the file is no complete Llama model.
  explicit TorchLlamaImpl(const engines::GgufFile& file) {
    const engines::LlamaWeights model(file);
    heads_ = model.heads;
    key_heads_ = model.key_heads;
    head_ = model.head;
    epsilon_ = static_cast<double>(model.epsilon);
    torch::Tensor frequencies = torch::pow(
        model.frequency_base, torch::arange(0, model.rope, 2, torch::kFloat64) / static_cast<double>(-model.rope));
    if (file.find("rope_freqs.weight") != nullptr) frequencies = frequencies / decode(file, "rope_freqs.weight");
    frequencies_ = register_buffer("frequencies", frequencies);

    const auto weight = [&](const std::string& name) {
      std::string path = name;  // a name of torch holds no dot
      for (char& c : path)
        if (c == '.') c = '_';
      return register_parameter(path, decode(file, name), false);
    };
    embedding_ = weight("token_embd.weight");
    output_ = file.find("output.weight") != nullptr ? weight("output.weight") : embedding_;
    output_norm_ = weight("output_norm.weight");
    for (std::size_t i = 0; i < model.layers.size(); ++i) {
      const std::string block = "blk." + std::to_string(i) + ".";
      const auto of = [&](const char* name) { return weight(block + name + ".weight"); };
      layers_.push_back({of("attn_norm"), of("attn_q"), of("attn_k"), of("attn_v"), of("attn_output"), of("ffn_norm"),
                         of("ffn_gate"), of("ffn_up"), of("ffn_down")});
    }
  }

  /// What `TorchModule` says.
  torch::Tensor forward(const torch::Tensor& tokens, const torch::Tensor& positions, const torch::Tensor& mask,
                        const torch::Tensor& wanted, TorchCache& cache) const {
    const std::int64_t rows = tokens.size(0), group = heads_ / key_heads_;
    const torch::Tensor angles = positions.unsqueeze(1) * frequencies_;
    const torch::Tensor cosines = angles.cos().to(torch::kFloat32), sines = angles.sin().to(torch::kFloat32);
    const auto heads_of = [&](const torch::Tensor& x, std::int64_t heads) {  // [heads, rows, head]
      return x.view({rows, heads, head_}).transpose(0, 1);
    };
    torch::Tensor x = embedding_.index_select(0, tokens);
    for (const Layer& layer : layers_) {
      torch::Tensor normed = normalise(x, layer.attention_norm);
      const torch::Tensor query = rotate(heads_of(matmul(normed, layer.query.t()), heads_), cosines, sines);
      const auto [keys, values] =
          cache.append(rotate(heads_of(matmul(normed, layer.key.t()), key_heads_), cosines, sines),
                       heads_of(matmul(normed, layer.value.t()), key_heads_));
      // The query heads that share keys go together: [key heads, group x rows, columns].
      const torch::Tensor grouped = query.reshape({key_heads_, group * rows, head_});
      torch::Tensor scores = bmm(grouped, keys.transpose(1, 2)) / std::sqrt(static_cast<double>(head_));
      scores = softmax(scores.view({heads_, rows, -1}) + mask, -1).view({key_heads_, group * rows, -1});
      const torch::Tensor attended = bmm(scores, values).view({heads_, rows, head_}).transpose(0, 1);
      x = x + matmul(attended.reshape({rows, -1}), layer.output.t());
      normed = normalise(x, layer.feed_norm);
      x = x + matmul(silu(matmul(normed, layer.gate.t())) * matmul(normed, layer.up.t()), layer.down.t());
    }
    return matmul(normalise(x.index_select(0, wanted), output_norm_), output_.t());
  }

  /// What a `TorchModel` of this module needs to know.
  [[nodiscard]] TorchOptions options(std::int64_t longest, std::int64_t rows) const {
    return {.vocabulary = embedding_.size(0),
            .layers = static_cast<std::int64_t>(layers_.size()),
            .heads = key_heads_,
            .head_size = head_,
            .longest = longest,
            .rows = rows,
            .tensors = embedding_.options()};
  }

 private:
  struct Layer {
    torch::Tensor attention_norm, query, key, value, output, feed_norm, gate, up, down;
  };

  /// [rows, columns]
  static torch::Tensor decode(const engines::GgufFile& file, const std::string& name) {
    const engines::GgufTensor& tensor = *file.find(name);
    const auto columns = static_cast<std::int64_t>(tensor.shape[0]), rows = static_cast<std::int64_t>(tensor.rows());
    torch::Tensor numbers = torch::empty({rows, columns}, torch::kFloat32);
    for (std::size_t r = 0; r < tensor.rows(); ++r)
      engines::decode_row(tensor.type, tensor.data.data() + r * engines::row_bytes(tensor.type, tensor.shape[0]),
                          tensor.shape[0], numbers.data_ptr<float>() + r * tensor.shape[0]);
    return numbers;
  }

  [[nodiscard]] torch::Tensor normalise(const torch::Tensor& x, const torch::Tensor& norm) const {
    return x * (x.square().mean(-1, true) + epsilon_).rsqrt() * norm;
  }

  /// Turns adjacent pairs of each head by the angles of a row's position; numbers behind the last angle stay.
  [[nodiscard]] torch::Tensor rotate(const torch::Tensor& x, const torch::Tensor& cosines,
                                     const torch::Tensor& sines) const {
    const std::int64_t turned = 2 * cosines.size(1);
    const torch::Tensor pairs = x.narrow(2, 0, turned).unflatten(2, {turned / 2, 2});
    const torch::Tensor a = pairs.select(3, 0), b = pairs.select(3, 1);
    const torch::Tensor both = torch::stack({a * cosines - b * sines, a * sines + b * cosines}, 3).flatten(2);
    return torch::cat({both, x.narrow(2, turned, head_ - turned)}, 2);
  }

  std::int64_t heads_ = 0, key_heads_ = 0, head_ = 0;
  double epsilon_ = 0;
  torch::Tensor frequencies_, embedding_, output_, output_norm_;
  std::vector<Layer> layers_;
};
/// `TorchLlama(file)`: a handle, whose copies share the weights.
TORCH_MODULE(TorchLlama);

}  // namespace lookahead::examples
