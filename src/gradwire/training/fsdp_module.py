"""What gradwire has to know of a model under fully_shard, and whether it can serve the model."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.errors import ConfigError, GradwireError
from gradwire.core.names import named_parameters, plain_name
from gradwire.core.regions import TensorSlot
from gradwire.training.bucket import ComparedLayout

FIRST_TORCH = "2.9"
"""The first torch whose fully_shard takes a reduce-scatter of somebody else's."""

OURS = ("gradwire.training.fsdp_sharded", "gradwire.training.fsdp_replicated")
"""The modules whose objects take part in a model's reductions."""
AFTERWARDS = "average"
"""The function there that averages over replicas once gradwire is detached."""


@dataclass(eq=False)
class ShardGroup:
    """The parameters of one module, or of several, that fully_shard reduces together.

    Attributes:
        module: The first of the modules, which takes the reduce-scatter.
        paths: Names of the modules in the model.
        inner: torch's own object for the group.
        names: The names of the parameters, in order.
        world_size: Number of ranks that share the parameters.
        members: The indices of the parameters that the present reduction is of; torch leaves out
            those without a gradient.
    """

    module: FSDPModule
    paths: list[str]
    inner: Any
    names: list[str]
    world_size: int
    members: tuple[int, ...] = ()

    @property
    def described(self) -> str:
        named = " and ".join(repr(path) for path in self.paths if path)
        return f"the parameters of {named}" if named else "the model's own parameters"

    @property
    def name(self) -> str:
        return self.paths[0]

    @property
    def trained(self) -> tuple[int, ...]:
        everybody = enumerate(self.inner.fsdp_params)
        return tuple(index for index, each in everybody if each.sharded_param.requires_grad)

    @property
    def reduced(self) -> torch.dtype:
        asked = self.inner.mp_policy
        own = (self.inner.fsdp_params[index].sharded_param.dtype for index in self.trained)
        kind: torch.dtype = asked.reduce_dtype or asked.param_dtype or next(own, torch.float32)
        return kind

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Number of elements of each parameter's shard, padding included."""
        return [each.padded_sharded_param_size.numel() for each in self.inner.fsdp_params]

    @property
    def elements(self) -> int:
        """Number of elements of a rank's shard of all gradients, padding included."""
        return sum(self.lengths[index] for index in self.trained)

    def parameters(self, members: Iterable[int]) -> list[torch.nn.Parameter]:
        return [self.inner.fsdp_params[index].sharded_param for index in members]

    def check_types(self) -> None:
        dtypes = {each.dtype for each in self.parameters(self.trained)}
        if len(dtypes) > 1:
            raise ConfigError.about(
                f"{self.described} are of several types, {', '.join(sorted(map(str, dtypes)))}",
                "torch scatters them in an order of its own; fully_shard those of each type apart",
                setting="model",
                value=self.name,
            )

    def note_members(self) -> None:
        """Notes which parameters have a gradient, just before torch hands them to the reduction.

        torch takes those that have one, and with `set_reduce_scatter_unused_params` all that are
        trained, and it forgets the gradients before it reduces them.
        """
        unused = getattr(self.inner, "reduce_scatter_unused_params", False)
        everybody = enumerate(self.inner.fsdp_params)
        self.members = tuple(index for index, each in everybody if _has_gradient(each, unused))

    def check_members(self, elements: int) -> None:
        """Raises GradwireError where torch reduces shards of another size than `members` have."""
        known = sum(self.lengths[index] for index in self.members)
        if known != elements:
            raise GradwireError(
                f"{self.described}: torch {torch.__version__} reduces {elements} elements, and the "
                f"parameters with a gradient have {known}; gradwire does not know this torch"
            )

    def slots(self, members: tuple[int, ...], parts: Sequence[int | None]) -> ComparedLayout:
        """Returns the layout of shards of these parameters, one shard after another.

        Args:
            members: The parameters, which follow each other in each shard.
            parts: The rank of each shard; None where there is just the own one.
        """
        known = self._slots.get(members)
        if known is None:
            known = self._slots[members] = self._lay_out(members, parts)
        return known

    @functools.cached_property
    def _slots(self) -> dict[tuple[int, ...], ComparedLayout]:
        return {}

    def _lay_out(self, members: tuple[int, ...], parts: Sequence[int | None]) -> ComparedLayout:
        slots: list[TensorSlot] = []
        at = 0
        for part in parts:
            for index in members:
                if length := self.lengths[index]:
                    slots.append(TensorSlot(self.names[index], at, length, part))
                    at += length
        return ComparedLayout(slots)


def _has_gradient(each: Any, unused: bool) -> bool:
    """Returns whether torch is about to reduce the gradient of a parameter.

    Args:
        unused: Whether parameters that the pass does not use count.
    """
    if not hasattr(each, "_unsharded_param"):
        return False
    whole = each.unsharded_param
    if each.unsharded_accumulated_grad is not None or whole.grad is not None:
        return True
    return unused and bool(whole.requires_grad)


def is_sharded(model: torch.nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def states_of(model: torch.nn.Module) -> list[tuple[Any, list[torch.nn.Module]]]:
    found: dict[int, tuple[Any, list[torch.nn.Module]]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            found.setdefault(id(state), (state, []))[1].append(module)
    return list(found.values())


def shard_groups(model: torch.nn.Module) -> list[ShardGroup]:
    """Returns the groups of parameters of a model under fully_shard, in the model's order."""
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise ConfigError.about(
            f"fully_shard of torch {torch.__version__}",
            f"only torch {FIRST_TORCH} and later hands its reduce-scatter over; update torch, or "
            "wrap the model in DistributedDataParallel",
            setting="model",
            value=torch.__version__,
        )
    paths = {id(module): plain_name(path) for path, module in model.named_modules()}
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}
    groups: list[ShardGroup] = []
    for path, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigError.about(
                f"the model holds modules under fully_shard and a DDP module, {path!r}",
                "attach to each apart",
                setting="model",
                value=path,
            )
        if isinstance(module, FSDPModule):
            for inner in _inners_of(module, plain_name(path)):
                if all(group.inner is not inner for group in groups):  # as in fully_shard([a, b])
                    groups.append(_group_of(module, inner, paths, names))
    if not groups:
        raise ConfigError.about(
            "the model is under fully_shard and has no parameters",
            "nothing is reduced there",
            setting="model",
        )
    if any(_ranks(each) != _ranks(groups[0]) for each in groups):
        raise ConfigError.about(
            "modules of the model are sharded over different ranks",
            "attach to each of them apart",
            setting="model",
        )
    return groups


def process_group_of(groups: list[ShardGroup]) -> dist.ProcessGroup:
    return _shard_group(groups[0].inner)


def shard_group_of(model: torch.nn.Module) -> dist.ProcessGroup | None:
    inner = next(itertools.chain.from_iterable(map(_inners, model.modules())), None)
    return None if inner is None else _shard_group(inner)


def check_detached(model: torch.nn.Module) -> None:
    inners = itertools.chain.from_iterable(map(_inners, model.modules()))
    if any(_is_attached(taken) for inner in inners for taken in _reductions(inner)):
        raise _already_attached()


def _shard_group(inner: Any) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, inner.mesh_info.shard_process_group)


def _inners(module: Any) -> list[Any]:
    """Returns what torch keeps of each group of parameters of a module."""
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    inners = getattr(state, "_fsdp_param_groups", None)  # several from torch 2.12 on
    if inners is None:
        inners = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(inners)


def _reductions(inner: Any) -> list[Any]:
    """Returns who scatters and who averages the gradients of a group; None for torch itself."""
    return [getattr(inner, name, None) for name in ("_reduce_scatter_comm", "_all_reduce_hook")]


def _owner(taken: Any) -> tuple[str, str]:
    owner = getattr(taken, "func", taken)
    kind = getattr(owner, "__qualname__", type(owner).__qualname__)
    return getattr(owner, "__module__", ""), kind


def _is_attached(taken: Any) -> bool:
    place, kind = _owner(taken)
    return place in OURS and kind != AFTERWARDS


def _already_attached() -> ConfigError:
    return ConfigError.about(
        "gradwire is already attached to this model",
        "call detach() on that attachment first",
        setting="model",
    )


def _inners_of(module: FSDPModule, path: str) -> list[Any]:
    """Returns torch's object for the group of a module's parameters, or none."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if "ReplicateModule" in kinds:
        raise _replicated("replicate", "wrap the model in DistributedDataParallel")
    inners = _inners(module)
    if len(inners) > 1:
        raise ConfigError.about(
            f"module {path!r} has parameters on several meshes (shard_placement_fn)",
            "torch takes no reduce-scatter of somebody else's there; fully_shard the parts apart",
            setting="model",
            value=path,
        )
    return inners


def _group_of(
    module: FSDPModule, inner: Any, paths: dict[int, str], names: dict[int, str]
) -> ShardGroup:
    """Makes the group of torch's object; raises ConfigError where it cannot be carried."""
    _check_free(inner, paths[id(module)])
    if hasattr(inner.mesh_info, "replicate_process_group"):
        raise _replicated(
            "fully_shard over a mesh of two dimensions (HSDP)",
            'fully_shard over the shard dimension alone (mesh=mesh["shard"]), and give '
            'attach(model, replicas=mesh["replicate"])',
        )
    size = _shard_group(inner).size()
    own = [paths[id(each)] for each in inner.modules]
    group = ShardGroup(module, own, inner, _names(inner, names), size)
    group.check_types()
    return group


def _check_free(inner: Any, path: str) -> None:
    for taken in _reductions(inner):
        if _is_attached(taken):
            raise _already_attached()
        place, kind = _owner(taken)
        if taken is not None and place not in OURS and kind != "DefaultReduceScatter":
            raise ConfigError.about(
                f"module {path!r} already has a reduction of its own, {kind}",
                "attach gradwire to a model without one",
                setting="model",
                value=kind,
            )


def _names(inner: Any, names: dict[int, str]) -> list[str]:
    infos = [each._module_info for each in inner.fsdp_params]
    return [names[id(getattr(info.module, info.param_name))] for info in infos]


def _replicated(wrapper: str, instead: str) -> ConfigError:
    return ConfigError.about(
        wrapper,
        "torch averages over the replicas itself there and hands that all-reduce to nobody; "
        f"{instead}",
        setting="model",
        value=wrapper,
    )


def _ranks(group: ShardGroup) -> list[int]:
    ranks: list[int] = dist.get_process_group_ranks(process_group_of([group]))
    return ranks
