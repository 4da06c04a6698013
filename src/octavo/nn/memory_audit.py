"""Measure the memory that a forward pass saves for backward, by unique storages, as the allocator does.

Does not count the model's own parameters and buffers, and what selective checkpointing holds outside autograd.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from octavo.activations.exactness import created_nodes
from octavo.activations.saved_tensors import PackedTensor
from octavo.nn.resident import Fp8Weight
from octavo.numerics.display import Table
from octavo.numerics.suggestions import grouped, merged, pattern
from octavo.runtime.torch_compat import all_held_for_backward, is_dtensor, own_saved_tensors_hooks, tree_leaves
from octavo.tensor import local_tensor


@dataclass(frozen=True, kw_only=True)
class SavedStorage:
    bytes: int  # Size of the storage
    dtype: torch.dtype  # Dtype of the tensor that was saved first
    shape: tuple[int, ...]  # Shape of that tensor
    owner: str = ""  # Name of the innermost running module; empty for the model itself, and unless `audit` asked
    op: str = ""  # Operation that saved it first, as autograd names it; empty if unknown


@dataclass(kw_only=True)
class Audit:
    """Storages saved for backward. Prints as a table, similar rows merged."""

    rows: Sequence[SavedStorage]

    def __iter__(self) -> Iterator[SavedStorage]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def by_dtype(self) -> dict[torch.dtype, int]:
        return self._summed("dtype")

    @property
    def by_owner(self) -> dict[str, int]:
        return self._summed("owner")

    def _summed(self, name: str) -> Counter[Any]:
        sums = Counter[Any]()
        for row in self.rows:
            sums[getattr(row, name)] += row.bytes
        return sums

    def __str__(self) -> str:
        groups = grouped(((pattern(row.owner), row.dtype, row.shape, row.op), row) for row in self.rows)
        cells: list[tuple[str, ...]] = []
        for rows in sorted(groups.values(), key=lambda rows: -sum(row.bytes for row in rows)):
            first, total = rows[0], sum(row.bytes for row in rows)
            shape = "×".join(map(str, first.shape)) or "scalar"
            owner = merged([row.owner for row in rows]) or "(the model)"
            cells.append((f"{total:,}", f"{len(rows)}", dtype_name(first.dtype), shape, owner, first.op or "–"))
        in_all = (f"{self.bytes:,}", f"{len(self.rows)}", "", "", "in all", "")
        headings = ("bytes", "count", "dtype", "shape", "owner", "saved by")
        return "\n".join(Table(headings=headings, align=">><<<<", rows=[*cells, (), in_all]).lines())


@contextmanager
def saved_for_backward(model: nn.Module) -> Iterator[Audit]:
    """Measure what forward passes inside the block save for backward, in the order in which they save it."""
    # Run the forward inside, then read `.bytes`.
    with _recorded(model, owners=False) as (rows, _):
        yield Audit(rows=rows)


@contextmanager
def _recorded(model: nn.Module, *, owners: bool) -> Iterator[tuple[list[SavedStorage], WeakIdKeyDictionary]]:
    """Record saved storages; yield their rows, and the index of the row of each storage that still exists."""
    # Storages are told apart by their objects: another one may have the address of one that was freed meanwhile.
    own, rows, known = WeakIdKeyDictionary(), list[SavedStorage](), WeakIdKeyDictionary()
    own.update(dict.fromkeys(_own_storages(model)))
    proxy: Any = weakref.proxy(model)  # graphs hold `pack`, and must not hold the model
    sharded = any(is_dtensor(parameter) for parameter in model.parameters())
    running = [""]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if sharded and storage not in own and storage not in known:
            own.update(dict.fromkeys(_own_storages(proxy)))  # FSDP has gathered parameters since
        size = storage.nbytes()
        if size and storage not in own and storage not in known:
            known[storage] = len(rows)
            shape = tuple(tensor.shape)
            rows.append(SavedStorage(bytes=size, dtype=tensor.dtype, shape=shape, owner=running[-1]))
        # A node that saves its own output must not hold it with its `grad_fn`: gc does not see that cycle.
        return tensor if tensor.grad_fn is None else tensor.detach()

    def pop(*_: object) -> None:
        running.pop()

    with ExitStack() as hooks:
        for name, module in model.named_modules() if owners else ():
            push = module.register_forward_pre_hook(lambda *_, name=name: running.append(name), prepend=True)
            hooks.enter_context(push)
            hooks.enter_context(module.register_forward_hook(pop, always_call=True))
        hooks.enter_context(own_saved_tensors_hooks(pack, lambda tensor: tensor))
        yield rows, known


def audit(model: nn.Module, batch: object, *, loss: Callable[[nn.Module, Any], Tensor] | None = None) -> Audit:
    """Run one forward and list every storage that it saves for backward.

    Args:
        model: Any module, in the mode to measure (`train()`). Only the forward itself changes its state.
        batch: Keyword arguments as a mapping, positional ones as a tuple or list, or the one argument.
        loss: `loss(model, batch)` computes the loss; by default the graph ends at the model's outputs.

    Returns:
        An `Audit`: its rows sum up to what `saved_for_backward` counts.

    Examples:
        >>> audit = octavo.nn.memory_audit.audit(torch.nn.Linear(64, 64), torch.ones(8, 64))
        >>> [(row.bytes, row.op) for row in audit.rows]
        [(2048, 'Addmm')]
    """
    with _recorded(model, owners=True) as (rows, known):
        outputs = loss(model, batch) if loss is not None else call(model, batch)
    ops = _saving_ops(outputs)
    for storage, index in known.items():
        rows[index] = replace(rows[index], op=ops.get(storage._cdata, ""))
    return Audit(rows=tuple(sorted(rows, key=lambda storage: -storage.bytes)))


def call(model: nn.Module, batch: object) -> Any:
    """Call a model with a batch in any format that `audit` takes."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _saving_ops(outputs: object) -> dict[int, str]:
    """Return, for every storage that the graph of some outputs holds, the operation that saved it first."""
    nodes = created_nodes([leaf.grad_fn for leaf in _tensors(outputs)], first=0)
    ops: dict[int, str] = {}
    for node in sorted(nodes, key=lambda node: node._sequence_nr()):
        for tensor in _tensors(all_held_for_backward(node)):
            ops.setdefault(tensor.untyped_storage()._cdata, node.name().rstrip("0123456789").removesuffix("Backward"))
    return ops


def _tensors(value: object) -> list[Tensor]:
    tensors = []
    for leaf in tree_leaves(dict(value) if isinstance(value, Mapping) else value):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif isinstance(leaf, PackedTensor):
            tensors += leaf.present
    return tensors


def _own_storages(model: nn.Module) -> Iterator[torch.UntypedStorage]:
    for tensor in (*model.parameters(), *model.buffers()):
        parts = (tensor.data_, tensor.scale) if isinstance(tensor, Fp8Weight) else (local_tensor(tensor),)
        yield from (part.untyped_storage() for part in parts)
