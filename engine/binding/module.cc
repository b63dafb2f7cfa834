// The Python module _engine: its errors, its constants and its parts.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>

#include "binding/binding.h"
#include "binding/errors.h"
#include "proto/endpoint/endpoint.h"
#include "wire/packet.h"

namespace nb = nanobind;

NB_MODULE(_engine, module) {
  module.doc() = "gradwire's engine: plans, the UDP engine and the virtual-time fabric";
  // Objects that the user keeps until the interpreter ends are no leaks of this module.
  nb::set_leak_warnings(std::getenv("GRADWIRE_TEST_LEAKS") != nullptr);
  nb::register_exception_translator(gradwire::binding::translate_system_error);
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
  gradwire::binding::bind_seal(module);
}
