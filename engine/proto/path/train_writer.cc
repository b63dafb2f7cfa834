#include "proto/path/train_writer.h"

#include <algorithm>
#include <cstddef>

namespace gradwire {

TrainWriter::TrainWriter(Path& path, uint32_t most, std::vector<uint8_t>& memory, Nanos now,
                         Train& train)
    : path_(path),
      train_(train),
      memory_(memory),
      now_(now),
      most_(std::min(most, path.port.longest_train())),
      left_(path.standing.backlog),
      early_(path.early_room()),
      loss_(path.loss_to.share(now)),
      by_share_((path.port.sender.led_by_receiver() && path.standing.spreads) || path.hold.held) {
  if (memory_.empty()) memory_.resize(Train::kMaxBytes);
  train.destination = path.peer;
  train.count = train.total_bytes = train.segment_bytes = 0;
}

void TrainWriter::fill(Op& op) {
  const uint32_t longest = op.longest_packet();
  const bool in_parts = longest > path_.limit.bytes();
  // Datagrams of one train have equal lengths, and one that is sent in fragments is a train of its
  // own.
  if (train_.count && (longest != train_.segment_bytes || in_parts)) return;
  const bool is_early = path_.is_early(op.id);
  while (!full_) {
    full_ = train_.count >= most_ || path_.recovery.full();
    if (full_) return;
    const bool fresh = !is_early || early_ > 0;
    const uint8_t dscp = op.next_dscp(path_.peer, fresh, path_.port.config.dscp);
    full_ = train_.count && dscp != train_.dscp;  // a train has one DSCP
    if (full_) return;
    const Chunks chunks = op.next(path_.peer, fresh, in_parts ? 1 : most_alike(op, is_early));
    if (chunks.ids.empty()) return;
    if (is_early) count_early(op, chunks);
    train_.dscp = dscp;
    write_twins(op, chunks);
    const uint32_t bytes = write(op, chunks, false);
    // A shorter datagram ends a train.
    full_ = bytes < longest || encoded_ >= kMostEncoded || in_parts;
  }
}

// Counts chunks that go before the peer is known to have started their op.
void TrainWriter::count_early(const Op& op, const Chunks& chunks) {
  if (chunks.kind != wire::Kind::push || chunks.again) return;
  path_.started.add_early(op.id, chunks.ids.size());
  early_ -= chunks.ids.size();
}

// The chunks that may be taken at once. `early`: they may go before the peer has started the op.
size_t TrainWriter::most_alike(const Op& op, bool early) const {
  if (!op.alike() || (loss_ != 0 && path_.profile().twins)) return 1;
  const uint64_t most = std::min<uint64_t>(most_ - train_.count, path_.recovery.room());
  return early && early_ ? std::min(most, early_) : most;
}

// The copies of a chunk that go right before it. They go only where the path is long and loses, and
// where the queue here is short.
uint32_t TrainWriter::twins_of(const Op& op, const Chunks& chunks) const {
  const Twins& twins = path_.recovery.twins;
  if (loss_ == 0 || !path_.profile().twins || path_.port.sender.queued() ||
      !twins.apt(path_.recovery.rtt.round(), now_) || op.in_passes(chunks.kind) || op.commits() ||
      op.grid.length(chunks.ids[0]) < op.grid.chunk_elements)
    return 0;
  if (chunks.again) return twins.of_lost(loss_);
  const double last = Twins::last(loss_, path_.port.config.workers - size_t{1});
  const auto most = static_cast<uint64_t>(last * static_cast<double>(op.grid.shards[0].size()));
  return left_ <= most && op.in_last(path_.peer, chunks.kind, last) ? twins.of_last(loss_) : 0;
}

void TrainWriter::write_twins(Op& op, const Chunks& chunks) {
  for (uint32_t left = twins_of(op, chunks);
       left && train_.count + 1 < path_.port.longest_train() && !path_.recovery.full(); --left) {
    write(op, chunks, true);
    path_.recovery.twins.take();
    ++path_.port.counters.copies;
  }
}

// Appends chunks as one packet each; returns their length. `twin`: they follow again.
uint32_t TrainWriter::write(Op& op, const Chunks& chunks, bool twin) {
  const auto count = static_cast<uint32_t>(chunks.ids.size());
  const uint32_t length = op.grid.length(chunks.ids[0]);
  const size_t payload_bytes = op.spec.plan.format.bytes(length);
  if (op.encodes() && chunks.kind == wire::Kind::push && !twin) encoded_ += length;
  SentPacket packet;
  packet.op = op.id;
  packet.kind = chunks.kind;
  packet.bytes = static_cast<uint16_t>(wire::kHeaderBytes + payload_bytes);
  packet.recovers = !twin && !op.in_passes(chunks.kind);
  packet.twin = twin;
  packet.ect = path_.ecn.sent.capable();
  path_.recovery.send(packet, chunks.ids, now_);
  if (train_.count == 0) {
    train_.segment_bytes = packet.bytes;
    train_.ecn = packet.ect ? kEct0 : kNotEct;
  }
  const wire::Header header = path_.header_of(packet, 0, 0, now_);
  for (const uint32_t chunk : chunks.ids) {
    if (left_ && !twin) --left_;
    const bool out = left_ && (packet.number >= path_.allowed.credit || by_share_);
    uint8_t* at = train_.next_header();
    wire::write_header(at, header);
    // In place: a copy of fields that were just written waits for all writes before it.
    wire::put(at + offsetof(wire::Header, packet_number), static_cast<uint32_t>(packet.number++));
    wire::put(at + offsetof(wire::Header, chunk), chunk);
    wire::put(at + offsetof(wire::Header, backlog),
              static_cast<uint16_t>(std::min<uint64_t>(left_, UINT16_MAX)));
    wire::put(at + offsetof(wire::Header, flags),
              static_cast<uint16_t>(chunks.flags | (out ? wire::kOutOfCredit : 0)));
    uint8_t* const memory = memory_.data() + train_.total_bytes;
    train_.spans[2 * train_.count] = {at, wire::kHeaderBytes};
    train_.spans[2 * train_.count + 1] = {op.payload(chunks.kind, chunk, memory), payload_bytes};
    train_.total_bytes += packet.bytes;
    ++train_.count;
  }
  op.traffic.add(count * packet.bytes, count);
  if (chunks.again || twin) {
    op.traffic.retransmissions += count;
    op.waits.resent[path_.peer] += count;
    path_.port.counters.sent.retransmissions += count;
    path_.counted.sent.retransmissions += count;
  }
  return packet.bytes;
}

}  // namespace gradwire
