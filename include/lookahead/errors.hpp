#pragma once
/// @file errors.hpp
/// What `Decoder` and the exports throw. Every message names the value, the limit and the remedy. The algorithm itself
/// (`Lookahead`) throws nothing.

#include <stdexcept>
#include <string>

namespace lookahead {

/// The caller passed something that cannot be used: an empty prompt, a token outside the vocabulary, a shape beyond the
/// compiled maxima, a buffer of the wrong size. Nothing was changed.
struct InvalidArgument : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// The model has no room for what was asked: more tokens than free slots. Nothing was changed.
struct OutOfRoom : std::length_error {
  using std::length_error::length_error;
};

/// A model broke a rule of the `Model` concept: it kept fewer rows than it must, or returned a token outside its
/// vocabulary.
struct ContractViolation : std::logic_error {
  using std::logic_error::logic_error;
};

}  // namespace lookahead
