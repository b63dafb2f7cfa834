// Credit lets a receiver schedule incast. All its senders together may have at most the receive
// window on the way. Each sender receives its share as the highest packet number that it may send,
// so that lost packets return their credit when a later one arrives.
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/base/time.h"
#include "proto/base/token_bucket.h"
#include "proto/congestion/delay_window.h"
#include "proto/recovery/rtt.h"

namespace gradwire {

// Credit is what a receiver grants to one sender, in packets.
struct Credit {
  uint16_t demand = 0;        // what the sender still wants to send
  uint32_t share = 0;         // of the window, at most what it wants
  uint32_t part = 0;          // of the window, whatever it wants
  uint64_t granted = 0;       // highest packet number that it may send
  uint64_t granted_sent = 0;  // the same in the last ACK
  uint64_t asked = 0;         // largest packet number with which it has asked for a turn
  bool turns = false;         // the share is a turn

  // True when a STOP outdates the demand. On a short path the next report comes at once, and copies
  // that must be sent again count as well. A push that ends where an eager close does (`eager`)
  // leaves nothing but copies.
  bool outdated(Nanos rtprop) const { return demand && profile_of(rtprop).outdates_demand; }
};

// CreditPool divides a receiver's window among its senders.
class CreditPool {
 public:
  // `standing`: the packets that each sender may always send, without having reported a backlog.
  CreditPool(uint32_t senders, uint32_t standing)
      : senders_(senders), standing_(standing), idle_(senders) {}
  // The standing credit of a receiver with so many senders, at one of so many engines. All of them
  // together have about the first receive window at most.
  static uint32_t standing_for(uint32_t senders, uint32_t engines = 1);

  void ask(Credit& credit, uint64_t demand);
  // The sender can want no more than this.
  void lower(Credit& credit, uint64_t most) {
    ask(credit, std::min<uint64_t>(credit.demand, most));
  }

  // What the receiver knows of one sender's path.
  struct Sender {
    Nanos rtprop = 0;
    Nanos round = 0;
    double loss = 0;       // share of its packets
    double rate = 0;       // bytes/s that it sends, with what is lost
    uint64_t largest = 0;  // packet number that has arrived
    bool stalled = false;  // what it sends now would find no room
  };
  // Sets a sender's share, and grants it. True when the sender may run out of credit, so that it
  // should get an ACK at once; the others have their grant with their next ACK.
  bool share(Credit& credit, const Sender& sender, const DelayWindow& window,
             uint32_t wire_bytes) const;

 private:
  uint32_t senders_;
  uint32_t standing_;
  uint32_t idle_;         // senders without demand
  uint64_t squares_ = 0;  // sum of the squares of all demands
};

// Hold paces one path by its part of the receiver's window.
struct Hold {
  TokenBucket tokens;  // bytes
  bool held = false;   // a train waited for them
};

// Allowance is what a sender may send to one receiver.
struct Allowance {
  uint64_t credit = 0;  // highest packet number that may be sent
  double window = 0;    // bytes of the receiver's window for this path
  bool turns = false;   // the receiver's senders take turns

  // The packets that may still be sent; `next`: the next packet number.
  uint64_t left(uint64_t next) const { return credit > next - 1 ? credit - (next - 1) : 0; }
};

}  // namespace gradwire
