"""AdamW as a replacement for `torch.optim.AdamW` with half the memory or less.

Parameters may be written between steps: the next one starts from what was written, within half a step of bf16 beside
old remainders. One-dimensional parameters, and those with fewer than 64 elements per row, have float32 moments.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from octavo.kernels.adamw import step
from octavo.kernels.adamw.reference import GROUP, HyperParams, ParamState, groups, seed_after, split
from octavo.numerics.suggestions import check_choice, grouped
from octavo.optim.sharded import any_rank, first_row, local_rows, placements_of, splits_groups, sum_gradient
from octavo.optim.states import (
    Entry,
    Group,
    Optimizer,
    OptimizerSpec,
    as_bytes,
    check_state,
    converted_group,
    copy_rows,
    from_bytes,
    from_torch,
    hyper_params,
    matrix_shape,
    param_state,
    saved_parameters,
    text_of,
)
from octavo.runtime.execution_context import is_capturing
from octavo.runtime.torch_compat import never_compiled
from octavo.tensor import local_tensor

OWN_KERNELS = "octavo: a step has kernels of its own and runs eagerly; call it outside of the graph, or drop fullgraph"
_SEED_STRIDE = 0x632BE5AB  # Difference between the seeds of consecutive parameters; seeds have 32 bits


class AdamW(Optimizer):
    """Decoupled-weight-decay Adam (Loshchilov and Hutter, arXiv 1711.05101).

    Args:
        params: Parameters, or groups of them, as for any `torch.optim.Optimizer`.
        lr: Learning rate, a number or a tensor with one element.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        states: `"fp8"`: moments in 8 bits with dynamic range expansion. `"fp32"`: as `torch.optim.AdamW`.
        master: `"remainder"`: 16 extra bits make an exact float32 master of each bf16 parameter. `"fp32"`: float32
            copies of 16-bit parameters. None: no masters. float32 parameters are their own masters.
        stochastic_rounding: Round FP8 moments, and bf16 parameters without a master, stochastically, with the same
            random bits in every run. Rounded to nearest, a moving average that changes by less than half a step stalls.
        nonfinite: With NaN or Inf in gradients or moments `"raise"` raises an error, `"skip"` skips the step and counts
            it (`skipped`): parameters and states are unchanged, and ranks that share them decide together. `"ignore"`
            does not check. Finite gradients saturate at ±2⁶².
        maximize: Ascend instead of descend.
        amsgrad: Not supported; accepted for compatibility with `torch.optim.AdamW`.

    Raises:
        ValueError: An argument is invalid (with the closest match), or a parameter does not support `master`.

    Examples:
        >>> layer = torch.nn.Linear(256, 256, dtype=torch.bfloat16)
        >>> optimizer = octavo.AdamW(layer.parameters(), lr=3e-4)
        >>> layer(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
    """

    step_allocates = False
    _factor = 1.0
    _own: Mapping[str, Any] = {}  # Defaults of a subclass
    _numbers: Mapping[Tensor, int]  # Of the parameters, from 0
    _choices: ClassVar[Mapping[str, Sequence[str | bool | None]]] = {
        "states": ("fp8", "fp32"), "master": ("remainder", "fp32", None), "nonfinite": ("raise", "skip", "ignore"),
        "stochastic_rounding": (True, False), "maximize": (True, False),
    }  # fmt: skip

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2, *, states: Literal["fp8", "fp32"] = "fp8",
        master: Literal["remainder", "fp32"] | None = "remainder", stochastic_rounding: bool = True,
        nonfinite: Literal["raise", "skip", "ignore"] = "raise", maximize: bool = False, amsgrad: bool = False,
    ) -> None:  # fmt: skip
        if amsgrad:
            raise ValueError("octavo.AdamW does not support amsgrad; use torch.optim.AdamW")
        self.skipped = 0
        """Steps skipped because of non-finite gradients."""
        super().__init__(params, {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "states": states, "master": master,
            "stochastic_rounding": stochastic_rounding, "nonfinite": nonfinite, "maximize": maximize, **self._own,
        })  # fmt: skip

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group as `torch.optim.Optimizer` does, after checking its values."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @never_compiled(OWN_KERNELS)
    def step_scaled(self, factor: float) -> None:
        """Take a step with all gradients multiplied by a number, as clipping does, without a pass that multiplies them.

        The gradients stay as they are. Errors are those of `step`, and ValueError for a factor that is not finite.

        Examples:
            >>> layer = torch.nn.Linear(64, 64)
            >>> optimizer = octavo.AdamW(layer.parameters())
            >>> layer(torch.ones(1, 64)).sum().backward()
            >>> norm = torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()])
            >>> optimizer.step_scaled(min(1.0, 1.0 / float(norm)))
        """
        self._factor = float(factor)
        try:
            self.step()
        finally:
            self._factor = 1.0

    @never_compiled(OWN_KERNELS)
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on every parameter that has a gradient.

        Returns the result of the closure, which recomputes the loss and the gradients as for any optimizer.

        Raises:
            FloatingPointError: A gradient or moment is not finite and `nonfinite="raise"`; nothing is changed.
            ValueError: A gradient is sparse or complex, or a learning rate is not finite.
            RuntimeError: While a CUDA graph is captured, whose replays would repeat one step count and learning rate.
        """
        loss = None
        if any(is_capturing(group["params"][0].device) for group in self.param_groups if group["params"]):
            raise RuntimeError(
                "octavo: an optimizer's step cannot be captured into a CUDA graph: call it after each replay"
            )
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        for _, param in work:
            if param.grad.is_sparse or param.grad.is_complex():
                kind = "sparse" if param.grad.is_sparse else "complex"
                raise ValueError(f"octavo.AdamW takes dense real gradients; one of shape {list(param.shape)} is {kind}")
            sum_gradient(param)
        for group in self.param_groups:
            if not math.isfinite(float(group["lr"])):
                raise ValueError(f"lr must be finite; got {float(group['lr'])}. Check the learning rate's schedule")
        if not self._finite():
            self.skipped += 1
            return loss
        if not math.isfinite(self._factor):
            raise ValueError(f"step_scaled takes a finite factor; got {self._factor}")
        self._numbers = {param: i for i, param in enumerate(p for g in self.param_groups for p in g["params"])}
        for entries in grouped((self.spec(entry[0]).name, entry) for entry in work).values():
            (self.spec(entries[0][0]).update or update_rows)(self, entries)
        return loss

    def spec(self, group: Group) -> OptimizerSpec:
        """Return what describes the steps of a group's parameters."""
        return ADAMW

    def next_state(self, group: Group, param: Tensor) -> tuple[ParamState, HyperParams]:
        """Count a step of a parameter; return its local rows with its states, made if missing, and its numbers."""
        state, moments = self._state_of(param, group), self.spec(group).moments
        state["step"] += 1
        hyper = hyper_params(group, state["step"], self._factor)
        seed = _seed(param, self._numbers[param], hyper.step) if group["stochastic_rounding"] else None
        return param_state(param, local_tensor(param).contiguous(), state, moments, seed), hyper

    def _check(self, group: Group) -> None:
        for name, choices in self._choices.items():
            check_choice(name, group[name], choices)
        betas = group["betas"]
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise ValueError(f"betas must be two numbers; got {betas!r}")
        below_one = {"betas[0]": betas[0], "betas[1]": betas[1], "momentum": group.get("momentum", 0.0)}
        limited = {name: group[name] for name in ("lr", "eps", "weight_decay")} | below_one
        for name, value in limited.items():
            is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
            if not (is_number and 0.0 <= float(value) < (1.0 if name in below_one else math.inf)):
                limit = "below 1" if name in below_one else "finite"
                raise ValueError(f"{name} must be a number, at least 0 and {limit}; got {value!r}")
        for param in group["params"]:
            self._check_param(param, group)

    def _check_param(self, param: Tensor, group: Group) -> None:
        if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"octavo.AdamW takes float32, bfloat16 and float16 parameters; got {param.dtype}")
        rows = local_tensor(param)
        if any(size > 1 and stride == 0 for size, stride in zip(rows.shape, rows.stride(), strict=True)):
            raise ValueError(
                f"elements of a parameter {list(param.shape)} share memory, as after `expand`, so they cannot be "
                "updated separately; use a contiguous copy (`.contiguous()`) or the tensor before `expand`"
            )
        if param.dtype == torch.float16 and group["master"] == "remainder":
            raise ValueError("master='remainder' does not support float16 parameters; use master='fp32' for them")
        if group["states"] == "fp8" and param.ndim > 1 and splits_groups(param, GROUP):
            raise ValueError(
                f"FP8 moments have scales for {GROUP} columns, and shards of a parameter {list(param.shape)} placed as "
                f"{placements_of(param)} end within them; use states='fp32' for it"
            )

    @torch.no_grad()
    def make_states(self) -> None:
        """Allocate missing states of all parameters before the first step, to measure their memory."""
        for group in self.param_groups:
            for param in group["params"]:
                self._state_of(param, group)

    def _state_of(self, param: Tensor, group: Group) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[param]
        if not state:
            state.update(self.spec(group).initial_state(param, group))
        return state

    @torch.no_grad()
    def set_masters(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Set exact float32 masters, for example from a float32 checkpoint, before training.

        Args:
            masters: Float32 values by parameter of this optimizer; parameters become the rounded values. Values of a
                sharded parameter may be whole or sharded like it.

        Raises:
            ValueError: A parameter has no master (`master=None`), or a value has another shape or dtype.
        """
        groups_of = {param: group for group in self.param_groups for param in group["params"]}
        for param, value in masters.items():
            shape, group, got = list(param.shape), groups_of.get(param), text_of(value)
            if group is None or group["master"] is None or param.dtype == torch.float32:
                raise ValueError(f"set_masters takes 16-bit parameters of this optimizer with a master; got {shape}")
            if got != f"{torch.float32} {shape}":
                raise ValueError(f"the master of a parameter {shape} must be float32 of its shape; got {got}")
        for param, value in masters.items():
            state, rows = self._state_of(param, groups_of[param]), local_tensor(param)
            exact = local_rows(param, value).to(rows.device)
            upper, rest = (exact, exact) if "master" in state else split(exact)
            rows.copy_(upper)
            local_tensor(state["master" if "master" in state else "remainder"]).copy_(rest)

    def state_dict(self) -> dict[str, Any]:
        """Return the states and groups as any `torch.optim.Optimizer` does.

        Sharded states that are not float32 or uint8 are bytes [..., item size] that share their memory, so that
        `torch.distributed.checkpoint` can gather, broadcast and load them over any process group.
        """
        state_dict: dict[str, Any] = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        states = {
            index: {name: as_bytes(params[index], value) for name, value in state.items()}
            for index, state in state_dict["state"].items()
        }
        return state_dict | {"state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` bit for bit, or convert the state of `torch.optim.AdamW`.

        `states`, `master`, `stochastic_rounding` and `nonfinite` remain those of this optimizer. Masters start at the
        current values of the parameters, so load the model first. The reverse works with `states="fp32"`.

        Args:
            state_dict: Whole states, of which a rank takes its rows, or states sharded like the parameters. To change
                the number of ranks, save and load with `torch.distributed.checkpoint`.

        Raises:
            ValueError: The state is of other parameters, of other `states` or `master`, of other shards or of another
                optimizer (Adam, AdamW with amsgrad); nothing is changed.
        """
        groups, states = self._converted(state_dict)
        # Without states, which the base class would cast to the parameters' dtype.
        super().load_state_dict({**state_dict, "state": {}, "param_groups": groups})
        for group in self.param_groups:
            for param in filter(states.__contains__, group["params"]):
                copy_rows(self._state_of(param, group), states[param])

    def _converted(self, state_dict: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[Tensor, dict[str, Any]]]:
        """Convert groups and states of a state_dict to this optimizer's layout, or raise ValueError."""
        saved = saved_parameters(state_dict, [len(group["params"]) for group in self.param_groups])
        groups: list[dict[str, Any]] = []
        states: dict[Tensor, dict[str, Any]] = {}
        for i, (group, own) in enumerate(zip(state_dict["param_groups"], self.param_groups, strict=True)):
            names = tuple(name for name in self.defaults if name in own)  # torch adds a default when it loads a state
            settings, is_torch = converted_group(i, group, own, names, self.spec(own))
            spec = self.spec(settings)
            groups.append({**settings, "params": group["params"]})
            self._check({**settings, "params": own["params"]})
            for index, param in zip(saved[i], own["params"], strict=True):
                state = state_dict["state"].get(index)
                if state and is_torch:
                    state = from_torch(index, param, state, settings, spec)
                elif state:
                    dtypes = {name: dtype for name, (_, dtype) in spec.layout(param, settings).items()}
                    state = {n: from_bytes(param, v, dtypes[n]) if n in dtypes else v for n, v in state.items()}
                if state:
                    check_state(index, param, state, settings, spec)
                    states[param] = state
        return groups, states

    def _finite(self) -> bool:
        """Whether what the step reads is finite; raises FloatingPointError with `nonfinite="raise"`."""
        checked = {p: g for g in self.param_groups if g["nonfinite"] != "ignore" for p in g["params"]}
        # Finite gradients and moments make a finite update. FP8 moments are finite if the maxima of their groups are.
        read: list[list[Tensor]] = []  # what a step of a parameter reads beside its master
        for param, group in checked.items():
            state = self.state.get(param, {})
            moments = [state.get(f"{name}_hi", state.get(name)) for name in self.spec(group).moments]
            read.append([local_tensor(t) for t in (param.grad, *moments) if t is not None and param.grad is not None])
        bad = any_rank(_nonfinite(read), checked)
        if bad.any() and any(group["nonfinite"] == "raise" for group in self.param_groups):
            first = list([*checked][int(bad.nonzero()[0])].shape)
            raise FloatingPointError(
                f"the gradients or moments of {int(bad.sum())} parameters contain NaN or Inf, the first of shape "
                f"{first}; parameters and states are unchanged. Lower the learning rate, clip gradients, or skip such "
                "steps with nonfinite='skip'"
            )
        return not bad.any()


def _nonfinite(tensors: list[list[Tensor]]) -> Tensor:
    """Return which lists have a tensor with NaN or Inf, bool [n] on the CPU; synchronizes once per device."""
    bad = torch.zeros(len(tensors), dtype=torch.bool, device="cpu")
    numbered = ((i, tensor) for i, members in enumerate(tensors) for tensor in members if tensor.numel())
    for device, entries in grouped((entry[1].device, entry) for entry in numbered).items():
        if device.type == "cpu":  # norms of bf16 take longer there than the rest of the step
            norms = [torch.stack(tensor.aminmax()).float().abs().amax() for _, tensor in entries]
        else:
            norms = [norm.float() for norm in torch._foreach_norm([tensor for _, tensor in entries], torch.inf)]
        infinite = (~torch.stack(norms).isfinite()).tolist()
        bad[[i for (i, _), flag in zip(entries, infinite, strict=True) if flag]] = True
    return bad


def _seed(param: Tensor, index: int, count: int) -> int:
    """Return the seed of a parameter's random bits, which depend on its index, the step and the element only."""
    # So a resumed run has the same random bits, and so do ranks with some rows of the parameter.
    before = first_row(param)
    if param.ndim > 1:
        before *= groups(matrix_shape(local_tensor(param).shape)[1]) * GROUP
    return seed_after(index * _SEED_STRIDE + 2 * count, before)


def update_rows(optimizer: AdamW, entries: Sequence[Entry]) -> None:
    """Step parameters of one spec, with finite gradients, by the spec's `step` on each device."""
    step = optimizer.spec(entries[0][0]).step
    assert step is not None
    states = [optimizer.next_state(group, param) for group, param in entries]
    for work in grouped((entry[0].param.device, entry) for entry in states).values():
        step(work)
    for (_, param), (state, _) in zip(entries, states, strict=True):
        copy_back(param, state)


def copy_back(param: Tensor, state: ParamState) -> None:
    """Copy the updated rows to a parameter, if its own are not contiguous."""
    rows = local_tensor(param)
    if not rows.is_contiguous():
        rows.copy_(state.param.view(rows.shape))


ADAMW = OptimizerSpec(
    name="adamw", make=AdamW, moments={"exp_avg": True, "exp_avg_sq": False}, step=step, fused=torch.optim.AdamW,
)  # fmt: skip
