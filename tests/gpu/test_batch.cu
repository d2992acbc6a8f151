/// Lookahead decoding on a device beside the host classes: random lives of a batch, byte for byte; graphs; draws.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <doctest/doctest.h>
#include <numeric>
#include <random>
#include <vector>

#include "../batch_cases.hpp"
#include "../cases.hpp"
#include "on_device.hpp"

#include "lookahead/cuda/batch_lookahead.cuh"
#include "lookahead/cuda/warp_tile.cuh"
#include "lookahead/group.hpp"
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

/// A warp's sum, as each of its lanes has it.
__global__ void add_up(const double* values, int n, double* sum) {
  sum[threadIdx.x] = gpu::WarpTile{}.sum(n, [&](int i) { return values[i]; });
}

/// The token behind every wanted row is the row's own plus one.
__global__ void count_on(PackedBatch<Token> packed, int sequences, Token* tokens) {
  const int k = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (k < packed.wanted_offsets[sequences]) tokens[k] = packed.tokens[packed.wanted[k]] + 1;
}

/// What a user's engine is in docs/cuda.md: the token behind a row is most probably the row's own plus one.
struct Engine {
  void forward(const PackedBatch<Token>& packed, cudaStream_t stream);
  void keep(const KeptRows&, cudaStream_t) {}
  int sequences, vocabulary;
  float* logits;
};

/// A block a wanted row.
__global__ void favour_next(PackedBatch<Token> packed, int sequences, int vocabulary, float* logits) {
  const int k = static_cast<int>(blockIdx.x);
  if (k >= packed.wanted_offsets[sequences]) return;
  const int next = (packed.tokens[packed.wanted[k]] + 1) % vocabulary;
  for (int t = static_cast<int>(threadIdx.x); t < vocabulary; t += static_cast<int>(blockDim.x))
    logits[static_cast<std::size_t>(k) * static_cast<std::size_t>(vocabulary) + static_cast<std::size_t>(t)] =
        t == next ? 1.0F : 0.0F;
}

void Engine::forward(const PackedBatch<Token>& packed, cudaStream_t stream) {
  favour_next<<<static_cast<unsigned>(sequences * 64), 128, 0, stream>>>(packed, sequences, vocabulary, logits);
}

/// A made-up language for benchmarks: most tokens follow from the one before them, some from their position.
constexpr int vocabulary = 32000, width = 8;

__host__ __device__ std::uint32_t mix(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352DU;
  x = (x ^ (x >> 15)) * 0x846CA68BU;
  return x ^ (x >> 16);
}

__host__ __device__ Token next(Token token, int position, int sequence) {
  const auto place = static_cast<std::uint32_t>(position) * 4099U + static_cast<std::uint32_t>(sequence);
  return static_cast<Token>(mix(mix(place) % 10 < 8 ? static_cast<std::uint32_t>(token) : place) % vocabulary);
}

__global__ void choose(PackedBatch<Token> packed, int sequences, Token* tokens, Token* top) {
  const int k = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (k >= packed.wanted_offsets[sequences]) return;
  const int row = packed.wanted[k];
  tokens[k] = next(packed.tokens[row], packed.positions[row] + 1, packed.sequences[row]);
  for (int i = 0; i < width; ++i) top[k * width + i] = (tokens[k] + i) % vocabulary;
}

void measure(const char* name, int sequences, const Shape& shape, int rows, int depth, const char* aim) {
  constexpr int warm_up = 40, steps = 200;
  gpu::BatchLookahead<15, 5, 15> batch({.sequences = sequences, .result_steps = warm_up + steps});
  const Stream stream;
  Tokens text(256);
  for (std::size_t i = 1; i < text.size(); ++i) text[i] = next(text[i - 1], static_cast<int>(i), 0);
  const OnDevice<Token> prompt(text);
  const std::size_t capacity = at(sequences) * at(rows);
  const OnDevice<Token> tokens(capacity), top(capacity * width);

  SequenceOptions<Token> options;
  options.shape = shape;
  options.limits.depth = depth;
  std::vector<ResultCursor> cursors;
  for (int i = 0; i < sequences; ++i)
    cursors.push_back(batch.attach_async(i, prompt.data(), static_cast<int>(text.size()) - i % 64, options, stream));
  std::vector<double> plan, resolve;
  Event begin, planned, chosen, resolved;
  for (int step = 0; step < warm_up + steps; ++step) {
    hold(stream);
    begin.record(stream);
    batch.plan_async(rows, stream);
    planned.record(stream);
    choose<<<static_cast<unsigned>((capacity + 255) / 256), 256, 0, stream>>>(batch.packed(), sequences, tokens.data(),
                                                                              top.data());
    chosen.record(stream);
    batch.resolve_async(tokens.data(), top.data(), width, stream);
    resolved.record(stream);
    stream.wait();
    if (step < warm_up) continue;
    plan.push_back(1e6 * planned.since(begin));
    resolve.push_back(1e6 * resolved.since(chosen));
  }
  double all_rows = 0, all_tokens = 0;
  for (auto& cursor : cursors)
    batch.read(cursor, [&](const auto& r) {
      all_rows += r.rows;
      all_tokens += r.count;
    });
  const Graph step(stream, [&] {
    batch.plan_async(rows, stream);
    batch.resolve_async(tokens.data(), top.data(), width, stream);
  });
  const double results = static_cast<double>(sequences) * (warm_up + steps);
  std::printf("%-10s %9d %6d %8.1f %8.2f %9.1f %11.1f %9.1f %4s %12d\n", name, sequences, depth, all_rows / results,
              all_tokens / results, median(plan), median(resolve), median(plan) + median(resolve), aim, step.others());
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

TEST_CASE("a warp adds in the order of the host, to the last bit") {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> part(-1, 1);
  const Stream stream;
  const OnDevice<double> sums(std::size_t{32});
  int told = 0;
  for (const int n : {0, 1, 2, 31, 32, 33, 63, 64, 65, 100, 1000, 4097}) {
    CAPTURE(n);
    std::vector<double> values(at(n));
    for (double& x : values) x = std::ldexp(part(random), static_cast<int>(random() % 4));
    const OnDevice<double> on_device(values);
    add_up<<<1, 32, 0, stream>>>(on_device.data(), n, sums.data());
    stream.wait();
    const double expected = SerialTile{}.sum(n, [&](int i) { return values[at(i)]; });
    for (const double sum : sums.values()) CHECK(sum == expected);
    told += std::accumulate(values.begin(), values.end(), 0.0) != expected ? 1 : 0;
  }
  CHECK(told >= 5);  // another order would show
}

TEST_CASE("a captured step replays; steps allocate nothing and results come without a wait") {
  constexpr int sequences = 3, bucket = 16, steps = 20;
  gpu::BatchLookahead<15, 5, 15> batch({.sequences = sequences, .result_steps = 2 * steps});
  const Stream stream;
  const OnDevice<Token> prompt(Tokens{1, 2, 3, 4, 5, 6, 7, 8});
  const OnDevice<Token> tokens(std::size_t{sequences} * bucket);
  std::vector<ResultCursor> cursors;
  for (int i = 0; i < sequences; ++i) cursors.push_back(batch.attach_async(i, prompt.data(), 8 - i, {}, stream));

  const Graph graph(stream, [&] {
    batch.plan_async(bucket, stream);
    count_on<<<1, sequences * bucket, 0, stream>>>(batch.packed(), sequences, tokens.data());
    batch.resolve_async(tokens.data(), nullptr, 0, stream);
  });
  CHECK(graph.others() == 0);

  graph.launch(stream);
  stream.wait();
  const std::size_t before = free_memory();
  for (int step = 1; step < steps; ++step) graph.launch(stream);
  stream.wait();
  CHECK(free_memory() == before);
  for (int i = 0; i < sequences; ++i) {
    Tokens text;
    CHECK(batch.read(cursors[at(i)], [&](const auto& r) { text.insert(text.end(), r.tokens, r.tokens + r.count); }) ==
          steps);
    CHECK(text.size() >= std::size_t{steps});
    for (std::size_t k = 0; k < text.size(); ++k) CHECK(text[k] == static_cast<Token>(k) + 9 - i);
  }

  // A row limit that lies in device memory holds for the next replay.
  const std::int32_t limit = 2;
  gpu::check(cudaMemcpy(batch.row_limits() + 1, &limit, sizeof limit, cudaMemcpyHostToDevice), "cudaMemcpy");
  graph.launch(stream);
  stream.wait();
  for (int i = 0; i < sequences; ++i)
    CHECK(batch.read(cursors[at(i)], [&](const auto& r) { CHECK((i == 1 ? r.rows == 2 : r.rows > 2)); }) == 1);
}

TEST_CASE_TEMPLATE("draws on the device are SampleVerify's, but for the rounding of exp", Logit, float, __half,
                   __nv_bfloat16) {
  constexpr int vocabulary = 50000, sequences = 4;
  gpu::BatchLookahead<5, 3, 5> batch({.sequences = sequences});
  const Stream stream;
  const OnDevice<Token> prompt(Tokens{1, 2, 3});
  const OnDevice<Token> tokens(std::size_t{sequences});
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 4);
  int differ = 0, draws = 0;
  for (int round = 0; round < 10; ++round) {
    std::vector<Logit> values(std::size_t{sequences} * vocabulary);
    for (Logit& x : values) x = Logit(normal(random));
    const std::vector<float> logits(values.begin(), values.end());
    const OnDevice<Logit> on_device(values);
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
  CHECK_THROWS_AS(batch.sample_async(static_cast<float*>(nullptr), 9, 9, prompt.data(), stream), InvalidArgument);
  const OnDevice<float> logits(std::size_t{9});
  CHECK_THROWS_AS(batch.sample_async(logits.data(), 9, 9, nullptr, stream), InvalidArgument);
  CHECK_THROWS_AS(batch.sample_async(logits.data(), 9, 0, prompt.data(), stream), InvalidArgument);
  CHECK_THROWS_WITH_AS(
      batch.sample_async(logits.data(), 8, 9, prompt.data(), stream),
      "a vocabulary of 9 tokens in rows that are 8 apart: pass 1 <= vocabulary <= min(row_stride, 1073741824)",
      InvalidArgument);
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

TEST_CASE("the first example of docs/cuda.md decodes") {
  constexpr int words = 100, prompt_size = 3;
  const Stream stream;
  const OnDevice<Token> prompt(Tokens{90, 91, 92}), tokens(std::size_t{64} * 64);
  const OnDevice<float> memory(std::size_t{64} * 64 * words);
  Engine engine{64, words, memory.data()};
  Tokens text;
  const auto emit = [&](const Token* some, int count) { text.insert(text.end(), some, some + count); };

  gpu::BatchLookahead<15, 5, 15> batch({.sequences = 64, .rows = 64});
  auto cursor = batch.attach_async(0, prompt.data(), prompt_size, {.end_tokens = {2}, .end_token_count = 1}, stream);
  for (int step = 0; step < 20; ++step) {
    batch.plan_async(batch.next_bucket(), stream);
    engine.forward(batch.packed(), stream);
    batch.sample_async(engine.logits, words, words, tokens.data(), stream);
    batch.resolve_async(tokens.data(), nullptr, 0, stream);
    engine.keep(batch.kept(), stream);
    batch.read(cursor, [&](const auto& result) { emit(result.tokens, result.count); });
  }
  stream.wait();
  batch.read(cursor, [&](const auto& result) { emit(result.tokens, result.count); });
  CHECK(text == Tokens{93, 94, 95, 96, 97, 98, 99, 0, 1, 2});
}

// Run by run.sh alone. Plan and pack, then resolve, without the model.
TEST_CASE("benchmark" * doctest::skip()) {
  std::printf("%-10s %9s %6s %8s %8s %9s %11s %9s %4s %12s\n", "shape", "sequences", "depth", "rows", "tokens",
              "plan, us", "resolve, us", "sum, us", "aim", "round trips");
  const int any = gpu::BatchLookahead<15, 5, 15>::max_block;
  for (const int sequences : {1, 8, 64, 256}) {
    measure("published", sequences, Shape::published(), 120, any, sequences == 64 ? "15" : "-");
    measure("growth", sequences, {}, 16, any, "-");
    measure("growth", sequences, {}, 64, any, "-");
  }
  // By level: what one more level costs.
  for (const int depth : {1, 2, 3, 4, 6, 8, 12, 16, 32}) measure("growth", 64, {}, 64, depth, "-");
}
