/// What the other tests lean on: the counter of allocations and the number of random cases.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <doctest/doctest.h>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cases.hpp"
#include "no_alloc.hpp"

namespace {

struct alignas(64) Wide {
  char bytes[64];
};

/// Allocations made by `f`.
template <class F>
std::size_t allocations(F f) {
  const std::size_t before = allocation_count();
  f();
  return allocation_count() - before;
}

/// Keeps the compiler from dropping an allocation that nobody reads.
template <class T>
void escape(T* p) {
  asm volatile("" : : "r"(p) : "memory");
}

/// Sets LOOKAHEAD_CASES for one scope and restores it afterwards.
class ScopedCases {
 public:
  explicit ScopedCases(const char* value) {
    if (const char* const old = std::getenv(name)) old_ = std::make_unique<std::string>(old);
    if (value == nullptr)
      unsetenv(name);
    else
      setenv(name, value, 1);
  }
  ~ScopedCases() {
    if (old_ != nullptr)
      setenv(name, old_->c_str(), 1);
    else
      unsetenv(name);
  }
  ScopedCases(const ScopedCases&) = delete;
  ScopedCases& operator=(const ScopedCases&) = delete;

 private:
  static constexpr const char* name = "LOOKAHEAD_CASES";
  std::unique_ptr<std::string> old_;
};

}  // namespace

TEST_CASE("every form of operator new is counted") {
  CHECK(allocations([] {}) == 0);
  CHECK(allocations([] {
          int* const p = new int;
          escape(p);
          delete p;
        }) == 1);
  CHECK(allocations([] {
          int* const p = new int[100];
          escape(p);
          delete[] p;
        }) == 1);
  CHECK(allocations([] {
          Wide* const p = new Wide;
          escape(p);
          CHECK(reinterpret_cast<std::uintptr_t>(p) % alignof(Wide) == 0);
          delete p;
        }) == 1);
  CHECK(allocations([] {
          Wide* const p = new Wide[3];
          escape(p);
          delete[] p;
        }) == 1);
  CHECK(allocations([] {
          int* const p = new (std::nothrow) int;
          escape(p);
          delete p;
        }) == 1);
  CHECK(allocations([] {
          std::vector<int> v(1000);
          escape(v.data());
        }) == 1);
}

TEST_CASE("allocations of other threads are counted") {
  const std::size_t before = allocation_count();
  std::thread([] { escape(std::make_unique<int>(1).get()); }).join();
  CHECK(allocation_count() > before);
}

TEST_CASE("the number of cases comes from the environment and must make sense") {
  {
    const ScopedCases scope(nullptr);
    CHECK(cases(7) == 7);
  }
  {
    const ScopedCases scope("12");
    CHECK(cases(7) == 12);
  }
  for (const char* const bad : {"", "0", "-3", "x", "12x", "1e6", " 5", "99999999999"}) {
    const ScopedCases scope(bad);
    CHECK_THROWS_AS(cases(7), std::invalid_argument);
  }
}
