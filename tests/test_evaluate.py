"""`mlx_dspark.evaluate`: DeepSeek's numbers on its own fixtures, both protocols, going on after a stop, the report."""

import dataclasses
import json
from functools import cache

import numpy as np
import pytest
from click.testing import CliRunner, Result
from helpers import GOLDEN, embedded_pair, golden_draft, golden_target, pair_of, plain, refused, tiny_model, tokens_of
from mlx_lm.utils import load_model

from mlx_dspark import evaluate as module
from mlx_dspark.acceptance import acceptance
from mlx_dspark.evaluate import Evaluation, Measured, command, evaluate
from mlx_dspark.load import Pair, read_draft
from mlx_dspark.prompts import Dataset, Row
from mlx_dspark.record import read_recording
from mlx_dspark.registry import TABLE_1, TARGETS
from mlx_dspark.report import to_document, to_text
from mlx_dspark.samples import PRODUCT, Sample, Samples, Settings, encode, room_for
from mlx_dspark.schedule.calibration import Rounds, metrics, summarise
from mlx_dspark.target import Target

# One of each kind: that every golden draft decodes like the reference's is `test_golden`'s.
DRAFTS = ("qwen3_dspark_vanilla", "gemma4_dspark_rnn", "qwen3_dflash", "gemma4_eagle3")
GREEDY = Settings(temperature=0.0, max_tokens=48)
SAMPLED = Settings(max_tokens=12)


class Words:
    """A tokenizer without stop tokens whose chat template tells what it was asked."""

    eos_token_ids, has_chat_template, bos_token = frozenset(), True, None

    def __init__(self):
        self.asked = []

    def apply_chat_template(self, messages, **options):
        self.asked.append((messages, options))
        return [7, 8, 9]


@cache
def reference(name):
    return json.loads((GOLDEN / name / "decode.json").read_text(encoding="utf-8"))


@cache
def gemma_target():
    model, config = load_model(GOLDEN / "gemma4_target")
    return Target(model, config, "golden")


def golden(name="qwen3_dspark_vanilla", tokenizer=None) -> Pair:
    if name.startswith("gemma4"):
        return Pair(gemma_target(), tokenizer or Words(), read_draft(GOLDEN / name))
    return Pair(golden_target(), tokenizer or Words(), golden_draft(name))


def prompts_of(name="qwen3_dspark_vanilla", data="fixture"):
    return Dataset(data, tuple(Row(key, (), ids=tuple(ids)) for key, ids in reference(name)["prompts"].items()))


def decodes(name, threshold):
    """The reference's decodes of all four prompts with 48 tokens and no stop token."""
    return [run["result"] for run in reference(name)["decodes"]
            if (run["confidence_threshold"], run["temperature"], run["max_new_tokens"], run["stop_token_ids"])
            == (threshold, 0, 48, None)]


# --- DeepSeek's own numbers


THRESHOLDS = {"qwen3_dspark_vanilla": (0.5, 0.8), "gemma4_dspark_rnn": (0.5,)}


@cache
def evaluated(name):
    """All prompts of a golden draft, at full width and under its thresholds, if any."""
    return evaluate(golden(name), [prompts_of(name)], GREEDY, THRESHOLDS.get(name, ()))


@pytest.mark.parametrize("name", DRAFTS)
def test_the_aggregate_equals_the_reference_s(name):
    found = evaluated(name)
    counted = acceptance(found.data[0].rounds(), found.gamma)
    known = reference(name)["metrics_over_threshold0_decodes"]
    summary, row = known["summary"], known["row"]
    assert (counted.rounds, counted.committed) == (summary["proposal_count"], summary["acceptance_length_sum"])
    assert list(counted.proposed_at) == summary["proposals_at_pos"]
    assert list(counted.accepted_at) == summary["accepted_at_pos"]
    assert counted.acceptance_length == pytest.approx(row["acceptance_length"], abs=1e-7)
    assert counted.draft_tokens_per_proposal == pytest.approx(row["draft_tokens_per_proposal"], abs=1e-7)
    assert counted.verify_rate == pytest.approx(row["verify_rate"], abs=1e-7)
    assert list(counted.survival) == pytest.approx(row["accept_rates_by_position"], abs=1e-7)


@pytest.mark.parametrize("name, thresholds", THRESHOLDS.items())
def test_thresholds_equal_the_reference_s(name, thresholds):
    found = evaluated(name)
    for threshold in thresholds:
        counted, runs = acceptance(found.data[0].rounds(threshold), found.gamma), decodes(name, threshold)
        assert counted.rounds == sum(run["verify_count"] for run in runs)
        assert counted.committed == sum(sum(run["acceptance_lengths"]) for run in runs)
        assert sum(counted.proposed_at) == sum(sum(run["proposal_lengths"]) for run in runs)


@pytest.mark.parametrize("count", [1, 2, 13])
def test_the_round_of_the_last_token_counts_whole(count):
    """The reference runs a round more when exactly the wanted tokens are there, and trims no length."""
    prompts = Dataset("A", prompts_of().rows[:1])
    found = evaluate(golden(), [prompts], dataclasses.replace(GREEDY, max_tokens=count))
    (run,) = [run["result"] for run in reference("qwen3_dspark_vanilla")["decodes"] if run["max_new_tokens"] == count]
    lengths = [len(landed.tokens) for landed in found.data[0].rounds() if landed.rows]
    assert lengths == run["acceptance_lengths"]


@pytest.mark.parametrize("stops", [[31], [105, 2], [2, 19]], ids=["first-token", "accepted-draft", "correction"])
def test_stop_tokens_end_a_sample_like_the_reference_s(stops):
    tokenizer = Words()
    tokenizer.eos_token_ids = frozenset(stops)
    found = evaluate(golden(tokenizer=tokenizer), [Dataset("A", prompts_of().rows[:1])], GREEDY)
    (run,) = [run["result"] for run in reference("qwen3_dspark_vanilla")["decodes"] if run["stop_token_ids"] == stops]
    counted = acceptance(found.data[0].rounds(), found.gamma)
    assert counted.rounds == run["verify_count"]
    assert (counted.committed, sum(counted.proposed_at)) == (
        sum(run["acceptance_lengths"]), sum(run["proposal_lengths"]))


# --- what is decoded


def test_greedy_samples_under_a_threshold_are_read_off_only_where_that_is_exact(monkeypatch):
    read_off = evaluate(golden(), [prompts_of()], GREEDY, (0.2,)).data[0]
    monkeypatch.setattr(module, "cut_at", lambda rounds, threshold: None)
    decoded = evaluate(golden(), [prompts_of()], GREEDY, (0.2,)).data[0]
    assert 0 < read_off.replayed[0.2] < 4 and decoded.replayed[0.2] == 0
    assert [(r.tokens, r.drafts, r.accepted, r.rows) for r in read_off.rounds(0.2)] == \
        [(r.tokens, r.drafts, r.accepted, r.rows) for r in decoded.rounds(0.2)]


def test_a_sample_draws_with_the_seed_plus_its_number():
    one, two = (evaluate(golden(), [prompts_of()], dataclasses.replace(SAMPLED, seed=seed)).data[0] for seed in (5, 6))
    again = evaluate(golden(), [prompts_of()], dataclasses.replace(SAMPLED, seed=5)).data[0]
    assert [tokens_of(run) for run in one.runs[0].values()] == [tokens_of(run) for run in again.runs[0].values()]
    assert tokens_of(one.rounds()) != tokens_of(two.rounds())
    shifted = Dataset("fixture", (prompts_of().rows[0], prompts_of().rows[0]))
    first, second = evaluate(golden(), [shifted], dataclasses.replace(SAMPLED, seed=5)).data[0].runs[0].values()
    assert tokens_of(first) == tokens_of(one.runs[0][0])  # the same prompt with the same seed
    assert tokens_of(second) == tokens_of(evaluate(golden(), [Dataset("x", shifted.rows[:1])],
                                                   dataclasses.replace(SAMPLED, seed=6)).data[0].rounds())


def test_the_paper_s_prompts_are_one_user_message_without_thinking():
    tokenizer = Words()
    row = Row("here", ("first", "second"), system="not used")
    assert encode(golden(tokenizer=tokenizer), row, Settings()) == (7, 8, 9)
    encode(golden(tokenizer=tokenizer), row, Settings(protocol=PRODUCT))
    messages = [{"role": "user", "content": "first"}]
    assert tokenizer.asked == [(messages, {"add_generation_prompt": True, "enable_thinking": False}),
                               (messages, {"add_generation_prompt": True})]


def test_the_product_s_protocol_is_what_a_user_gets():
    pair, settings = embedded_pair(), Settings(PRODUCT, temperature=0.0, max_tokens=12)
    found = evaluate(pair, [Dataset("x", (Row("here", ("import os\n",)),))], settings)
    tokens = tokens_of(found.data[0].rounds())
    ids = encode(pair, Row("here", ("import os\n",)), settings)
    assert tokens == plain(pair.target.model, ids, 12)  # not one more than asked
    assert found.calibration is None and found.data[0].tokens_per_second() > 0


def test_prompts_that_do_not_fit_are_counted():
    pair = golden()
    context, gamma = pair.target.context, pair.draft.gamma
    rows = [Row("a", (), ids=(5,) * (context - gamma)), Row("b", (), ids=(5,) * (context - gamma - 4)),
            Row("c", (), ids=(5, 6))]
    found = evaluate(pair, [Dataset("x", tuple(rows))], dataclasses.replace(GREEDY, max_tokens=5))
    about = found.data[0]
    assert (about.left_out, about.shortened, sorted(about.runs[0])) == (1, 1, [0, 1])
    assert room_for(pair, context - gamma - 4, GREEDY) == 3
    with pytest.raises(ValueError, match="no prompt leaves room"):
        evaluate(pair, [Dataset("x", tuple(rows[:1]))], GREEDY)


def test_ids_outside_the_vocabulary_name_the_line():
    with pytest.raises(ValueError, match="line 3: token 99999 is outside the vocabulary of 320"):
        encode(golden(), Row("x.jsonl, line 3", (), ids=(5, 99999)), GREEDY)


@pytest.mark.parametrize(("pair", "settings", "thresholds", "fragment"), [
    pytest.param(lambda: pair_of(tiny_model("qwen3")), GREEDY, (), "--draft", id="no-draft"),
    pytest.param(golden, Settings(PRODUCT), (0.5,), "--protocol paper", id="thresholds-of-the-product"),
    pytest.param(lambda: golden("qwen3_dflash"), GREEDY, (0.5,), "leave --thresholds out", id="no-confidence-head"),
])
def test_what_cannot_be_measured_is_refused(pair, settings, thresholds, fragment):
    with pytest.raises(ValueError, match=fragment):
        evaluate(pair(), [prompts_of()], settings, thresholds)


# --- the record


def bare(rounds):
    return [dataclasses.replace(landed, seconds={}) for landed in rounds]


def interrupting(monkeypatch, after: int):
    """Ctrl-C after so many decoded rounds."""
    from mlx_dspark import samples

    original, seen = samples.decode_sample, []

    def decode_sample(*args):
        for landed in original(*args):
            seen.append(landed)
            if len(seen) > after:
                raise KeyboardInterrupt
            yield landed

    monkeypatch.setattr(samples, "decode_sample", decode_sample)
    return seen


def test_an_interrupt_keeps_what_is_done_and_the_record_goes_on(monkeypatch, tmp_path):
    record = tmp_path / "rounds.jsonl"
    whole = evaluate(golden(), [prompts_of()], SAMPLED, (0.5,))
    with monkeypatch.context() as patch:
        interrupting(patch, 20)
        stopped = evaluate(golden(), [prompts_of()], SAMPLED, (0.5,), record)
    assert stopped.interrupted and 0 < len(stopped.data[0].runs[0]) < 4
    with monkeypatch.context() as patch:
        seen = interrupting(patch, 10**9)
        resumed = evaluate(golden(), [prompts_of()], SAMPLED, (0.5,), record)
    assert not resumed.interrupted
    for threshold in (0.0, 0.5):
        assert bare(resumed.data[0].rounds(threshold)) == bare(whole.data[0].rounds(threshold))
    decoded = sum(len(run) for level in (0.0, 0.5) for run in whole.data[0].runs[level].values())
    assert len(seen) == decoded - sum(map(len, stopped.data[0].runs[0].values()))
    assert to_document(resumed, None)["confidence"] == to_document(whole, None)["confidence"]


def test_a_half_written_sample_is_decoded_again(tmp_path):
    record, settings = tmp_path / "rounds.jsonl", dataclasses.replace(SAMPLED, max_tokens=6)
    whole = evaluate(golden(), [prompts_of()], settings, record=record)
    text = record.read_bytes()
    starts = [i for i in range(len(text)) if text.startswith(b'{"run"', i)]
    for cut in (1, starts[1] + 1, starts[2] + 40, starts[3] - 1, len(text) - 1, len(text) - 90):
        record.write_bytes(text[:cut])
        assert bare(evaluate(golden(), [prompts_of()], settings, record=record).data[0].rounds()) == \
            bare(whole.data[0].rounds())
        assert sorted(line.split(b'"ms"')[0] for line in record.read_bytes().splitlines()) == \
            sorted(line.split(b'"ms"')[0] for line in text.splitlines()), cut


def test_a_record_of_other_settings_is_not_used(tmp_path):
    record = tmp_path / "rounds.jsonl"
    evaluate(golden(), [prompts_of()], GREEDY, record=record)
    sample = Sample("fixture", 0, prompts_of().rows[0].ids, 48)
    assert Samples(golden(), GREEDY, record).known(sample, "fixed")
    for settings in (dataclasses.replace(GREEDY, temperature=0.5), dataclasses.replace(GREEDY, seed=1),
                     dataclasses.replace(GREEDY, protocol=PRODUCT)):
        assert not Samples(golden(), settings, record).known(sample, "fixed")
    for other in (dataclasses.replace(sample, ids=(5, 6)), dataclasses.replace(sample, max_tokens=47),
                  dataclasses.replace(sample, data="else"), dataclasses.replace(sample, number=1)):
        assert not Samples(golden(), GREEDY, record).known(other, "fixed")
    assert not Samples(golden(), GREEDY, record).known(sample, "threshold:0.5")
    assert not Samples(golden("qwen3_dspark_rnn"), GREEDY, record).known(sample, "fixed")


@pytest.mark.parametrize("text", ['{"turns": ["a"]}\n', '{"turns": ["a"]}', '{"run": {"policy": "auto"}}\n', "[1]\n",
                                  '{"run": {"rounds": 1}}\n{"index": 1}\n'])
def test_a_file_that_is_no_record_is_refused_and_left_alone(text, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="name another file"):
        evaluate(golden(), [prompts_of()], GREEDY, record=path)
    assert path.read_text(encoding="utf-8") == text


def test_the_record_can_be_replayed(tmp_path):
    evaluate(golden(), [prompts_of()], GREEDY, record=tmp_path / "rounds.jsonl")
    assert len(read_recording(tmp_path / "rounds.jsonl").accepted) == 50


# --- the report


def test_confidences_are_judged_on_every_round_raw_and_held_out():
    found = evaluate(golden(), [prompts_of(), prompts_of(data="again")], SAMPLED)
    document = to_document(found, None)
    rounds = sum(entry["rounds"] for entry in document["data"].values())
    confidence = document["confidence"]
    assert confidence["raw"]["slots"][0]["count"] == rounds == confidence["held_out"]["slots"][0]["count"]
    assert confidence["raw"]["ece"] == summarise(found.calibration.before)["ece"] > 0
    assert len(confidence["temperatures"]) == 7


def test_a_summary_weighs_slots_by_their_counts():
    slots = metrics(Rounds(np.zeros((4, 3)), np.array([2, 1, 0, 0]), np.array([2, 2, 1, 1])))
    found = summarise(slots)
    assert [slot.count for slot in slots] == [4, 2, 0]
    assert found["ece"] == pytest.approx((4 * slots[0].ece + 2 * slots[1].ece) / 6)
    assert found["auc"] == 0.5
    assert summarise(slots[2:]) == {"ece": None, "auc": None, "brier": None}


def test_published_numbers_stand_beside_the_measured_ones():
    (known,) = [draft for target in TARGETS for draft in target.drafts if draft.repo.endswith("dspark_qwen3_4b_block7")]
    rounds = evaluate(golden(), [prompts_of()], GREEDY).data[0].runs
    sets = tuple(Measured(name, runs=rounds) for name in ("gsm8k", "arena-hard-v2", "livecodebench", "mine"))
    document = to_document(Evaluation(GREEDY, 7, (), sets, None, False), known)
    published = {name: entry["published"] and entry["published"]["acceptance_length"]
                 for name, entry in document["data"].items()}
    assert published == {"gsm8k": 6.11, "arena-hard-v2": 3.29, "livecodebench": 4.86, "mine": None}
    text = to_text(document)
    assert f"published: {TABLE_1}." in text
    (line,) = [line for line in text.splitlines() if line.startswith("gsm8k ") and "6.11" in line]
    assert line.split()[3:6] == ["4.04", "6.11", "-2.07"]
    assert "published" not in to_text(to_document(Evaluation(GREEDY, 7, (), sets, None, False), None))


def test_every_published_number_names_its_source():
    assert all(draft.source for target in TARGETS for draft in target.drafts if draft.tau)


def test_remarks_say_what_is_missing():
    about = Measured("x", left_out=2, shortened=3, runs={0.0: {}, 0.5: {0: ()}}, replayed={0.5: 1})
    text = to_text(to_document(Evaluation(SAMPLED, 3, (0.5,), (about,), None, True), None))
    assert "INTERRUPTED" in text and "2 prompts do not fit" in text and "3 samples got fewer" in text
    assert "1 greedy sample" in text


# --- the command


def run(*args) -> Result:
    clean = {"MLX_DSPARK_MODEL": None, "MLX_DSPARK_DRAFT": None, "MLX_DSPARK_DEBUG": None}
    return CliRunner(env=clean).invoke(command, [str(arg) for arg in args])


@pytest.fixture
def loaded(monkeypatch):
    monkeypatch.setattr(module, "open_pair", lambda notes, **fields: embedded_pair())


def test_the_command_writes_tables_and_a_document(loaded, tmp_path):
    done = run("maths", "--count", 2, "-m", 8, "--thresholds", "0,0.4", "--json", tmp_path / "e.json")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "paper protocol: fixed blocks of 7, no thinking; temperature 1, at most 8 tokens, seed 980406"
    assert lines[2].split() == ["data", "samples", "rounds", "tau", "drafts", "verify", "rate"]
    document = json.loads((tmp_path / "e.json").read_text(encoding="utf-8"))
    entry = document["data"]["maths"]
    assert lines[3].split()[:3] == ["maths", "2", str(entry["rounds"])]
    assert [at["threshold"] for at in entry["thresholds"]] == [0, 0.4]
    assert entry["thresholds"][0]["acceptance_length"] == entry["acceptance_length"]
    assert document["machine"]["mlx"] and document["weights"]["draft"] and document["settings"]["seed"] == 980406


def test_json_to_stdout_is_nothing_but_json(loaded):
    done = run("--data", "maths", "code", "--count", 1, "-m", 4, "--json", "-", "--temp", 0)
    assert done.exit_code == 0, done.stderr
    assert list(json.loads(done.stdout)["data"]) == ["maths", "code"]


def test_an_interrupt_still_reports(loaded, monkeypatch, tmp_path):
    interrupting(monkeypatch, 12)
    done = run("--data", "maths", "-m", 8, "--json", tmp_path / "e.json")
    assert done.exit_code == 130 and "INTERRUPTED" in done.stdout
    assert json.loads((tmp_path / "e.json").read_text(encoding="utf-8"))["interrupted"]


def test_pictures_are_drawn(loaded, tmp_path):
    pytest.importorskip("matplotlib", reason="NOT TESTED, matplotlib is missing: pip install matplotlib")
    done = run("maths", "--count", 2, "-m", 8, "--thresholds", "0.4", "--plot", tmp_path / "new")
    assert done.exit_code == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(module.PICTURES)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "new").iterdir())


@pytest.mark.parametrize(("args", "code", "fragment"), [
    pytest.param(["--data", "none.jsonl"], 1, "none.jsonl", id="no-such-set"),
    pytest.param(["--data", "gsm8k"], 1, "eval_datasets", id="suite-without-a-file"),
    pytest.param(["--thresholds", "0,x"], 2, "'0,x'", id="threshold-is-a-word"),
    pytest.param(["--thresholds", "1.5"], 2, "'1.5'", id="threshold-above-1"),
    pytest.param(["--thresholds", "nan"], 2, "'nan'", id="threshold-nan"),
    pytest.param(["--model", "somewhere", "--data", "heldout"], 2, "heldout", id="heldout-for-another-model"),
    pytest.param(["--temp", "nan"], 1, "temperature is nan", id="nan-temperature"),
    pytest.param(["--count", "0"], 2, "--count", id="no-rows"),
    pytest.param(["--json", "none/there.json"], 1, "none/there.json", id="json-cannot-be-written"),
    pytest.param(["--record", "none/there.jsonl"], 1, "none/there.jsonl", id="record-cannot-be-written"),
    pytest.param(["--protocol", "product", "--thresholds", "0.5"], 1, "--protocol paper", id="product-thresholds"),
])
def test_errors(args, code, fragment, loaded):
    refused(run(*args), fragment, code=code)


def test_a_failed_run_leaves_no_empty_document(loaded, tmp_path):
    assert run("--temp", "nan", "--json", tmp_path / "e.json").exit_code == 1
    assert not list(tmp_path.iterdir())


def test_settings_are_checked_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(module, "open_pair", lambda *args, **fields: pytest.fail("loaded"))
    assert "temperature is nan" in run("--temp", "nan").stderr
