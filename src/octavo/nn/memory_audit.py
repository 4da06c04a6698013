"""What a forward pass keeps for backward, measured: the memory that FP8 training is about.

Counted by unique storage, as the allocator sees it: a tensor saved by three layers counts once, a view counts as the
storage it keeps alive. The model's own parameters and buffers do not count; they exist anyway.

`kept_for_backward` counts; `audit` says what each storage is: its owner (the innermost module that was running) and
the operation that saved it first (the node of the autograd graph). Both work on CPU, on CUDA, and under
FakeTensorMode, where nothing is allocated. Selective checkpointing holds outputs outside autograd; those are not seen.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from octavo.activations.saved_tensors import Saved
from octavo.nn.gathered import Fp8AllGatherOutput
from octavo.numerics.names import merged, pattern
from octavo.runtime.torch_compat import own_saved_tensors_hooks
from octavo.tensor import local_tensor


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One storage kept for backward.

    Attributes:
        bytes: Size of the storage.
        dtype: Of the tensor under which it was saved first.
        shape: Of that tensor.
        owner: Name of the innermost module that ran; empty for the model itself, and where owners are not followed.
        op: Operation that saved it first, as autograd names it; empty where that is not known.
    """

    bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    owner: str = ""
    op: str = ""


@dataclass
class Kept:
    """Storages kept for backward.

    Attributes:
        holdings: The storages in the order in which they were saved, by a key of their own.
    """

    holdings: dict[int, Holding] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes over all dtypes."""
        return sum(holding.bytes for holding in self.holdings.values())

    @property
    def by_dtype(self) -> dict[torch.dtype, int]:
        """Bytes by the dtype under which a storage was saved first."""
        return _summed(self.holdings.values(), lambda holding: holding.dtype)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Every storage that a forward pass kept for backward, largest first. Printed, a table with like rows in one."""

    rows: tuple[Holding, ...]

    def __iter__(self) -> Iterator[Holding]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def bytes(self) -> int:
        """Bytes in all."""
        return sum(row.bytes for row in self.rows)

    @property
    def by_dtype(self) -> dict[torch.dtype, int]:
        """Bytes by dtype."""
        return _summed(self.rows, lambda row: row.dtype)

    @property
    def by_owner(self) -> dict[str, int]:
        """Bytes by owner."""
        return _summed(self.rows, lambda row: row.owner)

    def __str__(self) -> str:
        groups: dict[Any, list[Holding]] = {}
        for row in self.rows:
            groups.setdefault((pattern(row.owner), row.dtype, row.shape, row.op), []).append(row)
        cells = [("bytes", "count", "dtype", "shape", "owner", "saved by")]
        for rows in sorted(groups.values(), key=lambda rows: -sum(row.bytes for row in rows)):
            first, total = rows[0], sum(row.bytes for row in rows)
            shape = "×".join(map(str, first.shape)) or "scalar"
            owner = merged([row.owner for row in rows]) or "(the model)"
            cells.append((f"{total:,}", f"{len(rows)}", dtype_name(first.dtype), shape, owner, first.op or "–"))
        cells.append((f"{self.bytes:,}", f"{len(self.rows)}", "", "", "in all", ""))
        widths = [max(len(row[column]) for row in cells) for column in range(5)]
        lines = [
            f"{size:>{widths[0]}}  {count:>{widths[1]}}  {dtype:<{widths[2]}}  {shape:<{widths[3]}}  "
            f"{owner:<{widths[4]}}  {op}".rstrip()
            for size, count, dtype, shape, owner, op in cells
        ]
        rule = "─" * max(len(line) for line in lines)
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


@contextmanager
def kept_for_backward(model: nn.Module, *, owners: bool = False) -> Iterator[Kept]:
    """Measure what the forward passes inside the block keep for backward.

    Run the forward inside, read `.bytes` after.

    Args:
        model: Its parameters and buffers are left out of the count.
        owners: Follow which module runs, by hooks on every module that are there as long as the block.
    """
    own = set(_own(model))
    sharded = any(hasattr(parameter, "_local_tensor") for parameter in model.parameters())
    kept = Kept()
    running = [""]

    def pack(tensor: Tensor) -> Tensor:
        key = _key(tensor)
        if sharded and key not in own and key not in kept.holdings:
            own.update(_own(model))  # FSDP has gathered parameters since
        size = tensor.untyped_storage().nbytes()
        if size and key not in own and key not in kept.holdings:
            kept.holdings[key] = Holding(bytes=size, dtype=tensor.dtype, shape=tuple(tensor.shape), owner=running[-1])
        return tensor

    handles = list(_followed(model, running)) if owners else []
    try:
        with own_saved_tensors_hooks(pack, lambda tensor: tensor):
            yield kept
    finally:
        for handle in handles:
            handle.remove()


def audit(model: nn.Module, batch: Any, *, loss: Callable[[nn.Module, Any], Tensor] | None = None) -> Audit:
    """Run one forward and list every storage it keeps for backward.

    Args:
        model: Any module, in the mode it is to be measured in (`train()`); its state does not change, but for what a
            forward itself changes.
        batch: Keyword arguments as a mapping, positional ones as a tuple or list, or the one argument.
        loss: `loss(model, batch)` computes the loss; by default the model's outputs are the end.

    Returns:
        An `Audit`: its rows sum up to what `kept_for_backward` counts.
    """
    with kept_for_backward(model, owners=True) as kept:
        outputs = loss(model, batch) if loss is not None else call(model, batch)
    ops = _saving_ops(outputs)
    named = [
        Holding(bytes=h.bytes, dtype=h.dtype, shape=h.shape, owner=h.owner, op=ops.get(key, ""))
        for key, h in kept.holdings.items()
    ]
    return Audit(rows=tuple(sorted(named, key=lambda holding: -holding.bytes)))


def kept_by_layer(model: nn.Module, batch: Any) -> dict[str, int]:
    """Bytes that one forward keeps for backward, by the module that was running. Arguments as for `audit`."""
    return audit(model, batch).by_owner


def call(model: nn.Module, batch: Any) -> Any:
    """The model's outputs for a batch in any of the forms that `audit` takes."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float8_e4m3fn → "float8_e4m3fn"."""
    return str(dtype).removeprefix("torch.")


def _followed(model: nn.Module, running: list[str]) -> Iterator[Any]:
    """Hooks that keep the name of the module that runs on top of `running`."""

    def entering(name: str) -> Callable[..., None]:
        return lambda *_: running.append(name)

    def leaving(*_: Any) -> None:
        running.pop()

    for name, module in model.named_modules():
        yield module.register_forward_pre_hook(entering(name), prepend=True)
        yield module.register_forward_hook(leaving, always_call=True)


def _saving_ops(outputs: Any) -> dict[int, str]:
    """For every storage that the graph behind some outputs holds, the operation that saved it first."""
    stack = [leaf.grad_fn for leaf in _tensors(outputs) if leaf.grad_fn is not None]
    nodes = set(stack)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in nodes:
                nodes.add(node)
                stack.append(node)
    ops: dict[int, str] = {}
    for node in sorted(nodes, key=lambda node: node._sequence_nr()):
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                for tensor in _tensors(_held(getattr(node, name))):
                    ops.setdefault(_key(tensor), node.name().rstrip("0123456789").removesuffix("Backward"))
    return ops


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in nested containers; and those that our own saved-tensor hooks hold through a node."""
    found = []
    for leaf in tree_leaves(dict(value) if isinstance(value, Mapping) else value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Saved):
            found += leaf.present
    return found


def _held(saved: Any) -> list[Any]:
    """What autograd holds for saved tensors: tensors, or whatever hooks made of them. Nothing is computed."""
    return [one.data for one in tree_leaves(saved) if one is not None]


def _summed(holdings: Any, by: Callable[[Holding], Any]) -> dict[Any, int]:
    sums: dict[Any, int] = {}
    for holding in holdings:
        sums[by(holding)] = sums.get(by(holding), 0) + holding.bytes
    return sums


def _own(model: nn.Module) -> Iterator[int]:
    """Storages of parameters and buffers: those that are there now, of shards or of the gathered whole."""
    for tensor in (*model.parameters(), *model.buffers()):
        parts = (tensor.data_, tensor.scale) if isinstance(tensor, Fp8AllGatherOutput) else (local_tensor(tensor),)
        yield from map(_key, parts)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
