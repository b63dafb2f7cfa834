"""A scenario's work is to move buffers, or the gradients of a model."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.core.settings import SHORTEST_S
from gradwire_lab.scenario.reader import MISSING, ScenarioError, default_of, key

__all__ = ["KINDS", "LARGEST_SEED", "THIRDS", "Model", "Work", "layer_sizes", "turn_length"]

KINDS = ("push", "all_reduce", "training")
THIRDS = ("early", "mid", "late", "never")
LARGEST_SEED = (1 << 32) - 1


@dataclass(frozen=True)
class Work:
    """Work says what is moved, and how often."""

    kind: str = key(
        MISSING,
        "push: every worker sends to one server; all_reduce: all get the sum; training: DDP",
        choices=KINDS,
    )
    bytes: int = key(4_000_000, "of each worker's buffer (not for training)", low=4, high=1 << 32)
    layers: int = key(8, "equal parts of the buffer that a policy sees as layers", low=1, high=512)
    rounds: int = key(
        20,
        "timed rounds of each contestant; in training all steps, of which those of `warm_up` are "
        "not timed",
        low=1,
        high=1_000_000,
    )
    block: int = key(
        10, "rounds of one contestant before the next has its turn", low=1, high=1_000_000
    )
    warm_up: int = key(
        2,
        "untimed rounds at the start of each turn, before those of `block`",
        low=0,
        high=1_000_000,
    )
    compute_s: float = key(
        0.0,
        "a pause before each round, as long as a job would compute; part of job time (not for "
        "training), s",
        low=0.0,
        high=3600.0,
    )
    seeds: tuple[int, ...] = key((0,), "the whole is done again for each", low=0, high=LARGEST_SEED)
    round_limit_s: float = key(
        60.0,
        "a round that takes longer, after the end of its loss, ends the cell, s",
        low=SHORTEST_S,
        high=86_400.0,
    )

    def __post_init__(self) -> None:
        if self.bytes % 4:
            raise ScenarioError(f"bytes={self.bytes!r}: a multiple of 4 (float32) is allowed")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ScenarioError(f"seeds={list(self.seeds)!r}: one or more different numbers")
        if self.kind == "training":
            if self.rounds <= self.warm_up:
                raise ScenarioError(
                    f"warm_up={self.warm_up!r}: of rounds={self.rounds!r} steps of training none "
                    f"would be timed; less than {self.rounds} is allowed"
                )
            for name in ("bytes", "layers", "compute_s"):
                if getattr(self, name) != default_of(Work, name):
                    raise ScenarioError(
                        f"work.{name}={getattr(self, name)!r} with kind='training': that is for "
                        "[model] to say; leave it out"
                    )

    @property
    def timed(self) -> int:
        """Return the rounds or steps of a contestant and a seed that are samples."""
        if self.kind != "training":
            return self.rounds
        timed = done = 0
        while done < self.rounds:
            steps = turn_length(self, self.rounds - done)
            timed += steps - self.warm_up
            done += steps
        return timed

    @property
    def tensors(self) -> dict[str, int]:
        """Return the elements of each layer of an all-reduce's buffer, by the name policies see."""
        return layer_sizes(self.bytes // 4, self.layers)


def layer_sizes(elements: int, layers: int) -> dict[str, int]:
    """Cut a buffer into so many equal layers, at most one per element: elements by name."""
    count = min(layers, elements)
    edges = [elements * number // count for number in range(count + 1)]
    return {f"layer{n}.weight": edges[n + 1] - edges[n] for n in range(count)}


def turn_length(work: Work, left: int) -> int:
    """Return the steps of training's next turn.

    The last turn is longer rather than so short that no step is timed.
    """
    steps = min(work.block + work.warm_up, left)
    return left if left - steps <= work.warm_up else steps


@dataclass(frozen=True)
class Model:
    """A model is a character-level transformer, as in the demo, and how it trains."""

    width: int = key(128, "of the residual stream", low=8, high=4096)
    layers: int = key(2, "blocks", low=1, high=64)
    heads: int = key(4, "of each attention; they divide the width", low=1, high=64)
    context: int = key(64, "characters seen at once", low=2, high=1024)
    batch: int = key(4, "samples of each rank and step", low=1, high=1024)
    learning_rate: float = key(1e-3, "of AdamW", above=0.0, high=1000.0)
    gamma: float = key(
        1.0,
        "step decay: the learning rate is multiplied by it where the second and the last third of "
        "training begin; 1: it stays",
        above=0.0,
        high=1.0,
    )
    overlap: bool = key(False, "several buckets, sent while the backward pass goes on")
    bucket_mb: float = key(1.0, "size of a bucket when they overlap, MB", above=0.0, high=4096.0)
    compute_s: float = key(
        0.0,
        "a step's computation is stretched to so long, as an accelerator's would be, s",
        low=0.0,
        high=3600.0,
    )
    target_loss: float = key(0.0, "held-out loss to time; 0: none", low=0.0)
    target_of: str = key(
        "", "the contestant whose last held-out loss, seed by seed, is the one to time"
    )
    target_within: float = key(0.01, "how far above that, nats", low=0.0, high=10.0)
    communication_share: float = key(
        0.0,
        "stretch it so that communication is this share of the first contestant's quiet step; "
        "0: do not",
        low=0.0,
        high=0.95,
    )

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ScenarioError(f"heads={self.heads!r}: a divisor of width={self.width} is allowed")
        if self.target_loss and self.target_of:
            raise ScenarioError(
                f"target_of={self.target_of!r} beside target_loss={self.target_loss:g}: one of them"
            )
        if self.compute_s and self.communication_share:
            raise ScenarioError(
                f"communication_share={self.communication_share!r} beside compute_s: one of them"
            )
