// Shared parts of the module _engine: how arrays, waits and errors cross into Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "codec/codec.h"
#include "proto/base/time.h"
#include "proto/endpoint/endpoint.h"
#include "seal/secrets.h"

namespace gradwire::binding {

namespace nb = nanobind;

template <class T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
template <class T>
using InputArray = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableArray = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// A bucket: float32, or the bits of numbers of two bytes as uint16.
using BucketArray = nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Gives a vector's memory to NumPy without a copy.
template <class T, class Allocator>
Array<T> to_array(std::vector<T, Allocator> values) {
  using Vector = std::vector<T, Allocator>;
  auto owner = std::make_unique<Vector>(std::move(values));
  T* const data = owner->data();
  const size_t size = owner->size();
  nb::capsule capsule(owner.get(), [](void* p) noexcept { delete static_cast<Vector*>(p); });
  static_cast<void>(owner.release());
  return Array<T>(data, {size}, capsule);
}

// The position of `word` among `allowed`, which have the enumeration's order; else ValueError.
template <class Enum, size_t N>
Enum parse(const char* field, const std::string& word,
           const std::array<std::string_view, N>& allowed) {
  const auto at = std::find(allowed.begin(), allowed.end(), word);
  if (at != allowed.end()) return static_cast<Enum>(at - allowed.begin());
  std::string text = std::string(field) + " is \"" + word + "\"; allowed are ";
  for (size_t i = 0; i < N; ++i) {
    text += (i == 0 ? "\"" : ", \"") + std::string(allowed[i]) + "\"";
  }
  throw nb::value_error(text.c_str());
}

// The encoding of this name. Raises ValueError for an unknown name or a wrong share to keep.
codec::Format parse_format(const std::string& encoding, double kept);
// Raises ValueError for a datagram size that chunks cannot be cut for.
void check_datagram(uint32_t datagram_bytes);

// Calls wait(slice) without the GIL until it returns true or the time is up, and handles signals
// (Ctrl-C) in between.
template <class Wait>
bool wait_in_slices(Nanos timeout, Wait&& wait) {
  // Ctrl-C takes effect within this time.
  constexpr Nanos kSlice = 200 * kMillisecond;
  for (Nanos left = std::max<Nanos>(timeout, 0);; left -= kSlice) {
    bool done = false;
    {
      const nb::gil_scoped_release release;
      done = wait(std::min(left, kSlice));
    }
    if (done) return true;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (left <= kSlice) return false;
  }
}

// The id of an op; raises ValueError for a lane out of range.
uint64_t checked_id(uint64_t op, uint64_t lane);

// Takes up to eight numbers; the others are 0.
Stats to_stats(const std::vector<double>& values);

// Raises ValueError for another length.
seal::Secret to_secret(const nb::bytes& bytes);

void add_counters(nb::dict& into, const Counters& counters);

// Entries as tuples: time, word, peer or None, value.
nb::list timeline_list(const std::vector<Timeline::Entry>& entries);

void bind_plan(nb::module_& module);
void bind_codec(nb::module_& module);
void bind_chunks(nb::module_& module);
void bind_engine(nb::module_& module);
void bind_fabric(nb::module_& module);
void bind_interfaces(nb::module_& module);
void bind_seal(nb::module_& module);

}  // namespace gradwire::binding
