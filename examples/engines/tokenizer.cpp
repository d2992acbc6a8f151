#include "engines/tokenizer.hpp"

#include <algorithm>
#include <cmath>
#include <queue>
#include <tuple>

namespace lookahead::engines {
namespace {

/// SentencePiece writes spaces as U+2581.
constexpr std::string_view space_mark = "\xe2\x96\x81";

/// Token types of the file format.
enum TokenType : std::int32_t { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };

/// Bytes of the UTF-8 character at the start of `text`, which is not empty; 1 where it is none.
std::size_t character_bytes(std::string_view text) {
  const auto at = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
  const unsigned first = at(0);
  const std::size_t n = first < 0xC2 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 1;
  for (std::size_t i = 1; i < n; ++i)
    if ((at(i) & 0xC0U) != 0x80U) return 1;
  if ((first == 0xE0 && at(1) < 0xA0) || (first == 0xED && at(1) > 0x9F) || (first == 0xF0 && at(1) < 0x90) ||
      (first == 0xF4 && at(1) > 0x8F))
    return 1;
  return n;
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const bool hit = std::string_view(text).substr(i, from.size()) == from;
    out.append(hit ? to : std::string_view(text).substr(i, 1));
    i += hit ? from.size() : 1;
  }
  text = std::move(out);
}

/// The value of a name such as "<0x0A>", or -1.
int byte_value(std::string_view name) {
  const auto digit = [](char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1; };
  if (name.size() != 6 || name.substr(0, 3) != "<0x" || name[5] != '>') return -1;
  const int high = digit(name[3]), low = digit(name[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

}  // namespace

Tokenizer::Tokenizer(const GgufFile& file) {
  const auto kind = file.text("tokenizer.ggml.model");
  if (kind != "llama")
    file.fail("has a tokenizer of kind '" + std::string(kind.value_or("(none)").substr(0, 64)) +
              "'; 'llama' (SentencePiece BPE) is supported; use another model");
  const auto names = file.texts("tokenizer.ggml.tokens");
  const auto scores = file.numbers("tokenizer.ggml.scores");
  const auto types = file.integers("tokenizer.ggml.token_type");
  if (!names || names->empty() || !scores || !types || scores->size() != names->size() ||
      types->size() != names->size())
    file.fail("needs arrays tokenizer.ggml.tokens, scores and token_type of one length, not empty; it has " +
              std::to_string(names ? names->size() : 0) + ", " + std::to_string(scores ? scores->size() : 0) + " and " +
              std::to_string(types ? types->size() : 0) + " values; convert the model again");
  if (names->size() > 1U << 24U)
    file.fail("has " + std::to_string(names->size()) + " tokens; at most 16777216 are supported; use another model");

  name_.assign(names->begin(), names->end());
  score_ = *scores;
  text_.resize(name_.size());
  byte_token_.assign(256, -1);
  for (std::size_t i = 0; i < name_.size(); ++i) {
    const auto token = static_cast<std::int32_t>(i);
    const std::int32_t type = (*types)[i];
    if (std::isnan(score_[i]))
      file.fail("token " + std::to_string(i) + " has a score that is not a number; convert the model again");
    if (type < normal || type > byte)
      file.fail("token " + std::to_string(i) + " has type " + std::to_string(type) +
                "; types 1 to 6 are known; convert the model again");
    if (type == control || type == unknown) {
      control_.emplace(name_[i], token);
      if (type == unknown) unknown_ = token;
      continue;
    }
    if (type == byte) {
      const int value = byte_value(name_[i]);
      if (value < 0)
        file.fail("token " + std::to_string(i) +
                  " is a byte token without a name like <0x0A>; convert the model again");
      byte_token_[static_cast<std::size_t>(value)] = token;
      text_[i] = std::string(1, static_cast<char>(value));
      continue;
    }
    text_[i] = name_[i];
    replace_all(text_[i], space_mark, " ");
    if (type == user_defined && !name_[i].empty()) user_.push_back(token);
    if (type != unused) token_of_.emplace(name_[i], token);
  }
  std::stable_sort(user_.begin(), user_.end(), [&](std::int32_t a, std::int32_t b) {
    return name_[static_cast<std::size_t>(a)].size() > name_[static_cast<std::size_t>(b)].size();
  });

  const auto token_key = [&](const char* key) -> std::optional<std::int32_t> {
    const auto value = file.integer(std::string("tokenizer.ggml.") + key);
    if (!value || *value == -1 || *value == 0xFFFFFFFF) return std::nullopt;  // the ways to say "none"
    if (*value < 0 || *value >= static_cast<std::int64_t>(name_.size()))
      file.fail(std::string("key 'tokenizer.ggml.") + key + "' is " + std::to_string(*value) + ", but there are " +
                std::to_string(name_.size()) + " tokens; convert the model again");
    return static_cast<std::int32_t>(*value);
  };
  bos_ = token_key("bos_token_id");
  if (const auto token = token_key("unknown_token_id")) unknown_ = token;
  for (const char* key : {"eos_token_id", "eot_token_id", "eom_token_id"})
    if (const auto token = token_key(key)) eos_.push_back(*token);
  std::sort(eos_.begin(), eos_.end());
  eos_.erase(std::unique(eos_.begin(), eos_.end()), eos_.end());
  add_bos_ = file.flag("tokenizer.ggml.add_bos_token").value_or(true) && bos_.has_value();
  add_space_prefix_ = file.flag("tokenizer.ggml.add_space_prefix").value_or(true);
}

std::optional<std::int32_t> Tokenizer::find(std::string_view name) const {
  for (const auto* map : {&control_, &token_of_})
    if (const auto it = map->find(name); it != map->end()) return it->second;
  return std::nullopt;
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, bool add_bos) const {
  std::vector<std::int32_t> out;
  if (add_bos && bos_) out.push_back(*bos_);
  if (text.empty()) return out;
  std::string marked(add_space_prefix_ ? " " : "");
  marked += text;
  replace_all(marked, " ", space_mark);
  encode_pieces(marked, out);
  return out;
}

void Tokenizer::encode_pieces(std::string_view text, std::vector<std::int32_t>& out) const {
  // Symbols are stretches of the text, linked so that a merge is O(1); a merged-away symbol has no bytes. User-defined
  // tokens are symbols from the start and never merge.
  struct Symbol {
    std::size_t begin, bytes;
    int previous, next;
    bool fixed;
  };
  std::vector<Symbol> symbols;
  for (std::size_t at = 0; at < text.size();) {
    const std::string_view rest = text.substr(at);
    const auto user = std::find_if(user_.begin(), user_.end(), [&](std::int32_t t) {
      return rest.substr(0, name_[static_cast<std::size_t>(t)].size()) == name_[static_cast<std::size_t>(t)];
    });
    const bool fixed = user != user_.end();
    const std::size_t bytes = fixed ? name_[static_cast<std::size_t>(*user)].size() : character_bytes(rest);
    const int i = static_cast<int>(symbols.size());
    symbols.push_back({at, bytes, i - 1, at + bytes < text.size() ? i + 1 : -1, fixed});
    at += bytes;
  }
  const auto symbol = [&](int i) -> Symbol& { return symbols[static_cast<std::size_t>(i)]; };

  // The best score merges first, the leftmost on ties.
  using Merge = std::tuple<float, int, int, std::size_t>;  // score, -left, right, bytes of both
  std::priority_queue<Merge> merges;
  const auto propose = [&](int left, int right) {
    if (left < 0 || right < 0 || symbol(left).fixed || symbol(right).fixed) return;
    const std::size_t bytes = symbol(left).bytes + symbol(right).bytes;
    const auto it = token_of_.find(text.substr(symbol(left).begin, bytes));
    if (it != token_of_.end()) merges.emplace(score_[static_cast<std::size_t>(it->second)], -left, right, bytes);
  };
  for (int i = 1; i < static_cast<int>(symbols.size()); ++i) propose(i - 1, i);
  while (!merges.empty()) {
    const auto [score, minus_left, right_index, bytes] = merges.top();
    merges.pop();
    Symbol& left = symbol(-minus_left);
    Symbol& right = symbol(right_index);
    if (left.bytes == 0 || right.bytes == 0 || left.bytes + right.bytes != bytes) continue;  // one has merged since
    left.bytes = bytes;
    right.bytes = 0;
    left.next = right.next;
    if (right.next >= 0) symbol(right.next).previous = -minus_left;
    propose(left.previous, -minus_left);
    propose(-minus_left, left.next);
  }

  for (const Symbol& s : symbols) {
    if (s.bytes == 0) continue;
    const std::string_view part = text.substr(s.begin, s.bytes);
    if (const auto it = token_of_.find(part); it != token_of_.end()) {
      out.push_back(it->second);
      continue;
    }
    for (const char c : part) {
      const std::int32_t token = byte_token_[static_cast<unsigned char>(c)];
      if (token >= 0)
        out.push_back(token);
      else if (unknown_)
        out.push_back(*unknown_);
    }
  }
}

std::string Tokenizer::decode(std::span<const std::int32_t> tokens) const {
  std::string out;
  for (const std::int32_t token : tokens) out += piece(token);
  if (add_space_prefix_ && !out.empty() && out.front() == ' ') out.erase(0, 1);
  return out;
}

}  // namespace lookahead::engines
