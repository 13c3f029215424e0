"""Every family in the round loop: greedy text is the target's own, and the draft's state is what it should be.

Equal text proves the target's side alone: any draft may write nonsense. So the logits behind a round's
drafts are also compared with those of a fresh state that was shown the whole text at once.
"""

import json
from dataclasses import dataclass, field
from functools import cache

import mlx.core as mx
import pytest
from helpers import (
    GOLDEN,
    FakeTokenizer,
    best,
    build_model,
    golden_pair,
    pair_of,
    plain,
    random_tokens,
    tiny_model,
    tokens_of,
)
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model
from packagings import (
    HIDDEN,
    NO_HEADS,
    TAPS,
    TARGET_LAYERS,
    VOCAB,
    make_head,
    write_deepspec,
    write_dflash2,
    write_liquid,
    write_speculators,
    write_zlab,
)

from mlx_dspark.decode import DecodeOptions, decode
from mlx_dspark.draft import TargetTables, block, classic, eagle3, propose_many
from mlx_dspark.draft.classic import ClassicDraft
from mlx_dspark.draft.context import ContextCache
from mlx_dspark.errors import CacheError
from mlx_dspark.load import ASSETS, Pair, load, read_draft
from mlx_dspark.sampling import ArgmaxPick, make_rule
from mlx_dspark.schedule import make_policy
from mlx_dspark.structs import KVOptions, Sampling, Schedule
from mlx_dspark.target import Target

COUNT = 16
FLUSH, STEP = 60, 32
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
REACHED = mx.arange(1, VOCAB, 2)  # odd ids only
SYNTHETIC = {  # written for the tiny target below; they borrow its tables unless they carry their own
    "deepspec": lambda folder: write_deepspec(folder, make_head()),
    "zlab": lambda folder: write_zlab(folder, make_head(heads=NO_HEADS)),
    "zlab-sliding": lambda folder: write_zlab(folder, make_head(heads=NO_HEADS), **SLIDING),
    "dflash2": write_dflash2,
    "liquid": lambda folder: write_liquid(folder, make_head()),
    "speculators-reduced": lambda folder: write_speculators(folder, make_head(), reduced=REACHED),
    "speculators-sliding": lambda folder: write_speculators(folder, make_head(), own_tables=False, **SLIDING),
}
TRAINED = ["gemma4_dspark_vanilla", "gemma4_dspark_gated", "gemma4_dflash", "gemma4_eagle3", "qwen3_eagle3"]
FAMILIES = [*SYNTHETIC, *TRAINED, "classic"]


@pytest.fixture(autouse=True)
def early(monkeypatch):
    """Rows are kept waiting and caches grow as in the package, in smaller steps: 74 rows do what 526 would."""
    for module in (block, eagle3, classic):
        monkeypatch.setattr(module, "FLUSH_ROWS", FLUSH)
    for kind in (ContextCache, KVCache):
        monkeypatch.setattr(kind, "step", STEP)


@cache
def tiny_target():
    """A random target of the synthetic head's width, vocabulary and number of layers."""
    return build_model("qwen3", vocab_size=VOCAB, num_hidden_layers=TARGET_LAYERS, hidden_size=HIDDEN, head_dim=16)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Name -> pair, each made once."""

    @cache
    def make(name):
        if name in TRAINED:
            folder = GOLDEN / f"{name.split('_')[0]}_target"
            model, config = load_model(folder)
            return Pair(Target(model, config, name), FakeTokenizer(), read_draft(GOLDEN / name))
        if name == "classic":
            small = build_model("llama", seed=9, num_hidden_layers=2)
            return pair_of(tiny_model("qwen3"), ClassicDraft(Target(small, dict(vars(small.args)), "small")))
        draft = read_draft(SYNTHETIC[name](tmp_path_factory.mktemp(name)))
        pair = pair_of(tiny_target(), draft)
        draft.borrow(TargetTables(pair.target.embed, pair.target.head))
        return pair

    return make


@dataclass
class Parking:
    """Drafts for two rounds, then parks for three, and so on."""

    width: int
    name: str = "parking"
    reads_confidence: bool = False
    uses_confidence: bool = False
    asked: list = field(default_factory=list)

    def before(self, history):
        self.asked.append(len(self.asked) % 5 < 2)
        return self.width if self.asked[-1] else 0

    def after(self, proposed, confidences):
        return Schedule(proposed, self.name, "test")


def rounds_of(pair, prompt, policy=None, sampling=None, count=COUNT, **options):
    rule = make_rule(sampling or Sampling())
    policy = policy or make_policy("fixed", pair.draft.gamma, pair.draft.has_confidence)
    return list(decode(pair, prompt, DecodeOptions(rule, policy, max_tokens=count, **options)))


def fresh_drafts(pair, text, anchor, slots, monkeypatch):
    """What the draft proposes after `text` when its rows come in one piece and all wait for the proposal."""
    target, state = pair.target, pair.draft.start()
    rows = mx.array([text])
    taps = target.forward(rows, target.start(KVOptions()), pair.draft.taps).taps
    with monkeypatch.context() as patch:
        for module in (block, eagle3, classic):
            patch.setattr(module, "FLUSH_ROWS", 10**9)
        pair.draft.observe(state, rows, taps)
    return pair.draft.propose(state, mx.array([anchor]), slots, best)


class Recorded:
    """A draft that keeps its proposals."""

    def __init__(self, draft):
        self.draft, self.proposals = draft, []

    def __getattr__(self, name):
        return getattr(self.draft, name)

    def propose(self, state, anchor, slots, pick):
        pick = best if isinstance(pick, ArgmaxPick) else pick  # one that keeps the logits
        self.proposals.append(self.draft.propose(state, anchor, slots, pick))
        return self.proposals[-1]


def close(one, other):
    """Logits of the first slot, which depends on no choice before it; -inf where both are."""
    one, other = (mx.maximum(proposal.logits[0, 0], -1e4) for proposal in (one, other))
    return mx.abs(one - other).max().item() < 2e-3


LENGTHS = {"short": (9, 2048), "long": (FLUSH + 14, 2048), "long-in-chunks": (FLUSH + 14, 7)}
CASES = [(name, "short", False) for name in FAMILIES]
CASES += [(name, "long-in-chunks", True) for name in FAMILIES if name not in ("liquid", "speculators-reduced")]
CASES += [(name, "long", False) for name in ("gemma4_eagle3", "gemma4_dspark_gated", "zlab-sliding", "classic")]


@pytest.mark.parametrize("name, length, parked", CASES)
def test_greedy_equals_plain(name, length, parked, pairs, monkeypatch):
    """Also behind more rows than are kept waiting, in one piece or many, and after rounds without a draft."""
    pair, (length, step) = pairs(name), LENGTHS[length]
    prompt = random_tokens(length, vocab=VOCAB)
    count = 24 if name == "qwen3_eagle3" else COUNT  # it is always right here: fewer tokens would be two rounds
    policy, draft = Parking(pair.draft.gamma) if parked else None, Recorded(pair.draft)
    rounds = rounds_of(Pair(pair.target, pair.tokenizer, draft), prompt, policy, count=count, prefill_step=step)
    text = prompt + tokens_of(rounds)
    assert text == prompt + plain(pair.target.model, prompt, count)
    assert any(landed.rows == 1 for landed in rounds) >= parked
    made = list(zip([landed for landed in rounds if landed.proposed], draft.proposals, strict=True))
    assert len(made) > 2
    for landed, proposal in (made[0], made[len(made) // 2], made[-1]):
        fresh = fresh_drafts(pair, text[: landed.start], text[landed.start], landed.proposed, monkeypatch)
        assert close(proposal, fresh), f"round {landed.index}"


def known_prompt(name):
    """Text that the trained target continues as it learnt to."""
    return json.loads((GOLDEN / name / "decode.json").read_text(encoding="utf-8"))["prompts"]["A"]


@pytest.mark.parametrize("name", TRAINED)
def test_trained_drafts_are_right_often(name, pairs):
    """The equality above would also hold for a draft that is never right."""
    pair = pairs(name)
    prompt = known_prompt(name)
    for policy in (None, Parking(pair.draft.gamma)):
        drafting = [landed for landed in rounds_of(pair, prompt, policy) if landed.drafts]
        assert sum(landed.accepted for landed in drafting) / len(drafting) > 0.8


@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_runs_repeat_and_stay_finite(name, pairs):
    pair, prompt = pairs(name), random_tokens(20, vocab=VOCAB)
    first, second = (rounds_of(pair, prompt, sampling=Sampling(temperature=1.0, seed=3), logprobs=True)
                     for _ in range(2))
    assert tokens_of(first) == tokens_of(second)
    assert all(-50 < p <= 0 for landed in first for p in landed.logprobs)


def test_reduced_vocabulary_only_drafts_what_it_can_say(pairs):
    rounds = rounds_of(pairs("speculators-reduced"), random_tokens(20, vocab=VOCAB), sampling=Sampling(temperature=1.0))
    drafts = [token for landed in rounds for token in landed.drafts]
    assert drafts and all(token % 2 for token in drafts)
    assert any(token % 2 == 0 for token in tokens_of(rounds))  # the target still says the others


@pytest.mark.parametrize("name, gamma", [("zlab", 4), ("dflash2", 4), ("deepspec", 5), ("liquid", 5)])
def test_width_of_a_round(name, gamma, pairs):
    pair = pairs(name)
    assert pair.draft.gamma == gamma and pair.draft.taps == TAPS
    assert max(landed.rows for landed in rounds_of(pair, random_tokens(9, vocab=VOCAB))) == gamma + 1


def test_confidence_threshold_with_gemma4(pairs):
    pair, prompt = pairs("gemma4_dspark_vanilla"), known_prompt("gemma4_dspark_vanilla")
    rounds = rounds_of(pair, prompt, make_policy("threshold:0.5", pair.draft.gamma, True))
    assert tokens_of(rounds) == plain(pair.target.model, prompt, COUNT)
    assert len({len(landed.drafts) for landed in rounds}) > 1


# --- a whole small model -----------------------------------------------------------------------------------------


def itself(kind="qwen3"):
    model = tiny_model(kind)
    return pair_of(model, ClassicDraft(Target(model, dict(vars(model.args)), "tiny")))


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length, step", LENGTHS.values(), ids=LENGTHS.keys())
def test_a_model_that_drafts_for_itself_is_always_right(length, step, temperature):
    pair = itself()
    for policy in (None, Parking(pair.draft.gamma)):
        rounds = rounds_of(pair, random_tokens(length), policy, Sampling(temperature, seed=1), prefill_step=step)
        drafting = [landed for landed in rounds if landed.drafts]
        assert drafting and all(landed.accepted == len(landed.drafts) for landed in drafting)


@pytest.mark.parametrize("kind, kept", [("gemma3_text", "RotatingKVCache"), ("lfm2", "ArraysCache")])
def test_a_small_model_that_cannot_take_back_is_refused(kind, kept):
    with pytest.raises(CacheError, match=f"draft model.*{kept}.*full attention") as caught:
        itself(kind)
    assert "\n" not in str(caught.value)


def test_a_small_model_may_draft_for_a_target_with_windows():
    """Only the draft must take back rows at any time; the target follows its own rules."""
    small, target = tiny_model("llama"), tiny_model("gemma3_text")
    pair = pair_of(target, ClassicDraft(Target(small, dict(vars(small.args)), "small")))
    prompt = random_tokens(30)
    assert tokens_of(rounds_of(pair, prompt)) == plain(target, prompt, COUNT)


def test_draft_may_name_a_whole_model():
    pair = load(ASSETS / "target", ASSETS / "target")
    assert isinstance(pair.draft, ClassicDraft) and pair.draft.taps == ()
    drafting = [landed for landed in rounds_of(pair, list(range(40, 60))) if landed.drafts]
    assert all(landed.accepted == len(landed.drafts) for landed in drafting)


MIXED = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=0.5, top_k=5, seed=4)]


def proposals_of(pair, texts, slots, samplings, together):
    """Two rounds of proposals after each text; the second one has the first one's drafts behind it."""
    draft, target = pair.draft, pair.target
    states = [draft.start() for _ in texts]
    for state, text in zip(states, texts):
        rows = mx.array([text])
        draft.observe(state, rows, target.forward(rows, target.start(KVOptions()), draft.taps).taps)
    found = []
    for anchors in ([1, 2, 3], [3, 1, 2]):
        picks = [rule.picker(None, rule.split(rule.start())[1], count)
                 for rule, count in zip(map(make_rule, samplings), slots)]
        if together:
            found += propose_many(draft, states, mx.array(anchors), slots, picks)
            continue
        found += [draft.propose(state, mx.array([anchor]), count, pick)
                  for state, anchor, count, pick in zip(states, anchors, slots, picks)]
    return found


def nearly(one, other):
    if one is None or other is None:
        return one is other
    finite = mx.isfinite(one)
    return bool((mx.isfinite(other) == finite).all()) and bool((mx.abs(mx.where(finite, one - other, 0)) < 1e-4).all())


@pytest.mark.parametrize("samplings", [MIXED, MIXED[:1] * 3], ids=["mixed", "greedy"])
@pytest.mark.parametrize("name", [*FAMILIES, "qwen3_dspark_gated", "qwen3_dspark_rnn"])
def test_proposals_of_several_requests_are_those_of_each_alone(name, samplings, pairs):
    pair = golden_pair(name) if name.startswith("qwen3_dspark") else pairs(name)
    texts = [random_tokens(length, seed=length, vocab=pair.target.vocab_size) for length in (3, 41, 17)]
    slots = [pair.draft.gamma, 1, 2]
    alone, many = (proposals_of(pair, texts, slots, samplings, together) for together in (False, True))
    for own, got in zip(alone, many):
        assert got.tokens.tolist() == own.tokens.tolist()
        assert nearly(got.confidence_logits, own.confidence_logits)
        assert nearly(got.log_q, own.log_q)


def test_one_pass_serves_all(pairs, monkeypatch):
    pair, passes = pairs("deepspec"), []
    forward = type(pair.draft.backbone).__call__
    monkeypatch.setattr(type(pair.draft.backbone), "__call__",
                        lambda self, *args: passes.append(len(args[2])) or forward(self, *args))
    texts = [random_tokens(length, seed=length, vocab=pair.target.vocab_size) for length in (3, 41, 17)]
    proposals_of(pair, texts, [2, 1, 2], MIXED, together=True)
    assert passes == [3, 3]
