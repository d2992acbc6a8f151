#pragma once
/// @file tokenizer.hpp
/// Text to tokens and back, as the model file describes it.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engines/gguf.hpp"

struct pcre2_real_code_8;

namespace lookahead::engines {

/// The tokenizer of a model file: SentencePiece BPE (merges by score, bytes for what the vocabulary lacks), or the
/// byte-level BPE of the GPT-2 family (merges by rank, within the pieces of its pre-tokenizer: gpt-2, smollm,
/// llama-bpe).
///
/// Bytes that are not UTF-8 are kept: each becomes its byte token, so `decode(encode(text))` gives a text back (only
/// U+2581, which SentencePiece uses for the space, comes back as one).
/// A byte-level vocabulary that lacks a byte drops it, as the reference implementations do.
///
/// Movable, not copyable. All const members may be called from several threads at once.
class Tokenizer {
 public:
  /// Reads the vocabulary. Throws `ModelFileError` where it is missing, inconsistent or of an unsupported kind. Keeps
  /// no reference to the file.
  explicit Tokenizer(const GgufFile& file);
  Tokenizer(Tokenizer&&) = default;
  Tokenizer& operator=(Tokenizer&&) = default;
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;
  ~Tokenizer() = default;

  /// The tokens of a text, behind the begin token where `add_bos` asks for it and the vocabulary has one. Control
  /// tokens are never recognised in text: compose them with `find`. O(n log n).
  [[nodiscard]] std::vector<std::int32_t> encode(std::string_view text, bool add_bos) const;

  /// The text of tokens. Where the vocabulary puts a space in front of every text, that space is taken off again.
  /// Precondition: all tokens are in [0, vocabulary()).
  [[nodiscard]] std::string decode(std::span<const std::int32_t> tokens) const;

  /// The bytes that one token stands for; nothing for control tokens. A character may be spread over several tokens, so
  /// a stream of pieces is UTF-8 as a whole only. Precondition: token in [0, vocabulary()).
  [[nodiscard]] std::string_view piece(std::int32_t token) const { return text_[static_cast<std::size_t>(token)]; }

  /// The token that the vocabulary calls `name`, such as "<s>"; control tokens included.
  [[nodiscard]] std::optional<std::int32_t> find(std::string_view name) const;

  /// The token that begins a text, if there is one.
  [[nodiscard]] std::optional<std::int32_t> bos() const { return bos_; }

  /// The tokens that end a text or a turn, in increasing order; may be empty.
  [[nodiscard]] std::span<const std::int32_t> eos() const { return eos_; }

  /// Whether the model expects the begin token in front of a prompt.
  [[nodiscard]] bool add_bos() const { return add_bos_; }

  /// Tells tokenizers apart: the `tokenizer_fingerprint` of all tokens' names.
  [[nodiscard]] std::uint64_t fingerprint() const;

  /// Number of tokens.
  [[nodiscard]] std::size_t vocabulary() const { return text_.size(); }

 private:
  using Pair = std::pair<std::int32_t, std::int32_t>;
  struct PairHash {
    std::size_t operator()(const Pair& p) const;
  };
  struct FreePattern {
    void operator()(pcre2_real_code_8* pattern) const;
  };

  void read_byte_level(const GgufFile& file);
  std::int32_t user_token(std::string_view text) const;  ///< the user-defined token that the text starts with, or -1
  void encode_scored(std::string_view text, std::vector<std::int32_t>& out) const;
  void encode_ranked(std::string_view text, std::vector<std::int32_t>& out) const;

  std::vector<std::string> name_;  ///< as in the file
  std::vector<std::string> text_;  ///< the bytes that a token stands for
  std::vector<float> score_;
  std::unordered_map<std::string_view, std::int32_t> token_of_;  ///< views of name_; what text may become
  std::unordered_map<std::string_view, std::int32_t> control_;
  std::vector<std::int32_t> byte_token_;  ///< [256], -1 where the vocabulary lacks it
  std::vector<std::int32_t> user_;        ///< user-defined tokens, the longest first

  // Byte-level BPE alone.
  bool byte_level_ = false;
  bool whole_first_ = false;  ///< a piece that is a token is not merged from bytes
  std::vector<std::unique_ptr<pcre2_real_code_8, FreePattern>> patterns_;  ///< each cuts the pieces of the one before
  std::unordered_map<Pair, Pair, PairHash> merges_;                        ///< left, right -> rank, token

  std::optional<std::int32_t> bos_, unknown_;
  std::vector<std::int32_t> eos_;
  bool add_bos_ = false, add_space_prefix_ = true;
};

}  // namespace lookahead::engines
