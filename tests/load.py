"""A load test of a running server: nothing lost, nothing mixed up, no memory that grows, no 5xx.

    python tests/load.py --clients 64 --minutes 5 --leave 0.1 --malformed 0.05 [--url URL] [-- server options]

Every job of a fixed set is answered once alone. Then clients ask for jobs at random, all at once; some leave in the
middle of a stream, some send nonsense. An answer must be the very text that the same job got alone. Without --url a
server is started for the test. The result is one JSON document on stdout; exit code 1 if anything is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import click
import httpx2

BEGINNINGS = ("import os\n", "def read(path):\n", "class Stack:\n", ".. function:: open(path, mode)\n", "for line in ",
              "The module ", "if __name__ == ", "try:\n    ", "x = [", "return self.", "# Copyright", "async def ")
MALFORMED: tuple[tuple[bytes, str], ...] = (
    (b"{", "application/json"), (b"[1, 2]", "application/json"), (b'{"prompt": 5}', "application/json"),
    (b'{"prompt": "x", "max_tokens": "9"}', "application/json"), (b'{"prompt": "x", "top_p": NaN}', "application/json"),
    (b'{"prompt": "x", "stop": [1]}', "application/json"), (b'{"prompt": "x", "model": "other"}', "application/json"),
    (b'{"prompt": "x", "max_tokens": 99999999}', "application/json"), (b'{"prompt": "\\udc00"}', "application/json"),
    (b'{"prompt": "x"}', "text/plain"), (b"\xff\xfe\x00", "application/json"), (b" " * (5 << 20), "application/json"),
)
SETTLING_SECONDS = 60.0
JUDGED_SECONDS = 60.0  # memory of a shorter run says nothing
MOST_GROWTH = 1.05  # of the resident memory's median, from the second third of the run to the last


@dataclass(frozen=True)
class Options:
    """leave, malformed: shares of the requests. least: requests of each client, whatever the time."""

    clients: int
    seconds: float
    leave: float = 0.1
    malformed: float = 0.05
    jobs: int = 36
    longest: int = 48
    seed: int = 0
    least: int = 0


@dataclass
class Tally:
    """What happened. mixed: answers that differ from the solo run; lost: streams that broke off."""

    answers: int = 0
    tokens: int = 0
    left: int = 0
    busy: int = 0
    refused: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    mixed: list[dict[str, Any]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    accepted_nonsense: list[str] = field(default_factory=list)
    first_seconds: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)


def jobs_of(options: Options) -> list[dict[str, Any]]:
    """Bodies of all kinds: greedy and seeded, with penalties and stops, short and long."""
    draw = random.Random(options.seed)
    kinds: Sequence[Mapping[str, Any]] = (
        {}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.2}, {"stop": ["\n\n"]},
        {"temperature": 0.7, "top_k": 20, "frequency_penalty": 0.5},
    )
    jobs = []
    for number in range(options.jobs):
        kind = kinds[number % len(kinds)]
        seed = {"seed": number} if "temperature" in kind else {}
        jobs.append({"prompt": BEGINNINGS[number % len(BEGINNINGS)] * draw.randint(1, 4),
                     "max_tokens": draw.randint(4, options.longest), **kind, **seed})
    return jobs


async def events_of(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """The documents of a stream. Raises ValueError if it does not end with [DONE] or holds an error."""
    held = ""
    async for text in response.aiter_text():
        *whole, held = (held + text).split("\n\n")
        for part in whole:
            if part == "data: [DONE]":
                return
            if part.startswith("data: "):
                document = json.loads(part[6:])
                if "error" in document:
                    raise ValueError(document["error"]["message"])
                yield document
    raise ValueError("the stream ended without [DONE]")


class Client:
    """One client among many."""

    def __init__(self, http: httpx2.AsyncClient, jobs: Sequence[dict[str, Any]], options: Options, number: int):
        self._http, self._jobs, self._options = http, jobs, options
        self._draw = random.Random(f"{options.seed} {number}")

    async def run(self, solo: Sequence[dict[str, Any]], tally: Tally, until: float) -> None:
        """Ask until the time is over; the last answer is waited for."""
        sent = 0
        while time.monotonic() < until or sent < self._options.least:
            sent += 1
            chance = self._draw.random()
            number = self._draw.randrange(len(self._jobs))
            if chance < self._options.malformed:
                await self._send_nonsense(tally)
            elif chance < self._options.malformed + self._options.leave:
                await self._leave_early(self._jobs[number], tally)
            else:
                await self._compare(number, solo[number], tally)

    async def _compare(self, number: int, alone: dict[str, Any], tally: Tally) -> None:
        since = time.monotonic()
        try:
            got = await answer(self._http, self._jobs[number], self._draw.random() < 0.5, tally)
        except (ValueError, httpx2.HTTPError) as error:
            tally.lost.append(f"{type(error).__name__}: {error}")
            return
        if got is None:
            return
        tally.answers += 1
        tally.tokens += got["tokens"]
        tally.first_seconds.append(got.pop("first", time.monotonic()) - since)
        if got != alone:
            tally.mixed.append({"job": self._jobs[number], "alone": alone, "got": got})

    async def _leave_early(self, job: dict[str, Any], tally: Tally) -> None:
        stay = self._draw.randrange(4)
        try:
            async with self._http.stream("POST", "/v1/completions", json={**job, "stream": True}) as response:
                tally.statuses[response.status_code] += 1
                if response.status_code == 200:
                    async for _ in events_of(response):
                        stay -= 1
                        if stay < 0:
                            break
            tally.left += 1
        except (ValueError, httpx2.HTTPError) as error:
            tally.lost.append(f"leaving: {type(error).__name__}: {error}")

    async def _send_nonsense(self, tally: Tally) -> None:
        body, kind = self._draw.choice(MALFORMED)
        try:
            response = await self._http.post("/v1/completions", content=body, headers={"content-type": kind})
        except httpx2.HTTPError:  # a body that is too long may find the connection closed while it is sent
            if len(body) < 1 << 20:
                tally.lost.append(f"nonsense {body[:40]!r} got no answer")
            return
        tally.statuses[response.status_code] += 1
        tally.refused += 400 <= response.status_code < 500
        if response.status_code < 400:
            tally.accepted_nonsense.append(repr(body[:80]))


async def answer(
    http: httpx2.AsyncClient, job: dict[str, Any], streamed: bool, tally: Tally
) -> dict[str, Any] | None:
    """Text, end and token count of a job; None where the server was busy and the client has waited."""
    if not streamed:
        response = await http.post("/v1/completions", json=job)
        if await _is_busy(response, tally):
            return None
        document = response.raise_for_status().json()
        choice = document["choices"][0]
        tokens = document["usage"]["completion_tokens"]
        return {"text": choice["text"], "end": choice["finish_reason"], "tokens": tokens}
    text, end, first = "", None, None
    body = {**job, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if await _is_busy(response, tally):
            return None
        response.raise_for_status()
        async for document in events_of(response):
            first = first or time.monotonic()
            for choice in document["choices"]:
                text, end = text + choice["text"], choice["finish_reason"]
            tokens = (document["usage"] or {"completion_tokens": 0})["completion_tokens"]
    return {"text": text, "end": end, "tokens": tokens, "first": first or time.monotonic()}


async def _is_busy(response: httpx2.Response, tally: Tally) -> bool:
    tally.statuses[response.status_code] += 1
    if response.status_code != 429:
        return False
    tally.busy += 1
    await asyncio.sleep(float(response.headers["retry-after"]))
    return True


async def metrics_of(http: httpx2.AsyncClient) -> dict[str, float]:
    """Samples by name, labels summed."""
    found: Counter[str] = Counter()
    for line in (await http.get("/metrics")).text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name.split("{")[0]] += float(value)  # type: ignore[assignment]
    return dict(found)


async def watch_memory(http: httpx2.AsyncClient, tally: Tally, since: float) -> None:
    while True:
        with contextlib.suppress(httpx2.HTTPError):
            found = await metrics_of(http)
            if "process_resident_memory_bytes" in found:  # Linux only; the report says where it was not there
                tally.memory.append((time.monotonic() - since, int(found["process_resident_memory_bytes"])))
        await asyncio.sleep(0.5)


async def settled(http: httpx2.AsyncClient) -> dict[str, float]:
    """The metrics once nothing is served any more, or at the end of patience."""
    until = time.monotonic() + SETTLING_SECONDS
    while True:
        found = await metrics_of(http)
        still = found["mlx_dspark_active_requests"] + found["mlx_dspark_waiting_requests"]
        if not still or time.monotonic() > until:
            return found
        await asyncio.sleep(0.2)


async def load(url: str, options: Options, key: str | None = None) -> dict[str, Any]:
    """Run the test; the result as one document, `failed` lists what is wrong."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    limits = httpx2.Limits(max_connections=options.clients + 8)
    async with httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=300) as http:
        jobs, before = jobs_of(options), await metrics_of(http)
        solo = []
        for job in jobs:
            alone = await answer(http, job, False, Tally())
            assert alone is not None, "the server was busy before the test began"
            solo.append(alone)
        tally, since = Tally(), time.monotonic()
        watching = asyncio.ensure_future(watch_memory(http, tally, since))
        clients = [Client(http, jobs, options, number) for number in range(options.clients)]
        await asyncio.gather(*(client.run(solo, tally, since + options.seconds) for client in clients))
        seconds = time.monotonic() - since
        watching.cancel()
        return report(options, tally, seconds, before, await settled(http))


def growth(memory: Sequence[tuple[float, int]]) -> float | None:
    """Resident memory of the run's last third over its second; None without enough samples."""
    third = len(memory) // 3
    if third < 3:
        return None
    return median(size for _, size in memory[-third:]) / median(size for _, size in memory[third : 2 * third])


def report(
    options: Options, tally: Tally, seconds: float, before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, Any]:
    """The document on stdout."""
    accepted, ended = (after.get(f"mlx_dspark_{name}_total", 0) - before.get(f"mlx_dspark_{name}_total", 0)
                       for name in ("requests", "finished_requests"))
    still = after["mlx_dspark_active_requests"] + after["mlx_dspark_waiting_requests"]
    grown, first = growth(tally.memory), sorted(tally.first_seconds)
    failed = {
        "mixed": len(tally.mixed), "lost": len(tally.lost), "server errors": sum(
            count for status, count in tally.statuses.items() if status >= 500),
        "accepted nonsense": len(tally.accepted_nonsense), "still served": int(still),
        "accepted and never ended": int(accepted - ended), "no answers": int(not tally.answers),
        "memory grows": int(grown is not None and seconds >= JUDGED_SECONDS and grown > MOST_GROWTH),
    }
    return {
        "failed": {name: count for name, count in failed.items() if count},
        "clients": options.clients, "seconds": round(seconds, 1), "answers": tally.answers, "left": tally.left,
        "refused": tally.refused, "busy": tally.busy,
        "statuses": {str(status): count for status, count in sorted(tally.statuses.items())},
        "tokens_per_second": round(tally.tokens / seconds, 1),
        "first_event_seconds": {f"p{p}": round(first[len(first) * p // 100], 3) for p in (50, 95)} if first else {},
        "tau": after.get("mlx_dspark_tau"), "rows_per_request": after.get("mlx_dspark_rows_per_request"),
        "reused_tokens": after.get("mlx_dspark_reused_tokens_total"),
        "memory_watched": bool(tally.memory),
        "memory_growth": None if grown is None else round(grown, 4),
        "memory_mb": [[round(then, 1), round(size / 1e6, 1)] for then, size in _thinned(tally.memory)],
        "examples": {"mixed": tally.mixed[:3], "lost": tally.lost[:5], "nonsense": tally.accepted_nonsense[:5]},
    }


def _thinned(memory: Sequence[tuple[float, int]], most: int = 30) -> Sequence[tuple[float, int]]:
    return memory[:: max(1, len(memory) // most)]


@contextlib.contextmanager
def started(arguments: Sequence[str]) -> Iterator[str]:
    """A server of its own; its address is the line it prints."""
    server = subprocess.Popen([sys.executable, "-m", "mlx_dspark.server", "--port", "0", *arguments],
                              stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        if not address:
            raise click.ClickException("the server did not start")
        yield address
    finally:
        server.terminate()
        server.wait(60)


@click.command()
@click.option("--url", help="A running server. Default: one is started with the options after --.")
@click.option("--api-key")
@click.option("--clients", type=int, default=64)
@click.option("--minutes", type=float, default=5.0)
@click.option("--leave", type=float, default=0.1, help="Share of clients that leave in the middle.")
@click.option("--malformed", type=float, default=0.05, help="Share of requests that are nonsense.")
@click.option("--longest", type=int, default=48, help="Most tokens of an answer.")
@click.option("--seed", type=int, default=0)
@click.argument("server_options", nargs=-1)
def main(url: str | None, api_key: str | None, server_options: tuple[str, ...], minutes: float, **fields: Any) -> None:
    """Load a server and compare every answer with the one it gave alone."""
    with contextlib.nullcontext(url) if url else started(server_options) as address:
        result = asyncio.run(load(str(address), Options(seconds=60 * minutes, **fields), api_key))
    if not result["memory_watched"]:
        click.echo("note: memory was not watched: /metrics has no process_resident_memory_bytes here (only on Linux), "
                   "so that memory may have grown unnoticed", err=True)
    click.echo(json.dumps(result, indent=1, ensure_ascii=False))
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
