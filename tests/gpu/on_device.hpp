#pragma once
/// @file on_device.hpp
/// Memory, streams, graphs and times of a device, for its tests and benchmarks.

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

/// What f() enqueues on a stream, to be replayed.
class Graph {
 public:
  template <class F>
  Graph(cudaStream_t stream, const F& f) {
    using lookahead::cuda::check;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    f();
    check(cudaStreamEndCapture(stream, &graph_), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&replay_, graph_, 0), "cudaGraphInstantiate");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    (void)cudaGraphExecDestroy(replay_);
    (void)cudaGraphDestroy(graph_);
  }
  void launch(cudaStream_t stream) const {
    lookahead::cuda::check(cudaGraphLaunch(replay_, stream), "cudaGraphLaunch");
  }
  /// How many of its nodes are no kernels: copies, or work of the host.
  [[nodiscard]] int others() const {
    using lookahead::cuda::check;
    std::size_t count = 0;
    check(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
    std::vector<cudaGraphNode_t> nodes(count);
    check(cudaGraphGetNodes(graph_, nodes.data(), &count), "cudaGraphGetNodes");
    int others = 0;
    for (cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type{};
      check(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
      if (type != cudaGraphNodeTypeKernel) ++others;
    }
    return others;
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t replay_ = nullptr;
};

/// A moment in a stream.
class Event {
 public:
  Event() { lookahead::cuda::check(cudaEventCreate(&event_), "cudaEventCreate"); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { (void)cudaEventDestroy(event_); }
  void record(cudaStream_t stream) { lookahead::cuda::check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  void wait() const { lookahead::cuda::check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
  /// Seconds from another moment to this one; both have passed.
  [[nodiscard]] double since(const Event& other) const {
    float milliseconds = 0;
    lookahead::cuda::check(cudaEventElapsedTime(&milliseconds, other.event_, event_), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) / 1000;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

static __global__ void keep_busy() {
  for (const long long begin = clock64(); clock64() - begin < 400000;) {
  }
}

/// Keeps the device busy for some 200 microseconds, so that what follows has been enqueued before it begins: the time
/// of launching it is not measured.
[[maybe_unused]] static void hold(cudaStream_t stream) { keep_busy<<<1, 1, 0, stream>>>(); }

inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// The median of the times that the device takes for what f() enqueues, in seconds; the first calls do not count.
template <class F>
double median_seconds(cudaStream_t stream, int repetitions, const F& f) {
  Event begin, end;
  std::vector<double> times;
  for (int i = -3; i < repetitions; ++i) {
    hold(stream);
    begin.record(stream);
    f();
    end.record(stream);
    end.wait();
    if (i >= 0) times.push_back(end.since(begin));
  }
  return median(times);
}
