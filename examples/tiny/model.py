"""The target's shape, its first weights and its loss."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.qwen3 import Model, ModelArgs

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def build(config: dict[str, Any], seed: int) -> Model:
    """A model with fresh weights: normal 0.02, layers that write to the residual stream scaled by depth."""
    model = Model(ModelArgs.from_dict(config))
    mx.random.seed(seed)
    shrink = (2 * config["num_hidden_layers"]) ** -0.5

    def fresh(path: str, weight: mx.array) -> mx.array:
        if weight.ndim == 1:
            return weight  # norms begin at one
        writes = path.endswith(("o_proj.weight", "down_proj.weight"))
        return 0.02 * (shrink if writes else 1) * mx.random.normal(weight.shape)

    model.update(tree_map_with_path(fresh, model.parameters()))
    mx.eval(model.parameters())
    return model


def loss_of(cross_entropy: Callable[[mx.array, mx.array], mx.array]) -> Callable[[Model, mx.array], mx.array]:
    """Mean nats a token of rows [B, T + 1]: each position predicts the next."""
    def loss(model: Model, rows: mx.array) -> mx.array:
        return cross_entropy(model(rows[:, :-1]), rows[:, 1:]).mean()
    return loss


def parameter_count(model: nn.Module) -> int:
    """How many numbers the model holds."""
    return sum(weight.size for _, weight in tree_flatten(model.parameters()))


def save(model: Model, config: dict[str, Any], tokenizer: Path, folder: Path) -> None:
    """A folder that mlx-lm and mlx_dspark load, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
