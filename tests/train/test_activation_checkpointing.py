import pytest
import tiny_runs
import torch
from tiny_runs import GPT2, LLAMA
from torch import nn

from live_tensors import bytes_left_by
from octavo.train.compiled_blocks import Checkpointing, find_blocks
from octavo.train.config.run_config import ConfigError
from support.dispatch_modes import Passing


def make_trainer(make_config, mode, **precision):
    model = precision.pop("model", {"type": "llama", "config": LLAMA})
    config = make_config(model=model, precision={"checkpointing": mode} | precision)
    return tiny_runs.make_trainer(config)


def gradients(trainer):
    trainer.model.zero_grad()
    torch.manual_seed(0)
    trainer.loss(*trainer._batch(0)).backward()
    return {name: param.grad for name, param in trainer.model.named_parameters() if param.grad is not None}


PRECISIONS = [{}, {"parameters": "fp32"}, {"level": "fp8"}, {"level": "fp8", "recipe": "rowwise_hp_wgrad"}]
PRECISIONS += [{"model": GPT2}]  # dropout: the recomputation has to draw the same


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_gradients_are_bitwise_those_without(mode, precision, make_config):
    plain = gradients(make_trainer(make_config, "none", **precision))
    recomputed = gradients(make_trainer(make_config, mode, **precision))
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


@pytest.mark.parametrize("level", ["bf16", "fp8"])
def test_less_is_kept(level, make_config):
    kept = {
        mode: make_trainer(make_config, mode, level=level)._saved_bytes_per_token()
        for mode in ("none", "full", "selective")
    }
    # The head's logits and their softmax are kept in every mode.
    head = 300 * 4
    assert kept["full"] - head < 0.25 * (kept["none"] - head)
    assert kept["full"] < kept["selective"] < kept["none"]


@pytest.mark.parametrize("level", ["bf16", "fp8+activations+optimizer"])
def test_a_description_leaves_nothing_alive(level, make_config):
    for mode in ("none", "full", "selective"):
        trainer = make_trainer(make_config, mode, level=level)
        trainer.describe()  # caches
        assert bytes_left_by(trainer.describe) == 0, mode


def test_selective_recomputes_no_matrix_product(make_config):
    products, counts = (torch.ops.aten.mm.default, torch.ops.octavo.scaled_mm.default), {}
    for mode in ("none", "full", "selective"):
        for level in ("bf16", "fp8"):
            trainer = make_trainer(make_config, mode, level=level)
            with Passing() as passing:
                gradients(trainer)
            counts[mode, level] = sum(map(passing.seen.count, products))
    for level in ("bf16", "fp8"):
        assert counts["selective", level] == counts["none", level] > 0
        assert counts["full", level] > counts["none", level]


def test_modules_and_state_dict_stay_as_they_are(make_config):
    plain, wrapped = (make_trainer(make_config, mode).model for mode in ("none", "full"))
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in wrapped.named_modules()]
    assert plain.state_dict().keys() == wrapped.state_dict().keys()


def test_find_blocks():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.few = nn.ModuleList(nn.ReLU() for _ in range(2))
            self.mixed = nn.ModuleList([nn.ReLU(), nn.GELU(), nn.ReLU(), nn.GELU()])
            self.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))

    model = Model()
    assert find_blocks(model) == list(model.blocks)
    with pytest.raises(ConfigError, match="Linear has no list of equal blocks"):
        Checkpointing(nn.Linear(1, 1), "full")
