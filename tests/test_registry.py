"""Targets are recognised by what they are; the draft that belongs to one is found, or plain decoding is said."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner
from mlx_lm.models import lfm2

from mlx_dspark import models, registry
from mlx_dspark.load import ASSETS, load
from mlx_dspark.registry import TARGETS, Fingerprint, KnownDraft, KnownTarget, find_draft, find_target

QWEN3_8B = {"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "vocab_size": 151936}
GEMMA = {"model_type": "gemma4", "text_config": {
    "model_type": "gemma4_text", "num_hidden_layers": 48, "hidden_size": 3840, "vocab_size": 262144}}
UNKNOWN = {"model_type": "llama", "num_hidden_layers": 2}


def folder_of(path: Path, config=UNKNOWN, card: str | None = None) -> Path:
    """A model folder without weights."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if card is not None:
        (path / "README.md").write_text(card)
    return path


def target_of(folder: Path, name: str | None = None) -> str | None:
    found = find_target(name or str(folder), folder)
    return found and found.target.repo


# --- by name


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "qwen/qwen3-4b"])
def test_an_exact_repo_id_is_enough(name):
    found = find_target(name)
    assert (found.target.repo, found.how, found.exact) == ("Qwen/Qwen3-4B", "name", True)


@pytest.mark.parametrize("name", [
    "Qwen/Qwen3-4B-Base", "Qwen/Qwen3-4B-Instruct-2507", "mlx-community/Qwen3-4B-4bit", "Qwen3-4B", "me/Qwen/Qwen3-4B",
    "Qwen/Qwen3-4B ", "", "/models/Qwen/Qwen3-4B",
])
def test_a_part_of_a_name_is_nothing(name):
    assert find_target(name) is None


def test_a_folder_of_a_known_name_is_nothing_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = folder_of(Path("Qwen/Qwen3-4B"))
    assert find_target("Qwen/Qwen3-4B", folder) is None
    assert target_of(tmp_path, "Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"  # a download lies elsewhere


def test_a_cached_snapshot_is_known_by_its_place(tmp_path):
    folder = folder_of(tmp_path / "models--google--gemma-4-12B-it" / "snapshots" / ("a" * 40))
    found = find_target(str(folder), folder)
    assert (found.target.repo, found.how) == ("google/gemma-4-12B-it", "cache")
    assert target_of(folder_of(tmp_path / "models--google--gemma-4-12B-it" / "other" / "x")) is None


# --- by card

CARDS = {
    "scalar": ("---\nbase_model: Qwen/Qwen3-8B\n---\n", "Qwen/Qwen3-8B"),
    "other case": ("---\nbase_model: qwen/qwen3-8b\n---\n", "Qwen/Qwen3-8B"),
    "quoted, with a comment": ("---\nlicense: mit\nbase_model: 'Qwen/Qwen3-8B' # the base\n---\n", "Qwen/Qwen3-8B"),
    "block list": ("---\nbase_model:\n- Qwen/Qwen3-8B\ntags:\n- mlx\n---\n", "Qwen/Qwen3-8B"),
    "indented list": ("---\ntags:\n  - mlx\nbase_model:\n  - \"Qwen/Qwen3-8B\"\n---\n", "Qwen/Qwen3-8B"),
    "inline list": ("---\nbase_model: [other/model, Qwen/Qwen3-8B]\n---\n", "Qwen/Qwen3-8B"),
    "windows line ends": ("---\r\nbase_model: Qwen/Qwen3-8B\r\n---\r\n", "Qwen/Qwen3-8B"),
    "longer name": ("---\nbase_model: Qwen/Qwen3-8B-Base\n---\n", None),
    "two known bases": ("---\nbase_model:\n- Qwen/Qwen3-8B\n- Qwen/Qwen3-4B\n---\n", None),
    "named by another key": ("---\ndatasets:\n- Qwen/Qwen3-8B\nbase_model:\n- x/y\n---\n", None),
    "in the text": ("# Card\nbase_model: Qwen/Qwen3-8B\n", None),
    "header never closed": ("---\nbase_model: Qwen/Qwen3-8B\n", None),
    "after the header": ("---\nlicense: mit\n---\nbase_model: Qwen/Qwen3-8B\n", None),
    "empty": ("", None),
}


@pytest.mark.parametrize("card, wanted", CARDS.values(), ids=CARDS.keys())
def test_the_base_model_of_a_card(tmp_path, card, wanted):
    (folder_of(tmp_path) / "README.md").write_bytes(card.encode())
    assert target_of(tmp_path, "someone/conversion") == wanted


@pytest.mark.parametrize("config, relation, exact", [
    pytest.param({**UNKNOWN, "quantization": {"bits": 4}}, "", True, id="quantised by mlx-lm"),
    pytest.param(UNKNOWN, "base_model_relation: quantized\n", True, id="said to be quantised"),
    pytest.param(UNKNOWN, "base_model_relation: finetune\n", False, id="said to be a fine-tune"),
    pytest.param(UNKNOWN, "", False, id="not said"),
])
def test_what_may_be_a_fine_tune_is_called_so(tmp_path, config, relation, exact):
    found = find_target("me/it", folder_of(tmp_path, config, f"---\nbase_model: Qwen/Qwen3-8B\n{relation}---\n"))
    assert found.exact == exact and ("a fine-tune may accept less" in found.describe()) == (not exact)
    assert "me/it was recognised as Qwen/Qwen3-8B (by the base_model of its card" in found.describe()


# --- by config


@pytest.mark.parametrize("config, wanted", [
    pytest.param(QWEN3_8B, "Qwen/Qwen3-8B", id="Qwen3-8B"),
    pytest.param({**QWEN3_8B, "hidden_size": 2560}, "Qwen/Qwen3-4B", id="Qwen3-4B"),
    pytest.param({**QWEN3_8B, "num_hidden_layers": 40, "hidden_size": 5120}, "Qwen/Qwen3-14B", id="Qwen3-14B"),
    pytest.param(GEMMA, "google/gemma-4-12B-it", id="gemma, text part"),
    pytest.param({**GEMMA["text_config"]}, "google/gemma-4-12B-it", id="gemma, text only"),
    *[pytest.param({**QWEN3_8B, key: value}, None, id=f"other {key}") for key, value in [
        ("model_type", "qwen2"), ("num_hidden_layers", 35), ("hidden_size", 4095), ("vocab_size", 152064),
        ("vocab_size", None), ("model_type", ["qwen3"])]],
    pytest.param([QWEN3_8B], None, id="not an object"),
    pytest.param({**QWEN3_8B, "text_config": 3}, "Qwen/Qwen3-8B", id="odd text_config"),
])
def test_a_config_that_only_one_target_has(tmp_path, config, wanted):
    assert target_of(folder_of(tmp_path, config)) == wanted


def test_a_config_that_two_targets_have_is_nothing(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, QWEN3_8B)
    found = find_target(str(folder), folder)
    assert found.how == "config" and "by its config; a fine-tune may accept less" in found.describe()
    twin = KnownTarget("x/twin", TARGETS[0].drafts, Fingerprint(frozenset({"qwen3"}), 36, 4096, 151936))
    monkeypatch.setattr(registry, "TARGETS", (*TARGETS, twin))
    assert target_of(folder) is None


@pytest.mark.parametrize("name, content", [
    pytest.param("config.json", b"{", id="cut config"), pytest.param("config.json", b"\xff\xfe", id="config of bytes"),
    pytest.param("config.json", b"[" * 100000, id="deep config"),
    pytest.param("README.md", b"---\n\xff\xfe", id="card of bytes"),
])
def test_damaged_files_say_nothing(tmp_path, name, content):
    (folder_of(tmp_path, card="") / name).write_bytes(content)
    assert target_of(tmp_path) is None
    assert target_of(tmp_path / "nowhere") is None


# --- the table


def test_the_table_is_in_order():
    repos = [draft.repo for target in TARGETS for draft in target.drafts]
    assert len({target.repo.lower() for target in TARGETS}) == len(TARGETS) and len(set(repos)) == len(repos)
    for target in TARGETS:
        ranks = [registry.KINDS.index(draft.kind) for draft in target.drafts]
        assert ranks == sorted(ranks) and ranks, f"{target.repo} is not best first"
        for draft in target.drafts:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", draft.repo)
            assert draft.revision is None or re.fullmatch(r"[0-9a-f]{40}", draft.revision)
            assert all(1 < tau < 8 for tau in draft.tau.values())


def test_published_numbers():
    draft = find_target("Qwen/Qwen3-4B").target.drafts[0]
    assert (draft.repo, draft.tau["gsm8k"], draft.tau["arena"]) == ("deepseek-ai/dspark_qwen3_4b_block7", 6.11, 3.29)
    assert draft.expected() == "3.29 to 6.11"
    assert [KnownDraft("a/b", "dspark", "", tau=tau).expected() for tau in ({}, {"x": 4.0})] == [None, "4.00"]


@pytest.mark.parametrize("repo", ["LiquidAI/LFM2.5-2.6B", "Qwen/Qwen3.6-27B", "Nanbeige/Nanbeige4.2-3B"])
def test_drafts_that_cannot_run_say_why(repo):
    draft, reason = find_target(repo).best()
    assert draft is None and reason and "\n" not in reason


def test_the_best_draft_skips_those_that_are_blocked():
    first, second = KnownDraft("a/one", "dspark", "", blocked="no"), KnownDraft("a/two", "dflash", "")
    found = registry.Found(KnownTarget("a/target", (first, second)), "a/target", "name")
    assert found.best() == (second, None)


def test_a_draft_is_found_by_name_source_and_place(tmp_path):
    target = find_target("Qwen/Qwen3-8B").target
    wanted = target.drafts[0]
    assert find_draft(target, wanted.repo.upper()) is wanted
    assert find_draft(target, "deepseek-ai/dspark_qwen3_4b_block7") is None
    converted = folder_of(tmp_path / "a", {"mlx_dspark": {"source": {"name": wanted.repo}}})
    assert find_draft(target, str(converted), converted) is wanted
    cached = folder_of(tmp_path / f"models--{wanted.repo.replace('/', '--')}" / "snapshots" / "1")
    assert find_draft(target, str(cached), cached) is wanted
    assert find_draft(target, "x", folder_of(tmp_path / "b", {"mlx_dspark": 3})) is None


# --- the command


def show(*arguments):
    result = CliRunner().invoke(models.command, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_models_lists_every_draft_with_reasons():
    lines = show().splitlines()
    for target in TARGETS:
        for draft in target.drafts:
            row = next(line for line in lines if draft.repo in line.split())
            assert row.split()[0] == target.repo
            assert bool(re.search(r"no \[\d\]$", row)) == (target.why_not(draft) is not None)
    assert "no [1]: " in "\n".join(lines)


def test_models_as_json():
    document = json.loads(show("--json"))
    assert [entry["target"] for entry in document["models"]] == [target.repo for target in TARGETS]
    first = document["models"][1]["drafts"][0]
    assert first["revision"] == "03326e5043815da1f81b109078b2889737c26017" and first["runs"] and first["reason"] is None


def test_models_answers_for_one_target(tmp_path):
    folder = folder_of(tmp_path / "mine", QWEN3_8B)
    text = show(folder)
    assert "recognised as Qwen/Qwen3-8B (by its config" in text and "dspark_qwen3_8b_block7" in text
    assert "dspark_qwen3_4b_block7" not in text and "no [" not in text
    document = json.loads(show("Qwen/Qwen3-4B", "--json"))
    assert document["recognised_by"] == "name" and len(document["models"]) == 1


def test_models_says_what_is_unknown(tmp_path):
    assert "unknown by its card and its config" in show(folder_of(tmp_path))
    assert "once it is downloaded" in show("mlx-community/Qwen3-4B-4bit")
    assert json.loads(show("x/y", "--json")) == {"models": [], "name": "x/y", "recognised_by": None}


def test_models_needs_no_mlx():
    code = ("import sys, mlx_dspark.models\n"
            "print({'mlx', 'huggingface_hub', 'numpy'} & {name.split('.')[0] for name in sys.modules})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


# --- load


@pytest.fixture
def hub(monkeypatch):
    """A hub that has the embedded draft under every name; `asked` keeps what was downloaded."""
    import huggingface_hub

    asked = []

    def download(repo, revision=None, allow_patterns=None):
        asked.append((repo, revision))
        return str(ASSETS / "draft")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def target_folder(path: Path, base: str) -> Path:
    """The embedded target, said to be quantised from a known one."""
    shutil.copytree(ASSETS / "target", path)
    (path / "README.md").write_text(f"---\nbase_model: {base}\n---\n")
    return path


def note_of(pair):
    notes = [note for note in pair.notes if "OpenBLAS" not in note]
    assert len(notes) == 1 and "\n" not in notes[0], notes
    return notes[0]


@pytest.mark.parametrize("options, revision", [({}, "03326e5043815da1f81b109078b2889737c26017"),
                                               ({"draft_revision": "main"}, "main")], ids=["pinned", "asked for"])
def test_a_known_draft_is_loaded_at_its_revision(tmp_path, hub, options, revision):
    pair = load(target_folder(tmp_path / "t", "Qwen/Qwen3-8B"), **options)
    assert hub == [("deepseek-ai/dspark_qwen3_8b_block7", revision)] and pair.draft.gamma == 7
    note = note_of(pair)
    assert "recognised as Qwen/Qwen3-8B (by the base_model of its card)" in note
    assert "using its draft deepseek-ai/dspark_qwen3_8b_block7" in note and "--draft" in note


def test_a_draft_that_cannot_be_had_leaves_plain_decoding(tmp_path, monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    pair = load(target_folder(tmp_path / "t", "Qwen/Qwen3-8B"))
    note = note_of(pair)
    assert pair.draft is None and "dspark_qwen3_8b_block7 could not be downloaded" in note
    assert "check the network" in note and "decoding plainly" in note and "--draft" in note


def test_a_draft_that_does_not_fit_leaves_plain_decoding(tmp_path, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download",
                        lambda *args, **kwargs: str(Path(__file__).parent / "golden" / "qwen3_dspark_vanilla"))
    pair = load(target_folder(tmp_path / "t", "Qwen/Qwen3-8B"))
    assert pair.draft is None and "hidden width is 64" in note_of(pair)


def test_a_blocked_target_is_not_downloaded_for(tmp_path, hub):
    pair = load(target_folder(tmp_path / "t", "LiquidAI/LFM2.5-2.6B"))
    assert pair.draft is None and hub == []
    assert "cannot be rolled back" in note_of(pair) and "decoding plainly" in note_of(pair)


def test_a_target_without_rollback_is_not_downloaded_for(tmp_path, hub):
    """A hybrid that claims to be a Qwen3: nothing is fetched for a cache that cannot take a draft back."""
    config = {
        "model_type": "lfm2", "vocab_size": 4096, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 64, "norm_eps": 1e-6, "conv_bias": False,
        "conv_L_cache": 3, "block_dim": 32, "block_ff_dim": 32, "block_multiple_of": 32, "rope_theta": 1e4,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1],
    }  # fmt: skip
    folder = target_folder(tmp_path / "t", "Qwen/Qwen3-8B")
    (folder / "config.json").write_text(json.dumps(config))
    lfm2.Model(lfm2.ModelArgs.from_dict(config)).save_weights(str(folder / "model.safetensors"))
    pair = load(folder)
    assert pair.draft is None and hub == [] and "ArraysCache" in note_of(pair)


@pytest.mark.parametrize("base", ["x/y", "Qwen/Qwen3-8B-Base"])
def test_an_unknown_target_is_decoded_plainly(tmp_path, hub, base):
    pair = load(target_folder(tmp_path / "t", base))
    assert pair.draft is None and hub == []
    assert re.fullmatch(r"no draft was given for \S+: decoding plainly, give --draft .*", note_of(pair))


def test_no_lookup_when_the_draft_is_refused_or_the_model_loaded(tmp_path, hub):
    folder = target_folder(tmp_path / "t", "Qwen/Qwen3-8B")
    pair = load(folder, False)
    assert pair.draft is None and hub == []
    loaded = load(pair.target.model, tokenizer=pair.tokenizer)
    assert loaded.draft is None and hub == [] and "no draft was given" in note_of(loaded)
    assert load(pair.target.model, ASSETS / "draft", tokenizer=pair.tokenizer).draft.dtype == mx.float32
