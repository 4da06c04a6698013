"""Memory of a GPU as the interpreter sees it: tensors of this process, and the shared memory of CTAs.

Every access is checked (alignment, bounds) and counted per warp:

    sectors      32-byte sectors of device memory that one request touches; ideal: the bytes it needs over 32
    wavefronts   passes over the 32 banks of shared memory, 4 bytes wide; ideal: one per 128 bytes of lanes
    hazards      bytes of shared memory that two warps of a CTA access between two barriers, one of them writing other
                 values: what the reader gets depends on which warp is first

Lanes of a warp run in lockstep here, and an instruction's lanes read before any writes.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.ptx.arithmetic import Bits

WARP = 32
SECTOR = 32
_GARBAGE = 0xCB
"""What shared memory holds before it is written."""
_NOBODY, _SEVERAL = -1, -2


class Fault(RuntimeError):
    """An access outside of every tensor or not aligned, a barrier that not all threads reach, …"""


@dataclass
class Count:
    """Requests of warps of one kind, the units of traffic that they take, and the least they could take."""

    requests: int = 0
    units: int = 0
    ideal: int = 0

    def add(self, requests: int, units: int, ideal: int) -> None:
        """Add requests."""
        self.requests += requests
        self.units += units
        self.ideal += ideal


@dataclass
class Counts:
    """What one launch did.

    Attributes:
        instructions: Executed, by all CTAs together.
        sectors: Of device memory, by kind of access, with cache hints, and argument: "ld.global.v4.b32.evict_first x".
        wavefronts: Of shared memory, by kind of access.
        hazards: First instruction of each pair that races, as text with its line.
    """

    instructions: int = 0
    sectors: dict[str, Count] = field(default_factory=lambda: defaultdict(Count))
    wavefronts: dict[str, Count] = field(default_factory=lambda: defaultdict(Count))
    hazards: list[str] = field(default_factory=list)


class DeviceMemory:
    """Tensors of this process, at their own addresses.

    Args:
        tensors: What a kernel may access.
        names: Their names, for counts; of tensors that share a storage, the first counts.
    """

    def __init__(self, tensors: Sequence[Tensor], names: Sequence[str] = ()) -> None:
        used = [t.untyped_storage() for t in tensors]
        storages = {storage.data_ptr(): storage for storage in used if storage.nbytes()}
        self._starts = np.array(sorted(storages), np.int64)
        named = {storage.data_ptr(): name for storage, name in reversed(list(zip(used, names, strict=False)))}
        self._names = [named.get(int(start), "") for start in self._starts]
        # Storages are read and written where they are.
        self._bytes = [_as_bytes(storages[int(start)]) for start in self._starts]
        self._ends = self._starts + np.array([len(b) for b in self._bytes], np.int64)

    def name_of(self, address: int) -> str:
        """Return the name of the tensor at an address."""
        which = int(np.searchsorted(self._starts, address, "right")) - 1
        return self._names[which] if which >= 0 else ""

    def load(self, addresses: Bits, size: int) -> Bits:
        """Return elements of `size` bytes at aligned addresses."""
        result = np.empty(len(addresses), f"u{size}")
        for which, lanes in self._segments(addresses, size):
            result[lanes] = self._elements(which, size)[(addresses[lanes] - self._starts[which]) // size]
        return result

    def store(self, addresses: Bits, values: Bits, size: int) -> None:
        """Store elements at aligned addresses."""
        for which, lanes in self._segments(addresses, size):
            at = (addresses[lanes] - self._starts[which]) // size
            self._elements(which, size)[at] = values[lanes]

    def maximum(self, addresses: Bits, values: Bits) -> Bits:
        """Replace int32 by the larger of them and a value, one after the other; return what was there before all."""
        before = self.load(addresses, 4)
        for which, lanes in self._segments(addresses, 4):
            at = (addresses[lanes] - self._starts[which]) // 4
            np.maximum.at(self._elements(which, 4).view(np.int32), at, values[lanes].view(np.int32))
        return before

    def _elements(self, which: int, size: int) -> Bits:
        data = self._bytes[which]
        return data[: len(data) // size * size].view(f"u{size}")

    def _segments(self, addresses: Bits, size: int) -> list[tuple[int, Any]]:
        """Return pairs of a storage and the lanes that access it."""
        if not len(addresses):
            return []
        which = np.searchsorted(self._starts, addresses, "right") - 1
        outside = (which < 0) | (addresses + size > self._ends[which])
        if outside.any():
            raise Fault(f"{int(outside.sum())} lanes access addresses outside of every tensor")
        first = int(which[0])
        if (which == first).all():
            return [(first, slice(None))]
        return [(int(w), which == w) for w in np.unique(which)]


def _as_bytes(storage: Any) -> Bits:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


class SharedMemory:
    """Shared memory of several CTAs that run in lockstep, with who accessed each byte since the last barrier."""

    def __init__(self, ctas: int, size: int, threads: int) -> None:
        self.size = size
        self._warp = np.arange(ctas * threads) % threads // WARP
        self._base = np.arange(ctas * threads) // threads * size
        self._data = np.full(ctas * size, _GARBAGE, np.uint8)
        self._writer = np.full(ctas * size, _NOBODY, np.int16)
        self._reader = np.full(ctas * size, _NOBODY, np.int16)

    def part(self, ctas: Bits, threads: int) -> "SharedMemory":
        """Return a copy for some of the CTAs."""
        other = SharedMemory(len(ctas), self.size, threads)
        for name in ("_data", "_writer", "_reader"):
            setattr(other, name, getattr(self, name).reshape(-1, self.size)[ctas].reshape(-1))
        return other

    @property
    def bytes(self) -> Bits:
        """What it holds."""
        return self._data

    def restrict(self, lanes: Bits) -> None:
        """Be accessed by some of the lanes only, which count from 0 from now on."""
        self._warp, self._base = self._warp[lanes], self._base[lanes]

    def barrier(self) -> None:
        """Order all accesses before it before all after it."""
        self._writer[:] = _NOBODY
        self._reader[:] = _NOBODY

    def load(self, lanes: Bits, addresses: Bits, size: int) -> tuple[Bits, bool]:
        """Return elements, and whether another warp has written some of their bytes since the last barrier."""
        at, warps = self._bytes_at(lanes, addresses, size)
        writer = self._writer[at]
        hazard = (writer != _NOBODY) & (writer != warps)
        before = self._reader[at]
        self._reader[at] = warps
        several = (self._reader[at] != warps) | ((before != _NOBODY) & (before != warps))
        self._reader[at[several]] = _SEVERAL
        return self._data[at].view(f"u{size}")[:, 0], bool(hazard.any())

    def store(self, lanes: Bits, addresses: Bits, values: Bits, size: int) -> bool:
        """Store elements; return whether another warp has accessed some of their bytes since the last barrier."""
        at, warps = self._bytes_at(lanes, addresses, size)
        new = np.ascontiguousarray(values).view(np.uint8).reshape(at.shape)
        reader, writer, changes = self._reader[at], self._writer[at], self._data[at] != new
        hazard = (reader != _NOBODY) & (reader != warps) & changes
        hazard |= (writer != _NOBODY) & (writer != warps) & changes
        self._data[at] = new
        self._writer[at] = warps
        hazard |= (self._writer[at] != warps) & (self._data[at] != new)  # two warps in this instruction
        return bool(hazard.any())

    def _bytes_at(self, lanes: Bits, addresses: Bits, size: int) -> tuple[Bits, Bits]:
        """Return the places of each element's bytes, [lanes, size], and the warps, [lanes, 1]."""
        if ((addresses < 0) | (addresses + size > self.size)).any():
            raise Fault(f"an access outside of the {self.size} bytes of shared memory")
        at = (addresses + self._base[lanes])[:, None] + np.arange(size)
        return at, np.broadcast_to(self._warp[lanes][:, None], at.shape)


def count_sectors(count: Count, addresses: Bits, active: Bits, size: int) -> None:
    """Count one instruction on device memory; addresses of all lanes, whether each accesses, bytes per lane."""
    requests = active.reshape(-1, WARP).any(1)
    sectors = _distinct(np.where(active, addresses // SECTOR, -1))
    ideal = -(-_distinct(np.where(active, addresses, -1)) * size // SECTOR)
    count.add(int(requests.sum()), int(sectors.sum()), int(ideal.sum()))


def _distinct(keys: Bits) -> Bits:
    """Return the number of different keys of each warp; -1 is none."""
    ordered = np.sort(keys.reshape(-1, WARP), axis=1)
    return (np.diff(ordered, axis=1) != 0).sum(1) + (ordered[:, 0] != -1)


def count_wavefronts(count: Count, addresses: Bits, active: Bits, size: int) -> None:
    """Count one instruction on shared memory: a pass serves 128 bytes of lanes, one word of each bank."""
    words = max(size // 4, 1)
    at = addresses[:, None] // 4 + np.arange(words)
    at = np.where(active[:, None], at, -1).reshape(-1, WARP)  # passes × words; lanes of a pass are neighbours
    passes = active.reshape(-1, WARP // words).any(1)
    ordered = np.sort(at, axis=1)
    new = np.diff(ordered, axis=1, prepend=-1) != 0
    row = np.broadcast_to(np.arange(len(ordered))[:, None], ordered.shape)[new]
    per_bank = np.bincount(row * WARP + ordered[new] % WARP, minlength=len(ordered) * WARP).reshape(-1, WARP)
    requests = active.reshape(-1, WARP).any(1)
    count.add(int(requests.sum()), int(per_bank.max(1).sum()), int(passes.sum()))
