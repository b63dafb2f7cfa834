"""What callbacks log of a step."""

from __future__ import annotations

from gradwire import exports
from gradwire.training.attach import Attachment

LOGGED = ("delivered", "bound", "megabytes", "comm_s", "exposed_s")


def figures(attachment: Attachment) -> dict[str, float]:
    """Returns the figures of the last completed step, by the names under which they are logged."""
    return exports.figures(attachment.report(), LOGGED)
