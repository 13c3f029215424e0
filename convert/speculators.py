"""vLLM's speculators: a wrapper around a Qwen3 backbone, with its own counting of layers.

`aux_hidden_state_layer_ids` name the *input* of a layer, so one is subtracted. Whether slot 0 predicts
is `sample_from_anchor`; exports that lack the key say it through the number of proposed tokens.
Sliding layers are causal inside the block unless `sliding_window_non_causal`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_dspark.draft.spec import DraftSpec
from mlx_dspark.errors import FormatError

from .reader import Reader, geometry, heads, rename_common, rope, short, sight

NAME = "speculators"

rename = rename_common


def read(config: Mapping[str, Any], where: str) -> DraftSpec:
    """The facts of a speculators DSpark or DFlash export."""
    top = Reader(where, config)
    kind = top.get("speculators_model_type", top.section("speculators_config").get("algorithm"))
    if kind not in ("dspark", "dflash"):
        raise FormatError(f"{where}: speculators type {short(kind)} is not supported: dspark and dflash are")
    reader = Reader(where, config, top.section("transformer_layer_config"))
    facts = geometry(reader)
    block_size = reader.integer("block_size")
    causal = not reader.boolean("sliding_window_non_causal", False)
    size = reader.integer("draft_vocab_size", None)
    return DraftSpec(
        family="qwen3",
        kind="block",
        taps=tuple(layer - 1 for layer in reader.integers("aux_hidden_state_layer_ids")),
        block_size=block_size,
        anchor_predicts=_anchor_predicts(top, block_size),
        mask_token_id=reader.integer("mask_token_id", least=0),
        draft_vocab_size=None if size == facts["vocab_size"] else size,
        target_hidden_size=reader.integer("target_hidden_size", None),
        rope=rope(reader),
        **sight(reader, facts["num_layers"], sliding_is_causal=causal),
        **heads(reader),
        **facts,
    )


def _anchor_predicts(top: Reader, block_size: int) -> bool:
    if top.get("sample_from_anchor", None) is not None:
        return top.boolean("sample_from_anchor")
    methods = top.section("speculators_config").get("proposal_methods")
    try:
        proposed = methods[0]["speculative_tokens"]
    except (TypeError, IndexError, KeyError):
        return False  # what vLLM and llama.cpp assume for exports without the key
    if proposed not in (block_size, block_size - 1):
        raise FormatError(f"{top.where}: {short(proposed)} speculative_tokens do not fit block_size {block_size}")
    return bool(proposed == block_size)
