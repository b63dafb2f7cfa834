"""How a step ends: tables of events and of the actions that follow, without torch or threads."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from gradwire.core.agreed import Summary
from gradwire.core.errors import GradwireError
from gradwire.core.settings import Settings
from gradwire.policies import create
from gradwire.training.guard import StepGuard, Verdict
from gradwire.training.step_end import (
    Abandoned,
    Begun,
    CompareScales,
    Conclude,
    Concluded,
    Consult,
    Consulted,
    Deliver,
    Done,
    Fail,
    Failed,
    Fold,
    Folded,
    Resend,
    Resent,
    Settle,
    Skip,
    StepEnd,
)

LOST, LATER = GradwireError("rank 1 has left"), GradwireError("later")
HALT = Verdict("halt", LOST)
BEGIN: list[tuple[Any, list[Any]]] = [(Begun("a"), []), (Begun("b", last=True), [])]
OPEN: list[tuple[Any, list[Any]]] = [*BEGIN, (Done("a"), [Deliver(("a",))]), (Done("b"), [Fold()])]
HELD: list[tuple[Any, list[Any]]] = [*BEGIN, (Done("a"), []), (Done("b"), [Fold()])]
CONSULTED: list[tuple[Any, list[Any]]] = [*HELD, (Folded(), [Consult()])]

UNGUARDED: dict[str, list[tuple[Any, list[Any]]]] = {
    "the last result waits until the step is concluded": [
        *OPEN,
        (Folded(), [Conclude()]),
        (Concluded(), [Deliver(("b",))]),
    ],
    "whichever bucket is done last waits": [
        *BEGIN,
        (Done("b"), [Deliver(("b",))]),
        (Done("a"), [Fold()]),
        (Folded(), [Conclude()]),
        (Concluded(), [Deliver(("a",))]),
    ],
    "a bucket that is done before the next one begins ends nothing": [
        (Begun("a"), []),
        (Done("a"), [Deliver(("a",))]),
        (Begun("b", last=True), []),
        (Done("b"), [Fold()]),
    ],
    "a last bucket without elements ends a step whose others are done": [
        (Begun("a"), []),
        (Done("a"), [Deliver(("a",))]),
        (Done("empty", last=True), [Fold()]),
        (Folded(), [Conclude()]),
        (Concluded(), [Deliver(("empty",))]),
    ],
    "a last bucket without elements waits for no other": [
        (Begun("a"), []),
        (Done("empty", last=True), [Deliver(("empty",))]),
        (Done("a"), [Fold()]),
    ],
    "layers are agreed on before the step is concluded": [
        *OPEN,
        (Folded(layers=True), [Consult()]),
        (Consulted(), [Conclude()]),
        (Concluded(), [Deliver(("b",))]),
    ],
    "scales that differ end the job": [
        *OPEN,
        (Folded(scales_differ=True), [CompareScales()]),
        (Failed(LOST), [Fail(LOST, ("b",))]),
    ],
    "a bucket that fails stops everything": [
        *BEGIN,
        (Done("a", error=LOST), [Fail(LOST, ("a",))]),
        (Done("b"), [Fail(LOST, ("b",))]),
    ],
    "a bucket that fails after the step has its own error": [
        *BEGIN,
        (Failed(LOST), [Fail(LOST, ())]),
        (Done("a", error=LATER), [Fail(LATER, ("a",))]),
        (Done("b"), [Fail(LOST, ("b",))]),
    ],
    "a failure of the conclusion keeps the last result from being applied": [
        *OPEN,
        (Folded(), [Conclude()]),
        (Failed(LOST), [Fail(LOST, ("b",))]),
        (Concluded(), []),
    ],
    "a failure hands each result over once": [
        *OPEN,
        (Failed(LOST), [Fail(LOST, ("b",))]),
        (Failed(LATER), [Fail(LATER, ())]),
        (Folded(), []),
    ],
    "a step that another one follows too early is never concluded": [
        (Begun("a"), []),
        (Abandoned(), []),
        (Done("a"), [Deliver(("a",))]),
        (Done("empty", last=True), [Deliver(("empty",))]),
    ],
}

GUARDED: dict[str, list[tuple[Any, list[Any]]]] = {
    "all results wait for the verdict": [
        *CONSULTED,
        (Consulted(Verdict("apply")), [Settle(), Conclude()]),
        (Concluded(), [Deliver(("a", "b"))]),
    ],
    "a step is sent again as a whole before it is settled": [
        *CONSULTED,
        (Consulted(Verdict("resend")), [Resend()]),
        (Resent(), []),
        (Resent(), [Settle(), Conclude()]),
        (Concluded(), [Deliver(("a", "b"))]),
    ],
    "a bucket without elements is not sent again": [
        (Begun("a"), []),
        (Done("a"), []),
        (Done("empty", last=True), [Fold()]),
        (Folded(), [Consult()]),
        (Consulted(Verdict("resend")), [Resend()]),
        (Resent(), [Settle(), Conclude()]),
        (Concluded(), [Deliver(("a", "empty"))]),
    ],
    "a skipped step is not settled as if it were applied": [
        *CONSULTED,
        (Consulted(Verdict("skip")), [Skip(), Conclude()]),
        (Concluded(), [Deliver(("a", "b"))]),
    ],
    "a step that halts the training fails with the reason": [
        *CONSULTED,
        (Consulted(HALT), [Fail(LOST, ("a", "b"))]),
    ],
    "no result is handed over unjudged where a later bucket fails": [
        *BEGIN,
        (Done("a"), []),
        (Done("b", error=LOST), [Fail(LOST, ("a", "b"))]),
    ],
    "what comes back after a failure is not applied": [
        *CONSULTED,
        (Consulted(Verdict("resend")), [Resend()]),
        (Resent(), []),
        (Failed(LOST), [Fail(LOST, ("a", "b"))]),
        (Resent(), []),
    ],
    "scales that differ end the job before it is judged": [
        *HELD,
        (Folded(scales_differ=True), [CompareScales()]),
    ],
    "results of a step that another one follows too early are never judged": [
        (Begun("a"), []),
        (Abandoned(), []),
        (Done("a"), []),
    ],
}


def play(end: StepEnd[str], table: list[tuple[Any, list[Any]]]) -> None:
    for event, actions in table:
        assert end.handle(event) == actions, event


@pytest.mark.parametrize("table", UNGUARDED.values(), ids=UNGUARDED)
def test_a_step_without_a_guard(table: list[tuple[Any, list[Any]]]) -> None:
    play(StepEnd(guarded=False), table)


@pytest.mark.parametrize("table", GUARDED.values(), ids=GUARDED)
def test_a_step_with_a_guard(table: list[tuple[Any, list[Any]]]) -> None:
    play(StepEnd(guarded=True), table)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations("abcd")))
def test_every_result_is_handed_over_once_and_the_last_one_at_the_end(
    guarded: bool, order: tuple[str, ...]
) -> None:
    end: StepEnd[str] = StepEnd(guarded=guarded)
    events = [Begun(bucket, last=bucket == "d") for bucket in "abcd"]
    events += [Done(bucket) for bucket in order]
    events += [Folded(), *([Consulted(Verdict("apply"))] if guarded else []), Concluded()]
    delivered: list[str] = []
    for event in events:
        actions = end.handle(event)
        delivered += [
            b for action in actions if isinstance(action, Deliver) for b in action.buckets
        ]
        assert (order[-1] in delivered) == isinstance(event, Concluded)
    assert sorted(delivered) == list("abcd")
    assert end.state == "over"


@pytest.mark.parametrize(
    ("before", "event"),
    [
        ([], Folded()),
        ([], Resent()),
        ([], Concluded()),
        (OPEN, Done("a")),
        (OPEN, Begun("c")),
        (OPEN, Consulted()),
        (OPEN, Concluded()),
        (CONSULTED, Consulted()),  # without a verdict
        (CONSULTED, Resent()),
    ],
)
def test_an_event_out_of_turn_is_an_error(before: list[tuple[Any, Any]], event: Any) -> None:
    end: StepEnd[str] = StepEnd(guarded=before is CONSULTED)
    play(end, before)
    with pytest.raises(RuntimeError, match=f"a step's end that is '{end.state}' takes no"):
        end.handle(event)


def test_the_end_of_a_step_needs_no_torch() -> None:
    seen = "import gradwire.training.step_end, sys; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", seen], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "False"


# ---------------------------------------------------------------------------- the verdict


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
    verdict = guard(**settings).judge(facts, Summary(7, nonfinite=nonfinite), lost)
    assert verdict == Verdict(choice)  # type: ignore[arg-type]


def test_steps_under_their_floor_in_a_row_halt_the_training() -> None:
    judge = guard(halt_after=2)
    seen = [judge.judge(Facts(), Summary(7), lost) for lost in (0.5, 0.1, 0.5, 0.5)]
    assert [verdict.choice for verdict in seen] == ["resend", "apply", "resend", "halt"]
    assert [verdict.error is None for verdict in seen] == [True, True, True, False]
    assert str(seen[-1].error).startswith("rank 3, step 7: 2 steps running delivered less than")


def test_a_guard_that_is_off_has_no_floor() -> None:
    assert guard().floor == 0.8
    assert guard(guard="off").floor == 0.0
