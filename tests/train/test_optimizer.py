import copy
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import GROUPS, ONE_BLOCK, recorded, refused_run, rejected, saved
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm

from octavo.train import ConfigError, read_metrics, run
from octavo.train import optimizer as optimizer_module
from octavo.train.checkpoint.export import export
from octavo.train.checkpoint.pretrained import LANGUAGE
from octavo.train.checkpoint.retention import latest_checkpoint
from octavo.train.config.sections import Optim
from octavo.train.model import build_of_kind
from octavo.train.optimizer import MasterWeightOptimizer, decayed_parameters, parameter_settings
from support.dispatch_modes import Passing

OPTIM = Optim(lr=1e-3, weight_decay=0.1, clip=0.0)


def make_model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(dtype)


def make_optimizer(states, model, optim, master):
    if states == "fp8":
        return optimizer_module.Fp8StateOptimizer(model, optim, states="fp8", master=None)
    return MasterWeightOptimizer(model, optim, master=master)


def masters_of(model, optim=OPTIM, **options):
    return MasterWeightOptimizer(model, optim, master=True, **options)


def take(optimizer, lr=1e-3):
    """A step on the gradients that there are, which then are no more."""
    optimizer.accumulate()
    optimizer.step(lr, optimizer.gradient_norm(1.0))
    optimizer.zero_grad()


def backward(model, seed, factor=1.0):
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
    (model(x).float().square().mean() * factor).backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_follow_fp32_adamw_and_parameters_are_rounded_from_them(dtype):
    model, shadow = make_model(dtype), make_model(dtype).float()
    optimizer = masters_of(model)
    groups = [{"params": [p], "weight_decay": 0.1 if p.dim() >= 2 else 0.0} for p in shadow.parameters()]
    reference = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    for step in range(20):
        backward(model, step)
        for param, twin in zip(model.parameters(), shadow.parameters(), strict=True):
            twin.grad = param.grad.float()
        optimizer.accumulate()
        assert all(param.grad is None for param in model.parameters())
        take(optimizer)
        reference.step()
        masters = optimizer.state_dict()["masters"]
        for (name, param), twin in zip(model.named_parameters(), shadow.parameters(), strict=True):
            torch.testing.assert_close(masters[name], twin.detach(), rtol=1e-6, atol=1e-7)
            assert torch.equal(param, masters[name].to(dtype))
            with torch.no_grad():
                twin.copy_(masters[name])


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.ones(4, 2))
        self.gate_up_proj = nn.Parameter(torch.ones(2, 4, 4))
        self.gate_up_proj_bias = nn.Parameter(torch.ones(2, 4))
        self.time_mix = nn.Parameter(torch.ones(1, 1, 4))
        self.marked = nn.Parameter(torch.ones(4, 4))
        self.marked._no_weight_decay = True
        self.norm = CohereLayerNorm((2, 4), bias=True)
        self.embedding = nn.Embedding(4, 4)
        self.out = nn.Linear(4, 1)


@pytest.mark.parametrize("states", ["fp32", "fp8"])
def test_weight_decay_goes_by_what_a_parameter_is(states):
    model = Odd()
    assert decayed_parameters(model) == {"gate_up_proj", "embedding.weight", "out.weight"}
    optimizer = make_optimizer(states, model, Optim(lr=0.1, weight_decay=0.5, clip=0.0), master=True)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step(0.1, optimizer.gradient_norm(1.0))
    moved = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
    assert moved == decayed_parameters(model)


def test_gradients_of_micro_batches_are_added_in_fp32():
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = masters_of(model)
    for part in (1.0, 2.0**-9, 2.0**-9):  # each 2⁻⁹ would be lost beside 1 in bf16
        model.weight.grad = torch.full_like(model.weight, part)
        optimizer.accumulate()
    assert optimizer.gradient_norm(1.0).item() == 1 + 2.0**-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_clipping_is_by_global_norm(dtype):
    model = make_model(dtype)
    optimizer = masters_of(model, Optim(lr=1e-3, clip=0.25))
    backward(model, 0, factor=50.0)
    optimizer.accumulate()
    norm = optimizer.gradient_norm(1.0)
    assert norm > 1
    optimizer.step(1e-3, norm)
    assert optimizer.gradient_norm(1.0).item() == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_one_micro_batch_keeps_its_bf16_gradients(clip):
    """The kernel reads, clips and steps what is added up, multiplied, stepped and rounded otherwise."""
    optim, arms = Optim(lr=1e-2, weight_decay=0.1, clip=clip), {}
    for adds_up in (True, False):
        model = make_model(torch.bfloat16)
        model[2].bias.requires_grad_(False)
        optimizer = masters_of(model, optim, adds_up=adds_up)
        for step in range(20):
            backward(model, step)
            optimizer.accumulate()
            before = [p.grad.clone() for p in model.parameters() if not adds_up and p.requires_grad]
            norm = optimizer.gradient_norm(1.0)
            with Passing() as called:
                optimizer.step(1e-2, norm, norm_value=norm.item())
            if not adds_up:
                assert all(map(torch.equal, before, (p.grad for p in model.parameters() if p.requires_grad)))
                names = {func.overloadpacket.__name__ for func in called.seen}
                assert not {"_foreach_mul_", "_foreach_copy_", "_fused_adamw_"} & names
            optimizer.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        for name, master in optimizer.state_dict()["masters"].items():
            assert torch.equal(model.get_parameter(name), master.bfloat16())
        arms[adds_up] = optimizer.state_dict()
    assert arms[True]["masters"].keys() == arms[False]["masters"].keys()
    for name, master in arms[True]["masters"].items():  # gradients differ where a parameter rounds to the other side
        torch.testing.assert_close(arms[False]["masters"][name], master, rtol=0, atol=2e-3)


@pytest.mark.parametrize("adds_up", [True, False])
def test_gradients_may_lie_otherwise_in_memory(adds_up):
    """As of parts of a DTensor: PyTorch's fused step ignores strides, without an error."""
    values, results = torch.arange(60.0).view(12, 5).sin(), []
    for gradient in (values, values.t().contiguous().t()):
        model = nn.Linear(5, 12, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
        optimizer = masters_of(model, adds_up=adds_up)
        model.weight.grad = gradient.bfloat16()
        take(optimizer, 1e-2)
        results.append(optimizer.state_dict()["adamw"]["state"][0]["exp_avg"])
    assert torch.equal(*results)


def test_summands_of_ranks_add_up_in_fp32():
    model = make_model(torch.bfloat16)
    optimizer = masters_of(model, adds_up=False, partial=["1.weight"])
    backward(model, 0)
    optimizer.accumulate()
    dtypes = {name: gradient.dtype for name, gradient in optimizer.gradients().items()}
    assert dtypes.pop("1.weight") == torch.float32 and set(dtypes.values()) == {torch.bfloat16}
    optimizer.gradients()["1.weight"].mul_(1 + 2.0**-12)  # beyond bf16
    optimizer.step(1e-2, optimizer.gradient_norm(1.0))
    assert torch.equal(model[1].weight, optimizer.state_dict()["masters"]["1.weight"].bfloat16())
    assert (model[1].weight != 1).any()


@pytest.mark.parametrize("adds_up", [(True, False), (False, True), (False, False)])
def test_states_fit_any_number_of_micro_batches(adds_up):
    """And a state that is read into the tensors in place, as from shards, goes on from its count of steps."""

    def steps(model, optimizer, seeds):
        for seed in seeds:
            backward(model, seed)
            take(optimizer)

    model = make_model(torch.bfloat16)
    first = masters_of(model, adds_up=adds_up[0])
    steps(model, first, range(5))
    saved, weights = copy.deepcopy(first.state_dict()), copy.deepcopy(model.state_dict())
    tensors = {name: value.clone() for name, value in first.tensors().items()}
    steps(model, first, range(5, 8))
    for in_place in (False, True):
        twin = make_model(torch.bfloat16)
        twin.load_state_dict(weights)
        second = masters_of(twin, adds_up=adds_up[1])
        if in_place:
            steps(twin, second, range(2))
            twin.load_state_dict(weights)
            for name, value in second.tensors().items():
                value.copy_(tensors[name])
        else:
            second.load_state_dict(saved)
        steps(twin, second, range(5, 8))
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            if adds_up == (False, False):
                assert torch.equal(own, other)
            torch.testing.assert_close(own, other, rtol=0.01, atol=1e-3)
        assert {int(s["step"]) for s in second.state_dict()["adamw"]["state"].values()} == {8}


def test_the_norm_is_of_unscaled_gradients_and_shows_overflow():
    norms = []
    for scale in (1.0, 1024.0):
        model = make_model(torch.bfloat16)
        optimizer = masters_of(model)
        backward(model, 0, factor=scale)
        optimizer.accumulate()
        norms.append(optimizer.gradient_norm(scale).item())
    assert norms[0] == norms[1]
    bias = next(param for param in model.parameters() if param.dim() == 1)
    bias.grad = torch.full_like(bias, torch.inf)
    optimizer.accumulate()
    assert not torch.isfinite(optimizer.gradient_norm(1.0))


def rates(steps, **keys):
    optim = Optim.model_validate({"lr": 2.0, "min_lr_ratio": 0.1} | keys)
    return [optimizer_module.learning_rate(optim, step, steps) for step in range(steps)]


RATES = {
    "cosine": {10: 2.0, 60: 1.1, 109: 0.2}, "linear": {10: 2.0, 35: 1.55, 85: 0.65}, "wsd": {10: 2.0, 88: 2.0, 99: 1.1},
    "constant": {10: 2.0, 109: 2.0},
}  # fmt: skip


@pytest.mark.parametrize("schedule", RATES)
def test_learning_rates(schedule):
    expected = RATES[schedule]
    curve = rates(110, schedule=schedule, warmup=10, **({"decay": 0.2} if schedule == "wsd" else {}))
    assert curve[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert {step: curve[step] for step in expected} == pytest.approx(expected, abs=1e-3)
    for warmup, steps in product((0, 1, 3, 50), (1, 2, 7)):
        assert all(0 < rate <= 2.0 for rate in rates(steps, schedule=schedule, warmup=warmup))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.norm = nn.LayerNorm(64)


def optim(*groups, **keys):
    return Optim.model_validate({"lr": 1e-2, "weight_decay": 0.1, "groups": groups} | keys)


def test_the_first_match_counts():
    layers = {"match": "layers.1.weight", "lr": 1e-4}, {"match": "layers.*", "weight_decay": 0.5}
    settings = parameter_settings(Model(), optim(*layers, {"match": "norm", "lr": 3e-3}))
    rows = {name: (row.group, row.lr, row.weight_decay) for name, row in settings.items()}
    assert rows == {
        "embed.weight": (-1, 1e-2, 0.1), "layers.0.weight": (1, 1e-2, 0.5), "layers.0.bias": (1, 1e-2, 0.5),
        "layers.1.weight": (0, 1e-4, 0.1), "layers.1.bias": (1, 1e-2, 0.5), "norm.weight": (2, 3e-3, 0.0),
        "norm.bias": (2, 3e-3, 0.0),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"match": "layer.*"}], r'optim.groups: "layer.\*" matches no trained parameter'),
        ([{"match": "norm.wieght"}], r"matches no trained parameter \(did you mean 'norm.weight'\?\)"),
        ([{"match": "*"}, {"match": "norm"}], r'"norm" matches only parameters that "\*" before it matches'),
        ([{"match": "frozen"}], r"matches no trained parameter"),
    ],
    ids=str,
)
def test_a_pattern_that_matches_nothing(groups, message):
    model = Model()
    model.frozen = nn.Linear(4, 4).requires_grad_(False)
    rejected(message, lambda: parameter_settings(model, optim(*groups)))
    parameter_settings(model, optim(*groups), part=True)


@pytest.mark.parametrize("states", ["fp32", "fp8"])
def test_a_step_equals_that_of_an_optimizer_with_these_settings(states):
    own, models = {"lr": 1e-3, "weight_decay": 0.3}, (Model(), Model(), Model())
    settings = (optim({"match": "layers.1.weight"} | own, clip=0.0), optim(**own, clip=0.0), optim(clip=0.0))
    pairs = zip(models, settings, strict=True)
    optimizers = [make_optimizer(states, model, section, master=False) for model, section in pairs]
    for number in range(3):
        for model, optimizer, lr in zip(models, optimizers, (1e-2, 1e-3, 1e-2), strict=True):
            torch.manual_seed(number)
            for param in model.parameters():
                param.grad = torch.randn_like(param)
            optimizer.step(lr / (number + 1), torch.ones(()))  # as a schedule does
    weights = [dict(model.named_parameters()) for model in models]
    for name, param in weights[0].items():
        if name != "layers.1.weight":
            assert torch.equal(param, weights[2][name]), name
        elif states == "fp32":
            assert torch.equal(param, weights[1][name])
        else:  # the random bits of FP8 moments depend on the number of the parameter
            torch.testing.assert_close(param, weights[1][name], rtol=0, atol=2e-4)
            assert (param - weights[2][name]).abs().max() > 5e-3


def test_a_run_prints_its_groups(make_config, tmp_path):
    seen = recorded(make_config(optim={"groups": GROUPS}), tmp_path)
    rows = [note.split("  ") for note in seen.notes if " elements)" in note]
    assert [row[0] for row in rows] == ["others", "*norm*", "model.layers.0"]
    assert [row[-2].strip() for row in rows] == ["lr 0.01", "lr 0.001", "lr 0.01"]
    seen = recorded(make_config(optim={"name": "muon"}), tmp_path / "muon")
    assert [note.split("  ")[0] for note in seen.notes if "  muon  " in note] == ["others"]
    assert seen.result.losses.final < seen.result.losses.first


def test_which_parameters_muon_optimizes(make_config):
    config = make_config(optim={"name": "muon", "groups": [{"match": "*.o_proj", "muon": False}]})
    model = build_of_kind(config, LANGUAGE, {"vocab_size": 300})
    settings = parameter_settings(model, config.optim)
    own = {name.split(".")[-2] for name, setting in settings.items() if not setting.rest}
    assert own == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}
    with pytest.raises(ConfigError, match=r'"\*embed\*" matches .*embed_tokens.weight, which muon = true does not fit'):
        parameter_settings(model, optim({"match": "*embed*", "muon": True}, name="muon"))


PRECISIONS = [{}, {"level": "fp8+activations+optimizer"}, {"parameters": "fp32"}]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_it_is_the_average_of_the_masters(precision, make_config, tmp_path, monkeypatch):
    step, masters = optimizer_module.TrainerOptimizer.step, []

    def recorded(optimizer, *args, **options):
        if not masters:
            masters.append([values.clone() for values in optimizer.masters()])
        step(optimizer, *args, **options)
        masters.append([values.clone() for values in optimizer.masters()])

    monkeypatch.setattr(optimizer_module.TrainerOptimizer, "step", recorded)
    run(make_config(precision=precision, optim={"ema": 0.5}), out=tmp_path / "run")
    average = [values.double() for values in masters[0]]
    for number, values in enumerate(masters[1:]):
        decay = optimizer_module.average_decay(0.5, number)
        average = [decay * old + (1 - decay) * new.double() for old, new in zip(average, values, strict=True)]
    state = {name: value for name, value in saved(tmp_path / "run").items() if name.startswith("ema.")}
    for value, expected in zip(state.values(), average, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.thorough
def test_evaluation_and_export_of_the_average(make_config, tmp_path):
    level = {"level": "fp8+activations+optimizer"}
    sections = {"precision": level, "eval": {"fraction": 0.3, "every": 3}, "model": ONE_BLOCK}
    run(make_config(**sections), out=tmp_path / "plain")
    sections |= {"optim": {"ema": 0.9}, "eval": {"fraction": 0.3, "every": 3, "ema": True}}
    run(make_config(**sections), out=tmp_path / "run")
    rows = [read_metrics(tmp_path / name) for name in ("plain", "run")]
    assert [row.loss for row in rows[0]] == [row.loss for row in rows[1]]  # training does not change
    last = rows[1][-1].held_out
    assert list(last) == ["loss", "loss_high_precision", "loss_ema"] and last["loss"] != last["loss_ema"]
    export(latest_checkpoint(tmp_path / "run"), tmp_path / "exported", ema=True)
    weights, average = load_file(tmp_path / "exported" / "model.safetensors"), saved(tmp_path / "run")
    assert len(weights) > 10
    for name, value in weights.items():
        assert torch.equal(value, average[f"ema.{name}"].to(torch.bfloat16)), name
    start = {"model": {"path": str(tmp_path / "exported")}, "optim": {"lr": 1e-30}, "precision": level}
    run(make_config(**start, run={"steps": 3}, eval={"fraction": 0.3}), out=tmp_path / "again")
    measured = read_metrics(tmp_path / "again")[-1].held_out
    assert measured["loss"] == pytest.approx(last["loss_ema"], abs=1e-4)
    with pytest.raises(ConfigError, match="has no averaged weights: train with optim.ema"):
        export(latest_checkpoint(tmp_path / "plain"), tmp_path / "none", ema=True)
    without = make_config(**sections | {"optim": {}, "eval": {"fraction": 0.3}})
    refused_run(r"another run: there optim.ema = 0.9, here unset", without, tmp_path / "run", resume=True)
