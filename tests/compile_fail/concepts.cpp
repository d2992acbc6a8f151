// An engine or a policy that lacks something is told the one requirement that it misses. This compiles as it stands;
// with each of these macros it must fail, and the compiler must say what follows the colon.
// LOOKAHEAD_WITHOUT_TOKEN_TYPE: no type named .*token_type
// LOOKAHEAD_WITH_64_BIT_TOKENS: HasTokenType
// LOOKAHEAD_WITHOUT_VOCABULARY: HasVocabulary
// LOOKAHEAD_WITHOUT_CONTEXT: HasContext
// LOOKAHEAD_WITHOUT_TRUNCATE: HasContext
// LOOKAHEAD_WITHOUT_LIMITS: HasLimits
// LOOKAHEAD_WITHOUT_PREFILL: Prefills
// LOOKAHEAD_WITHOUT_FORWARD: ForwardsTrees
// LOOKAHEAD_WITHOUT_COMMIT: CommitsPaths
// LOOKAHEAD_WITH_VOID_COMMIT: CommitsPaths
// LOOKAHEAD_WITHOUT_CHOICES: ReadsChoices
// LOOKAHEAD_WITHOUT_SELECT: VerifyPolicy
// LOOKAHEAD_WITH_OBSERVE_WITHOUT_POSITION: ObserveIsCallable
// LOOKAHEAD_WITH_OBSERVE_IN_WRONG_ORDER: ObserveIsCallable
// LOOKAHEAD_WITH_PRIVATE_OBSERVE: ObserveIsCallable

#include <cstddef>
#include <cstdint>
#include <span>

#include "lookahead/decoder.hpp"

struct Engine {
#if defined(LOOKAHEAD_WITH_64_BIT_TOKENS)
  using token_type = std::int64_t;
#elif !defined(LOOKAHEAD_WITHOUT_TOKEN_TYPE)
  using token_type = std::int32_t;
#endif
#ifndef LOOKAHEAD_WITHOUT_VOCABULARY
  std::size_t vocabulary() const;
#endif
#ifndef LOOKAHEAD_WITHOUT_CONTEXT
  std::size_t context_size() const;
#endif
#ifndef LOOKAHEAD_WITHOUT_TRUNCATE
  void truncate(std::size_t tokens);
#endif
#ifndef LOOKAHEAD_WITHOUT_LIMITS
  std::size_t free_slots() const;
#endif
  std::size_t max_rows() const;
  std::size_t max_logit_rows() const;
#ifndef LOOKAHEAD_WITHOUT_PREFILL
  void prefill(std::span<const std::int32_t> tokens);
#endif
#ifndef LOOKAHEAD_WITHOUT_FORWARD
  void forward(const lookahead::TokenTree<std::int32_t>& tree);
#endif
#if defined(LOOKAHEAD_WITH_VOID_COMMIT)
  void commit(std::span<const std::int32_t> path);
#elif !defined(LOOKAHEAD_WITHOUT_COMMIT)
  std::size_t commit(std::span<const std::int32_t> path);
#endif
#ifndef LOOKAHEAD_WITHOUT_CHOICES
  std::int32_t next_token(int row);
#endif
};

struct Policy {
#ifndef LOOKAHEAD_WITHOUT_SELECT
  std::int32_t select(Engine& engine, int row, std::int64_t position);
#endif
#if defined(LOOKAHEAD_WITH_OBSERVE_WITHOUT_POSITION)
  void observe(std::span<const std::int32_t> tokens);
#elif defined(LOOKAHEAD_WITH_OBSERVE_IN_WRONG_ORDER)
  template <class Token>
  void observe(std::span<const Token> tokens, std::size_t position);
#else
#ifdef LOOKAHEAD_WITH_PRIVATE_OBSERVE
 private:
#endif
  void observe(std::size_t position, std::span<const std::int32_t> tokens);
#endif
};

using Decoder = lookahead::Decoder<Engine, 1, 2, 0, Policy>;
