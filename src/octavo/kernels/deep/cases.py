"""Which ops, cases and configurations there are to compare, and what their inputs are."""

from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.deep.compare import Check, Inputs
from octavo.kernels.deep.draw import Draw
from octavo.numerics.error import sqnr
from octavo.numerics.spec import FULL, TENSOR, QuantSpec
from octavo.tensor import ScaledTensor


def unavailable(device: torch.device) -> str | None:
    """Why the kernels cannot be compared on this device, and what to do; None where they can."""
    if not find_spec("triton"):
        return "Triton is not installed, so there are no kernels to compare: pip install triton (Linux), then try again"
    from octavo.kernels.launch import INTERPRETED

    if device.type == "cuda" or INTERPRETED:
        return None
    return (
        f"Triton's kernels run on GPUs and this device is {str(device)!r}: there is nothing to compare. Run this on a "
        "machine with an NVIDIA GPU of compute capability 8.9 or later; or set TRITON_INTERPRET=1 to compare a small "
        "set in Triton's interpreter, which finds mistakes of the kernels but none of the compiler"
    )


def checks(device: torch.device, only: str = "") -> list[Check]:
    """Every case of every op that has Triton kernels for a device; those whose "op case" contains `only`."""
    found = [
        *_quantizers(), *_products(device), *_norms(), *_norm_gradients(), *_glus(), *_glu_gradients(),
        *_dequantizers(), *_optimizers(),
    ]  # fmt: skip
    wanted = [check for check in found if only in f"{check.op} {check.case}"]
    if not wanted:
        raise ValueError(f"no op and case contains {only!r}; ops are {', '.join(sorted({c.op for c in found}))}")
    return wanted


def _quantizers() -> Iterator[Check]:
    from octavo.kernels.quantize import reference, triton

    def factor(draw: Draw, kind: str, rows: int, columns: int) -> Tensor | None:
        shapes = {"rows": (rows, 1), "columns": (1, columns)}
        return draw.positive(*shapes[kind]) if kind != "none" else None

    def of_one_form(task: Any, case: str) -> Check:
        spec = task.form.spec

        def inputs(draw: Draw) -> Inputs:
            x = draw.matrix()
            amax = draw.positive(*spec.granularity.scale_shape(tuple(x.shape)))
            scale = reference.scale_of(amax, spec)[0].to(spec.scale_dtype)
            known = {"nothing": (None, None), "amax": (amax, None), "scale": (None, scale)}[task.given]
            return x, spec, factor(draw, task.form.fold, *x.shape), *known, task.order

        configs = tuple(range(len(triton.tiles(task))))
        return Check(
            op="quantize", case=case, configs=configs, draw=inputs, expected=reference.quantize, actual=triton.quantize
        )

    def of_two_forms(task: Any, case: str) -> Check:
        def inputs(draw: Draw) -> Inputs:
            x = draw.matrix()
            folds = [factor(draw, form.fold, *x.shape) for form in (task.form, task.second)]
            return x, task.form.spec, folds[0], task.second.spec, folds[1]

        return Check(
            op="quantize_pair", case=case, configs=tuple(range(len(triton.tiles(task)))), draw=inputs,
            expected=reference.quantize_pair, actual=triton.quantize_pair,
        )  # fmt: skip

    for task, case in triton.tasks().items():
        yield of_one_form(task, case) if task.second is None else of_two_forms(task, case)


def _products(device: torch.device) -> Iterator[Check]:
    from octavo.kernels.gemm import SCALED_MM, triton
    from octavo.kernels.gemm.operands import UNIT, blocks_of

    target = triton.target_for(device)
    for case in dict.fromkeys(SCALED_MM.cases.values()):
        two_e5m2 = all(text.startswith("e5m2") for text in case[:2])
        if two_e5m2 or not triton.serves(*blocks_of(case)):
            continue
        blocked = blocks_of(case)[0].columns != FULL
        for fast in (True, False) if target.short_sums and not blocked else (False,):
            for dtype in (torch.bfloat16, torch.float32):
                configs = triton.configurations(target, fast, blocked, dtype.itemsize)
                yield _product(case, fast, dtype, configs, UNIT)


def _product(case: tuple[str, ...], fast: bool, dtype: torch.dtype, configs: tuple[int, ...], unit: str) -> Check:
    from octavo.kernels.gemm import reference, triton

    a_text, b_text, layout = case

    def inputs(draw: Draw) -> Inputs:
        m, n = draw.side(), draw.side()
        k = min(draw.side(), 1024)  # sums of so many products are exact in every accumulator
        bias = draw.normal(n).bfloat16() if draw.choice.random() < 0.5 else None
        draw.notes.append(f"M {m} N {n} K {k}{' bias' if bias is not None else ''}")
        a = _operand(draw, a_text, (k, m) if layout[0] == "t" else (m, k), unit)
        b = _operand(draw, b_text, (n, k) if layout[1] == "t" else (k, n), unit)
        return a, b, layout, dtype, bias, fast

    def expected(*operands: Any) -> list[Tensor]:
        return [reference.scaled_mm(*operands) + 0.0]  # -0.0 becomes 0.0

    def actual(*operands: Any) -> list[Tensor]:
        return [triton.scaled_mm(*operands) + 0.0]

    label = f"{' '.join(case)} {'fast' if fast else 'promoted'} {str(dtype).removeprefix('torch.')}"
    return Check(op="scaled_mm", case=label, configs=configs, draw=inputs, expected=expected, actual=actual)


def _operand(draw: Draw, text: str, shape: tuple[int, int], unit: str) -> ScaledTensor:
    """Small integers with scales: any where they multiply the sum, powers of two where they multiply inside it."""
    spec = QuantSpec.parse("e4m3/tensor" if text == unit else text)
    values = draw.integers(-2, 2, shape)
    data = values.float().to(spec.format.dtype)
    if draw.choice.random() < 0.5:
        data = data.t().contiguous().t()
        draw.notes.append("column-major")
    if text == unit:
        return ScaledTensor(data, None, spec)
    scales = spec.granularity.scale_shape(shape)
    outside = FULL in spec.granularity
    scale = draw.positive(*scales) if outside else 2.0 ** draw.integers(-1, 1, scales)
    return ScaledTensor(data, scale.to(spec.scale_dtype), spec)


def _forms() -> Iterator[tuple[QuantSpec | None, str, str]]:
    """FP8 forms that a producer is asked for: spec, memory order, label."""
    from octavo.kernels.fused.checks import cases_of_inputs

    yield None, "rows", "no form"
    for spec in map(QuantSpec.parse, cases_of_inputs()):
        for order in ("rows",) if spec.granularity == TENSOR else ("rows", "columns", "both"):
            yield spec, order, f"{spec} {order}"


def _keep(draw: Draw, spec: QuantSpec | None) -> bool:
    return spec is None or spec.granularity == TENSOR or draw.choice.random() < 0.5


def _like(draw: Draw, x: Tensor) -> Tensor:
    return draw.matrix(x.shape[0], x.shape[1], x.dtype)


def _norm_inputs(draw: Draw, center: bool, residual: bool, spec: QuantSpec | None, order: str) -> Inputs:
    x = draw.matrix()
    weight = draw.normal(x.shape[1]).to(draw.choice.choice((x.dtype, torch.float32)))
    bias = draw.normal(x.shape[1]).to(weight.dtype) if center and draw.choice.random() < 0.5 else None
    offset = not center and draw.choice.random() < 0.5
    added = _like(draw, x) if residual else None
    return x, added, weight, bias, 1e-5, offset, center, spec, order, _keep(draw, spec)


def _norms() -> Iterator[Check]:
    from octavo.kernels.fused import reference
    from octavo.kernels.fused.norm import triton

    for spec, order, label in _forms():
        for op, center in (("rms_norm", False), ("layer_norm", True)):
            for residual in (False, True):
                yield Check(
                    op=op, case=label + " residual" * residual, configs=tuple(range(len(triton.ROWS_CONFIGS))),
                    draw=partial(_norm_inputs, center=center, residual=residual, spec=spec, order=order),
                    expected=reference.norm, actual=triton.norm,
                )  # fmt: skip


def _norm_gradients() -> Iterator[Check]:
    from octavo.kernels.fused import reference
    from octavo.kernels.fused.norm import triton

    def inputs(draw: Draw, center: bool, residual: bool) -> Inputs:
        x, _, weight, bias, eps, offset, *_ = _norm_inputs(draw, center, False, None, "rows")
        rstd, *means = reference.norm(x, None, weight, bias, eps, offset, center, None, "rows", False)
        grad, passed = _like(draw, x), _like(draw, x) if residual else None
        return grad, x, weight, rstd, means[0] if center else None, passed, offset, center

    for op, center in (("rms_norm_backward", False), ("layer_norm_backward", True)):
        for case, residual in (("gradients", False), ("with residual", True)):
            yield Check(
                op=op, case=case, configs=tuple(range(len(triton.BACKWARD_CONFIGS))),
                draw=partial(inputs, center=center, residual=residual),
                expected=reference.norm_backward, actual=triton.norm_backward,
            )  # fmt: skip


def _glus() -> Iterator[Check]:
    from octavo.kernels.fused import reference
    from octavo.kernels.fused.activations import ACTIVATIONS
    from octavo.kernels.fused.glu import triton

    def inputs(draw: Draw, activation: str, spec: QuantSpec | None, order: str) -> Inputs:
        gate = draw.matrix()
        return gate, _like(draw, gate), activation, spec, order, _keep(draw, spec)

    for activation in ACTIVATIONS:
        for spec, order, label in _forms():
            yield Check(
                op="glu", case=f"{activation} {label}", configs=tuple(range(len(triton.ROWS_CONFIGS))),
                draw=partial(inputs, activation=activation, spec=spec, order=order),
                expected=reference.glu, actual=triton.glu,
            )  # fmt: skip


def _glu_gradients() -> Iterator[Check]:
    from octavo.kernels.fused import reference
    from octavo.kernels.fused.activations import ACTIVATIONS
    from octavo.kernels.fused.glu import triton

    def inputs(draw: Draw, activation: str) -> Inputs:
        gate = draw.matrix()
        return _like(draw, gate), gate, _like(draw, gate), activation, draw.choice.random() < 0.5

    for activation in ACTIVATIONS:
        yield Check(
            op="glu_backward", case=activation, configs=tuple(range(len(triton.BACKWARD_CONFIGS))),
            draw=partial(inputs, activation=activation),
            expected=reference.glu_backward, actual=triton.glu_backward,
        )  # fmt: skip


def _dequantizers() -> Iterator[Check]:
    from octavo.kernels.dequantize import DEQUANTIZE, reference, triton
    from octavo.kernels.quantize import reference as quantize_reference

    def inputs(draw: Draw, spec: QuantSpec) -> Inputs:
        x = draw.matrix()
        return *quantize_reference.quantize(x, spec, None), spec, draw.choice.choice((x.dtype, torch.float32))

    def outputs(run: Any, *operands: Any) -> list[Tensor]:
        return [run(*operands)]

    for (text,) in dict.fromkeys(DEQUANTIZE.cases.values()):
        yield Check(
            op="dequantize", case=text, configs=tuple(range(len(triton.CONFIGS))),
            draw=partial(inputs, spec=QuantSpec.parse(text)), expected=partial(outputs, reference.dequantize),
            actual=partial(outputs, triton.dequantize),
        )  # fmt: skip


def _optimizers() -> Iterator[Check]:
    """Steps on one parameter of each kind. Not byte for byte: see `octavo.kernels.adamw.triton`."""
    from octavo.kernels.adamw import ADAMW, Slot, reference, split, triton
    from octavo.kernels.adamw.moments import compress
    from octavo.kernels.adamw.reference import Hyper

    def inputs(draw: Draw, master: str, compact: bool) -> Inputs:
        rows, columns = draw.side(), draw.side()
        draw.notes.append(f"{rows} rows {columns} columns")
        values, m, v = draw.normal(rows, columns), draw.normal(rows, columns) * 1e-3, draw.normal(rows, columns) ** 2
        upper, remainder = split(values)
        first, second = (compress(m, True), compress(v, False)) if compact else ((m,), (v,))
        kept = {"remainder": remainder, "fp32": values.clone(), "none": upper}[master]
        return upper, draw.normal(rows, columns).bfloat16(), kept, *first, *second

    def stepped(run: Any, master: str, *operands: Tensor) -> list[Tensor]:
        param, grad, kept, *states = (operand.clone() for operand in operands)
        compact = len(states) > 2
        slot = Slot(
            param=param, grad=grad, exp_avg=states[0], exp_avg_sq=states[3 if compact else 1],
            scales=(states[1], states[2], states[4], states[5]) if compact else None,
            remainder=kept if master == "remainder" else None, master=kept if master == "fp32" else None,
            seed=3 if compact else None,
        )  # fmt: skip
        run([(slot, Hyper(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=7))])
        return [param, states[0], states[3 if compact else 1]]

    def actual(master: str, *operands: Any) -> list[Tensor]:
        return stepped(triton.step, master, *operands[:-1])

    for master in ("remainder", "fp32", "none"):
        for compact in (True, False):
            yield Check(
                op=ADAMW.name, case=f"master={master} states={'fp8' if compact else 'fp32'}", configs=(0,),
                draw=partial(inputs, master=master, compact=compact),
                expected=partial(stepped, reference.step_all, master), actual=partial(actual, master), differs=_far,
            )  # fmt: skip


def _far(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> str | None:
    """Outputs that agree to fewer than 40 dB."""
    for position, (want, got) in enumerate(zip(expected, actual, strict=True)):
        if want.numel() and not (found := sqnr(want.float(), got.cpu().float())) > 40:
            return f"output {position} of {len(expected)} agrees to {found:.1f} dB, 40 wanted"
    return None
