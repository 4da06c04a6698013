"""The kinds of models that a run can train, and what makes them."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class ModelKind:
    noun: str  # What they are, as "causal language model"
    auto_class: str  # The class of Transformers that makes them, as "AutoModelForCausalLM"
    mapping: str  # Its table of classes by `model_type`, as "CAUSAL_LM"

    @property
    def classes(self) -> dict[str, Any]:
        """Names of the classes by `model_type`; a tuple where there are several."""
        from transformers.models.auto import modeling_auto

        names: dict[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{self.mapping}_MAPPING_NAMES")
        return names

    @property
    def auto(self) -> Any:
        import transformers

        return getattr(transformers, self.auto_class)

    def make_empty(self, model: nn.Module) -> None:
        # Transformers notes in `__init__` alone which outputs a class can record, such as the logits of routers.
        with torch.device("meta"):
            type(model)(deepcopy(model.config))


LANGUAGE = ModelKind("causal language model", "AutoModelForCausalLM", "CAUSAL_LM")
IMAGE_CLASSIFICATION = ModelKind("image classifier", "AutoModelForImageClassification", "IMAGE_CLASSIFICATION")
IMAGE_TEXT = ModelKind("vision-language model", "AutoModelForImageTextToText", "IMAGE_TEXT_TO_TEXT")
