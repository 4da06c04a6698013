"""Level 4: modules that compute in FP8, and the conversion of models to them."""

from octavo.activations.detect import Activation, Glu, Norm, register
from octavo.nn import causal as causal  # so that `import octavo` is enough
from octavo.nn import equalized as equalized
from octavo.nn import loss as loss
from octavo.nn.convert import apply_plan, change_recipe, revert, rule_plan
from octavo.nn.experts import Experts, grouped_linear
from octavo.nn.frozen import load_frozen, meta_parameters
from octavo.nn.linear import Linear, linear
from octavo.nn.linear_like import LinearLike
from octavo.nn.report import Report, report
from octavo.nn.resident import ResidentWeight
from octavo.nn.weights import accumulating
from octavo.runtime.switch import disabled

__all__ = [
    "Activation", "Experts", "Glu", "Linear", "LinearLike", "Norm", "Report", "ResidentWeight", "accumulating",
    "apply_plan", "change_recipe", "disabled", "grouped_linear", "linear", "load_frozen", "meta_parameters", "register",
    "report", "revert", "rule_plan",
]  # fmt: skip
