"""A loop under Accelerate, compiled or not; one line adopts gradwire.

torchrun --nproc-per-node 2 examples/train_accelerate.py saves
torchrun --nproc-per-node 2 examples/train_accelerate.py saves --resume --compile
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradwire
from gradwire.integrations import checkpoints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="for the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--compile", action="store_true", help="torch.compile the module")
    options = parser.parse_args()

    torch.manual_seed(0)
    backend = "aot_eager" if options.compile else "no"
    # Without cpu=True Accelerate takes processes without GPUs for a job each.
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dynamo_backend=backend)
    net = nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 1))
    inputs = torch.randn(128, 64)
    rows = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-3), DataLoader(rows, batch_size=16)
    )
    attachment = gradwire.attach(model, optimizer=optimizer, scaler=accelerator.scaler)
    # Every rank saves and loads its own, beside what Accelerate saves.
    accelerator.register_save_state_pre_hook(lambda *to: checkpoints.save(attachment, to[-1]))
    accelerator.register_load_state_pre_hook(lambda *to: checkpoints.load(attachment, to[-1]))
    if options.resume:
        accelerator.load_state(options.folder)
    for batch, targets in loader:
        loss = nn.functional.mse_loss(model(batch), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        waited = attachment.report().exposed_s
        accelerator.print(f"loss {loss.item():.3f}, waited {waited * 1e3:.1f} ms")
    accelerator.save_state(options.folder)
    attachment.detach()
    accelerator.end_training()


if __name__ == "__main__":
    main()
