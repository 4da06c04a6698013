"""Every op, its backends, which one runs here, and why the others do not.

A backend is a choice of execution, never of numbers: all backends of an op compute the same thing. Which one runs is
decided per device and per *case* (the specs of the operands): the first in the order in which they were added,
`reference` last, that does not refuse the case and whose probe, a tiny run compared with `reference`, passes. A GPU is
judged by what it does, not by its version number. For a shape that was measured on this device (`octavo calibrate`) the
fastest one that serves takes over. The choice is cached; `status` shows it with every reason, and a GPU that has to
emulate a case warns once.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from octavo.kernels import calibration
from octavo.numerics.names import nearest

Case = tuple[str, ...]
"""What decides who can serve a call: the text forms of its specs (and the layout of a product)."""

Shape = tuple[int, ...]
"""What decides who is fastest: rows and columns of a matrix, or m, n, k of a product."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation of an op.

    Attributes:
        name: Such as `"triton"`; `"reference"` serves every case on every device.
        run: The implementation; same signature for all backends of the op, and `config`, an index, where it can be
            compiled in several ways.
        refuses: Says why it cannot, or should not, serve a case on a device; None if it can. Cheap: runs no kernel.
    """

    name: str
    run: Callable[..., Any]
    refuses: Callable[[torch.device, Case], str | None] = lambda device, case: None

    def configured(self, config: int | None) -> "Backend":
        """The same backend with one of its configurations; itself for None."""
        return self if config is None else replace(self, run=partial(self.run, config=config))


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operation with its backends.

    Attributes:
        name: As in `torch.ops.octavo`.
        cases: Labelled cases that `status` shows, such as one per recipe.
        probe: Runs `backend` on a tiny input of a case on a device; returns None if it agrees with `reference`, else
            why not. Exceptions count as the reason.
        backends: By name, in order of preference but for `reference`, which is the last resort wherever it stands.
    """

    name: str
    cases: dict[str, Case]
    probe: Callable[[Backend, torch.device, Case], str | None]
    backends: dict[str, Backend] = field(default_factory=dict)
    _chosen: dict[tuple[torch.device, Case], Backend] = field(default_factory=dict)
    _measured: dict[tuple[torch.device, Case, Shape], Backend] = field(default_factory=dict)
    _verdicts: dict[tuple[str, torch.device, Case], str | None] = field(default_factory=dict)
    _forced: list[Backend] = field(default_factory=list)

    def add(self, backend: Backend) -> None:
        """Register a backend, behind those that were added before."""
        assert backend.name not in self.backends
        self.backends[backend.name] = backend

    def choose(self, device: torch.device, case: Case, shape: Shape | None = None) -> Backend:
        """The backend that serves this case on this device; where this shape was measured, the fastest that does."""
        if self._forced:
            return self._forced[-1]
        if shape is not None and device.type == "cuda":
            return self._measured.get((device, case, shape)) or self._fastest(device, case, shape)
        chosen = self._chosen.get((device, case))
        if chosen is None:
            chosen = next(b for b in self._in_order() if self.why_not(b, device, case) is None)
            if _can_probe(device):
                self._chosen[device, case] = chosen
                self._warn_if_emulated(chosen, device, case)
        return chosen

    def _fastest(self, device: torch.device, case: Case, shape: Shape) -> Backend:
        chosen = self.choose(device, case)
        best = calibration.best(device, self.name, case, shape)
        if best is not None and best.backend in self.backends:
            backend = self.backends[best.backend]
            if self.why_not(backend, device, case) is None:
                chosen = backend.configured(best.config)
        if _can_probe(device):
            if len(self._measured) >= MOST_SHAPES:
                self._measured.clear()
            self._measured[device, case, shape] = chosen
        return chosen

    def why_not(self, backend: Backend, device: torch.device, case: Case) -> str | None:
        """Why `backend` does not serve a case on a device, or None if it does. Probes once and remembers."""
        key = (backend.name, device, case)
        if key not in self._verdicts:
            refusal = backend.refuses(device, case)
            if refusal is not None or backend.name == "reference" or not _can_probe(device):
                return refusal
            self._verdicts[key] = self.tried(backend, device, case)
        return self._verdicts[key]

    @contextmanager
    def force(self, name: str) -> Iterator[None]:
        """Run every call inside the block on one backend, whatever `choose` would say: for tests and benchmarks."""
        if name not in self.backends:
            known = ", ".join(self.backends)
            raise ValueError(f"{self.name} has no backend {name!r}{nearest(name, self.backends)}. It has: {known}")
        self._forced.append(self.backends[name])
        try:
            yield
        finally:
            self._forced.pop()

    def _in_order(self) -> list[Backend]:
        return sorted(self.backends.values(), key=lambda backend: backend.name == "reference")

    def tried(self, backend: Backend, device: torch.device, case: Case) -> str | None:
        """What the probe says of a backend, or the exception that it ran into; None where all is well."""
        try:
            with unset_fake_temporarily(), torch.no_grad():
                return self.probe(backend, device, case)
        except torch.OutOfMemoryError:
            raise  # says nothing about the backend, and must not be remembered as if it did
        except Exception as error:  # whatever a driver, compiler or kernel raises is the reason we were looking for
            message = str(error).strip() or "no message"
            return f"{type(error).__name__}: {message.splitlines()[0]}"

    def _warn_if_emulated(self, chosen: Backend, device: torch.device, case: Case) -> None:
        others = [b for b in self._in_order() if b.name != chosen.name]
        if device.type == "cuda" and chosen.name == "reference" and others:
            reasons = "; ".join(f"{b.name}: {self.why_not(b, device, case)}" for b in others)
            text = f"octavo: {self.name} ({' '.join(case)}) is emulated on {device}: right numbers, slow. {reasons}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


MOST_SHAPES = 4096
"""Choices by shape that are remembered; where every batch has its own shape they start anew."""


def _can_probe(device: torch.device) -> bool:
    """A kernel being captured into a CUDA graph cannot be looked at, so nothing is probed or remembered then."""
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, kw_only=True)
class OpStatus:
    """One row of `status`: whether a backend serves one case of an op on a device.

    Attributes:
        op: Op and case, such as `"scaled_mm rowwise"`.
        backend: Backend name.
        serves: Whether it can run here.
        chosen: Whether it is the one that runs.
        reason: Why it does not serve; empty if it does.
    """

    op: str
    backend: str
    serves: bool
    chosen: bool
    reason: str


OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Add an op to the registry."""
    OPS[op.name] = op
    return op


def status(device: torch.device | str) -> list[OpStatus]:
    """What runs each op on a device, and why the other backends do not. Runs a tiny kernel per backend and case."""
    device = torch.device(device)
    rows = []
    for op in OPS.values():
        for label, case in op.cases.items():
            chosen = op.choose(device, case)
            for backend in op._in_order():
                reason = op.why_not(backend, device, case)
                rows.append(
                    OpStatus(
                        op=f"{op.name} {label}",
                        backend=backend.name,
                        serves=reason is None,
                        chosen=backend.name == chosen.name,
                        reason=reason or "",
                    )
                )
    return rows
