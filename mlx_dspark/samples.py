"""One prompt of an evaluation, decoded: the rounds that count, and the record from which a stopped run goes on.

The paper's protocol is the loop of DeepSeek's evaluation code: fixed blocks, no thinking, and the round in
which the last token wanted falls is run at full width and counted whole. The product's is what a user
gets: the default policy, the tokenizer's own thinking, and not a row past the last token wanted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import FormatError
from .prompts import Row, read_rows
from .record import round_from
from .structs import Round, Sampling

if TYPE_CHECKING:
    from .load import Pair

PAPER, PRODUCT = "paper", "product"
FIXED, DEFAULT = "fixed", "default"
HEADER = b'{"run": '  # how a sample begins in a record file


@dataclass(frozen=True)
class Settings:
    """How an evaluation decodes. Sample i draws with seed + i. Raises ValueError for a bad temperature."""

    protocol: str = PAPER
    temperature: float = 1.0
    max_tokens: int = 2048
    seed: int = 980406

    def __post_init__(self) -> None:
        Sampling(temperature=self.temperature, seed=self.seed)  # checks both

    @property
    def policy(self) -> str:
        """The whole block, or what a run without --policy does."""
        return FIXED if self.protocol == PAPER else DEFAULT


@dataclass(frozen=True)
class Sample:
    """A prompt on its way: its set, its number there, its token ids and how many tokens it may generate."""

    data: str
    number: int
    ids: tuple[int, ...]
    max_tokens: int


def encode(pair: Pair, row: Row, settings: Settings) -> tuple[int, ...]:
    """A row's first turn as token ids: one user message, no system message, and in the paper's protocol no thinking.

    Without a chat template the text is taken as it is. Raises FormatError for ids outside the vocabulary.
    """
    from .load import encode_prompt

    if row.ids is None:
        off = False if settings.protocol == PAPER and pair.tokenizer.has_chat_template else None
        return tuple(encode_prompt(pair.tokenizer, row.turns[0], thinking=off))
    size = pair.target.vocab_size
    if size is not None and max(row.ids) >= size:
        raise FormatError(f"{row.where}: token {max(row.ids)} is outside the vocabulary of {size}: encode with this "
                          "target's tokenizer")
    return row.ids


def read_prompts(path: Path, pair: Pair) -> list[list[int]]:
    """The rows of a JSONL file as a user would ask them: `encode` in the product's protocol. Raises FormatError."""
    return [list(encode(pair, row, Settings(PRODUCT))) for row in read_rows(path)]


def room_for(pair: Pair, prompt: int, settings: Settings) -> int:
    """How many tokens a prompt of this length may generate: as many as asked, or what the context has left."""
    if pair.target.context is None:
        return settings.max_tokens
    beyond = pair.draft.gamma + 1 if settings.protocol == PAPER else 0  # what the last round may run past the limit
    return min(settings.max_tokens, pair.target.context - prompt - beyond)


def decode_sample(pair: Pair, sample: Sample, settings: Settings, policy: str) -> Iterator[Round]:
    """The sample's rounds, the prefill first."""
    sampling = Sampling(temperature=settings.temperature, seed=settings.seed + sample.number)
    if settings.protocol == PAPER:
        return _paper_rounds(pair, sample, sampling, policy)
    return _product_rounds(pair, sample, sampling)


def _paper_rounds(pair: Pair, sample: Sample, sampling: Sampling, policy: str) -> Iterator[Round]:
    from .decode import DecodeOptions, decode
    from .sampling import make_rule
    from .schedule import make_policy

    draft = pair.draft
    options = DecodeOptions(
        make_rule(sampling), make_policy(policy, draft.gamma, draft.has_confidence),
        sample.max_tokens + draft.gamma + 1,  # so that no round that counts is cut to what is left
        pair.stop_ids, confidences=draft.has_confidence,
    )
    committed = 0
    with pair.target.wired():
        for landed in decode(pair, sample.ids, options):
            yield landed
            committed += len(landed.tokens)
            if committed > sample.max_tokens:
                return


def _product_rounds(pair: Pair, sample: Sample, sampling: Sampling) -> Iterator[Round]:
    from .generate import stream_generate

    chunks = stream_generate(pair, sample.ids, max_tokens=sample.max_tokens, sampling=sampling,
                             confidences=pair.draft.has_confidence)
    for chunk in chunks:
        if chunk.round is not None:
            yield chunk.round


class Samples:
    """Decodes samples, or takes them from a record file in which an earlier run left them.

    A finished sample is written at once: a line about it, then its rounds as `generate --record` writes
    them, with all digits of the confidences. What a killed run left half written is cut off.
    """

    def __init__(self, pair: Pair, settings: Settings, record: Path | None = None):
        from .store import content_hash

        self._pair, self._settings = pair, settings
        self._facts = {"protocol": settings.protocol, "temperature": settings.temperature,
                       "target": content_hash(pair.target.model), "draft": content_hash(pair.draft),
                       "dtype": pair.facts.get("dtype")}
        self._record = record
        self._known = {} if record is None else _resume(record)

    def known(self, sample: Sample, policy: str) -> bool:
        """Whether an earlier run left this sample."""
        return _key(self._about(sample, policy)) in self._known

    def rounds(
        self, sample: Sample, policy: str, watch: Callable[[int], None] = lambda tokens: None
    ) -> tuple[Round, ...]:
        """All rounds of a sample under a policy. watch: told the tokens of each round that is decoded."""
        about = self._about(sample, policy)
        found = self._known.get(_key(about))
        if found is not None:
            return found
        rounds = []
        for landed in decode_sample(self._pair, sample, self._settings, policy):
            rounds.append(landed)
            watch(len(landed.tokens))
        self._keep(about, rounds)
        return tuple(rounds)

    def _keep(self, about: Mapping[str, Any], rounds: Sequence[Round]) -> None:
        if self._record is None:
            return
        lines = [{"run": {**about, "rounds": len(rounds)}}]
        lines += [{**landed.to_dict(), "confidences": landed.confidences} for landed in rounds]
        with self._record.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def _about(self, sample: Sample, policy: str) -> dict[str, Any]:
        """Everything that a sample's rounds depend on."""
        digest = hashlib.sha256(json.dumps(sample.ids).encode()).hexdigest()[:16]
        return {**self._facts, "data": sample.data, "sample": sample.number, "prompt": digest, "policy": policy,
                "seed": self._settings.seed + sample.number, "max_tokens": sample.max_tokens}


def _resume(path: Path) -> dict[str, tuple[Round, ...]]:
    """The complete samples of a record file, from which a last one that is half written is cut off.

    Raises FormatError for a file that no evaluation wrote.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    found: dict[str, tuple[Round, ...]] = {}
    at = 0
    while at < len(lines):
        try:
            about = dict(json.loads(lines[at])["run"])
            end = at + 1 + int(about.pop("rounds"))
            if end > len(lines) or not lines[end - 1].endswith(b"\n"):
                break
            found[_key(about)] = tuple(round_from(json.loads(line)) for line in lines[at + 1 : end])
        except (ValueError, KeyError, TypeError, AttributeError):
            if at == len(lines) - 1 and not lines[at].endswith(b"\n") and lines[at][:8] == HEADER[: len(lines[at])]:
                break
            raise FormatError(f"{path}, line {at + 1}: no sample as evaluate --record writes it: name another file"
                              ) from None
        at = end
    if at < len(lines):
        os.truncate(path, sum(map(len, lines[:at])))
    return found


def _key(about: Mapping[str, Any]) -> str:
    return json.dumps(about, sort_keys=True)
