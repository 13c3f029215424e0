"""Refinement of confidences from a run's own accept flags: it helps where they are wrong, and only there."""

import dataclasses
import math

import numpy as np
import pytest

from mlx_dspark.schedule import CostCurve, make_policy
from mlx_dspark.schedule import simulate as sim
from mlx_dspark.schedule.refine import LIMITS, Refinement


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
