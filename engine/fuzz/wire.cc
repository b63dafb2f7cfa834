// The packet parser: any bytes are a datagram. What a reader takes, a writer writes again.
#include <array>
#include <cstring>

#include "fuzz/input.h"
#include "wire/packet.h"

namespace gradwire::fuzz {
namespace {

using Datagram = std::span<const uint8_t>;

// True when both begin with the same bytes.
bool same(Datagram read, const uint8_t* written, size_t size) {
  return read.size() >= size && std::memcmp(read.data(), written, size) == 0;
}

void check_header(Datagram datagram, uint8_t* out) {
  const auto header = wire::read_header(datagram);
  expect(header.has_value() == (datagram.size() >= wire::kHeaderBytes), "a header's length");
  if (!header) return;
  wire::write_header(out, *header);
  expect(same(datagram, out, wire::kHeaderBytes), "a header reads as it was written");
  expect(wire::priority_class(header->flags) < 8, "a class has three bits");
}

void check_ack(Datagram datagram, const wire::Common& common, uint8_t* out) {
  wire::Ack ack;
  if (!wire::read_ack(datagram, ack)) return;
  expect(ack.words <= wire::kAckMaxWords, "an ACK's bitmap has room");
  expect(same(datagram, out, wire::write_ack(out, common, ack)), "an ACK reads as it was written");
}

void check_bye(Datagram datagram, const wire::Common& common, uint8_t* out) {
  const auto bye = wire::read_bye(datagram);
  if (!bye) return;
  expect(bye->numbers.size() % 4 == 0, "a BYE has whole numbers");
  expect(bye->first + bye->numbers.size() / 4 <= bye->lanes, "a BYE names lanes that exist");
  wire::write_bye(out, common, *bye);
  const auto again = wire::read_bye({out, wire::kByeBytes});
  expect(again && again->leaves == bye->leaves && again->heard == bye->heard &&
             again->lanes == bye->lanes && again->first == bye->first,
         "a BYE reads as it was written");
}

void check_ping(Datagram datagram, const wire::Common& common, uint8_t* out) {
  const auto ping = wire::read_ping(datagram);
  if (!ping) return;
  expect(ping->stamp >> wire::kStampBits == 0, "a stamp has 40 bits");
  wire::write_ping(out, common, *ping);
  expect(same(datagram, out, wire::kPingBytes), "a PING reads as it was written");
}

void check_fragment(Datagram datagram, const wire::Common& common, uint8_t* out) {
  const auto fragment = wire::read_fragment(datagram);
  if (!fragment) return;
  expect(datagram.size() > wire::kFragmentBytes, "a fragment's length");
  wire::write_fragment(out, common, *fragment);
  expect(same(datagram, out, wire::kFragmentBytes), "a fragment reads as it was written");
}

void check_pass(Datagram datagram, uint8_t* out) {
  const auto pass = wire::read_pass(datagram);
  if (!pass) return;
  wire::write_pass(out, *pass);
  expect(same(datagram, out, wire::kPassBytes), "a pass reads as it was written");
}

// An expanded number has the bits that travelled, and no other such number is nearer.
void check_expand(Datagram datagram) {
  Input input(datagram.data(), datagram.size());
  const auto low = input.get<uint32_t>();
  const uint64_t near = input.get<uint64_t>() >> 1;
  for (const int bits : {32, wire::kBegunBits}) {
    const uint64_t span = uint64_t{1} << bits;
    const auto part = static_cast<uint32_t>(low & (span - 1));
    const uint64_t whole = wire::expand(part, near, bits);
    expect((whole & (span - 1)) == part, "an expanded number keeps its bits");
    const uint64_t apart = whole > near ? whole - near : near - whole;
    expect(apart <= span / 2 || whole < span, "an expanded number is the nearest");
  }
}

}  // namespace
}  // namespace gradwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace gradwire;
  using namespace gradwire::fuzz;
  const Datagram datagram(data, size);
  std::array<uint8_t, wire::kAckFixedBytes + 8 * wire::kAckMaxWords> out;
  const auto common = wire::read_common(datagram);
  expect(common.has_value() == (size >= wire::kCommonBytes), "a common header's length");
  if (common) {
    wire::write_common(out.data(), *common);
    expect(same(datagram, out.data(), wire::kCommonBytes), "a common header reads as written");
    check_header(datagram, out.data());
    check_ack(datagram, *common, out.data());
    check_bye(datagram, *common, out.data());
    check_ping(datagram, *common, out.data());
    check_fragment(datagram, *common, out.data());
  }
  check_pass(datagram, out.data());
  check_expand(datagram);
  return 0;
}
