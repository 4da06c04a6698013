"""octavo.AdamW on the shards of FSDP2: the bits of one process, and states that go to any number of ranks."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import octavo
from octavo.optim import AdamW
from octavo.optim.states import from_bytes
from octavo.parallel import Parallel, parallelize
from octavo.parallel.fsdp import parameters_in_fp8
from octavo.tensor import local_tensor
from processes import on_ranks
from tensors import randn, saved_and_loaded

pytestmark = pytest.mark.dist

SHAPES = [(40, 200), (7, 128), (96,), (3, 64), (1, 300), (1,), (65, 70), (5, 3, 30), (9, 20)]
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
KINDS = [
    {"states": states, "master": master, "stochastic_rounding": noise}
    for states, master, noise in product(("fp8", "fp32"), ("remainder", "fp32", None), (True, False))
]


class Weights(nn.Module):
    def __init__(self, dtype, shapes=SHAPES):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(randn(*s, seed=i, dtype=dtype)) for i, s in enumerate(shapes))


def step(optimizer, model, number):
    for i, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            gradient = randn(*parameter.shape, seed=1000 * number + i).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                places = {"device_mesh": parameter.device_mesh, "placements": parameter.placements, "run_check": False}
                whole = {"shape": gradient.shape, "stride": gradient.stride()}
                gradient = DTensor.from_local(here(gradient, parameter), **places, **whole)
            parameter.grad = gradient
    optimizer.step()


def pair(dtype, mesh, **settings):
    models = Weights(dtype), fully_shard(Weights(dtype), mesh=mesh)
    return [(model, AdamW(model.parameters(), **{**SETTINGS, **settings})) for model in models]


def assert_same(one, other):
    (model, optimizer), (sharded_model, sharded) = one, other
    for i, (a, b) in enumerate(zip(model.parameters(), sharded_model.parameters(), strict=True)):
        assert same(a, b), f"parameter {i} {SHAPES[i]}"
        ours, theirs = optimizer.state[a], sharded.state[b]
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert same(ours[name], theirs[name]), f"{name} of parameter {i} {SHAPES[i]}"


def here(value, like):
    """Rows of a whole tensor that this rank has of a sharded one, in equal pieces but for the last ones."""
    if isinstance(value, DTensor) or not isinstance(like, DTensor):
        return local_tensor(value)
    dim = like.placements.index(Shard(0))
    size = -(-like.shape[0] // like.device_mesh.size(dim))
    rank = like.device_mesh.get_local_rank(dim)
    return value.detach()[rank * size : (rank + 1) * size]


def same(a, b):
    rows, others = here(a, b), here(b, a)
    return a.shape == b.shape and rows.dtype == others.dtype and rows.shape == others.shape and torch.equal(
        rows.detach().contiguous().view(-1).view(torch.uint8), others.detach().contiguous().view(-1).view(torch.uint8)
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("world", "copies"), [(3, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
@on_ranks("world")
def test_shards_are_stepped_bit_for_bit_as_the_whole(world, copies):
    """Random bits too: they are drawn by the element's place in the whole parameter."""
    mesh = init_device_mesh("cpu", (copies, world // copies), mesh_dim_names=("dp_replicate", "dp_shard"))
    for dtype in (torch.bfloat16, torch.float32):
        for settings in KINDS:
            whole, sharded = pair(dtype, mesh if copies > 1 else mesh["dp_shard"], **settings)
            for number in range(3):
                step(whole[1], whole[0], number)
                step(sharded[1], sharded[0], number)
            assert_same(whole, sharded)
            for state in sharded[1].state.values():
                for name, value in state.items():
                    assert (name == "step") != isinstance(value, DTensor), name
                    assert type(local_tensor(value)) is torch.Tensor, name


@pytest.mark.parametrize(
    ("nonfinite", "bad"), [("raise", torch.nan), ("raise", torch.inf), ("skip", torch.nan), ("ignore", torch.nan)]
)
@on_ranks(3)
def test_ranks_decide_together_about_nan(nonfinite, bad):
    """In a row that one rank has: all decide alike, and say the same."""
    mesh = init_device_mesh("cpu", (3,))
    whole, sharded = pair(torch.bfloat16, mesh, nonfinite=nonfinite)
    for model, optimizer in (whole, sharded):
        step(optimizer, model, 0)
    model, optimizer = sharded
    gradients = [parameter.detach() for parameter in Weights(torch.bfloat16).parameters()]
    gradients[1][6, 5] = gradients[6][0, 0] = bad  # in the last row, and in the first
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
    message = r"^the gradients or moments of 2 parameters contain NaN or Inf, the first of shape \[7, 128\]"
    with pytest.raises(FloatingPointError, match=message) if nonfinite == "raise" else nullcontext():
        optimizer.step()
    assert optimizer.skipped == (nonfinite == "skip")
    if nonfinite != "ignore":
        assert_same(whole, sharded)
    else:
        assert not model.weights[1].full_tensor().isfinite().all()


# --- states that travel ---


class Net(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, frozen ones."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 65), nn.Linear(65, 64)) for _ in range(2)
        )
        self.out = nn.Linear(64, 3)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)


def trained(seed=0, gather=True):
    """A converted model, sharded and gathered in FP8, and its optimizer."""
    torch.manual_seed(seed)
    model = octavo.convert(Net().bfloat16(), verbose=False)
    octavo.convert(model.out, verbose=False)  # narrow: only by itself
    model = parallelize(model, Parallel(fp8_comm="gather" if gather else "off"))
    assert len(list(parameters_in_fp8(model))) == 6 * (gather and dist.get_world_size() > 1)
    return model, AdamW(model.parameters(), lr=1e-2)


def some_steps(model, optimizer, first, count):
    for number in range(first, first + count):
        step(optimizer, model, number)
        optimizer.zero_grad()


def everything(model, optimizer):
    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        tensors |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return tensors


def file_of(model, optimizer, folder):
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        dcp_to_torch_save(folder, f"{folder}.pt")
    dist.barrier()
    return f"{folder}.pt"


def save_job(folder):
    model, optimizer = trained()
    some_steps(model, optimizer, 0, 3)
    file_of(model, optimizer, f"{folder}/saved")
    some_steps(model, optimizer, 3, 2)
    file_of(model, optimizer, f"{folder}/later")


def load_job(folder, gather):
    model, optimizer = trained(seed=1, gather=gather)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=f"{folder}/saved")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    compare(model, optimizer, f"{folder}/saved.pt")
    some_steps(model, optimizer, 3, 2)
    compare(model, optimizer, f"{folder}/later.pt")


def compare(model, optimizer, path):
    expected = torch.load(path, weights_only=True)
    states = expected["optimizer"]["state"]
    expected = expected["model"] | {f"{name}/{key}": value for name in states for key, value in states[name].items()}
    actual = everything(model, optimizer)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        if "/" in name:  # the file has bytes
            parameter = model.get_parameter(name.split("/")[0])
            expected[name] = from_bytes(parameter.detach(), expected[name], value.dtype)
    assert actual["blocks.0.1.weight/exp_avg_fp8"].dtype == torch.float8_e4m3fn
    for name in expected:
        assert same(expected[name], actual[name]), name


@pytest.mark.thorough
@pytest.mark.parametrize("worlds", [(1, 4), pytest.param((4, 2, 1, 3), marks=pytest.mark.slow)], ids=str)
def test_checkpoints_go_to_any_number_of_ranks(gloo, tmp_path, worlds):
    """Saved by the first number, loaded by the others: the same bits, and the same bits two steps later."""
    gloo.run(save_job, worlds[0], str(tmp_path))
    for world in worlds[1:]:
        gloo.run(load_job, world, str(tmp_path), world % 2 == 0)


@pytest.mark.thorough
@on_ranks(3)
def test_whole_states_are_sharded():
    """What one process's optimizer saved: a rank takes its rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for dtype in (torch.bfloat16, torch.float32):
        whole, sharded = pair(dtype, mesh)
        step(whole[1], whole[0], 0)
        step(sharded[1], sharded[0], 5)
        sharded[1].load_state_dict(whole[1].state_dict())
        for parameter, value in zip(sharded[0].parameters(), whole[0].parameters(), strict=True):
            parameter.data.copy_(distribute_tensor(value.detach(), mesh, [Shard(0)]))
        assert_same(whole, sharded)
        step(whole[1], whole[0], 1)
        step(sharded[1], sharded[0], 1)
        assert_same(whole, sharded)


@on_ranks(2)
def test_full_state_dicts(tmp_path):
    """Whole states gathered over Gloo, as Lightning and others save them, loaded by all ranks or from the first."""
    model, optimizer = trained()
    some_steps(model, optimizer, 0, 2)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save(states, tmp_path / "full.pt")
    dist.barrier()
    some_steps(model, optimizer, 2, 2)
    expected = everything(model, optimizer)
    for broadcast in (False, True):
        twin, other = trained(seed=1)
        reads = not broadcast or dist.get_rank() == 0
        saved = torch.load(tmp_path / "full.pt", weights_only=True) if reads else ({}, {})
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(twin, saved[0], options=options)
        set_optimizer_state_dict(twin, other, saved[1], options=options)
        some_steps(twin, other, 2, 2)
        for name, value in everything(twin, other).items():
            assert same(value, expected[name]), (broadcast, name)


@on_ranks(4)
def test_states_of_other_shards_are_refused():
    """A rank's own `state_dict` through a file, and one of other shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    _, (model, optimizer) = pair(torch.bfloat16, mesh["dp_shard"])
    step(optimizer, model, 0)
    saved = saved_and_loaded(optimizer.state_dict())
    twin = AdamW(model.parameters(), **SETTINGS)
    twin.load_state_dict(saved)
    assert_same((model, optimizer), (model, twin))
    wide = fully_shard(Weights(torch.bfloat16), mesh=init_device_mesh("cpu", (4,)))
    other = AdamW(wide.parameters(), **SETTINGS)
    plain_model = Weights(torch.bfloat16)
    one = AdamW(plain_model.parameters(), **SETTINGS)
    for target in (other, one):
        message = r"is sharded over other ranks: this rank has \[20, 200\] of exp_avg_fp8.*checkpoint, which reshards"
        with pytest.raises(ValueError, match=message):
            target.load_state_dict(saved)
        assert not target.state


@on_ranks(3)
def test_set_masters():
    """Exact values of a float32 checkpoint, whole or sharded."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for master in ("remainder", "fp32"):
        whole, by_whole = pair(torch.bfloat16, mesh, master=master)
        _, by_shard = pair(torch.bfloat16, mesh, master=master)
        exact = [randn(*shape, seed=50 + i) for i, shape in enumerate(SHAPES)]
        for model, optimizer in (whole, by_whole):
            optimizer.set_masters(dict(zip(model.parameters(), exact, strict=True)))
        placed = [distribute_tensor(value, mesh, [Shard(0)]) for value in exact]
        by_shard[1].set_masters(dict(zip(by_shard[0].parameters(), placed, strict=True)))
        assert_same(whole, by_whole)
        assert_same(whole, by_shard)
