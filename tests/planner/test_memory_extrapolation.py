"""Memory extrapolated from two and three blocks equals, to the byte, that of the whole model."""

import functools
from dataclasses import replace

import pytest
import torch
from models import llama
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.nn.causal import chunked_loss
from octavo.planner.fake import fake_copy, fake_tensors
from octavo.planner.memory_extrapolation import grown, growth, growth_of
from octavo.planner.model_memory import make_gradients, make_states
from octavo.planner.sharded_memory import ShardGroup
from octavo.planner.stacks import Stack
from octavo.planner.step import StepConfig
from octavo.planner.step_memory import StepTrace, predict_memory
from octavo.planner.timeline import ACTIVATIONS, GRADIENTS, TEMPORARIES, Event, StorageEvents, Timeline
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
             accumulated=False, length=256):  # fmt: skip
    model = llama(num_hidden_layers=blocks, vocab_size=vocabulary, max_position_embeddings=320).bfloat16()
    if chunked:
        chunked_loss(model)
    with fake_tensors() as mode:
        copy = fake_copy(model, mode, CPU)
        octavo.convert(copy, precision=octavo.Precision.level(level), verbose=False)
        for block in find_blocks(copy) if recompute else ():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        stepper = optimizer(copy.parameters())
        timeline = Timeline(512)
        timeline.label(copy.parameters(), "parameters")
        timeline.label(make_states(stepper), "states")
        if accumulated:
            timeline.label_gradients(make_gradients(stepper))
        timeline.follow(copy)
        ids = torch.zeros(2, length, dtype=torch.int64)
        with timeline:
            copy(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            timeline.set_phase("optimizer step")
            if not isinstance(stepper, octavo.AdamW):
                stepper.step()
        return timeline.events()


@pytest.mark.slow
@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_eleven_blocks_from_two_and_three(options):
    few, more, whole = (run_step(blocks, **options) for blocks in (2, 3, 11))
    predicted = grown(few, [(growth(few, more), 9)]).peak
    assert predicted == whole.series.peak


def test_the_worst_moment_of_many_blocks_need_not_be_that_of_few():
    """Logits decide for two blocks, activations or gradients for many."""
    few, more = (run_step(blocks, chunked=False, vocabulary=4000) for blocks in (2, 3))
    at_peak = few.series.peak.bytes
    assert at_peak[TEMPORARIES] > at_peak[ACTIVATIONS] and not at_peak[GRADIENTS]
    many = grown(few, [(growth(few, more), 200)]).peak
    assert many.bytes[ACTIVATIONS] > many.bytes[TEMPORARIES]


def events(changes, backward_start, backward_end):
    listed = [Event("held" if index == 0 else "temporaries", change, "") for index, change in enumerate(changes)]
    return StorageEvents(events=listed, step_start=1, backward_start=backward_start, backward_end=backward_end)


def test_steps_that_differ_by_more_than_one_block_are_no_basis():
    few, more = events([9, 1, 2, 2, 3, -3, -2, -2, -1], 5, 9), events([9, 1, 2, 2, 2, 3, -3, -2, -2, -2, -1], 6, 11)
    assert grown(few, [(growth(few, more), 10)]).peak.total == 9 + 1 + 12 * 2 + 3
    other = events([9, 1, 2, 2, 2, 4, -4, -2, -2, -2, -1], 6, 11)  # the last one takes more, too
    assert growth(few, other) is None


@pytest.mark.parametrize("options", [STEPS["bf16"], STEPS["all"]], ids=["bf16", "all"])
def test_another_batch_from_one_step(options):
    """Each block of forward and backward repeats the one before, so two blocks show what all add."""
    few, more = (run_step(blocks, **options) for blocks in (2, 3))
    longer, whole = (run_step(blocks, length=320, **options) for blocks in (2, 11))
    again = growth_of(longer, few, growth(few, more))
    assert grown(longer, [(again, 9)]).peak == whole.series.peak
    assert grown(longer, [(growth(few, more), 9)]).peak != whole.series.peak
    at = growth(few, more).inserted[0].source
    other = [*longer.events[:at], longer.events[at]._replace(kind="of another kind"), *longer.events[at + 1 :]]
    assert growth_of(replace(longer, events=other), few, growth(few, more)) is None
    unlike = replace(growth(few, more), inserted=[replace(part, source=None) for part in growth(few, more).inserted])
    assert growth_of(longer, few, unlike) is None
    assert growth_of(replace(longer, backward_end=longer.backward_end - 1), few, growth(few, more)) is None


def test_two_stacks_grow_independently():
    towers = [9, 1, 2, 2, 5, 4, 4, 6, -6, -4, -4, -5, -2, -2, -1]
    few = events(towers, 8, 15)
    first = events([9, 1, 2, 2, 2, 5, 4, 4, 6, -6, -4, -4, -5, -2, -2, -2, -1], 9, 17)
    second = events([9, 1, 2, 2, 5, 4, 4, 4, 6, -6, -4, -4, -4, -5, -2, -2, -1], 9, 17)
    series = grown(few, [(growth(few, first), 10), (growth(few, second), 3)])
    assert series.peak.total == 9 + 1 + 12 * 2 + 5 + 5 * 4 + 6
    assert series.table[-1].sum() == 9 and len(series.phases) == len(towers) + 2 * (10 + 3)


def test_what_two_stacks_add_is_not_taken_for_one():
    """Where both run short for one batch, and one has to run whole for another."""

    traced = []

    def trace(counts, size):
        traced.append(counts)
        if size == 5 and max(counts.values(), default=8) < 8:
            raise ValueError("a tower is read at a block by its number")
        pair = [size] * (2 * counts.get("a", 8)), [3 * size] * (2 * counts.get("b", 8))
        forward = [change for part in pair for change in part]
        changes = [9, *forward, *(-change for change in reversed(forward))]
        parts = {"block": ShardGroup(gathered=0, gradients=0, reduced=0)}
        return StepTrace(
            events=events(changes, 1 + len(forward), len(changes)), tokens=size, rest=parts["block"], **parts
        )

    stacks = [Stack(name, [f"{name}.{index}" for index in range(8)], 2) for name in "ab"]
    plan = predict_memory(trace, 1, StepConfig(), blocks=8, stacks=stacks)
    assert [plan.replan(size).peak for size in (1, 2, 5)] == [
        trace({}, size).events.series.peak.total for size in (1, 2, 5)
    ]
    assert {"a": 2, "b": 8} in traced
