"""The settings of a training run: a flat TOML file, overridden by options. Nothing here imports mlx."""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import FormatError

_CE_ALONE = {"head": "none", "confidence": False, "ce": 1.0, "tv": 0.0, "confidence_weight": 0.0}
KINDS: dict[str, dict[str, Any]] = {  # and the settings that a kind leaves no choice of
    "dspark": {},
    "dflash": _CE_ALONE,
    "eagle3": {**_CE_ALONE, "layers": 1, "columns": 0},
}
HEADS = ("vanilla", "gated", "rnn", "none")


def _option(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True)
class TrainConfig:
    """One run. Names are those of the TOML file and, with dashes, of the options."""

    kind: str = _option("dspark", "dspark; dflash: no head, cross entropy alone; eagle3.", choices=tuple(KINDS))
    head: str = _option("vanilla", "Sequential head, which corrects a draft by the one before.", choices=HEADS)
    rank: int = _option(256, "Rank of the sequential head.", least=1)
    gamma: int = _option(7, "Drafts of a block.", least=1)
    layers: int = _option(5, "Layers of the draft (eagle3: 1).", least=1)
    taps: tuple[int, ...] = _option((), "Tapped target layers, as 1,9,17. Default: five or fewer, evenly spread.")
    mask_token: int = _option(-1, "Id of the mask token. Default: one that text does not use.", least=-1)
    confidence: bool = _option(True, "Train a confidence head.")
    ce: float = _option(0.1, "Weight of cross entropy.", least=0.0)
    tv: float = _option(0.9, "Weight of total variation, which is what costs acceptance.", least=0.0)
    confidence_weight: float = _option(1.0, "Weight of the confidence loss.", least=0.0)
    decay: float = _option(4.0, "Slot k counts exp(-(k-1)/decay); 0: all alike.", least=0.0)
    step_decay: float = _option(0.8, "eagle3: step s counts step_decay^s.", least=0.0)
    lr: float = _option(6e-4, "Peak learning rate.", least=0.0)
    warmup: float = _option(0.04, "Share of the steps that warm up.", least=0.0, most=1.0)
    clip: float = _option(1.0, "Most norm of the gradients; 0: any.", least=0.0)
    weight_decay: float = _option(0.0, "Of AdamW.", least=0.0)
    steps: int = _option(0, "Optimiser steps; 0: as many as the epochs take.", least=0)
    epochs: int = _option(10, "Passes over the data, where steps is 0.", least=1)
    batch: int = _option(4, "Sequences of a micro-batch, all machines together.", least=1)
    accumulate: int = _option(1, "Micro-batches of an optimiser step.", least=1)
    anchors: int = _option(512, "Blocks trained on in a sequence, at most.", least=1)
    max_length: int = _option(2048, "Tokens of a sequence; longer dialogues are cut.", least=16)
    columns: int = _option(0, "Loss over the batch's own tokens and so many others, drawn; 0: all.", least=0)
    min_tokens: int = _option(14, "Sequences with fewer tokens to train on are dropped.", least=2)
    template: str = _option("auto", "How dialogues become text.", choices=("auto", "qwen", "gemma4", "tokenizer"))
    valid: float = _option(0.05, "Share of the documents that are held out.", least=0.0, most=0.9)
    valid_every: int = _option(200, "Steps between validations; 0: only at the end.", least=0)
    valid_rows: int = _option(32, "Held-out sequences of a validation, at most.", least=1)
    save_every: int = _option(200, "Steps between checkpoints.", least=1)
    dtype: str = _option("auto", "Compute in; masters are float32. auto: float32 on the CPU, else bfloat16.",
                         choices=("auto", "float32", "bfloat16"))
    seed: int = _option(42, "Of the draft's first weights, the order and the anchors.", least=0)

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            _check(entry, getattr(self, entry.name))
        for name, value in KINDS[self.kind].items():
            object.__setattr__(self, name, value)
        if self.confidence_weight == 0:
            object.__setattr__(self, "confidence", False)

    def identity(self) -> dict[str, Any]:
        """What a resumed run must share with the run it continues; how often it reports may change."""
        free = ("valid_every", "save_every", "valid_rows")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in free}

    def to_toml(self) -> str:
        """The settings as a file that `read_config` reads."""
        return "".join(f"{name} = {_toml(value)}\n" for name, value in dataclasses.asdict(self).items())


def read_config(path: Path | None, overrides: Mapping[str, Any]) -> TrainConfig:
    """Settings of a TOML file (None: the defaults) with those of `overrides` that are not None.

    Raises FormatError for what is not TOML, an unknown name or a value of the wrong kind, ValueError for a value out of
    range.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise FormatError(f"{path} is not TOML ({error}): write lines like lr = 6e-4") from None
    known = {entry.name for entry in dataclasses.fields(TrainConfig)}
    for name in sorted(values.keys() - known):
        near = difflib.get_close_matches(name, known, 1)
        meant = f"did you mean {near[0]}?" if near else "the settings are " + ", ".join(sorted(known))
        raise FormatError(f"{path}: {name} is no setting: {meant}")
    values.update({name: value for name, value in overrides.items() if value is not None})
    if isinstance(values.get("taps"), list):
        values["taps"] = tuple(values["taps"])
    config = TrainConfig(**values)
    for name, value in values.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} is {_toml(value)}, but with kind {config.kind} and the other settings it can "
                             f"only be {_toml(getattr(config, name))}: leave it out")
    return config


def _check(entry: dataclasses.Field[Any], value: Any) -> None:
    """Raise ValueError unless `value` is of the default's type and within the bounds."""
    kind, facts = type(entry.default), entry.metadata
    whole = isinstance(value, int) and not isinstance(value, bool)
    fits = {bool: isinstance(value, bool), int: whole, str: isinstance(value, str),
            float: whole or (isinstance(value, float) and math.isfinite(value)),
            tuple: isinstance(value, tuple) and all(isinstance(tap, int) for tap in value)}[kind]
    if not fits:
        raise ValueError(f"{entry.name} is {value!r}: give a value like {_toml(entry.default)}")
    if value not in facts.get("choices", (value,)):
        raise ValueError(f"{entry.name} is {value!r}: give {', '.join(facts['choices'])}")
    if kind in (int, float) and not facts["least"] <= value <= facts.get("most", math.inf):
        most = f" to {facts['most']}" if "most" in facts else " or more"
        raise ValueError(f"{entry.name} is {value}: give {facts['least']}{most}")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else repr(value)
