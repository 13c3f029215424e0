"""Greedy text with a draft is the plain text, token for token.

With mlx's own BLAS a forward of 1 to 16 rows gives each row the same bits, so float32 must be equal.
"""

from functools import cache

import mlx.core as mx
import pytest
from helpers import (
    GAMMA,
    GOLDEN,
    WINDOW,
    Adversarial,
    Scripted,
    build_model,
    embedded_pair,
    golden_pair,
    pair_of,
    plain,
    prompt_of,
    run,
    tiny_model,
    tokens_of,
    untrained_draft,
)
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.utils import load_model

from mlx_dspark import cache as cache_module
from mlx_dspark.load import Pair, read_draft
from mlx_dspark.structs import KVOptions, Sampling
from mlx_dspark.target import Target

TARGETS = ("qwen3", "llama", "gemma3_text", "embedded", "golden")
TRAINED = ("embedded", "golden")
DRAFTS = ("adversarial", "scripted", "untrained", "trained")
LENGTHS = (0, 3, 1, GAMMA, 2)
TOKENS = 36
assert TOKENS > 2 * WINDOW  # also a prompt of one token crosses the window


def tokens_for(kind):
    """The embedded target is much larger than the others."""
    return 24 if kind == "embedded" else TOKENS


def trained_pair(kind):
    return embedded_pair() if kind == "embedded" else golden_pair()


def target_of(kind):
    return trained_pair(kind).target if kind in TRAINED else pair_of(tiny_model(kind)).target


def make_draft(name, kind, prompt, text):
    if name == "adversarial":
        return Adversarial(prompt, text)
    if name == "right":
        return Scripted(prompt, text, (GAMMA,))
    if name == "scripted":
        return Scripted(prompt, text, LENGTHS)
    return trained_pair(kind).draft if name == "trained" else untrained_draft(target_of(kind))


@cache
def plain_text(kind, length, **options):
    text = plain(target_of(kind).model, prompt_of(kind, length), tokens_for(kind), **options)
    assert len(set(text)) > len(text) // 5, "a text that repeats itself would hide errors"
    return text


def check(kind, draft_name, length, *, plain_options=None, **options):
    """Decode with a draft, compare with mlx-lm; returns the rounds."""
    target, prompt = target_of(kind), prompt_of(kind, length)
    text = plain_text(kind, length, **(plain_options or {}))
    draft = make_draft(draft_name, kind, prompt, text)
    rounds = run(Pair(target, None, draft), prompt, len(text), **options)
    assert tokens_of(rounds) == text
    if isinstance(draft, Scripted):
        assert [landed.accepted for landed in rounds if landed.rows > 1] == draft.accepted(rounds)
    return rounds


def cases(*axes):
    """Every target with every draft it has, times the other axes."""
    found = [(kind, draft) for kind in TARGETS for draft in DRAFTS if draft != "trained" or kind in TRAINED]
    for axis in axes:
        found = [(*case, value) for case in found for value in axis]
    return found


@pytest.mark.parametrize("kind, draft, length", cases((1, 5, 80)))
def test_prompt_lengths(kind, draft, length):
    rounds = check(kind, draft, length)
    if draft == "trained":
        assert max(landed.accepted for landed in rounds) >= 3, "the trained draft accepts next to nothing"


@pytest.mark.parametrize("length", (17, 40))
@pytest.mark.parametrize("kind", TARGETS)
def test_small_prefill_steps(kind, length):
    check(kind, "scripted", length, prefill_step=16, plain_options={"prefill_step_size": 16})


@pytest.mark.parametrize("kind", TARGETS)
def test_a_prefill_step_other_than_that_of_plain_decoding(kind):
    check(kind, "untrained", 16, prefill_step=3)


POLICIES = ("fixed:1", "fixed:2", "fixed", "threshold:0", "threshold:0.5", "threshold:1", "plain")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind, draft", [(k, "untrained") for k in TARGETS[:3]] + [(k, "trained") for k in TRAINED])
def test_policies(kind, draft, policy):
    rounds = check(kind, draft, 5, policy=policy)
    widest = max(landed.rows for landed in rounds)
    gamma = trained_pair(kind).draft.gamma if draft == "trained" else GAMMA
    limits = {"fixed:1": 2, "fixed:2": 3, "fixed": gamma + 1, "threshold:0": gamma + 1, "threshold:1": 1, "plain": 1}
    assert widest == limits.get(policy, widest)


@pytest.mark.parametrize("kind, draft", [(k, d) for k in ("qwen3", "gemma3_text") for d in ("adversarial", "scripted")])
@pytest.mark.parametrize("policy", ("fixed:1", "fixed:3", "plain"))
def test_policies_with_known_drafts(kind, draft, policy):
    check(kind, draft, 5, policy=policy)


KV = {  # quantised from the first row on, from within the generated text, and from within the prompt
    "8-bit": (8, 0, 5), "8-bit-crossed": (8, 21, 5), "8-bit-in-prompt": (8, 30, 40),
    "4-bit": (4, 0, 5), "4-bit-crossed": (4, 21, 5), "4-bit-one-token": (4, 0, 1),
}  # fmt: skip


def kv_cases():
    """Every target with every setting, its drafts in turn."""
    found = []
    for kind in (kind for kind in TARGETS if kind != "gemma3_text"):
        drafts = [draft for target, draft in cases() if target == kind]
        for turn, setting in enumerate(KV):
            draft = drafts[turn % len(drafts)]
            found.append(pytest.param(kind, draft, *KV[setting], id=f"{kind}-{draft}-{setting}"))
    return found


@pytest.mark.parametrize("kind, draft, bits, start, length", kv_cases())
def test_quantised_kv(kind, draft, bits, start, length):
    plain_options = {"kv_bits": bits, "quantized_kv_start": start, "kv_group_size": 32, "prefill_step_size": 16}
    check(kind, draft, length, kv=KVOptions(bits, 32, start), prefill_step=16, plain_options=plain_options)


@pytest.mark.parametrize("start", range(15, 23))
@pytest.mark.parametrize("kind", ("qwen3", "llama"))
def test_no_round_reaches_past_the_start_of_quantisation(kind, start):
    """Drafts that are always right make the widest rounds; 2 bits show which rows saw which cache."""
    plain_options = {"kv_bits": 2, "quantized_kv_start": start, "kv_group_size": 64}
    rounds = check(kind, "right", 5, kv=KVOptions(2, 64, start), plain_options=plain_options)
    assert start in [landed.start for landed in rounds]


@pytest.mark.parametrize("kind", ("qwen3", "llama", "embedded"))  # the golden target is too sure to be moved
def test_quantised_kv_changes_the_text(kind):
    """So the test above compares with something else than the full-precision text."""
    assert plain_text(kind, 5, kv_bits=4, quantized_kv_start=0, kv_group_size=32) != plain_text(kind, 5)


PENALTIES = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 3.0},
    "frequency": {"frequency_penalty": 4.0, "frequency_context_size": 16},
    "bias": {},
    "all": {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 0.5},
}


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("kind, draft", [("qwen3", "adversarial"), ("llama", "untrained"), ("gemma3_text", "scripted"),
                                         ("qwen3", "scripted"), ("embedded", "trained"), ("golden", "trained")])
def test_penalties(kind, draft, name):
    options = dict(PENALTIES[name])
    if name in ("bias", "all"):  # a token that the text has, and one that it may not have
        options["logit_bias"] = {plain_text(kind, 5)[3]: -100.0, 7: 2.0}
    plain_options = {"logits_processors": tuple(make_logits_processors(**options))}
    check(kind, draft, 5, sampling=Sampling(**options), plain_options=plain_options)
    assert plain_text(kind, 5, **plain_options) != plain_text(kind, 5)


@pytest.mark.parametrize("kind", TARGETS)
def test_a_missing_rollback_is_noticed(kind, monkeypatch):
    """The control: these comparisons fail when rejected drafts stay in the cache."""
    for cache_class in cache_module._ROLLBACK:
        monkeypatch.setitem(cache_module._ROLLBACK, cache_class, lambda part, rows: None)
    with pytest.raises(AssertionError):
        check(kind, "adversarial", 5)


# bfloat16 keeps 8 bits: a logit of size x is a multiple of x / 256, and the sum it comes from was rounded
# a few times. Two logits closer than four such steps of the largest may change places.
TIE = 4 / 256


def check_up_to_near_ties(model, prompt, text, other):
    """Assert that two texts are equal or first differ where the plain logits nearly tie."""
    at = next((i for i, (a, b) in enumerate(zip(text, other)) if a != b), None)
    if at is None:
        return
    tokens = mx.array([[*prompt, *text[:at]]])
    logits = model(tokens, cache=make_prompt_cache(model))[0, -1].astype(mx.float32)
    margin = (logits.max() - logits[other[at]]).item()
    bound = TIE * mx.abs(logits).max().item()
    assert margin <= bound, f"token {at}: {text[at]} became {other[at]}, {margin:.3f} below the top (bound {bound:.3f})"


def bf16_pair(kind):
    if kind == "golden":
        model, config = load_model(GOLDEN / "qwen3_target")
        model.set_dtype(mx.bfloat16)
        return Pair(Target(model, config, kind), None, read_draft(GOLDEN / "qwen3_dspark_vanilla", mx.bfloat16))
    return pair_of(build_model(kind, dtype=mx.bfloat16))


@pytest.mark.parametrize("prefill_step", (7, 2048))  # 7 rows and 79 rows are rounded differently
@pytest.mark.parametrize("kind", ("qwen3", "llama", "gemma3_text", "golden"))
def test_bfloat16_differs_only_at_near_ties(kind, prefill_step):
    pair, prompt = bf16_pair(kind), prompt_of(kind, 80)
    model = pair.target.model
    text = plain(model, prompt, TOKENS)
    draft = pair.draft or Scripted(prompt, text, LENGTHS)
    rounds = run(Pair(pair.target, None, draft), prompt, TOKENS, prefill_step=prefill_step)
    assert pair.target.dtype == mx.bfloat16 and len(tokens_of(rounds)) == TOKENS
    check_up_to_near_ties(model, prompt, text, tokens_of(rounds))


@pytest.mark.parametrize("kind", ("qwen3", "llama", "gemma3_text", "golden"))
def test_a_wrong_token_is_no_near_tie(kind):
    """The control: the check above fails on a token that is simply wrong."""
    model, prompt = bf16_pair(kind).target.model, prompt_of(kind, 80)
    text = plain(model, prompt, 20)
    with pytest.raises(AssertionError, match=f"token 10: {text[10]} became"):
        check_up_to_near_ties(model, prompt, text, [*text[:10], text[10] + 1, *text[11:]])
