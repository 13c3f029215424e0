"""What a client asks of the engine and what it is told."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..generate import Chunk
from ..structs import Sampling


@dataclass(frozen=True)
class Request:
    """One text to write.

    prompt: token ids, at least one. max_tokens: as in `generate`: None is 256, -1 the rest of the context, or what the
    memory for caches holds where the target's config names no context (finish "length" either way).
    stop: strings that end the text. logprobs: of every token; top_logprobs: with them, of so many of the most likely
    tokens in each place.

    A sampled request with a seed decides its verify widths from its own past alone, so that its text is that
    of `generate` with the same seed, whoever else is served; all other requests share one row budget.
    """

    prompt: tuple[int, ...]
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0


class EngineError(Exception):
    """A request ended without finishing; the message is one line."""


class EngineBusy(EngineError):
    """The queue is full: try again later."""


class EngineClosed(EngineError):
    """The engine is shutting down."""


Event = Chunk | EngineError
Deliver = Callable[[Event], None]


class Stream:
    """A submitted request: an iterator of chunks where no other receiver was named at `submit`.

    The last chunk has a finish_reason: stop, length or cancelled. Iterating raises EngineError if the request
    ended otherwise.
    """

    def __init__(self, number: int, cancel: Callable[[int], None], deliver: Deliver | None):
        self.id = number
        self._cancel = cancel
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.deliver: Deliver = deliver or self._events.put

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            event = self._events.get()
            if isinstance(event, EngineError):
                raise event
            yield event
            if event.finish_reason is not None:
                return

    def cancel(self) -> None:
        """Leave: the request is evicted before the next round, and only it."""
        self._cancel(self.id)
