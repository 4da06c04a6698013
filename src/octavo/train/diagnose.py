"""Find the origin of a NaN or an infinity: rerun the failing batch with a hook on every module.

The origin is the first non-finite value in the order of execution; ranks with the same layers execute in the same
order, and stages of a pipeline one after the other. This costs nothing before a failure.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.nn.resident import as_resident
from octavo.parallel.pipeline_model import Pipeline
from octavo.runtime.torch_compat import tree_leaves
from octavo.tensor import local_tensor
from octavo.train.config.sections import PrecisionConfig

_VALUES_PER_STAGE = 2**40  # More than any rank looks at
MOST_RMS = 1e4  # Root mean square of a weight, above which a run has diverged; trained weights stay below 10


class NonFiniteError(RuntimeError):
    """A run stopped on a loss or gradient that is NaN or infinite.

    Attributes:
        step: The step that failed, 1, 2, …; the parameters are those after the one before.
        origin: Where it began, as "output of model.layers.2.mlp.down_proj (first operand: x of …)".
    """

    def __init__(self, message: str, *, step: int, origin: str) -> None:
        super().__init__(message)
        self.step = step
        self.origin = origin


class Origin(NamedTuple):
    text: str | None  # Which it is; None if all are finite
    order: int  # Values looked at before it; in a pipeline those of its stage, after all of earlier ones


def non_finite_parameter(model: nn.Module) -> str | None:
    """Name of the first parameter that holds a NaN or an infinity; those resident in FP8 never change."""
    return next((name for name, param in changing_parameters(model) if not _finite(param)), None)


def changing_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, param) for name, param in model.named_parameters() if as_resident(param) is None)


def diverged(weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the first weight that is not finite or of no sane size, from which no setting goes on; else None."""
    return next((name for name, weight in weights if not _rms(weight) < MOST_RMS), None)


def _rms(weight: Tensor) -> float:
    part = local_tensor(weight).detach()
    if not part.is_floating_point():
        return 0.0
    norm: float = torch.linalg.vector_norm(part.reshape(-1), dtype=torch.float64).item()
    return norm / math.sqrt(max(part.numel(), 1))


def find_origin(model: nn.Module, forward_backward: Callable[[], Any], pipeline: Pipeline | None = None) -> Origin:
    """Run `forward_backward` and name the first value that is not finite. Leaves gradients behind."""
    watch = _Watch(1 if pipeline is None else pipeline.count)
    for stage, part in ({} if pipeline is None else pipeline.parts).items():
        watch.enter(part, stage)
    for name, module in model.named_modules():
        watch.module(name or type(model).__name__, module)
    for name, param in model.named_parameters():
        if param.requires_grad:
            watch.parameter(name, param)
    try:
        forward_backward()
    finally:
        for handle in watch.handles:
            handle.remove()
    return watch.origin


class _Watch:
    def __init__(self, stages: int = 1) -> None:
        self.origin = Origin(None, 0)
        self.count = 0
        self.handles: list[Any] = []
        self._stages, self._stage = stages, 0
        self._stage_of: dict[Tensor, int] = {}

    def enter(self, part: nn.Module, stage: int) -> None:
        def before(*_: object) -> None:
            self._stage = stage

        self._stage_of |= dict.fromkeys(part.parameters(), stage)
        self.handles.append(part.register_forward_pre_hook(before))

    def module(self, fqn: str, module: nn.Module) -> None:
        def view(value: object) -> object:
            # A view for this module alone, so that the gradient it gives back is told from what its neighbours give.
            if isinstance(value, Tensor) and value.requires_grad:
                value = value.view_as(value)
                self._watch_gradient(value, f"gradient of the input of {fqn}")
            return value

        def before(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Any, Any]:
            return tuple(view(value) for value in args), {name: view(value) for name, value in kwargs.items()}

        def after(_: nn.Module, __: object, outputs: object) -> None:
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, Tensor):
                    self._check(tensor, f"output of {fqn}", self._stage)
                    self._watch_gradient(tensor, f"gradient of the output of {fqn}")

        self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self.handles.append(module.register_forward_hook(after))

    def parameter(self, name: str, param: nn.Parameter) -> None:
        def after_backward(param: Tensor) -> None:
            assert param.grad is not None
            self._check(param.grad, f"gradient of {name}", self._in_backward(self._stage_of.get(param, 0)))

        self.handles.append(param.register_post_accumulate_grad_hook(after_backward))

    def _watch_gradient(self, tensor: Tensor, what: str) -> None:
        if tensor.requires_grad:
            place = self._in_backward(self._stage)
            tensor.register_hook(lambda grad: self._check(grad, what, place))

    def _in_backward(self, stage: int) -> int:
        """The place of a stage's backward among the forwards and backwards of all stages; 0 without a pipeline."""
        return 2 * self._stages - 1 - stage if self._stages > 1 else 0

    def _check(self, tensor: Tensor, what: str, place: int) -> None:
        order = place * _VALUES_PER_STAGE + self.count
        if (self.origin.text is None or order < self.origin.order) and not _finite(tensor):
            self.origin = Origin(what, order)
        self.count += 1


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(local_tensor(tensor).detach()).all())


def advice(
    saved: Sequence[Path], bad: Sequence[Path], precision: PrecisionConfig, *, converted: bool, scales_loss: bool
) -> str:  # fmt: skip
    names = ", ".join(str(path) for path in bad)
    if saved:
        text = f"Remove {names}, whose weights have diverged, and resume" if bad else "Resume"
        text += f" {saved[-1]} (--resume)"
    elif bad:
        text = f"No checkpoint is left to go on from: the weights of {names} have diverged. Run anew"
    else:
        text = "No checkpoint was saved: run anew"
    text += " with a lower optim.lr or optim.clip, or a lower optim.weight_decay"
    text += ", or with that layer in bf16 (precision.skip)" if converted else ""
    if precision.parameters == "fp16" and not scales_loss:
        text += ', or run anew with precision.loss_scale = "dynamic"'
    if not isinstance(precision.loss_scale, str):
        text += ', or run anew with a lower precision.loss_scale, or with "dynamic"'
    return text + (f". Where that fails again, remove {saved[-1]} to resume {saved[-2]}" if len(saved) > 1 else "")
