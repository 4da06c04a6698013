"""The state of equalized layers (`octavo.nn.equalized`) in checkpoints."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from octavo.nn.equalized import Measurement, equalized_layers, equalizer_of, reset_scales
from octavo.nn.weights import is_fsdp_sharded
from octavo.numerics.equalization import LARGEST_EXPONENT, ChannelScales
from octavo.tensor import local_tensor


def state_dict(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the channel scales of all layers, as the next forward would read them; {} for a model without any.

    Returns:
        For each layer's name its passes, the exponents of s (null before the first pass), and what the last pass
        measured and the next one will use: maxima of X and of W, and the first layer that read the same X. Exact and
        JSON-serializable. Under tensor parallelism they are those of a rank's columns, for the same rank to load.

    Examples:
        >>> model = octavo.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), "rowwise_equalized")
        >>> model(torch.ones(2, 64)).sum().backward()
        >>> sorted(octavo.nn.equalized_state.state_dict(model)["0"])
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
    """Return the state for all ranks: of each layer that of the first rank that has it, with the largest maxima that
    `state_dict` returns on any. Under tensor parallelism only ranks with the same columns and rows have one state.
    """
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
        ValueError: If a layer's state has another size or value than `state_dict` returns for it.

    Examples:
        >>> model = octavo.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), "rowwise_equalized")
        >>> octavo.nn.equalized_state.load_state_dict(model, octavo.nn.equalized_state.state_dict(model))
    """
    loaded: dict[tuple[int, ...], ChannelScales] = {}  # equal scales become one object, so that casts are shared
    measurements: dict[str, Measurement] = {}
    for name, layer in equalized_layers(model):
        reset_scales(layer)
        if name not in state:
            continue
        k = layer.in_features
        try:
            equalizer, own = equalizer_of(layer), state[name]
            passes, backward_ran, exponents, measured = (
                own[key] for key in ("passes", "backward_ran", "exponents", "measured")
            )
            if type(passes) is not int or passes < 0 or type(backward_ran) is not bool:
                raise ValueError(f"passes = {passes!r:.80}, backward_ran = {backward_ran!r:.80}")
            equalizer.advance(passes)
            equalizer.backward_ran = backward_ran
            weight = local_tensor(layer.weight)
            device = torch.device("cpu") if weight.is_meta else weight.device
            local = weight.shape[0 if layer.weight_is_transposed else 1]
            if (
                not is_fsdp_sharded(layer) or len(exponents or ()) == local
            ):  # tensor parallelism: the columns of this rank
                k = local
            if exponents is not None:
                key = tuple(_checked(exponents, k, -LARGEST_EXPONENT, LARGEST_EXPONENT))
                if key not in loaded:
                    loaded[key] = ChannelScales.of(torch.tensor(key, device=device))
                equalizer.scales = loaded[key].to(device)
            if measured is not None:
                x_amax = torch.tensor(_checked(measured["x"], k, 0, 3.5e38), device=device).float()
                w_amax = None
                if measured["w"] is not None:
                    w_amax = torch.tensor(_checked(measured["w"], k, 0, 3.5e38), device=device).float()
                equalizer.measurement = measurements.setdefault(measured["first"], Measurement(x_amax, w_amax))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the channel scales of {name} are not what octavo.nn.equalized_state.state_dict returns for {k} "
                f"channels: {error}"
            ) from None


def _checked(values: Any, count: int, lowest: float, highest: float) -> list[Any]:
    if len(values) != count or not all(lowest <= value <= highest for value in values):
        raise ValueError(f"expected {count} numbers from {lowest} to {highest}; got {values!r:.200}")
    return list(values)
