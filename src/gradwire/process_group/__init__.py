"""The torch.distributed backend "gradwire": `dist.init_process_group("gradwire")`.

Importing this package registers the backend. torch does so by itself through an entry point
(`gradwire.autoload`), unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches entry points off. Nothing
else of gradwire is imported before a process group is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from gradwire.process_group.backend import GradwireBackend
    from gradwire.process_group.group import GradwireGroup

__all__ = ["BACKEND", "register"]

BACKEND = "gradwire"
"""The backend's name."""


def register() -> None:
    """Registers the backend with torch.distributed, where torch was built with it. Idempotent."""
    if dist.is_available() and BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, pg_options: object) -> GradwireGroup | GradwireBackend:
    from gradwire.process_group.create import create

    return create(options, pg_options)


register()
