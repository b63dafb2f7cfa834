#include "binding/errors.h"

#include <system_error>

namespace gradwire::binding {

nb::str to_text(const std::string& text) {
  PyObject* const decoded =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (decoded == nullptr) throw nb::python_error();
  const nb::object whole = nb::steal<nb::object>(decoded);
  nb::dict controls;
  for (int code = 0; code < 0xa0; ++code)
    if (code < 0x20 || code >= 0x7f) controls[nb::int_(code)] = nb::none();
  return nb::str(whole.attr("translate")(controls));
}

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

}  // namespace gradwire::binding
