"""Count the bytes that kernels load and store, per lane, in Triton's interpreter.

Three counts per argument of a launch, one per level of the memory hierarchy:

    requested  every unmasked lane: traffic of the load and store units
    program    each address once per program: what a multiprocessor fetches if its L1 holds a program's data
    device     each address once per launch: device-memory traffic if L2 holds shared data and data that the launch
               itself has written

`sectors` is `program` in units of 32-byte memory sectors: larger if programs access parts of sectors.
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
    requested: int = 0
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
    places: dict[str, list[int]] = field(default_factory=dict)
    """Lowest address of each load of the first program, relative to the argument, in order."""

    def device_bytes(self, at_least: int) -> int:
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
            for name, argument_accesses in self._by_argument(accesses).items():
                getattr(result, kind)[name] = _bytes(argument_accesses)
        first = [access for access in self.accesses["loads"] if not any(access[0]) and access[1].size]
        for name, argument_loads in self._by_argument(first).items():
            result.places[name] = [int(a.min()) - self.tensors[name].data_ptr() for _, a, _ in argument_loads]
        stored = self._by_argument(self.accesses["stores"])
        for name, argument_loads in self._by_argument(self.accesses["loads"]).items():
            if name in stored:
                written = np.concatenate([addresses for _, addresses, _ in stored[name]])
                read = np.unique(np.concatenate([addresses for _, addresses, _ in argument_loads]))
                result.loads[name].device -= argument_loads[0][2] * int(np.isin(read, written).sum())
        return result

    def _by_argument(self, accesses):
        """Group accesses by the first argument that contains the address; arguments may share memory."""
        by_argument = defaultdict(list)
        for program, addresses, size in accesses:
            for name, tensor in self.tensors.items():
                last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
                first = tensor.data_ptr()
                inside = (addresses >= first) & (addresses <= first + last * tensor.element_size())
                if inside.any():
                    by_argument[name].append((program, addresses[inside], size))
                    addresses = addresses[~inside]
            assert not addresses.size, f"{self.kernel}: {addresses.size} accesses outside every argument"
        return by_argument


def _bytes(accesses):
    size = accesses[0][2]
    programs = defaultdict(list)
    for program, addresses, _ in accesses:
        programs[program].append(addresses)
    addresses_by_program = [np.unique(np.concatenate(parts)) for parts in programs.values()]
    return Bytes(
        requested=size * sum(addresses.size for _, addresses, _ in accesses),
        program=size * sum(addresses.size for addresses in addresses_by_program),
        device=size * np.unique(np.concatenate(addresses_by_program)).size,
        sectors=SECTOR * sum(np.unique(addresses // SECTOR).size for addresses in addresses_by_program),
    )


@contextmanager
def counted() -> Iterator[list[Traffic]]:
    """Count the traffic of kernels launched inside the block; one `Traffic` per launch, in order."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw")
    load, store, update = before = tuple(getattr(builder, name) for name in names)
    call = executor.__call__
    launches: list[Traffic] = []
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

    def counted_call(self, *arguments, **named):
        running.append(_Recorder(self.fn.__name__, {**dict(zip(self.arg_names, arguments, strict=False)), **named}))
        try:
            call(self, *arguments, **named)
        finally:
            launches.append(running.pop().traffic())

    replacements = (counted_load, counted_store, counted_update)
    try:
        for name, replacement in zip(names, replacements, strict=True):
            setattr(builder, name, replacement)
        executor.__call__ = counted_call
        yield launches
    finally:
        for name, original in zip(names, before, strict=True):
            setattr(builder, name, original)
        executor.__call__ = call
