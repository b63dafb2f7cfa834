// One exact all-reduce of all ranks without a network, for memory.py to count the memory that it
// reads and writes.
//
//   gradwire_memory RANKS ELEMENTS
//
// prints the bytes of a rank's bucket and of its receive buffer, and those of all pushes and of all
// results that were sent. This program copies them once, in place of sendmsg and recvmsg.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "proto/endpoint/endpoint.h"
#include "wire/packet.h"

namespace {
using namespace gradwire;

constexpr Nanos kTurn = 20 * kMicrosecond;
constexpr int kTrains = 4;  // that a rank sends in a turn
constexpr size_t kInbox = 4 << 20;

struct Datagram {
  uint16_t source;
  size_t at;
  size_t bytes;
};

// Inbox is the memory of what a rank receives in a turn.
struct Inbox {
  std::vector<uint8_t> memory = std::vector<uint8_t>(kInbox);
  Buffer buffer{memory};
};

struct Rank {
  std::vector<float> bucket;
  std::unique_ptr<Inbox> inbox = std::make_unique<Inbox>();
  std::vector<std::unique_ptr<Inbox>> others;  // held, or free
  std::unique_ptr<Endpoint> endpoint;
  std::vector<Datagram> waiting;
  size_t used = 0;
  bool done = false;
};

// Carried is what the copies have read of payloads, in bytes.
struct Carried {
  size_t pushed = 0;
  size_t pulled = 0;
};

// Copies a train into its receiver's memory, as the kernel would.
void carry(const Train& train, uint16_t source, Rank& to, Carried& carried) {
  for (uint32_t i = 0; i < train.count; ++i) {
    const Datagram datagram{source, to.used,
                            train.spans[2 * size_t{i}].size + train.spans[2 * size_t{i} + 1].size};
    if (to.used + datagram.bytes > to.inbox->memory.size()) std::abort();
    for (size_t half = 0; half < 2; ++half) {
      const Train::Span& span = train.spans[2 * size_t{i} + half];
      if (span.size) std::memcpy(to.inbox->memory.data() + to.used, span.data, span.size);
      to.used += span.size;
    }
    to.waiting.push_back(datagram);
    const auto head = wire::read_common({to.inbox->memory.data() + datagram.at, datagram.bytes});
    const size_t payload = train.spans[2 * size_t{i} + 1].size;
    if (head && head->kind == wire::Kind::push) carried.pushed += payload;
    if (head && head->kind == wire::Kind::pull) carried.pulled += payload;
  }
}

void take(Rank& rank, Nanos now) {
  std::vector<Endpoint::Datagram> run;  // of one sender, as the kernel hands them over
  for (size_t i = 0; i < rank.waiting.size(); ++i) {
    const Datagram& each = rank.waiting[i];
    run.emplace_back(rank.inbox->memory.data() + each.at, each.bytes);
    if (i + 1 < rank.waiting.size() && rank.waiting[i + 1].source == each.source) continue;
    rank.endpoint->receive(each.source, run, now, now, 0, &rank.inbox->buffer);
    run.clear();
  }
  rank.waiting.clear();
  rank.used = 0;
  if (rank.inbox->buffer.holders) {
    const auto free =
        std::ranges::find(rank.others, 0u, [](const auto& other) { return other->buffer.holders; });
    if (free == rank.others.end())
      rank.others.push_back(std::exchange(rank.inbox, std::make_unique<Inbox>()));
    else
      rank.inbox.swap(*free);
  }
  rank.endpoint->flush(now);
  if (rank.endpoint->next_timer() <= now) rank.endpoint->on_timer(now);
  for (Event event; rank.endpoint->next_event(event);)
    rank.done |= event.type == Event::Type::op_done;
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) return 2;
  std::vector<Rank> ranks(std::strtoul(words[1], nullptr, 10));
  OpSpec spec;
  spec.op = id_of(0, 0);
  spec.plan.elements = std::strtoull(words[2], nullptr, 10);
  spec.plan.regions = {{0, spec.plan.elements, 0.0}};
  spec.plan.scale = 1.0 / static_cast<double>(ranks.size());
  for (size_t i = 0; i < ranks.size(); ++i) {
    EndpointConfig config;
    config.endpoint = static_cast<uint16_t>(i);
    config.workers = static_cast<uint16_t>(ranks.size());
    ranks[i].endpoint = std::make_unique<Endpoint>(config, 0);
    ranks[i].bucket.assign(spec.plan.elements, 1.0f + static_cast<float>(i));
  }
  Carried carried;
  const auto train = std::make_unique<Train>();
  const auto turn = [&](Nanos now) {
    for (size_t i = 0; i < ranks.size(); ++i) {
      for (int n = 0; n < kTrains && ranks[i].endpoint->transmit(now, *train); ++n)
        carry(*train, static_cast<uint16_t>(i), ranks[train->destination], carried);
    }
    bool all = true;
    for (Rank& rank : ranks) {
      take(rank, now);
      all &= rank.done;
    }
    return all;
  };
  Nanos now = kTurn;
  for (; now < kSecond; now += kTurn) turn(now);  // the ranks find each other
  for (Rank& rank : ranks) {
    OpSpec own = spec;
    own.data.bytes = reinterpret_cast<uint8_t*>(rank.bucket.data());
    if (rank.endpoint->start(std::move(own), now)) return 1;
  }
  while (!turn(now))
    if ((now += kTurn) > 60 * kSecond) return 1;
  std::printf("%zu %zu %zu %zu\n", spec.plan.elements * sizeof(float), kInbox, carried.pushed,
              carried.pulled);
}
