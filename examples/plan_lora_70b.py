"""Predict the memory of LoRA on a 70B base in FP8, without a GPU: `python examples/plan_lora_70b.py` (needs peft).

The model has no weights here: it is made on the meta device. Batch 1 × 4096, rank 16 on all linear layers.
"""

import sys
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import octavo
from octavo.nn.causal import chunked_loss

warnings.filterwarnings("ignore")  # PEFT's, about weights without values
blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 80
config = LlamaConfig(
    vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=blocks, num_attention_heads=64,
    num_key_value_heads=8, max_position_embeddings=8192,
)  # fmt: skip
with torch.device("meta"):
    model = LlamaForCausalLM(config).to(torch.bfloat16)
octavo.convert(model, "rowwise", frozen="fp8")
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")).train()
model.enable_input_require_grads()
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
chunked_loss(model.base_model.model)

tokens = torch.empty(1, 4096, dtype=torch.long, device="meta")
print(octavo.inspect.memory(model, {"input_ids": tokens, "labels": tokens}, optimizer=octavo.AdamW))
