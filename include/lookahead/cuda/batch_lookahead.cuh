#pragma once
/// @file batch_lookahead.cuh
/// Lookahead decoding of many sequences on a device: plan and resolve run there, and no step waits for the host.

#if !defined(__CUDACC__)
#error "lookahead/cuda/batch_lookahead.cuh has device code: compile it with nvcc."
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <cuda_runtime_api.h>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lookahead/batch_options.hpp"
#include "lookahead/cuda/block_group.cuh"
#include "lookahead/cuda/error.cuh"
#include "lookahead/detail/batch.hpp"
#include "lookahead/errors.hpp"
#include "lookahead/packed_batch.hpp"
#include "lookahead/step_results.hpp"

namespace lookahead::cuda {

/// One block a sequence; each is a line around a phase of detail/batch.hpp.
namespace kernels {

inline constexpr int threads = 256;
using Block = BlockGroup<threads>;

template <int W, int N, int G, class Token>
using Batch = lookahead::detail::Batch<W, N, G, Token>;
template <int W, int N, int G, class Token>
using Scratch = lookahead::detail::StepScratch<W, N, G, Token>;

/// Where the working memory of a phase lies, of which it uses the first `bytes`: in shared memory where every device
/// from compute capability 8.0 on has room for it, else in the memory of the batch.
inline constexpr std::size_t most_shared = 99 * 1024;  // of a block, what the driver takes included
template <class S>
inline constexpr bool fits = sizeof(S) + sizeof(Block::Storage) + 1024 <= most_shared;

template <bool Shared, class S>
__device__ S& scratch_of(S* memory) {
  extern __shared__ __align__(16) unsigned char lookahead_shared_memory[];
  if constexpr (Shared) {
    return *reinterpret_cast<S*>(lookahead_shared_memory);
  } else {
    return memory[blockIdx.x];
  }
}

template <int W, int N, int G, class Token>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(threads, 1)
    attach(Batch<W, N, G, Token> batch, int sequence, const Token* prompt, int count, SequenceOptions<Token> options,
           std::uint32_t generation, Scratch<W, N, G, Token>* memory) {
  __shared__ Block::Storage storage;
  using S = Scratch<W, N, G, Token>;
  lookahead::detail::attach(Block(storage), batch, sequence, prompt, count, options, generation,
                            scratch_of<fits<typename S::Apply>>(memory));
}

template <int W, int N, int G, class Token>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(threads, 1)
    fork(Batch<W, N, G, Token> batch, int from, int to, std::uint64_t stream, std::uint32_t generation) {
  __shared__ Block::Storage storage;
  lookahead::detail::fork(Block(storage), batch, from, to, stream, generation);
}

template <int W, int N, int G, class Token>
__attribute__((visibility("hidden"))) __global__ void detach(Batch<W, N, G, Token> batch, int sequence) {
  lookahead::detail::detach(batch, sequence);
}

template <int W, int N, int G, class Token>
__attribute__((visibility("hidden"))) __global__ void set_limits(Batch<W, N, G, Token> batch, int sequence,
                                                                 Limits limits) {
  lookahead::detail::set_limits(batch, sequence, limits);
}

template <int W, int N, int G, class Token>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(threads, 1)
    plan(Batch<W, N, G, Token> batch, int bucket, Scratch<W, N, G, Token>* memory) {
  __shared__ Block::Storage storage;
  using S = Scratch<W, N, G, Token>;
  lookahead::detail::plan(Block(storage), batch, static_cast<int>(blockIdx.x), bucket,
                          scratch_of<fits<typename S::Plan>>(memory));
}

template <int W, int N, int G, class Token>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(threads, 1)
    pack(Batch<W, N, G, Token> batch, int bucket) {
  __shared__ Block::Storage storage;
  __shared__ lookahead::detail::PackScratch scratch;
  lookahead::detail::pack(Block(storage), batch, static_cast<int>(blockIdx.x), bucket, scratch);
}

template <int W, int N, int G, class Token, class Logit>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(threads, 1)
    sample(Batch<W, N, G, Token> batch, const Logit* logits, std::size_t row_stride, int vocabulary, Token* tokens) {
  __shared__ Block::Storage storage;
  __shared__ lookahead::detail::DrawScratch scratch;
  lookahead::detail::sample(Block(storage), batch, static_cast<int>(blockIdx.x), logits + blockIdx.x * row_stride,
                            vocabulary, tokens, scratch);
}

template <int W, int N, int G, class Token>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(threads, 1)
    resolve(Batch<W, N, G, Token> batch, lookahead::detail::Choices<Token> choices, Scratch<W, N, G, Token>* memory) {
  __shared__ Block::Storage storage;
  using S = Scratch<W, N, G, Token>;
  lookahead::detail::resolve(Block(storage), batch, static_cast<int>(blockIdx.x), choices,
                             scratch_of<fits<typename S::Apply>>(memory));
}

}  // namespace kernels

/// Up to `BatchOptions::sequences` requests, decoded together on one device. A step is
/// `plan_async` -> the engine evaluates `packed()` -> `resolve_async` -> the engine keeps the rows of `kept()`,
/// all on one stream or on streams that wait for each other. Each sequence has a window, a pool and estimates of its
/// own; the text of every sequence is plain decoding's.
///
/// **What runs when a call returns:** functions that end in `_async` only put work on the stream; they neither wait nor
/// allocate, and what they are given in device memory must stay until the stream has passed. All lengths are read from
/// device memory, so the calls between two changes of the batch may be captured in a CUDA graph and replayed. The other
/// functions touch no stream.
///
/// Sequences are numbered from 0; who has which number is the caller's choice (the engine's cache most likely has the
/// same numbers). They come, fork and go between steps; one that comes within a step takes part in the next one. A
/// sequence that ended (an end token, no token left, no room) has no rows any more, whether it is detached or not.
///
/// Memory on the device, for each sequence: the state (about 26 KB at (15, 5, 15)), 12 bytes a slot of its pool, and
/// the packed arrays. Calls are not thread-safe. The device that is current at construction must be so at every call.
template <int W = 15, int N = 5, int G = 15, class Token = std::int32_t>
class BatchLookahead {
  static_assert(sizeof(Token) <= 4, "Tokens have at most 32 bits: map yours to an integer of that size.");

 public:
  using token_type = Token;
  using View = lookahead::detail::Batch<W, N, G, Token>;
  using Result = typename View::Ring::Result;

  /// The most rows of a tree, and tokens of a step.
  static constexpr int max_rows = View::State::max_rows, max_block = View::State::max_block;

  /// Allocates everything. Waits for the device. Throws InvalidArgument for an option out of its range, or where a
  /// block of this device has less shared memory than the phases need; Error where a call of CUDA fails.
  explicit BatchLookahead(const BatchOptions& options) {
    std::size_t bytes = 0;
    (void)lookahead::detail::batch_in<W, N, G, Token>(nullptr, nullptr, options, bytes);
    prepare(kernels::plan<W, N, G, Token>, plan_bytes, "plan");
    prepare(kernels::attach<W, N, G, Token>, apply_bytes, "attach");
    prepare(kernels::resolve<W, N, G, Token>, apply_bytes, "resolve");
    memory_ = device_memory(bytes);
    check(cudaMemsetAsync(memory_.get(), 0, bytes, cudaStreamPerThread), "cudaMemsetAsync");
    if (plan_bytes == 0 || apply_bytes == 0)
      scratch_ = device_memory(static_cast<std::size_t>(options.sequences) * sizeof(Scratch));

    const auto results = static_cast<std::size_t>(options.sequences) * static_cast<std::size_t>(options.result_steps);
    void* pinned = nullptr;
    check(cudaHostAlloc(&pinned, results * sizeof(Result), cudaHostAllocMapped | cudaHostAllocPortable),
          "cudaHostAlloc");
    results_.reset(static_cast<Result*>(pinned));
    std::memset(pinned, 0, results * sizeof(Result));
    void* on_device = nullptr;
    check(cudaHostGetDevicePointer(&on_device, pinned, 0), "cudaHostGetDevicePointer");
    view_ = lookahead::detail::batch_in<W, N, G, Token>(memory_.get(), static_cast<Result*>(on_device), options, bytes);
    rows_ahead_.assign(static_cast<std::size_t>(options.sequences), 0);
    bucket_ = view_.rows;
    check(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
  }

  /// Begins sequence `sequence`, whoever had the number before: files the prompt of `count` tokens in its pool, which
  /// is emptied first. All prompt tokens but the last must be in the engine's cache before the engine evaluates the
  /// first tree; the last is the root. `prompt` is in memory that the device reads. Returns the reader of its results.
  /// Throws InvalidArgument for a number or an option out of its range, and for a prompt of no or more than 2^30
  /// tokens. O(count), by one block.
  ResultCursor attach_async(int sequence, const Token* prompt, int count, const SequenceOptions<Token>& options,
                            cudaStream_t stream) {
    require_sequence(sequence);
    lookahead::detail::check(options);
    if (prompt == nullptr || count < 1 || count > 1 << 30)
      throw InvalidArgument("a prompt of " + std::to_string(prompt == nullptr ? 0 : count) +
                            " tokens: pass 1 to 1073741824, in memory that the device reads");
    kernels::attach<<<1, kernels::threads, apply_bytes, stream>>>(view_, sequence, prompt, count, options,
                                                                  ++generation_, scratch());
    launched("the launch of attach");
    rows_ahead_[static_cast<std::size_t>(sequence)] = std::min(view_.rows, std::max(options.limits.rows, 0));
    return {sequence, generation_, 0};
  }

  /// Ends a sequence: it has no rows from the next step on, and takes no part in the rest of this one.
  /// Throws InvalidArgument for a number out of range.
  void detach_async(int sequence, cudaStream_t stream) {
    require_sequence(sequence);
    kernels::detach<<<1, 1, 0, stream>>>(view_, sequence);
    launched("the launch of detach");
    rows_ahead_[static_cast<std::size_t>(sequence)] = 0;
  }

  /// Makes sequence `to`, whoever had the number before, a copy of sequence `from`, its pool included, that draws from
  /// `random_stream`; the engine copies its cache. Returns the reader of its results. Precondition: no step is planned.
  /// Throws InvalidArgument for a number out of range, or two that are the same. O(pool_slots), by one block.
  ResultCursor fork_async(int from, int to, std::uint64_t random_stream, cudaStream_t stream) {
    require_sequence(from);
    require_sequence(to);
    if (from == to)
      throw InvalidArgument("sequence " + std::to_string(from) + " was to be forked to itself: pass another number");
    kernels::fork<<<1, kernels::threads, 0, stream>>>(view_, from, to, random_stream, ++generation_);
    launched("the launch of fork");
    rows_ahead_[static_cast<std::size_t>(to)] = rows_ahead_[static_cast<std::size_t>(from)];
    return {to, generation_, 0};
  }

  /// What the next steps of a sequence must not exceed; `tokens_left` counts from now on.
  /// Throws InvalidArgument for a number out of range.
  void set_limits_async(int sequence, const Limits& limits, cudaStream_t stream) {
    require_sequence(sequence);
    kernels::set_limits<<<1, 1, 0, stream>>>(view_, sequence, limits);
    launched("the launch of set_limits");
    rows_ahead_[static_cast<std::size_t>(sequence)] = std::min(view_.rows, std::max(limits.rows, 0));
  }

  /// The row limit of each sequence, in device memory, shape [sequences]: the host, by a copy on the stream, or a
  /// kernel may write it between two steps. 0 pauses a sequence.
  [[nodiscard]] std::int32_t* row_limits() const { return view_.row_limits; }

  /// Plans the next step of every sequence, and packs the trees: at most `bucket` rows each, and at most its row limit.
  /// A step that was planned and not resolved is dropped. Throws InvalidArgument unless 1 <= bucket <= rows().
  void plan_async(int bucket, cudaStream_t stream) {
    if (bucket < 1 || bucket > view_.rows)
      throw InvalidArgument("a bucket of " + std::to_string(bucket) + " rows: pass 1 to " + std::to_string(view_.rows) +
                            ", or construct the batch with more rows");
    kernels::plan<<<blocks(), kernels::threads, plan_bytes, stream>>>(view_, bucket, scratch());
    launched("the launch of plan");
    kernels::pack<<<blocks(), kernels::threads, 0, stream>>>(view_, bucket);
    launched("the launch of pack");
    bucket_ = bucket;
  }

  /// The planned trees, in device memory; always the same arrays.
  [[nodiscard]] const PackedBatch<Token>& packed() const { return view_.packed; }

  /// Draws the token behind each wanted row, as the options of its sequence say: greedily, or with the random number
  /// that seed, stream and position fix on the host, too. Row k of `logits`, of type float, __half or __nv_bfloat16,
  /// begins row_stride elements behind row k - 1 and has `vocabulary` of them. Writes tokens[0 .. number of wanted
  /// rows), device memory with room for sequences x bucket.
  ///
  /// Temperature alone: processors, top-k, top-p and min-p are the caller's kernels before it. Sums of weights are
  /// taken in double precision in a fixed order, so a device repeats itself; exp may differ between devices by a
  /// rounding, and then a draw near a bound may, too. Throws InvalidArgument unless there are logits and room for
  /// tokens and 1 <= vocabulary <= min(row_stride, 2^30).
  template <class Logit>
  void sample_async(const Logit* logits, std::size_t row_stride, int vocabulary, Token* tokens, cudaStream_t stream) {
    if (logits == nullptr || tokens == nullptr)
      throw InvalidArgument(std::string("no ") + (logits == nullptr ? "logits to draw from" : "room for tokens") +
                            ": pass device memory");
    if (vocabulary < 1 || vocabulary > 1 << 30 || row_stride < static_cast<std::size_t>(vocabulary))
      throw InvalidArgument("a vocabulary of " + std::to_string(vocabulary) + " tokens in rows that are " +
                            std::to_string(row_stride) + " apart: pass 1 <= vocabulary <= min(row_stride, 1073741824)");
    kernels::sample<<<static_cast<unsigned>(view_.count * bucket_), kernels::threads, 0, stream>>>(
        view_, logits, row_stride, vocabulary, tokens);
    launched("the launch of sample");
  }

  /// Takes the step: tokens[k] is what was chosen behind wanted row k, by arg-max, `sample_async` or a kernel of the
  /// caller's. `top`, shape [wanted rows, width], are the best raw tokens of each, best first, for the pool and the
  /// window; without it (null) `tokens` are taken for them, which is right for a greedy choice. Results go to the ring.
  /// Throws InvalidArgument for null tokens, or a width below 1 where there are top tokens.
  void resolve_async(const Token* tokens, const Token* top, int width, cudaStream_t stream) {
    if (tokens == nullptr) throw InvalidArgument("no tokens to resolve: pass the one chosen behind each wanted row");
    if (top != nullptr && width < 1)
      throw InvalidArgument("rows of " + std::to_string(width) + " top tokens: pass at least 1 a row, or null");
    kernels::resolve<<<blocks(), kernels::threads, apply_bytes, stream>>>(
        view_, lookahead::detail::Choices<Token>{tokens, top, width}, scratch());
    launched("the launch of resolve");
  }

  /// Which rows of the resolved step the engine keeps, in device memory; always the same arrays.
  [[nodiscard]] const KeptRows& kept() const { return view_.kept; }

  /// Calls `f(result)` for each step from the cursor on that the device has finished by now, and moves the cursor.
  /// Returns how many there were. Never waits. Throws as `ResultRing::read`.
  template <class F>
  int read(ResultCursor& cursor, F&& f) {
    const typename View::Ring ring{results_.get(), view_.count, view_.ring.steps};
    return ring.read(cursor, [&](const Result& result) {
      rows_ahead_[static_cast<std::size_t>(cursor.sequence)] = result.end == EndReason::none ? result.next_rows : 0;
      f(result);
    });
  }

  /// The bucket for the next step, by the newest results that were read: one step behind, so that nobody waits.
  [[nodiscard]] int next_bucket() const { return bucket(*std::max_element(rows_ahead_.begin(), rows_ahead_.end())); }

  /// The smallest bucket that holds `rows` rows: of 1, 4, 8, 16, 32, 64, the published number of rows, and rows().
  [[nodiscard]] int bucket(int rows) const { return lookahead::detail::bucket_of<W, N, G>(rows, view_.rows); }

  /// Rows of a sequence in a step, at most.
  [[nodiscard]] int rows() const { return view_.rows; }

  /// The state in device memory, for kernels and tests of the caller's own; its layout is no promise.
  [[nodiscard]] const View& view() const { return view_; }

 private:
  using Scratch = kernels::Scratch<W, N, G, Token>;
  template <class S>
  static constexpr std::size_t shared_bytes = kernels::fits<S> ? sizeof(S) : 0;
  static constexpr std::size_t plan_bytes = shared_bytes<typename Scratch::Plan>,
                               apply_bytes = shared_bytes<typename Scratch::Apply>;

  struct FreeDevice {
    void operator()(std::byte* memory) const { (void)cudaFree(memory); }
  };
  struct FreePinned {
    void operator()(Result* memory) const { (void)cudaFreeHost(memory); }
  };
  using DeviceMemory = std::unique_ptr<std::byte[], FreeDevice>;

  static DeviceMemory device_memory(std::size_t bytes) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    return DeviceMemory(static_cast<std::byte*>(memory));
  }

  /// Lets a kernel use so much shared memory, on this device.
  template <class Kernel>
  static void prepare(Kernel kernel, std::size_t dynamic, const char* name) {
    int device = 0, most = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
    const std::size_t need = dynamic + attributes.sharedSizeBytes;
    if (need > static_cast<std::size_t>(most))
      throw InvalidArgument(std::string(name) + " of (" + std::to_string(W) + ", " + std::to_string(N) + ", " +
                            std::to_string(G) + ") needs " + std::to_string(need) +
                            " bytes of shared memory, but a block of this device has " + std::to_string(most) +
                            ": choose smaller W, N and G, or a device of compute capability 8.0 or more");
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(dynamic)),
          "cudaFuncSetAttribute");
  }

  static void launched(const char* what) { check(cudaGetLastError(), what); }

  void require_sequence(int sequence) const {
    if (sequence < 0 || sequence >= view_.count)
      throw InvalidArgument("sequence " + std::to_string(sequence) + " of a batch of " + std::to_string(view_.count) +
                            ": pass 0 to " + std::to_string(view_.count - 1) + ", or construct the batch for more");
  }

  [[nodiscard]] unsigned blocks() const { return static_cast<unsigned>(view_.count); }
  [[nodiscard]] Scratch* scratch() const { return reinterpret_cast<Scratch*>(scratch_.get()); }

  DeviceMemory memory_, scratch_;
  std::unique_ptr<Result[], FreePinned> results_;
  View view_{};
  std::vector<int> rows_ahead_;  ///< of each sequence, 0 where it has none
  int bucket_ = 0;
  std::uint32_t generation_ = 0;
};

}  // namespace lookahead::cuda
