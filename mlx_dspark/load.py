"""Load a target, its tokenizer and a draft, and check that they belong together before any forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

from .backend import BLAS_HINT, compute_dtype, memory_bytes, on_cpu, preload_blas
from .candidates import find_walk
from .convert import open_checkpoint
from .convert.detect import is_draft
from .convert.files import read_config, read_headers
from .draft import BlockDraft, Draft, Eagle3Draft, TargetTables, build_draft
from .draft.build import check_finite
from .draft.classic import ClassicDraft
from .errors import CacheError, FormatError, PairError, first_line
from .hub import resolve
from .kernels import REFERENCE, Choice, Kernels, choose_kernels
from .pairing import check_pair, check_tokenizers, matched
from .registry import find_target
from .structs import KVOptions
from .target import Target

ASSETS = Path(__file__).parent / "assets" / "tiny"
ANY_LENGTH = 10**30  # transformers' own number for a tokenizer without a limit


@dataclass(frozen=True)
class Pair:
    """A target with its tokenizer and, if there is one, its draft.

    notes: what was decided on the user's behalf while loading, one sentence each.
    kernels: what runs the accept test; the draft has its own part of them.
    """

    target: Target
    tokenizer: Any
    draft: Draft | None
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    kernels: Kernels = REFERENCE

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
        otherwise the best one that is known for this target (see `mlx_dspark.registry`); False is none.
    dtype: auto (float32 on the CPU, else the checkpoint's own), float32, bfloat16 or float16.
    draft_bits: quantise the draft to 8 or 4 bits after loading.

    Raises FormatError for files that cannot be used and PairError for a draft of another target.
    """
    kind = compute_dtype(dtype)
    notes = [BLAS_HINT] if preload_blas().missing and on_cpu() else []
    folder = None
    if isinstance(model, nn.Module):
        if tokenizer is None:
            raise ValueError("a loaded model needs its tokenizer: load(model, draft, tokenizer=tokenizer)")
        target = Target(model, dict(vars(model.args)), "the loaded model")
    else:
        folder = resolve(model or ASSETS / "target", revision)
        target, own_tokenizer = _load_target(folder, str(model or folder), kind, notes)
        tokenizer = own_tokenizer if tokenizer is None else tokenizer
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    options = _DraftOptions(tokenizer, kind, draft_bits, draft_revision)
    if draft is None and model is None:
        draft = ASSETS / "draft"
    if draft is None:
        draft = _known_draft(target, folder, options, notes)
    if isinstance(draft, (str, Path)):
        draft = _load_draft(draft, target, options)
    elif draft:
        _join(target, draft, tokenizer)
    kernels = _kernels(target, draft) if draft else REFERENCE
    facts = {**_facts(target, draft or None), "kernels": kernels.summary}
    return Pair(target, tokenizer, draft or None, (*notes, *kernels.notes), facts, kernels)


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


@dataclass(frozen=True)
class _DraftOptions:
    """How a draft is loaded: the target's tokenizer and the caller's wishes."""

    tokenizer: TokenizerWrapper
    dtype: mx.Dtype | None
    bits: int | None
    revision: str | None


def _load_target(
    folder: Path, name: str, dtype: mx.Dtype | None, notes: list[str]
) -> tuple[Target, TokenizerWrapper]:
    config = read_config(folder)
    read_headers(folder)  # mlx-lm reads whatever shards are there; a missing or damaged one must be named
    try:
        model, config = load_model(folder, lazy=True)
    except (ValueError, KeyError, TypeError, RuntimeError, FileNotFoundError) as error:
        raise FormatError(f"{folder} cannot be loaded as an mlx-lm text model: {first_line(error)}") from None
    if dtype is not None:
        model.set_dtype(dtype)
    if _dequantise(model, dtype):
        notes.append("quantised weights were expanded: this CPU's quantised kernels go row by row, and are slow with "
                     "half-precision activations")
    mx.eval(model.parameters())
    check_finite(model, str(folder))
    try:
        # False, not unset: transformers would ask on the terminal whether to run the checkpoint's code. A length: it
        # would warn of every text longer than the tokenizer's own, which training cuts into windows and generation
        # refuses by itself.
        options = {"trust_remote_code": False, "model_max_length": ANY_LENGTH}
        tokenizer = load_tokenizer(folder, options, _as_list(config.get("eos_token_id")))
    except Exception as error:  # transformers raises anything from OSError to AttributeError here
        raise FormatError(f"{folder} has no usable tokenizer: {first_line(error)}") from None
    return Target(model, config, name), tokenizer


def _known_draft(target: Target, folder: Path | None, options: _DraftOptions, notes: list[str]) -> Draft | None:
    """The best draft that the registry knows and that can be had; None, with a note, is plain decoding."""
    found = None if folder is None else find_target(target.name, folder)
    if found is None:
        notes.append(f"no draft was given for {target.name}: decoding plainly, give --draft for speculative decoding")
        return None
    known, reason = found.best()
    if known is None:
        notes.append(f"{found.describe()}, and {reason}: decoding plainly, give --draft to try another one")
        return None
    try:
        target.start(KVOptions()).require_rollback()  # before anything is downloaded
        pinned = dataclasses.replace(options, revision=options.revision or known.revision)
        draft = _load_draft(known.repo, target, pinned)
    except (FormatError, PairError, CacheError) as error:
        notes.append(f"{found.describe()}, whose draft {known.repo} cannot be used ({first_line(error)}): decoding "
                     "plainly; --draft names another one")
        return None
    notes.append(f"{found.describe()}: using its draft {known.repo} ({known.kind}, the best one known); --draft names "
                 "another one")
    return draft


def _load_draft(name: str | Path, target: Target, options: _DraftOptions) -> Draft:
    """Any packaging of a draft checkpoint, or a whole small model."""
    folder = resolve(name, options.revision)
    if not is_draft(read_config(folder)):
        return _load_classic(name, folder, target, options)
    draft = read_draft(folder, options.dtype, options.bits)
    if options.bits is None:
        _dequantise(draft, options.dtype)
    if {draft.dtype, target.dtype} == {mx.float16, mx.bfloat16}:
        draft.set_dtype(target.dtype)  # across the two half types a draft's proposals are worthless
    _join(target, draft, options.tokenizer)
    return draft


def _join(target: Target, draft: Draft, tokenizer: Any) -> None:
    """Check that they fit, lend the tables that the draft lacks, and agree on the width of logits."""
    check_pair(target, draft, tokenizer)
    tables = getattr(draft, "tables", None)
    if tables is None:
        return
    if tables.incomplete:
        target.require_tables()
        tables.borrow(TargetTables(target.embed, target.head))
    if target.vocab_size is not None:
        tables.match(target.vocab_size)


def _kernels(target: Target, draft: Draft) -> Kernels:
    """Choose the kernels of a pair, and give the draft its part of them."""
    if target.vocab_size is None or target.dtype is None:
        return REFERENCE
    block = draft if isinstance(draft, BlockDraft) else None
    markov = None if block is None or block.tables.reduced else block.sequential_head
    kernels = choose_kernels(
        markov, target.vocab_size if block is None else block.tables.rows(block.spec.head_rows), draft.gamma,
        target.dtype if block is None else block.dtype, target.vocab_size, target.dtype,
        0 if block is None else block.spec.hidden_size,
    )
    if block is not None:
        by_candidates = find_walk(block)
        if by_candidates is not None:
            chosen = Choice("walk_greedy", "", "candidates", "its bounds are stored")
            others = [dataclasses.replace(choice, op="others") for choice in kernels.choices]  # one stood for all
            kernels = dataclasses.replace(kernels, walk_greedy=by_candidates, choices=(chosen, *others))
        block.use(kernels)
    return kernels


def read_draft(folder: Path, dtype: mx.Dtype | None = None, bits: int | None = None) -> BlockDraft | Eagle3Draft:
    """A draft from a folder of any packaging; it may still need the target's tables.

    dtype: cast the weights (None keeps them). bits: quantise to 8 or 4 bits. Raises FormatError.
    """
    checkpoint = open_checkpoint(folder)
    files = {stored.path: mx.load(str(stored.path)) for stored in checkpoint.stored.values()}
    weights = {name: files[checkpoint.info(name).path][stored] for name, stored in checkpoint.names.items()}
    return build_draft(checkpoint.spec, weights, str(folder), quantization=checkpoint.quantization,
                       dtype=dtype, bits=bits)


def _load_classic(name: str | Path, folder: Path, target: Target, options: _DraftOptions) -> ClassicDraft:
    model, tokenizer = _load_target(folder, str(name), options.dtype, [])
    check_tokenizers(target, options.tokenizer, model, tokenizer)
    if options.bits is not None:
        nn.quantize(model.model, 64, options.bits)
    return ClassicDraft(matched(model, target))


def _dequantise(model: nn.Module, dtype: mx.Dtype | None) -> bool:
    """Expand quantised weights on a CPU whose plain matmuls serve more rows: half types, or float32 with OpenBLAS.

    Only where they fit in half of the memory.
    """
    if not on_cpu() or dtype is None or (dtype == mx.float32 and preload_blas().path is None):
        return False
    quantised = [m for _, m in model.named_modules() if isinstance(m, (nn.QuantizedLinear, nn.QuantizedEmbedding))]
    expanded = sum(4 * m.weight.size * 32 // m.bits for m in quantised)  # bytes of float32
    if not quantised or 2 * expanded > memory_bytes():
        return False
    dequantize_model(model)
    return True


def _facts(target: Target, draft: Draft | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"target": target.name, "dtype": str(target.dtype).removeprefix("mlx.core.")}
    if draft is not None:
        facts["gamma"] = draft.gamma
        facts["taps"] = list(draft.taps)
    return facts


def _as_list(value: Any) -> list[int] | None:
    return [value] if isinstance(value, int) else value
