"""Policies: names and defaults, what they ask, and that they never look ahead (see also test_causality.py)."""

import itertools
import random

import pytest

from mlx_dspark.schedule import Fixed, Plain, Threshold, make_policy
from mlx_dspark.schedule.auto import Auto
from mlx_dspark.schedule.cost import CostCurve
from mlx_dspark.schedule.paper import Lagged, Paper
from mlx_dspark.schedule.rate import Lookahead

GAMMA = 7
CURVE = CostCurve(rows={n: 1 + 0.1 * (n - 1) for n in range(1, 9)}, draft={7: 0.2})


@pytest.mark.parametrize(
    ("text", "gamma", "kind", "name", "width"),
    [
        pytest.param(None, GAMMA, Fixed, "fixed", GAMMA, id="default-with-a-draft"),
        pytest.param(None, 0, Plain, "plain", 0, id="default-without"),
        pytest.param("plain", GAMMA, Plain, "plain", 0, id="plain"),
        pytest.param("plain", 0, Plain, "plain", 0, id="plain-without-a-draft"),
        pytest.param("fixed", GAMMA, Fixed, "fixed", GAMMA, id="fixed"),
        pytest.param("fixed:1", GAMMA, Fixed, "fixed:1", 1, id="fixed-1"),
        pytest.param("fixed:7", GAMMA, Fixed, "fixed:7", 7, id="fixed-gamma"),
        pytest.param("threshold:0.5", GAMMA, Threshold, "threshold:0.5", GAMMA, id="threshold"),
        pytest.param("threshold:1", GAMMA, Threshold, "threshold:1", GAMMA, id="threshold-1"),
        pytest.param("threshold:0", GAMMA, Fixed, "threshold:0", GAMMA, id="threshold-0"),
    ],
)
def test_names(text, gamma, kind, name, width):
    policy = make_policy(text, gamma, has_confidence=True)
    assert (type(policy), policy.name, policy.before([])) == (kind, name, width)
    assert policy.reads_confidence == (kind is Threshold)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("paper", Paper), ("lagged", Lagged), ("rate", Lookahead), ("lookahead", Lookahead), ("auto", Auto)],
)
def test_names_that_need_a_curve(text, kind):
    policy = make_policy(text, GAMMA, True, CURVE)
    assert (type(policy), policy.name, policy.before([]), policy.uses_confidence) == (kind, text, GAMMA, True)
    assert policy.reads_confidence == (text != "lagged")
    with pytest.raises(ValueError, match="costs of this machine.*--no-profile"):
        make_policy(text, GAMMA, True)
    with pytest.raises(ValueError, match="confidence head.*fixed:7"):
        make_policy(text, GAMMA, False, CURVE)
    with pytest.raises(ValueError, match="needs a draft.*plain"):
        make_policy(text, 0, True, CURVE)
    with pytest.raises(ValueError, match="unknown policy"):
        make_policy(f"{text}:3", GAMMA, True, CURVE)


@pytest.mark.parametrize(
    ("gamma", "confidence", "curve", "name"),
    [
        pytest.param(GAMMA, True, CURVE, "auto", id="all-there"),
        pytest.param(GAMMA, True, None, "fixed", id="no-curve"),
        pytest.param(GAMMA, False, CURVE, "fixed", id="no-confidence"),
        pytest.param(0, False, CURVE, "plain", id="no-draft"),
    ],
)
def test_the_default_is_the_best_that_is_possible(gamma, confidence, curve, name):
    assert make_policy(None, gamma, confidence, curve).name == name


def test_no_wider_than_what_was_measured():
    """An unmeasured row count has no price: it is not asked for."""
    for text in ("paper", "lagged", "rate", "lookahead", "auto"):
        assert make_policy(text, GAMMA, True, CostCurve(rows={1: 1.0, 4: 2.0})).before([]) == 3


@pytest.mark.parametrize(
    ("text", "gamma", "confidence", "fragments"),
    [
        pytest.param("fast", GAMMA, True, ["'fast'", "plain, fixed:N, threshold:X", "auto"], id="unknown"),
        pytest.param("", GAMMA, True, ["''", "fixed:N"], id="empty"),
        pytest.param("Fixed", GAMMA, True, ["'Fixed'", "fixed:N"], id="capital"),
        pytest.param("plain:3", GAMMA, True, ["'plain:3'", "use plain"], id="plain-with-value"),
        pytest.param("fixed:99", GAMMA, True, ["'fixed:99'", "1 to 7"], id="fixed-too-wide"),
        pytest.param("fixed:8", GAMMA, True, ["'fixed:8'", "1 to 7"], id="fixed-one-too-wide"),
        pytest.param("fixed:0", GAMMA, True, ["'fixed:0'", "1 to 7"], id="fixed-0"),
        pytest.param("fixed:-1", GAMMA, True, ["'fixed:-1'", "1 to 7"], id="fixed-negative"),
        pytest.param("fixed:2.5", GAMMA, True, ["'fixed:2.5'", "1 to 7"], id="fixed-fraction"),
        pytest.param("fixed:x", GAMMA, True, ["'fixed:x'", "1 to 7"], id="fixed-word"),
        pytest.param("threshold", GAMMA, True, ["'threshold'", "threshold:0.5"], id="threshold-bare"),
        pytest.param("threshold:1.1", GAMMA, True, ["'threshold:1.1'", "0 to 1"], id="threshold-high"),
        pytest.param("threshold:-0.1", GAMMA, True, ["'threshold:-0.1'", "0 to 1"], id="threshold-negative"),
        pytest.param("threshold:nan", GAMMA, True, ["'threshold:nan'", "0 to 1"], id="threshold-nan"),
        pytest.param("threshold:x", GAMMA, True, ["'threshold:x'", "0 to 1"], id="threshold-word"),
        pytest.param("threshold:0.5", GAMMA, False, ["no", "confidence head", "fixed:7"], id="no-confidence-head"),
        pytest.param("fixed", 0, False, ["'fixed'", "needs a draft", "--draft"], id="fixed-without-draft"),
        pytest.param("threshold:0.5", 0, False, ["'threshold:0.5'", "--draft"], id="threshold-without-draft"),
    ],
)
def test_errors_name_the_value_and_the_remedy(text, gamma, confidence, fragments):
    with pytest.raises(ValueError) as caught:
        make_policy(text, gamma, confidence)
    message = str(caught.value)
    assert "\n" not in message
    assert all(fragment in message for fragment in fragments), message


def test_threshold_0_needs_no_confidence_head():
    policy = make_policy("threshold:0", GAMMA, has_confidence=False)
    assert not policy.reads_confidence and policy.after(GAMMA, None).drafts == GAMMA


@pytest.mark.parametrize(
    ("confidences", "drafts"),
    [
        pytest.param([0.9, 0.9, 0.9], 3, id="all-pass"),
        pytest.param([0.5, 0.5, 0.5], 3, id="equal-passes"),
        pytest.param([0.49, 0.9, 0.9], 0, id="first-fails"),
        pytest.param([0.9, 0.49, 0.9], 1, id="second-fails"),
        pytest.param([0.9, 0.9, 0.49], 2, id="last-fails"),
        pytest.param([0.6, 0.6, 0.6], 3, id="per-slot-not-the-product"),
    ],
)
def test_threshold_admits_up_to_the_first_slot_below(confidences, drafts):
    decision = make_policy("threshold:0.5", 3, True).after(3, confidences)
    assert (decision.drafts, decision.policy) == (drafts, "threshold:0.5")
    assert f"c_{drafts + 1} = " in decision.reason or drafts == 3


def test_threshold_looks_at_proposed_slots_only():
    assert make_policy("threshold:0.5", GAMMA, True).after(2, [0.9, 0.9, 0.1, 0.1]).drafts == 2


def test_threshold_1_admits_certainty_only():
    policy = make_policy("threshold:1", 2, True)
    assert policy.after(2, [1.0, 0.9999]).drafts == 1


def test_nothing_drafted_means_nothing_verified():
    assert make_policy("threshold:0.5", GAMMA, True).after(0, None).drafts == 0
    assert make_policy("fixed", GAMMA, True).after(0, None).drafts == 0
    assert make_policy("plain", GAMMA, True).after(0, None).drafts == 0


@pytest.mark.parametrize("proposed", [1, 3, 7])
def test_fixed_verifies_all_that_was_proposed(proposed):
    decision = make_policy("fixed", GAMMA, True).after(proposed, None)
    assert decision.drafts == proposed
    assert decision.reason == ("fixed width" if proposed == GAMMA else "cut to what is left")


@pytest.mark.parametrize("seed", range(30))
def test_confidences_behind_the_decision_play_no_part(seed):
    """Causality (paper, appendix A): slots after the first failing one have not been seen yet."""
    rng = random.Random(seed)
    policy = make_policy("threshold:0.5", 5, True)
    confidences = [rng.random() for _ in range(5)]
    decision = policy.after(5, confidences)
    seen, unseen = confidences[: decision.drafts + 1], confidences[decision.drafts + 1 :]
    for others in itertools.chain(itertools.permutations(unseen), [[0.0] * len(unseen), [1.0] * len(unseen)]):
        assert policy.after(5, [*seen, *others]) == decision


@pytest.mark.parametrize("text", ["plain", "fixed", "threshold:0.5"])
def test_decisions_carry_their_policy_and_a_reason(text):
    policy = make_policy(text, GAMMA, True)
    decision = policy.after(policy.before([]), [0.9] * GAMMA if policy.reads_confidence else None)
    assert decision.policy == text and decision.reason
