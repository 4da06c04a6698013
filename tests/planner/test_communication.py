"""What a GPU sends, by hand."""

from types import SimpleNamespace

import pytest

from octavo.planner.collective_cost import (
    COPIES,
    GRADIENTS,
    WEIGHTS,
    Links,
    collective,
    exchanged,
    links_of,
    sharded,
    traffic,
)
from octavo.planner.devices import DEVICES
from octavo.planner.timeline import Message

GPU = DEVICES["h100"]
LINKS = links_of(GPU)
MODEL = SimpleNamespace(parameters=1000, trained=800, experts=400)


def test_rates_of_links():
    assert LINKS.inside == pytest.approx(GPU.link_gbs * 1e9 * GPU.link_efficiency)
    assert LINKS.between == pytest.approx(GPU.network_gbs * 1e9 * GPU.link_efficiency)


@pytest.mark.parametrize(
    ("op", "ranks", "apart", "seconds"),
    [
        ("all-gather", 8, 1, 7 / 8 / 100),
        ("all-to-all", 8, 1, 7 / 8 / 100),
        ("all-gather", 64, 1, 7 / 8 / (8 * 10)),  # by eight links at once
        ("reduce-scatter", 64, 1, 7 / 8 / (8 * 10)),
        ("all-to-all", 64, 1, 56 / 64 / 10),  # each by its own, nothing added up
        ("all-reduce", 8, 8, 2 * 7 / 8 / 10),  # one of eight groups side by side
    ],
)
def test_seconds_of_a_gigabyte(op, ranks, apart, seconds):
    """100 GB/s inside a machine, 10 between."""
    fast = Links(inside=100e9, between=10e9, hop_inside=0.0, hop_between=0.0)
    assert collective(op, 1e9, fast, ranks=ranks, apart=apart) == pytest.approx(seconds)
    slow = Links(inside=100e9, between=10e9, hop_inside=1e-3, hop_between=1e-2)
    hops = 3 * (min(8 // apart, ranks) - 1) * 1e-3 + 3 * (ranks * apart // 8 - 1) * 1e-2
    expected = seconds + hops * (2 if op == "all-reduce" else 1)
    assert collective(op, 1e9, slow, ranks=ranks, apart=apart, calls=3) == pytest.approx(expected)


def test_messages_of_tokens():
    """An all-gather is handed a part, the others the whole."""
    messages = [
        Message("all-gather", False, 100), Message("all-gather", False, 100), Message("reduce-scatter", True, 400),
        Message("all-reduce", False, 100),
    ]  # fmt: skip
    sent = {(s.kind, s.backward): s for s in exchanged(GPU, messages, ranks=4)}
    expected = {
        ("tokens, all-gather, forward", False): ("all-gather", 800, 600),
        ("tokens, reduce-scatter, backward", True): ("reduce-scatter", 400, 300),
        ("tokens, all-reduce, forward", False): ("all-reduce", 100, 150),
    }
    assert sent.keys() == expected.keys()
    for key, (op, whole, size) in expected.items():
        assert sent[key].bytes == size
        assert sent[key].seconds == pytest.approx(collective(op, whole, LINKS, ranks=4))


@pytest.mark.parametrize(
    ("shards", "ep", "fp8", "expected"),
    [
        (4, 1, False, [(1900, 3200, 800), (0, 0, 0)]),
        (4, 2, False, [(1140, 1920, 480), (760, 1280, 640)]),
        (4, 2, True, [(1140, 495, 480), (760, 330, 640)]),
        (1, 1, False, [(1900, 3200, 1600), (0, 0, 0)]),
        (1, 1, True, [(1900, 825, 825), (0, 0, 0)]),
    ],
)
def test_traffic_of_parameters(shards, ep, fp8, expected):
    """Weights in bf16 less 100 bytes; gradients in fp32, or in FP8 with a float32 scale per 128."""
    parts = traffic(MODEL, shards, ep=ep, saved=100, fp8_reduce=fp8, reduce_bytes=4)
    for part, (weights, gradients, summed) in zip(parts, expected, strict=True):
        assert (part.weights, part.gradients, part.summed) == pytest.approx((weights, gradients, summed))
        assert part.fp8_gradients == fp8


def test_what_fsdp2_sends():
    parts = traffic(MODEL, 16, ep=2, saved=100, fp8_reduce=False, reduce_bytes=4)
    gathers, reductions = sharded(GPU, parts, 16, 2, apart=2, ep=2)
    assert [(s.kind, s.backward) for s in gathers] == [(WEIGHTS, False)] * 2
    assert [s.bytes for s in gathers] == pytest.approx([1140 * 15 / 16, 760 * 7 / 8])
    assert [s.seconds for s in gathers] == pytest.approx(
        [
            collective("all-gather", 1140, LINKS, ranks=16, apart=2),
            collective("all-gather", 760, LINKS, ranks=8, apart=4),
        ]
    )
    assert [(s.kind, s.backward) for s in reductions] == [(GRADIENTS, True)] * 2 + [(COPIES, True)]
    assert [s.bytes for s in reductions] == pytest.approx([1920 * 15 / 16, 1280 * 7 / 8, 120])
    assert reductions[2].seconds == pytest.approx(collective("all-reduce", 120, LINKS, ranks=2, apart=32))
    in_fp8 = traffic(MODEL, 16, ep=1, saved=0, fp8_reduce=True, reduce_bytes=4)
    _, (gradients,) = sharded(GPU, in_fp8, 16, 1, apart=1, ep=1)
    assert gradients.seconds == pytest.approx(collective("all-to-all", 825, LINKS, ranks=16))
    assert sharded(GPU, in_fp8, 1, 1, apart=1, ep=1) == ([], [])
