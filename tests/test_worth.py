"""What a token of each request is worth: its formula, the mixture it is made for, the price of a row, and shares."""

import itertools
import math

import pytest

from mlx_dspark.schedule.grid import Prices
from mlx_dspark.schedule.worth import MEMORY, Shares, Work, row_seconds, worth, worths

NEVER = [math.inf] * 8


def falling(confidence, slots=7):
    return [confidence**slot for slot in range(1, slots + 1)]


def test_a_token_is_worth_what_its_request_pays_for_one():
    assert worth([], 2.0, 0.5, 0.1) == (2.0, 1.0)
    assert worth([0.9], 2.0, 0.0, 0.1) == (pytest.approx(2.1 / 1.9), 1.9)
    assert worth([0.9, 0.1], 2.0, 0.0, 0.5) == (pytest.approx(2.5 / 1.9), 1.9), "the second slot does not pay"
    assert worth([0.9], 2.0, 2.0, 0.1) == (2.0, 1.0), "nor does drafting"
    (easy, many), (hard, few) = (worth(falling(confidence), 2.0, 0.0, 0.1) for confidence in (0.9, 0.4))
    assert hard > 2 * easy and many > 4 > 2 > few


def test_plain_decoding_is_better_where_it_is_for_all_texts_together():
    hopes = {"easy": falling(0.9), "hard": falling(0.4)}
    both, none = {"easy": 7, "hard": 7}, {"easy": 0, "hard": 0}
    found = worths(hopes, both, 1.5, 2.0, 0.0, 0.1)
    assert found == {name: worth(own, 2.0, 0.0, 0.1)[0] / 1.5 for name, own in hopes.items()}
    assert worths(hopes, both, 0.5, 2.0, 0.0, 0.1) == {}, "both pay more than without drafts"
    # The easy one pays less, the hard one more; while they draft, the easy one has as many tokens in fewer rounds.
    assert worths(hopes, both, 0.7, 2.0, 0.0, 0.1) and not worths(hopes, none, 0.7, 2.0, 0.0, 0.1)


def best_slots(survivals, price, row):
    """Of one request where a token is worth `price` seconds."""
    return max(range(len(survivals) + 1), key=lambda slots: sum(survivals[:slots]) * price - row * slots)


@pytest.mark.parametrize("row", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("levels", [(0.9, 0.4), (0.95, 0.6), (0.8, 0.3)])
def test_by_it_all_texts_together_take_the_fewest_seconds(levels, row):
    """Texts of two kinds, of as many tokens, in a batch that is always full; against every pair of widths.

    With the rate of all together as the price of tokens, which is best where every round brings new content, texts
    take longer: the hard ones get too few rows and the easy ones too many.
    """
    kinds, base = [falling(level) for level in levels], 2.0

    def seconds(widths):  # of a token of each kind: rounds it takes, by what its place costs in a round
        return sum((base + row * width) / (1 + sum(own[:width])) for own, width in zip(kinds, widths, strict=True))

    best = min(itertools.product(range(8), repeat=2), key=seconds)
    local = tuple(best_slots(own, worth(own, base, 0.0, row)[0], row) for own in kinds)
    assert seconds(local) == pytest.approx(seconds(best))
    price = base + row  # the seconds of a token on average, in the mixture that these widths lead to
    for _ in range(50):
        widths = tuple(best_slots(own, price, row) for own in kinds)
        price = seconds(widths) / len(kinds)
    assert seconds(widths) >= seconds(best) * (1 - 1e-12)
    if (levels, row) == ((0.9, 0.4), 0.6):
        assert (best, widths) == ((5, 1), (7, 0)) and seconds(widths) > 1.05 * seconds(best)
        assert seconds(widths) == pytest.approx(1.056 * seconds(best), rel=1e-3), "as docs/scheduling.md says"


def test_rounds_of_late_count_most():
    work = Work()
    work.add(10, 1.0, 0.2)
    assert (work.rows, work.proposal, work.other) == (10, 1.0, 0.2)
    work.add(20, 0.0, 0.4)
    assert (work.rows, work.proposal, work.other) == (15, 0.5, pytest.approx(0.3))
    for _ in range(round(5 / MEMORY)):
        work.add(40, 2.0, 1.0)
    assert work.rows == pytest.approx(40, rel=0.01) and work.other == pytest.approx(1, rel=0.01)


def packed(*seconds):
    return Prices(list(seconds), NEVER)


def test_a_row_costs_what_some_more_and_fewer_change():
    linear = packed(*(1 + 0.2 * rows for rows in range(15)))
    assert row_seconds(linear, 6, 0, 2) == pytest.approx(0.2)
    levelling = packed(*(1 + rows**0.5 for rows in range(15)))
    assert row_seconds(levelling, 9, 0, 2) == pytest.approx((11**0.5 - 7**0.5) / 4), "less than on average"
    steps = packed(*(1.0 + (rows >= 7) for rows in range(15)))
    assert row_seconds(steps, 7, 0, 2) == pytest.approx(1 / 7), "a step is paid by all rows before it"
    assert row_seconds(steps, 3, 0, 2) == 0.0
    assert row_seconds(linear, 0, 0, 2) == pytest.approx(0.2), "where nobody drafts: what the first ones cost"


def test_what_rows_do_not_cost_is_everybodys():
    linear, work = packed(*(1 + 0.2 * rows for rows in range(15))), Work()
    work.add(6, 0.5, 0.3)
    assert work.base(linear, 0.2, 2) == pytest.approx(1.8)
    work.add(100, 0.5, 0.3)
    assert work.base(linear, 0.2, 2) == pytest.approx(1.8), "more rows than may be priced now"


def test_rows_that_are_verified_in_any_case_are_not_counted():
    prices = packed(*(1 + (0.5 * rows if rows < 4 else 2 + 0.1 * (rows - 4)) for rows in range(15)))
    assert row_seconds(prices, 8, 4, 2) == pytest.approx(0.1)
    assert row_seconds(prices, 14, 14, 2) == 0.0


def test_as_many_share_as_together_gain_most():
    shares = Shares([3.0, 0.4, 0.1], [0.0, 1.0, 1.2, 1.4])
    assert shares.chosen == 2 and shares.value(3.0) > 0 and shares.value(0.4) > 0 and shares.value(0.1) < 0
    assert Shares([0.5, 0.4], [0.0, 1.0, 1.0]).chosen == 0, "not enough for what they buy together"
    assert Shares([0.6, 0.5], [0.0, 1.0, 1.0]).chosen == 2, "neither would do alone"
    assert Shares([0.6, 0.5], [0.0, 1.4, 1.0]).chosen == 2, "no dearer for fewer"
    assert shares.next_to(0) == 1.0 and shares.next_to(0, 3) == pytest.approx(1.4), "several more at once"
    assert shares.next_to(1, 9) == pytest.approx(0.4), "no more than there are"
