"""The server over real HTTP: what OpenAI's client sees, who is let in, and how streams end."""

import asyncio
import json
import re
import socket
import subprocess
import threading
import time

import httpx2
import openai
import pytest
from helpers import embedded_pair
from pydantic import ValidationError
from stand_in import (
    StandIn,
    chat_model,
    chat_tokenizer,
    failing,
    generated,
    plain_model,
    raw_request,
    saying,
    serving,
    texts_of,
    wait_until,
)

from mlx_dspark.generate import generate
from mlx_dspark.serve.request import EngineError
from mlx_dspark.server import delivery, stream
from mlx_dspark.server.asking import chat_request, check_model, completion_request
from mlx_dspark.server.errors import Refusal, invalid
from mlx_dspark.server.run import bind
from mlx_dspark.server.schema import ChatBody, CompletionBody, parse_json
from mlx_dspark.server.security import Guard, address_of, is_loopback

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
ASK = {"prompt": "import os", "max_tokens": 8}
USER = [{"role": "user", "content": "hello"}]
FOREVER = saying(*["more "] * 10_000, pause=0.005)


@pytest.fixture(scope="module")
def small():
    """The small pair behind a live server."""
    with serving(StandIn(generated), plain_model()) as address:
        yield address


@pytest.fixture(scope="module")
def talker():
    """A server whose model thinks, calls a tool and says a word."""
    with serving(StandIn(saying("hm</think>", "well, ", CALL, cached=3)), chat_model()) as address:
        yield address


def client(address, key="none"):
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60)


def post(address, body=None, path="/v1/completions", **options):
    return httpx2.post(address + path, json=ASK if body is None else body, timeout=60, **options)


def events_of(response):
    """The documents of a stream that ended as it should."""
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(response):
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    return error


# OpenAI's client


def test_a_completion_is_what_generate_writes(small):
    answer = client(small).completions.create(model="small", prompt="import os", max_tokens=20, temperature=0)
    alone = generate(embedded_pair(), "import os", max_tokens=20)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (alone.text, "length")
    assert answer.usage.completion_tokens == 20 and answer.usage.total_tokens == answer.usage.prompt_tokens + 20


def test_a_streamed_completion(small):
    parts = list(client(small).completions.create(model="small", prompt="import os", max_tokens=20, stream=True,
                                                  logprobs=0, stream_options={"include_usage": True}))
    alone = generate(embedded_pair(), "import os", max_tokens=20, logprobs=True)
    assert "".join(part.choices[0].text for part in parts[:-1]) == alone.text
    assert parts[-1].choices == [] and parts[-1].usage.completion_tokens == 20
    assert all(part.usage is None for part in parts[:-1])
    kept = [part.choices[0].logprobs for part in parts[:-1] if part.choices[0].logprobs]
    said = [value for logprobs in kept for value in logprobs.token_logprobs]
    assert said == pytest.approx(alone.logprobs, abs=1e-5)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "seed": 3, "frequency_penalty": 0.5}],
                         ids=["greedy", "sampled"])
def test_a_completion_with_the_most_likely_tokens(small, sampling):
    ask = {"model": "small", "prompt": "import os", "max_tokens": 20, "logprobs": 3, **sampling}
    answer = client(small).completions.create(**ask).choices[0]
    alone = generate(embedded_pair(), "import os", max_tokens=20, logprobs=True, top_logprobs=3, **sampling)
    kept, decode = answer.logprobs, embedded_pair().tokenizer.decode
    assert answer.text == alone.text and kept.token_logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    places = zip(alone.ids, alone.logprobs, alone.top_logprobs, kept.top_logprobs, strict=True)
    for token, chosen, best, found in places:
        wanted = {decode([other]): value for other, value in [(token, chosen), *best[::-1]]}
        assert found == pytest.approx(wanted, abs=1e-5)
        assert max(found, key=found.get) == decode([best[0][0]])
    assert {len(found) for found in kept.top_logprobs} == ({3, 4} if sampling else {3})
    streamed = [part.choices[0].logprobs for part in client(small).completions.create(**ask, stream=True)]
    assert [best for part in streamed if part for best in part.top_logprobs] == kept.top_logprobs


def test_a_chat_with_the_most_likely_tokens():
    ask = {"model": "small", "messages": USER, "max_tokens": 20, "logprobs": True, "top_logprobs": 4}
    with serving(StandIn(generated), chat_model(tokenizer=chat_tokenizer(thinking=False))) as address:
        answer = client(address).chat.completions.create(**ask).choices[0]
        parts = list(client(address).chat.completions.create(**ask, stream=True))
        refused = post(address, {"messages": USER, "top_logprobs": 4}, "/v1/chat/completions")
    tokens = answer.logprobs.content
    assert len(tokens) == 20 and all(len(token.top_logprobs) == 4 for token in tokens)
    for token in tokens:
        assert (token.top_logprobs[0].token, token.top_logprobs[0].logprob) == (token.token, token.logprob)  # greedy
        values = [one.logprob for one in token.top_logprobs]
        assert values == sorted(values, reverse=True)
    streamed = [part.choices[0].logprobs for part in parts]
    assert [token for part in streamed if part for token in part.content] == tokens
    assert refused.status_code == 422 and error_of(refused)["param"] == "top_logprobs"


def test_a_seed_a_stop_and_ids(small):
    ids = embedded_pair().tokenizer.encode("import os")
    ask = {"model": "small", "prompt": list(ids), "max_tokens": 20, "temperature": 1, "seed": 5}
    once, again = [client(small).completions.create(**ask) for _ in range(2)]
    assert once.choices[0].text == again.choices[0].text
    answer = client(small).completions.create(model="small", prompt="import os", max_tokens=40, stop=["("])
    assert answer.choices[0].finish_reason == "stop" and "(" not in answer.choices[0].text


def test_a_chat_with_thoughts_and_a_call(talker):
    answer = client(talker).chat.completions.create(model="small", messages=USER, tools=[TOOL], logprobs=True)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("well, ", "hm")
    called = message.tool_calls[0].function
    assert (called.name, called.arguments) == ("weather", '{"city": "Oslo"}')
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens).startswith("hm</think>well") and tokens[0].logprob == -0.5


def test_a_streamed_chat(talker):
    parts = [part.choices[0] for part in client(talker).chat.completions.create(
        model="small", messages=USER, tools=[TOOL], stream=True)]
    assert parts[0].delta.role == "assistant" and parts[-1].finish_reason == "tool_calls"
    assert "".join(part.delta.content or "" for part in parts) == "well, "
    calls = [call for part in parts for call in part.delta.tool_calls or ()]
    assert len(calls) == 1 and calls[0].index == 0 and calls[0].function.name == "weather"


def test_without_tools_a_call_is_text(talker):
    answer = client(talker).chat.completions.create(model="small", messages=USER)
    assert answer.choices[0].message.content == f"well, {CALL}" and answer.choices[0].finish_reason == "stop"


def test_models(small):
    assert [model.id for model in client(small).models.list()] == ["small"]
    assert client(small).models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here: use 'small'"):
        client(small).models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        client(small).completions.create(model="other", prompt="x")


def test_openai_reads_the_errors(small):
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        client(small).completions.create(model="small", prompt="x", extra_body={"top_k": "many"})
    assert caught.value.param == "top_k"
    with pytest.raises(openai.BadRequestError) as caught:
        client(small).completions.create(model="small", prompt="x", max_tokens=10**6)
    assert caught.value.code == "context_length_exceeded"


def test_curl(small):
    done = subprocess.run(["curl", "-sS", "-N", f"{small}/v1/completions", "-H", "Content-Type: application/json", "-d",
                           json.dumps({**ASK, "stream": True})], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("data: [DONE]\n\n"), done.stderr


# What is refused


@pytest.mark.parametrize("body, status, param", [
    (b"{", 422, None), (b"[]", 422, None), (b"", 422, None), (b"null", 422, None), (b'"text"', 422, None),
    (b'{"prompt": "x", "temperature": NaN}', 422, None), (b'{"prompt": "x", "temperature": 1e999}', 422, None),
    (b'{"prompt": "\\ud800"}', 422, None), (b"\xff\xfe", 422, None), (b"[" * 200_000, 422, None),
    (b'{"prompt": ' + b"9" * 5000 + b"}", 422, None), (b'{"prompt": "x", "max_tokens": 1e3}', 422, "max_tokens"),
    (b'{"prompt": "x", "model": "other"}', 404, "model"),
    (b'{"prompt": "x", "max_tokens": 9999999}', 400, "max_tokens"),
    (b'{"prompt": "x", "stop": {"a": 1}}', 422, "stop"), (b"{}", 422, "prompt"),
    ('{"prompt": "\ud800"}'.encode("utf-16-le", "surrogatepass"), 422, None),
])
def test_a_bad_body_is_no_server_error(small, body, status, param):
    response = httpx2.post(f"{small}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert (response.status_code, error_of(response)["param"]) == (status, param)


ODD = (None, True, -1, 2**70, 1e308, 5e-324, "", "\u2028\x00", [[]], [1, "x"], {"a": {"b": []}}, [{"role": "user"}])


def refusal_of(ask, body, document):
    """What a document is refused with before the engine sees it; None if it is served."""
    model = chat_model()
    try:
        asked = body.model_validate(parse_json(json.dumps(document).encode()))
        check_model(model, asked)
        ask(model, asked)
    except ValidationError as error:
        return invalid([{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()])
    except Refusal as refusal:
        return refusal
    return None


@pytest.mark.parametrize("path, ask, body, good", [
    ("/v1/completions", completion_request, CompletionBody, {"prompt": "x"}),
    ("/v1/chat/completions", chat_request, ChatBody, {"messages": USER}),
])
def test_no_value_of_any_field_is_a_server_error(talker, path, ask, body, good):
    """All are tried on what reads a body; over HTTP go those that are served, and one of each field that is not."""
    with httpx2.Client(base_url=talker, timeout=60) as http:
        for name in body.model_fields:
            refusals = [refusal_of(ask, body, {**good, name: value}) for value in ODD]
            for refusal in filter(None, refusals):
                error = json.loads(refusal.response().body)["error"]
                assert refusal.status in (400, 404, 422), (name, error)
                assert refusal.status != 422 or (error["param"] == name and name in error["message"])
            refused = next((at for at, refusal in enumerate(refusals) if refusal), None)
            for at, (value, refusal) in enumerate(zip(ODD, refusals)):
                if refusal is None or at == refused:
                    response = http.post(path, json={**good, name: value})
                    assert response.status_code == (refusal.status if refusal else 200), (name, value, response.text)
                    assert response.status_code != 422 or error_of(response)["param"] == name


def test_a_long_prompt_is_refused_with_the_numbers(small):
    response = post(small, {"prompt": "import os\n" * 5000})
    assert response.status_code == 400
    assert re.search(r"the prompt has \d+ tokens and the context is \d+: shorten", error_of(response)["message"])


def test_unknown_paths_and_methods(small):
    for response, status in [(httpx2.get(f"{small}/nothing"), 404), (httpx2.get(f"{small}/v1/completions"), 405),
                             (httpx2.get(f"{small}/docs"), 404), (httpx2.get(f"{small}/openapi.json"), 404)]:
        assert response.status_code == status
        error_of(response)


def test_chat_needs_a_template(small):
    response = post(small, {"messages": USER}, "/v1/chat/completions")
    assert (response.status_code, error_of(response)["code"]) == (422, "no_chat_template")


def test_a_full_queue_says_when_to_come_back():
    engine = StandIn(FOREVER, max_waiting=1)
    with serving(engine, plain_model(), drain=0) as address:
        opened = [raw_stream(address)]
        assert wait_until(lambda: len(engine.seen) == 1 and engine.metrics().waiting == 0)
        opened.append(raw_stream(address))
        assert wait_until(lambda: engine.metrics().waiting == 1)
        response = post(address)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert error_of(response)["code"] == "queue_full"
        for connection in opened:
            connection.close()


# Who is let in


@pytest.mark.parametrize("host, loopback", [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("[::1]", True),
                                            ("localhost", True), ("LOCALHOST", True), ("0.0.0.0", False), ("::", False),
                                            ("192.168.0.5", False), ("example.com", False), ("localhost.evil", False)])
def test_loopback(host, loopback):
    assert is_loopback(host) == loopback
    if loopback:
        Guard(host)
    else:
        with pytest.raises(ValueError, match="give an --api-key"):
            Guard(host)
    Guard(host, key="k")


@pytest.mark.parametrize("fields", [{"key": ""}, {"key": "a\nb"}, {"key": "clé"}, {"origins": ("example.com",)},
                                    {"origins": ("*",)}, {"origins": ("https://a/",)}, {"origins": ("null",)},
                                    {"origins": ("http://[",)}, {"origins": ("http://",)}])
def test_a_guard_that_cannot_work_is_refused(fields):
    with pytest.raises(ValueError):
        Guard(**fields)


@pytest.mark.parametrize("key", [" k", "k ", "\tk"])
def test_a_key_that_no_header_keeps_is_refused(key):
    with pytest.raises(ValueError, match="the API key"):
        Guard(key=key)
    Guard(key="two words")


@pytest.mark.parametrize("host, port, address", [
    ("127.0.0.1", 80, "http://127.0.0.1:80"), ("::1", 80, "http://[::1]:80"), ("[::1]", 80, "http://[::1]:80"),
    ("::1", None, "http://[::1]"), ("localhost", 5, "http://localhost:5"),
])
def test_the_address_that_is_printed(host, port, address):
    assert address_of(host, port) == address


@pytest.fixture(scope="module")
def guarded():
    """A server with a key, a friend and a short patience for bodies."""
    engine = StandIn(saying("hello"))
    guard = Guard(key="right key", origins=("https://friend.example",), body_bytes=1000)
    with serving(engine, plain_model(), guard) as address:
        yield address, engine


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/models/small", "/nothing"])
def test_a_key_is_asked_for(guarded, path):
    address, _ = guarded
    for given in (None, "Bearer wrong", "Bearer right", "Basic right key", "right key", "Bearer right key2",
                  "Bearer é"):
        headers = {} if given is None else {"authorization": given.encode()}
        response = httpx2.get(address + path, headers=headers)
        assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    good = httpx2.get(address + path, headers={"authorization": "bearer right key"})
    assert good.status_code == (404 if path == "/nothing" else 200)


def test_the_page_and_health_are_open(guarded):
    address, _ = guarded
    for path in ("/", "/page.js", "/page.css", "/health"):
        assert httpx2.get(address + path).status_code == 200
    assert httpx2.head(f"{address}/health").status_code == 200
    answer = client(address, "right key").completions.create(model="small", prompt="x", max_tokens=3)
    assert answer.choices[0].text == "hello"


def guarded_post(guarded, headers, body=None):
    """(answer, whether the engine was asked)."""
    address, engine = guarded
    before = len(engine.seen)
    response = httpx2.post(f"{address}/v1/completions", content=json.dumps(ASK) if body is None else body,
                           headers={"authorization": "Bearer right key", "content-type": "application/json", **headers})
    return response, len(engine.seen) > before


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a",
                                  "", "application/json-patch+json", "text/json"])
def test_a_post_must_say_that_it_is_json(guarded, kind):
    response, asked = guarded_post(guarded, {"content-type": kind})
    assert (response.status_code, asked) == (415, False)
    assert guarded_post(guarded, {"content-type": "Application/JSON; charset=utf-8"})[1]


@pytest.mark.parametrize("origin, status", [("https://evil.example", 403), ("null", 403),
                                            ("https://friend.example.evil", 403), ("http://friend.example", 403),
                                            ("http://[", 403), ("http://]", 403), ("", 403),
                                            ("https://friend.example", 200)])
def test_pages_of_other_origins(guarded, origin, status):
    response, asked = guarded_post(guarded, {"origin": origin})
    assert (response.status_code, asked) == (status, status == 200)
    allowed = response.headers.get("access-control-allow-origin")
    assert allowed == (origin if status == 200 else None)


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing"])
def test_a_malformed_origin_or_host_is_no_server_error(guarded, path):
    address, _ = guarded
    response = httpx2.get(address + path, headers={"origin": "http://["})
    assert (response.status_code, error_of(response)["code"]) == (403, "origin_not_allowed")
    with serving(StandIn(saying("a")), plain_model(), Guard("0.0.0.0", key="k")) as other:  # any Host may pass there
        response = httpx2.get(other + path, headers={"host": "[", "authorization": "Bearer k"})
        assert response.status_code == (404 if path == "/nothing" else 200)


def test_the_page_of_the_server_itself(guarded):
    address, _ = guarded
    assert guarded_post(guarded, {"origin": address})[1]


def test_a_browser_may_ask_first(guarded):
    address, _ = guarded
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    friend = httpx2.options(f"{address}/v1/completions", headers={"origin": "https://friend.example", **ask})
    assert friend.status_code == 200 and friend.headers["access-control-allow-origin"] == "https://friend.example"
    other = httpx2.options(f"{address}/v1/completions", headers={"origin": "https://evil.example", **ask})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("host, status", [("evil.example", 403), ("evil.example:80", 403), ("", 403),
                                          ("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:8080", 200),
                                          ("friend.example", 200)])
def test_a_foreign_name_for_this_address(guarded, host, status):
    assert guarded_post(guarded, {"host": host})[0].status_code == status


def test_a_long_body_is_refused_while_it_is_read(guarded):
    assert guarded_post(guarded, {}, b" " * 1001)[0].status_code == 413
    assert guarded_post(guarded, {}, json.dumps({**ASK, "user": "x" * 900}))[1]

    def endless():
        for _ in range(100_000):
            yield b" " * 1000

    try:
        response, asked = guarded_post(guarded, {}, endless())
        assert (response.status_code, asked) == (413, False)
    except httpx2.TransportError:  # the server closed while the client was still writing
        pass
    assert guarded_post(guarded, {})[1]


def test_a_body_that_does_not_come(guarded, monkeypatch):
    monkeypatch.setattr("mlx_dspark.server.security.BODY_SECONDS", 0.2)
    head = ("POST /v1/completions HTTP/1.1\nHost: localhost\nAuthorization: Bearer right key\n"
            "Content-Type: application/json\nContent-Length: 100")
    with raw_request(guarded[0], head, b'{"prompt"') as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("text", [b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\nHost: a\r\n"
                                  b"Content-Length: -5\r\n\r\n", b"GET / HTTP/1.1\r\nA: " + b"a" * 300_000])
def test_what_is_no_http(small, text):
    host, port = small.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        try:
            connection.sendall(text)
            answer = connection.recv(100)
        except ConnectionError:
            answer = b""
    assert not answer or answer.startswith(b"HTTP/1.1 4")
    assert httpx2.get(f"{small}/health").status_code == 200


def test_every_answer_has_the_safe_headers(guarded):
    address, _ = guarded
    for path in ("/", "/v1/models", "/nothing"):
        headers = httpx2.get(address + path).headers
        assert headers["x-content-type-options"] == "nosniff" and "server" not in headers
        assert "default-src 'none'" in headers["content-security-policy"]


# How streams end


def raw_stream(address, body=None):
    """A connection that asked for a stream and has read nothing yet."""
    text = json.dumps({**ASK, "stream": True, **(body or {})}).encode()
    return raw_request(address, f"POST /v1/completions HTTP/1.1\nHost: localhost\nContent-Type: application/json\n"
                                f"Content-Length: {len(text)}", text)


def test_an_error_in_a_stream_is_an_event():
    with serving(StandIn(failing), plain_model()) as address:
        events = events_of(post(address, {**ASK, "stream": True}))
        assert texts_of(events) == "so far" and events[-1]["error"]["message"] == "the engine failed: out of memory"
        with pytest.raises(openai.APIError, match="out of memory"):
            list(client(address).completions.create(model="small", prompt="x", stream=True))
        response = post(address)
        assert (response.status_code, error_of(response)["code"]) == (500, "engine_failed")


def test_a_mistake_of_ours_is_told_too(monkeypatch):
    def broken(self, chunk):
        raise ZeroDivisionError

    monkeypatch.setattr("mlx_dspark.server.answers.Reader.read", broken)
    engine, origin = StandIn(saying("a")), "https://friend.example"
    with serving(engine, plain_model(), Guard(origins=(origin,))) as address:
        for streamed in (True, False):
            response = post(address, {**ASK, "stream": streamed}, headers={"origin": origin})
            document = events_of(response)[-1] if streamed else response.json()
            assert document["error"]["type"] == "server_error" and "log" in document["error"]["message"]
            assert response.status_code == (200 if streamed else 500)
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["access-control-allow-origin"] == origin
        counted = httpx2.get(f"{address}/metrics").text
    assert 'mlx_dspark_http_answers_total{path="/v1/completions",status="500"} 1.0' in counted


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_is_cancelled(streamed):
    engine = StandIn(FOREVER)
    with serving(engine, plain_model()) as address:
        connection = raw_stream(address, {"stream": streamed})
        assert wait_until(lambda: len(engine.seen) == 1)
        if streamed:
            assert b"200 OK" in connection.recv(100)
        connection.close()
        assert wait_until(lambda: engine.finished == {"cancelled": 1})


def test_a_slow_reader_loses_its_answer_and_nobody_else(monkeypatch):
    monkeypatch.setattr("mlx_dspark.server.app.MOST_EVENTS", 20)
    engine = StandIn(lambda request: saying("hi")(request) if request.max_tokens == 3 else
                     saying(*["x" * 20_000] * 500)(request))
    with serving(engine, plain_model()) as address:
        with raw_stream(address) as connection:
            assert wait_until(lambda: engine.finished == {"cancelled": 1}, 30)
            assert post(address, {**ASK, "max_tokens": 3}).json()["choices"][0]["text"] == "hi"
            text = read_until(connection, b"[DONE]")
        assert b"read too slowly" in text


def read_until(connection, end):
    text = b""
    while end not in text and (more := connection.recv(1 << 16)):
        text += more
    return text


def test_a_client_that_takes_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(stream, "STALLED_SECONDS", 0.3)
    engine = StandIn(saying(*["x" * 20_000] * 2000, pause=0.005))
    with serving(engine, plain_model()) as address, raw_stream(address):
        assert wait_until(lambda: engine.finished == {"cancelled": 1}, 30)


def test_a_waiting_stream_is_kept_alive(monkeypatch):
    monkeypatch.setattr("mlx_dspark.server.app.ALIVE_SECONDS", 0.05)
    with serving(StandIn(saying("a", "b", pause=0.3)), plain_model()) as address:
        response = post(address, {**ASK, "stream": True})
        assert ": waiting\n\n" in response.text and texts_of(events_of(response)) == "ab"
        assert client(address).completions.create(model="small", prompt="x").choices[0].text == "ab"


def test_shutdown_finishes_what_runs():
    engine = StandIn(saying(*["more "] * 20, pause=0.05))
    with serving(engine, plain_model()) as address:
        got = []
        thread = threading.Thread(target=lambda: got.append(post(address, {**ASK, "stream": True})))
        thread.start()
        assert wait_until(lambda: engine.seen)
    thread.join(10)
    assert texts_of(events_of(got[0])) == "more " * 20
    with pytest.raises(httpx2.TransportError):
        post(address)


@pytest.mark.parametrize("streamed", [True, False])
def test_shutdown_tells_whom_it_could_not_serve(streamed):
    engine = StandIn(FOREVER)
    with serving(engine, plain_model(), drain=0.2) as address:
        got = []
        thread = threading.Thread(target=lambda: got.append(post(address, {**ASK, "stream": streamed})))
        thread.start()
        assert wait_until(lambda: engine.seen)
        since = time.monotonic()
    thread.join(10)
    assert time.monotonic() - since < 8
    if streamed:
        assert events_of(got[0])[-1]["error"]["code"] == "shutting_down"
    else:
        assert (got[0].status_code, error_of(got[0])["code"]) == (503, "shutting_down")


def test_what_is_small_is_sent_at_once():
    """Else the second part of an answer would wait for the acknowledgement of the first."""

    async def sends_at_once(bound):
        taken = asyncio.get_running_loop().create_future()
        async with await asyncio.start_server(lambda reader, writer: taken.set_result(writer), sock=bound):
            with socket.create_connection(bound.getsockname()):
                writer = await taken
                found = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                writer.close()
        return found

    with bind("127.0.0.1", 0) as bound:
        assert asyncio.run(sends_at_once(bound))


def test_a_mailbox_may_be_left_before_its_stream_is_known():
    import asyncio

    class Stream:
        cancelled = 0

        def cancel(self):
            self.cancelled += 1

    async def scene():
        left, full = delivery.Mailbox(), delivery.Mailbox(limit=2)
        left.leave()
        left.attach(first := Stream())
        for _ in range(3):
            full.deliver(EngineError("x"))
        full.attach(second := Stream())
        assert isinstance(await full.take(), delivery.SlowReader) and await full.take(0.01) is None
        assert first.cancelled and second.cancelled

    asyncio.run(scene())


# What can be watched


def test_metrics_are_prometheus_text(talker):
    client(talker).chat.completions.create(model="small", messages=USER)
    httpx2.get(f"{talker}/x" * 2)
    response = httpx2.get(f"{talker}/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    from prometheus_client.parser import text_string_to_metric_families

    found = {sample.name + "".join(sample.labels.values()): sample.value
             for family in text_string_to_metric_families(response.text) for sample in family.samples}
    assert found["mlx_dspark_tau"] == 2.5 and found["mlx_dspark_rows_per_request"] == 3
    assert found["mlx_dspark_waiting_requests"] == 0 and found["mlx_dspark_finished_requests_totalstop"] >= 1
    assert found["mlx_dspark_http_answers_total/v1/chat/completions200"] >= 1
    assert found["mlx_dspark_http_answers_totalother404"] >= 1


def test_the_tokenizer_of_these_tests_has_what_they_need():
    assert chat_tokenizer().has_thinking and chat_tokenizer().has_tool_calling and chat_tokenizer().has_chat_template
