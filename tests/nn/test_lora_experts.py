"""PEFT's adapters on a mixture whose experts are resident in FP8: of the experts themselves, and beside them."""

import copy

import pytest
import torch
from moe_models import mixture
from torch import nn

import octavo
from octavo.numerics.error import sqnr

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),  # PEFT asks Transformers for it
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),  # PEFT's own patterns
    pytest.mark.filterwarnings("ignore:.*reads a weight that is resident in FP8"),  # PEFT's sum, and DoRA's norms
]
TOKENS = torch.arange(24).view(2, 12) % 64


def resident(model, **options):
    return octavo.convert(model, "rowwise", frozen="fp8", verbose=False, **options)


def names_and_bits(model):
    return {k: v.view(torch.uint8).clone() if v.element_size() == 1 else v for k, v in model.state_dict().items()}


def with_expert_adapters(family, **options):
    """A mixture whose experts have adapters of PEFT, which are added to the values of all experts in each forward."""
    model = resident(mixture(family, hidden_size=128, intermediate_size=256).bfloat16(), **options)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=names))
    torch.manual_seed(2)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(parameter, std=0.02)
    return model


def choices(model, forced=None):
    """Record the experts that routers choose; or replace them by those of another model, with the own weights."""
    record = {}
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):

            def hook(module, inputs, outputs, name=name):
                record[name] = outputs[2]
                if forced is None:
                    return None
                weights = outputs[0].float().softmax(-1).gather(-1, forced[name])
                return outputs[0], (weights / weights.sum(-1, keepdim=True)).to(outputs[1].dtype), forced[name]

            module.register_forward_hook(hook)
    return record


def adapter_gradients(model):
    model.zero_grad()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return torch.cat([p.grad.flatten().float() for n, p in sorted(model.named_parameters()) if p.grad is not None])


def test_adapters_of_expert_parameters_lose_by_tokens_that_change_their_expert():
    """22 dB as long as routers choose the same experts; a token that changes its expert costs 10 dB of so few."""
    model = with_expert_adapters("mixtral")
    reference = octavo.revert(copy.deepcopy(model))
    expected_choices = choices(reference)
    expected, forced = adapter_gradients(reference), copy.deepcopy(model)
    own = choices(model)
    free = sqnr(expected, adapter_gradients(model))
    changed = sum(int((own[n].sort()[0] != expected_choices[n].sort()[0]).any(-1).sum()) for n in own)
    assert changed >= 1 and free > 10  # of 48
    choices(forced, expected_choices)
    assert sqnr(expected, adapter_gradients(forced)) >= 22 > free + 5


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_adapters_of_expert_parameters_are_exact_with_weight_only(family):
    model = with_expert_adapters(family, weight_only=["*"])
    expected = adapter_gradients(octavo.revert(copy.deepcopy(model)))
    assert len(expected) and sqnr(expected, adapter_gradients(model)) >= 28


ADAPTERS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "rslora": lambda: peft.LoraConfig(r=4, use_rslora=True, target_modules="all-linear"),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "v_proj"]),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[]),
}


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_beside_resident_experts(name, order):
    model = mixture("mixtral", hidden_size=128, intermediate_size=256).bfloat16()
    model = resident(model) if order == "before" else model
    model = peft.get_peft_model(model, ADAPTERS[name]())
    model = resident(model) if order == "after" else model
    assert sum(row.experts and row.resident_bytes > 0 for row in octavo.report(model)) == 2
    assert sqnr(adapter_gradients(octavo.revert(copy.deepcopy(model))), adapter_gradients(model)) > 10


UNSUPPORTED = {
    "LoRA": lambda: peft.LoraConfig(target_modules=["experts"]),
    "IA3": lambda: peft.IA3Config(target_modules=["experts"], feedforward_modules=[]),
    "DoRA": lambda: peft.LoraConfig(use_dora=True, target_modules=[], target_parameters=["mlp.experts.down_proj"]),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_adapters_that_peft_has_not_for_experts_raise(name):
    model = resident(mixture("mixtral"))
    before = names_and_bits(model)
    message = "does not work with use_dora" if name == "DoRA" else "Target module FP8MixtralExperts.*is not supported"
    with pytest.raises(ValueError, match=f"(?s){message}"):
        peft.get_peft_model(model, UNSUPPORTED[name]())
    if name != "DoRA":
        assert before.keys() == names_and_bits(model).keys()
