"""Which steps a flush makes exact, where steps carry a model in parts."""

from __future__ import annotations

import pytest

from gradwire.core.hashed import HashedTuple
from gradwire.core.regions import TensorSlot
from gradwire.training.feedback.owing import Owing
from gradwire.training.flush import Flush

PARTS = {name: HashedTuple([TensorSlot(name, 0, 8)]) for name in "abc"}
PARTS["ab"] = HashedTuple([TensorSlot("a", 0, 8), TensorSlot("b", 8, 8)])


def run(parts: str, ask: int, *, feedback: bool = True) -> tuple[str, str]:
    """A lossy policy's steps, one for each part, and a call that travels with step `ask`.

    Returns:
        "x" for each exact step, and "p" where the flush is pending after it; else ".".
    """
    flush = Flush(Owing())
    exact, pending = "", ""
    for step, name in enumerate(parts.split()):
        flushes = flush.begin(PARTS[name])
        if feedback:
            flush.owing.note(step, PARTS[name], loses=not flushes, exact=flushes)
        if flushes:
            flush.end(step)
        if step == ask:
            flush.ask(PARTS[name])
        exact += "x" if flushes else "."
        pending += "p" if flush.pending else "."
    return exact, pending


@pytest.mark.parametrize("feedback", [True, False])
def test_one_step_is_exact_where_steps_carry_all(feedback: bool) -> None:
    assert run("ab ab ab ab", 1, feedback=feedback) == ("..x.", ".p..")


@pytest.mark.parametrize(
    ("parts", "ask", "exact", "pending"),
    [
        ("a b a b a b a", 2, "...xxx.", "..pp..."),
        ("a b a b a b a", 0, ".xxx...", "pp....."),  # nothing has come twice yet
        ("a a b a a b a a b a", 3, "....xx....", "...pp....."),
        ("a b c a b c a b c a", 3, "....xxxxx.", "...ppp...."),
        ("ab a b a b a", 0, ".xx...", "pp...."),  # other buckets than in the first step
        ("c a b a b a b a b", 3, "....xxx..", "...pp...."),  # c is not used any more
    ],
)
def test_exact_steps_go_on_to_the_end_of_a_turn(
    parts: str, ask: int, exact: str, pending: str
) -> None:
    assert run(parts, ask) == (exact, pending)


def test_a_flush_that_a_scaler_undid_is_made_again() -> None:
    flush = Flush(Owing())
    flush.ask(PARTS["ab"])
    assert flush.begin(PARTS["ab"])
    flush.end(1)
    assert not flush.pending
    flush.owing.add(["a", "b"])
    flush.ask()
    assert flush.pending
    assert flush.begin(PARTS["ab"])
    flush.end(2)
    assert not flush.pending
    assert not flush.begin(PARTS["ab"])
