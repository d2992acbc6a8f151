/// @file yield.cpp
/// What a forward pass yields: the published algorithm, its shape here, and growth, on real prompts.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "prompts.hpp"
#include "reference.hpp"

#include "lookahead/lookahead.hpp"
#include "lookahead/testing/plain_decode.hpp"

namespace {

using lookahead::Shape;
using lookahead::bench::Tokens;
using lookahead::engines::LlamaEngine;

constexpr int window = 15, ngram = 5, guesses = 15;

struct Setting {
  std::string name;
  Shape shape;
  std::size_t rows;
};

std::vector<Setting> settings() {
  std::vector<Setting> all{{"published shape (15, 5, 15)", Shape::published(), 256}};
  for (const std::size_t rows : {4U, 8U, 16U, 32U, 64U, 100U})
    all.push_back({"growth, " + std::to_string(rows) + " rows", Shape{}, rows});
  all.push_back({"growth, 64 rows, window (7, 4)", Shape{.w = 7, .n = 4}, 64});
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  std::string model = "examples/models/cpython-6m-q8_0.gguf", folder = "bench/prompts/code";
  std::size_t tokens = 256;
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  CLI::App app(
      "Tokens and rows per step, each text compared with plain decoding's; run it in the root of the repository. Exit "
      "status: 0 where all texts are identical, 2 where one is not, 1 on errors.");
  app.option_defaults()->always_capture_default();
  app.add_option("--model", model, "model file (GGUF)");
  app.add_option("--prompts", folder, "folder of prompts, *.txt");
  app.add_option("--tokens", tokens, "tokens for each prompt; end tokens are ignored")->check(CLI::PositiveNumber);
  app.add_option("--threads", threads, "prompts that are decoded at once")->check(CLI::Range(1, 256));
  CLI11_PARSE(app, argc, argv);

  try {
    lookahead::bench::PromptSet set(model, folder, threads);
    std::vector<Tokens> plain(set.size());
    set.for_each([&](LlamaEngine& engine, const Tokens& prompt, std::size_t i) {
      plain[i] = lookahead::testing::plain_decode(engine, std::span(prompt), tokens);
    });

    std::printf("%s, %zu prompts, %zu tokens each\n\n", model.c_str(), set.size(), tokens);
    std::printf("%-34s %11s %9s %14s %9s\n", "", "tokens/step", "rows/step", "expected/step", "identical");
    bool all_identical = true;
    const auto print = [&](const std::string& name, const lookahead::Generation& sum, bool has_expected,
                           bool identical) {
      const auto per_step = [&](auto n) { return static_cast<double>(n) / static_cast<double>(sum.steps); };
      char expected[16] = "-";
      if (has_expected) std::snprintf(expected, sizeof expected, "%.2f", per_step(sum.expected));
      std::printf("%-34s %11.2f %9.1f %14s %9s\n", name.c_str(), per_step(sum.tokens), per_step(sum.rows), expected,
                  identical ? "yes" : "NO");
      std::fflush(stdout);
      all_identical = all_identical && identical;
    };
    std::mutex mutex;

    lookahead::Generation shared;
    std::size_t unshared = 0;
    bool identical = true;
    set.for_each([&](LlamaEngine& engine, const Tokens& prompt, std::size_t i) {
      const auto run =
          lookahead::bench::reference_decode(engine, std::span(prompt), tokens, {window, ngram, guesses}, 0);
      const std::lock_guard lock(mutex);
      shared.tokens += run.tokens.size();
      shared.steps += run.steps;
      shared.rows += run.shared_rows;
      unshared += run.rows;
      identical = identical && run.tokens == plain[i];
    });
    print("published algorithm (15, 5, 15)", shared, false, identical);
    shared.rows = unshared;
    print("  the same, no row shared", shared, false, identical);

    for (const Setting& setting : settings()) {
      lookahead::Generation sum;
      identical = true;
      set.for_each([&](LlamaEngine& engine, const Tokens& prompt, std::size_t i) {
        lookahead::Decoder<LlamaEngine, window, ngram, guesses> decoder(
            engine, {.shape = setting.shape, .rows = setting.rows, .cost = lookahead::StepCost::none()});
        Tokens text;
        const auto run = decoder.generate(std::span(prompt), tokens, [&](std::span<const std::int32_t> block) {
          text.insert(text.end(), block.begin(), block.end());
        });
        const std::lock_guard lock(mutex);
        sum.tokens += run.tokens;
        sum.steps += run.steps;
        sum.rows += run.rows;
        sum.expected += run.expected;
        identical = identical && text == plain[i];
      });
      print(setting.name, sum, setting.shape.mode == lookahead::ShapeMode::growth, identical);
    }
    return all_identical ? 0 : 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
