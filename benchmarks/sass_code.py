"""Machine code as `cuobjdump` prints it: instructions, loops, cold paths, and what one thread's path through it costs.

    hot      what every program runs. Both sides of a forward branch count, so costs are upper bounds.
    cold     subroutines (what CALL reaches: the slow path of a division), the blocks that call them, and padding
    loop     from the target of a backward branch to the branch; a loop that only waits for a barrier is none

`in_flight` follows the loads in program order: a load is outstanding until an instruction touches its registers. The
largest sum of bytes outstanding, times resident threads, is what an SM keeps under way to hide the latency of memory.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*([^;]*?)\s*;", re.MULTILINE)
REGISTER = re.compile(r"\bR(\d+)(\.64)?")
MATRIX = re.compile(r"^(?:UTC)?[A-Z]?(?:G)?MMA\b")
SHAPES = {"16816": (16, 8, 16), "16832": (16, 8, 32), "1688": (16, 8, 8)}

# 16 lanes of each of an SM's four quarters start per clock, except FP32 arithmetic: 32, and what is listed as slower.
FP32 = ("FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2")
SLOW = ("MUFU", "POPC", "FLO", "BREV", "I2F", "F2I", "F2F", "REDUX", "DADD", "DMUL", "DFMA")
MEMORY = ("LDG", "STG", "LDS", "STS", "LDSM", "STSM", "LDL", "STL", "ATOM", "ATOMG", "ATOMS", "RED", "REDG", "SHFL",
          "LDGSTS")  # fmt: skip
UNTIMED = ("BAR", "BRA", "BSSY", "BSYNC", "EXIT", "CALL", "RET", "NOP", "WARPSYNC", "DEPBAR", "LDGDEPBAR", "LDC",
           "MEMBAR", "ERRBAR", "CCTL", "SYNCS", "FENCE", "ELECT", "YIELD", "NANOSLEEP", "BREAK")  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """One instruction: where it is, whether a predicate guards it, its full name, its operands."""

    address: int
    guard: str
    name: str
    operands: str

    @property
    def op(self) -> str:
        """The name without its modifiers: `LDG` of `LDG.E.128`."""
        return self.name.partition(".")[0]

    @property
    def target(self) -> int | None:
        address = re.search(r"0x([0-9a-f]+)$", self.operands)
        return int(address[1], 16) if self.op in ("BRA", "CALL") and address else None

    @property
    def bytes(self) -> int:
        """Bytes that one thread moves, for a memory instruction."""
        if self.op in ("LDSM", "STSM"):
            return 4 * int(self.name.rpartition(".")[2]) if self.name[-1] in "24" else 4
        if self.op == "SHFL":
            return 4
        width = re.search(r"\.(?:[US]?(8|16)|(64|128))(?=\.|$)", self.name)
        return int(width[1] or width[2]) // 8 if width else 4

    @property
    def pipe(self) -> str:
        """Which unit executes it: fp32, mul, alu, slow, memory, or none that is counted."""
        if self.op in FP32:
            return "fp32"
        if self.op == "IMAD":
            return "mul"
        if self.op in SLOW:
            return "slow"
        if self.op in MEMORY:
            return "memory"
        untimed = self.op in UNTIMED or self.op.startswith("U") or MATRIX.match(self.op) or "S2" in self.op
        return "none" if untimed else "alu"

    @property
    def flops(self) -> float:
        """Operations of a matrix instruction per warp that executes it; 0 where its name tells no shape."""
        if shape := re.search(r"GMMA\.(\d+)x(\d+)x(\d+)", self.name):  # four warps together
            m, n, k = map(int, shape.groups())
            return 2 * m * n * k / 4
        shape = re.search(r"MMA\.(?:SP\.)?(\d{4,5})", self.name)
        m, n, k = SHAPES.get(shape[1], (0, 0, 0)) if shape else (0, 0, 0)
        return 2 * m * n * k

    def registers(self) -> set[int]:
        """Every register it names, loaded vectors in full."""
        named = list(REGISTER.finditer(self.operands))
        data = {"LDG": 0, "LDS": 0, "STG": len(named) - 1, "STS": len(named) - 1}.get(self.op)
        numbers: set[int] = set()
        for position, match in enumerate(named):
            wide = max(self.bytes // 4, 1) if position == data else 2 if match[2] else 1
            numbers.update(range(int(match[1]), int(match[1]) + wide))
        return numbers


@dataclass(frozen=True)
class Code:
    """The machine code of one kernel."""

    instructions: tuple[Instruction, ...]

    @staticmethod
    def parse(text: str) -> "Code":
        """Read what `cuobjdump --dump-sass` prints for one kernel."""
        return Code(tuple(Instruction(int(a, 16), guard, name, rest) for a, guard, name, rest in LINE.findall(text)))

    @cached_property
    def cold(self) -> frozenset[int]:
        """Addresses off the fast path."""
        cold_blocks: set[int] = set()
        subroutines = {i.target for i in self.instructions if i.op == "CALL"}
        joins = {i.target for i in self.instructions if i.op == "BRA"}
        block: list[int] = []
        inside = False
        for i in self.instructions:
            inside = inside or i.address in subroutines
            block = [i.address] if i.address in joins else [*block, i.address]
            if i.op == "CALL":
                cold_blocks.update(block)
            if inside or i.op == "NOP" or i.target == i.address:
                cold_blocks.add(i.address)
            if i.op in ("BRA", "EXIT", "RET", "CALL"):
                block = []
            inside = inside and i.op != "RET"
        return frozenset(cold_blocks)

    @cached_property
    def hot(self) -> tuple[Instruction, ...]:
        """The fast path, in program order."""
        return tuple(i for i in self.instructions if i.address not in self.cold)

    @cached_property
    def loops(self) -> tuple[tuple[Instruction, ...], ...]:
        spans = []
        for i in self.hot:
            if i.op == "BRA" and i.target is not None and i.target < i.address:
                body = [j for j in self.hot if i.target <= j.address <= i.address]
                if not any(j.op == "SYNCS" and "TRYWAIT" in j.name for j in body) or len(body) > 12:
                    spans.append((i.target, i.address))
        inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
        return tuple(tuple(i for i in self.hot if first <= i.address <= last) for first, last in inner)

    @cached_property
    def contraction(self) -> tuple[Instruction, ...]:
        """One step of a matrix product: the shortest loop that multiplies, without what a branch in it leaves out.

        What is left out is the end of an output tile, where the loops over tiles and over the contraction are one. The
        compiler turns such loops inside out, so the same step is found in several, with more or less around it.
        """
        steps = []
        for body in self.loops:
            multiplies = {i.address for i in body if MATRIX.match(i.op)}
            stores = {i.address for i in body if i.op == "STG"}
            skipped: set[int] = set()
            for i in body:
                if i.guard and i.op == "BRA" and i.target is not None and i.target > i.address:
                    span = {j.address for j in body if i.address < j.address < i.target}
                    skipped |= span if span & stores and not span & multiplies else set()
            steps += [tuple(i for i in body if i.address not in skipped)] if multiplies else []
        return min(steps, key=len, default=())

    @cached_property
    def straight(self) -> tuple[Instruction, ...]:
        """The fast path outside innermost loops."""
        looped = {i.address for body in self.loops for i in body}
        return tuple(i for i in self.hot if i.address not in looped)

    @cached_property
    def accesses(self) -> dict[str, int]:
        """Global memory instructions of the fast path by kind and width in bytes, such as {"LDG.16": 4}."""
        counts: Counter[str] = Counter()
        for i in self.hot:
            if i.op in ("LDG", "STG", "LDGSTS", "LDL", "STL"):
                counts[f"{i.op}.{i.bytes}"] += 1
            elif i.op.startswith(("UTMA", "UBLK", "ATOM", "RED")) and i.op not in ("REDUX", "ATOMS", "UTMACMDFLUSH"):
                counts[i.op] += 1
        return dict(sorted(counts.items()))

    @cached_property
    def matrix(self) -> dict[str, int]:
        """Matrix instructions by name and shape, without operand types."""
        names = (re.match(r"\w+(?:\.\d+(?:x\d+x\d+)?)?", i.name) for i in self.hot if MATRIX.match(i.op))
        return dict(sorted(Counter(name[0] for name in names if name).items()))

    @cached_property
    def in_flight(self) -> int:
        """Bytes of global loads that one thread has outstanding at most; each loop is followed for two trips."""
        return max([_outstanding(self.straight), *(_outstanding((*body, *body)) for body in self.loops)])


def _outstanding(code: Iterable[Instruction]) -> int:
    most, waiting = 0, []
    for i in code:
        touched = i.registers()
        hits = [n for n, (registers, _) in enumerate(waiting) if registers & touched]
        if hits:
            waiting = waiting[hits[-1] + 1 :]
        if i.op == "LDG":
            destination = REGISTER.search(i.operands)
            first = int(destination[1]) if destination else 0
            waiting.append((set(range(first, first + max(i.bytes // 4, 1))), i.bytes))
            most = max(most, sum(size for _, size in waiting))
    return most
