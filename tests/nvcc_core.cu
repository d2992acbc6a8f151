/// The host types from a CUDA source: a tree is built and read in a kernel and on the host.

#include "lookahead/token_tree.hpp"

namespace {

using Storage = lookahead::TokenTreeStorage<int, 120>;

LOOKAHEAD_HD void build(Storage& tree) {
  const int pending[] = {1, 2};
  tree.begin(7, pending, 2);
  tree.want(tree.add(tree.root, 3));
}

__global__ void build_on_device(Storage* tree) {
  __shared__ Storage shared;
  if (threadIdx.x == 0) build(shared);
  __syncthreads();
  if (threadIdx.x == 0) *tree = shared;
}

}  // namespace

/// Builds the tree on both sides and says whether the host reads what it should.
bool nvcc_core(Storage* device) {
  build_on_device<<<1, 32>>>(device);
  Storage host;
  build(host);
  const lookahead::TokenTree<int> tree = host.view();
  return tree.size() == 3 && tree.is_wanted(2) && tree.sees(2, 0);
}
