// Priority classes: what a worker's own classes make of the shared order, and which DSCP (RFC 2474)
// the datagrams of a class carry.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "proto/plan/plan.h"

namespace gradwire {

// Puts the chunks of lower classes first; within a class they stay as they are. `priorities` has a
// class per chunk of the op; empty: all are alike.
void by_priority(std::vector<uint32_t>& order, std::span<const uint8_t> priorities);

// "" or what is wrong with a worker's classes for a transfer of so many chunks.
std::string check_priorities(const Plan& plan, uint32_t chunks,
                             std::span<const uint8_t> priorities);

// The DSCP of a class: the plan's last value stands for all further classes, and without any it is
// `base`.
uint8_t dscp_of(const Plan& plan, uint8_t base, uint8_t priority);

}  // namespace gradwire
