"""Names, signatures and pickles: a converted module is described, copied and called as the plain one. `"own"` adds a
module of a class that the case describes: its base and the parameters of its forward.
"""

import copy
import inspect
import linecache
import pickle
from functools import cache
from typing import Any

import torch
from torch import nn

import octavo
from benchmarks.fuzz import outcome
from benchmarks.fuzz.activations import convert, precision_of
from benchmarks.fuzz.build import DTYPES, Case, build, inputs
from benchmarks.fuzz.outcome import PASS, Invalid, Outcome, fail, same

FIRST = ("x", "input", "hidden_states", "x, /", "x: 'Tensor'", "x: 'Unwritten'", "x: Tensor = None")
OTHERS = (("mask=None",), ("scale: float = 1.0",), ("*others", "*, flag=False"), ("**options",))
_BODIES: dict[Any, str] = {
    nn.Linear: "F.linear({0}, self.weight, self.bias)", nn.Sequential: "nn.Sequential.forward(self, {0})",
    nn.LayerNorm: "nn.LayerNorm.forward(self, {0})", nn.Module: "self.down(self.act(self.up(self.norm({0}))))",
}  # fmt: skip
BASES = {base.__name__: base for base in _BODIES}


@cache
def _class(base: str, parameters: str) -> type[nn.Module]:
    """A class with a forward of these parameters, which pickles find in this module."""
    name, owner = f"Own{len(globals())}", BASES[base]
    argument = parameters.split(",")[0].split(":")[0].split("=")[0]
    source = f"def forward(self, {parameters}):\n    'Multiply.'\n    return {_BODIES[owner].format(argument)}"
    members: dict[str, Any] = {"__module__": __name__, "__doc__": f"A class {name}."}
    file = f"<{name}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # where `inspect` reads sources
    names = {"F": nn.functional, "nn": nn, "Tensor": torch.Tensor, "__name__": __name__}
    exec(compile(source, file, "exec"), names, members)
    members["forward"].__qualname__ = f"{name}.forward"
    made: type[nn.Module] = type(name, (owner,), members)
    globals()[name] = made
    return made


def _own(case: Case, width: int) -> nn.Module:
    own = case["own"]
    cls: Any = _class(own.get("base", "Linear"), ", ".join([own.get("first", "x"), *own.get("others", ())]))
    if issubclass(cls, nn.Sequential):
        module: nn.Module = cls(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
    else:
        module = cls() if cls.__base__ is nn.Module else cls(*[width] * (1 + issubclass(cls, nn.Linear)))
    if cls.__base__ is nn.Module:
        module.norm, module.act = nn.LayerNorm(width), nn.GELU()
        module.up, module.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    return module.to(DTYPES[case.get("dtype", "fp32")])


def check(case: Case) -> Outcome:
    model, x = build(case), inputs(case)
    if "own" in case:
        model = nn.Sequential(model, _own(case, case.get("width", 32)))
    before, keys = [(_facts(module), type(module)) for module in model.modules()], list(model.state_dict())
    try:
        pickle.dumps(model)
        model(x)
    except Exception as error:
        raise Invalid(f"the plain model cannot be run and pickled: {error}") from error
    convert(model, precision_of(case))
    with outcome.around_octavo(model):
        expected, copies = model(x).detach(), (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
        for how, twin in zip(("converted", "copied", "pickled"), (model, *copies), strict=True):
            for (name, module), (facts, owner), own in zip(twin.named_modules(), before, model.modules(), strict=True):
                actual = _facts(module) | {"class": type(module) is type(own) and isinstance(module, owner)}
                for fact, value in (facts | {"class": True}).items():
                    if actual[fact] != value:
                        return fail(f"{fact} of a {how} module", f"{name}: plain {value!r}, Octavo {actual[fact]!r}")
            results = {"output": twin(x).detach()}
            if case.get("own", {"first": "x, /"}).get("first") != "x, /":  # by the name that the signature shows
                name = next(iter(inspect.signature(twin[1].forward).parameters))
                results[f"output with {name}=…"] = twin[1](**{name: twin[0](x)}).detach()
            mismatches = [None if list(twin.state_dict()) == keys else "other keys in state_dict"]
            mismatches += [same(name, expected, result) for name, result in results.items()]
            if found := next(filter(None, mismatches), None):
                return fail("results", f"of a {how} model: {found}")
    octavo.revert(model)
    same_classes = [type(module) for module in model.modules()] == [owner for _, owner in before]
    return PASS if same_classes else fail("reverted class", "revert leaves other classes")


def _facts(module: nn.Module) -> dict[str, Any]:
    owner, forward = type(module), type(module).forward
    names = ("__name__", "__qualname__", "__module__", "__doc__")
    facts = {name: getattr(owner, name) for name in names} | {f"forward.{n}": getattr(forward, n) for n in names}
    facts |= {"annotations": inspect.get_annotations(owner), "signature": str(inspect.signature(forward))}
    facts |= {"bound signature": str(inspect.signature(module.forward)), "name": module._get_name()}
    return facts | {"signature of the class": str(inspect.signature(owner)), "unwrapped": inspect.unwrap(forward)}
