"""Linears of other libraries: each is converted, or left with a reason that says what to do."""

import warnings

import pytest
import torch
from torch import nn

import octavo


def reason_beside_a_linear(module):
    """The reason why a module stays as it is in a model whose other layers are converted."""
    model = nn.Sequential(nn.Linear(128, 128), module, nn.Linear(128, 128))
    before = type(module), dict(vars(module))
    rows = {row.name: row for row in octavo.report(octavo.convert(model, "rowwise", verbose=False))}
    assert rows["0"].converted and rows["2"].converted and type(module) is before[0]
    reasons = [row.reason for name, row in rows.items() if name.split(".")[0] == "1" and not row.converted]
    return "; ".join(reasons)


def test_layers_of_torch_ao():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import get_default_qat_qconfig

        aware = torch.ao.nn.qat.Linear(128, 128, qconfig=get_default_qat_qconfig())
    assert "quantizes its weight (torch.ao)" in reason_beside_a_linear(aware)
    assert "convert the model before" in reason_beside_a_linear(aware)


def test_packed_weights():
    class Packed(nn.Linear):
        def forward(self, x):
            return x @ self.weight.float().T

    packed = Packed(128, 128, bias=False)
    packed.weight = nn.Parameter(torch.zeros(128, 128, dtype=torch.int8), requires_grad=False)
    reason = reason_beside_a_linear(packed)
    assert "its weight is quantized (Packed)" in reason and "frozen='fp8'" in reason


@pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt"])
@pytest.mark.filterwarnings("ignore")
def test_layers_of_bitsandbytes(kind):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    layer = getattr(bitsandbytes.nn, kind)(128, 128)
    reason = reason_beside_a_linear(layer)
    assert "its weight is quantized" in reason and "load the model without quantization" in reason


def test_attention_of_torch_reads_the_weight_of_its_linear():
    assert "nn.MultiheadAttention reads its weight" in reason_beside_a_linear(nn.MultiheadAttention(128, 2))


SMALL = {
    "DiTTransformer2DModel": {
        "num_attention_heads": 2, "attention_head_dim": 64, "num_layers": 1, "sample_size": 8, "in_channels": 4,
    },
    "FluxTransformer2DModel": {
        "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 64, "num_attention_heads": 2,
        "joint_attention_dim": 128, "pooled_projection_dim": 128, "axes_dims_rope": (16, 24, 24),
    },
    "SD3Transformer2DModel": {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 1, "attention_head_dim": 64,
        "num_attention_heads": 2, "joint_attention_dim": 128, "caption_projection_dim": 128,
        "pooled_projection_dim": 128, "out_channels": 4,
    },
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.filterwarnings("ignore")
def test_transformers_of_diffusers(kind):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    model = getattr(diffusers, kind)(**SMALL[kind])
    octavo.convert(model, "rowwise", activations="fp8", verbose=False)
    rows = [row for row in octavo.report(model) if row.linear]
    left = {row.reason.split(":")[0] for row in rows if not row.converted}
    assert sum(row.converted for row in rows) >= 8 and left <= {"narrow"}
