"""torchao's float8 training as an independent oracle for the recipes that both libraries define."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PEERS = Path(sys.prefix) / "peers"  # Where `make test-slow` installs torchao, out of the way of everything else

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (PEERS / "torchao").exists(), reason="torchao is not installed; `make test-slow` does it"),
]


@pytest.fixture(scope="module")
def rows():
    script = Path(__file__).parent / "peers" / "torchao_products.py"
    environment = os.environ | {"PYTHONPATH": str(PEERS)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    return {(row["recipe"], row["dtype"], row["product"]): row for row in json.loads(done.stdout)}


@pytest.mark.parametrize(("dtype", "rounding"), [("torch.float32", 120), ("torch.bfloat16", 60)])
def test_same_numbers_where_the_definitions_are_the_same(rows, dtype, rounding):
    """All of tensorwise, and Y of rowwise. (The backward products differ: torchao quantizes X and W a second time.)"""
    same = [("tensorwise", p) for p in ("y", "dx", "dw")] + [(r, "y") for r in ("rowwise", "rowwise_hp_wgrad")]
    for recipe, product in same:
        assert rows[recipe, dtype, product]["agreement"] >= rounding, (recipe, product)


def test_folding_is_at_least_as_accurate_as_two_copies(rows):
    for row in rows.values():
        assert row["octavo"] >= row["torchao"] - 0.1, row
