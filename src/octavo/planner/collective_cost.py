"""Predict the time of collectives, and what a GPU sends in a step, by kind. A model; nothing local is measured.

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

Bytes sent are (W − 1)/W of the whole tensor of a group of W ranks, and twice that in an all-reduce. Compute waits for
collectives of tokens (tensor, context and expert parallelism), as a traced step hands them to torch; it hides those of
weights, gathered by FSDP2 for forward and for backward, and of gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from octavo.numerics.recipe import Recipe
from octavo.planner.devices import Gpu
from octavo.planner.roofline import LinearCall
from octavo.planner.timeline import Message
from octavo.planner.trace import Trace

GPUS_PER_MACHINE = 8  # Assumed number of GPUs of a machine
FP8_BYTES_PER_ELEMENT = 1.0 + 4 / 128  # Bytes per element of an FP8 message, including scales of groups of 128

Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
WEIGHTS, GRADIENTS, COPIES, STAGES = "weights gathered", "gradients scattered", "gradients of copies", "stage messages"
"""Kinds of `Sent` beside those of tokens."""


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


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What one GPU sends."""

    kind: str  # Name in tables
    bytes: float  # Bytes sent
    seconds: float  # Seconds that sending takes
    backward: bool = False  # Whether it is sent in backward

    def times(self, count: int) -> "Sent":
        """Return the same, sent several times."""
        return replace(self, bytes=self.bytes * count, seconds=self.seconds * count)


def links_of(gpu: Gpu) -> Links:
    """Return the rates that collectives reach between GPUs of this kind."""
    return Links(inside=gpu.link_gbs * 1e9 * gpu.link_efficiency, between=gpu.network_gbs * 1e9 * gpu.link_efficiency)


def exchanged(gpu: Gpu, messages: Sequence[Message], *, ranks: int) -> list[Sent]:
    """Return what a GPU sends of tokens, by operation and direction, to neighbours in rank."""
    rows: dict[tuple[str, bool], float] = {}
    for message in messages:
        key = message.op, message.backward
        rows[key] = rows.get(key, 0.0) + message.bytes
    return [
        _sent(
            f"tokens, {op}, {'backward' if backward else 'forward'}", op, size * (ranks if op == "all-gather" else 1),
            links_of(gpu), ranks=ranks, backward=backward,
        )
        for (op, backward), size in rows.items()
    ]  # fmt: skip


def traffic(
    trace: Trace, shards: int, *, ep: int, saved: float, fp8_reduce: bool, reduce_bytes: int
) -> tuple[Traffic, Traffic]:
    """Return the traffic of parameters: those that all `shards` share, and those of a rank's experts, which 1 / `ep` of
    them share.
    """
    share = trace.experts / max(trace.parameters, 1) if ep > 1 else 0.0

    def of(part: float, ranks: int) -> Traffic:
        reduced = part * trace.trained * reduce_bytes
        copied = part * trace.trained * (FP8_BYTES_PER_ELEMENT if fp8_reduce else 2)
        return Traffic(
            weights=part * (2.0 * trace.parameters - saved),
            gradients=part * trace.trained * FP8_BYTES_PER_ELEMENT if fp8_reduce else reduced,
            summed=reduced / ranks if ranks > 1 else copied,
            fp8_gradients=fp8_reduce,
        )

    return of(1 - share, shards), of(share, shards // ep)


def sharded(
    gpu: Gpu, parts: tuple[Traffic, Traffic], shards: int, copies: int, *, apart: int, ep: int
) -> tuple[list[Sent], list[Sent]]:
    """Return what FSDP2 sends in one micro-batch: one gather of all weights; the reduction of all gradients."""
    links, gathers, reductions = links_of(gpu), [], []
    for part, ranks, distance in ((parts[0], shards, apart), (parts[1], shards // ep, apart * ep)):
        if part.weights and ranks > 1:
            gathers.append(_sent(WEIGHTS, "all-gather", part.weights, links, ranks=ranks, apart=distance))
            op = "all-to-all" if part.fp8_gradients else "reduce-scatter"
            reductions.append(
                _sent(GRADIENTS, op, part.gradients, links, ranks=ranks, apart=distance, backward=True)
            )  # fmt: skip
    if copies > 1:
        reductions.append(
            _sent(COPIES, "all-reduce", parts[0].summed, links, ranks=copies, apart=shards * apart, backward=True)
        )  # fmt: skip
    return gathers, reductions


def _sent(
    kind: str, op: str, whole: float, links: Links, *, ranks: int, apart: int = 1, backward: bool = False
) -> Sent:  # fmt: skip
    name: Collective = op  # type: ignore[assignment]
    share = (ranks - 1) / ranks * (2 if op == "all-reduce" else 1)
    return Sent(
        kind=kind, bytes=whole * share, seconds=collective(name, whole, links, ranks=ranks, apart=apart),
        backward=backward,
    )  # fmt: skip
