/// @file reference.cpp
/// The published algorithm on a set of prompts, at any shape.

#include "reference.hpp"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <mutex>
#include <string>
#include <thread>

#include "prompts.hpp"

int main(int argc, char** argv) {
  std::string model = "examples/models/cpython-6m-q8_0.gguf", folder = "bench/prompts/code";
  std::size_t tokens = 256;
  lookahead::bench::ReferenceShape shape;
  std::uint32_t seed = 0;
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  CLI::App app("Tokens per step of the published lookahead algorithm; run it in the root of the repository.");
  app.option_defaults()->always_capture_default();
  app.add_option("--model", model, "model file (GGUF)");
  app.add_option("--prompts", folder, "folder of prompts, *.txt");
  app.add_option("--tokens", tokens, "tokens for each prompt; end tokens are ignored");
  app.add_option("--window", shape.w, "columns of the window")->check(CLI::Range(1, 30));
  app.add_option("--ngram", shape.n, "tokens of an n-gram")->check(CLI::Range(2, 8));
  app.add_option("--guesses", shape.g, "guesses a step")->check(CLI::Range(0, 30));
  app.add_option("--seed", seed, "picks the window's first tokens");
  app.add_option("--threads", threads, "prompts that are decoded at once")->check(CLI::Range(1, 256));
  CLI11_PARSE(app, argc, argv);
  try {
    lookahead::bench::PromptSet set(model, folder, threads);
    std::mutex mutex;
    std::size_t made = 0, steps = 0, rows = 0, shared_rows = 0;
    set.for_each([&](auto& engine, const lookahead::bench::Tokens& prompt, std::size_t) {
      const auto run = lookahead::bench::reference_decode(engine, std::span(prompt), tokens, shape, seed);
      const std::lock_guard lock(mutex);
      made += run.tokens.size();
      steps += run.steps;
      rows += run.rows;
      shared_rows += run.shared_rows;
    });
    const auto per_step = [&](std::size_t n) { return static_cast<double>(n) / static_cast<double>(steps); };
    std::printf("(%d, %d, %d): %.2f tokens per step, %.1f rows, %.1f where equal rows are shared; %zu prompts\n",
                shape.w, shape.n, shape.g, per_step(made), per_step(rows), per_step(shared_rows), set.size());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
