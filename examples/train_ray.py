"""A loop under Ray Train, a worker on each node; one line adopts gradwire.

python examples/train_ray.py
"""

import os
import tempfile

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import gradwire
from gradwire.integrations import checkpoints


def loop(settings: dict) -> None:
    """What each worker runs; a worker that Ray starts again goes on from the last checkpoint."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attachment = gradwire.attach(model, optimizer=optimizer)
    begin = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(os.path.join(folder, "model.pt"))
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            checkpoints.load(attachment, folder)
            begin = saved["step"]
    for step in range(begin, settings["steps"]):
        optimizer.zero_grad()
        chance = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(32, 64, generator=chance)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        report = {"loss": loss.item(), "waited_s": attachment.report().exposed_s}
        if (step + 1) % 2:
            ray.train.report(report)
            continue
        with tempfile.TemporaryDirectory() as folder:  # Ray puts the files of all workers together
            checkpoints.save(attachment, folder)
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step + 1}, os.path.join(folder, "model.pt"))
            ray.train.report(report, checkpoint=ray.train.Checkpoint.from_directory(folder))
    attachment.detach()


def train(storage: str | None = None, steps: int = 6) -> ray.train.Result:
    trainer = TorchTrainer(
        loop,
        train_loop_config={"steps": steps},
        scaling_config=ray.train.ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        run_config=ray.train.RunConfig(
            storage_path=storage, failure_config=ray.train.FailureConfig(max_failures=2)
        ),
    )
    return trainer.fit()


if __name__ == "__main__":
    print(train().metrics)
