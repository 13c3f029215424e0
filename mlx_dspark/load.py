"""Load a target, its tokenizer and a draft, and check that they belong together before any forward."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

from .backend import BLAS_HINT, compute_dtype, on_cpu, preload_blas
from .convert import open_checkpoint
from .convert.detect import is_draft
from .convert.files import read_config, read_headers
from .draft import BlockDraft, Draft, Eagle3Draft, TargetTables, build_draft
from .draft.build import check_finite
from .draft.classic import ClassicDraft
from .errors import FormatError, PairError
from .hub import resolve
from .target import Target

ASSETS = Path(__file__).parent / "assets" / "tiny"


@dataclass(frozen=True)
class Pair:
    """A target with its tokenizer and, if there is one, its draft.

    notes: what was decided on the user's behalf while loading, one sentence each.
    """

    target: Target
    tokenizer: Any
    draft: Draft | None
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a text."""
        return frozenset(self.tokenizer.eos_token_ids)


def load(
    model: str | Path | nn.Module | None = None,
    draft: str | Path | Draft | bool | None = None,
    *,
    tokenizer: Any = None,
    dtype: str = "auto",
    draft_bits: int | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
) -> Pair:
    """Load a pair.

    model: folder, Hugging Face repo id, or a model that mlx-lm has loaded (then give its `tokenizer`);
        None is the small pair that comes with the package.
    draft: folder, repo id or a `Draft`; None is the embedded draft when the embedded target is used,
        otherwise none; False is none.
    dtype: auto (float32 on the CPU, else the checkpoint's own), float32, bfloat16 or float16.
    draft_bits: quantise the draft to 8 or 4 bits after loading.

    Raises FormatError for files that cannot be used and PairError for a draft of another target.
    """
    kind = compute_dtype(dtype)
    notes = [BLAS_HINT] if preload_blas().missing and on_cpu() else []
    if isinstance(model, nn.Module):
        if tokenizer is None:
            raise ValueError("a loaded model needs its tokenizer: load(model, draft, tokenizer=tokenizer)")
        target = Target(model, dict(vars(model.args)), "the loaded model")
    else:
        target, own_tokenizer = _load_target(model or ASSETS / "target", kind, revision, notes)
        tokenizer = own_tokenizer if tokenizer is None else tokenizer
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    if draft is None and model is None:
        draft = ASSETS / "draft"
    if draft is None:
        notes.append(f"no draft was given for {target.name}: decoding plainly, give --draft for speculative decoding")
    if isinstance(draft, (str, Path)):
        draft = _load_draft(draft, target, kind, draft_bits, draft_revision)
    pair = Pair(target, tokenizer, draft or None, tuple(notes), _facts(target, draft or None))
    if pair.draft is not None:
        check_pair(pair.target, pair.draft)
    return pair


def check_pair(target: Target, draft: Draft) -> None:
    """Raise PairError when the draft was made for another target; both values are named."""
    layers = len(target.layers)
    if draft.taps and max(draft.taps) >= layers - 1:
        raise PairError(f"the draft taps layer {max(draft.taps)}, {target.name} has layers 0 to {layers - 1} and the "
                        "last cannot be tapped: use the draft made for this target")
    spec = getattr(draft, "spec", None)
    if spec is None:
        return
    if spec.num_target_layers is not None and spec.num_target_layers != layers:
        raise PairError(f"the draft was made for {spec.num_target_layers} target layers, {target.name} has {layers}: "
                        "use the draft made for this target")
    width = spec.target_hidden_size or spec.hidden_size
    if target.hidden_size is not None and width != target.hidden_size:
        raise PairError(f"the draft's hidden width is {width}, that of {target.name} is "
                        f"{target.hidden_size}: use the draft made for this target")
    if target.vocab_size is not None and spec.vocab_size != target.vocab_size:
        raise PairError(f"the draft's vocabulary has {spec.vocab_size} rows, that of {target.name} has "
                        f"{target.vocab_size}: use the draft made for this target")


def encode_prompt(
    tokenizer: Any, text: str, *, raw: bool = False, system: str | None = None, thinking: bool | None = None
) -> list[int]:
    """Turn a user's text into token ids.

    Uses the tokenizer's chat template when it has one, unless `raw`. system: a system message.
    thinking: passed to the template as `enable_thinking`; None leaves the tokenizer's default.
    Raises ValueError for an empty text, or for system or thinking without a template.
    """
    if not text:
        raise ValueError("the prompt is empty: give some text")
    if raw or not tokenizer.has_chat_template:
        if system is not None or thinking is not None:
            what = "a system message" if system is not None else "thinking on or off"
            raise ValueError(f"{what} needs a chat template: " +
                             ("leave --raw out" if raw else "this tokenizer has none, write it into the prompt"))
        special = tokenizer.bos_token is None or not text.startswith(tokenizer.bos_token)
        return list(tokenizer.encode(text, add_special_tokens=special))
    messages = [{"role": "system", "content": system}] if system is not None else []
    return encode_chat(tokenizer, [*messages, {"role": "user", "content": text}], thinking)


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], thinking: bool | None = None) -> list[int]:
    """Render chat messages with the tokenizer's template, ready for an answer."""
    if not tokenizer.has_chat_template:
        raise ValueError("messages need a chat template and this tokenizer has none: give the prompt as text")
    options = {} if thinking is None else {"enable_thinking": thinking}
    return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, **options))


def _load_target(
    name: str | Path, dtype: mx.Dtype | None, revision: str | None, notes: list[str]
) -> tuple[Target, TokenizerWrapper]:
    folder = resolve(name, revision)
    config = read_config(folder)
    read_headers(folder)  # mlx-lm reads whatever shards are there; a missing or damaged one must be named
    try:
        model, config = load_model(folder, lazy=True)
    except (ValueError, KeyError, TypeError, RuntimeError, FileNotFoundError) as error:
        raise FormatError(f"{folder} cannot be loaded as an mlx-lm text model: {_first_line(error)}") from None
    if dtype is not None:
        model.set_dtype(dtype)
    if dtype == mx.float32 and on_cpu() and _dequantise(model):
        notes.append("quantised weights were expanded to float32: on this CPU OpenBLAS serves many rows at once, "
                     "quantised kernels go row by row")
    mx.eval(model.parameters())
    check_finite(model, str(folder))
    try:
        tokenizer = load_tokenizer(folder, eos_token_ids=_as_list(config.get("eos_token_id")))
    except Exception as error:  # transformers raises anything from OSError to AttributeError here
        raise FormatError(f"{folder} has no usable tokenizer: {_first_line(error)}") from None
    return Target(model, config, str(name)), tokenizer


def _load_draft(
    name: str | Path, target: Target, dtype: mx.Dtype | None, bits: int | None, revision: str | None
) -> Draft:
    """Any packaging of a draft checkpoint, or a whole small model."""
    folder = resolve(name, revision)
    if not is_draft(read_config(folder)):
        return _load_classic(name, folder, target, dtype, bits)
    draft = read_draft(folder, dtype or _draft_dtype(target), bits)
    check_pair(target, draft)
    if draft.tables.incomplete:
        target.require_tables()
        draft.borrow(TargetTables(target.embed, target.head))
    return draft


def read_draft(folder: Path, dtype: mx.Dtype | None = None, bits: int | None = None) -> BlockDraft | Eagle3Draft:
    """A draft from a folder of any packaging; it may still need the target's tables.

    dtype: cast the weights (None keeps them). bits: quantise to 8 or 4 bits. Raises FormatError.
    """
    checkpoint = open_checkpoint(folder)
    files = {stored.path: mx.load(str(stored.path)) for stored in checkpoint.stored.values()}
    weights = {name: files[checkpoint.info(name).path][stored] for name, stored in checkpoint.names.items()}
    return build_draft(checkpoint.spec, weights, str(folder), quantization=checkpoint.quantization,
                       dtype=dtype, bits=bits)


def _load_classic(
    name: str | Path, folder: Path, target: Target, dtype: mx.Dtype | None, bits: int | None
) -> ClassicDraft:
    model, _ = _load_target(folder, dtype, None, [])
    model.name = str(name)
    if model.vocab_size != target.vocab_size:
        raise PairError(f"the draft model's vocabulary has {model.vocab_size} rows, that of {target.name} has "
                        f"{target.vocab_size}: use a model with the same tokenizer")
    if bits is not None:
        nn.quantize(model.model, 64, bits)
    return ClassicDraft(model)


def _draft_dtype(target: Target) -> mx.Dtype | None:
    """A float16 target's taps overflow nothing, but its draft must compute in the same family."""
    return mx.float16 if target.dtype == mx.float16 else None


def _dequantise(model: nn.Module) -> bool:
    """Expand quantised weights where OpenBLAS is loaded and they fit in half of the memory."""
    if preload_blas().path is None:
        return False
    quantised = [m for _, m in model.named_modules() if isinstance(m, (nn.QuantizedLinear, nn.QuantizedEmbedding))]
    expanded = sum(4 * m.weight.size * 32 // m.bits for m in quantised)  # bytes of float32
    if not quantised or 2 * expanded > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        return False
    dequantize_model(model)
    return True


def _facts(target: Target, draft: Draft | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"target": target.name, "dtype": str(target.dtype).removeprefix("mlx.core.")}
    if draft is not None:
        facts["gamma"] = draft.gamma
        facts["taps"] = list(draft.taps)
    return facts


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _as_list(value: Any) -> list[int] | None:
    return [value] if isinstance(value, int) else value
