"""Images: their class, by any image classifier of Transformers, or the noise in them, by a diffusion transformer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.nn.causal import IGNORE
from octavo.train.checkpoint.diffusers_models import IMAGE_GENERATION, library
from octavo.train.checkpoint.kinds import IMAGE_CLASSIFICATION
from octavo.train.config.run_config import ConfigError, TrainConfig
from octavo.train.data.images import (
    DIGIT_FIELDS,
    DIGITS,
    ImageShape,
    LabelledImages,
    NoisyImages,
    image_classes,
    image_shape,
    load_labelled,
)
from octavo.train.model import PARAMETER_DTYPES, build_of_kind, model_config
from octavo.train.record.metrics import DataSize
from octavo.train.record.progress import Progress
from octavo.train.tasks.task import Forward, Task

SCHEDULE = {"num_train_timesteps": 1000, "beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}
"""Of DDPM and DiT."""


class ImageTask(Task):
    """What tasks of images with classes share."""

    unit = "images"
    digit_fields: ClassVar[dict[str, Any]]  # Fields of the model's config where not configured, for the digits
    classes_field: ClassVar[str]  # The field with the number of classes

    @classmethod
    def shape(cls, config: TrainConfig) -> ImageShape:
        """The images that the model takes; the digits are taken as they are."""
        assert cls.kind.classes  # makes its config known
        return image_shape(model_config(config.model, cls.digit_fields if config.data.source == DIGITS else {}))

    @classmethod
    def stand_in(cls, config: TrainConfig) -> Any:
        """The classes and the shape of the images."""
        return image_classes(config.data.source, cls.shape(config), config.model.config.get(cls.classes_field))

    def build_for_classes(self, fields: Mapping[str, Any], *, weights: bool) -> Any:
        """Build the model with these fields, of as many classes as the data has."""
        own = self.digit_fields if self.config.data.source == DIGITS else {}
        model = build_of_kind(self.config, self.kind, {**own, **fields}, weights=weights)
        if (classes := getattr(model.config, self.classes_field)) != len(self.data.names):
            raise ConfigError(
                f"the model has {classes} classes, and the data has {len(self.data.names)}: "
                + ("give a checkpoint with as many" if self.config.model.path else
                   f"leave model.config.{self.classes_field} out")
            )  # fmt: skip
        return model

    def empty_batch(self, size: int, device: torch.device) -> tuple[Any, Tensor]:
        """Images and classes of zeros."""
        shape = self.data.shape
        pixels = torch.zeros((size, shape.channels, shape.height, shape.width), device=device)
        return pixels, torch.zeros(size, dtype=torch.int64, device=device)

    def cast(self, pixels: Tensor) -> Tensor:
        """Pixels in the dtype of the parameters."""
        return pixels.to(PARAMETER_DTYPES[self.config.precision.parameters])


class ImageClassification(ImageTask):
    """Predict the class of an image; the data is a `LabelledImages`.

    The loss is the cross-entropy of `model(pixel_values=inputs).logits` in fp32. The metric is `accuracy`: the share
    of the held-out images of which the class with the largest logit is the label.
    """

    kind = IMAGE_CLASSIFICATION
    digit_fields = DIGIT_FIELDS
    classes_field = "num_labels"

    @classmethod
    def load(cls, config: TrainConfig, progress: Progress) -> LabelledImages:
        """Read the images."""
        return load_labelled(config, cls.shape(config), progress)

    def build(self, *, weights: bool = True) -> Any:
        """Build the classifier; number and names of classes are the data's where not configured."""
        names = {"id2label": dict(enumerate(self.data.names))}
        names["label2id"] = {name: label for label, name in names["id2label"].items()}
        configured = self.classes_field in self.config.model.config
        return self.build_for_classes({} if configured else names, weights=weights)

    def loss(self, forward: Forward, inputs: Tensor, targets: Tensor, **arguments: Tensor) -> Tensor:
        """The cross-entropy of images [B,C,H,W] with labels [B]."""
        logits = forward(pixel_values=self.cast(inputs), **arguments).logits
        return F.cross_entropy(logits.float(), targets)

    def data_size(self) -> DataSize:
        """Images that are trained on."""
        return DataSize(rows=len(self.data.training))

    def positions(self, model: Any) -> int:
        """Patches of an image and the class token, where the model has square patches; else 1."""
        patch, shape = getattr(model.config, "patch_size", None), self.data.shape
        return (shape.height // patch) * (shape.width // patch) + 1 if isinstance(patch, int) else 1

    def evaluate(self, forward: Forward, device: torch.device) -> dict[str, float]:
        """Accuracy on the held-out images, if there are any: there are none of fewer than five."""
        if not self.data.held_out:
            return {}
        correct = 0
        for pixels, labels in self.data.held_out_batches(self.config.optim.batch):
            logits = forward(pixel_values=self.cast(pixels.to(device))).logits
            correct += int((logits.argmax(-1) == labels.to(device)).sum())
        return {"accuracy": correct / len(self.data.held_out)}


class ImageGeneration(ImageTask):
    """Predict the noise in an image, given its class and the timestep; the data is a `NoisyImages`.

    The loss is the mean squared error of the noise in fp32 (L_simple of DDPM). With `[eval]`, it is measured on the
    held-out images, with the same noise and timesteps each time.
    """

    kind = IMAGE_GENERATION
    digit_fields = {"sample_size": 8, "in_channels": 1}  # noqa: RUF012
    classes_field = "num_embeds_ada_norm"

    @classmethod
    def load(cls, config: TrainConfig, progress: Progress) -> NoisyImages:
        """Read the images, or latents."""
        data, images = config.data, load_labelled(config, cls.shape(config), progress)
        noisy = NoisyImages(
            images, images.training, scheduler(), shuffle=data.shuffle, label_dropout=data.label_dropout
        )
        noisy.held_out = NoisyImages(images, images.held_out, scheduler(), shuffle=False, label_dropout=0.0)
        return noisy

    def build(self, *, weights: bool = True) -> Any:
        """Build the model; the number of classes is the data's where not configured."""
        model = self.build_for_classes({self.classes_field: len(self.data.names)}, weights=weights)
        if model.config["out_channels"] not in (None, model.config["in_channels"]):
            raise ConfigError(
                f"model.config.out_channels = {model.config['out_channels']}: the model predicts the noise, of "
                f"{model.config['in_channels']} channels, and no variance: leave it out"
            )
        return model

    def empty_batch(self, size: int, device: torch.device) -> tuple[Mapping[str, Tensor], Tensor]:
        """Images, timesteps, noise and classes of zeros."""
        pixels, classes = super().empty_batch(size, device)
        return {"sample": pixels, "timestep": classes, "noise": torch.zeros_like(pixels)}, torch.zeros_like(classes)

    def loss(self, forward: Forward, inputs: Mapping[str, Tensor], targets: Tensor, **arguments: Tensor) -> Tensor:
        """The mean squared error of the noise, over the rows whose class [B] is not to be ignored."""
        sample, counts = self.cast(inputs["sample"]), targets != IGNORE
        predicted: Tensor = forward(sample, timestep=inputs["timestep"], class_labels=targets.clamp(min=0)).sample
        errors = (predicted.float() - inputs["noise"]).square().flatten(1).mean(1)
        loss: Tensor = (errors * counts).sum() / counts.sum()
        return loss

    def positions(self, model: Any) -> int:
        """Patches of an image."""
        patch, shape = int(model.config["patch_size"]), self.data.shape
        positions: int = (shape.height // patch) * (shape.width // patch)
        return positions

    @property
    def held_out(self) -> NoisyImages | None:
        """Noisy images that are not trained on; None without `[eval]`."""
        return None if self.config.eval is None else getattr(self.data, "held_out", None)

    def save(self, folder: Path) -> None:
        """Write also the schedule of the noise, for pipelines of diffusers."""
        super().save(folder)
        scheduler().save_pretrained(folder / "scheduler")


def scheduler() -> Any:
    """The schedule of the noise: diffusers' `DDPMScheduler`."""
    return library().DDPMScheduler(**SCHEDULE)
