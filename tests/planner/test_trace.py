"""What one forward does, read off it; and what follows from it, by hand: a step, what GPUs send, pipelines."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from models import llama
from torch import nn

from octavo.numerics import RECIPES
from octavo.parallel import Parallel
from octavo.planner.devices import DEVICES
from octavo.planner.fake import fake_tensors
from octavo.planner.roofline import LinearCall, bf16_linear
from octavo.planner.step import (
    CHECKPOINTING,
    COPIES,
    GRADIENTS,
    STAGES,
    WEIGHTS,
    Action,
    StepConfig,
    StepTime,
    bytes_saved_by_fp8_gather,
    collective,
    exchanged,
    layout_settings,
    linear_costs,
    most_in_flight,
    pipeline_time,
    sharded,
    simulate,
    step_time,
)
from octavo.planner.trace import Stack, Trace, Work, copy_with_blocks, extrapolate_trace, trace

H100 = DEVICES["h100"]


class Parts(nn.Module):
    """Two linears that read one tensor, attention, a product outside of linears, something else."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 32)
        self.q.weight.requires_grad_(False)

    def forward(self, x):
        h = x * 2
        q, k = (layer(h).view(2, 16, 4, 16).transpose(1, 2) for layer in (self.q, self.k))
        y = F.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2).reshape(32, 64)
        return self.out(torch.mm(y, y.t() @ y)), self.out(x)


def actual(module, *inputs):
    linears = {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}
    return trace(module, linears, lambda: module(*inputs))


def test_linears_attention_and_products():
    module = Parts()
    got = actual(module, torch.ones(2, 16, 64, requires_grad=True))
    assert got.calls == {
        "q": (LinearCall(m=32, k=64, n=64, wgrad=False),),
        "k": (LinearCall(m=32, k=64, n=64, first=False),),
        "out": (LinearCall(m=32, k=64, n=32), LinearCall(m=32, k=64, n=32)),
    }
    assert got.attention == 4 * 2 * 4 * 16 * 16 * 16 / 2  # half of it is masked
    assert [p.flops for p in got.products] == [2 * 64 * 32 * 64, 2 * 32 * 64 * 64]
    assert got.parameters == sum(p.numel() for p in module.parameters())
    assert got.trained == got.parameters - 64 * 64
    assert not module.q._forward_hooks and not module.q._forward_pre_hooks


def some_blocks(model, ids, count):
    with fake_tensors() as mode:
        copy = copy_with_blocks(model, {"model.layers": count} if count else {}, mode, torch.device("cpu"))
        linears = {name: m for name, m in copy.named_modules() if isinstance(m, nn.Linear)}
        return trace(copy, linears, lambda: copy(input_ids=torch.zeros(ids, dtype=torch.int64)))


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen below"])
def test_many_blocks_from_two_and_three(frozen):
    with torch.device("meta"):
        model = llama(num_hidden_layers=11)
    if frozen:
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
    stack = Stack("model.layers", [f"model.layers.{number}" for number in range(11)], 2)
    few, more, whole = (some_blocks(model, (2, 16), count) for count in (2, 3, None))
    assert len(whole.calls) == 11 * 7 + 1 and len(whole.rest) > len(more.rest)
    assert extrapolate_trace([stack], few, [more]) == whole
    assert whole.calls["model.layers.0.self_attn.q_proj"][0].dgrad is not frozen
    assert whole.calls["model.layers.10.self_attn.q_proj"][0].dgrad


def test_traces_that_differ_by_more_than_one_block_are_no_basis():
    stacks = [Stack("", "01234", 2)]
    calls = {f"{number}.up": (LinearCall(m=8, k=4, n=4),) for number in range(3)}
    few = Trace(calls=dict(list(calls.items())[:2]), attention=2, products=(), rest=(1, 2, 2), regions=(), parameters=8,
                trained=8)  # fmt: skip
    more = replace(few, calls=calls, attention=3, rest=(1, 2, 2, 2), parameters=12)
    actual = extrapolate_trace(stacks, few, [more])
    assert (actual.attention, actual.rest, actual.parameters, actual.trained) == (5, (1, 2, 2, 2, 2, 2), 20, 8)
    assert actual.calls == {f"{number}.up": calls["0.up"] for number in range(5)}
    assert extrapolate_trace(stacks, few, [replace(more, rest=(1, 2, 3, 3))]) is None
    other = (LinearCall(m=8, k=4, n=8),)
    assert extrapolate_trace(stacks, few, [replace(more, calls=calls | {"2.up": other})]) is None  # another block
    assert extrapolate_trace(stacks, few, [replace(more, calls=calls | {"0.up": other})]) is None  # changes the first


def test_the_rest_in_eager_code_and_fused():
    def module(x):
        y = torch.exp(x * 2 + 1)  # three operations, one fused: reads x, writes y
        return torch.mm(y, y).relu()

    size = 64 * 64 * 4
    x = torch.ones(64, 64)
    got = trace(nn.Identity(), {}, lambda: module(x))
    assert got.rest == (2 * size,) * 4
    assert got.regions == (2 * size, size)  # what nothing reads is not known to be written
    assert len(got.products) == 1 and got.products[0].bytes >= 3 * size


TRACE = Trace(
    calls={"a": (LinearCall(m=8192, k=4096, n=4096),)}, attention=1e12, products=(Work(flops=1e12, bytes=1.0),),
    rest=(3e9, 3e9), regions=(3e9,), parameters=10**9, trained=10**9,
)  # fmt: skip


def predicted(setting, gpu=H100):
    return step_time(gpu, TRACE, linear_costs(gpu, TRACE, {}), setting, 8192)


def test_a_step_by_hand():
    step = predicted(StepConfig())
    assert step.linears == pytest.approx(bf16_linear(H100, TRACE.calls["a"][0]).total)
    assert step.attention == pytest.approx(3.5 * 1e12 / (989e12 * 0.40))
    assert step.products == pytest.approx(3 * 1e12 / (989e12 * H100.bf16_efficiency))
    assert step.rest == pytest.approx(3 * 6e9 / (3.35e12 * H100.memory_efficiency))
    assert step.optimizer == pytest.approx(32e9 / (3.35e12 * H100.memory_efficiency))
    assert step.communication == step.waiting == 0
    assert step.seconds == pytest.approx(step.linears + step.attention + step.products + step.rest + step.optimizer)
    assert step.tokens_per_second == pytest.approx(8192 / step.seconds)
    flops = 6 * 8192 * 4096 * 4096 + 3 * 1e12 + 3 * 1e12
    assert step.mfu == pytest.approx(flops / step.seconds / 989e12)
    assert step.to_json()["seconds"] == step.seconds


def test_settings_change_what_they_say():
    plain = predicted(StepConfig())
    assert predicted(StepConfig(eager=False)).rest == pytest.approx(plain.rest / 2)
    full = predicted(StepConfig(recompute=CHECKPOINTING["full"]))
    assert full.attention == pytest.approx(plain.attention * 4.5 / 3.5)
    assert full.linears == pytest.approx(plain.linears * 4 / 3, rel=0.01)
    assert full.flops == plain.flops and full.mfu < plain.mfu
    selective = predicted(StepConfig(recompute=CHECKPOINTING["selective"]))
    assert selective.linears == plain.linears and selective.rest == pytest.approx(plain.rest * 4 / 3)
    twice = predicted(StepConfig(micro_batches=2))
    assert twice.linears == pytest.approx(2 * plain.linears) and twice.optimizer == plain.optimizer
    assert twice.tokens == 2 * plain.tokens
    muon = predicted(StepConfig(optimizer_bytes=16.0, optimizer_flops=1e12)).optimizer
    assert muon == pytest.approx(plain.optimizer / 2 + 1e12 / (989e12 * H100.bf16_efficiency))


def test_several_gpus_share_the_optimizer_and_talk():
    plain, eight = predicted(StepConfig()), predicted(StepConfig(gpus=8, reduce_bytes=2))
    assert eight.optimizer == pytest.approx(plain.optimizer / 8)
    assert eight.tokens == 8 * plain.tokens and eight.peak == 8 * plain.peak
    assert eight.communication == 0  # hidden
    slow, once = replace(H100, link_gbs=1), 2e9 * 7 / 8 / (1e9 * 0.8)
    computing = eight.seconds - eight.optimizer

    def waits(**settings):
        return predicted(StepConfig(gpus=8, **settings), slow).communication + computing

    assert waits(reduce_bytes=2) == pytest.approx(3 * once, rel=1e-6)
    assert waits() == pytest.approx(4 * once, rel=1e-6)  # added up in float32
    assert waits(reduce_bytes=2, keeps_gathered=True) == pytest.approx(2 * once, rel=1e-6)
    assert waits(fp8_reduce=True) == pytest.approx((2 + 1.03125 / 2) * once, rel=1e-6)
    halves = predicted(StepConfig(gpus=8, copies=2, reduce_bytes=2), slow).communication + computing
    assert halves == pytest.approx((3 * 3 / 4 / (7 / 8) + 1 / 4 / (7 / 8)) * once, rel=1e-6)
    thin = predicted(StepConfig(gpus=16), replace(H100, network_gbs=0.1))
    assert thin.communication > 2e9 / 2 / (8 * 0.1e9 * 0.8)


def test_gathering_in_fp8_saves_a_byte_of_each_converted_weight():
    calls = TRACE.calls
    rowwise, blockwise = {"a": RECIPES["rowwise"]}, {"a": RECIPES["blockwise"]}
    saved = bytes_saved_by_fp8_gather(calls, rowwise)
    assert saved == 4096 * 4096 - 4 * 4096
    assert bytes_saved_by_fp8_gather(calls, {}) == bytes_saved_by_fp8_gather(calls, blockwise) == 0
    slow, setting = replace(H100, link_gbs=0.001), StepConfig(gpus=8, fp8_gather=True, reduce_bytes=2)
    costs = linear_costs(slow, TRACE, rowwise)
    steps = [step_time(slow, TRACE, costs, each, 8192, saved) for each in (setting, replace(setting, fp8_gather=False))]
    assert steps[1].seconds - steps[0].seconds == pytest.approx(2 * saved * 7 / 8 / (1e6 * 0.8), rel=1e-6)


@pytest.mark.parametrize(
    ("gpus", "asked", "expected"),
    [
        (1, {}, {"copies": 1, "fp8_gather": False, "fp8_reduce": False}),
        (8, {}, {"copies": 1, "fp8_gather": False, "fp8_reduce": False}),
        (16, {}, {"copies": 1, "fp8_gather": True, "fp8_reduce": False}),  # between machines
        (8, {"fp8_comm": "on"}, {"fp8_gather": True, "fp8_reduce": True}),
        (16, {"fp8_comm": "off"}, {"fp8_gather": False, "fp8_reduce": False}),
        (16, {"fp8_comm": "gather", "dp_replicate": 2}, {"copies": 2, "fp8_gather": True, "fp8_reduce": False}),
        (8, {"dp_replicate": 8}, {"copies": 8, "fp8_gather": False}),
        (8, {"reshard_after_forward": False}, {"keeps_gathered": True}),
    ],
)
def test_a_model_is_spread_as_parallelize_would(gpus, asked, expected):
    setting = StepConfig(**layout_settings(gpus, Parallel(**asked)))
    assert expected.items() <= vars(setting).items()
    assert setting.shards * setting.copies == gpus
    if not asked:
        assert StepConfig(**layout_settings(gpus, None)) == setting


@pytest.mark.parametrize(("apart", "gather", "reduce"), [(1, False, False), (2, True, False), (8, True, True)])
def test_neighbours_that_share_layers_set_shards_apart(apart, gather, reduce):
    setting = StepConfig(**layout_settings(8, Parallel(), apart=apart))
    assert (setting.fp8_gather, setting.fp8_reduce) == (gather, reduce)


def test_eager_code_waits_for_its_host():
    slow = predicted(StepConfig(), replace(H100, host_us=1e4))
    launches = 3 + 3 * (len(TRACE.rest) + len(TRACE.products))
    assert slow.seconds - slow.optimizer == pytest.approx(launches * 1e-2)
    assert predicted(StepConfig(eager=False), replace(H100, host_us=1e4)).waiting == 0


# --- what a GPU sends ---


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
    gpu = replace(H100, link_gbs=200, network_gbs=20, link_efficiency=0.5)
    assert collective(gpu, "", op, 1e9, ranks=ranks, apart=apart).seconds == pytest.approx(seconds)


def test_messages_of_tokens():
    """An all-gather is handed a part, the others the whole."""
    messages = {("all-gather", False): 200, ("reduce-scatter", True): 400, ("all-reduce", False): 100}
    sent = {(s.kind, s.backward): s for s in exchanged(H100, messages, ranks=4)}
    expected = {
        ("tokens, all-gather, forward", False): ("all-gather", 800, 600),
        ("tokens, reduce-scatter, backward", True): ("reduce-scatter", 400, 300),
        ("tokens, all-reduce, forward", False): ("all-reduce", 100, 150),
    }
    assert sent.keys() == expected.keys()
    for key, (op, whole, size) in expected.items():
        assert sent[key].bytes == size
        assert sent[key].seconds == pytest.approx(collective(H100, "", op, whole, ranks=4).seconds)


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
    gathers, reductions = sharded(H100, MODEL, config, 100)
    ranks = (shards, shards // ep)
    assert [s.bytes for s in gathers] == pytest.approx([w * (r - 1) / r for w, r in zip(weights, ranks, strict=False)])
    assert [s.bytes for s in reductions] == pytest.approx(
        [g * (r - 1) / r for g, r in zip(gradients, ranks, strict=False)]
    )


def test_what_fsdp2_sends():
    config = StepConfig(gpus=64, copies=2, tp=2, ep=2)
    gathers, reductions = sharded(H100, MODEL, config, 100)
    assert [(s.kind, s.backward) for s in gathers] == [(WEIGHTS, False)] * 2
    assert [s.bytes for s in gathers] == pytest.approx([1140 * 15 / 16, 760 * 7 / 8])
    alone = [collective(H100, "", "all-gather", size, ranks=r, apart=a) for size, r, a in ((1140, 16, 2), (760, 8, 4))]
    assert [s.seconds for s in gathers] == pytest.approx([s.seconds for s in alone])
    assert [(s.kind, s.backward) for s in reductions] == [(GRADIENTS, True)] * 2 + [(COPIES, True)]
    assert [s.bytes for s in reductions] == pytest.approx([1920 * 15 / 16, 1280 * 7 / 8, 120])
    copies = collective(H100, COPIES, "all-reduce", 120, ranks=2, apart=32)
    assert reductions[2].seconds == pytest.approx(copies.seconds)
    _, (gradients,) = sharded(H100, MODEL, StepConfig(gpus=16, fp8_reduce=True), 0)
    assert gradients.seconds == pytest.approx(collective(H100, "", "all-to-all", 825, ranks=16).seconds)
    assert sharded(H100, MODEL, StepConfig(), 0) == ([], [])
    for fp8, size in ((False, 1600), (True, 825)):  # DDP: whole gradients in bf16, or in FP8
        _, (gradients,) = sharded(H100, MODEL, StepConfig(gpus=8, copies=8, fp8_reduce=fp8), 0)
        assert (gradients.kind, gradients.bytes) == (COPIES, pytest.approx(2 * size * 7 / 8))


# --- pipelines: what ranks hold, when they finish, what they send ---


ZERO = {"attention": 0.0, "products": 0.0, "rest": 0.0, "communication": 0.0, "waiting": 0.0}
STAGE = StepTime(
    linears=12.0, optimizer=5.0, tokens=1, flops=10.0, peak=1.0, forward=1.0, backward=2.0, **ZERO,
)  # fmt: skip


def row(text):
    """Actions of one stage: "F0 B0"."""
    return [Action(word[0], 0, int(word[1:])) for word in text.split()]


@pytest.mark.parametrize(
    ("actions", "forward", "backward"),
    [
        ("F0 B0 F1 B1", 0, 0),
        ("F0 F1 B0 F2 B1 B2", 1, 1),
        ("F0 F1 F2 B0 B1 B2", 2, 2),
        ("F0 I0 F1 W0 I1 W1", 1, 1),  # activations are held until W
    ],
)
def test_activations_of_other_micro_batches(actions, forward, backward):
    assert most_in_flight(row(actions)) == {("F", 0): {0: forward}, ("B", 0): {0: backward}}


def test_other_stages_of_a_rank_hold_activations_too():
    actions = [Action("F", 0, 0), Action("F", 1, 0), Action("B", 1, 0), Action("B", 0, 0)]
    most = most_in_flight(actions)
    assert most["F", 1] == most["B", 1] == {0: 1, 1: 0} and most["F", 0] == most["B", 0] == {0: 0, 1: 0}


def test_messages_delay_both_directions():
    actions = [[Action("F", rank, 0), Action("B", rank, 0)] for rank in (0, 1)]
    # F on rank 0 until 1, F on rank 1 from 1.5 to 2.5 and B to 4.5, B on rank 0 from 5.
    assert simulate(actions, [1, 1], [2, 2], 0.5) == 7
    assert simulate([row("F0 I0 W0")], [1], [2], 0.5) == 3


def test_stages_of_one_rank_send_nothing_to_each_other():
    actions = [Action("F", 0, 0), Action("F", 1, 0), Action("B", 1, 0), Action("B", 0, 0)]
    assert simulate([actions], [1, 1], [2, 2], 9) == 6


@pytest.mark.parametrize(("schedule", "stages", "ahead"), [("1F1B", 2, 1), ("Interleaved1F1B", 4, 2),
                                                           ("ZBVZeroBubble", 4, 1)])  # fmt: skip
@pytest.mark.parametrize("gpus", [2, 32])
def test_a_step_of_a_pipeline(schedule, stages, ahead, gpus):
    config = StepConfig(gpus=gpus, pp=2, schedule=schedule, micro_batches=4)
    size = 1e6
    link = H100.link if gpus == 2 else H100.network
    time = pipeline_time(H100, [STAGE] * stages, config, size)
    sent = {s.backward: s for s in time.sent if s.kind == STAGES}
    for direction in (False, True):
        assert sent[direction].bytes == 4 * ahead * size
        assert sent[direction].seconds == pytest.approx(4 * ahead * size / link)
    assert time.flops == stages * 10.0 / 2
    assert time.optimizer == stages / 2 * 5.0
    if schedule == "1F1B":  # one micro-batch of the other rank, and its two messages, in 12 seconds of computing
        assert time.bubble == pytest.approx(3.0, rel=1e-3)
        slow = replace(STAGE, linears=24.0, forward=2.0, backward=4.0)
        assert pipeline_time(H100, [STAGE, slow], config, 0.0).linears == 24.0
