// The seal of datagrams, against one who reads, changes, repeats, holds back and makes up what
// goes. A datagram opens once, as it was sealed; nothing else opens, but for payloads of chunks
// where only headers are authenticated.
#include <vector>

#include "fuzz/input.h"
#include "seal/seal.h"

namespace gradwire::fuzz {
namespace {

using Bytes = std::vector<uint8_t>;
using Verdict = seal::Opener::Verdict;
constexpr uint32_t kSession = 0x5eed;

class Case {
 public:
  explicit Case(Input& input)
      : input_(input),
        mode_(static_cast<seal::Mode>(1 + input.below(3))),
        cipher_(static_cast<seal::Cipher>(input.below(2))),
        from_(mode_, cipher_, secret()),
        to_(mode_, cipher_, secret()) {}

  void run() {
    while (!input_.done()) step();
    for (Sent& each : sent_) arrive(each);
  }

 private:
  struct Sent {
    Bytes plain;
    Bytes sealed;
    bool opened = false;
  };

  static seal::Secret secret() {
    seal::Secret secret{};
    secret[0] = 1;
    return secret;
  }

  void step() {
    if (sent_.empty() || (sent_.size() < 64 && input_.below(3) == 0)) return send();
    Sent& each = sent_[input_.below(static_cast<uint32_t>(sent_.size()))];
    switch (input_.below(4)) {
      case 0:
        return arrive(each);
      case 1:
        return change(each);
      case 2: {
        Bytes bytes = input_.take(input_.below(200));
        expect(to_.open(bytes, kSession) != Verdict::good, "bytes made up open nothing");
        return;
      }
      default: {
        Bytes bytes = each.sealed;
        bytes.resize(input_.below(static_cast<uint32_t>(bytes.size())));
        expect(to_.open(bytes, kSession) != Verdict::good, "a part of a datagram opens nothing");
      }
    }
  }

  void send() {
    Bytes head(input_.flip() ? wire::kHeaderBytes : wire::kCommonBytes);
    wire::write_common(head.data(),
                       {wire::kVersion, static_cast<wire::Kind>(input_.below(24)), 1, kSession});
    // Chunks are never shorter than their header.
    if (head.size() < wire::kHeaderBytes && wire::is_reliable(static_cast<wire::Kind>(head[1])))
      head.resize(wire::kHeaderBytes);
    const Bytes body = input_.take(input_.below(64));
    Sent each;
    each.plain = head;
    each.plain.insert(each.plain.end(), body.begin(), body.end());
    Bytes out(each.plain.size());
    Bytes tag(wire::kTagBytes);
    from_.seal(head, body, out.data(), tag.data());
    if (!from_.encrypts()) {
      out = head;
      out.insert(out.end(), body.begin(), body.end());
    }
    each.sealed = std::move(tag);
    each.sealed.insert(each.sealed.end(), out.begin(), out.end());
    sent_.push_back(std::move(each));
  }

  void arrive(Sent& each) {
    Bytes bytes = each.sealed;
    const Verdict verdict = to_.open(bytes, kSession);
    expect(verdict == (each.opened ? Verdict::replayed : Verdict::good), "a datagram opens once");
    if (!each.opened)
      expect(std::equal(each.plain.begin(), each.plain.end(), bytes.begin() + wire::kTagBytes),
             "a datagram opens as it was sealed");
    each.opened = true;
  }

  void change(const Sent& each) {
    Bytes bytes = each.sealed;
    const size_t at = input_.below(static_cast<uint32_t>(bytes.size()));
    bytes[at] ^= static_cast<uint8_t>(1u << input_.below(8));
    const auto kind = static_cast<wire::Kind>(each.plain[1]);
    const bool chunk = kind == wire::Kind::push || kind == wire::Kind::pull;
    const bool payload = at >= wire::kTagBytes + wire::kHeaderBytes;
    if (mode_ == seal::Mode::headers && chunk && payload) return;
    expect(to_.open(bytes, kSession) != Verdict::good, "a changed datagram opens nothing");
  }

  Input& input_;
  seal::Mode mode_;
  seal::Cipher cipher_;
  seal::Sealer from_;
  seal::Opener to_;
  std::vector<Sent> sent_;
};

}  // namespace
}  // namespace gradwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  gradwire::fuzz::Input input(data, size);
  gradwire::fuzz::Case(input).run();
  return 0;
}
