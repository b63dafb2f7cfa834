// Zeroed is a vector of zeros whose pages the kernel gives when they are first written. It suits
// data whose size a peer claims and that fills as packets arrive.
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
