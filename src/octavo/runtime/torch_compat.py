"""The differences between supported torch releases, and the private names of torch that have no public counterpart.

Each entry says which releases need it. Supported: the range in `pyproject.toml`; `make test-versions` runs the tests on
both ends of it. An entry goes when the oldest release no longer needs it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor


def _has_autocast(device_type: str) -> bool:
    """Whether a type of device has autocast; "meta", for one, has none, and `is_autocast_enabled` raises for it."""
    return torch.amp.is_autocast_available(device_type)


# torch 2.11: torch.compile does not trace torch.amp.is_autocast_available; marked so, it calls this instead. The
# answer for one type of device never changes. (torch.compiler.assume_constant_result sets the same attribute, and
# imports the compiler, a second long, for everybody.)
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype in which autocast computes products on a type of device; None where it is off. Traces under compile."""
    if _has_autocast(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Switches autocast off for a type of device, if it has one."""
    return torch.autocast(device_type, enabled=False) if _has_autocast(device_type) else nullcontext()


def in_backward() -> bool:
    """Whether this thread is inside a call of the autograd engine. All releases: there is no public way to ask."""
    return torch._C._current_graph_task_id() != -1


def explain_freed_nodes(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Class decorator: `torch.autograd.grad` from a node of the function that is gone raises an error that says why.

    torch 2.11: a node of an autograd function written in Python goes with its output. Zero-bubble schedules of
    `torch.distributed.pipelining` detach outputs before they compute the gradients of weights from such nodes, and
    torch's error speaks of legacy functions. torch 2.13 keeps the node.
    """
    node: Any = function._backward_cls

    def input_metadata(self: Any) -> Any:
        try:
            return super(node, self)._input_metadata
        except RuntimeError as error:
            raise RuntimeError(
                f"octavo: {node.__name__} is gone with its output, so it gives no gradients: before torch 2.13 "
                "zero-bubble schedules cannot compute gradients of weights behind autograd functions. Use another "
                "schedule, such as Schedule1F1B, or a newer torch"
            ) from error

    node._input_metadata = property(input_metadata)
    return function


class own_saved_tensors_hooks(torch.autograd.graph.saved_tensors_hooks):
    """`saved_tensors_hooks` for the library's own hooks, which selective checkpointing looks past.

    torch >= 2.14: selective checkpointing holds outputs outside autograd. It warns where hooks are active around it, as
    a later release is to pass those outputs through them. That is about offloading by the user; ours are about what
    autograd saves. torch looks past hooks that carry these two attributes, to the user's. Older releases ignore them.
    """

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        hook: Any = partial(pack)  # takes attributes, as a bound method does not
        hook._checkpoint_internal = True
        super().__init__(hook, unpack)

    def __enter__(self) -> None:
        around: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if around is not None and getattr(around[0], "_checkpoint_internal", False):
            around = around[0]._user_hooks
        self.pack_hook._user_hooks = around  # type: ignore[attr-defined]
        super().__enter__()

    def __exit__(self, *args: object) -> None:
        del self.pack_hook._user_hooks  # type: ignore[attr-defined]  # autograd keeps the hook as long as the graph
        super().__exit__(*args)

    @property
    def in_force(self) -> bool:
        """Whether they are the innermost hooks, which autograd calls."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return top is not None and top[0] is self.pack_hook
