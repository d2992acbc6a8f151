/// @file speed.cpp
/// Tokens per second beside plain decoding, on sets of prompts, each text compared with plain decoding's.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engines/gguf.hpp"
#include "engines/kernels.hpp"
#include "engines/llama_engine.hpp"
#include "engines/tokenizer.hpp"
#include "lookup.hpp"
#include "model_options.hpp"
#include "prompt_sets.hpp"
#include "times.hpp"

#include "lookahead/errors.hpp"
#include "lookahead/lookahead.hpp"
#include "lookahead/testing/plain_decode.hpp"

namespace {

using lookahead::engines::GgufFile;
using lookahead::engines::LlamaEngine;
using lookahead::engines::Tokenizer;
using Token = LlamaEngine::token_type;
using Tokens = std::vector<Token>;
using lookahead::StepCost;
using SampleVerify = lookahead::SampleVerify<>;
using Decoder = lookahead::Decoder<LlamaEngine>;
using Sampler = lookahead::Decoder<LlamaEngine, 15, 5, 15, SampleVerify>;

struct Options {
  lookahead::examples::ModelOptions model;
  std::vector<std::string> sets = {"code"};
  std::vector<std::size_t> rows = {2, 4, 8, 16, 32}, windows, lookup = {10};
  std::size_t tokens = 128, rounds = 3, every = 1;
  float temperature = 0;
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  bool quick = false;
};

enum class Method { plain, chosen, fixed, lookup };

struct Setting {
  std::string name;
  Method method;
  lookahead::Shape shape{};
  std::size_t rows = 64;
  lookahead::Generation sum{};  ///< over the prompts, of one round
  lookahead::bench::Times times{};
  std::size_t identical = 0;  ///< texts, of all rounds
};

std::vector<Setting> settings(const Options& o) {
  std::vector<Setting> all{{.name = "plain", .method = Method::plain}};
  all.push_back({.name = "as many rows as pay", .method = Method::chosen});
  for (const std::size_t rows : o.rows)
    all.push_back({.name = "at most " + std::to_string(rows) + " rows", .method = Method::fixed, .rows = rows});
  for (const std::size_t rows : o.windows)
    all.push_back({.name = "window (5, 3), " + std::to_string(rows),
                   .method = Method::fixed,
                   .shape = {.w = 5, .n = 3},
                   .rows = rows});
  if (o.temperature == 0)
    for (const std::size_t draft : o.lookup)
      all.push_back({.name = "look-up, draft " + std::to_string(draft), .method = Method::lookup, .rows = draft});
  return all;
}

/// Decodes every prompt once a round with every setting, in turn. What steps cost is learnt once, as in a server.
template <class D, class Policy>
std::vector<Setting> measure(LlamaEngine& engine, const std::vector<Tokens>& prompts, const Tokens& end_tokens,
                             const Policy& policy, const Options& o) {
  std::vector<Setting> all = settings(o);
  std::vector<D> decoders;
  decoders.reserve(all.size());
  for (Setting& s : all) {
    typename D::Options options{.shape = s.shape, .rows = s.rows, .end_tokens = end_tokens};
    if (s.method == Method::plain) options.shape.g = 0;
    if (s.method != Method::chosen) options.cost = StepCost::none();
    decoders.emplace_back(engine, options, policy);
  }
  for (std::size_t p = 0; p < prompts.size(); ++p) {
    Tokens expected;
    for (std::size_t round = 0; round < o.rounds; ++round)
      for (std::size_t k = 0; k < all.size(); ++k) {
        const std::size_t i = round == 0 ? k : (k + round + p) % all.size();  // plain is the first of all
        Setting& s = all[i];
        decoders[i].start(prompts[p]);
        Tokens text = prompts[p];
        const auto start = std::chrono::steady_clock::now();
        const lookahead::Generation run =
            s.method == Method::lookup ? lookahead::bench::lookup_decode(engine, text, o.tokens, s.rows, end_tokens)
                                       : decoders[i].run(o.tokens, [&](std::span<const Token> block) {
                                           text.insert(text.end(), block.begin(), block.end());
                                         });
        s.times.add(p, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        if (round == 0 && i == 0) expected = text;
        s.identical += text == expected;
        if (round > 0) continue;
        s.sum.tokens += run.tokens;
        s.sum.steps += run.steps;
        s.sum.rows += run.rows;
      }
    if (o.temperature == 0) {
      const Tokens greedy = lookahead::testing::plain_decode<LlamaEngine>(engine, prompts[p], o.tokens, end_tokens);
      if (!std::ranges::equal(greedy, std::span(expected).subspan(prompts[p].size()))) all[0].identical = 0;
    }
  }
  return all;
}

/// Returns whether all texts were identical.
bool print(const std::string& set, std::size_t prompts, const std::vector<Setting>& all, std::size_t rounds) {
  const Setting& plain = all.front();
  const Setting* best = nullptr;
  bool all_identical = true;
  std::printf("\n%s: %zu prompts, %zu tokens\n%-20s %11s %10s %9s %9s %13s %10s\n", set.c_str(), prompts,
              plain.sum.tokens, "", "tokens/step", "rows/step", "tokens/s", "speed-up", "95%", "identical");
  for (const Setting& s : all) {
    const auto per_step = [&](std::size_t n) { return static_cast<double>(n) / static_cast<double>(s.sum.steps); };
    const auto [low, high] = lookahead::bench::interval(plain.times, s.times);
    char range[32];
    std::snprintf(range, sizeof range, "%.2f to %.2f", low, high);
    std::printf("%-20s %11.2f %10.2f %9.1f %9.2f %13s %6zu/%zu\n", s.name.c_str(), per_step(s.sum.tokens),
                per_step(s.sum.rows), static_cast<double>(s.sum.tokens) / s.times.seconds(),
                plain.times.seconds() / s.times.seconds(), range, s.identical, prompts * rounds);
    if (s.method == Method::fixed && (best == nullptr || s.times.seconds() < best->times.seconds())) best = &s;
    all_identical = all_identical && s.identical == prompts * rounds;
  }
  if (best != nullptr)
    std::printf("best fixed setting: %s; as many rows as pay: %.2f of its speed\n", best->name.c_str(),
                best->times.seconds() / all[1].times.seconds());
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
      "at most %zu tokens a prompt, temperature %.1f; rounds: %zu, interleaved, the median counts for each prompt; "
      "decoding alone is timed\n",
      o.model.describe(file).c_str(), processor().c_str(), o.threads,
      lookahead::engines::available_kernels().front()->name, load(), o.tokens, static_cast<double>(o.temperature),
      o.rounds);
  bool all_identical = true;
  for (const std::string& set : o.sets) {
    std::vector<Tokens> prompts = lookahead::bench::load_prompts(set, file, tokenizer);
    std::size_t kept = 0;
    for (std::size_t p = 0; p < prompts.size(); p += o.every) std::swap(prompts[kept++], prompts[p]);
    prompts.resize(kept);
    const auto all = o.temperature == 0 ? measure<Decoder>(engine, prompts, end_tokens, lookahead::GreedyVerify{}, o)
                                        : measure<Sampler>(engine, prompts, end_tokens,
                                                           SampleVerify({.temperature = o.temperature}), o);
    all_identical = print(set, prompts.size(), all, o.rounds) && all_identical;
  }
  std::printf("\nload average %.1f at the end\n", load());
  return all_identical ? 0 : 2;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  o.model.path = "examples/models/cpython-6m-q8_0.gguf";
  CLI::App app(
      "Tokens per second with as many rows as pay, at fixed row limits and by prompt look-up, beside plain decoding; "
      "each text is compared with plain decoding's. Run it in the root of the repository. Exit status: 0 where all "
      "texts are identical, 2 where one is not, 1 on errors.");
  app.option_defaults()->always_capture_default();
  o.model.declare(app);
  app.add_option("--sets", o.sets,
                 "code, docs, humaneval (raw), chat (Spec-Bench in the model's chat template), random")
      ->delimiter(',')
      ->check(CLI::IsMember(lookahead::bench::prompt_sets));
  app.add_option("--rows", o.rows, "Row limits")->delimiter(',')->check(CLI::Range(2, Decoder::Step::max_rows));
  app.add_option("--windows", o.windows, "Row limits with a window of 5 columns and n-grams of 3 tokens")
      ->delimiter(',')
      ->check(CLI::Range(2, Decoder::Step::max_rows));
  app.add_option("--lookup", o.lookup, "Draft lengths of prompt look-up")->delimiter(',')->check(CLI::Range(1, 100));
  app.add_option("--temperature", o.temperature, "0 is greedy")->check(CLI::Range(0.0F, 100.0F));
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
