"""The one processed distribution and the accept rule: fixtures, filters, exactness by enumeration and by counting."""

import itertools
import json
import math
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers import passed, weights_after
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from mlx_dspark.draft import BlockDraft, DraftSpec
from mlx_dspark.draft.spec import RopeSpec
from mlx_dspark.kernels.accept import leading_run
from mlx_dspark.kernels.softmax import log_softmax
from mlx_dspark.sampling import (
    COLDEST,
    ArgmaxPick,
    GreedyRule,
    GumbelPick,
    SampledRule,
    logprobs_of,
    make_rule,
    make_shape,
    most_likely,
)
from mlx_dspark.schedule import Fixed, Threshold
from mlx_dspark.structs import Sampling

GOLDEN = Path(__file__).parent / "golden" / "sampling"
PROBABILITY = 1e-5
FILTERS = [
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 0.7},
    {"top_k": 5, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
]


def named(settings):
    return "-".join(f"{name}={value}" for name, value in settings.items()) or "all-off"


def sampling(**settings):
    return Sampling(**{"temperature": 1.0, **settings})


def close(actual, expected, tolerance):
    np.testing.assert_allclose(np.array(actual), np.array(expected), rtol=0, atol=tolerance)


# --- fixtures of the reference's rejection sampler ----------------------------------------------------------------


@cache
def tensors():
    return mx.load(str(GOLDEN / "sampling.safetensors"))


class Case:
    """One recorded verification, with a leading axis for one request."""

    def __init__(self, facts):
        self.facts, self.name = facts, facts["name"]
        self.temperature = facts["temperature"]
        self.accepted = facts["accepted_draft_tokens"]
        self.drafts = mx.array(facts["draft_tokens"], dtype=mx.int32)[None]  # [1, N]
        self.logits = self["target_logits"][None]  # [1, N + 1, V]
        self.next = self["next_token_distribution"]
        count = facts["num_draft_tokens"]
        self.mask = facts["accept_prefix_mask"] or []
        self.uniforms = self["uniforms"][None] if count else mx.zeros((1, 0))

    def __getitem__(self, part):
        return tensors()[f"{self.name}.{part}"]

    def log_q(self, shape):
        if not self.facts["num_draft_tokens"]:
            return mx.zeros((1, 0, self.facts["vocab"]))
        if f"{self.name}.draft_logits" in tensors():
            return shape(self["draft_logits"])[None]
        return mx.log(self["draft_probs"])[None]  # not normalised, on purpose

    @property
    def raw_accepted(self):
        """The accepted run before a stop token cuts it: the rule knows no stop tokens."""
        return sum(self.mask)


CASES = [Case(facts) for facts in json.loads((GOLDEN / "sampling.json").read_text())]
SAMPLED = [case for case in CASES if case.temperature > 0]
GREEDY = [case for case in CASES if case.temperature < 1e-5]


TINY = "tiny_draft_probability"  # q(x) = 1e-28 under p(x) = 2e-26: the reference's clamp at 1e-8 rejects, p/q = 149


def test_a_draft_probability_below_the_references_clamp_is_judged_by_the_true_ratio():
    case = next(case for case in SAMPLED if case.name == TINY)
    shape = make_shape(sampling(temperature=case.temperature, seed=0))
    p, q = mx.exp(shape(case.logits))[:, :-1], mx.exp(case.log_q(shape))
    assert passed(p, q, case.drafts, case.uniforms).tolist() == [[True]]
    assert passed(p, mx.maximum(q, 1e-8), case.drafts, case.uniforms).tolist() == [case.mask] == [[False]]


@pytest.mark.parametrize("case", [case for case in SAMPLED if case.name != TINY], ids=lambda case: case.name)
def test_recorded_accept_decisions(case):
    settings = sampling(temperature=case.temperature, seed=0)
    rule, shape = make_rule(settings), make_shape(settings)
    log_q = case.log_q(shape)
    p, q = mx.exp(shape(case.logits)), mx.exp(log_q)
    mask = passed(p, q, case.drafts, case.uniforms)
    assert mx.cumprod(mask.astype(mx.int32), axis=1)[0].tolist() == case.mask
    assert leading_run(mask).tolist() == [case.raw_accepted]

    verdict = rule.judge_with(case.drafts, log_q, case.logits, None, case.uniforms, rule.start())
    assert verdict.accepted.tolist() == [case.raw_accepted]
    assert verdict.tokens[0, : case.raw_accepted].tolist() == case.facts["draft_tokens"][: case.raw_accepted]


@pytest.mark.parametrize("case", SAMPLED, ids=lambda case: case.name)
def test_recorded_next_token_distribution(case):
    shape = make_shape(sampling(temperature=case.temperature))
    p, q = mx.exp(shape(case.logits)), mx.exp(case.log_q(shape))
    close(p[0], case["target_probs"], PROBABILITY)
    weights = weights_after(p, q, mx.array([case.accepted]))[0]
    close(weights / weights.sum(), case.next, PROBABILITY)


@pytest.mark.parametrize("case", [case for case in SAMPLED if case.mask], ids=lambda case: case.name)
def test_recorded_accept_probabilities(case):
    shape = make_shape(sampling(temperature=case.temperature))
    p, q = (np.array(mx.exp(x))[0] for x in (shape(case.logits), case.log_q(shape)))
    slots, drafts = np.arange(len(case.mask)), np.array(case.drafts)[0]
    p_x, q_x = p[slots, drafts], q[slots, drafts]
    large = q_x >= 1e-8  # below, the reference clamps and our product form does not
    close(np.minimum(1, p_x[large] / q_x[large]), np.array(case["accept_prob"])[large], PROBABILITY)


@pytest.mark.parametrize("case", GREEDY, ids=lambda case: case.name)
def test_recorded_greedy_decisions(case):
    verdict = make_rule(Sampling(temperature=0)).judge(case.drafts, None, case.logits, None, None)
    assert verdict.accepted.tolist() == [case.accepted]
    wanted = case.facts["draft_tokens"][: case.accepted] + [int(mx.argmax(case.next).item())]
    assert verdict.tokens[0, : case.accepted + 1].tolist() == wanted


def test_fixtures_hold_the_special_cases():
    names = {case.name for case in CASES}
    assert {"zero_residual_mass_fallback", "tiny_draft_probability", "empty_proposal", "greedy_tie"} <= names
    tiny = next(case for case in CASES if case.name == "tiny_draft_probability")
    assert tiny["draft_probs"][0, tiny.facts["draft_tokens"][0]].item() < 1e-8


# --- the processed distribution -----------------------------------------------------------------------------------


def reference_probabilities(logits, settings):
    """mlx-lm's own filters in the order of its make_sampler, then the temperature: float64 [..., V]."""
    with_defaults = sampling(**settings)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.disable_compile()  # compiling one graph per setting takes seconds
    try:
        if 0 < with_defaults.top_p < 1:
            logprobs = apply_top_p(logprobs, with_defaults.top_p)
        if with_defaults.min_p:
            logprobs = apply_min_p(logprobs, with_defaults.min_p)
        if with_defaults.top_k:
            logprobs = apply_top_k(logprobs, with_defaults.top_k)
    finally:
        mx.enable_compile()
    scaled = np.array(logprobs, dtype=np.float64) / with_defaults.temperature
    weights = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def random_logits(*shape, scale=3.0, seed=0):
    return scale * mx.random.normal(shape, key=mx.random.key(seed))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *FILTERS,
        {"top_k": 5, "top_p": 0.95},
        {"top_k": 40, "top_p": 0.3, "min_p": 0.01},
        {"top_p": 0.95, "min_p": 0.2, "temperature": 1.7},
        {"top_k": 2},
        {"top_p": 1e-6},
        {"min_p": 0.9, "temperature": 0.1},
    ],
    ids=named,
)
def test_filters_keep_what_mlx_lm_keeps(settings):
    logits = random_logits(64, 50)
    probabilities = np.array(mx.exp(make_shape(sampling(**settings))(logits)))
    expected = reference_probabilities(logits, settings)
    np.testing.assert_array_equal(probabilities > 0, expected > 0)
    close(probabilities, expected, PROBABILITY)
    close(probabilities.sum(axis=-1, dtype=np.float64), np.ones(64), PROBABILITY)


@pytest.mark.parametrize("temperature", [2.0, 1.0, 0.1, 0.01, 1e-3, 1e-6])
def test_any_temperature_gives_a_distribution(temperature):
    """Two tokens tied far above zero: dividing by a small temperature first would round their halves away."""
    logits = random_logits(64, 50) + 30
    logits = mx.concatenate([logits, mx.full((64, 2), 45.0)], axis=-1)
    p = np.exp(np.array(make_shape(sampling(temperature=temperature))(logits), dtype=np.float64))
    close(p.sum(axis=-1), np.ones(64), PROBABILITY)
    close(p, reference_probabilities(logits, {"temperature": temperature}), PROBABILITY)


@pytest.mark.parametrize("settings", [{}, *FILTERS], ids=named)
def test_leading_axes_do_not_matter(settings):
    shape, logits = make_shape(sampling(**settings)), random_logits(2, 3, 20)
    each = [[shape(logits[i, j]).tolist() for j in range(3)] for i in range(2)]
    close(mx.exp(shape(logits)), np.exp(each), 1e-7)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.95, "top_k": 2000, "min_p": 1e-4}], ids=named)
def test_bfloat16_logits_are_cast_first(settings):
    """A softmax in bf16 over 150,000 tokens is not a distribution; the control shows that the test would see it."""
    logits = random_logits(2, 150_000).astype(mx.bfloat16)
    log_p = make_shape(sampling(**settings))(logits)
    assert log_p.dtype == mx.float32
    close(np.exp(np.array(log_p, dtype=np.float64)).sum(axis=-1), np.ones(2), 1e-5)
    uncast = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    total = np.exp(np.array(uncast.astype(mx.float32), dtype=np.float64)).sum(axis=-1)
    assert (abs(total - 1) > 1e-4).all()


def kept(logits, **settings):
    return np.flatnonzero(np.array(mx.exp(make_shape(sampling(**settings))(mx.array(logits))))).tolist()


@pytest.mark.parametrize(
    "settings, logits, tokens",
    [
        ({"min_p": 1.0}, [0.0, 3.0, 2.9], [1]),
        ({"min_p": 1.0}, [3.0, 0.0, 3.0], [0, 2]),
        ({"min_p": 0.5}, [0.0, math.log(0.5), math.log(0.499)], [0, 1]),
        ({"top_k": 2}, [1.0, 0.0, 1.0, 1.0], [0, 2, 3]),  # ties with the k-th stay
        ({"top_k": 4}, [1.0, 0.0, 1.0, 1.0], [0, 1, 2, 3]),
        ({"top_k": 100}, [1.0, 0.0, 1.0], [0, 1, 2]),
        ({"top_p": 0.5}, [math.log(0.6), math.log(0.3), math.log(0.1)], [0]),
        ({"top_p": 0.7}, [math.log(0.6), math.log(0.3), math.log(0.1)], [0, 1]),
        ({"top_p": 1.0}, [0.0, -20.0, -40.0], [0, 1, 2]),
        ({"top_p": 5.0}, [0.0, -20.0, -40.0], [0, 1, 2]),
        ({"top_p": 0.9, "top_k": 2, "min_p": 0.1}, [0.0, -math.inf, -math.inf], [0]),
        # The filters look at temperature 1: at temperature 9 all three would be inside the nucleus.
        ({"top_p": 0.5, "temperature": 9.0}, [math.log(0.6), math.log(0.3), math.log(0.1)], [0]),
        ({"min_p": 0.4, "temperature": 0.1}, [0.0, math.log(0.5), math.log(0.3)], [0, 1]),
    ],
)
def test_edges_of_the_filters(settings, logits, tokens):
    assert kept(logits, **settings) == tokens


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0}, {"temperature": -1}, {"temperature": 9e-7}, {"temperature": 1e-45}, {"top_p": 0},
     {"top_p": 0.0, "temperature": 2.0}, {"top_k": 1}],
    ids=named,
)
def test_greedy_settings(settings):
    assert sampling(**settings).greedy
    rule = make_rule(sampling(**settings))
    assert isinstance(rule, GreedyRule)
    logits = random_logits(1, 3, 9)
    verdict = rule.judge(mx.argmax(logits[:, :2], axis=-1), None, logits, None, None)
    assert verdict.accepted.tolist() == [2]
    assert verdict.tokens.tolist() == mx.argmax(logits, axis=-1).tolist()


def test_default_is_greedy_and_temperature_alone_is_not():
    assert Sampling().greedy
    assert not Sampling(temperature=1e-6).greedy
    assert isinstance(make_rule(Sampling(temperature=1.0)), SampledRule)


NOT_FINITE = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize(
    "field, value",
    [
        *itertools.product(("temperature", "top_p", "min_p"), NOT_FINITE),
        *itertools.product(("repetition_penalty", "presence_penalty", "frequency_penalty"), NOT_FINITE),
        ("top_p", -0.1),
        ("top_k", -1),
        ("top_k", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", -0.5),
        ("repetition_context_size", 0),
        ("presence_context_size", 0),
        ("frequency_context_size", -3),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_bad_values_are_refused(field, value):
    with pytest.raises(ValueError) as caught:
        sampling(**{field: value})
    assert str(caught.value).startswith(f"{field} is {value}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bias", [{-1: 1.0}, {3: math.nan}])
def test_bad_logit_bias_is_refused(bias):
    ((token, value),) = bias.items()
    with pytest.raises(ValueError, match=f"logit_bias {token}: {value}"):
        sampling(logit_bias=bias)


# --- exactness by enumeration --------------------------------------------------------------------------------------

V = 6  # the vocabulary of everything enumerated
HEADS = ["none", "vanilla", "gated", "rnn"]


def tiny_draft(markov, block, seed=0, scale=1.5):
    """A random draft whose distributions are far from uniform and from any target's."""
    spec = DraftSpec(
        family="qwen3", kind="block", hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1,
        head_dim=4, vocab_size=V, rms_norm_eps=1e-6, rope=RopeSpec(1e4), taps=(0,), block_size=block,
        windows=(None,), causal=(False,),
        mask_token_id=V - 1, markov=markov, markov_rank=0 if markov == "none" else 4, confidence=True,
        confidence_with_markov=markov != "none", num_target_layers=None,
    )
    draft = BlockDraft(spec, own_embed=True, own_head=True)
    names = [(name, array.shape) for name, array in tree_flatten(draft.parameters())]
    names.sort(key=lambda item: item[0].startswith("tables."))  # the seeds below were chosen in this order
    keys = mx.random.split(mx.random.key(seed), len(names))
    random = [(name, scale * mx.random.normal(shape, key=key)) for (name, shape), key in zip(names, keys)]
    draft.update(tree_unflatten(random))
    return draft.eval()


class TreeTarget:
    """A target whose logits depend on the whole text after the anchor."""

    def __init__(self, depth, settings, seed=1):
        self.levels = [random_logits(*[V] * (k + 1), scale=1.5, seed=seed + k) for k in range(depth)]
        self.shape = make_shape(settings)
        self.p = [np.array(mx.exp(self.shape(level)), dtype=np.float64) for level in self.levels]

    def logits(self, drafts):
        """Rows of a verify forward of drafts [B, N] -> [B, N + 1, V]."""
        columns = [drafts[:, k] for k in range(drafts.shape[1])]
        first = mx.broadcast_to(self.levels[0], (drafts.shape[0], V))
        return mx.stack([first, *(self.levels[k + 1][tuple(columns[: k + 1])] for k in range(len(columns)))], axis=1)

    def continued(self, mass, depth):
        """Mass of texts of `depth` tokens, spread over their continuations to full length."""
        for p in self.p[depth:]:
            mass = mass[..., None] * p
        return mass

    def joint(self):
        """Plain decoding: the distribution of the first tokens."""
        return self.continued(np.ones(()), 0)


def every_text(length):
    return mx.array(list(itertools.product(range(V), repeat=length)), dtype=mx.int32)


def proposals(draft, texts, shape):
    """What the draft's real `propose` returns when it is made to draw each of `texts` [B, N]."""
    rows = texts.shape[0]
    state = draft.start()
    taps = mx.broadcast_to(mx.random.normal((1, 3, draft.spec.hidden_size), key=mx.random.key(5)), (rows, 3, 8))
    draft.observe(state, mx.zeros((rows, 3), dtype=mx.int32), taps)
    return draft.propose(
        state, mx.full((rows,), 2, dtype=mx.int32), texts.shape[1],
        lambda logits, drafts: (texts[:, len(drafts)], shape(logits)),
    )


def enumerate_round(target, texts, proposal, verified):
    """The distribution of the first tokens when a round verifies `verified[i]` drafts of text i.

    Each accept test contributes its probability and each next token the weight the rule draws from.
    """
    chance = np.exp(np.take_along_axis(np.array(proposal.log_q, dtype=np.float64), np.array(texts)[..., None], -1))
    joint = 0.0
    for count in sorted(set(verified)):
        rows = np.flatnonzero(np.array(verified) == count)
        joint = joint + enumerate_width(target, texts[mx.array(rows)], proposal.log_q[mx.array(rows), :count],
                                        chance[rows].prod(axis=(1, 2)), count)
    return joint


def enumerate_width(target, texts, log_q, mass, count):
    """`mass` [B] of texts that are verified to `count` drafts -> their share of the joint distribution."""
    drafts = texts[:, :count]
    p = mx.exp(target.shape(target.logits(drafts)))
    q = mx.exp(log_q)
    accept = accept_chance(p, q, drafts)  # [B, count]
    joint = 0.0
    for accepted in range(count + 1):
        weights = np.array(weights_after(p, q, mx.full((len(mass),), accepted)), dtype=np.float64)
        reached = mass * accept[:, :accepted].prod(axis=1)
        ended = reached * (1 - accept[:, accepted]) if accepted < count else reached
        committed = np.zeros((V**accepted, V))
        prefix = np.array(drafts)[:, :accepted] @ V ** np.arange(accepted)[::-1]  # the number of the accepted text
        np.add.at(committed, prefix, ended[:, None] * weights / weights.sum(axis=1, keepdims=True))
        joint = joint + target.continued(committed.reshape((V,) * (accepted + 1)), accepted + 1)
    return joint


def accept_chance(p, q, drafts):
    """min(1, p / q) of each draft [B, N], float64; a draft that cannot be drawn has no mass and counts as 1."""
    p_x, q_x = (np.take_along_axis(np.array(x, dtype=np.float64), np.array(drafts)[..., None], -1)[..., 0]
                for x in (p[:, : drafts.shape[1]], q))
    return np.divide(np.minimum(p_x, q_x), q_x, out=np.ones_like(q_x), where=q_x > 0)


class Enumeration:
    """A random draft and a random target at block size `block`, with all texts the draft could propose."""

    def __init__(self, markov, block, **settings):
        self.target = TreeTarget(block + 1, sampling(**settings))
        self.texts = every_text(block)
        self.proposal = proposals(tiny_draft(markov, block), self.texts, self.target.shape)
        self.confidences = np.array(mx.sigmoid(self.proposal.confidence_logits)).tolist()

    def deviation(self, verified):
        """Largest difference between the joint distribution of a round and that of plain decoding."""
        joint = enumerate_round(self.target, self.texts, self.proposal, verified)
        assert abs(joint.sum() - 1) < 1e-5
        return abs(joint - self.target.joint()).max()

    def scheduled(self, policy):
        proposed = policy.before([])
        return [policy.after(proposed, confidences).drafts for confidences in self.confidences]


def middle_level(case):
    """A threshold amid the last slot's confidences, so that different texts are cut at different slots."""
    return float(np.median(np.array(case.confidences)[:, -1]))


ALL_ON = FILTERS[-1]


@pytest.mark.parametrize("settings", [{}, ALL_ON], ids=named)
@pytest.mark.parametrize("block", [1, 2, 3])
@pytest.mark.parametrize("markov", HEADS)
def test_fixed_width_is_exact(markov, block, settings):
    case = Enumeration(markov, block, **settings)
    assert case.deviation(case.scheduled(Fixed(block, f"fixed:{block}"))) < 1e-6


@pytest.mark.parametrize("settings", [{}, ALL_ON], ids=named)
@pytest.mark.parametrize("block", [1, 2, 3])
@pytest.mark.parametrize("markov", HEADS)
def test_cutting_by_confidence_is_exact(markov, block, settings):
    case = Enumeration(markov, block, **settings)
    level = middle_level(case)
    verified = case.scheduled(Threshold(level, block, f"threshold:{level}"))
    if block > 1 and markov != "none":
        assert len(set(verified)) > 1, "the cut must depend on the drafts for this test to mean something"
    assert case.deviation(verified) < 1e-6


def test_narrow_rounds_are_exact():
    case = Enumeration("vanilla", 3)
    for width in range(3):
        assert case.deviation([width] * len(case.texts)) < 1e-6


@pytest.mark.parametrize("markov", HEADS)
def test_a_scheduler_that_peeks_is_caught(markov):
    """Negative control: it looks at the token it admits."""
    case = Enumeration(markov, 2)
    assert case.deviation([2 if text[0] < V // 2 else 0 for text in case.texts.tolist()]) > 1e-3


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_a_scheduler_that_uses_the_confidence_after_is_caught(markov):
    """Negative control: slot k is admitted by c_{k+1}, which is computed from x_k."""
    case = Enumeration(markov, 2)
    level = middle_level(case)
    assert case.deviation([2 if after >= level else 0 for _, after in case.confidences]) > 1e-3


def test_the_draft_is_far_from_the_target():
    """Otherwise the equalities above would say little."""
    for markov in HEADS:
        case = Enumeration(markov, 2)
        p = mx.exp(case.target.shape(case.target.logits(case.texts)))
        assert mx.abs(p[:, :2] - mx.exp(case.proposal.log_q)).sum(axis=-1).mean().item() > 0.5


@pytest.mark.parametrize("markov", HEADS)
@pytest.mark.parametrize("block", [1, 2, 3])
def test_greedy_draft_is_exact_under_sampling(markov, block):
    """A draft without a choice reports no log q: its distribution is one-hot."""
    target, draft = TreeTarget(block + 1, sampling()), tiny_draft(markov, block)
    state = draft.start()
    draft.observe(state, mx.zeros((1, 3), dtype=mx.int32), mx.random.normal((1, 3, 8), key=mx.random.key(5)))
    proposal = draft.propose(state, mx.array([2]), block, make_rule(Sampling()).picker(None, None, block))
    assert proposal.log_q is None
    one_hot = (mx.arange(V) == proposal.tokens[..., None]).astype(mx.float32)
    joint = enumerate_width(target, proposal.tokens, mx.log(one_hot), np.ones(1), block)
    assert abs(joint - target.joint()).max() < 1e-6


def test_one_hot_draft_is_accepted_with_its_target_probability():
    """`judge_with` must make the one-hot q of the enumeration above itself."""
    rule, logits = make_rule(sampling(seed=0)), random_logits(1, 3, V)
    drafts = mx.array([[4, 1]])
    p = mx.exp(log_softmax(logits))[0]
    for nudge, accepted in ((-1e-5, 2), (1e-5, 0)):
        uniforms = mx.array([[p[0, 4].item() + nudge, p[1, 1].item() + nudge]])
        assert rule.judge_with(drafts, None, logits, None, uniforms, rule.start()).accepted.item() == accepted
    for seed in range(20):
        after = rule.judge_with(drafts, None, logits, None, mx.array([[0.9999, 0.0]]), mx.random.key(seed))
        assert after.tokens[0, 0].item() != 4, "a rejected one-hot draft has no residual mass"


@pytest.mark.parametrize("kind", ["greedy", "one-hot", "sampled"])
@pytest.mark.parametrize("limit", [0, 1, 2, 4])
def test_a_limit_is_as_if_no_more_drafts_were_there(kind, limit):
    """Whatever stands behind the verified rows."""
    rule, logits = make_rule(sampling(seed=0) if kind != "greedy" else Sampling()), random_logits(1, 5, V)
    log_q = log_softmax(random_logits(1, 4, V, seed=9)) if kind == "sampled" else None
    drafts, seen = mx.argmax(logits[:, :4], axis=-1), set()
    for seed in range(12):
        wrong = mx.arange(4) == seed % 5
        tried = mx.where(wrong, (drafts + 1) % V, drafts)
        uniforms = mx.where(wrong, 1e9, 0.0)[None]
        behind = mx.concatenate([logits[:, : limit + 1], random_logits(1, 4 - limit, V, seed=seed)], axis=1)
        limits = mx.array([limit], dtype=mx.int32)
        if kind == "greedy":
            found = rule.judge(tried, None, behind, None, None, limits)
            wanted = rule.judge(tried[:, :limit], None, logits[:, : limit + 1], None, None)
        else:
            found = rule.judge_with(tried, log_q, behind, None, uniforms, mx.random.key(seed), limits)
            short = None if log_q is None else log_q[:, :limit]
            wanted = rule.judge_with(tried[:, :limit], short, logits[:, : limit + 1], None, uniforms[:, :limit],
                                     mx.random.key(seed))
        run = wanted.accepted.item()
        assert found.accepted.tolist() == [run]
        assert found.tokens[0, : run + 1].tolist() == wanted.tokens[0, : run + 1].tolist()
        assert mx.array_equal(found.logits[0, : run + 1], wanted.logits[0, : run + 1])
        seen.add(run)
    assert seen == set(range(limit + 1)), "every run must be there for this to show anything"


def test_accept_mask_switches_at_the_ratio():
    p, q = (mx.softmax(random_logits(1, 4, V, seed=seed), axis=-1) for seed in (1, 2))
    drafts = mx.array([[0, 1, 2, 3]])
    ratio = accept_chance(mx.concatenate([p, p[:, :1]], axis=1), q, drafts)
    assert 0 < (ratio < 1).sum() < 4, "both kinds must occur"
    below, above = mx.array(ratio - 1e-5, dtype=mx.float32), mx.array(ratio + 1e-5, dtype=mx.float32)
    assert passed(p, q, drafts, below).all()
    assert passed(p, q, drafts, above)[0].tolist() == (ratio == 1).tolist()[0]


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_equal_distributions_always_accept_and_have_no_residual(accepted):
    rule, logits = make_rule(sampling(seed=3)), random_logits(1, 3, V)
    log_p = make_shape(sampling())(logits)
    almost_one = mx.full((1, 2), 1 - 2**-24)
    for drafts in every_text(2).tolist():
        verdict = rule.judge_with(mx.array([drafts]), log_p[:, :2], logits, None, almost_one, rule.start())
        assert verdict.accepted.item() == 2
    p = mx.exp(log_p)
    close(weights_after(p, p[:, :2], mx.array([accepted])), p[:, accepted], 0)


# --- exactness by counting -----------------------------------------------------------------------------------------

ROWS, LONE, WORDS, TOKENS = 50_000, 3000, 8, 3


def one_round(rule, key, anchor, target_table, draft_table, slots, greedy_draft=False, spoil=lambda log_q: log_q):
    """One round behind anchors [B] -> (key for later rounds, verdict). Both tables are logits by previous token."""
    key, drafting, judging = rule.split(key)
    pick = (make_rule(Sampling()) if greedy_draft else rule).picker(None, drafting, slots)
    drafts, log_q, previous = [], [], anchor
    for _ in range(slots):
        previous, chosen_from = pick(draft_table[previous], drafts)
        previous = previous.astype(mx.int32)
        drafts.append(previous)
        log_q.append(chosen_from)
    logits = target_table[mx.stack([anchor, *drafts], axis=1)]
    known = None if greedy_draft else spoil(mx.stack(log_q, axis=1))
    return key, rule.judge(mx.stack(drafts, axis=1), known, logits, None, judging)


def count_texts(rule, *tables_and_slots, **options):
    """Counts [V, V, V] of the first three tokens of 50,000 requests; every request starts behind token 0."""
    key, anchor = rule.start(), mx.zeros((ROWS,), dtype=mx.int32)
    text, filled = np.zeros((ROWS, TOKENS), dtype=np.int64), np.zeros(ROWS, dtype=np.int64)
    while filled.min() < TOKENS:
        key, verdict = one_round(rule, key, anchor, *tables_and_slots, **options)
        anchor = mx.take_along_axis(verdict.tokens, verdict.accepted[:, None], axis=1)[:, 0]
        accepted, tokens = np.array(verdict.accepted), np.array(verdict.tokens)
        for k in range(tokens.shape[1]):
            fits = np.flatnonzero((k <= accepted) & (filled < TOKENS))
            text[fits, filled[fits]] = tokens[fits, k]
            filled[fits] += 1
    counts = np.zeros((WORDS,) * TOKENS, dtype=np.int64)
    np.add.at(counts, tuple(text.T), 1)
    return counts


def chain(table, settings):
    """The joint distribution of the first three tokens behind token 0 under plain decoding."""
    p = reference_probabilities(table, settings)
    return p[0][:, None, None] * p[:, :, None] * p[None]


def chi_square(counts, expected):
    """(statistic - degrees of freedom) in standard deviations; cells that expect less than 5 are one cell."""
    small = expected < 5
    cells = [np.append(x[~small], x[small].sum()) for x in (counts, expected)]
    used = cells[1] > 0
    observed, wanted = cells[0][used], cells[1][used]
    freedom = used.sum() - 1
    return (((observed - wanted) ** 2 / wanted).sum() - freedom) / math.sqrt(2 * freedom)


def tables():
    return (random_logits(WORDS, WORDS, scale=1.5, seed=seed) for seed in (11, 12))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("settings", FILTERS, ids=named)
def test_first_three_tokens_by_chi_square(settings, slots):
    target_table, draft_table = tables()
    expected = ROWS * chain(target_table, settings)
    counts = count_texts(make_rule(sampling(**settings, seed=7)), target_table, draft_table, slots)
    assert counts.sum() == ROWS
    assert counts[expected == 0].sum() == 0
    assert chi_square(counts, expected) < 6


def test_greedy_draft_by_chi_square():
    target_table, draft_table = tables()
    counts = count_texts(make_rule(sampling(seed=7)), target_table, draft_table, 3, greedy_draft=True)
    assert chi_square(counts, ROWS * chain(target_table, {})) < 6


# A rejected draft leaves the second or the third token. Under one noise for both draws the second would come too
# rarely: the draft was likely to be it, and was not.
LONE_TARGET, LONE_DRAFT = np.array([0.05, 0.60, 0.35]), np.array([0.60, 0.39, 0.01])


def lone_chi_square(greedy_draft=False):
    """First tokens of requests that run alone, each with a key of its own."""
    rule, anchor = make_rule(Sampling(temperature=1.0, seed=0)), mx.array([0])
    tables = [mx.array(np.tile(np.log(law), (3, 1)), dtype=mx.float32) for law in (LONE_TARGET, LONE_DRAFT)]
    first = [one_round(rule, key, anchor, *tables, 1, greedy_draft)[1].tokens[0, 0]
             for key in mx.random.split(mx.random.key(21), LONE)]
    return chi_square(np.bincount(np.array(mx.stack(first)), minlength=3), LONE * LONE_TARGET)


@pytest.mark.parametrize("greedy_draft", [False, True], ids=["sampled-draft", "greedy-draft"])
def test_lone_requests_with_their_own_keys_by_chi_square(greedy_draft):
    """In a batch of one, two draws from one key would be the same bits; in a large batch that would not show."""
    assert lone_chi_square(greedy_draft) < 6


def test_one_key_for_two_draws_of_a_lone_request_is_caught(monkeypatch):
    def split(rule, key):
        later, _, judging = mx.random.split(key, 3)
        return later, mx.random.split(judging)[1:], judging  # the draft's noise is that of the token after the run

    monkeypatch.setattr(SampledRule, "split", split)
    monkeypatch.setattr(SampledRule, "picker",
                        lambda rule, seen, keys, slots: GumbelPick(rule._shape, rule._scale, keys))
    assert lone_chi_square() > 20


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda log_q: log_softmax(0.8 * log_q), id="q-flatter-than-drawn-from"),
        pytest.param(lambda log_q: mx.full(log_q.shape, -math.log(WORDS)), id="q-uniform"),
        pytest.param(lambda log_q: mx.concatenate([log_q[:, 1:], log_q[:, :1]], axis=1), id="q-of-another-slot"),
    ],
)
def test_a_wrong_q_is_caught_by_chi_square(spoil):
    target_table, draft_table = tables()
    counts = count_texts(make_rule(sampling(seed=7)), target_table, draft_table, 2, spoil=spoil)
    assert chi_square(counts, ROWS * chain(target_table, {})) > 20


# --- random keys ---------------------------------------------------------------------------------------------------


def draws(seed):
    """Accepted lengths and tokens of three rounds of 64 requests."""
    rule = make_rule(sampling(seed=seed))
    key, anchor, out = rule.start(), mx.zeros((64,), dtype=mx.int32), []
    for _ in range(3):
        key, verdict = one_round(rule, key, anchor, *tables(), slots=3)
        out.append([verdict.accepted.tolist(), verdict.tokens.tolist()])
    return out


def test_a_seed_fixes_every_draw_whatever_the_global_state():
    first = draws(seed=1)
    mx.random.seed(99)
    assert draws(seed=1) == first
    other = draws(seed=2)
    assert all(mine != theirs for mine, theirs in zip(first, other))
    assert first[0] != first[1] != first[2], "rounds must not share a key"


def test_slots_and_judge_do_not_share_randomness():
    rule = make_rule(sampling(seed=1))
    later, drafting, judging = (key.tolist() for key in rule.split(rule.start()))
    assert len({tuple(later), tuple(drafting), tuple(judging), tuple(rule.start().tolist())}) == 4
    flat, pick = mx.zeros((64, V)), rule.picker(None, mx.array(drafting, dtype=mx.uint32), 2)
    assert pick(flat, [])[0].tolist() != pick(flat, [mx.zeros((64,))])[0].tolist()


def test_an_unseeded_rule_reports_the_seed_it_drew():
    rule = make_rule(sampling())
    again = make_rule(sampling(seed=rule.seed))
    assert rule.start().tolist() == again.start().tolist()
    assert make_rule(Sampling()).seed is None


# --- processors ----------------------------------------------------------------------------------------------------


class Recorder:
    """A logits processor that notes what it sees and makes the last token it saw impossible."""

    def __init__(self):
        self.histories, self.shapes = [], set()

    def __call__(self, tokens, logits):
        self.histories.append(tokens.tolist())
        self.shapes.add(logits.shape)
        return mx.where(mx.arange(V) == tokens[-1], -mx.inf, logits)


SEEN, TEXT = [3, 0, 5], [4, 1, 2]
HISTORIES = [SEEN + TEXT[:k] for k in range(len(TEXT) + 1)]
RULES = pytest.mark.parametrize("settings", [{"temperature": 0}, {"seed": 4}], ids=["greedy", "sampled"])


@RULES
def test_drafting_shows_processors_what_plain_decoding_would(settings):
    recorder = Recorder()
    rule = make_rule(sampling(**settings), [recorder])
    assert rule.uses_history
    pick = rule.picker(mx.array(SEEN), rule.start(), 3)
    for k in range(3):
        drafts = [mx.array([token]) for token in TEXT[:k]]
        token, log_q = pick(mx.zeros((1, V)), drafts)
        assert token.item() != HISTORIES[k][-1]
        assert log_q is None or log_q[0, HISTORIES[k][-1]].item() == -math.inf
    assert recorder.histories == HISTORIES[:3]
    assert recorder.shapes == {(1, V)}


@RULES
@pytest.mark.parametrize("count", [0, 1, 3])
def test_judging_shows_processors_what_plain_decoding_would(settings, count):
    recorder = Recorder()
    rule = make_rule(sampling(**settings), [recorder])
    drafts = mx.array([TEXT[:count]], dtype=mx.int32)
    log_q = mx.log((mx.arange(V) == drafts[..., None]).astype(mx.float32))
    # Every row would choose the token before it, did the processor not forbid it; then the next draft.
    wishes = [[20.0 * (token == HISTORIES[k][-1]) + 10.0 * (token == [*TEXT, 0][k]) for token in range(V)]
              for k in range(count + 1)]
    verdict = rule.judge(drafts, log_q if count else None, mx.array([wishes]), mx.array(SEEN), rule.start())
    assert recorder.histories == HISTORIES[: count + 1]
    assert recorder.shapes == {(1, V)}
    assert verdict.accepted.item() == count
    assert verdict.tokens[0].tolist() == [*TEXT[:count], [*TEXT, 0][count]]


def test_processors_run_in_order_and_before_the_filters():
    rule = make_rule(sampling(top_k=2, seed=0), [lambda tokens, x: x + mx.arange(V), lambda tokens, x: -x])
    _, log_q = rule.picker(mx.array(SEEN), rule.start(), 1)(mx.zeros((1, V)), [])
    assert np.flatnonzero(np.isfinite(np.array(log_q[0]))).tolist() == [0, 1]


def test_rules_without_processors_need_no_history():
    assert not make_rule(Sampling()).uses_history
    assert not make_rule(sampling()).uses_history


@RULES
def test_logprobs_are_those_of_the_processed_target_at_temperature_1(settings):
    rule = make_rule(sampling(**{"temperature": 0.5, "top_k": 3, **settings}))
    logits = random_logits(1, 3, V)
    drafts = mx.argmax(logits[:, :2], axis=-1)
    verdict = rule.judge(drafts, None, logits, None, rule.start())
    expected = mx.take_along_axis(log_softmax(logits), verdict.tokens[..., None], axis=-1)
    close(logprobs_of(verdict.logits, verdict.tokens[..., None]), expected, 1e-6)


def test_a_verdict_has_the_logits_after_the_processors():
    rule = make_rule(sampling(top_k=2, seed=0), [lambda tokens, x: x + mx.arange(V)])
    logits = random_logits(1, 3, V)
    verdict = rule.judge(mx.array([[1, 2]]), None, logits, mx.array(SEEN), rule.start())
    close(verdict.logits, logits + mx.arange(V), 1e-6)


def ordered(logits, count):
    """The law of `most_likely`, token by token."""
    rows = np.array(logits.astype(mx.float32)).astype(np.float64)
    rows = np.where(np.isnan(rows), -np.inf, rows)
    best = [sorted(range(rows.shape[-1]), key=lambda token: (-row[token], token))[:count]
            for row in rows.reshape(-1, rows.shape[-1])]
    return np.array(best).reshape(*rows.shape[:-1], count)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(("size", "count"), [(1, 1), (7, 1), (7, 7), (300, 20), (5000, 5)])
def test_the_most_likely_tokens_come_in_one_order(size, count, dtype):
    """Equals are frequent in half precision, and where tokens are ruled out."""
    smooth = 3 * random_logits(2, 3, size)
    for logits in (smooth, mx.round(smooth), mx.zeros_like(smooth), mx.where(smooth > 3, smooth, -mx.inf)):
        logits = logits.astype(dtype)
        assert np.array_equal(most_likely(logits, count), ordered(logits, count))


def test_numbers_that_are_none_and_two_zeros_have_an_order():
    nan, inf = math.nan, math.inf
    logits = mx.array([[nan, 2.0, nan, inf], [nan] * 4, [-inf, nan, -inf, -5.0], [-0.0, 0.0, -0.0, -1e-30]])
    assert most_likely(logits, 4).tolist() == [[3, 1, 0, 2], [0, 1, 2, 3], [3, 0, 1, 2], [0, 1, 2, 3]]
    assert np.array_equal(most_likely(logits, 3), ordered(logits, 3))


@pytest.mark.parametrize(("settings", "kind"), [
    ({"temperature": 0}, ArgmaxPick),
    ({"temperature": COLDEST}, GumbelPick),
    ({"temperature": 0.99 * COLDEST}, None),
    ({"temperature": 1, "top_p": 0.9}, None),
    ({"temperature": 1, "top_k": 5}, None),
    ({"temperature": 1, "min_p": 0.1}, None),
])
def test_only_a_plain_choice_is_left_to_the_kernels(settings, kind):
    """What they cannot do, or not to the last digit, must not look to them like what they can."""
    rule = make_rule(Sampling(seed=1, **settings))
    pick = rule.picker(None, rule.start(), 2)
    assert isinstance(pick, kind) if kind else not isinstance(pick, (ArgmaxPick, GumbelPick))
    process = make_rule(Sampling(seed=1, **settings), [lambda tokens, logits: logits])
    assert not isinstance(process.picker(mx.array([1]), process.start(), 2), (ArgmaxPick, GumbelPick))
