"""Server-sent events that stop the engine's work when nobody reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Response

from .delivery import Mailbox, disconnected
from .errors import FAILED

STALLED_SECONDS = 60.0  # a client that takes no byte for so long is cut off
DONE = b"data: [DONE]\n\n"
ALIVE = b": waiting\n\n"  # a comment: keeps proxies from closing a connection whose request is in the queue


def event(document: dict[str, Any]) -> bytes:
    """One event. ASCII, so that no client's idea of a line end can cut it."""
    return b"data: " + json.dumps(document, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Sends what `lines` yields; leaves the mailbox as soon as the client does, or takes nothing."""

    media_type = "text/event-stream"

    def __init__(self, lines: AsyncIterator[bytes], mailbox: Mailbox):
        self._lines, self._mailbox = lines, mailbox
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sender = asyncio.ensure_future(self._send(send))
        watcher = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            self._mailbox.leave()
            for task in (sender, watcher):
                task.cancel()
            await asyncio.gather(sender, watcher, return_exceptions=True)

    async def _send(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for line in self._lines:
                async with asyncio.timeout(STALLED_SECONDS):
                    await send({"type": "http.response.body", "body": line, "more_body": True})
        except TimeoutError:
            return
        except Exception:  # a mistake of ours: the client is told as far as it can be, the log gets the traceback
            await send({"type": "http.response.body", "body": event(FAILED) + DONE, "more_body": False})
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})
