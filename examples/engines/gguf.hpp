#pragma once
/// @file gguf.hpp
/// A reader of GGUF model files. Files are not trusted: whatever they hold, reading ends in a valid `GgufFile` or in
/// one `ModelFileError`, and never allocates more than a small multiple of the file's own size.

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "engines/weights.hpp"

namespace lookahead::engines {

/// The model file cannot be used: it is damaged, incomplete, or holds something that this engine does not support. The
/// message names the file, the value, the limit and the remedy.
struct ModelFileError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A tensor of a file, in row-major order: `shape[0]` is the length of a row, the number of rows is the product of the
/// rest. Unused dimensions are 1.
struct GgufTensor {
  std::string_view name;
  WeightType type;
  std::array<std::size_t, 4> shape;
  std::span<const std::byte> data;

  [[nodiscard]] std::size_t rows() const { return shape[1] * shape[2] * shape[3]; }
};

/// A key of a file with its value as stored: `bytes` is the value behind its type tag.
struct GgufEntry {
  std::string_view key;
  std::uint32_t type;
  std::span<const std::byte> bytes;
};

/// An open model file, checked as a whole. A handle: copies share the memory-mapped file, and every view that it gives
/// stays valid as long as one copy lives.
class GgufFile {
 public:
  /// Maps and checks the file. Throws `ModelFileError`. O(size of the header).
  explicit GgufFile(const std::filesystem::path& path);

  /// Checks a file image in memory. Throws `ModelFileError`.
  explicit GgufFile(std::vector<std::byte> image);

  /// The path, for messages; "(memory)" for an image.
  [[nodiscard]] const std::string& name() const;

  /// All keys, in the order of the file.
  [[nodiscard]] std::span<const GgufEntry> entries() const;

  /// All tensors, in the order of the file. None overlap, and all lie within the file.
  [[nodiscard]] std::span<const GgufTensor> tensors() const;

  /// The tensor of that name, or nullptr.
  [[nodiscard]] const GgufTensor* find(std::string_view tensor) const;

  /// The value of a key; nothing where the file lacks it. Throws `ModelFileError` where it has another type or, for
  /// `integer`, does not fit.
  [[nodiscard]] std::optional<std::string_view> text(std::string_view key) const;
  [[nodiscard]] std::optional<std::int64_t> integer(std::string_view key) const;
  [[nodiscard]] std::optional<double> number(std::string_view key) const;
  [[nodiscard]] std::optional<bool> flag(std::string_view key) const;
  [[nodiscard]] std::optional<std::vector<std::string_view>> texts(std::string_view key) const;
  [[nodiscard]] std::optional<std::vector<float>> numbers(std::string_view key) const;
  [[nodiscard]] std::optional<std::vector<std::int32_t>> integers(std::string_view key) const;

  /// Throws a `ModelFileError` whose message starts with the name of the file.
  [[noreturn]] void fail(const std::string& what) const;

 private:
  struct Content;
  std::shared_ptr<const Content> content_;
};

}  // namespace lookahead::engines
