"""Which implementation of an op runs: metal, cuda or the reference.

A kernel is used only where it was seen to work: on this chip, with this mlx, at this shape and dtype it
gave what the reference gives and was not slower. That is tried once and remembered in the cache folder.
`MLX_DSPARK_KERNELS=reference|metal|cuda|auto` overrides the choice of the backend.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..backend import machine, on_cpu
from ..errors import first_line
from ..store import kernels_folder, write_json
from . import accept
from .launch import Execute, on_cuda, on_metal

VARIABLE = "MLX_DSPARK_KERNELS"
TRYING = "trying"  # the process that is checking a kernel, in the file that stands meanwhile
RUNS = 7  # timed calls of kernel and reference, alternating; the medians are compared
BACKENDS: dict[str, Execute] = {"metal": on_metal, "cuda": on_cuda}
Work = Callable[[], Sequence[mx.array]]  # something to time: lazily computed outputs


@dataclass(frozen=True)
class Choice:
    """What runs an op at one shape, and why. Seconds are medians of one call, None where nothing was timed.

    failed: a kernel that should have worked did not. raised: because it could not be run at all.
    """

    op: str
    shape: str
    backend: str
    reason: str
    failed: bool = False
    kernel_seconds: float | None = None
    reference_seconds: float | None = None
    raised: bool = False

    def __str__(self) -> str:
        timed = ""
        if self.kernel_seconds is not None and self.reference_seconds is not None:
            timed = f" ({1e3 * self.kernel_seconds:.3f} ms, reference {1e3 * self.reference_seconds:.3f} ms)"
        return f"{self.op} [{self.shape}]: {self.backend}, {self.reason}{timed}"


@dataclass(frozen=True)
class Trial:
    """An op at one shape with inputs of its own, ready to be compared and timed.

    shape: sizes and dtypes. kernel, reference: run the op and return its outputs, lazily. problem: what
    is wrong with the kernel's outputs, None if they are right. unsupported: why no kernel exists for it.
    """

    op: str
    shape: str
    kernel: Callable[[Execute], Sequence[mx.array]]
    reference: Work
    problem: Callable[[Sequence[mx.array]], str | None]
    unsupported: str | None = None


@dataclass(frozen=True)
class Kernels:
    """What runs each op of a pair; None is the loop of single steps in plain mlx.

    walk_greedy: (base [B, N, V], projected, anchor [B]) -> tokens [B, N]
    walk_sampled: (base, projected, anchor, keys [B, N, 2], scale [1]) -> tokens, corrected [B, N, V]
    accept_greedy: (drafts [B, N], logits [B, N + 1, V], limits [B] or None) -> accepted [B], tokens [B, N + 1]
    accept_sampled: (drafts, log_q, logits, scale, uniforms, keys [B, 2], limits) -> the same
    """

    walk_greedy: Callable[..., mx.array] | None = None
    walk_sampled: Callable[..., tuple[mx.array, mx.array]] | None = None
    accept_greedy: Callable[..., tuple[mx.array, mx.array]] = accept.greedy_reference
    accept_sampled: Callable[..., tuple[mx.array, mx.array]] | None = None
    choices: tuple[Choice, ...] = ()

    @property
    def summary(self) -> dict[str, str]:
        """What runs each op, by name."""
        return {choice.op: choice.backend for choice in self.choices}

    @property
    def notes(self) -> list[str]:
        """One sentence for each kernel that should have worked and did not."""
        return [f"kernel {choice}" for choice in self.choices if choice.failed]


REFERENCE = Kernels()


def switched_off() -> bool:
    """The user wants the references alone."""
    return os.environ.get(VARIABLE) == "reference"


def backend() -> tuple[str, str]:
    """The backend for the device in force, and why. Raises ValueError for an unknown or impossible wish."""
    wish = os.environ.get(VARIABLE, "auto")
    if wish not in ("auto", "reference", *BACKENDS):
        raise ValueError(f"{VARIABLE} is {wish!r}: give reference, metal, cuda or auto")
    device = "reference" if on_cpu() else "metal" if mx.metal.is_available() else "cuda"
    if wish == "reference":
        return "reference", f"{VARIABLE}=reference"
    if wish in BACKENDS and wish != device:
        here = "the CPU" if device == "reference" else device
        raise ValueError(f"{VARIABLE}={wish}, but mlx computes on {here}: give auto, or run where {wish} is")
    return device, "mlx computes on the CPU" if device == "reference" else f"{device} is in force"


def pick(trial: Trial) -> tuple[Choice, Execute | None]:
    """Decide for one op and shape: its choice, and what executes the kernel (None: use the reference)."""
    name, reason = backend()
    if name == "reference":
        return Choice(trial.op, trial.shape, name, reason), None
    if trial.unsupported is not None:
        return Choice(trial.op, trial.shape, "reference", trial.unsupported), None
    path = _path(trial, name)
    choice = _remembered(path)
    if choice is None:
        choice = _try(trial, name, path)
    return choice, BACKENDS[name] if choice.backend == name else None


def _try(trial: Trial, name: str, path: Path) -> Choice:
    """Check a kernel for the first time. What it did is kept; that it could not be run at all is not, for the
    next process may have the memory or the compiler that was missing."""
    crashed = Choice(trial.op, trial.shape, "reference", f"its check on {name} ended the process", failed=True)
    _remember(path, {**asdict(crashed), TRYING: os.getpid()})  # stands if the check takes the process down
    kept = False
    try:
        choice = check(trial, name, BACKENDS[name])
        kept = not choice.raised
    finally:  # an interrupt is no verdict
        if not kept:
            path.unlink(missing_ok=True)
    if kept:
        _remember(path, asdict(choice))
    return choice


def check(trial: Trial, name: str, execute: Execute) -> Choice:
    """Compare a kernel with its reference on this machine and time both; a kernel that fails is not an error."""
    choice = Choice(trial.op, trial.shape, "reference", "")
    try:
        outputs = trial.kernel(execute)
        mx.eval(*outputs)
        problem = trial.problem(outputs)
        if problem is not None:
            return replace(choice, reason=f"it is wrong on {name}: {problem}", failed=True)
        seconds = medians({"kernel": lambda: trial.kernel(execute), "reference": trial.reference}, RUNS)
    except Exception as error:  # a kernel compiler may raise anything
        return replace(choice, reason=f"it failed on {name}: {first_line(error)}", failed=True, raised=True)
    choice = replace(choice, kernel_seconds=seconds["kernel"], reference_seconds=seconds["reference"])
    if seconds["kernel"] > seconds["reference"]:
        return replace(choice, reason=f"it is slower on {name}")
    return replace(choice, backend=name, reason="equal and not slower")


def medians(works: Mapping[str, Work], runs: int) -> dict[str, float]:
    """Median seconds of `runs` calls of each, in turns: a slow moment of the machine hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for run in range(runs + 1):
        for name, work in works.items():
            since = time.perf_counter()
            mx.eval(*work())
            if run:  # the first call compiles and pages in
                seconds[name].append(time.perf_counter() - since)
    return {name: statistics.median(kept) for name, kept in seconds.items()}


def remembered() -> list[Choice]:
    """All choices in the cache folder."""
    found = (_remembered(path) for path in sorted(kernels_folder().glob("*.json")))
    return [choice for choice in found if choice is not None]


def _remember(path: Path, document: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # no place to write: it is tried again the next time
        write_json(path, document)


def _remembered(path: Path) -> Choice | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        trying = document.pop(TRYING, None)
        choice = Choice(**document)
        if trying is not None and _alive(trying):
            return replace(choice, reason="another process is checking it", failed=False)
        return choice
    except (OSError, ValueError, TypeError, AttributeError):  # missing, damaged or of another version
        return None


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _path(trial: Trial, name: str) -> Path:
    facts = machine()
    key: dict[str, Any] = {"op": trial.op, "shape": trial.shape, "backend": name, "text": text_hash()}
    key |= {fact: facts[fact] for fact in ("chip", "os", "mlx")}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return kernels_folder() / f"{trial.op}-{digest}.json"


def text_hash() -> str:
    """A hash of this package's kernels: other text is tried anew."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
