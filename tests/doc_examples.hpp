#pragma once
/// @file doc_examples.hpp
/// Pages whose examples are parts of a test: each runs, and is shown as it stands there.

#include <algorithm>
#include <cstddef>
#include <doctest/doctest.h>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

namespace doc_examples {

inline std::vector<std::string> lines(const std::string& path) {
  std::ifstream in(path);
  REQUIRE_MESSAGE(in.good(), path);
  std::vector<std::string> all;
  for (std::string line; std::getline(in, line);) all.push_back(line);
  return all;
}

/// Checks that the page shows the examples of the tests, each once, and no other. An example lies between "// [name]"
/// and "// []" in a test, and in a block of C++ on the page.
inline void check_page(const std::string& page, const std::vector<std::string>& tests) {
  std::vector<std::string> examples, shown;
  bool inside = false;
  std::size_t indent = 0;
  for (const std::string& test : tests) {
    for (const std::string& line : lines(test)) {
      const std::size_t first = line.find_first_not_of(' ');
      const std::string_view rest = first == std::string::npos ? "" : std::string_view(line).substr(first);
      if (rest == "// []") {
        inside = false;
      } else if (rest.starts_with("// [") && rest.ends_with("]")) {
        inside = true;
        indent = first;
        examples.emplace_back();
      } else if (inside) {
        examples.back() += line.empty() ? "\n" : line.substr(indent) + "\n";
      }
    }
  }
  for (const std::string& line : lines(page)) {
    if (line == "```cpp") {
      inside = true;
      shown.emplace_back();
    } else if (line.starts_with("```")) {
      inside = false;
    } else if (inside) {
      shown.back() += line + "\n";
    }
  }
  CHECK(shown.size() == examples.size());
  CHECK(examples.size() > 3);
  for (const std::string& example : examples) {
    CAPTURE(example);
    CHECK(std::ranges::count(shown, example) == 1);
  }
}

}  // namespace doc_examples
