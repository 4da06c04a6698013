"""Modules that emit compute what their own code does, whatever transforms, writes or changes them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_emitting import K, block, data, results, same
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from octavo.nn.input_casts import TRIES


def learned():
    """Two models, of which one emits."""
    models = block("never"), block("always")
    for model in models:
        results(model)
    return models


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # PyTorch's own, at the first jvp
def test_transforms_and_forward_mode():
    """A norm alone is differentiated in every way that its own code is."""
    x = data()[0].detach().float()
    values = []
    for model in learned():
        norm = model.norm.float()

        def loss(weight, norm=norm):
            return torch.func.functional_call(norm, {"weight": weight}, (x,)).square().sum()

        with forward_ad.dual_level():
            dual = norm(forward_ad.make_dual(x, x.sin()))
            tangent = forward_ad.unpack_dual(dual).tangent
        values.append((
            torch.func.grad(loss)(norm.weight.detach()), torch.func.vmap(norm)(x), tangent,
            torch.func.jvp(norm, (x,), (x.sin(),))[1],
        ))  # fmt: skip
    assert same(*values)


def test_dtypes_that_no_kernel_takes():
    x = data()[0].detach().double().requires_grad_()
    ys = [model.norm.double()(x) for model in learned()]
    assert torch.equal(*ys) and ys[0].dtype == torch.float64


@pytest.mark.parametrize("shape", [(K,), (0, K), (3, 0, K), (1, K)], ids=str)
def test_shapes_without_rows_or_with_one(shape):
    x = torch.randn(*shape).bfloat16().requires_grad_()
    one, other = (model.norm for model in learned())
    assert torch.equal(one(x), other(x))
    assert same(*(torch.autograd.grad(norm(x).sum(), (x, norm.weight)) for norm in (one, other)))


def _zeroed(module, args, out):
    out[..., :3] = 0


def _doubled(module, args, out):
    with torch.no_grad():
        out.mul_(2)


def _negated(module, args, out):
    out.detach().neg_()


@pytest.mark.parametrize("write", [_zeroed, _doubled, _negated])
def test_a_cast_is_not_read_after_a_write_in_place(write):
    """Of a norm's result before the linears read it, of an MLP's before the down projection does."""
    models = learned()
    for model in models:
        model.norm.register_forward_hook(write)
        model.mlp.down_proj.register_forward_pre_hook(lambda module, args: write(module, None, args[0]))
    assert same(results(models[0]), results(models[1]))


def test_a_write_between_siblings():
    models = learned()
    for model in models:
        model.q.register_forward_hook(lambda module, args, out: _doubled(module, None, args[0]))
    assert same(results(models[0]), results(models[1]))


def test_views_of_a_result_are_cast_by_their_reader():
    models = learned()
    for model in models:
        model.norm.register_forward_hook(lambda module, args, out: out.flatten(0, 1).view(out.shape))
    assert same(results(models[0], passes=TRIES + 2), results(models[1], passes=TRIES + 2))
    assert not vars(models[1].norm)["octavo_emitter"].due()


def test_interleaved_microbatches_threads_and_errors():
    """The forward of one part of the model on one batch, then another; backward in the same order; an error between."""
    values = []
    for model in learned():
        x, _ = data()
        inputs = [x, (x.detach() * 3).requires_grad_()]
        ys = [model.norm(x) for x in inputs]
        parts = [getattr(model, name)(y) for name in ("q", "k", "v") for y in ys]
        handle = model.v.register_forward_pre_hook(lambda module, args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
        with torch.no_grad():
            evaluated = model(x)
        sum(part.float().square().sum() for part in parts).backward()
        with ThreadPoolExecutor(3) as pool:
            threads = [*pool.map(model, inputs * 3)]
        values.append(
            [
                evaluated,
                *parts,
                *(y.detach() for y in threads),
                *(x.grad for x in inputs),
                model.norm.weight.grad,
                model.q.weight.grad,
            ]
        )
    assert same(*values)


def test_parameters_that_change_after_conversion():
    """Frozen and not, replaced, parametrized, in another dtype: between forwards."""
    models = learned()

    def both(change):
        for model in models:
            change(model)
        assert same(results(models[0]), results(models[1])), change

    class Twice(nn.Module):
        def forward(self, weight):
            return weight * 2

    both(lambda model: model.norm.requires_grad_(False))
    both(lambda model: model.q.requires_grad_(False))
    both(lambda model: model.requires_grad_(True))
    both(lambda model: setattr(model.norm, "weight", nn.Parameter(torch.full((K,), 2.0).bfloat16())))
    both(lambda model: model.norm.weight.data.mul_(3))
    both(lambda model: parametrize.register_parametrization(model.norm, "weight", Twice()))
    both(lambda model: parametrize.remove_parametrizations(model.norm, "weight"))
    both(lambda model: setattr(model.mlp, "act_fn", nn.SiLU(inplace=True)))
    both(lambda model: setattr(model.mlp, "act_fn", nn.Identity()))
    both(lambda model: setattr(model.mlp, "up_proj", model.mlp.gate_proj))
    both(lambda model: setattr(model.norm, "forward", lambda x, own=model.norm.forward: own(x).mul_(2)))
