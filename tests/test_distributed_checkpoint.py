"""States of attached modules go through torch's distributed checkpoint, each rank's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from ddp_jobs import model, train, wrap
from own_state import own_state, same
from ranks import Ranks

LOSSY: dict[str, Any] = {"policy": "mlt", "p": 0.4, "spend": "anything", "error_feedback": True}
ADAPTIVE: dict[str, Any] = {"policy": "adaptive", "p_low": 0.3, "error_feedback": True}
sharded = pytest.mark.skipif(
    torch.__version__ < "2.9", reason="attach takes modules under fully_shard from torch 2.9 on"
)


def attached(kind: str, options: dict[str, Any]) -> tuple[Any, gradwire.Attachment]:
    if kind == "ddp":
        net: Any = wrap(model())
    else:
        net = fully_shard(model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net, gradwire.attach(net, **options)


def owes(state: dict[str, Any]) -> bool:
    return any(bool(values.any()) for values in state["residuals"].values())


def goes_through(
    rank: int, world: int, kind: str, options: dict[str, Any], given: str, warm: int, folder: str
) -> dict[str, Any]:
    """Saves after some steps, trains on, and loads into another attachment."""
    net, attachment = attached(kind, options)
    train(net, rank, range(6))
    kept = own_state(attachment.state_dict())
    assert owes(kept) or options == ADAPTIVE  # which may lose nothing in so few steps
    if given == "later":
        group: Any = dist.new_group(backend="gloo")
        content = {"model": net.state_dict(), "gradwire": attachment}
        saving: Any = dcp.async_save(content, checkpoint_id=folder, process_group=group)
        train(net, rank, range(6, 9))
        saving.result()
    else:
        saved = attachment if given == "itself" else attachment.state_dict()
        dcp.save({"model": net.state_dict(), "gradwire": saved}, checkpoint_id=folder)
    attachment.detach()
    net, attachment = attached(kind, options)
    train(net, rank, range(warm))
    if given == "its state":
        content = {"model": net.state_dict(), "gradwire": attachment.state_dict()}
        dcp.load(content, checkpoint_id=folder)
        attachment.load_state_dict(content["gradwire"])
    else:
        dcp.load({"model": net.state_dict(), "gradwire": attachment}, checkpoint_id=folder)
    assert same(own_state(attachment.state_dict()), kept)
    assert attachment.step == 6
    train(net, rank, range(6, 8))
    attachment.detach()
    return kept


@pytest.mark.parametrize(
    ("kind", "options", "given", "warm"),
    [
        ("ddp", LOSSY, "itself", 0),
        ("ddp", LOSSY, "its state", 2),
        ("ddp", LOSSY, "later", 0),
        ("ddp", ADAPTIVE, "itself", 2),
        pytest.param("fsdp", LOSSY, "itself", 0, marks=sharded),
    ],
)
def test_each_ranks_state_comes_back_to_the_bit(
    two: Ranks, tmp_path: Path, kind: str, options: dict[str, Any], given: str, warm: int
) -> None:
    arguments = {"kind": kind, "options": options, "given": given, "warm": warm}
    first, second = two.run(goes_through, **arguments, folder=str(tmp_path))
    assert options == ADAPTIVE or not same(first["residuals"], second["residuals"])


def meets_others(rank: int, world: int, folder: str) -> None:
    """Every rank reads what rank 0 saved, or what other numbers of ranks did."""
    net, attachment = attached("ddp", LOSSY)
    train(net, rank, range(3))
    owing = attachment.state_dict()
    attachment.flush()
    train(net, rank, range(3, 5))
    flushed = attachment.state_dict()
    for number, state in enumerate((owing, flushed)):
        if rank == 0:
            torch.save(state, Path(folder, f"{number}.pt"))
    more = {"ranks": 3, f"rank {rank} of 3": (own_state(owing),)}
    dcp.save({"gradwire": more}, checkpoint_id=f"{folder}/more")
    attachment.detach()

    net, attachment = attached("ddp", LOSSY)
    before = own_state(attachment.state_dict())
    zeros = {name: torch.zeros_like(v) for name, v in own_state(owing)["residuals"].items()}
    lucky = {**own_state(owing), "residuals": zeros}  # another rank owes all the same
    theirs = torch.load(Path(folder, "0.pt"), weights_only=True)
    refused: list[tuple[Any, str]] = [
        ({"ranks": 3, "rank 2 of 3": (own_state(owing),)}, "rank 2 of 3"),
        ({"ranks": 3, "rank 2 of 3": (lucky,)}, "rank 2 of 3"),
    ]
    if rank == 0:
        attachment.load_state_dict(theirs)
        attachment.load_state_dict(flushed)
    else:
        refused.append((theirs, "rank 0 of 2"))
    step = attachment.step
    for state, owner in refused:
        with pytest.raises(gradwire.ConfigError) as raised:
            attachment.load_state_dict(state)
        assert (raised.value.setting, raised.value.value) == ("state", owner)
    with pytest.raises(dcp.CheckpointException, match=f"rank {rank} of 2"):
        dcp.load({"gradwire": attachment}, checkpoint_id=f"{folder}/more")
    part = DefaultLoadPlanner(allow_partial_load=True)
    with pytest.raises(gradwire.ConfigError) as raised:
        dcp.load({"gradwire": attachment}, checkpoint_id=f"{folder}/more", planner=part)
    assert raised.value.setting == "state"
    assert attachment.step == step
    assert rank == 0 or same(own_state(attachment.state_dict()), before)

    attachment.load_state_dict(torch.load(Path(folder, "1.pt"), weights_only=True))
    attachment.load_state_dict({"ranks": 3, "rank 2 of 3": (own_state(flushed),)})
    assert attachment.step == 5
    train(net, rank, range(5, 7))
    assert attachment.step == 7
    attachment.detach()


def test_another_ranks_state_is_refused_unless_nothing_was_owed(two: Ranks, tmp_path: Path) -> None:
    two.run(meets_others, folder=str(tmp_path))
