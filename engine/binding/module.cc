// The Python module _engine: its errors, its constants and its parts.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <exception>
#include <system_error>

#include "binding/binding.h"
#include "proto/endpoint.h"
#include "wire/packet.h"

namespace nb = nanobind;

namespace {

// OSError with the errno and our text alone: std::system_error appends the system's to what().
void translate_system_error(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::system_error& error) {
    std::string text = error.what();
    const std::string suffix = ": " + error.code().message();
    if (text.ends_with(suffix)) text.resize(text.size() - suffix.size());
    const nb::tuple arguments = nb::make_tuple(error.code().value(), text.c_str());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

}  // namespace

NB_MODULE(_engine, module) {
  module.doc() =
      "gradwire's engine: plans, the UDP engine, the virtual-time fabric, and the lab's link";
  // What an object of the user's holds to the interpreter's end is no leak of ours to warn of.
  nb::set_leak_warnings(std::getenv("GRADWIRE_TEST_LEAKS") != nullptr);
  nb::register_exception_translator(translate_system_error);
  module.attr("CAUSES") =
      nb::cast(std::vector<std::string>(gradwire::kCauses.begin(), gradwire::kCauses.end()));
  module.attr("PROTOCOL_VERSION") = static_cast<int>(gradwire::wire::kVersion);
  module.attr("DEFAULT_MEMORY_LIMIT") = gradwire::EndpointConfig{}.memory_limit;
  module.attr("HEADER_BYTES") = static_cast<int>(gradwire::wire::kHeaderBytes);
  module.def("version", [] { return GRADWIRE_VERSION; });
  gradwire::binding::bind_plan(module);
  gradwire::binding::bind_codec(module);
  gradwire::binding::bind_chunks(module);
  gradwire::binding::bind_engine(module);
  gradwire::binding::bind_fabric(module);
  gradwire::binding::bind_interfaces(module);
  gradwire::binding::bind_lab(module);
}
