"""Transformers' Trainer in FP8: the losses of a plain loop, resume, and settings that contradict each other."""

import copy
import json
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed: Transformers' Trainer needs it")

from transformers import Trainer

import octavo
from octavo.integrations.transformers import STATE_FILE, Fp8Trainer, with_fp8
from support.tool_loops import LR, plain_loop
from support.tool_loops import training_arguments as arguments
from tensors import same

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer.py"
EACH_STEP = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture
def trainer_of(llama, samples, tmp_path):
    """Makes trainers, of a small Llama unless they are given a model, in a folder and with these arguments."""

    def make(folder=".", cls=Fp8Trainer, settings=EACH_STEP, **options):
        args = arguments(tmp_path / folder, **settings)
        return cls(args=args, train_dataset=samples, **({"model": llama()} | options))

    return make


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def groups(model):
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    named = dict(model.named_parameters())
    return [
        {"params": [p for name, p in named.items() if name in decayed], "weight_decay": 0.1},
        {"params": [p for name, p in named.items() if name not in decayed], "weight_decay": 0.0},
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("level", ["fp8", "fp8+activations+optimizer"])
def test_training_is_that_of_a_plain_loop_bit_for_bit(level, llama, samples, trainer_of):
    precision = octavo.Precision.level(level)
    model, by_hand = llama(torch.bfloat16), llama(torch.bfloat16)
    trainer = trainer_of(settings={"max_steps": 12}, model=model, precision=level)
    trainer.train()
    octavo.convert(by_hand, precision=precision, verbose=False)
    make = octavo.AdamW if precision.states == "fp8" else torch.optim.AdamW
    batches = torch.stack([row["input_ids"] for row in samples[:48]]).split(4)
    expected = plain_loop(by_hand, make(groups(by_hand), lr=LR), batches)
    assert losses(trainer) == pytest.approx(expected, rel=1e-4)  # the Trainer rounds what it logs
    assert same(model.state_dict(), by_hand.state_dict())
    assert losses(trainer)[-1] < losses(trainer)[0]


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["fp8+activations+optimizer", {"recipe": "rowwise_equalized"}])
def test_a_resumed_run_ends_like_one_that_was_not_stopped(precision, llama, trainer_of, tmp_path):
    whole, resumed = llama(torch.bfloat16), llama(torch.bfloat16, seed=5)
    trainer_of("a", settings=EACH_STEP | {"save_steps": 3}, model=whole, precision=precision).train()
    trainer = trainer_of("b", settings={}, model=resumed, precision=precision)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "octavo")
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert same(whole.state_dict(), resumed.state_dict())


ONE_STEP, TWO_STEPS = EACH_STEP | {"max_steps": 1}, {"max_steps": 2}


@pytest.mark.thorough
def test_checkpoints_say_how_they_were_trained(llama, trainer_of, tmp_path):
    trainer_of(settings=ONE_STEP, precision={"recipe": "blockwise"}).train()
    checkpoint = tmp_path / "checkpoint-1"
    assert json.loads((checkpoint / "config.json").read_text())["octavo"]["precision"] == "fp8 blockwise"
    with pytest.warns(UserWarning, match="recipe = 'blockwise', now 'rowwise'"):
        trainer_of("b", settings=TWO_STEPS).train(resume_from_checkpoint=str(checkpoint))
    model = type(llama()).from_pretrained(checkpoint)
    with pytest.warns(UserWarning, match="was trained with precision 'fp8 blockwise', and is now trained with 'bf16'"):
        trainer_of("b", settings=TWO_STEPS, model=model, precision="bf16")
    (checkpoint / STATE_FILE).unlink()
    with pytest.warns(UserWarning, match="trained without Octavo"):
        trainer_of("b", settings=TWO_STEPS).train(resume_from_checkpoint=str(checkpoint))
    (checkpoint / STATE_FILE).write_text('{"octavo": ')
    with pytest.raises(ValueError, match="damaged or of another model"):
        trainer_of("b", settings=TWO_STEPS).train(resume_from_checkpoint=str(checkpoint))


DOWN = "model.layers.1.mlp.down_proj"


class Moving(Fp8Trainer):
    """Changes the recipe of a layer behind a step."""

    moves_at = 0

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step == self.moves_at:
            octavo.nn.change_recipe(self.model, DOWN, "blockwise", reason="a test")
        return loss


@pytest.mark.thorough
def test_recipes_that_changed_are_restored(trainer_of, tmp_path):
    trainer_of(cls=Moving, settings=ONE_STEP).train()
    trainer = trainer_of("b", settings=TWO_STEPS)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.model.get_submodule(DOWN).recipe.name == "blockwise"
    assert {row.recipe for row in octavo.report(trainer.model) if row.converted} == {"rowwise", "blockwise"}


@pytest.mark.thorough
def test_samples_of_accumulated_steps_are_logged_and_the_autopilot_moves_layers(harmed, trainer_of):
    """Those of steps of one micro-batch reach the loggers of test_tool_loggers.py."""
    settings, precision = {"max_steps": 4, "gradient_accumulation_steps": 2}, {"recipe": "tensorwise"}
    trainer = trainer_of(settings=settings, model=harmed, precision=precision, autopilot=True, inspect_every=1)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all("octavo/findings" in entry and entry["octavo/lowest_sqnr_db"] > -100 for entry in logged)
    assert logged[-1]["octavo/moved_layers"] > 0
    moved = {change.layer for change in trainer._monitor.autopilot.changes}
    assert moved and moved <= {row.name for row in octavo.report(harmed) if row.recipe != "tensorwise"}


@pytest.mark.thorough
@pytest.mark.parametrize("checkpoint", [1, 2])
def test_the_autopilot_goes_on_from_a_checkpoint(checkpoint, harmed, trainer_of, tmp_path):
    def train(folder, **resume):
        trainer = trainer_of(
            folder, settings=EACH_STEP | {"max_steps": 4}, model=copy.deepcopy(harmed),
            precision={"recipe": "tensorwise"}, autopilot=True, inspect_every=2,
        )  # fmt: skip
        trainer.train(**resume)
        return trainer

    whole = train("a")
    resumed = train("b", resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{checkpoint}"))
    assert whole._monitor.autopilot.changes == resumed._monitor.autopilot.changes != []
    assert same(whole.model.state_dict(), resumed.model.state_dict())


@pytest.mark.thorough
def test_the_best_model_has_its_own_recipes_and_state(samples, trainer_of):
    settings = EACH_STEP | {
        "eval_strategy": "steps", "eval_steps": 1, "max_steps": 4, "learning_rate": 0.05,
        "load_best_model_at_end": True, "metric_for_best_model": "first",
    }  # fmt: skip
    trainer = trainer_of(
        cls=Moving, settings=settings, eval_dataset=samples[:8], precision={"recipe": "rowwise_equalized"},
        compute_metrics=lambda _: {"first": trainer.state.global_step == 1},
    )  # fmt: skip
    trainer.moves_at = 1
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    (before,) = (e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e and e["step"] == 1)
    assert trainer.model.get_submodule(DOWN).recipe.name == "rowwise_equalized"
    assert trainer.evaluate()["eval_loss"] == before


@pytest.mark.thorough
def test_state_of_other_layers_is_an_error(trainer_of, tmp_path):
    trainer_of(settings=ONE_STEP).train()
    checkpoint = tmp_path / "checkpoint-1"
    state = json.loads((checkpoint / STATE_FILE).read_text())
    recipes = state["recipes"]
    for other, message in (({f"x.{k}": v for k, v in recipes.items()}, "this one has no 'x"), ({}, "it has no recipe")):
        (checkpoint / STATE_FILE).write_text(json.dumps({**state, "recipes": other}))
        with pytest.raises(ValueError, match=f"of another model: {message}"):
            trainer_of("b", settings=TWO_STEPS).train(resume_from_checkpoint=str(checkpoint))


def test_a_resident_model_without_adapters_cannot_be_checkpointed(llama, trainer_of):
    model = octavo.convert(llama(), frozen="fp8", verbose=False)
    with pytest.raises(ValueError, match=r"resident in FP8.*get_peft_model.*save_strategy='no'"):
        trainer_of(model=model)
    trainer_of(settings={}, model=model)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT asks Transformers for it
def test_adapters_on_a_resident_base_resume_bit_for_bit(llama, trainer_of, tmp_path):
    peft = pytest.importorskip("peft")

    def adapted():
        model = octavo.convert(llama(torch.bfloat16), frozen="fp8", verbose=False)
        torch.manual_seed(1)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))

    trainer = trainer_of("a", settings=EACH_STEP | {"save_steps": 3}, model=adapted())
    trainer.train()
    files = {file.name for file in (tmp_path / "a" / "checkpoint-3").iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    again = trainer_of("b", settings={}, model=adapted())
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    trained, resumed = (
        {name: p for name, p in one.model.named_parameters() if "lora_" in name} for one in (trainer, again)
    )
    assert same(trained, resumed) and trained


def test_a_full_disk_leaves_the_state_that_was_there(trainer_of, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "save_model", lambda *arguments: None)  # the weights still fit
    trainer = trainer_of()
    trainer.save_model()
    before = (tmp_path / STATE_FILE).read_text()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"{STATE_FILE} cannot be written: File too large"):
            trainer.save_model()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {STATE_FILE: before}


ALL = "fp8+activations+optimizer"


class OwnOptimizer(Trainer):
    def create_optimizer(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        return self.optimizer


def test_optimizers_without_the_states_that_were_asked_for(llama, trainer_of):
    model = llama()
    with pytest.raises(ValueError, match=r"the optimizer is a .*SGD: create it with octavo.AdamW"):
        trainer_of(cls=with_fp8(OwnOptimizer), model=model, precision=ALL).train()
    optimizers = octavo.AdamW(model.parameters(), states="fp32"), None
    with pytest.raises(ValueError, match="the optimizer is an octavo.AdamW with states='fp32'"):
        trainer_of(model=model, precision=ALL, optimizers=optimizers).train()


def test_a_resumed_run_without_fp8_states_takes_none(trainer_of, tmp_path):
    trainer_of(settings=EACH_STEP | TWO_STEPS, precision=ALL).train()
    trainer = trainer_of(settings=EACH_STEP | TWO_STEPS, precision="fp8")
    with pytest.warns(UserWarning, match="precision.states = 'fp8', now"):
        with pytest.raises(ValueError, match=r"states, which torch\.optim\.adamw\.AdamW does not read: go on"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_the_user_sets_options_of_adamw(trainer_of):
    trainer = trainer_of(precision=ALL, optimizer_cls_and_kwargs=(octavo.AdamW, {"nonfinite": "skip"}))
    (group, _) = trainer.create_optimizer().param_groups
    assert (group["nonfinite"], group["lr"], group["states"], group["master"]) == ("skip", LR, "fp8", "remainder")


@pytest.mark.parametrize(
    ("before", "precision", "message"),
    [
        ({}, "fp8+activations", "without activations='fp8'"),
        ({}, {"recipe": "blockwise"}, "to rowwise"),
        ({}, "bf16", r"its layers compute in FP8 \(rowwise\)"),
        ({"matmul": "bf16", "activations": "fp8"}, "fp8+activations", "its layers do not compute in FP8"),
    ],
)
def test_a_converted_model_that_lacks_what_is_asked_for(before, precision, message, llama, trainer_of):
    model = octavo.convert(llama(), precision=octavo.Precision(**before), verbose=False)
    with pytest.raises(ValueError, match=f"this model was converted before: {message}"):
        trainer_of(model=model, precision=precision)


def test_model_init_is_converted_each_time(llama, samples, tmp_path):
    trainer = Fp8Trainer(model_init=lambda: llama(), args=arguments(tmp_path, max_steps=1), train_dataset=samples)
    trainer.train()
    first = trainer.model
    trainer.train()
    assert trainer.model is not first
    assert sum(row.converted for row in octavo.report(trainer.model)) == 14


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"precision": "fp9"}, {}, "unknown precision level 'fp9'"),
        ({"precision": {"recipee": "rowwise"}}, {}, "no key 'recipee'.*recipe"),
        ({}, {"fp16": True}, "fp16=True"),
        ({"fp8 of accelerate": True}, {}, "accelerate's own FP8 is on: set mixed_precision to 'bf16'"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other(options, settings, message, llama, samples, tmp_path, monkeypatch):
    model, args = llama(), arguments(tmp_path)
    for name, value in settings.items():
        setattr(args, name, value)
    if "fp8 of accelerate" in options:  # with which accelerate looks for another library first
        options = {}
        monkeypatch.setattr("accelerate.Accelerator.mixed_precision", "fp8")
    with pytest.raises(ValueError, match=message):
        Fp8Trainer(model=model, args=args, train_dataset=samples, **options)
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear


@pytest.mark.parametrize("chosen", ["optim", "optimizers", "optimizer_cls_and_kwargs"])
def test_fp8_states_need_their_optimizer(chosen, llama, samples, tmp_path):
    model, args = llama(), arguments(tmp_path)
    sgd = (torch.optim.SGD(model.parameters(), lr=1.0), None) if chosen == "optimizers" else (torch.optim.SGD, {})
    options = {} if chosen == "optim" else {chosen: sgd}
    if chosen == "optim":
        args.optim = "sgd"
    level = "fp8+activations+optimizer"
    trainer = Fp8Trainer(model=model, args=args, train_dataset=samples, precision=level, **options)
    with pytest.raises(ValueError, match=r"the optimizer is a .*SGD: create it with .*optim='adamw_torch'"):
        trainer.train()


def test_only_trainers_have_a_trainer_in_fp8():
    with pytest.raises(TypeError, match=r"with_fp8 takes transformers\.Trainer"):
        with_fp8(dict)

    class Mine(Trainer):
        pass

    assert issubclass(with_fp8(Mine), Mine) and with_fp8(Mine) is with_fp8(Mine)
    assert with_fp8(Fp8Trainer) is Fp8Trainer


@pytest.mark.slow
def test_the_example_runs():
    text = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=200, check=True).stdout
    assert "octavo/lowest_sqnr_db" in text and "converted 14 of 15 linear layers" in text
