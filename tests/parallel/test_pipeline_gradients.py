"""Gradients of every parameter under every layout: at most 1.5 dB worse than one process in FP8, both against fp32."""

from functools import cache

import pytest
import torch
from pipelines import MICROS, Pipeline, batch, converted, loss_fn
from torch.distributed.tensor import DTensor
from training import make

import octavo
from octavo.numerics import sqnr
from octavo.train.config.parallel_section import ParallelConfig
from octavo.train.layout import distribute
from releases import requires_torch

pytestmark = [pytest.mark.dist, requires_torch("2.13", "older stages exchange no metadata")]
LLAMA = {
    "vocab_size": 97, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "eos_token_id": 0, "attention_bias": True, "mlp_bias": True,
}  # fmt: skip
LOST = 1.5
"""Decibels that a gradient may lose."""


def gradients_of(model, backward, batches):
    """Gradients [batches, ...] of the parameters of this rank, whole: of one batch, a norm's has too few elements."""
    gradients = {}
    for step in range(batches):
        model.zero_grad()
        backward(step)
        for name, parameter in model.named_parameters():
            grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            gradients.setdefault(name, []).append(grad.clone())
    return {name: torch.stack(of_batches) for name, of_batches in gradients.items()}


def merged(results):
    """The gradients of all stages."""
    return {name: gradient for of_rank in results for name, gradient in of_rank.items()}


def lost(exact, alone, ours):
    """Decibels that the gradient of each parameter loses against one process; `pytest -s` prints the worst."""
    assert ours.keys() == exact.keys()
    worse = {name: sqnr(reference, alone[name]) - sqnr(reference, ours[name]) for name, reference in exact.items()}
    name = max(worse, key=worse.__getitem__)
    print(f"{worse[name]:.2f} dB lost by {name}, {sqnr(exact[name], ours[name]):.1f} dB")
    return worse


# --- a model of Transformers, distributed as the trainer does ---


def llama(fp8, outliers=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    if outliers:
        model.get_input_embeddings().weight.data[:, [5, 50, 100]] *= 300
    return octavo.convert(model, verbose=False) if fp8 else model


def tokens_of(step):
    tokens = torch.randint(97, (8, 33), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def llama_job(parallel, outliers=False):
    model = llama(True, outliers)
    layout = distribute(model, ParallelConfig(**parallel), torch.device("cpu"), fp8=True, micro_batches=MICROS)

    def backward(step):
        inputs, targets = map(layout.own_rows, tokens_of(step))
        labels = layout.own_labels(targets)
        if layout.pipeline is not None:
            layout.pipeline.step(inputs, labels, 1 / (MICROS * layout.loss_parts))
        else:
            loss = layout.forward(input_ids=inputs, labels=labels, shift_labels=labels).loss
            (loss / layout.loss_parts).backward()
        layout.sum_partial({name: p.grad for name, p in model.named_parameters()})

    return gradients_of(model, backward, 8)


@cache
def llama_alone(fp8, outliers=False):
    model = llama(fp8, outliers)

    def backward(step):
        for inputs, targets in zip(*(part.chunk(MICROS) for part in tokens_of(step)), strict=True):
            (model(input_ids=inputs, labels=targets, shift_labels=targets).loss / MICROS).backward()

    return gradients_of(model, backward, 8)


LAYOUTS = [
    (2, {"pp": 2}),
    (2, {"tp": 2}),
    (2, {"tp": 2, "fp8_comm": "on"}),
    (2, {"tp": 2, "sequence_parallel": False}),
    (4, {"tp": 2, "dp_shard": 2}),
    (4, {"pp": 2, "tp": 2}),
    (4, {"pp": 4}),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "parallel"), LAYOUTS, ids=str)
def test_every_gradient_is_as_good_as_that_of_one_process(gloo, ranks, parallel):
    gradients = merged(gloo.run(llama_job, ranks, parallel))
    worse = lost(llama_alone(False), llama_alone(True), gradients)
    assert max(worse.values()) <= LOST, worse


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"pp": 2}, {"tp": 2}, {"tp": 2, "fp8_comm": "on"}], ids=str)
def test_groups_with_outliers_are_as_accurate_as_e4m3(gloo, parallel):
    """Three channels 300 times the others: groups of 128 that have one travel in e4m3, of 32 dB. What loses more than
    1.5 dB keeps that, but for the weight of one norm, whose loss (2.5 dB, from 22.1) is held here, not aimed at.
    """
    exact, alone = llama_alone(False, outliers=True), llama_alone(True, outliers=True)
    gradients = merged(gloo.run(llama_job, 2, parallel, True))
    worse = lost(exact, alone, gradients)
    losing = {name: (worse[name], sqnr(exact[name], gradients[name])) for name in worse if worse[name] > LOST}
    print(len(losing), "of", len(worse), "lose more:", {name: f"{a:.1f} to {b:.1f}" for name, (a, b) in losing.items()})
    below = {name: decibels for name, (decibels, left) in losing.items() if left < 32}
    assert len(below) <= 1 and all("norm" in name and decibels < 3 for name, decibels in below.items()), below


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


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_messages_lose_little_of_what_one_process_computes_almost_exactly(gloo, ranks):
    """Up to 37 dB on one process, in the last norm; each boundary adds the error of two messages."""
    gradients = merged(gloo.run(stages_job, ranks))
    worse = lost(blocks_alone(None), blocks_alone("rowwise"), gradients)
    assert max(worse.values()) <= LOST, worse
