"""Memory extrapolated from two and three blocks equals, to the byte, that of the whole model."""

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from models import llama
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.nn.causal import chunked_loss
from octavo.planner.fake import fake_copy, fake_tensors
from octavo.planner.memory_extrapolation import extrapolate_blocks, repeat_block
from octavo.planner.model_memory import default_loss, make_gradients, make_states, trace_step
from octavo.planner.step import StepConfig
from octavo.planner.timeline import ACTIVATIONS, GRADIENTS, TEMPORARIES, StorageEvents, Timeline
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
    model = llama(num_hidden_layers=blocks, vocab_size=vocabulary, max_position_embeddings=256).bfloat16()
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
        ids = torch.zeros(2, 256, dtype=torch.int64)
        with timeline:
            copy(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            timeline.set_phase("optimizer step")
            if not isinstance(stepper, octavo.AdamW):
                stepper.step()
        return timeline.events()


def traced_events(blocks, *, level="fp8", recompute=False, micro_batches=1):
    """Events of the step that octavo.plan traces, of a model whose first block is larger."""
    model = llama(num_hidden_layers=blocks, max_position_embeddings=256).bfloat16()
    model.model.layers[0].mlp = nn.Sequential(nn.Linear(64, 320), nn.GELU(), nn.Linear(320, 64)).bfloat16()
    with fake_tensors() as mode:
        copy = fake_copy(model, mode, CPU)
        octavo.convert(copy, precision=octavo.Precision.level(level), verbose=False)
        for block in find_blocks(copy) if recompute else ():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        batch = {"input_ids": torch.zeros(2, 256, dtype=torch.int64), "use_cache": False}
        batch["labels"] = batch["input_ids"]
        config = StepConfig(micro_batches=micro_batches)
        return trace_step(copy, batch, octavo.AdamW(copy.parameters()), default_loss, config, 512).events


def listed(events):
    return list(zip(events.changes, events.kinds, events.phases, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options", [{}, {"level": "fp8+activations", "recompute": True}, {"level": "bf16", "micro_batches": 2}], ids=str
)
def test_one_step_of_three_equal_blocks_gives_every_event_of_more_and_of_fewer(options):
    three = traced_events(4, **options)
    for blocks in (3, 7):
        expected, actual = traced_events(blocks, **options), repeat_block(three, blocks - 4)
        for name in ("step_start", "backward_start", "backward_end"):
            assert getattr(actual, name) == getattr(expected, name), name
        begin = expected.step_start
        assert listed(actual)[begin:] == listed(expected)[begin:]
        assert Counter(listed(actual)[:begin]) == Counter(listed(expected)[:begin])


@pytest.mark.thorough
def test_blocks_whose_events_do_not_repeat_are_no_basis():
    three = traced_events(4)
    begin, length = three.last_blocks.forward
    changes = list(three.changes)
    changes[begin + 3 * length // 2] += 512  # the middle block differs from both others
    assert repeat_block(three, 1) and not repeat_block(replace(three, changes=changes), 1)
    assert repeat_block(replace(three, backward_end=three.backward_end - 1), 1) is None  # something follows backward
    assert repeat_block(replace(three, last_blocks=None), 1) is None


@pytest.mark.slow
@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_eleven_blocks_from_two_and_three(options):
    few, more, whole = (run_step(blocks, **options) for blocks in (2, 3, 11))
    predicted = extrapolate_blocks(few, more, 9).peak
    assert predicted == whole.series.peak


def test_the_worst_moment_of_many_blocks_need_not_be_that_of_few():
    """Logits decide for two blocks, activations or gradients for many."""
    few, more = (run_step(blocks, chunked=False, vocabulary=4000) for blocks in (2, 3))
    at_peak = few.series.peak.bytes
    assert at_peak[TEMPORARIES] > at_peak[ACTIVATIONS] and not at_peak[GRADIENTS]
    many = extrapolate_blocks(few, more, 200).peak
    assert many.bytes[ACTIVATIONS] > many.bytes[TEMPORARIES]


def events(changes, backward_start, backward_end):
    kinds = ["held" if index == 0 else "temporaries" for index in range(len(changes))]
    return StorageEvents(
        kinds=kinds,
        changes=changes,
        phases=[""] * len(changes),
        step_start=1,
        backward_start=backward_start,
        backward_end=backward_end,
    )


def test_steps_that_differ_by_more_than_one_block_are_no_basis():
    regular = events([9, 1, 2, 2, 3, -3, -2, -2, -1], 5, 9), events([9, 1, 2, 2, 2, 3, -3, -2, -2, -2, -1], 6, 11)
    assert extrapolate_blocks(*regular, 10).peak.total == 9 + 1 + 12 * 2 + 3
    other = events([9, 1, 2, 2, 2, 4, -4, -2, -2, -2, -1], 6, 11)  # the last one takes more, too
    assert extrapolate_blocks(regular[0], other, 10) is None
