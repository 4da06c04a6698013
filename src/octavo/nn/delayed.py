"""Delayed scaling: scales of X and G from an amax history, as in Transformer Engine's default recipe.

A recipe with a `history` scales X and G by the largest amax of its last `history` passes, times 2^margin. A pass is all
forwards between two backwards, and their backward: a step, or one of its micro-batches. Larger values saturate at the
largest FP8 value. Non-finite values become NaN and do not enter the history. While the history is empty (the first
pass, or only zeros so far), the current amax sets the scale. W is quantized just in time: it changes by a learning rate
per step, so its current amax is as good, and FSDP can gather it in FP8.

    amaxes [2, 1 + history]    column 0: the current pass; then the previous passes, newest first

`update` takes the maximum of its argument and column 0, so repeated forwards of the same tensor have no effect:
activation checkpointing runs forward again in backward, with the same scales and amaxes. The columns shift when the
first forward after a backward begins (`backward_ran`), never inside a backward. So all forwards of a pass share one
scale, two uses of a layer in one pass are one pass, and a training forward without a backward counts for the next pass.

Not covered: two overlapping passes (a forward of the second between backwards of the first) with activation
checkpointing; X that backward recomputes (`octavo.activations.recompute`), which is quantized just in time; and the
loss scale, which is part of G's amax: after it doubles, values saturate for one pass.

The history is not a buffer of its module: a buffer would follow the module to another dtype, be uninitialized after
meta, and be overwritten by rank 0 under DDP. It is on the device of its inputs; `state_dict` and `load_state_dict`
carry it through checkpoints as numbers. `reduce_amaxes` combines the amaxes of a pass across ranks, in one exchange for
all layers, so all ranks have the same history.

The recipe exists for comparison, so it costs what `tensorwise` costs: one read per amax in training, for each layer
that reads X. A cast that also computes the amax would save that read. A compiled graph cannot hold the history, because
the next step's forward must see what backward writes: `fullgraph=True` raises, and without it torch.compile runs these
layers eagerly.

A CUDA graph holds it: the history has one address for life, and a replay of a captured pass shifts and updates it. The
pass before must have run eagerly, forward and backward, because capture records whether the history shifts.

`Delayed` gives a `LinearLike` a history and a `Quantizer` that reads it; the products are those of `octavo.nn.linear`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from octavo.kernels.quantize.reference import scale_of
from octavo.nn.linear import Linear
from octavo.nn.linear_like import LinearLike
from octavo.nn.operands import (
    JUST_IN_TIME,
    QuantizedGradient,
    QuantizedInput,
    Quantizer,
    own_channels,
    quantize_gradient,
    quantize_input,
)
from octavo.numerics.equalization import ChannelScales
from octavo.numerics.recipe import Recipe
from octavo.runtime.execution_context import is_capturing
from octavo.runtime.switch import SWITCH
from octavo.runtime.torch_compat import FakeTensor, disable_current_modes, in_backward
from octavo.tensor import ScaledTensor

X, G = 0, 1
"""Operands that have a history."""
ATTRIBUTE = "amax_history"
"""Attribute of a module that holds its history."""
BEFORE_CAPTURE = "run one forward and backward of the layer in training before the graph is captured"


class AmaxHistory:
    """The amaxes of X and G of one layer."""

    def __init__(self, recipe: Recipe) -> None:
        self.passes, self.margin = recipe.history, recipe.margin
        # float32 [2, 1 + history], or None before the first pass. Changes in place only.
        self.amaxes: Tensor | None = None
        self.backward_ran = False  # Whether the backward of the current pass has run
        self.captured = False  # Whether a CUDA graph recorded the current pass, whose replays run no Python
        self.synchronized = False  # Whether `reduce_amaxes` ends the passes, for all layers at once

    @property
    def pass_ended(self) -> bool:
        """Whether the next forward begins a new pass."""
        return self.backward_ran and not in_backward()  # a forward inside backward belongs to the same pass

    def begin(self) -> None:
        """Shift the history if the current pass has ended."""
        if self.synchronized:
            return
        if self.pass_ended:
            self.advance()
        elif self.amaxes is not None and not self.captured and is_capturing(self.amaxes.device) and not in_backward():
            raise RuntimeError(f"octavo: the current pass began outside of the CUDA graph: {BEFORE_CAPTURE}")

    def advance(self) -> None:
        """Shift the history by one pass."""
        if self.amaxes is not None:
            with outside_autograd():
                self.amaxes.copy_(_shifted(self.amaxes))
        self.backward_ran = False

    def amax(self, operand: int) -> Tensor | None:
        """Return the amax that sets the scale of X or G in the current pass: float32 [1,1], zero for an empty history,
        or None before the first pass.
        """
        if self.amaxes is None:
            return None
        amaxes = _shifted(self.amaxes) if self.pass_ended else self.amaxes
        return amaxes[operand, 1:].amax().mul(2.0**self.margin).view(1, 1)

    def update(self, operand: int, amax: Tensor) -> None:
        """Add the amax [1,1] of X or G to the current pass, if it is finite."""
        current = self.allocated(amax.device)[operand, 0]
        self.captured = is_capturing(amax.device)
        current.copy_(torch.maximum(current, amax.nan_to_num(0.0, 0.0, 0.0).view(())))

    def to(self, device: torch.device) -> None:
        """Move to the device of the layer."""
        if self.amaxes is not None:
            self.amaxes = self.amaxes.to(device)  # itself on that device

    def allocated(self, device: torch.device) -> Tensor:
        """Return `amaxes` on a device, allocated if there are none yet."""
        if self.amaxes is None:
            if is_capturing(device):
                raise RuntimeError(f"octavo: there is no amax history yet: {BEFORE_CAPTURE}")
            self.amaxes = torch.zeros(2, 1 + self.passes, dtype=torch.float32, device=device)
        self.to(device)
        return self.amaxes

    def load(self, amaxes: Tensor | None) -> None:
        """Replace the history; by an empty one if None."""
        if self.amaxes is None:
            self.amaxes = amaxes
        else:
            self.amaxes.copy_(torch.zeros_like(self.amaxes) if amaxes is None else amaxes)
        self.backward_ran = False


@dataclass(frozen=True)
class DelayedQuantizer:
    """Quantizes X and G of one forward and its backward with scales from a history."""

    history: AmaxHistory  # The layer's history
    updates: bool  # Whether to update the history: in training, not in evaluation

    channels = staticmethod(own_channels)

    def steady_channels(self, input: Tensor, backward: bool) -> None:
        """See `octavo.nn.operands.Quantizer.steady_channels`: no plan has an amax history."""

    def note_backward(self) -> None:
        """See `octavo.nn.operands.Quantizer.note_backward`."""
        self.history.backward_ran |= self.updates

    def input(
        self, input: Tensor, x_MK: Tensor, recipe: Recipe, needs_wgrad: bool, channels: ChannelScales | None
    ) -> QuantizedInput:
        """See `octavo.nn.operands.Quantizer.input`."""
        source = self.history.passes, self.history.margin
        return quantize_input(input, x_MK, recipe, needs_wgrad, channels, self.amax(X, x_MK), source)

    def gradient(
        self, g_MN: Tensor, w: ScaledTensor | None, x: ScaledTensor | None, recipe: Recipe
    ) -> QuantizedGradient:
        """See `octavo.nn.operands.Quantizer.gradient`; notes that backward has reached this layer."""
        amax = self.amax(G, g_MN)
        if has_values(g_MN):
            self.note_backward()
        return quantize_gradient(g_MN, w, x, recipe, amax)

    def amax(self, operand: int, x: Tensor) -> Tensor | None:
        """Return the amax, float32 [1,1], that sets the scale of X or G, a matrix; None for its current amax."""
        # Meta and fake tensors, as of a prediction, have no amax, and leave the history as it is.
        if not has_values(x):
            return None
        with outside_autograd():
            self.history.to(x.device)
            recorded = self.history.amax(operand)
            if recorded is None and not self.updates:
                return None
            current = amax_of(x)
            if self.updates:
                self.history.update(operand, current)
            return current if recorded is None else torch.where(recorded > 0, recorded, current)


class Delayed(LinearLike):
    """A `LinearLike` that keeps an amax history, for recipes with a `history`; with others it scales just in time."""

    def octavo_quantizer(self) -> Quantizer:
        """See `LinearLike.octavo_quantizer`."""
        recipe = self.recipe
        if not recipe.history or SWITCH.off:
            return JUST_IN_TIME
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"octavo: recipe {recipe.name!r} keeps an amax history between steps, which a compiled graph cannot "
                "hold: run it without torch.compile, or use 'tensorwise', which computes its scales just in time"
            )
        history = history_of(self)
        if self.training:
            history.begin()
        return DelayedQuantizer(history, self.training and torch.is_grad_enabled())


class DelayedLinear(Delayed, Linear):
    """A `Linear` that keeps an amax history. `octavo.convert(model, "delayed")` makes it from an `nn.Linear`."""

    octavo_original = nn.Linear


def has_values(x: Tensor) -> bool:
    """Return whether a tensor is neither meta nor fake."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def amax_of(x: Tensor) -> Tensor:
    """Return the largest magnitude of a matrix, float32 [1,1]; NaN if any element is NaN, zero if it is empty."""
    if not x.numel():
        return x.new_zeros((1, 1), dtype=torch.float32)
    amax: Tensor = torch.linalg.vector_norm(x.detach(), torch.inf)
    return amax.float().view(1, 1)


@contextmanager
def outside_autograd() -> Iterator[None]:
    """Leave autograd and dispatch modes: selective checkpointing needs identical operations in forward and recompute,
    and these run only once.
    """
    with torch.inference_mode(False), torch.no_grad(), disable_current_modes():
        yield


def _shifted(amaxes: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(amaxes[:, :1]), amaxes[:, :-1]], dim=1)


def history_of(layer: Delayed) -> AmaxHistory:
    """Return the history of a layer; create it if there is none for its recipe."""
    history: AmaxHistory | None = vars(layer).get(ATTRIBUTE)
    recipe = layer.recipe
    if history is None or (history.passes, history.margin) != (recipe.history, recipe.margin):
        history = AmaxHistory(recipe)
        vars(layer)[ATTRIBUTE] = history  # bypasses a __setattr__ that raises
    return history


def current_scale(module: nn.Module, operand: int, x: Tensor) -> Tensor | None:
    """Return the scale, float32 [1,1], by which a layer would quantize X or G, a matrix, in a forward or backward now;
    None if it scales just in time. Does not update the history.
    """
    if not keeps_history(module):
        return None
    current, recorded = amax_of(x), history_of(module).amax(operand)
    amax = current if recorded is None else torch.where((recorded := recorded.to(x.device)) > 0, recorded, current)
    return scale_of(amax, module.recipe.x if operand == X else module.recipe.dgrad_g)[0]


def keeps_history(module: nn.Module) -> TypeGuard[Delayed]:
    """Return whether a module keeps an amax history for its recipe."""
    return isinstance(module, Delayed) and module.recipe.history > 0


def reset_history(module: nn.Module) -> None:
    """Begin a new history after a change of a layer's recipe, or have none."""
    # It exists before the next forward, because torch.compile loses one that is created in code it traces.
    vars(module).pop(ATTRIBUTE, None)
    if keeps_history(module):
        history_of(module)


def histories(model: nn.Module) -> Iterator[tuple[str, AmaxHistory]]:
    """Yield names and histories of the layers that keep one."""
    for name, module in model.named_modules():
        if keeps_history(module):
            yield name, history_of(module)


def state_dict(model: nn.Module) -> dict[str, list[list[float]]]:
    """Return the histories of all layers, as the next forward would read them; {} for a model without histories.

    Returns:
        For each layer's name the amaxes of X and of G: of the current pass, then of the previous ones, newest first.
        Exact and JSON-serializable.

    Examples:
        >>> model = octavo.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), "delayed")
        >>> model(torch.ones(2, 64)).sum().backward()
        >>> octavo.nn.delayed.state_dict(model)["0"][0][:3]      # the amax of X of this pass, and of the two before
        [0.0, 1.0, 0.0]
    """
    state = {}
    for name, history in histories(model):
        if history.amaxes is not None:
            amaxes = history.amaxes
            state[name] = (_shifted(amaxes) if history.pass_ended else amaxes).tolist()
    return state


def merge_states(states: Sequence[dict[str, list[list[float]]]]) -> dict[str, list[list[float]]]:
    """Return the elementwise maximum of what `state_dict` returns on each rank."""
    merged = {}
    for name in states[0]:
        columns = torch.tensor([state[name] for state in states], dtype=torch.float64, device="cpu")
        merged[name] = columns.amax(0).tolist()
    return merged


def load_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `state_dict` returned. Layers that it does not name start with an empty history; names of layers
    without a history are ignored: both happen if a run resumes with other layers converted.

    Raises:
        ValueError: If a history has another length, or a value is not finite and at least 0.

    Examples:
        >>> model = octavo.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), "delayed")
        >>> octavo.nn.delayed.load_state_dict(model, octavo.nn.delayed.state_dict(model))
    """
    for name, history in histories(model):
        amaxes = None
        if name in state:
            amaxes = torch.tensor(state[name], dtype=torch.float32, device="cpu")
            if amaxes.shape != (2, 1 + history.passes) or not bool((amaxes.isfinite() & (amaxes >= 0)).all()):
                raise ValueError(
                    f"the amax history of {name} must be two lists of {1 + history.passes} finite numbers >= 0; got "
                    f"{state[name]!r:.200}"
                )
        history.load(amaxes)


@torch.no_grad()
def reduce_amaxes(histories: Iterable[AmaxHistory], all_reduce_max: Any, device: torch.device) -> None:
    """End the current pass of all layers, with the maximum amaxes of all ranks."""
    ordered = list(histories)
    if not ordered:
        return
    rows = []
    for history in ordered:
        history.synchronized = True
        ended = torch.full((1,), float(history.backward_ran or history.captured), device=device)
        rows.append(torch.cat([history.allocated(device)[:, 0], ended]))
    exchanged = torch.stack(rows)
    all_reduce_max(exchanged)
    for history, row in zip(ordered, exchanged, strict=True):
        assert history.amaxes is not None
        amaxes = torch.cat([row[:2].unsqueeze(1), history.amaxes[:, 1:]], dim=1)
        history.amaxes.copy_(torch.where(row[2] > 0, _shifted(amaxes), history.amaxes))
        history.backward_ran = False
