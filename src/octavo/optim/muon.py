"""Muon: momentum, orthogonalized, for the hidden matrices of a model; AdamW for its other parameters.

    m = μ m + (1 − μ) g        u = (1 − μ) g + μ m  (Nesterov)        W = W (1 − lr·λ) − lr · scale · orthogonalize(u)

in the order of `torch.optim.Muon`. Under FSDP2 an all-to-all brings each rank whole matrices u, another returns rows.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.kernels.adamw import reference
from octavo.kernels.adamw.reference import HyperParams, ParamState
from octavo.numerics.suggestions import grouped
from octavo.optim.adamw import ADAMW, OWN_KERNELS, AdamW, copy_back
from octavo.optim.sharded import row_group
from octavo.optim.states import Entry, Group, OptimizerSpec, matrix_view
from octavo.runtime.torch_compat import FakeTensor, never_compiled
from octavo.tensor import local_tensor

EPS = 1e-7  # Smallest norm that a matrix is divided by
PRODUCTS = torch.bfloat16  # Dtype of the Newton–Schulz products, and of u between ranks


class Muon(AdamW):
    """Muon (Jordan et al., 2024) with FP8 momentum, and `octavo.AdamW` for groups with `muon=False`.

    A subclass of `octavo.AdamW`: it only adds another update for some groups.

    Args:
        params: Matrices [rows, columns] and stacks of them [E, rows, columns], or groups. Give embeddings, heads,
            norms and biases in groups with `muon=False`.
        lr: Learning rate, a number or a tensor with one element.
        momentum: Decay μ of the momentum.
        weight_decay: Decoupled weight decay.
        nesterov: Orthogonalize a mean of gradient and momentum, instead of the momentum.
        ns_steps: Newton–Schulz iterations.
        adjust_lr_fn: `"original"`: √max(1, rows/columns). `"match_rms_adamw"`: 0.2·√max(rows, columns).
        muon: Whether a group is optimized by Muon; False: by AdamW.
        betas: Of AdamW.
        eps: Of AdamW.
        options: `states`, `master`, `stochastic_rounding`, `nonfinite` and `maximize` of `octavo.AdamW`.

    Raises:
        ValueError: An argument is invalid, a parameter of a Muon group is no matrix, or its shards split rows.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.LayerNorm(256)).bfloat16()
        >>> matrices = [p for p in model.parameters() if p.ndim == 2]
        >>> others = {"params": [p for p in model.parameters() if p.ndim < 2], "muon": False, "lr": 3e-4}
        >>> optimizer = octavo.optim.Muon([{"params": matrices}, others], lr=2e-2)
        >>> model(torch.ones(1, 256, dtype=torch.bfloat16)).square().sum().backward()
        >>> optimizer.step()
    """

    step_allocates = True
    _choices: ClassVar[Mapping[str, Sequence[str | bool | None]]] = {
        **AdamW._choices, "adjust_lr_fn": ("original", "match_rms_adamw"), "nesterov": (True, False),
        "muon": (True, False),
    }  # fmt: skip

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-3, momentum: float = 0.95, weight_decay: float = 0.1, *,
        nesterov: bool = True, ns_steps: int = 5, adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original",
        muon: bool = True, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, **options: Any,
    ) -> None:  # fmt: skip
        self._own = {
            "muon": muon, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, **options)

    @never_compiled(OWN_KERNELS)
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on every parameter that has a gradient, as `octavo.AdamW.step`."""
        matrices = [param for group in self.param_groups if group["muon"] for param in group["params"]]
        if matrices and isinstance(local_tensor(matrices[0]), FakeTensor):  # the planner measures what a step allocates
            for param in matrices:
                orthogonalize(torch.empty(param.shape, dtype=PRODUCTS, device=param.device))
            return None
        return super().step(closure)

    def _check(self, group: Group) -> None:
        super()._check(group)
        if not isinstance(group["ns_steps"], int) or group["ns_steps"] < 1:
            raise ValueError(f"ns_steps must be an integer, at least 1; got {group['ns_steps']!r}")
        for param in group["params"] if group["muon"] else ():
            if param.ndim not in (2, 3):
                raise ValueError(
                    f"Muon orthogonalizes matrices [rows, columns] or [E, rows, columns]; got a parameter of shape "
                    f"{list(param.shape)}: put it into a group with muon=False, which AdamW optimizes"
                )
            row_group(param)  # raises

    def spec(self, group: Group) -> OptimizerSpec:
        """Return what describes the steps of a group's parameters."""
        return MUON if group["muon"] else ADAMW


def update_matrices(optimizer: AdamW, entries: Sequence[Entry]) -> None:
    """Step matrices, of those that some ranks share one for each rank at a time."""
    for ranks, shared in grouped((row_group(entry[1]), entry) for entry in entries).items():
        count = 1 if ranks is None else dist.get_world_size(ranks)
        for start in range(0, len(shared), count):
            part = shared[start : start + count]
            states = [optimizer.next_state(group, param) for group, param in part]
            updates = [
                _momentum(state, hyper, group["momentum"], group["nesterov"]).view(local_tensor(param).shape)
                for (state, hyper), (group, param) in zip(states, part, strict=True)
            ]
            orthogonal = _orthogonalized(updates, part, ranks)
            for (group, param), (state, hyper), update in zip(part, states, orthogonal, strict=True):
                scale = _scale(param.shape, group["adjust_lr_fn"])
                for part_state, rows in state.chunks():
                    master = reference.master_values(part_state).mul_(1 - hyper.lr * hyper.weight_decay)
                    master.add_(matrix_view(update)[rows], alpha=-hyper.lr * scale)
                    reference.write_parameter(part_state, master)
                copy_back(param, state)


def _momentum(state: ParamState, hyper: HyperParams, decay: float, nesterov: bool) -> Tensor:
    """Update the momentum of a matrix [R,C], in place, and return what to orthogonalize."""
    out = torch.empty(state.param.shape, dtype=PRODUCTS, device=state.param.device)
    for part, rows in state.chunks():
        grad, moments = reference.gradient(part, hyper), reference.read_moments(part)
        momentum = moments[0].lerp_(grad, 1 - decay)
        out[rows].copy_(grad.lerp(momentum, decay) if nesterov else momentum)
        reference.write_moments(part, moments)
    return out


def orthogonalize(update: Tensor, steps: int = 5) -> Tensor:
    """Approximate U Vᵀ of matrices U S Vᵀ with Newton–Schulz iterations; singular values end within 0.7 and 1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315  # chosen by Keller Jordan for the steepest slope at 0
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = (x / norm.clamp(min=EPS)).to(x.dtype)
    addmm = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = addmm(x, addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous()


def newton_schulz_flops(shape: Sequence[int], steps: int = 5) -> float:
    """Return the floating point operations of `orthogonalize` for a shape: three products in each iteration."""
    short, long = sorted(shape[-2:])
    return float(steps * math.prod(shape[:-2]) * (4 * short * short * long + 2 * short**3))


def _scale(shape: torch.Size, name: str) -> float:
    rows, columns = shape[-2:]
    return math.sqrt(max(1, rows / columns)) if name == "original" else 0.2 * math.sqrt(max(rows, columns))


def _orthogonalized(updates: list[Tensor], work: list[Entry], ranks: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the local rows of the orthogonalized updates; of sharded matrices rank r orthogonalizes number r."""
    if ranks is None:
        return [orthogonalize(update, group["ns_steps"]) for update, (group, _) in zip(updates, work, strict=True)]
    world, rank = dist.get_world_size(ranks), dist.get_rank(ranks)
    sent = [update.numel() for update in updates] + [0] * (world - len(updates))
    own = work[rank] if rank < len(work) else None
    received = [0] * world
    if own is not None:
        rows, columns = own[1].shape
        piece = -(-rows // world)
        received = [columns * (min(rows, (at + 1) * piece) - min(rows, at * piece)) for at in range(world)]
    whole = _exchange(torch.cat([update.flatten() for update in updates]), sent, received, ranks)
    if own is not None:
        whole = orthogonalize(whole.view(own[1].shape), own[0]["ns_steps"]).flatten()
    pieces = _exchange(whole, received, sent, ranks).split(sent)
    return [piece.view(update.shape) for piece, update in zip(pieces, updates, strict=False)]


def _exchange(values: Tensor, sent: list[int], received: list[int], ranks: dist.ProcessGroup) -> Tensor:
    """Send elements to the other ranks and receive theirs, as bytes."""
    size = values.element_size()
    result = torch.empty(sum(received), dtype=values.dtype, device=values.device)
    dist.all_to_all_single(
        result.view(torch.uint8), values.view(torch.uint8),
        [size * number for number in received], [size * number for number in sent], group=ranks,
    )  # fmt: skip
    return result


MUON = OptimizerSpec(
    name="muon", make=partial(Muon, adjust_lr_fn="match_rms_adamw"), moments={"exp_avg": True}, update=update_matrices,
    settings=("momentum",), matrices=True, traffic=2.0 * PRODUCTS.itemsize, flops=newton_schulz_flops,
)  # fmt: skip
