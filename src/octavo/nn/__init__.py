"""Level 3: modules that compute in FP8, and the conversion of models to them."""

from octavo.nn.change import change_recipe
from octavo.nn.convert import convert, revert
from octavo.activations.detect import Activation, Glu, Norm, register
from octavo.nn.linear import Linear, linear
from octavo.nn.report import Report, report
from octavo.runtime.switch import disabled
from octavo.nn.weights import accumulating

__all__ = [
    "Activation",
    "Glu",
    "Linear",
    "Norm",
    "Report",
    "accumulating",
    "change_recipe",
    "convert",
    "disabled",
    "linear",
    "register",
    "report",
    "revert",
]
