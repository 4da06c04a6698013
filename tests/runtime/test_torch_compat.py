"""The shim around torch acts alike on every supported release."""

import warnings
from functools import partial

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from octavo.runtime import torch_compat
from octavo.runtime.torch_compat import autocast_dtype, in_backward, own_saved_tensors_hooks, without_autocast
from releases import requires_torch


def test_autocast_is_off_on_or_not_there():
    assert autocast_dtype("cpu") is None
    assert autocast_dtype("meta") is None
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype("cpu") == torch.bfloat16
        with without_autocast("cpu"), without_autocast("meta"):
            assert autocast_dtype("cpu") is None


def test_a_compiled_graph_follows_autocast():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def cast(x):
        return x.to(autocast_dtype(x.device.type) or x.dtype)

    x = torch.ones(2)
    assert cast(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert cast(x).dtype == torch.bfloat16
    assert cast(x).dtype == torch.float32


def test_in_backward():
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(in_backward()))
    x.sum().backward()
    assert seen == [True] and not in_backward()


def traced(check):
    outcomes = []
    torch.jit.trace(lambda x: (outcomes.append(check()), x + 1)[1], torch.ones(2), check_trace=False)
    return outcomes[0]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_a_guard_matches_the_same_signature_and_nothing_else():
    """What `eager_signature` tells apart, a guard does; it must not match where the signature is None."""
    x, w = torch.randn(4, 8).bfloat16().requires_grad_(), torch.nn.Parameter(torch.randn(8, 8).bfloat16())
    check = torch_compat.guard_of(x, w)
    with torch.no_grad():
        assert check(x, w) and check(x * 2, w) is False  # which requires no gradient
    assert check(x, w) and check(x * 2, w) and check(x.view_as(x), torch.nn.Parameter(w.detach().clone()))
    others = {
        "dtype": x.float(), "rows": x[:2], "strides": x.t().contiguous().t(), "dimensions": x[None],
        "frozen": x.detach(), "negated": torch._neg_view(x),
        "zero": torch._efficientzerotensor((4, 8), dtype=x.dtype).requires_grad_(),
        "device": x.to("meta"), "subclass": torch.nn.Parameter(x.detach()), "buffer": torch.nn.Buffer(x.detach()),
        "inference": torch.inference_mode()(lambda: torch.randn(4, 8).bfloat16())(), "number": 1.0, "none": None,
    }  # fmt: skip
    assert [name for name, other in others.items() if check(other, w)] == []
    assert not check(x, w.detach()) and not check(x, w.detach().requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        assert not check(x, w)
    with torch.inference_mode():
        assert not check(x, w)
    with torch_compat.FakeTensorMode():  # hides from guards
        assert torch_compat.dispatch_modes()
    assert not torch.func.vmap(lambda y: (torch.zeros(()) + check(x, w), y)[0])(torch.ones(2)).any()
    assert not torch.func.grad(lambda y: y.sum() * (1 if check(x, w) else 0))(torch.ones(2)).any()
    assert not traced(lambda: check(x, w))
    assert check(x, w)


def selective(x):
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoint(lambda x: (x @ x).sin().sum(), x, use_reentrant=False, context_fn=contexts)


def unchanged(x):
    return x


def test_selective_checkpointing_ignores_own_hooks():
    x = torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad(selective(x), x)[0]
    packed = []
    outer = own_saved_tensors_hooks(unchanged, unchanged)
    inner = own_saved_tensors_hooks(lambda t: packed.append(t) or t, unchanged)
    with warnings.catch_warnings(action="error"), outer, inner:
        assert inner.in_force and not outer.in_force
        loss = selective(x)
    assert packed, "plain saved tensors go through them"
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


@requires_torch("2.14", "older releases do not tell selective checkpointing of hooks")
def test_hooks_of_the_user_apply_inside_own_ones():
    x = torch.randn(4, 4, requires_grad=True)
    own = own_saved_tensors_hooks(unchanged, unchanged)
    with saved_tensors_hooks(unchanged, unchanged), own, pytest.warns(FutureWarning, match="saved_tensors_hooks"):
        selective(x)


def test_every_private_name_exists_in_this_release():
    for name in (*torch_compat.__all__, *torch_compat._DISTRIBUTED):
        assert callable(getattr(torch_compat, name)), name
    assert torch_compat.tracing_state() is None and torch_compat.saved_tensors_hooks_disabled() is None
    assert torch_compat.current_graph_task_id() == -1 and torch_compat.current_dispatch_mode() is None
    before = torch_compat.sequence_number()
    torch.ones(1, requires_grad=True).exp()
    assert torch_compat.sequence_number() == before + 1
    with torch_compat.FakeTensorMode(), torch_compat.disable_current_modes():
        assert type(torch.ones(1)) is torch.Tensor
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        torch_compat.nothing  # noqa: B018


def test_what_autograd_holds_is_read_without_unpacking():
    x = torch.randn(3, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: "packed", pytest.fail):
        hooked = x.exp().grad_fn
    plain = x.exp()
    assert torch_compat.held_for_backward(hooked, "result") == "packed"
    assert torch_compat.all_held_for_backward(hooked) == ["packed"]
    assert torch_compat.held_for_backward(plain.grad_fn, "result").data_ptr() == plain.data_ptr()
    assert torch_compat.held_for_backward(plain.grad_fn, "other") is None


def test_global_module_hooks_are_listed():
    def hook(*_):
        return None

    registrations = (
        "register_module_forward_hook", "register_module_forward_pre_hook", "register_module_full_backward_hook",
        "register_module_full_backward_pre_hook",
    )  # fmt: skip
    assert list(torch_compat.global_module_hooks()) == []
    for register in registrations:
        handle = getattr(torch.nn.modules.module, register)(hook)
        assert list(torch_compat.global_module_hooks()) == [hook], register
        handle.remove()


def sharded_job():
    """Facts of a model that FSDP2 shards, of its gathered weight, and of one whose parameters DDP ignores."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False), torch.nn.Linear(4, 2, bias=False))
    before = torch_compat.composable_modules().get(model)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    torch.distributed.fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=False)
    ((first, _),) = torch_compat.fsdp_groups(model)
    weight = first.sharded_param
    local = torch_compat.local_part(weight)
    facts = [before, model in torch_compat.composable_modules(), torch_compat.is_dtensor(weight), tuple(local.shape)]
    x = torch.ones(3, 8)
    y = model(x)
    model.reshard()
    torch_compat.forget_gathered(first)
    again = model(x)
    plain = torch.nn.Linear(2, 2)
    for name in ("bias", "weight"):
        torch_compat.ignore_in_ddp(plain, [name])
    with pytest.raises(RuntimeError, match="doesn't have any parameter"):
        torch.nn.parallel.DistributedDataParallel(plain)
    return [*facts, torch.equal(y, again)]


@pytest.mark.thorough
def test_what_is_sharded(gloo):
    assert gloo.run(sharded_job, 2) == [[None, True, True, (2, 8), True]] * 2
    assert not torch_compat.is_dtensor(torch.ones(1)) and torch_compat.local_part(torch.ones(1)).shape == (1,)


def test_callbacks_run_when_backward_ends():
    ran = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: torch_compat.queue_callback(lambda: ran.append(x.grad is not None)))
    x.sum().backward()
    assert ran == [True]
