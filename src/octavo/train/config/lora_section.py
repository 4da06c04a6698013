"""The section `[lora]`."""

from typing import Annotated, Literal

from pydantic import Field, Strict, model_validator

from octavo.train.config.sections import Count, Section


class LoraConfig(Section):
    """`[lora]`: train low-rank adapters of PEFT on a frozen model, and nothing else of it."""

    rank: Count = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapters' output is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], Strict(False)] = ("all-linear",)
    """Names of the layers with adapters, or their ends, as "q_proj"; "all-linear": all linear layers but the head."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapters' input."""
    rank_stabilized: bool = False
    """Multiply by alpha / √rank instead (rsLoRA)."""
    base: Literal["bf16", "fp8"] = "fp8"
    """"fp8": the frozen weights of layers that compute in FP8 exist in FP8 only, 1 byte per parameter; at level "bf16"
    no layer does. "bf16": all in `precision.parameters`. FSDP shards both."""
    weight_only: Literal["auto"] | Annotated[tuple[str, ...], Strict(False)] = "auto"
    """Name patterns of layers of a base in FP8 that compute in the dtype of their input: their weights are dequantized
    for each product. Gradients as of the dequantized weights, at the speed of bf16. ["*"]: all; []: none. "auto": the
    projections of attention, whose FP8 products cost the adapters' gradients most for their time."""

    @model_validator(mode="after")
    def _check_targets(self) -> "LoraConfig":
        if not self.targets or ("all-linear" in self.targets and len(self.targets) > 1):
            raise ValueError(
                f'lora.targets = {list(self.targets)}: give "all-linear" alone, or names of layers, as '
                '["q_proj", "v_proj"]'
            )
        if self.weight_only not in ("auto", ()) and self.base != "fp8":
            raise ValueError(
                f"lora.weight_only = {list(self.weight_only)} is for weights in FP8, and lora.base = {self.base!r}: "
                'leave it out, or set lora.base = "fp8"'
            )
        return self
