"""A server without the real engine: scripted or one request after another, with the real interface."""

from __future__ import annotations

import contextlib
import copy
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from helpers import embedded_pair
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_dspark.generate import Chunk, stream_generate
from mlx_dspark.serve.request import EngineBusy, EngineClosed, EngineError, Request, Stream
from mlx_dspark.server.app import create_app
from mlx_dspark.server.asking import Defaults, Model, model_of
from mlx_dspark.server.run import bind, server_for
from mlx_dspark.server.security import Guard
from mlx_dspark.stats import Statistics
from mlx_dspark.structs import Round, Schedule

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}{{ call.function.arguments.city }}{% endfor %}"
    "{% endif %}{% endfor %}"
    "{% if messages[-1].role == 'assistant' %}{{ raise_exception('the last turn must be the user\\'s') }}{% endif %}"
    "<assistant>{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
)


@cache
def chat_tokenizer(tools: bool = True, thinking: bool = True) -> TokenizerWrapper:
    """The small pair's tokenizer with a template, tool calls and thoughts."""
    from mlx_lm.tool_parsers import json_tools

    bare = copy.deepcopy(embedded_pair().tokenizer._tokenizer)
    bare.chat_template = TEMPLATE
    if thinking:
        bare.add_tokens(["<think>", "</think>"])
    marks = {"tool_parser": json_tools.parse_tool_call, "tool_call_start": json_tools.tool_call_start,
             "tool_call_end": json_tools.tool_call_end} if tools else {}
    return TokenizerWrapper(bare, type(embedded_pair().tokenizer._detokenizer), **marks)


def chat_model(**facts: Any) -> Model:
    return Model(**{"name": "small", "tokenizer": chat_tokenizer(), "stop_ids": embedded_pair().stop_ids,
                    "context": 400, "vocab_size": embedded_pair().target.vocab_size, **facts})


@cache
def plain_model() -> Model:
    """The small pair without its template."""
    bare = copy.deepcopy(embedded_pair().tokenizer._tokenizer)
    bare.chat_template = None
    tokenizer = TokenizerWrapper(bare, type(embedded_pair().tokenizer._detokenizer))
    return model_of(replace(embedded_pair(), tokenizer=tokenizer), "small", Defaults())


Answers = Callable[[Request], Iterator[Chunk]]


class StandIn:
    """One request after another in a thread of its own. answers: what a request is answered with."""

    def __init__(self, answers: Answers, max_waiting: int = 100):
        self.answers, self.max_waiting = answers, max_waiting
        self.seen: list[Request] = []
        self.cancelled: set[int] = set()
        self.finished: dict[str, int] = {}
        self._jobs: queue.Queue[tuple[Stream, Request] | None] = queue.Queue()
        self._closing: float | None = None
        self._active = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Callable[[Any], None] | None = None) -> Stream:
        if self._closing is not None:
            raise EngineClosed("the server is shutting down")
        if self._jobs.qsize() >= self.max_waiting:
            raise EngineBusy(f"{self._jobs.qsize()} requests are waiting already: try again later")
        self.seen.append(request)
        stream = Stream(len(self.seen), self.cancelled.add, deliver)
        self._jobs.put((stream, request))
        return stream

    def metrics(self) -> Any:
        return SimpleNamespace(
            active=self._active, waiting=self._jobs.qsize(), requests=len(self.seen), finished=dict(self.finished),
            rounds=4, tokens=10, rows=12, drafts=8, accepted=6, parked=0, tokens_per_second=1.5, kv_bytes=0,
            kv_limit_bytes=0, prefix_entries=0, prefix_hits=0, reused_tokens=0, tau=2.5, rows_per_request=3.0,
            parked_share=0.0)

    def close(self, drain_seconds: float | None = None) -> None:
        limit = float("inf") if drain_seconds is None else time.monotonic() + drain_seconds
        self._closing = limit if self._closing is None else min(self._closing, limit)
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            stream, request = job
            self._active = 1
            for event in self._events(stream, request):
                stream.deliver(event)
            reason = event.finish_reason if isinstance(event, Chunk) else "error"
            self.finished[reason] = self.finished.get(reason, 0) + 1
            self._active = 0

    def _events(self, stream: Stream, request: Request) -> Iterator[Chunk | EngineError]:
        last = None
        try:
            for chunk in self.answers(request):
                last = chunk
                if stream.id in self.cancelled:
                    break
                if self._closing is not None and time.monotonic() >= self._closing:
                    yield EngineClosed("the server is shutting down")
                    return
                yield chunk
                if chunk.finish_reason is not None:
                    return
        except EngineError as error:
            yield error
            return
        yield Chunk("", (), None, "cancelled", None, last.stats if last else Statistics(len(request.prompt)))


def generated(request: Request) -> Iterator[Chunk]:
    """What the small pair really writes."""
    return stream_generate(embedded_pair(), list(request.prompt), max_tokens=request.max_tokens,
                           sampling=request.sampling, stop=request.stop, logprobs=request.logprobs,
                           top_logprobs=request.top_logprobs)


@cache
def _ids_of(text: str) -> tuple[int, ...]:
    return tuple(chat_tokenizer().encode(text, add_special_tokens=False))


def saying(*texts: str, finish: str = "stop", pause: float = 0, cached: int = 0) -> Answers:
    """Says these texts, a round each; the first token of a round is the draft's, if there are two."""

    def answers(request: Request) -> Iterator[Chunk]:
        stats = Statistics(len(request.prompt), {"cached_tokens": cached})
        for index, text in enumerate(texts):
            ids = _ids_of(text)
            landed = Round(index, 0, len(ids) + 1 if index else 0, len(ids), ids, len(ids) - 1, ids,
                           Schedule(len(ids), "fixed", "said"), {})
            stats.add(landed)
            if index:
                time.sleep(pause)
            yield Chunk(text, ids, (-0.5,) * len(ids) if request.logprobs else None, None, landed, stats)
        yield Chunk("", (), () if request.logprobs else None, finish, None, stats)

    return answers


def failing(request: Request) -> Iterator[Chunk]:
    """One round, then the engine fails."""
    yield next(saying("so far")(request))
    raise EngineError("the engine failed: out of memory")


@contextlib.contextmanager
def serving(engine: Any, model: Model, guard: Guard | None = None, drain: float = 5.0) -> Iterator[str]:
    """A live server on a free port; its address. Stopped as by a signal."""
    guard = guard or Guard()
    bound = bind("127.0.0.1", 0)
    server = server_for(create_app(engine, model, guard), engine, drain)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        bound.close()
        assert not thread.is_alive(), "the server did not end"


def raw_request(address: str, head: str, body: bytes = b"") -> socket.socket:
    """A connection on which this was sent as it is."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
    return connection


def wait_until(true: Callable[[], bool], seconds: float = 10) -> bool:
    """Whether something becomes true in time."""
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def texts_of(events: Sequence[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if event.get("choices"))
