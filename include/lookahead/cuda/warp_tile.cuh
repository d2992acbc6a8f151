#pragma once
/// @file warp_tile.cuh
/// The tile of a device: the 32 threads of a warp.

#include <cstdint>
#include <type_traits>

#include "lookahead/group.hpp"

#if !defined(__CUDACC__)
#error "lookahead/cuda/warp_tile.cuh has device code: compile it with nvcc."
#endif

namespace lookahead::cuda {

/// A warp, all of whose threads call together, in blocks whose size is a multiple of 32 and that have one dimension.
struct WarpTile {
  [[nodiscard]] __device__ int rank() const { return tile_rank; }
  [[nodiscard]] __device__ int count() const { return tile_count; }
  [[nodiscard]] __device__ bool leads() const { return lane() == 0; }

  [[nodiscard]] __device__ std::uint32_t match(const std::uint32_t* words, std::uint32_t mask,
                                               std::uint32_t value) const {
    return __ballot_sync(all, (words[lane()] & mask) == value);
  }
  [[nodiscard]] __device__ std::uint32_t greater(const std::uint32_t* words, std::uint32_t value) const {
    return __ballot_sync(all, words[lane()] > value);
  }
  [[nodiscard]] __device__ int oldest(const std::uint32_t* words) const {
    const std::uint32_t word = words[lane()];
    return __ffs(static_cast<int>(__ballot_sync(all, word == __reduce_min_sync(all, word)))) - 1;
  }
  template <class F>
  [[nodiscard]] __device__ std::invoke_result_t<F, int> sum(int n, const F& f) const {
    std::invoke_result_t<F, int> sum{};
    for (int i = lane(); i < n; i += 32) sum += f(i);
    for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(all, sum, half);
    return sum;
  }
  [[nodiscard]] __device__ std::uint32_t load(const std::uint32_t* word) const { return *word; }

  /// The first barrier lets every thread read what it had to read before, the second one shows what was written.
  __device__ void store(std::uint32_t* word, std::uint32_t value) const {
    __syncwarp();
    if (leads()) *word = value;
    __syncwarp();
  }

  __device__ void prefetch(const std::uint32_t* words) const {
    if (leads()) asm volatile("prefetch.L2 [%0];" ::"l"(words));
  }

  int tile_rank = 0, tile_count = 1;

 private:
  static constexpr std::uint32_t all = ~0U;
  [[nodiscard]] static __device__ int lane() { return static_cast<int>(threadIdx.x & 31U); }
};

static_assert(Tile<WarpTile>);

}  // namespace lookahead::cuda
