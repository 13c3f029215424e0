"""After rejected drafts the cache equals that of a run which never saw them."""

import copy
from functools import cache

import mlx.core as mx
import pytest
from helpers import VOCAB, WINDOW, Adversarial, build_model, pair_of, plain, random_tokens, run, tiny_model, tokens_of
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)

from mlx_dspark.cache import TargetCache
from mlx_dspark.errors import CacheError
from mlx_dspark.structs import KVOptions

# A window's rows lie in another order after a one-row step, so their sums are rounded differently.
# Logits are of size 10. The latent attention of longcat_flash computes one row in another way than many.
TOLERANCE = {"full": 0, "quantised": 0, "4-bit": 0, "window": 1e-4, "list": 1e-4}
MODELS = {"full": "llama", "quantised": "llama", "4-bit": "qwen3", "window": "gemma3_text", "list": "longcat_flash"}
OPTIONS = {"quantised": KVOptions(8, 32, 0), "4-bit": KVOptions(4, 64, 0)}
CLASSES = {"full": {KVCache}, "quantised": {QuantizedKVCache}, "4-bit": {QuantizedKVCache},
           "window": {RotatingKVCache, KVCache}, "list": {CacheList}}  # fmt: skip
TEXT = random_tokens(120, seed=1)
WRONG = [(token + 101) % VOCAB for token in TEXT]  # at no position the right one
ROWS = 5
# Before the window fills, in the step that fills it, when it is full to the row, and long after.
PREFIXES = (1, WINDOW - ROWS, WINDOW - 3, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5)


class Request:
    """A target and its cache, fed by hand."""

    def __init__(self, name):
        self.target = pair_of(tiny_model(MODELS[name])).target
        self.cache = self.target.start(OPTIONS.get(name, KVOptions()))
        self.tolerance = TOLERANCE[name]

    def forward(self, tokens, keep=None):
        """Run rows, keep the first `keep`; logits [T, V]."""
        logits = self.target.forward(mx.array([tokens]), self.cache).logits[0]
        self.cache.advance(len(tokens), len(tokens) if keep is None else keep)
        return logits

    def fork(self):
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)
        return other

    def expect(self, logits, wanted):
        difference = mx.abs(logits - wanted).max().item()
        assert difference <= self.tolerance, f"logits differ by {difference}"


@cache
def plainly(name):
    """TEXT decoded plainly, a row at a time: its logits [120, V], and the request as it was behind each of PREFIXES."""
    request, logits, behind = Request(name), [], {}
    for at, token in enumerate(TEXT):
        if at in PREFIXES:
            behind[at] = request.fork()
        logits.append(request.forward([token]))
    logits = mx.concatenate(logits)
    mx.eval(logits)
    return logits, behind


def truth(name):
    return plainly(name)[0]


FOLLOW = {1: {3: {}, 1: {1: {}}}, 3: {1: {}}}  # rows of the steps that follow, each behind those it shares with others


def check_steps(request, at, follow, wanted):
    """Every way to go on behind TEXT[:at], step by step."""
    for rows, then in follow.items():
        other = request.fork()
        other.expect(other.forward(TEXT[at : at + rows]), wanted[at : at + rows])
        check_steps(other, at + rows, then, wanted)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", MODELS)
def test_steps_after_every_accepted_length(name, prefix):
    wanted, behind = plainly(name)
    for keep in range(1, ROWS + 1):
        request, at = behind[prefix].fork(), prefix + keep
        request.forward([*TEXT[prefix:at], *WRONG[at : prefix + ROWS]], keep)  # `keep` are right and stay
        check_steps(request, at, FOLLOW, wanted)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_random_rounds(name, seed):
    """Rounds of random width and outcome, far past the window."""
    request, at = Request(name), 0
    widths = (mx.random.randint(1, 8, (len(TEXT),), key=mx.random.key(seed))).tolist()
    cuts = mx.random.uniform(shape=(len(TEXT),), key=mx.random.key(seed + 100)).tolist()
    for width, cut in zip(widths, cuts):
        width = min(width, len(TEXT) - at, request.cache.room() or width)
        if width == 0:
            break
        keep = 1 + int(cut * width)
        logits = request.forward([*TEXT[at : at + keep], *WRONG[at + keep : at + width]], keep)
        request.expect(logits[:keep], truth(name)[at : at + keep])
        at += keep
        assert request.cache.offset == at
    assert at == len(TEXT) > 5 * WINDOW


@pytest.mark.parametrize("name", MODELS)
def test_the_classes_under_test(name):
    request = Request(name)
    request.forward(TEXT[:1])
    assert {type(layer) for layer in request.cache.layers} == CLASSES[name]


@pytest.mark.parametrize("name", ("full", "quantised", "window"))
def test_advance_keeps_every_layer_at_the_same_offset(name):
    request, at = Request(name), 0
    for rows, keep in ((1, 1), (4, 2), (1, 1), (6, 6), (5, 1), (20, 18), (7, 3), (1, 1), (2, 1)):
        request.forward(WRONG[:rows], keep)
        at += keep
        assert request.cache.offset == at
        assert {layer.offset for layer in request.cache.layers} == {at}


def test_a_window_is_cut_only_right_after_a_step_of_many_rows():
    request = Request("window")
    request.forward(TEXT[:30])
    request.forward(TEXT[30:31])
    with pytest.raises(AssertionError, match="two or more rows"):
        request.cache.advance(2, 1)


@pytest.mark.parametrize("force, rows", [(False, 1), (False, 3), (True, 1)])
def test_mlx_lm_cannot_trim_a_full_window(force, rows):
    """The control, and the reason for a rule of our own: mlx-lm drops nothing or, when made to, the wrong rows."""
    model = tiny_model("gemma3_text")
    cache = make_prompt_cache(model)
    model(mx.array([TEXT[:40]]), cache=cache)
    model(mx.array([[*TEXT[40:42], *WRONG[42:45]]]), cache=cache)
    assert trim_prompt_cache(cache, 3) == 0
    if force:
        for layer in cache:
            layer.trim(3)
    logits = model(mx.array([TEXT[42 : 42 + rows]]), cache=cache)[0]
    assert mx.abs(logits - truth("window")[42 : 42 + rows]).max().item() > 0.5


def kinds(cache):
    return {type(layer) for layer in cache.layers}


def test_room_ends_where_quantisation_starts():
    target = pair_of(tiny_model("llama")).target
    cache = target.start(KVOptions(8, 32, 10))
    assert cache.room() == 10
    for rows, keep, room, kind in ((7, 7, 3, KVCache), (3, 1, 2, KVCache), (2, 2, None, QuantizedKVCache),
                                   (9, 4, None, QuantizedKVCache)):  # fmt: skip
        target.forward(mx.array([WRONG[:rows]]), cache)
        cache.advance(rows, keep)
        assert cache.room() == room and kinds(cache) == {kind}
    assert cache.offset == 14


def test_room_at_start_zero_is_the_first_row():
    """mlx-lm, too, runs the first row on a cache that is not quantised yet."""
    target = pair_of(tiny_model("llama")).target
    cache = target.start(KVOptions(8, 32, 0))
    assert cache.room() == 1 and kinds(cache) == {KVCache}
    target.forward(mx.array([[3]]), cache)
    cache.advance(1, 1)
    assert cache.room() is None and kinds(cache) == {QuantizedKVCache}


def test_room_is_unlimited_without_quantisation():
    assert pair_of(tiny_model("gemma3_text")).target.start(KVOptions()).room() is None


@pytest.mark.parametrize("kind, class_name", [("gemma3_text", "RotatingKVCache"), ("longcat_flash", "CacheList"),
                                              ("lfm2", "ArraysCache")])
def test_kv_bits_refuses_what_cannot_be_quantised(kind, class_name):
    with pytest.raises(CacheError, match=f"--kv-bits 8 .*{class_name}") as caught:
        TargetCache(tiny_model(kind), KVOptions(8))
    assert "\n" not in str(caught.value)


def hybrid_in_a_list():
    """A model whose CacheList holds a recurrent state next to a KV cache."""
    model = build_model("llama")
    model.make_cache = lambda: [CacheList(KVCache(), ArraysCache(1)) for _ in model.layers]
    return model


@pytest.mark.parametrize("model", (lambda: tiny_model("lfm2"), hybrid_in_a_list), ids=("hybrid", "in a list"))
def test_recurrent_state_is_refused(model):
    cache = TargetCache(model(), KVOptions())
    with pytest.raises(CacheError, match="ArraysCache.*--policy plain") as caught:
        cache.require_rollback()
    assert "\n" not in str(caught.value)


def test_a_subclass_of_a_known_cache_is_refused():
    class Remembering(KVCache):
        pass

    cache = TargetCache(tiny_model("llama"), KVOptions())
    cache.require_rollback()
    cache.layers[2] = Remembering()
    with pytest.raises(CacheError, match="Remembering"):
        cache.require_rollback()


def test_a_hybrid_is_refused_before_any_work(monkeypatch):
    model, prompt = build_model("lfm2"), random_tokens(5)
    monkeypatch.setattr(type(model), "__call__", lambda *args, **kwargs: pytest.fail("the model ran"))
    with pytest.raises(CacheError, match="ArraysCache"):
        run(pair_of(model, Adversarial(prompt, [])), prompt, 5)


@pytest.mark.parametrize("length", (1, 5, 200))
def test_a_hybrid_decodes_plainly(length):
    """Also with a draft at hand, which the plain policy leaves alone."""
    model, prompt = tiny_model("lfm2"), random_tokens(length, seed=length)
    text = plain(model, prompt, 30)
    assert len(set(text)) > 10
    assert tokens_of(run(pair_of(model), prompt, 30, "plain")) == text
    assert tokens_of(run(pair_of(model, Adversarial(prompt, text)), prompt, 30, "plain")) == text
