"""What is taken for a norm, an activation, a gated MLP or attention, and what is only alike."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import octavo
from octavo.nn import structure
from octavo.nn.structure import recognised
from octavo.numerics import sqnr

STORING = octavo.Precision(matmul="bf16", activations="fp8")


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, act=None):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 64), nn.Linear(32, 64)
        self.down_proj, self.act_fn = nn.Linear(64, 32), act or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Clamped(MLP):
    """As DeepSeek's, which limits gate and up."""

    def forward(self, x):
        gate, up = self.gate_proj(x).clamp(max=10.0), self.up_proj(x).clamp(-10.0, 10.0)
        return self.down_proj(self.act_fn(gate) * up)


class ClampedFar(MLP):
    """As some that are meant for float16."""

    def forward(self, x):
        return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(-6e4, 6e4))


class Dropping(MLP):
    """As Seed-OSS's."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class DroppingByChild(MLP):
    """With a module for it."""

    def __init__(self, p=0.1):
        super().__init__()
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        return self.dropout(super().forward(x))


class CappedGELU(nn.GELU):
    """Named as an activation, and one up to a point."""

    def forward(self, x):
        return super().forward(x).clamp(max=100.0)


class RMSNorm(nn.Module):
    """A norm in groups, over an axis, or limited."""

    def __init__(self, width, size=None, axis=-1, limit=None):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6
        self.size, self.axis, self.limit = size, axis, limit

    def forward(self, x):
        groups = x if self.size is None else x.unflatten(-1, (-1, self.size))
        y = groups * (groups.square().mean(self.axis, keepdim=True) + self.eps).rsqrt()
        y = y if self.limit is None else y.clamp(-self.limit, self.limit)
        return y.reshape(x.shape) * self.weight


class SSMMixer(nn.Module):
    """A state space model, with the projections and parameters of Mamba's."""

    def __init__(self):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(32, 64), nn.Linear(64, 32)
        self.A_log = nn.Parameter(torch.randn(64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        u, states, h = self.in_proj(x), [], 0.0
        decay = torch.exp(-self.A_log.exp() * F.softplus(u))
        for t in range(x.shape[1]):
            h = decay[:, t] * h + u[:, t]
            states.append(h)
        return self.out_proj(torch.stack(states, 1))


class SelfAttention(nn.Module):
    """Children of these names."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [Clamped, ClampedFar, Dropping, DroppingByChild])
def test_a_gated_mlp_that_does_more_is_refused(kind, training):
    assert "does not compute down(act(gate(x))·up(x)) and nothing else" in recognised(kind().train(training))


@pytest.mark.parametrize("training", [True, False])
def test_a_dropout_of_nothing_is_none(training):
    assert recognised(DroppingByChild(p=0.0).train(training)).kind == "glu"


def test_transformers_mlps_with_a_limit_or_dropout_are_refused():
    seed_oss = pytest.importorskip("transformers.models.seed_oss.modeling_seed_oss")
    config = seed_oss.SeedOssConfig(hidden_size=32, intermediate_size=64, residual_dropout=0.1)
    assert "does not compute" in recognised(seed_oss.SeedOssMLP(config).eval())
    deepseek = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = deepseek.DeepseekV4Config(hidden_size=32, intermediate_size=64, moe_intermediate_size=64)
    assert config.swiglu_limit == 10.0 and "does not compute" in recognised(deepseek.DeepseekV4MLP(config))


def test_modules_that_are_made_alike_are_looked_at_once(monkeypatch):
    looked, look = [], structure._gated
    monkeypatch.setattr(structure, "_gated", lambda module: looked.append(module) or look(module))
    hooked, gelu = MLP(), MLP(nn.GELU())
    hooked.act_fn.register_forward_hook(lambda *_: None)
    clamped = Clamped()
    replaced = MLP()
    replaced.act_fn.forward = torch.tanh
    modules, known = [MLP(), MLP(), gelu, clamped, hooked, replaced, MLP(), MLP().eval()], {}
    found = [recognised(module, known) for module in modules]
    assert found == [recognised(module) for module in modules]
    assert looked[: len(known)] == [modules[at] for at in (0, 2, 3, 4, 5, 7)]


def test_random_numbers_and_the_children_of_a_model_stay():
    module = DroppingByChild().train()
    module.act_fn, calls = nn.Sequential(nn.SiLU(), nn.BatchNorm1d(16)), []
    module.dropout.register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(0)
    before, expected = copy.deepcopy(module.state_dict()), torch.rand(1)
    torch.manual_seed(0)
    recognised(module)
    assert torch.equal(torch.rand(1), expected) and not calls
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert module.dropout.training


def test_a_gated_mlp_with_hooks_on_what_would_not_be_called_is_refused():
    module, calls = MLP(), []
    module.act_fn.register_forward_hook(lambda *_: calls.append(1))
    assert recognised(module) == "MLP has hooks on 'act_fn', which would not be called" and not calls
    module = MLP()
    module.gate_proj.register_forward_hook(lambda *_: calls.append(1))
    assert recognised(module).kind == "glu"


def test_an_activation_is_one_however_large_its_input():
    assert recognised(nn.GELU()).kind == "activation"
    assert "computes neither" in recognised(CappedGELU())
    assert recognised(nn.SiLU(inplace=True)) == "SiLU works in place: what it is given is gone"
    assert recognised(MLP(nn.SiLU(inplace=True))).kind == "glu"  # where nobody sees it


@pytest.mark.parametrize("width", [64, 5120])
@pytest.mark.parametrize("odd", [{"size": 16}, {"size": 32}, {"axis": 1}, {"axis": 0}, {"limit": 3.0}], ids=str)
def test_a_norm_is_one_at_its_own_width_over_the_last_axis(odd, width):
    assert recognised(RMSNorm(width)).kind == "norm"
    assert "computes no norm known here" in recognised(RMSNorm(width, **odd))


def test_a_norm_that_insists_on_its_width_is_one():
    class Wide(nn.LayerNorm):
        def forward(self, x):
            return F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps).to(x.dtype)

    assert recognised(Wide(48)).center


def test_recurrences_are_no_attention():
    qkv = {name: nn.Linear(32, 32) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    assert recognised(SelfAttention(**qkv)).kind == "attention"
    assert recognised(SelfAttention(in_proj=nn.Linear(32, 96), out_proj=nn.Linear(32, 32))).kind == "attention"
    assert recognised(SSMMixer()) is None
    assert "convolution along the sequence" in recognised(SelfAttention(**qkv, conv=nn.Conv1d(32, 32, 4, groups=32)))
    delta = SelfAttention(**qkv)
    delta.A_log = nn.Parameter(torch.zeros(4))
    assert "is a recurrence, as its A_log shows" in recognised(delta)


@pytest.mark.parametrize(
    "family", ["mamba", "mamba2", "falcon_mamba", "bamba", "nemotron_h", "falcon_h1", "olmo_hybrid"]
)
def test_mixers_of_transformers_are_no_attention(family):
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(family)
    config.num_hidden_layers = min(config.num_hidden_layers, 4)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    mixers = [m for m in model.modules() if any(name == "A_log" for name, _ in m.named_parameters(recurse=False))]
    assert mixers
    for mixer in mixers:
        assert getattr(recognised(mixer), "kind", None) is None


def test_decays_of_a_recurrence_are_exact():
    module = SSMMixer()
    x = torch.randn(4, 32, 32, generator=torch.Generator().manual_seed(0))
    plain = copy.deepcopy(module)
    model = octavo.convert(nn.Sequential(module, nn.GELU()), precision=STORING, verbose=False)
    grads = []
    for m in (plain, model[0]):
        F.gelu(m(x)).sum().backward()
        grads.append(m.A_log.grad)
    assert sqnr(*grads) > 100
