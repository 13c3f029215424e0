"""Parts of training against plain twins: chunked projection, grouped attention, teacher-forced heads, softmax."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import golden_draft, random_tokens

from mlx_dspark.train import forward
from mlx_dspark.train.anchors import Anchors, candidates, choose_anchors, make_blocks, slot_weights
from mlx_dspark.train.columns import choose_columns
from mlx_dspark.train.forward import block_hidden
from mlx_dspark.train.projection import Goal, Head, project
from mlx_dspark.train.softmax import fast_softmax

ROWS, VOCABULARY, WIDTH, RANK = 23, 50, 8, 3


def normal(*shape, seed=0):
    return mx.random.normal(shape, key=mx.random.key(seed))


def whole_loss(hidden, latent, w2, head, goal):
    """The same terms by automatic differentiation, all logits at once."""
    base = hidden @ head.table.T
    base = base if head.cap is None else mx.tanh(base / head.cap) * head.cap
    logits = base if w2 is None else base + latent @ w2.T
    q = mx.softmax(logits, axis=-1)
    p = mx.stop_gradient(mx.softmax(head.base(goal.target), axis=-1))
    ce = nn.losses.cross_entropy(logits, goal.labels) if goal.labels is not None \
        else -(p * nn.log_softmax(logits, axis=-1)).sum(-1)
    variation = mx.abs(q - p).sum(-1)
    total = (goal.ce_weights * ce).sum()
    return (total if goal.tv_weights is None else total + (goal.tv_weights * variation).sum()), ce, variation


@pytest.mark.parametrize("chunk", [1, 7, 23, 100, None])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("kind", ["labels", "labels-only-ce", "soft", "capped"])
def test_chunked_projection_equals_the_whole(kind, bias, chunk):
    hidden, latent, w2 = normal(ROWS, WIDTH), normal(ROWS, RANK, seed=1), normal(VOCABULARY, RANK, seed=2)
    latent, w2 = (latent, w2) if bias else (None, None)
    head = Head(normal(VOCABULARY, WIDTH, seed=3), w2, 2.0 if kind == "capped" else None)
    labels = None if kind == "soft" else mx.array(random_tokens(ROWS, vocab=VOCABULARY))
    weights = mx.random.uniform(shape=(2, ROWS), key=mx.random.key(4))
    goal = Goal(normal(ROWS, WIDTH, seed=5), labels, weights[0], weights[1] if kind in ("labels", "capped") else None)
    inputs = {"hidden": hidden} | ({"latent": latent, "w2": w2} if bias else {})

    def chunked(inputs):
        made = Head(head.table, inputs.get("w2"), head.cap)
        return project(inputs["hidden"], inputs.get("latent"), made, goal, chunk)

    def whole(inputs):
        return whole_loss(inputs["hidden"], inputs.get("latent"), inputs.get("w2"), head, goal)

    ours, ours_grad = mx.value_and_grad(chunked)(inputs)
    theirs, theirs_grad = mx.value_and_grad(whole)(inputs)
    for name, a, b in zip(("total", "ce", "variation"), ours, theirs):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=name)
    for name in inputs:
        np.testing.assert_allclose(ours_grad[name], theirs_grad[name], 1e-4, 1e-6, err_msg=name)


def test_the_gradient_scales_with_what_follows():
    hidden, head = normal(ROWS, WIDTH), Head(normal(VOCABULARY, WIDTH, seed=3))
    goal = Goal(None, mx.zeros((ROWS,), mx.int32), mx.ones((ROWS,)), None)
    once = mx.grad(lambda h: project(h, None, head, goal)[0])(hidden)
    thrice = mx.grad(lambda h: 3 * project(h, None, head, goal)[0])(hidden)
    np.testing.assert_allclose(thrice, 3 * once, 1e-6)


def test_logits_of_all_rows_never_exist_at_once():
    rows, vocabulary = 512, 20_000
    hidden, table, last = normal(rows, WIDTH), normal(vocabulary, WIDTH, seed=1), normal(rows, WIDTH, seed=2)
    goal = Goal(last, mx.zeros((rows,), mx.int32), mx.ones((rows,)), mx.ones((rows,)))
    mx.eval(hidden, table, last)

    def peak(chunk):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(mx.value_and_grad(lambda h: project(h, None, Head(table), goal, chunk)[0])(hidden))
        return mx.get_peak_memory() - before

    everything = 4 * rows * vocabulary  # bytes of the logits of all rows
    assert peak(rows) > 2 * everything
    assert peak(16) < everything


def test_fast_softmax():
    logits = normal(5, 1000) * mx.array([0.1, 1, 10, 30, 300])[:, None]
    np.testing.assert_allclose(fast_softmax(logits), mx.softmax(logits, axis=-1), 2e-6, 1e-30)
    assert mx.isnan(fast_softmax(mx.array([[0.0, float("nan")]]))).all()


@pytest.mark.parametrize("name", ["qwen3_dspark_vanilla", "qwen3_dspark_gated", "qwen3_dspark_rnn", "qwen3_dflash"])
def test_latents_are_the_walk_with_given_tokens(name):
    draft = golden_draft(name)
    head, base, hidden = draft.markov_head, normal(2, 7, 320), normal(2, 7, 64, seed=1)
    previous = mx.array(random_tokens(14)).reshape(2, 7)
    latent, projected, state, steps = head.latents(previous, hidden), head.project(hidden), head.start(2), []
    for slot in range(7):
        here = None if projected is None else projected[:, slot]
        corrected, state = head.step(previous[:, slot], here, base[:, slot], state)
        steps.append(corrected)
    ours = base if latent is None else base + head.markov_w2(latent)
    np.testing.assert_allclose(ours, mx.stack(steps, axis=1), 1e-5, 1e-5)


def test_attention_in_groups_equals_attention_at_once(monkeypatch):
    """With little memory the anchors go in groups, each computed again backwards."""
    draft, ids = golden_draft(), np.array([random_tokens(40)])
    blocks = make_blocks(ids, np.ones_like(ids), Anchors(np.array([[0, 3, 9, 20, 33]]), np.ones((1, 5), bool)), 7, 319)
    taps = normal(1, 40, 192)
    outcome = []
    for groups, most in ((1, 2**28), (4, 2**28), (4, 1)):
        monkeypatch.setattr(forward, "MOST_GROUPS", groups)
        monkeypatch.setattr(forward, "SCORE_BYTES", most)
        outcome.append(mx.value_and_grad(lambda t: mx.square(block_hidden(draft, t, blocks)).mean())(taps))
    for value, grad in outcome[1:]:
        np.testing.assert_allclose(value, outcome[0][0], 1e-6)
        np.testing.assert_allclose(grad, outcome[0][1], 1e-4, 1e-7)


def test_anchors_are_candidates_drawn_without_replacement():
    mask = np.array([[1, 1, 1, 0, 1, 1, 0, 1], [0, 0, 1, 1, 0, 0, 0, 0]])
    assert [np.flatnonzero(row).tolist() for row in candidates(mask)] == [[0, 1, 4], [2]]
    drawn = [choose_anchors(mask, 2, np.random.default_rng(seed)) for seed in range(200)]
    for anchors in drawn:
        assert anchors.keep.tolist() == [[True, True], [True, False]] and anchors.positions[1].tolist() == [2, 0]
    seen = {tuple(anchors.positions[0]) for anchors in drawn}
    assert seen == {(0, 1), (0, 4), (1, 4)}
    counts = [sum(tuple(a.positions[0]) == pair for a in drawn) for pair in seen]
    assert min(counts) > 40


def test_a_batch_without_candidates_counts_nothing():
    mask = np.array([[1, 0, 1, 0]])
    anchors = choose_anchors(mask, 4, np.random.default_rng(0))
    blocks = make_blocks(np.arange(4)[None], mask, anchors, 3, 9)
    assert anchors.keep.tolist() == [[False]] and not blocks.counted.any()
    assert blocks.block_ids.tolist() == [[[9, 9, 9]]]


def test_slots_fade():
    counted = np.array([[[True, True, False]]])
    np.testing.assert_allclose(slot_weights(counted, 4.0), [[[1, np.exp(-0.25), 0]]], 1e-6)
    assert slot_weights(counted, None).tolist() == [[[1, 1, 0]]]


def test_all_columns_are_the_whole_vocabulary():
    head, last = Head(normal(VOCABULARY, WIDTH)), normal(ROWS, WIDTH, seed=1)
    columns = choose_columns(head, last, np.array([3, 3, 8]), VOCABULARY, np.random.default_rng(0))
    assert columns.ids.tolist() == list(range(VOCABULARY)) and not columns.shift.any()


def test_drawn_columns_stand_for_the_others():
    """The normaliser over few columns is right on average, and what must be in is in, unshifted."""
    head, last = Head(normal(VOCABULARY, WIDTH)), normal(3, WIDTH, seed=1) / 4
    labels = np.array([7, 9])
    needed = {7, 9, *mx.argmax(head.base(last), axis=-1).tolist()}
    whole, drawn = mx.exp(head.base(last)).sum(axis=-1), []
    for seed in range(300):
        columns = choose_columns(head, last, labels, 10, np.random.default_rng(seed))
        assert len(columns.ids) == len(needed) + 10
        assert {i for i, shift in zip(columns.ids.tolist(), columns.shift) if shift == 0} == needed
        assert columns.ids[columns.labels(labels)].tolist() == [7, 9]
        drawn.append(mx.exp(columns.head(head).target(last)).sum(axis=-1))
    np.testing.assert_allclose(mx.stack(drawn).mean(axis=0), whole, 0.05)
