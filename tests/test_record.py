"""Rounds as the lines of a record, and back."""

import json
import math
from dataclasses import replace

import pytest

from mlx_dspark.record import round_from
from mlx_dspark.structs import Round, Schedule

LANDED = Round(3, 17, 4, 5, (9, 8, 7), 1, (9, 6), Schedule(3, "fixed", "said"), {"draft": 0.25, "verify": 0.5},
               logprobs=(-0.5, -1.25), top_logprobs=(((9, -0.5), (4, -2.0)), ((5, -1.0), (6, -1.25))),
               confidences=(0.75, 0.5, 0.25, 0.5, 0.5), finish="stop")


def line(landed):
    return json.loads(json.dumps(landed.to_dict(), allow_nan=False))


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": None}, {"top_logprobs": None, "logprobs": None},
                                    {"confidences": None, "finish": None}], ids=", ".join)
def test_a_round_is_read_as_it_was_written(fields):
    landed = replace(LANDED, **fields)
    assert round_from(line(landed)) == landed


def test_older_records_have_no_top_logprobs():
    row = line(LANDED)
    del row["top_logprobs"]
    assert round_from(row) == replace(LANDED, top_logprobs=None)


def test_impossible_tokens_are_written_as_numbers():
    row = line(replace(LANDED, logprobs=(-math.inf, math.nan),
                       top_logprobs=(((9, -0.5), (4, -math.inf)), ((1, math.nan),))))
    assert row["logprobs"] == [-9999.0, -9999.0]
    assert row["top_logprobs"] == [[[9, -0.5], [4, -9999.0]], [[1, -9999.0]]]
