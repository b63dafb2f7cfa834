"""Passes: where the forward and backward passes of a model under fully_shard begin and end.

autograd calls a function at the end of the backward pass in which it was queued. A pass may run
inside of another one (reentrant checkpointing), and autograd does not say so. The function is
therefore queued as soon as anything of the model happens in the outermost pass: torch gathers the
parameters of a module for its backward pass, a checkpointed module computes its outputs again, or
gradients are reduced.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

from gradwire.core.errors import ConfigError
from gradwire.training.fsdp_module import states_of

BACKWARD, NODE = _engine_run_backward.__code__, BackwardCFunction.apply.__code__
"""The code of a backward pass, and that of a node of its graph which is written in Python."""


class Passes:
    """Watches the passes of a model until it is closed.

    Args:
        forward: Called before a module under fully_shard computes its outputs, with torch's own
            object for the module.
        begins: Called when a backward pass is seen first.
        reaches: Called before torch gathers the parameters of a module for a backward pass.
        ends: Called when this backward pass is over, those inside of it included, and torch has
            reduced all gradients.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        forward: Callable[[Any], None],
        begins: Callable[[], None],
        reaches: Callable[[], None],
        ends: Callable[[], None],
    ) -> None:
        self._forward, self._begins, self._ends = forward, begins, ends
        self._reaches = reaches
        self._seen = -1  # autograd's number of the pass whose end is awaited; -1 for none
        self._running: Callable[[], object] = lambda: None  # what this pass holds until it is over
        self._states = states_of(model)
        self._undo: list[Callable[[], None]] = []
        for state, modules in self._states:
            self._watch(state, modules)

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()

    def reduce(self, what: str) -> None:
        if _present() == -1:
            raise ConfigError.about(
                f"{what} are reduced outside of a backward pass",
                "a step of gradwire ends with the backward pass that reduces, so pipeline "
                "schedules and calls of post_backward() by hand are not carried; detach() and "
                "leave this model to torch (policy='off')",
                setting="model",
                value=what,
            )
        if not self._notice():
            raise ConfigError.about(
                f"{what} are reduced in a backward pass inside of another one, whose end is not "
                "seen",
                "a function of autograd that runs a backward pass has to compute its modules' "
                "outputs in it again, as torch.utils.checkpoint does, or the model has to return "
                "its outputs in tensors, lists, dicts or dataclasses",
                setting="model",
                value=what,
            )

    def interrupted(self, state: Any = None) -> bool:
        """Returns whether torch stands in the middle of a backward pass that an exception ended.

        It gathers, scatters and reduces nothing any more then, and does not say so.

        Args:
            state: torch's own object for a module to ask; None for those of all modules.
        """
        asked = [each for each, _ in self._states] if state is None else [state]
        return not self._runs() and any(
            getattr(each._state_ctx, "post_backward_final_callback_queued", False) for each in asked
        )

    def _runs(self) -> bool:
        """Returns whether a backward pass runs now, on this thread or, of the model, on another."""
        return _present() != -1 or self._running() is not None

    def _watch(self, state: Any, modules: list[torch.nn.Module]) -> None:
        """Has torch's object for some modules say what happens to them.

        Forward methods that are registered (`register_fsdp_forward_method`) call no hook of the
        module, but the object's own method.
        """

        def enters(*_: Any) -> None:
            self._enter(state)

        enters = torch.compiler.disable(enters)  # type: ignore[no-untyped-call]
        for module in modules:
            self._undo.append(module.register_forward_pre_hook(enters, prepend=True).remove)
        before, queue = state._pre_forward, state._register_root_post_backward_final_callback

        def pre_forward(*args: Any) -> Any:
            enters()
            return before(*args)

        def queues() -> None:
            self._notice()  # before torch says so to other threads
            queue()
            self._reaches()

        state._pre_forward = torch.compiler.disable(pre_forward)  # type: ignore[no-untyped-call]
        state._register_root_post_backward_final_callback = queues
        for name in ("_pre_forward", "_register_root_post_backward_final_callback"):
            self._undo.append(functools.partial(delattr, state, name))

    def _enter(self, state: Any) -> None:
        if _present() != -1:
            self._notice()
        elif not self._runs():
            self._seen = -1  # an earlier pass may have been given up
        self._forward(state)

    def _notice(self) -> bool:
        """Notes that a backward pass runs now; returns whether the end of it is awaited.

        It is not where the pass runs inside of another one of which nothing has been seen.
        """
        present = _present()
        inside = present != self._seen and _is_inside()
        if self._seen == -1 and inside:
            return False
        if present != self._seen and not inside:  # an earlier one may have been given up
            self._seen = present
            self._begins()
            self._await_end()
        return True

    def _await_end(self) -> None:
        """Has the end of the pass that runs now noted.

        autograd lets go of a pass's functions when the pass is over, also by an exception.
        """

        def end() -> None:
            # torch's own callbacks reduce, too: those of several roots may come after the first.
            _after_backward(self._end)

        self._running = weakref.ref(end)
        _after_backward(end)

    def _end(self) -> None:
        self._seen = -1
        self._running = lambda: None
        self._ends()


def _present() -> int:
    """Returns autograd's number of the backward pass that runs now; -1 for none."""
    return torch._C._current_graph_task_id()


def _after_backward(function: Callable[[], None]) -> None:
    """Calls a function when the backward pass is over, after all that wait for that now."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _is_inside() -> bool:
    """Returns whether the backward pass that runs now was begun by a node of another one.

    On a device's thread of autograd there is no code of the outer pass, but of its node.
    """
    frame: FrameType | None = sys._getframe()
    begun = False
    while frame is not None:
        if begun and frame.f_code in (BACKWARD, NODE):
            return True
        begun = begun or frame.f_code is BACKWARD
        frame = frame.f_back
    return False
