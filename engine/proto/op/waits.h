// Waits records what one op waits for at one endpoint: who began, contributed and answered last,
// how long packets queued, and which were lost. Reports tell it; no decision depends on it.
#pragma once

#include <cstdint>
#include <map>

#include "proto/base/time.h"

namespace gradwire {

struct Waits {
  static constexpr uint16_t kNobody = UINT16_MAX;

  // Most is the largest value noted, and the endpoint that it belongs to.
  struct Most {
    uint16_t peer = kNobody;
    int64_t value = 0;

    void note(uint16_t from, int64_t noted) {
      if (noted > value) *this = {from, noted};
    }
  };
  using Tally = std::map<uint16_t, int64_t>;  // packets by endpoint
  static Most most_of(const Tally& tally) {
    Most found;
    for (const auto& [peer, packets] : tally) found.note(peer, packets);
    return found;
  }

  // Adds what another part of the op waits for at the same endpoint.
  void add(const Waits& other) {
    for (const auto most :
         {&Waits::opened, &Waits::pushed, &Waits::pulled, &Waits::queued, &Waits::burst})
      (this->*most).note((other.*most).peer, (other.*most).value);
    for (const auto tally : {&Waits::resent, &Waits::missed})
      for (const auto& [peer, packets] : other.*tally) (this->*tally)[peer] += packets;
  }
  // A packet has arrived: its number, the largest before it, and how long it queued.
  void arrived(uint16_t peer, uint64_t number, uint64_t largest, Nanos queue) {
    queued.note(peer, queue);
    if (largest == 0 || number <= largest + 1) return;
    const auto gap = static_cast<int64_t>(number - largest - 1);
    missed[peer] += gap;
    burst.note(peer, gap);
  }

  // Times since the op started here.
  Most opened;  // the last worker to begin the op, as the endpoint that sums its chunks sees it
  Most pushed;  // when the own shard was complete, and by whom; nobody where time closed it
  Most pulled;  // the endpoint that sent the last results
  Most queued;  // the longest queueing delay of an arriving packet, and its sender
  // Packets.
  Tally resent;  // sent again, by destination
  Tally missed;  // not there when a later one arrived, by sender
  Most burst;    // the most that were lost or missed one after another
};

}  // namespace gradwire
