"""The converter command: what it prints, what it writes, and what it leaves behind when it fails."""

import errno
import hashlib
import json
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import pytest
from click.testing import CliRunner
from helpers import GOLDEN, golden_draft, golden_pair, golden_target, pair_of, prompt_of, refused, run, tokens_of
from mlx_dspark.convert import open_checkpoint, write
from mlx_dspark.convert.command import command
from mlx_dspark.convert.files import read_header, read_headers
from packagings import HEAD_DIM, HIDDEN, VOCAB, make_head, save, write_deepspec, write_deepspec_sharded
from packagings import write_speculators as speculators

from mlx_dspark.draft import TargetTables
from mlx_dspark.errors import FormatError
from mlx_dspark.load import ASSETS, load, read_draft

HEAD = make_head()
BF16 = make_head(dtype=mx.bfloat16)
TABLES = {"tables.embed_tokens.weight": "embed_tokens.weight", "tables.lm_head.weight": "lm_head.weight"}


def convert(*arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments])


def converted(*arguments):
    result = convert(*arguments)
    assert result.exit_code == 0, result.output
    return result


def raw(folder):
    """Name -> the tensor's bytes."""
    return {name: s.path.read_bytes()[s.start : s.end] for name, s in read_headers(folder).items()}


@pytest.fixture
def source(tmp_path):
    return write_deepspec(tmp_path / "source", HEAD)


# --- facts -------------------------------------------------------------------------------------------------------


def test_dry_run_prints_a_table_and_writes_nothing(source, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    result = converted("--draft", source, "--dry-run", "--mlx-path", tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["packaging"] == "DeepSpec" and lines["gamma"] == "5" and lines["taps"] == "[0, 2, 4]"
    assert lines["embed_tokens"] == lines["lm_head"] == "own"
    assert len({line.index(line.split(maxsplit=1)[1]) for line in result.stdout.splitlines()}) == 1  # one column
    assert result.stderr == ""


def test_dry_run_as_json(tmp_path):
    folder = speculators(tmp_path / "s", HEAD, own_tables=False)
    facts = json.loads(converted("--draft", folder, "--dry-run", "--json").stdout)
    assert (facts["packaging"], facts["gamma"], facts["taps"]) == ("speculators", 5, [0, 2, 4])
    assert facts["embed_tokens"] == facts["lm_head"] == "target's" and facts["dtypes"] == ["F32"]
    assert facts["bytes"] == sum(array.nbytes for array in HEAD.body.values())
    assert facts["rope"] == {"theta": 10000.0, "interleaved": False, "scaling": None}


def test_json_after_converting_is_one_document(source, tmp_path):
    result = converted("--draft", source, "--mlx-path", tmp_path / "out", "--json")
    assert json.loads(result.stdout)["packaging"] == "DeepSpec" and result.stderr == ""


def test_help_needs_no_mlx():
    code = ("import sys; sys.argv = ['x', '--help']\nfrom mlx_dspark.convert.command import main\n"
            "try: main()\nexcept SystemExit: pass\nassert 'mlx.core' not in sys.modules, 'mlx was imported'")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--dry-run" in done.stdout, done.stderr


@pytest.mark.parametrize("arguments", [["--draft", "x"], [], ["--draft", "x", "--mlx-path", "o", "--q-bits", "3"]],
                         ids=["no-place", "no-draft", "three-bits"])
def test_usage_errors_exit_2(arguments):
    result = convert(*arguments)
    assert result.exit_code == 2 and "Usage:" in result.stderr


# --- what is written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, head", [("BF16", BF16), ("F32", HEAD)], ids=["bf16", "f32"])
@pytest.mark.parametrize("put", [write_deepspec, write_deepspec_sharded], ids=["one-file", "shards"])
def test_weights_stay_byte_for_byte(put, dtype, head, tmp_path):
    source, out = put(tmp_path / "source", head), tmp_path / "deep" / "out"
    converted("--draft", source, "--mlx-path", out)
    stored, checkpoint = raw(source), open_checkpoint(source)
    assert raw(out) == {name: stored[theirs] for name, theirs in checkpoint.names.items()}
    assert {tensor.dtype for tensor in read_headers(out).values()} == {dtype}
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    assert open_checkpoint(out).spec == checkpoint.spec
    assert not list(out.parent.glob(".*"))
    mx.eval(mx.load(str(out / "model.safetensors")))  # mlx agrees that it is a safetensors file


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [32, 64])
def test_quantisation(bits, group, source, tmp_path, monkeypatch):
    monkeypatch.setattr(write, "CHUNK", 1000)  # also where a matrix comes in pieces
    out = tmp_path / "out"
    converted("--draft", source, "--mlx-path", out, "-q", "--q-bits", bits, "--q-group-size", group)
    assert json.loads((out / "config.json").read_text())["quantization"] == {"bits": bits, "group_size": group}
    draft = read_draft(out)
    for name, module in draft.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and not hasattr(module, "bits"):
            assert name.startswith("confidence_head") or module.weight.shape[-1] % group, name
    attention = draft.backbone.layers[1].self_attn
    assert (attention.q_proj.bits, attention.q_proj.group_size) == (bits, group)
    assert hasattr(draft.tables.embed_tokens, "bits") and not hasattr(draft.confidence_head.proj, "bits")
    assert hasattr(draft.markov_head.markov_w1, "bits") == (group == 32)  # its rows are 32 wide
    wanted = mx.quantize(HEAD.weights["fc.weight"], group, bits)
    for ours, theirs in zip((draft.backbone.fc.weight, draft.backbone.fc.scales, draft.backbone.fc.biases), wanted):
        assert mx.array_equal(ours, theirs)


def test_quantising_bf16_keeps_bf16_scales(tmp_path):
    out = tmp_path / "out"
    converted("--draft", write_deepspec(tmp_path / "s", BF16), "--mlx-path", out, "-q")
    kinds = {name: tensor.dtype for name, tensor in read_headers(out).items()}
    assert kinds["backbone.fc.weight"] == "U32" and kinds["backbone.fc.scales"] == kinds["backbone.fc.biases"] == "BF16"
    wanted = mx.quantize(BF16.weights["fc.weight"], 64, 8)
    draft = read_draft(out)
    assert mx.array_equal(draft.backbone.fc.scales, wanted[1]) and mx.array_equal(draft.backbone.fc.weight, wanted[0])


def test_requantising_is_refused(source, tmp_path):
    converted("--draft", source, "--mlx-path", tmp_path / "a", "-q")
    refused(convert("--draft", tmp_path / "a", "--mlx-path", tmp_path / "b", "-q"), "quantised already", "-q")
    assert not (tmp_path / "b").exists()
    converted("--draft", tmp_path / "a", "--mlx-path", tmp_path / "c")  # copying it is fine
    assert raw(tmp_path / "a") == raw(tmp_path / "c")


def target_folder(path, head, **changes):
    weights = {"model.embed_tokens.weight": head.weights["embed_tokens.weight"],
               "lm_head.weight": head.weights["lm_head.weight"], **changes}
    return save(path, {"architectures": ["Qwen3ForCausalLM"]}, {k: v for k, v in weights.items() if v is not None})


def flipped(array):
    """One bit of the last number changed."""
    return mx.view(mx.view(array, mx.uint8).flatten().at[-1].add(1).reshape(array.shape[0], -1), array.dtype)


EQUAL = {
    "both": ({}, {"embed_tokens", "lm_head"}),
    "head-differs-in-a-byte": ({"lm_head.weight": flipped(HEAD.weights["lm_head.weight"])}, {"embed_tokens"}),
    "embedding-differs-in-a-byte": ({"model.embed_tokens.weight": flipped(HEAD.weights["embed_tokens.weight"])},
                                    {"lm_head"}),
    "tied-target": ({"lm_head.weight": None}, {"embed_tokens"}),
    "another-dtype": ({"lm_head.weight": HEAD.weights["lm_head.weight"].astype(mx.float16)}, {"embed_tokens"}),
    "more-rows": ({"lm_head.weight": mx.zeros((VOCAB + 4, HIDDEN))}, {"embed_tokens"}),
}


@pytest.mark.parametrize("changes, dropped", EQUAL.values(), ids=EQUAL.keys())
def test_only_byte_equal_tables_are_left_out(changes, dropped, source, tmp_path, monkeypatch):
    monkeypatch.setattr(write, "CHUNK", 1000)  # the tables are many pieces, and none fits evenly
    out, target = tmp_path / "out", target_folder(tmp_path / "target", HEAD, **changes)
    facts = json.loads(converted("--draft", source, "--target", target, "--mlx-path", out, "--json").stdout)
    assert {t for t in ("embed_tokens", "lm_head") if facts[t].startswith("left out")} == dropped
    assert {name.split(".")[1] for name in TABLES if name not in read_headers(out)} == dropped
    left_out = json.loads((out / "config.json").read_text())["mlx_dspark"]["left_out"]
    assert {name.split(".")[1] for name in left_out} == dropped
    draft = read_draft(out)
    assert ("embed_tokens" in draft.tables, "lm_head" in draft.tables) == (
        "embed_tokens" not in dropped, "lm_head" not in dropped)


def test_a_float32_target_s_tables_are_compared_in_bfloat16(tmp_path, monkeypatch):
    """A draft is trained into bfloat16, so that it holds the rounded tables of such a target."""
    monkeypatch.setattr(write, "CHUNK", 1000)
    target = target_folder(tmp_path / "target", HEAD)  # float32
    other = target_folder(tmp_path / "other", HEAD, **{"lm_head.weight": HEAD.weights["lm_head.weight"] * 1.02})
    source = write_deepspec(tmp_path / "half", BF16)
    for folder, dropped in ((target, {"embed_tokens", "lm_head"}), (other, {"embed_tokens"})):
        out = tmp_path / f"out-{folder.name}"
        facts = json.loads(converted("--draft", source, "--target", folder, "--mlx-path", out, "--json").stdout)
        assert {t for t in ("embed_tokens", "lm_head") if facts[t].startswith("left out")} == dropped
        assert facts["embed_tokens"] == "left out: byte-equal to the target's in bfloat16"


def test_model_card_and_config_say_where_it_came_from(tmp_path):
    revision = "0123456789abcdef" * 2 + "01234567"
    source, out = tmp_path / "models--a--b" / "snapshots" / revision, tmp_path / "out"
    write_deepspec_sharded(source, HEAD)
    converted("--draft", source, "--mlx-path", out)
    stored = json.loads((out / "config.json").read_text())["mlx_dspark"]["source"]
    hashes = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in source.glob("*.safetensors")}
    assert stored == {"name": str(source), "revision": revision, "packaging": "DeepSpec", "sha256": hashes}
    card = (out / "README.md").read_text()
    for word in [str(source), revision, "DeepSpec", *hashes, *hashes.values(), "| taps | `[0, 2, 4]` |", "block_size"]:
        assert word in card
    assert card.startswith("---\n")


# --- what is left behind -------------------------------------------------------------------------------------


def test_an_existing_folder_is_refused(source, tmp_path):
    (tmp_path / "out").mkdir()
    refused(convert("--draft", source, "--mlx-path", tmp_path / "out"), str(tmp_path / "out"), "exists")
    assert list((tmp_path / "out").iterdir()) == []


FAULTS = {
    "disk-full": (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    "interrupt": (KeyboardInterrupt(), "Aborted!"),
    "file-shorter-than-said": (ValueError("cut"), "cut"),
    "no-memory": (MemoryError(), "MemoryError"),
}


def failing(fault, after):
    """Something that is called once per tensor and raises when `after` are written."""
    written = iter(range(after))

    def call(*arguments):
        if next(written, None) is None:
            raise fault

    return call


@pytest.mark.parametrize("place", ["first-tensor", "in-the-middle", "after-the-weights"])
@pytest.mark.parametrize("fault, words", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("options", [[], ["-q"]], ids=["plain", "quantised"])
def test_an_interrupted_write_leaves_nothing(options, fault, words, place, source, tmp_path, monkeypatch):
    if place == "after-the-weights":
        monkeypatch.setattr(write, "_card", failing(fault, 0))
    else:
        monkeypatch.setattr("mlx_dspark.commands.Notes.progress", failing(fault, 0 if place == "first-tensor" else 17))
    result = convert("--draft", source, "--mlx-path", tmp_path / "out", *options)
    assert result.exit_code == 1 and result.stdout == ""
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    monkeypatch.undo()
    converted("--draft", source, "--mlx-path", tmp_path / "out", *options)


def test_a_killed_write_leaves_nothing_that_loads(source, tmp_path):
    """No chance to clean up: the folder lies under another name, does not load and is replaced next time."""
    code = f"""
import os, signal, pathlib
from mlx_dspark.convert import open_checkpoint
from mlx_dspark.convert.write import Source, write_draft
def progress(name, seen=[]):
    seen.append(name)
    if len(seen) == 12:
        os.kill(os.getpid(), signal.SIGKILL)
write_draft(open_checkpoint(pathlib.Path({str(source)!r})), pathlib.Path({str(tmp_path / "out")!r}), Source("x", None),
            progress=progress)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -9
    rest = [path for path in tmp_path.iterdir() if path.name != "source"]
    assert [path.name for path in rest] == [".out.partial"]
    with pytest.raises(FormatError):
        read_draft(rest[0])
    converted("--draft", source, "--mlx-path", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


# --- bad sources ------------------------------------------------------------------------------------------------


def test_missing_shard_and_stray_file(tmp_path):
    source = write_deepspec_sharded(tmp_path / "s", HEAD)
    shard = source / "model-00002-of-00003.safetensors"
    hidden = shard.rename(tmp_path / "hidden")
    refused(convert("--draft", source, "--dry-run"), shard.name, "missing")
    hidden.rename(shard)
    converted("--draft", source, "--dry-run")
    mx.save_safetensors(str(source / "model-extra.safetensors"), {"x": mx.zeros((1,))})
    refused(convert("--draft", source, "--dry-run"), "model-extra.safetensors", "stray")


def test_two_files_without_an_index_must_not_overlap(tmp_path):
    source = write_deepspec(tmp_path, HEAD)
    mx.save_safetensors(str(source / "model-2.safetensors"), {"norm.weight": mx.zeros((HIDDEN,))})
    refused(convert("--draft", source, "--dry-run"), "norm.weight", "second time")


def test_sources_that_do_not_exist(tmp_path):
    refused(convert("--draft", tmp_path / "nothing", "--dry-run"), str(tmp_path / "nothing"), "does not exist")
    refused(convert("--draft", tmp_path, "--dry-run"), "config.json")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    refused(convert("--draft", tmp_path / "x.gguf", "--dry-run"), "GGUF")


def test_a_target_without_weights_is_named(source, tmp_path):
    (tmp_path / "target").mkdir()
    result = convert("--draft", source, "--target", tmp_path / "target", "--mlx-path", tmp_path / "out")
    refused(result, str(tmp_path / "target"), "safetensors")
    assert not (tmp_path / "out").exists()


# --- use -------------------------------------------------------------------------------------------------------------


def test_a_converted_draft_writes_the_same_tokens(tmp_path):
    name, out = "qwen3_dspark_vanilla", tmp_path / "out"
    converted("--draft", GOLDEN / name, "--target", GOLDEN / "qwen3_target", "--mlx-path", out)
    draft = read_draft(out)
    assert draft.tables.incomplete and not golden_draft(name).tables.incomplete
    target = golden_target()
    draft.borrow(TargetTables(target.embed, target.head))
    prompt = prompt_of("golden", 12)
    before, after = (run(pair, prompt, 60) for pair in (golden_pair(name), pair_of(target.model, draft)))
    assert [r.drafts for r in before] == [r.drafts for r in after]
    assert tokens_of(before) == tokens_of(after)


def test_a_converted_quantised_draft_loads_in_a_pair(tmp_path):
    """The draft in the package is stored with 8 bits: converted, it is the same draft."""
    out = tmp_path / "out"
    converted("--draft", ASSETS / "draft", "--mlx-path", out)
    pair, before = load(ASSETS / "target", out), load()
    assert isinstance(pair.draft.backbone.fc, nn.QuantizedLinear)
    prompt = prompt_of("embedded", 40)
    assert [r.drafts for r in run(pair, prompt, 40)] == [r.drafts for r in run(before, prompt, 40)]


# --- memory -------------------------------------------------------------------------------------------------------

SHARD = 64 * 2**20
MEASURE = """
import resource, sys
from pathlib import Path
import mlx.core as mx

def highest():  # on Linux ru_maxrss starts with the parent's
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])

from mlx_dspark.convert.command import command
from mlx_dspark.convert import write, checkpoint
import mlx_dspark.hub
mx.eval(mx.quantize(mx.zeros((64, 64))))
before = highest()
command(sys.argv[1:], standalone_mode=False)
print("PEAK", highest() - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """About 200 MB of bf16 in shards of 64 MB; each table fills one, as those of real drafts do."""
    folder, width, inner, rows = tmp_path_factory.mktemp("large"), 1024, 4096, 32_000
    config = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": width, "vocab_size": rows,
              "intermediate_size": inner, "num_hidden_layers": 3, "num_attention_heads": 64, "num_key_value_heads": 8,
              "head_dim": HEAD_DIM, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "block_size": 7, "target_layer_ids": [1],
              "mask_token_id": 1, "markov_rank": 0, "enable_confidence_head": False}
    shapes = {"embed_tokens.weight": (rows, width), "lm_head.weight": (rows, width), "fc.weight": (width, width)}
    for layer in range(3):
        shapes.update({f"layers.{layer}.mlp.{name}.weight": (inner, width) for name in ("gate_proj", "up_proj")})
        shapes[f"layers.{layer}.mlp.down_proj.weight"] = (width, inner)
    shards, index, size = [[]], {}, 0
    for name, shape in shapes.items():
        size += 2 * shape[0] * shape[1]
        if size > SHARD:
            shards.append([])
            size = 2 * shape[0] * shape[1]
        shards[-1].append(name)
    for i, names in enumerate(shards):
        file = f"model-{i}.safetensors"
        mx.save_safetensors(str(folder / file), {n: mx.random.normal(shapes[n]).astype(mx.bfloat16) for n in names})
        index.update(dict.fromkeys(names, file))
        mx.clear_cache()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.mark.parametrize("options", [[], ["-q"]], ids=["plain", "quantised"])
def test_memory_does_not_grow_with_the_checkpoint(options, large, tmp_path):
    arguments = ["--draft", large, "--mlx-path", tmp_path / "out", *options]
    done = subprocess.run([sys.executable, "-c", MEASURE, *map(str, arguments)], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split("PEAK")[1])
    largest = max(path.stat().st_size for path in large.glob("*.safetensors"))
    assert largest > 0.9 * SHARD and sum(p.stat().st_size for p in large.glob("*.safetensors")) > 2.5 * SHARD
    assert peak <= 1.3 * largest + 8 * 2**20, f"{peak / 2**20:.0f} MiB"
    assert read_header(tmp_path / "out" / "model.safetensors").keys() >= {"backbone.layers.2.mlp.gate_proj.weight"}
