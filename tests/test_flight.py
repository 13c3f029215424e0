"""What a round packs on the device comes back on the host, whatever of it was asked for."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_dspark.flight import Flight, pack, unpack
from mlx_dspark.kernels.softmax import log_softmax
from mlx_dspark.structs import Proposal, Schedule, Verdict

V, PROPOSED = 50, 4


def judged(drafted, limit):
    """A judged round with made-up numbers; one that was cut on the device has rows of NaN behind its limit."""
    keys = mx.random.split(mx.random.key(drafted), 4)
    drafts = mx.random.randint(0, V, (1, PROPOSED), key=keys[0])
    logits = 3 * mx.random.normal((1, drafted + 1, V), key=keys[1])
    tokens = mx.random.randint(0, V, (1, drafted + 1), key=keys[2])
    if limit is not None:
        logits = mx.where(mx.arange(drafted + 1)[:, None] > limit, mx.nan, logits)
    proposal = Proposal(drafts, confidence_logits=mx.random.normal((1, PROPOSED), key=keys[3]))
    flight = Flight(1, 5, proposal, None, PROPOSED, schedule=Schedule(drafted, "fixed", "said"),
                    limit=None if limit is None else mx.array([limit]))
    flight.verdict = Verdict(mx.array([min(1, drafted)]), tokens, logits)
    return flight


@pytest.mark.parametrize("confidences", [False, True], ids=["", "confidences"])
@pytest.mark.parametrize(("logprobs", "top"), [(False, 0), (True, 0), (True, 1), (True, 7), (True, V)])
@pytest.mark.parametrize(("drafted", "limit"), [(0, None), (1, None), (4, None), (4, 2), (4, 0)])
def test_what_is_packed_is_unpacked(drafted, limit, logprobs, top, confidences):
    flight = judged(drafted, limit)
    packed = pack(flight, logprobs, top, confidences)
    assert packed.dtype == mx.int32 and packed.ndim == 1
    found = unpack(flight, packed.tolist(), logprobs, top)
    verified = drafted if limit is None else limit
    assert found.tokens == flight.verdict.tokens[0].tolist()
    assert found.accepted == min(1, drafted)
    assert found.drafts == flight.proposal.tokens[0, :verified].tolist()
    assert (found.logprobs is None, found.top_logprobs is None) == (not logprobs, not top)
    assert (found.confidences is None) == (not confidences)
    if confidences:
        np.testing.assert_allclose(found.confidences, mx.sigmoid(flight.proposal.confidence_logits[0]), atol=1e-6)
    wanted = np.array(log_softmax(flight.verdict.logits[0]))[: verified + 1]
    if logprobs:
        assert len(found.logprobs) == drafted + 1
        chosen = wanted[np.arange(verified + 1), found.tokens[: verified + 1]]
        np.testing.assert_allclose(found.logprobs[: verified + 1], chosen, atol=1e-5)
    if top:
        assert all(len({token for token, _ in best}) == top for best in found.top_logprobs)
        for row, best in zip(wanted, found.top_logprobs[: verified + 1], strict=True):
            tokens, values = zip(*best, strict=True)
            assert list(tokens) == np.argsort(-row)[:top].tolist()
            np.testing.assert_allclose(values, row[list(tokens)], atol=1e-5)


def test_nothing_is_packed_that_was_not_asked_for():
    flight = judged(4, None)
    assert pack(flight, False, 0, False).size == 5 + 1 + 4
    assert pack(flight, True, 0, False).size == 5 + 1 + 4 + 5
    assert pack(flight, True, 3, True).size == 5 + 1 + 4 + 5 * (1 + 2 * 3) + PROPOSED
