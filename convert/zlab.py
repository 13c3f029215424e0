"""z-lab's DFlash and DFlash2: slot 0 is a bare anchor, no tables, sliding layers are causal.

Taps follow Hugging Face's tuple (hidden_states[k + 1] is the output of layer k), as DeepSpec's do. Draft
settings live in `dflash_config`, older ones beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_dspark.draft.spec import DraftSpec, SelectorSpec

from .reader import Reader, geometry, rename_common, rope, sight

NAME = "z-lab DFlash"


def rename(name: str) -> str | None:
    """DFlash2 stores its codebooks as bare parameters."""
    if name in ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"):
        return f"{name}.weight"
    return rename_common(name)


def read(config: Mapping[str, Any], where: str) -> DraftSpec:
    """The facts of a DFlash or DFlash2 draft."""
    nested = Reader(where, config).section("dflash_config")
    reader = Reader(where, nested, config)
    facts = geometry(reader)
    view = sight(reader, facts["num_layers"])
    if reader.get("is_causal", None) is not None:
        view["causal"] = (reader.boolean("is_causal"),) * facts["num_layers"]
    selector = None
    if nested.get("selector_rank") is not None:
        selector = SelectorSpec(
            reader.integer("selector_rank"), reader.integer("selector_top_k"),
            reader.integer("conv_kernel_size"), reader.integer("conv_group_size"),
        )
    return DraftSpec(
        family="qwen3",
        kind="block",
        taps=reader.integers("target_layer_ids"),
        block_size=reader.integer("block_size", 16),
        anchor_predicts=False,
        mask_token_id=reader.integer("mask_token_id", least=0),
        rope=rope(reader),
        softcap=reader.number("final_logit_softcapping", None),
        embed_scale=reader.number("input_embedding_scale", 1.0),
        logit_scale=reader.number("output_multiplier", 1.0),
        selector=selector,
        num_target_layers=reader.integer("num_target_layers", None),
        **view,
        **facts,
    )
