"""The rows of `python -m benchmarks host` in docs/host_time.md."""

from typing import Any

from benchmarks.pages import fill

TITLES = ["| | forward µs | total µs | × bf16 | launches | kernels | dispatches | calls |", "|---|" + 7 * "---:|"]
LATER = """*Before* is the code without plans of products by Triton, on the same machine. Other work ran on it
meanwhile: compare ratios. A product by Triton is a launch, with nothing in its place."""


def text(content: dict[str, Any], page: str) -> str:
    """Return the page with its rows anew."""
    before = {row["name"]: row for row in content.get("before", ())}
    measured = (
        f"\n{_measured(content)} *Before* is the code without direct launches and plans, on another machine: compare "
        "its ratios, which are to its own bf16, and its counts.\n\n"
    )
    if later := content.get("later"):
        names = {row["name"] for row in content["rows"]}
        new = {name: row for name, row in before.items() if name not in names}
        table = "\n".join(_table(later["rows"], new))
        measured += f"Rows measured later, in a run of their own:\n\n{table}\n\n{_measured(later)}\n{LATER}\n\n"
    return fill(page, {"rows": "\n".join(_table(content["rows"], before)) + "\n" + measured})


def _table(rows: list[dict[str, Any]], before: dict[str, Any]) -> list[str]:
    lines = list(TITLES)
    for row in rows:
        old = before.get(row["name"])
        changed = old is not None and old["python_calls"] != row["python_calls"]
        if changed and old is not None:
            lines.append(_line(f"{row['name']}, before", old))
        lines.append(_line(f"**{row['name']}**" if changed else row["name"], row))
    return lines


def _measured(content: dict[str, Any]) -> str:
    machine = content["environment"]
    return (
        f"Measured with `python -m benchmarks host` on one thread of {machine['device']}; torch {machine['torch']}, "
        f"Triton {machine['triton']}, torchao {machine['torchao'] or 'absent'}, Python {machine['python']}, "
        f"{machine['date']}."
    )


def _line(name: str, row: dict[str, Any]) -> str:
    cells = [f"{row['forward_us']:.0f}", f"{row['total_us']:.0f}", f"{row['ratio']:.1f}"]
    cells += [str(row[key]) for key in ("launches", "kernels", "dispatches", "python_calls")]
    return f"| {name} | " + " | ".join(cells) + " |"
