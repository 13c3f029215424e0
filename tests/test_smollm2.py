"""examples/smollm2: prompts that repeat neither themselves nor the shipped sets, and the rows of GGUF put back."""

import itertools
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from smollm2 import prompts  # noqa: E402
from smollm2.prompts import KINDS, essence, held_out, main, shipped, split, stream  # noqa: E402
from smollm2.slots import fill  # noqa: E402
from smollm2.target import convert, dense, in_halves, our_name  # noqa: E402

from mlx_dspark.prompts import CHAT_SETS, open_dataset, read_rows  # noqa: E402


@pytest.fixture(scope="module")
def many():
    return split(12_000, seed=1)


def test_a_template_is_filled():
    import random

    lists = {"name": ("Ann", "Bob"), "thing": ("pears",)}
    text = fill("$name «has|owns» #3-9/3 $thing, $name2 has #1-1; $name sees $name2.", random.Random(3), lists)
    first, second = text.split()[0], "Bob" if text.startswith("Ann") else "Ann"
    assert text in {f"{first} {verb} {n} pears, {second} has 1; {first} sees {second}."
                    for verb in ("has", "owns") for n in (3, 6, 9)}
    with pytest.raises(KeyError, match="animal"):
        fill("a $animal", random.Random(3), lists)


def test_prompts_are_many_and_filled(many):
    train, _ = many
    assert len({text for _, text in train}) == len(train) == 12_000
    assert all(text.isprintable() or "```" in text for _, text in train)
    assert not [text for _, text in train if any(mark in text for mark in "$«»|") or text != text.strip()]
    kinds = [kind for kind, _ in train]
    assert all(abs(kinds.count(kind) - 4000) < 100 for kind in KINDS)
    early = [kind for kind, _ in train[:300]]  # a run that is stopped early has all three
    assert all(abs(early.count(kind) - 100) < 15 for kind in KINDS)


def test_the_same_seed_makes_the_same_prompts_and_a_shorter_list_is_the_beginning(many):
    train, held = many
    fewer, fewer_held = split(500, seed=1)
    assert fewer == train[:500] and fewer_held == held[: len(fewer_held)]
    assert split(500, seed=2)[0] != fewer


def test_training_and_held_out_prompts_are_disjoint_whatever_the_seed(many):
    train, held = many
    other, other_held = split(3000, seed=7)
    assert 200 < len(held) < 400 and all(held_out(text) for _, text in held)
    assert not {text for _, text in (*train, *other)} & {text for _, text in (*held, *other_held)}


def test_the_shipped_prompts_are_not_repeated_even_with_other_numbers(many, monkeypatch):
    asked = {turn for name in CHAT_SETS for row in open_dataset(name).rows for turn in row.turns}
    assert len(shipped()) == len(asked) == 120
    assert not {essence(text) for part in many for _, text in part} & {essence(text) for text in asked}
    twin = "A baker fills 15 trays with 20 rolls each and sells all but 9 of them. How many rolls were sold?"
    said = itertools.cycle([twin, "What is two?"])
    monkeypatch.setitem(prompts.KINDS, "maths", lambda rng: next(said))
    assert [text for _, text in stream(1, ("maths",))] == ["What is two?"]  # and then the source is dry


def test_the_command_writes_files_for_data(tmp_path):
    result = CliRunner().invoke(main, ["--count", "90", "--out", str(tmp_path)])
    assert result.exit_code == 0 and "90 prompts" in result.output
    assert [row.turns[0] for row in read_rows(tmp_path / "prompts.jsonl")] == [text for _, text in split(90, 1)[0]]
    assert json.loads((tmp_path / "prompts.jsonl").read_text().split("\n")[0])["kind"] in KINDS


def test_rows_of_q_and_k_are_put_back():
    heads, size, width = 3, 8, 5
    rng = np.random.default_rng(0)
    halves = rng.normal(size=(heads * size, width)).astype(np.float32)  # as mlx-lm and transformers have them
    in_file = halves.reshape(heads, 2, size // 2, width).swapaxes(1, 2).reshape(halves.shape)  # llama.cpp's permute
    assert np.array_equal(np.array(in_halves(mx.array(in_file), heads)), halves)
    assert not np.array_equal(in_file, halves)


def test_put_back_rows_turn_to_the_same_scores():
    """Rotation by neighbours of the rows as they lie in the file = rotation by halves of the rows put back."""
    heads, size, rows = 2, 8, 6
    rng = np.random.default_rng(1)
    q, k = (mx.array(rng.normal(size=(heads * size, 4)).astype(np.float32)) for _ in range(2))
    x = mx.array(rng.normal(size=(rows, 4)).astype(np.float32))

    def scores(matrices, neighbours):
        turned = [mx.fast.rope((x @ m.T).reshape(1, rows, heads, size).swapaxes(1, 2), size, traditional=neighbours,
                               base=100.0, scale=1.0, offset=0) for m in matrices]
        return np.array(turned[0] @ turned[1].swapaxes(2, 3))

    theirs, ours = scores((q, k), True), scores([in_halves(m, heads) for m in (q, k)], False)
    assert np.allclose(theirs, ours, atol=1e-5)
    assert not np.allclose(theirs, scores((q, k), False), atol=1e-2)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_matrices_are_written_out(bits):
    matrix = mx.random.normal((12, 64), key=mx.random.key(bits))
    packed, scales, biases = mx.quantize(matrix, group_size=32, bits=bits)
    weights = {"blk.0.attn_q.weight": packed, "blk.0.attn_q.scales": scales.astype(mx.float16),
               "blk.0.attn_q.biases": biases.astype(mx.float16), "blk.0.attn_norm.weight": mx.ones((64,))}
    assert float(mx.abs(dense(weights, "blk.0.attn_q") - matrix).max()) < 8 / 2**bits
    named = dict(convert(weights, {"attn_q": 2, "attn_k": 1}))
    assert set(named) == {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.input_layernorm.weight"}
    assert mx.array_equal(named["model.layers.0.self_attn.q_proj.weight"],
                          in_halves(dense(weights, "blk.0.attn_q"), 2))
    assert our_name("token_embd") == "model.embed_tokens"
