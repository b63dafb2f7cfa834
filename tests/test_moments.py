"""fill="momentum": what nobody delivered comes from the optimizer's first moment."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradwire.core.errors import ConfigError
from gradwire.core.plan import TransferPlan
from gradwire.core.regions import TensorSlot
from gradwire.policies import DBLP, MLT
from gradwire.sim.fabric import Link
from gradwire.sim.job import Job
from gradwire.training.bucket import in_bucket_order
from gradwire.training.configure import configure
from gradwire.training.feedback.optimizer_moments import FirstMoments, keeps_first_moment
from gradwire.training.hook import HookState
from gradwire.transport.communicator import ChunkGrid
from job_gradients import normal

WORLD = 3
EAGER: dict[str, Any] = {"p": 0.4, "fill": "momentum"}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 80), nn.Linear(80, 20))


class Training:
    """A model under Adam, whose gradients go through a Job."""

    def __init__(self, *, together: bool = True, **options: Any) -> None:
        self.model = net()
        parts = [self.model.parameters()] if together else [p.parameters() for p in self.model]
        self.optimizers = [torch.optim.Adam(part, betas=(0.8, 0.99)) for part in parts]
        self.job = Job(WORLD, self.model, "mlt", optimizer=self.optimizers, **options)

    def step(self, number: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """What all ranks apply, and the workers' mean; Adam steps with the former over `scale`."""
        fresh = [scale * gradient for gradient in normal(self.job.elements, number, WORLD)]
        applied = self.job.step(fresh)
        assert all(np.array_equal(applied[0], other) for other in applied[1:])
        at = 0
        for group in self.job.groups:
            for parameter in group:
                values = torch.from_numpy(applied[0][at : at + parameter.numel()] / scale)
                parameter.grad = values.view_as(parameter)
                at += parameter.numel()
        for optimizer in self.optimizers:
            optimizer.step()
        return applied[0], np.mean(fresh, axis=0)

    def moments(self) -> np.ndarray:
        state = {p: kept for each in self.optimizers for p, kept in each.state.items()}
        parts = [state[p]["exp_avg"].flatten() for group in self.job.groups for p in group]
        return torch.cat(parts).numpy().copy()


@pytest.mark.parametrize(
    ("pull", "together"), [("exact", True), ("committed", True), ("exact", False)]
)
def test_what_nobody_delivered_leaves_the_first_moment_where_it_is(
    pull: str, together: bool
) -> None:
    training = Training(**EAGER, together=together, pull=pull, datagram=400)
    applied, mean = training.step(0)  # Adam has no moment yet
    missing = applied == 0.0
    assert 0.3 < missing.mean() < 0.7
    np.testing.assert_allclose(applied[~missing], mean[~missing], atol=1e-6)
    for number in range(1, 6):
        before = training.moments()
        applied, mean = training.step(number)
        missing = np.abs(applied - mean) > 1e-6
        assert 0.3 < missing.mean() < 0.7
        np.testing.assert_array_equal(applied[missing], before[missing])
        np.testing.assert_allclose(training.moments()[missing], before[missing], rtol=1e-6)
        assert np.abs(training.moments()[~missing] - before[~missing]).min() > 0.0


def test_where_somebody_delivered_the_sum_is_the_mean_of_those() -> None:
    training = Training(p=0.5, spend="lost", fill="momentum", link=Link(loss=0.3))
    for number in range(4):  # from the second on there are moments, which hide no arrivals
        training.step(number)
    ones = np.ones(training.job.elements, np.float32)
    before = training.moments()
    first, *others = training.job.step([ones] * WORLD)
    assert all(np.array_equal(first, other) for other in others)
    assert training.job.report.delivered < 1.0
    filled = np.abs(first - 1.0) > 1e-5
    np.testing.assert_array_equal(first[filled], before[filled])
    assert filled.mean() < 0.1


def test_a_loss_scaler_scales_the_moments_too() -> None:
    training = Training(**EAGER, datagram=400)
    for number in range(2):
        training.step(number)
    before = training.moments()
    for pipeline in training.job.pipelines:
        pipeline.set_grad_scale(1024.0)
    applied, mean = training.step(2, scale=1024.0)
    missing = np.abs(applied - mean) > 1e-3
    assert missing.any()
    np.testing.assert_array_equal(applied[missing], 1024.0 * before[missing])


def test_an_exact_step_has_nothing_to_fill() -> None:
    training = Training(**EAGER, datagram=400)
    training.step(0)
    training.job.pipelines[0].flush()
    training.step(1)
    applied, mean = training.step(2)
    np.testing.assert_allclose(applied, mean, atol=1e-6)


def test_moments_lie_as_ddp_lays_gradients_into_buckets() -> None:
    shape = (4, 3, 2, 5)
    weight = nn.Parameter(torch.empty(shape, memory_format=torch.channels_last))
    numbers = torch.arange(weight.numel(), dtype=torch.float32).view(shape)
    flat = in_bucket_order(numbers, weight)
    assert torch.equal(flat, numbers.permute(0, 2, 3, 1).flatten())
    plain = nn.Parameter(torch.empty(shape))
    assert torch.equal(in_bucket_order(numbers, plain), numbers.flatten())
    holes = torch.empty(4, 6)[:, ::2]
    assert torch.equal(in_bucket_order(torch.arange(12.0).view(4, 3), holes), torch.arange(12.0))
    assert torch.equal(in_bucket_order(torch.tensor(7.0), torch.tensor(0.0)), torch.tensor([7.0]))


def test_an_optimizer_without_the_moment_leaves_zeros_and_says_so_once() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.RMSprop([weight])
    weight.grad = torch.ones(4)
    optimizer.step()
    moments = FirstMoments([optimizer])
    result = np.zeros(4, np.float32)
    everything = np.ones(1, bool)
    none = np.zeros(1, np.uint32)
    grid = ChunkGrid(np.zeros(1, np.uint64), np.full(1, 4, np.uint32), none, none)
    slots = (TensorSlot("weight", 0, 4),)
    with pytest.warns(RuntimeWarning, match="RMSprop: its state has no 'exp_avg'"):
        moments.fill(slots, [weight, torch.empty(0)], result, grid, everything, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moments.fill(slots, [weight], result, grid, everything, 1.0)
    assert not result.any()


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


ADAM = torch.optim.AdamW(weights())
SGD = torch.optim.SGD(weights(), momentum=0.9)
MAXIMIZING = torch.optim.Adam(weights(), maximize=True)


class LikeAdam(torch.optim.Optimizer):
    """Somebody's own, whose state may be of any scale."""

    def __init__(self) -> None:
        super().__init__(weights(), {"lr": 1.0, "betas": (0.9, 0.99)})


LIKE_ADAM = LikeAdam()


def test_which_optimizers_keep_a_first_moment() -> None:
    class ZeroRedundancyOptimizer(torch.optim.Adam):
        """Named as torch's, which needs a process group."""

    assert keeps_first_moment(ADAM)
    assert all(
        keeps_first_moment(kind(weights()))
        for kind in (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)
    )
    assert not keeps_first_moment(SGD)
    assert not keeps_first_moment(MAXIMIZING)
    assert not keeps_first_moment(torch.optim.Adam(weights(), betas=(0.0, 0.9)))
    assert not keeps_first_moment(ZeroRedundancyOptimizer(weights()))
    assert not keeps_first_moment(None)


@pytest.mark.parametrize(
    ("options", "optimizer", "fill"),
    [
        ({}, ADAM, "momentum"),
        ({}, SGD, "zero"),
        ({}, None, "zero"),
        ({"fill": "zero"}, ADAM, "zero"),
        ({"error_feedback": True}, ADAM, "zero"),
        ({"error_feedback": False}, SGD, "zero"),
        ({"control": "probe"}, ADAM, "zero"),
        ({"spend": "lost"}, ADAM, "zero"),
        ({"priority": "none"}, ADAM, "zero"),
        ({"spend": "lost", "priority": "results"}, ADAM, "zero"),
        ({}, MAXIMIZING, "zero"),
        ({}, LIKE_ADAM, "zero"),
        ({"fill": "momentum"}, LIKE_ADAM, "momentum"),
        ({"spend": "lost", "fill": "momentum"}, ADAM, "momentum"),
    ],
)
def test_dblp_leaves_its_fill_to_the_optimizer(
    options: dict[str, object], optimizer: torch.optim.Optimizer | None, fill: str
) -> None:
    policy, settings = configure("dblp", options, {}, optimizer)
    assert policy.fill == policy.options()["fill"] == fill
    assert not (settings.feedback and fill == "momentum")


def test_a_copied_hook_state_has_zeros_where_the_fill_was_left_open() -> None:
    model = nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    state = HookState("dblp", model=model, optimizer=adam)
    assert state.policy.fill == "momentum"
    assert pickle.loads(pickle.dumps(state)).policy.fill == "zero"
    asked = HookState("dblp", model=model, optimizer=adam, fill="momentum")
    assert pickle.loads(pickle.dumps(asked)).policy.fill == "momentum"


@pytest.mark.parametrize("name", ["mlt", "adaptive"])
def test_others_fill_with_zeros_unless_told(name: str) -> None:
    assert configure(name, {}, {}, ADAM)[0].fill == "zero"
    assert configure(name, {"fill": "momentum"}, {}, ADAM)[0].fill == "momentum"


@pytest.mark.parametrize(
    ("options", "optimizer", "message"),
    [
        ({}, None, "fill='momentum' with optimizer=None: takes what is missing"),
        ({}, SGD, "fill='momentum' with optimizer=SGD"),
        ({"error_feedback": True}, ADAM, "fill='momentum' with error_feedback=True: the optimiz"),
    ],
)
def test_a_fill_that_cannot_be_is_an_error(
    options: dict[str, object], optimizer: torch.optim.Optimizer | None, message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        configure(MLT(fill="momentum"), options, {}, optimizer)
    assert message in str(raised.value)


def test_without_its_optimizer_a_pipeline_does_not_open() -> None:
    policy, _ = configure("dblp", {"fill": "momentum"}, {}, ADAM)
    job = Job(2, {"weight": 10}, DBLP())
    with pytest.raises(ConfigError, match="fill='momentum' of policy 'dblp' without its optimizer"):
        type(job.pipelines[0])(
            job.pipelines[0].communicator,
            policy,
            job.pipelines[0].settings,
            job._names,
            1,
        )


def test_coefficients_have_no_moment() -> None:
    whole = TransferPlan.whole(8)
    with pytest.raises(ConfigError, match="fill='momentum' with transform='hadamard'"):
        TransferPlan(8, whole.regions, fill="momentum", transform="hadamard")
