"""A small Llama and its data, for tools that train it."""

import pytest
import torch


@pytest.fixture
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(dtype=torch.float32, seed=0):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False, use_cache=False,
        )  # fmt: skip
        return LlamaForCausalLM(config).to(dtype)

    return make


@pytest.fixture
def samples():
    """Records of 16 tokens that follow a rule, so that the loss falls."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, 64, (64, 1), generator=generator)
    tokens = (starts + 3 * torch.arange(16)) % 64
    return [{"input_ids": row, "labels": row} for row in tokens]
