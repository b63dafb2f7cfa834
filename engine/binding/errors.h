// Shared by both Python modules: texts from peers, and system errors.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <string>

namespace gradwire::binding {

namespace nb = nanobind;

// Decodes a text that may quote a peer: it need not be UTF-8, and must not control a terminal.
nb::str to_text(const std::string& text);

// Raises OSError with the errno and our text, without the system's text that what() appends.
void translate_system_error(const std::exception_ptr& thrown, void*);

}  // namespace gradwire::binding
