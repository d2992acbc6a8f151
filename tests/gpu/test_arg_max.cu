/// Arg-max and best tokens on a device beside a plain sort, for all types, sizes and counts of rows.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>
#include <doctest/doctest.h>
#include <vector>

#include "../cases.hpp"
#include "../logit_cases.hpp"
#include "on_device.hpp"

#include "lookahead/cuda/arg_max.cuh"

namespace {

namespace gpu = lookahead::cuda;
using lookahead::InvalidArgument;
using Tokens = std::vector<std::int32_t>;

template <class Logit, class Type>
struct Case {
  using logit = Logit;
  using type = Type;
};

}  // namespace

TEST_CASE_TEMPLATE("the best tokens of rows", C, Case<float, logit_cases::Float32>, Case<__half, logit_cases::Float16>,
                   Case<__nv_bfloat16, logit_cases::BFloat16>) {
  using Logit = typename C::logit;
  const Stream stream;
  for (int seed = 0; seed < cases(2000) / 20; ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    const int k = random.one_in(2) ? 1 : 1 + random.below(8), max_rows = 1 + random.below(20);
    const int size = k + random.below(random.one_in(8) ? 40000 : 600);
    logit_cases::Rows<typename C::type> rows(random, max_rows, size, size + (random.one_in(2) ? 0 : random.below(20)));
    const int count = random.below(max_rows + 1);
    const OnDevice<unsigned char> memory(rows.memory);
    const OnDevice<std::int32_t> on_device(Tokens{count});
    const OnDevice<std::int32_t> tokens(Tokens(static_cast<std::size_t>(max_rows * k), -7));
    const OnDevice<std::uint64_t> workspace(gpu::top_k_workspace<Logit>(max_rows, size, k));
    const bool all = random.one_in(4);
    const gpu::LogitRows<Logit> logits{reinterpret_cast<const Logit*>(memory.data()), rows.stride, size, max_rows,
                                       all ? nullptr : on_device.data()};
    if (k == 1)
      gpu::arg_max_async(logits, tokens.data(), workspace.data(), stream);
    else
      gpu::top_k_async(logits, k, tokens.data(), workspace.data(), stream);
    stream.wait();
    const Tokens found = tokens.values();
    for (int row = 0; row < max_rows; ++row) {
      CAPTURE(row);
      const Tokens one(found.begin() + row * k, found.begin() + (row + 1) * k);
      REQUIRE(one == (row < count || all ? rows.best(row, k) : Tokens(static_cast<std::size_t>(k), -7)));
    }
  }
}

TEST_CASE("a captured arg-max reads the number of rows when it is replayed") {
  const Stream stream;
  const OnDevice<float> values(std::vector<float>{0, 1, 2, 5, 4, 3});
  const OnDevice<std::int32_t> count(Tokens{0}), tokens(Tokens{-1, -1});
  const OnDevice<std::uint64_t> workspace(gpu::top_k_workspace<float>(2, 3, 1));
  const gpu::LogitRows<float> logits{values.data(), 3, 3, 2, count.data()};
  const Graph graph(stream, [&] { gpu::arg_max_async(logits, tokens.data(), workspace.data(), stream); });
  CHECK(graph.others() == 0);
  const Tokens expected[] = {{-1, -1}, {2, -1}, {2, 0}, {2, 0}};
  for (std::int32_t n = 0; n < 4; ++n) {  // 3 rows are more than there may be
    gpu::check(cudaMemcpy(count.data(), &n, sizeof n, cudaMemcpyHostToDevice), "cudaMemcpy");
    graph.launch(stream);
    stream.wait();
    CHECK(tokens.values() == expected[n]);
  }
}

TEST_CASE("what cannot be used is refused before a launch") {
  const Stream stream;
  std::int32_t token = 0;
  std::uint64_t word = 0;
  const auto best = [&](int k, int vocabulary, int stride, int rows) {
    gpu::top_k_async(gpu::LogitRows<float>{nullptr, stride, vocabulary, rows, nullptr}, k, &token, &word, stream);
  };
  CHECK_THROWS_WITH_AS(best(0, 9, 9, 1), "the best 0 tokens of each row: pass 1 to 8", InvalidArgument);
  CHECK_THROWS_AS(best(9, 9, 9, 1), InvalidArgument);
  CHECK_THROWS_AS(best(3, 2, 9, 1), InvalidArgument);
  CHECK_THROWS_AS(best(1, 9, 8, 1), InvalidArgument);
  CHECK_THROWS_WITH_AS(best(1, (1 << 30) + 1, (1 << 30) + 1, 1),
                       "the best 1 of 1073741825 logits in rows that are 1073741825 apart: pass k <= vocabulary <= "
                       "min(stride, 1073741824)",
                       InvalidArgument);
  CHECK_THROWS_AS(best(1, 9, 9, -1), InvalidArgument);
  best(1, 9, 9, 0);
}

// Run by run.sh alone. Random bits of bfloat16, rows of 32000; rows that are not there are launched for, too.
TEST_CASE("benchmark" * doctest::skip()) {
  const Stream stream;
  constexpr int vocabulary = 32000, max_rows = 64 * 76;
  constexpr std::size_t logit_count = std::size_t{max_rows} * vocabulary, copied = std::size_t{1} << 30;
  const OnDevice<unsigned char> from(copied), to(copied);
  const double copy = median_seconds(stream, 21, [&] {
    lookahead::cuda::check(cudaMemcpyAsync(to.data(), from.data(), copied, cudaMemcpyDeviceToDevice, stream),
                           "cudaMemcpyAsync");
  });
  const double bandwidth = 2 * static_cast<double>(copied) / copy;  // read and written
  std::printf("%-52s %12.0f GB/s %8s\n", "copying 1 GiB, read and written", bandwidth / 1e9, "aim 0.7");

  Random random(1);
  std::vector<std::uint64_t> bits(logit_count / 4);
  for (std::uint64_t& word : bits) word = random.bits() & 0xBFFFBFFFBFFFBFFFU;  // no NaN
  const OnDevice<std::uint64_t> memory(bits);
  const OnDevice<std::int32_t> tokens(std::size_t{max_rows} * 8);
  const OnDevice<std::uint64_t> workspace(gpu::top_k_workspace<__nv_bfloat16>(max_rows, vocabulary, 8));
  for (const int k : {1, 8})
    for (const int rows : {1, 8, 64, 1024, max_rows}) {
      const OnDevice<std::int32_t> count(Tokens{rows});
      const gpu::LogitRows<__nv_bfloat16> logits{reinterpret_cast<const __nv_bfloat16*>(memory.data()), vocabulary,
                                                 vocabulary, max_rows, count.data()};
      const double time =
          median_seconds(stream, 51, [&] { gpu::top_k_async(logits, k, tokens.data(), workspace.data(), stream); });
      char name[80];
      std::snprintf(name, sizeof name, "best %d of 32000, %d rows of %d", k, rows, max_rows);
      std::printf("%-52s %12.1f us   %8.2f of copying\n", name, time * 1e6,
                  static_cast<double>(rows) * vocabulary * 2 / time / bandwidth);
    }
}
