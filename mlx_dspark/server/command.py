"""`python -m mlx_dspark.server`: the pair, the engine and the application put together."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..commands import SETTINGS, Finite, Notes, open_pair, pair_options, run_command
from ..structs import KVOptions, Sampling

if TYPE_CHECKING:
    from ..load import Pair

SMALL_PAIR = "mlx-dspark-small"
MOST = 1e6  # seconds, MB or GB: beyond any use, and far from what overflows
NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@click.command("server", context_settings=SETTINGS)
@pair_options
@click.option("--host", default="127.0.0.1", help="Where to listen; other than loopback only with an API key.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, help="0 takes a free one.")
@click.option("--api-key", envvar="MLX_DSPARK_API_KEY", show_envvar=True, help="What clients must show.")
@click.option("--allow-origin", multiple=True, metavar="ORIGIN",
              help="Let pages of this origin use the server, as in https://example.com; repeatable.")
@click.option("--name", help="The model's name for clients. Default: its repo, or the folder's name.")
@click.option("--max-requests", type=click.IntRange(1), default=16, help="Decoded together.")
@click.option("--max-waiting", type=click.IntRange(0), default=256, help="In the queue; more are refused (429).")
@click.option("--max-body-mb", type=Finite(0, MOST, min_open=True), default=4.0, help="Longest request body.")
@click.option("--drain", type=Finite(0, MOST), default=30.0,
              help="Seconds that running answers get to finish after SIGINT or SIGTERM.")
@click.option("--max-tokens", type=click.IntRange(-1), default=1024,
              help="For requests that do not say; -1: until the context ends.")
@click.option("--temp", "--temperature", "temperature", type=Finite(0), default=0.0,
              help="For requests that do not say; 0 is greedy.")
@click.option("--top-p", type=Finite(0, 1), default=1.0, help="Likewise; 1 is off.")
@click.option("--top-k", type=click.IntRange(0), default=0, help="Likewise; 0 is off.")
@click.option("--min-p", type=Finite(0, 1), default=0.0, help="Likewise; 0 is off.")
@click.option("--chat-template", type=click.Path(), help="A Jinja file, in place of the tokenizer's own template.")
@click.option("--chat-template-args", metavar="JSON",
              help="""Variables for the template, as in '{"enable_thinking": false}'.""")
@click.option("--policy", help="How rows are shared out. Default: auto.")
@click.option("--layout", type=click.Choice(["packed", "rectangular"]), help="Default: the cheaper one of each round.")
@click.option("--no-profile", is_flag=True, help="Do not measure this machine's costs before first use.")
@click.option("--prefill-step-size", type=click.IntRange(1), default=512, help="Prompt rows per forward.")
@click.option("--kv-gb", type=Finite(0, MOST, min_open=True),
              help="For the caches of all requests. Default: a share of the memory.")
@click.option("--prefix-gb", type=Finite(0, MOST),
              help="Of these, for finished conversations that may go on; 0 keeps none.")
@click.option("--kv-bits", type=int, help="Quantise the target's KV cache.")
@click.option("--kv-group-size", type=int, default=64)
@click.option("--quantized-kv-start", type=int, default=5000, help="From this many positions on.")
@run_command
def command(**o: Any) -> None:
    """Serve a target and its draft through OpenAI's HTTP interface, with a page to watch it.

    Prints the address when it is ready. docs/serving.md says what is served and what keeps it safe.
    """
    _require_extra()
    from .run import bind, run
    from .security import Guard, address_of

    notes = Notes()
    guard = Guard(o["host"], o["api_key"], o["allow_origin"], int(o["max_body_mb"] * (1 << 20)))
    template = _template_args(o["chat_template_args"])
    bound = bind(o["host"], o["port"])
    with bound:
        names = ("model", "draft", "revision", "draft_revision", "dtype", "draft_bits")
        pair = open_pair(notes, plain=o["policy"] == "plain", **{name: o[name] for name in names})
        if o["chat_template"] is not None:
            _use_template(pair, Path(o["chat_template"]))
        engine = _engine(pair, o, notes)
        try:
            app = _app(engine, pair, guard, template, o)
            click.echo(address_of(o["host"], bound.getsockname()[1]))
            notes.say("Ctrl-C ends it: running answers are finished first, a second Ctrl-C does not wait")
            run(app, engine, bound, o["drain"])
        finally:
            engine.close(0.0)


def _engine(pair: Pair, o: dict[str, Any], notes: Notes) -> Any:
    from ..serve import Engine, EngineOptions

    options = EngineOptions(
        max_requests=o["max_requests"], max_waiting=o["max_waiting"], prefill_step=o["prefill_step_size"],
        kv_bytes=_bytes(o["kv_gb"]), prefix_bytes=_bytes(o["prefix_gb"]), policy=o["policy"], layout=o["layout"],
        kv=KVOptions(o["kv_bits"], o["kv_group_size"], o["quantized_kv_start"]), profile=not o["no_profile"],
    )
    return Engine(pair, options, notes.say)


def _app(engine: Any, pair: Pair, guard: Any, template: dict[str, Any], o: dict[str, Any]) -> Any:
    from .app import create_app
    from .asking import Defaults, model_of

    sampling = Sampling(**{name: o[name] for name in ("temperature", "top_p", "top_k", "min_p")})
    name = o["name"] or served_name(o["model"])
    return create_app(engine, model_of(pair, name, Defaults(o["max_tokens"], sampling, template)), guard)


def served_name(model: str | None) -> str:
    """A repo's name as it is; of a folder only the last part, since clients need not know where it is."""
    if model is None:
        return SMALL_PAIR
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() or path.is_absolute() else model


def _template_args(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        args = json.loads(text)
    except ValueError:
        args = None
    if not isinstance(args, dict):
        raise click.UsageError(f"--chat-template-args {text!r} is not a JSON object")
    return args


def _use_template(pair: Pair, file: Path) -> None:
    """Replace the tokenizer's chat template."""
    try:
        pair.tokenizer.chat_template = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text: give a Jinja template") from None
    pair.tokenizer.has_chat_template = True


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 1e9)


def _require_extra() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"the server needs {', '.join(missing)}: pip install {' '.join(missing)}")


def main() -> None:
    """Entry point of `mlx_dspark.server`."""
    command(prog_name="mlx_dspark.server")
