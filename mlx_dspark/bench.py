"""`python -m mlx_dspark.bench`: plain mlx_lm, our plain loop and speculation, interleaved on the same prompts.

Every contender decodes every prompt once per repeat, in rotating order, so that a slow minute of the
machine hits all of them. Ratios are taken within a repeat of a prompt and their median is reported, and
beside it the ratio of each prompt's fastest repeats, which other work on the machine disturbs less. A
speed alone means little on a shared machine. Greedy only, so that texts can be compared.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .commands import SETTINGS, Notes, open_pair, pair_options, run_command
from .plot import check_plot, plot_lines
from .samples import read_prompts

if TYPE_CHECKING:
    from .load import Pair

BASELINE = "mlx_lm"
NEAR_TIE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}  # logit gaps that rounding may flip


@dataclass(frozen=True)
class Timed:
    """One decode of one prompt: tokens, seconds of the prefill and from the first token to the last."""

    ids: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    rounds: int
    host_seconds: float | None = None  # decode seconds outside model forwards, when measured

    @property
    def seconds_per_token(self) -> float:
        return self.decode_seconds / max(1, len(self.ids) - 1)


Contender = Callable[[Sequence[int]], Timed]


def bench(
    pair: Pair, prompts: Sequence[Sequence[int]], policies: Sequence[str], max_tokens: int, repeats: int,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Time mlx_lm, `plain` and each policy on token-id prompts; returns the JSON document."""
    from .backend import machine

    names = [BASELINE, *dict.fromkeys(["plain", *policies])]
    contenders = {name: _contender(name, pair, max_tokens) for name in names}
    runs: dict[str, list[Timed]] = {name: [] for name in names}
    for name in names:  # warm-up: kernels are compiled, weights are paged in
        contenders[name](prompts[0])
    for name, prompt, said in _rotation(names, prompts, repeats):
        progress(said)
        runs[name].append(contenders[name](prompt))
    base = runs[BASELINE]
    return {
        "machine": machine(),
        "pair": dict(pair.facts),
        "prompts": len(prompts),
        "max_tokens": max_tokens,
        "repeats": repeats,
        "contenders": {name: _report(runs[name], base, pair, prompts) for name in names},
        "host_ms_per_round": _host_times(pair, prompts[0], names[1:], max_tokens),
    }


def _rotation(
    names: Sequence[str], prompts: Sequence[Sequence[int]], repeats: int
) -> Iterator[tuple[str, Sequence[int], str]]:
    """Every contender on every prompt, the order shifted each time, but results in the same order."""
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts):
            shift = (repeat + number) % len(names)
            for name in [*names[shift:], *names[:shift]]:
                yield name, prompt, f"repeat {repeat + 1}/{repeats}, prompt {number + 1}/{len(prompts)}, {name}"


def _contender(name: str, pair: Pair, max_tokens: int) -> Contender:
    return _mlx_lm(pair, max_tokens) if name == BASELINE else _ours(pair, name, max_tokens)


def _mlx_lm(pair: Pair, max_tokens: int) -> Contender:
    import mlx.core as mx
    from mlx_lm.generate import stream_generate

    def run(prompt: Sequence[int]) -> Timed:
        started = time.perf_counter()
        ids, first = [], started
        for response in stream_generate(pair.target.model, pair.tokenizer, mx.array(prompt), max_tokens):
            if not ids:
                first = time.perf_counter()
            ids.append(int(response.token))
        # The last response repeats the final token, or carries the one that ended the text.
        return Timed(tuple(ids), first - started, time.perf_counter() - first, len(ids) - 1)

    return run


def _ours(pair: Pair, policy: str, max_tokens: int, timing: bool = False) -> Contender:
    from .generate import stream_generate

    def run(prompt: Sequence[int]) -> Timed:
        ids: list[int] = []
        for chunk in stream_generate(pair, prompt, max_tokens=max_tokens, policy=policy, timing=timing):
            ids.extend(chunk.ids)
        stats = chunk.stats
        forwards = stats.part_seconds["draft"] + stats.part_seconds["verify"]
        return Timed(tuple(ids), stats.prefill_seconds, stats.decode_seconds, stats.rounds,
                     stats.decode_seconds - forwards if timing else None)

    return run


def _host_times(pair: Pair, prompt: Sequence[int], policies: Sequence[str], max_tokens: int) -> dict[str, float]:
    """Milliseconds of a round that are not model forwards: reading, committing, detokenising, the loop."""
    times = {}
    for policy in policies:
        runs = [_ours(pair, policy, max_tokens, timing=True)(prompt) for _ in range(3)]
        times[policy] = round(1e3 * statistics.median(r.host_seconds / max(1, r.rounds) for r in runs), 3)
    return times


def _report(
    runs: Sequence[Timed], base: Sequence[Timed], pair: Pair, prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    per_prompt = range(len(prompts))
    fastest = [_fastest(base, prompt, len(prompts)) / _fastest(runs, prompt, len(prompts)) for prompt in per_prompt]
    ratios = [b.seconds_per_token / r.seconds_per_token for r, b in zip(runs, base, strict=True)]
    rounds = sum(r.rounds for r in runs)
    return {
        "decode_tps": round(1 / statistics.median(r.seconds_per_token for r in runs), 2),
        "prefill_ms": round(1e3 * statistics.median(r.prefill_seconds for r in runs), 2),
        "tau": round(sum(len(r.ids) - 1 for r in runs) / rounds, 4) if rounds else None,
        "speed_over_mlx_lm": {"median": round(statistics.median(ratios), 4), "min": round(min(ratios), 4),
                              "max": round(max(ratios), 4), "of_fastest": round(statistics.median(fastest), 4)},
        "texts_equal": _compare(runs[: len(prompts)], base[: len(prompts)], pair, prompts),
    }


def _fastest(runs: Sequence[Timed], prompt: int, prompts: int) -> float:
    """The best time a prompt reached in any repeat: what is left when nothing else ran on the machine."""
    return min(run.seconds_per_token for run in runs[prompt::prompts])


def _compare(
    runs: Sequence[Timed], base: Sequence[Timed], pair: Pair, prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """How many texts equal mlx_lm's, and the logit gap at each first difference."""
    gaps = []
    for run, other, prompt in zip(runs, base, prompts, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(run.ids, other.ids, strict=False)) if a != b), None)
        if at is not None:
            gaps.append(round(_gap(pair, [*prompt, *other.ids[:at]], run.ids[at], other.ids[at]), 6))
        elif len(run.ids) != len(other.ids):
            gaps.append(float("inf"))
    limit = NEAR_TIE[pair.facts["dtype"]]
    return {"equal": len(runs) - len(gaps), "of": len(runs), "gaps": gaps,
            "near_ties": all(gap <= limit for gap in gaps)}


def _gap(pair: Pair, ids: Sequence[int], ours: int, theirs: int) -> float:
    import mlx.core as mx

    logits = pair.target.model(mx.array([ids]))[0, -1].astype(mx.float32)
    return abs((logits[theirs] - logits[ours]).item())


@click.group("bench", context_settings=SETTINGS, invoke_without_command=True)
@pair_options
@click.option("--policy", "policies", default="fixed", help="Policies to time, separated by commas.")
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="JSONL with ids, prompt, turns or conversations. Default: held-out texts of the small pair.")
@click.option("--count", type=click.IntRange(1), default=4, help="How many prompts of the file.")
@click.option("-m", "--max-tokens", type=click.IntRange(2), default=128)
@click.option("--repeats", type=click.IntRange(1), default=3)
@click.option("--check", is_flag=True, help="Exit with 1 if a text differs from mlx_lm's beyond a near-tie.")
@click.pass_context
@run_command
def command(context: click.Context, policies: str, prompts: Path | None, count: int, max_tokens: int, repeats: int,
            check: bool, **pair_fields: Any) -> None:
    """Time plain mlx_lm, our plain loop and speculation; one JSON document on stdout.

    `bench kernels` times the kernel ops instead, `bench requests` several requests at once.
    """
    if context.invoked_subcommand is not None:
        return
    notes = Notes()
    pair = open_pair(notes, **pair_fields)
    chosen = _choose(pair, prompts, count, pair_fields["model"])
    document = bench(pair, chosen, policies.split(",") if pair.draft else [], max_tokens, repeats, notes.progress)
    click.echo(json.dumps(document, indent=1))
    if check and not all(entry["texts_equal"]["near_ties"] for entry in document["contenders"].values()):
        raise click.ClickException("a text differs from mlx_lm's beyond a near-tie: see texts_equal")


@command.command("requests", context_settings=SETTINGS)
@pair_options
@click.option("--loads", default="1,4,8,16", help="Requests decoded together, separated by commas.")
@click.option("--policy", "policies", default="fixed:2,fixed:4,fixed,auto", help="Policies beside plain, by commas.")
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="As for `bench`.")
@click.option("--count", type=click.IntRange(1), default=16, help="How many prompts of the file.")
@click.option("-m", "--max-tokens", type=click.IntRange(2), default=96)
@click.option("--repeats", type=click.IntRange(1), default=3)
@click.option("--steady", is_flag=True, help="Every place filled, rounds by turns, prompts not counted.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw it: a .png or .svg file (needs matplotlib).")
@run_command
def requests_command(loads: str, policies: str, prompts: Path | None, count: int, max_tokens: int, repeats: int,
                     steady: bool, plot: Path | None, **pair_fields: Any) -> None:
    """Throughput of several requests at once by policy, and the latency of one; one JSON document on stdout."""
    counts = loads.split(",")
    if not all(text.isdecimal() and int(text) for text in counts):
        raise click.UsageError(f"--loads is {loads!r}: give counts separated by commas, as in 1,4,16")
    if plot is not None:
        check_plot(plot)
    notes = Notes()
    pair = open_pair(notes, **pair_fields)
    chosen = _choose(pair, prompts, count, pair_fields["model"])
    from .bench_requests import bench_requests

    document = bench_requests(pair, chosen, [int(text) for text in counts], policies.split(",") if pair.draft else [],
                              max_tokens, repeats, notes.progress, steady)
    notes.progress("")
    if plot is not None:
        panels = {title: _lines(document, name) for title, name in
                  (("rows of a request in a round", "rows_per_request"), ("tokens per second", "tokens_per_second"))}
        plot_lines(plot, panels, "requests at once")
    click.echo(json.dumps(document, indent=1))


def _choose(pair: Pair, prompts: Path | None, count: int, model: str | None) -> list[list[int]]:
    """Up to `count` prompts from all over the file."""
    if prompts is None and model is not None:
        raise click.UsageError("the default prompts belong to the small pair: give --prompts FILE for another model")
    from .load import ASSETS

    found = read_prompts(prompts or ASSETS / "heldout.jsonl", pair)
    return found[:: max(1, len(found) // count)][:count]


def _lines(document: dict[str, Any], value: str) -> dict[str, list[tuple[float, float]]]:
    """Policy -> points (requests, value)."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for load, policies in document["loads"].items():
        for policy, report in policies.items():
            lines.setdefault(policy, []).append((int(load), report[value]))
    return lines


@command.command("kernels", context_settings=SETTINGS)
@click.option("--vocab", type=click.IntRange(2), default=151936, help="Rows of W2.")
@click.option("--rank", type=click.IntRange(4), default=256, help="Columns of W2.")
@click.option("--slots", type=click.IntRange(1), default=7, help="Slots of a block.")
@click.option("--head", type=click.Choice(["vanilla", "gated", "rnn"]), default="vanilla")
@click.option("--weights", default="bfloat16,8,4", help="Dtypes or bits, separated by commas.")
@click.option("--group", type=click.Choice(["32", "64", "128"]), default="64", help="Of quantised weights.")
@click.option("--repeats", type=click.IntRange(1), default=9)
@run_command
def kernels_command(vocab: int, rank: int, slots: int, head: str, weights: str, group: str, repeats: int) -> None:
    """Bytes and seconds of the kernel ops at one shape; one JSON document on stdout."""
    from .backend import require_mlx

    require_mlx()
    from .bench_kernels import WEIGHTS, Shape, bench_kernels

    kinds = weights.split(",")
    for kind in kinds:
        if kind not in WEIGHTS:
            raise click.UsageError(f"--weights names {kind!r}: give some of {', '.join(WEIGHTS)}")
        if kind in ("8", "4") and rank % int(group):
            raise click.UsageError(f"--rank {rank} does not divide into groups of {group}: give another --group")
    notes = Notes()
    document = bench_kernels(Shape(vocab, rank, slots), head, kinds, int(group), repeats, notes.progress)
    notes.progress("")
    click.echo(json.dumps(document, indent=1))


def main() -> None:
    """Entry point of `mlx_dspark.bench`."""
    command(prog_name="mlx_dspark.bench")


if __name__ == "__main__":
    main()
