/// @file cost.cpp
/// What a step costs: the time of a forward pass by its rows, beside what the machine's memory and arithmetic allow.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engines/inflate.hpp"
#include "engines/llama_engine.hpp"
#if defined(LOOKAHEAD_HAS_LLAMA_CPP)
#include "llama_cpp_demo.hpp"
#endif

#include "lookahead/token_tree.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

using namespace lookahead::engines;

constexpr int most_rows = 256;

bool processor_time = false;  ///< whether `seconds` leaves out the time in which others had the processor

double now() {
  if (processor_time) return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double seconds(const std::function<void()>& work) {
  const double start = now();
  work();
  return now() - start;
}

/// Memory in large pages where there are any, as the engine's arranged weights have it.
std::unique_ptr<std::uint64_t[], decltype(&std::free)> numbers(std::size_t count) {
  constexpr std::size_t page = std::size_t{1} << 21;
  const std::size_t bytes = (count * sizeof(std::uint64_t) + page - 1) / page * page;
  auto* const memory = static_cast<std::uint64_t*>(std::aligned_alloc(page, bytes));
  if (memory == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  std::fill_n(memory, count, 1);
  return {memory, &std::free};
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1) + 0.5)];
}

/// The time of work on all threads, from when all of them run: a new thread may wait milliseconds for its core.
double seconds_on(int threads, const std::function<void(int)>& work) {
  std::atomic<int> missing = threads;
  const auto start = [&] {
    for (--missing; missing != 0;) {
    }
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t)
    others.emplace_back([&, t] {
      start();
      work(t);
    });
  start();
  return seconds([&] {
    work(0);
    for (std::thread& t : others) t.join();
  });
}

/// Bytes a second that all threads read together from `memory`, which is as large as the weights: what part of them the
/// caches hold must count on both sides.
double read_bandwidth(std::span<const std::uint64_t> memory, int threads) {
  const std::size_t share = memory.size() / static_cast<std::size_t>(threads) / 8 * 8;
  const double time = seconds_on(threads, [&](int t) {
    const std::uint64_t* const from = memory.data() + static_cast<std::size_t>(t) * share;
    std::uint64_t sums[8] = {};
    for (std::size_t i = 0; i < share; i += 8) {
      __builtin_prefetch(from + i + 4096, 0, 2);  // as the engine does, or its reading would beat the limit
      for (std::size_t l = 0; l < 8; ++l) sums[l] += from[i + l];
    }
    volatile std::uint64_t keep = sums[0] ^ sums[1] ^ sums[2] ^ sums[3] ^ sums[4] ^ sums[5] ^ sums[6] ^ sums[7];
    static_cast<void>(keep);
  });
  return static_cast<double>(share * static_cast<std::size_t>(threads) * sizeof(std::uint64_t)) / time;
}

/// Multiply-adds a second with weights of a type, in the registers of all threads.
double peak(const Kernels& kernels, WeightType type, int threads) {
  std::vector<double> done(static_cast<std::size_t>(threads));
  const double time =
      seconds_on(threads, [&](int t) { done[static_cast<std::size_t>(t)] = kernels.peak(type, 500'000); });
  double all = 0;
  for (const double d : done) all += d;
  return all / time;
}

struct Size {
  double bytes = 0, products = 0, attention = 0;
};

/// Bytes of the matrices once stored as `type`, and the multiply-adds of a row: theirs, and those of attention, floats,
/// which meets every token of the context twice, with a key and with a value.
Size size_of(const GgufFile& file, WeightType type, int context) {
  Size size;
  const bool tied = file.find("output.weight") == nullptr;
  for (const GgufTensor& t : file.tensors()) {
    if (t.rows() == 1 || (t.name == "token_embd.weight" && !tied)) continue;
    size.bytes += static_cast<double>(row_bytes(type, t.shape[0]) * t.rows());
    size.products += static_cast<double>(t.shape[0] * t.rows());
    if (t.name.ends_with(".attn_q.weight")) size.attention += 2.0 * context * static_cast<double>(t.rows());
  }
  return size;
}

using Storage = lookahead::TokenTreeStorage<std::int32_t, most_rows>;

/// A tree of `rows` wanted rows, three children to a row.
void build_tree(Storage& tree, int context, int rows) {
  const std::int32_t first = 5;
  tree.begin(context, &first, 1);
  for (int r = 1; r < rows; ++r) tree.add((r - 1) / 3, 10 + r);
  for (int r = 0; r < rows; ++r) tree.want(r);
}

std::vector<std::int32_t> prompt_of(int context, std::size_t vocabulary) {
  std::vector<std::int32_t> prompt(static_cast<std::size_t>(context));
  for (std::size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<std::int32_t>(i * 7 % vocabulary);
  return prompt;
}

#if defined(LOOKAHEAD_HAS_LLAMA_CPP)
/// llama.cpp's times on a file, with the types that the file has.
void print_llama_cpp(const std::string& path, const std::vector<int>& rows, int threads, int context, int rounds,
                     double q) {
  const lookahead::examples::demo::ModelFile model(path);
  llama_context_params params = lookahead::LlamaCpp::default_params();
  params.n_ctx = static_cast<std::uint32_t>(context + most_rows);
  params.n_threads = params.n_threads_batch = threads;
  lookahead::LlamaCpp engine(model.get(), params, *std::max_element(rows.begin(), rows.end()));
  lookahead::examples::demo::keep_threads(engine.native(), threads);
  engine.prefill(prompt_of(context, engine.vocabulary()));
  std::map<int, std::vector<double>> times;
  static Storage tree;
  for (int round = -1; round < rounds; ++round)
    for (const int r : rows) {
      build_tree(tree, context, r);
      const double time = seconds([&] {
        engine.forward(tree.view());
        static_cast<void>(engine.logits(0));  // waits until it is there
      });
      if (round >= 0) times[r].push_back(time);
    }
  std::printf("\nllama.cpp, the file as it is\n%6s %10s %10s\n", "rows", "T ms", "T / T(1)");
  for (const int r : rows)
    std::printf("%6d %10.2f %10.2f\n", r, quantile(times[r], q) * 1e3,
                quantile(times[r], q) / quantile(times[rows.front()], q));
}
#endif

int run(int argc, char** argv) {
  CLI::App app{
      "The time T(rows) of a forward pass, all rows wanted, and its ratio to the larger of two limits of this "
      "machine, measured beside it: bytes of weights / read bandwidth, and rows x multiply-adds / their peak in "
      "registers. That is the peak of float products, and for packed weights the peak of integer products with a "
      "scale for each 32. (Attention is floats in all types.) Choosing tokens is not part of it. By default on the "
      "bundled model, inflated to 0.3B parameters. With --as-it-is, llama.cpp's times on the same file follow, "
      "where it was found when this was built."};
  std::string model = "examples/models/cpython-6m-q8_0.gguf", set;
  std::vector<std::string> types = {"F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "F32"};
  std::vector<int> rows = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};
  int threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency())), context = 256, rounds = 9;
  double q = 0.5;
  bool as_it_is = false;
  app.add_option("--model", model, "A GGUF file");
  app.add_flag("--as-it-is", as_it_is, "Do not inflate the model");
  app.add_option("--types", types, "Weight types that the model is converted to")->delimiter(',');
  app.add_option("--rows", rows, "Rows of a step")->delimiter(',')->check(CLI::Range(1, most_rows));
  app.add_option("--threads", threads, "Threads")->check(CLI::Range(1, 256))->capture_default_str();
  app.add_option("--context", context, "Tokens in the context")->check(CLI::Range(0, 1 << 20))->capture_default_str();
  app.add_option("--rounds", rounds, "Interleaved rounds")->check(CLI::Range(1, 10000))->capture_default_str();
  app.add_option("--quantile", q, "Which of the sorted times counts: 0.5 is the median; on a busy machine, less")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_flag("--cpu-time", processor_time,
               "Measure the processor's time, not the clock's, where others use the machine; with --threads 1 only");
  app.add_option("--kernels", set, "avx512 (with VNNI), avx2 or portable; the fastest by default");
  CLI11_PARSE(app, argc, argv);

  if (processor_time && threads != 1) {
    std::fprintf(stderr, "--cpu-time: threads wait for each other, which takes their time too; give --threads 1\n");
    return 2;
  }
  const Kernels* kernels = nullptr;
  for (const Kernels* k : available_kernels())
    if (kernels == nullptr && (set.empty() || set == k->name)) kernels = k;
  if (kernels == nullptr) {
    std::fprintf(stderr, "--kernels %s: this machine has none of that name\n", set.c_str());
    return 2;
  }
  GgufFile file{std::filesystem::path(model)};
  if (!as_it_is) file = GgufFile(inflate(file, {.width = 1024, .blocks = 22, .feed = 4096}));

  std::printf("%s, %d threads, %s kernels, context %d, quantile %g of %d rounds%s\n", file.name().c_str(), threads,
              kernels->name, context, q, rounds, processor_time ? ", processor time" : "");
  for (const std::string& name : types) {
    std::optional<WeightType> type;
    for (std::uint32_t n = 0; n < 64; ++n)
      if (weight_type(n) && name == weight_type_name(*weight_type(n))) type = weight_type(n);
    if (!type) {
      std::fprintf(stderr, "--types %s: give F32, F16, BF16, Q8_0, Q4_0 or Q4_1\n", name.c_str());
      return 2;
    }
    LlamaEngine engine(file, {.context = context + most_rows, .threads = threads, .weights = type, .kernels = kernels});
    engine.prefill(prompt_of(context, engine.vocabulary()));

    const Size size = size_of(file, *type, context);
    const auto count = static_cast<std::size_t>(size.bytes / sizeof(std::uint64_t));
    const auto memory = numbers(count);
    // Each step is measured beside its limits, for the machine that others share changes from second to second. The
    // second of two passes counts: it finds the caches and the threads as a pass in a row of passes does.
    struct Samples {
      std::vector<double> time, memory, products, ratio;
    };
    std::map<int, Samples> samples;
    static Storage tree;
    for (int round = -1; round < rounds; ++round)  // the first one warms up
      for (const int r : rows) {
        double by_memory = 0, time = 0;
        for (int pass = 0; pass < 2; ++pass) by_memory = size.bytes / read_bandwidth({memory.get(), count}, threads);
        const double by_products = r * (size.products / peak(*kernels, *type, threads) +
                                        size.attention / peak(*kernels, WeightType::f32, threads));
        build_tree(tree, context, r);
        for (int pass = 0; pass < 2; ++pass) time = seconds([&] { engine.forward(tree.view()); });
        if (round < 0) continue;
        Samples& s = samples[r];
        s.time.push_back(time);
        s.memory.push_back(by_memory);
        s.products.push_back(by_products);
        s.ratio.push_back(time / std::max(by_memory, by_products));
      }
    std::printf("\n%s: %.1f MB, %.1f M multiply-adds a row with weights and %.1f M in attention\n", name.c_str(),
                size.bytes * 1e-6, size.products * 1e-6, size.attention * 1e-6);
    std::printf("%6s %10s %10s %12s %12s %8s\n", "rows", "T ms", "T / T(1)", "memory ms", "products ms", "ratio");
    for (const int r : rows) {
      const Samples& s = samples[r];
      const double time = quantile(s.time, q);
      std::printf("%6d %10.2f %10.2f %12.2f %12.2f %8.2f\n", r, time * 1e3,
                  time / quantile(samples[rows.front()].time, q), quantile(s.memory, q) * 1e3,
                  quantile(s.products, q) * 1e3, quantile(s.ratio, q));
    }
    std::fflush(stdout);
  }
#if defined(LOOKAHEAD_HAS_LLAMA_CPP)
  if (as_it_is) print_llama_cpp(model, rows, threads, context, rounds, q);
#endif
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
