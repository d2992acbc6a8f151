#pragma once
/// @file workers.hpp
/// A small pool of threads that stays for the life of an engine.

#include <atomic>
#include <cstddef>
#include <thread>
#include <type_traits>
#include <vector>

namespace lookahead::engines {

/// Runs independent tasks on a fixed number of threads, the caller's included. No allocation and no lock per run; idle
/// threads spin for a moment and then sleep.
class Workers {
 public:
  /// Precondition: threads >= 1.
  explicit Workers(int threads);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  /// Number of threads, the caller's included.
  [[nodiscard]] int size() const { return static_cast<int>(threads_.size()) + 1; }

  /// Calls `task(i, thread)` once for every i in [0, tasks), started in this order, with 0 <= thread < size(), and
  /// returns when all are done. Tasks must not throw. Not reentrant.
  template <class Task>
  void run(int tasks, Task&& task) {
    if (tasks == 1 || threads_.empty()) {
      for (int i = 0; i < tasks; ++i) task(i, 0);
      return;
    }
    context_ = const_cast<void*>(static_cast<const void*>(&task));
    call_ = [](void* context, int i, int thread) {
      (*static_cast<std::remove_reference_t<Task>*>(context))(i, thread);
    };
    dispatch(tasks);
  }

 private:
  void dispatch(int tasks);
  bool work(int thread);
  void idle(int thread);

  std::vector<std::thread> threads_;
  void (*call_)(void*, int, int) = nullptr;
  void* context_ = nullptr;
  int tasks_ = 0;
  /// Tasks that nobody has claimed; negative: the threads end. A claim is the only right to read `call_`, `tasks_` and
  /// `context_`.
  alignas(64) std::atomic<int> unclaimed_{0};
  alignas(64) std::atomic<int> done_{0};
};

}  // namespace lookahead::engines
