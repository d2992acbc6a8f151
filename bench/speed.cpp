/// @file speed.cpp
/// Tokens per second beside plain decoding, on sets of prompts, each text compared with plain decoding's.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "chat_template.hpp"
#include "engines/gguf.hpp"
#include "engines/kernels.hpp"
#include "engines/llama_engine.hpp"
#include "engines/tokenizer.hpp"
#include "model_options.hpp"

#include "lookahead/errors.hpp"
#include "lookahead/lookahead.hpp"
#include "lookahead/testing/plain_decode.hpp"

namespace {

using lookahead::engines::GgufFile;
using lookahead::engines::LlamaEngine;
using lookahead::engines::Tokenizer;
using Token = LlamaEngine::token_type;
using Tokens = std::vector<Token>;
using Decoder = lookahead::Decoder<LlamaEngine>;

struct Options {
  lookahead::examples::ModelOptions model;
  std::vector<std::string> sets = {"code"};
  std::vector<std::size_t> rows = {2, 4, 8, 16, 32};
  std::size_t tokens = 128, rounds = 3, every = 1;
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  bool quick = false;
};

std::string content(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  if (text.empty())
    throw lookahead::InvalidArgument(path.string() + " cannot be read; run this in the root of the repository");
  return text;
}

/// The prompts of a set, as tokens.
std::vector<Tokens> load(const std::string& set, const GgufFile& file, const Tokenizer& tokenizer) {
  const std::filesystem::path folder = "bench/prompts";
  std::vector<Tokens> prompts;
  if (set == "code" || set == "docs") {
    std::set<std::filesystem::path> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder / set)) names.insert(entry.path());
    for (const auto& name : names) prompts.push_back(tokenizer.encode(content(name), tokenizer.add_bos()));
    return prompts;
  }
  const bool chat = set == "chat";
  std::istringstream lines(content(folder / (chat ? "specbench.jsonl" : "humaneval.jsonl")));
  for (std::string line; std::getline(lines, line);) {
    std::string text = nlohmann::json::parse(line).at("prompt");
    if (chat) {
      prompts.push_back(lookahead::examples::chat_tokens(file, tokenizer, text));
    } else {
      text.erase(text.find_last_not_of(" \t\r\n") + 1);  // models go on badly behind white space
      prompts.push_back(tokenizer.encode(text, tokenizer.add_bos()));
    }
  }
  return prompts;
}

struct Setting {
  std::size_t rows = 1;
  lookahead::Generation sum;               ///< over the prompts, of one round
  std::vector<std::vector<double>> times;  ///< [round][prompt], seconds
  std::size_t identical = 0;               ///< texts, of all rounds

  [[nodiscard]] double seconds(std::size_t round) const {
    return std::accumulate(times[round].begin(), times[round].end(), 0.0);
  }

  /// The sum over the prompts of the median over the rounds.
  [[nodiscard]] double seconds() const {
    double sum_of_medians = 0;
    for (std::size_t p = 0; p < times[0].size(); ++p) {
      std::vector<double> of_prompt;
      for (const std::vector<double>& round : times) of_prompt.push_back(round[p]);
      std::ranges::sort(of_prompt);
      const std::size_t half = of_prompt.size() / 2;
      sum_of_medians += of_prompt.size() % 2 == 1 ? of_prompt[half] : (of_prompt[half - 1] + of_prompt[half]) / 2;
    }
    return sum_of_medians;
  }
};

/// Decodes every prompt once a round with every setting, in turn.
std::vector<Setting> measure(LlamaEngine& engine, const std::vector<Tokens>& prompts, const Tokens& end_tokens,
                             const Options& o) {
  std::vector<Setting> settings(1);
  for (const std::size_t rows : o.rows) settings.emplace_back().rows = rows;
  for (Setting& s : settings) s.times.assign(o.rounds, std::vector<double>(prompts.size()));
  for (std::size_t p = 0; p < prompts.size(); ++p) {
    const Tokens expected = lookahead::testing::plain_decode<LlamaEngine>(engine, prompts[p], o.tokens, end_tokens);
    for (std::size_t round = 0; round < o.rounds; ++round)
      for (std::size_t i = 0; i < settings.size(); ++i) {
        Setting& s = settings[(i + round + p) % settings.size()];
        Decoder::Options options{.rows = s.rows, .end_tokens = end_tokens};
        if (s.rows == 1) options.shape.g = 0;
        Decoder decoder(engine, options);
        decoder.start(prompts[p]);
        Tokens text;
        const auto start = std::chrono::steady_clock::now();
        const lookahead::Generation run = decoder.run(
            o.tokens, [&](std::span<const Token> block) { text.insert(text.end(), block.begin(), block.end()); });
        s.times[round][p] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        s.identical += text == expected;
        if (round > 0) continue;
        s.sum.tokens += run.tokens;
        s.sum.steps += run.steps;
        s.sum.rows += run.rows;
      }
  }
  return settings;
}

/// Returns whether all texts were identical.
bool print(const std::string& set, std::size_t prompts, const std::vector<Setting>& settings, std::size_t rounds) {
  const Setting& plain = settings.front();
  const Setting* best = &plain;
  bool all_identical = true;
  std::printf("\n%s: %zu prompts, %zu tokens\n%-16s %11s %10s %9s %9s %15s %10s\n", set.c_str(), prompts,
              plain.sum.tokens, "", "tokens/step", "rows/step", "tokens/s", "speed-up", "of the rounds", "identical");
  for (const Setting& s : settings) {
    const auto per_step = [&](std::size_t n) { return static_cast<double>(n) / static_cast<double>(s.sum.steps); };
    double least = 1e9, most = 0;
    for (std::size_t r = 0; r < rounds; ++r) {
      const double gain = plain.seconds(r) / s.seconds(r);
      least = std::min(least, gain);
      most = std::max(most, gain);
    }
    char name[32], range[32];
    std::snprintf(name, sizeof name, s.rows == 1 ? "plain" : "at most %zu rows", s.rows);
    std::snprintf(range, sizeof range, "%.2f to %.2f", least, most);
    std::printf("%-16s %11.2f %10.2f %9.1f %9.2f %15s %6zu/%zu\n", name, per_step(s.sum.tokens), per_step(s.sum.rows),
                static_cast<double>(s.sum.tokens) / s.seconds(), plain.seconds() / s.seconds(), range, s.identical,
                prompts * rounds);
    if (s.seconds() < best->seconds()) best = &s;
    all_identical = all_identical && s.identical == prompts * rounds;
  }
  std::printf("best: at most %zu rows, %.2f times plain decoding\n", best->rows, plain.seconds() / best->seconds());
  std::fflush(stdout);
  return all_identical;
}

std::string processor() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("model name")) return line.substr(line.find(": ") + 2);
  return "unknown processor";
}

double load() {
  double average = 0;
  return getloadavg(&average, 1) == 1 ? average : -1;
}

int run(const Options& o) {
  const GgufFile file = o.model.open();
  const Tokenizer tokenizer(file);
  LlamaEngine engine(file, {.threads = o.threads, .weights = o.model.weights});
  const Tokens end_tokens(tokenizer.eos().begin(), tokenizer.eos().end());

  std::printf(
      "%s\n%s, %d threads, %s kernels, load average %.1f\n"
      "at most %zu tokens a prompt, greedy, growth without a window; rounds: %zu, interleaved, the median counts for "
      "each "
      "prompt; decoding alone is timed\n",
      o.model.describe(file).c_str(), processor().c_str(), o.threads,
      lookahead::engines::available_kernels().front()->name, load(), o.tokens, o.rounds);
  bool all_identical = true;
  for (const std::string& set : o.sets) {
    std::vector<Tokens> prompts = load(set, file, tokenizer);
    std::size_t kept = 0;
    for (std::size_t p = 0; p < prompts.size(); p += o.every) std::swap(prompts[kept++], prompts[p]);
    prompts.resize(kept);
    all_identical = print(set, prompts.size(), measure(engine, prompts, end_tokens, o), o.rounds) && all_identical;
  }
  std::printf("\nload average %.1f at the end\n", load());
  return all_identical ? 0 : 2;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  o.model.path = "examples/models/cpython-6m-q8_0.gguf";
  CLI::App app(
      "Tokens per second at fixed row limits beside plain decoding, each text compared with plain decoding's; run it "
      "in the root of the repository. Exit status: 0 where all texts are identical, 2 where one is not, 1 on errors.");
  app.option_defaults()->always_capture_default();
  o.model.declare(app);
  app.add_option("--sets", o.sets, "code, docs, humaneval (raw), chat (Spec-Bench in the model's chat template)")
      ->delimiter(',')
      ->check(CLI::IsMember({"code", "docs", "humaneval", "chat"}));
  app.add_option("--rows", o.rows, "Row limits")->delimiter(',')->check(CLI::Range(2, Decoder::Step::max_rows));
  app.add_option("--tokens", o.tokens, "Most tokens for each prompt")->check(CLI::PositiveNumber);
  app.add_option("--rounds", o.rounds, "Interleaved rounds")->check(CLI::PositiveNumber);
  app.add_option("--every", o.every, "Take every so many-th prompt of a set")->check(CLI::PositiveNumber);
  app.add_option("--threads", o.threads, "Threads")->check(CLI::Range(1, 256));
  app.add_flag("--quick", o.quick, "One round of every sixth prompt");
  CLI11_PARSE(app, argc, argv);
  if (o.quick) {
    o.rounds = 1;
    o.every = 6;
  }
  try {
    return run(o);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "speed: %s\n", error.what());
    return 1;
  }
}
