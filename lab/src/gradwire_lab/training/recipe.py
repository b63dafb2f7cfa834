"""A recipe says what is trained on a lab network; an entry says what carries its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Entry", "Recipe"]


@dataclass(frozen=True)
class Entry:
    """An entry is a contestant: one way to carry the gradients.

    Attributes:
        name: what the JSON calls it.
        label: what people read.
        policy: gradwire's policy; None for a communication hook on Gloo.
        options: further keyword arguments of `gradwire.attach`.
        hook: the hook of a contestant on Gloo: "none" for DDP's own all-reduce, "fp16" for torch's
            ``fp16_compress_hook``.
    """

    name: str
    label: str
    policy: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    hook: str = "none"


@dataclass(frozen=True)
class Recipe:
    """A recipe sets the model, its data and its optimizer, the same for all contestants.

    Attributes:
        ranks: processes, one on each host.
        batch: samples of each rank and step.
        validation: samples of each rank after each turn.
        learning_rate: AdamW's, reached after ``rise`` steps and then constant.
        rise: steps over which the learning rate rises from nothing.
        clip: largest norm of an averaged gradient.
        seed: the seed of the initial weights and of the order of the data.
        context, width, layers, heads: the model's, see `gradwire_lab.training.model.Shape`.
    """

    ranks: int = 4
    batch: int = 4
    validation: int = 16
    learning_rate: float = 1e-3
    rise: int = 20
    clip: float = 1.0
    seed: int = 1
    context: int = 64
    width: int = 208
    layers: int = 4
    heads: int = 4

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ValueError: names the field and what is allowed.
        """
        self.check_positive("ranks", "batch", "validation")
        if self.width % self.heads:
            raise ValueError(f"width={self.width}: {self.heads} heads must divide it")

    def check_positive(self, *names: str) -> None:
        """Check fields that must be positive.

        Raises:
            ValueError: names the field that is not.
        """
        for name in names:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be positive")
