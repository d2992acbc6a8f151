/// The main function of the device's tests: where there is no device they are skipped, by name.

#include <cstdio>
#include <cuda_runtime_api.h>

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

int main(int argc, char** argv) {
  int devices = 0;
  const cudaError_t code = cudaGetDeviceCount(&devices);
  if (code != cudaSuccess || devices == 0) {
    std::printf("SKIPPED: %s: this machine has no CUDA device that can be used (%s)\n", argv[0],
                cudaGetErrorString(code));
    return 77;
  }
  return doctest::Context(argc, argv).run();
}
