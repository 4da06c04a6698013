"""Level 3: modules that compute in FP8, and the conversion of models to them."""

from octavo.nn.convert import convert, revert
from octavo.nn.linear import Linear, disabled, linear
from octavo.nn.report import Report, report

__all__ = ["Linear", "Report", "convert", "disabled", "linear", "report", "revert"]
