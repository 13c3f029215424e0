"""SpecForge's DSpark heads: everything about the draft in `dflash_config`, no tables, slot 0 predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_dspark.draft.spec import DraftSpec

from .reader import Reader, geometry, heads, rename_common, rope, sight

NAME = "SpecForge"

rename = rename_common


def read(config: Mapping[str, Any], where: str) -> DraftSpec:
    """The facts of a SpecForge DSpark draft."""
    reader = Reader(where, Reader(where, config).section("dflash_config"), config)
    facts = geometry(reader)
    return DraftSpec(
        family="qwen3",
        kind="block",
        taps=reader.integers("target_layer_ids"),
        block_size=reader.integer("block_size"),
        mask_token_id=reader.integer("mask_token_id", least=0),
        rope=rope(reader),
        num_target_layers=reader.integer("num_target_layers", None),
        **sight(reader, facts["num_layers"], sliding_is_causal=False),
        **heads(reader),
        **facts,
    )
