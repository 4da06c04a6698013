"""FP8 copies of weights that are used more than once are never stale: keep_weights and accumulating."""

import copy
import gc
import weakref
from contextlib import nullcontext
from functools import cache, partial

import pytest
import torch
import transformers.pytorch_utils
from casts import set_copies, set_steady, weight_casts
from models import gradients
from test_composition import CHECKPOINTING, saving
from torch import nn
from torch.optim.swa_utils import AveragedModel

import octavo
from octavo.nn import accumulating
from octavo.nn.memory_audit import saved_for_backward
from octavo.nn.weights import _CACHES
from octavo.numerics import RECIPES
from support.dispatch_modes import Passing
from tensors import same

by_recipe = pytest.mark.parametrize("name", RECIPES)
X = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))


def layer_of(name="rowwise", keep=True):
    torch.manual_seed(0)
    return octavo.convert(nn.Linear(64, 32), name, keep_weights=keep, verbose=False)


def products(module, x=X):
    """Y, ∂X and the gradients of the parameters."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.square().sum().backward()
    return {"y": y.detach(), "dx": x.grad} | gradients(module)


def fresh(module):
    """The same values in a model without copies."""
    plain = copy.deepcopy(module)
    for part in plain.modules():
        vars(part).pop("keep_weights", None)
    return plain


def casts_of(layer, *, backward=True):
    x = X.clone().requires_grad_()
    with weight_casts(layer.weight) as shapes:
        y = layer(x)
        if backward:
            y.sum().backward()
    return len(shapes)


# --- how often weights are quantized ---


@pytest.mark.parametrize("gpu", [False, True])
@by_recipe
def test_a_kept_weight_is_quantized_once_per_pass_and_once_in_all_while_accumulating(name, gpu, monkeypatch):
    set_copies(monkeypatch, gpu)
    layer, plain = layer_of(name), layer_of(name, keep=False)
    for each in (layer, plain):
        set_steady(each, X)
    once = 1 if RECIPES[name].dgrad_w == RECIPES[name].w or gpu else 2
    assert [casts_of(plain) for _ in range(2)] == [2, 2]
    assert [casts_of(layer) for _ in range(2)] == [once, once]
    with accumulating(layer):
        assert [casts_of(layer) for _ in range(3)] == [once, 0, 0]
    assert casts_of(layer, backward=False) <= once
    assert same(products(plain), products(layer))


@pytest.mark.parametrize("gpu", [False, True])
def test_one_byte_per_parameter_is_saved_for_backward(gpu, monkeypatch):
    set_copies(monkeypatch, gpu)
    saved = []
    for keep in (False, True):
        with saved_for_backward(layer := layer_of(keep=keep)) as kept:
            y = layer(X.clone().requires_grad_())
        assert y.requires_grad
        saved.append(kept.by_dtype[torch.float8_e4m3fn])
    assert saved[1] - saved[0] == layer.weight.numel()


def test_accumulating_leaves_nothing_behind():
    layer = layer_of()
    with accumulating(layer):
        layer(X)
        (cache,) = _CACHES.values()
        copies = weakref.ref(next(iter(cache.casts.values()))[3][0].data)
        del cache
    gc.collect()
    assert copies() is None and not _CACHES and not weakref.getweakrefs(layer.weight)
    with pytest.raises(ZeroDivisionError), accumulating(layer):
        layer(X)
        _ = 1 / 0
    assert not _CACHES


def test_accumulating_nests():
    layer = layer_of()
    with accumulating(layer):
        casts_of(layer)
        with accumulating(nn.Sequential(layer)):
            assert casts_of(layer) == 0
        assert casts_of(layer) == 0
    assert not _CACHES


def test_a_weight_of_gpt2_is_shared_through_its_transposed_view():
    layer = octavo.convert(transformers.pytorch_utils.Conv1D(32, 64), keep_weights=True, verbose=False)
    with accumulating(layer), weight_casts(layer.weight.t()) as casts:
        for _ in range(3):
            gradients = products(layer)
    assert len(casts) == 1
    assert same(products(fresh(layer)), gradients)


def test_tied_weights_share_one_copy_per_recipe():
    first, second, third = (layer_of(name) for name in ("rowwise", "rowwise", "tensorwise"))
    third.weight = second.weight = first.weight
    with accumulating(nn.ModuleList([first, second, third])):
        assert [casts_of(layer) for layer in (first, second, third, first, third)] == [1, 0, 1, 0, 0]


# --- equal losses ---


def losses(name, keep, accumulate=False, checkpointing=None, micros=2, steps=6):
    """Of a small model; with the parameters at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    octavo.convert(model, name, keep_weights=keep, verbose=False)
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, values = torch.Generator().manual_seed(3), []
    for _ in range(steps):
        with accumulating(model) if accumulate else nullcontext():
            for _ in range(micros):
                x = torch.randn(16, 64, generator=generator)
                y = checkpointing(model, x.requires_grad_()) if checkpointing else model(x)
                loss = (y - x.roll(1, 1)).square().mean() / micros
                loss.backward()
                values.append(loss.item())
        stepper.step()
        stepper.zero_grad()
    return values, [p.detach().clone() for p in model.parameters()]


without_copies = cache(partial(losses, keep=False))


@pytest.mark.thorough
@pytest.mark.parametrize("name, gpu", [*((name, False) for name in RECIPES), ("rowwise", True), ("blockwise", True)])
def test_losses_are_equal_with_and_without(name, gpu, monkeypatch):
    without = without_copies(name)
    set_copies(monkeypatch, gpu)
    for accumulate in (False, True):
        assert same(without, losses(name, True, accumulate))


CHECKPOINTS = CHECKPOINTING | {"selective": saving([torch.ops.octavo.quantize.default])}


@pytest.mark.parametrize(("name", "kind"), [*(("rowwise", kind) for kind in CHECKPOINTS), ("blockwise", "selective")])
def test_losses_are_equal_under_activation_checkpointing(name, kind):
    for accumulate in (False, True):
        assert same(without_copies(name), losses(name, True, accumulate, CHECKPOINTS[kind]))


class DataSGD(torch.optim.Optimizer):
    """Writes through `.data`, as optimizers did once: no version changes."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.data, alpha=-group["lr"])


OPTIMIZERS = {
    "data": (DataSGD, {}), "foreach": (torch.optim.AdamW, {"foreach": True}),
    "fused": (torch.optim.AdamW, {"fused": True}), "octavo": (octavo.AdamW, {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_may_step_inside_accumulating(kind):
    optimizer, options = OPTIMIZERS[kind]
    results = []
    for keep in (False, True):
        layer = layer_of(keep=keep)
        stepper = optimizer(layer.parameters(), lr=1e-2, **options)
        with accumulating(layer):
            for _ in range(4):
                results.append(products(layer))
                stepper.step()
    assert same(results[:4], results[4:])
    assert not torch.equal(results[0]["y"], results[3]["y"])


# --- writes that nothing reports ---


def released(layer):
    values = 3 * layer.weight.detach().clone()
    storage = layer.weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    layer.weight.data.copy_(values)


def gathered(layer):
    values = 3 * layer.weight.detach().clone()
    layer.weight.data = torch.empty(0)
    layer.weight.data = values


def by_numpy(layer):
    layer.weight.detach().numpy()[:] *= 3


def preserved(layer):
    """As FSDP2 refills a parameter."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(layer.weight):
        layer.weight.mul_(3)


def averaged(layer):
    average = AveragedModel(layer, avg_fn=lambda a, b, n: 3 * b)
    average.update_parameters(layer)
    average.update_parameters(layer)
    for p, q in zip(layer.parameters(), average.parameters(), strict=True):
        p.data.copy_(q.data)


UNREPORTED = {
    "data": lambda layer: layer.weight.data.mul_(3), "numpy": by_numpy, "preserved": preserved,
    "averaged": averaged,
}  # fmt: skip


def in_place(layer):
    with torch.no_grad():
        layer.weight.mul_(3)


def load(layer, assign):
    layer.load_state_dict({name: 3 * value for name, value in layer.state_dict().items()}, assign=assign)


REPORTED = {
    "in place": in_place, "detached": lambda layer: layer.weight.detach().mul_(3), "gathered": gathered,
    "load": partial(load, assign=False), "assigned": partial(load, assign=True),
    "swapped": lambda layer: torch.utils.swap_tensors(layer.weight, nn.Parameter(3 * layer.weight.detach())),
    "moved": lambda layer: layer.to(torch.bfloat16).to(torch.float32),
    "set": lambda layer: setattr(layer, "weight", nn.Parameter(3 * layer.weight.detach())),
}  # fmt: skip
WRITES = UNREPORTED | REPORTED | {"released": released}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("rowwise", kind) for kind in WRITES), *((name, "data") for name in RECIPES if name != "rowwise")],
)
def test_any_write_between_passes_is_seen(name, kind):
    layer = layer_of(name)
    before = products(layer)
    for _ in range(3):
        WRITES[kind](layer)
        expected, after = products(fresh(layer)), products(layer)
        assert same(expected, after)
        assert not torch.equal(after["y"], before["y"])


@pytest.mark.parametrize("kind", REPORTED)
def test_a_reported_write_is_seen_while_accumulating(kind):
    layer = layer_of()
    with accumulating(layer):
        before = products(layer)
        for _ in range(3):
            REPORTED[kind](layer)
            after = products(layer)
            assert same(products(fresh(layer)), after)
            assert not torch.equal(after["y"], before["y"])


@pytest.mark.parametrize(
    ("name", "kind"), [*(("rowwise", kind) for kind in UNREPORTED), ("tensorwise", "data"), ("blockwise", "numpy")]
)
def test_an_unreported_write_while_accumulating_raises(name, kind):
    model = nn.Sequential(layer_of(name), nn.ReLU())
    with pytest.raises(RuntimeError, match=r"1 weights changed inside octavo.nn.accumulating.*\(first: '0'\)"):
        with accumulating(model):
            model(X)
            UNREPORTED[kind](model[0])
            model(X)
    assert not _CACHES
    assert same(products(fresh(model)), products(model))


def test_memory_released_and_filled_again_while_accumulating_is_seen_or_raises():
    """It is seen where the memory is elsewhere then."""
    for _ in range(8):
        layer, raised, after = layer_of(), False, None
        try:
            with accumulating(layer):
                products(layer)
                released(layer)
                after = products(layer)
        except RuntimeError:
            raised = True
        assert after is not None
        assert raised or torch.equal(after["y"], products(fresh(layer))["y"])


def test_an_unreported_write_before_a_step_raises():
    layer = layer_of()
    stepper = torch.optim.SGD(layer.parameters(), lr=1e-2)
    with accumulating(layer):
        products(layer)
        layer.weight.data.mul_(2)
        with pytest.raises(RuntimeError, match="PyTorch did not report it"):
            stepper.step()
        layer.weight.data.div_(2)


def test_views_of_a_shared_parameter_have_copies_of_their_own():
    """The owner of the memory is a converted layer's weight, and other layers read parts of it."""
    owner = octavo.convert(nn.Linear(64, 64), keep_weights=True, verbose=False)
    recipe = RECIPES["rowwise"]
    with accumulating(owner):
        owner(X)
        for _ in range(2):
            for rows in (slice(0, 32), slice(32, 64), slice(0, 64, 2)):
                part = owner.weight[rows]
                expected = octavo.nn.linear(X, part.detach(), None, recipe)
                assert torch.equal(octavo.nn.linear(X, part, None, recipe, True), expected)


@pytest.mark.parametrize("accumulate", [False, True])
def test_functional_call_uses_the_tensors_that_it_is_given(accumulate):
    layer = layer_of()
    other = {name: 3 * p.detach() for name, p in layer.named_parameters()}
    with accumulating(layer) if accumulate else nullcontext():
        before = layer(X)
        called = torch.func.functional_call(layer, other, (X,))
        again = layer(X)
    assert torch.equal(before, again) and not torch.equal(before, called)
    layer.load_state_dict(other)
    assert torch.equal(fresh(layer)(X), called)


@pytest.mark.parametrize(
    ("name", "keep", "accumulate"),
    [*((name, True, False) for name in RECIPES), ("rowwise", True, True), ("rowwise", False, False)],
)
def test_a_weight_changed_between_forward_and_backward_is_refused(name, keep, accumulate):
    layer = layer_of(name, keep)
    with accumulating(layer) if accumulate else nullcontext():
        y = layer(X.clone().requires_grad_())
        with torch.no_grad():
            layer.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_changed_recipe_is_used_at_once():
    model = nn.Sequential(layer_of())
    with accumulating(model):
        products(model)
        octavo.nn.change_recipe(model, "0", "tensorwise", reason="a test")
        assert same(products(fresh(model)), products(model))


@pytest.mark.parametrize("context", [torch.inference_mode, Passing])
def test_copies_are_not_shared_with_inference_mode_or_a_dispatch_mode(context):
    layer = layer_of()
    with accumulating(layer):
        with context():
            assert casts_of(layer, backward=False) > 0
        assert casts_of(layer) == 1
        with context():
            assert casts_of(layer, backward=False) > 0


@pytest.mark.parametrize("around", [(None, 7, False), (None, 0, True)], ids=["stream", "capture"])
def test_copies_are_not_shared_with_another_stream_or_a_graph_capture(around, monkeypatch):
    layer = layer_of()
    monkeypatch.setattr("octavo.nn.weights.execution_context", lambda w: (None, 0, False))
    with accumulating(layer):
        assert casts_of(layer) == 1
        with monkeypatch.context() as patch:
            patch.setattr("octavo.nn.weights.execution_context", lambda w: around)
            assert casts_of(layer) == 1
