// What ends a text, or holds it up: stop strings and unfinished characters against a search of the whole text, sinks
// that take less than a block, deadlines and cancellation.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "cases.hpp"

#include "lookahead/decoder.hpp"
#include "lookahead/testing/oracle_model.hpp"
#include "lookahead/testing/plain_decode.hpp"
#include "lookahead/text_stream.hpp"

namespace {

using namespace lookahead;
using lookahead::testing::InjectedFault;
using lookahead::testing::OracleModel;
using lookahead::testing::OracleOptions;
using lookahead::testing::plain_decode;

using Token = std::int32_t;
using Tokens = std::vector<Token>;
using Strings = std::vector<std::string>;

const Tokens prompt{3, 1, 4, 1, 5};

OracleOptions repetitive(int vocabulary = 50) {
  OracleOptions options;
  options.vocabulary = vocabulary;
  options.repetition = 1;
  return options;
}

// Every beginning of a UTF-8 character that is not all of it, from the encodings of all characters.
const std::set<std::string>& unfinished_characters() {
  static const std::set<std::string> all = [] {
    std::set<std::string> prefixes;
    const auto add = [&](std::uint32_t lead, std::uint32_t c, int more) {
      std::string text(1, static_cast<char>(lead | c >> (6 * more)));
      for (int i = more - 1; i >= 0; --i) {
        prefixes.insert(text);
        text += static_cast<char>(0x80U | (c >> (6 * i) & 0x3FU));
      }
    };
    for (std::uint32_t c = 0x80; c < 0x110000; c += 64) {  // the last six bits are never part of a beginning
      if (c >= 0xD800 && c < 0xE000) continue;
      if (c < 0x800)
        add(0xC0, c, 1);
      else if (c < 0x10000)
        add(0xE0, c, 2);
      else
        add(0xF0, c, 3);
    }
    return prefixes;
  }();
  return all;
}

// A search of the whole text, for what a stream must find piece by piece.
struct Whole {
  std::string text;               // what is shown in the end
  std::size_t tokens;             // how many tokens belong to the text
  bool stopped;                   // by a stop string
  std::vector<std::size_t> sure;  // how much may be shown after so many tokens
};

Whole search(const Strings& pieces, const Strings& stops) {
  Whole whole{"", 0, false, {0}};
  for (const std::string& piece : pieces) {
    ++whole.tokens;
    for (const char c : piece) {
      whole.text += c;
      std::size_t longest = 0;
      for (const std::string& stop : stops)
        if (whole.text.ends_with(stop)) longest = std::max(longest, stop.size());
      if (longest == 0) continue;
      whole.stopped = true;
      whole.text.resize(whole.text.size() - longest);
      whole.sure.push_back(whole.text.size());
      return whole;
    }
    std::size_t sure = whole.text.size();
    for (std::size_t i = whole.text.size(); i-- > 0;)
      for (const std::string& stop : stops)
        if (stop.starts_with(whole.text.substr(i))) sure = i;
    for (std::size_t n = 1; n <= std::min<std::size_t>(3, sure); ++n) {
      if (unfinished_characters().count(whole.text.substr(sure - n, n)) == 0) continue;
      sure -= n;
      break;
    }
    whole.sure.push_back(sure);
  }
  return whole;
}

// Feeds tokens 0, 1, 2, ... in blocks that end behind the tokens whose bit is set in `cuts`, as a decoder would.
void feed(const Strings& pieces, const Strings& stops, std::uint64_t cuts, const Whole& whole) {
  std::string shown;
  TextStream stream([&](Token t) { return std::string_view(pieces[static_cast<std::size_t>(t)]); },
                    [&](std::string_view text) {
                      REQUIRE_FALSE(text.empty());
                      shown += text;
                    },
                    stops);
  Tokens block;
  std::size_t taken = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    block.push_back(static_cast<Token>(i));
    if ((cuts >> i & 1) == 0 && i + 1 < pieces.size()) continue;
    const Admission admission = stream.admit(std::span<const Token>(block));
    REQUIRE(admission.tokens == std::min(block.size(), whole.tokens - taken));
    taken += admission.tokens;
    REQUIRE(admission.stop == (whole.stopped && taken == whole.tokens));
    stream(std::span<const Token>(block).first(admission.tokens));
    REQUIRE(shown == whole.text.substr(0, whole.sure[taken]));
    if (admission.stop) break;
    block.clear();
  }
  stream.finish();
  REQUIRE(shown == whole.text);
  REQUIRE(taken == whole.tokens);
}

Strings random_strings(std::mt19937_64& random, std::size_t count, std::size_t least, std::size_t most,
                       std::string_view alphabet) {
  Strings strings(count);
  for (std::string& s : strings)
    for (std::size_t n = least + random() % (most - least + 1); n > 0; --n) s += alphabet[random() % alphabet.size()];
  return strings;
}

struct Views {
  const Strings* pieces;
  std::string_view operator()(Token t) const { return (*pieces)[static_cast<std::size_t>(t)]; }
};

}  // namespace

TEST_CASE("stop strings in texts cut in every possible way") {
  std::mt19937_64 random(1);
  const int count = cases(2000);
  int stopped = 0, inside = 0;
  for (int i = 0; i < count; ++i) {
    CAPTURE(i);
    const std::string_view alphabet = i % 3 == 0 ? "a" : i % 3 == 1 ? "ab" : "abc";
    const Strings pieces = random_strings(random, 1 + random() % 7, 0, 4, alphabet);
    const Strings stops = random_strings(random, random() % 4, 1, 5, alphabet);
    const Whole whole = search(pieces, stops);
    stopped += whole.stopped ? 1 : 0;
    inside += whole.stopped && whole.tokens < pieces.size() ? 1 : 0;
    for (std::uint64_t cuts = 0; cuts < std::uint64_t{1} << (pieces.size() - 1); ++cuts)
      feed(pieces, stops, cuts, whole);
  }
  CHECK(stopped > count / 4);
  CHECK(inside > count / 8);
}

TEST_CASE("stop strings: those that overlap, contain each other and end together") {
  const auto shown = [](const Strings& stops, const Strings& pieces) {
    const Whole whole = search(pieces, stops);
    for (std::uint64_t cuts = 0; cuts < std::uint64_t{1} << (pieces.size() - 1); ++cuts)
      feed(pieces, stops, cuts, whole);
    return whole.text;
  };
  const Strings one_by_one{"x", "a", "b", "c", "d", "e"};
  CHECK(shown({"abcd", "bc"}, one_by_one) == "xa");        // complete first, though it begins later
  CHECK(shown({"bcd", "abcd", "cd"}, one_by_one) == "x");  // end together: the longest
  CHECK(shown({"abd", "bcd"}, one_by_one) == "xa");
  CHECK(shown({"de!", "e?"}, one_by_one) == "xabcde");  // held back to the end, and not lost
  CHECK(shown({"aab"}, {"a", "a", "a", "b"}) == "a");
  CHECK(shown({"abcd", "bc"}, {"xabcde"}) == "xa");
  CHECK(shown({"x"}, one_by_one) == "");
  CHECK_THROWS_WITH_AS(shown({"a", ""}, one_by_one),
                       "a stop string is empty: every text would end at once; leave it out", InvalidArgument);
}

TEST_CASE("characters are shown whole, bytes that are none as they are, wherever they are cut") {
  std::mt19937_64 random(2);
  const int count = cases(2000);
  for (int i = 0; i < count; ++i) {
    CAPTURE(i);
    std::string text;
    while (text.size() < 3 + random() % 12) {
      static const Strings some{
          "a",        "\xC3\xA9",     "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\xEF\xBF\xBD", "\xF4\x8F\xBF\xBF",
          "\xC2\x80", "\xE0\xA0\x80", "\xED\x9F\xBF", "\xF0\x90\x80\x80"};
      std::string next = some[random() % some.size()];
      if (random() % 4 == 0) next.resize(1 + random() % next.size());
      if (random() % 4 == 0) next[random() % next.size()] = static_cast<char>(random());
      text += next;
    }
    Strings pieces;
    for (std::size_t at = 0, n = 0; at < text.size(); at += n) {
      n = random() % 3;
      pieces.push_back(text.substr(at, n));
    }
    Strings stops;
    // Stop strings that begin or end within a character are still found.
    while (random() % 2 == 0) stops.push_back(text.substr(random() % text.size(), 1 + random() % 4));
    const Whole whole = search(pieces, stops);
    for (int cut = 0; cut < 8; ++cut) feed(pieces, stops, cut == 0 ? ~std::uint64_t{0} : random(), whole);
  }
}

TEST_CASE("what may still become a character, to the byte") {
  // Every two bytes, and third and fourth bytes at the edges.
  const auto check = [](const std::string& text) {
    Strings pieces;
    for (const char c : text) pieces.emplace_back(1, c);
    feed(pieces, {}, ~std::uint64_t{0}, search(pieces, {}));
  };
  for (int a = 0; a < 256; ++a) {
    for (int b = 0; b < 256; ++b) {
      const std::string two{static_cast<char>(a), static_cast<char>(b)};
      check(two);
      if (a < 0xC0) continue;
      for (const char c : {'\x7F', '\x80', '\xBF', '\xC2'}) check(two + c + '\x80' + c);
    }
  }
}

TEST_CASE("random requests with stop strings and end tokens: plain decoding's text up to the first that comes") {
  const int count = cases(2000);
  std::size_t tokens = 0, steps = 0, stopped = 0, ended = 0;
  for (int i = 0; i < count; ++i) {
    CAPTURE(i);
    std::mt19937_64 random(static_cast<std::uint64_t>(i));
    OracleOptions options = repetitive(2 + static_cast<int>(random() % 30));
    options.seed = random();
    options.repetition = 0.9;
    options.max_kept = random() % 4 == 0 ? static_cast<int>(random() % 3) : 1000;
    const Strings pieces =
        random_strings(random, static_cast<std::size_t>(options.vocabulary), 0, 3, i % 2 == 0 ? "ab" : "abcdef");
    const Strings stops = random_strings(random, random() % 3, 2, 7, i % 2 == 0 ? "ab" : "abcdef");
    const Tokens start{0, 1, 0};
    const std::size_t wanted = 1 + random() % 60;
    DecoderOptions<Token> how;
    how.cost = lookahead::StepCost::none();
    how.shape.w = static_cast<int>(random() % 6);
    how.rows = 1 + random() % 40;
    if (random() % 2 == 0) how.cost = lookahead::StepCost::given({100, 130, 160, 200, 300, 400, 500, 600});
    how.pool_slots = 1024;
    if (random() % 3 == 0) how.end_tokens = {static_cast<Token>(random() % 2), 1};

    OracleModel<> plain(options);
    const Tokens all = plain_decode(plain, std::span(start), wanted, how.end_tokens);
    Strings said;
    for (const Token t : all) said.push_back(pieces[static_cast<std::size_t>(t)]);
    const Whole whole = search(said, stops);

    if (random() % 2 == 0)
      (random() % 2 == 0 ? options.fail_forward : options.fail_commit) = 1 + static_cast<int>(random() % 20);
    OracleModel<> model(options);
    Decoder<OracleModel<>, 5, 4, 5> decoder(model, how);
    std::string shown;
    TextStream stream(
        Views{&pieces}, [&](std::string_view text) { shown += text; }, stops);
    Generation g;
    decoder.start(start);
    std::size_t count_before = 0;
    for (bool done = false; !done;) {
      try {
        count_before = decoder.text().size() - start.size();
        g = decoder.run(wanted - count_before, stream);
        done = true;
      } catch (const InjectedFault&) {
      }
    }
    REQUIRE(decoder.text().size() == start.size() + whole.tokens);
    REQUIRE(std::equal(decoder.text().begin() + 3, decoder.text().end(), all.begin()));
    REQUIRE(shown == whole.text.substr(0, whole.sure.back()));
    REQUIRE(g.tokens == whole.tokens - count_before);
    // Nothing behind the cut is cached: the newest token never is, and an engine that keeps all has all others.
    REQUIRE(model.context_size() <= decoder.text().size() - 1);
    if (options.max_kept == 1000) REQUIRE(model.context_size() == decoder.text().size() - 1);
    const bool at_end = whole.tokens == all.size() && std::ranges::count(how.end_tokens, all.back()) > 0;
    REQUIRE(g.stop == (whole.stopped ? StopReason::sink : at_end ? StopReason::end_token : StopReason::max_tokens));
    stream.finish();
    REQUIRE(shown == whole.text);
    stopped += whole.stopped ? 1 : 0;
    ended += g.stop == StopReason::end_token ? 1 : 0;
    tokens += g.tokens;
    steps += g.steps;

    // It does no more of its own accord, and goes on behind more input.
    if (g.stop == StopReason::sink) {
      REQUIRE(decoder.run(5, [](Token) { FAIL("a token behind the end"); }).steps == 0);
      REQUIRE(decoder.stop_reason() == StopReason::sink);
    }
    decoder.append(start);
    Tokens so_far(decoder.text().begin(), decoder.text().end());
    Tokens more;
    while (more.size() < 10 && decoder.stop_reason() != StopReason::end_token) {
      try {
        decoder.run(10 - more.size(), [&](Token t) { more.push_back(t); });
      } catch (const InjectedFault&) {
      }
    }
    REQUIRE(more == plain_decode(plain, std::span<const Token>(so_far), 10, how.end_tokens));
  }
  CHECK(tokens > steps);
  CHECK(stopped > static_cast<std::size_t>(count) / 8);
  CHECK(ended > static_cast<std::size_t>(count) / 20);
}

TEST_CASE("a sink that takes less than a block") {
  struct Few {
    std::size_t most;
    Tokens& tokens;
    [[nodiscard]] Admission admit(std::span<const Token> block) const { return {std::min(most, block.size()), false}; }
    void operator()(std::span<const Token> block) const {
      CHECK(block.size() <= most);
      tokens.insert(tokens.end(), block.begin(), block.end());
    }
  };
  for (std::size_t most = 1; most < 6; ++most) {
    OracleModel<> model(repetitive()), plain(repetitive());
    Decoder<OracleModel<>, 5, 4, 5> decoder(model);
    Tokens text;
    const Generation g = decoder.generate(prompt, 60, Few{most, text});
    CHECK(g.stop == StopReason::max_tokens);
    CHECK(text == plain_decode(plain, std::span(prompt), 60));
    CHECK(model.context_size() == prompt.size() + 59);
  }
}

TEST_CASE("a sink that admits what it cannot, or throws when asked") {
  struct Odd {
    int& mode;
    Tokens& tokens;
    [[nodiscard]] Admission admit(std::span<const Token> block) const {
      if (mode == 2) throw std::runtime_error("no");
      return {mode == 0 ? 0 : block.size() + (mode == 1 ? 1 : 0), false};
    }
    void operator()(std::span<const Token> block) const { tokens.insert(tokens.end(), block.begin(), block.end()); }
  };
  OracleModel<> model(repetitive()), plain(repetitive());
  Decoder<OracleModel<>, 5, 4, 5> decoder(model);
  Tokens text;
  decoder.start(prompt);
  int mode = 3;
  const Odd sink{mode, text};
  for (int i = 0; i < 12; ++i) {
    mode = i % 4;
    const std::size_t cached = model.context_size(), before = text.size();
    if (mode == 0) {
      CHECK_THROWS_AS(decoder.step(100, sink), ContractViolation);
    } else if (mode == 1) {
      CHECK_THROWS_AS(decoder.step(100, sink), ContractViolation);
    } else if (mode == 2) {
      CHECK_THROWS_WITH_AS(decoder.step(100, sink), "no", std::runtime_error);
    } else {
      decoder.step(100, sink);
      CHECK(text.size() > before);
      continue;
    }
    CHECK(model.context_size() == cached);
    CHECK(text.size() == before);
  }
  mode = 0;
  decoder.start(prompt);
  CHECK_THROWS_WITH_AS(decoder.step(1, sink),
                       "the sink admits 0 tokens of a block of 1: it must admit at least one and at most all",
                       ContractViolation);
  mode = 3;
  text.clear();
  decoder.run(60, sink);
  CHECK(text == plain_decode(plain, std::span(prompt), 60));
}

TEST_CASE("a piece or an emit that throws: the text is right all the same") {
  std::mt19937_64 random(7);
  const Strings pieces = random_strings(random, 50, 0, 3, "abc");
  const Strings stops{"abcabcabc"};
  OracleModel<> plain(repetitive());
  const Tokens all = plain_decode(plain, std::span(prompt), 60);
  Strings said;
  for (const Token t : all) said.push_back(pieces[static_cast<std::size_t>(t)]);
  const Whole whole = search(said, stops);
  for (int nth = 1; nth < 120; ++nth) {
    for (const bool in_emit : {false, true}) {
      CAPTURE(nth);
      int calls = 0;
      OracleModel<> model(repetitive());
      Decoder<OracleModel<>, 5, 4, 5> decoder(model);
      std::string shown;
      const auto piece = [&](Token t) {
        if (!in_emit && ++calls == nth) throw std::runtime_error("piece");
        return pieces[static_cast<std::size_t>(t)];  // a string of its own
      };
      const auto emit = [&](std::string_view text) {
        shown += text;
        if (in_emit && ++calls == nth) throw std::runtime_error("emit");
      };
      TextStream stream(piece, emit, stops);
      decoder.start(prompt);
      Tokens taken;
      struct Taking {
        decltype(stream)& text;
        Tokens& tokens;
        [[nodiscard]] Admission admit(std::span<const Token> block) const { return text.admit(block); }
        void operator()(std::span<const Token> block) const {
          try {
            text(block);
          } catch (const std::runtime_error& e) {
            // Nothing was taken of a block whose piece throws: it may be given again.
            if (std::string_view(e.what()) == "piece") text(block);
          }
          tokens.insert(tokens.end(), block.begin(), block.end());
        }
      };
      while (decoder.stop_reason() == StopReason::running) {
        try {
          decoder.run(60 - taken.size(), Taking{stream, taken});
        } catch (const std::runtime_error&) {
        }
      }
      try {
        stream.finish();
      } catch (const std::runtime_error&) {
      }
      stream.finish();
      CHECK(shown == whole.text);
      CHECK(
          std::equal(taken.begin(), taken.end(), all.begin(), all.begin() + static_cast<std::ptrdiff_t>(whole.tokens)));
    }
  }
}

namespace {

// A model that tells another thread when it works.
struct Observed : OracleModel<> {
  using OracleModel<>::OracleModel;
  std::atomic<int>* forwards = nullptr;
  std::chrono::microseconds pause{0};
  void forward(const TokenTree<Token>& tree) {
    if (pause.count() > 0) std::this_thread::sleep_for(pause);
    OracleModel<>::forward(tree);
    if (forwards != nullptr) forwards->fetch_add(1);
  }
};

OracleOptions long_texts() {
  OracleOptions options = repetitive();
  options.capacity = 1 << 20;
  return options;
}

}  // namespace

TEST_CASE("a deadline: the run ends between two steps, and another goes on") {
  using namespace std::chrono_literals;
  Observed model(long_texts());
  OracleModel<> plain(long_texts());
  Decoder<Observed, 5, 4, 5> decoder(model);
  Tokens text;
  const auto sink = [&](Token t) { text.push_back(t); };
  const auto now = std::chrono::steady_clock::now();
  Generation g = decoder.generate(prompt, 1000, sink, {.deadline = now});
  CHECK(g.stop == StopReason::deadline);
  CHECK(g.steps == 0);
  CHECK(text.empty());
  CHECK(decoder.stop_reason() == StopReason::deadline);

  model.pause = 2000us;
  const auto deadline = std::chrono::steady_clock::now() + 30ms;
  g = decoder.run(1 << 20, sink, {.deadline = deadline});
  CHECK(std::chrono::steady_clock::now() >= deadline);
  CHECK(g.stop == StopReason::deadline);
  CHECK(g.tokens == text.size());
  CHECK(g.steps <= 15);
  model.pause = 0us;
  g = decoder.run(100, sink, {.deadline = std::chrono::steady_clock::now() + 1h});
  CHECK(g.stop == StopReason::max_tokens);
  CHECK(text == plain_decode(plain, std::span(prompt), text.size()));
}

TEST_CASE("cancelled by the sink: no further step; another run goes on") {
  OracleModel<> model(repetitive()), plain(repetitive());
  Decoder<OracleModel<>, 5, 4, 5> decoder(model);
  Tokens text;
  decoder.start(prompt);
  for (std::size_t blocks = 1; text.size() < 80; ++blocks) {
    std::size_t left = blocks % 5;
    std::atomic<bool> cancel = left == 0;
    const auto sink = [&](std::span<const Token> block) {
      text.insert(text.end(), block.begin(), block.end());
      if (--left == 0) cancel = true;
    };
    const std::size_t expected = left;
    // A request to stop comes before a deadline.
    const Generation g = decoder.run(80 - text.size(), sink,
                                     {&cancel, left == 0 ? std::chrono::steady_clock::time_point::min()
                                                         : std::chrono::steady_clock::time_point::max()});
    CHECK(g.steps <= expected);
    CHECK(g.stop == (text.size() == 80 ? StopReason::max_tokens : StopReason::cancelled));
  }
  CHECK(text == plain_decode(plain, std::span(prompt), 80));
}

TEST_CASE("cancelled from another thread") {
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> forwards = 0;
    Observed model(long_texts());
    model.forwards = &forwards;
    Decoder<Observed, 5, 4, 5> decoder(model);
    Tokens text;
    Generation g;
    std::atomic<bool> cancel = false;
    std::thread worker([&] { g = decoder.generate(prompt, 1 << 20, [&](Token t) { text.push_back(t); }, {&cancel}); });
    while (forwards.load() <= round) std::this_thread::yield();
    cancel = true;
    worker.join();
    CHECK(g.stop == StopReason::cancelled);
    CHECK(g.tokens == text.size());
    CHECK(g.steps > static_cast<std::size_t>(round));
    decoder.run(50, [&](Token t) { text.push_back(t); });
    OracleModel<> plain(long_texts());
    CHECK(text == plain_decode(plain, std::span(prompt), text.size()));
  }
}

TEST_CASE("a range ends for an interrupt: no further step; another range goes on") {
  using namespace std::chrono_literals;
  Observed model(long_texts());
  OracleModel<> plain(long_texts());
  std::atomic<int> forwards = 0;
  model.forwards = &forwards;
  Decoder<Observed, 5, 4, 5> decoder(model, {.cost = lookahead::StepCost::none()});
  Tokens text;
  // The blocks that come; `cancel` is set when the last of `most` has come.
  const auto blocks = [&](int most, std::chrono::steady_clock::time_point deadline) {
    std::atomic<bool> cancel = most == 0;
    int n = 0;
    for (const auto block : decoder.stream(1000, {&cancel, deadline})) {
      text.insert(text.end(), block.begin(), block.end());
      if (++n == most) cancel = true;
    }
    return n;
  };
  const auto never = std::chrono::steady_clock::time_point::max();
  decoder.start(prompt);
  for (const int most : {0, 1, 3, 0, 2}) {
    const int before = forwards.load();
    CHECK(blocks(most, never) == most);
    CHECK(decoder.stop_reason() == StopReason::cancelled);
    CHECK(forwards.load() == before + most);
  }
  CHECK(blocks(0, std::chrono::steady_clock::now()) == 0);
  CHECK(decoder.stop_reason() == StopReason::cancelled);  // which comes before a deadline
  CHECK(blocks(1000, std::chrono::steady_clock::now()) == 0);
  CHECK(decoder.stop_reason() == StopReason::deadline);
  model.pause = 2000us;
  const int some = blocks(1000, std::chrono::steady_clock::now() + 11ms);
  CHECK(some >= 1);
  CHECK(some <= 6);
  CHECK(decoder.stop_reason() == StopReason::deadline);
  model.pause = 0us;
  CHECK(blocks(1000, std::chrono::steady_clock::now() + 1h) >= 1);
  CHECK(decoder.stop_reason() == StopReason::max_tokens);
  CHECK(text == plain_decode(plain, std::span(prompt), text.size()));
  CHECK(text.size() > 1000);
}

TEST_CASE("an interrupt does not hide that the text has ended") {
  OracleModel<> model(repetitive()), plain(repetitive());
  DecoderOptions<Token> how;
  how.cost = lookahead::StepCost::none();
  how.end_tokens = {plain_decode(plain, std::span(prompt), 5).back()};
  Decoder<OracleModel<>, 5, 4, 5> decoder(model, how);
  const auto ignore = [](Token) {};
  CHECK(decoder.generate(prompt, 100, ignore).stop == StopReason::end_token);
  const std::atomic<bool> cancel = true;
  CHECK(decoder.run(100, ignore, {&cancel}).stop == StopReason::end_token);
  for (const auto block : decoder.stream(100, {&cancel})) FAIL("a block of " << block.size() << " behind the end");
  CHECK(decoder.stop_reason() == StopReason::end_token);
}

TEST_CASE("each reason has its name") {
  const auto named = [](StopReason reason) { return std::string_view(name(reason)); };
  CHECK(named(StopReason::running) == "running");
  CHECK(named(StopReason::end_token) == "end_token");
  CHECK(named(StopReason::max_tokens) == "max_tokens");
  CHECK(named(StopReason::sink) == "sink");
  CHECK(named(StopReason::out_of_room) == "out_of_room");
  CHECK(named(StopReason::deadline) == "deadline");
  CHECK(named(StopReason::cancelled) == "cancelled");
}
