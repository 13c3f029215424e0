"""The training loop: order, steps, validation, checkpoints. Everything random follows from the seed and the step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..errors import FormatError
from .config import TrainConfig
from .curve import CURVE, StepReport, Table, Validation, valid_names
from .data import Data
from .features import Features
from .folder import SETTINGS, STATE, read_state, replace_file, write_draft, write_state
from .losses import Sums
from .optimise import Optimiser, Schedule
from .tasks import Task

EPSILON_DIVISOR = 1e-20  # a micro-batch in which nothing counts gives no gradient, not NaN


@dataclass(frozen=True)
class Run:
    """What a run is made of. features: for the training and for the held-out part. identity: what it is, as text."""

    draft: nn.Module
    config: Mapping[str, Any]
    settings: TrainConfig
    data: Data
    features: Features
    valid_features: Features
    task: Task
    identity: Mapping[str, Any]
    dtype: mx.Dtype


class Trainer:
    """Trains `run.draft` in `folder`. With several machines each takes its part of every micro-batch."""

    def __init__(self, run: Run, folder: Path, resume: bool):
        """Raises FormatError for a folder that holds another run, or none to resume, or one that was not asked for."""
        self.run, self.folder, settings = run, folder, run.settings
        self._group = mx.distributed.init()
        self.per_epoch = len(run.data.train) // (settings.batch * settings.accumulate)
        if self.per_epoch < 1:
            raise ValueError(f"{len(run.data.train)} sequences are fewer than one step takes (batch {settings.batch} x "
                             f"accumulate {settings.accumulate}): lower them or add data")
        if settings.batch % self._group.size():
            raise ValueError(f"batch {settings.batch} does not divide among {self._group.size()} machines: "
                             "give a multiple")
        self.steps = settings.steps or settings.epochs * self.per_epoch
        self._optimiser = Optimiser(Schedule(settings.lr, self.steps, settings.warmup), settings.clip,
                                    settings.weight_decay)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        # Masters are float32, whatever the forward computes in.
        self._masters = tree_map(lambda x: x.astype(mx.float32), run.draft.trainable_parameters())
        self._optimiser.start(self._masters)
        self._open(resume)
        self._curve = self._table("curve.csv", CURVE)
        self._valid = self._table("valid.csv", valid_names(run.draft.gamma))

    def reports(self) -> Iterator[StepReport | Validation]:
        """Run to the end, reporting every step and validation; checkpoints are written on the way.

        Raises ValueError when a loss or gradient is not finite: nothing of that step is kept.
        """
        settings, since = self.run.settings, time.perf_counter()
        while self.step < self.steps:
            due = settings.valid_every and self.step % settings.valid_every == 0
            if due and len(self.run.data.valid):
                yield self.validate()
            report = self._advance(since)
            since = time.perf_counter()
            self._log(self._curve, report)
            yield report
            if self.step % settings.save_every == 0 and self.step < self.steps:
                self.save()
        self.save()
        if len(self.run.data.valid):
            yield self.validate()

    def validate(self) -> Validation:
        """Loss and acceptance on held-out sequences, with anchors that are the same every time."""
        settings, corpus, total = self.run.settings, self.run.data.valid, None
        self.run.draft.update(self._cast(self._masters))
        count = min(settings.valid_rows, len(corpus))
        for number, first in enumerate(range(0, count, settings.batch)):
            rows = np.arange(first, min(first + settings.batch, count))
            ids, mask, lengths = corpus.rows(rows)
            prepared = self.run.task.prepare(ids, mask, lengths, np.random.default_rng([settings.seed, 1, number]))
            taps, last = self._features(self.run.valid_features, rows, ids)
            _, values = self.run.task.loss(self.run.draft, prepared, taps, last, max(prepared.weight, EPSILON_DIVISOR),
                                          training=False)
            found = Sums(np.array(values, dtype=np.float64))
            total = found if total is None else total + found
        done = Validation(self.step, total.loss(self.run.task.loss_weights), total)
        self._log(self._valid, done)
        return done

    def save(self) -> None:
        """Write the state of the run, then the draft as it is. Raises OSError with what is left to resume from."""
        if self._group.rank():
            return
        arrays = {f"draft.{name}": array for name, array in tree_flatten(self._masters)}
        arrays |= {f"adam.{name}": array for name, array in self._optimiser.arrays.items()}
        facts = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds, "identity": self.run.identity}
        try:
            write_state(self.folder, arrays, facts)
            self.run.draft.update(self._masters)
            write_draft(self.folder, self.run.config, self.run.draft)
        except OSError as error:
            kept = "there is none before it" if self._saved is None else f"that of step {self._saved} is kept"
            raise ValueError(f"{error.filename}: the checkpoint of step {self.step} could not be written "
                             f"({error.strerror}); {kept}: make room and continue with --resume") from None
        self._saved = self.step

    def _advance(self, since: float) -> StepReport:
        """One optimiser step."""
        gradients, loss, total, tokens = None, 0.0, None, 0
        chosen = self._rows()
        for micro, rows in enumerate(chosen):
            part, values, new, size = self._micro(micro, rows)
            gradients = new if gradients is None else tree_map(mx.add, gradients, new)
            mx.eval(gradients, values, part)
            loss += part.item()
            found = Sums(np.array(values, dtype=np.float64))
            total, tokens = found if total is None else total + found, tokens + size
        updated, norm = self._optimiser.update(self.step, self._masters, self._everywhere(gradients))
        if not (math.isfinite(loss) and math.isfinite(norm.item())):
            raise ValueError(self._not_finite(loss, norm.item(), chosen))
        mx.eval(updated, self._optimiser.arrays)
        self._masters = updated
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + time.perf_counter() - since
        report = StepReport(self.step, loss, total, norm.item(), self._optimiser.schedule.at(self.step), self.tokens,
                            self.seconds)
        self.step += 1
        return report

    def _micro(self, micro: int, rows: np.ndarray) -> tuple[mx.array, mx.array, dict[str, Any], int]:
        """Loss, values of its sums, gradients and tokens of one micro-batch."""
        run, rank = self.run, self._group.rank()
        rows = rows[rank :: self._group.size()]
        ids, mask, lengths = run.data.train.rows(rows)
        rng = np.random.default_rng([run.settings.seed, 0, self.step, micro, rank])
        prepared = run.task.prepare(ids, mask, lengths, rng)
        taps, last = self._features(run.features, rows, ids)
        divisor = self._sum(mx.array([prepared.weight])).item() * run.settings.accumulate

        def loss(masters: dict[str, Any]) -> tuple[mx.array, mx.array]:
            run.draft.update(self._cast(masters))
            return run.task.loss(run.draft, prepared, taps, last, divisor)

        (part, values), gradients = mx.value_and_grad(loss)(self._masters)
        return self._sum(part), self._sum(values), gradients, int(lengths.sum()) * self._group.size()

    def _features(self, features: Features, rows: np.ndarray, ids: np.ndarray) -> tuple[mx.array, mx.array]:
        taps, last = features(rows, ids)
        return taps.astype(self.run.dtype), last.astype(self.run.dtype)

    def _rows(self) -> list[np.ndarray]:
        """Rows of this step's micro-batches: a new permutation every epoch, its last incomplete step left out."""
        settings = self.run.settings
        epoch, place = divmod(self.step, self.per_epoch)
        order = np.random.default_rng([settings.seed, 2, epoch]).permutation(len(self.run.data.train))
        size = settings.batch * settings.accumulate
        return np.split(order[place * size : (place + 1) * size], settings.accumulate)

    def _cast(self, masters: dict[str, Any]) -> dict[str, Any]:
        return tree_map(lambda x: x.astype(self.run.dtype), masters)

    def _sum(self, array: mx.array) -> mx.array:
        """Over all machines."""
        return array if self._group.size() == 1 else mx.distributed.all_sum(array)

    def _everywhere(self, gradients: dict[str, Any]) -> dict[str, Any]:
        return gradients if self._group.size() == 1 else tree_map(mx.distributed.all_sum, gradients)

    def _not_finite(self, loss: float, norm: float, chosen: list[np.ndarray]) -> str:
        rows = ", ".join(str(row) for rows in chosen for row in rows.tolist()[:8])
        kept = "no checkpoint yet" if self._saved is None else f"step {self._saved} is kept: continue with --resume"
        return (f"step {self.step}: loss {loss}, gradient norm {norm}, on sequences {rows}: lower --lr or --clip, or "
                f"look at these sequences ({kept})")

    def _open(self, resume: bool) -> None:
        """Make the folder, or take up the run that is in it."""
        self._saved: int | None = None
        found = read_state(self.folder) if self.folder.exists() else None
        if found is None and resume:
            raise FormatError(f"{self.folder} holds no {STATE} to resume: leave --resume out")
        if found is not None and not resume:
            raise FormatError(f"{self.folder} holds a run of {found[1]['step']} steps: --resume continues it, or give "
                              "another --out")
        if found is None:
            if self.folder.exists() and any(p.suffix == ".safetensors" for p in self.folder.iterdir()):
                raise FormatError(f"{self.folder} holds a model: give another --out")
            self.folder.mkdir(parents=True, exist_ok=True)
            text = self.run.settings.to_toml().encode()
            replace_file(self.folder / SETTINGS, lambda file: file.write(text))
            return
        arrays, facts = found
        for name, value in self.run.identity.items():
            before = facts["identity"].get(name)
            if before != value:
                raise FormatError(f"{self.folder} was trained with {name} {before}, now it is {value}: resume with the "
                                  "same settings and data, or give another --out")
        # In the order of the fresh ones: the gradients' norm is a sum over them, whose rounding depends on it.
        self._masters = tree_unflatten([(name, arrays[f"draft.{name}"]) for name, _ in tree_flatten(self._masters)])
        self._optimiser.restore({name: arrays[f"adam.{name}"] for name in self._optimiser.arrays})
        self.step = self._saved = int(facts["step"])
        self.tokens, self.seconds = int(facts["tokens"]), float(facts["seconds"])

    def _table(self, name: str, columns: tuple[str, ...]) -> Table | None:
        return None if self._group.rank() else Table(self.folder / name, columns, self.step)

    def _log(self, table: Table | None, report: StepReport | Validation) -> None:
        if table is not None:
            table.add(report.row())
