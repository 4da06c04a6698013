"""Ops, cases and configurations to compare, and their inputs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.adamw import ADAMW, EXAMPLE, example
from octavo.kernels.adaptive import CASE
from octavo.kernels.adaptive.reference import adaptive_quantize
from octavo.kernels.conformance.mismatches import Check, Inputs, RandomInputs, difference, low_sqnr
from octavo.kernels.dequantize import DEQUANTIZE
from octavo.kernels.fused import reference as fused_reference
from octavo.kernels.fused.activations import ACTIVATIONS
from octavo.kernels.gemm import SCALED_MM
from octavo.kernels.gemm.operand_layout import UNIT_SCALE, blocks_of
from octavo.kernels.grouped import GROUPED_MM
from octavo.kernels.grouped.gradient import QUANTIZE_GROUPED
from octavo.kernels.quantize import reference as quantize_reference
from octavo.kernels.registry import OPS, Case
from octavo.numerics.spec import FULL, QuantSpec
from octavo.tensor import ScaledTensor


def unavailable_reason(device: torch.device) -> str | None:
    """Return why kernels cannot be compared on a device and what to do, or None."""
    if not find_spec("triton"):
        return "Triton is not installed, so there are no kernels to compare; run pip install triton (Linux)"
    from octavo.kernels.launch import INTERPRETED

    if device.type == "cuda" or INTERPRETED:
        return None
    return (
        f"Triton kernels run on GPUs and this device is {str(device)!r}. Run this on a machine with an NVIDIA GPU of "
        "compute capability 8.9 or later, or set TRITON_INTERPRET=1 to compare a small set in Triton's interpreter, "
        "which finds bugs of the kernels but not of the compiler"
    )


def checks(device: torch.device, only: str = "") -> list[Check]:
    """Return all cases of all ops with Triton kernels on a device whose "op case" contains `only`."""
    all_checks = [
        *_quantizers(), *_products(device), *_grouped_products(device), *_grouped_gradients(), *_norms(),
        *_norm_gradients(), *_glus(), *_dequantizers(), *_messages(), *_optimizers(),
    ]  # fmt: skip
    selected = [check for check in all_checks if only in f"{check.op} {check.case}"]
    if not selected:
        raise ValueError(f"no op and case contains {only!r}; ops are {', '.join(sorted({c.op for c in all_checks}))}")
    return selected


def _check(op: str, case: str, configs: Sequence[int], inputs: Any, **options: Any) -> Check:
    expected, actual = (OPS[op].backends[name].run for name in ("reference", "triton"))
    return Check(op=op, case=case, configs=tuple(configs), inputs=inputs, expected=expected, actual=actual, **options)


def _quantizers() -> Iterator[Check]:
    from octavo.kernels.quantize import triton

    def factor(rng: RandomInputs, kind: str, rows: int, columns: int) -> Tensor | None:
        shapes = {"rows": (rows, 1), "columns": (1, columns)}
        return rng.positive(*shapes[kind]) if kind != "none" else None

    def inputs(rng: RandomInputs, task: Any) -> Inputs:
        x, spec = rng.matrix(), task.first.spec
        if task.second is not None:
            folds = [factor(rng, folded.fold, *x.shape) for folded in (task.first, task.second)]
            return x, spec, folds[0], task.second.spec, folds[1]
        amax = rng.positive(*spec.granularity.scale_shape(tuple(x.shape)))
        scale = quantize_reference.scale_of(amax, spec)[0].to(spec.scale_dtype)
        precomputed = {"nothing": (None, None), "amax": (amax, None), "scale": (None, scale)}[task.precomputed]
        return x, spec, factor(rng, task.first.fold, *x.shape), *precomputed, task.order

    for task, case in triton.recipe_tasks().items():
        yield _check(task.op, case, range(len(triton.tiles(task))), partial(inputs, task=task))


def _products(device: torch.device) -> Iterator[Check]:
    from octavo.kernels.gemm import triton

    target = triton.target_for(device)
    for case in dict.fromkeys(SCALED_MM.cases.values()):
        if triton.unsupported_reason(case) is not None:
            continue
        blocked = triton.blocked_rows(*blocks_of(case))
        for fast in (True, False) if target.limited_accumulator and not blocked else (False,):
            for dtype in (torch.bfloat16, torch.float32):
                configs = triton.configurations(target, fast, blocked, dtype.itemsize)
                yield _product(case, fast, dtype, configs)


def _product(case: Case, fast: bool, dtype: torch.dtype, configs: tuple[int, ...]) -> Check:
    a_text, b_text, layout = case

    def inputs(rng: RandomInputs) -> Inputs:
        m, n = rng.size(), rng.size()
        k = min(rng.size(), 1024)  # sums of up to 1024 such products are exact in every accumulator
        bias = rng.normal(n).bfloat16() if rng.random.random() < 0.5 else None
        rng.notes.append(f"M {m} N {n} K {k}{' bias' if bias is not None else ''}")
        a = _operand(rng, a_text, (k, m) if layout[0] == "t" else (m, k))
        b = _operand(rng, b_text, (n, k) if layout[1] == "t" else (k, n))
        return a, b, layout, dtype, bias, fast

    label = f"{' '.join(case)} {'fast' if fast else 'promoted'} {str(dtype).removeprefix('torch.')}"
    return _check("scaled_mm", label, configs, inputs, differs=_difference_but_of_zeros)


def _difference_but_of_zeros(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> str | None:
    """See `difference`; -0.0 equals 0.0."""
    return difference([y + 0.0 for y in expected], [y + 0.0 for y in actual])


def _grouped_products(device: torch.device) -> Iterator[Check]:
    from octavo.kernels.gemm.triton import target_for
    from octavo.kernels.grouped.triton import available_configs

    target = target_for(device)

    def inputs(rng: RandomInputs, case: Case) -> Inputs:
        a_text, b_text, layout, biased = case
        experts, m, offsets = _groups(rng)
        n, k = min(rng.size(), 1024), min(rng.size(), 1024)
        rng.notes.append(f"N {n} K {k}")
        a = _operand(rng, UNIT_SCALE if layout == "tn" else a_text, (m, k if layout == "nt" else n))
        if layout == "tn":
            a = ScaledTensor(a.data, rng.positive(experts, n), QuantSpec.parse(a_text))
        b = _operand(rng, b_text, (m if layout == "tn" else experts * n, k))
        bias = rng.normal(experts, n).bfloat16() if biased else None
        return a, b, offsets, layout, torch.bfloat16, bias, layout == "nt"

    for case in dict.fromkeys(GROUPED_MM.cases.values()):
        fast = case[2] == "nt" and target.limited_accumulator
        configs = available_configs(case[2], target, fast, False, 2)
        label, of_case = " ".join(case).strip(), partial(inputs, case=case)
        yield _check("grouped_mm", label, configs, of_case, differs=_difference_but_of_zeros)


def _grouped_gradients() -> Iterator[Check]:
    def inputs(rng: RandomInputs, spec: QuantSpec) -> Inputs:
        (experts, m, offsets), n = _groups(rng), min(rng.size(), 1024)
        rng.notes.append(f"N {n}")
        return rng.normal(m, n).bfloat16(), offsets, spec, rng.positive(experts, n), rng.positive(m, 1), True

    for (text,) in QUANTIZE_GROUPED.cases.values():
        check = _check("quantize_grouped", text, (0,), partial(inputs, spec=QuantSpec.parse(text)))
        without_config = partial(lambda run, *call: run(*call[:-1]), check.actual)
        yield replace(check, actual=without_config)


def _groups(rng: RandomInputs) -> tuple[int, int, Tensor]:
    """Return the number of experts, all rows, some of which may be nobody's, and the ends of the experts' rows."""
    experts = rng.random.choice((1, 3, 9))
    counts = [min(rng.size(), 300) if rng.random.random() < 0.8 else 0 for _ in range(experts)]
    rows = sum(counts) + rng.random.choice((0, 5))
    rng.notes.append(f"rows {counts} of {rows}")
    return experts, rows, torch.tensor(counts, device="cpu").cumsum(0).int()


def _operand(rng: RandomInputs, text: str, shape: tuple[int, int]) -> ScaledTensor:
    """Small integers with scales; powers of two if the scales multiply inside the sum."""
    spec = QuantSpec.parse("e4m3/tensor" if text == UNIT_SCALE else text)
    values = rng.integers(-2, 2, shape)
    data = values.float().to(spec.format.dtype)
    if rng.random.random() < 0.5:
        data = data.t().contiguous().t()
        rng.notes.append("column-major")
    if text == UNIT_SCALE:
        return ScaledTensor(data, None, spec)
    scales = spec.granularity.scale_shape(shape)
    outside = FULL in spec.granularity
    scale = rng.positive(*scales) if outside else 2.0 ** rng.integers(-1, 1, scales)
    return ScaledTensor(data, scale.to(spec.scale_dtype), spec)


def _results() -> Iterator[tuple[QuantSpec | None, str, str]]:
    """Results that recipes request of a fused op: spec, memory order, label."""
    for spec in map(fused_reference.optional_spec, fused_reference.cases_of_inputs()):
        for order in ("rows",) if spec is None else ("rows", "columns", "both"):
            yield spec, order, "plain" if spec is None else f"{spec} {order}"


def _like(rng: RandomInputs, x: Tensor) -> Tensor:
    return rng.matrix(x.shape[0], x.shape[1], x.dtype)


def _norm_inputs(rng: RandomInputs, center: bool, spec: QuantSpec | None, order: str) -> Inputs:
    x = rng.matrix()
    weight = rng.normal(x.shape[1]).to(rng.random.choice((x.dtype, torch.float32)))
    bias = rng.normal(x.shape[1]).to(weight.dtype) if center and rng.random.random() < 0.5 else None
    offset = not center and rng.random.random() < 0.5
    return x, weight, bias, 1e-5, offset, center, spec, order


def _norms() -> Iterator[Check]:
    from octavo.kernels.fused.triton import ROWS_CONFIGS

    for spec, order, label in _results():
        for op, center in (("rms_norm", False), ("layer_norm", True)):
            inputs = partial(_norm_inputs, center=center, spec=spec, order=order)
            yield _check(op, label, range(len(ROWS_CONFIGS)), inputs)


def _norm_gradients() -> Iterator[Check]:
    from octavo.kernels.fused.triton import NORM_BACKWARD_CONFIGS

    def inputs(rng: RandomInputs, center: bool) -> Inputs:
        x, weight, bias, eps, offset, *_ = _norm_inputs(rng, center, None, "rows")
        rstd, mean, *_ = fused_reference.norm(x, weight, bias, eps, offset, center, None, "rows")
        return _like(rng, x), x, weight, rstd, mean if center else None, offset, center

    for op, center in (("rms_norm_backward", False), ("layer_norm_backward", True)):
        yield _check(op, "gradients", range(len(NORM_BACKWARD_CONFIGS)), partial(inputs, center=center))


def _glus() -> Iterator[Check]:
    from octavo.kernels.fused.triton import GLU_BACKWARD_CONFIGS, ROWS_CONFIGS

    def inputs(rng: RandomInputs, options: Inputs) -> Inputs:
        gate = rng.matrix()
        return gate, _like(rng, gate), *options

    def gradient_inputs(rng: RandomInputs, activation: str) -> Inputs:
        gate = rng.matrix()
        return _like(rng, gate), gate, _like(rng, gate), activation, rng.random.random() < 0.5

    for act in ACTIVATIONS:
        for spec, order, label in _results():
            of_result = partial(inputs, options=(act, spec, order))
            yield _check("glu", f"{act} {label}", range(len(ROWS_CONFIGS)), of_result)
        configs = range(len(GLU_BACKWARD_CONFIGS))
        yield _check("glu_backward", act, configs, partial(gradient_inputs, activation=act))


def _dequantizers() -> Iterator[Check]:
    from octavo.kernels.dequantize.triton import CONFIGS

    def inputs(rng: RandomInputs, spec: QuantSpec) -> Inputs:
        x = rng.matrix()
        return *quantize_reference.quantize(x, spec, None), spec, rng.random.choice((x.dtype, torch.float32))

    for (text,) in dict.fromkeys(DEQUANTIZE.cases.values()):
        of_spec = partial(inputs, spec=QuantSpec.parse(text))
        yield _check("dequantize", text, range(len(CONFIGS)), of_spec)


def _messages() -> Iterator[Check]:
    from octavo.kernels.adaptive.triton import CONFIGS

    def message(rng: RandomInputs) -> Inputs:
        x = rng.matrix()
        return *adaptive_quantize(x), rng.random.choice((x.dtype, torch.float32))

    for op, inputs in (("adaptive_quantize", lambda rng: (rng.matrix(),)), ("adaptive_dequantize", message)):
        yield _check(op, CASE[0], range(len(CONFIGS)), inputs)


def _optimizers() -> Iterator[Check]:
    """One step on a parameter of each kind. Not byte for byte: see `octavo.kernels.adamw.triton`."""

    def inputs(rng: RandomInputs) -> Inputs:
        rows, columns = rng.size(), rng.size()
        rng.notes.append(f"{rows} rows {columns} columns")
        values, m, v = rng.normal(rows, columns), rng.normal(rows, columns) * 1e-3, rng.normal(rows, columns) ** 2
        return values, rng.normal(rows, columns).bfloat16(), m, v

    def stepped(run: Any, master: str, compact: bool, *operands: Any) -> list[Tensor]:
        state = example(*operands[:4], master=master, compact=compact)  # the kernel has no configurations
        run([(state, EXAMPLE)])
        return [state.param, *(moment[0] for moment in state.moments)]

    for master in ("remainder", "fp32", "none"):
        for compact in (True, False):
            case, differs = f"master={master} states={'fp8' if compact else 'fp32'}", partial(low_sqnr, decibels=40)
            check = _check(ADAMW.name, case, (0,), inputs, differs=differs)
            expected, actual = (partial(stepped, run, master, compact) for run in (check.expected, check.actual))
            yield replace(check, expected=expected, actual=actual)
