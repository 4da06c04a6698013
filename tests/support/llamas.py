"""A small Llama for tools that train it."""

import os

import torch
import torch.distributed as dist


def small_llama(dtype=torch.float32, seed=0, **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2) | changes
    config = LlamaConfig(
        vocab_size=64, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False, use_cache=False,
        **sizes,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def counting_rows(count):
    """Records of 16 tokens that follow a rule, so that the loss falls: int64 [count, 16]."""
    starts = torch.randint(0, 64, (count, 1), generator=torch.Generator().manual_seed(1))
    return (starts + 3 * torch.arange(16)) % 64


def become_rank_of_two():
    """Tell accelerate in which process of a group it is."""
    forget_settings()
    rank = str(dist.get_rank())
    os.environ |= {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "localhost", "MASTER_PORT": "0",
    }  # fmt: skip


def forget_settings():
    """Forget accelerate's settings, which it keeps in singletons."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
