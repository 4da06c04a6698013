"""Small models of the published families, and a reader of exported folders written from the layouts' documentation."""

import json
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

RECIPES = {"fp8-row": "rowwise", "fp8-block": "blockwise", "mxfp8": "mxfp8"}
SIZES = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
HEADS = SIZES | {"num_key_value_heads": 2}
LATENT = {
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**HEADS),
    "qwen3": lambda: transformers.Qwen3Config(**HEADS, head_dim=64, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(**HEADS, num_local_experts=4),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**HEADS, **LATENT, **ROUTED),
    # Of sizes without partial blocks, which Transformers misreads.
    "deepseek_v3_blocks": lambda: transformers.DeepseekV3Config(
        **HEADS, **LATENT | {"qk_rope_head_dim": 128}, **ROUTED
    ),
    "vit": lambda: transformers.ViTConfig(
        **{k: v for k, v in SIZES.items() if k != "vocab_size"}, image_size=32, patch_size=8, num_labels=10
    ),
}


def auto_class(config):
    vision = config.model_type == "vit"
    return transformers.AutoModelForImageClassification if vision else transformers.AutoModelForCausalLM


def make(family, dtype=torch.bfloat16, **changes):
    torch.manual_seed(0)
    config = CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    return auto_class(config).from_config(config, dtype=dtype).eval()


def logits(model):
    generator = torch.Generator().manual_seed(1)
    if model.config.model_type == "vit":
        batch = {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator).to(model.dtype)}
    else:
        batch = {"input_ids": torch.randint(model.config.vocab_size, (2, 16), generator=generator)}
    with torch.no_grad():
        return model(**batch).logits.float()


def tensors_of(folder: Path):
    """All tensors of a folder, through its index if it has one."""
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    tensors = {}
    for name in sorted(files):
        with safe_open(folder / name, "pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}
    return tensors


def config_of(folder: Path):
    return json.loads((folder / "config.json").read_text())


def dequantized(tensors, dtype):
    """Weights times scales, as documented: per row; per block of 128×128, partial at the edges; 2^(e - 127) per 32."""
    plain = {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv"))
        if name.removesuffix("_inv").removesuffix("_scale") in tensors.keys() - {name}:
            continue
        if scale is not None:
            rows, columns = tensor.shape
            if scale.dtype == torch.uint8:
                scale = torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
            elif scale.shape[1] > 1 or name + "_scale_inv" in tensors:
                scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
            tensor = (tensor.float() * scale).to(dtype)
        plain[name] = tensor
    return plain


def reload(folder: Path, plain_folder: Path, dtype):
    """The model of a folder with dequantized weights."""
    plain_folder.mkdir()
    config = config_of(folder)
    del config["quantization_config"]
    (plain_folder / "config.json").write_text(json.dumps(config))
    plain = dequantized(tensors_of(folder), dtype)
    save_file({name: t.contiguous() for name, t in plain.items()}, plain_folder / "model.safetensors", {"format": "pt"})
    kind = auto_class(transformers.AutoConfig.from_pretrained(plain_folder))
    model, info = kind.from_pretrained(plain_folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


def run_as_engine(model, names, layout, folder):
    """Compute linears as engines do: quantize inputs per token, or per token and group of channels, then multiply.

    With scales by row and token the product is of FP8 values, and scaled afterwards.
    """
    group = {"fp8-row": None, "fp8-block": 128, "mxfp8": 32}[layout]
    tensors = tensors_of(folder)

    def quantized(x):
        parts = x.float().unflatten(-1, (-1, group or x.shape[-1]))
        scale = parts.abs().amax(-1, keepdim=True) / 448
        if layout == "mxfp8":
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        return (parts * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).float(), scale

    def forward(module, x, name):
        values, scale = quantized(x)
        if layout == "fp8-row":
            weight, w_scale = tensors[f"{name}.weight"].float(), tensors[f"{name}.weight_scale"]
            y = F.linear(values.flatten(-2), weight) * scale.flatten(-2) * w_scale[:, 0]
            return y if module.bias is None else y + module.bias
        return F.linear((values * scale).flatten(-2), module.weight, module.bias)

    def product(x, weight):
        values, scale = quantized(x)
        return F.linear((values * scale).flatten(-2), weight)

    def experts(module, hidden, index, weights):
        """Each expert on its tokens, with the loaded names' gate and up joined as Transformers does."""
        result = torch.zeros_like(hidden)
        for expert in range(len(module.down_proj)):
            token, slot = (index == expert).nonzero(as_tuple=True)
            gate, up = product(hidden[token], module.gate_up_proj[expert]).chunk(2, -1)
            y = product(module.act_fn(gate) * up, module.down_proj[expert])
            result.index_add_(0, token, y * weights[token, slot, None])
        return result

    for name in names:
        module = model.get_submodule(name)
        stacked = hasattr(module, "gate_up_proj")
        module.forward = partial(experts, module) if stacked else partial(forward, module, name=name)
