"""Image classification: the class of an image, with any image classifier of Transformers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.train.checkpoint.pretrained import IMAGE_CLASSIFICATION
from octavo.train.config.run_config import ConfigError, TrainConfig
from octavo.train.data.digits import NAMES, Digits, load_digits
from octavo.train.model import PARAMETER_DTYPES, build_of_kind
from octavo.train.record.metrics import Progress
from octavo.train.tasks.task import Forward, Task


class ImageClassification(Task):
    """Predict the class of an image; the data is `Digits`.

    The loss is the cross-entropy of `model(pixel_values=inputs).logits` in fp32. The metric is `accuracy`: the share
    of the held-out images of which the class with the largest logit is the label.
    """

    kind = IMAGE_CLASSIFICATION
    unit = "images"

    @classmethod
    def load(cls, config: TrainConfig, progress: Progress) -> Digits:
        """Read the images."""
        progress.stage("reading the data")
        return load_digits(shuffle=config.data.shuffle)

    def build(self, *, weights: bool = True) -> nn.Module:
        """Build the classifier; shape of the images and number of classes are the data's where not configured."""
        _, channels, height, width = self.data.training.pixels.shape
        fields = {
            "num_channels": channels,
            "image_size": height if height == width else (height, width),
            "id2label": dict(enumerate(NAMES)),
            "label2id": {name: label for label, name in enumerate(NAMES)},
        }
        if "num_labels" in self.config.model.config:
            del fields["id2label"], fields["label2id"]
        model: Any = build_of_kind(self.config, self.kind, fields, weights=weights)
        if (labels := model.config.num_labels) != self.data.classes:
            raise ConfigError(
                f"the model has {labels} classes, and the data has {self.data.classes}: "
                + ("give a checkpoint with as many" if self.config.model.path else "leave model.config.num_labels out")
            )
        built: nn.Module = model
        return built

    def empty_batch(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Images and labels of zeros."""
        shape = size, *self.data.training.pixels.shape[1:]
        return torch.zeros(shape, device=device), torch.zeros(size, dtype=torch.int64, device=device)

    def loss(self, forward: Forward, inputs: Tensor, targets: Tensor, **arguments: Tensor) -> Tensor:
        """The cross-entropy of images [B,C,H,W] with labels [B]."""
        logits = forward(pixel_values=self._cast(inputs), **arguments).logits
        return F.cross_entropy(logits.float(), targets)

    def positions(self, model: Any) -> int:
        """Patches of an image and the class token, where the model has square patches; else 1."""
        patch = getattr(model.config, "patch_size", None)
        height, width = self.data.training.pixels.shape[-2:]
        return (height // patch) * (width // patch) + 1 if isinstance(patch, int) else 1

    def evaluate(self, forward: Forward, device: torch.device) -> dict[str, float]:
        """Accuracy on the held-out images."""
        correct, size, images = 0, self.config.optim.batch, self.data.held_out
        for pixels, labels in zip(images.pixels.split(size), images.labels.split(size), strict=True):
            logits = forward(pixel_values=self._cast(pixels.to(device))).logits
            correct += int((logits.argmax(-1) == labels.to(device)).sum())
        return {"accuracy": correct / len(images.labels)}

    def _cast(self, pixels: Tensor) -> Tensor:
        return pixels.to(PARAMETER_DTYPES[self.config.precision.parameters])
