"""Saved-tensor compression and sources: what the hooks keep, and how they compose with others'."""

import gc
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from families import batch_of, model_of, train_step
from test_composition import CHECKPOINTING
from test_modules import BOTH, ONLY_ACTIVATIONS, by_matmul, flat, storing
from torch import nn

import octavo
from octavo.activations.functional import activation_saving_fp8
from octavo.activations.recompute import RECOMPUTABLE, Rematerializer, dequantize_saved, quantize_for_backward
from octavo.activations.saved_tensors import MIN_COMPRESS_NUMEL, _decompress, as_matrix, compressed, dense_strides
from octavo.nn.memory_audit import saved_for_backward
from octavo.numerics import E4M3, sqnr
from octavo.train.compiled_blocks import Checkpointing
from tensors import randn, same

WEIGHT, OTHER = (nn.Parameter(randn(64, 64, seed=seed)) for seed in (1, 2))
SMALL = nn.Parameter(randn(64, 4, seed=3))


def scoped(function, *arguments, module=None):
    """Under the hooks of a scope."""
    return compressed(Owner() if module is None else module, (), function, *arguments)


class Owner(nn.Module):
    """A module whose linear has the weight that these tests multiply by."""

    def __init__(self, *weights):
        super().__init__()
        self.linears = nn.ModuleList()
        for weight in weights or (WEIGHT, OTHER, SMALL):
            self.linears.append(nn.Linear(1, 1, bias=False))
            self.linears[-1].weight = weight


ACTIVATIONS = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}  # fmt: skip


def activation(x, name="silu"):
    return activation_saving_fp8(x, ACTIVATIONS[name](x.detach()), name)


LAYOUTS = {
    "contiguous": lambda x: x,
    "heads": lambda x: x.transpose(1, 2),
    "a third of a joint product": lambda x: x[..., 8:24],
    "repeated": lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1),
    "odd sizes": lambda x: x[:, 1:, :3, 5:],
    "columns": lambda x: x.flatten(2).transpose(1, 2),
    "one axis of length one": lambda x: x[:, :1].transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_stored_tensor_comes_back_in_its_layout(layout, dtype):
    was = LAYOUTS[layout](randn(4, 33, 6, 32).to(dtype))
    restore = partial(_decompress, was.dtype, was.shape, dense_strides(was))
    is_ = restore(quantize_for_backward(as_matrix(was)))
    assert (was.shape, was.dtype) == (is_.shape, is_.dtype) and sqnr(was, is_) >= E4M3.tolerance_db
    order = [d for d in range(was.ndim) if was.shape[d] > 1 and was.stride(d) > 0]
    assert sorted(order, key=was.stride) == sorted(order, key=is_.stride)


@pytest.mark.parametrize(
    "make",
    [
        lambda: randn(64, 64),  # a mask or a table: autograd did not make it
        lambda: randn(MIN_COMPRESS_NUMEL // 64 - 1, 64).requires_grad_() * 1,
        lambda: randn(64, 64).double().requires_grad_() * 1,
        lambda: (randn(1, 64).requires_grad_() * 1).expand(64, 64),
    ],
    ids=["no gradient", "small", "float64", "repeated"],
)
def test_what_is_no_activation_comes_back_bit_for_bit(make):
    x = make()
    weight = nn.Parameter(WEIGHT.detach().to(x.dtype))
    y = scoped(torch.mm, x, weight, module=Owner(weight))
    assert torch.equal(torch.autograd.grad(y.sum(), weight)[0], x.t() @ torch.ones_like(y))


DERIVED = {
    "scaled": lambda w: w * 2.0,
    "normed": lambda w: w / w.norm(dim=1, keepdim=True),
    "of another module": lambda w: OTHER,
    "a cast": lambda w: w.double().float(),
    "a sum": lambda w: w + OTHER,
    "merged adapters": lambda w: w + 0.5 * SMALL @ SMALL.t(),
    "masked": lambda w: w.masked_fill(torch.eye(64).bool(), 0.0),
    "a part": lambda w: torch.cat([w, OTHER])[:64].t(),
}


@pytest.mark.parametrize("name", DERIVED)
def test_what_is_made_of_parameters_alone_is_never_rounded(name):
    x = randn(64, 64).requires_grad_()
    y = scoped(lambda h: h @ DERIVED[name](WEIGHT), x * 1)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.ones(64, 64) @ DERIVED[name](WEIGHT).t())


def test_activations_behind_which_there_are_only_parameters_are_rounded():
    """As in the first layer of a language model; with as many tokens as a weight has rows, too."""
    embedding, first, second = nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
    module = nn.ModuleList([embedding, first, second])
    with saved_for_backward(module) as kept:
        scoped(lambda: second(first(embedding(torch.arange(64)))), module=module)
    assert kept.by_dtype[torch.float8_e4m3fn] == 2 * 64 * 64


def test_tensors_that_share_elements_are_stored_once():
    x = randn(2, 32, 4, 32).requires_grad_() * 1
    weights = [nn.Parameter(randn(128, 128, seed=seed)) for seed in (1, 2)]
    module = Owner(*weights)
    with saved_for_backward(module) as kept:
        y = scoped(lambda: [x.flatten(2).flatten(0, 1) @ weights[0], x.view(-1, 128) @ weights[1]], module=module)
    assert kept.bytes == x.numel() * 33 // 32 and y[0].grad_fn is not None


def test_a_tensor_that_one_operation_needs_exactly_is_exact_for_all():
    x = randn(64, 64).requires_grad_() * 1
    with saved_for_backward(nn.ParameterList([WEIGHT])) as kept:
        y = scoped(lambda: (x @ WEIGHT).sum() + x.exp().sum() + (x.exp() @ WEIGHT).sum() + x.pow(2).sum())
    assert kept.by_dtype.keys() == {torch.float32}
    assert torch.equal(torch.autograd.grad(y, WEIGHT, retain_graph=True)[0] * 0, torch.zeros(64, 64))


def test_a_tensor_written_to_is_refused_as_autograd_does():
    for operation in (lambda x: x @ WEIGHT, torch.sin):
        for call in (scoped, lambda function: function()):
            x = randn(64, 64).requires_grad_() * 1
            y, _ = call(lambda x=x, operation=operation: (operation(x), x.mul_(3)))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def test_backward_inside_of_forward():
    x = randn(64, 64).requires_grad_() * 1

    def penalty():
        y = (x @ WEIGHT).square()
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.sum() + grad.square().sum()

    expected = torch.autograd.grad(penalty(), WEIGHT)[0]
    assert sqnr(expected, torch.autograd.grad(scoped(penalty), WEIGHT)[0]) > 20


def test_what_fails_in_forward_leaves_nothing_behind():
    x = randn(64, 64).requires_grad_() * 1
    with pytest.raises(ZeroDivisionError):
        scoped(lambda: (x @ WEIGHT, 1 / 0))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    with saved_for_backward(nn.ParameterList([WEIGHT])) as kept:
        x @ WEIGHT
    assert kept.bytes == x.nbytes


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_keeps_what_it_combines_exactly_and_its_projection_shares_it(attention):
    """SDPA saves q, k, v, its output and its statistics; the output projection reads that output, in FP8 too."""
    for precision in (ONLY_ACTIVATIONS, BOTH):
        model = model_of("llama", attention=attention).layers[0].self_attn
        storing(model, precision)
        h = randn(2, 64, 128).requires_grad_() * 1
        tables = torch.ones(1, 64, 32), torch.zeros(1, 64, 32)
        with saved_for_backward(model) as kept:
            model(h, position_embeddings=tables, attention_mask=None)
        tokens, widths = 2 * 64, 128 + 64 + 64 + 128  # q, k, v, out
        if attention == "sdpa":
            exact = tokens * (widths + 4) + 2 * tables[0].numel() + 4 * 128  # statistics, tables, scales of weights
            assert kept.by_dtype[torch.float32] <= 4 * exact
            assert kept.by_dtype[torch.float8_e4m3fn] == tokens * 128  # X of q, k and v, which no norm made


def test_a_registered_tensor_serves_views_and_no_other():
    x = randn(4, 16, 64).requires_grad_() * 1
    y = activation(x, "silu")
    whole, viewed, detached = (RECOMPUTABLE.find(t, None) for t in (y, y.reshape(64, 64), y.detach()))
    assert whole is viewed is detached is not None
    for other in (y[:2], y.transpose(0, 1), y.clone(), y + 0, x):
        assert RECOMPUTABLE.find(other, None) is None
    y.mul_(2)
    assert RECOMPUTABLE.find(y, None) is None


def test_a_source_dies_with_its_tensor():
    before = set(RECOMPUTABLE.entries)
    y = activation(randn(16, 64).requires_grad_() * 1, "gelu")
    view = y.reshape(4, 4, 64)
    del y
    assert RECOMPUTABLE.find(view, None) is not None
    del view
    assert RECOMPUTABLE.entries.keys() == before


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "kind", "precision"),
    [
        ("llama", "full", ONLY_ACTIVATIONS), ("qwen3", "reentrant", BOTH), ("gemma3_text", "selective", BOTH),
        ("gpt2", "selective", ONLY_ACTIVATIONS), ("vit", "full", BOTH), ("cohere", "reentrant", ONLY_ACTIVATIONS),
    ],
)  # fmt: skip
def test_checkpointing_is_bitwise_neutral(family, kind, precision):
    model, batch = storing(model_of(family), precision), batch_of(family)
    expected = train_step(model, batch)
    block = next(module for name, module in model.named_modules() if name.endswith(("layers.0", "h.0")))
    forward = block.forward
    block.forward = lambda h, *args, **keywords: CHECKPOINTING[kind](lambda h: forward(h, *args, **keywords), h)
    actual = train_step(model, batch)
    assert torch.equal(expected[0], actual[0])
    assert same(expected[1], actual[1])


@pytest.mark.thorough
@by_matmul
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_the_trainers_checkpointing_is_bitwise_neutral(mode, precision):
    model, batch = storing(model_of("llama", layers=2, dtype=torch.bfloat16), precision), batch_of("llama")
    expected = train_step(model, batch)
    Checkpointing(model, mode)
    assert same(expected[1], train_step(model, batch)[1])


@by_matmul
@pytest.mark.parametrize(
    ("kind", "parts"), [("full", ("mlp", "self_attn")), ("selective", ("mlp", "self_attn")), ("all ours", ("",))]
)
def test_a_region_may_begin_anywhere_and_save_whatever_our_ops_give(kind, parts, precision):
    model, batch = storing(model_of("llama"), precision), batch_of("llama")
    expected = train_step(model, batch)[1]
    for module in map(model.layers[0].get_submodule, parts):
        module.forward = partial(CHECKPOINTING[kind], module.forward)
    assert same(expected, train_step(model, batch)[1])


@by_matmul
def test_hooks_around_see_what_is_kept_and_may_replace_it(precision):
    """As offload does."""
    model, batch = storing(model_of("gpt2"), precision), batch_of("gpt2")
    expected, packed = train_step(model, batch)[1], []

    def pack(tensor):
        packed.append(tensor.dtype)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        actual = train_step(model, batch)[1]
    assert same(expected, actual)
    assert packed.count(torch.float8_e4m3fn) >= 6


def test_nested_scopes():
    """A scope inside a scope: what is kept, and hooks around both, are as with one."""
    inner, packed = nn.Linear(64, 64, bias=False), []
    x = randn(64, 64).requires_grad_() * 1

    def pack(tensor):
        packed.append((tensor.dtype, tensor.shape))
        return tensor

    def gradient(call):
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = call()
        return torch.autograd.grad(y.sum(), inner.weight)[0], list(packed)

    one = gradient(lambda: scoped(inner, x, module=inner))
    two = gradient(lambda: scoped(lambda: scoped(inner, x, module=inner), module=inner))
    assert torch.equal(one[0], two[0]) and one[1] == two[1]


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, BOTH), (torch.float16, ONLY_ACTIVATIONS)])
def test_autocast_trains(dtype, precision):
    model, batch = storing(model_of("qwen3"), precision), batch_of("qwen3")
    plain = model_of("qwen3")
    with torch.autocast("cpu", dtype):
        expected, actual = train_step(plain, batch)[1], train_step(model, batch)[1]
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in actual.values())
    assert sqnr(flat(expected), flat(actual)) > (20 if precision is ONLY_ACTIVATIONS else 15)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_activations_are_those_at_the_stored_input(name):
    x = randn(32, 64).requires_grad_()
    values = ACTIVATIONS[name](x.detach())
    y = activation_saving_fp8(x, values, name)
    assert y.data_ptr() == values.data_ptr()
    at = dequantize_saved(*quantize_for_backward(x), torch.float32).requires_grad_()
    ACTIVATIONS[name](at).sum().backward()
    assert sqnr(at.grad, torch.autograd.grad(y.sum(), x)[0]) > 100


def test_tensors_of_inference_mode_pass():
    layer = octavo.convert(nn.Linear(64, 64), verbose=False)
    with torch.inference_mode():
        x = randn(64, 64)
    y = scoped(layer, x, module=layer)
    z = randn(64, 64).requires_grad_() * 1
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        scoped(nn.functional.linear, x, z)
    assert y.requires_grad


@by_matmul
def test_what_a_partial_backward_made_again_goes_when_it_ends(precision):
    def remakes():
        return [o for o in gc.get_objects() if issubclass(type(o), Rematerializer)]

    model, batch, others = storing(model_of("llama"), precision), batch_of("llama"), remakes()
    y = model(**batch).last_hidden_state
    torch.autograd.grad(y.sum(), model.layers[0].mlp.down_proj.weight, retain_graph=True)
    ours = [rematerializer for rematerializer in remakes() if not any(rematerializer is other for other in others)]
    assert len(ours) >= 4 and not any(rematerializer._memo for rematerializer in ours)


def test_a_second_derivative_is_refused_rather_than_wrong():
    y = scoped(torch.mm, randn(64, 64).requires_grad_() * 1, WEIGHT)
    with pytest.raises(RuntimeError, match=r"no second derivative.*octavo\.disabled"):
        torch.autograd.grad(y.sum(), WEIGHT, create_graph=True)


# --- what each operation keeps, by the names that the running release of torch gives its autograd nodes ---

SIZE = 64 * 64
SHAPES = {"square": (64, 64), "batch": (2, 32, 64), "heads": (1, 2, 32, 64), "image": (4, 4, 16, 16)}


def ends(groups):
    return torch.arange(1, groups + 1, dtype=torch.int32) * (64 // groups)


# Operation of activations x, y, z and a weight w of the dtype; which shape they have, and how many of the tensors that
# the operation saves are rounded and exact.
PRODUCTS = {
    "linear": (lambda x, y, z, w: F.linear(x, w(64, 64)), "square", 1, 0),
    "linear of a batch": (lambda x, y, z, w: F.linear(x, w(64, 64)), "batch", 1, 0),
    "linear with a bias": (lambda x, y, z, w: F.linear(x, w(64, 64), w(64)), "square", 1, 0),
    "linear of a batch with a bias": (lambda x, y, z, w: F.linear(x, w(64, 64), w(64)), "batch", 1, 0),
    "linear of a transposed batch": (lambda x, y, z, w: F.linear(x.transpose(0, 1), w(64, 64)), "batch", 1, 0),
    "mm": (lambda x, y, z, w: x @ w(64, 64), "square", 1, 0),
    "mm, weight first": (lambda x, y, z, w: w(64, 64) @ x, "square", 1, 0),
    "addmm": (lambda x, y, z, w: torch.addmm(w(64), x, w(64, 64)), "square", 1, 0),
    "addmm, weight first": (lambda x, y, z, w: torch.addmm(w(64), w(64, 64), x), "square", 1, 0),
    "bmm": (lambda x, y, z, w: torch.bmm(x, w(2, 64, 64)), "batch", 1, 0),
    "bmm, weight first": (lambda x, y, z, w: torch.bmm(w(2, 64, 32), x), "batch", 1, 0),
    "baddbmm": (lambda x, y, z, w: torch.baddbmm(w(2, 1, 64), x, w(2, 64, 64)), "batch", 1, 0),
    "baddbmm, weight first": (lambda x, y, z, w: torch.baddbmm(w(2, 1, 64), w(2, 64, 32), x), "batch", 1, 0),
    "einsum": (lambda x, y, z, w: torch.einsum("bsk,nk->bsn", x, w(64, 64)), "batch", 1, 0),
    "grouped_mm": (lambda x, y, z, w: F.grouped_mm(x, w(4, 64, 64), offs=ends(4)), "square", 1, 0),
    "conv1d": (lambda x, y, z, w: F.conv1d(x, w(32, 1, 4), groups=32), "batch", 1, 0),
    "conv2d": (lambda x, y, z, w: F.conv2d(x, w(8, 4, 4, 4), stride=4), "image", 1, 0),
    "mm of two activations": (lambda x, y, z, w: x @ y, "square", 0, 2),
    "bmm of two activations": (lambda x, y, z, w: torch.bmm(x.mT, y), "batch", 0, 2),
    "einsum of two activations": (lambda x, y, z, w: torch.einsum("bsk,btk->bst", x, y), "batch", 0, 2),
    "conv2d of two activations": (lambda x, y, z, w: F.conv2d(x, y), "image", 0, 2),
}
OTHERS = {
    "silu": (lambda x, y, z, w: F.silu(x), "batch", 1, 0),
    "gelu": (lambda x, y, z, w: F.gelu(x), "batch", 1, 0),
    "gelu_tanh": (lambda x, y, z, w: F.gelu(x, approximate="tanh"), "batch", 1, 0),
    "silu gate": (lambda x, y, z, w: F.silu(x) * y, "batch", 3, 0),
    "gelu gate": (lambda x, y, z, w: x * F.gelu(y), "batch", 3, 0),
    "relu gate": (lambda x, y, z, w: F.relu(x).reshape(64, 64) * y.view(64, 64), "batch", 1, 1),
    "product": (lambda x, y, z, w: x * y, "batch", 0, 2),
    "quotient": (lambda x, y, z, w: x / y, "batch", 0, 2),
    "maximum": (lambda x, y, z, w: torch.maximum(x, y), "batch", 0, 2),
    "atan2": (lambda x, y, z, w: torch.atan2(x, y), "batch", 0, 2),
    "dist": (lambda x, y, z, w: torch.dist(x, y), "batch", 0, 2),
    "relu": (lambda x, y, z, w: F.relu(x), "batch", 0, 1),
    "sigmoid": (lambda x, y, z, w: torch.sigmoid(x), "batch", 0, 1),
    "tanh": (lambda x, y, z, w: torch.tanh(x), "batch", 0, 1),
    "exp": (lambda x, y, z, w: torch.exp(x), "batch", 0, 1),
    "softplus": (lambda x, y, z, w: F.softplus(x), "batch", 0, 1),
    "square": (lambda x, y, z, w: x.pow(2), "batch", 0, 1),
    "cosine": (lambda x, y, z, w: x.cos(), "batch", 0, 1),
    "softmax": (lambda x, y, z, w: x.softmax(-1), "batch", 0, 1),
    "log_softmax": (lambda x, y, z, w: x.log_softmax(-1), "batch", 0, 1),
    "layer_norm": (lambda x, y, z, w: F.layer_norm(x, (64,), w(64), w(64)), "batch", 0, 1),
    "sdpa": (lambda x, y, z, w: F.scaled_dot_product_attention(x, y, z), "heads", 0, 4),
    "causal sdpa": (lambda x, y, z, w: F.scaled_dot_product_attention(x, y, z, is_causal=True), "heads", 0, 4),
}
CASES = PRODUCTS | OTHERS


def kept(operation, shape, dtype, autocast=False):
    """Elements that are kept in FP8, and in other floating dtypes, in units of an activation; no statistics."""
    generator = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(*shape, generator=generator).to(dtype).requires_grad_() * 1 for _ in range(3))
    weights = nn.ParameterDict()

    def weight(*size):
        if str(size) not in weights:
            weights[str(size)] = nn.Parameter(torch.randn(*size, generator=generator).to(dtype))
        return weights[str(size)]

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return operation(x, y, z, weight)

    run()  # makes the weights
    owner = nn.ModuleList([weights])
    for matrix in (p for p in weights.values() if p.ndim == 2):
        owner.append(nn.Linear(1, 1, bias=False))
        owner[-1].weight = matrix
    with saved_for_backward(owner) as saved:
        result = compressed(owner, (), run)
    assert result.requires_grad
    rows = [(row.dtype, math.prod(row.shape)) for row in saved]
    rounded = sum(count for dtype, count in rows if dtype == torch.float8_e4m3fn)
    exact = sum(
        count for dtype, count in rows if dtype in (torch.float32, torch.bfloat16) and count >= MIN_COMPRESS_NUMEL
    )
    return rounded / SIZE, exact / SIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_an_operation_rounds_what_it_may_and_nothing_else(name, dtype):
    operation, shape, rounded, exact = CASES[name]
    assert kept(operation, SHAPES[shape], dtype) == (rounded, exact)


@pytest.mark.parametrize("name", ["linear", "linear of a batch with a bias", "bmm", "conv2d"])
def test_products_under_autocast_round_the_cast_of_an_activation_and_no_weight(name):
    operation, shape, rounded, _ = CASES[name]
    exact = {"bmm": 2, "conv2d": 0}.get(name, 1)  # the cast of the weight; a small one for conv2d
    assert kept(operation, SHAPES[shape], torch.float32, autocast=True) == (rounded, exact)
