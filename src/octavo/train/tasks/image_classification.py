"""Image classification: the class of an image, with any image classifier of Transformers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.train.checkpoint.kinds import IMAGE_CLASSIFICATION
from octavo.train.config.run_config import ConfigError, TrainConfig
from octavo.train.data.images import (
    DIGIT_FIELDS,
    DIGITS,
    ImageShape,
    LabelledImages,
    image_classes,
    image_shape,
    load_labelled,
)
from octavo.train.model import PARAMETER_DTYPES, build_of_kind, model_config
from octavo.train.record.metrics import DataSize
from octavo.train.record.progress import Progress
from octavo.train.tasks.task import Forward, Task


class ImageClassification(Task):
    """Predict the class of an image; the data is a `LabelledImages`.

    The loss is the cross-entropy of `model(pixel_values=inputs).logits` in fp32. The metric is `accuracy`: the share
    of the held-out images of which the class with the largest logit is the label.
    """

    kind = IMAGE_CLASSIFICATION
    unit = "images"

    @classmethod
    def load(cls, config: TrainConfig, progress: Progress) -> LabelledImages:
        """Read the images."""
        return load_labelled(config, _shape(config), progress)

    @classmethod
    def stand_in(cls, config: TrainConfig) -> Any:
        """The classes and the shape of the images."""
        return image_classes(config.data.source, _shape(config), config.model.config.get("num_labels"))

    def build(self, *, weights: bool = True) -> nn.Module:
        """Build the classifier; the number of classes and, of the digits, the shape of images are the data's where not
        configured.
        """
        names = self.data.names
        fields = _shape_fields(self.config) | {
            "id2label": dict(enumerate(names)),
            "label2id": {name: label for label, name in enumerate(names)},
        }
        if "num_labels" in self.config.model.config:
            del fields["id2label"], fields["label2id"]
        model: Any = build_of_kind(self.config, self.kind, fields, weights=weights)
        if (labels := model.config.num_labels) != len(names):
            raise ConfigError(
                f"the model has {labels} classes, and the data has {len(names)}: "
                + ("give a checkpoint with as many" if self.config.model.path else "leave model.config.num_labels out")
            )
        built: nn.Module = model
        return built

    def empty_batch(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Images and labels of zeros."""
        shape = self.data.shape
        pixels = torch.zeros((size, shape.channels, shape.height, shape.width), device=device)
        return pixels, torch.zeros(size, dtype=torch.int64, device=device)

    def loss(self, forward: Forward, inputs: Tensor, targets: Tensor, **arguments: Tensor) -> Tensor:
        """The cross-entropy of images [B,C,H,W] with labels [B]."""
        logits = forward(pixel_values=self._cast(inputs), **arguments).logits
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
            logits = forward(pixel_values=self._cast(pixels.to(device))).logits
            correct += int((logits.argmax(-1) == labels.to(device)).sum())
        return {"accuracy": correct / len(self.data.held_out)}

    def _cast(self, pixels: Tensor) -> Tensor:
        return pixels.to(PARAMETER_DTYPES[self.config.precision.parameters])


def _shape_fields(config: TrainConfig) -> dict[str, Any]:
    """Fields of the model's config where not configured: the digits are taken as they are."""
    return dict(DIGIT_FIELDS) if config.data.source == DIGITS else {}


def _shape(config: TrainConfig) -> ImageShape:
    """The images that the model takes."""
    return image_shape(model_config(config.model, _shape_fields(config)))
