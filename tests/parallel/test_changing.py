"""A layer that changes its recipe while it is trained: on ranks as on one process, however its weight was gathered."""

from collections import namedtuple

import pytest
import torch
from training import alone, make, one_thread, train, whole

import octavo
from octavo.nn import change_recipe, equalized
from octavo.parallel import Parallel, parallelize
from octavo.parallel.fsdp import parameters_in_fp8

pytestmark = pytest.mark.dist

LAYERS = ("blocks.0.up", "blocks.1.down")


Run = namedtuple("Run", "losses weights gathered equalized report")


def changing_job(settings, begin, *others, **model):
    """A run of 3 steps in one recipe, and 3 with two layers in each other one; what is gathered in FP8 in each."""
    model = parallelize(make(begin, **model), Parallel(**settings))
    inner = getattr(model, "module", model)
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses, gathered = train(model, 3, stepper=stepper), [set(parameters_in_fp8(inner))]
    for number, recipe in enumerate(others, 1):
        for name in LAYERS:
            change_recipe(inner, name, recipe, reason="a test")
        losses += train(model, 3, first=3 * number, stepper=stepper)
        gathered.append(set(parameters_in_fp8(inner)))
    return Run(losses, whole(model), gathered, set(equalized.state_dict(inner)), str(octavo.report(inner)))


def changed_alone(begin, end, **model):
    """The same of one process, for two ranks."""

    def between(model):
        for name in LAYERS:
            change_recipe(model, name, end, reason="a test")

    with one_thread():
        return alone(2, steps=6, recipe=begin, between={3: between}, **model)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("begin", "end", "mode"),
    [
        ("tensorwise", "rowwise", "gather"), ("tensorwise", None, "gather"), ("rowwise", "blockwise", "gather"),
        ("rowwise", "tensorwise", "ddp"), ("tensorwise", None, "off"),
    ],
)  # fmt: skip
def test_a_layer_changes(gloo, begin, end, mode):
    settings = {"dp_replicate": 2, "dp_shard": 1} if mode == "ddp" else {"fp8_comm": mode}
    expected, parameters = changed_alone(begin, end)
    ranks = gloo.run(changing_job, 2, settings, begin, end)
    assert [rank.losses for rank in ranks] == expected
    for rank in ranks:
        assert all(torch.equal(rank.weights[name], parameters[name]) for name in parameters)
        if mode == "gather":
            before, after = rank.gathered
            assert {f"{name}.weight" for name in LAYERS} <= before
            assert before - after == ({f"{name}.weight" for name in LAYERS} if end in (None, "blockwise") else set())
        assert "a test" in rank.report


def test_a_layer_of_uneven_shards_changes(gloo):
    expected, _ = changed_alone("rowwise", None, hidden=63)
    ranks = gloo.run(changing_job, 2, {"fp8_comm": "gather"}, "rowwise", None, hidden=63)
    assert [rank.losses for rank in ranks] == expected


def test_a_shared_weight_is_gathered_plain_while_its_layers_differ(gloo):
    for rank in gloo.run(changing_job, 2, {"fp8_comm": "gather"}, "rowwise", "blockwise", ties="blocks"):
        before, after = rank.gathered
        assert "blocks.0.up.weight" in before and "blocks.0.up.weight" not in after
