// The demo and the smallest adapter, run as a user runs them.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <doctest/doctest.h>
#include <filesystem>
#include <initializer_list>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <sys/wait.h>
#include <vector>

#include "engines/gguf.hpp"
#include "engines/llama_engine.hpp"
#include "engines/tokenizer.hpp"
#include "files.hpp"
#include "tiny_llama.hpp"

#include "lookahead/testing/plain_decode.hpp"

namespace fs = std::filesystem;
using namespace lookahead;
using nlohmann::json;
using testing::content;

namespace {

const fs::path root = fs::current_path();
const fs::path bundled = root / "examples/models/cpython-6m-q8_0.gguf";
const std::string code = "def mean(data):\n    \"\"\"";

const testing::TempFolder folder;

std::string quoted(const std::string& argument) {
  std::string text = "'";
  for (const char c : argument) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

struct Ran {
  int status;
  std::string out, err;
};

// Runs a command of the shell in a folder of its own.
Ran shell(const std::string& command, std::string_view input = "") {
  folder.file("in", input);
  const std::string script = "cd " + quoted(folder.path) + " && { " + command + "; } <in >out 2>err";
  const int status = std::system(script.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, content(folder.path / "out"), content(folder.path / "err")};
}

std::string generate(const std::vector<std::string>& arguments) {
  std::string command = quoted(LOOKAHEAD_GENERATE);
  for (const std::string& argument : arguments) (command += ' ') += quoted(argument);
  return command;
}

// The object that --json prints, alone on standard output.
json object(const Ran& ran) {
  INFO(ran.err);
  REQUIRE(ran.status == 0);
  CHECK(ran.err.empty());
  REQUIRE(ran.out.find('\n') == ran.out.size() - 1);
  return json::parse(ran.out);
}

json generate_json(std::vector<std::string> arguments, std::string_view input = "") {
  arguments.insert(arguments.begin(), "--json");
  return object(shell(generate(arguments), input));
}

std::string plain_text(const fs::path& path, const std::string& prompt, std::size_t max_tokens) {
  const engines::GgufFile file(path);
  const engines::Tokenizer tokenizer(file);
  engines::LlamaEngine model(file);
  std::string text;
  for (const std::int32_t token :
       testing::plain_decode(model, std::span<const std::int32_t>(tokenizer.encode(prompt, tokenizer.add_bos())),
                             max_tokens, tokenizer.eos()))
    text += tokenizer.piece(token);
  return text;
}

std::string tiny_model() { return folder.file("tiny.gguf", testing::tiny_llama({})); }

// The block of README.md that shows the demo's output.
std::string shown_output() {
  const std::string readme = content(root / "README.md");
  const std::size_t row = readme.find("\ntokens per step ");
  REQUIRE(row != std::string::npos);
  const std::size_t begin = readme.rfind("\n```\n", row) + 5;
  return readme.substr(begin, readme.find("\n```\n", row) + 1 - begin);
}

// What the table's rows are called.
std::vector<std::string> row_names(const std::string& output) {
  std::vector<std::string> names;
  std::istringstream lines(output.substr(output.find("lookahead      plain\n")));
  std::string line;
  for (std::getline(lines, line); std::getline(lines, line);) names.push_back(line.substr(0, line.find("  ")));
  return names;
}

void refused(const Ran& ran, std::initializer_list<const char*> words) {
  CAPTURE(ran.err);
  CHECK(ran.status == 2);
  CHECK(ran.out.empty());
  for (const char* word : words) CHECK_MESSAGE(ran.err.find(word) != std::string::npos, word);
}

}  // namespace

TEST_CASE("every shape gives the text of plain decoding, and an account that adds up") {
  const std::string text = plain_text(bundled, code, 60);
  struct Case {
    std::vector<std::string> options;
    double fewest_tokens_per_step, most_rows;
    bool grows = true;
  };
  const std::vector<Case> cases = {
      {{}, 1, 64},  // as many rows as pay, which depends on the machine
      {{"--rows", "4"}, 1.2, 4},
      {{"--rows", "1"}, 1, 1},
      {{"--plain"}, 1, 1, false},
      {{"--plain", "--shape", "published", "--rows", "50"}, 1, 1, false},
      {{"--shape", "published"}, 1.2, 153, false},
      {{"--shape", "published", "--window", "5", "--guesses", "3", "--ngram", "3"}, 1, 16, false},
      {{"--window", "7", "--ngram", "4", "--rows", "64"}, 1.5, 64},
      {{"--window", "5", "--ngram", "2", "--guesses", "0"}, 1, 9, false},
      {{"--window", "0", "--guesses", "0"}, 1, 1, false},
      {{"--window", "3", "--rows", "16", "--seed", "18446744073709551615"}, 1.2, 16},
      {{"--threads", "1", "--context", "200"}, 1, 64}};
  for (Case c : cases) {
    CAPTURE(json(c.options).dump());
    c.options.insert(c.options.end(), {"--max-tokens", "60", code});
    const json o = generate_json(c.options);
    CHECK(o.size() == 11);
    CHECK(o.at("text") == text);
    CHECK(o.at("identical") == true);
    CHECK(o.at("tokens") == 60);
    CHECK(o.at("stop") == "max_tokens");
    CHECK(o.at("tokens_per_step") == doctest::Approx(60.0 / o.at("steps").get<double>()));
    CHECK(o.at("tokens_per_step") >= c.fewest_tokens_per_step);
    CHECK(o.at("rows_per_step") >= 1);
    CHECK(o.at("rows_per_step") <= c.most_rows);
    CHECK(o.at("expected_per_step").is_null() != c.grows);
    if (c.grows) CHECK(o.at("expected_per_step") >= 1);
    CHECK(o.at("tokens_per_second") > 0);
    CHECK(o.at("speedup") ==
          doctest::Approx(o.at("tokens_per_second").get<double>() / o.at("plain_tokens_per_second").get<double>()));
  }
}

TEST_CASE("each option of a step changes the steps, and the same options give the same ones again") {
  const auto steps = [](const std::string& options) {
    std::istringstream words(options);
    std::vector<std::string> arguments(std::istream_iterator<std::string>(words), {});
    arguments.insert(arguments.end(), {"--max-tokens", "30", code});
    const json o = generate_json(arguments);
    return json{o.at("steps"), o.at("rows_per_step")};
  };
  const std::string growth = "--rows 40 --window 5", published = "--shape published";
  const json grown = steps(growth), guessed = steps(published);
  CHECK(steps(growth) == grown);
  CHECK(steps(published) == guessed);
  CHECK(steps("--rows 20 --window 5") != grown);
  CHECK(steps("--rows 40 --window 3") != grown);
  CHECK(steps(published + " --window 3") != guessed);
  for (const std::string option : {" --ngram 3", " --guesses 0"}) {
    CAPTURE(option);
    CHECK(steps(growth + option) != grown);
    CHECK(steps(published + option) != guessed);
  }
  // As many rows as pay by a table; no more than it has.
  folder.file("flat.json", "[100, 100, 100]\n");
  folder.file("steep.json", "[100, 1000]");
  const json cheap = steps("--cost flat.json"), dear = steps("--cost steep.json");
  CHECK(steps("--cost flat.json") == cheap);
  CHECK(cheap[1] > 1.5);
  CHECK(cheap[1] <= 3);
  CHECK(dear[1] == 1);
  bool seeds_differ = false;
  for (const char* seed : {" --seed 1", " --seed 2", " --seed 3"})
    seeds_differ = seeds_differ || steps(published + seed) != guessed;
  CHECK(seeds_differ);
}

TEST_CASE("the prompt comes from an argument, a file or standard input") {
  const std::string ends = "x = [1, 2]\n\n";
  const auto text = [](std::vector<std::string> arguments, std::string_view input = "") {
    arguments.insert(arguments.begin(), {"--max-tokens", "12"});
    return generate_json(arguments, input).at("text").get<std::string>();
  };
  const std::string expected = plain_text(bundled, ends, 12);
  REQUIRE(expected != plain_text(bundled, ends.substr(0, ends.size() - 1), 12));
  CHECK(text({ends}) == expected);
  CHECK(text({"--prompt", ends}) == expected);
  CHECK(text({"--prompt-file", folder.file("prompt", ends + "\n")}) == expected);
  CHECK(text({"--prompt-file", "prompt"}) == expected);
  CHECK(text({}, ends + "\n") == expected);
  CHECK(text({"--", "-1"}) == plain_text(bundled, "-1", 12));
  CHECK(text({""}) == plain_text(bundled, "", 12));
  CHECK(text({}) != text({""}));  // nothing on standard input: a prompt of the demo's own
  CHECK(text({}).size() > 12);
}

TEST_CASE("texts end for one of three reasons") {
  CHECK(generate_json({"--max-tokens", "0", code}).at("tokens") == 0);
  const json full = generate_json({"--context", "20", "--max-tokens", "18446744073709551615", code});
  CHECK(full.at("stop") == "out_of_room");
  CHECK(full.at("identical") == true);

  // A model for which a token of that text is the end.
  const std::string text = generate_json({"--max-tokens", "40", code}).at("text");
  std::string image = content(bundled);
  const engines::Tokenizer tokenizer{engines::GgufFile(bundled)};
  const std::int32_t end = tokenizer.encode(text, false).at(20);
  const std::string key = "tokenizer.ggml.eos_token_id";
  const std::size_t at = image.find(key);
  REQUIRE(at != std::string::npos);
  for (std::size_t i = 0; i < 4; ++i) image[at + key.size() + 4 + i] = static_cast<char>(end >> (8 * i) & 0xFF);
  const std::string model = folder.file("ends.gguf", image);
  const json ended = generate_json({"--model", model, "--max-tokens", "40", code});
  CHECK(ended.at("stop") == "end_token");
  CHECK(ended.at("tokens") <= 21);
  CHECK(ended.at("text") == plain_text(model, code, 40));
  const json ignored = generate_json({"--model", model, "--max-tokens", "40", "--ignore-eos", code});
  CHECK(ignored.at("stop") == "max_tokens");
  CHECK(ignored.at("text") == text);
}

TEST_CASE("sampled, penalised, stopped: the plain run does the same") {
  const auto options = [](const std::vector<std::string>& more) {
    std::vector<std::string> all = {"--max-tokens", "40", code};
    all.insert(all.begin(), more.begin(), more.end());
    return generate_json(all);
  };
  const std::string greedy = options({}).at("text");
  const std::vector<std::string> sampled = {"--temperature", "0.9",  "--top-k",       "50", "--top-p",          "0.95",
                                            "--min-p",       "0.01", "--sample-seed", "5",  "--repeat-penalty", "1.1"};
  const json once = options(sampled);
  CHECK(once.at("identical") == true);
  CHECK(once.at("text") != greedy);
  CHECK(options(sampled).at("text") == once.at("text"));
  CHECK(options({"--temperature", "0.9", "--sample-seed", "6"}).at("text") !=
        options({"--temperature", "0.9", "--sample-seed", "7"}).at("text"));
  CHECK(options({"--temperature", "0"}).at("text") == greedy);
  // Each way to leave the best token alone makes the text greedy.
  const json hot = options({"--temperature", "2"});
  CHECK(hot.at("identical") == true);
  CHECK(hot.at("text") != greedy);
  CHECK(options({"--temperature", "2", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--sample-seed", "0"})
            .at("text") == hot.at("text"));
  for (const std::vector<std::string>& one :
       {std::vector<std::string>{"--top-k", "1"}, {"--top-p", "1e-6"}, {"--min-p", "1"}}) {
    const json o = options({"--temperature", "2", one[0], one[1]});
    CAPTURE(one[0]);
    CHECK(o.at("identical") == true);
    CHECK(o.at("text") == greedy);
  }
  // Milder values change the text.
  for (const std::vector<std::string>& one :
       {std::vector<std::string>{"--top-k", "3"}, {"--top-p", "0.5"}, {"--min-p", "0.2"}}) {
    const json o = options({"--temperature", "2", one[0], one[1]});
    CAPTURE(one[0]);
    CHECK(o.at("identical") == true);
    CHECK(o.at("text") != greedy);
    CHECK(o.at("text") != hot.at("text"));
  }
  CHECK(options({"--repeat-penalty", "1.5"}).at("text") != greedy);

  // Every way to stop the greedy text, also inside a token.
  for (std::size_t at = 1; at + 3 < greedy.size(); at += 7) {
    const std::string stop = greedy.substr(at, 3);
    const json o = options({"--stop", "never said", "--stop", stop});
    CAPTURE(stop);
    CHECK(o.at("identical") == true);
    CHECK(o.at("stop") == "stop_string");
    CHECK(o.at("text") == greedy.substr(0, greedy.find(stop)));
  }
  const json never = options({"--stop", "never said"});
  CHECK(never.at("stop") == "max_tokens");
  CHECK(never.at("text") == greedy);
}

TEST_CASE("log-probabilities are listed for each token") {
  const json o = generate_json({"--max-tokens", "20", "--logprobs", "3", code});
  CHECK(o.at("identical") == true);
  REQUIRE(o.at("logprobs").size() == 20);
  std::string text;
  for (const json& token : o.at("logprobs")) {
    text += token.at("token");
    REQUIRE(token.at("top").size() == 3);
    CHECK(token.at("top").at(0).at("token") == token.at("token"));
    CHECK(token.at("top").at(0).at("log_prob") == token.at("log_prob"));
    CHECK(token.at("log_prob") < 0);
    CHECK(token.at("top").at(2).at("log_prob") <= token.at("top").at(1).at("log_prob"));
  }
  CHECK(text == o.at("text"));
  const Ran ran = shell(generate({"--max-tokens", "2", "--logprobs", "0", code}));
  CHECK(ran.status == 0);
  CHECK(ran.out.find("\n\n-") != std::string::npos);
}

TEST_CASE("text that is not UTF-8 harms neither JSON nor the screen") {
  const std::string model = tiny_model(), prompt = "\xff\x1b[2J\xc2\x9b\xe2\x82";
  const std::string raw = plain_text(model, prompt, 100);
  REQUIRE_THROWS(json(raw).dump());  // not UTF-8
  const json o = generate_json({"--model", model, "--max-tokens", "100", prompt});
  CHECK(o.at("identical") == true);
  CHECK(o.at("text") == json::parse(json(raw).dump(-1, ' ', false, json::error_handler_t::replace)));

  const Ran ran = shell(generate({"--model", model, "--max-tokens", "100", prompt}));
  CHECK(ran.status == 0);
  CHECK_NOTHROW(json(ran.out).dump());
  CHECK(ran.out.starts_with("\xef\xbf\xbd?[2J??\xef\xbf\xbd"));
  CHECK(ran.out.find('\x1b') == std::string::npos);

  // A character whose bytes come in two steps appears as a whole.
  const std::string list = "names = ['\xc3\xa9', '\xe2\x82\xac', '\xc3\xa9', '\xe2\x82\xac', '\xc3\xa9', '";
  const Ran whole = shell(generate({"--plain", "--max-tokens", "30", list}));
  const std::string text = plain_text(bundled, list, 30);
  REQUIRE(text.find("\xe2\x82\xac") != std::string::npos);
  CHECK(whole.out.starts_with(list + text));
}

TEST_CASE("what people see") {
  const Ran ran = shell(generate({"--max-tokens", "40", code}));
  CHECK(ran.status == 0);
  CHECK(ran.err.empty());
  CHECK(ran.out.starts_with(code + plain_text(bundled, code, 40) + "\n\ncpython-6m, 5.8 million parameters"));
  for (const char* line : {"\ntokens                   40         40\n", "\nsteps  ", "\ntokens per step  ",
                           "\nrows per step  ", "\ntokens/s  ", "\nspeed-up  ", "\nidentical               yes\n"})
    CHECK_MESSAGE(ran.out.find(line) != std::string::npos, line);
  CHECK(ran.out.find('\x1b') == std::string::npos);

  const Ran full = shell(generate({"--context", "20", code}));
  CHECK(full.out.ends_with("\nidentical               yes\nstop            out_of_room\n"));
  const Ran plain = shell(generate({"--max-tokens", "40", "--plain", code}));
  CHECK(plain.out.find("speed-up") == std::string::npos);
  CHECK(plain.out.find("\ntokens                   40\n") != std::string::npos);

  // Text comes as it is accepted: whoever reads along gets it in many pieces.
  const Ran read_along =
      shell(generate({"--plain", "--max-tokens", "200", code}) + " | LC_ALL=C dd bs=1000000 of=/dev/null");
  REQUIRE(read_along.err.starts_with("0+"));
  CHECK(std::stoi(read_along.err.substr(2)) > 10);

  const auto on_terminal = [](const std::string& environment) {
    return shell("env -u NO_COLOR TERM=xterm " + environment + " script -qec " +
                 quoted(generate({"--max-tokens", "12", code})) + " /dev/null")
        .out;
  };
  const std::string colours = on_terminal("");
  CHECK(colours.find("\x1b[36m") != std::string::npos);
  CHECK(colours.find("\x1b[35m") != std::string::npos);
  CHECK(on_terminal("NO_COLOR=1").find("\x1b[3") == std::string::npos);
  CHECK(on_terminal("TERM=dumb").find('\x1b') == std::string::npos);
}

TEST_CASE("what cannot be done is refused with value, limit and remedy") {
  const auto run = [](const std::vector<std::string>& arguments) { return shell(generate(arguments)); };
  refused(run({"--window", "16"}), {"--window", "16", "0 to 15", "raise max_window"});
  refused(run({"--ngram", "6"}), {"--ngram", "6", "2 to 5", "raise max_ngram"});
  refused(run({"--guesses", "-1"}), {"--guesses", "-1", "0 to 15"});
  refused(run({"--rows", "154"}), {"--rows", "154", "1 to 153", "raise"});
  refused(run({"--rows", "0"}), {"--rows", "0", "1 to 153"});
  refused(run({"--shape", "round"}), {"round", "growth", "published"});
  refused(run({"--max-tokens", "-4"}), {"--max-tokens", "-4", "from 0 to 2^64 - 1"});
  refused(run({"--max-tokens", "99999999999999999999"}), {"--max-tokens", "99999999999999999999"});
  refused(run({"--seed", "x"}), {"--seed", "x"});
  refused(run({"--threads", "257"}), {"threads", "257", "1 to 256"});
  refused(run({"--context", "1025"}), {"context", "1025", "1024"});
  refused(run({"--no-such-option"}), {"--no-such-option", "--help"});
  refused(run({"a", "b"}), {"b", "--help"});
  refused(run({"a", "--prompt-file", "b"}), {"--prompt-file"});
  refused(run({"--context", "2", code}), {"tokens", "2 free slots", "shorten"});

  refused(run({"--temperature", "-1"}), {"temperature", "-1", "0 or more"});
  refused(run({"--temperature", "1", "--top-p", "1.5"}), {"top_p", "1.5", "up to 1"});
  refused(run({"--temperature", "1", "--min-p", "-0.1"}), {"min_p", "-0.1", "from 0 to 1"});
  refused(run({"--temperature", "1", "--top-k", "-3"}), {"--top-k", "-3"});
  refused(run({"--top-k", "3"}), {"--top-k", "--temperature"});
  for (const char* value : {"nan", "inf"}) refused(run({"--temperature", value}), {"temperature", value, "0 or more"});
  refused(run({"--temperature", "hot"}), {"--temperature", "hot"});
  refused(run({"--temperature", "1", "--top-p", "0"}), {"top_p", "0.0", "above 0"});
  refused(run({"--temperature", "1", "--top-p", "nan"}), {"top_p", "nan", "up to 1"});
  refused(run({"--temperature", "1", "--min-p", "1.5"}), {"min_p", "1.5", "from 0 to 1"});
  refused(run({"--temperature", "1", "--sample-seed", "-1"}), {"--sample-seed", "-1", "from 0 to 2^64 - 1"});
  for (const char* option : {"--top-p", "--min-p", "--sample-seed"})
    refused(run({option, "1"}), {option, "--temperature"});
  for (const char* value : {"0", "-2", "nan", "inf"})
    refused(run({"--repeat-penalty", value}), {"repetition penalty", value, "above 0"});
  refused(run({"--logprobs", "-1", code}), {"--logprobs", "-1", "from 0 to 2^64 - 1"});
  refused(run({"--logprobs", "some", code}), {"--logprobs", "some"});
  refused(run({code, "--stop"}), {"--stop"});
  // Nobody waits for a model to be told so.
  refused(run({"--temperature", "-1", "--model", "missing.gguf"}), {"temperature"});
  refused(run({"--stop", "", code}), {"--stop", "an empty string"});

  refused(run({"--cost", "missing.json", code}), {"missing.json", "cannot be opened", "--cost"});
  for (const char* table : {"", "100", "{}", "[100, 104.5]", "[-1]", "[\"100\"]", "[100, 16777216]", "[100"}) {
    folder.file("cost.json", table);
    refused(run({"--cost", "cost.json", code}), {"cost.json is no table of costs", "1 to 16777215", "[100, 104, 107]"});
  }
  folder.file("cost.json", "[]");
  refused(run({"--cost", "cost.json", code}), {"the table of costs is empty", "at least"});
  folder.file("cost.json", "[0]");
  refused(run({"--cost", "cost.json", code}), {"the time of 1 rows is 0", "1 to 16777215"});
  folder.file("cost.json", "[100, 99]");
  refused(run({"--cost", "cost.json", code}), {"the time of 2 rows is 99", "must not fall"});

  refused(run({"--prompt-file", "missing.txt"}), {"missing.txt", "cannot be opened"});
  refused(run({"--prompt-file", folder.path}), {"cannot be read"});
  folder.file("long.txt", std::string((std::size_t{1} << 22) + 1, 'x'));
  refused(run({"--prompt-file", "long.txt"}), {"long.txt", "4194304", "shorten"});

  refused(run({"--model", "missing.gguf"}), {"missing.gguf", "cannot be opened"});
  refused(run({"--model", folder.path}), {"not a regular file"});
  folder.file("empty.gguf", "");
  refused(run({"--model", "empty.gguf"}), {"empty.gguf", "empty"});
  folder.file("short.gguf", content(bundled).substr(0, 3'000'000));
  refused(run({"--model", "short.gguf"}), {"short.gguf"});

  const Ran full = shell(generate({"--max-tokens", "2", "--json", code}) + " >/dev/full");
  refused(full, {"standard output cannot be written"});
  const Ran help = shell(generate({"--help"}));
  CHECK(help.status == 0);
  CHECK(help.out.find("Exit status: 0 ") != std::string::npos);
}

TEST_CASE("run.sh passes everything on, wherever it is called") {
  folder.file("its own.txt", code + "\n");
  const std::string command = quoted(root / "examples/run.sh") + " --json --max-tokens 30 ";
  const Ran ran = shell(command + "--rows 8 --prompt-file 'its own.txt' --model " + quoted(bundled));
  INFO(ran.err);
  REQUIRE(ran.status == 0);
  const json o = json::parse(ran.out);
  CHECK(o.at("text") == plain_text(bundled, code, 30));
  CHECK(o.at("rows_per_step") <= 8);
  CHECK(shell(command + "--prompt-file missing.txt").status == 2);
}

TEST_CASE("run.sh inflates the bundled model, or gets SmolLM2 and asks it") {
  const std::string command = quoted(root / "examples/run.sh");
  const Ran inflated = shell(command + " --rows 3 --max-tokens 20 " + quoted(code));
  INFO(inflated.err);
  REQUIRE(inflated.status == 0);
  const std::string account = "\n\ncpython-6m, inflated to 298.4 million parameters.\n";
  CHECK(inflated.out.starts_with(code));
  const std::size_t at = inflated.out.find(account);
  REQUIRE(at != std::string::npos);
  // The README shows the same, its figures apart.
  CHECK(shown_output().find(inflated.out.substr(at, inflated.out.find("\ntokens ") - at)) != std::string::npos);
  CHECK(row_names(shown_output()) == row_names(inflated.out));
  CHECK(inflated.out.find("\nidentical               yes\n") != std::string::npos);

  if (shell(quoted(root / "examples/models/fetch.sh")).status != 0) return;  // skipped in the model's own test
  const Ran answer = shell(command + " --smollm2 --json 'What is the capital of France?'");
  INFO(answer.err);
  REQUIRE(answer.status == 0);
  CHECK(json::parse(answer.out).at("text") == "The capital of France is Paris.");
  CHECK(json::parse(answer.out).at("stop") == "end_token");
  const Ran raw = shell(command + " --json --raw --smollm2 --max-tokens 4 'The capital of France is'");
  CHECK(json::parse(raw.out).at("text").get<std::string>().starts_with(" Paris"));
}

#ifdef LOOKAHEAD_HAS_LLAMA_CPP
TEST_CASE("run.sh --llama-cpp passes everything on") {
  const Ran ran = shell(quoted(root / "examples/run.sh") + " --json --max-tokens 8 --llama-cpp --rows 4 --model " +
                        quoted(bundled) + " " + quoted(code));
  INFO(ran.err);
  REQUIRE(ran.status == 0);
  const json o = json::parse(ran.out);
  CHECK(o.at("tokens") == 8);
  CHECK(o.at("identical") == true);
  CHECK(o.at("rows_per_step") <= 4);
  CHECK(shell(quoted(root / "examples/run.sh") + " --llama-cpp --no-such-option").status == 2);
}
#endif

TEST_CASE("the README shows what the model says, and options that there are") {
  const json o = generate_json({"--plain"});
  CHECK(o.at("tokens") == 256);
  const std::string shown = shown_output();
  CHECK(shown.starts_with("def encode(text, encoding=\"utf-8\"):\n    \"\"\"" + o.at("text").get<std::string>() +
                          "\n\n"));
  CHECK(row_names(shown) == std::vector<std::string>{"tokens", "steps", "tokens per step", "rows per step", "tokens/s",
                                                     "speed-up", "identical"});

  const std::string known = shell(generate({"--help"})).out + content(root / "examples/run.sh");
  std::istringstream readme(content(root / "README.md"));
  int options = 0;
  for (std::string line, word; std::getline(readme, line);) {
    if (!line.starts_with("examples/run.sh")) continue;
    for (std::istringstream words(line); words >> word;) {
      if (!word.starts_with("--")) continue;
      CHECK_MESSAGE(known.find(word) != std::string::npos, word);
      ++options;
    }
  }
  CHECK(options >= 7);
}

TEST_CASE("an inflated model writes the same text, and weights are converted when they are loaded") {
  const std::string text = plain_text(bundled, code, 20);
  const auto with = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--max-tokens", "20", code});
    return generate_json(arguments);
  };
  CHECK(with({"--inflate", "1024,7,1024"}).at("text") == text);
  CHECK(with({"--inflate", "9,9,9", "--inflate", "0,8,0"}).at("text") == text);
  CHECK(with({"--weights", "Q8_0"}).at("text") == text);
  CHECK(shell(generate({"--weights", "f16", "--weights", "q4_0", "--plain", "--max-tokens", "1", code}))
            .out.find("parameters, weights in Q4_0:") != std::string::npos);

  const auto run = [](const std::vector<std::string>& arguments) { return shell(generate(arguments)); };
  for (const char* sizes :
       {"", "1024", "1024,22", "1024,22,", "1024,22,4096,1", "a,b,c", "1024;22;4096", "9999999999,1,1"})
    refused(run({"--inflate", sizes}), {"--inflate", sizes, "WIDTH,BLOCKS,FEED", "1024,22,4096"});
  refused(run({"--inflate", "512,6,768"}), {"width", "512", "256 times a power of 4"});
  refused(run({"--inflate", "0,5,0"}), {"InflateOptions::blocks is 5", "6 to"});
  refused(run({"--weights", "f8"}), {"--weights", "f8", "f32, f16, bf16, q8_0, q4_0 or q4_1"});
}

TEST_CASE("the smallest adapter decodes, and the README shows it as it is") {
  const Ran ran = shell(quoted(LOOKAHEAD_MINIMAL));
  CHECK(ran.status == 0);
  std::istringstream out(ran.out);
  std::string line, digits;
  std::getline(out, line);
  for (const char c : line)
    if (c != ' ') digits += c;
  std::string expected;
  for (int i = 0, a = 0, b = 1; i < 100; ++i) {
    const int next = (a + b) % 7;
    a = b;
    b = next;
    expected += static_cast<char>('0' + next);
  }
  CHECK(digits == expected);

  const std::string source = content(root / "examples/minimal.cpp"), readme = content(root / "README.md");
  CHECK(std::count(source.begin(), source.end(), '\n') <= 60);
  CHECK(readme.find("```cpp\n" + source + "```\n") != std::string::npos);
  CHECK_MESSAGE(readme.find("```\n" + ran.out + "```\n") != std::string::npos, "README.md shows other output than\n",
                ran.out);
}
