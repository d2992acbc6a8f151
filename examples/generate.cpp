// Completes a prompt by lookahead decoding, shows the text as it is accepted, decodes plainly for comparison, and says
// what the difference was. `generate --help` lists the options.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <istream>
#include <nlohmann/json.hpp>
#include <optional>
#include <poll.h>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <unistd.h>
#include <variant>
#include <vector>

#include "lookahead/lookahead.hpp"

#ifndef LOOKAHEAD_DEMO_ENGINE  // llama_cpp_generate.cpp and torch_generate.cpp bring others
#define LOOKAHEAD_DEMO_ENGINE "engine_demo.hpp"
#endif
#include LOOKAHEAD_DEMO_ENGINE

namespace {

using lookahead::examples::demo::chat_tokens;
using lookahead::examples::demo::Engine;
using lookahead::examples::demo::ModelFile;
using lookahead::examples::demo::Tokenizer;
using Token = Engine::token_type;
using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

// The most that --window, --ngram and --guesses can ask for.
constexpr int max_window = 15, max_ngram = 5, max_guesses = 15;

using Sampler = lookahead::SampleVerify<Token, lookahead::RepetitionPenalty>;
using LogProbs = lookahead::LogProbs<Sampler>;

// What the options ask for and no more: each has its price.
struct Policy {
  std::variant<lookahead::GreedyVerify, Sampler, LogProbs> choice{};

  void observe(std::size_t position, std::span<const Token> tokens) {
    std::visit(
        [&](auto& policy) {
          if constexpr (lookahead::ObservingPolicy<decltype(policy), Token>) policy.observe(position, tokens);
        },
        choice);
  }
  Token select(Engine& model, int row, std::int64_t position) {
    return std::visit([&](auto& policy) { return policy.select(model, row, position); }, choice);
  }
};

using Decoder = lookahead::Decoder<Engine, max_window, max_ngram, max_guesses, Policy>;
constexpr int max_rows = Decoder::Step::max_rows;

constexpr const char* default_prompt = "def encode(text, encoding=\"utf-8\"):\n    \"\"\"";
constexpr const char* default_question = "What is a hash table, and what is it good for?";

enum Exit { success = 0, differs = 1, failure = 2 };

struct Options {
  std::optional<std::string> prompt, prompt_file, pool, cost;
  lookahead::examples::demo::ModelOptions model{};
  std::string shape = "growth";
  std::size_t max_tokens = 256;
  int context = 0, threads = 0;
  std::optional<int> window, ngram, guesses, rows;
  std::uint64_t seed = 0;
  lookahead::SampleOptions sampling{.temperature = 0};
  float repeat_penalty = 1;
  std::vector<std::string> stops;
  std::optional<std::size_t> logprobs;
  bool raw = false, ignore_eos = false, plain = false, json = false;
};

// A range whose error also says what to do about it.
CLI::Validator between(int low, int high, const char* constant) {
  const CLI::Range range(low, high);
  const std::string remedy =
      std::string("; for more, raise ") + constant + " in examples/generate.cpp and build it again";
  return {[=](std::string& value) {
            const std::string error = range(value);
            return error.empty() ? error : error + remedy;
          },
          std::to_string(low) + " to " + std::to_string(high)};
}

// CLI11 alone takes -1 and what is too large for the largest number.
const CLI::Validator whole_number(
    [](std::string& value) {
      std::uint64_t number = 0;
      const char* end = value.data() + value.size();
      const auto [rest, error] = std::from_chars(value.data(), end, number);
      return error == std::errc() && rest == end ? std::string() : value + " is no number from 0 to 2^64 - 1";
    },
    "");

const CLI::Validator not_empty(
    [](std::string& value) {
      return value.empty() ? "an empty string would end every text at once; leave it out" : std::string();
    },
    "");

void declare_options(CLI::App& app, Options& o) {
  auto* prompt =
      app.add_option("prompt,--prompt", o.prompt, "Text to complete; by default standard input, if it is redirected");
  app.add_option("--prompt-file", o.prompt_file, "File with the text to complete, taken without its last newline")
      ->excludes(prompt);
  app.add_flag("--raw", o.raw, "Complete the prompt as it is, also where the model has a chat template");
  o.model.declare(app);
  app.add_option("--max-tokens", o.max_tokens, "Most tokens to generate")->check(whole_number)->capture_default_str();
  app.add_option("--context", o.context, "Longest context in tokens; 0: the model's")
      ->check(whole_number)
      ->capture_default_str();
  app.add_option("--threads", o.threads, "Threads; 0: as many as the machine has")
      ->check(whole_number)
      ->capture_default_str();
  auto* temperature =
      app.add_option("--temperature", o.sampling.temperature, "Divides the logits; 0: greedy")->capture_default_str();
  app.add_option("--top-k", o.sampling.top_k, "Only the best tokens, so many; 0: all")
      ->check(whole_number)
      ->needs(temperature)
      ->capture_default_str();
  app.add_option("--top-p", o.sampling.top_p, "Only the fewest best tokens that have this probability; 1: all")
      ->needs(temperature)
      ->capture_default_str();
  app.add_option("--min-p", o.sampling.min_p, "Only tokens with this share of the best one's probability; 0: all")
      ->needs(temperature)
      ->capture_default_str();
  app.add_option("--sample-seed", o.sampling.seed, "Same seed, same text")
      ->check(whole_number)
      ->needs(temperature)
      ->capture_default_str();
  app.add_option("--repeat-penalty", o.repeat_penalty,
                 "Makes tokens less likely that are among the last 64; 1: no penalty")
      ->capture_default_str();
  app.add_option("--stop", o.stops, "Ends the text in front of this string; may be given several times")
      ->check(not_empty)
      ->allow_extra_args(false);
  app.add_option("--logprobs", o.logprobs, "Lists each token's log-probability and so many alternatives")
      ->check(whole_number);
  app.add_flag("--ignore-eos", o.ignore_eos, "Go on when the model ends its text");
  app.add_option("--shape", o.shape, "growth (rows by their chances) or published (the original method)")
      ->check(CLI::IsMember({"growth", "published"}))
      ->capture_default_str();
  app.add_option("--window", o.window, "Columns of the window; default: growth 0, published 15")
      ->check(between(0, max_window, "max_window"));
  app.add_option("--ngram", o.ngram, "Tokens of an n-gram; default: 5")->check(between(2, max_ngram, "max_ngram"));
  app.add_option("--guesses", o.guesses, "Guesses of a published step; 0 also stops growth; default: 15")
      ->check(between(0, max_guesses, "max_guesses"));
  app.add_option(
         "--rows", o.rows,
         "Gives each forward pass as many rows as it can use, at most so many; default: as many as pay, by what "
         "passes are measured to cost (published: all)")
      ->check(between(1, max_rows, "max_window or max_guesses"))
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option(
      "--cost", o.cost,
      "Gives each forward pass as many rows as pay by this file: a JSON array of the times of a pass of 1, 2, "
      "3, ... rows, whole numbers of any unit");
  app.add_option("--seed", o.seed, "Picks the first guesses of a window, never the text")
      ->check(whole_number)
      ->capture_default_str();
  app.add_option("--pool", o.pool, "Starts with the n-grams of this file, which build_pool wrote");
  app.add_flag("--plain", o.plain, "Plain decoding only, one row a forward pass, whatever the shape");
  app.add_flag("--json", o.json,
               "Print one JSON object and nothing else; expected_per_step is null where no rows are chosen by their "
               "chances");
}

std::string read_prompt(std::istream& in, const std::string& name) {
  constexpr std::size_t most = std::size_t{1} << 22;
  std::string text(most + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (in.bad()) throw std::runtime_error(name + " cannot be read; pass a text file");
  text.resize(static_cast<std::size_t>(in.gcount()));
  if (text.size() > most)
    throw std::runtime_error(name + " holds more than the " + std::to_string(most) +
                             " bytes that a prompt may have; shorten it");
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

lookahead::StepCost cost_from(const std::string& name) {
  std::ifstream in(name, std::ios::binary);
  if (!in) throw std::runtime_error(name + " cannot be opened; check the path of --cost");
  const Json table = Json::parse(in, nullptr, false);
  const bool numbers = table.is_array() && std::ranges::all_of(table, [](const Json& time) {
                         return time.is_number_unsigned() && time < lookahead::StepCost::time_limit;
                       });
  if (!numbers)
    throw std::runtime_error(name + " is no table of costs; --cost takes a JSON array of whole numbers from 1 to " +
                             std::to_string(lookahead::StepCost::time_limit - 1) + ", [100, 104, 107] for example");
  return lookahead::StepCost::given(table);
}

// Nothing where nobody gave one.
std::optional<std::string> prompt_of(const Options& o) {
  if (o.prompt) return *o.prompt;
  if (o.prompt_file) {
    std::ifstream in(*o.prompt_file, std::ios::binary);
    if (!in) throw std::runtime_error(*o.prompt_file + " cannot be opened; check the path of --prompt-file");
    return read_prompt(in, *o.prompt_file);
  }
  if (isatty(STDIN_FILENO) != 0) return std::nullopt;
  pollfd input{STDIN_FILENO, POLLIN, 0};
  if (poll(&input, 1, 1000) == 0) std::cerr << "generate: waiting for a prompt on standard input\n";
  std::string text = read_prompt(std::cin, "standard input");
  if (text.empty()) return std::nullopt;
  return text;
}

// UTF-8 in which what is none is replaced, and so are control characters, which could drive a terminal.
std::string printable(std::string_view bytes) {
  const auto replace = Json::error_handler_t::replace;
  std::string text = Json::parse(Json(bytes).dump(-1, ' ', false, replace)).get<std::string>();
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    const bool c1 = c == 0xC2 && static_cast<unsigned char>(text[i + 1]) < 0xA0;
    if (c1) text[i + 1] = '?';
    if (c1 || c == 0x7F || (c < 0x20 && c != '\n' && c != '\t' && c != '\r' && c != '\f')) text[i] = '?';
  }
  return text;
}

void print(std::string_view text) {
  if (!(std::cout << text << std::flush))
    throw std::runtime_error("standard output cannot be written; is the disk full?");
}

// Standard output: text as it comes, in colours on a terminal.
class Screen {
 public:
  explicit Screen(bool quiet) : quiet_(quiet) {
    const char* no_color = std::getenv("NO_COLOR");
    const char* term = std::getenv("TERM");
    terminal_ = isatty(STDOUT_FILENO) != 0 && term != nullptr && std::string_view(term) != "dumb";
    colours_ = terminal_ && (no_color == nullptr || *no_color == '\0');
  }

  [[nodiscard]] bool colours() const { return colours_; }

  void write(std::string_view text) const {
    if (!quiet_) print(text);
  }

  void prompt(std::string_view text) const { write(painted("2", text)); }

  // What a forward pass yielded; `end_block` changes the colour.
  void text(std::string_view bytes) const { write(painted(even_ ? "36" : "35", bytes)); }
  void end_block() { even_ = !even_; }

  // A line that `clear_status` takes away.
  void status(std::string_view text) const {
    if (terminal_) write(text);
  }
  void clear_status() const {
    if (terminal_) write("\r\033[K");
  }

 private:
  [[nodiscard]] std::string painted(const char* colour, std::string_view bytes) const {
    const std::string text = printable(bytes);
    return colours_ && !text.empty() ? std::string("\033[") + colour + "m" + text + "\033[0m" : text;
  }

  bool quiet_, terminal_ = false, colours_ = false, even_ = true;
};

struct LogProb {
  lookahead::TokenLogProb<Token> chosen;
  std::vector<lookahead::TokenLogProb<Token>> others;
  [[nodiscard]] bool operator==(const LogProb&) const = default;
};

struct Outcome {
  lookahead::Generation total;
  std::vector<Token> tokens;
  std::string text;  // what is shown: without a stop string
  std::vector<LogProb> log_probs;
  double seconds = 0;  // of decoding alone: neither the prompt nor the display

  [[nodiscard]] double tokens_per_step() const { return ratio(total.tokens); }
  [[nodiscard]] double rows_per_step() const { return ratio(total.rows); }
  [[nodiscard]] double expected_per_step() const { return ratio(total.expected); }
  [[nodiscard]] double tokens_per_second() const {
    return seconds > 0 ? static_cast<double>(total.tokens) / seconds : 0;
  }

 private:
  template <class T>
  [[nodiscard]] double ratio(T sum) const {
    return total.steps > 0 ? static_cast<double>(sum) / static_cast<double>(total.steps) : 0;
  }
};

// The bytes of a token; some models have more rows of weights than tokens.
std::string_view piece(const Tokenizer& tokenizer, Token token) {
  return static_cast<std::size_t>(token) < tokenizer.vocabulary() ? tokenizer.piece(token) : std::string_view();
}

Outcome decode(Decoder& decoder, const Options& o, const Tokenizer& tokenizer, Screen& screen) {
  Outcome outcome;
  lookahead::TextStream stream([&](Token token) { return piece(tokenizer, token); },
                               [&](std::string_view bytes) {
                                 outcome.text += bytes;
                                 screen.text(bytes);
                               },
                               o.stops);
  struct Sink {
    decltype(stream)& text;
    Outcome& outcome;
    Screen& screen;
    Clock::duration shown{};

    [[nodiscard]] lookahead::Admission admit(std::span<const Token> block) const { return text.admit(block); }
    void operator()(std::span<const Token> block) {
      const auto now = Clock::now();
      outcome.tokens.insert(outcome.tokens.end(), block.begin(), block.end());
      text(block);
      screen.end_block();
      shown += Clock::now() - now;
    }
  } sink{stream, outcome, screen};
  const auto begin = Clock::now();
  outcome.total = decoder.run(o.max_tokens, sink);
  outcome.seconds = std::chrono::duration<double>(Clock::now() - begin - sink.shown).count();
  stream.finish();
  if (const auto* records = std::get_if<LogProbs>(&decoder.verify().choice)) {
    for (std::size_t i = decoder.text().size() - outcome.tokens.size(); i < decoder.text().size(); ++i) {
      const auto others = records->alternatives(i);
      outcome.log_probs.push_back({records->at(i), {others.begin(), others.end()}});
    }
  }
  return outcome;
}

Policy policy_of(const Options& o) {
  const Sampler sampler(o.sampling, lookahead::RepetitionPenalty({.penalty = o.repeat_penalty}));
  if (o.logprobs) return {LogProbs(sampler, *o.logprobs)};
  if (o.sampling.temperature > 0 || o.repeat_penalty != 1) return {sampler};
  return {};
}

std::string fixed(double value, int decimals) {
  std::array<char, 64> text;
  std::snprintf(text.data(), text.size(), "%.*f", decimals, value);
  return text.data();
}

std::string row(const char* name, const std::string& first, const std::string& second = "") {
  std::array<char, 128> text;
  std::snprintf(text.data(), text.size(), "%-16s%11s%11s", name, first.c_str(), second.c_str());
  std::string line = text.data();
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

// A token in quotation marks, as JSON writes it.
std::string quoted(const Tokenizer& tokenizer, Token token) {
  return printable(Json(piece(tokenizer, token)).dump(-1, ' ', false, Json::error_handler_t::replace));
}

// A line a token: its log-probability, and the alternatives.
std::string list(const std::vector<LogProb>& log_probs, const Tokenizer& tokenizer) {
  std::string lines;
  for (const LogProb& token : log_probs) {
    lines += fixed(token.chosen.log_prob, 4) + "  " + quoted(tokenizer, token.chosen.token);
    for (const auto& other : token.others)
      lines += "    " + fixed(other.log_prob, 4) + " " + quoted(tokenizer, other.token);
    lines += "\n";
  }
  return lines + "\n";
}

Json object(const std::vector<LogProb>& log_probs, const Tokenizer& tokenizer) {
  const auto one = [&](const lookahead::TokenLogProb<Token>& x) {
    return Json{{"token", piece(tokenizer, x.token)}, {"log_prob", x.log_prob}};
  };
  Json all = Json::array();
  for (const LogProb& token : log_probs) {
    all.push_back(one(token.chosen));
    Json& top = all.back()["top"] = Json::array();
    for (const auto& other : token.others) top.push_back(one(other));
  }
  return all;
}

// What ends a text through the demo's sink is a stop string.
const char* stop_name(lookahead::StopReason stop) {
  return stop == lookahead::StopReason::sink ? "stop_string" : name(stop);
}

int run(const Options& o) {
  const Policy policy = policy_of(o);
  const std::optional<std::string> given = prompt_of(o);
  const ModelFile file = o.model.open();
  const Tokenizer tokenizer(file);

  const bool chat = !o.raw && file.text("tokenizer.chat_template");
  const std::string prompt = given.value_or(chat ? default_question : default_prompt);
  const std::vector<Token> tokens =
      chat ? chat_tokens(file, tokenizer, prompt) : tokenizer.encode(prompt, tokenizer.add_bos() || prompt.empty());
  Decoder::Options plain_options;
  plain_options.shape.w = plain_options.shape.g = 0;
  plain_options.rows = 1;
  if (!o.ignore_eos) plain_options.end_tokens.assign(tokenizer.eos().begin(), tokenizer.eos().end());

  Decoder::Options options = plain_options;
  if (!o.plain) {
    const bool published = o.shape == "published";
    options.shape = published ? lookahead::Shape::published() : lookahead::Shape{};
    options.shape.w = o.window.value_or(published ? max_window : 0);
    options.shape.n = o.ngram.value_or(max_ngram);
    options.shape.g = o.guesses.value_or(max_guesses);
    options.rows = static_cast<std::size_t>(o.rows.value_or(max_rows));
    if (o.cost)
      options.cost = cost_from(*o.cost);
    else if (o.rows)
      options.cost = lookahead::StepCost::none();
    options.seed = o.seed;
    options.keep_pool = o.pool.has_value();
  }

  const std::string about = printable(o.model.describe(file)) + "\n";
  Engine model = o.model.engine(file, o.context, o.threads, options.rows);
  using Pool = lookahead::NGramPool<Token>;
  Decoder decoder = options.keep_pool
                        ? Decoder(model, options, policy,
                                  lookahead::load_pool<Pool>(*o.pool, tokenizer.fingerprint(), model.vocabulary()))
                        : Decoder(model, options, policy);
  Decoder plain_decoder(model, plain_options, policy);
  // The first pass reads the weights from the disk, which is charged to neither.
  plain_decoder.generate(std::span(tokens).first(std::min<std::size_t>(1, tokens.size())), 1, [](auto) {});
  decoder.start(tokens);

  Screen screen(o.json);
  screen.prompt(chat ? prompt + "\n\n" : prompt);
  const Outcome ours = decode(decoder, o, tokenizer, screen);
  screen.write("\n\n");

  Outcome plain = ours;
  if (!o.plain) {
    screen.status("plain decoding, to compare with ...");
    plain_decoder.start(tokens);
    Screen none(true);
    plain = decode(plain_decoder, o, tokenizer, none);
    screen.clear_status();
  }

  const bool identical = ours.tokens == plain.tokens && ours.total.stop == plain.total.stop &&
                         ours.text == plain.text && ours.log_probs == plain.log_probs;
  const double speedup = plain.tokens.empty() ? 1 : ours.tokens_per_second() / plain.tokens_per_second();
  if (o.json) {
    const bool grows = !o.plain && options.shape.mode == lookahead::ShapeMode::growth && options.shape.g > 0;
    Json result = {{"tokens", ours.total.tokens},
                   {"steps", ours.total.steps},
                   {"tokens_per_step", ours.tokens_per_step()},
                   {"rows_per_step", ours.rows_per_step()},
                   {"expected_per_step", grows ? Json(ours.expected_per_step()) : Json()},
                   {"tokens_per_second", ours.tokens_per_second()},
                   {"plain_tokens_per_second", plain.tokens_per_second()},
                   {"speedup", speedup},
                   {"identical", identical},
                   {"stop", stop_name(ours.total.stop)},
                   {"text", ours.text}};
    if (o.logprobs) result["logprobs"] = object(ours.log_probs, tokenizer);
    print(result.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
    return identical ? success : differs;
  }

  std::string table = o.logprobs ? list(ours.log_probs, tokenizer) : "";
  table += about + (screen.colours() ? "Each change of colour is one forward pass.\n\n" : "\n");
  table += o.plain ? row("", "plain") : row("", "lookahead", "plain");
  const auto both = [&](const char* name, int decimals, auto value) {
    table += row(name, fixed(value(ours), decimals), o.plain ? "" : fixed(value(plain), decimals));
  };
  both("tokens", 0, [](const Outcome& x) { return static_cast<double>(x.total.tokens); });
  both("steps", 0, [](const Outcome& x) { return static_cast<double>(x.total.steps); });
  both("tokens per step", 2, [](const Outcome& x) { return x.tokens_per_step(); });
  both("rows per step", 2, [](const Outcome& x) { return x.rows_per_step(); });
  both("tokens/s", 0, [](const Outcome& x) { return x.tokens_per_second(); });
  if (!o.plain) {
    table += row("speed-up", fixed(speedup, 2));
    table += row("identical", identical ? "yes" : "no");
  }
  if (ours.total.stop != lookahead::StopReason::max_tokens) table += row("stop", stop_name(ours.total.stop));
  screen.write(table);
  return identical ? success : differs;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Completes a text with several tokens per forward pass, and compares with plain decoding.");
  app.footer(
      "Exit status: 0 the text equals plain decoding's, 1 it differs, 2 it could not be made (standard error says "
      "why).");
  Options options;
  declare_options(app, options);
  try {
    app.parse(argc, argv);
    return run(options);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? success : failure;
  } catch (const std::exception& error) {
    std::cerr << "generate: " << error.what() << "\n";
    return failure;
  }
}
