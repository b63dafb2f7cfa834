#include <nanobind/nanobind.h>

NB_MODULE(_engine, module) {
  module.def("version", [] { return GRADWIRE_VERSION; });
}
