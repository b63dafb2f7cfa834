"""`gradwire.attach` lets the gradients of a model under DDP or FSDP2 travel over gradwire."""

import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.agreed import Phase
from gradwire.core.checks import plain
from gradwire.core.errors import ConfigError, GradwireError
from gradwire.core.rank_state import of_rank, read_rank
from gradwire.core.report import StepReport
from gradwire.policies import Policy
from gradwire.training.connection import Connection
from gradwire.training.ddp_module import check_hands_over, ddp_of, unwrapped
from gradwire.training.fsdp_module import (
    check_detached,
    is_sharded,
    process_group_of,
    shard_group_of,
    shard_groups,
)
from gradwire.training.fsdp_replicated import Replicated, average
from gradwire.training.fsdp_sharded import Alone, Sharded
from gradwire.training.groups import Group
from gradwire.training.hook import HookState, comm_hook
from gradwire.training.off import LeftAlone, switched_off
from gradwire.training.optimizers import Given
from gradwire.training.pipeline import GradientPipeline
from gradwire.transport.communicator import Communicator
from gradwire.transport.transfer import OfThisProcess

log = logging.getLogger("gradwire")


def attach(
    model: torch.nn.Module,
    policy: str | Policy | None = None,
    *,
    optimizer: Given = None,
    scaler: torch.amp.GradScaler | None = None,
    replicas: DeviceMesh | dist.ProcessGroup | None = None,
    **options: object,
) -> "Attachment":
    """Lets the gradients of a model travel over gradwire, on top of any process group.

    The model is a DDP module, or under `fully_shard` (FSDP2) as a whole or in parts. A collective
    call: every rank of the module's process group makes it, alike, between construction and the
    first backward pass. It returns once all ranks have met. Where ranks share
    hosts, those of a host sum among themselves first, and one speaks for it (setting `hosts`).

    Several modules may be attached, alike on all ranks, and may share backward passes on one
    device or on several. Their buckets and the ends of their steps need not come in the same order
    on all ranks.

    Args:
        model: the DDP module or the sharded model, which may be compiled (`torch.compile(ddp)`) or
            wrapped by Lightning's Fabric. A copy of an attached DDP module, made by copy.deepcopy
            or torch.save, averages over its process group until it is attached itself.
        policy: a name ("reliable", "dblp", …: docs/policies.md) or a policy object. None takes the
            name in GRADWIRE_POLICY, else "adaptive". "off" leaves DDP alone, and so does
            GRADWIRE_POLICY=off, whatever is given here; options are not read then.
        optimizer: the optimizer that steps with these gradients, or a list of several, each with
            parameters of its own. Its family decides error_feedback="auto", a learning rate that
            has halved makes a phase critical, and guard="skip" keeps it from stepping. It may be a
            framework's wrapper that keeps it as `.optimizer`, such as Accelerate's.
        scaler: the GradScaler that scales the loss. Norms and residuals follow its scale, and a
            step of an optimizer that it skips uses up no residual. With error feedback each trained
            parameter has to be in an optimizer that is given.
        replicas: the ranks with other replicas of this rank's shards, where a model under
            fully_shard is replicated outside of its mesh. Their averages then travel over gradwire,
            and torch scatters gradients within the mesh itself.
        **options: the policy's options (p_low=0.01, …) and the common settings of
            `gradwire.Settings` (route=…, interface=…, report="steps.jsonl", …). One that is not
            given is read from its GRADWIRE_* variable.

    Returns:
        The attachment, which has the last report and the state to save.

    Raises:
        ConfigError: the model is of another kind, its communication hook is taken, or torch hands
            its gradients to nobody; or an option is impossible, such as a report file that cannot
            be opened.
        RendezvousError: ranks, which it names, are absent, configured differently or failed.
        EngineMissingError: the engine was not built.
    """
    found = unwrapped(model)
    with _failing(*_meant(replicas)):
        group = _group_of_replicas(replicas)
    if isinstance(found, torch.nn.Module) and is_sharded(found):
        if switched_off(policy):
            return _left_sharded(found, group, options)
        return _open(_fully_sharded(found, group, policy, options, optimizer, scaler))
    if group is not None:
        with _failing(group):
            raise ConfigError.of(
                "replicas", type(replicas).__name__, "only models under fully_shard have any"
            )
    ddp = ddp_of(found)
    if switched_off(policy):
        with _failing(ddp.process_group):
            _check_free(ddp)
        return _left_alone(ddp.process_group, options)
    with _failing(ddp.process_group):
        state = _configured(ddp, policy, optimizer, scaler, options)
    seen = getattr(ddp, "_static_graph_delay_allreduce_enqueued", True)
    state.delayed = bool(ddp.static_graph) and not seen
    return _open(state)


class Attachment(OfThisProcess):
    """The connection of one model with gradwire, as `attach` makes it.

    After `detach` its last report, state and counters can still be read, and every call that would
    change something raises GradwireError.
    """

    _instead = ": save its state_dict(), and attach the copy of the module"

    def __init__(
        self, state: Connection | LeftAlone, pipeline: GradientPipeline | LeftAlone
    ) -> None:
        self._state = state
        self._pipeline = pipeline
        self._detached = False
        self._place = dist.get_rank(), dist.get_world_size()

    def __repr__(self) -> str:
        detached = ", detached" if self._detached else ""
        return f"Attachment(policy={self.policy.name!r}, step={self.step}{detached})"

    @property
    def policy(self) -> Policy:
        """The policy that writes the plans."""
        return self._pipeline.policy

    @property
    def communicator(self) -> Communicator:
        """The communicator that carries the gradients.

        Where ranks of a host sum among themselves, its workers are the hosts' leaders. On a rank
        that its leader speaks for it has no engine, and its `all_reduce` raises GradwireError.
        """
        return self._pipeline.communicator

    @property
    def number(self) -> int:
        """The number of the attachment among those over its engine, the same on all ranks."""
        return self._pipeline.number

    @property
    def step(self) -> int:
        """The number of the next step; a step is one backward pass that synchronises."""
        return self._pipeline.step

    @property
    def phase(self) -> Phase:
        """The phase of the next step, the same on all ranks.

        Assigning "critical" or "tolerant" votes for that phase, and assigning None withdraws the
        vote. A vote travels with the next step and decides from the one after it. One rank's vote
        is enough for all, and "critical" wins over "tolerant".

        Raises:
            ConfigError: the policy has no phases.
        """
        return self._pipeline.phase

    @phase.setter
    def phase(self, phase: Phase | None) -> None:
        self._check()
        self._pipeline.set_phase(phase)

    @property
    def grad_scale(self) -> float:
        """The factor that the loss, hence each gradient, is multiplied by; 1 without a scaler.

        Norms and residuals follow it. With `attach(…, scaler=…)` it is read from the GradScaler at
        the start of each step. Where something else scales the loss, assign it before the backward
        pass.
        """
        return self._pipeline.grad_scale

    @grad_scale.setter
    def grad_scale(self, scale: float) -> None:
        self._check()
        self._pipeline.set_grad_scale(scale)

    def epoch(self, number: int) -> None:
        """Notes that epoch `number` begins; policies with every="epoch" need this call."""
        self._check()
        self._pipeline.begin_epoch(number)

    def loss(self, value: float | torch.Tensor) -> None:
        """Adds a training loss to this worker's mean since the last step.

        The mean travels with the next step, whose report has the mean over all workers. A loss
        that is not finite makes that mean NaN on all ranks. It counts as a rise where the setting
        loss_rise is given, and is warned of otherwise.

        Args:
            value: a number, or a tensor that holds one.

        Raises:
            ConfigError: the value is no number.
        """
        self._check()
        held = plain(value.detach().squeeze() if isinstance(value, torch.Tensor) else value)
        if isinstance(held, bool) or not isinstance(held, (int, float)):
            raise ConfigError.about(
                f"loss({value!r})",
                "a number, or a tensor that holds one",
                setting="loss",
                value=value,
            )
        try:
            self._pipeline.add_loss(float(held))
        except OverflowError:
            self._pipeline.add_loss(math.inf if held > 0 else -math.inf)

    def report(self) -> StepReport:
        """Returns the report of the last completed step; raises GradwireError before the first."""
        return self._pipeline.report()

    def flush(self) -> None:
        """Makes a step exact on all ranks, which empties the residuals.

        One rank's call is enough. It travels with the next step, and the step after that one is
        exact. Where steps carry parts of the model in turn, as with chunked losses under
        fully_shard, call it before the first part; the exact steps go on until all parts are
        delivered. It is needed before a checkpoint that rank 0 alone writes, and before the number
        of workers changes. An exact step that a GradScaler skips delivers nothing, so the one after
        it is exact instead (`flush_pending`).
        """
        self._check()
        self._pipeline.flush()

    @property
    def flush_pending(self) -> bool:
        """Whether an exact step that `flush` asked for is still to come.

        A rank that has not called `flush` itself knows of it once the next step is over.
        """
        return self._pipeline.flush_pending

    def state_dict(self) -> dict[str, object]:
        """Returns what a resumed run needs, under this rank's own key.

        It is of the form {"ranks": 2, "rank 0 of 2": (state,)} with the numbers of the job. Each
        rank saves its own, also with torch.distributed.checkpoint, which takes the attachment
        itself as well. `state` has the step, the phase, and tensors by parameter name, on the CPU,
        which are copies:

        - residuals, and with a momentum memory velocities: float32, 1-D.
        - ages: int64 of shape [runs, 2], a number of elements and for how many steps in a row they
          have not counted.
        - magnitudes, with priority="results": float64 of shape [runs, 2], a number of elements and
          the mean magnitude of their last result.

        They are empty where another rank of its host speaks for this one.
        """
        return of_rank(self._pipeline.state_dict(), *self._place)

    def load_state_dict(self, state: dict[str, Any], *, strict: bool = True) -> None:
        """Restores what `state_dict` returned; each rank loads its own, all before the same step.

        Residuals are converted from the loss scale that they were saved under to the present one
        (`grad_scale`). A parameter that the state does not name has no residual. Another rank's
        state, or one of another number of ranks, is taken where no rank owed anything.

        Args:
            state: of this version or an earlier one.
            strict: whether a parameter that the state names and the model does not train is an
                error; with False its residual is dropped with a warning.

        Raises:
            ConfigError: the state is damaged, belongs to another policy or model, has residuals
                while error feedback is off, or is another rank's while something was owed. The
                error names the key, the value and what is allowed, and nothing is changed.
            GradwireError: the attachment is detached.
        """
        self._check()
        found, owner = read_rank(state, *self._place)
        self._pipeline.load_state_dict(found, strict=strict, owner=owner)

    def detach(self) -> None:
        """Ends the connection; from now on the process group averages the gradients.

        Call it on every rank between the same steps, because the last attachment over an engine
        closes the engine and its socket, and a rank that is in a step then fails. Residuals are
        lost unless `flush_pending` became False in the last step. The report file is closed. The
        module can be attached again. Calling it twice does no harm.

        Beside servers, which end when all workers have left, the engine stays open for the next
        attachment until the process ends.
        """
        if not self._detached:
            self._detached = True
            self._state.deactivate()

    def counters(self) -> dict[str, float]:
        """Returns the engine's totals since the ranks met; empty without any engine.

        A rank has no engine without any peer, or where another rank of its host speaks for it.

        They are the packets (datagrams) and bytes (UDP payload) sent and received, the
        retransmissions, the losses declared and the system calls. The path that is measured now
        adds rtprop_ns and queue_delay_ns (nanoseconds), btlbw (bytes/s), send_window and
        receive_window (bytes).
        """
        return self._pipeline.counters()

    def _check(self) -> None:
        if self._detached:
            raise GradwireError("this attachment is detached: attach the module again")


def _meant(
    replicas: DeviceMesh | dist.ProcessGroup | None,
) -> Sequence[dist.ProcessGroup | None]:
    """Returns the groups in which other ranks may wait for one that gave these replicas."""
    if isinstance(replicas, DeviceMesh):
        return replicas.get_all_groups()
    return [replicas if isinstance(replicas, dist.ProcessGroup) else None]


def _group_of_replicas(
    replicas: DeviceMesh | dist.ProcessGroup | None,
) -> dist.ProcessGroup | None:
    if isinstance(replicas, DeviceMesh) and replicas.ndim != 1:
        raise ConfigError.of(
            "replicas",
            f"a mesh of shape {tuple(replicas.shape)}",
            "one dimension, along which this rank's shards are replicated, as in mesh['replicate']",
        )
    if isinstance(replicas, DeviceMesh):
        return replicas.get_group()
    if replicas is not None and not isinstance(replicas, dist.ProcessGroup):
        raise ConfigError.of("replicas", replicas, "a DeviceMesh, a process group of torch or None")
    return replicas


def _fully_sharded(
    model: torch.nn.Module,
    replicas: dist.ProcessGroup | None,
    policy: str | Policy | None,
    options: dict[str, object],
    optimizer: Given,
    scaler: torch.amp.GradScaler | None,
) -> Connection:
    with _failing(replicas):
        groups = shard_groups(model)
    with _failing(replicas or process_group_of(groups)):
        common = policy, options
        more = {"optimizer": optimizer, "scaler": scaler}
        if replicas is None:
            sharing = process_group_of(groups).size()
            _name_few(sharing)
            kind = Sharded if sharing > 1 else Alone
            return kind(model, groups, *common, **more)
        return Replicated(model, groups, replicas, *common, **more)


def _name_few(sharing: int) -> None:
    """Says, in one line of the log, that other ranks of the job get nothing of these gradients."""
    ranks = dist.get_world_size()
    if sharing < ranks and dist.get_rank() == 0:
        log.warning(
            "gradients are averaged over the %d of the job's %d ranks that this model is sharded "
            "over; where other ranks have replicas of its shards, each set of ranks trains its "
            "own: attach with replicas=mesh['replicate']",
            sharing,
            ranks,
        )


def _left_sharded(
    model: torch.nn.Module, replicas: dist.ProcessGroup | None, options: dict[str, object]
) -> Attachment:
    """Leaves a model under fully_shard to torch, but for the averages over replicas."""
    process_group = replicas or shard_group_of(model)
    with _failing(process_group):
        check_detached(model)
        if replicas is not None:
            for group in shard_groups(model):
                group.module.set_all_reduce_hook(functools.partial(average, replicas))
    return _left_alone(process_group, options)


def _left_alone(process_group: dist.ProcessGroup | None, options: dict[str, object]) -> Attachment:
    left = LeftAlone(process_group, options)
    return Attachment(left, left)


@contextlib.contextmanager
def _failing(*process_groups: dist.ProcessGroup | None) -> Iterator[None]:
    """Publishes a failure of this rank, because the others would wait for it where they meet."""
    try:
        yield
    except BaseException as error:
        for process_group in process_groups:
            with contextlib.suppress(Exception):  # a store that is gone is not the cause
                Group.of(process_group).meeting("attach", 0.0).tell_failure(error)
        raise


def _configured(
    model: DistributedDataParallel,
    policy: str | Policy | None,
    optimizer: Given,
    scaler: torch.amp.GradScaler | None,
    options: dict[str, object],
) -> HookState:
    """Returns the module's hook state, new or reused, with the policy and settings asked for."""
    check_hands_over(model)
    found = _found(model)
    if found is not None:
        found.activate(policy, options, optimizer, model.module, scaler)
        return found
    state = HookState(
        policy,
        model=model.module,
        process_group=model.process_group,
        optimizer=optimizer,
        scaler=scaler,
        find_unused_parameters=model.find_unused_parameters,
        **options,
    )
    _register(model, state)
    return state


def _found(model: DistributedDataParallel) -> HookState | None:
    """Returns the hook state of a module that was attached before and is detached, else None.

    A copy of such a module has the list of hooks but no hook, so it gives None too.
    """
    if not model._comm_hooks:
        return None
    hook, found = model._comm_hooks[0]
    if hook is not comm_hook or not isinstance(found, HookState):
        name = getattr(hook, "__qualname__", repr(hook))
        raise ConfigError.about(
            f"the module already has the communication hook {name!r}",
            "DDP takes one hook for its whole life; attach gradwire to a module without one",
            setting="model",
            value=name,
        )
    _check_free(model)
    return found if found.serves(model) else None


def _check_free(model: DistributedDataParallel) -> None:
    for hook, state in model._comm_hooks:
        if hook is not comm_hook or not isinstance(state, HookState):
            continue
        if state.serves(model) and state.active:
            raise ConfigError.about(
                "gradwire is already attached to this module",
                "call detach() on that attachment first",
                setting="model",
            )


def _register(model: DistributedDataParallel, state: HookState) -> None:
    listed, model._comm_hooks = model._comm_hooks, []  # a copy lists the original's hooks
    try:
        model.register_comm_hook(state, comm_hook)
    except RuntimeError as error:
        model._comm_hooks = listed
        raise ConfigError.about(
            "the module does not take gradwire's communication hook",
            f"{error} (DDP takes one hook for its whole life, built-in ones and gradwire's own, "
            "registered by hand, included)",
            setting="model",
        ) from error
    state.serve(model)


def _open(state: Connection) -> Attachment:
    try:
        state.attached = True
        return Attachment(state, state.pipeline)
    except BaseException:
        state.deactivate()  # the module goes on over its process group
        raise
