"""PEFT's adapters on a mixture whose experts are resident in FP8: of the experts themselves, and beside them."""

import copy

import pytest
import torch
from torch import nn

import octavo
from octavo.numerics.error import sqnr
from support.moe_models import mixture

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


def choices(model):
    """Record the experts that routers choose, in no order."""
    record = {}
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            hook = lambda _, inputs, outputs, name=name: record.__setitem__(name, outputs[2].sort(-1)[0])  # noqa: E731
            module.register_forward_hook(hook)
    return record


def adapter_gradients(model):
    model.zero_grad()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return torch.cat([p.grad.flatten().float() for n, p in sorted(model.named_parameters()) if p.grad is not None])


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_adapters_of_expert_parameters_compute_in_high_precision(family):
    """Their sum with the FP8 values is no FP8 matrix: rounding it again would drop most of a small adapter."""
    model = with_expert_adapters(family)
    expected = adapter_gradients(octavo.revert(copy.deepcopy(model)))
    assert len(expected) and sqnr(expected, adapter_gradients(model)) >= 28
    with model.disable_adapter():  # FP8 products again, of the bytes
        logits = model(input_ids=TOKENS).logits
    alone = resident(mixture(family, hidden_size=128, intermediate_size=256).bfloat16())
    assert torch.equal(logits, alone(input_ids=TOKENS).logits)


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
    reference = octavo.revert(copy.deepcopy(model))
    expected_choices, own = choices(reference), choices(model)
    level = sqnr(adapter_gradients(reference), adapter_gradients(model))
    changed = sum(int((own[n] != expected_choices[n]).any(-1).sum()) for n in own)
    print(f"{name}: {level:.1f} dB, {changed} of 48 tokens change an expert")
    assert len(own) == 2 and level >= (24 if changed else 28)  # a token that changes an expert costs more than rounding


UNSUPPORTED = {
    "LoRA": lambda: peft.LoraConfig(target_modules=["experts"]),
    "IA3": lambda: peft.IA3Config(target_modules=["experts"], feedforward_modules=[]),
    "DoRA": lambda: peft.LoraConfig(use_dora=True, target_modules=[], target_parameters=["mlp.experts.down_proj"]),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_adapters_that_peft_has_not_for_experts_raise(name):
    model = resident(mixture("mixtral"))
    before = names_and_bits(model)
    message = "does not work with use_dora" if name == "DoRA" else "Target module MixtralExperts.*is not supported"
    with pytest.raises(ValueError, match=f"(?s){message}"):
        peft.get_peft_model(model, UNSUPPORTED[name]())
    if name != "DoRA":
        assert before.keys() == names_and_bits(model).keys()
