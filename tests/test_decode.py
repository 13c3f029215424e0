"""The round loop: where it ends, what its records say, how often it reads the device, what it keeps."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from helpers import Reads, golden_pair, prompt_of
from mlx_lm.generate import generate_step

import mlx_dspark
from mlx_dspark.decode import DecodeOptions, decode
from mlx_dspark.generate import stream_generate
from mlx_dspark.kernels import REFERENCE
from mlx_dspark.sampling import make_rule
from mlx_dspark.schedule import CostCurve, make_policy
from mlx_dspark.structs import Proposal, Round, Sampling, Schedule, Verified

EOS, WRONG, VOCAB, GAMMA = 0, 63, 64, 4
PROMPT = [5, 6, 7]
LENGTH = 60  # of the reference text on the embedded pair


# --- a scripted pair: the target's greedy text is given, the draft is right to a chosen slot


class ScriptedCache:
    def __init__(self):
        self.offset = 0

    def require_rollback(self):
        pass

    def room(self):
        return None

    def advance(self, rows: int, keep: int):
        self.offset += keep


class ScriptedTarget:
    """After position p the likeliest token is script[p + 1], whatever the input tokens are."""

    vocab_size = VOCAB

    def __init__(self, script: Sequence[int], context: int | None = None):
        self.script, self.context = list(script), context

    def start(self, options):
        return ScriptedCache()

    def processors(self, sampling):
        return []

    def wired(self):
        return nullcontext()

    def forward(self, tokens, cache, taps=()):
        following = self.script[cache.offset + 1 : cache.offset + 1 + tokens.shape[1]]
        return Verified(10 * (mx.arange(VOCAB) == mx.array(following)[:, None]).astype(mx.float32)[None], None)

    def prefill_steps(self, prompt, cache, taps, step, observe):
        cache.offset = len(prompt) - 1
        verified = self.forward(mx.array([prompt[-1:]]), cache)
        cache.offset += 1
        observe(mx.array([prompt]), None)
        yield verified


class ScriptedDraft:
    """Proposes the script, except that slot `right(round) + 1` holds `wrong`."""

    gamma, taps, has_confidence = GAMMA, (), False

    def __init__(self, script: Sequence[int], right: Callable[[int], int] = lambda _: GAMMA, wrong: int = WRONG):
        self.script, self.right, self.wrong = script, right, wrong

    def start(self):
        return SimpleNamespace(position=0, rounds=0)

    def observe(self, state, tokens, taps):
        state.position += tokens.shape[1]

    def propose(self, state, anchor, slots, pick):
        drafts = list(self.script[state.position + 1 : state.position + 1 + slots])
        right, state.rounds = self.right(state.rounds), state.rounds + 1
        if right < slots:
            drafts[right] = self.wrong
        return Proposal(mx.array([drafts], dtype=mx.int32))


def script_with_eos(at: int | None, length: int = 100) -> list[int]:
    script = [1 + p % 61 for p in range(length)]
    if at is not None:
        script[at] = EOS
    return script


def scripted_pair(script: Sequence[int], context: int | None = None, **draft):
    """Quacks like a Pair, also for stream_generate, with one letter per token."""
    tokenizer = SimpleNamespace(detokenizer=Letters(), decode=lambda ids: "".join(chr(48 + token) for token in ids))
    return SimpleNamespace(target=ScriptedTarget(script, context), draft=ScriptedDraft(script, **draft),
                           tokenizer=tokenizer, stop_ids=frozenset({EOS}), facts={}, kernels=REFERENCE)


class Letters:
    def __init__(self):
        self.last_segment, self.tokens = "", []

    def add_token(self, token: int):
        self.tokens.append(token)
        self.last_segment = chr(48 + token)

    def finalize(self):
        self.last_segment = ""


# --- helpers


def options(policy="fixed", gamma=GAMMA, sampling=None, **fields) -> DecodeOptions:
    policy = make_policy(policy, gamma, has_confidence=True) if isinstance(policy, str) else policy
    return DecodeOptions(make_rule(sampling or Sampling()), policy, **fields)


def run(pair, prompt, policy="fixed", **fields) -> list[Round]:
    rounds = list(decode(pair, prompt, options(policy, pair.draft.gamma, **fields)))
    assert_records_agree(rounds, len(prompt), fields.get("max_tokens"), fields.get("stop_ids", frozenset()))
    return rounds


def ids_of(rounds: Sequence[Round]) -> list[int]:
    return [token for landed in rounds for token in landed.tokens]


def assert_records_agree(rounds: Sequence[Round], prompt: int, limit: int | None, stop_ids: frozenset[int]):
    """What holds for every run, whatever ended it."""
    assert [landed.index for landed in rounds] == list(range(len(rounds)))
    assert all(landed.finish is None for landed in rounds[:-1]) and rounds[-1].finish is not None
    assert (rounds[0].rows, rounds[0].drafts, len(rounds[0].tokens)) == (0, (), 1)
    assert rounds[0].start == prompt - 1
    for before, landed in pairwise(rounds):
        assert landed.start == before.start + len(before.tokens)
        assert landed.rows == len(landed.drafts) + 1
        assert 0 <= landed.accepted <= len(landed.drafts) <= landed.proposed
        assert landed.tokens[: landed.accepted] == landed.drafts[: landed.accepted]
        for kept in (landed.logprobs, landed.top_logprobs):
            assert kept is None or len(kept) == len(landed.tokens)
        if landed.finish is None:
            assert len(landed.tokens) == landed.accepted + 1
            if landed.accepted < len(landed.drafts):
                assert landed.tokens[-1] != landed.drafts[landed.accepted]
    ids = ids_of(rounds)
    assert limit is None or len(ids) <= limit
    assert not stop_ids & set(ids[:-1])
    assert (rounds[-1].finish == "stop") == (ids[-1] in stop_ids)
    if rounds[-1].finish == "length":
        assert len(ids) == limit


class Patterned:
    """Drafts and admits as two repeating patterns say; 0 parks."""

    name = "patterned"
    uses_confidence = False

    def __init__(self, before: Sequence[int], after: Sequence[int], reads_confidence: bool = False):
        self.reads_confidence = reads_confidence
        self._before, self._after = list(before), list(after)
        self._asked = 0

    def before(self, history):
        self._asked += 1
        return self._before[(self._asked - 1) % len(self._before)]

    def after(self, proposed, confidences):
        assert (confidences is not None) == (self.reads_confidence and proposed > 0)
        return Schedule(min(proposed, self._after[self._asked % len(self._after)]), self.name, "pattern")


@pytest.fixture(scope="module")
def pair() -> mlx_dspark.Pair:
    return mlx_dspark.load()


@pytest.fixture(scope="module")
def prompt(pair) -> list[int]:
    return mlx_dspark.encode_prompt(pair.tokenizer, "The quick brown fox", raw=True)


@pytest.fixture(scope="module")
def greedy(pair, prompt) -> list[Round]:
    """The reference text: greedy, whole blocks, nothing stops it."""
    return run(pair, prompt, max_tokens=LENGTH)


# --- where a text ends: stop tokens


@pytest.mark.parametrize(
    ("at", "right", "last_tokens", "last_accepted"),
    [
        pytest.param(4, GAMMA, 1, 1, id="slot-1"),
        pytest.param(5, GAMMA, 2, 2, id="slot-2"),
        pytest.param(7, GAMMA, GAMMA, GAMMA, id="slot-gamma"),
        pytest.param(8, GAMMA, GAMMA + 1, GAMMA, id="bonus"),
        pytest.param(6, 2, 3, 2, id="correction"),
        pytest.param(4, 0, 1, 0, id="correction-of-slot-1"),
    ],
)
def test_a_stop_token_ends_the_text_in_its_round(at, right, last_tokens, last_accepted):
    script = script_with_eos(at)
    rounds = run(scripted_pair(script, right=lambda _: right), PROMPT, stop_ids=frozenset({EOS}))
    assert ids_of(rounds) == script[3 : at + 1]
    assert len(rounds) == 2
    assert (len(rounds[1].tokens), rounds[1].accepted) == (last_tokens, last_accepted)


def test_a_stop_token_from_the_prefill_runs_no_round():
    rounds = run(scripted_pair(script_with_eos(3)), PROMPT, stop_ids=frozenset({EOS}))
    assert [(landed.rows, landed.tokens, landed.finish) for landed in rounds] == [(0, (EOS,), "stop")]


@pytest.mark.parametrize("slot", range(GAMMA))
def test_a_stop_token_in_a_rejected_slot_does_not_stop(slot):
    script = script_with_eos(40)
    rounds = run(scripted_pair(script, right=lambda _: slot, wrong=EOS), PROMPT, stop_ids=frozenset({EOS}))
    assert ids_of(rounds) == script[3:41]
    assert any(EOS in landed.drafts[landed.accepted :] for landed in rounds[:-1])


def test_any_of_several_stop_tokens_ends_the_text():
    script = script_with_eos(20)
    rounds = run(scripted_pair(script), PROMPT, stop_ids=frozenset({EOS, script[11], script[15]}))
    assert ids_of(rounds) == script[3:12]


def first_seen(rounds: Sequence[Round], place: Callable[[Round], int]) -> int:
    """A token whose first occurrence in the text is where `place` says (a slot counted from 0, or -1)."""
    seen = set()
    for landed in rounds:
        at = place(landed)
        if 0 <= at < len(landed.tokens) and landed.tokens[at] not in seen | set(landed.tokens[:at]):
            return landed.tokens[at]
        seen |= set(landed.tokens)
    raise AssertionError("the reference text has no such token")


@pytest.mark.parametrize("policy", ["plain", "fixed", "threshold:0.5"])
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(lambda r: 0 if r.accepted else -1, id="slot-1"),
        pytest.param(lambda r: r.accepted - 1 if r.accepted > 1 else -1, id="last-accepted"),
        pytest.param(lambda r: r.accepted if 0 < r.accepted < len(r.drafts) else -1, id="correction"),
        pytest.param(lambda r: 0 if r.index == 0 else -1, id="first"),
    ],
)
def test_the_embedded_pair_stops_where_the_greedy_text_does(pair, prompt, greedy, place, policy):
    ids, stop = ids_of(greedy), first_seen(greedy, place)
    rounds = run(pair, prompt, policy, max_tokens=LENGTH, stop_ids=frozenset({stop}))
    assert ids_of(rounds) == ids[: ids.index(stop) + 1]


# --- where a text ends: counts


@pytest.mark.parametrize("limit", [0, 1, 2, GAMMA - 1, GAMMA, GAMMA + 1, GAMMA + 2, 5 * GAMMA, 23])
@pytest.mark.parametrize("right", [0, 2, GAMMA])
def test_max_tokens_is_exact(limit, right):
    script = script_with_eos(None)
    pair = scripted_pair(script, right=lambda _: right)
    if limit == 0:
        assert list(decode(pair, PROMPT, options(max_tokens=0))) == []
        return
    rounds = run(pair, PROMPT, max_tokens=limit)
    assert ids_of(rounds) == script[3 : 3 + limit]
    assert max(landed.start + landed.rows for landed in rounds[1:] or rounds) <= len(PROMPT) + limit


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_max_tokens_around_the_block_on_the_embedded_pair(pair, prompt, greedy, offset):
    limit = pair.draft.gamma + offset
    assert ids_of(run(pair, prompt, max_tokens=limit)) == ids_of(greedy)[:limit]


def stream_ids(pair, prompt, **fields):
    chunks = list(stream_generate(pair, prompt, **fields))
    return [i for chunk in chunks for i in chunk.ids], chunks[-1].finish_reason, [c.round for c in chunks if c.round]


@pytest.mark.parametrize("context", [len(PROMPT) + 1, 12, 13, 14, 15, 16, 40])
def test_unlimited_ends_exactly_with_the_context(context):
    script = script_with_eos(None)
    ids, finish, rounds = stream_ids(scripted_pair(script, context), PROMPT, max_tokens=-1)
    assert (ids, finish) == (script[3:context], "length")
    assert max(landed.start + landed.rows for landed in rounds) < context


def test_unlimited_stops_at_a_stop_token_inside_the_last_block():
    script, context = script_with_eos(15), 17  # rounds start at 3 and 8, the last block is 13..16
    ids, finish, rounds = stream_ids(scripted_pair(script, context), PROMPT, max_tokens=-1)
    assert (ids, finish) == (script[3:16], "stop")
    assert rounds[-1].start == 13 and rounds[-1].proposed < GAMMA


def test_unlimited_on_the_embedded_pair_never_leaves_the_context(pair, prompt, greedy):
    target = dataclasses.replace(pair).target
    small = type("Small", (), {"context": 47, "__getattr__": lambda self, name: getattr(target, name)})()
    ids, finish, rounds = stream_ids(dataclasses.replace(pair, target=small), prompt, max_tokens=-1)
    assert (ids, finish) == (ids_of(greedy)[: 47 - len(prompt)], "length")
    assert max(landed.start + landed.rows for landed in rounds) < 47


# --- what the loop costs the host


def reads_per_round(monkeypatch, pair, prompt, opts) -> list[int]:
    rounds = decode(pair, prompt, opts)
    next(rounds)
    reads, counts = Reads(monkeypatch), []
    for _ in rounds:
        counts.append(reads.count)
        reads.count = 0
    monkeypatch.undo()
    return counts


@pytest.mark.parametrize(
    ("policy", "fields", "most"),
    [
        pytest.param("plain", {}, 1, id="plain"),
        pytest.param("fixed", {}, 1, id="fixed"),
        pytest.param("fixed:3", {}, 1, id="fixed-3"),
        pytest.param("fixed", {"logprobs": True, "top_logprobs": 5, "confidences": True}, 1, id="all-records"),
        pytest.param("fixed", {"sampling": Sampling(0.8, top_p=0.9, seed=1)}, 1, id="sampled"),
        pytest.param("plain", {"sampling": Sampling(0.8, seed=1)}, 1, id="sampled-plain"),
        pytest.param("threshold:0", {}, 1, id="threshold-0"),
        pytest.param("threshold:0.5", {}, 2, id="threshold"),
        pytest.param("threshold:0.5", {"logprobs": True, "top_logprobs": 5, "confidences": True}, 2,
                     id="threshold-all-records"),
    ],
)
def test_a_round_reads_the_device_at_most(monkeypatch, pair, prompt, policy, fields, most):
    counts = reads_per_round(monkeypatch, pair, prompt, options(policy, pair.draft.gamma, max_tokens=20, **fields))
    assert len(counts) > 3 and max(counts) == most and min(counts) >= 1


CURVE = CostCurve({n: 0.01 * (0.8 + 0.2 * n) for n in range(1, 9)}, draft=dict.fromkeys(range(1, 8), 0.002))


@pytest.mark.parametrize("sampling", (Sampling(), Sampling(0.8, seed=1)), ids=("greedy", "sampled"))
@pytest.mark.parametrize("policy, most", [("lagged", 1), ("paper", 2), ("rate", 2), ("lookahead", 2), ("auto", 2)])
def test_what_a_scheduled_round_reads(monkeypatch, policy, most, sampling):
    opts = DecodeOptions(make_rule(sampling), make_policy(policy, 7, True, CURVE), max_tokens=60)
    counts = reads_per_round(monkeypatch, golden_pair(), prompt_of("golden", 12), opts)
    assert max(counts) == most and len(counts) > 10


def test_auto_saves_the_second_read_where_it_does_not_pay(monkeypatch, pair, prompt):
    dear = dataclasses.replace(CURVE, read=1.0)  # a host read as long as a hundred forwards
    opts = DecodeOptions(make_rule(Sampling()), make_policy("auto", 7, True, dear), max_tokens=80)
    counts = reads_per_round(monkeypatch, pair, prompt, opts)
    assert counts[-5:] == [1] * 5


@pytest.mark.parametrize("policy", ("paper", "lagged", "rate", "lookahead", "auto"))
def test_scheduled_rounds_write_the_plain_text(pair, prompt, greedy, policy):
    opts = DecodeOptions(make_rule(Sampling()), make_policy(policy, 7, True, CURVE), max_tokens=45)
    rounds = list(decode(pair, prompt, opts))
    text = [token for landed in rounds for token in landed.tokens]
    assert text == [token for landed in greedy for token in landed.tokens][:45]
    assert len({landed.rows for landed in rounds}) > 2, "the widths must differ for this to show anything"
    assert all(landed.schedule.expected_tokens and landed.schedule.seconds for landed in rounds[1:])


def test_a_repetition_penalty_costs_no_host_read(monkeypatch, pair, prompt):
    sampling = Sampling(repetition_penalty=1.3)
    rule = make_rule(sampling, pair.target.processors(sampling))
    opts = dataclasses.replace(options("fixed", pair.draft.gamma, max_tokens=12), rule=rule)
    assert max(reads_per_round(monkeypatch, pair, prompt, opts)) == 1


def test_timing_is_what_makes_the_reads_counter_move(monkeypatch, pair, prompt):
    counts = reads_per_round(monkeypatch, pair, prompt, options("fixed", 7, max_tokens=20, timing=True))
    assert min(counts) > 1


def test_a_long_run_clears_the_cache_and_keeps_memory_flat(monkeypatch, pair):
    every, prompt = 110, mlx_dspark.encode_prompt(pair.tokenizer, "Once upon a time")
    monkeypatch.setattr(importlib.import_module("mlx_dspark.decode"), "CLEAR_EVERY", every)
    cleared, clear = [], mx.clear_cache
    rounds = decode(pair, prompt, options("fixed", pair.draft.gamma, max_tokens=270))
    next(rounds)
    monkeypatch.setattr(mx, "clear_cache", lambda: (cleared.append(generated), clear()))
    mx.reset_peak_memory()
    generated, memory, counters = 1, {}, {1}
    for landed in rounds:
        generated += len(landed.tokens)
        counters.add(generated)
        memory[generated] = mx.get_active_memory()
    assert generated == 270
    assert not {every, 2 * every} <= counters, "the run must jump over a multiple to show anything"
    assert len(cleared) == 270 // every == 2

    # Both caches grow in steps of 256 rows: not between the first two moments, once before the third.
    early, late, last = (max(memory[n] for n in memory if low < n <= low + 30) for low in (20, 205, 255))
    model, spec = pair.target.model.args, pair.draft.spec
    row = 2 * 4 * (model.num_hidden_layers * model.num_key_value_heads * model.head_dim
                   + spec.num_layers * spec.num_kv_heads * spec.head_dim)  # float32 K and V of one position
    assert late - early < 2**17
    assert last - early < 256 * row + 2**17
    assert mx.get_peak_memory() - early < 2 * 256 * row + 2**20


# --- what the records hold


SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=11)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", ["plain", "fixed", "threshold:0.5"])
def test_logprobs_are_those_of_the_target_at_temperature_1(pair, prompt, policy, sampling):
    rounds = run(pair, prompt, policy, max_tokens=20, sampling=sampling, logprobs=True)
    ids = ids_of(rounds)
    logits = pair.target.model(mx.array([prompt + ids]))[0, len(prompt) - 1 : -1].astype(mx.float32)
    wanted = mx.take_along_axis(logits - mx.logsumexp(logits, axis=-1, keepdims=True), mx.array(ids)[:, None], axis=-1)
    assert [len(landed.logprobs) for landed in rounds] == [len(landed.tokens) for landed in rounds]
    np.testing.assert_allclose([p for landed in rounds for p in landed.logprobs], wanted[:, 0], atol=1e-4)


PENALISED = Sampling(temperature=0.9, top_k=12, repetition_penalty=1.4, presence_penalty=0.3, seed=4)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=1.3), PENALISED],
                         ids=["greedy", "greedy-penalised", "sampled-penalised"])
@pytest.mark.parametrize("policy", ["plain", "fixed:3", "threshold:0.5"])
def test_top_logprobs_are_the_best_of_a_plain_forward_after_penalties(pair, prompt, policy, sampling):
    processors = pair.target.processors(sampling)
    opts = dataclasses.replace(options(policy, pair.draft.gamma, max_tokens=20, logprobs=True, top_logprobs=6),
                               rule=make_rule(sampling, processors))
    rounds = list(decode(pair, prompt, opts))
    ids = ids_of(rounds)
    assert_records_agree(rounds, len(prompt), 20, frozenset())
    assert policy == "plain" or max(landed.accepted for landed in rounds) > 0
    logits = pair.target.model(mx.array([prompt + ids]))[0, len(prompt) - 1 : -1].astype(mx.float32)
    tops = [best for landed in rounds for best in landed.top_logprobs]
    chosen = [value for landed in rounds for value in landed.logprobs]
    for place, (row, best) in enumerate(zip(logits, tops, strict=True)):
        row = row[None]
        for processor in processors:
            row = processor(mx.array(prompt + ids[:place]), row)
        wanted = np.array(row - mx.logsumexp(row, axis=-1, keepdims=True))[0]
        tokens, values = zip(*best, strict=True)
        assert len(set(tokens)) == 6
        np.testing.assert_allclose(values, -np.sort(-wanted)[:6], atol=1e-4)
        np.testing.assert_allclose(values, wanted[list(tokens)], atol=1e-4)
        assert dict(best).get(ids[place], chosen[place]) == chosen[place]
    if sampling.greedy:
        assert [best[0] for best in tops] == list(zip(ids, chosen, strict=True))


def test_top_logprobs_do_not_depend_on_the_widths_and_change_nothing(pair, prompt, greedy):
    found = {}
    for policy in ("plain", "fixed", "fixed:2"):
        rounds = run(pair, prompt, policy, max_tokens=30, logprobs=True, top_logprobs=4, confidences=True)
        assert ids_of(rounds) == ids_of(greedy)[:30]
        assert all(len(landed.confidences) == landed.proposed for landed in rounds if landed.proposed)
        found[policy] = np.array([best for landed in rounds for best in landed.top_logprobs])  # [30, 4, (id, value)]
    for tops in found.values():
        assert np.array_equal(tops[..., 0], found["plain"][..., 0])
        np.testing.assert_allclose(tops[..., 1], found["plain"][..., 1], atol=1e-5)


def test_a_stop_token_cuts_the_logprobs_too(pair, prompt, greedy):
    whole = next(landed for landed in greedy if landed.accepted > 2)
    stop = whole.tokens[1]
    rounds = run(pair, prompt, max_tokens=60, logprobs=True, top_logprobs=2, stop_ids=frozenset({stop}))
    assert ids_of(rounds)[-1] == stop and rounds[-1].top_logprobs[-1][0][0] == stop
    assert sum(len(landed.top_logprobs) for landed in rounds) == len(ids_of(rounds))


@pytest.mark.parametrize(("fields", "words"), [
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs is -1: give 0"),
    ({"top_logprobs": 3}, "top_logprobs is 3 without logprobs: ask for logprobs"),
])
def test_top_logprobs_that_cannot_be_read_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        options(**fields)


def test_logprobs_and_confidences_are_left_out_unless_asked_for(pair, prompt, greedy):
    assert all(landed.logprobs is None and landed.confidences is None for landed in greedy)
    assert all(landed.top_logprobs is None for landed in [*greedy, *run(pair, prompt, max_tokens=5, logprobs=True)])


class Listening:
    """A draft that remembers the confidence logits it proposed."""

    def __init__(self, draft):
        self._draft, self.logits = draft, []

    def __getattr__(self, name):
        return getattr(self._draft, name)

    def propose(self, *args):
        proposal = self._draft.propose(*args)
        self.logits.append(proposal.confidence_logits[0])
        return proposal


@pytest.mark.parametrize("logprobs", [False, True], ids=["alone", "with-logprobs"])
@pytest.mark.parametrize("policy", ["fixed", "fixed:3", "threshold:0.6"])
def test_recorded_confidences_are_the_heads_and_change_nothing(pair, prompt, greedy, policy, logprobs):
    listening = Listening(pair.draft)
    heard = dataclasses.replace(pair, draft=listening)
    rounds = run(heard, prompt, policy, max_tokens=20, confidences=True, logprobs=logprobs)
    assert ids_of(rounds) == ids_of(greedy)[:20]
    drafted = [landed for landed in rounds if landed.proposed]
    assert len(drafted) == len(listening.logits) > 3
    for landed, logits in zip(drafted, listening.logits, strict=True):
        assert len(landed.confidences) == landed.proposed
        assert all(0 < c < 1 for c in landed.confidences)
        np.testing.assert_allclose(landed.confidences, mx.sigmoid(logits), atol=1e-6)


def test_timing_tells_draft_and_verify_apart_and_changes_nothing(pair, prompt, greedy):
    rounds = run(pair, prompt, max_tokens=30, timing=True)
    assert ids_of(rounds) == ids_of(greedy)[:30]
    assert all(landed.seconds["draft"] > 0 and landed.seconds["verify"] > 0 for landed in rounds[1:])
    wait, verify = (sum(landed.seconds[part] for landed in rounds[1:]) for part in ("wait", "verify"))
    assert wait < verify / 2, "the device's work must not show up in `wait`"


# --- randomness


def sampled_ids(pair, prompt, seed):
    chunks = list(stream_generate(pair, prompt, max_tokens=16, temperature=0.9, seed=seed))
    return [i for chunk in chunks for i in chunk.ids], chunks[-1].stats.facts["seed"]


def test_the_seed_decides_the_text_and_is_reported(pair, prompt):
    first, again, other = (sampled_ids(pair, prompt, seed) for seed in (3, 3, 4))
    assert first == again and first[1] == 3
    assert first[0] != other[0]


def test_a_drawn_seed_is_reported_and_repeats_the_text(pair, prompt):
    ids, seed = sampled_ids(pair, prompt, None)
    assert sampled_ids(pair, prompt, seed) == (ids, seed)


def test_the_global_random_state_plays_no_part(pair, prompt):
    mx.random.seed(0)
    before = sampled_ids(pair, prompt, 3)
    mx.random.seed(1)
    assert sampled_ids(pair, prompt, 3) == before


# --- rounds launched before the last one is read


def test_plain_equals_mlx_lm(pair, prompt, greedy):
    steps = generate_step(mx.array(prompt), pair.target.model, max_tokens=LENGTH)
    wanted = [int(token) for token, _ in steps]
    rounds = run(pair, prompt, "plain", max_tokens=LENGTH)
    assert ids_of(rounds) == wanted == ids_of(greedy)
    assert {landed.rows for landed in rounds[1:]} == {1}


@pytest.mark.parametrize("reads", [False, True], ids=["blind", "reads-confidence"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([0, 7, 7, 0, 0, 3], [7], id="parks"),
        pytest.param([7, 4], [0, 7, 2], id="drafts-but-admits-none"),
        pytest.param([0, 0, 5, 7, 0, 1], [0, 1, 7, 3, 0], id="both"),
        pytest.param([5, 6], [0], id="never-admits"),
    ],
)
def test_parked_and_drafting_rounds_mix(pair, prompt, greedy, before, after, reads):
    rounds = run(pair, prompt, Patterned(before, after, reads), max_tokens=30)
    assert ids_of(rounds) == ids_of(greedy)[:30]
    assert any(landed.rows == 1 for landed in rounds)
    assert after == [0] or any(landed.accepted for landed in rounds)


def test_a_parked_draft_proposes_what_it_would_have_proposed(pair, prompt, greedy):
    """Its context is filled from taps collected while it was parked."""
    policy = Patterned([0] * 25 + [7] * 100, [7])
    unparked = {landed.start: landed.drafts for landed in greedy}
    compared = 0
    for landed in run(pair, prompt, policy, max_tokens=LENGTH):
        if len(landed.drafts) == len(unparked.get(landed.start, ())) == 7:
            assert landed.drafts == unparked[landed.start]
            compared += 1
    assert compared >= 3


def test_parking_past_the_flush_keeps_the_draft_in_step(monkeypatch, pair, prompt):
    """More pending taps than FLUSH_ROWS become K/V without a block pass."""
    monkeypatch.setattr("mlx_dspark.draft.block.FLUSH_ROWS", 40)
    parked = 60
    rounds = run(pair, prompt, Patterned([0] * parked + [7] * 100, [7]), max_tokens=parked + 40)
    drafting = [landed for landed in rounds if landed.drafts]
    whole = ids_of(rounds)[: drafting[0].start - len(prompt) + 1]
    fresh = run(pair, prompt + whole[:-1], max_tokens=41)
    assert ids_of(rounds) == whole + ids_of(fresh)[1 : 1 + len(ids_of(rounds)) - len(whole)]
    assert [r.drafts for r in drafting[:4]] == [r.drafts for r in fresh[1:5]]


def test_closing_early_is_fine(pair, prompt, greedy):
    rounds = decode(pair, prompt, options("fixed", pair.draft.gamma))
    taken = [next(rounds) for _ in range(3)]
    rounds.close()
    assert ids_of(taken) == ids_of(greedy)[: len(ids_of(taken))]
