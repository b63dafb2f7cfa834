#include "proto/path/train_writer.h"

#include <algorithm>

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
      by_share_((path.port.sender.led_by_receiver() && path.standing.spreads) || path.hold.held) {
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
    Chunk chunk;
    if (full_ || !op.next(path_.peer, fresh, payload_memory(op), chunk)) return;
    if (is_early) count_early(op, chunk);
    train_.dscp = dscp;
    write_twins(op, chunk);
    const uint32_t bytes = write(op, chunk, false);
    // A shorter datagram ends a train.
    full_ = bytes < longest || encoded_ >= kMostEncoded || in_parts;
  }
}

// Where the payload of the next chunk goes if it is encoded.
uint8_t* TrainWriter::payload_memory(const Op& op) {
  if (!op.encodes()) return nullptr;
  if (memory_.empty()) memory_.resize(Train::kMaxBytes);
  return memory_.data() + train_.total_bytes;
}

// Counts a chunk that goes before the peer is known to have started its op.
void TrainWriter::count_early(const Op& op, const Chunk& chunk) {
  if (chunk.kind != wire::Kind::push || chunk.again) return;
  path_.started.early.add(op.id);
  --early_;
}

// The copies of a chunk that go right before it. They go only where the path is long and loses, and
// where the queue here is short.
uint32_t TrainWriter::twins_of(const Op& op, const Chunk& chunk) const {
  const Twins& twins = path_.recovery.twins;
  const double loss = path_.loss_to.share(now_);
  if (loss == 0 || !path_.profile().twins || path_.port.sender.queued() ||
      !twins.apt(path_.recovery.rtt.round(), now_) || op.in_passes(chunk.kind) || op.commits() ||
      op.grid.length(chunk.id) < op.grid.chunk_elements)
    return 0;
  if (chunk.again) return twins.of_lost(loss);
  const double last = Twins::last(loss, path_.port.config.workers - size_t{1});
  const auto most = static_cast<uint64_t>(last * static_cast<double>(op.grid.shards[0].size()));
  return left_ <= most && op.in_last(path_.peer, chunk.kind, last) ? twins.of_last(loss) : 0;
}

void TrainWriter::write_twins(Op& op, const Chunk& chunk) {
  for (uint32_t left = twins_of(op, chunk);
       left && train_.count + 1 < path_.port.longest_train() && !path_.recovery.full(); --left)
    write(op, chunk, true);
}

// Appends a chunk as one packet; returns its length. `twin`: the chunk follows again.
uint32_t TrainWriter::write(Op& op, const Chunk& chunk, bool twin) {
  Port& port = path_.port;
  if (twin) {
    path_.recovery.twins.take();
    ++port.counters.copies;
  } else if (left_) {
    --left_;
  }
  const uint32_t length = op.grid.length(chunk.id);
  if (chunk.encoded && !twin) encoded_ += length;
  const size_t payload_bytes = op.spec.plan.format.bytes(length);
  SentPacket& packet = path_.recovery.add();
  packet.op = op.id;
  packet.item = chunk.id;
  packet.kind = chunk.kind;
  packet.bytes = static_cast<uint16_t>(wire::kHeaderBytes + payload_bytes);
  packet.recovers = !twin && !op.in_passes(chunk.kind);
  packet.twin = twin;
  packet.ect = path_.ecn.sent.capable();
  path_.recovery.on_sent(packet, now_);
  wire::Header header = path_.header_of(packet, chunk.id, left_, now_);
  header.flags = chunk.flags;
  if (left_ && (packet.number >= path_.allowed.credit || by_share_))
    header.flags |= wire::kOutOfCredit;
  uint8_t* at = train_.next_header();
  wire::write_header(at, header);
  train_.spans[2 * train_.count] = {at, wire::kHeaderBytes};
  train_.spans[2 * train_.count + 1] = {chunk.payload, payload_bytes};
  if (train_.count == 0) {
    train_.segment_bytes = packet.bytes;
    train_.ecn = packet.ect ? kEct0 : kNotEct;
  }
  train_.total_bytes += packet.bytes;
  ++train_.count;
  op.traffic.add(packet.bytes);
  if (chunk.again || twin) {
    ++op.traffic.retransmissions;
    op.waits.resent.add(path_.peer, 1);
    ++port.counters.retransmissions;
    ++path_.counted.retransmissions;
  }
  return packet.bytes;
}

}  // namespace gradwire
