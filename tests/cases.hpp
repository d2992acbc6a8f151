#pragma once
/// @file cases.hpp
/// How many random cases a property test runs.

#include <charconv>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

/// The number in the environment variable LOOKAHEAD_CASES, or `fallback` where it is not set. The test presets set it:
/// fewer cases where a sanitizer makes each one slow. A test whose cases are costly takes a fixed share of it.
/// Throws std::invalid_argument when the variable is not a whole number from 1 on.
inline int cases(int fallback) {
  const char* const set = std::getenv("LOOKAHEAD_CASES");
  if (set == nullptr) return fallback;
  const std::string_view text = set;
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 1)
    throw std::invalid_argument("LOOKAHEAD_CASES is \"" + std::string(text) +
                                "\", but must be a whole number from 1 to 2147483647; unset it for the default.");
  return value;
}
