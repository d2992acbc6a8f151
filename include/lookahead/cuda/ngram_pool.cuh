#pragma once
/// @file ngram_pool.cuh
/// Pools of n-grams in a device's memory.

#include <cstddef>
#include <cstdint>
#include <cub/device/device_radix_sort.cuh>
#include <cuda_runtime.h>
#include <string>
#include <thrust/system/cuda/execution_policy.h>
#include <thrust/system_error.h>
#include <type_traits>
#include <vector>

#include "lookahead/cuda/bulk_pool.cuh"
#include "lookahead/cuda/error.cuh"
#include "lookahead/cuda/warp_tile.cuh"
#include "lookahead/errors.hpp"
#include "lookahead/ngram_pool.hpp"

namespace lookahead::cuda {

namespace detail {

inline constexpr int pool_threads = 256, pool_warps = pool_threads / 32;

template <class F>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(pool_threads)
    run_on_threads(std::uint64_t n, F f) {
  const std::uint64_t i = std::uint64_t{blockIdx.x} * pool_threads + threadIdx.x;
  if (i < n) f(i);
}

template <class F>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(pool_threads)
    run_on_warps(std::uint64_t n, F f) {
  const std::uint64_t i = std::uint64_t{blockIdx.x} * pool_warps + threadIdx.x / 32;
  if (i < n) f(WarpTile{}, i);
}

/// Runs bulk work on a device: see lookahead::detail::HostRunner. A tile is a warp, of eight in a block.
template <class Policy>
struct StreamRunner {
  using policy_type = Policy;

  template <class F>
  void each(std::uint64_t n, const F& f) const {
    run_on_threads<<<static_cast<unsigned>((n + pool_threads - 1) / pool_threads), pool_threads, 0, stream>>>(n, f);
    check(cudaGetLastError(), "run_on_threads");
  }
  template <class F>
  void each_tile(std::uint64_t n, const F& f) const {
    run_on_warps<<<static_cast<unsigned>((n + pool_warps - 1) / pool_warps), pool_threads, 0, stream>>>(n, f);
    check(cudaGetLastError(), "run_on_warps");
  }
  template <class T>
  [[nodiscard]] T read(const T* from) const {
    T value{};
    check(cudaMemcpyAsync(&value, from, sizeof value, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    return value;
  }
  void write(std::uint32_t* to, std::uint32_t value) const {
    check(cudaMemcpyAsync(to, &value, sizeof value, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  }
  /// A radix sort of the few bits that tell sets apart. It is stable.
  std::uint64_t* sort(std::uint64_t* order, std::uint64_t* other, std::size_t n, int bits) const {
    const auto sorted = [&](void* memory, std::size_t& bytes) {
      check(cub::DeviceRadixSort::SortKeys(memory, bytes, order, other, n, 32, 32 + bits, stream),
            "cub::DeviceRadixSort");
    };
    std::size_t bytes = 0;
    sorted(nullptr, bytes);
    const lookahead::detail::Temporary<char, Policy> memory(policy, bytes);
    sorted(memory.data(), bytes);
    return other;
  }

  const Policy& policy;
  cudaStream_t stream;
};

/// Temporary memory in the order of a stream; what is returned is given out again, and freed at the end.
class StreamAllocator {
 public:
  using value_type = char;

  explicit StreamAllocator(cudaStream_t stream) : stream_(stream) {}
  StreamAllocator(const StreamAllocator&) = delete;
  StreamAllocator& operator=(const StreamAllocator&) = delete;
  ~StreamAllocator() {
    for (const Block& block : blocks_) cudaFreeAsync(block.memory, stream_);
  }

  char* allocate(std::ptrdiff_t count) {
    const auto bytes = static_cast<std::size_t>(count);
    for (Block& block : blocks_)
      if (!block.taken && block.bytes == bytes) {
        block.taken = true;
        return block.memory;
      }
    blocks_.reserve(blocks_.size() + 1);
    void* memory = nullptr;
    check(cudaMallocAsync(&memory, bytes, stream_), "cudaMallocAsync");
    blocks_.push_back({static_cast<char*>(memory), bytes, true});
    return static_cast<char*>(memory);
  }
  void deallocate(char* memory, std::size_t) {
    for (Block& block : blocks_) block.taken = block.taken && block.memory != memory;
  }

 private:
  struct Block {
    char* memory;
    std::size_t bytes;
    bool taken;
  };
  cudaStream_t stream_;
  std::vector<Block> blocks_;
};

/// Calls f(runner) and waits for the stream.
template <class F>
void on_stream(cudaStream_t stream, const F& f) {
  StreamAllocator allocator(stream);
  const auto policy = thrust::cuda::par_nosync(allocator).on(stream);
  try {
    f(StreamRunner<std::remove_const_t<decltype(policy)>>{policy, stream});
  } catch (const thrust::system_error& error) {
    throw Error("an algorithm of Thrust", static_cast<cudaError_t>(error.code().value()));
  }
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

}  // namespace detail

/// `lookahead::bulk_fill` in a device's memory. Waits for `stream`. Throws Error where a call fails: then the pool may
/// be filled in part.
template <class Token>
void bulk_fill(cudaStream_t stream, const NGramPoolRef& pool, const Texts<Token>& texts) {
  detail::on_stream(stream, [&](const auto& runner) {
    lookahead::detail::bulk_fill(runner, pool, texts, lookahead::detail::fill_piece);
  });
}

/// `lookahead::bulk_insert` in a device's memory; otherwise as `bulk_fill`.
inline void bulk_insert(cudaStream_t stream, const NGramPoolRef& pool, const PoolInsert* what, std::size_t count) {
  detail::on_stream(stream, [&](const auto& runner) { lookahead::detail::bulk_insert(runner, pool, what, count); });
}

/// `lookahead::bulk_look_up` in a device's memory. Enqueues one kernel and returns; may be captured.
inline void bulk_look_up_async(const NGramPoolRef& pool, const std::uint64_t* contexts, std::size_t count, int width,
                               PoolEntry* entries, std::int32_t* counts, cudaStream_t stream) {
  constexpr int no_policy = 0;  // no algorithm of Thrust's runs
  lookahead::detail::bulk_look_up(detail::StreamRunner<int>{no_policy, stream}, pool, contexts, count, width, entries,
                                  counts);
}

/// `lookahead::bulk_export` in a device's memory. Waits for `stream`.
inline std::size_t bulk_export(cudaStream_t stream, const NGramPoolRef& pool, PoolEntry* entries) {
  std::size_t count = 0;
  detail::on_stream(stream, [&](const auto& runner) { count = lookahead::detail::bulk_export(runner, pool, entries); });
  return count;
}

/// The memory of one or many pools on a device, one for each request or one for a corpus: what `ref` gives is what
/// kernels and the functions above work on. Layout: the sets of pool 0, of pool 1, ..., then the clocks.
template <class Token = std::int32_t>
class NGramPool {
  static_assert(sizeof(Token) <= 4, "Tokens have at most 32 bits: map yours to an integer of that size.");

 public:
  using token_type = Token;

  /// `count` empty pools of at least `slots` entries each, 12 bytes each; rounded up to a multiple of 32. The only
  /// allocation, in the order of `stream`. Throws InvalidArgument where there would be no pool, or `slots` is 0 or
  /// above lookahead::NGramPool's max_slots; Error where there is no memory.
  NGramPool(std::size_t count, std::size_t slots, cudaStream_t stream)
      : count_(count), sets_((slots + PoolSet::slots - 1) / PoolSet::slots), stream_(stream) {
    if (count == 0 || count > std::size_t{1} << 20 || slots == 0 || slots > PoolMemory::max_slots)
      throw InvalidArgument(std::to_string(count) + " pools of " + std::to_string(slots) + " slots: pass 1 to " +
                            std::to_string(std::size_t{1} << 20) + " pools and 1 to " +
                            std::to_string(PoolMemory::max_slots) + " slots");
    const std::size_t bytes = count_ * (sets_ * sizeof(PoolSet) + sizeof(PoolClock));
    check(cudaMallocAsync(&memory_, bytes, stream), "cudaMallocAsync");
    const cudaError_t emptied = cudaMemsetAsync(memory_, 0, bytes, stream);
    if (emptied != cudaSuccess) cudaFreeAsync(memory_, stream);
    check(emptied, "cudaMemsetAsync");
  }
  NGramPool(const NGramPool&) = delete;
  NGramPool& operator=(const NGramPool&) = delete;
  /// Enqueues on the constructor's stream, which must still exist. Work on other streams must have ended.
  ~NGramPool() { cudaFreeAsync(memory_, stream_); }

  [[nodiscard]] std::size_t count() const { return count_; }
  /// Number of entries that fit, of each pool.
  [[nodiscard]] std::size_t slots() const { return sets_ * PoolSet::slots; }

  /// What kernels work on. Valid while this object lives. Precondition: pool < count().
  [[nodiscard]] NGramPoolRef ref(std::size_t pool = 0) const {
    auto* const sets = static_cast<PoolSet*>(memory_);
    auto* const clocks = reinterpret_cast<PoolClock*>(sets + count_ * sets_);
    return {sets + pool * sets_, static_cast<std::uint32_t>(sets_), clocks + pool};
  }

  /// Forgets everything. Enqueues a copy of 4 bytes. Precondition: pool < count().
  void reset_async(std::size_t pool, cudaStream_t stream) const {
    const NGramPoolRef to = ref(pool);
    check(cudaMemcpyAsync(&to.clock->floor, &to.clock->now, sizeof to.clock->now, cudaMemcpyDeviceToDevice, stream),
          "cudaMemcpyAsync");
  }

  /// Makes a pool hold what one on the host holds (see lookahead::NGramPool::ref), whose memory may be used again when
  /// this returns, unless it is pinned. Throws InvalidArgument for a pool of another size. Precondition: pool <
  /// count().
  void write_async(std::size_t pool, const NGramPoolRef& from, cudaStream_t stream) const {
    if (from.set_count != sets_)
      throw InvalidArgument("a pool of " + std::to_string(std::size_t{from.set_count} * PoolSet::slots) +
                            " slots: pass one of " + std::to_string(slots()) + ", the size on the device");
    const NGramPoolRef to = ref(pool);
    copy_async(to.sets, from.sets, sets_ * sizeof(PoolSet), cudaMemcpyHostToDevice, stream);
    copy_async(to.clock, from.clock, sizeof(PoolClock), cudaMemcpyHostToDevice, stream);
  }

  /// What a pool holds, for a pool on the host or for save_pool. Waits for `stream`. Precondition: pool < count().
  [[nodiscard]] PoolMemory read(std::size_t pool, cudaStream_t stream) const {
    PoolMemory to = PoolMemory::of(slots());
    const NGramPoolRef from = ref(pool);
    copy_async(to.sets.data(), from.sets, sets_ * sizeof(PoolSet), cudaMemcpyDeviceToHost, stream);
    copy_async(&to.clock, from.clock, sizeof(PoolClock), cudaMemcpyDeviceToHost, stream);
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    return to;
  }

 private:
  static void copy_async(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    check(cudaMemcpyAsync(to, from, bytes, kind, stream), "cudaMemcpyAsync");
  }

  std::size_t count_, sets_;
  cudaStream_t stream_;
  void* memory_ = nullptr;
};

}  // namespace lookahead::cuda
