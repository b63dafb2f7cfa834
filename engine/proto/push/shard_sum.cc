#include "proto/push/shard_sum.h"

#include <algorithm>
#include <cstring>

#include "codec/codec.h"
#include "reduce/accumulate.h"

namespace gradwire {

ShardSum::ShardSum(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
                   codec::Elements own, Memory& memory)
    : plan_(plan),
      grid_(grid),
      begin_(shard.begin),
      own_(own),
      memory_(memory),
      elements_(grid.offset[shard.end] - grid.offset[shard.begin]),
      encodes_(!plan.result_format().plain()),
      in_place_(own.bytes && plan.exact() && plan.format.plain() &&
                (plan.pull == Pull::exact || plan.pull == Pull::none)) {
  // A sum begins with a whole contribution, so that only errors have to be zero before.
  if (keeps_error())
    sum_ = Zeroed<float>(elements_);
  else if (!in_place_)
    need_sums();
  if (!plan.format.plain()) {
    decoded_.resize(grid.chunk_elements);
    payload_.resize(plan.format.bytes(grid.chunk_elements));
  }
  if (!encodes_) return;
  uint64_t at = 0;
  result_at_.reserve(shard.size());
  for (uint32_t c = shard.begin; c < shard.end; ++c) {
    result_at_.push_back(at);
    at += plan.format.bytes(grid.length(c));
  }
  results_ = memory_.results.take(at);
}

void ShardSum::need_sums() {
  if (sum_.empty()) sum_ = memory_.sums.take(elements_);
}

const uint8_t* ShardSum::own(uint32_t local) {
  if (own_.are_payloads(plan_.format)) return own_memory(local);
  const float* const values = own_.floats(grid_.offset[begin_ + local]);
  codec::encode(plan_.format, values, length(local), payload_.data());
  return payload_.data();
}

void ShardSum::start(uint32_t local, const uint8_t* payload) {
  codec::decode(plan_.format, payload, length(local), sum(local));
}

void ShardSum::add(uint32_t local, const uint8_t* payload) {
  reduce::add(plan_.format, sum(local), payload, length(local), decoded_.data());
}

void ShardSum::start_pair(uint32_t local, const uint8_t* payload) {
  if (plan_.format.plain()) {
    reduce::add_pair(sum(local), own(local), payload, length(local));
    return;
  }
  start(local, own(local));
  add(local, payload);
}

void ShardSum::add_run(uint32_t local, bool begun, std::span<const void* const> parts,
                       std::optional<double> factor) {
  const bool here = factor && in_place_;
  if (!here) need_sums();
  parts_.assign(parts.begin(), parts.end());
  if (begun) parts_.insert(parts_.begin(), sum(local));
  float* const out = here ? reinterpret_cast<float*>(own_memory(local)) : sum(local);
  reduce::add_run(out, parts_, static_cast<float>(factor.value_or(1.0)), length(local));
}

void ShardSum::keep(uint32_t local) {
  need_sums();
  std::memcpy(sum(local), own_memory(local), codec::f32_bytes(length(local)));
}

void ShardSum::finish(uint32_t local, double factor) {
  if (factor != 1.0) reduce::scale(sum(local), static_cast<float>(factor), length(local));
  if (encodes_) encode(local);
}

// The encoding's error stays in sum_. A chunk leaves none where a value is not finite, or exceeds
// the encoding's range.
void ShardSum::encode(uint32_t local) {
  const uint32_t count = length(local);
  uint8_t* const payload = results_.data() + result_at_[local];
  codec::encode(plan_.format, sum(local), count, payload);
  if (!keeps_error()) return;
  codec::decode(plan_.format, payload, count, decoded_.data());
  reduce::subtract(sum(local), decoded_.data(), count);
  if (!reduce::all_finite(sum(local), count)) std::fill_n(sum(local), count, 0.0f);
}

std::vector<float> ShardSum::result(uint32_t local) const {
  std::vector<float> values(length(local));
  codec::decode(plan_.result_format(), payload(local), length(local), values.data());
  return values;
}

}  // namespace gradwire
