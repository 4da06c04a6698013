"""How long collectives take, and what of sharded data parallelism travels: a model, nothing of it measured.

A group of W ranks has p of them on each of M machines. N is the size of the whole: what an all-gather ends with, what a
reduce-scatter or an all-to-all begins with. Links carry a share of their rate, in both directions at once.

    all-gather, reduce-scatter   max( N·(W−1)/W / inside, N·(M−1)/M / (p · between) )
    all-reduce                   twice that
    all-to-all                   max( N·(p−1)/W / inside, N·(W−p)/W / between )
    all-to-all in two stages     N·(p−1)/p / inside + N/p·(M−1)/M / between
    latency of each              (p−1) · hop inside + (M−1) · hop between

`inside` and `between` are bytes/s of one GPU. A ring that visits a machine's GPUs one after the other leaves it once,
with what is added up already, and p rings share the work so that each GPU's link to other machines carries 1/p. An
all-to-all adds nothing up on the way: all p GPUs send everything that others are to add. FP8 gradients are an
all-to-all, so across machines their bytes are half of a ring's and their time p/2 times it; the two stages, inside a
machine first (ZeRO++, arXiv 2306.10209, section 3.3), repair that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from octavo.numerics.recipe import Recipe
from octavo.planner.roofline import Linear

MACHINE = 8
"""GPUs of a machine."""

MESSAGE = 1.0 + 4 / 128
"""Bytes of an element on the wire in FP8, scales of groups of 128 included."""

Op = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]


@dataclass(frozen=True, kw_only=True)
class Links:
    """What joins GPUs.

    Attributes:
        inside: Bytes/s that collectives reach between GPUs of a machine, of each GPU and direction.
        between: The same between machines.
        hop_inside: Seconds from one GPU of a machine to the next.
        hop_between: Seconds from one machine to the next.
    """

    inside: float
    between: float
    hop_inside: float = 0.0
    hop_between: float = 0.0


def collective(
    op: Op, whole: float, links: Links, *, ranks: int, apart: int = 1, calls: int = 1, staged: bool = False
) -> float:
    """Seconds of collectives, one after the other.

    Args:
        op: Which.
        whole: Bytes of the whole, of all calls together.
        links: What joins the ranks.
        ranks: Of the group.
        apart: From one rank of the group to the next, in GPUs.
        calls: Their number, each of which takes its hops.
        staged: An all-to-all inside each machine first.
    """
    here = min(ranks, max(1, MACHINE // apart))
    machines = ranks // here
    if op == "all-to-all" and staged and here > 1:
        moving = whole * (here - 1) / here / links.inside
        moving += whole / here * (machines - 1) / machines / links.between
    elif op == "all-to-all":
        moving = max(whole * (here - 1) / ranks / links.inside, whole * (ranks - here) / ranks / links.between)
    else:
        slow = whole * (machines - 1) / machines / (here * links.between)
        moving = max(whole * (ranks - 1) / ranks / links.inside, slow) if here > 1 else slow
    once = moving + calls * ((here - 1) * links.hop_inside + (machines - 1) * links.hop_between)
    return 2 * once if op == "all-reduce" else once


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of a model's data parallelism, of one micro-batch.

    Attributes:
        weights: Of all weights, as they are gathered.
        gradients: Of all gradients, as they are scattered.
        summed: Of one shard's gradients, as copies of it add them up.
        fp8_gradients: Whether gradients are an all-to-all in FP8.
    """

    weights: float
    gradients: float
    summed: float
    fp8_gradients: bool = False


def saved_by_gathering(calls: Mapping[str, tuple[Linear, ...]], recipes: Mapping[str, Recipe | None]) -> float:
    """Bytes by which gathered weights shrink where those of converted linears travel as FP8 and scales."""
    saved = 0.0
    for name, of_one in calls.items():
        recipe = recipes.get(name)
        if recipe is not None and recipe.gathers_w:
            saved += of_one[0].n * of_one[0].k - 4 * of_one[0].n
    return saved
