"""Measuring what rounds cost: what is timed, how medians are cleaned, and where curves are kept."""

import json
import re

import mlx.core as mx
import pytest
from click.testing import CliRunner
from helpers import build_model, embedded_pair, pair_of

from mlx_dspark import profile, scheduling, store
from mlx_dspark.errors import CacheError, FormatError
from mlx_dspark.profile import Timing, depths, evened, measure, timed
from mlx_dspark.schedule import CostCurve
from mlx_dspark.schedule.auto import Auto
from mlx_dspark.structs import KVOptions
from mlx_dspark.target import Target

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.fixture(scope="module")
def short_curve():
    return measure(embedded_pair(), short=True)


def test_a_short_measurement_has_every_row_count_and_proposal(short_curve):
    assert sorted(short_curve.rows) == list(range(1, 9)) and sorted(short_curve.draft) == list(range(1, 8))
    assert all(seconds > 0 for seconds in [*short_curve.rows.values(), *short_curve.draft.values(), short_curve.read])
    assert short_curve.slope == {} and short_curve.host >= 0 and short_curve.about["short"]
    assert short_curve.rows[8] > short_curve.rows[1]  # on mlx's own BLAS rows cost nearly their number


def test_a_full_measurement_adds_wide_rows_and_depth(monkeypatch):
    monkeypatch.setattr(profile, "REPEATS", 1)
    curve = measure(embedded_pair())
    assert set(curve.rows) == {*range(1, 9), 10, 12, 13, 16} == set(curve.slope)
    assert curve.depth == 512 and all(value >= 0 for value in curve.slope.values())


@pytest.mark.parametrize(
    "context, wanted", [(None, (512, 4096)), (2048, (512, 2016)), (131072, (512, 32768)), (300, (268, 268))]
)
def test_depths(context, wanted):
    assert depths(context) == wanted


def test_a_drop_within_the_noise_is_evened_out_and_a_real_one_stays():
    noisy = {1: Timing(10, 1), 2: Timing(12, 1), 3: Timing(11, 0.5), 4: Timing(20, 1), 8: Timing(15, 1)}
    assert evened(noisy) == {1: 10, 2: 11, 3: 11, 4: 20, 8: 15}


def test_repeats_are_interleaved_and_the_warm_up_is_not_counted():
    calls = []
    result = timed({n: lambda n=n: calls.append(n) for n in (1, 2, 3)}, repeats=2, budget=None, progress=lambda t: None)
    assert calls == [1, 2, 3] * 3 and set(result) == {1, 2, 3}


def test_a_budget_ends_the_repeats_but_not_before_three():
    calls = []
    timed({1: lambda: calls.append(1)}, repeats=50, budget=0.0, progress=lambda t: None)
    assert len(calls) == 1 + 3


@pytest.mark.parametrize("kind", ("qwen3", "gemma3_text"))
def test_a_synthetic_cache_costs_positions_like_a_real_one(kind):
    target = Target(build_model(kind), {}, kind)
    cache = target.start(KVOptions())
    cache.fill(lambda tokens: target.forward(tokens, cache).logits, 100)
    assert cache.offset == 100 and {part.offset for part in cache.layers} == {100}
    rows = mx.zeros((1, 4), dtype=mx.int32)
    first = target.forward(rows, cache).logits
    cache.advance(4, 0)
    assert cache.offset == 100
    assert mx.allclose(first, target.forward(rows, cache).logits, atol=1e-5)


def test_a_recurrent_cache_is_not_measured_and_the_default_does_without(monkeypatch):
    def refuse(pair, short):
        raise CacheError("costs cannot be measured over ArraysCache: use --no-profile")

    monkeypatch.setattr(profile, "measure", refuse)
    said = []
    policy, facts = scheduling.policy_for(embedded_pair(), None, say=said.append)
    assert policy.name == "fixed" and "ArraysCache" in facts["costs"] and len(said) == 1


def test_first_use_measures_once_stores_and_says_so(unmeasured, short_curve, monkeypatch):
    calls, said = [], []
    monkeypatch.setattr(profile, "measure", lambda pair, short: calls.append(short) or short_curve)
    policy, facts = scheduling.policy_for(embedded_pair(), None, say=said.append)
    assert isinstance(policy, Auto) and calls == [True] and facts["costs"].startswith("short measurement")
    assert re.search(r"measured what rounds cost here in .* s and stored it in ", said[0])
    del embedded_pair().target.memories  # another process
    scheduling.policy_for(embedded_pair(), "lookahead", say=said.append)
    assert calls == [True] and len(said) == 1
    stored = json.loads(next((unmeasured / "curves").iterdir()).read_text())
    assert CostCurve.from_dict(stored) == short_curve and stored["key"]["mlx"]


@pytest.mark.parametrize("refrain", ("argument", "variable"))
def test_no_profile_refrains(refrain, monkeypatch, unmeasured):
    if refrain == "variable":
        monkeypatch.setenv(scheduling.NO_PROFILE_VARIABLE, "1")
    said = []
    policy, _ = scheduling.policy_for(embedded_pair(), None, profile=refrain != "argument", say=said.append)
    assert policy.name == "fixed" and "mlx_dspark profile" in said[0] and not unmeasured.exists()
    with pytest.raises(ValueError, match="'auto' needs the costs of this machine"):
        scheduling.policy_for(embedded_pair(), "auto", profile=False)


def test_a_pair_without_a_draft_measures_nothing():
    pair = pair_of(build_model("qwen3"), None)
    assert scheduling.policy_for(pair, None)[0].name == "plain"


def test_a_greedy_run_starts_from_what_the_last_one_learned_and_a_sampled_one_does_not(short_curve):
    store.save_curve(embedded_pair(), short_curve)
    first, _ = scheduling.policy_for(embedded_pair(), "auto", remember=True)
    first.forecast.observe([0.9] * 7)
    first.rate.add(50, 1.0)
    again, _ = scheduling.policy_for(embedded_pair(), "auto", remember=True)
    assert again is not first and again.forecast.means == first.forecast.means and again.forecast.rounds == 1
    fresh, _ = scheduling.policy_for(embedded_pair(), "auto")
    assert fresh.forecast.rounds == 0


def test_the_key_tells_models_apart():
    one, other = build_model("qwen3"), build_model("llama")
    assert store.content_hash(one) == store.content_hash(one) != store.content_hash(other)
    before = store.content_hash(other)
    other.model.norm.weight = other.model.norm.weight + 1
    assert store.content_hash(other) != before


@pytest.mark.parametrize("damage", ("not json", '{"rows": {"2": 1.0}}', '{"rows": {"1": "x"}}', '{"rows": 3}', "[]"))
def test_a_damaged_stored_curve_is_one_line(damage):
    path = store.curve_path(embedded_pair())
    path.parent.mkdir(parents=True)
    path.write_text(damage)
    with pytest.raises(FormatError, match="damaged") as caught:
        store.find_curve(embedded_pair())
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = store.write_json(tmp_path / "a.json", {"old": 1})
    monkeypatch.setattr(json, "dumps", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1} and list(tmp_path.iterdir()) == [path]


def test_the_command_prints_a_table_and_stores(short_curve, monkeypatch, unmeasured):
    monkeypatch.setattr(profile, "measure", lambda pair, short, progress: short_curve)
    result = CliRunner().invoke(profile.command, ["--short"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("rows   ms at depth") and "draft ms by proposals: 1:" in result.stdout
    assert len(list((unmeasured / "curves").iterdir())) == 1
    as_json = CliRunner().invoke(profile.command, ["--json"])
    assert CostCurve.from_dict(json.loads(as_json.stdout)) == short_curve
