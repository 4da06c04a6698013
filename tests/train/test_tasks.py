"""The tasks of images: their data, configuration, losses, runs, checkpoints and plans."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import Recorder, assert_resumes, build_task, image_tables, refused_run, rejected, slow

from octavo.nn.causal import IGNORE
from octavo.train import ConfigError, RunResult, load_config, parse_config, read_metrics, run, run_plan
from octavo.train.checkpoint.export import export
from octavo.train.checkpoint.retention import latest_checkpoint
from octavo.train.config.shrink import change_of
from octavo.train.data.images import ImageFiles, ImageShape, hash_files, load_images, split
from octavo.train.lora import freeze
from octavo.train.record.progress import NullProgress
from octavo.train.run_plan import plan_memory, plan_step
from octavo.train.tasks.images import EXACT_MATCH, ImageTextTask
from octavo.train.tasks.registry import task_of
from octavo.train.trainer import Trainer
from whole_plans import all_blocks

pytest.importorskip("sklearn")
diffusers = pytest.importorskip("diffusers")
Image = pytest.importorskip("PIL.Image")

SHAPE = ImageShape(1, 8, 8)
CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
VIT = SIZES | {"patch_size": 4}
vit_tables = partial(image_tables, {"type": "vit", "config": VIT}, {"task": "image-classification"})


def load(config, progress=None):
    return task_of(config).load(config, progress or NullProgress())


def digits_of(shuffle):
    return load_images("digits", SHAPE, shuffle=shuffle, progress=NullProgress())


@pytest.fixture(scope="module")
def digits():
    return digits_of(shuffle=True)


def test_batches_are_a_function_of_seed_and_step(digits):
    again = digits_of(shuffle=True)
    assert digits.fingerprint == again.fingerprint
    for step in (7, 0):
        batch = digits.batch(1, step, 32)
        assert batch[0].shape == (32, 1, 8, 8) and all(map(torch.equal, batch, again.batch(1, step, 32)))
    assert not torch.equal(digits.batch(1, 0, 32)[0], digits.batch(2, 0, 32)[0])


def test_an_epoch_has_every_image_once_and_none_that_is_held_out(digits):
    count = len(digits.training)
    pixels, labels = digits.batch(5, 0, count)
    all_pixels, all_labels = digits.examples(digits.training)
    assert torch.equal(pixels.flatten(1).sort(0).values, all_pixels.flatten(1).sort(0).values)
    assert torch.equal(labels.bincount(), all_labels.bincount())
    assert (count, len(digits.held_out)) == (1438, 359) and not set(digits.training) & set(digits.held_out)
    assert pixels.min() == -1 and pixels.max() == 1
    in_order, _ = digits_of(shuffle=False).batch(5, 0, count)
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
    rejected(message.replace('"', "[\"']?"), lambda: parse_config(vit_tables(**changes)))


@pytest.mark.thorough
def test_a_run_measures_and_resumes_bit_for_bit(tmp_path):
    config = parse_config(vit_tables(run={"save_every": 2}, eval={"every": 4}, precision={"level": "fp8"}))
    result = run(config, out=tmp_path / "whole")
    rows = read_metrics(tmp_path / "whole")
    assert [row.step for row in rows if row.held_out] == [4, 6]
    assert result == RunResult.read(tmp_path / "whole") and result.held_out == rows[-1].held_out
    assert result.unit == "images" and result.tokens == 48
    assert "fp8" in result.precision and result.converted
    assert_resumes(config, tmp_path)


@pytest.mark.thorough
def test_memory_and_time_are_planned():
    config = parse_config(vit_tables(precision={"level": "fp8"}))
    plan = plan_memory(config, device="cpu")
    assert plan.tokens == 8 and plan.peak > 0
    forecast = plan_step(config, gpu="h100")
    assert forecast.tokens == 8 * 5 and forecast.configured.plan.converted  # patches and the class token


@pytest.mark.parametrize("name", ["vit-l16", "dit-xl"])
def test_ready_models_of_images_shrink(name):
    config = load_config(CONFIGS / f"{name}.toml", change=change_of(True))
    model, large = config.model.config, load_config(CONFIGS / f"{name}.toml").model.config
    heads, width = model["num_attention_heads"], model.get("hidden_size", 256)
    assert config.data.source == "digits" and heads < large["num_attention_heads"] and width <= 256
    assert model["patch_size"] == large["patch_size"]
    optim = config.optim
    assert name == "dit-xl" or (optim.batch, optim.lr, optim.warmup) == (32, 5e-4, 6)  # from which a ViT learns


# --- image generation: noise by position, DiT of diffusers ---


DIT = {"patch_size": 4, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}
dit_tables = partial(image_tables, {"type": "dit", "config": DIT}, {"task": "image-generation"})


@pytest.fixture(scope="module")
def noisy():
    return load(parse_config(dit_tables()))


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
    task = task_of(parse_config(dit_tables()))(parse_config(dit_tables()), noisy)
    model = task.build().float()
    inputs, classes = noisy.batch(1, 0, 8)

    def predicted():
        return model(inputs["sample"], timestep=inputs["timestep"], class_labels=classes).sample

    assert not predicted().any()
    torch.nn.init.normal_(model.proj_out_2.weight)
    torch.nn.init.normal_(model.transformer_blocks[0].norm1.emb.class_embedder.embedding_table.weight)
    torch.nn.init.normal_(model.proj_out_1.weight)
    first, second = predicted(), predicted()
    assert model.training and first.any() and torch.equal(first, second)


def test_rows_to_ignore_do_not_count(noisy):
    config = parse_config(dit_tables(precision={"parameters": "fp32"}))
    task = task_of(config)(config, noisy)
    model = task.build()
    torch.nn.init.normal_(model.proj_out_2.weight)
    inputs, classes = noisy.batch(1, 0, 8)
    ignored = torch.where(torch.arange(8) < 5, classes, -100)
    expected = task.loss(model, {name: tensor[:5] for name, tensor in inputs.items()}, classes[:5])
    assert task.loss(model, inputs, ignored).item() == pytest.approx(expected.item(), rel=1e-6)


def test_latents_are_read_as_they_are(tmp_path):
    def latents(channels=4):
        return load_images(str(tmp_path), ImageShape(channels, 8, 8), shuffle=False, progress=NullProgress())

    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for index in range(3):
            np.save(tmp_path / name / f"{index}.npy", rng.standard_normal((4, 8, 8)).astype(np.float16))
    pixels, labels = latents().examples([0, 5])
    assert labels.tolist() == [0, 1] and pixels.dtype == torch.float32
    assert torch.equal(pixels[1], torch.from_numpy(np.load(tmp_path / "dog" / "2.npy").astype(np.float32)))
    rejected(r"cat/0.npy is float16 \[4, 8, 8\]; the model takes", latents, channels=3)
    np.save(tmp_path / "dog" / "1.npy", np.full((4, 8, 8), np.nan, np.float32))
    rejected("dog/1.npy holds NaN", latents)
    for name, message in (("1.npy", "dog/1.npy cannot be read"), ("1.png", "both images and latents")):
        (tmp_path / "dog" / name).write_bytes(b"no array")
        rejected(message, latents)


@pytest.mark.thorough
def test_a_run_resumes_bit_for_bit_and_exports_to_diffusers(tmp_path):
    saving, level = {"steps": 4, "save_every": 2}, {"level": "fp8+activations+optimizer"}
    config = parse_config(dit_tables(run=saving, eval={"every": 2}, precision=level))
    result = run(config, out=tmp_path / "whole")
    assert result.unit == "images" and result.tokens == 32 and result.converted
    assert [row.step for row in read_metrics(tmp_path / "whole") if row.held_out] == [2, 4]
    assert_resumes(config, tmp_path)
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-000004"
    rejected("is a layout of language models", export, checkpoint, tmp_path / "fp8", to="fp8-row")
    export(checkpoint, tmp_path / "exported")
    model = diffusers.DiTTransformer2DModel.from_pretrained(tmp_path / "exported")
    trained = diffusers.DiTTransformer2DModel.from_pretrained(checkpoint)
    for (name, weight), other in zip(model.named_parameters(), trained.parameters(), strict=True):
        assert torch.equal(weight, other), name
    schedule = diffusers.DDPMScheduler.from_pretrained(tmp_path / "exported" / "scheduler")
    assert schedule.config.beta_end == 0.02
    again = dit_tables(run={"steps": 1}, optim={"warmup": 0}) | {"model": {"path": str(tmp_path / "exported")}}
    start = run(parse_config(again), out=tmp_path / "again").losses.first
    assert start < read_metrics(tmp_path / "whole")[0].loss


@pytest.mark.slow
def test_the_loss_of_the_digits_in_fp8_is_that_in_bf16(tmp_path):
    losses = {}
    for level in ("bf16", "fp8"):
        config = load_config(CONFIGS / "dit-digits.toml", [f"precision.level={level}", "run.device=cpu"])
        losses[level] = run(config, out=tmp_path / level).held_out["loss"]
    assert losses["bf16"] < 0.2 and abs(losses["fp8"] / losses["bf16"] - 1) <= 0.01


# --- images and text: records, loss, metric, stages ---


CPU = torch.device("cpu")
LLAVA = {
    "vision_feature_select_strategy": "full", "vision_feature_layer": -1,
    "vision_config": {"model_type": "siglip_vision_model", "patch_size": 4, "vision_use_head": False, **SIZES},
    "text_config": {"model_type": "qwen2", "num_key_value_heads": 1, **SIZES},
}  # fmt: skip
ALIGN = ["vision_tower", "language_model", "lm_head"]
llava_tables = partial(
    image_tables, {"type": "llava", "config": LLAVA}, {"task": "image-text", "sequence_length": 20, "vocab_size": 300}
)


@pytest.fixture(scope="module")
def task():
    config = parse_config(llava_tables(precision={"parameters": "fp32"}))
    return ImageTextTask(config, load(config))


def test_rows_have_an_image_a_question_and_an_answer(task):
    inputs, targets = task.data.batch(1, 7, 16)
    again, same_targets = load(task.config).batch(1, 7, 16)
    assert torch.equal(targets, same_targets) and all(torch.equal(inputs[name], again[name]) for name in inputs)
    assert inputs["pixel_values"].shape == (16, 1, 8, 8)
    backend, texts = task.data.tokenizer.backend, set()
    for ids, labels in zip(inputs["input_ids"], targets, strict=True):
        assert (ids == task.data.tokenizer.size).sum() == 4  # features of patches
        answer = labels[labels != IGNORE]
        assert answer[-1] == task.data.tokenizer.end_id
        texts.add(backend.decode(answer[:-1].tolist()).rpartition(" ")[0])
        first = int((labels != IGNORE).nonzero()[0])
        assert torch.equal(ids[first + 1 : first + len(answer)], answer[:-1])
        assert backend.decode(ids[4 : first + 1].tolist()).endswith("?\n") or "Describe" in backend.decode(ids.tolist())
    assert {"a handwritten", "the digit"} <= texts
    assert len(task.data.held_out) == 359


def test_the_loss_is_the_mean_over_all_targets_of_a_batch(task):
    model = task.build()
    inputs, targets = task.data.batch(1, 0, 8)
    counts = (targets != IGNORE).sum(1)
    assert len(set(counts.tolist())) > 1  # rows of equal numbers would prove nothing
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    expected = plain(
        input_ids=inputs["input_ids"], pixel_values=inputs["pixel_values"], labels=targets, shift_labels=targets
    ).loss  # fmt: skip
    expected.backward()
    assert task.uneven  # so the trainer weights micro-batches by their targets
    parts = [
        task.loss(model, {name: t[i : i + 2] for name, t in inputs.items()}, targets[i : i + 2])
        * counts[i : i + 2].sum() / counts.sum()
        for i in range(0, 8, 2)
    ]  # fmt: skip
    sum(parts).backward()
    torch.testing.assert_close(sum(parts), expected)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(one.grad, other.grad, msg=name)
        else:
            assert name.startswith("model.vision_tower.post_layernorm") and other.grad is None


def test_exact_match_is_that_of_greedy_decoding(task):
    model, data = task.build().eval(), load(task.config)
    rows = data.held_out[:6]
    inputs, _ = data.rows(rows)
    data._targets[rows] = IGNORE
    for number, row in enumerate(rows):
        ids, pixels = inputs["input_ids"][number : number + 1, :10], inputs["pixel_values"][number : number + 1]
        greedy = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
        decoded = model.generate(input_ids=ids, pixel_values=pixels, **greedy)
        answer = decoded[0, 10:].numpy()
        data._inputs[row, 10:13] = answer
        data._targets[row, 9:12] = answer
        if number % 3 == 0:
            data._targets[row, 11] = (answer[-1] + 1) % 256
    data.held_out = rows
    with torch.no_grad():
        metrics = ImageTextTask(task.config, data).evaluate(model, CPU)
    assert metrics[EXACT_MATCH] == 4 / 6 and metrics["loss"] > 0


@pytest.mark.thorough
def test_held_out_metrics_that_are_not_finite(task, tmp_path, monkeypatch):
    """As of a model that overflows on held-out images alone; the run goes on to its end."""
    monkeypatch.setattr(ImageTextTask, "evaluate", lambda *_: {EXACT_MATCH: 0.5, "loss": float("nan")})
    result = run(parse_config(llava_tables(run={"steps": 1}, optim={"warmup": 0})), out=tmp_path)
    assert result.held_out == read_metrics(tmp_path)[-1].held_out == {EXACT_MATCH: 0.5, "loss": None}


def record(**changes):
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "a square"}]
    return {key: value for key, value in ({"image": "a.png", "conversations": turns} | changes).items() if value}


VISION = {"vision_config": LLAVA["vision_config"] | {"image_size": 8, "num_channels": 3}}


def test_files_are_read_and_too_few_or_too_long_are_errors(tmp_path):
    (tmp_path / "data.json").write_text(json.dumps([record(image=f"{number}.png") for number in range(10)]))
    data = {"source": str(tmp_path / "data.json"), "sequence_length": 40}
    for number in range(10):
        Image.new("RGB", (9, 5), (255, number, 0)).save(tmp_path / f"{number}.png")
    config = parse_config(llava_tables(data=data, model={"config": LLAVA | VISION}))
    inputs, targets = load(config).batch(0, 0, 8)
    assert inputs["pixel_values"].shape == (8, 3, 8, 8)
    torch.testing.assert_close(inputs["pixel_values"][0, :, 0, 0], torch.tensor([1.0, -1.0, -1.0]), rtol=0, atol=0.1)
    assert len(targets.unique(dim=0)) == 1
    few = parse_config(llava_tables(data=data, optim={"batch": 9}, model={"config": LLAVA | VISION}))
    rejected(r"8 examples to train on .* fewer than optim.batch = 9", load, few)
    short = parse_config(llava_tables(data=data | {"sequence_length": 5}, model={"config": LLAVA | VISION}))
    rejected(r"too short for 10 of 10 records: record 0 .* 4 of them the image's", load, short)


MISFITS = [
    (vit_tables, {"type": "llama", "config": {}}, 'model.type = "llama" is not an image classifier'),
    (vit_tables, {"type": "vitt", "config": {}}, "did you mean"),
    (vit_tables, {"config": {"hiden_size": 3}}, "did you mean"),
    (vit_tables, {"config": VIT | {"num_labels": 7}}, "7 classes, and the data has 10"),
    (dit_tables, {"type": "vit"}, 'model.type = "vit" is not a diffusion transformer'),
    (dit_tables, {"config": {"num_layer": 3}}, "did you mean"),
    (dit_tables, {"config": DIT | {"num_embeds_ada_norm": 7}}, "7 classes, and the data has 10"),
    (dit_tables, {"config": DIT | {"out_channels": 2}}, "predicts the noise, of 1 channels"),
    (llava_tables, {"config": LLAVA | {"text_config": {"model_type": "qwen2", "hiden_size": 3}}},
     "text_config.hiden_size"),
    (llava_tables, {"config": LLAVA | {"vision_config": {"model_type": "siglip_vision"}}}, "siglip_vision_model"),
    (llava_tables, {"frozen": ["vision_towr"]}, "did you mean 'vision_tower'"),
    (llava_tables, {"frozen": ["model", "lm_head"]}, "freezes all of LlavaForConditionalGeneration"),
    (llava_tables, {"type": "llama", "config": {}}, "not a vision-language model"),
]  # fmt: skip


@pytest.mark.parametrize(("tables", "model", "message"), MISFITS, ids=lambda case: str(case)[:40])
def test_models_that_do_not_fit(tables, model, message):
    rejected(message, lambda: build_task(parse_config(tables(model=model))))


def test_patterns_match_whole_names_and_ends(task):
    for patterns, trained in [(ALIGN, "multi_modal_projector"), (["model.*", "model"], "lm_head")]:
        model = task.build()
        freeze(model, patterns)
        assert {trained} == {
            next(part for part in name.split(".") if part in ("multi_modal_projector", "lm_head"))
            for name, parameter in model.named_parameters() if parameter.requires_grad
        }  # fmt: skip


@pytest.mark.thorough
def test_frozen_parameters_have_no_states_and_the_plan_agrees(task):
    states, planned = [], []
    for frozen in ([], ALIGN):
        config = parse_config(llava_tables(model={"frozen": frozen}, precision={"level": "fp8"}))
        trainer = Trainer(config, task.data, CPU)
        before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
        trainer.train_step()
        tensors = trainer.optimizer.tensors()
        states.append(sum(tensor.nbytes for tensor in tensors.values()))
        planned.append(plan_memory(config, device="cpu").largest["optimizer states"])
        changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
        if frozen:
            assert all("multi_modal_projector" in name for name in (*changed, *tensors)) and len(changed) == 4
    assert states[1] < states[0] / 10
    # The plan rounds each of the tensors up to 64 bytes, and counts 300 rows of the vocabulary.
    assert planned == pytest.approx(states, rel=0.15)


@pytest.mark.thorough
def test_a_run_measures_resumes_and_is_the_start_of_the_next_stage(tmp_path):
    settings = llava_tables(
        run={"steps": 4, "save_every": 2}, eval={"every": 4}, model={"frozen": ALIGN}, precision={"level": "fp8"},
        optim={"batch": 128, "micro_batches": 2},
    )  # fmt: skip
    config = parse_config(settings)
    result = run(config, out=tmp_path / "whole")
    assert [row.step for row in read_metrics(tmp_path / "whole") if row.held_out] == [4]
    assert result.held_out.keys() == {EXACT_MATCH, "loss"} and result.tokens == 4 * 128 * 20
    assert_resumes(config, tmp_path)
    start = latest_checkpoint(tmp_path / "whole")
    model = {"path": str(start), "frozen": ["vision_tower"]}
    later = run(parse_config(settings | {"model": model}), out=tmp_path / "later")
    assert later.losses.first < result.losses.first


def test_a_folder_of_images_for_each_class(tmp_path):
    for name, red, blue in (("red", 255, 0), ("blue", 0, 255)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (12, 12), (red, number, blue)).save(tmp_path / "images" / name / f"{number}.png")
    data = {"source": str(tmp_path / "images")}
    config = parse_config(vit_tables(model={"config": VIT | {"image_size": 8}}, data=data))
    data = load(config)
    pixels, labels = data.batch(0, 0, 8)
    assert data.names == ("blue", "red") and labels.sum() == 4
    assert torch.equal(pixels[:, 0, 0, 0] == 1, labels == 1)
    assert task_of(config)(config, data).build().config.id2label == {0: "blue", 1: "red"}
    (tmp_path / "images" / "red" / "3.png").write_bytes(b"")
    rejected(r"the image .*3\.png does not decode", load, config)


def with_blocks(decoder, tower):
    sizes = {"text_config": decoder, "vision_config": tower}
    return LLAVA | {name: LLAVA[name] | {"num_hidden_layers": count} for name, count in sizes.items()}


LATER = [("bf16", [-3, -2]), ("bf16", -6), ("fp8+activations", -1), ("fp8+activations", 3)]


@pytest.mark.parametrize(("level", "layer"), [("bf16", -1), *(slow(*case) for case in LATER)])
@pytest.mark.thorough
def test_a_few_blocks_of_tower_and_decoder_stand_for_all(level, layer, monkeypatch):
    """Features may be those of any block; of one that a short tower does not have, the tower runs whole."""
    config = with_blocks(6, 8 if level == "bf16" else 6) | {"vision_feature_layer": layer}
    precision = {"level": level, "min_features": 16}
    run = parse_config(llava_tables(model={"config": config}, precision=precision, optim={"batch": 4}))
    with all_blocks():
        whole = plan_memory(run)
    traced, copy = [], run_plan.copy_with_blocks
    monkeypatch.setattr(run_plan, "copy_with_blocks", lambda *args: traced.append(args[1]) or copy(*args))
    few = plan_memory(run)
    for name in ("at_peak", "largest", "phase", "saved_by_layer", "saved_by_dtype"):
        assert getattr(few, name) == getattr(whole, name), name
    assert traced[0]["model.language_model.layers"] == 2
    assert (traced[0]["model.vision_tower.encoder.layers"] == 2) is (layer == -1)  # later blocks are frozen: unused
    assert len(traced) == 4 or layer != -1  # both few, one more of each, and what a forward saves
    for size in (2, 9):  # norms of all gradients in one tensor are whole allocations
        assert few.replan(size).peak == pytest.approx(whole.replan(size).peak, abs=512)


@pytest.mark.parametrize("checkpointing", ["selective", slow("full")])
@pytest.mark.thorough
def test_the_decoder_is_recomputed_in_copies_with_few_blocks(checkpointing):
    """Also where the short tower has as many blocks."""
    run = parse_config(llava_tables(model={"config": with_blocks(6, 5)}, precision={"checkpointing": checkpointing}))
    few = plan_memory(run).at_peak
    with all_blocks():
        assert plan_memory(run).at_peak == few


def decoded(path, shape=SHAPE):
    return ImageFiles([path], hash_files([path]), shape).pixels([0])[0]


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bits_keep_their_range(suffix, tmp_path):
    grey = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1040
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(grey).save(path)
    expected = torch.from_numpy((grey >> 8).astype(np.float32)) / 127.5 - 1
    torch.testing.assert_close(decoded(path)[0], expected)
    torch.testing.assert_close(decoded(path, ImageShape(3, 8, 8)), expected.expand(3, 8, 8))


def test_images_are_turned_as_their_exif_asks(tmp_path):
    upright = np.repeat(np.arange(8, dtype=np.uint8) * 30, 8).reshape(8, 8)
    exif = Image.Exif()
    exif[0x0112] = 6  # a viewer turns it a quarter clockwise
    Image.fromarray(np.rot90(upright).copy()).save(tmp_path / "a.png", exif=exif)
    expected = torch.from_numpy(upright.astype(np.float32)) / 127.5 - 1
    torch.testing.assert_close(decoded(tmp_path / "a.png")[0], expected)


def test_modes_and_shapes(tmp_path):
    """Transparency is dropped, of an animation the first frame counts; none of it warns."""
    colours = Image.new("RGB", (4, 4), (255, 0, 0))
    palette = colours.convert("P")
    palette.save(tmp_path / "palette.png", transparency=bytes(range(256)))
    colours.convert("CMYK").save(tmp_path / "cmyk.tif")
    colours.convert("RGBA").save(tmp_path / "alpha.png")
    colours.save(tmp_path / "frames.gif", save_all=True, append_images=[Image.new("RGB", (4, 4), (0, 255, 0))])
    colours.resize((1, 1)).save(tmp_path / "one.png")
    colours.resize((1, 5000)).save(tmp_path / "tall.png")
    for path in tmp_path.iterdir():
        red = torch.tensor([1.0, -1.0, -1.0]).view(3, 1, 1).expand(3, 8, 8)
        torch.testing.assert_close(decoded(path, ImageShape(3, 8, 8)), red, msg=path.name)


def folder_of(base, names):
    for number, name in enumerate(names):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(base / name, format="PNG")
    model = {"config": VIT | {"image_size": 8, "num_channels": 1}}
    few = {"batch": 2, "warmup": None}
    return parse_config(vit_tables(model=model, data={"source": str(base)}, optim=few, run={"steps": 1}))


TWO = [f"{name}/{number}.png" for name in "ab" for number in range(4)]


def test_files_that_are_no_images_of_a_class(tmp_path):
    config, seen = folder_of(tmp_path, [*TWO, "0.png", "b/notes.txt", "__MACOSX/0.png", ".git/0.png"]), Recorder()
    (tmp_path / "a" / "._0.png").write_bytes(b"a resource fork")
    data = load(config, seen)
    assert data.names == ("a", "b") and len(data.training) + len(data.held_out) == 8
    assert seen.notes == [f"2 of 10 files in {tmp_path} are left out: 1 .png, 1 .txt"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([*TWO, "a/more/9.png"], r"a/more/9.png is not in the folder of a class but further below"),
        (["train/a/0.png", "train/b/0.png", "test/a/0.png"], "test/a/0.png is not in the folder of a class"),
        ([*TWO[:4], "b/0.png", "c/0.png"], 'no image is left to train on of the class "b"'),
    ],
)
def test_folders_that_would_be_read_otherwise_than_meant(names, message, tmp_path):
    rejected(message, lambda: load(folder_of(tmp_path, names)))


def test_the_class_that_changed_before_a_resume_is_named(tmp_path):
    config = folder_of(tmp_path / "images", TWO)
    run(config, out=tmp_path / "out")
    (tmp_path / "images" / "b").rename(tmp_path / "images" / "c")  # the order of classes stays
    message = 'images has now: class "b": then 4 examples, digest .*, now not there'
    refused_run(message, config, tmp_path / "out", resume=True)
    (tmp_path / "images" / "c").rename(tmp_path / "images" / "b")
    Image.new("L", (8, 8), 99).save(tmp_path / "images" / "b" / "new.png")
    message = 'other data than .*images has now: class "b": then 4 examples, .*now 5'
    refused_run(message, config, tmp_path / "out", resume=True)


@pytest.mark.parametrize("kind", ["image", "latent"])
def test_a_file_that_changes_during_a_run(kind, tmp_path):
    path = tmp_path / "a.png"
    Image.new("L", (8, 8), 1).save(path)
    if kind == "latent":
        path = tmp_path / "a.npy"
        np.save(path, np.zeros((1, 8, 8), np.float32))
    data = ImageFiles([path], hash_files([path]), SHAPE, latents=kind != "image")
    data.pixels([0])
    path.write_bytes(path.read_bytes() + b" ")
    rejected(rf"a\.{path.suffix[1:]} changed after the run began", data.pixels, [0])
    path.unlink()
    rejected("cannot be read: No such file", data.pixels, [0])


def test_examples_of_one_image_are_on_the_same_side():
    training, held_out = split("abcdeaedcbffgghhiijj")
    assert [*map("abcdeaedcbffgghhiijj".__getitem__, held_out)] == ["e", "e", "j", "j"]
    assert sorted(training + held_out) == list(range(20))
    assert split(range(12)) == ([0, 1, 2, 3, 5, 6, 7, 8, 10, 11], [4, 9])


def image_text(folder, records, **changes):
    folder.mkdir(exist_ok=True)
    for number, name in enumerate("abcdef"):
        Image.new("L", (8, 8), 40 * number).save(folder / f"{name}.png")
    (folder / "bad.png").write_bytes(b"no image")
    content = records if isinstance(records, str) else json.dumps(records)
    (folder / "data.json").write_text(content, encoding="utf-8-sig")
    data = {"source": str(folder / "data.json"), "sequence_length": 40}
    config = parse_config(llava_tables(data=data, optim={"batch": 1}, model={"config": LLAVA | VISION | changes}))
    return load(config)


def test_records_of_one_image_are_on_the_same_side(tmp_path):
    records = [record(image=f"{name}.png") for name in "aabbccddeeff"]
    data = image_text(tmp_path, records)
    sides = [{image // 2 for image in part} for part in (data._image_of[: len(data.training)], data._image_of[-2:])]
    assert sides == [{0, 1, 2, 3, 5}, {4}] and len(data.held_out) == 2


def says(*turns):
    return record(conversations=[{"from": speaker, "value": text} for speaker, text in turns])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (record(image=None), "record 1 of data.json, image: Field required"),
        (record(conversations=[{"from": "human"}, {}]), "record 1 of data.json, conversations.0.value: Field required"),
        (says(("he", "x")), "conversations.0.from: Input should be 'human' or 'gpt'"),
        (says(("gpt", "x")), "record 1 .*a human and gpt should speak in turn"),
        (says(("human", "x")), "has 1 turns; a human and gpt should speak in turn, gpt last"),
        (says(("human", "x"), ("gpt", "y")), "record 1 .*<image> 0 times"),
        (says(("human", "<image>"), ("gpt", "<image>")), "gpt has <image>, which only the human writes"),
        (record(image="z.png"), r"the image .*z\.png' cannot be read"),
        (record(image="bad.png"), r"the image .*bad\.png does not decode"),
        (record(image="../a.png"), r'record 1 of data.json: "image" is \'../a.png\', outside of'),
        (record(image="/etc/logo.png"), "outside of .* set data.images"),
        (record(image="a\0.png"), r"the image .*a\\x00.png' cannot be read: embedded null byte"),
        (record(image="\ud800.png"), "data.source = .*data.json: Invalid JSON: .*hex escape"),
        ("text", "record 1 of data.json: Input should be an object"),
    ],
)
def test_mistakes_in_records(bad, message, tmp_path):
    rejected(message, lambda: image_text(tmp_path / "data", [record(), bad]))


@pytest.mark.parametrize(("content", "message"), [("[" * 100_000, "recursion limit"), ("[]", "has no record")])
def test_files_without_records(content, message, tmp_path):
    rejected(message, image_text, tmp_path / "data", content)


def test_a_placeholder_that_text_has_too(tmp_path):
    """The features would replace embeddings of text."""
    with pytest.raises(ConfigError, match="record 0 of data.json has the token 65 .* placeholder of images"):
        image_text(tmp_path, [record()], image_token_index=65)
