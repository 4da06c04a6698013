"""A Transformers model, FP8, activation checkpointing and selective conversion: `python examples/llama_own_loop.py`."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import octavo

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
    bos_token_id=0, eos_token_id=1,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.gradient_checkpointing_enable()

# Everything but the first and last block; names are fnmatch patterns, and each decision keeps its reason.
octavo.convert(model, "rowwise", skip=["model.layers.0", "model.layers.3"])
print(octavo.report(model))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.arange(16 * 64).remainder(97).reshape(16, 64)
for step in range(20):
    loss = model(text, labels=text, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}")
