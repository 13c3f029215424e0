"""Refinement of confidences from a run's own accept flags: it helps where they are wrong, and only there."""

import dataclasses
import math

import numpy as np
import pytest

from mlx_dspark.schedule import CostCurve, make_policy
from mlx_dspark.schedule import simulate as sim
from mlx_dspark.schedule.forecast import PRIOR as PRIOR_ROUNDS
from mlx_dspark.schedule.forecast import Forecast
from mlx_dspark.schedule.refine import FARTHEST, LIMITS, Refinement, Shift, Spread, shifted


def sharpened(content, factor):
    logits = factor * np.log(content.confidences / (1 - content.confidences))
    return dataclasses.replace(content, confidences=1 / (1 + np.exp(-logits)))


def taught(content):
    refinement = Refinement()
    for confidences, passes in zip(content.confidences.tolist(), content.passes.tolist(), strict=True):
        accepted = next((slot for slot, passed in enumerate(passes) if not passed), len(passes))
        refinement.learn(confidences, accepted, len(passes))
    return refinement


@pytest.mark.parametrize("factor", (1.0, 1.6, 2.5))
def test_the_scale_undoes_a_wrong_one(factor):
    refinement = taught(sharpened(sim.made_up("swinging", 4000, 3), factor))
    assert refinement.scale == pytest.approx(1 / factor, rel=0.12)


def test_what_was_not_judged_teaches_nothing():
    one, other = Refinement(), Refinement()
    one.learn([0.9, 0.6, 0.99, 0.01], accepted=1, verified=4)  # slot 2 was rejected: slots 3 and 4 say nothing
    other.learn([0.9, 0.6, 0.5, 0.5], accepted=1, verified=4)
    assert one.scale == other.scale != 1
    narrow = Refinement()
    narrow.learn([0.9, 0.6], accepted=0, verified=0)
    assert narrow.scale == 1


def test_a_correction_looks_at_its_own_slot_only():
    refinement = taught(sharpened(sim.made_up("steady", 200, 1), 1.6))
    assert refinement([0.8, 0.3])[0] == refinement([0.8, 0.9])[0] == refinement([0.8])[0]


def test_it_cannot_run_away():
    refinement = Refinement()
    for _ in range(5000):
        refinement.learn([0.999] * 7, accepted=0, verified=7)
    assert math.log(refinement.scale) >= LIMITS[0]
    assert all(0 < c < 1 for c in refinement([0.0, 1.0, 0.5]))


STEPPED = CostCurve({1: 1.0, 2: 1.0, 3: 1.08, 4: 1.38, 5: 1.69, 6: 2.0, 7: 2.3, 8: 2.61},  # like m4pro-12b-8bit
                    draft=dict.fromkeys(range(1, 8), 0.25))


@pytest.mark.parametrize("kind", ("steady", "swinging"))
def test_it_helps_wrong_confidences_and_leaves_right_ones(kind, monkeypatch):
    content = sim.made_up(kind, 4000, 1)
    wrong = sharpened(content, 1.6)

    def rate(given):
        return sim.replay(make_policy("auto", 7, True, STEPPED), given, STEPPED).rate

    refined, right = rate(wrong), rate(content)
    monkeypatch.setattr(Refinement, "learn", lambda *args: None)
    uncorrected, best = rate(wrong), rate(content)
    assert uncorrected < 0.98 * best, "there must be something to gain for this to show anything"
    assert refined >= 0.99 * best and right >= 0.99 * best


# One text


def taught_shift(actual, promised, rounds, seed=0, start=None):
    rng, shift = np.random.default_rng(seed), start or Shift()
    for _ in range(rounds):
        passes = rng.random(4) < actual
        shift.learn(shift([promised] * 4), int(np.cumprod(passes).sum()), 4)
    return shift


@pytest.mark.parametrize(("actual", "promised"), [(0.97, 0.75), (0.4, 0.55), (0.6, 0.6)])
def test_a_shift_finds_what_a_text_is_off_by(actual, promised):
    found = [taught_shift(actual, promised, 40, seed)([promised])[0] for seed in range(20)]
    assert np.mean(found) == pytest.approx(actual, abs=0.05)


def test_a_shift_needs_few_rounds_and_forgets():
    early = [taught_shift(0.97, 0.75, 6, seed)([0.75])[0] for seed in range(20)]
    assert np.mean(early) > 0.83
    turned = [taught_shift(0.4, 0.75, 20, seed, taught_shift(0.97, 0.75, 40, seed))([0.75])[0] for seed in range(20)]
    assert np.mean(turned) < 0.68


def test_a_shift_learns_from_what_was_judged_only():
    one, other = Shift(), Shift()
    one.learn([0.9, 0.6, 0.99, 0.01], accepted=1, verified=4)
    other.learn([0.9, 0.6, 0.5, 0.5], accepted=1, verified=4)
    assert one.value == other.value != 0
    assert Shift().learn([0.9, 0.6], accepted=0, verified=0) == 0


def test_without_flags_a_shift_fades():
    shift = taught_shift(0.3, 0.6, 20)
    poor = shift([0.6])[0]
    for _ in range(30):
        shift.learn(shift([0.6] * 4), accepted=0, verified=0)
    assert poor < 0.45 and shift([0.6])[0] > 0.58


def test_how_much_texts_differ_is_learned():
    """Texts whose confidences are right are not shifted; where they are off, the variance is about theirs."""
    rng = np.random.default_rng(4)
    for deviation in (0.0, 1.0):
        spread = Spread()
        for _ in range(150):
            shift, actual = Shift(spread), 1 / (1 + np.exp(-rng.normal(0.4, deviation)))
            for _ in range(12):
                accepted = int(np.cumprod(rng.random(4) < actual).sum())
                shift.learn(shift([0.6] * 4), accepted, 4)
        if deviation:
            assert 0.5 < spread.variance < 1.5
        else:
            assert spread.variance < 0.03 and abs(shift.value) < 0.1


def test_a_shift_says_how_far_it_moved_and_cannot_run_away():
    shift = Shift()
    moved = [shift.learn([0.999] * 7, accepted=0, verified=7) for _ in range(5000)]
    assert shift.value == pytest.approx(sum(moved)) and shift.value == -FARTHEST
    assert all(0 < c < 1 for c in shift([0.0, 1.0, 0.5]))
    assert shifted(shifted([0.2, 0.9], 0.7), -0.7) == pytest.approx([0.2, 0.9])


# What is expected of a text


def test_a_forecast_moves_with_the_shift():
    forecast = Forecast(3)
    for _ in range(30):
        forecast.observe([0.8, 0.7, 0.6])
    forecast.age = 1
    before = forecast.expected()
    forecast.move(0.5)
    assert forecast.means == pytest.approx(shifted([0.8, 0.7, 0.6], 0.5))
    assert all(after > own for after, own in zip(forecast.expected(), before, strict=True))


def test_one_of_many_starts_from_all_and_soon_has_means_of_its_own():
    together, own = Forecast(2), Forecast(2)
    for _ in range(500):
        for confidences in ([0.9, 0.8], [0.5, 0.4]):
            own.observe(confidences)
            together.pool(confidences, own, tokens=1)
    assert together.means == pytest.approx([0.7, 0.6], abs=0.01)
    for _ in range(500):
        together.pool([0.9, 0.8], own, tokens=3)
        together.pool([0.5, 0.4], own, tokens=1)
    assert together.means == pytest.approx([0.8, 0.7], abs=0.01), "three times as many tokens"
    together = Forecast(2)
    for _ in range(500):
        for confidences in ([0.9, 0.8], [0.5, 0.4]):
            together.pool(confidences, own, tokens=1)
    new = together.for_one_of_many()
    assert new.means == together.means and new.rounds == PRIOR_ROUNDS
    for _ in range(PRIOR_ROUNDS):
        new.age = 1
        new.observe([0.9, 0.8])
    assert new.means[0] > 0.78 and together.means[0] == pytest.approx(0.7, abs=0.01)
    few = Forecast(2)
    few.pool([0.9, 0.8], own, tokens=1)
    assert few.for_one_of_many().rounds == 1
