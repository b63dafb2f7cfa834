"""A contestant's options are checked: gradwire takes them, and the lab can give what they need."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from gradwire.core.errors import ConfigError
from gradwire.core.plan import TransferPlan
from gradwire.core.settings import Settings, setting_names
from gradwire.policies import Policy, names, policy_class
from gradwire.policies.base import option_names
from gradwire.training.configure import configure
from gradwire_lab.contest.serving import route_settings
from gradwire_lab.scenario.reader import ScenarioError
from gradwire_lab.scenario.work import Model, Work

__all__ = ["Lacking", "bound_of_policy", "check_one_engine", "check_policy", "check_push"]

_OWN = ("route", "servers")
"""Settings that the topology decides."""


class Lacking(ScenarioError):
    """This gradwire lacks an option that another one may have."""


def check_push(options: Mapping[str, Any], control: str) -> None:
    """Check that pushes take these settings.

    Raises:
        Lacking: one is unknown.
        ScenarioError: a value, or what it needs, is not available.
    """
    _check_own(options)
    known = {name: value for name, value in options.items() if name in setting_names()}
    policies = [name for name in options if name not in known and name in _policy_options()]
    if policies:
        raise ScenarioError(
            f"{policies[0]}={options[policies[0]]!r}: pushes have no policy; they take bound, "
            "spend, enough and control, and common settings"
        )
    _build(known)
    if control != "stream" and "control" not in {
        field.name for field in dataclasses.fields(TransferPlan)
    }:
        raise Lacking(f"control={control!r}: this gradwire has only 'stream'")
    _check_known(options, known)


def check_policy(
    policy: str,
    options: Mapping[str, Any],
    work: Work,
    model: Model,
    *,
    votes: bool,
    servers: int,
) -> None:
    """Check that a policy takes these options, and that they can do something here.

    Raises:
        Lacking: an option is unknown.
        ScenarioError: a value, or what it needs, is not available.
    """
    if policy not in names():
        _build({}, policy)
    _check_own(options)
    everywhere = {*setting_names(), *_policy_options()}
    known = {name: value for name, value in options.items() if name in everywhere}
    made = _build({**known, **route_settings(servers)}, policy)
    _check_known(options, known)
    if votes and made.phases is None:
        raise ScenarioError(f"policy={policy!r} with tolerant: it has no phases to vote for")
    if made.awaits_epochs:
        raise ScenarioError("every='epoch': the lab has no epochs; a number of steps is allowed")
    if options.get("loss_rise") is not None and work.kind != "training":
        raise ScenarioError(
            f"loss_rise={options['loss_rise']!r}: only work.kind='training' has losses"
        )
    _prepare(made, work.tensors if work.kind != "training" else _tensors(model), servers)


def check_one_engine(options: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that the contestants of one training can share an engine.

    Args:
        options: the options of gradwire's contestants, by name; each alone is right.

    Raises:
        ScenarioError: names two of them, the setting and its values.
    """
    first: tuple[str, dict[str, Any]] | None = None
    for name, mine in options.items():
        settings = {key: value for key, value in mine.items() if key in setting_names()}
        transport = Settings.build(settings, environment={}).transport()
        if first is None:
            first = (name, transport)
        for key, value in transport.items():
            if value != first[1][key]:
                raise ScenarioError(
                    f"contestants: {name}: options: {key}={value!r}, but {first[0]} has "
                    f"{key}={first[1][key]!r}: in training all of gradwire's share one engine; "
                    "the same value is allowed"
                )


def bound_of_policy(policy: str, options: Mapping[str, Any]) -> float:
    """Return the share that a policy may leave out in its loosest phase.

    It is 0 where the policy closes by time or by layer.
    """
    return configure(policy, options, environment={})[0].loosest_bound


def _check_own(options: Mapping[str, Any]) -> None:
    for name in _OWN:
        if name in options:
            raise ScenarioError(
                f"{name}={options[name]!r}: topology.servers decides: with servers gradwire goes "
                "over them, without it is sharded; leave it out"
            )


def _check_known(options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in known:
            try:
                Settings.build({name: value}, environment={}, also_known=_policy_options())
            except ConfigError as error:
                raise Lacking(str(error)) from None


@functools.lru_cache(maxsize=1)
def _policy_options() -> tuple[str, ...]:
    found = [option for name in names() for option in option_names(policy_class(name))]
    return tuple(dict.fromkeys(found))


def _build(options: Mapping[str, Any], policy: str | None = None) -> Any:
    """Return the policy, or the settings without one, of options whose names are known."""
    try:
        if policy is None:
            return Settings.build({**route_settings(1), **options}, environment={})
        return configure(policy, options, environment={})[0]
    except ConfigError as error:
        raise ScenarioError(str(error)) from None


def _prepare(policy: Policy, tensors: Mapping[str, int], servers: int) -> None:
    try:
        policy.prepare(tensors, servers=servers)
    except ConfigError as error:
        raise ScenarioError(str(error)) from None


@functools.lru_cache(maxsize=64)
def _tensors(model: Model) -> Mapping[str, int]:
    """Return what training trains: elements of each parameter by name."""
    import torch

    from gradwire_lab.training.model import CharacterModel, Shape
    from gradwire_lab.training.text import SYMBOLS

    shape = Shape(SYMBOLS, model.context, model.width, model.layers, model.heads)
    with torch.device("meta"):
        made = CharacterModel(shape)
    return {name: each.numel() for name, each in made.named_parameters()}
