"""Registry of ops, their backends and the choice between them (docs/architecture.md, "Backends").

The first backend that supports device and *case* (specs of the operands) and passes its probe, `reference` last; for
shapes that `octavo calibrate` measured, the fastest. Choices are cached.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

import torch

from octavo.kernels import calibration, probe_cache
from octavo.kernels.conformance.mismatches import difference, listed
from octavo.numerics.suggestions import nearest
from octavo.runtime.execution_context import is_capturing
from octavo.runtime.extras import lazy_function
from octavo.runtime.stopwatch import timed
from octavo.runtime.torch_compat import unset_fake_temporarily

Case = tuple[str, ...]  # Texts of an op's specs (and the layout of a product), which determine the available backends
Shape = tuple[int, ...]  # Rows and columns of a matrix, or m, n, k of a product, which determine the fastest backend


T = TypeVar("T")  # What an op returns


@dataclass(frozen=True, kw_only=True)
class Backend(Generic[T]):
    name: str  # Such as `"triton"`; `"reference"` supports every case on every device
    # Implementation, of one signature in all backends of the op, plus an index `config` if it has configurations.
    run: Callable[..., T]
    # With the same arguments, returns what runs calls like this one repeatedly (`octavo.kernels.direct`), or None.
    plan: Callable[..., Any] = lambda *call, **options: None
    # Returns why it cannot run a case on a device, or None. Cheap: runs no kernel.
    unsupported_reason: Callable[[torch.device, Case], str | None] = lambda device, case: None
    # Returns configurations and large shapes that the probe runs besides its tiny input.
    trials: Callable[[torch.device, Case, int | None], Sequence[tuple[int, Shape]]] = lambda device, case, config: ()
    emulates: bool = False  # Whether it computes FP8 products without FP8 matrix units
    config: int | None = None  # The only configuration that it runs; None: any

    def configured(self, config: int | None) -> "Backend[T]":
        """Return the backend with one of its configurations; itself for None."""
        if config is None:
            return self
        return replace(
            self, run=partial(self.run, config=config), plan=partial(self.plan, config=config), config=config
        )


Probe = Callable[[Backend[Any], torch.device, Case], str | None]


@dataclass(frozen=True, kw_only=True)
class Op(Generic[T]):
    """An operation with its backends."""

    name: str  # Name in `torch.ops.octavo`
    cases: dict[str, Case]  # Cases that `status` shows, by label
    # Runs a backend on a tiny input of a case on a device; returns None if it agrees with `reference`, else the
    # difference. An exception counts as a failure.
    probe: Probe
    # By name, in order of preference; `reference` is always the last.
    backends: dict[str, Backend[T]] = field(default_factory=dict)
    _chosen: dict[tuple[torch.device, Case], Backend[T]] = field(default_factory=dict)
    _measured: dict[tuple[torch.device, Case, Shape], Backend[T]] = field(default_factory=dict)
    _probe_results: dict[tuple[str, torch.device, Case], str | None] = field(default_factory=dict)
    _forced: list[Backend[T]] = field(default_factory=list)

    def choose(self, device: torch.device, case: Case, shape: Shape | None = None) -> Backend[T]:
        """Return the backend for a case on a device; for a measured shape, the fastest available one."""
        if self._forced:
            return self._forced[-1]
        if shape is not None and device.type == "cuda":
            return self._measured.get((device, case, shape)) or self._fastest(device, case, shape)
        chosen = self._chosen.get((device, case))
        if chosen is None:
            chosen = next(b for b in self._in_order() if self.unavailable_reason(b, device, case) is None)
            if not is_capturing(device):
                self._chosen[device, case] = chosen
                self._warn_if_emulated(chosen, device, case)
        return chosen

    def _fastest(self, device: torch.device, case: Case, shape: Shape) -> Backend[T]:
        chosen = self.choose(device, case)
        best = calibration.best(device, self.name, case, shape)
        if best is not None and best.backend in self.backends:
            backend = self.backends[best.backend]
            if self.unavailable_reason(backend, device, case) is None:
                chosen = backend.configured(best.config)
        if not is_capturing(device):
            if len(self._measured) >= MAX_CACHED_SHAPES:
                self._measured.clear()
                CHOICES.changes += 1
            self._measured[device, case, shape] = chosen
        return chosen

    def unavailable_reason(self, backend: Backend[T], device: torch.device, case: Case) -> str | None:
        """Return why a backend is unavailable for a case on a device, or None. Probes once: `probe_cache`."""
        key = (backend.name, device, case)
        if key not in self._probe_results:
            reason = backend.unsupported_reason(device, case)
            if reason is not None or backend.name == "reference" or is_capturing(device):  # probes cannot run
                return reason
            stored = (self.name, backend.name, *case)
            if not probe_cache.has_passed(device, stored):
                with timed("kernel probes"):
                    reason = self.run_probe(backend, device, case)
                if reason is None:
                    probe_cache.add(device, stored)
            self._probe_results[key] = reason
        return self._probe_results[key]

    def pin(self, name: str, device: torch.device, case: Case) -> None:
        """Run a case on one backend from now on, for instance because ranks choose different ones."""
        self._chosen[device, case] = self.backends[name]
        CHOICES.changes += 1

    @contextmanager
    def force(self, name: str) -> Iterator[None]:
        """Run every call inside the block on one backend, for tests and benchmarks."""
        if name not in self.backends:
            names = ", ".join(self.backends)
            raise ValueError(f"{self.name} has no backend {name!r}{nearest(name, self.backends)}. It has: {names}")
        self._forced.append(self.backends[name])
        CHOICES.changes += 1
        try:
            yield
        finally:
            self._forced.pop()
            CHOICES.changes += 1

    def _in_order(self) -> list[Backend[T]]:
        return sorted(self.backends.values(), key=lambda backend: backend.name == "reference")

    def run_probe(self, backend: Backend[T], device: torch.device, case: Case) -> str | None:
        """Probe a backend; return the difference from `reference` or the exception as text, or None if it agrees."""
        try:
            with unset_fake_temporarily(), torch.no_grad():
                return self.probe(backend, device, case)
        except torch.OutOfMemoryError:
            raise  # unrelated to the backend, so not cached
        except Exception as error:  # anything that a driver, compiler or kernel raises is a reason
            message = str(error).strip() or "no message"
            return f"{type(error).__name__}: {message.splitlines()[0]}"

    def _warn_if_emulated(self, chosen: Backend[T], device: torch.device, case: Case) -> None:
        *others, _ = self._in_order()
        if device.type == "cuda" and chosen.name == "reference" and others:
            reasons = "; ".join(f"{b.name}: {self.unavailable_reason(b, device, case)}" for b in others)
            text = f"octavo: {self.name} ({' '.join(case)}) is emulated on {device}: exact numbers, slow. {reasons}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


class _Choices:
    changes = 0


CHOICES = _Choices()  # Counts changes to what `Op.choose` returned before, for plans that hold several choices


def triton_unsupported(device: torch.device, case: Case) -> str | None:
    """Return why Octavo's Triton kernels cannot run on a device, whatever the case, or None. Compiles nothing."""
    if device.type != "cuda":
        return f"Triton compiles for GPUs; this device is {device.type!r}"
    if (reason := unsupported_gpu(device)) is not None:
        return reason
    return None if find_spec("triton") else "Triton is not installed"


def triton_backend(function: str, plan: str | None = None, **options: Any) -> Backend[Any]:
    """Return the backend of a function such as `"quantize.triton:quantize"`; importing octavo imports no Triton."""
    options.setdefault("unsupported_reason", triton_unsupported)
    if plan is not None:
        options["plan"] = lazy_function(f"octavo.kernels.{function.partition(':')[0]}:{plan}")
    return Backend(name="triton", run=lazy_function(f"octavo.kernels.{function}"), **options)


GPU_TYPES = {"cuda"}
"""Device types whose tensors take the GPU path. `benchmarks.host` adds "cpu", to measure that path without a GPU."""


def unsupported_gpu(device: torch.device) -> str | None:
    """Return why a GPU cannot convert to FP8, or None."""
    if torch.version.hip is not None:
        return f"the kernels are for NVIDIA GPUs; this torch is built for ROCm {torch.version.hip}"
    capability = torch.cuda.get_device_capability(device)
    if capability < FIRST_CAPABILITY:
        return "FP8 needs sm_89 (Ada) or later; this device is sm_{}{}".format(*capability)
    return None


FIRST_CAPABILITY = (8, 9)  # The first compute capability with FP8
MAX_CACHED_SHAPES = 4096  # Cached choices by shape; the cache is cleared beyond that


@dataclass(frozen=True)
class OpStatus:
    """One row of `status`: one backend of one case of an op on a device."""

    op: str  # Op and case, such as `"scaled_mm rowwise"`
    backend: str  # Backend name
    serves: bool  # Whether it is available
    chosen: bool  # Whether the registry chooses it
    reason: str  # Why it is unavailable; empty if it is available


OPS: dict[str, Op[Any]] = {}


def register(
    name: str, cases: dict[str, Case], probe: Probe, *backends: Backend[Any], reference: Callable[..., T],
    emulates: bool = False,
) -> Op[T]:  # fmt: skip
    """Add an op with its backends, in order of preference, and its reference."""
    last = Backend(name="reference", run=reference, emulates=emulates)
    op = Op[T](name=name, cases=cases, probe=probe, backends={b.name: b for b in (*backends, last)})
    OPS[name] = op
    return op


def same_bytes(
    reference: Callable[..., Any], inputs: Callable[[torch.device, Case], Iterable[tuple[Any, ...]]],
    names: Sequence[str] = (),
) -> Probe:  # fmt: skip
    """Return a probe that compares a backend with `reference` byte for byte on some inputs; `names`: of outputs."""

    def probe(backend: Backend[Any], device: torch.device, case: Case) -> str | None:
        for call in inputs(device, case):
            if mismatch := difference(listed(reference(*call)), listed(backend.run(*call)), names):
                # The dtype of the result where a call names it, or that of the input.
                dtype = next((value for value in call if isinstance(value, torch.dtype)), call[0].dtype)
                return f"{dtype}: {mismatch}"
        return None

    return probe


def status(device: torch.device | str) -> list[OpStatus]:
    """Return the status of all backends of all ops on a device. Probes every backend and case."""
    device = torch.device(device)
    rows = []
    for op in OPS.values():
        for label, case in op.cases.items():
            chosen = op.choose(device, case)
            for backend in op._in_order():
                reason, is_chosen = op.unavailable_reason(backend, device, case), backend.name == chosen.name
                rows.append(OpStatus(f"{op.name} {label}", backend.name, reason is None, is_chosen, reason or ""))
    return rows
