"""The normalised facts of a draft checkpoint, whatever it was packed as."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import FormatError

FAMILIES = ("qwen3", "gemma4")
KINDS = ("block", "eagle3")
SIZE_LIMIT = 2**20  # of any width: no draft comes near it, and a larger one would ask for absurd memory
MARKOV_TYPES = ("none", "vanilla", "gated", "rnn")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions. interleaved: consecutive pairs instead of half-split.

    scaling: None, or the checkpoint's own scaling dict (`rope_type` yarn, proportional, ...).
    """

    theta: float
    interleaved: bool = False
    scaling: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class SelectorSpec:
    """DFlash2: candidates re-scored along the path, and causal convolutions around each sublayer."""

    rank: int
    top_k: int
    conv_kernel: int
    conv_group: int


@dataclass(frozen=True)
class DraftSpec:
    """Geometry, taps, heads and conventions of a draft. The loop only sees `gamma` and `taps`.

    family: whose layers it is built of. kind: `block` (parallel block) or `eagle3` (recurrent).
    taps: decoder layers counted from 0; -1 is the embedding output.
    block_size: rows of a block; for eagle3 the most steps per round.
    anchor_predicts: the anchor's row predicts too, so gamma is block_size; otherwise block_size - 1.
    windows: per layer, how many positions a row looks back (itself included); None is all.
    causal: per layer, whether block rows see only earlier rows of the block.
    draft_vocab_size: rows of the output head; smaller than vocab_size when d2t maps ids back.
    markov: one of MARKOV_TYPES; markov_rank is 0 for "none".
    confidence_with_markov: the confidence head also sees W1[x_{k-1}].
    target_hidden_size: width of one tap when it is not hidden_size.
    num_target_layers: None when the checkpoint does not say. head_dim of Gemma4 is global_head_dim.
    temperatures: the calibration that the checkpoint ships, one per slot.
    """

    family: str
    kind: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeSpec
    taps: tuple[int, ...]
    block_size: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    mask_token_id: int | None = None
    anchor_predicts: bool = True
    attention_bias: bool = False
    keys_are_values: bool = False
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    markov: str = "none"
    markov_rank: int = 0
    confidence: bool = False
    confidence_with_markov: bool = False
    softcap: float | None = None
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    selector: SelectorSpec | None = None
    num_target_layers: int | None = None
    temperatures: tuple[float, ...] | None = None

    @property
    def gamma(self) -> int:
        """Proposals per round."""
        return self.block_size if self.anchor_predicts else self.block_size - 1

    @property
    def tap_width(self) -> int:
        """Width of all taps of a position side by side."""
        return len(self.taps) * (self.target_hidden_size or self.hidden_size)

    @property
    def head_rows(self) -> int:
        """Rows of the output head."""
        return self.draft_vocab_size or self.vocab_size

    def check(self, where: str) -> None:
        """Raise FormatError, naming `where` and the value, if these facts cannot be a draft."""
        for problem in self._problems():
            raise FormatError(f"{where}: {problem[:400]}")

    def _problems(self) -> list[str]:
        problems = []
        if self.family not in FAMILIES or self.kind not in KINDS:
            problems.append(f"family {self.family!r}, kind {self.kind!r} is not a draft this version runs")
        for name in ("hidden_size", "intermediate_size", "num_heads", "head_dim", "markov_rank", "block_size"):
            if getattr(self, name) > SIZE_LIMIT:
                problems.append(f"{name} {getattr(self, name)} is beyond anything that exists: the config is damaged")
        if self.num_layers > 256 or self.vocab_size > 2**24:
            problems.append(f"{self.num_layers} layers with {self.vocab_size} rows are beyond anything that exists: "
                            "the config is damaged")
        if self.num_heads % self.num_kv_heads:
            problems.append(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.markov not in MARKOV_TYPES or (self.markov == "none") != (self.markov_rank == 0):
            problems.append(f"markov_head_type {self.markov!r} with rank {self.markov_rank} is unknown: "
                            "vanilla, gated and rnn are supported, rank 0 is none")
        if self.confidence_with_markov and not self.markov_rank:
            problems.append("confidence_head_with_markov is true but markov_rank is 0: "
                            "the confidence head has no Markov row to look at")
        if self.kind == "block" and (self.mask_token_id is None or not 0 <= self.mask_token_id < self.vocab_size):
            problems.append(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}: "
                            "the config does not belong to these weights")
        if self.gamma < 1:
            problems.append(f"block_size {self.block_size} leaves no slot to propose")
        if len(self.windows) != self.num_layers or len(self.causal) != self.num_layers:
            problems.append(f"layer_types describe {len(self.windows)} layers, num_hidden_layers is {self.num_layers}")
        if any(window is not None and window < 1 for window in self.windows):
            problems.append(f"sliding_window {self.windows} must be positive")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            problems.append(f"draft_vocab_size {self.draft_vocab_size} exceeds the vocabulary of {self.vocab_size}")
        if self.temperatures is not None and (
            len(self.temperatures) < self.gamma or any(not 0 < t < math.inf for t in self.temperatures)
        ):
            problems.append(f"confidence temperatures {self.temperatures} are not {self.gamma} positive numbers")
        return problems + self._tap_problems()

    def _tap_problems(self) -> list[str]:
        taps, layers = self.taps, self.num_target_layers
        if not taps:
            return ["target_layer_ids is empty: a draft needs at least one tap"]
        if any(b <= a for a, b in zip(taps, taps[1:], strict=False)) or taps[0] < -1:
            return [f"target_layer_ids {list(taps)} must increase and start at -1 (embeddings) or above"]
        if layers is not None and taps[-1] >= layers - 1:
            return [f"target_layer_ids {list(taps)} reach the last of {layers} target layers, which cannot be tapped"]
        return []

    def to_dict(self) -> dict[str, Any]:
        """As JSON: what a converted folder stores and `--dry-run` prints."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any], where: str) -> DraftSpec:
        """The inverse of `to_dict`. Raises FormatError for anything else."""
        try:
            values = dict(facts)
            values["rope"] = RopeSpec(**values["rope"])
            if values.get("selector") is not None:
                values["selector"] = SelectorSpec(**values["selector"])
            for name in ("taps", "windows", "causal", "temperatures"):
                if values.get(name) is not None:
                    values[name] = tuple(values[name])
            spec = cls(**values)
            spec.check(where)
        except FormatError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise FormatError(f"{where}: its normalised facts are damaged ({str(error)[:100]}): "
                              "convert the draft again") from None
        return spec
