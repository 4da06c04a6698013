"""How long collectives would take, and how much of it computing would hide: a model, nothing of it measured.

Collectives take the time of `octavo.planner.collective_cost`, as in the planner; FP8 gradients, an all-to-all, also in
two stages (`STAGED`), inside a machine first.

A step is computing, plus what no computing hides. Forward hides its gathers, backward its gathers and scatters, up to
its own duration. Nothing hides the first two gathers (the rest of the model, and the first block) and the last two
scatters (the first block, and the rest). Computing is matrix products and attention at the rates given; everything
else that a step does is left out, which makes less hidden than would be.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.planner.collective_cost import Links, collective

Row = Mapping[str, Any]
BASELINE = "bf16"
FLAT, STAGED = "flat", "two stages"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What is assumed of the hardware.

    Attributes:
        bf16: FLOP/s that bf16 products reach, attention included.
        fp8: FLOP/s that FP8 products reach, quantizing included.
        inside: Bytes/s of a GPU's links inside its machine, each direction.
        between: Bits/s of a GPU's link to other machines, each direction, for each kind of network.
        efficiency: Share of a link's rate that collectives reach.
        hop_inside: Seconds from one GPU of a machine to the next.
        hop_between: Seconds from one machine to the next.
    """

    bf16: float = 400e12
    fp8: float = 600e12
    inside: float = 450e9
    between: tuple[float, ...] = (400e9, 200e9, 100e9)
    efficiency: float = 0.8
    hop_inside: float = 3e-6
    hop_between: float = 14e-6


def sent(call: Row) -> float:
    """Bytes that a rank sends for the calls of a row of `wire`."""
    ranks = call["ranks"]
    if call["op"] == "all-gather":
        return float(call["bytes"] * (ranks - 1))
    return float(call["bytes"] * (ranks - 1) / ranks * (2 if call["op"] == "all-reduce" else 1))


def seconds(call: Row, rates: Rates, between: float, staging: str = FLAT, *, edge: bool = False) -> float:
    """Time of the calls of a row of `wire`, one after the other; of those that nothing hides, with `edge`."""
    calls, sizes = (call["edge_calls"], call["edge_bytes"]) if edge else (call["calls"], call["bytes"])
    links = Links(
        inside=rates.inside * rates.efficiency, between=between / 8 * rates.efficiency,
        hop_inside=rates.hop_inside, hop_between=rates.hop_between,
    )  # fmt: skip
    whole = sizes * call["ranks"] if call["op"] == "all-gather" else sizes
    return collective(
        call["op"], whole, links, ranks=call["ranks"], apart=call["apart"], calls=calls, staged=staging == STAGED
    )


def computing(facts: Row, rates: Rates, *, fp8: bool, recompute: bool) -> tuple[float, float]:
    """Seconds of forward and of backward, for the facts of a model.

    Forward takes 2 FLOP per weight and token, and causal attention 2·s² for s tokens per head and dimension of it;
    backward takes twice that, and the blocks' forward once more where they are recomputed.
    """
    tokens = facts["tokens"]
    blocks = 2 * tokens * facts["converted"] / (rates.fp8 if fp8 else rates.bf16)
    attention = 2 * tokens**2 * facts["attention"] / rates.bf16
    head = 2 * tokens * facts["head"] / rates.bf16
    again = blocks + attention if recompute else 0.0
    return blocks + attention + head, 2 * (blocks + attention + head) + again


@dataclass(frozen=True)
class Step:
    """A step in seconds: of computing, of all collectives together, and of those that computing does not hide.

    `tokens` is the number of tokens of a rank from which on it would hide all that can be hidden.
    """

    compute: float
    communication: float
    exposed: float
    tokens: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.exposed


def step(row: Row, facts: Row, rates: Rates, between: float, staging: str = FLAT) -> Step:
    """The modelled step of a traced row."""
    compute = computing(facts, rates, fp8=row["arm"] != BASELINE, recompute=row["recompute"])
    exposed = everything = ratio = 0.0
    for backward, work in zip((False, True), compute, strict=True):
        calls = [call for call in row["wire"] if call["backward"] == backward]
        whole = _sum(seconds(call, rates, between, staging) for call in calls)
        edges = _sum(seconds(call, rates, between, staging, edge=True) for call in calls)
        everything += whole
        exposed += edges + max(0.0, whole - edges - work)
        ratio = max(ratio, (whole - edges) / work)
    return Step(sum(compute), everything, exposed, facts["tokens"] * ratio)


def _sum(values: Iterable[float]) -> float:
    return sum(values, 0.0)
