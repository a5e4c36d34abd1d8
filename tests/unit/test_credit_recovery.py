"""Credit is exact: shares add up, however often they are split (Mattern's credit recovery)."""

from __future__ import annotations

from fractions import Fraction
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farprop.protocol.backward import NONE, WHOLE, Credit


def _amount(credit: Credit) -> Fraction:
    return Fraction(credit.parts, 1 << credit.level)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 1000])
def test_shares_sum_to_one_and_none_is_empty(count: int) -> None:
    shares = WHOLE.split(count)
    assert len(shares) == count
    assert sum(map(_amount, shares)) == 1
    assert all(share.parts > 0 for share in shares)
    assert reduce(Credit.plus, shares, NONE).is_whole


@given(st.lists(st.integers(1, 6), max_size=30), st.randoms(use_true_random=False))
def test_credit_divided_repeatedly_sums_to_one(counts: list[int], chance: object) -> None:
    shares = [WHOLE]
    for count in counts:
        chance.shuffle(shares)  # type: ignore[attr-defined]
        shares += shares.pop().split(count)
    chance.shuffle(shares)  # type: ignore[attr-defined]
    total = NONE
    for share in shares:
        assert not total.is_whole
        total = total.plus(share)
        assert 0 < _amount(total) <= 1
    assert total.is_whole


def test_recovered_credit_can_be_divided_again() -> None:
    total = reduce(Credit.plus, WHOLE.split(3), NONE)
    assert reduce(Credit.plus, total.split(5), NONE).is_whole
    assert not NONE.is_whole
