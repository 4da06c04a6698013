"""What only a GPU with FP8 matrix units can show: that its backends run, and compute what the reference computes.

`python -m benchmarks gpu --stages tests` runs these from the source tree alone; `octavo doctor --deep` goes further,
over every configuration of every kernel.

Time goes into compiling. With xdist's `--dist loadgroup`, tests that launch the same kernels run in one process, which
compiles them once, and nothing runs twice that only has another name.
"""

import copy
import math
from contextlib import ExitStack

import pytest
import torch
from torch import nn

import octavo
import octavo.kernels.fused  # registers its ops
from octavo.kernels import scaled_mm
from octavo.kernels.conformance.mismatches import difference, low_sqnr
from octavo.kernels.gemm import SCALED_MM
from octavo.kernels.gemm import reference as gemm_reference
from octavo.kernels.quantize import QUANTIZE, QUANTIZE_PAIR, quantize, quantize_pair, reference
from octavo.kernels.registry import OPS, Backend, Op, status
from octavo.numerics import RECIPES, QuantSpec
from octavo.numerics.spec import FULL
from octavo.train.packed_attention import attention, document_offsets, register

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = torch.device("cuda")
ODD = ((1, 1), (1, 4096), (4099, 1), (257, 771), (16, 4096), (1023, 130), (0, 64), (64, 0))
RECIPES_ON_MATRIX_UNITS = ("rowwise", "tensorwise", "rowwise_hp_wgrad")
PRODUCTS = {label: case for case, label in {case: label for label, case in reversed(SCALED_MM.cases.items())}.items()}
"""The cases of products, each once: several recipes have the same one."""


def in_one_process(names):
    """Parameters of tests: those with the same one launch the same kernels."""
    return [pytest.param(name, marks=pytest.mark.xdist_group(name.replace(" ", "_")), id=name) for name in names]


def matrix(shape, *, broken=False, dtype=torch.bfloat16):
    """Random numbers, rows of magnitudes up to 10²³ apart and one of zeros; and, broken, a NaN and an infinity."""
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    magnitudes = torch.logspace(-20, 3, max(shape[0], 1), device=DEVICE)[: shape[0], None]
    values = torch.randn(shape, device=DEVICE, generator=generator) * magnitudes
    if min(shape) > 3:
        values[2] = 0.0
        if broken:
            values[1, 2], values[3, 0] = math.nan, -math.inf
    return values.to(dtype)


def factors(shape):
    """A positive factor for each row, and one for each column."""
    return tuple(torch.rand(size, device=DEVICE) + 0.1 for size in ((shape[0], 1), (1, shape[1])))


@pytest.mark.parametrize("op", [op for op in OPS.values() if op is not SCALED_MM], ids=lambda op: op.name)
def test_no_case_but_products_is_emulated_and_all_run_on_triton(op):
    for case in op.cases.values():
        chosen = op.choose(DEVICE, case)  # Triton, or what PyTorch has and the registry prefers
        assert not chosen.emulates and chosen.name != "reference", case
        assert op.unavailable_reason(op.backends["triton"], DEVICE, case) is None, case


@pytest.mark.parametrize("name", RECIPES_ON_MATRIX_UNITS)
def test_products_run_on_matrix_units(name):
    rows = [row for row in status(DEVICE) if row.op.startswith(f"scaled_mm {name} ")]
    assert rows and "reference" not in {row.backend for row in rows if row.chosen}, [row for row in rows if row.reason]


@pytest.mark.parametrize("text", QUANTIZE.cases)
@pytest.mark.parametrize("fold", ["no fold", "rows", "columns"])
def test_quantizers_give_the_reference_s_bytes(text, fold):
    spec = QuantSpec.parse(text)
    for shape in ODD:
        factor = {"no fold": None, "rows": factors(shape)[0], "columns": factors(shape)[1]}[fold]
        for x in (matrix(shape), matrix(shape, broken=True), matrix(shape[::-1]).t()):
            data, scale = reference.quantize(x, spec, factor)
            for order in ("rows", "columns", "both"):
                with QUANTIZE.force("triton"):
                    q = quantize(x, spec, factor, order=order)
                outputs = [q.data, q.scale, q.other_order if order == "both" else q.data]
                assert (why := difference([data, scale, data], outputs)) is None, (shape, order, why)
                assert q.along(1 if order == "rows" else 0) is not None


@pytest.mark.parametrize("text", [text for text in QUANTIZE.cases if FULL in QuantSpec.parse(text).granularity])
def test_quantizers_take_maxima_that_are_given(text):
    spec = QuantSpec.parse(text)
    for shape in ((257, 771), (16, 4096)):
        x = matrix(shape)
        amax = torch.full(spec.granularity.scale_shape(shape), 0.37, device=DEVICE)
        data, scale = reference.quantize(x, spec, None, amax=amax)
        with QUANTIZE.force("triton"):
            q = quantize(x, spec, order="both", amax=amax)
        assert (why := difference([data, scale, data], [q.data, q.scale, q.other_order])) is None, (shape, why)


@pytest.mark.parametrize("case", QUANTIZE_PAIR.cases.values(), ids=" and ".join)
def test_pairs_give_the_reference_s_bytes(case):
    spec, spec_t = (QuantSpec.parse(text) for text in case)
    for shape in ODD:
        fold_t, fold = factors(shape)
        for x in (matrix(shape), matrix(shape, broken=True)):
            expected = [*reference.quantize(x, spec, fold), *reference.quantize(x, spec_t, fold_t)]
            with QUANTIZE_PAIR.force("triton"):
                first, second = quantize_pair(x, spec, fold, spec_t, fold_t)
            outputs = [first.data, first.scale, second.data, second.scale]
            assert (why := difference(expected, outputs)) is None, (shape, why)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("text", ["e4m3/row", "e5m2/tensor", "e4m3/1x32/e8m0"])
def test_other_dtypes_and_unaligned_inputs(text, dtype):
    spec = QuantSpec.parse(text)
    x = matrix((130, 515), dtype=dtype)[1:, 3:]
    data, scale = reference.quantize(x, spec, None)
    with QUANTIZE.force("triton"):
        q = quantize(x, spec, order="both")
    assert (why := difference([data, scale, data], [q.data, q.scale, q.other_order])) is None, why


def test_offsets_beyond_32_bits():
    rows, columns = (1 << 17) + 3, 1 << 14
    if torch.cuda.get_device_properties(DEVICE).total_memory < 20 << 30:
        pytest.skip("needs 20 GiB of GPU memory")
    x = torch.zeros(rows, columns, device=DEVICE, dtype=torch.bfloat16)
    x[-4:] = matrix((4, columns))
    spec = QuantSpec.parse("e4m3/row")
    data, scale = reference.quantize(x[-4:], spec, None)
    with QUANTIZE.force("triton"):
        q = quantize(x, spec, order="both")
    assert difference([data, scale, data], [q.data[-4:], q.scale[-4:], q.other_order[-4:]]) is None


@pytest.mark.parametrize("name", [name for name in SCALED_MM.backends if name != "reference"])
@pytest.mark.parametrize("label", in_one_process(PRODUCTS))
def test_products_agree_with_the_reference(name, label):
    backend, case = SCALED_MM.backends[name], PRODUCTS[label]
    if (reason := SCALED_MM.unavailable_reason(backend, DEVICE, case)) is not None:
        pytest.skip(reason)
    a_text, b_text, layout = case
    both = torch.bfloat16, torch.float32
    for m, k, n in ((256, 512, 384), (17, 129, 250), (1, 4096, 16), (5, 0, 7), (0, 64, 64), (1000, 2048, 1536)):
        operands = []
        for text, shape, transposed in ((a_text, (m, k), layout[0] == "t"), (b_text, (k, n), layout[1] == "t")):
            x = torch.randn(shape[::-1] if transposed else shape, device=DEVICE, dtype=torch.bfloat16)
            q = quantize(x, QuantSpec.parse("e4m3/tensor" if text == "unit" else text), order="both")
            operands.append(q.unscaled if text == "unit" else q)
        expected = gemm_reference.scaled_mm(*operands, layout, torch.float32, None, False)
        for dtype in both if k in (512, 129) else both[:1]:
            with SCALED_MM.force(name):
                y = scaled_mm(*operands, layout, out_dtype=dtype, fast_accum=layout == "nt")
            assert y.dtype == dtype and y.shape == (m, n)
            assert (why := low_sqnr([expected], [y], 45)) is None, (m, k, n, dtype, why)


def forward_backward(layer, x, g):
    """Y, ∂X and the gradients of the parameters."""
    own = x.detach().requires_grad_()
    y = layer(own)
    return [y.detach(), *torch.autograd.grad(y, (own, *layer.parameters()), g)]


def converted(name, k, n, *, bias=False):
    torch.manual_seed(0)
    return octavo.convert(nn.Linear(k, n, bias=bias, dtype=torch.bfloat16), name, verbose=False)


@pytest.mark.filterwarnings("ignore:octavo. scaled_mm:RuntimeWarning")  # what is emulated here says so
@pytest.mark.parametrize("name", in_one_process(RECIPES))
@pytest.mark.parametrize(
    ("m", "k", "n", "bias"),
    [(512, 256, 384, True), (512, 256, 384, False), (37, 19, 2, True), (0, 64, 64, True), (1, 768, 2, False),
     (2048, 1024, 4096, False)],
)  # fmt: skip
def test_linear_agrees_with_the_cpu(name, m, k, n, bias):
    layer = converted(name, k, n, bias=bias)
    x, g = torch.randn(m, k).bfloat16(), torch.randn(m, n).bfloat16()
    expected = forward_backward(layer, x, g)
    actual = forward_backward(layer.to(DEVICE), x.to(DEVICE), g.to(DEVICE))
    assert low_sqnr(expected, actual, 40) is None


@pytest.mark.filterwarnings("ignore:octavo. scaled_mm:RuntimeWarning")
@pytest.mark.parametrize("name", in_one_process(RECIPES))
def test_linear_is_captured_into_a_cuda_graph(name):
    layer = converted(name, 256, 384, bias=True).to(DEVICE)
    x, g = (torch.randn(128, size, device=DEVICE).bfloat16() for size in (256, 384))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward_backward(layer, x, g)
    torch.cuda.current_stream().wait_stream(stream)
    eager = copy.deepcopy(layer)  # with a state of its own, as both change theirs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = forward_backward(layer, x, g)
    for scale in (1.0, 7.0):
        x.normal_().mul_(scale)
        g.normal_()
        for result in results:
            result.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert low_sqnr(forward_backward(eager, x, g), results, 55) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("name", ["rowwise", "tensorwise"])  # in processes of their own: Inductor's kernels
def test_linear_compiles_without_a_graph_break(name):
    layer = converted(name, 256, 384).to(DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    for m in (128, 64, 33):
        x, g = (torch.randn(m, size, device=DEVICE).bfloat16() for size in (256, 384))
        own, again = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = compiled(own), layer(again)
        gradients = [torch.autograd.grad(out, (leaf, layer.weight), g) for out, leaf in ((y, own), (expected, again))]
        assert low_sqnr((expected, *gradients[1]), (y, *gradients[0]), 55) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
def test_casts_that_inductor_generates_give_the_reference_s_bytes():
    """By row, by column and with a given scale, fused with a product whose bf16 result Inductor does not round."""
    by_row, by_column = QuantSpec.parse("e4m3/row"), QuantSpec.parse("e4m3/column")

    def casts(x, w, fold, fold_t):
        y = (x.float() * 0.37).to(torch.bfloat16) * w
        a, b, c = quantize(y, by_row, fold), quantize(y, by_column, fold_t), quantize(x, by_row, order="both")
        d = quantize(x, by_row, scale=c.scale, order="columns")
        return y, a.data, a.scale, b.data, b.scale, c.data, c.other_order, c.scale, d.data

    x, w, (fold_t, fold) = matrix((48, 272), broken=True), torch.rand(272, device=DEVICE).bfloat16(), factors((48, 272))
    torch._dynamo.reset()
    y, *actual = torch.compile(casts, fullgraph=True, dynamic=False)(x, w, fold, fold_t)
    both = reference.quantize(x, by_row, None, order="both")
    given = reference.quantize(x, by_row, None, scale=both[-1], order="columns")
    expected = [*reference.quantize(y, by_row, fold), *reference.quantize(y, by_column, fold_t)]
    assert difference([*expected, both[0], both[1].t(), both[2], given[0].t()], actual) is None


class Normed(nn.Module):
    """A norm as Llama's."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(4096) + 0.5), 1e-6

    def forward(self, x):
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(4096, 4096, bias=False) for _ in range(2))
        self.down, self.act = nn.Identity(), nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


def test_fused_modules_run_triton_with_the_reference_s_bits_in_fewer_kernels_and_less_time():
    own = nn.Sequential(Normed(), Gated()).to(DEVICE, torch.bfloat16)
    precision = octavo.Precision(matmul="bf16", activations="fused")
    fused = octavo.convert(copy.deepcopy(own), precision=precision, verbose=False)
    x, g = (torch.randn(8192, 4096, device=DEVICE).bfloat16() for _ in range(2))
    expected, actual = (forward_backward(module, x, g) for module in (own, fused))
    with ExitStack() as stack:
        for name in ("rms_norm", "rms_norm_backward", "glu", "glu_backward"):
            stack.enter_context(OPS[name].force("reference"))
        assert difference(forward_backward(fused, x, g), actual) is None
    assert low_sqnr(expected, actual, 35) is None
    kernels, times = [], []
    for module in (own, fused):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            forward_backward(module, x, g)
        kernels.append(sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events()))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            forward_backward(module, x, g)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    assert kernels[1] <= kernels[0] - 17 and times[1] < times[0]


def test_work_goes_to_the_current_stream():
    layer = converted("rowwise", 1024, 1024).to(DEVICE)
    x, g = (torch.randn(2048, 1024, device=DEVICE).bfloat16() for _ in range(2))
    expected = forward_backward(layer, x, g)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = x * 1.0  # not there yet when the host goes on
        actual = forward_backward(layer, late, g)
    stream.synchronize()
    assert low_sqnr(expected, actual, 55) is None


def test_running_out_of_memory_is_not_remembered():
    sizes = [1 << 50, 16]

    def probe(backend, device, case):
        torch.empty(sizes.pop(0), dtype=torch.uint8, device=device)

    op = Op(name="tried", cases={"only": ("only",)}, probe=probe)
    op.backends["triton"] = Backend(name="triton", run=lambda: None)
    op.backends["reference"] = Backend(name="reference", run=lambda: None)
    with pytest.raises(torch.OutOfMemoryError):
        op.choose(DEVICE, ("only",))
    assert op.choose(DEVICE, ("only",)).name == "triton"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize(("window", "heads", "size"), [(None, 4, 64), (None, 2, 128), (40, 4, 64), (None, 4, 20)])
def test_variable_length_attention_is_masked_attention(window, heads, size):
    """Of two rows of documents, forward and gradients, without a wait of the host, eager and compiled."""
    register()
    lengths = (200, 1, 55), (3, 1, 250, 2)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]).to(DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        offsets = document_offsets(positions, 7)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    document = (positions == 0).cumsum(1)
    before = torch.arange(256, device=DEVICE)[:, None] - torch.arange(256, device=DEVICE)
    mask = (document[:, :, None] == document[:, None]) & (before >= 0) & (before < (window or 256))
    generator = torch.Generator(DEVICE).manual_seed(0)
    leaves = [torch.randn(2, h, 256, size, device=DEVICE, generator=generator) for h in (4, heads, heads, 4)]
    q, k, v, g = (leaf.bfloat16() for leaf in leaves)
    module, settings = nn.Module(), {"scaling": 0.2, "sliding_window": window}

    def packed(q, k, v):
        return attention(module, q, k, v, offsets, **settings)[0].transpose(1, 2)

    def masked(q, k, v):
        q, k, v = (t.float() for t in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, mask[:, None], scale=0.2, enable_gqa=True)

    torch._dynamo.reset()
    results = []
    for function in (masked, packed, torch.compile(packed, fullgraph=True, dynamic=False)):
        own = [t.clone().requires_grad_() for t in (q, k, v)]
        y = function(*own)
        results.append([y.detach(), *torch.autograd.grad(y, own, g.to(y.dtype))])
    for actual in results[1:]:
        assert low_sqnr(results[0], actual, 40) is None
