"""`GradwireCallback` for Lightning's Trainer.

lightning.Trainer(strategy="ddp", callbacks=[GradwireCallback()])
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from gradwire.core.errors import ConfigError
from gradwire.core.rank_state import read_rank
from gradwire.exports.figures import LOGGED, figures
from gradwire.integrations import checkpoints
from gradwire.policies import Policy
from gradwire.training.attach import Attachment, attach

try:
    from lightning.pytorch import Callback
except ImportError:  # the distribution of Lightning's trainer alone
    from pytorch_lightning import Callback


class GradwireCallback(Callback):
    """Attaches gradwire to the DDP module of the strategy, logs its report, saves its state.

    Each rank writes its own state beside each checkpoint, into last.ckpt.gradwire-0-of-2.pt or the
    like, when Lightning writes that checkpoint, and removes it together with it. A trainer of one
    process makes no DDP module and is left alone. However a fit ends, the module is detached.

    Args:
        policy: As for `gradwire.attach`.
        resume: Whether a run that goes on from a checkpoint takes over what the ranks owe there.
        **options: As for `gradwire.attach`.

    Attributes:
        attachment: The attachment of the last fit, which is detached when that ends; None before,
            and of one process.
    """

    def __init__(
        self, policy: str | Policy | None = None, *, resume: bool = True, **options: Any
    ) -> None:
        self.attachment: Attachment | None = None
        self._policy = policy
        self._resume = resume
        self._options = options
        self._saved: dict[str, Any] = {}
        self._strategy: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Prepares for a fit, before a checkpoint is read."""
        if stage == "fit":
            self._saved = {}
            if self._strategy is not trainer.strategy:
                self._strategy = trainer.strategy
                self._write_beside(trainer.strategy)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attaches, and restores the state of a checkpoint."""
        self._detach()
        self.attachment = None
        if trainer.world_size == 1:
            return
        self.attachment = attach(
            trainer.strategy.model,
            self._policy,
            optimizer=trainer.optimizers,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            **self._options,
        )
        if self._saved and self._resume:
            self._restore(trainer, self.attachment)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Notes that an epoch begins."""
        if self.attachment is not None:
            self.attachment.epoch(trainer.current_epoch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Logs the report of the step."""
        if self.attachment is not None and self.attachment.step:
            pl_module.log_dict(figures(self.attachment.report(), LOGGED))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detaches."""
        self._detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detaches, so that the other ranks learn at once that this one goes no further."""
        self._detach()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detaches, where the fit was given up in another way."""
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """Returns which files belong to the checkpoint; no call of other ranks is needed."""
        if self.attachment is None:
            return {}
        return {"step": self.attachment.step, "ranks": dist.get_world_size()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps what `state_dict` returned until the trainer attaches."""
        self._saved = state_dict

    def _detach(self) -> None:
        if self.attachment is not None:
            self.attachment.detach()

    def _write_beside(self, strategy: Any) -> None:
        """Makes a strategy write and remove this rank's file together with each checkpoint.

        No hook of Lightning's knows where a checkpoint is written.
        """
        save, remove = strategy.save_checkpoint, strategy.remove_checkpoint

        def save_both(checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
            save(checkpoint, filepath, storage_options=storage_options)
            if self.attachment is not None and checkpoint.get("callbacks", {}).get(self.state_key):
                strategy.checkpoint_io.save_checkpoint(
                    self.attachment.state_dict(), _beside(filepath), storage_options=storage_options
                )

        def remove_both(filepath: Any) -> None:
            remove(filepath)
            if self.attachment is not None:
                strategy.checkpoint_io.remove_checkpoint(_beside(filepath))

        strategy.save_checkpoint, strategy.remove_checkpoint = save_both, remove_both

    def _restore(self, trainer: Any, attachment: Attachment) -> None:
        """Takes over this rank's state of the checkpoint that the trainer goes on from."""
        ranks = self._saved.get("ranks")
        if ranks != trainer.world_size:
            raise ConfigError.about(
                f"the checkpoint has the states of {ranks} ranks, and {trainer.world_size} train",
                "start as many ranks as saved it; or give GradwireCallback(resume=False), with "
                "which what they owe is lost",
                setting="resume",
                value=self._resume,
            )
        path = os.fspath(trainer.ckpt_path)
        path = os.path.realpath(path) if os.path.islink(path) else path
        try:
            saved = trainer.strategy.checkpoint_io.load_checkpoint(_beside(path))
        except FileNotFoundError:
            saved = None
        state, _ = read_rank(saved, trainer.global_rank, trainer.world_size)
        belongs = isinstance(state, dict) and state.get("step", 0) == self._saved["step"]
        checkpoints.find("own" if belongs else "other", path, "give GradwireCallback(resume=False)")
        attachment.load_state_dict(saved)


def _beside(filepath: str | os.PathLike[str]) -> str:
    """Returns the path of this rank's file of a checkpoint."""
    return f"{os.fspath(filepath)}.{checkpoints.file_name()}"
