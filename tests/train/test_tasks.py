"""The task of images: its data, configuration, runs, and accuracy."""

from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_runs import assert_resumes, build_task, image_tables

from octavo.train import ConfigError, RunResult, load_config, parse_config, read_metrics, run
from octavo.train.config.shrink import change_of
from octavo.train.data.images import ImageShape, load_images
from octavo.train.record.progress import NullProgress
from octavo.train.run_plan import plan_memory, plan_step

pytest.importorskip("sklearn")

SHAPE = ImageShape(1, 8, 8)
CONFIGS = Path(__file__).parents[2] / "configs"
VIT = {
    "patch_size": 4, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
tables = partial(image_tables, {"type": "vit", "config": VIT}, {"task": "image-classification"})


@pytest.fixture(scope="module")
def digits():
    return load_images("digits", SHAPE, shuffle=True, progress=NullProgress())


def test_batches_are_a_function_of_seed_and_step(digits):
    again = load_images("digits", SHAPE, shuffle=True, progress=NullProgress())
    assert digits.fingerprint == again.fingerprint
    for (pixels, labels), (same_pixels, same_labels) in [
        (digits.batch(1, step, 32), again.batch(1, step, 32)) for step in (7, 0)
    ]:
        assert pixels.shape == (32, 1, 8, 8) and torch.equal(pixels, same_pixels) and torch.equal(labels, same_labels)
    assert not torch.equal(digits.batch(1, 0, 32)[0], digits.batch(2, 0, 32)[0])


def test_an_epoch_has_every_image_once_and_none_that_is_held_out(digits):
    count = len(digits.training)
    pixels, labels = digits.batch(5, 0, count)
    all_pixels, all_labels = digits.examples(digits.training)
    assert torch.equal(pixels.flatten(1).sort(0).values, all_pixels.flatten(1).sort(0).values)
    assert torch.equal(labels.bincount(), all_labels.bincount())
    assert (count, len(digits.held_out)) == (1438, 359) and not set(digits.training) & set(digits.held_out)
    assert pixels.min() == -1 and pixels.max() == 1
    in_order, _ = load_images("digits", SHAPE, shuffle=False, progress=NullProgress()).batch(5, 0, count)
    assert torch.equal(in_order, all_pixels)


GENERATION, WITH_TEXT = {"task": "image-generation"}, {"task": "image-text", "sequence_length": 9}
MISTAKES = [
    ({"data": {"task": "image-clasification"}}, 'did you mean "image-classification"'),
    ({"data": {"vocab_size": 300}}, "data.vocab_size is for text"),
    ({"data": GENERATION | {"vocab_size": 300}}, "data.vocab_size is for text"),
    ({"data": WITH_TEXT | {"split": "test"}}, "data.split is for text"),
    ({"data": {"label_dropout": 0.2}}, "data.label_dropout is for image generation"),
    ({"data": GENERATION | {"label_dropout": 1.5}}, "data.label_dropout: should be less than or equal to 1"),
    ({"data": {"images": "a"}}, "data.images is for images with text"),
    ({"data": {"sequence_length": 4}}, "an image has one target"),
    ({"parallel": {"tp": 2}}, '"image-classification" with parallel.tp = 2'),
    ({"parallel": {"pp": 2}}, '"image-classification" with parallel.pp = 2'),
    ({"data": GENERATION, "parallel": {"tp": 2}}, '"image-generation" with parallel.tp = 2'),
    ({"data": WITH_TEXT, "parallel": {"tp": 2}}, '"image-text" with parallel.tp = 2'),
    ({"eval": {"fraction": 0.1}}, "eval.fraction = 0.1 is for text"),
    ({"data": GENERATION, "eval": {"fraction": 0.1}}, "eval.fraction = 0.1 is for text"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=lambda case: str(case)[:40])
def test_mistakes(changes, message):
    with pytest.raises(ConfigError, match=message.replace('"', "[\"']?")):
        parse_config(tables(**changes))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"type": "llama", "config": {}}, 'model.type = "llama" is not an image classifier'),
        ({"type": "vitt", "config": {}}, "did you mean"),
        ({"config": {"hiden_size": 3}}, "did you mean"),
        ({"config": VIT | {"num_labels": 7}}, "7 classes, and the data has 10"),
    ],
    ids=["llama", "vitt", "hiden_size", "classes"],
)
def test_models_that_do_not_fit(model, message):
    with pytest.raises(ConfigError, match=message):
        build_task(parse_config(tables(model=model)))


@pytest.mark.thorough
def test_a_run_measures_and_resumes_bit_for_bit(tmp_path):
    config = parse_config(tables(run={"save_every": 2}, eval={"every": 4}, precision={"level": "fp8"}))
    result = run(config, out=tmp_path / "whole")
    rows = read_metrics(tmp_path / "whole")
    assert [row.step for row in rows if row.held_out] == [4, 6]
    assert result == RunResult.read(tmp_path / "whole") and result.held_out == rows[-1].held_out
    assert result.unit == "images" and result.tokens == 48
    assert "fp8" in result.precision and result.converted
    assert_resumes(config, tmp_path)


@pytest.mark.thorough
def test_memory_and_time_are_planned():
    config = parse_config(tables(precision={"level": "fp8"}))
    plan = plan_memory(config, device="cpu")
    assert plan.tokens == 8 and plan.peak > 0
    forecast = plan_step(config, gpu="h100")
    assert forecast.tokens == 8 * 5 and forecast.configured.plan.converted  # patches and the class token


@pytest.mark.parametrize("name", ["vit-l16", "dit-xl"])
def test_ready_models_of_images_shrink(name):
    if name == "dit-xl":
        pytest.importorskip("diffusers")
    config = load_config(CONFIGS / f"{name}.toml", change=change_of(True))
    model, large = config.model.config, load_config(CONFIGS / f"{name}.toml").model.config
    heads, width = model["num_attention_heads"], model.get("hidden_size", 256)
    assert config.data.source == "digits" and heads < large["num_attention_heads"] and width <= 256
    assert model["patch_size"] == large["patch_size"]
    optim = config.optim
    assert name == "dit-xl" or (optim.batch, optim.lr, optim.warmup) == (32, 5e-4, 6)  # from which a ViT learns
