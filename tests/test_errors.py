"""The errors' fields, and the one form of wording of each family."""

from __future__ import annotations

import pickle
from typing import get_args

import pytest

import gradwire
from gradwire import _engine
from gradwire.core.errors import Cause, ConfigError, RendezvousError, TransferError


def test_a_config_error_carries_the_setting_the_value_and_what_is_allowed() -> None:
    with pytest.raises(ConfigError) as raised:
        gradwire.Settings(port=70000)
    error = raised.value
    assert (error.setting, error.value) == ("port", 70000)
    assert error.allowed.startswith("a whole number from 0 to 65535")
    assert str(error) == f"port=70000: {error.allowed}"


def test_a_config_error_says_what_a_value_does_not_go_with() -> None:
    with pytest.raises(ConfigError) as raised:
        gradwire.Settings(servers=2, route="sharded")
    error = raised.value
    assert (error.setting, error.value) == ("servers", 2)
    assert str(error) == "servers=2 with route='sharded': servers need route='server'"


def test_an_unknown_setting_is_a_field_and_has_a_suggestion() -> None:
    with pytest.raises(ConfigError) as raised:
        gradwire.Settings.build({"prot": 7})
    assert (raised.value.setting, raised.value.value) == ("prot", 7)
    assert "did you mean 'port'?" in str(raised.value)


def test_a_variable_of_the_environment_is_named_as_it_is_written() -> None:
    with pytest.raises(ConfigError) as raised:
        gradwire.Settings.build({}, environment={"GRADWIRE_PORT": "many"})
    assert (raised.value.setting, raised.value.value) == ("GRADWIRE_PORT", "many")


@pytest.mark.parametrize(
    "error",
    [
        ConfigError.of("port", -1, "0 or more", beside="beside 2"),
        ConfigError.about("no store", "give one", setting="store"),
        RendezvousError("ranks 1, 3 did not join", [1, 3]),
        TransferError("too late", rank=2, step=7, cause="timeout"),
    ],
)
def test_errors_survive_pickling_with_their_fields(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_the_causes_of_a_transfer_error_are_the_engines() -> None:
    assert set(_engine.CAUSES) == set(get_args(Cause))
