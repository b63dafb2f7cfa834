"""A small model under Lightning's Trainer; one callback adopts gradwire.

python examples/train_lightning.py saves
python examples/train_lightning.py saves --epochs 4 --resume
"""

import argparse

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.integrations.lightning import GradwireCallback


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="for logs and checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args()

    lightning.seed_everything(0)
    inputs = torch.randn(128, 64)
    rows = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = lightning.Trainer(
        strategy="ddp",
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=2,
        max_epochs=options.epochs,
        log_every_n_steps=2,
        logger=CSVLogger(options.folder, version=options.epochs),
        callbacks=[
            GradwireCallback(),
            lightning.pytorch.callbacks.ModelCheckpoint(options.folder, save_last=True),
        ],
    )
    path = f"{options.folder}/last.ckpt" if options.resume else None
    trainer.fit(Model(), DataLoader(rows, batch_size=16), ckpt_path=path)


if __name__ == "__main__":
    main()
