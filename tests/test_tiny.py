"""The small pair from nothing (examples/tiny): corpora, tokenizer, target, packing, at the size of a test."""

import csv
import dataclasses
import json
import random
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from helpers import GOLDEN
from mlx_dspark.convert.command import command as convert
from mlx_lm.models.qwen3 import Model, ModelArgs
from mlx_lm.utils import load_tokenizer
from tiny import (
    answers,
    corpora,
    fast,
    grammar,
    heads,
    install,
    model,
    pack,
    snippets,
    stories,
    sums,
    talk,
    target,
    tokenizer,
)
from tiny.batches import Streams

import mlx_dspark
from mlx_dspark.load import encode_prompt, read_draft

MICRO = {**model.CONFIG, "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SETTINGS = target.Settings(steps=6, batch_tokens=96, phases=((0.0, 16), (0.5, 32)), windows=1)


def documents(seed=1):
    return list(corpora.talk_documents(300, seed))


# ---- corpora ----------------------------------------------------------------------------------------------------

def test_templates_follow_their_seed():
    assert documents() == documents()
    assert documents(1) != documents(2)


def test_split_depends_on_the_name_alone_and_is_about_one_in_twenty():
    names = [corpora.Document("code", f"folder/file{i}.py", "x") for i in range(4000)]
    held_out = [document.name for document in names if document.split == "heldout"]
    assert 140 < len(held_out) < 260
    assert [corpora.Document("code", name, "other").split for name in held_out] == ["heldout"] * len(held_out)


def test_written_corpora_are_disjoint_and_repeatable(tmp_path):
    first = corpora.write(documents(), tmp_path / "a")
    assert corpora.write(documents(), tmp_path / "b") == first
    for name in ("chat.train.jsonl", "chat.heldout.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    train, held_out = (set(corpora.read(tmp_path / "a", "chat", split)) for split in corpora.SPLITS)
    assert train and held_out and train.isdisjoint(held_out)
    lines = [(tmp_path / "a" / f"chat.{split}.jsonl").read_text().splitlines() for split in corpora.SPLITS]
    train, held_out = ({json.loads(line)["name"] for line in part} for part in lines)
    assert train.isdisjoint(held_out)


def test_library_leaves_out_tests_and_tables(tmp_path):
    for name in ("abc.py", "test/abc.py", "encodings/cp037.py", "site-packages/x.py", "json/decoder.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import os\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    assert [document.name for document in corpora.library_documents(tmp_path)] == ["abc.py", "json/decoder.py"]


def test_manual_reads_both_endings_and_says_what_is_missing(tmp_path):
    (tmp_path / "a.rst").write_text("A\n=\n")
    (tmp_path / "b.rst.txt").write_text("B\n=\n")
    assert [document.name for document in corpora.manual_documents(tmp_path)] == ["a.rst", "b.rst"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no \.rst files: give"):
        list(corpora.manual_documents(tmp_path / "empty"))


def test_too_many_texts_are_refused(monkeypatch):
    monkeypatch.setattr(talk, "piece", lambda rng: talk.Piece("a", f"text {rng.randrange(3)}"))
    with pytest.raises(ValueError, match="gave only 3 different texts"):
        list(corpora.talk_documents(10, 1))


# ---- templates --------------------------------------------------------------------------------------------------

def test_grammar_settles_choices_and_words():
    found = {grammar.expand("«a|«b|c»» $word", random.Random(seed), {"word": "x"}) for seed in range(40)}
    assert found == {"a x", "b x", "c x"}
    with pytest.raises(KeyError):
        grammar.expand("$missing", random.Random(1), {})


@pytest.mark.parametrize("make", [stories.story, answers.answer, sums.sum_, snippets.snippet])
def test_templates_leave_no_traces(make):
    rng = random.Random(7)
    for _ in range(400):
        for text in make(rng):
            assert text == text.strip() and text
            assert not any(mark in text for mark in ("«", "»", "$", "{task}", "  \n")), text


def test_sums_are_right():
    rng = random.Random(3)
    checked = 0
    for _ in range(600):
        _, reply = sums.sum_(rng)
        for part in reply.replace("times", "*").replace(", because", ".").split(". "):
            left, sign, right = part.rpartition(" = ")
            left = left.split(": ")[-1].split(" is ")[-1].split(" are ")[-1]
            if sign and right.rstrip(".").isdigit() and set(left) <= set("0123456789 +-*/"):
                assert eval(left) == int(right.rstrip(".")), reply  # only digits and signs, see above
                checked += 1
    assert checked > 300


@pytest.mark.parametrize("one", snippets.SNIPPETS, ids=lambda one: one.task)
def test_programs_do_what_they_say(one, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("one\n")
    words = {"list": "numbers", "words": "names", "x": "value", "w": "name", "a": "left", "b": "right"}
    scope = {}
    exec(snippets._fill(one.code, words), scope)
    call, _, wanted = one.example.partition("  # ")
    value = eval(call, scope)
    assert not wanted or value == eval(wanted)


# ---- tokenizer --------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder as `make tiny` builds it, with a tokenizer of 300 tokens."""
    out = tmp_path_factory.mktemp("tiny")
    code = [corpora.Document("code", f"{i}.py", f"def f{i}(x):\n    return x + {i}\n" * 60) for i in range(60)]
    docs = [corpora.Document("docs", f"{i}.rst", f"Number {i}\n=========\n\nText of {i}.\n" * 60) for i in range(60)]
    corpora.write([*code, *docs, *documents()], out / "corpus")
    found = tokenizer.train((document.text for document in documents()), MICRO["vocab_size"])
    tokenizer.save(found, out / "tokenizer")
    (out / "tokens").mkdir()
    for kind in corpora.KINDS:
        for split in corpora.SPLITS:
            ids = tokenizer.pack(found, corpora.read(out / "corpus", kind, split))
            np.save(tokenizer.stream_path(out, kind, split), ids)
    return out


def test_tokenizer_gives_every_text_back(run):
    found = load_tokenizer(run / "tokenizer")
    for text in ("def f(x):\n\treturn x  # é ß 中 😀\r\n", "12 + 34 = 46", " <b> ", documents()[0].text):
        assert found.decode(found.encode(text, add_special_tokens=False)) == text
    assert [found.convert_tokens_to_ids(token) for token in tokenizer.SPECIAL] == [0, 1, 2, 3]
    assert len(found.encode("1234", add_special_tokens=False)) == 4


def test_chat_template_writes_what_the_corpus_holds(run):
    found = load_tokenizer(run / "tokenizer")
    messages = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi!"},
                {"role": "user", "content": "Who?"}]
    text = found.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|endoftext|><|user|>Hello.<|assistant|>Hi!<|endoftext|><|user|>Who?<|assistant|>"
    assert found.eos_token_ids == {0} and found.bos_token_id == 0
    prompt = encode_prompt(found, "Hello.")
    assert prompt[:2] == [0, 2] and prompt[-1] == 3


def test_tokenizer_and_streams_are_repeatable(run):
    again = tokenizer.train((document.text for document in documents()), MICRO["vocab_size"])
    assert json.loads(again.to_str()) == json.loads((run / "tokenizer" / "tokenizer.json").read_text())
    stream = np.load(tokenizer.stream_path(run, "chat", "train"))
    assert stream[0] == stream[-1] == 0 and stream.dtype == np.uint16 and stream.max() < MICRO["vocab_size"]


# ---- target -----------------------------------------------------------------------------------------------------

def losses(out):
    with (out / "target.csv").open(newline="") as lines:
        return [(row["step"], row["loss"], row["norm"]) for row in csv.DictReader(lines)]


def copy_inputs(run, out):
    out.mkdir()
    for name in ("tokens", "tokenizer", "corpus"):
        (out / name).symlink_to(run / name)
    return out


def test_a_killed_run_continues_exactly(run, tmp_path, monkeypatch):
    whole, broken = copy_inputs(run, tmp_path / "whole"), copy_inputs(run, tmp_path / "broken")
    target.train(whole, SETTINGS, MICRO, fast=False, every=0)
    own_step = target.Trainer.step

    def dies(self, streams):
        if self.done == 4:
            raise KeyboardInterrupt
        return own_step(self, streams)

    monkeypatch.setattr(target.Trainer, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        target.train(broken, SETTINGS, MICRO, fast=False, every=0)
    monkeypatch.setattr(target.Trainer, "step", own_step)
    assert not (broken / "target").exists()
    target.train(broken, SETTINGS, MICRO, fast=False, every=0)
    assert losses(broken) == losses(whole) and len(losses(whole)) == 6
    for name in ("checkpoint.safetensors", "target/model.safetensors"):
        one, other = (mx.load(str(folder / name)) for folder in (whole, broken))
        assert one.keys() == other.keys() and all(mx.array_equal(one[key], other[key]) for key in one)
    # lines after the last checkpoint are dropped, a finished run is left as it is
    target.train(whole, SETTINGS, MICRO, fast=False, every=0)
    assert losses(whole) == losses(broken)


def test_training_learns_and_the_folder_loads(run, tmp_path):
    out = copy_inputs(run, tmp_path / "out")
    settings = target.Settings(steps=30, batch_tokens=256, rate=1e-2, phases=((0.0, 32),), windows=1)
    trained = target.train(out, settings, MICRO, fast=False, every=9)
    values = [float(loss) for _, loss, _ in losses(out)]
    assert sum(values[-5:]) / 5 < values[0] - 1
    assert trained.done == 30
    pair = mlx_dspark.load(out / "target", draft=False)
    assert pair.tokenizer.has_chat_template and pair.target.vocab_size == MICRO["vocab_size"]


def test_fast_functions_agree_with_mlx(run):
    rows = Streams.load(run, "train", target.SHARES).rows(1, 0, 3, 20)
    found = []
    for wanted in (False, True):
        with fast.fast_qwen3(wanted) as cross_entropy:
            trainer = target.Trainer(model.build(MICRO, 5), SETTINGS, cross_entropy)
            found.append(trainer._loss_and_grad(trainer.model, rows))
    (plain, plain_grads), (loss, grads) = found
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    flat, plain_flat = (dict(model.tree_flatten(tree)) for tree in (grads, plain_grads))
    for name, grad in flat.items():
        assert mx.abs(grad - plain_flat[name]).max() < 1e-5 * max(mx.abs(plain_flat[name]).max().item(), 1e-2), name
    x = mx.linspace(-87, 87, 100_001)
    assert mx.abs(fast.exp(x) / mx.exp(x) - 1).max() < 1e-6


def test_budget_by_minutes_and_by_steps():
    timed = target.Settings(minutes=2)
    assert timed.spent(999, 60) == 0.5 and timed.spent(0, 500) == 1
    assert SETTINGS.spent(3, 1e9) == 0.5
    assert timed.learning_rate(timed.warmup) == pytest.approx(timed.rate)
    assert timed.learning_rate(1) == pytest.approx(target.LOW * timed.rate)
    assert [SETTINGS.context(spent) for spent in (0, 0.49, 0.5, 1)] == [16, 16, 32, 32]
    for budget in ({}, {"steps": 3, "minutes": 1}):
        with pytest.raises(ValueError, match="budget is unclear"):
            target.Settings(**budget)


def test_a_loss_that_is_no_number_stops_the_run(run):
    micro = Model(ModelArgs.from_dict(MICRO))
    micro.model.norm.weight = micro.model.norm.weight * float("nan")
    trainer = target.Trainer(micro, SETTINGS, fast.plain_cross_entropy)
    with pytest.raises(ValueError, match="loss of step 0 is nan"):
        trainer.step(Streams.load(run, "train", target.SHARES))


# ---- packing ----------------------------------------------------------------------------------------------------

def test_commands_give_one_line_errors(tmp_path):
    for command, words in ((tokenizer.main, "tiny.corpora"), (target.main, "--steps"), (pack.main, "tiny.target"),
                           (install.main, "make tiny"), (heads.main, "tiny.pack")):
        result = CliRunner().invoke(command, ["--out", str(tmp_path / "nothing")])
        assert result.exit_code == 1 and words in result.output and result.output.count("\n") == 1, result.output


def test_packed_prompts_never_share_a_document(run):
    found = load_tokenizer(run / "tokenizer")._tokenizer.backend_tokenizer
    measured, calibrated = pack.choose(found, run / "corpus")
    assert {line["kind"] for line in measured} == set(corpora.KINDS)
    assert all(line["ids"][0] == 0 and len(line["ids"]) <= pack.PROMPT + 1 for line in measured + calibrated)
    texts = [line["text"] for line in measured + calibrated]
    assert len(set(texts)) == len(texts)


def test_temperatures_are_where_the_package_reads_them(tmp_path):
    """A draft that the converter wrote keeps all its other facts."""
    source = tmp_path / "first"
    shutil.copytree(GOLDEN / "qwen3_dspark_vanilla", source)
    made = CliRunner().invoke(convert, ["--draft", str(source), "--mlx-path", str(tmp_path / "packed"), "-q",
                                        "--q-group-size", "32"])
    assert made.exit_code == 0, made.output
    before = read_draft(tmp_path / "packed").spec
    (tmp_path / "t.json").write_text(json.dumps([1.25, *[0.8] * (before.gamma - 1)]))
    install.give_temperatures(tmp_path / "packed", tmp_path / "t.json")
    after = read_draft(tmp_path / "packed").spec
    assert before.temperatures is None and after.temperatures == (1.25, *[0.8] * (before.gamma - 1))
    assert dataclasses.replace(after, temperatures=None) == before


def test_install_refuses_what_is_incomplete_or_too_large(tmp_path):
    packed = tmp_path / "packed"
    for name in install.FILES:
        (packed / name).parent.mkdir(parents=True, exist_ok=True)
        (packed / name).write_text("{}")
    assert install.install(packed, tmp_path / "assets") < 1000
    assert (tmp_path / "assets" / "draft" / "config.json").exists()
    (packed / "heldout.jsonl").write_bytes(bytes(install.LARGEST))
    with pytest.raises(ValueError, match="the package takes 9"):
        install.install(packed, tmp_path / "other")
    assert not (tmp_path / "other").exists()


# ---- heads ------------------------------------------------------------------------------------------------------

@pytest.fixture
def compared(tmp_path, monkeypatch):
    """A folder with the inputs of the comparison, and the commands that it runs: what they would write is written."""
    (tmp_path / "corpus").mkdir()
    for kind in corpora.KINDS:
        lines = [json.dumps({"name": f"{n}", "text": f"{kind} {n}"}) + "\n" for n in range(100)]
        (tmp_path / "corpus" / f"{kind}.train.jsonl").write_text("".join(lines))
    shutil.copytree(GOLDEN / "qwen3_dspark_vanilla", tmp_path / "first")
    (tmp_path / "packed").mkdir()
    prompts = [{"kind": kind, "ids": [0, n]} for n in range(3) for kind in corpora.KINDS]
    (tmp_path / "packed" / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    commands = []

    def run(command, *args):
        options = dict(zip(map(str, args[::2]), args[1::2])) if "--yes" not in args else {"--out": args[3]}
        commands.append((command, args))
        if command == "train":
            options["--out"].mkdir()
            (options["--out"] / "valid.csv").write_text("step,tau\n0,1.1\n9,1.5\n")
        else:
            found = {f"prompts-{kind}": {"acceptance_length": 2 + place} for place, kind in enumerate(corpora.KINDS)}
            options["--json"].write_text(json.dumps({"data": found}))

    monkeypatch.setattr(heads, "_run", run)
    return tmp_path, commands


def test_heads_are_compared_on_the_same_texts_and_prompts(compared):
    out, commands = compared
    found = list(heads.results(out, 9))
    assert [(result.gamma, result.head) for result in found] == [(g, h) for g in heads.GAMMAS for h in heads.HEADS]
    assert found[0].expected == 1.5 and found[0].taus[1, "docs"] == 3
    assert heads.line(found[0]) == "| 4 | vanilla | 1.500 | 2.00 | 3.00 | 4.00 | 2.00 | 3.00 | 4.00 |"
    assert {text.count("|") for text in (*heads.header(), heads.line(found[0]))} == {10}
    texts = [json.loads(line)["name"] for line in (out / "heads" / "texts" / "chat.jsonl").read_text().splitlines()]
    assert texts == ["0", "30", "60", "90"]
    assert (out / "heads" / "prompts-code.jsonl").read_text() == "".join(f'{{"ids": [0, {n}]}}\n' for n in range(3))
    trained = [list(map(str, args)) for command, args in commands if command == "train"]
    stores = {args[args.index("--features") + 1] for args in trained}
    assert len(trained) == 9 and len(stores) == 1 and len(commands) == 27
    (backbone,) = {args[args.index("--start") + 1] for args in trained}
    given = read_draft(Path(backbone))
    assert given.spec.markov == "none" and given.spec.taps == read_draft(out / "first").spec.taps
    shorter = next(heads.results(out, 9, decode=False))
    assert (heads.line(shorter), heads.header(False)[1].count("|")) == ("| 4 | vanilla | 1.500 |", 4)


def test_a_comparison_goes_on_where_it_stopped(compared):
    out, commands = compared
    assert len(list(zip(heads.results(out, 9), range(2)))) == 2  # the third is trained, and not asked for
    done = len(commands)
    assert len(list(heads.results(out, 9))) == 9
    assert done == 9 and len(commands) == 27
