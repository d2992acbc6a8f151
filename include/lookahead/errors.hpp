#pragma once
/// @file errors.hpp
/// What the host side throws. Every message names the value, the limit and the remedy. The algorithm itself
/// (`Lookahead`) throws nothing.

#include <stdexcept>
#include <string>

namespace lookahead {

/// The caller passed something that cannot be used: an empty prompt, a token outside the vocabulary, an option out of
/// its range, a buffer of the wrong size. Nothing was changed.
struct InvalidArgument : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// The model has no room for what was asked: more tokens than free slots. Nothing was changed.
struct OutOfRoom : std::length_error {
  using std::length_error::length_error;
};

/// A model, policy or sink broke a rule of its concept: a commit that kept fewer rows than it must, a token outside the
/// vocabulary, logits of which none can be chosen, a context that changed between steps, an admission of no token.
struct ContractViolation : std::logic_error {
  using std::logic_error::logic_error;
};

}  // namespace lookahead
