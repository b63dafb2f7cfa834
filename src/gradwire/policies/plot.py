"""Policy "plot": a bound of its own for each layer (PLOT, IEEE TNSM 21(6):6112–6125, 2024).

The paper shows that layers tolerate different losses, and that a tolerance per layer shortens the
tail of gradient transfers over UDP. Its derivation, its header and its numbers are not public, so
all the rest is **our interpretation**:

- A table gives each tensor a bound, which holds for each region of a bucket.
- The bound is spent on what the network lost only (spend="lost").
- `gradwire.calibrate` makes the table before training, with bound 0 for norm layers and biases. In
  a table written by hand its patterns rule those tensors too.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from gradwire.core.agreed import Phase
from gradwire.core.checks import check_bound, plain
from gradwire.core.errors import ConfigError, suggestion
from gradwire.core.plan import TransferPlan
from gradwire.core.saved_state import State
from gradwire.policies.base import PlanContext, Policy, check_transfer_options, option_names
from gradwire.policies.parts.regions import (
    BoundTable,
    check_patterns,
    check_table,
    regions_by_tensor,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FORMAT = 1
"""The version of a calibration's file."""


@dataclass(frozen=True)
class Calibration:
    """The bounds of one model's tensors, as `gradwire.calibrate` found them.

    Attributes:
        model: `fingerprint` of the model's tensors.
        bounds: the share of each tensor's elements, in [0, 1), that may be missing, by name.
        settings: the settings of `gradwire.calibrate` that it was made with.
    """

    model: str
    bounds: dict[str, float]
    settings: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def fingerprint(tensors: Mapping[str, int]) -> str:
        """Returns 16 hexadecimal digits that identify a model's trained tensors.

        Args:
            tensors: the number of elements by name, in any order.
        """
        text = json.dumps(sorted(tensors.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Writes the calibration to a TOML file, which `load` reads."""
        lines = [
            "# Bounds by tensor, made by gradwire.calibrate for one model.",
            f"format = {FORMAT}",
            f'model = "{self.model}"',
            "",
            "[settings]",
            *(f"{name} = {plain(value)!r}" for name, value in self.settings.items()),
            "",
            "[bounds]",
            *(f"{_quoted(name)} = {plain(bound)!r}" for name, bound in self.bounds.items()),
        ]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Reads a file that `save` wrote.

        Raises:
            ConfigError: names the file, and says why it cannot be read or is no calibration.
        """
        try:
            found: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError.of("table", str(path), f"cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError.of("table", str(path), f"no TOML: {error}") from error
        except ValueError as error:  # a NUL in the name
            raise ConfigError.of("table", str(path), f"cannot be read: {error}") from error
        if found.get("format") != FORMAT or not isinstance(found.get("model"), str):
            raise ConfigError.of(
                "table",
                str(path),
                f"format={found.get('format')!r}, model={found.get('model')!r}: a file of "
                f"`gradwire calibrate` has format={FORMAT} and a fingerprint; bounds by "
                "hand are a dict by tensor-name pattern, table={…}",
            )
        bounds = found.get("bounds")
        if not isinstance(bounds, dict) or not bounds:
            raise ConfigError.of("table", str(path), "section [bounds] is missing or empty")
        for name, bound in bounds.items():
            check_bound(f"table={str(path)!r}: bounds[{name!r}]", bound)
        settings = found.get("settings", {})
        if not isinstance(settings, dict):
            raise ConfigError.of("table", str(path), f"settings={settings!r}: a section is needed")
        return Calibration(found["model"], bounds, settings)


def _quoted(name: str) -> str:
    """Returns a name as a TOML string, which may hold neither surrogates nor a bare DEL."""
    return json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass
class PLOT(Policy):
    """A fixed bound for each tensor.

    Attributes:
        table: The file of a calibration, or bounds by tensor-name pattern, such as {"features.0.*":
            0.01, "*.weight": 0.2}. The first pattern that matches a tensor gives its bound, and a
            tensor that none matches is critical (bound 0). Unit: share of the elements. Allowed:
            the name of a file, or a table of bounds in [0, 1); it has to be given.
        spend: Which missing chunks may be given up: "anything", or "lost", only what the network
            lost. Allowed: "anything", "lost".
        fill: What takes the place of a missing contribution. Allowed: "zero", "mean", "momentum".
        order: Order of the chunks within a push. Allowed: "shuffled", "sequential".
        pull: How results come back: "exact", or "committed", where all workers leave the same part
            out. Allowed: "exact", "committed".

    Raises:
        ConfigError: there is no table, or an option is impossible.
    """

    name: ClassVar[str] = "plot"
    resting_phase: ClassVar[Phase] = "tolerant"

    table: str | dict[str, float] | None = None
    spend: str = "lost"
    fill: str = "zero"
    order: str = "shuffled"
    pull: str = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._calibration: Calibration | None = None  # read from the file
        if isinstance(self.table, Mapping):
            check_table("table", self.table)
            self._bounds = BoundTable(self.table, 0.0)
        elif isinstance(self.table, (str, Path)) and self.table != "":
            self._calibration = Calibration.load(self.table)
        else:
            raise ConfigError.of(
                "table",
                self.table,
                "make a table with `gradwire calibrate` and give its file, or give bounds by "
                "tensor-name pattern",
            )
        check_transfer_options(self.spend, self.fill, self.order, self.pull)

    def bound_of(self, tensor: str) -> float:
        """Returns the bound of a tensor; 0 where the table has none."""
        if self._calibration is not None:
            return self._calibration.bounds.get(tensor, 0.0)
        return self._bounds(tensor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accepts an empty state, for the table is all that this policy decides by.

        Older states may hold a "calibration" that was found during training. It is ignored.

        Raises:
            ConfigError: the state has another key.
        """
        State(state, "state['phases']").keys((), ("calibration",))

    def options(self) -> dict[str, object]:
        """Returns the options with the bounds in place of a file's name.

        Ranks compare options, and their copies of the file may lie in different places.
        """
        values = {name: getattr(self, name) for name in option_names(type(self))}
        if self._calibration is not None:
            values["table"] = self._calibration.bounds
        return values

    def fit(self, tensors: Mapping[str, int] | None) -> None:
        """Checks the table against the model.

        Args:
            tensors: the elements of each trained parameter by name; None without a model.

        Raises:
            ConfigError: there is no model, the file was made for another one, or a pattern
                matches nothing or only what a broader one before it rules.
        """
        if tensors is None:
            raise ConfigError.of(
                "table",
                self.table,
                "the hook needs HookState(model=…) for its names",
                beside="without a model",
            )
        if self._calibration is not None:
            _check_model(f"table={self.table!r}", self._calibration, tensors)
        elif isinstance(self.table, Mapping):
            check_patterns("table", self.table, list(tensors))

    def plan(self, context: PlanContext) -> TransferPlan:
        """Returns a plan with one region per tensor, where small ones share a region."""
        bounds = [self.bound_of(slot.name) for slot in context.tensors]
        regions = regions_by_tensor(context.tensors, bounds, bounds, context.chunk_elements)
        return context.plan(
            regions,
            spend=self.spend,
            fill=self.fill,
            order=self.order,
            pull=self.pull,
        )


def _check_model(where: str, calibration: Calibration, tensors: Mapping[str, int]) -> None:
    """Raises ConfigError unless the calibration was made for this model and bounds each tensor."""
    for name in calibration.bounds:
        if name not in tensors:
            raise ConfigError.about(
                f"{where}",
                f"bounds[{name!r}]: the model has no such "
                f"tensor{suggestion(name, tensors)}; calibrate again if it was made for "
                "another model",
                setting="table",
                value=name,
            )
    here = Calibration.fingerprint(tensors)
    missing = [name for name in tensors if name not in calibration.bounds]
    if calibration.model == here:
        if missing:
            raise ConfigError.about(
                f"{where}",
                f"bounds: no line for tensor {missing[0]!r}, which the model it was made "
                "for has: put it back (0.0 is exact), or calibrate again",
                setting="table",
                value=missing[0],
            )
        return
    why = "its sizes differ"
    if missing:
        why = f"its tensor {missing[0]!r} has no bound there: was it trained by then?"
    raise ConfigError.about(
        f"{where}",
        f"made for model {calibration.model}, this is model {here} ({why}): calibrate again",
        setting="table",
        value=where,
    )
