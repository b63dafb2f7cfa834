#include "io/gate.h"

namespace gradwire::io {

Gate::Gate(const Keys& keys, uint32_t session) : session_(session) {
  if (keys.mode == seal::Mode::none) return;
  for (const auto& secrets : keys.secrets) {
    auto& peer = peers_.emplace_back();
    if (!secrets) continue;
    peer.emplace(Peer{seal::Sealer(keys.mode, keys.cipher, secrets->first),
                      seal::Opener(keys.mode, keys.cipher, secrets->second)});
  }
}

void Gate::seal(Train& train) {
  train.tagged = !peers_.empty();
  if (!train.tagged) return;
  seal::Sealer& to = peers_.at(train.destination).value().to;
  if (to.encrypts()) encrypted_.resize(Train::kMaxBytes);
  uint8_t* out = encrypted_.data() + wire::kTagBytes;
  for (uint32_t i = 0; i < train.count; ++i) {
    Train::Span& head = train.spans[2 * size_t{i}];
    Train::Span& body = train.spans[2 * size_t{i} + 1];
    auto* const at = static_cast<uint8_t*>(const_cast<void*>(head.data));  // the train's memory
    to.seal({at, head.size}, {static_cast<const uint8_t*>(body.data), body.size}, out,
            (to.encrypts() ? out : at) - wire::kTagBytes);
    if (!to.encrypts()) continue;
    head = {out, head.size + body.size};
    body = {nullptr, 0};
    out += head.size + wire::kTagBytes;
  }
}

std::span<const uint8_t> Gate::open(uint16_t source, std::span<uint8_t> datagram) {
  if (peers_.empty()) return datagram;
  auto& peer = peers_.at(source);
  if (!peer) {
    ++counters_.forged;
    return {};
  }
  switch (peer->from.open(datagram, session_)) {
    case seal::Opener::Verdict::good:
      return datagram.subspan(wire::kTagBytes);
    case seal::Opener::Verdict::forged:
      ++counters_.forged;
      return {};
    case seal::Opener::Verdict::replayed:
      ++counters_.replayed;
      return {};
  }
  return {};
}

}  // namespace gradwire::io
