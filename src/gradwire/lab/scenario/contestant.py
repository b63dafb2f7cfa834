"""A contestant of a scenario: one way to carry the gradients."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gradwire.errors import ConfigError
from gradwire.lab.scenario.mark import LIMIT
from gradwire.lab.scenario.network import CONGESTION_CONTROLS
from gradwire.lab.scenario.reader import MISSING, ScenarioError, key
from gradwire.lab.scenario.work import THIRDS, Model
from gradwire.plans import SPENDS

__all__ = ["HOOKS", "Contestant"]

HOOKS = ("none", "fp16", "powersgd", "topk")
TRANSPORTS = {
    "push": ("tcp", "gradwire"),
    "all_reduce": ("gloo", "gradwire"),
    "training": ("gloo", "gradwire"),
}
"""Which transports take part in which kind of work."""


@dataclass(frozen=True)
class Contestant:
    """One way to carry the gradients."""

    name: str = key(MISSING, "what tables call it")
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
    spend: str = key("anything", "of gradwire's pushes: what may be given up", choices=SPENDS)
    enough: float | None = key(
        None, "of gradwire's pushes: this share closes them once they are late", above=0.0, high=1.0
    )
    late: float = key(1.5, "with enough: when a push is late, × the header ideal", above=0.0)
    slack_s: float = key(
        0.03, "with enough: from then until it closes with what there is, s", low=0.0
    )
    tolerant: tuple[str, ...] = key(
        (),
        "of gradwire in training: all workers vote for the tolerant phase in these thirds, and for "
        "the critical one in the others (never: in all); none: the policy decides",
        choices=THIRDS,
    )
    optional: bool = key(False, "leave it out where this gradwire lacks one of its options")

    def __post_init__(self) -> None:
        if not self.name or self.name == LIMIT:
            raise ScenarioError(f"name={self.name!r}: a name other than {LIMIT!r}")
        if self.transport == "gradwire" and self.hook != "none":
            raise ScenarioError(
                f"hook={self.hook!r} with transport='gradwire': it is a hook itself"
            )
        if self.transport != "gradwire" and (self.options or self.bound or self.enough):
            raise ScenarioError(
                f"transport={self.transport!r} with options, bound or enough: those are gradwire's"
            )
        if self.tolerant and self.transport != "gradwire":
            raise ScenarioError(f"tolerant={list(self.tolerant)!r}: only gradwire has phases")

    def check_options(self, kind: str) -> None:
        """Whether this gradwire takes the options.

        Raises:
            ConfigError: names the option and what is allowed.
        """
        if self.transport != "gradwire":
            return
        from gradwire.configure import configure
        from gradwire.plans import TransferPlan
        from gradwire.settings import Settings

        known = {field.name for field in dataclasses.fields(TransferPlan)}
        if self.control != "stream" and "control" not in known:
            raise ConfigError(f"control={self.control!r}: this gradwire has only 'stream'")
        if kind == "push":
            Settings.build({"route": "server", "servers": 1, **self.options}, environment={})
        else:
            configure(self.policy, self.options, environment={})

    def check(self, kind: str, model: Model) -> None:
        """Whether it can take part in this kind of work.

        Raises:
            ScenarioError: names the key, its value and what is allowed.
        """
        where = f"contestants: {self.name}"
        if self.transport not in TRANSPORTS[kind]:
            allowed = ", ".join(map(repr, TRANSPORTS[kind]))
            raise ScenarioError(
                f"{where}: transport={self.transport!r}: with work.kind={kind!r} allowed are "
                f"{allowed}"
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
        if kind != "push" and (self.bound or self.enough or self.control != "stream"):
            raise ScenarioError(
                f"{where}: bound, enough and control are for pushes; others take a policy and its "
                "options"
            )
        try:
            self.check_options(kind)
        except ConfigError as error:
            if not self.optional:
                raise ScenarioError(f"{where}: options: {error}") from None
