"""The command as a process of its own, with the real engine."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx2
import pytest
from click.testing import CliRunner
from helpers import embedded_pair, refused
from load import Options, load

from mlx_dspark.generate import generate
from mlx_dspark.server.command import SMALL_PAIR, command, served_name

COMMAND = [sys.executable, "-m", "mlx_dspark.server"]


@contextmanager
def running(*options):
    """(process, address) of a server on a free port."""
    process = subprocess.Popen([*COMMAND, "--port", "0", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server():
    with running() as (_, address):
        yield address


def test_the_small_pair_writes_what_generate_writes(server):
    body = {"model": SMALL_PAIR, "prompt": "import os", "max_tokens": 20}
    document = httpx2.post(f"{server}/v1/completions", json=body, timeout=60).json()
    assert document["choices"][0]["text"] == generate(embedded_pair(), "import os", max_tokens=20).text
    seeded = {**body, "temperature": 0.8, "seed": 3}
    document = httpx2.post(f"{server}/v1/completions", json=seeded, timeout=60).json()
    alone = generate(embedded_pair(), "import os", max_tokens=20, temperature=0.8, seed=3)
    assert document["choices"][0]["text"] == alone.text


def test_a_text_that_goes_on_reuses_what_was_computed(server):
    first = "def read_lines(path):\n    with open(path) as file:\n        return "
    ask = {"prompt": first, "max_tokens": 12}
    written = httpx2.post(f"{server}/v1/completions", json=ask, timeout=60).json()["choices"][0]["text"]
    ask = {"prompt": first + written + "\n\n", "max_tokens": 12}
    document = httpx2.post(f"{server}/v1/completions", json=ask, timeout=60).json()
    assert document["usage"]["prompt_tokens_details"]["cached_tokens"] > 10
    assert document["choices"][0]["text"] == generate(embedded_pair(), ask["prompt"], max_tokens=12).text


def test_a_short_load(server):
    options = Options(clients=8, seconds=1, leave=0.2, malformed=0.1, jobs=6, longest=8, least=2)
    result = asyncio.run(load(server, options))
    assert result["failed"] == {}, result
    assert result["answers"] > 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_running_answer_finish(number):
    with running("--drain", "60") as (process, address):
        body = {"prompt": "import os", "max_tokens": 60, "stream": True}
        with httpx2.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            events = [next(lines)]
            process.send_signal(number)
            events += [line for line in lines if line]
        assert events[-1] == "data: [DONE]" and json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "", "")


def test_a_second_interrupt_does_not_wait():
    with running("--drain", "600") as (process, address):
        body = {"prompt": "import os", "max_tokens": 900, "stream": True}
        with httpx2.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(httpx2.TransportError):
                assert any("shutting_down" in line for line in lines)
        assert process.wait(20) == 0


NUMBERS = ("--drain", "--max-body-mb", "--kv-gb", "--prefix-gb")


@pytest.mark.parametrize("option", [*NUMBERS, "--temp", "--top-p", "--min-p"])
@pytest.mark.parametrize("value", ["inf", "nan", "-inf", "1e400", "many"])
def test_an_option_that_is_no_finite_number_is_named(option, value):
    refused(CliRunner().invoke(command, (option, value)), f"'{option}'", code=2)


@pytest.mark.parametrize("option", NUMBERS)
def test_a_number_that_would_overflow_is_named(option):
    refused(CliRunner().invoke(command, (option, "1e300")), f"'{option}'", "range", code=2)


@pytest.mark.parametrize(("options", "code", "fragment"), [
    (("--host", "0.0.0.0"), 1, "--host 0.0.0.0 can be reached from other machines: give an --api-key"),
    (("--allow-origin", "example.com"), 1, "--allow-origin example.com is not an origin"),
    (("--allow-origin", "http://["), 1, "--allow-origin http://[ is not an origin"),
    (("--api-key", ""), 1, "the API key is empty"), (("--api-key", " k"), 1, "begins or ends with a space"),
    (("--chat-template-args", "[1]"), 2, "is not a JSON object"),
    (("--port", "0", "--model", "/nowhere"), 1, "/nowhere"),
])
def test_what_cannot_be_served_is_one_line(options, code, fragment):
    refused(CliRunner().invoke(command, options), fragment, code=code)


def test_a_taken_port_is_one_line_of_a_process_that_ends():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run([*COMMAND, "--port", str(port)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "") and "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert f"cannot listen at 127.0.0.1, port {port}" in line and "--port" in line


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr("mlx_dspark.server.command.NEEDED", ("fastapi", "nothing_of_this_name"))
    done = CliRunner().invoke(command, [])
    assert done.exit_code == 1
    assert "the server needs nothing_of_this_name: pip install nothing_of_this_name" in done.output


def test_clients_do_not_learn_where_the_model_lies(tmp_path):
    assert served_name(None) == SMALL_PAIR and served_name("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
    assert served_name(str(tmp_path)) == tmp_path.name


def test_a_chat_template_from_a_file(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{% for message in messages %}{{ message.content }}{{ end }}{% endfor %}")
    with running("--chat-template", str(file), "--chat-template-args", '{"end": "!"}') as (_, address):
        body = {"messages": [{"role": "user", "content": "import os"}], "max_tokens": 8}
        document = httpx2.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()
    ids = embedded_pair().tokenizer.encode("import os!", add_special_tokens=False)  # a template writes its own
    assert document["choices"][0]["message"]["content"] == generate(embedded_pair(), ids, max_tokens=8).text
