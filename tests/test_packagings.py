"""Recipe O: one head in every packaging drafts the same; what decides a packaging; what is refused; bad input."""

import copy
import dataclasses
import json
import random
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_dspark.convert import open_checkpoint
from mlx_dspark.convert.detect import detect, is_draft
from mlx_dspark.convert.write import Source, write_draft
from packagings import (
    BLOCK,
    GEOMETRY,
    GROUP,
    HEAD_DIM,
    HIDDEN,
    KERNEL,
    NO_HEADS,
    TAPS,
    TOP_K,
    VOCAB,
    deepspec_config,
    dflash2_head,
    drafted,
    make_head,
    save,
    taps_of,
    write_deepspec,
    write_deepspec_sharded,
    write_dflash2,
    write_liquid,
    write_openbmb,
    write_own,
    write_specforge,
    write_speculators,
    write_zlab,
)

from mlx_dspark.draft import BlockDraft, DraftSpec, Eagle3Draft
from mlx_dspark.draft.spec import MARKOV_TYPES, RopeSpec, SelectorSpec
from mlx_dspark.errors import FormatError
from mlx_dspark.hub import resolve
from mlx_dspark.load import read_draft
from mlx_dspark.sampling import make_rule
from mlx_dspark.structs import Sampling

HEAD = make_head()
BARE = make_head(heads=NO_HEADS)  # what DFlash is


def distance(one, other):
    return mx.abs(one - other).max().item()


# --- one head, every packaging ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return drafted(read_draft(write_deepspec(tmp_path_factory.mktemp("deepspec"), HEAD)), HEAD)


SAME = {
    "deepspec-sharded": write_deepspec_sharded,
    "openbmb": write_openbmb,
    "specforge": write_specforge,
    "specforge-full-mha-key-absent": lambda folder, head: write_specforge(folder, head, layer_types=None),
    "liquid-interleaved": write_liquid,
    "liquid-neox": lambda folder, head: write_liquid(folder, head, permuted=False, rope_is_neox_style=True),
    "speculators": write_speculators,
    "speculators-key-absent": lambda folder, head: write_speculators(folder, head, sample_from_anchor=None),
    "speculators-borrowed-tables": lambda folder, head: write_speculators(folder, head, own_tables=False),
    "own": lambda folder, head: write_own(folder / "own", write_deepspec(folder / "source", head)),
    "own-from-speculators": lambda folder, head: write_own(folder / "own", write_speculators(folder / "source", head)),
    "own-from-liquid": lambda folder, head: write_own(folder / "own", write_liquid(folder / "source", head)),
    "own-twice": lambda folder, head: write_own(
        folder / "b", write_own(folder / "a", write_specforge(folder / "source", head))),
}


@pytest.mark.parametrize("write", SAME.values(), ids=SAME.keys())
def test_every_packaging_drafts_the_same(write, reference, tmp_path):
    draft = read_draft(write(tmp_path, HEAD))
    assert draft.taps == TAPS and draft.gamma == BLOCK and draft.has_confidence
    tokens, logits, confidence = drafted(draft, HEAD)
    assert tokens.tolist() == reference[0].tolist()
    assert distance(logits, reference[1]) < 1e-5
    assert distance(confidence, reference[2]) < 1e-5


@pytest.mark.parametrize("bits, most", [(8, 0.5), (4, 8.0)])
def test_quantised_folder_drafts_nearly_the_same(bits, most, reference, tmp_path):
    draft = read_draft(write_own(tmp_path / "out", write_deepspec(tmp_path / "in", HEAD), bits))
    assert draft.backbone.fc.bits == bits
    _, logits, _ = drafted(draft, HEAD)
    assert 0 < distance(logits[0], reference[1][0]) < most  # the first slot depends on no choice before it


def test_zlab_predicts_from_the_mask_rows(tmp_path):
    """The same backbone with a bare anchor: one proposal less, each from the row after."""
    dflash = drafted(read_draft(write_deepspec(tmp_path / "a", BARE)), BARE)
    draft = read_draft(write_zlab(tmp_path / "b", BARE))
    assert draft.gamma == BLOCK - 1 and not draft.has_confidence
    tokens, logits, _ = drafted(draft, BARE)
    rows = [row for row in range(2 * BLOCK) if row % BLOCK]
    assert distance(logits, dflash[1][mx.array(rows)]) < 1e-5
    assert tokens.tolist() == [dflash[0].tolist()[row] for row in rows]


def test_speculators_may_leave_the_anchor_bare(tmp_path):
    draft = read_draft(write_speculators(tmp_path, HEAD, sample_from_anchor=False))
    assert draft.gamma == BLOCK - 1
    state = draft.start()
    draft.observe(state, mx.zeros((1, 9), dtype=mx.int32), taps_of(TAPS, 9, 0))
    hidden = draft.block_hidden([state], mx.array([7]))
    first = draft.tables.logits(hidden)[0, 1] + draft.markov_head.markov_w2(draft.markov_head.markov_w1(mx.array(7)))
    assert distance(drafted(draft, HEAD)[1][0], first) < 1e-5


MISTAKES = {
    "taps-not-shifted": (lambda f: write_speculators(f, HEAD, shift=0), 0.1),
    "taps-shifted-twice": (lambda f: write_deepspec(f, HEAD, target_layer_ids=[t + 1 for t in TAPS[:2]] + [4]), 0.1),
    "anchor-left-bare": (lambda f: write_speculators(f, HEAD, sample_from_anchor=False), 0.1),
    "pairs-not-interleaved": (lambda f: write_liquid(f, HEAD, permuted=False), 0.1),
    "pairs-wrongly-interleaved": (lambda f: write_liquid(f, HEAD, rope_is_neox_style=True), 0.1),
    "another-theta": (lambda f: write_specforge(f, HEAD, rope_theta=1e6), 0.01),
    "another-mask": (lambda f: write_deepspec(f, HEAD, mask_token_id=3), 0.01),
}


@pytest.mark.parametrize("write, least", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_wrong_guess_changes_the_logits(write, least, reference, tmp_path):
    """None of these crashes: only numbers tell. (Slot 1 conditions on a choice, so the first two rows are compared.)"""
    logits = drafted(read_draft(write(tmp_path)), HEAD)[1]
    assert distance(logits[:2], reference[1][:2]) > least


def test_key_absent_in_the_name_of_speculative_tokens(tmp_path):
    method = {"proposal_methods": [{"speculative_tokens": BLOCK - 1}], "algorithm": "dspark"}
    folder = write_speculators(tmp_path / "a", HEAD, sample_from_anchor=None, speculators_config=method)
    assert open_checkpoint(folder).spec.gamma == BLOCK - 1
    none = {"algorithm": "dspark"}
    folder = write_speculators(tmp_path / "b", HEAD, sample_from_anchor=None, speculators_config=none)
    assert open_checkpoint(folder).spec.gamma == BLOCK - 1


@pytest.mark.parametrize("index", [0, 5])
def test_interleaved_rope_by_hand(index, tmp_path):
    """q and k of one position turned pair by pair in float64."""
    attention = read_draft(write_liquid(tmp_path, HEAD)).backbone.layers[0].self_attn
    x = np.random.default_rng(1).normal(size=(HEAD_DIM,))
    angles = index * 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    even, odd = x[0::2], x[1::2]
    wanted = np.stack([even * np.cos(angles) - odd * np.sin(angles), even * np.sin(angles) + odd * np.cos(angles)], 1)
    turned = attention._rope(mx.array(x, dtype=mx.float32)[None, None, None], offset=index)
    np.testing.assert_allclose(np.array(turned)[0, 0, 0], wanted.flatten(), atol=1e-5)


# --- a reduced vocabulary -----------------------------------------------------------------------------------------

REACHED = mx.array([0, 1, 5, 6, 7, 20, 21, 22, 50, 51, 70, 71, 72, 73, 90, 95])


def test_reduced_vocabulary_speaks_target_ids(tmp_path):
    draft = read_draft(write_speculators(tmp_path / "a", HEAD, reduced=REACHED))
    whole = read_draft(write_deepspec(tmp_path / "b", HEAD))
    tokens, logits, _ = drafted(draft, HEAD)
    outside = np.setdiff1d(np.arange(VOCAB), np.array(REACHED))
    assert set(tokens.tolist()) <= set(REACHED.tolist())
    assert np.isneginf(np.array(logits)[:, outside]).all()
    assert distance(logits[0][REACHED], drafted(whole, HEAD)[1][0][REACHED]) < 1e-5
    assert logits.shape[-1] == VOCAB


def test_reduced_vocabulary_keeps_sampling_exact():
    """What is committed follows p although q is zero for most tokens p can say."""
    draws, size = 40_000, 12
    p_logits = 1.5 * mx.random.normal((size,), key=mx.random.key(1))
    q_logits = mx.where(mx.arange(size) % 3 == 0, mx.random.normal((size,), key=mx.random.key(2)), -mx.inf)
    rule = make_rule(Sampling(temperature=1.0, seed=3))
    key, drafting, judging = rule.split(rule.start())
    token, log_q = rule.picker(None, drafting, 1)(mx.broadcast_to(q_logits, (draws, size)), [])
    assert not mx.isnan(log_q).any().item()
    logits = mx.broadcast_to(p_logits, (draws, 2, size))
    verdict = rule.judge(token[:, None], log_q[:, None], logits, None, judging)
    drawn = np.bincount(np.array(verdict.tokens[:, 0]), minlength=size) / draws
    assert np.abs(drawn - np.array(mx.softmax(p_logits))).max() < 0.012
    assert 0.05 < verdict.accepted.mean().item() < 0.95


# --- what a row sees -----------------------------------------------------------------------------------------------


def naive_backbone(draft, block, context, windows, causal):
    """All rows at once with an explicit mask, in numpy float64. block [T, D], context [C, D]."""
    spec, weights = draft.spec, {name: np.array(w, dtype=np.float64) for name, w in tree_flatten(draft.parameters())}
    count = len(context)
    positions = np.arange(count + len(block))
    rows = positions[count:]
    for layer in range(spec.num_layers):
        def w(name, layer=layer):
            return weights[f"backbone.layers.{layer}.{name}.weight"]

        normed = rms(block, w("input_layernorm"))
        both = np.concatenate([context, normed])
        q = turn(rms(heads(normed @ w("self_attn.q_proj").T), w("self_attn.q_norm")), rows)
        k = turn(rms(heads(both @ w("self_attn.k_proj").T), w("self_attn.k_norm")), positions)
        v = heads(both @ w("self_attn.v_proj").T)
        apart = rows[:, None] - positions[None]
        seen = np.ones(apart.shape, dtype=bool)
        if windows[layer] is not None:
            seen &= np.abs(apart) < windows[layer]
        if causal[layer]:
            seen &= apart >= 0
        group = spec.num_heads // spec.num_kv_heads
        scores = np.einsum("thd,shd->hts", q, k.repeat(group, 1)) * spec.head_dim**-0.5
        scores = np.where(seen, scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hts,shd->thd", scores / scores.sum(-1, keepdims=True), v.repeat(group, 1))
        block = block + mixed.reshape(len(block), -1) @ w("self_attn.o_proj").T
        inner = rms(block, w("post_attention_layernorm"))
        gate = inner @ w("mlp.gate_proj").T
        block = block + (gate / (1 + np.exp(-gate)) * (inner @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
    return rms(block, weights["backbone.norm.weight"])


def rms(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def heads(x):
    return x.reshape(len(x), -1, HEAD_DIM)


PLAIN = 10000.0 ** (-np.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)


def turn(x, positions, frequencies=PLAIN):
    """Half-split RoPE of [T, H, d]."""
    angles = (positions[:, None] * frequencies)[:, None]
    one, other = np.split(x, 2, axis=-1)
    return np.concatenate([one * np.cos(angles) - other * np.sin(angles),
                           other * np.cos(angles) + one * np.sin(angles)], axis=-1)


SIGHT = {
    "full": ({}, (None, None), (False, False)),
    "sliding-causal": ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}, (4, None),
                       (True, False)),
    "all-sliding": ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, (8, 8), (True, True)),
    "window-of-one": ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 1}, (1, 1), (True, True)),
    "sliding-non-causal": ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3,
                            "sliding_window_non_causal": True}, (3, None), (False, False)),
}


@pytest.mark.parametrize("rows", [(2,), (7,), (30,), (5, 1, 6, 20)], ids=["short", "edge", "long", "rounds"])
@pytest.mark.parametrize("changes, windows, causal", SIGHT.values(), ids=SIGHT.keys())
def test_rows_see_what_the_config_says(rows, changes, windows, causal, tmp_path):
    draft = read_draft(write_speculators(tmp_path, HEAD, **changes))
    assert (draft.spec.windows, draft.spec.causal) == (windows, causal)
    caches, seen = draft.backbone.make_cache(), []
    for index, count in enumerate(rows):
        block = mx.random.normal((1, BLOCK, HIDDEN), key=mx.random.key(index))
        context = draft.backbone.fuse(taps_of(TAPS, count, index))
        seen.append(np.array(context[0], dtype=np.float64))
        out = draft.backbone(block, [context], [caches])
        wanted = naive_backbone(draft, np.array(block[0], dtype=np.float64), np.concatenate(seen), windows, causal)
        np.testing.assert_allclose(np.array(out[0]), wanted, atol=2e-4)


def test_zlab_layers_slide_causally(tmp_path):
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    spec = open_checkpoint(write_zlab(tmp_path / "a", BARE, **layers)).spec
    assert (spec.windows, spec.causal) == ((4, None), (True, False))
    spec = open_checkpoint(write_zlab(tmp_path / "b", BARE, **layers, is_causal=False)).spec
    assert spec.causal == (False, False)


def test_deepspec_ignores_the_targets_windows(tmp_path):
    changes = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 2}
    spec = open_checkpoint(write_deepspec(tmp_path, HEAD, **changes)).spec
    assert spec.windows == (None, None)


YARN = {"factor": 8.0, "original_max_position_embeddings": 64}
YARNS = {
    "rope_scaling": {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "yarn", **YARN}},
    "type-key": {"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", **YARN}},
    "rope_parameters": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **YARN}},
    "betas": {"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2}},
}


@pytest.mark.parametrize("changes", YARNS.values(), ids=YARNS.keys())
def test_yarn_frequencies(changes, tmp_path):
    """Fast dimensions keep their frequency, slow ones are divided by the factor, a ramp lies between."""
    attention = read_draft(write_specforge(tmp_path, HEAD, **changes)).backbone.layers[0].self_attn
    stored = changes.get("rope_scaling") or changes["rope_parameters"]

    def dimension(rotations):  # whose wave turns so often within the original context
        return HEAD_DIM * np.log(64 / (rotations * 2 * np.pi)) / (2 * np.log(10000.0))

    low = max(np.floor(dimension(stored.get("beta_fast", 32))), 0)
    high = min(np.ceil(dimension(stored.get("beta_slow", 1))), HEAD_DIM - 1)
    slow = np.clip((np.arange(HEAD_DIM // 2) - low) / max(high - low, 0.001), 0, 1)
    frequencies = PLAIN * (1 - slow) + PLAIN / 8 * slow
    x = np.random.default_rng(0).normal(size=(3, 1, HEAD_DIM))
    wanted = turn(x, 100 + np.arange(3), frequencies) * (0.1 * np.log(8) + 1)
    turned = attention._rope(mx.array(x, dtype=mx.float32).swapaxes(0, 1)[None], offset=100)
    np.testing.assert_allclose(np.array(turned)[0].swapaxes(0, 1), wanted, atol=2e-4)


NESTED_THETA = {"full_attention": {"rope_theta": 10000.0, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 5.0}}
THETAS = {
    "flat": {"rope_theta": 10000.0},
    "old-and-new": {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 10000.0}},
    "by-layer-type": {"rope_theta": None, "rope_parameters": NESTED_THETA},
    "scaling-null": {"rope_theta": 10000.0, "rope_scaling": None},
    "scaling-default": {"rope_theta": 10000.0, "rope_scaling": {"type": "default"}},
}


@pytest.mark.parametrize("changes", THETAS.values(), ids=THETAS.keys())
def test_spellings_of_theta(changes, tmp_path):
    assert open_checkpoint(write_zlab(tmp_path, BARE, **changes)).spec.rope == RopeSpec(10000.0)


def test_leftovers_of_the_target_do_not_change_the_rope(tmp_path, reference):
    nested = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25, "mrope_section": [2, 3, 3]}
    draft = read_draft(write_deepspec(tmp_path, HEAD, rope_parameters=nested, attn_output_gate=True))
    assert distance(drafted(draft, HEAD)[1], reference[1]) == 0


# --- DFlash2 ---------------------------------------------------------------------------------------------------------

def test_dflash2_convolution(tmp_path):
    """out[t] = sum_o (base[o] + dynamic[t, o]) * x[t - o], before and after the sublayer, one dynamic per group."""
    conv = read_draft(write_dflash2(tmp_path)).backbone.layers[1].mlp_conv
    x, y = (np.random.default_rng(s).normal(size=(7, HIDDEN)) for s in (1, 2))
    base, projection = np.array(conv.base_kernel), np.array(conv.kernel_projection.weight)
    kernels = (x @ projection.T).reshape(7, 2, KERNEL, HIDDEN // GROUP)

    def convolved(rows, which):
        out = np.zeros_like(rows)
        for t in range(7):
            for o in range(min(KERNEL, t + 1)):
                out[t] += (base[which, o] + kernels[t, which, o].repeat(GROUP)) * rows[t - o]
        return out

    before, dynamic = conv.before(mx.array(x, dtype=mx.float32)[None])
    after = conv.after(mx.array(y, dtype=mx.float32)[None], dynamic)
    np.testing.assert_allclose(np.array(before[0]), convolved(x, 0), atol=1e-4)
    np.testing.assert_allclose(np.array(after[0]), convolved(y, 1), atol=1e-4)


def test_dflash2_selector_and_head(tmp_path):
    head = dflash2_head()
    draft = read_draft(write_dflash2(tmp_path, head))
    tokens, logits, _ = drafted(draft, head, rounds=1)
    state = draft.start()
    draft.observe(state, mx.zeros((1, 9), dtype=mx.int32), taps_of(TAPS, 9, 0))
    hidden = np.array(draft.block_hidden([state], mx.array([7])))[0, 1:]
    base = np.tanh(0.5 * hidden @ np.array(head.weights["lm_head.weight"]).T / 5) * 5
    before, after, projection = (np.array(head.weights[f"candidate_selector.{name}"]) for name in
                                 ("predecessor_codebook", "successor_codebook", "hidden_projection.weight"))
    token = 7
    for slot, row in enumerate(base):
        candidates = np.argsort(-row)[:TOP_K]
        wanted = np.full(VOCAB, -np.inf)
        wanted[candidates] = row[candidates] + after[candidates] @ (before[token] * (projection @ hidden[slot]))
        np.testing.assert_allclose(np.array(logits[slot]), wanted, atol=1e-4)
        token = tokens[slot].item()
        assert token == wanted.argmax()


def test_dflash2_whole_layer_uses_both_convolutions(tmp_path):
    """With base kernels 1, 0, 0 and no dynamic part the convolutions are nothing, and DFlash comes out."""
    head = dflash2_head()
    unit = mx.zeros((2, KERNEL, HIDDEN)).at[:, 0].add(1)
    weights = {name: unit if "base_kernel" in name else 0 * w if "kernel_projection" in name else w
               for name, w in head.weights.items()}
    plain = read_draft(write_zlab(tmp_path / "a", BARE))
    same = read_draft(write_dflash2(tmp_path / "b", dataclasses.replace(head, weights=weights)))
    other = read_draft(write_dflash2(tmp_path / "c", head))
    hidden = []
    for draft in (plain, same, other):
        draft.borrow(BARE.tables())
        state = draft.start()
        draft.observe(state, mx.zeros((1, 9), dtype=mx.int32), taps_of(TAPS, 9, 0))
        hidden.append(draft.block_hidden([state], mx.array([7])))
    assert distance(hidden[0], hidden[1]) < 1e-5
    assert distance(hidden[0], hidden[2]) > 0.1


# --- which packaging ------------------------------------------------------------------------------------------------

FLASH = {"mask_token_id": 1, "target_layer_ids": [0]}
ORDER = {
    "own-before-all": ({"mlx_dspark": {}, "speculators_config": {}, "kv_lora_rank": 1}, "mlx_dspark"),
    "speculators-before-specforge": ({"speculators_model_type": "dspark",
                                      "dflash_config": {"projector_type": "dspark"}}, "speculators"),
    "speculators-before-shell": ({"speculators_config": {}, "architectures": ["DSparkDraftModel"]}, "speculators"),
    "specforge-before-liquid": ({"architectures": ["Lfm2DSparkDraftModel"],
                                 "dflash_config": {"projector_type": "dspark"}}, "SpecForge"),
    "specforge-before-deepspec-keys": (
        {**deepspec_config(HEAD), "architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark"}},
        "SpecForge"),
    "liquid-before-deepspec-keys": ({**deepspec_config(HEAD), "architectures": ["Lfm2DSparkDraftModel"],
                                     "dflash_config": FLASH}, "LiquidAI"),
    "deepspec-dflash-is-no-zlab": ({**deepspec_config(BARE), "dflash_config": FLASH}, "DeepSpec"),
    "zlab-before-deepspec-keys": ({**deepspec_config(BARE), "architectures": ["DFlashDraftModel"]}, "z-lab DFlash"),
    "shell-with-deepspec-keys": ({**deepspec_config(HEAD), "architectures": ["DSparkDraftModel"]}, "DeepSpec"),
    "eagle3": ({"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0]}, "DeepSpec Eagle3"),
}


@pytest.mark.parametrize("config, name", ORDER.values(), ids=ORDER.keys())
def test_detection_order(config, name):
    packaging = detect(config, (), "x")
    assert name == packaging.NAME
    assert is_draft(config)


@pytest.mark.parametrize("config", [{"architectures": ["Qwen3ForCausalLM"], **GEOMETRY}, {}, {"architectures": None}])
def test_a_whole_model_is_no_draft(config):
    assert not is_draft(config)


# --- what is refused ----------------------------------------------------------------------------------------------


def gemma(**changes):
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    return {**deepspec_config(HEAD, architectures=["Gemma4DSparkModel"], model_type="gemma4_text"),
            "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
            "rope_parameters": {"full_attention": full}, **changes}  # fmt: skip


def eagle3(**changes):
    return deepspec_config(HEAD, architectures=["Qwen3Eagle3Model"], target_layer_ids=[0, 1, 2, 3, 4], ttt_length=7,
                           num_hidden_layers=1, **changes)


def nested(**changes):
    return {"architectures": ["DSparkDraftModel"], **GEOMETRY,
            "dflash_config": {"projector_type": "dspark", **FLASH, **changes}}


DEEP = deepspec_config(HEAD)
REFUSED = {  # config, further tensors, what the message must say
    "v4-keys": ({**DEEP, "dspark_block_size": 5}, (), ["DeepSeek-V4", "hyper-connections"]),
    "v4-taps": ({**DEEP, "dspark_target_layer_ids": [40]}, (), ["DeepSeek-V4"]),
    "v4-tensors": (DEEP, ["mtp.0.attn.wq_a.weight"], ["DeepSeek-V4", "mixture-of-experts"]),
    "mla-mode": (nested(attention_mode="mla"), (), ["MLA", "Kimi"]),
    "mla-rank": ({**DEEP, "kv_lora_rank": 512}, (), ["MLA"]),
    "kda": (nested(attention_mode="kda"), (), ["'kda'", "grouped-query"]),
    "mixed-attention": (nested(attention_modes=["gqa", "kda"]), (), ["'mixed'"]),
    "qwen35": ({**DEEP, "architectures": ["Qwen35DSparkModel"]}, (), ["Qwen3.5", "gated queries"]),
    "log-snr": ({**DEEP, "log_snr_conditioning": True}, (), ["log-SNR", "PrismML"]),
    "sinks-key": ({**DEEP, "attention_sink_bias": True}, (), ["attention sinks", "NVIDIA"]),
    "sinks-tensor": (DEEP, ["layers.0.self_attn.sinks"], ["attention sinks"]),
    "speculators-eagle3": ({"speculators_model_type": "eagle3"}, (), ["'eagle3'", "dspark and dflash"]),
    "speculators-eagle3-config": ({"speculators_config": {"algorithm": "eagle3"}}, (), ["'eagle3'"]),
    "dynamic-rope": ({**DEEP, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, (),
                     ["'dynamic'", "yarn"]),
    "llama3-rope": ({**DEEP, "rope_scaling": {"type": "llama3"}, "rope_parameters": None, "rope_theta": 1e4}, (),
                    ["'llama3'"]),
    "unknown": ({"architectures": ["SomeDraftModel"], **GEOMETRY}, (), ["'SomeDraftModel'", "docs/checkpoints.md"]),
    "no-architecture": (GEOMETRY, (), ["None", "docs/checkpoints.md"]),
    "eagle3-three-taps": ({**eagle3(), "target_layer_ids": [0, 1, 2]}, (), ["five layers", "3"]),
    "eagle3-two-layers": ({**eagle3(), "num_hidden_layers": 2}, (), ["one layer", "2"]),
    "gemma4-moe": (gemma(enable_moe_block=True), (), ["MoE", "Gemma4"]),
    "gemma4-per-layer-input": (gemma(hidden_size_per_layer_input=8), (), ["per-layer inputs"]),
    "gemma4-rope": (gemma(rope_parameters={"full_attention": {"rope_type": "yarn", "rope_theta": 1e6}}), (),
                    ["'yarn'", "Gemma4"]),
    "gemma4-no-global-head": (gemma(global_head_dim=None), (), ["global_head_dim"]),
    "last-layer-tapped": ({**DEEP, "target_layer_ids": [0, 2, 5]}, (), ["[0, 2, 5]", "last of 6"]),
    "mask-outside": ({**DEEP, "mask_token_id": VOCAB}, (), ["96", "vocabulary"]),
    "markov-type": ({**DEEP, "markov_head_type": "lstm"}, (), ["'lstm'", "vanilla, gated and rnn"]),
    "unknown-layer-type": (
        {**nested(), "layer_types": ["linear_attention"] * 2, "rope_theta": 1e4, "block_size": 4, "markov_rank": 0},
        (), ["linear_attention"]),
    "speculative-tokens": ({"speculators_model_type": "dspark", **GEOMETRY, "rope_theta": 1e4, "block_size": 8,
                            "aux_hidden_state_layer_ids": [1], "mask_token_id": 1,
                            "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}}, (),
                           ["3", "block_size 8"]),
    "missing-tensor": ({**DEEP, "num_hidden_layers": 3, "layer_types": None}, (), ["layers.2", "missing"]),
    "spare-tensor": (DEEP, ["layers.0.self_attn.g_proj.weight"], ["g_proj", "not part"]),
    "other-shape": ({**DEEP, "intermediate_size": 97}, (), ["[96, 64]", "[97, 64]"]),
    "quantization-section": ({**DEEP, "quantization": {"bits": 4}}, (), ["quantization"]),
}


@pytest.mark.parametrize("config, tensors, words", REFUSED.values(), ids=REFUSED.keys())
def test_refusals_name_what_it_is_and_what_is_missing(config, tensors, words, tmp_path):
    folder = save(tmp_path / "draft", config, {**HEAD.weights, **{name: mx.zeros((4, 4)) for name in tensors}})
    with pytest.raises(FormatError) as caught:
        read_draft(folder)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    assert all(word in message for word in words), message


def test_gguf_is_refused_by_name(tmp_path):
    path = tmp_path / "dspark-q4.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(FormatError, match="GGUF.*safetensors"):
        resolve(path)


@pytest.mark.parametrize("value", [mx.nan, mx.inf])
def test_damaged_weights_are_named(value, tmp_path):
    weights = {**HEAD.weights, "norm.weight": mx.full((HIDDEN,), value)}
    with pytest.raises(FormatError, match=r"backbone\.norm\.weight.*NaN or infinity"):
        read_draft(save(tmp_path, DEEP, weights))


# --- any valid spec survives -----------------------------------------------------------------------------------------


def random_spec(seed):
    draw = random.Random(seed)
    kind, family = draw.choice(["block", "block", "eagle3"]), draw.choice(["qwen3", "gemma4"])
    layers, kv, block = 1 if kind == "eagle3" else draw.randint(1, 3), draw.choice([1, 2]), draw.randint(2, 9)
    markov = draw.choice(MARKOV_TYPES) if kind == "block" else "none"
    anchor, confidence = draw.random() < 0.5 or kind == "eagle3", kind == "block" and draw.random() < 0.5
    selector = None
    if kind == "block" and family == "qwen3" and markov == "none" and draw.random() < 0.5:
        selector, confidence = SelectorSpec(4, draw.randint(1, 9), draw.randint(1, 3), 8), False
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32.0}
    scaling = draw.choice([None, yarn]) if family == "qwen3" else draw.choice(
        [{"rope_type": "default"}, {"rope_type": "proportional", "partial_rotary_factor": 0.25}])
    gamma = block if anchor else block - 1
    return DraftSpec(
        family=family, kind=kind, hidden_size=16, intermediate_size=draw.choice([16, 24]), num_layers=layers,
        num_heads=2 * kv, num_kv_heads=kv, head_dim=8, vocab_size=draw.choice([32, 40]),
        rms_norm_eps=draw.choice([1e-5, 1e-6]), rope=RopeSpec(draw.uniform(1e3, 1e7), draw.random() < 0.3, scaling),
        taps=tuple(sorted(draw.sample(range(-1, 9), draw.randint(1, 5)))), block_size=block,
        windows=tuple(draw.choice([None, 1, 7]) for _ in range(layers)),
        causal=tuple(draw.random() < 0.5 for _ in range(layers)),
        mask_token_id=draw.randrange(32) if kind == "block" else None, anchor_predicts=anchor,
        attention_bias=draw.random() < 0.3, keys_are_values=family == "gemma4" and draw.random() < 0.5,
        target_hidden_size=draw.choice([None, 24]), draft_vocab_size=draw.choice([None, 20]), markov=markov,
        markov_rank=0 if markov == "none" else 4, confidence=confidence,
        confidence_with_markov=confidence and markov != "none" and draw.random() < 0.5,
        softcap=draw.choice([None, 15.0]), embed_scale=draw.choice([1.0, 4.0]), logit_scale=draw.choice([1.0, 0.3]),
        selector=selector, num_target_layers=draw.choice([None, 12]),
        temperatures=draw.choice([None, tuple(draw.uniform(0.5, 2) for _ in range(gamma))]),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(24))
def test_a_random_spec_survives_writing(seed, tmp_path):
    spec = random_spec(seed)
    spec.check("x")
    facts = json.loads(json.dumps(spec.to_dict()))
    assert DraftSpec.from_dict(facts, "x") == spec
    mx.random.seed(seed)
    draft = {"block": BlockDraft, "eagle3": Eagle3Draft}[spec.kind](spec, True, seed % 2 == 0)
    save(tmp_path / "a", {"mlx_dspark": {"spec": facts}}, dict(tree_flatten(draft.parameters())))
    for source, out in ("ab", "bc"):
        write_draft(open_checkpoint(tmp_path / source), tmp_path / out, Source("x/y", None))
    configs = [json.loads((tmp_path / name / "config.json").read_text())["mlx_dspark"]["spec"] for name in "bc"]
    assert configs[0] == configs[1] == facts
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "bc"]
    assert files[0] == files[1]
    loaded, before = read_draft(tmp_path / "c"), dict(tree_flatten(draft.parameters()))
    after = dict(tree_flatten(loaded.parameters()))
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]) for name in before)


# --- bad input ----------------------------------------------------------------------------------------------------

STRANGE = [None, True, False, 0, -1, 1, 7, 2**31 - 1, 2**31, 2**63, -(2**63), 10**400, 1e308, -1.5, 0.1, float("nan"),
           float("inf"), "", "x\ny", "7", [], {}, [[]], [None], {"a": 1}, [0, 1, 2], [2, 1], [-1], ["full_attention"],
           "x" * 5000, {"rope_type": "yarn", "factor": 1}]


def deep(value, levels=300):
    for _ in range(levels):
        value = {"deeper": value}
    return value


def mutated(config, draw):
    """The config with one to three keys removed, replaced or nested, at any depth."""
    config = json.loads(json.dumps(config))
    for _ in range(draw.randint(1, 3)):
        place = config
        while True:
            if not place:
                break
            key = draw.choice(list(place))
            if isinstance(place[key], dict) and draw.random() < 0.7:
                place = place[key]
                continue
            action = draw.random()
            if action < 0.25:
                del place[key]
            elif action < 0.85:
                place[key] = copy.deepcopy(draw.choice(STRANGE))
            elif action < 0.95:
                place[key] = deep(place[key])
            else:
                place[draw.choice(sorted(KEYS))] = copy.deepcopy(draw.choice(STRANGE))
            break
    return config


CONFIGS = {
    "deepspec": (DEEP, HEAD),
    "gemma4": (gemma(), HEAD),
    "eagle3": (eagle3(), HEAD),
    "zlab": ({"architectures": ["DFlashDraftModel"], **GEOMETRY, "rope_theta": 1e4, "block_size": BLOCK,
              "layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "dflash_config": FLASH}, BARE),
    "specforge": ({**nested(**HEAD.heads), "rope_theta": 1e4, "rope_scaling": {"type": "yarn", **YARN},
                   "block_size": BLOCK}, HEAD),
    "speculators": ({"speculators_model_type": "dspark", "block_size": BLOCK, "mask_token_id": 1,
                     "transformer_layer_config": {**GEOMETRY, "rope_theta": 1e4}, "draft_vocab_size": 96,
                     "speculators_config": {"proposal_methods": [{"speculative_tokens": BLOCK}]},
                     "aux_hidden_state_layer_ids": [1, 3, 5], **HEAD.heads}, HEAD),
    "own": ({"mlx_dspark": {"spec": random_spec(1).to_dict()}, "quantization": {"bits": 8, "group_size": 64}}, HEAD),
}
KEYS = {key for config, _ in CONFIGS.values() for key in config} | {
    "dflash_config", "quantization", "kv_lora_rank", "sample_from_anchor", "layer_types", "sliding_window", "is_causal",
    "confidence_temperatures", "attention_sink_bias", "draft_vocab_size", "rope_scaling", "mlx_dspark"}


@pytest.fixture
def bounded_memory():
    """A count of billions must fail here rather than take the machine down (Linux only)."""
    if not sys.platform.startswith("linux"):
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 4 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit if before[1] < 0 else min(limit, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.usefixtures("bounded_memory")
def test_mutated_configs_give_one_line_or_work(name, tmp_path):
    config, head = CONFIGS[name]
    save(tmp_path, config, head.weights)
    draw = random.Random(name)
    for case in range(30):
        damaged = mutated(config, draw)
        (tmp_path / "config.json").write_text(json.dumps(damaged), encoding="utf-8")
        works_or_one_line(tmp_path, f"case {case}: {damaged}")


def works_or_one_line(folder, what):
    try:
        read_draft(folder)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000, f"{what}: {error}"
    except Exception as error:
        pytest.fail(f"{what[:600]}: {type(error).__name__}: {str(error)[:200]}")


TEXTS = ["", "{", "[]", "null", "7", "\x00", '{"a": ' * 50_000, "[" * 100_000, '{"architectures": ["Qwen3DSparkModel"]']


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_damaged_json_gives_one_line(file, text, tmp_path):
    write_deepspec_sharded(tmp_path, HEAD)
    (tmp_path / file).write_text(text, encoding="utf-8")
    with pytest.raises(FormatError) as caught:
        read_draft(tmp_path)
    assert "\n" not in str(caught.value) and file in str(caught.value)


def test_config_that_is_no_text(tmp_path):
    (write_deepspec(tmp_path, HEAD) / "config.json").write_bytes(b"\xff\xfe\x00\x9f")
    with pytest.raises(FormatError, match="config.json"):
        read_draft(tmp_path)


@pytest.mark.parametrize("share", [0, 1e-6, 1e-4, 0.01, 0.3, 0.9, 0.999999], ids=str)
def test_truncated_weights_give_one_line(share, tmp_path):
    path = write_deepspec(tmp_path, HEAD) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(FormatError, match="truncated|not a safetensors file") as caught:
        read_draft(tmp_path)
    assert "\n" not in str(caught.value)


def test_flipped_bits_give_one_line_or_work(tmp_path):
    """Most flips fall into the header, where they do harm; in the weights they only change a number."""
    path = write_deepspec(tmp_path, HEAD) / "model.safetensors"
    whole, draw = path.read_bytes(), random.Random(5)
    header = int.from_bytes(whole[:8], "little") + 8
    for case in range(120):
        damaged = bytearray(whole)
        for _ in range(draw.choice([1, 1, 8])):
            at = draw.randrange(8) if draw.random() < 0.1 else draw.randrange(header)
            damaged[at] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        works_or_one_line(tmp_path, f"case {case}")
