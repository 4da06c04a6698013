"""The two ways of quantizing under `torch.compile`: PyTorch operations, or an op that the compiler does not look into.

    octavo …   casts and products as PyTorch operations, which Inductor fuses with each other and with the norms and
               activations around them (`octavo.kernels.library.DECOMPOSITIONS`)
    opaque …   each op stays one opaque call: Octavo's Triton kernels, one read, both memory orders

Measured on a linear alone, where there is nothing to fuse with, and in a Llama 3 8B decoder layer, where there is.
"""

from benchmarks import layer, linear, shapes
from benchmarks.arms import Arm, named
from benchmarks.kernels import ceilings
from benchmarks.session import Row, Session, begin, parser

ARMS = named(
    "bf16", "octavo rowwise", "opaque rowwise", "octavo tensorwise", "opaque tensorwise", mode="compiled"
)  # fmt: skip


def run(session: Session) -> None:
    sizes = list(layer.TINY.items())[:1] if session.tiny else list(layer.LAYERS.items())[:2]
    measured = shapes.SETS["tiny"][:1] if session.tiny else (*shapes.TARGETS, shapes.SETS["cubes"][0])
    for name, size in sizes[:1]:
        for arm in ARMS:
            _layer(session, name, size, arm)
    for shape in measured:
        for arm in ARMS:
            same: Row = {"stage": "linear", **linear.identity(shape, arm)}
            session.attempt(same, linear.measure, session, shape, arm)
    for name, size in sizes[1:]:
        for arm in ARMS:
            _layer(session, name, size, arm)


def _layer(session: Session, name: str, size: layer.Size, arm: Arm) -> None:
    identity = {"stage": "layer", "shape": name, "arm": arm.name, "mode": arm.mode}
    session.attempt(identity, layer.measure, session, name, size, arm)


def main(arguments: list[str]) -> None:
    session = begin(parser("compile", __doc__, "--minutes 6"), arguments)
    ceilings(session)
    run(session)
    session.finish()
