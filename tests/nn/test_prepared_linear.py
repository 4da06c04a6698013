"""Linears that run from a plan: bits, saved tensors, errors and memory of the ordinary path, which runs where it must.

CPU tensors take the GPU path: the reference, with plans, quantizes in place of Triton (`tests/kernels/test_direct.py`
compares these plans), and `cublas_rules` computes the products.
"""

import copy
import gc
import itertools
import sys
import weakref
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from casts import set_steady
from cublas_rules import Rules, install
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import BaseTorchDispatchMode
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.kernels import registry
from octavo.kernels.gemm import SCALED_MM
from octavo.kernels.quantize import QUANTIZE, QUANTIZE_PAIR, reference
from octavo.kernels.registry import Backend
from octavo.nn import prepared_linear
from support.dispatch_modes import Passing

LINEAR = sys.modules["octavo.nn.linear"]
RECIPES = list(octavo.RECIPES)


class Plan:
    """Runs the reference as a plan of Triton's backend runs kernels: strides and a fold's shape are the planned."""

    rows_transposed = columns_transposed = False

    def __init__(self, x, spec, fold, amax, scale, order):
        self.spec, self.fold, self.scale, self.order = spec, fold, scale is not None, order
        self.planned = x.dtype, x.shape, x.stride()

    def run(self, x, fold, fold_t, scale, zeros):
        assert self.planned == (x.dtype, x.shape, x.stride())
        fold = None if fold is None else fold.reshape(self.fold.shape)
        *data, s = [*reference.quantize(x, self.spec, fold, None, scale, self.order), *[scale] * self.scale]
        q = data[0].t() if self.order == "columns" else data[0]
        return self.oriented(q, q if self.order == "rows" else data[-1].t(), s, s)

    def transposing(self, rows, columns):
        plan = copy.copy(self)
        plan.rows_transposed, plan.columns_transposed = rows, columns
        return plan

    def oriented(self, q, q_t, s, s_t):
        if self.columns_transposed:
            s_t = s_t.reshape(s_t.shape[::-1])
            s = s_t if self.order == "columns" else s
            q_t, q = q_t.t(), q_t.t() if self.order == "columns" else q
        return q.t() if self.rows_transposed and self.order != "columns" else q, q_t, s, s_t


class PairPlan(Plan):
    order = "pair"

    def __init__(self, x, spec, fold, spec_t, fold_t):
        self.plans = Plan(x, spec, fold, None, None, "rows"), Plan(x, spec_t, fold_t, None, None, "columns")

    def run(self, x, fold, fold_t, scale, zeros):
        q, _, s, _ = self.plans[0].run(x, fold, None, None, zeros)
        _, q_t, s_t, _ = self.plans[1].run(x, fold_t, None, None, zeros)
        return self.oriented(q, q_t, s, s_t)


@pytest.fixture(autouse=True)
def on_gpu_path(monkeypatch):
    registry.GPU_TYPES.add("cpu")
    install(monkeypatch, Rules())
    prepared_linear._PLANS.clear(), prepared_linear._MATCHES.clear()
    monkeypatch.setitem(QUANTIZE.backends, "planned", Backend(name="planned", run=reference.quantize, plan=Plan))
    monkeypatch.setitem(
        QUANTIZE_PAIR.backends, "planned", Backend(name="planned", run=reference.quantize_pair, plan=PairPlan)
    )
    with QUANTIZE.force("planned"), QUANTIZE_PAIR.force("planned"), SCALED_MM.force("torch_scaled"):
        yield
    registry.GPU_TYPES.remove("cpu")


@contextmanager
def counted():
    """Count forwards and backwards that ran from a plan."""
    counts = {"forward": 0, "backward": 0}

    def count(owner, name, key, number=1):
        function = getattr(owner, name)

        def counting(*arguments):
            counts[key] += number
            return function(*arguments)

        return mock.patch.object(owner, name, staticmethod(counting) if key == "forward" else counting)

    with (
        count(prepared_linear._PlannedLinear, "forward", "forward"),
        count(prepared_linear._PlannedLinear._backward_cls, "apply", "backward"),
        count(prepared_linear.PreparedLinear, "_ordinary", "backward", -1),
    ):
        yield counts


def ordinary():
    return mock.patch.object(LINEAR, "planned_linear", return_value=None)


def run(layer, x, g, hooks=nullcontext, scale=2.0):
    """Return Y, the gradients, and what was saved for backward; X has a `grad_fn`, as inside a model."""
    recipe, layer = layer.recipe, copy.deepcopy(layer)
    layer.recipe = recipe  # plans are found by its identity
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    saved = []
    with saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t) if hooks is nullcontext else hooks():
        y = layer(leaf * scale if leaf.requires_grad else leaf)
    if y.requires_grad:
        y.backward(g)
    results = [y, leaf.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad]
    return results, saved


def same(expected, actual):
    assert len(expected) == len(actual)
    for e, a in zip(expected, actual, strict=True):
        assert (e is None) == (a is None)
        if e is not None:
            assert e.dtype == a.dtype and e.shape == a.shape and e.stride() == a.stride()
            assert torch.equal(e.contiguous().view(torch.uint8), a.contiguous().view(torch.uint8))


def layer_of(recipe="rowwise", bias=False, dtype=torch.bfloat16, frozen=False, **options):
    torch.manual_seed(0)
    layer = octavo.convert(nn.Linear(32, 48, bias=bias, dtype=dtype), recipe, verbose=False, **options)
    set_steady(layer, torch.randn(8, 32, dtype=dtype))
    layer.weight.requires_grad_(not frozen)
    return layer


CASES = [
    *({"recipe": name, "bias": True, "shape": (2, 8)} for name in RECIPES),
    *({"recipe": name, "keep_weights": True} for name in RECIPES),
    {"frozen": True}, {"frozen": True, "keep_weights": True}, {"inputs": False}, {"inputs": False, "bias": True},
    {"frozen": True, "inputs": False}, {"dtype": torch.float32, "shape": (5,)}, {"shape": (2, 3, 4), "bias": True},
    {"dtype": torch.float32, "autocast": True, "bias": True}, {"recipe": "rowwise_hp_wgrad", "frozen": True},
    {"recipe": "rowwise_hp_wgrad", "inputs": False}, {"recipe": "blockwise", "inputs": False}, {"shape": (1,)},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_plans_compute_and_save_what_the_ordinary_path_does(case):
    """The first call leaves the plan, later ones run it. G of other strides has a plan of its own."""
    case = dict(case)
    shape, inputs, autocast = case.pop("shape", (16,)), case.pop("inputs", True), case.pop("autocast", False)
    layer = layer_of(**case)
    x = torch.randn(*shape, 32, dtype=case.get("dtype", torch.bfloat16)).requires_grad_(inputs)
    grad = torch.randn(*shape, 48, dtype=torch.bfloat16 if autocast else x.dtype)
    gradients = [*[grad] * 4, *[grad[..., :1].expand_as(grad)] * 3]
    gradients += [grad.mT.contiguous().mT if len(shape) == 2 else grad] * 3
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for g in gradients:
            with ordinary():
                expected, saved = run(layer, x, g)
            with counted() as counts:
                actual, saved_now = run(layer, x, g)
            same(expected, actual)
            same(saved, saved_now)
            assert counts == {"forward": 1, "backward": int(actual[0].requires_grad)}


def test_planned_passes_end_and_plans_with_channel_scales_serve_no_forward_without():
    layer, x = layer_of("rowwise_equalized"), torch.randn(16, 32, dtype=torch.bfloat16)
    recipe = layer.recipe
    for count in range(3):
        with counted() as counts:
            layer(x.clone().requires_grad_() * 1).sum().backward()
        assert counts["forward"] == 1 and layer.equalizer.passes == 33 + count
    with ordinary():
        expected = octavo.nn.linear(x, layer.weight, None, recipe)
    for _ in range(2):
        assert torch.equal(octavo.nn.linear(x, layer.weight, None, recipe), expected)
        layer(x)


def test_one_plan_serves_equal_signatures_and_no_others():
    layer, x = layer_of(), torch.randn(16, 32, dtype=torch.bfloat16).requires_grad_()
    sizes = []
    one_row = x.t().contiguous().t()[:1]
    for input in (x, x, x + 1, x[:8], x.t().contiguous().t(), x.reshape(2, 8, 32), x.detach(), x * 2, one_row, one_row):
        layer(input)
        sizes.append(len(prepared_linear._PLANS))
    assert sizes == [1, 1, 1, 2, 3, 4, 5, 5, 6, 6]


def test_siblings_share_casts_between_plans_and_the_ordinary_path():
    first, frozen = layer_of(), layer_of(frozen=True)
    x = torch.randn(16, 32, dtype=torch.bfloat16).requires_grad_() * 1
    with mock.patch.object(prepared_linear.INPUT_CASTS, "entry", None):
        first(x)
        ((key, cast),) = prepared_linear.INPUT_CASTS.casts_of(x).items()
        with ordinary():
            first(x), frozen(x)
        frozen(x)
        assert list(prepared_linear.INPUT_CASTS.casts_of(x)) == [key]
        assert prepared_linear.INPUT_CASTS.casts_of(x)[key] is cast


def octavos(mode):
    """The number of our ops that a mode has seen."""
    return sum("octavo" in str(function) for function in mode.seen)


def test_the_ordinary_path_runs_where_something_sees_the_ops():
    layer, x, g = layer_of(), torch.randn(16, 32).bfloat16().requires_grad_(), torch.randn(16, 48).bfloat16()
    expected = run(layer, x, g)[0]
    with counted() as counts, Passing() as mode:
        same(expected, run(layer, x, g)[0])
    assert counts == {"forward": 0, "backward": 0} and octavos(mode) > 4
    y = layer(x)
    with counted() as counts, Passing() as mode:
        y.backward(g)
    assert counts["backward"] == 0 and octavos(mode) > 1
    with SCALED_MM.force("reference"):  # the stand-in for cuBLAS reads addresses, which traced tensors lack
        expected = layer(x)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        with counted() as counts:
            assert torch.equal(compiled(x), expected)
    assert counts["forward"] == 0
    with counted() as counts, octavo.disabled():
        layer(x)
    assert counts["forward"] == 0


def test_gradients_that_nothing_needs_are_not_computed():
    layer, g = layer_of(), torch.randn(16, 48).bfloat16()
    x = torch.randn(16, 32).bfloat16().requires_grad_()
    expected = run(layer, x, g, scale=1.0)[0]
    for _ in range(4):
        layer(x).backward(g)
    for wanted, index in ((x, 1), (layer.weight, 2), (x, 1)):
        y = layer(x)
        with mock.patch.object(torch, "_scaled_mm", wraps=torch._scaled_mm) as product:
            (gradient,) = torch.autograd.grad(y, wanted, g)
        same([expected[index]], [gradient])
        assert product.call_count == 1
        x.grad = layer.weight.grad = None
        layer(x).backward(g)
        same(expected[1:3], [x.grad, layer.weight.grad])


def test_what_a_deleted_weight_left_is_dropped():
    """Another weight may have its id, and siblings that read its input."""
    layer, x = layer_of(), torch.randn(16, 32, dtype=torch.bfloat16)
    layer(x)
    with torch.no_grad():
        layer(x)
    keys = {id(layer.weight), -id(layer.weight)}
    matches = {key: prepared_linear._MATCHES[key] for key in keys}
    layer(x)
    assert all(prepared_linear._MATCHES[key] is matches[key] for key in keys)  # neither mode replaces the other's
    del layer, matches
    gc.collect()
    assert not keys & prepared_linear._MATCHES.keys()


def shifted(x):
    """The same values and strides, an element after a multiple of 16 bytes."""
    if 0 in x.stride() or not x.numel():  # of which elements share memory
        return x
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return torch.empty(2 + last, dtype=x.dtype)[1:].as_strided(x.shape, x.stride()).copy_(x)


@pytest.mark.parametrize(
    ("recipe", "keep_weights"), [("rowwise", True), ("tensorwise", False), ("rowwise_equalized", False)]
)
def test_unaligned_tensors_are_copied(recipe, keep_weights):
    """A bias, and what hooks return for saved tensors: cuBLAS, whose rules the stand-in checks, takes none of these."""
    layer, g = layer_of(recipe, True, keep_weights=keep_weights), torch.randn(16, 48).bfloat16()
    x = torch.randn(16, 32).bfloat16().requires_grad_()
    for _ in range(4):
        expected = run(layer, x, g)[0]
    layer.bias.data = shifted(layer.bias.data)
    hooks = lambda: saved_tensors_hooks(lambda t: t, lambda t: t if t is layer.weight else shifted(t))  # noqa: E731
    for context in (hooks, nullcontext):
        x.grad = None
        layer.zero_grad()
        with context():
            y = layer(x * 2.0)
        y.backward(g)
        same(expected, [y, x.grad, layer.weight.grad, layer.bias.grad])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # forward mode uses it
@pytest.mark.parametrize("kind", ["forward mode", "batched"])
def test_other_derivatives_raise_as_before(kind):
    layer, x = layer_of(), torch.randn(16, 32).bfloat16().requires_grad_()
    layer(x).sum().backward()
    for context in (ordinary, nullcontext):
        with context(), forward_ad.dual_level(), pytest.raises(RuntimeError, match="works with ordinary backward only"):
            if kind == "batched":
                y = layer(x)
                torch.autograd.grad(y, x, torch.ones(2, *y.shape).bfloat16(), is_grads_batched=True)
            else:
                layer(forward_ad.make_dual(x, torch.ones_like(x)))


def test_new_choices_of_the_registry_end_a_plan():
    layer, x, g = layer_of(), torch.randn(16, 32).bfloat16().requires_grad_(), torch.randn(16, 48).bfloat16()
    expected = run(layer, x, g)[0]
    with counted() as counts, QUANTIZE.force("reference"):
        same(expected, run(layer, x, g)[0])
    assert counts == {"forward": 0, "backward": 0}
    layer(x).backward(g)  # leaves a plan of backward, made before the choice changes
    y = layer(x)
    with counted() as counts, QUANTIZE.force("reference"):
        y.backward(g)
    assert counts["backward"] == 0
    with counted() as counts:
        same(expected, run(layer, x, g)[0])
    assert counts == {"forward": 1, "backward": 1}


def test_errors_are_those_of_the_ordinary_path():
    layer, x = layer_of(bias=True), torch.randn(16, 32).bfloat16()
    layer(x)
    wrong = [x.float(), x[:, :16], x.int(), torch.tensor(1.0).bfloat16(), x.to("meta")]
    for input, context in itertools.product(wrong, (ordinary, nullcontext)):
        with context(), pytest.raises((ValueError, TypeError, IndexError, RuntimeError, NotImplementedError)) as error:
            layer(input)
        if context is ordinary:
            expected = repr(error.value)
    assert repr(error.value) == expected
    with pytest.raises(ValueError, match="bias must be"):
        octavo.nn.linear(x, layer.weight, torch.zeros(47).bfloat16(), layer.recipe)


def test_saved_tensors_are_unpacked_once():
    """Also where backward starts from a plan and takes the ordinary path: checkpointing gives each out once."""
    layer, x, g = layer_of(), torch.randn(16, 32).bfloat16().requires_grad_(), torch.randn(16, 48).bfloat16()
    expected = torch.autograd.grad(layer(x), x, g)
    with counted() as counts:
        y = checkpoint(layer, x, use_reentrant=False)
        with BaseTorchDispatchMode():  # no plan runs inside of a mode
            same(expected, torch.autograd.grad(y, x, g))
    assert counts == {"forward": 1, "backward": 0}


def test_nothing_outlives_its_graph():
    layer, x = layer_of(), torch.randn(16, 32).bfloat16().requires_grad_()
    for _ in range(2):
        y = layer(x * 1)
        nodes = [weakref.ref(y.grad_fn)]
        saved = [weakref.ref(t) for t in y.grad_fn.saved_tensors if t is not None]
        y.backward(torch.ones_like(y))
        del y
        gc.collect()
        assert len(saved) == 4 and all(ref() is None for ref in (*nodes, *saved))
    todo, visited = [*prepared_linear._PLANS.values()], set()
    while todo:
        item = todo.pop()
        assert not isinstance(item, torch.Tensor) or bool((item == 1).all()), item.shape  # unit scales
        if id(item) not in visited and not isinstance(item, type | type(gc)):
            visited.add(id(item))
            if type(item).__module__.startswith(("octavo", "builtins", "operator")) and not hasattr(
                item, "__globals__"
            ):
                todo += gc.get_referents(item)


def test_a_layer_whose_casts_nobody_reads_keeps_few_of_them():
    """Keeping one costs the host as much as a launch; siblings that read a cast do so as long as they do."""
    alone, first, second = layer_of(), layer_of(), layer_of()
    x = torch.randn(16, 32, dtype=torch.bfloat16).requires_grad_()

    def kept(*layers):
        tensor = x * 1
        with mock.patch.object(prepared_linear.INPUT_CASTS, "entry", None):
            for layer in layers:
                layer(tensor)
            return prepared_linear.INPUT_CASTS.entry is not None

    passes = [kept(alone) for _ in range(70)]
    assert passes[:9] == [True] * 9 and passes.count(True) == 10  # the first makes a plan
    assert all(kept(first, second) for _ in range(20))
    assert sum(kept(first) for _ in range(20)) == 8  # as many before it stops
