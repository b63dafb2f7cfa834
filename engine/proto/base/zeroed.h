// Vectors of zeros whose memory is not touched before it is used: the kernel gives a page when
// something is written to it. For what is as large as somebody claims, and filled as data arrives.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradwire {

template <class T>
struct ZeroedAllocator {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);
  using value_type = T;

  ZeroedAllocator() = default;
  template <class U>
  ZeroedAllocator(const ZeroedAllocator<U>&) noexcept {}

  T* allocate(size_t count) {
    void* const memory = std::calloc(count, sizeof(T));
    if (!memory) throw std::bad_alloc();
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t) noexcept { std::free(memory); }
  // An element without a value is zero as it comes.
  template <class U>
  void construct(U*) noexcept {}
  template <class U, class... Values>
  void construct(U* at, Values&&... values) {
    std::construct_at(at, std::forward<Values>(values)...);
  }
  bool operator==(const ZeroedAllocator&) const = default;
};

// Of the length that it is made with: resize() would find old values in memory that it keeps.
template <class T>
using Zeroed = std::vector<T, ZeroedAllocator<T>>;

}  // namespace gradwire
