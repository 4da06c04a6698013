"""Predict the time of collectives, and the traffic of sharded data parallelism. A model; nothing local is measured.

A group of W ranks has p of them on each of M machines. N is the size of the whole tensor: the result of an all-gather,
the input of a reduce-scatter or an all-to-all. Links reach a share of their rate, in both directions at once.

    all-gather, reduce-scatter   max( N·(W−1)/W / inside, N·(M−1)/M / (p · between) )
    all-reduce                   twice that
    all-to-all                   max( N·(p−1)/W / inside, N·(W−p)/W / between )
    all-to-all in two stages     N·(p−1)/p / inside + N/p·(M−1)/M / between
    latency of each              (p−1) · hop inside + (M−1) · hop between

`inside` and `between` are bytes/s of one GPU. A ring that visits the GPUs of a machine one after the other leaves the
machine once, with partial sums, and p rings share the work so that each GPU's link to other machines carries 1/p. An
all-to-all adds nothing on the way: all p GPUs send everything. FP8 gradients use an all-to-all, so across machines they
send half the bytes of a ring but take p/2 times its time. Two stages, inside a machine first (ZeRO++, arXiv 2306.10209,
section 3.3), repair that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from octavo.numerics.recipe import Recipe
from octavo.planner.roofline import LinearCall

GPUS_PER_MACHINE = 8  # Assumed number of GPUs of a machine

FP8_BYTES_PER_ELEMENT = 1.0 + 4 / 128  # Bytes per element of an FP8 message, including scales of groups of 128

Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links between GPUs."""

    inside: float  # Bytes/s that collectives reach between GPUs of a machine, per GPU and direction
    between: float  # The same between machines
    hop_inside: float = 0.0  # Seconds from one GPU of a machine to the next
    hop_between: float = 0.0  # Seconds from one machine to the next


def collective(op: Collective, whole: float, links: Links, *, ranks: int, apart: int = 1, calls: int = 1) -> float:
    """Return the seconds of collectives, run one after the other."""
    local = min(ranks, max(1, GPUS_PER_MACHINE // apart))
    machines = ranks // local
    if op == "all-to-all":
        transfer = max(whole * (local - 1) / ranks / links.inside, whole * (ranks - local) / ranks / links.between)
    else:
        slow = whole * (machines - 1) / machines / (local * links.between)
        transfer = max(whole * (ranks - 1) / ranks / links.inside, slow) if local > 1 else slow
    once = transfer + calls * ((local - 1) * links.hop_inside + (machines - 1) * links.hop_between)
    return 2 * once if op == "all-reduce" else once


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of a model's data parallelism per micro-batch."""

    weights: float  # Bytes of all weights as gathered
    gradients: float  # Bytes of all gradients as scattered
    summed: float  # Bytes of one shard's gradients, as the copies of the shard reduce them
    fp8_gradients: bool = False  # Whether gradients travel by an all-to-all in FP8


def bytes_saved_by_fp8_gather(
    calls: Mapping[str, tuple[LinearCall, ...]], recipes: Mapping[str, Recipe | None], *, resident: bool = False,
    trained: bool = True,
) -> float:  # fmt: skip
    """Return the bytes saved by gathering the weights of converted layers as FP8 and scales."""
    saved = 0.0
    for name, of_one in calls.items():
        recipe = recipes.get(name)
        if recipe is not None and ((resident and not of_one[0].wgrad) or (trained and recipe.supports_fp8_gather)):
            weights = of_one if of_one[0].experts > 1 else of_one[:1]  # of experts, two
            saved += sum(call.experts * (call.n * call.k - 4 * call.n) for call in weights)
    return saved
