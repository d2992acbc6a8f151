/// The core from a CUDA source: the phases of a step compile for the host and in a kernel.

#include "lookahead/lookahead.hpp"

namespace {

using Step = lookahead::Lookahead<15, 5, 15>;
using State = lookahead::detail::StepState<15, 5, 15, int>;
using Scratch = lookahead::detail::StepScratch<15, 5, 15, int>;

/// Chooses the row's number: what is chosen does not matter here.
struct Choice {
  LOOKAHEAD_HD int operator()(int row) const { return row; }
  LOOKAHEAD_HD int operator()(int row, int* out, int) const {
    *out = row;
    return 1;
  }
};

struct Never {
  LOOKAHEAD_HD bool operator()(int) const { return false; }
};

LOOKAHEAD_HD void step(State& state, const lookahead::NGramPoolRef& pool, Step::Tree& tree, Scratch& scratch) {
  const lookahead::SerialGroup group;
  const int prompt[] = {1, 2, 3, 1, 2};
  lookahead::detail::start(group, state, pool, prompt, 5, 7, scratch);
  lookahead::detail::plan(group, state, pool, lookahead::Shape{}, lookahead::Limits{}, tree, scratch);
  lookahead::detail::resolve(group, state, tree, Choice{}, Choice{}, Never{});
  lookahead::detail::apply(group, state, pool, tree, state.path_count, scratch);
}

__global__ void step_on_device(State* state, lookahead::NGramPoolRef pool, Step::Tree* tree, Scratch* scratch) {
  step(*state, pool, *tree, *scratch);
}

}  // namespace

/// The same on both sides.
void nvcc_core(State* state, lookahead::NGramPoolRef pool, Step::Tree* tree, Scratch* scratch) {
  step_on_device<<<1, 1>>>(state, pool, tree, scratch);
  lookahead::NGramPool<int> host_pool;
  step(*state, host_pool.ref(), *tree, *scratch);

  // A shared pool is the host's alone.
  lookahead::SharedNGramPool<int> shared_pool;
  Step on_host;
  const int prompt[] = {1, 2};
  on_host.start(shared_pool.in(0, 100), prompt);
  on_host.plan(shared_pool.in(0, 100), {}, {}, *tree);
}
