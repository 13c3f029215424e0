"""Write a normalised draft folder: streamed tensor by tensor, and complete or not there at all.

The folder grows beside its final place under another name and is renamed when it is complete, so an
interrupt or a full disk leaves nothing that would load.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mlx_dspark.errors import FormatError

from . import own
from .checkpoint import Checkpoint
from .files import ITEM_BYTES, Stored, read_headers

CHUNK = 16 * 2**20  # bytes moved at once


@dataclass(frozen=True)
class Quantisation:
    """Affine quantisation of every matrix whose rows divide into groups."""

    bits: int
    group_size: int


@dataclass(frozen=True)
class Source:
    """Where a draft came from: a repo id or a path, and the revision that was read."""

    name: str
    revision: str | None


@dataclass(frozen=True)
class _Output:
    """One tensor to write; `write` puts its bytes into the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    write: Callable[[IO[bytes]], None]

    @property
    def nbytes(self) -> int:
        size = ITEM_BYTES[self.dtype]
        for length in self.shape:
            size *= length
        return size


def write_draft(
    checkpoint: Checkpoint, out: Path, source: Source, quantisation: Quantisation | None = None,
    drop: Mapping[str, str] | None = None, progress: Callable[[str], None] = lambda name: None,
) -> None:
    """Write config.json, model.safetensors and a model card to the new folder `out`.

    drop: tensors left out (normalised names), with the reason. Raises FormatError if `out` exists.
    """
    if out.exists():
        raise FormatError(f"{out} exists already: give another --mlx-path, or remove it first")
    if quantisation is not None and checkpoint.quantization is not None:
        raise FormatError(f"{checkpoint.folder} is quantised already: leave -q out")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        outputs = list(_plan(checkpoint, quantisation, drop or {}))
        _write_safetensors(partial / "model.safetensors", outputs, progress)
        facts = _facts(checkpoint, source, quantisation, drop or {})
        (partial / "README.md").write_text(_card(facts), encoding="utf-8")
        (partial / "config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def equal_tables(checkpoint: Checkpoint, target: Path) -> dict[str, str]:
    """Which of the draft's tables are, byte for byte, the target's; only compared, never assumed.

    A float32 target's are compared as they are in bfloat16, the dtype that drafts are trained into.
    """
    tensors = read_headers(target)
    embedding = _named(tensors, "embed_tokens.weight")
    head = _named(tensors, "lm_head.weight") or embedding  # a tied target has one table
    found = {}
    for name, theirs in (("tables.embed_tokens.weight", embedding), ("tables.lm_head.weight", head)):
        if name in checkpoint.names and theirs is not None and _same_bytes(checkpoint.info(name), theirs):
            rounded = " in bfloat16" if theirs.dtype != checkpoint.info(name).dtype else ""
            found[name] = f"byte-equal to the target's{rounded}"
    return found


def _plan(checkpoint: Checkpoint, quantisation: Quantisation | None, drop: Mapping[str, str]) -> Iterator[_Output]:
    in_file_order = sorted((str(checkpoint.info(name).path), checkpoint.info(name).start, name)
                           for name in checkpoint.names if name not in drop)
    for _, _, name in in_file_order:
        stored = checkpoint.info(name)
        if quantisation is not None and _quantisable(name, stored, quantisation.group_size):
            yield from _quantised(name, checkpoint, quantisation)
        else:
            yield _Output(name, stored.dtype, stored.shape, _copier(stored))


def _quantisable(name: str, stored: Stored, group_size: int) -> bool:
    return (name.endswith(".weight") and len(stored.shape) == 2 and stored.dtype in ("BF16", "F16", "F32")
            and not name.startswith("confidence_head.") and stored.shape[1] % group_size == 0)


def _quantised(name: str, checkpoint: Checkpoint, quantisation: Quantisation) -> Iterator[_Output]:
    """Weight, scales and biases of one matrix, a few rows at a time: a table may be as large as its file."""
    import mlx.core as mx

    stored = checkpoint.info(name)
    rows, columns = stored.shape
    parts: dict[str, list[bytes]] = {"scales": [], "biases": []}  # small; the weight is written before them

    def write_weight(file: IO[bytes]) -> None:
        for chunk in _row_chunks(stored):
            quantised = mx.quantize(_as_matrix(chunk, stored), quantisation.group_size, quantisation.bits)
            weight, scales, biases = (bytes(memoryview(mx.view(array, mx.uint8))) for array in quantised)
            file.write(weight)
            parts["scales"].append(scales)
            parts["biases"].append(biases)
        mx.clear_cache()

    def part(suffix: str) -> Callable[[IO[bytes]], None]:
        return lambda file: file.writelines(parts.pop(suffix))

    stem, groups = name.removesuffix("weight"), columns // quantisation.group_size
    yield _Output(f"{stem}weight", "U32", (rows, columns * quantisation.bits // 32), write_weight)
    yield _Output(f"{stem}scales", stored.dtype, (rows, groups), part("scales"))
    yield _Output(f"{stem}biases", stored.dtype, (rows, groups), part("biases"))


def _row_chunks(stored: Stored) -> Iterator[bytes]:
    """The bytes of a matrix in pieces of whole rows."""
    row = stored.nbytes // stored.shape[0]
    yield from _chunks(stored, max(1, CHUNK // row) * row)


def _as_matrix(chunk: bytes, stored: Stored) -> Any:
    import mlx.core as mx
    import numpy as np

    dtype = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}[stored.dtype]
    return mx.view(mx.array(np.frombuffer(chunk, np.uint8)), dtype).reshape(-1, stored.shape[1])


def _copier(stored: Stored) -> Callable[[IO[bytes]], None]:
    def write(file: IO[bytes]) -> None:
        for chunk in _chunks(stored):
            file.write(chunk)

    return write


def _write_safetensors(path: Path, outputs: list[_Output], progress: Callable[[str], None]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for output in outputs:
        header[output.name] = {"dtype": output.dtype, "shape": list(output.shape),
                               "data_offsets": [offset, offset + output.nbytes]}
        offset += output.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for output in outputs:
            progress(output.name)
            before = file.tell()
            output.write(file)
            assert file.tell() - before == output.nbytes, f"{output.name}: a tensor of the wrong size was written"


def _facts(
    checkpoint: Checkpoint, source: Source, quantisation: Quantisation | None, drop: Mapping[str, str]
) -> dict[str, Any]:
    files = sorted({stored.path for stored in checkpoint.stored.values()})
    facts: dict[str, Any] = {
        "architectures": ["MlxDSparkDraft"],
        "model_type": "mlx_dspark",
        own.KEY: {
            "spec": checkpoint.spec.to_dict(),
            "source": {"name": source.name, "revision": source.revision, "packaging": checkpoint.packaging,
                       "sha256": {path.name: _sha256(path) for path in files}},
            "left_out": dict(drop),
        },
    }
    settings = checkpoint.quantization if quantisation is None else vars(quantisation)
    if settings is not None:
        facts["quantization"] = dict(settings)
    return facts


def _card(facts: Mapping[str, Any]) -> str:
    section = facts[own.KEY]
    source, settings = section["source"], facts.get("quantization")
    rows = "\n".join(f"| {key} | `{json.dumps(value)}` |" for key, value in section["spec"].items())
    hashes = "\n".join(f"- `{name}`: sha256 `{digest}`" for name, digest in source["sha256"].items())
    kept = "as in the source" if settings is None else f"{settings['bits']} bits, groups of {settings['group_size']}"
    return (
        "---\nlibrary_name: mlx\ntags:\n- mlx\n- speculative-decoding\n- dspark\n---\n\n"
        f"# {source['name']}, converted for mlx_dspark\n\n"
        f"A draft for speculative decoding, converted by `python -m mlx_dspark.convert`. Weights: {kept}.\n\n"
        f"- source: `{source['name']}`, revision `{source['revision']}`, packed by {source['packaging']}\n{hashes}\n\n"
        f"| fact | value |\n| --- | --- |\n{rows}\n"
    )


def _named(tensors: Mapping[str, Stored], ending: str) -> Stored | None:
    found = [stored for name, stored in tensors.items() if name == ending or name.endswith(f".{ending}")]
    return found[0] if len(found) == 1 else None


def _same_bytes(one: Stored, other: Stored) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype == other.dtype:
        return all(a == b for a, b in zip(_chunks(one), _chunks(other), strict=True))
    if (one.dtype, other.dtype) != ("BF16", "F32"):
        return False
    halves, wholes = _chunks(one, CHUNK // 4 * 2), _chunks(other, CHUNK // 4 * 4)
    return all(a == _in_bfloat16(b) for a, b in zip(halves, wholes, strict=True))


def _in_bfloat16(chunk: bytes) -> bytes:
    """Float32 numbers as bytes, rounded to the nearest bfloat16, as bytes."""
    import mlx.core as mx
    import numpy as np

    rounded = mx.array(np.frombuffer(chunk, "<f4")).astype(mx.bfloat16)
    return bytes(memoryview(mx.view(rounded, mx.uint8)))


def _chunks(stored: Stored, size: int | None = None) -> Iterator[bytes]:
    """A tensor's bytes, `size` (CHUNK unless given) at a time."""
    size = size or CHUNK
    with stored.path.open("rb") as file:
        file.seek(stored.start)
        left = stored.nbytes
        while left:
            chunk = file.read(min(size, left))
            left -= len(chunk)
            yield chunk


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
