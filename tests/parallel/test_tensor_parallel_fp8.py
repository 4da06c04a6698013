"""Octavo's own styles of tensor and sequence parallelism, with FP8 on the wire."""

import copy
import re
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from training import batch, full, gradients_of, loss_of, make, mesh_of, steps_of, tensor_parallel

import octavo
from collective_recorder import CollectiveRecorder
from octavo.numerics import sqnr
from octavo.parallel import Fp8ColwiseParallel, Fp8RowwiseParallel, clip_grad_norm_, parallelize
from processes import on_ranks
from support.refusals import refused
from tensors import same

pytestmark = pytest.mark.dist
INFINITE = float("inf")
COLUMN, ROW = Fp8ColwiseParallel, Fp8RowwiseParallel


def converted(module, recipe="rowwise"):
    return module if recipe is None else octavo.convert(module, recipe, verbose=False)


def linears(recipe="rowwise", sizes=((128, 256), (256, 128)), bias=True):
    torch.manual_seed(1)
    return converted(nn.Sequential(*(nn.Linear(k, n, bias=bias) for k, n in sizes)), recipe)


def columns_and_rows(model, **options):
    return parallelize_module(model, mesh_of(), {"0": COLUMN(**options), "1": ROW(**options)})


def part(x, dim):
    """This rank's part of a tensor; all of it without a dimension."""
    return x if dim is None else x.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def similarity(reference, actual):
    return INFINITE if torch.equal(reference, actual) else sqnr(reference, actual)


def column_results(shape, sequence_dim, recipe, **options):
    """Y, ∂X, ∂W and ∂b of one layer, beside those of one process; and what a forward and backward sent."""
    alone, ours = (linears(recipe, [(shape[-1], 256)]) for _ in range(2))
    parallelize_module(ours, mesh_of(), {"0": COLUMN(sequence_dim=sequence_dim, **options)})
    x, g = torch.randn(shape), torch.randn(*shape[:-1], 256)
    x_alone = x.clone().requires_grad_()
    y_alone = alone(x_alone)
    y_alone.backward(g)
    ours(part(x, sequence_dim))  # compares shapes of ranks once
    x_ours = part(x, sequence_dim).requires_grad_()
    with CollectiveRecorder() as recorder:
        y = ours(x_ours)
        y.backward(part(g, -1))
    w_grad, b_grad = (full(p.grad) for p in ours.parameters())
    pairs = [
        (part(y_alone, -1), y), (part(x_alone.grad, sequence_dim), x_ours.grad), (alone[0].weight.grad, w_grad),
        (alone[0].bias.grad, b_grad),
    ]  # fmt: skip
    return [similarity(*pair) for pair in pairs], recorder.calls


SHAPES = [
    ((2, 8, 128), -2), ((16, 128), -2), ((8, 2, 128), 0), ((2, 8, 128), 1), ((2, 3, 4, 128), 2), ((2, 5, 128), None),
    ((2, 0, 128), 1),
]  # fmt: skip


@on_ranks(2)
def test_a_column_computes_what_one_process_does():
    """Y and ∂W bit for bit: bytes and scales come from the ranks that have the rows."""
    for shape, sequence_dim in SHAPES:
        (y, dx, dw, db), _ = column_results(shape, sequence_dim, "rowwise", reduce="bf16")
        assert y == dw == INFINITE and min(dx, db) > 24, shape


@pytest.mark.thorough
@on_ranks(4)
def test_every_recipe_is_close_to_one_process():
    recipes = ("rowwise", "rowwise_equalized", "rowwise_hp_wgrad", "blockwise", "mxfp8", None)
    for recipe, reduce in product(recipes, ("bf16", "fp8")):
        similarities, calls = column_results((2, 8, 128), -2, recipe, reduce=reduce)
        assert min(similarities) > 24, recipe
        gathers = [call for call in calls if call.name == "_allgather_base_"]
        assert [call.dtype for call in gathers] == [torch.uint8 if recipe == "rowwise" else torch.bfloat16]
        assert (calls[-1].dtype == torch.uint8) == (reduce == "fp8" and recipe is not None)


@on_ranks(2)
def test_bytes_on_the_wire():
    """At most 0.52 of those of bf16, in each of the four exchanges of two layers."""
    sent = {}
    for wire in ("fp8", "bf16"):
        model = columns_and_rows(linears(sizes=[(384, 768), (768, 384)]), gather=wire, reduce=wire)
        x = torch.randn(2, 4, 384).bfloat16().float()
        model(x)
        with CollectiveRecorder() as recorder:
            y = model(x.requires_grad_())
            y.backward(torch.randn_like(y))
        sent[wire] = [call.bytes for call in recorder.calls]
    assert [call.name for call in recorder.calls] == ["_allgather_base_", "_reduce_scatter_base_"] * 2
    assert len(sent["fp8"]) == 4 and all(0.5 < a / b <= 0.52 for a, b in zip(*sent.values(), strict=True))


class Siblings(nn.Module):
    def __init__(self, between=None):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))
        self.between = between or (lambda x: x)

    def forward(self, x):
        x = self.norm(x)
        q = self.q(x)
        x = self.between(x)
        return self.o(q + self.k(x) * self.v(x))


BETWEEN = {"nothing": lambda x: x, "in place": lambda x: x.mul_(3.0)}


@pytest.mark.parametrize(
    ("between", "gathers", "norm"),
    [
        ("nothing", 2, False),
        pytest.param("nothing", 2, True, marks=pytest.mark.thorough, id="whose input is a DTensor"),
        pytest.param("in place", 3, False, marks=pytest.mark.thorough),
    ],
)
@on_ranks(2)
def test_layers_that_read_one_input_share_its_gather(between, norm, gathers):
    """One gather of X and one reduction of ∂X for q, k and v, besides those of the row; none of a changed X."""
    torch.manual_seed(0)
    alone = converted(Siblings(BETWEEN[between]))
    ours = copy.deepcopy(alone)
    plan = {name: COLUMN() for name in "qkv"} | {"o": ROW()}
    if norm:
        plan["norm"] = SequenceParallel()
    parallelize_module(ours, mesh_of(), plan)
    x = torch.randn(2, 8, 64)
    ours(part(x, 1))
    leaves = x.clone().requires_grad_(), part(x, 1).requires_grad_()
    y_alone = alone(leaves[0])
    y_alone.backward(torch.ones_like(y_alone))
    with CollectiveRecorder() as recorder:
        y = ours(leaves[1])
        y.backward(torch.ones_like(y))
    pairs = [(part(y_alone, 1), y), (part(leaves[0].grad, 1), leaves[1].grad)]
    for (name, expected), actual in zip(alone.named_parameters(), ours.parameters(), strict=True):
        pairs += [(expected.grad, full(actual.grad))] if norm or not name.startswith("norm") else []
    assert min(similarity(*pair) for pair in pairs) > 20
    assert len(recorder.named("_allgather_base_")) == len(recorder.named("_reduce_scatter_base_")) == gathers


def equalized_job(fsdp):
    """Losses of an equalized model that took steps under tensor parallelism before it is sharded."""
    model = make("rowwise_equalized", hidden=256)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    tensor_parallel(model, mesh["tp"], {"up": COLUMN(sequence_dim=None), "down": ROW(sequence_dim=None)}, False)
    steps_of(model, 2)
    model = parallelize(model, mesh["dp_shard"], fp8_comm=fsdp)
    return steps_of(model, 4, data=(mesh["dp_shard"].get_local_rank(), 2))[0]


@pytest.mark.thorough
def test_channel_scales_of_a_ranks_columns_are_shared_by_its_shards(gloo):
    fp8, plain = (gloo.run(equalized_job, 4, fsdp) for fsdp in ("gather", "off"))
    model = make("rowwise_equalized", hidden=256)
    steps_of(model, 2)
    expected, _ = steps_of(model, 4)
    assert fp8 == plain
    losses = [sum(pair) / 2 for pair in zip(fp8[0], fp8[2], strict=True)]
    assert max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)) < 1.5e-3


def distributed(sequence=True, fsdp=None, **options):
    """The small model under tensor parallelism, with FSDP2 over it or not, and this rank's share of the data."""
    model, world = make("rowwise", hidden=256), dist.get_world_size()
    mesh = mesh_of() if fsdp is None else init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp_shard", "tp"))
    options["sequence_dim"] = -2 if sequence else None
    tensor_parallel(model, mesh["tp"], {"up": COLUMN(**options), "down": ROW(**options)}, sequence)
    if fsdp is None:
        return model, (0, 1)
    return parallelize(model, mesh["dp_shard"], fp8_comm=fsdp), (mesh["dp_shard"].get_local_rank(), world // 2)


def train_job(sequence, fsdp, steps, options, optimizer=None):
    """Losses, gradients of the last step and parameters, and what this rank has of parameters that all ranks have."""
    model, data = distributed(sequence, fsdp, **options)
    losses, gradients = steps_of(model, steps, OPTIMIZERS[optimizer], data)
    gradients |= {f"{name} itself": full(p).clone() for name, p in model.state_dict().items()}
    copies = [p.to_local() for p in model.parameters() if getattr(p, "placements", None) == (Replicate(),)]
    return losses, gradients, copies


def small_gradients(model):
    """Gradients of the untrained model on 16 batches."""
    return gradients_of(model, lambda step: loss_of(model, batch(step)).backward(), 16)


OPTIMIZERS = {None: None, "octavo": partial(octavo.AdamW, states="fp32")}
CASES = [(True, {}), (True, {"reduce": "fp8"}), (False, {})]


@pytest.mark.thorough
@pytest.mark.parametrize(("sequence", "options"), CASES)
def test_training_follows_one_process(gloo, sequence, options):
    """Each of 20 losses within 1.5e-3, and copies of norms and biases equal on all ranks."""
    ours, theirs = gloo.run(train_job, 2, sequence, None, 20, options, "octavo")
    expected, _ = steps_of(make("rowwise", hidden=256), 20, OPTIMIZERS["octavo"])
    assert max(abs(a - b) / b for a, b in zip(ours[0], expected, strict=True)) < 1.5e-3
    assert len(ours[2]) == 6 * sequence
    assert same(ours[2], theirs[2])


@pytest.mark.thorough
@pytest.mark.parametrize(("sequence", "options"), CASES)
@on_ranks(2)
def test_every_gradient_is_as_good_as_that_of_one_process(sequence, options):
    """Of norms, biases and embeddings too: at most 1.5 dB worse than one process in FP8, both against fp32."""
    ours = small_gradients(distributed(sequence, **options)[0])
    alone, exact = (small_gradients(make(recipe, hidden=256)) for recipe in ("rowwise", None))
    assert ours.keys() == exact.keys()
    for name, reference in exact.items():
        assert sqnr(reference, ours[name]) > sqnr(reference, alone[name]) - 1.5, name


@pytest.mark.thorough
@pytest.mark.parametrize("sequence", [pytest.param(True, marks=pytest.mark.slow), False])
def test_weights_gathered_in_fp8_over_tensor_parallelism(gloo, sequence):
    """Losses, gradients and parameters of a checkpoint are bitwise those of gathers in high precision."""
    fp8, plain = (gloo.run(train_job, 4, sequence, fsdp, 3, {}) for fsdp in ("gather", "off"))
    assert same([rank[:2] for rank in plain], [rank[:2] for rank in fp8])


@pytest.mark.parametrize(
    ("world", "norm_type", "sequence", "fsdp", "mesh_count"),
    [
        pytest.param(2, 2.0, False, None, 2, id="some parameters are no DTensors"),
        pytest.param(4, INFINITE, False, "gather", 2, marks=pytest.mark.thorough),
        pytest.param(4, 1.0, True, "off", 1, marks=pytest.mark.thorough),
    ],
)
@on_ranks("world")
def test_gradients_of_several_meshes_are_clipped_together(world, norm_type, sequence, fsdp, mesh_count):
    """The norm is that of the whole gradients, each counted once, on every rank."""
    model, data = distributed(sequence, fsdp)
    tokens = batch(0).chunk(data[1])[data[0]]
    full(model(tokens[:, :-1])).square().mean().backward()
    gradients = {name: full(p.grad).clone() for name, p in model.named_parameters()}
    meshes = {getattr(p, "device_mesh", None) for p in model.parameters()}
    expected = torch.nn.utils.get_total_norm(list(gradients.values()), norm_type)
    norm = clip_grad_norm_(model.parameters(), 0.01, norm_type)
    assert len(meshes) == mesh_count and norm.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert (full(parameter.grad) - 0.01 / (expected + 1e-6) * gradients[name]).abs().max() < 1e-7, name


def refusal(layer, style, mesh=None):
    """The error of applying a style, which leaves the layer as it was."""
    weight = getattr(layer, "weight", None)
    with pytest.raises((TypeError, ValueError)) as error:
        parallelize_module(layer, mesh or mesh_of(), style)
    assert getattr(layer, "weight", None) is weight and not layer._forward_pre_hooks
    return str(error.value)


@on_ranks(2)
def test_copies_without_shards_are_refused_over_tensor_parallelism():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "dp_replicate"))
    model = linears()
    parallelize_module(model, mesh["tp"], {"0": COLUMN()})
    refused("add a dp_shard dimension of two", parallelize, model, mesh["dp_replicate"])


REFUSED = [
    ("recipe 'tensorwise' has one scale per tensor", lambda rank: (linears("tensorwise")[0], COLUMN())),
    ("heads = 3 is not divided by 2 ranks of tensor parallelism: take one of [1] ranks",
     lambda rank: (nn.Linear(64, 66), COLUMN(heads=3))),
    ("out_features = 65 is not divided by 2 ranks of tensor parallelism: take one of [1] ranks, or pad it to 66",
     lambda rank: (nn.Linear(64, 65), COLUMN())),
    ("in_features = 63 is not divided by 2 ranks", lambda rank: (nn.Linear(63, 64), ROW())),
    ("in_features = 64 is not 6 equal heads", lambda rank: (nn.Linear(64, 65), ROW(heads=6))),
    ("got Embedding: name a linear layer", lambda rank: (nn.Embedding(64, 64), ROW())),
    ("takes a mesh of one dimension",
     lambda rank: (nn.Linear(64, 64), ROW(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")))),
    ("out_features = 65 is not divided by 2 ranks", lambda rank: (nn.Linear(64, 64 if rank else 65), COLUMN())),
    ("with different settings (Fp8ColwiseParallel(", lambda rank: (nn.Linear(64, 64), COLUMN(sequence_dim=rank))),
]  # fmt: skip


@on_ranks(2)
def test_what_cannot_be_distributed_is_refused_on_every_rank():
    rank = dist.get_rank()
    for message, arguments in REFUSED:
        assert message in refusal(*arguments(rank))
    twice, down = linears(), nn.Sequential(nn.Linear(64, 64))
    parallelize_module(twice, mesh_of(), {"0": COLUMN()})
    parallelize_module(down, mesh_of(), {"0": ROW()})
    refused("this layer is distributed already", parallelize_module, twice, mesh_of(), {"0": ROW()})
    for model, x, message in (
        (twice, torch.randn(2, 3 + rank, 128), "different shapes: [[2, 3, 128], [2, 4, 128]]. Give each an equal part"),
        (twice, torch.randn(128), "sequence_dim=-2 is no dimension of tokens of an input of shape [128]"),
        (down, torch.randn(2, 5, 32), "5 tokens are not an equal part for each of 2 ranks of tensor parallelism, in "
         "dimension 1 of [2, 5, 64]: pad the sequence to 6"),
    ):  # fmt: skip
        refused(re.escape(message), model, x)


@pytest.mark.parametrize("style", [COLUMN, ROW])
def test_settings_are_checked(style):
    for options, error in (
        ({"gather": "fp9"}, "gather is 'fp8' or 'bf16'; got 'fp9'"),
        ({"reduce": "fp32"}, "reduce is 'fp8' or 'bf16'; got 'fp32'"),
        ({"reduce": "fp8", "sequence_dim": None}, "needs a sequence_dim"),
    ):
        with pytest.raises(ValueError, match=error):
            style(**options)


@on_ranks(2)
def test_a_report_says_what_layers_send():
    """Of two layers, as the recipe of one changes."""
    model, texts = linears(), []
    parallelize_module(model, mesh_of(), {"0": COLUMN(), "1": ROW(reduce="fp8")})
    for recipe in ("rowwise", "blockwise", None):
        octavo.nn.change_recipe(model, "0", recipe, reason="tried")
        texts.append(octavo.report(model)[0].reason)
        model(torch.randn(2, 4, 128, requires_grad=True)).sum().backward()
    rowwise, blockwise, plain = texts
    assert rowwise == "tried; column-parallel: X gathered in FP8, ∂X reduced in bf16"
    assert "X gathered in bf16, because recipe blockwise does not quantize X once by row" in blockwise
    assert "X gathered in bf16, because the layer is not converted" in plain
    assert octavo.report(model)[1].reason.endswith("row-parallel: Y reduced in FP8, G gathered in FP8")


def copied(model, x):
    twin = copy.deepcopy(model)
    for parameter, other in zip(twin.parameters(), model.parameters(), strict=True):
        parameter.register_hook(partial(other.__setattr__, "grad"))
    return twin(x)


WAYS = {  # to run a model, each of which must compute the same
    "checkpointed": (lambda model, x: checkpoint(model, x, use_reentrant=False), torch.bfloat16),
    "copied": (copied, torch.float32), "named": (lambda model, x: model[1](input=model[0](input=x)), torch.float16),
}  # fmt: skip


def compared_with_plain(way, dtype):
    x = part(torch.randn(2, 8, 128, generator=torch.Generator().manual_seed(0)).to(dtype), 1)
    results = []
    for run in (nn.Module.__call__, way):
        model = columns_and_rows(linears().to(dtype))
        leaf = x.clone().requires_grad_()
        y = run(model, leaf)
        y.square().sum().backward()
        results.append([y.detach(), leaf.grad, *(full(p.grad) for p in model.parameters())])
    return [similarity(*pair) for pair in zip(*results, strict=True)]


@pytest.mark.thorough
@on_ranks(2)
def test_every_way_to_run_a_model_computes_the_same():
    for name, way in WAYS.items():
        assert set(compared_with_plain(*way)) == {INFINITE}, name


@on_ranks(2)
def test_a_nan_stays_in_its_token_and_stops_every_rank():
    """A NaN in one rank's token: the losses' norm is NaN on every rank, and nobody's parameters change."""
    model = columns_and_rows(linears())
    x = torch.randn(2, 4, 128)
    if dist.get_rank() == 0:
        x[0, 0, 0] = torch.nan
    y = model(x)
    y.square().mean().backward()
    refused("non-finite", clip_grad_norm_, model.parameters(), 1.0, kind=RuntimeError, error_if_nonfinite=True)
    assert y.isnan().any(-1).sum() == (dist.get_rank() == 0)


@on_ranks(2)
def test_disabled_layers_send_no_fp8():
    alone, ours = linears(), columns_and_rows(linears())
    x = torch.randn(2, 8, 128)
    with octavo.disabled(), CollectiveRecorder() as recorder:
        y = ours(part(x, 1).requires_grad_())
        y.sum().backward()
        expected = alone(x)
    dtypes = {call.dtype for call in recorder.calls if call.name != "allgather_"}
    assert sqnr(part(expected, 1), y) > 45 and torch.bfloat16 in dtypes


@pytest.mark.thorough
@pytest.mark.parametrize("other", [COLUMN, ROW])
@on_ranks(2)
def test_layers_that_share_a_weight_share_its_parts(other):
    model = linears(sizes=((128, 128), (128, 128)), bias=False)
    model[1].weight = model[0].weight
    alone = copy.deepcopy(model)
    plan = {"0": COLUMN(sequence_dim=None), "1": other(sequence_dim=None)}
    if other is ROW:
        refused("another layer shares a parameter", parallelize_module, model, mesh_of(), plan)
        return
    parallelize_module(model, mesh_of(), plan)
    x = torch.randn(4, 128)
    (alone[0](x) * alone[1](x)).sum().backward()
    (model[0](x) * model[1](x)).sum().backward()
    assert model[0].weight is model[1].weight
    assert similarity(alone[0].weight.grad, full(model[0].weight.grad)) > 100
