"""A plan and its run compute the same loss, chunked or from whole logits, for every type of model."""

import warnings

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.nn.causal import decide_head, find_head
from octavo.planner.fake import fake_device, fake_tensors
from octavo.planner.few_blocks import copy_with_blocks

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 2, "d_model": 32,
    "n_layers": 3, "n_heads": 2, "decoder_layers": 3, "encoder_layers": 1, "decoder_attention_heads": 2,
    "encoder_attention_heads": 2, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64, "max_position_embeddings": 64,
    "n_positions": 64, "state_size": 8, "ffn_dim": 64, "num_experts": 2, "num_local_experts": 2, "n_groups": 1,
    "is_decoder": True, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
OWN = {
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "chunk_size": 16},
    "flint": {"num_experts_per_tok": 2},
}
DIFFERENT = ("bart", "bert", "biogpt", "falcon_mamba", "mamba2", "minicpm3")
"""Types whose copies of fake tensors cannot find their head by themselves."""
LARGEST = 50_000_000
"""Parameters of the largest model that is built with weights."""


def outcome(model):
    try:
        head = find_head(model)
    except Exception as error:
        return str(error)
    return head.scale, head.softcap, head.routed


def decisions(kind):
    """What a run decides, and what its plan does; skips types that are not built small."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            text = CONFIG_MAPPING[kind]().get_text_config()
            config = CONFIG_MAPPING[kind](**{k: v for k, v in (SMALL | OWN.get(kind, {})).items() if hasattr(text, k)})
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        except Exception as error:
            pytest.skip(f"{kind} is not built so small: {error}")
        if sum(p.numel() for p in model.parameters()) > LARGEST:
            pytest.skip(f"{kind} is too large")
        layers = len(list(model.modules()))
        decide_head(model)
        assert len(list(model.modules())) == layers
        with fake_tensors("cuda") as mode:
            planned = outcome(copy_with_blocks(model, {}, mode, fake_device(torch.device("cuda"))))
        return outcome(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)), planned


@pytest.mark.parametrize("kind", [*DIFFERENT, "llama", "gemma2", "granite"])
def test_a_plan_decides_as_its_run(kind):
    run, plan = decisions(kind)
    assert plan == run
    assert isinstance(run, tuple) == (kind in ("llama", "gemma2", "granite", "biogpt"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*DIFFERENT}))
def test_every_type(kind):
    run, plan = decisions(kind)
    assert plan == run


@pytest.mark.slow
def test_experts_do_not_keep_a_plan_from_chunks():
    """The router's loss does not run on meta, nor experts of the size of Mixtral's on stand-ins for their weights."""
    config = CONFIG_MAPPING["mixtral"](num_hidden_layers=4, output_router_logits=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    decide_head(model)
    with fake_tensors("cuda") as mode:
        assert outcome(copy_with_blocks(model, {}, mode, fake_device(torch.device("cuda")))) == (1.0, None, True)
    assert len(model.model.layers) == 4 and not any("forward" in vars(module) for module in model.modules())
