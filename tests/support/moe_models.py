"""Small mixtures of experts that the tests of this folder share, and experts on their own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import octavo

BASE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
WIDE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": WIDE | {"num_experts": 8, "head_dim": 16},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": WIDE | {
        "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    },
    "gpt_oss": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip


def mixture(family, **overrides):
    """A model of a family, with experts whose weights are not tiny."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(BASE | FAMILIES[family] | overrides))
    return AutoModelForCausalLM.from_config(config)


def experts_of(family, **overrides):
    """The experts of the last layer, with random weights and biases."""
    from octavo.nn.experts import looks_like_experts

    experts = [module for module in mixture(family, **overrides).modules() if looks_like_experts(module)][-1]
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return experts


def routed(tokens, experts=8, k=2, hidden=64, dtype=torch.float32, seed=0):
    """Hidden states, experts of each token, routing weights, and a gradient of the output."""
    g = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(experts, generator=g)[:k] for _ in range(tokens)]) if tokens else None
    x, weights, grad = (torch.randn(tokens, n, generator=g).to(dtype) for n in (hidden, k, hidden))
    return x, index if tokens else torch.zeros((0, k), dtype=torch.int64), weights.abs(), grad


def results(module, x, index, weights, grad):
    """The output, and the gradient of every input and parameter."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    module.zero_grad()
    y = module(x, index, weights)
    y.backward(grad)
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert None not in gradients.values()
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, **gradients}


def mesh_of(efsdp=1):
    """The ranks as [efsdp, ep]."""
    return init_device_mesh("cpu", (efsdp, dist.get_world_size() // efsdp), mesh_dim_names=("efsdp", "ep"))


def loss_of(model, rank):
    """The loss of a rank's tokens; gradients are accumulated."""
    tokens = torch.arange(24, dtype=torch.int64).view(2, 12) * (rank + 1) % 64
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item()


def resident(model, recipe="rowwise", **options):
    """The model with frozen weights in FP8."""
    return octavo.convert(model, recipe, frozen="fp8", verbose=False, **options)


class Checkpointed(nn.Module):
    """Recomputes a module in backward."""

    def __init__(self, inner, use_reentrant):
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, *arguments):
        return checkpoint(self.inner, *arguments, use_reentrant=self.use_reentrant)
