"""What attach() does with phases, optimizers, the guard and loss scalers, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire
from ddp_jobs import (
    ETHERNET,
    average_of,
    batch,
    fingerprint,
    gradients,
    local_gradients,
    model,
    set_drop,
    train,
    wrap,
)
from own_state import own_state
from ranks import Ranks


def votes(rank: int, world: int) -> list[str]:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "dblp", every=1, eta=1000.0)
    seen = []
    for step in range(9):
        if step == 4 and rank == 1:
            attachment.phase = "critical"
        if step == 6 and rank == 1:
            attachment.phase = None
        train(ddp, rank, range(step, step + 1))
        seen.append(attachment.report().phase)
    with pytest.raises(gradwire.ConfigError, match="phase='fast'"):
        attachment.phase = "fast"  # type: ignore[assignment]
    attachment.detach()
    return seen


def test_a_vote_of_one_rank_rules_all_from_the_next_step(two: Ranks) -> None:
    for seen in two.run(votes):
        assert seen == [
            "critical",
            "critical",
            "tolerant",
            "tolerant",
            "tolerant",  # the vote travels
            "critical",
            "critical",  # its withdrawal travels
            "tolerant",
            "tolerant",
        ]


def flushes(rank: int, world: int) -> list[tuple[bool, bool, bool]]:
    """By step: whether all was delivered, whether this rank owes anything, and what is to come."""
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "mlt", p=0.4, spend="anything", error_feedback=True)
    seen = []
    for step in range(6):
        if step == 2 and rank == 1:
            attachment.flush()
        train(ddp, rank, range(step, step + 1))
        state: dict[str, Any] = own_state(attachment.state_dict())
        owes = any(bool(values.any()) for values in state["residuals"].values())
        seen.append((attachment.report().delivered == 1.0, owes, attachment.flush_pending))
    attachment.detach()
    return seen


def test_a_flush_of_one_rank_empties_the_books_of_all_after_the_next_step(two: Ranks) -> None:
    for seen in two.run(flushes):
        assert seen == [
            (False, True, False),
            (False, True, False),
            (False, True, True),  # the call travels
            (True, False, False),
            (False, True, False),
            (False, True, False),
        ]


def drops_and_skips(rank: int, world: int) -> tuple[bytes, list[tuple[str, str]]]:
    """An optimizer given to attach: its rate's drop is critical, and it skips guarded steps."""
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    attachment = gradwire.attach(
        ddp,
        "dblp",
        optimizer=optimizer,
        every=2,
        eta=1e6,
        p_low=0.1,
        p_high=0.5,
        detector="layers",
        floor=0.8,
        guard="skip",
    )
    seen = []
    for step in range(12):
        if step == 7:
            optimizer.param_groups[0]["lr"] = 0.005
        before = fingerprint(ddp)
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
        report = attachment.report()
        assert (fingerprint(ddp) == before) == (report.guard == "skipped")
        seen.append((report.phase, report.guard))
    attachment.detach()
    optimizer.zero_grad()
    ddp(batch(rank, 12)).square().mean().backward()
    before = fingerprint(ddp)
    optimizer.step()
    assert fingerprint(ddp) != before
    return fingerprint(ddp), seen


def test_an_optimizer_is_watched_and_held_back(two: Ranks) -> None:
    (first, seen), (second, _) = two.run(drops_and_skips)
    assert first == second
    assert seen[:4] == [("critical", "")] * 4
    assert ("tolerant", "skipped") in seen[4:8]
    assert seen[8][0] == "critical"  # the drop was told in step 7


def shares(rank: int, world: int) -> None:
    """One optimizer for two modules: what the first one skips the second one does not."""
    guarded, free = wrap(model()), wrap(model(width=100))
    optimizer = torch.optim.SGD([*guarded.parameters(), *free.parameters()], lr=0.01)
    first = gradwire.attach(
        guarded, "mlt", p=0.4, floor=0.9, guard="skip", optimizer=optimizer, error_feedback=True
    )
    second = gradwire.attach(free, "reliable")
    for step in range(3):
        before = fingerprint(guarded), fingerprint(free)
        optimizer.zero_grad()
        for ddp in (guarded, free):
            ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
        assert first.report().guard == "skipped"
        assert fingerprint(guarded) == before[0]
        assert fingerprint(free) != before[1]
    first.detach()
    second.detach()


def test_a_skipped_step_holds_back_its_own_module_only(two: Ranks) -> None:
    two.run(shares)


def skips_by_optimizer(rank: int, world: int, scaled: bool) -> None:
    """Two optimizers, each of which would move its half by weight decay alone."""
    ddp = wrap(model())
    halves = list(ddp.parameters())[::2], list(ddp.parameters())[1::2]
    optimizers = [torch.optim.SGD(each, lr=0.01, weight_decay=0.5) for each in halves]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    attachment = gradwire.attach(
        ddp, "mlt", p=0.4, floor=0.9, guard="skip", optimizer=optimizers, scaler=scaler
    )
    for step in range(4):
        before = fingerprint(ddp)
        for each in optimizers:
            each.zero_grad()
        scaler.scale(ddp(batch(rank, step)).square().mean()).backward()
        for each in optimizers:
            scaler.step(each)
        scaler.update()
        assert attachment.report().guard == "skipped"
        assert fingerprint(ddp) == before
    attachment.detach()


@pytest.mark.parametrize("scaled", [False, True])
def test_every_optimizer_leaves_out_a_skipped_step(two: Ranks, scaled: bool) -> None:
    two.run(skips_by_optimizer, scaled=scaled)


def resends(rank: int, world: int) -> list[str]:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "ltp", every=3, floor=1.0, datagram=ETHERNET)
    seen = []
    for step in range(8):
        if step == 5:
            set_drop(attachment, 0.2, 4.0)
        train(ddp, rank, range(step, step + 1), lr=0.01)
        seen.append(attachment.report().guard)
        assert attachment.report().delivered == 1.0
    set_drop(attachment, 0.0)
    attachment.detach()
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, fingerprint(ddp))
    assert everybody[0] == everybody[1]
    return seen


def test_the_guard_resends_on_all_ranks(two: Ranks) -> None:
    first, second = two.run(resends)
    assert first == second
    assert set(first) <= {"", "resent"}


def scaled(rank: int, world: int) -> None:
    """A loss scale that jumps is no change of phase, and residuals follow it."""
    ddp = wrap(model())
    attachment = gradwire.attach(
        ddp, "dblp", every=1, eta=0.5, p_low=0.4, p_high=0.5, error_feedback=True
    )
    true, applied = torch.zeros(()), torch.zeros(())
    reference = model()
    for step in range(8):
        scale = 1.0 if step < 4 else 1024.0
        attachment.grad_scale = scale
        if step == 6:
            attachment.flush()
        x = batch(rank, 0)  # the same each time: the norm stays
        true = true + average_of(local_gradients(reference, x))
        ddp.zero_grad()
        (scale * ddp(x).square().mean()).backward()
        applied = applied + gradients(ddp) / scale
        if step >= 2:
            assert attachment.phase == "tolerant"
    assert attachment.report().verdict == "fixed bound"
    assert float((applied - true).norm() / true.norm()) < 1e-4
    with pytest.raises(gradwire.ConfigError, match="grad_scale=0"):
        attachment.grad_scale = 0
    attachment.detach()


def test_a_gradient_scaler_is_followed(two: Ranks) -> None:
    two.run(scaled)


def overflows(rank: int, world: int) -> None:
    """A step that a scaler skips for one rank's overflow takes nothing of what was owed."""
    ddp, reference = wrap(model()), model()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    attachment = gradwire.attach(
        ddp,
        "mlt",
        p=0.5,
        spend="anything",
        error_feedback=True,
        optimizer=optimizer,
        scaler=scaler,
    )
    true, applied, scales = torch.zeros(()), torch.zeros(()), []
    for step in range(9):
        if step == 7 and rank == 1:
            attachment.flush()
        x = batch(rank, step)
        optimizer.zero_grad()
        loss = ddp(x).square().mean() * (1e38 if (step, rank) == (4, 1) else 1.0)
        scaler.scale(loss).backward()
        found = gradients(ddp)
        scales.append(attachment.grad_scale)
        assert bool(found.isfinite().all()) == (step != 4)
        if step != 4:
            true = true + average_of(local_gradients(reference, x))
            applied = applied + found / scales[-1]
        scaler.step(optimizer)
        scaler.update()
    assert scales == [1024.0] * 3 + [2048.0] * 2 + [1024.0] * 3 + [2048.0]
    assert float((applied - true).norm() / true.norm()) < 1e-4
    attachment.detach()


def test_a_step_that_a_scaler_skips_owes_what_was_owed(two: Ranks) -> None:
    two.run(overflows)


def others_overflow(rank: int, world: int, fused: bool) -> None:
    """The scaler skips for the sake of another module under the same optimizer, or of a parameter
    outside of DDP; the other optimizer's steps are its own."""
    first, second, reference = wrap(model()), wrap(model()), model()
    extra = torch.nn.Parameter(torch.ones(()))
    parameters = [*first.parameters(), *second.parameters(), extra]
    optimizer = torch.optim.SGD(parameters, lr=0.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    options = {"p": 0.5, "spend": "anything", "error_feedback": True}
    attachments = [
        gradwire.attach(each, "mlt", optimizer=optimizer, scaler=scaler, **options)
        for each in (first, second)
    ]
    true, applied = torch.zeros(()), torch.zeros(())
    for step in range(13):
        if step in (8, 11):
            for attachment in attachments:
                attachment.flush()
        x = batch(rank, step)
        optimizer.zero_grad()
        first_loss = first(x).square().mean() * (1e38 if (step, rank) == (4, 1) else 1.0)
        outside = extra * (float("inf") if step in (6, 9) else 1.0)
        scaler.scale(first_loss + second(x).square().mean() + outside).backward()
        found = gradients(second)
        assert found.isfinite().all()
        if step not in (4, 6, 9):
            true = true + average_of(local_gradients(reference, x))
            applied = applied + found / attachments[1].grad_scale
        scaler.step(optimizer)
        scaler.update()
        if step in (9, 10):
            assert [each.flush_pending for each in attachments] == [step == 9] * 2
    assert float((applied - true).norm() / true.norm()) < 1e-4
    for attachment in attachments:
        attachment.detach()


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_is_skipped_for_the_sake_of_others_owes_what_was_owed(
    two: Ranks, fused: bool
) -> None:
    two.run(others_overflow, fused=fused)


def books_by_optimizer(rank: int, world: int, passes: int) -> None:
    """Of two optimizers that share buckets a scaler skips the one whose gradient is not finite in
    the last of a step's passes; of the other, and of later steps, nothing is lost."""
    ddp, reference = wrap(model()), model()
    parameters = dict(ddp.module.named_parameters())
    parts = list(parameters)[:3], list(parameters)[3:]  # one of them ends within a bucket
    optimizers = [torch.optim.SGD([parameters[n] for n in part], lr=0.0) for part in parts]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    attachment = gradwire.attach(
        ddp,
        "mlt",
        p=0.5,
        spend="anything",
        max_age=200,
        datagram=256,
        error_feedback=True,
        optimizer=optimizers,
        scaler=scaler,
    )
    broken: list[str] = []
    for name, parameter in parameters.items():
        parameter.register_hook(
            lambda gradient, name=name: gradient * (1.0 if name not in broken else float("inf"))
        )
    true = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    applied = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for step in range(10):
        void = {3: parts[0], 6: parts[1], 7: parts[0], 8: [*parts[0], *parts[1]]}.get(step, [])
        ddp.zero_grad()
        reference.zero_grad()
        for number in range(passes):
            x = batch(rank, passes * step + number)
            broken = list(void) if rank == 1 and number == passes - 1 else []
            scaler.scale(ddp(x).square().mean()).backward()
            reference(x).square().mean().backward()
        for name, alone in reference.named_parameters():
            if name not in void:
                assert parameters[name].grad is not None
                assert alone.grad is not None
                true[name] += average_of(alone.grad)
                applied[name] += parameters[name].grad / scaler.get_scale()
        for each in optimizers:
            scaler.step(each)
        scaler.update()
    state: dict[str, Any] = own_state(attachment.state_dict())
    for name, parameter in parameters.items():
        owed = average_of(state["residuals"][name].view_as(parameter)) / state["grad_scale"]
        assert owed.any() or owed.dim() == 1
        torch.testing.assert_close(applied[name] + owed, true[name], rtol=1e-4, atol=1e-6)
    attachment.detach()


@pytest.mark.parametrize("passes", [1, 2])
def test_each_optimizer_that_a_scaler_skips_owes_what_was_owed(two: Ranks, passes: int) -> None:
    two.run(books_by_optimizer, passes=passes)


def void(rank: int, world: int, scale: float, enabled: bool) -> tuple[float, float]:
    """What is owed before and after a step whose loss is NaN on one rank."""
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)
    attachment = gradwire.attach(
        ddp, "mlt", p=0.4, optimizer=optimizer, scaler=scaler, max_age=50, error_feedback=True
    )

    def owed() -> float:
        residuals = own_state(attachment.state_dict())["residuals"]
        return sum(float(values.abs().sum()) for values in residuals.values())

    before = 0.0
    for step in range(4):
        before = owed()
        loss = ddp(batch(rank, step)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss * (float("nan") if (step, rank) == (3, 0) else 1.0)).backward()
        if step < 3:
            scaler.step(optimizer)
            scaler.update()
    after = owed()
    attachment.detach()
    return before, after


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_scaler_skips_at_a_scale_of_one_too(two: Ranks, scale: float) -> None:
    for before, after in two.run(void, scale=scale, enabled=True):
        assert before > 0.0
        assert after == before


def test_a_scaler_that_is_off_skips_nothing(two: Ranks) -> None:
    outcomes = two.run(void, scale=1.0, enabled=False)
    assert all(after != before for before, after in outcomes)  # it was applied


@pytest.mark.parametrize(
    ("setting", "value"), [("model", "net"), ("process_group", "world"), ("process_group", [0, 1])]
)
def test_what_is_no_model_or_group_is_refused(setting: str, value: object) -> None:
    with pytest.raises(gradwire.ConfigError) as raised:
        gradwire.HookState("reliable", **{setting: value})  # type: ignore[arg-type]
    assert (raised.value.setting, raised.value.value) == (setting, value)


def test_what_is_no_scaler_is_refused() -> None:
    with pytest.raises(
        gradwire.ConfigError, match=r"scaler=1024: a torch\.amp\.GradScaler, or None"
    ):
        gradwire.HookState("reliable", scaler=1024)  # type: ignore[arg-type]
