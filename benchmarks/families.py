"""What each family of models keeps for backward with FP8 activations, and how good its gradients are; docs/memory.md.

Small models of Transformers, made from their configurations (nothing is downloaded), in bf16 and without dropout: one
training step as it is and one with `Precision(matmul="bf16", activations="fp8")`. The forward must be the same, bit for
bit.

  python -m benchmarks families
  python -m benchmarks families --only Llama Mamba
  python -m benchmarks families --products    gradients of FP8 products beside fp32's, for docs/numerics.md
"""

import argparse
import copy
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from benchmarks.environment import write_text
from octavo.nn.memory_audit import saved_for_backward
from octavo.numerics import sqnr

DOCS = Path(__file__).parent.parent / "docs"
FP8_ACTIVATIONS = octavo.Precision(matmul="bf16", activations="fp8")
WIDTH, INNER, LENGTH, IMAGE = 128, 512, 128, 100
"""Sizes of the models, tokens of a sequence, and the token that stands for a part of an image."""
TEXT = {
    "vocab_size": 128, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 56, "patch_size": 14,
}  # fmt: skip
SPEECH = {"vocab_size": 128, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
          "decoder_attention_heads": 4, "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER}  # fmt: skip
MULTIMODAL_ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}

Batch = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class FamilyResult:
    """What a family keeps.

    Attributes:
        plain: Bytes kept for backward per token.
        stored: The same with FP8 activations.
        whole: SQNR of all gradients together, dB.
        worst: SQNR of the worst gradient of one parameter, dB, of those that are no rounding noise.
        bitwise: Whether the forward is the same to the bit.
    """

    plain: float
    stored: float
    whole: float
    worst: float
    bitwise: bool


def _ids(image: int = 0) -> Tensor:
    ids = torch.randint(3, IMAGE, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    ids[:, 4 : 4 + image] = IMAGE
    return ids


def _language(kind: str, **fields: Any) -> tuple[nn.Module, Batch]:
    from transformers import AutoConfig, AutoModelForCausalLM

    attention = "eager" if kind in ("gemma2", "mamba") else "sdpa"
    config = AutoConfig.for_model(kind, **(TEXT | fields))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention), _labelled()


def _labelled(image: int = 0, **more: Any) -> Batch:
    ids = _ids(image)
    return {"input_ids": ids, "labels": ids, "use_cache": False, **more}


def _pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _bert() -> tuple[nn.Module, Batch]:
    from transformers import BertConfig, BertForMaskedLM

    batch = _labelled()
    batch.pop("use_cache")
    fields = {k: v for k, v in TEXT.items() if "key_value" not in k}
    return BertForMaskedLM(BertConfig(**fields, hidden_dropout_prob=0, attention_probs_dropout_prob=0)), batch


def _t5(feed_forward: str) -> tuple[nn.Module, Batch]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=128, d_model=WIDTH, d_kv=32, d_ff=INNER, num_layers=2, num_heads=4,
                      feed_forward_proj=feed_forward, decoder_start_token_id=0, dropout_rate=0)  # fmt: skip
    return T5ForConditionalGeneration(config), _labelled()


def _whisper() -> tuple[nn.Module, Batch]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(num_mel_bins=16, max_source_positions=LENGTH, max_target_positions=LENGTH,
                           decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                           **SPEECH)  # fmt: skip
    batch = {"input_features": _pixels(2, 16, 2 * LENGTH), "labels": _ids(), "use_cache": False}
    return WhisperForConditionalGeneration(config), batch


def _images(kind: str) -> tuple[nn.Module, Batch]:
    from transformers import AutoConfig, AutoModel

    return AutoModel.from_config(AutoConfig.for_model(kind, **VISION)), {"pixel_values": _pixels(8, 3, 56, 56)}


def _llava() -> tuple[nn.Module, Batch]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(text_config=LlamaConfig(**TEXT), vision_config=CLIPVisionConfig(**VISION),
                         image_token_index=IMAGE, vision_feature_layer=-1)  # fmt: skip
    return LlavaForConditionalGeneration(config), _labelled(16, pixel_values=_pixels(2, 3, 56, 56))


def _paligemma() -> tuple[nn.Module, Batch]:
    from transformers import GemmaConfig, PaliGemmaConfig, PaliGemmaForConditionalGeneration, SiglipVisionConfig

    config = PaliGemmaConfig(text_config=GemmaConfig(**TEXT, head_dim=32), vision_config=SiglipVisionConfig(**VISION),
                             image_token_index=IMAGE, projection_dim=WIDTH, hidden_size=WIDTH)  # fmt: skip
    types = torch.ones(2, LENGTH, dtype=torch.int64)
    batch = _labelled(16, pixel_values=_pixels(2, 3, 56, 56), token_type_ids=types)
    return PaliGemmaForConditionalGeneration(config), batch


def _idefics3() -> tuple[nn.Module, Batch]:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig

    config = Idefics3Config(text_config=LlamaConfig(**TEXT), vision_config=VISION, image_token_id=IMAGE, scale_factor=2)
    return Idefics3ForConditionalGeneration(config), _labelled(4, pixel_values=_pixels(2, 1, 3, 56, 56))


def _qwen_vl(version: str) -> tuple[nn.Module, Batch]:
    import transformers

    text = TEXT | {"rope_parameters": MULTIMODAL_ROPE}
    tokens = {"image_token_id": IMAGE, "vision_start_token_id": 101, "vision_end_token_id": 102, "video_token_id": 103}
    if version == "2":
        vision = {"depth": 2, "embed_dim": WIDTH, "hidden_size": WIDTH, "num_heads": 4, "patch_size": 14}
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
        model: nn.Module = transformers.Qwen2VLForConditionalGeneration(config)
    else:
        vision = {"depth": 2, "hidden_size": WIDTH, "intermediate_size": INNER, "out_hidden_size": WIDTH,
                  "num_heads": 4, "patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56}  # fmt: skip
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    batch = _labelled(16, pixel_values=_pixels(2 * 64, 3 * 2 * 14 * 14), image_grid_thw=torch.tensor([[1, 8, 8]] * 2))
    batch["input_ids"][:, 3] = 101
    return model, batch | {"mm_token_type_ids": (batch["input_ids"] == IMAGE).long()}


def _encoder() -> tuple[nn.Module, Batch]:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, INNER, dropout=0, batch_first=True, activation=nn.GELU())
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), {"src": _pixels(2, LENGTH, WIDTH)}


DEEPSEEK = {"moe_intermediate_size": WIDTH, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
            "num_experts_per_tok": 2, "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 1}  # fmt: skip
FAMILIES: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "GPT-2": lambda: _language("gpt2", n_embd=WIDTH, n_layer=2, n_head=4, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0),
    "Llama": lambda: _language("llama"),
    "Qwen3": lambda: _language("qwen3", head_dim=32),
    "Gemma 2": lambda: _language("gemma2", head_dim=32),
    "Phi-3": lambda: _language("phi3"),
    "Mixtral": lambda: _language("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "DeepSeek-V3": lambda: _language("deepseek_v3", **DEEPSEEK),
    "Mamba": lambda: _language("mamba", state_size=8),
    "BERT": _bert,
    "T5": lambda: _t5("relu"),
    "T5 1.1": lambda: _t5("gated-gelu"),
    "Whisper": _whisper,
    "ViT": lambda: _images("vit"),
    "SigLIP": lambda: _images("siglip_vision_model"),
    "LLaVA": _llava,
    "PaliGemma": _paligemma,
    "Idefics3": _idefics3,
    "Qwen2-VL": lambda: _qwen_vl("2"),
    "Qwen2.5-VL": lambda: _qwen_vl("2.5"),
    "nn.TransformerEncoder": _encoder,
}

OPT = {"ffn_dim": INNER, "word_embed_proj_dim": WIDTH, "dropout": 0, "attention_dropout": 0}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
PRODUCTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama with relu": ("llama", {"hidden_act": "relu"}),
    "OPT, relu": ("opt", OPT),
    "OPT with gelu": ("opt", OPT | {"activation_function": "gelu"}),
    "BitNet, relu²": ("bitnet", {}),
    "BitNet with silu": ("bitnet", {"hidden_act": "silu"}),
    "Mixtral": ("mixtral", EXPERTS),
    "FlexOlmo": ("flex_olmo", EXPERTS),
}
"""Types of Transformers and fields of their configurations."""


def products(name: str) -> str:
    """A row of gradients in bf16 and with FP8 products beside fp32's, and the tokens that go to other experts."""
    torch.manual_seed(0)
    kind, fields = PRODUCTS[name]
    model, batch = _language(kind, **fields)
    grads, routes = _routed_step(model, batch)
    row = [name]
    changed = []
    for recipe in (None, "rowwise"):
        other = copy.deepcopy(model).bfloat16()
        other = octavo.convert(other, recipe, verbose=False) if recipe else other
        its_grads, its_routes = _routed_step(other, batch)
        flat = [torch.cat([each[n].flatten().double() for n in grads]) for each in (grads, its_grads)]
        row.append(f"{sqnr(*flat):.1f}")
        pairs = zip(routes, its_routes, strict=True)
        changed.append(", ".join(f"{float((one != two).any(-1).double().mean()):.1%}" for one, two in pairs) or "–")
    return f"| {' | '.join([*row, *changed])} |"


def _routed_step(model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Gradients, and for each router the experts of each token, in order."""
    routes: list[Tensor] = []

    def keep(_: nn.Module, __: Any, outputs: tuple[Tensor, ...]) -> None:
        routes.extend(each.sort(-1).values for each in outputs if not each.is_floating_point())

    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    hooks = [module.register_forward_hook(keep) for module in routers]
    _, grads, _ = _step(model.train(), batch)
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    return grads, routes


def measured(name: str, dtype: torch.dtype = torch.bfloat16) -> FamilyResult:
    """Train a family for one step, as it is and with FP8 activations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Transformers, about configurations that are small
        torch.manual_seed(0)
        model, batch = FAMILIES[name]()
        model.to(dtype).train()
        batch = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}
        storing = octavo.convert(copy.deepcopy(model), precision=FP8_ACTIVATIONS, verbose=False)
        y, expected, plain = _step(model, batch)
        stored_y, actual, stored = _step(storing, batch)
    largest = max(float(g.norm()) for g in expected.values())
    each = [sqnr(g, actual[n]) for n, g in expected.items() if g.norm() > 1e-3 * largest]
    flat = [torch.cat([grads[n].flatten().double() for n in expected]) for grads in (expected, actual)]
    tokens = batch.get("input_ids", batch.get("labels", next(iter(batch.values()))))
    count = tokens.numel() if not tokens.is_floating_point() else tokens.shape[0] * 17
    count = tokens.shape[0] * tokens.shape[1] if name == "nn.TransformerEncoder" else count
    return FamilyResult(plain=plain / count, stored=stored / count, whole=sqnr(*flat), worst=min(each),
                 bitwise=torch.equal(y, stored_y))  # fmt: skip


def _step(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor], int]:
    """Output, gradients and bytes kept."""
    torch.manual_seed(0)
    with saved_for_backward(model) as kept:
        output = model(**batch)
    loss = getattr(output, "loss", None)
    y = loss if loss is not None else output if isinstance(output, Tensor) else output[0]
    y.backward(None if y.ndim == 0 else torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y))
    return y.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, kept.bytes


def table(names: Sequence[str]) -> Iterator[str]:
    """The rows of the document's table."""
    yield "| family | bf16 bytes per token | Octavo | ratio | SQNR of all gradients | SQNR of the worst gradient |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name in names:
        one = measured(name)
        if not one.bitwise:
            raise AssertionError(f"{name}: the forward is another one")
        yield (
            f"| {name} | {one.plain:,.0f} | {one.stored:,.0f} | {one.stored / one.plain:.2f} | {one.whole:.0f} dB | "
            f"{one.worst:.0f} dB |"
        )


def table_of_products() -> Iterator[str]:
    """The rows of the table of FP8 products."""
    yield "| model | bf16, dB | FP8, dB | tokens that change experts, by layer: bf16 | FP8 |"
    yield "|---|---:|---:|---:|---:|"
    yield from map(products, PRODUCTS)


def main(arguments: list[str]) -> None:
    """Print the table; with all families, write it into the document."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks families", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=FAMILIES, help="families; the document stays as it is")
    parser.add_argument("--products", action="store_true", help="gradients of FP8 products, into docs/numerics.md")
    options = parser.parse_args(arguments)
    document, mark = (DOCS / "numerics.md", "products") if options.products else (DOCS / "memory.md", "families")
    rows = []
    for row in table_of_products() if options.products else table(options.only or list(FAMILIES)):
        print(row, flush=True)
        rows.append(row)
    if options.products or options.only is None:
        begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
        lines = begin + "\n".join(rows) + "\n" + end
        write_text(document, re.sub(f"{begin}.*?{end}", lambda _: lines, document.read_text(), flags=re.S))
        print(f"written: {document.name}")
