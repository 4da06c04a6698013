"""Machine code as `cuobjdump` prints it: instructions, loops, and the fast path: without subroutines (the slow path of
a division), blocks that call them, and padding. Both sides of a forward branch count, so costs are upper bounds.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*([^;]*?)\s*;", re.MULTILINE)
MATRIX = re.compile(r"^(?:UTC)?[A-Z]?(?:G)?MMA\b")


@dataclass(frozen=True)
class Instruction:
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


@dataclass(frozen=True)
class Code:
    instructions: tuple[Instruction, ...]

    @staticmethod
    def parse(text: str) -> "Code":
        return Code(tuple(Instruction(int(a, 16), guard, name, rest) for a, guard, name, rest in LINE.findall(text)))

    @cached_property
    def cold(self) -> frozenset[int]:
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
        """One step of a product: the shortest loop that multiplies, without a skipped end of an output tile."""
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

    def per_element(self, num_warps: int, tile: int, trips: int) -> dict[str, float]:
        """Instructions of all lanes and bytes per element of a tile; what is outside loops counts once per `trips`."""
        if self.contraction:
            step = {i.address for i in self.contraction}
            rest = tuple(i for i in self.hot if i.address not in step)
            parts = [(self.contraction, 1.0), (rest, 1 / trips)]
        else:
            looped = {i.address for body in self.loops for i in body}
            straight = tuple(i for i in self.hot if i.address not in looped)
            parts = [(straight, 1 / (trips if self.loops else 1)), *((body, 1.0) for body in self.loops)]
        total = dict.fromkeys(("instructions", "loaded", "stored", "wide"), 0.0)
        for body, weight in parts:
            share = 32 * weight * num_warps / tile
            total["instructions"] += share * len(body)
            for i in body:
                if i.op in ("LDG", "STG", "LDGSTS"):
                    total["stored" if i.op == "STG" else "loaded"] += share * i.bytes
                    total["wide"] += share * i.bytes * (i.bytes == 16)
        return total
