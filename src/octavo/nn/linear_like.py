"""LinearLike: the base class of layers that multiply by one weight matrix in FP8 (docs/extending.md)."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octavo.nn.equalized import Equalized
from octavo.nn.resident import StatesOfResident, is_computed_from_resident, resident_weight
from octavo.nn.weights import is_fsdp_sharded
from octavo.numerics.recipe import DEFAULT, Recipe, weight_only


class LinearLike(Equalized, StatesOfResident):
    """A layer that computes Y = X Wᵀ + b in FP8.

    Attributes:
        octavo_original: The class that `octavo.revert` restores. Each class states its own: one that inherits it, such
            as a subclass made by a parametrization or `fully_shard`, is not Octavo's to change.
        weight: W, [out_features, in_features], or transposed where `weight_is_transposed`.
        bias: [out_features], or None.
        in_features: K.
        out_features: N.
        recipe: Precision of the three products.
        keep_weights: Whether the layer was converted with `keep_weights=True`: see `octavo.nn.weights`.
        weight_is_transposed: Whether the weight is [in_features, out_features], which FSDP does not gather in FP8.

    Examples:
        >>> layer = octavo.convert(torch.nn.Linear(64, 128), "mxfp8")
        >>> isinstance(layer, octavo.nn.LinearLike), layer.in_features, layer.recipe.name
        (True, 64, 'mxfp8')
    """

    octavo_original: ClassVar[Any]
    weight: Tensor
    bias: Any
    in_features: int
    out_features: int
    recipe: Recipe = DEFAULT
    keep_weights: bool = False
    weight_is_transposed: ClassVar[bool] = False
    # Whether `nn.Module` finds weight and bias among the parameters, and they are used as they are.
    octavo_default_lookup: ClassVar[bool] = True
    octavo_casts: ClassVar[bool] = False  # Whether weight and bias are cast to the dtype of the input

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        own_lookup = cls.__getattr__ is not nn.Module.__getattr__ or cls.__getattribute__ is not object.__getattribute__
        defines = any(name in vars(base) for base in cls.__mro__ for name in ("weight", "bias"))
        cls.octavo_default_lookup = not (own_lookup or defines or cls.octavo_casts)

    @property
    def weight_scale(self) -> Tensor:
        """Scales of a weight that is resident in FP8, by which a `state_dict` names them; other layers have none."""
        weight = resident_weight(self)
        if weight is None:
            raise AttributeError("weight_scale")
        return weight.scale

    def octavo_operands(self, input: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias as a forward of this input uses them."""
        weight, bias = self.weight, self.bias
        if not self.octavo_casts or weight.dtype == input.dtype:
            return weight, bias
        return weight.to(input.dtype), bias if bias is None else bias.to(input.dtype)

    def octavo_parametrized_recipe(self) -> Recipe:
        """Return the recipe for a weight that is no parameter; weight-only if it is computed from a resident one."""
        return weight_only(DEFAULT) if is_computed_from_resident(self, "weight") else self.recipe

    def octavo_keep_weights(self) -> bool:
        """Return whether the layer may reuse a cast of its weight now: see `octavo.nn.weights`."""
        if not self.keep_weights or self.octavo_casts or torch.compiler.is_compiling():
            return False
        return isinstance(self._parameters.get("weight"), nn.Parameter) and not is_fsdp_sharded(self)
