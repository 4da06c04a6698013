"""Forward and backward of a planned linear as one generated function each, without calls between their parts.

The first passes run the methods of `LinearPlan` and `BackwardPlan`, which prepare casts and products. Then these
functions take their place (docs/host_time.md): the same allocations, launches and products, hence the same bits. They
hold the source of casts and products where these have one, else calls of them, and no branch that the plan decides.

Names in them: X, FOLD, FOLD_T and GIVEN go into a cast; Q, Q_T, S and S_T come out of it.
"""

from collections.abc import Callable
from typing import Any

import torch

from octavo.kernels.direct import ZEROS
from octavo.kernels.gemm import ProductPlan
from octavo.kernels.sources import function_of, source_of

Lines = list[str]


def forward_function(plan: Any) -> Callable[..., Any]:
    """Return what replaces `forward` of a `LinearPlan`."""
    constants: dict[str, Any] = {"zeros": ZEROS.cut, "plan": plan}
    rows = f"input.reshape(({plan.m}, {plan.k}))"
    dtype, view = source_of(plan.out_dtype, constants), source_of(torch.ops.aten._unsafe_view, constants)
    x_t = f"{'X_MK' if plan.is_matrix else 'X_MK.detach()'}.to({dtype})" if plan.saves_x else "None"
    w_saved = "W.detach(), Q_T, S_T" if plan.saves_w_cast else f"W.detach(), None, {'S' if plan.one_w_scale else None}"
    lines = [
        *_preparation(constants, "return plan._forward(ctx, input, W, bias, casts, channels)", plan.x, plan.w),
        "FOLD_T = GIVEN = CAST = None",
        f"factor, inverse = {'channels.factor, channels.inverse' if plan.equalized else 'None, None'}",
        f"X = X_MK = {'input' if plan.is_matrix else rows}",
        "if casts is not None: CAST = plan.find(casts, channels)",
        "if CAST is None:",
        *_indented(["FOLD = inverse", *_cast(plan.x, constants)]),
        " if casts is not None: plan.keep(casts, channels, (Q, Q_T, S, S_T))",
        " X_Q, X_T, X_S, X_T_S = Q, Q_T, S, S_T",
        "else: X_Q, X_T, X_S, X_T_S = CAST",
        "X, FOLD = W, factor",
        *_cast(plan.w if plan.w_KN is None else plan.w_KN, constants),
    ]
    if plan.w_KN is None:
        lines += ["Y = plan.y(X_Q, Q, X_S, S, bias)"]
    else:
        product = plan.y.call.source(constants, "X_Q", "Q", "X_S", "S", "bias")
        lines += ["if bias is not None and bias.data_ptr() & 15: Y = plan.y(X_Q, Q.t(), X_S, S, bias)"]
        lines += [f"else: Y = {product}"]
    lines += [] if plan.saves_x_cast else [f"X_T, X_T_S = {x_t}, None"]
    lines += [f"ctx.to_save = ({w_saved if plan.saves_w else 'None, None, None'}, X_T, X_T_S)"]
    lines += ["return Y" if plan.is_matrix else f"return {view}(Y, {plan.out_shape})"]
    return function_of("ctx, input, W, bias, casts, channels", lines, constants)


def backward_function(plan: Any) -> Callable[..., Any]:
    """Return what replaces `run` of a `BackwardPlan`."""
    constants: dict[str, Any] = {"zeros": ZEROS.cut, "plan": plan, "float32": torch.float32}
    lines = [
        *_preparation(constants, "return plan._run(G, saved, channels)", plan.w, plan.g),
        "W, W_Q, W_S, X_Q, X_S = saved",
        "FOLD_T = GIVEN = fold_w = fold_x = DX = DW = DB = None",
        f"factor, inverse = {'channels.factor, channels.inverse' if plan.equalized else 'None, None'}",
    ]
    if plan.w is not None:
        contiguous = plan.contiguous and not plan.equalized
        lines += [
            "X, FOLD, GIVEN = W, factor, W_S",
            *_cast(plan.w, constants, contiguous),
            "W_Q, W_S, GIVEN = Q, S, None",
        ]
    lines += _fold("fold_w", "W_S", "inverse") if plan.folds_w else []
    lines += _fold("fold_x", "X_S", "factor") if plan.folds_x else []
    if plan.g is not None:
        folds = "fold_w, fold_x" if plan.dgrad else "fold_x, None"
        cast = _cast(plan.g if plan.g_NM is None else plan.g_NM, constants, plan.contiguous)
        lines += [f"X, FOLD, FOLD_T = G, {folds}", *cast]
    if plan.dgrad:
        data = () if plan.w is not None else ("W_Q",)
        lines += _product("DX", plan.dx, "plan.dx(Q, W_Q, S, W_S)", constants, ("Q", "W_Q", "S", "W_S"), data)
    if plan.dw is not None and plan.g_NM is None:
        lines += ["DW = plan.dw(Q_T, X_Q, S_T, X_S)"]
    elif plan.dw is not None:
        general = "plan.dw(Q_T.t(), X_Q, S_T.t(), X_S)"
        lines += _product("DW", plan.dw, general, constants, ("Q_T", "X_Q", "S_T", "X_S"), ("X_Q",))
    if plan.wgrad and not plan.fp8_wgrad:
        lines += [f"DW = (G.t() @ X_Q).to({source_of(plan.w_dtype, constants)})"]
    if plan.dbias:
        lines += [f"DB = G.sum(0, dtype=float32).to({source_of(plan.bias_dtype, constants)})"]
    return function_of("G, saved, channels", [*lines, "return DX, DW, DB, None"], constants)


def _preparation(constants: dict[str, Any], otherwise: str, *casts: Any) -> Lines:
    """Return what the source of casts needs before it, all on one device."""
    plans = [plan for plan in casts if hasattr(plan, "preparation")]
    lines: Lines = plans[0].preparation(constants, otherwise) if plans else []
    return lines


def _cast(plan: Any, constants: dict[str, Any], contiguous: bool = False) -> Lines:
    general = f"Q, Q_T, S, S_T = {source_of(plan, constants)}.run(X, FOLD, FOLD_T, GIVEN, zeros)"
    source = getattr(plan, "source", None)
    lines = None if source is None else source(constants, f"{general}; break", contiguous)
    return [general] if lines is None else ["while True:", *_indented([*lines, "break"])]


def _fold(fold: str, scale: str, channels: str) -> Lines:
    return [f"if {scale} is not None:", f" {fold} = {scale} if {scale}.dtype is float32 else {scale}.float()",
            f" {scale} = {channels}"]  # fmt: skip


def _product(
    result: str, plan: ProductPlan, general: str, constants: dict[str, Any], names: tuple[str, str, str, str],
    data: tuple[str, ...],
) -> Lines:  # fmt: skip
    """Return lines of a product; `data` are operands that might not be aligned, as are then their scales."""
    if plan.call is None:
        return [f"{result} = {general}"]
    product = plan.call.source(constants, *names)
    misaligned = plan.call.misaligned(data, names[3])
    return [f"if {misaligned}: {result} = {general}", f"else: {result} = {product}"]


def _indented(lines: Lines) -> Lines:
    return [f" {line}" for line in lines]
