/// @file bulk_pool.cpp
/// Filling a pool from a long text: one by one, and in bulk on Thrust's host back ends. Fails where the pools differ.

#include <thrust/system/cpp/execution_policy.h>
#include <thrust/system/tbb/execution_policy.h>
#if defined(_OPENMP)
#include <thrust/system/omp/execution_policy.h>
#endif

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <random>
#include <span>
#include <vector>

#include "lookahead/cuda/bulk_pool.cuh"
#include "lookahead/ngram_pool.hpp"

namespace {

using namespace lookahead;
using Token = std::int32_t;

/// Few tokens are frequent, many are rare.
std::vector<Token> random_text(std::size_t size) {
  std::mt19937_64 random(1);
  std::vector<Token> tokens(size);
  for (Token& token : tokens) token = static_cast<Token>((random() % (1U << 30U) >> random() % 30) % 32000);
  return tokens;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Filling a pool of n-grams in bulk, beside filling it one by one");
  std::size_t token_count = 1428575, slots = 1 << 22;
  int rounds = 3;
  app.add_option("--tokens", token_count, "Length of the text; each token is filed under 7 contexts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--slots", slots, "Size of the pool")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--rounds", rounds, "The best one counts")->check(CLI::PositiveNumber)->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  const std::vector<Token> tokens = random_text(token_count);
  const std::uint64_t offsets[] = {0, tokens.size()};
  const Texts<Token> texts{tokens.data(), offsets, 1};
  std::size_t grams = 0;
  for (int k = 0; k < context_length_count; ++k)
    grams += tokens.size() - std::min(tokens.size(), static_cast<std::size_t>(context_length(k)));
  std::printf("%zu n-grams, %zu slots, best of %d\n%-12s %10s %14s %20s %8s\n", grams, slots, rounds, "", "seconds",
              "CPU seconds", "million n-grams/s", "equal");

  NGramPool<Token> expected(slots);
  bool all_equal = true;
  const auto measure = [&](const char* name, const auto& fill) {
    double best = 1e9, best_cpu = 1e9;
    bool equal = true;
    for (int i = 0; i < rounds; ++i) {
      NGramPool<Token> pool(slots);
      const std::clock_t cpu = std::clock();  // of all threads: it tells more where the machine has other work
      const auto begin = std::chrono::steady_clock::now();
      fill(pool.ref());
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
      best_cpu = std::min(best_cpu, static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC);
      if (expected.clock().now == 0) expected = pool;
      const NGramPoolRef a = pool.ref(), b = expected.ref();
      equal = equal && std::memcmp(a.sets, b.sets, a.set_count * sizeof(PoolSet)) == 0 && a.clock->now == b.clock->now;
    }
    all_equal = all_equal && equal;
    std::printf("%-12s %10.3f %14.3f %20.1f %8s\n", name, best, best_cpu, static_cast<double>(grams) / best / 1e6,
                equal ? "yes" : "NO");
  };
  measure("one by one", [&](const NGramPoolRef& pool) { add_text_to(pool, std::span<const Token>(tokens)); });
  measure("bulk, CPP", [&](const NGramPoolRef& pool) { bulk_fill(thrust::cpp::par, pool, texts); });
#if defined(_OPENMP)
  measure("bulk, OMP", [&](const NGramPoolRef& pool) { bulk_fill(thrust::omp::par, pool, texts); });
#endif
  measure("bulk, TBB", [&](const NGramPoolRef& pool) { bulk_fill(thrust::tbb::par, pool, texts); });
  return all_equal ? 0 : 1;
}
