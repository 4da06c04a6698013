"""The trainer against a loop of plain PyTorch and Transformers: losses, gradient norms, learning rates and weights.

They share the batches, which `test_data.py` checks, and `octavo.convert` where a run asks for FP8. Model, loss,
accumulation, clipping, schedule, weight decay and optimizer are written anew in `reference`, as they are defined.
"""

import math
import re
from collections import namedtuple
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import load, make_trainer, rejected, slow
from transformers import AutoConfig, AutoModelForCausalLM

from octavo import convert
from octavo.train.model import draw_once, prepare_loss

TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ROUTED = TEXT | {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
BAMBA = TEXT | {
    "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_expand": 2, "mamba_chunk_size": 8, "z_loss_coefficient": 1e-2,
}  # fmt: skip
GPT2 = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
GPT2 |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
FAMILIES = {
    "llama": TEXT,
    "qwen3": TEXT | {"head_dim": 8},
    "gpt2": GPT2,
    "phi": TEXT | {"embd_pdrop": 0.0, "resid_pdrop": 0.0},  # a head with a bias
    "gemma2": TEXT | {"head_dim": 8, "final_logit_softcapping": 1.0},
    "cohere": TEXT | {"logit_scale": 0.25},
    "granite": TEXT | {"logits_scaling": 8.0},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4},
    "bamba": BAMBA,
    "mixtral": ROUTED | {"num_local_experts": 4},
    "qwen2_moe": ROUTED | {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32},
    "granitemoe": ROUTED | {"num_local_experts": 4, "logits_scaling": 4.0},
}
"""Three with a router's loss, one with a z-loss, a soft cap, two logit scales, and plain ones."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
NOT_DECAYED = re.compile(r"(norm|ln_|bias$|A_log$|\.D$)")
Curve = namedtuple("Curve", "losses norms rates start weights")
"""Losses, gradient norms and learning rates of some steps, and the weights before and after them."""


def trained(config):
    trainer = make_trainer(config)
    named = dict(trainer.model.named_parameters())
    start, rows = _copy(named), [trainer.train_step() for _ in range(config.run.steps)]
    return Curve(*zip(*((row.loss, row.grad_norm, row.lr) for row in rows), strict=True), start, _copy(named))


def reference(config, noise=0.0, seed=0):
    """What a plain loop makes of it; `noise` is the standard deviation of relative errors of the head's weights."""
    corpus = load(config)
    end, optim, precision = corpus.tokenizer.end_id, config.optim, config.precision
    fields = {"vocab_size": corpus.tokenizer.size, "bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
    settings = AutoConfig.for_model(config.model.type, **fields, **config.model.config)
    dtype = DTYPES[precision.parameters]
    model = draw_once(lambda: AutoModelForCausalLM.from_config(settings, dtype=dtype), config.run.seed).train()
    if noise:
        head = model.lm_head.weight
        with torch.no_grad():
            head.mul_(1 + noise * torch.randn(head.shape, generator=torch.Generator().manual_seed(seed)))
    named = dict(model.named_parameters())
    keeps_masters = precision.parameters != "fp32" and config.resolved.master != "none"
    copies = {name: p.detach().float().clone().requires_grad_() for name, p in named.items()}
    masters = copies if keeps_masters else named
    if "fp8" in (config.resolved.matmul, config.resolved.activations):
        convert(model, precision=config.resolved, verbose=False)
    decayed = [p for name, p in masters.items() if not NOT_DECAYED.search(name)]
    rest = [p for name, p in masters.items() if NOT_DECAYED.search(name)]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        betas=optim.betas, eps=optim.eps, fused=True,
    )  # fmt: skip
    scale = precision.loss_scale if isinstance(precision.loss_scale, float | int) else 1.0
    start, rows = _copy(named), []
    for step in range(config.run.steps):
        inputs, targets = corpus.batch(config.run.seed, step, optim.batch)
        loss = torch.zeros(())
        for x, y in zip(inputs.chunk(optim.micro_batches), targets.chunk(optim.micro_batches), strict=True):
            with nullcontext() if precision.parameters != "fp32" else torch.autocast("cpu", torch.bfloat16):
                own = model(input_ids=x, labels=x, shift_labels=y, use_cache=False).loss / optim.micro_batches
            (own * scale).backward()
            loss += own.detach()
            for name, p in named.items() if keeps_masters else ():
                if p.grad is not None:
                    grad = p.grad.float() / scale
                    masters[name].grad = grad if masters[name].grad is None else masters[name].grad + grad
                    p.grad = None
        rate = rate_of(config, step)
        for group in adamw.param_groups:
            group["lr"] = rate
        rows.append((loss.item(), torch.nn.utils.clip_grad_norm_(masters.values(), optim.clip).item(), rate))
        adamw.step()
        adamw.zero_grad()
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(masters[name])
    return Curve(*zip(*rows, strict=True), start, _copy(named))


def _copy(params):
    return {name: param.detach().float().clone() for name, param in params.items()}


def rate_of(config, step):
    optim, steps = config.optim, config.run.steps
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    low = optim.lr * optim.min_lr_ratio
    if optim.schedule == "cosine":
        share = (step - optim.warmup) / (steps - optim.warmup)
        return low + (optim.lr - low) * 0.5 * (1 + math.cos(math.pi * share))
    if optim.schedule == "wsd":
        decaying = round(optim.decay * steps)
        left = min(1.0, (steps - step) / decaying)
        return low + (optim.lr - low) * left
    return optim.lr


# --- tests ---


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
    [slow(*case, unless=case in ALWAYS) for case in MATRIX],
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
        trainer = make_trainer(config.model_copy(update={"model": model}))
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
        rejected("does not predict the token of shift_labels from each token", prepare_loss, model, "whole")
