"""`octavo doctor --deep`: compare all kernels with the reference and show the results."""

import json
from dataclasses import asdict
from itertools import groupby

import torch
from rich.box import ROUNDED
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from octavo.kernels.conformance.cases import checks, unavailable_reason
from octavo.kernels.conformance.mismatches import CaseResult, compare
from octavo.kernels.conformance.random_inputs import GPU, INTERPRETER
from octavo.runtime.terminal import stdout


def doctor_deep(device: torch.device, *, as_json: bool, seconds: float, seed: int, only: str) -> bool:
    """Compare with a progress bar on stderr, print a row per case, and return whether all outputs agree."""
    if (reason := unavailable_reason(device)) is not None:
        raise ValueError(f"doctor --deep: {reason}")
    budget = GPU if device.type == "cuda" else INTERPRETER
    selected = checks(device, only)
    kinds = f"{sum(len(check.configs[: budget.configs]) for check in selected)} configurations of {len(selected)} cases"
    with Progress(console=Console(stderr=True), transient=True) as progress:
        first = progress.add_task(f"compiling and comparing {kinds}", total=len(selected))
        more = progress.add_task(f"new inputs for {seconds:g} s", total=seconds, start=False, visible=False)
        begin = progress.get_time()

        def advance(round_: int) -> None:
            if round_ == 0:
                progress.advance(first)
            else:
                progress.update(more, completed=progress.get_time() - begin, visible=True)

        outcomes = compare(selected, device, seconds=seconds, seed=seed, budget=budget, after=advance)
    if as_json:
        print(json.dumps({"device": str(device), "seed": seed, "outcomes": [asdict(o) for o in outcomes]}, indent=2))
    else:
        _show(stdout(), device, seed, outcomes)
    return not any(outcome.mismatches for outcome in outcomes)


def _show(console: Console, device: torch.device, seed: int, outcomes: list[CaseResult]) -> None:
    table = Table(box=ROUNDED, border_style="dim", header_style="bold")
    for heading in ("op", "case", "runs in each configuration"):
        table.add_column(heading)
    for (op, case), group in groupby(outcomes, key=lambda outcome: (outcome.op, outcome.case)):
        cells = [
            f"[red]{o.config}: {o.mismatches} of {o.runs} differ[/red]" if o.mismatches else f"{o.config}: {o.runs} ok"
            for o in group
        ]
        table.add_row(op, case, "  ".join(cells))
    console.print(table)
    bad = [outcome for outcome in outcomes if outcome.mismatches]
    for o in bad:
        text = f"{o.op} {o.case}, configuration {o.config}: {o.first}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    runs = sum(outcome.runs for outcome in outcomes)
    verdict = (
        f"{len(bad)} of {len(outcomes)} configurations differ from the reference" if bad else "all bytes are equal"
    )
    console.print(f"{runs} runs on {device}, seed {seed}: {verdict}.", style="bold", markup=False, highlight=False)
