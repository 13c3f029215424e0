"""Greedy text with a draft is the plain text, token for token.

With mlx's own BLAS a forward of 1 to 16 rows gives each row the same bits, so float32 must be equal.
"""

import mlx.core as mx
import pytest
from helpers import (
    GAMMA,
    WINDOW,
    Adversarial,
    Scripted,
    build_model,
    embedded_pair,
    golden_pair,
    golden_target,
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
from mlx_dspark.draft import read_draft
from mlx_dspark.load import Pair
from mlx_dspark.structs import KVOptions, Sampling
from mlx_dspark.target import Target

TARGETS = ("qwen3", "llama", "gemma3_text", "embedded", "golden")
TRAINED = ("embedded", "golden")
DRAFTS = ("adversarial", "scripted", "untrained", "trained")
LENGTHS = (0, 3, 1, GAMMA, 2)
TOKENS = 40
assert TOKENS > 2 * WINDOW  # also a prompt of one token crosses the window


def trained_pair(kind):
    return embedded_pair() if kind == "embedded" else golden_pair()


def target_of(kind):
    return trained_pair(kind).target if kind in TRAINED else pair_of(tiny_model(kind)).target


def make_draft(name, kind, prompt, text):
    if name == "adversarial":
        return Adversarial(prompt, text)
    if name == "scripted":
        return Scripted(prompt, text, LENGTHS)
    return trained_pair(kind).draft if name == "trained" else untrained_draft(target_of(kind))


def check(kind, draft_name, length, *, plain_options=None, **options):
    """Decode with a draft, compare with mlx-lm; returns the rounds."""
    target, prompt = target_of(kind), prompt_of(kind, length)
    text = plain(target.model, prompt, TOKENS, **(plain_options or {}))
    assert len(set(text)) > TOKENS // 4, "a text that repeats itself would hide errors"
    draft = make_draft(draft_name, kind, prompt, text)
    rounds = run(Pair(target, None, draft), prompt, TOKENS, **options)
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


@pytest.mark.parametrize("kind, draft, length", cases((1, 5, 200)))
def test_prompt_lengths(kind, draft, length):
    rounds = check(kind, draft, length)
    if draft == "trained":
        assert max(landed.accepted for landed in rounds) >= 3, "the trained draft accepts next to nothing"


@pytest.mark.parametrize("length", (17, 40))
@pytest.mark.parametrize("kind", TARGETS)
def test_small_prefill_steps(kind, length):
    check(kind, "scripted", length, prefill_step=16, plain_options={"prefill_step_size": 16})


@pytest.mark.parametrize("kind", TARGETS)
def test_the_prefill_step_does_not_matter_to_the_draft(kind):
    check(kind, "untrained", 16, prefill_step=3)


@pytest.mark.parametrize("policy", ("fixed:1", "fixed:2", "fixed", "threshold:0", "threshold:0.5", "threshold:1", "plain"))
@pytest.mark.parametrize("kind, draft", [(k, "untrained") for k in TARGETS] + [(k, "trained") for k in TRAINED])
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


@pytest.mark.parametrize("bits, start, length", KV.values(), ids=KV.keys())
@pytest.mark.parametrize("kind, draft", [case for case in cases() if case[0] != "gemma3_text"])
def test_quantised_kv(kind, draft, bits, start, length):
    plain_options = {"kv_bits": bits, "quantized_kv_start": start, "kv_group_size": 32, "prefill_step_size": 16}
    check(kind, draft, length, kv=KVOptions(bits, 32, start), prefill_step=16, plain_options=plain_options)


@pytest.mark.parametrize("kind", ("qwen3", "embedded"))
def test_quantised_kv_changes_the_text(kind):
    """So the tests above compare with something else than the full-precision text."""
    target, prompt = target_of(kind), prompt_of(kind, 5)
    exact = plain(target.model, prompt, TOKENS)
    assert plain(target.model, prompt, TOKENS, kv_bits=4, quantized_kv_start=0, kv_group_size=32) != exact


PENALTIES = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 3.0},
    "frequency": {"frequency_penalty": 2.0, "frequency_context_size": 7},
    "bias": {"logit_bias": {5: 8.0, 17: -100.0}},
    "all": {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {5: 4.0}},
}


@pytest.mark.parametrize("options", PENALTIES.values(), ids=PENALTIES.keys())
@pytest.mark.parametrize("kind, draft", [("qwen3", "adversarial"), ("llama", "untrained"), ("gemma3_text", "scripted"),
                                         ("qwen3", "scripted"), ("embedded", "trained"), ("golden", "trained")])
def test_penalties(kind, draft, options):
    processors = make_logits_processors(**options)
    check(kind, draft, 5, sampling=Sampling(**options), plain_options={"logits_processors": processors})


@pytest.mark.parametrize("name", ("repetition", "presence", "frequency", "bias"))
def test_penalties_change_the_text(name):
    model, prompt = golden_target().model, prompt_of("golden", 5)
    processors = make_logits_processors(**PENALTIES[name])
    assert plain(model, prompt, TOKENS, logits_processors=processors) != plain(model, prompt, TOKENS)


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
        model, config = load_model(golden_directory("qwen3_target"))
        model.set_dtype(mx.bfloat16)
        return Pair(Target(model, config, kind), None, read_draft(golden_directory("qwen3_dspark_vanilla"), mx.bfloat16))
    return pair_of(build_model(kind, dtype=mx.bfloat16))


def golden_directory(name):
    from helpers import GOLDEN

    return GOLDEN / name


@pytest.mark.parametrize("prefill_step", (7, 2048))  # 7 rows and 199 rows are rounded differently
@pytest.mark.parametrize("kind", ("qwen3", "llama", "gemma3_text", "golden"))
def test_bfloat16_differs_only_at_near_ties(kind, prefill_step):
    pair, prompt = bf16_pair(kind), prompt_of(kind, 200)
    model = pair.target.model
    text = plain(model, prompt, TOKENS)
    draft = pair.draft or Scripted(prompt, text, LENGTHS)
    rounds = run(Pair(pair.target, None, draft), prompt, TOKENS, prefill_step=prefill_step)
    assert pair.target.dtype == mx.bfloat16 and len(tokens_of(rounds)) == TOKENS
    check_up_to_near_ties(model, prompt, text, tokens_of(rounds))


@pytest.mark.parametrize("kind", ("qwen3", "llama", "gemma3_text", "golden"))
def test_a_wrong_token_is_no_near_tie(kind):
    """The control: the check above fails on a token that is simply wrong."""
    model, prompt = bf16_pair(kind).target.model, prompt_of(kind, 200)
    text = plain(model, prompt, 20)
    with pytest.raises(AssertionError, match=f"token 10: {text[10]} became"):
        check_up_to_near_ties(model, prompt, text, [*text[:10], text[10] + 1, *text[11:]])
