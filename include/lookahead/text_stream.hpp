#pragma once
/// @file text_stream.hpp
/// From accepted tokens to text that may be shown: whole characters, nothing of a stop string, nothing lost.

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lookahead/errors.hpp"
#include "lookahead/sink.hpp"

namespace lookahead {

/// A sink for `Decoder` that turns tokens into text and watches for stop strings, which may begin in one block and end
/// in another. Text that may still become a stop string, and characters whose bytes are not complete, are held back
/// until the next block decides, or `finish` is called. Bytes that can never become a character are passed on as they
/// are.
///
/// `piece(token)` gives the bytes of a token; `emit(std::string_view)` takes text, never an empty one. What they throw
/// passes through: a block whose piece throws leaves the stream as it was; what an emit that throws was given counts as
/// emitted. After `Decoder::roll_back` use a new stream.
template <class Piece, class Emit>
class TextStream {
 public:
  /// The text ends in front of the stop string that is complete first; of those that end together, the longest.
  /// Throws InvalidArgument if one is empty.
  TextStream(Piece piece, Emit emit, std::vector<std::string> stop_strings = {})
      : piece_(std::move(piece)), emit_(std::move(emit)), stops_(std::move(stop_strings)) {
    for (const std::string& stop : stops_) {
      if (stop.empty()) throw InvalidArgument("a stop string is empty: every text would end at once; leave it out");
      longest_ = std::max(longest_, stop.size());
    }
  }

  /// How many tokens of the block belong to the text: up to the one that completes a stop string. Changes nothing.
  /// O(bytes of the block and held back x bytes of the stop strings) at worst.
  template <class Token>
  [[nodiscard]] Admission admit(std::span<const Token> block) {
    std::size_t tokens = 0;
    const bool stop = read(block, tokens) != std::string::npos;
    return {tokens, stop};
  }

  /// Takes a block that was admitted, and emits what is certain.
  template <class Token>
  void operator()(std::span<const Token> block) {
    std::size_t tokens = 0;
    const std::size_t stop = read(block, tokens);
    held_.swap(probe_);
    if (stop != std::string::npos) held_.resize(stop);
    release(stop != std::string::npos ? stop : certain());
  }

  /// Emits what was held back: the text goes no further.
  void finish() { release(held_.size()); }

 private:
  /// Writes the held text and that of the block into `probe_`, up to the token that completes a stop string; says how
  /// many tokens these are, and where the stop string begins, or npos.
  template <class Token>
  std::size_t read(std::span<const Token> block, std::size_t& tokens) {
    probe_ = held_;
    for (tokens = 0; tokens < block.size();) {
      probe_ += std::string_view(piece_(block[tokens++]));
      if (const std::size_t at = find_stop(); at != std::string::npos) return at;
    }
    return std::string::npos;
  }

  /// Where the first stop string in `probe_` begins, or npos.
  [[nodiscard]] std::size_t find_stop() const {
    std::size_t first = std::string::npos, first_end = std::string::npos;
    for (const std::string& stop : stops_) {
      const std::size_t at = probe_.find(stop);
      if (at == std::string::npos) continue;
      const std::size_t end = at + stop.size();
      if (end < first_end || (end == first_end && at < first)) {
        first = at;
        first_end = end;
      }
    }
    return first;
  }

  /// How many of the held bytes can be no part of a stop string that is still to come, and are whole characters.
  [[nodiscard]] std::size_t certain() const {
    const std::string_view text = held_;
    std::size_t end = longest_ == 0 ? text.size() : text.size() - std::min(text.size(), longest_ - 1);
    const auto may_begin = [&](const std::string& stop) {
      return std::string_view(stop).starts_with(text.substr(end));
    };
    while (end < text.size() && std::none_of(stops_.begin(), stops_.end(), may_begin)) ++end;
    return end - incomplete_tail(text.substr(0, end));
  }

  /// Bytes at the end that may become a UTF-8 character: 0 to 3.
  [[nodiscard]] static std::size_t incomplete_tail(std::string_view text) {
    const auto byte = [&](std::size_t from_end) { return static_cast<unsigned char>(text[text.size() - from_end]); };
    for (std::size_t n = 1; n <= std::min<std::size_t>(3, text.size()); ++n) {
      const unsigned char first = byte(n);
      if ((first & 0xC0U) == 0x80) continue;  // a continuation: the character begins before it
      const std::size_t length = first < 0xC2 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 1;
      if (length <= n) return 0;
      if (n == 1) return 1;
      // The second byte rules out overlong forms, surrogates and what lies beyond Unicode.
      const unsigned char low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
      const unsigned char high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
      return byte(n - 1) >= low && byte(n - 1) <= high ? n : 0;
    }
    return 0;
  }

  void release(std::size_t count) {
    if (count == 0) return;
    probe_.assign(held_, 0, count);
    held_.erase(0, count);
    emit_(std::string_view(probe_));
  }

  Piece piece_;
  Emit emit_;
  std::vector<std::string> stops_;
  std::string held_, probe_;
  std::size_t longest_ = 0;
};

}  // namespace lookahead
