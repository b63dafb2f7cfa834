"""`GradwireCallback` for transformers' Trainer.

trainer.add_callback(GradwireCallback(trainer))
"""

from __future__ import annotations

import functools
import os
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from gradwire.exports.figures import LOGGED, figures
from gradwire.integrations import checkpoints
from gradwire.policies import Policy
from gradwire.training.attach import Attachment, attach


class GradwireCallback(TrainerCallback):
    """Attaches gradwire to the module that a Trainer wraps, logs its report, saves its state.

    The report goes with the Trainer's own logs, hence to all of its reporters. The state of each
    rank goes into the folder of each checkpoint, beside the Trainer's own file of random numbers,
    and comes back with it. A Trainer of one process makes no DDP module and is left alone. However
    `Trainer.train` ends, the module is detached.

    Args:
        trainer: The Trainer, which has the module and the optimizer once it trains.
        policy: As for `gradwire.attach`.
        resume_from: The folder of the checkpoint that a run goes on from, where it is not in
            `args.output_dir`.
        **options: As for `gradwire.attach`.

    Attributes:
        attachment: The attachment of the last training, which is detached when that ends; None
            before, and of one process.
    """

    def __init__(
        self,
        trainer: Trainer,
        policy: str | Policy | None = None,
        *,
        resume_from: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        self.attachment: Attachment | None = None
        self._trainer = trainer
        self._policy = policy
        self._resume_from = resume_from
        self._options = options
        self._detach_after(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Attaches, and restores the state of a checkpoint."""
        self._detach()  # a training that begins anew, as for a smaller batch, has not ended
        self.attachment = None
        if args.world_size == 1:
            return
        self.attachment = attach(
            self._trainer.model_wrapped,
            self._policy,
            optimizer=self._trainer.optimizer,
            scaler=self._trainer.accelerator.scaler,
            **self._options,
        )
        if state.global_step:
            checkpoints.load(self.attachment, self._resume_from or _folder(args, state))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Notes that an epoch begins."""
        if self.attachment is not None:
            self.attachment.epoch(int(state.epoch or 0))

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Logs the report of the last step after the Trainer has logged its loss."""
        if self.attachment is not None and "loss" in (logs or {}):
            self._trainer.log(figures(self.attachment.report(), LOGGED))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Saves this rank's state."""
        if self.attachment is not None and not args.save_only_model:
            checkpoints.save(self.attachment, _folder(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Detaches."""
        self._detach()

    def _detach(self) -> None:
        if self.attachment is not None:
            self.attachment.detach()

    def _detach_after(self, trainer: Trainer) -> None:
        """Makes the Trainer detach after an exception, too, for which it has no callback."""
        train = trainer.train

        @functools.wraps(train)
        def train_and_detach(*arguments: Any, **options: Any) -> Any:
            try:
                return train(*arguments, **options)
            finally:
                self._detach()

        trainer.train = train_and_detach


def _folder(args: Any, state: Any) -> str:
    return os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
