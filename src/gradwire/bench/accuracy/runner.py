"""Trains the cells that are not done yet, several at a time."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from gradwire.bench.accuracy.cell import Cell, Outcome
from gradwire.bench.accuracy.kernel import train_on_kernel
from gradwire.bench.accuracy.ledger import Ledger
from gradwire.bench.accuracy.trainer import train
from gradwire.lab.kernel import die_with_parent

__all__ = ["run"]

Progress = Callable[[int, int, Cell], None]
"""Called with how many cells are done, how many there are, and the last one that was done."""


def run(cells: Sequence[Cell], ledger: Ledger, jobs: int, progress: Progress) -> None:
    """Train the cells that the ledger lacks and enter them, each as it is done.

    jobs: processes to train in; with 1, in this one.
    """
    left = [cell for cell in cells if cell not in ledger.outcomes]
    done = len(cells) - len(left)
    on_kernel = [cell for cell in left if cell.where == "kernel"]
    left = [cell for cell in left if cell.where != "kernel"]
    for cell in on_kernel:  # four processes each; one at a time
        ledger.add(cell, train_on_kernel(cell))
        done += 1
        progress(done, len(cells), cell)
    if jobs == 1 or len(left) <= 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for cell in left:
                ledger.add(cell, train(cell))
                done += 1
                progress(done, len(cells), cell)
        finally:
            torch.set_num_threads(threads)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        jobs, mp_context=context, initializer=_begin, initargs=(os.getpid(),)
    ) as pool:
        running = {pool.submit(train, cell): cell for cell in left}
        try:
            for future in as_completed(running):
                outcome: Outcome = future.result()
                ledger.add(running[future], outcome)
                done += 1
                progress(done, len(cells), running[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin(parent: int) -> None:
    """Train with one thread, and no longer than the parent lives, however it ends."""
    die_with_parent(parent)
    torch.set_num_threads(1)
