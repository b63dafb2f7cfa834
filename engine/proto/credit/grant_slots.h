// GrantSlots has a receiver grant credit to two senders at a time, half of its window each, and
// next to who wants most: the port of an incast has no queue for packets of all senders at once.
//
// Tell it by ask() what a sender that was heard of still wants. next() gives a free slot away;
// grant() then sets what its sender may send. A slot is free again once all of that has arrived, or
// should have: while its last packets are lost the other slot keeps the port busy.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "proto/base/agenda.h"
#include "proto/base/time.h"
#include "proto/recovery/rtt.h"

namespace gradwire {

class GrantSlots {
 public:
  static constexpr size_t kNone = Agenda::kNone;
  // Slots: one covers for the other. With more of them each is shorter, and takes as many ACKs.
  static constexpr uint32_t kSlots = 2;

  explicit GrantSlots(size_t peers) : wanted_(peers) {}
  // True for so many senders that a first window has no two packets for each.
  static bool serve(uint32_t senders) { return 2 * senders > kFirstWindow; }

  // The sender has been heard of up to this packet number, and wants so many more.
  void ask(size_t peer, uint64_t largest, uint32_t demand) {
    for (Slot& slot : slots_)
      if (slot.peer == peer) {
        if (largest < slot.end) return;
        slot.peer = kNone;
      }
    wanted_.set(peer, demand ? -Nanos{demand} : kNever);
  }
  // The sender that gets the next slot, or kNone. It counts as wanting nothing until it is heard of
  // again.
  size_t next(Nanos now) {
    for (Slot& slot : slots_) {
      if (slot.peer != kNone && now < slot.until) continue;
      slot.peer = wanted_.earliest() == kNever ? kNone : wanted_.due(wanted_.earliest());
      slot.end = UINT64_MAX;
      slot.until = slot.peer == kNone ? kNever : now;
      if (slot.peer == kNone) continue;
      wanted_.set(slot.peer, kNever);
      return slot.peer;
    }
    return kNone;
  }
  // When a slot is free though nothing arrives, and somebody wants it.
  Nanos due() const {
    if (wanted_.earliest() == kNever) return kNever;
    return std::ranges::min(slots_, {}, &Slot::until).until;
  }
  // True when the sender has a slot since next(): it may send up to `end` now.
  bool grant(size_t peer, uint64_t end, Nanos until) {
    for (Slot& slot : slots_) {
      if (slot.peer != peer || slot.end != UINT64_MAX) continue;
      slot.end = end;
      slot.until = until;
      return true;
    }
    return false;
  }

 private:
  struct Slot {
    size_t peer = kNone;
    uint64_t end = 0;  // highest packet number of the grant
    Nanos until = 0;   // when it should have arrived
  };
  std::array<Slot, kSlots> slots_;
  Agenda wanted_;  // by peer: the negative of what it wants
};

}  // namespace gradwire
