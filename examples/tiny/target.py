"""Train the small target from scratch.

    PYTHONPATH=examples python -m tiny.target --out build/tiny --minutes 60

AdamW, linear warm-up, cosine to a twentieth. The learning rate follows the share of the budget that is spent: of
--steps, which makes a run repeatable to the bit, or of --minutes, which ends in time on a busy machine. Contexts
grow towards the end. A checkpoint is one file that replaces the last in one go: killed at any moment, the same
command continues from it, with the same rows and the same losses.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.qwen3 import Model

from . import model as models
from .batches import Streams
from .fast import fast_qwen3, keep_memory
from .log import Log

SHARES = {"code": 0.34, "docs": 0.34, "chat": 0.32}
PHASES = ((0.0, 256), (0.75, 512), (0.95, 1024))  # from this share of the budget, this context
LOW = 0.05  # the last learning rate, of the peak


@dataclass(frozen=True)
class Settings:
    """What a run is made of."""

    steps: int | None = None
    minutes: float | None = None
    batch_tokens: int = 2048
    rate: float = 1.5e-3
    warmup: float = 0.03  # share of the budget
    decay: float = 0.1
    clip: float = 1.0
    seed: int = 1
    phases: tuple[tuple[float, int], ...] = PHASES
    windows: int = 12  # of 256 tokens a kind, for validation

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("the budget is unclear: give either --steps or --minutes")

    def spent(self, step: int, seconds: float) -> float:
        """The share of the budget that is spent, from 0 to 1."""
        share = step / self.steps if self.steps else seconds / (60 * (self.minutes or 0))
        return min(share, 1.0)

    def learning_rate(self, spent: float) -> float:
        """Linear up to the peak, then half a cosine down to LOW of it."""
        if spent < self.warmup:
            return self.rate * max(spent / self.warmup, 0.01)
        fall = (spent - self.warmup) / (1 - self.warmup)
        return self.rate * (LOW + (1 - LOW) * 0.5 * (1 + math.cos(math.pi * fall)))

    def context(self, spent: float) -> int:
        """How long rows are at this time of the run."""
        return [context for begin, context in self.phases if spent >= begin][-1]


class Trainer:
    """A model, its optimiser and how far they are."""

    def __init__(self, model: Model, settings: Settings, cross_entropy: Callable[[mx.array, mx.array], mx.array]):
        self.model = model
        self.settings = settings
        self.optimizer = optim.AdamW(settings.rate, betas=[0.9, 0.98], weight_decay=settings.decay,
                                     bias_correction=True)
        self.optimizer.init(model.trainable_parameters())
        self.loss = models.loss_of(cross_entropy)
        self._loss_and_grad = nn.value_and_grad(model, self.loss)
        self.done = 0
        self.seconds = 0.0

    @property
    def spent(self) -> float:
        """The share of the budget that is spent."""
        return self.settings.spent(self.done, self.seconds)

    def step(self, streams: Streams) -> dict[str, float]:
        """One update; gives the numbers of its line in the log. Raises ValueError when the loss is no number."""
        start = time.perf_counter()
        settings, spent = self.settings, self.spent
        context = settings.context(spent)
        rows = streams.rows(settings.seed, self.done, max(settings.batch_tokens // context, 1), context)
        self.optimizer.learning_rate = settings.learning_rate(spent)
        loss, grads = self._loss_and_grad(self.model, rows)
        grads, norm = optim.clip_grad_norm(grads, settings.clip)
        if not math.isfinite(loss.item()):
            raise ValueError(f"the loss of step {self.done} is {loss.item()}: continue from the last checkpoint with "
                             "a lower --rate")
        self.optimizer.update(self.model, grads)
        mx.eval(self.model.state, self.optimizer.state)
        self.done += 1
        self.seconds += time.perf_counter() - start
        return {"step": self.done, "loss": loss.item(), "norm": norm.item(), "context": context,
                "rate": settings.learning_rate(spent), "tokens": rows.shape[0] * context, "seconds": self.seconds}

    def validate(self, streams: Streams, context: int = 256) -> dict[str, float]:
        """Held-out nats a token of each kind."""
        nats = {}
        for kind in streams.shares:
            windows = streams.evenly(kind, self.settings.windows, context)
            nats[kind] = sum(self.loss(self.model, rows).item() for rows in windows) / self.settings.windows
        return nats

    def save(self, path: Path) -> None:
        """Everything that the next step depends on, in one file that appears whole or not at all."""
        arrays = {f"model.{name}": value for name, value in tree_flatten(self.model.parameters())}
        arrays |= {f"optimizer.{name}": value for name, value in tree_flatten(self.optimizer.state)}
        partial_path = path.with_name(f"partial-{path.name}")
        mx.save_safetensors(str(partial_path), arrays, {"done": str(self.done), "seconds": repr(self.seconds)})
        os.replace(partial_path, path)

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint."""
        arrays, facts = mx.load(str(path), return_metadata=True)
        parts: dict[str, list[tuple[str, mx.array]]] = {"model": [], "optimizer": []}
        for name, value in arrays.items():
            part, _, rest = name.partition(".")
            parts[part].append((rest, value))
        self.model.load_weights(parts["model"])
        self.optimizer.state = tree_unflatten(parts["optimizer"])
        self.done, self.seconds = int(facts["done"]), float(facts["seconds"])


def train(out: Path, settings: Settings, config: dict[str, Any], fast: bool, every: float) -> Trainer:
    """Train until the budget is spent, from the checkpoint in `out` if there is one; then write out/target.

    every: minutes between checkpoints.
    """
    training, held_out = Streams.load(out, "train", SHARES), Streams.load(out, "heldout", SHARES)
    checkpoint = out / "checkpoint.safetensors"
    with fast_qwen3(fast) as cross_entropy:
        trainer = Trainer(models.build(config, settings.seed), settings, cross_entropy)
        if checkpoint.exists():
            trainer.restore(checkpoint)
        with Log(out / "target.csv", trainer.done) as log:
            log.say(f"{models.parameter_count(trainer.model) / 1e6:.2f} million parameters, step {trainer.done}")
            _follow(trainer, log, training, held_out, partial(trainer.save, checkpoint), every)
    models.save(trainer.model, config, out / "tokenizer", out / "target")
    (out / "target.json").write_text(json.dumps({"steps": trainer.done, "seconds": round(trainer.seconds, 1)}) + "\n")
    return trainer


def _follow(trainer: Trainer, log: Log, training: Streams, held_out: Streams, save: Callable[[], None],
            every: float) -> None:
    saved = time.monotonic()
    while trainer.spent < 1:
        log.add(trainer.step(training), trainer.spent)
        if time.monotonic() - saved > 60 * every or trainer.spent >= 1:
            log.validated(trainer.done, trainer.validate(held_out))
            save()
            saved = time.monotonic()


@click.command(help=__doc__.split("\n", 1)[0] if __doc__ else None)
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/tiny"), show_default=True)
@click.option("--steps", type=int, help="The budget in steps: repeatable to the bit on one machine.")
@click.option("--minutes", type=float, help="The budget in minutes of training.")
@click.option("--batch-tokens", default=Settings.batch_tokens, show_default=True)
@click.option("--rate", default=Settings.rate, show_default=True, help="The highest learning rate.")
@click.option("--seed", default=Settings.seed, show_default=True)
@click.option("--every", default=3.0, show_default=True, help="Minutes between checkpoints.")
@click.option("--fast/--plain", default=None, help="The exponentials of tiny.fast; without either, on a CPU only.")
def main(out: Path, steps: int | None, minutes: float | None, batch_tokens: int, rate: float, seed: int,
         every: float, fast: bool | None) -> None:
    keep_memory()
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    try:
        settings = Settings(steps, minutes, batch_tokens, rate, seed=seed)
        train(out, settings, models.CONFIG, on_cpu if fast is None else fast, every)
    except ValueError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
