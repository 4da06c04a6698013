"""Simulate the schedules of `torch.distributed.pipelining`: when each stage computes, and what it holds meanwhile.

    F  forward of a micro-batch        after F of the stage before it, and its message
    B  backward                        after B of the stage behind it, and its message
    I  gradients of inputs only        as B; half of its time
    W  gradients of weights            after I; the other half

Each rank computes its actions in the order that torch's schedule gives them (`pipeline_order`), none at the same time
as another. Activations of a micro-batch are held from F to B, or to W.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from octavo.planner.collective_cost import GPUS_PER_MACHINE, STAGES, Sent, links_of
from octavo.planner.devices import Gpu
from octavo.planner.step import PARTS, StepConfig, StepTime


@dataclass(frozen=True)
class Action:
    """One computation of a rank: "F", "B", "I" or "W" of a stage and a micro-batch."""

    kind: str
    stage: int
    micro_batch: int


@cache
def schedule_actions(schedule: str, ranks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank, in order."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind: Any = get_schedule_class(schedule)
    single = issubclass(kind, PipelineScheduleSingle)
    count = ranks if single else 2 * ranks
    own = [0] if single else [0, count - 1] if schedule in ("ZBVZeroBubble", "DualPipeV") else [0, ranks]
    stages = [
        SimpleNamespace(
            num_stages=count, group_size=ranks, group_rank=0, stage_index=index, is_first=index == 0,
            is_last=index == count - 1, has_backward=True, stage_index_to_group_rank=None, submod=None,
        )
        for index in own
    ]  # fmt: skip
    order = kind(stages[0] if single else stages, micro_batches).pipeline_order
    rows = [list(_actions(order[rank])) for rank in range(ranks)]
    if schedule == "1F1B":  # torch 2.13 numbers the forwards of the last rank from 1, and runs them from 0
        forwards = iter(range(micro_batches))
        rows[-1] = [Action("F", a.stage, next(forwards)) if a.kind == "F" else a for a in rows[-1]]
    return tuple(map(tuple, rows))


def _actions(row: Sequence[Any]) -> Iterator[Action]:
    for action in row:
        if action is None:
            continue
        if action.sub_actions:
            yield from _actions(action.sub_actions)
        elif action.computation_type.value in "FBIW":
            yield Action(action.computation_type.value, action.stage_index, action.microbatch_index)


def simulate(
    actions: Sequence[Sequence[Action]], forward: Sequence[float], backward: Sequence[float], message: float = 0.0
) -> float:
    """Return the seconds until all ranks have finished."""
    owner = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    ends: dict[tuple[str, int, int], float] = {}
    last, clocks, positions = len(forward) - 1, [0.0] * len(actions), [0] * len(actions)

    def ready(action: Action) -> float | None:
        """When the inputs of an action have arrived; None if they are not computed yet."""
        stage, batch = action.stage, action.micro_batch
        if action.kind == "W":
            return ends.get(("I", stage, batch))
        if action.kind == "F":
            source = None if stage == 0 else ("F", stage - 1, batch)
        else:
            source = ("F", stage, batch) if stage == last else ("∂", stage + 1, batch)
        if source is None:
            return 0.0
        sent = ends.get(source)
        return None if sent is None else sent + (message if owner[source[1]] != owner[stage] else 0.0)

    while any(position < len(row) for position, row in zip(positions, actions, strict=True)):
        moved = False
        for rank, row in enumerate(actions):
            while positions[rank] < len(row) and (start := ready(action := row[positions[rank]])) is not None:
                share = {"F": 1.0, "B": 1.0, "I": 0.5, "W": 0.5}[action.kind]
                seconds = share * (forward if action.kind == "F" else backward)[action.stage]
                clocks[rank] = max(clocks[rank], start) + seconds
                ends[action.kind, action.stage, action.micro_batch] = clocks[rank]
                if action.kind in "BI":
                    ends["∂", action.stage, action.micro_batch] = clocks[rank]
                positions[rank] += 1
                moved = True
        assert moved, "the schedule waits for itself"
    return max(clocks)


def most_in_flight(row: Sequence[Action]) -> dict[tuple[str, int], dict[int, int]]:
    """Return the numbers of other micro-batches whose activations a rank holds, by stage, when it holds most: for each
    ("F", stage), during a forward of that stage; for ("B", stage), during a backward.
    """
    held: dict[int, int] = {action.stage: 0 for action in row}
    most: dict[tuple[str, int], dict[int, int]] = {}
    for action in row:
        others = dict(held)
        if action.kind != "F":
            others[action.stage] -= 1
        key = ("F" if action.kind == "F" else "B", action.stage)
        if key not in most or sum(others.values()) > sum(most[key].values()):
            most[key] = others
        held[action.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
    return most


def pipeline_time(gpu: Gpu, stages: Sequence[StepTime], step_config: StepConfig, message_bytes: float) -> StepTime:
    """Predict the time of a step of a pipeline from the times of its stages, each as if it were alone."""
    # The parts are those of the rank that computes longest, and the bubble is the rest of the step.
    ranks, micro_batches = step_config.pp, step_config.micro_batches
    actions = schedule_actions(step_config.schedule, ranks, micro_batches)
    links, apart = links_of(gpu), step_config.gpus // ranks
    message = message_bytes / (links.inside if apart * ranks <= GPUS_PER_MACHINE else links.between)
    seconds = simulate(actions, [s.forward for s in stages], [s.backward for s in stages], message)
    totals = []
    for row in actions:
        own = sorted({action.stage for action in row})
        sums = {part: sum(getattr(stages[index], part) for index in own) for part in PARTS}
        totals.append((sum(sums.values()) - sums["optimizer"], own, sums))
    busiest, own, sums = max(totals, key=lambda total: total[0])
    rows: dict[tuple[str, bool], Sent] = {}
    for sent in (row for index in own for row in stages[index].sent):
        earlier = rows.get((sent.kind, sent.backward))
        rows[sent.kind, sent.backward] = sent if earlier is None else replace(
            sent, bytes=sent.bytes + earlier.bytes, seconds=sent.seconds + earlier.seconds
        )  # fmt: skip
    owner = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    ahead, behind = (
        max(
            sum(owner[i] != owner[i + step] for i in {a.stage for a in row} if 0 <= i + step < len(stages))
            for row in actions
        )
        for step in (1, -1)
    )
    between = [
        Sent(kind=STAGES, bytes=message_bytes, seconds=message, backward=bool(back)).times(count * micro_batches)
        for back, count in enumerate((ahead, behind))
    ]
    first = stages[0]
    return replace(
        first, **(sums | {"bubble": max(0.0, seconds - busiest)}),
        flops=sum(stage.flops for stage in stages) / ranks, forward=0.0, backward=0.0,
        sent=(*rows.values(), *between),
    )  # fmt: skip
