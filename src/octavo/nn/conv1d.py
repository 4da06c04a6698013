"""Conv1D: Transformers' linear with a [in_features, out_features] weight (GPT-2), in FP8.

Imported only once a model with such a layer is converted, because it needs Transformers.
"""

from torch import Tensor
from transformers.pytorch_utils import Conv1D as PlainConv1D

from octavo.nn.delayed import delayed_scaling_of
from octavo.nn.linear import linear
from octavo.nn.weights import keeps_weight
from octavo.numerics.recipe import Recipe


class Conv1D(PlainConv1D):
    """As Transformers' `Conv1D`, computing in FP8. The weight is read transposed, in place: nothing is copied."""

    recipe: Recipe
    keeps_weight: bool = False

    def forward(self, x: Tensor) -> Tensor:
        """Y = X W + b in FP8 for x [..., in_features]; see `octavo.nn.linear.linear`."""
        scaling = delayed_scaling_of(self, self.recipe)
        return linear(x, self.weight.t(), self.bias, self.recipe, keeps_weight(self), scaling)

    def __repr__(self) -> str:
        return f"Conv1D(nf={self.nf}, nx={self.nx}, recipe={self.recipe.name})"
