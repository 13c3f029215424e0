"""The normalised facts of a draft checkpoint, whatever it was packed as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import FormatError

MARKOV_TYPES = ("none", "vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DraftSpec:
    """Geometry, taps and heads of a block draft.

    taps: decoder layers counted from 0; -1 is the embedding output.
    block_size: rows of a block, and the number of proposals (the anchor's row predicts).
    markov: one of MARKOV_TYPES; markov_rank is 0 for "none".
    confidence_with_markov: the confidence head also sees W1[x_{k-1}].
    num_target_layers: None when the checkpoint does not say.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool
    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    markov: str
    markov_rank: int
    confidence: bool
    confidence_with_markov: bool
    num_target_layers: int | None

    @classmethod
    def from_deepspec(cls, config: Mapping[str, Any], where: str) -> DraftSpec:
        """Read DeepSpec's config.json (SPEC: `Qwen3DSparkModel`).

        where: the folder, for messages. Raises FormatError for a missing or impossible value.
        """
        get = _Reader(config, where)
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or architectures[:1] != ["Qwen3DSparkModel"]:
            raise FormatError(f"{where}: architectures {architectures!r} is not a draft this version loads: "
                              "use a DeepSpec Qwen3DSparkModel folder")
        rank = get.integer("markov_rank", least=0)
        markov = str(get("markov_head_type")).lower() if rank else "none"
        if markov not in MARKOV_TYPES or (rank and markov == "none"):
            raise FormatError(f"{where}: markov_head_type {markov!r} is unknown: vanilla, gated and rnn are supported")
        confidence = get.boolean("enable_confidence_head")
        with_markov = confidence and get.boolean("confidence_head_with_markov")
        if with_markov and not rank:
            raise FormatError(f"{where}: confidence_head_with_markov is true but markov_rank is 0: "
                              "the confidence head has no Markov row to look at")
        layers = get.integer("num_target_layers") if config.get("num_target_layers") is not None else None
        heads = get.integer("num_attention_heads")
        hidden = get.integer("hidden_size")
        vocab = get.integer("vocab_size")
        mask = get.integer("mask_token_id", least=0)
        if mask >= vocab:
            raise FormatError(f"{where}: mask_token_id {mask} is outside the vocabulary of {vocab}: "
                              "the config does not belong to these weights")
        return cls(
            family="qwen3",
            hidden_size=hidden,
            intermediate_size=get.integer("intermediate_size"),
            num_layers=get.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=get.integer("num_key_value_heads", heads),
            head_dim=get.integer("head_dim", hidden // heads),
            vocab_size=vocab,
            rms_norm_eps=get.number("rms_norm_eps"),
            rope_theta=_rope_theta(config, where),
            attention_bias=bool(config.get("attention_bias", False)),
            taps=_taps(get("target_layer_ids"), layers, where),
            block_size=get.integer("block_size"),
            mask_token_id=mask,
            markov=markov,
            markov_rank=rank,
            confidence=confidence,
            confidence_with_markov=with_markov,
            num_target_layers=layers,
        )


class _Reader:
    """Typed look-ups in a config, with the folder and the key in every message."""

    def __init__(self, config: Mapping[str, Any], where: str):
        self.config, self.where = config, where

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self.config.get(key, default)
        if value is None:
            raise FormatError(f"{self.where}: config.json has no {key!r}: this is not a complete DeepSpec draft")
        return value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise FormatError(f"{self.where}: config.json has {key} = {value!r}: a whole number of at least {least} "
                              "is needed")
        return value

    def number(self, key: str) -> float:
        value = self(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise FormatError(f"{self.where}: config.json has {key} = {value!r}: a positive number is needed")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self(key)
        if not isinstance(value, bool):
            raise FormatError(f"{self.where}: config.json has {key} = {value!r}: true or false is needed")
        return value


def _rope_theta(config: Mapping[str, Any], where: str) -> float:
    """Both spellings occur: `rope_parameters.rope_theta` (transformers 5) and a flat `rope_theta`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise FormatError(f"{where}: config.json has rope_parameters = {rope!r}: an object is needed")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise FormatError(f"{where}: RoPE type {kind!r} is not supported in a draft yet: only 'default' is")
    return _Reader({"rope_theta": rope.get("rope_theta", config.get("rope_theta"))}, where).number("rope_theta")


def _taps(ids: Any, layers: int | None, where: str) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise FormatError(f"{where}: target_layer_ids is {ids!r}: a non-empty list of layer numbers is needed")
    if any(b <= a for a, b in zip(ids, ids[1:], strict=False)) or ids[0] < -1:
        raise FormatError(f"{where}: target_layer_ids {ids} must increase and start at -1 (embeddings) or above")
    if layers is not None and ids[-1] >= layers - 1:
        raise FormatError(f"{where}: target_layer_ids {ids} reach the last of {layers} target layers, "
                          "which cannot be tapped")
    return tuple(ids)
