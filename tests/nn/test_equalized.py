"""Channel equalization: exact for every s, better for outlier channels, one s for the layers that read one X."""

import copy
import gc
import json
import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from casts import counted, set_copies
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.kernels.quantize import QUANTIZE
from octavo.nn import equalized as equalized_layers
from octavo.nn.equalized import (
    EqualizedQuantizer,
    Equalizer,
    equalizer_of,
    load_state_dict,
    merge_states,
    reduce_scales,
    state_dict,
)
from octavo.nn.gathered import Fp8AllGatherOutput
from octavo.nn.memory_audit import saved_for_backward
from octavo.numerics import channel_amax, equalize, equalized, sqnr
from octavo.numerics.equalization import LARGEST_EXPONENT, ChannelScales
from support.dispatch_modes import Passing
from tensors import randn, same, saved_and_loaded

NAME = "rowwise_equalized"
M, K, N = 1024, 512, 768


def normal(channels_of_x, channels_of_w):
    """X [M,K] and W [N,K], normal but for the sizes of their channels."""
    return lambda: (torch.randn(M, K) * channels_of_x(), torch.randn(N, K) * 0.03 * channels_of_w())


def first_two(size):
    return lambda: torch.where(torch.arange(K) < 2, size, 1.0)


def spread(sigma):
    return lambda: torch.exp(sigma * torch.randn(K))


OPERANDS = {
    "normal": normal(first_two(1), first_two(1)),
    "2 channels x 3e4": normal(first_two(3e4), first_two(1 / 3e4)),
    "2 channels x 3e5": normal(first_two(3e5), first_two(1 / 3e5)),
    "1 in 97 x 300": normal(lambda: torch.where(torch.arange(K) % 97 == 0, 300.0, 1.0), first_two(1)),
    "log-normal": normal(spread(2), spread(-1.5)),
}


def accuracy(x, w, g, of):
    """SQNR in dB of Y, and of the worst channel of ∂X and of ∂W, against float64."""
    x, w, g = x.double(), w.double(), g.double()
    pairs = ((g @ w, of[1]), (g.T @ x, of[2]))
    worst = [(20 * (a.norm(dim=0) / (a - b).norm(dim=0)).log10()).min().item() for a, b in pairs]
    return [sqnr(x @ w.T, of[0]), *worst]


def layer_of(weight, recipe=NAME, bias=False, **options):
    layer = nn.Linear(*weight.shape[::-1], bias=bias, dtype=weight.dtype)
    layer.weight.data = weight.clone()
    return octavo.convert(layer, recipe, verbose=False, **options)


def passes(layer, x, g, count=1):
    """Y, ∂X and ∂W of the last of some passes."""
    for _ in range(count):
        leaf = x.detach().clone().requires_grad_()
        layer.weight.grad = None
        y = layer(leaf * 1)
        y.backward(g)
    return y.detach(), leaf.grad, layer.weight.grad


def table(name, scales=None):
    """SQNR of Y, and of the worst channel of ∂X and of ∂W, in the operands' third seed."""
    torch.manual_seed(3)
    x, w = OPERANDS[name]()
    g = torch.randn(M, N) * 1e-4 * torch.exp(torch.randn(M, 1))
    layer = layer_of(w)
    if scales is not None:
        equalizer_of(layer).scales = scales(x, w)
        equalizer_of(layer).advance(5)
    return accuracy(x, w, g, passes(layer, x, g))


@pytest.mark.parametrize("name", OPERANDS)
def test_no_channel_is_lost(name):
    """With the s of this batch, and with one that is off by a factor of two at random."""
    fresh = table(name)
    plain = table(name, lambda x, w: ChannelScales.of(torch.zeros(K)))
    assert fresh[0] > 28.4 and min(fresh[1:]) > 21
    if name not in ("normal", "1 in 97 x 300"):
        assert min(plain) < 21
    assert all(new > old - 2 for new, old in zip(fresh, plain, strict=True))

    def stale(x, w):
        fresh = equalize(channel_amax(x), w.abs().amax(0))
        return ChannelScales.of(fresh.exponents() + torch.randint(-1, 2, (K,)))

    assert all(old > new - limit for old, new, limit in zip(table(name, stale), fresh, (3.5, 3, 3), strict=True))


def test_scales_have_median_one():
    """Whatever X and W are multiplied by; of channels that are alike none is scaled."""
    x, w = randn(100, 65).abs().amax(0), randn(30, 65, seed=1).abs().amax(0)
    scales = equalize(x, w)
    assert scales.exponents().median() == 0 and not equalize(torch.ones(8), torch.full((8,), 3.0)).exponents().any()
    for size in (1e-30, 3.0, 1e30):
        assert torch.equal(equalize(x * size, w).factor, scales.factor)
        assert torch.equal(equalize(x, w * size).factor, scales.factor)
    assert torch.equal(equalize(x, w * 3e5, ChannelScales.of(torch.full((65,), 7))).factor, scales.factor)


def test_tokens_count_by_the_root_of_their_size():
    """Of more rows than are read at once; one of zeros, one of NaN and one with an Inf count in no other channel."""
    x = randn(2000, 64) * torch.exp(6 * randn(2000, 1, seed=1))
    expected = (x.abs() / x.abs().sqrt().sum(1, keepdim=True)).amax(0)
    x = torch.cat([x, torch.zeros(1, 64), torch.full((1, 64), 1e30)])
    x[-1, 7] = math.inf
    expected[7] = 0
    assert torch.allclose(channel_amax(x), expected) and torch.allclose(channel_amax(x.bfloat16()), expected, rtol=0.02)
    x[3] = math.nan
    assert torch.equal(channel_amax(x), torch.zeros(64))


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("recipe", [NAME, "rowwise_hp_wgrad_equalized"])
def test_products_are_those_of_scaled_operands(copies, recipe, monkeypatch):
    """Y(X, W) = Y(X/s, W·s), ∂X = ∂X(X/s, W·s)/s, ∂W = ∂W(X/s, W·s)·s, bit for bit in float32: any s, keep_weights."""
    set_copies(monkeypatch, copies)
    x, w, g = randn(40, 64), randn(48, 64, seed=1), randn(40, 48, seed=2)
    scales = ChannelScales.of(torch.randint(-9, 9, (64,)))
    base = recipe.removesuffix("_equalized")
    for keep in (False, True):
        layer = layer_of(w, equalized(base), keep_weights=keep)
        equalizer_of(layer).scales = scales
        equalizer_of(layer).advance(5)
        y, dx, dw = passes(layer, x, g)
        y_0, dx_0, dw_0 = passes(layer_of(w * scales.factor, base, keep_weights=keep), x * scales.inverse, g)
        expected = dw_0 * scales.factor if base == "rowwise" else g.T @ x
        assert torch.equal(y, y_0) and torch.equal(dx, dx_0 * scales.inverse) and torch.equal(dw, expected)


def test_other_recipes_cannot_equalize():
    for name in ("tensorwise", "blockwise", "mxfp8"):
        with pytest.raises(ValueError, match="folds the scales of X and W"):
            equalized(name)
    assert equalized(NAME, every=7).equalization == 7 and equalized(NAME).name == NAME


# --- where s comes from ---


class Attention(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.q, self.k, self.v = (nn.Linear(width, size, bias=False) for size in (64, 32, 32))
        self.checkpointing = None

    def inner(self, x):
        x = self.norm(x)
        return self.out(torch.cat([self.q(x).tanh(), self.k(x) * self.v(x)], -1)[..., :64] + x)

    def forward(self, x):
        if self.checkpointing is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.checkpointing)


def model_of(**options):
    return octavo.convert(Attention(**options), NAME, verbose=False)


def step(model, index, size=1.0):
    model.zero_grad()
    x = (randn(24, 64, seed=index) * torch.where(torch.arange(64) == 5, size, 1.0)).requires_grad_()
    model(x).square().mean().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def test_layers_that_read_one_x_share_s_and_its_copy():
    model = model_of()
    model.k.weight.data[:, 7] = 1000
    step(model, 0)
    scales = {name: model.get_submodule(name).equalizer.scales for name in ("q", "k", "v", "out")}
    assert scales["q"] is scales["k"] is scales["v"] is not scales["out"]
    before = scales["q"].factor[0, 7]
    with counted(QUANTIZE) as casts:
        model(randn(24, 64, seed=1))
    assert len([call for call in casts if call[0].shape == (24, 64)]) == 2  # of q, k, v, and of out
    assert model.q.equalizer.scales.factor[0, 7] < before / 4  # from the second pass on by all three weights


def test_s_is_refreshed_in_few_passes():
    layer = layer_of(randn(48, 64), equalized("rowwise", every=10))
    measured, changed, last = [], [], None
    for index in range(33):
        layer(randn(8, 64, seed=index).requires_grad_()).sum().backward()
        equalizer = layer.equalizer
        if equalizer.measurement is not None:
            measured.append(index)
        if equalizer.scales is not last:
            changed.append(index)
        last = equalizer.scales
    assert measured == [0, 1, 2, 4, 8, 10, 20, 30]
    assert changed == [0, 1, 2, 3, 5, 9, 11, 21, 31]


def test_a_steady_pass_measures_nothing_and_keeps_one_byte_per_element(monkeypatch):
    layer, x = layer_of(randn(48, 64).bfloat16()), randn(256, 64).bfloat16().requires_grad_()
    layer(x)
    layer.equalizer.advance(5)
    for name in ("channel_amax", "column_amax", "equalize"):
        monkeypatch.setattr(f"octavo.nn.equalized.{name}", None)
    with saved_for_backward(layer) as saved:
        layer(x * 1).sum().backward()
    assert saved.bytes - 2 * 4 * 64 - 4 * 48 <= 0.54 * 2 * x.numel()  # s, W's scales; X's scales are 4 bytes a row


def test_evaluation_reads_s_and_changes_nothing():
    layer = layer_of(randn(48, 64)).eval()
    x = randn(8, 64).requires_grad_()
    layer(x).sum().backward()
    assert layer.equalizer.scales is None and layer.equalizer.passes == 0
    layer.train()
    layer(x).sum().backward()
    scales = layer.equalizer.scales
    layer.eval()
    with torch.no_grad():
        layer(1000 * x)
    layer(1000 * x).sum().backward()
    assert layer.equalizer.scales is scales
    with octavo.disabled():
        assert torch.equal(layer.train()(x), nn.functional.linear(x, layer.weight))


class Twice(Attention):
    """One layer in two checkpoints: the backward of the second use has run when the first use is computed again."""

    def inner(self, x):
        return self.out(x)

    def forward(self, x):
        return super().forward(super().forward(x))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", [Attention, Twice])
def test_checkpointing_is_bitwise(kind, use_reentrant):
    plain, recomputed = (octavo.convert(kind(), NAME, verbose=False) for _ in range(2))
    recomputed.checkpointing = use_reentrant
    for model in (plain, recomputed):
        model.k.weight.data[:, 7] = 1000  # another s for k alone
    for index in range(6):
        assert same(step(plain, index, 10.0**index), step(recomputed, index, 10.0**index))
    assert plain.out.equalizer.passes == recomputed.out.equalizer.passes >= 5


# --- channels that are dead, or not finite ---


@pytest.mark.parametrize("previous", [None, ChannelScales.of(torch.arange(8))])
def test_s_is_finite_for_any_maxima(previous):
    values = [0.0, 1e-45, 1e-38, 1.0, 448.0, 1e30, 3e38, 0.0]
    for x in (values, values[::-1], 8 * [0.0], 8 * [3e38]):
        for w in (values, values[::-1], 8 * [0.0], 8 * [1e-45]):
            scales = equalize(torch.tensor(x), torch.tensor(w), previous)
            exponents = scales.exponents()
            assert exponents.abs().max() <= LARGEST_EXPONENT
            assert torch.equal(scales.factor * scales.inverse, torch.ones(1, 8))
            dead = (torch.tensor(x) == 0) | (torch.tensor(w) == 0)
            if previous is not None:
                assert torch.equal(exponents[dead], torch.arange(8.0)[dead])
    half_dead = equalize(torch.tensor([4.0, 4.0, 0.0]), torch.tensor([1.0, 0.0, 16.0]), None)
    assert half_dead.exponents().tolist() == [0, 0, -4]  # X' and W' as in the first channel, where s is 1


@pytest.mark.parametrize("x_value", [0.0, math.inf, math.nan, 3e38])
@pytest.mark.parametrize("frozen", ["", "w", "x"])
def test_bad_channels_harm_no_other_row(x_value, frozen):
    """As rowwise: zeros are exact, NaN and Inf stay in their row, and other rows stay as accurate as they were."""
    x, w, g = randn(16, 32), randn(8, 32, seed=1), randn(16, 8, seed=2)
    x[3, 5] = x_value
    if x_value == 0.0:
        x[:, 5] = 0
        w[:, 6] = 0
    layer = layer_of(w)
    layer.weight.requires_grad_(frozen != "w")
    for _ in range(3):
        leaf = x.clone().requires_grad_(frozen != "x")
        y = layer(leaf)
        y.backward(g)
        assert (layer.equalizer.scales.factor * layer.equalizer.scales.inverse == 1).all()
        rows = torch.arange(16) != 3
        assert sqnr((x @ w.T)[rows], y.detach()[rows]) > 24
        if frozen != "x":
            assert sqnr(g @ w, leaf.grad) > 24
    if not math.isfinite(x_value):
        assert not y[3].isfinite().any()


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("shape", [(0, 32), (5, 1), (1, 32), (0, 0), (2, 3, 0)])
def test_any_size(shape):
    x = randn(*shape).requires_grad_()
    layer = layer_of(randn(8, shape[-1]))
    for _ in range(3):
        layer(x).sum().backward()
    assert x.grad.shape == x.shape and layer.weight.grad.shape == (8, shape[-1])
    assert layer.equalizer.scales.factor.isfinite().all()


# --- state ---


def test_a_resumed_run_is_the_uninterrupted_one():
    """Saved after each of the first passes, measuring ones included."""
    model = model_of()
    for index in range(7):
        state = state_dict(model)
        assert state == merge_states([state, copy.deepcopy(state)])
        resumed = model_of()
        resumed.load_state_dict(model.state_dict())
        load_state_dict(resumed, json.loads(json.dumps(state)))
        for later in range(index, index + 3):
            actual = step(resumed, later)
            assert later > index or same(step(copy.deepcopy(model), later), actual)
        step(model, index)


def test_wrong_state_is_refused():
    model = model_of()
    step(model, 0)
    state = state_dict(model)
    for change in (
        {"exponents": [0] * 63}, {"measured": {"x": [1.0] * 63, "w": None, "first": "q"}},
        {"measured": {"x": [1.0] * 64, "w": [1.0] * 65, "first": "q"}},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="the channel scales of q are not those of 64 channels"):
            load_state_dict(model, state | {"q": state["q"] | change})
    load_state_dict(model, {"nobody": {}})
    assert model.q.equalizer.scales is None


def test_a_pass_ends_outside_of_modes():
    """In a forward in inference mode or of fake tensors s stays usable; selective checkpointing sees no operation."""
    model = model_of()
    for index in range(3):
        step(model, index)
        with torch.inference_mode() if index else FakeTensorMode(allow_non_fake_inputs=True):
            model(randn(4, 64))
    layer, seen = layer_of(randn(48, 64)), []
    for _ in range(4):
        with Passing() as mode:
            y = layer(randn(40, 64).requires_grad_())
        y.sum().backward()
        seen.append(mode.seen)
    assert seen[0] and all(of_pass == seen[0] for of_pass in seen)


def test_copies_and_pickles_keep_s_and_revert_leaves_no_trace():
    model = model_of()
    keys = list(model.state_dict())
    step(model, 0)
    for other in (copy.deepcopy(model), saved_and_loaded(model, weights_only=False)):
        assert other.q.equalizer.scales is other.k.equalizer.scales is not model.q.equalizer.scales
        assert state_dict(other) == state_dict(model)
    assert list(model.state_dict()) == keys == list(Attention().state_dict())
    octavo.nn.change_recipe(model, "q", "rowwise", reason="a test")
    assert "equalizer" not in vars(model.q)
    octavo.nn.change_recipe(model, "q", NAME, reason="a test")
    assert model.q.equalizer.scales is None
    octavo.revert(model)
    assert vars(model.q).keys() == vars(Attention().q).keys() and type(model.q) is nn.Linear


def test_readers_of_recomputed_x_with_scales_of_their_own():
    """Each casts X by its own s in backward, where the first reader leaves its cast for others with the same s."""
    plain, model = Attention(), octavo.convert(Attention(), NAME, activations="fp8", verbose=False)
    step(model, 0)
    for exponent, name in enumerate(("q", "k", "v")):
        equalizer = model.get_submodule(name).equalizer
        equalizer.scales = ChannelScales.of(torch.full((64,), exponent))
        equalizer.passes, equalizer.measurement = 33, None
    names = ["x", *dict(plain.named_parameters())]
    for name, reference, actual in zip(names, step(plain, 1), step(model, 1), strict=True):
        assert sqnr(reference, actual) > 15, name


# --- ranks ---


class Ranks:
    """Ranks that are threads of this process."""

    def __init__(self, models):
        self.models, self.sent, self.exchanges = models, [None] * len(models), 0
        self.barrier = threading.Barrier(len(models))

    def all_reduce_max(self, rank, tensor):
        self.sent[rank] = tensor.clone()
        self.barrier.wait(10)
        self.exchanges += rank == 0
        tensor.copy_(torch.stack(self.sent).amax(0))
        self.barrier.wait(10)

    def begin(self):
        """What happens when the ranks' forward begins; returns how many exchanges that took."""
        self.exchanges = 0
        with ThreadPoolExecutor(len(self.models)) as pool:
            cpu, ranks = torch.device("cpu"), range(len(self.models))
            list(pool.map(lambda r: reduce_scales(self.models[r], partial(self.all_reduce_max, r), cpu), ranks))
        return self.exchanges


def test_ranks_have_one_s():
    """Of what both measured. A layer that one rank does not run is another's."""
    models, local = [model_of(), model_of()], model_of()
    models[1].norm.weight.data[5] = 100
    step(local, 0)
    load_state_dict(models[0], state_dict(local))  # other scales than on the other rank are dropped
    ranks, exchanges = Ranks(models), []
    for index in range(4):
        exchanges.append(ranks.begin())
        assert (models[0].q.equalizer.scales is None) == (index == 0)
        for rank, model in enumerate(models):
            step(model, index + 10 * rank)
    assert exchanges == [1, 1, 1, 1]
    assert ranks.begin() == 0 and models[0].q.equalizer.passes == 4
    ours, theirs = (state_dict(model) for model in models)
    assert ours == theirs
    q, k = (getattr(models[0], name).equalizer.scales for name in "qk")
    assert q is k and q.factor[0, 5] >= 2 * q.factor.median()
    resumed = [model_of(), model_of()]
    for model in resumed:
        load_state_dict(model, json.loads(json.dumps(merge_states([ours, theirs]))))
    assert Ranks(resumed).begin() == 1 and state_dict(resumed[0]) == ours
    assert resumed[0].q.equalizer.scales is resumed[0].k.equalizer.scales


# --- what changes between a forward and its backward ---


def test_a_weight_gathered_with_other_scales_since_forward_is_refused():
    x, w, spec = randn(8, 64).requires_grad_(), randn(32, 64, seed=1), octavo.RECIPES[NAME].w
    first, second = (ChannelScales.of(torch.full((64,), exponent)) for exponent in (1, 2))
    cast = octavo.kernels.quantize(w, spec, first.factor)
    gathered = Fp8AllGatherOutput(cast.data, cast.scale, spec, w.dtype, first)
    with octavo.disabled():
        assert sqnr(w, gathered + 0) > 24
    for refilled in (False, True):
        quantizer = EqualizedQuantizer(Equalizer(50, False), True)
        y = octavo.nn.linear(x, gathered, None, octavo.RECIPES[NAME], False, quantizer)
        if not refilled:
            y.sum().backward()
            assert sqnr(w.sum(0).expand(8, -1), x.grad) > 24
            continue
        gathered.channels = second
        with pytest.raises(RuntimeError, match="changed between a forward and its backward"):
            y.sum().backward()


def test_a_graph_reads_scales_that_stay_and_measures_nothing(monkeypatch):
    capturing = [True]
    monkeypatch.setattr(equalized_layers, "is_capturing", lambda device: capturing[0])
    layer = layer_of(torch.randn(32, 64))
    x = torch.randn(8, 64).requires_grad_()
    layer(x).sum().backward()
    equalizer = equalizer_of(layer)
    assert equalizer.scales is None and equalizer.measurement is None  # computed in the graph, which holds them
    capturing[0] = False
    layer(x).sum().backward()
    capturing[0] = True
    layer(x).sum().backward()
    captured = weakref.ref(equalizer.scales.factor)
    capturing[0] = False
    for _ in range(3):
        layer(x * torch.logspace(-3, 3, 64)).sum().backward()
    assert equalizer.scales.factor is not captured()
    gc.collect()
    assert captured() is not None
