"""A training step of 20 families with FP8 activations: bitwise forward, accurate gradients, less memory.

Small models of Transformers from their configurations, in bf16 without dropout. With `-s` each prints its row of
docs/memory.md: bytes per token in bf16 and with Octavo, their ratio, SQNR of all gradients and of the worst.
"""

import copy
import importlib
from functools import partial

import pytest
import torch
from torch import nn

import octavo
from octavo.nn.memory_audit import saved_for_backward
from octavo.numerics import sqnr
from tensors import randn

WIDTH, INNER, LENGTH, IMAGE = 128, 512, 128, 100
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {"hidden_size": WIDTH, "intermediate_size": INNER, **HEADS}
TEXT = SIZES | {"vocab_size": 128, "num_key_value_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0,
                "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
VISION = SIZES | {"image_size": 56, "patch_size": 14}
T5 = {"vocab_size": 128, "d_model": WIDTH, "d_kv": 32, "d_ff": INNER, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0, "dropout_rate": 0}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}}
QWEN = {"image_token_id": IMAGE, "vision_start_token_id": 101, "vision_end_token_id": 102, "video_token_id": 103}
pixels = partial(randn, seed=1)
GRID = {"depth": 2, "hidden_size": WIDTH, "num_heads": 4, "patch_size": 14}


def ids(image=0, **more):
    """A batch of tokens, of which some stand for parts of an image."""
    tokens = torch.randint(3, IMAGE, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens[:, 4 : 4 + image] = IMAGE
    return {"input_ids": tokens, "labels": tokens, "use_cache": False, **more}


def text(kind, batch=None, **fields):
    """A language model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    attention = "eager" if kind in ("gemma2", "mamba") else "sdpa"
    config = AutoConfig.for_model(kind, **TEXT | fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention), batch or ids()


def images(kind):
    from transformers import AutoConfig, AutoModel

    return AutoModel.from_config(AutoConfig.for_model(kind, **VISION)), {"pixel_values": pixels(8, 3, 56, 56)}


def made(name, batch, config="", **fields):
    """A model by the names of its class and configuration."""
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{config or name.partition('For')[0]}Config")
    return getattr(transformers, name)(config(**fields)), batch


def llava():
    from transformers import CLIPVisionConfig, LlamaConfig

    batch = ids(16, pixel_values=pixels(2, 3, 56, 56))
    return made("LlavaForConditionalGeneration", batch, text_config=LlamaConfig(**TEXT), image_token_index=IMAGE,
                vision_config=CLIPVisionConfig(**VISION), vision_feature_layer=-1)  # fmt: skip


def paligemma():
    from transformers import GemmaConfig, SiglipVisionConfig

    types = torch.ones(2, LENGTH, dtype=torch.int64)
    batch = ids(16, pixel_values=pixels(2, 3, 56, 56), token_type_ids=types)
    return made("PaliGemmaForConditionalGeneration", batch, text_config=GemmaConfig(**TEXT, head_dim=32),
                vision_config=SiglipVisionConfig(**VISION), image_token_index=IMAGE, projection_dim=WIDTH,
                hidden_size=WIDTH)  # fmt: skip


def idefics3():
    from transformers import LlamaConfig

    batch = ids(4, pixel_values=pixels(2, 1, 3, 56, 56))
    return made("Idefics3ForConditionalGeneration", batch, text_config=LlamaConfig(**TEXT), vision_config=VISION,
                image_token_id=IMAGE, scale_factor=2)  # fmt: skip


def qwen_vl(name, vision):
    grid = torch.tensor([[1, 8, 8]] * 2)
    batch = ids(16, pixel_values=pixels(2 * 64, 3 * 2 * 14 * 14), image_grid_thw=grid)
    batch["input_ids"][:, 3] = 101
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    return made(f"{name}ForConditionalGeneration", batch, text_config=TEXT | ROPE, vision_config=vision, **QWEN)


def bert():
    batch = {name: value for name, value in ids().items() if name != "use_cache"}
    fields = {name: value for name, value in TEXT.items() if "key_value" not in name}
    return made("BertForMaskedLM", batch, **fields, hidden_dropout_prob=0, attention_probs_dropout_prob=0)


def whisper():
    fields = {f"{side}_{name}": n for side in ("encoder", "decoder")
              for name, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", INNER))}  # fmt: skip
    batch = {"input_features": pixels(2, 16, 2 * LENGTH), "labels": ids()["labels"], "use_cache": False}
    return made("WhisperForConditionalGeneration", batch, vocab_size=128, d_model=WIDTH, num_mel_bins=16,
                max_source_positions=LENGTH, max_target_positions=LENGTH, decoder_start_token_id=1, pad_token_id=0,
                bos_token_id=1, eos_token_id=2, **fields)  # fmt: skip


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, INNER, dropout=0, batch_first=True, activation=nn.GELU())
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), {"src": pixels(2, LENGTH, WIDTH)}


DEEPSEEK = {"moe_intermediate_size": WIDTH, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
            "num_experts_per_tok": 2, "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 1}  # fmt: skip
WINDOWS = {"intermediate_size": INNER, "out_hidden_size": WIDTH, "fullatt_block_indexes": [1], "window_size": 56}
FAMILIES = {
    "GPT-2": lambda: text("gpt2", n_embd=WIDTH, n_layer=2, n_head=4, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0),
    "Llama": lambda: text("llama"),
    "Qwen3": lambda: text("qwen3", head_dim=32),
    "Gemma 2": lambda: text("gemma2", head_dim=32),
    "Phi-3": lambda: text("phi3"),
    "Mixtral": lambda: text("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "DeepSeek-V3": lambda: text("deepseek_v3", **DEEPSEEK),
    "Mamba": lambda: text("mamba", state_size=8),
    "BERT": bert,
    "T5": lambda: made("T5ForConditionalGeneration", ids(), **T5, feed_forward_proj="relu"),
    "T5 1.1": lambda: made("T5ForConditionalGeneration", ids(), **T5, feed_forward_proj="gated-gelu"),
    "Whisper": whisper,
    "ViT": lambda: images("vit"),
    "SigLIP": lambda: images("siglip_vision_model"),
    "LLaVA": llava,
    "PaliGemma": paligemma,
    "Idefics3": idefics3,
    "Qwen2-VL": lambda: qwen_vl("Qwen2VL", GRID | {"embed_dim": WIDTH}),
    "Qwen2.5-VL": lambda: qwen_vl("Qwen2_5_VL", GRID | WINDOWS),
    "nn.TransformerEncoder": encoder,
}


def step(model, batch):
    """Output, gradients, and bytes saved for backward."""
    torch.manual_seed(0)
    with saved_for_backward(model) as saved:
        output = model(**batch)
    y = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    y = output[0] if y is None else y
    y.backward(None if y.ndim == 0 else randn(*y.shape, seed=2).to(y))
    return y.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, saved.bytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Transformers, about configurations that are small
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_with_stored_activations(name):
    torch.manual_seed(0)
    model, batch = FAMILIES[name]()
    model.bfloat16().train()
    batch = {k: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in batch.items()}
    precision = octavo.Precision(matmul="bf16", activations="fp8")
    storing = octavo.convert(copy.deepcopy(model), precision=precision, verbose=False)
    (y, expected, plain), (stored_y, actual, stored) = step(model, batch), step(storing, batch)
    largest = max(float(gradient.norm()) for gradient in expected.values())
    worst = min(sqnr(g, actual[n]) for n, g in expected.items() if g.norm() > 1e-3 * largest)  # no rounding noise
    whole = sqnr(*(torch.cat([grads[n].flatten().double() for n in expected]) for grads in (expected, actual)))
    tokens = 8 * 17 if name in ("ViT", "SigLIP") else 2 * LENGTH
    print(f"| {name} | {plain / tokens:,.0f} | {stored / tokens:,.0f} | {stored / plain:.2f} | {whole:.0f} dB | "
          f"{worst:.0f} dB |")  # fmt: skip
    assert torch.equal(y, stored_y) and stored < 0.95 * plain
    assert whole >= 20 and worst >= 15
