#pragma once
/// @file json_grammar.hpp
/// A grammar as a logits processor: text that is always one JSON object, and always complete. An example of a rule over
/// the whole text; a decoder that selects only on rows that the walk reaches needs nothing else for it.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lookahead/errors.hpp"

namespace lookahead::examples {

/// Reads a JSON object byte by byte and knows at each byte what may follow: a pushdown automaton. It takes a large part
/// of JSON that every parser accepts: UTF-8, numbers of up to 15 digits before the point and exponents of up to two,
/// no escaped surrogates, and not much white space: models tend to lose themselves in it.
class JsonText {
 public:
  /// Takes the next byte, or returns false where it cannot follow; then this object is of no further use.
  bool take(char byte) {
    const auto c = static_cast<unsigned char>(byte);
    for (;;) {
      if (stack_.empty()) return false;
      const char top = stack_.back();
      if (c == ' ' || c == '\n' || c == '\r' || c == '\t') {
        if (std::string_view("veafmk:").find(top) != npos) return ++spaces_ <= most_spaces;
      } else {
        spaces_ = 0;
      }
      switch (top) {
        case 'O':  // the whole text
          return c == '{' && become("f");
        case 'f':  // a first key, or the end of the object
          return c == '"' ? become("mv:s") : c == '}' && become("");
        case 'm':  // behind a member
          return c == ',' ? push("k") : c == '}' && become("");
        case 'k':  // a further key
          return c == '"' && become("v:s");
        case ':':
          return c == ':' && become("");
        case 'e':  // a first element, or the end of the array
          if (c == ']') return become("");
          become("av");
          continue;
        case 'a':  // behind an element
          return c == ',' ? push("v") : c == ']' && become("");
        case 'v':  // a value
          switch (c) {
            case '{':
              return become("f");
            case '[':
              return become("e");
            case '"':
              return become("s");
            case '-':
              return become("-");
            case 't':
              return word("rue");
            case 'f':
              return word("alse");
            case 'n':
              return word("ull");
            default:
              return number(c);
          }
        case '-':  // behind a minus
          return number(c);
        case 's':  // in a string
          return c == '"' ? become("") : c == '\\' ? push("\\") : c >= 0x80 ? character(c) : c >= 0x20;
        case '\\':
          return c == 'u' ? become("hhhH") : std::string_view("\"\\/bfnrt").find(byte) != npos && become("");
        case 'H':  // the first hexadecimal digit; with d it would be half of a pair
          return hexadecimal(c) && c != 'd' && c != 'D' && become("");
        case 'h':
          return hexadecimal(c) && become("");
        case 'c':  // bytes of a character; some second bytes are narrower
          return within(c, 0x80, 0xBF);
        case 'A':
          return within(c, 0xA0, 0xBF);
        case 'B':
          return within(c, 0x80, 0x9F);
        case 'C':
          return within(c, 0x90, 0xBF);
        case 'G':
          return within(c, 0x80, 0x8F);
        case 'D':  // a digit
          return digit(c) && become("");
        case 'P':  // behind the e of an exponent
          return c == '+' || c == '-' ? become("D") : digit(c) && become("");
        // What follows may be left out.
        case 'd':  // one more digit
          if (digit(c)) return become("");
          break;
        case 'g':  // any more digits
          if (digit(c)) return true;
          break;
        case 'F':  // a fraction
          if (c == '.') return become("gD");
          break;
        case 'X':  // an exponent
          if (c == 'e' || c == 'E') return become("dP");
          break;
        default:  // the letters of a word
          return byte == static_cast<char>(top & 0x7F) && become("");
      }
      stack_.pop_back();
    }
  }

  /// Whether the object is complete.
  [[nodiscard]] bool complete() const { return stack_.empty(); }

  /// The fewest bytes that complete the object. O(depth).
  [[nodiscard]] std::size_t to_go() const {
    std::size_t bytes = 0;
    for (const char symbol : stack_)
      bytes += symbol == 'O' ? 2 : symbol == 'k' ? 4 : std::string_view("dgFX").find(symbol) != npos ? 0 : 1;
    return bytes;
  }

 private:
  static constexpr std::size_t npos = std::string_view::npos;
  static bool digit(unsigned char c) { return c >= '0' && c <= '9'; }
  static bool hexadecimal(unsigned char c) { return digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

  bool push(std::string_view symbols) {
    stack_ += symbols;
    return true;
  }
  bool become(std::string_view symbols) {
    stack_.pop_back();
    return push(symbols);
  }
  bool within(unsigned char c, unsigned char low, unsigned char high) { return c >= low && c <= high && become(""); }
  bool number(unsigned char c) { return c == '0' ? become("XF") : digit(c) && become("XFdddddddddddddd"); }
  bool word(std::string_view rest) {
    stack_.pop_back();
    for (std::size_t i = rest.size(); i-- > 0;) stack_ += static_cast<char>(rest[i] | 0x80);
    return true;
  }
  bool character(unsigned char first) {
    if (first < 0xC2 || first > 0xF4) return false;
    if (first < 0xE0) return push("c");
    if (first < 0xF0) return push(first == 0xE0 ? "cA" : first == 0xED ? "cB" : "cc");
    return push(first == 0xF0 ? "ccC" : first == 0xF4 ? "ccG" : "ccc");
  }

  static constexpr int most_spaces = 16;  ///< in a row
  int spaces_ = 0;
  std::string stack_ = "O";  ///< what must still come, the nearest last
};

/// A logits processor that allows only tokens with which the text behind the prompt can become a JSON object within a
/// given number of tokens; once it is complete, only end tokens. So every text parses, however the model is sampled.
///
/// Histories may grow, shrink and change: what two of them share is read once.
class JsonGrammar {
 public:
  using Token = std::int32_t;

  /// `pieces[token]` are the bytes of each token, nothing for control tokens; they must outlive the grammar. The object
  /// begins behind `prompt_tokens` tokens and takes at most `max_tokens`, an end token included. Throws InvalidArgument
  /// where that is too few, where there is no end token, or where some byte is no token: then the object could not
  /// always be completed.
  JsonGrammar(std::span<const std::string> pieces, std::vector<Token> end_tokens, std::size_t prompt_tokens,
              std::size_t max_tokens)
      : pieces_(pieces), end_tokens_(std::move(end_tokens)), prompt_tokens_(prompt_tokens), max_tokens_(max_tokens) {
    if (max_tokens < 3)
      throw InvalidArgument(std::to_string(max_tokens) + " tokens cannot hold an object and its end: allow at least 3");
    if (end_tokens_.empty()) throw InvalidArgument("without an end token a text cannot end: pass one");
    for (int byte = 0; byte < 256; ++byte)
      if (std::ranges::find(pieces, std::string(1, static_cast<char>(byte))) == pieces.end())
        throw InvalidArgument("no token is the single byte " + std::to_string(byte) +
                              ": take a vocabulary with a token for every byte");
  }

  /// Precondition: `history` begins with the prompt. O(bytes of all pieces x depth) at worst.
  void operator()(std::span<float> logits, std::span<const Token> history) {
    const JsonText& text = read(history.subspan(prompt_tokens_));
    const std::size_t used = history.size() - prompt_tokens_ + 1;
    const auto ban = [&](std::size_t t) { logits[t] = -std::numeric_limits<float>::infinity(); };
    for (std::size_t t = 0; t < logits.size(); ++t) {
      const bool end = std::ranges::find(end_tokens_, static_cast<Token>(t)) != end_tokens_.end();
      if (end ? !text.complete() : !fits(text, t, used)) ban(t);
    }
  }

 private:
  /// Whether a token may follow, and leaves enough of the tokens to complete the object, one byte each, and to end it.
  [[nodiscard]] bool fits(const JsonText& text, std::size_t token, std::size_t used) const {
    if (token >= pieces_.size() || pieces_[token].empty()) return false;
    JsonText next = text;
    for (const char byte : pieces_[token])
      if (!next.take(byte)) return false;
    return used + next.to_go() + 1 <= max_tokens_;
  }

  /// The state behind the tokens of the object.
  const JsonText& read(std::span<const Token> tokens) {
    const auto differ = std::ranges::mismatch(tokens, tokens_).in1;
    const auto shared = static_cast<std::size_t>(differ - tokens.begin());
    tokens_.resize(shared);
    states_.resize(shared + 1);
    for (const Token t : tokens.subspan(shared)) {
      JsonText next = states_.back();
      for (const char byte : pieces_[static_cast<std::size_t>(t)]) next.take(byte);
      tokens_.push_back(t);
      states_.push_back(next);
    }
    return states_.back();
  }

  std::span<const std::string> pieces_;
  std::vector<Token> end_tokens_;
  std::size_t prompt_tokens_, max_tokens_;
  std::vector<Token> tokens_;                 ///< of the last history, behind the prompt
  std::vector<JsonText> states_{JsonText{}};  ///< before the first of them, and behind each
};

}  // namespace lookahead::examples
