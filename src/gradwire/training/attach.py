"""`gradwire.attach`: one line that lets a DDP module's gradients travel over gradwire."""

import contextlib
import math
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.agreed import Phase
from gradwire.core.checks import plain
from gradwire.core.errors import ConfigError, GradwireError
from gradwire.core.report import StepReport
from gradwire.policies import Policy
from gradwire.training.checks import check_hands_over, ddp_of
from gradwire.training.groups import Group
from gradwire.training.hook import HookState, comm_hook
from gradwire.training.pipeline import GradientPipeline
from gradwire.transport.operation import Connected

__all__ = ["Attachment", "attach"]


def attach(
    model: torch.nn.Module,
    policy: str | Policy | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **options: object,
) -> "Attachment":
    """Lets the gradients of a DDP module travel over gradwire, on top of any process group.

    A collective call: every rank of the module's process group makes it, alike, between
    construction and the first backward pass. It returns once all ranks have met.

    policy: a name ("reliable", "dblp", …: docs/policies.md), a policy object, or None for
    GRADWIRE_POLICY, else "adaptive". optimizer: the one that steps once after each backward pass:
    a learning rate that has halved counts as critical, its family decides error_feedback="auto",
    and guard="skip" can keep it from stepping. scaler: the one that scales the loss: norms and
    residuals follow its scale, and a step that it skips takes nothing of what was owed with it.
    options: the policy's own (p_low=0.01, …) and the common settings of
    `gradwire.core.settings.Settings` (route=…, interface=…, report="steps.jsonl", …); what is not
    given is read from GRADWIRE_* variables.

    Several modules may be attached, alike on all ranks, and may share backward passes, on one
    device or on several: their buckets and the ends of their steps need not come in the same order
    on all ranks.

    model may have been compiled (`torch.compile(ddp)`), and may be a copy of one that is attached,
    made by copy.deepcopy or torch.save: it averages over its process group until it is attached.

    Raises ConfigError for a module that is not DDP, that already has a communication hook, whose
    gradients reach no hook (torch._dynamo.config.optimize_ddp = "python_reducer"), or
    for impossible options, a report file that cannot be opened among them; RendezvousError naming
    ranks that are absent, configured otherwise, or failed in their part.
    """
    ddp = ddp_of(model)
    state = _configured(ddp, policy, optimizer, scaler, options)
    return _open(state, ddp)


class Attachment(Connected):
    """A DDP module whose gradients travel over gradwire. Made by `attach`.

    After `detach` it still tells its last report, state and counters; all that would change
    something raises GradwireError.
    """

    _instead = ": save its state_dict(), and attach the copy of the module"

    def __init__(self, state: HookState, pipeline: GradientPipeline) -> None:
        self._state = state
        self._pipeline = pipeline
        self._detached = False

    @property
    def policy(self) -> Policy:
        """The policy that writes the plans."""
        return self._pipeline.policy

    @property
    def step(self) -> int:
        """The number of the next step; a step is one backward pass that synchronises."""
        return self._pipeline.step

    @property
    def phase(self) -> Phase:
        """The phase of the next step, the same on all ranks.

        Assigning "critical" or "tolerant" votes for that phase, None leaves it to the detector:
        the vote travels with the next step and rules from the one after it, on all ranks as soon
        as one rank votes ("critical" wins). Raises ConfigError for a policy without phases.
        """
        return self._pipeline.phase

    @phase.setter
    def phase(self, phase: Phase | None) -> None:
        self._check()
        self._pipeline.set_phase(phase)

    @property
    def grad_scale(self) -> float:
        """The factor that gradients are multiplied by (1 without a GradScaler).

        Norms and residuals follow it. `attach(…, scaler=…)` asks a GradScaler at each step's
        start; where something else scales the loss assign it before the backward pass.
        """
        return self._pipeline.grad_scale

    @grad_scale.setter
    def grad_scale(self, scale: float) -> None:
        self._check()
        self._pipeline.set_grad_scale(scale)

    def epoch(self, number: int) -> None:
        """Says that epoch `number` begins; what every="epoch" looks at."""
        self._check()
        self._pipeline.begin_epoch(number)

    def loss(self, value: float | torch.Tensor) -> None:
        """Takes a training loss, a number or a tensor that holds one. Each worker's mean since the
        last step travels with the next, whose report has the mean over the workers. One that is
        not finite makes that mean NaN on all ranks and counts as a rise (setting loss_rise; without
        it, a warning)."""
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
        """The report of the last completed step; raises GradwireError before the first."""
        return self._pipeline.report()

    def flush(self) -> None:
        """Makes the next step exact and so empties the residuals.

        Call it on every rank before the same step: before a checkpoint that only rank 0 writes,
        and before the number of workers changes. A step that is not finite and that a `GradScaler`
        therefore skips delivers nothing: then the next one is exact (`flush_pending`).
        """
        self._check()
        self._pipeline.flush()

    @property
    def flush_pending(self) -> bool:
        """Whether the exact step that `flush` asked for is still to come, alike on all ranks."""
        return self._pipeline.flush_pending

    def state_dict(self) -> dict[str, object]:
        """Step, phase, and by parameter name what this rank keeps: residuals and, with a momentum
        memory, velocities (float32 tensors, 1-D), ages (int64 tensors of shape [runs, 2]:
        elements, steps running without counting) and, with priority="results", magnitudes
        (float64 tensors of shape [runs, 2]: elements, mean magnitude of the last result)."""
        return self._pipeline.state_dict()

    def load_state_dict(self, state: dict[str, Any], *, strict: bool = True) -> None:
        """Restores what `state_dict` returned, each rank its own, all before the same step.

        What was owed under another loss scale is owed under the present one (`grad_scale`). A
        parameter that the state does not name is owed nothing. One that it names and the model does
        not train is an error; with strict=False what it was owed is dropped with a warning.
        Raises ConfigError naming key, value and what is allowed for a state that is damaged, of
        another policy, of another model, of a parameter with another size, or that owes something
        while error feedback is off; then nothing is changed. GradwireError after detach.
        """
        self._check()
        self._pipeline.load_state_dict(state, strict=strict)

    def detach(self) -> None:
        """Gives the gradients back to the process group: the hook forwards to it from now on.

        Call it on every rank between the same steps: the last attachment over an engine closes it
        and its socket, and a rank that is in a step then fails. The module can be attached again.
        What is still owed is lost: flush() before the last step delivers it. The report file is
        closed, and what the hook holds is let go; this object keeps its last report, state and
        counters. Beside servers, which end when all workers have left, the engine stays open for
        the next attachment, to the end of the process. Idempotent.
        """
        if not self._detached:
            self._detached = True
            self._state.deactivate()

    def counters(self) -> dict[str, float]:
        """The engine's totals since the ranks met; empty without any peer.

        Packets (datagrams) and bytes (UDP payload) sent and received, retransmissions, losses
        declared, system calls; of the path that is measured now rtprop_ns and queue_delay_ns
        (nanoseconds), btlbw (bytes/s), send_window and receive_window (bytes)."""
        return self._pipeline.communicator.counters()

    def _check(self) -> None:
        if self._detached:
            raise GradwireError("this attachment is detached: attach the module again")


def _configured(
    model: DistributedDataParallel,
    policy: str | Policy | None,
    optimizer: torch.optim.Optimizer | None,
    scaler: torch.amp.GradScaler | None,
    options: dict[str, object],
) -> HookState:
    """The module's hook state, new or taken up again, with the policy and settings asked for.

    What makes this rank fail is told to the others, who would wait for it where they meet.
    """
    try:
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
    except BaseException as error:
        with contextlib.suppress(Exception):  # of a store that is gone: the cause is the other
            meeting = Group.of(model.process_group).meeting("attach", 0.0)
            meeting.tell_failure(error)
        raise


def _found(model: DistributedDataParallel) -> HookState | None:
    """The state of gradwire's hook, where the module was attached before and is detached; None for
    a copy of such a module, which has the list of hooks but no hook."""
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
    if not found.serves(model):
        return None
    if found.active:
        raise ConfigError.about(
            "gradwire is already attached to this module",
            "call detach() on that attachment first",
            setting="model",
        )
    return found


def _register(model: DistributedDataParallel, state: HookState) -> None:
    listed, model._comm_hooks = model._comm_hooks, []  # those of the module that this is a copy of
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


def _open(state: HookState, model: DistributedDataParallel) -> Attachment:
    try:
        state.attached = True
        seen = getattr(model, "_static_graph_delay_allreduce_enqueued", True)
        state.delayed = bool(model.static_graph) and not seen
        return Attachment(state, state.pipeline)
    except BaseException:
        state.deactivate()  # the module goes on over its process group
        raise
