"""Rows shared out by the device: the ranking itself, whole rounds beside their two-read twin, and what they read."""

import math
import random
from dataclasses import replace

import mlx.core as mx
import pytest
from helpers import Reads, golden_pair, pair_of, plain, prompt_of, random_tokens, tiny_model, untrained_draft
from scheduling import INDEPENDENT, law_of_two

from mlx_dspark.decode import DecodeOptions, Run, decode
from mlx_dspark.sampling import make_rule
from mlx_dspark.schedule.batch import make_batch_policy
from mlx_dspark.schedule.batch_paper import BatchLagged
from mlx_dspark.schedule.calibration import calibrator
from mlx_dspark.schedule.cost import CostCurve
from mlx_dspark.schedule.grid import CostGrid
from mlx_dspark.schedule.lines import Ranked
from mlx_dspark.schedule.policies import Fixed
from mlx_dspark.schedule.ranking import survivals, top
from mlx_dspark.schedule.refine import Refinement, shifted
from mlx_dspark.serve import batch as loop
from mlx_dspark.serve import ranked as device
from mlx_dspark.serve.batch import Batch, Follows, Member
from mlx_dspark.structs import KVOptions, Sampling

TEXT = prompt_of("golden", 120)
PROMPTS = [TEXT[:5], TEXT[10:50], TEXT[3:20], TEXT[30:63]]
COUNT = 24
CURVE = CostCurve({n: 1 + 0.1 * n for n in range(1, 41)}, draft=dict.fromkeys(range(1, 8), 0.3))


def shared_out(rows, further, **more):
    ranked = Ranked(tuple(range(len(rows))), further, **more)
    return device.share_out([mx.array([own], dtype=mx.float32) for own in rows], ranked).tolist()


# The ranking


@pytest.mark.parametrize("temperatures", [None, [2.0, 0.7, 1.3]], ids=["raw", "calibrated"])
@pytest.mark.parametrize("scale", [1.0, 0.6])
@pytest.mark.parametrize("by_request", [False, True], ids=["alike", "by-request"])
def test_the_device_ranks_as_the_host_does(temperatures, scale, by_request):
    rng, refine = random.Random(7), Refinement()
    refine._log_scale = math.log(scale)
    found = set()
    for _ in range(60):
        rows = [[rng.gauss(1, 2) for _ in range(rng.randint(1, 7))] for _ in range(rng.randint(2, 6))]
        shifts, worths = ([draw() for _ in rows] for draw in (lambda: rng.gauss(0, 1), lambda: rng.uniform(0.3, 1.5)))
        given = {"shifts": tuple(shifts), "worths": tuple(worths)} if by_request else {}
        further = rng.randint(1, sum(map(len, rows)) - 1)
        seen = [refine(calibrator(temperatures)(mx.sigmoid(mx.array(own)).tolist())) for own in rows]
        if by_request:
            seen = [shifted(own, shift) for own, shift in zip(seen, shifts, strict=True)]
        weights = worths if by_request else [1.0] * len(rows)
        wanted = top([[weight * a for a in survivals(own)] for own, weight in zip(seen, weights, strict=True)], further)
        assert shared_out(rows, further, temperatures=tuple(temperatures or ()), scale=scale, **given) == wanted
        found.add(tuple(wanted))
    assert len(found) > 50


def test_shifts_and_worths_change_the_ranking():
    rows = [[1.0, 1.0], [0.9, 0.9]]  # of four slots, the two best ones
    assert shared_out(rows, 2) == [1, 1]
    assert shared_out(rows, 2, shifts=(-2.0, 2.0)) == [0, 2]
    assert shared_out(rows, 2, worths=(1.0, 0.3)) == [2, 0]


def test_temperatures_and_scale_change_the_ranking():
    rows = [[2.0, 0.2], [0.9, 4.0]]  # of three slots, the two best ones
    assert shared_out(rows, 2) == [1, 1]
    assert shared_out(rows, 2, temperatures=(1.0, 0.05)) == [2, 0]
    assert shared_out(rows, 2, scale=3.0) == [1, 1] and shared_out([[3.0, 3.0], [2.0]], 2) == [2, 0]


@pytest.mark.parametrize("logit", [0.0, 1.5, 60.0, -200.0, -math.inf, math.inf])
def test_equal_survivals_go_by_slot_and_then_by_request(logit):
    """Also where they are so close to 0 or 1 that no float tells them apart."""
    rows = [[logit] * n for n in (3, 1, 3)]
    assert [shared_out(rows, n) for n in range(8)] == [
        [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 1, 2], [3, 1, 2], [3, 1, 3]]


def test_whatever_the_confidences_are_the_number_of_rows_is_right():
    """The host has fixed the shapes: a sum that differs would run other rows than it counts."""
    rng = random.Random(3)
    for _ in range(40):
        rows = [[rng.choice([math.nan, math.inf, -math.inf, 0.0, rng.gauss(0, 3)]) for _ in range(4)] for _ in range(3)]
        further = rng.randint(0, 12)
        drafts = shared_out(rows, further)
        assert sum(drafts) == further and all(0 <= own <= 4 for own in drafts)


def test_survivals_never_rise():
    found = device.survivals(mx.random.normal((50, 15), key=mx.random.key(1)) + 8, Ranked((), 0))
    assert (found[:, 1:] <= found[:, :-1]).all().item() and found.min().item() > 0


@pytest.mark.parametrize("further", [0, 1, 2, 3, 4])
def test_appendix_a_texts_of_two_requests_are_exact_and_independent(further):
    """The paper's appendix A by enumeration: the device's ranking looks at nothing behind a refused slot."""

    def drafts_of_both(confidences):
        return shared_out([[math.log(c / (1 - c)) for c in own] for own in confidences], further)

    assert law_of_two(drafts_of_both) == pytest.approx(INDEPENDENT, abs=1e-12)


# Whole rounds


class TwoReads(BatchLagged):
    """The reference: this round's confidences are read before verifying, and the host ranks."""

    reads_confidence = True


def policy_of(pair, kind=BatchLagged, curve=CURVE, requests=(1, 2, 3, 4)):
    gamma = pair.draft.gamma
    return kind("lagged", gamma, CostGrid.from_curve(curve, requests, gamma))


def member(pair, number, prompt, policy, own=None, sampling=None, kv=None, count=COUNT, **options):
    sampling = sampling or Sampling()
    follows = own or Follows(policy.name)
    made = DecodeOptions(make_rule(sampling, pair.target.processors(sampling)), follows, max_tokens=count,
                         kv=kv or KVOptions(), **options)
    return Member(number, Run(pair, prompt, made), prompt, own)


def served(batch, members, between=0):
    """All rounds of every member; one more joins after every so many steps."""
    rounds, waiting = {own.number: [] for own in members}, list(members)
    while batch.members or waiting:
        for _ in range(1 if between else len(waiting)):
            if waiting:
                own = waiting.pop(0)
                *_, flight = own.steps
                batch.join(own, flight)
        for _ in range(between or 1):
            for landed in batch.step():
                rounds[landed.member.number].append(landed.round)
    return rounds


def counted(monkeypatch):
    """The rounds whose rows the device shared out: the rows beyond one each, and what came of them."""
    calls, share_out = [], device.share_out

    def counting(logits, ranked):
        calls.append((share_out(logits, ranked), ranked.further))
        return calls[-1][0]

    monkeypatch.setattr(loop, "share_out", counting)
    return calls


def told(rounds):
    """What a round says, without the seconds."""
    return [(one.index, one.start, one.rows, one.proposed, one.drafts, one.accepted, one.tokens, one.schedule,
             one.finish) for one in rounds]


def read(rounds):
    return [c for one in rounds for c in one.confidences or ()]


def text_of(rounds):
    return [token for one in rounds for token in one.tokens]


@pytest.mark.parametrize("between", [0, 3], ids=["together", "one-by-one"])
def test_rounds_are_those_of_the_two_read_twin(monkeypatch, between):
    pair, calls = golden_pair(), counted(monkeypatch)
    found = []
    for kind in (BatchLagged, TwoReads):
        policy = policy_of(pair, kind)
        batch = Batch(pair, policy)
        found.append(served(batch, [member(pair, b, prompt, policy) for b, prompt in enumerate(PROMPTS)], between))
        if kind is BatchLagged:
            shared = len(calls)
            assert shared > 4 and all(mx.sum(drafts).item() == further for drafts, further in calls)
            assert any(len(set(drafts.tolist())) > 1 for drafts, _ in calls), "requests must be told apart"
    one, two = found
    assert len(calls) == shared, "the twin ranks on the host"
    for b, prompt in enumerate(PROMPTS):
        assert told(one[b]) == told(two[b])
        assert read(one[b]) == pytest.approx(read(two[b])) and len(read(one[b])) > COUNT
        assert text_of(one[b]) == plain(pair.target.model, prompt, COUNT)
        assert all(own.rows == len(own.drafts) + 1 == own.schedule.drafts + 1 for own in one[b][1:])


@pytest.mark.parametrize(("kind", "kv"), [("qwen3", KVOptions()), ("gemma3_text", KVOptions()),
                                          ("gemma4_text", KVOptions()), ("llama", KVOptions(8, 32, 16))])
def test_windows_and_quantised_caches_are_rolled_back(monkeypatch, kind, kv):
    """Filling rows enter every cache; the text is that of a run which never saw them."""
    pair, calls = pair_of(tiny_model(kind)), counted(monkeypatch)
    pair = pair_of(tiny_model(kind), untrained_draft(pair.target))
    prompts = [random_tokens(length, seed=length) for length in (3, 30, 17)]
    policy = policy_of(pair, curve=CostCurve({n: 1 + 0.02 * n + 0.2 * (n > 8) for n in range(1, 41)}))
    rounds = served(Batch(pair, policy), [member(pair, b, prompt, policy, kv=kv) for b, prompt in enumerate(prompts)])
    assert len(calls) > 5
    options = {} if kv.bits is None else {
        "kv_bits": kv.bits, "kv_group_size": kv.group_size, "quantized_kv_start": kv.start}
    for b, prompt in enumerate(prompts):
        assert text_of(rounds[b]) == plain(pair.target.model, prompt, COUNT, **options)


def test_requests_with_a_width_of_their_own_join(monkeypatch):
    """A fixed width, logprobs, a history, and a seed, beside requests that are ranked."""
    pair, calls = golden_pair(), counted(monkeypatch)
    policy = policy_of(pair)
    seeded = Sampling(temperature=0.9, seed=5)
    members = [
        member(pair, 0, PROMPTS[0], policy, Fixed(2, "fixed:2"), seeded),
        member(pair, 1, PROMPTS[1], policy, logprobs=True, top_logprobs=4),
        member(pair, 2, PROMPTS[2], policy, sampling=Sampling(repetition_penalty=1.5, frequency_penalty=0.4)),
        member(pair, 3, PROMPTS[3], policy),
    ]
    rounds = served(Batch(pair, policy), members)
    assert len(calls) > 4
    alone = [list(decode(pair, PROMPTS[own.number], replace(own.run.options, policy=own.own or Fixed(0, "plain"))))
             for own in members]
    assert [text_of(rounds[b]) for b in range(4)] == [text_of(own) for own in alone]
    logprobs = [[value for one in own for value in one.logprobs] for own in (rounds[1], alone[1])]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    tops = [mx.array([best for one in own for best in one.top_logprobs]) for own in (rounds[1], alone[1])]
    assert tops[0].shape == (COUNT, 4, 2) and mx.allclose(*tops, rtol=0, atol=1e-4)
    assert told(rounds[0]) == told(alone[0]), "widths and draws of the seeded one are its own"


@pytest.mark.parametrize(("kind", "most"), [(BatchLagged, 1), (TwoReads, 2)])
def test_host_reads_of_a_round(monkeypatch, kind, most):
    """The one read brings tokens, run, rows and confidences."""
    pair, calls = golden_pair(), counted(monkeypatch)
    policy = policy_of(pair, kind)
    batch = Batch(pair, policy)
    for b, prompt in enumerate(PROMPTS):
        own = member(pair, b, prompt, policy, logprobs=True, top_logprobs=b)
        *_, flight = own.steps
        batch.join(own, flight)
    batch.step()
    reads, counts = Reads(monkeypatch), []
    while batch.members:
        landed = batch.step()
        counts.append(reads.count)
        reads.count = 0
        assert all(own.round.confidences for own in landed if own.round.proposed)
    monkeypatch.undo()
    assert max(counts) == most and len(counts) > 5 and (calls or kind is TwoReads)


def test_sampled_texts_have_the_targets_distribution():
    """Half of the requests get one draft each, the surest ones: second tokens against the target's probabilities."""
    pair, prompt, many = golden_pair(), TEXT[:6], 210
    policy = policy_of(pair)
    policy.best = lambda lines, old: [min(line.proposed, 1) if b % 2 else 0 for b, line in enumerate(lines)]
    batch, rounds = Batch(pair, policy), {}
    for first in range(0, many, 30):
        members = [member(pair, b, prompt, policy, sampling=Sampling(temperature=1.0, seed=None), count=3)
                   for b in range(first, first + 30)]
        rounds |= served(batch, members)
    drawn = [text_of(own) for own in rounds.values()]
    assert {own[1].schedule.drafts for own in rounds.values()} >= {0, 1}
    logits = pair.target.forward(mx.array([prompt]), pair.target.start(KVOptions())).logits[0, -1]
    after = int(mx.argmax(logits))
    behind = [ids[1] for ids in drawn if ids[0] == after]
    logits = pair.target.forward(mx.array([[*prompt, after]]), pair.target.start(KVOptions())).logits[0, -1]
    second = mx.softmax(logits)
    for token in mx.argsort(-second)[:2].tolist():
        wanted, share = second[token].item(), behind.count(token) / len(behind)
        assert abs(share - wanted) < 4 * (wanted * (1 - wanted) / len(behind)) ** 0.5


# When the host decides


def test_a_calibration_that_is_no_temperatures_is_applied_on_the_host():
    grid = CostGrid.from_curve(CURVE, [2], 7)
    assert make_batch_policy("lagged", 7, True, grid, lambda own: [c**2 for c in own]).reads_confidence
    assert not make_batch_policy("lagged", 7, True, grid, calibrator([2.0, 3.0])).reads_confidence
