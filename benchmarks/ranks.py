"""Ranks on one GPU, beside the same cases over Gloo on the CPU: a world of one under NCCL, and two processes over Gloo
with CUDA tensors. Collectives agree to the byte, gradients and losses but for the order of sums.
"""

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from benchmarks.processes import Processes
from benchmarks.session import Row, begin, parser
from octavo import comm
from octavo.kernels.conformance.mismatches import difference, low_sqnr
from octavo.parallel import Fp8AllReduce, Parallel, parallelize
from octavo.tensor import local_tensor

SAME = "as on the CPU"
VOCABULARY, WIDTH, TOKENS, STEPS = 256, 128, 64, 3
DECIBELS = 20.0  # SQNR that gradients must have against the CPU's. FP8 has about 26 dB of its own.
LOSS = 0.01  # Relative difference that losses may have
PATIENCE_S, START_S = 120.0, 300.0
"""For one case, after which its processes are ended; for the first one, which waits until all have started."""
Results = dict[str, Tensor]


def model_on(device: torch.device, recipe: str | None) -> nn.Module:
    """Two blocks between an embedding and a head, converted or not: the same on every rank."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(2)
    ]
    model: nn.Module = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(*blocks), nn.Linear(WIDTH, VOCABULARY, bias=False)
    )
    model = model.bfloat16().to(device)
    return octavo.convert(model, recipe, verbose=False) if recipe else model


def loss_of(model: nn.Module, step: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(VOCABULARY, (TOKENS + 1,), generator=generator).to(device)
    return F.cross_entropy(model(tokens[:-1]).float(), tokens[1:])


def whole(value: Any) -> Tensor:
    tensor: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return tensor.detach().float().cpu()


def trained(model: nn.Module, device: torch.device) -> Results:
    """Losses of some steps of Octavo's AdamW, averaged over ranks, and the gradients of the first."""
    optimizer = octavo.AdamW(model.parameters(), lr=1e-3)
    results: Results = {}
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, device)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if step == 0:
            named = ((name.removeprefix("module."), p.grad) for name, p in model.named_parameters())
            results = {f"gradient {name}": whole(grad) for name, grad in named}
        optimizer.step()
        optimizer.zero_grad()
    return results | {"losses": torch.tensor(losses)}


def training(recipe: str | None, device: torch.device, folder: Path, **settings: Any) -> Results:
    if settings.pop("copies", False):
        settings |= {"dp_replicate": dist.get_world_size(), "dp_shard": 1}
    return trained(parallelize(model_on(device, recipe), Parallel(**settings)), device)


def hook(device: torch.device, folder: Path) -> Results:
    model = nn.parallel.DistributedDataParallel(model_on(device, "rowwise"))
    Fp8AllReduce(error_feedback=True).register(model)
    return trained(model, device)


def collectives(device: torch.device, folder: Path, *, streams: bool = False) -> Results:
    """Each FP8 collective in each dtype, odd sizes too; with `streams`, asynchronous ones behind a busy side stream."""
    world, results = dist.get_world_size(), {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        generator = torch.Generator().manual_seed(dist.get_rank())
        source = torch.randn(4 * world, 131, generator=generator).to(dtype)
        side = torch.cuda.Stream(device) if device.type == "cuda" and streams else None
        with torch.cuda.stream(side):  # nothing where it is None
            if side is not None:
                torch.cuda._sleep(50_000_000)  # cycles: the input comes late
            x = source.to(device, non_blocking=True) * 1
            calls: dict[str, Callable[..., Any]] = {
                "all_gather": comm.all_gather, "reduce_scatter": comm.reduce_scatter, "all_reduce": comm.all_reduce,
                "all_to_all": comm.all_to_all_single,
            }  # fmt: skip
            for name, call in calls.items():
                result = call(x, async_op=True).wait() if streams else call(x)
                results[f"exact {name} {str(dtype).removeprefix('torch.')}"] = result
        if side is not None:
            torch.cuda.current_stream(device).wait_stream(side)
    return {name: whole(result) for name, result in results.items()}


def checkpoint(device: torch.device, folder: Path) -> Results:
    """A sharded checkpoint of weights and FP8 states, read back into another model: the bytes of each rank."""
    from octavo.train.checkpoint import shards
    from octavo.train.config.sections import Optim
    from octavo.train.optimizer import Fp8StateOptimizer, parameter_settings

    states = []
    for turn in range(2):
        model = model_on(device, "rowwise")
        optim = Optim(lr=1e-3)
        settings = parameter_settings(model, optim)
        model = parallelize(model, Parallel(fp8_comm="gather"))
        more: Any = {"states": "fp8", "master": "remainder", "fp32_values": {}, "settings": settings}
        optimizer = Fp8StateOptimizer(model, optim, **more)
        if turn == 0:
            loss_of(model, 0, device).backward()
            optimizer.accumulate()
            optimizer.step(1e-3, torch.tensor(1.0), 0)
            shards.write(folder / shards.SHARDS, shards.state_of(model, optimizer))
        else:
            shards.read(folder / shards.SHARDS, model, optimizer)
        state = shards.state_of(model, optimizer)
        states.append({name: whole(local_tensor(value)) for name, value in state.items()})
    written, read = states
    if (wrong := difference(list(written.values()), list(read.values()), list(written))) is not None:
        raise AssertionError(f"read back: {wrong}")
    return {f"weight {name}": value for name, value in read.items() if name.startswith("model.")}


def graph(device: torch.device, folder: Path) -> Results:
    """A layer's forward and backward and an FP8 all_reduce of its gradient, captured once, replayed on new inputs."""
    torch.manual_seed(0)
    layer: Any = octavo.convert(nn.Linear(WIDTH, WIDTH).bfloat16(), "rowwise", verbose=False).to(device)
    inputs = [torch.randn(TOKENS, WIDTH).bfloat16() * scale for scale in (1.0, 7.0, 0.1)]
    x = inputs[0].to(device)

    def run() -> Tensor:
        (gradient,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
        reduced: Tensor = comm.all_reduce(gradient)
        return reduced

    captured = None
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(device).wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):  # NCCL has a thread that asks
            output = run()
    results = {}
    for number, value in enumerate(inputs):
        x.copy_(value)
        if captured is None:
            output = run()
        else:
            captured.replay()
        results[f"gradient of replay {number}"] = whole(output)
    return results


CASES: dict[str, Callable[..., Results]] = {
    "collectives": collectives,
    "fsdp-on": partial(training, "rowwise", fp8_comm="on"),
    "ddp-hook": hook,
    "streams": partial(collectives, streams=True),
    "checkpoint": checkpoint,
    "graph": graph,
    "fsdp-tensorwise": partial(training, "tensorwise", fp8_comm="gather"),
    "ddp-on": partial(training, "rowwise", fp8_comm="on", copies=True),
    "zero2-gather": partial(training, "rowwise", fp8_comm="gather", reshard_after_forward=False),
    "offload": partial(training, "rowwise", fp8_comm="on", cpu_offload=True),
    "fsdp-bf16": partial(training, None, fp8_comm="off"),
}
"""In order of importance. `graph` needs NCCL: Gloo waits on the host, which cannot be captured."""


def on_rank(case: str, rank: int, world: int, backend: str, device: torch.device, folder: str) -> Results:
    if not dist.is_initialized():
        os.environ["LOCAL_RANK"] = "0"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        options: Any = {"rank": rank, "world_size": world, "timeout": timedelta(seconds=PATIENCE_S)}
        dist.init_process_group(backend, init_method=f"file://{folder}/store", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CASES[case](device, Path(folder) / case)


class Pair:
    """The ranks on the GPU and those of the reference; started again where a case has ended one."""

    def __init__(self, backend: str, world: int, device: torch.device) -> None:
        self.groups = [(Processes(), (world, backend, device)), (Processes(), (world, "gloo", torch.device("cpu")))]
        self.patience = START_S
        for processes, _ in self.groups:
            processes.start(world)

    def measure(self, case: str) -> Row:
        for processes, group in self.groups:
            processes.send([partial(on_rank, case, rank, *group, processes.folder) for rank in range(group[0])])
        answers = [processes.collect(self.patience) for processes, _ in self.groups]
        self.patience = PATIENCE_S
        for _, errors in answers:
            for rank, error in errors.items():
                self.close()
                self.patience = START_S
                raise RuntimeError(f"rank {rank}: {error}")
        actual, expected = (results[0] for results, _ in answers)
        wrong = compared(expected, actual)
        row: Row = {"result": f"WRONG: {wrong}" if wrong else SAME, "tensors": len(expected)}
        if "losses" in actual:
            row |= {"loss": round(float(actual["losses"][-1]), 4), "cpu_loss": round(float(expected["losses"][-1]), 4)}
        return row

    def close(self) -> None:
        for processes, _ in self.groups:
            processes.kill()


def compared(expected: Results, actual: Results) -> str | None:
    if expected.keys() != actual.keys():
        return f"has {sorted(actual.keys() ^ expected.keys())} alone"
    for name, reference in expected.items():
        value = actual[name]
        if name == "losses":
            worst = float(((value - reference) / reference).abs().max())
            if not worst <= LOSS:
                return f"losses {value.tolist()}, on the CPU {reference.tolist()}"
        elif name.startswith("exact"):
            if (text := difference([reference], [value], [name])) is not None:
                return text
        elif (text := low_sqnr([reference], [value], DECIBELS, [name])) is not None:
            return text
    return None


def main(arguments: list[str]) -> None:
    session = begin(parser("ranks", __doc__, "--minutes 1"), arguments)
    backends = {"nccl1": ("cpu:gloo,cuda:nccl", 1), "gloo2": ("gloo", 2)}  # offloading also has tensors on the CPU
    if session.gpu and not dist.is_nccl_available():
        print("this build of torch has no NCCL: its cases are left out")
        del backends["nccl1"]
    pairs = {  # their processes start side by side
        name: Pair(backend if session.gpu else "gloo", world, session.device)
        for name, (backend, world) in backends.items()
    }
    try:
        for case in CASES:
            for name, pair in pairs.items():
                if case != "graph" or name == "nccl1" or not session.gpu:
                    session.attempt({"stage": name, "case": case}, pair.measure, case)
    finally:
        for pair in pairs.values():
            pair.close()
    session.finish(checks=True)
