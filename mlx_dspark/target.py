"""An mlx-lm model as verifier: prefill, verify, taps, and its embedding and head for a draft to borrow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache as memoise
from functools import cached_property
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, wired_limit
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

from .cache import TargetCache
from .errors import PairError
from .sampling import Processor
from .structs import KVOptions, Sampling, Verified


class Target:
    """Wraps an unmodified mlx-lm text model.

    name: where it came from, for messages. config: its config.json (context length, vocabulary).
    """

    def __init__(self, model: nn.Module, config: dict[str, Any], name: str):
        self.model = model
        self.name = name
        self.layers: Sequence[nn.Module] = model.layers
        text = config.get("text_config") or config
        self.context: int | None = text.get("max_position_embeddings")
        self._embedding = _find(model, ("embed_tokens", "wte", "tok_embeddings", "word_embeddings"))
        self._lm_head = _find(model, ("lm_head",))
        tied = getattr(getattr(model, "args", None), "tie_word_embeddings", False)
        if self._lm_head is None or tied:
            self._lm_head = None

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding table, padding included."""
        return None if self._embedding is None else self._embedding.weight.shape[0]

    @property
    def hidden_size(self) -> int | None:
        if self._embedding is None:
            return None
        return self._embedding(mx.array([0])).shape[-1]

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the activations."""
        return mx.float32 if self._embedding is None else self._embedding(mx.array([0])).dtype

    @cached_property
    def modules(self) -> frozenset[ModuleType]:
        """The Python modules that define its parts; found once, so that no forward has to walk all of them."""
        return frozenset(sys.modules[type(part).__module__] for _, part in self.model.named_modules())

    def embed(self, tokens: mx.array) -> mx.array:
        """The raw embedding rows of tokens [B, T] -> [B, T, D]."""
        return self._embedding(tokens)

    def head(self, hidden: mx.array) -> mx.array:
        """The output head, without soft cap: hidden [B, T, D] -> logits [B, T, V]."""
        return self._embedding.as_linear(hidden) if self._lm_head is None else self._lm_head(hidden)

    def require_tables(self) -> None:
        """Raise PairError if a draft could not borrow embedding and head."""
        if self._embedding is None or (self._lm_head is None and not hasattr(self._embedding, "as_linear")):
            raise PairError(f"the draft has no embedding or head of its own and those of {self.name} were not found: "
                            "use a draft that carries its tables")

    def start(self, options: KVOptions) -> TargetCache:
        """An empty cache for one request."""
        return TargetCache(self.model, options)

    def forward(self, tokens: mx.array, cache: TargetCache, taps: Sequence[int] = ()) -> Verified:
        """Run rows [B, T] behind the cache; the caller accounts for them with `cache.advance`."""
        return self.run(tokens, cache.layers, taps)

    def run(self, tokens: mx.array, layers: Sequence[Any], taps: Sequence[int] = ()) -> Verified:
        """`forward` over one cache object a layer."""
        with tapped(self.layers, taps) as sink:
            logits = self.model(tokens, cache=layers)  # [B, T, V]
        return Verified(logits, mx.concatenate([sink[i] for i in taps], axis=-1) if taps else None)

    def features(self, tokens: mx.array, taps: Sequence[int]) -> tuple[mx.array, mx.array]:
        """What a draft is trained on: taps [B, T, M*D] and last hidden states [B, T, D] of whole sequences [B, T].

        The last hidden states are what enters the output head. Runs from position 0 without a cache; the logits of
        this graph are never evaluated.
        """
        with tapped(self.layers, taps) as sink, _head_input(self._lm_head, self._embedding) as last:
            self.model(tokens)
        return mx.concatenate([sink[i] for i in taps], axis=-1), last[0]

    def tables(self) -> tuple[mx.array, mx.array]:
        """Embedding and output head as plain matrices [V, D]; they are one array where the target ties them."""
        embedding = _plain_weight(self._embedding)
        return embedding, embedding if self._lm_head is None else _plain_weight(self._lm_head)

    def prefill(
        self, prompt: Sequence[int], cache: TargetCache, taps: Sequence[int], step: int,
        observe: Callable[[mx.array, mx.array | None], None],
    ) -> Verified:
        """`prefill_steps` without a pause: returns the last row."""
        *_, last = self.prefill_steps(prompt, cache, taps, step, observe)
        return last  # type: ignore[return-value]

    def prefill_steps(
        self, prompt: Sequence[int], cache: TargetCache, taps: Sequence[int], step: int,
        observe: Callable[[mx.array, mx.array | None], None],
    ) -> Iterator[Verified | None]:
        """Run a prompt in chunks of at most `step` rows; logits are only computed for the last row.

        Begins at the cache's offset. observe: called with each chunk's tokens [1, T] and taps [1, T, M*D], all
        rows in order. Yields None after each chunk, and the last row at the end.
        """
        tokens = mx.array(prompt, dtype=mx.int32)[None]
        done, last = cache.offset, len(prompt) - 1
        while done < last:
            rows = min(step, last - done)
            chunk = tokens[:, done : done + rows]
            taken = self.forward(chunk, cache, taps).taps  # the logits of this graph are never evaluated
            cache.advance(rows, rows)
            mx.eval(cache.arrays, [] if taken is None else taken)
            observe(chunk, taken)
            mx.clear_cache()
            done += rows
            yield None
        final = self.forward(tokens[:, last:], cache, taps)
        cache.advance(1, 1)
        observe(tokens[:, last:], final.taps)
        yield final

    def can_batch(self) -> bool:
        """Whether mlx-lm can decode several requests of this model at once."""
        return all(hasattr(layer, "merge") for layer in make_prompt_cache(self.model))

    def batch(self, stop_ids: Collection[int], size: int) -> BatchGenerator:
        """mlx-lm's generator for several requests at once, of which at most `size` are decoded together.

        Each request has a sampler of its own: (log-probabilities [1, V]) -> token [1], called once a token.
        """
        return BatchGenerator(self.model, stop_tokens=[[token] for token in stop_ids], completion_batch_size=size,
                              prefill_batch_size=min(size, 8))

    def processors(self, sampling: Sampling) -> list[Processor]:
        """mlx-lm's own logits processors for the penalties and the bias of `sampling`."""
        return make_logits_processors(
            dict(sampling.logit_bias) or None,
            sampling.repetition_penalty, sampling.repetition_context_size,
            sampling.presence_penalty, sampling.presence_context_size,
            sampling.frequency_penalty, sampling.frequency_context_size,
        )

    def wired(self) -> AbstractContextManager[None]:
        """Keep the weights wired while generating (Metal only; elsewhere it does nothing)."""
        return wired_limit(self.model)


@contextmanager
def tapped(layers: Sequence[nn.Module], ids: Sequence[int]) -> Iterator[dict[int, mx.array]]:
    """Record the outputs of layers `ids` (-1: the input of layer 0) of the forwards run inside.

    A recording subclass is swapped in for each layer's class and swapped back at the end: weight
    names, attributes and logits stay what they were. A Gemma layer's tuple output is its first item.
    """
    sink: dict[int, mx.array] = {}
    wanted = sorted({max(i, 0) for i in ids})
    for i in wanted:
        layers[i].__dict__["_tap"] = (sink, i if i in ids else None, i == 0 and -1 in ids)
        layers[i].__class__ = _recording(type(layers[i]))
    try:
        yield sink
    finally:
        for i in wanted:
            layers[i].__class__ = type(layers[i]).__mro__[2]
            del layers[i].__dict__["_tap"]


@contextmanager
def _head_input(lm_head: nn.Module | None, embedding: nn.Module) -> Iterator[list[mx.array]]:
    """Record what enters the output head, the embedding's transpose where there is no other."""
    module, name = (embedding, "as_linear") if lm_head is None else (lm_head, "__call__")
    kind, seen = type(module), []

    def recording(self: nn.Module, x: mx.array) -> mx.array:
        seen.append(x)
        return getattr(kind, name)(self, x)

    module.__class__ = type(f"Heard{kind.__name__}", (kind,), {name: recording})
    try:
        yield seen
    finally:
        module.__class__ = kind


def _plain_weight(module: nn.Module) -> mx.array:
    if "scales" not in module:
        return module.weight
    return mx.dequantize(module.weight, module.scales, module.get("biases"), module.group_size, module.bits,
                         module.mode)


class _Recorder:
    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(x, *args, **kwargs)  # type: ignore[misc]
        sink, index, with_input = self.__dict__["_tap"]
        if with_input:
            sink[-1] = x
        if index is not None:
            sink[index] = out[0] if isinstance(out, tuple) else out
        return out


@memoise
def _recording(layer_class: type) -> type:
    return type(f"Tapped{layer_class.__name__}", (_Recorder, layer_class), {})


def _find(model: nn.Module, names: Sequence[str]) -> nn.Module | None:
    """The shallowest submodule with one of these last names."""
    found = [(path.count("."), path, module) for path, module in model.named_modules()
             if path.rsplit(".", 1)[-1] in names]
    return min(found, key=lambda item: item[:2])[2] if found else None
