// Arithmetic over the parts of a vector, for Python: passes for which NumPy has no single function.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "binding/binding.h"
#include "reduce/accumulate.h"

namespace gradwire::binding {

using nb::literals::operator""_a;

namespace {

using Offsets = InputArray<uint64_t>;
using Lengths = InputArray<uint32_t>;

// Raises ValueError unless all chunks lie within `elements`.
void check_chunks(const Offsets& offsets, const Lengths& lengths, size_t elements) {
  const size_t chunks = offsets.shape(0);
  if (lengths.shape(0) != chunks) {
    throw nb::value_error(("lengths has " + std::to_string(lengths.shape(0)) +
                           " entries, offsets has " + std::to_string(chunks))
                              .c_str());
  }
  for (size_t c = 0; c < chunks; ++c) {
    if (offsets.data()[c] <= elements && lengths.data()[c] <= elements - offsets.data()[c]) {
      continue;
    }
    throw nb::value_error(("chunk " + std::to_string(c) + " of " +
                           std::to_string(lengths.data()[c]) + " elements from " +
                           std::to_string(offsets.data()[c]) + " on reaches beyond the " +
                           std::to_string(elements) + " that there are")
                              .c_str());
  }
}

Array<float> mean_magnitudes(const InputArray<float>& values, const Offsets& offsets,
                             const Lengths& lengths) {
  check_chunks(offsets, lengths, values.shape(0));
  std::vector<float> means(offsets.shape(0));
  {
    const nb::gil_scoped_release release;
    for (size_t c = 0; c < means.size(); ++c) {
      means[c] = reduce::mean_magnitude(values.data() + offsets.data()[c], lengths.data()[c]);
    }
  }
  return to_array(std::move(means));
}

// Sums over the elements from each start to the next, and from the last start to the end.
Array<double> square_sums(const InputArray<float>& values, const Offsets& starts) {
  const size_t parts = starts.shape(0);
  const auto end_of = [&](size_t part) {
    return part + 1 < parts ? starts.data()[part + 1] : values.shape(0);
  };
  for (size_t part = 0; part < parts; ++part) {
    if (starts.data()[part] <= end_of(part) && end_of(part) <= values.shape(0)) continue;
    throw nb::value_error(("starts: " + std::to_string(starts.data()[part]) +
                           " is beyond where the next begins, or the " +
                           std::to_string(values.shape(0)) + " elements end")
                              .c_str());
  }
  std::vector<double> sums(parts);
  {
    const nb::gil_scoped_release release;
    for (size_t part = 0; part < parts; ++part) {
      const uint64_t start = starts.data()[part];
      sums[part] = reduce::square_sum(values.data() + start, end_of(part) - start);
    }
  }
  return to_array(std::move(sums));
}

// The vectors may begin at different elements: `source` holds those from `begin` on.
void write_chunks(const WritableArray& values, const Offsets& offsets, const Lengths& lengths,
                  const InputArray<float>& source, uint64_t begin, float factor) {
  check_chunks(offsets, lengths, values.shape(0));
  const nb::gil_scoped_release release;
  const uint64_t end = begin + source.shape(0);
  for (size_t c = 0; c < offsets.shape(0); ++c) {
    const uint64_t from = std::max(begin, offsets.data()[c]);
    const uint64_t to = std::min(end, offsets.data()[c] + lengths.data()[c]);
    if (from >= to) continue;
    reduce::write_scaled(values.data() + from, source.data() + (from - begin), factor, to - from);
  }
}

}  // namespace

void bind_chunks(nb::module_& module) {
  module.def("mean_magnitudes", &mean_magnitudes, "values"_a, "offsets"_a, "lengths"_a,
             "The mean magnitude of each chunk's elements.");
  module.def("square_sums", &square_sums, "values"_a, "starts"_a,
             "The sum of the squares of the elements from each start to the next.");
  module.def("write_chunks", &write_chunks, "values"_a.noconvert(), "offsets"_a, "lengths"_a,
             "source"_a, "begin"_a, "factor"_a,
             "Writes the chunks' elements that `source` holds, times `factor`.");
}

}  // namespace gradwire::binding
