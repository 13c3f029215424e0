"""`mlx_dspark.calibrate`: what is collected, which slots count, what the file holds, and that it helps."""

import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner, Result
from helpers import embedded_pair, golden_pair, pair_of, prompt_of, random_tokens, refused, tiny_model

from mlx_dspark.calibrate import Calibration, Collected, _report, collect, collect_at, command, fit, labelled
from mlx_dspark.errors import FormatError
from mlx_dspark.load import encode_prompt
from mlx_dspark.record import read_recording
from mlx_dspark.samples import read_prompts
from mlx_dspark.schedule.calibration import Rounds, SlotMetrics, fit_temperatures, metrics
from mlx_dspark.store import pair_key, read_calibration
from mlx_dspark.structs import Round, Schedule

GAMMA = 4


def run(*args, env: dict | None = None) -> Result:
    clean = {"MLX_DSPARK_MODEL": None, "MLX_DSPARK_DRAFT": None, "MLX_DSPARK_DEBUG": None}
    return CliRunner(env={**clean, **(env or {})}).invoke(command, [str(arg) for arg in args])


def landed(confidences: list[float], accepted: int, tokens: int | None = None) -> Round:
    """A round at full width; tokens: fewer than accepted + 1 when a stop cut it."""
    drafts = len(confidences)
    return Round(1, 5, drafts + 1, drafts, (9,) * drafts, accepted, (9,) * (accepted + 1 if tokens is None else tokens),
                 Schedule(drafts, "fixed", "fixed width"), {}, confidences=tuple(confidences))


def made_up(count: int, sharper: float, seed: int = 0) -> Rounds:
    """Rounds whose true acceptance is sigmoid(logit), told with logits that are too sharp by a factor."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.8, 1.2, (count, GAMMA))
    passes = rng.random((count, GAMMA)) < 1 / (1 + np.exp(-logits))
    accepted = np.cumprod(passes, axis=1).sum(axis=1)
    return Rounds(logits * sharper, accepted, np.full(count, GAMMA))


# --- which slots count


@pytest.mark.parametrize(("confidences", "accepted", "tokens", "labels"), [
    pytest.param([0.5] * 4, 2, 3, [1, 1, 0, 0], id="rejected"),
    pytest.param([0.5] * 4, 4, 5, [1, 1, 1, 1], id="all-accepted"),
    pytest.param([0.5] * 4, 0, 1, [0, 0, 0, 0], id="first-rejected"),
    pytest.param([0.5] * 2, 2, 3, [1, 1, None, None], id="block-cut-by-max-tokens"),
    pytest.param([0.5] * 2, 1, 2, [1, 0, None, None], id="block-cut-and-rejected"),
    pytest.param([0.5] * 4, 2, 2, [1, 1, None, None], id="stop-inside-the-accepted-run"),
    pytest.param([0.5] * 4, 2, 3, [1, 1, 0, 0], id="stop-is-the-correction"),
    pytest.param([0.5] * 4, 4, 4, [1, 1, 1, 1], id="stop-is-the-last-draft"),
])
def test_only_judged_slots_have_a_label(confidences, accepted, tokens, labels):
    rounds = labelled(Collected((landed(confidences, accepted, tokens),), (0,)), GAMMA)
    found = []
    for slot in range(GAMMA):
        there, label = rounds.at(slot)
        found.append(int(label[0]) if there[0] else None)
    assert found == labels


def test_logits_give_the_confidences_back():
    confidences = [0.9, 0.125, 1.0, 0.0]
    rounds = labelled(Collected((landed(confidences, 1),), (0,)), GAMMA)
    assert (1 / (1 + np.exp(-rounds.logits[0]))).tolist() == pytest.approx(confidences, abs=1e-7)
    assert np.isfinite(rounds.logits).all()


# --- fitting


def test_sharp_confidences_are_softened_and_the_held_out_error_falls():
    rounds = made_up(6000, sharper=1.6)
    result = fit(rounds, np.arange(6000))
    assert result.temperatures == tuple(fit_temperatures(rounds))
    assert result.temperatures[0] == pytest.approx(1.6, rel=0.2)
    for slot in range(3):
        assert result.held_out[slot].ece < 0.6 * result.before[slot].ece
        assert result.after[slot].ece < 0.6 * result.before[slot].ece


def test_held_out_errors_use_the_other_half_of_the_prompts():
    """Even prompts are too sharp, odd ones honest: temperatures of the other half must do harm."""
    sharp, honest = made_up(3000, 3.0, seed=1), made_up(3000, 1.0, seed=2)
    both = Rounds(*(np.concatenate(pair) for pair in zip(
        (sharp.logits, sharp.accepted, sharp.lengths), (honest.logits, honest.accepted, honest.lengths), strict=True)))
    result = fit(both, [0] * 3000 + [1] * 3000)
    expected = np.concatenate([sharp.logits / fit_temperatures(honest), honest.logits / fit_temperatures(sharp)])
    assert [slot.ece for slot in result.held_out] == \
        [slot.ece for slot in metrics(Rounds(expected, both.accepted, both.lengths))]
    assert result.held_out[0].ece > 2 * result.after[0].ece


@pytest.mark.parametrize("prompts", [[0] * 50, [3] * 50, [0, 2] * 25], ids=["one", "one-odd", "even-only"])
def test_without_two_halves_nothing_is_held_out(prompts):
    assert fit(made_up(50, 1.0), prompts).held_out is None


@pytest.mark.parametrize(("held_out", "said"), [(0.3, True), (0.2, True), (0.1, False)])
def test_the_table_says_when_temperatures_do_not_help(held_out, said):
    def slots(error: float) -> list[SlotMetrics]:
        return [SlotMetrics(0, 9, error, 0.6, 0.2, 0.5, 0.5, ())]

    result = Calibration((1.5,), slots(0.2), slots(0.0), slots(held_out))
    text = _report(result, Collected((landed([0.5], 1),), (0,)), (1.0,), Path("file.json"))
    assert ("do not help: collect more rounds" in text) == said


# --- collecting


def test_rounds_are_at_full_width_and_carry_confidences():
    pair = golden_pair()
    collected = collect(pair, [prompt_of("golden", 12)], 10, max_tokens=40)
    gamma = pair.draft.gamma
    assert len(collected.rounds) == 10 and set(collected.prompts) == {0}
    for found in collected.rounds[:3]:
        assert found.proposed == len(found.drafts) == len(found.confidences) == gamma
    assert 1 <= collected.tau <= gamma + 1


def test_sampled_prompts_are_gone_through_again_with_other_seeds():
    collected = collect(golden_pair(), [prompt_of("golden", 8), prompt_of("golden", 9)], 12, max_tokens=4, seed=1)
    assert len(collected.rounds) == 12 and collected.prompts.count(0) > 2 and collected.prompts.count(1) > 2
    firsts = [found.drafts for found, before in zip(collected.rounds, (None, *collected.prompts))
              if found.index == 1 and before in (None, 1)]
    assert len(set(firsts)) > 1


def test_the_seed_decides():
    first, again, other = (collect(golden_pair(), [prompt_of("golden", 8)], 6, max_tokens=20, seed=seed)
                           for seed in (5, 5, 6))
    assert [r.tokens for r in first.rounds] == [r.tokens for r in again.rounds] != [r.tokens for r in other.rounds]


def test_greedy_prompts_are_read_once():
    collected = collect(golden_pair(), [prompt_of("golden", 8)], 1000, temperature=0, max_tokens=10)
    assert sum(len(found.tokens) for found in collected.rounds) == 9  # the tenth is that of the prefill


def test_every_temperature_gets_its_share():
    prompts = [prompt_of("golden", 8), prompt_of("golden", 9)]
    both = collect_at(golden_pair(), prompts, 9, (0, 1.0), max_tokens=20, seed=5)
    greedy, sampled = (collect(golden_pair(), prompts, 5, t, max_tokens=20, seed=5) for t in (0, 1.0))
    assert [r.tokens for r in both.rounds] == [r.tokens for r in (*greedy.rounds, *sampled.rounds)]
    assert both.prompts == greedy.prompts + sampled.prompts


def test_prompts_that_fill_the_context_are_passed_over():
    pair = golden_pair()
    context = pair.target.context
    longest = random_tokens(context, vocab=50)
    with pytest.raises(ValueError, match="no prompt leaves room"):
        collect(pair, [longest], 5)
    assert set(collect(pair, [longest, prompt_of("golden", 8)], 3, max_tokens=20).prompts) == {1}


@pytest.mark.parametrize(("pair", "remedy"), [
    pytest.param(lambda: golden_pair("qwen3_dflash"), "fixed:N", id="no-confidence-head"),
    pytest.param(lambda: pair_of(tiny_model("qwen3")), "--draft", id="no-draft"),
])
def test_what_has_no_confidences_is_refused(pair, remedy):
    with pytest.raises(ValueError, match=remedy):
        collect(pair(), [[1, 2, 3]], 5)


# --- the command


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The small pair calibrated on 40 rounds: (stdout, file, record)."""
    folder = tmp_path_factory.mktemp("calibration")
    done = run("--rounds", 40, "-m", 64, "--record", folder / "rounds.jsonl", env={"MLX_DSPARK_CACHE": str(folder)})
    assert done.exit_code == 0, done.stderr
    (path,) = (folder / "temperatures").iterdir()
    return done.stdout, path, folder / "rounds.jsonl"


def test_the_file_holds_temperatures_and_where_they_come_from(stored):
    _, path, _ = stored
    document = json.loads(path.read_text(encoding="utf-8"))
    facts = document["provenance"]
    assert list(document) == ["temperatures", "provenance"]
    assert read_calibration(path, embedded_pair().draft.gamma) == document["temperatures"]
    key = pair_key(embedded_pair())
    assert (facts["target"], facts["draft"]) == (key["target"], key["draft"])
    assert facts["pair"]["target"] and facts["data"] == "heldout.jsonl" and facts["machine"]["mlx"] == mx.__version__
    assert (facts["rounds"], facts["temperature"], facts["count"][0]) == (40, 1.0, 40)
    for name in ("before", "after", "held_out"):
        assert len(facts["ece"][name]) == 7 and all(0 <= error <= 1 for error in facts["ece"][name])
    assert sum(facts["ece"]["after"]) < sum(facts["ece"]["before"])


def test_the_table_has_a_line_per_slot(stored):
    out, path, _ = stored
    lines = out.splitlines()
    assert lines[0].startswith("40 rounds of ") and lines[-1] == f"stored in {path}"
    assert lines[2].split() == ["slot", "count", "ECE", "fitted", "held", "out", "AUC", "temperature"]
    assert [line.split()[0] for line in lines[3:11]] == [*"1234567", "mean"]
    temperatures = json.loads(path.read_text())["temperatures"]
    assert [line.split()[-1] for line in lines[3:10]] == [f"{t:.3f}" for t in temperatures]


def test_the_record_can_be_replayed(stored):
    _, _, record = stored
    recording = read_recording(record)
    assert len(recording.accepted) + recording.left_out == 40
    assert {len(row) for row in recording.confidences} == {7}


@pytest.fixture
def loaded(monkeypatch):
    """The command with the small pair in memory."""
    monkeypatch.setattr("mlx_dspark.calibrate.open_pair", lambda notes, **fields: embedded_pair())


def test_data_in_any_spelling(tmp_path):
    """A file of the target's own answers serves as one of prompts."""
    path, asked, pair = tmp_path / "p.jsonl", {"role": "user", "content": "import os"}, embedded_pair()
    lines = [{"prompt": "import os"}, {"turns": ["import os", "import re"]}, {"messages": [asked]},
             {"conversations": [asked, {"role": "assistant", "content": "x"}]}, {"ids": [5, 6]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_prompts(path, pair) == [*[encode_prompt(pair.tokenizer, "import os")] * 4, [5, 6]]


@pytest.mark.parametrize(("line", "fragment"), [('{"ids": [4096]}', "4096"), ('{"text": "a"}', "not an object")])
def test_a_line_that_is_no_prompt_is_named(loaded, tmp_path, line, fragment):
    path = tmp_path / "p.jsonl"
    path.write_text('{"ids": [1]}\n' + line)
    refused(run("--data", path, "--output", tmp_path / "t.json"), f"{path}, line 2", fragment)


@pytest.fixture
def short(tmp_path):
    """Two prompts that are read at once."""
    (tmp_path / "short.jsonl").write_text('{"ids": [5, 6, 7]}\n{"ids": [8, 9]}\n')
    return tmp_path / "short.jsonl"


def test_list_only_prints_the_list_and_nothing_else(loaded, short, tmp_path):
    done = run("--data", short, "--rounds", 6, "-m", 8, "--list-only", "--output", tmp_path / "deep" / "t.json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == read_calibration(tmp_path / "deep" / "t.json")


def test_a_reliability_diagram_is_drawn(loaded, short, tmp_path):
    pytest.importorskip("matplotlib", reason="NOT TESTED, matplotlib is missing: pip install matplotlib")
    done = run("--data", short, "--rounds", 6, "-m", 8, "--output", tmp_path / "t.json", "--plot", tmp_path / "r.svg")
    assert done.exit_code == 0, done.stderr
    assert ">with temperatures<" in (tmp_path / "r.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(("args", "code", "fragment"), [
    pytest.param(["--model", "somewhere"], 2, "--data FILE", id="other-model-without-data"),
    pytest.param(["--rounds", "0"], 2, "--rounds", id="no-rounds"),
    pytest.param(["--plot", "a.pdf"], 1, ".svg", id="ending-of-the-plot"),
    pytest.param(["--temp", "nan"], 1, "temperature is nan", id="nan-temperature"),
    pytest.param(["--record", "none/there.jsonl"], 1, "none/there.jsonl", id="record-cannot-be-written"),
])
def test_errors(args, code, fragment):
    refused(run(*args), fragment, code=code)


# --- the file


@pytest.mark.parametrize("text", ["[1.5, 2, 0.25]", '{"temperatures": [1.5, 2, 0.25], "provenance": {"rounds": 9}}'],
                         ids=["list", "object"])
def test_both_forms_are_read(text, tmp_path):
    path = tmp_path / "t.json"
    path.write_text(text, encoding="utf-8")
    values = read_calibration(path, 3)
    assert values == [1.5, 2.0, 0.25] and all(type(value) is float for value in values)


@pytest.mark.parametrize(("text", "fragment"), [
    pytest.param("[1, 2", "no JSON", id="truncated"),
    pytest.param(b"\xff\xfe", "no JSON", id="binary"),
    pytest.param("[]", "no list", id="empty"),
    pytest.param("{}", "no list", id="object-without-a-list"),
    pytest.param('{"temperatures": 1}', "no list", id="number-for-a-list"),
    pytest.param("1.5", "no list", id="bare-number"),
    pytest.param("[1, 2]", "2 temperatures and the draft has 3 slots", id="too-short"),
    pytest.param("[1, 2, 3, 4]", "4 temperatures and the draft has 3 slots", id="too-long"),
    pytest.param("[1, 0, 1]", "slot 2 is 0", id="zero"),
    pytest.param("[1, 1, -0.5]", "slot 3 is -0.5", id="negative"),
    pytest.param("[NaN, 1, 1]", "slot 1 is nan", id="nan"),
    pytest.param("[1, Infinity, 1]", "slot 2 is inf", id="infinite"),
    pytest.param('[1, "1", 1]', "slot 2 is '1'", id="text"),
    pytest.param("[true, 1, 1]", "slot 1 is True", id="boolean"),
    pytest.param("[1, null, 1]", "slot 2 is None", id="null"),
])
def test_damaged_files_name_place_and_remedy(text, fragment, tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FormatError) as caught:
        read_calibration(path, 3)
    message = str(caught.value)
    assert str(path) in message and fragment in message and "mlx_dspark.calibrate" in message and "\n" not in message


def test_any_length_is_right_while_the_draft_is_unknown(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("[1, 2]", encoding="utf-8")
    assert read_calibration(path) == [1.0, 2.0] and not math.isnan(sum(read_calibration(path)))
