"""Swap the classes of modules, and restore the whole model if an error interrupts the swaps.

Writes bypass `__setattr__` and properties of a module's class, because those may raise.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType

import torch
from torch import nn

_CONTAINERS = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict)]
"""Attributes in which a module holds parameters, buffers, children and hooks."""


def set_class(module: nn.Module, owner: type[nn.Module], **attributes: object) -> None:
    """Set the class and attributes of a module whose forward was not replaced on the instance."""
    vars(module).update(attributes)
    vars(module).pop("forward", None)  # the old class's bound method would hide the new class's
    object.__setattr__(module, "__class__", owner)


def has_own_forward(module: nn.Module) -> bool:
    """Return whether the forward of a module was replaced on the instance."""
    # accelerate leaves the bound method of the class there when it removes its hooks; that does not count.
    own = vars(module).get("forward")
    bound_to_class = isinstance(own, MethodType) and own.__self__ is module and own.__func__ is type(module).forward
    return "forward" in vars(module) and not bound_to_class


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` (FSDP2) was called on this module itself. Does not import FSDP."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Restore the modules of a model if the block raises, also for Ctrl-C; see `_restorer`."""
    restore = _restorer(model)
    try:
        yield
    except BaseException:
        restore()
        raise


def weights_on_meta(model: nn.Module) -> AbstractContextManager[None]:
    """Give a model parameters and buffers on the meta device inside the block: it then runs without computing."""
    return _replaced_tensors(model, lambda tensor: torch.empty_like(tensor.detach(), device="meta"))


def stand_in_weights(model: nn.Module) -> AbstractContextManager[None]:
    """Give a model on meta CPU numbers inside: random weights in almost no memory, buffers of ones, integer zeros."""
    generator = torch.Generator("cpu").manual_seed(0)

    def make(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
            ones = not tensor.ndim or tensor.is_floating_point() or tensor.dtype == torch.bool
            return torch.full(tensor.shape, ones, dtype=tensor.dtype, device="cpu")
        if tensor.ndim < 2:
            return torch.rand(tensor.shape, generator=generator, device="cpu").to(tensor.dtype)
        window = torch.randn(sum(tensor.shape), generator=generator, device="cpu") * 0.02  # of which each row is a part
        return window.to(tensor.dtype).as_strided(tensor.shape, [1] * tensor.ndim)

    return _replaced_tensors(model, make)


@contextmanager
def _replaced_tensors(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    restore = _restorer(model)
    tensors = *model.parameters(), *model.buffers()
    made = {tensor: make(tensor) for tensor in tensors}
    try:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(made[parameter], parameter.requires_grad)
            buffers = {name: made[buffer] for name, buffer in module._buffers.items() if buffer is not None}
            module._buffers.update(buffers)
        yield
    finally:
        restore()


def _restorer(model: nn.Module) -> Callable[[], None]:
    # Restores classes, attributes, parameters, buffers, children and hooks; not the values of tensors, nor changes
    # inside the objects that attributes refer to.
    before = []
    for module in model.modules():
        attributes = dict(vars(module))
        held = {name: dict(attributes[name]) for name in _CONTAINERS if isinstance(attributes.get(name), dict)}
        before.append((module, type(module), attributes, held))

    def restore() -> None:
        for module, owner, attributes, held in before:
            object.__setattr__(module, "__class__", owner)
            now = vars(module)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)
            for name, contents in held.items():
                now[name].clear()
                now[name].update(contents)

    return restore
