"""Experts on several ranks: the results of one process with all experts, whatever each rank sends, and what happens
where something goes wrong: a rank that differs or has NaNs, parameters that are shared, and runs that are resumed.
"""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from training import full, full_bytes

import octavo
from collective_recorder import CollectiveRecorder
from octavo.numerics import sqnr
from octavo.parallel import (
    Parallel,
    clip_grad_norm_,
    context_parallel,
    expert_parallel,
    parallelize,
    tensor_parallel,
)
from processes import on_ranks
from support.moe_models import Checkpointed, experts_of, mesh_of, mixture, results, routed
from tensors import same

pytestmark = [pytest.mark.dist, pytest.mark.thorough]
HIDDEN = 256
"""Width of experts on their own: enough values for a stable SQNR of one token."""


# --- one module ---


def batches_of(tokens, to_rank=None):
    """A batch per rank; `to_rank`: all tokens choose experts of that rank."""
    batches = [routed(count, seed=seed, hidden=HIDDEN) for seed, count in enumerate(tokens)]
    if to_rank is not None:
        each = 8 // len(tokens)
        batches = [(x, index % each + to_rank * each, weights, grad) for x, index, weights, grad in batches]
    return batches


def converted(family, **options):
    parent = nn.ModuleDict({"experts": experts_of(family, hidden_size=HIDDEN)})
    return octavo.convert(parent, verbose=False, **options)["experts"]


def refused(text, function, *arguments, **options):
    """The error of a call, as its kind and its text."""
    with pytest.raises((TypeError, ValueError, RuntimeError, FloatingPointError)) as error:
        function(*arguments, **options)
    message = f"{error.type.__name__}: {error.value}"
    assert text in message
    return message


CASES = [([64, 64], None), ([1, 0], None), ([0, 0], None), ([7, 33], None), ([0, 9], 0), ([33, 1], 0), ([33, 7], 1)]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@on_ranks(2)
def test_results_are_those_of_one_process_with_the_tokens_of_all_ranks(family, fp8):
    """Exact messages change no bit, and FP8 messages stay close."""
    for tokens, to_rank in CASES:
        experts, batches = converted(family), batches_of(tokens, to_rank)
        one = results(experts, *map(torch.cat, zip(*batches, strict=True)))
        mine = results(expert_parallel(experts, mesh_of()["ep"], fp8_comm=fp8), *batches[dist.get_rank()])
        quality = {}
        for name, value in mine.items():
            if isinstance(value, DTensor):
                expected, value = one[name] / dist.get_world_size(), value.full_tensor()
            else:
                expected = one[name].split(tokens)[dist.get_rank()]
            assert value.shape == expected.shape and value.dtype == expected.dtype
            quality[name] = sqnr(expected, value) if expected.any() else torch.inf
        least_y, least_bias, least = (41, 31, 25) if fp8 else [torch.inf] * 3
        assert quality["y"] >= least_y and min(quality.values()) >= least, quality
        assert quality.get("down_proj_bias", torch.inf) >= least_bias, quality


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@on_ranks(2)
def test_checkpointing_autocast_storage_and_dropped_slots():
    (x, index, weights, grad) = batch = batches_of([40, 24])[dist.get_rank()]
    plain = converted("gpt_oss")
    experts = expert_parallel(copy.deepcopy(plain), mesh_of()["ep"])
    expected = results(experts, *batch)

    for module in (experts, experts.eval(), Checkpointed(experts, True), Checkpointed(experts, False)):
        other = {name.removeprefix("inner."): local(value) for name, value in results(module, *batch).items()}
        assert same({name: local(value) for name, value in expected.items()}, other)
    with torch.no_grad():
        assert torch.equal(experts(x, index, weights), expected["y"])
    stored = expert_parallel(converted("gpt_oss", activations="fp8"), mesh_of()["ep"])
    close = results(stored, *batch)
    assert torch.equal(close["y"], expected["y"]) and not torch.equal(close["x"], expected["x"])
    assert min(sqnr(local(expected[name]), local(close[name])) for name in expected) > 20
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = results(experts, *batch)
    assert all(cast[n].dtype == torch.float32 and sqnr(local(expected[n]), local(cast[n])) > 20 for n in expected)
    for dropped in (torch.rand(index.shape) < 0.4, torch.ones_like(index, dtype=torch.bool)):
        one = results(plain, x, torch.where(dropped, 8, index), weights, grad)
        many = results(experts, x, torch.where(dropped, 8, index), weights, grad)
        assert not many["weights"][dropped].any()
        assert not dropped.all() or not any(local(value).any() for value in many.values())
        assert all(sqnr(one[name], many[name]) > 20 for name in ("y", "x", "weights") if one[name].any())
        negative = results(experts, x, torch.where(dropped, -1, index), weights, grad)
        assert same(*([local(value) for value in each.values()] for each in (many, negative)))
    with octavo.disabled():
        one, many = results(plain, *batch), results(experts, *batch)
    assert all(sqnr(one[name], many[name]) > 120 for name in ("y", "x", "weights"))


@on_ranks(2)
def test_messages_take_half_the_bytes_of_bf16():
    sent, hidden, dtype = {}, 384, torch.bfloat16
    for fp8 in (True, False):
        experts = octavo.convert(experts_of("mixtral", hidden_size=hidden).to(dtype), verbose=False)
        expert_parallel(experts, mesh_of()["ep"], fp8_comm=fp8)
        with CollectiveRecorder() as recorder:
            results(experts, *routed(32, hidden=hidden, dtype=dtype, seed=dist.get_rank()))
        assert {call.name for call in recorder.calls} == {"alltoall_base_"}
        assert {call.dtype for call in recorder.calls} == {torch.int32, torch.uint8 if fp8 else dtype}
        assert [call.dtype for call in recorder.calls].count(torch.int32) == 1 and len(recorder.calls) == 5
        sent[fp8] = recorder.bytes("alltoall_base_")
    assert 0.5 * sent[False] < sent[True] <= 0.52 * sent[False]


# --- models ---


def batch(step):
    return torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(step))


def model_of(dtype=torch.float32):
    return octavo.convert(mixture("mixtral").to(dtype), verbose=False)


def distributed(efsdp=1, fsdp_comm="gather", dtype=torch.float32):
    mesh, model = mesh_of(efsdp), model_of(dtype)
    return parallelize(expert_parallel(model, mesh["ep"]), mesh, fp8_comm=fsdp_comm)


def gradients_of(model, part=(0, 1)):
    tokens = batch(0).chunk(part[1])[part[0]]
    logits = model(input_ids=tokens[:, :-1]).logits
    F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    return {name: full(parameter.grad) for name, parameter in model.named_parameters()}


@on_ranks(2)
def test_every_gradient_is_as_accurate_as_in_one_process():
    with octavo.disabled():
        exact = gradients_of(model_of())
    one, many = gradients_of(model_of()), gradients_of(distributed(), (dist.get_rank(), 2))
    lost = {name: sqnr(exact[name], one[name]) - sqnr(exact[name], many[name]) for name in exact}
    assert max(lost.values()) <= 1.5, lost


# --- errors ---


@on_ranks(2)
def test_what_cannot_work_raises_on_every_rank():
    rank, mesh = dist.get_rank(), mesh_of()
    ep, plain = mesh["ep"], experts_of("mixtral")
    one_dimension = "expert_parallel takes one dimension of a mesh; got 2, named ('efsdp', 'ep'): pass the one"
    refused(f"ValueError: {one_dimension}", expert_parallel, converted("mixtral"), mesh)
    refused("TypeError: expert_parallel takes a torch DeviceMesh", expert_parallel, converted("mixtral"), "ep")
    none = "and this model has none"
    not_converted = f"{none}: call octavo.convert(model) first; octavo.report(model) has the reason for ''"
    refused(not_converted, expert_parallel, plain, ep)
    refused(f"{none}: it has no module with 3-D gate_up_proj", expert_parallel, nn.Linear(64, 64), ep)
    five = octavo.convert(experts_of("mixtral", num_local_experts=5), verbose=False)
    unequal = "2 ranks cannot share the 5 experts of '' equally: take a mesh dimension of one of [1, 5]"
    refused(unequal, expert_parallel, five, ep)
    other = converted("mixtral", recipe="rowwise" if rank else "mxfp8")
    refused("call expert_parallel with different recipes of layers", expert_parallel, other, ep)
    experts = converted("mixtral")
    before = dict(experts.named_parameters())
    refused("call expert_parallel with different settings", expert_parallel, experts, ep, fp8_comm=rank == 0)
    assert all(before[name] is p for name, p in experts.named_parameters()) and experts.octavo_exchange is None
    refused(none, expert_parallel, converted("mixtral") if rank else plain, ep)
    refused("call octavo.parallel.expert_parallel(model, mesh['ep']) first", parallelize, converted("mixtral"), mesh)
    expert_parallel(experts, ep)
    refused("are distributed already: call expert_parallel once", expert_parallel, experts, ep)
    refused("give parallelize that mesh, with dimensions named 'efsdp' and 'ep'", parallelize, experts, Parallel())
    held = "holds some of the experts (octavo.parallel.expert_parallel)"
    refused(held, octavo.revert, experts)
    refused(held, octavo.nn.change_recipe, experts, "", "mxfp8", reason="no")
    sharded, in_parts = parallelize(converted("mixtral")), tensor_parallel(model_of(), ep)
    refused("are sharded already: call expert_parallel before octavo.parallelize", expert_parallel, sharded, ep)
    distributed_once = expert_parallel(model_of(), ep)
    refused("ValueError: tensor_parallel does not join expert_parallel", tensor_parallel, distributed_once, ep)
    first = "is distributed already: call expert_parallel before octavo.parallelize and fully_shard, and without tensor"
    refused(first, expert_parallel, in_parts, ep)
    refused("TypeError: tensor_parallel takes a torch DeviceMesh, such as", tensor_parallel, model_of(), "tp")
    refused("TypeError: context_parallel takes a torch DeviceMesh, such as", context_parallel, model_of(), None)


# --- ranks that call experts differently ---


@on_ranks(2)
def test_ranks_that_call_experts_differently_all_raise():
    last = dist.get_rank() == 1
    contexts = {
        "octavo.disabled()": octavo.disabled,
        "gradients enabled": torch.no_grad,
        "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
        "requires gradients": nullcontext,
        "dtype": nullcontext,
    }
    for fp8 in (True, False):
        experts = expert_parallel(converted("mixtral"), mesh_of()["ep"], fp8_comm=fp8)
        x, index, weights, grad = routed(9, seed=dist.get_rank(), hidden=HIDDEN)
        for name, context in contexts.items():
            changed = copy.deepcopy(experts).bfloat16() if last and name == "dtype" else experts
            tokens = x.to(changed.down_proj.dtype).requires_grad_(last or name != "requires gradients")
            with context() if last else nullcontext():
                message = refused(name, changed, tokens, index, weights)
            assert message.startswith("RuntimeError") and "rank 0 " in message and "rank 1 " in message
        experts(x, index, weights).backward(grad)  # no message of before is left


# --- errors at set-up ---


@on_ranks(3)
def test_shared_parameters_adapters_and_foreign_ranks_raise():
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() == 2:
        refused("rank 2 is not in the mesh", expert_parallel, converted("mixtral"), mesh)
        return
    for other in (converted("mixtral"), nn.Module()):
        model = nn.ModuleDict({"a": converted("mixtral"), "b": other})
        model["b"].down_proj = model["a"].down_proj
        refused("ValueError: 'a.down_proj' and 'b.down_proj' are one parameter", expert_parallel, model, mesh)
    adapted = nn.ModuleDict({"experts": nn.ModuleDict({"base_layer": converted("mixtral")})})
    refused("'experts.base_layer' have PEFT adapters", expert_parallel, adapted, mesh)


# --- norms of empty shards ---


@on_ranks(2)
def test_norms_over_shards_without_elements():
    model = octavo.convert(mixture("mixtral", num_local_experts=1, num_experts_per_tok=1), verbose=False)
    mesh = mesh_of(2)  # one expert, and two ranks that share it
    parallelize(expert_parallel(model, mesh["ep"]), mesh)
    step(model, None, 0)
    sizes = {p.to_local().numel() for p in model.parameters()}
    grads = [p.grad.full_tensor() for p in model.parameters()]
    assert (0 in sizes) == (dist.get_rank() == 1)
    for order in (1.0, 2.0, float("inf")):
        norm, expected = clip_grad_norm_(model.parameters(), 1e9, order), torch.nn.utils.get_total_norm(grads, order)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-5)


# --- training ---


def stepped(efsdp):
    """A model and its optimizer."""
    model = distributed(efsdp, "on", torch.bfloat16)
    return model, octavo.AdamW(model.parameters(), lr=1e-3, nonfinite="skip")


def step(model, optimizer, number, factor=1.0, spoil=None):
    """The loss of a rank's tokens; a step of the optimizer if there is one. `spoil` changes gradients before that."""
    g = torch.Generator().manual_seed(10 * number + dist.get_rank())
    tokens = torch.randint(0, 64, (2, 17), generator=g)
    logits = model(input_ids=tokens[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    (loss * factor).backward()
    if optimizer is not None:
        if spoil is None:
            clip_grad_norm_(model.parameters(), 1.0)
        else:
            spoil(model)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def whole(model, optimizer):
    """Parameters and states, as bytes."""
    values = {(name, ""): parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        values |= {(name, key): value for key, value in optimizer.state[parameter].items()}
    return {name: full_bytes(value).clone() for name, value in values.items()}


def spoil_experts(model):
    """A NaN in the gradient of one rank's experts alone: no collective has carried it to the others."""
    if dist.get_rank() == 3:
        model.model.layers[0].mlp.experts.down_proj.grad.to_local()[0, 0, 0] = torch.nan


@on_ranks(4)
def test_a_nan_on_one_rank_leaves_no_trace():
    undisturbed, disturbed = stepped(2), stepped(2)
    losses = [step(*undisturbed, number) for number in range(3)]
    assert step(*disturbed, 0) == losses[0]
    step(*disturbed, 9, factor=torch.nan if dist.get_rank() == 1 else 1.0)
    step(*disturbed, 9, spoil=spoil_experts)
    assert disturbed[1].skipped == 2
    assert [step(*disturbed, number) for number in (1, 2)] == losses[1:]
    assert same(whole(*undisturbed), whole(*disturbed))
    for group in disturbed[1].param_groups:
        group["nonfinite"] = "raise"
    for arguments in ((torch.nan if dist.get_rank() == 2 else 1.0,), (1.0, spoil_experts)):
        refused("parameters and states are unchanged", step, *disturbed, 9, *arguments)
        disturbed[1].zero_grad()
        assert same(whole(*undisturbed), whole(*disturbed))


@pytest.mark.slow
@on_ranks(4)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path):
    """On the same mesh [2, 2]; meshes [1, 4] and [4, 1] load the same parameters and states."""
    model, optimizer = stepped(2)
    for number in range(2):
        step(model, optimizer, number)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
    saved = whole(model, optimizer)
    losses = [step(model, optimizer, number) for number in (2, 3)]
    for efsdp in (2, 1, 4):
        again, optimizer_again = stepped(efsdp)
        optimizer_again.make_states()
        state = dict(zip(("model", "optimizer"), get_state_dict(again, optimizer_again), strict=True))
        dcp.load(state, checkpoint_id=tmp_path)
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(again, optimizer_again, **states)
        assert same(whole(again, optimizer_again), saved)
        if efsdp == 2:
            assert [step(again, optimizer_again, number) for number in (2, 3)] == losses
            assert same(whole(again, optimizer_again), whole(model, optimizer))
