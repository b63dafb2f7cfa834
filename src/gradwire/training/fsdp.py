"""FSDP2: the gradients that fully_shard scatters among the ranks travel over gradwire.

torch calls the reduce-scatter of each group of parameters when their gradients are there, and says
neither which parameters they are nor which call is the last of a backward pass. gradwire looks
which have a gradient just before (in the group's method `post_backward`), and the step ends with
the backward pass (`gradwire.training.fsdp_passes`).

A result may come after the call has returned, as with DDP, where torch only notes where it is. In
other cases torch reads it at once, so the call waits for it.
"""

from __future__ import annotations

import functools
import json
import threading
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from gradwire.core.errors import ConfigError, GradwireError, TransferError
from gradwire.core.names import named_parameters, some_of
from gradwire.policies import Policy
from gradwire.training.bucket import Bucket, ComparedLayout, Scatter
from gradwire.training.connection import Connection, check_memory
from gradwire.training.fsdp_difference import END, Reduced, difference
from gradwire.training.fsdp_module import ShardGroup
from gradwire.training.fsdp_passes import Passes
from gradwire.training.guard import floor_of
from gradwire.training.optimizers import Given, held_by
from gradwire.training.pipeline import GradientPipeline
from gradwire.training.profiled import bucket_range, wait_in_range
from gradwire.training.staging import without_traceback

IN_FLIGHT = 2
"""How many reduce-scatters of a rank are under way at once; each holds gradients of a whole group.

One travels while the next group's gradients are computed."""

GIVEN_UP = (
    "an exception ended a backward pass, and reset_iter_state() of the root module, where torch "
    "has it, was not called before the next use"
)
LEFT = (
    "torch has left the model in the middle of that backward pass, where parameters stay gathered "
    "and no gradient is reduced any more; go on from a checkpoint, after detach() and the root "
    "module's reset_iter_state() where torch has it, else in new processes"
)

COMPARED_S = 3.0
"""How long ranks wait to learn what the others have reduced, in seconds."""

DIVIDED = (torch.float32, torch.bfloat16)
"""The types of sums whose division torch leaves to the reduction."""


class FullySharded(Connection):
    """The connection of one model under fully_shard."""

    wrapper = "fully_shard"

    def __init__(
        self,
        model: torch.nn.Module,
        groups: list[ShardGroup],
        process_group: dist.ProcessGroup,
        policy: str | Policy | None,
        options: dict[str, object],
        *,
        optimizer: Given,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._groups = groups
        super().__init__(
            policy,
            options,
            model=model,
            process_group=process_group,
            optimizer=optimizer,
            scaler=scaler,
        )
        self._rank = dist.get_rank(process_group)
        self._next = 0  # the index of the next bucket of the step
        self._begun: list[tuple[ShardGroup, tuple[int, ...]]] = []  # the step's reductions
        self._ended = False  # whether no other one follows
        self._due: tuple[tuple[int, ...], ...] = ()  # what the step has to reduce, by group
        self._explaining = threading.Lock()
        self._explained: TransferError | None = None
        self._results: list[torch.futures.Future[torch.Tensor]] = []
        self._passes = Passes(
            model, self._check_module, self._begin, self._check_stopped, self._end
        )
        for group in groups:
            reduce = functools.partial(self._after_backward, group, group.inner.post_backward)
            group.inner.post_backward = reduce

    def deactivate(self) -> None:
        self._passes.close()
        for group in self._groups:
            del group.inner.post_backward  # the class has torch's own
        super().deactivate()

    def check(self) -> None:
        """Raises what has stopped the pipeline, or torch (`Passes.interrupted`)."""
        self._check_module(None)

    def _check_module(self, state: Any) -> None:
        """Raises what has stopped the pipeline, or torch where its object for a module says so."""
        if not self._passes.interrupted(state):
            super().check()
        elif self._pipeline is not None:
            self._pipeline.fail(GradwireError(GIVEN_UP))
            self._pipeline.failures.check(LEFT)

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        sharded = (each.sharded_param for group in self._groups for each in group.inner.fsdp_params)
        known = set(map(id, sharded))
        return any(id(parameter) in known for parameter in held_by(optimizer))

    def _averaged(self, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        self._order = list(named_parameters(model))
        self._seen = self._trained_now()
        return self._known()

    def _trained_now(self) -> set[str]:
        return {group.names[index] for group in self._groups for index in group.trained}

    def _known(self) -> dict[str, torch.nn.Parameter]:
        """Returns the parameters that were ever seen to be trained, in the model's order."""
        held: dict[str, torch.nn.Parameter] = {}
        for group in self._groups:
            held.update(zip(group.names, group.parameters(range(len(group.names))), strict=True))
        return {name: held[name] for name in self._order if name in self._seen}

    def _note(self, averaged: Mapping[str, torch.nn.Parameter]) -> None:
        super()._note(averaged)
        self._names.trained = {}
        for group in self._groups:
            members = tuple(i for i, name in enumerate(group.names) if name in averaged)
            self._names.trained.update((s.key, s.length) for s in self._layout(group, members))
        largest = max(self._groups, key=lambda group: self._elements(group))
        self._largest = (largest.described, self._elements(largest))

    def _follow(self) -> None:
        """Takes in parameters that are trained now and never were before (`requires_grad`).

        Those that are frozen later have no gradient, and their residuals wait until they are
        trained again.
        """
        new = self._trained_now() - self._seen
        self._seen |= new
        known = self._known()
        names = [name for name in known if name in new]
        try:
            self._check_carried(known)
            for group in self._groups:
                group.check_types()
            self._note(known)
            check_memory(self._settings, self._largest, self.pipeline.communicator.world_size)
            self._prepare()
            self._optimizers.check((name, known[name]) for name in names)
        except ConfigError as error:
            raise ConfigError.about(
                f"{some_of(names)} is trained now (requires_grad) and was not when gradwire was "
                "attached",
                f"{error}; freeze it again, or attach while it is trained",
                setting=names[0],
                value=True,
            ) from error

    def _configure(self, *args: Any) -> None:
        super()._configure(*args)
        if self._settings.hosts is True:
            raise ConfigError.of(
                "hosts",
                True,
                "every rank needs a shard of its own, so none speaks for others; use 'auto' or "
                "False",
                beside="under fully_shard",
            )
        self._settings = replace(self._settings, hosts=False)
        if self._settings.server_count:
            raise ConfigError.of(
                "route",
                self._settings.route,
                "servers serve DistributedDataParallel; use route='sharded'",
                beside="under fully_shard",
            )
        if self._settings.on_failure == "host":
            raise ConfigError.of(
                "on_failure",
                "host",
                "only steps of DistributedDataParallel are sent again; use on_failure='raise'",
                beside="under fully_shard",
            )
        if self.policy.options().get("prune"):
            raise self._needs_all("prune", self.policy.options()["prune"], "weights")
        if floor_of(self.policy, self._settings) > 0.0:
            for group in self._groups:
                if reads := self._reads_always(group, group.trained, group.reduced):
                    raise self._cannot_wait(group, reads)

    def _cannot_wait(self, group: ShardGroup, reads: str) -> ConfigError:
        return ConfigError.of(
            "guard",
            self._settings.guard,
            f"it may send {group.described} again at the end of the step, and torch reads the "
            f"result before ({reads}); set guard='off', or floor=0",
        )

    def _needs_all(self, option: str, value: object, what: str) -> ConfigError:
        return ConfigError.of(
            option,
            value,
            f"it needs all {what}, and a rank has its shard of them; use another value",
            beside="under fully_shard",
        )

    def _reads_always(
        self, group: ShardGroup, members: tuple[int, ...], reduced: torch.dtype
    ) -> str:
        """Returns why torch reads each result as soon as the call is over; "" if it does not."""
        if reduced not in DIVIDED or group.inner.force_sum_reduction_for_comms:
            return "it divides it"
        for index in members:
            each = group.inner.fsdp_params[index]
            held = each.sharded_param
            dtype = getattr(each, "sharded_grad_dtype", held.dtype)  # from torch 2.15 on
            if dtype not in (reduced, None):
                return f"it makes {dtype} of {reduced}"
            if each.offload_to_cpu:
                return "it moves it to the CPU"
            if getattr(held, "_post_accumulate_grad_hooks", None):
                return "a hook of a parameter takes it"
        return ""

    def _reads_at_once(
        self, group: ShardGroup, members: tuple[int, ...], reduced: torch.dtype
    ) -> str:
        if reads := self._reads_always(group, members, reduced):
            return reads
        if any(each.grad is not None for each in group.parameters(members)):
            return "it adds it to gradients that are there already"
        return ""

    def _after_backward(self, group: ShardGroup, reduce: Any, *unused: Any) -> None:
        """Reduces the gradients of a group, as torch does, once it is known whose they are."""
        try:
            group.note_members()
            if any(group.names[index] not in self._seen for index in group.members):
                self._follow()
            reduce(*unused)
        except BaseException as error:  # torch cannot repeat the reduction
            if self._pipeline is not None:
                self._pipeline.fail(error)
            raise

    @abstractmethod
    def _layout(self, group: ShardGroup, members: tuple[int, ...]) -> ComparedLayout:
        """Returns the layout of the gradients of these parameters of a group."""

    @abstractmethod
    def _elements(self, group: ShardGroup) -> int:
        """Returns how many elements of a group travel at once."""

    def _start(
        self,
        group: ShardGroup,
        values: torch.Tensor,
        members: tuple[int, ...],
        reads: str,
        scatter: Scatter | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Starts the reduction of a group's gradients.

        Args:
            values: The gradients; they belong to the engine until the result is there.
            reads: Why torch reads the result at once, so that it is waited for; "" if it does not.
            scatter: What becomes of the sum where each rank gets its shard.
        """
        pipeline = self.pipeline
        self._passes.reduce(group.described)
        changed = not self._next and self._note_due()
        if reads and pipeline.holds_back:
            raise self._cannot_wait(group, reads)
        parameters, layout = list(group.parameters(members)), self._layout(group, members)
        bucket = Bucket(self._next, False, values, parameters, layout, scatter)
        self._next += 1
        self._begun.append((group, members))
        start = functools.partial(pipeline.reduce, bucket, at_once=IN_FLIGHT)
        result = bucket_range(bucket.index, start)
        # Where what is trained has changed, others may not know of it: torch's gathers, of which
        # this rank then has other ones, come after all ranks have agreed.
        waits = bool(reads) or (changed and not pipeline.holds_back)
        if waits:
            wait_in_range(pipeline.wait)
        if waits or result.done():
            self._await(result)  # raises what failed, and orders streams
        else:
            self._results.append(result)
        return result

    # ------------------------------------------------------------------ the end of a step

    def _begin(self) -> None:
        self._next, self._results = 0, []
        self._begun, self._ended = [], False

    def _end(self) -> None:
        if not self._next:  # a pass that does not synchronise
            return
        results, self._results = self._results, []
        pipeline = self.pipeline
        begun = {group for group, _ in self._begun}
        due = zip(self._groups, self._due, strict=True)
        if any(members and group not in begun for group, members in due):
            self._ended = True
            pipeline.confirm_end()
        results.append(pipeline.reduce(Bucket(self._next, True, torch.empty(0), [])))
        wait_in_range(pipeline.wait)
        for each in results:
            self._await(each)

    def _await(self, result: torch.futures.Future[torch.Tensor]) -> None:
        """Waits for a result; raises what failed, which torch's futures hide in a text."""
        try:
            result.wait()
        except RuntimeError:
            failure = self.pipeline.failures.first
            if isinstance(failure, GradwireError):
                raise without_traceback(failure) from None
            raise

    def _is_due(self, group: ShardGroup) -> bool:
        return bool(group.inner.reduce_grads)

    def _note_due(self) -> bool:
        """Notes the parameters that this step trains; returns whether they are others than before.

        All plans of the step depend on them, so ranks that train others fail at its first bucket.
        A rank that trains fewer would otherwise end the step without a word, and step.
        """
        before = self._due
        self._due = tuple(group.trained if self._is_due(group) else () for group in self._groups)
        return self._due != before

    # ------------------------------------------------------------------ ranks that differ

    def _open(self, *args: Any) -> GradientPipeline:
        pipeline = super()._open(*args)
        pipeline.failures.explain = functools.partial(self._explain, pipeline)
        pipeline.compared = lambda: (zlib.crc32(repr(self._due).encode()),)
        return pipeline

    def _check_stopped(self) -> None:
        """Raises what has stopped the pipeline in the midst of a backward pass.

        torch's gathers would wait there for ranks that have stopped.
        """
        if self._pipeline is not None:
            self._pipeline.failures.check()

    def _explain(self, pipeline: GradientPipeline, error: BaseException) -> BaseException:
        """Returns the error about plans that differ because the ranks reduce other parameters.

        The ranks tell each other what they have reduced, through the store, so that each of them
        can name what differs.
        """
        if not isinstance(error, TransferError) or error.cause != "plan":
            return error
        with self._explaining:  # several transfers fail at once
            if self._explained is None:
                own = self._named(self._begun)
                due = self._named(zip(self._groups, self._due, strict=False))
                text = json.dumps([due, [*own, END] if self._ended else own])
                topic = f"reduced/{pipeline.number}/{pipeline.step}"
                texts = pipeline.communicator.compare(topic, text, COMPARED_S)
                known = {rank: json.loads(each) for rank, each in texts.items()}
                trained = {rank: due for rank, (due, _) in known.items()}
                reduced = {rank: begun for rank, (_, begun) in known.items()}
                self._explained = difference(pipeline.step, trained, reduced) or error
            return self._explained

    def _named(self, groups: Iterable[tuple[ShardGroup, tuple[int, ...]]]) -> list[Reduced]:
        return [(each.described, [each.names[i] for i in members]) for each, members in groups]
