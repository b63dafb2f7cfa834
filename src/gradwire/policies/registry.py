"""The registry of policies by name."""

from __future__ import annotations

import os
import typing
from collections.abc import Iterable, Mapping

from gradwire.core.environment import PREFIX, from_environment, naming_variables
from gradwire.core.errors import ConfigError, suggestion
from gradwire.core.settings import Settings, setting_names
from gradwire.policies.adaptive import Adaptive
from gradwire.policies.base import Policy, option_names
from gradwire.policies.dblp import DBLP
from gradwire.policies.ltp import LTP
from gradwire.policies.mlt import MLT
from gradwire.policies.netsenseml import NetSenseML
from gradwire.policies.optireduce import OptiReduce
from gradwire.policies.plot import PLOT
from gradwire.policies.reliable import Reliable

DEFAULT = "adaptive"
"""The policy where none is given."""

OFF = "off"
"""The name that stands for no policy, where torch averages gradients itself."""

_registry: dict[str, type[Policy]] = {}

_ATTACH = (
    *("model", "policy", "optimizer", "scaler", "replicas"),
    *("process_group", "find_unused_parameters"),
)
"""The arguments of `gradwire.attach` and `gradwire.HookState` that are no options of policies."""

_MEANT = ("fill", "momentum", "halt_after", "every")
"""The attributes of `Policy` that an option may replace."""


def register(policy: type[Policy]) -> type[Policy]:
    """Makes a policy known by its `name`; usable as a class decorator.

    Args:
        policy: The class.

    Returns:
        The same class.

    Raises:
        ConfigError: The name is taken; or an option can never be set, because an argument of
            attach() or a common setting has its name; or an option hides an attribute that
            gradwire reads of every policy.
    """
    for option in option_names(policy):
        if option in setting_names() or option in _ATTACH:
            raise ConfigError.about(
                f"policy {policy.name!r}",
                f"option {option!r} would never be set, for attach() takes an argument or a "
                "common setting of this name: give it another one",
                setting="policy",
                value=policy.name,
            )
        if option in {*dir(Policy), *Policy.__annotations__} and option not in _MEANT:
            raise ConfigError.about(
                f"policy {policy.name!r}",
                f"option {option!r} hides Policy.{option}, which gradwire reads of every policy: "
                "give it another name, or declare it a ClassVar if it replaces that; of Policy's "
                f"own attributes only {', '.join(_MEANT)} may be options",
                setting="policy",
                value=policy.name,
            )
    known = _registry.get(policy.name)
    if known is not None and known is not policy:
        raise ConfigError.about(
            f"policy name {policy.name!r} is taken",
            f"{known.__name__} has it; give another one",
            setting="policy",
            value=policy.name,
        )
    _registry[policy.name] = policy
    return policy


for _policy in (Reliable, MLT, DBLP, LTP, PLOT, OptiReduce, NetSenseML, Adaptive):
    register(_policy)


def names() -> tuple[str, ...]:
    """Returns the names of all policies."""
    return tuple(_registry)


def policy_class(name: str) -> type[Policy]:
    """Returns the policy of this name; raises ConfigError with the nearest name for none."""
    if name not in _registry:
        known = [*_registry] if name == OFF else [*_registry, OFF]
        allowed = ", ".join(map(repr, known))
        raise ConfigError.of("policy", name, f"allowed are {allowed}{suggestion(str(name), known)}")
    return _registry[name]


def create(name: str, **options: object) -> Policy:
    """Builds a policy.

    Args:
        name: Its name.
        options: Its options.

    Returns:
        The policy.

    Raises:
        ConfigError: There is no such policy, it lacks an option, or a value is not allowed.
    """
    policy = policy_class(name)
    allowed = option_names(policy)
    for option, value in options.items():
        if option not in allowed:
            known = ", ".join(allowed) if allowed else "none"
            raise ConfigError.of(
                option,
                value,
                f"its options are {known}{suggestion(option, allowed)}",
                beside=f"is no option of policy {name!r}",
            )
    return policy(**options)


def name_in_environment(environment: Mapping[str, str] | None = None) -> str:
    """Returns the name in GRADWIRE_POLICY, else the default one.

    Args:
        environment: Environment variables; None for os.environ.

    Raises:
        ConfigError: There is no such policy.
    """
    read = from_environment({"policy": str}, environment)
    name = str(read.get("policy", DEFAULT))
    if name != OFF:
        with naming_variables(read):
            policy_class(name)
    return name


def create_from_environment(
    name: str, given: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> Policy:
    """Builds a policy, whose options that are not given come from GRADWIRE_* variables.

    Args:
        name: Its name.
        given: Options that are given.
        environment: Environment variables; None for os.environ.

    Returns:
        The policy.

    Raises:
        ConfigError: There is no such policy, it lacks an option, or a value is not allowed.
    """
    hints = typing.get_type_hints(policy_class(name))
    unset = [option for option in option_names(policy_class(name)) if option not in given]
    read = from_environment({option: hints[option] for option in unset}, environment)
    with naming_variables(read):
        return create(name, **{**read, **given})


def agreed_configuration(policy: Policy, settings: Settings) -> dict[str, object]:
    """Returns what must be the same on all ranks, as plain values by name."""
    return {
        "policy": policy.name,
        **{f"{policy.name}.{name}": value for name, value in policy.options().items()},
        **settings.agreed(),
    }


def unread_variables(
    options: Iterable[str], environment: Mapping[str, str] | None = None
) -> list[str]:
    """Returns the variables that are set and name options of other policies.

    Args:
        options: The options that a policy reads from the environment.
        environment: Environment variables; None for os.environ.
    """
    read = {"policy", *setting_names(), *options}
    unread = {PREFIX + name.upper() for name in all_names() if name not in read}
    return sorted(unread & (os.environ if environment is None else environment).keys())


def all_names() -> list[str]:
    """Returns the names of all settings and of all policies' options, which variables may have."""
    policies = [option for name in names() for option in option_names(policy_class(name))]
    return ["policy", *setting_names(), *dict.fromkeys(policies)]
