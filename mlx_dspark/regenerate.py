"""Dialogues whose answers the target gives itself: several at once with mlx-lm's batches, or one by one with a draft.

The user's turns are kept and every answer is made anew, each in sight of the new ones before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .prompts import Row
from .structs import Sampling

if TYPE_CHECKING:
    import mlx.core as mx

    from .load import Pair

Watch = Callable[[int], None]  # told that so many tokens were made


@dataclass(frozen=True)
class Wish:
    """How answers are drawn. sampling: its seed plus the row's number is the row's; see `seed_of`.

    max_tokens: per answer. thinking: for the chat template, None where there is none.
    """

    sampling: Sampling
    max_tokens: int
    thinking: bool | None

    def seed_of(self, number: int, turn: int) -> int:
        """The seed of one answer: that of the row, the turn in the upper 32 bits."""
        assert self.sampling.seed is not None, "regenerated data can be made again"
        return self.sampling.seed + number + (turn << 32)


@dataclass
class Dialogue:
    """A row on its way: the messages so far, and how each answer ended (stop or length).

    ids: the last prompt and its answer, a final stop token included. loss_mask: one for each, 1 in the answer.
    """

    number: int
    row: Row
    messages: list[dict[str, str]] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)
    tokens: int = 0
    ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.row.system is not None:
            self.messages.append({"role": "system", "content": self.row.system})

    @property
    def open(self) -> bool:
        """Whether a turn of the user waits for an answer."""
        return len(self.endings) < len(self.row.turns)

    def ask(self, pair: Pair, wish: Wish) -> tuple[list[int], int] | None:
        """The next prompt and how many tokens its answer may have; None if the context has no room for it."""
        from .load import encode_chat, encode_prompt

        said = {"role": "user", "content": self.row.turns[len(self.endings)]}
        if pair.tokenizer.has_chat_template:
            ids = encode_chat(pair.tokenizer, [*self.messages, said], wish.thinking)
        else:
            ids = encode_prompt(pair.tokenizer, said["content"], raw=True)
        context = pair.target.context
        room = wish.max_tokens if context is None else min(wish.max_tokens, context - len(ids))
        if room < 1:
            return None
        self.messages.append(said)
        self.ids, self.loss_mask = list(ids), [0] * len(ids)
        return ids, room

    def answer(self, text: str, ending: str, ids: list[int]) -> None:
        """Take the answer to the last prompt. ids: all that was said, a final stop token included."""
        self.messages.append({"role": "assistant", "content": text})
        self.endings.append(ending)
        self.tokens += len(ids)
        self.ids += ids
        self.loss_mask += [1] * len(ids)


def one_by_one(
    pair: Pair, rows: Iterable[tuple[int, Row]], wish: Wish, watch: Watch = lambda tokens: None
) -> Iterator[Dialogue]:
    """Answer row after row with the package's own loop, speculatively if the pair has a draft."""
    from .generate import stream_generate

    for number, row in rows:
        dialogue = Dialogue(number, row)
        while dialogue.open and (asked := dialogue.ask(pair, wish)) is not None:
            sampling = replace(wish.sampling, seed=wish.seed_of(number, len(dialogue.endings)))
            text, made, chunk = "", list[int](), None
            for chunk in stream_generate(pair, asked[0], max_tokens=asked[1], sampling=sampling):
                text += chunk.text
                made += chunk.ids
                watch(len(chunk.ids))
            assert chunk is not None and chunk.finish_reason is not None, "a stream ends with a finish reason"
            dialogue.answer(text, chunk.finish_reason, made)
        yield dialogue


def batched(
    pair: Pair, rows: Iterable[tuple[int, Row]], wish: Wish, size: int, watch: Watch = lambda tokens: None
) -> Iterator[Dialogue]:
    """Answer up to `size` rows at once, each from its own random numbers; dialogues come as they are finished."""
    generator: Any = pair.target.batch(sorted(pair.stop_ids), size)
    waiting = iter(rows)
    ready: deque[Dialogue] = deque()
    asked: dict[int, tuple[Dialogue, list[int]]] = {}  # by the request's number, the tokens of its answer
    try:
        while True:
            while len(asked) < size and (dialogue := _next(ready, waiting)) is not None:
                yield from _insert(generator, pair, dialogue, wish, asked)
            if not asked:
                return
            for said in generator.next_generated():
                dialogue, tokens = asked[said.uid]
                tokens.append(int(said.token))
                watch(1)
                if said.finish_reason is not None:
                    del asked[said.uid]
                    text = pair.tokenizer.decode(tokens[:-1] if said.finish_reason == "stop" else tokens)
                    dialogue.answer(text, said.finish_reason, tokens)
                    ready.append(dialogue)
    finally:
        generator.close()


def _next(ready: deque[Dialogue], waiting: Iterator[tuple[int, Row]]) -> Dialogue | None:
    """A dialogue that goes on, or else a new one."""
    if ready:
        return ready.popleft()
    number, row = next(waiting, (0, None))
    return None if row is None else Dialogue(number, row)


def _insert(
    generator: Any, pair: Pair, dialogue: Dialogue, wish: Wish, asked: dict[int, tuple[Dialogue, list[int]]]
) -> Iterator[Dialogue]:
    """Ask for the next answer; a dialogue that is finished comes back instead."""
    found = dialogue.ask(pair, wish) if dialogue.open else None
    if found is None:
        yield dialogue
        return
    sampler = make_sampler(wish.sampling, wish.seed_of(dialogue.number, len(dialogue.endings)))
    (uid,) = generator.insert([found[0]], max_tokens=[found[1]], samplers=[sampler])
    asked[uid] = (dialogue, [])


def make_sampler(sampling: Sampling, seed: int) -> Callable[[mx.array], mx.array] | None:
    """A sampler of one request for mlx-lm: log-probabilities [1, V] -> token [1], with random numbers of its own.

    None is greedy.
    """
    import mlx.core as mx

    from .sampling import make_shape

    if sampling.greedy:
        return None
    shape, key = make_shape(sampling), mx.random.key(seed)

    def draw(logprobs: mx.array) -> mx.array:
        nonlocal key
        key, now = mx.random.split(key)
        return mx.random.categorical(shape(logprobs), key=now)

    return draw
