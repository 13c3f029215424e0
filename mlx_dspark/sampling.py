"""One processed distribution for drafting, accepting, residual and bonus; the accept rule.

Everything is batched over requests (leading axis B) and stays on the device. A rule is built once
per request from its `Sampling`; the round loop then only calls `picker` and `judge`. The accept test
itself is in `kernels/accept.py`, beside the kernels that do the same.

The exactness argument (Leviathan et al. 2023; paper, section 2): a draft drawn from q and accepted
with probability min(1, p/q), with a rejection replaced by a draw from normalise(max(p - q, 0)), has
distribution p. It holds for any q that the draft was really drawn from, so p and q are made by the
same float32 function `shape`, and q is the very array the draft token was sampled from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx

from .kernels import REFERENCE, Kernels
from .kernels.accept import sampled_reference
from .kernels.softmax import log_softmax, logsumexp
from .structs import Sampling, Verdict

Processor = Callable[[mx.array, mx.array], mx.array]  # (tokens [n], logits [1, V]) -> logits [1, V]
Shape = Callable[[mx.array], mx.array]  # logits [..., V] -> float32 log-probabilities [..., V]
Pick = Callable[[mx.array, Sequence[mx.array]], tuple[mx.array, mx.array | None]]

# The kernels add noise to logits / temperature without knowing the maximum: below this, float32 would round off
# digits of the noise.
COLDEST = 0.1


class Rule(Protocol):
    """Chooses draft tokens and judges them. `seen` is the token history [n], None without processors."""

    uses_history: bool
    seed: int | None

    def using(self, kernels: Kernels) -> Rule:
        """The same rule with the kernels that a pair chose for its device."""

    def start(self) -> mx.array | None:
        """The request's own random key, None when nothing is random."""

    def split(self, key: mx.array | None) -> tuple[mx.array | None, mx.array | None, mx.array | None]:
        """(key for later rounds, key for drafting, key for judging)."""

    def picker(self, seen: mx.array | None, key: mx.array | None, slots: int) -> Pick:
        """A function (corrected logits [B, V], drafts so far) -> (token [B], log_q [B, V] or None)."""

    def judge(
        self, drafts: mx.array, log_q: mx.array | None, logits: mx.array,
        seen: mx.array | None, key: mx.array | None, limits: mx.array | None = None,
    ) -> Verdict:
        """Accept a prefix of drafts [B, N] under target logits [B, N + 1, V].

        limits: int32 [B], how many drafts of each were verified, where only the device knows; None for all N.
        """


def make_rule(sampling: Sampling, processors: Sequence[Processor] = ()) -> Rule:
    """The accept rule for one request.

    processors: functions (tokens [n], logits [1, V]) -> logits [1, V], mlx-lm's logits processors;
        each row sees the tokens it would have seen in plain decoding.
    """
    process = _make_process(processors)
    if sampling.greedy:
        return GreedyRule(process)
    seed = int.from_bytes(os.urandom(4), "little") if sampling.seed is None else sampling.seed
    filtered = sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0
    plain = not filtered and sampling.temperature >= COLDEST
    return SampledRule(process, make_shape(sampling), 1 / sampling.temperature, plain, seed)


def make_shape(sampling: Sampling) -> Shape:
    """Logits [..., V] -> float32 log-probabilities of the processed distribution [..., V].

    bf16 softmaxes over a large vocabulary do not sum to one, so the first step is the cast.
    """
    keeps = _make_filter(sampling)
    scale = 1.0 / sampling.temperature

    def shape(logits: mx.array) -> mx.array:
        logits = keeps(logits.astype(mx.float32))
        logits = (logits - logits.max(axis=-1, keepdims=True)) * scale  # shifted first: a low temperature scales up
        return log_softmax(logits)

    return shape


class ArgmaxPick:
    """The best token, of plain logits: what a greedy walk on the device can do by itself."""

    def __call__(self, logits: mx.array, drafts: Sequence[mx.array]) -> tuple[mx.array, None]:
        return mx.argmax(logits, axis=-1), None


class GumbelPick:
    """A draw from softmax(logits / temperature): what a sampled walk on the device can do by itself.

    keys: one a slot [N, 2]; scale: 1 / temperature, float32 [1].
    """

    def __init__(self, shape: Shape, scale: mx.array, keys: mx.array):
        self.shape, self.scale, self.keys = shape, scale, keys

    def __call__(self, logits: mx.array, drafts: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        log_q = self.shape(logits)  # [B, V]
        noise = mx.random.gumbel(log_q.shape, key=self.keys[len(drafts)])  # as the kernels; categorical draws otherwise
        return mx.argmax(log_q + noise, axis=-1), log_q


class GreedyRule:
    """Accept while the draft equals the target's argmax; the next token is the argmax."""

    seed = None

    def __init__(self, process: _Process | None, kernels: Kernels = REFERENCE):
        self._process = process
        self._accept = kernels.accept_greedy
        self.uses_history = process is not None

    def using(self, kernels: Kernels) -> GreedyRule:
        return GreedyRule(self._process, kernels)

    def start(self) -> None:
        return None

    def split(self, key: mx.array | None) -> tuple[None, None, None]:
        return None, None, None

    def picker(self, seen: mx.array | None, key: mx.array | None, slots: int) -> Pick:
        best, process = ArgmaxPick(), self._process
        if process is None:
            return best
        return lambda logits, drafts: best(process(logits[:, None], seen, drafts)[:, 0], drafts)

    def judge(
        self, drafts: mx.array, log_q: mx.array | None, logits: mx.array,
        seen: mx.array | None, key: mx.array | None, limits: mx.array | None = None,
    ) -> Verdict:
        logits = _processed(self._process, logits, seen, drafts)
        accepted, tokens = self._accept(drafts, logits, limits)
        return Verdict(accepted, tokens, logits)


class SampledRule:
    """Rejection sampling with the request's own key; exact for every draft distribution.

    plain: the temperature alone shapes the distribution, as the kernels know it.
    """

    def __init__(
        self, process: _Process | None, shape: Shape, scale: float, plain: bool, seed: int,
        kernels: Kernels = REFERENCE,
    ):
        self._process, self._shape, self._plain = process, shape, plain and process is None
        self._scale = mx.array([scale], dtype=mx.float32)
        self._arguments = (process, shape, scale, plain, seed)
        self._accept = kernels.accept_sampled if self._plain else None
        self.uses_history = process is not None
        self.seed = seed

    def using(self, kernels: Kernels) -> SampledRule:
        return SampledRule(*self._arguments, kernels)

    def start(self) -> mx.array:
        return mx.random.key(self.seed)

    def split(self, key: mx.array | None) -> tuple[mx.array, mx.array, mx.array]:
        later, drafting, judging = mx.random.split(key, 3)
        return later, drafting, judging

    def picker(self, seen: mx.array | None, key: mx.array | None, slots: int) -> Pick:
        draw, process = GumbelPick(self._shape, self._scale, mx.random.split(key, slots)), self._process
        if self._plain:
            return draw
        if process is None:
            return lambda logits, drafts: draw(logits, drafts)
        return lambda logits, drafts: draw(process(logits[:, None], seen, drafts)[:, 0], drafts)

    def judge(
        self, drafts: mx.array, log_q: mx.array | None, logits: mx.array,
        seen: mx.array | None, key: mx.array | None, limits: mx.array | None = None,
    ) -> Verdict:
        test_key, next_key = mx.random.split(key)
        return self.judge_with(drafts, log_q, logits, seen, mx.random.uniform(shape=drafts.shape, key=test_key),
                               next_key, limits)

    def judge_with(
        self, drafts: mx.array, log_q: mx.array | None, logits: mx.array,
        seen: mx.array | None, uniforms: mx.array, next_key: mx.array, limits: mx.array | None = None,
    ) -> Verdict:
        """`judge` with the accept tests' uniforms [B, N] given (for replaying recorded runs)."""
        logits = _processed(self._process, logits, seen, drafts)
        keys = next_key[None] if len(drafts) == 1 else mx.random.split(next_key, len(drafts))  # [B, 2]
        if self._accept is not None and log_q is not None:
            accepted, tokens = self._accept(drafts, log_q, logits, self._scale, uniforms, keys, limits)
        else:
            accepted, tokens = sampled_reference(drafts, log_q, self._shape(logits), uniforms, keys, limits)
        return Verdict(accepted, tokens, logits)


def logprobs_of(logits: mx.array, tokens: mx.array) -> mx.array:
    """Float32 log-probabilities, at temperature 1, of tokens [..., K] under logits [..., V]; shape [..., K]."""
    logits = logits.astype(mx.float32)
    return mx.take_along_axis(logits, tokens, axis=-1) - logsumexp(logits)


def most_likely(logits: mx.array, count: int) -> mx.array:
    """Ids of the `count` largest of logits [..., V], the largest first and of equals the lower id; int32 [..., count].

    NaN counts as minus infinity. A partition and a sort leave the order of equals open, and half-precision logits are
    often equal: so both see an integer that no two tokens share, the value above the id.
    """
    size = logits.shape[-1]
    values = mx.where(mx.isnan(logits), -mx.inf, logits).astype(mx.float32) + 0.0  # there is one zero
    bits = mx.view(values, mx.int32)
    order = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(mx.int64)  # rises with the value
    keys = (order << 32) | (size - 1 - mx.arange(size))  # [..., V]
    best = -mx.sort(-mx.topk(keys, count, axis=-1), axis=-1)  # [..., count]
    return (size - 1 - (best & 0xFFFFFFFF)).astype(mx.int32)


_Process = Callable[[mx.array, mx.array | None, Sequence[mx.array]], mx.array]


def _processed(process: _Process | None, logits: mx.array, seen: mx.array | None, drafts: mx.array) -> mx.array:
    """Logits [B, N + 1, V] of the rows of drafts [B, N]."""
    return logits if process is None else process(logits, seen, [drafts[:, k] for k in range(drafts.shape[1])])


def _make_process(processors: Sequence[Processor]) -> _Process | None:
    """(logits [B, T, V], seen [n], drafts before the last row) -> processed logits [B, T, V]; None without any."""
    if not processors:
        return None

    def process(logits: mx.array, seen: mx.array | None, drafts: Sequence[mx.array]) -> mx.array:
        assert seen is not None and logits.shape[0] == 1, "logits processors need the history of one request"
        known = len(drafts) - (logits.shape[1] - 1)  # drafts that the first row has already seen
        rows = []
        for row in range(logits.shape[1]):
            line, tokens = logits[:, row], mx.concatenate([seen, *drafts[: known + row]])
            for processor in processors:
                line = processor(tokens, line)
            rows.append(line)
        return mx.stack(rows, axis=1)

    return process


def _make_filter(sampling: Sampling) -> Shape:
    """Set to -inf what top-p, min-p and top-k remove, judged at temperature 1 as mlx-lm does."""
    filters: list[Shape] = []
    if sampling.top_k or sampling.top_p < 1:
        filters.append(lambda logits: _keep_top(logits, sampling.top_k, sampling.top_p))
    if sampling.min_p > 0:
        filters.append(lambda logits: _keep_above(logits, sampling.min_p))

    def apply(logits: mx.array) -> mx.array:
        kept = [f(logits) for f in filters]
        for mask in kept:
            logits = mx.where(mask, logits, -mx.inf)
        return logits

    return apply


def _keep_top(logits: mx.array, top_k: int, top_p: float) -> mx.array:
    """Tokens in the nucleus of mass top_p and among the top_k; both are prefixes of one sorted order."""
    size = logits.shape[-1]
    count = min(top_k, size) if top_k else size
    ranked = mx.topk(logits, count, axis=-1) if count < size else logits
    ranked = -mx.sort(-ranked, axis=-1)  # descending, [..., count]
    mass = mx.exp(ranked - logsumexp(logits))
    above = mx.cumsum(mass, axis=-1) - mass  # mass ranked before this token
    inside = ((above < top_p) | (mx.arange(count) == 0)).sum(axis=-1, keepdims=True)
    return logits >= mx.take_along_axis(ranked, inside - 1, axis=-1)


def _keep_above(logits: mx.array, min_p: float) -> mx.array:
    """Tokens at least min_p times as likely as the most likely one."""
    return logits >= logits.max(axis=-1, keepdims=True) + mx.log(mx.array(min_p, dtype=mx.float32))
