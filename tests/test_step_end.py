"""How a step ends: real pipelines in virtual time, of which rank 0's transfers end one by one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gradwire.core.agreed import Summary
from gradwire.core.errors import TransferError
from gradwire.core.report import StepReport
from gradwire.core.settings import Settings
from gradwire.policies import create
from gradwire.sim.job import Job
from gradwire.training.bucket import Bucket
from gradwire.training.guard import Decision, StepGuard
from job_gradients import normal

LOST = TransferError("rank 1 has left", rank=1, step=0, cause="left")
LAYERS = {"detector": "layers", "every": 1, "p_low": 0.1}
GUARDED = {"p": 0.3, "floor": 0.8}  # two workers lose more than that, so it is sent again
Future = torch.futures.Future[torch.Tensor]


class Hand:
    """A step of two ranks; those of rank 0's transfers that are over are ended by hand."""

    def __init__(self, buckets: int = 2, policy: str = "mlt", **options: Any) -> None:
        tensors = {f"{name}.weight": 60 * 358 for name in "abcd"[:buckets]}
        self.job = Job(2, tensors, policy, buckets=[1] * buckets, **options)
        self.mine, self.other = self.job.engines
        self.pipeline = self.job.pipelines[0]
        self.concluded: list[StepReport] = []
        self.futures: list[Future] = []
        observe = self.pipeline.policy.observe

        def noting(report: StepReport) -> None:
            assert not all(future.done() for future in self.futures), "DDP would go on"
            observe(report)
            self.concluded.append(report)

        self.pipeline.policy.observe = noting  # type: ignore[method-assign]

    def begin(self) -> list[Future]:
        """Begins all buckets and lets the network carry them; rank 1's transfers end."""
        futures = self.job.start(normal(self.job.elements, 0, 2))[1]
        self.futures = futures[: len(futures) // 2]
        self.carry()
        return self.futures

    def carry(self) -> None:
        assert self.job.fabric.run(self.job.fabric.now + 60)
        self.other.collect()

    def end(self, transfer: int, error: TransferError | None = None) -> None:
        if error is None:
            self.mine.finish(*self.mine.pending[transfer])
        else:
            self.mine.pending[transfer][2].finish(error)


def done(futures: Sequence[Future]) -> list[bool]:
    return [future.done() for future in futures]


def fails(future: Future, match: str = "rank 1 has left") -> None:
    assert future.done()
    with pytest.raises(RuntimeError, match=match):
        future.wait()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_whichever_result_is_last_waits_for_the_conclusion(order: tuple[int, ...]) -> None:
    hand = Hand(4)
    futures = hand.begin()
    for count, transfer in enumerate(order):
        hand.end(transfer)
        assert [future.done() for future in futures] == [i in order[: count + 1] for i in range(4)]
    assert [report.step for report in hand.concluded] == [0]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_all_results_of_a_guarded_step_wait_for_the_verdict(order: tuple[int, ...]) -> None:
    hand = Hand(3, **GUARDED)
    futures = hand.begin()
    for transfer in order:
        hand.end(transfer)
    assert len(hand.mine.pending) == 4  # the consultation
    hand.carry()
    hand.end(3)
    assert len(hand.mine.pending) == 7  # all of it again
    hand.carry()
    for transfer in reversed(range(4, 7)):
        assert not any(done(futures))
        hand.end(transfer)
    assert all(done(futures))
    assert [report.guard for report in hand.concluded] == ["resent"]


def test_layers_are_agreed_on_before_a_step_is_concluded() -> None:
    hand = Hand(2, "dblp", **LAYERS)
    futures = hand.begin()
    hand.end(0)
    hand.end(1)
    assert done(futures) == [True, False]
    assert not hand.concluded
    hand.carry()
    hand.end(2)
    assert done(futures) == [True, True]
    assert hand.concluded[0].agreed.layers is not None


def test_a_bucket_that_fails_stops_everything() -> None:
    hand = Hand()
    futures = hand.begin()
    hand.end(0, LOST)
    fails(futures[0])
    hand.end(1)
    fails(futures[1])
    assert not hand.concluded
    later = hand.pipeline.reduce(Bucket(0, True, torch.ones(60 * 358), hand.job.groups[0]))
    fails(later, "stopped at an earlier failure: rank 1 has left")


@pytest.mark.parametrize("transfer", [2, 3, 4])
def test_no_result_of_a_guarded_step_is_handed_over_where_its_end_fails(transfer: int) -> None:
    """In the consultation, or in either of the buckets that are sent again."""
    hand = Hand(**GUARDED)
    futures = hand.begin()
    hand.end(0)
    hand.end(1)
    for number in range(2, transfer):
        hand.carry()
        hand.end(number)
    assert not any(done(futures))
    hand.end(transfer, LOST)
    if transfer == 4:
        hand.end(3)
    for future in futures:
        fails(future)
    assert not hand.concluded


def test_what_fails_in_the_conclusion_fails_the_last_result() -> None:
    hand = Hand()

    def broken(report: StepReport) -> None:
        raise ArithmeticError("the policy cannot tell")

    hand.pipeline.policy.observe = broken  # type: ignore[method-assign]
    futures = hand.begin()
    hand.end(0)
    hand.end(1)
    futures[0].wait()
    fails(futures[1], "the policy cannot tell")


def test_a_failure_that_cannot_be_explained_is_told_as_it_is() -> None:
    """As where the store is gone through which ranks find what differs; DDP would wait for ever."""
    hand = Hand()

    def broken(error: BaseException) -> BaseException:
        raise ConnectionError("the store is gone")

    hand.pipeline.failures.explain = broken
    futures = hand.begin()
    hand.end(1, LOST)
    hand.end(0)
    for future in futures:
        fails(future)


def test_a_step_that_another_one_follows_too_early_is_never_concluded() -> None:
    hand = Hand()
    hand.futures.append(torch.futures.Future())
    group, values = hand.job.groups[0], torch.ones(60 * 358)
    early = [
        pipeline.reduce(Bucket(0, False, values.clone(), group)) for pipeline in hand.job.pipelines
    ]
    hand.begin()
    for transfer in range(3):
        hand.end(transfer)
    assert early[0].done()
    assert [report.step for report in hand.concluded] == [0]
    assert hand.concluded[0].buckets == 2


@pytest.mark.parametrize("late", [False, True])
def test_a_last_bucket_without_elements_ends_a_step(late: bool) -> None:
    hand = Hand(1)
    hand.futures.append(torch.futures.Future())
    group, none = hand.job.groups[0], torch.empty(0)
    first = [
        pipeline.reduce(Bucket(0, False, torch.ones(60 * 358), group))
        for pipeline in hand.job.pipelines
    ]
    hand.carry()
    if late:
        hand.end(0)
        assert first[0].done()
        assert not hand.concluded
    last = hand.pipeline.reduce(Bucket(1, True, none, []))
    assert last.done()
    if not late:
        assert not first[0].done()
        hand.end(0)
    assert first[0].done()
    assert [report.step for report in hand.concluded] == [0]


# ---------------------------------------------------------------------------- the decision


@dataclass
class Facts:
    """What a guard has to know of a step."""

    floor: float = 0.8
    finite: bool = True
    number: int = 7


def guard(halt_after: int = 0, **settings: object) -> StepGuard:
    policy = create("mlt")
    policy.halt_after = halt_after
    return StepGuard(policy, Settings.build({"floor": 0.8, **settings}, environment={}), 3)


@pytest.mark.parametrize(
    ("settings", "facts", "nonfinite", "lost", "choice"),
    [
        ({}, Facts(), False, 0.2, "apply"),
        ({}, Facts(), False, 0.2 + 1e-12, "apply"),  # a sum of shares is not exact
        ({}, Facts(), False, 0.21, "resend"),
        ({}, Facts(finite=False), True, 0.21, "resend"),
        ({"guard": "skip"}, Facts(), False, 0.2, "apply"),
        ({"guard": "skip"}, Facts(), False, 0.21, "skip"),
        ({"guard": "skip"}, Facts(), True, 0.21, "apply"),
        ({"guard": "skip"}, Facts(finite=False), False, 0.21, "apply"),
    ],
)
def test_a_verdict_follows_from_what_the_worst_worker_lost(
    settings: dict[str, object], facts: Facts, nonfinite: bool, lost: float, choice: str
) -> None:
    decision = guard(**settings).decide(facts, Summary(7, nonfinite=nonfinite), lost)
    assert decision == Decision(choice)  # type: ignore[arg-type]


def test_steps_under_their_floor_in_a_row_halt_the_training() -> None:
    decide = guard(halt_after=2)
    seen = [decide.decide(Facts(), Summary(7), lost) for lost in (0.5, 0.1, 0.5, 0.5)]
    assert [decision.choice for decision in seen] == ["resend", "apply", "resend", "halt"]
    assert [decision.error is None for decision in seen] == [True, True, True, False]
    assert str(seen[-1].error).startswith("rank 3, step 7: 2 steps running delivered less than")


def test_a_guard_that_is_off_has_no_floor() -> None:
    assert guard().floor == 0.8
    assert guard(guard="off").floor == 0.0
