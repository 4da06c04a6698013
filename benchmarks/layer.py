"""A decoder layer of Transformers, forward and backward: time, peak memory, and what it keeps for backward per token.
`dim-16384` is the block of torchao's published microbenchmark. The Amdahl limit has cuBLAS's FP8 products in place of
bf16's.
"""

import importlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import linear, shapes
from benchmarks.arms import Arm, available, build, named, speedup, step
from benchmarks.kernels import ceilings
from benchmarks.session import Row, Session, begin, parser
from benchmarks.shapes import Shape
from benchmarks.timing import sets
from octavo.nn.memory_audit import saved_for_backward


@dataclass(frozen=True)
class Size:
    """Of a layer and its batch; `heads` is 0 for the block of torchao's microbenchmark; two experts for each token."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    batch: int
    sequence: int
    experts: int = 0
    layers: int = 1
    vocabulary: int = 32000

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def llama(self) -> Any:
        sizes = self.hidden, self.intermediate, self.layers, self.heads, self.kv_heads
        return shapes.llama(*sizes, self.vocabulary, self.sequence)


LAYERS = {
    "llama-3-8b": Size(4096, 14336, 32, 8, 1, 8192),
    "dim-16384": Size(16384, 16384, 0, 0, 1, 16384),
    "llama-2-7b": Size(4096, 11008, 32, 32, 8, 2048),
    "mixtral-8x7b": Size(4096, 14336, 32, 8, 1, 8192, 8),
}
TINY = {
    "tiny-llama": Size(64, 96, 4, 2, 1, 32), "tiny-block": Size(64, 64, 0, 0, 1, 32),
    "tiny-mixtral": Size(64, 96, 4, 2, 1, 32, 4),
}  # fmt: skip
COMPILED = named(
    "bf16", "octavo rowwise", "torchao tensorwise", "octavo tensorwise", "torchao rowwise",
    "torchao rowwise_with_gw_hp", "octavo rowwise_hp_wgrad", mode="compiled",
)  # fmt: skip
EAGER = named(
    "bf16", "octavo rowwise", "octavo tensorwise", "torchao tensorwise", "torchao rowwise", "octavo rowwise_equalized"
)


class Layer(nn.Module):
    """A Transformers decoder layer with its position embeddings: [batch, sequence, hidden] in and out."""

    def __init__(self, size: Size, family: str = "") -> None:
        super().__init__()
        import transformers

        family = family or ("Mixtral" if size.experts else "Llama")
        experts = {"num_local_experts": size.experts, "experts_implementation": "grouped_mm"} if size.experts else {}
        name = family.lower()
        modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        config = getattr(transformers, f"{family}Config")(**size.llama, bos_token_id=0, eos_token_id=1, **experts)
        config._attn_implementation = "sdpa"
        self.layer = getattr(modeling, f"{family}DecoderLayer")(config, 0)
        positions = torch.arange(size.sequence)[None]
        rotary = getattr(modeling, f"{family}RotaryEmbedding")(config)
        cos, sin = rotary(torch.zeros(1, dtype=torch.bfloat16), positions)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x, position_embeddings=(self.cos, self.sin))
        result: Tensor = out if isinstance(out, Tensor) else out[0]
        return result


def block(size: Size, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        if size.heads:
            return Layer(size).to(torch.bfloat16)
        norm = nn.LayerNorm(size.hidden, elementwise_affine=False)
        inner = nn.Linear(size.hidden, size.intermediate, bias=False)
        return nn.Sequential(norm, inner, nn.Sigmoid()).to(torch.bfloat16)


def linears(size: Size) -> Counter[Shape]:
    """(M, K, N) of the layer's linears, with their number; experts as one of all their rows."""
    m, hidden = size.tokens, size.hidden
    if not size.heads:
        return Counter([(m, hidden, size.intermediate)])
    kv = hidden // size.heads * size.kv_heads
    rows = 2 * m if size.experts else m
    up, down = (rows, hidden, size.intermediate), (rows, size.intermediate, hidden)
    return Counter([(m, hidden, hidden), (m, hidden, hidden), (m, hidden, kv), (m, hidden, kv), up, up, down])


def products(session: Session, size: Size, *, fp8: bool) -> Row:
    each = {shape: linear.products(session, shape, fp8=fp8)["kernel_ms"] for shape in linears(size)}
    if None in each.values():
        return {"kernel_ms": None}
    return {"kernel_ms": round(sum(each[shape] * count for shape, count in linears(size).items()), 5)}


def measure(session: Session, name: str, size: Size, arm: Arm) -> Row:
    model: Any = build(block(size, session.device), arm, session)
    count = sets(4 * size.tokens * size.hidden, session.clock.l2_bytes) if session.gpu else 1
    runs, x = [], torch.empty(0)
    for _ in range(count):
        shape = (size.batch, size.sequence)
        x = torch.randn(*shape, size.hidden, device=session.device, dtype=torch.bfloat16).requires_grad_()
        g = torch.randn(*shape, size.hidden if size.heads else size.intermediate, device=session.device).bfloat16()
        runs.append(step(model, list(model.parameters()), x, g))
    figures = linear.in_steady_state(session, model, runs)
    figures["saved_bytes_per_token"] = round(_saved_bytes(session, model, arm, x) / size.tokens, 1)
    figures |= speedup(session.rows, {**figures, "mode": arm.mode}, shape=name)
    if figures["kernel_ms"] is None:
        return figures
    figures["tokens_per_s"] = round(1e3 * size.tokens / figures["kernel_ms"])
    operations = sum(6 * m * k * n * number for (m, k, n), number in linears(size).items())
    figures["tflops"] = round(operations / figures["kernel_ms"] / 1e9, 1)
    keys = {"arm": "bf16", "mode": arm.mode}, {"arm": "products bf16"}, {"arm": "products fp8"}
    base, bf16, fp8 = ((session.find(shape=name, **key) or {}).get("kernel_ms") for key in keys)
    base = figures["kernel_ms"] if arm.name == "bf16" else base
    if base and bf16 and fp8:
        figures |= {"linear_share": round(bf16 / base, 4), "amdahl_ms": round(base - bf16 + fp8, 4)}
    return figures


def _saved_bytes(session: Session, model: Any, arm: Arm, x: Tensor) -> float:
    """Bytes that a forward keeps for backward: what the allocator holds more, or what autograd saves."""
    if not session.gpu:
        with saved_for_backward(model) as kept:
            model(x)
        return float(kept.bytes)
    session.clean()
    before = torch.cuda.memory_allocated(session.device)
    y = model(x)
    torch.cuda.synchronize(session.device)
    return float(torch.cuda.memory_allocated(session.device) - before - y.untyped_storage().nbytes())


def plan(session: Session) -> list[tuple[str, Size, Arm]]:
    sizes = TINY if session.tiny else {name: LAYERS[name] for name in session.options.layers}
    first, rest = (*COMPILED[:5], *EAGER[:3]), (*COMPILED[5:], *EAGER[3:])
    turns = (first,) if session.options.quick else (first, rest)
    return [(name, size, arm) for arms in turns for name, size in sizes.items() for arm in arms]


def main(arguments: list[str]) -> None:
    options = parser("layer", __doc__, "--layers llama-3-8b")
    options.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    session = begin(options, arguments)
    ceilings(session)
    for name, size, arm in available(plan(session)):
        same: Row = {"shape": name, "tokens": size.tokens}
        for kind, fp8 in (("bf16", False), ("fp8", True)):
            session.attempt({**same, "arm": f"products {kind}", "mode": "eager"}, products, session, size, fp8=fp8)
        session.attempt({**same, "arm": arm.name, "mode": arm.mode}, measure, session, name, size, arm)
    session.finish()
