"""Connection: what a wrapped module needs to reach gradwire, whichever wrapper it has.

It has the policy, the settings and the names of the model's parameters, opens the pipeline together
with the other ranks, and closes it.
"""

import contextlib
import functools
import logging
import weakref
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradwire.core.errors import ConfigError
from gradwire.core.names import named_parameters, some_of
from gradwire.core.plan import LARGEST_DATAGRAM
from gradwire.core.settings import Settings
from gradwire.exports.telemetry import Telemetry, open_telemetry
from gradwire.policies import Policy
from gradwire.policies.registry import agreed_configuration
from gradwire.training.bucket import ParameterNames
from gradwire.training.configure import configure
from gradwire.training.fallback import fallback_of
from gradwire.training.groups import Group
from gradwire.training.hosts.follower import Follower
from gradwire.training.hosts.leader import Leader
from gradwire.training.hosts.seat import share_number, take_seat
from gradwire.training.off import Off, switched_off
from gradwire.training.optimizers import Given, Optimizers, held_by, several
from gradwire.training.pipeline import GradientPipeline
from gradwire.training.staging import DEVICES
from gradwire.transport.communicator import Communicator
from gradwire.transport.introductions import agree
from gradwire.transport.meeting import Meeting
from gradwire.transport.native import load_engine

log = logging.getLogger("gradwire")


class Connection:
    """The configuration of one wrapped module, and its pipeline while it is connected.

    Subclasses give the pipeline what the wrapper hands over.

    Attributes:
        active: Whether gradients go over gradwire.
        attached: Whether it belongs to an attachment.
    """

    wrapper: ClassVar[str] = "DDP"
    """The wrapper of the module, which is the same on all ranks."""
    scattered: ClassVar[bool] = False
    """Whether each rank gets its shard of the results alone."""

    _optimizers: Optimizers
    _scaler: torch.amp.GradScaler | None

    def __init__(
        self,
        policy: str | Policy | None,
        options: dict[str, object],
        *,
        model: torch.nn.Module | None,
        process_group: dist.ProcessGroup | None,
        optimizer: Given,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        for setting, given, kind in (
            ("model", model, torch.nn.Module),
            ("process_group", process_group, dist.ProcessGroup),
        ):
            if given is not None and not isinstance(given, kind):
                allowed = f"allowed are None and objects of type {kind.__name__}"
                raise ConfigError.of(setting, given, allowed)
        self.process_group = process_group
        self.active = True
        self.attached = False
        self._know(model)
        self._unhook = contextlib.ExitStack()  # takes its hooks from the optimizers
        self._configure(policy, options, optimizer, scaler)
        self._pipeline: GradientPipeline | None = None

    @property
    def pipeline(self) -> GradientPipeline:
        """The open pipeline; the first use opens it, and every rank of the group takes part."""
        if self._pipeline is None:
            group = Group.of(self.process_group)
            meeting = group.meeting("attach", self._settings.rendezvous_timeout)
            writer, failure = self._ready(group)
            with contextlib.ExitStack() as undo:
                if writer is not None:
                    undo.callback(writer.close)
                try:
                    agreed = agreed_configuration(self.policy, self._settings)
                    agree(meeting, {**agreed, "wrapper": self.wrapper}, failure)
                    self._pipeline = self._open(group, meeting, writer, undo)
                except BaseException as error:
                    meeting.tell_failure(error)
                    raise
                undo.pop_all()
            meeting.close()
            self._watch_failures(self._pipeline)
            hook = functools.partial(_skip_step, self._pipeline)
            for each in self._optimizers.each:
                self._unhook.callback(each.register_step_pre_hook(hook).remove)
        return self._pipeline

    def _open(
        self,
        group: Group,
        meeting: Meeting,
        writer: Telemetry | None,
        undo: contextlib.ExitStack,
    ) -> GradientPipeline:
        """Opens the engine where this rank has one, and makes the pipeline; collective.

        Args:
            undo: Gets what a failure has to undo.
        """
        settings = self._settings
        parts = self.policy, settings, self._names
        rest = self._optimizers, writer
        seat = take_seat(group, meeting, settings)
        if seat is None:
            communicator, number = _connect(group, settings, meeting, undo, self._module)
            return GradientPipeline(
                communicator,
                *parts,
                number,
                *rest,
                scaler=self._scaler,
                fallback=fallback_of(communicator, settings, number),
            )
        undo.callback(seat.link.close)
        workers = group.workers(seat.hosts)
        among_workers = workers.meeting("attach", settings.rendezvous_timeout, meeting)
        try:
            if seat.leads:
                check_memory(settings, self._largest, workers.world_size)
            leader = None if seat.leads else seat.ranks[0]
            communicator, number = _connect(
                workers, settings, among_workers, undo, self._module, leader
            )
            number = share_number(meeting, number)
        except BaseException as error:
            among_workers.tell_failure(error)
            raise
        among_workers.close()
        kind = Leader if seat.leads else Follower
        more: dict[str, Any] = {"scaler": self._scaler, "shares_memory": self.attached}
        more["module"] = self._module
        if seat.leads:
            more["fallback"] = fallback_of(communicator, settings, number)
        return kind(seat, communicator, *parts, number, *rest, **more)

    def _ready(self, group: Group) -> tuple[Telemetry | None, ConfigError | None]:
        """Opens the report file and the exporters, or finds why this rank cannot take part."""
        try:
            if not self.attached:
                _check_alone(self.policy, self._settings)
            if self._settings.server_count and not group.whole:
                raise ConfigError.of(
                    "route",
                    self._settings.route,
                    "servers serve the whole job; use route='sharded'",
                    beside=f"with a process group of {group.world_size} of the job's ranks",
                )
            check_memory(self._settings, self._largest, group.world_size)
            self._prepare()  # a copy knows no names
            if group.rank == 0:
                _name_alone(self._alone)
            return open_telemetry(self._settings, group.job_rank, first=group.rank == 0), None
        except ConfigError as error:
            return None, error

    def _watch_failures(self, pipeline: GradientPipeline) -> None:
        """Has every later use of the module and of its optimizers raise what stops a pipeline."""
        held = weakref.ref(self)

        def check_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            here = held()
            if here is not None:
                here._check_step(optimizer)

        def refuse() -> None:
            here = held()
            if here is not None:
                here._refuse_forward()

        watch = register_optimizer_step_pre_hook(check_step)
        self._unhook.callback(weakref.finalize(self, watch.remove))
        pipeline.failures.when_stopped = refuse
        if pipeline.failures.stopped() is not None:
            refuse()

    def check(self) -> None:
        if self._pipeline is not None:
            self._pipeline.failures.check()

    def _check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises what has stopped the pipeline where an optimizer steps with its gradients."""
        if self._holds(optimizer):
            self.check()

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(map(self._names.knows, held_by(optimizer)))

    def _refuse_forward(self) -> None:
        """Has the module's forward passes raise what has stopped the pipeline, on any thread."""

    def _prepare(self) -> None:
        servers = self._settings.server_count
        self.policy.prepare(self._tensors, vectors=self._vectors, servers=servers)

    def activate(
        self,
        policy: str | Policy | None,
        options: dict[str, object],
        optimizer: Given = None,
        model: torch.nn.Module | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Configures a state anew after `deactivate`."""
        if model is not None:
            self._know(model)
        self._configure(policy, options, optimizer, scaler)
        self._pipeline = None
        self.active = True

    def deactivate(self) -> None:
        """Closes the pipeline; from now on the hook forwards to the process group.

        DDP holds the state for as long as the module lives, so all that it held is let go.
        """
        self.active = self.attached = False
        self._unhook.close()
        pipeline, self._pipeline = self._pipeline, None
        self._optimizers, self._scaler = Optimizers(), None
        if pipeline is not None:
            pipeline.failures.when_stopped = no_op
            pipeline.close()

    def _know(self, model: torch.nn.Module | None) -> None:
        self._names = ParameterNames(model)
        self._tensors: dict[str, int] | None = None
        self._vectors: frozenset[str] = frozenset()
        self._trained: Mapping[str, torch.nn.Parameter] = {}  # those that are averaged
        self._largest = ("", 0)
        self._alone: list[str] = []  # trained parameters that nobody averages
        self._module = "a module" if model is None else f"module {type(model).__name__}"
        if model is None:
            return
        self._sparse = _sparse(model)
        averaged = self._averaged(model)
        self._check_carried(averaged)
        self._note(averaged)
        trained = (name for name, each in named_parameters(model).items() if each.requires_grad)
        self._alone = [name for name in trained if name not in averaged]

    def _averaged(self, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        """Returns the trained parameters whose gradients are averaged, in the model's order."""
        ignored: Collection[str] = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        out = {id(each) for name, each in model.named_parameters() if name in ignored}
        named = named_parameters(model).items()
        return {name: each for name, each in named if each.requires_grad and id(each) not in out}

    def _check_carried(self, averaged: Mapping[str, torch.nn.Parameter]) -> None:
        for name, parameter in averaged.items():
            if parameter.device.type not in DEVICES:
                raise ConfigError.about(
                    f"parameter {name!r} lies on device {parameter.device}",
                    f"allowed are {' and '.join(DEVICES)}",
                    setting=name,
                    value=str(parameter.device),
                )
            if parameter.is_complex():
                raise ConfigError.about(
                    f"parameter {name!r} has dtype {parameter.dtype}",
                    "gradients of real numbers are carried only; keep it as a real tensor "
                    "(torch.view_as_real)",
                    setting=name,
                    value=parameter.dtype,
                )
            if name in self._sparse:
                raise ConfigError.about(
                    f"parameter {name!r} of {self._sparse[name]}(sparse=True)",
                    "dense gradients are carried only; make it with sparse=False",
                    setting=name,
                    value=True,
                )

    def _note(self, averaged: Mapping[str, torch.nn.Parameter]) -> None:
        self._trained = averaged
        self._tensors = {name: each.numel() for name, each in averaged.items()}
        self._vectors = frozenset(name for name, each in averaged.items() if each.dim() < 2)
        self._names.trained = self._tensors
        name, elements = max(self._tensors.items(), key=lambda each: each[1], default=("", 0))
        self._largest = (f"parameter {name!r}", elements)

    def _configure(
        self,
        policy: str | Policy | None,
        options: dict[str, object],
        optimizer: Given,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        if switched_off(policy):
            policy = Off()
            options = {k: v for k, v in options.items() if k == "rendezvous_timeout"}
        else:
            load_engine()  # a missing engine is an error before the ranks meet
        optimizers = several(optimizer)
        for each in optimizers:
            self._check_optimizer(each)
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise ConfigError.of("scaler", scaler, "a torch.amp.GradScaler, or None")
        self.policy, self._settings = configure(
            policy, options, optimizer=optimizers, scattered=self.scattered
        )
        self._prepare()
        if self.policy.fill_was_open and not Optimizers(optimizers).hold(self._trained.values()):
            self.policy.fill = "zero"
        self._optimizers = Optimizers(optimizers, self._needs_holders(scaler))
        self._optimizers.check(self._trained.items())
        self._scaler = scaler

    def _check_optimizer(self, optimizer: object) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError.of(
                "optimizer", optimizer, "a torch.optim.Optimizer, a list of several, or None"
            )
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise _refused(
                optimizer,
                "a wrapper that takes no step hooks (it is not initialised as a "
                "torch.optim.Optimizer); give the optimizer inside it",
            )
        if getattr(optimizer, "_overlap_with_ddp", False):
            raise _refused(
                optimizer,
                "with overlap_with_ddp=True it steps in a communication hook of its own and its "
                "step() does nothing; make it with overlap_with_ddp=False",
            )
        held = (p for group in optimizer.param_groups for p in group["params"])
        if self._names.trained is not None and not any(map(self._names.knows, held)):
            raise _refused(
                optimizer,
                "it holds none of the module's parameters; give the one that steps with "
                "their gradients, or None",
            )

    def _needs_holders(self, scaler: torch.amp.GradScaler | None) -> str:
        """Returns why the optimizer of each parameter has to be known; "" where it need not be."""
        keeps = self._settings.feedback or bool(self.policy.momentum)
        if scaler is not None and scaler.is_enabled() and keeps:
            return "the loss scaler decides by optimizer which gradients it drops"
        if self._settings.guard == "skip":
            return "guard='skip' keeps each optimizer from a step"
        if self.policy.fill == "momentum":
            return "fill='momentum' takes what is missing from its optimizer"
        return ""


def _skip_step(pipeline: GradientPipeline, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Takes the gradients of a skipped step away before the optimizer steps.

    Without gradients neither the parameters nor momentum nor weight decay move. Parameters of
    other modules keep theirs, and so do those of other optimizers until these step.
    """
    pipeline.stepped(optimizer)
    for parameter in pipeline.take_skipped(optimizer):
        parameter.grad = None


def _connect(
    group: Group,
    settings: Settings,
    meeting: Meeting,
    undo: contextlib.ExitStack,
    module: str,
    leader: int | None = None,
) -> tuple[Communicator, int]:
    """Opens a communicator of a group and takes a number of it; `undo` gets how to close it."""
    communicator = group.communicator(settings, meeting, leader)
    undo.callback(communicator.let_go)  # also while somebody holds the error
    number = communicator.take_number(meeting, module)
    undo.callback(communicator.return_number)
    return communicator, number


def no_op() -> None:
    """Stands in for a missing optimizer's handle, and for a module that is gone."""


def _check_alone(policy: Policy, settings: Settings) -> None:
    """Raises ConfigError for options that need calls which only an attachment has."""
    waits: tuple[str, object, str, str] | None = None
    if policy.awaits_epochs:
        waits = "every", "epoch", "epoch", "give every= as a number of steps"
    elif settings.loss_rise is not None:
        waits = "loss_rise", settings.loss_rise, "loss", "leave it out"
    if waits is not None:
        option, value, call, instead = waits
        raise ConfigError.of(
            option,
            value,
            f"use gradwire.attach, or {instead}",
            beside=f"with the bare hook, which has no attachment.{call}() to call",
        )


def _refused(optimizer: object, why: str) -> ConfigError:
    kind = type(optimizer).__name__
    return ConfigError.about(f"optimizer={kind}", why, setting="optimizer", value=kind)


def _sparse(model: torch.nn.Module) -> dict[str, str]:
    """Returns weights whose gradients are sparse, as embeddings' can be, with the module's type."""
    names = {id(each): name for name, each in named_parameters(model).items()}
    return {
        names[id(weight)]: type(module).__name__
        for module in model.modules()
        if getattr(module, "sparse", False) is True
        and id(weight := getattr(module, "weight", None)) in names
    }


def _name_alone(names: list[str]) -> None:
    """Names, in one line of the log, trained parameters whose gradients nobody averages."""
    if names:
        log.warning(
            "nobody averages the gradients of %s: the wrapper ignores these parameters, or does "
            "not hold them, and each rank trains its own",
            some_of(names),
        )


def check_memory(settings: Settings, largest: tuple[str, int], world_size: int) -> None:
    """Raises ConfigError where a transfer needs more memory than this rank's engine may hold.

    A parameter travels in one transfer, and every rank sums its share of it. What else DDP puts
    into the same bucket is known only when the bucket comes.
    """
    what, elements = largest
    if settings.server_count or world_size == 1 or elements == 0:
        return
    native = load_engine()
    plan = native.Plan(elements=elements, regions=[(0, elements, 0.0)])
    least = native.least_memory_limit(
        plan, settings.datagram or LARGEST_DATAGRAM, world_size, engines=settings.cores
    )
    if (settings.memory_limit or native.DEFAULT_MEMORY_LIMIT) >= least:
        return
    default = "" if settings.memory_limit else f"(the default, {native.DEFAULT_MEMORY_LIMIT})"
    raise ConfigError.of(
        "memory_limit",
        settings.memory_limit,
        f"one transfer carries {what}, for which each rank needs {least} bytes or more; raise it, "
        "or use more ranks",
        beside=default,
    )
