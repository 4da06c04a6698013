"""All variants of the fused kernels; `norm.triton` and `glu.triton` launch them."""

from typing import Any

from octavo.kernels.fused.activations import ACTIVATIONS
from octavo.kernels.fused.argument_checks import cases_of_inputs
from octavo.kernels.fused.fp8_outputs import optional_spec
from octavo.kernels.fused.glu import triton as glu
from octavo.kernels.fused.glu.device import glu_rows_kernel
from octavo.kernels.fused.norm import triton as norm
from octavo.kernels.fused.norm.device import norm_rows_kernel
from octavo.kernels.fused.reference import ROW_BLOCK
from octavo.kernels.fused.tiles import TRANSPOSE, WIDEST_ROW
from octavo.kernels.launch import Launch, Variant
from octavo.numerics.spec import ROW, QuantSpec

CONFIGS = range(2)
COLUMNS = 4096


def variants() -> list[Variant]:
    """Return every kernel, spec, memory order and configuration that the recipes use, for rows of 4096."""
    return [*_norms(), *_norm_gradients(), *_glus(), *_glu_gradients(), *_others()]


def _outputs() -> list[tuple[QuantSpec | None, str]]:
    specs = [optional_spec(text) for text in cases_of_inputs()]
    return [(spec, order) for spec in specs for order in (("rows",) if spec is None else ("rows", "both"))]


def _case(spec: QuantSpec | None, order: str) -> str:
    return "plain" if spec is None else f"{spec} {order}"


def _types(spec: QuantSpec | None, **more: str) -> dict[str, str]:
    code = "*fp8e5" if spec is not None and spec.format.name == "e5m2" else "*fp8e4nv"
    scale = "*u8" if spec is not None and spec.scale_rule == "e8m0" else "*fp32"
    return {"q": code, "qt": code, "s": scale, "eps": "fp32", "count": "fp32", **more}


def _written(spec: QuantSpec | None, order: str) -> float:
    """Return the bytes per element of the result and its scales."""
    if spec is None:
        return 2.0
    return (2 if order == "both" else 1) + (spec.scale_dtype.itemsize / (spec.granularity.columns or COLUMNS))


def _variant(op: str, case: str, config: int, launch: Launch, device_bytes: float, **fields: Any) -> Variant:
    tile = launch.constants.get("TILE_R", 1) * launch.constants["TILE_C"]
    looped = "row_block" in launch.kernel.__name__
    trips = COLUMNS // launch.constants["TILE_C"] if looped else fields.pop("trips", 1)
    return Variant(
        op=op, case=case, config=config, launch=launch, tile=tile, device_bytes=device_bytes, trips=trips, **fields
    )


def _norms() -> list[Variant]:
    matrices = dict.fromkeys(("x", "y", "weight", "bias"), "*bf16")
    all_variants = []
    for spec, order in _outputs():
        for op, center in (("rms_norm", False), ("layer_norm", True)):
            flags = {"CENTER": center, "OFFSET": False, "BIAS": center}
            case, moved = _case(spec, order), 2 + _written(spec, order)
            for config in CONFIGS:
                launch, *_ = norm.launches(spec, order, COLUMNS, flags, config)
                types = _types(spec, **matrices, mean="*fp32", rstd="*fp32")
                if launch.kernel is norm_rows_kernel and order == "both":
                    continue  # same code as rows only
                all_variants.append(_variant(op, case, config, launch, moved, types=types, equal_to_1=("stride_c",)))
    return all_variants


def _norm_gradients() -> list[Variant]:
    matrices = dict.fromkeys(("grad", "x", "dx", "weight"), "*bf16")
    types = _types(None, **matrices, **dict.fromkeys(("mean", "rstd", "partial_weight", "partial_bias"), "*fp32"))
    fixed: dict[str, Any] = {"types": types, "equal_to_1": ("grad_c", "stride_c")}
    all_variants = []
    for center in (False, True):
        op = "layer_norm_backward" if center else "rms_norm_backward"
        flags = {"CENTER": center, "OFFSET": False, "BIAS": center}
        sums = 4 * (1 + center) / ROW_BLOCK
        for config in range(len(norm.BACKWARD_CONFIGS)):
            (launch,) = norm.backward_launches(COLUMNS, flags, config)
            all_variants.append(_variant(op, "gradients", config, launch, 6 + sums, trips=ROW_BLOCK, **fixed))
        for launch in norm.backward_launches(4 * COLUMNS, flags):
            step, moved = ("dx", 6.0) if launch.constants["DX"] else ("sums", 4 + sums)
            trips = launch.constants["ROW_BLOCK"]
            all_variants.append(_variant(op, f"gradients, wide, {step}", 0, launch, moved, trips=trips, **fixed))
    pointers = {"partial": "*fp32", "sums": "*bf16"}
    all_variants.append(_variant("rms_norm_backward", "sums of row blocks", 0, norm.SUMS, 4.0, types=pointers, trips=8))
    return all_variants


def _glus() -> list[Variant]:
    matrices = dict.fromkeys(("gate", "up", "h"), "*bf16")
    cases = [("silu", spec, order) for spec, order in _outputs()]
    cases += [(activation, *_outputs()[1]) for activation in ("gelu_tanh", "gelu")]
    all_variants = []
    for activation, spec, order in cases:
        for config in CONFIGS:
            launch, *_ = glu.launches(activation, spec, order, COLUMNS, config)
            if launch.kernel is glu_rows_kernel and order == "both":
                continue  # same code as rows only
            case, moved = f"{activation} {_case(spec, order)}", 4 + _written(spec, order)
            types = _types(spec, **matrices)
            all_variants.append(
                _variant("glu", case, config, launch, moved, types=types, equal_to_1=("gate_c", "up_c"))
            )
    return all_variants


def _glu_gradients() -> list[Variant]:
    types = dict.fromkeys(("grad", "gate", "up", "dgate", "dup"), "*bf16")
    ones = ("grad_c", "gate_c", "up_c")
    return [
        _variant(
            "glu_backward", activation, config, glu.backward_launch(activation, config), 10, types=types,
            equal_to_1=ones,
        )
        for activation in ACTIVATIONS
        for config in CONFIGS
    ]  # fmt: skip


def _others() -> list[Variant]:
    """The transpose step after a kernel on whole rows, and the kernel for longer rows."""
    spec = QuantSpec(granularity=ROW)
    wide = glu.launches("silu", spec, "both", WIDEST_ROW + 1)[0]
    types = _types(spec, **dict.fromkeys(("gate", "up", "h"), "*bf16"))
    return [
        _variant("glu", "transposed copy of bytes", 0, TRANSPOSE, 2.0, types={"q": "*u8", "qt": "*u8"}),
        _variant("glu", f"silu {spec} both, wide", 0, wide, 10.0, types=types, equal_to_1=("gate_c", "up_c")),
    ]
