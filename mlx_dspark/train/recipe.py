"""A new draft for a target: its config.json in DeepSpec's spelling, its taps, its mask token, its first weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from ..convert import deepspec, eagle3
from ..draft import BlockDraft, DraftSpec, Eagle3Draft
from ..load import read_draft
from ..target import Target
from .config import TrainConfig
from .model import freeze

MASKS = ("<|mask|>", "<mask>", "[MASK]")
HEAD_PARTS = ("markov_head", "confidence_head")
W1_SPREAD, W2_SPREAD = 0.5, 0.02  # of the first weights: with both small the transition bias starts slowly
_UNUSED = re.compile(r"<\|?(unused|reserved|extra)\w*\|?>")
_QWEN3 = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
          "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def spread_taps(layers: int, count: int = 5, fewer: bool = True) -> tuple[int, ...]:
    """`count` tapped layers of a target with `layers`, from the second to the third from the end, evenly spread.

    36 layers give 1, 9, 17, 25, 33, as in the released drafts. Small targets have fewer, or with fewer=False (Eagle3
    always has five) the same number from the first layer on.
    """
    first, last = min(1, max(0, layers - 2)), max(1, layers - 3)
    last = min(last, max(0, layers - 2))
    if last - first + 1 < count and not fewer:
        first, last = 0, max(0, layers - 2)
    count = min(count, last - first + 1)
    if count <= 1:
        return (last,)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


def find_mask(tokenizer: Any, rows: int) -> int:
    """A token id for masks that text does not use: a mask token, a row behind the vocabulary, a reserved token.

    rows: of the target's embedding. Raises ValueError when there is none.
    """
    vocabulary = tokenizer.get_vocab()
    for name in MASKS:
        if name in vocabulary:
            return int(vocabulary[name])
    behind = max(vocabulary.values()) + 1
    if behind < rows:
        return behind
    reserved = sorted(id for token, id in vocabulary.items() if _UNUSED.fullmatch(token))
    if reserved:
        return int(reserved[0])
    raise ValueError("the tokenizer has no mask token, no reserved one and no unused row: give --mask-token ID, a "
                     "token that your text does not contain")


def draft_config(
    target_config: Mapping[str, Any], target: Target, tokenizer: Any, settings: TrainConfig
) -> dict[str, Any]:
    """config.json of a new draft, as DeepSpec writes it: the target's geometry, and what `settings` ask for.

    Targets of other families than Gemma4 get Qwen3 layers.
    """
    text = dict(target_config.get("text_config") or target_config)
    gemma = str(text.get("model_type", "")).startswith("gemma4")
    base = text if gemma else _qwen3(text)
    family, layers = "Gemma4" if gemma else "Qwen3", settings.layers
    taps = settings.taps or spread_taps(len(target.layers), fewer=settings.kind != "eagle3")
    config = {
        **{key: value for key, value in base.items() if not key.startswith("quantization")},
        "architectures": [f"{family}{'Eagle3' if settings.kind == 'eagle3' else 'DSpark'}Model"],
        "vocab_size": target.vocab_size, "num_target_layers": len(target.layers), "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers, "tie_word_embeddings": False, "target_layer_ids": list(taps),
        "dtype": "bfloat16",
    }
    if gemma:
        config["target_model_type"] = target_config.get("model_type")
        config["target_text_model_type"] = text.get("model_type")
    return {**config, **_heads(settings, tokenizer, target)}


def new_draft(config: Mapping[str, Any], target: Target, seed: int) -> tuple[BlockDraft | Eagle3Draft, DraftSpec]:
    """A draft with first weights and the target's tables, ready to train."""
    packaging = eagle3 if "Eagle3" in config["architectures"][0] else deepspec
    spec = packaging.read(config, "the new draft")
    spec.check("the new draft")
    mx.random.seed(seed)
    draft = (Eagle3Draft if spec.kind == "eagle3" else BlockDraft)(spec, own_embed=True, own_head=True)
    draft.update(tree_map_with_path(_first_weight, draft.parameters()))
    embedding, head = target.tables()
    draft.tables.embed_tokens.weight, draft.tables.lm_head.weight = embedding, head
    mx.eval(draft.parameters())
    return freeze(draft), spec


def start_with(draft: BlockDraft | Eagle3Draft, folder: Path) -> list[str]:
    """Give a new draft the weights of another one; gives the names of those that stay new.

    The backbone must have the same shapes. Heads may differ: what the other draft lacks begins anew. The tables stay
    the target's. Raises ValueError for another backbone.
    """
    given = dict(tree_flatten(read_draft(folder).parameters()))
    own = {name: array for name, array in tree_flatten(draft.parameters()) if not name.startswith("tables.")}
    fits = {name for name, array in own.items() if name in given and given[name].shape == array.shape}
    strange = sorted(name for name in own.keys() - fits if name.split(".")[0] not in HEAD_PARTS)
    if strange:
        name = strange[0]
        has = f"has shape {given[name].shape}" if name in given else "is missing"
        raise ValueError(f"{name} {has} in {folder} and has shape {own[name].shape} here: start with an unquantised "
                         "draft of the same layers and taps, or leave --start out")
    draft.update(tree_unflatten([(name, given[name].astype(own[name].dtype)) for name in sorted(fits)]))
    mx.eval(draft.parameters())
    return sorted(own.keys() - fits)


def _first_weight(name: str, array: mx.array) -> mx.array:
    if name.startswith("tables."):
        return mx.zeros((1,))  # replaced by the target's
    if name.endswith(".bias"):
        return mx.zeros(array.shape)
    if array.ndim != 2:
        return mx.ones(array.shape)
    spread = {"markov_w1": W1_SPREAD, "markov_w2": W2_SPREAD}.get(name.split(".")[-2], array.shape[1] ** -0.5)
    return mx.random.normal(array.shape, scale=spread)


def _heads(settings: TrainConfig, tokenizer: Any, target: Target) -> dict[str, Any]:
    if settings.kind == "eagle3":
        return {"ttt_length": settings.gamma, "step_loss_decay": settings.step_decay, "draft_num_hidden_layers": 1,
                "target_model_name_or_path": target.name}
    rank = 0 if settings.head == "none" else settings.rank
    mask = settings.mask_token if settings.mask_token >= 0 else find_mask(tokenizer, target.vocab_size)
    facts: dict[str, Any] = {"block_size": settings.gamma, "mask_token_id": mask, "num_anchors": settings.anchors,
                             "markov_rank": rank, "enable_confidence_head": settings.confidence}
    if rank:
        facts["markov_head_type"] = settings.head
    if settings.confidence:
        facts["confidence_head_with_markov"] = rank > 0
    return facts


def _qwen3(text: Mapping[str, Any]) -> dict[str, Any]:
    """The target's geometry under Qwen3's names; a target that is Qwen3 keeps all its keys."""
    heads = text["num_attention_heads"]
    rope = {**(text.get("rope_parameters") or {})}
    theta = rope.get("rope_theta") or text.get("rope_theta") or 10000.0
    kept = dict(text) if text.get("model_type") == "qwen3" else {key: text[key] for key in _QWEN3 if key in text}
    kept.pop("rope_theta", None)
    kept.pop("rope_scaling", None)
    return {
        **kept, "model_type": "qwen3", "head_dim": text.get("head_dim") or text["hidden_size"] // heads,
        "num_key_value_heads": text.get("num_key_value_heads") or heads, "hidden_act": "silu",
        "attention_bias": bool(text.get("attention_bias", False)) if text.get("model_type") == "qwen3" else False,
        "rope_parameters": rope if rope.get("rope_type") == "yarn" else {"rope_theta": theta, "rope_type": "default"},
    }


def check_head(draft: nn.Module, target: Target, ids: mx.array, taps: tuple[int, ...]) -> None:
    """Raise ValueError unless the draft's copy of the head makes the target's own logits of ids [1, T]."""
    ours = draft.tables.logits(target.features(ids, taps)[1]).astype(mx.float32)
    theirs = target.model(ids).astype(mx.float32)
    off = float(mx.abs(mx.softmax(ours, axis=-1) - mx.softmax(theirs, axis=-1)).max())
    if not off < 0.05:
        raise ValueError(f"the logits of {target.name} are not its output head applied to its last hidden state "
                         f"(probabilities differ by {off:.2g}): drafts for this kind of target cannot be trained yet")
