"""DeepSpec's Eagle3 drafts: five taps, attention over [token embedding; hidden], full vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_dspark.draft.spec import DraftSpec
from mlx_dspark.errors import FormatError

from .deepspec import family_facts
from .reader import Reader, geometry

NAME = "DeepSpec Eagle3"
ARCHITECTURES = {"Qwen3Eagle3Model": "qwen3", "Gemma4Eagle3Model": "gemma4"}


def rename(name: str) -> str | None:
    """The context norm belongs to the layer in the file, to the draft here."""
    if name.startswith(("embed_tokens.", "lm_head.")):
        return f"tables.{name}"
    return "hidden_norm.weight" if name == "layers.0.hidden_norm.weight" else name


def read(config: Mapping[str, Any], where: str) -> DraftSpec:
    """The facts of a DeepSpec Eagle3 draft."""
    reader = Reader(where, config)
    facts = {**geometry(reader), **family_facts(reader, ARCHITECTURES[config["architectures"][0]])}
    taps = reader.integers("target_layer_ids")
    if len(taps) != 5:
        raise FormatError(f"{where}: an Eagle3 draft taps five layers, target_layer_ids has {len(taps)}")
    if facts["num_layers"] != 1:
        raise FormatError(f"{where}: an Eagle3 draft has one layer, num_hidden_layers is {facts['num_layers']}")
    return DraftSpec(
        kind="eagle3", taps=taps, block_size=reader.integer("ttt_length"),
        num_target_layers=reader.integer("num_target_layers", None), **facts,
    )
