"""The planner's predictions against what others published: signs, sizes, and the document that shows them."""

import pytest
from benchmarks import predictions
from benchmarks.predictions import ROWS


def _row(row):
    marks = [pytest.mark.xfail(strict=True, reason=row.misses)] if row.misses else []
    return pytest.param(row, marks=marks, id=f"{row.who}, {row.what}")


@pytest.mark.thorough
@pytest.mark.parametrize("row", [_row(row) for row in ROWS])
def test_within_ten_points_of_what_was_published(row):
    assert row.sign_is_right and row.is_close, f"published {row.published}, predicted {row.predicted:.3f}"


@pytest.mark.thorough
def test_the_planner_is_as_close_to_an_h100_as_the_page_says():
    rows = predictions.comparisons()
    kinds = {"product": (27, 0.04), "linear": (13, 0.05), "layer": (2, 0.06), "step": (3, 0.08)}
    for kind, (count, mean) in kinds.items():
        errors = [abs(row.error) for row in rows if row.kind == kind]
        assert len(errors) == count and sum(errors) / len(errors) < mean and max(errors) < 0.11, kind


@pytest.mark.thorough
def test_the_document_is_up_to_date():
    assert predictions.DOCUMENT.read_text(encoding="utf-8") == predictions.document(), (
        "docs/planner.md is not what the planner says: run python -m benchmarks predictions"
    )
