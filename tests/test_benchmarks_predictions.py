"""The planner's predictions against what others published: signs, sizes, and the document that shows them."""

import pytest
from benchmarks import predictions
from benchmarks.predictions import ROWS

from octavo.planner.devices import DEVICES

TESTS = [row for row in ROWS if not row.fitted]


def _row(row):
    marks = [pytest.mark.xfail(strict=True, reason=row.misses)] if row.misses else []
    return pytest.param(row, marks=marks, id=f"{row.who}, {row.what}")


@pytest.mark.thorough
@pytest.mark.parametrize("row", [_row(row) for row in TESTS])
def test_within_ten_points_of_what_was_published(row):
    assert row.sign_is_right and row.is_close, f"published {row.published}, predicted {row.predicted:.3f}"


@pytest.mark.thorough
def test_every_sign_is_right():
    assert all(row.sign_is_right for row in ROWS)


def test_the_fitted_time_is_that_of_the_row_it_was_fitted_to():
    """22.64 ms in FP8 and 34.18 in bf16, published."""
    gpu, call = DEVICES["h100"], predictions.LinearCall(m=16384, k=16384, n=16384)
    rest = 20 * 16384**2 / gpu.bandwidth
    assert predictions.fp8(gpu, call, "by tensor").total + rest == pytest.approx(22.64e-3, rel=0.02)
    assert predictions.bf16_linear(gpu, call).total + rest == pytest.approx(34.18e-3, rel=0.04)


@pytest.mark.thorough
def test_the_document_is_up_to_date():
    assert predictions.DOCUMENT.read_text(encoding="utf-8") == predictions.document(), (
        "docs/planner.md is not what the planner says: run python -m benchmarks predictions"
    )
