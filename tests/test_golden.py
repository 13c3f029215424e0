"""Parity with the reference implementation's fixtures (float32): numbers within tolerance, decisions exact.

Tolerances are those of the fixtures' README: features and logits 1e-4; block hidden states, K/V and
confidence logits 2e-5; probabilities 1e-5.
"""

import json
from functools import cache
from itertools import chain
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers import best, passed, weights_after
from mlx_lm.utils import load_model

from mlx_dspark.decode import DecodeOptions, decode
from mlx_dspark.kernels.accept import leading_run
from mlx_dspark.load import Pair, read_draft
from mlx_dspark.sampling import make_rule
from mlx_dspark.schedule import make_policy
from mlx_dspark.structs import KVOptions, Sampling
from mlx_dspark.target import Target

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = ["qwen3", "gemma4"]
BLOCKS = sorted(path.name for family in FAMILIES for path in GOLDEN.glob(f"{family}_d*"))
EAGLES = [f"{family}_eagle3" for family in FAMILIES]
DRAFTS = BLOCKS + EAGLES
LOGITS, HIDDEN, PROBABILITY = 1e-4, 2e-5, 1e-5
GREEDY = make_rule(Sampling())


@cache
def target(family):
    folder = GOLDEN / f"{family}_target"
    model, config = load_model(folder)
    return Target(model, config, str(folder))


@cache
def draft(name):
    return read_draft(GOLDEN / name)


def target_of(name):
    """The target that a draft folder belongs to."""
    return target(name.split("_")[0])


@cache
def pair(name):
    return Pair(target_of(name), None, draft(name))


@cache
def fixture(folder, file):
    path = GOLDEN / folder / file
    return mx.load(str(path)) if path.suffix == ".safetensors" else json.loads(path.read_text())


def recorded_rounds(name, temperature=0.0):
    """The rounds of prompt A's main decode, as decode.json has them."""
    for run in fixture(name, "decode.json")["decodes"]:
        if (run["prompt"], run["temperature"], run["confidence_threshold"]) == ("A", temperature, 0):
            return run
    raise AssertionError(f"{name} has no such run")


def is_sampled(name):
    return any(run["temperature"] > 0 for run in fixture(name, "decode.json")["decodes"])


def close(actual, expected, tolerance, what):
    difference = np.abs(np.array(actual) - np.array(expected))
    assert np.shape(actual) == np.shape(expected), what
    assert difference.max(initial=0) <= tolerance, f"{what}: off by {difference.max():.2g}"


# --- the target ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_target_logits_and_taps(family):
    golden = fixture(f"{family}_target", "golden.safetensors")
    model, taps = target(family), (-1, 0, 1, 2, 3, 4)
    verified = model.forward(golden["input_ids"][None], model.start(KVOptions()), taps)
    close(verified.logits[0], golden["logits"], LOGITS, "logits")
    for tap, hidden in zip(taps, mx.split(verified.taps[0], len(taps), axis=-1)):
        close(hidden, golden[f"hidden_states.{tap + 1}"], LOGITS, f"tap {tap}")


def test_last_hidden_state_is_normed():
    golden = fixture("qwen3_target", "golden.safetensors")
    hidden = target("qwen3").model.model(golden["input_ids"][None])[0]
    close(hidden, golden["hidden_states.6"], LOGITS, "final hidden state")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("step", [1, 4, 20, 2048])
def test_prefill_in_chunks_keeps_every_tap(family, step):
    golden, model = fixture(f"{family}_target", "golden.safetensors"), target(family)
    seen, taps = [], []
    last = model.prefill(
        golden["input_ids"].tolist(), model.start(KVOptions()), (1, 4), step,
        lambda tokens, taken: (seen.append(tokens[0]), taps.append(taken[0])),
    )
    assert mx.concatenate(seen).tolist() == golden["input_ids"].tolist()
    wanted = mx.concatenate([golden["hidden_states.2"], golden["hidden_states.5"]], axis=-1)
    close(mx.concatenate(taps), wanted, LOGITS, "taps")
    close(last.logits[0], golden["logits"][-1:], LOGITS, "logits of the last row")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", "ABCD")
def test_plain_greedy_continuation(family, prompt):
    golden = fixture(f"{family}_target", "golden.json")
    ids, wanted = golden["prompts"][prompt], golden["greedy"][prompt]["output_ids"]
    assert ids + generated(Pair(target(family), None, None), ids, "plain", 48)[0] == wanted


# --- three rounds of each draft, tensor by tensor -------------------------------------------------------------


@pytest.mark.parametrize("name", BLOCKS)
def test_block_tensors_of_three_rounds(name):
    model, golden, run = draft(name), fixture(name, "rounds.safetensors"), recorded_rounds(name)
    state, whole = model.start(), model.start()
    for index, recorded in enumerate(run["rounds"][:3]):
        expected = tensors_of(golden, index)
        features, anchor = expected["target_features"][None], mx.array(recorded["verify_input_ids"][:1])
        rows = mx.zeros(features.shape[:2], dtype=mx.int32)  # a block draft looks at the taps only
        model.observe(state, rows, features)
        model.observe(whole, rows, features)

        close(model.backbone.fuse(features)[0], expected["context_hidden"], LOGITS, f"round {index}: context")
        hidden = model.block_hidden([state], anchor)
        base = model.tables.logits(hidden)
        stepwise = model.walk(base, hidden, anchor, best)
        proposal = model.propose(whole, anchor, model.gamma, best)

        close(hidden[0], expected["block_hidden"], HIDDEN, f"round {index}: block hidden")
        close(base[0], expected["base_logits"], LOGITS, f"round {index}: base logits")
        for made in (stepwise, proposal):
            check_proposal(made, expected, f"round {index}")
    start = run["rounds"][2]["start"]
    for layer, context in enumerate(state.caches):
        keys, values = context.rows()
        assert context.length == start
        close(keys[0], golden[f"A.round2.cache_k.{layer}"], HIDDEN, f"layer {layer}: keys")
        close(values[0], golden[f"A.round2.cache_v.{layer}"], HIDDEN, f"layer {layer}: values")


def tensors_of(golden, index, run="A"):
    """The fixture's tensors of one round of prompt A, by their last names."""
    found = {key.split(".", 2)[2]: value for key, value in golden.items() if key.startswith(f"{run}.round{index}.")}
    return {"corrected_logits": found.get("step_logits"), **found}  # Eagle3 corrects nothing


@pytest.mark.parametrize("name", EAGLES)
def test_eagle3_tensors_of_three_rounds(name):
    """The fixtures hold no features for Eagle3: the target's own are fed, which other tests compare."""
    model, golden, run = draft(name), fixture(name, "rounds.safetensors"), recorded_rounds(name)
    state, whole, cache = model.start(), model.start(), target_of(name).start(KVOptions())
    features, rows = prefill_taps(name, cache, model.taps), mx.array([fixture(name, "decode.json")["prompts"]["A"]])
    for index, recorded in enumerate(run["rounds"][:3]):
        expected, where = tensors_of(golden, index), f"round {index}"
        inputs, keep = mx.array([recorded["verify_input_ids"]]), recorded["accepted_draft_tokens"] + 1
        for each in (state, whole):
            model.observe(each, rows, features[None])
        hidden = steps_of(model, state, inputs[:, 0], expected["sampled_tokens"])
        proposal = model.propose(whole, inputs[:, 0], model.gamma, best)

        close(hidden[0], expected["step_hidden"], LOGITS, f"{where}: hidden states before the final norm")
        close(model.tables.logits(model.norm(hidden))[0], expected["step_logits"], LOGITS, f"{where}: logits")
        check_proposal(proposal, expected, where)
        assert state.cache.length == whole.cache.length == recorded["start"], where
        rows, features = inputs[:, :keep], target_of(name).forward(inputs, cache, model.taps).taps[0, :keep]
        cache.advance(inputs.shape[1], keep)
    written = state.cache.length + model.gamma - 1  # the reference also runs its last proposal, for nothing
    for each in (state, whole):
        keys, values = each.cache.arrays
        close(keys[0, :, :written], golden["A.round2.cache_k.0"][:, :written], HIDDEN, "keys after proposing")
        close(values[0, :, :written], golden["A.round2.cache_v.0"][:, :written], HIDDEN, "values after proposing")


def steps_of(model, state, anchor, tokens):
    """The state whose logits are taken at each step, when `tokens` are chosen [1, gamma, D]."""
    hidden = [model.take_context(state, anchor)]
    for behind, token in enumerate(tokens.tolist()[:-1]):
        rows = model.pair(hidden[-1], mx.array([[token]]))
        hidden.append(model.run(state, rows, hidden[-1], keep=0, behind=behind))
    return mx.concatenate(hidden, axis=1)


def check_proposal(proposal, expected, where):
    assert proposal.tokens[0].tolist() == expected["sampled_tokens"].tolist(), where
    close(proposal.logits[0], expected["corrected_logits"], LOGITS, f"{where}: corrected logits")
    assert (proposal.confidence_logits is None) == ("confidence_logits" not in expected)
    if proposal.confidence_logits is not None:
        close(proposal.confidence_logits[0], expected["confidence_logits"], HIDDEN, f"{where}: confidence logits")


@pytest.mark.parametrize("name", DRAFTS)
def test_target_features_and_verification_logits_of_three_rounds(name):
    golden, run = fixture(name, "rounds.safetensors"), recorded_rounds(name)
    model, taps, cache = target_of(name), draft(name).taps, target_of(name).start(KVOptions())
    features = prefill_taps(name, cache, taps)
    for index, recorded in enumerate(run["rounds"][:3]):
        if name in BLOCKS:
            close(features, golden[f"A.round{index}.target_features"], LOGITS, f"round {index}: features")
        inputs = mx.array([recorded["verify_input_ids"]])
        verified = model.forward(inputs, cache, taps)
        close(verified.logits[0], golden[f"A.round{index}.target_logits"], LOGITS, f"round {index}: logits")
        keep = recorded["accepted_draft_tokens"] + 1
        cache.advance(inputs.shape[1], keep)
        features = verified.taps[0, :keep]


def prefill_taps(name, cache, taps):
    """Run prompt A; the taps of all its rows."""
    parts = []
    prompt = fixture(name, "decode.json")["prompts"]["A"]
    target_of(name).prefill(prompt, cache, taps, 2048, lambda tokens, taken: parts.append(taken[0]))
    return mx.concatenate(parts)


# --- greedy decodes -----------------------------------------------------------------------------------------------


def greedy_runs():
    """All recorded ones; under threshold 0.8, whose many narrow rounds are nearly half of all, two prompts a draft."""
    for turn, name in enumerate(DRAFTS):
        narrow = "AC" if turn % 2 else "BD"
        for run in fixture(name, "decode.json")["decodes"]:
            if run["temperature"] == 0 and (run["confidence_threshold"] < 0.8 or run["prompt"] in narrow):
                parts = [name, run["prompt"], run["confidence_threshold"], run["max_new_tokens"], run.get("stop_kind")]
                yield pytest.param(name, run, id="-".join(str(part) for part in parts if part is not None))


def policy_of(name, run):
    return f"threshold:{run['confidence_threshold']}" if draft(name).has_confidence else "fixed"


def rounds_of(a_pair, prompt, policy, max_tokens, stop_ids=(), confidences=False):
    model = a_pair.draft
    chosen = make_policy(policy, model.gamma if model else 0, bool(model and model.has_confidence))
    options = DecodeOptions(GREEDY, chosen, max_tokens, frozenset(stop_ids), confidences=confidences)
    return decode(a_pair, prompt, options)


def generated(*arguments):
    """(ids, finish reason, rounds) of a whole run."""
    rounds = list(rounds_of(*arguments))
    return [token for landed in rounds for token in landed.tokens], rounds[-1].finish, rounds


def reference_rounds(rounds, max_new_tokens):
    """The verify rounds that the reference's loop would run: it goes on while the anchor is inside the limit."""
    committed = 0
    for landed in rounds:
        committed += len(landed.tokens)
        if landed.rows:
            yield landed
        if committed > max_new_tokens or landed.finish:
            return


def proposal_length(landed, drafts):
    """The reference cuts the proposal at an accepted stop token."""
    cut = landed.finish == "stop" and len(landed.tokens) == landed.accepted
    return landed.accepted if cut else len(drafts)


def reference_drafts(name, drafts, stop_ids):
    """What the reference had drafted: an Eagle3 draft of its own stops at a stop token, ours does not know any."""
    if name in EAGLES:
        for i, token in enumerate(drafts):
            if token in stop_ids:
                return list(drafts[: i + 1])
    return list(drafts)


@pytest.mark.parametrize("name, run", list(greedy_runs()))
def test_greedy_rounds(name, run):
    prompt, result = fixture(name, "decode.json")["prompts"][run["prompt"]], run["result"]
    # Without a limit of our own, so that the last round is as wide as the reference's.
    stop_ids = run["stop_token_ids"] or ()
    ours = rounds_of(pair(name), prompt, policy_of(name, run), None, stop_ids, True)
    first = next(ours)  # of the prefill
    rounds = list(reference_rounds(chain([first], ours), run["max_new_tokens"]))

    assert [len(landed.tokens) for landed in rounds] == result["acceptance_lengths"]
    assert [landed.accepted for landed in rounds] == result["accepted_draft_lengths"]
    tokens = [token for landed in [first, *rounds] for token in landed.tokens]  # the last round may pass the limit
    assert result["output_ids"] == prompt + tokens[: run["max_new_tokens"]]
    drafts = [reference_drafts(name, landed.drafts, stop_ids) for landed in rounds]
    assert [proposal_length(*each) for each in zip(rounds, drafts)] == result["proposal_lengths"]
    for landed, drafted, recorded in zip(rounds, drafts, run["rounds"], strict=True):
        assert landed.start == recorded["start"]
        assert landed.proposed == draft(name).gamma
        assert drafted == recorded["sampled_tokens"][: recorded["draft_token_count"]]
        check_confidences(landed, recorded.get("confidence_logits"))


def check_confidences(landed, logits):
    if logits is None:
        assert landed.confidences is None
    else:
        close(landed.confidences, 1 / (1 + np.exp(-np.array(logits))), HIDDEN, f"round {landed.index}: confidences")


def limited_runs():
    """Prompt A's runs: all limits and stop kinds, and one threshold."""
    return [case for case in greedy_runs()
            if case.values[1]["prompt"] == "A" and case.values[1]["confidence_threshold"] < 0.8]


@pytest.mark.parametrize("name, run", limited_runs())
def test_greedy_ids_within_a_limit(name, run):
    prompt, limit = fixture(name, "decode.json")["prompts"][run["prompt"]], run["max_new_tokens"]
    stop_ids = run["stop_token_ids"] or ()
    ids, finish, rounds = generated(pair(name), prompt, policy_of(name, run), limit, stop_ids)
    assert prompt + ids == run["result"]["output_ids"]
    assert finish == ("stop" if ids[-1] in stop_ids else "length")
    # Not one row beyond the limit: the last row's own token is the last one wanted.
    assert all(landed.start + landed.rows < len(prompt) + limit for landed in rounds if landed.rows)


# --- sampled runs at temperature 1, replayed ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in DRAFTS if is_sampled(name)])
def test_sampled_run_replayed(name):
    """Recorded draft tokens, uniforms and next tokens are forced; every accept decision must follow."""
    model, golden, run = draft(name), fixture(name, "rounds.safetensors"), recorded_rounds(name, temperature=1.0)
    rule = make_rule(Sampling(temperature=1.0, seed=0))
    state, cache = model.start(), target_of(name).start(KVOptions())
    features = prefill_taps(name, cache, model.taps)
    rows, key = mx.array([fixture(name, "decode.json")["prompts"]["A"]]), rule.start()
    for index, recorded in enumerate(run["rounds"]):
        where = f"round {index}"
        model.observe(state, rows, features[None])
        forced = mx.array(recorded["sampled_tokens"])
        proposal = model.propose(state, mx.array(recorded["verify_input_ids"][:1]), model.gamma, forcing(forced, rule))
        if model.has_confidence:
            close(proposal.confidence_logits[0], recorded["confidence_logits"], HIDDEN, f"{where}: confidence logits")
        inputs = mx.array([recorded["verify_input_ids"]])
        verified = target_of(name).forward(inputs, cache, model.taps)
        if index < 3:
            expected = tensors_of(golden, index, "A_T1")
            check_proposal(proposal, expected, where)
            close(verified.logits[0], expected["target_logits"], LOGITS, f"{where}: target logits")

        uniforms = mx.array([recorded["uniforms"]])
        verdict = rule.judge_with(forced[None], proposal.log_q, verified.logits, None, uniforms, key)
        accepted = recorded["accepted_draft_tokens"]
        assert verdict.accepted.item() == accepted, where
        assert verdict.tokens[0, :accepted].tolist() == recorded["sampled_tokens"][:accepted], where
        check_accept_tests(rule, proposal, verified, forced, uniforms, recorded, where)

        cache.advance(inputs.shape[1], accepted + 1)
        rows, features = inputs[:, : accepted + 1], verified.taps[0, : accepted + 1]


def forcing(tokens, rule):
    """A pick that takes `tokens` in order, with the log q that the rule would have drawn from."""
    real = rule.picker(None, rule.start(), len(tokens))
    return lambda logits, drafts: (tokens[len(drafts)][None], real(logits, drafts)[1])


def check_accept_tests(rule, proposal, verified, tokens, uniforms, recorded, where):
    p = mx.softmax(verified.logits, axis=-1)
    q = mx.exp(proposal.log_q)
    at = (np.arange(len(recorded["sampled_tokens"])), np.array(recorded["sampled_tokens"]))
    close(np.array(q[0])[at], recorded["draft_prob_of_token"], PROBABILITY, f"{where}: q of the drafts")
    close(np.array(p[0])[at], recorded["target_prob_of_token"], PROBABILITY, f"{where}: p of the drafts")
    ratio = np.array(recorded["target_prob_of_token"]) / np.array(recorded["draft_prob_of_token"])
    mask = passed(p, q, tokens[None], uniforms)
    assert mask[0].tolist() == (np.array(recorded["uniforms"]) < ratio).tolist(), where
    accepted = recorded["accepted_draft_tokens"]
    assert leading_run(mask).item() == accepted, where
    weights = weights_after(p, q, mx.array([accepted]))
    assert weights[0, recorded["next_token"]].item() > 0, f"{where}: the recorded next token cannot be drawn"
