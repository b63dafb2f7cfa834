"""Makes a checked policy and checked settings of what a user writes."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence

from gradwire.core import callers
from gradwire.core.environment import check_environment
from gradwire.core.errors import ConfigError
from gradwire.core.settings import Settings, setting_names
from gradwire.policies import Policy, names, policy_class
from gradwire.policies.base import option_names
from gradwire.policies.registry import (
    all_names,
    create_from_environment,
    name_in_environment,
    unread_variables,
)
from gradwire.training.feedback.optimizer_moments import is_of_adams_family, keeps_first_moment
from gradwire.training.feedback.residuals import auto_feedback
from gradwire.training.optimizers import kinds, several


def configure(
    policy: str | Policy | None,
    options: Mapping[str, object],
    environment: Mapping[str, str] | None = None,
    optimizer: object = None,
    scattered: bool = False,
) -> tuple[Policy, Settings]:
    """Splits options into the policy's and the common settings, and reads GRADWIRE_* variables.

    Args:
        policy: A name, a policy object, which is copied, or None for GRADWIRE_POLICY, else
            "adaptive".
        options: Options of the policy, and settings.
        optimizer: The optimizer, or a list of several, which decide error_feedback="auto" and a
            fill that is left to them: each of them has to suit.
        scattered: Whether each rank gets its shard of the results alone. Then error_feedback="auto"
            means off, since what a rank contributes is unsharded, and so would be its residual.
    """
    optimizers = several(optimizer)
    check_environment(all_names(), environment)
    common = {name: value for name, value in options.items() if name in setting_names()}
    others = {name: value for name, value in options.items() if name not in common}
    if "min_bytes" in common:
        raise ConfigError.of(
            "min_bytes",
            common["min_bytes"],
            "every bucket of an attached module travels over the engine; the setting belongs to "
            'init_process_group("gradwire", pg_options=…)',
        )
    if isinstance(policy, Policy):
        for name, value in others.items():
            if name in option_names(type(policy)):
                raise ConfigError.of(
                    name,
                    value,
                    f"give it to the object, as in {type(policy).__name__}({name}={value!r})",
                    beside="beside a policy object",
                )
        chosen = copy.deepcopy(policy)  # its state belongs to one attachment
    else:
        if policy is None:
            policy = name_in_environment(environment)
        if not isinstance(policy, str):
            raise ConfigError.of("policy", policy, "a name or a policy object")
        options_of = option_names(policy_class(policy))
        given = {name: value for name, value in others.items() if name in options_of}
        chosen = create_from_environment(policy, given, environment)
        others = {name: value for name, value in others.items() if name not in given}
    if others:
        _explain(chosen, others)
    chosen.scattered = scattered
    own = () if isinstance(policy, Policy) else option_names(type(chosen))
    _warn_unread(chosen, own, os.environ if environment is None else environment)
    settings = Settings.build(
        common, environment=environment, also_known=option_names(type(chosen))
    )
    if settings.error_feedback == "auto":
        feedback = bool(optimizers) and all(map(auto_feedback, optimizers))
        if chosen.feedback is not None:
            feedback = chosen.feedback
        if chosen.fill in _STANDS_IN or scattered:
            feedback = False
        settings = dataclasses.replace(settings, error_feedback=feedback)
    _decide_fill(chosen, settings, optimizers)
    _check_feedback(chosen, settings, optimizers)
    if settings.guard == "skip" and (not optimizers or not settings.feedback):
        raise ConfigError.of(
            "guard",
            "skip",
            "needs attach(optimizer=…), whose step it skips, and error_feedback=True, "
            "which returns the skipped gradient; or use guard='resend'",
        )
    floor = chosen.floor if settings.floor is None else settings.floor
    if settings.guard == "skip" and floor == 0.0:
        raise ConfigError.of(
            "guard",
            "skip",
            "no step would ever be skipped; give floor=, a share of a step above 0 and "
            "at most 1, or leave the guard out",
            beside=f"with floor={settings.floor!r} and policy {chosen.name!r}, which sets "
            f"{chosen.floor:g} itself",
        )
    return chosen, settings


_STANDS_IN = {"mean": "the mean of the arrivals", "momentum": "the optimizer's momentum"}
"""The fills that substitute what did not arrive, and what by."""


def _decide_fill(policy: Policy, settings: Settings, optimizers: Sequence[object]) -> None:
    """Decides a fill that is left to the optimizers; raises ConfigError for an impossible one."""
    if policy.fill is None:
        adams = bool(optimizers) and all(map(is_of_adams_family, optimizers))
        suits = adams and not settings.feedback
        policy.fill = policy.fill_beside_adam if suits else "zero"
        policy.fill_was_open = True
    lacking = [each for each in optimizers if not keeps_first_moment(each)]
    if policy.fill == "momentum" and (lacking or not optimizers):
        raise ConfigError.of(
            "fill",
            "momentum",
            "takes what is missing from the running mean of gradients that Adam, "
            "AdamW, NAdam, RAdam and Adamax keep on every rank (without "
            "maximize=True); give such an optimizer as attach(optimizer=…), or use "
            "fill='zero' or 'mean'",
            beside=f"with optimizer={kinds(lacking)}",
        )
    if settings.feedback and policy.fill in _STANDS_IN:
        raise ConfigError.of(
            "fill",
            policy.fill,
            f"{_STANDS_IN[policy.fill]} already substitutes what did not arrive, and "
            "feedback would add it a second time; use fill='zero' or "
            "error_feedback=False",
            beside="with error_feedback=True",
        )


_ADAPTIVE = ("betas", "beta2_decay", "centered", "lr_decay", "rho", "etas")
"""Settings of optimizers with a memory of their own.

They are Adam's family, Adafactor, RMSprop, Adagrad, Adadelta and Rprop."""


def _check_feedback(policy: Policy, settings: Settings, optimizers: Sequence[object]) -> None:
    """Raises ConfigError for what a policy cannot do without error feedback, or would do twice."""
    need = policy.needs_feedback()
    if need is not None and not settings.feedback:
        raise ConfigError.of(
            need.option,
            need.value,
            f"{need.why}; set error_feedback=True, or {need.instead}",
            beside="with error_feedback off",
        )
    if not policy.momentum:
        return
    for optimizer in optimizers:
        groups = getattr(optimizer, "param_groups", [])
        own = next((g["momentum"] for g in groups if g.get("momentum")), None)
        if own is not None or any(key in group for group in groups for key in _ADAPTIVE):
            kind = type(optimizer).__name__ + ("" if own is None else f"(momentum={own!r})")
            raise ConfigError.of(
                "momentum",
                policy.momentum,
                "the workers' momentum takes the place of the optimizer's, and both would "
                "count it twice; use an optimizer without, such as SGD(momentum=0)",
                beside=f"with optimizer={kind}",
            )


def _explain(policy: Policy, unknown: Mapping[str, object]) -> None:
    """Raises the ConfigError for options that are unknown, or belong to another policy."""
    for option, value in unknown.items():
        owners = [name for name in names() if option in option_names(policy_class(name))]
        if owners:
            own = ", ".join(option_names(type(policy))) or "none"
            raise ConfigError.of(
                option,
                value,
                f"it is an option of {', '.join(map(repr, owners))}",
                beside=f"does not go with policy={policy.name!r} (its options: {own})",
            )
    Settings.build(unknown, environment={}, also_known=all_names())


def _warn_unread(policy: Policy, own: Iterable[str], environment: Mapping[str, str]) -> None:
    """Warns of variables that are options of other policies, or of a policy given as an object.

    It is no error, because they may be meant for other jobs of the same environment.
    """
    for variable in unread_variables(own, environment):
        callers.warn(
            f"{variable}={environment[variable]!r} is not read: policy {policy.name!r} takes no "
            "such option from the environment",
            UserWarning,
        )
