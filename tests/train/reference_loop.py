"""The trainer's numbers from a loop of plain PyTorch and Transformers.

It shares with the trainer the batches, which `test_data.py` checks, and `octavo.convert` where a run asks for FP8.
Model, loss, accumulation, clipping, schedule, weight decay and optimizer are written anew, as they are defined.
"""

import math
import re
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from tiny_runs import load
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from octavo import convert
from octavo.train.model import draw_once
from octavo.train.trainer import Trainer

TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ROUTED = TEXT | {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
BAMBA = TEXT | {
    "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_expand": 2, "mamba_chunk_size": 8, "z_loss_coefficient": 1e-2,
}  # fmt: skip
GPT2 = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}  # fmt: skip
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


@dataclass
class Curve:
    """Losses, gradient norms and learning rates of some steps, and the weights before and after them."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    start: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def trained(config):
    trainer = Trainer(config, load(config), torch.device("cpu"))
    curve = Curve(start=_copy(dict(trainer.model.named_parameters())))
    for _ in range(config.run.steps):
        row = trainer.train_step()
        assert row.loss is not None and row.grad_norm is not None
        curve.losses.append(row.loss)
        curve.norms.append(row.grad_norm)
        curve.rates.append(row.lr)
    curve.weights = _copy(dict(trainer.model.named_parameters()))
    return curve


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
    curve = Curve(start=_copy(named))
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
        curve.losses.append(loss.item())
        curve.norms.append(torch.nn.utils.clip_grad_norm_(masters.values(), optim.clip).item())
        curve.rates.append(rate)
        adamw.step()
        adamw.zero_grad()
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(masters[name])
    curve.weights = _copy(named)
    return curve


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
