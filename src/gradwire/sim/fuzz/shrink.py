"""Shrinking: what a failure does not need is left out, fault by fault and size by size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gradwire.sim.fuzz.life import SIZES, Cut, Life

LEAST = {"workers": 2, "servers": 0, "elements": 1, "steps": 1, "lanes": 1}
FLAGS = ("apart", "skew", "whole_trains", "leave", "again")


def shrink(life: Life, fails: Callable[[Cut], bool], tries: int = 300) -> Cut:
    """Returns the smallest cut found under which a life still fails.

    Args:
        life: The life as it was drawn.
        fails: Whether a cut of it fails in the same way.
        tries: The most cuts that are tried.
    """
    cut = Cut(keep=tuple(range(len(life.faults))))
    while True:
        for smaller in _smaller(life, cut):
            tries -= 1
            if tries < 0:
                return cut
            if fails(smaller):
                cut = smaller
                break
        else:
            return cut


def _smaller(life: Life, cut: Cut) -> Iterator[Cut]:
    """The cuts next to one: halves of its faults, single ones, smaller sizes, plainer options."""
    keep = cut.keep or ()
    part = len(keep) // 2
    while part:
        for at in range(0, len(keep), part):
            yield replace(cut, keep=keep[:at] + keep[at + part :])
        part //= 2
    now = cut.of(life)
    sizes = dict(cut.sizes)
    for name in SIZES:
        value, least = getattr(now, name), LEAST[name]
        for less in dict.fromkeys((least, (value + least) // 2, value - 1)):
            if least <= less < value:
                yield replace(cut, sizes=tuple({**sizes, name: less}.items()))
    for name in (*now.options, *(flag for flag in FLAGS if getattr(now, flag))):
        if name not in cut.plain and name != "policy":
            yield replace(cut, plain=(*cut.plain, name))
