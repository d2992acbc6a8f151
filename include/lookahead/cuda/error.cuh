#pragma once
/// @file error.cuh
/// What the device side throws when a call of the CUDA runtime fails. Mistakes of the caller that are seen before a
/// call throw InvalidArgument, as on the host.

#if !__has_include(<cuda_runtime_api.h>)
#error "lookahead/cuda needs the CUDA toolkit: compile with nvcc, or leave lookahead/cuda out."
#endif

#include <cuda_runtime_api.h>
#include <stdexcept>
#include <string>

namespace lookahead::cuda {

/// A call of the CUDA runtime failed. The message names the call, what the runtime says and, where no device can be
/// used at all, that. Errors of kernels that run already surface in a later call.
struct Error : std::runtime_error {
  Error(const char* what_was_called, cudaError_t what_it_gave)
      : std::runtime_error(message(what_was_called, what_it_gave)), call(what_was_called), code(what_it_gave) {}

  const char* call;  ///< "cudaMallocAsync", for example; a string that lives as long as the program
  cudaError_t code;

 private:
  static std::string message(const char* call, cudaError_t code) {
    const std::string said = std::string(call) + " gave " + cudaGetErrorName(code) + ", " + cudaGetErrorString(code);
    if (code == cudaErrorInsufficientDriver || code == cudaErrorNoDevice)
      return "this machine has no CUDA device that can be used (" + said + "): run on one with a GPU and its driver";
    return said;
  }
};

/// Throws Error where `code` is one.
inline void check(cudaError_t code, const char* call) {
  if (code != cudaSuccess) throw Error(call, code);
}

}  // namespace lookahead::cuda
