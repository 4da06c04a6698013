"""Train in FP8, export the FP8 weights, reload them: `python examples/export_fp8.py` (needs Transformers)."""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import octavo

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
)  # fmt: skip
model = octavo.convert(LlamaForCausalLM(config).bfloat16(), "rowwise", verbose=False)
optimizer = octavo.AdamW(model.parameters(), lr=3e-3)
text = (Path(octavo.__file__).parent / "numerics" / "recipe.py").read_bytes()
data = torch.tensor(list(text)).split(64)[:-1]
for step in range(30):
    batch = torch.stack(data[step % 8 :: 8])
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        print(f"step {step + 1:2d}  loss {loss.item():.3f}")

with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary) / "exported"
    print(octavo.export(model, folder, to="fp8-row"))  # or: octavo export runs/NAME/checkpoints/step-000100 exported
    print("quant_method:", json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"])
    # vLLM: `vllm serve exported`. Transformers, with the package compressed-tensors: from_pretrained(folder).
    # What either reads, by hand: weight ≈ FP8 values · scale of the row
    tensors = load_file(folder / "model.safetensors")

scales = {name.removesuffix("_scale"): tensors.pop(name) for name in list(tensors) if name.endswith("_scale")}
weights = {name: (t.float() * scales[name]).bfloat16() if name in scales else t for name, t in tensors.items()}
reloaded = LlamaForCausalLM(config).bfloat16()
reloaded.load_state_dict(weights)
octavo.convert(reloaded, "rowwise", verbose=False)  # quantizes inputs too, as an engine does
with torch.no_grad():
    same = torch.equal(reloaded(batch).logits, model(batch).logits)
print("logits of the reloaded model equal training's:", same)
