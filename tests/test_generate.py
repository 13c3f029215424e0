"""generate(), stream_generate() and the command: what they write, where, and what they refuse."""

import dataclasses
import importlib
import io
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from click.testing import CliRunner, Result
from helpers import bare_assets, refused

import mlx_dspark
from mlx_dspark.errors import FormatError, PairError
from mlx_dspark.generate import command
from mlx_dspark.load import encode_chat, encode_prompt, resolve

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
PROMPT = "The quick brown fox"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if enable_thinking %}[think]{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
cli = importlib.import_module("mlx_dspark.generate")  # the module; `mlx_dspark.generate` is the function
ASSETS = bare_assets()  # prompts here are raw text; the tests of templates bring their own


@pytest.fixture(scope="module", autouse=True)
def without_a_template() -> Iterator[None]:
    """The small pair of the package is that of ASSETS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("mlx_dspark.load"), "ASSETS", ASSETS)
        yield


@pytest.fixture(scope="module")
def pair() -> mlx_dspark.Pair:
    return mlx_dspark.load()


@pytest.fixture(scope="module")
def reference(pair) -> mlx_dspark.Generation:
    return mlx_dspark.generate(pair, PROMPT, max_tokens=24)


@pytest.fixture
def run() -> Callable[..., Result]:
    """Run the command in this process: run("a prompt", "--json", input=...)."""
    clean = {"MLX_DSPARK_MODEL": None, "MLX_DSPARK_DRAFT": None, "MLX_DSPARK_DEBUG": None}

    def invoke(*args, input: str | bytes | None = None, env: dict | None = None) -> Result:
        runner = CliRunner(env={**clean, **(env or {})})
        return runner.invoke(command, [str(arg) for arg in args], input=input, prog_name="mlx_dspark.generate")

    return invoke


def document(result: Result) -> dict:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# --- model folders that differ from a good one in one thing


def copy_folder(source: Path, to: Path, **config) -> Path:
    """A copy with other config values; None removes a key."""
    shutil.copytree(source, to, copy_function=shutil.copyfile)
    settings = json.loads((source / "config.json").read_text()) | config
    (to / "config.json").write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    return to


def change_weights(folder: Path, change: Callable[[dict[str, mx.array]], dict[str, mx.array]]) -> Path:
    """Written to a new file: mlx may still read the old one."""
    path = folder / "model.safetensors"
    weights = change(dict(mx.load(str(path))))
    mx.eval(weights)
    path.unlink()
    mx.save_safetensors(str(path), weights, {"format": "mlx"})
    return folder


def one_nan(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    name = next(name for name in sorted(weights) if name.endswith("norm.weight"))
    weights[name] = mx.concatenate([mx.array([mx.nan], dtype=weights[name].dtype), weights[name][1:]])
    return weights


def with_index(folder: Path, *shards: str) -> Path:
    index = {"weight_map": {f"tensor.{i}": shard for i, shard in enumerate(shards)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def cut_short(folder: Path) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return folder


def without(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).unlink()
    return folder


def golden_target(to: Path) -> Path:
    """The golden target with the embedded tokenizer: enough to load, not to read its text."""
    copy_folder(GOLDEN / "qwen3_target", to)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ASSETS / "target" / name, to / name)
    return to


def golden_draft(to: Path, vocabulary: int) -> Path:
    folder = copy_folder(GOLDEN / "qwen3_dspark_vanilla", to, vocab_size=vocabulary, mask_token_id=vocabulary - 1)
    return change_weights(folder, lambda weights: {
        name: array[:vocabulary] if array.shape[0] == 320 else array for name, array in weights.items()
    })


# --- the Python interface


def test_generate_is_the_stream_put_together(pair, reference):
    chunks = list(mlx_dspark.stream_generate(pair, PROMPT, max_tokens=24))
    assert "".join(chunk.text for chunk in chunks) == reference.text == str(reference)
    assert tuple(i for chunk in chunks for i in chunk.ids) == reference.ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == reference.finish_reason == "length"
    assert (chunks[-1].ids, chunks[-1].round) == ((), None)
    assert all(chunk.round.tokens == chunk.ids for chunk in chunks[:-1])
    assert all(chunk.stats is chunks[0].stats for chunk in chunks)


def test_text_is_the_decoded_ids(pair, reference):
    assert reference.text == pair.tokenizer.decode(list(reference.ids))


def test_statistics_agree_with_the_rounds(pair):
    chunks = list(mlx_dspark.stream_generate(pair, PROMPT, max_tokens=24, policy="threshold:0.5"))
    rounds = [chunk.round for chunk in chunks if chunk.round is not None and chunk.round.rows]
    stats = chunks[-1].stats.to_dict()
    assert stats["rounds"] == len(rounds)
    assert stats["drafted"] == sum(landed.proposed for landed in rounds)
    assert stats["verified"] == sum(len(landed.drafts) for landed in rounds)
    assert stats["accepted"] == sum(landed.accepted for landed in rounds)
    assert stats["rows"] == sum(landed.rows for landed in rounds) == stats["verified"] + stats["rounds"]
    assert sum(stats["rows_histogram"].values()) == len(rounds)
    assert stats["tau"] == pytest.approx(sum(len(landed.tokens) for landed in rounds) / len(rounds), abs=1e-4)
    assert stats["generated_tokens"] == 24 and stats["prompt_tokens"] == len(encode_prompt(pair.tokenizer, PROMPT))
    assert {"draft", "verify", "wait", "commit", "text"} == stats["ms_per_round"].keys()
    assert stats["policy"] == "threshold:0.5" and stats["gamma"] == 7 and stats["taps"] == [1, 2, 4]
    assert min(stats["prefill_tps"], stats["decode_tps"], stats["peak_memory_gb"]) > 0
    json.dumps(stats)


@pytest.mark.parametrize("count", [0, 1])
def test_no_round_means_no_tau(pair, reference, count):
    generation = mlx_dspark.generate(pair, PROMPT, max_tokens=count)
    assert (generation.ids, generation.finish_reason) == (reference.ids[:count], "length")
    assert generation.stats.tau is None and "no rounds" in generation.stats.summary()


def test_logprobs_come_one_per_token(pair, reference):
    generation = mlx_dspark.generate(pair, PROMPT, max_tokens=24, logprobs=True)
    assert generation.ids == reference.ids and len(generation.logprobs) == 24
    assert reference.logprobs is None and "logprobs" not in reference.to_dict()
    assert generation.top_logprobs is None and "top_logprobs" not in generation.to_dict()


def test_top_logprobs_come_one_list_per_token(pair, reference):
    generation = mlx_dspark.generate(pair, PROMPT, max_tokens=24, logprobs=True, top_logprobs=3)
    assert generation.ids == reference.ids and [len(best) for best in generation.top_logprobs] == [3] * 24
    assert [best[0] for best in generation.top_logprobs] == list(zip(generation.ids, generation.logprobs))


@pytest.mark.parametrize(("fields", "words"), [
    ({"top_logprobs": 3}, "top_logprobs is 3 without logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs is -1: give 0"),
    ({"top_logprobs": 10**6, "logprobs": True}, "top_logprobs is 1000000: the vocabulary has 4096 tokens"),
])
def test_top_logprobs_that_cannot_be_had_are_refused_before_any_work(pair, fields, words):
    with pytest.raises(ValueError, match=words):
        mlx_dspark.stream_generate(pair, PROMPT, **fields)


def test_a_stop_string_ends_text_ids_and_records(pair, reference):
    at = len(reference.text) // 2
    stop = reference.text[at : at + 4]
    chunks = list(mlx_dspark.stream_generate(pair, PROMPT, max_tokens=24, stop=[stop, "never there"], logprobs=True,
                                             top_logprobs=2))
    text = "".join(chunk.text for chunk in chunks)
    ids = [i for chunk in chunks for i in chunk.ids]
    assert chunks[-1].finish_reason == "stop"
    assert text == reference.text[: reference.text.index(stop)]
    assert ids == list(reference.ids[: len(ids)])
    assert stop in pair.tokenizer.decode(ids) and stop not in pair.tokenizer.decode(ids[:-1])
    assert sum(len(chunk.logprobs) for chunk in chunks) == chunks[-1].stats.generated_tokens == len(ids)
    assert [best[0][0] for chunk in chunks for best in chunk.top_logprobs] == ids
    assert chunks[-2].round.finish == "stop" and chunks[-2].round.accepted <= len(chunks[-2].round.tokens)


def test_the_default_length_is_256_or_what_the_context_leaves(pair):
    assert cli.token_limit(10, None, 2048) == 256
    assert cli.token_limit(2000, None, 2048) == 48
    assert cli.token_limit(10, None, None) == 256
    assert (cli.token_limit(10, -1, 2048), cli.token_limit(10, -1, None)) == (2038, None)
    assert cli.token_limit(2048, 0, 2048) == 0


def test_sampling_is_given_as_a_record_or_as_fields(pair):
    record = mlx_dspark.generate(pair, PROMPT, max_tokens=8, sampling=mlx_dspark.Sampling(0.8, top_k=20, seed=2))
    fields = mlx_dspark.generate(pair, PROMPT, max_tokens=8, temperature=0.8, top_k=20, seed=2)
    assert record.ids == fields.ids
    with pytest.raises(TypeError, match="nonsense"):
        mlx_dspark.generate(pair, PROMPT, nonsense=1)


def test_logits_processors_are_applied(pair, reference):
    banned = reference.ids[3]

    def ban(tokens, logits):
        return mx.where(mx.arange(logits.shape[-1]) == banned, -mx.inf, logits)

    generation = mlx_dspark.generate(pair, PROMPT, max_tokens=12, logits_processors=[ban])
    plain = mlx_dspark.generate(pair, PROMPT, max_tokens=12, logits_processors=[ban], policy="plain")
    assert generation.ids == plain.ids and banned not in generation.ids
    assert generation.ids[:3] == reference.ids[:3]


@pytest.mark.parametrize(
    ("prompt", "fields", "fragment"),
    [
        pytest.param("", {}, "the prompt is empty", id="empty-text"),
        pytest.param([], {}, "the prompt is empty", id="no-ids"),
        pytest.param([5, 4096], {}, "prompt token 4096 is outside the vocabulary of 4096", id="id-too-large"),
        pytest.param([-1], {}, "prompt token -1 is outside", id="id-negative"),
        pytest.param([{"role": "user", "content": "hi"}], {}, "this tokenizer has none", id="messages"),
        pytest.param([5] * 2049, {}, "the prompt has 2049 tokens and the context 2048", id="too-long"),
        pytest.param([5] * 2048, {}, "shorten the prompt", id="no-room"),
        pytest.param([5] * 10, {"max_tokens": 2039}, "give at most 2038, or -1", id="too-many"),
        pytest.param([5], {"max_tokens": -2}, "max_tokens is -2: give a count, or -1", id="max-tokens"),
        pytest.param([5], {"policy": "fast"}, "unknown policy 'fast'", id="policy"),
        pytest.param([5], {"prefill_step": 0}, "prefill_step is 0: give at least 1", id="prefill-step"),
        pytest.param([5], {"temperature": float("nan")}, "temperature is nan", id="temperature"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(pair, prompt, fields, fragment):
    with pytest.raises(ValueError) as caught:
        mlx_dspark.stream_generate(pair, prompt, **fields)  # not even started
    assert fragment in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_that_mlx_lm_has_loaded():
    model, tokenizer = mlx_lm.load(str(ASSETS / "target"))
    pair = mlx_dspark.load(model, ASSETS / "draft", tokenizer=tokenizer)
    drafted = mlx_dspark.generate(pair, PROMPT, max_tokens=8)  # in bfloat16, which takes its time
    assert drafted.ids == mlx_dspark.generate(pair, PROMPT, max_tokens=8, policy="plain").ids
    assert drafted.stats.tau > 1 and pair.tokenizer is tokenizer


def test_a_loaded_model_with_an_unwrapped_tokenizer(pair):
    bare = pair.tokenizer._tokenizer
    again = mlx_dspark.load(pair.target.model, pair.draft, tokenizer=bare)
    assert again.draft is pair.draft
    assert mlx_dspark.generate(again, PROMPT, max_tokens=5).text


def test_a_loaded_model_needs_its_tokenizer(pair):
    with pytest.raises(ValueError, match="needs its tokenizer"):
        mlx_dspark.load(pair.target.model)


def test_without_a_draft_decoding_is_plain_and_says_so(reference):
    pair = mlx_dspark.load(ASSETS / "target")
    assert pair.draft is None and "give --draft" in pair.notes[-1]
    generation = mlx_dspark.generate(pair, PROMPT, max_tokens=8)
    assert generation.ids == reference.ids[:8] and generation.stats.tau == 1
    assert generation.stats.facts["policy"] == "plain"


# --- chat templates


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory) -> Path:
    folder = copy_folder(ASSETS / "target", tmp_path_factory.mktemp("chat") / "target")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def seen_prompt(monkeypatch, pair) -> Callable[[], str]:
    """The text of the ids that the command generates from."""
    seen = []
    original = cli.stream_generate

    def listen(pair, ids, **options):
        seen.append(ids)
        return original(pair, ids, **options)

    monkeypatch.setattr(cli, "stream_generate", listen)
    return lambda: pair.tokenizer.decode(seen[-1])


@pytest.mark.parametrize(
    ("args", "rendered"),
    [
        pytest.param([], "[user]hi[assistant]", id="by-default"),
        pytest.param(["--raw"], "hi", id="raw"),
        pytest.param(["--system", "be brief"], "[system]be brief[user]hi[assistant]", id="system"),
        pytest.param(["--thinking"], "[user]hi[think][assistant]", id="thinking"),
        pytest.param(["--no-thinking"], "[user]hi[assistant]", id="no-thinking"),
    ],
)
def test_the_chat_template_is_applied(run, chat_folder, seen_prompt, args, rendered):
    result = run("hi", "--model", chat_folder, "-m", 1, *args)
    assert result.exit_code == 0, result.stderr
    assert seen_prompt().removeprefix("<|endoftext|>") == rendered


def test_thinking_is_only_passed_when_asked_for():
    passed = []

    class Tokenizer:
        has_chat_template = True

        def apply_chat_template(self, messages, **options):
            passed.append(options)
            return [1]

    for thinking in (None, True, False):
        encode_prompt(Tokenizer(), "hi", thinking=thinking)
    assert passed == [{"add_generation_prompt": True, **more}
                      for more in ({}, {"enable_thinking": True}, {"enable_thinking": False})]


def test_messages_and_text_give_the_same_prompt(chat_folder):
    pair = mlx_dspark.load(chat_folder)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert encode_chat(pair.tokenizer, messages) == encode_prompt(pair.tokenizer, "hi", system="s")
    assert mlx_dspark.generate(pair, messages, max_tokens=1).stats.prompt_tokens == \
        len(encode_chat(pair.tokenizer, messages))


# --- the command: prompt in, text out


@pytest.mark.parametrize("how", ["argument", "-p", "-f", "stdin-dash", "stdin-option-dash", "stdin-implicit"])
def test_the_prompt_comes_from(run, tmp_path, reference, how):
    file = tmp_path / "a prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    args, stdin = {
        "argument": ([PROMPT], None),
        "-p": (["-p", PROMPT], None),
        "-f": (["-f", file], None),
        "stdin-dash": (["-"], PROMPT),
        "stdin-option-dash": (["-p", "-"], PROMPT),
        "stdin-implicit": ([], PROMPT),
    }[how]
    result = run(*args, "-m", 24, input=stdin)
    assert (result.exit_code, result.stdout, result.stderr) == (0, reference.text + "\n", "")


def test_prompts_keep_their_characters(run, seen_prompt, tmp_path):
    words = "naïve 日本\n  indented\n"
    (tmp_path / "p").write_text(words, encoding="utf-8")
    for args, stdin in ((["-f", tmp_path / "p"], None), (["-"], words.encode())):
        assert run(*args, "-m", 1, input=stdin).exit_code == 0
        assert seen_prompt().removeprefix("<|endoftext|>") == words


@pytest.mark.parametrize("stats", [True, False])
def test_statistics_go_to_stderr_when_asked_for(run, reference, stats):
    result = run(PROMPT, "-m", 24, "--stats" if stats else "--no-stats")
    assert result.stdout == reference.text + "\n"
    if stats:
        for fragment in (f"tau {reference.stats.tau:.2f} over", "drafted", "accepted", "rows", "decode", "prefill",
                         "tokens/s", "peak memory", "ms per round: draft", "policy fixed", "blas mlx"):
            assert fragment in result.stderr
    else:
        assert result.stderr == ""


@pytest.mark.parametrize("args", [[], ["--logprobs"], ["--logprobs", "--top-logprobs", 2], ["--stats"]],
                         ids=["bare", "logprobs", "top-logprobs", "with-stats"])
def test_json_is_one_document(run, reference, args):
    found = document(run(PROMPT, "-m", 24, "--json", *args))
    asked = [name for name in ("logprobs", "top_logprobs") if f"--{name.replace('_', '-')}" in args]
    assert list(found) == ["text", "ids", "finish_reason", *asked, "stats"]
    assert (found["text"], found["ids"], found["finish_reason"]) == (reference.text, list(reference.ids), "length")
    assert found["stats"]["tau"] == pytest.approx(reference.stats.tau, abs=1e-4)
    assert "--logprobs" not in args or len(found["logprobs"]) == 24
    if "top_logprobs" in found:
        chosen = [list(own) for own in zip(found["ids"], found["logprobs"])]
        assert [best[0] for best in found["top_logprobs"]] == chosen
        assert all(len(best) == 2 and best[0][1] >= best[1][1] for best in found["top_logprobs"])


def test_record_appends_a_run_line_and_its_rounds(run, tmp_path, reference):
    file = tmp_path / "rounds.jsonl"
    runs = [document(run(PROMPT, "-m", 24, "--json", "--record", file)) for _ in range(2)]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    starts = [i for i, line in enumerate(lines) if "run" in line]
    assert len(starts) == 2 and starts[0] == 0
    for start, end, found in zip(starts, [starts[1], None], runs, strict=True):
        rounds = lines[start + 1 : end]
        assert lines[start]["run"]["policy"] == "fixed" and lines[start]["run"]["prompt_tokens"]
        assert [token for landed in rounds for token in landed["tokens"]] == found["ids"] == list(reference.ids)
        assert [landed["index"] for landed in rounds] == list(range(found["stats"]["rounds"] + 1))
        assert all(len(landed["confidences"]) == landed["proposed"] for landed in rounds[1:])
        assert {"draft", "verify", "wait", "commit"} <= rounds[-1]["ms"].keys()


@pytest.mark.parametrize("count", [0, 1, 9])
def test_max_tokens(run, reference, pair, count):
    result = run(PROMPT, "-m", count)
    text = pair.tokenizer.decode(list(reference.ids[:count]))
    assert (result.exit_code, result.stdout) == (0, text + "\n" if text else "")


def test_max_tokens_until_the_context_ends(run, tmp_path):
    small = copy_folder(ASSETS / "target", tmp_path / "target", max_position_embeddings=30)
    found = document(run(PROMPT, "--model", small, "--draft", ASSETS / "draft", "-m", -1, "--json"))
    assert found["finish_reason"] == "length"
    assert found["stats"]["prompt_tokens"] + len(found["ids"]) == 30


def test_stop_strings_are_repeatable(run, reference):
    late, early = reference.text[20:24], reference.text[8:12]
    result = run(PROMPT, "-m", 24, "--stop", late, "--stop", early)
    assert result.stdout == reference.text[: reference.text.index(early)] + "\n"


def test_the_seed_decides_the_text(run):
    ids = [document(run(PROMPT, "-m", 16, "--temp", 0.9, "--seed", seed, "--json"))["ids"] for seed in (1, 1, 2)]
    assert ids[0] == ids[1] != ids[2]


def test_a_drawn_seed_is_shown(run):
    found = document(run(PROMPT, "-m", 4, "--temperature", 0.9, "--json"))
    again = document(run(PROMPT, "-m", 4, "--temperature", 0.9, "--seed", found["stats"]["seed"], "--json"))
    assert again["ids"] == found["ids"]


@pytest.mark.parametrize("policy", ["plain", "fixed:2", "threshold:0.5", "threshold:0"])
def test_every_policy_writes_the_same_text(run, reference, policy):
    found = document(run(PROMPT, "-m", 24, "--policy", policy, "--json"))
    assert found["ids"] == list(reference.ids)
    assert found["stats"]["policy"] == policy and (found["stats"]["drafted"] > 0) == (policy != "plain")


@pytest.mark.parametrize("bits", ["8", "4"])
def test_a_quantised_draft_writes_the_same_text(run, reference, tmp_path, bits):
    draft = change_weights(copy_folder(ASSETS / "draft", tmp_path / "draft", quantization=None), dequantised)
    args = ["--model", ASSETS / "target", "--draft", draft, "--draft-bits", bits]
    found = document(run(PROMPT, "-m", 24, "--json", *args))
    assert found["ids"] == list(reference.ids) and found["stats"]["tau"] > 1


def dequantised(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    stems = [name.removesuffix(".scales") for name in weights if name.endswith(".scales")]
    for stem in stems:
        packed, scales, biases = (weights.pop(f"{stem}.{part}") for part in ("weight", "scales", "biases"))
        weights[f"{stem}.weight"] = mx.dequantize(packed, scales, biases, group_size=32, bits=8)
    return weights


def test_options_reach_the_sampling(run, monkeypatch):
    seen = {}
    monkeypatch.setattr(cli, "stream_generate", lambda pair, ids, **options: seen.update(options) or iter(()))
    args = ("--temp 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --repetition-penalty 1.2 --repetition-context-size 30 "
            "--presence-penalty 0.3 --frequency-penalty 0.4 --logit-bias 198=-1.5 --logit-bias 7=2 --seed 5 "
            "--kv-bits 8 --kv-group-size 32 --quantized-kv-start 9 --prefill-step-size 64 --timing --policy fixed:2")
    run(PROMPT, *args.split())
    assert seen["sampling"] == mlx_dspark.Sampling(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2, repetition_context_size=30,
        presence_penalty=0.3, frequency_penalty=0.4, logit_bias={198: -1.5, 7: 2.0}, seed=5,
    )
    assert seen["kv"] == mlx_dspark.KVOptions(8, 32, 9)
    assert (seen["prefill_step"], seen["timing"], seen["policy"]) == (64, True, "fixed:2")


def test_the_pair_can_come_from_the_environment(run, reference):
    env = {"MLX_DSPARK_MODEL": str(ASSETS / "target"), "MLX_DSPARK_DRAFT": str(ASSETS / "draft")}
    found = document(run(PROMPT, "-m", 24, "--json", env=env))
    assert found["ids"] == list(reference.ids) and found["stats"]["gamma"] == 7


# --- the command: drafts on a terminal


def test_show_drafts_without_a_terminal_is_plain_text(run, reference):
    result = run(PROMPT, "-m", 24, "--show-drafts")
    assert (result.exit_code, result.stdout) == (0, reference.text + "\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch) -> Callable[..., str]:
    """What the command writes to a terminal, colours included."""

    def run(*args: str) -> str:
        monkeypatch.setattr(sys, "stdout", Terminal())
        command.main([*args, "--show-drafts", "--no-stats"], standalone_mode=False)
        return sys.stdout.getvalue()

    return run


def test_show_drafts_colours_on_a_terminal(terminal, pair, reference):
    shown = terminal(PROMPT, "-m", "24")
    green, red, strike = "\x1b[32m", "\x1b[31m", "\x1b[9m"
    assert green in shown
    rounds = [chunk.round for chunk in mlx_dspark.stream_generate(pair, PROMPT, max_tokens=24) if chunk.round]
    rejected = next(landed.drafts[landed.accepted :] for landed in rounds if landed.accepted < len(landed.drafts))
    assert f"{red}{strike}{pair.tokenizer.decode(list(rejected))}\x1b[0m" in shown
    assert without_colours(shown) == reference.text + "\n"


@pytest.mark.parametrize("case", ["stop-string", "stop-token", "split-characters"])
def test_show_drafts_shows_the_text_and_nothing_else(terminal, pair, reference, case):
    halves = pair.tokenizer.encode("é", add_special_tokens=False)
    options = {
        "stop-string": {"stop": [reference.text[20:24]]},
        "stop-token": {"logit_bias": {0: 100.0}},
        "split-characters": {"logit_bias": dict.fromkeys(halves, 60.0)},
    }[case]
    args = [f"--stop={text}" for text in options.get("stop", ())]
    args += [f"--logit-bias={token}={value}" for token, value in options.get("logit_bias", {}).items()]
    text = mlx_dspark.generate(pair, PROMPT, max_tokens=24, **options).text
    assert without_colours(terminal(PROMPT, "-m", "24", *args)).removesuffix("\n") == text.removesuffix("\n")


def without_colours(shown: str) -> str:
    """What is left when rejected drafts and colours are taken out."""
    return re.sub(r"\x1b\[\d+m", "", re.sub(r"\x1b\[31m\x1b\[9m.*?\x1b\[0m", "", shown, flags=re.DOTALL))


def test_notes_are_for_terminals(monkeypatch):
    notes = cli.Notes()
    notes.say("never seen")
    monkeypatch.setattr(sys, "stderr", Terminal())
    for text in ("once", "once", "twice"):
        notes.say(text)
    assert sys.stderr.getvalue() == "note: once\nnote: twice\n"


# --- the command: interrupted


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C after three chunks."""
    original = cli.stream_generate

    def stream(*args, **options):
        yield from itertools.islice(original(*args, **options), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "stream_generate", stream)


def test_an_interrupt_keeps_text_and_statistics(run, interrupted, reference):
    result = run(PROMPT, "-m", 24, "--stats")
    assert result.exit_code == 130
    assert result.stdout.strip() and reference.text.startswith(result.stdout.removesuffix("\n"))
    assert "tau" in result.stderr and "Traceback" not in result.stderr


def test_an_interrupt_still_gives_a_document(run, interrupted, reference):
    result = run(PROMPT, "-m", 24, "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["finish_reason"]) == (130, "interrupted")
    assert found["ids"] == list(reference.ids[: len(found["ids"])]) and found["ids"]
    assert found["stats"]["generated_tokens"] == len(found["ids"])


INTERRUPTIBLE = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.argv[0] = "generate"
runpy.run_module("mlx_dspark.generate", run_name="__main__")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_in_a_real_process(reference):
    args = [sys.executable, "-c", INTERRUPTIBLE, PROMPT, "--raw", "-m", "1900", "--stats"]
    with subprocess.Popen(args, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            first = process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    text, notes = (first + out).decode(), err.decode()
    assert process.returncode == 130, notes
    shared = min(len(text.rstrip()), len(reference.text))
    assert text and text[:shared] == reference.text[:shared]
    assert "peak memory" in notes and "Traceback" not in notes


# --- the command: what it refuses


@pytest.mark.parametrize(
    ("args", "fragments"),
    [
        pytest.param(["a", "-p", "b"], ["PROMPT and --prompt exclude each other"], id="two-prompts"),
        pytest.param(["a", "-f", "b"], ["PROMPT and --prompt-file"], id="prompt-and-file"),
        pytest.param(["-p", "a", "-f", "b"], ["--prompt and --prompt-file"], id="option-and-file"),
        pytest.param(["a", "--logprobs"], ["--logprobs", "add --json"], id="logprobs-without-json"),
        pytest.param(["a", "--json", "--top-logprobs", "2"], ["--top-logprobs", "add --logprobs"], id="top-logprobs"),
        pytest.param(["a", "--json", "--logprobs", "--top-logprobs", "-1"], ["--top-logprobs", "-1"], id="below-0"),
        pytest.param(["a", "--json", "--show-drafts"], ["--json and --show-drafts exclude"], id="json-and-drafts"),
        pytest.param(["a", "--logit-bias", "x"], ["'x' is not ID=VALUE"], id="logit-bias"),
        pytest.param(["a", "--dtype", "int8"], ["'int8'", "float32"], id="dtype"),
        pytest.param(["a", "--draft-bits", "3"], ["'3'", "8"], id="draft-bits"),
        pytest.param(["a", "--max-token", "3"], ["--max-token", "--max-tokens"], id="misspelt-option"),
        pytest.param(["a", "-m", "many"], ["'many'"], id="not-a-number"),
    ],
)
def test_usage_errors_exit_2(run, args, fragments):
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage: mlx_dspark.generate" in result.stderr and "Traceback" not in result.stderr
    assert all(fragment in result.stderr for fragment in fragments), result.stderr


TARGET, DRAFT = ASSETS / "target", ASSETS / "draft"


def empty(tmp: Path) -> Path:
    (tmp / "empty").mkdir()
    return tmp / "empty"


BAD_TARGETS = [  # id, folder builder, fragments
    ("missing-path", lambda tmp: tmp / "nowhere", ["nowhere does not exist", "give a model folder"]),
    ("not-a-model-folder", empty, ["empty has no config.json", "give a model folder"]),
    ("a-file", lambda tmp: TARGET / "config.json", ["config.json is a file", "give the folder"]),
    ("no-weights", lambda tmp: without(copy_folder(TARGET, tmp / "t"), "model.safetensors"),
     ["has no model*.safetensors", "download is incomplete"]),
    ("missing-shard",
     lambda tmp: with_index(copy_folder(TARGET, tmp / "t"), "model.safetensors", "model-00002-of-00002.safetensors"),
     ["model-00002-of-00002.safetensors is missing", "run it again"]),
    ("stray-shard",
     lambda tmp: with_index(copy_folder(TARGET, tmp / "t"), "model-00001-of-00001.safetensors"),
     ["model-00001-of-00001.safetensors is missing"]),
    ("broken-index", lambda tmp: broken_index(copy_folder(TARGET, tmp / "t")),
     ["is not a safetensors index", "download it again"]),
    ("truncated", lambda tmp: cut_short(copy_folder(TARGET, tmp / "t")), ["model.safetensors is truncated", "again"]),
    ("not-safetensors", lambda tmp: page_instead(copy_folder(TARGET, tmp / "t")),
     ["model.safetensors", "download it again"]),
    ("nan", lambda tmp: change_weights(copy_folder(TARGET, tmp / "t"), one_nan),
     ["holds NaN or infinity", "download it again"]),
    ("config-not-json", lambda tmp: broken_config(copy_folder(TARGET, tmp / "t")),
     ["config.json is not JSON", "download it again"]),
    ("unknown-architecture", lambda tmp: copy_folder(TARGET, tmp / "t", model_type="nothing"),
     ["cannot be loaded as an mlx-lm text model", "nothing"]),
    ("no-tokenizer", lambda tmp: without(copy_folder(TARGET, tmp / "t"), "tokenizer.json"),
     ["has no usable tokenizer"]),
]


def broken_index(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text("[]")
    return folder


def broken_config(folder: Path) -> Path:
    (folder / "config.json").write_text("{")
    return folder


def page_instead(folder: Path) -> Path:
    (folder / "model.safetensors").write_text("<html>not found</html>")
    return folder


def stray(folder: Path) -> Path:
    shutil.copyfile(folder / "model.safetensors", folder / "model-00009-of-00009.safetensors")
    return with_index(folder, "model.safetensors")


BAD_DRAFTS = [
    ("missing-path", lambda tmp: tmp / "nowhere", ["nowhere does not exist"]),
    ("no-config", lambda tmp: without(copy_folder(DRAFT, tmp / "d"), "config.json"),
     ["has no config.json", "give a model folder"]),
    ("incomplete-config", lambda tmp: copy_folder(DRAFT, tmp / "d", mask_token_id=None), ["no 'mask_token_id'"]),
    ("width", lambda tmp: GOLDEN / "qwen3_dspark_vanilla",
     ["hidden width is 64", "is 256", "use the draft made for this target"]),
    ("layers", lambda tmp: copy_folder(DRAFT, tmp / "d", num_target_layers=12),
     ["made for 12 target layers", "has 6", "use the draft made for this target"]),
    ("taps", lambda tmp: copy_folder(DRAFT, tmp / "d", target_layer_ids=[1, 2, 5], num_target_layers=None),
     ["taps layer 5", "layers 0 to 5", "use the draft made for this target"]),
    ("last-layer-tapped", lambda tmp: copy_folder(DRAFT, tmp / "d", target_layer_ids=[1, 2, 5]),
     ["[1, 2, 5]", "cannot be tapped"]),
    ("taps-not-rising", lambda tmp: copy_folder(DRAFT, tmp / "d", target_layer_ids=[2, 1, 4]),
     ["[2, 1, 4]", "must increase"]),
    ("other-weights", lambda tmp: copy_folder(DRAFT, tmp / "d", intermediate_size=512),
     ["config.json asks for", "do not belong together"]),
    ("too-few-tensors", lambda tmp: copy_folder(DRAFT, tmp / "d", num_hidden_layers=2), ["layers.1.", "is missing"]),
    ("missing-shard", lambda tmp: with_index(copy_folder(DRAFT, tmp / "d"), "model.safetensors", "model-2.safetensors"),
     ["model-2.safetensors is missing", "the download is incomplete"]),
    ("stray-shard", lambda tmp: stray(copy_folder(DRAFT, tmp / "d")),
     ["model-00009-of-00009.safetensors is not named by the index", "remove the stray file"]),
    ("truncated", lambda tmp: cut_short(copy_folder(DRAFT, tmp / "d")), ["model.safetensors is truncated"]),
    ("nan", lambda tmp: change_weights(copy_folder(DRAFT, tmp / "d"), one_nan), ["holds NaN or infinity"]),
]


@pytest.mark.parametrize("build, fragments", [pytest.param(*case[1:], id=case[0]) for case in BAD_TARGETS])
def test_a_bad_target_is_one_line(run, tmp_path, build, fragments):
    refused(run(PROMPT, "-m", 4, "--model", build(tmp_path)), *fragments)


@pytest.mark.parametrize("build, fragments", [pytest.param(*case[1:], id=case[0]) for case in BAD_DRAFTS])
def test_a_bad_draft_is_one_line(run, tmp_path, build, fragments):
    refused(run(PROMPT, "-m", 4, "--model", TARGET, "--draft", build(tmp_path)), *fragments)


def test_a_stray_shard_of_the_target_is_one_line(run, tmp_path):
    refused(run(PROMPT, "--model", stray(copy_folder(TARGET, tmp_path / "t"))), "is not named by the index")


def test_a_draft_of_another_vocabulary_is_one_line(run, tmp_path):
    target, draft = golden_target(tmp_path / "target"), golden_draft(tmp_path / "draft", 300)
    refused(run("a", "-m", 4, "--model", target, "--draft", draft),
            "vocabulary has 300 rows", "has 320", "use the draft made for this target")


def test_the_draft_of_the_same_vocabulary_is_taken(tmp_path):
    pair = mlx_dspark.load(golden_target(tmp_path / "target"), golden_draft(tmp_path / "draft", 320))
    assert len(mlx_dspark.generate(pair, [1, 2, 3], max_tokens=8).ids) <= 8


def test_errors_have_their_own_classes(tmp_path):
    with pytest.raises(PairError):
        mlx_dspark.load(TARGET, GOLDEN / "qwen3_dspark_vanilla")
    with pytest.raises(FormatError):
        mlx_dspark.load(tmp_path)


BAD_OPTIONS = [
    ("empty-prompt", [""], ["the prompt is empty", "give some text"]),
    ("unknown-policy", ["a", "--policy", "fast"], ["'fast'", "plain, fixed:N, threshold:X, paper"]),
    ("policy-too-wide", ["a", "--policy", "fixed:99"], ["'fixed:99'", "1 to 7"]),
    ("policy-without-draft", ["a", "--policy", "fixed", "--model", str(TARGET)], ["'fixed'", "give --draft"]),
    ("prompt-too-long", ["word " * 3000], ["the context 2048", "shorten the prompt"]),
    ("prompt-and-answer-too-long", ["a", "-m", "2048"], ["max_tokens 2048", "2048", "give at most"]),
    ("max-tokens", ["a", "-m", "-2"], ["max_tokens is -2", "-1"]),
    ("temperature", ["a", "--temp", "nan"], ["temperature is nan", "finite"]),
    ("temperature-infinite", ["a", "--temp", "inf"], ["temperature is inf", "finite"]),
    ("top-p", ["a", "--top-p", "-0.5"], ["top_p is -0.5", "0"]),
    ("top-k", ["a", "--top-k", "-1"], ["top_k is -1", "0 (off)"]),
    ("min-p", ["a", "--min-p", "2"], ["min_p is 2", "0 (off) to 1"]),
    ("repetition-penalty", ["a", "--repetition-penalty", "-1"], ["repetition_penalty is -1", "at least 0"]),
    ("seed", ["a", "--seed", "-1"], ["seed is -1", "2**64"]),
    ("kv-bits", ["a", "--kv-bits", "5"], ["kv_bits is 5", "2, 3, 4, 6 or 8"]),
    ("kv-group-size", ["a", "--kv-bits", "8", "--kv-group-size", "7"], ["kv_group_size is 7", "32, 64 or 128"]),
    ("prefill-step", ["a", "--prefill-step-size", "0"], ["prefill_step is 0", "at least 1"]),
    ("empty-stop", ["a", "--stop", ""], ["a stop string is empty", "leave it out"]),
    ("system-without-template", ["a", "--system", "s"], ["a system message needs a chat template"]),
    ("system-raw", ["a", "--raw", "--system", "s"], ["needs a chat template", "leave --raw out"]),
    ("thinking-without-template", ["a", "--thinking"], ["thinking on or off needs a chat template"]),
]


@pytest.mark.parametrize("args, fragments", [pytest.param(*case[1:], id=case[0]) for case in BAD_OPTIONS])
def test_a_bad_option_is_one_line(run, args, fragments):
    refused(run(*args), *fragments)


@pytest.mark.parametrize(
    ("name", "content", "fragments"),
    [
        pytest.param("missing.txt", None, ["missing.txt cannot be read", "No such file"], id="missing"),
        pytest.param("", None, ["cannot be read", "directory"], id="a-folder"),
        pytest.param("latin1.txt", "café".encode("latin-1"), ["latin1.txt is not UTF-8", "convert"], id="latin-1"),
        pytest.param("empty.txt", b"", ["the prompt is empty"], id="empty"),
    ],
)
def test_a_bad_prompt_file_is_one_line(run, tmp_path, name, content, fragments):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    refused(run("-f", tmp_path / name), *fragments)


@pytest.mark.parametrize("stdin", [b"", "café".encode("latin-1")], ids=["empty", "latin-1"])
def test_bad_stdin_is_one_line(run, stdin):
    refused(run("-", input=stdin), "stdin is not UTF-8" if stdin else "the prompt is empty")


@pytest.mark.parametrize("name", ["no/such/folder.jsonl", ""], ids=["missing-folder", "a-folder"])
def test_a_bad_record_path_is_one_line_before_any_work(run, tmp_path, monkeypatch, name):
    monkeypatch.setattr(cli, "open_pair", lambda *args, **kwargs: pytest.fail("the model was loaded"))
    refused(run("a", "--record", tmp_path / name), str(tmp_path), "cannot be written")


@pytest.mark.parametrize(
    ("error", "fragments"),
    [
        pytest.param(ConnectionError("no route"), ["owner/name", "could not be downloaded", "check the network"],
                     id="offline"),
        pytest.param("RepositoryNotFoundError", ["owner/name", "check the spelling"], id="no-such-repo"),
        pytest.param("GatedRepoError", ["owner/name is gated", "hf auth login"], id="gated"),
        pytest.param("RevisionNotFoundError", ["owner/name has no revision 'main2'", "--revision"], id="revision"),
    ],
)
def test_a_failed_download_is_one_line(run, monkeypatch, error, fragments):
    import huggingface_hub
    from huggingface_hub import errors

    def download(*args, **kwargs):
        if isinstance(error, Exception):
            raise error
        kind = getattr(errors, error)
        raise kind.__new__(kind, "not\nthere")  # __init__ wants an HTTP response

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    refused(run("a", "--model", "owner/name", "--revision", "main2"), *fragments)


def test_a_download_takes_the_revision(monkeypatch, tmp_path):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download",
                        lambda repo, revision, allow_patterns: asked.append((repo, revision)) or str(tmp_path))
    assert resolve("owner/name", "v2") == tmp_path and asked == [("owner/name", "v2")]


def test_the_traceback_is_there_for_developers(run):
    result = run("", env={"MLX_DSPARK_DEBUG": "1"})
    assert isinstance(result.exception, ValueError) and "the prompt is empty" in str(result.exception)


def test_a_real_process_fails_with_one_line(tmp_path):
    done = subprocess.run([sys.executable, "-m", "mlx_dspark.generate", "hi", "--model", str(tmp_path)],
                          cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Error: {tmp_path} has no config.json: give a model folder or a Hugging Face repo id\n"


# --- help


@pytest.mark.parametrize(
    ("args", "code", "fragments"),
    [
        pytest.param(["mlx_dspark", "-h"], 0, ["generate", "Write text with a target"], id="group"),
        pytest.param(["mlx_dspark", "--version"], 0, [mlx_dspark.__version__], id="version"),
        pytest.param(["mlx_dspark.generate", "--help"], 0, ["--max-tokens", "--draft"], id="module"),
        pytest.param(["mlx_dspark", "generate", "-h"], 0, ["--max-tokens", "--policy"], id="command"),
        pytest.param(["mlx_dspark", "genrate"], 2, ["No such command 'genrate'", "generate"], id="suggestion"),
    ],
)
def test_help_answers_without_mlx(args, code, fragments):
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", *args], cwd=ROOT, capture_output=True, text=True)
    imported = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    said = done.stdout + "\n".join(x for x in done.stderr.splitlines() if not x.startswith("import time:"))
    assert done.returncode == code
    assert "click" in imported, "the import log is empty"
    assert not imported & {"mlx", "mlx.core", "mlx_lm", "transformers", "huggingface_hub", "numpy"}
    assert all(fragment in said for fragment in fragments), said


def test_every_option_has_help():
    bare = {"kv_group_size", "text"}
    assert [p.name for p in command.params if p.name not in bare and not getattr(p, "help", None)] == []


def test_a_record_is_immutable(reference):
    with pytest.raises(dataclasses.FrozenInstanceError):
        reference.text = ""
