"""AdamW in fp32 for parameters of any dtype.

16-bit parameters get fp32 master copies: gradients accumulate in fp32 over the micro-batches, the step updates the
masters, and the parameters are rounded from them. With one micro-batch nothing accumulates: a kernel reads the bf16
gradients, clips them on the way, and writes moments, masters and parameters, 30 bytes a parameter in place of 52.
fp32 parameters are their own masters. Without masters
(`master = "none"`) the step updates the 16-bit parameters with 16-bit moments: updates below half a unit in the last
place are lost.

With FP8 moments, or masters as 16-bit remainders, `octavo.AdamW` takes the step, and `octavo.optim.Muon` with
`optim.name = "muon"` (`Fp8StateOptimizer`). Gradients then accumulate in the parameters' own dtype, because an fp32
copy would cost more memory than the moments save.

Each parameter has settings of its own: weight decay, learning rate and optimizer, by rule or by `[[optim.groups]]`. By
rule, weights of products and embeddings decay (`decayed_parameters`). With `optim.name = "muon"` Muon optimizes the
hidden matrices (`hidden_matrices`), AdamW the rest. A group of the configuration changes both for the parameters that
its pattern matches; of several groups the first that matches counts.

The learning rate is a function of the step: nothing to save, nothing to resume. With S steps, W of warmup, peak 1 and
end e, at step t = 0 … S - 1:

    warmup     (t + 1) / W                                            t < W
    cosine     e + (1 - e) · (1 + cos(π (t - W) / (S - W))) / 2
    linear     1 - (1 - e) · (t - W) / (S - W)
    wsd        1 until the last D = decay · S steps, then linearly to e
    constant   1

A second warmup of R steps from step F on (`rewarm`, `rewarm_from`) multiplies these by min(1, (t - F + 1) / R) for
t ≥ F: after a resume with other data, another batch or lost moments.

An exponential moving average (EMA) of the weights: `optim.ema`.

    average = β average + (1 − β) master,   β = min(ema, (1 + t) / (10 + t))

In fp32, of the exact fp32 masters. In bf16 a step of 1 − β = 0.001 is below half a unit in the last place, so it would
be lost; rounded stochastically the update survives, but adds noise, which the average exists to remove. fp32 costs 4
bytes per trained parameter, sharded like the parameter. Training never reads the average.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from octavo.kernels.adamw import HyperParams
from octavo.kernels.adamw import step as adamw_step
from octavo.nn.experts import STACKED
from octavo.numerics.names import nearest
from octavo.optim import AdamW, Muon
from octavo.optim.adamw import param_state
from octavo.optim.muon import newton_schulz_flops
from octavo.optim.sharded import local_rows, shard_like, sum_gradient
from octavo.optim.states import master_values
from octavo.runtime.torch_compat import is_dtensor
from octavo.tensor import local_tensor
from octavo.train.config.run_config import ConfigError
from octavo.train.config.sections import Optim, PrecisionConfig, decay_steps
from octavo.train.ranks import SharedError

STATE_SPACE_NAMES = ("A_log",)
"""Logarithms of a state space model's decay rates (Mamba), which their authors exclude from weight decay."""
HEADS = ("lm_head", "classifier", "score")
"""Names of the modules of Transformers that map to the vocabulary or to classes."""


@dataclass(frozen=True, kw_only=True, order=True)
class ParameterSettings:
    """How a parameter is optimized. Parameters with equal settings are one group; groups have the order of these."""

    group: int = -1  # Number of the group of the configuration; -1 for none
    adamw: bool = True  # Whether AdamW takes its steps, and not Muon
    undecayed: bool = False  # Whether its rule is no weight decay
    lr: float  # Peak learning rate
    weight_decay: float  # Decoupled weight decay


def parameter_settings(model: nn.Module, optim: Optim, *, part: bool = False) -> dict[str, ParameterSettings]:
    """Return the settings of each trained parameter of a model, by name."""
    # Call it before FSDP, which replaces the parameters and drops their marks.
    decayed, hidden = decayed_parameters(model), hidden_matrices(model) if optim.name == "muon" else set()
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    settings = {}
    for name in names:
        number = next((n for n, group in enumerate(optim.groups) if matches(name, group.match)), -1)
        group = optim.groups[number] if number >= 0 else None
        decay = optim.weight_decay if name in decayed else 0.0
        muon = name in hidden and (group is None or group.muon is not False)
        if group is not None and group.muon and not muon:
            raise ConfigError(
                f'optim.groups: "{group.match}" matches {name}, which muon = true does not fit: Muon optimizes hidden '
                "matrices (no embeddings, heads, norms, biases and vectors)"
            )
        settings[name] = ParameterSettings(
            group=number,
            adamw=not muon,
            undecayed=name not in decayed,
            lr=optim.lr if group is None or group.lr is None else group.lr,
            weight_decay=decay if group is None or group.weight_decay is None else group.weight_decay,
        )
    for number, group in enumerate(optim.groups):
        if not part and not any(setting.group == number for setting in settings.values()):
            raise ConfigError(_unmatched(group.match, names, [other.match for other in optim.groups[:number]]))
    return settings


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern, as in `fnmatch`, matches the whole name of a parameter or of a module around it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _unmatched(pattern: str, names: Sequence[str], earlier: Sequence[str]) -> str:
    taken = next((other for other in earlier for name in names if matches(name, pattern) and matches(name, other)), "")
    if taken:
        return (
            f'optim.groups: "{pattern}" matches only parameters that "{taken}" before it matches, and the first match '
            "counts: put it first, or leave it out"
        )
    ends = {".".join(name.split(".")[start:]) for name in names for start in range(name.count(".") + 1)}
    hint = nearest(pattern.strip("*."), sorted(ends)) or f"; the first one is {names[0]}"
    return f'optim.groups: "{pattern}" matches no trained parameter{hint}'


def decayed_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay applies to: weights of products and embeddings, of any shape."""
    # Excluded, for any number of dimensions: parameters of norms (modules whose class name has "norm"), biases (names
    # that end in "bias"), `STATE_SPACE_NAMES`, parameters marked `_no_weight_decay`, and vectors, also of shape [1, …,
    # 1, N]. Call it before FSDP, which replaces the parameters and drops the marks.
    names: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        norm = "norm" in type(module).__name__.lower()
        for leaf, param in module.named_parameters(prefix=path, recurse=False):
            name = leaf.rpartition(".")[2]
            vector = param.dim() < 2 or (param.dim() > 2 and max(param.shape[:-1]) == 1)
            excluded = norm or vector or name.endswith("bias") or name in STATE_SPACE_NAMES
            if not excluded and not getattr(param, "_no_weight_decay", False):
                names.add(leaf)
    return names


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the parameters that Muon optimizes: 2-D weights of products, and 3-D weights of experts."""
    # Excluded are embeddings, tied ones too, heads (`get_output_embeddings`, `HEADS`), convolutions, and all that
    # `decayed_parameters` excludes.
    module: Any = model
    head = module.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    excluded = {id(param) for param in ([] if head is None else head.parameters())}
    for path, part in model.named_modules(remove_duplicate=False):
        if isinstance(part, nn.Embedding | nn.modules.conv._ConvNd) or path.rpartition(".")[2] in HEADS:
            excluded |= {id(param) for param in part.parameters()}
    decayed = decayed_parameters(model)
    return {
        name
        for name, param in model.named_parameters()
        if name in decayed and id(param) not in excluded
        and (param.dim() == 2 or (param.dim() == 3 and name.rpartition(".")[2] in STACKED))
    }  # fmt: skip


def muon_flops(model: nn.Module, optim: Optim) -> float:
    """Floating point operations of Muon's products in a step of a whole model; 0 for AdamW."""
    if optim.name != "muon":
        return 0.0
    adamw = {name for name, own in parameter_settings(model, optim, part=True).items() if own.adamw}
    trained = ((name, param) for name, param in model.named_parameters() if param.requires_grad)
    return sum(newton_schulz_flops(param.shape) for name, param in trained if name not in adamw)


def groups_table(settings: Mapping[str, ParameterSettings], sizes: Mapping[str, int], optim: Optim) -> list[str]:
    """Return a line for each group of parameters: what matched, how many, and their settings; [] for the default."""
    if not optim.groups and optim.name == "adamw":
        return []
    rows = []
    for setting in sorted(set(settings.values())):
        names = [name for name, own in settings.items() if own == setting]
        count = sum(sizes[name] for name in names)
        rows.append((
            optim.groups[setting.group].match if setting.group >= 0 else "others",
            f"{len(names)} parameter{'s' if len(names) > 1 else ''} ({count:,} elements)",
            "adamw" if setting.adamw else "muon",
            f"lr {setting.lr:g}",
            f"weight decay {setting.weight_decay:g}",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """Learning rate of step 0, 1, … of `steps`."""
    lr = optim.lr * _factor(optim, step, steps)
    if optim.rewarm_from is not None and step >= optim.rewarm_from:
        lr *= min(1.0, (step - optim.rewarm_from + 1) / optim.rewarm)
    return lr


def average_decay(ema: float, step: int) -> float:
    """Decay of the moving average of the weights in step 0, 1, …: min(ema, (1 + t) / (10 + t))."""
    # The ramp lets the initial weights, which say nothing, fade in the first steps.
    return min(ema, (1 + step) / (10 + step))


def _factor(optim: Optim, step: int, steps: int) -> float:
    if step < optim.warmup:
        return (step + 1) / optim.warmup
    end = optim.min_lr_ratio
    if optim.schedule == "cosine":
        done = (step - optim.warmup) / max(1, steps - optim.warmup)
        return end + (1 - end) * (1 + math.cos(math.pi * done)) / 2
    if optim.schedule == "linear":
        return 1 - (1 - end) * (step - optim.warmup) / max(1, steps - optim.warmup)
    if optim.schedule == "wsd":
        decay = decay_steps(optim, steps)
        return end + (1 - end) * min(1.0, (steps - step) / decay) if decay else 1.0
    return 1.0


class WeightAverage:
    """The average of some parameters."""

    def __init__(self, names: Sequence[str], params: Sequence[nn.Parameter], masters: Iterable[Tensor]) -> None:
        self._params = dict(zip(names, params, strict=True))
        # The average by name, fp32, sharded like the parameters.
        self.tensors = {
            name: shard_like(param, master.detach().clone(memory_format=torch.contiguous_format))
            for (name, param), master in zip(self._params.items(), masters, strict=True)
        }

    @torch.no_grad()
    def update(self, masters: Iterable[Tensor], decay: float) -> None:
        """Move the average towards the masters by 1 − `decay`."""
        for average, master in zip(self.tensors.values(), masters, strict=True):
            local_tensor(average).lerp_(master.detach(), 1 - decay)

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Load an average by name; shards take their rows of it. Raises KeyError for a missing one."""
        for name, average in self.tensors.items():
            local_tensor(average).copy_(local_rows(average, saved[name]))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average into the parameters, and their own values back at the end."""
        with torch.no_grad():
            own = {name: local_tensor(param).detach().clone() for name, param in self._params.items()}
            try:
                self._fill({name: local_tensor(average) for name, average in self.tensors.items()})
                yield
            finally:
                self._fill(own)

    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, param in self._params.items():
            local_tensor(param).copy_(values[name])


def make_optimizer(
    model: nn.Module, optim: Optim, precision: PrecisionConfig, fp32_values: Mapping[str, torch.Tensor],
    settings: Mapping[str, ParameterSettings], partial: Collection[str] = (),
) -> "TrainerOptimizer":  # fmt: skip
    """The optimizer of a run."""
    states, master = optim.states or precision.resolved.states, precision.resolved.master
    if optim.name == "muon" or states == "fp8" or (master == "remainder" and precision.parameters == "bf16"):
        master_format = None if master == "none" else master
        try:
            optimizer: TrainerOptimizer = Fp8StateOptimizer(
                model, optim, states=states, master=master_format, fp32_values=fp32_values, settings=settings
            )
        except ValueError as error:  # shards that end inside a group of moments, or that split rows of a matrix
            setting = f'optim.name = "{optim.name}", ' if optim.name != "adamw" else ""
            raise SharedError(f'{setting}optim.states = "{states}": {error}') from None
    else:
        optimizer = MasterWeightOptimizer(
            model, optim, master=master != "none", fp32_values=fp32_values, settings=settings,
            adds_up=optim.micro_batches > 1 or precision.loss_scale != "none", partial=partial,
        )  # fmt: skip
    return optimizer


class TrainerOptimizer(ABC):
    """What the trainer, its checkpoints and its plan ask of an optimizer."""

    inner: torch.optim.Optimizer  # Takes the steps
    in_place: bool  # Whether the gradients of micro-batches add up in the parameters' own
    average: WeightAverage | None = None  # The moving average of the weights; None without `optim.ema`
    _names: list[str]
    _settings: Mapping[str, ParameterSettings]
    _lr_ratios: list[float]
    _ema: float
    _params: list[nn.Parameter]
    _clip: float

    def gradients(self) -> dict[str, torch.Tensor]:
        """What the step will read, by parameter: of shards, what is here."""
        for param in self._params:
            sum_gradient(param)
        named = zip(self._names, self._params, strict=True)
        return {name: local_tensor(param.grad) for name, param in named if param.grad is not None}

    @property
    def _is_part(self) -> bool:
        return len(self._settings) != len(self._names)

    def _numbers(self, saved: dict[str, Any]) -> dict[str, int]:
        """Numbers of the parameters in a state of one process, which has them in the order of their settings."""
        names = sorted(self._settings, key=self._settings.__getitem__)
        return dict(zip(names, [n for group in saved["param_groups"] for n in group["params"]], strict=True))

    @abstractmethod
    def accumulate(self) -> None:
        """Take over the gradients of a micro-batch. Call after each backward."""

    def gradient_norm(self, loss_scale: float) -> torch.Tensor:
        """Divide the gradients by `loss_scale`. Returns the L2 norm of those that are here."""
        norm: torch.Tensor = self.gradient_squares(loss_scale, lambda param: 1).sqrt().float()
        return norm

    @torch.no_grad()
    def gradient_squares(self, loss_scale: float, copies: Callable[[torch.Tensor], int]) -> torch.Tensor:
        """Divide the gradients by `loss_scale`."""
        # Returns this rank's share of their squared L2 norm over all ranks, float64, not finite if any of them is not.
        # `copies`: number of ranks that hold the same elements of a parameter, which share their squares.
        gradients = self.gradients()
        if loss_scale != 1.0:
            torch._foreach_div_(list(gradients.values()), loss_scale)
        by_copies: dict[int, list[torch.Tensor]] = {}
        for name, param in zip(self._names, self._params, strict=True):
            if name in gradients:
                by_copies.setdefault(copies(param), []).append(gradients[name])
        norms = {
            number: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)))
            for number, grads in by_copies.items()
        }
        total: torch.Tensor = torch.stack([norm.double() ** 2 / number for number, norm in norms.items()]).sum()
        return total

    @abstractmethod
    def masters(self) -> Iterator[torch.Tensor]:
        """Yield the fp32 values of the local rows of each parameter, exact where there is a master."""

    def _begin_average(self, optim: Optim) -> None:
        if optim.ema is not None:
            self._ema = optim.ema
            self.average = WeightAverage(self._names, self._params, self.masters())

    def _average_state(self) -> dict[str, Any]:
        return {} if self.average is None else {"ema": self.average.tensors}

    def _average_tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.average is None else {f"{name}.ema": value for name, value in self.average.tensors.items()}

    @torch.no_grad()
    def step(self, lr: float, norm: torch.Tensor, number: int = 0, *, norm_value: float = math.inf) -> None:
        """Clip the gradients, whose global norm is `norm`, and take step `number`, 0, 1, …"""
        # `norm_value`: the same where the host has read it; up to the clip, the factor is 1 and nothing is multiplied.
        factor = 1.0
        if self._clip and norm_value + 1e-6 > self._clip:
            # In float32, as `torch.nn.utils.clip_grad_norm_` computes it.
            value = np.float32(norm_value if math.isfinite(norm_value) else norm.item())
            factor = min(float(np.float32(1) / (value + np.float32(1e-6)) * np.float32(self._clip)), 1.0)
        for group, ratio in zip(self.inner.param_groups, self._lr_ratios, strict=True):
            group["lr"] = lr * ratio
        self._step(factor)
        if self.average is not None:
            self.average.update(self.masters(), average_decay(self._ema, number))

    def _step(self, factor: float) -> None:
        """Take a step with the gradients times `factor`."""
        if factor != 1.0 and (grads := list(self.gradients().values())):
            torch._foreach_mul_(grads, factor)
        self.inner.step()

    def zero_grad(self) -> None:
        """Free all gradients."""
        for param in self._params:
            param.grad = None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return states, step counts and masters: plain tensors, for `torch.load(weights_only=True)`."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every state, made where it is not there yet, as "<parameter>.exp_avg"; no copies."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned for the same model; shards take their rows of it."""


class MasterWeightOptimizer(TrainerOptimizer):
    """`torch.optim.AdamW` over the trainable parameters of a model, or over fp32 masters of the 16-bit ones."""

    # `fp32_values`: fp32 values for masters, by name, where more is known than the parameters hold. `settings`: of the
    # trained parameters of the whole model; None if this is the whole model. Unless gradients add up over several
    # micro-batches, or are scaled, bf16 parameters keep their own, which `octavo.kernels.adamw` reads.

    def __init__(
        self, model: nn.Module, optim: Optim, *, master: bool, fp32_values: Mapping[str, torch.Tensor] | None = None,
        settings: Mapping[str, ParameterSettings] | None = None, adds_up: bool = True, partial: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._names: list[str] = []
        self._params, self._masters = [], []
        # bf16 parameters whose own gradients a step reads, by master.
        self._direct: dict[torch.Tensor, torch.Tensor] = {}
        for name, param in model.named_parameters():
            if param.requires_grad:
                own = not master or param.dtype == torch.float32
                self._names.append(name)
                self._params.append(param)
                self._masters.append(param if own else _master(param, (fp32_values or {}).get(name)))
                # Summands of ranks add up in fp32, too.
                reads = param.dtype == torch.bfloat16 and local_tensor(param).is_contiguous() and name not in partial
                if reads and not (own or adds_up):
                    self._direct[self._masters[-1]] = param
        self.in_place = all(param is master for param, master in zip(self._params, self._masters, strict=True))
        self._clip = optim.clip
        self._settings = parameter_settings(model, optim) if settings is None else settings
        groups = _groups(self._names, self._masters, self._settings)
        self.inner = torch.optim.AdamW(
            [part for group in groups for part in _by_mesh(group)], lr=optim.lr, betas=optim.betas, eps=optim.eps,
            fused=True,
        )  # fmt: skip
        self._lr_ratios = [group["lr"] / optim.lr for group in self.inner.param_groups]
        self._begin_average(optim)

    def gradients(self) -> dict[str, torch.Tensor]:
        """What the step will read, by parameter: of shards, what is here."""
        owners = (self._direct.get(master, master) for master in self._masters)
        named = zip(self._names, owners, strict=True)
        return {name: local_tensor(owner.grad) for name, owner in named if owner.grad is not None}

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the gradients of a micro-batch to the masters' in fp32, and free them, but of `_direct`."""
        for param, master in zip(self._params, self._masters, strict=True):
            if param.grad is None:
                continue
            sum_gradient(param)
            if param is master or master in self._direct:
                continue
            if master.grad is None:
                # As the master lies in memory: the fused step reads gradients as if they did.
                rows = torch.empty_like(local_tensor(master)).copy_(local_tensor(param.grad))
                master.grad = shard_like(param, rows)
            else:
                local_tensor(master.grad).add_(local_tensor(param.grad))
            param.grad = None

    def masters(self) -> Iterator[torch.Tensor]:
        """Yield the fp32 values of the local rows of each parameter, exact where there is a master."""
        return (local_tensor(master).detach().float() for master in self._masters)

    def _step(self, factor: float) -> None:
        direct = {master: param for master, param in self._direct.items() if param.grad is not None}
        others = [local_tensor(master.grad) for master in self._masters if master.grad is not None]
        if factor != 1.0 and others:
            torch._foreach_mul_(others, factor)
        self.inner.step()  # passes over masters without gradients
        self._step_directly(direct, factor)
        rows = zip(self._params, self._masters, strict=True)
        pairs = [(p, m) for p, m in rows if p is not m and m.grad is not None]
        if pairs:
            torch._foreach_copy_([local_tensor(param) for param, _ in pairs], [local_tensor(m) for _, m in pairs])

    def _step_directly(self, direct: Mapping[torch.Tensor, torch.Tensor], factor: float) -> None:
        """Take a step of masters by their parameters' own gradients."""
        work = []
        for group in self.inner.param_groups:
            (beta1, beta2), shared = group["betas"], {name: group[name] for name in ("lr", "eps", "weight_decay")}
            for master in filter(direct.__contains__, group["params"]):
                state = self._state_of(master)
                state["step"] += 1
                count = int(state["step"].item())  # on the CPU
                hyper = HyperParams(beta1=beta1, beta2=beta2, step=count, factor=factor, **shared)
                tensors = {name: local_tensor(value) for name, value in state.items()}
                param = direct[master]
                assert param.grad is not None
                tensors["master"] = local_tensor(master).detach()
                work.append((param_state(local_tensor(param), local_tensor(param.grad), tensors), hyper))
        if work:
            adamw_step(work)

    def _state_of(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """The states of a master, made if missing."""
        state: dict[str, torch.Tensor] = self.inner.state[master]
        if not state:
            device = "cpu" if master in self._direct else local_tensor(master).device
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = shard_like(master, torch.zeros_like(local_tensor(master)))
        return state

    def zero_grad(self) -> None:
        """Free all gradients."""
        for param in (*self._params, *self._masters):
            param.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Moments, step counts and masters: plain tensors, for `torch.load(weights_only=True)`."""
        rows = zip(self._names, self._params, self._masters, strict=True)
        masters = {name: master.detach() for name, param, master in rows if param is not master}
        return {"adamw": self.inner.state_dict(), "masters": masters} | self._average_state()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every state, made where it is not there yet, as "<parameter>.exp_avg" or "<parameter>.master"; no copies."""
        tensors: dict[str, torch.Tensor] = {}
        for name, param, master in zip(self._names, self._params, self._masters, strict=True):
            tensors |= {f"{name}.{key}": value for key, value in self._state_of(master).items()}
            if param is not master:
                tensors[f"{name}.master"] = master.detach()
        return tensors | self._average_tensors()

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned for the same model; shards take their rows of it."""
        saved = state["adamw"]
        if self._is_part or any(is_dtensor(master) for master in self._masters):
            self.tensors()  # makes the states, of which rows of those that one process numbered are loaded
            numbers = self._numbers(saved)
            for name, master in zip(self._names, self._masters, strict=True):
                for key, value in saved["state"].get(numbers[name], {}).items():
                    local_tensor(self.inner.state[master][key]).copy_(local_rows(master, value))
        else:
            self.inner.load_state_dict(saved)
        for name, param, master in zip(self._names, self._params, self._masters, strict=True):
            if param is not master:
                local_tensor(master).copy_(local_rows(master, state["masters"][name]))
        for direct in filter(self.inner.state.__contains__, self._direct):  # PyTorch moves counts to the device
            self.inner.state[direct]["step"] = self.inner.state[direct]["step"].cpu()
        if self.average is not None:
            self.average.load(state["ema"])


class Fp8StateOptimizer(TrainerOptimizer):
    """`octavo.AdamW` or `octavo.optim.Muon` over the trainable parameters of a model."""

    in_place = True

    def __init__(
        self, model: nn.Module, optim: Optim, *, states: Literal["fp32", "fp8"],
        master: Literal["remainder", "fp32"] | None, fp32_values: Mapping[str, torch.Tensor] | None = None,
        settings: Mapping[str, ParameterSettings] | None = None,
    ) -> None:  # fmt: skip
        named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self._names, self._params = list(named), list(named.values())
        self._settings = parameter_settings(model, optim) if settings is None else settings
        self._clip = optim.clip
        # The loop has looked at the gradients' norm before it takes a step.
        groups = _groups(self._names, self._params, self._settings)
        shared: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "states": states}
        shared |= {"master": master, "nonfinite": "ignore"}
        if optim.name == "muon":
            for group, setting in zip(groups, sorted({self._settings[name] for name in self._names}), strict=True):
                group["muon"] = not setting.adamw
            self.inner: AdamW = Muon(groups, momentum=optim.momentum, adjust_lr_fn="match_rms_adamw", **shared)
        else:
            self.inner = AdamW(groups, **shared)
        self._lr_ratios = [group["lr"] / optim.lr for group in self.inner.param_groups]
        masters = {named[name]: value for name, value in (fp32_values or {}).items() if name in named}
        self.inner.set_masters({param: value for param, value in masters.items() if param.dtype != torch.float32})
        if optim.ema is not None:
            self.inner.make_states()
        self._begin_average(optim)

    def masters(self) -> Iterator[torch.Tensor]:
        """Yield the fp32 values of the local rows of each parameter, exact where there is a master."""
        return (master_values(param, self.inner.state[param]) for param in self._params)

    def accumulate(self) -> None:
        """Nothing: backward adds to the parameters' own gradients."""

    def _step(self, factor: float) -> None:
        self.inner.step_scaled(factor)

    def state_dict(self) -> dict[str, Any]:
        """Moments, scales, remainders or masters and step counts, for `torch.load(weights_only=True)`."""
        return {"adamw": self.inner.state_dict(), "masters": {}} | self._average_state()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every state, made where it is not there yet, as "<parameter>.exp_avg", "<parameter>.remainder"; no copies."""
        self.inner.make_states()
        return {
            f"{name}.{key}": value
            for name, param in zip(self._names, self._params, strict=True)
            for key, value in self.inner.state[param].items()
        } | self._average_tensors()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned for the same model."""
        saved = state["adamw"]
        if self._is_part:
            numbers = self._numbers(saved)
            own = sorted(self._names, key=self._settings.__getitem__)
            states = {i: saved["state"][numbers[name]] for i, name in enumerate(own) if numbers[name] in saved["state"]}
            saved = {"state": states, "param_groups": self.inner.state_dict()["param_groups"]}
        self.inner.load_state_dict(saved)
        if self.average is not None:
            self.average.load(state["ema"])


def state_bytes_per_parameter(optimizer: TrainerOptimizer, model: nn.Module) -> float:
    """Return the bytes of this rank's states, masters included, per trained parameter of this rank."""
    trained = sum(local_tensor(param).numel() for param in model.parameters() if param.requires_grad)
    return sum(local_tensor(state).nbytes for state in optimizer.tensors().values()) / max(trained, 1)


def _master(param: torch.Tensor, fp32_values: torch.Tensor | None) -> nn.Parameter:
    """An fp32 copy of a parameter, sharded as it is; with the given fp32 values if there are any."""
    rows = local_tensor(param).detach() if fp32_values is None else local_rows(param, fp32_values)
    return nn.Parameter(shard_like(param, rows.to(local_tensor(param).device, torch.float32, copy=True)))


def _groups(
    names: Sequence[str], params: Sequence[torch.Tensor], settings: Mapping[str, ParameterSettings]
) -> list[dict[str, Any]]:
    """Parameter groups, one for all parameters with equal settings; none is empty."""
    by_setting: dict[ParameterSettings, list[torch.Tensor]] = {}
    for name, param in sorted(zip(names, params, strict=True), key=lambda entry: settings[entry[0]]):
        by_setting.setdefault(settings[name], []).append(param)
    return [
        {"params": members, "lr": setting.lr, "weight_decay": setting.weight_decay}
        for setting, members in by_setting.items()
    ]


def _by_mesh(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Divide a group by the mesh of its parameters: a fused step takes those of one mesh."""
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for param in group["params"]:
        by_mesh.setdefault(getattr(param, "device_mesh", None), []).append(param)
    return (group | {"params": params} for params in by_mesh.values())
