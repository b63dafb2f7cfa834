"""The phase detector: what fires it, and that all ranks decide alike."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.agreed import LAST_EPOCH, Ballot, Summary, scales_differ
from gradwire.core.errors import ConfigError
from gradwire.policies.parts.phases import Every, LayerDetector, PhaseDetector, RateWatch


def feed(detector: PhaseDetector, norms: list[float], **fields: object) -> list[str]:
    """The phase that ruled each step."""
    ruled = []
    for norm in norms:
        ruled.append(detector.phase)
        summary = Summary(
            step=detector.steps,
            fresh_norm=norm,
            applied_norm=norm,
            **fields,  # type: ignore[arg-type]
        )
        detector.observe(summary)
    return ruled


def test_training_starts_critical_until_two_windows_agree() -> None:
    phases = feed(PhaseDetector(every=10), [1.0] * 30)
    assert phases == ["critical"] * 20 + ["tolerant"] * 10


def test_a_jump_of_the_norm_is_critical_until_it_settles() -> None:
    detector = PhaseDetector(every=5)
    phases = feed(detector, [1.0] * 15 + [2.0] * 15)
    assert phases[10:20] == ["tolerant"] * 10
    assert phases[20:25] == ["critical"] * 5  # the window of 2.0 against that of 1.0
    assert phases[25:] == ["tolerant"] * 5
    assert detector.verdict == "phases"
    assert detector.fired == 1


def test_a_fall_by_the_share_eta_fires_and_less_does_not() -> None:
    for fall, phase in ((0.5, "critical"), (0.51, "tolerant")):
        detector = PhaseDetector(eta=0.5, every=1)
        feed(detector, [1.0, fall])
        assert detector.phase == phase


def test_ours_averages_minibatch_noise_out_where_the_papers_form_fires() -> None:
    noise = random.Random(3)
    norms = [math.exp(noise.gauss(0, 0.5)) for _ in range(600)]
    ours = PhaseDetector(every=10)
    paper = PhaseDetector(every=10, source="paper")
    feed(ours, norms)
    feed(paper, norms)
    assert paper.fired > 10
    assert ours.fired < paper.fired / 4


def test_the_share_and_the_verdict_of_a_quiet_run() -> None:
    detector = PhaseDetector(every=5)
    assert detector.critical_share == 1.0
    feed(detector, [1.0] * 100)
    assert detector.critical_share == 0.1
    assert detector.verdict == "fixed bound"


@pytest.mark.parametrize("eta", [0.5, 1.5])
@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
def test_zero_and_nonfinite_norms_are_critical(bad: float, eta: float) -> None:
    detector = PhaseDetector(eta=eta, every=1)
    feed(detector, [1.0, 1.0])
    assert detector.phase == "tolerant"
    feed(detector, [bad])
    assert detector.phase == "critical"
    feed(detector, [1.0])  # measured against the bad one
    assert detector.phase == "critical"
    feed(detector, [1.0])
    assert detector.phase == "tolerant"


def test_a_nonfinite_gradient_is_critical_at_once_and_leaves_no_trace_in_the_window() -> None:
    detector = PhaseDetector(every=10)
    feed(detector, [1.0] * 20)
    assert detector.phase == "tolerant"
    detector.observe(Summary(step=20, nonfinite=True))
    assert detector.phase == "critical"
    feed(detector, [1.0] * 9)
    assert detector.phase == "tolerant"


def test_by_epoch_it_looks_when_any_rank_begins_one() -> None:
    detector = PhaseDetector(every="epoch")
    ruled = []
    for epoch, norm in ((0, 1.0), (1, 1.0), (2, 1.0), (3, 3.0), (4, 3.0)):
        for _ in range(4):
            ruled.append(detector.phase)
            detector.observe(Summary(step=len(ruled), fresh_norm=norm, epoch=epoch))
    # The first look that can compare is in the first step of epoch 2 (epoch 1 against 0).
    assert ruled[:9] == ["critical"] * 9
    assert ruled[9:17] == ["tolerant"] * 8
    assert ruled[17:] == ["critical"] * 3  # epoch 3 against epoch 2


def test_the_papers_form_by_epoch_looks_at_one_step() -> None:
    detector = PhaseDetector(every="epoch", source="paper")
    for step, (epoch, norm) in enumerate(((0, 1.0), (0, 9.0), (1, 1.2), (1, 9.0), (2, 5.0))):
        detector.observe(Summary(step=step, applied_norm=norm, epoch=epoch))
        if step == 3:
            assert detector.phase == "tolerant"
    assert detector.phase == "critical"


@pytest.mark.parametrize("every", [1, "epoch"])
def test_the_papers_form_waits_for_a_gradient_that_was_applied(every: Every) -> None:
    detector = PhaseDetector(every=every, source="paper")
    for step in range(9):
        known = None if step == 0 else 1.0
        detector.observe(Summary(step=step, applied_norm=known, epoch=step // 3))
    assert (detector.phase, detector.fired, detector.verdict) == ("tolerant", 0, "fixed bound")
    detector.observe(Summary(step=9, applied_norm=0.0, epoch=3))  # one that is known to be 0
    assert (detector.phase, detector.fired) == ("critical", 1)


def test_a_vote_by_hand_overrules_the_detector_and_ends_with_it() -> None:
    detector = PhaseDetector(every=1)
    feed(detector, [1.0] * 3)
    assert detector.phase == "tolerant"
    feed(detector, [1.0], vote="critical")
    assert detector.phase == "critical"
    feed(detector, [1.0])
    assert detector.phase == "tolerant"


def test_state_survives_a_restart() -> None:
    norms = [1.0 + 0.3 * math.sin(i) for i in range(17)]
    one = PhaseDetector(every=4)
    feed(one, norms)
    two = PhaseDetector(every=4)
    two.load_state_dict(one.state_dict())
    rest = [3.0 * norm for norm in norms]
    assert feed(one, rest) == feed(two, rest)
    with pytest.raises(ConfigError, match=r"has no 'count'"):
        two.load_state_dict({"eta": 1})


# ---------------------------------------------------------------------------- agreement


Folded = list[tuple[list[float], list[float]]]


def folded(ballots: list[list[Ballot]]) -> Folded:
    """Folds as the aggregators do: ballots[rank][bucket], in rank order, in f64."""
    buckets: Folded = []
    for bucket in zip(*ballots, strict=True):
        slots = [ballot.slots() for ballot in bucket]
        sums = [sum(slot[i] for slot in slots) for i in range(4)]
        maxima = [max(slot[i] for slot in slots) for i in range(4, 8)]
        buckets.append((sums, maxima))
    return buckets


def fold(step: int, ballots: list[list[Ballot]]) -> Summary:
    return Summary.fold(step, len(ballots), folded(ballots))


def differ(ballots: list[list[Ballot]]) -> bool:
    return scales_differ(maxima for _, maxima in folded(ballots))


@given(
    world=st.integers(1, 5),
    every=st.sampled_from([1, 3, "epoch"]),
    source=st.sampled_from(["ours", "paper"]),
    seed=st.integers(0, 2**32),
)
def test_ranks_with_different_gradients_decide_alike(
    world: int, every: Every, source: str, seed: int
) -> None:
    chance = random.Random(seed)
    detectors = [PhaseDetector(0.2, every, source) for _ in range(world)]
    for step in range(24):
        ballots = [
            [
                Ballot(
                    fresh_square=chance.expovariate(1.0),
                    nonfinite=chance.random() < 0.02,
                    critical=chance.random() < 0.05,
                    tolerant=chance.random() < 0.05,
                    applied_square=chance.expovariate(1.0),
                    epoch=step // 6 if chance.random() < 0.5 else -1,
                )
                for _ in range(3)
            ]
            for _ in range(world)
        ]
        for detector in detectors:
            detector.observe(fold(step, ballots))
        assert len({detector.phase for detector in detectors}) == 1


def test_the_summary_is_the_root_mean_square_over_workers() -> None:
    ballots = [[Ballot(fresh_square=9.0), Ballot(fresh_square=7.0)], [Ballot(), Ballot()]]
    assert fold(0, ballots).fresh_norm == pytest.approx(math.sqrt(16 / 2))


def test_votes_fold_with_critical_first() -> None:
    assert fold(0, [[Ballot(critical=True)], [Ballot(tolerant=True)]]).vote == "critical"
    assert fold(0, [[Ballot()], [Ballot(tolerant=True)]]).vote == "tolerant"
    assert fold(0, [[Ballot()], [Ballot()]]).vote is None


def test_a_call_for_an_exact_step_hides_the_push_times_of_its_bucket_alone() -> None:
    def step(*calls: bool, pushes: tuple[float, ...]) -> Summary:
        workers = zip(calls, pushes, strict=True)
        return fold(0, [[Ballot(flush=f, push_s=p), Ballot(push_s=p)] for f, p in workers])

    told = step(False, True, False, pushes=(3.0, 0.0, math.inf))
    assert (told.flush, told.pushes) == (True, (0.0, math.inf))
    silent = step(False, False, pushes=(3.0, 1e30))
    assert (silent.flush, silent.pushes) == (False, (math.inf, math.inf))


def test_an_applied_norm_folds_to_the_largest_and_to_none_where_nobody_knows_one() -> None:
    for squares, norm in (
        ([None, None], None),
        ([None, 0.0], 0.0),
        ([9.0, 4.0], 3.0),
        ([math.nan, math.inf], 0.0),
    ):
        assert fold(0, [[Ballot(applied_square=square)] for square in squares]).applied_norm == norm


def test_losses_fold_to_their_mean() -> None:
    assert fold(0, [[Ballot(loss=3.0)], [Ballot(loss=5.0)], [Ballot()]]).loss == 4.0
    assert fold(0, [[Ballot()], [Ballot()]]).loss is None
    assert math.isnan(fold(0, [[Ballot(loss=3.0)], [Ballot(loss=math.inf)]]).loss or 0.0)


def test_what_travels_is_finite() -> None:
    ballot = Ballot(applied_square=math.inf, epoch=LAST_EPOCH, scale=3.4e38)
    assert all(math.isfinite(slot) for slot in ballot.slots())


def mixed(chance: random.Random, scale: float) -> Ballot:
    square = chance.choice([None, 0.0, math.nan, chance.expovariate(1.0)])
    return Ballot(applied_square=square, epoch=chance.randrange(-1, 5), scale=scale)


@given(seed=st.integers(0, 2**32), scale=st.floats(2.0**-149, 3.4e38))
def test_scales_that_are_alike_never_differ(seed: int, scale: float) -> None:
    """Whatever else the ranks say: one that has begun an epoch, one that has no norm yet."""
    chance = random.Random(seed)
    ballots = [[mixed(chance, scale) for _ in range(3)] for _ in range(4)]
    assert not differ(ballots)


@given(
    exponents=st.lists(st.integers(-149, 127), min_size=2, max_size=6).filter(
        lambda several: len(set(several)) > 1
    ),
    square=st.sampled_from([None, math.nan, 0.0, 2.5]),
    epoch=st.integers(-1, LAST_EPOCH),
)
def test_scales_that_differ_are_seen_in_the_same_step(
    exponents: list[int], square: float | None, epoch: int
) -> None:
    """Where the ranks agree in the rest, as they do but for moments."""
    ballots = [
        [Ballot(applied_square=square, epoch=epoch, scale=2.0**exponent)] for exponent in exponents
    ]
    assert differ(ballots)
    assert fold(0, ballots).epoch == epoch


def test_norms_and_epochs_survive_their_way() -> None:
    for square in (0.0, 1e-300, 0.3, 9.0, 1e300):
        (told,) = {fold(0, [[Ballot(applied_square=square, scale=1024.0)]] * 2).applied_norm}
        assert told == pytest.approx(math.sqrt(square), rel=1e-6)
    for epoch in (-1, 0, 7, LAST_EPOCH):
        assert fold(0, [[Ballot(epoch=epoch, scale=0.25)]] * 2).epoch == epoch


# ---------------------------------------------------------------------------- per layer


def looks(detector: LayerDetector, norms: list[dict[str, float]], **fields: object) -> None:
    for layers in norms:
        detector.observe(Summary(detector.steps, layers=layers, **fields))  # type: ignore[arg-type]


def test_each_layer_has_a_phase_of_its_own() -> None:
    detector = LayerDetector(every=1)
    assert detector.phase_of("a") == "critical"
    looks(detector, [{"a": 1.0, "b": 1.0}])
    assert (detector.phase_of("a"), detector.phase_of("b")) == ("critical", "critical")
    looks(detector, [{"a": 1.1, "b": 3.0}])
    assert (detector.phase_of("a"), detector.phase_of("b")) == ("tolerant", "critical")
    assert detector.phase == "critical"
    looks(detector, [{"a": 1.1, "b": 3.0, "new": 1.0}])
    assert detector.phase_of("b") == "tolerant"
    assert detector.phase_of("new") == "critical"
    looks(detector, [{"a": 1.1, "b": 3.0, "new": 1.0}])
    assert detector.phase == "tolerant"
    assert detector.critical_share == pytest.approx((1 + 1 + 0.5 + 1 / 3) / 4)
    assert detector.verdict == "phases"
    looks(detector, [{"a": 0.0, "b": math.nan, "new": 1.0}])
    assert [detector.phase_of(layer) for layer in ("a", "b", "new")] == [
        "critical",
        "critical",
        "tolerant",
    ]


def test_votes_and_bad_gradients_rule_all_layers() -> None:
    detector = LayerDetector(every=1)
    settled = {"a": 1.0, "b": 1.0}
    looks(detector, [settled] * 3)
    assert detector.phase == "tolerant"
    looks(detector, [settled], vote="critical")
    assert detector.phase_of("a") == "critical"
    looks(detector, [settled])
    assert detector.phase_of("a") == "tolerant"
    looks(detector, [settled], nonfinite=True)
    assert detector.phase_of("b") == "critical"
    other = LayerDetector(every=1)
    other.load_state_dict(detector.state_dict())
    for each in (detector, other):
        looks(each, [settled])
        assert each.phase == "tolerant"


def test_it_is_due_at_its_cadence() -> None:
    by_steps = LayerDetector(every=3)
    due = []
    for step in range(6):
        due.append(by_steps.due(Summary(step)))
        by_steps.observe(Summary(step))
    assert due == [False, False, True] * 2
    by_epoch = LayerDetector(every="epoch")
    due = []
    for step, epoch in enumerate([0, 0, 1, 1]):
        due.append(by_epoch.due(Summary(step, epoch=epoch)))
        by_epoch.observe(Summary(step, epoch=epoch))
    assert due == [True, False, True, False]


# ---------------------------------------------------------------------------- learning rates


def test_a_learning_rate_counts_as_dropped_when_it_has_halved() -> None:
    watch = RateWatch()
    rates = [0.1] * 3 + [0.01] * 3 + [0.02, 0.02, 0.009]
    assert [watch.observe([rate]) for rate in rates] == [False] * 3 + [True] + [False] * 4 + [True]
    cosine = RateWatch()
    fired = [cosine.observe([0.5 * (1 + math.cos(math.pi * i / 1000))]) for i in range(900)]
    assert 3 <= sum(fired) <= 6
    several = RateWatch()
    several.observe([0.1, 0.2])
    assert several.observe([0.1, 0.05])
    assert not several.observe([0.1, 0.05, 0.3])


def test_an_overflow_after_a_drop_does_not_end_its_window_early() -> None:
    detector = PhaseDetector(every=5)
    feed(detector, [1.0] * 17)
    feed(detector, [1.0], falling=True)
    feed(detector, [1.0], nonfinite=True)
    assert feed(detector, [1.0] * 7) == ["critical"] * 6 + ["tolerant"]
    layers = LayerDetector(every=1)
    settled = {"a": 1.0, "b": 1.0}
    looks(layers, [settled] * 3)
    layers.observe(Summary(3, falling=True))
    layers.observe(Summary(4, nonfinite=True))
    looks(layers, [settled])
    assert layers.phase == "critical"
    looks(layers, [settled])
    assert layers.phase == "tolerant"


def test_a_drop_is_critical_for_at_least_one_whole_window() -> None:
    detector = PhaseDetector(every=5)
    feed(detector, [1.0] * 17)
    assert detector.phase == "tolerant"
    ruled = feed(detector, [1.0], falling=True) + feed(detector, [1.0] * 12)
    assert ruled == ["tolerant"] + ["critical"] * 7 + ["tolerant"] * 5


@pytest.mark.parametrize("kind", [PhaseDetector, LayerDetector])
@pytest.mark.parametrize(("drop", "settles"), [(30, 40), (38, 50)], ids=["first", "within"])
def test_a_drop_is_critical_for_a_whole_epoch_wherever_it_falls(
    kind: type[PhaseDetector], drop: int, settles: int
) -> None:
    """Of ten steps each. With an epoch's first step its window is whole, later it is not."""
    detector = kind(every="epoch")
    ruled = []
    for step in range(60):
        ruled.append(detector.phase)
        known = {"a": 1.0} if detector.due(Summary(step, epoch=step // 10)) else None
        detector.observe(Summary(step, 1.0, epoch=step // 10, falling=step == drop, layers=known))
    assert ruled[drop] == "tolerant"
    assert ruled[drop + 1 : settles + 1] == ["critical"] * (settles - drop)
    assert ruled[settles + 1 :] == ["tolerant"] * (59 - settles)
