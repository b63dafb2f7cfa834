"""A policy for tests: a bounded loss under an encoding of one's choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gradwire.core.plan import TransferPlan
from gradwire.policies import MLT, PlanContext


@dataclass
class Encoded(MLT):
    """A bounded loss and an encoding; names no published system."""

    name: ClassVar[str] = "encoded"
    encoding: str = "f16"
    kept: float = 1.0

    def plan(self, context: PlanContext) -> TransferPlan:
        return replace(super().plan(context), encoding=self.encoding, kept=self.kept)
