"""Channel equalization: the state of layers whose recipe scales the channels of X and W (`numerics.equalization`).

The channel scales s are refreshed in few passes: the first, then 1, 2, 4, … passes later, then every
`recipe.equalization` passes. A pass is all forwards between two backwards, and their backward. A layer measures in one
pass and changes s when the next one begins, so all forwards of a pass, and those that checkpointing runs again, have
the same s. Only the first pass uses the maxima of its own first forward. Forwards outside of training measure nothing.

s is no buffer of its module: a buffer would follow the module to another dtype, be uninitialized after meta, and be
overwritten by rank 0 under DDP. A compiled graph reads the s that its layer has; `compiled_pass` measures eagerly.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from octavo.activations.functional import as_rows
from octavo.nn.gathered import Fp8AllGatherOutput
from octavo.nn.operands import JUST_IN_TIME, QuantizedGradient, Quantizer, quantize_gradient
from octavo.nn.weights import is_fsdp_sharded
from octavo.numerics.equalization import LARGEST_EXPONENT, ChannelScales, channel_amax, column_amax, equalize
from octavo.numerics.recipe import Recipe
from octavo.numerics.suggestions import grouped
from octavo.runtime.execution_context import is_capturing
from octavo.runtime.switch import SWITCH
from octavo.runtime.torch_compat import (
    current_graph_task_id,
    has_values,
    in_backward,
    local_part,
    outside_autograd,
    run_eagerly,
)
from octavo.tensor import ScaledTensor, local_tensor

ATTRIBUTE = "equalizer"  # Attribute of a module that holds its channel scales


class Measurement:
    """Column maxima of one X in one pass, and of the weights of the layers that read it."""

    def __init__(self, x_amax: Tensor, w_amax: Tensor | None = None, first: ChannelScales | None = None) -> None:
        self.x_amax, self.w_amax = x_amax, w_amax
        self._scales: dict[bool, ChannelScales] = {} if first is None else {False: first}

    def with_weight(self, w_amax: Tensor) -> Tensor:
        return w_amax if self.w_amax is None else torch.maximum(self.w_amax.to(w_amax.device), w_amax)

    def first_scales(self, w_amax: Tensor) -> ChannelScales:
        """Return the s of a layer that has none and would measure its weight next."""
        return self._scales[False] if False in self._scales else equalize(self.x_amax, self.with_weight(w_amax))

    def scales(self, previous: ChannelScales | None, complete: bool) -> ChannelScales:
        """Return s, computed at the first call: from the weights so far, and a second time once they are `complete`."""
        if complete not in self._scales:
            assert self.w_amax is not None
            previous = None if previous is None else previous.to(self.x_amax.device)
            self._scales[complete] = equalize(self.x_amax, self.w_amax.to(self.x_amax.device), previous)
        return self._scales[complete]


class _LastMeasurement(threading.local):
    """The measurement of the last input, per thread: that of layers which read the same tensor."""

    # Unlike `octavo.nn.operands` it holds tensors without a `grad_fn`, too, so that forwards without autograd, as in
    # reentrant checkpointing, have the s of those with it. An unreported write in between leaves s exact.

    def __init__(self) -> None:
        self._entry: tuple[weakref.ref[Tensor], int, Measurement] | None = None

    def measurement_of(self, input: Tensor) -> Measurement | None:
        entry = self._entry
        return None if entry is None or entry[0]() is not input or entry[1] != _version(input) else entry[2]

    def set(self, input: Tensor, measurement: Measurement) -> None:
        self._entry = weakref.ref(input), _version(input), measurement


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


_LAST = _LastMeasurement()


class Equalizer:
    def __init__(self, every: int, transposed: bool) -> None:
        self.every, self.transposed = every, transposed
        self.pass_measures: bool  # Whether the current pass measures
        self.backward_ran: bool  # Whether the backward of the current pass has run
        self.scales: ChannelScales | None = None  # s; None before the first pass
        # synchronized: Whether `octavo.nn.equalized` ends the passes, for all layers at once.
        # unreached: Whether the last eager pass of `compiled_pass` had no backward of this layer, as of a frozen first.
        self.synchronized = self.unreached = False
        self.captured: set[ChannelScales] = set()  # The scales that CUDA graphs read
        self.passes: int  # Passes that have ended
        self.measurement: Measurement | None  # What the current pass has measured
        self.advance(0)

    def measures(self, backward: bool, device: torch.device) -> bool:
        """Return whether a forward of the current pass measures. One without backward does only if there is no s."""
        return (self.scales is None or (backward and self.pass_measures)) and not is_capturing(device)

    def pass_ended(self) -> bool:
        """Whether a forward in training would begin the next pass."""
        if not self.backward_ran or self.synchronized or current_graph_task_id() != -1:  # as `in_backward`
            return False
        return self.scales is None or not is_capturing(self.scales.factor.device)

    def next_scales(self, training: bool) -> ChannelScales | None:
        """Return s of the next forward, which begins a pass if it is in training and the current one has ended."""
        # Without maxima of W, as from a checkpoint of several ranks or of a forward in another thread, s stays.
        if self.measurement is None or self.measurement.w_amax is None or not (training and self.pass_ended()):
            return self.scales
        with outside_autograd():
            return self.measurement.scales(self.scales, complete=True)

    def advance(self, to: int | None = None) -> None:
        """Begin the next pass, or that after `to` passes."""
        passes = self.passes + 1 if to is None else to
        self.passes, self.backward_ran, self.measurement = passes, False, None
        # `measures_in`, without a call: this is done in every pass.
        self.pass_measures = passes & (passes - 1) == 0 if passes < self.every else passes % self.every == 0

    def measures_in(self, passes: int) -> bool:
        return passes & (passes - 1) == 0 if passes < self.every else passes % self.every == 0

    def measure(self, input: Tensor, w_NK: Tensor) -> None:
        """Measure X and W of a forward, and set s if there is none."""
        shared = _LAST.measurement_of(input)
        x_MK = as_rows(input)
        if self.measurement is None:
            self.measurement = Measurement(channel_amax(x_MK)) if shared is None else shared
            _LAST.set(input, self.measurement)
        elif self.measurement is not shared:
            x_amax = channel_amax(x_MK)  # of a layer that is called more than once; the model may have moved
            self.measurement.x_amax = torch.maximum(self.measurement.x_amax.to(x_amax.device), x_amax)
        if not self.synchronized or self.transposed:  # else `equalized_ranks` measures this rank's rows
            self.measurement.w_amax = self.measurement.with_weight(column_amax(w_NK))
        if self.scales is None and not self.synchronized:
            self.scales = self.measurement.scales(None, complete=False)


class EqualizedQuantizer(Quantizer):
    """Quantizes X and G of one forward and its backward with channel scales."""

    _gathered: tuple[Fp8AllGatherOutput, ChannelScales | None] | None = None

    def __init__(self, equalizer: Equalizer, training: bool) -> None:
        self.equalizer, self._training = equalizer, training

    def cached_channel_scales(self, input: Tensor, backward: bool) -> ChannelScales | None:
        """Return s if a forward, with a backward or not, only reads it."""
        equalizer = self.equalizer
        scales = equalizer.scales
        if scales is None or (equalizer.pass_measures and self._training and backward):
            return None
        return scales if scales.factor.device == input.device else None

    def channels(self, input: Tensor, w_NK: Tensor) -> ChannelScales | None:
        equalizer = self.equalizer
        if torch.compiler.is_compiling() and not isinstance(w_NK, Fp8AllGatherOutput):
            if equalizer.scales is not None:
                return equalizer.scales.to(input.device)
            with torch.no_grad():
                return equalize(channel_amax(as_rows(input)), column_amax(w_NK))
        if not has_values(input) or not has_values(w_NK):
            return _predicted(input)
        backward = torch.is_grad_enabled() and (input.requires_grad or w_NK.requires_grad)
        with outside_autograd():
            gathered = isinstance(w_NK, Fp8AllGatherOutput)  # no s of this rank alone fits it
            measures = self._training and equalizer.measures(backward, input.device)
            if measures and (equalizer.synchronized or not gathered):
                equalizer.measure(input, w_NK)
            if isinstance(w_NK, Fp8AllGatherOutput):
                self._gathered = w_NK, w_NK.channels
                return w_NK.channels
            if equalizer.scales is not None:
                equalizer.scales = equalizer.scales.to(input.device)
                if is_capturing(input.device):
                    equalizer.captured.add(equalizer.scales)
                return equalizer.scales
            if equalizer.synchronized and self._training:
                return None
            return equalize(channel_amax(as_rows(input)), column_amax(w_NK))

    def gradient(
        self, g_MN: Tensor, w: ScaledTensor | None, x: ScaledTensor | None, recipe: Recipe
    ) -> QuantizedGradient:
        if self._gathered is not None and self._gathered[0].channels is not self._gathered[1]:
            raise RuntimeError(
                "octavo: the channel scales of an equalized layer changed between a forward and its backward: another "
                "forward of the whole model began in between, after a backward. Run each backward before the next but "
                "one forward, or use recipe 'rowwise' for layers that FSDP gathers in FP8"
            )
        if has_values(g_MN):
            self.note_backward()
        return quantize_gradient(g_MN, w, x, recipe)

    def note_backward(self) -> None:
        if self._training:
            self.equalizer.backward_ran = True


def _predicted(input: Tensor) -> ChannelScales:
    """Return s for a tensor without values, as of a prediction: one for all layers that read it."""
    measurement = _LAST.measurement_of(input)
    if measurement is None:
        ones = input.new_ones((1, input.shape[-1]), dtype=torch.float32)
        measurement = Measurement(ones[0], first=ChannelScales(ones, ones.clone()))
        _LAST.set(input, measurement)
    return measurement.scales(None, complete=False)


class Equalized(nn.Module):
    """Base class of `LinearLike`: equalizes channels for recipes with `equalization`, else scales just in time."""

    recipe: Recipe
    weight: Tensor
    in_features: int
    weight_is_transposed: ClassVar[bool]
    equalizer: Equalizer | None = None  # of the class, so that graphs of torch.compile have a guard where it is missing

    def octavo_quantizer(self) -> Quantizer:
        """Return what quantizes X and G in a forward that begins now, and in its backward."""
        if not self.recipe.equalization or SWITCH.off:
            return JUST_IN_TIME
        equalizer = self.equalizer
        if equalizer is None or equalizer.every != self.recipe.equalization:
            equalizer = equalizer_of(self)
        training = self.training and not torch.compiler.is_compiling()
        if training and equalizer.backward_ran and equalizer.pass_ended():
            if equalizer.measurement is not None:
                equalizer.scales = equalizer.next_scales(training)
            equalizer.advance()
        return EqualizedQuantizer(equalizer, training)


def equalizes(module: nn.Module) -> TypeGuard[Equalized]:
    return isinstance(module, Equalized) and module.recipe.equalization > 0


def equalizer_of(layer: Equalized) -> Equalizer:
    """Return the channel scales of a layer; create them if there are none for its recipe."""
    equalizer = layer.equalizer
    if equalizer is None or equalizer.every != layer.recipe.equalization:
        equalizer = Equalizer(layer.recipe.equalization, layer.weight_is_transposed)
        if not torch.compiler.is_compiling():  # else each call of the graph would make another one
            vars(layer)[ATTRIBUTE] = equalizer
    return equalizer


def shared_scales(module: nn.Module) -> ChannelScales | None:
    """Return the channel scales of a layer if all ranks have them; None for other layers."""
    if not equalizes(module):
        return None
    equalizer = equalizer_of(module)
    return equalizer.scales if equalizer.synchronized else None


def current_channels(module: nn.Module, input: Tensor) -> ChannelScales | None:
    """Return the channel scales of a layer in a forward of this input now, or None. Measures nothing."""
    if not equalizes(module):
        return None
    weight: Tensor = local_part(module.weight)  # a part under tensor parallelism
    if isinstance(weight, Fp8AllGatherOutput):
        return weight.channels
    scales = equalizer_of(module).next_scales(module.training)
    if scales is not None or (equalizer_of(module).synchronized and module.training):
        return scales if scales is None else scales.to(input.device)
    shared = _LAST.measurement_of(input) if module.training else None
    w_amax = column_amax(weight.t() if module.weight_is_transposed else weight)
    return equalize(channel_amax(as_rows(input)), w_amax) if shared is None else shared.first_scales(w_amax)


def reset_scales(module: nn.Module) -> None:
    """Forget channel scales after a change of a layer's recipe."""
    vars(module).pop(ATTRIBUTE, None)
    if equalizes(module):
        equalizer_of(module)


def equalized_layers(model: nn.Module) -> Iterator[tuple[str, Equalized]]:
    for name, module in model.named_modules():
        if equalizes(module):
            yield name, module


@contextmanager
def compiled_pass(model: nn.Module) -> Iterator[None]:
    """Run one forward and backward of a model whose compiled parts equalize channels, with the scales of eager ones."""
    # Compiled modules run eagerly in passes that measure: the first, then 1, 2, 4, … later. Every pass runs all layers.
    equalizers = [equalizer_of(layer) for _, layer in equalized_layers(model)]
    for equalizer in equalizers:
        if equalizer.backward_ran and equalizer.pass_ended():  # else the forward or `equalized_ranks` ends the pass
            equalizer.scales = equalizer.next_scales(training=True)
            equalizer.advance()
    # A pass whose backward has run ends with the next forward.
    measures = any(e.measures_in(e.passes + e.backward_ran) for e in equalizers if not e.unreached)
    with run_eagerly() if measures else nullcontext():
        yield
    for equalizer in equalizers:
        if measures:
            equalizer.unreached = not (equalizer.backward_ran or equalizer.synchronized)
        else:  # a graph does not tell
            equalizer.backward_ran = not equalizer.unreached


def state_dict(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the channel scales of all layers, as the next forward would read them; {} for a model without any.

    Returns:
        For each layer's name its passes, the exponents of s (null before the first pass), and what the last pass
        measured and the next one will use: maxima of X and of W, and the first layer that read the same X. Exact and
        JSON-serializable. Under tensor parallelism they are those of a rank's columns, for the same rank to load.

    Examples:
        >>> model = octavo.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), "rowwise_equalized")
        >>> model(torch.ones(2, 64)).sum().backward()
        >>> sorted(octavo.nn.equalized.state_dict(model)["0"])
        ['backward_ran', 'exponents', 'measured', 'passes']
    """
    state, first = {}, dict[Measurement, str]()
    for name, layer in equalized_layers(model):
        equalizer, measured = equalizer_of(layer), None
        if (measurement := equalizer.measurement) is not None:
            w_amax = None if measurement.w_amax is None else measurement.w_amax.tolist()
            first.setdefault(measurement, name)
            measured = {"x": measurement.x_amax.tolist(), "w": w_amax, "first": first[measurement]}
        state[name] = {
            "passes": equalizer.passes,
            "backward_ran": equalizer.backward_ran,
            "exponents": None if equalizer.scales is None else equalizer.scales.exponents().int().tolist(),
            "measured": measured,
        }
    return state


def merge_states(states: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the state for all ranks: of each layer that of the first rank that has it, with the largest maxima."""
    # Under tensor parallelism only ranks with the same columns and rows have one state.
    merged: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for state in states for name in state):
        of_layer = [state[name] for state in states if name in state]
        all_measured = [own["measured"] for own in of_layer if own["measured"] is not None]
        measured = None
        if all_measured:
            columns = {key: [own[key] for own in all_measured if own[key] is not None] for key in ("x", "w")}
            tensors = {key: torch.tensor(rows, device="cpu") for key, rows in columns.items() if rows}
            amaxes = {key: tensors[key].amax(0).tolist() if key in tensors else None for key in columns}
            measured = {**amaxes, "first": all_measured[0]["first"]}
        merged[name] = {**of_layer[0], "measured": measured}
    return merged


def load_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `state_dict` returned. Layers that it does not name measure in their next forward; names of layers that
    do not equalize are ignored: both happen if a run resumes with other layers converted.

    Raises:
        ValueError: If a layer's state has another size than `state_dict` returns for it.

    Examples:
        >>> model = octavo.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), "rowwise_equalized")
        >>> octavo.nn.equalized.load_state_dict(model, octavo.nn.equalized.state_dict(model))
    """
    loaded: dict[tuple[int, ...], ChannelScales] = {}  # equal scales become one object, so that casts are shared
    measurements: dict[str, Measurement] = {}
    for name, layer in equalized_layers(model):
        reset_scales(layer)
        if name not in state:
            continue
        equalizer, own, weight = equalizer_of(layer), state[name], local_tensor(layer.weight)
        device = torch.device("cpu") if weight.is_meta else weight.device
        k, local = layer.in_features, weight.shape[0 if layer.weight_is_transposed else 1]
        exponents, measured = own["exponents"], own["measured"] or {"x": None, "w": None}
        if not is_fsdp_sharded(layer) or len(exponents or ()) == local:
            k = local  # under tensor parallelism the columns of this rank
        sizes = [len(values) for values in (exponents, measured["x"], measured["w"]) if values is not None]
        if any(size != k for size in sizes):
            raise ValueError(f"the channel scales of {name} are not those of {k} channels: they are of {sizes}")
        equalizer.advance(own["passes"])
        equalizer.backward_ran = own["backward_ran"]
        if exponents is not None:
            if (key := tuple(exponents)) not in loaded:
                loaded[key] = ChannelScales.of(torch.tensor(key, device=device))
            equalizer.scales = loaded[key].to(device)
        if measured["x"] is not None:
            x_amax = torch.tensor(measured["x"], device=device).float()
            w_amax = None if measured["w"] is None else torch.tensor(measured["w"], device=device).float()
            equalizer.measurement = measurements.setdefault(measured["first"], Measurement(x_amax, w_amax))


@torch.no_grad()
def reduce_scales(model: nn.Module, all_reduce_max: Callable[[Tensor], Any], device: torch.device) -> None:
    """End the current pass of all layers, with what all ranks measured."""
    if in_backward():  # checkpointing of the whole model, whose forward runs again with the s that it had
        return
    layers = [layer for _, layer in equalized_layers(model)]
    equalizers = [equalizer_of(layer) for layer in layers]
    if any(not equalizer.synchronized for equalizer in equalizers):
        _drop_different(equalizers, [_columns(layer) for layer in layers], all_reduce_max, device)
    if not any(equalizer.backward_ran for equalizer in equalizers):
        return
    due = [layer for layer, equalizer in zip(layers, equalizers, strict=True) if equalizer.pass_measures]
    if due:
        _refresh(due, all_reduce_max, device)
    for equalizer in equalizers:
        equalizer.advance()


def _drop_different(
    equalizers: list[Equalizer], sizes: list[int], all_reduce_max: Callable[[Tensor], Any], device: torch.device
) -> None:
    """Synchronize layers; drop what they measured before if ranks differ in it."""
    parts = []
    for equalizer, k in zip(equalizers, sizes, strict=True):
        none = torch.full((k,), 2.0 * LARGEST_EXPONENT, device=device)
        parts.append(none if equalizer.scales is None else equalizer.scales.exponents().to(device))
        parts.append(torch.tensor([float(equalizer.passes), float(equalizer.backward_ran)], device=device))
    own = torch.cat(parts)
    largest = torch.cat([own, -own])
    all_reduce_max(largest)
    agrees = largest[: len(own)] == -largest[len(own) :]
    same = torch.stack([part.all() for part in agrees.split([k + 2 for k in sizes])])
    for equalizer, equal in zip(equalizers, same.tolist(), strict=True):
        if not equal:
            equalizer.scales = None
            equalizer.advance(0)
        equalizer.synchronized = True


def _refresh(layers: list[Equalized], all_reduce_max: Callable[[Tensor], Any], device: torch.device) -> None:
    """Set the scales of layers to those of what all ranks measured; layers with one X, or one weight, share them."""
    first: dict[Measurement, int] = {}
    parts: list[Tensor] = []
    for index, layer in enumerate(layers):
        measurement, k = equalizer_of(layer).measurement, _columns(layer)
        x_amax = torch.zeros(k, device="cpu") if measurement is None else measurement.x_amax
        group = -torch.inf if measurement is None else float(first.setdefault(measurement, index))
        bounds = torch.tensor([group, -torch.inf if measurement is None else -group], device="cpu")
        parts += [part.to(device) for part in (x_amax, _weight_amax(layer, measurement), bounds)]
    exchanged = torch.cat(parts)
    all_reduce_max(exchanged)
    reduced = exchanged.split([part.numel() for part in parts])
    rows = list(zip(reduced[::3], reduced[1::3], strict=True))
    labels = _labels(layers, torch.stack(reduced[2::3]).tolist())
    for members in grouped(zip(labels, range(len(layers)), strict=True)).values():
        x_amax, w_amax = (torch.stack([rows[i][part] for i in members]).amax(0) for part in (0, 1))
        previous = equalizer_of(layers[members[0]]).scales
        scales = equalize(x_amax, w_amax, None if previous is None else previous.to(device))
        for member in members:
            equalizer_of(layers[member]).scales = scales


def _labels(layers: list[Equalized], bounds: list[list[float]]) -> list[int]:
    """Return a number for each layer, equal for those that share scales: of one X on all ranks, or one weight."""
    labels: list[int] = []
    weights: dict[int, int] = {}
    for index, (layer, (largest, smallest)) in enumerate(zip(layers, bounds, strict=True)):
        label = labels[int(largest)] if largest == -smallest and largest < index else index
        weight = layer._parameters.get("weight")  # none if parametrized
        tied = label if weight is None else weights.setdefault(id(weight), label)
        labels = [tied if other == label else other for other in [*labels, label]]
    return labels


def _weight_amax(layer: Equalized, measurement: Measurement | None) -> Tensor:
    """Return the column maxima of this rank's rows of a layer's weight, or what its forward measured of all rows."""
    if measurement is None:
        return torch.zeros(_columns(layer), device="cpu")
    if measurement.w_amax is not None:
        return measurement.w_amax
    weight = local_part(layer.weight)
    if not isinstance(weight, Fp8AllGatherOutput):
        return column_amax(local_tensor(weight))
    return column_amax(weight.dequantized(torch.float32))  # its memory is not freed since forward


def _columns(layer: Equalized) -> int:
    """Return K of this rank: a part of `in_features` where tensor parallelism splits columns."""
    weight = layer._parameters.get("weight")  # none if parametrized
    return layer.in_features if weight is None or layer.weight_is_transposed else local_tensor(weight).shape[1]
