#pragma once
/// @file text_stream.hpp
/// From accepted tokens to text that may be shown: whole characters, nothing of a stop string, nothing lost.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lookahead/decoder.hpp"
#include "lookahead/errors.hpp"

namespace lookahead {

/// A sink for `Decoder::run` that turns tokens into text and watches for stop strings, which may begin in one block and
/// end in another. Text that may still become a stop string, and characters whose bytes are not complete, are held back
/// until the next block decides, or `finish` is called. Bytes that can never become a character are passed on as they
/// are.
///
/// `piece(token)` gives the bytes of a token; `emit(std::string_view)` takes text, never an empty one.
template <class Piece, class Emit>
class TextStream {
 public:
  /// The text ends before the first stop string. Throws InvalidArgument if one is empty.
  TextStream(Piece piece, Emit emit, std::vector<std::string> stop_strings = {})
      : piece_(std::move(piece)), emit_(std::move(emit)), stops_(std::move(stop_strings)) {
    for (const std::string& stop : stops_) {
      if (stop.empty()) throw InvalidArgument("a stop string is empty: every text would end at once; leave it out");
      longest_ = std::max(longest_, stop.size());
    }
  }

  /// How many tokens of the block belong to the text: up to the one that completes a stop string. Changes nothing.
  /// O(bytes of the block x stop strings).
  template <class Token>
  [[nodiscard]] Admission admit(std::span<const Token> block) {
    probe_ = held_;
    for (std::size_t i = 0; i < block.size(); ++i) {
      const std::size_t before = probe_.size();
      probe_ += std::string_view(piece_(block[i]));
      if (find_stop(probe_, before) != std::string::npos) return {i + 1, true};
    }
    return {block.size(), false};
  }

  /// Takes a block that was admitted, and emits what is certain.
  template <class Token>
  void operator()(std::span<const Token> block) {
    for (const Token t : block) {
      const std::size_t before = held_.size();
      held_ += std::string_view(piece_(t));
      if (const std::size_t at = find_stop(held_, before); at != std::string::npos) {
        stopped_ = true;
        held_.resize(at);
        return release(held_.size());
      }
    }
    release(certain());
  }

  /// Emits what was held back: the text goes no further.
  void finish() { release(held_.size()); }

  /// Whether a stop string was found.
  [[nodiscard]] bool stopped() const { return stopped_; }

 private:
  /// Where the first stop string begins that ends behind `before`, or npos.
  [[nodiscard]] std::size_t find_stop(std::string_view text, std::size_t before) const {
    std::size_t first = std::string_view::npos, first_end = std::string_view::npos;
    for (const std::string& stop : stops_) {
      const std::size_t from = before + 1 > stop.size() ? before + 1 - stop.size() : 0;
      const std::size_t at = text.find(stop, from);
      // The one that is complete first; of several that end together the longest.
      if (at != std::string_view::npos &&
          (at + stop.size() < first_end || (at + stop.size() == first_end && at < first))) {
        first = at;
        first_end = at + stop.size();
      }
    }
    return first;
  }

  /// How many of the held bytes are certain to belong to the text, and whole characters.
  [[nodiscard]] std::size_t certain() const {
    const std::string_view text = held_;
    std::size_t end = text.size() - incomplete_tail(text);
    const std::size_t from = longest_ > 0 && text.size() + 1 > longest_ ? text.size() + 1 - longest_ : 0;
    for (std::size_t at = from; longest_ > 0 && at < end; ++at)
      for (const std::string& stop : stops_)
        if (std::string_view(stop).starts_with(text.substr(at))) end = std::min(end, at);
    return end;
  }

  /// Bytes at the end that may become a UTF-8 character: 0 to 3.
  [[nodiscard]] static std::size_t incomplete_tail(std::string_view text) {
    for (std::size_t n = 1; n <= std::min<std::size_t>(3, text.size()); ++n) {
      const auto byte = static_cast<unsigned char>(text[text.size() - n]);
      if (byte < 0x80) return 0;
      if (byte < 0xC0) continue;  // a continuation: its first byte lies before it
      const std::size_t length = byte >= 0xF8 ? 1 : byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : 2;
      return length > n ? n : 0;
    }
    return 0;
  }

  void release(std::size_t count) {
    if (count == 0) return;
    // Taken off first: what an emit that throws was given counts as emitted.
    shown_.assign(held_, 0, count);
    held_.erase(0, count);
    emit_(std::string_view(shown_));
  }

  Piece piece_;
  Emit emit_;
  std::vector<std::string> stops_;
  std::string held_, probe_, shown_;
  std::size_t longest_ = 0;
  bool stopped_ = false;
};

}  // namespace lookahead
