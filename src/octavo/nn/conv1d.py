"""Conv1D: Transformers' linear with a [in_features, out_features] weight (GPT-2), in FP8.

Imported only once a model with such a layer is converted, because it needs Transformers.
"""

from torch import Tensor
from transformers.pytorch_utils import Conv1D as PlainConv1D

from octavo.nn.linear import linear
from octavo.nn.linear_like import LinearLike


class Conv1D(LinearLike, PlainConv1D):  # type: ignore[misc]
    """As Transformers' `Conv1D`, computing in FP8. The weight is read transposed, in place: nothing is copied."""

    octavo_original = PlainConv1D
    weight_is_transposed = True

    def forward(self, x: Tensor) -> Tensor:
        """Y = X W + b in FP8 for x [..., in_features]; see `octavo.nn.linear.linear`."""
        recipe = self.recipe if "weight" in self._parameters else self.octavo_parametrized_recipe()
        return linear(
            x, self.weight.t(), self.bias, recipe, self.octavo_keep_weights(), self.octavo_quantizer()
        )  # fmt: skip

    @property
    def in_features(self) -> int:  # type: ignore[override]
        return int(self.nx)

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return int(self.nf)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nf={self.nf}, nx={self.nx}, recipe={self.recipe.name})"
