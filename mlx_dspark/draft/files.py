"""Read a draft folder into a BlockDraft: weights checked one by one, never guessed."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import FormatError
from .block import BlockDraft
from .spec import DraftSpec

_HEADS = ("markov_head.", "confidence_head.", "embed_tokens.", "lm_head.")


def read_draft(
    folder: Path, dtype: mx.Dtype | None = None, bits: int | None = None, group_size: int = 64
) -> BlockDraft:
    """Load a DeepSpec draft folder (config.json, model.safetensors or shards).

    dtype: cast the weights (None keeps them). bits: quantise to 8 or 4 bits after loading.
    Raises FormatError with the file, what is wrong with it and the remedy.
    """
    config = read_config(folder)
    spec = DraftSpec.from_deepspec(config, str(folder))
    weights = {_rename(name): array for name, array in read_weights(folder).items()}
    draft = BlockDraft(spec, "embed_tokens.weight" in weights, "lm_head.weight" in weights)
    if "quantization" in config:
        _match_quantization(draft, weights, config["quantization"])
    _check_shapes(draft, weights, folder)
    draft.load_weights(list(weights.items()))
    if dtype is not None:
        draft.set_dtype(dtype)
    if bits is not None:
        quantize(draft, bits, group_size)
    mx.eval(draft.parameters())
    check_finite(draft, folder)
    return draft.eval()


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json as a dict. Raises FormatError when it is missing or not JSON."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FormatError(f"{folder} has no config.json: give a model folder or a Hugging Face repo id") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise FormatError(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(config, dict):
        raise FormatError(f"{path} is not a JSON object: download it again")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, checked against its index in both directions.

    Raises FormatError for no file at all, a missing shard, a truncated file or one that the index
    does not name.
    """
    found = {path.name: path for path in sorted(folder.glob("model*.safetensors"))}
    index_path = folder / "model.safetensors.index.json"
    if index_path.exists():
        try:
            named = set(json.loads(index_path.read_text(encoding="utf-8"))["weight_map"].values())
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError):
            raise FormatError(f"{index_path} is not a safetensors index: download it again") from None
        for name in sorted(named - found.keys()):
            raise FormatError(f"{folder / name} is missing although the index names it: "
                              "the download is incomplete, run it again")
        for name in sorted(found.keys() - named):
            raise FormatError(f"{folder / name} is not named by the index: remove the stray file or the index")
    if not found:
        raise FormatError(f"{folder} has no model*.safetensors: the download is incomplete, or this is no model folder")
    for path in found.values():
        _check_length(path)
    return list(found.values())


def read_weights(folder: Path) -> dict[str, mx.array]:
    """All tensors of a folder by name, lazily."""
    weights: dict[str, mx.array] = {}
    for path in weight_files(folder):
        try:
            weights.update(mx.load(str(path)))
        except (RuntimeError, ValueError) as error:
            raise FormatError(f"{path} cannot be read ({error}): download it again") from None
    return weights


def check_finite(model: nn.Module, where: Path | str) -> None:
    """Raise FormatError naming the first weight that holds NaN or infinity."""
    names, flags = [], []
    for name, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            names.append(name)
            flags.append(mx.isfinite(array).all())
    for name, finite in zip(names, mx.stack(flags).tolist() if flags else [], strict=True):
        if not finite:
            raise FormatError(f"{where}: weight {name} holds NaN or infinity: the checkpoint is damaged, "
                              "download it again")


def quantize(draft: BlockDraft, bits: int, group_size: int) -> None:
    """Quantise what divides into groups; the confidence head (one output) stays as it is."""
    if bits not in (4, 8):
        raise ValueError(f"draft_bits is {bits}: give 8 or 4")
    nn.quantize(
        draft, group_size, bits,
        class_predicate=lambda path, module: (
            hasattr(module, "to_quantized")
            and not path.startswith("confidence_head")
            and module.weight.shape[-1] % group_size == 0
        ),
    )


def _rename(name: str) -> str:
    return name if name.startswith(_HEADS) else f"backbone.{name}"


def _match_quantization(draft: BlockDraft, weights: Mapping[str, mx.array], settings: Mapping[str, Any]) -> None:
    """Give quantised layers to what the file stores quantised (mlx-lm's layout: weight, scales, biases)."""
    nn.quantize(
        draft, settings["group_size"], settings["bits"],
        class_predicate=lambda path, module: hasattr(module, "to_quantized") and f"{path}.scales" in weights,
    )


def _check_shapes(draft: BlockDraft, weights: Mapping[str, mx.array], folder: Path) -> None:
    wanted = dict(tree_flatten(draft.parameters()))
    for name in sorted(wanted.keys() - weights.keys()):
        raise FormatError(f"{folder}: tensor {name.removeprefix('backbone.')} is missing: "
                          "the checkpoint is incomplete or of another layout")
    for name in sorted(weights.keys() - wanted.keys()):
        raise FormatError(f"{folder}: tensor {name.removeprefix('backbone.')} is not part of this kind of draft: "
                          "config.json does not describe these weights")
    for name, array in wanted.items():
        if array.shape != weights[name].shape:
            raise FormatError(f"{folder}: tensor {name.removeprefix('backbone.')} is {weights[name].shape}, "
                              f"config.json asks for {array.shape}: they do not belong together")


def _check_length(path: Path) -> None:
    """A safetensors file says how long it must be; mlx would read past the end of a truncated one."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length < size else {}
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (struct.error, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError, IndexError):
        raise FormatError(f"{path} is not a safetensors file: download it again") from None
    if not ends or size < 8 + length + max(ends):
        raise FormatError(f"{path} is truncated ({size} bytes): download it again")
