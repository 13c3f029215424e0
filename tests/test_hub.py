"""Every way in which a download fails is one line with the repo and the remedy; code in a checkpoint never runs."""

import errno
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from click.testing import CliRunner
from huggingface_hub import errors
from mlx_dspark.convert import open_checkpoint
from mlx_lm.models import minicpm

import mlx_dspark
from mlx_dspark.errors import FormatError
from mlx_dspark.generate import command
from mlx_dspark.hub import _PATTERNS, download_file, resolve, revision_of
from mlx_dspark.load import ASSETS, load, read_draft


class ReadTimeout(Exception):
    """As the HTTP clients that the hub library has used define theirs: no OSError."""


def answer(status: int) -> SimpleNamespace:
    """What the hub's errors need of an HTTP response, whichever client it came from."""
    return SimpleNamespace(status_code=status, headers={}, request=None)


FAILURES = {
    "gated": (errors.GatedRepoError("403\nawaiting a review", response=answer(403)), "is gated", "hf auth login"),
    "no such repo": (errors.RepositoryNotFoundError("404", response=answer(404)), "nor a Hugging Face repo you can see",
                     "check the spelling"),
    "no such revision": (errors.RevisionNotFoundError("404", response=answer(404)), "no revision 'v9'",
                         "--draft-revision"),
    "not in the cache, offline": (errors.LocalEntryNotFoundError("no\nnetwork"), "not completely in the cache (",
                                  "the hub cannot be reached: check the network"),
    "no such file": (errors.EntryNotFoundError("404"), "holds no such file", "look up its name"),
    "bad id": (errors.HFValidationError("a--b"), "is no Hugging Face repo id", "owner/name"),
    "server error": (errors.HfHubHTTPError("502", response=answer(502)),
                     "the hub answers 502", "check the network"),
    "time-out": (ReadTimeout("slow\nnet"), "(ReadTimeout)", "check the network"),
    "system's connection error": (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "(ConnectionRefusedError)",
                                  "check the network"),
    "offline by choice": (errors.OfflineModeIsEnabled("HF_HUB_OFFLINE"), "(OfflineModeIsEnabled)", "local folder"),
    "disk full": (OSError(errno.ENOSPC, "No space left on device"), "No space left on device", "check disk"),
    "cache not writable": (PermissionError(errno.EACCES, "Permission denied"), "Permission denied", "check disk"),
    "something else": (RuntimeError("\n"), "(RuntimeError)", "give a local folder"),
}


@pytest.fixture(params=FAILURES.values(), ids=FAILURES.keys())
def failure(request, monkeypatch):
    """What the message must hold, with a hub that fails so."""
    error, *fragments = request.param

    def download(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return ["owner/name ", *fragments]


def test_a_failed_download_is_one_line(failure):
    with pytest.raises(FormatError) as caught:
        resolve("owner/name", "v9")
    message = str(caught.value)
    assert "\n" not in message and ": " in message
    for fragment in failure:
        assert fragment in message


def test_the_command_says_the_same_of_a_draft(failure):
    result = CliRunner().invoke(command, ["a", "--draft", "owner/name", "--draft-revision", "v9"])
    assert result.exit_code == 1 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: owner/name ") and failure[1] in line


def test_a_file_of_a_dataset_fails_in_the_same_words(failure):
    with pytest.raises(FormatError) as caught:
        download_file("owner/name", "gsm8k.jsonl")
    message = str(caught.value)
    assert message.startswith("owner/name ") and "\n" not in message
    assert failure[1].replace("repo you", "dataset you").replace("revision 'v9'", "revision") in message


def test_a_file_of_a_dataset_is_asked_for_as_one(monkeypatch, tmp_path):
    asked = []

    def download(repo, name, repo_type):
        asked.append((repo, name, repo_type))
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert download_file("owner/name", "gsm8k.jsonl") == tmp_path / "gsm8k.jsonl"
    assert asked == [("owner/name", "gsm8k.jsonl", "dataset")]


def test_a_download_takes_name_and_revision(monkeypatch, tmp_path):
    asked = []

    def download(repo, revision, allow_patterns):
        asked.append((repo, revision, allow_patterns))
        return tmp_path

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("owner/name", "v2") == tmp_path and asked == [("owner/name", "v2", _PATTERNS)]
    assert "README.md" in _PATTERNS  # its base_model says what a conversion was made from
    assert not any(pattern.endswith(".py") or pattern == "*" for pattern in _PATTERNS)


@pytest.mark.parametrize("name, fragments", [
    ("nowhere", ["nowhere does not exist", "owner/name"]),
    ("a/b/c", ["a/b/c does not exist"]),
    ("draft.gguf", ["is a GGUF file", "safetensors"]),
    ("file.bin", ["is a file", "give the folder"]),
])
def test_what_is_no_repo_is_not_asked_for(name, fragments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file.bin").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: pytest.fail("asked the hub"))
    with pytest.raises(FormatError) as caught:
        resolve(name)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_a_partial_download_is_named(monkeypatch, tmp_path):
    """What an interrupted download leaves: the index, and not all of its shards."""
    folder = tmp_path / "t"
    shutil.copytree(ASSETS / "draft", folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {
        "a": "model.safetensors", "b": "model-2.safetensors"}}))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(folder))
    with pytest.raises(FormatError, match="model-2.safetensors is missing .* run it again"):
        load(None, "owner/name")


def test_the_revision_of_a_snapshot(tmp_path):
    commit = "0123456789" * 4
    assert revision_of(tmp_path / "snapshots" / commit) == commit
    assert revision_of(tmp_path / "snapshots" / "main") is None and revision_of(tmp_path / commit) is None


# --- code in a checkpoint

AUTO_MAP = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForCausalLM": "evil.Model",
            "AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}


def with_code(source: Path, folder: Path, **changes) -> Path:
    """A checkpoint that asks for its own code, which would leave a file `ran` behind."""
    shutil.copytree(source, folder)
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).exists():
            config = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**config, "auto_map": AUTO_MAP, **changes}))
    return folder


def unused(folder: Path) -> bool:
    return not (folder / "ran").exists() and "evil" not in sys.modules


def test_code_beside_a_draft_is_not_run(tmp_path):
    folder = with_code(ASSETS / "draft", tmp_path / "d")
    assert open_checkpoint(folder).spec.gamma == 7 and read_draft(folder).gamma == 7
    assert load(None, folder).draft.gamma == 7 and unused(folder)


def test_code_beside_a_target_is_not_run(tmp_path):
    folder = with_code(ASSETS / "target", tmp_path / "t")
    pair = load(folder, ASSETS / "draft")
    assert mlx_dspark.generate(pair, [1, 2, 3], max_tokens=4).ids and unused(folder)


MINICPM = {
    "model_type": "minicpm", "hidden_size": 32, "dim_model_base": 32, "num_hidden_layers": 1, "intermediate_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 4096, "scale_depth": 1.0,
    "scale_emb": 1.0,
}  # fmt: skip


def test_a_tokenizer_that_needs_its_code_is_refused(tmp_path, monkeypatch):
    """mlx-lm has this model and transformers has not: there the checkpoint's code would serve."""
    folder = with_code(ASSETS / "target", tmp_path / "t", tokenizer_class="EvilTokenizer")
    (folder / "config.json").write_text(json.dumps({**MINICPM, "auto_map": AUTO_MAP}))
    minicpm.Model(minicpm.ModelArgs.from_dict(MINICPM)).save_weights(str(folder / "model.safetensors"))
    asked = []
    monkeypatch.setattr("builtins.input", lambda *args: asked.append(args) or "y")
    with pytest.raises(FormatError, match="no usable tokenizer") as caught:
        load(folder, False)
    assert not asked and unused(folder) and "\n" not in str(caught.value)


def test_a_target_that_names_its_code_is_refused(tmp_path):
    """mlx-lm's own key for the same thing."""
    folder = with_code(ASSETS / "target", tmp_path / "t", model_file="evil.py")
    with pytest.raises(FormatError, match="cannot be loaded") as caught:
        load(folder, False)
    assert unused(folder) and "\n" not in str(caught.value)
