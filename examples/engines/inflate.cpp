#include "engines/inflate.hpp"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "engines/gguf_writer.hpp"
#include "engines/llama_weights.hpp"

#include "lookahead/errors.hpp"

namespace lookahead::engines {
namespace {

constexpr float deviation = 0.02F;  ///< of the new weights

/// Random rows, quickly: stretches of one row that was encoded once.
class RandomRows {
 public:
  RandomRows(WeightType type, std::size_t longest, std::mt19937& random) : type_(type), random_(random) {
    std::vector<float> numbers(longest + spread * block_numbers(type));
    std::normal_distribution<float> normal(0, deviation);
    for (float& x : numbers) x = normal(random);
    row_.resize(row_bytes(type, numbers.size()));
    encode_row(type, numbers.data(), numbers.size(), row_.data());
  }

  void write(std::byte* to, std::size_t columns) {
    std::memcpy(to, row_.data() + random_() % spread * block_bytes(type_), row_bytes(type_, columns));
  }

 private:
  static constexpr std::size_t spread = 4096;
  WeightType type_;
  std::mt19937& random_;
  std::vector<std::byte> row_;
};

class Inflation {
 public:
  Inflation(const LlamaWeights& model, const InflateOptions& options) : model_(model), random_(options.seed) {
    width_ = size_of("width", static_cast<std::size_t>(model.width), options.width);
    feed_ = size_of("feed", static_cast<std::size_t>(model.feed), options.feed);
    blocks_ = size_of("blocks", model.layers.size(), options.blocks);
    std::size_t ratio = width_.to / width_.from;
    while (ratio % 4 == 0) {
      ratio /= 4;
      shrink_ *= 0.5F;
    }
    if (ratio != 1 || width_.to % width_.from != 0)
      throw InvalidArgument("InflateOptions::width is " + std::to_string(width_.to) + "; give " +
                            std::to_string(width_.from) + " times a power of 4");
  }

  std::vector<std::byte> run() {
    copy_keys();
    for (const GgufTensor& t : model_.file.tensors())
      if (t.name.substr(0, 4) != "blk.") copy(t, std::string(t.name), false);
    for (std::size_t b = 0; b < blocks_.to; ++b) {
      const bool extra = b >= blocks_.from;
      const std::string block = "blk." + std::to_string(extra ? b % blocks_.from : b) + ".";
      for (const GgufTensor& t : model_.file.tensors())
        if (t.name.substr(0, block.size()) == block)
          copy(t, "blk." + std::to_string(b) + "." + std::string(t.name.substr(block.size())), extra);
    }
    return writer_.finish();
  }

 private:
  struct Size {
    std::size_t from = 0, to = 0;
  };

  static Size size_of(const char* option, std::size_t from, int wanted) {
    const std::size_t to = wanted == 0 ? from : static_cast<std::size_t>(std::max(wanted, 0));
    if (to < from || to > 65536)
      throw InvalidArgument(std::string("InflateOptions::") + option + " is " + std::to_string(wanted) + "; give " +
                            std::to_string(from) + " to 65536, or 0 to keep it");
    return {from, to};
  }

  void copy_keys() {
    const auto head = static_cast<std::size_t>(model_.head);
    const std::pair<const char*, std::size_t> replaced[] = {
        {"llama.embedding_length", width_.to},  {"llama.feed_forward_length", feed_.to},
        {"llama.block_count", blocks_.to},      {"llama.attention.key_length", head},  // the width would decide
        {"llama.attention.value_length", head}, {"llama.rope.dimension_count", static_cast<std::size_t>(model_.rope)}};
    for (const auto& [key, value] : replaced) writer_.integer(key, static_cast<std::uint32_t>(value));
    const char* const epsilon = "llama.attention.layer_norm_rms_epsilon";
    writer_.number(epsilon, model_.epsilon * shrink_ * shrink_);
    for (const GgufEntry& entry : model_.file.entries())
      if (entry.key != epsilon &&
          std::none_of(std::begin(replaced), std::end(replaced), [&](const auto& r) { return entry.key == r.first; }))
        writer_.raw(entry.key, entry.type, entry.bytes);
  }

  /// Writes a tensor under a name with its columns and rows extended.
  void copy(const GgufTensor& t, const std::string& name, bool extra) {
    const std::string_view kind = std::string_view(name).substr(name.rfind('.', name.size() - 8) + 1);
    const auto is = [&](const char* weight) { return kind == std::string(weight) + ".weight"; };
    if (is("attn_norm") || is("ffn_norm") || is("output_norm")) return copy_norm(t, name);
    if (is("rope_freqs")) return put(name, t.type, t.shape[0], 1, {t.data.begin(), t.data.end()});
    const bool into_width = is("attn_output") || is("ffn_down");
    const bool from_feed = is("ffn_down"), from_heads = is("attn_output");
    const bool to_feed = is("ffn_gate") || is("ffn_up");
    const bool embedding = is("token_embd");
    const std::size_t columns = from_heads ? t.shape[0] : from_feed ? feed_.to : width_.to;
    const std::size_t rows = into_width ? width_.to : to_feed ? feed_.to : t.shape[1];
    if (columns % block_numbers(t.type) != 0)
      throw InvalidArgument("rows of " + std::to_string(columns) + " numbers do not fit " + weight_type_name(t.type) +
                            ", which packs 32 at a time; give a multiple of 32");

    const std::size_t old_bytes = row_bytes(t.type, t.shape[0]), bytes = row_bytes(t.type, columns);
    std::vector<std::byte> data(bytes * rows);  // zeros are zeros in every type
    RandomRows random(t.type, columns, random_);
    const bool random_columns = !embedding && !from_feed, random_rows = !into_width;
    for (std::size_t r = 0; r < rows; ++r) {
      std::byte* const row = data.data() + r * bytes;
      if (r < t.shape[1] && !extra) {
        std::memcpy(row, t.data.data() + r * old_bytes, old_bytes);
        if (random_columns) random.write(row + old_bytes, columns - t.shape[0]);
      } else if (random_rows) {
        random.write(row, columns);
      }
    }
    put(name, t.type, columns, rows, std::move(data));
  }

  void copy_norm(const GgufTensor& t, const std::string& name) {
    std::vector<float> norm(width_.to, shrink_);
    std::memcpy(norm.data(), t.data.data(), t.data.size());
    for (std::size_t i = 0; i < width_.from; ++i) norm[i] *= shrink_;
    const std::span<const std::byte> bytes = std::as_bytes(std::span(norm));
    put(name, t.type, norm.size(), 1, {bytes.begin(), bytes.end()});
  }

  void put(const std::string& name, WeightType type, std::size_t columns, std::size_t rows,
           std::vector<std::byte> data) {
    const std::size_t shape[] = {columns, rows};
    writer_.tensor(name, type, std::span(shape, rows == 1 ? 1 : 2), std::move(data));
  }

  const LlamaWeights& model_;
  std::mt19937 random_;
  Size width_, feed_, blocks_;
  float shrink_ = 1;  ///< of the norm weights: 2^-k for 4^k times the width
  GgufWriter writer_;
};

}  // namespace

std::vector<std::byte> inflate(const GgufFile& source, const InflateOptions& options) {
  return Inflation(LlamaWeights(source), options).run();
}

void inflate_file(const std::filesystem::path& source, const std::filesystem::path& target,
                  const InflateOptions& options) {
  std::error_code none;
  if (std::filesystem::equivalent(source, target, none))
    throw InvalidArgument(target.string() +
                          " is the source itself, which is read while the other is written; give "
                          "another path for the larger model");
  const std::vector<std::byte> image = inflate(GgufFile(source), options);
  std::ofstream out(target, std::ios::binary);
  const bool opened = out.is_open();
  out.write(reinterpret_cast<const char*>(image.data()), static_cast<std::streamsize>(image.size()));
  out.close();
  if (out) return;
  if (opened) std::filesystem::remove(target, none);
  throw std::runtime_error(target.string() + " cannot be written; it takes " + std::to_string(image.size()) +
                           " bytes: check the path, and the room on the disk");
}

}  // namespace lookahead::engines
