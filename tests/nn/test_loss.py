"""The chunked vocabulary head and loss: the numbers of the plain one, without its memory."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from octavo.kernels.conformance.mismatches import low_sqnr
from octavo.kernels.cross_entropy import CROSS_ENTROPY, cross_entropy_
from octavo.nn import loss
from octavo.nn.loss import chunk_tokens, linear_cross_entropy
from octavo.nn.memory_audit import saved_for_backward
from octavo.numerics.error import sqnr
from support.dispatch_modes import Passing


def plain(hidden, weight, target, bias=None, *, ignore_index=-100, reduction="mean", scale=1.0, softcap=None):
    logits = F.linear(hidden, weight, bias)
    z = (logits if logits.dtype == torch.float64 else logits.float()) * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return F.cross_entropy(z.flatten(0, -2), target.flatten(), ignore_index=ignore_index, reduction=reduction)


def inputs(tokens=50, features=24, vocabulary=70, dtype=torch.float64, bias=False, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    target = torch.randint(0, vocabulary, (tokens,), generator=generator)
    target[::7] = -100
    return draw(tokens, features), draw(vocabulary, features), target, draw(vocabulary) if bias else None


def results(function, hidden, weight, target, bias, factor=3.0, **options):
    """Loss and gradients, with a number arriving from above that is not 1."""
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    loss = function(hidden, weight, target, bias, **options)
    return [loss, *torch.autograd.grad(loss * factor, leaves)]


# SQNR of gradients in dB: float32 rounds once or twice; bf16's own rounding of G and of the result leaves about 50.
LEAST = {torch.float64: 280.0, torch.float32: 120.0, torch.bfloat16: 40.0, torch.float16: 55.0}


@pytest.mark.parametrize(
    ("dtype", "reduction"), [(dtype, "mean") for dtype in LEAST] + [(torch.float64, "sum")], ids=str
)
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"scale": 0.25}, {"scale": 0.5, "softcap": 3.0}], ids=str)
def test_loss_and_gradients_are_those_of_the_plain_loss(dtype, reduction, options):
    exact = inputs(bias=True)
    floats = [None if x is None or not x.is_floating_point() else x for x in exact]
    rounded = [x.detach().to(dtype).requires_grad_() if x is not None else exact[2] for x in floats]
    reference = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in rounded]
    expected = results(plain, *reference, reduction=reduction, **options)
    actual = results(linear_cross_entropy, *rounded, reduction=reduction, chunk=8, **options)
    assert actual[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for want, got in zip(expected, actual, strict=True):
        assert sqnr(want, got.double()) > LEAST[dtype]


def test_bf16_gradients_are_as_good_as_the_plain_ones():
    hidden, weight, target, _ = inputs(512, 64, 1000, torch.bfloat16)
    exact = results(plain, hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_(),
                    target, None)  # fmt: skip
    ours = results(linear_cross_entropy, hidden, weight, target, None, chunk=64)
    theirs = results(plain, hidden, weight, target, None)
    for want, got, other in zip(exact, ours, theirs, strict=True):
        assert sqnr(want, got.double()) > sqnr(want, other.double()) - 3.0


@settings(max_examples=40)
@given(tokens=st.integers(0, 40), chunk=st.integers(1, 50), leading=st.booleans())
def test_any_number_of_tokens_in_any_chunks(tokens, chunk, leading):
    hidden, weight, target, _ = inputs(tokens)
    shape = (1, tokens) if leading else (tokens,)
    arguments = hidden.view(*shape, hidden.shape[-1]), weight, target.view(shape), None
    expected = results(plain, *arguments, reduction="sum")
    actual = results(linear_cross_entropy, *arguments, reduction="sum", chunk=chunk)
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want)


def test_chunks_cover_the_tokens_and_bound_the_logits():
    assert chunk_tokens(8192, 4096, 32000) == 1049  # logits as large as the hidden states
    assert chunk_tokens(1 << 20, 64, 256000) == (1 << 20) // 32  # no more than 32 chunks
    assert chunk_tokens(100, 64, 1000) == 100
    assert chunk_tokens(0, 64, 1000) == 1


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_counts(reduction):
    hidden, weight, target, _ = inputs()
    arguments = hidden, weight, torch.full_like(target, -100), None
    expected, actual = (results(loss, *arguments, reduction=reduction) for loss in (plain, linear_cross_entropy))
    assert torch.equal(expected[0].isnan(), actual[0].isnan())
    assert not actual[1].any() and not actual[2].any() and not actual[1].isnan().any()


def test_other_ignore_index():
    hidden, weight, target, _ = inputs()
    arguments = hidden, weight, target.clamp(min=0), None
    expected, actual = (results(loss, *arguments, ignore_index=0) for loss in (plain, linear_cross_entropy))
    torch.testing.assert_close(actual, expected)


def test_nan_stays_visible():
    hidden, weight, target, _ = inputs(dtype=torch.float32)
    with torch.no_grad():
        hidden[3, 0] = torch.nan
    loss, grad, _ = results(linear_cross_entropy, hidden, weight, target, None)
    assert loss.isnan() and grad[3].isnan().all() and not grad[2].isnan().any()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient_and_keeps_nothing(frozen):
    hidden, weight, target, _ = inputs()
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    other = weight if frozen == "hidden" else hidden
    (expected,) = torch.autograd.grad(plain(hidden, weight, target), [other])
    with saved_for_backward(torch.nn.Module()) as kept:
        loss = linear_cross_entropy(hidden, weight, target)
    assert kept.bytes - other.numel() * 8 < 64  # the other's gradient, and the count of tokens
    torch.testing.assert_close(torch.autograd.grad(loss, [other])[0], expected)


def test_no_gradient_is_made_where_none_is_wanted(monkeypatch):
    hidden, weight, target, _ = inputs()
    monkeypatch.setattr("octavo.nn.loss._add_product", None)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, target)
    torch.testing.assert_close(loss, plain(hidden, weight, target).detach())


def test_under_autocast():
    hidden, weight, target, _ = inputs(dtype=torch.float32)
    exact = results(plain, hidden, weight, target, None)
    with torch.autocast("cpu", torch.bfloat16):
        actual = results(linear_cross_entropy, hidden, weight, target, None, chunk=8)
    assert [g.dtype for g in actual] == [torch.float32] * 3
    assert all(40 < sqnr(want, got) < 70 for want, got in zip(exact[1:], actual[1:], strict=True))


def test_the_whole_logits_never_exist():
    hidden, weight, target, _ = inputs(4096, 16, 512, torch.bfloat16)
    seen = []
    mode = Passing(lambda tensor: seen.append(tensor.untyped_storage().nbytes()))
    with mode, saved_for_backward(torch.nn.Module()) as kept:
        loss = linear_cross_entropy(hidden, weight, target)
        loss.backward()
    assert max(seen) <= chunk_tokens(4096, 16, 512) * 512 * 4 < 4096 * 512 * 2
    assert kept.bytes <= (hidden.numel() + weight.numel()) * 2 + 64


@pytest.mark.parametrize(
    "hooks",
    [contextlib.nullcontext, lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
     lambda: saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach), save_on_cpu],
    ids=["none", "identity", "views", "save_on_cpu"],
)  # fmt: skip
def test_a_second_backward_is_refused(hooks):
    """Hooks on saved tensors switch autograd's own check off."""
    hidden, weight, target, _ = inputs()
    with hooks():
        loss = linear_cross_entropy(hidden, weight, target)
    (loss * 3).backward(retain_graph=True)
    first = weight.grad.clone()
    with pytest.raises(RuntimeError, match="backward runs once"):
        (loss * 3).backward()
    assert torch.equal(weight.grad, first)


@pytest.mark.parametrize("remade", ["checkpoint", "copies"])
def test_a_second_backward_on_gradients_that_are_made_anew(remade):
    hidden, weight, target, _ = inputs()
    if remade == "checkpoint":
        loss = checkpoint(linear_cross_entropy, hidden, weight, target, use_reentrant=False)
    else:
        with saved_tensors_hooks(torch.Tensor.clone, torch.Tensor.clone):
            loss = linear_cross_entropy(hidden, weight, target)
    (expected,) = torch.autograd.grad(plain(hidden, weight, target) * 3, [weight])
    for _ in range(3):
        (actual,) = torch.autograd.grad(loss * 3, [weight], retain_graph=True)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("chunk", [None, 8192])
def test_sums_over_many_tokens_do_not_overflow_in_fp16(autocast, chunk):
    """8192 tokens · a feature of 20 is above 65504; their mean is 20."""
    dtype = torch.float32 if autocast else torch.float16
    hidden = torch.zeros(8192, 8, dtype=dtype)
    hidden[:, 3] = 20.0
    weight, target = torch.zeros(4, 8, dtype=dtype, requires_grad=True), torch.zeros(8192, dtype=torch.int64)
    (expected,) = torch.autograd.grad(plain(hidden, weight, target), [weight])
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        loss = linear_cross_entropy(hidden, weight, target, chunk=chunk)
    (actual,) = torch.autograd.grad(loss, [weight])
    assert actual.dtype == dtype and actual[0, 3] == -15.0
    torch.testing.assert_close(actual, expected)


def test_on_meta_there_are_shapes():
    hidden, weight, bias = (torch.zeros(*shape, device="meta", dtype=torch.bfloat16, requires_grad=True)
                            for shape in ((50, 24), (70, 24), (70,)))  # fmt: skip
    loss = linear_cross_entropy(hidden, weight, torch.zeros(50, dtype=torch.int64, device="meta"), bias)
    loss.backward()
    assert (loss.shape, loss.dtype, loss.device.type) == ((), torch.float32, "meta")
    assert all(leaf.grad.shape == leaf.shape and leaf.grad.dtype == leaf.dtype for leaf in (hidden, weight, bias))


@pytest.mark.parametrize(("dtype", "softcap"), [(torch.float32, 2.0), (torch.bfloat16, None)])
def test_the_kernel_gives_the_loss_and_gradients_of_pytorch_s_operations(monkeypatch, dtype, softcap):
    """In Triton's interpreter, as on a GPU: rows of odd lengths, ignored targets, several chunks."""

    def run(fuses):
        monkeypatch.setattr(loss, "_fuses", lambda z, has_bias: fuses and not has_bias)
        hidden, weight, target, _ = inputs(dtype=dtype)
        target[3] = -100
        with CROSS_ENTROPY.force("triton"):
            value = linear_cross_entropy(hidden, weight, target, chunk=20, scale=0.5, softcap=softcap)
        value.backward()
        return [value.detach(), hidden.grad, weight.grad]

    assert low_sqnr(run(False), run(True), 100 if dtype == torch.float32 else 45) is None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
def test_the_kernel_says_what_is_not_finite_and_what_is_no_class():
    z = torch.randn(5, 300)
    z[0, 7], z[1, 7], z[2, :] = math.nan, -math.inf, -math.inf
    with CROSS_ENTROPY.force("triton"):
        rows = cross_entropy_(z, torch.tensor([1, 1, 1, 300, -100]))
    assert rows.isnan().tolist() == [True, False, True, True, False] and rows[4] == 0
    assert z[0].isnan().all() and z[1].isfinite().all() and not z[4].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(70, 23)}, r"got \[50, 24\] and \[70, 23\]"),
        ({"target": torch.zeros(49, dtype=torch.int64)}, r"int64 \[50\], a class for each token"),
        ({"target": torch.zeros(50)}, "got torch.float32"),
        ({"bias": torch.zeros(3)}, r"bias is \[70\]; got \[3\]"),
        ({"reduction": "none"}, "'mean' or 'sum'; got 'none'"),
        ({"softcap": 0.0}, "softcap is a number above 0"),
        ({"weight": torch.zeros(70, 24, dtype=torch.bfloat16)}, "cast one of them"),
    ],
)  # fmt: skip
def test_mistakes_are_named(change, message):
    hidden, weight, target, _ = inputs()
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**({"hidden": hidden, "weight": weight, "target": target} | change))


@pytest.mark.parametrize("has_bias", [False, True])
def test_bf16_products_in_float32_are_rounded_as_bf16_ones(monkeypatch, has_bias):
    def run(has_instructions):
        monkeypatch.setattr(loss, "has_bf16_instructions", lambda: has_instructions)
        hidden, weight, target, bias = inputs(dtype=torch.bfloat16, bias=has_bias)
        value = linear_cross_entropy(hidden, weight, target, bias, chunk=20)
        value.backward()
        return [value, *(leaf.grad for leaf in (hidden, weight, bias) if leaf is not None)]

    for own, torchs in zip(run(False), run(True), strict=True):
        assert own.dtype == torchs.dtype
        assert sqnr(torchs.detach().float(), own.detach().float()) > 50
