"""The round loop: propose, schedule, verify, accept, commit.

`decode` is the whole method. It yields one `Round` record per round; streaming, bench, evaluation
and calibration all consume it. Everything is lazy until `land` reads the device: once a round, and
once more for a policy that must see this round's confidences. The next round is submitted before the
current one is handed to the caller, so the device works while text is detokenised.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import mlx.core as mx

from .flight import Flight, pack, unpack
from .load import Pair
from .sampling import Rule
from .schedule import Policy
from .structs import KVOptions, Proposal, Round, Schedule, Verified

HISTORY = 256  # rounds that a policy may look back on
CLEAR_EVERY = 256  # committed tokens between two clears of mlx's buffer cache


@dataclass(frozen=True)
class DecodeOptions:
    """Everything a run needs to know, resolved before the loop.

    max_tokens: None runs until a stop token. stop_ids: token ids that end the text.
    logprobs, confidences: read these too, in the same host read. top_logprobs: with logprobs, of so many of the most
        likely tokens in each place.
    timing: evaluate after each part, so that `Round.seconds` tells draft and verify apart; slower.

    Raises ValueError for top_logprobs below 0 or without logprobs.
    """

    rule: Rule
    policy: Policy
    max_tokens: int | None = None
    stop_ids: frozenset[int] = frozenset()
    kv: KVOptions = KVOptions()
    prefill_step: int = 2048
    logprobs: bool = False
    top_logprobs: int = 0
    confidences: bool = False
    timing: bool = False

    def __post_init__(self) -> None:
        if self.top_logprobs < 0:
            raise ValueError(f"top_logprobs is {self.top_logprobs}: give 0 (off) or a positive count")
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs} without logprobs: ask for logprobs, too")


def decode(pair: Pair, prompt: Sequence[int], options: DecodeOptions) -> Iterator[Round]:
    """Generate tokens after `prompt` (token ids, at least one); round 0 is the token of the prefill.

    Raises CacheError, before any work, if the policy drafts and the cache cannot be rolled back.
    """
    run = Run(pair, prompt, options)
    if options.max_tokens == 0:
        return
    landed = land(run, prefill(run, prompt))
    yield landed
    flight = None if landed.finish else launch(run)
    while flight is not None:
        # A settled round needs no decision of the host: the next one starts before it is read.
        ahead = launch(run) if flight.settled and run.left > 0 else None
        landed = land(run, flight)
        flight = None if landed.finish else ahead or launch(run)
        yield landed


class Generates(Protocol):
    """Whoever counts committed tokens."""

    generated: int


class Run:
    """The state of one request between rounds."""

    def __init__(self, pair: Pair, prompt: Sequence[int], options: DecodeOptions):
        self.options, self.policy = options, options.policy
        self.rule = options.rule.using(pair.kernels)
        self.target = pair.target
        self.cache = pair.target.start(options.kv)
        self.draft = None if self.policy.name == "plain" else pair.draft
        if self.draft is not None:
            self.cache.require_rollback()
            self.context = self.draft.start()
        self.taps = () if self.draft is None else self.draft.taps
        self.key = self.rule.start()
        self.seen = mx.array(prompt, dtype=mx.int32) if self.rule.uses_history else None  # [n]
        self.anchor: mx.array | None = None  # [1]
        self.left: float = math.inf if options.max_tokens is None else options.max_tokens
        self.history: deque[Round] = deque(maxlen=HISTORY)
        self.nothing = Proposal(mx.zeros((1, 0), dtype=mx.int32))
        self.launched = self.generated = 0

    def new_flight(self) -> tuple[Flight, mx.array | None]:
        """The next round, with the random key for its drafting."""
        self.key, drafting, judging = self.rule.split(self.key)
        flight = Flight(self.launched, self.cache.offset, self.nothing, judging)
        self.launched += 1
        return flight, drafting

    def observe(self, tokens: mx.array, taps: mx.array | None) -> None:
        """Hand committed rows [1, T] to the draft."""
        if self.draft is not None:
            self.draft.observe(self.context, tokens, taps)

    def most_drafts(self) -> float:
        """No round verifies past the last token wanted, nor across a change of the cache's kind."""
        if self.draft is None:
            return 0
        room = self.cache.room()
        return min(self.left, math.inf if room is None else room) - 1


def prefill(run: Run, prompt: Sequence[int]) -> Flight:
    """Run the prompt; its last row is judged like a round without drafts."""
    *_, flight = prefill_steps(run, prompt)
    return flight  # type: ignore[return-value]


def prefill_steps(run: Run, prompt: Sequence[int]) -> Iterator[Flight | None]:
    """The prompt behind the cache's offset, a chunk at a time: yields None after each, then the flight."""
    since = time.perf_counter()
    flight, _ = run.new_flight()
    for verified in run.target.prefill_steps(prompt, run.cache, run.taps, run.options.prefill_step, run.observe):
        if verified is None:
            yield None
            continue
        flight.start = run.cache.offset - 1
        flight.schedule = Schedule(0, run.policy.name, "prefill")
        flight.verdict = run.rule.judge(flight.proposal.tokens, None, verified.logits, run.seen, flight.judging)
        advance(run, flight, accepted=0)
        flight.settled = True
        submit(run, flight)
        _clock(run, flight, "prefill", since, flight.packed)
        yield flight


def launch(run: Run) -> Flight:
    """Start the next round; a policy that must see its confidences goes on in `land`."""
    flight = propose(run)
    if not flight.looks:
        verify(run, flight)
    return flight


def propose(run: Run) -> Flight:
    """Ask the policy whether to draft, and the draft for that many tokens."""
    since = time.perf_counter()
    flight, drafting = run.new_flight()
    flight.proposed = int(min(run.policy.before(run.history), run.most_drafts()))
    if flight.proposed > 0:
        flight.looks = run.policy.reads_confidence
        pick = run.rule.picker(run.seen, drafting, flight.proposed)
        flight.proposal = run.draft.propose(run.context, run.anchor, flight.proposed, pick)
        mx.async_eval(flight.proposal.tokens)
    _clock(run, flight, "draft", since, flight.proposal.tokens)
    return flight


def verify(run: Run, flight: Flight) -> None:
    """Schedule, run anchor and admitted drafts through the target, and judge them; nothing is read."""
    since = time.perf_counter()
    if flight.looks:
        flight.confidences = tuple(mx.sigmoid(flight.proposal.confidence_logits[0]).tolist())
    admit(run, flight, run.policy.after(flight.proposed, flight.confidences))
    judge(run, flight, run.target.forward(flight.inputs, run.cache, run.taps))
    _clock(run, flight, "verify", since, flight.packed)


def admit(run: Run, flight: Flight, schedule: Schedule) -> None:
    """Line up the anchor and the drafts that the schedule admits, as one row of inputs [1, N + 1]."""
    flight.schedule = schedule
    anchor, drafts = run.anchor[:, None], flight.proposal.tokens[:, : schedule.drafts]
    flight.inputs = mx.concatenate([anchor, drafts], axis=1) if schedule.drafts else anchor


def judge(run: Run, flight: Flight, verified: Verified) -> None:
    """Accept a prefix of the drafts under the target's logits, and start the device on the outcome."""
    drafted, log_q = flight.schedule.drafts, flight.proposal.log_q
    flight.taps = verified.taps
    flight.verdict = run.rule.judge(flight.inputs[:, 1:], None if log_q is None else log_q[:, :drafted],
                                    verified.logits, run.seen, flight.judging, flight.limit)
    if drafted == 0:  # nothing can be rejected
        commit(run, flight, accepted=0)
        flight.settled = True
    submit(run, flight)


def submit(run: Run, flight: Flight) -> None:
    """Start the device on everything that the host will read of this round."""
    wanted = run.options.confidences or run.policy.uses_confidence
    read_confidences = wanted and flight.confidences is None
    flight.packed = pack(flight, run.options.logprobs, run.options.top_logprobs, read_confidences)
    mx.async_eval(flight.packed)


def land(run: Run, flight: Flight) -> Round:
    """Read the outcome: the round's one host read."""
    if flight.verdict is None:
        verify(run, flight)
    since = time.perf_counter()
    numbers = flight.packed.tolist()
    _clock(run, flight, "wait", since)
    landed = settle(run, flight, numbers)
    clear_cache(run, len(landed.tokens))
    return landed


def settle(run: Run, flight: Flight, numbers: list[int]) -> Round:
    """Commit a round whose packed outcome has been read, and cut it at the first stop token."""
    since = time.perf_counter()
    outcome = unpack(flight, numbers, run.options.logprobs, run.options.top_logprobs)
    if not flight.settled:
        commit(run, flight, outcome.accepted)
    kept, finish = _cut(outcome.tokens[: outcome.accepted + 1], run.options.stop_ids, flight.last)
    _clock(run, flight, "commit", since)
    confidences = flight.confidences or outcome.confidences
    landed = Round(
        index=flight.index,
        start=flight.start,
        rows=0 if flight.index == 0 else len(outcome.drafts) + 1,
        proposed=flight.proposed,
        drafts=tuple(outcome.drafts),
        accepted=min(outcome.accepted, kept),
        tokens=tuple(outcome.tokens[:kept]),
        schedule=replace(flight.schedule, drafts=len(outcome.drafts)),
        seconds=flight.seconds,
        logprobs=None if outcome.logprobs is None else tuple(outcome.logprobs[:kept]),
        top_logprobs=None if outcome.top_logprobs is None else tuple(outcome.top_logprobs[:kept]),
        confidences=None if confidences is None else tuple(confidences),
        finish=finish,
    )
    run.history.append(landed)
    return landed


def commit(run: Run, flight: Flight, accepted: int) -> None:
    """Keep anchor and accepted drafts: roll the target's cache back, give their taps to the draft."""
    rows, keep = flight.inputs.shape[1], accepted + 1
    run.cache.advance(rows, keep)
    run.observe(flight.inputs[:, :keep], None if flight.taps is None else flight.taps[:, :keep])
    advance(run, flight, accepted)


def advance(run: Run, flight: Flight, accepted: int) -> None:
    """The token after the accepted run becomes the next anchor."""
    run.anchor = flight.verdict.tokens[:, accepted]  # [1]
    if run.seen is not None:
        run.seen = mx.concatenate([run.seen, flight.verdict.tokens[0, : accepted + 1]])
    run.left -= accepted + 1
    flight.last = run.left <= 0


def _cut(tokens: list[int], stop_ids: frozenset[int], last: bool) -> tuple[int, str | None]:
    """How many tokens stay (up to the first stop token, included), and why the text ends here."""
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return i + 1, "stop"
    return len(tokens), "length" if last else None


def clear_cache(counter: Generates, tokens: int) -> None:
    """Clear mlx's buffer cache when a threshold is crossed: rounds jump over multiples."""
    before, counter.generated = counter.generated, counter.generated + tokens
    if before // CLEAR_EVERY != counter.generated // CLEAR_EVERY:
        mx.clear_cache()


def _clock(run: Run, flight: Flight, part: str, since: float, *arrays: mx.array) -> None:
    if run.options.timing:
        mx.eval(*arrays)
    flight.seconds[part] = time.perf_counter() - since
