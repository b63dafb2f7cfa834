"""Policy "off" leaves the module to torch, which averages gradients over its process group.

The ranks still meet once, since a rank that is off would leave the others waiting.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch.distributed as dist

from gradwire.core.agreed import Phase
from gradwire.core.environment import from_environment
from gradwire.core.errors import GradwireError
from gradwire.core.report import StepReport
from gradwire.core.settings import Settings
from gradwire.policies import Policy
from gradwire.policies.registry import OFF
from gradwire.policies.reliable import Reliable
from gradwire.training.groups import Group
from gradwire.transport.introductions import agree

log = logging.getLogger("gradwire")


@dataclass
class Off(Reliable):
    """What attachments and reports name as their policy where gradwire is off."""

    name: ClassVar[str] = OFF


def switched_off(policy: str | Policy | None) -> bool:
    """Returns whether the policy is "off", or GRADWIRE_POLICY is, which wins over any policy."""
    read = from_environment({"policy": str}).get("policy")
    return read == OFF or isinstance(policy, Off) or (isinstance(policy, str) and policy == OFF)


def agree_off(process_group: dist.ProcessGroup | None, options: Mapping[str, object]) -> None:
    """Checks that gradwire is off on all ranks of a group; collective."""
    group = Group.of(process_group)
    waits = {name: value for name, value in options.items() if name == "rendezvous_timeout"}
    meeting = group.meeting("attach", 0.0)
    try:
        settings = Settings.build(waits)
        meeting = group.meeting("attach", settings.rendezvous_timeout)
        agree(meeting, {"policy": OFF})
    except BaseException as error:
        meeting.tell_failure(error)
        raise
    meeting.close()
    if group.rank == 0:
        _say_once()


@functools.cache
def _say_once() -> None:
    log.warning("gradwire is off (policy='off'): torch averages gradients itself")


def owed_nothing(state: Mapping[Any, Any]) -> bool:
    """Returns whether a saved state was made while gradwire was off, so holds nothing."""
    policy = state.get("policy")  # anything at all in a damaged state, such as an array
    return isinstance(policy, str) and policy == OFF


class LeftAlone:
    """Stands in for the hook's state and the pipeline of an attachment while gradwire is off.

    What an attachment is asked for has the value of an exact transfer that moved nothing, and what
    it is given is dropped.
    """

    number = -1
    step = 0
    phase: Phase = "critical"
    grad_scale = 1.0
    flush_pending = False

    def __init__(
        self, process_group: dist.ProcessGroup | None, options: Mapping[str, object]
    ) -> None:
        agree_off(process_group, options)
        self.policy: Policy = Off()
        self._rank = dist.get_rank()

    @property
    def communicator(self) -> NoReturn:
        raise GradwireError("gradwire is off (policy='off'): there is no communicator")

    def counters(self) -> dict[str, float]:
        return {}

    def report(self) -> StepReport:
        return StepReport(step=0, rank=self._rank, policy=OFF, phase=self.phase)

    def _drop(self, *_: object) -> None:
        """Does nothing: there is nothing to decide, and nothing to deliver."""

    set_phase = set_grad_scale = begin_epoch = add_loss = flush = deactivate = _drop

    def state_dict(self) -> dict[str, object]:
        """Returns a state that holds nothing; every policy loads it as a fresh start."""
        return {"policy": OFF}

    def load_state_dict(
        self, state: object, *, strict: bool = True, owner: str | None = None
    ) -> None:
        """Drops a state, since nothing that is owed can be delivered."""
        if not isinstance(state, Mapping) or not owed_nothing(state):
            log.warning("gradwire is off (policy='off'): the state that was loaded is dropped")
