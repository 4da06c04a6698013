"""The section `[optim]` of a run's configuration."""

from math import isqrt
from typing import Annotated, Literal

from pydantic import Field, Strict, model_validator

from octavo.train.config.sections import Count, Section, Share


class ParameterGroup(Section):
    """`[[optim.groups]]`: settings of the parameters that a pattern matches; the first group that matches counts."""

    match: Annotated[str, Field(min_length=1)]
    """Pattern, as in `fnmatch`, of names of parameters or of modules around them, as "*norm*" or "*embed_tokens"."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate; warmup and schedule multiply it as `optim.lr`."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Decoupled weight decay, also of parameters that do not decay by rule."""
    muon: bool | None = None
    """With `optim.name = "muon"`: false leaves these parameters to AdamW."""


class Optim(Section):
    """`[optim]`: the optimizer, its schedule and the batch."""

    name: Literal["adamw", "muon"] = "adamw"
    """"muon": `octavo.optim.Muon` for the hidden matrices (and those of experts), scaled to the step of AdamW
    (`adjust_lr_fn="match_rms_adamw"`), so that `lr` and `weight_decay` are those of AdamW; AdamW for the rest."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of Muon's momentum."""
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    betas: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Strict(False)] = (
        0.9,
        0.95,
    )
    """Decay of the first and the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled decay of weights of products and embeddings; not of norms, biases, vectors and Mamba's `A_log`."""
    groups: Annotated[tuple[ParameterGroup, ...], Strict(False)] = ()
    """Tables `[[optim.groups]]` with other settings for some parameters; the run prints what each matches."""
    states: Literal["fp32", "fp8"] | None = None
    """Moments of AdamW: 8 bytes per parameter, or about 2.1 in FP8 with dynamic range expansion (`octavo.AdamW`); half
    of it where Muon has a momentum only. Where not given, those of `precision.level`."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, as 0.999, in fp32: 4 bytes per parameter, sharded like the
    parameter. For `eval.ema` and `--ema` of `octavo export`; training does not use it."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest global L2 norm of the gradient; 0 does not clip."""
    batch: Count = 8
    """Sequences of one optimizer step."""
    micro_batches: Count = 1
    """Parts the batch is cut into; gradients are accumulated over them."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After the warmup: cosine or linear decay; warmup-stable-decay (linear decay at the end); or constant."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warmup."""
    decay: Share = 0.2
    """Share of all steps that the decay of "wsd" takes, at the end."""
    min_lr_ratio: Share = 0.1
    """Learning rate at the end, as a share of `lr` (cosine, linear and wsd)."""
    rewarm: Annotated[int, Field(ge=0)] = 0
    """Steps of a second linear warmup, up to the schedule, from step `rewarm_from` on; for a resumed run."""
    rewarm_from: Annotated[int, Field(ge=0)] | None = None
    """Finished steps at which `rewarm` begins: those of the checkpoint that the run resumes from."""

    @model_validator(mode="after")
    def _check_micro_batches(self) -> "Optim":
        if self.batch % self.micro_batches:
            lower = [n for n in range(1, isqrt(self.batch) + 1) if self.batch % n == 0]
            divisors = sorted({*lower, *(self.batch // n for n in lower)})
            raise ValueError(
                f"optim.batch = {self.batch} cannot be cut into {self.micro_batches} equal micro-batches: "
                f"set optim.micro_batches to one of {divisors}"
            )
        return self

    @model_validator(mode="after")
    def _check_muon(self) -> "Optim":
        if self.name != "muon":
            if any(group.muon is not None for group in self.groups):
                raise ValueError('optim.groups: muon is for optim.name = "muon": leave it out')
            if self.momentum != type(self).model_fields["momentum"].default:
                raise ValueError('optim.momentum is for optim.name = "muon"; AdamW has optim.betas')
        return self

    @model_validator(mode="after")
    def _check_rewarm(self) -> "Optim":
        if bool(self.rewarm) != (self.rewarm_from is not None):
            missing, given = ("rewarm_from", "rewarm") if self.rewarm else ("rewarm", "rewarm_from")
            raise ValueError(
                f"optim.{given} = {getattr(self, given)} without optim.{missing}: a second warmup takes both, its "
                "steps (optim.rewarm) and the step of the checkpoint where it begins (optim.rewarm_from)"
            )
        return self


def decay_steps(optim: Optim, steps: int) -> int:
    """Steps that the decay of "wsd" takes of `steps`."""
    return max(1, round(optim.decay * steps)) if optim.decay else 0
