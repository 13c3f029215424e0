"""From the engine's thread to one client's coroutine, and never the other way round: the engine does not wait."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from typing import Any

from ..serve.request import EngineError, Event, Stream

MOST_EVENTS = 512  # chunks that a client may be behind


class SlowReader(EngineError):
    """The client read too slowly, so its request was given up."""


class Mailbox:
    """Holds the events of one stream until its reader takes them.

    A reader that is `limit` events behind loses the stream: the request is cancelled and the next event it gets
    is SlowReader. Only `deliver` may be called from another thread.
    """

    def __init__(self, limit: int = MOST_EVENTS):
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._events: deque[Event] = deque()
        self._lock = threading.Lock()
        self._ready = asyncio.Event()
        self._stream: Stream | None = None
        self._over = self._left = False

    def attach(self, stream: Stream) -> None:
        """The submitted request, which is what `leave` cancels."""
        self._stream = stream
        if self._left or self._over:
            stream.cancel()

    def deliver(self, event: Event) -> None:
        """Called from the engine's thread."""
        with self._lock:
            if self._over:
                return
            self._over = len(self._events) >= self._limit
            if self._over:
                self._events.clear()
                event = SlowReader("the answer was read too slowly and is given up: read faster, or without stream")
            self._events.append(event)
        with contextlib.suppress(RuntimeError):  # the loop has ended and with it the client
            self._loop.call_soon_threadsafe(self.leave if self._over else self._ready.set)

    def leave(self) -> None:
        """The client wants no more: the engine evicts the request before its next round."""
        self._left = True
        self._ready.set()
        if self._stream is not None:
            self._stream.cancel()

    async def take(self, seconds: float | None = None) -> Event | None:
        """The next event; None after so many seconds without one."""
        while True:
            with self._lock:
                if self._events:
                    return self._events.popleft()
                self._ready.clear()
            try:
                await asyncio.wait_for(self._ready.wait(), seconds)
            except TimeoutError:
                return None


async def disconnected(receive: Any) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
