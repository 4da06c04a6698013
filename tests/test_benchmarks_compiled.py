"""The benchmark of compiled graphs: its tables in docs/compile.md are those of its results."""

import json

from benchmarks import compiled


def test_the_tables_of_the_page_are_those_of_the_results():
    again = "run `python -m benchmarks compiled --write`"
    page, rows = compiled.DOCUMENT.read_text(), json.loads(compiled.RESULT.read_text())["rows"]
    assert compiled.document(rows, page) == page, again
    arms = {(arm, False) for arm in (*compiled.RECIPES, *compiled.STORED, "opaque blockwise")}
    assert {(row["arm"], row["combo_kernels"]) for row in rows} == arms | {(arm, True) for arm in compiled.COMBINED}
    assert compiled.document(rows[1:], page) != page
