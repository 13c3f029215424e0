"""Acceptance figures by hand, and what cutting recorded rounds at a threshold may say."""

import pytest

from mlx_dspark.acceptance import acceptance, cut_at
from mlx_dspark.structs import Round, Schedule

GAMMA = 3


def landed(accepted, drafts=GAMMA, tokens=None, confidences=None, rows=None):
    """A round; tokens: fewer than accepted + 1 when a stop token was an accepted draft."""
    return Round(1, 5, drafts + 1 if rows is None else rows, drafts, (9,) * drafts, accepted,
                 (9,) * (accepted + 1 if tokens is None else tokens), Schedule(drafts, "fixed", ""), {},
                 confidences=confidences)


PREFILL = landed(0, 0, rows=0)


def test_by_hand():
    counted = acceptance([PREFILL, landed(0), landed(3), landed(1), landed(2)], GAMMA)
    assert (counted.rounds, counted.committed) == (4, 1 + 4 + 2 + 3)
    assert counted.acceptance_length == 2.5 and counted.draft_tokens_per_proposal == 3
    assert counted.verify_rate == 10 / 16
    assert counted.survival == (3 / 4, 2 / 4, 1 / 4)
    assert counted.conditional == (3 / 4, 2 / 3, 1 / 2)


def test_a_round_that_a_stop_cut_ends_at_the_stop():
    counted = acceptance([landed(2, tokens=2)], GAMMA)
    assert counted.acceptance_length == 2 and counted.draft_tokens_per_proposal == 2
    assert counted.survival == counted.conditional == (1, 1, None)
    last = acceptance([landed(3, tokens=3)], GAMMA)
    assert last.acceptance_length == 3 and last.survival == (1, 1, 1)


def test_shorter_proposals_do_not_count_behind_their_end():
    counted = acceptance([landed(1, drafts=1), landed(1, drafts=2), landed(0, drafts=0)], GAMMA)
    assert counted.proposed_at == (2, 1, 0) and counted.accepted_at == (2, 0, 0) and counted.reached_at == (2, 1, 0)
    assert counted.survival == (1, 0, None) == counted.conditional
    assert counted.acceptance_length == 5 / 3 and counted.verify_rate == 5 / 6


@pytest.mark.parametrize("rounds", [[], [PREFILL]], ids=["none", "prefill"])
def test_without_rounds(rounds):
    counted = acceptance(rounds, GAMMA)
    numbers = (counted.acceptance_length, counted.draft_tokens_per_proposal, counted.verify_rate)
    assert numbers == (0, 0, 0) and counted.survival == (None,) * GAMMA == counted.conditional


def test_as_json():
    document = acceptance([landed(0), landed(1, tokens=1)], GAMMA).to_dict()
    assert document["accept_rates_by_position"] == [0.5, 0.0, 0.0]
    assert document["conditional_acceptance_by_position"] == [0.5, None, None]
    assert document["proposed_by_position"] == [2, 1, 1]


def test_cutting_off_only_what_was_rejected_is_exact():
    rounds = [PREFILL, landed(1, confidences=(0.9, 0.4, 0.8)), landed(3, confidences=(0.9, 0.9, 0.9))]
    cut = cut_at(rounds, 0.5)
    assert [len(each.drafts) for each in cut] == [0, 1, 3] and [each.rows for each in cut] == [0, 2, 4]
    assert [each.tokens for each in cut] == [each.tokens for each in rounds]


def test_cutting_off_what_was_kept_is_not_exact():
    assert cut_at([landed(2, confidences=(0.9, 0.4, 0.8))], 0.5) is None


def test_the_threshold_itself_passes():
    (cut,) = cut_at([landed(0, confidences=(0.5, 0.4, 0.8))], 0.5)
    assert len(cut.drafts) == 1
