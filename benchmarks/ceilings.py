"""What this device itself can do, measured before anything else: copy bandwidth and matrix rates.

Every percentage in the results is a share of these, not of a data sheet.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.session import Session

COPY_BYTES = 2 * 2**30
SIDE = 8192


def measure(session: Session) -> dict[str, Any]:
    """Copy bandwidth in TB/s (bytes read and written) and TFLOP/s of 8192³ products; all None in a rehearsal."""
    if "ceilings" in session.facts:
        known: dict[str, Any] = session.facts["ceilings"]
        return known
    size, side = (2**12, 32) if session.tiny else (COPY_BYTES, SIDE)
    rates: dict[str, Any] = {"copy_bytes": size, "side": side}
    rates["copy_tbs"] = _rate(session, _copying(size, session.device), 2 * size)
    a, b = (torch.randn(side, side, device=session.device, dtype=torch.bfloat16) for _ in range(2))
    operations = 2 * side**3
    rates["bf16_tflops"] = _rate(session, lambda: a @ b.t(), operations)
    for name, fast in (("fp8_tflops", True), ("fp8_exact_tflops", False)):
        rates[name] = None
        if session.gpu:
            rates[name] = _rate(session, fp8_product(a, b, fast_accum=fast), operations)
    session.facts["ceilings"] = rates
    session.save()
    print("ceilings: " + ", ".join(f"{key} {value}" for key, value in rates.items()), flush=True)
    return rates


def fp8_product(a: Tensor, b: Tensor, *, fast_accum: bool) -> Any:
    """A·Bᵀ of two matrices cast to E4M3, as PyTorch's tensorwise product (cuBLASLt) runs it: the reference figure."""
    one = torch.ones((), device=a.device)
    left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    return lambda: torch._scaled_mm(
        left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast_accum
    )


def _copying(size: int, device: torch.device) -> Any:
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _rate(session: Session, run: Any, amount: float) -> float | None:
    """Amount (bytes or operations) per second, in units of 10¹²."""
    timing = session.clock.measure([run], wall=False)
    return None if timing.kernel_ms is None else round(amount / timing.kernel_ms / 1e9, 3)
