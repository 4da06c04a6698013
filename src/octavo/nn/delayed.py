"""Delayed scaling: scales of X and G from the maxima of earlier passes, as Transformer Engine's default has them.

A recipe with a `history` quantizes X and G by the largest of the maxima of its last `history` passes, times 2^margin. A
pass is all forwards between two backwards, and the backward of them: a step, or one of its micro-batches. Values above
that are cut to the largest FP8 value; what is not finite becomes NaN, and counts for no maximum. Where there is no
history yet (the first pass, or nothing but zeros so far) the present maximum is taken. W is quantized just in time: it
moves by a learning rate per step, so its own maximum is as good, and FSDP can gather it in FP8.

    amaxes [2, 1 + history]    column 0: the pass at hand, and behind it the passes before, the newest first

`seen` takes the larger of what it is given and column 0, so that it does not matter how often a pass shows the same
tensor: activation checkpointing forwards again in backward, with the same scales and the same maxima. The columns move
when the first forward after a backward begins, told by `closed`, and never inside a backward. So all forwards of a pass
have one scale, a layer that is used twice in it has one pass, and a forward in training that no backward follows counts
to the pass that comes.

What is not covered: two passes that overlap (a forward of the second after a backward of the first has begun, another
yet to come) with activation checkpointing; X that backward recomputes (`octavo.activations.recompute`), which is
quantized just in time there; and the scale of the loss, which the maxima of G have in them: where it has doubled,
values are cut for one pass.

A history is no buffer of its module: it would follow it to another dtype, be uninitialised on leaving meta, and be
written over by rank 0 under DDP. It is kept on the device of what it was made of; `state_dict` and `load_state_dict`
carry it through checkpoints, as numbers. Across ranks the maxima of a pass are put together by `reduced`, in one
exchange for all layers, so that all ranks have one history.

It is for comparison, so it costs what `tensorwise` costs: a read for each maximum while training, by each layer that
reads X. A cast that notes the maximum on its way would save that. A compiled graph cannot hold it, as what a backward
writes would have to be seen by the forward of the next step: `fullgraph=True` is refused, and without it torch.compile
leaves these layers to run eagerly.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from octavo.kernels.quantize.reference import scale_of
from octavo.numerics.recipe import Recipe
from octavo.runtime.switch import SWITCH
from octavo.runtime.torch_compat import in_backward

X, G = 0, 1
"""Operands that have a history."""
ATTRIBUTE = "amax_history"
"""Where a module keeps it."""


class History:
    """The maxima of X and G of one layer.

    Args:
        recipe: One with a `history`.

    Attributes:
        amaxes: float32 [2, 1 + history], or None before the first pass.
        closed: Whether a backward has ended the pass at hand.
        together: Whether passes end for all layers at once, by `reduced`.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.passes, self.margin = recipe.history, recipe.margin
        self.amaxes: Tensor | None = None
        self.closed = False
        self.together = False

    @property
    def ended(self) -> bool:
        """Whether the next forward begins a new pass."""
        return self.closed and not in_backward()  # in a backward, it is one of the same

    def begin(self) -> None:
        """Let a pass that has ended be one of those before."""
        if self.ended and not self.together:
            self.advance()

    def advance(self) -> None:
        """Move all passes by one."""
        if self.amaxes is not None:
            with _unseen():
                self.amaxes = _advanced(self.amaxes)
        self.closed = False

    def known(self, operand: int) -> Tensor | None:
        """What the scale of X or G comes from in the pass that a forward would now belong to: float32 [1,1], zero where
        nothing is known, or None before the first pass.
        """
        if self.amaxes is None:
            return None
        amaxes = _advanced(self.amaxes) if self.ended else self.amaxes
        return amaxes[operand, 1:].amax().mul(2.0**self.margin).view(1, 1)

    def seen(self, operand: int, amax: Tensor) -> None:
        """Count the largest magnitude [1,1] of X or G to the pass at hand, if it is finite."""
        if self.amaxes is None:
            self.amaxes = amax.new_zeros((2, 1 + self.passes))
        now = self.amaxes[operand, 0]
        now.copy_(torch.maximum(now, amax.nan_to_num(0.0, 0.0, 0.0).view(())))

    def to(self, device: torch.device) -> None:
        """Move to where the layer computes."""
        if self.amaxes is not None:
            self.amaxes = self.amaxes.to(device)


@dataclass(frozen=True)
class Past:
    """A history as one forward, and its backward, use it.

    Attributes:
        history: Of the layer.
        records: Whether the maxima seen count: in training, not in evaluation.
    """

    history: History
    records: bool

    def amax(self, operand: int, x: Tensor) -> Tensor | None:
        """The maximum, float32 [1,1], that X or G, a matrix, is quantized by; None for its own."""
        with _unseen():
            self.history.to(x.device)
            known = self.history.known(operand)
            if not self.records:
                return known
            now = largest(x)
            self.history.seen(operand, now)
            return now if known is None else torch.where(known > 0, known, now)

    def closing(self, g_MN: Tensor) -> Tensor | None:
        """The maximum for G, as a backward comes to this layer, which ends the pass."""
        amax = self.amax(G, g_MN)
        self.history.closed |= self.records
        return amax


def largest(x: Tensor) -> Tensor:
    """The largest magnitude of a matrix, float32 [1,1]; NaN where it holds one, zero where it is empty."""
    if not x.numel():
        return x.new_zeros((1, 1), dtype=torch.float32)
    return torch.linalg.vector_norm(x.detach(), torch.inf).float().view(1, 1)


@contextmanager
def _unseen() -> Iterator[None]:
    """Outside of autograd and dispatch modes: a selective checkpoint wants forward and its repetition to do the same,
    and what is done here once is no part of either.
    """
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        yield


def _advanced(amaxes: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(amaxes[:, :1]), amaxes[:, :-1]], dim=1)


def past_of(module: nn.Module, recipe: Recipe) -> Past | None:
    """The past of a layer as a forward that begins now uses it; None where the recipe has no history.

    Raises:
        RuntimeError: In a graph that torch.compile makes.
    """
    if not recipe.history or not SWITCH.enabled:
        return None
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"octavo: recipe {recipe.name!r} keeps maxima from one step to the next, which a compiled graph cannot "
            "carry: run it without torch.compile, or take 'tensorwise', its scales without the history"
        )
    history = history_of(module, recipe)
    if module.training:
        history.begin()
    return Past(history, module.training and torch.is_grad_enabled())


def history_of(module: nn.Module, recipe: Recipe) -> History:
    """The history of a layer, a new one where it has none of that recipe."""
    history: History | None = vars(module).get(ATTRIBUTE)
    if history is None or (history.passes, history.margin) != (recipe.history, recipe.margin):
        history = History(recipe)
        vars(module)[ATTRIBUTE] = history  # past a __setattr__ that refuses
    return history


def scale_now(module: nn.Module, operand: int, x: Tensor) -> Tensor | None:
    """The scale, float32 [1,1], by which a layer that is called now, or whose backward runs now, quantizes X or G, a
    matrix; None where its recipe has no history. Nothing is recorded.
    """
    recipe = getattr(module, "recipe", None)
    if not isinstance(recipe, Recipe) or not recipe.history:
        return None
    now, known = largest(x), history_of(module, recipe).known(operand)
    amax = now if known is None else torch.where((known := known.to(x.device)) > 0, known, now)
    return scale_of(amax, recipe.x if operand == X else recipe.dgrad_g)[0]


def forget(module: nn.Module) -> None:
    """Drop the history of a layer that has another recipe now."""
    vars(module).pop(ATTRIBUTE, None)


def histories(model: nn.Module) -> Iterator[tuple[str, History]]:
    """Names and histories of the layers whose recipe has one."""
    for name, module in model.named_modules():
        recipe = getattr(module, "recipe", None)
        if isinstance(recipe, Recipe) and recipe.history:
            yield name, history_of(module, recipe)


def state_dict(model: nn.Module) -> dict[str, list[list[float]]]:
    """The maxima of all layers that have some, as the next forward would see them; {} for a model without histories.

    Returns:
        For each layer's name those of X and of G: of the pass at hand, then of those before, the newest first. Exact,
        and plain enough for JSON.
    """
    found = {}
    for name, history in histories(model):
        if history.amaxes is not None:
            amaxes = history.amaxes
            found[name] = (_advanced(amaxes) if history.ended else amaxes).tolist()
    return found


def merged(states: Sequence[dict[str, list[list[float]]]]) -> dict[str, list[list[float]]]:
    """What all ranks have seen, of what `state_dict` returns on each."""
    found = {}
    for name in states[0]:
        columns = torch.tensor([state[name] for state in states], dtype=torch.float64)
        found[name] = columns.amax(0).tolist()
    return found


def load_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Put the maxima in place that `state_dict` has returned. Layers that it does not name begin anew, and names of
    layers without a history are passed over: both happen where a run goes on with other layers converted.

    Raises:
        ValueError: For maxima of another number of passes, or that are no finite numbers from 0 up.
    """
    for name, history in histories(model):
        amaxes = None
        if name in state:
            amaxes = torch.tensor(state[name], dtype=torch.float32)
            if amaxes.shape != (2, 1 + history.passes) or not bool((amaxes.isfinite() & (amaxes >= 0)).all()):
                raise ValueError(
                    f"maxima of {name} are two lists of {1 + history.passes} finite numbers from 0 up; got "
                    f"{state[name]!r:.200}"
                )
        history.amaxes, history.closed = amaxes, False


@torch.no_grad()
def reduced(found: Iterable[History], largest_of: Any, device: torch.device) -> None:
    """End the pass at hand of all layers, with the largest maxima of all ranks.

    Args:
        found: The histories, the same on every rank.
        largest_of: Puts the elementwise largest of all ranks into a tensor.
        device: Where ranks exchange.
    """
    ordered = list(found)
    rows = []
    for history in ordered:
        history.together = True
        if history.amaxes is None:
            history.amaxes = torch.zeros(2, 1 + history.passes, dtype=torch.float32, device=device)
        history.to(device)
        closed = torch.full((1,), float(history.closed), device=device)
        rows.append(torch.cat([history.amaxes[:, 0], closed]))
    exchanged = torch.stack(rows)
    largest_of(exchanged)
    for history, row in zip(ordered, exchanged, strict=True):
        assert history.amaxes is not None
        amaxes = torch.cat([row[:2].unsqueeze(1), history.amaxes[:, 1:]], dim=1)
        history.amaxes = torch.where(row[2] > 0, _advanced(amaxes), history.amaxes)
        history.closed = False
