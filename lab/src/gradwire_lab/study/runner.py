"""The runner trains the cells that are not done yet, several at a time."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import replace
from itertools import islice

from gradwire_lab.network.kernel import die_with_parent
from gradwire_lab.run.build import commit
from gradwire_lab.study.cell import Cell, Outcome
from gradwire_lab.study.kernel import train_on_kernel
from gradwire_lab.study.ledger import Ledger
from gradwire_lab.study.trainer import train

__all__ = ["run"]

Progress = Callable[[int, int, Cell], None]
"""Called with how many cells are done, how many there are, and the last one that was done."""


def run(cells: Sequence[Cell], ledger: Ledger, jobs: int, progress: Progress) -> None:
    """Train the cells that the ledger lacks and enter them with the commit, each as it is done.

    jobs: processes to train in; with 1, in this one.
    """
    left = [cell for cell in cells if cell not in ledger.outcomes]
    done = len(cells) - len(left)
    on_kernel = [cell for cell in left if cell.where == "kernel"]
    left = [cell for cell in left if cell.where != "kernel"]

    def enter(cell: Cell, outcome: Outcome) -> None:
        nonlocal done
        ledger.add(cell, replace(outcome, commit=commit()))
        done += 1
        progress(done, len(cells), cell)

    for cell in on_kernel:  # each has four processes, so they run one at a time
        enter(cell, train_on_kernel(cell))
    if jobs == 1 or len(left) <= 1:
        for cell in left:
            enter(cell, train(cell))
        return
    context = multiprocessing.get_context("spawn")
    waiting = iter(left)
    with ProcessPoolExecutor(
        jobs, mp_context=context, initializer=die_with_parent, initargs=(os.getpid(),)
    ) as pool:
        # Cells are submitted one by one, because the pool trains whatever it has taken to its end.
        running = {pool.submit(train, cell): cell for cell in islice(waiting, jobs)}
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                enter(running.pop(future), future.result())
                running |= {pool.submit(train, cell): cell for cell in islice(waiting, 1)}
