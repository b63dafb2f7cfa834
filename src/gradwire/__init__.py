"""Bounded-loss gradient transport for data-parallel PyTorch training."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public names and the modules they live in. They load on first use, so that `gradwire --version`
# and the other light commands do not wait for torch.
_PUBLIC = {
    "attach": "gradwire.ddp",
    "comm_hook": "gradwire.ddp",
    "Communicator": "gradwire.communicator",
}

__all__ = ["Communicator", "__version__", "attach", "comm_hook"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    if name == "policies":
        return import_module("gradwire.policies")
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
