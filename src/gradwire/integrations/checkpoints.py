"""Files with the state that each rank keeps beside a checkpoint of the model."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.core.errors import ConfigError
from gradwire.training.attach import Attachment

log = logging.getLogger("gradwire")


def save(attachment: Attachment, folder: str | os.PathLike[str]) -> None:
    """Writes this rank's state of an attachment into the folder of a checkpoint; on every rank."""
    path = Path(folder, file_name())
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
    path = Path(folder, file_name())
    if path.is_file():
        found = "own"
    else:
        found = "other" if any(path.parent.glob("gradwire-*.pt")) else "none"
    if find(found, folder, "remove the files gradwire-*.pt"):
        attachment.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    elif dist.get_rank() == 0:
        log.warning("%s has no state of gradwire: nothing is owed from before", folder)


def file_name() -> str:
    """Returns the name of this rank's file."""
    return f"gradwire-{dist.get_rank()}-of-{dist.get_world_size()}.pt"


def find(found: str, checkpoint: str | os.PathLike[str], instead: str) -> bool:
    """Returns whether every rank has its file of a checkpoint; on every rank.

    Args:
        found: "own" for this rank's file, "other" for those of others, "none" for none at all.
        checkpoint: The checkpoint, for the error.
        instead: What to do without the files, for the error.

    Raises:
        ConfigError: Some ranks have none, and there are some.
    """
    everybody = [found] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    lacking = [rank for rank, each in enumerate(everybody) if each != "own"]
    if lacking and any(each != "none" for each in everybody):
        raise ConfigError.about(
            f"checkpoint {str(checkpoint)!r} has no state of gradwire for ranks {lacking} of "
            f"{len(everybody)}",
            f"start as many ranks as saved it, each with its own file; or {instead}, with which "
            "what they owe is lost",
            setting="checkpoint",
            value=str(checkpoint),
        )
    return not lacking
