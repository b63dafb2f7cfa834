"""The callbacks for Lightning and transformers, in trainings that end early, and their files."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradwire
from own_state import own_state, same
from ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OWING: dict[str, Any] = {"p": 0.05, "error_feedback": True}
ENDS: tuple[type[BaseException], ...] = (ValueError, KeyboardInterrupt)


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Ranks of their own, which import the frameworks once."""
    with Ranks(2) as ranks:
        yield ranks


def needs(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed (pip install 'gradwire[integrations]')")


def rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    return list(zip(inputs, inputs.sum(1, keepdim=True), strict=True))


class Net(nn.Module):
    """Ends the training at a step, as an error of a batch or Ctrl-C does."""

    def __init__(self, ends: type[BaseException] | None, at: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 1))
        self.ends, self.at, self.steps = ends, at, 0

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.steps += 1
        if self.ends is not None and self.steps > self.at:
            raise self.ends("enough")
        return {"loss": nn.functional.mse_loss(self.layers(inputs), labels)}


# ---------------------------------------------------------------------------- Lightning


def lightning_trainer(folder: str, *callbacks: Any, **more: Any) -> Any:
    import lightning

    return lightning.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **{"max_epochs": 1, "enable_checkpointing": False, **more},
    )


def lightning_model(net: Net) -> Any:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return self.net(*batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Model()


def lightning_rows() -> Any:
    return DataLoader(TensorDataset(*map(torch.stack, zip(*rows(), strict=True))), batch_size=4)


def lightning_goes_on(rank: int, world: int, folder: str) -> list[int]:
    from gradwire.integrations.lightning import GradwireCallback

    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")
    callback = GradwireCallback("mlt", **OWING)
    trainer = lightning_trainer(folder, callback)
    steps = []
    for ends in ENDS:
        with pytest.raises((ends, SystemExit)):  # Lightning exits after Ctrl-C
            trainer.fit(lightning_model(Net(ends)), lightning_rows())
        assert callback.attachment is not None
        with pytest.raises(gradwire.GradwireError, match="detached"):
            callback.attachment.flush()
        steps.append(callback.attachment.step)
    other = GradwireCallback("mlt", datagram=1024, **OWING)  # which the engine is opened with
    lightning_trainer(folder, other).fit(lightning_model(Net(None)), lightning_rows())
    assert other.attachment is not None
    return [*steps, other.attachment.step]


def test_lightning_fits_again_after_a_fit_that_ended_early(pair: Ranks, tmp_path: Path) -> None:
    needs("lightning")
    outcomes = pair.run(lightning_goes_on, folder=str(tmp_path), timeout=200.0)
    assert outcomes == [[3, 3, 8]] * 2


def lightning_saves(rank: int, world: int, folder: str, link: bool) -> None:
    """Saves on all ranks, asks one rank alone for the state, and goes on from the checkpoint."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from gradwire.integrations.lightning import GradwireCallback

    class Asks(lightning.Callback):
        """Asks rank 0 alone for the callback's state, and notes what there is at the start."""

        def __init__(self, callback: GradwireCallback) -> None:
            self.callback = callback
            self.begun: Any = None

        def state(self) -> Any:
            assert self.callback.attachment is not None
            return own_state(self.callback.attachment.state_dict())

        def on_train_start(self, *_: Any) -> None:
            self.begun = self.state()

        def on_train_batch_end(self, *_: Any) -> None:
            if rank == 0:
                self.callback.state_dict()

    def fit(path: str | None, **options: Any) -> Asks:
        callback = GradwireCallback("mlt", **OWING, **options)
        asks = Asks(callback)
        last: Any = "link" if link else True
        saves = ModelCheckpoint(folder, save_last=last, every_n_train_steps=4)
        trainer = lightning_trainer(
            folder, callback, asks, saves, max_epochs=2 if path else 1, enable_checkpointing=True
        )
        trainer.fit(lightning_model(Net(None)), lightning_rows(), ckpt_path=path)
        return asks

    last = f"{folder}/last.ckpt"
    kept = fit(None).state()
    torch.distributed.barrier()
    resumed = fit(last)
    assert same(resumed.begun, kept)
    assert resumed.state()["step"] == 16
    torch.distributed.barrier()
    if rank == 1:
        Path(f"{os.path.realpath(last)}.gradwire-1-of-2.pt").unlink()
    torch.distributed.barrier()
    with pytest.raises(gradwire.ConfigError) as raised:
        fit(last)
    assert raised.value.setting == "checkpoint"
    assert fit(last, resume=False).begun["step"] == 0


@pytest.mark.parametrize("link", [False, True])
def test_lightning_keeps_a_file_of_each_rank_beside_its_checkpoints(
    pair: Ranks, tmp_path: Path, link: bool
) -> None:
    needs("lightning")
    pair.run(lightning_saves, folder=str(tmp_path), link=link, timeout=200.0)
    checkpoints = {path.name for path in tmp_path.glob("*.ckpt") if not path.is_symlink()}
    files = {path.name for path in tmp_path.glob("*.pt")}
    assert len(checkpoints) == (1 if link else 2)  # the former ones are gone, and so are theirs
    assert files == {f"{name}.gradwire-{rank}-of-2.pt" for name in checkpoints for rank in (0, 1)}


# ---------------------------------------------------------------------------- transformers


def transformers_trainer(folder: str, net: Net, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=8,
        optim="sgd",
        disable_tqdm=True,
        report_to="none",
        remove_unused_columns=False,
        **{"save_strategy": "no", **more},
    )
    columns = [{"inputs": one, "labels": other} for one, other in rows()]
    return Trainer(net, arguments, train_dataset=columns)


def transformers_goes_on(rank: int, world: int, folder: str) -> list[int]:
    from gradwire.integrations.transformers import GradwireCallback

    os.environ["LOCAL_RANK"] = str(rank)
    net = Net(ValueError)
    trainer = transformers_trainer(folder, net)
    callback = GradwireCallback(trainer, "mlt", **OWING)
    trainer.add_callback(callback)
    steps = []
    for net.ends in ENDS:
        net.steps = 0
        with pytest.raises(net.ends):
            trainer.train()
        assert callback.attachment is not None
        with pytest.raises(gradwire.GradwireError, match="detached"):
            callback.attachment.flush()
        steps.append(callback.attachment.step)
    other = transformers_trainer(folder, Net(None))
    another = GradwireCallback(other, "mlt", datagram=1024, **OWING)
    other.add_callback(another)
    other.train()
    assert another.attachment is not None
    return [*steps, another.attachment.step]


def test_transformers_trains_again_after_a_training_that_ended_early(
    pair: Ranks, tmp_path: Path
) -> None:
    needs("transformers")
    outcomes = pair.run(transformers_goes_on, folder=str(tmp_path), timeout=200.0)
    assert outcomes == [[3, 3, 8]] * 2
