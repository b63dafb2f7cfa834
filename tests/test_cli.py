"""The command `gradwire` itself: its page of help, mistyped names, completion; and what Python's
own tools show of the package."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import gradwire
from gradwire import cli

RUNNER = CliRunner()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        [],
        ["doktor"],
        ["top", "-1", "none"],
        *([name, "--help"] for name in cli.OWN),
    ],
    ids=" ".join,
)
def test_what_needs_no_torch_imports_none(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from gradwire.cli import app\n"
        "try:\n"
        f"    app({arguments!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("setup", "line"),
    [
        ("", "gradwire: rank 1 waits\n"),
        ("logging.basicConfig()", "WARNING:gradwire:rank 1 waits\n"),
    ],
)
def test_a_line_of_the_log_says_who_speaks(setup: str, line: str) -> None:
    line_of = "logging.getLogger('gradwire').warning('rank %d waits', 1)"
    program = f"import logging, gradwire\n{setup}\n{line_of}"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stderr == line


def test_each_line_of_help_is_the_commands_own() -> None:
    group = typer.main.get_command(cli.app)
    assert isinstance(group, cli.LazyCommands)
    lines = {**cli.LAB, **{name: line for name, (_, line) in cli.OWN.items()}}
    for name, line in lines.items():
        command = group.get_command(None, name)
        assert " ".join(command.help.split("\n\n")[0].split()) == line
    shown = RUNNER.invoke(cli.app, ["--help"]).stdout
    assert [name for name in lines if f" {name} " not in shown] == []


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["doktor"], "doctor"),
        (["sever"], "server"),
        (["bench", "nett"], "net"),
        (["server", "--worker", "2"], "--workers"),
    ],
)
def test_a_mistyped_name_gets_a_suggestion(arguments: list[str], meant: str) -> None:
    result = RUNNER.invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert meant in result.output


def test_shells_complete_commands_and_options() -> None:
    def completions(words: str, index: int) -> list[str]:
        env = {
            **os.environ,
            "_GRADWIRE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(index),
        }
        command = [sys.executable, "-m", "gradwire.cli"]
        ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return ran.stdout.split()

    assert completions("gradwire se", 1) == ["server"]
    assert "--workers" in completions("gradwire server --w", 2)


def test_dir_shows_the_public_names() -> None:
    assert dir(gradwire) == sorted(gradwire.__all__)
    assert all(getattr(gradwire, name) is not None for name in dir(gradwire))
