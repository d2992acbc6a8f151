/// Time of a step on the device without the model: plan and pack, then resolve, medians by events. The "model" is a
/// kernel that continues a made-up language: most tokens follow from the one before them, some from their position.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>
#include <exception>
#include <vector>

#include "lookahead/cuda/batch_lookahead.cuh"

namespace {

using Token = std::int32_t;
using Batch = lookahead::cuda::BatchLookahead<15, 5, 15, Token>;
using lookahead::cuda::check;

constexpr int vocabulary = 32000, width = 8, warm_up = 40, steps = 200;

__host__ __device__ std::uint32_t mix(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352DU;
  x = (x ^ (x >> 15)) * 0x846CA68BU;
  return x ^ (x >> 16);
}

__host__ __device__ Token next(Token token, int position, int sequence) {
  const auto place = static_cast<std::uint32_t>(position) * 4099U + static_cast<std::uint32_t>(sequence);
  return static_cast<Token>(mix(mix(place) % 10 < 8 ? static_cast<std::uint32_t>(token) : place) % vocabulary);
}

__global__ void choose(lookahead::PackedBatch<Token> packed, int sequences, Token* tokens, Token* top) {
  const int k = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (k >= packed.wanted_offsets[sequences]) return;
  const int row = packed.wanted[k];
  tokens[k] = next(packed.tokens[row], packed.positions[row] + 1, packed.sequences[row]);
  for (int i = 0; i < width; ++i) top[k * width + i] = (tokens[k] + i) % vocabulary;
}

struct Event {
  Event() { check(cudaEventCreate(&event), "cudaEventCreate"); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { (void)cudaEventDestroy(event); }
  void record(cudaStream_t stream) { check(cudaEventRecord(event, stream), "cudaEventRecord"); }
  [[nodiscard]] double since(const Event& other) const {  // microseconds
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, other.event, event), "cudaEventElapsedTime");
    return 1000.0 * static_cast<double>(milliseconds);
  }
  cudaEvent_t event = nullptr;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void measure(const char* name, int sequences, const lookahead::Shape& shape, int rows, int depth) {
  Batch batch({.sequences = sequences, .result_steps = warm_up + steps});
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  std::vector<Token> text(256);
  for (std::size_t i = 1; i < text.size(); ++i) text[i] = next(text[i - 1], static_cast<int>(i), 0);
  Token *prompt = nullptr, *tokens = nullptr, *top = nullptr;
  const std::size_t capacity = static_cast<std::size_t>(sequences) * static_cast<std::size_t>(rows);
  check(cudaMalloc(&prompt, text.size() * sizeof(Token)), "cudaMalloc");
  check(cudaMalloc(&tokens, capacity * sizeof(Token)), "cudaMalloc");
  check(cudaMalloc(&top, capacity * width * sizeof(Token)), "cudaMalloc");
  check(cudaMemcpy(prompt, text.data(), text.size() * sizeof(Token), cudaMemcpyHostToDevice), "cudaMemcpy");

  lookahead::SequenceOptions<Token> options;
  options.shape = shape;
  options.limits.depth = depth;
  std::vector<lookahead::ResultCursor> cursors;
  for (int i = 0; i < sequences; ++i)
    cursors.push_back(batch.attach_async(i, prompt, static_cast<int>(text.size()) - i % 64, options, stream));
  std::vector<double> plan, resolve;
  Event begin, planned, chosen, resolved;
  for (int step = 0; step < warm_up + steps; ++step) {
    begin.record(stream);
    batch.plan_async(rows, stream);
    planned.record(stream);
    choose<<<static_cast<unsigned>((capacity + 255) / 256), 256, 0, stream>>>(batch.packed(), sequences, tokens, top);
    chosen.record(stream);
    batch.resolve_async(tokens, top, width, stream);
    resolved.record(stream);
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    if (step < warm_up) continue;
    plan.push_back(planned.since(begin));
    resolve.push_back(resolved.since(chosen));
  }
  double all_rows = 0, all_tokens = 0;
  for (auto& cursor : cursors)
    batch.read(cursor, [&](const auto& r) {
      all_rows += r.rows;
      all_tokens += r.count;
    });
  const double results = static_cast<double>(sequences) * (warm_up + steps);
  std::printf("%-10s %9d %6d %8.1f %8.2f %9.1f %11.1f %9.1f\n", name, sequences, depth, all_rows / results,
              all_tokens / results, median(plan), median(resolve), median(plan) + median(resolve));
  for (Token* memory : {prompt, tokens, top}) check(cudaFree(memory), "cudaFree");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

}  // namespace

int main() {
  try {
    std::printf("%-10s %9s %6s %8s %8s %9s %11s %9s\n", "shape", "sequences", "depth", "rows", "tokens", "plan, us",
                "resolve, us", "sum, us");
    const int any = Batch::max_block;
    for (const int sequences : {1, 8, 64, 256}) {
      measure("published", sequences, lookahead::Shape::published(), 120, any);
      measure("growth", sequences, {}, 16, any);
      measure("growth", sequences, {}, 64, any);
    }
    // By level: what one more level costs.
    for (const int depth : {1, 2, 3, 4, 6, 8, 12, 16, 32}) measure("growth", 64, {}, 64, depth);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
