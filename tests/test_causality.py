"""No policy looks ahead: whether a slot is admitted depends on nothing that tells its token (paper, appendix A).

`after` is never shown a token. It could still learn x_j from c_{j+1}, which is computed from it.
"""

import itertools
import random

import pytest
from scheduling import (
    APPENDIX_CURVES,
    CURVES,
    EVERY_POLICY,
    GAMMA,
    MODELLED,
    TARGET,
    every_curve,
    landed,
    overlap,
    survivals,
    taught,
    text_distribution,
    vectors,
)

from mlx_dspark.schedule import make_policy


@every_curve
@pytest.mark.parametrize("text", EVERY_POLICY)
def test_admitting_a_slot_depends_on_nothing_behind_it(text, curve):
    """Slot j is admitted or not by c_1..c_j and past rounds; c_{j+1} is computed from x_j, so it would tell x_j."""
    policy, rng = taught(text, curve), random.Random(5)
    for confidences in vectors(12, seed=1):
        width = policy.after(GAMMA, confidences).drafts
        for slot in range(1, GAMMA + 1):
            tail = confidences[slot:]
            others = [tuple(rng.sample(tail, len(tail))), tuple(rng.random() for _ in tail), (0.999,) * len(tail),
                      (0.001,) * len(tail)]
            for unseen in others:
                changed = policy.after(GAMMA, (*confidences[:slot], *unseen)).drafts
                assert (changed >= slot) == (width >= slot), (slot, confidences, unseen)


@every_curve
@pytest.mark.parametrize("text", EVERY_POLICY)
def test_slots_behind_the_first_refused_one_play_no_part(text, curve):
    """The whole decision, its reason and its expectations included, stands once a slot is refused."""
    policy, rng = taught(text, curve, seed=4), random.Random(6)
    for confidences in vectors(12, seed=2):
        decision = policy.after(GAMMA, confidences)
        seen = confidences[: decision.drafts + 1]
        for _ in range(4):
            assert policy.after(GAMMA, (*seen, *(rng.random() for _ in confidences[len(seen) :]))) == decision


@pytest.mark.parametrize("text", EVERY_POLICY)
def test_the_causality_test_can_fail(text):
    """Policies that look at this round do change their mind when a slot they may look at changes."""
    policy = taught(text, CURVES["linear"])
    widths = {policy.after(GAMMA, (c,) * GAMMA).drafts for c in (0.01, 0.5, 0.99)}
    assert (len(widths) > 1) == (text not in ("plain", "fixed:4", "lagged"))


# The paper's appendix A, see scheduling.py.


def first_token(law):
    return law["AA"] + law["AB"], law["BA"] + law["BB"]


def retrospective(curve):
    """Algorithm 1 without its early stop: the best width in hindsight of all confidences."""

    def width_of(*confidences):
        tokens = [1 + sum(survivals(confidences)[:width]) for width in range(3)]
        return max(range(3), key=lambda width: tokens[width] / curve.verify(width + 1))

    return width_of


def test_appendix_a_retrospective_search_is_biased():
    law = text_distribution(retrospective(APPENDIX_CURVES["step"]))
    assert first_token(law) == pytest.approx((0.85, 0.15), abs=1e-12)


@pytest.mark.parametrize("past", [(0.8, 0.9), (0.8, 0.1), (0.3, 0.3), None], ids=["easy", "hard", "poor", "new"])
@pytest.mark.parametrize("curve", APPENDIX_CURVES.values(), ids=APPENDIX_CURVES)
@pytest.mark.parametrize("text", ["plain", "fixed:2", "threshold:0.5", "threshold:0.85", *MODELLED])
def test_appendix_a_ours_is_exact(text, curve, past):
    policy = make_policy(text, 2, True, curve)
    for index in range(1, 30 if past else 1):
        policy.before([landed(index, past, drafts=2, accepted=1)] if index > 1 else [])
    law = text_distribution(lambda *confidences: policy.after(2, confidences).drafts)
    assert first_token(law) == pytest.approx((0.70, 0.30), abs=1e-12)
    expected = {a + b: TARGET[""]["AB".index(a)] * TARGET[a]["AB".index(b)] for a, b in itertools.product("AB", "AB")}
    assert law == pytest.approx(expected, abs=1e-12)


def test_appendix_a_asks_both_kinds_of_decision():
    """The test above means something only if slots are admitted here and refused there."""
    widths = set()
    for curve in APPENDIX_CURVES.values():
        for text in MODELLED:
            policy = make_policy(text, 2, True, curve)
            widths |= {policy.after(2, (overlap(""), overlap(first))).drafts for first in "AB"}
    assert widths == {0, 1, 2}
