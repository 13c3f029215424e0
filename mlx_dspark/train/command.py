"""`python -m mlx_dspark.train`: a draft for a target, from text."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..commands import SETTINGS, Notes, run_command
from ..plot import check_plot, plot_lines
from .config import TrainConfig, read_config

if TYPE_CHECKING:
    from .trainer import Run, Trainer


def setting_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """An option for every setting of `TrainConfig`; without it the config file, then the default counts."""
    for entry in reversed(dataclasses.fields(TrainConfig)):
        flag, kind = f"--{entry.name.replace('_', '-')}", type(entry.default)
        shown = "" if entry.default in ((), -1) else f"  [default: {entry.default}]"
        text = entry.metadata["help"] + shown
        if kind is bool:
            function = click.option(f"{flag}/--no{flag[1:]}", entry.name, default=None, help=text)(function)
        elif kind is tuple:
            function = click.option(flag, entry.name, metavar="IDS", callback=_taps, help=text)(function)
        else:
            choices = entry.metadata.get("choices")
            values = click.Choice(choices) if choices else kind
            function = click.option(flag, entry.name, type=values, help=text)(function)
    return function


def _taps(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of layers like 1,9,17") from None


@click.command("train", context_settings={**SETTINGS, "show_default": False})
@click.option("--model", metavar="PATH_OR_REPO", envvar="MLX_DSPARK_MODEL", show_envvar=True,
              help="Target: folder or Hugging Face repo. Default: the small one in the package.")
@click.option("--revision", metavar="REV", help="Revision of the target's repo.")
@click.option("--data", "files", required=True, multiple=True, help="JSONL or text file; may be given several times.",
              type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder of the draft.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="TOML file of settings.")
@click.option("--resume", is_flag=True, help="Continue the run in --out.")
@click.option("--start", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Begin with the weights of this draft, not with random ones. Other heads begin anew.")
@click.option("--features", type=click.Path(file_okay=False, path_type=Path),
              help="Keep the target's hidden states in this folder instead of running it in every step.")
@click.option("--yes", is_flag=True, help="Do not ask before writing --features.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the curves: .png or .svg.")
@setting_options
@run_command
def command(model: str | None, revision: str | None, files: tuple[Path, ...], out: Path, config: Path | None,
            resume: bool, start: Path | None, features: Path | None, yes: bool, plot: Path | None,
            **overrides: Any) -> None:
    """Train a draft for a target on dialogues or plain text.

    The draft, in DeepSpec's layout, lies in --out and is usable at any time; curve.csv and valid.csv record the run.
    """
    settings = read_config(config, overrides)
    if plot is not None:
        check_plot(plot)
    notes = Notes()
    from ..backend import require_mlx

    require_mlx()
    from .curve import panels
    from .trainer import Trainer

    run = make_run(model, revision, files, settings, notes, start)
    if features is not None:
        run = stored_run(run, features, yes, notes)
    trainer = Trainer(run, out, resume)
    _announce(trainer, notes)
    _follow(trainer, notes)
    if not trainer.machines.first:
        return
    if plot is not None:
        plot_lines(plot, panels(out), "step")
    state = trainer.state
    click.echo(f"{out}: {state.step} steps, {state.tokens} tokens, {state.seconds:.0f} s")


def make_run(
    model: str | None, revision: str | None, files: tuple[Path, ...], settings: TrainConfig, notes: Notes,
    start: Path | None = None,
) -> Run:
    """Load the target, read the data, make the draft, and check that they belong together.

    start: a draft whose weights the new one begins with.
    """
    import mlx.core as mx

    from ..convert.files import read_config as read_model_config
    from ..hub import resolve
    from ..load import ASSETS, load
    from ..pairing import check_pair
    from ..store import content_hash
    from .data import read_data
    from .features import Online
    from .recipe import check_head, draft_config, new_draft, start_with
    from .tasks import make_task
    from .trainer import Run

    folder = resolve(model or ASSETS / "target", revision)
    pair = load(model or folder, False, revision=revision)
    for note in pair.notes:
        notes.say(note)
    target = pair.target
    target.require_tables()
    if target.context is not None and settings.max_length > target.context:
        raise ValueError(f"max_length {settings.max_length} is more than {target.name} can read ({target.context} "
                         f"tokens): give --max-length {target.context}")
    facts = draft_config(read_model_config(folder), target, pair.tokenizer, settings)
    draft, spec = new_draft(facts, target, settings.seed)
    check_pair(target, draft, pair.tokenizer)
    if start is not None and (fresh := start_with(draft, start)):
        notes.say(f"{start} has no {', '.join(fresh)} of this shape: random weights there")
    data = read_data(files, pair.tokenizer, settings, target.vocab_size, notes.progress)
    if data.dropped:
        notes.say(f"{data.dropped} sequences hold fewer than {settings.min_tokens} tokens to train on and were dropped")
    if data.cut:
        notes.say(f"{data.cut} sequences are longer than {settings.max_length} tokens and were cut")
    check_head(draft, target, mx.array(data.train.row(0)[0][None, :64]), spec.taps)
    identity = {**settings.identity(), "taps": list(spec.taps), "data": data.train.digest(),
                "target": content_hash(target.model), "features": "online",
                "start": None if start is None else content_hash(draft)}
    features = Online(target, spec.taps)
    return Run(draft, facts, settings, data, features, features, make_task(settings, spec), identity, _dtype(settings))


def stored_run(run: Run, folder: Path, yes: bool, notes: Notes) -> Run:
    """The run with its features on disk: what is missing is written, after a question that tells how much it is.

    Raises ValueError where the disk has no room, or where nobody can be asked and `yes` is false.
    """
    from .machines import Machines
    from .store import Layout, StoredFeatures, check_room, make_store, missing_bytes

    parts, taps = [], len(run.draft.taps)
    sides = (("train", run.data.train, run.features), ("valid", run.data.valid, run.valid_features))
    for name, corpus, source in sides:
        made_of = {"target": run.identity["target"], "taps": run.identity["taps"], "data": corpus.digest()}
        layout = Layout(corpus, (taps + 1) * run.draft.spec.hidden_size, taps, made_of)
        parts.append((folder / name, layout, source))
    needed = sum(missing_bytes(place, layout) for place, layout, _ in parts)
    if needed:
        if Machines().count > 1:
            raise ValueError(f"{folder}: features are not complete, and several machines cannot make them together: "
                             "run the same command on one first")
        check_room(folder, needed)
        _ask(folder, needed, sum(len(layout.corpus.ids) for _, layout, _ in parts), yes)
    for place, layout, source in parts:
        make_store(place, layout, source, notes.progress)
    train, valid = (StoredFeatures(place, layout, notes.progress) for place, layout, _ in parts)
    identity = {**run.identity, "features": "stored"}
    return dataclasses.replace(run, features=train, valid_features=valid, identity=identity)


def _ask(folder: Path, needed: int, tokens: int, yes: bool) -> None:
    text = f"{folder}: the features of {tokens} tokens take {needed / 1e9:.2f} GB"
    if yes:
        return
    if not sys.stdin.isatty():
        raise ValueError(f"{text}: give --yes to write them")
    if not click.confirm(f"{text}. Write them?", err=True):
        raise ValueError("nothing was written: leave --features out and the target runs in every step")


def _dtype(settings: TrainConfig) -> Any:
    import mlx.core as mx

    from ..backend import on_cpu

    if settings.dtype == "auto":
        return mx.float32 if on_cpu() else mx.bfloat16
    return getattr(mx, settings.dtype)


def _announce(trainer: Trainer, notes: Notes) -> None:
    """Say what is about to be trained, on what, for how long."""
    from mlx.utils import tree_flatten

    run, data = trainer.run, trainer.run.data
    trained = sum(array.size for _, array in tree_flatten(trainer.state.masters))
    notes.say(f"the draft: {trained / 1e6:.1f}M parameters to train, taps {list(run.draft.taps)}, "
              f"mask token {run.draft.spec.mask_token_id}")
    notes.say(f"the data: {len(data.train)} sequences of {len(data.train.ids)} tokens; held out: {len(data.valid)} of "
              f"{len(data.valid.ids)}")
    passes = trainer.steps / trainer.per_epoch
    notes.say(f"{trainer.steps} steps are {passes:.1f} passes over the data; {trainer.state.step} are done")


def _follow(trainer: Trainer, notes: Notes) -> None:
    """Show the run; on an interrupt keep what was done."""
    from .curve import Validation, summary

    begun, first = time.perf_counter(), trainer.state.step
    try:
        for report in trainer.reports():
            if isinstance(report, Validation):
                notes.progress("")
                notes.say(f"step {report.step}, held out: {summary(trainer.run.task.loss_weights, report.sums)}")
                continue
            spent = time.perf_counter() - begun
            left = spent / (report.step + 1 - first) * (trainer.steps - report.step - 1)
            rate = report.tokens / max(report.seconds, 1e-9)
            notes.progress(f"step {report.step + 1} of {trainer.steps}, loss {report.loss:.4f}, "
                           f"tau {report.sums.tau:.3f}, {rate:.0f} tokens/s, {_duration(left)} left")
    except KeyboardInterrupt:
        trainer.save()
        raise ValueError(f"stopped after step {trainer.state.step} of {trainer.steps}, which is saved: --resume "
                         "continues the run") from None
    finally:
        notes.progress("")


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def main() -> None:
    """Entry point of `mlx_dspark.train`."""
    command(prog_name="mlx_dspark.train")


if __name__ == "__main__":
    main()
