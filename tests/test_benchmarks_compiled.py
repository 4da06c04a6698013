"""The benchmark of compiled graphs: its tables in docs/compile.md are those of its results."""

import json

import pytest
from benchmarks.compiled import DOCUMENT, RESULT, document


def row(arm, combo=False, kernels=3):
    part = {"generated": 1, "extern": 1, "opaque": {}, "gigabytes": 1.239}
    return {
        "arm": arm, "combo_kernels": combo, "forward": part, "backward": part, "kernels": kernels, "opaque": 0,
        "kept_bytes_per_token": 12345,
    }  # fmt: skip


def test_the_tables_of_the_page_are_those_of_the_results():
    again = "run `python -m benchmarks compiled --write`"
    page, content = DOCUMENT.read_text(), json.loads(RESULT.read_text())
    assert document.document(content, page) == page, again
    assert not {(row["arm"], row["combo_kernels"]) for row in content["rows"]} ^ (
        {(arm, False) for arm in (*document.RECIPES, *document.STORED, "opaque blockwise")}
        | {(arm, True) for arm in document.COMBINED}
    ), again


def test_tables_have_a_line_for_each_row_and_need_their_marks():
    page = "".join(f"<!-- {name}: by -->\nold\n<!-- end -->\n" for name in ("recipes", "combo", "stored", "families"))
    text = document.document({"rows": [row("bf16"), row("bf16", True, 2)], "families": []}, page)
    assert text.count("| bf16 | 3 | 1 + 1 | 0 | 1.24 + 1.24 | 12,345 |\n<!-- end -->") == 1
    assert text.count("| bf16 | 2 |") == 1 and "old" not in text
    with pytest.raises(ValueError, match="has 0 places <!-- stored"):
        document.document({"rows": [], "families": []}, page.replace("stored", "other"))


def test_rows_that_are_measured_again_replace_the_old_ones():
    rows = document.merged([row("bf16"), row("octavo rowwise")], [row("bf16", kernels=4), row("bf16", True)])
    assert [(r["arm"], r["combo_kernels"], r["kernels"]) for r in rows] == [
        ("bf16", False, 4), ("octavo rowwise", False, 3), ("bf16", True, 3),
    ]  # fmt: skip
