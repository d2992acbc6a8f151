#pragma once
/// @file floats.hpp
/// Memory for activations, the cache and arranged weights.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace lookahead::engines {

/// Zeroed floats on a cache line; pages cost nothing until they are touched.
class Floats {
 public:
  Floats() = default;
  /// With `large_pages`, for what is read from end to end in every step: fewer address translations.
  explicit Floats(std::size_t n, [[maybe_unused]] bool large_pages = false)
      : memory_(static_cast<float*>(std::calloc(n + 16, sizeof(float))), &std::free) {
    if (memory_ == nullptr) throw std::bad_alloc();
    const auto to_boundary = [&](std::size_t alignment) {
      return memory_.get() +
             (alignment - reinterpret_cast<std::uintptr_t>(memory_.get()) % alignment) % alignment / sizeof(float);
    };
    data_ = to_boundary(64);
#if defined(MADV_HUGEPAGE)
    constexpr std::size_t page = 4096;  // a hint: what does not fit it is refused and changes nothing
    if (large_pages && n * sizeof(float) > page) madvise(to_boundary(page), n * sizeof(float) - page, MADV_HUGEPAGE);
#endif
  }
  [[nodiscard]] float* operator+(std::size_t i) const { return data_ + i; }

 private:
  std::unique_ptr<float, decltype(&std::free)> memory_{nullptr, &std::free};
  float* data_ = nullptr;
};

}  // namespace lookahead::engines
