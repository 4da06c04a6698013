"""One small random model of each family, as made by Transformers from a config; nothing is downloaded."""

import torch

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "cohere", "gemma", "gemma2", "gemma3_text", "phi3", "gpt2", "vit",
    "siglip_vision_model",
)  # fmt: skip
TEXT = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "pad_token_id": None,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
GPT2 = {
    "vocab_size": 64, "n_embd": 128, "n_head": 4, "n_positions": 64, "resid_pdrop": 0, "attn_pdrop": 0,
    "embd_pdrop": 0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
IMAGE = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "image_size": 64, "patch_size": 8,
}  # fmt: skip
ONLY_EAGER = ("gemma2",)


def model_of(family, layers=1, dtype=torch.float32, attention=None):
    """Weights N(0, 1/fan_in), so that activations and logits of attention are of unit size; norms' weights vary."""
    from transformers import AutoConfig, AutoModel

    images = family in ("vit", "siglip_vision_model")
    fields = IMAGE if images else GPT2 if family == "gpt2" else TEXT
    config = AutoConfig.for_model(family, **fields, **{"n_layer" if family == "gpt2" else "num_hidden_layers": layers})
    attention = attention or ("eager" if family in ONLY_EAGER else "sdpa")
    torch.manual_seed(0)
    model = AutoModel.from_config(config, attn_implementation=attention).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(noise * 0.1)
            elif parameter.ndim == 2 and not any(part in name for part in ("embed", "wte", "wpe")):
                parameter.copy_(noise * parameter.shape[0 if ".c_" in name else 1] ** -0.5)
    return model.to(dtype)


def batch_of(family, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    if family in ("vit", "siglip_vision_model"):
        return {"pixel_values": torch.randn(2, 3, 64, 64, generator=generator).to(dtype)}
    return {"input_ids": torch.randint(0, 64, (2, 48), generator=generator), "use_cache": False}


def train_step(model, batch):
    """Last hidden state, and all gradients by name, for a random gradient of it."""
    model.zero_grad()
    y = model(**batch).last_hidden_state
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y))
    return y.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
