"""Many requests at once: every answer is the one the request gets alone, whatever happens to the others."""

import copy
import math
import subprocess
import sys
import threading
import time
from dataclasses import replace

import mlx.core as mx
import pytest
from helpers import GOLDEN, FakeTokenizer, golden_pair, pair_of, prompt_of, random_tokens, tiny_model

from mlx_dspark import generate
from mlx_dspark.errors import CacheError
from mlx_dspark.generate import collect, stream_generate, token_limit
from mlx_dspark.schedule import CostCurve
from mlx_dspark.schedule.batch import BatchFixed
from mlx_dspark.serve import Engine, EngineBusy, EngineClosed, EngineError, EngineOptions, Request, batch, engine
from mlx_dspark.structs import KVOptions, Sampling

CURVE = CostCurve({n: 1 + 0.1 * n for n in range(1, 9)}, draft=dict.fromkeys(range(1, 8), 0.3))
TEXT = prompt_of("golden", 120)
PROMPTS = [TEXT[:5], TEXT[10:50], TEXT[3:20], TEXT[60:61], TEXT[30:63]]
COUNT = 30


class Letters(FakeTokenizer):
    """Every token is a letter; 26 of them, over and over."""

    @property
    def detokenizer(self):
        return Detokenizer(self)

    def decode(self, tokens):
        return "".join(chr(97 + token % 26) for token in tokens)


class Detokenizer:
    def __init__(self, tokenizer):
        self._tokenizer, self.tokens, self.last_segment = tokenizer, [], ""

    def add_token(self, token):
        self.tokens.append(token)
        self.last_segment = self._tokenizer.decode([token])

    def finalize(self):
        self.last_segment = ""


def lettered(pair, stop_ids=()):
    return replace(pair, tokenizer=Letters(stop_ids), facts={"dtype": "float32"})


@pytest.fixture(autouse=True)
def costs(monkeypatch):
    """A made-up machine, so that nothing is measured."""
    monkeypatch.setattr("mlx_dspark.scheduling._curve", lambda pair, profile, say: (CURVE, "made up"))
    monkeypatch.setattr("mlx_dspark.scheduling._temperatures", lambda pair: (None, "none"))


@pytest.fixture(scope="module")
def pair():
    return lettered(golden_pair())


def serve(pair, requests, **options):
    """All answers, in order: (text, ids, logprobs, finish reason)."""
    with Engine(pair, EngineOptions(**{"prefill_step": 4, **options})) as serving:
        return [collected(stream) for stream in [serving.submit(request) for request in requests]]


def collected(stream):
    text, ids, logprobs, last = "", [], [], None
    for last in stream:
        text += last.text
        ids += last.ids
        logprobs += last.logprobs or ()
    return text, tuple(ids), tuple(logprobs), last.finish_reason


def alone(pair, request, policy="plain"):
    made = generate(pair, list(request.prompt), max_tokens=request.max_tokens, sampling=request.sampling,
                    stop=request.stop, logprobs=request.logprobs, policy=policy)
    return made.text, made.ids, made.logprobs or (), made.finish_reason


def greedy(prompts=PROMPTS, **fields):
    return [Request(tuple(prompt), **{"max_tokens": COUNT, **fields}) for prompt in prompts]


@pytest.fixture(scope="module")
def answers(pair):
    """What plain decoding answers to `greedy()`, each request alone."""
    return [alone(pair, request) for request in greedy()]


@pytest.mark.parametrize("layout", ["packed", "rectangular"])
@pytest.mark.parametrize("policy", ["plain", "fixed", "fixed:2", "paper", "search", "lagged", "auto"])
def test_greedy_answers_are_those_of_plain_decoding(pair, answers, policy, layout):
    assert serve(pair, greedy(), policy=policy, layout=layout, max_requests=3) == answers


@pytest.mark.parametrize("name", ["qwen3_dspark_gated", "qwen3_dspark_rnn", "qwen3_eagle3", "gemma4_dspark_vanilla"])
def test_every_kind_of_draft(name, answers):
    if name.startswith("gemma4"):
        pytest.importorskip("mlx_lm.models.gemma4_text")
    pair = lettered(pair_for(name))
    wanted = answers if name.startswith("qwen3") else [alone(pair, request) for request in greedy()]  # one target
    assert serve(pair, greedy(), policy="fixed") == wanted


def pair_for(name):
    if name.startswith("qwen3"):
        return golden_pair(name)
    from mlx_lm.utils import load_model

    from mlx_dspark.load import Pair, read_draft
    from mlx_dspark.target import Target

    model, config = load_model(GOLDEN / "gemma4_target")
    return Pair(Target(model, config, name), FakeTokenizer(), read_draft(GOLDEN / name))


@pytest.mark.parametrize(("kind", "kv"), [("gemma3_text", KVOptions()), ("gemma4_text", KVOptions()),
                                          ("llama", KVOptions(8, 32, 16))])
def test_windows_and_quantised_caches(kind, kv):
    pair = lettered(pair_of(tiny_model(kind)))
    requests = greedy([random_tokens(length, seed=length) for length in (3, 30, 17)])
    wanted = [generate(pair, list(r.prompt), max_tokens=COUNT, kv=kv, prefill_step=4).ids for r in requests]
    assert [ids for _, ids, _, _ in serve(pair, requests, kv=kv)] == wanted


MIXED = [
    Request(tuple(TEXT[:9]), 20, Sampling(temperature=0.9, seed=5)),
    Request(tuple(TEXT[4:30]), 25, Sampling(repetition_penalty=1.5, frequency_penalty=0.4)),
    Request(tuple(TEXT[9:12]), 20, Sampling(temperature=0.7, top_k=9, seed=6, presence_penalty=0.5), logprobs=True),
    Request(tuple(TEXT[2:40]), 0),
    Request(tuple(TEXT[7:40]), 1, logprobs=True),
    Request(tuple(TEXT[7:40]), 22, Sampling(logit_bias={3: 4.0}), stop=("zz", "d", "k")),
]


@pytest.mark.parametrize("policy", ["fixed", "auto"])
def test_every_request_keeps_its_own_sampling_seed_stops_and_logprobs(pair, policy):
    """Those with a seed write what `generate` writes with it; the others are greedy."""
    wanted = [alone(pair, r, policy if r.sampling.seed is not None else "plain") for r in MIXED]
    for order in (MIXED, MIXED[::-1]):
        got = serve(pair, order, policy=policy)
        for one, other in zip(got if order is MIXED else got[::-1], wanted):
            assert one[0] == other[0] and one[1] == other[1] and one[3] == other[3]
            assert one[2] == pytest.approx(other[2], abs=1e-4)


BESTS = [
    Request(tuple(TEXT[:9]), 20, Sampling(temperature=0.9, seed=5), logprobs=True, top_logprobs=3),
    Request(tuple(TEXT[4:30]), 25, Sampling(repetition_penalty=1.5), logprobs=True, top_logprobs=20),
    Request(tuple(TEXT[9:12]), 20, logprobs=True),
    Request(tuple(TEXT[2:40]), 20),
    Request(tuple(TEXT[7:40]), 1, logprobs=True, top_logprobs=1),
    Request(tuple(TEXT[7:40]), 22, stop=("zz", "d", "k"), logprobs=True, top_logprobs=2),
]


@pytest.mark.parametrize("layout", ["packed", "rectangular"])
@pytest.mark.parametrize("policy", ["fixed", "lagged"])
def test_every_request_gets_as_many_top_logprobs_as_it_asked_for(pair, policy, layout):
    with Engine(pair, EngineOptions(prefill_step=4, policy=policy, layout=layout)) as serving:
        got = [collect(iter(stream)) for stream in [serving.submit(request) for request in BESTS]]
    for request, made in zip(BESTS, got, strict=True):
        own = policy if request.sampling.seed is not None else "plain"
        wanted = generate(pair, list(request.prompt), max_tokens=request.max_tokens, sampling=request.sampling,
                          stop=request.stop, logprobs=request.logprobs, top_logprobs=request.top_logprobs, policy=own)
        assert made.ids == wanted.ids
        assert (made.top_logprobs is None, made.logprobs is None) == (not request.top_logprobs, not request.logprobs)
        for best, alike in zip(made.top_logprobs or (), wanted.top_logprobs or (), strict=True):
            assert len(best) == request.top_logprobs and [token for token, _ in best] == [token for token, _ in alike]
            assert [value for _, value in best] == pytest.approx([value for _, value in alike], abs=1e-4)
        assert not request.top_logprobs or len(made.top_logprobs) == len(made.ids)


@pytest.mark.parametrize(("fields", "words"), [({"top_logprobs": 2}, "2 without logprobs"),
                                               ({"logprobs": True, "top_logprobs": 10**6}, "the vocabulary has")])
def test_top_logprobs_that_cannot_be_served_are_refused_at_once(pair, fields, words):
    with Engine(pair) as serving, pytest.raises(ValueError, match=words):
        serving.submit(Request(tuple(TEXT[:9]), **fields))


def test_a_policy_of_its_own_is_told_its_own_reasons(pair):
    """`auto` knows its probes by them; the widths of a seeded request must be those of a run alone, round by round."""
    request = Request(tuple(TEXT[:9]), 60, Sampling(temperature=1.0, seed=5))
    alone_rounds = [chunk.round for chunk in stream_generate(
        pair, list(request.prompt), max_tokens=60, sampling=request.sampling, policy="auto") if chunk.round]
    with Engine(pair, EngineOptions(policy="auto")) as serving:
        others = [serving.submit(other) for other in greedy()]
        rounds = [chunk.round for chunk in serving.submit(request) if chunk.round]
        for other in others:
            collected(other)
    assert [(r.rows, r.proposed, r.schedule.reason) for r in rounds] == [
        (r.rows, r.proposed, r.schedule.reason) for r in alone_rounds]


def test_stop_tokens_end_a_text_and_nothing_follows(pair, answers):
    wanted = answers[1][1]
    stopping = lettered(pair, stop_ids=[wanted[7]])
    first = wanted.index(wanted[7])
    got = serve(stopping, greedy(), policy="fixed")
    assert got[1][1] == wanted[: first + 1] and got[1][3] == "stop"
    assert got == [alone(stopping, request) for request in greedy()]


def tail(count, trials, chance):
    """The binomial probability of a count as far from the expected one, or farther, on its side."""
    each = [math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(trials + 1)]
    return min(sum(each[: count + 1]), sum(each[count:]))


def test_unseeded_samples_have_the_targets_distribution(pair):
    """First and second tokens of many requests at once, against the target's own probabilities.

    A right engine fails in less than one of a million runs; one that is greedy, halves the temperature, has one seed
    for all requests or accepts every draft (which here says the second token once in fifty times, the target four
    times in five) passes in less than one of a thousand.
    """
    prompt, many = tuple(TEXT[:6]), 300
    logits = pair.target.forward(mx.array([prompt]), pair.target.start(KVOptions())).logits[0, -1]
    first = mx.softmax(logits).tolist()
    requests = [Request(prompt, 4, Sampling(temperature=1.0)) for _ in range(many)]  # the second token may be a draft
    drawn = [ids for _, ids, _, _ in serve(pair, requests, policy="fixed:2", max_requests=32, max_waiting=many,
                                           prefix_bytes=0, prefill_step=8)]
    best = sorted(range(len(first)), key=first.__getitem__)[-3:]
    for token in best:
        assert tail(sum(ids[0] == token for ids in drawn), many, first[token]) > 1e-7
    after = best[-1]
    behind = [ids[1] for ids in drawn if ids[0] == after]
    logits = pair.target.forward(mx.array([[*prompt, after]]), pair.target.start(KVOptions())).logits[0, -1]
    second = mx.softmax(logits)
    token = int(mx.argmax(second))
    assert tail(behind.count(token), len(behind), second[token].item()) > 1e-7


class Watched:
    """A pair whose target counts rows: prompt chunks and shared rounds in the order they ran."""

    def __init__(self, pair, monkeypatch):
        self.log = []
        forward, many = type(pair.target).forward, engine.Batch._launch
        monkeypatch.setattr(type(pair.target), "forward", lambda target, tokens, *more: self.log.append(
            tokens.shape[1]) or forward(target, tokens, *more))
        monkeypatch.setattr(engine.Batch, "_launch", lambda batch: self.log.append("round") or many(batch))


def test_a_long_prompt_never_stalls_the_others_for_more_than_a_chunk(pair, monkeypatch):
    started = threading.Event()

    def deliver(event):
        started.set()

    with Engine(pair, EngineOptions(policy="plain", prefill_step=4, prefix_bytes=0)) as serving:
        running = serving.submit(greedy()[0], lambda event: deliver(event))
        started.wait(10)
        watched = Watched(pair, monkeypatch)
        collected(serving.submit(Request(tuple(TEXT[:60]), 1)))
        del running
    chunks = [i for i, entry in enumerate(watched.log) if entry == 4]
    assert len(chunks) >= 10
    between = [watched.log[a + 1 : b] for a, b in zip(chunks, chunks[1:])]
    assert all("round" in part for part in between[:-1])


def test_a_client_that_leaves_is_evicted_and_only_it(pair, answers):
    with Engine(pair, EngineOptions(policy="fixed", prefill_step=4)) as serving:
        leaving = serving.submit(Request(tuple(TEXT[:9]), 400))
        streams = [serving.submit(request) for request in greedy()]
        chunks = iter(leaving)
        next(chunks)
        leaving.cancel()
        assert [collected(stream) for stream in streams] == answers
        *_, last = chunks
    assert last.finish_reason == "cancelled" and last.stats.generated_tokens < 400


def test_leaving_while_waiting_costs_nothing(pair):
    with Engine(pair, EngineOptions(policy="plain", max_requests=1)) as serving:
        running, waiting = (serving.submit(request) for request in greedy(PROMPTS[:2]))
        waiting.cancel()
        assert collected(waiting) == ("", (), (), "cancelled")
        assert collected(running)[3] == "length"


def test_requests_wait_for_memory_and_are_all_served(pair):
    footprint = engine.footprint(pair, KVOptions())
    one = footprint.bytes(max(map(len, PROMPTS)) + COUNT)
    with Engine(pair, EngineOptions(policy="fixed", kv_bytes=int(1.5 * one), prefix_bytes=0)) as serving:
        seen = []
        streams = [serving.submit(request, lambda event: seen.append(serving.metrics())) for request in greedy()]
        assert len(streams) == 5
    assert max(metrics.active for metrics in seen) == 1
    assert max(metrics.kv_bytes for metrics in seen) <= 1.5 * one
    assert serving.metrics().finished == {"length": 5}


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(pair):
    with Engine(pair, EngineOptions(policy="fixed", kv_bytes=1000)) as serving, \
            pytest.raises(ValueError, match="GB of cache"):
        serving.submit(greedy()[0])


def test_a_failure_ends_those_who_are_served_and_the_engine_goes_on(pair, answers, monkeypatch):
    with Engine(pair, EngineOptions(policy="plain", prefill_step=4)) as serving:
        with monkeypatch.context() as patch:
            patch.setattr("mlx_dspark.serve.batch.forward_many", out_of_memory)
            streams = [serving.submit(request) for request in greedy(PROMPTS[:2])]
            for stream in streams:
                with pytest.raises(EngineError, match="no memory left"):
                    collected(stream)
        assert collected(serving.submit(greedy()[1])) == answers[1]
    assert serving.metrics().finished == {"error": 2, "length": 1}


def out_of_memory(*arguments, **options):
    raise RuntimeError("no memory left\nand a long story")


BROKEN = tuple(TEXT[20:40])


def no_run(patch):
    begin = engine.Run
    patch.setattr(engine, "Run", lambda pair, prompt, options: (
        out_of_memory() if tuple(prompt) == BROKEN else begin(pair, prompt, options)))


def no_prompt(patch):
    begin = batch.prefill_steps

    def steps(run, prompt):
        yield from begin(run, prompt) if tuple(prompt) != BROKEN else (None, None, out_of_memory())

    patch.setattr(batch, "prefill_steps", steps)


def no_text(patch):
    take = engine.Answer.take
    patch.setattr(engine.Answer, "take", lambda answer, landed: (
        out_of_memory() if is_broken(answer) and landed.index == 1 else take(answer, landed)))


def no_end(patch):
    end = engine.Answer.end
    patch.setattr(engine.Answer, "end", lambda answer, finish=None: (
        out_of_memory() if is_broken(answer) else end(answer, finish)))


def is_broken(answer):
    return answer.stats.prompt_tokens == len(BROKEN)


@pytest.mark.parametrize("policy", ["plain", "fixed"])
@pytest.mark.parametrize("fails", [no_run, no_prompt, no_text, no_end])
def test_a_request_that_fails_ends_alone(pair, answers, monkeypatch, fails, policy):
    """In its beginning, its prompt, its text or its end: those beside it write what they write alone."""
    fails(monkeypatch)
    events = []
    first, *others = greedy()
    requests = [first, Request(BROKEN, 20), *others]
    with Engine(pair, EngineOptions(policy=policy, prefill_step=4)) as serving:
        for n, request in enumerate(requests):
            serving.submit(request, lambda event, n=n: events.append((n, event)))
        assert collected(serving.submit(greedy()[1])) == answers[1]
    own = [[event for m, event in events if m == n] for n in range(len(requests))]
    *_, error = own.pop(1)
    assert isinstance(error, EngineError) and str(error) == "this request failed: no memory left"
    assert {n for n, _ in events[events.index((1, error)) :]} >= {2, 3, 4, 5}  # all of these had something to come
    for chunks, (text, ids, _, reason) in zip(own, answers):
        made = collect(iter(chunks))
        assert (made.text, made.ids, made.finish_reason) == (text, ids, reason)
    metrics = serving.metrics()
    assert metrics.finished == {"error": 1, "length": 6} and (metrics.active, metrics.waiting) == (0, 0)
    assert all(key[: len(BROKEN)] != BROKEN for key in serving._prefix._entries)


def test_a_failure_of_one_that_leaves_ends_nobody_else(pair, answers, monkeypatch):
    no_end(monkeypatch)
    with Engine(pair, EngineOptions(policy="plain", max_requests=2)) as serving:
        healthy = serving.submit(greedy()[1])
        leaving, waiting = (serving.submit(Request(BROKEN, 300)) for _ in range(2))
        next(iter(leaving))
        waiting.cancel()
        leaving.cancel()
        for stream in (leaving, waiting):
            with pytest.raises(EngineError, match="no memory left"):
                collected(stream)
        assert collected(healthy) == answers[1]
    assert serving.metrics().finished == {"error": 2, "length": 1}


def test_an_answer_that_cannot_be_kept_is_an_answer(pair, answers, monkeypatch):
    monkeypatch.setattr(engine.PrefixCache, "store", out_of_memory)
    assert serve(pair, greedy(), policy="fixed") == answers


def test_a_target_with_more_rows_than_its_tokenizer_writes_on(answers):
    """mlx-lm's detokenizers raise, or show a mark, where a target chooses an id of its padding."""

    class Few(Letters):
        def __len__(self):
            return few

    few = sorted(answers[1][1])[-3]
    short = replace(lettered(golden_pair()), tokenizer=Few())
    text, ids, _, reason = serve(short, greedy()[1:2], policy="fixed")[0]
    assert (ids, reason) == (answers[1][1], "length") and any(token >= few for token in ids)
    assert text == Letters().decode([token for token in ids if token < few])


def test_a_receiver_that_raises_leaves_alone(pair, answers):
    def broken(event):
        raise RuntimeError("gone")

    with Engine(pair, EngineOptions(policy="fixed")) as serving:
        serving.submit(Request(tuple(TEXT[:9]), 100), broken)
        assert collected(serving.submit(greedy()[1])) == answers[1]
    assert serving.metrics().finished["cancelled"] == 1


def test_closing_finishes_what_runs(pair):
    serving = Engine(pair, EngineOptions(policy="fixed", max_requests=2))
    streams = [serving.submit(request) for request in greedy()]
    serving.close()
    assert [collected(stream)[3] for stream in streams] == ["length"] * 5
    with pytest.raises(EngineClosed):
        serving.submit(greedy()[0])


def test_closing_without_patience_reports_every_stream(pair):
    serving = Engine(pair, EngineOptions(policy="plain", max_requests=1))
    streams = [serving.submit(Request(tuple(TEXT[:9]), -1)) for _ in range(3)]
    serving.close(drain_seconds=0)
    for stream in streams:
        with pytest.raises(EngineClosed):
            collected(stream)


def test_a_full_queue_is_said(pair):
    with Engine(pair, EngineOptions(policy="plain", max_requests=1, max_waiting=1)) as serving:
        streams = [serving.submit(Request(tuple(TEXT[:9]), 200)) for _ in range(2)]
        with pytest.raises(EngineBusy, match="waiting"):
            serving.submit(greedy()[0])
        for stream in streams:
            stream.cancel()


@pytest.mark.parametrize("policy", ["plain", "fixed", "auto"])
def test_a_conversation_reuses_what_its_turns_left(pair, policy):
    """Answer and follow-up equal cold runs; all but the last token of what was seen is reused."""
    with Engine(pair, EngineOptions(policy=policy, prefill_step=4)) as serving:
        said, reused = list(TEXT[:12]), []
        for turn in range(3):
            request = Request(tuple(said), 16)
            stream = serving.submit(request)
            chunks = list(stream)
            ids = [token for chunk in chunks for token in chunk.ids]
            assert tuple(ids) == alone(pair, request)[1]
            reused.append(chunks[-1].stats.facts["cached_tokens"])
            said += [*ids, *TEXT[40 + turn : 44 + turn]]
        metrics = serving.metrics()
    assert reused == [0, 12 + 15, 32 + 15]  # the last token of an answer was never run
    assert (metrics.prefix_hits, metrics.reused_tokens) == (2, sum(reused))


def test_a_conversation_is_kept_in_the_memory_of_its_tokens(pair):
    """9 tokens of target and draft, where caches grow by 256."""
    with Engine(pair, EngineOptions(policy="fixed")) as serving:
        collected(serving.submit(Request(tuple(TEXT[:5]), 5)))
    metrics = serving.metrics()
    a_position = (serving._footprint.bytes(1000) - serving._footprint.bytes(0)) / 1000
    assert (metrics.prefix_entries, metrics.active) == (1, 0)
    assert 0.7 * 9 * a_position < metrics.prefix_bytes <= 9 * a_position


def test_two_conversations_may_begin_alike_at_the_same_time(pair):
    requests = [Request(tuple(TEXT[:20] + TEXT[40 + k : 44 + k]), 12) for k in range(4)]
    with Engine(pair, EngineOptions(policy="fixed", prefill_step=4)) as serving:
        collected(serving.submit(Request(tuple(TEXT[:20]), 4)))
        answers = [collected(stream) for stream in [serving.submit(request) for request in requests]]
        assert serving.metrics().prefix_hits == 4
    assert answers == [alone(pair, request) for request in requests]


def test_submitting_from_many_threads(pair, answers):
    got = {}

    def client(number):
        time.sleep(0.01 * (number % 3))
        got[number] = collected(serving.submit(greedy()[number % 5]))

    with Engine(pair, EngineOptions(policy="auto", max_requests=4)) as serving:
        threads = [threading.Thread(target=client, args=(number,)) for number in range(15)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(got[number] == answers[number % 5] for number in range(15))


def test_the_metrics_add_up(pair):
    with Engine(pair, EngineOptions(policy="fixed", prefix_bytes=0)) as serving:
        answers = [collected(stream) for stream in [serving.submit(request) for request in greedy()]]
    metrics = serving.metrics()
    assert metrics.tokens == sum(len(ids) for _, ids, _, _ in answers) == 5 * COUNT
    assert metrics.rows == metrics.drafts + metrics.rounds
    assert metrics.tau == (metrics.tokens - 5) / metrics.rounds
    assert (metrics.active, metrics.waiting, metrics.requests, metrics.finished) == (0, 0, 5, {"length": 5})
    assert metrics.tokens_per_second > 0 and metrics.kv_bytes == 0


@pytest.mark.parametrize(("field", "value"), [
    ("max_requests", 0), ("max_waiting", -1), ("prefill_step", 0), ("kv_bytes", 0), ("prefix_bytes", -1),
    ("layout", "round"),
])  # fmt: skip
def test_options_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        EngineOptions(**{field: value})


@pytest.mark.parametrize(("request_", "message"), [
    (Request(()), "empty"), (Request((1, 10**6)), "vocabulary"), (Request((1,), -2), "max_tokens"),
    (Request((1,), 10**7), "context"), (Request((1,), stop=("",)), "stop string"),
    (Request((1,), sampling=Sampling(logit_bias={10**6: 1.0})), "logit_bias"),
])  # fmt: skip
def test_bad_requests_are_refused_before_any_work(pair, request_, message):
    with Engine(pair, EngineOptions(policy="fixed")) as serving, pytest.raises(ValueError, match=message):
        serving.submit(request_)
    assert serving.metrics().requests == 0


def test_an_unknown_policy_and_an_impossible_layout_are_refused(pair):
    with pytest.raises(ValueError, match="unknown policy"):
        Engine(pair, EngineOptions(policy="best"))
    windows = lettered(pair_of(tiny_model("gemma3_text")))
    with pytest.raises(CacheError, match="packed"):
        Engine(windows, EngineOptions(layout="rectangular"))
    with pytest.raises(CacheError, match="mlx_dspark.generate"):
        Engine(lettered(pair_of(tiny_model("lfm2"))))


def test_the_rest_of_the_context_can_be_asked_for(pair):
    assert token_limit(5, -1, 12) == 7
    context = pair.target.context
    assert context is not None
    prompt = tuple((TEXT * 100)[: context - 3])
    [(_, ids, _, reason)] = serve(pair, [Request(prompt, -1)], policy="fixed", prefill_step=512)
    assert (len(ids), reason) == (3, "length")


def endless(pair):
    """The pair as if its target said nothing about its context."""
    target = copy.copy(pair.target)
    target.context = None
    return replace(pair, target=target)


@pytest.mark.parametrize("policy", ["plain", "fixed"])
def test_without_a_context_memory_bounds_an_answer(pair, policy):
    positions = 9 + 40
    nbytes = engine.footprint(pair, KVOptions()).bytes(positions)
    with Engine(endless(pair), EngineOptions(policy=policy, kv_bytes=nbytes, prefix_bytes=0)) as serving:
        stream, ids, seen = serving.submit(Request(tuple(TEXT[:9]), -1)), [], []
        for chunk in stream:
            ids += chunk.ids
            seen.append(serving.metrics().kv_bytes)
            if len(ids) > 200:  # it would never end
                stream.cancel()
        assert (len(ids), chunk.finish_reason) == (40, "length")
        assert max(seen) <= nbytes
        with pytest.raises(ValueError, match="50 prompt tokens and max_tokens 1 need"):
            serving.submit(Request(tuple(TEXT[:50]), -1))


@pytest.mark.parametrize("layers", [[(8.0, None)], [(8.0, None), (6.5, 30)]])
def test_positions_are_those_that_fit(layers):
    footprint = engine.Footprint(layers)
    for limit in (footprint.bytes(0), footprint.bytes(1) - 1, footprint.bytes(100), footprint.bytes(100) + 7):
        most = footprint.positions(limit)
        assert footprint.bytes(most) <= limit < footprint.bytes(most + 1)
    assert footprint.positions(footprint.bytes(0) - 1) == 0
    assert engine.Footprint([(6.5, 30)]).positions(10**6) > 10**12  # windows take no more from some point on


def test_a_process_that_served_ends_cleanly():
    """mlx aborts at exit if a thread left its streams behind."""
    script = ("from mlx_dspark import load; "
              "from mlx_dspark.serve import Engine, EngineOptions, Request\n"
              "with Engine(load(), EngineOptions(policy='fixed')) as engine:\n"
              "    print(sum(len(chunk.ids) for chunk in engine.submit(Request((5, 6, 7), 4))))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


def test_a_policy_reflects_while_the_device_works():
    calls = []

    class Told(BatchFixed):
        def before(self, lines):
            calls.append("before")
            return super().before(lines)

        def learn(self, landed):
            calls.append("learn")

        def reflect(self):
            calls.append(f"reflect on {len(shared._flying)}")

    shared = batch.Batch(golden_pair(), Told(2, "fixed"))
    batch.join_at_once(shared, 0, PROMPTS[0], 40)
    for _ in range(4):
        shared.step()
    assert calls[-6:] == ["learn", "before", "reflect on 1"] * 2, calls
