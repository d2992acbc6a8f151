#pragma once
/// @file sink.hpp
/// What takes the tokens of a text, and how it may end one.

#include <concepts>
#include <cstddef>
#include <span>

namespace lookahead {

/// What a sink takes of a block before it is committed.
struct Admission {
  std::size_t tokens;  ///< the first so many, at least 1
  bool stop;           ///< the text ends with them
};

/// A sink that may end a text in the middle of a block: `sink.admit(block)` says how many tokens it will take. It is
/// called before the commit and changes nothing that matters; the sink is then called with those tokens.
template <class S, class Token>
concept AdmittingSink = requires(S& sink, std::span<const Token> block) {
  { sink.admit(block) } -> std::same_as<Admission>;
};

}  // namespace lookahead
