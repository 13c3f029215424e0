"""Stored beginnings: what they give back is what a cold run computes, for the target and for the draft."""

from dataclasses import dataclass

import mlx.core as mx
import pytest
from helpers import (
    VOCAB,
    best,
    build_model,
    golden_pair,
    pair_of,
    prompt_of,
    random_tokens,
    tiny_model,
)
from mlx.utils import tree_flatten

from mlx_dspark.draft.classic import ClassicDraft
from mlx_dspark.serve.prefix import PrefixCache, common
from mlx_dspark.structs import KVOptions
from mlx_dspark.target import Target

HERE = [token % VOCAB for token in prompt_of("golden", 60)]  # the random models know no more
PLENTY = 10**9
FULL = KVOptions()


def make_pair(name):
    if name == "golden":
        return golden_pair()
    if name == "eagle3":
        return golden_pair("qwen3_eagle3")
    if name == "classic":
        small = build_model("llama", seed=9, num_hidden_layers=2)
        return pair_of(tiny_model("qwen3"), ClassicDraft(Target(small, dict(vars(small.args)), "small")))
    return pair_of(tiny_model(name))


@dataclass
class Warm:
    """A target cache and draft state after some tokens."""

    cache: object
    state: object


def run(pair, tokens, warm=None, kv=FULL, behind=0):
    """Feed `tokens`, those from `behind` on, in rows of at most 7; then a proposal after anchor 3."""
    cache = pair.target.start(kv) if warm is None else warm.cache
    state = None if pair.draft is None else pair.draft.start() if warm is None else warm.state
    taps = () if pair.draft is None else pair.draft.taps
    logits = None
    for first in range(behind, len(tokens), 7):
        rows = mx.array([tokens[first : first + 7]])
        verified = pair.target.forward(rows, cache, taps)
        cache.advance(rows.shape[1], rows.shape[1])
        logits = verified.logits[:, -1]
        if pair.draft is not None:
            pair.draft.observe(state, rows, verified.taps)
    proposal = None if pair.draft is None else pair.draft.propose(state, mx.array([3]), 2, best)
    return Warm(cache, state), logits, proposal


def agree(pair, prompt, hit, kv=FULL):
    """A run behind a hit gives the logits and the proposal of a cold one."""
    _, cold, proposed = run(pair, prompt, kv=kv)
    _, warm, again = run(pair, prompt, Warm(hit.cache, hit.state), behind=hit.length)
    assert mx.abs(cold - warm).max().item() < 1e-4 * mx.abs(cold).max().item()
    if proposed is not None:
        assert proposed.tokens.tolist() == again.tokens.tolist()
        assert mx.abs(proposed.logits - again.logits).max().item() < 1e-3


@pytest.mark.parametrize("name", ["golden", "eagle3", "classic", "llama"])
def test_a_longer_and_a_parting_prompt_run_as_if_cold(name):
    pair = make_pair(name)
    prefix = PrefixCache(pair.draft, PLENTY)
    text = HERE[:40]
    warm, _, _ = run(pair, text)
    prefix.store(text, warm.cache, warm.state)
    for prompt in ([*text, *HERE[50:58]], [*text[:25], *HERE[30:45]]):
        hit = prefix.find(prompt)
        shared = common(prompt, text)
        assert shared - 1 <= hit.length <= shared
        agree(pair, prompt, hit)
    again = prefix.find([*text, *HERE[50:58]])  # the hits before wrote behind their own copies
    agree(pair, [*text, *HERE[50:58]], again)
    assert (prefix.hits, prefix.misses, len(prefix)) == (3, 0, 1)


def test_the_last_token_of_a_prompt_is_always_run():
    pair = make_pair("golden")
    prefix = PrefixCache(pair.draft, PLENTY)
    warm, _, _ = run(pair, HERE[:20])
    prefix.store(HERE[:20], warm.cache, warm.state)
    hit = prefix.find(HERE[:20])
    assert hit.length == 19
    agree(pair, HERE[:20], hit)


def test_tokens_of_which_no_row_is_stored_are_not_claimed():
    """A request's last token was never run; rows behind the known tokens (a round in flight) do not count."""
    pair = make_pair("golden")
    for extra in (HERE[20:21], []):
        prefix = PrefixCache(pair.draft, PLENTY)
        known = HERE[:20] if extra else HERE[:17]
        warm, _, _ = run(pair, HERE[:20])
        prefix.store([*known, *extra], warm.cache, warm.state)
        hit = prefix.find([*HERE[:22]])
        assert hit.length == len(known)
        agree(pair, HERE[:22], hit)


def test_windows_are_only_had_whole():
    pair = make_pair("gemma3_text")
    text = random_tokens(60, seed=2)
    prefix = PrefixCache(None, PLENTY)
    warm, _, _ = run(pair, text)
    prefix.store(text, warm.cache, None)
    assert prefix.find([*text[:30], 1, 2]) is None
    agree(pair, [*text, 5, 6], prefix.find([*text, 5, 6]))


def test_a_quantised_beginning_is_not_given_to_a_run_that_would_not_have_it_yet():
    pair, kv = make_pair("llama"), KVOptions(8, 32, 16)
    prefix = PrefixCache(None, PLENTY)
    text = random_tokens(40, seed=2)
    warm, _, _ = run(pair, text, kv=kv)
    prefix.store(text, warm.cache, None)
    assert prefix.find([*text[:10], 1, 2]) is None
    agree(pair, [*text[:35], 5, 6], prefix.find([*text[:35], 5, 6]), kv)


def test_the_least_recently_used_entry_goes_first_and_bytes_are_kept():
    pair = make_pair("llama")
    texts = [random_tokens(20, seed=seed) for seed in (1, 2, 3)]
    caches = [run(pair, text)[0].cache for text in texts]
    one = caches[0].compact(20).nbytes
    prefix = PrefixCache(None, 2 * one)
    for text, cache in zip(texts[:2], caches, strict=False):
        prefix.store(text, cache, None)
    prefix.find(texts[0])
    prefix.store(texts[2], caches[2], None)
    assert [prefix.find(text) is not None for text in texts] == [True, False, True]
    assert prefix.nbytes == 2 * one
    prefix.shrink(0)
    assert (len(prefix), prefix.nbytes) == (0, 0)


def bytes_a_position(pair, tokens, kv=FULL):
    """Bytes of the target's K/V and the draft's, from the arrays of a run: [1, H, positions or more, ...]."""
    warm, _, _ = run(pair, tokens, kv=kv)
    context = () if pair.draft is None else pair.draft.keep(warm.state)
    context = context if isinstance(context, (list, tuple)) else [context]
    arrays = [array for _, array in tree_flatten([warm.cache.arrays, [part.arrays for part in context]])
              if isinstance(array, mx.array)]
    return sum(array.nbytes // array.shape[2] for array in arrays)


@pytest.mark.parametrize(("name", "kv"), [("golden", FULL), ("eagle3", FULL), ("classic", FULL), ("llama", FULL),
                                          ("gemma3_text", FULL), ("llama", KVOptions(8, 32, 4))])
def test_an_entry_takes_the_memory_of_its_tokens(name, kv):
    """Caches grow by 256 positions; what is stored has as many as tokens, whatever was in flight behind them."""
    pair = make_pair(name)
    text = random_tokens(9, seed=3)
    prefix = PrefixCache(pair.draft, PLENTY)
    warm, _, _ = run(pair, text, kv=kv)
    prefix.store([*text, 5], warm.cache, warm.state)
    least = bytes_a_position(pair, text, kv)
    assert 8 * least <= prefix.nbytes <= 9 * least  # eagle3's newest row waits for a token
    agree(pair, [*text, 5, 6], prefix.find([*text, 5, 6]), kv)


def test_a_window_that_has_not_turned_leaves_its_room_behind():
    pair = make_pair("gemma3_text")
    text = random_tokens(9, seed=3)
    warm, _, _ = run(pair, text[:7])
    for token in text[7:]:  # a window makes room where single rows are run
        pair.target.forward(mx.array([[token]]), warm.cache)
        warm.cache.advance(1, 1)
    room = max(layer.keys.shape[2] for layer in warm.cache.layers)
    assert room > len(text)
    prefix = PrefixCache(None, PLENTY)
    prefix.store(text, warm.cache, None)
    assert prefix.nbytes == 9 * bytes_a_position(pair, text)
    for more in ([5], [5, 6, 7]):  # one row and several take different ways into a window
        agree(pair, [*text, *more], prefix.find([*text, *more]))


def test_a_stored_entry_does_not_hold_the_memory_it_was_copied_of():
    pair = make_pair("llama")
    prefix = PrefixCache(None, PLENTY)
    before = mx.get_active_memory()
    for seed in range(20):
        text = random_tokens(9, seed=seed)
        cache = run(pair, text)[0].cache
        mx.eval(cache.arrays)
        prefix.store(text, cache, None)
        del cache
    assert len(prefix) == 20
    slack = 16384 * 2 * len(pair.target.layers) * 20  # mlx copies nothing to save less than 16 kB an array
    assert mx.get_active_memory() - before < prefix.nbytes + slack


def test_a_beginning_that_nobody_could_use_is_not_kept():
    """Rows of a round in flight have moved the window on: it could never be had at the tokens that are known."""
    pair = make_pair("gemma3_text")
    prefix = PrefixCache(None, PLENTY)
    prefix.store(HERE[:17], run(pair, HERE[:20])[0].cache, None)
    assert (len(prefix), prefix.nbytes) == (0, 0)


def test_a_draft_model_that_has_not_run_leaves_nothing():
    pair = make_pair("classic")
    state = pair.draft.start()
    pair.draft.observe(state, mx.array([HERE[:9]]), None)
    prefix = PrefixCache(pair.draft, PLENTY)
    prefix.store(HERE[:9], run(pair, HERE[:9])[0].cache, state)
    assert (len(prefix), prefix.find(HERE[:12])) == (0, None)


def test_an_entry_that_begins_a_newer_one_goes_with_its_arrival():
    pair = make_pair("llama")
    text = random_tokens(30, seed=1)
    prefix = PrefixCache(None, PLENTY)
    for length, entries in ((10, 1), (30, 1), (20, 1)):  # the last one is held by the one before
        prefix.store(text[:length], run(pair, text[:length])[0].cache, None)
        assert len(prefix) == entries
    assert prefix.find([*text, 1]).length == 30


def test_nothing_larger_than_the_limit_is_kept():
    pair = make_pair("llama")
    prefix = PrefixCache(None, 100)
    prefix.store(HERE[:20], run(pair, HERE[:20])[0].cache, None)
    assert len(prefix) == 0


@pytest.mark.parametrize(("a", "b", "length"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [2], 0), ([5], [5], 1)])
def test_common(a, b, length):
    assert common(a, b) == common(b, a) == length
