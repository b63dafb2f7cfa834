// The module _parts hands the parts of proto, and of seal, to their unit tests, each without an
// endpoint. It holds no logic: times are nanoseconds, and what a part returns through references
// comes back as a tuple or a list. Plans are objects of the module _engine.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <span>

#include "proto/base/bitmap.h"

namespace gradwire::parts {

namespace nb = nanobind;
using namespace nb::literals;

// The set of these numbers below `size`, as Bitmap.
inline Bitmap to_bitmap(size_t size, const std::vector<uint32_t>& members) {
  Bitmap bitmap(size);
  for (const uint32_t member : members) bitmap.set(member);
  return bitmap;
}

inline std::span<const uint8_t> span_of(const nb::bytes& bytes) {
  return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
}
inline nb::bytes bytes_of(std::span<const uint8_t> span) {
  return nb::bytes(span.data(), span.size());
}

void bind_base(nb::module_& module);
void bind_recovery(nb::module_& module);
void bind_congestion(nb::module_& module);
void bind_credit(nb::module_& module);
void bind_sched(nb::module_& module);
void bind_path(nb::module_& module);
void bind_push(nb::module_& module);
void bind_pull(nb::module_& module);
void bind_seal(nb::module_& module);
void bind_op(nb::module_& module);

}  // namespace gradwire::parts
