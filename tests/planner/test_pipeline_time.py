"""Pipelines by hand: what ranks hold, when they finish, what they send."""

from dataclasses import replace

import pytest

from octavo.planner.devices import DEVICES
from octavo.planner.step import STAGES, Action, StepConfig, StepTime, most_in_flight, pipeline_time, simulate

GPU = DEVICES["h100"]
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
    link = GPU.link if gpus == 2 else GPU.network
    time = pipeline_time(GPU, [STAGE] * stages, config, size)
    sent = {s.backward: s for s in time.sent if s.kind == STAGES}
    for direction in (False, True):
        assert sent[direction].bytes == 4 * ahead * size
        assert sent[direction].seconds == pytest.approx(4 * ahead * size / link)
    assert time.flops == stages * 10.0 / 2
    assert time.optimizer == stages / 2 * 5.0
    if schedule == "1F1B":  # one micro-batch of the other rank, and its two messages, in 12 seconds of computing
        assert time.bubble == pytest.approx(3.0, rel=1e-3)
        slow = replace(STAGE, linears=24.0, forward=2.0, backward=4.0)
        assert pipeline_time(GPU, [STAGE, slow], config, 0.0).linears == 24.0
