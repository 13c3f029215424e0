"""generate(), stream_generate() and `python -m mlx_dspark.generate`.

Importing this module imports neither mlx nor a model library: `--help` must be fast.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from .commands import SETTINGS, Notes, open_pair, pair_options, run_command
from .stats import Statistics
from .structs import KVOptions, Round, Sampling, TopLogprobs, listed, listed_tops
from .terminal import DraftColours, open_record, read_prompt, recorded, show_nothing, show_text

if TYPE_CHECKING:
    from .decode import DecodeOptions
    from .load import Pair
    from .schedule import Policy

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True)
class Chunk:
    """What one round adds to the answer.

    text: may be empty while characters or a possible stop string are incomplete.
    ids: committed tokens, a final stop token included; logprobs, top_logprobs: one each when asked for (see `Round`).
    finish_reason: None, "stop" or "length"; only the last chunk has one.
    round: the record of the round; None for a last chunk that only releases held text.
    stats: running totals (one object, updated in place).
    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: str | None
    round: Round | None
    stats: Statistics
    top_logprobs: tuple[TopLogprobs, ...] | None = None


@dataclass(frozen=True)
class Generation:
    """A finished answer; `str()` of it is the text."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: str
    stats: Statistics
    top_logprobs: tuple[TopLogprobs, ...] | None = None

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `--json`."""
        document: dict[str, Any] = {"text": self.text, "ids": list(self.ids), "finish_reason": self.finish_reason}
        if self.logprobs is not None:
            document["logprobs"] = listed(self.logprobs)
        if self.top_logprobs is not None:
            document["top_logprobs"] = listed_tops(self.top_logprobs)
        return {**document, "stats": self.stats.to_dict()}


def stream_generate(
    pair: Pair,
    prompt: str | Sequence[int] | Sequence[Mapping[str, str]],
    *,
    max_tokens: int | None = None,
    sampling: Sampling | None = None,
    policy: str | None = None,
    stop: Sequence[str] = (),
    kv: KVOptions | None = None,
    logprobs: bool = False,
    top_logprobs: int = 0,
    confidences: bool = False,
    timing: bool = False,
    prefill_step: int = 2048,
    logits_processors: Sequence[Callable[[Any, Any], Any]] = (),
    profile: bool = True,
    say: Callable[[str], None] = lambda text: None,
    **sampling_fields: Any,
) -> Iterator[Chunk]:
    """Generate an answer, one chunk a round.

    prompt: text (encoded as it is), token ids, or chat messages for the tokenizer's template.
    max_tokens: exact upper bound; -1 runs until a stop token or the end of the context; None is 256,
        or what the context has left.
    sampling: or its fields as keywords (temperature=0.7, top_p=0.9, seed=1, ...).
    policy: plain, fixed:N, threshold:X, paper, lagged, rate, lookahead or auto; None is auto where the draft
        has a confidence head, else the whole block, and plain without a draft.
    profile: measure this machine's costs (briefly) when the policy needs them and none are
        stored; without them None drafts the whole block. say: told what was measured or done without.
    stop: strings that end the text; the earliest one wins and is not part of the text.
    logprobs: of every token, after penalties, at temperature 1; top_logprobs: with them, of so many of the most likely
        tokens in each place.
    confidences: keep each round's confidences in its record. timing: tell draft and verify apart (slower).
    logits_processors: mlx-lm's protocol, applied after the penalties.

    Raises ValueError before any work for an empty prompt, one that does not fit the context, or a bad
    option. Closing the iterator early is fine.
    """
    if sampling_fields:
        sampling = dataclasses.replace(sampling or Sampling(), **sampling_fields)
    ids = prompt_ids(pair, prompt)
    limit = token_limit(len(ids), max_tokens, pair.target.context)
    from .scheduling import policy_for

    sampling = sampling or Sampling()
    chosen, facts = policy_for(pair, policy, profile, say, remember=sampling.greedy)
    options = decode_options(pair, sampling, chosen, limit, kv or KVOptions(), prefill_step, logits_processors,
                       logprobs=logprobs, top_logprobs=top_logprobs, confidences=confidences, timing=timing)
    return _stream(pair, ids, options, tuple(stop), facts)


def generate(
    pair: Pair, prompt: str | Sequence[int] | Sequence[Mapping[str, str]], **options: Any
) -> Generation:
    """The whole answer at once; takes what `stream_generate` takes."""
    return collect(stream_generate(pair, prompt, **options))


def collect(chunks: Iterator[Chunk]) -> Generation:
    """Put chunks together."""
    text, ids, logprobs, tops, last = "", [], [], [], None
    for last in chunks:
        text += last.text
        ids.extend(last.ids)
        logprobs.extend(last.logprobs or ())
        tops.extend(last.top_logprobs or ())
    assert last is not None and last.finish_reason is not None, "a stream ends with a finish reason"
    return Generation(text, tuple(ids), tuple(logprobs) if last.logprobs is not None else None,
                      last.finish_reason, last.stats, tuple(tops) if last.top_logprobs is not None else None)


def _stream(
    pair: Pair, ids: list[int], options: DecodeOptions, stop: tuple[str, ...], policy_facts: Mapping[str, Any]
) -> Iterator[Chunk]:
    import mlx.core as mx

    from .decode import decode

    answer = Answer(pair, len(ids), options, stop, policy_facts)
    mx.reset_peak_memory()
    with pair.target.wired():
        for landed in decode(pair, ids, options):
            chunk = answer.take(landed)
            answer.stats.peak_memory_bytes = mx.get_peak_memory()
            yield chunk
            if answer.finish is not None:
                break
    yield answer.end()


class Answer:
    """One answer as it grows: rounds in, chunks out; the earliest of stop string, stop token and length ends it."""

    def __init__(
        self, pair: Pair, prompt_tokens: int, options: DecodeOptions, stop: Sequence[str], facts: Mapping[str, Any]
    ):
        from .backend import machine
        from .text import TextStream

        facts = {**pair.facts, "policy": options.policy.name, **facts, "seed": options.rule.seed, **machine()}
        self._draft, self._logprobs, self._tops = pair.draft, options.logprobs, options.top_logprobs > 0
        self._stream = TextStream(pair.tokenizer, stop, options.stop_ids)
        self._started = self._first = time.perf_counter()
        self.stats = Statistics(prompt_tokens, facts)
        self.finish: str | None = "length" if options.max_tokens == 0 else None

    def take(self, landed: Round) -> Chunk:
        """The chunk of a round; `finish` says afterwards whether it was the last one."""
        before = time.perf_counter()
        piece = self._stream.feed(landed.tokens)
        if piece.stopped:
            landed = _cut(landed, piece.kept)
        self.finish = landed.finish
        stats = self.stats
        stats.add(landed)
        now = time.perf_counter()
        if landed.rows == 0:
            self._first, stats.prefill_seconds = now, now - self._started
        else:
            stats.part_seconds["text"] += now - before
        stats.decode_seconds = now - self._first
        return Chunk(piece.text, landed.tokens, landed.logprobs, None, landed, stats, landed.top_logprobs)

    def end(self, finish: str | None = None) -> Chunk:
        """The last chunk: text that was held back, and why the answer ended (`finish` where a round does not say)."""
        rest = self._stream.finish()
        certified = getattr(self._draft, "certified_share", None)
        if certified is not None:
            self.stats.facts = {**self.stats.facts, "certified_share": round(certified, 4)}
        reason = "stop" if rest.stopped else finish or self.finish
        return Chunk(rest.text, (), () if self._logprobs else None, reason, None, self.stats,
                     () if self._tops else None)


def _cut(landed: Round, kept: int) -> Round:
    """The round as it counts when a stop string ends the text inside it."""
    return dataclasses.replace(
        landed, tokens=landed.tokens[:kept], accepted=min(landed.accepted, kept), finish="stop",
        logprobs=None if landed.logprobs is None else landed.logprobs[:kept],
        top_logprobs=None if landed.top_logprobs is None else landed.top_logprobs[:kept],
    )


def prompt_ids(pair: Pair, prompt: str | Sequence[Any]) -> list[int]:
    from .load import encode_chat, encode_prompt

    if isinstance(prompt, str):
        return encode_prompt(pair.tokenizer, prompt, raw=True)
    if len(prompt) and isinstance(prompt[0], Mapping):
        return encode_chat(pair.tokenizer, prompt)
    ids = [int(token) for token in prompt]
    if not ids:
        raise ValueError("the prompt is empty: give some text")
    size = pair.target.vocab_size
    for token in ids:
        if token < 0 or (size is not None and token >= size):
            raise ValueError(f"prompt token {token} is outside the vocabulary of {size}: encode with this tokenizer")
    return ids


def token_limit(prompt: int, max_tokens: int | None, context: int | None) -> int | None:
    """How many tokens may be generated; None without bound."""
    if max_tokens is not None and max_tokens < -1:
        raise ValueError(f"max_tokens is {max_tokens}: give a count, or -1 for the rest of the context")
    if context is None:
        return DEFAULT_MAX_TOKENS if max_tokens is None else None if max_tokens == -1 else max_tokens
    room = context - prompt
    if room < 0 or (room == 0 and max_tokens != 0):
        raise ValueError(f"the prompt has {prompt} tokens and the context {context}: shorten the prompt")
    if max_tokens is not None and max_tokens > room:
        raise ValueError(f"{prompt} prompt tokens and max_tokens {max_tokens} exceed the context of {context}: "
                         f"give at most {room}, or -1 for all of it")
    return min(DEFAULT_MAX_TOKENS, room) if max_tokens is None else room if max_tokens == -1 else max_tokens


def decode_options(
    pair: Pair, sampling: Sampling, policy: Policy, limit: int | None, kv: KVOptions, prefill_step: int,
    logits_processors: Sequence[Callable[[Any, Any], Any]], *, top_logprobs: int = 0, **reads: bool,
) -> DecodeOptions:
    from .decode import DecodeOptions
    from .sampling import make_rule

    if prefill_step < 1:
        raise ValueError(f"prefill_step is {prefill_step}: give at least 1")
    size = pair.target.vocab_size
    for token in sampling.logit_bias:
        if size is not None and token >= size:
            raise ValueError(f"logit_bias token {token} is outside the vocabulary of {size}")
    if size is not None and top_logprobs > size:
        raise ValueError(f"top_logprobs is {top_logprobs}: the vocabulary has {size} tokens, give at most {size}")
    return DecodeOptions(
        rule=make_rule(sampling, [*pair.target.processors(sampling), *logits_processors]),
        policy=policy, max_tokens=limit, stop_ids=pair.stop_ids, kv=kv, prefill_step=prefill_step,
        top_logprobs=top_logprobs, **reads,
    )


@click.command("generate", context_settings=SETTINGS)
@click.argument("text", required=False, metavar="[PROMPT]")
@click.option("-p", "--prompt", help="The prompt; '-' reads it from stdin.")
@click.option("-f", "--prompt-file", type=click.Path(), help="Read the prompt from a file.")
@pair_options
@click.option("--raw", is_flag=True, help="Do not apply the tokenizer's chat template.")
@click.option("--system", help="System message for the chat template.")
@click.option("--thinking/--no-thinking", default=None, help="Ask the chat template for thinking, or for none.")
@click.option("-m", "--max-tokens", type=int, help="At most this many; -1: until the context ends. Default: 256.")
@click.option("--temp", "--temperature", "temperature", type=float, default=0.0, help="0 or below is greedy.")
@click.option("--top-p", type=float, default=1.0, help="1 is off, 0 the top token only.")
@click.option("--top-k", type=int, default=0, help="0 is off.")
@click.option("--min-p", type=float, default=0.0, help="0 is off.")
@click.option("--repetition-penalty", type=float, help="Multiplicative, for the last tokens.")
@click.option("--repetition-context-size", type=int, default=20, help="How many tokens it looks back.")
@click.option("--presence-penalty", type=float, help="Subtracted once per token seen.")
@click.option("--frequency-penalty", type=float, help="Subtracted per occurrence.")
@click.option("--logit-bias", multiple=True, metavar="ID=VALUE", help="Add VALUE to a token's logit; repeatable.")
@click.option("--seed", type=int, help="Same seed, same text. Default: a new one, shown in the statistics.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option("--policy", help="auto, plain, fixed:N, threshold:X, paper, lagged, rate or lookahead. Default: auto.")
@click.option("--no-profile", is_flag=True, help="Do not measure this machine's costs before first use.")
@click.option("--kv-bits", type=int, help="Quantise the target's KV cache.")
@click.option("--kv-group-size", type=int, default=64)
@click.option("--quantized-kv-start", type=int, default=5000, help="From this many positions on.")
@click.option("--prefill-step-size", type=int, default=2048, help="Prompt rows per forward.")
@click.option("--logprobs", is_flag=True, help="With --json: the log-probability of each token.")
@click.option("--top-logprobs", type=click.IntRange(0), default=0, metavar="N",
              help="With --logprobs: also of the N most likely tokens in each place.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document: text, ids, finish_reason, stats.")
@click.option("--record", type=click.Path(), help="Append the rounds to this file as JSON lines.")
@click.option("--show-drafts", is_flag=True, help="On a terminal: colour accepted and rejected drafts.")
@click.option("--timing", is_flag=True, help="Measure draft and verify apart; slows the run down.")
@click.option("--stats/--no-stats", default=None, help="Statistics on stderr. Default: on a terminal.")
@run_command
def command(text: str | None, prompt: str | None, prompt_file: str | None, **o: Any) -> None:
    """Write text with a target model and its DSpark draft: the same text as without the draft.

    The prompt is the argument, --prompt, a file or stdin. Text goes to stdout, all else to stderr.
    """
    notes = Notes()
    _refuse_clashes(o)
    words = read_prompt(text, prompt, prompt_file)
    sampling, kv = _read_sampling(o), KVOptions(o["kv_bits"], o["kv_group_size"], o["quantized_kv_start"])
    with open_record(o["record"]) as record:
        names = ("model", "draft", "revision", "draft_revision", "dtype", "draft_bits")
        pair = open_pair(notes, plain=o["policy"] == "plain", **{name: o[name] for name in names})
        ids = encode_prompt_for(pair, words, o)
        chunks = stream_generate(
            pair, ids, max_tokens=o["max_tokens"], sampling=sampling, policy=o["policy"], stop=o["stop"], kv=kv,
            logprobs=o["logprobs"], top_logprobs=o["top_logprobs"], confidences=record is not None, timing=o["timing"],
            prefill_step=o["prefill_step_size"], profile=not o["no_profile"], say=notes.say,
        )
        if record is not None:
            chunks = recorded(chunks, record)
        show = show_nothing if o["as_json"] else show_text
        if o["show_drafts"]:
            if sys.stdout.isatty():
                show = DraftColours(pair.tokenizer).show
            else:
                notes.say("--show-drafts colours need a terminal on stdout: writing plain text")
        generation, interrupted = _consume(chunks, show)
    if o["as_json"]:
        click.echo(json.dumps(generation.to_dict(), ensure_ascii=False))
    elif generation.text and not generation.text.endswith("\n"):
        click.echo()
    if o["stats"] or (o["stats"] is None and sys.stderr.isatty()):
        click.echo(generation.stats.summary(), err=True)
    if interrupted:
        sys.exit(130)


def encode_prompt_for(pair: Pair, words: str, o: Mapping[str, Any]) -> list[int]:
    """Encode the command's prompt as its options ask."""
    from .load import encode_prompt

    return encode_prompt(pair.tokenizer, words, raw=o["raw"], system=o["system"], thinking=o["thinking"])


def _refuse_clashes(o: Mapping[str, Any]) -> None:
    if o["as_json"] and o["show_drafts"]:
        raise click.UsageError("--json and --show-drafts exclude each other: choose one")
    if o["logprobs"] and not o["as_json"]:
        raise click.UsageError("--logprobs are part of the JSON document: add --json")
    if o["top_logprobs"] and not o["logprobs"]:
        raise click.UsageError("--top-logprobs come beside the tokens' own: add --logprobs")


def _read_sampling(o: Mapping[str, Any]) -> Sampling:
    bias = {}
    for item in o["logit_bias"]:
        token, _, value = item.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise click.UsageError(f"--logit-bias {item!r} is not ID=VALUE, as in 198=-1.5") from None
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "repetition_context_size",
             "presence_penalty", "frequency_penalty", "seed")
    return Sampling(logit_bias=bias, **{name: o[name] for name in names})


def _consume(chunks: Iterator[Chunk], show: Callable[[Chunk], None]) -> tuple[Generation, bool]:
    """Show chunks as they come; an interrupt keeps what there is."""
    kept: list[Chunk] = []
    try:
        for chunk in chunks:
            kept.append(chunk)
            show(chunk)
        return collect(iter(kept)), False
    except KeyboardInterrupt:
        if not kept:
            sys.exit(130)
        return collect(iter([*kept[:-1], dataclasses.replace(kept[-1], finish_reason="interrupted")])), True


def main() -> None:
    """Entry point of `mlx_dspark.generate`."""
    command(prog_name="mlx_dspark.generate")


if __name__ == "__main__":
    main()
