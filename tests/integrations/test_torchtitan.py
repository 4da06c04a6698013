"""torchtitan's configs converted to FP8: what is converted, copies, LoRA, settings, and 50 steps of its Trainer."""

import copy
import signal
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
with warnings.catch_warnings():  # it imports Inductor
    warnings.simplefilter("ignore")
    import torchtitan.trainer

from torchtitan.components.lora import LoRAConverter
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.deepseek_v3 import model_registry as deepseek
from torchtitan.models.llama3 import model_registry as llama

import octavo
from octavo.integrations.torchtitan import Fp8Converter
from octavo.numerics import sqnr
from support.tool_loops import run_script
from tensors import same

SCRIPT = Path(__file__).parent / "titan_run.py"
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")


def built(registry, *converters):
    with torch.device("meta"):
        return registry("debugmodel", converters=list(converters)).model.build()


def in_fp8(model):
    return {name for name, module in model.named_modules() if isinstance(module, octavo.nn.LinearLike)}


def test_linears_of_a_config_are_built_in_fp8():
    plain, model = built(llama), built(llama, Fp8Converter.Config(recipe="mxfp8", skip_last=1, skip=["*.wo"]))
    names = in_fp8(model)
    assert "layers.0.feed_forward.w1" in names and "lm_head" not in names
    assert not any(name.startswith("layers.5.") or name.endswith(".wo") for name in names) and len(names) == 5 * 4
    assert {model.get_submodule(name).recipe.name for name in names} == {"mxfp8"}
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in plain.state_dict().items()}
    model.verify_module_protocol()
    linear = model.layers["0"].feed_forward.w1
    assert linear._param_init is not None and "recipe=mxfp8" in repr(linear)


def test_the_converter_is_one_of_torchtitans_quantizations():
    assert issubclass(Fp8Converter.Config, QuantizationConverter.Config)
    with pytest.raises(ValueError, match="must be applied before"):
        built(llama, LoRAConverter.Config(target_modules=["wo"]), Fp8Converter.Config())


def layer(*converters):
    linear = llama("debugmodel", converters=list(converters)).model.layers[0].feed_forward.w1.build()
    torch.manual_seed(0)
    torch.nn.init.normal_(linear.weight)
    return linear


def test_a_layer_computes_as_one_that_octavo_converted():
    x = torch.randn(8, 256, dtype=torch.bfloat16)
    results = []
    for linear in (octavo.convert(layer(), "rowwise", verbose=False), layer(Fp8Converter.Config())):
        linear.bfloat16()
        y = linear(x)
        y.square().sum().backward()
        results.append((y, linear.weight.grad))
    assert same(*results)


def test_lora_adds_to_fp8_linears_and_copies_keep_it():
    model = built(llama, Fp8Converter.Config(), LoRAConverter.Config(rank=4, target_modules=["wo"]))
    lora = model.layers["0"].attention.wo
    assert isinstance(lora, octavo.nn.LinearLike) and type(lora).__name__ == "LoRAFp8Linear"
    assert not lora.weight.requires_grad and lora.lora_b.weight.requires_grad
    lora.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in lora.parameters():
            torch.nn.init.normal_(parameter)
    x = torch.randn(4, 256)
    base = octavo.nn.linear(x, lora.weight, None, octavo.RECIPES["rowwise"])
    expected = base + lora._lora_scaling * lora.lora_b(lora.lora_a(x))
    for each in (lora, copy.deepcopy(lora)):  # pipelines copy models
        assert torch.equal(each(x), expected)


def experts_of(*converters):
    spec = deepseek("debugmodel", converters=list(converters))
    torch.manual_seed(0)
    experts = spec.model.layers[1].moe.routed_experts.inner_experts.build()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return experts


def test_experts_compute_in_fp8():
    exact, fp8 = experts_of(), experts_of(Fp8Converter.Config())
    assert "recipe=rowwise" in repr(fp8) and isinstance(fp8, GroupedExperts)
    x = torch.randn(24, exact.w1_EFD.shape[2], dtype=torch.bfloat16)
    counts = torch.tensor([5, 0, 7, 3, 1, 0, 8, 0])
    results = []
    for experts in (exact, fp8, copy.deepcopy(fp8)):
        y = experts(x.clone(), counts)
        y.float().square().sum().backward()
        results.append((y.detach(), experts.w1_EFD.grad, experts.w2_EDF.grad, experts.w3_EFD.grad))
    for own, reference, copied in zip(results[1], results[0], results[2], strict=True):
        assert 20 < sqnr(reference.float(), own.float()) < 40
        assert torch.equal(own, copied)
    with octavo.disabled():
        assert sqnr(results[0][0].float(), fp8(x, counts).float()) > 45


def test_filters_select_experts():
    def modules(**settings):
        model = built(deepseek, Fp8Converter.Config(**settings))
        return {int(name.split(".")[1]) for name, m in model.named_modules() if type(m).__name__ == "Fp8GroupedExperts"}

    assert modules() == {1, 2, 3, 4, 5}
    assert modules(skip_last=1, skip=["layers.2.moe"]) == {1, 3, 4}
    assert modules(experts=False) == modules(min_features=257) == set()


def test_linears_with_a_forward_of_their_own_stay(caplog):
    spec = llama("debugmodel")
    attention = spec.model.layers[0].attention
    old = attention.wo
    attention.wo = ScaledBiasRowwiseLinear.Config(in_features=old.in_features, out_features=old.out_features, bias=True)
    with caplog.at_level("INFO"):
        model = Fp8Converter.Config().build().convert(spec.model).build()
    assert "layers.0.attention.wo" not in in_fp8(model)
    assert "layers.0.attention.wo: " in caplog.text and "behaviour of its own" in caplog.text
    assert "lm_head: vocabulary head" in caplog.text


def test_the_command_line_converts_without_code():
    spec = llama("debugmodel")
    target = "octavo.integrations.torchtitan.fp8"
    config = torchtitan.trainer.Trainer.Config(
        model_spec=spec, override=OverrideConfig(imports=[(target, {"recipe": "blockwise"})])
    )
    lines = apply_overrides(config.override, config)
    with torch.device("meta"):
        names = in_fp8(spec.model.build())
    assert len(names) == 30 and len(lines) == 1
    config = torchtitan.trainer.Trainer.Config(model_spec=llama("debugmodel"))
    with pytest.raises(TypeError, match="unexpected keyword argument .recipee."):
        apply_overrides(OverrideConfig(imports=[(target, {"recipee": "blockwise"})]), config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "rowwize"}, "did you mean 'rowwise'"),
        ({"recipe": "rowwise_equalized"}, "torchtitan's checkpoints would lose: use 'rowwise'"),
        ({"skip_last": -1}, "skip_last is 0 or more"),
        ({"skip": ["*"]}, "no layer would be converted"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        built(llama, Fp8Converter.Config(**settings))


def run(loop, folder, kill_at=0):
    return run_script(SCRIPT, folder, loop, folder, kill_at)


@pytest.mark.slow
def test_fifty_steps_are_those_of_a_plain_loop_also_after_sigkill(tmp_path):
    code, before, weights = run("titan", tmp_path, kill_at=37)
    assert code == -signal.SIGKILL and len(before) == 37 and weights is None
    code, after, weights = run("titan", tmp_path)
    assert code == 0 and sorted(after) == list(range(31, 51))
    _, expected, expected_weights = run("plain", tmp_path)
    assert before == {step: expected[step] for step in range(1, 38)} and before | after == expected
    assert weights == expected_weights and expected[50] < expected[1] / 2


@pytest.mark.slow
def test_compiled_blocks_train_as_eager_ones_in_torchtitans_own_order(tmp_path):
    eager, compiled = (run(loop, tmp_path / loop)[1] for loop in ("titan", "compiled"))
    assert compiled == eager and len(eager) == 50
