"""Predict the time of a training step from a trace of one forward: linear layers by the roofline, the rest by simple
models.

    linears          `octavo.planner.roofline`, as decided
    attention        operations / (bf16 peak · attention efficiency); backward 2.5 times forward
    other products   max(operations / large bf16 products, bytes / bandwidth); backward twice forward
    the rest         bytes / bandwidth, at least one launch each: every operation separately in eager mode, fused
                     between
                     products when compiled; backward twice forward
    recomputation    forward again, for what activation checkpointing discards
    optimizer        bytes per parameter of a rank's shard / bandwidth
    communication    of sharded data parallelism: gather in forward; gather, scatter and reduction over copies in
                     backward (`octavo.planner.collective_cost`); only what compute of the same direction does not hide
    host             eager mode takes at least the host's time: that of linears (`octavo.planner.host_time`), and of
                     each other operation, with two in backward for each in forward

Left out: data loading, clipping, stragglers, clocks that drop under load, and the multiprocessors that collectives use.
So a predicted step is too short, and since bf16 pays these costs too, a predicted gain can be too large.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, runtime_checkable

from octavo.numerics.recipe import Recipe
from octavo.planner.collective_cost import FP8_BYTES_PER_ELEMENT, GPUS_PER_MACHINE, Links, Traffic, collective
from octavo.planner.decide import total
from octavo.planner.devices import Gpu
from octavo.planner.roofline import Cost, bf16_linear, fp8_linear, memory_time
from octavo.planner.trace import Trace

OPTIMIZER_BYTES = {"fp32": 28.0, "fp8": 14.2}
"""Bytes that AdamW moves per parameter: float32 moments and master, read and written, a bf16 gradient and parameter;
and the same with FP8 moments and a 16-bit master.
"""


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
"""Recomputation by the values of `precision.checkpointing`."""


@runtime_checkable
class ParallelLayout(Protocol):
    """The fields of `octavo.parallel.Parallel` that the planner reads."""

    @property
    def reshard_after_forward(self) -> bool: ...  # noqa: D102

    @property
    def cpu_offload(self) -> bool: ...  # noqa: D102

    @property
    def fp8_comm(self) -> str: ...  # noqa: D102

    def sizes(self, world_size: int) -> tuple[int, int]:
        """Return (copies, ranks of each) for a world size; raise ValueError if they do not divide it."""


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """How a step runs.

    Attributes:
        gpus: Number of GPUs, each with its own batch.
        copies: Copies of the model, each shared by `gpus / copies` GPUs (FSDP2).
        keeps_gathered: Whether gathered weights stay from forward to backward (ZeRO-2).
        fp8_gather: Whether the weights of converted layers are gathered in FP8.
        fp8_reduce: Whether gradients are communicated in FP8.
        reduce_bytes: Bytes per element of gradients that are communicated and reduced in another dtype.
        micro_batches: Forwards and backwards per step.
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
                raise ValueError(f"{name} is an integer of 1 or more; got {value!r}")

    @property
    def shards(self) -> int:
        """GPUs that share one copy of the model."""
        return self.gpus // self.copies

    @property
    def bf16(self) -> "StepConfig":
        """The same step with bf16 communication and float32 moments."""
        return replace(self, fp8_gather=False, fp8_reduce=False, states="fp32")


def is_count(value: object) -> bool:
    """Return whether a value is an integer of 1 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def layout_settings(gpus: int, layout: ParallelLayout | None) -> dict[str, Any]:
    """Return the `StepConfig` fields that describe how a model is distributed over GPUs, with the FP8 communication
    that `octavo.parallelize` would choose.

    `"auto"` gathers in FP8 if weights cross machines of `GPUS_PER_MACHINE` GPUs. It sends gradients in FP8 only with
    one rank per machine, which does not occur here.

    Raises:
        ValueError: If the copies do not divide the GPUs, `gpus` is not a count, or copies without shards are offloaded.
        TypeError: For another type of layout.
    """
    if not is_count(gpus):
        raise ValueError(f"gpus is an integer of 1 or more; got {gpus!r}")
    if layout is None:
        return {"gpus": gpus, "fp8_gather": gpus > GPUS_PER_MACHINE}
    if not isinstance(layout, ParallelLayout):
        raise TypeError(
            f"parallel is an octavo.parallel.Parallel: shards, copies, or both (FSDP2, DDP, HSDP); got {layout!r}. "
            "Tensor, sequence, pipeline and expert parallelism are not predicted"
        )
    copies, shards = layout.sizes(gpus)
    if layout.cpu_offload and copies > 1 and shards == 1:
        raise ValueError("cpu_offload needs shards, and this layout has copies only: set dp_shard above 1")
    gather = layout.fp8_comm in ("on", "gather") or (layout.fp8_comm == "auto" and gpus > GPUS_PER_MACHINE)
    return {
        "gpus": gpus, "copies": copies, "keeps_gathered": not layout.reshard_after_forward,
        "fp8_gather": gather and shards > 1, "fp8_reduce": layout.fp8_comm == "on" and gpus > 1,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted seconds of a step by part.

    Attributes:
        linears: Products of linear layers, and quantization.
        attention: Fused attention.
        products: Other matrix products.
        rest: Everything else in forward and backward.
        optimizer: AdamW.
        communication: Communication that compute does not hide.
        waiting: Waiting for the host, in eager mode.
        tokens: Tokens per step of all GPUs.
        flops: Operations of the model on all GPUs, without recomputation.
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
        """Sum of the parts."""
        return float(sum(getattr(self, part) for part in PARTS))

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the share of the bf16 peak that the model's own operations use."""
        return self.flops / self.seconds / self.peak

    def to_json(self) -> dict[str, float]:
        """Return a plain dictionary."""
        return asdict(self) | {
            "seconds": self.seconds, "tokens_per_second": self.tokens_per_second, "mfu": self.mfu,
        }  # fmt: skip


PARTS = ("linears", "attention", "products", "rest", "optimizer", "communication", "waiting")


def linear_costs(gpu: Gpu, trace: Trace, recipes: Mapping[str, Recipe | None]) -> list[Cost]:
    """Return the cost of every call of a linear layer; layers without a recipe run in bf16."""
    costs = []
    for name, calls in trace.calls.items():
        recipe = recipes.get(name)
        costs += [bf16_linear(gpu, c) if recipe is None else fp8_linear(gpu, c, recipe) for c in calls]
    return costs


def step_time(
    gpu: Gpu, trace: Trace, costs: Sequence[Cost], step_config: StepConfig, tokens: int, saved: float = 0.0
) -> StepTime:
    """Predict the time of a step.

    Args:
        gpu: Each GPU.
        trace: One forward of one micro-batch.
        costs: Costs of all its linear layers, as `linear_costs` returns them.
        step_config: How the step runs.
        tokens: Tokens of one micro-batch on one GPU.
        saved: Bytes that gathering in FP8 saves, as `bytes_saved_by_fp8_gather` returns them.
    """
    recompute, linears = step_config.recompute, total(costs)
    rate = gpu.bf16_tflops * 1e12
    attention = trace.attention / (rate * gpu.attention_efficiency)
    products = sum(max(p.flops / (rate * gpu.bf16_efficiency), p.bytes / gpu.bandwidth) for p in trace.products)
    rest = sum(memory_time(gpu, size) for size in (trace.rest if step_config.eager else trace.regions))
    forward = linears.forward + attention + products + rest
    backward = (
        linears.backward + 2.5 * attention + 2 * (products + rest)
        + recompute.linears * (linears.forward + products) + recompute.attention * attention + recompute.rest * rest
    )  # fmt: skip
    exposed = _exposed(gpu, _traffic(trace, step_config, saved), step_config, forward, backward)
    # Frozen parameters are gathered too, but not updated.
    optimizer = trace.trained / step_config.shards * OPTIMIZER_BYTES[step_config.states] / gpu.bandwidth
    others = 3 * (len(trace.rest) + len(trace.products)) * gpu.host_us * 1e-6
    host = linears.host + others if step_config.eager else 0.0
    micro_batches = step_config.micro_batches
    model_flops = 3 * trace.attention + 3 * sum(p.flops for p in trace.products)
    model_flops += sum(2 * m * n * k for calls in trace.calls.values() for c in calls for m, n, k in c.products)
    return StepTime(
        linears=micro_batches * (linears.total + recompute.linears * linears.forward),
        attention=micro_batches * attention * (3.5 + recompute.attention),
        products=micro_batches * products * (3 + recompute.linears),
        rest=micro_batches * rest * (3 + recompute.rest),
        optimizer=optimizer,
        communication=micro_batches * exposed,
        waiting=micro_batches * max(0.0, host - forward - backward),
        tokens=tokens * micro_batches * step_config.gpus,
        flops=model_flops * micro_batches * step_config.gpus,
        peak=rate * step_config.gpus,
    )


def _traffic(trace: Trace, step_config: StepConfig, saved: float) -> Traffic:
    weights = 2.0 * trace.parameters - (saved if step_config.fp8_gather else 0.0)
    reduced = trace.trained * step_config.reduce_bytes
    copied = trace.trained * (FP8_BYTES_PER_ELEMENT if step_config.fp8_reduce else 2)
    return Traffic(
        weights=weights,
        gradients=trace.trained * FP8_BYTES_PER_ELEMENT if step_config.fp8_reduce else reduced,
        summed=reduced / step_config.shards if step_config.shards > 1 else copied,
        fp8_gradients=step_config.fp8_reduce,
    )


def _exposed(gpu: Gpu, traffic: Traffic, step_config: StepConfig, forward: float, backward: float) -> float:
    """Return the seconds of collectives that compute does not hide."""
    links = Links(inside=gpu.link_gbs * 1e9 * gpu.link_efficiency, between=gpu.network_gbs * 1e9 * gpu.link_efficiency)
    shards, copies = step_config.shards, step_config.copies
    gather = collective("all-gather", traffic.weights, links, ranks=shards)
    scatter = collective(
        "all-to-all" if traffic.fp8_gradients else "reduce-scatter", traffic.gradients, links, ranks=shards
    )
    between = collective("all-reduce", traffic.summed, links, ranks=copies, apart=shards)
    second_gather = 0.0 if step_config.keeps_gathered else gather
    return max(0.0, gather - forward) + max(0.0, second_gather + scatter + between - backward)
