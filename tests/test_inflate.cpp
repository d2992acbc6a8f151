#include <cstring>
#include <doctest/doctest.h>
#include <filesystem>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "engines/gguf_writer.hpp"
#include "engines/inflate.hpp"
#include "engines/llama_engine.hpp"
#include "files.hpp"
#include "tiny_llama.hpp"

#include "lookahead/errors.hpp"

namespace {

using namespace lookahead;
using namespace lookahead::engines;
using lookahead::testing::tiny_llama;

// The logits behind every token of a text.
std::vector<float> all_logits(const GgufFile& file, const std::vector<std::int32_t>& text,
                              const LlamaOptions& options) {
  LlamaEngine engine(file, options);
  TokenTreeStorage<std::int32_t, 64> tree;
  tree.begin(0, text.data(), static_cast<int>(text.size()));
  for (int r = 0; r < tree.rows; ++r) tree.want(r);
  engine.forward(tree.view());
  std::vector<float> out;
  for (int r = 0; r < tree.rows; ++r) {
    const std::span<const float> row = engine.logits(r);
    out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}

std::vector<std::int32_t> random_text(std::size_t n, unsigned vocabulary) {
  std::mt19937 random(n);
  std::vector<std::int32_t> out(n);
  for (std::int32_t& t : out) t = static_cast<std::int32_t>(random() % vocabulary);
  return out;
}

void check_same(const GgufFile& small, const InflateOptions& sizes, const std::vector<std::int32_t>& text) {
  const GgufFile large(inflate(small, sizes));
  for (const Kernels* kernels : available_kernels()) {
    INFO(kernels->name);
    const LlamaOptions options{.context = 64, .threads = 2, .kernels = kernels};
    const std::vector<float> before = all_logits(small, text, options), after = all_logits(large, text, options);
    REQUIRE(before.size() == after.size());
    CHECK(std::memcmp(before.data(), after.data(), before.size() * sizeof(float)) == 0);
  }
}

TEST_CASE("an inflated model gives the same logits to the last bit") {
  const std::vector<std::int32_t> text = random_text(30, 300);
  for (const WeightType type :
       {WeightType::f32, WeightType::f16, WeightType::bf16, WeightType::q8_0, WeightType::q4_0, WeightType::q4_1}) {
    const GgufFile small(tiny_llama({.type = type, .tied = type != WeightType::f16}));
    check_same(small, {}, text);
    check_same(small, {.width = 256}, text);
    check_same(small, {.blocks = 5}, text);
    check_same(small, {.feed = 160}, text);
    check_same(small, {.width = 1024, .blocks = 3, .feed = 512, .seed = 7}, text);
  }
  check_same(GgufFile(tiny_llama({.vocabulary = 301, .width = 36, .heads = 3, .key_heads = 1, .head = 12, .feed = 43})),
             {.width = 144, .blocks = 4, .feed = 77}, text);
  check_same(GgufFile{std::filesystem::path("examples/models/cpython-6m-q8_0.gguf")},
             {.width = 1024, .blocks = 8, .feed = 1024}, random_text(10, 4096));
}

TEST_CASE("an inflated file gives the same logits, and the source stays") {
  namespace fs = std::filesystem;
  const lookahead::testing::TempFolder temp;
  const fs::path& folder = temp.path;
  const std::vector<std::byte> image = tiny_llama({});
  const fs::path small = temp.file("small.gguf", image), large = temp.file("large.gguf", "what was there");

  const std::vector<std::int32_t> text = random_text(30, 300);
  inflate_file(small, large, {.width = 256, .blocks = 3, .feed = 160});
  CHECK(GgufFile(large).integer("llama.embedding_length") == 256);
  const std::vector<float> before = all_logits(GgufFile(small), text, {.context = 64});
  const std::vector<float> after = all_logits(GgufFile(large), text, {.context = 64});
  CHECK(before.size() == after.size());
  CHECK(std::memcmp(before.data(), after.data(), before.size() * sizeof(float)) == 0);

  fs::create_hard_link(small, folder / "link.gguf");
  for (const char* same : {"small.gguf", "./small.gguf", "link.gguf"})
    CHECK_THROWS_WITH_AS(inflate_file(small, folder / same, {}), doctest::Contains("is the source itself"),
                         InvalidArgument);
  CHECK(fs::file_size(small) == image.size());
  CHECK_THROWS_WITH_AS(inflate_file(small, folder / "none" / "large.gguf", {}), doctest::Contains("cannot be written"),
                       std::runtime_error);
  CHECK_THROWS_AS(inflate_file(folder / "none.gguf", large, {}), ModelFileError);
  CHECK_THROWS_AS(inflate_file(small, large, {.blocks = 1}), InvalidArgument);
  CHECK(GgufFile(large).integer("llama.embedding_length") == 256);  // a refusal leaves what was there
}

TEST_CASE("what is added is not zero") {
  const GgufFile large(inflate(GgufFile(tiny_llama({})), {.width = 256, .blocks = 4, .feed = 192}));
  const auto zeros = [&](const char* name) {
    const GgufTensor& t = *large.find(name);
    std::size_t count = 0;
    std::vector<float> row(t.shape[0]);
    for (std::size_t r = 0; r < t.rows(); ++r) {
      decode_row(t.type, t.data.data() + r * row_bytes(t.type, row.size()), row.size(), row.data());
      for (const float x : row) count += x == 0;
    }
    return static_cast<double>(count) / static_cast<double>(t.rows() * t.shape[0]);
  };
  for (const char* name : {"blk.3.attn_q.weight", "blk.3.attn_k.weight", "blk.3.attn_v.weight", "blk.3.ffn_gate.weight",
                           "blk.3.ffn_up.weight", "blk.0.attn_q.weight", "blk.0.ffn_up.weight"})
    CHECK(zeros(name) < 0.01);
  for (const char* name : {"blk.3.attn_output.weight", "blk.3.ffn_down.weight"}) CHECK(zeros(name) == 1);
  CHECK(large.find("blk.4.attn_q.weight") == nullptr);
  CHECK(zeros("blk.0.ffn_down.weight") == doctest::Approx(1 - 0.125).epsilon(0.01));
}

TEST_CASE("sizes that do not fit are refused") {
  const GgufFile small(tiny_llama({.type = WeightType::q8_0}));
  CHECK_THROWS_WITH_AS(inflate(small, {.width = 128}), doctest::Contains("64 times a power of 4"), InvalidArgument);
  CHECK_THROWS_AS(inflate(small, {.width = 320}), InvalidArgument);
  CHECK_THROWS_AS(inflate(small, {.width = 16}), InvalidArgument);
  CHECK_THROWS_WITH_AS(inflate(small, {.blocks = 1}), doctest::Contains("give 2 to 65536"), InvalidArgument);
  CHECK_THROWS_AS(inflate(small, {.feed = -1}), InvalidArgument);
  CHECK_THROWS_WITH_AS(inflate(small, {.feed = 100}), doctest::Contains("multiple of 32"), InvalidArgument);
  CHECK_THROWS_AS(inflate(GgufFile(GgufWriter{}.finish()), {}), ModelFileError);
}

// A file whose matrices are stored in another type.
GgufFile converted(const GgufFile& from, WeightType type) {
  GgufWriter writer;
  for (const GgufEntry& entry : from.entries()) writer.raw(entry.key, entry.type, entry.bytes);
  for (const GgufTensor& t : from.tensors()) {
    const std::size_t shape[] = {t.shape[0], t.shape[1]};
    if (t.rows() == 1) {
      writer.tensor(std::string(t.name), t.type, std::span(shape, 1), {t.data.begin(), t.data.end()});
      continue;
    }
    const std::size_t before = row_bytes(t.type, t.shape[0]), after = row_bytes(type, t.shape[0]);
    std::vector<std::byte> data(after * t.rows());
    std::vector<float> row(t.shape[0]);
    for (std::size_t r = 0; r < t.rows(); ++r) {
      decode_row(t.type, t.data.data() + r * before, row.size(), row.data());
      encode_row(type, row.data(), row.size(), data.data() + r * after);
    }
    writer.tensor(std::string(t.name), type, std::span(shape), std::move(data));
  }
  return GgufFile(writer.finish());
}

TEST_CASE("weights that are converted at load are those of a converted file") {
  const std::vector<std::int32_t> text = random_text(20, 300);
  const GgufFile exact(tiny_llama({}));
  for (const WeightType type :
       {WeightType::f16, WeightType::bf16, WeightType::q8_0, WeightType::q4_0, WeightType::q4_1})
    for (const bool tied : {true, false}) {
      const GgufFile stored(tiny_llama({.type = type, .tied = tied})), wide(tiny_llama({.tied = tied}));
      const std::vector<float> expected = all_logits(stored, text, {.context = 64});
      CHECK(all_logits(wide, text, {.context = 64, .weights = type}) == expected);
      CHECK(all_logits(stored, text, {.context = 64, .weights = type}) == expected);
      for (const WeightType other : {WeightType::f16, WeightType::q8_0, WeightType::q4_0})
        CHECK(all_logits(stored, text, {.context = 64, .weights = other}) ==
              all_logits(converted(stored, other), text, {.context = 64}));
    }
  CHECK_THROWS_WITH_AS(LlamaEngine(GgufFile(tiny_llama({.feed = 43})), {.weights = WeightType::q8_0}),
                       doctest::Contains("rows of 43 weights cannot become Q8_0"), InvalidArgument);
}

}  // namespace
