"""The training loop: order, steps, validation, checkpoints. Everything random follows from the seed and the step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from ..commands import one_line
from .checkpoint import Checkpoints, State
from .config import TrainConfig
from .curve import CURVE, StepReport, Table, Validation, valid_names
from .data import Data
from .features import Features
from .folder import write_draft
from .losses import Sums
from .machines import Machines
from .optimise import Optimiser, Schedule
from .tasks import Task

Micro = tuple[mx.array, mx.array, dict[str, Any]]  # loss, values of its `Sums`, gradients


@dataclass(frozen=True)
class Run:
    """What a run is made of. features: for the training and for the held-out part.

    config: the draft's config.json. identity: what must be the same to continue the run, as JSON.
    """

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
    """Trains `run.draft` in `folder`. With several machines each takes its part of every micro-batch.

    state: what the run is now. It is replaced as a whole behind every step, so that a step that is broken off, by an
    error or by the user, has left nothing.
    """

    def __init__(self, run: Run, folder: Path, resume: bool):
        """Raises FormatError for a folder that holds another run, or none to resume, or one that was not asked for."""
        self.run, self.folder, self.machines, settings = run, folder, Machines(), run.settings
        self.per_epoch = len(run.data.train) // (settings.batch * settings.accumulate)
        if self.per_epoch < 1:
            raise ValueError(f"the data gives {len(run.data.train)} sequences to train on, a step takes batch "
                             f"{settings.batch} x accumulate {settings.accumulate}: lower these, or add data")
        if settings.batch % self.machines.count:
            raise ValueError(f"batch {settings.batch} does not divide among {self.machines.count} machines: "
                             "give a multiple")
        self.machines.agree(run.identity)
        self.steps = settings.steps or settings.epochs * self.per_epoch
        self._optimiser = Optimiser(Schedule(settings.lr, self.steps, settings.warmup), settings.clip,
                                    settings.weight_decay)
        self._checkpoints = Checkpoints(folder, run.identity)
        self.state = self._open(resume)
        self._curve = self._table("curve.csv", CURVE)
        self._valid = self._table("valid.csv", valid_names(run.draft.gamma))
        self._since = time.perf_counter()

    def reports(self) -> Iterator[StepReport | Validation]:
        """Run to the end, reporting every step and validation; checkpoints are written on the way.

        Raises ValueError, with what is left and how to go on, when a loss or gradient is not finite, or when memory
        or disk are full.
        """
        settings, saved = self.run.settings, None
        while self.state.step < self.steps:
            if settings.valid_every and self.state.step % settings.valid_every == 0 and len(self.run.data.valid):
                yield self.validate()
            yield self._advance()
            if self.state.step % settings.save_every == 0:
                self.save()
                saved = self.state.step
        if saved != self.state.step:
            self.save()
        if len(self.run.data.valid):
            yield self.validate()

    def validate(self) -> Validation:
        """Loss and acceptance on held-out sequences, with anchors that are the same every time."""
        settings, corpus, total = self.run.settings, self.run.data.valid, None
        self.run.draft.update(self._cast(self.state.masters))
        count = min(settings.valid_rows, len(corpus))
        with self._explained():
            for number, first in enumerate(range(0, count, settings.batch)):
                rows = np.arange(first, min(first + settings.batch, count))
                rng = np.random.default_rng([settings.seed, 1, number])
                prepared = self.run.task.prepare(*corpus.rows(rows), rng)
                taps, last = self._features(self.run.valid_features, rows, prepared.ids)
                _, values = self.run.task.loss(self.run.draft, prepared, taps, last, prepared.weight, training=False)
                found = Sums(np.array(values, dtype=np.float64))
                total = found if total is None else total + found
            done = Validation(self.state.step, total.loss(self.run.task.loss_weights), total)
            self._log(self._valid, done)
        return done

    def save(self) -> None:
        """Write the state of the run, then the draft as it is; only the first machine writes."""
        if not self.machines.first:
            return
        with self._explained():
            self._checkpoints.save(self.state)
            self.run.draft.update(self.state.masters)
            write_draft(self.folder, self.run.config, self.run.draft)

    def _advance(self) -> StepReport:
        """One optimiser step."""
        with self._explained():
            report, state = self._next(self._rows())
            self._log(self._curve, report)
            self.state = state  # only now, and not evaluated yet: so the old moments' memory can be used again
            mx.eval(state.masters, state.moments)
        return report

    def _next(self, chosen: list[np.ndarray]) -> tuple[StepReport, State]:
        """The report of a step on micro-batches of rows, and the state behind it. Raises ValueError for NaN."""
        now = self.state
        loss, values, gradients = self.machines.sum(self._micros(chosen))
        masters, moments, norm = self._optimiser.update(now.step, now.masters, now.moments, gradients)
        if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            raise ValueError(self._not_finite(loss.item(), norm.item(), np.concatenate(chosen)))
        tokens = now.tokens + sum(self.run.data.train.length(rows) for rows in chosen)
        seconds = now.seconds + self._lap()
        report = StepReport(now.step, loss.item(), Sums(np.array(values, dtype=np.float64)), norm.item(),
                            self._optimiser.schedule.at(now.step), tokens, seconds)
        return report, State(now.step + 1, tokens, seconds, masters, moments)

    def _lap(self) -> float:
        """Seconds since the last call."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before

    def _micros(self, chosen: list[np.ndarray]) -> Micro:
        """The sum of this machine's part of the micro-batches of a step."""
        total = None
        for micro, rows in enumerate(chosen):
            found = self._micro(micro, rows)
            total = found if total is None else tree_map(mx.add, total, found)
            mx.eval(total)
        return total

    def _micro(self, micro: int, rows: np.ndarray) -> Micro:
        run, mine = self.run, self.machines.part
        rng = np.random.default_rng([run.settings.seed, 0, self.state.step, micro])
        prepared = run.task.prepare(*run.data.train.rows(rows), rng, mine)
        taps, last = self._features(run.features, rows[mine], prepared.ids)
        divisor = prepared.weight * run.settings.accumulate

        def loss(masters: dict[str, Any]) -> tuple[mx.array, mx.array]:
            run.draft.update(self._cast(masters))
            return run.task.loss(run.draft, prepared, taps, last, divisor)

        (part, values), gradients = mx.value_and_grad(loss)(self.state.masters)
        return part, values, gradients

    def _features(self, features: Features, rows: np.ndarray, ids: np.ndarray) -> tuple[mx.array, mx.array]:
        taps, last = features(rows, ids)
        return taps.astype(self.run.dtype), last.astype(self.run.dtype)

    def _rows(self) -> list[np.ndarray]:
        """Rows of this step's micro-batches: a new permutation every epoch, its last incomplete step left out."""
        settings = self.run.settings
        epoch, place = divmod(self.state.step, self.per_epoch)
        order = np.random.default_rng([settings.seed, 2, epoch]).permutation(len(self.run.data.train))
        size = settings.batch * settings.accumulate
        return np.split(order[place * size : (place + 1) * size], settings.accumulate)

    def _cast(self, masters: dict[str, Any]) -> dict[str, Any]:
        return tree_map(lambda x: x.astype(self.run.dtype), masters)

    def _open(self, resume: bool) -> State:
        """The state to begin with, which the other machines get from the first."""
        masters = tree_map(lambda x: x.astype(mx.float32), self.run.draft.trainable_parameters())
        state = State(0, 0, 0.0, masters, self._optimiser.start(masters))
        if self.machines.first:
            state = self._checkpoints.open(state, resume, self.run.settings.to_toml())
        step, masters, moments = self.machines.from_first((mx.array(state.step), state.masters, state.moments))
        return State(step.item(), state.tokens, state.seconds, masters, moments)

    def _not_finite(self, loss: float, norm: float, rows: np.ndarray) -> str:
        places = ", ".join(dict.fromkeys(self.run.data.train.sources[row] for row in rows[:8].tolist()))
        return (f"step {self.state.step}: loss {loss}, gradient norm {norm}, on {places}: train again in another --out "
                f"with a lower --lr or --clip, or without these texts ({self.folder} keeps the last checkpoint)")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say of a full disk and of full memory where the run stands and how it can go on."""
        step, remedy = self.state.step, self._checkpoints.remedy
        try:
            yield
        except OSError as error:
            reason = error.strerror or one_line(error)
            raise ValueError(f"{error.filename or self.folder}: step {step} could not be written ({reason}): make room "
                             f"({remedy()})") from error
        except RuntimeError as error:
            raise ValueError(f"step {step}: mlx stopped ({one_line(error)[:200]}): if memory is full, train with "
                             f"smaller --batch, --anchors or --max-length ({remedy()})") from error

    def _table(self, name: str, columns: tuple[str, ...]) -> Table | None:
        return Table(self.folder / name, columns, self.state.step) if self.machines.first else None

    def _log(self, table: Table | None, report: StepReport | Validation) -> None:
        if table is not None:
            table.add(report.row())
