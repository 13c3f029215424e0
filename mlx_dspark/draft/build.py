"""From normalised facts and tensors to a draft model: every weight checked, none guessed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import FormatError
from .block import BlockDraft
from .eagle3 import Eagle3Draft
from .spec import DraftSpec

_KINDS = {"block": BlockDraft, "eagle3": Eagle3Draft}


def build_draft(
    spec: DraftSpec, weights: Mapping[str, mx.array], where: str, *, quantization: Mapping[str, Any] | None = None,
    dtype: mx.Dtype | None = None, bits: int | None = None, group_size: int = 64,
) -> BlockDraft | Eagle3Draft:
    """A draft with `weights` (normalised names).

    quantization: how the weights are stored (mlx-lm's section). dtype: cast them (None keeps them).
    bits: quantise to 8 or 4 bits after loading. Raises FormatError, naming `where` and the tensor.
    """
    if bits not in (None, 4, 8):
        raise ValueError(f"draft_bits is {bits}: give 8 or 4")
    try:
        draft = _KINDS[spec.kind](spec, "tables.embed_tokens.weight" in weights, "tables.lm_head.weight" in weights)
    except (TypeError, ValueError, ArithmeticError, AttributeError, KeyError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:100]
        raise FormatError(f"{where}: its facts describe no draft that could be built ({reason})") from None
    if quantization is not None:
        nn.quantize(draft, quantization["group_size"], quantization["bits"],
                    class_predicate=lambda path, m: hasattr(m, "to_quantized") and f"{path}.scales" in weights)
    _check_shapes(draft, weights, where)
    draft.load_weights(list(weights.items()))
    if dtype is not None:
        draft.set_dtype(dtype)
    if bits is not None:
        nn.quantize(draft, group_size, bits, class_predicate=lambda path, m: quantisable(path, m, group_size))
    mx.eval(draft.parameters())
    check_finite(draft, where)
    _check_mapping(draft, where)
    return draft.eval()


def quantisable(path: str, module: nn.Module, group_size: int) -> bool:
    """What divides into groups; the confidence head (one output) stays as it is."""
    return (hasattr(module, "to_quantized") and not path.startswith("confidence_head")
            and module.weight.shape[-1] % group_size == 0)


def check_finite(model: nn.Module, where: str) -> None:
    """Raise FormatError naming the first weight that holds NaN or infinity."""
    floats = [(name, array) for name, array in tree_flatten(model.parameters())
              if mx.issubdtype(array.dtype, mx.floating)]
    flags = mx.stack([mx.isfinite(array).all() for _, array in floats]).tolist() if floats else []
    for (name, _), finite in zip(floats, flags, strict=True):
        if not finite:
            raise FormatError(f"{where}: weight {name} holds NaN or infinity: the checkpoint is damaged, "
                              "download it again")


def _check_mapping(draft: nn.Module, where: str) -> None:
    """d2t must map the reduced vocabulary to distinct ids of the target: a wrong one would write out of range."""
    if "d2t" not in draft.tables:
        return
    ids = (mx.arange(draft.tables.d2t.shape[0]) + draft.tables.d2t).tolist()
    if min(ids) < 0 or max(ids) >= draft.spec.vocab_size or len(set(ids)) < len(ids):
        raise FormatError(f"{where}: d2t does not map to distinct ids below {draft.spec.vocab_size}: "
                          "the checkpoint is damaged, download it again")


def _check_shapes(draft: nn.Module, weights: Mapping[str, mx.array], where: str) -> None:
    wanted = dict(tree_flatten(draft.parameters()))
    for name in sorted(wanted.keys() - weights.keys()):
        raise FormatError(f"{where}: tensor {name} is missing: the checkpoint is incomplete or of another layout")
    for name in sorted(weights.keys() - wanted.keys()):
        raise FormatError(f"{where}: tensor {name} is not part of this kind of draft: config.json does not describe it")
    for name, array in wanted.items():
        if array.shape != weights[name].shape:
            raise FormatError(f"{where}: tensor {name} is {list(weights[name].shape)}, config.json asks for "
                              f"{list(array.shape)}: they do not belong together")
