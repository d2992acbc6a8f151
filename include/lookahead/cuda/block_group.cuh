#pragma once
/// @file block_group.cuh
/// The threads of a device block as a group.

#if !defined(__CUDACC__)
#error "lookahead/cuda/block_group.cuh has device code: compile it with nvcc."
#endif

#include <cstdint>
#include <cub/block/block_merge_sort.cuh>
#include <cub/block/block_scan.cuh>

#include "lookahead/cuda/warp_tile.cuh"
#include "lookahead/group.hpp"

namespace lookahead::cuda {

/// All threads of a block of one dimension with `Threads` threads, a power of 2 and a multiple of 32. The caller gives
/// the shared memory that collective calls need: `__shared__ BlockGroup<256>::Storage storage;`.
template <int Threads>
class BlockGroup {
  static_assert(Threads % 32 == 0 && (Threads & (Threads - 1)) == 0, "Choose 32, 64, 128, 256, 512 or 1024 threads.");
  using Scan = cub::BlockScan<int, Threads>;
  template <int Items>
  using Sort = cub::BlockMergeSort<std::uint64_t, Threads, Items>;

 public:
  union Storage {
    typename Scan::TempStorage scan;
    typename Sort<1>::TempStorage few;
    typename Sort<4>::TempStorage many;
  };

  explicit __device__ BlockGroup(Storage& storage) : storage_(storage) {}

  [[nodiscard]] __device__ int rank() const { return static_cast<int>(threadIdx.x); }
  [[nodiscard]] __device__ int size() const { return Threads; }
  __device__ void sync() const { __syncthreads(); }
  [[nodiscard]] __device__ WarpTile tile() const { return {rank() / 32, Threads / 32}; }

  __device__ int exclusive_sum(int* a, int n) const {
    int total = 0;
    for (int begin = 0; begin < n; begin += Threads) {
      sync();
      const int i = begin + rank();
      int value = i < n ? a[i] : 0, sum;
      Scan(storage_.scan).ExclusiveSum(value, value, sum);
      if (i < n) a[i] = total + value;
      total += sum;
    }
    sync();
    return total;
  }

  /// Up to four keys a thread are sorted in registers and shared memory, more of them where they lie.
  __device__ void sort(std::uint64_t* a, int n) const {
    if (n <= Threads) {
      sort_by(Sort<1>(storage_.few), a, n);
    } else if (n <= 4 * Threads) {
      sort_by(Sort<4>(storage_.many), a, n);
    } else {
      lookahead::detail::sort_in_place(*this, a, n);
    }
  }

 private:
  struct Less {
    __device__ bool operator()(std::uint64_t x, std::uint64_t y) const { return x < y; }
  };

  template <int Items>
  __device__ void sort_by(Sort<Items> sorter, std::uint64_t* a, int n) const {
    std::uint64_t key[Items];
    sync();
    for (int k = 0; k < Items; ++k) {
      const int i = rank() * Items + k;
      key[k] = i < n ? a[i] : ~std::uint64_t{0};
    }
    sorter.Sort(key, Less{}, n, ~std::uint64_t{0});
    for (int k = 0; k < Items; ++k) {
      const int i = rank() * Items + k;
      if (i < n) a[i] = key[k];
    }
    sync();
  }

  Storage& storage_;
};

static_assert(Group<BlockGroup<256>>);

}  // namespace lookahead::cuda
