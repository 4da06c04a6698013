"""FP8 classes of subclasses of `nn.Linear` that cast their weight and bias to the dtype of the input."""

from octavo.nn.equalized import EqualizedLinear
from octavo.nn.linear import Linear


class CastingLinear(Linear):
    """For recipes that scale just in time."""

    octavo_casts = True


class CastingEqualizedLinear(EqualizedLinear):
    """For recipes with channel scales."""

    octavo_casts = True
