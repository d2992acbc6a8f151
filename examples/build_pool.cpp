// Fills a pool of n-grams from text files and saves it: `generate --pool` then starts with what these texts say.
// `build_pool --help` lists the options.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unistd.h>
#include <vector>

#include "engines/gguf.hpp"
#include "engines/tokenizer.hpp"

#include "lookahead/ngram_pool.hpp"
#include "lookahead/pool_file.hpp"

namespace {

using lookahead::NGramPool;
using lookahead::PoolSet;
using lookahead::engines::Tokenizer;

struct Options {
  std::string model = LOOKAHEAD_BUNDLED_MODEL, out;
  std::vector<std::string> texts;
  std::size_t slots = std::size_t{1} << 20;
};

// Standard error: a line about once a second, on a terminal always the same one.
class Progress {
 public:
  explicit Progress(std::size_t files) : files_(files) {}

  void add(std::size_t bytes, std::size_t tokens) {
    bytes_ += bytes;
    tokens_ += tokens;
    if (const auto now = Clock::now(); now >= next_) {
      next_ = now + std::chrono::seconds(1);
      std::cerr << (terminal_ ? "\r" : "") << text() << (terminal_ ? "" : "\n") << std::flush;
    }
  }
  void next_file() { ++done_; }

  // What there was.
  [[nodiscard]] std::string text() const {
    return std::to_string(done_) + " of " + std::to_string(files_) + " files, " + std::to_string(bytes_) + " bytes, " +
           std::to_string(tokens_) + " tokens";
  }
  void finish() const { std::cerr << (terminal_ ? "\r\033[K" : "") << text() << "\n"; }

 private:
  using Clock = std::chrono::steady_clock;
  std::size_t files_, done_ = 0, bytes_ = 0, tokens_ = 0;
  Clock::time_point next_ = Clock::now() + std::chrono::seconds(1);
  bool terminal_ = isatty(STDERR_FILENO) != 0;
};

// Files a text in pieces of whole lines, so that its length is no matter.
void add_file(const std::string& path, const Tokenizer& tokenizer, NGramPool<>& pool, Progress& progress) {
  constexpr std::size_t piece = std::size_t{1} << 20;
  std::ifstream in(path, std::ios::binary);
  std::string text;
  while (in) {
    const std::size_t left = text.size();
    text.resize(left + piece);
    in.read(text.data() + left, static_cast<std::streamsize>(piece));
    text.resize(left + static_cast<std::size_t>(in.gcount()));
    const std::size_t line_end = text.rfind('\n');
    const std::size_t end = in.eof() || line_end == std::string::npos ? text.size() : line_end + 1;
    const auto tokens = tokenizer.encode(std::string_view(text).substr(0, end), tokenizer.add_bos());
    pool.add_text(tokens);
    progress.add(end, tokens.size());
    text.erase(0, end);
  }
  if (!in.eof()) throw std::runtime_error(path + " cannot be read; pass text files");
}

std::size_t entries(const NGramPool<>& pool) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < pool.slots() / PoolSet::slots; ++i) {
    const PoolSet set = pool.set(i);
    count += static_cast<std::size_t>(std::ranges::count_if(set.stamp, [](std::uint32_t stamp) { return stamp > 0; }));
  }
  return count;
}

void run(const Options& o) {
  const lookahead::engines::GgufFile file(std::filesystem::path{o.model});
  const Tokenizer tokenizer(file);
  NGramPool<> pool(o.slots);
  Progress progress(o.texts.size());
  for (const std::string& path : o.texts) {
    add_file(path, tokenizer, pool, progress);
    progress.next_file();
  }
  progress.finish();
  lookahead::save_pool(pool, o.out, tokenizer.fingerprint());
  std::cout << o.out << ": " << entries(pool) << " of " << pool.slots() << " slots filled, "
            << std::filesystem::file_size(o.out) << " bytes\n";
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Fills a pool of n-grams from text files, for `generate --pool`.");
  Options o;
  app.add_option("texts", o.texts, "Text files, the most important last: where a pool is full, the oldest goes")
      ->required();
  app.add_option("--out", o.out, "The file to write")->required();
  app.add_option("--model", o.model, "Whose tokenizer is used, a GGUF file")->capture_default_str();
  app.add_option("--slots", o.slots, "Entries of the pool, 12 bytes each; up to 7 a token")->capture_default_str();
  try {
    app.parse(argc, argv);
    run(o);
    return 0;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    std::cerr << "build_pool: " << error.what() << "\n";
    return 2;
  }
}
