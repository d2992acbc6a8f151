#pragma once
/// @file prompt_texts.hpp
/// Prompts from files, as texts.

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "lookahead/errors.hpp"

namespace lookahead::bench {

/// The prompts at `path`: a folder of *.txt files in the order of their names, a *.jsonl file of objects with a
/// "prompt", or a text file, which is one prompt. Throws InvalidArgument where there is none, or one cannot be read.
inline std::vector<std::string> load_texts(const std::filesystem::path& path) {
  const auto content = [](const std::filesystem::path& file) {
    std::ifstream in(file, std::ios::binary);
    std::string text{std::istreambuf_iterator<char>(in), {}};
    if (text.empty())
      throw InvalidArgument(file.string() +
                            " cannot be read or is empty: check the path, and run this in the root of the repository");
    return text;
  };
  std::vector<std::string> texts;
  if (std::filesystem::is_directory(path)) {
    std::set<std::filesystem::path> names;
    for (const auto& entry : std::filesystem::directory_iterator(path))
      if (entry.path().extension() == ".txt") names.insert(entry.path());
    for (const auto& name : names) texts.push_back(content(name));
  } else if (path.extension() == ".jsonl") {
    std::istringstream lines(content(path));
    for (std::string line; std::getline(lines, line);) {
      const nlohmann::json object = nlohmann::json::parse(line, nullptr, false);
      if (!object.is_object() || !object.contains("prompt") || !object["prompt"].is_string())
        throw InvalidArgument(path.string() + ", line " + std::to_string(texts.size() + 1) +
                              ": no JSON object with a string \"prompt\"");
      texts.push_back(object["prompt"]);
    }
  } else {
    texts.push_back(content(path));
  }
  if (texts.empty())
    throw InvalidArgument("no *.txt file in '" + path.string() + "': pass --prompts a folder of prompts");
  return texts;
}

/// A raw prompt without the white space at its end, behind which models go on badly.
inline std::string without_space_at_end(std::string text) {
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  return text;
}

/// Where the prompts of a set lie: code, docs, humaneval, or chat (Spec-Bench's first turns).
inline std::filesystem::path set_path(const std::string& set) {
  return std::filesystem::path("bench/prompts") / (set == "chat"        ? "specbench.jsonl"
                                                   : set == "humaneval" ? "humaneval.jsonl"
                                                                        : set);
}

}  // namespace lookahead::bench
