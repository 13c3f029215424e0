"""Prompts: the formats of a line, the sets in the package, and the subset rule of DeepSeek's evaluation."""

import json
import random

import pytest

from mlx_dspark import prompts
from mlx_dspark.errors import FormatError
from mlx_dspark.prompts import CAPS, CHAT_SETS, Dataset, Row, open_dataset, open_datasets, read_rows


@pytest.fixture
def file(tmp_path):
    def write(*lines, name="set.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
        return path

    return write


@pytest.mark.parametrize(("entry", "turns", "system"), [
    pytest.param({"turns": ["a", "b"]}, ("a", "b"), None, id="turns"),
    pytest.param({"prompt": "a", "answer": 3}, ("a",), None, id="prompt"),
    pytest.param({"conversations": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"},
                                    {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"}]},
                 ("a", "b"), "s", id="conversations"),
    pytest.param({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}]}, ("a",), None,
                 id="from-and-value"),
    pytest.param({"messages": [{"role": "user", "content": "a"}]}, ("a",), None, id="messages"),
])
def test_formats(entry, turns, system, file):
    (row,) = read_rows(file(entry))
    assert (row.turns, row.system, row.ids) == (turns, system, None)


def test_ids_and_blank_lines(file):
    rows = read_rows(file("", {"ids": [3, 4]}, "   ", {"turns": ["line\u2028end"]}, ""))
    assert [(row.ids, row.turns) for row in rows] == [((3, 4), ()), (None, ("line\u2028end",))]
    assert rows[1].where.endswith("set.jsonl, line 4")


def test_a_line_separator_inside_a_text_does_not_end_the_line(file):
    (row,) = read_rows(file('{"turns": ["a\u2028b\u0085c"]}'))
    assert row.turns == ("a\u2028b\u0085c",)


@pytest.mark.parametrize("line", [
    "{", "[]", "3", "{}", '{"turns": []}', '{"turns": [""]}', '{"turns": "text"}', '{"turns": [1]}', '{"prompt": ""}',
    '{"ids": []}', '{"ids": [-1]}', '{"ids": [true]}', '{"ids": ["1"]}', '{"conversations": []}',
    '{"conversations": [{"role": "assistant", "content": "x"}]}', '{"conversations": [{"role": "user"}]}',
    '{"conversations": [{"role": "tool", "content": "x"}]}', '{"conversations": 3}',
    '{"conversations": [{"role": "user", "content": "a"}, {"role": "system", "content": "late"}]}',
])
def test_damaged_lines_are_named(line, file):
    path = file({"turns": ["a"]}, line)
    with pytest.raises(FormatError) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}, line 2: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(("content", "fragment"), [(b"\n \n", "holds no prompts"), (b"\xff\xfe", "not UTF-8")])
def test_files_without_rows(content, fragment, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(FormatError, match=fragment):
        read_rows(tmp_path / "a.jsonl")


# --- which set a name means


@pytest.mark.parametrize("name", CHAT_SETS)
def test_sets_of_the_package(name):
    dataset = open_dataset(name)
    texts = [row.turns for row in dataset.rows]
    assert dataset.name == name and len(texts) == 40 == len(set(texts))
    assert all(len(turns) == 1 and 20 < len(turns[0]) < 400 for turns in texts)


def test_held_out_texts_of_the_small_pair():
    assert all(row.ids for row in open_dataset("heldout").rows)


def test_a_file_wins_over_a_name(file, monkeypatch):
    path = file({"turns": ["own"]}, name="maths")
    monkeypatch.chdir(path.parent)
    assert open_dataset("maths").rows[0].turns == ("own",)


def test_a_file_of_a_dataset_on_the_hub(file, monkeypatch):
    asked = []
    path = file({"turns": ["a"]}, name="gsm8k.jsonl")
    monkeypatch.setattr(prompts, "download_file", lambda *args: asked.append(args) or path)
    dataset = open_dataset("somebody/benchmarks/eval/gsm8k.jsonl")
    assert asked == [("somebody/benchmarks", "eval/gsm8k.jsonl")] and dataset.name == "gsm8k"


@pytest.mark.parametrize(("name", "fragment"), [("gsm8k", "eval_datasets"), ("none.jsonl", "OWNER/DATASET/FILE.jsonl")])
def test_unknown_names_say_what_there_is(name, fragment, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError, match="maths, code, chat") as caught:
        open_dataset(name)
    assert fragment in str(caught.value) and name in str(caught.value)


def test_two_sets_of_one_name_are_refused(file, tmp_path):
    (tmp_path / "deep").mkdir()
    other = tmp_path / "deep" / "set.jsonl"
    other.write_text('{"turns": ["b"]}', encoding="utf-8")
    with pytest.raises(ValueError, match="two data sets are called set"):
        open_datasets([str(file({"turns": ["a"]})), str(other)])


# --- the subset


def numbered(name, count):
    return Dataset(name, tuple(Row(str(i), (str(i),)) for i in range(count)))


def test_a_longer_set_is_shuffled_by_the_seed_and_its_beginning_taken():
    order = list(range(50))
    random.Random(980406).shuffle(order)
    chosen = [int(row.where) for row in numbered("aime25", 50).subset(None, 980406).rows]
    assert chosen == order[:30] != list(range(30)) and CAPS["aime25"] == 30


@pytest.mark.parametrize(("name", "rows", "count", "kept"), [
    ("aime25", 30, None, 30), ("aime25", 50, 40, 40), ("mine", 3000, None, 3000), ("mine", 5, 9, 5)])
def test_caps_and_counts(name, rows, count, kept):
    chosen = numbered(name, rows).subset(count, 0)
    assert len(chosen.rows) == kept
    assert (chosen.rows == numbered(name, rows).rows) == (kept == rows)
