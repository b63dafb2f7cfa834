"""Policy "plot": a bound of its own for each layer (PLOT, IEEE TNSM 21(6):6112–6125, 2024).

The paper's idea: the tolerable loss differs by layer, and layer-specific tolerance cuts the tail
of gradient transfers over UDP. Nothing else of it is public: no derivation, no header, no numbers.
All the rest is **our interpretation**: a table of bounds by tensor, enforced per tensor region;
norm layers and biases at 0; the bound spent on what the network lost only (spend="lost"); and how
the table is made (`gradwire.calibrate`).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from gradwire.errors import ConfigError
from gradwire.phases import Phase
from gradwire.plans import TransferPlan, check_bound
from gradwire.policies.base import PlanContext, Policy, check_transfer_options, option_names
from gradwire.policies.regions import BoundTable, check_patterns, check_table, regions_by_tensor

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["PLOT", "Calibration"]

FORMAT = 1


@dataclass(frozen=True)
class Calibration:
    """Bounds by tensor name for one model, as `gradwire.calibrate` found them.

    model: a fingerprint of the model's tensor names and sizes. settings: how it was made.
    """

    model: str
    bounds: dict[str, float]
    settings: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def fingerprint(tensors: Mapping[str, int]) -> str:
        """What tells one model's tensors from another's: names and sizes, in whatever order."""
        text = json.dumps(sorted(tensors.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Writes the calibration as TOML."""
        lines = [
            "# Bounds by tensor, made by gradwire.calibrate for one model.",
            f"format = {FORMAT}",
            f'model = "{self.model}"',
            "",
            "[settings]",
            *(f"{name} = {value!r}" for name, value in self.settings.items()),
            "",
            "[bounds]",
            *(f"{json.dumps(name)} = {bound!r}" for name, bound in self.bounds.items()),
        ]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Reads what `save` wrote; raises ConfigError naming the file and what is wrong."""
        try:
            found: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"table={str(path)!r}: cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"table={str(path)!r}: no TOML: {error}") from error
        if found.get("format") != FORMAT or not isinstance(found.get("model"), str):
            raise ConfigError(
                f"table={str(path)!r}: format={found.get('format')!r}, "
                f"model={found.get('model')!r}: a file of `gradwire calibrate` has "
                f"format={FORMAT} and a fingerprint"
            )
        bounds = found.get("bounds")
        if not isinstance(bounds, dict) or not bounds:
            raise ConfigError(f"table={str(path)!r}: section [bounds] is missing or empty")
        for name, bound in bounds.items():
            check_bound(f"table={str(path)!r}: bounds[{name!r}]", bound)
        return Calibration(found["model"], bounds, dict(found.get("settings", {})))


@dataclass
class PLOT(Policy):
    """A fixed bound per tensor.

    table: a file that `gradwire calibrate` wrote, or bounds by tensor-name pattern
    ({"features.0.*": 0.01, "*.weight": 0.2}; the first that matches rules, a tensor that none
    matches is critical, a pattern that matches nothing is an error). A file for another model is
    an error. spend: "lost" gives up only what the network lost. fill, order, pull: docs/design.md.
    """

    name: ClassVar[str] = "plot"
    resting_phase: ClassVar[Phase] = "tolerant"

    table: str | dict[str, float] | None = None
    spend: str = "lost"
    fill: str = "zero"
    order: str = "shuffled"
    pull: str = "exact"

    def __post_init__(self) -> None:
        self._file: Calibration | None = None
        if isinstance(self.table, Mapping):
            check_table("table", self.table)
            self._bounds = BoundTable(self.table, 0.0)
        elif isinstance(self.table, (str, Path)):
            self._file = Calibration.load(self.table)
        else:
            raise ConfigError(
                f"table={self.table!r}: the file of a calibration (`gradwire calibrate` makes "
                "one), or bounds by tensor-name pattern"
            )
        check_transfer_options(self.spend, self.fill, self.order, self.pull)

    def bound_of(self, tensor: str) -> float:
        """The bound of a tensor."""
        if self._file is not None:
            return self._file.bounds.get(tensor, 0.0)
        return self._bounds(tensor)

    def options(self) -> dict[str, object]:
        """The options, with the file's contents in its place: ranks compare those."""
        values = {name: getattr(self, name) for name in option_names(type(self))}
        if self._file is not None:
            values["table"] = self._file.bounds
        return values

    def prepare(self, tensors: Mapping[str, int] | None) -> None:
        """Checks the table against the model."""
        if tensors is None:
            raise ConfigError(
                f"table={self.table!r} without a model: the hook needs HookState(model=…) for "
                "its names"
            )
        if self._file is None:
            assert isinstance(self.table, Mapping)
            check_patterns("table", self.table, list(tensors))
            return
        here = Calibration.fingerprint(tensors)
        if self._file.model != here:
            unknown = [name for name in self._file.bounds if name not in tensors]
            why = f"it has no tensor {unknown[0]!r}" if unknown else "its sizes differ"
            raise ConfigError(
                f"table={self.table!r}: made for model {self._file.model}, this is model {here} "
                f"({why}): calibrate again"
            )

    def plan(self, context: PlanContext) -> TransferPlan:
        """One region per tensor (small ones pooled) with its own bound."""
        bounds = [self.bound_of(slot.name) for slot in context.tensors]
        regions = regions_by_tensor(context.tensors, bounds, bounds, context.chunk_elements)
        return context.plan(
            regions,
            spend=self.spend,
            fill=self.fill,
            order=self.order,
            pull=self.pull,
        )
