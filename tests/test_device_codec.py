"""Encoding on the device: the engine's own payloads, and books that balance all the same.

On CPU tensors; the operations are the same on every device.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.core.plan import Region, TensorSlot, TransferPlan
from gradwire.policies import NetSenseML
from gradwire.sim.fabric import Link
from gradwire.sim.job import Job
from gradwire.training.cuda_codec import (
    ENCODABLE,
    Payload,
    decode,
    decode_on_host,
    encode,
    finite_chunks,
)
from gradwire.training.feedback.device_book import DeviceBook
from gradwire.transport.communicator import ChunkGrid
from gradwire.transport.native import load_engine, native_plan
from job_gradients import normal, set_ratio
from ranks import Ranks

DATAGRAM = 256
ODD = np.array(
    [
        *(0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 1.2e-38, -1.1e-38),
        *(3.4028235e38, -3.4028235e38, 65504.0, 65520.0, 1.0, 1.0 + 2**-11, 1.0 + 3 * 2**-11),
        *(1.0 + 2**-8, 0.5, 126.0, 1.9999999, 3.9998779, 2**-14, 2**-24, 2**-25, 1.5 * 2**-24),
        *(6e-8, 1.99951171875, 1e-30, 7.3),
    ],
    np.float32,
)


def plan_of(elements: int, encoding: str) -> TransferPlan:
    return TransferPlan(elements, (Region(0, elements, 0.0),), encoding=encoding)


def grid_of(plan: TransferPlan, aggregators: int = 2) -> ChunkGrid:
    return ChunkGrid(*load_engine().chunk_grid(native_plan(plan), DATAGRAM, aggregators))


def engine_round_trip(plan: TransferPlan, values: np.ndarray, aggregators: int = 2) -> np.ndarray:
    made: np.ndarray = load_engine().round_trip(native_plan(plan), values, DATAGRAM, aggregators)
    return made


def device_round_trip(values: np.ndarray, grid: ChunkGrid, encoding: str) -> np.ndarray:
    order = np.argsort(grid.offsets)
    lengths = torch.from_numpy(grid.lengths[order].astype(np.int64))
    payload = encode(torch.from_numpy(values), lengths, encoding)
    made: np.ndarray = decode(payload, lengths, encoding).numpy()
    host = torch.empty(values.size)
    decode_on_host(payload, lengths, encoding, host)
    numbers = ~np.isnan(made)
    assert same_bits(host.numpy()[numbers], made[numbers])
    assert np.array_equal(np.isnan(host.numpy()), ~numbers)
    return made


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return np.array_equal(left.view(np.uint32), right.view(np.uint32))


@pytest.mark.parametrize("encoding", ENCODABLE)
@settings(max_examples=40)
@given(st.data())
def test_the_engine_returns_what_was_decoded_here_to_the_bit(encoding: str, data: Any) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    chance = np.random.default_rng(seed)
    elements = data.draw(st.integers(1, 3000))
    scale = np.float32(2.0) ** data.draw(st.integers(-149, 120))
    values = (chance.standard_normal(elements) * scale).astype(np.float32)
    kind = data.draw(st.sampled_from(["plain", "odd", "bits", "uneven"]))
    if kind == "odd":
        at = chance.random(elements) < 0.1
        values[at] = chance.choice(ODD, at.sum())
    elif kind == "bits":  # any float there is
        values = chance.integers(0, 2**32, elements, np.uint32).view(np.float32).copy()
    elif kind == "uneven":
        values *= np.exp2(chance.integers(-30, 1, elements)).astype(np.float32)
    plan = plan_of(elements, encoding)
    grid = grid_of(plan)
    decoded = device_round_trip(values, grid, encoding)
    again = engine_round_trip(plan, decoded)
    numbers = ~np.isnan(decoded)
    assert same_bits(again[numbers], decoded[numbers])
    assert np.isnan(again[~numbers]).all()
    # The same as the engine makes of the values themselves, but for a float's last bits.
    direct = engine_round_trip(plan, values)
    assert np.array_equal(np.isnan(direct), np.isnan(decoded))
    assert np.array_equal(np.isinf(direct), np.isinf(decoded))
    for offset, length in zip(grid.offsets.astype(int), grid.lengths.astype(int), strict=True):
        chunk = slice(offset, offset + length)
        finite = np.isfinite(direct[chunk])
        off = np.abs(decoded[chunk][finite].astype(float) - direct[chunk][finite])
        largest = np.abs(direct[chunk][finite].astype(float)).max(initial=0.0)
        allowed = {"int8": 1.01 / 126, "f16": 2.0**-10}.get(encoding, 0.0)
        assert (off <= largest * allowed).all()
    if encoding in ("bf16", "half"):
        assert same_bits(decoded[numbers], direct[numbers])


def test_the_host_takes_no_payload_that_does_not_fit() -> None:
    lengths = torch.tensor([3, 2])
    good = encode(torch.ones(5), lengths, "int8")
    out = torch.empty(5)
    for payload, chunks in [
        (Payload(good.codes[:4], good.heads), lengths),
        (Payload(good.codes, good.heads[:1]), lengths),
        (good, torch.tensor([3, 1])),
        (Payload(torch.ones(0), good.heads), torch.tensor([5, 0])),
        (Payload(good.codes, torch.tensor([1.0, torch.inf])), lengths),
    ]:
        with pytest.raises(ValueError, match=r"heads|a chunk has"):
            decode_on_host(payload, chunks, "int8", out)


@pytest.mark.parametrize("encoding", ENCODABLE)
def test_nearly_all_chunks_are_the_engines_own(encoding: str) -> None:
    values = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
    plan = plan_of(values.size, encoding)
    grid = grid_of(plan)
    decoded, direct = device_round_trip(values, grid, encoding), engine_round_trip(plan, values)
    np.testing.assert_allclose(decoded, direct, rtol=1e-6, atol=1e-7)
    same = [
        same_bits(decoded[o : o + n], direct[o : o + n])
        for o, n in zip(grid.offsets.astype(int), grid.lengths.astype(int), strict=True)
    ]
    assert np.mean(same) > 0.95


@pytest.mark.parametrize(
    "values",
    [
        [1.9999999] + [3 * 2.0**-25] * 9,  # rounds up to 2: what is small is shifted one less
        [3.4028235e38, -3.4028235e38, 1e30, 1.0],
        [1e-45, 3e-45, -1e-44],
        [0.0, -0.0],
        [np.nan, np.inf, 1.0],
        [np.float32(126 * 1.1754944e-38), 1e-38],
    ],
)
@pytest.mark.parametrize("encoding", ENCODABLE)
def test_corners(encoding: str, values: list[float]) -> None:
    array = np.array(values, np.float32)
    plan = plan_of(array.size, encoding)
    decoded = device_round_trip(array, grid_of(plan, 1), encoding)
    again = engine_round_trip(plan, decoded, 1)
    numbers = ~np.isnan(decoded)
    assert same_bits(again[numbers], decoded[numbers])
    expected = engine_round_trip(plan, array, 1)  # which alone rounds to infinity, as IEEE 754 does
    assert np.array_equal(np.isfinite(decoded), np.isfinite(expected))


def test_a_chunk_that_is_not_finite_is_told_from_the_others() -> None:
    values = torch.tensor([1.0, 2.0, torch.inf, 3.0, 4.0])
    lengths = torch.tensor([2, 2, 1])
    assert finite_chunks(values, lengths).tolist() == [True, True, False, False, True]


# ---------------------------------------------------------------------------- the books


SLOTS = (TensorSlot("a.weight", 0, 900), TensorSlot("b.weight", 900, 1500))


@pytest.mark.parametrize("encoding", ENCODABLE)
def test_what_the_encoding_took_is_given_back_by_the_next_steps(encoding: str) -> None:
    grid = grid_of(plan_of(2400, encoding))
    book = DeviceBook(feedback=True)
    sent = np.zeros(2400)
    total = np.zeros(2400)
    for step in range(20):
        gradient = np.random.default_rng(step).standard_normal(2400).astype(np.float32)
        total += gradient
        encoded = book.encode(SLOTS, torch.from_numpy(gradient), grid, encoding)
        host = torch.empty(2400)
        encoded.to_host(pinned=False).decode_into(host)
        sent += host.numpy()
        norms = [np.square(gradient[:900], dtype=float), np.square(gradient[900:], dtype=float)]
        np.testing.assert_allclose(encoded.squares(), [n.sum() for n in norms], rtol=1e-9)
    ((slots, owed),) = book.recall_all()
    assert slots == SLOTS
    np.testing.assert_allclose(sent + owed, total, atol=1e-4)
    assert np.abs(owed).max() < 0.05
    assert not list(book.recall_all())


def test_what_is_owed_follows_the_scale_and_leaves_out_what_is_not_finite() -> None:
    grid = grid_of(plan_of(2400, "int8"))
    book = DeviceBook(feedback=True)
    gradient = torch.randn(2400, generator=torch.Generator().manual_seed(0))
    gradient[0] = torch.nan
    book.encode(SLOTS, gradient, grid, "int8")
    book.rescale(4.0)
    ((_, owed),) = book.recall(SLOTS[1:], but=True)  # another layout that shares a tensor
    first = int(grid.lengths[0])
    assert not owed[:first].any()
    assert owed[first:].any()
    other = DeviceBook(feedback=True)
    other.encode(SLOTS, gradient, grid, "int8")
    assert not list(other.recall(SLOTS, but=True))
    ((_, unscaled),) = other.recall(SLOTS, but=False)
    assert np.array_equal(owed, 4 * unscaled)
    none = DeviceBook(feedback=False)
    none.encode(SLOTS, gradient, grid, "int8")
    assert not list(none.recall_all())


TENSORS = {"a.weight": 9 * 358, "a.bias": 30, "b.weight": 11 * 358}
ELEMENTS = sum(TENSORS.values())


def on_devices(world: int, *args: Any, **options: Any) -> Job:
    """A job whose buckets are encoded where they lie, as CUDA ones are."""
    job = Job(world, TENSORS, *args, buckets=[2, 1], **options)
    for pipeline in job.pipelines:
        pipeline._stages.encodes = ("cpu",)
    return job


gradients = partial(normal, ELEMENTS)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "netsenseml", "start": 0.3, "share": 0.05},
        {"policy": "netsenseml", "start": 0.7, "share": 0.05},
        {"policy": "adaptive", "p_low": 0.2, "every": 5, "error_feedback": True},
    ],
)
def test_the_books_balance_over_all_stages(options: dict[str, Any]) -> None:
    job = on_devices(3, **options)
    total, applied = np.zeros(ELEMENTS), np.zeros(ELEMENTS)
    seen = set()
    for step in range(60):
        if step % 20 == 0:
            job.uplinks(Link(loss=0.15, loss_burst=3.0) if step % 40 else Link())
        for policy in job.policies:  # up and down, through f32, f16, int8 and top-k
            ratio = (1.0, 0.6, 0.3, 0.3, 0.3, 0.7, 0.7, 0.2)[step // 3 % 8]
            set_ratio(policy, max(ratio, 0.25) if policy.name == "adaptive" else ratio)
        fresh = gradients(step, 3)
        total += np.sum(fresh, axis=0, dtype=np.float64)
        results = job.step(fresh)
        seen.add(job.report.encoded_share)
        applied += 3 * results[0].astype(np.float64)
        assert all(np.array_equal(results[0], other) for other in results[1:])
        if step % 20 == 17:
            owed = sum(job.residual(rank).astype(np.float64) for rank in range(3))
            np.testing.assert_allclose(applied + owed, total, atol=2e-3)
    assert len(seen) >= 3
    job.pipelines[0].flush()
    for _ in range(2):
        applied += 3 * job.step([np.zeros(ELEMENTS, np.float32)] * 3)[0].astype(np.float64)
    np.testing.assert_allclose(applied, total, atol=2e-3)
    assert not any(job.residual(rank).any() for rank in range(3))


def test_norms_are_those_of_the_fresh_gradient_and_residuals_do_not_show() -> None:
    options: dict[str, Any] = {"detector": "layers", "every": 2, "error_feedback": True}
    on, off = (
        on_devices(2, "adaptive", **options),
        Job(2, TENSORS, "adaptive", buckets=[2, 1], **options),
    )
    for step in range(6):
        for policy in (*on.policies, *off.policies):
            set_ratio(policy, 0.3)
        on.step(gradients(step, 2))
        off.step(gradients(step, 2))
        assert on.report.agreed.fresh_norm == pytest.approx(off.report.agreed.fresh_norm, rel=1e-5)
        for name, norm in (off.report.agreed.layers or {}).items():
            assert on.report.agreed.layers is not None
            assert on.report.agreed.layers[name] == pytest.approx(norm, rel=1e-4)


def test_a_lost_chunk_comes_back_though_its_encoding_error_lies_elsewhere() -> None:
    # Small datagrams: of one or two chunks a bound of 0.3 could spend none.
    job = on_devices(2, "adaptive", p_low=0.3, p_high=0.3, error_feedback=True, datagram=256)
    job.uplinks(Link(loss=0.4))
    for policy in job.policies:
        set_ratio(policy, 0.3)
    applied, total, short = np.zeros(ELEMENTS), np.zeros(ELEMENTS), 0
    for step in range(10):
        for policy in job.policies:
            set_ratio(policy, 0.3)
        fresh = gradients(step, 2)
        total += np.sum(fresh, axis=0, dtype=np.float64)
        applied += 2 * job.step(fresh)[0].astype(np.float64)
        short += job.report.delivered < 1.0
    assert short
    owed = sum(job.residual(rank).astype(np.float64) for rank in range(2))
    np.testing.assert_allclose(applied + owed, total, atol=1e-4)


def test_infinities_pass_and_leave_nothing() -> None:
    job = on_devices(2, NetSenseML(start=0.3), error_feedback=True)
    fresh = gradients(0, 2)
    fresh[1][40] = np.inf
    result = job.step(fresh)[0]
    assert np.isinf(result[40])
    assert all(np.isfinite(job.residual(rank)).all() for rank in range(2))


def train_on_cuda(rank: int, world: int) -> bytes:
    torch.manual_seed(0)
    module = DistributedDataParallel(nn.Linear(512, 512).cuda(), bucket_cap_mb=0.3)
    attachment = gradwire.attach(module, policy="netsenseml", start=0.3)
    for step in range(10):
        module.zero_grad()
        batch = torch.randn(16, 512, generator=torch.Generator().manual_seed(10 * step + rank))
        module(batch.cuda()).square().mean().backward()
        assert np.isfinite(attachment.report().agreed.fresh_norm)
    got = torch.cat([p.grad.flatten() for p in module.parameters()]).cpu().numpy().tobytes()
    attachment.detach()
    return bytes(got)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_buckets_on_a_cuda_device_are_encoded_there() -> None:
    with Ranks(2) as ranks:
        first, second = ranks.run(train_on_cuda)
    assert first == second
