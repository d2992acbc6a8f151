#pragma once
/// @file no_alloc.hpp
/// Counts heap allocations, and lets them fail. Include it in exactly one source of an executable: it replaces operator
/// new and delete.

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace no_alloc {

inline std::atomic<std::size_t> count{0}, last{~std::size_t{0}};

// Not inlined: g++ would pair malloc with operator delete, or new with free, and warn.
[[gnu::noinline]] inline void* allocate(std::size_t size, std::size_t alignment) noexcept {
  if (count.fetch_add(1, std::memory_order_relaxed) >= last.load(std::memory_order_relaxed)) return nullptr;
  // aligned_alloc takes whole multiples of the alignment; at least one byte, so that pointers are distinct.
  const std::size_t rounded = (size + alignment - 1) / alignment * alignment;
  if (rounded < size) return nullptr;
  return std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
}

[[gnu::noinline]] inline void release(void* p) noexcept { std::free(p); }

inline void* allocate_or_throw(std::size_t size, std::size_t alignment) {
  void* const p = allocate(size, alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace no_alloc

/// Calls of operator new, in every thread, since the program started. A step allocates nothing when the counts before
/// and behind it are equal.
inline std::size_t allocation_count() { return no_alloc::count.load(std::memory_order_relaxed); }

/// Lets all allocations fail from the n-th on, counted from 0 at this object, for as long as it lives.
class FailAllocations {
 public:
  explicit FailAllocations(std::size_t n) { no_alloc::last = allocation_count() + n; }
  FailAllocations(const FailAllocations&) = delete;
  FailAllocations& operator=(const FailAllocations&) = delete;
  ~FailAllocations() { no_alloc::last = ~std::size_t{0}; }
};

// All forms: a sanitizer's own versions of those left out would neither be counted nor match these.
// NOLINTBEGIN
constexpr std::size_t no_alloc_default = __STDCPP_DEFAULT_NEW_ALIGNMENT__;
void* operator new(std::size_t n) { return no_alloc::allocate_or_throw(n, no_alloc_default); }
void* operator new[](std::size_t n) { return no_alloc::allocate_or_throw(n, no_alloc_default); }
void* operator new(std::size_t n, std::align_val_t a) { return no_alloc::allocate_or_throw(n, std::size_t(a)); }
void* operator new[](std::size_t n, std::align_val_t a) { return no_alloc::allocate_or_throw(n, std::size_t(a)); }
void* operator new(std::size_t n, const std::nothrow_t&) noexcept { return no_alloc::allocate(n, no_alloc_default); }
void* operator new[](std::size_t n, const std::nothrow_t&) noexcept { return no_alloc::allocate(n, no_alloc_default); }
void* operator new(std::size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return no_alloc::allocate(n, std::size_t(a));
}
void* operator new[](std::size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return no_alloc::allocate(n, std::size_t(a));
}
void operator delete(void* p) noexcept { no_alloc::release(p); }
void operator delete[](void* p) noexcept { no_alloc::release(p); }
void operator delete(void* p, std::size_t) noexcept { no_alloc::release(p); }
void operator delete[](void* p, std::size_t) noexcept { no_alloc::release(p); }
void operator delete(void* p, std::align_val_t) noexcept { no_alloc::release(p); }
void operator delete[](void* p, std::align_val_t) noexcept { no_alloc::release(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { no_alloc::release(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { no_alloc::release(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { no_alloc::release(p); }
void operator delete[](void* p, const std::nothrow_t&) noexcept { no_alloc::release(p); }
void operator delete(void* p, std::align_val_t, const std::nothrow_t&) noexcept { no_alloc::release(p); }
void operator delete[](void* p, std::align_val_t, const std::nothrow_t&) noexcept { no_alloc::release(p); }
// NOLINTEND
