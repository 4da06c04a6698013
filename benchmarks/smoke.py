"""Converted linears, forward and backward: right numbers, time beside bf16, and a profile by kernel. A row fails where
Y, ∂X or ∂W is not finite, or farther from bf16's than its format allows. First in any run.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks import profiling, shapes
from benchmarks.arms import Arm, build, in_turns, step
from benchmarks.linear import buffers, identity, layer
from benchmarks.session import Row, Session, begin, parser
from benchmarks.shapes import Shape
from octavo.numerics import sqnr
from octavo.numerics.recipe import RECIPES

SHAPES: tuple[Shape, ...] = ((shapes.TOKENS, 4096, 14336), (4096, 4096, 4096), (shapes.TOKENS, 14336, 4096))
FIRST = ("rowwise", "tensorwise")
OUTPUTS = ("y", "dx", "dw")
SETTLED = 64  # Passes after which a recipe that measures channels or keeps a history does so seldom, or has a full one


def results(model: Any, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    y = model(x)
    return dict(zip(OUTPUTS, (y, *torch.autograd.grad(y, (x, *model.parameters()), g)), strict=True))


def quality(recipe: str, exact: dict[str, Tensor], computed: dict[str, Tensor]) -> Row:
    """The SQNR of each result. Raises ArithmeticError for one that is not finite or has more noise than its format."""
    figures: Row = {}
    for name in OUTPUTS:
        if not torch.isfinite(computed[name]).all():
            raise ArithmeticError(f"{recipe}: {name} is not finite")
        least, decibel = 100.0, sqnr(exact[name], computed[name])
        if recipe in RECIPES:
            spec = RECIPES[recipe].x if name == "y" else RECIPES[recipe].dgrad_g
            least = spec.format.tolerance_db
        if not decibel >= least:
            raise ArithmeticError(f"{recipe}: {name} has {decibel:.1f} dB to bf16's, and needs {least:g} dB")
        figures[f"sqnr_{name}"] = round(min(decibel, 999.0), 2)
    return figures


def arm_of(recipe: str) -> Arm:
    return Arm(recipe if recipe == "bf16" else f"octavo {recipe}")


def measure(session: Session, shape: Shape, recipe: str) -> Row:
    torch.manual_seed(0)
    base = layer(shape, session)
    inputs = buffers(shape, session)
    model: Any = build(base, arm_of(recipe), session)
    figures = quality(recipe, results(base, *inputs[0]), results(model, *inputs[0]))
    plain, runs = ([step(each, list(each.parameters()), x, g) for x, g in inputs] for each in (base, model))
    if recipe in RECIPES and RECIPES[recipe].equalization:
        for _ in range(2 if session.tiny else SETTLED):
            runs[0]()
    figures |= in_turns(session, plain, runs)
    kernels = profiling.record(runs[0], session.device)
    figures["profile"] = profiling.table(kernels)
    if session.gpu:
        figures["busy_ms"] = round(profiling.busy_us(kernels) / 1e3, 5)
    return figures


def plan(session: Session) -> list[tuple[Shape, str]]:
    sizes = shapes.SETS["tiny"][:1] if session.tiny else SHAPES
    todo = [(shape, recipe) for shape in sizes for recipe in FIRST]
    todo += [(sizes[0], "bf16")]
    others = [] if session.options.quick else [name for name in RECIPES if name not in FIRST]
    return todo + [(sizes[0], recipe) for recipe in others]


def main(arguments: list[str]) -> None:
    session = begin(parser("smoke", __doc__), arguments)
    for shape, recipe in plan(session):
        same: Row = {"stage": "smoke", **identity(shape, arm_of(recipe))}
        session.attempt(same, measure, session, shape, recipe)
    buffers.cache_clear()
    session.finish()
