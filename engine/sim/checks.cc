// Checks at every event of the fabric, its trace and the trace's hash.
#include <algorithm>
#include <array>
#include <cstring>

#include "sim/fabric.h"
#include "sim/oracle.h"
#include "wire/packet.h"

namespace gradwire::sim {

namespace {

// It takes eight bytes at a time, because everything that is sent is hashed.
uint64_t hash_of(uint64_t h, std::span<const uint8_t> bytes) {
  size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, 8);
    h = (h ^ word) * 0x9e3779b97f4a7c15u;
    h ^= h >> 29;
  }
  for (; at < bytes.size(); ++at) h = (h ^ bytes[at]) * 0x100000001b3u;
  return h;
}

}  // namespace

void Fabric::violate(const std::string& text) {
  if (violations_.size() < 16) {
    violations_.push_back("at " + std::to_string(now_) + " ns: " + text);
  }
}

void Fabric::check_train(uint16_t host, const Train& train) {
  const auto wrong = [&](const std::string& text) {
    violate("endpoint " + std::to_string(host) + " made a train " + text);
  };
  if (train.count == 0 || train.count > Train::kMaxSegments) return wrong("of no valid length");
  if (train.destination >= hosts_.size() || train.destination == host) {
    return wrong("to endpoint " + std::to_string(train.destination));
  }
  if (train.segment_bytes > options_.endpoint.datagram_bytes) return wrong("of too long datagrams");
  uint64_t total = 0;
  for (uint32_t i = 0; i < train.count; ++i) {
    const size_t size = train.spans[2 * size_t{i}].size + train.spans[2 * size_t{i} + 1].size;
    if (size < wire::kCommonBytes || size > train.segment_bytes ||
        (size != train.segment_bytes && i + 1 != train.count)) {
      return wrong("with a datagram of " + std::to_string(size) + " bytes among those of " +
                   std::to_string(train.segment_bytes));
    }
    total += size;
  }
  if (total != train.total_bytes || total > Train::kMaxBytes) return wrong("of a wrong size");
}

void Fabric::check_datagram(uint16_t host, uint16_t destination, std::span<const uint8_t> bytes) {
  const auto common = wire::read_common(bytes);
  if (!common || common->version != wire::kVersion || common->source != host ||
      common->session != hosts_[host].session) {
    violate("endpoint " + std::to_string(host) + " sent a datagram with a wrong common header");
    return;
  }
  if (!wire::is_reliable(common->kind)) return;
  const auto header = wire::read_header(bytes);
  if (!header) {
    violate("endpoint " + std::to_string(host) + " sent a reliable packet without its header");
    return;
  }
  uint64_t& last = hosts_[host].packet_numbers[destination];
  const uint64_t number = wire::expand(header->packet_number, last);
  if (number < last || (number == last && last != 0)) {
    violate("endpoint " + std::to_string(host) + " used packet number " + std::to_string(number) +
            " to endpoint " + std::to_string(destination) + " again, after " +
            std::to_string(last));
  }
  last = number;
  if (hosts_[host].session != options_.endpoint.session) return;
  if (header->common.kind == wire::Kind::push || header->common.kind == wire::Kind::pull) {
    check_payload(host, *header, bytes.subspan(wire::kHeaderBytes));
  }
  check_passes(host, destination, *header, bytes.subspan(wire::kHeaderBytes));
}

void Fabric::check_passes(uint16_t host, uint16_t destination, const wire::Header& header,
                          std::span<const uint8_t> payload) {
  if (options_.link.flip > 0.0) return;  // a BITMAP may be anything then
  const auto found = by_op_.find(header.op);
  if (found == by_op_.end()) return;
  for (const uint32_t slot : found->second) {
    if (slot >= runs_.size()) continue;
    const std::string wrong =
        passes_.sent(runs_[slot].spec.plan, host, destination, header, payload);
    if (!wrong.empty()) violate("endpoint " + std::to_string(host) + " sent " + wrong);
    return;
  }
}

void Fabric::note_bitmap(uint16_t host, uint16_t source, std::span<const uint8_t> bytes) {
  const auto common = wire::read_common(bytes);
  if (!common || common->kind != wire::Kind::bitmap) return;
  if (common->session != options_.endpoint.session) return;
  const auto header = wire::read_header(bytes);
  if (header) passes_.bitmap_arrived(host, source, *header, bytes.subspan(wire::kHeaderBytes));
}

// A repeated chunk has the same bytes as before, and a result the same bytes for every worker.
void Fabric::check_payload(uint16_t host, const wire::Header& header,
                           std::span<const uint8_t> payload) {
  const uint64_t bytes = fingerprint(std::as_bytes(payload)) | 1;
  std::vector<uint64_t>& known = payloads_[{header.op, host, header.common.kind}];
  if (header.chunk >= known.size()) known.resize(header.chunk + size_t{1});
  uint64_t& before = known[header.chunk];
  if (before == 0) before = bytes;
  if (before == bytes) return;
  violate("endpoint " + std::to_string(host) + " sent chunk " + std::to_string(header.chunk) +
          " of " + op_name(header.op) + " with other bytes than before");
}

// Checks each report when it arrives, and the whole op when the last worker has reported.
void Fabric::check_op(uint64_t op) {
  // With flipped bits any value may result, so results are not checked.
  if (options_.link.flip > 0.0) return;
  std::vector<Outcome> outcomes;
  std::vector<size_t> ended;  // just now
  for (const uint32_t slot : by_op_[op]) {
    if (slot >= runs_.size()) continue;
    const Run& run = runs_[slot];
    if (!run.done || run.report.failure) continue;
    outcomes.push_back(
        {&run.spec.plan, &run.spec.critical, &run.spec.stats, &run.input, &run.data, &run.report});
    if (run.finished_at != now_) continue;
    ended.push_back(outcomes.size() - 1);
    const std::string wrong = check_worker(outcomes.back(), options_.endpoint);
    if (!wrong.empty()) {
      violate("rank " + std::to_string(run.worker) + ", " + op_name(op) + ": " + wrong);
    }
  }
  for (const size_t i : ended) {
    if (outcomes.size() == 1) break;
    const std::string wrong =
        check_replicas(outcomes[i], outcomes[i == 0 ? 1 : 0], options_.endpoint);
    if (!wrong.empty()) violate(op_name(op) + ": a rank " + wrong + " than another");
  }
  if (outcomes.size() != options_.workers || !violations_.empty()) return;
  const std::string wrong = sim::check_op(outcomes, options_.endpoint);
  if (!wrong.empty()) violate(op_name(op) + ": " + wrong);
}

std::vector<std::string> Fabric::violations() {
  for (const Run& run : runs_) {
    if (!run.done || run.data.empty()) continue;
    if (fingerprint(std::as_bytes(std::span(run.data))) != run.result) {
      violate("rank " + std::to_string(run.worker) + ", " + op_name(run.spec.op) +
              ": the result was touched after it had been reported");
    }
  }
  return violations_;
}

// Four chains side by side keep the multiplier busy, where hash_of() waits for each product.
uint64_t Fabric::fingerprint(std::span<const std::byte> bytes) {
  std::array<uint64_t, 4> chains{bytes.size(), 1, 2, 3};
  size_t at = 0;
  for (; at + sizeof(chains) <= bytes.size(); at += sizeof(chains)) {
    std::array<uint64_t, 4> words;
    std::memcpy(words.data(), bytes.data() + at, sizeof(words));
    for (size_t i = 0; i < words.size(); ++i) {
      chains[i] = (chains[i] ^ words[i]) * 0x9e3779b97f4a7c15u;
      chains[i] ^= chains[i] >> 29;
    }
  }
  const auto plain = [](const void* data, size_t size) {
    return std::span(static_cast<const uint8_t*>(data), size);
  };
  const uint64_t mixed = hash_of(0, plain(chains.data(), sizeof(chains)));
  return hash_of(mixed, plain(bytes.data() + at, bytes.size() - at));
}

void Fabric::hash(uint64_t value) {
  hash(std::span(reinterpret_cast<const uint8_t*>(&value), sizeof(value)));
}

void Fabric::hash(std::span<const uint8_t> bytes) {
  trace_hash_ = hash_of(trace_hash_ ^ bytes.size(), bytes);
}

uint32_t Fabric::record(const Unit& unit, std::span<const uint8_t> bytes, uint8_t dscp) {
  if (trace_.size() >= options_.trace_limit) return kUntraced;
  TraceEntry entry{};
  entry.time = now_;
  entry.source = unit.source;
  entry.destination = unit.destination;
  entry.kind = bytes.size() > 1 ? bytes[1] : 0;
  entry.bytes = static_cast<uint32_t>(bytes.size());
  entry.fate = TraceEntry::Fate::delivered;
  entry.dscp = dscp;
  if (wire::is_reliable(static_cast<wire::Kind>(entry.kind))) {
    if (const auto header = wire::read_header(bytes)) {
      entry.packet_number = header->packet_number;
      entry.op = header->op;
      entry.chunk = header->chunk;
    }
  }
  trace_.push_back(entry);
  return static_cast<uint32_t>(trace_.size() - 1);
}

void Fabric::set_fate(const Unit& unit, TraceEntry::Fate fate) {
  if (unit.trace == kUntraced) return;
  for (uint32_t i = 0; i < unit.packets && unit.trace + i < trace_.size(); ++i) {
    trace_[unit.trace + i].fate = fate;
  }
}

}  // namespace gradwire::sim
