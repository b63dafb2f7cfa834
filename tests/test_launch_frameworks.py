"""The examples for frameworks run, go on from their checkpoints, and move what gradwire owes."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from own_state import own_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
EAGER = {"GRADWIRE_POLICY": "mlt", "GRADWIRE_P": "0.05", "GRADWIRE_ERROR_FEEDBACK": "true"}
"""A policy that leaves something out on a quiet network, too, and owes it."""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def needs(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed (pip install '.[integrations]')")


def python(*arguments: object, **variables: str) -> str:
    """Runs this Python; returns its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRADWIRE_")}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**kept, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def check_states(states: list[dict[str, Any]], steps: int) -> None:
    """Raises unless the states of both ranks owe something after so many steps."""
    assert len(states) == 2
    assert [state["step"] for state in states] == [steps] * 2
    owed = [torch.cat(list(state["residuals"].values())) for state in states]
    assert all(each.any() for each in owed)
    assert not torch.equal(*owed)


def files(folder: Path) -> list[dict[str, Any]]:
    return [own_state(torch.load(folder / f"gradwire-{rank}-of-2.pt")) for rank in (0, 1)]


def test_transformers(tmp_path: Path) -> None:
    needs("transformers")
    run = (*TORCHRUN, EXAMPLES / "train_transformers.py", tmp_path)
    python(*run, "--steps", 4, **EAGER)
    check_states(files(tmp_path / "checkpoint-4"), 4)
    output = python(*run, "--steps", 8, "--resume", **EAGER)
    check_states(files(tmp_path / "checkpoint-8"), 8)  # it went on from step 4
    assert "'loss': " in output  # the Trainer's own lines are still there
    state = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    delivered = [
        line["gradwire/delivered"] for line in state["log_history"] if "gradwire/delivered" in line
    ]
    assert len(delivered) == 4
    assert all(0.9 < share < 1.0 for share in delivered)
    # With another number of ranks what is owed belongs to nobody.
    (tmp_path / "checkpoint-8" / "gradwire-1-of-2.pt").unlink()
    with pytest.raises(AssertionError, match=r"no state of gradwire for ranks \[1\] of 2"):
        python(*run, "--steps", 12, "--resume", **EAGER)


def test_transformers_left_alone(tmp_path: Path) -> None:
    """One process, and gradwire switched off."""
    needs("transformers")
    example = EXAMPLES / "train_transformers.py"
    assert "gradwire/delivered" not in python(example, tmp_path / "one", "--steps", 2)
    run = (*TORCHRUN, example, tmp_path / "off", "--steps", 4)
    output = python(*run, GRADWIRE_POLICY="off")
    assert "gradwire is off" in output
    assert "'gradwire/delivered': '1'" in output


def test_lightning(tmp_path: Path) -> None:
    needs("lightning")
    example = EXAMPLES / "train_lightning.py"
    for epochs, more in ((2, []), (4, ["--resume"])):
        python(example, tmp_path, "--epochs", epochs, *more, **EAGER)
        names = [tmp_path / f"last.ckpt.gradwire-{rank}-of-2.pt" for rank in (0, 1)]
        check_states([own_state(torch.load(name)) for name in names], 4 * epochs)
    with (tmp_path / "lightning_logs" / "version_4" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [9, 11, 13, 15]
    assert all(0.9 < float(row["gradwire/delivered"]) < 1.0 for row in rows)


def test_accelerate(tmp_path: Path) -> None:
    """Compiled from the checkpoint on, which fits the module as it is."""
    needs("accelerate")
    run = (*TORCHRUN, EXAMPLES / "train_accelerate.py", tmp_path)
    for steps, more in ((4, []), (8, ["--resume", "--compile"])):
        output = python(*run, *more, **EAGER)
        check_states(files(tmp_path), steps)
        assert output.count(", waited ") == 4


RAY = """
import runpy, sys
import ray
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=2)
ray.init(address=cluster.address)
example = runpy.run_path(sys.argv[1])
result = example["train"](sys.argv[2])
print("result", result.checkpoint.path, flush=True)
ray.shutdown()
cluster.shutdown()
"""


def test_ray_train_on_two_nodes(tmp_path: Path) -> None:
    needs("ray")
    (tmp_path / "cluster.py").write_text(RAY)
    example = EXAMPLES / "train_ray.py"
    patient = {"RAY_raylet_start_wait_time_s": "240", "RAY_USAGE_STATS_ENABLED": "0"}
    output = python(tmp_path / "cluster.py", example, tmp_path, **patient, **EAGER)
    (line,) = [line for line in output.splitlines() if line.startswith("result ")]  # of many
    check_states(files(Path(line.split()[1])), 6)
