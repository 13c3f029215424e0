"""The engine: one thread that owns the models and serves many requests, round by round.

A step is: land the rounds in flight and start the next ones, run at most one chunk of one waiting prompt,
hand out text. Requests come in and leave between steps, so a client that goes away costs one round at most
and touches nobody else. What goes wrong for one request (its text, its prompt) ends that one; only a failure
of the work they share ends all that are served.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..decode import DecodeOptions, Run
from ..draft import Resumable
from ..errors import CacheError, first_line
from ..generate import Answer, Chunk, decode_options, prompt_ids, token_limit
from ..load import Pair
from ..schedule import Policy
from ..scheduling import batch_policy_for, policy_for
from ..stats import Statistics
from ..structs import KVOptions
from .batch import Batch, Follows, Member
from .memory import Footprint, default_limit, footprint
from .packed import LAYOUTS, PACKED, check_sharing, layouts_of
from .prefix import PrefixCache
from .request import Deliver, EngineBusy, EngineClosed, EngineError, Event, Request, Stream

PREFIX_SHARE = 0.25  # of the bytes that caches may take
RATE_SECONDS = 10.0  # over which tokens per second are counted


@dataclass(frozen=True)
class EngineOptions:
    """Everything is optional.

    max_requests: decoded together. max_waiting: in the queue beyond them. prefill_step: prompt rows of a chunk,
    which is the longest that running requests wait for a new one. kv_bytes: for the caches of all requests
    (None: a share of the device's memory). prefix_bytes: of these, for finished conversations; 0 keeps none.
    policy: how rows are shared out (see `mlx_dspark.schedule.batch`); None is auto. layout: packed,
    rectangular, or None for the cheaper one of every round. profile: measure this machine where no costs are
    stored.

    Raises ValueError for a count or size out of range.
    """

    max_requests: int = 16
    max_waiting: int = 256
    prefill_step: int = 512
    kv_bytes: int | None = None
    prefix_bytes: int | None = None
    policy: str | None = None
    layout: str | None = None
    kv: KVOptions = field(default_factory=KVOptions)
    profile: bool = True

    def __post_init__(self) -> None:
        for name, least in (("max_requests", 1), ("max_waiting", 0), ("prefill_step", 1), ("kv_bytes", 1),
                            ("prefix_bytes", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}: give at least {least}")
        if self.layout is not None and self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}: give {' or '.join(LAYOUTS)}, or leave it out")


@dataclass(frozen=True)
class EngineMetrics:
    """Totals since the start, and the present load. A round here is one request's part of a round.

    tokens: committed; round_tokens: those without the first token of each answer, which costs no round.
    """

    active: int
    waiting: int
    requests: int
    finished: Mapping[str, int]
    rounds: int
    tokens: int
    round_tokens: int
    rows: int
    drafts: int
    accepted: int
    parked: int
    tokens_per_second: float
    kv_bytes: int
    kv_limit_bytes: int
    prefix_entries: int
    prefix_bytes: int
    prefix_hits: int
    reused_tokens: int

    @property
    def tau(self) -> float | None:
        """Committed tokens per round of one request; None before the first."""
        return self.round_tokens / self.rounds if self.rounds else None

    @property
    def rows_per_request(self) -> float | None:
        """Rows that a request verified in a round."""
        return self.rows / self.rounds if self.rounds else None

    @property
    def parked_share(self) -> float | None:
        """Rounds of a request without a draft."""
        return self.parked / self.rounds if self.rounds else None


@dataclass
class _Job:
    """A request inside the engine."""

    number: int
    options: DecodeOptions
    answer: Answer
    deliver: Deliver
    nbytes: int  # reserved for its caches
    ids: list[int]  # prompt and committed tokens
    own: Policy | None = None
    member: Member | None = None  # from its admission on


class Engine:
    """Serves requests from any thread. Close it, or use it as a context manager.

    Raises CacheError if this target cannot decode several requests in one forward.
    """

    def __init__(
        self, pair: Pair, options: EngineOptions | None = None, say: Callable[[str], None] = lambda text: None
    ):
        options = options or EngineOptions()
        check_sharing(pair.target, options.kv)
        self.pair, self.options = pair, options
        policy = batch_policy_for(pair, options.policy, options.max_requests, self._layouts(), options.profile, say)
        self._batch = Batch(pair, policy)
        self._own_policy()  # what it needs is found once and here: clients' threads should never start mlx
        self._footprint: Footprint = footprint(pair, options.kv)
        self.kv_limit = options.kv_bytes or default_limit()
        kept = int(PREFIX_SHARE * self.kv_limit) if options.prefix_bytes is None else options.prefix_bytes
        draft = None if policy.name == "plain" else pair.draft
        self._prefix = PrefixCache(draft, kept if draft is None or isinstance(draft, Resumable) else 0)
        self._wake = threading.Condition()
        self._numbers = itertools.count(1)
        self._waiting: deque[_Job] = deque()
        self._left: set[int] = set()  # cancelled, not yet evicted
        self._jobs: OrderedDict[int, _Job] = OrderedDict()  # admitted, in order of arrival
        self._closing: float | None = None  # when patience ends
        self._closed = False
        self._count = _Counter()
        self._thread = threading.Thread(target=self._serve, name="mlx_dspark engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Deliver | None = None) -> Stream:
        """Queue a request.

        deliver: told every chunk, or the EngineError that ended the request, from the engine's thread; it must
            not block and not raise. Without it the returned stream collects the chunks.
        Raises ValueError before any work for a request that cannot be served, EngineBusy when the queue is full,
        EngineClosed after `close`.
        """
        number = next(self._numbers)
        stream = Stream(number, self._cancel, deliver)
        job = self._job(number, request, stream.deliver)
        with self._wake:
            if self._closed or self._closing is not None:
                raise EngineClosed("the server is shutting down")
            if len(self._waiting) + len(self._jobs) >= self.options.max_requests + self.options.max_waiting:
                raise EngineBusy(f"{len(self._waiting)} requests are waiting already: try again later")
            self._waiting.append(job)
            self._count.requests += 1
            self._wake.notify()
        return stream

    def metrics(self) -> EngineMetrics:
        """A snapshot; may be called from any thread."""
        count, prefix = self._count, self._prefix
        with self._wake:
            active, waiting = len(self._jobs), len(self._waiting)
            reserved = sum(job.nbytes for job in self._jobs.values())
        totals = count.totals
        return EngineMetrics(
            active=active, waiting=waiting, requests=count.requests, finished=dict(count.finished),
            rounds=totals.rounds, tokens=totals.generated_tokens, round_tokens=totals.round_tokens,
            rows=totals.rounds + totals.verified, drafts=totals.verified, accepted=totals.accepted,
            parked=totals.parked, tokens_per_second=count.rate(), kv_bytes=reserved + prefix.nbytes,
            kv_limit_bytes=self.kv_limit, prefix_entries=len(prefix), prefix_bytes=prefix.nbytes,
            prefix_hits=prefix.hits, reused_tokens=prefix.reused_tokens,
        )

    def close(self, drain_seconds: float | None = None) -> None:
        """Admit nothing more, finish what runs (for at most so many seconds), and stop.

        Requests that are not finished by then end with EngineClosed.
        """
        with self._wake:
            if self._closing is None:
                self._closing = float("inf") if drain_seconds is None else time.monotonic() + drain_seconds
            elif drain_seconds is not None:
                self._closing = min(self._closing, time.monotonic() + drain_seconds)
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _own_policy(self) -> tuple[Policy, dict[str, Any]]:
        """A policy for one request that takes no notice of the others."""
        name = self.options.policy
        same = name is None or name in _ALSO_SINGLE or name.startswith("fixed")
        return policy_for(self.pair, name if same else None, profile=False)

    def _layouts(self) -> Sequence[str]:
        """The layouts that may be used, the only one where one was asked for."""
        pair, wanted = self.pair, self.options.layout
        able = layouts_of(pair.target, self.options.kv)
        if wanted is not None and wanted not in able:
            raise CacheError(f"{pair.target.name} has caches that cannot lie side by side (windows, or --kv-bits): use "
                             f"the layout {PACKED}")
        return able if wanted is None else (wanted,)

    def _cancel(self, number: int) -> None:
        with self._wake:
            self._left.add(number)
            self._wake.notify()

    def _job(self, number: int, request: Request, deliver: Deliver) -> _Job:
        """Check a request and resolve its options; raises ValueError."""
        pair, options = self.pair, self.options
        ids = prompt_ids(pair, request.prompt)
        limit = token_limit(len(ids), request.max_tokens, pair.target.context)
        if limit is None:  # no context ends the text, so memory does
            limit = max(1, self._footprint.positions(self.kv_limit) - len(ids))
        needed = self._footprint.bytes(len(ids) + limit)
        if needed > self.kv_limit:
            raise ValueError(f"{len(ids)} prompt tokens and max_tokens {limit} need {needed / 1e9:.2f} GB of cache and "
                             f"{self.kv_limit / 1e9:.2f} GB are there: shorten the prompt or lower max_tokens")
        own, facts = None, {}
        if not request.sampling.greedy and request.sampling.seed is not None:
            own, facts = self._own_policy()
        policy = own or Follows(self._batch.policy.name)
        resolved = decode_options(pair, request.sampling, policy, limit, options.kv, options.prefill_step, (),
                                  logprobs=request.logprobs, top_logprobs=request.top_logprobs)
        answer = Answer(pair, len(ids), resolved, request.stop, {**facts, "cached_tokens": 0})
        return _Job(number, resolved, answer, deliver, needed, ids, own)

    # Everything below runs in the engine's thread.

    def _serve(self) -> None:
        try:
            with self.pair.target.wired():
                while self._survives():
                    pass
        finally:
            mx.clear_streams()  # mlx aborts the process at its exit if a thread leaves its streams behind

    def _survives(self) -> bool:
        """One step; False when all is done.

        What goes wrong in the shared work (memory, say) ends those who are served, not the engine.
        """
        try:
            if not self._attend():
                return False
            self._step()
        except Exception as error:
            self._fail(EngineError(f"the engine failed: {first_line(error)}"))
        return True

    def _attend(self) -> bool:
        """Wait for work, let clients leave and others in; False when all is done."""
        with self._wake:
            while not (self._waiting or self._jobs or self._left or self._closing is not None):
                self._wake.wait()
            left, self._left = self._left, set()
            gone = [job for job in self._waiting if job.number in left]
            self._waiting = deque(job for job in self._waiting if job.number not in left)
        for job in gone:
            with self._alone(job):
                self._tell(job, job.answer.end("cancelled"))
        for job in [self._jobs[number] for number in left & self._jobs.keys()]:
            with self._alone(job):
                self._end(job, "cancelled")
        if self._closing is not None and self._shut():
            return False
        self._admit()
        return True

    def _shut(self) -> bool:
        """Whether a closing engine is done; requests that ran out of patience are told."""
        if time.monotonic() >= self._closing:
            self._fail(EngineClosed("the server is shutting down"))
        with self._wake:
            self._closed = not (self._waiting or self._jobs)
            return self._closed

    def _fail(self, error: EngineError) -> None:
        """End all requests with an error, waiting ones too where the engine closes."""
        with self._wake:
            jobs = list(self._jobs.values())
            self._jobs.clear()
            if isinstance(error, EngineClosed):
                jobs += self._waiting
                self._waiting.clear()
        self._batch.clear()
        for job in jobs:
            self._count.finished["error"] += 1
            self._deliver(job, error)
        mx.clear_cache()

    @contextmanager
    def _alone(self, job: _Job) -> Iterator[None]:
        """Whatever goes wrong inside ends this request with an error, and only it; nothing of it is kept."""
        try:
            yield
        except Exception as error:
            self._evict(job)
            self._count.finished["error"] += 1
            self._deliver(job, EngineError(f"this request failed: {first_line(error)}"))

    def _admit(self) -> None:
        """Move requests from the queue into the batch while rows and memory allow."""
        while self._waiting and len(self._jobs) < self.options.max_requests:
            job = self._waiting[0]
            reserved = sum(other.nbytes for other in self._jobs.values())
            if self._jobs and reserved + job.nbytes > self.kv_limit:
                return
            with self._wake:
                self._waiting.popleft()
                self._jobs[job.number] = job
            with self._alone(job):
                hit = self._prefix.find(job.ids)
                self._prefix.shrink(max(0, self.kv_limit - reserved - job.nbytes))
                job.member = Member(job.number, Run(self.pair, job.ids, job.options), job.ids, job.own, hit)
                if hit is not None:
                    job.answer.stats.facts = {**job.answer.stats.facts, "cached_tokens": hit.length}

    def _step(self) -> None:
        for landed in self._batch.step():
            job = self._jobs[landed.member.number]
            with self._alone(job):
                self._hand_out(job, landed.round)
        self._prefill()

    def _prefill(self) -> None:
        """One chunk of the first prompt that is not through."""
        for job in self._jobs.values():
            if job.number not in self._batch.members:
                with self._alone(job):
                    self._run_prompt(job)
                return

    def _run_prompt(self, job: _Job) -> None:
        if job.options.max_tokens == 0:
            self._end(job)
            return
        flight = next(job.member.steps)
        if flight is not None:
            self._batch.join(job.member, flight)

    def _hand_out(self, job: _Job, landed: Any) -> None:
        chunk = job.answer.take(landed)
        job.ids += chunk.ids
        self._count.add(chunk)
        self._tell(job, chunk)
        if job.answer.finish is not None:
            self._end(job)

    def _end(self, job: _Job, finish: str | None = None) -> None:
        """Evict a request and tell its client how it ended; its caches stay for others that begin alike."""
        last = job.answer.end(finish)
        self._evict(job)
        self._tell(job, last)
        self._store(job)

    def _evict(self, job: _Job) -> None:
        with self._wake:
            self._jobs.pop(job.number, None)
        self._batch.leave(job.number)

    def _store(self, job: _Job) -> None:
        run = job.member.run
        try:
            self._prefix.store(job.ids, run.cache, None if run.draft is None else run.context)
        except Exception:  # no memory for the copy, say: the answer is complete, and nothing is kept of it
            mx.clear_cache()

    def _tell(self, job: _Job, chunk: Chunk) -> None:
        if chunk.finish_reason is not None:
            self._count.finished[chunk.finish_reason] += 1
        self._deliver(job, chunk)

    def _deliver(self, job: _Job, event: Event) -> None:
        try:
            job.deliver(event)
        except Exception:  # a receiver that is gone must not take the others with it
            with self._wake:
                self._left.add(job.number)


_ALSO_SINGLE = ("plain", "paper", "lagged", "auto")  # policies that one request has under the same name


class _Counter:
    """Totals since the start, written by the engine's thread alone."""

    def __init__(self) -> None:
        self.requests = 0
        self.totals = Statistics(0)
        self.finished: Counter[str] = Counter()
        self._recent: deque[tuple[float, int]] = deque()

    def add(self, chunk: Chunk) -> None:
        """Count one round of one request."""
        now = time.monotonic()
        self._recent.append((now, len(chunk.ids)))
        while self._recent[0][0] < now - RATE_SECONDS:
            self._recent.popleft()
        if chunk.round is not None:
            self.totals.add(chunk.round)

    def rate(self) -> float:
        """Tokens per second over the last seconds."""
        now = time.monotonic()
        recent = [(then, tokens) for then, tokens in list(self._recent) if then >= now - RATE_SECONDS]
        if not recent:
            return 0.0
        return sum(tokens for _, tokens in recent) / max(now - recent[0][0], 1e-3)
