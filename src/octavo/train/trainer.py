"""The training step and the state it changes, on one process or on one rank of several.

Batch, learning rate and dropout of a step are functions of (seed, step). A non-finite loss or gradient never reaches
the optimizer: under loss scaling the step is skipped and counted; otherwise the run stops and the error names the
layer. Loss and norm are reduced over all ranks, so all take the same branch.
"""

import math
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo._version import __version__
from octavo.activations.candidates import fusible
from octavo.activations.modules import Fused
from octavo.inspect.autopilot import Autopilot, RecipeChange
from octavo.inspect.findings import Thresholds, findings
from octavo.inspect.watch import Watch
from octavo.kernels.registry import triton_unsupported
from octavo.nn import Report, accumulating, apply_plan, report
from octavo.nn.equalized import equalized_layers
from octavo.nn.linear_subclasses import is_converted
from octavo.nn.memory_audit import saved_for_backward
from octavo.numerics.plan import Plan
from octavo.parallel.combinations import ZERO_BUBBLE
from octavo.parallel.context_parallel import inner_attention
from octavo.parallel.ddp import saved_buffers
from octavo.parallel.pipeline_model import SCHEDULES, check_pipeline_model
from octavo.planner.auto_convert import convert
from octavo.runtime.blocks import find_blocks
from octavo.runtime.stopwatch import Stopwatch
from octavo.runtime.torch_compat import run_eagerly, tree_map
from octavo.train.checkpoint.retention import HELD_OUT_LOSS
from octavo.train.checkpoint.store import CheckpointSaver
from octavo.train.compiled_blocks import Checkpointing, CompiledBlocks
from octavo.train.config.run_config import TrainConfig, naming
from octavo.train.diagnose import NonFiniteError, find_origin, non_finite_parameter
from octavo.train.evaluation import Patience, evaluate
from octavo.train.guard import SpikeGuard
from octavo.train.layout import (
    Inputs,
    RankLayout,
    check_layout,
    counted,
    distribute,
    split_micro_batches,
    targets_per_rank,
    to_device,
)
from octavo.train.loss_scale import LossScale
from octavo.train.model import MASKED, build_on_ranks
from octavo.train.optimizer import groups_table, learning_rate, make_optimizer, parameter_settings
from octavo.train.packed_attention import is_varlen
from octavo.train.probe import check_causal, model_errors
from octavo.train.ranks import Ranks, device_name
from octavo.train.record.metrics import RunResult, StepMetrics, finite
from octavo.train.signals import StopRequested
from octavo.train.tasks.registry import task_of
from octavo.train.tasks.task import Task

CAUSAL_TOKENS = 16  # Tokens of the causality check, where ranks do not share a sequence
AUTOPILOT_EVERY = 50  # Steps between two samples of the autopilot if `inspect.every` is not set


class Trainer:
    _ahead: tuple[int, tuple[Inputs, Tensor] | None] = -1, None  # The number of a batch that was read ahead, and it

    def __init__(
        self, config: TrainConfig, data: Any, device: torch.device, model: nn.Module | None = None,
        *, ranks: Ranks | None = None, plan: Plan | None = None,
        divide: Callable[[nn.Module], RankLayout] | None = None, startup: Stopwatch | None = None,
    ) -> None:  # fmt: skip
        precision, parallel, optim = config.precision, config.parallel, config.optim
        self.config, self.step = config, 0  # step: Number of finished steps
        self.ranks = ranks = ranks or Ranks(device)
        self.startup = startup = startup or Stopwatch()
        self.task = task_of(config)(config, data)  # What the run learns
        self._device = device
        given = model is not None
        if model is None:
            ranks.raise_together(lambda: check_layout(parallel, config.optim, config.data, ranks.world_size))
            model, fp32_masters = build_on_ranks(config, self.task.kind, self.task.build, ranks)
            startup.lap("weights")
            # FSDP moves its shards to the device block by block: the whole model may not fit there.
            distributed = self.ranks.world_size > 1 or parallel.cpu_offload
            first_convert = config.frozen == "fp8"  # which makes it smaller
            self.model: Any = model if distributed or first_convert else model.to(device)
        else:
            self.model, distributed, fp32_masters, first_convert = model, False, {}, False
        startup.lap("weights to device")
        self.layers = ranks.raise_together(lambda: convert_run(self.model, self.task, device, ranks.world_size, plan))
        self.in_fp8 = self.layers is not None and self.layers.in_fp8  # or else only fused
        if first_convert and not distributed:
            self.model = self.model.to(device)
        startup.lap("conversion")
        loss = "whole" if parallel.pp > 1 and parallel.schedule in ZERO_BUBBLE else precision.loss
        # Why the loss computes whole logits although the configuration asks for chunks; else empty.
        self.loss_note = self.ranks.raise_together(lambda: self.task.prepare(self.model, loss))
        if loss != precision.loss:
            self.loss_note = f"whole logits: {parallel.schedule} runs the backward of the loss in two parts"
        startup.lap("loss head")
        compile_mode = "none" if given else config.run.compile
        make_blocks = partial(CompiledBlocks, self.model, compile_mode, device, config.uncompilable)
        self.blocks = ranks.raise_together(make_blocks)
        self.checkpointing = Checkpointing(self.model, precision.checkpointing, in_graphs=self.blocks.active)
        self.blocks.compile()
        self.layout = RankLayout(forward=self.model) if divide is None else divide(self.model)
        settings = ranks.raise_together(lambda: parameter_settings(self.model, config.optim, part=given))
        sizes = {name: param.numel() for name, param in self.model.named_parameters()}
        self.groups_table = groups_table(settings, sizes, config.optim)
        self._parameters = sum(sizes.values())
        if parallel.pp > 1 and distributed:
            ranks.raise_together(lambda: self._check_pipeline() if ranks.local == 0 else None)
        if distributed:
            parts = config.optim.micro_batches
            self.layout = distribute(self.model, parallel, device, fp8=self.in_fp8, micro_batches=parts)
        startup.lap("parallelize")
        self.optimizer = make_optimizer(self.model, optim, precision, fp32_masters, settings, self.layout.partial)
        startup.lap("optimizer")
        self.loss_scale = LossScale(precision.loss_scale)
        every = config.inspect.every or (AUTOPILOT_EVERY if precision.autopilot else 0)
        self.watch = Watch(
            self.model, every=every, what_if=config.inspect.what_if, high_precision=not self.in_fp8,
            group=self.layout.stage_group, stages=dist.group.WORLD if self.layout.stages > 1 else None,
        )  # fmt: skip
        thresholds, restore_after = config.inspect.thresholds, config.inspect.restore_after
        # None if no layer is in FP8. Without `precision.autopilot` it only restores the moves of a resumed run.
        self.pilot = None
        if ranks.any(any(is_converted(module) for module in self.model.modules())):
            self.pilot = Autopilot(self.model, watch=self.watch, thresholds=thresholds, restore_after=restore_after)
        self.recipe_changes: list[RecipeChange] = []  # Those that the autopilot made in the last step
        # Called between the parts of an evaluation, a sample or a slow step; may raise `StopRequested`.
        self.between: Callable[..., None] = lambda *_: None
        self.slow = False  # Whether it is called between micro-batches. The same on all ranks
        self.saves = True  # Whether `save` does anything
        self.guard = SpikeGuard(config.guard)
        self.skipped_batches = 0  # After loss spikes
        self.patience = Patience(0 if config.eval is None else config.eval.patience)
        self.saver = CheckpointSaver(self.ranks, async_save=parallel.async_save, timeout=parallel.timeout)

    def train_step(self) -> StepMetrics:
        # Raises NonFiniteError, with the loss scale before skipped steps, or StopRequested; the state is that before.
        start = time.perf_counter()
        config, (inputs, targets) = self.config, self._batch(self.step)
        autopilot_state = self.pilot.state_dict() if self.pilot is not None else {}
        try:
            loss_value, norm = self._gradients(inputs, targets)
        except StopRequested:  # the step is taken again after a resume
            if self.pilot is not None:
                self.pilot.load_state_dict(autopilot_state)
            self.optimizer.zero_grad()
            raise
        norm_value = norm.item()
        is_finite, is_zero = all(map(math.isfinite, (loss_value, norm_value))), norm_value == 0 and loss_value != 0
        scale = self.loss_scale.value if self.loss_scale.active else None
        if not is_zero:
            self.loss_scale.update(overflow=not is_finite, loss_is_finite=finite(loss_value) is not None)
        must_stop = not is_finite and (not self.loss_scale.active or self.loss_scale.exhausted)
        if must_stop or (is_zero and not self.loss_scale.skip_zero_gradient()):
            if self.pilot is not None and self.recipe_changes:
                self.pilot.load_state_dict(autopilot_state)
                self.recipe_changes = []
            if must_stop:
                error = self._diagnose(inputs, targets, loss_value)
            else:
                zero = f"the loss is {loss_value:.4g}, and the gradient is exactly zero in every parameter"
                zero += ("" if scale is None else f" at loss scale {scale:g}") + ": nothing is learned"
                number, origin = self.step + 1, "gradients of all parameters"
                error = NonFiniteError(f"step {number}: {zero}", step=number, origin=origin)
            self.optimizer.zero_grad()
            self.loss_scale.undo_fall()
            raise error
        lr = learning_rate(config.optim, self.step, config.run.steps)
        applied = is_finite and not is_zero
        if applied:
            self.optimizer.step(lr, norm, self.step, norm_value=norm_value)
        self.optimizer.zero_grad()
        self.step += 1
        seconds, tokens = time.perf_counter() - start, targets.numel() * self.layout.rows[1] * self.layout.labels[1]
        return StepMetrics(
            step=self.step, tokens=self.step * tokens, loss=finite(loss_value), lr=lr, grad_norm=finite(norm_value),
            loss_scale=scale, skipped=not applied, step_s=seconds, tokens_per_s=tokens / seconds,
        )  # fmt: skip

    def save(self, out: Path, *, prune: bool = True, held_out: float | None = None) -> None:
        """Save a checkpoint and its held-out loss. Raises NonFiniteError if a parameter is not finite."""
        if bad := self.non_finite_parameter():
            raise self._non_finite_error(self.step, "its update was not finite", f"parameter {bad}")
        if not self.saves:
            return
        self.saver.save(
            out, step=self.step, model=self.model, save_assets=self.task.save, optimizer=self.optimizer,
            loss_scale=self.loss_scale, config=self.config, data_fingerprint=self.task.data.fingerprint,
            extra={"skipped_batches": self.skipped_batches, "guard": self.guard.state_dict()}
            | ({HELD_OUT_LOSS: held_out} if held_out is not None else {})
            | ({"autopilot": self.pilot.state_dict()} if self.pilot is not None else {}),
            part=self.layout.part[0], prune=prune,
        )  # fmt: skip

    def non_finite_parameter(self) -> str | None:
        return self.ranks.first_reported(non_finite_parameter(self.model))

    def describe(self) -> RunResult:
        """Summary of the run before its first step. Raises ConfigError if the model cannot run a micro-batch."""
        import transformers

        versions = {"octavo": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
        device = (f"{self.ranks.world_size} × " if self.ranks.world_size > 1 else "") + device_name(self._device)
        saved_bytes = self.ranks.raise_together(self._saved_bytes_per_token)  # compiles the blocks, of which is a note
        return RunResult(
            name=self.config.run.name, precision=self.config.precision_label, device=device, steps=0, tokens=0,
            parameters=self._parameters, losses=None, tokens_per_s=None, saved_bytes_per_token=saved_bytes,
            skipped_steps=0, wall_s=0.0, versions=versions | {"python": platform.python_version()},
            converted=self.layers.summary if self.layers else "", stopped="done", unit=self.task.unit,
            compiled=self.blocks.note(),
        )  # fmt: skip

    def check_causal(self) -> None:
        if self.layout.pipeline is not None or not self.task.causal:
            return  # a pipeline's model was checked before it was cut
        inputs, _ = self.task.data.batch(self.config.run.seed, 0, 1)  # the same on every rank
        index, parts = self.layout.inputs
        inputs = self.layout.own_tokens(inputs.to(self._device)) if parts > 1 else inputs[:, :CAUSAL_TOKENS]
        inputs = inputs.to(self._device)
        with self.layout.reduces(False), run_eagerly():
            check = partial(check_causal, self.model, self.logits, inputs, has_last=index == parts - 1)
            self.ranks.raise_together(check)

    def _check_pipeline(self) -> None:
        parallel = self.config.parallel
        with naming("parallel.pp", ValueError):
            check_pipeline_model(self.model, parallel.pp * SCHEDULES[parallel.schedule])
        inputs, _ = self.task.data.batch(self.config.run.seed, 0, 1)
        with run_eagerly():
            check_causal(self.model, self.logits, inputs[:, :CAUSAL_TOKENS])

    def attention_note(self) -> str:
        """A note on variable-length attention, or for a model without fused attention; else empty."""
        if is_varlen(self.model):
            return "attention is computed document by document (variable-length attention), without a mask"
        if reason := MASKED.get(self.model):
            return f"attention reads a mask of all pairs of positions, as variable-length attention cannot: {reason}"
        attention = inner_attention(self.model) or getattr(self.model.config, "_attn_implementation", "sdpa")
        if attention != "eager" or self.config.model.attention == "eager":
            return ""
        return f"{type(self.model).__name__} has no fused attention: using {attention}"

    def _batch(self, step: int) -> tuple[Inputs, Tensor]:
        number = step + self.skipped_batches
        (ahead, batch), self._ahead = self._ahead, (-1, None)
        return batch if ahead == number and batch is not None else self._read_batch(number)

    def _read_ahead(self) -> None:
        """Read the next step's batch while the device computes."""
        number = self.step + 1 + self.skipped_batches
        if self.step + 1 < self.config.run.steps and self._ahead[0] != number:
            with suppress(Exception):  # raised in its own step
                self._ahead = number, self._read_batch(number)

    def _read_batch(self, number: int) -> tuple[Inputs, Tensor]:
        parts, layout, seed = self.config.optim.micro_batches, self.layout, self.config.run.seed

        def own_rows(rows: Tensor) -> Tensor:
            return to_device(torch.cat([*map(layout.own_rows, rows.chunk(parts))]), self._device)

        batch = self.task.data.batch(seed, number, self.config.optim.batch)
        inputs, targets = (tree_map(own_rows, part) for part in batch)
        return layout.own_tokens(inputs), layout.own_labels(targets)

    def forward_backward(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """Leave the scaled gradients of this rank's share of the batch in the optimizer, averaged over the ranks."""
        # Returns the mean loss of the share in fp32. Seeds of (seed, step, rank): dropout needs no saved state.
        entropy = [self.config.run.seed, self.step, *([self.layout.seed] if self.layout.seed else [])]
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))
        total = torch.zeros((), device=self._device)
        parts, pipeline = self.config.optim.micro_batches, self.layout.pipeline
        of_step = targets_per_rank(targets, self.ranks, uneven=self.task.uneven) * self.layout.loss_parts
        with accumulating(self.model) if parts > 1 else nullcontext():
            if pipeline is not None:
                share = 1 / (parts * self.layout.loss_parts)
                with self._autocast(), self.blocks.one_pass():
                    total = pipeline.step(inputs, targets, share * self.loss_scale.value) * share
                self.optimizer.accumulate()
                return total
            # Not in the middle of a step whose forwards change more of what a checkpoint holds than parameters.
            may_end = self.slow and not (any(equalized_layers(self.model)) or saved_buffers(self.model))
            for number, (part_inputs, part_targets) in enumerate(
                zip(split_micro_batches(inputs, parts), targets.chunk(parts), strict=True), 1
            ):
                if number > 1 and may_end:
                    self.between()
                with self.layout.reduces(number == parts or not self.optimizer.in_place):
                    total += self.accumulate(part_inputs, part_targets, targets=of_step)
        return total

    def accumulate(self, inputs: Inputs, part: Tensor, *, targets: float) -> Tensor:
        """Add the gradients of a micro-batch. Returns its share of the mean loss over the step's `targets` tokens."""
        count, part = counted(part, uneven=self.task.uneven)
        with self.blocks.one_pass():
            loss = self.loss(inputs, part) * (count / targets)
            (loss * self.loss_scale.value).backward()
        self.optimizer.accumulate()
        return loss.detach()

    def _gradients(self, inputs: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        """Compute the gradients of the step. Returns the mean loss and the gradient norm over all ranks."""
        self.recipe_changes = []
        pilot = self.pilot if self.config.precision.autopilot else None
        while True:
            sample, measure = (pilot.needs_sample, pilot.measures) if pilot is not None else (False, None)
            with self.watch.step(self.step + 1, force=sample, measure=measure):
                loss = self.forward_backward(inputs, targets)
            self.layout.sum_partial(self.optimizer.gradients())
            squares = self.optimizer.gradient_squares(self.loss_scale.value, self.layout.copies)
            if self.ranks.world_size > 1:
                loss, squares = self.ranks.all_reduce(loss, squares)
                loss = loss * self.layout.loss_parts * self.layout.stages / self.ranks.world_size
            self._read_ahead()
            norm = squares.sqrt().float()
            if pilot is None:
                return loss.item(), norm
            self.recipe_changes += pilot.act(finite=all(map(math.isfinite, (loss.item(), norm.item()))))
            if not pilot.should_repeat:
                return loss.item(), norm
            self.optimizer.zero_grad()  # the step needs layers that the autopilot has moved

    def loss(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """The model's loss of a micro-batch, a mean over its targets."""
        with self._autocast():
            if self.layout.pipeline is not None:
                return self.layout.pipeline.alone(inputs, targets)
            return self.task.loss(self.layout.forward, inputs, targets, **self.layout.positions(inputs))

    def logits(self, inputs: Tensor) -> Tensor:
        """The logits [B,S,V] of ids [B,S], or of ids and positions [B,S,2]."""
        with self._autocast():
            return self.task.logits(self.layout.forward, inputs, **self.layout.positions(inputs))

    def evaluate(self) -> dict[str, float | None]:
        measure = partial(evaluate, self.task, self.model, self.layout, self.ranks, self.loss, between=self.between)
        with self._autocast():
            metrics = measure(fp8=self.in_fp8)
            if self.config.eval is not None and self.config.eval.ema and self.optimizer.average is not None:
                with self.optimizer.average.in_place():
                    metrics |= {f"{name}_ema": value for name, value in measure(fp8=False).items()}
        return metrics

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.precision.parameters != "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def _saved_bytes_per_token(self) -> float:
        inputs, targets = (split_micro_batches(rows, self.config.optim.micro_batches)[0] for rows in self._batch(0))
        with self.layout.reduces(False), self.blocks.trial(), model_errors(inputs):
            with saved_for_backward(self.model) as saved, self.checkpointing.saved_outputs() as outputs:
                value = self.loss(inputs, targets)
            del value
        return (saved.bytes + outputs.bytes) / self.task.count(inputs, targets)

    def _diagnose(self, inputs: Tensor, targets: Tensor, loss: float) -> NonFiniteError:
        self.optimizer.zero_grad()
        if bad := self.non_finite_parameter():
            return self._non_finite_error(self.step, "its update was not finite", f"parameter {bad}")
        sampled = nullcontext() if self.watch.rows else self.watch.step(self.step + 1, force=True)
        with sampled, run_eagerly():  # graphs call no hooks
            origin = find_origin(self.model, lambda: self.forward_backward(inputs, targets), self.layout.pipeline)
        own = dict(self.model.named_modules())
        rows = [row for row in self.watch.rows if row.layer in own]
        operands = [finding for finding in findings(rows, Thresholds()) if finding.what == "nonfinite"]
        operand = f" (first operand: {operands[0].operand} of {operands[0].layer})" if operands else ""
        location = self.ranks.first_reported(origin.text and origin.text + operand, origin.order)
        location = location or f"none in particular, the norm of the gradient exceeds fp32{operand}"
        problem = "the gradient is not finite" if finite(loss) is not None else f"the loss is {loss}"
        return self._non_finite_error(self.step + 1, problem, location)

    def _non_finite_error(self, step: int, problem: str, origin: str) -> NonFiniteError:
        message = f"step {step}: {problem}; first value that is not finite: {origin}"
        return NonFiniteError(message, step=step, origin=origin)


def compiles_blocks(config: TrainConfig, model: nn.Module) -> bool:
    return config.run.compile != "none" and not config.uncompilable and bool(find_blocks(model))


MIN_FUSED_NUMEL = 1 << 22  # Elements of hidden states from which fused kernels save time (docs/performance.md)


def with_activations(config: TrainConfig, model: nn.Module, tokens: int, *, gpu: bool) -> TrainConfig:
    """Resolve `precision.activations` "auto" for a model, tokens of a micro-batch, and a GPU with kernels or none."""
    if config.precision.activations != "auto":
        return config
    eager = gpu and config.resolved.activations == "bf16" and not compiles_blocks(config, model)
    modules = [name for name, storage in fusible(model).items() if isinstance(storage, Fused)] if eager else []
    widths = (p.numel() for name in modules for p in model.get_submodule(name).parameters(recurse=False))
    fuses = tokens * max(widths, default=0) >= MIN_FUSED_NUMEL
    precision = config.precision.model_copy(update={"activations": "fused" if fuses else None})
    return config.model_copy(update={"precision": precision})


def convert_run(model: nn.Module, task: Task, device: torch.device, world: int, plan: Plan | None) -> Report | None:
    """Convert a model by a plan or by its configuration; the recipe "auto" uses measured costs on a GPU."""
    config, parallel = task.config, task.config.parallel
    sharing = parallel.tp * parallel.pp
    tokens = round(config.optim.batch * sharing / (config.optim.micro_batches * world) * task.positions(model))
    kernels = config.precision.activations == "auto" and triton_unsupported(device, ()) is None
    config = with_activations(config, model, tokens, gpu=kernels)
    precision = config.resolved
    if plan is not None:
        if plan.converted or plan.activation_modules:
            frozen = config.frozen if plan.converted else "bf16"
            apply_plan(model, plan, keep_weights=precision.keep_weights, frozen=frozen)
    elif precision.matmul == precision.activations == "bf16":
        return None
    else:
        convert(
            model, precision=precision, device=None if device.type == "cuda" else "cpu", tokens=tokens, verbose=False,
            frozen=config.frozen if precision.matmul == "fp8" else "bf16",
            weight_only=config.weight_only if precision.matmul == "fp8" else (),
        )  # fmt: skip
    return report(model)
