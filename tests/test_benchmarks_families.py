"""One training step of each family of models with FP8 activations: bitwise forward, accurate gradients, less memory."""

import pytest
from benchmarks.families import FAMILIES, measured


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_with_stored_activations(name):
    one = measured(name)
    assert one.bitwise and one.stored < 0.95 * one.plain
    assert one.whole >= 20 and one.worst >= 15
