"""A contestant of a scenario is one way to carry the gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradwire.core.errors import ConfigError
from gradwire.core.plan import SPENDS, check_control
from gradwire_lab.scenario.mark import LIMIT
from gradwire_lab.scenario.network import CONGESTION_CONTROLS
from gradwire_lab.scenario.options import Lacking, bound_of_policy, check_policy, check_push
from gradwire_lab.scenario.reader import MISSING, ScenarioError, default_of, key
from gradwire_lab.scenario.work import THIRDS, Model, Work

__all__ = ["HOOKS", "Contestant"]

HOOKS = ("none", "fp16", "powersgd", "topk")
TRANSPORTS = {
    "push": ("tcp", "gradwire"),
    "all_reduce": ("gloo", "gradwire"),
    "training": ("gloo", "gradwire"),
}
"""Which transports take part in which kind of work; tcp also in an all-reduce over servers."""

_GRADWIRE = ("policy", "options", "tolerant", "optional")
_PUSHES = ("bound", "control", "spend", "enough", "late", "slack_s")


@dataclass(frozen=True)
class Contestant:
    """A contestant is one way to carry the gradients."""

    name: str = key(MISSING, "what tables call it", line=True)
    transport: str = key(MISSING, "what carries the bytes", choices=["tcp", "gloo", "gradwire"])
    congestion_control: str = key("cubic", "of tcp and gloo", choices=CONGESTION_CONTROLS)
    hook: str = key("none", "of gloo in training: DDP's communication hook", choices=HOOKS)
    policy: str = key("reliable", "of gradwire, except for pushes")
    options: dict[str, Any] = key(
        {}, "of gradwire: options of the policy, and common settings as for gradwire.attach"
    )
    bound: float = key(0.0, "of gradwire's pushes", low=0.0, high=0.99)
    control: str = key(
        "stream",
        "of gradwire's pushes: packet by packet, or in the papers' passes of probe and bitmap",
        choices=["stream", "probe"],
    )
    spend: str = key(
        "anything", "of gradwire's pushes with a bound: what may be given up", choices=SPENDS
    )
    enough: float | None = key(
        None,
        "of gradwire's pushes, instead of a bound: this share closes them once they are late",
        above=0.0,
        high=1.0,
    )
    late: float = key(
        1.5, "with enough: when a push is late, × the header ideal", above=0.0, high=1000.0
    )
    slack_s: float = key(
        0.03, "with enough: from then until it closes with what there is, s", low=0.0, high=3600.0
    )
    tolerant: tuple[str, ...] = key(
        (),
        "of gradwire in training: all workers vote for the tolerant phase in these thirds, and for "
        "the critical one in the others (never: in all); none: the policy decides",
        choices=THIRDS,
    )
    optional: bool = key(False, "leave it out where this gradwire knows no such option")

    def __post_init__(self) -> None:
        if not self.name.strip() or self.name == LIMIT:
            raise ScenarioError(f"name={self.name!r}: a name other than {LIMIT!r}")
        if self.transport == "gradwire":
            if self.hook != "none":
                raise ScenarioError(
                    f"hook={self.hook!r} with transport='gradwire': it is a hook itself"
                )
            self._refuse(("congestion_control",), "with transport='gradwire': that is TCP's")
        else:
            with_it = f"with transport={self.transport!r}: that is gradwire's"
            self._refuse((*_GRADWIRE, *_PUSHES), with_it)
        if self.enough is None:
            self._refuse(("late", "slack_s"), "without enough: no other push is late")
        else:
            self._refuse(("bound", "spend", "control"), "with enough: the clock closes it")
        if not self.bound:
            self._refuse(("spend",), "without a bound: nothing is given up")
        try:
            check_control(self.control, self.spend)
        except ConfigError as error:
            raise ScenarioError(str(error)) from None
        if "never" in self.tolerant and len(self.tolerant) > 1:
            raise ScenarioError(f"tolerant={list(self.tolerant)!r}: 'never' stands alone")

    def _refuse(self, names: tuple[str, ...], reason: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value != default_of(Contestant, name):
                shown = list(value) if isinstance(value, tuple) else value
                raise ScenarioError(f"{name}={shown!r} {reason}")

    def check(self, work: Work, model: Model, servers: int) -> None:
        """Check that it can take part in this work, with so many servers.

        Raises:
            ScenarioError: names the key, its value and what is allowed.
        """
        kind, where = work.kind, f"contestants: {self.name}"
        allowed = [*TRANSPORTS[kind], *(["tcp"] if kind == "all_reduce" and servers else [])]
        if self.transport not in allowed:
            raise ScenarioError(
                f"{where}: transport={self.transport!r}: with work.kind={kind!r} and "
                f"topology.servers={servers} allowed are {', '.join(map(repr, allowed))}"
            )
        if self.hook != "none" and kind != "training":
            raise ScenarioError(f"{where}: hook={self.hook!r}: only work.kind='training' has hooks")
        if self.hook == "powersgd" and model.overlap:
            raise ScenarioError(
                f"{where}: hook='powersgd' with model.overlap=true: torch's PowerSGD waits in its "
                "callbacks and hangs on Gloo with several buckets under way; allowed are "
                "overlap=false or another hook"
            )
        if self.tolerant and kind != "training":
            raise ScenarioError(
                f"{where}: tolerant={list(self.tolerant)!r}: only work.kind='training' has thirds"
            )
        try:
            if kind == "push":
                self._refuse(("policy",), "with work.kind='push': pushes take bound and enough")
            else:
                self._refuse(
                    _PUSHES, f"with work.kind={kind!r}: that is for pushes; others take options"
                )
            self._check_options(work, model, servers)
        except Lacking as error:
            if not self.optional:
                raise ScenarioError(f"{where}: options: {error}") from None
        except ScenarioError as error:
            raise ScenarioError(f"{where}: {error}") from None

    def lacking(self, work: Work, model: Model, servers: int) -> str | None:
        """Return which option this gradwire does not know; None if it knows all."""
        try:
            self._check_options(work, model, servers)
        except Lacking as error:
            return str(error)
        return None

    def _check_options(self, work: Work, model: Model, servers: int) -> None:
        if self.transport != "gradwire":
            return
        try:
            if work.kind == "push":
                check_push(self.options, self.control)
            else:
                check_policy(
                    self.policy,
                    self.options,
                    work,
                    model,
                    votes=bool(self.tolerant),
                    servers=servers,
                )
        except Lacking:
            raise
        except ScenarioError as error:
            raise ScenarioError(f"options: {error}") from None

    def loosest_bound(self, kind: str) -> float:
        """Return the share that need not be delivered in the loosest phase.

        It is 0 where a policy closes by time or by layer.
        """
        if self.transport != "gradwire":
            return 0.0
        if kind == "push":
            return self.bound if self.enough is None else 1.0 - self.enough
        return bound_of_policy(self.policy, self.options)
