"""What one linear, and the seven linears of a Llama block, cost the host: microseconds, launches, dispatches, calls.

CPU time, the best of many short samples that rows take in turn, without what an empty autograd graph costs.
"""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import octavo
from benchmarks.arms import TORCHAO, importable, to_torchao
from benchmarks.compiled.block import Mlp, Norm
from benchmarks.host import COUNTS, Row
from benchmarks.host.stub import Stub
from octavo.kernels.gemm import SCALED_MM

SIZE = EXPERT = 16
SIZES = {"blockwise": 512, "mxfp8": 128}  # Whole blocks, and scales that need no padding
SAMPLE_S = 1e-3
Step = Callable[[], Any]

RECIPES = tuple(octavo.RECIPES)
BY_TRITON = {f"{recipe}, products by Triton": recipe for recipe in ("rowwise", "blockwise")}
THEIRS = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
NO_KERNEL = {
    "empty", "empty_strided", "empty_like", "new_empty", "view", "view_as", "as_strided", "t", "transpose", "slice",
    "detach", "expand", "reshape", "_unsafe_view", "alias", "narrow", "select", "unsqueeze", "to", "_to_copy",
    "linear", "matmul", "contiguous", "resolve_conj", "resolve_neg", "lift_fresh", "result_type", "squeeze", "ones",
    "zeros", "permute", "unbind", "split", "is_nonzero", "item", "_local_scalar_dense", "expand_as",
}  # fmt: skip
"""Operations that start nothing on a GPU, or do so by calling others."""
ONE_KERNEL = {"mm", "addmm", "sum", "linalg_vector_norm", "amax", "cat"}
"""Operations that call others on a CPU, and start one kernel on a GPU."""


class Block(nn.Module):
    """The seven linears of a Llama block, with sums and a product between them instead of attention and SiLU."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            setattr(self, name, _linear())

    def forward(self, x: Tensor) -> Tensor:
        h = self.o(self.q(x) + self.k(x) + self.v(x))
        out: Tensor = self.down(self.gate(h) * self.up(h))
        return out


class NormedBlock(nn.Module):
    """A Llama block with its norms, its gated MLP and its residuals, and sums instead of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.post, self.mlp = _norm(), _norm(), _mlp()
        for name in ("q", "k", "v", "o"):
            setattr(self, name, _linear())

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.o(self.q(y) + self.k(y) + self.v(y))
        out: Tensor = x + self.mlp(self.post(x))
        return out


class Experts(nn.Module):
    """Four experts of Mixtral, by Transformers' grouped products; two for each token, the same in each pass."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": EXPERT, "intermediate_size": EXPERT, "num_local_experts": 4, "num_experts_per_tok": 2}
        config = MixtralConfig(**sizes)
        config._experts_implementation = "grouped_mm"
        self.experts, self.in_features = MixtralExperts(config).to(torch.bfloat16), EXPERT
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        self.ids = torch.arange(2 * EXPERT).view(EXPERT, 2) % 4
        self.weights = torch.full((EXPERT, 2), 0.5, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.ids, self.weights)  # type: ignore[no-any-return]


def _linear(bias: bool = False, recipe: str = "") -> nn.Linear:
    size = SIZES.get(recipe, SIZE)
    return nn.Linear(size, size, bias=bias, dtype=torch.bfloat16)


def _norm() -> nn.Module:
    return Norm(SIZE, "cpu")


def _mlp() -> nn.Module:
    return Mlp(_linear(), _linear(), _linear())


def arms(names: tuple[str, ...] = ()) -> dict[str, tuple[str, Callable[[], nn.Module]]]:
    """Return what is measured, by name: the row that it is compared with, and what makes it."""
    made: dict[str, tuple[str, Callable[[], nn.Module]]] = {"bf16": ("bf16", _linear)}
    by_backend = {recipe: recipe for recipe in RECIPES} | BY_TRITON
    made |= {name: ("bf16", lambda r=r: _converted(_linear(recipe=r), r)) for name, r in by_backend.items()}
    made["bf16 bias"] = ("bf16 bias", lambda: _linear(True))
    made["rowwise bias"] = ("bf16 bias", lambda: _converted(_linear(True), "rowwise"))
    made["bf16 block"] = ("bf16 block", Block)
    made["block"] = ("bf16 block", lambda: _converted(Block(), "rowwise"))
    made["block keep_weights"] = ("bf16 block", lambda: _converted(Block(), "rowwise", keep_weights=True))
    made["bf16 llama block"] = ("bf16 llama block", NormedBlock)
    made["fused llama block"] = ("bf16 llama block", lambda: _fused(NormedBlock()))
    made["bf16 norm"], made["fused norm"] = ("bf16 norm", _norm), ("bf16 norm", lambda: _fused(_norm()))
    made["bf16 mlp"], made["fused mlp"] = ("bf16 mlp", _mlp), ("bf16 mlp", lambda: _fused(_mlp()))
    made["llama block"] = ("bf16 llama block", lambda: _converted(NormedBlock(), "rowwise"))
    made["bf16 experts"] = ("bf16 experts", Experts)
    made["experts"] = ("bf16 experts", lambda: _converted(Experts(), "rowwise"))
    if importable(TORCHAO):
        made |= {f"torchao {recipe}": ("bf16", lambda r=recipe: to_torchao(_linear(), r)) for recipe in THEIRS}
    if not names:
        return made
    return {name: arm for name, arm in made.items() if name in names or name in {made[n][0] for n in names}}


def _converted(module: nn.Module, recipe: str, **options: Any) -> nn.Module:
    return octavo.convert(module, recipe, device="cpu", verbose=False, **options)


def _fused(module: nn.Module) -> nn.Module:
    return octavo.convert(module, precision=octavo.Precision(matmul="bf16", activations="fused"), verbose=False)


def steps(module: nn.Module) -> tuple[Step, Step]:
    size = getattr(module, "in_features", SIZE)
    x = torch.randn(size, size, dtype=torch.bfloat16).requires_grad_()
    g = torch.randn(size, size, dtype=torch.bfloat16)
    leaves = (x, *module.parameters())

    def both() -> None:
        module(x.view_as(x)).backward(g)
        for leaf in leaves:  # as zero_grad does: gradients are not added up
            leaf.grad = None

    return lambda: module(x.view_as(x)), both


def counts(stub: Stub, name: str, make: Callable[[], nn.Module]) -> Row:
    _, both = steps(make())
    _, empty = steps(nn.Identity())
    for _ in range(24):  # an equalized layer measures in passes 0, 1, 2, 4, 8, 16 and 32; see also Readers.unread
        both()
    before = stub.launches
    both()
    launches = stub.launches - before
    dispatches, kernels = _dispatches(both)
    base, _ = _dispatches(empty)
    return {
        "name": name, "launches": launches, "kernels": launches + kernels,
        "dispatches": dispatches - base, "python_calls": _python_calls(both) - _python_calls(empty),
    }  # fmt: skip


def _dispatches(step: Step) -> tuple[int, int]:
    """Count dispatched operations and the kernels that they would start, by the profiler: a mode would change them."""
    with torch.autograd.profiler.profile() as profile:
        step()
    events = [event for event in profile.function_events or () if "::" in event.name and "autograd" not in event.name]
    return len(events), sum(_kernels(event) for event in events if event.cpu_parent not in events)


def _kernels(event: Any) -> int:
    name = event.name.removeprefix("aten::")
    if name in ONE_KERNEL:
        return 1
    below = sum(_kernels(child) for child in event.cpu_children)
    return below or int(name not in NO_KERNEL and not name.startswith("octavo::"))


def _python_calls(step: Step) -> int:
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def times(makes: list[Callable[[], nn.Module]], repetitions: int) -> list[Row]:
    made = [steps(make()) for make in (nn.Identity, *makes)]
    empty, *totals = best_us([both for _, both in made], repetitions)  # first: brings layers to the steady state
    empty_forward, *forwards = best_us([forward for forward, _ in made], repetitions)
    return [
        {"forward_us": round(forward - empty_forward, 1), "total_us": round(total - empty, 1)}
        for forward, total in zip(forwards, totals, strict=True)
    ]


def best_us(steps: list[Step], repetitions: int) -> list[float]:
    calls, best = [], [float("inf")] * len(steps)
    for step in steps:
        for _ in range(10):  # an equalized layer measures in passes 0, 1, 2, 4 and 8
            step()
        start = time.process_time()
        step()
        calls.append(max(1, min(100, int(SAMPLE_S / (time.process_time() - start)))))
    for _ in range(repetitions):
        for index, (step, count) in enumerate(zip(steps, calls, strict=True)):
            start = time.process_time()
            for _ in range(count):
                step()
            best[index] = min(best[index], (time.process_time() - start) / count)
    return [1e6 * seconds for seconds in best]


def measure(stub: Stub, names: tuple[str, ...], repetitions: int, *, timed: bool) -> list[Row]:
    """Measure the arms of these names, or all, each in turns with what it is compared with; print them."""
    chosen, rows = arms(names), []
    print(f"{'':<28} forward  total µs   × bf16  launches   kernels  dispatch     calls")
    for name, (base, make) in chosen.items():
        with SCALED_MM.force("triton") if name in BY_TRITON else nullcontext():
            row = counts(stub, name, make)
            if timed:
                pair = {base: chosen[base][1], name: make}
                timings = dict(zip(pair, times(list(pair.values()), repetitions), strict=True))
                row |= {**timings[name], "ratio": round(timings[name]["total_us"] / timings[base]["total_us"], 2)}
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row: Row) -> str:
    timed = f"{row['forward_us']:8.1f} {row['total_us']:9.1f} {row['ratio']:6.2f} ×" if "ratio" in row else " " * 26
    return f"{row['name']:<28} {timed}{''.join(f'{row[key]:10}' for key in COUNTS)}"
