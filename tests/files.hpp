#pragma once
/// @file files.hpp
/// Files of a test's own.

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace lookahead::testing {

/// A new folder under the temporary one, which goes with the object.
class TempFolder {
 public:
  TempFolder() {
    std::string name = std::filesystem::temp_directory_path() / "lookahead-test-XXXXXX";
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no folder " + name + " can be made");
    path = name;
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() { std::filesystem::remove_all(path); }

  /// Writes a file and gives its path.
  std::string file(const std::string& name, std::string_view content) const {
    std::ofstream(path / name, std::ios::binary).write(content.data(), static_cast<std::streamsize>(content.size()));
    return path / name;
  }
  std::string file(const std::string& name, std::span<const std::byte> content) const {
    return file(name, {reinterpret_cast<const char*>(content.data()), content.size()});
  }

  std::filesystem::path path;
};

/// What a file holds. Throws where it cannot be read.
inline std::string content(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error(path.string() + " cannot be read");
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace lookahead::testing
