"""Image generation: the noise in an image of a class, with a diffusion transformer of diffusers (DiT)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.causal_head import IGNORE
from octavo.train.checkpoint.diffusers_models import IMAGE_GENERATION, library
from octavo.train.config.run_config import ConfigError, TrainConfig
from octavo.train.data.images import DIGITS, ImageShape, NoisyImages, image_classes, image_shape, load_labelled
from octavo.train.model import PARAMETER_DTYPES, build_of_kind, model_config
from octavo.train.record.progress import Progress
from octavo.train.tasks.task import Forward, Task

SCHEDULE = {"num_train_timesteps": 1000, "beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}
"""Of DDPM and DiT."""
CLASSES = "num_embeds_ada_norm"


class ImageGeneration(Task):
    """Predict the noise in an image, given its class and the timestep; the data is a `NoisyImages`.

    The loss is the mean squared error of the noise in fp32 (L_simple of DDPM). With `[eval]`, it is measured on the
    held-out images, with the same noise and timesteps each time.
    """

    kind = IMAGE_GENERATION
    unit = "images"

    @classmethod
    def load(cls, config: TrainConfig, progress: Progress) -> NoisyImages:
        """Read the images, or latents."""
        data, images = config.data, load_labelled(config, _shape(config), progress)
        noisy = NoisyImages(
            images, images.training, scheduler(), shuffle=data.shuffle, label_dropout=data.label_dropout
        )
        noisy.held_out = NoisyImages(images, images.held_out, scheduler(), shuffle=False, label_dropout=0.0)
        return noisy

    @classmethod
    def stand_in(cls, config: TrainConfig) -> Any:
        """The classes and the shape of the images."""
        return image_classes(config.data.source, _shape(config), config.model.config.get(CLASSES))

    def build(self, *, weights: bool = True) -> nn.Module:
        """Build the model; the number of classes and, of the digits, the shape of images are the data's where not
        configured.
        """
        names = self.data.names
        fields = _shape_fields(self.config) | {CLASSES: len(names)}
        model: Any = build_of_kind(self.config, self.kind, fields, weights=weights)
        if (classes := model.config[CLASSES]) != len(names):
            raise ConfigError(
                f"the model has {classes} classes, and the data has {len(names)}: "
                + ("give a checkpoint with as many" if self.config.model.path else f"leave model.config.{CLASSES} out")
            )
        if model.config["out_channels"] not in (None, model.config["in_channels"]):
            raise ConfigError(
                f"model.config.out_channels = {model.config['out_channels']}: the model predicts the noise, of "
                f"{model.config['in_channels']} channels, and no variance: leave it out"
            )
        built: nn.Module = model
        return built

    def empty_batch(self, size: int, device: torch.device) -> tuple[Mapping[str, Tensor], Tensor]:
        """Images, timesteps, noise and classes of zeros."""
        shape = self.data.shape
        pixels = torch.zeros((size, shape.channels, shape.height, shape.width), device=device)
        zeros = torch.zeros(size, dtype=torch.int64, device=device)
        return {"sample": pixels, "timestep": zeros, "noise": torch.zeros_like(pixels)}, torch.zeros_like(zeros)

    def loss(self, forward: Forward, inputs: Mapping[str, Tensor], targets: Tensor, **arguments: Tensor) -> Tensor:
        """The mean squared error of the noise, over the rows whose class [B] is not to be ignored."""
        sample = inputs["sample"].to(PARAMETER_DTYPES[self.config.precision.parameters])
        counts = targets != IGNORE
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


def _shape_fields(config: TrainConfig) -> dict[str, Any]:
    """Fields of the model's config where not configured: the digits are taken as they are."""
    return {"sample_size": 8, "in_channels": 1} if config.data.source == DIGITS else {}


def _shape(config: TrainConfig) -> ImageShape:
    """The images that the model takes."""
    assert ImageGeneration.kind.classes  # makes its config known
    return image_shape(model_config(config.model, _shape_fields(config)))
