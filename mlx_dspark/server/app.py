"""The HTTP application: routes around an engine."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from ..generate import Chunk
from ..serve.request import EngineBusy, EngineClosed, EngineError
from .answers import ChatForm, CompletionForm, Form, Reader, merged
from .asking import Asked, Model, chat_request, check_model, completion_request
from .delivery import MOST_EVENTS, Mailbox, SlowReader, disconnected
from .errors import Document, Refusal, invalid
from .metrics import CONTENT_TYPE, Metrics
from .schema import Body, ChatBody, CompletionBody, parse_json
from .security import Gate, Guard
from .stream import ALIVE, DONE, EventStream, event

if TYPE_CHECKING:
    from ..serve import Engine

PATHS = frozenset({"/", "/page.js", "/page.css", "/health", "/metrics", "/v1/models", "/v1/completions",
                   "/v1/chat/completions"})
PAGE = {"/": ("page.html", "text/html"), "/page.js": ("page.js", "text/javascript"),
        "/page.css": ("page.css", "text/css")}
ALIVE_SECONDS = 10.0
LEFT = 499  # as nginx logs a client that went before its answer

Asking = TypeVar("Asking", bound=Body)


class StrictRequest(Request):
    async def json(self) -> Any:
        return parse_json(await self.body())


class StrictRoute(APIRoute):
    """Routes whose bodies are read by the standard's JSON."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return strictly


def create_app(engine: Engine, model: Model, guard: Guard) -> FastAPI:
    """The application. The caller owns the engine and closes it."""
    app = FastAPI(title="mlx_dspark", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = Metrics(engine.metrics)
    app.router.route_class = StrictRoute
    app.add_middleware(Gate, guard=guard, count=lambda path, status: metrics.count(
        path if path in PATHS else "other", status))
    if guard.origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(guard.origins), allow_methods=["GET", "POST"],
                           allow_headers=["*"])
    _answer_errors(app)
    _describe(app, engine, model, metrics)
    desk = Desk(engine, model)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatBody) -> Response:
        return await desk.answer(request, body, chat_request, ChatForm(model.name))

    @app.post("/v1/completions")
    async def complete(request: Request, body: CompletionBody) -> Response:
        return await desk.answer(request, body, completion_request, CompletionForm(model.name))

    return app


class Desk:
    """Takes requests to the engine and brings its answers back."""

    def __init__(self, engine: Engine, model: Model):
        self._engine, self._model = engine, model
        # One thread: tokenizers keep state while they encode, and the event loop must not wait for them.
        self._worker = ThreadPoolExecutor(1, "mlx_dspark requests")

    async def answer(
        self, request: Request, body: Asking, ask: Callable[[Model, Asking], Asked], form: Form
    ) -> Response:
        """A stream or a document. Raises Refusal."""
        check_model(self._model, body)
        mailbox = Mailbox(MOST_EVENTS if body.stream else sys.maxsize)
        try:
            asked = await asyncio.get_running_loop().run_in_executor(self._worker, self._submit, ask, body, mailbox)
        except BaseException:
            mailbox.leave()
            raise
        reader = Reader(self._model.tokenizer, self._model.stop_ids, asked.splitter, bool(body.dspark),
                        asked.request.stop)
        if body.stream:
            with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            return EventStream(_lines(mailbox, reader, form, with_usage), mailbox)
        chunks = await _unless_left(request, mailbox)
        if chunks is None:
            return Response(status_code=LEFT)
        return Document(form.document(merged([reader.read(chunk) for chunk in chunks]), chunks[-1].stats))

    def _submit(self, ask: Callable[[Model, Asking], Asked], body: Asking, mailbox: Mailbox) -> Asked:
        """In the worker: encode, check, and queue."""
        asked = ask(self._model, body)
        try:
            mailbox.attach(self._engine.submit(asked.request, mailbox.deliver))
        except ValueError as error:
            raise Refusal(422, str(error)) from None
        except EngineError as error:
            raise _refusal(error) from None
        return asked


async def _lines(
    mailbox: Mailbox, reader: Reader, form: Form, with_usage: bool
) -> AsyncIterator[bytes]:
    """The events of a stream. An error ends it, as an event of its own: the status has been sent long ago."""
    empty = {"usage": None} if with_usage else {}
    for document in form.opening():
        yield event(document | empty)
    while True:
        got = await mailbox.take(ALIVE_SECONDS)
        if got is None:
            yield ALIVE
        elif isinstance(got, EngineError):
            yield event(_refusal(got).document())
            break
        else:
            for document in form.events(reader.read(got)):
                yield event(document | empty)
            if got.finish_reason is not None:
                if with_usage:
                    yield event(form.usage(got.stats))
                break
    yield DONE


async def _unless_left(request: Request, mailbox: Mailbox) -> list[Chunk] | None:
    """All chunks of an answer; None if the client left first, and then the engine stops working on it."""
    reading = asyncio.ensure_future(_all(mailbox))
    watching = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({reading, watching}, return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else None
    finally:
        mailbox.leave()
        for task in (reading, watching):
            task.cancel()
        await asyncio.gather(reading, watching, return_exceptions=True)


async def _all(mailbox: Mailbox) -> list[Chunk]:
    chunks: list[Chunk] = []
    while not chunks or chunks[-1].finish_reason is None:
        got = await mailbox.take()
        if isinstance(got, EngineError):
            raise _refusal(got)
        assert got is not None
        chunks.append(got)
    return chunks


def _refusal(error: EngineError) -> Refusal:
    """An engine's refusal or failure as an answer."""
    if isinstance(error, EngineBusy):
        return Refusal(429, str(error), code="queue_full", headers={"retry-after": "1"})
    if isinstance(error, EngineClosed):
        return Refusal(503, str(error), code="shutting_down")
    if isinstance(error, SlowReader):
        return Refusal(408, str(error), code="too_slow")
    return Refusal(500, str(error), code="engine_failed")


def _answer_errors(app: FastAPI) -> None:
    """Every error in OpenAI's shape; mistakes of ours are answered by the Gate."""

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> Response:
        return invalid(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = request.scope["path"][:100]  # request.url would be built from the client's Host, which may be malformed
        texts = {404: f"there is no {path} here", 405: f"{request.method} is not for {path}"}
        return Refusal(error.status_code, texts.get(error.status_code, str(error.detail)),
                       headers=dict(error.headers or {})).response()


def _describe(app: FastAPI, engine: Engine, model: Model, metrics: Metrics) -> None:
    """The routes that only tell: models, health, metrics, the page."""
    card = {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "mlx_dspark",
            "dspark": {"chat": model.chats, "context": model.context, "gamma": model.gamma}}

    @app.get("/v1/models")
    async def models() -> Response:
        return Document({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        check_model(model, Body(model=name))
        return Document(card)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        return Document({"status": "ok"})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    folder = Path(__file__).parent
    for path, (file, kind) in PAGE.items():
        _serve_file(app, path, (folder / file).read_bytes(), kind)


def _serve_file(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    async def show() -> Response:
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    app.add_api_route(path, show, methods=["GET"])
