#pragma once
/// @file gguf_writer.hpp
/// Composes GGUF files in memory.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engines/weights.hpp"

namespace lookahead::engines {

/// Collects keys and tensors, then gives the image of a file. Checks nothing: `GgufFile` does.
class GgufWriter {
 public:
  /// A value in its stored form, behind a type tag of the format.
  void raw(std::string_view key, std::uint32_t type, std::span<const std::byte> value);

  void text(std::string_view key, std::string_view value);
  void integer(std::string_view key, std::uint32_t value);
  void number(std::string_view key, float value);
  void flag(std::string_view key, bool value);
  void texts(std::string_view key, std::span<const std::string> values);
  void numbers(std::string_view key, std::span<const float> values);
  void integers(std::string_view key, std::span<const std::int32_t> values);

  /// A tensor whose rows have `shape[0]` numbers; `data` holds them all.
  void tensor(std::string_view name, WeightType type, std::span<const std::size_t> shape, std::vector<std::byte> data);

  /// The file. Leaves the writer empty.
  [[nodiscard]] std::vector<std::byte> finish();

 private:
  void begin(std::string_view key, std::uint32_t type);

  struct Extent {
    std::size_t offset;
    std::vector<std::byte> data;
  };
  std::uint64_t keys_ = 0;
  std::vector<std::byte> entries_, infos_;
  std::size_t end_ = 0;  ///< of the tensors so far, behind the header
  std::vector<Extent> tensors_;
};

}  // namespace lookahead::engines
