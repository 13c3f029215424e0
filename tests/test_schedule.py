"""The policies that model time: causal, right, and what they learn. Bars over whole runs: test_simulate.py."""

import itertools
import json
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from scheduling import CONVEX, CURVES, GAMMA, MODELLED, every_curve, landed, survivals, taught, vectors

from mlx_dspark.schedule import make_policy
from mlx_dspark.schedule import simulate as sim
from mlx_dspark.schedule.cost import CostCurve
from mlx_dspark.schedule.forecast import Forecast
from mlx_dspark.schedule.rate import PLAIN_ROUNDS, RunRate
from mlx_dspark.schedule.refine import Refinement


@pytest.fixture(autouse=True)
def confidences_as_given(monkeypatch):
    """These tests give probabilities; what refinement makes of wrong ones is in test_refine.py."""
    monkeypatch.setattr(Refinement, "__call__", lambda self, confidences: tuple(confidences))

# Right


def value_of(policy, confidences, width):
    """Tokens of `width` drafts, less the price of their rows."""
    rows = policy.curve.verify(width + 1) - policy.curve.verify(1)
    return sum(survivals(confidences)[:width]) - policy.price() * rows


@every_curve
def test_best_prefix_is_the_best_of_all(curve):
    policy = taught("lookahead", curve)
    for confidences in vectors(60, seed=7):
        values = [value_of(policy, confidences, width) for width in range(GAMMA + 1)]
        _, width, _ = policy.best_prefix(confidences)
        assert values[width] == pytest.approx(max(values), abs=1e-12)


@every_curve
@pytest.mark.parametrize("text", ["paper", "rate"])
def test_one_row_at_a_time_stops_at_the_first_that_does_not_pay(text, curve):
    policy = taught(text, curve)

    def pays(confidences, slot):
        if text == "rate":
            return value_of(policy, confidences, slot) > value_of(policy, confidences, slot - 1)
        fixed_costs = curve.drafting(GAMMA) + curve.host
        before, after = ((1 + sum(survivals(confidences)[:w])) / (fixed_costs + curve.verify(w + 1))
                         for w in (slot - 1, slot))
        return after > before

    for confidences in vectors(60, seed=8):
        expected = next((s - 1 for s in range(1, GAMMA + 1) if not pays(confidences, s)), GAMMA)
        assert policy.after(GAMMA, confidences).drafts == expected


@pytest.mark.parametrize("name", CONVEX)
@pytest.mark.parametrize("text", ["paper", "rate", "lookahead"])
def test_without_steps_stopping_early_loses_nothing(text, name):
    """Survivals fall and rows get no cheaper: the first row that does not pay is the last one to look at."""
    policy = taught(text, CURVES[name])
    for confidences in vectors(60, seed=9):
        width = policy.after(GAMMA, confidences).drafts
        if text == "paper":
            rates = [(1 + sum(survivals(confidences)[:w])) / policy.seconds(GAMMA, w) for w in range(GAMMA + 1)]
            assert rates[width] == pytest.approx(max(rates), rel=1e-12)
        else:
            values = [value_of(policy, confidences, w) for w in range(GAMMA + 1)]
            assert values[width] == pytest.approx(max(values), abs=1e-9)


@every_curve
def test_lagged_takes_the_best_budget_of_two_rounds_ago(curve):
    policy, history = make_policy("lagged", GAMMA, True, curve), deque(maxlen=4)
    past = vectors(40, seed=10)
    for index, confidences in enumerate(past, start=1):
        policy.before(history)
        width = policy.after(GAMMA, None).drafts
        if index <= 2:
            assert width == GAMMA
        else:
            old = survivals(past[index - 3])
            rates = [(1 + sum(old[:w])) / policy.seconds(GAMMA, w) for w in range(GAMMA + 1)]
            assert rates[width] == pytest.approx(max(rates), rel=1e-12)
        history.append(landed(index, confidences, drafts=width))


@every_curve
def test_lookahead_is_optimal_stopping_when_its_forecast_is_the_truth(curve, monkeypatch):
    policy = taught("lookahead", curve)
    for truth in vectors(80, seed=11):
        monkeypatch.setattr(policy.forecast, "predict", lambda seen, truth=truth: list(truth[len(seen) :]))
        stop = 0.0  # the value of what is still ahead, from the last slot to the first
        for slot in range(GAMMA, 0, -1):
            gain = survivals(truth)[slot - 1] - policy.price() * (curve.verify(slot + 1) - curve.verify(slot))
            stop = max(0.0, gain + stop)
        assert value_of(policy, truth, policy.after(GAMMA, truth).drafts) == pytest.approx(stop, abs=1e-9)


def test_lookahead_goes_over_a_step_that_stops_the_others():
    confidences, curve = (0.97,) * GAMMA, CURVES["stepped"]
    widths = {}
    for text in ("paper", "rate", "lookahead"):
        policy = make_policy(text, GAMMA, True, curve)
        policy.before([])
        for index in range(2, 60):
            policy.before([landed(index, confidences, drafts=GAMMA, accepted=6)])
        widths[text] = policy.after(GAMMA, confidences).drafts
    assert widths["lookahead"] == GAMMA > widths["rate"]


@pytest.mark.parametrize("kind", ["steady", "swinging"])
@pytest.mark.parametrize("name", ["linear", "flat"])
def test_the_price_is_the_fixed_point_of_the_run(name, kind):
    """lambda = tokens / seconds of the rounds that lambda itself chooses (Dinkelbach's iteration)."""
    content, curve = sim.made_up(kind, 6000, seed=12), CURVES[name]
    costs = np.array([curve.verify(n) for n in range(1, 9)])
    survival, price = np.cumprod(content.confidences, axis=1), 1.0
    for _ in range(30):
        width = np.cumprod(survival > price * np.diff(costs), axis=1).sum(axis=1)
        tokens = 1 + np.where(np.arange(GAMMA) < width[:, None], survival, 0).sum(axis=1)
        price = tokens.sum() / (costs[width] + curve.drafting(GAMMA) + curve.host).sum()
    policy, prices = make_policy("rate", GAMMA, True, curve), []
    learn = policy.before
    policy.before = lambda history: prices.append(policy.price()) or learn(history)
    sim.replay(policy, content, curve)
    assert np.mean(prices[2000:]) == pytest.approx(max(price, 1 / (costs[0] + curve.host)), rel=0.015)


def test_the_price_is_never_below_plain_decoding():
    rate = RunRate()
    assert rate.value(0.5) == 2.0
    for _ in range(500):
        rate.add(1, 5.0)
    assert rate.value(0.5) == 2.0


def test_the_price_starts_at_plain_decoding_and_moves_slowly():
    rate = RunRate()
    rate.add(3, 1.0)
    assert rate.value(1.0) == pytest.approx((PLAIN_ROUNDS + 3) / (PLAIN_ROUNDS + 1))
    for _ in range(20000):
        rate.add(3, 1.0)
    assert rate.value(1.0) == pytest.approx(3.0, rel=0.06)


# What a decision carries


@pytest.mark.parametrize("proposed", [0, 1, 4, GAMMA])
@pytest.mark.parametrize("text", MODELLED)
def test_a_decision_carries_expectations_policy_and_reason(text, proposed):
    curve = CURVES["linear"]
    policy = taught(text, curve)
    confidences = (0.9, 0.8, 0.9, 0.7, 0.6, 0.5, 0.4)[:proposed]
    decision = policy.after(proposed, confidences if policy.reads_confidence and proposed else None)
    assert decision.policy == text and decision.reason
    assert decision.drafts <= proposed
    assert decision.seconds == pytest.approx(
        curve.drafting(proposed) + curve.verify(decision.drafts + 1) + curve.host)
    if text == "lagged":
        confidences = policy._old[-2]
    assert decision.expected_tokens == pytest.approx(1 + sum(survivals(confidences)[: decision.drafts]))


@pytest.mark.parametrize("text", MODELLED)
def test_every_round_of_a_run_carries_its_reason(text):
    curve, kept = CURVES["linear"], []
    policy = make_policy(text, GAMMA, True, curve)
    decide = policy.after
    policy.after = lambda proposed, confidences: kept.append(decide(proposed, confidences)) or kept[-1]
    sim.replay(policy, sim.made_up("swinging", 400, 13), curve)
    assert all(d.policy == text and d.reason and d.expected_tokens >= 1 and d.seconds > 0 for d in kept)
    if text == "auto":
        reasons = {d.reason.split(":")[0] for d in kept}
        assert {"parked", "probe"} <= reasons
        assert all("expected to lose" in d.reason and d.drafts == 0 for d in kept if d.reason.startswith("parked"))


def test_a_calibrator_is_applied_before_anything_is_decided():
    seen = []

    def calibrate(confidences):
        seen.append(confidences)
        return tuple(0.0 for _ in confidences)

    policy = make_policy("lookahead", GAMMA, True, CURVES["flat"], calibrate)
    policy.before([landed(1, (0.9,) * GAMMA)])
    assert policy.after(GAMMA, (0.99,) * GAMMA).drafts == 0
    assert seen == [(0.9,) * GAMMA, (0.99,) * GAMMA]
    assert policy.forecast.means == pytest.approx([0.0] * GAMMA)


@pytest.mark.parametrize("text", MODELLED)
def test_a_round_is_learned_once_and_late_ones_come_later(text):
    """The loop hands over a history that overlaps; a round still in flight shows up one call later."""
    policy, twin = (make_policy(text, GAMMA, True, CURVES["linear"]) for _ in range(2))
    rounds = [landed(i, v, drafts=2, accepted=1) for i, v in enumerate(vectors(12, 14), start=1)]
    for end in range(len(rounds) + 1):
        twin.before(rounds[:end])
    for end in (0, 0, 1, 2, 2, 4, *range(5, len(rounds))):
        policy.before(rounds[:end])
    policy.before(rounds)
    assert policy.price() == pytest.approx(twin.price(), rel=1e-12)
    assert policy.forecast.rounds == twin.forecast.rounds == len(rounds)


def test_the_depth_of_the_context_enters():
    """Rows that were free at depth 0 are not at a depth where each reads a long cache."""
    rows = {n: 1 + 0.01 * n for n in range(1, 9)}
    curve = CostCurve(rows=rows, slope={n: 1e-4 * n for n in rows}, draft={GAMMA: 0.1}, draft_slope=2e-5)
    policy = make_policy("rate", GAMMA, True, curve)
    shallow = policy.after(GAMMA, (0.7,) * GAMMA)
    policy.before([landed(1, (0.7,) * GAMMA, start=20000)])
    deep = policy.after(GAMMA, (0.7,) * GAMMA)
    assert deep.drafts < shallow.drafts
    assert deep.seconds == pytest.approx(0.1 + 0.4 + curve.verify(deep.drafts + 1, 20001), abs=1e-4)


def test_auto_parks_where_context_makes_proposals_dear():
    curve = replace(CURVES["flat"], draft_slope=1e-4)
    for start, drafts in (0, True), (20000, False):
        policy = taught("auto", curve, kind="steady")
        asked = policy.before([landed(index, (0.7,) * GAMMA, start=start) for index in range(41, 51)])
        assert bool(asked) == drafts


# The forecast


def test_the_forecast_learns_each_slot():
    means = np.linspace(0.9, 0.3, GAMMA)
    forecast, rng = Forecast(GAMMA), np.random.default_rng(15)
    for _ in range(3000):
        forecast.age += 1
        forecast.observe(np.clip(means + 0.05 * rng.standard_normal(GAMMA), 0, 1))
    assert forecast.means == pytest.approx(means, abs=0.02)
    assert forecast.expected() == pytest.approx(means, abs=0.03)
    assert forecast.predict([0.9, 0.8]) == pytest.approx(means[2:], abs=0.05)


def test_the_forecast_starts_from_a_guess_and_forgets_it_at_once():
    forecast = Forecast(3, start=0.6)
    assert forecast.expected() == [0.6] * 3
    forecast.age += 1
    forecast.observe([0.9, 0.8, 0.7])
    assert forecast.means == pytest.approx([0.9, 0.8, 0.7])


def followed(content, seed=16):
    forecast = Forecast(GAMMA)
    for confidences in sim.made_up(content, 3000, seed).confidences.tolist():
        forecast.age += 1
        forecast.observe(confidences)
    return forecast


def test_sticky_content_carries_over_and_fades_while_nobody_looks():
    """Mean stay 20 rounds: a deviation is left with factor 1 - 2/20 a round."""
    forecast = followed("swinging")
    assert forecast.carry == pytest.approx(0.9, abs=0.06)
    forecast.age += 1
    forecast.observe([0.9] * GAMMA)
    gaps = []
    for _ in range(40):
        forecast.age += 1
        gaps.append(np.mean(forecast.expected()) - np.mean(forecast.means))
    assert gaps[0] > 0.1 and all(a > b for a, b in itertools.pairwise(gaps)) and gaps[-1] < 0.02


def test_content_without_memory_does_not_carry_over():
    assert abs(followed("steady").carry) < 0.25


def test_slots_already_seen_shift_the_others_on_sticky_content_only():
    swinging, steady = followed("swinging"), followed("steady")
    for forecast, low, high in ((swinging, 0.25, 1.0), (steady, -0.01, 0.1)):
        shift = np.mean(forecast.predict([0.95, 0.95])) - np.mean(forecast.predict([0.4, 0.4]))
        assert low < shift < high


def test_a_prediction_uses_what_it_is_given_and_nothing_else():
    forecast = followed("swinging")
    before = json.dumps(vars(forecast))
    assert forecast.predict([0.5, 0.6]) == forecast.predict((0.5, 0.6))
    assert [len(forecast.predict([0.5] * n)) for n in range(1, GAMMA + 1)] == list(range(GAMMA - 1, -1, -1))
    assert all(0.01 <= c <= 0.99 for c in forecast.predict([0.0]) + forecast.predict([1.0]) + forecast.expected())
    assert json.dumps(vars(forecast)) == before, "predicting is not learning"


def test_a_short_proposal_teaches_its_slots_only():
    forecast = Forecast(4, start=0.5)
    forecast.age += 1
    forecast.observe([0.9, 0.9])
    forecast.observe([])
    assert forecast.means == pytest.approx([0.9, 0.9, 0.5, 0.5]) and forecast.rounds == 1


# Reading this round's confidences


@pytest.mark.parametrize(("read", "reads"), [(0.0, True), (5.0, False)], ids=["free", "dear"])
def test_auto_reads_only_while_that_pays(read, reads):
    """Drafts whose fate varies are worth a look; a look that costs five plain rounds is not."""
    curve = replace(CURVES["linear"], read=read)
    policy = taught("auto", curve, rounds=300, kind="steady")
    assert policy.reads_confidence == reads
    assert policy.after(GAMMA, None).reason == "from past rounds"


@pytest.mark.parametrize("ages", [(1,), (0,), (-12, 1), (-1,)], ids=str)
@pytest.mark.parametrize("deviation", [lambda index: 0.3 * 1.2 ** (index % 40 - 39), lambda index: 0.2 * (-1) ** index],
                         ids=["growing", "to and fro"])
def test_what_carries_over_stays_between_nothing_and_nearly_all(deviation, ages):
    """Also where a text begins anew under its old name, so that rounds seem to go back."""
    forecast = Forecast(GAMMA)
    for index in range(300):
        forecast.age = ages[index % len(ages)]
        forecast.observe([0.6 + deviation(index)] * GAMMA)
        assert 0 <= forecast.carry <= 0.99
