"""The tables of docs/compile.md, from the rows of `python -m benchmarks compiled`."""

from collections.abc import Sequence
from typing import Any

from benchmarks.compiled import families
from benchmarks.pages import fill

Row = dict[str, Any]
TITLES = (
    "| | kernels | of them generated | opaque | GB moved | saved, bytes per token |",
    "|---|---:|---:|---:|---:|---:|",
)
RECIPES = {
    "bf16": "bf16",
    "octavo rowwise": "**rowwise**",
    "opaque rowwise": "rowwise, opaque ops",
    "torchao rowwise": "torchao rowwise",
    "octavo tensorwise": "**tensorwise**",
    "opaque tensorwise": "tensorwise, opaque ops",
    "torchao tensorwise": "torchao tensorwise",
    "octavo blockwise": "**blockwise**",
}
STORED = {
    "octavo rowwise": "rowwise",
    "stored rowwise": 'rowwise, `activations="fp8"`',
    "octavo tensorwise": "tensorwise",
    "stored tensorwise": 'tensorwise, `activations="fp8"`',
}
COMBINED = {"bf16": "bf16", "octavo rowwise": "**rowwise**", "torchao rowwise": "torchao rowwise"}


def document(content: dict[str, Any], text: str) -> str:
    """Return the page with the tables of these results between its marks; arms without a row are left out."""
    rows = {(row["arm"], row["combo_kernels"]): row for row in content["rows"]}
    parts = {"families": families.table(content["families"])}
    for name, arms, combo in (("recipes", RECIPES, False), ("combo", COMBINED, True), ("stored", STORED, False)):
        measured = [(title, rows[arm, combo]) for arm, title in arms.items() if (arm, combo) in rows]
        parts[name] = "\n".join([*TITLES, *(line(title, row) for title, row in measured)])
    return fill(text, parts)


def line(title: str, row: Row) -> str:
    """Return a row of a table."""
    forward, backward = row["forward"], row["backward"]
    return (
        f"| {title} | {row['kernels']} | {forward['generated']} + {backward['generated']} | {row['opaque']} "
        f"| {forward['gigabytes']:.2f} + {backward['gigabytes']:.2f} | {row['kept_bytes_per_token']:,} |"
    )


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Return the rows of the last result, with those that were measured again replaced or added."""
    rows = {(row["arm"], row["combo_kernels"]): row for row in (*old, *new)}
    return list(rows.values())
