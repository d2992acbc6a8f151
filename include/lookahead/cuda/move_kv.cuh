#pragma once
/// @file move_kv.cuh
/// Accepted rows move forward in a cache of keys and values.

#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>
#include <span>
#include <string>

#include "lookahead/cuda/error.cuh"
#include "lookahead/errors.hpp"
#include "lookahead/kv_plane.hpp"

#if !defined(__CUDACC__)
#error "lookahead/cuda/move_kv.cuh has device code: compile it with nvcc."
#endif

namespace lookahead::cuda {

namespace detail {

inline constexpr int move_threads = 256;

/// Shape of the grid: [sequences, planes, share]. A thread takes the same bytes of all rows.
template <class Moves>  // a template, because a kernel in a header cannot be inline
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(move_threads)
    move_rows(const KvPlane* planes, Moves moves) {
  const std::int64_t first = std::int64_t{blockIdx.z} * move_threads + threadIdx.x;
  lookahead::detail::move_rows(planes[blockIdx.y], moves, static_cast<int>(blockIdx.x), first,
                               std::int64_t{gridDim.z} * move_threads);
}

}  // namespace detail

/// Moves rows in the planes of one cache: keys, values and scales of all layers in one launch. Holds the planes'
/// descriptions in the device's memory, nothing else; the planes must stay where they are.
class KvMover {
 public:
  /// Throws InvalidArgument for a plane without bytes or pieces, or for more than 65535 planes; Error where there is no
  /// memory. Work on `stream` is enqueued.
  KvMover(std::span<const KvPlane> planes, cudaStream_t stream) : count_(planes.size()), stream_(stream) {
    std::int64_t most = 0;
    for (std::size_t i = 0; i < planes.size(); ++i) {
      const KvPlane& plane = planes[i];
      if (plane.base == nullptr || plane.row_bytes < 1 || plane.outer_count < 1)
        throw InvalidArgument("plane " + std::to_string(i) + " has " + std::to_string(plane.outer_count) +
                              " pieces of " + std::to_string(plane.row_bytes) + " bytes for each slot" +
                              (plane.base == nullptr ? " at a null pointer" : "") +
                              ": pass at least 1 of each, and where they begin");
      const std::int64_t bytes = std::int64_t{plane.row_bytes} * plane.outer_count;
      most = bytes > most ? bytes : most;
    }
    if (planes.empty() || planes.size() > 65535)
      throw InvalidArgument(std::to_string(planes.size()) + " planes of a cache: pass 1 to 65535");
    // Four vectors for each thread: more threads would spend their time on reading the paths.
    constexpr std::int64_t each = std::int64_t{16} * 4 * detail::move_threads;
    share_ = static_cast<unsigned>((most + each - 1) / each < 64 ? (most + each - 1) / each : 64);
    check(cudaMallocAsync(&planes_, planes.size_bytes(), stream), "cudaMallocAsync");
    const cudaError_t copied =
        cudaMemcpyAsync(planes_, planes.data(), planes.size_bytes(), cudaMemcpyHostToDevice, stream);
    if (copied != cudaSuccess) cudaFreeAsync(planes_, stream);
    check(copied, "cudaMemcpyAsync");
  }
  KvMover(const KvMover&) = delete;
  KvMover& operator=(const KvMover&) = delete;
  /// Enqueues on the constructor's stream, which must still exist. Moves on other streams must have ended.
  ~KvMover() { cudaFreeAsync(planes_, stream_); }

  /// Enqueues one kernel and returns; allocates nothing, and may be captured. What `moves` points to is in the device's
  /// memory, is read when the kernel runs, and is not checked. Throws InvalidArgument for fewer than 0 sequences, Error
  /// where the launch fails.
  void move_async(const KvMoves& moves, int sequences, cudaStream_t stream) const {
    if (sequences < 0) throw InvalidArgument(std::to_string(sequences) + " sequences to move rows of: pass 0 or more");
    if (sequences == 0) return;
    const dim3 grid(static_cast<unsigned>(sequences), static_cast<unsigned>(count_), share_);
    detail::move_rows<<<grid, detail::move_threads, 0, stream>>>(planes_, moves);
    check(cudaGetLastError(), "move_rows");
  }

 private:
  KvPlane* planes_ = nullptr;
  std::size_t count_;
  cudaStream_t stream_;
  unsigned share_ = 1;
};

}  // namespace lookahead::cuda
