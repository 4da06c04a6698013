"""The task of image generation: noise by position, DiT of diffusers, runs, ranks, checkpoints and plans."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import assert_resumes, build_task, image_tables

from octavo.train import ConfigError, load_config, parse_config, read_metrics, run
from octavo.train.checkpoint.export import export
from octavo.train.data.images import ImageShape, load_images
from octavo.train.record.progress import NullProgress
from octavo.train.tasks.registry import task_of

pytest.importorskip("sklearn")
diffusers = pytest.importorskip("diffusers")

CONFIGS = Path(__file__).parents[2] / "configs"
DIT = {"patch_size": 4, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}
tables = partial(image_tables, {"type": "dit", "config": DIT}, {"task": "image-generation"})


@pytest.fixture(scope="module")
def noisy():
    return task_of(parse_config(tables())).load(parse_config(tables()), NullProgress())


def test_noise_timesteps_and_dropped_classes_belong_to_positions(noisy):
    inputs, classes = noisy.batch(1, 0, 64)
    parts = [noisy.batch(1, step, 16) for step in range(4)]
    for name, tensor in inputs.items():
        assert torch.equal(tensor, torch.cat([part[name] for part, _ in parts])), name
    assert torch.equal(classes, torch.cat([part for _, part in parts]))
    later, others = noisy.batch(1, 1, 64), noisy.batch(2, 0, 64)
    assert not torch.equal(later[0]["noise"], inputs["noise"]) and not torch.equal(others[0]["noise"], inputs["noise"])
    many, classes = noisy.batch(1, 3, 1024)
    assert many["noise"].mean().abs() < 0.01 and abs(many["noise"].std() - 1) < 0.01
    assert many["timestep"].min() < 20 and many["timestep"].max() > 980 and many["timestep"].dtype == torch.int64
    assert 0.07 < (classes == 10).float().mean() < 0.13 and classes.max() == 10
    assert not (noisy.held_out.batch(0, 0, 359)[1] == 10).any()


def test_the_noisy_image_is_that_of_the_schedule(noisy):
    inputs, _ = noisy.batch(1, 0, 8)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)[inputs["timestep"]].view(-1, 1, 1, 1)
    clean = (inputs["sample"] - (1 - alphas).sqrt() * inputs["noise"]) / alphas.sqrt()
    seen = inputs["timestep"] < 700  # later the image is too faint
    assert (torch.round((clean[seen] + 1) * 8) - (clean[seen] + 1) * 8).abs().max() < 1e-2  # digits have 17 levels


def test_a_model_starts_as_the_identity_and_drops_no_class(noisy):
    task = task_of(parse_config(tables()))(parse_config(tables()), noisy)
    model = task.build().float()
    inputs, classes = noisy.batch(1, 0, 8)
    assert not model(inputs["sample"], timestep=inputs["timestep"], class_labels=classes).sample.any()
    torch.nn.init.normal_(model.proj_out_2.weight)
    torch.nn.init.normal_(model.transformer_blocks[0].norm1.emb.class_embedder.embedding_table.weight)
    torch.nn.init.normal_(model.proj_out_1.weight)
    first, second = (
        model(inputs["sample"], timestep=inputs["timestep"], class_labels=classes).sample for _ in range(2)
    )
    assert model.training and first.any() and torch.equal(first, second)


def test_rows_to_ignore_do_not_count(noisy):
    config = parse_config(tables(precision={"parameters": "fp32"}))
    task = task_of(config)(config, noisy)
    model = task.build()
    torch.nn.init.normal_(model.proj_out_2.weight)
    inputs, classes = noisy.batch(1, 0, 8)
    ignored = torch.where(torch.arange(8) < 5, classes, -100)
    expected = task.loss(model, {name: tensor[:5] for name, tensor in inputs.items()}, classes[:5])
    assert task.loss(model, inputs, ignored).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"type": "vit"}, 'model.type = "vit" is not a diffusion transformer'),
        ({"config": {"num_layer": 3}}, "did you mean"),
        ({"config": DIT | {"num_embeds_ada_norm": 7}}, "7 classes, and the data has 10"),
        ({"config": DIT | {"out_channels": 2}}, "predicts the noise, of 1 channels"),
    ],
    ids=["vit", "num_layer", "classes", "variance"],
)
def test_models_that_do_not_fit(model, message):
    with pytest.raises(ConfigError, match=message):
        build_task(parse_config(tables(model=model)))


def test_latents_are_read_as_they_are(tmp_path):
    def load(channels=4):
        return load_images(str(tmp_path), ImageShape(channels, 8, 8), shuffle=False, progress=NullProgress())

    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for index in range(3):
            np.save(tmp_path / name / f"{index}.npy", rng.standard_normal((4, 8, 8)).astype(np.float16))
    pixels, labels = load().examples([0, 5])
    assert labels.tolist() == [0, 1] and pixels.dtype == torch.float32
    assert torch.equal(pixels[1], torch.from_numpy(np.load(tmp_path / "dog" / "2.npy").astype(np.float32)))
    with pytest.raises(ConfigError, match=r"cat/0.npy is float16 \[4, 8, 8\]; the model takes"):
        load(channels=3)
    np.save(tmp_path / "dog" / "1.npy", np.full((4, 8, 8), np.nan, np.float32))
    with pytest.raises(ConfigError, match="dog/1.npy holds NaN"):
        load()
    for name, message in (("1.npy", "dog/1.npy cannot be read"), ("1.png", "both images and latents")):
        (tmp_path / "dog" / name).write_bytes(b"no array")
        with pytest.raises(ConfigError, match=message):
            load()


@pytest.mark.thorough
def test_a_run_resumes_bit_for_bit_and_exports_to_diffusers(tmp_path):
    config = parse_config(
        tables(run={"steps": 4, "save_every": 2}, eval={"every": 2}, precision={"level": "fp8+activations+optimizer"})
    )
    result = run(config, out=tmp_path / "whole")
    assert result.unit == "images" and result.tokens == 32 and result.converted
    assert [row.step for row in read_metrics(tmp_path / "whole") if row.held_out] == [2, 4]
    assert_resumes(config, tmp_path)
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-000004"
    with pytest.raises(ConfigError, match="is a layout of language models"):
        export(checkpoint, tmp_path / "fp8", to="fp8-row")
    export(checkpoint, tmp_path / "exported")
    model = diffusers.DiTTransformer2DModel.from_pretrained(tmp_path / "exported")
    trained = diffusers.DiTTransformer2DModel.from_pretrained(checkpoint)
    for (name, weight), other in zip(model.named_parameters(), trained.parameters(), strict=True):
        assert torch.equal(weight, other), name
    schedule = diffusers.DDPMScheduler.from_pretrained(tmp_path / "exported" / "scheduler")
    assert schedule.config.beta_end == 0.02
    again = tables(run={"steps": 1}, optim={"warmup": 0}) | {"model": {"path": str(tmp_path / "exported")}}
    start = run(parse_config(again), out=tmp_path / "again").losses.first
    assert start < read_metrics(tmp_path / "whole")[0].loss


@pytest.mark.slow
def test_the_loss_of_the_digits_in_fp8_is_that_in_bf16(tmp_path):
    losses = {}
    for level in ("bf16", "fp8"):
        config = load_config(CONFIGS / "dit-digits.toml", [f"precision.level={level}", "run.device=cpu"])
        losses[level] = run(config, out=tmp_path / level).held_out["loss"]
    assert losses["bf16"] < 0.2 and abs(losses["fp8"] / losses["bf16"] - 1) <= 0.01
