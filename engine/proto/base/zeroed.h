// Zeroed is a vector of zeros whose pages the kernel gives when they are first written. It suits
// data whose size a peer claims and that fills as packets arrive.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradwire {

// Memory from this size on is mapped for itself, in huge pages where the kernel has them: the
// allocator would map it for each use, and the kernel would give it page by page of 4 KiB.
constexpr size_t kHugeFrom = 8 << 20;

template <class T>
struct ZeroedAllocator {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);
  using value_type = T;

  ZeroedAllocator() = default;
  template <class U>
  ZeroedAllocator(const ZeroedAllocator<U>&) noexcept {}

  T* allocate(size_t count) {
    if (count > SIZE_MAX / sizeof(T)) throw std::bad_alloc();
    const size_t bytes = count * sizeof(T);
    void* memory;
    if (bytes < kHugeFrom) {
      memory = std::calloc(count, sizeof(T));
      if (!memory) throw std::bad_alloc();
    } else {
      memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) throw std::bad_alloc();
      madvise(memory, bytes, MADV_HUGEPAGE);  // a hint: kernels without it have small pages
    }
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t count) noexcept {
    if (count * sizeof(T) < kHugeFrom)
      std::free(memory);
    else
      munmap(memory, count * sizeof(T));
  }
  // calloc() has already zeroed an element that has no value.
  template <class U>
  void construct(U*) noexcept {}
  template <class U, class... Values>
  void construct(U* at, Values&&... values) {
    std::construct_at(at, std::forward<Values>(values)...);
  }
  bool operator==(const ZeroedAllocator&) const = default;
};

// Its size is fixed at construction: resize() could find old values in memory that the vector
// keeps.
template <class T>
using Zeroed = std::vector<T, ZeroedAllocator<T>>;

}  // namespace gradwire
