"""The arms of a comparison: one module, computed in every way that is measured beside each other."""

import copy
import dataclasses
import importlib
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from benchmarks.session import Session
from benchmarks.timing import Run, Timing, elapsed_ms
from octavo.kernels import needs_both_orders, quantize
from octavo.nn.linear_subclasses import is_converted
from octavo.nn.operands import QuantizedGradient, QuantizedInput, Quantizer
from octavo.numerics.spec import QuantSpec
from octavo.tensor import ScaledTensor

ROUNDS = 3  # Turns of bf16 and an arm
TORCHAO = "torchao.float8"
PACKAGES = {"torchao": TORCHAO, "te": "transformer_engine.pytorch"}  # By the first word of the arms that need them


@dataclass(frozen=True)
class Arm:
    """`bf16`, `octavo <recipe>`, `torchao <recipe>`, `te …`, `given <recipe>` (known maxima); `eager` or `compiled`."""

    name: str
    mode: str = "eager"

    @property
    def recipe(self) -> str:
        return self.name.partition(" ")[2]


def named(*names: str, mode: str = "eager") -> tuple[Arm, ...]:
    return tuple(Arm(name, mode) for name in names)


TARGET_ARMS = (
    *named("bf16", "octavo rowwise", "octavo tensorwise"),
    *named("bf16", "torchao tensorwise", "torchao rowwise", "octavo rowwise", "octavo tensorwise", mode="compiled"),
    Arm("given tensorwise"),
)
"""What the project's targets compare, in order of importance."""
MORE_ARMS = (
    *named("octavo rowwise_hp_wgrad", "octavo rowwise_equalized"),
    *named("torchao rowwise_with_gw_hp", "octavo rowwise_hp_wgrad", mode="compiled"),
    *named("torchao tensorwise", "torchao rowwise", "torchao rowwise_with_gw_hp", "octavo blockwise", "octavo mxfp8"),
)


def build(module: nn.Module, arm: Arm, session: Session) -> Callable[..., Tensor]:
    """A copy of a bf16 module, computed as the arm says. Raises ImportError for torchao where there is none."""
    kind, _, recipe = arm.name.partition(" ")
    made: Any = copy.deepcopy(module)
    if kind in ("octavo", "given"):
        made = octavo.convert(made, recipe, verbose=False)
        for layer in made.modules() if kind == "given" else ():
            if is_converted(layer):
                vars(layer)["octavo_quantizer"] = _GivenMaxima
    elif kind == "torchao":
        made = to_torchao(made, recipe, emulate=not session.gpu)
    if arm.mode == "compiled":
        torch._dynamo.reset()  # each arm and shape is compiled by itself
        return compiled(made, session)
    return made


def compiled(module: nn.Module, session: Session) -> Any:
    """The module, compiled for static shapes; without a GPU it is traced and partitioned, and no code made."""
    return torch.compile(module, dynamic=False, backend="inductor" if session.gpu else "aot_eager")


class _GivenMaxima(Quantizer):
    """Quantizes X and G by tensor with a maximum that costs nothing: the bound of every delayed scaling."""

    @staticmethod
    def _cast(x: Tensor, spec: QuantSpec, both: bool) -> ScaledTensor:
        amax = x.new_full((1, 1), 8.0, dtype=torch.float32)
        order = "both" if both and needs_both_orders(x.device) else "rows"
        return quantize(x.detach(), spec, order=order, amax=amax)

    def input(self, input: Tensor, x_MK: Tensor, recipe: Any, needs_wgrad: bool, channels: Any) -> QuantizedInput:
        x = self._cast(x_MK, recipe.x, needs_wgrad)
        return x.data, x.scale, x.other_order, None, None

    def gradient(self, g_MN: Tensor, w: Any, x: Any, recipe: Any) -> QuantizedGradient:
        g = self._cast(g_MN, recipe.dgrad_g, w is not None and x is not None)
        return g if w is not None else None, g if x is not None else None


def to_torchao(module: nn.Module, recipe: str, *, emulate: bool = False) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inside = convert_to_float8_training(nn.Sequential(module), config=config)
    made: nn.Module = inside[0]
    return made


def importable(name: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    except Exception:  # one that does not fit this torch fails in its own ways
        return False
    return True


def available(todo: Sequence[Any]) -> list[Any]:
    """Those of some tuples whose last element is an arm that can run here; prints a note about each other package."""
    kinds = [each[-1].name.partition(" ")[0] for each in todo]
    absent = {kind for kind in set(kinds) & PACKAGES.keys() if not importable(PACKAGES[kind])}
    for kind in sorted(absent):
        print(f"note: {PACKAGES[kind].partition('.')[0]} is not importable: its arms are left out (see --peers)")
    return [each for each, kind in zip(todo, kinds, strict=True) if kind not in absent]


def step(model: Callable[..., Tensor], parameters: Sequence[Tensor], x: Tensor, g: Tensor, *context: Any) -> Run:
    """One forward and backward. Gradients are returned rather than accumulated, which a graph can capture."""
    inputs = (x, *parameters)
    return lambda: torch.autograd.grad(model(x, *context), inputs, g)


def speedup(rows: Sequence[dict[str, Any]], row: dict[str, Any], **same: Any) -> dict[str, Any]:
    """Kernel and wall speed-up over the bf16 row of the same mode, or eager where bf16 was not compiled."""
    keys = ({**same, "arm": "bf16", "mode": mode} for mode in (row.get("mode"), "eager"))
    bases = (next((r for r in rows if key.items() <= r.items() and "error" not in r), {}) for key in keys)
    base, fields = next(filter(None, bases), {}), (("kernel_ms", "speedup"), ("wall_ms", "wall_speedup"))
    return {name: round(base[field] / row[field], 4) for field, name in fields if row.get(field) and base.get(field)}


def by_the_clock(session: Session, steps: int, runs: Sequence[Run]) -> Timing:
    """The median time of a training step, whose optimizer cannot be captured."""
    times = [elapsed_ms(runs[0], session.device) for _ in range(steps)]
    return Timing(None, statistics.median(times) if session.clock.timed else None, None, "wall")


def in_turns(
    session: Session, base: Sequence[Run], runs: Sequence[Run], measure: Callable[[Sequence[Run]], Timing] | None = None
) -> dict[str, Any]:
    """Time bf16 (`base`) and an arm alternately, because a GPU's clocks drift: medians, ratios and their range."""
    measure = measure or session.clock.measure
    pairs = [(measure(base), measure(runs)) for _ in range(1 if session.tiny else ROUNDS)]
    figures: dict[str, Any] = {"method": pairs[0][1].method, "rounds": len(pairs)}
    for field, name in (("kernel_ms", "speedup"), ("wall_ms", "wall_speedup")):
        values = [(getattr(before, field), getattr(after, field)) for before, after in pairs]
        if any(None in pair for pair in values):
            figures[field] = None
            continue
        ratios = sorted(before / after for before, after in values)
        figures[f"bf16_{field}"], figures[field] = (round(statistics.median(ms), 5) for ms in zip(*values, strict=True))
        figures |= {name: round(statistics.median(ratios), 4), f"{name}_range": [round(ratios[i], 4) for i in (0, -1)]}
    for name, timings in zip(("bf16_spread", "spread"), zip(*pairs, strict=True), strict=True):
        times = [ms for timing in timings if (ms := timing.kernel_ms or timing.wall_ms) is not None]
        within = max(timing.spread or 0.0 for timing in timings)  # of one of them, if that is wider
        middle = statistics.median(times or [1.0])
        figures[name] = round(max((max(times) - min(times)) / middle, within), 5) if times else None
    return figures
