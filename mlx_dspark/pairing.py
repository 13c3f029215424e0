"""Does a draft belong to a target? Asked before any forward; each refusal names both values.

Only what shapes and tables can show is asked here: a tap or an anchor that is off by one gives the right
text and a tau near one, which `mlx_dspark.doctor` looks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .draft import Draft, DraftSpec
from .draft.classic import Model
from .draft.tables import fitted
from .errors import PairError
from .structs import KVOptions, Verified
from .target import Target

PADDING = 1024  # tables are padded to a round number of rows; no public one by more than this
PROBES = (  # texts that two different tokenizers hardly split alike
    "The quick brown fox, 1234567890 of them, didn't jump over any lazy dogs.",
    "def main(args):\n\tfor i in range(10):\n        print(f\"{i:>4} -> {i ** 2}\")\n",
    "L'été dernier, Straßenbahn, naïve façade; Привет, мир! 今日は世界。 안녕하세요 🙂",
    "\\int_0^1 x^2 dx = 1/3   <b>https://example.org/?q=a%20b</b>",
)
_REMEDY = "use the draft made for this target"


def check_pair(target: Target, draft: Draft, tokenizer: Any = None) -> None:
    """Raise PairError when the draft was made for another target; both values are named.

    Taps: layers of the target, -1 (its embedding output) included, the last layer not (it is read after
    the final norm). Widths: one tap is as wide as the target's hidden state; a draft that borrows the
    target's tables must itself be that wide.
    Vocabulary: the two tables may differ by padding, which is up to PADDING rows and none that the
    tokenizer can write. The draft's mask token must be a row of the table that embeds it, its own or the
    target's; a reduced vocabulary needs a head of the draft's own. Without a tokenizer no row of the
    target counts as padding.
    Dtypes: float16 and bfloat16 do not mix.
    """
    _check_taps(target, draft.taps)
    spec = getattr(draft, "spec", None)
    if spec is None:
        return
    tables = getattr(draft, "tables", {})
    _check_widths(target, spec, borrows="embed_tokens" not in tables or "lm_head" not in tables)
    if target.vocab_size is not None:
        _check_sizes("the draft's vocabulary", spec.vocab_size, target, tokenizer, _REMEDY)
        _check_tables(target, spec, target.vocab_size, "embed_tokens" in tables, "lm_head" in tables)
    dtype = getattr(draft, "dtype", target.dtype)
    if {dtype, target.dtype} == {mx.float16, mx.bfloat16}:
        raise PairError(f"the draft computes in {_name(dtype)}, {target.name} in {_name(target.dtype)}: their taps "
                        "do not mix, load both with the same --dtype")


def check_tokenizers(target: Target, tokenizer: Any, model: Target, other: Any) -> None:
    """Raise PairError unless a classic draft `model` speaks the target's tokens.

    The vocabularies are the same, or differ in tokens that no ordinary text uses: then the probes decide.
    """
    ids = _vocabulary(tokenizer), _vocabulary(other)
    if ids[0] is None or ids[0] != ids[1]:
        for text in PROBES:
            ours, theirs = _encode(tokenizer, text), _encode(other, text)
            if ours != theirs:
                raise PairError(f"the draft model {model.name} has another tokenizer than {target.name} (they split "
                                f"{_short(text)} into {len(theirs)} and {len(ours)} tokens, not the same ones): use a "
                                "draft model with the same tokenizer")
    if None not in (model.vocab_size, target.vocab_size):
        _check_sizes("the draft model's vocabulary", model.vocab_size, target, tokenizer,
                     "use a model with the same tokenizer")


def matched(model: Target, target: Target) -> Model:
    """A classic draft's model, with logits as wide as the target's."""
    if None in (model.vocab_size, target.vocab_size) or model.vocab_size == target.vocab_size:
        return model
    return _Matched(model, model.vocab_size, target.vocab_size)


class _Matched:
    """`rows`: those of the model's own table. `width`: columns of the target's logits."""

    def __init__(self, model: Model, rows: int, width: int):
        self.model, self.rows, self.width = model, rows, width

    def start(self, options: KVOptions) -> Any:
        return self.model.start(options)

    def forward(self, tokens: mx.array, cache: Any) -> Verified:
        verified = self.model.forward(mx.minimum(tokens, self.rows - 1), cache)
        return Verified(fitted(verified.logits, self.width), verified.taps)


def _check_taps(target: Target, taps: Sequence[int]) -> None:
    layers = len(target.layers)
    if taps and max(taps) >= layers - 1:
        raise PairError(f"the draft taps layer {max(taps)}, {target.name} has layers 0 to {layers - 1} and the "
                        f"last cannot be tapped: {_REMEDY}")
    if taps and min(taps) < -1:
        raise PairError(f"the draft taps layer {min(taps)}, {target.name} has layers 0 to {layers - 1} and -1 for its "
                        f"embeddings: {_REMEDY}")


def _check_widths(target: Target, spec: DraftSpec, borrows: bool) -> None:
    layers, hidden = len(target.layers), target.hidden_size
    if spec.num_target_layers is not None and spec.num_target_layers != layers:
        raise PairError(f"the draft was made for {spec.num_target_layers} target layers, {target.name} has {layers}: "
                        f"{_REMEDY}")
    width = spec.target_hidden_size or spec.hidden_size
    if hidden is None:
        return
    if width != hidden:
        taps = len(spec.taps)
        raise PairError(f"the draft's hidden width is {width}, that of {target.name} is {hidden} (its fc takes "
                        f"{spec.tap_width} columns, {taps} taps of this target have {taps * hidden}): {_REMEDY}")
    if borrows and spec.hidden_size != hidden:
        raise PairError(f"the draft has no embedding or head of its own and is {spec.hidden_size} wide, the tables of "
                        f"{target.name} are {hidden} wide: use a draft that carries its tables")


def _check_sizes(what: str, size: int, target: Target, tokenizer: Any, remedy: str) -> None:
    """`size`: rows of the draft's vocabulary."""
    ids, rows = _vocabulary(tokenizer), target.vocab_size
    written = min(rows, max(ids.values()) + 1) if ids else rows  # some tokenizers know more than the model
    if size < written or abs(size - rows) > PADDING:
        used = f" ({written} in use)" if written < rows else ""
        raise PairError(f"{what} has {size} rows, that of {target.name} has {rows}{used}: {remedy}")


def _check_tables(target: Target, spec: DraftSpec, rows: int, own_embed: bool, own_head: bool) -> None:
    mask = spec.mask_token_id
    if not own_embed and mask is not None and mask >= rows:
        raise PairError(f"the draft's mask token is {mask} and it has no embedding of its own, that of {target.name} "
                        f"has {rows} rows: use a draft that carries its embedding, or a target with its padding")
    if not own_head and spec.draft_vocab_size is not None:
        raise PairError(f"the draft speaks a reduced vocabulary of {spec.draft_vocab_size} and has no head of its own, "
                        f"that of {target.name} has {rows} rows: use a draft that carries its head")


def _vocabulary(tokenizer: Any) -> dict[str, int] | None:
    get = getattr(tokenizer, "get_vocab", None)
    return get() if callable(get) else None


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _short(text: str) -> str:
    return repr(text if len(text) <= 20 else text[:17] + "...")


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
