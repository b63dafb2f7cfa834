"""Policy "off" leaves DDP alone, on all ranks or on none."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import gradwire
from ddp_jobs import average_of, batch, gradients, local_gradients, model, train, wrap
from ranks import Ranks


def leaves_alone(rank: int, world: int, variable: bool) -> list[str]:
    """Options of the policy that is switched off are none of "off"; a second module says nothing
    more."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        if variable:
            patch.setenv("GRADWIRE_POLICY", "off")
        net, plain = model(), model()
        ddp, other = wrap(net), wrap(plain)
        taken = wrap(model())
        taken.register_comm_hook(None, allreduce_hook)
        policy = "mlt" if variable else "off"
        attachment = gradwire.attach(ddp, policy, p=0.3, loss_rise=0.5, report="/no/such/folder/x")
        gradwire.attach(taken, "off")
    assert not ddp._comm_hooks
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        attachment.epoch(step)
        attachment.loss(1.0)
        attachment.phase = "critical"
        attachment.grad_scale = 2.0
        attachment.flush()
        for module in (ddp, other):
            module.zero_grad()
            module(batch(rank, step)).square().mean().backward()
        assert torch.equal(gradients(net), gradients(plain))
        optimizer.step()
        plain.load_state_dict(net.state_dict())
        report = attachment.report()
        assert (report.policy, report.delivered, report.bytes) == ("off", 1.0, 0)
    assert (attachment.phase, attachment.step, attachment.flush_pending) == ("critical", 0, False)
    assert (attachment.policy.name, attachment.counters()) == ("off", {})
    with pytest.raises(gradwire.GradwireError, match="gradwire is off"):
        _ = attachment.communicator
    attachment.load_state_dict(attachment.state_dict())
    attachment.detach()
    attachment.detach()
    with pytest.raises(gradwire.GradwireError, match="detached"):
        attachment.flush()
    on = gradwire.attach(ddp, "mlt", p=0.1)  # goes on from what was saved while it was off
    on.load_state_dict(attachment.state_dict())
    with pytest.raises(gradwire.ConfigError, match="already attached"):
        gradwire.attach(ddp, "off")
    train(ddp, rank, range(2))
    left = gradwire.attach(wrap(model()), "off")
    left.load_state_dict(on.state_dict())
    on.detach()
    return [line for line in lines if "off" in line]


@pytest.mark.parametrize("variable", [True, False])
def test_off_leaves_ddp_alone_and_answers(variable: bool) -> None:
    with Ranks(2) as ranks:
        first, second = ranks.run(leaves_alone, variable=variable)
    dropped = "gradwire is off (policy='off'): the state that was loaded is dropped"
    averages = "gradwire is off (policy='off'): torch averages gradients itself"
    assert (first, second) == ([averages, dropped], [dropped])


def off_on_one(rank: int, world: int) -> str:
    ddp = wrap(model())
    with pytest.raises(gradwire.RendezvousError) as raised:
        gradwire.attach(ddp, "off" if rank == 1 else "reliable")
    assert raised.value.ranks == (1,)
    train(ddp, rank, range(1))  # over gloo
    again = gradwire.attach(ddp, "reliable")
    again.detach()
    return str(raised.value)


def test_a_rank_alone_that_is_off_is_named_by_all(two: Ranks) -> None:
    for message in two.run(off_on_one):
        assert "rank 1 has policy='off', rank 0 has policy='reliable'" in message


def bare_and_off(rank: int, world: int) -> None:
    net, reference = model(), model()
    ddp = wrap(net)
    state = gradwire.HookState("off", model=net, p=0.3)
    ddp.register_comm_hook(state, gradwire.comm_hook)
    for step in range(2):
        expected = average_of(local_gradients(reference, batch(rank, step)))
        net.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        torch.testing.assert_close(gradients(net), expected, rtol=1e-6, atol=1e-9)
    apart = wrap(model())
    state = gradwire.HookState("off" if rank == 1 else "reliable", model=apart.module)
    apart.register_comm_hook(state, gradwire.comm_hook)
    with pytest.raises(gradwire.RendezvousError, match="rank 1 has policy='off'"):
        apart(batch(rank, 0)).square().mean().backward()


def test_the_bare_hook_is_off_too(two: Ranks) -> None:
    two.run(bare_and_off)
