"""Octavo: FP8 training for PyTorch.

    import octavo
    print(octavo.plan(model, 4, 2048, device="h100"))      # which layers gain there, and what a step will take
    model = octavo.convert(model)      # the one line: linear layers compute in FP8, in place
    print(octavo.report(model))        # which, in what recipe, and why
    optimizer = octavo.AdamW(model.parameters(), lr=3e-4)      # moments in FP8, exact masters in 16 bits

Importing it imports nothing else, torch included: names and subpackages are imported on first use, so that
`octavo --version` takes less than 0.1 s of CPU time, where torch alone takes 2.
"""

from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any

from octavo._version import __version__

if TYPE_CHECKING:
    from octavo import activations as activations
    from octavo import comm as comm
    from octavo import compat as compat
    from octavo import experiments as experiments
    from octavo import inspect as inspect
    from octavo import integrations as integrations
    from octavo import kernels as kernels
    from octavo import nn as nn
    from octavo import numerics as numerics
    from octavo import optim as optim
    from octavo import parallel as parallel
    from octavo import planner as planner
    from octavo import runtime as runtime
    from octavo import serving as serving
    from octavo import train as train
    from octavo.nn import disabled, report, revert
    from octavo.numerics import RECIPES, Plan, Precision, Recipe
    from octavo.optim import AdamW
    from octavo.parallel import parallelize
    from octavo.planner.auto_convert import convert
    from octavo.planner.model_plan import plan
    from octavo.serving import export

__all__ = [
    "RECIPES", "AdamW", "Plan", "Precision", "Recipe", "__version__", "convert", "disabled", "export", "parallelize",
    "plan", "report", "revert",
]  # fmt: skip

_PACKAGES = {  # Where each public name lives
    "RECIPES": "numerics", "AdamW": "optim", "Plan": "numerics", "Precision": "numerics", "Recipe": "numerics",
    "convert": "planner.auto_convert", "disabled": "nn", "export": "serving", "parallelize": "parallel",
    "plan": "planner.model_plan", "report": "nn", "revert": "nn",
}  # fmt: skip
_SUBPACKAGES = (
    "activations", "comm", "compat", "experiments", "inspect", "integrations", "kernels", "nn", "numerics", "optim",
    "parallel", "planner", "runtime", "serving", "train",
)  # fmt: skip
_LOCK = RLock()
"""Python lets two threads that import a package and a module of it at once see either half imported.

Statements like `import octavo.nn` do not take the lock: let one thread run them first.
"""


if not TYPE_CHECKING:  # to a type checker a name that is not imported above is an error

    def __getattr__(name: str) -> Any:
        """Import a public name or subpackage on first use."""
        if name not in _PACKAGES and name not in _SUBPACKAGES:
            raise AttributeError(f"module 'octavo' has no attribute {name!r}")
        with _LOCK:
            if name in _PACKAGES:
                value = getattr(import_module(f"octavo.{_PACKAGES[name]}"), name)
            else:
                value = import_module(f"octavo.{name}")
            return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted((*__all__, *_SUBPACKAGES))
