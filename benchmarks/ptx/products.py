"""Run kernels whose warps part: products on Hopper, one CTA at a time.

Warps that take the same branches are a party. A party runs until it waits for an mbarrier or a barrier, parts, or ends;
then another party, or a transfer that is under way, goes on, chosen at random. A product reads its operands and writes
its sums at its beginning or when it is waited for, at random too: if a tile is overwritten too early, or sums are read
too early, some seed shows wrong sums. Between the two, registers of sums hold NaN.

    TMA       a box of rows of 128 bytes, in the order of 128-byte swizzling; zeros outside of the matrix
    mbarrier  a phase ends when all arrivals and all bytes it expects are there
    wgmma     E4M3 and E5M2 in such boxes; 32 products are summed exactly, and rounded to float32 with the sum before
"""

import random
import re
from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.ptx.arithmetic import Bits, Unknown, typed
from benchmarks.ptx.machine import Group, Machine
from benchmarks.ptx.memory import WARP, Counts, DeviceMemory, Fault, SharedMemory
from benchmarks.ptx.program import Instruction, Operand, Program

WARPGROUP = 128
_NAN = np.uint32(0x7FC00000)
_HANDLES = 1 << 30
"""Address of the first descriptor; the others follow."""
_PRODUCT = re.compile(r"m64n(\d+)k32$")


@dataclass(frozen=True)
class Descriptor:
    """A matrix of bytes and the box of it that TMA loads."""

    data: Tensor
    rows: int
    columns: int


@dataclass
class _Mbarrier:
    count: int
    arrivals: int
    bytes: int = 0
    phase: int = 0

    def change(self, arrivals: int = 0, bytes: int = 0) -> None:
        """Note arrivals, and bytes to expect (or, negative, that have come)."""
        self.arrivals -= arrivals
        self.bytes += bytes
        if self.arrivals < 0:
            raise Fault("more arrivals at an mbarrier than it counts")
        if self.arrivals == 0 and self.bytes == 0:
            self.phase, self.arrivals = self.phase + 1, self.count


class Cta:
    """One CTA.

    Args:
        program: The kernel.
        arguments: Addresses, numbers and descriptors, in the order of its parameters.
        grid: CTAs along x, and y and z.
        memory: The tensors that it may access.
        cta: Its number in the grid.
        shared: Bytes of shared memory.
        counts: Counts of the launch.
        seed: Of the order in which parties go on.
    """

    def __init__(
        self, program: Program, arguments: list[Any], grid: tuple[int, ...], memory: DeviceMemory, cta: int,
        shared: int, counts: Counts, seed: int,
    ) -> None:  # fmt: skip
        self.descriptors = [value for value in arguments if isinstance(value, Descriptor)]
        handles = iter(range(_HANDLES, _HANDLES + len(self.descriptors)))
        self.arguments = [next(handles) if isinstance(value, Descriptor) else value for value in arguments]
        self.program, self.grid, self.memory, self.counts = program, grid, memory, counts
        self.shared = SharedMemory(1, shared, program.threads)
        self.mbarriers: dict[int, _Mbarrier] = {}
        self.transfers: list[Callable[[], None]] = []
        self.random = random.Random(f"{seed} {cta}")
        self.number = cta
        self.parties = [Party(self, np.arange(program.threads), {}, 0)]

    def run(self) -> None:
        """Run all warps to their end.

        Raises:
            Fault: If no warp can go on.
        """
        while self.parties or self.transfers:
            ready: list[Any] = [party for party in self.parties if party.is_ready()] + self.transfers
            if not ready and not self._release():
                waiting = [party.program.instructions[party.at].text for party in self.parties]
                raise Fault(f"no warp can go on: they wait at {waiting}")
            if not ready:
                continue
            chosen = self.random.choice(ready)
            if isinstance(chosen, Party):
                self.parties.remove(chosen)
                self.parties += chosen.go_on()
            else:
                self.transfers.remove(chosen)
                chosen()

    def _release(self) -> bool:
        """Let parties go on that have all come to a barrier."""
        for name in {party.barrier for party in self.parties if party.barrier is not None}:
            there = [party for party in self.parties if party.barrier == name]
            if sum(party.lanes for party in there) == name[1]:
                for party in there:
                    party.barrier = None
                self.shared.barrier()
                return True
        return False

    def load(self, box: Descriptor, row: int, column: int, to: int, mbarrier: _Mbarrier) -> None:
        """Load a box into shared memory."""
        data = box.data.view(torch.uint8).numpy()
        part = np.zeros((box.rows, box.columns), np.uint8)
        inside = data[max(row, 0) : row + box.rows, max(column, 0) : column + box.columns]
        if min(row, column) < 0 or to % 1024 or box.columns != 128:
            raise Unknown("a box that does not begin inside of its matrix, or not of rows of 128 bytes")
        part[: inside.shape[0], : inside.shape[1]] = inside
        at = to + np.arange(part.size)
        self.shared.bytes[_swizzled(at)] = part.reshape(-1)
        mbarrier.change(bytes=-part.size)


def _swizzled(addresses: Bits) -> Bits:
    """Return where 128-byte swizzling puts bytes: 16 bytes change their place in a row with the row's number."""
    return addresses ^ (addresses >> 7 & 7) << 4


@dataclass
class _Product:
    """One wgmma of a warpgroup, and the sums that it adds to: None for those of the one before."""

    warpgroup: int
    names: tuple[str, ...]
    left: int
    right: int
    types: tuple[str, str]
    before: Bits | None
    adds: bool
    tiles: tuple[Bits, Bits] | None

    @property
    def sums(self) -> tuple[int, str]:
        """Which sums it adds to."""
        return self.warpgroup, self.names[0]


class Party(Machine):
    """Warps of a CTA that run in lockstep."""

    def __init__(self, cta: Cta, threads: Bits, registers: dict[str, Bits], at: int) -> None:
        shared = copy(cta.shared)
        shared.restrict(threads)
        group = Group(np.array([cta.number]), registers, shared, at)
        super().__init__(cta.program, cta.arguments, cta.grid, cta.memory, group, cta.counts)
        self.cta, self.threads, self.at, self.lanes = cta, threads, at, len(threads)
        self.special = {name: bits[threads] for name, bits in self.special.items()}
        self.barrier: tuple[str, int] | None = None
        self.groups: list[list[_Product]] = []
        self.open: list[_Product] = []
        self.sums: dict[tuple[int, str], Bits] = {}
        self.under_way: Counter[tuple[int, str]] = Counter()
        self.steps |= {
            "barrier": self._barrier, "mbarrier": self._mbarrier, "wgmma": self._wgmma, "cp": self._transfer,
            "cvta": self._move, "elect": self._elect, "setmaxnreg": self._nothing, "fence": self._nothing,
        }  # fmt: skip

    def is_ready(self) -> bool:
        """Whether it waits for nothing."""
        if self.barrier is not None:
            return False
        i = self.program.instructions[self.at]
        if i.name != "mbarrier" or i.parts[0] != "try_wait":
            return True
        return self._mbarrier_at(i.operands[1]).phase % 2 != int(self._all(self._read(i.operands[2]), "b32")[0])

    def go_on(self) -> list["Party"]:
        """Run until it waits, ends or parts; return the parties that go on."""
        while True:
            i = self.program.instructions[self.at]
            if not self.is_ready():
                return [self]
            self.at += 1
            self.counts.instructions += 1
            active = self._active(i)
            if i.name == "bra":
                taken = np.ones(self.lanes, bool) if active is None else active
                target = self.program.labels[str(i.operands[-1])] if taken.any() else self.at
                if taken.any() and not taken.all():
                    return [self._of(taken, target, i), self._of(~taken, self.at, i)]
                self.at = target
            elif i.name == "brx":
                index = self._all(self._read(i.operands[0]), "b32")
                table = self.program.tables[str(i.operands[1])]
                return [self._of(index == n, self.program.labels[table[n]], i) for n in np.unique(index)]
            elif i.name in ("ret", "exit"):
                return []
            else:
                try:
                    self._step(i, active)
                except Fault as fault:
                    raise Fault(f"{self.program.name}, line {i.line}: {i.text!r}: {fault}") from None

    def _of(self, which: Bits, at: int, i: Instruction) -> "Party":
        """Return the party of some lanes."""
        warps = which.reshape(-1, WARP)
        if (warps.any(1) != warps.all(1)).any():
            raise Unknown(f"line {i.line}: {i.text!r} parts the threads of a warp")
        if self.groups or self.open:
            raise Unknown(f"line {i.line}: {i.text!r} parts warps with products under way")
        kept = {name: bits if len(bits) == 1 else bits[which] for name, bits in self.registers.items()}
        return Party(self.cta, self.threads[which], kept, at)

    # Operands

    def _read(self, operand: Operand) -> Bits:
        names = [name for name, _ in self.program.parameters]
        if operand in names:  # the address of a descriptor
            return np.array([self.arguments[names.index(str(operand))]], np.uint64)
        return super()._read(operand)

    def _only(self, bits: Bits) -> int:
        """Return the one value that all lanes hold."""
        values = np.unique(bits)
        if len(values) != 1:
            raise Unknown("lanes hold different values where one is expected")
        return int(values[0])

    def _mbarrier_at(self, operand: Operand) -> _Mbarrier:
        address = self._only(self._addresses(operand))
        if address not in self.cta.mbarriers:
            raise Fault("an mbarrier that was not initialized")
        return self.cta.mbarriers[address]

    # Instructions

    def _nothing(self, i: Instruction, active: Bits | None) -> None:
        pass

    def _barrier(self, i: Instruction, active: Bits | None) -> None:
        if i.parts == ("warp", "sync"):
            return
        if i.parts != ("sync",) or active is not None:
            raise Unknown(f"line {i.line}: {i.text!r} is not implemented")
        threads = int(str(i.operands[1])) if len(i.operands) > 1 else self.program.threads
        self.barrier = str(i.operands[0]), threads

    def _elect(self, i: Instruction, active: Bits | None) -> None:
        self._write(str(i.operands[0]).split("|")[1], np.arange(self.lanes) % WARP == 0, active)

    def _mbarrier(self, i: Instruction, active: Bits | None) -> None:
        lanes = np.flatnonzero(np.ones(self.lanes, bool) if active is None else active)
        if i.parts[0] == "try_wait":  # the party waits until it has ended
            self._write(i.operands[0], np.ones(1, bool), active)
        elif i.parts[0] == "init" and len(lanes) == 1:
            count = int(str(i.operands[1]))
            self.cta.mbarriers[self._only(self._addresses(i.operands[0]))] = _Mbarrier(count, count)
        elif i.parts[0] == "inval" and len(lanes) == 1:
            del self.cta.mbarriers[self._only(self._addresses(i.operands[0]))]
        elif i.parts[0] == "arrive":
            for _ in lanes:
                expected = int(str(i.operands[2])) if "expect_tx" in i.parts else 0
                self._mbarrier_at(i.operands[1]).change(1, expected)
        elif len(lanes):
            raise Unknown(f"line {i.line}: {i.text!r} is not implemented")

    def _transfer(self, i: Instruction, active: Bits | None) -> None:
        if i.parts[:5] != ("async", "bulk", "tensor", "2d", "shared::cluster") and i.parts[4] != "shared::cta":
            raise Unknown(f"line {i.line}: {i.text!r} is not implemented")
        lanes = np.flatnonzero(np.ones(self.lanes, bool) if active is None else active)
        source = re.match(r"\[(%\w+),\{(%\w+),(%\w+)\}\]$", str(i.operands[1]))
        if source is None:
            raise Unknown(f"line {i.line}: {i.text!r} is not implemented")
        handle, column, row = (np.broadcast_to(self._read(name), self.lanes) for name in source.groups())
        to, mbarrier = self._addresses(i.operands[0]), self._addresses(i.operands[2])
        for lane in lanes:
            box = self.cta.descriptors[int(handle[lane]) - _HANDLES]
            at = int(typed(row, "s32")[lane]), int(typed(column, "s32")[lane]), int(to[lane])
            waiting = self.cta.mbarriers[int(mbarrier[lane])]
            self.cta.transfers.append(lambda box=box, at=at, waiting=waiting: self.cta.load(box, *at, waiting))

    def _wgmma(self, i: Instruction, active: Bits | None) -> None:
        if i.parts[0] == "commit_group":
            self.groups.append(self.open)
            self.open = []
        elif i.parts[0] == "wait_group":
            while len(self.groups) > int(str(i.operands[0])):
                for product in self.groups.pop(0):
                    self._multiply(product)
        elif i.parts[0] == "mma_async":
            self._begin(i)
        elif i.parts[0] != "fence":
            raise Unknown(f"line {i.line}: {i.text!r} is not implemented")

    def _begin(self, i: Instruction) -> None:
        shape = _PRODUCT.match(i.parts[3])
        names, left, right, added = i.operands[:4]
        if shape is None or i.operands[4:] != ("1", "1") or not isinstance(names, tuple) or self.lanes % WARPGROUP:
            raise Unknown(f"line {i.line}: {i.text!r} is not implemented")
        for warpgroup in range(self.lanes // WARPGROUP):
            lanes = slice(WARPGROUP * warpgroup, WARPGROUP * (warpgroup + 1))
            a, b = (self._only(np.broadcast_to(self._read(o), self.lanes)[lanes]) for o in (left, right))
            first = not self.under_way[warpgroup, names[0]]
            before = np.stack([self._all(self._read(n), "b32")[lanes] for n in names]) if first else None
            adds = bool(self._only(np.broadcast_to(self._read(added), self.lanes)))
            product = _Product(warpgroup, names, a, b, (i.parts[-2], i.parts[-1]), before, adds, None)
            if self.cta.random.random() < 0.5:
                product.tiles = self._tiles(product)
            self.under_way[product.sums] += 1
            self.open.append(product)
        for name in names:
            self._write(name, np.full(self.lanes, _NAN), None)

    def _multiply(self, product: _Product) -> None:
        """Carry out a product; write the sums if it is the last one under way that adds to them."""
        left, right = self._tiles(product) if product.tiles is None else product.tiles
        count = np.arange(len(product.names))[:, None]
        lane = np.arange(WARPGROUP)
        row = 16 * (lane // WARP) + lane % WARP // 4 + 8 * (count // 2 % 2)
        column = 8 * (count // 4) + 2 * (lane % 4) + count % 2
        total = (left @ right.T)[row, column]
        if product.adds:
            before = self.sums[product.sums] if product.before is None else product.before
            total = total + before.view(np.float32).astype(np.float64)
        self.sums[product.sums] = total.astype(np.float32).view(np.uint32)
        self.under_way[product.sums] -= 1
        if not self.under_way[product.sums]:
            for name, bits in zip(product.names, self.sums.pop(product.sums), strict=True):
                register = self.registers[name].copy()
                register[WARPGROUP * product.warpgroup : WARPGROUP * (product.warpgroup + 1)] = bits
                self.registers[name] = register

    def _tiles(self, product: _Product) -> tuple[Bits, Bits]:
        """Read the operands of a product from shared memory as it is now."""
        columns = 2 * len(product.names)
        return self._tile(product.left, 64, product.types[0]), self._tile(product.right, columns, product.types[1])

    def _tile(self, descriptor: int, rows: int, kind: str) -> Bits:
        """Return [rows, 32] values that a descriptor of a matrix in shared memory names, from E4M3 or E5M2."""
        start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
        if descriptor >> 62 != 1 or descriptor >> 49 & 7:
            raise Unknown(f"a matrix descriptor of another kind than 128-byte swizzling: {descriptor:#x}")
        row = np.arange(rows)[:, None]
        codes = self.shared.bytes[_swizzled(start + row // 8 * stride + row % 8 * 128 + np.arange(32))]
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
        return torch.from_numpy(np.ascontiguousarray(codes)).view(dtype).double().numpy()
