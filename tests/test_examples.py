"""The Slurm script and the Kubernetes manifest parse, and their parts fit together."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradwire.core.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
STATIC = ("--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port")


def options_of_torchrun() -> set[str]:
    from torch.distributed.run import get_args_parser

    return {option for action in get_args_parser()._actions for option in action.option_strings}


def test_every_example_is_on_a_page_and_has_short_lines() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    for path in sorted(EXAMPLES.iterdir()):
        if path.is_file():
            assert f"`examples/{path.name}`" in pages, path
            # A dashboard's lines are as long as its queries.
            lines = [] if path.suffix == ".json" else path.read_text().splitlines()
            assert all(len(line) <= 100 for line in lines), path


def test_the_first_example_frightens_nobody_on_one_machine(tmp_path: Path) -> None:
    """It prints no share of anything, and tries no encoding that could not win over loopback."""
    report = tmp_path / "steps.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLES / "train_ddp.py")]
    done = subprocess.run(
        [*command, "--steps", "21", "--batch", "4", "--report", str(report)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    printed = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(printed) == 3
    assert "%" not in done.stdout
    assert "on this machine" in done.stdout
    shares = [json.loads(line)["encoded_share"] for line in report.read_text().splitlines()]
    assert len(shares) == 21
    assert sum(share != 1.0 for share in shares) <= 3


def test_the_slurm_script_parses_and_calls_torchrun() -> None:
    script = EXAMPLES / "slurm.sh"
    bash = shutil.which("bash")
    assert bash is not None
    assert subprocess.run([bash, "-n", script], check=False).returncode == 0
    text = script.read_text()
    head = text.split("\nset -euo pipefail\n")[0]
    assert head.startswith("#!/bin/bash\n")
    directives = re.findall(r"^#SBATCH (--[\w-]+)", head, re.M)
    assert "--ntasks-per-node" in directives
    assert text.count("#SBATCH") == len(directives)  # below the first command Slurm reads none
    called = text.split("    torchrun\n")[1].split("\n)\n")[0]
    used = set(re.findall(r"^ +(--[\w-]+)", called, re.M))
    assert used
    assert used <= options_of_torchrun()


def test_the_slurm_script_starts_the_job_on_the_first_node(tmp_path: Path) -> None:
    """With Slurm's commands replaced by ones that say what they were given."""
    for name, body in {
        "scontrol": 'printf "node7\\n"; seq -f node%g 8 20000',  # more than a pipe holds
        "srun": 'printf "%s\\n" "srun $*"',
    }.items():
        command = tmp_path / name
        command.write_text(f"#!/bin/bash\n{body}\n")
        command.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "123456",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", EXAMPLES / "slurm.sh"], env=variables, text=True, capture_output=True, check=True
    )
    doctor, train = done.stdout.splitlines()
    assert doctor.endswith("--rdzv-endpoint node7:23456 -m gradwire.cli doctor")
    for part in ("--nnodes 2", "--nproc-per-node 4", "--rdzv-id 123456"):
        assert part in train
    path, folder = train.split()[-2:]
    assert Path(path).is_file()
    assert folder == f"{tmp_path}/gradwire-123456"


def manifest() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))
    assert all({"apiVersion", "kind", "metadata", "spec"} <= set(each) for each in found)
    kinds = {each["kind"]: each for each in found}
    assert len(kinds) == len(found)
    return kinds


def test_the_pods_of_the_manifest_find_each_other() -> None:
    kinds = manifest()
    service, job = kinds["Service"], kinds["Job"]
    assert (service["apiVersion"], job["apiVersion"]) == ("v1", "batch/v1")
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": name}  # Kubernetes labels a Job's pods so
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert pod["restartPolicy"] in ("Never", "OnFailure")  # what a Job allows
    assert pod["enableServiceLinks"] is False  # variables GRADWIRE_… of Services are no settings
    (container,) = pod["containers"]
    command = container["command"]
    given = dict(part.split("=") for part in command if part.startswith("--"))
    assert command[0] == "torchrun"
    assert tuple(given) == STATIC
    assert set(given) <= options_of_torchrun()
    assert given["--nnodes"] == str(spec["completions"])
    assert given["--node-rank"] == "$(JOB_COMPLETION_INDEX)"
    assert given["--master-addr"] == f"{name}-0.{pod['subdomain']}"
    assert (ROOT / command[-2]).is_file()
    (port,) = container["ports"]
    assert given["--master-port"] == str(port["containerPort"])
    assert port["containerPort"] in [each["port"] for each in service["spec"]["ports"]]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert mounts["saves"] == command[-1]


def test_the_manifest_lets_pass_what_gradwire_sends_and_nothing_from_outside() -> None:
    kinds = manifest()
    pod = kinds["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    ours = {name: value for name, value in variables.items() if name.startswith("GRADWIRE_")}
    settings = Settings.build({}, environment=ours)
    assert set(ours) == {"GRADWIRE_PORT"}
    policy = kinds["NetworkPolicy"]["spec"]
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": policy["podSelector"]}]
    udp = next(each for each in rule["ports"] if each["protocol"] == "UDP")
    assert range(udp["port"], udp["endPort"] + 1) == settings.ports
    # A sysctl that has no namespace of its own would keep the pod from starting.
    assert "sysctls" not in pod.get("securityContext", {})
    assert container["securityContext"]["capabilities"]["add"] == ["NET_ADMIN"]
