"""The optimizer of a run, its learning rate, and the moving average of the weights.

`MasterWeightOptimizer` takes PyTorch's fused step on fp32 masters of 16-bit parameters, in which gradients of
micro-batches accumulate. With one micro-batch a kernel reads the bf16 gradients, clips them on the way, and writes
moments, masters and parameters: 30 bytes a parameter in place of 52. `Fp8StateOptimizer` takes Octavo's step, for FP8
moments, 16-bit remainders and `octavo.optim.OPTIMIZERS` without a fused step; gradients accumulate in their own dtype.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octavo.kernels.adamw.reference import HyperParams, ParamState
from octavo.nn.experts import STACKED
from octavo.numerics.suggestions import grouped, nearest
from octavo.optim import OPTIMIZERS, AdamW
from octavo.optim.adamw import ADAMW
from octavo.optim.sharded import local_rows, shard_like, sum_gradient
from octavo.optim.states import Group, copy_rows, hyper_params, master_values, param_state
from octavo.runtime.torch_compat import is_dtensor
from octavo.tensor import local_tensor
from octavo.train.config.run_config import ConfigError, TrainConfig
from octavo.train.config.sections import Optim, PrecisionConfig, decay_steps
from octavo.train.ranks import SharedError

STATE_SPACE_NAMES = ("A_log",)  # Logarithms of Mamba's decay rates, which its authors exclude from weight decay
HEADS = ("lm_head", "classifier", "score")  # Modules of Transformers that map to the vocabulary or to classes


@dataclass(frozen=True, kw_only=True, order=True)
class ParameterSettings:
    """How a parameter is optimized. Parameters with equal settings are one group; groups have the order of these."""

    group: int = -1  # Number of the group of the configuration; -1 for none
    rest: bool = False  # Whether it is left to AdamW by an optimizer of hidden matrices
    undecayed: bool = False  # Whether its rule is no weight decay
    lr: float  # Peak learning rate
    weight_decay: float  # Decoupled weight decay


def parameter_settings(model: nn.Module, optim: Optim, *, part: bool = False) -> dict[str, ParameterSettings]:
    """The settings of each trained parameter of a model, by name; before FSDP, which drops marks of parameters."""
    spec, decayed = OPTIMIZERS[optim.name], decayed_parameters(model)
    taken = hidden_matrices(model) if spec.matrices else {name for name, _ in model.named_parameters()}
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    settings = {}
    for name in names:
        number = next((n for n, group in enumerate(optim.groups) if matches(name, group.match)), -1)
        group = optim.groups[number] if number >= 0 else None
        decay = optim.weight_decay if name in decayed else 0.0
        own = getattr(group, spec.name, None)  # muon = true or false
        if group is not None and own and name not in taken:
            problem = f'optim.groups: "{group.match}" matches {name}, which {spec.name} = true does not fit'
            raise ConfigError(f"{problem}: {spec.name.title()} is for hidden matrices (no embeddings, heads, vectors)")
        settings[name] = ParameterSettings(
            group=number, rest=name not in taken or own is False, undecayed=name not in decayed,
            lr=optim.lr if group is None or group.lr is None else group.lr,
            weight_decay=decay if group is None or group.weight_decay is None else group.weight_decay,
        )  # fmt: skip
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
        problem = f'optim.groups: "{pattern}" matches only parameters that "{taken}" before it matches'
        return f"{problem}, and the first match counts: put it first, or leave it out"
    ends = {".".join(name.split(".")[start:]) for name in names for start in range(name.count(".") + 1)}
    hint = nearest(pattern.strip("*."), sorted(ends)) or f"; the first one is {names[0]}"
    return f'optim.groups: "{pattern}" matches no trained parameter{hint}'


def decayed_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay applies to: weights of products and embeddings, of any shape."""
    # Not those of norms, biases, `STATE_SPACE_NAMES`, those marked, and vectors, also of shape [1, …, 1, N].
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
    # No embeddings, tied ones too, heads, convolutions, and what does not decay.
    head = getattr(model, "get_output_embeddings", lambda: None)()
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


def step_cost(model: nn.Module, config: TrainConfig) -> tuple[float, float]:
    """Bytes per trained parameter that a step of a whole model moves, and FLOPs of its matrix products."""
    settings = parameter_settings(model, config.optim, part=True)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    specs = {name: ADAMW if settings[name].rest else OPTIMIZERS[config.optim.name] for name in params}
    sizes = (param.numel() * specs[name].step_bytes(config.resolved, param.dtype) for name, param in params.items())
    count = sum(param.numel() for param in params.values())
    return sum(sizes) / max(count, 1), sum(specs[name].flops(param.shape) for name, param in params.items())


def groups_table(settings: Mapping[str, ParameterSettings], sizes: Mapping[str, int], optim: Optim) -> list[str]:
    """A line for each group of parameters: what matched, how many, and their settings; [] for the default."""
    if not optim.groups and not OPTIMIZERS[optim.name].matrices:
        return []
    rows = []
    for setting in sorted(set(settings.values())):
        names = [name for name, own in settings.items() if own == setting]
        count = sum(sizes[name] for name in names)
        rows.append((
            optim.groups[setting.group].match if setting.group >= 0 else "others",
            f"{len(names)} parameter{'s' if len(names) > 1 else ''} ({count:,} elements)",
            ADAMW.name if setting.rest else optim.name, f"lr {setting.lr:g}", f"weight decay {setting.weight_decay:g}",
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
    """Decay of the moving average of the weights in step 0, 1, …; the ramp lets the initial weights fade."""
    return min(ema, (1 + step) / (10 + step))


def _factor(optim: Optim, step: int, steps: int) -> float:
    if step < optim.warmup:
        return (step + 1) / optim.warmup
    end, after_warmup = optim.min_lr_ratio, max(1, steps - optim.warmup)
    if optim.schedule == "cosine":
        return end + (1 - end) * (1 + math.cos(math.pi * ((step - optim.warmup) / after_warmup))) / 2
    if optim.schedule == "linear":
        return 1 - (1 - end) * (step - optim.warmup) / after_warmup
    decay = decay_steps(optim, steps)  # of "wsd"
    return end + (1 - end) * min(1.0, (steps - step) / decay) if decay else 1.0


class WeightAverage:
    """An exponential moving average of the exact fp32 masters, in fp32: bf16 would lose a step of 1 − β = 0.001."""

    def __init__(self, names: Sequence[str], params: Sequence[nn.Parameter], masters: Iterable[Tensor]) -> None:
        self._params = dict(zip(names, params, strict=True))
        self.tensors = {
            name: shard_like(param, master.detach().clone(memory_format=torch.contiguous_format))
            for (name, param), master in zip(self._params.items(), masters, strict=True)
        }

    @torch.no_grad()
    def update(self, masters: Iterable[Tensor], decay: float) -> None:
        for average, master in zip(self.tensors.values(), masters, strict=True):
            local_tensor(average).lerp_(master.detach(), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
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
    model: nn.Module, optim: Optim, precision: PrecisionConfig, fp32_values: Mapping[str, Tensor],
    settings: Mapping[str, ParameterSettings], partial: Collection[str] = (),
) -> "TrainerOptimizer":  # fmt: skip
    states, master = optim.states or precision.resolved.states, precision.resolved.master
    own: dict[str, Any] = {"fp32_values": fp32_values, "settings": settings}
    remainder = master == "remainder" and precision.parameters == "bf16"
    if OPTIMIZERS[optim.name].fused is None or states == "fp8" or remainder:
        try:
            return Fp8StateOptimizer(model, optim, states=states, master=None if master == "none" else master, **own)
        except ValueError as error:  # shards that end inside a group of moments, or that split rows of a matrix
            setting = f'optim.name = "{optim.name}", ' if optim.name != "adamw" else ""
            raise SharedError(f'{setting}optim.states = "{states}": {error}') from None
    adds_up = optim.micro_batches > 1 or precision.loss_scale != "none"
    return MasterWeightOptimizer(model, optim, master=master != "none", adds_up=adds_up, partial=partial, **own)


class TrainerOptimizer(ABC):
    """What the trainer, its checkpoints and its plan ask of an optimizer of the trained parameters of a model."""

    inner: torch.optim.Optimizer  # Takes the steps
    in_place = True  # Whether the gradients of micro-batches add up in the parameters' own
    average: WeightAverage | None = None  # The moving average of the weights; None without `optim.ema`

    # `settings`: of the trained parameters of the whole model; None if this is the whole model.
    def __init__(self, model: nn.Module, optim: Optim, settings: Mapping[str, ParameterSettings] | None) -> None:
        named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self._names, self._params = list(named), list(named.values())
        self._masters = self._params  # What `inner` steps
        self._owners: list[Tensor] = [*self._params]  # Whose gradients it reads
        self._settings = parameter_settings(model, optim) if settings is None else settings
        self._optim = optim

    def _begin(self) -> None:
        self._lr_ratios = [group["lr"] / self._optim.lr for group in self.inner.param_groups]
        if self._optim.ema is not None:
            self._make_states()
            self.average = WeightAverage(self._names, self._params, self.masters())

    def gradients(self) -> dict[str, Tensor]:
        """Local gradients that the step will read, by parameter name."""
        for owner in self._owners:
            sum_gradient(owner)
        named = zip(self._names, self._owners, strict=True)
        return {name: local_tensor(owner.grad) for name, owner in named if owner.grad is not None}

    @abstractmethod
    def accumulate(self) -> None:
        """Take over the gradients of a micro-batch. Call after each backward."""

    def gradient_norm(self, loss_scale: float) -> Tensor:
        """Divide the gradients by `loss_scale`. Returns the L2 norm of those that are here."""
        return self.gradient_squares(loss_scale, lambda param: 1).sqrt().float()

    @torch.no_grad()
    def gradient_squares(self, loss_scale: float, copies: Callable[[Tensor], int]) -> Tensor:
        """Divide the gradients by `loss_scale`. Returns this rank's share of their squared L2 norm, in float64."""
        # `copies`: number of ranks that hold the same elements of a parameter, which share their squares.
        gradients = self.gradients()
        if loss_scale != 1.0:
            torch._foreach_div_(list(gradients.values()), loss_scale)
        named = zip(self._names, self._params, strict=True)
        by_copies = grouped((copies(param), gradients[name]) for name, param in named if name in gradients)
        norms = {
            number: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)))
            for number, grads in by_copies.items()
        }
        return torch.stack([norm.double() ** 2 / number for number, norm in norms.items()]).sum()

    @abstractmethod
    def masters(self) -> Iterator[Tensor]:
        """Yield the fp32 values of the local rows of each parameter, exact where there is a master."""

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor, number: int = 0, *, norm_value: float = math.inf) -> None:
        """Clip the gradients, whose global norm is `norm`, and take step `number`, 0, 1, …"""
        # `norm_value`: the same where the host has read it; up to the clip, the factor is 1 and nothing is multiplied.
        factor = 1.0
        if self._optim.clip and norm_value + 1e-6 > self._optim.clip:
            # In float32, as `torch.nn.utils.clip_grad_norm_` computes it.
            value = np.float32(norm_value if math.isfinite(norm_value) else norm.item())
            factor = min(float(np.float32(1) / (value + np.float32(1e-6)) * np.float32(self._optim.clip)), 1.0)
        for group, ratio in zip(self.inner.param_groups, self._lr_ratios, strict=True):
            group["lr"] = lr * ratio
        self._step(factor)
        if self.average is not None and self._optim.ema is not None:
            self.average.update(self.masters(), average_decay(self._optim.ema, number))

    @abstractmethod
    def _step(self, factor: float) -> None: ...

    @abstractmethod
    def _make_states(self) -> None: ...

    def zero_grad(self) -> None:
        for param in (*self._params, *self._masters):
            param.grad = None

    def _separate(self) -> dict[str, Tensor]:
        rows = zip(self._names, self._params, self._masters, strict=True)
        return {name: master.detach() for name, param, master in rows if param is not master}

    def state_dict(self) -> dict[str, Any]:
        """States, step counts and masters: plain tensors, for `torch.load(weights_only=True)`."""
        average = {} if self.average is None else {"ema": self.average.tensors}
        return {"adamw": self.inner.state_dict(), "masters": self._separate()} | average

    def tensors(self) -> dict[str, Tensor]:
        """Every state, made where it is not there yet, as "<parameter>.exp_avg"; no copies."""
        self._make_states()
        tensors: dict[str, Tensor] = {}
        for name, owner in zip(self._names, self._masters, strict=True):
            tensors |= {f"{name}.{key}": value for key, value in self.inner.state[owner].items()}
        average = {} if self.average is None else self.average.tensors
        for kind, values in (("master", self._separate()), ("ema", average)):
            tensors |= {f"{name}.{kind}": value for name, value in values.items()}
        return tensors

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state["adamw"]
        if len(self._settings) == len(self._names) and not any(map(is_dtensor, self._params)):
            self.inner.load_state_dict(saved)
        else:  # rows of what one process saved, which numbers parameters in the order of their settings
            self._make_states()
            names = sorted(self._settings, key=self._settings.__getitem__)
            numbers = dict(zip(names, (n for group in saved["param_groups"] for n in group["params"]), strict=True))
            for name, owner in zip(self._names, self._masters, strict=True):
                if values := saved["state"].get(numbers[name]):
                    copy_rows(self.inner.state[owner], values)
        copy_rows(self._separate(), state["masters"])
        if self.average is not None:
            copy_rows(self.average.tensors, state["ema"])


class MasterWeightOptimizer(TrainerOptimizer):
    """PyTorch's fused optimizer over the trainable parameters of a model, or over fp32 masters of the 16-bit ones."""

    # `fp32_values`: for masters, by name, where more is known than the parameters hold. Unless gradients add up over
    # several micro-batches, or are scaled, bf16 parameters keep their own, which the spec's step reads.

    def __init__(
        self, model: nn.Module, optim: Optim, *, master: bool, fp32_values: Mapping[str, Tensor] | None = None,
        settings: Mapping[str, ParameterSettings] | None = None, adds_up: bool = True, partial: Collection[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(model, optim, settings)
        self._masters = []
        self._direct: dict[Tensor, Tensor] = {}  # bf16 parameters whose own gradients a step reads, by master
        for name, param in zip(self._names, self._params, strict=True):
            own = not master or param.dtype == torch.float32
            self._masters.append(param if own else _master(param, (fp32_values or {}).get(name)))
            # Summands of ranks add up in fp32, too.
            reads = param.dtype == torch.bfloat16 and local_tensor(param).is_contiguous() and name not in partial
            if reads and not (own or adds_up):
                self._direct[self._masters[-1]] = param
        self._owners = [self._direct.get(master, master) for master in self._masters]
        self.in_place = not self._separate()
        self._spec = OPTIMIZERS[optim.name]
        assert self._spec.fused is not None
        groups = _groups(self._names, self._masters, self._settings, by_mesh=True)  # as a fused step takes them
        make: Callable[..., torch.optim.Optimizer] = self._spec.fused
        self.inner = make(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
        self._begin()

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the gradients of a micro-batch to the masters' in fp32, and free them, but of `_direct`."""
        for param, master in zip(self._params, self._masters, strict=True):
            if param.grad is not None:
                sum_gradient(param)
            if param.grad is None or param is master or master in self._direct:
                continue
            if master.grad is None:
                # As the master lies in memory: the fused step reads gradients as if they did.
                rows = torch.empty_like(local_tensor(master)).copy_(local_tensor(param.grad))
                master.grad = shard_like(param, rows)
            else:
                local_tensor(master.grad).add_(local_tensor(param.grad))
            param.grad = None

    def masters(self) -> Iterator[Tensor]:
        return (local_tensor(master).detach().float() for master in self._masters)

    def _step(self, factor: float) -> None:
        others = [local_tensor(master.grad) for master in self._masters if master.grad is not None]
        if factor != 1.0 and others:
            torch._foreach_mul_(others, factor)
        self.inner.step()  # passes over masters without gradients
        assert self._spec.step is not None
        self._spec.step([
            self._next_state(group, master, factor)
            for group in self.inner.param_groups
            for master in group["params"]
            if master in self._direct and self._direct[master].grad is not None
        ])  # fmt: skip
        rows = zip(self._params, self._masters, strict=True)
        pairs = [(p, m) for p, m in rows if p is not m and m.grad is not None]
        if pairs:
            torch._foreach_copy_([local_tensor(param) for param, _ in pairs], [local_tensor(m) for _, m in pairs])

    def _next_state(self, group: Group, master: Tensor, factor: float) -> tuple[ParamState, HyperParams]:
        """Count a step of a master that its parameter's own gradient updates; return it with the step's numbers."""
        state, param = self._state_of(master), self._direct[master]
        state["step"] += 1
        tensors = state | {"master": master.detach()}
        hyper = hyper_params(group, state["step"], factor)
        return param_state(param, local_tensor(param), tensors, self._spec.moments), hyper

    def _state_of(self, master: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.inner.state[master]
        if not state:
            device = "cpu" if master in self._direct else local_tensor(master).device
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for moment in self._spec.moments:
                state[moment] = shard_like(master, torch.zeros_like(local_tensor(master)))
        return state

    def _make_states(self) -> None:
        for master in self._masters:
            self._state_of(master)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for direct in filter(self.inner.state.__contains__, self._direct):  # PyTorch moves counts to the device
            self.inner.state[direct]["step"] = self.inner.state[direct]["step"].cpu()


class Fp8StateOptimizer(TrainerOptimizer):
    def __init__(
        self, model: nn.Module, optim: Optim, *, states: str, master: str | None,
        fp32_values: Mapping[str, Tensor] | None = None, settings: Mapping[str, ParameterSettings] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, optim, settings)
        spec = OPTIMIZERS[optim.name]
        own = {name: getattr(optim, name) for name in spec.settings}
        groups = _groups(self._names, self._params, self._settings, spec.name if spec.matrices else None)
        # The loop has looked at the gradients' norm before it takes a step.
        own |= {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "states": states, "master": master}
        self.inner: AdamW = spec.make(groups, nonfinite="ignore", **own)
        values, named = fp32_values or {}, zip(self._names, self._params, strict=True)
        self.inner.set_masters({p: values[name] for name, p in named if name in values and p.dtype != torch.float32})
        self._begin()

    def accumulate(self) -> None:
        """Nothing: backward adds to the parameters' own gradients."""

    def masters(self) -> Iterator[Tensor]:
        return (master_values(param, self.inner.state[param]) for param in self._params)

    def _step(self, factor: float) -> None:
        self.inner.step_scaled(factor)

    def _make_states(self) -> None:
        self.inner.make_states()


def state_bytes_per_parameter(optimizer: TrainerOptimizer, model: nn.Module) -> float:
    trained = sum(local_tensor(param).numel() for param in model.parameters() if param.requires_grad)
    return sum(local_tensor(state).nbytes for state in optimizer.tensors().values()) / max(trained, 1)


def _master(param: Tensor, fp32_values: Tensor | None) -> nn.Parameter:
    rows = local_tensor(param).detach() if fp32_values is None else local_rows(param, fp32_values)
    return nn.Parameter(shard_like(param, rows.to(local_tensor(param).device, torch.float32, copy=True)))


def _groups(
    names: Sequence[str], params: Sequence[Tensor], settings: Mapping[str, ParameterSettings], flag: str | None = None,
    *, by_mesh: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Parameter groups, one for all with equal settings, and mesh; `flag`: a setting of those not left to AdamW."""
    ordered = sorted(zip(names, params, strict=True), key=lambda entry: settings[entry[0]])
    meshes = [getattr(param, "device_mesh", None) if by_mesh else None for _, param in ordered]
    alike = grouped(((settings[name], mesh), param) for (name, param), mesh in zip(ordered, meshes, strict=True))
    return [
        {"params": members, "lr": setting.lr, "weight_decay": setting.weight_decay}
        | ({} if flag is None else {flag: not setting.rest})
        for (setting, _), members in alike.items()
    ]
