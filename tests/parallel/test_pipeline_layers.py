"""What converted layers do inside pipeline stages: state, weight casts, checkpointing, FP8 activations, FSDP2."""

import pytest
import torch
import torch.distributed as dist
from pipelines import MICROS, SCHEDULES, Pipeline, batch, converted, difference, loss_fn, one_process, train
from test_pipeline import BLOCKS, MESSAGES_BEFORE, last
from torch.distributed.device_mesh import init_device_mesh
from training import VOCABULARY, WIDTH

import octavo
from octavo.nn import accumulating, weights
from octavo.nn.equalized import equalized_layers, equalizer_of
from processes import Failed
from releases import requires_torch

pytestmark = [pytest.mark.dist, requires_torch("2.13", "older stages exchange no metadata")]


def metadata_job(static, checkpointing):
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
def test_inferring_metadata_measures_nothing(gloo, checkpointing):
    inferred, given = (gloo.run(metadata_job, 2, static, checkpointing) for static in (False, True))
    for (losses, passes, scales), (same_losses, same_passes, same_scales) in zip(inferred, given, strict=True):
        assert losses == same_losses and passes == same_passes
        assert all(torch.equal(a, b) for a, b in zip(scales, same_scales, strict=True))
        assert any((factor != 1).any() for factor in scales)


def casts_job(name):
    """Losses with kept weights, and without; casts of kept weights before each step, and after the last."""
    counts, casts, original = [], [], weights._cast
    pipeline = Pipeline(name, converted(keep_weights=True, blocks=BLOCKS))

    def around():
        counts.append(len(casts))
        return accumulating(pipeline.parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_cast", lambda *arguments: casts.append(1) or original(*arguments))
        losses = train(pipeline, 3, around=around)
    plain = train(Pipeline(name, converted(blocks=BLOCKS)), 3)
    return losses, plain, [*counts, len(casts)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("ZBVZeroBubble", "DualPipeV"))) for name in SCHEDULES],
)
def test_weights_are_quantized_once_a_step(gloo, name):
    """Once for all micro-batches, and a second time by the check at the end of `accumulating`; the same losses."""
    kept, freed, counts = zip(*gloo.run(casts_job, 2, name), strict=True)
    assert counts == ([2 * BLOCKS * step for step in range(4)],) * 2
    assert last(kept) == last(freed)


def options_job(name, options):
    pipeline = Pipeline(name, converted(blocks=BLOCKS, **options), fp8_comm=False)
    losses = pipeline.step(batch(0))
    names = {id(p): key for key, p in pipeline.model.named_parameters()}
    return losses, {names[id(p)]: p.grad for p in pipeline.parts.parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
@pytest.mark.parametrize("name", ["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_checkpointing_and_fp8_activations(gloo, name, activations, checkpointing):
    options = {"activations": activations, "checkpointing": checkpointing}
    model = converted(blocks=BLOCKS, **options)
    for tokens in batch(0).chunk(MICROS):
        loss_fn(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    gradients = {}
    for _, part in gloo.run(options_job, 2, name, options):
        gradients |= part
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for key, parameter in model.named_parameters():
        assert torch.equal(gradients[key], parameter.grad / MICROS), key


def frozen_job():
    """Gradients of a model whose first stage is frozen: nothing in it requires one."""
    model = converted(blocks=BLOCKS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("blocks.3", "head")))
    pipeline = Pipeline("1F1B", model)
    losses = pipeline.step(batch(0))
    return losses, [p.grad is not None for p in pipeline.parts.parameters()]


@pytest.mark.thorough
def test_a_frozen_stage_sends_exact_activations(gloo):
    (_, first), (losses, second) = gloo.run(frozen_job, 2)
    assert not any(first) and any(second)
    assert sum(losses) / MICROS == one_process(1, blocks=BLOCKS)[0]


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
