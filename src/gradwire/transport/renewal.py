"""How the workers of a communicator get another engine, and leave the one that has failed."""

from __future__ import annotations

import weakref
from typing import Any

from gradwire.transport.communicator import Communicator
from gradwire.transport.meeting import Meeting


def alike(communicator: Communicator, **engine: Any) -> Communicator:
    """Makes a communicator of the same workers and settings.

    Args:
        engine: Its engine, or the meeting in which the workers open one, as `Communicator` takes
            them.
    """
    return Communicator(
        communicator.store,
        communicator.rank,
        communicator.world_size,
        communicator.settings,
        group=communicator._group,
        timeout_s=communicator.timeout_s,
        timeout_from=communicator._timeout_from,
        ranks=communicator.ranks,
        **engine,
    )


def renewed(communicator: Communicator, meeting: Meeting, user: str) -> Communicator:
    """Opens another engine with the workers, and takes a number of it; collective.

    Args:
        communicator: The communicator whose engine has failed.
        meeting: A meeting of the workers.
        user: What it serves, for warnings.

    Returns:
        A communicator over that engine, for `take_over`.
    """
    fresh = alike(communicator, meeting=meeting)
    try:
        fresh.take_number(meeting, user)
    except BaseException:
        fresh.let_go()
        raise
    return fresh


def take_over(communicator: Communicator, fresh: Communicator) -> None:
    """Leaves a communicator's engine for that of another one, which is not used any more.

    All workers do so between the same two transfers.
    """
    assert communicator.engine is not None
    assert fresh.engine is not None
    if communicator._forget.detach() is not None:
        communicator.engine.leave()
    fresh._forget.detach()
    communicator.engine, communicator._lane = fresh.engine, fresh._lane
    communicator.start_queue = fresh.start_queue
    communicator._plans.clear()
    communicator._grids.clear()
    communicator._forget = weakref.finalize(communicator, communicator.engine.forget)
    communicator._forget.atexit = False
