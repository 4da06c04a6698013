"""Healthy runs of odd kinds have no finding and no move: a part of `python -m benchmarks healthy_runs`."""

import pytest
from benchmarks.healthy_runs import KINDS, healthy_run


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "large_batches"])
def test_nothing_is_found_and_nothing_moved(kind):
    row = healthy_run(kind, "rowwise", steps=3)
    assert not row["findings"] and not row["moves"] and row["worst_product_error"] < 0.125
