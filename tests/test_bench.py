"""The bench commands: what they compare, and what they refuse. Times are reported, never asserted."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from helpers import embedded_pair

from mlx_dspark import bench
from mlx_dspark import bench_requests as bench_requests_module
from mlx_dspark.bench_requests import _Places, bench_requests


@pytest.fixture(autouse=True)
def small_pair(monkeypatch):
    monkeypatch.setattr(bench, "open_pair", lambda notes, **fields: embedded_pair())


@pytest.fixture
def prompts(tmp_path):
    """Short ones: mlx's own BLAS takes its time."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"ids": [5, 6, 7, 8]}\n{"ids": [9, 10, 11]}\n', encoding="utf-8")
    return ("--prompts", str(file))


def invoke(*args):
    return CliRunner().invoke(bench.command, args)


def test_texts_are_compared_with_mlx_lm_and_counted(prompts):
    done = invoke(*prompts, "--count", "1", "-m", "12", "--repeats", "1", "--policy", "fixed:3", "--check")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert list(document["contenders"]) == ["mlx_lm", "plain", "fixed:3"]
    for report in document["contenders"].values():
        assert report["texts_equal"] == {"equal": 1, "of": 1, "gaps": [], "near_ties": True}
    assert document["contenders"]["plain"]["tau"] == 1
    assert 1 <= document["contenders"]["fixed:3"]["tau"] <= 4


def test_a_text_that_differs_is_found(prompts, monkeypatch):
    honest = bench._ours

    def forged(pair, policy, max_tokens, timing=False):
        run = honest(pair, policy, max_tokens, timing)
        return lambda prompt: replace(run(prompt), ids=(*run(prompt).ids[:-1], 5))

    monkeypatch.setattr(bench, "_ours", forged)
    done = invoke(*prompts, "--count", "1", "-m", "6", "--repeats", "1", "--policy", "fixed:3", "--check")
    assert done.exit_code == 1 and "differs from mlx_lm's" in done.stderr


def test_requests_are_served_under_every_policy_and_load():
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    document = bench_requests(embedded_pair(), prompts, [1, 3], ["fixed:2"], 8, 1)  # one repeat has no error
    assert list(document["loads"]) == ["1", "3"] and list(document["latency"]) == ["plain", "fixed:2"]
    for load, policies in document["loads"].items():
        plain = policies["plain"]
        assert plain["tau"] == plain["rows_per_request"] == plain["parked_share"] == plain["over_plain"]["all"] == 1
        assert plain["over_plain"]["error"] is None and "over_best" not in plain
        fixed = policies["fixed:2"]
        assert 1 < fixed["rows_per_request"] <= 3 and 1 <= fixed["tau"] <= 3 and fixed["parked_share"] < 0.5
        assert fixed["texts_equal_plain"] == fixed["texts"] == bench_requests_module.WAVES * int(load)


def test_a_policy_that_schedules_is_compared_with_the_best_that_does_not():
    def served(*rates):
        return [bench_requests_module.Served(rate, 1.0, 1, 1, 0, rate) for rate in rates]

    unscheduled = {"plain": served(10, 10, 10), "fixed:1": served(20, 20, 20), "fixed": served(5, 5, 5)}
    reports = bench_requests_module._reports({**unscheduled, "auto": served(20, 22, 24)})
    error = pytest.approx(0.2 / 12**0.5, abs=1e-4)
    assert reports["auto"]["over_best"] == {"best": "fixed:1", "all": 1.1, "error": error}
    assert reports["auto"]["over_plain"]["all"] == 2.2
    assert not any("over_best" in reports[name] for name in unscheduled)


def test_rounds_by_turns_fill_every_place(monkeypatch):
    monkeypatch.setattr(bench_requests_module, "STEADY_ROUNDS", 12)
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    document = bench_requests(embedded_pair(), prompts, [3], ["fixed:2"], 8, 2, steady=True)
    assert document["steady"] and "latency" not in document
    plain, fixed = (document["loads"]["3"][name] for name in ("plain", "fixed:2"))
    assert plain["tau"] == plain["rows_per_request"] == plain["parked_share"] == plain["over_plain"]["median"] == 1
    assert plain["over_plain"]["all"] == 1 and fixed["over_plain"]["all"] > 0
    assert 2 < fixed["rows_per_request"] <= 3 and 1 < fixed["tau"] <= 3 and fixed["parked_share"] < 0.5
    assert fixed["tokens_per_second"] > 0 and "texts" not in fixed


def test_places_are_filled_again():
    places = _Places(embedded_pair(), "fixed:2", 2, [[5, 6, 7, 8], [9, 10, 11]], 4)
    for _ in range(12):
        places.round()
        assert len(places._batch.members) == 2
    served = places.served()
    assert served.rounds > 10 and served.tokens == served.round_tokens > served.rounds
    assert places.served().rounds == 0


@pytest.mark.parametrize("steady", [(), ("--steady",)])
def test_the_command_for_requests_prints_one_document(prompts, monkeypatch, steady):
    monkeypatch.setattr(bench_requests_module, "STEADY_ROUNDS", 4)
    short = ("--count", "2", "-m", "4", "--repeats", "1")
    done = invoke("requests", *prompts, "--loads", "2", "--policy", "fixed:2", *short, *steady)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert set(document["loads"]["2"]) == {"plain", "fixed:2"} and document["steady"] == bool(steady)


@pytest.mark.parametrize(("args", "message"), [
    (("requests", "--loads", "0"), "--loads is '0'"),
    (("requests", "--loads", "a,2"), "--loads is 'a,2'"),
    (("--model", "other"), "give --prompts FILE"),
    (("requests", "--model", "other"), "give --prompts FILE"),
])  # fmt: skip
def test_wrong_arguments_are_named(args, message):
    done = invoke(*args)
    assert done.exit_code == 2 and message in done.stderr
