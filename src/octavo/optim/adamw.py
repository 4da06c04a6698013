"""AdamW in the place of `torch.optim.AdamW`, with half the memory or less.

    states="fp8"           both moments in about 2.1 bytes per parameter instead of 8 (`octavo.kernels.adamw.moments`)
    master="remainder"     an exact float32 master of a bf16 parameter in 2 bytes instead of 4

Neither needs anything of the model: it may be bf16, FP8 (`octavo.convert`) or float32, and the optimizer is all one
changes. States are plain tensors of the parameter's shape, with one row of scales per row, so `state_dict` goes
through `torch.save` and `weights_only=True` loading.

Parameters that FSDP2 shards by rows are stepped where their rows are, to the bits that one process would get, and
their states are sharded as they are (`octavo.optim.sharded`).

Parameters of one dimension (norms and biases), and those with fewer than 64 elements per row, keep float32 moments:
the former are few, and sharded anywhere, the latter's scales would cost more than they save.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.kernels.adamw import GROUP, Hyper, Slot, groups, seed_after, split, step
from octavo.numerics.names import nearest
from octavo.optim.sharded import anywhere, first_row, like, rows_of, rows_only
from octavo.optim.states import (
    as_matrix,
    check_state,
    fitting_group,
    fresh_state,
    from_torch,
    matrix_shape,
    saved_parameters,
)
from octavo.tensor import plain

_APART = 0x632BE5AB
"""Between the seeds of one parameter and the next; seeds are 32 bits."""

_STATES = ("fp8", "fp32")
_MASTERS = ("remainder", "fp32", None)
_NONFINITE = ("raise", "skip", "ignore")


class AdamW(torch.optim.Optimizer):
    """Decoupled-weight-decay Adam (Loshchilov and Hutter, arXiv 1711.05101).

    Args:
        params: Parameters, or groups of them, as for any `torch.optim.Optimizer`.
        lr: Learning rate, a number or a tensor with one element.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        states: `"fp8"`: moments in 8 bits with dynamic range expansion. `"fp32"`: as `torch.optim.AdamW`.
        master: `"remainder"`: bf16 parameters get 16 bits more, which make an exact float32 master. `"fp32"`: float32
            copies of 16-bit parameters. None: the parameters as they are. float32 parameters are their own masters.
        stochastic_rounding: Round FP8 moments, and bf16 parameters without a master, up or down at random so that
            the mean is kept; the same in every run. To nearest, a moving average that changes by less than half a
            step of its 8 bits stands still: after 1000 steps a quadratic's loss is 8 % off, at random 0.7 %
            (`pytest tests/optim/test_convergence.py`).
        nonfinite: What a NaN or Inf in a gradient does: `"raise"` refuses the step, `"skip"` leaves it out and counts
            it (`skipped`), `"ignore"` does not look. In the first two cases nothing is changed. Ranks that share
            sharded parameters decide together.
        maximize: Climb rather than descend.
        amsgrad: Not supported; here so that the arguments of `torch.optim.AdamW` are understood.

    Raises:
        ValueError: For a value that is not one of these, naming the nearest, and for parameters that `master` does
            not fit.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        states: Literal["fp8", "fp32"] = "fp8",
        master: Literal["remainder", "fp32"] | None = "remainder",
        stochastic_rounding: bool = True,
        nonfinite: Literal["raise", "skip", "ignore"] = "raise",
        maximize: bool = False,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise ValueError("amsgrad keeps a third moment, which octavo.AdamW has not; use torch.optim.AdamW")
        self.skipped = 0
        """Steps left out because of a gradient that was not finite."""
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "states": states,
            "master": master,
            "stochastic_rounding": stochastic_rounding,
            "nonfinite": nonfinite,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `torch.optim.Optimizer`; checks the group's values first."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on every parameter that has a gradient.

        Args:
            closure: Computes the loss and the gradients again, as for any optimizer.

        Returns:
            What the closure returned.

        Raises:
            FloatingPointError: Where `nonfinite="raise"` and a gradient is not finite; nothing was changed.
            ValueError: For sparse or complex gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        for _, param in work:
            if param.grad.is_sparse or param.grad.is_complex():
                kind = "sparse" if param.grad.is_sparse else "complex"
                raise ValueError(f"octavo.AdamW takes dense real gradients; one of shape {list(param.shape)} is {kind}")
        if not self._finite(work):
            self.skipped += 1
            return loss
        index = {param: i for i, param in enumerate(p for g in self.param_groups for p in g["params"])}
        slots: dict[torch.device, list[tuple[Slot, Hyper]]] = {}
        copies = []
        for group, param in work:
            state = self.state[param]
            if not state:
                state.update(fresh_state(param, group))
            state["step"] += 1
            count = int(state["step"].item())
            beta1, beta2 = group["betas"]
            hyper = Hyper(
                lr=float(group["lr"]),
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=count,
                maximize=group["maximize"],
            )
            rows = plain(param)
            dense = rows if rows.is_contiguous() else rows.contiguous()
            copies += [] if dense is rows else [(rows, dense)]
            seed = _seed(param, index[param], count) if group["stochastic_rounding"] else None
            local = {name: plain(value) for name, value in state.items()}
            slots.setdefault(rows.device, []).append((_slot(dense, plain(param.grad), local, seed), hyper))
        for some in slots.values():
            step(some)
        for rows, dense in copies:
            rows.copy_(dense)
        return loss

    @torch.no_grad()
    def make_states(self) -> None:
        """Make the states of all parameters that have none, which the first step would do: to know what they take."""
        for group in self.param_groups:
            for param in group["params"]:
                if not self.state[param]:
                    self.state[param].update(fresh_state(param, group))

    @torch.no_grad()
    def set_masters(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Give parameters more exact values than their dtype holds: those of a float32 checkpoint, before training.

        Args:
            masters: Float32 values by parameter of this optimizer; each parameter becomes its value, rounded. Those of
                a sharded parameter are whole, or sharded as it is.

        Raises:
            ValueError: For a parameter that keeps no master (`master=None`), or values of another shape or dtype.
        """
        groups_of = {param: group for group in self.param_groups for param in group["params"]}
        for param, value in masters.items():
            group = groups_of.get(param)
            if group is None or group["master"] is None or param.dtype == torch.float32:
                raise ValueError(
                    f"set_masters takes 16-bit parameters of this optimizer that have a master; got {list(param.shape)}"
                )
            if value.shape != param.shape or value.dtype != torch.float32:
                raise ValueError(
                    f"the master of a parameter {list(param.shape)} is float32 of its shape; got {value.dtype} "
                    f"{list(value.shape)}"
                )
        for param, value in masters.items():
            state = self.state[param]
            if not state:
                state.update(fresh_state(param, groups_of[param]))
            rows = plain(param)
            value = rows_of(param, value).to(rows.device)
            if "master" in state:
                plain(state["master"]).copy_(value)
                rows.copy_(value)
            else:
                upper, remainder = split(value)
                plain(state["remainder"]).copy_(remainder)
                rows.copy_(upper)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, bit for bit; or the state of `torch.optim.AdamW`, converted.

        A state of `torch.optim.AdamW` brings `lr`, `betas`, `eps`, `weight_decay`, `maximize`, the step counts and
        both moments. `states`, `master`, `stochastic_rounding` and `nonfinite` stay those of this optimizer. Moments
        are exact with `states="fp32"` and rounded once with `"fp8"`. Masters begin at the present values of the
        parameters, so load the model first.

        The reverse is not checked by PyTorch: `torch.optim.AdamW.load_state_dict` takes FP8 codes for moments. Only
        states made with `states="fp32"` are meaningful there; masters and remainders are ignored.

        Args:
            state_dict: States that are whole, of which a rank takes its rows, or sharded as the parameters are. To go
                from one number of ranks to another, save and load with `torch.distributed.checkpoint`.

        Raises:
            ValueError: For the state of other parameters, of other `states` or `master`, of other shards or of another
                optimizer (Adam, AdamW with amsgrad); nothing was changed.
        """
        groups, states = self._fitting(state_dict)
        # The base class casts states to the parameter's dtype; these are put in their places afterwards.
        exact = {}
        for param, state in states:
            device = plain(param).device
            local = {name: rows_of(param, value) for name, value in state.items()}
            exact[param] = {
                name: rows.to("cpu", copy=True)
                if name == "step"
                else like(param, rows.to(device, copy=True, memory_format=torch.contiguous_format))
                for name, rows in local.items()
            }
        super().load_state_dict({**state_dict, "param_groups": groups})
        for param, state in exact.items():
            self.state[param] = state

    def _fitting(self, state_dict: dict[str, Any]) -> tuple[list[dict[str, Any]], list[tuple[Tensor, dict[str, Any]]]]:
        """Parameter groups and states of a state_dict, in our form; raises ValueError where they do not fit."""
        saved = saved_parameters(state_dict, [len(group["params"]) for group in self.param_groups])
        groups, states = [], []
        for i, (group, own) in enumerate(zip(state_dict["param_groups"], self.param_groups, strict=True)):
            settings, is_torch = fitting_group(i, group, own, tuple(self.defaults))
            groups.append({**settings, "params": group["params"]})
            _check_group({**settings, "params": own["params"]})
            for index, param in zip(saved[i], own["params"], strict=True):
                state = state_dict["state"].get(index)
                if state:
                    state = from_torch(index, param, state, settings) if is_torch else state
                    check_state(index, param, state, settings)
                    states.append((param, state))
        return groups, states

    def _finite(self, work: list[tuple[dict[str, Any], Tensor]]) -> bool:
        """Whether all gradients that are to be looked at are finite; raises where that is asked for."""
        looked_at = [p for g in self.param_groups if g["nonfinite"] != "ignore" for p in g["params"]]
        if not looked_at:
            return True
        bad = anywhere(_nonfinite([plain(p.grad) if p.grad is not None else None for p in looked_at]), looked_at)
        if not bad.any():
            return True
        if any(group["nonfinite"] == "raise" for group in self.param_groups):
            first = list(looked_at[int(bad.nonzero()[0])].shape)
            raise FloatingPointError(
                f"{int(bad.sum())} gradients hold NaN or Inf, the first of shape {first}; parameters and states are as "
                "before. Lower the learning rate, clip gradients, or leave such steps out with nonfinite='skip'"
            )
        return False


def _nonfinite(grads: list[Tensor | None]) -> Tensor:
    """Which gradients hold NaN or Inf, bool [n] on the CPU; one wait for each device."""
    bad = torch.zeros(len(grads), dtype=torch.bool)
    places: dict[torch.device, dict[int, Tensor]] = {}
    for i, grad in enumerate(grads):
        if grad is not None and grad.numel():
            places.setdefault(grad.device, {})[i] = grad
    for device, here in places.items():
        if device.type == "cpu":  # where norms of bf16 take longer than the rest of the step
            norms = [torch.stack(grad.aminmax()).float().abs().amax() for grad in here.values()]
        else:
            norms = [norm.float() for norm in torch._foreach_norm(list(here.values()), torch.inf)]
        bad[list(here)] = ~torch.stack(norms).isfinite().cpu()
    return bad


def _check_group(group: dict[str, Any]) -> None:
    """Raise ValueError for a parameter group whose values do not fit."""
    for name, known in (("states", _STATES), ("master", _MASTERS), ("nonfinite", _NONFINITE)):
        if group[name] not in known:
            hint = nearest(str(group[name]), [str(value) for value in known])
            raise ValueError(f"{name} is one of {', '.join(map(repr, known))}; got {group[name]!r}{hint}")
    lr, betas = group["lr"], group["betas"]
    numbers = (group["eps"], group["weight_decay"], *betas) if isinstance(betas, Sequence) else (betas,)
    if len(numbers) != 4 or not all(isinstance(n, (Real, Tensor)) for n in (lr, *numbers)):
        raise ValueError(
            "lr, eps and weight_decay are numbers and betas two of them; got "
            f"{[group[name] for name in ('lr', 'eps', 'weight_decay', 'betas')]}"
        )
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr is a number or a tensor with one element; got shape {list(lr.shape)}")
    limits = {"lr": (float(lr), math.inf), "eps": (group["eps"], math.inf)}
    limits |= {f"betas[{i}]": (beta, 1.0) for i, beta in enumerate(betas)}
    limits |= {"weight_decay": (group["weight_decay"], math.inf)}
    for name, (value, end) in limits.items():
        if not 0.0 <= value < end:
            raise ValueError(f"{name} is at least 0{' and below 1' if end == 1 else ''}; got {value}")
    for param in group["params"]:
        if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"octavo.AdamW takes float32, bfloat16 and float16 parameters; got {param.dtype}")
        rows = plain(param)
        if any(size > 1 and stride == 0 for size, stride in zip(rows.shape, rows.stride(), strict=True)):
            raise ValueError(
                f"elements of a parameter {list(param.shape)} share memory, as after `expand`, so they cannot be "
                "stepped one by one; use its contiguous copy (`.contiguous()`), or the tensor it was expanded from"
            )
        if param.dtype == torch.float16 and group["master"] == "remainder":
            raise ValueError(
                "master='remainder' extends bf16 to float32 by 16 bits, which float16 parameters do not allow; "
                "use master='fp32' for them"
            )
        if group["states"] == "fp8" and param.ndim > 1 and not rows_only(param):
            raise ValueError(
                f"FP8 moments have scales along rows, and a parameter {list(param.shape)} is sharded across them, as "
                f"{param.placements}; use states='fp32' for it"
            )


def _seed(param: Tensor, index: int, count: int) -> int:
    """Of a parameter's random bits, which depend on its place among the parameters, its step and the element alone.

    So a resumed run draws the same, and so do ranks that have some rows of it.
    """
    before = first_row(param)
    if param.ndim > 1:
        before *= groups(matrix_shape(plain(param).shape)[1]) * GROUP
    return seed_after(index * _APART + 2 * count, before)


def _slot(dense: Tensor, grad: Tensor, state: dict[str, Tensor], seed: int | None) -> Slot:
    """A contiguous parameter of any shape with its gradient and states, as matrices; of a sharded one, its rows."""
    quantized = "exp_avg_hi" in state
    scales = (
        (state["exp_avg_hi"], state["exp_avg_k"], state["exp_avg_sq_hi"], state["exp_avg_sq_k"]) if quantized else None
    )
    return Slot(
        param=as_matrix(dense),
        grad=as_matrix(grad.contiguous()),
        exp_avg=as_matrix(state["exp_avg"]),
        exp_avg_sq=as_matrix(state["exp_avg_sq"]),
        scales=scales,
        remainder=as_matrix(state["remainder"]) if "remainder" in state else None,
        master=as_matrix(state["master"]) if "master" in state else None,
        seed=seed,
    )
