#include "engines/tokenizer.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <algorithm>
#include <cmath>
#include <pcre2.h>
#include <queue>
#include <tuple>
#include <utility>

#include "lookahead/pool_file.hpp"

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

/// A stretch of a text on its way to a token. Symbols are linked, so that a merge is O(1); one that was merged away has
/// no bytes.
struct Symbol {
  std::size_t begin, bytes;
  int previous, next;
  std::int32_t token;  ///< -1: none
  bool fixed = false;  ///< never merges
};

struct MergeRule {
  double priority;
  std::int32_t token;
};

/// Merges neighbours, the highest priority first and the leftmost on ties, until `rule(left, right)` allows no more.
template <class Rule>
void merge(std::vector<Symbol>& symbols, Rule rule) {
  using Merge = std::tuple<double, int, int, std::size_t, std::int32_t>;  // priority, -left, right, bytes, token
  std::priority_queue<Merge> merges;
  const auto symbol = [&](int i) -> Symbol& { return symbols[static_cast<std::size_t>(i)]; };
  const auto propose = [&](int left, int right) {
    if (left < 0 || right < 0 || symbol(left).fixed || symbol(right).fixed) return;
    if (const std::optional<MergeRule> found = rule(symbol(left), symbol(right)))
      merges.emplace(found->priority, -left, right, symbol(left).bytes + symbol(right).bytes, found->token);
  };
  for (int i = 1; i < static_cast<int>(symbols.size()); ++i) propose(i - 1, i);
  while (!merges.empty()) {
    const auto [priority, minus_left, right_index, bytes, token] = merges.top();
    merges.pop();
    Symbol& left = symbol(-minus_left);
    Symbol& right = symbol(right_index);
    if (left.bytes == 0 || right.bytes == 0 || left.bytes + right.bytes != bytes) continue;  // one has merged since
    left.bytes = bytes;
    left.token = token;
    right.bytes = 0;
    left.next = right.next;
    if (right.next >= 0) symbol(right.next).previous = -minus_left;
    propose(left.previous, -minus_left);
    propose(-minus_left, left.next);
  }
}

/// The value of a name such as "<0x0A>", or -1.
int byte_value(std::string_view name) {
  const auto digit = [](char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1; };
  if (name.size() != 6 || name.substr(0, 3) != "<0x" || name[5] != '>') return -1;
  const int high = digit(name[3]), low = digit(name[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

/// Byte-level vocabularies write each byte as a visible character: most of Latin-1 as itself, the rest from U+0100 on.
struct ByteNames {
  std::string name[256];
  std::unordered_map<std::string_view, unsigned char> byte_of;

  ByteNames() {
    unsigned next = 0x100;
    for (unsigned b = 0; b < 256; ++b) {
      const bool visible = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      const unsigned c = visible ? b : next++;
      if (c < 0x80)
        name[b] = static_cast<char>(c);
      else
        name[b] = {static_cast<char>(0xC0U | c >> 6), static_cast<char>(0x80U | (c & 0x3FU))};
      byte_of.emplace(name[b], static_cast<unsigned char>(b));
    }
  }
};

const ByteNames& byte_names() {
  static const ByteNames names;
  return names;
}

/// The bytes that a name stands for; the name itself where it is not written in that way.
std::string bytes_of_name(const std::string& name) {
  std::string out;
  for (std::size_t at = 0; at < name.size();) {
    const std::size_t n = character_bytes(std::string_view(name).substr(at));
    const auto it = byte_names().byte_of.find(std::string_view(name).substr(at, n));
    if (it == byte_names().byte_of.end()) return name;
    out += static_cast<char>(it->second);
    at += n;
  }
  return out;
}

// White space as Unicode defines it; \s of PCRE2 knows one character more.
#define LOOKAHEAD_SPACE \
  R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})"
constexpr const char* gpt2_pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^)" LOOKAHEAD_SPACE R"(\p{L}\p{N}]+|[)" LOOKAHEAD_SPACE
    R"(]+(?![^)" LOOKAHEAD_SPACE R"(])|[)" LOOKAHEAD_SPACE "]+";
constexpr const char* llama3_pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^)" LOOKAHEAD_SPACE
    R"(\p{L}\p{N}]+[\r\n]*|[)" LOOKAHEAD_SPACE R"(]*[\r\n]+|[)" LOOKAHEAD_SPACE R"(]+(?![^)" LOOKAHEAD_SPACE
    R"(])|[)" LOOKAHEAD_SPACE "]+";
#undef LOOKAHEAD_SPACE

/// Cuts a text where a pattern matches; what lies between matches, such as bytes that are no UTF-8, are pieces too.
template <class Take>
void cut(const pcre2_code* pattern, std::string_view text, Take take) {
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match(
      pcre2_match_data_create_from_pattern(pattern, nullptr), &pcre2_match_data_free);
  if (match == nullptr) throw std::bad_alloc();
  const auto* const subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  std::size_t at = 0;
  while (at < text.size()) {
    const int found = pcre2_match(pattern, subject, text.size(), at, 0, match.get(), nullptr);
    if (found < 0 && found != PCRE2_ERROR_NOMATCH)
      throw std::runtime_error("the text cannot be cut into words: PCRE2 error " + std::to_string(found));
    const std::size_t* const bounds = pcre2_get_ovector_pointer(match.get());
    const std::size_t begin = found < 0 ? text.size() : bounds[0], end = found < 0 ? text.size() : bounds[1];
    if (begin > at) take(text.substr(at, begin - at));
    if (end > begin) take(text.substr(begin, end - begin));
    at = std::max(end, at + 1);
  }
}

}  // namespace

Tokenizer::Tokenizer(const GgufFile& file) {
  const auto kind = file.text("tokenizer.ggml.model");
  byte_level_ = kind == "gpt2";
  if (kind != "llama" && !byte_level_)
    file.fail("has a tokenizer of kind '" + std::string(kind.value_or("(none)").substr(0, 64)) +
              "'; 'llama' (SentencePiece BPE) and 'gpt2' (byte-level BPE) are supported; use another model");
  const auto names = file.texts("tokenizer.ggml.tokens");
  auto scores = file.numbers("tokenizer.ggml.scores");
  if (byte_level_) scores.emplace(names ? names->size() : 0);  // ranks decide
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
    if (byte_level_ && type != user_defined)
      text_[i] = bytes_of_name(name_[i]);
    else if (!byte_level_)
      replace_all(text_[i], space_mark, " ");
    if (type == user_defined && !name_[i].empty()) user_.push_back(token);
    if (type != unused) token_of_.emplace(name_[i], token);
  }
  std::stable_sort(user_.begin(), user_.end(), [&](std::int32_t a, std::int32_t b) {
    return name_[static_cast<std::size_t>(a)].size() > name_[static_cast<std::size_t>(b)].size();
  });

  if (byte_level_) read_byte_level(file);

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
  add_bos_ = file.flag("tokenizer.ggml.add_bos_token").value_or(!byte_level_ || whole_first_) && bos_.has_value();
  add_space_prefix_ = file.flag("tokenizer.ggml.add_space_prefix").value_or(!byte_level_);
}

std::size_t Tokenizer::PairHash::operator()(const Pair& p) const {
  return std::hash<std::uint64_t>{}(static_cast<std::uint64_t>(p.first) << 32 | static_cast<std::uint32_t>(p.second));
}

void Tokenizer::FreePattern::operator()(pcre2_real_code_8* pattern) const { pcre2_code_free(pattern); }

void Tokenizer::read_byte_level(const GgufFile& file) {
  const std::string_view pre = file.text("tokenizer.ggml.pre").value_or("(none)");
  std::vector<const char*> patterns;
  if (pre == "gpt-2")
    patterns = {gpt2_pattern};
  else if (pre == "smollm")
    patterns = {R"(\p{N})", gpt2_pattern};
  else if (pre == "llama-bpe")
    patterns = {llama3_pattern};
  else
    file.fail("has the pre-tokenizer '" + std::string(pre.substr(0, 64)) +
              "'; 'gpt-2', 'smollm' and 'llama-bpe' are supported; use another model");
  whole_first_ = pre == "llama-bpe";
  for (const char* pattern : patterns) {
    int error = 0;
    std::size_t offset = 0;
    patterns_.emplace_back(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern), PCRE2_ZERO_TERMINATED,
                                         PCRE2_UTF | PCRE2_UCP | PCRE2_MATCH_INVALID_UTF, &error, &offset, nullptr));
    if (patterns_.back() == nullptr)
      throw std::runtime_error("PCRE2 does not know a pattern: error " + std::to_string(error) + " at " +
                               std::to_string(offset) + "; use PCRE2 10.34 or newer with Unicode");
    pcre2_jit_compile(patterns_.back().get(), PCRE2_JIT_COMPLETE);  // slower without, but the same
  }

  for (std::size_t b = 0; b < 256; ++b)
    if (const auto it = token_of_.find(byte_names().name[b]); it != token_of_.end()) byte_token_[b] = it->second;
  const auto lines = file.texts("tokenizer.ggml.merges");
  if (!lines) file.fail("lacks the key 'tokenizer.ggml.merges'; convert the model again");
  if (lines->size() > 1U << 24U)
    file.fail("has " + std::to_string(lines->size()) + " merges; at most 16777216 are supported; use another model");
  std::string both;
  for (std::size_t i = 0; i < lines->size(); ++i) {
    const std::string_view line = (*lines)[i];
    const std::size_t space = line.find(' ', 1);
    const std::string_view left = line.substr(0, space), right = space < line.size() ? line.substr(space + 1) : "";
    both.assign(left).append(right);
    const auto l = token_of_.find(left), r = token_of_.find(right), merged = token_of_.find(both);
    if (l == token_of_.end() || r == token_of_.end() || merged == token_of_.end())
      file.fail("merge " + std::to_string(i) + " names tokens that the vocabulary lacks; convert the model again");
    merges_.emplace(Pair{l->second, r->second}, Pair{static_cast<std::int32_t>(i), merged->second});
  }
}

void Tokenizer::encode_ranked(std::string_view text, std::vector<std::int32_t>& out) const {
  const auto encode_piece = [&](std::string_view piece) {
    if (whole_first_) {
      std::string name;
      for (const char c : piece) name += byte_names().name[static_cast<unsigned char>(c)];
      if (const auto it = token_of_.find(name); it != token_of_.end()) return out.push_back(it->second);
    }
    std::vector<Symbol> symbols;
    for (std::size_t i = 0; i < piece.size(); ++i) {
      const int at = static_cast<int>(i);
      symbols.push_back(
          {i, 1, at - 1, i + 1 < piece.size() ? at + 1 : -1, byte_token_[static_cast<unsigned char>(piece[i])]});
    }
    merge(symbols, [&](const Symbol& left, const Symbol& right) -> std::optional<MergeRule> {
      const auto it = merges_.find({left.token, right.token});
      if (it == merges_.end()) return std::nullopt;
      return MergeRule{-static_cast<double>(it->second.first), it->second.second};
    });
    for (const Symbol& s : symbols) {
      if (s.bytes == 0) continue;
      if (s.token >= 0)
        out.push_back(s.token);
      else if (unknown_)
        out.push_back(*unknown_);
    }
  };
  const auto encode_stretch = [&](std::string_view stretch) {
    if (patterns_.size() == 1) return cut(patterns_[0].get(), stretch, encode_piece);
    cut(patterns_[0].get(), stretch, [&](std::string_view part) { cut(patterns_[1].get(), part, encode_piece); });
  };
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size() && !user_.empty();) {
    const std::int32_t user = user_token(text.substr(at));
    if (user < 0) {
      ++at;
      continue;
    }
    if (at > begin) encode_stretch(text.substr(begin, at - begin));
    out.push_back(user);
    begin = at += name_[static_cast<std::size_t>(user)].size();
  }
  if (begin < text.size()) encode_stretch(text.substr(begin));
}

std::int32_t Tokenizer::user_token(std::string_view text) const {
  for (const std::int32_t t : user_)
    if (const std::string& name = name_[static_cast<std::size_t>(t)]; text.substr(0, name.size()) == name) return t;
  return -1;
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
  if (byte_level_) {
    encode_ranked(marked, out);
  } else {
    replace_all(marked, " ", space_mark);
    encode_scored(marked, out);
  }
  return out;
}

void Tokenizer::encode_scored(std::string_view text, std::vector<std::int32_t>& out) const {
  std::vector<Symbol> symbols;
  for (std::size_t at = 0; at < text.size();) {
    const std::int32_t user = user_token(text.substr(at));
    const std::size_t bytes =
        user >= 0 ? name_[static_cast<std::size_t>(user)].size() : character_bytes(text.substr(at));
    const int i = static_cast<int>(symbols.size());
    symbols.push_back({at, bytes, i - 1, at + bytes < text.size() ? i + 1 : -1, user, user >= 0});
    at += bytes;
  }
  merge(symbols, [&](const Symbol& left, const Symbol& right) -> std::optional<MergeRule> {
    const auto it = token_of_.find(text.substr(left.begin, left.bytes + right.bytes));
    if (it == token_of_.end()) return std::nullopt;
    return MergeRule{static_cast<double>(score_[static_cast<std::size_t>(it->second)]), it->second};
  });

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

std::uint64_t Tokenizer::fingerprint() const { return tokenizer_fingerprint(name_); }

std::string Tokenizer::decode(std::span<const std::int32_t> tokens) const {
  std::string out;
  for (const std::int32_t token : tokens) out += piece(token);
  if (add_space_prefix_ && !out.empty() && out.front() == ' ') out.erase(0, 1);
  return out;
}

}  // namespace lookahead::engines
