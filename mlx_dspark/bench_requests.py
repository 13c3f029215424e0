"""`bench requests`: throughput of several requests at once by policy, and the latency of one.

Every load (requests decoded together) gets one engine a policy. Each repeat serves the same requests through every
engine in rotating order; ratios are taken within a repeat, and their median is reported, and the ratio of all repeats
together with its standard error (jackknife). `steady` times rounds by turns instead, with every place filled: a machine
that is not always equally fast is then equally slow for all policies.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from .backend import machine
from .generate import stream_generate
from .load import Pair
from .scheduling import batch_policy_for
from .serve import Engine, EngineOptions, Request
from .serve.batch import Batch, join_at_once
from .serve.packed import layouts_of
from .structs import Round

PLAIN = "plain"
# Requests a place in the batch. Texts of equal length begin in turn, so plain decoding ends them in turn and leaves no
# place empty, while drafting ends them unevenly: with few waves that decides.
WAVES = 6
STEADY_ROUNDS = 40  # of a policy in a repeat


@dataclass(frozen=True)
class Served:
    """One pass of all requests through an engine, or so many rounds."""

    tokens: int
    seconds: float
    rounds: int
    rows: int
    parked: int
    round_tokens: int
    texts: tuple[tuple[int, ...], ...] = ()

    @property
    def rate(self) -> float:
        """Committed tokens per second, prompts included in the seconds."""
        return self.tokens / self.seconds


def bench_requests(
    pair: Pair, prompts: Sequence[Sequence[int]], loads: Sequence[int], policies: Sequence[str], max_tokens: int,
    repeats: int, progress: Callable[[str], None] = lambda text: None, steady: bool = False,
) -> dict[str, Any]:
    """Serve prompts (token ids) greedily at every load under `plain` and each policy; returns the JSON document.

    steady: rounds by turns, prompts not counted; without the latency of one request.
    """
    names = list(dict.fromkeys([PLAIN, *policies]))
    # A file holds kind after kind; in that order, policies of different speed would meet different kinds.
    prompts = random.Random(0).sample(prompts, len(prompts))
    measure = _steadily if steady else _at_load
    return {
        "machine": machine(),
        "pair": dict(pair.facts),
        "prompts": len(prompts),
        "max_tokens": max_tokens,
        "repeats": repeats,
        "steady": steady,
        "loads": {str(load): measure(pair, prompts, load, names, max_tokens, repeats, progress) for load in loads},
        **({} if steady else {"latency": _latency(pair, prompts, names, max_tokens, repeats, progress)}),
    }


def _at_load(
    pair: Pair, prompts: Sequence[Sequence[int]], load: int, names: Sequence[str], max_tokens: int, repeats: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    wanted = [prompts[number % len(prompts)] for number in range(WAVES * load)]
    passes: dict[str, list[Served]] = {name: [] for name in names}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(_engine(pair, name, load)) for name in names}
        for name in names:
            _serve(engines[name], wanted[: 2 * load], max_tokens)  # warm-up, and what `auto` learns
        for repeat in range(repeats):
            for name in _turned(names, repeat):
                progress(f"{load} requests, repeat {repeat + 1}/{repeats}, {name}")
                passes[name].append(_serve(engines[name], wanted, max_tokens))
    return _reports(passes)


def _steadily(
    pair: Pair, prompts: Sequence[Sequence[int]], load: int, names: Sequence[str], max_tokens: int, repeats: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    places = {name: _Places(pair, name, load, prompts, max_tokens) for name in names}
    passes: dict[str, list[Served]] = {name: [] for name in names}
    turns = random.Random(0)
    for repeat in range(repeats + 1):  # the first is the warm-up, and what `auto` learns
        progress(f"{load} requests, rounds by turns, repeat {repeat} of {repeats}")
        for _ in range(STEADY_ROUNDS):
            for name in turns.sample(names, len(names)):
                places[name].round()
        for name in names:
            passes[name].append(places[name].served())
    return _reports({name: own[1:] for name, own in passes.items()})


class _Places:
    """A batch in which the next prompt follows where a text has ended; of the first ones some end early."""

    def __init__(self, pair: Pair, policy: str, load: int, prompts: Sequence[Sequence[int]], max_tokens: int):
        self._load, self._max_tokens = load, max_tokens
        self._batch = Batch(pair, batch_policy_for(pair, policy, load, layouts_of(pair.target)))
        self._prompts = enumerate(itertools.cycle(prompts))
        self._rounds: list[Round] = []
        self._seconds = 0.0
        for place in range(load):
            self._fill(max(2, max_tokens * (place + 1) // load))

    def round(self) -> None:
        """One round of all, waited for so that none of it is left to the next policy; then whoever is next begins."""
        since = time.perf_counter()
        landed = self._batch.step()
        mx.synchronize()
        self._seconds += time.perf_counter() - since
        self._rounds += [own.round for own in landed if own.round.rows]
        while len(self._batch.members) < self._load:
            self._fill(self._max_tokens)

    def served(self) -> Served:
        """What was done since this was last asked."""
        rounds, seconds = self._rounds, self._seconds
        self._rounds, self._seconds = [], 0.0
        tokens = sum(len(one.tokens) for one in rounds)
        return Served(tokens, seconds, len(rounds), sum(one.rows for one in rounds),
                      sum(not one.proposed for one in rounds), tokens)

    def _fill(self, max_tokens: int) -> None:
        number, prompt = next(self._prompts)
        join_at_once(self._batch, number, prompt, max_tokens)
        mx.synchronize()


def _latency(
    pair: Pair, prompts: Sequence[Sequence[int]], names: Sequence[str], max_tokens: int, repeats: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Seconds of one request through the engine over those of `generate`, by policy."""
    found = {}
    for name in names:
        ratios = []
        with _engine(pair, name, 1) as engine:
            _serve(engine, prompts[:1], max_tokens)
            for repeat in range(repeats):
                for prompt in prompts:
                    progress(f"one request, repeat {repeat + 1}/{repeats}, {name}")
                    ways = {"generate": partial(_generate, pair, prompt, name, max_tokens),
                            "engine": partial(_serve, engine, [prompt], max_tokens)}
                    seconds = {way: _timed(ways[way]) for way in _turned(list(ways), repeat)}
                    ratios.append(seconds["engine"] / seconds["generate"])
        found[name] = {"engine_over_generate": round(statistics.median(ratios), 4),
                       "min": round(min(ratios), 4), "max": round(max(ratios), 4)}
    return found


def _engine(pair: Pair, policy: str, load: int) -> Engine:
    return Engine(pair, EngineOptions(max_requests=load, max_waiting=WAVES * load, policy=policy, prefix_bytes=0))


def _serve(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> Served:
    before, since = engine.metrics(), time.perf_counter()
    streams = [engine.submit(Request(tuple(prompt), max_tokens)) for prompt in prompts]
    texts = tuple(tuple(token for chunk in stream for token in chunk.ids) for stream in streams)
    seconds, after = time.perf_counter() - since, engine.metrics()
    return Served(after.tokens - before.tokens, seconds, after.rounds - before.rounds, after.rows - before.rows,
                  after.parked - before.parked, after.round_tokens - before.round_tokens, texts)


def _generate(pair: Pair, prompt: Sequence[int], policy: str, max_tokens: int) -> None:
    for _ in stream_generate(pair, prompt, max_tokens=max_tokens, policy=policy):
        pass


def _timed(work: Callable[[], Any]) -> float:
    since = time.perf_counter()
    work()
    return time.perf_counter() - since


def _turned(names: Sequence[Any], by: int) -> list[Any]:
    shift = by % len(names)
    return [*names[shift:], *names[:shift]]


def _together(passes: Sequence[Served]) -> float:
    """Tokens per second over all repeats; the steadiest figure where rounds were timed by turns."""
    return sum(own.tokens for own in passes) / sum(own.seconds for own in passes)


def _over(passes: Sequence[Served], others: Sequence[Served]) -> dict[str, float | None]:
    """Ratio of all repeats together, and its standard error by leaving out each of them in turn."""
    count = len(passes)
    without = [_together([*passes[:n], *passes[n + 1 :]]) / _together([*others[:n], *others[n + 1 :]])
               for n in range(count if count > 1 else 0)]
    error = math.sqrt((count - 1) * statistics.pvariance(without)) if without else None
    return {"all": round(_together(passes) / _together(others), 4), "error": error and round(error, 4)}


def _reports(passes: Mapping[str, Sequence[Served]]) -> dict[str, Any]:
    """By policy; those that schedule are compared with the best of those that do not, too."""
    reports = {name: _report(own, passes[PLAIN]) for name, own in passes.items()}
    unscheduled = [name for name in passes if name == PLAIN or name.startswith("fixed")]
    best = max(unscheduled, key=lambda name: _together(passes[name]))
    for name in passes.keys() - unscheduled:
        reports[name]["over_best"] = {"best": best, **_over(passes[name], passes[best])}
    return reports


def _report(passes: Sequence[Served], plain: Sequence[Served]) -> dict[str, Any]:
    ratios = [own.rate / other.rate for own, other in zip(passes, plain, strict=True)]
    rounds = sum(own.rounds for own in passes)
    return {
        "tokens_per_second": round(statistics.median(own.rate for own in passes), 2),
        "over_plain": {"median": round(statistics.median(ratios), 4), "min": round(min(ratios), 4),
                       "max": round(max(ratios), 4), **_over(passes, plain)},
        "tau": round(sum(own.round_tokens for own in passes) / rounds, 4),
        "rows_per_request": round(sum(own.rows for own in passes) / rounds, 4),
        "parked_share": round(sum(own.parked for own in passes) / rounds, 4),
        **({"texts_equal_plain": sum(a == b for a, b in zip(passes[0].texts, plain[0].texts, strict=True)),
            "texts": len(plain[0].texts)} if plain[0].texts else {}),
    }
