"""AdamW in fp32, whatever the parameters are.

16-bit parameters get fp32 master copies: gradients are added up in fp32 over the micro-batches, the step is taken
on the masters, and the parameters are rounded from them. fp32 parameters are their own masters. Without masters
(`master = false`) the step is taken on the 16-bit parameters as they are, with 16-bit moments: updates below half a
unit in the last place are lost.

Decoupled weight decay goes to parameters of two or more dimensions; norms and biases get none.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from octavo.train.config import Optim


class MasterAdamW:
    """`torch.optim.AdamW` over the trainable parameters of a model, or over fp32 masters of the 16-bit ones.

    `exact`: fp32 values for masters, by name, where more is known than the parameters hold.
    """

    def __init__(
        self, model: nn.Module, optim: Optim, *, master: bool, exact: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self._names, self._params, self._masters = [], [], []
        for name, param in model.named_parameters():
            if param.requires_grad:
                own = not master or param.dtype == torch.float32
                self._names.append(name)
                self._params.append(param)
                value = (exact or {}).get(name, param.detach())
                self._masters.append(param if own else nn.Parameter(value.to(param.device, torch.float32)))
        self._clip = optim.clip
        decayed = [master for master in self._masters if master.dim() >= 2]
        plain = [master for master in self._masters if master.dim() < 2]
        groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True
        )

    @torch.no_grad()
    def accumulate(self) -> None:
        """Adds the gradients of a micro-batch to the masters' in fp32, and frees them. Call after each backward."""
        for param, master in zip(self._params, self._masters, strict=True):
            if param is master or param.grad is None:
                continue
            if master.grad is None:
                master.grad = param.grad.float()
            else:
                master.grad += param.grad
            param.grad = None

    @torch.no_grad()
    def gradient_norm(self, loss_scale: float) -> torch.Tensor:
        """Divides the gradients by `loss_scale`; returns their global L2 norm, not finite if any of them is not."""
        grads = self._grads()
        if loss_scale != 1.0:
            torch._foreach_div_(grads, loss_scale)
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)))

    @torch.no_grad()
    def step(self, lr: float, norm: torch.Tensor) -> None:
        """Clips the gradients, whose global norm is `norm`, takes a step and rounds the parameters from the masters."""
        if self._clip:
            torch._foreach_mul_(self._grads(), torch.clamp(self._clip / (norm + 1e-6), max=1.0))
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        for param, master in zip(self._params, self._masters, strict=True):
            if param is not master:
                param.copy_(master)

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for param in (*self._params, *self._masters):
            param.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Moments, step counts and masters: plain tensors, for `torch.load(weights_only=True)`."""
        rows = zip(self._names, self._params, self._masters, strict=True)
        masters = {name: master.detach() for name, param, master in rows if param is not master}
        return {"adamw": self._adamw.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned for the same model."""
        self._adamw.load_state_dict(state["adamw"])
        for name, param, master in zip(self._names, self._params, self._masters, strict=True):
            if param is not master:
                master.copy_(state["masters"][name])

    def _grads(self) -> list[torch.Tensor]:
        return [master.grad for master in self._masters if master.grad is not None]
