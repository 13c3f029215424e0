"""Who may ask: checked before a byte of a body is read, and the body's size while it is.

A browser lets any page send requests to a server on this machine. Three checks keep such a page out: the Host
must be one of ours (else a foreign name was pointed at this address), an Origin must be ours or allowed, and a
POST must say that it is JSON, which a page of another origin cannot without being asked for permission first.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request

from .errors import FAILED, Document, Refusal

OPEN_PATHS = frozenset({"/", "/page.js", "/page.css", "/health"})  # nothing of a client's or the model's is in them
BODY_SECONDS = 60.0
PAGE_POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
               "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
SAFE_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"),
                (b"content-security-policy", PAGE_POLICY.encode())]


def is_loopback(host: str) -> bool:
    """True if only programs on this machine reach a server at this address."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def address_of(host: str, port: int | None = None) -> str:
    """The address as a browser wants it."""
    bare = host.strip("[]")
    return "http://" + (f"[{bare}]" if ":" in bare else bare) + ("" if port is None else f":{port}")


@dataclass(frozen=True)
class Guard:
    """The rules of one server.

    host: the address it listens at. key: None asks for none. origins: pages of other origins that may use it,
    as in https://example.com. body_bytes: the longest body.

    Raises ValueError for a host that others reach without a key, and for what is no origin.
    """

    host: str = "127.0.0.1"
    key: str | None = None
    origins: tuple[str, ...] = ()
    body_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        if self.key is not None and not (self.key.isascii() and self.key.isprintable() and self.key.strip()):
            raise ValueError("the API key is empty or has characters that no HTTP header can carry: choose another one")
        if self.key is not None and self.key != self.key.strip():
            raise ValueError("the API key begins or ends with a space, which no HTTP header keeps: leave the space out")
        if self.key is None and not is_loopback(self.host):
            raise ValueError(f"--host {self.host} can be reached from other machines: give an --api-key "
                             "(or MLX_DSPARK_API_KEY), or listen at 127.0.0.1")
        for origin in self.origins:
            if not _netloc(origin) or origin not in (f"http://{_netloc(origin)}", f"https://{_netloc(origin)}"):
                raise ValueError(f"--allow-origin {origin} is not an origin: give it as in https://example.com")

    def refusal(self, request: Request) -> Refusal | None:
        """Why a request is not answered, None if it may pass. Reads headers only."""
        host = request.headers.get("host", "")
        if is_loopback(self.host) and not (is_loopback(_name(host)) or _name(host) in self._origin_names()):
            return Refusal(403, f"the Host header names {host[:100]!r}, which is not this server: use "
                                f"{address_of(self.host)}, or --allow-origin", code="host_not_allowed")
        origin = request.headers.get("origin")
        if origin is not None and origin not in self.origins and not _same(_netloc(origin), host):
            return Refusal(403, f"pages of {origin[:100]!r} may not use this server: start it with --allow-origin",
                           code="origin_not_allowed")
        if self.key is not None and request.scope["path"] not in OPEN_PATHS and not self._knows(request):
            return Refusal(401, "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                           code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        if request.method == "POST":
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                return Refusal(415, f"the content type is {kind[:100]!r}: send application/json", code="content_type")
            length = request.headers.get("content-length", "")
            if length.isdecimal() and int(length[:20]) > self.body_bytes:
                return self.too_long()
        return None

    def too_long(self) -> Refusal:
        return Refusal(413, f"the body is longer than {self.body_bytes} bytes: send less, or raise --max-body-mb",
                       code="body_too_long", headers={"connection": "close"})

    def _knows(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        assert self.key is not None
        right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self.key.encode())
        return right and scheme.lower() == "bearer"

    def _origin_names(self) -> set[str]:
        return {_name(_netloc(origin)) for origin in self.origins}


def _netloc(origin: str) -> str:
    """Host and port of an origin; empty where it has none or is malformed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:  # half a bracket, say
        return ""


def _same(netloc: str, host: str) -> bool:
    return netloc != "" and netloc.lower() == host.lower()


def _name(netloc: str) -> str:
    """The host without its port."""
    name = netloc.rpartition(":")[0] if netloc.rpartition(":")[2].isdigit() and not netloc.endswith("]") else netloc
    return name.lower()


class Gate:
    """The middleware around the routes: applies the guard, reads bodies, adds headers to each answer, counts it.

    What goes wrong behind it is answered here, so that these answers have the headers and are counted, too; the error
    goes on to the log.
    """

    def __init__(self, app: Any, guard: Guard, count: Callable[[str, int], None]):
        self._app, self._guard, self._count = app, guard, count

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        begun = False

        async def send_safely(message: Any) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._count(scope["path"], message["status"])
                message = {**message, "headers": [*message.get("headers", []), *SAFE_HEADERS]}
            await send(message)

        try:
            await self._answer(scope, receive, send_safely)
        except Exception:
            if not begun:
                await Document(FAILED, 500)(scope, receive, send_safely)
            raise

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        refusal = self._guard.refusal(Request(scope))
        if refusal is None and scope["method"] == "POST":
            try:
                receive = await self._with_body(receive)
            except Refusal as error:
                refusal = error
        await (self._app if refusal is None else refusal.response())(scope, receive, send)

    async def _with_body(self, receive: Any) -> Any:
        """Read the body as far as it is allowed; a `receive` that hands it over in one piece."""
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(400, "the client left before its request was complete")
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self._guard.body_bytes:
                        raise self._guard.too_long()
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive in {BODY_SECONDS:.0f} seconds: send it again",
                          headers={"connection": "close"}) from None
        whole = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Any:
            return whole.pop() if whole else await receive()

        return replay
