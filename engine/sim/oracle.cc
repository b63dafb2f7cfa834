// The oracle: masks, results and residuals of a finished op.
#include "sim/oracle.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>

#include "codec/codec.h"
#include "proto/plan/grid.h"

namespace gradwire::sim {
namespace {

std::string chunk_text(const Grid& grid, uint32_t chunk) {
  return "chunk " + std::to_string(chunk) + " (region " + std::to_string(grid.region[chunk]) + ")";
}

// True for plans whose schedule may close a region below 1 - bound.
bool goes_by_time(const Plan& plan, uint32_t region) {
  if (plan.spend != Spend::late && plan.spend != Spend::anything) return false;
  return std::any_of(plan.schedule.begin(), plan.schedule.end(), [&](const ScheduleStep& step) {
    return step.fraction != ScheduleStep::kOneMinusBound &&
           step.fraction < 1.0 - plan.regions[region].bound;
  });
}

// The shard of a chunk; null where another engine has it.
const Grid::Shard* shard_of(const Grid& grid, uint32_t chunk) {
  const auto found = std::ranges::find_if(
      grid.shards, [chunk](const Grid::Shard& shard) { return shard.contains(chunk); });
  return found == grid.shards.end() ? nullptr : &*found;
}

bool same_bits(float a, float b) {
  // A NaN's payload depends on the order of operands, which IEEE 754 leaves open.
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

class OpCheck {
 public:
  OpCheck(std::span<const Outcome> outcomes, const EndpointConfig& config)
      : outcomes_(outcomes),
        config_(config),
        plan_(*outcomes[0].plan),
        grid_(plan_, config.datagram_bytes, config.aggregators(), config.engine, config.engines),
        exact_(plan_.exact()) {
    for (const Outcome& outcome : outcomes) sent_.push_back(outcome.input->data());
    if (plan_.format.plain()) return;
    for (const Outcome& outcome : outcomes) {
      decoded_.push_back(*outcome.input);
      sent_[decoded_.size() - 1] = decoded_.back().data();
      std::vector<uint8_t> scratch(plan_.format.bytes(grid_.chunk_elements));
      for (uint32_t c = 0; c < grid_.chunks(); ++c)
        codec::round_trip(plan_.format, decoded_.back().data() + grid_.offset[c], grid_.length(c),
                          scratch.data());
    }
  }

  std::string run() {
    for (size_t w = 1; w < outcomes_.size(); ++w) {
      if (outcomes_[w].plan->hash() != plan_.hash()) return "workers with different plans succeed";
    }
    std::string wrong = check_stats();
    if (wrong.empty()) wrong = check_errors();
    if (!wrong.empty()) return wrong;
    if (plan_.pull == Pull::none) return check_pushed();
    if (plan_.pull == Pull::lossy) return check_lossy();
    if (config_.servers == 0) wrong = collect_withheld();
    for (uint32_t c = 0; c < grid_.chunks() && wrong.empty(); ++c) {
      if (shard_of(grid_, c)) wrong = check_chunk(c, outcomes_[0]);
    }
    if (wrong.empty()) wrong = check_pull_bound();
    return wrong;
  }

 private:
  // Push only: each result is in its aggregator's buffer, and everything else there is unchanged.
  std::string check_pushed() const {
    for (size_t w = 0; w < outcomes_.size(); ++w) {
      const Outcome& outcome = outcomes_[w];
      for (uint32_t c = 0; c < grid_.chunks(); ++c) {
        const bool own = config_.servers == 0 && grid_.shards[w].contains(c);
        const float* const got = outcome.output->data() + grid_.offset[c];
        const std::string where = "rank " + std::to_string(w) + ", " + chunk_text(grid_, c) + ": ";
        if (own) {
          const std::string wrong = check_chunk(c, outcome);
          if (!wrong.empty()) return where + wrong;
          continue;
        }
        if (outcome.report->applied[c] != 0) return where + "applied without a pull";
        if (std::memcmp(got, outcome.input->data() + grid_.offset[c],
                        grid_.length(c) * sizeof(float)) != 0) {
          return where + "touched without a pull";
        }
      }
    }
    return "";
  }

  // Lossy pull: each worker has what arrived there, to the bit what its peers have, and zeros
  // elsewhere. At most pull_bound of a shard's region is missing, and no result that every worker
  // must have.
  std::string check_lossy() const {
    for (size_t w = 0; w < outcomes_.size(); ++w) {
      for (uint16_t a = 0; a < config_.aggregators(); ++a) {
        const std::string wrong = check_lossy_shard(w, a);
        if (!wrong.empty()) return "rank " + std::to_string(w) + ", " + wrong;
      }
    }
    return "";
  }

  std::string check_lossy_shard(size_t w, uint16_t aggregator) const {
    const Outcome& outcome = outcomes_[w];
    std::vector<uint64_t> results(plan_.regions.size());
    std::vector<uint64_t> missing(plan_.regions.size());
    const Grid::Shard& shard = grid_.shards[aggregator];
    for (uint32_t c = shard.begin; c < shard.end; ++c) {
      uint32_t contributors = 0;
      bool critical = config_.servers == 0 && aggregator == w;
      for (const Outcome& other : outcomes_) {
        contributors += other.report->counted[c];
        critical = critical || std::count(other.critical->begin(), other.critical->end(), c) != 0;
      }
      const bool applied = outcome.report->applied[c] != 0;
      if (contributors != 0) results[grid_.region[c]] += grid_.length(c);
      if (contributors != 0 && !applied) {
        missing[grid_.region[c]] += grid_.length(c);
        if (critical) return chunk_text(grid_, c) + " must be everywhere, and is missing";
      }
      const std::string wrong = check_lossy_chunk(c, outcome, contributors);
      if (!wrong.empty()) return wrong;
    }
    for (uint32_t r = 0; r < plan_.regions.size(); ++r) {
      const bool whole = plan_.regions[r].bound == 0.0 && !exact_;
      const double most = whole ? 0.0 : plan_.pull_bound * static_cast<double>(results[r]);
      if (static_cast<double>(missing[r]) > most + 1e-6) {
        return "region " + std::to_string(r) + " misses " + std::to_string(missing[r]) + " of " +
               std::to_string(results[r]) + " result elements of a shard; pull_bound is " +
               std::to_string(plan_.pull_bound);
      }
    }
    return "";
  }

  std::string check_lossy_chunk(uint32_t c, const Outcome& outcome, uint32_t contributors) const {
    const float* const got = outcome.output->data() + grid_.offset[c];
    if (outcome.report->applied[c] == 0) {
      for (uint32_t i = 0; i < grid_.length(c); ++i) {
        if (std::bit_cast<uint32_t>(got[i]) != 0)
          return chunk_text(grid_, c) + " was not applied, yet is not zero";
      }
      return "";
    }
    if (contributors == 0) return chunk_text(grid_, c) + " has a result without a contributor";
    for (const Outcome& other : outcomes_) {
      if (other.report->applied[c] != 0 && std::memcmp(got, other.output->data() + grid_.offset[c],
                                                       grid_.length(c) * sizeof(float)) != 0)
        return chunk_text(grid_, c) + " is not the same where it was applied";
    }
    return check_values(c, contributors, got);
  }

  std::string check_stats() const {
    for (size_t s = 0; s < kStatSlots; ++s) {
      double folded = (*outcomes_[0].stats)[s];
      for (size_t w = 1; w < outcomes_.size(); ++w) {
        const double next = (*outcomes_[w].stats)[s];
        folded = s < kStatSlots / 2 ? folded + next : std::max(folded, next);
      }
      for (size_t w = 0; w < outcomes_.size(); ++w) {
        if (outcomes_[w].report->stats[s] != folded) {
          return "rank " + std::to_string(w) + " got statistic " + std::to_string(s) + " as " +
                 std::to_string(outcomes_[w].report->stats[s]) + ", not " + std::to_string(folded);
        }
      }
    }
    return "";
  }

  std::string collect_withheld() {
    for (size_t w = 0; w < outcomes_.size(); ++w) {
      const OpReport& report = *outcomes_[w].report;
      size_t at = 0;
      for (const uint32_t c : report.withheld_chunks) {
        if (!grid_.shards[w].contains(c)) {
          return "rank " + std::to_string(w) + " withholds a chunk that it does not aggregate";
        }
        if (at + grid_.length(c) > report.withheld_values.size()) {
          return "rank " + std::to_string(w) + " withholds chunks without their values";
        }
        if (!withheld_.emplace(c, report.withheld_values.data() + at).second) {
          return chunk_text(grid_, c) + " is withheld twice";
        }
        at += grid_.length(c);
      }
      if (at != report.withheld_values.size()) {
        return "rank " + std::to_string(w) + " withholds values without chunks";
      }
    }
    return "";
  }

  std::string check_chunk(uint32_t c, const Outcome& holder) const {
    const OpReport& report = *holder.report;
    const float* const got = holder.output->data() + grid_.offset[c];
    uint32_t contributors = 0;
    for (const Outcome& outcome : outcomes_) contributors += outcome.report->counted[c];

    if (report.applied[c] != 0) {
      if (contributors == 0) return chunk_text(grid_, c) + " has a result without a contributor";
      if (withheld_.contains(c)) return chunk_text(grid_, c) + " is both applied and withheld";
      return check_values(c, contributors, got);
    }
    for (uint32_t i = 0; i < grid_.length(c); ++i) {
      if (std::bit_cast<uint32_t>(got[i]) != 0) {
        return chunk_text(grid_, c) + " was not applied, yet is not zero";
      }
    }
    if (contributors == 0) {
      return withheld_.contains(c) ? chunk_text(grid_, c) + " is withheld without a contributor"
                                   : "";
    }
    if (plan_.pull != Pull::committed) {
      return chunk_text(grid_, c) +
             " has contributors, is not applied, and nothing may be withheld";
    }
    if (config_.servers != 0) return "";  // the server keeps it
    const auto kept = withheld_.find(c);
    if (kept == withheld_.end()) return chunk_text(grid_, c) + " is neither applied nor withheld";
    return check_values(c, contributors, kept->second);
  }

  // Checks the sum of the counted contributions, in rank order, after the result's encoding.
  std::string check_values(uint32_t c, uint32_t contributors, const float* got) const {
    double factor = plan_.scale;
    if (plan_.fill == Fill::mean) {
      factor *= static_cast<double>(config_.workers) / static_cast<double>(contributors);
    }
    const auto factor32 = static_cast<float>(factor);
    const uint64_t begin = grid_.offset[c];
    const uint32_t length = grid_.length(c);
    std::vector<float> ordered(length);
    std::vector<double> wide(length);
    std::vector<double> size(length);
    bool first = true;
    for (size_t w = 0; w < outcomes_.size(); ++w) {
      if (outcomes_[w].report->counted[c] == 0) continue;
      for (uint32_t i = 0; i < length; ++i) {
        const float value = sent_[w][begin + i];
        ordered[i] = first ? value : ordered[i] + value;
      }
      // Exact sums have one order, so they are compared to the bit and need no tolerance.
      for (uint32_t i = 0; i < length && !exact_; ++i) {
        const auto value = static_cast<double>(sent_[w][begin + i]);
        wide[i] += value;
        size[i] += std::fabs(value);
      }
      first = false;
    }
    bool finite = true;
    for (float& value : ordered) {
      if (factor != 1.0) value *= factor32;
      finite = finite && std::isfinite(value);
    }
    const codec::Format format = plan_.result_format();
    const std::vector<float> expected = decoded(format, ordered);
    for (const float value : expected) finite = finite && std::isfinite(value);
    const float* const error = error_of(c);
    for (uint32_t i = 0; i < length; ++i) {
      bool right = same_bits(got[i], expected[i]);
      if (right && exact_ && error != nullptr)
        right = error[i] == (finite ? ordered[i] - expected[i] : 0.0f);
      // In order of arrival the sum may round differently with each addition, and then be encoded
      // differently. Result and error together are still the sum.
      if (!right && !exact_ && std::isfinite(expected[i]) && (format.plain() || error != nullptr)) {
        const double lost = error != nullptr ? static_cast<double>(error[i]) : 0.0;
        const double whole = static_cast<double>(got[i]) + lost;
        const double tolerance =
            (contributors + 2) * 0x1.0p-23 * (size[i] * std::fabs(factor) + std::fabs(lost)) +
            1e-44;
        right = std::fabs(whole - wide[i] * factor) <= tolerance;
      }
      // A server does not report the error, so only its size is checked.
      if (!right && !exact_ && error == nullptr && !format.plain())
        right = near(format, ordered, got, i);
      if (!right) {
        return chunk_text(grid_, c) + ", element " + std::to_string(begin + i) + ": " +
               std::to_string(got[i]) + " is not the sum of the " + std::to_string(contributors) +
               " counted contributions, " + std::to_string(expected[i]);
      }
    }
    return "";
  }

  static std::vector<float> decoded(const codec::Format& format, std::vector<float> values) {
    const auto count = static_cast<uint32_t>(values.size());
    std::vector<uint8_t> scratch(format.bytes(count));
    codec::round_trip(format, values.data(), count, scratch.data());
    return values;
  }

  // True when an encoded sum is as near to the sum as its encoding allows.
  static bool near(const codec::Format& format, const std::vector<float>& sum, const float* got,
                   uint32_t i) {
    double largest = 0.0;
    for (const float value : sum)
      if (std::isfinite(value)) largest = std::max(largest, std::fabs(static_cast<double>(value)));
    if (!std::isfinite(sum[i]) || !std::isfinite(got[i])) return false;
    if (format.encoding == codec::Encoding::topk && got[i] == 0.0f) return true;
    return std::fabs(static_cast<double>(got[i]) - static_cast<double>(sum[i])) <= largest / 200;
  }

  // The encoding's error of a result, where the aggregator is a worker; else null.
  const float* error_of(uint32_t c) const {
    if (config_.servers != 0 || plan_.result_format().plain()) return nullptr;
    const OpReport& report = *outcomes_[shard_of(grid_, c) - grid_.shards.data()].report;
    return report.result_error.data() + (grid_.offset[c] - report.error_offset);
  }

  std::string check_errors() const {
    for (size_t w = 0; w < outcomes_.size(); ++w) {
      const OpReport& report = *outcomes_[w].report;
      uint64_t expected = 0;
      if (config_.servers == 0 && !plan_.result_format().plain()) {
        const Grid::Shard& shard = grid_.shards[w];
        expected = grid_.offset[shard.end] - grid_.offset[shard.begin];
        if (report.error_offset != grid_.offset[shard.begin])
          return "rank " + std::to_string(w) + " reports the error of another shard";
      }
      if (report.result_error.size() != expected)
        return "rank " + std::to_string(w) + " reports the error of " +
               std::to_string(report.result_error.size()) + " elements, not of " +
               std::to_string(expected);
    }
    return "";
  }

  std::string check_pull_bound() const {
    if (plan_.pull != Pull::committed) return "";
    const OpReport& report = *outcomes_[0].report;
    for (uint16_t a = 0; a < config_.aggregators(); ++a) {
      const Grid::Shard& shard = grid_.shards[a];
      uint64_t elements = 0;
      uint64_t left_out = 0;
      for (uint32_t c = shard.begin; c < shard.end; ++c) {
        elements += grid_.length(c);
        const bool any =
            std::any_of(outcomes_.begin(), outcomes_.end(),
                        [&](const Outcome& outcome) { return outcome.report->counted[c] != 0; });
        if (any && report.applied[c] == 0) left_out += grid_.length(c);
      }
      if (static_cast<double>(left_out) > plan_.pull_bound * static_cast<double>(elements) + 1e-6) {
        return "aggregator " + std::to_string(a) + " committed without " +
               std::to_string(left_out) + " of " + std::to_string(elements) +
               " elements; pull_bound is " + std::to_string(plan_.pull_bound);
      }
    }
    return "";
  }

  std::span<const Outcome> outcomes_;
  const EndpointConfig& config_;
  const Plan& plan_;
  const Grid grid_;
  const bool exact_;
  std::vector<std::vector<float>> decoded_;  // of encoded plans: what others decode
  std::vector<const float*> sent_;           // each worker's values as others decode them
  std::map<uint32_t, const float*> withheld_;
};

}  // namespace

std::string check_worker(const Outcome& outcome, const EndpointConfig& config) {
  const Plan& plan = *outcome.plan;
  const OpReport& report = *outcome.report;
  const Grid grid(plan, config.datagram_bytes, config.aggregators(), config.engine, config.engines);
  if (report.counted.size() != grid.chunks() || report.applied.size() != grid.chunks()) {
    return "the masks do not have one entry per chunk";
  }
  if (report.delivered.size() != plan.regions.size()) {
    return "delivered does not have one entry per region";
  }
  for (const uint32_t c : *outcome.critical) {
    if (shard_of(grid, c) && report.counted[c] == 0)
      return chunk_text(grid, c) + " is critical and did not count";
  }
  std::vector<uint64_t> missing(plan.regions.size());
  std::vector<uint64_t> losable(plan.regions.size());
  std::vector<uint64_t> held(plan.regions.size());  // elements of this engine's chunks
  for (const Grid::Shard& shard : grid.shards) {
    const std::vector<ShardRegion> parts = shard_regions(plan, grid, shard);
    std::vector<uint64_t> missing_here(plan.regions.size());
    for (uint32_t c = shard.begin; c < shard.end; ++c) {
      if (report.counted[c] == 0) missing_here[grid.region[c]] += grid.length(c);
    }
    for (uint32_t r = 0; r < plan.regions.size(); ++r) {
      missing[r] += missing_here[r];
      held[r] += parts[r].elements;
      losable[r] += parts[r].losable;
      if (missing_here[r] > parts[r].losable && !goes_by_time(plan, r)) {
        return "region " + std::to_string(r) + " misses " + std::to_string(missing_here[r]) +
               " elements of a shard, of which " + std::to_string(parts[r].losable) +
               " may be lost";
      }
    }
  }
  for (uint32_t r = 0; r < plan.regions.size(); ++r) {
    const Region& region = plan.regions[r];
    const bool reported =
        std::find(report.exceeded.begin(), report.exceeded.end(), r) != report.exceeded.end();
    const bool is =
        static_cast<double>(missing[r]) > region.bound * static_cast<double>(region.length) + 1e-6;
    if (is != reported) {
      return "region " + std::to_string(r) + (is ? " exceeded" : " kept") +
             " its bound and the report says otherwise";
    }
    if (region.bound == 0.0 && missing[r] != 0) {
      return "region " + std::to_string(r) + " has bound 0 and misses " +
             std::to_string(missing[r]) + " elements";
    }
    const double delivered =
        static_cast<double>(held[r] - missing[r]) / static_cast<double>(region.length);
    if (std::fabs(report.delivered[r] - delivered) > 1e-9) {
      return "region " + std::to_string(r) + " is reported as " +
             std::to_string(report.delivered[r]) + " delivered, the mask says " +
             std::to_string(delivered);
    }
  }
  return "";
}

std::string check_replicas(const Outcome& one, const Outcome& other, const EndpointConfig& config) {
  const Plan& plan = *one.plan;
  if (plan.pull != Pull::exact && plan.pull != Pull::committed) return "";
  if (plan.hash() != other.plan->hash()) return "succeeds with another plan";
  if (one.report->applied != other.report->applied) return "applied other chunks";
  const Grid grid(plan, config.datagram_bytes, config.aggregators(), config.engine, config.engines);
  for (const Grid::Shard& shard : grid.shards) {
    const uint64_t begin = grid.offset[shard.begin];
    if (std::memcmp(one.output->data() + begin, other.output->data() + begin,
                    (grid.offset[shard.end] - begin) * sizeof(float)) != 0)
      return "holds other results";
  }
  return "";
}

std::string check_op(std::span<const Outcome> outcomes, const EndpointConfig& config) {
  return OpCheck(outcomes, config).run();
}

}  // namespace gradwire::sim
