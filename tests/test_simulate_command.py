"""`mlx_dspark.simulate`: published and stored curves, recorded rounds, tables and JSON."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from helpers import refused

from mlx_dspark.errors import FormatError
from mlx_dspark.record import judged, read_recording
from mlx_dspark.schedule.calibration import calibrator
from mlx_dspark.schedule.cost import CostCurve
from mlx_dspark.schedule.grid import CostGrid
from mlx_dspark.schedule.load import made_up_load
from mlx_dspark.schedule.simulate import Content, best_fixed, made_up
from mlx_dspark.simulate import command, published_curves, read_curve, simulate, with_draft

ROOT = Path(__file__).parent.parent
FLAT = CostCurve(dict.fromkeys(range(1, 9), 1.0), draft={7: 0.5})
KEYS = ["curve", "content", "draft_share", "policy", "speedup_over_plain"]


def run(*args) -> Result:
    return CliRunner().invoke(command, [str(arg) for arg in args], prog_name="mlx_dspark.simulate")


def output(*args) -> str:
    done = run(*args)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def entries(*args) -> list[dict]:
    return json.loads(output(*args, "--json"))


def recorded(accepted: int, drafts: int = 4, confidences: list | None = None, tokens: int | None = None,
             proposed: int | None = None) -> dict:
    """A round as `generate --record` writes it, as far as a replay looks at it."""
    proposed = drafts if proposed is None else proposed
    return {"index": 1, "proposed": proposed, "drafts": list(range(drafts)), "accepted": accepted,
            "tokens": [7] * (accepted + 1 if tokens is None else tokens),
            "confidences": [0.5] * proposed if confidences is None else confidences}


PREFILL = {"index": 0, "proposed": 0, "drafts": [], "accepted": 0, "tokens": [3], "confidences": None}


@pytest.fixture
def record(tmp_path):
    """Write rounds to a file, with what else such a file holds."""

    def write(*rounds: dict) -> Path:
        path = tmp_path / "rounds.jsonl"
        lines = [{"run": {"prompt_tokens": 3}}, PREFILL, *rounds]
        path.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
        return path

    return write


# --- curves


def test_all_published_curves_are_there():
    curves = published_curves()
    assert len(curves) == 13
    for name, curve in curves.items():
        assert curve.about["name"] == name and curve.about["source"] and curve.widest >= 4
    assert curves["m4max-30b-4bit"].rows[8] == pytest.approx(0.0844)
    assert curves["m3max-mlp-4bit"].rows[6] == 2.04  # relative costs stay as they are


def test_a_first_row_that_was_not_published_costs_like_the_next_and_is_marked():
    curve = published_curves()["m4pro-12b-8bit-old-mlx"]
    assert curve.rows[1] == curve.rows[2] == pytest.approx(0.0625)
    text = output("--curve", "m4pro-12b-8bit-old-mlx", "--curve", "m4max-30b-4bit", "--rounds", 20, "--policy", "fixed")
    assert "m4pro-12b-8bit-old-mlx*" in text and "m4max-30b-4bit*" not in text
    assert "* its first row was not published" in text


def test_the_draft_costs_its_share_unless_it_was_measured():
    curve = CostCurve({1: 2.0, 2: 3.0})
    assert with_draft(curve, 0.25, 7).drafting(3) == 0.5
    assert with_draft(FLAT, 0.25, 7) is FLAT


def test_a_stored_curve_keeps_its_own_draft(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**FLAT.to_dict(), "key": {"chip": "x"}}), encoding="utf-8")
    assert read_curve(path) == FLAT
    found = entries("--curve", path, "--draft-share", "0.1,0.2", "--rounds", 50, "--content", "steady")
    assert {entry["draft_share"] for entry in found} == {0.5} and len(found) == 7
    text = output("--curve", path, "--curve", "m4max-30b-4bit", "--rounds", 20, "--policy", "fixed")
    assert "of which 1 were published by others and 1 stored on this machine" in text


@pytest.mark.parametrize("text", [
    pytest.param("{", id="truncated"), pytest.param("[1]", id="list"), pytest.param("{}", id="no-rows"),
    pytest.param('{"rows": {"1": -1}}', id="negative"), pytest.param('{"rows": {"x": 1}}', id="no-number"),
])
def test_damaged_curves_are_one_line(text, tmp_path):
    path = tmp_path / "curve.json"
    path.write_text(text, encoding="utf-8")
    refused(run("--curve", path), str(path), "mlx_dspark.profile")


def test_a_curve_of_one_row_cannot_be_used(tmp_path):
    path = tmp_path / "curve.json"
    path.write_text('{"rows": {"1": 1.0}}', encoding="utf-8")
    refused(run("--curve", path), "one row only")


# --- made-up content


def test_json_is_one_list_of_these_keys():
    found = entries("--curve", "m4max-30b-4bit", "--curve", "m3ultra-mlp-4bit", "--rounds", 60,
                    "--draft-share", "0.12,0.25", "--policy", "plain,fixed,auto")
    assert all(list(entry) == KEYS for entry in found)
    cases = [tuple(entry[key] for key in KEYS[:4]) for entry in found]
    assert len(set(cases)) == len(cases) == 2 * 2 * 2 * 3
    assert all(entry["speedup_over_plain"] == 1 for entry in found if entry["policy"] == "plain")


def test_defaults_cover_every_published_curve_both_contents_and_all_policies():
    found = entries("--rounds", 8)
    assert {entry["curve"] for entry in found} == set(published_curves())
    assert {entry["content"] for entry in found} == {"steady", "swinging"}
    assert {entry["policy"] for entry in found} == {"plain", "fixed", "paper", "lagged", "rate", "lookahead", "auto"}


def test_the_seed_decides_the_content():
    args = ("--curve", "m4max-30b-4bit", "--rounds", 100, "--content", "swinging")
    assert entries(*args) == entries(*args) != entries(*args, "--seed", 1)


def test_fixed_is_the_best_width_and_the_table_names_it():
    curve = with_draft(published_curves()["m4max-30b-4bit"], 0.12, 7)
    content = made_up("steady", 500, 0)
    width, rate = best_fixed(content, curve)
    assert simulate("fixed", curve, content) == (pytest.approx(rate * curve.rows[1]), width)
    text = output("--curve", "m4max-30b-4bit", "--rounds", 500, "--content", "steady", "--policy", "fixed")
    assert f"{rate * curve.rows[1]:.2f} ({width})" in text


def test_fixed_drafts_even_where_that_loses():
    speed, width = simulate("fixed", CostCurve({1: 1.0, 2: 5.0}), made_up("steady", 100, 0))
    assert width == 1 and speed < 0.5


def test_widths_beyond_a_curve_are_not_priced():
    args = ("--curve", "gb10-4b-4bit-mlx-cuda", "--rounds", 20, "--content", "steady", "--policy", "fixed:3,fixed:4")
    assert [entry["policy"] for entry in entries(*args)] == ["fixed:3"]
    assert output(*args[:-1], "fixed:3,fixed:4", "--curve", "m4max-30b-4bit").splitlines()[4].endswith(" -")


def test_the_table_says_what_its_numbers_are():
    text = output("--curve", "m4max-30b-4bit", "--rounds", 30, "--content", "steady")
    first, _, what, head, row = text.splitlines()[:5]
    assert "Simulated" in first and "published by others" in first and "no measurements" in first
    assert what == "steady, 30 rounds; a proposal costs 0.12 of a plain step"
    assert head.split() == ["curve", "plain", "fixed", "paper", "lagged", "rate", "lookahead", "auto"]
    assert row.startswith("m4max-30b-4bit") and len(row) == len(head)


# --- recorded rounds


@pytest.mark.parametrize(("drafts", "accepted", "tokens", "known"), [
    pytest.param(4, 2, 3, 4, id="rejected"), pytest.param(4, 4, 5, 4, id="all-accepted"),
    pytest.param(4, 0, 1, 4, id="first-rejected"), pytest.param(4, 2, 2, 2, id="stop-inside-the-accepted-run"),
    pytest.param(4, 4, 4, 4, id="stop-on-the-last-draft"), pytest.param(4, 0, 0, 0, id="stop-string-at-once"),
    pytest.param(0, 0, 1, 0, id="nothing-verified"),
])
def test_which_slots_of_a_round_are_known(drafts, accepted, tokens, known):
    assert judged(drafts, accepted, tokens) == known


SURE, NEVER = [1.0] * 4, [0.0] * 4


@pytest.mark.parametrize(("landed", "passes"), [
    pytest.param(recorded(2, confidences=SURE), [1, 1, 0, 0], id="known-failure-stays-although-it-was-sure"),
    pytest.param(recorded(4, confidences=NEVER), [1, 1, 1, 1], id="known-success-stays"),
    pytest.param(recorded(2, 2, SURE, proposed=4), [1, 1, 1, 1], id="not-verified-drawn-likely"),
    pytest.param(recorded(2, 2, NEVER, proposed=4), [1, 1, 0, 0], id="not-verified-drawn-unlikely"),
    pytest.param(recorded(1, 2, SURE, proposed=4), [1, 0, 1, 1], id="behind-a-failure-nothing-matters"),
    pytest.param(recorded(2, 4, SURE, tokens=2), [1, 1, 1, 1], id="cut-by-a-stop-drawn-likely"),
    pytest.param(recorded(0, 0, NEVER, proposed=4), [0, 0, 0, 0], id="drafted-but-not-verified"),
])
def test_outcomes_of_a_recorded_round(landed, passes, record):
    assert read_recording(record(landed)).content(seed=0).passes.astype(int).tolist() == [passes]


def test_unknown_outcomes_follow_calibrated_confidences_and_the_seed(record):
    recording = read_recording(record(*[recorded(0, 0, [0.9] * 4, proposed=4)] * 500))
    drawn = recording.content(seed=3)
    assert drawn.passes.mean() == pytest.approx(0.9, abs=0.03)
    assert np.array_equal(drawn.passes, recording.content(seed=3).passes)
    assert not np.array_equal(drawn.passes, recording.content(seed=4).passes)
    flat = recording.content(3, calibrator([1e6] * 4))
    assert flat.passes.mean() == pytest.approx(0.5, abs=0.05)
    assert flat.confidences.tolist() == drawn.confidences.tolist()  # policies calibrate for themselves


def test_a_replay_of_recorded_rounds_counts_their_tokens(record):
    path = record(recorded(4), recorded(0), recorded(2), recorded(1))
    found = entries(path, "--curve", "m3max-mlp-4bit", "--draft-share", 0, "--policy", "fixed:1,fixed:3")
    assert {entry["content"] for entry in found} == {"rounds.jsonl"}
    assert [entry["speedup_over_plain"] for entry in found] == [7 / 4, round(10 / 4 / 1.28, 4)]


def test_rounds_narrower_than_the_widest_proposal_are_left_out(record):
    recording = read_recording(record(recorded(4), recorded(1, 2), recorded(0, 0), recorded(2)))
    assert (recording.accepted, recording.left_out) == ((4, 2), 1)


def test_temperatures_reach_the_policies(record, tmp_path):
    path = record(*[recorded(4, confidences=[0.95] * 4), recorded(0, confidences=[0.95] * 4)] * 20)
    (tmp_path / "t.json").write_text("[1000, 1000, 1000, 1000]", encoding="utf-8")
    args = (path, "--curve", "m1pro-13b-q8-llamacpp", "--policy", "paper", "--draft-share", 0)
    raw, calibrated = entries(*args), entries(*args, "--calibration", tmp_path / "t.json")
    assert raw[0]["speedup_over_plain"] < calibrated[0]["speedup_over_plain"] == 1  # 0.5 does not pay for 0.86


@pytest.mark.parametrize("line", [
    pytest.param("{", id="truncated"), pytest.param("[]", id="list"), pytest.param("7", id="number"),
    pytest.param('{"index": 1}', id="no-round"),
    pytest.param(json.dumps(recorded(5)), id="more-accepted-than-verified"),
    pytest.param(json.dumps(recorded(1, 4, proposed=2)), id="more-verified-than-proposed"),
    pytest.param(json.dumps(recorded(1, confidences=[0.5, 0.5, 0.5, 1.5])), id="confidence-above-1"),
    pytest.param(json.dumps(recorded(1, confidences=[0.5, 0.5, 0.5, float("nan")])), id="confidence-nan"),
])
def test_damaged_records_name_the_line(line, record):
    path = record(recorded(1))
    path.write_text(path.read_text() + line, encoding="utf-8")
    refused(run(path), f"{path}, line 5", "record it again")


@pytest.mark.parametrize("rounds", [
    pytest.param([], id="empty"), pytest.param([PREFILL], id="plain"),
    pytest.param([{**recorded(2), "confidences": None}], id="no-confidences"),
])
def test_a_record_without_confidences_cannot_be_replayed(rounds, record):
    with pytest.raises(FormatError, match="holds no round with confidences.*--policy fixed"):
        read_recording(record(*rounds))


# --- the command


@pytest.mark.parametrize(("args", "code", "fragments"), [
    pytest.param(["--curve", "m9"], 2, ["'m9'", "m4max-30b-4bit"], id="unknown-curve"),
    pytest.param(["--content", "calm"], 2, ["'calm'", "steady and swinging"], id="unknown-content"),
    pytest.param(["--draft-share", "-1"], 2, ["'-1'", "0.12,0.25"], id="negative-share"),
    pytest.param(["--draft-share", "nan"], 2, ["'nan'"], id="nan-share"),
    pytest.param(["--draft-share", "a"], 2, ["'a'"], id="share-is-a-word"),
    pytest.param(["--policy", "fast"], 1, ["'fast'", "lookahead"], id="unknown-policy"),
    pytest.param(["--policy", "fixed:8"], 1, ["'fixed:8'", "1 to 7"], id="too-wide"),
    pytest.param(["--curve", "none.json"], 1, ["none.json"], id="no-such-curve-file"),
    pytest.param(["none.jsonl"], 2, ["none.jsonl"], id="no-such-record"),
    pytest.param(["--plot", "picture.pdf"], 1, ["picture.pdf", ".svg"], id="ending-of-the-plot"),
])
def test_errors(args, code, fragments):
    refused(run(*args), *fragments, code=code)


def test_a_plot_without_matplotlib_is_refused_before_any_work(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused(run("--plot", tmp_path / "a.png", "--rounds", 10**9), "pip install matplotlib")


def test_a_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib", reason="NOT TESTED, matplotlib is missing: pip install matplotlib")
    output("--curve", "m4max-30b-4bit", "--rounds", 20, "--plot", tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert ">simulated: swinging, draft 0.12 of a plain step<" in text and ">m4max-30b-4bit<" in text


def test_it_runs_without_mlx():
    code = ("import sys; sys.modules['mlx'] = None\nfrom mlx_dspark.simulate import main\n"
            "sys.argv = ['x', '--rounds', '9', '--curve', 'm4max-30b-4bit', '--policy', 'auto', '--json']\nmain()")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and len(json.loads(done.stdout)) == 2


def test_content_of_one_slot_can_be_replayed():
    content = Content(np.full((50, 1), 0.9), np.ones((50, 1), dtype=bool))
    speed, _ = simulate("auto", CostCurve({1: 1.0, 2: 1.0}), content)
    assert speed == 2


# --- many requests

LOAD_KEYS = ["curve", "content", "draft_share", "requests", "policy", "speedup_over_plain", "rows_per_request", "tau",
             "parked"]


def test_loads_as_json():
    found = entries("--curve", "m4pro-27b-4bit", "--requests", "4,1", "--rounds", 30, "--draft-share", "0.05,0.12")
    assert all(list(entry) == LOAD_KEYS for entry in found)
    cases = {(entry["content"], entry["draft_share"], entry["requests"], entry["policy"]) for entry in found}
    assert len(cases) == len(found) == 2 * 2 * 2 * 6
    for entry in found:
        if entry["policy"] == "plain":
            assert [entry[key] for key in LOAD_KEYS[5:]] == [1, 1, 1, 1]
        assert 1 <= entry["tau"] <= entry["rows_per_request"] <= 8 and 0 <= entry["parked"] <= 1


def test_a_fixed_width_does_what_its_text_promises():
    """The same text under plain decoding and in blocks, which begin where the last one has ended."""
    curve = with_draft(published_curves()["m4max-30b-4bit"], 0.12, 7)
    (entry,) = entries("--curve", "m4max-30b-4bit", "--requests", 1, "--rounds", 200, "--content", "steady",
                       "--policy", "fixed:4")
    (content,), tokens, place = made_up_load("steady", 1, 200, 0), 0.0, 0
    for _ in range(200):
        tokens += 1 + np.cumprod(content.confidences[place % 200])[:4].sum()
        place += 1 + int(np.cumprod(content.passes[place % 200])[:4].sum())
    seconds = 200 * (curve.verify(5) + curve.drafting(7))
    assert entry["speedup_over_plain"] == pytest.approx(tokens / seconds * curve.verify(1), rel=1e-3)
    assert entry["tau"] == pytest.approx(tokens / 200, rel=1e-3)


def test_the_table_of_loads_says_what_its_numbers_are():
    text = output("--curve", "gb10-4b-4bit-mlx-cuda", "--requests", "1,8", "--rounds", 20, "--content", "steady",
                  "--policy", "plain,fixed:3,fixed:4,auto")
    assert "Simulated" in text and "no measurements" in text
    head, plain, fixed, auto = text.split("\n\n")[1].splitlines()[1:]
    assert head.split() == ["requests", "1", "8"] and plain.split() == ["plain", "1.00", "(1.0)", "1.00", "(1.0)"]
    assert fixed.split()[2] == "(4.0)" and auto.startswith("auto")  # fixed:4 is wider than the curve
    assert len({len(line) for line in (head, plain, fixed, auto)}) == 1


def test_a_stored_grid_is_priced_by_its_own_layouts(tmp_path):
    grid = CostGrid({(1, n): 1.0 + n for n in range(1, 9)} | {(2, n): 2.0 + n for n in range(2, 17)},
                    {(1, n): 1.0 + n for n in range(1, 9)} | {(2, n): 4.0 for n in range(1, 9)},
                    draft={(1, 7): 0.5, (2, 7): 0.5})
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**grid.to_dict(), "key": {}}), encoding="utf-8")
    args = ("--requests", 2, "--rounds", 30, "--content", "steady", "--policy", "fixed:7", "--curve", path)
    (entry,) = entries(*args)
    assert (entry["curve"], entry["draft_share"]) == ("mine", 0.25)
    # Eight rows each cost what one costs: 4 seconds, and half a second to draft.
    assert entry["speedup_over_plain"] == pytest.approx(entry["tau"] * 4 / 4.5, abs=1e-3)
    assert {found["curve"] for found in entries(*args, "--curve", "m4max-30b-4bit")} == {"mine", "m4max-30b-4bit"}
    path.write_text(json.dumps({"packed": {"1": {"2": 1.0}}}), encoding="utf-8")
    refused(run(*args), str(path), "--requests", "plain round")


def test_loads_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="NOT TESTED, matplotlib is missing: pip install matplotlib")
    output("--curve", "m4max-30b-4bit", "--requests", "1,2,4", "--rounds", 10, "--content", "steady", "--plot",
           tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert ">m4max-30b-4bit, steady, draft 0.12: rows per request<" in text and ">requests at once (simulated)<" in text


@pytest.mark.parametrize(("args", "code", "fragments"), [
    pytest.param(["--requests", "0"], 2, ["'0'", "1,4,16"], id="none"),
    pytest.param(["--requests", "1,x"], 2, ["'1,x'"], id="word"),
    pytest.param(["--requests", "999"], 2, ["'999'", "256"], id="too-many"),
    pytest.param(["--requests", "2", "--policy", "rate"], 1, ["'rate'", "several requests"], id="one-request-policy"),
    pytest.param(["--requests", "2", "--policy", "fixed:9"], 1, ["'fixed:9'", "1 to 7"], id="too-wide"),
    pytest.param(["--requests", "2", __file__], 2, ["made-up content", "RECORD"], id="records"),
])
def test_errors_of_loads(args, code, fragments):
    refused(run(*args), *fragments, code=code)
