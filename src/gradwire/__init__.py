"""Bounded-loss gradient transport for data-parallel PyTorch training."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradwire import policies
    from gradwire.calibration.calibrate import calibrate
    from gradwire.core.errors import ConfigError, GradwireError, RendezvousError, TransferError
    from gradwire.core.plan import TransferPlan
    from gradwire.core.report import StepReport
    from gradwire.core.settings import Settings
    from gradwire.core.transfer_report import TransferReport
    from gradwire.training.attach import Attachment, attach
    from gradwire.training.hook import HookState, comm_hook
    from gradwire.transport.communicator import Communicator
    from gradwire.transport.transfer import Handle

# Each public name with its module, which loads on first use, so that `gradwire --version` and the
# other light commands do not wait for torch.
_PUBLIC = {
    "Attachment": "gradwire.training.attach",
    "Communicator": "gradwire.transport.communicator",
    "ConfigError": "gradwire.core.errors",
    "GradwireError": "gradwire.core.errors",
    "Handle": "gradwire.transport.transfer",
    "HookState": "gradwire.training.hook",
    "RendezvousError": "gradwire.core.errors",
    "Settings": "gradwire.core.settings",
    "StepReport": "gradwire.core.report",
    "TransferError": "gradwire.core.errors",
    "TransferPlan": "gradwire.core.plan",
    "TransferReport": "gradwire.core.transfer_report",
    "attach": "gradwire.training.attach",
    "calibrate": "gradwire.calibration.calibrate",
    "comm_hook": "gradwire.training.hook",
}

__all__ = [
    "Attachment",
    "Communicator",
    "ConfigError",
    "GradwireError",
    "Handle",
    "HookState",
    "RendezvousError",
    "Settings",
    "StepReport",
    "TransferError",
    "TransferPlan",
    "TransferReport",
    "__version__",
    "attach",
    "calibrate",
    "comm_hook",
    "policies",
]


def _name_the_speaker(record: logging.LogRecord) -> bool:
    """Begins a line with "gradwire: " where logging is not set up and prints it alone."""
    alone = not logging.getLogger("gradwire").hasHandlers()
    if alone and not str(record.msg).startswith("gradwire"):
        record.msg = f"gradwire: {record.msg}"
    return True


logging.getLogger("gradwire").addFilter(_name_the_speaker)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    if name == "policies":
        return import_module("gradwire.policies")
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
