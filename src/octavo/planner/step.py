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
                     each other operation, with two in backward for each in forward; fused norms and gates take more

Left out: data loading, clipping, stragglers, clocks that drop under load, and the multiprocessors that collectives use.
So a predicted step is too short, and since bf16 pays these costs too, a predicted gain can be too large.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, runtime_checkable

from octavo.numerics import Precision
from octavo.numerics.recipe import Recipe
from octavo.optim.adamw import ADAMW
from octavo.planner.collective_cost import COPIES, GPUS_PER_MACHINE, GRADIENTS, Sent, exchanged, sharded, traffic
from octavo.planner.decide import total
from octavo.planner.devices import Gpu
from octavo.planner.host_time import FUSED_OPERATIONS
from octavo.planner.roofline import Cost, bf16_linear, fp8_linear, memory_time
from octavo.planner.timeline import Message
from octavo.planner.trace import Trace

BF16_OPTIMIZER = ADAMW.step_bytes(Precision())  # Bytes per bf16 parameter that AdamW moves with fp32 states and masters


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Shares of forward that run again in backward."""

    linears: float = 0.0
    attention: float = 0.0
    rest: float = 0.0


CHECKPOINTING = {  # Recomputation by the values of `precision.checkpointing`
    "none": Recompute(),
    "selective": Recompute(rest=1.0),
    "full": Recompute(linears=1.0, attention=1.0, rest=1.0),
}


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
    """How a step runs."""

    gpus: int = 1  # Number of GPUs, each with its own batch
    copies: int = 1  # Copies of the model, each shared by `gpus / copies` GPUs (FSDP2)
    tp: int = 1  # GPUs that share each linear layer
    cp: int = 1  # GPUs that share each sequence
    ep: int = 1  # GPUs that share the experts of each layer
    pp: int = 1  # GPUs of a pipeline
    schedule: str = "1F1B"  # Schedule of the pipeline, a name of torch's
    keeps_gathered: bool = False  # Whether gathered weights stay from forward to backward (ZeRO-2)
    fp8_gather: bool = False  # Whether the weights of converted layers are gathered in FP8
    # Whether the frozen weights of converted layers are resident in FP8, in which they are gathered too.
    resident: bool = False
    fp8_reduce: bool = False  # Whether gradients are communicated in FP8
    reduce_bytes: int = 4  # Bytes per element of gradients that are communicated and reduced in another dtype
    micro_batches: int = 1  # Forwards and backwards per step
    eager: bool = True  # Without torch.compile
    recompute: Recompute = CHECKPOINTING["none"]  # Activation checkpointing
    optimizer_bytes: float = BF16_OPTIMIZER  # Per trained parameter, moved by a step of the optimizer
    bf16_optimizer_bytes: float = BF16_OPTIMIZER  # The same of the bf16 step
    # FLOPs of the optimizer's products, as of Muon, for the layers of a stage, which its GPUs share; the messages
    # between them are left out.
    optimizer_flops: float = 0.0

    def __post_init__(self) -> None:
        for name in ("gpus", "micro_batches"):
            value = getattr(self, name)
            if not is_count(value):
                raise ValueError(f"{name} is an integer of 1 or more; got {value!r}")

    @property
    def shards(self) -> int:
        """GPUs that share one copy of a GPU's layers (FSDP2)."""
        return self.gpus // (self.copies * self.tp * self.pp)

    @property
    def batches(self) -> int:
        """Groups of GPUs with sequences of their own."""
        return self.gpus // (self.tp * self.cp * self.pp)

    @property
    def bf16(self) -> "StepConfig":
        """The same step with bf16 communication and optimizer; experts in bf16 are not distributed."""
        return replace(
            self, fp8_gather=False, resident=False, fp8_reduce=False, optimizer_bytes=self.bf16_optimizer_bytes, ep=1
        )


def is_count(value: object) -> bool:
    """Return whether a value is an integer of 1 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def layout_settings(gpus: int, layout: ParallelLayout | None, *, apart: int = 1) -> dict[str, Any]:
    """Return the `StepConfig` fields that describe how a model is distributed over GPUs, with the FP8 communication
    that `octavo.parallelize` would choose.
    """
    # `"auto"` gathers in FP8 if weights cross machines of `GPUS_PER_MACHINE` GPUs, and sends gradients in FP8 if each
    # of these GPUs is on another machine: if GPUs that share layers are between them.
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
    crosses = layout.fp8_comm == "auto" and gpus > 1 and gpus * apart > GPUS_PER_MACHINE
    gather = layout.fp8_comm in ("on", "gather") or crosses
    reduce = layout.fp8_comm == "on" or (crosses and apart >= GPUS_PER_MACHINE)
    return {
        "gpus": gpus, "copies": copies, "keeps_gathered": not layout.reshard_after_forward,
        "fp8_gather": gather and shards > 1, "fp8_reduce": reduce and gpus > 1,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted seconds of a step by part."""

    linears: float  # Products of linear layers, and quantization
    attention: float  # Fused attention
    products: float  # Other matrix products
    rest: float  # Everything else in forward and backward
    optimizer: float  # The optimizer, and the norm of the gradient
    communication: float  # Communication that compute does not hide
    waiting: float  # Waiting for the host, in eager mode
    tokens: int  # Tokens per step of all GPUs
    flops: float  # Operations of the model on all GPUs, without recomputation
    peak: float  # bf16 FLOP/s of all GPUs
    bubble: float = 0.0  # Waiting for other stages of a pipeline
    forward: float = 0.0  # One micro-batch's forward, with waiting
    backward: float = 0.0  # Its backward
    sent: tuple[Sent, ...] = ()  # What each GPU sends in a step

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


PARTS = ("linears", "attention", "products", "rest", "optimizer", "communication", "waiting", "bubble")


def linear_costs(gpu: Gpu, trace: Trace, recipes: Mapping[str, Recipe | None]) -> list[Cost]:
    """Return the cost of every call of a linear layer; layers without a recipe run in bf16."""
    costs = []
    for name, calls in trace.calls.items():
        recipe = recipes.get(name)
        costs += [bf16_linear(gpu, c) if recipe is None else fp8_linear(gpu, c, recipe) for c in calls]
    return costs


def step_time(
    gpu: Gpu, trace: Trace, costs: Sequence[Cost], step_config: StepConfig, tokens: int, saved: float = 0.0,
    messages: Sequence[Message] = (),
) -> StepTime:  # fmt: skip
    """Predict the time of a step."""
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
    micro_batches, pipelined = step_config.micro_batches, step_config.pp > 1
    in_fp8 = step_config.fp8_gather or step_config.resident
    of_shards = traffic(
        trace, step_config.shards, ep=step_config.ep, saved=saved if in_fp8 else 0.0,
        fp8_reduce=step_config.fp8_reduce, reduce_bytes=step_config.reduce_bytes,
    )  # fmt: skip
    gathers, reductions = sharded(
        gpu, of_shards, step_config.shards, step_config.copies, apart=step_config.tp, ep=step_config.ep
    )
    tokens_sent = exchanged(gpu, messages, ranks=step_config.tp * step_config.cp * step_config.ep)
    exposed = _exposed(gathers, reductions, step_config, forward, backward)
    forward += sum(row.seconds for row in tokens_sent if not row.backward)
    backward += sum(row.seconds for row in tokens_sent if row.backward)
    exposed += sum(row.seconds for row in tokens_sent)
    # Frozen parameters are gathered too, but not updated.
    optimizer = trace.trained / step_config.shards * step_config.optimizer_bytes / gpu.bandwidth
    optimizer += step_config.optimizer_flops / step_config.shards / (gpu.bf16_tflops * 1e12 * gpu.bf16_efficiency)
    operations = len(trace.rest) + len(trace.products) + (FUSED_OPERATIONS - 1) * trace.fused
    others = 3 * operations * gpu.host_us * 1e-6
    host = linears.host + others if step_config.eager else 0.0
    waiting = max(0.0, host - forward - backward)
    model_flops = 3 * trace.attention + 3 * sum(p.flops for p in trace.products)
    model_flops += sum(2 * m * n * k for calls in trace.calls.values() for c in calls for m, n, k in c.products)
    return StepTime(
        linears=micro_batches * (linears.total + recompute.linears * linears.forward),
        attention=micro_batches * attention * (3.5 + recompute.attention),
        products=micro_batches * products * (3 + recompute.linears),
        rest=micro_batches * rest * (3 + recompute.rest),
        optimizer=optimizer,
        communication=micro_batches * exposed,
        waiting=micro_batches * waiting,
        tokens=tokens * micro_batches * step_config.batches * step_config.cp,
        flops=model_flops * micro_batches * step_config.gpus,
        peak=rate * step_config.gpus,
        forward=forward + waiting / 3,
        backward=backward + waiting * 2 / 3,
        sent=tuple(
            row.times(1 if pipelined and row.kind in (GRADIENTS, COPIES) else micro_batches)
            for row in (*tokens_sent, *gathers * (1 if pipelined or step_config.keeps_gathered else 2), *reductions)
        ),
    )


def _exposed(
    gathers: Sequence[Sent], reductions: Sequence[Sent], step_config: StepConfig, forward: float, backward: float
) -> float:
    """Return the seconds of a micro-batch's gathers and reductions that compute does not hide."""
    # In a pipeline, gradients are reduced once in a step, and weights stay gathered from backward to the next forward.
    gather, reduction = (sum(row.seconds for row in rows) for rows in (gathers, reductions))
    if step_config.pp > 1:
        return max(0.0, gather + reduction / step_config.micro_batches - backward)
    second_gather = 0.0 if step_config.keeps_gathered else gather
    return max(0.0, gather - forward) + max(0.0, second_gather + reduction - backward)
