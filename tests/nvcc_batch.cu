/// The device step: every kernel compiles, for the published capacities and for small ones.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "lookahead/cuda/batch_lookahead.cuh"

template class lookahead::cuda::BatchLookahead<15, 5, 15>;
template class lookahead::cuda::BatchLookahead<5, 3, 5>;
template class lookahead::cuda::BatchLookahead<4, 4, 0>;
template class lookahead::cuda::BatchLookahead<1, 2, 3>;

int nvcc_batch(lookahead::cuda::BatchLookahead<>& batch, const float* floats, const __half* halfs,
               const __nv_bfloat16* bfloats, int* tokens) {
  batch.sample_async(floats, 32000, 32000, tokens, nullptr);
  batch.sample_async(halfs, 32000, 32000, tokens, nullptr);
  batch.sample_async(bfloats, 32000, 32000, tokens, nullptr);
  lookahead::ResultCursor cursor{0, 1, 0};
  return batch.read(cursor, [](const auto&) {});
}
