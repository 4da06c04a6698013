"""One training step taken apart by the profiler (docs/gpu.md), beside what `octavo plan` predicts of the same parts. It
is that of `octavo train` on random tokens. A kernel that Inductor generated belongs to `rest`, whatever it fuses.
"""

import functools
import re
import tomllib
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import record_function

from benchmarks import profiling, run
from benchmarks.arms import by_the_clock, in_turns
from benchmarks.profiling import Kernel
from benchmarks.published import RandomCorpus
from benchmarks.session import Row, Session, begin, parser

SIZES = ("llama-3-8b-width", "0.4B")
LEVELS = ("bf16", "fp8", "fp8+activations+optimizer", "fp8+activations")
PARTS = ("products", "quantizers", "attention", "head", "rest", "accumulation", "clipping", "optimizer")
"""`quantizers` are everything else in an FP8 linear, `accumulation` the gradients of micro-batches added up in fp32."""
PREDICTED = {
    "linears": (("products", "quantizers", "head"), ("linears", "products")), "idle": (("idle",), ("waiting",)),
    **{name: ((name,), (name,)) for name in ("attention", "rest", "optimizer")},
}  # fmt: skip
"""Parts that are predicted: their measured parts, and their fields of `octavo.planner.step.StepTime`."""
WARMUP, STEPS = 4, 4

_ATTENTION = re.compile(r"scaled_dot_product|ScaledDotProduct|flash|fmha|sdpa")
_PRODUCT_OPS = re.compile(r"(aten::_?(mm|addmm|bmm|baddbmm|(scaled_)?(grouped_)?mm)|octavo::\w*mm)(_v2)?")
_PRODUCTS = re.compile(r"gemm|cutlass|nvjet|xmma|cublas|(product|promoted|grouped)_kernel")
_FP8_LINEAR = re.compile(r"octavo::(de)?quantize\w*|_(Planned)?Linear(Function)?(Backward)?")
_QUANTIZERS = re.compile(r"(rows|blocks|maxima|cast|transpose|dequantize)_kernel")


def part(kernel: Kernel) -> str:
    for phase in ("accumulation", "clipping"):
        if phase in kernel.phases:
            return phase
    if "update" in kernel.phases:
        outside = not any(phase.startswith("Optimizer.step") for phase in kernel.phases)
        return "clipping" if outside and "aten::_foreach_mul_" in kernel.stack else "optimizer"
    if any("_ChunkedFunction" in name for name in kernel.stack):
        return "head"
    if any(_ATTENTION.search(name) for name in (*kernel.stack, kernel.name)):
        return "attention"
    if _PRODUCTS.search(kernel.name) or any(_PRODUCT_OPS.fullmatch(name) for name in kernel.stack):
        return "products"
    in_linear = any(_FP8_LINEAR.fullmatch(name.rpartition(": ")[2]) for name in kernel.stack)
    return "quantizers" if in_linear or _QUANTIZERS.fullmatch(kernel.name) else "rest"


def trainer(session: Session, size: run.Size, level: str) -> Any:
    """The trainer of a run, with the phases of a step marked for the profiler."""
    from octavo.train.config.run_config import parse_config
    from octavo.train.trainer import Trainer

    settings = {**size.settings, "run.steps": 1000, "run.device": session.device.type, "precision.level": level}
    settings["run.compile"] = session.options.compile
    config = parse_config(tomllib.loads(run.toml(settings)))
    corpus: Any = RandomCorpus(config.model.config["vocab_size"], config.data.sequence_length)
    made = Trainer(config, corpus, session.device)
    optimizer: Any = made.optimizer
    for phase, name in (("accumulation", "accumulate"), ("clipping", "gradient_squares"), ("update", "step")):
        setattr(optimizer, name, record_function(phase)(getattr(optimizer, name)))
    return made


def take_apart(session: Session, kernels: list[Kernel], wall_ms: float | None) -> Row:
    parts: dict[str, Row] = {name: {"ms": 0.0, "count": 0} for name in PARTS}
    for kernel in kernels:
        one = parts[part(kernel)]
        one["ms"], one["count"] = one["ms"] + kernel.us / 1e3, one["count"] + 1
    busy = profiling.busy_us(kernels) / 1e3
    if wall_ms is not None:
        parts["idle"] = {"ms": max(wall_ms - busy, 0.0), "count": 0}
    for one in parts.values():
        one["ms"] = round(one["ms"], 4)
    return {"parts": parts, "kernel_ms": round(busy, 4) if session.gpu else None, "kernels": len(kernels),
            "profile": profiling.table(kernels, 30)}  # fmt: skip


def predict(session: Session, config: Any, parts: dict[str, Row]) -> Row:
    from octavo.train.run_plan import plan_configured

    gpu = torch.cuda.get_device_name(session.device) if session.gpu else "h100"
    try:
        planned = plan_configured(config, gpu=gpu)
    except Exception as error:  # such as a GPU that the planner does not know: the measurement stays
        return {"predicted": {}, "not_predicted": f"{type(error).__name__}: {error}"}
    rows = {}
    for name, (measured, fields) in PREDICTED.items():
        expected = 1e3 * sum(getattr(planned.time, field) for field in fields)
        rows[name] = {"predicted_ms": round(expected, 4)}
        if session.gpu:
            ms = sum(parts[each]["ms"] for each in measured)
            rows[name] |= {"ms": round(ms, 4), "of_prediction": round(ms / expected, 3) if expected else None}
    return {"predicted": rows, "predicted_wall_ms": round(1e3 * planned.time.seconds, 3)}


def measure(session: Session, size: run.Size, level: str, base: Callable[[], Any]) -> Row:
    bf16 = base()
    own = bf16 if level == "bf16" else trainer(session, size, level)
    for each in {bf16, own}:
        by_the_clock(session, 1 if session.tiny else WARMUP, [each.train_step])
    clock = functools.partial(by_the_clock, session, 1 if session.tiny else STEPS)
    figures = in_turns(session, [bf16.train_step], [own.train_step], clock)
    tokens = own.config.optim.batch * own.config.data.sequence_length
    figures["tokens_per_s"] = round(1e3 * tokens / figures["wall_ms"], 1) if figures["wall_ms"] else None
    figures |= take_apart(session, profiling.record(own.train_step, session.device), figures["wall_ms"])
    return figures | predict(session, own.config, figures["parts"])


def main(arguments: list[str]) -> None:
    options = parser("step", __doc__, "--sizes 0.4B --compile none")
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES, help="sizes to measure; both")
    options.add_argument("--compile", choices=("blocks", "none"), help="as run.compile (blocks)")
    session = begin(options, arguments)
    if session.options.compile is None:  # in rehearsals compilation would take minutes
        session.options.compile = "none" if session.tiny else "blocks"
    levels = LEVELS[:3] if session.options.quick or session.tiny else LEVELS
    sizes, mode = session.options.sizes, "compiled" if session.options.compile == "blocks" else "eager"
    for name in ("tiny",) if session.tiny else sizes[:1] if session.options.quick else sizes:
        size = run.TINY if session.tiny else run.SIZES[name]
        base = functools.cache(functools.partial(trainer, session, size, "bf16"))  # one for all arms of a size
        for level in levels:
            identity: Row = {"stage": "step", "shape": name, "arm": level, "mode": mode}
            row = session.attempt(identity, measure, session, size, level, base)
            for each, figures in (row or {}).get("parts", {}).items():
                print(f"  {each:<14}{figures['ms']:>10.3f} ms {figures['count']:>6} kernels", flush=True)
    session.finish()
