"""The bare DDP communication hook serves frameworks that take nothing but a hook.

ddp_model.register_comm_hook(gradwire.HookState(model=ddp_model.module), gradwire.comm_hook)

`gradwire.attach` registers the same hook.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations by value.

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradwire.core.errors import ConfigError, GradwireError
from gradwire.policies import Policy
from gradwire.policies.registry import OFF
from gradwire.training.bucket import Bucket, GradBucket
from gradwire.training.connection import Connection, no_op
from gradwire.training.ddp_module import python_reducer
from gradwire.training.off import agree_off
from gradwire.training.optimizers import Given, Optimizers
from gradwire.training.pipeline import GradientPipeline
from gradwire.training.profiled import bucket_range, wait_in_range

INTERRUPTED = (
    "a backward pass ended before all gradients were reduced: an exception ended it, or its loss "
    "depends on some of the parameters only (find_unused_parameters=True of "
    "DistributedDataParallel allows this)"
)
LEFT = (
    "DistributedDataParallel waits for the rest of these gradients; go on from a checkpoint, after "
    "detach(), with the module wrapped anew"
)


class HookState(Connection):
    """The state of `comm_hook`: a policy, settings, and a pipeline that opens at the first use.

    Options that need calls of an attachment (every="epoch", loss_rise=) are refused at the first
    use without one. Copies and pickles keep the configuration and open a connection of their own.

    Args:
        policy: a name or a policy object. None takes the name in GRADWIRE_POLICY, else "adaptive".
        model: the module inside DDP, which names the parameters; "adaptive" and "plot" need it.
            Without it parameters are named in the order they appear.
        process_group: the group that the gradients are averaged over; None is the default group.
        optimizer: the optimizer that steps with these gradients, or a list of several (see
            `gradwire.attach`).
        scaler: the GradScaler that scales the loss (see `gradwire.attach`).
        find_unused_parameters: as given to DDP, which then ignores the results of parameters that
            no worker used. The residual of such a parameter waits until the parameter is used.
        **options: the policy's options and the common settings of `gradwire.Settings`.

    Attributes:
        policy: The policy that writes the plans.

    Raises:
        ConfigError: an option is impossible.
        EngineMissingError: the engine was not built.
    """

    _seen: int  # autograd's number of the last pass in which a bucket came; -1 for none
    _begun: bool  # whether a bucket has come of a step that is not whole
    _running: Callable[[], object]  # returns what that pass holds, None once it is over
    _refusal: RemovableHandle | None  # of the hook in which forward passes look for failures

    def __init__(
        self,
        policy: str | Policy | None = None,
        *,
        model: torch.nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None,
        optimizer: Given = None,
        scaler: torch.amp.GradScaler | None = None,
        find_unused_parameters: bool = False,
        **options: object,
    ) -> None:
        if not isinstance(find_unused_parameters, bool):
            raise ConfigError.of(
                "find_unused_parameters",
                find_unused_parameters,
                "allowed are True, False, as given to DDP",
            )
        self.find_unused_parameters = find_unused_parameters
        self._ddp: Callable[[], DistributedDataParallel | None] = no_op
        self.delayed = False  # whether DDP's next call comes after the backward pass
        self._follow_none()
        super().__init__(
            policy,
            options,
            model=model,
            process_group=process_group,
            optimizer=optimizer,
            scaler=scaler,
        )

    def _open(self, *args: Any) -> GradientPipeline:
        pipeline = super()._open(*args)
        if self.find_unused_parameters:
            pipeline.find_unused()
        return pipeline

    def deactivate(self) -> None:
        """Closes the pipeline, and follows passes no more (`Connection.deactivate`)."""
        super().deactivate()
        self._let_forward()
        self._follow_none()

    def leaves_alone(self) -> bool:
        """Returns whether the process group averages, after `deactivate` or under policy "off".

        The first call under policy "off" is collective: all ranks have to be off.
        """
        if self.active and self.policy.name == OFF:
            waits = {"rendezvous_timeout": self._settings.rendezvous_timeout}
            agree_off(self.process_group, waits)
            self.active = False
        return not self.active

    def serve(self, ddp: DistributedDataParallel) -> None:
        """Notes the module whose hook has this state."""
        self._ddp = weakref.ref(ddp)

    def serves(self, ddp: DistributedDataParallel) -> bool:
        """Returns whether `serve` was called for this module.

        It was not for a copy of one, whose list of hooks names this state though it has no hook.
        """
        return self._ddp() is ddp

    def _refuse_forward(self) -> None:
        ddp = self._ddp()
        if ddp is not None and self._refusal is None:
            refuse = ddp.register_forward_pre_hook(lambda *_: self._check_forward(), prepend=True)
            self._refusal = refuse

    def _let_forward(self) -> None:
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            refusal.remove()

    def _check_forward(self) -> None:
        """Raises what has stopped the pipeline, or DDP where this forward pass begins a step."""
        ddp = self._ddp()
        begins = ddp is not None and ddp.require_backward_grad_sync and torch.is_grad_enabled()
        if begins:
            self.check()
        else:
            super().check()

    # ------------------------------------------------------------------ passes that do not end

    def check(self) -> None:
        """Raises what has stopped the pipeline, or DDP in the middle of a step."""
        if self._pipeline is not None and self._interrupted():
            self._pipeline.fail(GradwireError(INTERRUPTED))
            self._pipeline.failures.check(LEFT)
            raise GradwireError(f"{INTERRUPTED}; {LEFT}")  # another rank has left before
        super().check()

    def follow(self, pipeline: GradientPipeline) -> None:
        """Notes that a bucket comes in the backward pass that runs now.

        autograd lets go of a pass's functions when the pass is over, also by an exception.
        """
        present = torch._C._current_graph_task_id()
        if present in (-1, self._seen):
            return
        self._seen, self._begun = present, True

        def end() -> None:
            """Stands for the pass."""

        held = weakref.ref(self)

        def over(_: object) -> None:
            here = held()
            if here is not None and here._pipeline is pipeline:
                here._pass_over(pipeline)

        self._running = weakref.ref(end, over)
        with contextlib.suppress(RuntimeError):  # a pass of compiled autograd has no functions
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def _pass_over(self, pipeline: GradientPipeline) -> None:
        """Has forward passes look for what has stopped, unless the last step is whole."""
        if self._interrupted():
            self._refuse_forward()
            return
        self._begun = False
        if pipeline.failures.first is None:  # its rest may have come in this pass
            self._let_forward()

    def _follow_none(self) -> None:
        self._seen = -1
        self._begun = False
        self._running = no_op
        self._refusal = None

    def _interrupted(self) -> bool:
        """Returns whether DDP waits for gradients, and no pass runs that can bring them.

        Before the first bucket only the main thread is taken for the one that ran the pass.
        """
        ddp = self._ddp()
        if ddp is None or torch._C._current_graph_task_id() != -1 or self._running() is not None:
            return False
        if not self._begun and threading.current_thread() is not threading.main_thread():
            return False
        try:
            ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True
        return False

    def check_join(self) -> None:
        """Raises ConfigError within the module's `join` unless that divides by all workers."""
        ddp = self._ddp()
        if ddp is None or not ddp._join_config.enable or ddp._divide_by_initial_world_size:
            return
        raise ConfigError.of(
            "divide_by_initial_world_size",
            False,
            "gradwire divides by all workers, those that have joined included; leave it out",
            beside="in join()",
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "settings": self._settings.copied(),
            "active": self.active,
            "finds_unused": self.find_unused_parameters,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = None
        self._ddp = no_op
        self.active = state["active"]
        self.attached = False
        self.delayed = False
        self._follow_none()
        self.find_unused_parameters = state.get("finds_unused", False)
        self._know(None)
        self._optimizers = Optimizers()
        self._scaler = None
        self._unhook = contextlib.ExitStack()
        self.policy, self._settings = state["policy"], state["settings"]
        if self.policy.fill_was_open:  # the optimizer decided it, and is not copied
            self.policy.fill = "zero"
        self._pipeline = None


def comm_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a DDP bucket over the workers, within the policy's bounds.

    Args:
        state: registered together with this hook.
        bucket: as DDP hands it over.

    Returns:
        A future of the average (1-D, of the bucket's dtype), which is the bucket's buffer. Under
        `gradwire.attach`, where ranks of a host sum among themselves, it is memory that they share
        and that the next step overwrites. A failure names rank, step and cause, and backward()
        raises it as a RuntimeError.

    Raises:
        ConfigError: the state is no HookState, or the module hands gradients to no hook.
    """
    if not isinstance(state, HookState):
        raise ConfigError.about(
            f"gradwire.comm_hook registered with state {type(state).__name__}",
            "it needs a gradwire.HookState",
            setting="state",
            value=type(state).__name__,
        )
    handed: object = bucket
    if isinstance(handed, tuple):
        raise python_reducer()
    if state.leaves_alone():
        return _forward_to_host(state, bucket)
    state.check_join()
    pipeline = state.pipeline
    state.follow(pipeline)
    # Outside of a backward pass DDP calls the hook on behalf of a rank that has joined.
    joined = torch._C._current_graph_task_id() == -1
    given = Bucket.of(bucket)
    future = bucket_range(given.index, lambda: pipeline.reduce(given, joined=joined))
    if bucket.is_last() and threading.current_thread() is threading.main_thread():
        _heed_signals(state, pipeline)
    return future


def _heed_signals(state: HookState, pipeline: GradientPipeline) -> None:
    """Lets Ctrl-C, and any other signal, act while this thread waits for the step's results.

    DDP waits for them in C++, where Python handles no signal, in a callback that autograd runs
    when all gradients are there. DDP adds that callback after this bucket's hook, so the callback
    added here runs first. In the first step of a static graph DDP's callback calls the hooks.
    """
    if state.delayed:
        state.delayed = False
        wait_in_range(pipeline.wait)
        return
    wait = functools.partial(wait_in_range, pipeline.wait)
    with contextlib.suppress(RuntimeError):  # no backward pass: DDP.join's share in the others'
        torch.autograd.Variable._execution_engine.queue_callback(wait)


def _forward_to_host(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket by the process group's own all-reduce, as DDP does without a hook."""
    group = state.process_group if state.process_group is not None else dist.group.WORLD
    buffer = bucket.buffer()
    buffer.div_(dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future.then(lambda done: done.value()[0])
