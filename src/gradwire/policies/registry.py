"""Policies by name."""

from __future__ import annotations

from gradwire.errors import ConfigError, suggestion
from gradwire.policies.adaptive import Adaptive
from gradwire.policies.base import Policy, option_names
from gradwire.policies.dblp import DBLP
from gradwire.policies.ltp import LTP
from gradwire.policies.mlt import MLT
from gradwire.policies.netsenseml import NetSenseML
from gradwire.policies.optireduce import OptiReduce
from gradwire.policies.plot import PLOT
from gradwire.policies.reliable import Reliable

__all__ = ["create", "names", "policy_class", "register"]

_registry: dict[str, type[Policy]] = {}


def register(policy: type[Policy]) -> type[Policy]:
    """Makes a policy known by its `name`; usable as a class decorator."""
    known = _registry.get(policy.name)
    if known is not None and known is not policy:
        raise ConfigError(f"policy name {policy.name!r} is already taken by {known.__name__}")
    _registry[policy.name] = policy
    return policy


for _policy in (Reliable, MLT, DBLP, LTP, PLOT, OptiReduce, NetSenseML, Adaptive):
    register(_policy)


def names() -> tuple[str, ...]:
    """The names of all policies."""
    return tuple(_registry)


def policy_class(name: str) -> type[Policy]:
    """The policy of this name; raises ConfigError with the nearest name for an unknown one."""
    if name not in _registry:
        allowed = ", ".join(repr(known) for known in _registry)
        raise ConfigError(
            f"policy={name!r}: allowed are {allowed}{suggestion(str(name), _registry)}"
        )
    return _registry[name]


def create(name: str, **options: object) -> Policy:
    """Builds the policy of this name; raises ConfigError naming an option that it lacks."""
    policy = policy_class(name)
    allowed = option_names(policy)
    for option, value in options.items():
        if option not in allowed:
            known = ", ".join(allowed) if allowed else "none"
            raise ConfigError(
                f"{option}={value!r} is no option of policy {name!r}; its options: {known}"
                f"{suggestion(option, allowed)}"
            )
    return policy(**options)
