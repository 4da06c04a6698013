"""Stages with FP8 messages under every schedule of torch, beside one process and torch's own stages.

And what converted layers do inside of them: state, weight casts, checkpointing, FP8 activations, FSDP2.
"""

import math
import os
import re
import time
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from pipelines import MICROS, SCHEDULES, SINGLE, Pipeline, V, batch, converted, difference, loss_fn, one_process, train
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from training import VOCABULARY, WIDTH

import octavo
from collective_recorder import CollectiveRecorder
from octavo.nn import accumulating, weights
from octavo.nn.equalized import equalized_layers, equalizer_of
from octavo.parallel import PipelineStage
from octavo.runtime import torch_compat
from processes import Failed, on_ranks
from releases import requires_torch
from support.dispatch_modes import Passing
from tensors import same

pytestmark = [pytest.mark.dist, requires_torch("2.13", "older stages exchange no metadata")]

BLOCKS = 4
MESSAGES_BEFORE = {name: (2,) if name in SINGLE else (1, 3) if name in V else (1, 2, 3) for name in SCHEDULES}
"""Blocks whose input comes from another of two ranks."""


def last(results):
    (result,) = [result for result in results if result]
    return result


def train_job(name, steps, recipe="rowwise", cls=PipelineStage, dtype=torch.bfloat16, options=None, **model):
    return train(Pipeline(name, converted(recipe, blocks=BLOCKS, dtype=dtype, **model), cls, **(options or {})), steps)


SOME_FIRST = [name if name == "1F1B" else pytest.param(name, marks=pytest.mark.slow) for name in SCHEDULES]
"""All schedules: the first in `make test-all`, all in `make test-slow`."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", SOME_FIRST)
def test_plain_messages_change_nothing(gloo, name):
    """As torch's stages bit for bit, and as one process, but for the order in which looped BFS adds gradients up."""
    own = last(gloo.run(train_job, 2, name, 5, options={"fp8_comm": False}))
    assert own == last(gloo.run(train_job, 2, name, 5, cls=pipelining.PipelineStage))
    expected = one_process(5, blocks=BLOCKS, dtype=torch.bfloat16)
    assert difference(own, expected) <= (1e-3 if name == "LoopedBFS" else 0)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SOME_FIRST)
def test_fp8_messages_round_once_per_boundary(gloo, name):
    """20 losses within 2e-3 of one process, and those of one process that rounds at the boundaries."""
    settings = {"blocks": BLOCKS, "dtype": torch.bfloat16}
    losses = last(gloo.run(train_job, 2, name, 20))
    assert difference(losses, one_process(20, **settings)) <= 2e-3
    if name == "LoopedBFS":  # it adds gradients up in another order, which sums in bf16 show
        settings["dtype"] = torch.float32
        losses = last(gloo.run(train_job, 2, name, 20, dtype=torch.float32))
    same = one_process(20, boundaries=MESSAGES_BEFORE[name], **settings)
    assert difference(losses, same) <= (1e-3 if name == "LoopedBFS" else 0)


@pytest.mark.thorough
@pytest.mark.parametrize("spec", ["e5m2/1x64", "e4m3/tensor"])
def test_specs_and_widths(gloo, spec):
    """A width without whole groups: a row of the message is a token."""
    losses = last(gloo.run(train_job, 2, "1F1B", 2, dtype=torch.float32, options={"spec": spec}, width=72))
    assert losses == one_process(2, blocks=BLOCKS, boundaries=(2,), spec=spec, width=72)


def traffic_job(name, width, fp8_comm):
    pipeline = Pipeline(name, converted(blocks=BLOCKS, dtype=torch.bfloat16, width=width), fp8_comm=fp8_comm)
    pipeline.step(batch(0))
    with CollectiveRecorder() as tap:
        pipeline.step(batch(1))
    assert {call.name for call in tap.calls} == {"send"}
    return [(str(call.dtype), call.bytes) for call in tap.calls]


@pytest.mark.thorough
@pytest.mark.parametrize("name", SOME_FIRST)
def test_messages_are_few_and_small(gloo, name):
    """One for each micro-batch, boundary between ranks and direction, of 0.52 × bf16 at most."""
    count = 2 * MICROS * len(MESSAGES_BEFORE[name])
    for width in (128, 384):
        plain, fp8 = ([*chain(*gloo.run(traffic_job, 2, name, width, on))] for on in (False, True))
        assert len(plain) == len(fp8) == count
        assert {dtype for dtype, _ in plain} == {"torch.bfloat16"} and {dtype for dtype, _ in fp8} == {"torch.uint8"}
        assert sum(size for _, size in fp8) <= 0.52 * sum(size for _, size in plain)


def products_job(name, activations="bf16"):
    pipeline = Pipeline(name, converted(blocks=BLOCKS, activations=activations))
    pipeline.step(batch(0))
    with Passing() as mode:
        pipeline.step(batch(1))
    return mode.seen.count(torch.ops.octavo.scaled_mm.default)


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_zero_bubble_multiplies_no_more(gloo, activations):
    """Input and weight gradients at different times: the products of 1F1B, on each rank."""
    counts = {name: gloo.run(products_job, 2, name, activations) for name in SCHEDULES}
    products = 3 * 2 * BLOCKS * MICROS
    for name in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble"):
        assert counts[name] == [products // 2] * 2, name
    assert {sum(count) for count in counts.values()} == {products}


class Sender(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, ids):
        s = self.scale
        return (
            x * s, (x * s).bfloat16(), (x * s).half(), ids, ids > 2,
            torch.where(ids > 2, 0.0, -torch.inf), (x * s).double(), (x * s).sum(), (x * s).flatten(),
        )  # fmt: skip


class Receiver(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = []

    def forward(self, *inputs):
        self.inputs.append(inputs)
        return sum(x.float().square().sum() for x in inputs if x.requires_grad or x.dtype == torch.float64).view(1)


def payload_job(shape, call):
    """What arrives, as (sent, received) of each output in each micro-batch."""
    x = torch.randn(shape)
    ids = torch.arange(math.prod(shape[:-1])).view(shape[:-1]) % 7
    rank = dist.get_rank()
    part = Sender() if rank == 0 else Receiver()
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=lambda y, _: y.sum())
    getattr(schedule, call)(*((x, ids) if rank == 0 else ()), **({"target": torch.zeros(2)} if rank else {}))
    if rank == 0:
        return part.scale.grad
    with torch.no_grad():
        sent = [Sender()(*chunk) for chunk in zip(x.chunk(2), ids.chunk(2), strict=True)]
    pairs = [zip(*outputs, strict=True) for outputs in zip(sent, part.inputs[-2:], strict=True)]
    return [[(a, b.detach(), b.requires_grad) for a, b in outputs] for outputs in pairs]


def assert_within_bound(received, sent):
    """Compare with the bound of `octavo.comm.encoding` in any format, and the rounding of the result to bf16."""
    size = sent.double().abs()
    largest = size.amax(-1, keepdim=True) if sent.numel() else size
    bound = torch.maximum(size / 16, largest / 504) + 2**-8 * size
    assert ((received == sent) | ((received.double() - sent.double()).abs() <= bound)).all()


DIFFERENTIABLE = (True, True, True, False, False, False, True, True, True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "call"),
    [
        pytest.param((4, 3, 130), "step", marks=pytest.mark.slow), ((4, 3, 130), "eval"),
        *((shape, "step") for shape in ((4, 1, 1), (2, 5, 128), (4, 0, 16), (4, 3, 2, 40))),
    ],
)  # fmt: skip
def test_payloads(gloo, shape, call):
    """Tensors of two and more dimensions that require a gradient travel in FP8, others exactly, all in evaluation."""
    gradient, micro_batches = gloo.run(payload_job, 2, shape, call)
    assert call == "eval" or gradient.isfinite()
    for outputs in micro_batches:
        for i, (sent, received, requires_grad) in enumerate(outputs):
            expected = (sent.dtype, sent.shape, call == "step" and DIFFERENTIABLE[i])
            assert (received.dtype, received.shape, requires_grad) == expected
            if call == "step" and i < 3:
                assert shape != (4, 3, 130) or not torch.equal(received, sent)
                assert_within_bound(received, sent)
            else:
                assert torch.equal(received, sent)


@pytest.mark.thorough
@pytest.mark.parametrize("value", [math.nan, -math.inf])
@on_ranks(2)
def test_nonfinite_values_arrive_as_such(value):
    """In one token of what stage 0 sends they reach one group of it, in the gradient that stage 1 sends the weights."""
    rank, x = dist.get_rank(), torch.randn(2, 3, 256)
    mask = torch.zeros(1, 3, 256, dtype=torch.bool)
    mask[0, 1, 5] = True

    def spoil_gradient(module, args):
        x = args[0] * 1.0
        x.register_hook(lambda g: torch.where(mask, value, g))
        return (x,)

    for in_backward in (False, True):
        part = octavo.convert(nn.Linear(256, 256), verbose=False) if rank == 0 else Receiver()
        if rank == 0 and not in_backward:
            part.register_forward_hook(lambda module, args, y: torch.where(mask, value, y))
        if rank == 1 and in_backward:
            part.register_forward_pre_hook(spoil_gradient)
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=lambda y, _: y.sum())
        schedule.step(*((x,) if rank == 0 else ()), **({"target": torch.zeros(2)} if rank else {}))
        if rank == 0 and in_backward:
            assert not part.weight.grad.isfinite().all()
        if rank == 1 and not in_backward:
            bad = ~part.inputs[-1][0].detach().isfinite()
            assert bad.sum() == 128 and bad[0, 1].any()


def killed_job():
    pipeline = Pipeline("1F1B", converted(blocks=BLOCKS))
    pipeline.step(batch(0))
    if dist.get_rank() == 1:
        calls = []
        pipeline.parts[0].register_forward_hook(lambda *_: os._exit(1) if calls else calls.append(1))
    start = time.monotonic()
    try:
        pipeline.step(batch(1))
    except RuntimeError as error:
        raise AssertionError(f"raised after {time.monotonic() - start:.0f} s: {error}") from error


@pytest.mark.thorough
def test_the_others_notice_a_killed_rank(gloo):
    with pytest.raises(Failed, match=r"rank 0: (.|\n)*raised after \d s(.|\n)*rank 1: its process died"):
        gloo.run(killed_job, 2)


def step_of(schedule, *stages, of, micros=4):
    """A step of linear stages with these numbers on this rank, of so many."""
    own = [PipelineStage(nn.Linear(8, 8), index, of, torch.device("cpu")) for index in stages]
    own = own if len(own) > 1 else own[0]
    getattr(pipelining, f"Schedule{schedule}")(own, micros, loss_fn=nn.functional.mse_loss).step(torch.ones(4, 8))


def pipeline_step(name="1F1B", recipe="rowwise", shared=False, **options):
    model = converted(recipe, blocks=BLOCKS)
    if shared:
        model.head.weight = model.embed.weight
    Pipeline(name, model, **options).step(batch(0))


MISTAKES = {
    "equal in one pipeline: rank 0: [(2, 'e4m3/row')]; rank 1: [(2, 'e4m3/1x128')]":
        lambda rank: pipeline_step(spec=("e4m3/row", "e4m3/1x128")[rank]),
    "rank 0: [(2, 'fp8/1x128')]; rank 1: [(2, 'no FP8')]": lambda rank: pipeline_step(fp8_comm=rank == 0),
    "ranks hold the stages [[0, 2], [1, 3]], but the schedule expects [[0, 3], [1, 2]]. V sched":
        lambda rank: step_of("ZBVZeroBubble", rank, rank + 2, of=4),
    "ranks hold the stages [[0], [1]], but the schedule expects [[0, 2], [1, 3]]":
        lambda rank: step_of("1F1B", rank, of=4),
    "rank 0 of the pipeline: stages 0 and 3 share a parameter (embed.weight, head.weight)":
        lambda rank: pipeline_step("ZBVZeroBubble", shared=True),
    "blocks.0.up of stage 0 has recipe 'tensorwise', whose scales per tensor":
        lambda rank: pipeline_step(recipe="tensorwise"),
    "Number of microbatches (1) must be greater than": lambda rank: pipeline_step(micros=1),
    "at least as many microbatches as stages, but got 3 microbatches and 4 stages":
        lambda rank: pipeline_step("DualPipeV", micros=3),
    "requires exactly 2 stages per rank, but got 3":
        lambda rank: step_of("ZBVZeroBubble", *(3 * rank + i for i in range(3)), of=6),
}  # fmt: skip


@pytest.mark.thorough
@on_ranks(2)
def test_mistakes_raise_on_all_ranks():
    """At the first step or, where torch checks, when the schedule is made."""
    for message, mistake in MISTAKES.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            mistake(dist.get_rank())


def test_an_unknown_spec():
    with pytest.raises(ValueError, match="scales of a message are by row"):
        PipelineStage(nn.Linear(8, 8), 0, 1, torch.device("cpu"), spec="e4m3/128x128")


def test_older_torch_is_refused_by_name(monkeypatch):
    assert torch_compat.missing_in_pipelining() == []
    monkeypatch.setattr(torch_compat.import_module("torch.distributed.pipelining._utils"), "_StageMeta", None)
    monkeypatch.delattr("torch.distributed.pipelining._utils._StageMeta")
    with pytest.raises(RuntimeError, match="needs torch 2.13: .* lacks _StageMeta"):
        PipelineStage(nn.Linear(8, 8), 0, 1, torch.device("cpu"))


@pytest.mark.thorough
@on_ranks(2, timeout=20.0)
def test_micro_batches_of_another_size_raise_where_they_would_be_sent():
    rank = dist.get_rank()
    stage = PipelineStage(nn.Linear(128, 128), rank, 2, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)

    def step(x):
        schedule.step(*([x] if rank == 0 else []), target=x if rank == 1 else None)

    step(torch.randn(8, 128))
    # The receiver's connection breaks, or times out.
    message = r"micro-batch 3 sends \[\[1, 128\]\], but its receiver expects \[\[2, 128\]\]"
    with pytest.raises(RuntimeError) if rank else pytest.raises(ValueError, match=message):
        step(torch.randn(7, 128))


# --- what converted layers do inside of stages ---


def equalized_losses(static, checkpointing):
    """Losses, channel scales and passes of equalized layers, with metadata that torch infers or that is given."""
    rank = dist.get_rank()
    options = {}
    if static:
        ids, hidden = torch.zeros(8, 8, dtype=torch.long), torch.zeros(8, 8, WIDTH, requires_grad=True)
        logits = torch.zeros(8, 8, VOCABULARY, requires_grad=True)
        options = {"input_args": hidden if rank else ids, "output_args": logits if rank else hidden}
    model = converted("rowwise_equalized", blocks=BLOCKS, checkpointing=checkpointing)
    for name, parameter in model.named_parameters():
        if name.endswith("up.weight"):
            parameter.data[:, 3] *= 1e4  # something to equalize
    pipeline = Pipeline("1F1B", model, **options)
    losses = train(pipeline, 4)
    equalizers = [equalizer_of(layer) for _, layer in equalized_layers(pipeline.parts)]
    return losses, [e.passes for e in equalizers], [e.scales.factor for e in equalizers]


@pytest.mark.thorough
@pytest.mark.parametrize("checkpointing", [False, True])
@on_ranks(2)
def test_inferring_metadata_measures_nothing(checkpointing):
    inferred, given = (equalized_losses(static, checkpointing) for static in (False, True))
    assert same(inferred, given) and any((factor != 1).any() for factor in inferred[2])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("ZBVZeroBubble", "DualPipeV"))) for name in SCHEDULES],
)
@on_ranks(2)
def test_weights_are_quantized_once_a_step(name):
    """Once for all micro-batches, and a second time by the check at the end of `accumulating`; the same losses."""
    counts, casts, original = [], [], weights._cast
    pipeline = Pipeline(name, converted(keep_weights=True, blocks=BLOCKS))

    def around():
        counts.append(len(casts))
        return accumulating(pipeline.parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_cast", lambda *arguments: casts.append(1) or original(*arguments))
        losses = train(pipeline, 3, around=around)
    assert losses == train(Pipeline(name, converted(blocks=BLOCKS)), 3)
    assert [*counts, len(casts)] == [2 * BLOCKS * step for step in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
@pytest.mark.parametrize("name", ["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
@on_ranks(2)
def test_checkpointing_and_fp8_activations(name, activations, checkpointing):
    options = {"activations": activations, "checkpointing": checkpointing}
    model = converted(blocks=BLOCKS, **options)
    for tokens in batch(0).chunk(MICROS):
        loss_fn(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    pipeline = Pipeline(name, converted(blocks=BLOCKS, **options), fp8_comm=False)
    pipeline.step(batch(0))
    own = {id(p) for p in pipeline.parts.parameters()}
    expected = dict(model.named_parameters())
    for key, parameter in pipeline.model.named_parameters():
        assert id(parameter) not in own or torch.equal(parameter.grad, expected[key].grad / MICROS), key


@pytest.mark.thorough
@on_ranks(2)
def test_a_frozen_stage_sends_exact_activations():
    """Nothing in the first stage requires a gradient."""
    model = converted(blocks=BLOCKS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("blocks.3", "head")))
    pipeline = Pipeline("1F1B", model)
    losses = pipeline.step(batch(0))
    assert any(p.grad is not None for p in pipeline.parts.parameters()) == pipeline.last
    assert not pipeline.last or sum(losses) / MICROS == one_process(1, blocks=BLOCKS)[0]


def fsdp_job(name, comm, reshard, steps=4):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))

    def shard(part):
        return octavo.parallelize(part, mesh["dp_shard"], fp8_comm=comm, reshard_after_forward=reshard)

    return train(Pipeline(name, converted(blocks=BLOCKS), wrap=shard, group=mesh.get_group("pp")), steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1F1B", "InterleavedZeroBubble", "DualPipeV"])
def test_shards_inside_stages(gloo, name):
    """[pp, dp_shard] of four ranks, both data-parallel ranks with the same batch: as one process that rounds."""
    expected = one_process(4, blocks=BLOCKS, boundaries=MESSAGES_BEFORE[name])
    for comm, bound in (("gather", 0.0), ("on", 1e-3)):
        first, second = (losses for losses in gloo.run(fsdp_job, 4, name, comm, name == "1F1B") if losses)
        assert first == second and difference(first, expected) <= bound


@pytest.mark.thorough
def test_zero_bubble_with_freed_weights_is_refused(gloo):
    """torch would drop gradients without an error."""
    with pytest.raises(Failed, match="zero-bubble schedules lose the gradients of weights that FSDP2 frees"):
        gloo.run(fsdp_job, 4, "InterleavedZeroBubble", "gather", True, 1)
