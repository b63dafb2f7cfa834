"""Training phases: the detectors that decide them from what the ranks agree on.

The detector of DBLP (arXiv 2605.01989) compares the gradient's norm with that of its last
decision. A phase is critical when the norm changed by the share η or more,
|prev - curr| / prev >= η. Training starts critical. There are three inputs:

"ours"   Root mean square, over the steps since the last decision, of the norms of the workers'
         *fresh* gradients, before residuals are added and before anything is lost. It averages out
         minibatch noise, and the detector does not see the loss that it causes.
"paper"  L2 norm of one step's averaged gradient as it was applied, which is the paper's input.
"layers" A phase per layer, after Accordion (MLSys 2021): each layer's norm is compared with its
         own last one. The norm is that of "ours", where Accordion takes the norm of the gradient
         accumulated over the epoch. The layers' norms take one small exact transfer of their own
         at each decision.

As in Accordion, a drop of the learning rate counts as critical too (`RateWatch`). Users may also
vote for a phase; a vote overrules the detector as long as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from gradwire.core.agreed import PHASES, Phase, Summary
from gradwire.core.checks import is_number, is_whole
from gradwire.core.errors import ConfigError
from gradwire.core.plan import check_choice
from gradwire.core.saved_state import State

Every = int | Literal["epoch"]

DETECTORS = ("ours", "paper", "layers")


def check_every(name: str, value: object) -> None:
    """Checks that `value` is a number of steps or "epoch"; raises ConfigError otherwise."""
    named = isinstance(value, str) and value == "epoch"
    if not named and not (is_whole(value) and value >= 1):
        raise ConfigError.of(name, value, "a number of steps (1 or more) or 'epoch'")


class PhaseDetector:
    """Decides the phase of the next step from the agreed summaries of the steps before.

    Zero and non-finite norms mean critical.

    Args:
        eta: Relative change of the norm that makes a phase critical, above 0.
        every: Steps between two decisions, or "epoch" for one per epoch (`attachment.epoch(n)`).
        source: Input of the detector, "ours" or "paper".

    Attributes:
        steps: Number of steps observed.
        fired: Number of times that a change of the norm, or another cause, made the phase critical.
    """

    def __init__(self, eta: float = 0.5, every: Every = 10, source: str = "ours") -> None:
        if not is_number(eta) or not eta > 0:
            raise ConfigError.of("eta", eta, "a relative change, a finite number above 0")
        check_every("every", every)
        check_choice("detector", source, DETECTORS)
        self.eta = float(eta)
        self.every: Every = every
        self.source = source
        self.phase: Phase = "critical"
        self.steps = 0
        self.critical_steps = 0.0
        self.looks = 0
        self.fired = 0
        self._detected: Phase = "critical"
        self._previous: float | None = None
        self._squares = 0.0
        self._count = 0
        self._epoch = -1
        self._hold = False

    @property
    def critical_share(self) -> float:
        """The share of the steps so far that were critical; 1 before the first."""
        return self.critical_steps / self.steps if self.steps else 1.0

    @property
    def verdict(self) -> str:
        """The kind of run: "phases", or "fixed bound" where nothing fired after the start."""
        return "phases" if self.fired else "fixed bound"

    def due(self, summary: Summary) -> bool:
        """Returns whether `observe` will make a decision at this summary's step."""
        if self.every == "epoch":
            return self._begins(summary)
        return (self.steps + 1) % self.every == 0

    def phase_of(self, layer: str) -> Phase:
        return self.phase

    def observe(self, summary: Summary) -> None:
        """Takes the summary of the step just completed and decides the phase of the next."""
        self.steps += 1
        self.critical_steps += self.phase == "critical"
        begins = self._begins(summary)
        if self.every == "epoch":
            if begins:
                self._epoch = summary.epoch
                if self.source == "paper":
                    self._gather(summary)
                self._decide()
            if self.source == "ours":
                self._gather(summary)
        else:
            self._gather(summary)
            if self.steps % self.every == 0:
                self._decide()
        if summary.nonfinite or summary.falling:
            self._fire()
            # The next window is cut short, so its decision is suspended.
            self._hold = self._hold or (summary.falling and not begins)
        self.phase = summary.vote if summary.vote is not None else self._detected

    _KEPT: ClassVar[dict[str, str]] = {
        **{key: key for key in ("phase", "steps", "critical_steps", "looks", "fired")},
        **{key: f"_{key}" for key in ("detected", "previous", "squares", "count", "epoch", "hold")},
    }
    """The attribute of each key of a saved state."""

    def state_dict(self) -> dict[str, object]:
        """Returns everything that the next decision depends on, as plain values."""
        return {key: getattr(self, attribute) for key, attribute in self._KEPT.items()}

    def load_state_dict(self, state: object) -> None:
        """Restores what `state_dict` returned.

        Raises:
            ConfigError: The state is anything else; nothing is changed then.
        """
        read = State(state, "state['phases']['phases']")
        read.keys(sorted(self._KEPT))
        for key, value in self._read(read).items():
            setattr(self, self._KEPT[key], value)

    def _read(self, state: State) -> dict[str, object]:
        steps = state.whole("steps")
        return {
            "phase": state.choice("phase", PHASES),
            "steps": steps,
            "critical_steps": state.number("critical_steps", 0.0, steps),
            "looks": state.whole("looks"),
            "fired": state.whole("fired"),
            "detected": state.choice("detected", PHASES),
            "previous": state.optional("previous", state.magnitude),
            "squares": state.magnitude("squares"),
            "count": state.whole("count"),
            "epoch": state.whole("epoch", -1),
            "hold": state.flag("hold"),
        }

    def _begins(self, summary: Summary) -> bool:
        """Returns whether a window of whole epochs begins with this summary's step."""
        return self.every == "epoch" and summary.epoch > self._epoch

    def _gather(self, summary: Summary) -> None:
        if self.source == "paper":
            if summary.applied_norm is not None:
                self._squares, self._count = summary.applied_norm**2, 1
        elif not summary.nonfinite:
            self._squares += summary.fresh_norm**2
            self._count += 1

    def _decide(self) -> None:
        if not self._count:
            return
        current = math.sqrt(self._squares / self._count)
        previous = self._previous
        self._squares, self._count = 0.0, 0
        self._previous = current
        self.looks += 1
        if previous is None:
            return
        if self._hold:
            self._hold = False
        elif changed(previous, current, self.eta):
            self._fire()
        else:
            self._detected = "tolerant"

    def _fire(self) -> None:
        self._detected = "critical"
        self.fired += 1


class LayerDetector(PhaseDetector):
    """Decides a phase per layer; a layer is critical until two decisions have seen its norm.

    `phase` is critical while any layer is, and `critical_share` counts layers.
    """

    def __init__(self, eta: float = 0.5, every: Every = 10) -> None:
        super().__init__(eta, every, "layers")
        self._norms: dict[str, float] = {}
        self._tolerant_layers: frozenset[str] = frozenset()
        self._vote: Phase | None = None

    def phase_of(self, layer: str) -> Phase:
        if self._vote is not None:
            return self._vote
        return "tolerant" if layer in self._tolerant_layers else "critical"

    def observe(self, summary: Summary) -> None:
        self.steps += 1
        if self._vote is not None or not self._norms:
            self.critical_steps += self.phase == "critical"
        else:
            self.critical_steps += 1.0 - len(self._tolerant_layers) / len(self._norms)
        begins = self._begins(summary)
        self._epoch = max(self._epoch, summary.epoch)
        if summary.layers is not None:
            self._decide_layers(summary.layers)
        if summary.nonfinite or summary.falling:
            self._tolerant_layers = frozenset()
            self._hold = self._hold or (summary.falling and not begins)
            self.fired += 1
        self._vote = summary.vote
        tolerant = bool(self._norms) and len(self._tolerant_layers) == len(self._norms)
        self._detected = "tolerant" if tolerant else "critical"
        self.phase = self._vote if self._vote is not None else self._detected

    _KEPT: ClassVar[dict[str, str]] = {
        **PhaseDetector._KEPT,
        "norms": "_norms",
        "settled": "_tolerant_layers",
        "vote": "_vote",
    }

    def state_dict(self) -> dict[str, object]:
        """Returns all that the next decision depends on; sets become lists, for torch.load."""
        return {
            **super().state_dict(),
            "norms": dict(self._norms),
            "settled": sorted(self._tolerant_layers),
        }

    def _read(self, state: State) -> dict[str, object]:
        settled = state.values["settled"]
        if not isinstance(settled, (list, tuple)) or not all(isinstance(n, str) for n in settled):
            raise state.wrong("settled", "a list of layers' names")
        vote = state.values["vote"]
        return {
            **super()._read(state),
            "norms": state.part("norms").by_name(),
            "settled": frozenset(settled),
            "vote": None if vote is None else state.choice("vote", PHASES),
        }

    def _decide_layers(self, norms: Mapping[str, float]) -> None:
        self.looks += 1
        before, self._norms = self._norms, dict(norms)
        if self._hold:
            self._hold = False
            return
        fired = {layer for layer in norms if layer in before} & {
            layer
            for layer, norm in norms.items()
            if changed(before.get(layer, 0.0), norm, self.eta)
        }
        self.fired += bool(fired)
        self._tolerant_layers = frozenset(layer for layer in norms if layer in before) - fired


class RateWatch:
    """Notices when a learning rate drops to half of what it was, at once or bit by bit.

    Accordion (MLSys 2021) counts any decay as critical. A rate that falls a little in every step
    (cosine) would then be critical for ever, so only halvings count here.

    Attributes:
        reference: The rates with which the next ones are compared, by parameter group.
    """

    SHARE = 0.5

    def __init__(self) -> None:
        self.reference: list[float] = []

    def observe(self, rates: Sequence[float]) -> bool:
        """Takes the rates of all parameter groups before a step; returns whether one dropped."""
        known = self.reference if len(self.reference) == len(rates) else list(rates)
        fell = [
            now <= self.SHARE * before < before for now, before in zip(rates, known, strict=True)
        ]
        self.reference = [
            now if drop else max(now, before)
            for now, before, drop in zip(rates, known, fell, strict=True)
        ]
        return any(fell)


def make_detector(eta: float, every: Every, source: str) -> PhaseDetector:
    check_choice("detector", source, DETECTORS)
    if source == "layers":
        return LayerDetector(eta, every)
    return PhaseDetector(eta, every, source)


def changed(before: float, now: float, eta: float) -> bool:
    """Returns whether a norm changed by the share eta or more, or is zero or not finite."""
    usable = math.isfinite(before) and math.isfinite(now) and before > 0 and now > 0
    return not usable or abs(before - now) / before >= eta
