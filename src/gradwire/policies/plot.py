"""Policy "plot": a bound of its own for each layer (PLOT, IEEE TNSM 21(6):6112–6125, 2024).

The paper's idea: the tolerable loss differs by layer, and layer-specific tolerance cuts the tail
of gradient transfers over UDP. Nothing else of it is public: no derivation, no header, no numbers.
All the rest is **our interpretation**: a table of bounds by tensor, enforced per tensor region;
the bound spent on what the network lost only (spend="lost"); and how the table is made
(`gradwire.calibrate`: norm layers and biases at 0; in a table by hand its patterns rule them, too).
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from gradwire.core.agreed import Phase
from gradwire.core.checks import is_number, is_whole, plain
from gradwire.core.errors import ConfigError, suggestion
from gradwire.core.plan import TransferPlan, check_bound
from gradwire.core.report import StepReport
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

__all__ = ["EPS", "LR", "PLOT", "Calibration", "check_eps", "check_lr"]

FORMAT = 1

EPS, LR = 0.05, 0.05
"""What a layer may cost of a step's loss decrease, and the rate of the plain gradient steps."""

PATIENCE = 10
"""Steps without a table for each step of a calibration's round before a warning."""


def check_eps(eps: object) -> float:
    """The number, which is a share of the loss decrease; raises ConfigError for anything else."""
    eps = plain(eps)
    if not is_number(eps) or not 0.0 < eps < 1.0:
        raise ConfigError.of("eps", eps, "a share of the loss decrease, above 0 and below 1")
    return eps


def check_lr(lr: object) -> float:
    """The number, which is a learning rate; raises ConfigError for anything else."""
    lr = plain(lr)
    if not is_number(lr) or not lr > 0.0:
        raise ConfigError.of("lr", lr, "a finite number above 0")
    return lr


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
            *(f"{name} = {plain(value)!r}" for name, value in self.settings.items()),
            "",
            "[bounds]",
            *(f"{_quoted(name)} = {plain(bound)!r}" for name, bound in self.bounds.items()),
        ]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Reads what `save` wrote; raises ConfigError naming the file and what is wrong."""
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
    """A name as a string of TOML, which takes neither surrogates nor a bare DEL."""
    return json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass
class PLOT(Policy):
    """A fixed bound per tensor.

    table: a file that `gradwire calibrate` wrote, or bounds by tensor-name pattern
    ({"features.0.*": 0.01, "*.weight": 0.2}; the first that matches rules, a tensor that none
    matches is critical; a pattern that matches nothing, or only what a broader one before it rules,
    is an error). A file for another model is an error. calibrate: instead of a table, find it in
    the first steps of the job, which are exact: so many calls of `attachment.calibrate(loss_fn,
    batch)` in each of three rounds; eps, lr: its settings (`gradwire.calibrate`). spend: "lost"
    gives up only what the network lost. fill, order, pull: docs/design.md.
    """

    name: ClassVar[str] = "plot"
    resting_phase: ClassVar[Phase] = "tolerant"

    table: str | dict[str, float] | None = None
    calibrate: int = 0
    eps: float = EPS
    lr: float = LR
    spend: str = "lost"
    fill: str = "zero"
    order: str = "shuffled"
    pull: str = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.calibration: Calibration | None = None  # of a file, or found in the job
        self._waited = 0  # steps without a table
        self._tensors: Mapping[str, int] | None = None  # of the model, once it is known
        self._check_calibrate()
        if isinstance(self.table, Mapping):
            check_table("table", self.table)
            self._bounds = BoundTable(self.table, 0.0)
        elif isinstance(self.table, (str, Path)) and self.table != "":
            self.calibration = Calibration.load(self.table)
        elif self.table is not None or self.calibrate == 0:
            raise ConfigError.of(
                "table",
                self.table,
                "the file of a calibration (`gradwire calibrate` makes one), bounds by "
                "tensor-name pattern, or None with calibrate=8 to find them in the first "
                "steps",
            )
        check_transfer_options(self.spend, self.fill, self.order, self.pull)

    def _check_calibrate(self) -> None:
        if not is_whole(self.calibrate) or not 0 <= self.calibrate <= 1 << 20:
            raise ConfigError.of(
                "calibrate",
                self.calibrate,
                "how many steps a round of the calibration takes, a whole number; 0 for none",
            )
        check_eps(self.eps)
        check_lr(self.lr)
        if self.table is not None:
            for name, default in (("calibrate", 0), ("eps", EPS), ("lr", LR)):
                if getattr(self, name) != default:
                    raise ConfigError.of(
                        name,
                        getattr(self, name),
                        "a table is there already; leave one of them out",
                        beside=f"with table={self.table!r}",
                    )

    def bound_of(self, tensor: str) -> float:
        """The bound of a tensor; 0 while the calibration runs."""
        if self.calibration is not None:
            return self.calibration.bounds.get(tensor, 0.0)
        return 0.0 if self.table is None else self._bounds(tensor)

    def learn(self, calibration: Calibration) -> None:
        """Takes the calibration that was found in the job; the same on all ranks."""
        self.calibration = calibration

    def observe(self, report: StepReport) -> None:
        """Warns, once, where the calibration was asked for and is forgotten."""
        super().observe(report)
        if self.calibrate and self.calibration is None:
            self._waited += 1
            if self._waited == PATIENCE * self.calibrate:
                warnings.warn(
                    f"policy 'plot' with calibrate={self.calibrate}: {self._waited} steps, all "
                    "exact, have passed without a calibration: call attachment.calibrate(loss_fn, "
                    "batch) before each step on every rank",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def state_dict(self) -> dict[str, object]:
        """The calibration found in the job; one that is not complete starts anew."""
        found = self.calibration if self.calibrate else None
        return {} if found is None else {"calibration": asdict(found)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; raises ConfigError, also for a calibration of
        another model. A policy with a table needs none, and leaves the state's alone."""
        read = State(state, "state['phases']")
        read.keys((), ("calibration",))
        if "calibration" not in read.values:
            return
        found = read.part("calibration")
        found.keys(("model", "bounds"), ("settings",))
        bounds = found.part("bounds")
        for name, bound in bounds.values.items():
            check_bound(bounds.at(name), plain(bound))
        settings: dict[str, Any] = {}
        if "settings" in found.values:
            settings = {key: plain(v) for key, v in found.part("settings").values.items()}
            found.part("settings").by_name()
        if not self.calibrate:
            return
        model = found.values["model"]
        if not isinstance(model, str):
            raise found.wrong("model", "a model's fingerprint")
        calibration = Calibration(model, bounds.by_name(), settings)
        if self._tensors is not None:
            _check_model(found.name, calibration, self._tensors)
        self.learn(calibration)

    def options(self) -> dict[str, object]:
        """The options, with the file's contents in its place: ranks compare those."""
        values = {name: getattr(self, name) for name in option_names(type(self))}
        if self.table is not None and self.calibration is not None:
            values["table"] = self.calibration.bounds
        return values

    def prepare(self, tensors: Mapping[str, int] | None) -> None:
        """Checks the table against the model."""
        if tensors is None:
            raise ConfigError.of(
                "table",
                self.table,
                "the hook needs HookState(model=…) for its names",
                beside="without a model",
            )
        self._tensors = tensors
        if isinstance(self.table, Mapping):
            check_patterns("table", self.table, list(tensors))
        elif self.table is not None and self.calibration is not None:
            _check_model(f"table={self.table!r}", self.calibration, tensors)

    def plan(self, context: PlanContext) -> TransferPlan:
        """One region per tensor (small ones pooled) with its own bound; exact without a table."""
        if self.table is None and self.calibration is None:
            return TransferPlan.whole(context.elements, scale=1.0 / context.world_size)
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
