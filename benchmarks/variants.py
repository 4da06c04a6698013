"""Every kernel × case × configuration of the backends, for `benchmarks.sass`: bf16 input, aligned rows of 4096."""

from collections.abc import Callable, Iterator

import torch

from octavo.kernels.adamw import triton as optimizers
from octavo.kernels.adaptive import triton as messages
from octavo.kernels.adaptive.reference import GROUP
from octavo.kernels.cross_entropy import triton as losses
from octavo.kernels.dequantize import triton as dequantizers
from octavo.kernels.fused import triton as kernels
from octavo.kernels.fused.activations import ACTIVATIONS
from octavo.kernels.fused.reference import cases_of_inputs, optional_spec
from octavo.kernels.gemm import triton as gemm
from octavo.kernels.gemm.triton import tile_layout
from octavo.kernels.grouped import gradient_triton as gradients
from octavo.kernels.grouped import triton as grouped
from octavo.kernels.launch import Launch
from octavo.kernels.quantize import triton as quantizers
from octavo.numerics.spec import ADAPTIVE, ROW, QuantSpec

COLUMNS = 4096
_NAMES_BY_TYPE = {
    "*bf16": "x y weight bias gate up h grad dx dgate dup g out sums z",
    "*fp32": "s s_t scales fold fold_t mean rstd partial partial_weight partial_bias a_scale b_scale w_scale x_scale "
    "inverse_t loss numbers",
    "*i32": "precomputed amax amax_t group offsets work",
    "*i64": "target pointers shapes",
    "*u8": "codes",
    "*fp8e4nv": "q q_t qt",
    "fp32": "eps count scale softcap",
}
TYPES = {name: kind for kind, names in _NAMES_BY_TYPE.items() for name in names.split()}
"""Triton types of arguments; all others are sizes, i32 divisible by 16."""
STRIDES = ("stride_c", "x_c", "q_c", "grad_c", "gate_c", "up_c")  # Between neighbours of a row: 1


class Variant:
    """One compilation of an op; what is not given follows from its constants and the names of its arguments."""

    def __init__(
        self, op: str, case: str, config: int, launch: Launch, device_bytes: float, *, tile: int | None = None,
        trips: int | None = None, equal_to_1: tuple[str, ...] = STRIDES, **types: str,
    ) -> None:  # fmt: skip
        self.op, self.case = op, case  # Name in `torch.ops.octavo`; label within it, as `"e4m3/row fold=columns both"`
        self.config, self.launch = config, launch  # Index of the kernel's configuration, 0 for the default; and it
        self.device_bytes = device_bytes  # Device-memory traffic, in bytes per input element
        constants, names = launch.constants, launch.kernel.arg_names
        # Input elements per program or loop iteration; iterations for 4096 columns (or a contraction over 4096).
        self.tile = constants.get("TILE_R", 1) * constants["TILE_C"] if tile is None else tile
        if trips is None:
            walks = launch.kernel.fn.__name__ == "rows_kernel" or "row_block" in launch.kernel.fn.__name__
            trips = COLUMNS // constants["TILE_C"] if walks else constants.get("TILES", constants.get("ROW_BLOCK", 1))
        self.trips = trips
        self.types = {name: kind for name, kind in (TYPES | types).items() if name in names}  # but of sizes
        self.equal_to_1 = tuple(name for name in equal_to_1 if name in names)


def _scaled(spec: QuantSpec | None) -> dict[str, str]:
    codes = dict.fromkeys(("q", "q_t", "qt"), "*fp8e5") if spec is not None and spec.format.name == "e5m2" else {}
    return codes | (dict.fromkeys(("s", "s_t"), "*u8") if spec is not None and spec.scale_rule == "e8m0" else {})


def quantizations() -> Iterator[Variant]:
    for task, case in quantizers.recipe_tasks().items():
        for config in range(len(quantizers.tiles(task))):
            for launch in quantizers.launches(task, config):
                moved = quantizers.device_bytes(task, launch)
                yield Variant(task.op, case, config, launch, moved, **_scaled(task.first.spec))


_COMPILED = (  # Cases that compile to different code, with `A_ROWS`, `B_ROWS` and `BLOCKED`; layouts share code
    ("e4m3/row e4m3/row nt", 1, 1, False),
    ("e4m3/row unit nn", 1, gemm.NO_SCALE, False),
    ("e5m2/tensor e4m3/tensor nn", 0, 0, False),
    ("e4m3/1x128 e4m3/128x128 nt", 1, gemm.BLOCK, True),
    ("e4m3/128x1 e4m3/128x1 tn", 1, 1, True),
)


def products(capability: int = 90, out_bytes: int = 2) -> Iterator[Variant]:
    target, out = gemm.target_of(capability, 1), "*fp32" if out_bytes == 4 else "*bf16"
    for case, a_rows, b_rows, blocked in _COMPILED:
        for fast in (True, False) if target.limited_accumulator and not blocked else (False,):
            overlap = gemm.overlaps(target, fast)
            for index in gemm.configurations(target, fast, [a_rows, b_rows].count(1) if blocked else 0, out_bytes):
                config = gemm.CONFIGS[index]
                launch = gemm.launch_of(config, target, a_rows, b_rows, blocked, not blocked, fast, overlap)
                steps = launch.num_stages if overlap else 1
                contiguous = ("a_stride_k", "b_stride_k") if case.endswith("nt") and blocked else _BY_ROW
                yield Variant(
                    "scaled_mm", f"{case} {'fast' if fast else 'promoted'}", index, launch, 1.0, out=out,
                    tile=(config.tile_m + config.tile_n) * config.tile_k * steps, equal_to_1=contiguous,
                    trips=COLUMNS // config.tile_k // steps, **_operands(case, config, target.tma, overlap),
                )  # fmt: skip


_BY_ROW = ("a_stride_r", "b_stride_r")


def grouped_products(capability: int = 90) -> Iterator[Variant]:
    target = gemm.target_of(capability, 1)
    for layout in ("nt", "nn", "tn"):
        fast = layout == "nt" and target.limited_accumulator
        for index in grouped.available_configs(layout, target, fast, False, 2):
            config = gemm.CONFIGS[index]
            launch = grouped.launch_of(config, target, layout, 8, layout == "nt", fast)
            yield Variant(
                "grouped_mm", layout, index, launch, 1.0, tile=(config.tile_m + config.tile_n) * config.tile_k,
                trips=COLUMNS // config.tile_k, **_operands("e4m3 e4m3", config, target.tma, False),
            )  # fmt: skip


def _operands(case: str, config: gemm.Config, tma: bool, overlap: bool) -> dict[str, str]:
    codes = ["fp8e5" if text.startswith("e5m2") else "fp8e4nv" for text in case.split()[:2]]
    layout = f",{tile_layout()!r}" if overlap else ""
    tiles = zip(codes, (config.tile_m, config.tile_n), strict=True)
    types = [f"tensordesc<{code}[{tile}, {config.tile_k}]{layout}>" if tma else f"*{code}" for code, tile in tiles]
    return dict(zip("ab", types, strict=True))


def _outputs() -> list[tuple[QuantSpec | None, str, str, float]]:
    """Results of fused ops: spec, order, label, and bytes per element of the result and its scales."""
    results: list[tuple[QuantSpec | None, str, str, float]] = []
    for spec in map(optional_spec, cases_of_inputs()):
        for order in ("rows",) if spec is None else ("rows", "both"):
            if spec is None:
                results.append((None, order, "plain", 2.0))
            else:
                scales = spec.scale_dtype.itemsize / (spec.granularity.columns or COLUMNS)
                results.append((spec, order, f"{spec} {order}", (2 if order == "both" else 1) + scales))
    return results


def fused() -> Iterator[Variant]:
    flags = {center: {"CENTER": center, "OFFSET": False, "BIAS": center} for center in (False, True)}
    for spec, order, case, written in _outputs():
        for op, center in (("rms_norm", False), ("layer_norm", True)):
            for config in range(2):
                launch, *_ = kernels.norm_launches(spec, order, COLUMNS, flags[center], config)
                if order != "both" or "row_block" in launch.kernel.fn.__name__:  # else the code of rows only
                    yield Variant(op, case, config, launch, 2 + written, **_scaled(spec))
    for op, center in (("rms_norm_backward", False), ("layer_norm_backward", True)):
        sums = 4 * (1 + center) / kernels.ROW_BLOCK
        for config in range(len(kernels.NORM_BACKWARD_CONFIGS)):
            (launch,) = kernels.norm_backward_launches(COLUMNS, flags[center], config)
            yield Variant(op, "gradients", config, launch, 6 + sums)
        for launch in kernels.norm_backward_launches(4 * COLUMNS, flags[center]):
            step, moved = ("dx", 6.0) if launch.constants["DX"] else ("sums", 4 + sums)
            yield Variant(op, f"gradients, wide, {step}", 0, launch, moved, tile=launch.constants["TILE_C"])
    yield Variant("rms_norm_backward", "sums of row blocks", 0, kernels.SUMS, 4.0, trips=8)
    cases = [("silu", *output) for output in _outputs()]
    for activation, spec, order, case, written in [*cases, *((a, *_outputs()[1]) for a in ("gelu_tanh", "gelu"))]:
        for config in range(2):
            launch, *_ = kernels.glu_launches(activation, spec, order, COLUMNS, config)
            if order != "both" or launch.kernel.fn.__name__ != "glu_rows_kernel":
                yield Variant("glu", f"{activation} {case}", config, launch, 4 + written, **_scaled(spec))
    for activation in ACTIVATIONS:
        for config in range(2):
            yield Variant("glu_backward", activation, config, kernels.glu_backward_launch(activation, config), 10)
    # The transpose step after a kernel on whole rows, and the kernel for longer rows.
    yield Variant("glu", "transposed copy of bytes", 0, kernels.TRANSPOSE, 2.0, q="*u8", qt="*u8")
    wide = kernels.glu_launches("silu", QuantSpec(granularity=ROW), "both", kernels.WIDEST_ROW + 1)[0]
    yield Variant("glu", "silu e4m3/row both, wide", 0, wide, 10.0)


def optimizer_steps() -> Iterator[Variant]:
    """Those that bf16 and float32 training use."""
    kinds = {
        "bf16, FP8 moments, remainder": (torch.bfloat16, True, 1),
        "bf16, FP8 moments, float32 master": (torch.bfloat16, True, 2),
        "float32, FP8 moments": (torch.float32, True, 0),
        "bf16, float32 moments, remainder": (torch.bfloat16, False, 1),
    }
    for case, (dtype, compact, master) in kinds.items():
        moved = 3 * dtype.itemsize + (4.2 if compact else 16) + 4 * master
        launch = optimizers.launch((dtype, dtype, compact, master, compact, True))
        yield Variant("adamw", case, 0, launch, moved, tile=optimizers.PER * optimizers.GROUP)


def dequantizations() -> Iterator[Variant]:
    """Of stored activations, and of row scales, which compile to different code."""
    for text in ("e4m3/1x32/e8m0", "e4m3/row"):
        spec = QuantSpec.parse(text)
        scales = 1 / spec.granularity.columns if spec.granularity.columns else 0.0
        for config in range(len(dequantizers.CONFIGS)):
            yield Variant("dequantize", text, config, dequantizers.launch(spec, config), 3 + scales, **_scaled(spec))


def adaptive_messages() -> Iterator[Variant]:
    for config, (per, _) in enumerate(messages.CONFIGS):
        for op, launch in zip(("adaptive_quantize", "adaptive_dequantize"), messages.launches(config), strict=True):
            yield Variant(op, ADAPTIVE.text, config, launch, 3 + 4 / GROUP, tile=per * GROUP)


def cross_entropies() -> Iterator[Variant]:
    """With and without a cap, for logits of a vocabulary of 128 Ki."""
    for capped in (False, True):
        launch, trips = losses.launch(1 << 17, capped), (1 << 17) // losses.WIDEST
        yield Variant("cross_entropy", "capped" if capped else "plain", 0, launch, 6, trips=trips)


def grouped_gradients() -> Iterator[Variant]:
    steps = (*gradients.launches(QuantSpec.parse("e4m3/row"), True, True, True), gradients.ZERO_TAIL)
    for launch, moved in zip(steps, (2.0, 12.0, 4.0, 2.0), strict=True):
        case, tile = launch.kernel.fn.__name__.removesuffix("_kernel"), launch.constants.get("BLOCK")
        yield Variant("quantize_grouped", case, 0, launch, moved, tile=tile)


ALL: tuple[Callable[..., Iterator[Variant]], ...] = (
    quantizations, products, fused, optimizer_steps, dequantizations, adaptive_messages, cross_entropies,
    grouped_gradients,
)  # fmt: skip
BY_TARGET = (products, grouped_products)  # Whose configurations depend on the compute capability
