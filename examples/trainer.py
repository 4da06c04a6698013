"""Transformers' Trainer in FP8, on a CPU in seconds: `python examples/trainer.py` (needs accelerate)."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import octavo
from octavo.integrations.transformers import Fp8Trainer

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, use_cache=False
)
model = LlamaForCausalLM(config).bfloat16()
starts = torch.randint(0, 64, (256, 1))
rows = (starts + 3 * torch.arange(16)) % 64  # each sequence counts by three: easy to learn
data = [{"input_ids": row, "labels": row} for row in rows]

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        output_dir=folder, max_steps=30, per_device_train_batch_size=8, learning_rate=3e-3, logging_steps=5,
        report_to=[], save_strategy="no", use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
    )  # fmt: skip
    trainer = Fp8Trainer(
        model=model, args=args, train_dataset=data, precision="fp8+activations+optimizer", inspect_every=10
    )
    trainer.train()
print(octavo.report(model).summary)
