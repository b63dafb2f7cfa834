"""Breaks each invariant of docs/design.md on purpose and shows which tests notice.

    .venv/bin/python engine/tests/broken_on_purpose.py [--commit REV] [invariant …]

For each: a copy of the sources with one change, built, and tests run on it: one must fail. First
they run on the intact copy, where all must pass. --commit takes the sources (not the tests of
engine/tests) from a commit instead of the working tree. The copy and its objects stay in
build/broken-on-purpose, so that only what changed is compiled: five to fifteen seconds a break;
not part of `make test`.

Exits with 1 if anything goes unnoticed, a place is no longer found in the sources, or the copy is
not what was tested.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import io
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "broken-on-purpose"
TREE, OBJECTS, GUARD = WORK / "tree", WORK / "objects", WORK / "guard"
PACKAGE = TREE / "src" / "gradwire"
COPIED = ("engine", "src/gradwire", "lab/src", "tests", "CMakeLists.txt", "pyproject.toml")
OWN = ("engine/tests", "tests/test_invariants.py")  # from the working tree in any case
SUFFIXES = {".cc", ".h", ".py", ".pyi", ".txt", ".toml", ".typed"}
LIMIT = 240.0  # seconds for the tests of one break

PROTO = "engine/proto/"
PYTHON = "src/gradwire/"
SIM = "engine/tests/test_sim_"


@dataclass(frozen=True)
class Break:
    """`before` is found whatever its white space, and in another file too if it has moved."""

    invariant: int
    what: str
    path: str
    before: str
    after: str
    tests: str  # files, or tests of them, for pytest


INVARIANTS = {
    1: "the bound holds",
    2: "replicas stay bit-identical",
    3: "only gradients are lossy",
    4: "a chunk stands alone",
    5: "counted once, and final",
    6: "every wait is bounded",
    7: "the core is a pure function of its input",
    8: "the books balance",
    9: "nothing from the wire is trusted",
    10: "one plan",
    11: "self-inflicted loss is a bug",
    0: "neither starved nor collapsed",  # no invariant, but promised
}

BREAKS = (
    Break(
        1,
        "regions close with twice the loss that is allowed",
        PROTO + "push/close_rule.cc",
        "return part.elements - part.losable;",
        "return part.elements - std::min(part.elements, 2 * part.losable);",
        SIM + "bounded.py",
    ),
    Break(
        1,
        "critical chunks may be missing at a close",
        PROTO + "push/aggregator.cc",
        "|| ledger.critical_left) return;",
        ") return;",
        SIM + "bounded.py " + SIM + "property.py",
    ),
    Break(
        1,
        "lost chunks are given up whatever the ledger says",
        PROTO + "push/push_sender.cc",
        "if (!room(c)) break;",
        "",
        SIM + "bounded.py",
    ),
    Break(
        1,
        "what a shard may lose is rounded up to whole chunks",
        PROTO + "plan/grid.cc",
        "static_cast<double>(out[r].elements) + 1e-9));",
        "static_cast<double>(out[r].elements) + grid.chunk_elements - 1.0));",
        "engine/tests/test_plan.py " + SIM + "bounded.py",
    ),
    Break(
        5,
        "each of several engines carries all chunks",
        "engine/proto/plan/grid.cc",
        "for (Shard& shard : shards) shard = shard.part_of(engine, engines);",
        "for (Shard& shard : shards) shard = shard.part_of(0, 1);",
        "engine/tests/test_sim_cores.py engine/tests/test_io_cores.py",
    ),
    Break(
        6,
        "the other engines of a process wait for one whose path is lost",
        "engine/io/loop_group.cc",
        "  for (const auto& loop : loops_) loop->fail(why);\n}\n\nvoid LoopGroup::fail(",
        "}\n\nvoid LoopGroup::fail(",
        "engine/tests/test_io_cores.py",
    ),
    Break(
        6,
        "a packet counts as arrived that was lost within one message",
        PROTO + "path/path.h",
        "number == first + packets",
        "number >= first + packets",
        "engine/tests/test_io_engine.py",
    ),
    Break(
        5,
        "an op ends while one of its engines still writes into its memory",
        "engine/io/loop_group.cc",
        "if (parts.ended < loops_.size()) continue;",
        "if (parts.ended + 1 < loops_.size()) continue;",
        "engine/tests/test_io_cores.py",
    ),
    Break(
        1,
        "a lossy pull leaves out twice what it may",
        PROTO + "pull/pull_ledger.cc",
        "region.arrived + region.losable <",
        "region.arrived + 2 * region.losable <",
        SIM + "lossy_pull.py",
    ),
    Break(
        1,
        "a lossy pull does without what must arrive everywhere",
        PROTO + "pull/pull_ledger.cc",
        "if (region.enough || region.needed) return;",
        "if (region.enough) return;",
        SIM + "lossy_pull.py",
    ),
    Break(
        1,
        "what finds no room at its receiver is given up as lost",
        PROTO + "recovery/recovery.cc",
        "n <= refused_ ? Again::refused : Again::lost",
        "Again::lost",
        SIM + "late_rank.py",
    ),
    Break(
        1,
        "what a tail probe sends again may be given up before it goes",
        PROTO + "push/stream_sender.cc",
        "(forgivable ? holes_.forgivable : holes_.again).push(chunk);",
        "holes_.forgivable.push(chunk);",
        SIM + "late_rank.py",
    ),
    Break(
        1,
        "a committed pull withholds beyond the bound of its region",
        PROTO + "pull/committed_pull.cc",
        "if (spent > pull_losable(plan_, region, sum_.region_elements(region))) return false;",
        "",
        SIM + "bounded.py " + SIM + "property.py",
    ),
    Break(
        2,
        "a rank commits a step before all others have its results",
        PYTHON + "training/step_cycle.py",
        "(yield self._consultation.commit(step)).report  # noqa: B018  # raises what failed",
        "",
        "tests/test_fallback.py::test_exact_steps_lose_nothing_at_whichever_event_an_engine_ends",
    ),
    Break(
        2,
        "over the host's network ranks sum in another order than engines",
        PYTHON + "transport/host_engine.py",
        "total = dealt[0].copy() for other in dealt[1:]:",
        "total = dealt[-1].copy()\n        for other in dealt[-2::-1]:",
        "tests/test_fallback.py::test_exact_steps_lose_nothing_at_whichever_event_an_engine_ends",
    ),
    Break(
        8,
        "norms that a failed attempt noted count in the next one, too",
        PYTHON + "training/step_cycle.py",
        "self._consultation.undo(before)",
        "",
        "tests/test_fallback.py::test_lossy_steps_keep_replicas_and_books_when_an_engine_ends",
    ),
    Break(
        2,
        "a worker keeps what a committed pull withheld from others",
        PROTO + "op/worker_half.cc",
        "if (pull.takes_results() && !r.applied[c])",
        "if (pull.takes_results() && !r.applied[c] && config_.shard() != 1)",
        SIM + "bounded.py " + SIM + "property.py",
    ),
    Break(
        2,
        "each aggregator commits for itself what it has",
        PROTO + "op/aggregator_half.cc",
        "if (own_) own_->pull(config_.shard()).on_commit(*applied);",
        "Bitmap own = *applied;"
        " for (uint32_t c : sum_.finished()) own.set(c - shard().begin);"
        " if (own_) own_->pull(config_.shard()).on_commit(own);",
        SIM + "bounded.py " + SIM + "property.py",
    ),
    Break(
        2,
        "an aggregator adds back for itself what an encoding took from its results",
        PROTO + "op/aggregator_half.cc",
        "r.error_offset = grid_.offset[shard().begin];",
        "r.error_offset = grid_.offset[shard().begin];"
        " float* const at = const_cast<float*>(spec_.data.floats(r.error_offset));"
        " reduce::add(at, r.result_error.data(), r.result_error.size());",
        SIM + "encodings.py",
    ),
    Break(
        2,
        "exact sums are in order of arrival",
        PROTO + "push/aggregator.cc",
        "if (plan.exact()) turns_.emplace(shard.size(), memory);",
        "(void)memory;",
        SIM + "exact.py",
    ),
    Break(
        3,
        "a buffer is used again while contributions wait in it",
        PROTO + "push/turns.h",
        "++entry.buffer->holders;",
        "",
        SIM + "exact.py",
    ),
    Break(
        3,
        "results in the caller's memory are not copied before it takes that back",
        PROTO + "op/aggregator_half.cc",
        "sum_.keep(c);",
        "static_cast<void>(c);",
        "engine/tests/test_io_engine.py",
    ),
    Break(
        3,
        "a plain all-reduce may lose a fifth",
        PYTHON + "transport/communicator.py",
        "plan = plan or TransferPlan.whole(flat.size, encoding=encoding)",
        "from gradwire.core.regions import Region; plan = plan or"
        ' TransferPlan(flat.size, (Region(0, flat.size, 0.2, "all"),), spend="lost")',
        "tests/test_invariants.py",
    ),
    Break(
        3,
        "an exact step keeps the bounds of the lossy one",
        PYTHON + "core/plan.py",
        "regions=Regions.of(self.regions).exact, spend='nothing',",
        "",
        "tests/test_invariants.py tests/test_policies.py",
    ),
    Break(
        3,
        "bound 0 may lose a chunk",
        PROTO + "push/push_sender.cc",
        "plan_.regions[r].bound * static_cast<double>(ledger.received + spent) + 1e-9;",
        "std::max(0.05, plan_.regions[r].bound) * static_cast<double>(ledger.received + spent);",
        SIM + "bounded.py",
    ),
    Break(
        3,
        "control messages are sent once",
        PROTO + "path/path.cc",
        "control.again(each.packet.item);",
        "",
        SIM + "exact.py " + SIM + "faults.py",
    ),
    Break(
        4,
        "chunks are longer than what a datagram carries",
        PROTO + "plan/grid.cc",
        "plan.format.chunk_elements(bytes - wire::kHeaderBytes);",
        "plan.format.chunk_elements(bytes - wire::kHeaderBytes) + 1;",
        "engine/tests/test_plan.py " + SIM + "exact.py",
    ),
    Break(
        4,
        "a chunk straddles two regions",
        PROTO + "plan/grid.cc",
        "offset.push_back(begin + at);",
        "offset.push_back(begin + at - (at == 0 && r > 0));",
        "engine/tests/test_plan.py " + SIM + "bounded.py",
    ),
    Break(
        5,
        "duplicates and late chunks are added again",
        PROTO + "push/aggregator.cc",
        "if (w.decided.test(local)) return Added::ignored;",
        "",
        SIM + "property.py " + SIM + "bounded.py",
    ),
    Break(
        5,
        "a chunk that comes after it was given up counts all the same",
        PROTO + "push/aggregator.cc",
        "if (w.decided.test(local)) return Added::ignored;",
        "if (w.counted.test(local)) return Added::ignored;",
        SIM + "property.py " + SIM + "bounded.py",
    ),
    Break(
        6,
        "a silent engine is waited for",
        PROTO + "path/silence.cc",
        "now - last <= config.peer_timeout",
        "now - last <= 1000 * config.peer_timeout",
        SIM + "faults.py",
    ),
    Break(
        6,
        "who said goodbye is missed",
        PROTO + "endpoint/endpoint.cc",
        "if (each.left) {",
        "if (each.left && now < 0) {",
        SIM + "faults.py",
    ),
    Break(
        6,
        "a failure is told three times, and then never again",
        PROTO + "path/path.cc",
        "std::max(farewell.errors_left, uint32_t{!farewell.gone})",
        "std::max(farewell.errors_left, uint32_t{0})",
        SIM + "faults.py",
    ),
    Break(
        6,
        "what a peer refuses stays in flight, and fills the window",
        PROTO + "path/path.cc",
        "if (recovery.refused(now)) {",
        "if (recovery.refused(now) && now < 0) {",
        SIM + "fuzz.py",
    ),
    Break(
        6,
        "a pass of which nothing has arrived is asked about at once",
        PROTO + "push/passes.cc",
        "(futile_ && flying_ > 0)",
        "(futile_ && flying_ > list_.size())",
        "engine/tests/test_part_push.py",
    ),
    Break(
        6,
        "who leaves stays for no peer that is not heard",
        PROTO + "endpoint/endpoint.cc",
        "std::min(paths_.last_heard() + port_.config.peer_timeout, leaving_.last_deadline)",
        "std::min(paths_.last_heard() + port_.config.ping_interval, leaving_.last_deadline)",
        SIM + "faults.py",
    ),
    Break(
        6,
        "what went away with a peer is waited for",
        PROTO + "endpoint/ops.cc",
        "if (!op) continue;",
        "if (op || !op) continue;",
        SIM + "faults.py",
    ),
    Break(
        6,
        "an op has no time-out",
        PROTO + "endpoint/endpoint.cc",
        "return now >= entry.second->deadline();",
        "return now >= kNever && entry.second;",
        SIM + "faults.py",
    ),
    Break(
        6,
        "a goodbye in mid-step is taken for one at the end",
        PROTO + "plan/lanes.h",
        "std::min(next, abandoned)",
        "next",
        SIM + "faults.py",
    ),
    Break(
        6,
        "an op that cannot be taken yet keeps another lane's waiting",
        PROTO + "sched/scheduler.cc",
        "const uint64_t next_key = (uint64_t{queue.lane} + 1) << (64 - kLaneBits);",
        "const uint64_t next_key = 0;",
        SIM + "lanes.py",
    ),
    Break(
        6,
        "the first op of a lane waits for memory like any other",
        PROTO + "base/memory.h",
        "(first || ops + bytes <= most_of_several())",
        "(ops == 0 || ops + bytes <= most_of_several())",
        SIM + "lanes.py",
    ),
    Break(
        6,
        "an op waits for memory that nobody is sure to give",
        PROTO + "op/admission.cc",
        "need > memory_.most_of_ops() || stuck(id)",
        "need > memory_.most_of_ops()",
        SIM + "lanes.py",
    ),
    Break(
        6,
        "a failure is kept from the others",
        PROTO + "path/farewell.h",
        "errors_left = kFarewells;",
        "errors_left = 0;",
        SIM + "faults.py",
    ),
    Break(
        7,
        "the delay of acknowledgements depends on what the process did before",
        PROTO + "recovery/acknowledger.h",
        "due_ = now + kDelay;",
        "{ static Nanos hidden = 0; due_ = now + kDelay + (hidden += 977) % 65536; }",
        SIM + "property.py",
    ),
    Break(
        7,
        "the core looks at a clock",
        PROTO + "recovery/repetition.cc",
        '#include "proto/recovery/repetition.h"',
        '#include <chrono>\n#include "proto/recovery/repetition.h"',
        "tests/test_layers.py",
    ),
    Break(
        8,
        "a packet is acknowledged by each ACK that names it",
        PROTO + "recovery/sent_packets.h",
        "bits_[kOpen].clear_down_from(number, bits);",
        "",
        "engine/tests/test_part_recovery.py",
    ),
    Break(
        11,
        "probes to a peer that is heard go as often as ever",
        PROTO + "recovery/recovery.cc",
        "(timer_base_ - unanswered_) / kPartOfWait",
        "Nanos{0}",
        "engine/tests/test_part_recovery.py",
    ),
    Break(
        8,
        "what is sent again leaves flight a second time with its ACK",
        PROTO + "recovery/recovery.cc",
        "acked.in_flight += (packets - again) * first.bytes;",
        "acked.in_flight += packets * first.bytes;",
        "engine/tests/test_part_recovery.py",
    ),
    Break(
        8,
        "withheld results are thrown away",
        PROTO + "op/aggregator_half.cc",
        "r.withheld_chunks.push_back(c);",
        "continue;",
        SIM + "bounded.py " + SIM + "property.py",
    ),
    Break(
        8,
        "a worker is told that all of it counted",
        PROTO + "op/worker_half.cc",
        "r.counted[c] = pull.counted(c);",
        "r.counted[c] = 1;",
        SIM + "bounded.py",
    ),
    Break(
        8,
        "what an encoding took from the results is forgotten",
        PROTO + "op/aggregator_half.cc",
        "r.result_error = sum_.take_error();",
        "r.result_error.resize(sum_.take_error().size());",
        SIM + "encodings.py",
    ),
    Break(
        8,
        "what an encoding took from the pushes is forgotten",
        PYTHON + "training/feedback/residuals.py",
        "if keep_error is not None:",
        "if False:",
        "tests/test_feedback.py",
    ),
    Break(
        8,
        "an infinity becomes the largest finite value of its encoding",
        "engine/codec/int8.cc",
        "magnitude < kInfinity ? code : special",
        "magnitude <= kInfinity ? code : special",
        "engine/tests/test_codec.py",
    ),
    Break(
        8,
        "what did not count is forgotten",
        PYTHON + "training/feedback/residuals.py",
        "counted = report.counted.astype(bool)",
        "counted = np.ones(len(report.counted), bool)",
        "tests/test_feedback.py",
    ),
    Break(
        8,
        "an element may go uncounted for a step longer than max_age",
        PYTHON + "training/feedback/residuals.py",
        ">= self.max_age",
        "> self.max_age",
        "tests/test_feedback.py",
    ),
    Break(
        8,
        "non-finite values are like any others",
        PYTHON + "training/feedback/residuals.py",
        "bad = ~np.isfinite(bucket)",
        "bad = np.zeros(bucket.shape, bool)",
        "tests/test_feedback.py",
    ),
    Break(
        9,
        "a BITMAP of an earlier pass begins the next one",
        PROTO + "push/passes.cc",
        "if (pass < pass_ || stopped_) return",
        "if (stopped_) return",
        SIM + "passes.py",
    ),
    Break(
        9,
        "a result may be shorter than its chunk",
        PROTO + "op/worker_half.cc",
        "!codec::valid(spec_.plan.format, payload, grid_.length(chunk)))",
        "false)",
        SIM + "faults.py",
    ),
    Break(
        9,
        "the indices of a sparse chunk may lie beyond it",
        "engine/codec/topk.cc",
        "if (indices[entries - 1] >= count) return false;",
        "",
        "engine/tests/test_codec.py",
    ),
    Break(
        9,
        "the scale of a chunk may be anything",
        "engine/codec/int8.cc",
        "return scale >= 0.0f && std::isfinite(scale * kMostCode);",
        "return scale == scale || scale != scale;",
        "engine/tests/test_codec.py",
    ),
    Break(
        9,
        "a peer's word is enough for shorter datagrams",
        PROTO + "path/signals.cc",
        "if (claim && !life.connected) lower_limit(claim, now);",
        "if (claim) lower_limit(claim, now);",
        SIM + "path_limit.py",
    ),
    Break(
        9,
        "one datagram may carry the numbers on",
        PROTO + "recovery/acknowledger.h",
        "return apart == 0 || apart > kAhead;",
        "return apart != apart;",
        SIM + "faults.py",
    ),
    Break(
        9,
        "a datagram may come in any endpoint's name",
        PROTO + "endpoint/receive.cc",
        "head->source == source && path;",
        "path;",
        SIM + "faults.py",
    ),
    Break(
        9,
        "a datagram of another session is heeded",
        PROTO + "endpoint/receive.cc",
        "head->session == own.session &&",
        "",
        SIM + "faults.py",
    ),
    Break(
        9,
        "a tag is not checked",
        "engine/seal/aead.cc",
        "update(text, text.data()) && finish();",
        "update(text, text.data()) && (finish() || true);",
        "engine/tests/test_part_seal.py",
    ),
    Break(
        9,
        "a header's tag is not checked",
        "engine/seal/mac.cc",
        "wire::kTagBytes) == 0;",
        "wire::kTagBytes) == 0 || true;",
        "engine/tests/test_part_seal.py",
    ),
    Break(
        9,
        "a datagram is taken as often as it comes",
        "engine/seal/seal.cc",
        "if (!seen_.fresh(number)) return Verdict::replayed;",
        "",
        "engine/tests/test_part_seal.py",
    ),
    Break(
        9,
        "one key serves for good",
        "engine/seal/seal.cc",
        "if (number && epoch_of(number) != epoch_of(number - 1)) {",
        "if (false) {",
        "engine/tests/test_part_seal.py",
    ),
    Break(
        9,
        "all numbers have one nonce",
        "engine/seal/aead.cc",
        "nonce[nonce.size() - 1 - i] ^= static_cast<uint8_t>(number >> 8 * i);",
        "nonce[nonce.size() - 1 - i] ^= static_cast<uint8_t>(number >> 63);",
        "engine/tests/test_part_seal.py",
    ),
    Break(
        9,
        "what an OPEN asks for is allocated whatever the limit",
        PROTO + "op/admission.cc",
        "if (room == Room::later) continue;",
        "",
        SIM + "memory.py",
    ),
    Break(
        9,
        "packets of ops to come are kept whatever the limit",
        PROTO + "path/stash.h",
        "|| !memory.has_early(bytes);",
        ";",
        SIM + "memory.py",
    ),
    Break(
        6,
        "an engine whose thread fails goes without a word",
        "engine/io/loop.cc",
        "tell_peers(why); } catch",
        "} catch",
        "engine/tests/test_io_engine.py",
    ),
    Break(
        6,
        "an engine without any memory ends without a reason",
        "engine/io/loop.cc",
        "const std::lock_guard lock(mutex); if (!failure) failure.text = kNoMemory;",
        "",
        "engine/tests/test_out_of_memory.py",
    ),
    Break(
        6,
        "an engine that its user stops goes without a word",
        "engine/io/loop.cc",
        "if (why) endpoint->give_up(*why, monotonic_now());",
        "",
        "engine/tests/test_io_engine.py",
    ),
    Break(
        6,
        "packets of ops to come keep the next op out",
        PROTO + "op/admission.cc",
        "const bool next = id == table_.next_admitted(id);",
        "const bool next = false;",
        SIM + "memory.py " + SIM + "property.py",
    ),
    Break(
        9,
        "a stray datagram of another version ends the job",
        PROTO + "endpoint/receive.cc",
        "(head->version != own.version && path->life.heard)",
        "false",
        SIM + "faults.py",
    ),
    Break(
        10,
        "the plan's hash is not compared",
        PROTO + "op/op.cc",
        "if (open.hash != hash_ || open.step != spec.step) {",
        "if (open.step != spec.step) {",
        SIM + "faults.py",
    ),
    Break(
        10,
        "each worker shuffles in an order of its own",
        PROTO + "push/push_list.cc",
        "if (!priorities.empty())"
        " std::ranges::stable_sort(sent, {}, [priorities](uint32_t c) { return priorities[c]; });",
        "static uint64_t calls = 0; Plan own = plan; own.seed ^= ++calls;"
        " sent = send_order(own, shard);",
        SIM + "bounded.py",
    ),
    Break(
        10,
        "the summary leaves out the last rank",
        PROTO + "op/aggregator_half.cc",
        "for (size_t w = 1; w < votes.size(); ++w)",
        "for (size_t w = 1; w + 1 < votes.size(); ++w)",
        SIM + "exact.py " + SIM + "property.py",
    ),
    Break(
        10,
        "ranks with another configuration may take part",
        PYTHON + "transport/introductions.py",
        "check_alike(meeting, [dict(each) for each in found])",
        "pass",
        "tests/test_invariants.py",
    ),
    Break(
        11,
        "everybody gets all the credit that is asked for",
        PROTO + "credit/credit.cc",
        "sender.largest + credit.share);",
        "sender.largest + 4000);",
        SIM + "network.py",
    ),
    Break(
        11,
        "all senders have their turns at once",
        PROTO + "credit/grant_slots.h",
        "if (slot.peer != kNone && now < slot.until) continue;",
        "",
        "engine/tests/test_part_credit.py",
    ),
    Break(
        6,
        "a rank calls itself cut off before its quick pings can be answered",
        PROTO + "path/silence.cc",
        "config.peer_timeout - together + moment;",
        "config.peer_timeout - together;",
        SIM + "fuzz.py",
    ),
    Break(
        6,
        "a turn whose end is lost is held for good",
        PROTO + "credit/grant_slots.h",
        "slot.until = until;",
        "slot.until = kNever;",
        "engine/tests/test_part_credit.py " + SIM + "network.py",
    ),
    Break(
        11,
        "each sender may send unasked as much as a lone one may",
        PROTO + "credit/credit.cc",
        "kFirstWindow / std::max(2U, senders) / engines",
        "kFirstWindow / 2 / engines",
        SIM + "network.py",
    ),
    Break(
        11,
        "the queue that is aimed at is longer than the port's",
        PROTO + "congestion/delay_window.cc",
        "static_cast<Nanos>(share * static_cast<double>(bounds_.target));",
        "static_cast<Nanos>(8 * share * static_cast<double>(bounds_.target));",
        SIM + "network.py",
    ),
    Break(
        0,
        "losses are tried out with all the room there is",
        PROTO + "congestion/loss_law.cc",
        "room_ = std::clamp(tried, kLeast, saved_);",
        "room_ = saved_;",
        "engine/tests/test_part_congestion.py",
    ),
    Break(
        0,
        "a trial of a few packets shows whose losses are",
        PROTO + "congestion/loss_law.cc",
        "expected >= kEvidence / 2;",
        "true;",
        "engine/tests/test_part_congestion.py",
    ),
    Break(
        0,
        "what heavy loss was taken for holds when little is left of it",
        PROTO + "congestion/loss_law.cc",
        "if (kOther * of_path_ < before_) again_ = 0;",
        "",
        "engine/tests/test_part_congestion.py",
    ),
    Break(
        0,
        "own losses take a tenth of the room, whatever queue they met",
        PROTO + "congestion/loss_law.cc",
        "std::min(left, std::max(most, room_ / kMostCut))",
        "left",
        "engine/tests/test_part_congestion.py",
    ),
    Break(
        0,
        "the least room leaves a pace above BtlBw",
        PROTO + "congestion/send_controller.cc",
        "kProbeGain * spare() *",
        "kProbeGain * bears() *",
        "engine/tests/test_part_send_controller.py",
    ),
    Break(
        0,
        "a trial sends more than has arrived",
        PROTO + "congestion/loss_law.h",
        "double pace() const { return trying_ ? arrived_ : 1.0; }",
        "double pace() const { return 1.0; }",
        "engine/tests/test_part_congestion.py",
    ),
    Break(
        0,
        "a long path's window makes a trial faster",
        PROTO + "congestion/send_controller.cc",
        "if (!window_.pressed() && (far.alone() || window_.ramps()))",
        "if (far.alone() || window_.ramps())",
        SIM + "network.py",
    ),
    Break(
        0,
        "what arrives before BtlBw is known counts as a use of it",
        PROTO + "congestion/delay_window.cc",
        "if (const double known = meter_.bytes_per_second(); known > 0) {",
        "if (const double known = std::max(1.0, meter_.bytes_per_second()); known > 0) {",
        SIM + "network.py",
    ),
    Break(
        0,
        "losses of a long path are forgotten once they are not heavy",
        PROTO + "congestion/delay_window.cc",
        "if (!path.ramps || lossy_ || law_.loses(now) || law_.room() < 1)",
        "if (!path.ramps || lossy_)",
        SIM + "long_paths.py",
    ),
    Break(
        0,
        "a bucket that fills in a pause for ACKs is measured",
        PROTO + "congestion/rate_meter.h",
        "std::max(idle(), 2 * losing)",
        "idle()",
        SIM + "network.py",
    ),
    Break(
        0,
        "a window grows beyond BtlBw where packets are lost",
        PROTO + "congestion/delay_window.cc",
        "(some_queue(delay, target_) || law_.loses(now))",
        "some_queue(delay, target_)",
        SIM + "network.py",
    ),
    Break(
        0,
        "a policer's bucket is taken for its rate",
        PROTO + "congestion/rate_meter.h",
        "if (losing && bytes_ < kWholeBytes) return took >= kWholeTimes * usual;",
        "",
        "engine/tests/test_part_congestion.py",
    ),
    Break(
        0,
        "losses beside a queue that stands are tried out",
        PROTO + "congestion/loss_law.cc",
        "some_queue(least_.get(), port.target)",
        "some_queue(0, port.target)",
        "engine/tests/test_part_congestion.py",
    ),
    Break(
        0,
        "heavy losses beside a queue that stands are borne for a second",
        PROTO + "congestion/loss_law.cc",
        "(lasts || (stands && short_buffer(port)))",
        "lasts",
        "engine/tests/test_part_congestion.py",
    ),
    Break(
        0,
        "a stretch grows beside a short buffer that is full",
        PROTO + "congestion/stretch.h",
        "} else if (limited && starves && !stands) {",
        "} else if (limited && starves) {",
        "engine/tests/test_part_congestion.py",
    ),
    Break(
        0,
        "heavy loss is taken for a burst for ever",
        PROTO + "congestion/loss_law.cc",
        "return !heavy || now",
        "return !heavy && now",
        "engine/tests/test_part_congestion.py",
    ),
    Break(
        0,
        "beside TCP the window gives way as ever",
        PROTO + "congestion/competition.cc",
        "if (wins_ > 0) {",
        "if (false) {",
        SIM + "sharing.py",
    ),
    Break(
        0,
        "the circuit breaker never breaks",
        PROTO + "congestion/circuit_breaker.h",
        "trying_ = bad_ >= next_;",
        "trying_ = false;",
        SIM + "sharing.py",
    ),
    Break(
        0,
        "a flood that the circuit breaker has found goes on",
        PROTO + "congestion/loss_law.cc",
        "  left_ = use;\n  take_for_own(loss, now);",
        "  take_for_own(loss, now);",
        SIM + "network.py",
    ),
    Break(
        0,
        "losses of a path are taken for a flood",
        PROTO + "congestion/circuit_breaker.h",
        "arrived > kStays * before_ && ",
        "",
        "engine/tests/test_part_congestion.py",
    ),
    Break(
        0,
        "a cut of the circuit breaker that was of no use stays",
        PROTO + "congestion/circuit_breaker.h",
        "if (std::exchange(trying_, false)) {",
        "if (trying_) {",
        SIM + "sharing.py",
    ),
    Break(
        0,
        "a pass sends again what has arrived",
        PROTO + "push/passes.cc",
        "if (missing.test(chunk - begin_)) {",
        "if (missing.size()) {",
        SIM + "passes.py",
    ),
    Break(
        2,
        "ranks that follow on a host decide by themselves",
        PYTHON + "training/hosts/follower.py",
        "self.policy.observe(report)",
        "pass",
        "tests/test_hosts.py",
    ),
    Break(
        5,
        "the lowest rank of a host counts twice",
        PYTHON + "training/hosts/rows.py",
        "for row in range(1, self._ranks):",
        "for row in range(0, self._ranks):",
        "tests/test_hosts.py",
    ),
    Break(
        6,
        "a rank waits for the leader of its host for ever",
        PYTHON + "training/hosts/follower.py",
        "if late and self._heard < since:",
        "if False:",
        "tests/test_hosts.py",
    ),
    Break(
        6,
        "the leader of a host waits for a rank that has said that it cannot connect",
        PYTHON + "training/hosts/seat.py",
        "meeting.hurry()",
        "pass",
        "tests/test_hosts.py::test_ranks_that_may_not_connect_within_their_host_go_without",
    ),
    Break(
        6,
        "other hosts are not told why one of them stops",
        PYTHON + "training/hosts/leader.py",
        "self.communicator.fail(str(cause) or type(cause).__name__)",
        "pass",
        "tests/test_hosts.py::test_an_error_that_cannot_be_unpickled_reaches_all_hosts",
    ),
    Break(
        6,
        "a server takes a failure for the end of its job",
        PYTHON + "server.py",
        "_check(opened, notices, workers, index)",
        "left = left or opened.engine.failure() is not None",
        "tests/test_server.py::test_a_server_whose_workers_were_killed_has_failed",
    ),
    Break(
        6,
        "a meeting's last outcome is removed before all have read it",
        PYTHON + "transport/meeting.py",
        "self._store.add(self._key(LEFT), 1) == self.endpoints:",
        "self._store.add(self._key(LEFT), 1):",
        "tests/test_rendezvous.py",
    ),
    Break(
        6,
        "a store is asked for its identity without a time-out",
        PYTHON + "transport/store.py",
        "base = BoundedStore(base_store(store), timeout_s)",
        "base = base_store(store)",
        "tests/test_rendezvous.py",
    ),
    Break(
        6,
        "an endpoint takes part in a meeting of an earlier life",
        PYTHON + "transport/meeting.py",
        'if asked and self._store.check([f"{prefix}/{number}"]):',
        "if asked:",
        "tests/test_rendezvous.py",
    ),
    Break(
        8,
        "a host's share of the mean is that of one rank",
        PYTHON + "training/hosts/rows.py",
        "np.multiply(total, factor, out=total)",
        "pass",
        "tests/test_hosts.py",
    ),
    Break(
        2,
        "a chunk crosses the end of a shard",
        PROTO + "plan/grid.cc",
        "const uint64_t length = std::min(left, end - at);",
        "const uint64_t length = left;",
        SIM + "reduce_scatter.py",
    ),
    Break(
        10,
        "each worker chooses encodings by what it waited itself",
        PYTHON + "policies/parts/trials.py",
        "pace = report.agreed.pace",
        "pace = report.agreed.pace and Pace(report.comm_s, 1.0 if report.rank else 0.0)",
        "tests/test_policy_adaptive.py",
    ),
    Break(
        10,
        "a plan's hash leaves the shards out",
        PROTO + "plan/plan.cc",
        "for (const uint64_t shard : shards) body.put(shard);",
        "for (const uint64_t shard : shards) body.put(shard * 0);",
        SIM + "reduce_scatter.py",
    ),
    Break(
        8,
        "what another rank sums of a scattered bucket never counts as applied",
        PYTHON + "training/pipeline.py",
        "report = replace(report, applied=report.applied | report.counted)",
        "pass",
        "tests/test_fsdp2.py::test_bounds_hold_and_the_books_balance",
    ),
    Break(
        2,
        "DDP goes on before a step is concluded",
        PYTHON + "training/pipeline.py",
        "waits = ends or (step.held_back and error is None)",
        "waits = step.held_back and error is None",
        "tests/test_step_end.py",
    ),
    Break(
        2,
        "results of a guarded step go to DDP before the guard decides",
        PYTHON + "training/pipeline.py",
        "waits = ends or (step.held_back and error is None)",
        "waits = ends",
        "tests/test_step_end.py",
    ),
    Break(
        6,
        "a failure that cannot be explained is told to nobody",
        PYTHON + "training/failures.py",
        "with contextlib.suppress(Exception):",
        "if True:",
        "tests/test_step_end.py",
    ),
    Break(
        8,
        "a backward pass inside of another one ends a step",
        PYTHON + "training/fsdp_passes.py",
        "inside = present != self._seen and _is_inside()",
        "inside = False",
        "tests/test_fsdp2_passes.py",
    ),
    Break(
        8,
        "an optimizer steps with what a failed step left",
        PYTHON + "training/connection.py",
        "if self._holds(optimizer): self.check()",
        "pass",
        "tests/test_stopped.py",
    ),
    Break(
        8,
        "an optimizer steps in the middle of a step of DDP",
        PYTHON + "training/hook.py",
        "if self._pipeline is not None and self._interrupted():",
        "if False:",
        "tests/test_stopped.py",
    ),
    Break(
        8,
        "a backward pass on another thread passes for one that has ended",
        PYTHON + "training/fsdp_passes.py",
        "return _present() != -1 or self._running() is not None",
        "return _present() != -1",
        "tests/test_stopped.py",
    ),
    Break(
        8,
        "a flush ends before all parts of a model have come",
        PYTHON + "training/flush.py",
        "if self._started and turns and not self._awaited:",
        "if self._started:",
        "tests/test_flush.py",
    ),
    Break(
        2,
        "a flush that one rank asks for is exact on that rank alone",
        PYTHON + "training/step_cycle.py",
        "exact=flushes or after_rise or over,",
        "exact=self._ballots.flush or after_rise or over,",
        "tests/test_ddp_steps.py::test_a_flush_of_one_rank_empties_the_books_of_all_after_the_next_step",
    ),
    Break(
        8,
        "what a loss scaler keeps from one optimizer is void in the books of all",
        PYTHON + "training/step_cycle.py",
        "for owner in step.overflowed:",
        "for owner in step.owners if step.overflowed else ():",
        "tests/test_ddp_steps.py::test_each_optimizer_that_a_scaler_skips_owes_what_was_owed",
    ),
    Break(
        8,
        "only the last of the passes that an optimizer is kept from is void",
        PYTHON + "training/feedback/earlier.py",
        "new = [slot for slot in slots if slot.key not in self._kept]",
        "new = list(slots)",
        "tests/test_ddp_steps.py::test_each_optimizer_that_a_scaler_skips_owes_what_was_owed",
    ),
    Break(
        8,
        "a distributed checkpoint keeps what one rank owes for all ranks",
        PYTHON + "core/rank_state.py",
        'return f"rank {rank} of {ranks}"',
        'return f"rank 0 of {ranks}"',
        "tests/test_distributed_checkpoint.py::test_each_ranks_state_comes_back_to_the_bit",
    ),
    Break(
        8,
        "another rank's state is taken though something was owed",
        PYTHON + "training/training_state.py",
        "if owing or _owes(state):",
        "if owing and _owes(state):",
        "tests/test_distributed_checkpoint.py::test_another_ranks_state_is_refused_unless_nothing_was_owed",
    ),
    Break(
        10,
        "ranks sum gradients of different tensors of one size",
        PYTHON + "training/planner.py",
        "tensors = [slots.digest] if isinstance(slots, ComparedLayout) else []",
        "tensors: list[int] = []",
        "tests/test_fsdp2.py::test_ranks_that_use_different_parameters_all_say_which",
    ),
    Break(
        10,
        "ranks that train different parameters end a step apart",
        PYTHON + "training/fsdp.py",
        "pipeline.compared = lambda: (zlib.crc32(repr(self._due).encode()),)",
        "pass",
        "tests/test_fsdp2.py::test_what_trains_on_some_ranks_only_stops_all_before_any_steps",
    ),
    Break(
        8,
        "a shard goes where another rank's belongs",
        PYTHON + "training/bucket.py",
        "return self.parts[self.rank]",
        "return self.parts[self.rank - 1]",
        "tests/test_fsdp2.py::test_bounds_hold_and_the_books_balance",
    ),
    Break(
        9,
        "what has no right tag goes on to the endpoint",
        "engine/io/gate.cc",
        "case seal::Opener::Verdict::forged: ++counters_.forged; return {};",
        "case seal::Opener::Verdict::forged: ++counters_.forged;"
        " return datagram.subspan(wire::kTagBytes);",
        "engine/tests/test_io_auth.py",
    ),
    Break(
        9,
        "what has no right tag uses up its number",
        "engine/seal/seal.cc",
        "Key* const key = of(epoch_of(number));",
        "seen_.record(number); Key* const key = of(epoch_of(number));",
        "engine/tests/test_io_auth.py engine/tests/test_part_seal.py",
    ),
    Break(
        9,
        "both ways of a pair have one key",
        PYTHON + "transport/keys.py",
        "found.append((up, down) if self._endpoint == low else (down, up))",
        "found.append((up, up))",
        "engine/tests/test_part_seal.py",
    ),
    Break(
        9,
        "engine threads of a process share their keys",
        PYTHON + "transport/keys.py",
        "context = self._transcript([hellos[low], hellos[high]], low, high, core)",
        "context = self._transcript([hellos[low], hellos[high]], low, high)",
        "engine/tests/test_part_seal.py",
    ),
    Break(
        9,
        "ranks with different keys meet",
        PYTHON + "transport/keys.py",
        "early = load_engine(), self._early(self._key)",
        "early = load_engine(), self._early(ZEROS)",
        "tests/test_auth.py",
    ),
    Break(
        9,
        "an endpoint takes what the store says of itself for its keys",
        PYTHON + "transport/keys.py",
        "hellos[self._endpoint] = self.hello",
        "pass",
        "engine/tests/test_part_seal.py",
    ),
    Break(
        9,
        "who attaches with another key shares the engine of the first",
        PYTHON + "core/settings.py",
        "key = fingerprint(self.secret_key())",
        "key = None",
        "tests/test_auth.py",
    ),
    Break(
        9,
        "a key comes from a file that others may read",
        PYTHON + "core/keys.py",
        "if mode & (stat.S_IRWXG | stat.S_IRWXO):",
        "if False:",
        "tests/test_auth.py",
    ),
    Break(
        6,
        "who leaves goes although a peer that lives lacks its results",
        PROTO + "endpoint/endpoint.cc",
        "if (!served && now < later) {",
        "if (false) {",
        SIM + "faults.py",
    ),
    Break(
        6,
        "who leaves calls peers dead that have left as well",
        PROTO + "path/path.cc",
        "return port.leaving || !life.connected ? kNever",
        "return !life.connected ? kNever",
        SIM + "faults.py",
    ),
    Break(
        0,
        "trains are as long as ever where most are lost",
        PROTO + "path/path.cc",
        "longer || !standing.lossy ? 1 : kLossyTrain;",
        "64 * kLossyTrain;",
        SIM + "fuzz.py",
    ),
    Break(
        6,
        "what arrives of short datagrams hides that long ones never do",
        PROTO + "path/path_limit.cc",
        "if (bytes >= longest_) return end();",
        "if (bytes >= carried_) return end();",
        "engine/tests/test_part_path.py",
    ),
    Break(
        6,
        "a datagram that was acknowledged long ago counts as waiting again",
        PROTO + "path/path_limit.cc",
        "waiting_ = of_longest_ = 0;",
        "waiting_ = 0;",
        SIM + "path_limit.py",
    ),
    Break(
        6,
        "each probe time-out begins with the same lane",
        PROTO + "sched/scheduler.h",
        "queues_[to].lane = queues_[to].probed;",
        "",
        "engine/tests/test_part_scheduler.py",
    ),
    Break(
        0,
        "a path heard once hides the queue that many others fill",
        PROTO + "congestion/queue_delay.h",
        "ends_.earliest() < now || (!own.in_use && in_use_ == kLast)",
        "ends_.earliest() < now",
        SIM + "network.py",
    ),
    Break(
        0,
        "clocks that run apart are taken for a queue",
        PROTO + "congestion/queue_delay.h",
        "const Nanos delay = drift_.corrected(last_, now);",
        "const Nanos delay = last_;",
        "engine/tests/test_part_congestion.py",
    ),
    Break(
        6,
        "repeats of packets with ECT never show that the path drops them",
        PROTO + "path/path.cc",
        "if (each.packet.ect) ecn.sent.given_up();",
        "",
        SIM + "fuzz.py",
    ),
    Break(
        1,
        "regions close with twice the loss that is allowed, in drawn jobs",
        PROTO + "push/close_rule.cc",
        "return part.elements - part.losable;",
        "return part.elements - std::min(part.elements, 2 * part.losable);",
        SIM + "fuzz.py",
    ),
    Break(
        2,
        "each aggregator commits for itself what it has, in drawn jobs",
        PROTO + "op/aggregator_half.cc",
        "if (own_) own_->pull(config_.shard()).on_commit(*applied);",
        "Bitmap own = *applied;"
        " for (uint32_t c : sum_.finished()) own.set(c - shard().begin);"
        " if (own_) own_->pull(config_.shard()).on_commit(own);",
        SIM + "fuzz.py",
    ),
    Break(
        5,
        "duplicates and late chunks are added again, in drawn jobs",
        PROTO + "push/aggregator.cc",
        "if (w.decided.test(local)) return Added::ignored;",
        "",
        SIM + "fuzz.py",
    ),
    Break(
        6,
        "a silent engine is waited for, in drawn jobs",
        PROTO + "path/silence.cc",
        "now - last <= config.peer_timeout",
        "now - last <= 1000 * config.peer_timeout",
        SIM + "fuzz.py",
    ),
    Break(
        8,
        "what did not count is forgotten, in drawn jobs",
        PYTHON + "training/feedback/residuals.py",
        "counted = report.counted.astype(bool)",
        "counted = np.ones(len(report.counted), bool)",
        SIM + "fuzz.py",
    ),
    Break(
        10,
        "the plan's hash is not compared, in drawn jobs",
        PROTO + "op/op.cc",
        "if (open.hash != hash_ || open.step != spec.step) {",
        "if (open.step != spec.step) {",
        SIM + "fuzz.py",
    ),
)


# ---------------------------------------------------------------------------- the copy


def in_sources(names: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        top = ROOT / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and path.suffix in SUFFIXES:
                yield str(path.relative_to(ROOT)), path.read_bytes()


def in_commit(commit: str) -> Iterator[tuple[str, bytes]]:
    command = ["git", "-C", str(ROOT), "archive", commit, *COPIED]
    with tarfile.open(fileobj=io.BytesIO(subprocess.check_output(command))) as archive:
        for member in archive.getmembers():
            content = archive.extractfile(member)
            if content is not None and Path(member.name).suffix in SUFFIXES:
                yield member.name, content.read()


def write_if_changed(path: Path, content: bytes) -> None:
    if path.is_file() and path.read_bytes() == content:
        return  # keeps its time, so nothing is compiled anew
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def make_copy(commit: str | None) -> None:
    files = dict(in_sources(COPIED) if commit is None else in_commit(commit))
    files.update(in_sources(OWN))
    for name, content in files.items():
        write_if_changed(TREE / name, content)
    for path in TREE.rglob("*"):
        if path.is_file() and path.suffix in SUFFIXES and str(path.relative_to(TREE)) not in files:
            path.unlink()
    guard = (Path(__file__).parent / "only_this_copy.py").read_bytes()
    write_if_changed(GUARD / "sitecustomize.py", guard)


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def build() -> str:
    """ "" or the compiler's complaint."""
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    cache = OBJECTS / "CMakeCache.txt"
    if not cache.exists() or "GRADWIRE_TESTS:BOOL=ON" not in cache.read_text(encoding="utf-8"):
        made = run(
            ["cmake", "-G", "Ninja", "-S", str(TREE), "-B", str(OBJECTS), "-DGRADWIRE_WERROR=OFF",
             "-DGRADWIRE_TESTS=ON", f"-DPython_EXECUTABLE={sys.executable}"],
            env=tools,
        )  # fmt: skip
        if made.returncode:
            return made.stderr
    made = run(["ninja", "-C", str(OBJECTS)], env=tools)
    if made.returncode:
        return made.stdout
    for name, folder in (("_engine", PACKAGE), ("_parts", TREE / "engine" / "tests")):
        for library in OBJECTS.glob(f"{name}*.so"):
            link = folder / library.name
            if not link.is_symlink():
                link.symlink_to(library)
    return ""


def engine_digest() -> str:
    (library,) = OBJECTS.glob("_engine*.so")
    return hashlib.sha256(library.read_bytes()).hexdigest()


# ---------------------------------------------------------------------------- tests on the copy


@dataclass(frozen=True)
class Verdict:
    noticed: str  # by what; "" if by nothing
    fault: str = ""  # why the run says nothing
    words: str = ""  # of the failed test


def test(arguments: list[str], limit: float) -> Verdict:
    """Runs pytest in the copy until a test fails, for `limit` seconds at most."""
    proof = WORK / "proof"
    proof.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{GUARD}:{TREE / 'src'}",
        "PYTHONDONTWRITEBYTECODE": "1",  # a change within one second would go unseen
        "BROKEN_COPY": str(PACKAGE),
        "BROKEN_COPY_ENGINE": engine_digest(),
        "BROKEN_COPY_PROOF": str(proof),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "sitecustomize",
         "-p", "no:cacheprovider", "-o", "timeout=120", *arguments],
        cwd=TREE, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        output = ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not proof.is_file():
        return Verdict("", f"the copy's engine was not loaded:\n{output[-2000:]}")
    if process.returncode == -signal.SIGKILL:
        return Verdict(f"(no end within {limit:g} s)")
    if process.returncode < 0 or process.returncode > 128:
        return Verdict(f"(the process died of signal {process.returncode})")
    if process.returncode == 0:
        return Verdict("")
    failed = re.search(r"^FAILED \S*/(\S+?::\S+)", output, re.MULTILINE)
    if process.returncode != 1 or failed is None:
        return Verdict("", f"pytest ended with {process.returncode}:\n{output[-2000:]}")
    words = re.search(r"^E +(.*)", output, re.MULTILINE)
    return Verdict(failed[1], words=words[1][:160] if words else "")


# ---------------------------------------------------------------------------- breaking


def places(text: str, before: str) -> list[re.Match[str]]:
    """Where it stands, whatever white space and kind of quote the formatter has chosen."""
    tokens = re.findall(r"\w+|[^\w\s]", before)
    quote = "[\"']"
    return list(
        re.finditer(r"\s*".join(quote if t in "\"'" else re.escape(t) for t in tokens), text)
    )


def locate(case: Break, tree: Path = TREE) -> tuple[Path, re.Match[str]] | str:
    """The file and the place in it, or why there is none."""
    home = tree / case.path
    if home.is_file():
        found = places(home.read_text(encoding="utf-8"), case.before)
        if len(found) == 1:
            return home, found[0]
        if found:
            return f"{case.path} has this place {len(found)} times: {case.before}"
    top = tree / case.path.split("/")[0]
    everywhere = [
        (path, place)
        for path in sorted(top.rglob("*" + home.suffix))
        if "tests" not in path.parts
        for place in places(path.read_text(encoding="utf-8"), case.before)
    ]
    if len(everywhere) == 1:
        print(f"    moved from {case.path} to {everywhere[0][0].relative_to(tree)}")
        return everywhere[0]
    return f"{case.path} no longer has this place, nor is it once elsewhere: {case.before}"


@contextmanager
def broken(case: Break, path: Path, place: re.Match[str]) -> Iterator[None]:
    intact = place.string
    path.write_text(intact[: place.start()] + case.after + intact[place.end() :], encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(intact, encoding="utf-8")


def try_break(case: Break, intact_engine: str) -> Verdict:
    found = locate(case)
    if isinstance(found, str):
        return Verdict("", found)
    with broken(case, *found):
        if found[0].suffix != ".py":
            complaint = build()
            if complaint:
                return Verdict("", "it does not compile:\n" + complaint[-2000:])
            if engine_digest() == intact_engine and "test_layers" not in case.tests:
                return Verdict("", "the engine is still the intact one: the change means nothing")
        return test(case.tests.split(), LIMIT)


def main() -> int:
    assert {case.invariant for case in BREAKS} == set(INVARIANTS)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", help="take the sources from this commit")
    parser.add_argument("invariant", nargs="*", type=int, help="all, if none is given")
    options = parser.parse_args()
    if unknown := set(options.invariant) - set(INVARIANTS):
        parser.error(f"there is no invariant {min(unknown)}")
    wanted = [case for case in BREAKS if case.invariant in (options.invariant or INVARIANTS)]
    WORK.mkdir(parents=True, exist_ok=True)
    with (WORK / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return break_all(wanted, options.commit)


def break_all(wanted: list[Break], commit: str | None) -> int:
    make_copy(commit)
    complaint = build()
    if complaint:
        sys.exit(f"the intact copy does not compile:\n{complaint}")
    intact_engine = engine_digest()
    started = time.monotonic()
    needed = sorted({argument for case in wanted for argument in case.tests.split()})
    verdict = test(needed, 5 * LIMIT)
    if verdict.noticed or verdict.fault:
        sys.exit(f"intact, and yet: {verdict.noticed or verdict.fault}")
    print(f"intact: all tests pass ({time.monotonic() - started:.0f} s)", flush=True)
    verdicts = {}
    # File by file, so that little is compiled.
    for case in sorted(wanted, key=lambda case: (case.path.endswith(".py"), case.path)):
        print(f"{case.invariant}: {case.what} …", flush=True)
        if case.path.endswith(".py") and engine_digest() != intact_engine and (wrong := build()):
            sys.exit(wrong)
        started = time.monotonic()
        verdict = verdicts[case] = try_break(case, intact_engine)
        text = f"noticed by {verdict.noticed}" if verdict.noticed else "NOBODY NOTICES"
        print(f"    {verdict.fault or text} ({time.monotonic() - started:.0f} s)", flush=True)
        if verdict.words:
            print(f"      {verdict.words}", flush=True)
    print("\n| invariant | broken on purpose | noticed by |\n|---|---|---|")
    for case in wanted:
        verdict = verdicts[case]
        said = f"`{verdict.noticed}`" if verdict.noticed else "**NOBODY**"
        if verdict.fault:
            said = "**NOT SHOWN**, see above"
        print(f"| {case.invariant} {INVARIANTS[case.invariant]} | {case.what} | {said} |")
    left = sum(not verdict.noticed for verdict in verdicts.values())
    print(f"\n{len(verdicts) - left} of {len(verdicts)} breaks are noticed")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
