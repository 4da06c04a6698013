"""Experts on several ranks: the results of one process with all experts, whatever each rank sends."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from training import full

import octavo
from collective_recorder import CollectiveRecorder
from octavo.numerics import sqnr
from octavo.parallel import Parallel, context_parallel, expert_parallel, parallelize, tensor_parallel
from processes import on_ranks
from support.moe_models import experts_of, mesh_of, mixture, results, routed

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


def module_job(cases):
    """For each case, SQNR of this rank's results to those of one process with the tokens of all ranks; inf: equal."""
    reports = []
    for family, tokens, to_rank, fp8 in cases:
        experts, batches = converted(family), batches_of(tokens, to_rank)
        one = results(experts, *map(torch.cat, zip(*batches, strict=True)))
        mine = results(expert_parallel(experts, mesh_of()["ep"], fp8_comm=fp8), *batches[dist.get_rank()])
        report = {}
        for name, value in mine.items():
            if isinstance(value, DTensor):
                expected, value = one[name] / dist.get_world_size(), value.full_tensor()
            else:
                expected = one[name].split(tokens)[dist.get_rank()]
            assert value.shape == expected.shape and value.dtype == expected.dtype
            report[name] = sqnr(expected, value) if expected.any() else torch.inf
        reports.append(report)
    return reports


CASES = [([64, 64], None), ([1, 0], None), ([0, 0], None), ([7, 33], None), ([0, 9], 0), ([33, 1], 0), ([33, 7], 1)]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_exact_messages_change_no_bit(gloo, family):
    for reports in gloo.run(module_job, 2, [(family, *case, False) for case in CASES]):
        assert all(value == torch.inf for report in reports for value in report.values())


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_fp8_messages_stay_close(gloo, family):
    for reports in gloo.run(module_job, 2, [(family, *case, True) for case in CASES]):
        for report in reports:
            assert report["y"] >= 41
            assert min(report.values()) >= 25 and report.get("down_proj_bias", 31) >= 31, report


class Checkpointed(nn.Module):
    def __init__(self, inner, use_reentrant):
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, *arguments):
        return checkpoint(self.inner, *arguments, use_reentrant=self.use_reentrant)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@on_ranks(2)
def test_checkpointing_autocast_storage_and_dropped_slots():
    (x, index, weights, grad) = batch = batches_of([40, 24])[dist.get_rank()]
    plain = converted("gpt_oss")
    experts = expert_parallel(copy.deepcopy(plain), mesh_of()["ep"])
    expected = results(experts, *batch)

    def same(module, batch=batch):
        other = {name.removeprefix("inner."): value for name, value in results(module, *batch).items()}
        return all(torch.equal(local(expected[name]), local(other[name])) for name in expected)

    assert same(experts) and same(experts.eval())
    assert same(Checkpointed(experts, use_reentrant=True)) and same(Checkpointed(experts, use_reentrant=False))
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
        assert all(torch.equal(local(many[name]), local(negative[name])) for name in many)
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


def model_of(family="mixtral", dtype=torch.float32):
    return octavo.convert(mixture(family).to(dtype), verbose=False)


def distributed(family="mixtral", efsdp=1, fp8_comm=True, fsdp_comm="gather", dtype=torch.float32):
    mesh, model = mesh_of(efsdp), model_of(family, dtype)
    expert_parallel(model, mesh["ep"], fp8_comm=fp8_comm)
    return parallelize(model, mesh, fp8_comm=fsdp_comm)


def gradients_of(model, part=(0, 1)):
    tokens = batch(0).chunk(part[1])[part[0]]
    logits = model(input_ids=tokens[:, :-1]).logits
    F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    return {name: full(parameter.grad) for name, parameter in model.named_parameters()}


def gradients_job():
    return gradients_of(distributed(), (dist.get_rank(), dist.get_world_size()))


def test_every_gradient_is_as_accurate_as_in_one_process(gloo):
    with octavo.disabled():
        exact = gradients_of(model_of())
    one, many = gradients_of(model_of()), gloo.run(gradients_job, 2)[0]
    lost = {name: sqnr(exact[name], one[name]) - sqnr(exact[name], many[name]) for name in exact}
    assert max(lost.values()) <= 1.5, lost


# --- errors ---


@on_ranks(2)
def test_what_cannot_work_raises_on_every_rank():
    rank, mesh = dist.get_rank(), mesh_of()
    ep, plain = mesh["ep"], experts_of("mixtral")

    def refused(text, function, *arguments, **options):
        with pytest.raises((TypeError, ValueError)) as error:
            function(*arguments, **options)
        assert text in f"{error.type.__name__}: {error.value}"

    one_dimension = (
        "ValueError: expert_parallel takes one dimension of a mesh; got 2, named ('efsdp', 'ep'): pass the one"
    )
    refused(one_dimension, expert_parallel, converted("mixtral"), mesh)
    refused("TypeError: expert_parallel takes a torch DeviceMesh", expert_parallel, converted("mixtral"), "ep")
    none = "and this model has none"
    refused(
        f"{none}: call octavo.convert(model) first; octavo.report(model) has the reason for ''",
        expert_parallel,
        plain,
        ep,
    )
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
