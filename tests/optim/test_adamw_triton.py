"""The one-launch step under Triton's interpreter, against the reference."""

import torch
from torch import nn

from octavo.kernels.adamw import ADAMW, reference, sample
from octavo.numerics import sqnr
from octavo.optim import AdamW
from tensors import needs_triton

pytestmark = needs_triton
CPU = torch.device("cpu")


def codes_apart(a, b):
    a, b = (t.view(torch.uint8).int() for t in (a, b))
    difference = (a - b).abs()
    return difference.max().item(), (difference > 0).double().mean().item()


def test_every_kind_of_parameter_takes_the_reference_step():
    expected, actual = sample(CPU), sample(CPU)
    reference.step_all(expected)
    ADAMW.backends["triton"].run(actual)
    untouched = sample(CPU)
    for (want, _), (got, _), (before, _) in zip(expected, actual, untouched, strict=True):
        assert not torch.equal(before.param, got.param)
        assert sqnr(want.param.float(), got.param.float()) > 55
        if want.remainder is not None:
            masters = ((s.param.view(torch.int16).int() << 16) + s.remainder.int() for s in (want, got))
            a, b = (m.view(torch.float32) for m in masters)
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        if want.master is not None:
            torch.testing.assert_close(want.master, got.master, rtol=1e-6, atol=1e-8)
        for (a, *scales), (b, *others), atol in zip(want.moments, got.moments, (1e-9, 1e-12), strict=True):
            if not scales:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=atol)
                continue
            furthest, share = codes_apart(a, b)
            assert furthest <= 1 and share < 0.01
            torch.testing.assert_close(scales[0], others[0], rtol=1e-5, atol=0)
            assert codes_apart(scales[1], others[1])[0] <= 1


def test_stochastic_rounding_of_bf16_parameters_uses_the_same_bits():
    """Seeds of the second and the third fill 31 bits and 32."""
    ends = []
    for backend in ("reference", "triton"):
        params = [nn.Parameter(torch.ones(4, 256, dtype=torch.bfloat16)) for _ in range(3)]
        optimizer = AdamW(params, lr=2**-8 / 10, weight_decay=0, master=None)
        with ADAMW.force(backend):
            for _ in range(3):
                for param in params:
                    param.grad = torch.ones_like(param)
                optimizer.step()
        ends.append(params)
    for one, other in zip(*ends, strict=True):
        assert (one == other).double().mean() > 0.99 and (one != 1).any()


def test_the_probe_accepts_it_and_finds_a_wrong_one():
    assert ADAMW.run_probe(ADAMW.backends["triton"], CPU, ("step",)) is None

    def half(work):
        ADAMW.backends["reference"].run(work[:1])

    wrong = type(ADAMW.backends["triton"])(name="half", run=half)
    assert "40 dB expected" in ADAMW.run_probe(wrong, CPU, ("step",))
