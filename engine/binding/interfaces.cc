// The host's network interfaces in Python.
#include "io/interfaces.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "binding/binding.h"

namespace gradwire::binding {

void bind_interfaces(nb::module_& module) {
  nb::class_<io::Interface>(module, "Interface", "A network interface of this host.")
      .def_ro("name", &io::Interface::name)
      .def_ro("mtu", &io::Interface::mtu)
      .def_ro("up", &io::Interface::up)
      .def_ro("carrier", &io::Interface::carrier)
      .def_ro("loopback", &io::Interface::loopback)
      .def_ro("addresses", &io::Interface::addresses);
  module.def("interfaces", &io::interfaces);
}

}  // namespace gradwire::binding
