"""Faults put into a run: each is named by layer and operand in the step that it comes in, by the run itself."""

import json
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tiny_runs import WIDE_LLAMA, assert_same, curve, killed, recorded, saved, slow
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.experiments.run_report import write_report
from octavo.inspect import Autopilot
from octavo.train import NonFiniteError, loss_scale, parse_config, run
from octavo.train import trainer as trainer_module
from octavo.train.checkpoint.retention import latest_checkpoint
from octavo.train.compiled_blocks import Checkpointing
from octavo.train.diagnose import find_origin, non_finite_parameter
from octavo.train.record.metrics import read_events, read_statistics
from octavo.train.trainer import Trainer

DOWN = "model.layers.1.mlp.down_proj"
WATCHED = {"precision": {"level": "fp8"}, "inspect": {"every": 1}}


# Faults of a layer, put into it by a hook: they change the numbers that reach it or leave it.


def outliers(layer):
    """The first input channel a thousand times larger: operand "x"."""
    return layer.register_forward_pre_hook(lambda _, args: torch.cat([args[0][..., :1] * 1e3, args[0][..., 1:]], -1))


def tiny_gradients(layer):
    """The gradient of the output far smaller: operands "dgrad_g" and "wgrad_g"."""

    def shrink(module, args, y):
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 1e-12)

    return layer.register_forward_hook(shrink)


def not_finite(layer, value=torch.inf, once=False):
    """One value of the input, in the first forward or in all: operand "x"."""
    forwards = []

    def spoil(module, args):
        forwards.append(module)
        at = torch.arange(args[0].numel()).view(args[0].shape) == args[0].numel() // 2
        return args[0].masked_fill(at, value) if not once or len(forwards) == 1 else None

    return layer.register_forward_pre_hook(spoil)


@contextmanager
def in_steps(numbers, fault):
    take = Trainer.train_step

    def broken(trainer):
        layer = trainer.model.get_submodule(DOWN)
        with fault(layer) if trainer.step + 1 in numbers else nullcontext():
            return take(trainer)

    with mock.patch.object(Trainer, "train_step", broken):
        yield


@pytest.mark.thorough
@pytest.mark.parametrize(("fault", "text"), [(outliers, "x: amax rose"), (tiny_gradients, "dgrad_g: amax fell")])
def test_jumps_are_said_in_their_step_and_once(make_config, tmp_path, fault, text):
    with in_steps((4, 5, 6), fault):
        recorder = recorded(make_config(**WATCHED), tmp_path)
    events = [event for event in read_events(tmp_path) if f"{DOWN} {text}" in event["text"]]
    assert [event["step"] for event in events] == [4]  # it lasts, and was said
    assert all(event["step"] >= 4 for event in read_events(tmp_path))
    assert events[0]["text"] in recorder.notes


INFINITIES = [  # The last one in the first forward of its step, and not in the diagnosis: it was sampled
    ("bf16", 0, False, f"of {DOWN}"), ("fp8", 2, False, f"of {DOWN}"), ("fp8", 1, True, "none in particular.*"),
]  # fmt: skip


@pytest.mark.parametrize(("level", "every", "once", "place"), INFINITIES)
def test_an_infinity_stops_the_run_with_its_layer_and_operand(make_config, tmp_path, level, every, once, place):
    error = pytest.raises(NonFiniteError, match=rf"step 3: .*{place} \(first operand: x of {DOWN}\)")
    with in_steps([3], partial(not_finite, once=once)), error:
        run(make_config(precision={"level": level}, inspect={"every": every}), out=tmp_path)
    (event,) = read_events(tmp_path)
    assert event["step"] == 3 and f"{DOWN} x: " in event["text"] and "NaN or infinite" in event["text"]


def nan_job(tables, out):
    fault = partial(not_finite, value=torch.nan)
    with in_steps([4], fault) if dist.get_rank() == 1 else nullcontext():
        try:
            run(parse_config(tables), out=Path(out))
        except NonFiniteError as error:
            return str(error)
    return "done"


@pytest.mark.thorough
@pytest.mark.dist
@pytest.mark.parametrize("autopilot", [False, slow(True)])
def test_a_nan_on_one_rank_is_named_on_all(gloo, make_config, tmp_path, autopilot):
    config = make_config(precision={"level": "fp8", "autopilot": autopilot})
    errors = gloo.run(nan_job, 2, config.model_dump(exclude_none=True), str(tmp_path))
    assert errors[0] == errors[1]
    assert f"step 4: the loss is nan; first value that is not finite: output of {DOWN}" in errors[0]
    assert f"(first operand: x of {DOWN})" in errors[0]
    events = [event for event in read_events(tmp_path) if event["step"] == 4]
    assert [event["event"] for event in events] == ["finding"] and f"{DOWN} x: " in events[0]["text"]
    state = json.loads((tmp_path / "checkpoints" / "step-000003" / "trainer.json").read_text())
    assert not state["autopilot"]["moves"]  # FP8 is not blamed for it


@pytest.mark.thorough
def test_limits_are_the_runs_own(make_config, tmp_path):
    strict = {"limits": {"sqnr": 33.0}}
    run(make_config(**WATCHED), out=tmp_path / "calm")
    run(make_config(**WATCHED | {"inspect": WATCHED["inspect"] | strict}), out=tmp_path / "strict")
    assert not read_events(tmp_path / "calm")
    texts = [event["text"] for event in read_events(tmp_path / "strict") if event["step"] == 1]
    assert len(texts) == 5 and "(limit 33)" in texts[0]
    assert texts[-1].endswith("more figures crossed a limit: octavo inspect shows them")
    assert curve(tmp_path / "calm") == curve(tmp_path / "strict")
    page = write_report([tmp_path / "strict"], tmp_path / "report").read_text()
    assert "What happened in" in page and "SQNR" in page and "(limit 33)" in page
    assert "What happened in" not in write_report([tmp_path / "calm"], tmp_path / "quiet").read_text()


@pytest.mark.parametrize(("limits", "moves"), [({"sqnr": 60.0, "product_error": 0.0}, True), ({"sqnr": 60.0}, False)])
def test_limits_move_layers_under_the_autopilot(make_config, tmp_path, limits, moves):
    piloted = {"level": "fp8", "autopilot": True}
    run(make_config(precision=piloted, inspect={"limits": limits}, run={"steps": 3}), out=tmp_path)
    layers = {row.layer for row in read_statistics(tmp_path)}
    assert bool(layers) != moves  # or none is left in FP8 that could be sampled
    assert {event["event"] for event in read_events(tmp_path)} == ({"move"} if moves else {"finding"})


SIZES = WIDE_LLAMA | {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.06}
AUTOPILOT_ON = {
    "run": {"steps": 8, "save_every": 4}, "precision": {"level": "fp8", "recipe": "tensorwise", "autopilot": True},
    "inspect": {"every": 3},
}  # fmt: skip


@contextmanager
def models_with(hook, name=DOWN):
    """Trainers with a hook before a layer, where their part of the model has it."""
    make = trainer_module.make_optimizer

    def hooked(model, *args):
        if (layer := dict(model.named_modules()).get(name)) is not None:
            layer.register_forward_pre_hook(hook)
        return make(model, *args)

    with mock.patch.object(trainer_module, "make_optimizer", side_effect=hooked):
        yield


def moves(out):
    return [event for event in read_events(out) if event["event"] == "move"]


def outlier(_, args):
    scale = torch.ones(64, dtype=args[0].dtype)
    scale[5] = 1e7
    return args[0] * scale


@pytest.mark.thorough
def test_a_layer_is_moved_said_and_remembered(make_config, tmp_path):
    config = make_config(**AUTOPILOT_ON)
    with models_with(outlier):
        recorder = recorded(config, tmp_path / "whole")
        killed(config, tmp_path / "killed", 7)
        moved_twice = moves(tmp_path / "killed")
        run(config, out=tmp_path / "killed", resume=True)
    events = moves(tmp_path / "whole")
    assert {event["step"] for event in events} <= {1, 2}
    assert all(DOWN in event["text"] and "product error" in event["text"] for event in events)
    assert [event["text"] for event in events] == [note for note in recorder.notes if "autopilot" in note]
    assert moved_twice == events and read_events(tmp_path / "killed") == read_events(tmp_path / "whole")
    assert_same(tmp_path / "whole", tmp_path / "killed")
    kept = saved(tmp_path / "whole")["trainer"]["autopilot"]["moves"]
    assert len(kept) == len(events) and kept[-1]["after"] != "tensorwise"


def test_what_is_not_finite_stops_the_run_and_moves_nothing(make_config, tmp_path):
    takes = mock.patch.object(Trainer, "_gradients", autospec=True, side_effect=Trainer._gradients)
    error = pytest.raises(NonFiniteError, match=rf"output of {DOWN} \(first operand: x of {DOWN}\)")
    with models_with(lambda _, args: args[0] * torch.inf), takes as gradients, error:
        run(make_config(**AUTOPILOT_ON), out=tmp_path)
    assert gradients.call_count == 1
    assert [event["event"] for event in read_events(tmp_path)] == ["finding"]
    assert not saved(tmp_path)["trainer"]["autopilot"]["moves"]


@pytest.mark.thorough
def test_an_overflow_in_the_first_step_leaves_the_first_look_for_the_next(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", 2.0**30)
    precision = AUTOPILOT_ON["precision"] | {"parameters": "fp16", "loss_scale": "dynamic"}
    recorder = recorded(make_config(precision=precision, inspect={"every": 100}, run={"steps": 25}), tmp_path)
    good = next(row.step for row in recorder.rows if not row.skipped)
    assert 1 < good < 25 and {row.step for row in read_statistics(tmp_path) if row.step >= good} == {good}


def test_moves_of_a_step_that_fails_are_taken_back(make_config, tmp_path):
    act = Autopilot.act

    def failing(pilot, *args, **options):
        pilot_moves = act(pilot, *args, **options)
        if pilot_moves:
            pilot._model.get_submodule(DOWN).register_forward_pre_hook(lambda _, args: args[0] * torch.nan)
        return pilot_moves

    with models_with(outlier), mock.patch.object(Autopilot, "act", failing), pytest.raises(NonFiniteError):
        run(make_config(**AUTOPILOT_ON), out=tmp_path)
    assert not saved(tmp_path)["trainer"]["autopilot"]["moves"] and not moves(tmp_path)


def test_moves_of_layers_that_are_skipped_since_are_not_taken(make_config, tmp_path):
    with models_with(outlier):
        run(make_config(**AUTOPILOT_ON | {"run": {"steps": 3}}), out=tmp_path)
        skipping = {"precision": AUTOPILOT_ON["precision"] | {"skip": ["*down_proj"]}, "run": {"steps": 4}}
        run(make_config(**AUTOPILOT_ON | skipping), out=tmp_path, resume=True)
    layers = {row["name"]: row["recipe"] for row in json.loads((tmp_path / "layers.json").read_text())}
    assert layers[DOWN] is None and moves(tmp_path)  # those of the first part


def with_outlier_channels(checkpoint, out):
    """The same function, two of whose norm weights are large and the others small: most of X underflows beside them."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    gain = torch.full((128,), 0.003)
    gain[[33, 98]] = 1000.0
    with torch.no_grad():
        for block in model.model.layers:
            block.post_attention_layernorm.weight.mul_(gain)
            for linear in (block.mlp.gate_proj, block.mlp.up_proj):
                linear.weight.div_(gain)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(out)
    return {"path": str(out)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_piloted_run_ends_where_bf16_does_and_plain_tensorwise_does_not(seed, tmp_path):
    def trained(name, model, steps, lr, **precision):
        tables = {
            "run": {"steps": steps, "seed": seed, "device": "cpu"}, "model": model, "precision": precision,
            "data": {"source": "python-stdlib", "sequence_length": 64, "vocab_size": 512},
            "optim": {"lr": lr, "batch": 16, "schedule": "constant"},
        }  # fmt: skip
        return run(parse_config(tables), out=tmp_path / name).losses.tail_mean

    trained("before", {"type": "llama", "config": SIZES}, 100, 3e-3)
    start = with_outlier_channels(latest_checkpoint(tmp_path / "before"), tmp_path / "start")
    loss = trained("bf16", start, 30, 1e-6)
    plain = trained("plain", start, 30, 1e-6, level="fp8", recipe="tensorwise")
    piloted = trained("piloted", start, 30, 1e-6, level="fp8", recipe="tensorwise", autopilot=True)
    assert plain > 1.03 * loss  # what the adversarial benchmark calls broken
    assert piloted == pytest.approx(loss, rel=0.01)
    moved = {event["text"].split(": ")[1].rsplit(".", 1)[1] for event in moves(tmp_path / "piloted")}
    assert moved == {"gate_proj", "up_proj"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.poison = nn.Identity()
        self.down = nn.Linear(8, 4)

    def forward(self, x):
        hidden = F.relu(self.up(self.poison(x)))
        return x + self.down(hidden), {"hidden": hidden}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x)


class Poisoned(torch.autograd.Function):
    """Identity forward; backward gives `gradient` back, whatever it was given."""

    @staticmethod
    def forward(ctx, x, gradient):
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, ctx.gradient), None


class Poison(nn.Module):
    def __init__(self, gradient=torch.nan):
        super().__init__()
        self.gradient = gradient

    def forward(self, x):
        return Poisoned.apply(x, self.gradient)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def origin(model, x=None, last=lambda y: y):
    x = torch.ones(5, 4) if x is None else x
    return find_origin(model, lambda: last(model(x)).sum().backward()).text


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_the_first_output_is_named(model, value):
    assert origin(model) is None
    for later in (1, 2):
        model.blocks[later].down.register_forward_hook(lambda *_: torch.full((5, 4), value, requires_grad=True))
    assert origin(model) == "output of blocks.1.down"


def test_a_fault_between_modules_is_the_parents(model):
    relu = model.blocks[1].forward
    model.blocks[1].forward = lambda x: (relu(x)[0] * torch.inf, {})
    assert origin(model) == "output of blocks.1"


@pytest.mark.parametrize("block", [1, 0])
def test_the_module_whose_backward_fails_is_named(model, block):
    model.blocks[block].poison = Poison()
    model.blocks[2].poison = Poison(gradient=1.0)
    named = f"gradient of the input of blocks.{block}.poison"
    assert origin(model, torch.ones(5, 4, requires_grad=True)) == named
    Checkpointing(model, "full")
    assert origin(model, torch.ones(5, 4, requires_grad=True)) == named


def test_gradients_that_fail_between_modules_or_overflow_are_named(model):
    assert origin(model, torch.full((5, 4), 1e30), last=lambda y: y * 1e30) == "gradient of head.weight"
    assert origin(model, last=lambda y: Poisoned.apply(y, torch.nan)) == "gradient of the output of head"


def test_hooks_are_gone_afterwards_even_after_an_error(model):
    with pytest.raises(ZeroDivisionError):
        find_origin(model, lambda: 1 / 0)
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def test_a_parameter_is_named(model):
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))  # buffers may hold infinities by design
    assert non_finite_parameter(model) is None
    with torch.no_grad():
        model.blocks[2].up.bias[1] = torch.inf
    assert non_finite_parameter(model) == "blocks.2.up.bias"
