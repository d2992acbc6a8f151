// Sizes that make no sense are refused with the rule and the remedy. This compiles as it stands; with each of these
// macros it must fail, and the compiler must say what follows the colon.
// LOOKAHEAD_ROWS=0: A tree needs room for at least one row.
// LOOKAHEAD_W=0: A window has at least one column: pass shape.w = 0 to a step that should run without it.
// LOOKAHEAD_N=1: N-grams have at least two tokens: use N = 2 for plain Jacobi iteration.
// LOOKAHEAD_N=33: N-grams have at most 32 tokens: a column's levels are the bits of a word.
// LOOKAHEAD_STEP_W=0: W is room for a window, 1 or more: pass Shape{.w = 0} to run without one.
// LOOKAHEAD_STEP_N=1: N-grams have at least two tokens: N = 2 is the smallest window.
// LOOKAHEAD_STEP_G=-1: G counts guesses: 0 is a window alone.
// LOOKAHEAD_STEP_G=2048: Too many rows for the keys of growth: lower
// LOOKAHEAD_STEP_TOKEN=long: Tokens have at most 32 bits: map yours to an integer of that size.

#include "lookahead/jacobi_window.hpp"
#include "lookahead/lookahead_step.hpp"
#include "lookahead/token_tree.hpp"

#ifndef LOOKAHEAD_ROWS
#define LOOKAHEAD_ROWS 1
#endif
#ifndef LOOKAHEAD_W
#define LOOKAHEAD_W 1
#endif
#ifndef LOOKAHEAD_N
#define LOOKAHEAD_N 2
#endif
#ifndef LOOKAHEAD_STEP_W
#define LOOKAHEAD_STEP_W 1
#endif
#ifndef LOOKAHEAD_STEP_N
#define LOOKAHEAD_STEP_N 2
#endif
#ifndef LOOKAHEAD_STEP_G
#define LOOKAHEAD_STEP_G 0
#endif
#ifndef LOOKAHEAD_STEP_TOKEN
#define LOOKAHEAD_STEP_TOKEN int
#endif

lookahead::TokenTreeStorage<int, LOOKAHEAD_ROWS> tree;
lookahead::JacobiWindow<LOOKAHEAD_W, LOOKAHEAD_N> window;
lookahead::Lookahead<LOOKAHEAD_STEP_W, LOOKAHEAD_STEP_N, LOOKAHEAD_STEP_G, LOOKAHEAD_STEP_TOKEN> step;
