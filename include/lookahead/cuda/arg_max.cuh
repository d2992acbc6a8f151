#pragma once
/// @file arg_max.cuh
/// The best tokens of many rows of logits.

#include <cstddef>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <string>

#include "lookahead/cuda/error.cuh"
#include "lookahead/detail/logit_lane.hpp"
#include "lookahead/errors.hpp"

#if !defined(__CUDACC__)
#error "lookahead/cuda/arg_max.cuh has device code: compile it with nvcc."
#endif

namespace lookahead::cuda {

/// Rows of logits in a device's memory. Logit is float, __half or __nv_bfloat16. Where rows begin does not matter, but
/// for speed: `stride` x sizeof(Logit) is best a multiple of 16.
template <class Logit>
struct LogitRows {
  const Logit* data;          ///< the logit of token t in row r is data[r * stride + t]
  std::int64_t stride;        ///< at least `vocabulary`
  std::int32_t vocabulary;    ///< tokens are in [0, vocabulary)
  std::int32_t max_rows;      ///< how many rows there may be
  const std::int32_t* count;  ///< how many there are, in the device's memory; null: max_rows
};

/// Most tokens that `top_k_async` gives of a row.
inline constexpr int max_top_k = 8;

namespace detail {

template <class Logit>
struct FormatOf;
template <>
struct FormatOf<float> {
  using type = lookahead::detail::Float32Format;
};
template <>
struct FormatOf<__half> {
  using type = lookahead::detail::Float16Format;
};
template <>
struct FormatOf<__nv_bfloat16> {
  using type = lookahead::detail::BFloat16Format;
};
template <class Logit>
using Lane = lookahead::detail::LogitLane<typename FormatOf<Logit>::type>;
using lookahead::detail::BestKeys;

inline constexpr int top_k_threads = 256, top_k_warps = top_k_threads / 32;

__device__ inline int top_k_rows(const std::int32_t* count, int max_rows) {
  return count == nullptr || *count > max_rows ? max_rows : *count;
}

/// The k-th largest of a warp's values, equal ones counted each.
__device__ inline std::uint32_t kth_largest(std::uint32_t value, int k) {
  const unsigned lane = threadIdx.x % 32;
  for (int i = 1; i < k; ++i) {
    const std::uint32_t most = __reduce_max_sync(~0U, value);
    if (__ffs(static_cast<int>(__ballot_sync(~0U, value == most))) - 1 == static_cast<int>(lane)) value = 0;
  }
  return __reduce_max_sync(~0U, value);
}

/// Takes the largest key of a warp's lists away from its list.
template <int K>
__device__ std::uint64_t pop_largest(BestKeys<K>& best) {
  const auto order = static_cast<std::uint32_t>(best.key[0] >> 32);
  const std::uint32_t most = __reduce_max_sync(~0U, order);
  const std::uint32_t rest = __reduce_max_sync(~0U, order == most ? static_cast<std::uint32_t>(best.key[0]) : 0U);
  const std::uint64_t key = std::uint64_t{most} << 32 | rest;
  if (key == best.key[0]) best.pop();
  return key;
}

/// Writes the k largest keys of each chunk; shape [rows, chunks, k]. A warp takes a chunk. What at least k lanes reach
/// is a bound that few logits reach.
template <class Logit, int K>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(top_k_threads)
    top_k_of_chunks(LogitRows<Logit> logits, int k, std::uint64_t* keys) {
  const int lane_number = static_cast<int>(threadIdx.x % 32);
  const int chunks = Lane<Logit>::chunks(logits.vocabulary);
  const std::int64_t all = std::int64_t{top_k_rows(logits.count, logits.max_rows)} * chunks;
  const std::int64_t warps = std::int64_t{gridDim.x} * top_k_warps;
  for (std::int64_t i = std::int64_t{blockIdx.x} * top_k_warps + threadIdx.x / 32; i < all; i += warps) {
    Lane<Logit> lane;
    lane.load(logits.data + i / chunks * logits.stride, logits.vocabulary, static_cast<int>(i % chunks), lane_number);
    BestKeys<K> best;
    best.clear();
    lane.offer(kth_largest(lane.largest(), k), best);
    for (int j = 0; j < k; ++j) {
      const std::uint64_t key = pop_largest(best);
      if (lane_number == 0) keys[i * k + j] = key;
    }
  }
}

/// Merges the chunks of each row; a warp takes a row.
template <int K, class Token>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(top_k_threads)
    top_k_of_rows(const std::uint64_t* keys, int chunks, const std::int32_t* count, int max_rows, int k,
                  Token* tokens) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t row = std::int64_t{blockIdx.x} * top_k_warps + threadIdx.x / 32;
  if (row >= top_k_rows(count, max_rows)) return;
  BestKeys<K> best;
  best.clear();
  for (int i = lane; i < chunks * k; i += 32) best.offer(keys[row * chunks * k + i]);
  for (int j = 0; j < k; ++j) {
    const std::uint64_t key = pop_largest(best);
    if (lane == 0) tokens[row * k + j] = static_cast<Token>(lookahead::detail::key_token(key));
  }
}

template <int K, class Logit, class Token>
void top_k_async(const LogitRows<Logit>& logits, int k, Token* tokens, std::uint64_t* workspace, cudaStream_t stream) {
  const int chunks = Lane<Logit>::chunks(logits.vocabulary);
  int device = 0, processors = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  // Blocks that go on to the next chunk: a batch may have far fewer rows than it may have, and a block without work
  // takes time, too.
  const std::int64_t needed = (std::int64_t{logits.max_rows} * chunks + top_k_warps - 1) / top_k_warps;
  const std::int64_t most = std::int64_t{processors} * 8;
  top_k_of_chunks<Logit, K>
      <<<static_cast<unsigned>(needed < most ? needed : most), top_k_threads, 0, stream>>>(logits, k, workspace);
  check(cudaGetLastError(), "top_k_of_chunks");
  top_k_of_rows<K>
      <<<static_cast<unsigned>((logits.max_rows + top_k_warps - 1) / top_k_warps), top_k_threads, 0, stream>>>(
          workspace, chunks, logits.count, logits.max_rows, k, tokens);
  check(cudaGetLastError(), "top_k_of_rows");
}

}  // namespace detail

/// How many words of workspace `top_k_async` needs for such rows; k = 1 for `arg_max_async`.
template <class Logit>
[[nodiscard]] std::size_t top_k_workspace(int max_rows, int vocabulary, int k) {
  return static_cast<std::size_t>(max_rows) * static_cast<std::size_t>(detail::Lane<Logit>::chunks(vocabulary)) *
         static_cast<std::size_t>(k);
}

/// The k best tokens of each row, best first, the lower token first on ties; both zeros are equal, and a NaN comes
/// behind all numbers, as the others do by token: a row of NaNs alone gives 0, 1, ... Shape of tokens: [max_rows, k];
/// rows behind the count are left as they are. `workspace` has top_k_workspace() words. Deterministic: the result is
/// exact and depends on nothing else.
///
/// Enqueues two kernels and returns; allocates nothing, and may be captured. Throws InvalidArgument unless
/// 1 <= k <= 8, k <= vocabulary <= stride, vocabulary <= 2^30 and 0 <= max_rows; Error where a launch fails.
template <class Logit, class Token>
void top_k_async(const LogitRows<Logit>& logits, int k, Token* tokens, std::uint64_t* workspace, cudaStream_t stream) {
  if (k < 1 || k > max_top_k)
    throw InvalidArgument("the best " + std::to_string(k) + " tokens of each row: pass 1 to " +
                          std::to_string(max_top_k));
  if (logits.vocabulary < k || logits.stride < logits.vocabulary ||
      logits.vocabulary > detail::Lane<Logit>::max_vocabulary)
    throw InvalidArgument("the best " + std::to_string(k) + " of " + std::to_string(logits.vocabulary) +
                          " logits in rows that are " + std::to_string(logits.stride) +
                          " apart: pass k <= vocabulary <= min(stride, " +
                          std::to_string(detail::Lane<Logit>::max_vocabulary) + ")");
  if (logits.max_rows < 0) throw InvalidArgument(std::to_string(logits.max_rows) + " rows of logits: pass 0 or more");
  if (logits.max_rows == 0) return;
  if (k == 1)
    detail::top_k_async<1>(logits, k, tokens, workspace, stream);
  else
    detail::top_k_async<max_top_k>(logits, k, tokens, workspace, stream);
}

/// The arg-max of each row: `top_k_async` with k = 1.
template <class Logit, class Token>
void arg_max_async(const LogitRows<Logit>& logits, Token* tokens, std::uint64_t* workspace, cudaStream_t stream) {
  top_k_async(logits, 1, tokens, workspace, stream);
}

}  // namespace lookahead::cuda
