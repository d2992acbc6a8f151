/// The device step: every kernel compiles, for the published capacities and for small ones.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "lookahead/cuda/batch_lookahead.cuh"

template class lookahead::cuda::BatchLookahead<15, 5, 15>;
template class lookahead::cuda::BatchLookahead<5, 3, 5>;
template class lookahead::cuda::BatchLookahead<4, 4, 0>;
template class lookahead::cuda::BatchLookahead<1, 2, 3>;

namespace {

using Batch = lookahead::cuda::BatchLookahead<15, 5, 15>;

/// What a user's engine and server are in docs/cuda.md.
struct Engine {
  void forward(const lookahead::PackedBatch<int>&, cudaStream_t) {}
  void keep(const lookahead::KeptRows&, cudaStream_t) {}
};
void emit(const int*, int) {}

}  // namespace

/// The first example of docs/cuda.md, with as many steps as it is told.
void nvcc_decode(Engine& engine, const int* prompt_on_device, int prompt_size, const float* logits, int vocabulary,
                 int* tokens, cudaStream_t stream, int steps) {
  Batch batch({.sequences = 64, .rows = 64});
  auto cursor = batch.attach_async(0, prompt_on_device, prompt_size, {.end_tokens = {2}, .end_token_count = 1}, stream);
  for (int step = 0; step < steps; ++step) {
    batch.plan_async(batch.next_bucket(), stream);
    engine.forward(batch.packed(), stream);
    batch.sample_async(logits, static_cast<std::size_t>(vocabulary), vocabulary, tokens, stream);
    batch.resolve_async(tokens, nullptr, 0, stream);
    engine.keep(batch.kept(), stream);
    batch.read(cursor, [&](const auto& result) { emit(result.tokens, result.count); });
  }
}

void nvcc_sample(Batch& batch, const __half* halfs, const __nv_bfloat16* bfloats, int* tokens) {
  batch.sample_async(halfs, 32000, 32000, tokens, nullptr);
  batch.sample_async(bfloats, 32000, 32000, tokens, nullptr);
}
