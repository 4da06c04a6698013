"""FSDP2 under accelerate in FP8: `accelerate launch --num-processes 8 examples/accelerate_fsdp2.py` (needs accelerate).

On CPUs, and with one process, accelerate does not shard: the same loop runs unsharded.
"""

import tempfile

import torch
from accelerate import FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM

import octavo
from octavo.integrations.accelerate import Fp8Accelerator

LEVEL = "fp8+activations+optimizer"


def main() -> None:
    """Train a small Llama, save its shards, and load them again."""
    torch.manual_seed(0)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False, state_dict_type="SHARDED_STATE_DICT",
    )  # fmt: skip
    accelerator = Fp8Accelerator(precision=LEVEL, fsdp_plugin=plugin)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    optimizer = octavo.AdamW(model.parameters(), lr=3e-3)
    starts = torch.randint(0, 64, (256, 1))
    rows = (starts + 3 * torch.arange(16)) % 64  # each sequence counts by three: easy to learn
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # converts, then shards
    for step, batch in enumerate(loader, 1):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 8 == 0:
            accelerator.print(f"step {step}  loss {loss.item():.3f}")
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        accelerator.load_state(folder)
    accelerator.print(octavo.report(accelerator.unwrap_model(model)).summary)


if __name__ == "__main__":
    main()
