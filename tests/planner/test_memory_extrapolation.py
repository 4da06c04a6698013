"""Memory extrapolated from two and three blocks equals, to the byte, that of the whole model; what it follows."""

import functools

import pytest
import torch
from models import llama
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.nn.causal import chunked_loss
from octavo.numerics.plan import Plan
from octavo.planner.fake import fake_copy, fake_tensors
from octavo.planner.model_plan import default_loss, trace_step
from octavo.planner.prediction import Stage, Workload
from octavo.planner.step import StepConfig
from octavo.planner.step_memory import (
    ACTIVATIONS,
    BLOCK_GRADIENTS,
    GRADIENTS,
    TEMPORARIES,
    Event,
    ShardGroup,
    StepTrace,
    StorageEvents,
    Timeline,
    trace_blocks,
)
from octavo.planner.trace import Stack
from octavo.runtime.blocks import find_blocks

CPU = torch.device("cpu")
STEPS = {
    "bf16": {"level": "bf16"},
    "whole logits": {"chunked": False, "vocabulary": 4000},
    "torch.optim": {"optimizer": functools.partial(torch.optim.AdamW, foreach=True)},
    "recomputed": {"recompute": True},
    "accumulated": {"accumulated": True},
    "all": {"level": "fp8+activations+optimizer", "recompute": True},
}


def run_step(blocks, *, level="fp8", chunked=True, vocabulary=500, optimizer=octavo.AdamW, recompute=False,
             accumulated=False):  # fmt: skip
    model = llama(num_hidden_layers=blocks, vocab_size=vocabulary, max_position_embeddings=320).bfloat16()
    if chunked:
        chunked_loss(model)
    with fake_tensors() as mode:
        copy = fake_copy(model, mode, CPU)
        octavo.convert(copy, precision=octavo.Precision.level(level), verbose=False)
        for block in find_blocks(copy) if recompute else ():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        ids = torch.zeros(2, 256, dtype=torch.int64)
        batch, config = {"input_ids": ids, "labels": ids, "use_cache": False}, StepConfig(micro_batches=1 + accumulated)
        return trace_step(copy, batch, optimizer(copy.parameters()), default_loss, config, 512)


NOTHING = ShardGroup(gathered=0, gradients=0, reduced=0)


def as_step(events):
    return StepTrace(events=events, tokens=1, block=NOTHING, rest=NOTHING)


def few_blocks(few, *more, extra):
    """What steps of two blocks of each stack, and of one more of each, say of all."""
    steps = {(): few} | {(index,): step for index, step in enumerate(more)}
    stacks = [Stack(str(index), "x" * (2 + n), 2) for index, n in enumerate(extra)]

    def trace(counts):
        return steps[tuple(i for i, count in enumerate(counts.values()) if count == 3)] if counts else few

    whole = trace_blocks(trace, stacks)
    return whole if whole.stacks else None


def grown(*steps, extra):
    return few_blocks(*steps, extra=extra).series


@pytest.mark.slow
@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_eleven_blocks_from_two_and_three(options):
    few, more, whole = (run_step(blocks, **options) for blocks in (2, 3, 11))
    assert grown(few, more, extra=[9]).peak == whole.events.series.peak


def test_the_worst_moment_of_many_blocks_need_not_be_that_of_few():
    """Logits decide for two blocks, activations or gradients for many."""
    few, more = (run_step(blocks, chunked=False, vocabulary=4000) for blocks in (2, 3))
    at_peak = few.events.series.merge(BLOCK_GRADIENTS, GRADIENTS).peak.bytes
    assert at_peak[TEMPORARIES] > at_peak[ACTIVATIONS] and not at_peak[GRADIENTS]
    many = grown(few, more, extra=[200]).peak
    assert many.bytes[ACTIVATIONS] > many.bytes[TEMPORARIES]


def events(changes, backward_start, backward_end):
    listed = [Event("temporaries", change, "") for change in changes]
    forward, backward, after = listed[1:backward_start], listed[backward_start:backward_end], listed[backward_end:]
    return as_step(StorageEvents(held={"held": changes[0]}, forward=forward, backward=backward, after=after))


def test_steps_that_differ_by_more_than_one_block_are_no_basis():
    few, more = events([9, 1, 2, 2, 3, -3, -2, -2, -1], 5, 9), events([9, 1, 2, 2, 2, 3, -3, -2, -2, -2, -1], 6, 11)
    assert grown(few, more, extra=[10]).peak.total == 9 + 1 + 12 * 2 + 3
    other = events([9, 1, 2, 2, 2, 4, -4, -2, -2, -2, -1], 6, 11)  # the last one takes more, too
    assert few_blocks(few, other, extra=[10]) is None


def test_two_stacks_grow_independently():
    towers = [9, 1, 2, 2, 5, 4, 4, 6, -6, -4, -4, -5, -2, -2, -1]
    few = events(towers, 8, 15)
    first = events([9, 1, 2, 2, 2, 5, 4, 4, 6, -6, -4, -4, -5, -2, -2, -2, -1], 9, 17)
    second = events([9, 1, 2, 2, 5, 4, 4, 4, 6, -6, -4, -4, -4, -5, -2, -2, -1], 9, 17)
    series = grown(few, first, second, extra=[10, 3])
    assert series.peak.total == 9 + 1 + 12 * 2 + 5 + 5 * 4 + 6
    assert series.table[-1].sum() == 9 and len(series.phases) == len(towers) + 2 * (10 + 3)


def test_what_two_stacks_add_is_not_taken_for_one(monkeypatch):
    """Where both run short for one batch, and one has to run whole for another."""

    traced = []

    def trace(workload, stage, counts, size):
        traced.append(counts)
        if size == 5 and max(counts.values(), default=8) < 8:
            raise ValueError("a tower is read at a block by its number")
        pair = [size] * (2 * counts.get("a", 8)), [3 * size] * (2 * counts.get("b", 8))
        forward = [change for part in pair for change in part]
        changes = [9, *forward, *(-change for change in reversed(forward))]
        return events(changes, 1 + len(forward), len(changes))

    stacks = [Stack(name, [f"{name}.{index}" for index in range(8)], 2) for name in "ab"]
    monkeypatch.setattr("octavo.planner.prediction.equal_stacks", lambda model, plan: stacks)
    workload = Workload(
        model=None, stages=[Stage(model=nn.Identity())], plan=Plan({}), step_config=StepConfig(), sequences=1,
        trace_step=trace, extrapolates=True,
    )  # fmt: skip
    assert [workload.memory(size).peak for size in (1, 2, 5)] == [
        trace(None, None, {}, size).events.series.peak.total for size in (1, 2, 5)
    ]
    assert {"a": 2, "b": 8} in traced


# --- the timeline of storages: what lives when, what it was for, and the peak of PyTorch's own tracker ---


KILO = 256 * 4
"""Bytes of 256 float32 numbers."""


def largest(timeline):
    return timeline.events().series.largest


def peak_of(timeline):
    sample = timeline.events().series.peak
    return sample.phase, {kind: size for kind, size in sample.bytes.items() if size}


def followed_weight():
    weight, timeline = torch.nn.Parameter(torch.ones(256)), Timeline()
    timeline.label([weight], "parameters")
    weight.register_post_accumulate_grad_hook(lambda p: timeline.relabel([p.grad], GRADIENTS))
    return weight, timeline


def test_a_step_by_hand():
    weight, timeline = followed_weight()
    with timeline:
        timeline.set_phase("forward")
        passing = torch.zeros(4 * 256)  # gone before the next
        del passing
        y = weight.exp()  # exp keeps its output
        loss = y.sum()
        loss.backward()
        del y, loss
    # Alive when backward begins: y, the sum, and the 1 that backward starts from.
    sizes = {"parameters": KILO, GRADIENTS: KILO, ACTIVATIONS: KILO + 8, TEMPORARIES: 4 * KILO}
    assert largest(timeline) == sizes
    assert peak_of(timeline) == ("forward", {"parameters": KILO, TEMPORARIES: 4 * KILO})


def test_what_is_held_has_one_name_and_views_are_their_storage():
    x = torch.zeros(256)
    timeline = Timeline()
    timeline.label([x, x[:3]], "batch")
    timeline.label([x], "parameters")
    with timeline:
        x.view(16, 16).t()
        x.add_(1)
    assert peak_of(timeline) == ("", {"batch": KILO})


def test_gradients_of_an_earlier_micro_batch_are_no_activations():
    weight, timeline = followed_weight()
    with timeline:
        for _ in range(3):
            weight.exp().sum().backward()
    assert largest(timeline)[GRADIENTS] == KILO
    assert largest(timeline)[ACTIVATIONS] == KILO + 8


@pytest.mark.parametrize("faked", [True, False], ids=["fake", "real"])
def test_the_peak_is_that_of_pytorchs_memory_tracker(faked):
    real = llama(num_hidden_layers=3).bfloat16()

    def peaks(mode):
        model = real if mode is None else fake_copy(real, mode, CPU)
        ids = torch.zeros(2, 32, dtype=torch.int64)
        timeline, tracker = Timeline(), MemTracker()
        timeline.label([*model.parameters(), *model.buffers(), ids], "held")
        tracker.track_external(model, ids)
        with timeline, tracker:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return timeline, tracker.get_tracker_snapshot("peak")[CPU]["Total"]

    if faked:
        with fake_tensors() as mode:
            ours, theirs = peaks(mode)
    else:
        ours, theirs = peaks(None)
    assert ours.events().series.peak.total == theirs
