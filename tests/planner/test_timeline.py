"""The timeline of storages: what lives when, what it was for, and the same peak as PyTorch's own tracker."""

import pytest
import torch
from models import llama
from torch.distributed._tools.mem_tracker import MemTracker

from octavo.planner.fake import fake_copy, fake_tensors
from octavo.planner.timeline import ACTIVATIONS, GRADIENTS, TEMPORARIES, Timeline

KILO = 256 * 4
"""Bytes of 256 float32 numbers."""


def largest(timeline):
    return timeline.events().series.largest


def peak(timeline):
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
    assert peak(timeline) == ("forward", {"parameters": KILO, TEMPORARIES: 4 * KILO})


def test_what_is_held_has_one_name_and_views_are_their_storage():
    x = torch.zeros(256)
    timeline = Timeline()
    timeline.label([x, x[:3]], "batch")
    timeline.label([x], "parameters")
    with timeline:
        x.view(16, 16).t()
        x.add_(1)
    assert peak(timeline) == ("", {"batch": KILO})


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
        model = real if mode is None else fake_copy(real, mode, torch.device("cpu"))
        ids = torch.zeros(2, 32, dtype=torch.int64)
        timeline, tracker = Timeline(), MemTracker()
        timeline.label([*model.parameters(), *model.buffers(), ids], "held")
        tracker.track_external(model, ids)
        with timeline, tracker:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return timeline, tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]

    if faked:
        with fake_tensors() as mode:
            ours, theirs = peaks(mode)
    else:
        ours, theirs = peaks(None)
    assert ours.events().series.peak.total == theirs
