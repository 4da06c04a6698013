"""The trainer against a plain loop: losses, gradient norms, learning rates and weights of 20 steps."""

import pytest
import torch
import torch.nn.functional as F
from reference_loop import FAMILIES, reference, trained
from tiny_runs import load
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.train.config.run_config import ConfigError
from octavo.train.model import prepare_loss
from octavo.train.trainer import Trainer

LOSS = 3e-4
"""Largest difference of a loss; three times that under a soft cap, which whole logits round otherwise than chunks."""
NORM = 5e-3  # Largest relative difference of a gradient norm
FP32 = {"parameters": "fp32"}
RUNS = {
    "bf16": {}, "whole logits": {"precision": {"loss": "whole"}},
    "fp16": {"precision": {"parameters": "fp16", "loss_scale": 128.0}}, "FP8 products": {"precision": {"level": "fp8"}},
    "FP8 activations": {"precision": {"level": "fp8+activations"}},
    "recomputed": {"precision": FP32 | {"checkpointing": "full"}},
    "selective": {"precision": FP32 | {"checkpointing": "selective"}},
    "wsd": {"precision": FP32, "optim": {"schedule": "wsd"}},
    "constant": {"precision": FP32, "optim": {"schedule": "constant", "warmup": 0}},
    "accumulated": {"precision": FP32, "optim": {"micro_batches": 4}},
    "accumulated bf16": {"optim": {"micro_batches": 2}},
    "hardly clipped": {"precision": FP32, "optim": {"clip": 2.0, "lr": 1e-3}},
}  # fmt: skip
ALWAYS = {("mixtral", "accumulated"), ("bamba", "fp32"), ("gemma2", "wsd"), ("cohere", "bf16")}
MATRIX = [(family, "fp32") for family in FAMILIES] + [("llama", run) for run in RUNS]
MATRIX += [("mixtral", run) for run in RUNS] + [("gemma2", "wsd"), ("cohere", "bf16")]


def config_of(make_config, family, run, steps=20):
    return make_config(
        run={"steps": steps}, model={"type": family, "config": FAMILIES[family]},
        optim={"lr": 2e-3, "batch": 8, "warmup": 4} | run.get("optim", {}), precision=run.get("precision", {}),
    )  # fmt: skip


def update_error(ours, plain):
    names = list(plain.weights)
    difference = torch.cat([(ours.weights[name] - plain.weights[name]).flatten() for name in names])
    moved = torch.cat([(plain.weights[name] - plain.start[name]).flatten() for name in names])
    return (difference.norm() / moved.norm()).item()


def distances(curve, other):
    losses = [abs(a - b) for a, b in zip(curve.losses, other.losses, strict=True)]
    return max(losses), max(abs(a / b - 1) for a, b in zip(curve.norms, other.norms, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "run"),
    [pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.slow) for case in MATRIX],
    ids=[f"{family}, {run}" for family, run in MATRIX],
)
def test_twenty_steps_are_those_of_a_plain_loop(family, run, make_config):
    config = config_of(make_config, family, RUNS.get(run, {"precision": FP32}))
    if config.model.config.get("output_router_logits"):  # chunks round otherwise, and other experts are selected: below
        config = config.model_copy(update={"precision": config.precision.model_copy(update={"loss": "whole"})})
    ours, plain = trained(config), reference(config)
    assert ours.rates == pytest.approx(plain.rates, rel=1e-12) and ours.start.keys() == plain.start.keys()
    assert all(torch.equal(ours.start[name], weight) for name, weight in plain.start.items())
    capped = family == "gemma2"
    assert ours.losses == pytest.approx(plain.losses, rel=0, abs=3 * LOSS if capped else LOSS)
    assert ours.norms == pytest.approx(plain.norms, rel=NORM) and update_error(ours, plain) < 0.05
    assert plain.losses[-1] < plain.losses[0] - 0.1


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_whole_logits_are_those_of_a_plain_loop(family, make_config):
    """Bit for bit, so that what differs with chunks is their rounding, under a soft cap or with routers."""
    config = config_of(make_config, family, RUNS["wsd"] | {"precision": FP32 | {"loss": "whole"}})
    assert trained(config).losses == reference(config).losses


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_a_routers_loss_in_chunks_is_that_of_a_plain_loop(run, make_config):
    """Nearer than plain loops are to each other whose heads differ by half a bf16 step: other experts are selected."""
    config = config_of(make_config, "mixtral", RUNS[run])
    plain = reference(config)
    others = [reference(config, noise=2e-3, seed=seed) for seed in range(4)]
    losses, norms = zip(*(distances(other, plain) for other in others), strict=True)
    loss, norm = distances(trained(config), plain)
    print(f"loss {loss:.1e} (others {max(losses):.1e}), norm {norm:.1%} (others {max(norms):.1%})")
    assert loss <= max(losses) and norm <= max(norms)


@pytest.mark.parametrize(("family", "field"), [("mixtral", "router_aux_loss_coef"), ("bamba", "z_loss_coefficient")])
def test_what_a_model_adds_to_its_loss_is_trained_on(family, field, make_config):
    losses, notes = [], []
    for coefficient in (0.0, 0.25):
        config = config_of(make_config, family, {"precision": FP32})
        model = config.model.model_copy(update={"config": config.model.config | {field: coefficient}})
        trainer = Trainer(config.model_copy(update={"model": model}), load(config), torch.device("cpu"))
        losses.append(trainer.train_step().loss)
        notes.append(trainer.loss_note)
    assert losses[0] is not None and losses[1] is not None and losses[1] > losses[0] + 0.3
    whole = notes[1].startswith("the loss is the model's own, with every term of it, computed from whole logits: ")
    assert whole == (family == "bamba")  # a router's loss needs none


@pytest.mark.parametrize("kind", ["bart", "llama"])
def test_labels_reach_the_right_tokens(kind):
    """Bart does not shift labels; a Llama whose loss shifts whatever it is given would learn to skip a token."""
    fields = {"vocab_size": 40, "num_attention_heads": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    fields |= {"d_model": 16, "decoder_layers": 1, "decoder_ffn_dim": 16} if kind == "bart" else {
        "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))
    prepare_loss(model, "whole")
    if kind == "llama":
        model.loss_function = lambda logits, labels, vocab_size, **_: F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )
        with pytest.raises(ConfigError, match="does not predict the token of shift_labels from each token"):
            prepare_loss(model, "whole")
