// What both Python modules share: texts of others, and errors of the system.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <string>

namespace gradwire::binding {

namespace nb = nanobind;

// Texts may quote what a peer sent, which need not be UTF-8, and must not control a terminal.
nb::str to_text(const std::string& text);

// OSError with the errno and our text alone: std::system_error appends the system's to what().
void translate_system_error(const std::exception_ptr& thrown, void*);

}  // namespace gradwire::binding
