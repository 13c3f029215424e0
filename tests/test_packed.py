"""Several requests in one forward: logits, taps and caches are those of each request alone."""

import mlx.core as mx
import pytest
from helpers import build_model, pair_of, random_tokens, tiny_model

from mlx_dspark.errors import CacheError
from mlx_dspark.serve import packed
from mlx_dspark.serve.packed import (
    LAYOUTS,
    PACKED,
    RECTANGULAR,
    Shares,
    can_be_rectangular,
    check_sharing,
    forward_many,
)
from mlx_dspark.structs import KVOptions

TAPS = (-1, 1, 2)
PROMPTS = [random_tokens(length, seed=length) for length in (5, 40, 17)]
CASES = [("qwen3", PACKED, KVOptions()), ("qwen3", RECTANGULAR, KVOptions()), ("llama", RECTANGULAR, KVOptions()),
         ("gemma3_text", PACKED, KVOptions()), ("gemma4_text", PACKED, KVOptions()),
         ("llama", PACKED, KVOptions(8, 32, 0)), ("qwen3", PACKED, KVOptions(4, 64, 20))]  # fmt: skip
IDS = [f"{kind}-{layout}-kv{kv.bits}" for kind, layout, kv in CASES]


def prefilled(target, kv, prompts=PROMPTS):
    caches = [target.start(kv) for _ in prompts]
    for prompt, cache in zip(prompts, caches, strict=True):
        target.forward(mx.array([prompt]), cache)
        cache.advance(len(prompt), len(prompt))
    return caches


def steps():
    """Rows of every request and how many are kept, step by step: one-row steps follow rejections."""
    for step in range(10):
        rows = [(step * b) % 4 + 1 for b in range(1, 4)]
        yield [random_tokens(n, seed=100 + step) for n in rows], [max(1, n - step % 3) for n in rows]


def apart(a, b):
    return mx.abs(a - b).max().item()


@pytest.mark.parametrize(("kind", "layout", "kv"), CASES, ids=IDS)
def test_every_request_gets_what_it_gets_alone_also_after_rejections(kind, layout, kv):
    target = pair_of(tiny_model(kind)).target
    together, alone = prefilled(target, kv), prefilled(target, kv)
    for rows, kept in steps():
        many = forward_many(target, [mx.array([own]) for own in rows], together, TAPS, layout)
        for own, cache, twin, got, keep in zip(rows, together, alone, many, kept, strict=True):
            wanted = target.forward(mx.array([own]), twin, TAPS)
            assert got.logits.shape == wanted.logits.shape and got.taps.shape == wanted.taps.shape
            assert apart(got.logits, wanted.logits) < 1e-4  # logits of size 10
            assert apart(got.taps, wanted.taps) < 1e-4
            cache.advance(len(own), keep)
            twin.advance(len(own), keep)
    assert [cache.offset for cache in together] == [cache.offset for cache in alone]


@pytest.mark.parametrize(("kind", "layout", "kv"), [case for case in CASES if case[1] == PACKED],
                         ids=[name for name in IDS if PACKED in name])
def test_shares_that_only_the_device_knows(kind, layout, kv):
    """Rows that are not run leave no trace: what is kept behaves as in a cache that never saw them."""
    target = pair_of(tiny_model(kind)).target
    together, alone = prefilled(target, kv), prefilled(target, kv)
    for step, (rows, kept) in enumerate(steps()):
        there = [own + [7] * (1 + (step + b) % 3) * (len(own) > 1) for b, own in enumerate(rows)]
        shares = Shares(mx.array([len(own) for own in rows], dtype=mx.int32), sum(map(len, rows)))
        many = forward_many(target, [mx.array([own]) for own in there], together, TAPS, shares=shares)
        for own, filled, cache, twin, got, keep in zip(rows, there, together, alone, many, kept, strict=True):
            wanted = target.forward(mx.array([own]), twin, TAPS)
            assert got.logits.shape[1] == got.taps.shape[1] == len(filled)
            assert apart(got.logits[:, : len(own)], wanted.logits) < 1e-4  # logits of size 10
            assert apart(got.taps[:, : len(own)], wanted.taps) < 1e-4
            cache.advance(len(filled), keep)
            twin.advance(len(own), keep)
    assert [cache.offset for cache in together] == [cache.offset for cache in alone]


def test_rows_that_are_not_run_cost_no_matrix_product(monkeypatch):
    """Five of nine rows enter the model."""
    target, seen = pair_of(tiny_model("qwen3")).target, []
    run = target.run
    monkeypatch.setattr(target, "run", lambda tokens, *more: seen.append(tokens) or run(tokens, *more), raising=False)
    tokens = [mx.array([[1, 2, 3, 4]]), mx.array([[5]]), mx.array([[6, 7, 8, 9]])]
    forward_many(target, tokens, prefilled(target, KVOptions()), shares=Shares(mx.array([3, 1, 1]), 5))
    assert seen[-1].tolist() == [[1], [2], [3], [5], [6]]


def test_the_model_is_left_as_it_was():
    target = pair_of(tiny_model("qwen3")).target
    module = __import__("mlx_lm.models.qwen3", fromlist=["scaled_dot_product_attention"])
    before = module.scaled_dot_product_attention
    forward_many(target, [mx.array([[1, 2]]), mx.array([[3]])], prefilled(target, KVOptions(), PROMPTS[:2]))
    assert module.scaled_dot_product_attention is before


def test_attention_alone_still_works_while_it_is_shared():
    target = pair_of(tiny_model("qwen3")).target
    [cache, twin] = prefilled(target, KVOptions(), [PROMPTS[0], PROMPTS[0]])
    wanted = target.forward(mx.array([[1, 2, 3]]), twin).logits
    with packed._shared_attention(target, packed._Packed([1, 1])):
        assert apart(target.forward(mx.array([[1, 2, 3]]), cache).logits, wanted) == 0


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3_text", "gemma4_text"])
def test_models_that_share_pass_the_check(kind):
    check_sharing(pair_of(tiny_model(kind)).target)


@pytest.mark.parametrize("kind", ["lfm2", "longcat_flash"])
def test_models_that_do_not_are_refused_with_the_remedy(kind):
    with pytest.raises(CacheError, match="mlx_dspark.generate"):
        check_sharing(pair_of(tiny_model(kind)).target)


def test_a_model_that_ignores_positions_is_found_out():
    """Its rows would all sit at position 0: logits differ, and no exception says so."""
    model = build_model("qwen3")
    for layer in model.layers:
        rope = layer.self_attn.rope
        layer.self_attn.rope = lambda x, offset=0, rope=rope: rope(x, offset=offset if isinstance(offset, int) else 0)
    with pytest.raises(CacheError, match="other logits"):
        check_sharing(pair_of(model).target)


@pytest.mark.parametrize(("kind", "kv", "able"), [
    ("qwen3", KVOptions(), True), ("gemma3_text", KVOptions(), False), ("llama", KVOptions(8, 32, 0), False),
])  # fmt: skip
def test_which_caches_can_lie_side_by_side(kind, kv, able):
    target = pair_of(tiny_model(kind)).target
    assert can_be_rectangular(prefilled(target, kv)) is able


def test_rows_of_a_rectangle_are_padded_and_packed_ones_are_not():
    shapes = {}
    for layout in LAYOUTS:
        rows = packed._LAYOUTS[layout]([1, 4, 2])
        shapes[layout] = rows.join_tokens([mx.zeros((1, n), dtype=mx.int32) for n in (1, 4, 2)]).shape
    assert shapes == {PACKED: (7, 1), RECTANGULAR: (3, 4)}
