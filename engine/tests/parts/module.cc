#include "tests/parts/parts.h"

NB_MODULE(_parts, module) {
  module.doc() = "The engine's parts, for unit tests";
  nanobind::set_leak_warnings(false);
  gradwire::parts::bind_base(module);
  gradwire::parts::bind_recovery(module);
  gradwire::parts::bind_congestion(module);
  gradwire::parts::bind_credit(module);
  gradwire::parts::bind_sched(module);
  gradwire::parts::bind_op(module);
  gradwire::parts::bind_path(module);
  gradwire::parts::bind_push(module);
  gradwire::parts::bind_pull(module);
  gradwire::parts::bind_seal(module);
}
