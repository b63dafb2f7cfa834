"""What ranks reduce in one backward pass, and how it differs between them.

Ranks whose batches take different ways through a model have gradients of different parameters.
Under FSDP2 they then reduce different tensors in one place, which their plans show. What each rank
has reduced says which tensors these are, and what helps.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from gradwire.core.errors import TransferError
from gradwire.core.names import ranks_as_text, some_of

Reduced = tuple[str, Sequence[str]]
"""One reduction: the group as errors name it, and the names of its parameters with a gradient."""

END: Reduced = ("nothing more", ())
"""Stands, in the place of a reduction, for the end of a backward pass."""


def difference(
    step: int,
    trained: Mapping[int, Sequence[Reduced]],
    reduced: Mapping[int, Sequence[Reduced]],
) -> TransferError | None:
    """Returns the error that names the first difference between ranks; None where there is none.

    Args:
        trained: The parameters that each rank trains in this step, by group, in the same order.
        reduced: The reductions that each rank has begun, in order; those that follow are not known.
    """
    names = {rank: [n for _, each in groups for n in each] for rank, groups in trained.items()}
    if one_sided := _lacking(names):
        return _not_trained(step, *one_sided)
    for place in range(max(map(len, reduced.values()), default=0)):
        here = {rank: each[place] for rank, each in reduced.items() if len(each) > place}
        by_group: dict[str, list[int]] = {}
        for rank, (group, _) in here.items():
            by_group.setdefault(group, []).append(rank)
        if len(by_group) > 1:
            return _other_group(step, by_group)
        if one_sided := _lacking({rank: list(each) for rank, (_, each) in here.items()}):
            return _other_parameters(step, next(iter(by_group)), *one_sided)
    return None


def _lacking(names: Mapping[int, list[str]]) -> tuple[list[str], list[int], list[int]] | None:
    """Returns names that some ranks lack, the ranks that have them, and those that do not."""
    fewest: list[str] = min(names.values(), key=len, default=[])
    few = set(fewest)
    lacking = [name for name in dict.fromkeys(itertools.chain(*names.values())) if name not in few]
    if not lacking:
        return None
    have = [rank for rank, each in names.items() if lacking[0] in each]
    lack = [rank for rank in names if rank not in have]
    return lacking, have, lack


def _not_trained(step: int, lacking: list[str], have: list[int], lack: list[int]) -> TransferError:
    one = len(lack) == 1
    return TransferError(
        f"step {step}: {ranks_as_text(lack)} {'does' if one else 'do'} not train "
        f"{some_of(lacking)}, and {ranks_as_text(have)} do{'es' if len(have) == 1 else ''}: freeze "
        "and unfreeze parameters (requires_grad), and set which passes synchronise "
        "(set_requires_gradient_sync, set_requires_all_reduce), alike on all ranks",
        rank=lack[0],
        step=step,
        cause="plan",
    )


def _other_group(step: int, by_group: Mapping[str, list[int]]) -> TransferError:
    reduce = [
        f"{ranks_as_text(ranks)} reduce{'s' if len(ranks) == 1 else ''} {group}"
        for group, ranks in by_group.items()
    ]
    odd = min(reversed(list(by_group.values())), key=len)
    return TransferError(
        f"step {step}: {', '.join(reduce)} in the same place: all ranks must have gradients of the "
        "same groups, in the same order; where a batch leaves modules out, add 0.0 times the sum "
        "of their output to the loss",
        rank=odd[0],
        step=step,
        cause="plan",
    )


def _other_parameters(
    step: int, group: str, lacking: list[str], have: list[int], lack: list[int]
) -> TransferError:
    return TransferError(
        f"step {step}, {group}: {ranks_as_text(lack)} ha{'s' if len(lack) == 1 else 've'} no "
        f"gradient of {some_of(lacking)}, and {ranks_as_text(have)} ha"
        f"{'s' if len(have) == 1 else 've'}: call model.set_reduce_scatter_unused_params(True) on "
        "all ranks, where torch has it, or fully_shard those parameters apart and give them a "
        "gradient on all ranks (add 0.0 times the sum of their output to the loss)",
        rank=lack[0],
        step=step,
        cause="plan",
    )
