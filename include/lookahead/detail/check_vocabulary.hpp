#pragma once
/// @file check_vocabulary.hpp
/// Whether a type of tokens can number a vocabulary.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "lookahead/errors.hpp"

namespace lookahead::detail {

/// Throws InvalidArgument where `Token` cannot hold the number of the last token of a vocabulary.
template <class Token>
void check_vocabulary(std::size_t vocabulary) {
  constexpr auto last = static_cast<std::uint64_t>(std::numeric_limits<Token>::max());
  if (vocabulary > 0 && vocabulary - 1 > last)
    throw InvalidArgument("a vocabulary of " + std::to_string(vocabulary) +
                          " tokens: its numbers must fit the model's token type, which ends at " +
                          std::to_string(last) + ": choose a wider one");
}

}  // namespace lookahead::detail
