#include "seal/seal.h"

#include <utility>

namespace gradwire::seal {
namespace {

constexpr uint64_t epoch_of(uint64_t number) {
  return number >> kEpochBits;
}

// Of a chunk's packet only the header is authenticated in Mode::headers.
bool is_chunk(Bytes head) {
  const auto kind = static_cast<wire::Kind>(head[1]);
  return kind == wire::Kind::push || kind == wire::Kind::pull;
}

std::array<uint8_t, 2> length_of(size_t bytes) {
  return {static_cast<uint8_t>(bytes), static_cast<uint8_t>(bytes >> 8)};
}

}  // namespace

Sealer::Sealer(Mode mode, Cipher cipher, const Secret& secret)
    : mode_(mode), cipher_(cipher), secret_(secret), aead_(cipher, secret, true) {}

void Sealer::seal(std::span<uint8_t> head, Bytes body, uint8_t* out, uint8_t* tag) {
  const uint64_t number = next_++;
  if (number && epoch_of(number) != epoch_of(number - 1)) {
    secret_ = next_secret(secret_);
    aead_ = Aead(cipher_, secret_, true);
  }
  wire::put(head.data() + wire::kNumberAt, static_cast<uint32_t>(number));
  if (mode_ == Mode::secret) {
    const Bytes common = head.first(wire::kCommonBytes);
    std::ranges::copy(common, out);
    aead_.seal(number, {common}, {head.subspan(wire::kCommonBytes), body}, out + wire::kCommonBytes,
               tag);
  } else if (mode_ == Mode::headers && is_chunk(head)) {
    const auto length = length_of(head.size() + body.size());
    aead_.seal(number, {head, length}, {}, nullptr, tag);
  } else {
    aead_.seal(number, {head, body}, {}, nullptr, tag);
  }
}

Opener::Opener(Mode mode, Cipher cipher, const Secret& secret) : mode_(mode), cipher_(cipher) {
  aeads_[1].emplace(cipher, secret, false);
  const Secret next = next_secret(secret);
  aeads_[2].emplace(cipher, next, false);
  next_secret_ = next_secret(next);
}

// The key of an epoch; null where no correct peer is.
Aead* Opener::of(uint64_t epoch) {
  const uint64_t at = epoch + 1 - epoch_;  // wraps below the epoch before
  return at < aeads_.size() && aeads_[at] ? &*aeads_[at] : nullptr;
}

// Goes on to the epoch after this one.
void Opener::enter(uint64_t epoch) {
  epoch_ = epoch;
  aeads_[0] = std::move(aeads_[1]);
  aeads_[1] = std::move(aeads_[2]);
  aeads_[2].emplace(cipher_, next_secret_, false);
  next_secret_ = next_secret(next_secret_);
}

Opener::Verdict Opener::open(std::span<uint8_t> datagram, uint32_t session) {
  constexpr size_t least = wire::kCommonBytes + wire::kTagBytes;
  if (datagram.size() < least || datagram.size() > wire::kMaxDatagram) return Verdict::forged;
  const auto sealed = datagram.first(datagram.size() - wire::kTagBytes);
  const uint8_t* const tag = datagram.data() + sealed.size();
  const auto low = wire::Reader(sealed.subspan(wire::kNumberAt)).get<uint32_t>();
  const uint64_t number = wire::expand(low, seen_.highest());
  if (!seen_.fresh(number)) return Verdict::replayed;
  Aead* const aead = of(epoch_of(number));
  if (aead == nullptr) return Verdict::forged;
  const auto common = sealed.first(wire::kCommonBytes);
  bool good = false;
  if (mode_ == Mode::secret) {
    good = aead->open(number, {common}, sealed.subspan(wire::kCommonBytes), tag);
  } else if (mode_ == Mode::headers && is_chunk(sealed)) {
    const auto length = length_of(sealed.size());
    good = sealed.size() >= wire::kHeaderBytes &&
           aead->open(number, {sealed.first(wire::kHeaderBytes), length}, {}, tag);
  } else {
    good = aead->open(number, {sealed}, {}, tag);
  }
  if (!good) return Verdict::forged;
  seen_.record(number);
  if (epoch_of(number) > epoch_) enter(epoch_of(number));
  wire::put(datagram.data() + wire::kNumberAt, session);
  return Verdict::good;
}

}  // namespace gradwire::seal
