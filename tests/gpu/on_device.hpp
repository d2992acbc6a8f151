#pragma once
/// @file on_device.hpp
/// Memory, streams and times of a device, for its tests and benchmarks.

#include <algorithm>
#include <cstddef>
#include <cuda_runtime.h>
#include <vector>

#include "lookahead/cuda/error.cuh"

/// `count` objects in the device's memory.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(std::size_t count) : count_(count) {
    lookahead::cuda::check(cudaMalloc(&data_, std::max<std::size_t>(count, 1) * sizeof(T)), "cudaMalloc");
  }
  explicit OnDevice(const std::vector<T>& values) : OnDevice(values.size()) {
    lookahead::cuda::check(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { (void)cudaFree(data_); }

  [[nodiscard]] T* data() const { return data_; }
  /// Precondition: work on other streams has ended.
  [[nodiscard]] std::vector<T> values() const {
    std::vector<T> out(count_);
    lookahead::cuda::check(cudaMemcpy(out.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return out;
  }

 private:
  T* data_ = nullptr;
  std::size_t count_;
};

/// A stream that does not wait for the default one.
class Stream {
 public:
  Stream() {
    lookahead::cuda::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { (void)cudaStreamDestroy(stream_); }
  operator cudaStream_t() const { return stream_; }  // NOLINT: it is one
  void wait() const { lookahead::cuda::check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// The median of the times that the device takes for what f() enqueues, in seconds; the first calls do not count.
template <class F>
double median_seconds(cudaStream_t stream, int repetitions, const F& f) {
  using lookahead::cuda::check;
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> times;
  for (int i = -3; i < repetitions; ++i) {
    check(cudaEventRecord(begin, stream), "cudaEventRecord");
    f();
    check(cudaEventRecord(end, stream), "cudaEventRecord");
    check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    if (i >= 0) times.push_back(milliseconds);
  }
  check(cudaEventDestroy(begin), "cudaEventDestroy");
  check(cudaEventDestroy(end), "cudaEventDestroy");
  std::nth_element(times.begin(), times.begin() + repetitions / 2, times.end());
  return static_cast<double>(times[static_cast<std::size_t>(repetitions / 2)]) / 1000;
}
