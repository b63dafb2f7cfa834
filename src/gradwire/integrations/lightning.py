"""`GradwireCallback` for Lightning's Trainer.

lightning.Trainer(strategy="ddp", callbacks=[GradwireCallback()])
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from gradwire.core.errors import ConfigError
from gradwire.integrations.figures import figures
from gradwire.policies import Policy
from gradwire.training.attach import Attachment, attach

try:
    from lightning.pytorch import Callback
except ImportError:  # the distribution of Lightning's trainer alone
    from pytorch_lightning import Callback

__all__ = ["GradwireCallback"]


class GradwireCallback(Callback):
    """Attaches gradwire to the DDP module of the strategy, logs its report, saves its state.

    Checkpoints hold the states of all ranks, which rank 0 gathers, since it alone writes them. A
    trainer of one process makes no DDP module and is left alone.

    Args:
        policy: As for `gradwire.attach`.
        resume: Whether a run that goes on from a checkpoint takes over what the ranks owe there.
        **options: As for `gradwire.attach`.

    Attributes:
        attachment: The attachment while the trainer trains; None before, and of one process.
    """

    def __init__(
        self, policy: str | Policy | None = None, *, resume: bool = True, **options: Any
    ) -> None:
        self.attachment: Attachment | None = None
        self._policy = policy
        self._resume = resume
        self._options = options
        self._saved: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attaches, and restores the state of a checkpoint."""
        if trainer.world_size == 1:
            return
        self.attachment = attach(
            trainer.strategy.model,
            self._policy,
            optimizer=trainer.optimizers,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            **self._options,
        )
        saved, self._saved = self._saved, []
        if not saved or not self._resume:
            return
        if len(saved) != trainer.world_size:
            raise ConfigError.about(
                f"the checkpoint has the states of {len(saved)} ranks, and {trainer.world_size} "
                "train",
                "start as many ranks as saved it; or give GradwireCallback(resume=False), with "
                "which what they owe is lost",
                setting="resume",
                value=self._resume,
            )
        self.attachment.load_state_dict(saved[trainer.global_rank])

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Notes that an epoch begins."""
        if self.attachment is not None:
            self.attachment.epoch(trainer.current_epoch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Logs the report of the step."""
        if self.attachment is not None and self.attachment.step:
            pl_module.log_dict(figures(self.attachment))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detaches."""
        if self.attachment is not None:
            self.attachment.detach()

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all ranks on rank 0; Lightning calls it on every rank."""
        if self.attachment is None:
            return {}
        ranks = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(self.attachment.state_dict(), ranks)
        return {"ranks": ranks or []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the states until the trainer attaches."""
        self._saved = state_dict.get("ranks", [])
