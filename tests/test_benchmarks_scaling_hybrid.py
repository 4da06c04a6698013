"""The hybrid part of docs/scaling.md: its rows are plans, and its text follows from them."""

import json

import pytest
from benchmarks import scaling_hybrid
from benchmarks.environment import RESULTS
from benchmarks.scaling_hybrid_document import best, section, sent

from octavo.planner.collective_cost import GPUS_PER_MACHINE
from octavo.train.plan_parts import TraceCache

COMMITTED = RESULTS / "simulated" / scaling_hybrid.FILE


@pytest.fixture(scope="module")
def content():
    return json.loads(COMMITTED.read_text())


def test_every_layout_is_planned_or_has_a_reason(content):
    planned = {scaling_hybrid.key(row) for row in content["rows"]}
    expected = {
        scaling_hybrid.key({"model": model, "arm": arm, "gpus": gpus, "parallel": parallel, "recompute": recompute})
        for model, layouts in scaling_hybrid.LAYOUTS.items()
        for parallel in layouts
        for arm in scaling_hybrid.ARMS
        for recompute in scaling_hybrid.CHECKPOINTING
        for gpus in scaling_hybrid.GPUS
        if arm == "fp8" or "ep" not in parallel
    }
    assert planned == expected
    reasons = {row["problem"] for row in content["rows"] if "problem" in row}
    assert all("GPUs are no multiple of" in reason for reason in reasons)


def test_rows_are_possible(content):
    for row in content["rows"]:
        if "problem" in row:
            continue
        parallel, (tokens, gathered, stages) = row["parallel"], sent(row)
        assert 0 < row["mfu"] < 1 and row["seconds"] > row["bubble"] >= 0
        assert ("pp" in parallel) == (stages > 0) and (row["bubble"] == 0 or "pp" in parallel)
        assert (tokens > 0) == bool(parallel.keys() & {"tp", "cp", "ep"})
        shards = row["gpus"] // (parallel.get("tp", 1) * parallel.get("pp", 1))
        assert (gathered > 0) == (shards > 1)
    for row in content["rows"]:  # more GPUs share the same tokens and parameters
        more = [r for r in content["rows"] if scaling_hybrid.key(r | {"gpus": row["gpus"]}) == scaling_hybrid.key(row)]
        peaks = [r["peak"] for r in sorted(more, key=lambda r: r["gpus"]) if "peak" in r]
        if "pp" not in row["parallel"]:
            assert peaks == sorted(peaks, reverse=True)


def rows_of(seconds):
    """Rows of a model whose layouts take so long, by arm and layout."""
    return [
        {"model": "A", "arm": arm, "gpus": 64, "parallel": {kind: 8}, "recompute": "full", "seconds": value,
         "bubble": 0.0, "communication": 0.0, "tokens_per_second": 1.0, "mfu": 0.5, "peak": 2**30, "sent": {}}
        for (arm, kind), value in seconds.items()
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pipeline", "verdict"), [(1.0, "figures support the advice"), (4.0, "do not support it as a rule")]
)
def test_the_advice_follows_from_the_figures(pipeline, verdict):
    rows = rows_of({("bf16", "tp"): 3.0, ("bf16", "pp"): 3.0, ("fp8", "tp"): 2.0, ("fp8", "pp"): pipeline})
    text = section({"rows": rows, "gpu": "h100", "gib": 79, "tokens": 1024})
    assert verdict in text and f"takes {2 / pipeline:.2f} times as long as `pp` (in bf16 1.00)" in text


def test_the_fastest_that_fits():
    rows = rows_of({("fp8", "tp"): 2.0, ("fp8", "pp"): 1.0})
    assert best(rows, 79, arm="fp8")["parallel"] == {"pp": 8}
    rows[1]["peak"] = 80 * 2**30
    assert best(rows, 79, arm="fp8")["parallel"] == {"tp": 8}
    assert best(rows, 0.5, arm="fp8") is None


@pytest.mark.slow
def test_rows_are_as_kept(content, monkeypatch):
    """One layout that crosses machines, on 64 GPUs."""
    monkeypatch.setattr(scaling_hybrid, "LAYOUTS", {"Mixtral-8x7B": [{"tp": GPUS_PER_MACHINE}]})
    monkeypatch.setattr(scaling_hybrid, "GPUS", (64,))
    monkeypatch.setattr(scaling_hybrid, "CHECKPOINTING", ("full",))
    kept = {scaling_hybrid.key(row): row for row in content["rows"]}
    rows = json.loads(json.dumps([*scaling_hybrid.planned("Mixtral-8x7B", TraceCache(), [])]))
    assert len(rows) == 2 and all(row == kept[scaling_hybrid.key(row)] for row in rows)
