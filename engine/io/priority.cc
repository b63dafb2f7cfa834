#include "io/priority.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace gradwire::io {
namespace {
constexpr uint64_t kResetOnFork = 1;  // SCHED_FLAG_RESET_ON_FORK
}

void prefer_latency() {
  // struct sched_attr, version 0, which older C libraries do not declare.
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
  // A policy that the user chose is kept, and so is a nice value.
  if (::syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0U) != 0) return;
  if (attributes.policy != SCHED_OTHER && attributes.policy != SCHED_BATCH) return;
  attributes.size = sizeof attributes;
  attributes.flags &= kResetOnFork;
  attributes.runtime = 100'000;  // ns, the shortest slice that the kernel takes
  static_cast<void>(::syscall(SYS_sched_setattr, 0, &attributes, 0U));
}

}  // namespace gradwire::io
