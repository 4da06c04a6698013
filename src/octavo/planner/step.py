"""Predict the time of a step from a trace of one forward: linears by the roofline, the rest simply (docs/planner.md).

Collectives. A group of W ranks has p of them on each of M machines. N is the size of the whole tensor: the result of
an all-gather, the input of a reduce-scatter or an all-to-all; `inside` and `between` are bytes/s of one GPU. A ring
leaves a machine once, with partial sums, and p rings share its links; an all-to-all adds nothing up on the way.

    all-gather, reduce-scatter   max( N·(W−1)/W / inside, N·(M−1)/M / (p · between) ); an all-reduce twice that
    all-to-all                   max( N·(p−1)/W / inside, N·(W−p)/W / between )

Pipelines. Each rank computes the actions of torch's schedule in their order, none at the same time as another:

    F  forward of a micro-batch        after F of the stage before it, and its message
    B  backward                        after B of the stage behind it, and its message
    I  gradients of inputs only        as B; half of its time
    W  gradients of weights            after I; the other half
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Protocol, runtime_checkable

from octavo.numerics import Precision
from octavo.numerics.plan import Plan
from octavo.numerics.recipe import Recipe
from octavo.numerics.suggestions import grouped
from octavo.optim.adamw import ADAMW
from octavo.planner.devices import Gpu
from octavo.planner.roofline import FUSED_OPERATIONS, Cost, LinearCall, bf16_linear, fp8_linear, memory_time, total
from octavo.planner.trace import Trace

GPUS_PER_MACHINE = 8  # Assumed number of GPUs of a machine
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
    def reshard_after_forward(self) -> bool: ...
    @property
    def cpu_offload(self) -> bool: ...
    @property
    def fp8_comm(self) -> str: ...

    def sizes(self, world_size: int) -> tuple[int, int]:
        """Return (copies, ranks of each) for a world size; raise ValueError if they do not divide it."""


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    gpus: int = 1  # Number of GPUs, each with its own batch
    copies: int = 1  # Copies of the model, each shared by `gpus / copies` GPUs (FSDP2)
    tp: int = 1  # GPUs that share each linear layer
    cp: int = 1  # GPUs that share each sequence
    ep: int = 1  # GPUs that share the experts of each layer
    pp: int = 1  # GPUs of a pipeline
    schedule: str = "1F1B"  # Schedule of the pipeline, a name of torch's
    keeps_gathered: bool = False  # Whether gathered weights stay from forward to backward (ZeRO-2)
    fp8_gather: bool = False  # Whether the weights of converted layers are gathered in FP8
    resident: bool = False  # Whether frozen weights of converted layers are resident, and gathered, in FP8
    fp8_reduce: bool = False  # Whether gradients are communicated in FP8
    reduce_bytes: int = 4  # Bytes per element of gradients that are communicated and reduced in another dtype
    micro_batches: int = 1  # Forwards and backwards per step
    eager: bool = True  # Without torch.compile
    recompute: Recompute = CHECKPOINTING["none"]  # Activation checkpointing
    optimizer_bytes: float = BF16_OPTIMIZER  # Per trained parameter, moved by a step of the optimizer
    bf16_optimizer_bytes: float = BF16_OPTIMIZER  # The same of the bf16 step
    optimizer_flops: float = 0.0  # Of the optimizer's products, as Muon's, for the layers of a stage

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
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def layout_settings(gpus: int, layout: ParallelLayout | None, *, apart: int = 1) -> dict[str, Any]:
    """Return the `StepConfig` fields of a layout, with the FP8 communication that `octavo.parallelize` would choose."""
    # `"auto"` gathers in FP8 if weights cross machines of `GPUS_PER_MACHINE` GPUs, and sends gradients in FP8 if each
    # of these GPUs is on another machine: if GPUs that share layers are between them.
    if not is_count(gpus):
        raise ValueError(f"gpus is an integer of 1 or more; got {gpus!r}")
    if layout is None:
        return {"gpus": gpus, "fp8_gather": gpus > GPUS_PER_MACHINE}
    if not isinstance(layout, ParallelLayout):
        problem = f"parallel is an octavo.parallel.Parallel: shards, copies, or both (FSDP2, DDP, HSDP); got {layout!r}"
        raise TypeError(f"{problem}. Tensor, sequence, pipeline and expert parallelism are not predicted")
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


def check_gathered(plan: Plan, parallel: ParallelLayout | None) -> None:
    """Raise ValueError if weights shall be gathered in FP8 but their recipe cannot, as parallelize does."""
    gathers = parallel is not None and parallel.fp8_comm in ("on", "gather")
    recipes = {row.recipe.name for row in plan.decisions.values() if row.recipe and not row.recipe.supports_fp8_gather}
    if gathers and recipes and parallel is not None:
        given = f"fp8_comm={parallel.fp8_comm!r} with recipe {', '.join(sorted(recipes))}"
        remedy = "Nearest: recipe 'rowwise'; or fp8_comm='off'"
        raise ValueError(f"{given}: its weights cannot be gathered in FP8. {remedy}")


# Collectives

FP8_BYTES_PER_ELEMENT = 1.0 + 4 / 128  # Bytes per element of an FP8 message, including scales of groups of 128

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
        return replace(self, bytes=self.bytes * count, seconds=self.seconds * count)


def collective(
    gpu: Gpu, kind: str, op: str, whole: float, *, ranks: int, apart: int = 1, backward: bool = False
) -> Sent:  # fmt: skip
    """Predict a collective on a tensor of `whole` bytes, between GPUs that are `apart` in rank."""
    local = min(ranks, max(1, GPUS_PER_MACHINE // apart))
    machines, twice = ranks // local, 2 if op == "all-reduce" else 1
    if op == "all-to-all":
        inside, between = whole * (local - 1) / ranks / gpu.link, whole * (ranks - local) / ranks / gpu.network
        seconds = max(inside, between)
    else:
        seconds = whole * (machines - 1) / machines / (local * gpu.network)
        seconds = max(whole * (ranks - 1) / ranks / gpu.link, seconds) if local > 1 else seconds
    share = (ranks - 1) / ranks * twice
    return Sent(kind=kind, bytes=whole * share, seconds=twice * seconds, backward=backward)


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


def exchanged(gpu: Gpu, messages: Mapping[tuple[str, bool], int], *, ranks: int) -> list[Sent]:
    """Return what a GPU sends of tokens, by operation and direction, to neighbours in rank."""
    return [
        collective(
            gpu, f"tokens, {op}, {'backward' if backward else 'forward'}", op,
            size * (ranks if op == "all-gather" else 1), ranks=ranks, backward=backward,
        )
        for (op, backward), size in messages.items()
    ]  # fmt: skip


def sharded(gpu: Gpu, trace: Trace, config: StepConfig, saved: float) -> tuple[list[Sent], list[Sent]]:
    """Return FSDP2's gathers of all weights, less the bytes `saved` by FP8, and its reductions of all gradients."""
    # 1 / `ep` of the ranks share the parameters of their experts, and all ranks the others.
    experts = trace.experts / max(trace.parameters, 1) if config.ep > 1 else 0.0
    gathers, reductions = [], []
    parts = ((1 - experts, config.shards, config.tp), (experts, config.shards // config.ep, config.tp * config.ep))
    for part, ranks, apart in parts:
        weights, trained = part * (2.0 * trace.parameters - saved), part * trace.trained
        if weights and ranks > 1:
            gathers.append(collective(gpu, WEIGHTS, "all-gather", weights, ranks=ranks, apart=apart))
            op = "all-to-all" if config.fp8_reduce else "reduce-scatter"
            size = trained * FP8_BYTES_PER_ELEMENT if config.fp8_reduce else trained * config.reduce_bytes
            reductions.append(collective(gpu, GRADIENTS, op, size, ranks=ranks, apart=apart, backward=True))
    if config.copies > 1:  # of a shard, in the dtype of the reduction; of whole gradients, as DDP sends them
        of_shard = (1 - experts) * trace.trained * config.reduce_bytes / config.shards
        whole = (1 - experts) * trace.trained * (FP8_BYTES_PER_ELEMENT if config.fp8_reduce else 2)
        size, apart = of_shard if config.shards > 1 else whole, config.shards * config.tp
        reductions.append(collective(gpu, COPIES, "all-reduce", size, ranks=config.copies, apart=apart, backward=True))
    return gathers, reductions


# Time of a step


@dataclass(frozen=True, kw_only=True)
class StepTime:
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
        return float(sum(getattr(self, part) for part in PARTS))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the share of the bf16 peak that the model's own operations use."""
        return self.flops / self.seconds / self.peak

    def to_json(self) -> dict[str, float]:
        return asdict(self) | {name: getattr(self, name) for name in ("seconds", "tokens_per_second", "mfu")}


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
    messages: Mapping[tuple[str, bool], int] = {},
) -> StepTime:  # fmt: skip
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
    gathers, reductions = sharded(gpu, trace, step_config, saved if in_fp8 else 0.0)
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
    gathered = gathers * (1 if pipelined or step_config.keeps_gathered else 2)
    return StepTime(
        linears=micro_batches * (linears.total + recompute.linears * linears.forward),
        attention=micro_batches * attention * (3.5 + recompute.attention),
        products=micro_batches * products * (3 + recompute.linears), rest=micro_batches * rest * (3 + recompute.rest),
        optimizer=optimizer, communication=micro_batches * exposed, waiting=micro_batches * waiting,
        tokens=tokens * micro_batches * step_config.batches * step_config.cp,
        flops=model_flops * micro_batches * step_config.gpus, peak=rate * step_config.gpus,
        forward=forward + waiting / 3, backward=backward + waiting * 2 / 3,
        sent=tuple(
            row.times(1 if pipelined and row.kind in (GRADIENTS, COPIES) else micro_batches)
            for row in (*tokens_sent, *gathered, *reductions)
        ),
    )  # fmt: skip


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


# Pipelines


@dataclass(frozen=True)
class Action:
    """One computation of a rank: "F", "B", "I" or "W" of a stage and a micro-batch."""

    kind: str
    stage: int
    micro_batch: int


@cache
def schedule_actions(schedule: str, ranks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    from octavo.runtime.torch_compat import get_schedule_ops  # slow import

    rows = [list(_actions(row)) for row in get_schedule_ops(schedule, ranks, micro_batches)]
    if schedule == "1F1B":  # torch 2.13 numbers the forwards of the last rank from 1, and runs them from 0
        forwards = iter(range(micro_batches))
        rows[-1] = [Action("F", a.stage, next(forwards)) if a.kind == "F" else a for a in rows[-1]]
    return tuple(map(tuple, rows))


def _actions(row: Sequence[Any]) -> Iterator[Action]:
    for action in row:
        if action is None:
            continue
        if action.sub_actions:
            yield from _actions(action.sub_actions)
        elif action.computation_type.value in "FBIW":
            yield Action(action.computation_type.value, action.stage_index, action.microbatch_index)


def simulate(
    actions: Sequence[Sequence[Action]], forward: Sequence[float], backward: Sequence[float], message: float = 0.0
) -> float:
    """Return the seconds until all ranks have finished."""
    owner = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    ends: dict[tuple[str, int, int], float] = {}
    last, clocks, positions = len(forward) - 1, [0.0] * len(actions), [0] * len(actions)

    def ready(action: Action) -> float | None:
        """When the inputs of an action have arrived; None if they are not computed yet."""
        stage, batch = action.stage, action.micro_batch
        if action.kind == "W":
            return ends.get(("I", stage, batch))
        if action.kind == "F" and stage == 0:
            return 0.0
        behind = ("F", stage, batch) if stage == last else ("∂", stage + 1, batch)
        source = ("F", stage - 1, batch) if action.kind == "F" else behind
        sent = ends.get(source)
        return None if sent is None else sent + (message if owner[source[1]] != owner[stage] else 0.0)

    while any(position < len(row) for position, row in zip(positions, actions, strict=True)):
        moved = False
        for rank, row in enumerate(actions):
            while positions[rank] < len(row) and (start := ready(action := row[positions[rank]])) is not None:
                share = {"F": 1.0, "B": 1.0, "I": 0.5, "W": 0.5}[action.kind]
                seconds = share * (forward if action.kind == "F" else backward)[action.stage]
                clocks[rank] = max(clocks[rank], start) + seconds
                ends[action.kind, action.stage, action.micro_batch] = clocks[rank]
                if action.kind in "BI":
                    ends["∂", action.stage, action.micro_batch] = clocks[rank]
                positions[rank] += 1
                moved = True
        assert moved, "the schedule waits for itself"
    return max(clocks)


def most_in_flight(row: Sequence[Action]) -> dict[tuple[str, int], dict[int, int]]:
    """Return how many other micro-batches' activations a rank holds at most, by stage, in "F" and "B" of a stage."""
    held: dict[int, int] = {action.stage: 0 for action in row}
    most: dict[tuple[str, int], dict[int, int]] = {}
    for action in row:
        others = dict(held)
        if action.kind != "F":
            others[action.stage] -= 1
        key = ("F" if action.kind == "F" else "B", action.stage)
        if key not in most or sum(others.values()) > sum(most[key].values()):
            most[key] = others
        held[action.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
    return most


def pipeline_time(gpu: Gpu, stages: Sequence[StepTime], step_config: StepConfig, message_bytes: float) -> StepTime:
    """Predict the time of a step of a pipeline from the times of its stages, each as if it were alone."""
    # The parts are those of the rank that computes longest, and the bubble is the rest of the step.
    ranks, micro_batches = step_config.pp, step_config.micro_batches
    actions = schedule_actions(step_config.schedule, ranks, micro_batches)
    inside = step_config.gpus // ranks * ranks <= GPUS_PER_MACHINE
    message = message_bytes / (gpu.link if inside else gpu.network)
    seconds = simulate(actions, [s.forward for s in stages], [s.backward for s in stages], message)
    totals = []
    for row in actions:
        own = sorted({action.stage for action in row})
        sums = {part: sum(getattr(stages[index], part) for index in own) for part in PARTS}
        totals.append((sum(sums.values()) - sums["optimizer"], own, sums))
    busiest, own, sums = max(totals, key=lambda total: total[0])
    alike = grouped(((row.kind, row.backward), row) for index in own for row in stages[index].sent).values()
    rows = [replace(s[0], bytes=sum(r.bytes for r in s), seconds=sum(r.seconds for r in s)) for s in alike]
    owner = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    between = []
    for step in (1, -1):  # to the stage ahead in forward, to the one behind in backward
        pairs = [[(i, i + step) for i in {a.stage for a in row} if 0 <= i + step < len(stages)] for row in actions]
        most = max(sum(owner[one] != owner[other] for one, other in of_rank) for of_rank in pairs)
        sent = Sent(kind=STAGES, bytes=message_bytes, seconds=message, backward=step < 0)
        between.append(sent.times(most * micro_batches))
    return replace(
        stages[0], **(sums | {"bubble": max(0.0, seconds - busiest)}),
        flops=sum(stage.flops for stage in stages) / ranks, forward=0.0, backward=0.0,
        sent=(*rows, *between),
    )  # fmt: skip
