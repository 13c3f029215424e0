"""An unmodified mlx-lm model as verifier: taps, prefill and borrowed tables."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers import VOCAB, build_model, embedded_pair, pair_of, random_tokens, tiny_model
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache

from mlx_dspark.errors import PairError
from mlx_dspark.structs import KVOptions
from mlx_dspark.target import Target, tapped

KINDS = ("qwen3", "llama", "gemma3_text", "gemma4_text")
TEXT = random_tokens(16, seed=3)
ROWS = mx.array([TEXT])
TAPS = {"qwen3": (-1, 0, 2), "llama": (0, 1, 2), "gemma3_text": (-1, 1, 2), "gemma4_text": (-1, 0, 2, 4)}


def target_of(kind):
    return pair_of(tiny_model(kind)).target


def forward(kind, taps, tokens=ROWS):
    target = target_of(kind)
    return target.forward(tokens, target.start(KVOptions()), taps)


def same(a, b):
    return a.dtype == b.dtype and mx.array_equal(a, b).item()


@pytest.mark.parametrize("kind", KINDS)
def test_taps_change_no_logit(kind):
    model = tiny_model(kind)
    untouched = model(ROWS, cache=make_prompt_cache(model))
    assert same(forward(kind, ()).logits, untouched)
    assert same(forward(kind, TAPS[kind]).logits, untouched)
    assert forward(kind, ()).taps is None


def embeddings(model):
    scale = 8 if model.args.model_type.startswith("gemma") else 1  # sqrt(hidden_size)
    return model.model.embed_tokens(ROWS) * scale


def layer_by_layer(model):
    """Embedding output, then the output of every layer, without a cache."""
    pattern = getattr(model.args, "sliding_window_pattern", None)
    window = create_attention_mask(embeddings(model), None, window_size=getattr(model.args, "sliding_window", None))
    states = [embeddings(model)]
    for i, layer in enumerate(model.layers):
        local = pattern is not None and i % pattern != pattern - 1
        states.append(layer(states[-1], window if local else "causal", None))
    return states


@pytest.mark.parametrize("kind", ("qwen3", "llama", "gemma3_text"))
def test_taps_are_the_layers_outputs_in_order(kind):
    states, ids = layer_by_layer(tiny_model(kind)), TAPS[kind]
    taps = mx.split(forward(kind, ids).taps, len(ids), axis=-1)
    for i, tap in zip(ids, taps):
        assert same(tap, states[i + 1]), f"tap {i}"
    assert not same(states[1], states[2])


@pytest.mark.parametrize("kind", ("qwen3", "gemma3_text", "gemma4_text"))
def test_tap_minus_one_is_what_enters_layer_0(kind):
    wanted = embeddings(tiny_model(kind))
    assert same(forward(kind, (-1,)).taps, wanted)
    both = forward(kind, (-1, 0)).taps
    assert same(both[..., :64], wanted) and same(both[..., 64:], forward(kind, (0,)).taps)


def test_gemma4_taps_lead_to_the_logits():
    """Its layers return tuples. The last layer's tap, normed, headed and capped, is the model's output."""
    model = tiny_model("gemma4_text")
    assert isinstance(model.layers[0](embeddings(model), "causal", None, per_layer_input=mx.zeros((1, 16, 8))), tuple)
    found = forward("gemma4_text", (0, 3, 5))
    first, middle, last = mx.split(found.taps, 3, axis=-1)
    logits = model.model.embed_tokens.as_linear(model.model.norm(last))
    cap = model.final_logit_softcapping
    assert same(logits if cap is None else mx.tanh(logits / cap) * cap, found.logits)
    assert not same(first, middle) and not same(middle, last)


def test_a_tuple_output_is_passed_on_and_its_first_item_recorded():
    class Layer(nn.Module):
        def __call__(self, x, scale, *, shift=0):
            return x * scale + shift, "keys and values"

    layers = [Layer(), Layer()]
    with tapped(layers, (-1, 0)) as sink:
        out = layers[0](mx.array([1.0, 2.0]), 3, shift=1)
    assert out[1] == "keys and values" and same(sink[0], out[0]) and same(sink[0], mx.array([4.0, 7.0]))
    assert same(sink[-1], mx.array([1.0, 2.0]))


def shape_of(model):
    return [type(layer) for layer in model.layers], [name for name, _ in tree_flatten(model.parameters())]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tapped_model_keeps_its_names_and_gets_its_classes_back(kind):
    model = tiny_model(kind)
    classes, names = shape_of(model)
    with tapped(model.layers, TAPS[kind]):
        assert shape_of(model)[1] == names
        changed = [type(layer) is not before for layer, before in zip(model.layers, classes)]
        assert changed == [i in TAPS[kind] or (i == 0 and -1 in TAPS[kind]) for i in range(len(classes))]
        assert all(isinstance(layer, before) for layer, before in zip(model.layers, classes))
    assert shape_of(model) == (classes, names)
    assert not any("_tap" in vars(layer) for layer in model.layers)


def test_classes_come_back_when_the_forward_raises():
    target = target_of("qwen3")
    before = shape_of(target.model)
    broken = SimpleNamespace(layers=[object()] * len(target.layers))  # layers cannot use these as caches
    with pytest.raises((AttributeError, TypeError)):
        target.forward(ROWS, broken, (-1, 0, 2))
    assert shape_of(target.model) == before
    with pytest.raises(ZeroDivisionError), tapped(target.layers, (1,)):
        1 / 0  # noqa: B018
    assert shape_of(target.model) == before


def prefill(target, tokens, taps, step):
    """Returns (last row, cache, all observed tokens, all observed taps, rows per call)."""
    seen = []
    cache = target.start(KVOptions())
    last = target.prefill(tokens, cache, taps, step, lambda ids, rows: seen.append((ids, rows)))
    ids = [token for chunk, _ in seen for token in chunk[0].tolist()]
    rows = mx.concatenate([rows for _, rows in seen], axis=1) if taps else None
    return last, cache, ids, rows, [chunk.shape[1] for chunk, _ in seen]


@pytest.mark.parametrize("step, calls", [(1, [1] * 16), (7, [7, 7, 1, 1]), (15, [15, 1]), (2048, [15, 1])])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_observes_every_row_in_order(kind, step, calls):
    whole = forward(kind, TAPS[kind])
    last, cache, ids, rows, sizes = prefill(target_of(kind), TEXT, TAPS[kind], step)
    assert ids == TEXT and sizes == calls and cache.offset == len(TEXT)
    assert rows.shape == whole.taps.shape
    assert mx.allclose(rows, whole.taps, rtol=1e-5, atol=1e-4).item()
    assert last.logits.shape == (1, 1, VOCAB)
    assert mx.allclose(last.logits, whole.logits[:, -1:], rtol=1e-5, atol=1e-4).item()
    assert same(last.taps, rows[:, -1:])


@pytest.mark.parametrize("kind", ("qwen3", "llama"))
@pytest.mark.parametrize("step", (1, 7, 2048))
def test_prefill_is_bit_identical_without_a_window(kind, step):
    whole = forward(kind, TAPS[kind])
    last, _, _, rows, _ = prefill(target_of(kind), TEXT, TAPS[kind], step)
    assert same(rows, whole.taps) and same(last.logits, whole.logits[:, -1:])


def test_prefill_of_a_long_prompt_crosses_the_window():
    text = random_tokens(100, seed=4)
    whole = forward("gemma3_text", (1,), mx.array([text]))
    last, _, ids, rows, _ = prefill(target_of("gemma3_text"), text, (1,), 7)
    assert ids == text
    assert mx.allclose(rows, whole.taps, rtol=1e-5, atol=1e-3).item()
    assert mx.allclose(last.logits, whole.logits[:, -1:], rtol=1e-5, atol=1e-3).item()


def test_prefill_of_one_token_without_taps():
    last, cache, ids, rows, sizes = prefill(target_of("llama"), [5], (), 2048)
    assert ids == [5] and sizes == [1] and rows is None and last.taps is None and cache.offset == 1


def test_prefill_computes_logits_for_the_last_row_only():
    model = build_model("llama", vocab_size=20_000, hidden_size=32, num_hidden_layers=2)
    target, all_logits = pair_of(model).target, 513 * 20_000 * 4
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    last = prefill(target, random_tokens(513), (0,), 256)[0]
    mx.eval(last.logits)
    assert mx.get_peak_memory() - before < all_logits / 4

    mx.reset_peak_memory()  # the control
    mx.eval(model(mx.array([random_tokens(513)])))
    assert mx.get_peak_memory() - before > all_logits


@pytest.mark.parametrize("kind", ("qwen3", "llama", "gemma3_text", "embedded"))  # tied, untied, untied, tied and 8-bit
def test_embedding_and_head_are_the_models_own(kind):
    target = embedded_pair().target if kind == "embedded" else target_of(kind)
    model = target.model
    assert same(target.embed(ROWS), model.model.embed_tokens(ROWS))
    assert same(target.head(model.model(ROWS)), model(ROWS))
    target.require_tables()


def test_gemma3_ties_its_head_when_the_checkpoint_has_none():
    model = build_model("gemma3_text")
    model.sanitize({})  # what loading a checkpoint without lm_head does
    assert "lm_head" not in model
    assert same(pair_of(model).target.head(model.model(ROWS)), model(ROWS))


def test_gemma4_head_is_before_the_soft_cap():
    model = build_model("gemma4_text", final_logit_softcapping=2.0)
    raw = pair_of(model).target.head(model.model(ROWS))
    assert mx.abs(raw).max().item() > 2
    assert same(mx.tanh(raw / 2.0) * 2.0, model(ROWS))


@pytest.mark.parametrize("kind", KINDS)
def test_sizes(kind):
    target = target_of(kind)
    assert (target.vocab_size, target.hidden_size, target.context, target.dtype) == (VOCAB, 64, 4096, mx.float32)


def test_sizes_of_a_quantised_target():
    target = embedded_pair().target
    assert (target.vocab_size, target.hidden_size, target.context) == (4096, 256, 2048)


@pytest.mark.parametrize("dtype", (mx.bfloat16, mx.float16))
def test_dtype_is_that_of_the_activations(dtype):
    assert pair_of(build_model("llama", dtype=dtype)).target.dtype == dtype


def test_context_may_be_in_a_text_config_or_unknown():
    model = tiny_model("llama")
    assert Target(model, {"text_config": {"max_position_embeddings": 77}}, "x").context == 77
    assert Target(model, {}, "x").context is None


def test_a_model_without_known_tables_cannot_lend_them():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(4, 4)]

    target = Target(Odd(), {}, "odd/model")
    assert target.vocab_size is None and target.hidden_size is None
    with pytest.raises(PairError, match="odd/model"):
        target.require_tables()
