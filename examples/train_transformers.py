"""A small GPT-2 under transformers' Trainer; one line adopts gradwire.

torchrun --nproc-per-node 2 examples/train_transformers.py saves
torchrun --nproc-per-node 2 examples/train_transformers.py saves --resume
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gradwire.integrations.transformers import GradwireCallback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="for checkpoints")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=32,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(256, (64, 32), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        options.folder,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=4,
        max_steps=options.steps,
        logging_steps=2,
        save_steps=4,
        disable_tqdm=True,
        report_to="none",
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    )
    trainer.add_callback(GradwireCallback(trainer))
    trainer.train(resume_from_checkpoint=options.resume or None)


if __name__ == "__main__":
    main()
