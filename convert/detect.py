"""Which packaging a folder has: by its keys and tensors, in a fixed order, never by its name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

from mlx_dspark.errors import FormatError

from . import deepspec, eagle3, liquid, own, specforge, speculators, zlab
from .refused import architecture_of, refusal

Test = Callable[[Mapping[str, Any]], bool]


def _nested(config: Mapping[str, Any], key: str) -> Any:
    section = config.get("dflash_config")
    return section.get(key) if isinstance(section, Mapping) else None


# The first test that holds decides. `DSparkDraftModel` is a shell that several packagings use: it decides nothing.
_TESTS: list[tuple[Test, ModuleType]] = [
    (lambda c: own.KEY in c, own),
    (lambda c: "speculators_config" in c or "speculators_model_type" in c, speculators),
    (lambda c: _nested(c, "projector_type") == "dspark", specforge),
    (lambda c: architecture_of(c) == "Lfm2DSparkDraftModel", liquid),
    (lambda c: architecture_of(c) in deepspec.ARCHITECTURES, deepspec),
    (lambda c: architecture_of(c) in eagle3.ARCHITECTURES, eagle3),
    (lambda c: architecture_of(c) in ("DFlashDraftModel", "DFlash2DraftModel"), zlab),
    # OpenBMB and other trainers keep DeepSpec's keys under a class name of their own.
    (lambda c: {"target_layer_ids", "block_size", "mask_token_id", "markov_rank"} <= c.keys(), deepspec),
]


def detect(config: Mapping[str, Any], tensors: Collection[str], where: str) -> ModuleType:
    """The packaging module of a draft (its NAME, `read` and `rename`).

    Raises FormatError for drafts that are known and not run, and for what is no draft at all.
    """
    if own.KEY not in config:
        reason = refusal(config, tensors)
        if reason is not None:
            raise FormatError(f"{where} is {reason}")
    for test, packaging in _TESTS:
        if test(config):
            return packaging
    raise FormatError(f"{where}: architecture {architecture_of(config)!r} is no draft this version knows: "
                      "see docs/checkpoints.md for the packagings that load")


def is_draft(config: Mapping[str, Any]) -> bool:
    """False for whole models, which may serve as a classic draft."""
    return refusal(config, ()) is not None or any(test(config) for test, _ in _TESTS)
