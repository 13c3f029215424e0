"""Calibration: the metrics against DeepSeek's tables, and sequential temperature scaling."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_dspark.schedule.calibration import BINS, CLAMP, GRID, Rounds, calibrator, fit_temperatures, metrics, survivals

GOLDEN = Path(__file__).parent / "golden" / "confidence_metrics"
TABLES = json.loads((GOLDEN / "confidence.json").read_text())
NUMBERS = {"ece": "ece", "brier": "brier", "predicted": "pred_mean", "observed": "target_mean"}


def golden_rounds(name):
    tensors = load_file(GOLDEN / "confidence.safetensors")
    accepted = np.cumprod(tensors["accept_prefix_mask"].astype(int), axis=1).sum(axis=1)
    rounds = Rounds(tensors["confidence_logits"], accepted, tensors["effective_length"])
    if name == "all_rows":
        return rounds
    keep = slice(TABLES[name]["index"], TABLES[name]["index"] + 1) if name == "single_round" else slice(0, 0)
    return Rounds(rounds.logits[keep], rounds.accepted[keep], rounds.lengths[keep])


def logit(p):
    return np.log(p / (1 - p))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def made(count, gamma, seed, stretch=1.0):
    """Rounds whose true confidences are known; the head shows their logits times `stretch`."""
    rng = np.random.default_rng(seed)
    truth = rng.beta(4, 1.5, (count, gamma)).clip(0.02, 0.98)
    accepted = np.cumprod(rng.random((count, gamma)) < truth, axis=1).sum(axis=1)
    return Rounds(stretch * logit(truth), accepted, np.full(count, gamma))


# Metrics


@pytest.mark.parametrize("name", ["all_rows", "single_round", "no_rounds"])
def test_metrics_equal_the_reference(name):
    table = TABLES[name]["row"]["per_position"]
    found = metrics(golden_rounds(name))
    assert len(found) == len(table) == 7
    for slot, expected in zip(found, table, strict=True):
        assert (slot.slot, slot.count) == (expected["position"], expected["total_weight"])
        for ours, theirs in NUMBERS.items():
            wanted = math.nan if expected[theirs] is None else expected[theirs]
            assert getattr(slot, ours) == pytest.approx(wanted, abs=1e-6, nan_ok=True), (slot.slot, ours)
        auc = math.nan if expected["auc"] is None else expected["auc"]
        assert slot.auc == pytest.approx(auc, abs=0, rel=1e-15, nan_ok=True)
        bins = [(b["bin"], b["avg_pred"], b["avg_target"], b["weight"]) for b in expected["reliability"]]
        assert len(slot.reliability) == len(bins)
        for ours, theirs in zip(slot.reliability, bins, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6)


def test_metrics_summarise_like_the_reference():
    """The reference's summary weighs slots by how often they were verified."""
    found, summary = metrics(golden_rounds("all_rows")), TABLES["all_rows"]["summary"]
    weights = [slot.count for slot in found]
    for name in ("ece", "auc", "brier"):
        mean = np.average([getattr(slot, name) for slot in found], weights=weights)
        assert mean == pytest.approx(summary[f"{name}_mean"], abs=1e-6)


def test_metrics_by_hand():
    """Two rounds of one slot: 0.5 accepted, 0.5 refused; then one more, sure and right."""
    rounds = Rounds(np.array([[0.0], [0.0], [40.0]]), np.array([1, 0, 1]), np.ones(3, int))
    (slot,) = metrics(rounds)
    assert slot.reliability == ((10, 0.5, 0.5, 2), (BINS - 1, 1 - CLAMP, 1.0, 1))
    assert slot.ece == pytest.approx(0, abs=1e-7)
    assert slot.auc == pytest.approx(0.75)  # the pairs (0.5, 0.5) and (1, 0.5): half and one
    assert slot.brier == pytest.approx(0.5 / 3)


def test_slots_that_were_not_verified_do_not_count():
    rounds = Rounds(np.zeros((3, 3)), np.array([1, 0, 0]), np.array([2, 1, 0]))
    assert [slot.count for slot in metrics(rounds)] == [2, 1, 0]
    assert metrics(rounds)[1].observed == 0.0 and math.isnan(metrics(rounds)[2].ece)


def test_metrics_as_json():
    full, empty = (json.loads(json.dumps(metrics(golden_rounds(n))[0].to_dict())) for n in ("all_rows", "no_rounds"))
    assert empty == {"slot": 0, "count": 0, "ece": None, "auc": None, "brier": None, "predicted": None,
                     "observed": None, "reliability": []}
    assert full["count"] == 391 and len(full["reliability"]) == 20


def test_survivals_are_running_products():
    logits = np.array([[0.0, 2.0, -1.0]])
    assert survivals(logits) == pytest.approx(np.cumprod(sigmoid(logits), axis=1), abs=1e-7)
    assert survivals(logits, [1.0, 2.0, 0.5, 9.0]) == pytest.approx(
        np.cumprod(sigmoid(np.array([[0.0, 1.0, -2.0]])), axis=1), abs=1e-7)


# Sequential temperature scaling


def plain_ece(predicted, label):
    """The definition, bin by bin."""
    total = 0.0
    for b in range(BINS):
        inside = [i for i, p in enumerate(predicted) if min(int(p * BINS), BINS - 1) == b]
        if inside:
            total += abs(sum(predicted[i] for i in inside) - sum(label[i] for i in inside))
    return total / len(predicted)


@pytest.mark.parametrize("seed", range(4))
def test_each_temperature_is_the_best_of_the_grid_left_to_right(seed):
    grid = (0.5, 0.8, 1.0, 1.25, 2.0, 3.0)
    rounds = made(60, 3, seed, stretch=1.6)
    rounds = Rounds(rounds.logits, rounds.accepted, np.random.default_rng(seed).integers(0, 4, 60))
    chosen = fit_temperatures(rounds, grid)
    survival = np.ones(60)
    for slot, temperature in enumerate(chosen):
        there = rounds.lengths > slot
        label = (rounds.accepted > slot)[there].astype(float)
        errors = {t: plain_ece((survival * sigmoid(rounds.logits[:, slot] / t))[there], label) for t in grid}
        assert errors[temperature] == pytest.approx(min(errors.values()), abs=1e-9)
        survival = survival * sigmoid(rounds.logits[:, slot] / temperature)


@pytest.mark.parametrize("stretch", [0.7, 1.0, 1.6, 2.5])
def test_a_known_temperature_is_found_again(stretch):
    found = fit_temperatures(made(5000, 3, 1, stretch))
    assert found[0] == pytest.approx(stretch, rel=0.1)
    assert np.exp(np.mean(np.log(found))) == pytest.approx(stretch, rel=0.1)


def test_scaling_lowers_the_error():
    rounds, fresh = made(6000, 4, 2, stretch=1.6), made(6000, 4, 3, stretch=1.6)
    temperatures = fit_temperatures(rounds)
    raw, scaled = metrics(fresh), metrics(fresh, temperatures)
    for before, after in zip(raw, scaled, strict=True):
        assert after.ece < 0.6 * before.ece
    assert max(slot.ece for slot in scaled) < 0.03


def test_what_is_calibrated_stays_as_it_is():
    assert fit_temperatures(made(8000, 3, 4)) == pytest.approx([1.0] * 3, abs=0.12)


def test_of_equally_good_temperatures_the_one_nearest_to_1_is_taken():
    rounds = Rounds(np.zeros((6, 2)), np.array([0, 1, 2, 0, 1, 2]), np.full(6, 2))  # logit 0: every T gives 0.5
    assert fit_temperatures(rounds) == [1.0, 1.0]


def test_a_slot_never_verified_keeps_temperature_1():
    rounds = made(500, 3, 5, stretch=2.0)
    rounds = Rounds(rounds.logits, rounds.accepted, np.full(500, 1))
    assert fit_temperatures(rounds)[1:] == [1.0, 1.0]
    assert fit_temperatures(golden_rounds("no_rounds")) == [1.0] * 7


def test_the_grid_holds_1_and_both_sides():
    assert 1.0 in GRID and GRID[0] == 0.2 and GRID[-1] == 5.0
    assert all(a < b < 1.05 * a for a, b in zip(GRID, GRID[1:], strict=False))


# The calibrator


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
def test_the_calibrator_scales_logits(temperature):
    confidences = (0.01, 0.3, 0.5, 0.9, 0.999)
    expected = sigmoid(logit(np.array(confidences)) / temperature)
    assert calibrator([temperature] * 5)(confidences) == pytest.approx(expected, rel=1e-9)


def test_the_calibrator_is_per_slot_and_keeps_the_length():
    calibrate = calibrator([2.0, 1.0])
    once = calibrate((0.9, 0.9, 0.9))
    assert once == pytest.approx((0.75, 0.9, 0.9))
    assert calibrate((0.9,)) == pytest.approx((0.75,)) and calibrate(()) == ()


def test_without_temperatures_nothing_changes():
    assert calibrator(None)([0.9, 0.1]) == (0.9, 0.1)


@pytest.mark.parametrize("confidence", [0.0, 1.0])
def test_certainty_does_not_overflow(confidence):
    for temperature in (0.2, 1.0, 5.0):
        (scaled,) = calibrator([temperature])((confidence,))
        assert 0 <= scaled <= 1 and abs(scaled - confidence) < 0.03
