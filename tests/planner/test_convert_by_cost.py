"""octavo.convert: by cost where a GPU is present, as told elsewhere."""

import warnings

import pytest
import torch
from models import llama
from torch import nn

import octavo
from octavo import Precision
from octavo.nn import apply_plan, filters, rule_plan
from octavo.planner import auto_convert

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def gpu(monkeypatch):
    """Makes this machine say that it has a GPU."""

    def present(name=H100):
        monkeypatch.setattr(auto_convert, "local_gpu_name", lambda: name)

    present()
    return present


def wide(**sizes):
    with torch.device("meta"):
        usual = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 2}
        return llama(**usual | {"num_hidden_layers": 2, "vocab_size": 1000} | sizes).bfloat16()


def converted(model):
    return {row.name for row in octavo.report(model) if row.converted}


def test_without_a_gpu_the_rules_decide():
    ours, theirs = llama(), llama()
    assert auto_convert.local_gpu_name() is None or torch.cuda.is_available()
    octavo.convert(ours, verbose=False)
    apply_plan(theirs, rule_plan(theirs))
    assert ours.octavo_plan == theirs.octavo_plan and converted(ours)


def test_a_gpu_that_is_elsewhere_decides_as_one_that_is_here(gpu):
    here, elsewhere = octavo.convert(wide(), verbose=False), wide()
    gpu(None)
    octavo.convert(elsewhere, device="h100", verbose=False)
    assert elsewhere.octavo_plan == here.octavo_plan
    assert converted(octavo.convert(wide(), verbose=False)) != converted(here)


def test_the_cpu_decides_by_rule_beside_a_gpu(gpu):
    rule = wide()
    apply_plan(rule, rule_plan(rule))
    assert octavo.convert(wide(), device="cpu", verbose=False).octavo_plan == rule.octavo_plan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "h1000"}, "h100"),
        ({"device": "h100", "recipe": "rowwise"}, "device decides which layers gain"),
        ({"device": "h100", "precision": Precision(matmul="bf16", activations="fp8")}, "no FP8 products"),
        ({"device": "h100", "plan": octavo.Plan({})}, "plan replaces"),
        ({"device": "cuda"}, "names no GPU"),
        ({"device": torch.device("cuda", 1)}, "names no GPU"),
        ({"device": torch.device("cpu")}, "names no GPU"),
    ],
)
def test_a_device_that_cannot_decide_raises(arguments, message):
    model = wide()
    with pytest.raises(ValueError, match=message):
        octavo.convert(model, **arguments)
    assert not converted(model) and not hasattr(model, "octavo_plan")


def test_what_gains_is_converted_and_the_reason_says_by_how_much(gpu):
    model = octavo.convert(wide(), verbose=False)
    rows = {row.name: row for row in octavo.report(model)}
    up, narrow = rows["model.layers.0.mlp.up_proj"], rows["model.layers.0.self_attn.k_proj"]
    assert up.converted and "8192×2048×8192" in up.reason and "8192 tokens assumed on H100 SXM" in up.reason
    assert not narrow.converted and "would be" in narrow.reason and "narrow (256)" in narrow.reason
    assert rows["lm_head"].reason.startswith("vocabulary head") and "; by cost: " in rows["lm_head"].reason
    assert all(decision.gain is not None for decision in model.octavo_plan.decisions.values())


def test_tokens_decide(gpu):
    many = converted(octavo.convert(wide(), tokens=65536, verbose=False))
    with pytest.warns(UserWarning, match="with 256 tokens"):
        few = converted(octavo.convert(wide(), tokens=256, verbose=False))
    assert many and not few
    for tokens in (0, 1.5, "8", True, None):
        with pytest.raises(ValueError, match=f"tokens is an integer of 1 or more; got {tokens!r}"):
            octavo.convert(wide(), tokens=tokens)


def test_a_model_of_which_nothing_gains_is_left_with_a_warning(gpu):
    model = llama()
    with pytest.warns(UserWarning, match=f"no layer of this model is predicted to gain from FP8 on {H100}"):
        octavo.convert(model, verbose=False)
    assert not converted(model) and "would be 0." in octavo.report(model)[0].reason
    octavo.revert(model)
    octavo.convert(model, "rowwise", verbose=False)
    assert converted(model)


def test_an_unknown_gpu_is_said_and_the_rule_holds(gpu):
    gpu("Some GPU 3000")
    model = octavo.convert(wide(), verbose=False)
    row = octavo.report(model)[0]
    assert row.converted and row.recipe == "rowwise"
    assert "by rule: Some GPU 3000 is not in the table of GPUs" in row.reason


@pytest.mark.parametrize(
    "arguments",
    [{"recipe": r} for r in ("rowwise", "tensorwise", {filters.first(1): "rowwise"})] + [{"precision": Precision()}],
    ids=str,
)
def test_what_is_named_is_done(gpu, arguments):
    named = llama()
    octavo.convert(named, **arguments, verbose=False)
    linears = {name for name, module in llama().named_modules() if type(module) is nn.Linear}
    assert converted(named) == linears - {"lm_head"}


def test_recipe_auto_and_precision_auto_leave_it_to_cost(gpu):
    by_default = converted(octavo.convert(wide(), verbose=False))
    assert converted(octavo.convert(wide(), "auto", verbose=False)) == by_default
    assert converted(octavo.convert(wide(), precision=Precision(recipe="auto"), verbose=False)) == by_default
    last = converted(octavo.convert(wide(), precision=Precision(recipe="auto", skip_last=1), verbose=False))
    assert last == {name for name in by_default if "layers.0" in name}
    with pytest.raises(ValueError, match="precision holds recipe"):
        octavo.convert(wide(), precision=Precision(recipe="auto"), skip=["*"])


def test_a_warning_as_an_error_leaves_the_model_unchanged():
    model = nn.Linear(64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="predicted to gain"):
            octavo.convert(model, device="h100", verbose=False)
    assert "octavo_plan" not in vars(model)


@pytest.mark.parametrize("name", [H100, "some GPU"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_without_a_layer_to_convert_it_raises_wherever_it_runs(gpu, name, device):
    """Not the warning that no layer gains, which advises a call that raises."""
    gpu(name)
    model = nn.Sequential(nn.ReLU())
    with pytest.raises(ValueError, match=r"no layer would be converted.*no nn\.Linear"):
        octavo.convert(model, device=device, verbose=False)
    wide_model = wide()
    with pytest.raises(ValueError, match="no layer would be converted"):
        octavo.convert(wide_model, filter=lambda module, fqn: False, device=device, verbose=False)
    assert not hasattr(model, "octavo_plan") and not hasattr(wide_model, "octavo_plan")
