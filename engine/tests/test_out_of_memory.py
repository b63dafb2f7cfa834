"""An engine's thread without memory: its op ends on all ranks, and the process lives on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ALLOCATIONS = r"""
// operator new, which can have an engine's thread go without memory.
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {
std::atomic<long> left{-1};    // allocations until memory runs out; negative: it never does
std::atomic<long> lacks{0};    // how many are refused then
std::atomic<long> refused{0};

bool of_an_engine() {
  thread_local int known = -1;
  if (known < 0) {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof(name));
    known = std::strcmp(name, "gradwire") == 0;
  }
  return known == 1;
}
}  // namespace

extern "C" void run_out_after(long allocations, long refusals) {
  refused = 0;
  lacks = refusals;
  left = allocations;
}
extern "C" long refusals() { return refused; }

void* operator new(std::size_t bytes) {
  if (left >= 0 && of_an_engine()) {
    if (left > 0) {
      --left;
    } else if (refused < lacks) {
      ++refused;
      throw std::bad_alloc();
    }
  }
  if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void* operator new[](std::size_t bytes) { return operator new(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
"""

JOB = """
import ctypes
import sys
import numpy as np
from gradwire import _engine

hook = ctypes.CDLL(sys.argv[1])
elements, second = 20_000, 10**9
plan = _engine.Plan(elements=elements, regions=[(0, elements, 0.0)])
for allocations in range(0, 1000, 11):
    once = allocations % 2 == 0  # else there is no memory from then on
    pair = [
        _engine.Engine(
            endpoint=i, workers=2, servers=0, session=5, address="127.0.0.1", peer_timeout_ns=second
        )
        for i in range(2)
    ]
    for each in pair:
        each.connect([one.address for one in pair])
    assert pair[0].wait_connected(20 * second) == []
    buffers = [np.ones(elements, np.float32) for _ in pair]
    hook.run_out_after(allocations, 1 if once else 10**9)
    texts, begun, complete = [], [], 0
    for each, buffer in zip(pair, buffers):
        try:
            each.all_reduce(op=0, step=6, plan=plan, data=buffer)
            begun.append((each, buffer))
        except RuntimeError as error:  # it has failed already
            texts.append(str(error))
    for each, buffer in begun:
        done = each.next_completion(20 * second)
        if done is not None and done.ok:
            assert (buffer == 2.0).all(), allocations
            complete += 1
        else:
            texts.append(each.failure().text if done is None else done.error)
    refused = hook.refusals()
    hook.run_out_after(-1, 0)
    assert not once or all("alloc" in text for text in texts), (allocations, texts)
    ways = "memory", "alloc", "rank"  # the last of what has been told, or is silent
    assert all(any(way in text for way in ways) for text in texts), (allocations, texts)
    for each in pair:
        each.close()
    if complete == 2 and not refused:
        break
print("all", allocations)
"""


@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer has its own operator new")
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler")
def test_an_op_ends_at_whichever_allocation_memory_runs_out(tmp_path: Path) -> None:
    source, library = tmp_path / "allocations.cc", tmp_path / "allocations.so"
    source.write_text(ALLOCATIONS)
    subprocess.run(
        ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)],
        check=True,
    )
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(library)],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "LD_PRELOAD": str(library),
        },
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.startswith("all "), done.stdout
