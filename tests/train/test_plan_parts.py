"""The memory of a GPU of a pipeline, by hand: what it holds beside one micro-batch of a stage."""

import pytest
from torch import nn

from octavo.numerics.plan import Plan
from octavo.planner.memory_plan import MemoryPlan
from octavo.planner.step import StepConfig
from octavo.planner.timeline import ACTIVATIONS, BATCH, GATHERED, PARAMETERS, TEMPORARIES
from octavo.train import run_plan
from octavo.train.run_plan import Stage, TraceCache, stage_memory

ACTIVATIONS_OF = [1000, 700, 700, 500]
HIDDEN = 10


def beside_of_stages(monkeypatch, schedule, count, micro_batches):
    """What each stage is planned with, by index; the plan has the bytes of all of them."""
    beside_of = {}

    def predict(trace, sequences, config, *, beside, **_):
        index = trace(None, sequences)
        if beside is not None:
            beside_of.setdefault(index, beside)
        largest = {
            PARAMETERS: 10**4 * (index + 1), ACTIVATIONS: ACTIVATIONS_OF[index], TEMPORARIES: 7, GATHERED: 0, BATCH: 0,
        }  # fmt: skip
        peak = {"all": 1 if beside is None else 1 + beside.forward}
        return MemoryPlan(batch=sequences, tokens=1, phase="", at_peak=peak, largest=largest, messages=((),))

    monkeypatch.setattr(run_plan, "predict_memory", predict)
    stages = []
    for index in range(count):
        model = nn.Module()
        # Sizes that differ: stages of equal blocks share their plan.
        model.layers = nn.ModuleList([nn.ModuleDict({"linear": nn.Linear(8, 8 + index)})])
        stages.append(Stage(model=model, index=index, count=count))
    plan = stage_memory(
        stages, lambda stage, *_: stage.index, Plan(decisions={}), 2,
        StepConfig(gpus=2, pp=2, schedule=schedule, micro_batches=micro_batches),
        extrapolates=False, offloaded=False, cache=TraceCache(), settings="", message=lambda size: (HIDDEN, 3),
    )  # fmt: skip
    return beside_of, plan


@pytest.mark.parametrize(("schedule", "others"), [("1F1B", [1, 0]), ("GPipe", [3, 3])])
def test_activations_of_other_micro_batches(monkeypatch, schedule, others):
    beside, plan = beside_of_stages(monkeypatch, schedule, 2, 4)
    for index, count in enumerate(others):
        assert beside[index].forward == beside[index].backward == count * ACTIVATIONS_OF[index]
        assert beside[index].held[GATHERED] == 4 * HIDDEN  # buffers of all micro-batches, for one neighbour
    assert beside[0].held[BATCH] == 0 and beside[1].held[BATCH] == -HIDDEN
    assert plan.at_peak["all"] == 1 + max(c * a for c, a in zip(others, ACTIVATIONS_OF, strict=False))
    assert plan.stage_message == 3


def test_a_rank_holds_its_other_stages(monkeypatch):
    beside, _ = beside_of_stages(monkeypatch, "Interleaved1F1B", 4, 2)
    assert [beside[index].held[PARAMETERS] for index in range(4)] == [30000, 40000, 10000, 20000]
    for index in range(4):
        assert beside[index].held[ACTIVATIONS] == beside[index].held[TEMPORARIES] == 0
        assert beside[index].held[GATHERED] == 2 * HIDDEN * 3
    # Rank 0 runs both micro-batches through stage 0 before stage 2.
    assert beside[2].forward == 2 * ACTIVATIONS_OF[0] + ACTIVATIONS_OF[2]
