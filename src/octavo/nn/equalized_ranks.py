"""One set of channel scales for all ranks, for equalized layers (`octavo.nn.equalized`)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.equalized import Equalized, Equalizer, Measurement, equalized_layers, equalizer_of
from octavo.nn.gathered import Fp8AllGatherOutput
from octavo.numerics.equalization import LARGEST_EXPONENT, column_amax, equalize
from octavo.runtime.torch_compat import in_backward, local_part
from octavo.tensor import local_tensor


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
        exponents = none if equalizer.scales is None else equalizer.scales.exponents().to(device)
        parts.append(
            torch.cat(
                [exponents, torch.tensor([float(equalizer.passes), float(equalizer.backward_ran)], device=device)]
            )
        )
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
    groups: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        groups.setdefault(label, []).append(index)
    for members in groups.values():
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
