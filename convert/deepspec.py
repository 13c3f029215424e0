"""DeepSeek's DeepSpec drafts: DSpark and DFlash for Qwen3 and Gemma4 (and community heads in its layout).

Slot 0 predicts. Layers are always full attention, whatever the copied target config says about windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_dspark.draft.spec import DraftSpec, RopeSpec
from mlx_dspark.errors import FormatError

from .reader import MOST_LAYERS, Reader, geometry, heads, rename_common, rope, short
from .refused import architecture_of

NAME = "DeepSpec"
ARCHITECTURES = {"Qwen3DSparkModel": "qwen3", "Gemma4DSparkModel": "gemma4"}

rename = rename_common


def read(config: Mapping[str, Any], where: str) -> DraftSpec:
    """The facts of a DeepSpec block draft."""
    reader = Reader(where, config)
    for key in ("target_layer_ids", "mask_token_id", "block_size", "markov_rank", "enable_confidence_head"):
        reader.get(key)  # the reference has no defaults for these
    if reader.boolean("enable_confidence_head"):
        reader.get("confidence_head_with_markov")
    if reader.integer("markov_rank", least=0):
        reader.get("markov_head_type")
    facts = {**geometry(reader), **heads(reader), **family_facts(reader, _family(config))}
    return DraftSpec(
        kind="block",
        taps=reader.integers("target_layer_ids"),
        block_size=reader.integer("block_size"),
        mask_token_id=reader.integer("mask_token_id", least=0),
        num_target_layers=reader.integer("num_target_layers", None),
        draft_vocab_size=_reduced(reader, facts["vocab_size"]),
        **facts,
    )


def family_facts(reader: Reader, family: str) -> dict[str, Any]:
    """What differs between the Qwen3 and the Gemma4 form."""
    layers = reader.integer("num_hidden_layers", most=MOST_LAYERS)
    facts: dict[str, Any] = {"family": family, "windows": (None,) * layers, "causal": (False,) * layers}
    if family == "qwen3":
        return {**facts, "rope": rope(reader)}
    if reader.boolean("enable_moe_block", False) or reader.integer("hidden_size_per_layer_input", 0, least=0):
        raise FormatError(f"{reader.where}: Gemma4 drafts with MoE blocks or per-layer inputs are not supported")
    shared = reader.boolean("attention_k_eq_v")
    full = Reader(reader.where, Reader(reader.where, reader.section("rope_parameters")).section("full_attention"))
    scaling = {"rope_type": full.get("rope_type", "default")}
    if scaling["rope_type"] == "proportional":
        scaling["partial_rotary_factor"] = full.number("partial_rotary_factor", 1.0)
    elif scaling["rope_type"] != "default":
        raise FormatError(f"{reader.where}: RoPE type {short(scaling['rope_type'])} is unknown in a Gemma4 draft")
    return {
        **facts,
        "rope": RopeSpec(full.number("rope_theta"), scaling=scaling),
        "head_dim": reader.integer("global_head_dim"),
        "num_kv_heads": reader.integer("num_global_key_value_heads" if shared else "num_key_value_heads"),
        "keys_are_values": shared,
        "softcap": reader.number("final_logit_softcapping", None),
        "embed_scale": reader.integer("hidden_size") ** 0.5,
    }


def _family(config: Mapping[str, Any]) -> str:
    """Community heads keep the layout under class names of their own."""
    gemma = str(config.get("model_type", "")).startswith("gemma4")
    return ARCHITECTURES.get(architecture_of(config) or "", "gemma4" if gemma else "qwen3")


def _reduced(reader: Reader, vocab_size: int) -> int | None:
    size = reader.integer("draft_vocab_size", None)
    return None if size == vocab_size else size
