"""The largest batch that fits: what trying all gives, from a few."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.planner.memory_plan import MemoryPlan, largest_fitting
from octavo.planner.timeline import MemorySeries

LINES = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**8)), min_size=1, max_size=4)
"""Bytes at moments of a step: what is held, and what each sequence takes."""


@settings(max_examples=300, deadline=None)
@given(LINES, st.integers(1, 10**9), st.lists(st.integers(1, 3000), min_size=2, max_size=2, unique=True))
def test_any_step(lines, limit, known):
    lines.append((0, 1 + limit // 10**6))  # it grows

    def peak(batch):
        looked.append(batch)
        return max(held + each * batch for held, each in lines)

    looked = []
    most = largest_fitting(peak, {batch: peak(batch) for batch in known}, limit)
    assert len(looked) == len(set(looked)) <= 25
    assert most == 0 or peak(most) <= limit
    assert peak(most + 1) > limit


@pytest.mark.parametrize("first", [1, 10, 64])
def test_an_even_growth_takes_one_more(first):
    peaks = {batch: 7000 + 1000 * batch for batch in (first, 2 * first)}
    assert largest_fitting(lambda batch: 7000 + 1000 * batch, peaks, 40_500) == 33
    assert len(peaks) <= 3


def test_what_does_not_grow_is_an_error():
    with pytest.raises(ValueError, match="does not grow with the batch"):
        largest_fitting(lambda batch: 7, {2: 7, 4: 7}, 10)
    assert largest_fitting(lambda batch: 7, {2: 7, 4: 7}, 6) == 0


@pytest.mark.parametrize(
    ("batch", "limit", "outputs", "expected"),
    [
        (64, 999_999, 100, [128]), (64, 999_999, 0, [128, 899]), (64, 159_999, 0, [59, 61]),
        (1000, 499_999, 0, [399, 699]), (64, 100_000, 0, [1]), (1, 100_000, 0, []),
    ],
)  # fmt: skip
def test_two_small_traces_and_a_line(batch, limit, outputs, expected):
    """A step that runs each image by itself is not traced at the answer; one that does not fit is, to be sure."""
    traced = []

    def plan(batch):
        table = torch.tensor([[0, 50_000], [1000 * batch, 0], [1000 * batch, 100_000]])
        series = MemorySeries(("activations", "states"), ["optimizer step", "forward", "backward"], table)
        return MemoryPlan(batch=batch, tokens=batch, series=series, outputs=1000 + outputs * batch, replan=replan)

    def replan(batch):
        traced.append(batch)
        return plan(batch)

    most = (limit - 100_000) // 1000
    assert plan(batch).largest_batch(limit) == most
    assert traced == expected
