#include "engines/workers.hpp"

namespace lookahead::engines {
namespace {

constexpr int spins_before_sleep = 4000;

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Workers::Workers(int threads) {
  for (int t = 1; t < threads; ++t) threads_.emplace_back([this, t] { idle(t); });
}

Workers::~Workers() {
  unclaimed_.store(-1, std::memory_order_release);
  unclaimed_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void Workers::dispatch(int tasks) {
  tasks_ = tasks;
  done_.store(0, std::memory_order_relaxed);
  unclaimed_.store(tasks, std::memory_order_release);
  unclaimed_.notify_all();
  while (work(0)) {
  }
  for (int spins = 0; done_.load(std::memory_order_acquire) != tasks; ++spins) {
    if (spins < spins_before_sleep)
      relax();
    else
      std::this_thread::yield();
  }
}

bool Workers::work(int thread) {
  int left = unclaimed_.load(std::memory_order_relaxed);
  while (left > 0)
    if (unclaimed_.compare_exchange_weak(left, left - 1, std::memory_order_acquire, std::memory_order_relaxed)) {
      call_(context_, tasks_ - left, thread);
      done_.fetch_add(1, std::memory_order_release);
      return true;
    }
  return false;
}

void Workers::idle(int thread) {
  for (int spins = 0;;) {
    if (work(thread)) {
      spins = 0;
    } else if (unclaimed_.load(std::memory_order_relaxed) < 0) {
      return;
    } else if (++spins < spins_before_sleep) {
      relax();
    } else {
      unclaimed_.wait(0, std::memory_order_relaxed);
      spins = 0;
    }
  }
}

}  // namespace lookahead::engines
