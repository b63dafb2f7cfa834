// Input reads values from the bytes that a fuzzer makes. Once they are used up it reads zeros, so
// every input is a whole case, and a shorter one is a simpler case.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

namespace gradwire::fuzz {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : bytes_(data, size) {}

  bool done() const { return at_ >= bytes_.size(); }
  template <class T>
  T get() {
    T value{};
    const size_t size = std::min(sizeof(T), bytes_.size() - at_);
    std::memcpy(&value, bytes_.data() + at_, size);
    at_ += size;
    return value;
  }
  uint8_t byte() { return get<uint8_t>(); }
  bool flip() { return byte() & 1; }
  // A number below `bound`, which is at most 65,536.
  uint32_t below(uint32_t bound) { return bound <= 256 ? byte() % bound : get<uint16_t>() % bound; }
  // A number as faults like it: next to `usual`, at an end of its type, or any.
  template <class T>
  T number(T usual) {
    const uint8_t how = byte();
    switch (how % 8) {
      case 0:
        return 0;
      case 1:
        return static_cast<T>(~T{0});
      case 2:
        return static_cast<T>(T{1} << (8 * sizeof(T) - 1));
      case 3:
        return get<T>();
      case 4:
        return static_cast<T>(usual + static_cast<T>(get<int8_t>()));
      default:
        return usual;
    }
  }
  std::vector<uint8_t> take(size_t count) {
    const size_t size = std::min(count, bytes_.size() - at_);
    const auto part = bytes_.subspan(at_, size);
    at_ += size;
    return {part.begin(), part.end()};
  }
  std::span<const uint8_t> rest() const { return bytes_.subspan(at_); }

 private:
  std::span<const uint8_t> bytes_;
  size_t at_ = 0;
};

// Ends the process where something that must hold does not.
inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: broken: %s\n", what);
  std::abort();
}

}  // namespace gradwire::fuzz

// libFuzzer calls it, and so does driver.cc.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
