"""Small models that the tests of this folder share."""

import torch
from torch import Tensor, nn


def llama(**overrides):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0,
        "eos_token_id": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(config | overrides)))


class MLP(nn.Module):
    """Gate, up and down, as in a Llama block; gate and up read one input."""

    def __init__(self, width: int = 64, hidden: int = 96, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj = nn.Linear(width, hidden, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(width, hidden, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(hidden, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def gradients(model):
    """Name → gradient, cloned."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
