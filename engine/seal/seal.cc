#include "seal/seal.h"

#include <algorithm>
#include <utility>

namespace gradwire::seal {
namespace {

constexpr uint64_t epoch_of(uint64_t number) {
  return number >> kEpochBits;
}

// Of a chunk's packet only the header is authenticated in Mode::headers, and the length; of any
// other the whole. The epoch is part of the number.
struct Short {
  Short(uint64_t number, Bytes head, size_t bytes) {
    uint8_t* at = wire::put(data.data(), number);
    at = wire::put(at, static_cast<uint16_t>(bytes));
    const auto kind = static_cast<wire::Kind>(head[1]);
    const bool chunk = kind == wire::Kind::push || kind == wire::Kind::pull;
    if (!chunk || head.size() < wire::kHeaderBytes) return;
    is_chunk = true;
    std::ranges::copy(head.first(wire::kHeaderBytes), at);
  }
  Bytes numbers() const { return Bytes(data).first(sizeof(uint64_t) + sizeof(uint16_t)); }

  std::array<uint8_t, sizeof(uint64_t) + sizeof(uint16_t) + wire::kHeaderBytes> data;
  bool is_chunk = false;
};

}  // namespace

Key::Key(Mode mode, Cipher cipher, const Secret& secret, bool seals) : mode_(mode) {
  if (mode == Mode::headers) {
    mac_.emplace(secret);
  } else {
    aead_.emplace(cipher, secret, seals);
  }
}

void Key::seal(uint64_t number, Bytes head, Bytes body, uint8_t* out, uint8_t* tag) {
  if (mac_) {
    const Short start(number, head, head.size() + body.size());
    std::ranges::copy(
        start.is_chunk ? mac_->tag({start.data}) : mac_->tag({start.numbers(), head, body}), tag);
  } else if (mode_ == Mode::secret) {
    const Bytes common = head.first(wire::kCommonBytes);
    std::ranges::copy(common, out);
    aead_->seal(number, {common}, {head.subspan(wire::kCommonBytes), body},
                out + wire::kCommonBytes, tag);
  } else {
    aead_->seal(number, {head, body}, {}, nullptr, tag);
  }
}

bool Key::open(uint64_t number, std::span<uint8_t> datagram, const uint8_t* tag) {
  if (mac_) {
    const Short start(number, datagram, datagram.size());
    return start.is_chunk ? mac_->right({start.data}, tag)
                          : mac_->right({start.numbers(), datagram}, tag);
  }
  if (mode_ == Mode::whole) return aead_->open(number, {datagram}, {}, tag);
  return aead_->open(number, {datagram.first(wire::kCommonBytes)},
                     datagram.subspan(wire::kCommonBytes), tag);
}

Sealer::Sealer(Mode mode, Cipher cipher, const Secret& secret)
    : mode_(mode), cipher_(cipher), secret_(secret), key_(mode, cipher, secret, true) {}

void Sealer::seal(std::span<uint8_t> head, Bytes body, uint8_t* out, uint8_t* tag) {
  const uint64_t number = next_++;
  if (number && epoch_of(number) != epoch_of(number - 1)) {
    secret_ = next_secret(secret_);
    key_ = Key(mode_, cipher_, secret_, true);
  }
  wire::put(head.data() + wire::kNumberAt, static_cast<uint32_t>(number));
  key_.seal(number, head, body, out, tag);
}

Opener::Opener(Mode mode, Cipher cipher, const Secret& secret) : mode_(mode), cipher_(cipher) {
  keys_[1].emplace(mode, cipher, secret, false);
  const Secret next = next_secret(secret);
  keys_[2].emplace(mode, cipher, next, false);
  next_secret_ = next_secret(next);
}

// The key of an epoch; null where no correct peer is.
Key* Opener::of(uint64_t epoch) {
  const uint64_t at = epoch + 1 - epoch_;  // wraps below the epoch before
  return at < keys_.size() && keys_[at] ? &*keys_[at] : nullptr;
}

// Goes on to the epoch after this one.
void Opener::enter(uint64_t epoch) {
  epoch_ = epoch;
  keys_[0] = std::move(keys_[1]);
  keys_[1] = std::move(keys_[2]);
  keys_[2].emplace(mode_, cipher_, next_secret_, false);
  next_secret_ = next_secret(next_secret_);
}

Opener::Verdict Opener::open(std::span<uint8_t> datagram, uint32_t session) {
  constexpr size_t least = wire::kTagBytes + wire::kCommonBytes;
  if (datagram.size() < least || datagram.size() > wire::kMaxDatagram) return Verdict::forged;
  const auto sealed = datagram.subspan(wire::kTagBytes);
  const auto low = wire::Reader(sealed.subspan(wire::kNumberAt)).get<uint32_t>();
  const uint64_t number = wire::expand(low, seen_.highest());
  if (!seen_.fresh(number)) return Verdict::replayed;
  Key* const key = of(epoch_of(number));
  if (key == nullptr || !key->open(number, sealed, datagram.data())) return Verdict::forged;
  seen_.record(number);
  if (epoch_of(number) > epoch_) enter(epoch_of(number));
  wire::put(sealed.data() + wire::kNumberAt, session);
  return Verdict::good;
}

}  // namespace gradwire::seal
