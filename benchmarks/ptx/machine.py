"""Run a kernel's PTX, all threads of several CTAs at once: one numpy operation per instruction.

CTAs run in lockstep until a branch parts them; then each side runs to its end on its own, because CTAs do not wait for
each other. Branches that part the threads of a CTA are not supported: Triton emits predicates in their place.
A register that was never written holds garbage; reading such a predicate is a fault.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.ptx.arithmetic import Bits, Unknown, bits_of, compare, compute, dtype_of, typed
from benchmarks.ptx.memory import (
    WARP,
    Counts,
    DeviceMemory,
    Fault,
    SharedMemory,
    count_sectors,
    count_wavefronts,
)
from benchmarks.ptx.program import Instruction, Operand, Program

MAX_LANES = 8192
"""Threads that run at once."""
_GARBAGE = 0xCBCBCBCBCBCBCBCB
_ARITHMETIC = {
    "abs", "add", "and", "bfe", "cvt", "div", "ex2", "fma", "lg2", "mad", "max", "min", "mul", "neg", "not", "or",
    "popc", "prmt", "rcp", "rem", "rsqrt", "selp", "shl", "shr", "sqrt", "sub", "tanh", "xor",
}  # fmt: skip
_ADDRESS = re.compile(r"\[([^+\]]+?)(?:\+(-?\d+))?\]$")


@dataclass(frozen=True)
class Group:
    """CTAs that run in lockstep, from an instruction on."""

    ctas: Bits
    registers: dict[str, Bits]
    shared: SharedMemory
    at: int = 0


def run(
    program: Program, arguments: list[int | float], grid: tuple[int, ...], memory: DeviceMemory, shared: int
) -> Counts:
    """Run a kernel on a grid.

    Args:
        program: The kernel.
        arguments: Addresses and numbers, in the order of its parameters; missing ones are 0 (Triton's scratch space).
        grid: CTAs along x, and y and z.
        memory: The tensors that it may access; changed in place.
        shared: Bytes of shared memory of a CTA.

    Raises:
        Unknown: For an instruction that is not implemented, with its line.
        Fault: For an access or a barrier that a GPU would not survive, with the line.
    """
    counts = Counts()
    ctas = int(np.prod(grid))
    step = max(MAX_LANES // program.threads, 1)
    for first in range(0, ctas, step):
        part = np.arange(first, min(first + step, ctas))
        groups = [Group(part, {}, SharedMemory(len(part), max(shared, 16), program.threads))]
        while groups:
            machine = Machine(program, arguments, grid, memory, groups.pop(), counts)
            groups += machine.run()
    return counts


def _kind(i: Instruction) -> str:
    """Return the name of an access, with cache hints last: "ld.global.v4.b32.evict_first", "st.global.v2.b32.cs"."""
    hints = [part.split("::")[-1] for part in i.parts if part == "cs" or part.startswith("L1::")]
    return ".".join((i.name, *(part for part in i.parts if part != "cs" and "::" not in part), *hints))


class Machine:
    """A group of CTAs while it runs."""

    def __init__(
        self, program: Program, arguments: list[int | float], grid: tuple[int, ...], memory: DeviceMemory,
        group: Group, counts: Counts,
    ) -> None:  # fmt: skip
        self.program, self.arguments, self.memory, self.group, self.counts = program, arguments, memory, group, counts
        self.registers, self.shared = group.registers, group.shared
        self.lanes = len(group.ctas) * program.threads
        across = (*grid, 1, 1)[:3]
        cta = np.repeat(group.ctas, program.threads)
        self.special = {
            "%tid.x": np.tile(np.arange(program.threads), len(group.ctas)),
            "%ctaid.x": cta % across[0],
            "%ctaid.y": cta // across[0] % across[1],
            "%ctaid.z": cta // (across[0] * across[1]),
            "%nctaid.x": np.full(self.lanes, across[0]),
            "%nctaid.y": np.full(self.lanes, across[1]),
            "%nctaid.z": np.full(self.lanes, across[2]),
        }
        self.steps = {
            "mov": self._move, "setp": self._compare, "ld": self._load, "st": self._store, "atom": self._atomic,
            "red": self._atomic, "shfl": self._shuffle, "redux": self._reduce, "stmatrix": self._store_matrix,
            "ldmatrix": self._load_matrix, "bar": self._barrier, "createpolicy": self._make_policy,
        }  # fmt: skip

    def run(self) -> list[Group]:
        """Run to the end, or to a branch that parts the CTAs; return the groups that go on from there."""
        at, instructions = self.group.at, self.program.instructions
        while True:
            i = instructions[at]
            at += 1
            self.counts.instructions += len(self.group.ctas)
            active = self._active(i)
            if i.name == "bra":
                taken = self._per_cta(i, active)
                if not taken.all() and taken.any():
                    sides = ((taken, self.program.labels[str(i.operands[-1])]), (~taken, at))
                    return [self._part(np.flatnonzero(side), target) for side, target in sides]
                at = self.program.labels[str(i.operands[-1])] if taken.all() else at
            elif i.name in ("ret", "exit"):
                if not self._per_cta(i, active).all():
                    raise Unknown(f"line {i.line}: {i.text!r} ends some CTAs only")
                return []
            else:
                try:
                    self._step(i, active)
                except Fault as fault:
                    raise Fault(f"{self.program.name}, line {i.line}: {i.text!r}: {fault}") from None

    def _step(self, i: Instruction, active: Bits | None) -> None:
        if i.name in _ARITHMETIC:
            if len(i.operands) > 1 and isinstance(i.operands[0], str):
                self._write(i.operands[0], compute(i, [self._read(o) for o in i.operands[1:]]), active)
                return
        elif i.name in self.steps:
            self.steps[i.name](i, active)
            return
        raise Unknown(f"line {i.line}: {i.text!r} is not implemented; add it to benchmarks/ptx")

    def _part(self, which: Bits, at: int) -> Group:
        """Return the group of some of the CTAs."""
        threads = self.program.threads
        registers = {
            name: bits if len(bits) == 1 else bits.reshape(-1, threads)[which].reshape(-1)
            for name, bits in self.registers.items()
        }
        return replace(
            self.group, ctas=self.group.ctas[which], registers=registers, shared=self.shared.part(which, threads), at=at
        )

    # Operands

    def _active(self, i: Instruction) -> Bits | None:
        """Return the lanes whose predicate holds; None for all."""
        if i.predicate is None:
            return None
        holds = np.broadcast_to(self._read(i.predicate).astype(bool), self.lanes)
        return ~holds if i.negated else holds

    def _per_cta(self, i: Instruction, active: Bits | None) -> Bits:
        """Return for each CTA whether its threads are active; they must agree."""
        if active is None:
            return np.ones(len(self.group.ctas), bool)
        lanes = active.reshape(-1, self.program.threads)
        if (lanes.any(1) != lanes.all(1)).any():
            raise Unknown(f"line {i.line}: {i.text!r} parts the threads of a CTA")
        return lanes[:, 0]

    def _read(self, operand: Operand) -> Bits:
        """Return the bits of a register or an immediate, for all lanes or as one element."""
        if isinstance(operand, tuple):
            raise Unknown(f"a vector where one value is expected: {operand}")
        if operand in self.registers:
            return self.registers[operand]
        if operand in self.special:
            return self.special[operand].astype(np.uint32)
        if operand.startswith("0f"):
            return np.array([int(operand[2:], 16)], np.uint32)
        if operand.startswith("0d"):
            return np.array([int(operand[2:], 16)], np.uint64)
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            return np.array([int(operand.rstrip("U"), 0) % 2**64], np.uint64)
        if operand == "global_smem" or operand.startswith("global_smem+"):
            return np.array([int(operand.partition("+")[2] or 0)], np.uint64)
        if re.fullmatch(r"%r[sd]?\d+", operand):  # LLVM combines a register that it never wrote with one that it did
            return np.array([_GARBAGE], np.uint64)
        raise Fault(f"{operand} is read before it is written, or no operand")

    def _write(self, name: Operand, bits: Bits, active: Bits | None) -> None:
        if name == "_":
            return
        assert isinstance(name, str)
        if active is not None:
            before = self.registers.get(name)
            if before is None:
                before = np.array([_GARBAGE], np.uint64).astype(bits.dtype)
            bits = np.where(active, bits, before)
        self.registers[name] = bits

    def _addresses(self, operand: Operand) -> Bits:
        match = _ADDRESS.match(operand) if isinstance(operand, str) else None
        if match is None:
            raise Unknown(f"an address of another form: {operand}")
        base = self._read(match[1]).astype(np.int64)
        return np.broadcast_to(base + int(match[2] or 0), self.lanes)

    def _all(self, bits: Bits, kind: str) -> Bits:
        return np.broadcast_to(typed(bits, kind), self.lanes)

    # Instructions

    def _move(self, i: Instruction, active: Bits | None) -> None:
        to, source = i.operands
        if isinstance(to, tuple):
            size = int(i.type[1:]) // len(to)
            bits = typed(self._read(source), i.type)
            for place, name in enumerate(to):
                piece = bits >> bits.dtype.type(size * place)
                self._write(name, piece.astype(f"u{size // 8}"), active)
        elif isinstance(source, tuple):
            size = int(i.type[1:]) // len(source)
            total = np.zeros(1, dtype_of("u" + i.type[1:]))
            for place, name in enumerate(source):
                piece = typed(self._read(name), f"u{size}").astype(total.dtype)
                total = total | piece << total.dtype.type(size * place)
            self._write(to, total, active)
        else:
            self._write(to, bits_of(typed(self._read(source), i.type)), active)

    def _compare(self, i: Instruction, active: Bits | None) -> None:
        results = compare(i, [self._read(o) for o in i.operands[1:]])
        names = str(i.operands[0]).split("|")
        if len(names) != len(results):
            raise Unknown(f"line {i.line}: {i.text!r} is not implemented")
        for name, result in zip(names, results, strict=True):
            self._write(name, result, active)

    def _load(self, i: Instruction, active: Bits | None) -> None:
        to, source = i.operands[0], i.operands[1]
        if i.parts[0] == "param":
            self._write(to, self._parameter(str(source)[1:-1], i), active)
            return
        names = to if isinstance(to, tuple) else (to,)
        size = dtype_of(i.type).itemsize
        addresses, lanes = self._access(i, source, active, size * len(names))
        for place, name in enumerate(names):
            bits = np.full(self.lanes, _GARBAGE, np.uint64).astype(f"u{size}")
            at = addresses[lanes] + size * place
            if i.parts[0] == "global":
                bits[lanes] = self.memory.load(at, size)
            else:
                bits[lanes], hazard = self.shared.load(lanes, at, size)
                self._note(i, hazard)
            self._write(name, bits, active)

    def _store(self, i: Instruction, active: Bits | None) -> None:
        source = i.operands[1]
        values = source if isinstance(source, tuple) else (source,)
        size = dtype_of(i.type).itemsize
        addresses, lanes = self._access(i, i.operands[0], active, size * len(values))
        for place, name in enumerate(values):
            at, bits = addresses[lanes] + size * place, self._all(self._read(name), f"b{8 * size}")[lanes]
            if i.parts[0] == "global":
                self.memory.store(at, bits, size)
            else:
                self._note(i, self.shared.store(lanes, at, bits, size))

    def _access(self, i: Instruction, operand: Operand, active: Bits | None, size: int) -> tuple[Bits, Bits]:
        """Check and count an access of `size` bytes per lane; return all addresses, and the lanes that access."""
        if i.parts[0] not in ("global", "shared"):
            raise Unknown(f"line {i.line}: {i.text!r} is not implemented")
        addresses = self._addresses(operand)
        mask = np.ones(self.lanes, bool) if active is None else active
        lanes = np.flatnonzero(mask)
        if (addresses[lanes] % size).any():
            raise Fault(f"an address that is not a multiple of {size} bytes")
        kind = _kind(i)
        if i.parts[0] == "global" and len(lanes):
            name = self.memory.name_of(int(addresses[lanes[0]]))
            count_sectors(self.counts.sectors[f"{kind} {name}"], addresses, mask, size)
        elif len(lanes):
            count_wavefronts(self.counts.wavefronts[kind], addresses, mask, size)
        return addresses, lanes

    def _make_policy(self, i: Instruction, active: Bits | None) -> None:
        self._write(str(i.operands[0]), np.zeros(1, np.uint64), active)  # there is no cache

    def _note(self, i: Instruction, hazard: bool) -> None:
        text = f"line {i.line}: {i.text}"
        if hazard and text not in self.counts.hazards:
            self.counts.hazards.append(text)

    def _parameter(self, name: str, i: Instruction) -> Bits:
        names = [parameter for parameter, _ in self.program.parameters]
        if name not in names:
            raise Unknown(f"line {i.line}: {i.text!r}: no parameter {name}")
        place = names.index(name)
        value = self.arguments[place] if place < len(self.arguments) else 0
        size = self.program.parameters[place][1]
        if isinstance(value, float):
            return np.array([value], np.float32).view(np.uint32)
        if i.type[0] == "s":  # extends the sign into a wider register
            return np.array([value], np.int64).view(np.uint64)
        return np.array([value % 2 ** (8 * size)], np.uint64).astype(f"u{size}")

    def _atomic(self, i: Instruction, active: Bits | None) -> None:
        if i.parts[0] != "global" or i.parts[-2:] != ("max", "s32"):
            raise Unknown(f"line {i.line}: {i.text!r} is not implemented")
        place = 1 if i.name == "atom" else 0
        addresses, lanes = self._access(i, i.operands[place], active, 4)
        values = np.ascontiguousarray(self._all(self._read(i.operands[place + 1]), "b32")[lanes])
        before = self.memory.maximum(addresses[lanes], values) if len(lanes) else values
        if i.name == "atom":
            bits = np.zeros(self.lanes, np.uint32)
            bits[lanes] = before
            self._write(i.operands[0], bits, active)

    def _shuffle(self, i: Instruction, active: Bits | None) -> None:
        mode = i.parts[1]
        if mode not in ("bfly", "idx") or self._read(i.operands[3]).item() != WARP - 1 or active is not None:
            raise Unknown(f"line {i.line}: {i.text!r} is not implemented")
        values, by = self._all(self._read(i.operands[1]), "b32"), self._all(self._read(i.operands[2]), "u32")
        lane = np.arange(self.lanes)
        other = lane ^ by if mode == "bfly" else lane // WARP * WARP + by % WARP
        self._write(i.operands[0], values[other.astype(np.int64)], None)

    def _reduce(self, i: Instruction, active: Bits | None) -> None:
        reduction = {"max": np.max, "min": np.min, "add": np.sum}.get(i.parts[1])
        if reduction is None or i.parts[2:] != ("s32",) or active is not None:
            raise Unknown(f"line {i.line}: {i.text!r} is not implemented")
        values = self._all(self._read(i.operands[1]), "s32").reshape(-1, 1, WARP)
        masks = self._all(self._read(i.operands[2]), "u32").reshape(-1, WARP, 1)
        others = (masks >> np.arange(WARP, dtype=np.uint32)) & 1 == 0
        limits = np.iinfo(np.int32)
        values = np.where(others, {"max": limits.min, "min": limits.max, "add": 0}[i.parts[1]], values)
        self._write(i.operands[0], reduction(values, axis=-1).astype(np.int32).reshape(-1).view(np.uint32), None)

    def _barrier(self, i: Instruction, active: Bits | None) -> None:
        if i.parts == ("warp", "sync"):
            return
        if i.parts != ("sync",) or i.operands != ("0",) or not self._per_cta(i, active).all():
            raise Unknown(f"line {i.line}: {i.text!r} is not implemented: not a barrier of the whole CTA")
        self.shared.barrier()

    def _store_matrix(self, i: Instruction, active: Bits | None) -> None:
        for register, rows in self._matrices(i, i.operands[1], i.operands[0], active):
            bits = self._all(self._read(register), "b32").reshape(-1, WARP)
            halves = np.ascontiguousarray(bits).view(np.uint16).reshape(-1, 8, 8)
            halves = halves.transpose(0, 2, 1) if "trans" in i.parts else halves
            for column in range(8):
                values = np.ascontiguousarray(halves[:, :, column]).reshape(-1)
                self._note(i, self.shared.store(self._row_lanes(), rows + 2 * column, values, 2))

    def _load_matrix(self, i: Instruction, active: Bits | None) -> None:
        for register, rows in self._matrices(i, i.operands[0], i.operands[1], active):
            halves = np.empty((len(rows) // 8, 8, 8), np.uint16)
            for column in range(8):
                values, hazard = self.shared.load(self._row_lanes(), rows + 2 * column, 2)
                halves[:, :, column] = values.reshape(-1, 8)
                self._note(i, hazard)
            halves = halves.transpose(0, 2, 1) if "trans" in i.parts else halves
            self._write(register, np.ascontiguousarray(halves).reshape(-1).view(np.uint32), None)

    def _matrices(self, i: Instruction, registers: Operand, address: Operand, active: Bits | None) -> Any:
        """Yield each register of 8×8 matrices, and the addresses of their rows, [warps · 8]; count the accesses."""
        assert isinstance(registers, tuple)
        if "m8n8" not in i.parts or i.type != "b16" or active is not None:
            raise Unknown(f"line {i.line}: {i.text!r} is not implemented")
        addresses = self._addresses(address).reshape(-1, WARP)
        for place, register in enumerate(registers):
            rows = addresses[:, 8 * place : 8 * place + 8].reshape(-1)
            if (rows % 16).any():
                raise Fault("a row of a matrix that does not begin at a multiple of 16 bytes")
            words = (rows[:, None] + 4 * np.arange(4)).reshape(-1)
            kind = ".".join((i.name, *i.parts))
            count_wavefronts(self.counts.wavefronts[kind], words, np.ones(len(words), bool), 4)
            yield register, rows

    def _row_lanes(self) -> Bits:
        """Return a lane of the warp that accesses each row of a matrix."""
        return np.repeat(np.arange(0, self.lanes, WARP), 8)
