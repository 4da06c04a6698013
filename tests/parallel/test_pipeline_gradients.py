"""Gradients of every parameter under every layout: at most 1.5 dB worse than one process in FP8, both against fp32."""

from functools import cache

import pytest
import torch
from pipelines import MICROS, Pipeline, batch, converted, loss_fn
from test_tensor_parallel_plan import model_of as plan_model
from training import gradients_of, make

import octavo
from octavo.numerics import sqnr
from octavo.train.config.sections import ParallelConfig
from octavo.train.layout import distribute
from releases import requires_torch

pytestmark = [pytest.mark.dist, requires_torch("2.13", "older stages exchange no metadata")]
WIDER = {"num_hidden_layers": 4, "head_dim": 64, "attention_bias": True, "mlp_bias": True}
OUTLIERS = [5, 50, 100]
LOST = 1.5
"""Decibels that a gradient may lose."""


def merged(results):
    return {name: gradient for of_rank in results for name, gradient in of_rank.items()}


def lost(exact, one, ours):
    """Decibels that the gradient of each parameter loses against one process; `pytest -s` prints the worst."""
    assert ours.keys() == exact.keys()
    worse = {name: sqnr(reference, one[name]) - sqnr(reference, ours[name]) for name, reference in exact.items()}
    name = max(worse, key=worse.__getitem__)
    print(f"{worse[name]:.2f} dB lost by {name}, {sqnr(exact[name], ours[name]):.1f} dB")
    return worse


# --- a model of Transformers, distributed as the trainer does ---


def model_of(fp8, experts=False, outliers=None):
    """A Llama; a Mixtral of this shape, whose linear layers have no bias, with `experts`.

    With `outliers` three channels of 128 are 300 times the others: those of the `"residual"` stream, or of what each
    block's values and experts `"send"`.
    """
    model = plan_model("mixtral" if experts else "llama", fp8=False, chunked=False, **WIDER)
    if outliers == "residual":
        model.get_input_embeddings().weight.data[:, OUTLIERS] *= 300
    elif outliers:
        for block in model.model.layers:
            if experts:
                block.mlp.experts.down_proj.data[:, OUTLIERS] *= 300
            else:
                block.self_attn.v_proj.weight.data[OUTLIERS] *= 300
    return octavo.convert(model, verbose=False) if fp8 else model


def tokens_of(step):
    tokens = torch.randint(97, (8, 33), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def ranks_job(parallel, outliers=None):
    model = model_of(True, "ep" in parallel, outliers)
    layout = distribute(model, ParallelConfig(**parallel), torch.device("cpu"), fp8=True, micro_batches=MICROS)

    def backward(step):
        inputs, targets = map(layout.own_rows, tokens_of(step))
        labels = layout.own_labels(targets)
        if layout.pipeline is not None:
            layout.pipeline.step(inputs, labels, 1 / (MICROS * layout.loss_parts))
        else:
            inputs = layout.own_tokens(inputs)
            positions = layout.positions(inputs)
            loss = layout.forward(input_ids=inputs, labels=labels, shift_labels=labels, **positions).loss
            (loss / layout.loss_parts).backward()
        layout.sum_partial({name: p.grad for name, p in model.named_parameters()})

    return gradients_of(model, backward, 8)


@cache
def alone(fp8, experts=False, outliers=None):
    model = model_of(fp8, experts, outliers)

    def backward(step):
        for inputs, targets in zip(*(part.chunk(MICROS) for part in tokens_of(step)), strict=True):
            (model(input_ids=inputs, labels=targets, shift_labels=targets).loss / MICROS).backward()

    return gradients_of(model, backward, 8)


SLOW_LAYOUTS = [
    (2, {"ep": 2}), (2, {"pp": 2}), (2, {"tp": 2}), (2, {"tp": 2, "fp8_comm": "on"}),
    (2, {"tp": 2, "sequence_parallel": False}), (4, {"tp": 2, "dp_shard": 2}), (4, {"pp": 4}), (2, {"cp": 2}),
    (4, {"ep": 2}),
]  # fmt: skip
LAYOUTS = [(4, {"pp": 2, "tp": 2}), *(pytest.param(*layout, marks=pytest.mark.slow) for layout in SLOW_LAYOUTS)]


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "parallel"), LAYOUTS, ids=str)
def test_every_gradient_is_as_good_as_that_of_one_process(gloo, ranks, parallel):
    gradients, experts = merged(gloo.run(ranks_job, ranks, parallel)), "ep" in parallel
    worse = lost(alone(False, experts), alone(True, experts), gradients)
    assert max(worse.values()) <= LOST, worse


def lost_to_outliers(gloo, parallel, outliers="residual"):
    """Of each gradient that loses more than 1.5 dB, what it loses and what it has; `pytest -s` prints them."""
    exact, one = (alone(fp8, "ep" in parallel, outliers) for fp8 in (False, True))
    gradients = merged(gloo.run(ranks_job, 2, parallel, outliers))
    worse = lost(exact, one, gradients)
    losing = {name: (worse[name], sqnr(exact[name], gradients[name])) for name in worse if worse[name] > LOST}
    print(len(losing), "of", len(worse), "lose more:", {name: f"{a:.1f} to {b:.1f}" for name, (a, b) in losing.items()})
    return losing


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"pp": 2}, {"tp": 2}, {"tp": 2, "fp8_comm": "on"}], ids=str)
def test_groups_with_outliers_are_as_accurate_as_e4m3(gloo, parallel):
    """Groups of 128 that have an outlier channel travel in e4m3, of 32 dB. What loses more than 1.5 dB keeps that, but
    for the weight of one norm, whose loss (2.5 dB, from 22.1) is held here, not aimed at.
    """
    losing = lost_to_outliers(gloo, parallel)
    below = {name: decibels for name, (decibels, left) in losing.items() if left < 32}
    assert len(below) <= 1 and all("norm" in name and decibels < 3 for name, decibels in below.items()), below


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "outliers", "limit"),
    [({"cp": 2}, "residual", 1.6), ({"cp": 2}, "sent", 3.5), ({"ep": 2}, "residual", LOST), ({"ep": 2}, "sent", LOST)],
    ids=str,
)
def test_outliers_cost_attention_and_experts_little(gloo, parallel, outliers, limit):
    """Little where the residual stream has outlier channels: q, k, v and what experts return do not (1.57 dB in one
    norm's weight). Where values have them, Ulysses loses more: 3.1 dB of 14.7, in q of the first block. Held, not aimed
    at.
    """
    losing = lost_to_outliers(gloo, parallel, outliers)
    assert all(decibels <= limit for decibels, _ in losing.values()), losing


# --- what no FP8 product rounds: embedding, last norm and head of a model of a few small blocks ---


def stages_job():
    pipeline = Pipeline("1F1B", converted(blocks=4, hidden=256))
    names = {parameter: name for name, parameter in pipeline.model.named_parameters()}
    own = gradients_of(pipeline.parts, lambda step: pipeline.step(batch(step)), 16)
    return {names[p]: own[name] for name, p in pipeline.parts.named_parameters()}


def blocks_alone(recipe):
    model = make(recipe, blocks=4, hidden=256)

    def backward(step):
        for tokens in batch(step).chunk(MICROS):
            (loss_fn(model(tokens[:, :-1]), tokens[:, 1:]) / MICROS).backward()

    return gradients_of(model, backward, 16)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_messages_lose_little_of_what_one_process_computes_almost_exactly(gloo, ranks):
    """Up to 37 dB on one process, in the last norm; each boundary adds the error of two messages."""
    gradients = merged(gloo.run(stages_job, ranks))
    worse = lost(blocks_alone(None), blocks_alone("rowwise"), gradients)
    assert max(worse.values()) <= LOST, worse
