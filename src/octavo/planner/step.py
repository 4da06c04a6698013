"""The time of a training step, from a trace of one forward: linears by the roofline, the rest by simple models.

    linears          `octavo.planner.roofline`, as decided
    attention        operations / (bf16 peak · attention efficiency); backward 2.5 times forward
    other products   max(operations / large bf16 products, bytes / bandwidth); backward twice forward
    the rest         bytes / bandwidth, at least a launch each: every operation by itself in eager code, fused between
                     products when compiled; backward twice forward
    recomputation    forward once more of what activation checkpointing does not keep
    optimizer        bytes per parameter of a rank's shard / bandwidth
    communication    of sharded data parallelism: gather in forward, gather and scatter in backward, copies added up
                     (`octavo.planner.wire`); what computing of the same direction does not hide
    host             eager code takes at least its launches, backward two for one of forward

Left out: the data, clipping, stragglers, clocks that fall under load, and that collectives take multiprocessors away.
So a predicted step is too short; and where what is left out is there in bf16 too, a predicted gain is too large.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, runtime_checkable

from octavo.numerics.recipe import Recipe
from octavo.planner.decide import total
from octavo.planner.devices import Gpu
from octavo.planner.roofline import Cost, bf16_linear, fp8_linear, moving
from octavo.planner.trace import Trace
from octavo.planner.wire import MACHINE, MESSAGE, Links, Traffic, collective

OPTIMIZER_BYTES = {"fp32": 28.0, "fp8": 14.2}
"""Moved per parameter by AdamW: moments and master in float32, read and written, a bf16 gradient and parameter; and
with FP8 moments and 16 bits of a master."""


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Shares of forward that run again in backward."""

    linears: float = 0.0
    attention: float = 0.0
    rest: float = 0.0


CHECKPOINTING = {
    "none": Recompute(),
    "selective": Recompute(rest=1.0),
    "full": Recompute(linears=1.0, attention=1.0, rest=1.0),
}
"""By the names of `precision.checkpointing`."""


@runtime_checkable
class Layout(Protocol):
    """What the planner reads of an `octavo.parallel.Parallel`."""

    @property
    def reshard_after_forward(self) -> bool: ...  # noqa: D102

    @property
    def cpu_offload(self) -> bool: ...  # noqa: D102

    @property
    def fp8_comm(self) -> str: ...  # noqa: D102

    def sizes(self, world: int) -> tuple[int, int]:
        """(copies, ranks of each) for a world; raises ValueError where they do not divide it."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a step is run.

    Attributes:
        gpus: All GPUs, each with a batch of its own.
        copies: Of the model, each shared by `gpus / copies` of them (FSDP2).
        keeps_gathered: Whether gathered weights stay from forward to backward (ZeRO-2).
        fp8_gather: Whether the weights of converted linears are gathered in FP8.
        fp8_reduce: Whether gradients travel in FP8.
        reduce_bytes: Bytes per element of gradients that travel otherwise, and are added up.
        micro_batches: Forwards and backwards of a step.
        eager: Without torch.compile.
        recompute: Activation checkpointing.
        states: Moments of AdamW, a key of `OPTIMIZER_BYTES`.
    """

    gpus: int = 1
    copies: int = 1
    keeps_gathered: bool = False
    fp8_gather: bool = False
    fp8_reduce: bool = False
    reduce_bytes: int = 4
    micro_batches: int = 1
    eager: bool = True
    recompute: Recompute = CHECKPOINTING["none"]
    states: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("gpus", "micro_batches"):
            value = getattr(self, name)
            if not is_count(value):
                raise ValueError(f"{name} is a number of 1 or more; got {value!r}")

    @property
    def shards(self) -> int:
        """GPUs that share one copy of the model."""
        return self.gpus // self.copies

    @property
    def plain(self) -> "Setting":
        """The same in bf16: on the wire, and with float32 moments."""
        return replace(self, fp8_gather=False, fp8_reduce=False, states="fp32")


def is_count(value: object) -> bool:
    """Whether a value is a whole number of 1 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def spread(gpus: int, layout: Layout | None) -> dict[str, Any]:
    """The settings that say how a model is spread over GPUs, with FP8 on the wire as `octavo.parallelize` decides it.

    `"auto"` gathers in FP8 where weights leave a machine, of `MACHINE` GPUs. Gradients it sends in FP8 where each
    machine has one rank, which is not what a machine is here.

    Raises:
        ValueError: For copies that do not divide the GPUs, or no number of them; and for copies in host memory.
        TypeError: For a layout of another kind.
    """
    if not is_count(gpus):
        raise ValueError(f"gpus is a number of 1 or more; got {gpus!r}")
    if layout is None:
        return {"gpus": gpus, "fp8_gather": gpus > MACHINE}
    if not isinstance(layout, Layout):
        raise TypeError(
            f"parallel is an octavo.parallel.Parallel: shards, copies, or both (FSDP2, DDP, HSDP); got {layout!r}. "
            "Tensor, sequence, pipeline and expert parallelism are not predicted"
        )
    copies, shards = layout.sizes(gpus)
    if layout.cpu_offload and copies > 1 and shards == 1:
        raise ValueError("cpu_offload needs shards, and this layout has copies only: give it a dp_shard above 1")
    gather = layout.fp8_comm in ("on", "gather") or (layout.fp8_comm == "auto" and gpus > MACHINE)
    return {
        "gpus": gpus, "copies": copies, "keeps_gathered": not layout.reshard_after_forward,
        "fp8_gather": gather and shards > 1, "fp8_reduce": layout.fp8_comm == "on" and gpus > 1,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted seconds of a step, by what they go to.

    Attributes:
        linears: Products of linears, and quantizing.
        attention: Fused attention.
        products: Other matrix products.
        rest: Everything else in forward and backward.
        optimizer: AdamW.
        communication: What computing does not hide.
        waiting: For the host, where eager launches take longer than what they launch.
        tokens: Tokens of a step of all GPUs.
        flops: Operations of the model of all GPUs, without recomputation.
        peak: bf16 FLOP/s of all GPUs.
    """

    linears: float
    attention: float
    products: float
    rest: float
    optimizer: float
    communication: float
    waiting: float
    tokens: int
    flops: float
    peak: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(getattr(self, part) for part in PARTS)

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Share of the bf16 peak that the model's own operations take."""
        return self.flops / self.seconds / self.peak

    def to_json(self) -> dict[str, float]:
        """Plain dictionary."""
        return asdict(self) | {
            "seconds": self.seconds, "tokens_per_second": self.tokens_per_second, "mfu": self.mfu,
        }  # fmt: skip


PARTS = ("linears", "attention", "products", "rest", "optimizer", "communication", "waiting")


def linear_costs(gpu: Gpu, trace: Trace, recipes: Mapping[str, Recipe | None]) -> list[Cost]:
    """The cost of every call of a linear; those without a recipe are in bf16."""
    costs = []
    for name, calls in trace.calls.items():
        recipe = recipes.get(name)
        costs += [bf16_linear(gpu, c) if recipe is None else fp8_linear(gpu, c, recipe) for c in calls]
    return costs


def step_time(
    gpu: Gpu, trace: Trace, costs: Sequence[Cost], setting: Setting, tokens: int, saved: float = 0.0
) -> StepTime:
    """Predict a step.

    Args:
        gpu: Each GPU.
        trace: One forward of one micro-batch.
        costs: Of every linear in it, as `linear_costs` gives them.
        setting: How the step is run.
        tokens: Of one micro-batch of one GPU.
        saved: Bytes that gathering in FP8 saves, as `saved_by_gathering` gives them.
    """
    again, linears = setting.recompute, total(costs)
    rate = gpu.bf16_tflops * 1e12
    attention = trace.attention / (rate * gpu.attention_efficiency)
    products = sum(max(p.flops / (rate * gpu.bf16_efficiency), p.bytes / gpu.bandwidth) for p in trace.products)
    rest = sum(moving(gpu, size) for size in (trace.rest if setting.eager else trace.regions))
    forward = linears.forward + attention + products + rest
    backward = (
        linears.backward + 2.5 * attention + 2 * (products + rest)
        + again.linears * (linears.forward + products) + again.attention * attention + again.rest * rest
    )  # fmt: skip
    exposed = _exposed(gpu, _traffic(trace, setting, saved), setting, forward, backward)
    # Frozen parameters are gathered too; only trained ones are updated.
    optimizer = trace.trained / setting.shards * OPTIMIZER_BYTES[setting.states] / gpu.bandwidth
    launches = linears.launches + 3 * (len(trace.rest) + len(trace.products))
    host = launches * gpu.host_us * 1e-6 if setting.eager else 0.0
    many = setting.micro_batches
    model_flops = 3 * trace.attention + 3 * sum(p.flops for p in trace.products)
    model_flops += sum(2 * m * n * k for calls in trace.calls.values() for c in calls for m, n, k in c.products)
    return StepTime(
        linears=many * (linears.total + again.linears * linears.forward),
        attention=many * attention * (3.5 + again.attention),
        products=many * products * (3 + again.linears),
        rest=many * rest * (3 + again.rest),
        optimizer=optimizer,
        communication=many * exposed,
        waiting=many * max(0.0, host - forward - backward),
        tokens=tokens * many * setting.gpus,
        flops=model_flops * many * setting.gpus,
        peak=rate * setting.gpus,
    )


def _traffic(trace: Trace, setting: Setting, saved: float) -> Traffic:
    weights = 2.0 * trace.parameters - (saved if setting.fp8_gather else 0.0)
    reduced = trace.trained * setting.reduce_bytes
    copied = trace.trained * (MESSAGE if setting.fp8_reduce else 2)
    return Traffic(
        weights=weights,
        gradients=trace.trained * MESSAGE if setting.fp8_reduce else reduced,
        summed=reduced / setting.shards if setting.shards > 1 else copied,
        fp8_gradients=setting.fp8_reduce,
    )


def _exposed(gpu: Gpu, traffic: Traffic, setting: Setting, forward: float, backward: float) -> float:
    """Seconds of collectives that computing does not hide."""
    links = Links(inside=gpu.link_gbs * 1e9 * gpu.link_efficiency, between=gpu.network_gbs * 1e9 * gpu.link_efficiency)
    shards, copies = setting.shards, setting.copies
    gather = collective("all-gather", traffic.weights, links, ranks=shards)
    scatter = collective(
        "all-to-all" if traffic.fp8_gradients else "reduce-scatter", traffic.gradients, links, ranks=shards
    )
    between = collective("all-reduce", traffic.summed, links, ranks=copies, apart=shards)
    again = 0.0 if setting.keeps_gathered else gather
    return max(0.0, gather - forward) + max(0.0, again + scatter + between - backward)
