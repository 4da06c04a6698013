"""The front door: meshes, settings, and what is refused, on every rank at once."""

import os
import re
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from training import loss_of, make, share, train

import octavo
from collective_recorder import CollectiveRecorder
from octavo.kernels.adamw import ADAMW, CASE
from octavo.kernels.adamw.reference import step_all
from octavo.kernels.registry import Backend
from octavo.optim import AdamW
from octavo.parallel import Parallel, parallelize
from octavo.parallel.fsdp import parameters_in_fp8
from processes import on_ranks

pytestmark = pytest.mark.dist


def refused(message, model, *arguments, kind=ValueError, **options):
    with pytest.raises(kind, match=re.escape(message)):
        parallelize(model, *arguments, **options)


def mesh_of(*shape, **options):
    return init_device_mesh("cpu", shape, **options)


# FSDP1 by name: it asks for an accelerator, which is not here.
Old = type("FullyShardedDataParallel", (nn.Module,), {})


@on_ranks(2)
def test_mistakes_are_named():
    refused("does not equal the world size 2: take dp_replicate from [1, 2]", make(), Parallel(dp_shard=3))
    refused("parallel.dp_replicate = 4 × parallel.dp_shard = -1", make(), Parallel(dp_replicate=4))
    refused("got dimensions ('tp',)", make(), mesh_of(2, mesh_dim_names=("tp",)))
    refused("a two-dimensional mesh needs names", make(), mesh_of(1, 2))
    refused("takes a mesh [dp_shard]", make(), mesh_of(1, 1, 2))
    refused("fp8_comm is 'auto', 'on', 'gather' or 'off'; got 'fp8'", make(), fp8_comm="fp8")
    no_shards = "cpu_offload needs shards, and this mesh has copies only: add a dp_shard dimension"
    refused(no_shards, make(), Parallel(dp_replicate=2), cpu_offload=True)
    refused("needs shards", make(), Parallel(dp_replicate=2), dtype=torch.bfloat16)
    for name, dtype in (("dtype", torch.int8), ("dtype", torch.float8_e4m3fn), ("reduce_dtype", "bf16")):
        refused(f"{name} is a floating-point", model := make(), kind=TypeError, **{name: dtype})
        assert not isinstance(model, FSDPModule)
    for recipe in ("blockwise", "mxfp8"):
        for comm in ("on", "gather"):
            model = make(recipe, hidden=128)
            refused(f"fp8_comm={comm!r} with recipe {recipe}", model, fp8_comm=comm)
            assert not isinstance(model, FSDPModule)
    sharded = parallelize(make(), fp8_comm="off")
    refused("already: call parallelize once, on the whole model", sharded)
    copied = parallelize(make(), Parallel(dp_replicate=2), fp8_comm="off")
    refused("the model is a DistributedDataParallel already", copied)
    inside = make()
    fully_shard(inside.blocks[0])
    refused("blocks.0 is a FSDPBlock already", inside)
    refused("layers of this model are converted already", make(), precision=octavo.Precision.level("fp8"))
    refused("0 is a FullyShardedDataParallel (FSDP1)", nn.Sequential(Old()), fp8_comm="off")
    # Nothing hangs afterwards.
    dist.barrier()
    assert mesh_of(1, 2, mesh_dim_names=("dp_replicate", "dp_shard")).shape == (1, 2)


@on_ranks(2)
def test_what_one_rank_does_wrong_stops_all():
    odd = dist.get_rank() == 1
    recipes = "rank 1 and rank 0 call parallelize with different recipes of layers: all ranks must agree"
    refused(recipes, make("tensorwise" if odd else "rowwise"))
    refused("different recipes of layers", make(None if odd else "rowwise"))
    refused("different settings", make(), fp8_comm="off" if odd else "on")
    refused("different settings", make(), dtype=torch.bfloat16 if odd else None)
    refused("different parameters", make(hidden=64 if odd else 128))
    refused("different parameters", make(frozen=("embed",) if odd else ()))
    message = "parallelize fails on rank 0: parallel." if odd else "parallel.dp_shard = 5 does not equal"
    refused(message, make(), Parallel(dp_replicate=1, dp_shard=2 if odd else 5))


class Odd(nn.Module):
    """A module that fails where nothing expects it."""

    def named_parameters(self, *args, **options):
        raise KeyError("odd")


@on_ranks(2, timeout=30.0)
def test_no_rank_waits_for_one_that_made_a_mistake():
    """Mistakes of rank 1 that leave nothing to compare: rank 0 does not wait for it."""
    odd, mesh = dist.get_rank() == 1, mesh_of(2, mesh_dim_names=("dp_shard",))
    for function in (
        parallelize, octavo.parallel.expert_parallel, octavo.parallel.context_parallel, octavo.parallel.tensor_parallel
    ):  # fmt: skip
        mistakes = [((None, mesh), TypeError), ((make(), "cpu"), TypeError), ((Odd(), mesh), Exception)]
        for mistake, kind in mistakes:
            with pytest.raises(kind if odd else ValueError) as error:
                function(*(mistake if odd else (make(), mesh)))
            assert odd or function is not parallelize or "parallelize fails on rank 1: " in str(error.value)
    refused("different settings", make(), mesh if odd else Parallel(dp_replicate=2))


@on_ranks(3)
def test_a_model_that_one_rank_converted_is_told_on_every_rank():
    precision = octavo.Precision.level("fp8")
    model = make("rowwise" if dist.get_rank() == 1 else None)
    before = classes(model)
    message = "converted already" if dist.get_rank() == 1 else "parallelize fails on rank 1: 4 layers"
    refused(message, model, precision=precision)
    assert classes(model) == before


def classes(model):
    return [(type(m), sorted(vars(m)), [len(h) for n, h in vars(m).items() if "hooks" in n]) for m in model.modules()]


@on_ranks(2)
def test_what_stops_midway_leaves_the_model_as_it_was():
    """FSDP2 refuses the last parameter, when blocks are sharded already."""
    model, whole, tokens = make(None), make(None), torch.arange(32).view(2, 16)
    model.scalar = nn.Parameter(torch.tensor(1.0))
    before = classes(model), [(id(p), p.clone()) for p in model.parameters()]
    for _ in range(2):
        refused("scalar", model, precision=octavo.Precision.level("fp8"), fp8_comm="gather")
        assert classes(model) == before[0]
        assert all(id(p) == i and torch.equal(p, q) for p, (i, q) in zip(model.parameters(), before[1], strict=True))
    assert torch.equal(loss_of(model, tokens), loss_of(whole, tokens))
    del model.scalar
    octavo.convert(whole, verbose=False)
    parallelize(model, precision=octavo.Precision.level("fp8"), fp8_comm="gather")
    assert list(parameters_in_fp8(model)) and torch.equal(loss_of(model, tokens), loss_of(whole, tokens))


def test_without_a_process_group():
    with pytest.raises(ValueError, match="start with torchrun --nproc-per-node N"):
        parallelize(make())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dp_replicate": 0}, "dp_replicate is 1 or more"),
        ({"dp_shard": 0}, "or -1 for the rest; got 1 and 0"),
        ({"dp_shard": -2}, "got 1 and -2"),
        ({"fp8_comm": "auot"}, "got 'auot' .did you mean 'auto'"),
    ],
)
def test_settings_are_checked_when_made(settings, message):
    with pytest.raises(ValueError, match=message):
        Parallel(**settings)


def test_sizes():
    assert Parallel().sizes(6) == (1, 6)
    assert Parallel(dp_replicate=2).sizes(6) == (2, 3)
    assert Parallel(dp_replicate=6).sizes(6) == (6, 1)
    assert Parallel(dp_replicate=2, dp_shard=2).sizes(4) == (2, 2)


@on_ranks(2)
def test_ways_to_say_the_same():
    names = ("dp_replicate", "dp_shard")
    precision = octavo.Precision.level("fp8")
    ways = (
        lambda: parallelize(make(), fp8_comm="gather"),
        lambda: parallelize(make(), Parallel(fp8_comm="gather")),
        lambda: parallelize(make(), Parallel(fp8_comm="off"), fp8_comm="gather"),
        lambda: parallelize(make(), mesh_of(2), fp8_comm="gather"),
        lambda: parallelize(make(), mesh_of(2, mesh_dim_names=("dp_shard",)), fp8_comm="gather"),
        lambda: parallelize(make(), mesh_of(1, 2, mesh_dim_names=names), fp8_comm="gather"),
        lambda: parallelize(make(None), precision=precision, fp8_comm="gather"),
    )
    losses = []
    for way in ways:
        model = way()
        assert len(list(parameters_in_fp8(model))) == 4
        losses.append(train(model, 2))
    assert all(actual == losses[0] for actual in losses)
    plain = parallelize(make(None), fp8_comm="on")
    assert not list(parameters_in_fp8(plain))
    with CollectiveRecorder() as tap:
        loss_of(plain, share(0, 0, 0)).backward()
    assert tap.named("alltoall_base_")


@on_ranks(2)
def test_auto_is_fp8_between_machines():
    """Two ranks on one machine, or on two."""
    fp8_by_machine = {}
    for here in ("2", "1", None):
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        if here is not None:
            os.environ["LOCAL_WORLD_SIZE"] = here
        model = parallelize(make())
        with CollectiveRecorder() as tap:
            loss_of(model, share(0, 0, 0)).backward()
        fp8_by_machine[here] = bool(list(parameters_in_fp8(model))), bool(tap.named("alltoall_base_"))
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    assert fp8_by_machine == {"2": (False, False), "1": (True, True), None: (False, False)}
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    model = parallelize(make("blockwise", hidden=128))  # what cannot be gathered in FP8 is not, where nobody insists
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    assert not list(parameters_in_fp8(model))
    train(model, 1)


@on_ranks(4)
def test_auto_of_several_ranks_on_each_machine():
    """Two machines of two ranks: an all-to-all would send more between them than a ring does."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    model = parallelize(make())
    beside_neighbours = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))["dp_shard"]
    of_both = parallelize(make(), beside_neighbours)
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    for each, alone in ((model, False), (of_both, True)):  # a rank of each machine
        with CollectiveRecorder() as tap:
            loss_of(each, share(0, 0, 0)).backward()
        assert list(parameters_in_fp8(each))
        assert bool(tap.named("alltoall_base_")) == alone


def other_bits(work):
    """A step that is right to a few bits, as that of Triton's kernel."""
    step_all(work)
    for state, _ in work:
        state.param.mul_(1 + 2**-20)


def job(ranks_with_triton):
    """Train replicas where only some ranks have the kernel; return the warnings, the backend and the parameters."""
    reason = None if dist.get_rank() in ranks_with_triton else "no Triton on this rank"
    triton = Backend(name="triton", run=other_bits, unsupported_reason=lambda *_: reason)
    with (
        patch.dict(ADAMW.backends, triton=triton),
        patch.dict(ADAMW._chosen, clear=True),
        patch.dict(ADAMW._probe_results, clear=True),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        model = parallelize(make(), Parallel(dp_replicate=2), fp8_comm="off")
        optimizer = AdamW(model.parameters(), lr=1e-2)
        model(torch.arange(8).view(1, 8)).float().square().mean().backward()
        optimizer.step()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        texts = [str(warning.message) for warning in caught if "AdamW" in str(warning.message)]
        return texts, ADAMW.choose(torch.device("cpu"), CASE).name, flat


def test_replicas_step_on_one_backend(gloo):
    (first, name, params), (second, other, others) = gloo.run(job, 2, (0,))
    assert name == other == "reference" and torch.equal(params, others)
    for text in (*first, *second):
        assert "rank 0 triton, rank 1 reference (triton: no Triton on this rank)" in text
    assert len(first) == len(second) == 1
    for warned, name, _ in gloo.run(job, 2, (0, 1)):
        assert not warned and name == "triton"
