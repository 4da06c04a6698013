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

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer.py"


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def same_weights(first, second):
    own, other = first.state_dict(), second.state_dict()
    assert own.keys() == other.keys()
    return all(torch.equal(own[name], other[name]) for name in own)


def groups(model):
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    named = dict(model.named_parameters())
    return [
        {"params": [p for name, p in named.items() if name in decayed], "weight_decay": 0.1},
        {"params": [p for name, p in named.items() if name not in decayed], "weight_decay": 0.0},
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("level", ["fp8", "fp8+activations+optimizer"])
def test_training_is_that_of_a_plain_loop_bit_for_bit(level, llama, samples, tmp_path):
    precision = octavo.Precision.level(level)
    model, by_hand = llama(torch.bfloat16), llama(torch.bfloat16)
    trainer = Fp8Trainer(model=model, args=arguments(tmp_path, max_steps=12), train_dataset=samples, precision=level)
    trainer.train()
    octavo.convert(by_hand, precision=precision, verbose=False)
    make = octavo.AdamW if precision.states == "fp8" else torch.optim.AdamW
    batches = torch.stack([row["input_ids"] for row in samples[:48]]).split(4)
    expected = plain_loop(by_hand, make(groups(by_hand), lr=LR), batches)
    assert losses(trainer) == pytest.approx(expected, rel=1e-4)  # the Trainer rounds what it logs
    assert same_weights(model, by_hand)
    assert losses(trainer)[-1] < losses(trainer)[0]


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["fp8+activations+optimizer", {"recipe": "rowwise_equalized"}])
def test_a_resumed_run_ends_like_one_that_was_not_stopped(precision, llama, samples, tmp_path):
    whole = llama(torch.bfloat16)
    options = {"save_strategy": "steps", "save_steps": 3}
    Fp8Trainer(
        model=whole, args=arguments(tmp_path / "a", **options), train_dataset=samples, precision=precision
    ).train()
    resumed = llama(torch.bfloat16, seed=5)
    trainer = Fp8Trainer(model=resumed, args=arguments(tmp_path / "b"), train_dataset=samples, precision=precision)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "octavo")
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert same_weights(whole, resumed)


def saved(llama, samples, folder, **options):
    trainer = Fp8Trainer(
        model=llama(), args=arguments(folder, max_steps=1, save_strategy="steps", save_steps=1), train_dataset=samples,
        **options,
    )  # fmt: skip
    trainer.train()
    return folder / "checkpoint-1"


@pytest.mark.thorough
def test_checkpoints_say_how_they_were_trained(llama, samples, tmp_path):
    checkpoint = saved(llama, samples, tmp_path, precision={"recipe": "blockwise"})
    assert json.loads((checkpoint / "config.json").read_text())["octavo"]["precision"] == "fp8 blockwise"
    resumed = arguments(tmp_path / "b", max_steps=2)
    trainer = Fp8Trainer(model=llama(), args=resumed, train_dataset=samples)
    with pytest.warns(UserWarning, match="recipe = 'blockwise', now 'rowwise'"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    model = type(llama()).from_pretrained(checkpoint)
    with pytest.warns(UserWarning, match="was trained with precision 'fp8 blockwise', and is now trained with 'bf16'"):
        Fp8Trainer(model=model, args=resumed, train_dataset=samples, precision="bf16")
    (checkpoint / STATE_FILE).unlink()
    trainer = Fp8Trainer(model=llama(), args=resumed, train_dataset=samples)
    with pytest.warns(UserWarning, match="trained without Octavo"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    (checkpoint / STATE_FILE).write_text('{"octavo": ')
    trainer = Fp8Trainer(model=llama(), args=resumed, train_dataset=samples)
    with pytest.raises(ValueError, match="damaged or of another model"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.thorough
def test_recipes_that_changed_are_restored(llama, samples, tmp_path):
    layer = "model.layers.1.mlp.down_proj"

    class Moving(Fp8Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            octavo.nn.change_recipe(self.model, layer, "blockwise", reason="a test")
            return loss

    options = arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    Moving(model=llama(), args=options, train_dataset=samples).train()
    trainer = Fp8Trainer(model=llama(), args=arguments(tmp_path / "b", max_steps=2), train_dataset=samples)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.model.get_submodule(layer).recipe.name == "blockwise"
    assert {row.recipe for row in octavo.report(trainer.model) if row.converted} == {"rowwise", "blockwise"}


@pytest.mark.thorough
@pytest.mark.parametrize("accumulation", [1, 2])
def test_samples_are_logged_and_the_autopilot_moves_layers(accumulation, harmed, samples, tmp_path):
    trainer = Fp8Trainer(
        model=harmed, args=arguments(tmp_path, max_steps=4, gradient_accumulation_steps=accumulation),
        train_dataset=samples, precision={"recipe": "tensorwise"}, autopilot=True, inspect_every=1,
    )  # fmt: skip
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all("octavo/findings" in entry and entry["octavo/lowest_sqnr_db"] > -100 for entry in logged)
    assert logged[-1]["octavo/moved_layers"] > 0
    moved = {change.layer for change in trainer._monitor.autopilot.changes}
    assert moved and moved <= {row.name for row in octavo.report(harmed) if row.recipe != "tensorwise"}


@pytest.mark.thorough
@pytest.mark.parametrize("checkpoint", [1, 2])
def test_the_autopilot_goes_on_from_a_checkpoint(checkpoint, harmed, samples, tmp_path):
    def train(folder, **resume):
        trainer = Fp8Trainer(
            model=copy.deepcopy(harmed), train_dataset=samples, precision={"recipe": "tensorwise"}, autopilot=True,
            inspect_every=2, args=arguments(tmp_path / folder, max_steps=4, save_strategy="steps", save_steps=1),
        )  # fmt: skip
        trainer.train(**resume)
        return trainer

    whole = train("a")
    resumed = train("b", resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{checkpoint}"))
    assert whole._monitor.autopilot.changes == resumed._monitor.autopilot.changes != []
    assert same_weights(whole.model, resumed.model)


@pytest.mark.thorough
def test_the_best_model_has_its_own_recipes_and_state(llama, samples, tmp_path):
    class Moving(Fp8Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            if self.state.global_step == 1:
                octavo.nn.change_recipe(self.model, "model.layers.1.mlp.down_proj", "blockwise", reason="a test")
            return loss

    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    args = arguments(
        tmp_path, max_steps=4, learning_rate=0.05, load_best_model_at_end=True, metric_for_best_model="first", **options
    )
    trainer = Moving(
        model=llama(), args=args, train_dataset=samples, eval_dataset=samples[:8],
        precision={"recipe": "rowwise_equalized"}, compute_metrics=lambda _: {"first": trainer.state.global_step == 1},
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    (before,) = (e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e and e["step"] == 1)
    assert trainer.model.get_submodule("model.layers.1.mlp.down_proj").recipe.name == "rowwise_equalized"
    assert trainer.evaluate()["eval_loss"] == before


@pytest.mark.thorough
def test_state_of_other_layers_is_an_error(llama, samples, tmp_path):
    checkpoint = saved(llama, samples, tmp_path)
    state = json.loads((checkpoint / STATE_FILE).read_text())
    recipes = state["recipes"]
    for other, message in (({f"x.{k}": v for k, v in recipes.items()}, "this one has no 'x"), ({}, "it has no recipe")):
        (checkpoint / STATE_FILE).write_text(json.dumps({**state, "recipes": other}))
        trainer = Fp8Trainer(model=llama(), args=arguments(tmp_path / "b", max_steps=2), train_dataset=samples)
        with pytest.raises(ValueError, match=f"of another model: {message}"):
            trainer.train(resume_from_checkpoint=str(checkpoint))


def test_a_resident_model_without_adapters_cannot_be_checkpointed(llama, samples, tmp_path):
    model = octavo.convert(llama(), frozen="fp8", verbose=False)
    with pytest.raises(ValueError, match=r"resident in FP8.*get_peft_model.*save_strategy='no'"):
        Fp8Trainer(model=model, args=arguments(tmp_path, save_strategy="steps"), train_dataset=samples)
    Fp8Trainer(model=model, args=arguments(tmp_path), train_dataset=samples)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT asks Transformers for it
def test_adapters_on_a_resident_base_resume_bit_for_bit(llama, samples, tmp_path):
    peft = pytest.importorskip("peft")

    def adapted():
        model = octavo.convert(llama(torch.bfloat16), frozen="fp8", verbose=False)
        torch.manual_seed(1)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))

    options = {"save_strategy": "steps", "save_steps": 3}
    trainer = Fp8Trainer(model=adapted(), args=arguments(tmp_path / "a", **options), train_dataset=samples)
    trainer.train()
    files = {file.name for file in (tmp_path / "a" / "checkpoint-3").iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    again = Fp8Trainer(model=adapted(), args=arguments(tmp_path / "b"), train_dataset=samples)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:
            assert torch.equal(parameter, again.model.get_parameter(name)), name


def test_a_full_disk_leaves_the_state_that_was_there(llama, samples, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "save_model", lambda *arguments: None)  # the weights still fit
    trainer = Fp8Trainer(model=llama(), args=arguments(tmp_path), train_dataset=samples)
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


def test_optimizers_without_the_states_that_were_asked_for(llama, samples, tmp_path):
    model, args = llama(), arguments(tmp_path, max_steps=1)
    with pytest.raises(ValueError, match=r"Fp8OwnOptimizer created a .*SGD: create an octavo.AdamW there"):
        with_fp8(OwnOptimizer)(model=model, args=args, train_dataset=samples, precision=ALL).train()
    optimizers = octavo.AdamW(model.parameters(), states="fp32"), None
    with pytest.raises(ValueError, match=r"optimizers=\(…\) has an octavo.AdamW with states='fp32'"):
        Fp8Trainer(model=model, args=args, train_dataset=samples, precision=ALL, optimizers=optimizers)


def test_a_resumed_run_without_fp8_states_takes_none(llama, samples, tmp_path):
    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    Fp8Trainer(model=llama(), args=args, train_dataset=samples, precision=ALL).train()
    trainer = Fp8Trainer(model=llama(), args=args, train_dataset=samples, precision="fp8")
    with pytest.warns(UserWarning, match="precision.states = 'fp8', now"):
        with pytest.raises(ValueError, match=r"states, which torch\.optim\.adamw\.AdamW does not read: go on"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_the_user_sets_options_of_adamw(llama, samples, tmp_path):
    trainer = Fp8Trainer(
        model=llama(), args=arguments(tmp_path), train_dataset=samples, precision=ALL,
        optimizer_cls_and_kwargs=(octavo.AdamW, {"nonfinite": "skip"}),
    )  # fmt: skip
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
def test_a_converted_model_that_lacks_what_is_asked_for(before, precision, message, llama, samples, tmp_path):
    model = octavo.convert(llama(), precision=octavo.Precision(**before), verbose=False)
    with pytest.raises(ValueError, match=f"this model was converted before: {message}"):
        Fp8Trainer(model=model, args=arguments(tmp_path), train_dataset=samples, precision=precision)


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
        ({"precision": "fp8+activations+optimizer"}, {"optim": "adafactor"}, "args.optim is 'adafactor'"),
        ({"precision": "fp8+activations+optimizer", "optimizers": "sgd"}, {}, r"optimizers=\(…\) has a .*SGD"),
        (
            {"precision": "fp8+activations+optimizer", "optimizer_cls_and_kwargs": (torch.optim.SGD, {})}, {},
            "optimizer_cls_and_kwargs names SGD",
        ),
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
    if "optimizers" in options:
        options = {**options, "optimizers": (torch.optim.SGD(model.parameters(), lr=1.0), None)}
    with pytest.raises(ValueError, match=message):
        Fp8Trainer(model=model, args=args, train_dataset=samples, **options)
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear


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
