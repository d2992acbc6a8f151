// Errors of the CUDA runtime name the call and what it gave; no device is needed for that.
#include <doctest/doctest.h>
#include <string>

#include "lookahead/cuda/error.cuh"

using lookahead::cuda::Error;

TEST_CASE("an error names the call, its code and what the code means") {
  CHECK_NOTHROW(lookahead::cuda::check(cudaSuccess, "cudaMalloc"));
  try {
    lookahead::cuda::check(cudaErrorMemoryAllocation, "cudaMallocAsync");
    FAIL("nothing was thrown");
  } catch (const Error& error) {
    CHECK(error.code == cudaErrorMemoryAllocation);
    CHECK(std::string(error.call) == "cudaMallocAsync");
    CHECK(std::string(error.what()) == "cudaMallocAsync gave cudaErrorMemoryAllocation, out of memory");
  }
}

TEST_CASE("a machine without a device or a driver says so in one sentence") {
  for (const cudaError_t code : {cudaErrorNoDevice, cudaErrorInsufficientDriver}) {
    const std::string message = Error("cudaMalloc", code).what();
    CHECK(message.find("this machine has no CUDA device that can be used (cudaMalloc gave cudaError") == 0);
    CHECK(message.find("): run on one with a GPU and its driver") != std::string::npos);
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) return;
  void* memory = nullptr;
  CHECK_THROWS_AS(lookahead::cuda::check(cudaMalloc(&memory, 1), "cudaMalloc"), Error);
}
