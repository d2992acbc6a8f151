/// @file tune.cpp
/// Which W, N and G to compile for an engine and for one's own prompts: the engine's time by rows is measured, the
/// prompts are decoded with a menu of settings, and the two together give tokens per second.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "chat_template.hpp"
#include "engines/gguf.hpp"
#include "engines/llama_engine.hpp"
#include "engines/tokenizer.hpp"
#include "model_options.hpp"
#include "prompt_texts.hpp"

#include "lookahead/lookahead.hpp"
#include "lookahead/testing/plain_decode.hpp"

namespace {

using lookahead::InvalidArgument;
using lookahead::Shape;
using lookahead::ShapeMode;
using lookahead::StepCost;
using lookahead::engines::LlamaEngine;
using Token = LlamaEngine::token_type;
using Tokens = std::vector<Token>;
using Json = nlohmann::ordered_json;
using Curve = std::map<std::size_t, double>;  ///< times by rows
using Table = std::vector<std::uint32_t>;     ///< the same for 1, 2, 3, ... rows, as `StepCost::given` takes it

constexpr std::size_t most_rows = 256;

struct Options {
  lookahead::examples::ModelOptions model;
  std::string prompts = "bench/prompts/code", cost_out;
  bool chat = false, json = false;
  std::size_t count = 8, tokens = 128, context = 256, rounds = 9;
  std::vector<std::size_t> rows = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}, limits;
  std::vector<std::string> curve;
  double quantile = 0.5;
  int threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
};

/// Says on standard error how far the work is; on a terminal for each part of it.
void progress(const std::string& what, std::size_t done, std::size_t all) {
  static const bool terminal = isatty(STDERR_FILENO) != 0;
  if (!terminal && done < all) return;
  std::fprintf(stderr, "%s%s: %zu of %zu%s", terminal ? "\r" : "", what.c_str(), done, all, done == all ? "\n" : "");
  std::fflush(stderr);
}

/// Up to `count` prompts, evenly spread over all that there are.
std::vector<std::string> load(const std::string& path, std::size_t count) {
  const std::vector<std::string> all = lookahead::bench::load_texts(path);
  std::vector<std::string> some;
  count = std::min(count, all.size());
  for (std::size_t i = 0; i < count; ++i) some.push_back(all[i * all.size() / count]);
  return some;
}

/// The time in microseconds of a pass and of reading the best tokens of all its rows, which every step does.
Curve measure(LlamaEngine& engine, const Options& o) {
  Tokens text(o.context);
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<Token>(i * 7 % engine.vocabulary());
  engine.truncate(0);
  engine.prefill(text);
  std::set<std::size_t> sizes(o.rows.begin(), o.rows.end());
  sizes.insert(1);

  std::map<std::size_t, std::vector<double>> times;
  static lookahead::TokenTreeStorage<Token, most_rows> tree;
  for (std::size_t round = 0; round <= o.rounds; ++round) {  // the first one warms up
    progress("cost curve, rounds", round, o.rounds);
    for (const std::size_t size : sizes) {
      const auto rows = static_cast<int>(size);
      const Token first = 5;
      tree.begin(static_cast<int>(o.context), &first, 1);
      for (int r = 1; r < rows; ++r) tree.add((r - 1) / 3, 10 + r);  // three children to a row
      for (int r = 0; r < rows; ++r) tree.want(r);
      const auto begin = std::chrono::steady_clock::now();
      engine.forward(tree.view());
      Token best[8];
      for (int r = 0; r < rows; ++r) engine.top_tokens(r, best);
      const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
      if (round > 0) times[size].push_back(time.count());
    }
  }
  Curve curve;
  double least = 1e300;  // fewer rows take no longer than more: a pass that was slower was disturbed
  for (auto of = times.rbegin(); of != times.rend(); ++of) {
    std::ranges::sort(of->second);
    least = std::min(
        least, of->second[static_cast<std::size_t>(o.quantile * static_cast<double>(of->second.size() - 1) + 0.5)]);
    curve[of->first] = least;
  }
  return curve;
}

/// A curve from points, "1:1000" for example.
Curve parse(const std::vector<std::string>& points) {
  Curve curve;
  for (const std::string& point : points) {
    std::size_t rows = 0;
    std::uint32_t time = 0;
    const char* const end = point.data() + point.size();
    const auto [colon, error] = std::from_chars(point.data(), end, rows);
    const bool is_pair = error == std::errc() && colon != end && *colon == ':';
    const auto rest = is_pair ? std::from_chars(colon + 1, end, time) : std::from_chars_result{end, std::errc()};
    if (!is_pair || rest.ec != std::errc() || rest.ptr != end || rows == 0 || rows > most_rows)
      throw InvalidArgument("--curve: '" + point + "' is no ROWS:TIME with 1 to " + std::to_string(most_rows) +
                            " rows and a whole number; give 1:1000,64:1080 for example");
    curve[rows] = time;
  }
  if (!curve.contains(1)) throw InvalidArgument("--curve: the time of 1 row is missing; give 1:1000 for example");
  return curve;
}

/// Lines between the points.
Table table_of(const Curve& curve) {
  Table table;
  for (auto from = curve.begin(), to = from; from != curve.end(); from = to) {
    to = std::next(from);
    const std::size_t end = to == curve.end() ? from->first + 1 : to->first;
    for (std::size_t r = from->first; r < end; ++r) {
      const double slope =
          to == curve.end() ? 0 : (to->second - from->second) / static_cast<double>(to->first - from->first);
      const double time = std::round(from->second + slope * static_cast<double>(r - from->first));
      table.push_back(static_cast<std::uint32_t>(std::clamp(time, 1.0, double{StepCost::time_limit})));
    }
  }
  return table;
}

/// A setting of the menu.
struct Setting {
  Shape shape;
  std::size_t limit = 0;  ///< fixed number of rows; 0: as many as pay
};

/// What a setting gave.
struct Result {
  Setting setting;
  int W = 1, N = 2, G = 1;  ///< to compile
  std::size_t tokens = 0, steps = 0, rows = 0, largest = 0;
  std::vector<std::size_t> steps_by_rows{};  ///< steps of 1, 2, 3, ... rows
  std::vector<double> times{};               ///< modelled, of each prompt
  std::size_t identical = 0;                 ///< texts
  double gain = 0;                           ///< over plain decoding

  [[nodiscard]] bool published() const { return setting.shape.mode == ShapeMode::published; }
  [[nodiscard]] double time() const {
    double sum = 0;
    for (const double t : times) sum += t;
    return sum;
  }
  [[nodiscard]] std::string window() const {
    if (published()) return "published";
    return setting.shape.w == 0 ? "none" : "(" + std::to_string(W) + ", " + std::to_string(N) + ")";
  }
  [[nodiscard]] std::string rows_allowed() const {
    if (setting.limit != 0) return "at most " + std::to_string(setting.limit) + " rows";
    return published() ? "all rows" : "rows as they pay";
  }
  [[nodiscard]] std::string shape() const {
    return "(" + std::to_string(W) + ", " + std::to_string(N) + ", " + std::to_string(G) + ")";
  }
};

struct Work {
  LlamaEngine& engine;
  const std::vector<Tokens>& prompts;
  const std::vector<Tokens>& plain;
  const Tokens& end_tokens;
  const Table& table;
  std::size_t max_tokens;
};

/// Decodes all prompts. The G that the result names is the smallest that has room for the largest step.
template <int W, int N, int G>
Result decode(const Work& work, const Setting& setting) {
  using Decoder = lookahead::Decoder<LlamaEngine, W, N, G>;
  Result result{.setting = setting, .W = W, .N = N, .G = G};
  result.steps_by_rows.resize(work.table.size());
  for (std::size_t p = 0; p < work.prompts.size(); ++p) {
    progress("window " + result.window() + ", " + result.rows_allowed() + ", prompts", p + 1, work.prompts.size());
    Decoder decoder(work.engine, {.shape = setting.shape,
                                  .rows = setting.limit == 0 ? work.table.size() : setting.limit,
                                  .cost = setting.limit == 0 ? StepCost::given(work.table) : StepCost::none(),
                                  .end_tokens = work.end_tokens});
    decoder.start(work.prompts[p]);
    Tokens text;
    double time = 0;
    lookahead::StopReason stop{};
    std::size_t before = 0;
    do {
      before = text.size();
      stop = decoder.step(work.max_tokens - before,
                          [&](std::span<const Token> block) { text.insert(text.end(), block.begin(), block.end()); });
      if (text.size() == before) break;
      const auto rows = static_cast<std::size_t>(decoder.report().rows);
      ++result.steps;
      result.rows += rows;
      ++result.steps_by_rows[rows - 1];
      time += work.table[rows - 1];
    } while (stop == lookahead::StopReason::running && text.size() < work.max_tokens);
    result.tokens += text.size();
    result.times.push_back(time);
    result.identical += text == work.plain[p];
  }
  while (result.steps_by_rows.back() == 0) result.steps_by_rows.pop_back();
  result.largest = result.steps_by_rows.size();
  result.gain = static_cast<double>(result.tokens) * work.table[0] / result.time();
  if (!result.published()) {
    const int behind = static_cast<int>(result.largest) - Decoder::Step::max_pending;
    result.G = std::max(1, (behind + N - 2) / (N - 1) - W);
  }
  return result;
}

/// The menu: no window, three windows, the published method. Each has room for 129 rows or more.
std::vector<Result> decode_all(const Work& work, const std::vector<std::size_t>& limits) {
  std::vector<std::size_t> all{0};
  all.insert(all.end(), limits.begin(), limits.end());
  std::vector<Result> results;
  for (const std::size_t limit : all) {
    results.push_back(decode<1, 2, 95>(work, {Shape{}, limit}));
    results.push_back(decode<5, 3, 43>(work, {Shape{.w = 5}, limit}));
    results.push_back(decode<7, 4, 25>(work, {Shape{.w = 7}, limit}));
    results.push_back(decode<15, 5, 15>(work, {Shape{.w = 15}, limit}));
    if (limit == 0) results.push_back(decode<15, 5, 15>(work, {Shape::published(), limit}));
  }
  return results;
}

double per_step(std::size_t n, const Result& r) { return static_cast<double>(n) / static_cast<double>(r.steps); }

Json to_json(const Result& r) {
  const bool fixed = r.setting.limit != 0;
  return {{"W", r.W},
          {"N", r.N},
          {"G", r.G},
          {"w", std::min(r.setting.shape.w, r.W)},
          {"published", r.published()},
          {"rows_limit", fixed ? Json(r.setting.limit) : Json()},
          {"tokens", r.tokens},
          {"steps", r.steps},
          {"tokens_per_step", per_step(r.tokens, r)},
          {"rows_per_step", per_step(r.rows, r)},
          {"largest_step", r.largest},
          {"time", r.time()},
          {"gain", r.gain},
          {"steps_by_rows", r.steps_by_rows}};
}

void print(const Result& r, std::size_t prompts) {
  std::printf("%-10s %16s %12.2f %10.2f %13zu %9.2f %7zu/%zu\n", r.window().c_str(), r.rows_allowed().c_str(),
              per_step(r.tokens, r), per_step(r.rows, r), r.largest, r.gain, r.identical, prompts);
}

int run(const Options& o) {
  const lookahead::engines::GgufFile file = o.model.open();
  const lookahead::engines::Tokenizer tokenizer(file);
  std::vector<Tokens> prompts;
  for (const std::string& text : load(o.prompts, o.count))
    prompts.push_back(o.chat ? lookahead::examples::chat_tokens(file, tokenizer, text)
                             : tokenizer.encode(lookahead::bench::without_space_at_end(text), tokenizer.add_bos()));
  LlamaEngine engine(file, {.max_rows = most_rows, .threads = o.threads, .weights = o.model.weights});

  const bool measured = o.curve.empty();
  const Curve curve = measured ? measure(engine, o) : parse(o.curve);
  const Table table = table_of(curve);
  static_cast<void>(StepCost::given(table));  // refuses what is none before anything is decoded
  for (const std::size_t limit : o.limits)
    if (limit > table.size())
      throw InvalidArgument("--limits: the curve ends at " + std::to_string(table.size()) + " rows, before " +
                            std::to_string(limit) + "; give it more with --rows or --curve");
  if (!o.cost_out.empty()) {
    std::ofstream out(o.cost_out, std::ios::binary);
    out << Json(table).dump() << "\n" << std::flush;
    if (!out) throw InvalidArgument(o.cost_out + " cannot be written; check the path of --cost-out");
  }

  const Tokens end_tokens(tokenizer.eos().begin(), tokenizer.eos().end());
  std::vector<Tokens> plain;
  for (const Tokens& prompt : prompts) {
    plain.push_back(lookahead::testing::plain_decode<LlamaEngine>(engine, prompt, o.tokens, end_tokens));
    progress("plain decoding, prompts", plain.size(), prompts.size());
  }
  std::vector<Result> results = decode_all({engine, prompts, plain, end_tokens, table, o.tokens}, o.limits);

  bool identical = true;
  std::vector<const Result*> order;  // the best of each window with growth, the best one first
  for (const Result& r : results) {
    identical = identical && r.identical == prompts.size();
    if (r.published()) continue;
    const auto same =
        std::ranges::find(order, r.setting.shape.w, [](const Result* other) { return other->setting.shape.w; });
    if (same == order.end())
      order.push_back(&r);
    else if (r.gain > (*same)->gain)
      *same = &r;
  }
  std::ranges::stable_sort(order, {}, [](const Result* r) { return -r->gain; });
  const Result* const none = *std::ranges::find(order, 0, [](const Result* r) { return r->setting.shape.w; });
  const Result* const window = order[0] == none ? order[1] : order[0];
  std::size_t better = 0;
  for (std::size_t p = 0; p < prompts.size(); ++p) better += window->times[p] < none->times[p];
  const Result &best = *order[0], &second = *order[1];

  if (o.json) {
    Json all = Json::array();
    for (const Result& r : results) all.push_back(to_json(r));
    Json points = Json::array();
    for (const auto& [rows, time] : curve) points.push_back({rows, time});
    const Json report = {{"model", o.model.describe(file)},
                         {"prompts", prompts.size()},
                         {"threads", o.threads},
                         {"unit", measured ? Json("microseconds") : Json()},
                         {"curve", points},
                         {"cost", table},
                         {"settings", all},
                         {"best", to_json(best)},
                         {"runner_up", to_json(second)},
                         {"window_pays", window->gain > none->gain},
                         {"identical", identical}};
    std::printf("%s\n", report.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
    return identical ? 0 : 2;
  }

  std::printf("%s\n%zu prompts of %s, at most %zu tokens each\n\n", o.model.describe(file).c_str(), prompts.size(),
              o.prompts.c_str(), o.tokens);
  if (measured)
    std::printf("Time of a pass in us, %d threads, context %zu, quantile %g of %zu interleaved rounds:\n", o.threads,
                o.context, o.quantile, o.rounds);
  else
    std::printf("Time of a pass, as given:\n");
  std::printf("%6s %12s %10s\n", "rows", "T", "T / T(1)");
  for (const auto& [rows, time] : curve) std::printf("%6zu %12.0f %10.2f\n", rows, time, time / curve.at(1));
  std::printf("\n%-10s %16s %12s %10s %13s %9s %9s\n", "window", "rows", "tokens/step", "rows/step", "largest step",
              "gain", "identical");
  for (const Result& r : results) print(r, prompts.size());
  std::printf(
      "\nThe gain is modelled: tokens by the time of the steps as this curve has it, over the same for plain decoding. "
      "The library's own time is not in it.\n\n");
  const auto tell = [&](const char* place, const Result& r) {
    std::printf("%-10s (W, N, G) = %s%s, %s: gain %.2f", place, r.shape().c_str(),
                r.setting.shape.w == 0 ? ", no window" : "", r.rows_allowed().c_str(), r.gain);
    if (measured) std::printf(", %.1f tokens/s", static_cast<double>(r.tokens) / r.time() * 1e6);
    std::printf("\n");
  };
  tell("best:", best);
  tell("runner-up:", second);
  if (measured) std::printf("%-10s %.1f tokens/s\n", "plain:", 1e6 / table[0]);
  std::printf(
      "The window %s: the best one, %s, has %.3f times the gain of none, and a larger one on %zu of %zu "
      "prompts.\n",
      window->gain > none->gain ? "pays" : "does not pay", window->window().c_str(), window->gain / none->gain, better,
      prompts.size());
  return identical ? 0 : 2;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  o.model.path = "examples/models/cpython-6m-q8_0.gguf";
  CLI::App app(
      "The best compile-time (W, N, G) for a model and one's own prompts, by the engine's time of a pass by rows and "
      "by "
      "the tokens that steps yield; each text is compared with plain decoding's. Run it in the root of the repository. "
      "Exit status: 0 where all texts are identical, 2 where one is not, 1 on errors.");
  app.option_defaults()->always_capture_default();
  o.model.declare(app);
  app.add_option(
      "--prompts", o.prompts,
      "A folder of *.txt, a *.jsonl file of objects with a \"prompt\", or a text file, one prompt; raw ones are "
      "taken without the white space at their ends");
  app.add_flag("--chat", o.chat, "Put the prompts into the model's chat template");
  app.add_option("--count", o.count, "Most prompts, evenly spread over all")->check(CLI::PositiveNumber);
  app.add_option("--tokens", o.tokens, "Most tokens for each prompt")->check(CLI::Range(1, 1 << 20));
  app.add_option("--limits", o.limits, "Decode also at these fixed limits, with all the rows that they allow")
      ->delimiter(',')
      ->check(CLI::Range(std::size_t{2}, std::size_t{129}));
  app.add_option("--rows", o.rows, "Rows of the measured passes; steps get no more than the largest")
      ->delimiter(',')
      ->check(CLI::Range(std::size_t{1}, most_rows));
  app.add_option("--context", o.context, "Tokens in the context of the measured passes")->check(CLI::Range(0, 1 << 20));
  app.add_option("--rounds", o.rounds, "Interleaved rounds of them")->check(CLI::Range(1, 10000));
  app.add_option("--quantile", o.quantile,
                 "Which of their sorted times counts; 0.5: the median; on a busy machine, less")
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--curve", o.curve,
                 "Measure no passes: take ROWS:TIME points of any unit with lines between them, 1:1000,64:1080 for "
                 "example, another machine's")
      ->delimiter(',');
  app.add_option("--cost-out", o.cost_out, "Write the times for 1, 2, 3, ... rows to this file, for generate --cost");
  app.add_option("--threads", o.threads, "Threads")->check(CLI::Range(1, 256));
  app.add_flag("--json", o.json, "Print one JSON object and nothing else");
  CLI11_PARSE(app, argc, argv);
  try {
    return run(o);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tune: %s\n", error.what());
    return 1;
  }
}
