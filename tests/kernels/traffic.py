"""Bytes that kernels really load and store, counted lane by lane while Triton's interpreter runs them.

Three counts for each argument of a launch, because three things serve a load:

    asked     every lane that the mask lets through: what goes through the load and store units
    program   each address once per program: what a multiprocessor fetches if its L1 keeps a program's data
    device    each address once per launch: what device memory must move if L2 keeps what programs share, and what the
              launch itself has written and reads again

`sectors` is `program` in the 32 bytes that memory hands out at a time: larger where programs touch parts of sectors.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from triton.runtime import interpreter

SECTOR = 32


@dataclass
class Bytes:
    """What one argument's accesses of one kind come to, in bytes."""

    asked: int = 0
    program: int = 0
    device: int = 0
    sectors: int = 0


@dataclass
class Traffic:
    """One launch: bytes by argument. An atomic update is neither a load nor a store."""

    kernel: str
    sizes: dict[str, int]
    loads: dict[str, Bytes] = field(default_factory=dict)
    stores: dict[str, Bytes] = field(default_factory=dict)
    atomics: dict[str, Bytes] = field(default_factory=dict)

    def device_bytes(self, at_least: int) -> int:
        """Loaded and stored through device memory, of arguments that are at least so many bytes large."""
        kinds = (self.loads, self.stores)
        return sum(b.device for kind in kinds for name, b in kind.items() if self.sizes[name] >= at_least)


class _Recorder:
    """The accesses of the launch that is running: (program, addresses, bytes per element) by kind."""

    def __init__(self, kernel, arguments):
        tensors = {name: getattr(a, "base", a) if not hasattr(a, "data_ptr") else a for name, a in arguments.items()}
        self.kernel = kernel
        self.tensors = {name: t for name, t in tensors.items() if hasattr(t, "data_ptr") and t.numel()}
        self.accesses = {"loads": [], "stores": [], "atomics": []}

    def record(self, kind, program, pointers, mask):
        addresses, inside = np.broadcast_arrays(pointers.data, mask.data)
        size = pointers.get_element_ty().primitive_bitwidth // 8
        self.accesses[kind].append((program, addresses[inside].reshape(-1).astype(np.int64), size))

    def traffic(self):
        result = Traffic(self.kernel, {name: t.nbytes for name, t in self.tensors.items()})
        for kind, accesses in self.accesses.items():
            for name, its_accesses in self._by_argument(accesses).items():
                getattr(result, kind)[name] = _bytes(its_accesses)
        stored = self._by_argument(self.accesses["stores"])
        for name, its_loads in self._by_argument(self.accesses["loads"]).items():
            if name in stored:
                written = np.concatenate([addresses for _, addresses, _ in stored[name]])
                read = np.unique(np.concatenate([addresses for _, addresses, _ in its_loads]))
                result.loads[name].device -= its_loads[0][2] * int(np.isin(read, written).sum())
        return result

    def _by_argument(self, accesses):
        """Each access to the first argument whose memory it lies in; arguments may share memory."""
        found = defaultdict(list)
        for program, addresses, size in accesses:
            for name, tensor in self.tensors.items():
                last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
                first = tensor.data_ptr()
                inside = (addresses >= first) & (addresses <= first + last * tensor.element_size())
                if inside.any():
                    found[name].append((program, addresses[inside], size))
                    addresses = addresses[~inside]
            assert not addresses.size, f"{self.kernel}: {addresses.size} accesses outside every argument"
        return found


def _bytes(accesses):
    size = accesses[0][2]
    programs = defaultdict(list)
    for program, addresses, _ in accesses:
        programs[program].append(addresses)
    each = [np.unique(np.concatenate(parts)) for parts in programs.values()]
    return Bytes(
        asked=size * sum(addresses.size for _, addresses, _ in accesses),
        program=size * sum(addresses.size for addresses in each),
        device=size * np.unique(np.concatenate(each)).size,
        sectors=SECTOR * sum(np.unique(addresses // SECTOR).size for addresses in each),
    )


@contextmanager
def counted() -> Iterator[list[Traffic]]:
    """Count what the kernels launched inside the block do; one `Traffic` per launch, in order."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
    load, store, update, swap = before = tuple(getattr(builder, name) for name in names)
    call = executor.__call__
    found: list[Traffic] = []
    running: list[_Recorder] = []

    def counted_load(self, pointers, mask, *rest):
        running[-1].record("loads", self.grid_idx, pointers, mask)
        return load(self, pointers, mask, *rest)

    def counted_store(self, pointers, value, mask, *rest):
        running[-1].record("stores", self.grid_idx, pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def counted_update(self, operation, pointers, value, mask, *rest):
        running[-1].record("atomics", self.grid_idx, pointers, mask)
        return update(self, operation, pointers, value, mask, *rest)

    def counted_swap(self, pointers, *rest):
        everywhere = interpreter.TensorHandle(np.ones_like(pointers.data, dtype=bool), interpreter.tl.int1)
        running[-1].record("atomics", self.grid_idx, pointers, everywhere)
        return swap(self, pointers, *rest)

    def counted_call(self, *arguments, **named):
        running.append(_Recorder(self.fn.__name__, {**dict(zip(self.arg_names, arguments, strict=False)), **named}))
        try:
            call(self, *arguments, **named)
        finally:
            found.append(running.pop().traffic())

    replacements = (counted_load, counted_store, counted_update, counted_swap)
    try:
        for name, replacement in zip(names, replacements, strict=True):
            setattr(builder, name, replacement)
        executor.__call__ = counted_call
        yield found
    finally:
        for name, original in zip(names, before, strict=True):
            setattr(builder, name, original)
        executor.__call__ = call
