"""Bounded-loss gradient transport for data-parallel PyTorch training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradwire import policies
    from gradwire.calibration import calibrate
    from gradwire.communicator import Communicator, Handle
    from gradwire.ddp import Attachment, attach
    from gradwire.errors import ConfigError, GradwireError, RendezvousError, TransferError
    from gradwire.hook import HookState, comm_hook
    from gradwire.plans import TransferPlan, TransferReport
    from gradwire.settings import Settings
    from gradwire.telemetry import StepReport

# Public names and the modules they live in. They load on first use, so that `gradwire --version`
# and the other light commands do not wait for torch.
_PUBLIC = {
    "Attachment": "gradwire.ddp",
    "Communicator": "gradwire.communicator",
    "ConfigError": "gradwire.errors",
    "GradwireError": "gradwire.errors",
    "Handle": "gradwire.communicator",
    "HookState": "gradwire.hook",
    "RendezvousError": "gradwire.errors",
    "Settings": "gradwire.settings",
    "StepReport": "gradwire.telemetry",
    "TransferError": "gradwire.errors",
    "TransferPlan": "gradwire.plans",
    "TransferReport": "gradwire.plans",
    "attach": "gradwire.ddp",
    "calibrate": "gradwire.calibration",
    "comm_hook": "gradwire.hook",
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


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    if name == "policies":
        return import_module("gradwire.policies")
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
