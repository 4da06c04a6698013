"""What one forward does, read off it; and the step that follows from it, by hand."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from models import llama
from torch import nn

from octavo.numerics import RECIPES
from octavo.parallel import Parallel
from octavo.planner.devices import DEVICES
from octavo.planner.fake import fake_tensors
from octavo.planner.few_blocks import Stack, copy_with_blocks
from octavo.planner.roofline import LinearCall, bf16_linear
from octavo.planner.step import (
    CHECKPOINTING,
    StepConfig,
    bytes_saved_by_fp8_gather,
    layout_settings,
    linear_costs,
    step_time,
)
from octavo.planner.trace import Trace, Work, extrapolate_trace, trace

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


def test_gpus_that_copies_do_not_divide():
    with pytest.raises(ValueError, match="dp_replicate = 3"):
        layout_settings(8, Parallel(dp_replicate=3))


def test_eager_code_waits_for_its_host():
    slow = predicted(StepConfig(), replace(H100, host_us=1e4))
    launches = 3 + 3 * (len(TRACE.rest) + len(TRACE.products))
    assert slow.seconds - slow.optimizer == pytest.approx(launches * 1e-2)
    assert predicted(StepConfig(eager=False), replace(H100, host_us=1e4)).waiting == 0
