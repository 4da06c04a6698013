"""The run: data, model, precision, and the steps.

    for each step:  batch(seed, step) → micro-batches: forward, loss / tokens of the step, backward, add up in fp32
                    → norm → finite? → clip → AdamW on the masters → metrics

The loss of a micro-batch is its summed cross-entropy over the tokens of the whole step, so cutting a batch
differently changes rounding and nothing else. Everything a step uses (batch, learning rate, randomness of dropout)
is a function of (seed, step); with the parameters, moments and loss scale of a checkpoint that makes a resumed run
bitwise the uninterrupted one.

A loss or gradient that is not finite never reaches the optimizer: under loss scaling the step is skipped, counted and
reported; otherwise the run stops, with the state before that step saved and the layer named.
"""

import inspect
import json
import platform
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo._version import __version__
from octavo.nn import Report, convert, report
from octavo.train.checkpoint import checkpoints, load_checkpoint, read_trainer_state, save_checkpoint
from octavo.train.checkpointing import Checkpointing
from octavo.train.config import ConfigError, TrainConfig
from octavo.train.data import Corpus, load_corpus
from octavo.train.diagnose import NonFiniteError, find_origin, non_finite_parameter
from octavo.train.disk import output_folder
from octavo.train.loss_scale import LossScale
from octavo.train.metrics import (
    MetricsWriter,
    Progress,
    RunResult,
    Silent,
    StepMetrics,
    finite,
    median_speed,
    summarize_losses,
)
from octavo.train.model import (
    build_model,
    check_model,
    choose_device,
    device_name,
    exact_masters,
    take_loss_in_chunks,
)
from octavo.train.optimizer import make_optimizer
from octavo.train.outputs import CONFIG_FILE, LAYERS_FILE, TOKENIZER_FILE, Claim, claim_folder
from octavo.train.probe import check_causal, kept_bytes_per_token
from octavo.train.schedule import learning_rate
from octavo.train.signals import stop_on


def run(
    config: TrainConfig, *, out: Path | None = None, resume: bool = False, progress: Progress | None = None
) -> RunResult:
    """Trains as `config` says and returns the summary, which is also in `run.json`.

    Args:
        config: The run, from `load_config`.
        out: Output folder; overrides `run.out`. `runs/<name>` where neither is given.
        resume: Continue from the newest checkpoint in `out`, a folder; from the start where it holds none.
        progress: Told of stages, steps and notes; nothing is printed without one.

    In the main thread, SIGTERM, and SIGINT once training has begun, finish the step, save, and return with
    `stopped = "sigterm"`. SIGTERM before the first step saves the beginning.

    Raises:
        ConfigError: For a mistake in configuration, data, model or output folder; nothing is overwritten.
        NonFiniteError: For a loss or gradient that is NaN or infinite; names the layer.
    """
    progress = progress or Silent()
    out = out or Path(config.run.out or Path("runs") / config.run.name)
    device = choose_device(config.run.device)
    if resume and not out.exists():
        raise ConfigError(f"there is no folder {out}, so no run to resume: check --out, or leave out --resume")
    stop = threading.Event()
    with stop_on(stop, signal.SIGTERM), output_folder(out):
        claim = claim_folder(out, config, resume=resume)
        check_model(config.model)
        corpus = load_corpus(config, progress)
        if corpus.skipped:
            progress.note(f"{corpus.skipped} files of the data were left out: not UTF-8")
        progress.stage("building the model")
        trainer = Trainer(config, corpus, device)
        trainer.check_causal()
        summary = trainer.describe()
        if resume and claim.checkpoint is None:
            progress.note(f"no checkpoint in {out}: starting from the first step")
        _begin(trainer, out, claim, corpus, progress)
        with stop_on(stop, signal.SIGINT):
            return _train(trainer, summary, out, progress, stop)


def _begin(trainer: "Trainer", out: Path, claim: Claim, corpus: Corpus, progress: Progress) -> None:
    """Puts the trainer where the run starts, and writes what is known of the run before its first step."""
    config, checkpoint = trainer.config, claim.checkpoint
    if checkpoint is not None:
        if read_trainer_state(checkpoint)["data"] != corpus.fingerprint:
            raise ConfigError(f"{out} holds a run on other data: the content of {config.data.source} has changed")
        load_checkpoint(checkpoint, trainer.model, trainer.optimizer, trainer.loss_scale)
        trainer.step = read_trainer_state(checkpoint)["step"]
    for change in claim.tuned:
        progress.note(change)
    (out / CONFIG_FILE).write_text(config.to_toml(), encoding="utf-8")
    if trainer.layers is not None:
        (out / LAYERS_FILE).write_text(json.dumps([asdict(row) for row in trainer.layers.rows], indent=1) + "\n")
    corpus.tokenizer.backend.save(str(out / TOKENIZER_FILE))


def _train(trainer: "Trainer", summary: RunResult, out: Path, progress: Progress, stop: threading.Event) -> RunResult:
    config = trainer.config
    for note in filter(None, (summary.converted, trainer.attention_note(), trainer.loss_note)):
        progress.note(note)
    with MetricsWriter(out, after_step=trainer.step, log_every=config.run.log_every) as metrics:
        progress.start(config, trainer.step)
        failure = None
        try:
            stopped = _take_steps(trainer, out, metrics, progress, stop)
        except NonFiniteError as error:
            stopped = "non-finite"
            if non_finite_parameter(trainer.model) is None:
                trainer.save(out, prune=False)  # it may be past saving already: the ones before it stay
            message = f"{error}. {trainer.advice(checkpoints(out))}"
            failure = NonFiniteError(message, step=error.step, origin=error.origin)
        result = replace(summary, **_totals(metrics.rows), stopped=stopped)
        result.write(out)
    progress.finish(result)
    if failure is not None:
        raise failure
    return result


def _take_steps(
    trainer: "Trainer", out: Path, metrics: MetricsWriter, progress: Progress, stop: threading.Event
) -> str:
    """Trains and saves until the end of the run or a request to stop. Returns which it was, "done" or "sigterm"."""
    run_config = trainer.config.run
    while trainer.step < run_config.steps and not stop.is_set():
        row = trainer.train_step()
        metrics.write(row)
        progress.step(row)
        if row.skipped:
            progress.note(
                f"step {row.step} skipped: the gradient overflowed at loss scale {row.loss_scale:g} "
                f"(next {trainer.loss_scale.value:g})"
            )
        if run_config.save_every and trainer.step % run_config.save_every == 0:
            trainer.save(out)
    trainer.save(out)
    return "done" if trainer.step == run_config.steps else "sigterm"


def _totals(rows: list[StepMetrics]) -> dict[str, Any]:
    return {
        "steps": rows[-1].step if rows else 0,
        "tokens": rows[-1].tokens if rows else 0,
        "losses": summarize_losses(rows),
        "tokens_per_s": median_speed(rows),
        "skipped_steps": sum(row.skipped for row in rows),
        "wall_s": sum(row.step_s for row in rows),
    }


class Trainer:
    """A model in training: what a step needs and changes.

    Args:
        config: The run.
        corpus: What it reads.
        device: Where it trains.
        model: Built already, without a checkpoint's weights: for planning.

    Attributes:
        step: Steps finished.
        layers: What became of each linear layer; None where no FP8 was asked for.
        loss_note: Why the loss is not computed in chunks although that was asked for; else empty.
    """

    def __init__(
        self, config: TrainConfig, corpus: Corpus, device: torch.device, model: torch.nn.Module | None = None
    ) -> None:
        precision = config.precision
        self.config = config
        self.step = 0
        self.model: Any = build_model(config, corpus.tokenizer).to(device) if model is None else model
        asked = config.asked
        self.layers: Report | None = None
        if "fp8" in (asked.matmul, asked.activations):
            convert(self.model, precision=asked, verbose=False)
            self.layers = report(self.model)
        refusal = take_loss_in_chunks(self.model) if precision.loss == "chunked" else None
        self._chunked = precision.loss == "chunked" and refusal is None
        self.loss_note = f"the loss is computed from whole logits: {refusal}" if refusal else ""
        self._checkpointing = Checkpointing(self.model, precision.checkpointing)
        self.optimizer = make_optimizer(self.model, config, exact_masters(config) if model is None else {})
        self.loss_scale = LossScale(precision.loss_scale)
        self._corpus = corpus
        self._device = device
        takes_cache = "use_cache" in inspect.signature(self.model.forward).parameters
        self._options = {"use_cache": False} if takes_cache else {}

    def train_step(self) -> StepMetrics:
        """Takes the next step. Raises NonFiniteError, with the state before it left as it was."""
        start = time.perf_counter()
        config = self.config
        inputs, targets = self._batch(self.step)
        loss = self.forward_backward(inputs, targets)
        norm = self.optimizer.gradient_norm(self.loss_scale.value)
        loss_value, norm_value = loss.item(), norm.item()
        good = finite(loss_value) is not None and finite(norm_value) is not None
        scale = self.loss_scale.value if self.loss_scale.active else None
        self.loss_scale.update(overflow=not good)
        if not good and (not self.loss_scale.active or self.loss_scale.exhausted):
            raise self._diagnose(inputs, targets, loss_value)
        lr = learning_rate(config.optim, self.step, config.run.steps)
        if good:
            self.optimizer.step(lr, norm)
        self.optimizer.zero_grad()
        self.step += 1
        seconds = time.perf_counter() - start
        return StepMetrics(
            step=self.step,
            tokens=self.step * targets.numel(),
            loss=finite(loss_value),
            lr=lr,
            grad_norm=finite(norm_value),
            loss_scale=scale,
            skipped=not good,
            step_s=seconds,
            tokens_per_s=targets.numel() / seconds,
        )

    def save(self, out: Path, *, prune: bool = True) -> None:
        """Saves a checkpoint under `out`. Raises NonFiniteError for parameters that are not worth it.

        With `prune`, only the newest `run.keep` checkpoints stay.
        """
        if bad := non_finite_parameter(self.model):
            raise self._failure(self.step, "its update was not finite", f"parameter {bad}")
        save_checkpoint(
            out,
            step=self.step,
            model=self.model,
            tokenizer=self._corpus.tokenizer,
            optimizer=self.optimizer,
            loss_scale=self.loss_scale,
            config=self.config,
            data_fingerprint=self._corpus.fingerprint,
            prune=prune,
        )

    def describe(self) -> RunResult:
        """The summary of the run before its first step. Raises ConfigError where the model cannot run a micro-batch."""
        import transformers

        return RunResult(
            name=self.config.run.name,
            arm=self.config.arm,
            device=device_name(self._device),
            steps=0,
            tokens=0,
            parameters=sum(param.numel() for param in self.model.parameters()),
            losses=None,
            tokens_per_s=None,
            kept_bytes_per_token=self._kept_bytes_per_token(),
            skipped_steps=0,
            wall_s=0.0,
            versions={
                "octavo": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            converted=self.layers.summary if self.layers else "",
            stopped="done",
        )

    def check_causal(self) -> None:
        """Raises ConfigError for a model that sees later tokens."""
        inputs, _ = self._batch(0)
        check_causal(self.model, self._logits, inputs[:1])

    def attention_note(self) -> str:
        """Says so where the model has no fused attention; empty where it has."""
        used = getattr(self.model.config, "_attn_implementation", "sdpa")
        return "" if used == "sdpa" else f"{type(self.model).__name__} has no fused attention: using {used}"

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self._corpus.batch(self.config.run.seed, step, self.config.optim.batch)
        return inputs.to(self._device), targets.to(self._device)

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Leaves the step's gradients, times the loss scale, in the optimizer. Returns the mean loss in fp32."""
        _seed_step(self.config.run.seed, self.step)
        total = torch.zeros((), device=self._device)
        parts = self.config.optim.micro_batches
        for part_inputs, part_targets in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            total += self.accumulate(part_inputs, part_targets, targets=targets.numel())
        return total

    def accumulate(self, inputs: Tensor, part: Tensor, *, targets: int) -> Tensor:
        """Adds the gradients of a micro-batch of a step with so many targets. Returns its share of the mean loss."""
        loss = self.loss(inputs, part) / targets
        (loss * self.loss_scale.value).backward()
        self.optimizer.accumulate()
        return loss.detach()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy in fp32."""
        if self._chunked:
            with self._autocast():
                summed: Tensor = self.model(
                    input_ids=inputs, shift_labels=targets, num_items_in_batch=1, **self._options
                ).loss
            return summed
        logits = self._logits(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")

    def _logits(self, inputs: Tensor) -> Tensor:
        with self._autocast():
            logits: Tensor = self.model(input_ids=inputs, **self._options).logits
        return logits

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.precision.parameters != "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def _kept_bytes_per_token(self) -> float:
        batch = tuple(tensor.chunk(self.config.optim.micro_batches)[0] for tensor in self._batch(0))
        return kept_bytes_per_token(self.model, self._checkpointing, self.loss, batch)

    def _diagnose(self, inputs: Tensor, targets: Tensor, loss: float) -> NonFiniteError:
        self.optimizer.zero_grad()
        if bad := non_finite_parameter(self.model):
            return self._failure(self.step, "its update was not finite", f"parameter {bad}")
        found = find_origin(self.model, lambda: self.forward_backward(inputs, targets))
        self.optimizer.zero_grad()
        what = "the gradient is not finite" if finite(loss) is not None else f"the loss is {loss}"
        return self._failure(self.step + 1, what, found or "none in particular, the norm of the gradient exceeds fp32")

    def _failure(self, step: int, what: str, origin: str) -> NonFiniteError:
        return NonFiniteError(
            f"step {step}: {what}; first value that is not finite: {origin}", step=step, origin=origin
        )

    def advice(self, saved: Sequence[Path]) -> str:
        """How to go on after a NonFiniteError, with the checkpoints there are, the newest last."""
        precision = self.config.precision
        advice = f"Resume {saved[-1]} (--resume)" if saved else "No checkpoint was saved: run anew"
        advice += " with a lower optim.lr or optim.clip"
        if self.layers:
            advice += ", or with that layer in bf16 (precision.skip)"
        if precision.parameters == "fp16" and not self.loss_scale.active:
            advice += ', or run anew with precision.loss_scale = "dynamic"'
        if not isinstance(precision.loss_scale, str):
            advice += ', or run anew with a lower precision.loss_scale, or with "dynamic"'
        if len(saved) > 1:
            advice += f". Where that fails again, remove {saved[-1]} to resume {saved[-2]}"
        return advice


def _seed_step(seed: int, step: int) -> None:
    """Seeds all generators with a hash of (seed, step), so that dropout needs no saved state."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0]))
