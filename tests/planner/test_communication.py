"""What a GPU sends, by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from octavo.planner.devices import DEVICES
from octavo.planner.step import COPIES, GRADIENTS, WEIGHTS, StepConfig, collective, exchanged, sharded

GPU = DEVICES["h100"]
MODEL = SimpleNamespace(parameters=1000, trained=800, experts=400)


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
    """100 GB/s inside a machine, 10 between: half of what the links have."""
    gpu = replace(GPU, link_gbs=200, network_gbs=20, link_efficiency=0.5)
    assert collective(gpu, "", op, 1e9, ranks=ranks, apart=apart).seconds == pytest.approx(seconds)


def test_messages_of_tokens():
    """An all-gather is handed a part, the others the whole."""
    messages = {("all-gather", False): 200, ("reduce-scatter", True): 400, ("all-reduce", False): 100}
    sent = {(s.kind, s.backward): s for s in exchanged(GPU, messages, ranks=4)}
    expected = {
        ("tokens, all-gather, forward", False): ("all-gather", 800, 600),
        ("tokens, reduce-scatter, backward", True): ("reduce-scatter", 400, 300),
        ("tokens, all-reduce, forward", False): ("all-reduce", 100, 150),
    }
    assert sent.keys() == expected.keys()
    for key, (op, whole, size) in expected.items():
        assert sent[key].bytes == size
        assert sent[key].seconds == pytest.approx(collective(GPU, "", op, whole, ranks=4).seconds)


@pytest.mark.parametrize(
    ("shards", "ep", "fp8", "weights", "gradients"),
    [
        (4, 1, False, [1900], [3200]), (4, 2, False, [1140, 760], [1920, 1280]), (4, 2, True, [1140, 760], [495, 330]),
        (1, 1, False, [], []),
    ],
)  # fmt: skip
def test_traffic_of_parameters(shards, ep, fp8, weights, gradients):
    """Weights in bf16 less 100 bytes; gradients in fp32, or in FP8 with a float32 scale per 128."""
    config = StepConfig(gpus=shards, ep=ep, fp8_reduce=fp8)
    gathers, reductions = sharded(GPU, MODEL, config, 100)
    ranks = (shards, shards // ep)
    assert [s.bytes for s in gathers] == pytest.approx([w * (r - 1) / r for w, r in zip(weights, ranks, strict=False)])
    assert [s.bytes for s in reductions] == pytest.approx(
        [g * (r - 1) / r for g, r in zip(gradients, ranks, strict=False)]
    )


def test_what_fsdp2_sends():
    config = StepConfig(gpus=64, copies=2, tp=2, ep=2)
    gathers, reductions = sharded(GPU, MODEL, config, 100)
    assert [(s.kind, s.backward) for s in gathers] == [(WEIGHTS, False)] * 2
    assert [s.bytes for s in gathers] == pytest.approx([1140 * 15 / 16, 760 * 7 / 8])
    alone = [collective(GPU, "", "all-gather", size, ranks=r, apart=a) for size, r, a in ((1140, 16, 2), (760, 8, 4))]
    assert [s.seconds for s in gathers] == pytest.approx([s.seconds for s in alone])
    assert [(s.kind, s.backward) for s in reductions] == [(GRADIENTS, True)] * 2 + [(COPIES, True)]
    assert [s.bytes for s in reductions] == pytest.approx([1920 * 15 / 16, 1280 * 7 / 8, 120])
    copies = collective(GPU, COPIES, "all-reduce", 120, ranks=2, apart=32)
    assert reductions[2].seconds == pytest.approx(copies.seconds)
    _, (gradients,) = sharded(GPU, MODEL, StepConfig(gpus=16, fp8_reduce=True), 0)
    assert gradients.seconds == pytest.approx(collective(GPU, "", "all-to-all", 825, ranks=16).seconds)
    assert sharded(GPU, MODEL, StepConfig(), 0) == ([], [])
    for fp8, size in ((False, 1600), (True, 825)):  # DDP: whole gradients in bf16, or in FP8
        _, (gradients,) = sharded(GPU, MODEL, StepConfig(gpus=8, copies=8, fp8_reduce=fp8), 0)
        assert (gradients.kind, gradients.bytes) == (COPIES, pytest.approx(2 * size * 7 / 8))
