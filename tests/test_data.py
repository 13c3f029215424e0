"""`mlx_dspark.data`: the target's own answers, batched and one by one, and a file that a killed run can go on with."""

import dataclasses
import json
import shutil

import mlx.core as mx
import pytest
from click.testing import CliRunner, Result
from helpers import embedded_pair, plain, refused

from mlx_dspark import data as module
from mlx_dspark.data import Job, command, read_jobs, regenerate
from mlx_dspark.load import ASSETS, Pair, load
from mlx_dspark.progress import BAR, Progress
from mlx_dspark.prompts import Row, read_rows
from mlx_dspark.regenerate import Wish, batched, make_sampler, one_by_one
from mlx_dspark.structs import Sampling
from mlx_dspark.train.config import TrainConfig
from mlx_dspark.train.data import read_data

TEMPLATE = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
            "{% if enable_thinking %}[think]{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}")
TEXTS = ["import os\n", "def add(a, b):\n    return", "class Point:\n", "The list", "x"]
ROWS = [(i, Row(f"line {i}", (text,))) for i, text in enumerate(TEXTS)]
GREEDY = Wish(Sampling(seed=0), 8, None)
SAMPLED = Wish(Sampling(temperature=0.9, top_p=0.95, top_k=50, seed=3), 10, None)


@pytest.fixture(scope="module")
def target() -> Pair:
    """The small target without its draft and without a chat template."""
    return Pair(bare_pair().target, bare_pair().tokenizer, None, facts=bare_pair().facts)


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Pair:
    """The small target with a chat template, a stop token that it does say, and a short context."""
    folder = tmp_path_factory.mktemp("chat")
    shutil.copytree(ASSETS / "target", folder, dirs_exist_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}), encoding="utf-8")
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**facts, "max_position_embeddings": 150}), encoding="utf-8")
    return load(folder, False)


class Changed:
    """A tokenizer with some facts changed."""

    def __init__(self, tokenizer, **facts):
        self.tokenizer = tokenizer
        vars(self).update(facts)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __len__(self):
        return len(self.tokenizer)


def bare_pair() -> Pair:
    """The small pair as if it had no chat template."""
    pair = embedded_pair()
    return dataclasses.replace(pair, tokenizer=Changed(pair.tokenizer, has_chat_template=False, chat_template=None))


def answers(dialogues) -> dict[int, str]:
    return {dialogue.number: dialogue.messages[-1]["content"] for dialogue in dialogues}


# --- answers


def test_greedy_batches_say_what_plain_decoding_says(target):
    found = answers(batched(target, ROWS, GREEDY, 3))
    for number, row in ROWS:
        ids = target.tokenizer.encode(row.turns[0])
        assert found[number] == target.tokenizer.decode(plain(target.target.model, ids, 8)), number


def test_one_by_one_says_it_too_with_and_without_a_draft(target):
    expected = answers(batched(target, ROWS, GREEDY, 3))
    assert answers(one_by_one(target, ROWS, GREEDY)) == expected
    assert answers(one_by_one(bare_pair(), ROWS, GREEDY)) == expected


def test_a_row_s_answer_depends_on_its_seed_and_not_on_its_company(target):
    together = answers(batched(target, ROWS, SAMPLED, 5))
    assert answers(batched(target, ROWS, SAMPLED, 2)) == together
    assert answers(batched(target, ROWS[3:], SAMPLED, 5)) == {i: together[i] for i in (3, 4)}
    same = [(i, ROWS[0][1]) for i in range(6)]
    assert len(set(answers(batched(target, same, SAMPLED, 6)).values())) > 3
    other = Wish(Sampling(temperature=0.9, top_p=0.95, top_k=50, seed=4), 10, None)
    assert answers(batched(target, ROWS, other, 5)) != together


def test_the_sampler_draws_from_the_processed_distribution():
    logprobs = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]]))
    draw = make_sampler(Sampling(temperature=1.0, top_k=2), 1)
    drawn = [draw(logprobs).item() for _ in range(400)]
    assert set(drawn) == {0, 1} and drawn.count(0) / 400 == pytest.approx(5 / 8, abs=0.08)
    again = make_sampler(Sampling(temperature=1.0, top_k=2), 1)
    assert [again(logprobs).item() for _ in range(20)] == drawn[:20]
    assert make_sampler(Sampling(), 1) is None


def test_every_answer_of_a_dialogue_is_made_in_sight_of_the_new_ones(chat):
    row = Row("here", ("Say a.", "Say b."), system="Be brief.")
    wish = Wish(Sampling(seed=0), 6, False)
    (made,) = batched(chat, [(0, row)], wish, 4)
    assert [message["role"] for message in made.messages] == ["system", "user", "assistant", "user", "assistant"]
    first, second = made.messages[2]["content"], made.messages[4]["content"]
    for text, answer in (("[system]Be brief.[user]Say a.[assistant]", first),
                         (f"[system]Be brief.[user]Say a.[assistant]{first}[user]Say b.[assistant]", second)):
        ids = chat.tokenizer.encode(text, add_special_tokens=False)
        assert chat.tokenizer.decode(plain(chat.target.model, ids, 6)) == answer
    (alone,) = one_by_one(chat, [(0, row)], wish)
    assert alone.messages == made.messages and made.tokens == 12 and made.endings == ["length", "length"]


def test_turns_draw_with_different_seeds():
    wish = Wish(Sampling(seed=7), 8, None)
    assert len({wish.seed_of(number, turn) for number in range(50) for turn in range(50)}) == 2500
    assert wish.seed_of(3, 0) == 10


def test_thinking_is_asked_of_the_template(chat):
    row = Row("here", ("Say a.",))
    with_it, without = (batched(chat, [(0, row)], Wish(Sampling(seed=0), 6, on), 1) for on in (True, False))
    ids = chat.tokenizer.encode("[user]Say a.[think][assistant]", add_special_tokens=False)
    assert next(with_it).messages[-1]["content"] == chat.tokenizer.decode(plain(chat.target.model, ids, 6))
    assert next(without).messages[-1]["content"] != ""


def test_stop_tokens_end_an_answer_and_are_not_part_of_it(target):
    ids = plain(target.target.model, target.tokenizer.encode(TEXTS[0]), 8)
    stop = ids[4]

    pair = Pair(target.target, Changed(target.tokenizer, eos_token_ids={stop}), None, facts=target.facts)
    for made in (next(batched(pair, ROWS[:1], GREEDY, 2)), next(one_by_one(pair, ROWS[:1], GREEDY))):
        assert made.endings == ["stop"]
        assert made.messages[-1]["content"] == target.tokenizer.decode(ids[: ids.index(stop)])


def test_a_dialogue_ends_where_the_context_does(chat):
    long = "word " * 60
    rows = [(0, Row("a", (long * 3,))), (1, Row("b", ("Say a.", long * 3))), (2, Row("c", ("Say a.",)))]
    made = {d.number: d for d in batched(chat, rows, Wish(Sampling(seed=0), 500, None), 2)}
    assert made[0].endings == [] and made[1].endings == ["length"] == made[2].endings
    assert [m["role"] for m in made[1].messages] == ["user", "assistant"]
    assert made[2].tokens == 150 - len(chat.tokenizer.encode("[user]Say a.[assistant]", add_special_tokens=False))


# --- the command


def run(*args) -> Result:
    clean = {"MLX_DSPARK_MODEL": None, "MLX_DSPARK_DRAFT": None, "MLX_DSPARK_DEBUG": None}
    return CliRunner(env=clean).invoke(command, [str(arg) for arg in args])


@pytest.fixture
def loaded(monkeypatch, target):
    monkeypatch.setattr(module, "open_pair", lambda notes, plain, **fields: target if plain else bare_pair())


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in TEXTS), encoding="utf-8")
    return path


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_lines_say_what_they_are_and_how_they_were_made(loaded, prompts, tmp_path):
    done = run("--prompts", prompts, "--out", tmp_path / "o.jsonl", "-m", 6, "--seed", 5)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(f"5 of 5 rows in {tmp_path / 'o.jsonl'}: ")
    lines = lines_of(tmp_path / "o.jsonl")
    assert [line["row"] for line in lines] == [0, 1, 2, 3, 4]
    first = lines[0]
    assert first["conversations"][0] == {"role": "user", "content": TEXTS[0]}
    assert first["conversations"][1]["role"] == "assistant" and first["name"] == "prompts/0"
    assert first["sampling"] == {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0}
    assert (first["seed"], first["thinking"], first["max_tokens"], first["endings"]) == (5, None, 6, ["length"])


def test_with_a_template_there_are_only_messages(chat, monkeypatch, tmp_path, prompts):
    monkeypatch.setattr(module, "open_pair", lambda notes, plain, **fields: chat)
    assert run("--prompts", prompts, "--out", tmp_path / "o.jsonl", "-m", 3).exit_code == 0
    line = lines_of(tmp_path / "o.jsonl")[0]
    assert "ids" not in line and "loss_mask" not in line and line["thinking"] is False


@pytest.mark.parametrize("batch", [1, 3])
def test_without_a_template_there_are_ids_whose_answer_alone_counts(batch, target, monkeypatch, tmp_path, prompts):
    monkeypatch.setattr(module, "open_pair", lambda notes, plain, **fields: target)
    out = tmp_path / "o.jsonl"
    assert run("--prompts", prompts, "--out", out, "-m", 6, "--temp", 0, "--batch", batch).exit_code == 0
    lines = lines_of(out)
    for line, text in zip(lines, TEXTS, strict=True):
        asked = target.tokenizer.encode(text)
        assert line["ids"] == asked + plain(target.target.model, asked, 6)
        assert line["loss_mask"] == [0] * len(asked) + [1] * 6 and line["thinking"] is None
    read = read_data([out], target.tokenizer, TrainConfig(min_tokens=6, valid=0.0), 4096).train
    assert [read.row(i)[1].tolist() for i in range(5)] == [line["loss_mask"] for line in lines]
    assert [row.turns for row in read_rows(out)] == [(text,) for text in TEXTS]  # they may be asked again


def test_a_stop_token_that_was_said_counts(target):
    """With or without a batch, ids and their mask end with it."""
    asked = target.tokenizer.encode(TEXTS[0])
    ids = plain(target.target.model, asked, 8)
    stopping = Pair(target.target, Changed(target.tokenizer, eos_token_ids={ids[4]}), None, facts=target.facts)
    end = ids.index(ids[4]) + 1
    for made in (next(batched(stopping, ROWS[:1], GREEDY, 2)), next(one_by_one(stopping, ROWS[:1], GREEDY))):
        assert (made.ids, made.endings) == (asked + ids[:end], ["stop"])
        assert made.loss_mask == [0] * len(asked) + [1] * end and made.tokens == end


def test_a_killed_run_goes_on_where_it_stopped(loaded, prompts, tmp_path):
    """Whatever a kill leaves of the file, the next run completes it to the same bytes."""
    out = tmp_path / "o.jsonl"
    args = ("--prompts", prompts, "--out", out, "-m", 5, "--batch", 2)
    assert run(*args).exit_code == 0
    whole = out.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (0, 3, ends[0], ends[1] - 1, ends[1] + 1, ends[2] + 70, len(whole) - 1):
        out.write_bytes(whole[:cut])
        assert run(*args).exit_code == 0
        assert out.read_bytes() == whole, cut
    lines = whole.splitlines(keepends=True)
    out.write_bytes(lines[3] + lines[0] + lines[2][:-40])  # rows come as they are finished
    assert run(*args).exit_code == 0
    assert out.read_bytes() == whole


def test_a_finished_file_costs_no_answers(loaded, prompts, tmp_path, monkeypatch):
    args = ("--prompts", prompts, "--out", tmp_path / "o.jsonl", "-m", 3)
    first = run(*args)
    monkeypatch.setattr(module, "batched", lambda pair, rows, *rest: iter([]) if not rows else pytest.fail("asked"))
    assert run(*args).stdout == first.stdout != ""


def test_an_interrupt_keeps_the_finished_rows(loaded, prompts, tmp_path, monkeypatch):
    out, original = tmp_path / "o.jsonl", module.batched

    def interrupted(*args):
        for place, dialogue in enumerate(original(*args)):
            if place == 2:
                raise KeyboardInterrupt
            yield dialogue

    monkeypatch.setattr(module, "batched", interrupted)
    done = run("--prompts", prompts, "--out", out, "-m", 3)
    assert done.exit_code == 130 and "2 of 5 rows" in done.stdout and "goes on from here" in done.stdout
    assert len(lines_of(out)) == 2
    monkeypatch.setattr(module, "batched", original)
    assert run("--prompts", prompts, "--out", out, "-m", 3).exit_code == 0
    assert [line["row"] for line in lines_of(out)] == [0, 1, 2, 3, 4]


def test_a_draft_is_used_when_it_is_named(loaded, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "batched", lambda *args: pytest.fail("batched"))
    done = run("--prompts", prompts, "--out", tmp_path / "o.jsonl", "-m", 3, "--draft", ASSETS / "draft")
    assert done.exit_code == 0, done.stderr


def test_rows_longer_than_the_context_are_left_out_and_counted(chat, tmp_path):
    jobs = [Job(0, "x/0", Row("a", ("word " * 400,))), Job(1, "x/1", Row("b", ("Say a.",)))]
    output = module.Output(tmp_path / "o.jsonl", {"seed": 0}, jobs)
    assert regenerate(chat, jobs, Wish(Sampling(seed=0), 3, False), output, 4, Progress(2)) == 1
    output.close(True)
    assert [line["row"] for line in lines_of(tmp_path / "o.jsonl")] == [1]


@pytest.mark.parametrize(("changed", "fragment"), [
    pytest.param(["--seed", "6"], "was made with seed 0", id="seed"),
    pytest.param(["--temp", "1"], "was made with sampling", id="temperature"),
    pytest.param(["-m", "4"], "was made with max_tokens 3", id="max-tokens"),
])
def test_a_file_made_otherwise_is_not_gone_on_with(changed, fragment, loaded, prompts, tmp_path):
    args = ["--prompts", prompts, "--out", tmp_path / "o.jsonl", "-m", 3]
    assert run(*args).exit_code == 0
    before = (tmp_path / "o.jsonl").read_bytes()
    done = run(*args, *changed)
    assert done.exit_code == 1 and fragment in done.stderr and "name another file" in done.stderr
    assert (tmp_path / "o.jsonl").read_bytes() == before


def test_a_file_of_other_prompts_is_not_gone_on_with(loaded, prompts, tmp_path):
    args = ["--prompts", prompts, "--out", tmp_path / "o.jsonl", "-m", 3]
    assert run(*args).exit_code == 0
    prompts.write_text('{"turns": ["else"]}\n', encoding="utf-8")
    done = run(*args)
    assert done.exit_code == 1 and "line 1 answers another prompt than row 0" in done.stderr


@pytest.mark.parametrize("text", ['{"turns": ["mine"]}\n', '{"turns": ["mine"]}', "[]\n", "text"])
def test_a_file_of_another_kind_is_left_alone(text, loaded, prompts, tmp_path):
    (tmp_path / "o.jsonl").write_text(text, encoding="utf-8")
    done = run("--prompts", prompts, "--out", tmp_path / "o.jsonl")
    assert done.exit_code == 1 and "name another file" in done.stderr
    assert (tmp_path / "o.jsonl").read_text(encoding="utf-8") == text


@pytest.mark.parametrize(("args", "code", "fragment"), [
    pytest.param([], 2, "--prompts", id="nothing-given"),
    pytest.param(["--prompts", "none.jsonl", "--out", "o.jsonl"], 1, "none.jsonl", id="no-such-file"),
    pytest.param(["--prompts", "heldout", "--out", "o.jsonl"], 1, "token ids cannot be asked", id="ids"),
    pytest.param(["--prompts", "maths", "--out", "none/o.jsonl"], 1, "none/o.jsonl", id="no-such-folder"),
    pytest.param(["--prompts", "maths", "--out", "o.jsonl", "--top-k", "-1"], 1, "top_k is -1", id="bad-sampling"),
    pytest.param(["--prompts", "maths", "--out", "o.jsonl", "--thinking"], 1, "--thinking is for a chat template",
                 id="thinking-without-a-template"),
    pytest.param(["--prompts", "maths", "--out", "o.jsonl", "-m", "0"], 2, "--max-tokens", id="no-tokens"),
])
def test_errors(args, code, fragment, loaded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(run(*args), fragment, code=code)
    assert not list(tmp_path.iterdir())


def test_dialogues_need_a_template(loaded, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"turns": ["a", "b"]}', encoding="utf-8")
    done = run("--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "o.jsonl")
    assert done.exit_code == 1 and "p.jsonl, line 1" in done.stderr and "rows of one turn" in done.stderr
    assert not (tmp_path / "o.jsonl").exists()


def test_rows_are_counted_through_all_files():
    jobs = read_jobs(["maths", "chat"], 3)
    assert [(job.number, job.name) for job in jobs] == [
        (0, "maths/0"), (1, "maths/1"), (2, "maths/2"), (3, "chat/0"), (4, "chat/1"), (5, "chat/2")]


# --- progress


def test_the_progress_line():
    progress = Progress(8, "rows")
    assert progress.line(1.0) == f"[{'.' * BAR}] 0/8 rows"
    progress.step(found=True)
    progress.tokens(90)
    progress.step()
    progress.step()
    assert progress.line(30.0) == f"[{'#' * 9}{'.' * 15}] 3/8 rows, 3 tokens/s, 1 min 15 s left"
    assert Progress(0).line(0).startswith(f"[{'#' * BAR}] 0/0")
