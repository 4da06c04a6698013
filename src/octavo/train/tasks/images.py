"""Tasks with images: their class, the noise in them (diffusion), or answers to questions about one.

The last is for models in the form of LLaVA: features of an image replace the embeddings of as many placeholder tokens.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.causal import IGNORE
from octavo.train.checkpoint.diffusers_models import IMAGE_GENERATION, library
from octavo.train.checkpoint.kinds import IMAGE_CLASSIFICATION, IMAGE_TEXT
from octavo.train.config.run_config import ConfigError, TrainConfig
from octavo.train.config.sections import expand, hub_folder
from octavo.train.data import images
from octavo.train.data.images import DIGIT_FIELDS, DIGITS, PLACEHOLDER, ImageText, LabelledImages, NoisyImages
from octavo.train.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from octavo.train.lora import freeze_unused
from octavo.train.model import PARAMETER_DTYPES, build_of_kind, check_fit, model_config
from octavo.train.record.metrics import DataSize
from octavo.train.record.progress import Progress
from octavo.train.tasks.task import Forward, Task, TextTask

SCHEDULE = {"num_train_timesteps": 1000, "beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}
"""Of DDPM and DiT."""


class ImageTask(Task):
    unit = "images"
    digit_fields: ClassVar[dict[str, Any]]  # Fields of the model's config where not configured, for the digits
    classes_field: ClassVar[str]  # The field with the number of classes

    @classmethod
    def shape(cls, config: TrainConfig) -> images.ImageShape:
        assert cls.kind.classes  # makes its config known
        return images.image_shape(model_config(config.model, cls.digit_fields if config.data.source == DIGITS else {}))

    @classmethod
    def stand_in(cls, config: TrainConfig) -> Any:
        names = images.image_classes(config.data.source, config.model.config.get(cls.classes_field))
        return SimpleNamespace(names=names, shape=cls.shape(config))

    def build_for_classes(self, fields: Mapping[str, Any], *, weights: bool) -> Any:
        own = self.digit_fields if self.config.data.source == DIGITS else {}
        model = build_of_kind(self.config, self.kind, {**own, **fields}, weights=weights)
        if (classes := getattr(model.config, self.classes_field)) != len(self.data.names):
            advice = f"leave model.config.{self.classes_field} out"
            remedy = "give a checkpoint with as many" if self.config.model.path else advice
            raise ConfigError(f"the model has {classes} classes, and the data has {len(self.data.names)}: {remedy}")
        return model

    def empty_batch(self, size: int, device: torch.device) -> tuple[Any, Tensor]:
        shape = self.data.shape
        pixels = torch.zeros((size, shape.channels, shape.height, shape.width), device=device)
        return pixels, torch.zeros(size, dtype=torch.int64, device=device)

    def cast(self, pixels: Tensor) -> Tensor:
        return pixels.to(PARAMETER_DTYPES[self.config.precision.parameters])


class ImageClassification(ImageTask):
    """Predict the class of an image; the data is a `LabelledImages`."""

    kind = IMAGE_CLASSIFICATION
    digit_fields = DIGIT_FIELDS
    classes_field = "num_labels"

    @classmethod
    def load(cls, config: TrainConfig, progress: Progress) -> LabelledImages:
        return images.load_labelled(config, cls.shape(config), progress)

    def build(self, *, weights: bool = True) -> Any:
        """Build the classifier; number and names of classes are the data's where not configured."""
        names = {"id2label": dict(enumerate(self.data.names))}
        names["label2id"] = {name: label for label, name in names["id2label"].items()}
        configured = self.classes_field in self.config.model.config
        return self.build_for_classes({} if configured else names, weights=weights)

    def loss(self, forward: Forward, inputs: Tensor, targets: Tensor, **arguments: Tensor) -> Tensor:
        logits = forward(pixel_values=self.cast(inputs), **arguments).logits
        return F.cross_entropy(logits.float(), targets)

    def data_size(self) -> DataSize:
        return DataSize(rows=len(self.data.training))

    def positions(self, model: nn.Module) -> int:
        """Patches of an image and the class token, where the model has square patches; else 1."""
        patch, shape = getattr(model.config, "patch_size", None), self.data.shape
        return shape.patches(patch) + 1 if isinstance(patch, int) else 1

    def evaluate(self, forward: Forward, device: torch.device) -> dict[str, float]:
        """Accuracy on the held-out images, if there are any: there are none of fewer than five."""
        if not self.data.held_out:
            return {}
        correct, size = 0, self.config.optim.batch
        for first in range(0, len(self.data.held_out), size):
            pixels, labels = self.data.examples(self.data.held_out[first : first + size])
            logits = forward(pixel_values=self.cast(pixels.to(device))).logits
            correct += int((logits.argmax(-1) == labels.to(device)).sum())
        return {"accuracy": correct / len(self.data.held_out)}


class ImageGeneration(ImageTask):
    """Predict the noise in an image, given its class and the timestep (DDPM); the data is a `NoisyImages`."""

    kind = IMAGE_GENERATION
    digit_fields = {"sample_size": 8, "in_channels": 1}  # noqa: RUF012
    classes_field = "num_embeds_ada_norm"

    @classmethod
    def load(cls, config: TrainConfig, progress: Progress) -> NoisyImages:
        data, labelled = config.data, images.load_labelled(config, cls.shape(config), progress)
        noisy = NoisyImages(
            labelled, labelled.training, scheduler(), shuffle=data.shuffle, label_dropout=data.label_dropout
        )
        noisy.held_out = NoisyImages(labelled, labelled.held_out, scheduler(), shuffle=False, label_dropout=0.0)
        return noisy

    def build(self, *, weights: bool = True) -> Any:
        model = self.build_for_classes({self.classes_field: len(self.data.names)}, weights=weights)
        channels, out = model.config["in_channels"], model.config["out_channels"]
        if out not in (None, channels):
            reason = f"the model predicts the noise, of {channels} channels, and no variance"
            raise ConfigError(f"model.config.out_channels = {out}: {reason}: leave it out")
        return model

    def empty_batch(self, size: int, device: torch.device) -> tuple[Mapping[str, Tensor], Tensor]:
        pixels, classes = super().empty_batch(size, device)
        return {"sample": pixels, "timestep": classes, "noise": torch.zeros_like(pixels)}, torch.zeros_like(classes)

    def loss(self, forward: Forward, inputs: Mapping[str, Tensor], targets: Tensor, **arguments: Tensor) -> Tensor:
        """The mean squared error of the noise, over the rows whose class [B] is not to be ignored."""
        sample, counts = self.cast(inputs["sample"]), targets != IGNORE
        predicted: Tensor = forward(sample, timestep=inputs["timestep"], class_labels=targets.clamp(min=0)).sample
        errors = (predicted.float() - inputs["noise"]).square().flatten(1).mean(1)
        return (errors * counts).sum() / counts.sum()

    def positions(self, model: Any) -> int:
        shape: images.ImageShape = self.data.shape
        return shape.patches(int(model.config["patch_size"]))

    @property
    def held_out(self) -> NoisyImages | None:
        return None if self.config.eval is None else getattr(self.data, "held_out", None)

    def save(self, folder: Path) -> None:
        """Write also the schedule of the noise, for pipelines of diffusers."""
        super().save(folder)
        scheduler().save_pretrained(folder / "scheduler")


def scheduler() -> Any:
    return library().DDPMScheduler(**SCHEDULE)


EXACT_MATCH = "caption exact match"


class ImageTextTask(TextTask):
    """Predict the answers in conversations about images; the data is an `ImageText`."""

    # `caption exact match` is the share of held-out records whose answers greedy decoding gives exactly: each of their
    # tokens has the largest logit behind the tokens before it, which one forward tells.

    kind = IMAGE_TEXT

    def __init__(self, config: TrainConfig, data: object) -> None:
        super().__init__(config, data)
        self._settings = settings(config, self.data.tokenizer)

    @classmethod
    def load(cls, config: TrainConfig, progress: Progress) -> ImageText:
        progress.stage("reading the data")
        data, batch = config.data, config.optim.batch
        read: Callable[[images.ImageShape], images.Images]
        if data.source == DIGITS:
            training, held_out = images.digit_records()
            read = partial(images.DigitImages, images.read_digits()[0])
        else:
            records, paths = images.read_records(expand(data.source), expand(data.images or Path(data.source).parent))
            contents = images.hash_files(paths)
            training, held_out = ([records[number] for number in part] for part in images.split(contents))
            read = partial(images.ImageFiles, paths, contents)
        images.check_count(len(training), batch, data.source)
        if folder := data.tokenizer or config.model.path:
            tokenizer = load_tokenizer(hub_folder(folder))
        else:
            texts = ("\n".join(chain.from_iterable(record.turns)) for record in training)
            tokenizer = train_tokenizer((text.replace(PLACEHOLDER, "") for text in texts), data.vocab_size)
        model_settings = settings(config, tokenizer)
        shape = images.image_shape(model_settings.vision_config)
        image, length = [model_settings.image_token_id] * image_tokens(model_settings), data.sequence_length
        return ImageText((training, held_out), read(shape), tokenizer, image, length=length, shuffle=data.shuffle)

    def build(self, *, weights: bool = True) -> Any:
        """Build the model; vocabulary and, of the digits, the shape of images are the data's where not configured."""
        tokenizer = self.data.tokenizer
        model = build_of_kind(self.config, self.kind, fields(self.config, tokenizer), weights=weights)
        check_fit(model, self.config.model, self.config.data.sequence_length, tokenizer)
        if (rows := model.get_input_embeddings().weight.shape[0]) <= model.config.image_token_id:
            problem = f"the placeholder of images has the id {model.config.image_token_id}"
            remedy = "set model.config.text_config.vocab_size to more, or leave it out"
            raise ConfigError(f"{problem}, and the vocabulary has {rows} rows: {remedy}")
        placeholder = model.config.image_token_id, image_tokens(model.config)
        model.model.get_placeholder_mask = partial(_placeholder_mask, *placeholder)
        inputs, targets = self.empty_batch(1, torch.device("cpu"))
        freeze_unused(model, lambda copy: self.loss(copy, inputs, targets, use_cache=False))
        return model

    def empty_batch(self, size: int, device: torch.device) -> tuple[Mapping[str, Tensor], Tensor]:
        shape = images.image_shape(self._settings.vision_config)
        ids = torch.zeros((size, self.config.data.sequence_length), dtype=torch.int64, device=device)
        pixels = torch.zeros((size, shape.channels, shape.height, shape.width), device=device)
        return {"input_ids": ids, "pixel_values": pixels}, torch.zeros_like(ids)

    def loss(self, forward: Forward, inputs: Mapping[str, Tensor], targets: Tensor, **arguments: object) -> Tensor:
        arguments = {"use_cache": False} | self._inputs(inputs) | arguments
        loss: Tensor = forward(**arguments, labels=targets, shift_labels=targets).loss
        return loss

    def data_size(self) -> DataSize:
        return DataSize(rows=len(self.data.training))

    @property
    def uneven(self) -> bool:
        return True

    def evaluate(self, forward: Forward, device: torch.device) -> dict[str, float]:
        """The metrics; logits are computed where any record of a micro-batch has a target."""
        size = max(1, self.config.optim.batch // self.config.optim.micro_batches)
        exact, total, count = 0, 0.0, 0
        for first in range(0, len(self.data.held_out), size):
            inputs, targets = self.data.rows(self.data.held_out[first : first + size])
            positions = (targets != IGNORE).any(0).nonzero().squeeze(1).to(device)
            inputs, targets = {name: tensor.to(device) for name, tensor in inputs.items()}, targets.to(device)
            logits = forward(**self._inputs(inputs), logits_to_keep=positions, use_cache=False).logits
            targets = targets[:, positions]
            is_target = targets != IGNORE
            exact += int(((logits.argmax(-1) == targets) | ~is_target).all(1).sum())
            total += float(F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum"))
            count += int(is_target.sum())
        return {EXACT_MATCH: exact / len(self.data.held_out), "loss": total / count} if count else {}

    def _inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        dtype = PARAMETER_DTYPES[self.config.precision.parameters]
        return {"input_ids": inputs["input_ids"], "pixel_values": inputs["pixel_values"].to(dtype)}


def _placeholder_mask(id: int, count: int, input_ids: Tensor, inputs_embeds: Tensor, image_features: Tensor) -> Tensor:
    """The mask of an image's placeholder tokens, without the wait for the device by which Transformers counts them."""
    # Every row has as many by construction (`ImageText`).
    if len(image_features) != len(input_ids) * count:
        features = f"the vision tower gives {len(image_features) // len(input_ids)} features for an image"
        raise ValueError(f"{features}, and there are {count} placeholder tokens")
    return (input_ids == id).unsqueeze(-1)


def settings(config: TrainConfig, tokenizer: TextTokenizer) -> Any:
    """The config of the model of a run. Raises ConfigError if it has no image, no text or no placeholder."""
    found = model_config(config.model, fields(config, tokenizer))
    for name in ("vision_config", "text_config", "image_token_id"):
        if getattr(found, name, None) is None:
            expected = 'data.task = "image-text" takes models in the form of LLaVA, as model.type = "llava"'
            raise ConfigError(f"{found.model_type} has no {name}: {expected}")
    return found


def fields(config: TrainConfig, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Fields of the model's config where not configured: a token for images behind the tokenizer's."""
    backend = getattr(tokenizer, "backend", None)  # a vocabulary that is planned has none
    own = None if backend is None else backend.token_to_id(PLACEHOLDER)
    size, end = tokenizer.size, tokenizer.end_id
    text = {"vocab_size": size + (own is None), "bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
    vision = dict(DIGIT_FIELDS) if config.data.source == DIGITS else {}
    return {"image_token_index": size if own is None else own, "text_config": text, "vision_config": vision}


def image_tokens(model_settings: Any) -> int:
    """Features that a model makes of an image: of its patches, and of a class token where towers have one."""
    vision = model_settings.vision_config
    has_class_token = "siglip" not in vision.model_type
    leaves_first_out = getattr(model_settings, "vision_feature_select_strategy", "full") == "default"
    return images.image_shape(vision).patches(int(vision.patch_size)) + int(has_class_token) - int(leaves_first_out)
