// One all-reduce of all ranks in virtual time, for work.py to count what it takes.
//
//   gradwire_work RANKS ELEMENTS DELAY
//
// prints the events, the datagrams that the ranks sent, the seconds of processor time that the run
// took, and the compiler. Hosts take what has arrived DELAY microseconds after its first datagram;
// where it is not 0, trains arrive whole.
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>

#include "sim/fabric.h"

int main(int count, char** words) {
  if (count != 4) return 2;
  using namespace gradwire;
  sim::FabricOptions options;
  options.workers = static_cast<uint16_t>(std::atoi(words[1]));
  options.seed = 1;
  options.host_delay = std::atoi(words[3]) * kMicrosecond;
  options.link.rate = 1.25e9;
  options.link.delay = 5 * kMicrosecond;
  options.link.queue_bytes = 1 << 20;
  options.whole_trains = options.host_delay > 0;
  sim::Fabric fabric(options);
  OpSpec spec;
  spec.op = id_of(0, 0);
  spec.plan.elements = std::strtoull(words[2], nullptr, 10);
  spec.plan.regions = {{0, spec.plan.elements, 0.0}};
  for (uint16_t rank = 0; rank < options.workers; ++rank)
    fabric.start(rank, spec, std::vector<float>(spec.plan.elements, 1.0f + rank), 0);

  const std::clock_t begin = std::clock();
  const bool done = fabric.run(120 * kSecond, true);
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  if (!done || fabric.broken()) return 1;
  unsigned long long datagrams = 0;
  for (uint16_t rank = 0; rank < options.workers; ++rank)
    datagrams += fabric.counters(rank).sent.packets + fabric.counters(rank).acks_sent;
  std::printf("%llu %llu %.3f %s\n", static_cast<unsigned long long>(fabric.events()), datagrams,
              seconds, __VERSION__);
}
