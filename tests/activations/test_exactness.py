"""Stored activations on inputs nobody chose: large scores, biased gates, look-alikes of norms and gated MLPs.

Each is compared with the same module without storage: the forward bit for bit, and every gradient.
"""

import copy
import math
import random
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import octavo
from octavo.numerics import sqnr
from support import gated
from tensors import randn, same

FP8_ACTIVATIONS = octavo.Precision(matmul="bf16", activations="fp8")
TOKENS, WIDTH, HEADS = 128, 64, 4


def stored(model):
    return octavo.convert(copy.deepcopy(model), precision=FP8_ACTIVATIONS, verbose=False)


def step(model, x, seed=7):
    """Outputs, gradients by name (the input's under `x`), and the state of the random numbers."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    y = model(x)
    y.backward(randn(*y.shape, seed=11).to(y))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return y.detach(), grads | {"x": x.grad}, torch.random.get_rng_state()


def flat(grads):
    return torch.cat([grad.flatten().double() for grad in grads.values()])


def compare(model, x, *, storing=None, whole=21.0, each=15.0, ignore=()):
    """Storing against plain; returns the two models."""
    plain, storing = (copy.deepcopy(model), stored(model)) if storing is None else (model, storing)
    (y, expected, state), (stored_y, actual, stored_state) = step(plain, x), step(storing, x)
    assert torch.equal(y, stored_y)
    assert torch.equal(state, stored_state)
    assert expected.keys() == actual.keys()
    largest = max(float(g.norm()) for g in expected.values())
    for name, grad in expected.items():
        if name not in ignore and grad.norm() > 1e-5 * largest:
            assert sqnr(grad, actual[name]) >= each, name
        assert actual[name].isfinite().all() == grad.isfinite().all(), name
    assert sqnr(flat(expected), flat(actual)) >= whole
    return plain, storing


class Attention(nn.Module):
    """Heads of 16 under SDPA; q and k scaled so that scores reach what is asked for."""

    def __init__(self, size=1.0, bias=0.0, cap=None, eager=False):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for index, linear in enumerate((self.q_proj, self.k_proj, self.v_proj, self.o_proj)):
            linear.weight.data = randn(WIDTH, WIDTH, seed=index + 1) * WIDTH**-0.5 * (size if index < 2 else 1.0)
        self.k_proj.bias.data += bias * randn(WIDTH, seed=9).sign()
        self.cap, self.eager = cap, eager

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if not self.eager:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            scores = scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)
            y = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -math.inf).softmax(-1) @ v
        return self.o_proj(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("size", "bias", "cap", "eager"),
    [
        (1.0, 0.0, None, False), (4.0, 0.0, None, True), (8.0, 0.0, None, False), (8.0, 0.0, None, True),
        (2.0, 20.0, None, False), (2.0, 100.0, None, True), (10.0, 0.0, 50.0, True),
    ],
)  # fmt: skip
def test_attention_alone_is_accurate_at_any_score(size, bias, cap, eager):
    """Scores up to about 5, 75 and 250; biases of keys do not matter; and a soft cap."""
    model = Attention(size, bias, cap, eager)
    compare(model, randn(2, TOKENS, WIDTH), whole=25, ignore=("k_proj.bias",))


class Block(nn.Module):
    """Norm, attention, norm, gated MLP, with residuals."""

    def __init__(self, norm, mlp, **attention):
        super().__init__()
        self.norm_1, self.attention, self.norm_2, self.mlp = norm(WIDTH), Attention(**attention), norm(WIDTH), mlp

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GatedMLP(gated.GatedMLP):
    def __init__(self, act=None, bias=0.0):
        torch.manual_seed(5)
        super().__init__(WIDTH, 96)
        self.act_fn = act or self.act_fn
        self.gate_proj.bias.data += bias


@pytest.mark.parametrize(("size", "norm"), [(4.0, nn.LayerNorm), (8.0, nn.RMSNorm)])
def test_whole_blocks_at_any_score(size, norm):
    model = nn.Sequential(*(Block(norm, GatedMLP(), size=size, bias=10 * size) for _ in range(2)))
    compare(model, randn(2, TOKENS, WIDTH), ignore=[f"{i}.attention.k_proj.bias" for i in (0, 1)])


@pytest.mark.parametrize("bias", [-8.0, 8.0])
@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(), nn.GELU("tanh")], ids=str)
def test_gates_with_a_bias(act, bias):
    bias = bias / 2 if isinstance(act, nn.GELU) else bias
    compare(GatedMLP(act, bias), randn(2, TOKENS, WIDTH))


@pytest.mark.parametrize("mean", [0.0, 30.0, 100.0])
def test_a_layer_norm_of_what_has_a_mean(mean):
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).to(dtype)
        compare(model, (randn(2, TOKENS, WIDTH) + mean).to(dtype))


# Operations whose derivatives are ill-conditioned in what they save: others are rows of `test_saved_tensors.py`.


class Sensitive(nn.Module):
    """A linear, and one operation on what it gives."""

    def __init__(self, operation):
        super().__init__()
        torch.manual_seed(0)
        self.operation, self.linear, self.out = operation, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(self.operation(self.linear(x)))


HIDDEN = torch.arange(WIDTH) % 8 == 3
OPERATIONS = {
    "gate near one": lambda z: z * torch.sigmoid(z + 6),
    "gate near zero": lambda z: z * torch.sigmoid(z - 8),
    "logsumexp": lambda z: z - (30 * z).logsumexp(-1, keepdim=True),
    "reciprocal": lambda z: 1 / (z.abs() + 0.05),
    "cosine": lambda z: F.normalize(z, dim=-1) @ F.normalize(z + 10, dim=-1).transpose(-1, -2) @ z,
    "cumulative sum": lambda z: torch.exp(-F.softplus(z).cumsum(1)) * z,
    "rms_norm": lambda z: F.rms_norm(z, (WIDTH,)),
    "erf": lambda z: torch.erf(3 * z),
    "softplus": lambda z: F.softplus(z - 8) * z,
    "silu": lambda z: F.silu(z) * (z + 1),
    "group_norm": lambda z: F.group_norm(z.transpose(1, 2) + 30, 8).transpose(1, 2),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_that_need_what_they_saved_exactly(name):
    compare(Sensitive(OPERATIONS[name]), randn(2, TOKENS, WIDTH))


# Modules that are alike a gated MLP or a norm and are none.


class GradientReversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


class SwishBeta(nn.Module):
    """A trainable beta."""

    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


class MLP(GatedMLP):
    """Without biases, with a gain that some use."""

    def __init__(self, act=None):
        super().__init__(act)
        self.gain, self.seen, self.auxiliary = nn.Parameter(torch.tensor(1.0)), [], None


def alike(forward, act=None):
    class Alike(MLP):
        pass

    Alike.forward = forward
    return lambda: Alike(act() if act else None)


def _detached(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)).detach() * self.up_proj(x))


def _reversed(self, x):
    return self.down_proj(GradientReversal.apply(self.act_fn(self.gate_proj(x))) * self.up_proj(x))


def _straight_through(self, x):
    h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    return self.down_proj(h + (h.round() - h).detach())


def _gained(self, x):
    return self.gain * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _by_length(self, x):
    h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    return self.down_proj(h * 2 if x.shape[-2] > 16 else h)


def _dropped(self, x):
    if torch.rand(()) < 0.5:
        return x
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _recorded(self, x):
    h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    self.auxiliary = h.square().mean()
    self.seen.append(h.shape)
    return self.down_proj(h)


def _dropout(self, x):
    return self.down_proj(F.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x), 0.1, self.training))


def _hooked_gradient(self, x):
    h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    if h.requires_grad:
        h.register_hook(lambda g: 2 * g)
    return self.down_proj(h)


def _checkpointed(self, x):
    return torch.utils.checkpoint.checkpoint(
        lambda x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)), x, use_reentrant=False
    )


class OldNorm(nn.Module):
    """The statistics are not trained through; or another variation."""

    def __init__(self, forward):
        super().__init__()
        self.weight, self.eps, self.gain = nn.Parameter(1 + 0.1 * randn(WIDTH)), 1e-6, nn.Parameter(torch.tensor(1.0))
        self.kind = forward

    def forward(self, x):
        return self.kind(self, x)


def rms(m, x, *axes):
    return (x.square().mean(axes or -1, keepdim=True) + m.eps).rsqrt()


def _mean_added_back(m, x):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * (x.var(-1, keepdim=True) + m.eps).rsqrt() * m.weight + mean


def _in_groups(m, x):
    groups = x.unflatten(-1, (4, 16))
    return (groups * rms(m, groups)).flatten(-2) * m.weight


NORMS = {
    "detached statistics": lambda m, x: x * rms(m, x).detach() * m.weight,
    "a gain": lambda m, x: m.gain * m.weight * x * rms(m, x),
    "mean added back": _mean_added_back,
    "groups": _in_groups,
    "sequence": lambda m, x: x * rms(m, x, -1, -2) * m.weight,
    "reversed": lambda m, x: GradientReversal.apply(x) * rms(m, x) * m.weight,
    "shifted": lambda m, x: F.layer_norm(x + 30, (WIDTH,), m.weight, None, m.eps),
}
ALIKE = {
    "detached gate": alike(_detached),
    "gradient reversal": alike(_reversed),
    "straight through": alike(_straight_through),
    "trainable beta": alike(GatedMLP.forward, SwishBeta),
    "scalar gain": alike(_gained),
    "by length": alike(_by_length),
    "layer drop": alike(_dropped),
    "side effects": alike(_recorded),
    "dropout": alike(_dropout),
    "hooked gradient": alike(_hooked_gradient),
    "checkpointed": alike(_checkpointed),
} | {f"norm: {name}": partial(OldNorm, kind) for name, kind in NORMS.items()}


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_only_alike_keeps_its_forward_and_its_gradients(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(WIDTH), ALIKE[name](), nn.Linear(WIDTH, WIDTH))
    plain, storing = (m[1] for m in compare(model, randn(2, 32, WIDTH)))
    assert octavo.activations.detect.original_class(storing) is type(plain)
    assert getattr(plain, "seen", None) == getattr(storing, "seen", None)
    if getattr(plain, "auxiliary", None) is not None:
        assert storing.auxiliary.requires_grad == plain.auxiliary.requires_grad
        assert sqnr(plain.auxiliary, storing.auxiliary) > 100


CHANGES = {
    "another activation": lambda mlp: setattr(mlp, "act_fn", nn.Tanh()),
    "another known activation": lambda mlp: setattr(mlp, "act_fn", nn.GELU()),
    "a function": lambda mlp: (delattr(mlp, "act_fn"), setattr(mlp, "act_fn", torch.tanh)),
    "a forward of the instance": lambda mlp: setattr(mlp, "forward", lambda x: mlp.down_proj(mlp.up_proj(x))),
    "a hook": lambda mlp: mlp.act_fn.register_forward_hook(lambda m, a, y: 2 * y),
    "a partial": lambda mlp: mlp.act_fn.register_forward_hook(partial(lambda k, m, a, y: k * y, 2)),
    "an activation's own forward": lambda mlp: setattr(mlp.act_fn, "forward", torch.sin),
    "another projection": lambda mlp: setattr(mlp, "up_proj", nn.Sequential(mlp.up_proj, nn.Dropout(0.3))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_after_conversion_counts(name):
    model = nn.Sequential(GatedMLP())
    plain, storing = copy.deepcopy(model), stored(model)
    assert octavo.report(storing).activations[0].activation_storage == "glu"
    for m in (plain, storing):
        CHANGES[name](m[0])
    compare(plain, randn(2, TOKENS, WIDTH), storing=storing)


@pytest.mark.parametrize("of", ["class", "code"])
def test_a_forward_that_is_replaced_after_conversion_counts(of, monkeypatch):
    class Own(GatedMLP):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def other(self, x):
        return self.down_proj(self.up_proj(x))

    model = stored(nn.Sequential(Own()))
    assert octavo.report(model).activations[0].activation_storage == "glu"
    x = randn(4, WIDTH)
    if of == "class":
        monkeypatch.setattr(Own, "forward", other)
    else:
        monkeypatch.setattr(Own.forward, "__code__", other.__code__)
    assert torch.equal(model(x), model[0].down_proj(model[0].up_proj(x)))


def test_random_numbers_of_python_stay():
    random.seed(0)
    expected = random.random()
    random.seed(0)
    stored(nn.Sequential(GatedMLP(), OldNorm(NORMS["groups"])))
    assert random.random() == expected


class Twice(GatedMLP):
    """Dropout in both projections, up called first; or something called for nothing."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 96)) for _ in range(2))
        self.side = nn.Linear(WIDTH, 1)
        self.losses = []
        self.side.register_forward_hook(lambda m, a, y: self.losses.append(y.mean()))


class UpFirst(Twice):
    def forward(self, x):
        up = self.up_proj(x)
        gate = self.gate_proj(x)
        return self.down_proj(self.act_fn(gate) * up)


class OnTheSide(Twice):
    def forward(self, x):
        _ = self.side(x)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class NormOnTheSide(nn.LayerNorm):
    def __init__(self):
        super().__init__(WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        _ = self.side(x)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class OtherFlag(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_place = True

    def forward(self, x):
        return F.silu(x, inplace=self.in_place)


class Doubled(nn.SiLU):
    def __call__(self, x):
        return 2 * super().__call__(x)


class RandomWeight(nn.Module):
    def forward(self, weight):
        return F.dropout(weight, 0.3)


class LearnedQueries(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(randn(8, WIDTH))
        self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.k.bias.data.uniform_(-100, 100)

    def forward(self, x):
        return self.o((self.queries @ self.k(x).transpose(-1, -2) / 8).softmax(-1) @ self.v(x))


def _random_norm():
    norm = nn.LayerNorm(WIDTH)
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", RandomWeight())
    return norm


FOUND = {
    "calls in another order": UpFirst,
    "a call for nothing": OnTheSide,
    "a call for nothing in a norm": NormOnTheSide,
    "in place by another name": OtherFlag,
    "in place by another name in a gated MLP": lambda: GatedMLP(OtherFlag()),
    "a call that does more": lambda: GatedMLP(Doubled()),
    "a weight that is drawn": lambda: nn.Sequential(_random_norm(), nn.Dropout(0.5)),
    "learned queries": LearnedQueries,
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), FOUND[name](), nn.Linear(WIDTH, WIDTH))
    plain, storing = (m[1] for m in compare(model, randn(2, 32, WIDTH), ignore=("1.k.bias",)))
    assert len(getattr(plain, "losses", ())) == len(getattr(storing, "losses", ()))


FUNCTION = F.silu


class Global(nn.Module):
    def forward(self, x):
        return FUNCTION(x)


@pytest.mark.parametrize("where", ["global", "torch"])
def test_functions_that_are_replaced_after_conversion_count(where, monkeypatch):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Global() if where == "global" else nn.SiLU(), GatedMLP())
    storing = stored(model)
    if where == "global":
        monkeypatch.setattr(sys.modules[__name__], "FUNCTION", torch.tanh)
    else:
        silu = F.silu
        monkeypatch.setattr(F, "silu", lambda x, inplace=False: 3 * silu(x))
    compare(model, randn(2, TOKENS, WIDTH), storing=storing)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_values_stay_finite(dtype):
    class Filled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.act, self.b = nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.b(self.act(self.a(x).masked_fill(HIDDEN, torch.finfo(x.dtype).min)))

    x = randn(2, TOKENS, WIDTH).to(dtype)
    for model in (Filled(), nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))):
        if isinstance(model, nn.Sequential) and dtype == torch.float16:
            x[0, 0], x[0, 0, 0] = -60000, 60000
        _, grads, _ = step(stored(model.to(dtype)), x)
        assert all(g.isfinite().all() for g in grads.values())


def test_conversion_is_atomic_where_a_class_cannot_be_extended():
    class Tagged(nn.LayerNorm):
        def __init_subclass__(cls, *, tag, **keywords):
            super().__init_subclass__(**keywords)

    model = nn.Sequential(nn.LayerNorm(WIDTH), Tagged(WIDTH), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ValueError, match="'1' cannot handle its activations: making a subclass of Tagged raises"):
        octavo.convert(model, precision=FP8_ACTIVATIONS, verbose=False)
    assert [type(m) for m in model] == [nn.LayerNorm, Tagged, nn.Linear] and not hasattr(model[1], "octavo_storage")


def test_hooks_that_are_forbidden_leave_modules_as_they_are():
    model, x = stored(nn.Sequential(GatedMLP())), randn(4, WIDTH)
    plain = octavo.revert(copy.deepcopy(model))
    plain(x).sum().backward()
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        model(x).sum().backward()
    assert same(*([p.grad for p in one.parameters()] for one in (plain, model)))


class ScaledSums(nn.Module):
    """Streams that are nearly parallel, summed with trained factors before a norm."""

    def __init__(self, norm, streams):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH)
        self.scales, self.streams = nn.Parameter(torch.ones(2)), streams

    def forward(self, x):
        other = x + 0.05 * self.inner(x)
        if self.streams:  # hyper-connections
            h = (self.scales.view(2, 1) * torch.stack([x, other], -2)).sum(-2)
        else:
            h = self.scales[0] * x + (self.scales[1] * other).view(x.shape)
        return self.head(self.norm(h))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_scaled_sums_before_a_norm_stay_exact(norm, streams):
    torch.manual_seed(0)
    compare(ScaledSums(norm(WIDTH), streams), randn(2, 64, WIDTH), each=25)


def test_norms_of_other_sums_store_their_inputs():
    x, scale, w = (randn(*shape).requires_grad_() for shape in ((32, WIDTH), (), (WIDTH, WIDTH)))
    norm = stored(nn.Sequential(nn.RMSNorm(WIDTH)))
    for h in (x + scale * (x @ w), (x @ w) + scale * x, scale * x + 1.0, x.sum(0) * w, 2.0 * x):
        assert "_NormFunction" in norm(h).grad_fn.name()
    assert "_NormFunction" not in norm(scale * x).grad_fn.name()
