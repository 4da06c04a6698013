"""What is kept for backward: counted once by storage, with its owner and the operation that saved it."""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from models import MLP, llama
from test_composition import saving
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from live_tensors import bytes_left_by
from octavo.nn.memory_audit import audit, saved_for_backward
from octavo.planner.fake import fake_copy, fake_tensors
from support.moe_models import Checkpointed

SELECTIVE = saving([torch.ops.aten.mm.default])
IDS = {"input_ids": torch.zeros(2, 16, dtype=torch.int64), "use_cache": False}


def test_every_storage_of_a_small_model():
    model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2))
    saved = audit(model, torch.ones(3, 4))
    rows = {(row.bytes, row.dtype, row.shape, row.owner, row.op) for row in saved}
    assert rows == {
        (3 * 4 * 4, torch.float32, (3, 4), "0", "Addmm"),  # the input; weights do not count
        (3 * 8 * 4, torch.float32, (3, 8), "1", "Sigmoid"),  # its output, which is also the input of 2
    }
    assert [row.bytes for row in saved] == [96, 48]
    assert audit(model, torch.ones(3, 4)).by_owner == {"1": 96, "0": 48}


@pytest.mark.parametrize("level", ["bf16", "fp8", "fp8+activations"])
def test_the_rows_sum_up_to_what_is_kept(level):
    model = llama().bfloat16()
    octavo.convert(model, precision=octavo.Precision.level(level), verbose=False)
    saved = audit(model, IDS)
    with saved_for_backward(model) as counted:
        logits = model(**IDS).logits
    assert saved.bytes == counted.bytes > 0
    assert saved.by_dtype == counted.by_dtype
    assert sum(saved.by_owner.values()) == saved.bytes
    assert all(row.op for row in saved)
    assert set(saved.by_owner) <= set(dict(model.named_modules()))
    assert logits.requires_grad
    assert (torch.float8_e4m3fn in saved.by_dtype) == (level != "bf16")


def test_without_storage_the_same_rows():
    model = llama().bfloat16()
    with fake_tensors() as mode:
        without = audit(fake_copy(model, mode, torch.device("cpu")), IDS)
    assert sorted(map(repr, without)) == sorted(map(repr, audit(model, IDS)))


def test_hooks_do_not_stay_and_a_failing_forward_leaves_none():
    model = MLP()
    audit(model, torch.ones(3, 64))
    with pytest.raises(RuntimeError):
        audit(model, torch.ones(3, 65))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert audit(model, torch.ones(3, 64)).by_owner.keys() == {"", "down_proj", "gate_proj"}


def test_a_checkpointed_block_keeps_its_input_alone():
    saved = audit(Checkpointed(MLP(), False), (torch.ones(3, 64, requires_grad=True) * 1,))
    assert [(row.bytes, row.owner) for row in saved] == [(3 * 64 * 4, "")]


def test_a_loss_of_ones_own():
    model = MLP()
    saved = audit(model, torch.ones(3, 64), loss=lambda m, x: m(x).square().sum())
    assert saved.bytes == audit(model, torch.ones(3, 64)).bytes + 3 * 64 * 4


def test_the_report_shows_what_each_layer_keeps():
    model = octavo.convert(llama(num_hidden_layers=4).bfloat16(), verbose=False)
    report = octavo.report(model, IDS)
    assert report.saved_bytes == audit(model, IDS).by_owner
    size = 4 * report.saved_bytes["model.layers.0.mlp.down_proj"]
    assert f"{size:,}  model.layers.{{0-3}}.mlp.down_proj" in str(report)
    assert "bytes saved" not in str(octavo.report(model))


def test_selective_checkpointing_does_not_take_the_count_for_hooks_of_the_user():
    """torch 2.14 warns of those, as it is to pass what it holds through them."""
    model = MLP()
    with saved_for_backward(model) as counted:
        SELECTIVE(model, torch.ones(3, 64, requires_grad=True) * 1)
    assert counted.bytes == 3 * 64 * 4


class SavesOutputs(nn.Module):
    """A block of operations that save their own output."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out, self.gate = nn.RMSNorm(64), nn.Linear(64, 192), nn.Linear(64, 64), MLP()

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True) + torch.softmax(q @ k.mT, -1) @ v
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.gate(x)
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)
        return x + torch.tanh(h) * torch.sigmoid(h) + torch.exp(-h.square()) + F.relu(h)


@pytest.mark.parametrize("level", ["fp8", "fp8+activations"])
def test_a_dropped_graph_leaves_nothing(level):
    model = octavo.convert(nn.Sequential(SavesOutputs(), SavesOutputs()).bfloat16(),
                           precision=octavo.Precision.level(level), verbose=False)  # fmt: skip
    x = torch.randn(2, 32, 64).bfloat16().requires_grad_()
    forwards = partial(model, x), partial(checkpoint, model, x, use_reentrant=False), partial(SELECTIVE, model, x)

    def measured():
        for forward in forwards:
            with saved_for_backward(model) as counted:
                forward()
            assert counted.bytes >= x.nbytes

    measured()  # caches
    assert bytes_left_by(measured) == 0
    assert bytes_left_by(lambda: [forward() for forward in forwards]) == 0


@pytest.mark.parametrize("level", ["bf16", "fp8+activations"])
def test_a_graph_holds_no_module_that_holds_the_graph(level):
    class Keeps(SavesOutputs):
        def forward(self, x):
            self.output = super().forward(x)
            return self.output

    model = octavo.convert(Keeps().bfloat16(), precision=octavo.Precision.level(level), verbose=False)
    with saved_for_backward(model):
        model(torch.randn(2, 32, 64).bfloat16())
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_storages_that_are_freed_meanwhile_are_told_apart():
    """The next one often has the address of the one before."""
    with saved_for_backward(nn.Identity()) as saved:
        for size in range(1, 65):
            torch.ones(size, requires_grad=True).exp()
    assert [row.shape for row in saved] == [(size,) for size in range(1, 65)]
