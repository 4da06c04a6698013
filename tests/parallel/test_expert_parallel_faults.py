"""Distributed experts where something goes wrong: a rank that differs or has NaNs, parameters that are shared,
and runs that are resumed.
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
from training import full_bytes

import octavo
from octavo.parallel import clip_grad_norm_, expert_parallel, parallelize
from processes import on_ranks
from support.moe_models import experts_of, mesh_of, mixture, routed

pytestmark = [pytest.mark.dist, pytest.mark.thorough]


def converted():
    return octavo.convert(experts_of("mixtral"), verbose=False)


def message_of(error, function, *arguments):
    with pytest.raises(error) as raised:
        function(*arguments)
    return str(raised.value)


# --- ranks that call experts differently ---


@on_ranks(2)
def test_ranks_that_call_experts_differently_all_raise():
    last, messages = dist.get_rank() == 1, []
    contexts = {
        "octavo.disabled()": octavo.disabled,
        "gradients enabled": torch.no_grad,
        "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
        "requires gradients": nullcontext,
        "dtype": nullcontext,
    }
    for fp8 in (True, False):
        experts = expert_parallel(converted(), mesh_of()["ep"], fp8_comm=fp8)
        x, index, weights, grad = routed(9, seed=dist.get_rank())
        for name, context in contexts.items():
            changed = copy.deepcopy(experts).bfloat16() if last and name == "dtype" else experts
            tokens = x.to(changed.down_proj.dtype).requires_grad_(last or name != "requires gradients")
            with context() if last else nullcontext():
                messages.append((name, message_of(RuntimeError, changed, tokens, index, weights)))
        experts(x, index, weights).backward(grad)  # no message of before is left
    for name, message in messages:
        assert name in message and "rank 0 " in message and "rank 1 " in message


# --- errors at set-up ---


@on_ranks(3)
def test_shared_parameters_adapters_and_foreign_ranks_raise():
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() == 2:
        assert "rank 2 is not in the mesh" in message_of(ValueError, expert_parallel, converted(), mesh)
        return
    for other in (converted(), nn.Module()):
        model = nn.ModuleDict({"a": converted(), "b": other})
        model["b"].down_proj = model["a"].down_proj
        tied = message_of(ValueError, expert_parallel, model, mesh)
        assert tied.startswith("'a.down_proj' and 'b.down_proj' are one parameter")
    adapted = nn.ModuleDict({"experts": nn.ModuleDict({"base_layer": converted()})})
    assert "'experts.base_layer' have PEFT adapters" in message_of(ValueError, expert_parallel, adapted, mesh)


# --- norms of empty shards ---


def clip_job():
    model = octavo.convert(mixture("mixtral", num_local_experts=1, num_experts_per_tok=1), verbose=False)
    mesh = mesh_of(2)  # one expert, and two ranks that share it
    parallelize(expert_parallel(model, mesh["ep"]), mesh)
    step(model, None, 0)
    sizes = {p.to_local().numel() for p in model.parameters()}
    grads = [p.grad.full_tensor() for p in model.parameters()]
    norms = {order: clip_grad_norm_(model.parameters(), 1e9, order).item() for order in (1.0, 2.0, float("inf"))}
    expected = {order: torch.nn.utils.get_total_norm(grads, order).item() for order in norms}
    return 0 in sizes, norms, expected


def test_norms_over_shards_without_elements(gloo):
    found = gloo.run(clip_job, 2)
    assert any(empty for empty, _, _ in found)
    assert all(norms == pytest.approx(expected, rel=1e-5) for _, norms, expected in found)


# --- training ---


def distributed(efsdp):
    mesh, model = mesh_of(efsdp), octavo.convert(mixture("mixtral").bfloat16(), verbose=False)
    parallelize(expert_parallel(model, mesh["ep"]), mesh, fp8_comm="on")
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


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def spoil_experts(model):
    """A NaN in the gradient of one rank's experts alone: no collective has carried it to the others."""
    if dist.get_rank() == 3:
        model.model.layers[0].mlp.experts.down_proj.grad.to_local()[0, 0, 0] = torch.nan


@on_ranks(4)
def test_a_nan_on_one_rank_leaves_no_trace():
    undisturbed, disturbed = distributed(2), distributed(2)
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
        message = message_of(FloatingPointError, step, *disturbed, 9, *arguments)
        disturbed[1].zero_grad()
        assert "parameters and states are unchanged" in message and same(whole(*undisturbed), whole(*disturbed))


def resume_job(folder):
    model, optimizer = distributed(2)
    for number in range(2):
        step(model, optimizer, number)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    saved = whole(model, optimizer)
    losses = [step(model, optimizer, number) for number in (2, 3)]
    for efsdp in (2, 1, 4):
        again, optimizer_again = distributed(efsdp)
        optimizer_again.make_states()
        state = dict(zip(("model", "optimizer"), get_state_dict(again, optimizer_again), strict=True))
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            again, optimizer_again, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )  # fmt: skip
        assert same(whole(again, optimizer_again), saved)
        if efsdp == 2:
            assert [step(again, optimizer_again, number) for number in (2, 3)] == losses
            assert same(whole(again, optimizer_again), whole(model, optimizer))


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(gloo, tmp_path):
    """On the same mesh [2, 2]; meshes [1, 4] and [4, 1] load the same parameters and states."""
    gloo.run(resume_job, 4, str(tmp_path / "checkpoint"))
