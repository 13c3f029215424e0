"""Training, held to DeepSeek's code on its tiny models: loss terms, gradients, optimiser traces, schedule, Eagle3.

Tolerances are those of the fixtures' README: hidden states 2e-5, logits 1e-4, losses relative 1e-5, gradients
1e-5 + relative 1e-3, traces relative 1e-4 and parameters 1e-5.
"""

import json
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_dspark.load import read_draft
from mlx_dspark.train.anchors import Anchors, make_blocks, slot_weights
from mlx_dspark.train.eagle3 import Eagle3Batch, _step_loss, eagle3_loss, step_hidden, step_masks
from mlx_dspark.train.forward import block_hidden
from mlx_dspark.train.losses import Batch, LossWeights, Sums, block_loss, head_of
from mlx_dspark.train.model import file_name, freeze
from mlx_dspark.train.optimise import Optimiser, Schedule

GOLDEN = Path(__file__).parent / "golden"
TRAINING = GOLDEN / "training"
BLOCKS = sorted(path.stem for path in TRAINING.glob("*_d*.json"))
EAGLES = sorted(path.stem for path in TRAINING.glob("*_eagle3.json"))


@cache
def fixture(name):
    path = TRAINING / name
    return mx.load(str(path)) if path.suffix == ".safetensors" else json.loads(path.read_text())


def trainable(name):
    return freeze(read_draft(GOLDEN / name))


def batch_of(name, draft, anchors, weights, decay=4.0):
    """The recorded sequences with recorded anchors."""
    data = fixture(f"batch_{name.split('_')[0]}.safetensors")
    ids, mask = np.array(data["input_ids"]), np.array(data["loss_mask"])
    blocks = make_blocks(ids, mask, anchors, draft.gamma, draft.spec.mask_token_id)
    taps = mx.concatenate([data["hidden_states"][:, :, tap + 1] for tap in draft.taps], axis=-1)
    w = slot_weights(blocks.counted, decay)
    return Batch(taps, data["hidden_states"][:, :, 6], blocks, w, float(w.sum()))


def recorded(name, draft, weights=None, decay=4.0):
    golden = fixture(f"{name}.safetensors")
    anchors = Anchors(np.array(golden["anchor_positions"]), np.array(golden["block_keep_mask"]).astype(bool))
    return batch_of(name, draft, anchors, weights, decay)


def weights_of(config):
    return LossWeights(config["ce_loss_alpha"], config["l1_loss_alpha"], config["confidence_head_alpha"],
                       config["loss_decay_gamma"])


def close(actual, expected, what, absolute=0.0, relative=0.0):
    actual, expected = np.array(actual, dtype=np.float64), np.array(expected, dtype=np.float64)
    assert actual.shape == expected.shape, what
    wrong = np.abs(actual - expected) - absolute - relative * np.abs(expected)
    assert wrong.max(initial=-1) <= 0, f"{what}: off by {np.abs(actual - expected).max():.3g}"


def visible(anchors, length, slots):
    """Which keys each block row sees [B, A * T, S + A * T], as the dense mask that the forward never makes."""
    count = anchors.positions.shape[1]
    context = np.arange(length) < anchors.positions[..., None]  # strictly: the anchor has no features yet
    block = np.eye(count, dtype=bool)[None].repeat(len(anchors.positions), 0)
    keys = np.concatenate([context, block.repeat(slots, axis=2)], axis=2) & anchors.keep[..., None]
    return keys.repeat(slots, axis=1)


def gradients(draft, loss):
    """Gradients of the trained parameters by the names of the reference."""
    _, grads = nn.value_and_grad(draft, loss)(draft)
    return {file_name(draft.spec, name): grad for name, grad in tree_flatten(grads)}


def close_gradients(found, known, golden):
    """The norm of every gradient, and those that the fixtures hold in full."""
    assert found.keys() == known["grad_norm_per_parameter"].keys()
    for parameter, norm in known["grad_norm_per_parameter"].items():
        close(mx.linalg.norm(found[parameter].flatten()), norm, parameter, 1e-5, 1e-3)
    for tensor in golden:
        if tensor.startswith("grad."):
            close(found[tensor[5:]], golden[tensor], tensor, 1e-5, 1e-3)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_a_batch(name):
    draft, golden = trainable(name), fixture(f"{name}.safetensors")
    blocks = recorded(name, draft).blocks
    length = fixture(f"batch_{name.split('_')[0]}.safetensors")["input_ids"].shape[1]
    assert blocks.block_ids.reshape(2, -1).tolist() == golden["block_input_ids"].tolist()
    assert blocks.labels.tolist() == golden["target_ids"].tolist()
    assert blocks.counted.tolist() == golden["eval_mask"].astype(mx.bool_).tolist()
    assert visible(blocks.anchors, length, draft.gamma).tolist() == golden["attention_mask"].astype(mx.bool_).tolist()


@pytest.mark.parametrize("name", BLOCKS)
def test_forward_of_all_blocks(name):
    draft, golden = trainable(name), fixture(f"{name}.safetensors")
    batch = recorded(name, draft)
    hidden = block_hidden(draft, batch.taps, batch.blocks)
    close(hidden.reshape(2, 42, -1), golden["output_hidden"], "hidden states", 2e-5)
    latent = draft.markov_head.latents(mx.array(batch.blocks.previous).flatten(0, 1), hidden.flatten(0, 1))
    head, latent = head_of(draft), None if latent is None else latent.reshape(*hidden.shape[:3], -1)
    close(head.corrected(head.base(hidden), latent), golden["draft_logits"], "logits", 1e-4)
    if "confidence_pred" in golden:
        logits = draft.confidence_head(hidden, mx.array(batch.blocks.previous), draft.markov_head)
        close(logits, golden["confidence_pred"], "confidence logits", 2e-5)
    if "base_logits" in golden:
        close(head.base(hidden), golden["base_logits"], "base logits", 1e-4)
        sources = mx.array(batch.blocks.sources)[..., None].reshape(2, -1, 1)
        last = mx.take_along_axis(batch.last, sources, axis=1).reshape(hidden.shape)
        close(head.base(last), golden["aligned_target_logits"], "target logits", 1e-4)


@pytest.mark.parametrize(("name", "config"), [(n, c) for n in BLOCKS for c in fixture(f"{n}.json")["loss_configs"]])
def test_loss_terms(name, config):
    draft, known = trainable(name), fixture(f"{name}.json")["loss_configs"][config]
    weights = weights_of(known["config"])
    loss, values = block_loss(draft, recorded(name, draft, decay=weights.decay), weights)
    close(loss, known["total_loss"], "total", relative=1e-5)
    sums, metrics = Sums(np.array(values)), known["metrics"]
    close(sums.loss(weights), known["total_loss"], "total of the sums", relative=1e-5)
    close(sums.ce, metrics["train/ce_loss"], "cross entropy", relative=1e-5)
    close(sums.tau, metrics["train/tau_probabilistic"], "tau", 1e-6)
    close(sums.acceptance, [metrics[f"train/accept_rate@{k}"] for k in range(7)], "acceptance", 2e-6)
    for term, value in (("l1_loss", sums.tv), ("confidence_loss", sums.bce)):
        if term in known["metrics"]:
            close(value, metrics[f"train/{term}"], term, relative=1e-5)
    if draft.has_confidence:
        close(sums.confidence_error, metrics["train/confidence_abs_error"], "confidence error", 1e-6)
        close(sums.confidence_bias, metrics["train/confidence_bias"], "confidence bias", 1e-6)
        close(sums.survival_bias, metrics["train/confidence_cumprod_bias"], "survival bias", 1e-6)


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients(name, chunk):
    draft, known, golden = trainable(name), fixture(f"{name}.json"), fixture(f"{name}.safetensors")
    weights = weights_of(known["loss_configs"][known["gradient_loss_config"]]["config"])
    batch = recorded(name, draft)
    found = gradients(draft, lambda model: block_loss(model, batch, weights, chunk)[0])
    close_gradients(found, known, golden)
    total = np.sqrt(sum(float((grad * grad).sum()) for grad in found.values()))
    close(total, known["grad_norm_total"], "total norm", relative=1e-4)


@pytest.mark.parametrize("name", BLOCKS)
def test_eight_steps_of_the_optimiser(name):
    draft, trace = trainable(name), fixture(f"{name}.json")["optimizer_trace"]
    weights = weights_of(fixture(f"{name}.json")["loss_configs"][trace["loss_config"]]["config"])
    optimiser = Optimiser(Schedule(trace["lr"], trace["total_steps"], trace["warmup_ratio"]), trace["max_grad_norm"],
                          trace["weight_decay"])
    moments = optimiser.start(draft.trainable_parameters())
    for step in trace["steps"]:
        anchors = Anchors(np.array(step["anchor_positions"]), np.array(step["block_keep_mask"]))
        batch = batch_of(name, draft, anchors, weights, weights.decay)
        loss, grads = nn.value_and_grad(draft, lambda model, b=batch: block_loss(model, b, weights)[0])(draft)
        updated, moments, norm = optimiser.update(step["step"], draft.trainable_parameters(), moments, grads)
        draft.update(updated)
        close(loss, step["loss"], f"loss of step {step['step']}", relative=1e-4)
        close(norm, step["grad_norm_before_clip"], f"norm of step {step['step']}", relative=1e-4)
        close(optimiser.schedule.at(step["step"]), step["lr_used"], "learning rate", relative=1e-6)
    final = {file_name(draft.spec, parameter): array for parameter, array in tree_flatten(draft.trainable_parameters())}
    for parameter, norm in trace["final_param_norms"].items():
        close(mx.linalg.norm(final[parameter].flatten()), norm, parameter, relative=1e-5)
    for tensor, array in fixture(f"{name}.after8.safetensors").items():
        close(final[tensor.removeprefix("after8.")], array, tensor, 1e-5)


@pytest.mark.parametrize("setting", fixture("lr_schedule.json").values(), ids=fixture("lr_schedule.json").keys())
def test_learning_rates(setting):
    schedule = Schedule(setting["base_lr"], setting["total_steps"], setting["warmup_ratio"])
    rates = [schedule.at(step) for step in range(setting["total_steps"])]
    close(rates, setting["lr_used_at_step"][: setting["total_steps"]], "learning rates", 1e-12, 1e-6)


def eagle_batch(name, draft):
    data = fixture(f"{name}.safetensors")
    taps = mx.concatenate([data["hidden_states"][:, :, tap + 1] for tap in draft.taps], axis=-1)
    return Eagle3Batch(np.array(data["input_ids"]), np.array(data["loss_mask"]),
                       np.array(data["attention_mask"]).sum(axis=1), taps, data["hidden_states"][:, :, 6])


@pytest.mark.parametrize("name", EAGLES)
def test_eagle3_steps(name):
    draft, golden, known = trainable(name), fixture(f"{name}.safetensors"), fixture(f"{name}.json")
    batch = eagle_batch(name, draft)
    assert step_masks(batch, 7).tolist() == golden["position_masks"].astype(mx.bool_).tolist()
    hidden, head = step_hidden(draft, batch, 7), head_of(draft)
    valid = np.array(golden["attention_mask"])
    for step in (0, 1, 2, 6):
        seen = valid[:, : valid.shape[1] - step] * valid[:, step:] > 0  # other rows are used by nothing
        seen = np.pad(seen, [(0, 0), (0, step)])
        logits = np.array(head.base(draft.norm(hidden[step])))
        close(logits[seen], np.array(golden[f"step{step}.draft_logits"])[seen], f"logits of step {step}", 1e-4)
    total, values = eagle3_loss(draft, batch, known["step_loss_decay"])
    close(total, known["total_loss"], "total", relative=1e-5)
    sums, metrics = Sums(np.array(values)), known["metrics"]
    close(sums.loss(LossWeights(1, 0, 0)), known["total_loss"], "total of the sums", relative=1e-5)
    close(sums.acceptance, [metrics[f"train/accept_rate@{step}"] for step in range(7)], "acceptance", 2e-6)
    close(sums.tau, metrics["train/tau_probabilistic"], "tau", 1e-5)
    rows = [np.flatnonzero(mask) for mask in step_masks(batch, 7)]
    steps = [_step_loss(draft, batch, rows[s], s, hidden[s], batch.ids.size, None)[0] for s in range(7)]
    close(steps, known["step_losses"], "step losses", relative=1e-5)


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("name", EAGLES)
def test_eagle3_gradients(name, chunk):
    draft, golden, known = trainable(name), fixture(f"{name}.safetensors"), fixture(f"{name}.json")
    batch = eagle_batch(name, draft)
    found = gradients(draft, lambda model: eagle3_loss(model, batch, chunk=chunk)[0])
    close_gradients(found, known, golden)
