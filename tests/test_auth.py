"""Who may speak: keys, the files that have them, and ranks that do not agree on one."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.core.errors import ConfigError, RendezvousError
from gradwire.core.settings import Settings
from gradwire.server import serve
from gradwire.training.configure import configure
from gradwire.transport.communicator import Communicator
from ranks import Ranks
from threads import at_once

KEY, OTHER = "0f" * 32, "f0" * 32


def members(*settings: dict[str, Any], store: Any = None) -> list[Any]:
    """One communicator a rank in one store; in place of one that cannot be, its error."""
    store = store or dist.HashStore()

    def join(rank: int) -> Any:
        options = {"rendezvous_timeout": 30, "interface": "lo", **settings[rank]}
        try:
            return Communicator(store, rank, len(settings), options)
        except (RendezvousError, ConfigError) as error:
            return error

    return at_once(len(settings), join)


@contextlib.contextmanager
def closing(found: list[Any]) -> Iterator[list[Any]]:
    try:
        yield found
    finally:
        at_once(len(found), lambda rank: found[rank].close())


def sums(found: list[Any]) -> list[Any]:
    arrays = [np.full(100_000, rank + 1.0, np.float32) for rank in range(len(found))]
    at_once(len(found), lambda rank: found[rank].all_reduce(arrays[rank]).wait(30))
    return arrays


@pytest.mark.parametrize("given", [{}, {"auth": "whole"}, {"key": KEY}, {"auth": "none"}])
def test_ranks_with_the_same_key_work_together(
    given: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gradwire"), closing(members(given, given)) as found:
        for array in sums(found):
            assert (array == 3.0).all()
        for member in found:
            counters = member.counters()
            assert counters["forged"] == counters["malformed"] == 0
    unsafe = [record for record in caplog.records if "not authenticated" in record.message]
    assert len(unsafe) == (given == {"auth": "none"})


@pytest.mark.parametrize(
    "odd", [{"key": OTHER}, {}, {"auth": "none"}, {"auth": "whole"}], ids=["key", "s", "n", "w"]
)
def test_a_rank_with_another_key_or_none_is_named_on_all(odd: dict[str, str]) -> None:
    begun = time.monotonic()
    errors = members({"key": KEY}, {"key": KEY}, odd)
    assert time.monotonic() - begun < 15
    assert all(isinstance(error, RendezvousError) for error in errors), errors
    assert {error.ranks for error in errors} == {(2,)}
    assert len({str(error) for error in errors}) == 1
    assert KEY not in str(errors[0])


@pytest.mark.parametrize("wrong", ["", "0f", KEY + "0", KEY[:-1] + "g", 7])
def test_a_key_of_another_length_is_refused_and_not_shown(wrong: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        Settings.build({"key": wrong}, environment={})
    assert raised.value.setting == "key"
    assert KEY[:40] not in str(raised.value)


def test_a_key_comes_from_a_file_that_its_owner_alone_reads(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    file.chmod(0o600)
    settings = Settings.build(environment={"GRADWIRE_KEY_FILE": str(file)})
    assert settings.secret_key() == bytes.fromhex(KEY)
    assert settings.authentication == "key"
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600") as raised:
            Settings.build(environment={"GRADWIRE_KEY_FILE": str(file)})
        assert raised.value.setting == "key_file"
    file.chmod(0o600)
    file.write_text(KEY[2:])
    os.mkfifo(tmp_path / "fifo", 0o600)  # in which nobody writes
    for name in (file, tmp_path / "none", tmp_path, tmp_path / "fifo", "a\0b", "a\ud800b"):
        with pytest.raises(ConfigError) as raised:
            Settings.build({"key_file": name}, environment={})
        assert raised.value.setting == "key_file"
        assert KEY[2:] not in str(raised.value)


def test_a_key_file_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He may read it, and put another key there; root may do so with any file."""
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    user = os.geteuid()
    owner = file.stat().st_uid
    if user == 0:
        os.chown(file, 4242, -1)
        owner = 4242
        with pytest.raises(ConfigError, match="belongs to user 4242") as raised:
            Settings.build({"key_file": file}, environment={})
        assert raised.value.setting == "key_file"
        assert "of root" in raised.value.allowed
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    assert Settings.build({"key_file": file}, environment={}).secret_key() == bytes.fromhex(KEY)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}"):
        Settings.build({"key_file": file}, environment={})
    if user == 0:
        os.chown(file, 0, -1)
        assert Settings.build({"key_file": file}, environment={}).secret_key()


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ({"key_file": KEY}, {}),
        ({"auth": KEY}, {}),
        ({"psk": KEY}, {}),
        ({}, {"GRADWIRE_KEY_FILE": KEY}),
        ({}, {"GRADWIRE_PORT": KEY}),
        ({}, {"GRADWIRE_SECRET": KEY}),
    ],
)
def test_a_key_in_the_wrong_place_is_not_shown(
    options: dict[str, Any], variables: dict[str, str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        configure("reliable", options, variables)
    assert KEY[:40] not in f"{raised.value} {raised.value.value} {raised.value.allowed}"


def test_settings_show_no_key() -> None:
    settings = Settings.build({"key": KEY}, environment={})
    assert KEY not in repr(settings) + str(settings.agreed()) + str(settings.transport())
    with pytest.raises(ConfigError):
        Settings.build({"key": KEY, "auth": "none"}, environment={})
    with pytest.raises(ConfigError):
        Settings.build({"key": KEY, "key_file": "x"}, environment={})


def meets_late(
    rank: int, world: int, through: str, late_s: float, **options: Any
) -> tuple[float, str, object]:
    """How long meeting the others took, how it failed, and what the error names."""
    options["rendezvous_timeout"] = 60
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    dist.barrier()
    time.sleep(late_s)
    begun = time.monotonic()
    try:
        if through == "backend":
            dist.new_group(backend="gradwire", pg_options=options)
        else:
            gradwire.attach(ddp, "reliable", interface="lo", **options)
    except (ConfigError, RendezvousError) as error:
        named = error.setting if isinstance(error, ConfigError) else error.ranks
        return time.monotonic() - begun, str(error), named
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize("through", ["attach", "backend"])
def test_a_bad_key_of_one_rank_is_refused_on_all_within_seconds(
    through: str, tmp_path: Path
) -> None:
    """Also on a rank that comes a second after the others have failed."""
    for name, mode in {"good": 0o600, "open": 0o644}.items():
        (tmp_path / name).write_text(KEY)
        (tmp_path / name).chmod(mode)
    per_rank = [
        {"key_file": str(tmp_path / ("open" if rank == 1 else "good")), "late_s": float(rank == 2)}
        for rank in range(3)
    ]
    with Ranks(3) as ranks:
        found = ranks.run(meets_late, through=through, per_rank=per_rank)
    seconds, texts, named = zip(*found, strict=True)
    assert max(seconds) < 10.0
    assert all("key_file=" in text and "chmod 600" in text for text in texts), texts
    assert named == ((1,), "key_file", (1,))


@pytest.mark.parametrize("given", [{"key": KEY}, {"key_file": "key"}])
def test_with_a_key_nothing_goes_over_the_hosts_network(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who drops datagrams has the gradients sent in the clear, by Gloo."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    variables = {f"GRADWIRE_{name.upper()}": value for name, value in given.items()}
    for options, environment in (
        ({**given, "on_failure": "host"}, {}),
        ({"on_failure": "host"}, variables),
        (given, {"GRADWIRE_ON_FAILURE": "host"}),
        ({}, {**variables, "GRADWIRE_ON_FAILURE": "host"}),
    ):
        with pytest.raises(ConfigError, match="beside a key") as raised:
            configure("reliable", options, environment)
        assert (raised.value.setting, raised.value.value) == ("on_failure", "host")
        assert "in the clear" in raised.value.allowed
    assert Settings.build({**given, "on_failure": "raise"}, environment={}).secret_key()
    assert Settings.build({"on_failure": "host"}, environment={}).on_failure == "host"


def test_an_engine_serves_one_key_only() -> None:
    """Else who attaches with a key would send by an older one, or in the clear."""
    store = dist.HashStore()
    for first, then in (({"key": KEY}, {"key": OTHER}), ({}, {"key": KEY})):
        with closing(members(first, first, store=store)):
            errors = members(then, then, store=store)
        for error in errors:
            assert isinstance(error, ConfigError | RendezvousError), error
            assert KEY not in str(error)
            assert OTHER not in str(error)
        assert any(getattr(error, "setting", "") in ("auth", "key") for error in errors)
        with closing(members(then, then, store=store)) as found:
            assert (sums(found)[0] == 3.0).all()


def test_ranks_that_attach_compare_their_keys_without_showing_them(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    given = [{}, {"key": KEY}, {"key_file": str(file)}, {"key": OTHER}]
    none, one, same, other = (Settings.build(each, environment={}).agreed() for each in given)
    assert one == same
    assert none["key"] is None
    assert len({none["key"], one["key"], other["key"]}) == 3


def test_a_key_is_read_once(tmp_path: Path) -> None:
    """An engine that opens later has the key of the settings, also where the file has changed."""
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    settings = Settings.build({"key_file": file}, environment={})
    file.write_text(OTHER)
    assert settings.secret_key() == bytes.fromhex(KEY)
    assert settings.transport() != Settings.build({"key_file": file}, environment={}).transport()


POOR = """
openssl_conf = all
[all]
alg_section = functions
[functions]
default_properties = fips=yes
"""
"""A configuration of OpenSSL by which its libcrypto has no function that keys need."""

SECOND_RANK = """
import sys, torch.distributed as dist
from gradwire.transport.communicator import Communicator
Communicator(dist.FileStore(sys.argv[1], -1), 1, 2, {"interface": "lo"})
"""


@pytest.fixture
def poor(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "openssl.cnf"
    file.write_text(POOR)
    return {**os.environ, "OPENSSL_CONF": str(file)}


def test_a_libcrypto_that_does_too_little_is_named_on_all_ranks(
    tmp_path: Path, poor: dict[str, str]
) -> None:
    file = str(tmp_path / "store")
    program = [sys.executable, "-c", SECOND_RANK, file]
    with subprocess.Popen(program, env=poor, stderr=subprocess.PIPE, text=True) as second:
        with pytest.raises(RendezvousError, match="libcrypto") as raised:
            Communicator(dist.FileStore(file, -1), 0, 2, {"interface": "lo"})
        _, errors = second.communicate(timeout=60)
    assert raised.value.ranks == (1,)
    assert "EngineMissingError: auth: libcrypto" in errors


def test_the_doctor_finds_a_libcrypto_that_does_too_little(poor: dict[str, str]) -> None:
    command = [sys.executable, "-c", "from gradwire.cli import main; main()", "doctor", "--json"]
    found = subprocess.run(command, env=poor, capture_output=True, text=True, check=False)
    findings = json.loads(found.stdout)["findings"]
    assert ("problem", "libcrypto") in [(each["level"], each["about"]) for each in findings]


@pytest.mark.parametrize("given", [KEY, OTHER, ""])
def test_a_server_needs_the_key_of_its_workers(given: str) -> None:
    """As `gradwire server` takes it, from GRADWIRE_KEY; another one or none is refused by name."""
    store = dist.HashStore()
    options = {"route": "server", "rendezvous_timeout": 60, "interface": "lo"}
    environment = {"GRADWIRE_KEY": given} if given else {}

    def join(endpoint: int) -> Any:
        try:
            if endpoint == 2:
                settings = Settings.build(options, environment=environment)
                return serve(store, workers=2, index=0, settings=settings)
            worker = Communicator(store, endpoint, 2, {**options, "key": KEY})
        except RendezvousError as error:
            return error
        array = np.full(100_000, endpoint + 1.0, np.float32)
        worker.all_reduce(array).wait(60)
        worker.close()
        return bool((array == 3.0).all())

    *workers, served = at_once(3, join)
    if given == KEY:
        assert workers == [True, True]
        assert served["forged"] == 0
        return
    for error in (*workers, served):
        assert isinstance(error, RendezvousError)
        assert error.ranks == (2,)
        assert "server 0" in str(error)
        assert KEY not in str(error)
        assert OTHER not in str(error)
