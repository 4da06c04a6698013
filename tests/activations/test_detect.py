"""Modules that are known by their code: which are, that they compute what they are taken for, and registered ones."""

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, model_of
from test_exactness import FP8_ACTIVATIONS, GatedMLP, compare, randn
from torch import nn
from transformers.activations import ACT2FN

import octavo
from octavo.activations import detect, formulas
from octavo.activations.detect import Activation, Glu, Norm, activation_of, spec_of
from octavo.activations.verify import check_registered
from support.gated import JointlyGatedMLP
from support.refusals import refused

OF_FAMILY = {
    "gpt2": {"Norm", "Activation"},
    "vit": {"Norm", "Activation"},
    "siglip_vision_model": {"Norm", "Activation"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_known_modules_compute_what_they_are_taken_for(family):
    """Outputs and every gradient, on matrices and sequences, in float32 and bfloat16."""
    model, kinds = model_of(family), set()
    for module in model.modules():
        spec = spec_of(module)
        if spec is not None and (not isinstance(spec, Activation) or activation_of(module)):
            check_registered(module, spec)
            kinds.add(type(spec).__name__)
    assert kinds >= OF_FAMILY.get(family, {"Norm", "Glu", "Activation"})


class GateFirst(JointlyGatedMLP):
    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


@pytest.mark.parametrize("kind", [JointlyGatedMLP, GateFirst])
def test_a_gate_and_up_of_one_product_are_known_in_both_orders(kind):
    spec = spec_of(kind())
    assert isinstance(spec, Glu)
    check_registered(kind(), spec)


KNOWN = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu", "swish": "silu",
}  # fmt: skip
OTHERS = ("gelu_10", "relu2", "mish", "laplace", "relu", "tanh", "gelu_accurate", "gelu_python")


@pytest.mark.parametrize("name", [*KNOWN, *(name for name in OTHERS if name in ACT2FN)])
def test_activations_of_transformers(name):
    assert activation_of(ACT2FN[name]) == KNOWN.get(name)
    if name in KNOWN:
        check_registered(ACT2FN[name], spec_of(ACT2FN[name]))


@pytest.mark.parametrize("module", [nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.LayerNorm(48), nn.RMSNorm(48, eps=1e-6)])
def test_modules_of_torch_are_known(module):
    check_registered(module, spec_of(module))


def test_a_flag_is_read_when_the_module_is_called():
    module = nn.GELU()
    assert activation_of(module) == "gelu"
    module.approximate = "tanh"
    assert activation_of(module) == "gelu_tanh"
    module = nn.SiLU()
    module.inplace = True
    assert activation_of(module) is None


class Wrapper(nn.Module):
    """Calls what it holds, under a name that an activation goes by."""

    def __init__(self, silu):
        super().__init__()
        self.silu = silu

    def forward(self, x):
        return self.silu(x)


@pytest.mark.parametrize("held", [nn.Tanh(), nn.Linear(8, 8), torch.tanh, nn.Identity()], ids=range(4))
def test_names_of_attributes_mean_nothing(held):
    assert activation_of(Wrapper(held)) is None
    assert activation_of(Wrapper(F.silu)) == "silu"


UNREADABLE: dict = {"nn": nn, "F": F}
exec("class Made(nn.Module):\n    def forward(self, x):\n        return F.silu(x)\n", UNREADABLE)


def test_code_without_source_or_with_another_one_is_not_known(tmp_path, monkeypatch):
    assert spec_of(UNREADABLE["Made"]()) is None

    class Other(nn.Module):
        def forward(self, x):
            return F.silu(x)

    assert activation_of(Other()) == "silu"
    monkeypatch.setattr(formulas.linecache, "getlines", lambda name: ["def forward(self, x):\n", "    return x\n"])

    class Another(nn.Module):
        def forward(self, x):
            return F.silu(x)

    assert spec_of(Another()) is None


def test_code_that_could_do_more_is_not_known():
    class Decorated(nn.Module):
        @torch.no_grad()
        def forward(self, x):
            return F.silu(x)

    class Default(nn.Module):
        def forward(self, x, scale=1.0):
            return F.silu(x)

    class Cell(nn.Module):
        def forward(self, x):
            return function(x)

    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls = self.calls + 1
            return F.silu(x)

    class Looping(nn.Module):
        def forward(self, x):
            for _ in range(2):
                x = F.silu(x)
            return x

    class Parent(nn.SiLU):
        def forward(self, x):
            return super().forward(x)

    class Property(nn.Module):
        @property
        def act(self):
            return torch.tanh

        def forward(self, x):
            return self.act(x)

    function = F.silu
    for kind in (Decorated, Default, Cell, Counting, Looping, Parent, Property):
        assert activation_of(kind()) is None, kind


# Registered classes


class PowerNorm(nn.Module):
    """An RMS norm written in another way."""

    def __init__(self, width=48, eps=1e-6):
        super().__init__()
        self.gain, self.tiny = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return x / (x.float().square().mean(-1, keepdim=True) + self.tiny).sqrt().to(x.dtype) * self.gain


class Gated(nn.Module):
    """A gated MLP written in another way."""

    def __init__(self):
        super().__init__()
        self.wi, self.wo, self.act = nn.Linear(48, 192), nn.Linear(96, 48), nn.SiLU()

    def forward(self, x):
        both = self.wi(x)
        return self.wo(torch.mul(self.act(both[..., :96]), both[..., 96:]))


@pytest.fixture
def registering(monkeypatch):
    monkeypatch.setattr(detect, "_REGISTERED", detect._REGISTERED.copy())


def test_a_registered_class_stores(registering):
    octavo.nn.register(PowerNorm, Norm(weight="gain", eps="tiny"))
    octavo.nn.register(Gated, Glu(gate="wi", up=None, down="wo", activation="act"))
    model = nn.Sequential(PowerNorm(), Gated(), nn.Linear(48, 48))
    assert [r.activation_storage for r in octavo.report(compare(model, randn(2, 64, 48))[1]).activations] == [
        "saved_tensors", "norm", "glu",
    ]  # fmt: skip


class Detached(PowerNorm):
    def forward(self, x):
        return x / (x.detach().float().square().mean(-1, keepdim=True) + self.tiny).sqrt() * self.gain


class Shifted(PowerNorm):
    """Has a bias, of which the kernels compute no gradient."""

    def forward(self, x):
        return PowerNorm.forward(self, x) + self.gain


@pytest.mark.parametrize(
    ("kind", "spec", "what"),
    [
        (PowerNorm, Norm(weight="gain", eps="tiny", add_unit_offset=True), "the output differs"),
        (PowerNorm, Norm(weight="gain", eps="tiny", center=True), "the output differs"),
        (PowerNorm, Norm(weight="gain", eps=1e-2), "differs"),
        (PowerNorm, Norm(weight="missing", eps="tiny"), "missing"),
        (GatedMLP, Glu(gate="up_proj", up="gate_proj", down="down_proj", activation="act_fn"), "was registered as Glu"),
        (Detached, Norm(weight="gain", eps="tiny"), "the gradient of the input differs"),
        (Shifted, Norm(weight="gain", bias="gain", eps="tiny"), "the output differs"),
    ],
)  # fmt: skip
def test_a_class_that_computes_something_else_is_refused(kind, spec, what, registering):
    octavo.nn.register(kind, spec)
    model = nn.Sequential(kind(), nn.Linear(48, 48))
    refused(what, octavo.convert, model, kind=(ValueError, AttributeError), precision=FP8_ACTIVATIONS, verbose=False)
    assert type(model[0]) is kind


def test_wrong_registrations_are_named():
    refused("takes a class of modules; got 'norm'", octavo.nn.register, "norm", Norm(), kind=TypeError)
    with pytest.raises(TypeError, match=r"an octavo\.nn\.Norm, Glu or Activation; got 'norm'"):
        octavo.nn.register(PowerNorm, "norm")
    with pytest.raises(ValueError, match="'swoosh' is not a known activation; known are silu"):
        octavo.nn.register(PowerNorm, Activation(function="swoosh"))
    refused("has no forward that is written in Python", octavo.nn.register, nn.ModuleList, Norm())
