"""Tiny random mlx-lm targets, scripted drafts, and plain decoding to compare with."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from click.testing import Result
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from mlx_dspark.decode import DecodeOptions, decode
from mlx_dspark.draft import BlockDraft, DraftSpec, TargetTables
from mlx_dspark.draft.spec import RopeSpec
from mlx_dspark.kernels.accept import accept_mask, at_rows, at_tokens, next_weights
from mlx_dspark.load import ASSETS, Pair, load, read_draft
from mlx_dspark.sampling import make_rule
from mlx_dspark.schedule import make_policy
from mlx_dspark.structs import Proposal, Round, Sampling
from mlx_dspark.target import Target

GOLDEN = Path(__file__).parent / "golden"
HELDOUT = ASSETS / "heldout.jsonl"
VOCAB = 300
WINDOW = 16
GAMMA = 4
# Random layers of the usual size hardly move the residual stream and the text becomes one repeated
# token, which no cache error could change. Larger ones make it depend on the whole context.
GAIN = 4

_COMMON = {
    "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCAB, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
}  # fmt: skip
_WINDOWED = {"sliding_window": WINDOW, "sliding_window_pattern": 3}
CONFIGS = {
    "qwen3": {**_COMMON, "tie_word_embeddings": True},
    "llama": {**_COMMON, "tie_word_embeddings": False},
    "gemma3_text": {**_COMMON, **_WINDOWED, "query_pre_attn_scalar": 64},
    "gemma4_text": {
        **_COMMON, **_WINDOWED, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB, "global_head_dim": 64,
    },
    "lfm2": {  # a recurrent hybrid: its convolutions keep an ArraysCache
        **_COMMON, "norm_eps": 1e-6, "conv_bias": False, "conv_L_cache": 3, "block_dim": 64, "block_ff_dim": 96,
        "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
    "longcat_flash": {  # each layer keeps a CacheList of two KV caches
        "attention_method": "MLA", "zero_expert_type": "identity", "hidden_size": 64, "ffn_hidden_size": 96,
        "moe_topk": 2, "expert_ffn_hidden_size": 32, "n_routed_experts": 2, "zero_expert_num": 1, "num_layers": 2,
        "vocab_size": VOCAB, "max_position_embeddings": 4096, "num_attention_heads": 2, "kv_lora_rank": 32,
        "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
        "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True, "attention_bias": False,
    },
}  # fmt: skip


class FakeTokenizer:
    """What `Pair.stop_ids` reads, for pairs that never see text."""

    def __init__(self, eos_token_ids: Sequence[int] = ()):
        self.eos_token_ids = set(eos_token_ids)


def build_model(kind: str, seed: int = 4, dtype: mx.Dtype = mx.float32, **changes) -> nn.Module:
    """A fresh random model of an mlx-lm architecture."""
    arch = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(seed)
    model = arch.Model(arch.ModelArgs.from_dict({"model_type": kind, **CONFIGS[kind], **changes}))

    def scaled(name: str, array: mx.array) -> mx.array:
        return array * GAIN if array.ndim >= 2 and "embed_tokens" not in name else array

    model.update(tree_map_with_path(scaled, model.parameters()))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model.eval()


@cache
def tiny_model(kind: str) -> nn.Module:
    """`build_model(kind)`, shared by all tests: do not change it."""
    return build_model(kind)


def pair_of(model: nn.Module, draft=None, stop_ids: Sequence[int] = ()) -> Pair:
    """A pair of a loaded model and a draft."""
    return Pair(Target(model, dict(vars(model.args)), "tiny"), FakeTokenizer(stop_ids), draft)


@cache
def embedded_pair() -> Pair:
    """The pair that comes with the package, in float32."""
    return load()


@cache
def bare_assets() -> Path:
    """A copy of the small pair's folder as if it had no chat template, its draft in DeepSpec's layout."""
    folder = Path(_keep(tempfile.TemporaryDirectory(prefix="bare-")).name) / "tiny"
    shutil.copytree(ASSETS, folder)
    path = folder / "target" / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({name: value for name, value in config.items() if name != "chat_template"}))
    _deepspec_layout(folder / "draft")
    return folder


def _keep(folder: tempfile.TemporaryDirectory) -> tempfile.TemporaryDirectory:
    atexit.register(folder.cleanup)
    return folder


def _deepspec_layout(folder: Path) -> None:
    """Undo the converter's own spelling of a draft's facts and names."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "mlx_dspark" not in config:
        return
    spec = config["mlx_dspark"]["spec"]
    same = ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "rms_norm_eps", "mask_token_id", "block_size",
            "markov_rank", "num_target_layers", "attention_bias")
    facts = {
        **{name: spec[name] for name in same}, "model_type": "qwen3", "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": spec["num_layers"], "num_attention_heads": spec["num_heads"],
        "num_key_value_heads": spec["num_kv_heads"], "target_layer_ids": spec["taps"],
        "layer_types": ["full_attention"] * spec["num_layers"], "markov_head_type": spec["markov"],
        "enable_confidence_head": spec["confidence"], "confidence_head_with_markov": spec["confidence_with_markov"],
        "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": spec["rope"]["theta"], "rope_type": "default"},
        "quantization": config["quantization"],
    }
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    path = folder / "model.safetensors"
    arrays = {name.removeprefix("backbone."): array for name, array in mx.load(str(path)).items()}
    mx.eval(arrays)
    path.unlink()
    mx.save_safetensors(str(path), arrays)


@cache
def golden_target() -> Target:
    model, config = load_model(GOLDEN / "qwen3_target")
    return Target(model, config, "golden")


@cache
def golden_draft(name: str = "qwen3_dspark_vanilla") -> BlockDraft:
    return read_draft(GOLDEN / name)


def golden_pair(name: str = "qwen3_dspark_vanilla") -> Pair:
    """A trained reference draft with its target, in float32."""
    return Pair(golden_target(), FakeTokenizer(), golden_draft(name))


def random_tokens(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Token ids that follow no rule."""
    return mx.random.randint(0, vocab, (length,), key=mx.random.key(seed)).tolist()


@cache
def _heldout() -> list[int]:
    return json.loads(HELDOUT.read_text(encoding="utf-8").splitlines()[3])["ids"]  # code that does not fall into a loop


@cache
def _golden_text() -> list[int]:
    known = json.loads((GOLDEN / "qwen3_target" / "golden.json").read_text(encoding="utf-8"))
    prompt = known["prompts"]["A"]
    return prompt + plain(golden_target().model, prompt, 200)


def prompt_of(kind: str, length: int) -> list[int]:
    """A prompt for a target by its name in these tests: text it knows where it was trained."""
    if kind == "embedded":
        return _heldout()[-length:]  # its end: what follows does not repeat itself
    if kind == "golden":
        return _golden_text()[:length]
    return random_tokens(length, seed=length)


def plain(model: nn.Module, prompt: Sequence[int], count: int, **options) -> list[int]:
    """The first `count` greedy tokens of mlx-lm's own generation. options: those of `generate_step`."""
    steps = generate_step(mx.array(prompt), model, max_tokens=count, **options)
    return [int(token) for token, _ in steps]


def run(
    pair: Pair, prompt: Sequence[int], count: int, policy: str = "fixed", sampling: Sampling | None = None, **options
) -> list[Round]:
    """All rounds of one request. options: those of `DecodeOptions`."""
    sampling = sampling or Sampling()
    draft = pair.draft
    chosen = make_policy(policy, draft.gamma if draft else 0, bool(draft) and draft.has_confidence)
    rule = make_rule(sampling, pair.target.processors(sampling))
    return list(decode(pair, prompt, DecodeOptions(rule, chosen, max_tokens=count, **options)))


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    return [token for landed in rounds for token in landed.tokens]


class Scripted:
    """A draft that knows the plain text: right up to slot `lengths[i]` in its i-th round, then wrong.

    After the wrong slot it is right again, so that only the first difference may count.
    lengths: taken in turn; a length of gamma or more is right everywhere.
    """

    taps: tuple[int, ...] = ()
    has_confidence = False

    def __init__(self, prompt: Sequence[int], text: Sequence[int], lengths: Sequence[int], gamma: int = GAMMA):
        self.gamma = gamma
        self.prompt_rows = len(prompt)
        self.text = list(text)
        self.lengths = list(lengths)

    def start(self) -> dict[str, int]:
        return {"rows": 0, "round": 0}

    def observe(self, state: dict[str, int], tokens: mx.array, taps: mx.array | None) -> None:
        state["rows"] += tokens.shape[1]

    def propose(self, state: dict[str, int], anchor: mx.array, slots: int, pick) -> Proposal:
        at = state["rows"] - self.prompt_rows + 1  # the anchor is text[at - 1]
        right = (self.text[at : at + slots] + [0] * slots)[:slots]
        wrong = self.wrong_slots(self.lengths[state["round"] % len(self.lengths)], slots)
        state["round"] += 1
        return Proposal(mx.array([[token + 1 if k in wrong else token for k, token in enumerate(right)]]))

    def wrong_slots(self, length: int, slots: int) -> set[int]:
        return {length}

    def accepted(self, rounds: Sequence[Round]) -> list[int]:
        """What the script says each round after the prefill must have accepted."""
        drafting = [landed for landed in rounds if landed.rows > 1]
        script = (self.lengths * (len(drafting) + 1))[: len(drafting)]
        return [min(length, len(landed.drafts)) for length, landed in zip(script, drafting)]


class Adversarial(Scripted):
    """Never right."""

    def __init__(self, prompt: Sequence[int], text: Sequence[int], gamma: int = GAMMA):
        super().__init__(prompt, text, [0], gamma)

    def wrong_slots(self, length: int, slots: int) -> set[int]:
        return set(range(slots))


def spec_of(target: Target, **changes) -> DraftSpec:
    """Facts of a small draft that fits a target."""
    facts = {
        "family": "qwen3", "hidden_size": target.hidden_size, "intermediate_size": 64, "num_layers": 2,
        "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "vocab_size": target.vocab_size, "rms_norm_eps": 1e-6,
        "kind": "block", "rope": RopeSpec(10000.0), "windows": (None, None), "causal": (False, False),
        "taps": (-1, 1, 2), "block_size": GAMMA, "mask_token_id": 0,
        "markov": "vanilla", "markov_rank": 8, "confidence": True, "confidence_with_markov": True,
        "num_target_layers": len(target.layers),
    }  # fmt: skip
    return DraftSpec(**{**facts, **changes})


def untrained_draft(target: Target, seed: int = 7, **changes) -> BlockDraft:
    """A real block draft with random weights; it borrows the target's tables."""
    mx.random.seed(seed)
    draft = BlockDraft(spec_of(target, **changes), own_embed=False, own_head=False)
    draft.borrow(TargetTables(target.embed, target.head))
    mx.eval(draft.parameters())
    return draft.eval()


def passed(p, q, drafts, uniforms):
    """The accept test of drafts [B, N] under full distributions p [B, N or N + 1, V] and q [B, N, V]."""
    return accept_mask(at_tokens(p[:, : drafts.shape[1]], drafts), at_tokens(q, drafts), uniforms)


def weights_after(p, q, accepted):
    """Weights [B, V] of the token after runs of `accepted` [B] drafts; p [B, N + 1, V], q [B, N, V]."""
    q = mx.concatenate([q, mx.zeros_like(p[:, :1])], axis=1)
    return next_weights(at_rows(p, accepted), at_rows(q, accepted))


def best(logits, drafts):
    """A pick like the greedy rule's, after which the proposal still has its logits."""
    return mx.argmax(logits, axis=-1), None


def refused(done: Result, *fragments: str, code: int = 1) -> None:
    """A command said one error line, with these fragments, and nothing on stdout. Code 2: after how to call it."""
    assert (done.exit_code, done.stdout) == (code, ""), (done.stdout, done.stderr, done.exception)
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1 and (code == 2 or done.stderr == errors[0] + "\n"), done.stderr
    assert all(fragment in errors[0] for fragment in fragments), done.stderr


class Reads:
    """Counts everything that waits for the device; async_eval does not."""

    def __init__(self, monkeypatch):
        self.count = 0
        for name in ("tolist", "item", "__int__", "__float__", "__bool__", "__index__"):
            self._count_calls(monkeypatch, mx.array, name)
        for name in ("eval", "synchronize"):
            self._count_calls(monkeypatch, mx, name)
        for name in ("array", "asarray"):
            self._count_calls(monkeypatch, np, name, lambda *args: args and isinstance(args[0], mx.array))

    def _count_calls(self, monkeypatch, owner, name, counts=lambda *args: True):
        original = getattr(owner, name, None)
        if original is None:
            return

        def counted(*args, **kwargs):
            self.count += bool(counts(*args))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)


TRAINING = """
layers = 1
rank = 8
gamma = 3
taps = [1, 3]
anchors = 4
max_length = 32
accumulate = 2
save_every = 2
valid_rows = 2
"""


def thin_target(folder: Path) -> Path:
    """A random target of six thin layers on disk with the small pair's tokenizer: its forward costs next to nothing."""
    source = ASSETS / "target"
    config = {**json.loads((source / "config.json").read_text()), "hidden_size": 32, "intermediate_size": 64,
              "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    del config["quantization"]
    model = build_model(**{"kind": config.pop("model_type"), **config})
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    return folder


def training_files(folder: Path, settings: str, names: Sequence[str] = ("data",)) -> Path:
    """A thin target, data sets of random tokens for it, and a train.toml of `TRAINING` and `settings`."""
    thin_target(folder / "target")
    rng = np.random.default_rng(0)
    for name in names:
        lines = [json.dumps({"ids": rng.integers(2, 4000, rng.integers(20, 41)).tolist()}) for _ in range(30)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "train.toml").write_text(TRAINING + settings)
    return folder


def training_arguments(files: Path, out: Path, data: str = "data") -> list[str]:
    """What the train command takes to train on files of `training_files`."""
    return ["--model", str(files / "target"), "--data", str(files / f"{data}.jsonl"),
            "--config", str(files / "train.toml"), "--out", str(out)]


def start_training(
    files: Path, out: Path, *more: str, data: str = "data", environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """The train command in a process of its own, on one thread: sums are in the same order every time."""
    command = [sys.executable, "-m", "mlx_dspark.train", *training_arguments(files, out, data), *more]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ASSETS.parents[2]),
                                          "OPENBLAS_NUM_THREADS": "1", **(environment or {})},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
