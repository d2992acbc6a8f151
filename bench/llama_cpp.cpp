/// @file llama_cpp.cpp
/// Lookahead decoding on llama.cpp beside what llama.cpp has of its own, in one run: plain decoding, its lookahead
/// example and its lookup example, with the same model, prompts and threads; and beside the project's own CPU engine.
/// Texts are compared with llama.cpp's own greedy loop. Where one forks, the distance of the two best logits there is
/// told, and how far logits change with the size of a batch or the place in the cache in llama.cpp's own decoding, or
/// with the engine: a fork of ours that this does not explain is an error.

#include "lookahead/adapters/llama_cpp.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <llama.h>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <unistd.h>
#include <utility>
#include <vector>

#include "engines/gguf.hpp"
#include "engines/llama_engine.hpp"
#include "llama_cpp_demo.hpp"
#include "prompt_texts.hpp"
#include "times.hpp"

#include "lookahead/lookahead.hpp"

namespace {

using lookahead::LlamaCpp;
using lookahead::engines::GgufFile;
using lookahead::engines::LlamaEngine;
using lookahead::examples::demo::ModelFile;
using lookahead::examples::demo::Tokenizer;
using Token = llama_token;
using Tokens = std::vector<Token>;
using Clock = std::chrono::steady_clock;

struct Options {
  std::string model, peers;
  std::vector<std::string> sets = {"humaneval"};
  std::vector<int> drafts = {2, 4, 8};
  std::size_t tokens = 96, every = 1, rows = 32, rounds = 1;
  int threads = 2, context = 2048;
  bool f16 = false, lookahead = true;
};

/// The prompts of a set; the last newline is left out, as llama.cpp's programs do. Those of "long" are six texts of
/// "docs" each, beyond the windows of small models.
std::vector<std::string> load(const std::string& set, const ModelFile& file) {
  std::vector<std::string> prompts =
      lookahead::bench::load_texts(lookahead::bench::set_path(set == "long" ? "docs" : set));
  if (set == "long") {
    const std::vector<std::string> texts = prompts;
    for (std::size_t p = 0; p < texts.size(); ++p)
      for (std::size_t i = 1; i < 6; ++i) prompts[p] += texts[(p + i) % texts.size()];
  }
  for (std::string& text : prompts) {
    if (set == "chat") text = lookahead::examples::demo::chat_text(file, text);
    if (text.ends_with('\n')) text.pop_back();
  }
  return prompts;
}

/// Where a text is not plain decoding's.
struct Fork {
  std::size_t prompt, token;
  double gap;    ///< distance of the two best logits of plain decoding there
  double noise;  ///< how far logits change with the place in batch or cache, in llama.cpp's own decoding, or with the
                 ///< engine

  /// Whether either token may come first by rounding alone.
  [[nodiscard]] bool near_tie() const { return gap <= 2 * noise; }
};

/// One way to decode: what it did over all prompts, in all rounds.
struct Row {
  std::string name;
  double tokens = 0, steps = 0, rows = 0;
  lookahead::bench::Times times{};  ///< of as many tokens as plain decoding's texts have
  std::size_t texts = 0;            ///< compared with plain
  std::vector<Fork> forks{};

  /// Counts a text.
  void add(std::size_t prompt, double seconds, double its_tokens, double its_steps, double its_rows,
           std::size_t plain_tokens) {
    times.add(prompt, seconds * static_cast<double>(plain_tokens) / its_tokens);
    tokens += its_tokens;
    steps += its_steps;
    rows += its_rows;
  }

  /// `plain_tokens`: of all prompts, once.
  void print(const Row& plain, double plain_tokens, const Row& ours) const {
    std::array<char, 64> compared{};
    if (texts > 0) {
      const auto ties = static_cast<std::size_t>(std::ranges::count_if(forks, &Fork::near_tie));
      std::snprintf(compared.data(), compared.size(), "%zu identical, %zu near ties, %zu other", texts - forks.size(),
                    ties, forks.size() - ties);
    }
    const auto per_step = [&](double sum) { return steps > 0 ? sum / steps : 0; };
    const auto faster = [](const Row& a, const Row& b) {
      const auto [low, high] = lookahead::bench::interval(a.times, b.times);
      std::array<char, 64> text{};
      std::snprintf(text.data(), text.size(), "%.2f (%.2f to %.2f)", a.times.seconds() / b.times.seconds(), low, high);
      return std::string(text.data());
    };
    std::printf("%-24s %11.2f %10.2f %9.1f  %s  %s  %s\n", name.c_str(), per_step(tokens), per_step(rows),
                plain_tokens / times.seconds(), faster(plain, *this).c_str(), faster(*this, ours).c_str(),
                compared.data());
  }
};

double gap(std::span<const float> logits) {
  std::array<float, 2> best = {-1e30F, -1e30F};
  for (const float x : logits) {
    best[1] = std::max(best[1], std::min(best[0], x));
    best[0] = std::max(best[0], x);
  }
  return double{best[0]} - double{best[1]};
}

/// llama.cpp's own greedy loop on a context of its own.
class Plain {
 public:
  Plain(const ModelFile& file, llama_context_params params)
      : context_(llama_init_from_model(file.get(), params), &llama_free),
        sampler_(llama_sampler_init_greedy(), &llama_sampler_free),
        vocabulary_(file.vocabulary()) {
    if (context_ == nullptr) throw std::runtime_error("llama.cpp could not make a context");
    lookahead::examples::demo::keep_threads(context_.get(), params.n_threads);
  }

  Tokens text{};
  std::vector<double> gaps{};

  /// How far the logit of `a` lies above that of `b` behind a text whose last 64 tokens are evaluated one by one, as in
  /// plain decoding; and how far that changes when they are evaluated several at a time, as many each time or not, or
  /// when the text lies elsewhere in the cache, behind a few tokens of another sequence.
  std::pair<double, double> distance(const Tokens& text_before, Token a, Token b) {
    // It takes many passes, and several ways to decode fork at one place.
    if (text_before == latest_.text && a == latest_.a && b == latest_.b) return latest_.distance;
    Tokens of = text_before;
    // `next` gives the sizes of batches.
    const auto with = [&](std::size_t shift, auto&& next) {
      llama_memory_clear(llama_get_memory(context_.get()), false);
      for (std::size_t i = 0; i < shift; ++i) {
        llama_pos position = static_cast<llama_pos>(i);
        llama_seq_id other = 1, *others = &other;
        std::int32_t count = 1;
        llama_batch batch = {1, &of[0], nullptr, &position, &count, &others, nullptr};
        if (llama_decode(context_.get(), batch) != 0) throw std::runtime_error("llama_decode failed");
      }
      std::size_t done = of.size() - std::min<std::size_t>(64, of.size());
      decode(std::span(of).first(done));
      while (done < of.size()) {
        const std::size_t rows = std::min<std::size_t>(next(), of.size() - done);
        decode(std::span(of).subspan(done, rows));
        done += rows;
      }
      const float* const logits = llama_get_logits_ith(context_.get(), -1);
      return double{logits[a]} - double{logits[b]};
    };
    const auto single = [] { return std::size_t{1}; };
    const double alone = with(0, single);
    double change = 0;
    for (const std::size_t rows : {2U, 3U, 4U, 5U, 6U, 7U, 8U, 10U, 12U, 16U, 20U, 24U, 32U, 48U, 64U})
      change = std::max(change, std::abs(with(0, [&] { return rows; }) - alone));
    for (const std::size_t shift : {1U, 2U, 3U, 5U, 7U, 9U, 11U, 13U})
      change = std::max(change, std::abs(with(shift, single) - alone));
    std::mt19937 random(1);
    for (int i = 0; i < 24; ++i)
      change = std::max(change, std::abs(with(0, [&] { return std::size_t{1} + random() % 12; }) - alone));
    latest_ = {text_before, a, b, {alone, change}};
    return latest_.distance;
  }

  /// The logits behind a text whose last token is evaluated alone. Valid until the next call.
  std::span<const float> logits_behind(Tokens of) {
    llama_memory_clear(llama_get_memory(context_.get()), false);
    decode(std::span(of).first(of.size() - 1));
    decode(std::span(of).last(1));
    return {llama_get_logits_ith(context_.get(), -1), static_cast<std::size_t>(llama_vocab_n_tokens(vocabulary_))};
  }

  double run(Tokens prompt, std::size_t tokens) {
    text.clear();
    gaps.clear();
    llama_memory_clear(llama_get_memory(context_.get()), false);
    decode(std::span(prompt).first(prompt.size() - 1));
    Token next = prompt.back();
    double seconds = 0;
    while (text.size() < tokens) {
      const auto begin = Clock::now();
      decode(std::span(&next, 1));
      next = llama_sampler_sample(sampler_.get(), context_.get(), -1);
      seconds += std::chrono::duration<double>(Clock::now() - begin).count();
      text.push_back(next);
      gaps.push_back(
          gap({llama_get_logits_ith(context_.get(), -1), static_cast<std::size_t>(llama_vocab_n_tokens(vocabulary_))}));
      if (llama_vocab_is_eog(vocabulary_, next)) break;
    }
    return seconds;
  }

 private:
  void decode(std::span<Token> tokens) {
    const std::size_t most = llama_n_batch(context_.get());
    for (std::size_t i = 0; i < tokens.size(); i += most) {
      const std::span<Token> part = tokens.subspan(i, std::min(most, tokens.size() - i));
      if (llama_decode(context_.get(), llama_batch_get_one(part.data(), static_cast<std::int32_t>(part.size()))) != 0)
        throw std::runtime_error("llama_decode failed");
    }
  }

  struct Place {
    Tokens text;
    Token a, b;
    std::pair<double, double> distance;
  };

  Place latest_{};
  std::unique_ptr<llama_context, decltype(&llama_free)> context_;
  std::unique_ptr<llama_sampler, decltype(&llama_sampler_free)> sampler_;
  const llama_vocab* vocabulary_;
};

/// How far two tokens are apart behind a text, and how far that may be off.
using Distance = std::function<std::pair<double, double>(const Tokens& of, Token a, Token b)>;

/// Our own decoding.
template <class M>
void run(lookahead::Decoder<M>& decoder, const Tokens& prompt, const Options& o, const Plain& plain,
         const Distance& distance, std::size_t prompt_index, Row& row) {
  decoder.start(prompt);
  Tokens text;
  const auto begin = Clock::now();
  const lookahead::Generation done =
      decoder.run(o.tokens, [&](std::span<const Token> block) { text.insert(text.end(), block.begin(), block.end()); });
  row.add(prompt_index, std::chrono::duration<double>(Clock::now() - begin).count(), static_cast<double>(done.tokens),
          static_cast<double>(done.steps), static_cast<double>(done.rows), plain.text.size());
  ++row.texts;
  if (text == plain.text) return;
  const auto same = std::ranges::mismatch(text, plain.text).in2;
  const auto at = static_cast<std::size_t>(same - plain.text.begin());
  if (at == std::min(text.size(), plain.text.size()))
    throw std::runtime_error("prompt " + std::to_string(prompt_index * o.every) +
                             ": a text ends where plain decoding's does not");
  Tokens before = prompt;
  before.insert(before.end(), plain.text.begin(), same);
  const auto [apart, noise] = distance(before, *same, text[at]);
  row.forks.push_back({prompt_index * o.every, at, std::max(plain.gaps[at], std::abs(apart)), noise});
}

/// The project's own CPU engine on the same file, where it can load it: its architecture is Llama's.
class OwnEngine {
 public:
  OwnEngine(const GgufFile& file, const Options& o)
      : engine_(file, {.context = o.context, .max_rows = static_cast<int>(o.rows), .threads = o.threads}) {}

  [[nodiscard]] LlamaEngine& engine() { return engine_; }

  /// The distance of two logits in llama.cpp, and by how much other logits of the two engines differ there.
  std::pair<double, double> distance(Plain& plain, const Tokens& of, Token a, Token b) {
    engine_.truncate(0);
    engine_.prefill(std::span(of).first(of.size() - 1));
    lookahead::TokenTreeStorage<Token, 1> tree;
    tree.begin(static_cast<std::int32_t>(of.size() - 1), &of.back(), 1);
    tree.want(0);
    engine_.forward(tree.view());
    const std::span<const float> own = engine_.logits(0), other = plain.logits_behind(of);
    double mean = 0, change = 0;
    for (std::size_t t = 0; t < own.size(); ++t) mean += (double{own[t]} - double{other[t]}) / double(own.size());
    for (std::size_t t = 0; t < own.size(); ++t)
      if (static_cast<Token>(t) != a && static_cast<Token>(t) != b)
        change = std::max(change, std::abs(double{own[t]} - double{other[t]} - mean));
    return {double{other[std::size_t(a)]} - double{other[std::size_t(b)]}, change};
  }

 private:
  LlamaEngine engine_;
};

std::string quoted(const std::string& word) {
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string take(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(in), {});
  std::filesystem::remove(file);
  return text;
}

/// A program of llama.cpp, for as many tokens as the others. Its steps follow from what it prints: each yields one
/// token and those that were accepted. Its last step may yield more than was asked for, which nobody counts. Its clock
/// starts behind the pass over the prompt's last token, which yields the first token that it counts; the other ways to
/// decode count that pass, so it gets `first`, the seconds of a plain pass, on top.
void run_peer(const std::string& program, const std::string& more, const std::string& prompt, const Tokens& tokens,
              const Tokenizer& tokenizer, const llama_vocab* vocabulary, const Options& o, double first, Plain& plain,
              std::size_t prompt_index, Row& row) {
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() / ("lookahead-bench-" + std::to_string(getpid()));
  const std::filesystem::path input = file.string() + ".txt", written = file.string() + ".out",
                              log = file.string() + ".log";
  std::ofstream(input, std::ios::binary) << prompt << '\n';
  // It stops behind the first step that yields more than -n tokens.
  const std::string command = quoted(o.peers + "/" + program) + " -m " + quoted(o.model) + " -f " +
                              quoted(input.string()) + " -n " + std::to_string(o.tokens - 1) + " -c " +
                              std::to_string(o.context) + " -t " + std::to_string(o.threads) + " -tb " +
                              std::to_string(o.threads) + " --temp 0 -fa off " + more;
  const int status =
      std::system((command + " >" + quoted(written.string()) + " 2>" + quoted(log.string()) + " </dev/null").c_str());
  const std::string output = take(written), messages = take(log);
  std::filesystem::remove(input);
  const auto said = [&](std::string_view key) {
    const std::size_t at = messages.rfind(key);
    if (status != 0 || at == std::string::npos)
      throw std::runtime_error(command + " did not say '" + std::string(key) + "'; it ended with status " +
                               std::to_string(status) + " and the output\n" + output + messages);
    const std::size_t digits = messages.find_first_of("0123456789", at + key.size());
    return digits == std::string::npos ? 0.0 : std::atof(messages.c_str() + digits);
  };
  const double emitted = said("n_predict"), steps = emitted - said("n_accept");
  if (emitted < 1) throw std::runtime_error(command + " generated nothing");
  const double rows = program == "llama-lookup" ? steps + said("n_drafted") : 0;
  row.add(prompt_index, first + said(" tokens in "),  // the last such line is that of decoding
          std::min(emitted, static_cast<double>(o.tokens)), steps, rows, plain.text.size());

  // It writes two line ends, the prompt and the text, control tokens by name.
  std::string expected = "\n\n";
  const auto expect = [&](Token token) {
    const std::string_view piece = tokenizer.piece(token);
    expected += piece.empty() ? llama_vocab_get_text(vocabulary, token) : piece;
    return output.starts_with(expected);
  };
  for (const Token token : tokens) expect(token);
  if (!output.starts_with(expected))
    throw std::runtime_error(command + " did not begin with the prompt: '" + output.substr(0, expected.size()) + "'");
  ++row.texts;
  const auto fork = std::ranges::find_if_not(plain.text, expect);
  if (fork == plain.text.end()) return;
  const auto at = static_cast<std::size_t>(fork - plain.text.begin());
  Tokens before = tokens;
  before.insert(before.end(), plain.text.begin(), fork);
  const std::span<const float> logits = plain.logits_behind(before);
  std::size_t second = *fork == 0 ? 1 : 0;
  for (std::size_t t = 0; t < logits.size(); ++t)
    if (static_cast<Token>(t) != *fork && logits[t] > logits[second]) second = t;
  const auto [apart, noise] = plain.distance(before, *fork, static_cast<Token>(second));
  row.forks.push_back({prompt_index * o.every, at, std::max(plain.gaps[at], std::abs(apart)), noise});
}

/// Prints one set's table. Returns how many forks are no near ties.
std::size_t measure(const std::string& set, const ModelFile& file, const Options& o) {
  std::vector<std::string> prompts = load(set, file);
  std::size_t kept = 0;
  for (std::size_t p = 0; p < prompts.size(); p += o.every) std::swap(prompts[kept++], prompts[p]);
  prompts.resize(kept);

  const Tokenizer tokenizer(file);
  llama_context_params params = LlamaCpp::default_params();
  params.n_ctx = static_cast<std::uint32_t>(o.context);
  params.n_threads = params.n_threads_batch = o.threads;
  llama_context_params two = params;
  two.n_seq_max = 2;  // see Plain::distance
  two.kv_unified = true;
  Plain plain(file, two);
  LlamaCpp engine(file.get(), params, static_cast<int>(o.rows));
  lookahead::examples::demo::keep_threads(engine.native(), o.threads);
  lookahead::DecoderOptions<Token> options;
  options.rows = o.rows;
  options.end_tokens.assign(tokenizer.eos().begin(), tokenizer.eos().end());
  lookahead::Decoder<LlamaCpp> ours(engine, options);
  options.rows = 1;
  lookahead::Decoder<LlamaCpp> single(engine, options);

  std::optional<OwnEngine> own;
  if (file.text("general.architecture") == "llama") own.emplace(GgufFile(std::filesystem::path(o.model)), o);
  std::optional<lookahead::Decoder<LlamaEngine>> own_single, own_decoder;
  if (own) {
    own_single.emplace(own->engine(), options);
    options.rows = o.rows;
    own_decoder.emplace(own->engine(), options);
  }
  const Distance of_llama = [&](const Tokens& of, Token a, Token b) { return plain.distance(of, a, b); };
  const Distance of_own = [&](const Tokens& of, Token a, Token b) { return own->distance(plain, of, a, b); };

  std::vector<Row> rows = {{.name = "plain (llama.cpp)"}, {.name = "ours, one row"}, {.name = "ours"}};
  const std::size_t ours_row = 2;
  const std::size_t own_row = rows.size();
  if (own) {
    rows.push_back({.name = "our engine, plain"});
    rows.push_back({.name = "our engine"});
  }
  const std::size_t peer_row = rows.size();
  if (!o.peers.empty()) {
    if (o.lookahead) rows.push_back({.name = "llama-lookahead"});
    for (const int draft : o.drafts) rows.push_back({.name = "llama-lookup, draft " + std::to_string(draft)});
  }
  // The first pass reads the weights from the disk, which is charged to nobody.
  plain.run(tokenizer.encode(prompts[0], tokenizer.add_bos(), true), 1);
  double plain_tokens = 0;
  for (std::size_t p = 0; p < prompts.size(); ++p) {
    const std::string& prompt = prompts[p];
    const Tokens tokens = tokenizer.encode(prompt, tokenizer.add_bos(), true);
    for (std::size_t round = 0; round < o.rounds; ++round) {
      const double seconds = plain.run(tokens, o.tokens);
      const auto count = static_cast<double>(plain.text.size());
      rows[0].add(p, seconds, count, count, count, plain.text.size());
      if (round == 0) plain_tokens += count;
      run(single, tokens, o, plain, of_llama, p, rows[1]);
      run(ours, tokens, o, plain, of_llama, p, rows[ours_row]);
      if (own) {
        run(*own_single, tokens, o, plain, of_own, p, rows[own_row]);
        run(*own_decoder, tokens, o, plain, of_own, p, rows[own_row + 1]);
      }
      if (o.peers.empty()) continue;
      const auto peer = [&](const std::string& program, const std::string& more, Row& row) {
        run_peer(program, more, prompt, tokens, tokenizer, file.vocabulary(), o, seconds / count, plain, p, row);
      };
      if (o.lookahead) peer("llama-lookahead", "", rows[peer_row]);
      for (std::size_t d = 0; d < o.drafts.size(); ++d)
        peer("llama-lookup", "--spec-draft-n-max " + std::to_string(o.drafts[d]), rows[peer_row + o.lookahead + d]);
    }
  }
  std::printf("\n%s: %zu prompts, at most %zu tokens each\n%-24s %11s %10s %9s  %-19s  %-19s  %s\n", set.c_str(),
              prompts.size(), o.tokens, "", "tokens/step", "rows/step", "tokens/s", "of plain (95%)", "ours is (95%)",
              "texts");
  for (const Row& row : rows) row.print(rows[0], plain_tokens, rows[ours_row]);
  std::size_t unexplained = 0;
  for (const Row& row : rows)
    for (const Fork& fork : row.forks) {
      std::printf(
          "%s, prompt %zu forks at token %zu: the best logits are %.4f apart, and the %s changes logits by %.4f\n",
          row.name.c_str(), fork.prompt, fork.token, fork.gap,
          row.name.starts_with("our engine") ? "engine" : "place in batch or cache", fork.noise);
      unexplained += fork.near_tie() || row.name.starts_with("llama-") ? 0 : 1;
    }
  std::fflush(stdout);
  return unexplained;
}

/// A copy of a model with all matrices in F16, by llama.cpp's own conversion; it goes when the run ends.
class F16Copy {
 public:
  explicit F16Copy(const std::string& model)
      : path_(std::filesystem::temp_directory_path() / ("lookahead-bench-" + std::to_string(getpid()) + ".gguf")) {
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype = LLAMA_FTYPE_MOSTLY_F16;
    params.allow_requantize = true;
    if (llama_model_quantize(model.c_str(), path_.c_str(), &params) != 0)
      throw std::runtime_error("llama.cpp could not convert " + model + " to " + path_.string());
  }
  F16Copy(const F16Copy&) = delete;
  F16Copy& operator=(const F16Copy&) = delete;
  ~F16Copy() {
    std::error_code none;
    std::filesystem::remove(path_, none);
  }
  [[nodiscard]] std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

double load_average() {
  double average = 0;
  return getloadavg(&average, 1) == 1 ? average : -1;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app(
      "Lookahead decoding on llama.cpp beside llama.cpp's own plain decoding, lookahead and lookup; run it in the root "
      "of the repository. Decoding alone is timed. llama-lookahead does not say how many rows it evaluates.");
  app.option_defaults()->always_capture_default();
  app.add_option("--model", o.model, "A GGUF file, for example the one of examples/models/fetch.sh")->required();
  app.add_flag("--f16", o.f16, "Converts the model to F16 first, into a temporary file");
  app.add_option("--peers", o.peers,
                 "Folder of llama-lookahead and llama-lookup: bin/ of what "
                 "examples/fetch_llama_cpp.sh --peers prints; without it they are left out");
  app.add_flag("!--without-lookahead", o.lookahead, "Leaves out llama-lookahead, which takes half of the time");
  app.add_option("--sets", o.sets,
                 "code, docs, long (six of docs), humaneval, all raw; chat (in the model's chat template)")
      ->delimiter(',')
      ->check(CLI::IsMember({"code", "docs", "long", "humaneval", "chat"}));
  app.add_option("--drafts", o.drafts, "Draft lengths of llama-lookup")->delimiter(',')->check(CLI::Range(1, 64));
  app.add_option("--tokens", o.tokens, "Most tokens for each prompt")->check(CLI::PositiveNumber);
  app.add_option("--every", o.every, "Take every so many-th prompt of a set")->check(CLI::PositiveNumber);
  app.add_option("--rounds", o.rounds, "Rounds, interleaved; the median time of each prompt counts")
      ->check(CLI::PositiveNumber);
  app.add_option("--rows", o.rows, "Most rows of a step of ours")->check(CLI::Range(2, 184));
  app.add_option("--threads", o.threads, "Threads")->check(CLI::Range(1, 256));
  app.add_option("--context", o.context, "Longest context in tokens")->check(CLI::Range(64, 1 << 20));
  CLI11_PARSE(app, argc, argv);
  try {
    lookahead::examples::demo::be_quiet();
    std::optional<F16Copy> copy;
    if (o.f16) o.model = copy.emplace(o.model).path();
    const ModelFile file(o.model);
    std::array<char, 128> about{};
    llama_model_desc(file.get(), about.data(), about.size());
    std::printf("%s, llama.cpp %s without flash attention, %d threads, load average %.1f\n", about.data(),
                llama_version(), o.threads, load_average());
    std::size_t unexplained = 0;
    for (const std::string& set : o.sets) unexplained += measure(set, file, o);
    std::printf("\nload average %.1f at the end\n", load_average());
    if (unexplained > 0)
      throw std::runtime_error(std::to_string(unexplained) + " texts are neither identical nor near ties");
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "llama_cpp: %s\n", error.what());
    return 1;
  }
}
