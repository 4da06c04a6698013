"""Device-memory bytes per element of the row quantizer, with an L2 that programs share, simulated.

A program quantizes a block of rows: it reads X for the row maxima, again for the cast, and writes FP8 bytes in both
memory orders. How much of the second read comes from L2 depends on how many programs are resident, on the order of the
second pass, and on what else goes through L2. Each line is a way to walk the matrix; the last is the kernel's.

Resident programs take turns, tile by tile, in random order, and skip some turns. The cache is LRU over whole tiles, of
X and of both outputs; tiles that are marked "evict first" go before all others. It leaves out associativity, L1, the
two halves of H100's L2 (`--cache 25` is what is left if both hold the same), and time.
"""

import argparse
import json
import random
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import Any

H100 = {"multiprocessors": 132, "cache": 50}
"""Multiprocessors, and megabytes of L2."""
SKIPS = 0.3
"""Probability that a program skips a turn, so that programs drift apart."""
COLUMNS = 1024
"""Columns of a simulated tile."""


@dataclass(frozen=True, kw_only=True)
class Walk:
    """A way to walk a matrix.

    Attributes:
        name: Label.
        row_block: Rows of a program.
        programs: Programs that are resident together.
        backwards: Whether the second pass starts at the last columns.
        stores_first: Whether outputs are marked to be evicted first.
        x_first: Whether the second read marks X likewise.
    """

    name: str
    row_block: int = 32
    programs: int = H100["multiprocessors"]
    backwards: bool = True
    stores_first: bool = False
    x_first: bool = False


WALKS = (
    Walk(name="4 programs per SM, both passes forwards", programs=528, backwards=False),
    Walk(name="4 programs per SM", programs=528),
    Walk(name="1 program per SM, both passes forwards", backwards=False),
    Walk(name="1 program per SM"),
    Walk(name="2 programs per 3 SMs", programs=88),
    Walk(name="1 program per 2 SMs", programs=66),
    Walk(name="row blocks of 16 rows", row_block=16),
    Walk(name="row blocks of 8 rows", row_block=8),
    Walk(name="outputs evicted first", stores_first=True),
)


def shipped(rows: int) -> Walk:
    """Return how `rows_kernel` walks a matrix of so many rows on H100."""
    from octavo.kernels.quantize import triton
    from octavo.numerics.spec import ROW, QuantSpec

    task = triton.QuantizeTask(first=triton.FoldedSpec(spec=QuantSpec(granularity=ROW)), order="both")
    row_block, *_ = triton.tiles(task)[triton.default_config(task, rows, H100["multiprocessors"])]
    return Walk(name="the kernel", row_block=row_block, stores_first=True, x_first=True)


class Cache:
    """An LRU cache of pieces of different sizes; those marked `first` are evicted before others."""

    def __init__(self, size: float) -> None:
        self._free = size
        self._first, self._others = OrderedDict[Any, int](), OrderedDict[Any, int]()

    def touch(self, piece: Any, size: int, first: bool) -> bool:
        """Access a piece and mark it; return whether it was there."""
        hit = piece in self._first or piece in self._others
        if hit:
            self._free += self._first.pop(piece, 0) + self._others.pop(piece, 0)
        (self._first if first else self._others)[piece] = size
        self._free -= size
        while self._free < 0:
            self._free += (self._first or self._others).popitem(last=False)[1]
        return hit


def simulate(rows: int, columns: int, walk: Walk, cache: float = H100["cache"], seed: int = 0) -> float:
    """Return the bytes per element of a bf16 matrix that go through device memory, in both directions."""
    blocks, steps = -(-rows // walk.row_block), -(-columns // COLUMNS)
    turns, l2 = random.Random(seed), Cache(cache * 2**20)
    waiting = iter(range(blocks))
    running = [[block, 0] for block in islice(waiting, walk.programs)]
    missed = 0
    while running:
        for program in turns.sample(running, len(running)):
            if turns.random() < SKIPS:
                continue
            block, (second, step) = program[0], divmod(program[1], steps)
            tile = steps - 1 - step if second and walk.backwards else step
            elements = walk.row_block * min(COLUMNS, columns - tile * COLUMNS)
            missed += 0 if l2.touch(("x", block, tile), 2 * elements, bool(second) and walk.x_first) else 2 * elements
            for output in ("q", "q_t")[: 2 * second]:
                l2.touch((output, block, tile), elements, walk.stores_first)
            program[1] += 1
            if program[1] == 2 * steps:
                program[:] = next(waiting, -1), 0
                if program[0] < 0:
                    running.remove(program)
    return missed / (rows * columns) + 2


def main(arguments: list[str]) -> None:
    """Simulate every walk and print bytes per element."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks l2", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 4096, 16384], metavar="M")
    parser.add_argument("--columns", type=int, nargs="+", default=[4096, 14336], metavar="K")
    parser.add_argument("--cache", type=float, default=H100["cache"], metavar="MB", help="L2, 50 by default")
    parser.add_argument("--json", action="store_true", help="print JSON, one list of rows")
    options = parser.parse_args(arguments)
    sizes = [(rows, columns) for columns in options.columns for rows in options.rows]
    table = []
    if not options.json:
        print(f"{'bytes per element at M×K':<42}" + "".join(f"{f'{m}×{k}':>13}" for m, k in sizes))
    for walk in (*WALKS, None):
        walks = [shipped(rows) if walk is None else walk for rows, _ in sizes]
        moved = [round(simulate(*size, each, options.cache), 2) for size, each in zip(sizes, walks, strict=True)]
        label = walks[0].name
        for (rows, columns), each, total in zip(sizes, walks, moved, strict=True):
            programs = min(each.programs, -(-rows // each.row_block))
            size = {"rows": rows, "columns": columns, "row_block": each.row_block, "programs": programs}
            table.append({"walk": label, **size, "bytes_per_element": total})
        if not options.json:
            print(f"{label:<42}" + "".join(f"{total:>13.2f}" for total in moved), flush=True)
    if options.json:
        print(json.dumps(table))
