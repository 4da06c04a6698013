"""Weights that are resident in FP8 under FSDP2: sharded as bytes, with the results of one process bit for bit."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from training import full, full_bytes

import octavo
from octavo.nn import ResidentWeight, change_recipe
from octavo.nn.resident import as_resident
from octavo.parallel import Parallel, expert_parallel, parallelize
from octavo.parallel.fsdp import parameters_in_fp8
from processes import on_ranks
from support.moe_models import loss_of, mixture
from support.refusals import refused
from tensors import same

pytestmark = [pytest.mark.dist, pytest.mark.thorough]


class Block(nn.Module):
    """A frozen base of two layers, of which no number of ranks shares the rows evenly, and a trained adapter."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.adapter = nn.Linear(128, 257), nn.Linear(257, 128, bias=False), nn.Linear(128, 128)
        self.up.requires_grad_(False), self.down.requires_grad_(False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x))) + self.adapter(x)


def stack(recipe, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3))).to(dtype)
    return octavo.convert(model, recipe, frozen="fp8", skip=["*adapter"], verbose=False)


def batch(rank, dtype=torch.float32):
    return torch.randn(6, 128, generator=torch.Generator().manual_seed(rank)).to(dtype)


def step(model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.float().square().mean().backward()
    return y.detach(), x.grad


def own_bytes(model):
    parts = [part for p in model.parameters() if (part := as_resident(p)) is not None]
    return sum(part.data_.untyped_storage().nbytes() + part.scale.untyped_storage().nbytes() for part in parts)


def sharded(recipe, how="off", dtype=torch.float32):
    model = stack(recipe, dtype)
    if how != "fully_shard":
        return parallelize(model, Parallel(fp8_comm=how))
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def gradients(model):
    return {n: full(p.grad).clone() for n, p in model.named_parameters() if p.requires_grad}


def step_job(recipe, how, dtype):
    model = sharded(recipe, how, dtype)
    size = own_bytes(model)
    outputs = [step(model, batch(dist.get_rank(), dtype)) for _ in range(2)]  # the second gathers into the same memory
    return outputs, gradients(model), size, octavo.report(model).summary


FP32, BF16 = torch.float32, torch.bfloat16
CASES = [
    ("rowwise", "off", 2, FP32), ("rowwise", "gather", 2, BF16), ("rowwise", "off", 1, FP32),
    ("tensorwise", "fully_shard", 2, FP32), ("tensorwise", "gather", 3, BF16), ("blockwise", "off", 3, FP32),
    ("rowwise_hp_wgrad", "fully_shard", 2, BF16), ("rowwise_weight_only", "fully_shard", 2, FP32),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "how", "ranks", "dtype"), CASES)
def test_shards_compute_what_one_process_computes(gloo, recipe, how, ranks, dtype):
    results = gloo.run(step_job, ranks, recipe, how, dtype)
    model = stack(recipe, dtype)
    whole, sums = own_bytes(model), {}
    for rank, (outputs, _, size, summary) in enumerate(results):
        expected = step(model, batch(rank, dtype))
        assert same([expected] * 2, outputs)
        assert size <= whole / ranks * 1.03 and "resident in FP8" in summary
        for name, gradient in gradients(model).items():
            sums[name] = sums.get(name, 0) + gradient / ranks
    for name, actual in results[0][1].items():
        exact = dtype == torch.float32 and ranks < 3  # sums of three numbers depend on their order
        assert torch.equal(sums[name], actual) if exact else octavo.numerics.sqnr(sums[name], actual) > 40, name


def bits(model):
    return {name: full_bytes(value) for name, value in model.state_dict().items()}


def save_job(recipe, folder):
    model = sharded(recipe)
    step(model, batch(dist.get_rank()))
    dcp.save(model.state_dict(), checkpoint_id=folder)
    return bits(model)


def load_job(recipe, folder, assign):
    model = sharded(recipe)
    for parameter in model.parameters():
        part = as_resident(parameter)
        if part is None:
            nn.init.zeros_(parameter)
        else:
            part.data_.view(torch.uint8).zero_(), part.scale.fill_(1)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state, assign=assign)
    return bits(model), step(model, batch(0))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize(("recipe", "assign"), [("rowwise", False), ("tensorwise", True), ("blockwise", False)])
def test_a_checkpoint_loads_on_another_number_of_ranks(gloo, recipe, assign, tmp_path):
    state = gloo.run(save_job, 2, recipe, str(tmp_path))[0]
    expected = step(stack(recipe), batch(0))
    assert same((state, expected), gloo.run(load_job, 3, recipe, str(tmp_path), assign)[0])
    model = stack(recipe)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    whole = model.state_dict()
    dcp.load(whole, checkpoint_id=str(tmp_path), no_dist=True)
    model.load_state_dict(whole)
    assert same(expected, step(model, batch(0)))


@on_ranks(2)
def test_values_in_high_precision_load_into_shards():
    """Sharded as the model, they are quantized."""
    plain = torch.randn(257, 128, generator=torch.Generator().manual_seed(7))
    for recipe in ("rowwise", "tensorwise"):
        model = sharded(recipe)
        state = {k: v for k, v in model.state_dict().items() if k != "0.up.weight_scale"}
        state["0.up.weight"] = distribute_tensor(plain, model[0].up.weight.device_mesh, [Shard(0)])
        if recipe == "tensorwise":
            refused("scales of e4m3/tensor depend on other ranks", model.load_state_dict, state, kind=RuntimeError)
            continue
        model.load_state_dict(state)
        expected = ResidentWeight.quantized(plain, octavo.RECIPES[recipe].w)
        assert torch.equal(bits(model)["0.up.weight"], full_bytes(expected.data_))


@on_ranks(2)
def test_what_cannot_be_done_with_shards_raises():
    model = sharded("rowwise")
    refused(r"0\.up is resident in FP8 and sharded", octavo.revert, model)
    with pytest.raises(ValueError, match="resident in FP8 and sharded: its weights become plain only before"):
        change_recipe(model, "0.up", None, reason="off")
    refused("cannot read: use one of rowwise", change_recipe, model, "0.up", "blockwise", reason="off")
    change_recipe(model, "0.up", "rowwise_hp_wgrad", reason="fits")
    refused("would change a weight that is resident in FP8", model[0].up.weight.to_local().add_, 1)
    before = bits(model)
    model[1].down.weight.requires_grad_(True)
    refused("is frozen and cannot be trained", step, model, batch(0))
    assert same(before, bits(model))


def mixture_of(family, recipe, frozen):
    model = mixture(family, num_local_experts=6, num_experts=6, n_routed_experts=6)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name or frozen == "bf16")
    return octavo.convert(model, recipe, frozen=frozen, verbose=False)


def experts_job(family, recipe, frozen, how):
    model, name = mixture_of(family, recipe, frozen), "model.layers.1.mlp.experts"
    if how == "ep":
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("efsdp", "ep"))
        expert_parallel(model, mesh["ep"], fp8_comm=False)
        parallelize(model, mesh, fp8_comm="off")
    else:
        parallelize(model, Parallel(fp8_comm=how))
    size = own_bytes(model)
    results = loss_of(model, dist.get_rank()), gradients(model), size
    if frozen == "bf16":
        weights = [name for name, p in model.named_parameters() if "experts" in name and p.ndim == 3]
        assert [name for name in parameters_in_fp8(model) if "experts" in name] == (weights if how == "gather" else [])
        assert next(row for row in octavo.report(model) if row.name == name).recipe == recipe
        with pytest.raises(ValueError, match="sharded already: convert before sharding"):
            change_recipe(model, name, None, reason="off")
            change_recipe(model, name, "rowwise", reason="on")
    return results


CASES_OF_EXPERTS = [
    ("mixtral", "blockwise", "fp8", "off", 2), ("gpt_oss", "rowwise", "fp8", "gather", 2),
    ("qwen3_moe", "rowwise", "fp8", "off", 4), ("mixtral", "rowwise", "fp8", "ep", 2),
    ("gpt_oss", "rowwise", "bf16", "gather", 2), ("mixtral", "rowwise", "bf16", "gather", 2),
    ("mixtral", "rowwise", "bf16", "off", 2),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "recipe", "frozen", "how", "ranks"), CASES_OF_EXPERTS)
def test_experts_are_sharded_by_experts(gloo, family, recipe, frozen, how, ranks):
    """Resident in FP8, or trained: gathered in FP8 or as they are, with the same results bit for bit."""
    results = gloo.run(experts_job, ranks, family, recipe, frozen, how)
    model = mixture_of(family, recipe, frozen)
    whole = own_bytes(model)
    losses = [loss_of(model, rank) for rank in range(ranks)]
    if how == "ep":  # rows of several ranks meet in one product
        assert losses == pytest.approx([loss for loss, _, _ in results], rel=1e-4)
    else:
        assert losses == [loss for loss, _, _ in results]
    assert all(size <= whole * -(-6 // ranks) / 6 * 1.01 for _, _, size in results)
    for name, gradient in gradients(model).items():
        actual = results[0][1][name]
        exact = how != "ep" and ranks == 2
        assert torch.equal(gradient / 2, actual) if exact else octavo.numerics.sqnr(gradient / ranks, actual) > 30, name
