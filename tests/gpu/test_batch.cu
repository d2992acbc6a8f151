/// Lookahead decoding on a device beside the host classes: random lives of a batch, byte for byte; graphs; draws.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <cuda_runtime.h>
#include <doctest/doctest.h>
#include <random>
#include <vector>

#include "../batch_cases.hpp"
#include "../cases.hpp"
#include "on_device.hpp"

#include "lookahead/cuda/batch_lookahead.cuh"
#include "lookahead/philox.hpp"
#include "lookahead/sample_verify.hpp"

namespace {

using namespace batch_cases;
namespace gpu = lookahead::cuda;

/// What a life drives: a batch on the device, and a copy of its memory to look at.
template <int W, int N, int G>
class Device {
 public:
  explicit Device(const BatchOptions& options) : batch_(options), copy_(options) {}

  ResultCursor attach(int i, const Tokens& prompt, const SequenceOptions<Token>& options) {
    const OnDevice<Token> on_device(prompt);
    const ResultCursor cursor =
        batch_.attach_async(i, on_device.data(), static_cast<int>(prompt.size()), options, stream_);
    stream_.wait();
    return cursor;
  }
  void detach(int i) { batch_.detach_async(i, stream_); }
  ResultCursor fork(int from, int to, std::uint64_t stream) { return batch_.fork_async(from, to, stream, stream_); }
  void set_limits(int i, const Limits& limits) { batch_.set_limits_async(i, limits, stream_); }
  void plan(int bucket) { batch_.plan_async(bucket, stream_); }
  void resolve(const Tokens& chosen, const Tokens& top, int width) {
    const OnDevice<Token> tokens(chosen), best(top);
    batch_.resolve_async(tokens.data(), width > 0 ? best.data() : nullptr, width, stream_);
    stream_.wait();
  }
  template <class F>
  int read(ResultCursor& cursor, F&& f) {
    return batch_.read(cursor, f);
  }
  Memory<W, N, G>& memory() {
    stream_.wait();
    gpu::check(cudaMemcpy(copy_.bytes.data(), batch_.view().sequences, copy_.bytes.size(), cudaMemcpyDeviceToHost),
               "cudaMemcpy");
    return copy_;
  }

 private:
  gpu::BatchLookahead<W, N, G> batch_;
  Memory<W, N, G> copy_;
  Stream stream_;
};

template <int W, int N, int G>
void live(int lives, int actions) {
  int tokens = 0;
  for (int life = 0; life < lives; ++life) {
    CAPTURE(life);
    const auto seed = static_cast<unsigned>(life);
    const BatchOptions options = random_batch(seed);
    Device<W, N, G> device(options);
    Life<W, N, G, Device<W, N, G>> one(device, options, seed);
    one.run(actions);
    tokens += one.tokens;
  }
  CHECK(tokens > 0);
}

/// The token behind every wanted row is the row's own plus one.
__global__ void count_on(PackedBatch<Token> packed, int sequences, Token* tokens) {
  const int k = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (k < packed.wanted_offsets[sequences]) tokens[k] = packed.tokens[packed.wanted[k]] + 1;
}

std::size_t free_memory() {
  std::size_t free = 0, total = 0;
  gpu::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

}  // namespace

TEST_CASE("a batch on the device is the host classes, byte for byte") {
  const int lives = std::min(cases(2000), 20000) / 100;
  live<15, 5, 15>(lives, 60);
  live<5, 3, 5>(lives, 60);
  live<4, 4, 0>(lives, 60);
  live<1, 2, 3>(lives, 60);
}

TEST_CASE("a captured step replays; steps allocate nothing and results come without a wait") {
  constexpr int sequences = 3, bucket = 16, steps = 20;
  gpu::BatchLookahead<15, 5, 15> batch({.sequences = sequences, .result_steps = 2 * steps});
  const Stream stream;
  const OnDevice<Token> prompt(Tokens{1, 2, 3, 4, 5, 6, 7, 8});
  const OnDevice<Token> tokens(std::size_t{sequences} * bucket);
  std::vector<ResultCursor> cursors;
  for (int i = 0; i < sequences; ++i) cursors.push_back(batch.attach_async(i, prompt.data(), 8 - i, {}, stream));

  cudaGraph_t graph = nullptr;
  gpu::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  batch.plan_async(bucket, stream);
  count_on<<<1, sequences * bucket, 0, stream>>>(batch.packed(), sequences, tokens.data());
  batch.resolve_async(tokens.data(), nullptr, 0, stream);
  gpu::check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  cudaGraphExec_t replay = nullptr;
  gpu::check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");

  gpu::check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
  stream.wait();
  const std::size_t before = free_memory();
  for (int step = 1; step < steps; ++step) gpu::check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
  stream.wait();
  CHECK(free_memory() == before);
  for (int i = 0; i < sequences; ++i) {
    Tokens text;
    CHECK(batch.read(cursors[at(i)], [&](const auto& r) { text.insert(text.end(), r.tokens, r.tokens + r.count); }) ==
          steps);
    CHECK(text.size() >= std::size_t{steps});
    for (std::size_t k = 0; k < text.size(); ++k) CHECK(text[k] == static_cast<Token>(k) + 9 - i);
  }
  gpu::check(cudaGraphExecDestroy(replay), "cudaGraphExecDestroy");
  gpu::check(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

TEST_CASE("draws on the device are SampleVerify's, but for the rounding of exp") {
  constexpr int vocabulary = 50000, sequences = 4;
  gpu::BatchLookahead<5, 3, 5> batch({.sequences = sequences});
  const Stream stream;
  const OnDevice<Token> prompt(Tokens{1, 2, 3});
  const OnDevice<Token> tokens(std::size_t{sequences});
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 4);
  int differ = 0, draws = 0;
  for (int round = 0; round < 25; ++round) {
    std::vector<float> logits(std::size_t{sequences} * vocabulary);
    for (float& x : logits) x = normal(random);
    const OnDevice<float> on_device(logits);
    std::vector<SequenceOptions<Token>> options(sequences);
    for (int i = 0; i < sequences; ++i) {
      auto& o = options[at(i)];
      o.temperature = i == 0 ? 0.0F : 0.3F * static_cast<float>(i);
      o.seed = random();
      o.stream = random();
      batch.attach_async(i, prompt.data(), 3, o, stream);
    }
    batch.plan_async(1, stream);
    batch.sample_async(on_device.data(), vocabulary, vocabulary, tokens.data(), stream);
    stream.wait();
    const Tokens drawn = tokens.values();
    for (int i = 0; i < sequences; ++i) {
      struct Row {
        using token_type = Token;
        std::span<const float> logit;
        std::span<const float> logits(int) const { return logit; }
      } row{std::span<const float>(logits).subspan(at(i) * vocabulary, vocabulary)};
      SampleVerify<Token> policy(SampleOptions{
          .temperature = options[at(i)].temperature, .seed = options[at(i)].seed, .stream = options[at(i)].stream});
      policy.observe(0, Tokens(3));
      const Token wanted = policy.select(row, 0, 3);
      if (i == 0) CHECK(drawn[at(i)] == wanted);
      differ += static_cast<int>(drawn[at(i)] != wanted);
      ++draws;
    }
  }
  CHECK(differ <= 1);
  MESSAGE(differ << " of " << draws << " draws differ");
}

TEST_CASE("what cannot be used is refused before a launch") {
  using Batch = gpu::BatchLookahead<5, 3, 5>;
  Batch batch({.sequences = 2, .rows = 8});
  const Stream stream;
  const OnDevice<Token> prompt(Tokens{1});
  CHECK_THROWS_AS(Batch(BatchOptions{.sequences = 0}), InvalidArgument);
  CHECK_THROWS_AS(batch.attach_async(2, prompt.data(), 1, {}, stream), InvalidArgument);
  CHECK_THROWS_AS(batch.attach_async(0, nullptr, 1, {}, stream), InvalidArgument);
  CHECK_THROWS_AS(batch.attach_async(0, prompt.data(), 0, {}, stream), InvalidArgument);
  CHECK_THROWS_AS(batch.attach_async(0, prompt.data(), 1, {.temperature = -1}, stream), InvalidArgument);
  CHECK_THROWS_AS(batch.detach_async(-1, stream), InvalidArgument);
  CHECK_THROWS_AS(batch.fork_async(1, 1, 0, stream), InvalidArgument);
  CHECK_THROWS_AS(batch.plan_async(0, stream), InvalidArgument);
  CHECK_THROWS_AS(batch.plan_async(9, stream), InvalidArgument);
  CHECK_THROWS_AS(batch.resolve_async(nullptr, nullptr, 0, stream), InvalidArgument);
  CHECK_THROWS_AS(batch.resolve_async(prompt.data(), prompt.data(), 0, stream), InvalidArgument);
  stream.wait();
}

TEST_CASE("the bucket follows the results, one step behind") {
  gpu::BatchLookahead<15, 5, 15> batch({.sequences = 2});
  const Stream stream;
  const OnDevice<Token> prompt(Tokens{1, 2, 3, 1, 2, 3, 1, 2, 3, 1});
  CHECK(batch.next_bucket() == 1);
  ResultCursor cursor = batch.attach_async(0, prompt.data(), 10, {.limits = {.rows = 30}}, stream);
  CHECK(batch.next_bucket() == 32);
  const OnDevice<Token> tokens(std::vector<Token>(64, 2));
  batch.plan_async(1, stream);
  batch.resolve_async(tokens.data(), nullptr, 0, stream);
  stream.wait();
  CHECK(batch.read(cursor, [](const auto& r) { CHECK(r.next_rows == 2); }) == 1);
  CHECK(batch.next_bucket() == 4);
  batch.detach_async(0, stream);
  CHECK(batch.next_bucket() == 1);
}
