// Waits records what one op waits for at one endpoint: who began, contributed and answered last,
// how long packets queued, and which were lost. Reports tell it; no decision depends on it.
#pragma once

#include <cstdint>
#include <vector>

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
  // Tally counts packets by endpoint.
  class Tally {
   public:
    void add(uint16_t peer, uint64_t packets) {
      if (peer >= counts_.size()) counts_.resize(peer + size_t{1});
      counts_[peer] += packets;
    }
    void add(const Tally& other) {
      for (size_t peer = 0; peer < other.counts_.size(); ++peer)
        add(static_cast<uint16_t>(peer), other.counts_[peer]);
    }
    Most most() const {
      Most found;
      for (size_t peer = 0; peer < counts_.size(); ++peer)
        found.note(static_cast<uint16_t>(peer), static_cast<int64_t>(counts_[peer]));
      return found;
    }

   private:
    std::vector<uint64_t> counts_;
  };

  // Adds what another part of the op waits for at the same endpoint.
  void add(const Waits& other) {
    for (const auto most :
         {&Waits::opened, &Waits::pushed, &Waits::pulled, &Waits::queued, &Waits::burst})
      (this->*most).note((other.*most).peer, (other.*most).value);
    resent.add(other.resent);
    missed.add(other.missed);
  }
  // A packet has arrived: its number, the largest before it, and how long it queued.
  void arrived(uint16_t peer, uint64_t number, uint64_t largest, Nanos queue) {
    queued.note(peer, queue);
    if (largest == 0 || number <= largest + 1) return;
    missed.add(peer, number - largest - 1);
    burst.note(peer, static_cast<int64_t>(number - largest - 1));
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
