"""Does a pair work? A short run that looks for what shapes cannot show.

A tap or an anchor that is off by one, the wrong rotary style or a draft of another target give exactly
the right text with a tau near one. So the run is compared with plain decoding (texts) and with what is
known of the draft (tau), and where tau is too low the likely mistakes are tried one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .bench import NEAR_TIE

if TYPE_CHECKING:
    from .draft import DraftSpec
    from .load import Pair
    from .registry import KnownDraft

NEAR_ONE = 1.15  # a draft that is fed rightly is above this on any text
FAR_BELOW = 0.6  # of the least published tau: prompts differ, so only a large gap means anything
CLEARLY = 0.3  # tokens per round by which a variant must win
PROMPTS = (
    "Explain in a few sentences how a sailing boat can move against the wind.",
    "Natalia has 48 clips and gives half of them to May. How many are left? Show each step.",
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "List the planets of the solar system in order, one per line.",
)


@dataclass(frozen=True)
class Trial:
    """One greedy run over all prompts. accepted[k]: share of the rounds with slot k + 1 that kept it."""

    tau: float
    rounds: int
    accepted: tuple[float, ...]
    texts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Check:
    """One question and its answer, in a sentence for the user."""

    name: str
    passed: bool
    detail: str


def self_check(
    pair: Pair, prompts: Sequence[Sequence[int]], max_tokens: int, known: KnownDraft | None = None
) -> tuple[Trial, list[Check]]:
    """Run a pair (with a draft) on token-id prompts; `known`: the registry's draft to compare tau with."""
    trial = run_trial(pair, prompts, max_tokens, "fixed")
    plain = run_trial(pair, prompts, max_tokens, "plain")
    checks = [_check_texts(pair, prompts, trial, plain), _check_tau(trial, known)]
    if _too_low(trial, known):
        checks[1] = dataclasses.replace(checks[1], detail=f"{checks[1].detail}; " + _diagnosis(
            pair, prompts, max_tokens, trial.tau))
    return trial, checks


def run_trial(pair: Pair, prompts: Sequence[Sequence[int]], max_tokens: int, policy: str) -> Trial:
    """Greedy texts of all prompts under a policy."""
    from .generate import stream_generate

    texts, rounds = [], []
    for prompt in prompts:
        chunks = [chunk for chunk in stream_generate(pair, prompt, max_tokens=max_tokens, policy=policy) if chunk.round]
        rounds += [chunk.round for chunk in chunks if chunk.round.rows]
        texts.append(tuple(token for chunk in chunks for token in chunk.ids))
    widest = max((len(landed.drafts) for landed in rounds), default=0)
    accepted = []
    for slot in range(widest):
        offered = [landed.accepted > slot for landed in rounds if len(landed.drafts) > slot]
        accepted.append(sum(offered) / len(offered))
    tau = sum(len(landed.tokens) for landed in rounds) / max(1, len(rounds))
    return Trial(tau, len(rounds), tuple(accepted), tuple(texts))


def variants(spec: DraftSpec, layers: int) -> dict[str, DraftSpec]:
    """The same weights read another way: every mistake that a config can make and no shape shows."""
    found = {}
    for shift in (-1, 1):
        taps = tuple(tap + shift for tap in spec.taps)
        if taps[0] >= -1 and taps[-1] < layers - 1:
            found[f"taps {list(taps)}"] = dataclasses.replace(spec, taps=taps)
    flipped = dataclasses.replace(spec, anchor_predicts=not spec.anchor_predicts)
    if spec.kind == "block" and flipped.gamma >= 1:
        rule = "predicts" if flipped.anchor_predicts else "does not predict"
        found[f"the other anchor rule (slot 0 {rule})"] = flipped
    return found


def _check_texts(pair: Pair, prompts: Sequence[Sequence[int]], trial: Trial, plain: Trial) -> Check:
    gaps = [_gap(pair, *texts) for texts in zip(prompts, trial.texts, plain.texts, strict=True)]
    differing = [gap for gap in gaps if gap is not None]
    detail = f"{len(gaps) - len(differing)} of {len(gaps)} texts equal plain decoding"
    if not differing:
        return Check("texts", True, detail)
    limit = NEAR_TIE[pair.facts["dtype"]]
    near = max(differing) <= limit
    why = "a near-tie that rounding may flip" if near else f"more than rounding explains ({limit:g})"
    return Check("texts", near, f"{detail}; the widest logit gap at a first difference is {max(differing):.4f}, {why}")


def _gap(pair: Pair, prompt: Sequence[int], ours: Sequence[int], plain: Sequence[int]) -> float | None:
    """How much the target prefers plain decoding's token where the texts part; None if they do not."""
    import mlx.core as mx

    at = next((i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), None)
    if at is None:
        return None if len(ours) == len(plain) else float("inf")
    logits = pair.target.model(mx.array([[*prompt, *plain[:at]]]))[0, -1].astype(mx.float32)
    return abs((logits[plain[at]] - logits[ours[at]]).item())


def _check_tau(trial: Trial, known: KnownDraft | None) -> Check:
    near_one = trial.tau < NEAR_ONE
    detail = f"tau {trial.tau:.2f} over {trial.rounds} rounds"
    if near_one:
        detail += " is near one: the draft proposes almost nothing that the target keeps"
    if known is not None and known.tau:
        detail += f"; {known.repo} was published with {known.expected()}"
    return Check("tau", not near_one, detail)


def _too_low(trial: Trial, known: KnownDraft | None) -> bool:
    least = min(known.tau.values(), default=0.0) if known is not None else 0.0
    return trial.tau < max(NEAR_ONE, FAR_BELOW * least)


def _diagnosis(pair: Pair, prompts: Sequence[Sequence[int]], max_tokens: int, tau: float) -> str:
    """Try the variants and say which one is clearly better, or what else it may be."""
    spec: Any = getattr(pair.draft, "spec", None)
    if spec is None:
        return "likely cause: a draft model of another target or tokenizer"
    tried: dict[str, float] = {}
    for name, variant in variants(spec, len(pair.target.layers)).items():
        with _read_as(pair.draft, variant):
            tried[name] = run_trial(pair, prompts, max_tokens, "fixed").tau
    best = max(tried, key=lambda name: tried[name], default=None)
    if best is not None and tried[best] >= tau + CLEARLY:
        return f"with {best} tau is {tried[best]:.2f}: the draft's config misstates it, tell its author"
    return (f"likely causes: taps shifted by one, the anchor rule, the RoPE style, or a draft of another target; "
            f"tried without gain: {', '.join(tried) or 'nothing'}")


@contextmanager
def _read_as(draft: Any, spec: DraftSpec) -> Iterator[None]:
    kept = draft.spec
    draft.spec = spec
    try:
        yield
    finally:
        draft.spec = kept
