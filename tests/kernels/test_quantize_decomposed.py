"""quantize as torch.compile sees it: the reference's bytes, in operations that Inductor may fuse but not change."""

import json

import pytest
import torch
from benchmarks.compiled import pretend
from compiling import run_python

from octavo.kernels import quantize, quantize_pair
from octavo.kernels.quantize import decomposed, reference
from octavo.numerics.spec import QuantSpec
from support.graphs import compiled

SPECS = ("e4m3/row", "e4m3/column", "e4m3/tensor", "e5m2/tensor", "e4m3/row/pow2")
ROW, COLUMN = QuantSpec.parse("e4m3/row"), QuantSpec.parse("e4m3/column")


def matrix(dtype, rows=40, columns=272):
    """Odd sizes, all magnitudes, a zero row, and NaN and infinities of both signs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).mul(8).exp2()
    x[3], x[5, 7], x[6, 9], x[7, 11], x[9, 1] = 0, float("nan"), float("inf"), -float("inf"), -0.0
    return x.to(dtype)


def assert_same_bytes(expected, actual):
    assert len(expected) == len(actual)
    for index, (want, got) in enumerate(zip(expected, actual, strict=True)):
        assert want.shape == got.shape and want.dtype == got.dtype, index
        assert torch.equal(want.contiguous().view(torch.uint8), got.contiguous().view(torch.uint8)), index


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("text", SPECS)
def test_the_decomposition_gives_the_reference_bytes(text, dtype):
    x, spec = matrix(dtype), QuantSpec.parse(text)
    strided = matrix(dtype, 272, 40).t()
    folds = [None, torch.rand(40, 1) * 1e-3, torch.rand(1, 272) * 1e3]
    for source in (x, strided):
        for fold in folds:
            for order in ("rows", "columns", "both"):
                expected = reference.quantize(source, spec, fold, order=order)
                for fuse_with in (None, torch.rand(80, 1)):
                    actual = decomposed.quantize(source, spec, fold, None, None, order, fuse_with)
                    assert_same_bytes(expected, actual)
                    assert [t.stride() for t in expected] == [t.stride() for t in actual]
    scale = reference.quantize(x, spec, None)[-1] / 3  # too small: saturates
    for given in ({"scale": scale, "amax": None}, {"amax": scale * 448, "scale": None}):
        expected = reference.quantize(x, spec, None, order="both", **given)
        actual = decomposed.quantize(x, spec, None, order="both", fuse_with=torch.rand(80, 1), **given)
        assert_same_bytes(expected, actual)


def graph_of(function, *arguments):
    graphs, function = compiled(function)
    results = function(*arguments)
    return [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"], results


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, at the import of its compiler
class TestGraphs:
    def test_have_no_opaque_casts_but_where_inductor_would_reduce_and_transpose(self):
        def casts(x, fold, fold_t):
            a, b = quantize(x, ROW, fold), quantize(x, ROW, order="both")
            c = quantize(x, ROW, scale=a.scale, order="columns")
            return a.data, a.scale, b.data, b.other_order, c.data

        def transposing(x, fold, fold_t):
            a, b = quantize_pair(x, ROW, fold, COLUMN, fold_t)
            c = quantize(x, ROW, order="columns")
            return a.data, a.scale, b.data, b.scale, c.data, c.scale

        arguments = matrix(torch.bfloat16), torch.rand(1, 272), torch.rand(40, 1)
        for function, ops in ((casts, []), (transposing, ["octavo.quantize.default", "octavo.quantize_pair.default"])):
            targets, results = graph_of(function, *arguments)
            assert sorted(t for t in targets if "octavo" in t) == ops
            assert any("_to_copy" in t for t in targets) != bool(ops)
            assert_same_bytes(function(*arguments), results)

    @pytest.mark.parametrize("text", ["e4m3/1x32/e8m0", "e4m3/1x128", "e4m3/row"])
    def test_keep_the_op_for_scales_by_block_and_empty_matrices(self, text):
        x, spec = torch.randn(8 if "x" in text else 0, 64), QuantSpec.parse(text)
        targets, _ = graph_of(lambda x: quantize(x, spec).data, x)
        assert targets.count("octavo.quantize.default") == 1

    def test_serve_other_lengths_where_sizes_are_symbolic(self):
        """A cast that pads to 16 bytes would be compiled again for each length; it stays an op."""

        def casts(x):
            row, both = quantize(x, ROW), quantize(x, ROW, order="both")
            return row.data, row.scale, both.other_order

        x = matrix(torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        targets, results = graph_of(casts, x)
        assert targets.count("octavo.quantize.default") == 1 and any("_to_copy" in t for t in targets)
        assert_same_bytes(casts(x), results)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # Inductor's imports warn of torch's own deprecated parts
def test_inductor_casts_what_a_bf16_tensor_holds():
    """Inductor does not round bf16 results that it fuses: y is float32 in its kernel. The cast must round it."""

    def fused(x, w, fold, fold_t):
        y = (x.float() * 0.37).to(torch.bfloat16) * w
        a, b = quantize(y, ROW, fold), quantize(y, COLUMN, fold_t, order="both")
        return y, a.data, a.scale, b.other_order, b.scale

    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(48, 272, generator=generator).bfloat16(), torch.rand(272, generator=generator).bfloat16()
    fold, fold_t = torch.rand(1, 272, generator=generator), torch.rand(48, 1, generator=generator)
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        y, *results = torch.compile(fused, fullgraph=True)(x, w, fold, fold_t)
    assert not torch.equal(y, fused(x, w, fold, fold_t)[0])  # the hazard is there
    expected = [*reference.quantize(y, ROW, fold), *reference.quantize(y, COLUMN, fold_t)]
    assert_same_bytes(expected, results)


pretends = pytest.mark.skipif(pretend.missing() is not None, reason=str(pretend.missing()))


@pretends
@pytest.mark.slow
def test_what_inductor_makes_of_a_decoder_layer(tmp_path):
    """Python for the casts of seven gradients alone; kernels, traffic and kept bytes as docs/compile.md has them."""
    file = tmp_path / "compiled.json"
    run_python("-m", "benchmarks", "compiled", "--only", "bf16", "octavo rowwise", "--json", str(file))
    bf16, rowwise = json.loads(file.read_text())["rows"]
    assert rowwise["opaque"] == 7 and rowwise["kernels"] <= 59
    assert rowwise["forward"]["generated"] == 12 and rowwise["backward"]["generated"] <= 24
    assert rowwise["forward"]["gigabytes"] < 1.02 * bf16["forward"]["gigabytes"]
    assert rowwise["backward"]["gigabytes"] < 7.7
    assert rowwise["kept_bytes_per_token"] < 0.67 * bf16["kept_bytes_per_token"]
