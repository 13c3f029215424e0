"""One synthetic head, written in every public packaging.

The head is described once, under DeepSpec's names. Each `write_*` function puts it into a folder as
that packaging would: the same function of (taps, anchor) unless a test asks for a mistake.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from helpers import best
from mlx_dspark.convert import open_checkpoint
from mlx_dspark.convert.write import Quantisation, Source, write_draft

from mlx_dspark.draft import TargetTables

VOCAB, HIDDEN, HEAD_DIM, LAYERS, RANK = 96, 64, 16, 2, 32
TAPS, TARGET_LAYERS, BLOCK, MASK = (0, 2, 4), 6, 5, 95
KERNEL, GROUP, SELECT_RANK, TOP_K = 3, 16, 8, 6  # of DFlash2
GEOMETRY = {
    "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": HEAD_DIM, "vocab_size": VOCAB, "rms_norm_eps": 1e-6,
    "attention_bias": False, "tie_word_embeddings": False, "max_position_embeddings": 512,
}  # fmt: skip
HEADS = {
    "markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
NO_HEADS = {"markov_rank": 0, "enable_confidence_head": False}
ROPE = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
TABLES = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Head:
    """weights: under DeepSpec's names, tables included. heads: the config's keys about Markov and confidence."""

    weights: Mapping[str, mx.array]
    heads: Mapping[str, Any]

    @property
    def body(self) -> dict[str, mx.array]:
        """Without the two tables."""
        return {name: array for name, array in self.weights.items() if name not in TABLES}

    def tables(self) -> TargetTables:
        """Its tables as a target would lend them."""
        embed, head = (self.weights[name] for name in TABLES)
        return TargetTables(lambda tokens: embed[tokens], lambda hidden: hidden @ head.T)


def make_head(seed: int = 0, heads: Mapping[str, Any] = HEADS, dtype: mx.Dtype = mx.float32) -> Head:
    """Random weights of ordinary size, norms away from one."""
    shapes = {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN),
              "fc.weight": (HIDDEN, len(TAPS) * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes.update({f"layers.{layer}.{name}.weight": shape for name, shape in _LAYER.items()})
    if heads["markov_rank"]:
        shapes.update({f"markov_head.markov_w{i}.weight": (VOCAB, RANK) for i in (1, 2)})
    if heads["enable_confidence_head"]:
        shapes.update({"confidence_head.proj.weight": (1, HIDDEN + RANK), "confidence_head.proj.bias": (1,)})
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    weights = {name: _random(name, shape, key).astype(dtype) for (name, shape), key in zip(shapes.items(), keys)}
    mx.eval(weights)
    return Head(weights, heads)


_LAYER = {
    "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,), "self_attn.q_proj": (4 * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (2 * HEAD_DIM, HIDDEN), "self_attn.v_proj": (2 * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 4 * HEAD_DIM), "self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,),
    "mlp.gate_proj": (96, HIDDEN), "mlp.up_proj": (96, HIDDEN), "mlp.down_proj": (HIDDEN, 96),
}  # fmt: skip


def _random(name: str, shape: tuple[int, ...], key: mx.array) -> mx.array:
    if len(shape) == 1:
        return 0.6 + 0.9 * mx.random.uniform(shape=shape, key=key)
    scale = 1.0 if "embed" in name or "markov" in name else 2 * shape[-1] ** -0.5
    return scale * mx.random.normal(shape, key=key)


def save(folder: Path, config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> Path:
    """A folder with one weight file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights))
    return folder


def save_sharded(folder: Path, config: Mapping[str, Any], weights: Mapping[str, mx.array], shards: int = 3) -> Path:
    """The same in several files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    names, index = sorted(weights), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        mx.save_safetensors(str(folder / file), {name: weights[name] for name in names[i::shards]})
        index.update(dict.fromkeys(names[i::shards], file))
    document = {"metadata": {"total_size": 0}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def deepspec_config(head: Head, **changes: Any) -> dict[str, Any]:
    """As DeepSpec writes it: a copy of the target's config with the draft's facts on top."""
    return {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", **GEOMETRY, **ROPE, **head.heads,
        "num_target_layers": TARGET_LAYERS, "layer_types": ["full_attention"] * LAYERS, "block_size": BLOCK,
        "target_layer_ids": list(TAPS), "mask_token_id": MASK, "num_anchors": 512, "sliding_window": 4, **changes,
    }  # fmt: skip


def write_deepspec(folder: Path, head: Head, **changes: Any) -> Path:
    return save(folder, deepspec_config(head, **changes), head.weights)


def write_deepspec_sharded(folder: Path, head: Head) -> Path:
    return save_sharded(folder, deepspec_config(head), head.weights)


def write_openbmb(folder: Path, head: Head) -> Path:
    """DeepSpec's keys under a class name of its own, no tables, a draft vocabulary that is the whole one."""
    return save(folder, deepspec_config(head, architectures=["MiniCPMDSparkModel"], draft_vocab_size=VOCAB), head.body)


def write_specforge(folder: Path, head: Head, **changes: Any) -> Path:
    nested = {"projector_type": "dspark", "mask_token_id": MASK, "target_layer_ids": list(TAPS), **head.heads,
              "attention_mode": "gqa"}
    config = {"architectures": ["DSparkDraftModel"], "model_type": "qwen3", **GEOMETRY, "rope_theta": 10000.0,
              "block_size": BLOCK, "num_target_layers": TARGET_LAYERS, "dflash_config": nested, **changes}
    return save(folder, config, head.body)


def write_liquid(folder: Path, head: Head, permuted: bool = True, **changes: Any) -> Path:
    """Rotary pairs are neighbours here, so the rows of q and k are put in that order. permuted: or left alone."""
    nested = {"mask_token_id": MASK, "target_layer_ids": list(TAPS), "num_target_layers": TARGET_LAYERS}
    config = {"architectures": ["Lfm2DSparkDraftModel"], "model_type": "qwen3", **GEOMETRY, "rope_theta": 10000.0,
              "block_size": BLOCK, "dflash_config": nested, **head.heads, "rope_is_neox_style": False, **changes}
    return save(folder, config, interleaved(head.body) if permuted else head.body)


def interleaved(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Pairs (i, i + d/2) of each head of q and k, and of their norms, moved to (2i, 2i + 1)."""
    half = mx.arange(HEAD_DIM // 2)
    order = mx.stack([half, half + HEAD_DIM // 2], axis=1).flatten()  # new row -> old row

    def moved(name: str, array: mx.array) -> mx.array:
        if not any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
            return array
        return mx.unflatten(array, 0, (-1, HEAD_DIM))[:, order].reshape(array.shape)

    return {name: moved(name, array) for name, array in weights.items()}


def write_speculators(folder: Path, head: Head, *, shift: int = 1, reduced: mx.array | None = None,
                      own_tables: bool = True, **changes: Any) -> Path:
    """vLLM's wrapper. shift: added to the taps. reduced: target ids that the draft can say, in rising order."""
    weights = dict(head.weights if own_tables else head.body)
    size = VOCAB
    if reduced is not None:
        size = reduced.shape[0]
        for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
            weights[name] = weights[name][reduced]
        weights["d2t"] = (reduced - mx.arange(size)).astype(mx.int64)
        weights["t2d"] = mx.any(mx.arange(VOCAB)[:, None] == reduced, axis=1)
    config = {
        "architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "block_size": BLOCK,
        "speculators_config": {"algorithm": "dspark", "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": BLOCK}]},
        "transformer_layer_config": {"model_type": "qwen3", **GEOMETRY, **ROPE}, "draft_vocab_size": size,
        "aux_hidden_state_layer_ids": [tap + shift for tap in TAPS], "mask_token_id": MASK,
        "sample_from_anchor": True, "target_hidden_size": HIDDEN, **head.heads, **changes,
    }  # fmt: skip
    return save(folder, {key: value for key, value in config.items() if value is not None}, weights)


def write_zlab(folder: Path, head: Head, **changes: Any) -> Path:
    """No heads of DSpark's, no tables; slot 0 is a bare anchor."""
    config = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", **GEOMETRY, "rope_theta": 10000.0,
              "num_target_layers": TARGET_LAYERS, "block_size": BLOCK,
              "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}, **changes}
    return save(folder, config, head.body)


def dflash2_head() -> Head:
    """A head without DSpark's heads, with convolutions and a selector."""
    shapes = {"candidate_selector.predecessor_codebook": (VOCAB, SELECT_RANK),
              "candidate_selector.successor_codebook": (VOCAB, SELECT_RANK),
              "candidate_selector.hidden_projection.weight": (SELECT_RANK, HIDDEN)}
    for layer in range(LAYERS):
        for conv in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{layer}.{conv}.base_kernel"] = (2, KERNEL, HIDDEN)
            shapes[f"layers.{layer}.{conv}.kernel_projection.weight"] = (2 * KERNEL * HIDDEN // GROUP, HIDDEN)
    keys = mx.random.split(mx.random.key(9), len(shapes))
    added = {name: 0.3 * mx.random.normal(shape, key=key) for (name, shape), key in zip(shapes.items(), keys)}
    bare = make_head(heads=NO_HEADS)
    return Head({**bare.weights, **added}, NO_HEADS)


def write_dflash2(folder: Path, head: Head | None = None) -> Path:
    nested = {"mask_token_id": MASK, "target_layer_ids": list(TAPS), "selector_rank": SELECT_RANK,
              "selector_top_k": TOP_K, "conv_kernel_size": KERNEL, "conv_group_size": GROUP,
              "output_multiplier": 0.5, "final_logit_softcapping": 5.0}
    return write_zlab(folder, head or dflash2_head(), dflash_config=nested)


def write_own(folder: Path, source: Path, bits: int | None = None, drop: Mapping[str, str] | None = None) -> Path:
    """What our converter makes of a folder."""
    quantisation = None if bits is None else Quantisation(bits, 32)
    write_draft(open_checkpoint(source), folder, Source("someone/draft", "1" * 40), quantisation, drop)
    return folder


def taps_of(layers: tuple[int, ...], rows: int, index: int) -> mx.array:
    """Random taps [1, rows, M * D]; each layer has its own, so that a shifted draft sees others."""
    parts = [mx.random.normal((1, rows, HIDDEN), key=mx.random.key(100 * index + layer + 2)) for layer in layers]
    return mx.concatenate(parts, axis=-1)


def drafted(draft: Any, head: Head, rounds: int = 2) -> tuple[mx.array, mx.array, mx.array | None]:
    """Tokens [R*N], logits [R*N, V] and confidence logits of some greedy rounds over random taps."""
    if draft.tables.incomplete:
        draft.borrow(head.tables())
    state, proposals = draft.start(), []
    for index in range(rounds):
        rows = 9 if index == 0 else 3
        draft.observe(state, mx.zeros((1, rows), dtype=mx.int32), taps_of(draft.taps, rows, index))
        proposals.append(draft.propose(state, mx.array([7 + index]), draft.gamma, best))
    confidence = [p.confidence_logits[0] for p in proposals if p.confidence_logits is not None]
    return (mx.concatenate([p.tokens[0] for p in proposals]), mx.concatenate([p.logits[0] for p in proposals]),
            mx.concatenate(confidence) if confidence else None)
