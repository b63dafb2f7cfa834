"""Files with the state that each rank keeps beside a checkpoint of the model."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.core.errors import ConfigError
from gradwire.training.attach import Attachment

__all__ = ["load", "save"]

log = logging.getLogger("gradwire")


def save(attachment: Attachment, folder: str | os.PathLike[str]) -> None:
    """Writes this rank's state of an attachment into the folder of a checkpoint; on every rank."""
    path = _path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(attachment.state_dict(), path)


def load(attachment: Attachment, folder: str | os.PathLike[str]) -> None:
    """Restores what `save` wrote; on every rank. A folder without any such file changes nothing.

    Args:
        attachment: The attachment.
        folder: The folder of the checkpoint, which may be another one on each host.

    Raises:
        ConfigError: Only some ranks have a file, or files are of another number of ranks.
    """
    path = _path(folder)
    if path.is_file():
        found = "own"
    else:
        found = "other" if any(path.parent.glob("gradwire-*.pt")) else "none"
    everybody = [found] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    if all(each == "own" for each in everybody):
        attachment.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return
    if any(each != "none" for each in everybody):
        lacking = [rank for rank, each in enumerate(everybody) if each != "own"]
        raise ConfigError.about(
            f"checkpoint {str(folder)!r} has no state of gradwire for ranks {lacking} of "
            f"{len(everybody)}",
            "start as many ranks as saved it, each with its own file; or remove the files "
            "gradwire-*.pt, with which what they owe is lost",
            setting="folder",
            value=str(folder),
        )
    if dist.get_rank() == 0:
        log.warning("%s has no state of gradwire: nothing is owed from before", folder)


def _path(folder: str | os.PathLike[str]) -> Path:
    return Path(folder) / f"gradwire-{dist.get_rank()}-of-{dist.get_world_size()}.pt"
