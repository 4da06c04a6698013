"""LoRA on a base that exists in FP8 only, never in bf16: `python examples/lora_resident.py` (needs peft)."""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import octavo

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
    bos_token_id=0, eos_token_id=1,
)  # fmt: skip
folder = tempfile.mkdtemp()  # stands for a checkpoint that you downloaded
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)

with octavo.nn.meta_parameters():  # a model without weights
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
octavo.convert(model, "rowwise", frozen="fp8")
octavo.nn.load_frozen(model, folder)  # reads and quantizes one tensor at a time; device="cuda" on a GPU

model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
print(octavo.report(model))

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
text = torch.arange(16 * 64).remainder(97).reshape(16, 64)
for step in range(20):
    loss = model(input_ids=text, labels=text, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}")

model.save_pretrained(f"{folder}/adapter")  # the adapters alone
octavo.revert(model)  # the base in bf16, with its FP8 values
merged = model.merge_and_unload()
print(f"merged: {sum(p.nbytes for p in merged.parameters()) / 2**20:.1f} MiB in {merged.dtype}")
