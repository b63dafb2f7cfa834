"""The entry point that every `import torch` calls: it makes the backend "gradwire" known.

torch passes on whatever an entry point raises, so an error here would break `import torch` itself.
An installation that cannot register is warned of instead.
"""

import warnings


def register() -> None:
    """Registers the backend "gradwire" with torch.distributed; warns where that fails."""
    try:
        import gradwire.process_group  # noqa: F401  (registers)
    except Exception as error:
        warnings.warn(
            f'gradwire could not register its torch.distributed backend "gradwire": {error!r}; '
            "install gradwire again, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to go without it",
            stacklevel=2,
        )
