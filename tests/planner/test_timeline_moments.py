"""Steps of models with many equal blocks, from those with two and three: to the byte those that were followed whole."""

import functools

import pytest
import torch
from models import llama
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.inspect.memory import make_gradients, make_states
from octavo.nn.causal import chunked_loss
from octavo.planner.fake import fake_copy, fake_tensors
from octavo.planner.moments import moments, of_more_blocks
from octavo.planner.timeline import ACTIVATIONS, GRADIENTS, TEMPORARIES, Line, Timeline
from octavo.runtime.blocks import find_blocks

CPU = torch.device("cpu")
STEPS = {
    "bf16": {"level": "bf16"},
    "whole logits": {"chunked": False, "vocabulary": 4000},
    "torch.optim": {"optimizer": functools.partial(torch.optim.AdamW, foreach=True)},
    "recomputed": {"recompute": True},
    "accumulated": {"accumulated": True},
    "all": {"level": "O1+act+opt", "recompute": True},
}


def followed(blocks, *, level="O1", chunked=True, vocabulary=500, optimizer=octavo.AdamW, recompute=False,
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
        timeline.hold(copy.parameters(), "parameters")
        timeline.hold(make_states(stepper), "states")
        if accumulated:
            timeline.are_gradients(make_gradients(stepper))
        timeline.follow(copy)
        ids = torch.zeros(2, 256, dtype=torch.int64)
        with timeline:
            copy(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            timeline.phase("optimizer step")
            if not isinstance(stepper, octavo.AdamW):
                stepper.step()
        return timeline.line(), timeline.peak()


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_eleven_blocks_from_two_and_three(options):
    (few, _), (more, _), (whole, (phase, at_peak)) = (followed(blocks, **options) for blocks in (2, 3, 11))
    found = of_more_blocks(few, more, 9).worst
    assert {kind: size for kind, size in found.bytes.items() if size} == at_peak
    assert found.phase == phase == moments(whole).worst.phase
    assert moments(whole).worst.total == found.total == sum(at_peak.values())


def test_the_worst_moment_of_many_blocks_need_not_be_that_of_few():
    """Logits decide for two blocks, activations or gradients for many."""
    (few, (_, at_peak)), (more, _) = (followed(blocks, chunked=False, vocabulary=4000) for blocks in (2, 3))
    assert at_peak[TEMPORARIES] > at_peak[ACTIVATIONS] and GRADIENTS not in at_peak
    many = of_more_blocks(few, more, 200).worst
    assert many.bytes[ACTIVATIONS] > many.bytes[TEMPORARIES]


def line(changes, turned, ended):
    kinds = ["held" if index == 0 else "temporaries" for index in range(len(changes))]
    return Line(kinds=kinds, changes=changes, phases=[""] * len(changes), began=1, turned=turned, ended=ended)


def test_steps_that_differ_by_more_than_one_block_are_no_basis():
    regular = line([9, 1, 2, 2, 3, -3, -2, -2, -1], 5, 9), line([9, 1, 2, 2, 2, 3, -3, -2, -2, -2, -1], 6, 11)
    assert of_more_blocks(*regular, 10).worst.total == 9 + 1 + 12 * 2 + 3
    other = line([9, 1, 2, 2, 2, 4, -4, -2, -2, -2, -1], 6, 11)  # the last one takes more, too
    assert of_more_blocks(regular[0], other, 10) is None
