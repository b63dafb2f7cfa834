// Timelines in Python: a tuple for each entry.
#include <array>

#include "binding/binding.h"

namespace gradwire::binding {

nb::list timeline_list(const std::vector<Timeline::Entry>& entries) {
  constexpr std::array words{"begun", "ended",  "sent",   "signal",  "timer",  "read",
                             "turn",  "sleep",  "full",   "nothing", "done",   "sum",
                             "peer",  "credit", "window", "pace",    "blocked"};
  static_assert(words.size() == Timeline::kWhats);
  nb::list out;
  for (const Timeline::Entry& entry : entries) {
    const bool peer = entry.peer != Timeline::kNobody;
    out.append(nb::make_tuple(entry.time, words[static_cast<size_t>(entry.what)],
                              peer ? nb::cast(entry.peer) : nb::none(), entry.value));
  }
  return out;
}

}  // namespace gradwire::binding
