"""Typed look-ups in a config, and the facts that most packagings spell alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlx_dspark.draft.spec import RopeSpec
from mlx_dspark.errors import FormatError

MISSING = object()
MOST_LAYERS = 1000  # a damaged count must not allocate a list of billions


class Reader:
    """Values of a config, with the folder and the key in every message.

    Several mappings are searched in order, so that a nested section may override the top level.
    """

    def __init__(self, where: str, *sections: Mapping[str, Any]):
        self.where, self.sections = where, sections

    def get(self, key: str, default: Any = MISSING) -> Any:
        """The first value that is not null. Raises FormatError when there is none and no default."""
        for section in self.sections:
            if section.get(key) is not None:
                return section[key]
        if default is MISSING:
            raise FormatError(f"{self.where}: config.json has no {key!r}: the checkpoint is incomplete")
        return default

    def integer(self, key: str, default: Any = MISSING, least: int = 1, most: int = 2**24) -> Any:
        """A whole number of `least` to `most`, or the default."""
        value = self.get(key, default)
        if value is default and default is not MISSING:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise FormatError(f"{self.where}: config.json has {key} = {short(value)}: "
                              f"a whole number of {least} to {most} is needed")
        return value

    def number(self, key: str, default: Any = MISSING) -> Any:
        """A positive number, or the default."""
        value = self.get(key, default)
        if value is default and default is not MISSING:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
            raise FormatError(f"{self.where}: config.json has {key} = {short(value)}: a positive number is needed")
        return float(value)

    def boolean(self, key: str, default: Any = MISSING) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise FormatError(f"{self.where}: config.json has {key} = {short(value)}: true or false is needed")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self.get(key)
        if not isinstance(value, list) or not value or any(type(number) is not int for number in value):
            raise FormatError(f"{self.where}: config.json has {key} = {short(value)}: whole numbers are needed")
        return tuple(value)

    def section(self, key: str) -> Mapping[str, Any]:
        """A nested object; empty when absent."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise FormatError(f"{self.where}: config.json has {key} = {short(value)}: an object is needed")
        return value


def geometry(read: Reader) -> dict[str, Any]:
    """The layer geometry that all packagings store under the transformers names of Qwen3."""
    heads = read.integer("num_attention_heads")
    hidden = read.integer("hidden_size")
    return {
        "hidden_size": hidden,
        "intermediate_size": read.integer("intermediate_size"),
        "num_layers": read.integer("num_hidden_layers", most=MOST_LAYERS),
        "num_heads": heads,
        "num_kv_heads": read.integer("num_key_value_heads", heads),
        "head_dim": read.integer("head_dim", max(1, hidden // heads)),
        "vocab_size": read.integer("vocab_size"),
        "rms_norm_eps": read.number("rms_norm_eps"),
        "attention_bias": read.boolean("attention_bias", False),
    }


def heads(read: Reader) -> dict[str, Any]:
    """Markov and confidence heads under DeepSpec's names; absent keys mean off."""
    rank = read.integer("markov_rank", 0, least=0)
    confidence = read.boolean("enable_confidence_head", False)
    temperatures = read.get("confidence_temperatures", None)
    return {
        "markov": short(read.get("markov_head_type", "vanilla"), str).lower() if rank else "none",
        "markov_rank": rank,
        "confidence": confidence,
        "confidence_with_markov": confidence and read.boolean("confidence_head_with_markov", False),
        "temperatures": None if temperatures is None else tuple(_floats(read, temperatures)),
    }


def rope(read: Reader, interleaved: bool = False) -> RopeSpec:
    """Both spellings occur: `rope_parameters` (transformers 5) and flat `rope_theta` with `rope_scaling`.

    A partial factor or mrope sections next to type default are leftovers of the target's config: the
    draft rotates the full head. YaRN counts only where the draft's own config declares it.
    """
    nested = {**read.section("rope_scaling"), **read.section("rope_parameters")}
    if isinstance(nested.get("full_attention"), Mapping):  # Gemma nests by layer type
        nested = dict(nested["full_attention"])
    theta = Reader(read.where, {"rope_theta": nested.get("rope_theta")}, *read.sections).number("rope_theta")
    kind = nested.get("rope_type") or nested.get("type") or "default"
    if kind in ("default", "mrope"):
        return RopeSpec(theta, interleaved)
    if kind == "yarn":
        keep = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        inner = Reader(read.where, nested)
        scaling = {"rope_type": "yarn", **{key: inner.number(key, None) for key in keep if nested.get(key) is not None}}
        for key in keep[:2]:
            inner.number(key)
        return RopeSpec(theta, interleaved, scaling)
    raise FormatError(f"{read.where}: RoPE type {short(kind)} is not supported in a draft: default and yarn are")


def sight(read: Reader, layers: int, sliding_is_causal: bool = True) -> dict[str, Any]:
    """Windows and causality per layer from `layer_types`; absent means full attention everywhere."""
    types = read.get("layer_types", ["full_attention"] * layers)
    if not isinstance(types, list) or any(t not in ("full_attention", "sliding_attention") for t in types):
        raise FormatError(f"{read.where}: layer_types {short(types)}: full_attention and sliding_attention are known")
    sliding = [kind == "sliding_attention" for kind in types]
    window = read.integer("sliding_window") if any(sliding) else None
    return {
        "windows": tuple(window if slides else None for slides in sliding),
        "causal": tuple(slides and sliding_is_causal for slides in sliding),
    }


def rename_common(name: str) -> str | None:
    """DeepSpec's tensor names, which nearly all packagings share; None for what is not needed."""
    if name.startswith(("embed_tokens.", "lm_head.")) or name == "d2t":
        return f"tables.{name}"
    if name.startswith(("markov_head.", "confidence_head.", "candidate_selector.")):
        return name
    if name in ("t2d", "mask_embedding") or name.startswith(("verifier_", "rotary_emb.")):
        return None
    return f"backbone.{name}"


def _floats(read: Reader, values: Any) -> list[float]:
    if not isinstance(values, list) or any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in values):
        raise FormatError(f"{read.where}: confidence_temperatures {short(values)}: a list of numbers is needed")
    return [float(value) for value in values]


def short(value: Any, text_of: Callable[[Any], str] = repr) -> str:
    """A value as part of a one-line message."""
    text = text_of(value)
    return text if len(text) <= 60 else text[:57] + "..."
