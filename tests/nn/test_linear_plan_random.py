"""Random steps of linears: from a plan and by the ordinary path, the same bits, saved gradients and errors.

A case draws layers (recipe, sizes, dtype, bias, strides, shared and frozen weights), inputs (shapes, views, leaves),
what surrounds forward (autocast, checkpointing, hooks, grad modes, subclasses, transforms), and what backward does
(subsets of gradients, a second time, with a graph, after a weight was replaced or written to).
"""

import random
import warnings
from contextlib import ExitStack, nullcontext

import pytest
import torch
from casts import set_steady
from test_prepared_linear import counted, on_gpu_path, ordinary, shifted  # noqa: F401  a fixture that all tests here use
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import octavo

RECIPES = list(octavo.RECIPES)


class Subclass(torch.Tensor):
    """Of another type, with torch's own behavior."""


STRIDES = {
    "dense": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "stepped": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "rows": lambda x: torch.cat([x, x])[: len(x)] if x.ndim > 1 else x,
    "shifted": shifted,
    "flipped back": lambda x: x.flip(0).flip(0),
    "expanded": lambda x: x[..., :1].expand_as(x),
}
SURROUNDINGS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16), "no_grad": torch.no_grad,
    "inference": torch.inference_mode, "save_on_cpu": save_on_cpu,
    "clones": lambda: saved_tensors_hooks(torch.clone, torch.clone),
    "shifts": lambda: saved_tensors_hooks(lambda t: t, lambda t: t if t.requires_grad else shifted(t)),
    "disabled": octavo.disabled,
}  # fmt: skip
WRAPPED = ("checkpoint", "reentrant", "subclass", "vmap", "twice", "accumulating")
BACKWARD = ("all", "subset", "twice", "graph", "replaced", "written", "frozen", "moved", "inputs")


class Case:
    """What one seed draws; `run` builds it anew."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        choose = self.draw.choice
        self.k, self.n = choose([16, 32, 48, 64]), choose([16, 32, 80])
        self.dtype = choose([torch.bfloat16, torch.bfloat16, torch.float32, torch.float16])
        self.layers = [
            {"recipe": choose(RECIPES), "bias": choose([True, False]), "keep_weights": choose([False, False, True]),
             "strides": choose(["dense", "dense", *STRIDES]), "frozen": self.draw.random() < 0.2,
             "bias_frozen": self.draw.random() < 0.2}
            for _ in range(choose([1, 1, 2, 3]))
        ]  # fmt: skip
        self.shared = self.draw.random() < 0.2
        self.shape = choose([(16,), (16,), (5,), (1,), (), (2, 8), (3, 1, 4), (0,), (2, 0)])
        self.strides, self.g_strides = choose(["dense", *STRIDES]), choose(["dense", *STRIDES])
        self.leaf, self.needs_input = choose([True, False, False]), self.draw.random() < 0.8
        self.around = choose([None, None, None, *SURROUNDINGS])
        self.wrapped = choose([None, None, None, None, *WRAPPED])
        self.backward = choose(["all", "all", "all", *BACKWARD])
        self.wrong = choose([None] * 19 + ["dtype"])
        self.subset, self.plain_first = self.draw.random(), self.draw.random() < 0.5
        self.seed = seed

    def __repr__(self):
        return f"Case {vars(self)}"

    def build(self):
        generator = torch.Generator().manual_seed(self.seed)
        layers = []
        for options in self.layers:
            layer = nn.Linear(self.k, self.n, bias=options["bias"], dtype=self.dtype)
            for p in layer.parameters():
                p.data = torch.randn(p.shape, generator=generator).to(self.dtype)
            layer.weight.data = STRIDES[options["strides"]](layer.weight.data)
            layer = octavo.convert(layer, options["recipe"], keep_weights=options["keep_weights"], verbose=False)
            set_steady(layer, torch.randn((8, self.k), generator=generator).to(self.dtype))
            layer.weight.requires_grad_(not options["frozen"])
            if options["bias"]:
                layer.bias.requires_grad_(not options["bias_frozen"])
            layers.append(layer)
        if self.shared:
            for layer in layers[1:]:
                layer.weight = layers[0].weight
        x = STRIDES[self.strides](torch.randn((*self.shape, self.k), generator=generator).to(self.dtype))
        if self.wrong == "dtype":
            x = x.double()
        g = STRIDES[self.g_strides](torch.randn((*self.shape, self.n), generator=generator).to(self.dtype))
        return layers, x.detach().requires_grad_(self.needs_input), g

    def forward(self, layers, x):
        def function(x):
            return sum(layer(x) for layer in layers)

        if self.wrapped in ("checkpoint", "reentrant"):
            return checkpoint(function, x, use_reentrant=self.wrapped == "reentrant")
        if self.wrapped == "vmap":
            return torch.vmap(function)(x)
        if self.wrapped == "twice":
            return function(x) + function(x)
        if self.wrapped == "subclass":
            return function(x.as_subclass(Subclass))
        with octavo.nn.accumulating(nn.ModuleList(layers)) if self.wrapped == "accumulating" else nullcontext():
            return function(x)

    def run(self):
        """Return all results, and the error that ended the case, if any."""
        layers, leaf, g = self.build()
        inputs = [leaf, *(p for layer in layers for p in layer.parameters())]
        inputs = [t for i, t in enumerate(inputs) if all(t is not other for other in inputs[:i])]
        results = []
        try:
            if self.plain_first and self.wrong is None:  # leaves a plan that the step then may not fit
                self.forward_plainly(layers, leaf, g)
            with ExitStack() as stack:
                if self.around is not None:
                    stack.enter_context(SURROUNDINGS[self.around]())
                x = leaf if self.leaf else leaf * 2
                y = self.forward(layers, x)
            results.append(y.detach().clone())
            self.differentiate(layers, inputs, y, g.to(y.dtype), results)
        except Exception as error:
            results.append(f"{type(error).__name__}: {str(error)[:300]}")
        return [*results, *(None if t.grad is None else t.grad.clone() for t in inputs)]

    @staticmethod
    def forward_plainly(layers, leaf, g):
        y = sum(layer(leaf * 2) for layer in layers)
        if y.requires_grad:
            y.backward(g)
        for layer in layers:
            layer.zero_grad()
        leaf.grad = None

    def differentiate(self, layers, inputs, y, g, results):
        weight = layers[0].weight
        if not y.requires_grad:
            return
        trained = [t for t in inputs if t.requires_grad]
        some = [t for i, t in enumerate(trained) if (self.subset * (i + 3)) % 1 < 0.5] or trained[:1]
        if self.backward == "subset":
            results += torch.autograd.grad(y, some, g, allow_unused=True)
        elif self.backward == "inputs":
            y.backward(g, inputs=some)
        elif self.backward == "twice":
            y.backward(g, retain_graph=True)
            y.backward(g)
        elif self.backward == "graph":
            torch.autograd.grad(y, trained, g, create_graph=True, allow_unused=True)
        else:
            if self.backward == "replaced":
                strides = "transposed" if weight.is_contiguous() else "dense"
                weight.data = STRIDES[strides]((weight.data * 2).contiguous())
            elif self.backward == "moved":
                weight.data = shifted(weight.data)
            elif self.backward == "written":
                weight.detach().mul_(2)
            elif self.backward == "frozen":
                weight.requires_grad_(False)
            y.backward(g)


def bits(result):
    if not isinstance(result, torch.Tensor):
        return result
    return result.dtype, result.shape, result.stride(), result.contiguous().view(-1).view(torch.uint8).tolist()


def failures(seeds):
    """Return the cases that differ, and how many forwards and backwards ran from plans."""
    failed, ran = [], {"forward": 0, "backward": 0}
    for seed in seeds:
        case = Case(seed)
        with warnings.catch_warnings(action="ignore"):  # of checkpoints of inputs without gradients, and of no leaves
            with ordinary():
                expected = [bits(result) for result in case.run()]
            for count in range(4):
                with counted() as counts:
                    actual = [bits(result) for result in case.run()]
                if actual != expected:
                    failed.append(f"run {count} of {case!r}")
                    break
                ran = {name: ran[name] + counts[name] for name in ran}
    return failed, ran


@pytest.mark.thorough
def test_random_steps():
    failed, ran = failures(range(60))
    assert not failed, failed[0]
    assert ran["forward"] > 100 and ran["backward"] > 60, ran


@pytest.mark.slow
def test_many_random_steps():
    failed, ran = failures(range(1000, 4000))
    assert not failed, (len(failed), failed[:3])
    assert ran["forward"] > 5000 and ran["backward"] > 3000, ran
