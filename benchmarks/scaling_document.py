"""docs/scaling.md and its figure, from a result file of `python -m benchmarks scaling`, which has every number."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import figures
from benchmarks.scaling_hybrid_document import section
from benchmarks.scaling_time import BASELINE, FLAT, STAGED, Rates, sent, step
from benchmarks.scaling_trace import ARMS, KINDS
from octavo.experiments.theme import colour

Row = Mapping[str, Any]
IMAGE = "images/scaling.svg"
PLAIN, GATHER, ALL = "fp8", "fp8, FP8 gather", "fp8+activations+optimizer, all FP8"
CARDS = {"80 GB": 79, "141 GB": 139}
"""GiB that a card of this name has."""
ROUTES = ((BASELINE, FLAT), (PLAIN, FLAT), (GATHER, FLAT), (ALL, FLAT), (ALL, STAGED))
"""Arms whose time is modelled, and how FP8 gradients travel there."""
SHOWN = "Llama-3-70B"
COLOURS = {BASELINE: "var(--soft)", GATHER: colour(0), ALL: colour(1), STAGED: colour(2)}

HEAD = """# Scaling

Written by `python -m benchmarks scaling` (torch {torch}, transformers {transformers}); edit nothing here. No GPU and
no network took part.

**Simulated: memory and bytes.** One training step of each whole model runs through `octavo.parallelize`, FSDP2 and the
optimizer, as rank 0 of torch's fake process group, on fake tensors. `benchmarks/scaling_trace.py` records each storage
that the step allocates, resizes and frees, and the bytes of each collective. For a small model, the peak equals that of
PyTorch's tracker for FSDP2 to the byte, and the communicated bytes equal closed formulas
(`pytest tests/test_benchmarks_scaling.py`). Nothing here was compared with a GPU. The optimizer step of `octavo.AdamW`
is not traced, because it depends on values; the simulation assumes that it allocates nothing but its states.

**Modelled: time.** Links, their latency and what computing hides are formulas with assumed rates
(`benchmarks/scaling_time.py`), and nothing of them was measured.

One sequence of {tokens} tokens per rank and step, one micro-batch, ZeRO-3 (`reshard_after_forward=True`), the loss in
chunks. *n × 8*: n copies of the model, each sharded over 8 ranks (HSDP).

| arm | products | stored activations | shards and masters | moments | weights travel in | gradients travel in |
|---|---|---|---|---|---|---|
| `bf16` | bf16 | bf16 | fp32 | fp32 | bf16 | bf16 |
| `fp8` | FP8 | inputs of linears FP8 | fp32 | fp32 | bf16 | bf16 |
| `fp8`, FP8 gather | FP8 | inputs of linears FP8 | fp32 | fp32 | FP8 | bf16 |
| `fp8+activations+optimizer`, all FP8 | FP8 | FP8 | bf16 + 16 bits | FP8 | FP8 | FP8 |

Gradients are added up in bf16 in every arm (`reduce_dtype`); the default of fp32 doubles what `bf16` gradients take
on the wire. Vocabulary heads, embeddings and norms stay in bf16, and are gathered so.

## Memory of a rank

GiB at the worst moment of a step. **Bold** fits a card of {small} ({small_gib} GiB), (in brackets) does not fit one
of {large} ({large_gib} GiB). Not counted: the CUDA context, workspaces inside kernels, what the allocator cannot use,
and the second memory order of one layer's FP8 weights that Hopper's products want.

"""
CATEGORIES = """
Where it goes, {model} on {world} ranks, GiB at the peak:

"""
CATEGORIES_NOTE = """
Shards and optimizer states shrink with the number of ranks, activations do not. On many ranks most of the memory saving
comes from FP8 activations; if they fit, no recomputation is needed. With recomputation the remaining activations are
one block, the inputs of all blocks, and embedding and head, whose weights and gradients are gathered and scattered
whole. The gradient
of a head is made with the loss in forward; where it is added to that of the embedding it counts as an activation.
"""
WIRE = """
## Bytes on the wire

GB that a rank sends in a step: (W − 1)/W of what is gathered or scattered, a ring's or an all-to-all's share, and
twice that for the all-reduce between copies. Each weight is gathered twice, for forward and for backward; those of
embedding and head once. Recomputation changes nothing here.

"""
WIRE_NOTE = """
What stays in bf16 keeps the ratios of gathers from a half: embedding and head, {share}. FSDP2 adds up gradients
between copies in bf16 in every arm. Not counted: one flag per parameter that `octavo.AdamW` reduces, to leave out a
step with NaN on all ranks alike.
"""
TIME = """
## Time, modelled

A machine has 8 GPUs, whose links inside carry {inside:g} GB/s and to other machines {between} Gb/s, each way and per
GPU, at {efficiency:.0%} of these. A hop takes {hop_inside:g} µs inside and {hop_between:g} µs between. Products run
at {bf16:g} TFLOP/s in bf16 and {fp8:g} in FP8, quantizing included; other work takes no time. Blocks are recomputed.
All of this is assumed, and can be set: `python -m benchmarks scaling --document --help`.

Gathers and bf16 gradients go round rings that leave a machine once, with gradients of its 8 GPUs added up. FP8
gradients are one all-to-all of all ranks, which adds nothing up on the way: half the bytes of each rank, and
{ring:.1f} × those that leave a machine. In two stages, inside machines first, as many would leave as from a ring, in
FP8; `octavo.comm` does not do that yet, and that column shows what it would be worth. Until then take
`fp8_comm="gather"` across machines, or HSDP, whose all-to-all stays inside one. Where machines have no fast links
inside, or a switch adds up, this model does not hold.

Seconds of all collectives of a step, as if none were hidden:

"""
STEPS = """
A step, in seconds, on {world} ranks, and in brackets the part of it in which communication is not hidden. Forward
hides its gathers and backward its gathers and scatters, each up to its own length; nothing hides the first two
gathers (embedding and head, first block) and the last two scatters.

"""
STEPS_NOTE = """
![time of communication](images/scaling.svg)

If compute hides communication, FP8 communication shortens only the gathers at the start and the reductions at the end
of a step; the rest of the speed-up comes from FP8 GEMMs. FP8 communication gains more if a rank has fewer tokens.
Compute and communication both grow with the parameters, so the tokens per rank and step decide. The table lists the
smallest number of tokens from which compute hides all other communication, on {world} ranks, with the FLOPs per token
of sequences of {tokens}:

"""


def _note(content: Mapping[str, Any]) -> list[str]:
    """What a reader should know of the rows; `note` in a result file."""
    return ["\n" + content["note"] + "\n"] if "note" in content else []


def document(content: Mapping[str, Any], hybrid: Mapping[str, Any] | None = None) -> str:
    """docs/scaling.md of a result file, and of that of `benchmarks.scaling_hybrid`."""
    rates = Rates(**{**content["rates"], "between": tuple(content["rates"]["between"])})
    rows, models = content["rows"], content["models"]
    tokens = next(iter(models.values()))["facts"]["tokens"]
    (small, small_gib), (large, large_gib) = CARDS.items()
    head = HEAD.format(
        tokens=tokens, small=small, small_gib=small_gib, large=large, large_gib=large_gib,
        torch=content["environment"]["torch"], transformers=content["environment"]["transformers"],
    )  # fmt: skip
    middle = sorted({row["world"] for row in rows})[len({row["world"] for row in rows}) // 2]
    last = max(row["world"] for row in rows)
    shares = [f"{_outside(about['facts']):.0%} of {name}" for name, about in models.items()]
    time = TIME.format(
        inside=rates.inside / 1e9, between=", ".join(f"{rate / 1e9:g}" for rate in rates.between),
        efficiency=rates.efficiency, hop_inside=rates.hop_inside * 1e6, hop_between=rates.hop_between * 1e6,
        bf16=rates.bf16 / 1e12, fp8=rates.fp8 / 1e12, ring=_leaving(rows, last),
    )  # fmt: skip
    parts = [
        head, *_memory(rows, models), *_note(content), CATEGORIES.format(model=SHOWN, world=middle),
        *_categories(rows, middle),
        CATEGORIES_NOTE, WIRE, *_wire(rows, models), WIRE_NOTE.format(share=", ".join(shares)), time,
        *_links(rows, models, rates), STEPS.format(world=last), *_steps(rows, models, rates, last),
        STEPS_NOTE.format(world=last, tokens=tokens), *_tokens(rows, models, rates, last),
        *([section(hybrid)] if hybrid else []),
    ]  # fmt: skip
    return "".join(map(_filled, parts))


def picture(content: Mapping[str, Any]) -> figures.Figure:
    """Seconds of communication of a step by rate of the network, a bar for each way, beside those of computing."""
    rates = Rates(**{**content["rates"], "between": tuple(content["rates"]["between"])})
    last = max(row["world"] for row in content["rows"])
    facts = content["models"][SHOWN]["facts"]
    titles = [f"{SHOWN}, {last} ranks", f"{SHOWN}, {last // 8} × 8 ranks"]
    places, settings = figures.panels(
        titles, 2, 240, x={"showgrid": False}, y={"title": "seconds of a step (modelled)"}
    )
    data, shapes = [], []
    for place, replicas in zip(places, (1, last // 8), strict=True):
        arms = _row(content["rows"], SHOWN, last, replicas, True)
        networks = [f"{rate / 1e9:g} Gb/s" for rate in rates.between]
        for name, staging in (route for route in ROUTES if route[0] != PLAIN):
            steps = [step(arms[name], facts, rates, between, staging) for between in rates.between]
            label = f"{name}, {staging}" if name == ALL else name
            bar = {"type": "bar", "marker": {"color": COLOURS[STAGED if staging == STAGED else name]}, "x": networks}
            data.append({**_named(label, replicas), **bar, **place, "y": [each.communication for each in steps]})
        for name, dash in ((BASELINE, "solid"), (PLAIN, "dash")):
            compute = step(arms[name], facts, rates, rates.between[0]).compute
            across = {"type": "line", "xref": f"{place['xaxis']} domain", "yref": place["yaxis"], "x0": 0, "x1": 1}
            line = {"y0": compute, "y1": compute, "line": {"color": "var(--ink)", "width": 1.2, "dash": dash}}
            shapes.append({**_named(f"computing, {name}", replicas), **across, **line})
    settings["yaxis"]["range"] = [
        0,
        1.08 * max([y for bar in data for y in bar["y"]] + [line["y0"] for line in shapes]),
    ]
    margin = {"l": 64, "r": 14, "t": 84, "b": 34, "pad": 4}
    height = settings.pop("height")
    legend = {"orientation": "h", "x": 0, "y": 1 + 26 / height, "yanchor": "bottom"}
    height += margin["t"] + margin["b"]
    bars = {"bargap": 0.3, "bargroupgap": 0.08}
    return figures.figure(data, height, **settings, shapes=shapes, margin=margin, legend=legend, **bars)


def _named(label: str, replicas: int) -> dict[str, Any]:
    return {"name": label, "legendgroup": label, "showlegend": replicas == 1}


def _filled(text: str) -> str:
    """Text with its paragraphs filled anew, now that numbers have their lengths; tables and headings as they are."""
    pieces = re.split(r"(\n{2,})", text)
    prose = [not piece.lstrip("\n").startswith(("|", "#", "!")) for piece in pieces]
    return "".join(_wrapped(piece) if fits else piece for piece, fits in zip(pieces, prose, strict=True))


def _wrapped(piece: str) -> str:
    words = piece.strip("\n")
    before, _, after = piece.partition(words) if words else (piece, "", "")
    return before + textwrap.fill(words, 120, break_long_words=False, break_on_hyphens=False) + after


def _memory(rows: Sequence[Row], models: Mapping[str, Any]) -> Iterator[str]:
    names = [*ARMS] * 2
    yield from _heading(
        ["model", "ranks", *(_short(name) for name in names[:4]), *(f"{_short(n)}, recomputing" for n in names[4:])]
    )
    for model, world, replicas in _places(rows, models):
        cells = []
        for recompute in (False, True):
            arms = _row(rows, model, world, replicas, recompute)
            peaks = [arms[name]["peak"] if name in arms else None for name in ARMS]
            cells += ["" if peak is None else _fitting(peak) for peak in peaks]
        yield _line([model, _ranks(world, replicas), *cells])


def _categories(rows: Sequence[Row], world: int) -> Iterator[str]:
    pairs = [(_row(rows, SHOWN, world, 1, recompute), recompute) for recompute in (False, True)]
    columns = [(arms[name], recompute) for arms, recompute in pairs for name in (BASELINE, ALL)]
    yield from _heading(["", *(_short(row["arm"]) + (", recomputing" if again else "") for row, again in columns)])
    for kind in KINDS[:-1]:
        yield _line([kind, *(f"{row['at_peak'].get(kind, 0) / 2**30:.2f}" for row, _ in columns)])
    rest = [row["peak"] - sum(row["at_peak"].get(kind, 0) for kind in KINDS[:-1]) for row, _ in columns]
    yield _line(["temporaries and rest", *(f"{size / 2**30:.2f}" for size in rest)])
    yield _line(["**in all**", *(f"**{row['peak'] / 2**30:.2f}**" for row, _ in columns)])


def _wire(rows: Sequence[Row], models: Mapping[str, Any]) -> Iterator[str]:
    yield from _heading([
        "model", "ranks", "gathered, bf16", "FP8", "ratio", "gradients, bf16", "FP8", "ratio", "between copies",
        "in all, bf16", "all FP8", "ratio",
    ])  # fmt: skip
    for model, world, replicas in _places(rows, models):
        arms = _row(rows, model, world, replicas, True)
        cells = []
        totals = [0.0, 0.0]
        for ops in (("all-gather",), ("reduce-scatter", "all-to-all"), ("all-reduce",)):
            sent = [_sent(arms[name], ops) for name in (BASELINE, ALL)]
            totals = [total + part for total, part in zip(totals, sent, strict=True)]
            if ops[0] == "all-reduce":
                cells.append(_gb(sent[0]) if sent[0] else "")
            else:
                cells += [_gb(sent[0]), _gb(sent[1]), f"{sent[1] / sent[0]:.3f}"]
        yield _line([model, _ranks(world, replicas), *cells, *map(_gb, totals), f"{totals[1] / totals[0]:.3f}"])


def _links(rows: Sequence[Row], models: Mapping[str, Any], rates: Rates) -> Iterator[str]:
    routes = [route for route in ROUTES if route[0] != PLAIN]
    yield from _heading(["model", "ranks", "Gb/s between", *(_route(*route) for route in routes)])
    for model, world, replicas in _places(rows, models):
        arms = _row(rows, model, world, replicas, True)
        inside = world <= 8
        for between in rates.between[:1] if inside else rates.between:
            steps = [step(arms[name], models[model]["facts"], rates, between, staging) for name, staging in routes]
            link = "one machine" if inside else f"{between / 1e9:g}"
            yield _line([model, _ranks(world, replicas), link, *(f"{each.communication:.2f}" for each in steps)])


def _steps(rows: Sequence[Row], models: Mapping[str, Any], rates: Rates, world: int) -> Iterator[str]:
    yield from _heading(["model", "ranks", "Gb/s between", *(_route(*route) for route in ROUTES)])
    for model, replicas, between, steps in _stepping(rows, models, rates, world):
        cells = [f"{each.total:.2f} ({each.exposed:.2f})" for each in steps]
        yield _line([model, _ranks(world, replicas), f"{between / 1e9:g}", *cells])


def _tokens(rows: Sequence[Row], models: Mapping[str, Any], rates: Rates, world: int) -> Iterator[str]:
    yield from _heading(["model", "ranks", "Gb/s between", *(_route(*route) for route in ROUTES)])
    for model, replicas, between, steps in _stepping(rows, models, rates, world):
        cells = [f"{each.tokens:,.0f}" for each in steps]
        yield _line([model, _ranks(world, replicas), f"{between / 1e9:g}", *cells])


def _stepping(rows: Sequence[Row], models: Mapping[str, Any], rates: Rates, world: int) -> Iterator[tuple[Any, ...]]:
    for model, size, replicas in _places(rows, models):
        if size == world:
            arms = _row(rows, model, world, replicas, True)
            for between in rates.between:
                facts = models[model]["facts"]
                steps = [step(arms[name], facts, rates, between, staging) for name, staging in ROUTES]
                yield model, replicas, between, steps


def _places(rows: Sequence[Row], models: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    places = {(row["model"], row["world"], row["replicas"]) for row in rows}
    order = list(models)
    return sorted(places, key=lambda place: (order.index(place[0]), *place[1:]))


def _row(rows: Sequence[Row], model: str, world: int, replicas: int, recompute: bool) -> dict[str, Row]:
    """Rows of all arms for a place."""
    place = model, world, replicas, recompute
    return {r["arm"]: r for r in rows if (r["model"], r["world"], r["replicas"], r["recompute"]) == place}


def _sent(row: Row, ops: Sequence[str]) -> float:
    return sum(sent(call) for call in row["wire"] if call["op"] in ops)


def _leaving(rows: Sequence[Row], world: int) -> float:
    """FP8 gradients that leave a machine over those of a ring in bf16: of each of its 8 GPUs, not of all together."""
    arms = _row(rows, SHOWN, world, 1, True)
    fp8, bf16 = (_sent(arms[name], ("reduce-scatter", "all-to-all")) for name in (ALL, BASELINE))
    return 8 * fp8 / bf16


def _outside(facts: Row) -> float:
    return 1.0 - float(facts["converted"]) / float(facts["parameters"])


def _fitting(size: int) -> str:
    small, large = CARDS.values()
    gib = size / 2**30
    return f"**{gib:.1f}**" if gib <= small else f"{gib:.1f}" if gib <= large else f"({gib:.0f})"


def _short(name: str) -> str:
    level, _, wire = name.partition(", ")
    return f"`{level}`" + (f", {wire}" if wire else "")


def _route(name: str, staging: str) -> str:
    return _short(name) + (f", {staging}" if name == ALL else "")


def _ranks(world: int, replicas: int) -> str:
    return str(world) if replicas == 1 else f"{replicas} × {world // replicas}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"


def _heading(cells: Sequence[str]) -> Iterator[str]:
    yield _line(cells)
    yield "|" + "".join("---|" if index < 1 else "---:|" for index in range(len(cells))) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"
