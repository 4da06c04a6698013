"""What a GPU sends in a step, by kind: bytes and seconds of `octavo.planner.collective_cost`.

    tokens       collectives of tensor, context and expert parallelism, as a traced step hands them to torch; compute
                 waits for them
    weights      gathered by FSDP2 for forward and for backward; compute hides them
    gradients    scattered, and reduced over copies of the shards

Bytes sent are (W − 1)/W of the whole tensor of a group of W ranks, and twice that in an all-reduce.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.planner.collective_cost import FP8_BYTES_PER_ELEMENT, Collective, Links, Traffic, collective
from octavo.planner.devices import Gpu
from octavo.planner.timeline import Message
from octavo.planner.trace import Trace

WEIGHTS, GRADIENTS, COPIES, STAGES = "weights gathered", "gradients scattered", "gradients of copies", "stage messages"
"""Kinds of `Sent` beside those of tokens."""


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
