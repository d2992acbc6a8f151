#include <cstdlib>
#include <cstring>
#include <doctest/doctest.h>
#include <filesystem>
#include <limits>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "engines/gguf.hpp"
#include "engines/gguf_writer.hpp"
#include "engines/llama_engine.hpp"
#include "engines/tokenizer.hpp"
#include "files.hpp"
#include "tiny_llama.hpp"

namespace {
// The largest single allocation since it was last set to 0.
std::size_t largest_allocation = 0;
}  // namespace

// Not inlined: g++ would pair new with free, and warn.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  largest_allocation = std::max(largest_allocation, bytes);
  if (void* const memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(bytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

using namespace lookahead::engines;
using lookahead::testing::tiny_llama;
using lookahead::testing::TinyLlama;
using Image = std::vector<std::byte>;

template <class T>
std::vector<std::byte> bytes_of(T value) {
  std::vector<std::byte> out(sizeof value);
  std::memcpy(out.data(), &value, sizeof value);
  return out;
}

// Where the bytes of a text first lie in an image.
std::size_t find_in(const Image& image, std::string_view text) {
  const std::string_view all(reinterpret_cast<const char*>(image.data()), image.size());
  const std::size_t at = all.find(text);
  REQUIRE(at != std::string_view::npos);
  return at;
}

template <class T>
Image with(Image image, std::size_t at, T value) {
  std::memcpy(image.data() + at, &value, sizeof value);
  return image;
}

void check_refused(Image image, const char* part) {
  CHECK_THROWS_WITH_AS(GgufFile(std::move(image)), doctest::Contains(part), ModelFileError);
}

// Two tensors of 8 floats and some keys; small enough to patch by hand.
Image small_file() {
  GgufWriter file;
  file.text("text", "value");
  file.integer("integer", 7);
  file.number("number", 0.5F);
  file.flag("flag", true);
  const std::vector<std::string> texts = {"one", "", "three"};
  file.texts("texts", texts);
  const std::vector<float> numbers = {1, 2};
  file.numbers("numbers", numbers);
  const std::vector<std::int32_t> integers = {-1, 5};
  file.integers("integers", integers);
  file.raw("wide", 10, bytes_of(std::numeric_limits<std::uint64_t>::max()));
  const std::size_t shape[] = {4, 2};
  file.tensor("first", WeightType::f32, shape, Image(32, std::byte{1}));
  file.tensor("second", WeightType::f32, shape, Image(32, std::byte{2}));
  return file.finish();
}

TEST_CASE("a file gives what was written") {
  const GgufFile file(small_file());
  CHECK(file.text("text") == "value");
  CHECK(file.integer("integer") == 7);
  CHECK(file.number("number") == 0.5);
  CHECK(file.flag("flag") == true);
  CHECK(file.texts("texts") == std::vector<std::string_view>{"one", "", "three"});
  CHECK(file.numbers("numbers") == std::vector<float>{1, 2});
  CHECK(file.integers("integers") == std::vector<std::int32_t>{-1, 5});
  CHECK(!file.text("none"));
  CHECK(file.entries().size() == 8);
  REQUIRE(file.tensors().size() == 2);
  CHECK(file.find("first") == &file.tensors()[0]);
  CHECK(file.find("third") == nullptr);
  CHECK(file.tensors()[1].data[0] == std::byte{2});
  CHECK(file.tensors()[1].shape == std::array<std::size_t, 4>{4, 2, 1, 1});
  for (const GgufTensor& t : file.tensors()) CHECK(t.data.size() == 32);
}

TEST_CASE("a value of another type is refused where it is read") {
  const GgufFile file(small_file());
  CHECK_THROWS_AS(static_cast<void>(file.text("integer")), ModelFileError);
  CHECK_THROWS_AS(static_cast<void>(file.integer("number")), ModelFileError);
  CHECK_THROWS_AS(static_cast<void>(file.integer("texts")), ModelFileError);
  CHECK_THROWS_WITH_AS(static_cast<void>(file.integer("wide")), doctest::Contains("63 bits"), ModelFileError);
  CHECK_THROWS_AS(static_cast<void>(file.number("integer")), ModelFileError);
  CHECK_THROWS_AS(static_cast<void>(file.flag("text")), ModelFileError);
  CHECK_THROWS_AS(static_cast<void>(file.texts("numbers")), ModelFileError);
  CHECK_THROWS_AS(static_cast<void>(file.texts("text")), ModelFileError);
  CHECK_THROWS_AS(static_cast<void>(file.numbers("integers")), ModelFileError);
  CHECK_THROWS_AS(static_cast<void>(file.numbers("number")), ModelFileError);
  CHECK_THROWS_AS(static_cast<void>(file.integers("numbers")), ModelFileError);
  CHECK_THROWS_AS(static_cast<void>(file.integers("flag")), ModelFileError);
}

TEST_CASE("every truncation is refused") {
  const Image image = small_file();
  // The padding behind the last tensor may go.
  for (std::size_t n = 0; n < image.size(); ++n) {
    INFO(n);
    CHECK_THROWS_AS(GgufFile(Image(image.begin(), image.begin() + static_cast<std::ptrdiff_t>(n))), ModelFileError);
  }
}

TEST_CASE("damaged headers are refused by name") {
  constexpr auto huge = std::numeric_limits<std::uint64_t>::max();
  const Image good = small_file();
  check_refused(with(good, 0, 'X'), "letters GGUF");
  check_refused(with(good, 4, std::uint32_t{1}), "format version 1;");
  check_refused(with(good, 4, std::uint32_t{0x03000000}), "format version 50331648");  // big-endian
  check_refused(with(good, 8, huge), "18446744073709551615 tensors");
  check_refused(with(good, 16, huge), "18446744073709551615 keys");
  check_refused(with(good, 16, std::uint64_t{65536}), "bytes");
  check_refused(with(good, 24, huge), "needs 18446744073709551615 bytes");      // the first key's length
  check_refused(with(good, 24 + 8 + 4, std::uint32_t{13}), "unknown type 13");  // its type
  check_refused(with(good, 24 + 8 + 4 + 4, huge - 7), "a string value");        // its value's length
  check_refused(with(good, find_in(good, "flag") + 8, std::uint8_t{2}), "not 0 or 1");

  const std::size_t numbers = find_in(good, "numbers") + 7;  // type, element type, count
  check_refused(with(good, numbers + 4, std::uint32_t{9}), "array of type 9");
  check_refused(with(good, numbers + 4, std::uint32_t{13}), "array of type 13");
  check_refused(with(good, numbers + 8, huge), "18446744073709551615 values");
  check_refused(with(good, numbers + 8, huge / 4 + 2), "values");  // 4 times as much overflows to 4
  const std::size_t texts = find_in(good, "texts") + 5;
  check_refused(with(good, texts + 8, huge), "an array of strings");

  const std::size_t second = find_in(good, "second") + 6;  // dimensions, shape, type, offset
  check_refused(with(good, second, std::uint32_t{0}), "0 dimensions");
  check_refused(with(good, second, std::uint32_t{5}), "5 dimensions");
  check_refused(with(good, second, std::numeric_limits<std::uint32_t>::max()), "4294967295 dimensions");
  check_refused(with(good, second + 4, std::uint64_t{0}), "dimension of 0");
  check_refused(with(good, second + 4, std::uint64_t{1} << 62), "larger than the file");
  check_refused(with(with(good, second + 4, std::uint64_t{1} << 32), second + 12, std::uint64_t{1} << 32),
                "larger than the file");
  check_refused(with(good, second + 20, std::uint32_t{14}), "weight type 14");
  check_refused(with(good, second + 20, static_cast<std::uint32_t>(WeightType::q8_0)), "packs 32 at a time");
  check_refused(with(good, second + 24, std::uint64_t{0}), "'first' and 'second' overlap");
  check_refused(with(good, second + 24, std::uint64_t{36}), "not a multiple of the alignment 32");
  check_refused(with(good, second + 24, std::uint64_t{64}), "ends at byte");
  check_refused(with(good, second + 24, huge - 31), "offset 18446744073709551584");
}

TEST_CASE("duplicate names and bad alignments are refused") {
  const std::size_t shape[] = {8};
  GgufWriter keys;
  keys.integer("same", 1);
  keys.number("same", 1);
  check_refused(keys.finish(), "the key 'same' twice");
  GgufWriter tensors;
  tensors.tensor("same", WeightType::f32, shape, Image(32));
  tensors.tensor("same", WeightType::f32, shape, Image(32));
  check_refused(tensors.finish(), "the tensor 'same' twice");
  for (const std::uint32_t alignment : {0U, 1U, 4U, 24U, 131072U, 0x80000000U}) {
    GgufWriter file;
    file.integer("general.alignment", alignment);
    check_refused(file.finish(), "general.alignment");
  }
  GgufWriter file;
  file.text("general.alignment", "32");
  check_refused(file.finish(), "general.alignment");
  GgufWriter good;
  good.integer("general.alignment", 64);
  CHECK_NOTHROW(GgufFile(good.finish()));
}

TEST_CASE("messages stay short and printable") {
  GgufWriter file;
  const std::string name = "\x1b[31m" + std::string(100000, 'n');
  file.integer(name, 1);
  file.integer(name, 1);
  try {
    GgufFile{file.finish()};
    FAIL("accepted");
  } catch (const ModelFileError& error) {
    const std::string message = error.what();
    CHECK(message.size() < 300);
    CHECK(message.find('\x1b') == std::string::npos);
  }
}

TEST_CASE("paths") {
  CHECK_THROWS_WITH_AS(GgufFile(std::filesystem::path("no/such/file.gguf")), doctest::Contains("cannot be opened"),
                       ModelFileError);
  CHECK_THROWS_WITH_AS(GgufFile(std::filesystem::path("tests")), doctest::Contains("not a regular file"),
                       ModelFileError);
  const lookahead::testing::TempFolder folder;
  const std::filesystem::path path = folder.file("model.gguf", "");
  CHECK_THROWS_WITH_AS(GgufFile{path}, doctest::Contains("is empty"), ModelFileError);
  folder.file("model.gguf", small_file());
  const GgufFile copy = [&] {
    const GgufFile file{path};
    return file;
  }();
  std::filesystem::remove(path);
  CHECK(copy.name() == path.string());
  CHECK(copy.find("second")->data[31] == std::byte{2});
}

// A model whose keys, tokenizer and tensors are composed one by one, with one thing changed.
template <class Change>
void check_model_refused(const char* part, Change change) {
  TinyLlama model{.layers = 1, .context = 16};
  GgufWriter file;
  change(model, file);
  CHECK_THROWS_WITH_AS(LlamaEngine(GgufFile(file.finish())), doctest::Contains(part), ModelFileError);
}

TEST_CASE("models that are incomplete or of another kind are refused by name") {
  using namespace lookahead::testing;
  check_model_refused("architecture '(none)'", [](TinyLlama&, GgufWriter&) {});
  check_model_refused("architecture 'mamba'",
                      [](TinyLlama&, GgufWriter& file) { file.text("general.architecture", "mamba"); });
  check_model_refused("lacks the key 'llama.embedding_length'",
                      [](TinyLlama&, GgufWriter& file) { file.text("general.architecture", "llama"); });
  check_model_refused("lacks the tensor 'token_embd.weight'",
                      [](TinyLlama& m, GgufWriter& file) { add_keys(file, m); });
  const auto changed = [](auto edit) {
    return [edit](TinyLlama& m, GgufWriter& file) {
      TinyLlama said = m;
      edit(said);
      add_keys(file, said);
      add_tensors(file, m);
    };
  };
  check_model_refused("lacks the tensor 'blk.1.attn_norm.weight'", changed([](TinyLlama& m) { m.layers = 2; }));
  check_model_refused("block_count' is 0", changed([](TinyLlama& m) { m.layers = 0; }));
  check_model_refused("block_count' is 4294967295", changed([](TinyLlama& m) { m.layers = -1; }));
  check_model_refused("embedding_length' is 65537", changed([](TinyLlama& m) { m.width = 65537; }));
  check_model_refused("shape [64, 300, 1, 1], but the keys say [128, 300",
                      changed([](TinyLlama& m) { m.width = 128; }));
  check_model_refused("'blk.0.ffn_gate.weight' has shape", changed([](TinyLlama& m) { m.feed = 97; }));
  check_model_refused("'blk.0.attn_q.weight' has shape", changed([](TinyLlama& m) { m.heads = 2; }));
  check_model_refused("'blk.0.attn_k.weight' has shape", changed([](TinyLlama& m) { m.key_heads = 4; }));
  check_model_refused("4 heads for 3 key heads", changed([](TinyLlama& m) { m.key_heads = 3; }));
  check_model_refused("head_count_kv' is 5; 1 to 4", changed([](TinyLlama& m) { m.key_heads = 5; }));
  check_model_refused("heads of 15", changed([](TinyLlama& m) { m.head = 15; }));
  check_model_refused("context_length' is 0", changed([](TinyLlama& m) { m.context = 0; }));
  check_model_refused("'extra.weight', which is no part", [](TinyLlama& m, GgufWriter& file) {
    add_keys(file, m);
    add_tensors(file, m);
    const std::size_t shape[] = {8};
    file.tensor("extra.weight", WeightType::f32, shape, Image(32));
  });
  check_model_refused("rope.scaling.type", [](TinyLlama& m, GgufWriter& file) {
    add_keys(file, m);
    file.text("llama.rope.scaling.type", "yarn");
    add_tensors(file, m);
  });
  check_model_refused("must be F32", [](TinyLlama& m, GgufWriter& file) {
    add_keys(file, m);
    m.type = WeightType::f16;
    file.tensor("output_norm.weight", WeightType::f16, std::vector<std::size_t>{64}, Image(128));
    GgufWriter rest;
    add_tensors(rest, m);
    const GgufFile others(rest.finish());
    for (const GgufTensor& t : others.tensors())
      if (t.name != "output_norm.weight")
        file.tensor(t.name, t.type, std::span(t.shape), Image(t.data.begin(), t.data.end()));
  });
}

// Damages a valid model in some bytes of its header, or cuts, doubles or removes a stretch; reading it, its tokenizer
// and the model must end well or in a ModelFileError, without large allocations.
void fuzz(const Image& model, std::size_t header, int rounds, unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random()) % n; };
  int usable = 0;
  for (int i = 0; i < rounds; ++i) {
    Image image = model;
    for (std::size_t n = 1 + below(4); n > 0; --n) {
      const std::size_t at = below(header);
      switch (below(8)) {
        case 0:
          image.resize(std::max<std::size_t>(at, 1));
          break;
        case 1:
          image.erase(image.begin() + static_cast<std::ptrdiff_t>(std::min(at, image.size() - 1)));
          break;
        case 2:
          image.insert(image.begin() + static_cast<std::ptrdiff_t>(std::min(at, image.size())), std::byte{0});
          break;
        case 3:
          for (std::size_t b = at; b < std::min(at + 8, image.size()); ++b) image[b] = std::byte{0xFF};
          break;
        case 4:
          if (at + 8 <= image.size()) image = with(std::move(image), at, std::uint64_t{1} << below(64));
          break;
        default:
          if (at < image.size()) image[at] = static_cast<std::byte>(random());
      }
    }
    largest_allocation = 0;
    try {
      const GgufFile file(std::move(image));
      const auto attempt = [](auto make) {
        try {
          make();
        } catch (const ModelFileError&) {
        }
      };
      attempt([&] { static_cast<void>(Tokenizer(file).encode("abcd \xff abc", true)); });
      attempt([&] {
        LlamaEngine engine(file, {.max_rows = 4, .threads = 1});
        const std::int32_t token = 0;
        engine.prefill(std::span(&token, 1));
      });
      ++usable;
    } catch (const ModelFileError&) {
    }
    REQUIRE(largest_allocation < (1U << 24U));
  }
  CHECK(usable > 0);  // some damage is not visible
  CHECK(usable < rounds);
}

TEST_CASE("random damage never does more than throw") {
  const Image model = tiny_llama(
      {.vocabulary = 280, .width = 8, .layers = 1, .heads = 2, .key_heads = 1, .head = 4, .feed = 8, .context = 16});
  const GgufFile file(model);
  const std::size_t header = static_cast<std::size_t>(model.size() - 1);
  std::size_t bytes = 0;
  for (const GgufTensor& t : file.tensors()) bytes += t.data.size();
  fuzz(model, header - bytes, 10000, 1);
  // Away from the tokenizer, so that sizes and shapes are hit often.
  for (const bool packed : {false, true}) {
    GgufWriter bare;
    const int width = packed ? 32 : 8;
    const TinyLlama shape{.vocabulary = 3,
                          .width = width,
                          .layers = 1,
                          .heads = 2,
                          .key_heads = 1,
                          .head = width / 2,
                          .feed = width,
                          .context = 16,
                          .type = packed ? WeightType::q4_1 : WeightType::f32};
    lookahead::testing::add_keys(bare, shape);
    lookahead::testing::add_tensors(bare, shape);
    const Image small = bare.finish();
    fuzz(small, small.size(), packed ? 5000 : 20000, 2);
  }
}

TEST_CASE("numbers survive each weight type as well as it allows") {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(64), back(64);
  for (float& x : numbers) x = normal(random);
  numbers[5] = 0;
  float most = 0;
  for (const float x : numbers) most = std::max(most, std::abs(x));
  const std::pair<WeightType, float> errors[] = {{WeightType::f32, 0.0F},        {WeightType::f16, most / 2048},
                                                 {WeightType::bf16, most / 256}, {WeightType::q8_0, most / 250},
                                                 {WeightType::q4_0, most / 7},   {WeightType::q4_1, most * 2 / 29}};
  for (const auto& [type, error] : errors) {
    std::vector<std::byte> row(row_bytes(type, 64)), again(row.size());
    encode_row(type, numbers.data(), 64, row.data());
    decode_row(type, row.data(), 64, back.data());
    for (std::size_t i = 0; i < 64; ++i) CHECK(std::abs(back[i] - numbers[i]) <= error);
    if (type == WeightType::q4_1 || type == WeightType::q4_0) continue;
    encode_row(type, back.data(), 64, again.data());
    CHECK(row == again);
  }
}

TEST_CASE("half precision rounds to the nearest, to even on ties") {
  const auto half = [](float x) {
    std::byte row[2];
    encode_row(WeightType::f16, &x, 1, row);
    decode_row(WeightType::f16, row, 1, &x);
    return x;
  };
  CHECK(half(1.0F + 0x1p-11F) == 1.0F);
  CHECK(half(1.0F + 0x3p-11F) == 1.0F + 0x1p-9F);
  CHECK(half(1.0F + 0x1.01p-11F) == 1.0F + 0x1p-10F);
  CHECK(half(65519.0F) == 65504.0F);
  CHECK(half(65520.0F) == std::numeric_limits<float>::infinity());
  CHECK(half(0x1p-24F) == 0x1p-24F);
  CHECK(half(0x1p-25F) == 0.0F);
  CHECK(half(0x1.01p-25F) == 0x1p-24F);
  CHECK(half(-0x3p-25F) == -0x1p-23F);
  CHECK(half(0x1.ff8p-15F) == 0x1.ff8p-15F);  // the largest subnormal
  // All finite halves are kept.
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    if ((pattern & 0x7C00U) == 0x7C00U) continue;
    std::byte row[2], again[2];
    std::memcpy(row, &pattern, 2);
    float x;
    decode_row(WeightType::f16, row, 1, &x);
    encode_row(WeightType::f16, &x, 1, again);
    REQUIRE(std::memcmp(row, again, 2) == 0);
  }
}

}  // namespace
