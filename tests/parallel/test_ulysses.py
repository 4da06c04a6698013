"""Attention over sequences that are sharded over ranks: that of one process, forward and backward."""

import re
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import octavo
from collective_recorder import CollectiveRecorder
from octavo.numerics import sqnr
from octavo.parallel import ulysses_attention
from processes import on_ranks

pytestmark = pytest.mark.dist

CASES = {
    "plain": ((2, 4, 24, 128), 4, 128),
    "grouped": ((1, 8, 12, 64), 4, 64),
    "mla": ((2, 4, 32, 48), 4, 40),
    "one token each": ((1, 4, 4, 16), 4, 16),
}
"""q [B,H,S,D], heads of k and v, Dv."""


def operands(case, dtype=torch.float32):
    (batch, heads, tokens, size), kv_heads, v_size = CASES[case]
    g = torch.Generator().manual_seed(0)
    shapes = ((heads, size), (kv_heads, size), (kv_heads, v_size), (heads, v_size))
    q, k, v, grad = (torch.randn(batch, h, tokens, d, generator=g).to(dtype) for h, d in shapes)
    return q, k, v, grad


def results(attention, q, k, v, grad):
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    y = attention(*leaves)
    y.backward(grad)
    return {"y": y.detach(), **{name: t.grad for name, t in zip("qkv", leaves, strict=True)}}


@pytest.mark.thorough
@pytest.mark.parametrize("world", [2, 4])
@on_ranks("world")
def test_results_are_those_of_one_process(world):
    rank = dist.get_rank()
    for case, fp8 in product(CASES, (False, True)):
        options, tensors = {"is_causal": case != "one token each", "enable_gqa": case == "grouped"}, operands(case)
        expected = results(partial(F.scaled_dot_product_attention, **options), *tensors)
        parts = [t.chunk(world, 2)[rank] for t in tensors]  # views
        actual = results(partial(ulysses_attention, fp8_comm=fp8, **options), *parts)
        quality = {name: sqnr(value.chunk(world, 2)[rank], actual[name]) for name, value in expected.items()}
        least, least_y = (32, 36) if fp8 else (110, 110)
        assert quality["y"] > least_y and min(quality.values()) > least, (case, fp8, quality)


@on_ranks(2)
def test_v_may_be_small():
    """The first tokens' v would share groups with the ends of k, for parts that are no whole groups."""
    rank, (q, k, v, grad) = dist.get_rank(), (torch.randn(1, 2, 6, 32) for _ in range(4))

    def accuracy(ratio):
        tensors = q, k, v * ratio, grad
        expected = results(partial(F.scaled_dot_product_attention, is_causal=True), *tensors)
        actual = results(partial(ulysses_attention, is_causal=True), *(t.chunk(2, 2)[rank] for t in tensors))
        return {name: sqnr(value.chunk(2, 2)[rank], actual[name]) for name, value in expected.items()}

    assert accuracy(2**-10) == pytest.approx(accuracy(1.0), abs=0.1)


@pytest.mark.thorough
@on_ranks(2)
def test_messages_take_half_the_bytes_of_bf16():
    sent = []
    for fp8 in (True, False):
        parts = [t.chunk(2, 2)[dist.get_rank()] for t in operands("plain", torch.bfloat16)]
        with CollectiveRecorder() as recorder:
            results(partial(ulysses_attention, fp8_comm=fp8), *parts)
        assert [call.name for call in recorder.calls] == ["alltoall_base_"] * 4
        assert {call.dtype for call in recorder.calls} == {torch.uint8 if fp8 else torch.bfloat16}
        sent.append(recorder.bytes("alltoall_base_"))
    with octavo.disabled(), CollectiveRecorder() as recorder:
        ulysses_attention(*parts[:3])
    assert {call.dtype for call in recorder.calls} == {torch.bfloat16}
    fp8, plain = sent
    assert 0.5 * plain < fp8 <= 0.52 * plain


@pytest.mark.thorough
@on_ranks(2)
def test_what_cannot_work_raises_on_every_rank():
    q, k = (torch.randn(1, heads, 2, 16) for heads in (4, 1))
    for operands_, message in (
        ([q[:, :3]] * 3, "cannot share 3 heads of q, 3 of k and 3 of v equally: take a group of one of [1, 3] ranks"),
        ((q, k, k), "cannot share 4 heads of q, 1 of k and 1 of v equally: take a group of one of [1] ranks"),
        ((q, q, q[0]), "takes q, k and v [batch, heads, tokens, size]; got shapes"),
        ((q, q, q.bfloat16()), "of one dtype; got torch.float32, torch.float32 and torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            ulysses_attention(*operands_)


@on_ranks(2)
def test_detailed_checks_compare_the_parts_of_every_call():
    """The errors of later calls whose parts differ: in their numbers of tokens, and in their shapes alone."""
    before, rank, errors = dist.get_debug_level(), dist.get_rank(), []
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        for shape in ((1, 2, 4, 64), (1, 2, 3 + rank, 64), (1 + rank, 2, 4 // (1 + rank), 64), (1, 2, 3, 64)):
            q = torch.randn(shape)
            try:
                assert ulysses_attention(q, q, q).shape == q.shape
            except ValueError as error:
                errors.append(str(error))
    finally:
        dist.set_debug_level(before)
    assert len(errors) == 2 and all("ulysses_attention: the calls of the ranks" in text for text in errors)
    assert "[1, 2, 3, 64]" in errors[0] and "[2, 2, 2, 64]" in errors[1]
