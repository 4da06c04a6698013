"""The section of docs/scaling.md about hybrid layouts, from a result file of `python -m benchmarks scaling_hybrid`."""

from collections.abc import Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]

HEAD = """
## Hybrid layouts

**Predicted** by `octavo plan` for {gpu} ({gib} GiB), eager mode, as `python -m benchmarks scaling_hybrid` writes to
`benchmarks/results/simulated/scaling_hybrid.json`: {tokens} tokens in a step of all GPUs, one sequence (of 8192
tokens, DeepSeek-V3 4096) at a time on each group of GPUs with sequences of its own, schedule 1F1B. `bf16` is level bf16
with fp32 moments; `fp8` is `fp8+activations+optimizer` with recipe `rowwise`. What is predicted and what is not:
[planner](planner.md). Nothing of it was compared with GPUs.

The fastest of the planned layouts that fit, by model and number of GPUs. *Layout*: what `[parallel]` sets; FSDP2 has
the rest. *bubble*, *communication*: shares of the step that GPUs wait for other stages, and for messages. *GB*: what a
GPU sends in a step.

"""
LAYOUTS = """
Every planned layout on {gpus} GPUs, with the blocks recomputed: seconds of a step, memory, bubble, and GB that a GPU
sends in FP8 (of tokens between GPUs that share layers, sequences or experts; of weights and gradients; between stages).
(In brackets): does not fit.

"""
ADVICE = """
### Pipeline or tensor parallelism for FP8

"Pipeline before tensor parallelism for FP8": FP8 products shorten the compute that messages of tensor parallelism wait
for, and a pipeline sends less. Of mixtures, tensor parallelism leaves experts whole, so they are no pair here.
{verdict}
"""


def section(content: Mapping[str, Any]) -> str:
    """Return the section as Markdown, paragraphs not filled."""
    rows = [row for row in content["rows"] if "seconds" in row]
    most = max(row["gpus"] for row in rows)
    parts = [
        HEAD.format(gpu=content["gpu"].upper(), gib=content["gib"], tokens=f"{content['tokens']:,}"),
        *_best(rows, content["gib"]),
        LAYOUTS.format(gpus=most),
        *_layouts([row for row in rows if row["gpus"] == most and row["recompute"] == "full"], content["gib"]),
        ADVICE.format(verdict=" ".join(_verdict(rows, content["gib"]))),
    ]
    return "".join(parts)


def name(parallel: Mapping[str, int]) -> str:
    """Name a layout as `[parallel]` sets it."""
    return ", ".join(f"{key} {value}" for key, value in parallel.items()) or "FSDP2 alone"


def fits(row: Row, gib: float) -> bool:
    """Whether the memory of a row's step fits a GPU."""
    return bool(row["peak"] <= gib * 2**30)


def sent(row: Row) -> tuple[float, float, float]:
    """Return the GB that a GPU sends in a step: of tokens, of weights and gradients, and between stages."""
    kinds = {"tokens": 0.0, "stage": 0.0, "": 0.0}
    for kind, size in row["sent"].items():
        kinds[next(start for start in kinds if kind.startswith(start))] += size / 1e9
    return kinds["tokens"], kinds[""], kinds["stage"]


def best(rows: list[Row], gib: float, **about: Any) -> Row | None:
    """Return the fastest of the rows that fit and are about this; None if there is none."""
    own = [row for row in rows if fits(row, gib) and all(row[key] == value for key, value in about.items())]
    return min(own, key=lambda row: float(row["seconds"]), default=None)


def _best(rows: list[Row], gib: float) -> Iterator[str]:
    yield (
        "| model | GPUs | | layout | recomputed | s a step | tokens/s per GPU | MFU | GiB | bubble | communication "
        "| GB |\n"
        "|---|---:|---|---|---|---:|---:|---:|---:|---:|---:|---:|\n"
    )
    for model in dict.fromkeys(row["model"] for row in rows):
        for gpus in sorted({row["gpus"] for row in rows}):
            for arm in ("bf16", "fp8"):
                row = best(rows, gib, model=model, gpus=gpus, arm=arm)
                cells = [model, str(gpus), f"`{arm}`"]
                if row is None:
                    yield f"| {' | '.join(cells)} | none fits |" + " |" * 8 + "\n"
                    continue
                recomputed = "blocks" if row["recompute"] == "full" else "nothing"
                shares = [f"{row[part] / row['seconds']:.1%}" for part in ("bubble", "communication")]
                cells += [
                    name(row["parallel"]), recomputed, f"{row['seconds']:.2f}",
                    f"{row['tokens_per_second'] / gpus:,.0f}", f"{row['mfu']:.0%}", f"{row['peak'] / 2**30:.1f}",
                    *shares, f"{sum(sent(row)):,.0f}",
                ]  # fmt: skip
                yield f"| {' | '.join(cells)} |\n"


def _layouts(rows: list[Row], gib: float) -> Iterator[str]:
    yield (
        "| model | layout | s, `bf16` | s, `fp8` | ratio | GiB, `bf16` | GiB, `fp8` | bubble, `fp8` | GB: tokens | "
        "weights, gradients | stages |\n|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n"
    )
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        for layout in dict.fromkeys(name(row["parallel"]) for row in own):
            arms = {row["arm"]: row for row in own if name(row["parallel"]) == layout}
            bf16, fp8 = arms.get("bf16"), arms.get("fp8")
            if fp8 is None:
                continue
            memory = ["" if row is None else _bracketed(row, gib) for row in (bf16, fp8)]
            cells = [
                model, layout, f"{bf16['seconds']:.2f}" if bf16 else "", f"{fp8['seconds']:.2f}",
                f"{bf16['seconds'] / fp8['seconds']:.2f}" if bf16 else "", *memory,
                f"{fp8['bubble'] / fp8['seconds']:.1%}", *(f"{size:,.0f}" if size else "" for size in sent(fp8)),
            ]  # fmt: skip
            yield f"| {' | '.join(cells)} |\n"


def _bracketed(row: Row, gib: float) -> str:
    text = f"{row['peak'] / 2**30:.1f}"
    return text if fits(row, gib) else f"({text})"


def _verdict(rows: list[Row], gib: float) -> Iterator[str]:
    """Sentences about the pairs of tensor and pipeline parallelism of eight that both fit."""
    pairs = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for gpus in sorted({row["gpus"] for row in rows}):
            found = {
                (arm, kind): best(rows, gib, model=model, gpus=gpus, arm=arm, parallel={kind: 8})
                for arm in ("bf16", "fp8")
                for kind in ("tp", "pp")
            }
            distributed = "ep" not in {key for row in rows if row["model"] == model for key in row["parallel"]}
            if distributed and found["fp8", "tp"] and found["fp8", "pp"]:
                pairs.append((model, gpus, found))
    faster = [pair for pair in pairs if pair[2]["fp8", "pp"]["seconds"] < pair[2]["fp8", "tp"]["seconds"]]
    yield (
        f"Of {len(pairs)} pairs of `tp = 8` and `pp = 8` that both fit in FP8, the pipeline is faster in {len(faster)}."
    )
    for model, gpus, found in pairs:
        ratio = {arm: _ratio(found[arm, "tp"], found[arm, "pp"]) for arm in ("bf16", "fp8")}
        before = f" (in bf16 {ratio['bf16']:.2f})" if ratio["bf16"] else ""
        yield f"{model} on {gpus}: `tp` takes {ratio['fp8']:.2f} times as long as `pp`{before}."
    alone = sum(
        1 for model, gpus, found in pairs
        if (plain := best(rows, gib, model=model, gpus=gpus, arm="fp8", parallel={}))
        and plain["seconds"] <= min(found["fp8", kind]["seconds"] for kind in ("tp", "pp"))
    )  # fmt: skip
    yield f"FSDP2 alone is at least as fast as both in {alone} of these."
    supported = bool(pairs) and len(faster) == len(pairs)
    yield "**The figures support the advice.**" if supported else "**The figures do not support it as a rule.**"


def _ratio(one: Row | None, other: Row | None) -> float:
    return float(one["seconds"] / other["seconds"]) if one and other else 0.0
