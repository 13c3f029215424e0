"""The engine's chunks as OpenAI's objects: whole documents, or the events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..generate import Chunk
from ..stats import Statistics
from ..structs import finite
from ..text import TextStream
from .tools import Split, Splitter

SHOWN_STATS = ("tau", "rounds", "drafted", "verified", "accepted", "rows", "parked_share", "prompt_tokens",
               "generated_tokens", "prefill_tps", "decode_tps", "policy", "seed")


class Said(NamedTuple):
    """A token's text and log-probability; best: those of the most likely tokens in its place, None if not asked for."""

    text: str
    logprob: float
    best: tuple[tuple[str, float], ...] | None = None


@dataclass(frozen=True)
class Delta:
    """What one chunk adds, or all of them together.

    logprobs: one a token, None if they were not asked for.
    offsets: where each token's text begins in the answer. watch: the page's view of the round.
    """

    split: Split
    logprobs: tuple[Said, ...] | None = None
    offsets: tuple[int, ...] = ()
    finish: str | None = None
    watch: dict[str, Any] | None = None


class TokenTexts:
    """The piece of text that each token completes; with `rest` they are the whole text, stop tokens left out."""

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int], stop: Sequence[str] = ()):
        self._stream = TextStream(tokenizer, stop, stop_ids)

    def feed(self, tokens: Sequence[int]) -> list[str]:
        return [self._stream.feed([token]).text for token in tokens]

    def rest(self) -> str:
        """At the end: what was held back until now."""
        return self._stream.finish().text


class Reader:
    """Turns the chunks of one answer into deltas.

    splitter: None leaves the text in one piece. watched: describe every round for the page.
    stop: the strings that end the answer, which are no part of its text.
    """

    def __init__(
        self, tokenizer: Any, stop_ids: frozenset[int], splitter: Splitter | None, watched: bool,
        stop: Sequence[str] = (),
    ):
        self._decode, self._splitter, self._watched = tokenizer.decode, splitter, watched
        self._texts = TokenTexts(tokenizer, stop_ids)  # for offsets: nothing is held back for a stop string
        self._pieces = TokenTexts(tokenizer, stop_ids, stop)
        self._length = 0
        self._drafted = False  # whether the draft had proposed the last token
        self._called = False

    def read(self, chunk: Chunk) -> Delta:
        last = chunk.finish_reason is not None
        split = Split(chunk.text) if self._splitter is None else self._splitter.feed(chunk.text, last)
        self._called = self._called or bool(split.tool_calls)
        texts = [] if chunk.logprobs is None else self._texts.feed(chunk.ids)
        finish = "tool_calls" if chunk.finish_reason == "stop" and self._called else chunk.finish_reason
        offsets = tuple(self._offsets(texts))
        logprobs = None if chunk.logprobs is None else tuple(self._said(chunk, chunk.logprobs))
        return Delta(split, logprobs, offsets, finish, self._watch(chunk) if self._watched else None)

    def _said(self, chunk: Chunk, logprobs: Sequence[float]) -> Iterator[Said]:
        tops = chunk.top_logprobs or [None] * len(chunk.ids)
        for token, value, best in zip(chunk.ids, logprobs, tops, strict=True):
            yield Said(self._decode([token]), finite(value), None if best is None else tuple(
                (self._decode([other]), finite(theirs)) for other, theirs in best))

    def _offsets(self, texts: Sequence[str]) -> Iterator[int]:
        for text in texts:
            yield self._length
            self._length += len(text)

    def _watch(self, chunk: Chunk) -> dict[str, Any]:
        """The round for the page. tokens: text and whether the draft had it; rejected: drafts not kept."""
        landed = chunk.round
        if landed is None:
            rest = self._pieces.rest()
            return {"stats": shown_stats(chunk.stats), **({"tokens": [[rest, self._drafted]]} if rest else {})}
        tokens = [[text, place < landed.accepted] for place, text in enumerate(self._pieces.feed(chunk.ids))]
        self._drafted = landed.accepted >= len(tokens)
        return {
            "round": landed.index, "rows": landed.rows, "proposed": landed.proposed, "accepted": landed.accepted,
            "verified": len(landed.drafts),
            "tokens": tokens,
            "rejected": [self._decode([token]) for token in landed.drafts[landed.accepted:]],
            "policy": landed.schedule.policy, "reason": landed.schedule.reason, "tau": chunk.stats.tau,
        }


def merged(deltas: Sequence[Delta]) -> Delta:
    """All deltas of an answer as one."""
    split = Split("".join(d.split.content for d in deltas), "".join(d.split.reasoning for d in deltas),
                  tuple(call for d in deltas for call in d.split.tool_calls))
    kept = [d.logprobs for d in deltas if d.logprobs is not None]
    return Delta(split, tuple(pair for one in kept for pair in one) if kept else None,
                 tuple(offset for d in deltas for offset in d.offsets), deltas[-1].finish, deltas[-1].watch)


def usage_of(stats: Statistics) -> dict[str, Any]:
    """OpenAI's usage object; cached tokens are those whose keys and values were reused."""
    return {
        "prompt_tokens": stats.prompt_tokens, "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": int(stats.facts.get("cached_tokens", 0))},
    }


def shown_stats(stats: Statistics) -> dict[str, Any]:
    """The statistics that tell nothing about the machine's files."""
    known = stats.to_dict()
    return {name: known[name] for name in SHOWN_STATS if name in known}


class Form(Protocol):
    """How an endpoint writes its answers."""

    def opening(self) -> list[dict[str, Any]]:
        """Events before the first delta."""

    def events(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of one delta; none if it adds nothing."""

    def document(self, whole: Delta, stats: Statistics) -> dict[str, Any]:
        """The answer of a request that did not ask for a stream."""

    def usage(self, stats: Statistics) -> dict[str, Any]:
        """The event that tells the token counts."""


@dataclass(frozen=True)
class Answer:
    """What all objects of one answer repeat. model: the served name."""

    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def frame(self, prefix: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model,
                "choices": choices}


class ChatForm:
    """Objects of /v1/chat/completions."""

    def __init__(self, model: str):
        self._answer = Answer(model)

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._answer.frame("chatcmpl", kind, choices)

    def opening(self) -> list[dict[str, Any]]:
        return [self._event({"role": "assistant", "content": ""}, None)]

    def _event(self, delta: dict[str, Any], finish: str | None, **more: Any) -> dict[str, Any]:
        return self._frame("chat.completion.chunk",
                           [{"index": 0, "delta": delta, "logprobs": more.pop("logprobs", None),
                             "finish_reason": finish}]) | more

    def events(self, delta: Delta) -> list[dict[str, Any]]:
        new: dict[str, Any] = {}
        if delta.split.reasoning:
            new["reasoning_content"] = delta.split.reasoning
        if delta.split.content:
            new["content"] = delta.split.content
        if delta.split.tool_calls:
            new["tool_calls"] = list(delta.split.tool_calls)
        more = {} if delta.watch is None else {"dspark": delta.watch}
        if not (new or more or delta.logprobs or delta.finish):
            return []
        return [self._event(new, delta.finish, logprobs=_chat_logprobs(delta), **more)]

    def document(self, whole: Delta, stats: Statistics) -> dict[str, Any]:
        calls = [{name: call[name] for name in ("id", "type", "function")} for call in whole.split.tool_calls]
        message: dict[str, Any] = {"role": "assistant", "content": whole.split.content or (None if calls else "")}
        if whole.split.reasoning:
            message["reasoning_content"] = whole.split.reasoning
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "logprobs": _chat_logprobs(whole), "finish_reason": whole.finish}
        return self._frame("chat.completion", [choice]) | _ending(whole, stats)

    def usage(self, stats: Statistics) -> dict[str, Any]:
        return self._frame("chat.completion.chunk", []) | {"usage": usage_of(stats)}


class CompletionForm:
    """Objects of /v1/completions."""

    def __init__(self, model: str):
        self._answer = Answer(model)

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._answer.frame("cmpl", "text_completion", choices)

    def opening(self) -> list[dict[str, Any]]:
        return []

    def _choice(self, delta: Delta) -> dict[str, Any]:
        return {"index": 0, "text": delta.split.content, "logprobs": _completion_logprobs(delta),
                "finish_reason": delta.finish}

    def events(self, delta: Delta) -> list[dict[str, Any]]:
        more = {} if delta.watch is None else {"dspark": delta.watch}
        if not (delta.split.content or more or delta.logprobs or delta.finish):
            return []
        return [self._frame([self._choice(delta)]) | more]

    def document(self, whole: Delta, stats: Statistics) -> dict[str, Any]:
        return self._frame([self._choice(whole)]) | _ending(whole, stats)

    def usage(self, stats: Statistics) -> dict[str, Any]:
        return self._frame([]) | {"usage": usage_of(stats)}


def _ending(whole: Delta, stats: Statistics) -> dict[str, Any]:
    more = {} if whole.watch is None else {"dspark": {"stats": shown_stats(stats)}}
    return {"usage": usage_of(stats), **more}


def _chat_logprobs(delta: Delta) -> dict[str, Any] | None:
    if not delta.logprobs:
        return None
    return {"content": [{**_entry(said.text, said.logprob), "top_logprobs": [_entry(*one) for one in said.best or ()]}
                        for said in delta.logprobs], "refusal": None}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": _bytes(text)}


def _completion_logprobs(delta: Delta) -> dict[str, Any] | None:
    if not delta.logprobs:
        return None
    said = delta.logprobs
    return {"tokens": [one.text for one in said], "token_logprobs": [one.logprob for one in said],
            "top_logprobs": None if said[0].best is None else [_by_text(one) for one in said],
            "text_offset": list(delta.offsets)}


def _by_text(said: Said) -> dict[str, float]:
    """The most likely tokens, then the chosen one if it is none of them. Of tokens with one text the first counts."""
    entries: dict[str, float] = {}
    for text, value in (*(said.best or ()), (said.text, said.logprob)):
        entries.setdefault(text, value)
    return entries


def _bytes(text: str) -> list[int] | None:
    """UTF-8 of a token's text, None where the token is only a part of a character."""
    return None if "\ufffd" in text else list(text.encode("utf-8", "surrogatepass"))
