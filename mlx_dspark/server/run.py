"""Running the application until a signal, and ending well."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    from ..serve import Engine

LAST_WORDS_SECONDS = 5  # for errors to reach the clients whose requests were not finished


class DrainingServer(uvicorn.Server):
    """After a signal: accepts nothing, lets the engine finish for `drain` seconds, and only then ends.

    A second interrupt ends it at once.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, drain: float):
        super().__init__(config)
        self._engine, self._drain = engine, drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.get_running_loop().run_in_executor(None, self._engine.close, self._drain)
        await super().shutdown(sockets)
        await asyncio.to_thread(self._engine.close, 0.0)
        await closing


def bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet. Raises ValueError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends at once (TCP_NODELAY) only on sockets that name their protocol. On others the second part of an
    # answer waits until the client acknowledges the first: 40 ms on Linux.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host.strip("[]"), port))
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"cannot listen at {host}, port {port} ({reason}): give another --host or --port") from None
    return bound


def server_for(app: Any, engine: Engine, drain: float) -> DrainingServer:
    """A server that trusts no proxy's word and says nothing about itself."""
    config = uvicorn.Config(app, log_config=None, log_level="warning", access_log=False, server_header=False,
                            proxy_headers=False, lifespan="off", ws="none",
                            timeout_graceful_shutdown=math.ceil(drain) + LAST_WORDS_SECONDS)
    return DrainingServer(config, engine, drain)


def run(app: Any, engine: Engine, bound: socket.socket, drain: float) -> None:
    """Serve until SIGINT or SIGTERM; returns when every stream has been finished or told."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)  # uvicorn raises it again when it has ended
    try:
        server_for(app, engine, drain).run(sockets=[bound])
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
        bound.close()
