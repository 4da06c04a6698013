"""The quantized input that siblings share is never that of another tensor, nor that of other values."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from casts import counted
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.kernels.quantize import QUANTIZE
from octavo.nn.operands import INPUT_CASTS
from tensors import randn, same

SHAPE = (16, 32)


def made(seed=0, shape=SHAPE):
    """A tensor that autograd made."""
    return randn(*shape, seed=seed).requires_grad_() * 1


def pair():
    torch.manual_seed(0)
    return octavo.convert(nn.ModuleList(nn.Linear(32, 24) for _ in range(2)), verbose=False)


def alone(layer, x):
    """What a layer makes of values that nothing was remembered of."""
    return layer(x.detach().clone())


def set_data(x, count=1):
    for _ in range(count):
        x.data = 3 * x.detach()


CHANGES = {
    "in place": lambda x: x.detach().mul_(3),
    "through a view": lambda x: x.detach()[2:4].zero_(),
    "data": set_data,
    "data twice": lambda x: set_data(x, 2),  # the allocator may give the third memory the place of the first
    "strides": lambda x: setattr(x, "data", x.detach().clone().t().contiguous().t() * 3),
    "rows": lambda x: setattr(x, "data", x.detach()[::2]),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_between_two_readers_is_seen(kind):
    first, second = pair()
    for _ in range(10):
        x = made()
        first(x)
        CHANGES[kind](x)
        assert torch.equal(second(x), alone(second, x))


class Receive(torch.autograd.Function):
    """Hands out one buffer again and again, as exchanges between ranks do; who fills it tells autograd nothing."""

    buffer = torch.zeros(SHAPE)

    @staticmethod
    def forward(ctx, x):
        Receive.buffer.detach().numpy()[:] = x.numpy()
        return Receive.buffer

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_buffer_that_is_handed_out_again_is_quantized_again():
    first, second = pair()
    versions = set()
    for seed in range(4):
        values = randn(*SHAPE, seed=seed).requires_grad_()
        y = Receive.apply(values)
        assert y is Receive.buffer and y.grad_fn is not None
        versions.add(y._version)
        assert torch.equal(first(y), alone(first, values)) and torch.equal(second(y), alone(second, values))
    assert len(versions) == 1
    Receive.buffer = torch.zeros(SHAPE)


def test_views_are_not_taken_for_their_base():
    layer = octavo.convert(nn.Linear(32, 24), verbose=False)
    x = made(shape=(32, 32))
    layer(x)
    for view in (x.t(), x[1:], x[::2], x.view(2, 16, 32), x.flip(0)):
        assert torch.equal(layer(view), alone(layer, view))


def test_a_dead_tensor_leaves_no_copy_and_no_graph():
    first, _ = pair()
    x = Receive.apply(randn(*SHAPE).requires_grad_())
    Receive.buffer = torch.zeros(SHAPE)
    first(x)
    node, entry = weakref.ref(x.grad_fn), INPUT_CASTS.entry[1]
    data = weakref.ref(next(iter(entry.casts.values()))[0])
    del x
    assert data() is None and entry.state == ()
    del entry
    gc.collect()
    assert node() is None


def test_a_new_tensor_at_the_old_address_is_quantized():
    first, second = pair()
    for seed in range(20):
        x = made(seed)
        first(x)
        del x
        x = made(seed + 100)
        assert torch.equal(second(x), alone(second, x))


def test_autocast_may_go_on_and_off_between_readers():
    first, second = pair()
    x = made()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first(x)
    inside = second(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = second(x)
    assert torch.equal(inside, alone(second, x)) and again.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(again, alone(second, x))


def test_threads_do_not_mix():
    first, second = pair()
    inputs = [made(seed) for seed in range(8)]
    expected = [(alone(first, x), alone(second, x)) for x in inputs]
    barrier = threading.Barrier(4)

    def work(_):
        barrier.wait()
        return all(
            torch.equal(y, layer(x))
            for _ in range(5)
            for x, ys in zip(inputs, expected, strict=True)
            for layer, y in zip((first, second), ys, strict=True)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_threads_do_not_evict_each_others_copy():
    first, second = pair()
    x = made()
    with counted(QUANTIZE) as casts, ThreadPoolExecutor(1) as pool:
        first(x)
        pool.submit(first, made(1)).result()
        second(x)
    assert sum(call[0].shape == SHAPE for call in casts) == 2


def test_a_tensor_that_another_thread_drops_leaves_no_copy():
    first, _ = pair()
    box = [made()]
    first(box[0])
    entry = INPUT_CASTS.entry[1]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(box.clear).result()
    assert not entry.casts and entry.state == ()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_reads_what_there_is(reentrant):
    def gradients(checkpointed):
        layers = pair()
        leaf = randn(*SHAPE).requires_grad_()
        x = leaf * 1

        def both(x):
            return layers[0](x) * layers[1](x)

        y = checkpoint(both, x, use_reentrant=reentrant) if checkpointed else both(x)
        layers[0](made(5))
        y.sum().backward()
        return [leaf.grad, *(p.grad for p in layers.parameters())]

    assert same(gradients(False), gradients(True))


# torch's own, at the import of its rules for jvp; a FutureWarning since torch 2.14
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
@pytest.mark.parametrize("kind", ["grad", "vmap", "jvp"])
def test_function_transforms_raise_and_leave_nothing(kind):
    """Our autograd function has no rules for them."""
    first, second = pair()
    x = made()
    first(x)
    with pytest.raises((RuntimeError, NotImplementedError)):
        if kind == "grad":
            torch.func.grad(lambda v: first(v * 1).sum())(x)
        elif kind == "vmap":
            torch.func.vmap(first)(torch.stack([x, x]))
        else:
            torch.func.jvp(first, (x,), (x,))
    assert torch.equal(second(x), alone(second, x))
