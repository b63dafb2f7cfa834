#include "io/priority.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace gradwire::io {

void prefer_latency() {
  // The layout of struct sched_attr, version 0: older C libraries do not have it.
  struct {
    uint32_t size;
    uint32_t policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime;
    uint64_t deadline;
    uint64_t period;
  } attributes{};
  attributes.size = sizeof attributes;
  attributes.policy = SCHED_OTHER;
  attributes.runtime = 100'000;  // ns, the shortest slice that the kernel takes
  static_cast<void>(::syscall(SYS_sched_setattr, 0, &attributes, 0U));
}

}  // namespace gradwire::io
