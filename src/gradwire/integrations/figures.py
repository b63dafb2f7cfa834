"""What callbacks log of a step."""

from __future__ import annotations

from gradwire.training.attach import Attachment

__all__ = ["figures"]


def figures(attachment: Attachment) -> dict[str, float]:
    """Returns the figures of the last completed step, by the names under which they are logged."""
    report = attachment.report()
    return {
        "gradwire/delivered": report.delivered,
        "gradwire/bound": report.bound,
        "gradwire/megabytes": report.bytes / 1e6,
        "gradwire/comm_s": report.comm_s,
        "gradwire/exposed_s": report.exposed_s,
    }
